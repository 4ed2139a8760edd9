//! What is claimed of low latency, as far as its cases were run.

use serde_json::Value;

use super::plan::GBIT;
use crate::{
    context::Context,
    experiments::{
        case_in_words,
        guest::{ABOVE, JAIN, P50, VARIATION, WIRE},
        tally::Tally,
    },
    report::{Case, distinct},
};

/// What we ask of ourselves: for each limit the least on the wire and the most above the idle path.
const GOALS: [(u64, f64, f64); 2] = [(GBIT, 955e6, 100.0), (2 * GBIT, 1.91e9, 80.0)];
const HTB_TIMES_LEAST: f64 = 10.0;
const VARIATION_MOST: f64 = 2.0;
const JAIN_LEAST: f64 = 0.95;
/// By how much SPRING without ECN may be worse than DEM with it: of the limit, and in the median.
const WORSE_PERCENT: f64 = 1.0;
const WORSE_US: f64 = 20.0;

/// A system in a case.
struct Seen {
    system: String,
    case: Case,
    limit_bit_s: u64,
    ecn: bool,
    far: bool,
}

impl Seen {
    fn all(ctx: &Context) -> Vec<Seen> {
        let pairs = ctx.rows().iter().filter(|row| row.case.0.contains_key("cc"));
        distinct(pairs.map(|row| (row.system.clone(), row.case.clone())))
            .into_iter()
            .map(|(system, case)| {
                let cc = case.0.get("cc").and_then(Value::as_str).unwrap_or("");
                let limit = case.0.get("limit_bit_s").and_then(Value::as_u64);
                Seen {
                    ecn: cc == "dctcp" || cc.ends_with("+ecn"),
                    far: case.0.contains_key("rtt_us"),
                    limit_bit_s: limit.unwrap_or(0),
                    system,
                    case,
                }
            })
            .collect()
    }

    fn median(&self, ctx: &Context, metric: &str) -> Option<f64> {
        ctx.median(&self.system, metric, Some(&self.case))
    }

    /// The case without the congestion control.
    fn place(&self) -> Case {
        let mut case = self.case.clone();
        case.0.remove("cc");
        case
    }

    fn is_told(&self) -> bool {
        self.system == "spring" || self.system == "dem" && self.ecn
    }
}

/// Records every claim.
pub(super) fn record(ctx: &mut Context) {
    let all = Seen::all(ctx);
    for (limit_bit_s, least, most_us) in GOALS {
        for system in ["dem", "spring"] {
            for far in [false, true] {
                goal(ctx, &all, (system, far), (limit_bit_s, least, most_us));
            }
        }
    }
    let mut htb = Tally::default();
    let mut even = Tally::default();
    let mut fair = Tally::default();
    for seen in all.iter().filter(|seen| seen.is_told()) {
        let words = format!("{}, {}", seen.system, case_in_words(&seen.case));
        let of_htb = all.iter().find(|one| one.system == "htb" && one.place() == seen.place());
        let above = (of_htb.and_then(|htb| htb.median(ctx, ABOVE)), seen.median(ctx, ABOVE));
        if let (Some(htb_us), Some(us)) = above {
            let times = htb_us / us.max(1.0);
            htb.add(times >= HTB_TIMES_LEAST, format!("{words} ({times:.0}x)"));
        }
        if let Some(percent) = seen.median(ctx, VARIATION) {
            even.add(percent <= VARIATION_MOST, format!("{words} ({percent:.1} %)"));
        }
        if let Some(index) = seen.median(ctx, JAIN) {
            fair.add(index >= JAIN_LEAST, format!("{words} ({index:.3})"));
        }
    }
    htb.claim(
        ctx,
        format!("htb: at least {HTB_TIMES_LEAST}x as far above the idle path as dem and spring"),
    );
    even.claim(
        ctx,
        format!("dem and spring: variation of the rate over 100 ms at most {VARIATION_MOST} %"),
    );
    fair.claim(ctx, format!("dem and spring: Jain's index of {JAIN_LEAST} or more"));
    as_good(ctx, &all);
}

/// The rate and the latency of a system under a limit, on the path of the machine or on links.
fn goal(
    ctx: &mut Context,
    all: &[Seen],
    (system, far): (&str, bool),
    (limit_bit_s, least, most_us): (u64, f64, f64),
) {
    let here = |seen: &&Seen| {
        seen.system == system
            && seen.limit_bit_s == limit_bit_s
            && seen.far == far
            && seen.is_told()
    };
    let mut tally = Tally::default();
    for seen in all.iter().filter(here) {
        let (Some(wire), Some(us)) = (seen.median(ctx, WIRE), seen.median(ctx, ABOVE)) else {
            continue;
        };
        let holds = wire >= least && us <= most_us;
        let words = case_in_words(&seen.case);
        tally.add(holds, format!("{words} ({:.0} Mbit/s, {us:.0} µs)", wire / 1e6));
    }
    let flows = if system == "dem" { ", ECN" } else { "" };
    let path = if far { ", over links of 0.1 to 10 ms" } else { "" };
    let claim = format!(
        "{system}{flows}, {} Gbit/s{path}: at least {:.0} Mbit/s on the wire, median at most {most_us} µs \
         above the idle path",
        limit_bit_s / GBIT,
        least / 1e6
    );
    tally.claim(ctx, claim);
}

/// SPRING without ECN against DEM under DCTCP.
fn as_good(ctx: &mut Context, all: &[Seen]) {
    let mut tally = Tally::default();
    for seen in all.iter().filter(|seen| seen.system == "spring" && !seen.ecn) {
        let is_peer = |one: &&Seen| {
            let dctcp = one.case.0.get("cc").is_some_and(|cc| *cc == "dctcp");
            one.system == "dem" && dctcp && one.place() == seen.place()
        };
        let Some(dem) = all.iter().find(is_peer) else { continue };
        let of = |seen: &Seen| Some((seen.median(ctx, WIRE)?, seen.median(ctx, P50)?));
        let (Some((wire, us)), Some((dem_wire, dem_us))) = (of(seen), of(dem)) else { continue };
        let room = seen.limit_bit_s as f64 / 100.0 * WORSE_PERCENT;
        tally.add(
            wire >= dem_wire - room && us <= dem_us + WORSE_US,
            format!(
                "{} ({:.0} Mbit/s and {us:.0} µs, dem {:.0} and {dem_us:.0})",
                case_in_words(&seen.case),
                wire / 1e6,
                dem_wire / 1e6
            ),
        );
    }
    tally.claim(
        ctx,
        format!(
            "spring without ECN as good as dem under DCTCP: within {WORSE_PERCENT} % of the limit and \
             {WORSE_US} µs of the median, or better"
        ),
    );
}
