//! `pace-egress`: one scheme that wins every column at once? The calls of the NRM paper (`mix`), and greedy
//! transfers (`bulk`), from a sender limited by `pace`, `nrm`, `nrm-paper`, HTB and TBF in turn.
//!
//! It asks more than [`nrm_egress`](super::nrm_egress), whose cases it shares, and compares with what was
//! measured here, not with what was published; [`limits`](super::limits) goes to 10 Mbit/s and asks less.
//! The calls say what a user waits for, the transfers how exactly the limit is kept and what that costs:
//! in calls a faster answer is a further call, so that the CPU time of two systems would not be for
//! the same work.

mod claims;

use std::{path::PathBuf, time::Duration};

use tidegate_core::Direction;

use super::{
    bed::{Bed, Control},
    bulk::{self, Bulk, TENTH},
    case_in_words,
    mix::{Mix, Spell},
};
use crate::{
    chart::{BarsOf, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    systems::System,
};

const MBIT: u64 = 1_000_000;
const GBIT: u64 = 1000 * MBIT;
const LIMITS: [u64; 3] = [100 * MBIT, GBIT, 5 * GBIT];
const CONTROLS: [&str; 4] = ["reno", "cubic", "bbr", "dctcp"];
const SYSTEMS: [System; 5] =
    [System::Pace, System::Htb, System::Tbf, System::NrmPaper, System::Nrm];

const CALLS_USED: &str = "calls_used_percent";
const CALLS_MOST: &str = "calls_max_1s_percent";
/// Of the transfers.
const CPU: &str = "cpu_seconds_per_gbit";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct PaceEgress {
    /// For tests: one case, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

/// A case.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cell {
    limit_bit_s: u64,
    flows: u32,
    cc: &'static str,
}

impl PaceEgress {
    /// One case of every system, seconds long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> PaceEgress {
        PaceEgress { tiny: Some(lab_binary) }
    }

    fn plan(&self, quick: bool) -> Vec<Cell> {
        let cell = |limit_bit_s, flows, cc| Cell { limit_bit_s, flows, cc };
        if self.tiny.is_some() {
            return vec![cell(GBIT, 2, "cubic")];
        }
        if quick {
            return vec![
                cell(100 * MBIT, 9, "cubic"),
                cell(GBIT, 1, "bbr"),
                cell(GBIT, 9, "cubic"),
                cell(GBIT, 5, "reno"),
                cell(5 * GBIT, 9, "dctcp"),
            ];
        }
        let mut plan = Vec::new();
        for limit_bit_s in LIMITS {
            for cc in CONTROLS {
                let flows = if cc == "cubic" { &[1, 2, 5, 9][..] } else { &[1, 9] };
                plan.extend(flows.iter().map(|&flows| cell(limit_bit_s, flows, cc)));
            }
        }
        plan
    }
}

impl Experiment for PaceEgress {
    fn name(&self) -> &'static str {
        "pace-egress"
    }

    fn summary(&self) -> &'static str {
        "Limits of 100 Mbit/s to 5 Gbit/s under calls and under greedy flows: use, delay, tail latency and \
         CPU time of pace beside HTB, TBF, nrm and NRM as published"
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, _quick: bool) -> u32 {
        1
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let tiny = self.tiny.is_some();
        let spell = Spell::new(tiny, ctx.quick);
        let bulk = Duration::from_secs(if tiny { 2 } else { 3 });
        let mut bed = Bed::new(self.tiny.clone(), ctx.usual_link())?;
        bed.idle(ctx, bulk)?;
        ctx.note(
            "`calls` are back-to-back calls of 1 MB, and of 10 KB on one flow of several; the probe passes \
             beside them. Rates without `calls` are of as many greedy flows, without a probe. Shares are of \
             the limit, on the wire, whole frames counted, from half a second after the first data on; `max` \
             is over any such time, start included. `CPU seconds per gbit` counts the CPU time of both ends \
             and of the network's softirqs outside of them, by what was on the wire.",
        );
        let mut over_time = Vec::new();
        for cell in self.plan(ctx.quick) {
            let Cell { limit_bit_s, flows, cc } = cell;
            let control = Control::get(cc)?;
            let case =
                ctx.case().with("limit_bit_s", limit_bit_s).with("flows", flows).with("cc", cc);
            ctx.step(case_in_words(&case));
            ctx.alternate(&SYSTEMS, ctx.repeats, |ctx, &system, run| {
                let mix = Mix {
                    system,
                    limit_bit_s,
                    direction: Direction::Egress,
                    flows: flows as usize,
                    control: &control,
                    kernel_timers: false,
                    link: ctx.usual_link(),
                    spell,
                };
                calls(ctx, &mut bed, &mix, &case, run)?;
                let greedy = Bulk {
                    system,
                    limit_bit_s,
                    flows,
                    control: &control,
                    duration: bulk,
                    probe_hz: None,
                };
                let rates = transfer(ctx, &mut bed, &greedy, &case, run)?;
                if (limit_bit_s, flows, run) == (GBIT, 9, 1) && cc == "cubic" {
                    over_time.push(Series::every(system.name(), TENTH.as_secs_f64(), &rates));
                }
                Ok(())
            })?;
        }
        figures(ctx, over_time);
        claims::record(ctx);
        Ok(())
    }
}

/// Runs and records the calls.
fn calls(
    ctx: &mut Context,
    bed: &mut Bed,
    mix: &Mix<'_>,
    case: &Case,
    run: u32,
) -> anyhow::Result<()> {
    let mixed = mix.run(ctx, bed)?;
    let percent = |bit_s: f64| bit_s / mix.limit_bit_s as f64 * 100.0;
    let mut values = Vec::new();
    values.extend(mixed.wire_bit_s().map(|rate| (CALLS_USED, percent(rate))));
    let most = mixed.wire.peak(bulk::SECOND);
    values.extend(most.map(|peak| (CALLS_MOST, percent(peak.bit_s))));
    for (metric, value) in mixed.values() {
        match metric {
            // Those of the transfers have these names.
            "goodput_bit_s" | "wire_bit_s" => {}
            "retransmits" => values.push(("calls_retransmits", value)),
            "drops" => values.push(("calls_drops", value)),
            metric => values.push((metric, value)),
        }
    }
    let mut record = ctx.record(mix.system, case, run);
    for (metric, value) in values {
        record = record.value(metric, value);
    }
    Ok(())
}

/// Runs and records the transfers; returns the rate on the wire over time.
fn transfer(
    ctx: &mut Context,
    bed: &mut Bed,
    bulk: &Bulk<'_>,
    case: &Case,
    run: u32,
) -> anyhow::Result<Vec<f64>> {
    let transferred = bulk.run(ctx, bed)?;
    let mut record = ctx.record(bulk.system, case, run);
    for (metric, value) in transferred.values() {
        record = record.value(metric, value);
    }
    if let Some(wire_bit_s) = transferred.wire_bit_s() {
        record = record.value(CPU, transferred.cpus.total() / (wire_bit_s / GBIT as f64));
    }
    let _ = record;
    Ok(transferred.wire.rates_bit_s(TENTH))
}

fn figures(ctx: &mut Context, over_time: Vec<Series>) {
    for (file, title, metric, points) in [
        ("used", "Share of the limit that greedy flows use", "used_percent", None),
        (
            "rtt",
            "Round trip of the probe beside calls, p99, and median (diamonds)",
            "rtt_p99_us",
            Some("rtt_p50_us"),
        ),
        ("latency-10kb", "Latency of 10 KB calls, p99", "rpc_10kb_p99_us", None),
        ("latency-1mb", "Latency of 1 MB calls, p99", "rpc_1mb_p99_us", None),
        ("cpu", "CPUs that a Gbit/s of greedy flows costs, both ends", CPU, None),
    ] {
        ctx.bars(file, BarsOf { title, metric, points });
    }
    bulk::over_time(
        ctx,
        "Rate on the wire in bins of 100 ms, 9 greedy flows of cubic",
        GBIT,
        over_time,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_plan_is_the_claim() {
        let full = PaceEgress::default().plan(false);
        for limit_bit_s in LIMITS {
            for cc in CONTROLS {
                for flows in [1, 9] {
                    assert!(full.contains(&Cell { limit_bit_s, flows, cc }), "{cc} {flows}");
                }
            }
        }
        let quick = PaceEgress::default().plan(true);
        assert!(LIMITS.iter().all(|limit| quick.iter().any(|cell| cell.limit_bit_s == *limit)));
        assert!(CONTROLS.iter().all(|cc| quick.iter().any(|cell| cell.cc == *cc)));
    }
}
