//! `carousel-backpressure`: what stands in the shaper, and what is dropped, when a completion is given as a
//! packet leaves (deferred) and when it is given as the shaper takes it (immediate).
//!
//! The application sends whenever it may. Segments are what TCP would build of each flow's rate; with many
//! flows they are full frames.

use std::fmt;

use tidegate_nic::nic::Completions;

use super::{GBIT, MBIT, MTU_FRAME_BYTES, SECOND, bed::Load, rates, segments};
use crate::{
    chart::BarsOf, context::Context, experiment::Experiment, host::Need, report::Case, stats,
};

const TOTAL_BIT_S: u64 = 5 * GBIT;
const COUNTS: [usize; 2] = [15, 10_000];
/// Without backpressure nothing else bounds what stands in the shaper; the paper's, about.
const CAPACITY: usize = 1 << 16;

/// The experiment.
#[derive(Debug, Default)]
pub struct Backpressure {
    tiny: bool,
}

/// A way to give completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct System(Completions);

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self.0 {
            Completions::Deferred => "deferred",
            Completions::Immediate => "immediate",
        })
    }
}

const SYSTEMS: [System; 2] = [System(Completions::Deferred), System(Completions::Immediate)];

impl Backpressure {
    /// So small that a test can run it.
    pub fn tiny() -> Backpressure {
        Backpressure { tiny: true }
    }
}

impl Experiment for Backpressure {
    fn name(&self) -> &'static str {
        "carousel-backpressure"
    }

    fn summary(&self) -> &'static str {
        "Packets that stand in the NIC's shaper, and drops, with and without deferred completions"
    }

    fn needs(&self) -> Vec<Need> {
        Vec::new()
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let (counts, total, seconds): (&[usize], _, _) = match (self.tiny, ctx.quick) {
            (true, _) => (&COUNTS[..1], 50 * MBIT, 1),
            (false, true) => (&COUNTS, TOTAL_BIT_S, 2),
            (false, false) => (&COUNTS, TOTAL_BIT_S, 8),
        };
        let time = SECOND * seconds;
        for &flows in counts {
            let rates = rates(total, flows);
            for whole in [true, false] {
                let frames = if whole { segments(&rates) } else { vec![MTU_FRAME_BYTES; flows] };
                if !whole && frames == segments(&rates) {
                    continue;
                }
                let units = if whole { "segments" } else { "frames" };
                let case = Case::new().with("flows", flows).with("units", units);
                // The capacity in long segments would be gigabytes of them.
                let systems = if whole && frames.iter().any(|bytes| *bytes > MTU_FRAME_BYTES) {
                    &SYSTEMS[..1]
                } else {
                    &SYSTEMS[..]
                };
                ctx.alternate(systems, ctx.repeats, |ctx, system, run| {
                    let capacity = match system.0 {
                        Completions::Deferred => None,
                        Completions::Immediate => Some(CAPACITY),
                    };
                    let load = Load::new(rates.clone(), frames.clone(), time);
                    let load = Load { completions: system.0, capacity, ..load };
                    measure(ctx, *system, &load, &case, run)
                })?;
            }
        }
        let (title, metric) =
            ("Packets in the shaper: the most, and median (diamonds)", "held_max");
        ctx.bars("held", BarsOf { title, metric, points: Some("held_p50") });
        claims(ctx);
        ctx.note(
            "Published: with deferred completions 15 flows hold 30 packets in the median, 56 to 118 in \
             the 99th percentile, 10 000 flows 21 185 on average; without 68 927, the cap. There a packet is \
             a segment. The most is of the whole run, its beginning included; `allowed` is what the flows \
             may have in the shaper together. In `frames`, 1514 bytes each, a flow may have as \
             many bytes there as two of its segments.",
        );
        Ok(())
    }
}

fn measure(
    ctx: &mut Context,
    system: System,
    load: &Load,
    case: &Case,
    run: u32,
) -> anyhow::Result<()> {
    let outcome = load.run()?;
    let at = |percent| stats::percentile(&outcome.held, percent).unwrap_or(f64::NAN);
    let few = load.rates.len() <= COUNTS[0];
    let whole = case.0["units"] == "segments";
    let deferred = system.0 == Completions::Deferred;
    let published = |deferred_few: Option<f64>, deferred_many| match (deferred, few) {
        (true, true) => deferred_few.filter(|_| whole),
        (true, false) => deferred_many,
        (false, _) => None,
    };
    let most = outcome.after.held_packets_max as f64;
    let seconds = load.time.as_secs_f64();
    let record = ctx
        .record(system, case, run)
        .beside("held_p50", at(50.0), published(Some(30.0), None))
        .beside("held_mean", stats::mean(&outcome.held).unwrap_or(f64::NAN), {
            published(None, Some(21_185.0))
        })
        .value("held_p99", at(99.0))
        .beside("held_max", most, (!deferred).then_some(68_927.0))
        .value("dropped_per_s", outcome.dropped() as f64 / seconds)
        .value("rate_bit_s", stats::mean(&outcome.departures.totals_bit_s()).unwrap_or(f64::NAN));
    if deferred {
        let _ = record.value("allowed", load.allowances().iter().sum::<usize>() as f64);
    }
    Ok(())
}

fn claims(ctx: &mut Context) {
    let of = |ctx: &Context, system: &str, metric| stats::range(&ctx.values(system, metric, None));
    let mut cases = Vec::new();
    let mut held = true;
    for row in ctx.rows().iter().filter(|row| row.metric == "allowed") {
        let most = ctx.values("deferred", "held_max", Some(&row.case));
        let Some((_, most)) = stats::range(&most) else { continue };
        held &= most <= row.value;
        let said = format!(
            "{} flows, {}: {most} of {}",
            row.case.0["flows"],
            row.case.0["units"].as_str().unwrap_or_default(),
            row.value
        );
        if !cases.contains(&said) {
            cases.push(said);
        }
    }
    if !cases.is_empty() {
        ctx.claim(
            "deferred: never more than two segments a flow in the shaper, or as much in frames",
            held,
            cases.join("; "),
        );
    }
    if let Some((_, most)) = of(ctx, "deferred", "dropped_per_s") {
        ctx.claim("deferred: nothing is dropped", most == 0.0, format!("{most:.0}/s at most"));
    }
    if let Some((least, most)) = of(ctx, "immediate", "dropped_per_s") {
        let (_, held) = of(ctx, "immediate", "held_max").unwrap_or_default();
        ctx.claim(
            "immediate: the shaper fills to its capacity and drops",
            least > 0.0,
            format!("{held:.0} packets, {least:.0} to {most:.0} drops a second"),
        );
    }
}
