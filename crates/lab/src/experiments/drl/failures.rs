//! `drl-failures`: daemons that are killed, come back, are cut off, come back, and join: what passes
//! meanwhile,
//! and what the local limits add up to.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{
    MOST, RTT,
    baseline::{KERNEL, LIMIT_BIT_S, SETUPS, Setup, case, with_daemons},
    daemons::Daemons,
    fleet::{self, Flow},
    forwarded::{BIN, bins_in},
};
use crate::{
    chart::{Lines, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    stats,
    testbed::{Sites, wait::interrupted},
};

const SECOND: Duration = Duration::from_secs(1);
/// Greedy flows of each site.
const FLOWS: usize = 2;
/// So much of what passed in a second before anything failed is in use again.
const USED: f64 = 0.95;
/// From when on the limit must hold: TCP's start is over.
const FROM: Duration = Duration::from_secs(2);
/// A site that is back sends from then on.
const LATER: Duration = Duration::from_millis(300);
const SHOWN: Duration = Duration::from_millis(250);
/// Local limits are looked at no more often than this.
const LOOK: Duration = Duration::from_millis(100);

const AGAIN: &str = "used_again_s";
const BEFORE: &str = "used_before_percent";
const SUM: &str = "local_limits_max_percent";

/// What happens, a step each, after one in which nothing does.
const EVENTS: [&str; 5] = ["kill", "restart", "cut", "heal", "join"];
/// Which site it happens to.
fn victim(event: usize, sites: usize) -> usize {
    match event {
        0 | 1 => sites - 2,
        2 | 3 => 1,
        _ => sites - 1,
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct DrlFailures {
    tiny: Option<PathBuf>,
}

impl DrlFailures {
    /// Three sites and short steps; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> DrlFailures {
        DrlFailures { tiny: Some(lab_binary) }
    }
}

impl Experiment for DrlFailures {
    fn name(&self) -> &'static str {
        "drl-failures"
    }

    fn summary(&self) -> &'static str {
        "Daemons of one limit are killed, cut off and join: whether the limit holds, and how soon it is \
         used again"
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
        let (count, step) = match (&self.tiny, ctx.quick) {
            (Some(_), _) => (4, SECOND * 2),
            (_, true) => (4, SECOND * 5),
            _ => (10, SECOND * 10),
        };
        ctx.note(
            "Each site sends two greedy Reno flows through a router with a limit and a daemon; one daemon \
             joins at the end. `kill` is SIGKILL, and nobody has the limit fall: the gate does so itself; \
             the site's flows go on. `cut` takes the router's link down, and its flows end; with `heal` \
             new ones begin 0.3 s later. `used again` is from the event to the end of the first second \
             over which 95 % passed of what did in a second of the latter half of the first step (`used \
             before`, of the limit); what is never used again within the step counts as the step. What \
             passes is looked at over every second from 2 s on. Local limits are those of all gates, \
             those that are cut off or have no daemon among them: each is read twice, and the lesser is \
             added. Buckets are of 75 kB, and with `share` of that together.",
        );
        let sites = fleet::sites(ctx, count, RTT, self.tiny.clone())?;
        let setups: Vec<Setup> = SETUPS.into_iter().filter(|setup| setup.is_ours()).collect();
        let with_daemons = with_daemons(&setups, self.tiny.is_some());
        ctx.alternate(&with_daemons, ctx.repeats, |ctx, &setup, run| {
            measure(ctx, &sites, setup, step, run)
        })?;
        claims(ctx);
        Ok(())
    }
}

fn at(event: usize, step: Duration) -> Duration {
    step * (event as u32 + 1)
}

fn flows(sites: usize, step: Duration) -> Vec<Flow> {
    let ends = at(EVENTS.len(), step);
    let flow = |site: usize, from: Duration, to: Duration| Flow { site, limiter: site, from, to };
    let cut = victim(2, sites);
    let of_site = |site: usize| {
        if site == cut {
            vec![flow(site, Duration::ZERO, at(2, step)), flow(site, at(3, step) + LATER, ends)]
        } else if site == victim(4, sites) {
            vec![flow(site, at(4, step), ends)]
        } else {
            vec![flow(site, Duration::ZERO, ends)]
        }
    };
    (0..sites).flat_map(of_site).flat_map(|flow| [flow; FLOWS]).collect()
}

/// What all local limits add up to, at least, in bit/s: capacity moves while they are read.
fn local_limits(daemons: &Daemons<'_>, sites: usize) -> anyhow::Result<u64> {
    let look =
        || (0..sites).map(|site| daemons.rate_bit_s(site)).collect::<anyhow::Result<Vec<u64>>>();
    let (first, second) = (look()?, look()?);
    Ok(first.iter().zip(&second).map(|(first, second)| first.min(second)).sum())
}

fn measure(
    ctx: &mut Context,
    sites: &Sites,
    setup: Setup,
    step: Duration,
    run: u32,
) -> anyhow::Result<()> {
    let count = sites.count();
    let mut daemons = Daemons::start(ctx, sites, setup.plan(count), count - 1)?;
    let mut sums: Vec<(f64, f64)> = Vec::new();
    let started = Instant::now();
    let plan = flows(count, step);
    let ran = fleet::run(sites, &mut daemons, &plan, LIMIT_BIT_S, |daemons| {
        for (event, name) in EVENTS.iter().enumerate() {
            while started.elapsed() < at(event, step) && !interrupted() {
                let looked = Instant::now();
                let sum = local_limits(daemons, count)? as f64 / LIMIT_BIT_S as f64;
                sums.push((started.elapsed().as_secs_f64(), sum * 100.0));
                std::thread::sleep(LOOK.saturating_sub(looked.elapsed()));
            }
            let site = victim(event, count);
            match *name {
                "kill" => daemons.kill(site)?,
                "restart" | "join" => daemons.launch(site)?,
                "cut" => sites.plug(site, false)?,
                _ => sites.plug(site, true)?,
            }
        }
        Ok(())
    });
    // The next system finds all sites joined.
    if ran.is_err() {
        let _ = sites.plug(victim(2, count), true);
    }
    let passed = ran?.forwarded;
    let total = passed.sum(None);
    let (half, first) = (bins_in(at(0, step) / 2), bins_in(at(0, step)));
    let quiet = total.get(half..first.min(total.len())).unwrap_or_default();
    let before =
        quiet.iter().sum::<u64>() as f64 / quiet.len().max(1) as f64 * bins_in(SECOND) as f64;
    let before_percent = before * 8.0 / LIMIT_BIT_S as f64 * 100.0;
    let _ = ctx.record(setup, &case(KERNEL), run).value(BEFORE, before_percent);
    for (event, name) in EVENTS.iter().enumerate() {
        let from = bins_in(at(event, step));
        let window = bins_in(SECOND);
        let bins = total.get(from..(from + bins_in(step)).min(total.len())).unwrap_or_default();
        let wanted = (USED * before) as u64;
        let again = bins.windows(window).position(|bins| bins.iter().sum::<u64>() >= wanted);
        let again = again.map_or(step, |at| BIN * (at + window) as u32);
        let case = case(KERNEL).with("event", *name);
        let _ = ctx.record(setup, &case, run).value(AGAIN, again.as_secs_f64());
    }
    let record = ctx.record(setup, &case(KERNEL), run);
    let most_sum = sums.iter().map(|(_, sum)| *sum).fold(0.0, f64::max);
    let record = record.value(SUM, most_sum);
    if let Some((_, most)) = passed.extremes_percent(FROM, SECOND) {
        let _ = record.value(MOST, most);
    }
    if run == 1 {
        let mut series: Vec<Series> = (0..count)
            .map(|site| passed.series(&format!("site {site}"), Some(site), SHOWN))
            .collect();
        series.push(passed.series("all", None, SHOWN));
        let sums = sums.iter().map(|(at, sum)| (*at, sum / 100.0 * LIMIT_BIT_S as f64)).collect();
        series.push(Series::new("local limits", sums));
        let lines = Lines {
            title: format!("{setup}: what passes while daemons fail, and the sum of local limits"),
            x: "time_s".to_owned(),
            y: "forwarded_bit_s".to_owned(),
            logarithmic: false,
            limit: Some(LIMIT_BIT_S as f64),
            series,
        };
        ctx.figure(&setup.name.replace(", ", "-"), lines);
    }
    Ok(())
}

fn claims(ctx: &mut Context) {
    let case = case(KERNEL);
    for setup in SETUPS.into_iter().filter(|setup| setup.is_ours()) {
        let name = setup.name;
        let Some((_, sum)) = stats::range(&ctx.values(name, SUM, Some(&case))) else { continue };
        let (_, most) =
            stats::range(&ctx.values(name, MOST, Some(&case))).unwrap_or((0.0, f64::NAN));
        ctx.claim(
            format!("{name}: never above 102 % of the limit over 1 s, whatever fails"),
            most <= 102.0,
            format!("{most:.1} %"),
        );
        ctx.claim(
            format!("{name}: local limits never add up to more than the limit"),
            sum <= 100.0 + f64::EPSILON,
            format!("{sum:.2} % at most"),
        );
        let of_event = |event: &str| {
            let case = case.clone().with("event", event);
            stats::median(&ctx.values(name, AGAIN, Some(&case))).unwrap_or(f64::NAN)
        };
        let took = EVENTS.map(of_event);
        let before = stats::median(&ctx.values(name, BEFORE, Some(&case))).unwrap_or(f64::NAN);
        let measured: Vec<String> =
            EVENTS.iter().zip(took).map(|(event, took)| format!("{event} {took:.2} s")).collect();
        ctx.claim(
            format!("{name}: 95 % of what passed before does again within 5 s of each event"),
            took.iter().all(|took| *took < 5.0),
            format!("{}; before {before:.1} % of the limit", measured.join(", ")),
        );
    }
}
