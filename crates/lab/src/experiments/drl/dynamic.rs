//! `drl-dynamic`: a flow joins every few seconds, at one limiter and the other in turn: when it has its
//! share.
//! Figures 6 and 7 of Cloud Control.

use std::{path::PathBuf, time::Duration};

use tidegate_core::Nanos;
use tidegate_sim::world::{FlowOptions, WorldOptions};

use super::{
    RTT,
    baseline::{KERNEL, LIMIT_BIT_S, SETUPS, Setup, VIRTUAL, case, with_daemons, world},
    daemons::Daemons,
    fleet::{self, Flow},
    forwarded::{BIN, Forwarded, bins_in},
    published::NEW_FLOW,
    simulation::{self, nanos},
};
use crate::{
    chart::{BarsOf, Lines},
    context::Context,
    experiment::Experiment,
    host::Need,
    stats,
    testbed::Sites,
};

const SECOND: Duration = Duration::from_secs(1);
/// A share is had when the mean over this is so much of an equal part.
const WINDOW: Duration = Duration::from_secs(1);
const SHARE: f64 = 0.9;
/// How long ours may take.
const GOOD: Duration = Duration::from_secs(2);
const SHOWN: Duration = Duration::from_millis(250);
const JOIN: &str = "join_s";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct DrlDynamic {
    tiny: Option<PathBuf>,
}

impl DrlDynamic {
    /// Two flows in all; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> DrlDynamic {
        DrlDynamic { tiny: Some(lab_binary) }
    }
}

/// So many flows, one a step.
#[derive(Debug, Clone, Copy)]
struct Steps {
    flows: usize,
    step: Duration,
}

impl Steps {
    fn lasts(self) -> Duration {
        self.step * self.flows as u32
    }

    /// The limiter that a flow joins at.
    fn limiter(flow: usize) -> usize {
        flow % 2
    }
}

impl Experiment for DrlDynamic {
    fn name(&self) -> &'static str {
        "drl-dynamic"
    }

    fn summary(&self) -> &'static str {
        "A flow joins every few seconds at one of two limiters of one limit: when it has its share"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 5 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let steps = match (&self.tiny, ctx.quick) {
            (Some(_), _) => Steps { flows: 2, step: SECOND * 2 },
            (_, true) => Steps { flows: 5, step: SECOND * 3 },
            _ => Steps { flows: 6, step: SECOND * 10 },
        };
        ctx.note(
            "Limits and paths as in `drl-fig3`. Flows join at the first limiter, the second, the first, \
            and \
             so on. \
             A newcomer has its share at the end of the first second over which its mean is 90 % of an \
             equal \
             part of the limit, counted from its connection; one that has not before the next joins \
             counts as \
             a whole step. The first flow is not counted: it has no share to take from anyone.",
        );
        let setups: Vec<Setup> = SETUPS.into_iter().filter(|setup| setup.name != "ctb").collect();
        ctx.alternate(&setups, ctx.repeats, |ctx, &setup, run| {
            let lasts = nanos(steps.lasts());
            let simulated = simulation::run(joining(setup, steps, run, lasts));
            let began: Vec<Duration> = (0..steps.flows as u32).map(|at| steps.step * at).collect();
            record(ctx, setup, VIRTUAL, run, steps, &simulated.forwarded, &began);
            Ok(())
        })?;
        let sites = fleet::sites(ctx, 2, RTT, self.tiny.clone())?;
        let with_daemons = with_daemons(&setups, self.tiny.is_some());
        ctx.alternate(&with_daemons, ctx.repeats, |ctx, &setup, run| {
            let ran = measure(ctx, &sites, setup, steps)?;
            record(ctx, setup, KERNEL, run, steps, &ran.forwarded, &ran.began);
            Ok(())
        })?;
        let title = "Time until a newcomer has 90 % of an equal part, mean over 1 s";
        ctx.bars("join", BarsOf { title, metric: JOIN, points: None });
        claims(ctx);
        Ok(())
    }
}

/// The same in simulation.
fn joining(setup: Setup, steps: Steps, run: u32, lasts: Nanos) -> WorldOptions {
    let mut options = world(setup, steps.lasts(), run);
    let rtt = options.flows.first().map_or(nanos(RTT), |flow| flow.rtt);
    let flow = |at: usize| FlowOptions {
        host: Steps::limiter(at),
        start: nanos(steps.step * at as u32),
        stop: lasts,
        rtt: Nanos(rtt.0 + at as u64 * 100_000),
        bound_bit_s: None,
    };
    options.flows = (0..steps.flows).map(flow).collect();
    options
}

fn measure(ctx: &Context, sites: &Sites, setup: Setup, steps: Steps) -> anyhow::Result<fleet::Ran> {
    let mut daemons = Daemons::start(ctx, sites, setup.plan(sites.count()), sites.count())?;
    let flow = |at: usize| Flow {
        site: setup.site_of(Steps::limiter(at)),
        limiter: Steps::limiter(at),
        from: steps.step * at as u32,
        to: steps.lasts(),
    };
    let plan: Vec<Flow> = (0..steps.flows).map(flow).collect();
    fleet::run(sites, &mut daemons, &plan, LIMIT_BIT_S, |_| Ok(()))
}

/// How long after its connection a flow had its share among `flows`; at most `within`.
fn took(bytes: &[u64], began: Duration, flows: usize, within: Duration) -> Duration {
    let share = SHARE * LIMIT_BIT_S as f64 / flows as f64;
    let wanted = (share / 8.0 * WINDOW.as_secs_f64()) as u64;
    let (from, window) = (bins_in(began), bins_in(WINDOW));
    let mine = bytes.get(from..(from + bins_in(within)).min(bytes.len())).unwrap_or_default();
    let at = mine.windows(window).position(|bins| bins.iter().sum::<u64>() >= wanted);
    at.map_or(within, |at| BIN * (at + window) as u32)
}

fn record(
    ctx: &mut Context,
    setup: Setup,
    world: &str,
    run: u32,
    steps: Steps,
    passed: &Forwarded,
    began: &[Duration],
) {
    let published = (setup.name == "fps").then_some(NEW_FLOW.as_secs_f64());
    for (flow, (bytes, began)) in passed.flows.iter().zip(began).enumerate().skip(1) {
        let took = took(bytes, *began, flow + 1, steps.step);
        let case = case(world).with("flows", flow + 1);
        let _ = ctx.record(setup, &case, run).beside(JOIN, took.as_secs_f64(), published);
    }
    if run > 1 {
        return;
    }
    let series = (0..steps.flows).map(|flow| {
        let one = Forwarded {
            flows: vec![passed.flows[flow].clone()],
            limiter: vec![0],
            limit_bit_s: passed.limit_bit_s,
        };
        one.series(&format!("flow {}", flow + 1), None, SHOWN)
    });
    let lines = Lines {
        title: format!("{setup}, {world}: rates of flows that join one after the other"),
        x: "time_s".to_owned(),
        y: "forwarded_bit_s".to_owned(),
        logarithmic: false,
        limit: Some(LIMIT_BIT_S as f64),
        series: series.collect(),
    };
    ctx.figure(&format!("{}-{world}", setup.name.replace(", ", "-")), lines);
}

fn claims(ctx: &mut Context) {
    for world in [KERNEL, VIRTUAL] {
        for setup in SETUPS.into_iter().filter(|setup| setup.is_ours()) {
            let of_setup = |row: &&crate::report::Row| {
                row.system == setup.name && row.metric == JOIN && row.case.0["in"] == world
            };
            let all: Vec<f64> = ctx.rows().iter().filter(of_setup).map(|row| row.value).collect();
            let (Some(median), Some((_, worst))) = (stats::median(&all), stats::range(&all)) else {
                continue;
            };
            ctx.claim(
                format!("{setup}, {world}: a newcomer has its share within {} s", GOOD.as_secs()),
                worst <= GOOD.as_secs_f64(),
                format!(
                    "median {median:.2} s, worst {worst:.2} s, published {} s",
                    NEW_FLOW.as_secs()
                ),
            );
        }
    }
}
