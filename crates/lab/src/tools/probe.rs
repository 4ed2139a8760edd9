//! Latency, open loop: datagrams leave on a fixed schedule whatever the replies do.
//!
//! A closed-loop ping-pong sends the next packet when the last one is back, and so samples a queue
//! mostly while it is empty. Here the schedule decides. Each datagram carries its number; the client
//! keeps when it was to leave and when it left, and the kernel notes when the reply came in
//! (`SO_TIMESTAMPNS`), so three distributions come out:
//!
//! - `rtt`: from the actual departure to the reply. The network's part.
//! - `from_schedule`: from the scheduled departure to the reply. What a user of an overloaded host
//!   would see.
//! - `lateness`: from schedule to departure. The host's own noise; `rtt` is to be trusted as far as
//!   this stays small.
//!
//! Client and server run at the lowest `SCHED_FIFO` priority where the host allows it (`realtime`
//! says so), because a probe that waits for a CPU behind the very load it measures would report
//! that as latency of the network.

use std::{
    collections::BTreeMap,
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use clap::Args;
use rustix::{
    net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size},
    thread::clock_nanosleep_absolute,
    time::{ClockId, Timespec, clock_gettime},
};
use serde::{Deserialize, Serialize};
use tidegate_instruments::sock::{recv_stamped, stamp_received};
use tidegate_sys::sched::make_realtime;

use super::{GRACE, NS_PER_US, Quantiles, histogram_ns, parse_seconds};
use crate::{
    stalls::{self, Stall, StallWatch},
    stats,
    testbed::{Child, Site, Testbed, wait},
};

const NS_PER_S: u64 = 1_000_000_000;
/// The client remembers two times for each probe.
const PROBES_MAX: u64 = 10_000_000;
/// Magic, number, scheduled time.
const SIZE_MIN: usize = 4 + 8 + 8;
const SIZE_MAX: usize = 65_000;
const MAGIC: [u8; 4] = *b"tide";
/// So that a long queue on the way does not fill the socket and hold up the schedule.
const BUFFER_BYTES: usize = 8 << 20;
/// How long the receiving thread may overlook the end.
const RECEIVE_POLL: Duration = Duration::from_millis(50);
/// The first departure, after everything is set up.
const LEAD: Duration = Duration::from_millis(20);
/// The bins of a report's latency over time.
const BIN: Duration = Duration::from_millis(20);
/// What the server prints when it listens.
const READY: &str = "ready";
const READY_WITHIN: Duration = Duration::from_secs(60);

/// What a server is told.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// Address and port
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: SocketAddr,
}

/// What a client is told.
#[derive(Debug, Clone, Copy, Args)]
pub struct ClientArgs {
    /// The server's address and port
    #[arg(long, value_name = "ADDR:PORT")]
    pub server: SocketAddr,
    /// Probes per second
    #[arg(long = "rate", value_name = "N", default_value_t = 500)]
    pub rate_hz: u64,
    /// How long to send
    #[arg(long = "seconds", value_name = "S", value_parser = parse_seconds)]
    pub duration: Duration,
    /// Probes of the first so many seconds are in the latency over time alone
    #[arg(long = "settle", value_name = "S", value_parser = parse_seconds, default_value = "0")]
    pub settle: Duration,
    /// Payload of a probe, in bytes
    #[arg(long = "size", value_name = "BYTES", default_value_t = 64)]
    pub size_bytes: usize,
    /// How long to wait for replies after the last probe
    #[arg(long, value_name = "S", value_parser = parse_seconds, default_value = "1")]
    pub drain: Duration,
    /// That no probe comes back is a result, not a server that is missing
    #[arg(long)]
    pub may_lose_all: bool,
}

impl ClientArgs {
    /// Probes with defaults: 500 a second of 64 bytes.
    pub fn new(server: SocketAddr, duration: Duration) -> Self {
        Self {
            server,
            rate_hz: 500,
            duration,
            settle: Duration::ZERO,
            size_bytes: 64,
            drain: Duration::from_secs(1),
            may_lose_all: false,
        }
    }

    fn to_words(self) -> Vec<String> {
        let mut words = vec![
            format!("--server={}", self.server),
            format!("--rate={}", self.rate_hz),
            format!("--seconds={}", self.duration.as_secs_f64()),
            format!("--settle={}", self.settle.as_secs_f64()),
            format!("--size={}", self.size_bytes),
            format!("--drain={}", self.drain.as_secs_f64()),
        ];
        words.extend(self.may_lose_all.then(|| "--may-lose-all".to_owned()));
        words
    }
}

/// What a client prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// Probes that left.
    pub sent: u64,
    /// Replies that came, each probe counted once.
    pub received: u64,
    /// Probes that left and whose reply did not come.
    pub lost: u64,
    /// Probes that the client's own stack did not take; not part of `sent`.
    pub refused: u64,
    /// Probes that are left out of the distributions: the whole machine stood still on their way.
    #[serde(default)]
    pub stalled: u64,
    /// From actual departure to reply.
    pub rtt: Quantiles,
    /// From scheduled departure to reply.
    pub from_schedule: Quantiles,
    /// From scheduled to actual departure.
    pub lateness: Quantiles,
    /// The distribution of `rtt`: (microseconds, share of the replies that took no longer).
    pub rtt_cdf_us: Vec<(f64, f64)>,
    /// `rtt` over time: (seconds after the first probe was due, median of 20 ms in microseconds).
    #[serde(default)]
    pub rtt_over_time_us: Vec<(f64, f64)>,
    /// The client ran in the real-time class.
    pub realtime: bool,
}

impl ProbeReport {
    /// The share of probes that did not come back, those included that the stack did not take.
    pub fn lost_percent(&self) -> f64 {
        let all = self.sent + self.refused;
        if all == 0 { 0.0 } else { (self.lost + self.refused) as f64 / all as f64 * 100.0 }
    }

    /// Whether the round trips tell something: the few that survive where most are lost are the best.
    pub fn mostly_came_back(&self) -> bool {
        self.received > 0 && self.lost_percent() < 50.0
    }
}

/// Starts a server in the testbed.
pub fn start_server<'a>(
    testbed: &Testbed,
    site: impl Into<Site<'a>>,
    listen: SocketAddr,
) -> anyhow::Result<Child> {
    let mut command = testbed.tool(site, "probe-server")?;
    command.arg(format!("--listen={listen}"));
    let mut server = Child::spawn(command)?;
    wait::wait_until("the start of the probe server", READY_WITHIN, || {
        server.check_running()?;
        Ok(server.stdout_so_far().contains(READY).then_some(()))
    })?;
    Ok(server)
}

/// Starts a client in the testbed; [`finish_client`] waits for its report.
pub fn start_client<'a>(
    testbed: &Testbed,
    site: impl Into<Site<'a>>,
    args: ClientArgs,
) -> anyhow::Result<Child> {
    let mut command = testbed.tool(site, "probe-client")?;
    command.args(args.to_words());
    Child::spawn(command)
}

/// Waits for a client and reads its report.
pub fn finish_client(client: Child, args: ClientArgs) -> anyhow::Result<ProbeReport> {
    client.finish(args.duration + args.drain + GRACE)?.json()
}

/// The server: echoes until killed.
pub fn serve(args: &ServerArgs) -> anyhow::Result<()> {
    let socket = UdpSocket::bind(args.listen)
        .with_context(|| format!("cannot listen on {}", args.listen))?;
    widen(&socket);
    let realtime = make_realtime().is_ok();
    println!("{{\"{READY}\":true,\"realtime\":{realtime}}}");
    echo(&socket)
}

fn echo(socket: &UdpSocket) -> anyhow::Result<()> {
    let mut buffer = vec![0; SIZE_MAX + 1];
    loop {
        // An ICMP error of an earlier reply comes back here; it is not the server's end.
        let Ok((len, from)) = socket.recv_from(&mut buffer) else { continue };
        let _ = socket.send_to(&buffer[..len], from);
    }
}

/// The client: sends on schedule and reports.
pub fn probe(args: &ClientArgs) -> anyhow::Result<ProbeReport> {
    ensure!((1..=1_000_000).contains(&args.rate_hz), "--rate must be 1 to 1000000");
    ensure!(
        (SIZE_MIN..=SIZE_MAX).contains(&args.size_bytes),
        "--size must be {SIZE_MIN} to {SIZE_MAX}"
    );
    let count = (args.duration.as_nanos() as u64).saturating_mul(args.rate_hz) / NS_PER_S;
    ensure!((1..=PROBES_MAX).contains(&count), "{count} probes: use 1 to {PROBES_MAX}");

    let any: SocketAddr =
        if args.server.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect(args.server).with_context(|| format!("cannot reach {}", args.server))?;
    socket.set_read_timeout(Some(RECEIVE_POLL))?;
    widen(&socket);
    stamp_received(&socket)?;

    let book: Vec<Probe> = (0..count).map(|_| Probe::default()).collect();
    let watch = StallWatch::start();
    let sent_all = AtomicBool::new(false);
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let outcome = send_all(&socket, args, &book);
            sent_all.store(true, Ordering::Release);
            outcome
        });
        let receiver = scope.spawn(|| receive_all(&socket, args.drain, &book, &sent_all));
        let realtime =
            sender.join().map_err(|_| anyhow::anyhow!("the sending thread panicked"))??;
        receiver.join().map_err(|_| anyhow::anyhow!("the receiving thread panicked"))??;
        let stood = watch.ok().and_then(StallWatch::stop).unwrap_or_default();
        let report = summarize(&book, &stood.either(), args.settle, realtime)?;
        if report.received == 0 && !args.may_lose_all {
            bail!("no reply to {} probes: is a probe-server there?", report.sent);
        }
        Ok(report)
    })
}

/// When a probe was due (monotonic), when it left (real time, 0: not yet), by how much late, and when its
/// reply came (0: not yet).
#[derive(Debug, Default)]
struct Probe {
    due_ns: AtomicU64,
    sent_ns: AtomicU64,
    lateness_ns: AtomicU64,
    received_ns: AtomicU64,
}

/// Returns whether the thread is in the real-time class.
fn send_all(socket: &UdpSocket, args: &ClientArgs, book: &[Probe]) -> anyhow::Result<bool> {
    let realtime = make_realtime().is_ok();
    let mut packet = vec![0; args.size_bytes];
    packet[..4].copy_from_slice(&MAGIC);
    // The receiving thread needs the socket to block; so each send says for itself that it must not.
    let first_ns = now_ns(ClockId::Monotonic) + LEAD.as_nanos() as u64;
    for (number, probe) in book.iter().enumerate() {
        let due_ns =
            first_ns + (number as u128 * u128::from(NS_PER_S) / u128::from(args.rate_hz)) as u64;
        packet[4..12].copy_from_slice(&(number as u64).to_be_bytes());
        packet[12..20].copy_from_slice(&due_ns.to_be_bytes());
        let due =
            Timespec { tv_sec: (due_ns / NS_PER_S) as i64, tv_nsec: (due_ns % NS_PER_S) as _ };
        while clock_nanosleep_absolute(ClockId::Monotonic, &due).is_err() {}
        let late_ns = now_ns(ClockId::Monotonic).saturating_sub(due_ns);
        probe.due_ns.store(due_ns, Ordering::Relaxed);
        probe.lateness_ns.store(late_ns, Ordering::Relaxed);
        probe.sent_ns.store(now_ns(ClockId::Realtime), Ordering::Release);
        if rustix::net::send(socket, &packet, rustix::net::SendFlags::DONTWAIT).is_err() {
            probe.sent_ns.store(0, Ordering::Release);
        }
    }
    Ok(realtime)
}

/// Receives until all replies are in, or nothing is to be expected any more.
fn receive_all(
    socket: &UdpSocket,
    drain: Duration,
    book: &[Probe],
    sent_all: &AtomicBool,
) -> anyhow::Result<()> {
    // Its stamps are the kernel's, so the class matters little; but a full buffer loses replies.
    let _ = make_realtime();
    let mut buffer = vec![0; SIZE_MAX + 1];
    let mut received = 0;
    let mut draining_since = None;
    while received < book.len() {
        if sent_all.load(Ordering::Acquire) {
            let since = *draining_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= drain {
                break;
            }
        }
        let (len, stamp_ns) = match recv_stamped(socket, &mut buffer) {
            Ok(got) => got,
            Err(e) => match e.kind() {
                std::io::ErrorKind::WouldBlock
                | std::io::ErrorKind::TimedOut
                | std::io::ErrorKind::Interrupted => continue,
                // The server is not there (yet).
                std::io::ErrorKind::ConnectionRefused => continue,
                _ => return Err(e.into()),
            },
        };
        let Some(number) = number_of(&buffer[..len]) else { continue };
        let Some(probe) = usize::try_from(number).ok().and_then(|n| book.get(n)) else { continue };
        let at_ns = stamp_ns.unwrap_or_else(|| now_ns(ClockId::Realtime));
        // A reply that the network doubled counts once.
        if probe
            .received_ns
            .compare_exchange(0, at_ns, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
        {
            received += 1;
        }
    }
    Ok(())
}

fn summarize(
    book: &[Probe],
    stalls: &[Stall],
    settle: Duration,
    realtime: bool,
) -> anyhow::Result<ProbeReport> {
    let (mut rtt, mut from_schedule, mut lateness) =
        (histogram_ns()?, histogram_ns()?, histogram_ns()?);
    let (mut sent, mut refused, mut received, mut stalled) = (0, 0, 0, 0);
    let mut bins: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    let first_ns = book.first().map_or(0, |probe| probe.due_ns.load(Ordering::Relaxed));
    for probe in book {
        let [due_ns, sent_ns, lateness_ns, received_ns] =
            [&probe.due_ns, &probe.sent_ns, &probe.lateness_ns, &probe.received_ns]
                .map(|t| t.load(Ordering::Relaxed));
        // Both from the clock of the day; should it be set back meanwhile, the probe took no time.
        let rtt_ns = received_ns.saturating_sub(sent_ns);
        let after_ns = due_ns.saturating_sub(first_ns);
        let counts = u128::from(after_ns) >= settle.as_nanos();
        let is_stalled = stalls::overlaps(stalls, due_ns, due_ns + lateness_ns + rtt_ns);
        if sent_ns != 0 && received_ns != 0 && !is_stalled {
            let bin = bins.entry(after_ns / BIN.as_nanos() as u64).or_default();
            bin.push(rtt_ns as f64 / NS_PER_US);
        }
        if !counts {
            continue;
        }
        sent += u64::from(sent_ns != 0);
        refused += u64::from(sent_ns == 0);
        received += u64::from(received_ns != 0);
        if is_stalled {
            stalled += 1;
            continue;
        }
        lateness.record(lateness_ns)?;
        if sent_ns == 0 || received_ns == 0 {
            continue;
        }
        rtt.record(rtt_ns)?;
        from_schedule.record(rtt_ns + lateness_ns)?;
    }
    Ok(ProbeReport {
        sent,
        received,
        lost: sent - received,
        refused,
        stalled,
        rtt: Quantiles::of_ns(&rtt),
        rtt_cdf_us: stats::histogram_cdf(&rtt)
            .into_iter()
            .map(|(ns, share)| (ns / NS_PER_US, share))
            .collect(),
        from_schedule: Quantiles::of_ns(&from_schedule),
        lateness: Quantiles::of_ns(&lateness),
        rtt_over_time_us: bins
            .iter()
            .filter_map(|(bin, rtts_us)| {
                Some((*bin as f64 * BIN.as_secs_f64(), stats::median(rtts_us)?))
            })
            .collect(),
        realtime,
    })
}

fn number_of(packet: &[u8]) -> Option<u64> {
    let number = packet.strip_prefix(&MAGIC)?.first_chunk::<{ size_of::<u64>() }>()?;
    (packet.len() >= SIZE_MIN).then(|| u64::from_be_bytes(*number))
}

fn now_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * NS_PER_S + now.tv_nsec as u64
}

/// As far as the system's bounds allow.
fn widen(socket: &UdpSocket) {
    let _ = set_socket_send_buffer_size(socket, BUFFER_BYTES);
    let _ = set_socket_recv_buffer_size(socket, BUFFER_BYTES);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn echo_server() -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        thread::spawn(move || echo(&socket));
        address
    }

    #[test]
    fn every_probe_over_loopback_is_accounted_for() {
        let args = ClientArgs::new(echo_server(), Duration::from_millis(200));
        let report = probe(&args).unwrap();
        assert_eq!(report.sent + report.refused, 100);
        assert_eq!(report.received + report.lost, report.sent);
        assert!(report.received > 0);
        assert!(report.rtt.count == 0 || report.rtt.min_us > 0.0, "{report:?}");
        assert!(report.from_schedule.mean_us >= report.rtt.mean_us, "{report:?}");
        assert_eq!(report.lateness.count + report.stalled, 100);
    }

    #[test]
    fn probes_that_a_stall_held_up_are_left_out_of_the_distributions() {
        const MS: u64 = 1_000_000;
        // Due every 10 ms, back after 1 ms; the second and the third meet the stall.
        let book: Vec<Probe> = [1, 25, 15, 1]
            .iter()
            .enumerate()
            .map(|(n, rtt_ms)| Probe {
                due_ns: (n as u64 * 10 * MS).into(),
                sent_ns: (1000 * MS).into(),
                lateness_ns: 0.into(),
                received_ns: ((1000 + rtt_ms) * MS).into(),
            })
            .collect();
        let stall = Stall { start_ns: 12 * MS, end_ns: 28 * MS };
        let report = summarize(&book, &[stall], Duration::ZERO, true).unwrap();
        assert_eq!((report.sent, report.received, report.stalled), (4, 4, 2));
        assert_eq!(report.rtt.count, 2);
        assert!(report.rtt.max_us < 1100.0, "{report:?}");
        let all = summarize(&book, &[], Duration::ZERO, true).unwrap();
        assert_eq!((all.stalled, all.rtt.count), (0, 4));
    }

    #[test]
    fn probes_before_the_path_has_settled_are_in_the_latency_over_time_alone() {
        const MS: u64 = 1_000_000;
        // Due every 10 ms: two in a bin. The third was not taken, the last did not come back.
        let book: Vec<Probe> = [(1, true), (3, true), (5, false), (7, true), (0, true)]
            .iter()
            .enumerate()
            .map(|(n, &(rtt_ms, is_sent))| Probe {
                due_ns: ((100 + n as u64 * 10) * MS).into(),
                sent_ns: (if is_sent { 1000 * MS } else { 0 }).into(),
                lateness_ns: 0.into(),
                received_ns: (if is_sent && rtt_ms > 0 { (1000 + rtt_ms) * MS } else { 0 }).into(),
            })
            .collect();
        let report = summarize(&book, &[], Duration::from_millis(20), true).unwrap();
        assert_eq!(report.rtt_over_time_us, [(0.0, 2000.0), (0.02, 7000.0)]);
        assert_eq!((report.sent, report.refused, report.received, report.lost), (2, 1, 1, 1));
        assert_eq!(report.rtt.count, 1);
    }

    #[test]
    fn silence_is_an_error_not_a_latency() {
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut args = ClientArgs::new(silent.local_addr().unwrap(), Duration::from_millis(20));
        args.drain = Duration::from_millis(10);
        let error = probe(&args).unwrap_err().to_string();
        assert_eq!(error, "no reply to 10 probes: is a probe-server there?");
    }

    #[test]
    fn strangers_are_not_replies() {
        assert_eq!(number_of(b""), None);
        assert_eq!(number_of(b"tide\0\0\0\0\0\0\0\x07"), None);
        assert_eq!(number_of(b"tide\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0\0"), Some(7));
        assert_eq!(number_of(b"tame\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0\0"), None);
    }

    #[test]
    fn nonsense_is_refused() {
        let server = "127.0.0.1:9".parse().unwrap();
        let good = ClientArgs::new(server, Duration::from_secs(1));
        for bad in [
            ClientArgs { rate_hz: 0, ..good },
            ClientArgs { size_bytes: 8, ..good },
            ClientArgs { duration: Duration::ZERO, ..good },
        ] {
            assert!(probe(&bad).is_err(), "{bad:?}");
        }
    }
}
