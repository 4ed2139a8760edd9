//! `link-accuracy`: do the lab's own links do what they are told? Delay, rate, loss and reordering of
//! [`testbed::link`](crate::testbed::link), measured from the outside.
//!
//! A stream of datagrams passes the link at a part of its rate. When each was sent is known, so the model
//! ([`tidegate_core::link`]) says when each must arrive: after those before it, at the rate, and the delay.
//! The delay error is how much later the kernel received it. On a veth pair the model is a link without
//! delay and rate, and the error is what the path costs by itself.

mod claims;
mod stream;

use std::{fmt, path::PathBuf, time::Duration};

use anyhow::Context as _;
use tidegate_core::{
    Nanos, Rate, Verdict,
    link::{Link, LinkOptions},
};
use tidegate_nic::cable::CableCounters;

use crate::{
    chart::BarsOf,
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    stats,
    stop::Skip,
    testbed::{Joint, LinkSpec, Means, Testbed, TestbedOptions, Topology},
};
use stream::{Passage, Stream};

const MBIT: u64 = 1_000_000;
const GBIT: u64 = 1000 * MBIT;
const RATES: [u64; 3] = [10 * MBIT, 100 * MBIT, GBIT];
const DELAYS_MS: [u64; 5] = [0, 1, 10, 40, 100];
/// Load in percent of the rate: below it, and near it.
const LOADS: [u64; 2] = [50, 90];
/// More than the link carries, to see its rate.
const OVERLOAD: u64 = 115;
/// Loss and reordering, in percent.
const FATES: [(f64, f64); 3] = [(1.0, 0.0), (10.0, 0.0), (0.0, 5.0)];
const REORDER_BY_MS: u64 = 5;
/// An overloaded link has a queue after this time.
const FILLED: Duration = Duration::from_millis(300);
const NS_PER_MS: u64 = 1_000_000;
const TENTH: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);
/// What the streams leave after the last datagram: more than any queue here is long.
const DRAIN: Duration = Duration::from_millis(500);
/// With its headers, a full frame.
const PAYLOAD_BYTES: usize = 1472;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct LinkAccuracy {
    /// For tests: a case of each part, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

/// What carries a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    /// No link at all.
    Veth,
    Link(Means),
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Veth => f.pad("veth"),
            Path::Link(means) => means.fmt(f),
        }
    }
}

const ALL: [Path; 3] = [Path::Veth, Path::Link(Means::Cable), Path::Link(Means::Netem)];

impl LinkAccuracy {
    /// A case of each part, short; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> LinkAccuracy {
        LinkAccuracy { tiny: Some(lab_binary) }
    }

    fn plan(&self, quick: bool) -> Plan {
        let plan = |delays: &[u64], rates: &[u64], loads: &[u64], seeds: &[u64], (delay, rate)| {
            let mut cells = Vec::new();
            for &delay_ms in delays {
                for &rate_bit_s in rates {
                    cells.extend(loads.iter().map(|&load| (delay_ms, rate_bit_s, load)));
                }
            }
            Plan {
                delay: cells,
                rates: rates.to_vec(),
                seeds: seeds.to_vec(),
                delay_time: Duration::from_millis(delay),
                rate_time: Duration::from_millis(rate),
            }
        };
        match (self.tiny.is_some(), quick) {
            (true, _) => plan(&[1], &[100 * MBIT], &[50], &[1], (200, 600)),
            (false, true) => plan(&[0, 10, 100], &RATES, &[90], &[1], (700, 2000)),
            (false, false) => plan(&DELAYS_MS, &RATES, &LOADS, &[1, 2], (1500, 3000)),
        }
    }
}

/// What is measured.
struct Plan {
    /// Delay in ms, rate, load in percent.
    delay: Vec<(u64, u64, u64)>,
    rates: Vec<u64>,
    seeds: Vec<u64>,
    /// How long streams are.
    delay_time: Duration,
    rate_time: Duration,
}

impl Experiment for LinkAccuracy {
    fn name(&self) -> &'static str {
        "link-accuracy"
    }

    fn summary(&self) -> &'static str {
        "The lab's own links against their model: delay, rate, loss and reordering, beside a veth \
         pair and netem"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 2 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let plan = self.plan(ctx.quick);
        ctx.note(
            "The delay error is how much later than the model says the kernel received a datagram: on \
             `veth` what the path itself costs, the sender's system call included. `late` are packets \
             that left the cable more than 50 µs after their time, as its thread has seen it. Streams \
             are of full frames with exponential gaps, sent in bursts every 200 µs.",
        );
        let mut paths = ALL.to_vec();
        for &(delay_ms, rate_bit_s, load_percent) in &plan.delay {
            let case = Case::new()
                .with("delay_ms", delay_ms)
                .with("rate_bit_s", rate_bit_s)
                .with("load_percent", load_percent);
            let way = LinkOptions { delay: Nanos(delay_ms * NS_PER_MS), ..at(rate_bit_s) };
            let load = rate_bit_s / 100 * load_percent;
            ctx.step(format!("{delay_ms} ms, {} Mbit/s, load {load_percent} %", rate_bit_s / MBIT));
            self.each(ctx, &mut paths, |ctx, path, run| {
                let passed = self.pass(path, way, run.into(), load, plan.delay_time)?;
                passed.record_delay(ctx, path, &case, run)
            })?;
        }
        // Without a link there is no rate and no loss.
        paths.retain(|path| *path != Path::Veth);
        for &rate_bit_s in &plan.rates {
            let case = Case::new().with("rate_bit_s", rate_bit_s).with("load_percent", OVERLOAD);
            let load = rate_bit_s / 100 * OVERLOAD;
            ctx.step(format!("{} Mbit/s, load {OVERLOAD} %", rate_bit_s / MBIT));
            self.each(ctx, &mut paths, |ctx, path, run| {
                let passed = self.pass(path, at(rate_bit_s), run.into(), load, plan.rate_time)?;
                passed.record_rate(ctx, path, &case, run)
            })?;
        }
        for &seed in &plan.seeds {
            for (loss_percent, reorder_percent) in FATES {
                let case = Case::new()
                    .with("loss_percent", loss_percent)
                    .with("reorder_percent", reorder_percent)
                    .with("seed", seed);
                let way = LinkOptions {
                    loss: loss_percent / 100.0,
                    reorder: reorder_percent / 100.0,
                    reorder_by: Nanos(REORDER_BY_MS * NS_PER_MS),
                    ..at(100 * MBIT)
                };
                ctx.step(format!("loss {loss_percent} %, reordering {reorder_percent} %"));
                self.each(ctx, &mut paths, |ctx, path, run| {
                    let passed = self.pass(path, way, seed, 50 * MBIT, plan.delay_time)?;
                    passed.record_fate(ctx, path, &case, run)
                })?;
            }
        }
        let title = "Delay error, 99th percentile, and median (diamonds)";
        let metric = "delay_error_p99_us";
        ctx.bars("delay-error", BarsOf { title, metric, points: Some("delay_error_p50_us") });
        claims::record(ctx);
        Ok(())
    }
}

/// A link of this rate, with nothing else.
fn at(rate_bit_s: u64) -> LinkOptions {
    LinkOptions { rate: Rate::from_bit_s(rate_bit_s), ..LinkOptions::default() }
}

impl LinkAccuracy {
    /// Measures each path in turn. One that this machine lacks is asked once.
    fn each(
        &self,
        ctx: &mut Context,
        paths: &mut Vec<Path>,
        mut measure: impl FnMut(&mut Context, Path, u32) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut absent = Vec::new();
        ctx.alternate(paths, ctx.repeats, |ctx, path, run| {
            let outcome = measure(ctx, *path, run);
            if outcome.as_ref().is_err_and(|error| error.is::<Skip>()) {
                absent.push(*path);
            }
            outcome
        })?;
        paths.retain(|path| !absent.contains(path));
        Ok(())
    }

    /// Sends a stream of `load_bit_s` over a path that is like `way`, in both directions.
    fn pass(
        &self,
        path: Path,
        way: LinkOptions,
        seed: u64,
        load_bit_s: u64,
        duration: Duration,
    ) -> anyhow::Result<Passed> {
        let (link, way) = match path {
            Path::Veth => (None, LinkOptions::default()),
            Path::Link(means) => {
                let spec = LinkSpec { seed, means, ..LinkSpec::symmetric(way) };
                (Some(spec), spec.there)
            }
        };
        let lab_binary = self.tiny.clone();
        let options = TestbedOptions { link, lab_binary, ..TestbedOptions::new(Topology::Pair) };
        let testbed = Testbed::new(options)?;
        let drain = DRAIN + Duration::from_nanos(way.delay.0);
        let stream =
            Stream { bit_s: load_bit_s, payload_bytes: PAYLOAD_BYTES, duration, drain, seed };
        let passages = stream.run(&testbed)?;
        let counters = testbed.joints().first().and_then(Joint::counters);
        Ok(Passed { passages, way, frame_bytes: stream.frame_bytes(), counters })
    }
}

/// What came of a stream.
struct Passed {
    passages: Vec<Passage>,
    way: LinkOptions,
    frame_bytes: u32,
    counters: Option<CableCounters>,
}

impl Passed {
    fn record_delay(
        &self,
        ctx: &mut Context,
        path: Path,
        case: &Case,
        run: u32,
    ) -> anyhow::Result<()> {
        let errors_us = self.delay_errors_us();
        let at = |percent| stats::percentile(&errors_us, percent).context("nothing arrived");
        let (_, max) = stats::range(&errors_us).context("nothing arrived")?;
        let mut record = ctx
            .record(path, case, run)
            .value("delay_error_p50_us", at(50.0)?)
            .value("delay_error_p99_us", at(99.0)?)
            .value("delay_error_max_us", max)
            .value("lost_percent", self.lost_percent());
        if let Some(counters) = self.counters {
            let lane = counters.rightward;
            let late = lane.late_packets as f64 / lane.packets_out.max(1) as f64 * 100.0;
            record = record
                .value("late_percent", late)
                .value("lateness_average_us", lane.lateness_ns_average as f64 / 1e3)
                .value("wake_up_average_us", counters.waiter.lateness_ns_average as f64 / 1e3);
        }
        let _ = record;
        Ok(())
    }

    /// How much later than the model says each datagram arrived that did.
    fn delay_errors_us(&self) -> Vec<f64> {
        let mut link = Link::new(LinkOptions { loss: 0.0, reorder: 0.0, ..self.way });
        let error = |passage: &Passage| {
            let sent = Nanos(passage.sent_ns);
            let Verdict::SendAt(arrival) = link.on_packet(sent, self.frame_bytes, u64::MAX) else {
                return None;
            };
            Some((passage.received_ns? as f64 - arrival.0 as f64) / 1e3)
        };
        self.passages.iter().filter_map(error).collect()
    }

    fn lost_percent(&self) -> f64 {
        let lost = self.passages.iter().filter(|passage| passage.received_ns.is_none()).count();
        lost as f64 / self.passages.len().max(1) as f64 * 100.0
    }

    /// How far the rate was from what was asked, over windows that begin with each datagram.
    fn record_rate(
        &self,
        ctx: &mut Context,
        path: Path,
        case: &Case,
        run: u32,
    ) -> anyhow::Result<()> {
        let asked = self.way.rate.context("no rate")?.bit_s() as f64;
        let arrivals: Vec<u64> = self.passages.iter().filter_map(|p| p.received_ns).collect();
        let begun = arrivals.first().context("nothing arrived")? + FILLED.as_nanos() as u64;
        let sent = self.passages.last().map_or(0, |passage| passage.sent_ns);
        // While the queue is full, and before it empties.
        let steady: Vec<u64> =
            arrivals.into_iter().filter(|at| (begun..=sent).contains(at)).collect();
        let mut record = ctx.record(path, case, run);
        for (metric, window) in
            [("rate_error_100ms_percent", TENTH), ("rate_error_1s_percent", SECOND)]
        {
            let rates = rates_bit_s(&steady, window, self.frame_bytes);
            if let Some((low, high)) = stats::range(&rates) {
                let error = (asked - low).max(high - asked) / asked * 100.0;
                record = record.value(metric, error);
            }
        }
        let _ = record;
        Ok(())
    }

    fn record_fate(
        &self,
        ctx: &mut Context,
        path: Path,
        case: &Case,
        run: u32,
    ) -> anyhow::Result<()> {
        let arrivals: Vec<u64> = self.passages.iter().filter_map(|p| p.received_ns).collect();
        let overtaken = overtaken(&arrivals) as f64 / arrivals.len().max(1) as f64 * 100.0;
        let _ = ctx
            .record(path, case, run)
            .value("datagrams", self.passages.len() as f64)
            .value("lost_percent", self.lost_percent())
            .value("overtaken_percent", overtaken);
        Ok(())
    }
}

/// The rate from each arrival to the first that is at least `window` later. O(n).
fn rates_bit_s(arrivals: &[u64], window: Duration, frame_bytes: u32) -> Vec<f64> {
    let window_ns = window.as_nanos() as u64;
    let mut end = 0;
    let mut rates = Vec::new();
    for (begin, from) in arrivals.iter().enumerate() {
        while arrivals.get(end).is_some_and(|to| to.saturating_sub(*from) < window_ns) {
            end += 1;
        }
        let Some(to) = arrivals.get(end) else { break };
        let bits = (end - begin) as f64 * f64::from(frame_bytes) * 8.0;
        rates.push(bits / (to - from) as f64 * 1e9);
    }
    rates
}

/// How many arrived after one that was sent later. O(n).
fn overtaken(arrivals: &[u64]) -> usize {
    let mut soonest = u64::MAX;
    let late = |at: &&u64| {
        let overtaken = **at > soonest;
        soonest = soonest.min(**at);
        overtaken
    };
    arrivals.iter().rev().filter(late).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_between_arrivals() {
        let arrivals: Vec<u64> = (0..1000).map(|n| n * 1_000_000).collect();
        let rates = rates_bit_s(&arrivals, TENTH, 125);
        assert_eq!(rates.len(), 900);
        assert!(rates.iter().all(|rate| (rate - 1e6).abs() < 1e-3), "{rates:?}");
        assert!(rates_bit_s(&arrivals, SECOND, 125).is_empty());
    }

    #[test]
    fn the_overtaken_are_counted() {
        assert_eq!(overtaken(&[1, 2, 3]), 0);
        assert_eq!(overtaken(&[1, 9, 3, 4]), 1);
        assert_eq!(overtaken(&[8, 9, 3, 4]), 2);
    }
}
