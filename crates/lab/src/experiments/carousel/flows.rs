//! `carousel-flows`: 5 Gbit/s over ten to fifty thousand flows, each at a rate of its own.
//!
//! `carousel` is the shaper of the software NIC with a thread that polls, `carousel-auto` with one that
//! sleeps when there is time for it, `carousel-realtime` polls before all others and rests for them now and
//! then; all into a port that discards. `htb` has a class for each flow, as far as that is practical.

use std::{fmt, time::Duration};

use tidegate_core::Nanos;
use tidegate_nic::waiter::Mode;

use super::{
    GBIT, MBIT, MTU_FRAME_BYTES, PAPER_SLOT_NS, SECOND,
    bed::Load,
    error,
    kernel::{Limiter, Traffic},
    rates, rms_from, segments, total_bit_s,
};
use crate::{
    chart::{Curves, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    stats,
};

const TOTAL_BIT_S: u64 = 5 * GBIT;
const COUNTS: [usize; 5] = [10, 100, 1_000, 10_000, 50_000];
/// More classes take the kernel longer to make and to list than it takes to measure.
const HTB_FLOWS_MAX: usize = 1_000;
/// What is claimed.
const ERROR_MOST_PERCENT: f64 = 1.0;
const ON_TIME_LEAST_PERCENT: f64 = 90.0;

const WORST_1S: &str = "flow_error_1s_worst_percent";
const ON_TIME: &str = "within_2us_percent";
const RATE: &str = "rate_bit_s";

/// The experiment.
#[derive(Debug, Default)]
pub struct Flows {
    tiny: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    Carousel(Mode),
    Realtime,
    Htb,
}

const SYSTEMS: [System; 4] =
    [System::Carousel(Mode::Poll), System::Carousel(Mode::Auto), System::Realtime, System::Htb];

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            System::Carousel(Mode::Poll) => "carousel",
            System::Carousel(_) => "carousel-auto",
            System::Realtime => "carousel-realtime",
            System::Htb => "htb",
        })
    }
}

impl System {
    /// The paper's range at 10 to 1000 flows, its middle.
    fn published(self, flows: usize) -> Option<f64> {
        match self {
            System::Carousel(Mode::Poll) | System::Realtime if flows <= 1_000 => Some(5.015e9),
            System::Htb if flows <= 1_000 => Some(4.655e9),
            _ => None,
        }
    }
}

impl Flows {
    /// So small that a test can run it.
    pub fn tiny() -> Flows {
        Flows { tiny: true }
    }
}

impl Experiment for Flows {
    fn name(&self) -> &'static str {
        "carousel-flows"
    }

    fn summary(&self) -> &'static str {
        "10 to 50 000 flows, each at its own rate through the NIC's shaper, beside a class of HTB each"
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 3 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let (counts, total, seconds): (&[usize], _, _) = match (self.tiny, ctx.quick) {
            (true, _) => (&[10], 50 * MBIT, 1),
            (false, true) => (&COUNTS, TOTAL_BIT_S, 2),
            (false, false) => (&COUNTS, TOTAL_BIT_S, 6),
        };
        let time = SECOND * seconds;
        for &flows in counts {
            let case = Case::new().with("total_bit_s", total).with("flows", flows);
            let systems: Vec<System> = SYSTEMS
                .into_iter()
                .filter(|system| *system != System::Htb || flows <= HTB_FLOWS_MAX)
                .collect();
            ctx.step(format!("{flows} flows"));
            ctx.alternate(&systems, ctx.repeats, |ctx, system, run| match system {
                System::Htb => htb(ctx, &case, (total, time), run),
                _ => carousel(ctx, *system, &case, (total, time), run),
            })?;
        }
        figures(ctx, counts, total);
        claims(ctx, total);
        ctx.note(
            "Published, 5 Gbit/s over 10 to 1000 flows: Carousel 4.92 to 5.11 Gbit/s, HTB 4.52 to 4.79, \
             FQ from 4.74 down to 3.11; the tables give the middle of a range. An error is the flow's \
             distance from its rate less one packet: at 50 000 flows that packet is up to a fifth of what \
             the slowest flow sends in a second, so the error over the whole run says more. `carousel` \
             sends full frames into a port that discards; `htb` gets UDP in segments as TCP builds them, \
             over a veth pair.",
        );
        Ok(())
    }
}

type Asked = (u64, Duration);

fn case_of(total: u64, flows: usize) -> Case {
    Case::new().with("total_bit_s", total).with("flows", flows)
}

fn carousel(
    ctx: &mut Context,
    system: System,
    case: &Case,
    (total, time): Asked,
    run: u32,
) -> anyhow::Result<()> {
    let flows = case.0["flows"].as_u64().unwrap_or(0) as usize;
    let rates = rates(total, flows);
    let frames = vec![MTU_FRAME_BYTES; flows];
    let mode = match system {
        System::Carousel(mode) => mode,
        System::Realtime | System::Htb => Mode::Poll,
    };
    let realtime = system == System::Realtime;
    let load = Load { mode, realtime, ..Load::new(rates.clone(), frames, time) };
    let outcome = load.run()?;
    let errors = |window: Duration| -> Vec<f64> {
        let windows = outcome.departures.flows_bytes(window);
        let of = |bytes: &Vec<u64>| {
            let each = rates.iter().zip(bytes);
            each.map(|(rate, bytes)| error(*rate, window, *bytes, MTU_FRAME_BYTES) * 100.0)
                .collect::<Vec<_>>()
        };
        windows.iter().flat_map(of).collect()
    };
    let (second, whole) = (errors(SECOND), errors(time));
    let at = |errors: &[f64], percent| stats::percentile(errors, percent).unwrap_or(f64::NAN);
    let totals = outcome.departures.totals_bit_s();
    let lateness = &outcome.lateness;
    let us = |part: f64| lateness.quantile(part).0 as f64 / 1e3;
    let asked = total_bit_s(&rates) as f64;
    let _ = ctx
        .record(system, case, run)
        .beside(RATE, stats::mean(&totals).unwrap_or(f64::NAN), system.published(flows))
        .value("flow_error_1s_p50_percent", at(&second, 50.0))
        .value("flow_error_1s_p99_percent", at(&second, 99.0))
        .value(WORST_1S, at(&second, 100.0))
        .value("flow_error_run_worst_percent", at(&whole, 100.0))
        .value("deviation_100ms_bit_s", rms_from(&totals, asked))
        .value(ON_TIME, lateness.share_within(Nanos(PAPER_SLOT_NS)) * 100.0)
        .value("lateness_p50_us", us(0.5))
        .value("lateness_p99_us", us(0.99))
        .value("shaper_cpu_percent", outcome.cpu * 100.0)
        .value("dropped", outcome.dropped() as f64);
    Ok(())
}

fn htb(ctx: &mut Context, case: &Case, (total, time): Asked, run: u32) -> anyhow::Result<()> {
    let flows = case.0["flows"].as_u64().unwrap_or(0) as usize;
    let rates = rates(total, flows);
    let frames = segments(&rates);
    let traffic = Traffic { rates: &rates, frames_bytes: &frames, time, window: SECOND };
    let outcome = traffic.through(Limiter::Htb)?;
    let errors = |(time, bytes): &(Duration, Vec<u64>)| {
        let each = rates.iter().zip(&frames).zip(bytes);
        each.map(|((rate, frame), bytes)| error(*rate, *time, *bytes, *frame) * 100.0)
            .collect::<Vec<_>>()
    };
    let second: Vec<f64> = outcome.windows.iter().flat_map(errors).collect();
    let whole: Vec<f64> = outcome.whole().iter().flat_map(errors).collect();
    let at = |errors: &[f64], percent| stats::percentile(errors, percent).unwrap_or(f64::NAN);
    let asked = total_bit_s(&rates) as f64;
    let _ = ctx
        .record(System::Htb, case, run)
        .beside(RATE, outcome.bit_s(), System::Htb.published(flows))
        .value("flow_error_1s_p50_percent", at(&second, 50.0))
        .value("flow_error_1s_p99_percent", at(&second, 99.0))
        .value(WORST_1S, at(&second, 100.0))
        .value("flow_error_run_worst_percent", at(&whole, 100.0))
        .value("deviation_100ms_bit_s", rms_from(&outcome.totals_bit_s, asked))
        .value("dropped", outcome.dropped as f64);
    Ok(())
}

fn figures(ctx: &mut Context, counts: &[usize], total: u64) {
    for (name, title, metric) in [
        ("rate", "Rate of all flows together, 5 Gbit/s asked", RATE),
        (
            "deviation",
            "Deviation of the total from what was asked, 100 ms",
            "deviation_100ms_bit_s",
        ),
    ] {
        let series = SYSTEMS.map(|system| {
            let points = counts.iter().filter_map(|&flows| {
                let case = case_of(total, flows);
                let value = ctx.median(&system.to_string(), metric, Some(&case))?;
                (value > 0.0).then_some((flows as f64, value))
            });
            Series::new(system.to_string(), points.collect())
        });
        let curves = Curves {
            title: title.to_owned(),
            x: "flows".to_owned(),
            y: metric.to_owned(),
            series: series.into(),
        };
        ctx.figure(name, curves);
    }
}

fn claims(ctx: &mut Context, total: u64) {
    let ours = [System::Carousel(Mode::Poll), System::Realtime];
    for (system, flows) in ours.iter().flat_map(|system| COUNTS.map(|flows| (system, flows))) {
        let (carousel, case) = (system.to_string(), case_of(total, flows));
        let of = |ctx: &Context, metric| stats::range(&ctx.values(&carousel, metric, Some(&case)));
        if let Some((_, worst)) = of(ctx, WORST_1S) {
            ctx.claim(
                format!("{carousel}, {flows} flows: each within 1 % of its own rate over 1 s"),
                worst <= ERROR_MOST_PERCENT,
                format!("{worst:.3} % the worst flow, second and run"),
            );
        }
        if let Some((least, most)) = of(ctx, ON_TIME) {
            ctx.claim(
                format!("{carousel}, {flows} flows: > 90 % of packets within 2 µs of their stamp"),
                least > ON_TIME_LEAST_PERCENT,
                format!("{least:.1} % to {most:.1} %"),
            );
        }
    }
}
