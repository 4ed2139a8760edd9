//! `drl-scale`: a limit over hundreds of limiters, in simulation: what passes, how fair, and what gossip
//! costs, counted whole. Figure 8 of Cloud Control; then 10 000 members of `share`.

use std::{fmt, time::Duration};

use tidegate_core::{Rate, fleet::level::Want};
use tidegate_sim::{
    faults::{Fleet, FleetOptions, share_options},
    net::NetOptions,
    random::Random,
    world::{Scheme, WorldOptions},
};

use super::{
    JAIN, LEAST, MOST, OVERHEAD, TOTAL, published,
    simulation::{self, nanos},
};
use crate::{
    chart::{BarsOf, Lines, Series},
    context::Context,
    experiment::Experiment,
    report::Case,
    stats,
};

const SECOND: Duration = Duration::from_secs(1);
const DROPS: &str = "dropped_percent";
const IN_USE: &str = "in_use_percent";

/// Figure 8's limit, and its flows for each limiter: 1249 for 490.
const LIMIT_BIT_S: u64 = 50_000_000;
const FLOWS: usize = 1_249;
const LIMITERS: usize = 490;
/// How often `share` asks, and how long its leases are, so that 490 limiters stay below 3 %.
const ASKS: Duration = Duration::from_millis(650);
const LEASE: Duration = Duration::from_millis(2_500);
/// Gossip may cost so much of the limit.
const CHEAP_PERCENT: f64 = 3.0;

/// One who limits.
#[derive(Debug, Clone, Copy)]
struct Setup {
    name: &'static str,
    scheme: Scheme,
    /// How many peers are told in each interval.
    peers: usize,
    interval: Duration,
    push_sum: bool,
}

const fn fps(name: &'static str, peers: usize) -> Setup {
    let interval = Duration::from_millis(500);
    Setup { name, scheme: Scheme::Fps, peers, interval, push_sum: false }
}

const fn pushed(name: &'static str, peers: usize) -> Setup {
    let interval = Duration::from_millis(50);
    Setup { name, scheme: Scheme::Fps, peers, interval, push_sum: true }
}

const SETUPS: [Setup; 8] = [
    Setup { name: "ctb", scheme: Scheme::Ctb, peers: 1, interval: ASKS, push_sum: false },
    fps("fps, 1 peer", 1),
    fps("fps, 3 peers", 3),
    fps("fps, 7 peers", 7),
    pushed("fps-sum, 1 peer", 1),
    pushed("fps-sum, 3 peers", 3),
    pushed("fps-sum, 7 peers", 7),
    Setup { name: SHARE, scheme: Scheme::Share, peers: 1, interval: ASKS, push_sum: false },
];
const SHARE: &str = "share";

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

/// How large, and for how long.
#[derive(Debug, Clone, Copy)]
struct Size {
    lasts: Duration,
    /// From when on figures count: leases and weights have settled.
    from: Duration,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct DrlScale {
    tiny: bool,
}

impl DrlScale {
    /// A few limiters for a few seconds.
    pub fn tiny() -> DrlScale {
        DrlScale { tiny: true }
    }
}

impl Experiment for DrlScale {
    fn name(&self) -> &'static str {
        "drl-scale"
    }

    fn summary(&self) -> &'static str {
        "One limit over up to 490 simulated limiters, and 10 000 (1000 in the quick form): what passes, how \
         fair, and what gossip costs"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 5 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        ctx.note(
            "Simulated, packet by packet, in virtual time: TCP is NewReno with SACK, round trips are of 39 \
             to \
             41 ms, messages take 20 ms, and paths have no other bottleneck. Flows are 1249 for 490 \
             limiters, \
             at least one each, and in proportion for fewer; each run has another seed. `fps` knows all \
             others' weights from a vector and tells its peers every 500 ms; `fps-sum` adds them up by \
             push-sum every 50 ms, as published; `share` asks every 650 ms. Gossip is in bits, with the \
             headers of UDP and IP and with seals. The published overhead of \
             `less than 3 %` at 50 ms and three peers is 48 bytes x 20 x 3 = 23 kbit/s a limiter, which \
             is 22.6 % \
             of the limit with 490.",
        );
        let (sizes, size): (&[usize], Size) = match (self.tiny, ctx.quick) {
            (true, _) => (&[7], Size { lasts: SECOND * 6, from: SECOND * 3 }),
            (_, true) => (&[7, 70, LIMITERS], Size { lasts: SECOND * 40, from: SECOND * 20 }),
            _ => (&[7, 70, LIMITERS], Size { lasts: SECOND * 60, from: SECOND * 20 }),
        };
        ctx.note(format!(
            "Figures and charts count from second {} on, when leases and weights have settled; but `peak \
             from start` is the most that passes in any second, of the limit.",
            size.from.as_secs(),
        ));
        for &limiters in sizes {
            ctx.step(format!("{limiters} limiters"));
            let mut lines = Vec::new();
            ctx.alternate(&SETUPS, ctx.repeats, |ctx, setup, run| {
                lines.extend(figure_8(ctx, *setup, limiters, size, run));
                Ok(())
            })?;
            let lines = Lines {
                title: format!("{limiters} limiters: what passes in each second"),
                x: "time_s".to_owned(),
                y: "forwarded_bit_s".to_owned(),
                logarithmic: false,
                limit: Some(LIMIT_BIT_S as f64),
                series: lines,
            };
            ctx.figure(&format!("forwarded-{limiters}"), lines);
        }
        for (file, title, metric) in [
            ("gossip", "Gossip, of the limit", OVERHEAD),
            ("jain", "Jain's index of the flows", JAIN),
        ] {
            ctx.bars(file, BarsOf { title, metric, points: None });
        }
        let members = match (self.tiny, ctx.quick) {
            (true, _) => 100,
            (_, true) => 1_000,
            _ => 10_000,
        };
        ctx.step(format!("{members} members of share"));
        let breach = crowd(ctx, members);
        claims(ctx, *sizes.last().unwrap_or(&LIMITERS), members, breach.as_deref());
        Ok(())
    }
}

/// One run of figure 8; its rate over time, if it is the first. What passes ten times the limit would hide
/// all others in a figure, and is left out of it.
fn figure_8(
    ctx: &mut Context,
    setup: Setup,
    limiters: usize,
    size: Size,
    run: u32,
) -> Option<Series> {
    let flows = (FLOWS * limiters).div_ceil(LIMITERS);
    let simulated = simulation::run(world(setup, limiters, flows, size, run));
    let passed = &simulated.forwarded;
    let total = passed.mean_bit_s(None, size.from);
    let beside = published::figure_8(setup.name, limiters);
    let case = case(limiters);
    let mut record = ctx
        .record(setup, &case, run)
        .beside(TOTAL, total, beside.map(|(bit_s, _)| bit_s))
        .value(OVERHEAD, simulated.overhead_percent)
        .value(DROPS, simulated.drops_percent);
    if let Some(jain) = passed.jain(size.from) {
        record = record.beside(JAIN, jain, beside.map(|(_, jain)| jain));
    }
    if let Some((least, most)) = passed.extremes_percent(size.from, SECOND) {
        record = record.value(LEAST, least).value(MOST, most);
    }
    if let Some((_, peak)) = passed.extremes_percent(Duration::ZERO, SECOND) {
        record = record.value("peak_from_start_percent", peak);
    }
    drop(record);
    let fits = total < 2.0 * LIMIT_BIT_S as f64;
    (run == 1 && fits).then(|| {
        let mut series = passed.series(setup.name, None, SECOND);
        series.points.retain(|(time_s, _)| *time_s > size.from.as_secs_f64());
        series
    })
}

fn case(limiters: usize) -> Case {
    Case::new().with("limiters", limiters).with("limit_bit_s", LIMIT_BIT_S)
}

fn world(setup: Setup, limiters: usize, flows: usize, size: Size, run: u32) -> WorldOptions {
    let seed = u64::from(run);
    let mut options = WorldOptions::baseline(seed, setup.scheme, nanos(size.lasts));
    let mut share = share_options(3.min(limiters), limiters as u32);
    if let Some(limit) = Rate::from_bit_s(LIMIT_BIT_S) {
        (options.limit, share.limit) = (limit, limit);
    }
    (share.interval, share.lease, share.suspect) = (nanos(ASKS), nanos(LEASE), nanos(LEASE));
    options.share = share;
    options.hosts = limiters;
    options.interval = nanos(setup.interval);
    options.branches = setup.peers;
    options.push_sum = setup.push_sum;
    options.flows.clear();
    let mut random = Random::new(seed);
    for flow in 0..flows {
        let limiter = if flow < limiters { flow } else { random.below(limiters as u64) as usize };
        options.add_flows(limiter, 1, random.time(nanos(SECOND)));
    }
    options
}

/// Members of `share` without packets, told what they want: a tenth is killed after 10 s. What broke the
/// limit, if anything did.
fn crowd(ctx: &mut Context, members: usize) -> Option<String> {
    const WANTS_BIT_S: u64 = 1_000_000;
    let mut share = share_options(5, members as u32);
    let limit_bit_s = WANTS_BIT_S * members as u64;
    if let Some(limit) = Rate::from_bit_s(limit_bit_s) {
        share.limit = limit;
    }
    (share.interval, share.lease) = (nanos(SECOND), nanos(SECOND * 4));
    share.suspect = share.lease;
    let net = NetOptions { loss: 0.01, duplicate: 0.01, ..NetOptions::default() };
    let mut fleet = Fleet::new(FleetOptions { seed: 1, members, net, share });
    for member in 0..members {
        let flows = fleet.random().below(10) as f32;
        fleet.set_want(member, Want { flows, demand_bit_s: u64::MAX });
    }
    for second in 1..=25_u64 {
        fleet.run_until(nanos(SECOND * second as u32));
        if [2, 5, 10, 15, 20, 25].contains(&second) {
            let case = Case::new()
                .with("limiters", members)
                .with("limit_bit_s", limit_bit_s)
                .with("second", second);
            let percent = fleet.in_use() as f64 / limit_bit_s as f64 * 100.0;
            ctx.record(SHARE, &case, 1).value(IN_USE, percent);
        }
        if second == 10 {
            (0..members / 10).for_each(|tenth| fleet.kill(tenth * 10 + 9));
        }
    }
    let (bytes, _) = fleet.sent();
    let percent = bytes as f64 * 8e9 / fleet.now().0 as f64 / limit_bit_s as f64 * 100.0;
    let case = Case::new().with("limiters", members).with("limit_bit_s", limit_bit_s);
    ctx.record(SHARE, &case, 1).value(OVERHEAD, percent);
    let breach = fleet.breach()?;
    Some(format!("{} bit/s after {} ms", breach.sum_bit_s, breach.at.0 / 1_000_000))
}

/// What is claimed of the largest of figure 8, and of the members without packets.
fn claims(ctx: &mut Context, limiters: usize, members: usize, breach: Option<&str>) {
    let case = case(limiters);
    let all = |ctx: &Context, system: &str, metric| {
        stats::range(&ctx.values(system, metric, Some(&case))).unwrap_or((f64::NAN, f64::NAN))
    };
    for system in [SHARE, "fps, 3 peers"] {
        let (_, cost) = all(ctx, system, OVERHEAD);
        ctx.claim(
            format!("{system}: gossip of {limiters} limiters costs less than 3 % of the limit"),
            cost < CHEAP_PERCENT,
            format!("{cost:.2} %"),
        );
        let (_, most) = all(ctx, system, MOST);
        ctx.claim(
            format!("{system}: never above 102 % of the limit over 1 s, with {limiters} limiters"),
            most <= 102.0,
            format!("{most:.1} %"),
        );
        let (least, _) = all(ctx, system, LEAST);
        ctx.claim(
            format!("{system}: at least 98 % of the limit in any second, with {limiters} limiters"),
            least >= 98.0,
            format!("{least:.1} %"),
        );
    }
    let total =
        |ctx: &Context, system| ctx.median(system, TOTAL, Some(&case)).unwrap_or(f64::NAN) / 1e6;
    let [one, three, seven] =
        ["fps, 1 peer", "fps, 3 peers", "fps, 7 peers"].map(|system| total(ctx, system));
    let near = |rate: f64| (rate / seven - 1.0).abs() <= 0.01;
    ctx.claim(
        format!(
            "fps: to tell one peer or three does as well as to tell seven, with {limiters} limiters"
        ),
        near(one) && near(three),
        format!("{one:.2}, {three:.2} and {seven:.2} Mbit/s"),
    );
    let [once, thrice] = ["fps-sum, 1 peer", "fps-sum, 3 peers"].map(|system| total(ctx, system));
    ctx.claim(
        format!(
            "fps by push-sum, as published, holds the limit within 5 %, with {limiters} limiters"
        ),
        [once, thrice].iter().all(|rate| rate * 1e6 <= 1.05 * LIMIT_BIT_S as f64),
        format!("{once:.2} Mbit/s with one peer, {thrice:.2} with three"),
    );
    let at_end = |second: u64| {
        let wanted = |row: &&crate::report::Row| {
            row.metric == IN_USE && row.case.0.get("second") == Some(&second.into())
        };
        ctx.rows().iter().find(wanted).map_or(f64::NAN, |row| row.value)
    };
    let (before, after) = (at_end(10), at_end(25));
    ctx.claim(
        format!(
            "share: {members} members use 98 % of the limit, also 15 s after a tenth was killed"
        ),
        before >= 98.0 && after >= 98.0,
        format!("{before:.1} % before, {after:.1} % after"),
    );
    ctx.claim(
        format!("share: the local limits of {members} members never add up to more than the limit"),
        breach.is_none(),
        breach.map_or("never".to_owned(), str::to_owned),
    );
}
