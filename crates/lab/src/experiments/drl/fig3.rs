//! `drl-fig3`: two limiters with three flows and seven, 10 Mbit/s, 40 ms between all: daemons on routers,
//! and the same in simulation. Figure 3 of Cloud Control.

use std::{path::PathBuf, time::Duration};

use super::{
    FIRST, JAIN, LEAST, MOST, OVERHEAD, RTT, SECOND as SECOND_RATE, TOTAL,
    baseline::{KERNEL, LIMIT_BIT_S, SETUPS, Setup, VIRTUAL, case, measure, world},
    fleet,
    forwarded::Forwarded,
    simulation,
};
use crate::{
    chart::{BarsOf, Lines},
    context::Context,
    experiment::Experiment,
    host::Need,
    stats,
};

const SECOND: Duration = Duration::from_secs(1);
/// From when on figures count.
const FROM: Duration = Duration::from_secs(2);
/// The rates that figures show.
const SHOWN: [Duration; 2] = [Duration::from_millis(100), SECOND];
const START: &str = "start_200ms_percent";
const BEGIN: Duration = Duration::from_millis(200);

/// See the [module](self).
#[derive(Debug, Default)]
pub struct DrlFig3 {
    /// For tests: short runs, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl DrlFig3 {
    /// Runs of three seconds; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> DrlFig3 {
        DrlFig3 { tiny: Some(lab_binary) }
    }
}

impl Experiment for DrlFig3 {
    fn name(&self) -> &'static str {
        "drl-fig3"
    }

    fn summary(&self) -> &'static str {
        "One limit of 10 Mbit/s over two routers with three flows and seven: daemons, and the same simulated"
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
            (Some(_), _) => SECOND * 4,
            (_, true) => SECOND * 12,
            _ => SECOND * 60,
        };
        ctx.note(
            "Flows are Reno with SACK; routers are 40 ms apart, senders 40 ms from the receiver. Limits act \
             on what comes to a router from its sender, and are set by a `tidegate daemon` each. They are \
             policers with a bucket of 75 kB, as published, and with `share` all buckets together are as \
             deep; with `spring` a shaper that gives flows their windows; `share, pace` limits the sender's \
             sockets instead. `ctb` is one router with all flows and a plain limit. In simulation `share`, \
             and `fps, spring`, have a queue that drops at random, as docs/fleet-design.md says. What passes \
             is counted behind the routers, whole frames, from 2 s to the end; gossip there is all that is \
             no flow's.",
        );
        // `share, pace` is simulated as `share` is.
        ctx.alternate(&SETUPS, ctx.repeats, |ctx, &setup, run| {
            let simulated = simulation::run(world(setup, lasts, run));
            let overhead = simulated.overhead_percent;
            record(ctx, setup, VIRTUAL, run, &simulated.forwarded, overhead);
            if run == 1 {
                figure(ctx, setup, VIRTUAL, &simulated.forwarded);
            }
            Ok(())
        })?;
        let sites = fleet::sites(ctx, 2, RTT, self.tiny.clone())?;
        ctx.alternate(&SETUPS, ctx.repeats, |ctx, &setup, run| {
            let ran = measure(ctx, &sites, setup, lasts)?;
            record(ctx, setup, KERNEL, run, &ran.forwarded, ran.overhead_percent);
            if run == 1 {
                figure(ctx, setup, KERNEL, &ran.forwarded);
            }
            Ok(())
        })?;
        ctx.bars("jain", BarsOf { title: "Jain's index of ten flows", metric: JAIN, points: None });
        claims(ctx);
        Ok(())
    }
}

fn record(
    ctx: &mut Context,
    setup: Setup,
    world: &str,
    run: u32,
    passed: &Forwarded,
    overhead_percent: f64,
) {
    let mut values = vec![
        (FIRST, passed.mean_bit_s(Some(0), FROM)),
        (SECOND_RATE, passed.mean_bit_s(Some(1), FROM)),
        (TOTAL, passed.mean_bit_s(None, FROM)),
        (OVERHEAD, overhead_percent),
    ];
    values.extend(passed.jain(FROM).map(|jain| (JAIN, jain)));
    if let Some((least, most)) = passed.extremes_percent(FROM, SECOND) {
        values.extend([(LEAST, least), (MOST, most)]);
    }
    values.extend(passed.extremes_percent(Duration::ZERO, BEGIN).map(|(_, most)| (START, most)));
    let record = ctx.record(setup, &case(world), run);
    let _ = values.into_iter().fold(record, |record, (metric, value)| record.value(metric, value));
}

fn figure(ctx: &mut Context, setup: Setup, world: &str, passed: &Forwarded) {
    for every in SHOWN {
        let ms = every.as_millis();
        let lines = Lines {
            title: format!("{setup}, {world}: what passes in each {ms} ms"),
            x: "time_s".to_owned(),
            y: "forwarded_bit_s".to_owned(),
            logarithmic: false,
            limit: Some(LIMIT_BIT_S as f64),
            series: vec![
                passed.series("3 flows", Some(0), every),
                passed.series("7 flows", Some(1), every),
                passed.series("all", None, every),
            ],
        };
        let name = setup.name.replace(", ", "-");
        ctx.figure(&format!("{name}-{world}-{ms}ms"), lines);
    }
}

fn claims(ctx: &mut Context) {
    for setup in SETUPS {
        let name = setup.name;
        let all = |metric: &str| ctx.values(name, metric, Some(&case(KERNEL)));
        let (jain, total) = (all(JAIN), all(TOTAL));
        if total.is_empty() {
            continue;
        }
        let median = |metric: &str, world: &str| {
            ctx.median(name, metric, Some(&case(world))).unwrap_or(f64::NAN) / 1e6
        };
        let (mut near, mut pairs) = (true, Vec::new());
        for metric in [FIRST, SECOND_RATE, TOTAL] {
            let (here, there) = (median(metric, KERNEL), median(metric, VIRTUAL));
            let room = (0.1 * there).max(0.01 * LIMIT_BIT_S as f64 / 1e6);
            near &= (here - there).abs() <= room;
            pairs.push(format!("{here:.2} ({there:.2})"));
        }
        let (least, _) = stats::range(&all(LEAST)).unwrap_or((f64::NAN, f64::NAN));
        let (_, most) = stats::range(&all(MOST)).unwrap_or((f64::NAN, f64::NAN));
        let jain = stats::median(&jain).unwrap_or(f64::NAN);
        ctx.claim(
            format!("{name}: daemons and simulation are within 10 %, or 1 % of the limit"),
            near,
            format!("3 flows, 7 flows and all in Mbit/s: {}", pairs.join(", ")),
        );
        if setup.is_ours() {
            ctx.claim(
                format!("{name}: Jain's index is at least 0.98"),
                jain >= 0.98,
                format!("{jain:.3}"),
            );
            ctx.claim(
                format!("{name}: within 1 % of the limit in any second after the second"),
                least >= 99.0 && most <= 101.0,
                format!("{least:.1} to {most:.1} %"),
            );
            ctx.claim(
                format!("{name}: never above 102 % of the limit over 1 s"),
                most <= 102.0,
                format!("{most:.1} %"),
            );
        }
    }
}
