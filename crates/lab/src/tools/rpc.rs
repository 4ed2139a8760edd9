//! Remote procedure calls over TCP: back to back on every flow, each flow on a connection and a
//! thread of its own.
//!
//! A call carries N bytes one way and a small message the other: `send` pushes N bytes from client
//! to server, for limits on the client's egress; `receive` makes the server push them, for limits
//! on its ingress. The latency of a call is from before its first byte is written to after the last
//! byte of the answer is read. This is a closed loop, as RPC is: it shows throughput and the time of
//! a call, and [`super::probe`] shows the queue.
//!
//! A call counts if it ends after the warm-up and before the end. What is under way at the end is
//! not counted, in the place of what was under way when the warm-up ended.

mod server;

use std::{
    collections::BTreeMap,
    io::{self, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    path::Path,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tidegate_instruments::sock::tcp_info;
use tidegate_sys::net::TcpInfo;

pub(super) use server::Hello;
#[cfg(test)]
pub(super) use server::answer;
use server::{CHUNK_BYTES, receive_bytes, send_bytes, set_cc};
pub use server::{ServerArgs, serve};

use super::{GRACE, Quantiles, histogram_ns, parse_seconds, parse_size};
use crate::testbed::{self, Child, Site, Testbed, wait_for_listener};

/// Larger numbers of flows are a mistake: each is a thread at both ends.
const FLOWS_MAX: usize = 4096;
/// How often a flow looks at its round-trip time.
const RTT_SAMPLE: Duration = Duration::from_millis(5);

/// Which way the large message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From client to server
    Send,
    /// From server to client
    Receive,
}

/// What a client is told.
#[derive(Debug, Clone, Args)]
pub struct ClientArgs {
    /// The server's address and port
    #[arg(long, value_name = "ADDR:PORT")]
    pub server: SocketAddr,
    /// Add a flow of calls of this size; may be given many times
    #[arg(long = "flow", value_name = "SIZE", value_parser = parse_size, required = true)]
    pub flows_bytes: Vec<u64>,
    /// The size of the small message
    #[arg(long = "reply", value_name = "SIZE", value_parser = parse_size, default_value = "64b")]
    pub reply_bytes: u64,
    /// Congestion control of both ends [default: the system's]
    #[arg(long, value_name = "NAME")]
    pub cc: Option<String>,
    /// How long to count
    #[arg(long = "seconds", value_name = "S", value_parser = parse_seconds)]
    pub duration: Duration,
    /// How long to run before that
    #[arg(long, value_name = "S", value_parser = parse_seconds, default_value = "0")]
    pub warmup: Duration,
    /// Which way the large message goes
    #[arg(long, default_value = "send")]
    pub direction: Direction,
}

impl ClientArgs {
    /// Calls that push, with defaults.
    pub fn new(server: SocketAddr, flows_bytes: Vec<u64>, duration: Duration) -> Self {
        Self {
            server,
            flows_bytes,
            reply_bytes: 64,
            cc: None,
            duration,
            warmup: Duration::ZERO,
            direction: Direction::Send,
        }
    }

    fn to_words(&self) -> Vec<String> {
        let mut words = vec![
            format!("--server={}", self.server),
            format!("--reply={}b", self.reply_bytes),
            format!("--seconds={}", self.duration.as_secs_f64()),
            format!("--warmup={}", self.warmup.as_secs_f64()),
        ];
        words.push(match self.direction {
            Direction::Send => "--direction=send".into(),
            Direction::Receive => "--direction=receive".into(),
        });
        words.extend(self.cc.iter().map(|cc| format!("--cc={cc}")));
        words.extend(self.flows_bytes.iter().map(|bytes| format!("--flow={bytes}b")));
        words
    }
}

/// What a client prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RpcReport {
    /// Which way the large message went.
    pub direction: Direction,
    /// How long was counted.
    pub seconds: f64,
    /// All classes together.
    pub goodput_bit_s: f64,
    /// One for each size of call.
    pub classes: Vec<ClassReport>,
}

/// The flows with calls of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClassReport {
    /// The size of a call.
    pub request_bytes: u64,
    pub flows: usize,
    /// How many calls.
    pub rpcs: u64,
    /// Payload of the calls, the small messages left out.
    pub bytes: u64,
    /// Payload per second.
    pub goodput_bit_s: f64,
    /// How long calls took.
    pub latency: Quantiles,
    /// Segments sent again while counting. None if the server was the sender.
    pub retransmits: Option<u64>,
    /// The smallest round-trip time that TCP saw. None if the server was the sender.
    pub rtt_min_us: Option<f64>,
    /// Mean of TCP's smoothed round-trip time. None if the server was the sender.
    pub rtt_mean_us: Option<f64>,
}

/// Starts a server in the testbed.
pub fn start_server<'a>(
    testbed: &Testbed,
    site: impl Into<Site<'a>>,
    listen: SocketAddr,
) -> anyhow::Result<Child> {
    start_server_with(testbed.lab_binary(), site, listen)
}

/// The same with the binary whose tool it is.
pub fn start_server_with<'a>(
    lab_binary: &Path,
    site: impl Into<Site<'a>>,
    listen: SocketAddr,
) -> anyhow::Result<Child> {
    let site = site.into();
    let mut command = testbed::tool(lab_binary, site, "rpc-server")?;
    command.arg(format!("--listen={listen}"));
    let mut server = Child::spawn(command)?;
    wait_for_listener(site.netns, listen.port(), &mut server)?;
    Ok(server)
}

/// Starts a client in the testbed; [`finish_client`] waits for its report.
pub fn start_client<'a>(
    testbed: &Testbed,
    site: impl Into<Site<'a>>,
    args: &ClientArgs,
) -> anyhow::Result<Child> {
    let mut command = testbed.tool(site, "rpc-client")?;
    command.args(args.to_words());
    Child::spawn(command)
}

/// Waits for a client and reads its report.
pub fn finish_client(client: Child, args: &ClientArgs) -> anyhow::Result<RpcReport> {
    client.finish(args.warmup + args.duration + GRACE)?.json()
}

/// The client: connects all flows, lets them run, and reports.
pub fn call(args: &ClientArgs) -> anyhow::Result<RpcReport> {
    ensure!(args.flows_bytes.len() <= FLOWS_MAX, "too many flows: use at most {FLOWS_MAX}");
    let streams: Vec<(u64, TcpStream)> = args
        .flows_bytes
        .iter()
        .map(|&bytes| Ok((bytes, connect(args, bytes)?)))
        .collect::<anyhow::Result<_>>()?;

    let stop = Arc::new(AtomicBool::new(false));
    let together = Arc::new(Barrier::new(streams.len() + 1));
    let mut threads = Vec::new();
    for (bytes, stream) in &streams {
        let flow = Flow {
            stream: stream.try_clone()?,
            request_bytes: *bytes,
            reply_bytes: args.reply_bytes,
            direction: args.direction,
            warmup: args.warmup,
            end: args.warmup + args.duration,
        };
        let (together, stop) = (Arc::clone(&together), Arc::clone(&stop));
        threads.push(thread::spawn(move || {
            together.wait();
            flow.run(&stop)
        }));
    }
    together.wait();
    thread::sleep(args.warmup);
    let at_start = infos(&streams)?;
    thread::sleep(args.duration);
    let at_end = infos(&streams)?;
    stop.store(true, Ordering::Relaxed);
    for (_, stream) in &streams {
        // Wakes a flow that waits for a slow answer; fails only if the server is gone already.
        let _ = stream.shutdown(Shutdown::Both);
    }

    let mut classes: BTreeMap<u64, Class> = BTreeMap::new();
    for (index, thread) in threads.into_iter().enumerate() {
        let done = thread.join().map_err(|_| anyhow::anyhow!("a flow panicked"))??;
        let bytes = streams[index].0;
        let class = match classes.entry(bytes) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => entry.insert(Class::new()?),
        };
        class.flows += 1;
        class.latency_ns.add(&done.latency_ns)?;
        class.rtt_us_sum += done.rtt_us_sum;
        class.rtt_samples += done.rtt_samples;
        let sent_again = |infos: &[TcpInfo]| u64::from(infos[index].retransmitted_segments);
        class.retransmits += sent_again(&at_end) - sent_again(&at_start);
        class.rtt_min_us = class.rtt_min_us.min(at_end[index].rtt_min.as_secs_f64() * 1e6);
    }
    Ok(report(args, classes))
}

/// What the flows of one size add up to.
struct Class {
    flows: usize,
    latency_ns: Histogram<u64>,
    retransmits: u64,
    rtt_min_us: f64,
    rtt_us_sum: f64,
    rtt_samples: u64,
}

impl Class {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            flows: 0,
            latency_ns: histogram_ns()?,
            retransmits: 0,
            rtt_min_us: f64::INFINITY,
            rtt_us_sum: 0.0,
            rtt_samples: 0,
        })
    }
}

fn report(args: &ClientArgs, classes: BTreeMap<u64, Class>) -> RpcReport {
    let seconds = args.duration.as_secs_f64();
    let client_sends = args.direction == Direction::Send;
    let classes: Vec<ClassReport> = classes
        .into_iter()
        .map(|(request_bytes, class)| {
            let rpcs = class.latency_ns.len();
            let bytes = rpcs * request_bytes;
            let sampled = client_sends && class.rtt_samples > 0;
            ClassReport {
                request_bytes,
                flows: class.flows,
                rpcs,
                bytes,
                goodput_bit_s: bytes as f64 * 8.0 / seconds,
                latency: Quantiles::of_ns(&class.latency_ns),
                retransmits: client_sends.then_some(class.retransmits),
                rtt_min_us: sampled.then_some(class.rtt_min_us),
                rtt_mean_us: sampled.then_some(class.rtt_us_sum / class.rtt_samples as f64),
            }
        })
        .collect();
    let goodput_bit_s = classes.iter().map(|class| class.goodput_bit_s).sum();
    RpcReport { direction: args.direction, seconds, goodput_bit_s, classes }
}

fn infos(streams: &[(u64, TcpStream)]) -> io::Result<Vec<TcpInfo>> {
    streams.iter().map(|(_, stream)| tcp_info(stream)).collect()
}

fn connect(args: &ClientArgs, request_bytes: u64) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(args.server)
        .with_context(|| format!("cannot connect to {}", args.server))?;
    stream.set_nodelay(true)?;
    let cc = args.cc.as_deref().unwrap_or_default();
    set_cc(&stream, cc)?;
    let hello = Hello {
        direction: args.direction,
        request_bytes,
        reply_bytes: args.reply_bytes,
        cc: cc.to_owned(),
    };
    stream.write_all(&hello.encode()?)?;
    Ok(stream)
}

/// One connection of the client.
struct Flow {
    stream: TcpStream,
    request_bytes: u64,
    reply_bytes: u64,
    direction: Direction,
    warmup: Duration,
    end: Duration,
}

struct FlowDone {
    latency_ns: Histogram<u64>,
    rtt_us_sum: f64,
    rtt_samples: u64,
}

impl Flow {
    fn run(mut self, stop: &AtomicBool) -> anyhow::Result<FlowDone> {
        let mut done = FlowDone { latency_ns: histogram_ns()?, rtt_us_sum: 0.0, rtt_samples: 0 };
        let mut chunk = vec![0; CHUNK_BYTES];
        let (out_bytes, in_bytes) = match self.direction {
            Direction::Send => (self.request_bytes, self.reply_bytes),
            Direction::Receive => (self.reply_bytes, self.request_bytes),
        };
        let began = Instant::now();
        let mut sampled_at = began;
        while !stop.load(Ordering::Relaxed) {
            let asked_at = Instant::now();
            let called = send_bytes(&mut self.stream, out_bytes, &mut chunk)
                .and_then(|()| receive_bytes(&mut self.stream, in_bytes, &mut chunk));
            match called {
                Ok(()) => {}
                // The end of the run cuts a call short.
                Err(_) if stop.load(Ordering::Relaxed) => break,
                Err(e) => return Err(e).context("the server went away"),
            }
            let answered_at = Instant::now();
            if !(self.warmup..self.end).contains(&(answered_at - began)) {
                continue;
            }
            done.latency_ns.record((answered_at - asked_at).as_nanos() as u64)?;
            if answered_at - sampled_at >= RTT_SAMPLE {
                sampled_at = answered_at;
                // Fails only while the run ends.
                if let Ok(info) = tcp_info(&self.stream) {
                    done.rtt_us_sum += info.rtt.as_secs_f64() * 1e6;
                    done.rtt_samples += 1;
                }
            }
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ClientArgs,
    }

    #[test]
    fn words_come_back_as_they_went() {
        let mut args = ClientArgs::new(
            "[fd77::2]:7000".parse().unwrap(),
            vec![1 << 20, 10_240, 10_240],
            Duration::from_millis(1500),
        );
        args.cc = Some("cubic".into());
        args.direction = Direction::Receive;
        let words = std::iter::once("rpc-client".to_owned()).chain(args.to_words());
        let read = Line::parse_from(words).args;
        assert_eq!(format!("{read:?}"), format!("{args:?}"));
    }

    #[test]
    fn calls_both_ways_over_loopback() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                thread::spawn(|| answer(stream.unwrap()));
            }
        });
        for direction in [Direction::Send, Direction::Receive] {
            let mut args =
                ClientArgs::new(server, vec![100_000, 1_000, 1_000], Duration::from_millis(200));
            args.direction = direction;
            let report = call(&args).unwrap();
            let [small, large] = &report.classes[..] else { panic!("{report:?}") };
            assert_eq!((small.flows, large.flows), (2, 1));
            assert!(small.rpcs > 0 && large.rpcs > 0, "{report:?}");
            assert_eq!(large.bytes, large.rpcs * 100_000);
            assert!(large.latency.p50_us > 0.0 && large.latency.max_us >= large.latency.p99_us);
            assert_eq!(large.retransmits.is_some(), direction == Direction::Send);
        }
    }
}
