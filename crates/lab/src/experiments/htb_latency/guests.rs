//! The cases of guests: what a limit on a guest's port costs in latency, where the host routes the guest's
//! packets and where it bridges them ([`shapers`](crate::experiments::shapers)).
//!
//! The systems run in turn, after each round's look at the path without limit and load. Guests run CUBIC;
//! `dem` needs senders that asked for ECN and gets DCTCP. Limits of 1, 2 and 4 Gbit/s under 1 and 8 flows, as
//! far as the machine carries them that way without a limit.

use std::{fmt, path::PathBuf, time::Duration};

use super::{GBIT, HTB_TIMES_LEAST, carried};
use crate::{
    chart::{BarsOf, Cdf, Series},
    context::Context,
    experiments::{
        bed::Control,
        case_in_words,
        guest::{ABOVE, P50, Rounds, Transfer, WIRE},
        policers::Road,
        shapers::Shaper,
        tally::Tally,
    },
    report::{Case, distinct},
    stop::Skip,
};

const LIMITS: [u64; 3] = [GBIT, 2 * GBIT, 4 * GBIT];
const FLOWS: [u32; 2] = [1, 8];
/// Each under the congestion control that it is made for.
const SHAPERS: [(Shaper, &str); 7] = [
    (Shaper::Idle, super::CONTROL),
    (Shaper::Unlimited, super::CONTROL),
    (Shaper::Htb, super::CONTROL),
    (Shaper::TidegateHtb, super::CONTROL),
    (Shaper::Dem, "dctcp"),
    (Shaper::Spring, super::CONTROL),
    (Shaper::Police, super::CONTROL),
];
/// What a case says of the guest's way.
const GUEST: &str = "guest";

/// The claims, of the limit on the wire and of the median above the idle path.
const WIRE_LEAST_PERCENT: f64 = 95.5;
const ABOVE_MOST_US: f64 = 100.0;
/// What the two ways may differ by, of the limit.
const WAYS_MOST_PERCENT: f64 = 2.0;

/// What the host does with a guest's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Routed,
    Bridged,
}

impl Way {
    const ALL: [Way; 2] = [Way::Routed, Way::Bridged];

    fn road(self, ctx: &Context, lab_binary: Option<PathBuf>) -> anyhow::Result<Road> {
        let link = ctx.usual_link();
        let road = match self {
            Way::Routed => Road::new(lab_binary, link.into_iter().collect()),
            Way::Bridged => Road::bridged(lab_binary, link),
        }?;
        // A guest gives its host segments of up to 64 KB.
        road.cut(false)?;
        Ok(road)
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Way::Routed => "routed",
            Way::Bridged => "bridged",
        })
    }
}

/// How much of it is measured.
struct Plan {
    flows: Vec<u32>,
    limits: Vec<u64>,
    duration: Duration,
}

impl Plan {
    fn new(tiny: bool, quick: bool) -> Plan {
        let few = tiny || quick;
        Plan {
            flows: if tiny { vec![2] } else { FLOWS.into() },
            limits: if few { vec![GBIT] } else { LIMITS.into() },
            duration: Duration::from_secs(if few { 2 } else { 3 }),
        }
    }
}

/// A system in a case, for progress and notes.
struct Turn {
    at: String,
    shaper: Shaper,
    cc: &'static str,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.shaper)
    }
}

/// Measures, draws and judges all cases. What the machine cannot carry costs a note.
pub(super) fn run(
    ctx: &mut Context,
    lab_binary: Option<PathBuf>,
    control: &Control,
) -> anyhow::Result<()> {
    let plan = Plan::new(lab_binary.is_some(), ctx.quick);
    ctx.note(
        "Cases with a `guest` are of a limit on its port. `htb` is set up by `tc` on the device by which its \
         packets leave the host, all else is on the port. Guests run CUBIC, under `dem` DCTCP. `above idle \
         p50` is how much longer the median round trip of the probe is than on the path without limit and \
         load, in the same round; `wire` is whole frames behind the limit, from one second on.",
    );
    let mut curves = Vec::new();
    for way in Way::ALL {
        let mut road = way.road(ctx, lab_binary.clone())?;
        let words = format!(" of a guest that is {way}");
        let limits = match carried(ctx, &road.testbed, control, (&words, &plan.limits)) {
            Ok(limits) => limits,
            Err(error) if error.is::<Skip>() => {
                ctx.note(format!("no limit on a guest that is {way}: {error:#}"));
                continue;
            }
            Err(error) => return Err(error),
        };
        for &limit_bit_s in &limits {
            for &flows in &plan.flows {
                let cell = Cell { way, flows, limit_bit_s, duration: plan.duration };
                curves.extend(cell.measure(ctx, &mut road)?);
            }
        }
    }
    figures(ctx, &curves);
    claims(ctx);
    Ok(())
}

struct Cell {
    way: Way,
    flows: u32,
    limit_bit_s: u64,
    duration: Duration,
}

/// The round trips of the first run of a system in a case.
struct Curve {
    case: Case,
    system: &'static str,
    /// (microseconds, share of the probes that took no longer).
    cdf: Vec<(f64, f64)>,
}

impl Cell {
    fn measure(&self, ctx: &mut Context, road: &mut Road) -> anyhow::Result<Vec<Curve>> {
        let &Cell { way, flows, limit_bit_s, duration } = self;
        let case = Case::new()
            .with(GUEST, way.to_string())
            .with("flows", flows)
            .with("limit_bit_s", limit_bit_s)
            .with_link(ctx.usual_link());
        let at = words(&case);
        let turns = SHAPERS.map(|(shaper, cc)| Turn { at: at.clone(), shaper, cc });
        let (mut rounds, mut curves) = (Rounds::new(ctx.links.way.is_some()), Vec::new());
        ctx.alternate(&turns, ctx.repeats, |ctx, &Turn { shaper, cc, .. }, run| {
            let control = Control::get(cc)?;
            let transfer = Transfer { shaper, limit_bit_s, flows, control: &control, duration };
            let seen = rounds.run(ctx, road, &transfer, &case, run)?;
            if run == 1 {
                let (system, cdf) = (shaper.name(), seen.probe.rtt_cdf_us);
                curves.push(Curve { case: case.clone(), system, cdf });
            }
            Ok(())
        })?;
        Ok(curves)
    }
}

/// `1 flow at 1 Gbit/s of a guest that is routed`.
fn words(case: &Case) -> String {
    let way = case.0.get(GUEST).and_then(|way| way.as_str()).unwrap_or_default();
    format!("{} of a guest that is {way}", case_in_words(case))
}

fn figures(ctx: &mut Context, curves: &[Curve]) {
    for (at, curves) in curves.chunk_by(|curve, next| curve.case == next.case).enumerate() {
        let Some(first) = curves.first() else { continue };
        let series = curves.iter().map(|curve| Series::new(curve.system, curve.cdf.clone()));
        ctx.figure(
            &format!("rtt-guest-{}", at + 1),
            Cdf {
                title: format!("Round trips, {}", words(&first.case)),
                metric: "rtt_us".to_owned(),
                series: series.collect(),
            },
        );
    }
    let title = "On the wire (bars) and median round trip (diamonds), a guest's port";
    ctx.bars("guest-wire-and-rtt", BarsOf { title, metric: WIRE, points: Some(P50) });
}

fn claims(ctx: &mut Context) {
    let all = distinct(ctx.rows().iter().map(|row| &row.case)).into_iter();
    let cases: Vec<Case> = all.filter(|case| case.0.contains_key(GUEST)).cloned().collect();
    let limit = |case: &Case| case.0.get("limit_bit_s").and_then(|limit| limit.as_f64());
    let of = |ctx: &Context, system: &str, metric: &str, case: &Case| {
        ctx.median(system, metric, Some(case))
    };
    for system in ["dem", "spring"] {
        let mut goal = Tally::default();
        for case in &cases {
            let seen = (limit(case), of(ctx, system, WIRE, case), of(ctx, system, ABOVE, case));
            let (Some(limit), Some(wire), Some(us)) = seen else { continue };
            let percent = wire / limit * 100.0;
            let holds = percent >= WIRE_LEAST_PERCENT && us <= ABOVE_MOST_US;
            goal.add(holds, format!("{} ({percent:.1} %, {us:.0} µs)", words(case)));
        }
        goal.claim(
            ctx,
            format!(
                "{system} on a guest's port: at least {WIRE_LEAST_PERCENT} % of the limit on the wire, \
                 median at most {ABOVE_MOST_US} µs above the idle path"
            ),
        );
    }
    for system in ["htb", "tidegate-htb"] {
        let mut times = Tally::default();
        for (told, case) in
            ["dem", "spring"].iter().flat_map(|told| cases.iter().map(move |c| (told, c)))
        {
            let above = (of(ctx, system, ABOVE, case), of(ctx, told, ABOVE, case));
            let (Some(htb), Some(us)) = above else { continue };
            let ratio = htb / us.max(1.0);
            times.add(ratio >= HTB_TIMES_LEAST, format!("{told}, {} ({ratio:.0}x)", words(case)));
        }
        times.claim(
            ctx,
            format!(
                "{system} on a guest's way: median at least {HTB_TIMES_LEAST}x as far above the idle path as \
                 with dem and spring"
            ),
        );
    }
    let mut police = Tally::default();
    for case in &cases {
        let Some(us) = of(ctx, "police", ABOVE, case) else { continue };
        police.add(us <= ABOVE_MOST_US, format!("{} ({us:.0} µs)", words(case)));
    }
    police.claim(
        ctx,
        format!("police on a guest's port: median at most {ABOVE_MOST_US} µs above the idle path"),
    );
    same_both_ways(ctx, &cases);
}

/// A bridged guest has what a routed one has.
fn same_both_ways(ctx: &mut Context, cases: &[Case]) {
    let mut same = Tally::default();
    for system in ["htb", "tidegate-htb", "dem", "spring"] {
        for case in cases.iter().filter(|case| case.0[GUEST] == "routed") {
            let bridged = Case(case.0.clone()).with(GUEST, "bridged");
            let wire = |case| ctx.median(system, WIRE, Some(case));
            let limit = case.0.get("limit_bit_s").and_then(|limit| limit.as_f64());
            let (Some(limit), Some(one), Some(other)) = (limit, wire(case), wire(&bridged)) else {
                continue;
            };
            let percent = (one - other) / limit * 100.0;
            same.add(
                percent.abs() <= WAYS_MOST_PERCENT,
                format!("{system}, {} ({percent:+.1} %)", case_in_words(case)),
            );
        }
    }
    same.claim(
        ctx,
        format!(
            "htb, tidegate-htb, dem and spring: a bridged guest has the rate of a routed one, within \
             {WAYS_MOST_PERCENT} % of the limit"
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_without_load_comes_first() {
        assert_eq!(SHAPERS[0].0, Shaper::Idle);
        assert!(SHAPERS[1..].iter().all(|(shaper, _)| *shaper != Shaper::Idle));
    }

    #[test]
    fn the_short_plan_is_a_part_of_the_full_one() {
        let (quick, full) = (Plan::new(false, true), Plan::new(false, false));
        assert_eq!((quick.limits, full.limits), (vec![GBIT], LIMITS.to_vec()));
        assert_eq!(quick.flows, full.flows);
    }

    #[test]
    fn a_case_says_the_way() {
        let case = Case::new().with(GUEST, "bridged").with("flows", 8).with("limit_bit_s", GBIT);
        assert_eq!(words(&case), "8 flows at 1 Gbit/s of a guest that is bridged");
    }
}
