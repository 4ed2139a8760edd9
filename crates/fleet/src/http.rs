//! HTTP/1.1 on a Unix socket or a port: one server and one client for whatever of Tidegate is asked.
//! Connections are bounded, and one that says nothing is closed.

use std::{
    convert::Infallible,
    fs, io,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::Path,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::Semaphore,
    task, time,
};

use crate::discovery::http::{Asked, ask};

/// A connection is closed after so long.
pub const PATIENCE: Duration = Duration::from_secs(10);

pub const PLAIN: &str = "text/plain; charset=utf-8";
pub const JSON: &str = "application/json";

pub type Answer = Response<Full<Bytes>>;

/// Why a socket cannot be had, or nobody asked there.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// It does not have what was asked for.
    #[error("{0}")]
    Unknown(String),
    /// It does not do what it was asked to do.
    #[error("{path}: {why}")]
    Refused { path: String, why: String },
    /// A process answers there.
    #[error("{0}: another process answers there")]
    Taken(String),
    #[error("{0}: is no socket")]
    NoSocket(String),
    #[error("{path}: {source}")]
    Io { path: String, source: io::Error },
    #[error("{path}: {why}")]
    Answer { path: String, why: String },
}

/// Opens a socket that is its owner's alone. What a process left that is no more is removed.
///
/// # Errors
/// [`HttpError`].
pub fn bind(path: &Path) -> Result<std::os::unix::net::UnixListener, HttpError> {
    let name = || path.display().to_string();
    let error = |source| HttpError::Io { path: path.display().to_string(), source };
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(error)?;
    }
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => return Err(HttpError::NoSocket(name())),
        Ok(_) if std::os::unix::net::UnixStream::connect(path).is_ok() => {
            return Err(HttpError::Taken(name()));
        }
        Ok(_) => fs::remove_file(path).map_err(error)?,
        Err(_) => {}
    }
    // Nobody else may connect between the two calls: the mode is right from the start.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = std::os::unix::net::UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = bound.map_err(error)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(error)?;
    listener.set_nonblocking(true).map_err(error)?;
    Ok(listener)
}

/// Something that takes connections.
pub trait Listener {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + 'static;

    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>>;
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<UnixStream> {
        Ok(self.accept().await?.0)
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        Ok(self.accept().await?.0)
    }
}

/// Answers until it is dropped; within a [`task::LocalSet`].
pub async fn serve<A>(listener: impl Listener, connections_max: usize, answer: A)
where
    A: AsyncFn(&Request<Incoming>) -> Answer + 'static,
{
    let (room, answer) = (Arc::new(Semaphore::new(connections_max)), Rc::new(answer));
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        match listener.next().await {
            Ok(stream) => {
                let answer = Rc::clone(&answer);
                task::spawn_local(async move {
                    converse(stream, answer).await;
                    drop(permit);
                });
            }
            // Out of descriptors, for example: later is better than never.
            Err(_) => time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn converse<S, A>(stream: S, answer: Rc<A>)
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
    A: AsyncFn(&Request<Incoming>) -> Answer + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let answer = Rc::clone(&answer);
        async move { Ok::<_, Infallible>(answer(&request).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(PATIENCE).keep_alive(false);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let _ = time::timeout(PATIENCE, connection).await;
}

/// An answer of this type.
pub fn answer(status: StatusCode, kind: &str, body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    if let Ok(kind) = kind.parse() {
        response.headers_mut().insert("content-type", kind);
    }
    response
}

/// Asks who serves a socket, and waits for the answer; `None` if nobody does.
///
/// # Errors
/// [`HttpError`] if it answers with an error, or may not be asked.
pub fn request(path: &Path, method: Method, what: &str) -> Result<Option<Bytes>, HttpError> {
    let name = || path.display().to_string();
    let error = |source| HttpError::Io { path: name(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(error)?.block_on(async {
        let stream = match UnixStream::connect(path).await {
            Ok(stream) => stream,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                return Ok(None);
            }
            Err(e) => return Err(error(e)),
        };
        let asked =
            Asked { method, host: "localhost", path: what, token: None, body: String::new() };
        let answered = ask(stream, &asked, PATIENCE).await;
        let refuse = |why: String| HttpError::Answer { path: name(), why };
        let (status, body) = answered.map_err(|e| refuse(e.to_string()))?;
        if status.is_success() {
            return Ok(Some(body));
        }
        let why = String::from_utf8_lossy(&body).trim().to_owned();
        Err(match status {
            StatusCode::NOT_FOUND => HttpError::Unknown(why),
            StatusCode::CONFLICT => HttpError::Refused { path: name(), why },
            _ => refuse(why),
        })
    })
}
