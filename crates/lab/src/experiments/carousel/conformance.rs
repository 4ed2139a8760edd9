//! `carousel-conformance`: how near to its rate each of 15 flows stays, and all together, over every 100 ms.
//!
//! | system | what | metered |
//! |---|---|---|
//! | `carousel` | the NIC's shaper, full frames, into a port that discards | where they leave |
//! | `carousel-no-burst` | the same; what a flow lost while a thread had no CPU is not made up | |
//! | `carousel-tap` | the NIC's shaper, segments of up to 64 KB, into a TAP device | at the device |
//! | `htb` | a class for each flow, UDP in such segments | at the receiving device |
//! | `tbf` | a TBF for each flow, under classes of HTB that hold nothing back | at the receiving device |
//! | `unlimited` | nothing | at the receiving device |

use std::{fmt, time::Duration};

use tidegate_core::Rate;
use tidegate_instruments::plumbing::set_mtu;
use tidegate_instruments::wire_meter::WireMeter;
use tidegate_nic::port::tap::{TapOptions, TapPort};
use tidegate_sys::net::NetNs;

use super::{
    BIN, GBIT, MBIT, MTU_FRAME_BYTES, SECOND,
    bed::{Load, Outcome},
    error,
    kernel::{self, Limiter, Traffic},
    rates, rms_from, segments, total_bit_s,
};
use crate::{
    chart::{BarsOf, Lines, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    stats,
    testbed::unique_name,
    units::Unit,
};

const FLOWS: usize = 15;
const MOST_BIT_S: u64 = 8 * GBIT;
/// A machine that carries less without a limit is measured at this part of it.
const PART: f64 = 0.8;
const DEVICE: &str = "tap0";
/// What a TAP device takes at most.
const DEVICE_MTU_BYTES: u32 = 65_521;
/// What is claimed, and the goal.
const MOST_PERCENT: f64 = 0.1;
const GOAL_PERCENT: f64 = 0.05;

const TOTAL: &str = "deviation_bit_s";
const TOTAL_PERCENT: &str = "deviation_percent";
const FLOW_PERCENT: &str = "flow_deviation_worst_percent";

/// The experiment.
#[derive(Debug, Default)]
pub struct Conformance {
    tiny: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    Carousel { burst: bool },
    Tap,
    Kernel(Limiter),
}

const SYSTEMS: [System; 6] = [
    System::Carousel { burst: true },
    System::Carousel { burst: false },
    System::Tap,
    System::Kernel(Limiter::Htb),
    System::Kernel(Limiter::Tbf),
    System::Kernel(Limiter::Unlimited),
];

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            System::Carousel { burst: true } => "carousel",
            System::Carousel { burst: false } => "carousel-no-burst",
            System::Tap => "carousel-tap",
            System::Kernel(Limiter::Htb) => "htb",
            System::Kernel(Limiter::Tbf) => "tbf",
            System::Kernel(Limiter::Unlimited) => "unlimited",
        })
    }
}

impl System {
    /// At 8 Gbit/s.
    fn published(self, total_bit_s: u64) -> Option<f64> {
        match self {
            _ if total_bit_s != MOST_BIT_S => None,
            System::Carousel { burst: true } => Some(4.9e6),
            System::Kernel(Limiter::Htb) => Some(435e6),
            _ => None,
        }
    }
}

impl Conformance {
    /// So small that a test can run it.
    pub fn tiny() -> Conformance {
        Conformance { tiny: true }
    }
}

impl Experiment for Conformance {
    fn name(&self) -> &'static str {
        "carousel-conformance"
    }

    fn summary(&self) -> &'static str {
        "How near to its rate a flow stays over 100 ms: the NIC's shaper beside HTB and TBF"
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root]
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let (total, time) = match (self.tiny, ctx.quick) {
            (true, _) => (50 * MBIT, SECOND),
            (false, true) => (calibrate(ctx)?, SECOND * 2),
            (false, false) => (calibrate(ctx)?, SECOND * 8),
        };
        let rates = rates(total, FLOWS);
        let case = Case::new().with("total_bit_s", total).with("flows", FLOWS);
        let mut over_time = Vec::new();
        let repeats = ctx.repeats;
        ctx.alternate(&SYSTEMS, repeats, |ctx, system, run| {
            let Measured { totals, flow_percent } = system.measure(&rates, time)?;
            let asked = total_bit_s(&rates) as f64;
            let off = rms_from(&totals, asked);
            let mut record = ctx
                .record(system, &case, run)
                .value("rate_bit_s", stats::mean(&totals).unwrap_or(f64::NAN))
                .beside(TOTAL, off, system.published(total))
                .value(TOTAL_PERCENT, off / asked * 100.0);
            if let (Some(median), Some((_, worst))) =
                (stats::median(&flow_percent), stats::range(&flow_percent))
            {
                record =
                    record.value("flow_deviation_p50_percent", median).value(FLOW_PERCENT, worst);
            }
            let _ = record;
            if run == 1 && *system != System::Kernel(Limiter::Unlimited) {
                let name = system.to_string();
                over_time.push(Series::every(name, BIN.as_secs_f64(), &totals));
            }
            Ok(())
        })?;
        ctx.figure(
            "over-time",
            Lines {
                title: "All flows together in bins of 100 ms, first run".to_owned(),
                x: "time_s".to_owned(),
                y: "rate_bit_s".to_owned(),
                logarithmic: false,
                limit: Some(total as f64),
                series: over_time,
            },
        );
        let title = "Deviation of the total from its rate over 100 ms";
        ctx.bars("deviation", BarsOf { title, metric: TOTAL_PERCENT, points: None });
        claims(ctx);
        ctx.note(
            "The deviation of the total is the root of the mean square over all bins, that of a flow the \
             root of the mean square of its distance less one of its packets, and of the flows the worst. \
             Flows of the kernel's limiters are read from their classes, with the time of the reading. \
             Published at 8 Gbit/s: Carousel 4.9 Mbit/s, HTB 435, FQ 544.",
        );
        Ok(())
    }
}

/// The rate to be asked: what the paper has, or what this machine carries with something to spare.
fn calibrate(ctx: &mut Context) -> anyhow::Result<u64> {
    ctx.step("what the machine carries without a limit");
    let rates = rates(MOST_BIT_S, FLOWS);
    let frames_bytes = segments(&rates);
    let time = SECOND;
    let traffic = Traffic { rates: &rates, frames_bytes: &frames_bytes, time, window: BIN };
    let carried = traffic.through(Limiter::Unlimited)?.bit_s();
    let tap = tap(&rates, time)?.1;
    let tap = stats::mean(&tap).unwrap_or(0.0);
    // The TAP device was asked for no more than the most.
    let tap_carries = if tap >= 0.98 * MOST_BIT_S as f64 { f64::INFINITY } else { tap };
    let part = (carried.min(tap_carries) * PART / 1e8).floor() * 1e8;
    let total = MOST_BIT_S.min(part as u64).max(100 * MBIT);
    let human = |bit_s: f64| Unit::split("rate_bit_s").1.human(bit_s);
    ctx.note(format!(
        "In a second of calibration the veth pair carried {} without a limit, the TAP device {} of {}; \
         measured at {}.",
        human(carried),
        human(tap),
        human(MOST_BIT_S as f64),
        human(total as f64)
    ));
    Ok(total)
}

struct Measured {
    /// Of each bin.
    totals: Vec<f64>,
    /// The deviation of each flow in percent; empty if the flows are not known.
    flow_percent: Vec<f64>,
}

impl System {
    fn measure(self, rates: &[Rate], time: Duration) -> anyhow::Result<Measured> {
        match self {
            System::Carousel { burst } => {
                let frames = vec![MTU_FRAME_BYTES; rates.len()];
                let mut load = Load::new(rates.to_vec(), frames.clone(), time);
                if !burst {
                    load.burst = Duration::ZERO;
                }
                let outcome = load.run()?;
                let flow_percent = of_flows(rates, &frames, &windows(&outcome));
                Ok(Measured { totals: outcome.departures.totals_bit_s(), flow_percent })
            }
            System::Tap => {
                let (outcome, totals) = tap(rates, time)?;
                let flow_percent = of_flows(rates, &segments(rates), &windows(&outcome));
                Ok(Measured { totals, flow_percent })
            }
            System::Kernel(limiter) => {
                let frames_bytes = segments(rates);
                let frames = &frames_bytes;
                let traffic = Traffic { rates, frames_bytes: frames, time, window: BIN };
                let kernel::Outcome { totals_bit_s, windows, .. } = traffic.through(limiter)?;
                let flow_percent = of_flows(rates, frames, &windows);
                Ok(Measured { totals: totals_bit_s, flow_percent })
            }
        }
    }
}

fn windows(outcome: &Outcome) -> Vec<(Duration, Vec<u64>)> {
    outcome.departures.flows_bytes(BIN).into_iter().map(|bytes| (BIN, bytes)).collect()
}

/// The deviation of each flow over the windows, in percent.
fn of_flows(rates: &[Rate], frames_bytes: &[usize], windows: &[(Duration, Vec<u64>)]) -> Vec<f64> {
    if windows.is_empty() {
        return Vec::new();
    }
    let of = |(flow, (rate, frame)): (usize, (&Rate, &usize))| {
        let errors = windows.iter().map(|(time, bytes)| error(*rate, *time, bytes[flow], *frame));
        rms_from(&errors.collect::<Vec<_>>(), 0.0) * 100.0
    };
    rates.iter().zip(frames_bytes).enumerate().map(of).collect()
}

/// The shaper into a TAP device in a namespace of its own, and what the device's meter counted in each bin.
fn tap(rates: &[Rate], time: Duration) -> anyhow::Result<(Outcome, Vec<f64>)> {
    let netns = NetNs::create(&unique_name("tap"))?;
    let port = TapPort::open(&netns, &TapOptions::new(DEVICE))?;
    let mut netlink = netns.netlink()?;
    let index = netlink.index_of(DEVICE)?;
    set_mtu(&mut netlink, index, DEVICE_MTU_BYTES)?;
    netlink.set_up(index, true)?;
    let bins = (time.as_nanos() / BIN.as_nanos()) as u32;
    let mut meter = WireMeter::attach(&netns, DEVICE, bins, BIN)?;
    let load = Load::new(rates.to_vec(), segments(rates), time);
    let outcome = load.run_to(Box::new(port), || Ok(meter.start()?))?;
    let rate = |bytes: u64| bytes as f64 * 8.0 / BIN.as_secs_f64();
    let totals = meter.bins()?.iter().map(|bin| rate(bin.bytes)).collect();
    Ok((outcome, totals))
}

fn claims(ctx: &mut Context) {
    for system in ["carousel", "carousel-tap"] {
        for (what, metric) in [("all flows together", TOTAL_PERCENT), ("each flow", FLOW_PERCENT)] {
            let values = ctx.values(system, metric, None);
            let (Some(median), Some((least, most))) =
                (stats::median(&values), stats::range(&values))
            else {
                continue;
            };
            let measured = format!("{median:.3} % in the median run, {least:.3} to {most:.3} %");
            for (word, bound) in [("", MOST_PERCENT), (", the goal", GOAL_PERCENT)] {
                ctx.claim(
                    format!("{system}: {what} within {bound} % of the rate over 100 ms{word}"),
                    median <= bound,
                    measured.clone(),
                );
            }
        }
    }
    let deviation = |system| ctx.median(system, TOTAL_PERCENT, None);
    if let (Some(ours), Some(htb), Some(tbf)) =
        (deviation("carousel-tap"), deviation("htb"), deviation("tbf"))
    {
        ctx.claim(
            "carousel-tap: nearer to the rate than htb and tbf with the same segments",
            ours < htb && ours < tbf,
            format!("{ours:.3} % against {htb:.3} % and {tbf:.3} %"),
        );
    }
}
