//! Datagrams on a schedule: bursts of so many, a burst each so often, the datagrams of a burst so far apart.
//! One datagram a burst is a smooth source, many are what a generator sends that wakes up now and then.
//!
//! The schedule is absolute: whoever is late catches up, so the mean rate is exact. Datagrams further apart
//! than a wake-up takes are slept for, closer ones are waited for on the CPU. The socket is connected, so the
//! kernel numbers its datagrams one by one in their IP headers, and a capture shows what was lost.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context, ensure};
use clap::Args;
use rustix::{
    thread::clock_nanosleep_absolute,
    time::{ClockId, Timespec, clock_gettime},
};
use serde::{Deserialize, Serialize};
use tidegate_sys::sched::make_realtime;

use super::{GRACE, NS_PER_US};
use crate::testbed::{Child, Site, Testbed};

const NS_PER_S: u64 = 1_000_000_000;
/// The most datagrams, some hours of a slow source or a minute of a fast one.
const DATAGRAMS_MAX: u64 = 50_000_000;
const PAYLOAD_MAX: usize = 65_507;
/// What a sleep is good for; less is waited for on the CPU.
const SLEEP_LEAST_NS: u64 = 40_000;
/// Of that, at most so much in one piece: a thread in the real-time class must leave time to others.
const SPIN_MOST_NS: u64 = 50_000_000;
/// The first departure, after everything is set up.
const LEAD: Duration = Duration::from_millis(20);

/// What a source is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args)]
pub struct SourceArgs {
    /// Where to
    #[arg(long, value_name = "ADDR:PORT")]
    pub to: SocketAddr,
    /// Payload of a datagram
    #[arg(long = "payload", value_name = "BYTES")]
    pub payload_bytes: usize,
    /// Datagrams of a burst
    #[arg(long = "burst", value_name = "N", default_value_t = 1)]
    pub burst_datagrams: u32,
    /// From the start of one burst to that of the next
    #[arg(long = "period-ns", value_name = "NS")]
    pub period_ns: u64,
    /// From one datagram of a burst to the next
    #[arg(long = "gap-ns", value_name = "NS", default_value_t = 0)]
    pub gap_ns: u64,
    /// How many bursts
    #[arg(long, value_name = "N")]
    pub bursts: u64,
}

impl SourceArgs {
    /// How long it sends.
    pub fn duration(&self) -> Duration {
        Duration::from_nanos(self.period_ns.saturating_mul(self.bursts))
    }

    fn to_words(self) -> Vec<String> {
        let Self { to, payload_bytes, burst_datagrams, period_ns, gap_ns, bursts } = self;
        vec![
            format!("--to={to}"),
            format!("--payload={payload_bytes}"),
            format!("--burst={burst_datagrams}"),
            format!("--period-ns={period_ns}"),
            format!("--gap-ns={gap_ns}"),
            format!("--bursts={bursts}"),
        ]
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceReport {
    /// Datagrams that left.
    pub sent: u64,
    /// Datagrams that the source's own stack did not take.
    pub refused: u64,
    /// From the first datagram of a burst to its last, on average, as they left.
    pub burst_mean_us: f64,
    /// From scheduled to actual departure, on average.
    pub late_mean_us: f64,
    /// The latest.
    pub late_max_us: f64,
    /// The source ran in the real-time class.
    pub realtime: bool,
}

/// Starts a source in the testbed; [`finish`] waits for its report.
pub fn start<'a>(
    testbed: &Testbed,
    site: impl Into<Site<'a>>,
    args: SourceArgs,
) -> anyhow::Result<Child> {
    let mut command = testbed.tool(site, "udp-source")?;
    command.args(args.to_words());
    Child::spawn(command)
}

/// Waits for a source and reads its report.
pub fn finish(source: Child, args: SourceArgs) -> anyhow::Result<SourceReport> {
    source.finish(args.duration() + GRACE)?.json()
}

pub fn send(args: &SourceArgs) -> anyhow::Result<SourceReport> {
    let &SourceArgs { to, payload_bytes, burst_datagrams, period_ns, gap_ns, bursts } = args;
    let count = u64::from(burst_datagrams).saturating_mul(bursts);
    ensure!((1..=DATAGRAMS_MAX).contains(&count), "{count} datagrams: use 1 to {DATAGRAMS_MAX}");
    ensure!(payload_bytes <= PAYLOAD_MAX, "--payload must be at most {PAYLOAD_MAX}");
    ensure!(
        gap_ns >= SLEEP_LEAST_NS || gap_ns.saturating_mul(burst_datagrams.into()) <= SPIN_MOST_NS,
        "a burst of {burst_datagrams} datagrams {gap_ns} ns apart keeps a CPU busy for too long"
    );
    let any: SocketAddr = if to.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to).with_context(|| format!("cannot reach {to}"))?;
    let realtime = make_realtime().is_ok();
    let payload = vec![0; payload_bytes];

    let (mut refused, mut late_ns, mut late_max_ns, mut bursts_ns) = (0, 0u64, 0, 0);
    let first_ns = now_ns() + LEAD.as_nanos() as u64;
    for burst in 0..bursts {
        let start_ns = first_ns + burst * period_ns;
        let (mut began_ns, mut ended_ns) = (None, 0);
        for at in 0..u64::from(burst_datagrams) {
            let due_ns = start_ns + at * gap_ns;
            let left_ns = wait_until_ns(due_ns);
            late_ns += left_ns - due_ns;
            late_max_ns = late_max_ns.max(left_ns - due_ns);
            began_ns.get_or_insert(left_ns);
            ended_ns = left_ns;
            refused += u64::from(socket.send(&payload).is_err());
        }
        bursts_ns += ended_ns - began_ns.unwrap_or(ended_ns);
    }
    let mean_us = |sum_ns: u64, of: u64| sum_ns as f64 / of as f64 / NS_PER_US;
    Ok(SourceReport {
        sent: count - refused,
        refused,
        burst_mean_us: mean_us(bursts_ns, bursts),
        late_mean_us: mean_us(late_ns, count),
        late_max_us: late_max_ns as f64 / NS_PER_US,
        realtime,
    })
}

/// Returns the time at which it returns, `due_ns` or later.
fn wait_until_ns(due_ns: u64) -> u64 {
    loop {
        let now = now_ns();
        if now >= due_ns {
            return now;
        }
        if due_ns - now > SLEEP_LEAST_NS {
            let (tv_sec, tv_nsec) = ((due_ns / NS_PER_S) as i64, (due_ns % NS_PER_S) as _);
            // A signal only wakes it early.
            let _ = clock_nanosleep_absolute(ClockId::Monotonic, &Timespec { tv_sec, tv_nsec });
        } else {
            std::hint::spin_loop();
        }
    }
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * NS_PER_S + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_datagram_is_sent_or_refused() {
        let sink = UdpSocket::bind("127.0.0.1:0").unwrap();
        let args = SourceArgs {
            to: sink.local_addr().unwrap(),
            payload_bytes: 100,
            burst_datagrams: 5,
            period_ns: 2_000_000,
            gap_ns: 10_000,
            bursts: 20,
        };
        let report = send(&args).unwrap();
        assert_eq!(report.sent + report.refused, 100);
        assert_eq!(args.duration(), Duration::from_millis(40));
        assert!(report.late_max_us >= report.late_mean_us, "{report:?}");
    }

    #[test]
    fn nonsense_is_refused() {
        let to = "127.0.0.1:9".parse().unwrap();
        let good = SourceArgs {
            to,
            payload_bytes: 100,
            burst_datagrams: 1,
            period_ns: 1000,
            gap_ns: 0,
            bursts: 1,
        };
        for bad in [
            SourceArgs { bursts: 0, ..good },
            SourceArgs { bursts: u64::MAX, burst_datagrams: 2, ..good },
            SourceArgs { payload_bytes: 70_000, ..good },
            SourceArgs { burst_datagrams: 1_000_000, gap_ns: 1000, ..good },
        ] {
            assert!(send(&bad).is_err(), "{bad:?}");
        }
    }
}
