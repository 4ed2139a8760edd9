//! Greedy transfers from a limited sender: iperf3 sends as much as it can, the meter on the receiver's device
//! counts whole frames as the limiter does (Ethernet header, no checksum), a probe may pass the same limit,
//! and what both ends cost the processors is read.

use std::time::Duration;

use super::{
    bed::{Bed, Control},
    cpu::{Cpus, PathMeter},
    wire::Wire,
};
use crate::{
    chart::{Lines, Series},
    context::Context,
    stats,
    systems::{Counters, LimitCase, System},
    testbed::wait::pass_time,
    tools::{
        Quantiles,
        iperf::{IperfOptions, IperfReport, IperfRun, Load},
        probe::{self, ProbeReport},
    },
};

const PROBE_PORT: u16 = 7001;
/// TCP's start is over, and all flows run.
pub(super) const SETTLED: Duration = Duration::from_millis(500);
pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const TENTH: Duration = Duration::from_millis(100);

pub(super) struct Bulk<'a> {
    pub(super) system: System,
    pub(super) limit_bit_s: u64,
    pub(super) flows: u32,
    pub(super) control: &'a Control,
    /// Whole seconds, as iperf3 wants them.
    pub(super) duration: Duration,
    /// Probes in a second; none: no probe, so that nothing but the transfer costs CPU time.
    pub(super) probe_hz: Option<u64>,
}

pub(super) struct Transferred {
    pub(super) iperf: IperfReport,
    pub(super) probe: Option<ProbeReport>,
    pub(super) counters: Option<Counters>,
    pub(super) wire: Wire,
    /// From [`SETTLED`] on, to as long before the end.
    pub(super) cpus: Cpus,
    limit_bit_s: u64,
    duration: Duration,
}

impl Bulk<'_> {
    pub(super) fn run(&self, ctx: &Context, bed: &mut Bed) -> anyhow::Result<Transferred> {
        let Bulk { limit_bit_s, duration, .. } = *self;
        bed.set_ecn(self.control.ecn)?;
        let applied = self.system.apply(ctx, &bed.testbed, &LimitCase::egress(limit_bit_s))?;
        bed.start_meter()?;
        let testbed = &bed.testbed;
        let (from, to) = (applied.site(testbed.sender()), testbed.receiver(0));
        let probe_server =
            self.probe_hz.map(|_| probe::start_server(testbed, to, bed.at(PROBE_PORT)));
        let _probe_server = probe_server.transpose()?;
        let mut options = IperfOptions::tcp(bed.at(0).ip(), duration);
        options.parallel = self.flows;
        options.load = Load::Tcp { cc: Some(self.control.name().to_owned()) };
        let iperf = IperfRun::start(from, to, &options)?;
        let cpu = PathMeter::attach(vec![iperf.client_pid(), iperf.server_pid()])?;
        pass_time(SETTLED)?;
        let mut prober = None;
        if let Some(rate_hz) = self.probe_hz {
            let mut probes = probe::ClientArgs::new(bed.at(PROBE_PORT), duration - SETTLED);
            probes.rate_hz = rate_hz;
            probes.may_lose_all = true;
            // HTB's queue is longer than a second at the lowest rates.
            probes.drain = Duration::from_secs(3);
            prober = Some((probe::start_client(testbed, from, probes)?, probes));
        }
        let was = cpu.read()?;
        pass_time(duration.saturating_sub(2 * SETTLED))?;
        let cpus = cpu.read()?.since(&was);
        let iperf = iperf.finish()?;
        let probe = prober.map(|(client, probes)| probe::finish_client(client, probes));
        let (probe, wire) = (probe.transpose()?, bed.wire()?);
        let counters = applied.finish()?;
        Ok(Transferred { iperf, probe, counters, wire, cpus, limit_bit_s, duration })
    }
}

impl Transferred {
    /// The mean rate on the wire when all flows run.
    pub(super) fn wire_bit_s(&self) -> Option<f64> {
        self.wire.mean_bit_s(SETTLED, self.duration)
    }

    /// Metric and value of all but the CPU time; shares are of the limit.
    pub(super) fn values(&self) -> Vec<(&'static str, f64)> {
        let flows: Vec<f64> = self.iperf.streams.iter().map(|flow| flow.received_bit_s).collect();
        let percent = |bit_s: f64| bit_s / self.limit_bit_s as f64 * 100.0;
        let mut values = Vec::new();
        values.extend(self.wire_bit_s().map(|rate| ("used_percent", percent(rate))));
        values.extend(self.wire.peak(SECOND).map(|peak| ("max_1s_percent", percent(peak.bit_s))));
        if let Some(peak) = self.wire.peak(TENTH) {
            values.push(("max_100ms_percent", percent(peak.bit_s)));
            values.push(("max_100ms_at_s", peak.since_start.as_secs_f64()));
        }
        values.push(("goodput_bit_s", self.iperf.received_bit_s));
        if let Some(probe) = &self.probe {
            if probe.mostly_came_back() {
                let Quantiles { p50_us, p99_us, .. } = probe.rtt;
                values.extend([("rtt_p50_us", p50_us), ("rtt_p99_us", p99_us)]);
            }
            values.push(("probes_lost_percent", probe.lost_percent()));
        }
        values.extend(stats::jain(&flows).map(|index| ("jain_index", index)));
        values.extend(self.iperf.retransmits.map(|count| ("retransmits", count as f64)));
        values.extend(self.counters.map(|counters| ("drops", counters.dropped as f64)));
        values
    }
}

/// The figure of the rate on the wire over time, one line a system; none where nothing was recorded.
pub(super) fn over_time(ctx: &mut Context, title: &str, limit_bit_s: u64, series: Vec<Series>) {
    if series.is_empty() {
        return;
    }
    let lines = Lines {
        title: title.to_owned(),
        x: "time_s".to_owned(),
        y: "wire_bit_s".to_owned(),
        logarithmic: false,
        limit: Some(limit_bit_s as f64),
        series,
    };
    ctx.figure("wire-over-time", lines);
}
