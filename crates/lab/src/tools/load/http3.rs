//! The load over HTTP/3: one thread, a QUIC connection and a UDP socket for each client, kept for all its
//! requests. Each request is a stream.
//!
//! Two things differ from the [other protocols](super::client). A reply ends when this program has read its
//! last byte, because the kernel knows no streams; so its latency includes the wait for a CPU. And tokio's
//! timer wakes the program up to 1 ms after a request of an open loop was due.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, bail, ensure};
use bytes::{Buf as _, Bytes};
use h3::client::SendRequest;
use http::{Request, StatusCode};
use quinn::Endpoint;
use tokio::{sync::mpsc, time::timeout};

use super::{
    CONNECTED, LoadArgs,
    client::{CONNECT, ERRORS_MAX, Seen},
    schedule::{Handed, Schedule, Took},
};
use crate::{stalls::monotonic_ns, tools::http3};

pub(super) fn run(args: &LoadArgs) -> anyhow::Result<Seen> {
    // With the runtime the clients end, wherever they are.
    http3::runtime()?.block_on(load(args))
}

/// What a client has to tell.
enum Told {
    Connected,
    /// It has the reply, so many bytes, since this time of the monotonic clock.
    Answered(u64, u64),
    /// Its connection broke; it makes another, and sends the request again.
    Broke,
    /// The reply is none that is waited for.
    Refused(StatusCode),
}

async fn load(args: &LoadArgs) -> anyhow::Result<Seen> {
    let config = http3::client_config()?;
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut clients = Vec::new();
    for number in 0..args.clients {
        let (hand, requests) = mpsc::unbounded_channel();
        let target =
            Target { server: args.server, path: args.path.clone(), config: config.clone() };
        let tell = tell.clone();
        let tell = move |what| tell.send((number, what)).is_ok();
        tokio::spawn(be_client(target, requests, tell));
        clients.push(hand);
    }
    let connected = async {
        let mut missing = args.clients;
        while missing > 0 {
            match told.recv().await.context("the clients ended")? {
                (_, Told::Connected) => missing -= 1,
                _ => bail!("a connection broke"),
            }
        }
        anyhow::Ok(())
    };
    let connected = timeout(CONNECT, connected).await.context("it does not answer");
    connected
        .and_then(|inner| inner)
        .with_context(|| format!("cannot connect to {}", args.server))?;

    eprintln!("{CONNECTED}");
    let start_ns = monotonic_ns() + args.lead.as_nanos() as u64;
    let end_ns = start_ns + args.duration.as_nanos() as u64;
    let last_ns = end_ns + args.drain.as_nanos() as u64;
    let mut schedule = Schedule::new(args.clients, args.rate_hz, (start_ns, end_ns));
    let mut asked: Vec<Option<Handed>> = vec![None; args.clients];
    let mut seen = Seen { start_ns, ..Seen::default() };
    loop {
        let now_ns = monotonic_ns();
        while let Some(handed) = schedule.next(now_ns) {
            asked[handed.client] = Some(handed);
            clients[handed.client].send(()).ok().context("a client ended")?;
        }
        let idle = asked.iter().all(Option::is_none);
        if now_ns >= last_ns || (idle && now_ns >= end_ns) {
            break;
        }
        let nothing_ns = if idle { end_ns } else { last_ns };
        let wakes_ns = schedule.wakes_ns().unwrap_or(nothing_ns).min(nothing_ns);
        let rest = Duration::from_nanos(wakes_ns.saturating_sub(now_ns));
        let Ok(news) = timeout(rest, told.recv()).await else { continue };
        match news.context("the clients ended")? {
            (_, Told::Connected) => {}
            (client, Told::Answered(bytes, ended_ns)) => {
                if let Some(handed) = asked[client].take() {
                    seen.answered.push(Took { due_ns: handed.due_ns, ended_ns });
                    seen.reply_bytes += bytes;
                    schedule.set_free(client);
                }
            }
            (_, Told::Broke) => {
                seen.errors += 1;
                let most = ERRORS_MAX + seen.answered.len() as u64;
                ensure!(seen.errors < most, "too many connections break");
            }
            (_, Told::Refused(status)) => bail!("{}: the server answered {status}", args.server),
        }
    }
    let ended_ns = monotonic_ns();
    let left = asked.iter().flatten().map(|handed| handed.due_ns).chain(schedule.never_sent());
    seen.unanswered.extend(left.map(|due_ns| Took { due_ns, ended_ns }));
    Ok(seen)
}

/// Sends a request for each word, over one connection while it lasts. The load bounds its time.
async fn be_client(
    target: Target,
    mut requests: mpsc::UnboundedReceiver<()>,
    tell: impl Fn(Told) -> bool,
) {
    let mut open = target.connect_again(&tell).await;
    while requests.recv().await.is_some() {
        let told = loop {
            match open.get(&target).await {
                Ok((StatusCode::OK, bytes)) => break Told::Answered(bytes, monotonic_ns()),
                Ok((status, _)) => break Told::Refused(status),
                Err(_) => {
                    tell(Told::Broke);
                    open = target.connect_again(&tell).await;
                }
            }
        };
        if !tell(told) {
            break;
        }
    }
}

/// Whom a client asks, and for what.
struct Target {
    server: SocketAddr,
    path: String,
    config: quinn::ClientConfig,
}

/// A connection.
struct Open {
    requests: SendRequest<h3_quinn::OpenStreams, Bytes>,
    /// Its socket.
    _endpoint: Endpoint,
}

impl Target {
    async fn connect_again(&self, tell: &impl Fn(Told) -> bool) -> Open {
        loop {
            // A server that is away answers at once that nobody listens: the load counts these.
            match self.connect().await {
                Ok(open) => {
                    tell(Told::Connected);
                    return open;
                }
                Err(_) => {
                    tell(Told::Broke);
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    async fn connect(&self) -> anyhow::Result<Open> {
        let any = if self.server.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
        let mut endpoint = Endpoint::client(any)?;
        endpoint.set_default_client_config(self.config.clone());
        let connection = endpoint.connect(self.server, http3::NAME)?.await?;
        let (mut driver, requests) = h3::client::new(h3_quinn::Connection::new(connection)).await?;
        tokio::spawn(async move { driver.wait_idle().await });
        Ok(Open { requests, _endpoint: endpoint })
    }
}

impl Open {
    /// Asks once; the status, and how many bytes the body has.
    async fn get(&mut self, target: &Target) -> anyhow::Result<(StatusCode, u64)> {
        let uri = format!("https://{}{}", target.server, target.path);
        let mut stream = self.requests.send_request(Request::get(uri).body(())?).await?;
        stream.finish().await?;
        let status = stream.recv_response().await?.status();
        let mut bytes = 0;
        while let Some(data) = stream.recv_data().await? {
            bytes += data.remaining() as u64;
        }
        Ok((status, bytes))
    }
}
