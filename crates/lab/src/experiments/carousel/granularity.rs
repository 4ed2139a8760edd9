//! `carousel-granularity`: how long a slot of the wheel may be. A stamp is rounded up to the end of its slot,
//! and what is in a slot leaves at once.

use std::time::Duration;

use tidegate_core::Nanos;

use super::{
    GBIT, MBIT, MTU_FRAME_BYTES, PAPER_SLOT_NS, SECOND, bed::Load, rates, rms_from, total_bit_s,
};
use crate::{
    chart::{Curves, Series},
    context::Context,
    experiment::Experiment,
    report::Case,
    stats,
};

const TOTAL_BIT_S: u64 = 5 * GBIT;
const FLOWS: usize = 1_000;
/// 512 ns to 4.2 ms.
const SHIFTS: std::ops::RangeInclusive<u32> = 9..=22;
const QUICK_SHIFTS: [u32; 5] = [9, 11, 15, 18, 22];
const NAME: &str = "carousel";
const DEVIATION: &str = "deviation_100ms_bit_s";
/// The longest slot that the paper found harmless, and the deviation there.
const HARMLESS_NS: u64 = 1 << 18;
const HARMLESS_MOST_BIT_S: f64 = 7e6;
const LONGEST_NS: u64 = 1 << 22;
const LONGEST_BIT_S: f64 = 313e6;

/// The experiment.
#[derive(Debug, Default)]
pub struct Granularity {
    tiny: bool,
}

impl Granularity {
    /// So small that a test can run it.
    pub fn tiny() -> Granularity {
        Granularity { tiny: true }
    }
}

fn case(slot_ns: u64) -> Case {
    Case::new().with("slot_ns", slot_ns)
}

impl Experiment for Granularity {
    fn name(&self) -> &'static str {
        "carousel-granularity"
    }

    fn summary(&self) -> &'static str {
        "Slots of half a microsecond to four milliseconds: what they cost in rate and in lateness"
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let (shifts, total, flows, time) = match (self.tiny, ctx.quick) {
            (true, _) => (vec![11, 20], 50 * MBIT, 10, SECOND / 2),
            (false, true) => (QUICK_SHIFTS.to_vec(), TOTAL_BIT_S, FLOWS, SECOND * 2),
            (false, false) => (SHIFTS.collect(), TOTAL_BIT_S, FLOWS, SECOND * 5),
        };
        let slots: Vec<u64> = shifts.into_iter().map(|shift| 1 << shift).collect();
        let repeats = ctx.repeats;
        ctx.alternate(&slots, repeats, |ctx, slot_ns, run| {
            measure(ctx, *slot_ns, (total, flows, time), run)
        })?;
        for (name, title, metric) in [
            ("deviation", "Deviation from 5 Gbit/s over 100 ms", DEVIATION),
            ("lateness", "99th percentile of the lateness", "lateness_p99_us"),
        ] {
            let points = slots.iter().filter_map(|&slot_ns| {
                let value = ctx.median(NAME, metric, Some(&case(slot_ns)))?;
                (value > 0.0).then_some((slot_ns as f64, value))
            });
            let series = vec![Series::new(NAME, points.collect())];
            let (x, y) = ("slot_ns".to_owned(), metric.to_owned());
            ctx.figure(name, Curves { title: title.to_owned(), x, y, series });
        }
        claims(ctx, &slots);
        ctx.note(format!(
            "{flows} flows, each at a rate of its own, in full frames into a port that discards; the \
             shaper polls. Published at 5 Gbit/s: 5 to 7 Mbit/s up to 256 µs, 313 at 4 ms. \
             The lateness is from the exact stamp, so the rounding is part of it. A flow has two packets in \
             the shaper: where they take less than a slot the allowance, not the rate, holds it."
        ));
        Ok(())
    }
}

fn measure(
    ctx: &mut Context,
    slot_ns: u64,
    (total, flows, time): (u64, usize, Duration),
    run: u32,
) -> anyhow::Result<()> {
    let rates = rates(total, flows);
    let asked = total_bit_s(&rates) as f64;
    let load = Load::new(rates, vec![MTU_FRAME_BYTES; flows], time);
    let outcome = Load { granularity: Nanos(slot_ns), ..load }.run()?;
    let totals = outcome.departures.totals_bit_s();
    let published = match slot_ns {
        LONGEST_NS => Some(LONGEST_BIT_S),
        ns if ns <= HARMLESS_NS => Some(HARMLESS_MOST_BIT_S),
        _ => None,
    };
    let lateness = &outcome.lateness;
    let us = |part: f64| lateness.quantile(part).0 as f64 / 1e3;
    let _ = ctx
        .record(NAME, &case(slot_ns), run)
        .beside(DEVIATION, rms_from(&totals, asked), published)
        .value("rate_bit_s", stats::mean(&totals).unwrap_or(f64::NAN))
        .value("lateness_p50_us", us(0.5))
        .value("lateness_p99_us", us(0.99))
        .value("within_2us_percent", lateness.share_within(Nanos(PAPER_SLOT_NS)) * 100.0)
        .value("shaper_cpu_percent", outcome.cpu * 100.0);
    Ok(())
}

fn claims(ctx: &mut Context, slots: &[u64]) {
    let of = |ctx: &Context, slot_ns| ctx.median(NAME, DEVIATION, Some(&case(slot_ns)));
    let harmless = slots.iter().filter(|ns| **ns <= HARMLESS_NS);
    let harmless: Vec<f64> = harmless.filter_map(|ns| of(ctx, *ns)).collect();
    if let Some((least, most)) = stats::range(&harmless) {
        ctx.claim(
            "slots up to 256 µs: within 7 Mbit/s of the rate over 100 ms, as published",
            most <= HARMLESS_MOST_BIT_S,
            format!("{:.2} to {:.2} Mbit/s", least / 1e6, most / 1e6),
        );
    }
    if let Some(longest) = of(ctx, LONGEST_NS) {
        ctx.claim(
            "slots of 4 ms: within 313 Mbit/s, as published",
            longest <= LONGEST_BIT_S,
            format!("{:.0} Mbit/s", longest / 1e6),
        );
    }
}
