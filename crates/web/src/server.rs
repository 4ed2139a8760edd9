//! The half without rights. It asks the reader every second, keeps the history, and answers whoever connects.
//! Connections, requests and times are bounded. It ends when the reader does.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io,
    net::SocketAddr,
    os::{fd::AsFd, unix::net},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use hyper::{
    Method, Request as HttpRequest, StatusCode,
    body::{Bytes, Incoming},
    header::HOST,
};
use signal_hook::consts::{SIGINT, SIGTERM};
use tidegate_agent::rights::{self, Identity, NOBODY};
use tidegate_fleet::http::{Answer, JSON, PLAIN, answer, serve};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, UnixListener, UnixStream, unix::OwnedReadHalf},
    runtime,
    sync::{mpsc, oneshot},
    task::{LocalSet, spawn_local},
    time,
};

use crate::{
    link::{ANSWER_MAX, Head, Request},
    routes::{Route, State, is_own_name, route, secure},
};

/// Limits are read so often...
pub const EVERY: Duration = Duration::from_secs(1);
/// ... and then left alone for so many times as long as that took: reading takes a tenth of a CPU at most.
pub const REST: u32 = 9;
/// The most connections at a time, for each of socket and ports.
pub const CONNECTIONS_MAX: usize = 64;
/// Requests to the reader that wait.
const REQUESTS_MAX: usize = 64;
/// The reader has so long to look at a limit.
const PATIENCE: Duration = Duration::from_secs(8);

/// Why it could not begin, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("cannot listen at {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
}

type Waits = BTreeMap<String, Vec<oneshot::Sender<Result<Bytes, String>>>>;

/// What all tasks share.
struct Shared {
    state: RefCell<State>,
    /// Who waits for what the reader says of a limit.
    waits: RefCell<Waits>,
    requests: mpsc::Sender<Request>,
}

/// Serves until the reader ends. The link to that is standard input, the Unix socket standard output.
///
/// # Errors
/// [`ServerError`].
pub fn run(listen: &[SocketAddr]) -> Result<(), ServerError> {
    rights::give_up(Identity { uid: NOBODY, gid: NOBODY })?;
    // systemd and a terminal send these to both processes. The reader ends this one, and removes the socket.
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, Arc::default())?;
    }
    let link = net::UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let socket = net::UnixListener::from(io::stdout().as_fd().try_clone_to_owned()?);
    link.set_nonblocking(true)?;
    socket.set_nonblocking(true)?;
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        // First: once the link ends, the reader kills this process, and it could not say why it fails.
        let mut listeners = Vec::new();
        for &address in listen {
            let listener = TcpListener::bind(address).await;
            listeners.push(listener.map_err(|source| ServerError::Listen { address, source })?);
        }
        let (read, mut write) = UnixStream::from_std(link)?.into_split();
        let (requests, mut asked) = mpsc::channel(REQUESTS_MAX);
        let own_name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let shared = Rc::new(Shared {
            state: RefCell::new(State { host: own_name, ..State::default() }),
            waits: RefCell::default(),
            requests,
        });
        let here = Rc::clone(&shared);
        let by_socket =
            async move |request: &HttpRequest<Incoming>| respond(&here, request, false).await;
        spawn_local(serve(UnixListener::from_std(socket)?, CONNECTIONS_MAX, by_socket));
        for listener in listeners {
            let here = Rc::clone(&shared);
            let by_port =
                async move |request: &HttpRequest<Incoming>| respond(&here, request, true).await;
            spawn_local(serve(listener, CONNECTIONS_MAX, by_port));
        }
        spawn_local(async move {
            while let Some(request) = asked.recv().await {
                let Ok(mut line) = serde_json::to_vec(&request) else { continue };
                line.push(b'\n');
                if write.write_all(&line).await.is_err() {
                    return;
                }
            }
        });
        Ok(follow(&shared, BufReader::new(read)).await?)
    })
}

/// Asks for readings, and takes what the reader says.
async fn follow(shared: &Rc<Shared>, mut reader: BufReader<OwnedReadHalf>) -> io::Result<()> {
    let ask = async || shared.requests.send(Request::Status).await.is_ok();
    if !ask().await {
        return Ok(());
    }
    loop {
        let Some(head) = line(&mut reader).await? else { return Ok(()) };
        let Some(body) = line(&mut reader).await? else { return Ok(()) };
        let body = Bytes::from(body);
        match serde_json::from_slice(&head)? {
            Head::Status(head) => {
                let took = Duration::from_nanos(head.took_ns);
                shared.state.borrow_mut().read(head, body);
                again(shared, took);
            }
            Head::Failed(why) => {
                shared.state.borrow_mut().failed = Some(why);
                again(shared, Duration::ZERO);
            }
            Head::Limit(limit) => told(shared, &limit, &Ok(body)),
            Head::Refused { limit, why } => told(shared, &limit, &Err(why)),
        }
    }
}

/// Asks for the next reading when it is time.
fn again(shared: &Rc<Shared>, took: Duration) {
    let shared = Rc::clone(shared);
    spawn_local(async move {
        time::sleep(EVERY.saturating_sub(took).max(took * REST)).await;
        let _ = shared.requests.send(Request::Status).await;
    });
}

fn told(shared: &Shared, limit: &str, said: &Result<Bytes, String>) {
    let waiting = shared.waits.borrow_mut().remove(limit);
    for waits in waiting.into_iter().flatten() {
        let _ = waits.send(said.clone());
    }
}

/// A line without its end; `None` at the end.
async fn line(reader: &mut BufReader<OwnedReadHalf>) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    reader.take(ANSWER_MAX).read_until(b'\n', &mut line).await?;
    Ok((line.pop() == Some(b'\n')).then_some(line))
}

async fn respond(shared: &Shared, request: &HttpRequest<Incoming>, by_port: bool) -> Answer {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    let own = shared.state.borrow().host.clone();
    let mut answered = if by_port && !is_own_name(host, &own) {
        let why = format!("ask by an address, as localhost, or as {own}\n");
        answer(StatusCode::MISDIRECTED_REQUEST, PLAIN, why)
    } else if [Method::GET, Method::HEAD].contains(request.method()) {
        let found = route(&shared.state.borrow(), request.uri().path());
        match found {
            Route::Answer(answer) => answer,
            Route::Look(limit) => look(shared, limit).await,
        }
    } else {
        answer(
            StatusCode::METHOD_NOT_ALLOWED,
            PLAIN,
            "only GET and HEAD: nothing can be changed here\n",
        )
    };
    secure(&mut answered);
    answered
}

/// Has the reader look at a limit; who asks for the same one meanwhile gets the same answer.
async fn look(shared: &Shared, limit: String) -> Answer {
    let late = || answer(StatusCode::SERVICE_UNAVAILABLE, PLAIN, "no answer in time; ask again\n");
    let (tell, said) = oneshot::channel();
    let is_first = {
        let mut waits = shared.waits.borrow_mut();
        let waits = waits.entry(limit.clone()).or_default();
        // Who has asked and is gone waits no more.
        waits.retain(|waits| !waits.is_closed());
        waits.push(tell);
        waits.len() == 1
    };
    if is_first && shared.requests.try_send(Request::Limit(limit)).is_err() {
        return late();
    }
    match time::timeout(PATIENCE, said).await {
        Ok(Ok(Ok(body))) => answer(StatusCode::OK, JSON, body),
        Ok(Ok(Err(why))) => answer(StatusCode::CONFLICT, PLAIN, format!("{why}\n")),
        _ => late(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::StatusHead;

    /// A reader that is slow gets rest, and what it could not read leaves the last reading on the page.
    #[test]
    fn a_slow_reading_is_followed_by_rest_and_a_failed_one_leaves_the_last() {
        let mut runtime = runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let (requests, mut asked) = mpsc::channel(REQUESTS_MAX);
            let (state, waits) = (RefCell::default(), RefCell::default());
            let shared = Rc::new(Shared { state, waits, requests });
            let (mut reader, link) = UnixStream::pair().unwrap();
            let here = Rc::clone(&shared);
            spawn_local(async move { follow(&here, BufReader::new(link.into_split().0)).await });
            assert_eq!(asked.recv().await, Some(Request::Status));

            let reading = include_str!("snapshot/example.json");
            let reading: serde_json::Value = serde_json::from_str(reading).unwrap();
            let second = Duration::from_secs(1);
            let mut says = async |unix_ns: u64, took: Option<Duration>| {
                let (head, body) = match took {
                    Some(took) => {
                        let took_ns = took.as_nanos() as u64;
                        let head = StatusHead { unix_ns, took_ns, ..StatusHead::default() };
                        (Head::Status(head), reading.to_string())
                    }
                    None => (Head::Failed("no store".to_owned()), String::new()),
                };
                let head = serde_json::to_string(&head).unwrap();
                let before = time::Instant::now();
                reader.write_all(format!("{head}\n{body}\n").as_bytes()).await.unwrap();
                assert_eq!(asked.recv().await, Some(Request::Status));
                let state = shared.state.borrow();
                let shown = (state.head.unix_ns, state.failed.clone(), state.body.is_empty());
                (before.elapsed().as_secs(), shown)
            };
            let failed = || Some("no store".to_owned());
            assert_eq!(says(0, None).await, (1, (0, failed(), true)), "nothing was read yet");
            assert_eq!(says(1, Some(Duration::ZERO)).await, (1, (1, None, false)));
            assert_eq!(says(2, Some(3 * second)).await, (27, (2, None, false)), "a tenth of a CPU");
            assert_eq!(says(3, None).await, (1, (2, failed(), false)), "the last reading stays");
            assert_eq!(says(4, Some(Duration::ZERO)).await, (1, (4, None, false)));
        });
    }
}
