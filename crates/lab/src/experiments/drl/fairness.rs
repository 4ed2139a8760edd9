//! `drl-fairness`: the same baseline again and again: Jain's index of ten flows. Figure 5 of Cloud Control.

use std::{path::PathBuf, time::Duration};

use super::{
    JAIN, RTT, TOTAL,
    baseline::{KERNEL, SETUPS, Setup, VIRTUAL, case, measure, with_daemons, world},
    fleet,
    forwarded::Forwarded,
    published, simulation,
};
use crate::{chart::BarsOf, context::Context, experiment::Experiment, host::Need, stats};

const SECOND: Duration = Duration::from_secs(1);
/// From when on figures count.
const FROM: Duration = Duration::from_secs(2);
/// Simulated runs, as many as were published.
const RUNS: u32 = 10;
/// What is asked of ours.
const GOOD: f64 = 0.98;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct DrlFairness {
    tiny: Option<PathBuf>,
}

impl DrlFairness {
    /// Runs of three seconds; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> DrlFairness {
        DrlFairness { tiny: Some(lab_binary) }
    }
}

impl Experiment for DrlFairness {
    fn name(&self) -> &'static str {
        "drl-fairness"
    }

    fn summary(&self) -> &'static str {
        "Jain's index of ten flows under one limit of 10 Mbit/s over two routers, over many runs"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 2 } else { RUNS }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let lasts = match (&self.tiny, ctx.quick) {
            (Some(_), _) => SECOND * 3,
            (_, true) => SECOND * 12,
            _ => SECOND * 60,
        };
        ctx.note(
            "As `drl-fig3`, from 2 s to the end of each run; ten simulated runs, each with another \
            seed. The \
             published figure is the median of ten runs; its GTB has nine.",
        );
        let runs = if self.tiny.is_some() { 2 } else { RUNS };
        ctx.alternate(&SETUPS, runs, |ctx, &setup, run| {
            let simulated = simulation::run(world(setup, lasts, run));
            record(ctx, setup, VIRTUAL, run, &simulated.forwarded);
            Ok(())
        })?;
        let sites = fleet::sites(ctx, 2, RTT, self.tiny.clone())?;
        let with_daemons = with_daemons(&SETUPS, self.tiny.is_some());
        ctx.alternate(&with_daemons, ctx.repeats, |ctx, &setup, run| {
            let ran = measure(ctx, &sites, setup, lasts)?;
            record(ctx, setup, KERNEL, run, &ran.forwarded);
            Ok(())
        })?;
        ctx.bars("jain", BarsOf { title: "Jain's index of ten flows", metric: JAIN, points: None });
        claims(ctx);
        Ok(())
    }
}

fn record(ctx: &mut Context, setup: Setup, world: &str, run: u32, passed: &Forwarded) {
    let published = published::figure_5(setup.name);
    let record = ctx.record(setup, &case(world), run);
    let record = record.value(TOTAL, passed.mean_bit_s(None, FROM));
    if let Some(jain) = passed.jain(FROM) {
        record.beside(JAIN, jain, published);
    }
}

fn claims(ctx: &mut Context) {
    for world in [KERNEL, VIRTUAL] {
        for setup in SETUPS {
            let all = ctx.values(setup.name, JAIN, Some(&case(world)));
            let (Some((least, most)), Some(median)) = (stats::range(&all), stats::median(&all))
            else {
                continue;
            };
            let measured = format!("{least:.3} / {median:.3} / {most:.3} in {} runs", all.len());
            let (name, published) = (setup.name, published::figure_5(setup.name));
            if setup.is_ours() {
                let claim =
                    format!("{name}, {world}: the median of Jain's index is at least {GOOD}");
                ctx.claim(claim, median >= GOOD, measured.clone());
            }
            if let (true, Some(published)) = (setup.is_ours(), published) {
                let claim = format!("{name}, {world}: ... and at least the published {published}");
                ctx.claim(claim, median >= published, measured);
            } else if let Some(published) = published {
                let claim = format!(
                    "{name}, {world}: the median is within 0.05 of the published {published}"
                );
                ctx.claim(claim, (median - published).abs() <= 0.05, measured);
            }
        }
    }
}
