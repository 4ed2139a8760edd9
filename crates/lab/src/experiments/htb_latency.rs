//! `htb-latency`: what a rate limiter's queue costs in latency. He et al. (APNet 2017), tables 1 and 2,
//! figures 2 and 3.
//!
//! One receiver: limits of 1, 2, 4 and 8 Gbit/s under 1, 2, 8 and 16 flows of iperf3, as far as this machine
//! carries them without a limit. Two receivers: a class of HTB for each, with a minimum, which lends what it
//! does not use; minimums of 2 to 5 tenths of the total, as the paper has them of 10 Gbit/s.
//!
//! The paper measured HTB alone, with a closed loop of sockperf over TCP. Here TBF, `nrm` and `pace` run in
//! turn with it, and the probe is open loop: it also sees the queue that a closed loop waits out.
//!
//! The same limits on guests behind a port, whose packets the host routes or bridges: `guests`.

mod guests;

use std::{fmt, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::Context as _;

use super::{
    bed::{Bed, Control},
    case_in_words, he_2017,
};
use crate::{
    chart::{BarsOf, Cdf, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::{Case, distinct},
    stats,
    stop::Skip,
    systems::{LimitCase, System},
    testbed::{Family, Testbed, TestbedOptions, Topology, peers::Peer, wait::pass_time},
    tools::{
        iperf::{self, IperfOptions, IperfRun, Load},
        probe::{self, ProbeReport},
    },
    units::Unit,
};

const GBIT: u64 = 1_000_000_000;
const LIMITS: [u64; 4] = [GBIT, 2 * GBIT, 4 * GBIT, 8 * GBIT];
const FLOWS: [u32; 4] = [1, 2, 8, 16];
/// The minimum of each of two receivers, in tenths of the total.
const TENTHS: [u64; 4] = [2, 3, 4, 5];
const TOTAL: u64 = 10 * GBIT;
const SYSTEMS: [System; 4] = [System::Htb, System::Tbf, System::Nrm, System::Pace];
/// A limit near what the machine can do at all measures the machine.
const CEILING_PERCENT: u64 = 80;
/// What the paper's systems ran, and most systems do.
const CONTROL: &str = "cubic";
/// The name under which the path without limit and load is recorded.
const BASELINE: &str = "baseline";

const PROBE_PORT: u16 = 7001;
const SETTLED: Duration = Duration::from_millis(500);

/// The claims.
const HTB_TIMES_LEAST: f64 = 10.0;
const PACE_ABOVE_MOST_US: f64 = 1000.0;
const PACE_BELOW_LEAST: f64 = 10.0;
const LOST_MOST_PERCENT: f64 = 1.0;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct HtbLatency {
    /// For tests: a case of each table, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl HtbLatency {
    /// A case of each table; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> HtbLatency {
        HtbLatency { tiny: Some(lab_binary) }
    }

    fn plan(&self, ctx: &Context, limits: &[u64]) -> Plan {
        let mut plan = Plan::new(ctx.quick, limits);
        if self.tiny.is_some() {
            plan.one.truncate(1);
        }
        plan
    }
}

/// How much of it is measured.
struct Plan {
    one: Vec<(u32, u64)>,
    two: Vec<(u32, u64)>,
    duration: Duration,
}

impl Plan {
    fn new(quick: bool, limits: &[u64]) -> Plan {
        let cross = |left: &[u32], right: &[u64]| -> Vec<(u32, u64)> {
            left.iter().flat_map(|l| right.iter().map(|r| (*l, *r))).collect()
        };
        let duration = Duration::from_secs(2);
        if !quick {
            return Plan { one: cross(&FLOWS, limits), two: cross(&FLOWS, &TENTHS), duration };
        }
        let mut one: Vec<(u32, u64)> = limits.first().map(|low| (1, *low)).into_iter().collect();
        one.extend(limits.first().map(|low| (16, *low)));
        one.extend(limits.last().filter(|_| limits.len() > 1).map(|high| (8, *high)));
        Plan { one, two: vec![(8, 3)], duration }
    }
}

impl Experiment for HtbLatency {
    fn name(&self) -> &'static str {
        "htb-latency"
    }

    fn summary(&self) -> &'static str {
        "What the queue of a rate limiter costs in latency: HTB, TBF, nrm and pace at 1 to 8 Gbit/s; HTB, \
         dem, spring and police on the port of a guest whose packets are routed or bridged"
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 2 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let control = Control::get(CONTROL)?;
        let mut curves = Curves::default();
        {
            let mut bed = Bed::new(self.tiny.clone(), ctx.usual_link())?;
            let idle = baseline(ctx, &bed.testbed)?;
            curves.add(&ctx.case(), BASELINE, idle.rtt_cdf_us);
            let limits = carried(ctx, &bed.testbed, &control, ("", &LIMITS))?;
            let plan = self.plan(ctx, &limits);
            for (flows, limit_bit_s) in plan.one {
                let case = ctx.case().with("flows", flows).with("limit_bit_s", limit_bit_s);
                let load = OneReceiver { flows, limit_bit_s, duration: plan.duration };
                let at = case_in_words(&case);
                let turns = SYSTEMS.map(|system| Turn { at: at.clone(), system });
                ctx.alternate(&turns, ctx.repeats, |ctx, turn, run| {
                    let cdf = load.measure(ctx, &mut bed, turn.system, &control, (&case, run))?;
                    curves.add(&case, turn.system.name(), cdf);
                    Ok(())
                })?;
            }
        }
        two_receivers(ctx, self.tiny.clone(), &control, &mut curves)?;
        curves.figures(ctx);
        let title = "Goodput (bars) and median round trip (diamonds), one receiver";
        let metric = "goodput_bit_s";
        ctx.bars("goodput-and-rtt", BarsOf { title, metric, points: Some("rtt_p50_us") });
        claims(ctx);
        guests::run(ctx, self.tiny.clone(), &control)
    }
}

/// A system in a case, for progress and notes.
struct Turn {
    at: String,
    system: System,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.system)
    }
}

/// Measures the path without a limit and without load.
fn baseline(ctx: &mut Context, testbed: &Testbed) -> anyhow::Result<ProbeReport> {
    ctx.step("the path without limit and load");
    let at = SocketAddr::new(testbed.addr(0, Family::V4), PROBE_PORT);
    let _server = probe::start_server(testbed, testbed.receiver(0), at)?;
    let args = probe::ClientArgs::new(at, Duration::from_secs(2));
    let report = probe::finish_client(probe::start_client(testbed, testbed.sender(), args)?, args)?;
    let far = ctx.links.way.is_some();
    let published = |percent| he_2017::baseline_us(percent).filter(|_| !far);
    let case = ctx.case();
    ctx.record(BASELINE, &case, 1)
        .beside("rtt_p50_us", report.rtt.p50_us, published("p50"))
        .value("rtt_p99_us", report.rtt.p99_us)
        .beside("rtt_p99_9_us", report.rtt.p99_9_us, published("p99.9"));
    Ok(report)
}

/// The limits that this machine carries with room to spare, `way` what its notes say of the path.
fn carried(
    ctx: &mut Context,
    testbed: &Testbed,
    control: &Control,
    (way, limits): (&str, &[u64]),
) -> anyhow::Result<Vec<u64>> {
    let ceiling = ceiling_bit_s(ctx, testbed, control)?;
    let most = ceiling / 100 * CEILING_PERCENT;
    let (carried, left_out): (Vec<u64>, Vec<u64>) =
        limits.iter().partition(|limit| **limit <= most);
    if carried.is_empty() {
        return Err(Skip(format!("this machine carries only {}", rate(ceiling))).into());
    }
    let words: Vec<String> = left_out.into_iter().map(rate).collect();
    ctx.note(match words.is_empty() {
        true => format!("without a limit this machine carries {}{way}", rate(ceiling)),
        false => format!(
            "without a limit this machine carries {}{way}: {} left out, above {CEILING_PERCENT} % of it",
            rate(ceiling),
            words.join(", ")
        ),
    });
    Ok(carried)
}

/// What the machine carries to its first receiver without a limit: the worse of few and many flows.
fn ceiling_bit_s(ctx: &Context, testbed: &Testbed, control: &Control) -> anyhow::Result<u64> {
    ctx.step("what this machine carries without a limit");
    let mut ceiling = f64::INFINITY;
    for flows in [1, 16] {
        let options = options(testbed, 0, flows, control, Duration::from_secs(1));
        let report = iperf::run(testbed.sender(), testbed.receiver(0), &options)?;
        ceiling = ceiling.min(report.received_bit_s);
    }
    Ok(ceiling as u64)
}

fn options(
    testbed: &Testbed,
    receiver: u16,
    flows: u32,
    control: &Control,
    duration: Duration,
) -> IperfOptions {
    let mut options = IperfOptions::tcp(testbed.addr(usize::from(receiver), Family::V4), duration);
    options.port += receiver;
    options.parallel = flows;
    options.load = Load::Tcp { cc: Some(control.name().to_owned()) };
    options
}

/// One cell of table 1.
struct OneReceiver {
    flows: u32,
    limit_bit_s: u64,
    duration: Duration,
}

impl OneReceiver {
    /// Runs it under a system, records it, and returns the distribution of round trips.
    fn measure(
        &self,
        ctx: &mut Context,
        bed: &mut Bed,
        system: System,
        control: &Control,
        (case, run): (&Case, u32),
    ) -> anyhow::Result<Vec<(f64, f64)>> {
        let &OneReceiver { flows, limit_bit_s, duration } = self;
        let applied = system.apply(ctx, &bed.testbed, &LimitCase::egress(limit_bit_s))?;
        bed.start_meter()?;
        let testbed = &bed.testbed;
        let (from, to) = (applied.site(testbed.sender()), testbed.receiver(0));
        let _probe_server = probe::start_server(testbed, to, bed.at(PROBE_PORT))?;
        let load = IperfRun::start(from, to, &options(testbed, 0, flows, control, duration))?;
        pass_time(SETTLED)?;
        let args = probe::ClientArgs::new(bed.at(PROBE_PORT), duration - SETTLED);
        let probe = probe::finish_client(probe::start_client(testbed, from, args)?, args);
        let report = load.finish()?;
        let (probe, wire) = (probe?, bed.wire()?);
        applied.finish()?;

        let used = wire.mean_bit_s(SETTLED, duration).context("nothing was on the wire")?;
        let used_percent = used / limit_bit_s as f64 * 100.0;
        let name = system.name();
        let far = ctx.links.way.is_some();
        let published =
            |metric| he_2017::one_receiver(name, flows, limit_bit_s, metric).filter(|_| !far);
        ctx.record(system, case, run)
            .beside("goodput_bit_s", report.received_bit_s, published("goodput_bit_s"))
            .value("used_percent", used_percent)
            .beside("rtt_p50_us", probe.rtt.p50_us, published("rtt_p50_us"))
            .value("rtt_p99_us", probe.rtt.p99_us)
            .beside("rtt_p99_9_us", probe.rtt.p99_9_us, published("rtt_p99_9_us"))
            .value("probes_lost_percent", probe.lost_percent());
        Ok(probe.rtt_cdf_us)
    }
}

/// Table 2: a class for each receiver, with a minimum, which borrows up to the total.
fn two_receivers(
    ctx: &mut Context,
    lab_binary: Option<PathBuf>,
    control: &Control,
    curves: &mut Curves,
) -> anyhow::Result<()> {
    let link = ctx.usual_link();
    let options =
        TestbedOptions { lab_binary, link, ..TestbedOptions::new(Topology::TwoReceivers) };
    let testbed = Testbed::new(options)?;
    let ceiling = ceiling_bit_s(ctx, &testbed, control)?;
    let most = ceiling / 100 * CEILING_PERCENT;
    // Whole tenths, so that the minimums are figures that people read.
    let total_bit_s = TOTAL.min(most / GBIT * GBIT).max(GBIT);
    ctx.note(format!(
        "through a router to two receivers this machine carries {}: the total is {}, for 10 Gbit/s \
         in the paper",
        rate(ceiling),
        rate(total_bit_s)
    ));
    let plan = Plan::new(ctx.quick, &LIMITS);
    for (flows, tenths) in plan.two {
        let minimum_bit_s = total_bit_s / 10 * tenths;
        let case = ctx
            .case()
            .with("flows_each", flows)
            .with("minimum_bit_s", minimum_bit_s)
            .with("total_bit_s", total_bit_s);
        let load = TwoReceivers { flows, tenths, total_bit_s, duration: plan.duration };
        let at = format!("two receivers, {flows} flows each, at least {}", rate(minimum_bit_s));
        let turns = [Turn { at, system: System::Htb }];
        ctx.alternate(&turns, ctx.repeats, |ctx, _, run| {
            let cdf = load.measure(ctx, &testbed, control, (&case, run))?;
            curves.add(&case, "htb", cdf);
            Ok(())
        })?;
    }
    Ok(())
}

/// One cell of table 2.
struct TwoReceivers {
    flows: u32,
    tenths: u64,
    total_bit_s: u64,
    duration: Duration,
}

impl TwoReceivers {
    fn measure(
        &self,
        ctx: &mut Context,
        testbed: &Testbed,
        control: &Control,
        (case, run): (&Case, u32),
    ) -> anyhow::Result<Vec<(f64, f64)>> {
        let &TwoReceivers { flows, tenths, total_bit_s, duration } = self;
        let minimum = total_bit_s / 10 * tenths;
        let _peer = Peer::htb_minimums(testbed, total_bit_s, &[minimum, minimum])?;
        let (mut servers, mut loads) = (Vec::new(), Vec::new());
        let at = |receiver: usize| SocketAddr::new(testbed.addr(receiver, Family::V4), PROBE_PORT);
        for receiver in [0, 1] {
            let to = testbed.receiver(receiver);
            servers.push(probe::start_server(testbed, to, at(receiver))?);
            let options = options(testbed, receiver as u16, flows, control, duration);
            loads.push(IperfRun::start(testbed.sender(), to, &options)?);
        }
        pass_time(SETTLED)?;
        let args = [0, 1].map(|receiver| probe::ClientArgs::new(at(receiver), duration - SETTLED));
        let mut clients = Vec::new();
        for args in args {
            clients.push((probe::start_client(testbed, testbed.sender(), args)?, args));
        }
        let mut probes = Vec::new();
        for (client, args) in clients {
            probes.push(probe::finish_client(client, args)?);
        }
        let mut rates = Vec::new();
        for load in loads {
            rates.push(load.finish()?.received_bit_s);
        }
        let total: f64 = rates.iter().sum();
        let published = |metric| he_2017::two_receivers(flows, tenths, metric);
        let saturation = total / total_bit_s as f64 * 100.0;
        ctx.record("htb", case, run).value("total_goodput_bit_s", total).beside(
            "saturation_percent",
            saturation,
            published("saturation_percent"),
        );
        for (receiver, (probe, rate)) in probes.iter().zip(rates).enumerate() {
            let case = case.clone().with("receiver", receiver + 1);
            ctx.record("htb", &case, run)
                .value("class_goodput_bit_s", rate)
                .beside("class_rtt_p50_us", probe.rtt.p50_us, published("rtt_p50_us"))
                .value("class_rtt_p99_us", probe.rtt.p99_us)
                .beside("class_rtt_p99_9_us", probe.rtt.p99_9_us, published("rtt_p99_9_us"));
        }
        Ok(probes.swap_remove(0).rtt_cdf_us)
    }
}

/// The distributions of the first run of each cell, for the figures.
#[derive(Debug, Default)]
struct Curves(Vec<Curve>);

#[derive(Debug)]
struct Curve {
    case: Case,
    system: String,
    /// (microseconds, share of the probes that took no longer).
    cdf: Vec<(f64, f64)>,
}

impl Curves {
    fn add(&mut self, case: &Case, system: &str, cdf: Vec<(f64, f64)>) {
        let known = |curve: &Curve| curve.case == *case && curve.system == system;
        if !self.0.iter().any(known) {
            self.0.push(Curve { case: case.clone(), system: system.to_owned(), cdf });
        }
    }

    /// A figure for each number of flows, as the paper has them.
    fn figures(self, ctx: &mut Context) {
        for (receivers, key, level) in
            [("one", "flows", "limit_bit_s"), ("two", "flows_each", "minimum_bit_s")]
        {
            let flows = distinct(self.0.iter().filter_map(|curve| curve.case.0.get(key)));
            for flows in flows {
                let here = self.0.iter().filter(|curve| match curve.system.as_str() {
                    BASELINE => true,
                    "htb" | "pace" => curve.case.0.get(key) == Some(flows),
                    _ => false,
                });
                let series = here.map(|Curve { case, system, cdf }| {
                    let level = case.0.get(level).and_then(|level| level.as_u64());
                    let level = level.map(|level| format!(", {}", rate(level)));
                    Series::new(format!("{system}{}", level.unwrap_or_default()), cdf.clone())
                });
                let (plural, each) = if receivers == "two" { ("s", " each") } else { ("", "") };
                let s = if *flows == 1 { "" } else { "s" };
                ctx.figure(
                    &format!("rtt-{receivers}-{flows}"),
                    Cdf {
                        title: format!(
                            "Round trips, {receivers} receiver{plural}, {flows} flow{s}{each}"
                        ),
                        metric: "rtt_us".to_owned(),
                        series: series.collect(),
                    },
                );
            }
        }
    }
}

fn claims(ctx: &mut Context) {
    let cases: Vec<Case> = distinct(ctx.rows().iter().map(|row| &row.case))
        .into_iter()
        .filter(|case| case.0.contains_key("limit_bit_s"))
        .cloned()
        .collect();
    let base = |metric| ctx.median(BASELINE, metric, None);
    let (Some(base_p50), Some(base_p99)) = (base("rtt_p50_us"), base("rtt_p99_us")) else { return };
    let every = |system: &str, metric: &str| -> Vec<f64> {
        cases.iter().filter_map(|case| ctx.median(system, metric, Some(case))).collect()
    };
    let times: Vec<f64> = every("htb", "rtt_p50_us").iter().map(|us| us / base_p50).collect();
    let pace = every("pace", "rtt_p99_us");
    let lost = every("pace", "probes_lost_percent");
    let p99 = |system: &str, case: &Case| ctx.median(system, "rtt_p99_us", Some(case));
    let ratio = |case: &Case| Some(p99("htb", case)? / p99("pace", case)?);
    let (mut below, mut failed) = (Vec::new(), Vec::new());
    for case in &cases {
        let Some(times) = ratio(case) else { continue };
        below.push(times);
        if times < PACE_BELOW_LEAST {
            failed.push(format!("{} ({times:.0}x)", case_in_words(case)));
        }
    }
    if let Some((least, most)) = stats::range(&times) {
        ctx.claim(
            "htb: median round trip under load at least 10x the baseline",
            least >= HTB_TIMES_LEAST,
            format!(
                "{least:.0}x to {most:.0}x of {base_p50:.0} µs; in the paper 10x to 51x of the 62 µs in its \
                 text, 6x to 28x of the 116 µs in its table"
            ),
        );
    }
    if let (Some((least, most)), Some((_, lost))) = (stats::range(&pace), stats::range(&lost)) {
        ctx.claim(
            "pace: p99 within 1 ms of the baseline's, no probe in 100 lost",
            most - base_p99 <= PACE_ABOVE_MOST_US && lost < LOST_MOST_PERCENT,
            format!(
                "{least:.0} to {most:.0} µs, baseline {base_p99:.0} µs; {lost:.1} % lost at most"
            ),
        );
    }
    if let Some((least, most)) = stats::range(&below) {
        ctx.claim(
            "pace: p99 at least 10x below htb's in the same case",
            failed.is_empty(),
            match failed.is_empty() {
                true => format!("{least:.0}x to {most:.0}x"),
                false => format!("{least:.0}x to {most:.0}x; not with {}", failed.join(", ")),
            },
        );
    }
}

/// `1 Gbit/s`.
fn rate(bit_s: u64) -> String {
    Unit::split("rate_bit_s").1.human((bit_s as f64 / 1e7).round() * 1e7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_plan_is_that_of_the_tables() {
        let plan = Plan::new(false, &LIMITS);
        assert_eq!((plan.one.len(), plan.two.len()), (16, 16));
        assert_eq!(Plan::new(true, &LIMITS).one, [(1, GBIT), (16, GBIT), (8, 8 * GBIT)]);
        assert_eq!(Plan::new(true, &[GBIT]).one.len(), 2);
    }

    #[test]
    fn rates_are_round() {
        assert_eq!((rate(GBIT), rate(12_346_000_000)), ("1 Gbit/s".into(), "12.35 Gbit/s".into()));
    }
}
