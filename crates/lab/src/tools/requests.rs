//! Requests as a web has them, open loop: they come when they come (Poisson), each on a connection of its
//! own, and pushes a thing to an [`rpc`](super::rpc) server, which answers when it has all. Sizes are of a
//! bounded Pareto distribution: most are small, and most bytes are of the large.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Args;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng as _, SeedableRng as _},
};
use rustix::net::sockopt::set_tcp_congestion;
use serde::{Deserialize, Serialize};

use super::{
    GRACE, parse_seconds,
    rpc::{Direction, Hello},
};
use crate::testbed::{self, Child, Site};

/// A client with more is a mistake: each is a thread.
const REQUESTS_MAX: usize = 20_000;
/// Sizes: the least, the most, and how fast larger ones become rare.
const LEAST_BYTES: f64 = 3e3;
const MOST_BYTES: f64 = 3e6;
const SHAPE: f64 = 1.1;
const CHUNK_BYTES: usize = 64 * 1024;
const STACK_BYTES: usize = 64 * 1024;

/// What a client is told.
#[derive(Debug, Clone, Args)]
pub struct RequestsArgs {
    /// The server's address and port
    #[arg(long, value_name = "ADDR:PORT")]
    pub server: SocketAddr,
    /// How many come in a second, on average
    #[arg(long, value_name = "N")]
    pub per_second: f64,
    /// How long they come, and how long is waited for the last
    #[arg(long = "seconds", value_name = "S", value_parser = parse_seconds)]
    pub lasts: Duration,
    /// Congestion control
    #[arg(long, value_name = "NAME")]
    pub cc: String,
    /// Decides times and sizes
    #[arg(long, value_name = "N")]
    pub seed: u64,
}

/// A request that was answered in time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// What was pushed.
    pub bytes: u64,
    /// From when it came until its answer was there.
    pub seconds: f64,
}

/// What became of all.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Requests {
    /// Answered before the end.
    pub answered: Vec<Request>,
    pub unanswered: u64,
}

/// The mean size of a request.
pub fn mean_bytes() -> f64 {
    let cut = (LEAST_BYTES / MOST_BYTES).powf(SHAPE);
    let rest = 1.0 - (LEAST_BYTES / MOST_BYTES).powf(SHAPE - 1.0);
    LEAST_BYTES * SHAPE / (SHAPE - 1.0) * rest / (1.0 - cut)
}

/// Starts a client; [`finish`] waits for its report.
pub fn start<'a>(
    lab_binary: &Path,
    site: impl Into<Site<'a>>,
    args: &RequestsArgs,
) -> anyhow::Result<Child> {
    let mut command = testbed::tool(lab_binary, site, "requests")?;
    command.args([
        format!("--server={}", args.server),
        format!("--per-second={}", args.per_second),
        format!("--seconds={}", args.lasts.as_secs_f64()),
        format!("--cc={}", args.cc),
        format!("--seed={}", args.seed),
    ]);
    Child::spawn(command)
}

/// Waits for a client and reads its report.
pub fn finish(client: Child, args: &RequestsArgs) -> anyhow::Result<Requests> {
    client.finish(args.lasts + GRACE)?.json()
}

/// The client.
pub fn run(args: &RequestsArgs) -> anyhow::Result<Requests> {
    let plan = plan(args)?;
    let start = Instant::now();
    let end = start + args.lasts;
    let mut threads = Vec::new();
    for (at, bytes) in plan {
        let come = start + at;
        thread::sleep(come.saturating_duration_since(Instant::now()));
        let (server, cc) = (args.server, args.cc.clone());
        let request = move || push(server, &cc, bytes, end).map(|()| come.elapsed());
        let builder = thread::Builder::new().stack_size(STACK_BYTES);
        threads.push((bytes, builder.spawn(request)?));
    }
    let mut requests = Requests::default();
    for (bytes, thread) in threads {
        match thread.join().map_err(|_| anyhow::anyhow!("a request panicked"))? {
            Ok(took) => requests.answered.push(Request { bytes, seconds: took.as_secs_f64() }),
            // The end came first, or the server went away, which others will notice.
            Err(_) => requests.unanswered += 1,
        }
    }
    Ok(requests)
}

/// When requests come, from the start, and their sizes.
fn plan(args: &RequestsArgs) -> anyhow::Result<Vec<(Duration, u64)>> {
    ensure!(args.per_second > 0.0, "--per-second must be above 0");
    let expected = args.per_second * args.lasts.as_secs_f64();
    ensure!(expected < REQUESTS_MAX as f64 / 2.0, "too many: use at most {REQUESTS_MAX} requests");
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(args.seed);
    // Above 0, up to 1.
    let mut uniform = || ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    let (mut at, mut plan) = (Duration::ZERO, Vec::new());
    while plan.len() < REQUESTS_MAX {
        at += Duration::from_secs_f64(-uniform().ln() / args.per_second);
        if at >= args.lasts {
            break;
        }
        let cut = (LEAST_BYTES / MOST_BYTES).powf(SHAPE);
        let size = LEAST_BYTES / (1.0 - uniform() * (1.0 - cut)).powf(1.0 / SHAPE);
        plan.push((at, size as u64));
    }
    Ok(plan)
}

fn push(server: SocketAddr, cc: &str, bytes: u64, end: Instant) -> anyhow::Result<()> {
    let left = || {
        let left = end.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left).context("the end came first")
    };
    let mut stream = TcpStream::connect_timeout(&server, left()?)?;
    set_tcp_congestion(&stream, cc)?;
    stream.set_nodelay(true)?;
    let hello = Hello {
        direction: Direction::Send,
        request_bytes: bytes,
        reply_bytes: 1,
        cc: cc.to_owned(),
    };
    stream.set_write_timeout(Some(left()?))?;
    stream.write_all(&hello.encode()?)?;
    let chunk = vec![0; CHUNK_BYTES];
    let mut rest = bytes as usize;
    while rest > 0 {
        stream.set_write_timeout(Some(left()?))?;
        rest -= stream.write(&chunk[..rest.min(CHUNK_BYTES)])?;
    }
    stream.set_read_timeout(Some(left()?))?;
    Ok(stream.read_exact(&mut [0])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(server: SocketAddr, per_second: f64, lasts: Duration) -> RequestsArgs {
        RequestsArgs { server, per_second, lasts, cc: "reno".into(), seed: 7 }
    }

    #[test]
    fn sizes_and_times_are_as_said() {
        let args = args(([127, 0, 0, 1], 1).into(), 100.0, Duration::from_secs(90));
        let plan = plan(&args).unwrap();
        assert_eq!(plan, super::plan(&args).unwrap(), "the same seed, the same requests");
        assert!((8_500..9_500).contains(&plan.len()), "{}", plan.len());
        let sizes = plan.iter().map(|(_, bytes)| *bytes as f64);
        assert!(sizes.clone().all(|bytes| (LEAST_BYTES..=MOST_BYTES).contains(&bytes)));
        let mean = sizes.sum::<f64>() / plan.len() as f64;
        assert!((mean / mean_bytes() - 1.0).abs() < 0.3, "{mean} and {}", mean_bytes());
    }

    #[test]
    fn requests_are_answered_or_counted() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(move || super::super::rpc::answer(stream));
            }
        });
        let report = run(&args(server, 40.0, Duration::from_millis(500))).unwrap();
        assert!(!report.answered.is_empty(), "{report:?}");
        // Nobody listens there.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let report = run(&args(free, 40.0, Duration::from_millis(200))).unwrap();
        assert!(report.answered.is_empty() && report.unanswered > 0, "{report:?}");
    }
}
