//! Greedy transfers of a guest under a limit ([`Shaper`]): iperf3 sends as much as it can, a meter on the
//! peer's device counts whole frames as the limiters do (Ethernet header, no checksum), and a probe passes
//! the same limit, open loop.

use std::{net::SocketAddr, time::Duration};

use anyhow::Context as _;
use tidegate_core::Rate;

use super::{bed::Control, he_2017, policers::Road, shapers::Shaper, wire::Wire};
use crate::{
    context::Context,
    report::Case,
    stats,
    testbed::{Family, set_sysctl, wait::pass_time},
    tools::{
        iperf::{IperfOptions, IperfReport, IperfRun, Load},
        probe::{self, ProbeReport},
    },
};

const PROBE_PORT: u16 = 7001;
pub(super) const TENTH: Duration = Duration::from_millis(100);
/// TCP's start is over, and so is that of whoever measures.
const SETTLED: Duration = Duration::from_millis(1000);
/// What the probe ends before the transfer, or it would see the limit without load.
const EARLY: Duration = Duration::from_millis(100);
/// How long an idle path is looked at.
const IDLE: Duration = Duration::from_millis(1000);

/// The metrics of a run.
pub(super) const WIRE: &str = "wire_bit_s";
pub(super) const VARIATION: &str = "variation_percent";
pub(super) const JAIN: &str = "jain_index";
pub(super) const P50: &str = "rtt_p50_us";
/// By how much the median is above that of the path without limit and load, looked at in the same round.
pub(super) const ABOVE: &str = "above_idle_p50_us";

pub(super) struct Transfer<'a> {
    pub(super) shaper: Shaper,
    pub(super) limit_bit_s: u64,
    pub(super) flows: u32,
    pub(super) control: &'a Control,
    /// Whole seconds, as iperf3 wants them.
    pub(super) duration: Duration,
}

pub(super) struct Transferred {
    /// None of an idle path.
    pub(super) iperf: Option<IperfReport>,
    pub(super) probe: ProbeReport,
    /// From when TCP's start is over, to the end.
    pub(super) wire: Wire,
    pub(super) drops: u64,
}

impl Transfer<'_> {
    pub(super) fn run(&self, ctx: &Context, road: &mut Road) -> anyhow::Result<Transferred> {
        let rate = Rate::from_bit_s(self.limit_bit_s).context("a limit of zero")?;
        for host in [road.testbed.sender(), road.testbed.receiver(0)] {
            set_sysctl(host, "net.ipv4.tcp_ecn", if self.control.ecn { "1" } else { "0" })?;
        }
        road.start_meters()?;
        let testbed = &road.testbed;
        let (from, to) = (testbed.sender(), testbed.receiver(0));
        let shaped = self.shaper.apply(ctx, testbed, rate)?;
        let at = SocketAddr::new(testbed.addr(0, Family::V4), PROBE_PORT);
        let _server = probe::start_server(testbed, to, at)?;
        let probes = |duration| probe::ClientArgs {
            // A quantile of one in a thousand wants thousands.
            rate_hz: 1000,
            may_lose_all: true,
            ..probe::ClientArgs::new(at, duration)
        };
        let probe = |duration| {
            let args = probes(duration);
            probe::finish_client(probe::start_client(testbed, from, args)?, args)
        };
        if self.shaper == Shaper::Idle {
            let wire = Wire::new(Vec::new(), TENTH);
            return Ok(Transferred { iperf: None, probe: probe(IDLE)?, wire, drops: 0 });
        }
        let mut options = IperfOptions::tcp(at.ip(), self.duration);
        options.parallel = self.flows;
        options.load = Load::Tcp { cc: Some(self.control.name().to_owned()) };
        let iperf = IperfRun::start(from, to, &options)?;
        pass_time(SETTLED)?;
        let probe = probe(self.duration.saturating_sub(SETTLED + EARLY))?;
        let iperf = iperf.finish()?;
        let drops = shaped.finish()?;
        let wire = road.wires()?.swap_remove(0).between(SETTLED, self.duration);
        Ok(Transferred { iperf: Some(iperf), probe, wire, drops })
    }
}

/// Where the transfers of a case go, one after the other, the idle path first in each round.
pub(super) struct Rounds {
    /// The published figures are of a path that is near.
    pub(super) far: bool,
    idle_us: Option<f64>,
}

impl Rounds {
    pub(super) fn new(far: bool) -> Rounds {
        Rounds { far, idle_us: None }
    }

    /// Runs a transfer, and records it beside what was published, and by how much it is above the idle path
    /// of its round.
    pub(super) fn run(
        &mut self,
        ctx: &mut Context,
        road: &mut Road,
        transfer: &Transfer<'_>,
        case: &Case,
        run: u32,
    ) -> anyhow::Result<Transferred> {
        let &Transfer { shaper, limit_bit_s, flows, .. } = transfer;
        if shaper == Shaper::Idle {
            self.idle_us = None;
        }
        let seen = transfer.run(ctx, road)?;
        let name = shaper.name();
        let published =
            |metric| he_2017::low_latency(name, flows, limit_bit_s, metric).filter(|_| !self.far);
        let mut record = ctx.record(name, case, run);
        for (metric, value) in seen.values() {
            record = record.beside(metric, value, published(metric));
        }
        let p50_us = seen.probe.rtt.p50_us;
        if shaper == Shaper::Idle {
            self.idle_us = Some(p50_us);
        } else if let Some(idle_us) = self.idle_us.filter(|_| seen.probe.received > 0) {
            record.value(ABOVE, p50_us - idle_us);
        }
        Ok(seen)
    }
}

impl Transferred {
    /// Metric and value.
    pub(super) fn values(&self) -> Vec<(&'static str, f64)> {
        let mut values = Vec::new();
        let tenths = self.wire.rates_bit_s(TENTH);
        values.extend(stats::mean(&tenths).map(|rate| (WIRE, rate)));
        values.extend(stats::variation(&tenths).map(|part| (VARIATION, part * 100.0)));
        values.extend(self.iperf.iter().map(|iperf| ("goodput_bit_s", iperf.received_bit_s)));
        if self.probe.mostly_came_back() {
            let rtt = &self.probe.rtt;
            values.extend([
                (P50, rtt.p50_us),
                ("rtt_p99_us", rtt.p99_us),
                ("rtt_p99_9_us", rtt.p99_9_us),
            ]);
        }
        values.push(("probes_lost_percent", self.probe.lost_percent()));
        let Some(iperf) = &self.iperf else { return values };
        let flows: Vec<f64> = iperf.streams.iter().map(|flow| flow.received_bit_s).collect();
        values.extend(stats::jain(&flows).filter(|_| flows.len() > 1).map(|index| (JAIN, index)));
        values.extend(iperf.retransmits.map(|count| ("retransmits", count as f64)));
        values.push(("drops", self.drops as f64));
        values
    }
}
