//! TCP flows that come and go on a schedule: greedy ones, ones that want less than their share, and ones
//! that send a thing now and then as web servers do. Each has a thread and a source port of its own, so that
//! a meter on the wire can tell them apart. They send to [`rpc`](super::rpc) servers, which take all; one
//! that floods sends datagrams instead, which need nobody to take them.
//!
//! A flow ends with a reset: what waits in its buffers is gone at once, and its share is free.

use std::{
    fmt,
    net::SocketAddr,
    path::Path,
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use clap::Args;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng as _, SeedableRng as _},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    io::Errno,
    net::{
        AddressFamily, SendFlags, SocketType, bind, connect, send,
        sockopt::{set_socket_linger, set_socket_reuseaddr, set_tcp_congestion, set_tcp_nodelay},
    },
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};

use super::{
    GRACE,
    rpc::{Direction, Hello},
};
use crate::testbed::{self, Child, Site, Testbed};

/// Larger numbers of flows are a mistake: each is a thread at both ends.
const FLOWS_MAX: usize = 4096;
/// What is written at once at most.
const CHUNK_BYTES: usize = 128 * 1024;
/// A call that no flow ends.
const ENDLESS_BYTES: u64 = 1 << 60;
/// The payload of a flood's datagrams: with headers of either family a frame of an MTU of 1500.
const DATAGRAM_BYTES: usize = 1452;
const SMALL_DATAGRAM_BYTES: usize = 100;
/// How often a flow with a rate writes what is due.
const TICK: Duration = Duration::from_millis(2);
/// Things that web servers send: this size, and with half the probability each double of it, so many times.
const THING_BYTES: u64 = 10 << 10;
const THING_DOUBLINGS: u32 = 10;
/// The mean of the exponential pause between them.
const PAUSE: Duration = Duration::from_millis(50);
const STACK_BYTES: usize = 64 * 1024;

/// What a flow sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Want {
    Greedy,
    /// This payload a second, if it may.
    Rate(u64),
    /// Things of 10 KB to 10 MB with pauses between, on one connection.
    Web,
    /// This payload a second as datagrams of one frame each, whatever becomes of them.
    Flood(u64),
    /// So many datagrams of 100 bytes a second, whatever becomes of them.
    Datagrams(u64),
}

/// A flow. Written `FROM-TO:greedy`, `FROM-TO:rate=BIT_S`, `FROM-TO:web`, `FROM-TO:flood=BIT_S` or
/// `FROM-TO:datagrams=N`, times in ms from the common start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowPlan {
    /// When it connects.
    pub from: Duration,
    pub to: Duration,
    /// What it sends meanwhile.
    pub want: Want,
}

impl fmt::Display for FlowPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}:", self.from.as_millis(), self.to.as_millis())?;
        match self.want {
            Want::Greedy => f.write_str("greedy"),
            Want::Rate(bit_s) => write!(f, "rate={bit_s}"),
            Want::Web => f.write_str("web"),
            Want::Flood(bit_s) => write!(f, "flood={bit_s}"),
            Want::Datagrams(each_second) => write!(f, "datagrams={each_second}"),
        }
    }
}

impl FromStr for FlowPlan {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<FlowPlan> {
        let expected = || {
            format!("the flow {text:?} is no FROM-TO:greedy, :rate=, :web, :flood= or :datagrams=")
        };
        let (times, want) = text.split_once(':').with_context(expected)?;
        let (from, to) = times.split_once('-').with_context(expected)?;
        let time = |ms: &str| anyhow::Ok(Duration::from_millis(ms.parse().with_context(expected)?));
        let want = match want.split_once('=') {
            None if want == "greedy" => Want::Greedy,
            None if want == "web" => Want::Web,
            Some(("rate", bit_s)) => Want::Rate(bit_s.parse().with_context(expected)?),
            Some(("flood", bit_s)) => Want::Flood(bit_s.parse().with_context(expected)?),
            Some(("datagrams", each_second)) => {
                Want::Datagrams(each_second.parse().with_context(expected)?)
            }
            _ => bail!(expected()),
        };
        let plan = FlowPlan { from: time(from)?, to: time(to)?, want };
        ensure!(plan.from < plan.to, "the flow {text:?} ends before it begins");
        Ok(plan)
    }
}

/// What a client is told.
#[derive(Debug, Clone, Args)]
pub struct FlowsArgs {
    /// Servers' addresses and ports; flows go to them in turn
    #[arg(long = "server", value_name = "ADDR:PORT", required = true)]
    pub servers: Vec<SocketAddr>,
    /// Source port of the first flow; those of the others follow
    #[arg(long, value_name = "PORT")]
    pub first_port: u16,
    /// Congestion control
    #[arg(long, value_name = "NAME")]
    pub cc: String,
    /// Decides sizes and pauses
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Add a flow, such as 0-5000:greedy, 1000-2000:rate=5000000, 0-3000:web, 0-9:flood=1000000; times in ms
    #[arg(long = "flow", value_name = "PLAN", required = true)]
    pub flows: Vec<FlowPlan>,
}

impl FlowsArgs {
    fn to_words(&self) -> Vec<String> {
        let mut words: Vec<String> =
            self.servers.iter().map(|server| format!("--server={server}")).collect();
        words.extend([
            format!("--first-port={}", self.first_port),
            format!("--cc={}", self.cc),
            format!("--seed={}", self.seed),
        ]);
        words.extend(self.flows.iter().map(|flow| format!("--flow={flow}")));
        words
    }
}

/// What became of a flow. Times are nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowTimes {
    /// When it was connected.
    pub began_ns: u64,
    pub ended_ns: u64,
}

/// Starts a client in the testbed; [`finish`] waits for its report.
pub fn start<'a>(
    testbed: &Testbed,
    site: impl Into<Site<'a>>,
    args: &FlowsArgs,
) -> anyhow::Result<Child> {
    start_with(testbed.lab_binary(), site, args)
}

/// The same with the binary whose tool it is.
pub fn start_with<'a>(
    lab_binary: &Path,
    site: impl Into<Site<'a>>,
    args: &FlowsArgs,
) -> anyhow::Result<Child> {
    let mut command = testbed::tool(lab_binary, site, "flows")?;
    command.args(args.to_words());
    Child::spawn(command)
}

/// Waits for a client and reads when each flow began and ended.
pub fn finish(client: Child, args: &FlowsArgs) -> anyhow::Result<Vec<FlowTimes>> {
    let last = args.flows.iter().map(|flow| flow.to).max().unwrap_or_default();
    client.finish(last + GRACE)?.json()
}

/// The client: runs all flows.
pub fn run(args: &FlowsArgs) -> anyhow::Result<Vec<FlowTimes>> {
    ensure!(args.flows.len() <= FLOWS_MAX, "too many flows: use at most {FLOWS_MAX}");
    let mut threads = Vec::new();
    // Threads are there before the first flow begins.
    let start = Instant::now() + Duration::from_millis(50 + args.flows.len() as u64 / 10);
    for (index, &plan) in args.flows.iter().enumerate() {
        let port = u16::try_from(index).ok().and_then(|index| args.first_port.checked_add(index));
        let flow = Flow {
            plan,
            start,
            port: port.context("the last flow has no source port: use a lower --first-port")?,
            server: args.servers[index % args.servers.len()],
            cc: args.cc.clone(),
            rng: Xoshiro256PlusPlus::seed_from_u64(args.seed.wrapping_add(index as u64)),
        };
        let builder = thread::Builder::new().stack_size(STACK_BYTES);
        threads.push(builder.spawn(move || flow.run())?);
    }
    let join = |thread: thread::JoinHandle<anyhow::Result<FlowTimes>>| {
        thread.join().map_err(|_| anyhow::anyhow!("a flow panicked"))?
    };
    threads.into_iter().map(join).collect()
}

/// One connection.
struct Flow {
    plan: FlowPlan,
    start: Instant,
    port: u16,
    server: SocketAddr,
    cc: String,
    rng: Xoshiro256PlusPlus,
}

impl Flow {
    fn run(mut self) -> anyhow::Result<FlowTimes> {
        thread::sleep((self.start + self.plan.from).saturating_duration_since(Instant::now()));
        let end = self.start + self.plan.to;
        match self.plan.want {
            Want::Flood(bit_s) => return self.datagrams(bit_s, DATAGRAM_BYTES, end),
            Want::Datagrams(each_second) => {
                let bit_s = each_second * SMALL_DATAGRAM_BYTES as u64 * 8;
                return self.datagrams(bit_s, SMALL_DATAGRAM_BYTES, end);
            }
            Want::Greedy | Want::Rate(_) | Want::Web => {}
        }
        let socket =
            self.connect().with_context(|| format!("cannot connect to {}", self.server))?;
        let began_ns = now_ns();
        let hello = Hello {
            direction: Direction::Send,
            request_bytes: ENDLESS_BYTES,
            reply_bytes: 1,
            cc: String::new(),
        };
        write(&socket, &hello.encode()?, end)?;
        let chunk = vec![0; CHUNK_BYTES];
        let began = Instant::now();
        let mut sent = 0;
        while Instant::now() < end {
            match self.plan.want {
                Want::Greedy => {
                    write(&socket, &chunk, end)?;
                }
                Want::Rate(bit_s) => {
                    let due = began.elapsed().as_nanos() * u128::from(bit_s) / 8_000_000_000;
                    // What it may not send it does not make up for.
                    let due = (due as u64).saturating_sub(sent);
                    write(&socket, &chunk[..CHUNK_BYTES.min(due as usize)], end)?;
                    sent += due;
                    pause_until(Instant::now() + TICK, end);
                }
                Want::Web => {
                    let mut rest = self.thing_bytes();
                    while rest > 0 && Instant::now() < end {
                        let len = rest.min(CHUNK_BYTES as u64);
                        write(&socket, &chunk[..len as usize], end)?;
                        rest -= len;
                    }
                    let pause = PAUSE.mul_f64(-self.uniform().ln());
                    pause_until(Instant::now() + pause, end);
                }
                Want::Flood(_) | Want::Datagrams(_) => bail!("datagrams have no connection"),
            }
        }
        set_socket_linger(&socket, Some(Duration::ZERO))?;
        drop(socket);
        Ok(FlowTimes { began_ns, ended_ns: now_ns() })
    }

    /// Sends datagrams of `size` bytes. That one is refused or dropped, here or later, is no error.
    fn datagrams(&self, bit_s: u64, size: usize, end: Instant) -> anyhow::Result<FlowTimes> {
        let (_, any) = self.any();
        let socket = std::net::UdpSocket::bind(any)?;
        socket.set_nonblocking(true)?;
        let (began_ns, began, mut sent) = (now_ns(), Instant::now(), 0);
        let datagram = vec![0; size];
        while Instant::now() < end {
            let due = began.elapsed().as_nanos() * u128::from(bit_s) / 8_000_000_000;
            while sent < due {
                let _ = socket.send_to(&datagram, self.server);
                sent += size as u128;
            }
            // One that sends seldom sleeps until the next is due.
            let next = Duration::from_secs_f64(sent as f64 * 8.0 / bit_s.max(1) as f64);
            pause_until((began + next).max(Instant::now() + TICK), end);
        }
        Ok(FlowTimes { began_ns, ended_ns: now_ns() })
    }

    /// The own port at any address.
    fn any(&self) -> (AddressFamily, SocketAddr) {
        match self.server {
            SocketAddr::V4(_) => (AddressFamily::INET, ([0; 4], self.port).into()),
            SocketAddr::V6(_) => (AddressFamily::INET6, ([0u16; 8], self.port).into()),
        }
    }

    fn connect(&self) -> anyhow::Result<OwnedFd> {
        let (family, any) = self.any();
        let socket = rustix::net::socket(family, SocketType::STREAM, None)?;
        set_socket_reuseaddr(&socket, true)?;
        set_tcp_congestion(&socket, self.cc.as_str())?;
        set_tcp_nodelay(&socket, true)?;
        bind(&socket, &any)?;
        connect(&socket, &self.server)?;
        Ok(socket)
    }

    fn thing_bytes(&mut self) -> u64 {
        THING_BYTES << self.rng.next_u64().trailing_zeros().min(THING_DOUBLINGS)
    }

    /// Above 0, up to 1.
    fn uniform(&mut self) -> f64 {
        ((self.rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

/// Writes all of it, or what is written at `end`.
fn write(socket: &OwnedFd, mut bytes: &[u8], end: Instant) -> anyhow::Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(len) => bytes = &bytes[len..],
            Err(Errno::AGAIN) => {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(());
                }
                let left = Timespec::try_from(left)?;
                match poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&left)) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("the server went away"),
        }
    }
    Ok(())
}

fn pause_until(at: Instant, end: Instant) {
    thread::sleep(at.min(end).saturating_duration_since(Instant::now()));
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[test]
    fn plans_come_back_as_they_went() {
        for text in
            ["0-5000:greedy", "1-2000:rate=5000000", "0-3000:web", "0-1:flood=9", "0-1:datagrams=9"]
        {
            assert_eq!(text.parse::<FlowPlan>().unwrap().to_string(), text);
        }
        for text in ["", "0-1", "0:greedy", "5-1:web", "0-1:much", "0-x:web", "0-1:rate=x"] {
            assert!(text.parse::<FlowPlan>().is_err(), "{text}");
        }
    }

    fn received(plan: &str) -> (u64, FlowTimes) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        let counted = thread::spawn(move || {
            let (mut stream, _): (TcpStream, _) = listener.accept().unwrap();
            let (mut sum, mut chunk) = (0, vec![0; 65_536]);
            // It ends with a reset.
            while let Ok(len @ 1..) = stream.read(&mut chunk) {
                sum += len as u64;
            }
            sum
        });
        // A port that is free now.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let args = FlowsArgs {
            servers: vec![server],
            first_port: port,
            cc: "cubic".into(),
            seed: 1,
            flows: vec![plan.parse().unwrap()],
        };
        let times = run(&args).unwrap();
        (counted.join().unwrap(), times[0])
    }

    #[test]
    fn flows_send_what_they_want() {
        let (bytes, times) = received("0-300:rate=8000000");
        assert!((100_000..=310_000).contains(&bytes), "{bytes} of 300 kB");
        assert!(times.ended_ns - times.began_ns >= 250_000_000, "{times:?}");
        let (greedy, _) = received("50-250:greedy");
        assert!(greedy > 1_000_000, "{greedy}");
        assert!(received("0-200:web").0 >= THING_BYTES);
    }
}
