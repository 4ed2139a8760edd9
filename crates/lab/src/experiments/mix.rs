//! The traffic of the NRM paper: back-to-back remote procedure calls of 1 MB on all flows but one, which
//! makes calls of 10 KB, while an open-loop probe measures the round trip inside the same limit.

use std::time::Duration;

use tidegate_core::Direction;

use super::{
    bed::{Bed, Control},
    wire::Wire,
};
use crate::{
    context::Context,
    report::Case,
    systems::{Counters, LimitCase, System},
    testbed::{LinkSpec, wait::pass_time},
    tools::{
        probe::{self, ProbeReport},
        rpc::{self, ClassReport, RpcReport},
    },
};

/// What one call carries; kilobytes are those of tc.
const LARGE_BYTES: u64 = 1 << 20;
const SMALL_BYTES: u64 = 10 << 10;
const RPC_PORT: u16 = 7000;
const PROBE_PORT: u16 = 7001;

/// How long the flows run before they are measured, and how long they are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spell {
    pub(super) warmup: Duration,
    pub(super) measured: Duration,
}

impl Spell {
    /// As an experiment needs it: long enough for a median, to try it, or only to see that it runs.
    pub(super) fn new(tiny: bool, quick: bool) -> Spell {
        let (warmup_ms, measured_ms) = match (tiny, quick) {
            (true, _) => (100, 300),
            (false, true) => (300, 1700),
            (false, false) => (500, 2500),
        };
        Spell {
            warmup: Duration::from_millis(warmup_ms),
            measured: Duration::from_millis(measured_ms),
        }
    }
}

pub(super) struct Mix<'a> {
    pub(super) system: System,
    pub(super) limit_bit_s: u64,
    /// On what the sender sends, or on what the receiver receives.
    pub(super) direction: Direction,
    pub(super) flows: usize,
    pub(super) control: &'a Control,
    /// Tidegate leaves TCP's timers alone.
    pub(super) kernel_timers: bool,
    /// The bed's link; none: it has none.
    pub(super) link: Option<LinkSpec>,
    pub(super) spell: Spell,
}

pub(super) struct Mixed {
    pub(super) calls: RpcReport,
    pub(super) probe: ProbeReport,
    pub(super) counters: Option<Counters>,
    pub(super) wire: Wire,
    spell: Spell,
}

impl Mix<'_> {
    /// The case of the run's rows.
    pub(super) fn case(&self) -> Case {
        Case::new()
            .with("limit_bit_s", self.limit_bit_s)
            .with("flows", self.flows)
            .with("cc", self.control.label)
            .with_link(self.link)
    }

    pub(super) fn run(&self, ctx: &Context, bed: &mut Bed) -> anyhow::Result<Mixed> {
        let Spell { warmup, measured } = self.spell;
        bed.set_ecn(self.control.ecn)?;
        let limit = match self.direction {
            Direction::Egress => LimitCase::egress(self.limit_bit_s),
            Direction::Ingress => LimitCase::ingress(self.limit_bit_s),
        };
        let limit = LimitCase { kernel_timers: self.kernel_timers, ..limit };
        let applied = self.system.apply(ctx, &bed.testbed, &limit)?;
        // What comes before the first call is silence, and cut off.
        bed.start_meter()?;
        let testbed = &bed.testbed;
        let (sender, receiver) = (testbed.sender(), testbed.receiver(0));
        let (from, to) = match self.direction {
            Direction::Egress => (applied.site(sender), receiver.into()),
            Direction::Ingress => (sender.into(), applied.site(receiver)),
        };
        let calls_server = rpc::start_server(testbed, to, bed.at(RPC_PORT))?;
        let probe_server = probe::start_server(testbed, to, bed.at(PROBE_PORT))?;

        let sizes = flows_bytes(self.flows);
        let mut calls = rpc::ClientArgs::new(bed.at(RPC_PORT), sizes, measured);
        calls.warmup = warmup;
        calls.cc = Some(self.control.name().to_owned());
        let caller = rpc::start_client(testbed, from, &calls)?;
        pass_time(warmup)?;
        let mut probes = probe::ClientArgs::new(bed.at(PROBE_PORT), measured);
        probes.may_lose_all = true;
        let prober = probe::start_client(testbed, from, probes)?;
        let calls = rpc::finish_client(caller, &calls)?;
        let probe = probe::finish_client(prober, probes)?;
        // They are in the limit's cgroup, which goes next.
        drop((calls_server, probe_server));
        let wire = bed.wire()?;
        Ok(Mixed { calls, probe, counters: applied.finish()?, wire, spell: self.spell })
    }
}

impl Mixed {
    /// The calls of 1 MB.
    pub(super) fn large(&self) -> Option<&ClassReport> {
        self.calls.classes.iter().find(|class| class.request_bytes == LARGE_BYTES)
    }

    /// The calls of 10 KB.
    pub(super) fn small(&self) -> Option<&ClassReport> {
        self.calls.classes.iter().find(|class| class.request_bytes == SMALL_BYTES)
    }

    /// The rate on the wire while the calls were measured.
    pub(super) fn wire_bit_s(&self) -> Option<f64> {
        self.wire.mean_bit_s(self.spell.warmup, self.spell.warmup + self.spell.measured)
    }

    /// Metric and value of all of it.
    pub(super) fn values(&self) -> Vec<(&'static str, f64)> {
        let sum = |of: fn(&ClassReport) -> Option<u64>| {
            self.calls.classes.iter().filter_map(of).sum::<u64>() as f64
        };
        let mut values = vec![("goodput_bit_s", self.calls.goodput_bit_s)];
        values.extend(self.wire_bit_s().map(|rate| ("wire_bit_s", rate)));
        // The times are those of the probes that came back; so say how many did not.
        if self.probe.received > 0 {
            values.push(("rtt_p50_us", self.probe.rtt.p50_us));
            values.push(("rtt_p99_us", self.probe.rtt.p99_us));
        }
        values.push(("probes_lost_percent", self.probe.lost_percent()));
        if let Some(large) = self.large().filter(|class| class.rpcs > 0) {
            values.extend([
                ("rpc_1mb_bit_s", large.goodput_bit_s),
                ("rpc_1mb_p50_us", large.latency.p50_us),
                ("rpc_1mb_p99_us", large.latency.p99_us),
                ("rpc_1mb_p99_9_us", large.latency.p99_9_us),
            ]);
        }
        if let Some(small) = self.small().filter(|class| class.rpcs > 0) {
            values.extend([
                ("rpc_10kb_bit_s", small.goodput_bit_s),
                ("rpc_10kb_per_s", small.rpcs as f64 / self.calls.seconds),
                ("rpc_10kb_p50_us", small.latency.p50_us),
                ("rpc_10kb_p99_us", small.latency.p99_us),
                ("rpc_10kb_p99_9_us", small.latency.p99_9_us),
            ]);
        }
        values.push(("retransmits", sum(|class| class.retransmits)));
        if let Some(counters) = self.counters {
            values.extend([
                ("drops", counters.dropped as f64),
                ("marks", counters.marked as f64),
                ("window_cuts", counters.slowed as f64),
            ]);
        }
        values
    }

    /// Records all of it. `published` gives the figure of a metric that was published for this run.
    pub(super) fn record(
        &self,
        ctx: &mut Context,
        system: &str,
        case: &Case,
        run: u32,
        published: impl Fn(&str) -> Option<f64>,
    ) {
        let values = self.values();
        let mut record = ctx.record(system, case, run);
        for (metric, value) in values {
            record = record.beside(metric, value, published(metric));
        }
    }
}

/// One flow calls with 1 MB; from two on, one of them with 10 KB.
fn flows_bytes(flows: usize) -> Vec<u64> {
    let mut bytes = vec![LARGE_BYTES; flows];
    if let [_, .., last] = &mut bytes[..] {
        *last = SMALL_BYTES;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_several_flows_is_small() {
        assert_eq!(flows_bytes(1), [LARGE_BYTES]);
        assert_eq!(flows_bytes(2), [LARGE_BYTES, SMALL_BYTES]);
        let nine = flows_bytes(9);
        assert_eq!(nine.iter().filter(|bytes| **bytes == LARGE_BYTES).count(), 8);
    }
}
