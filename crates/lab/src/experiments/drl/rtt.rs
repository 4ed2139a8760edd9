//! `drl-rtt`: two limiters, seven flows of 10 ms at the one and seven of 100 ms at the other. Table 2 of
//! Cloud Control.
//!
//! ```text
//! sender 0 ── router 0 ──5 ms── hub ──5 ms── receiver          routers are 40 ms apart
//! sender 1 ──60 ms── router 1 ──35 ms──┘
//! ```

use std::{path::PathBuf, time::Duration};

use tidegate_core::Nanos;
use tidegate_sim::world::WorldOptions;

use super::{
    JAIN, LEAST, MOST, TOTAL,
    baseline::{KERNEL, Setup, VIRTUAL, case, of_tables, with_daemons},
    daemons::{At, Daemons},
    fleet::{self, Flow},
    forwarded::Forwarded,
    published,
    simulation::{self, nanos},
};
use crate::{
    chart::BarsOf,
    context::Context,
    experiment::Experiment,
    host::Need,
    stats,
    testbed::{SiteLinks, Sites},
};

const SECOND: Duration = Duration::from_secs(1);
/// From when on figures count: long flows need some round trips.
const FROM: Duration = Duration::from_secs(4);
const FLOWS: [usize; 2] = [7, 7];
const RTTS: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(100)];
/// Of the links: from the sender to the router, from there to the hub; and from the hub to the receiver.
const LAN: [Option<Duration>; 2] = [None, Some(Duration::from_millis(60))];
const WAN: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(35)];
const DOWN: Duration = Duration::from_millis(5);
/// Round trips in simulation differ by so much, or flows would lose and win in step.
const APART: Duration = Duration::from_micros(100);

const SHORT: &str = "short_flow_bit_s";
const LONG: &str = "long_flow_bit_s";
/// What a flow of the one kind has of what one of the other has, as published for FPS.
const PUBLISHED_PART: f64 = 0.57 / 0.92;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct DrlRtt {
    tiny: Option<PathBuf>,
}

impl DrlRtt {
    /// Runs of seconds; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> DrlRtt {
        DrlRtt { tiny: Some(lab_binary) }
    }
}

impl Experiment for DrlRtt {
    fn name(&self) -> &'static str {
        "drl-rtt"
    }

    fn summary(&self) -> &'static str {
        "One limit of 10 Mbit/s over two routers, flows of 10 ms at the one and of 100 ms at the other"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 3 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let lasts = match (&self.tiny, ctx.quick) {
            (Some(_), _) => SECOND * 6,
            (_, true) => SECOND * 20,
            _ => SECOND * 60,
        };
        ctx.note(
            "Seven greedy Reno flows of each kind, which is what the published means and totals give; \
             routers are 40 ms apart. Figures are means over flows, whole frames counted, from 4 s to the \
             end. `ctb` is one plain limit where the ways meet. Limits are policers with a bucket of 75 \
             kB; with `share` all buckets together are as deep, and in simulation it has a queue that \
             drops at random instead.",
        );
        let setups = of_tables();
        ctx.alternate(&setups, ctx.repeats, |ctx, &setup, run| {
            record(ctx, setup, VIRTUAL, run, &simulation::run(world(setup, lasts, run)).forwarded);
            Ok(())
        })?;
        let link = |rtt: Duration| ctx.link(rtt);
        let site = |at: usize| SiteLinks { lan: LAN[at].map(link), wan: link(WAN[at]) };
        let sites = Sites::with(&[site(0), site(1)], link(DOWN), self.tiny.clone())?;
        let with_daemons = with_daemons(&setups, self.tiny.is_some());
        ctx.alternate(&with_daemons, ctx.repeats, |ctx, &setup, run| {
            let mut plan = setup.plan(sites.count());
            if plan.algorithm.is_none() {
                plan.at = At::Hub;
            }
            let mut daemons = Daemons::start(ctx, &sites, plan, sites.count())?;
            let flow = |site| Flow { site, limiter: site, from: Duration::ZERO, to: lasts };
            let counts = FLOWS.iter().enumerate();
            let flows: Vec<Flow> =
                counts.flat_map(|(site, count)| (0..*count).map(move |_| flow(site))).collect();
            let ran = fleet::run(&sites, &mut daemons, &flows, plan.limit_bit_s, |_| Ok(()))?;
            record(ctx, setup, KERNEL, run, &ran.forwarded);
            Ok(())
        })?;
        for (name, title, metric) in [
            ("short", "Rate of a flow of 10 ms", SHORT),
            ("long", "Rate of a flow of 100 ms", LONG),
        ] {
            ctx.bars(name, BarsOf { title, metric, points: None });
        }
        claims(ctx);
        Ok(())
    }
}

fn world(setup: Setup, lasts: Duration, run: u32) -> WorldOptions {
    let mut world = WorldOptions::two_limiters(u64::from(run), setup.scheme, nanos(lasts), FLOWS);
    let mut nth = [0; 2];
    for flow in &mut world.flows {
        let rtt = RTTS[flow.host] + APART * nth[flow.host];
        nth[flow.host] += 1;
        flow.rtt = Nanos(rtt.as_nanos() as u64);
    }
    world
}

fn record(ctx: &mut Context, setup: Setup, world: &str, run: u32, passed: &Forwarded) {
    let flow = |site: usize| passed.mean_bit_s(Some(site), FROM) / FLOWS[site] as f64;
    let (total, short, long) = match published::table_2(setup.name) {
        Some((total, short, long)) => (Some(total), Some(short), Some(long)),
        None => (None, None, None),
    };
    let mut record = ctx
        .record(setup, &case(world), run)
        .beside(TOTAL, passed.mean_bit_s(None, FROM), total)
        .beside(SHORT, flow(0), short)
        .beside(LONG, flow(1), long);
    if let Some(jain) = passed.jain(FROM) {
        record = record.value(JAIN, jain);
    }
    if let Some((least, most)) = passed.extremes_percent(FROM, SECOND) {
        record = record.value(LEAST, least).value(MOST, most);
    }
    let _ = record;
}

fn claims(ctx: &mut Context) {
    for world in [KERNEL, VIRTUAL] {
        for setup in of_tables() {
            let median = |metric: &str| ctx.median(setup.name, metric, Some(&case(world)));
            let all = (median(SHORT), median(LONG), median(TOTAL));
            let (Some(short), Some(long), Some(total)) = all else { continue };
            if setup.is_ours() {
                let part = (long / short).min(short / long);
                ctx.claim(
                    format!(
                        "{setup}, {world}: flows of the one kind have at least {PUBLISHED_PART:.2} \
                         of those of the other, as published for FPS"
                    ),
                    part >= PUBLISHED_PART,
                    format!(
                        "{:.2} Mbit/s over 10 ms, {:.2} over 100 ms: {part:.2}",
                        short / 1e6,
                        long / 1e6
                    ),
                );
                let of_limit = total / super::baseline::LIMIT_BIT_S as f64 * 100.0;
                ctx.claim(
                    format!("{setup}, {world}: all together within 2 % of the limit"),
                    (98.0..=102.0).contains(&of_limit),
                    format!("{of_limit:.1} %"),
                );
            } else if let Some((_, _, published)) = published::table_2(setup.name) {
                let most = stats::range(&ctx.values(setup.name, LONG, Some(&case(world))));
                let (_, most) = most.unwrap_or((f64::NAN, f64::NAN));
                ctx.claim(
                    format!(
                        "{setup}, {world}: a flow of 100 ms has less than half of an equal part"
                    ),
                    most < 0.5 * super::baseline::LIMIT_BIT_S as f64 / 14.0,
                    format!("{:.2} Mbit/s; published {:.2}", most / 1e6, published / 1e6),
                );
            }
        }
    }
}
