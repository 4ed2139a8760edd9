//! What is claimed of `police` and of `tidegate burst analyze` under the article's traffic.

use super::{BURSTY, DEPTH, GOODPUT, LAW, LIMIT_BIT_S, PUBLISHED, RATE, SMOOTH, USED};
use crate::{
    context::Context,
    report::{Case, distinct},
};

/// What we ask of ourselves, in percent: of the limit under a smooth source, of the law under any, and of
/// what was set.
const SMOOTH_LEAST: f64 = 99.0;
const LAW_WITHIN: f64 = 2.0;
const RATE_WITHIN: f64 = 2.0;
const DEPTH_WITHIN: f64 = 10.0;
/// Of the article's own figures: its bursts took some 1.4 ms longer than those of a gigabit line, which is a
/// tenth of what passes of the shortest.
const ARTICLE_WITHIN: f64 = 15.0;
const SMALL_WITHIN: f64 = 5.0;
/// Juniper's lower limit; less is a matter of single packets.
const TEN_PACKETS: u64 = 15_000;
const POLICE: &str = "police";

/// One figure of a claim, and whether it is as claimed.
struct Figure {
    says: String,
    holds: bool,
}

/// Records every claim, as far as its cases were run.
pub(super) fn record(ctx: &mut Context) {
    let cases: Vec<Case> = distinct(ctx.rows().iter().map(|row| row.case.clone()));
    let of = |ctx: &Context, system: &str, metric: &str, case: &Case| {
        ctx.median(system, metric, Some(case))
    };
    let smooth = cases.iter().filter(|case| is(case, SMOOTH) && bucket(case) >= TEN_PACKETS);
    let figures = smooth.filter_map(|case| {
        let used = of(ctx, POLICE, USED, case)?;
        Some(Figure { says: format!("{used:.2} %{}", at(case)), holds: used >= SMOOTH_LEAST })
    });
    let figures: Vec<Figure> = figures.collect();
    let claim = format!("police, a smooth source: {SMOOTH_LEAST} % of the limit from 15 kB up");
    say(ctx, claim, &figures);

    let by_law = |ctx: &Context, source: &str, small: bool, within: f64| -> Vec<Figure> {
        let here = |case: &&Case| is(case, source) && (bucket(case) < TEN_PACKETS) == small;
        let figures = cases.iter().filter(here).filter_map(|case| {
            let (used, law) = (of(ctx, POLICE, USED, case)?, of(ctx, LAW, USED, case)?);
            let off = (used / law - 1.0) * 100.0;
            let says = format!("{used:.1} % of the limit, {off:+.2} %{}", at(case));
            Some(Figure { says, holds: off.abs() <= within })
        });
        figures.collect()
    };
    let kinds = [
        (BURSTY, false, LAW_WITHIN, "each bucket from 15 kB up"),
        (SMOOTH, false, LAW_WITHIN, "each bucket from 15 kB up"),
        // A bucket that a datagram half a millisecond late makes a datagram poorer.
        (SMOOTH, true, SMALL_WITHIN, "buckets of one frame and of two"),
    ];
    for (source, small, within, which) in kinds {
        let figures = by_law(ctx, source, small, within);
        let claim = format!(
            "police, a {source} source: within {within} % of the token bucket's law at {which}"
        );
        say(ctx, claim, &figures);
    }

    let article = PUBLISHED.iter().filter_map(|(bytes, published)| {
        let case = cases.iter().find(|case| is(case, BURSTY) && bucket(case) == *bytes)?;
        let off = (of(ctx, POLICE, GOODPUT, case)? / published - 1.0) * 100.0;
        let says = format!("{off:+.1} %{}", at(case));
        Some(Figure { says, holds: off.abs() <= ARTICLE_WITHIN })
    });
    let article: Vec<Figure> = article.collect();
    let claim =
        format!("police, a bursty source: within {ARTICLE_WITHIN} % of the article's figures");
    say(ctx, claim, &article);

    for (what, metric, within) in [("rate", RATE, RATE_WITHIN), ("depth", DEPTH, DEPTH_WITHIN)] {
        // A bucket of two or three packets lets them out as evenly as a shaper does.
        let deep = cases.iter().filter(|case| bucket(case) >= TEN_PACKETS);
        let figures = deep.filter_map(|case| {
            of(ctx, POLICE, USED, case)?;
            let set = if metric == RATE { LIMIT_BIT_S as f64 } else { bucket(case) as f64 };
            let source = if is(case, BURSTY) { ", bursty" } else { ", smooth" };
            let Some(found) = of(ctx, POLICE, metric, case) else {
                let says = format!("no policer seen{}{source}", at(case));
                return Some(Figure { says, holds: false });
            };
            let off = (found / set - 1.0) * 100.0;
            let says = format!("{off:+.2} %{}{source}", at(case));
            Some(Figure { says, holds: off.abs() <= within })
        });
        let figures: Vec<Figure> = figures.collect();
        let claim =
            format!("burst analyze finds the {what} of police within {within} % from 15 kB up");
        say(ctx, claim, &figures);
    }
}

/// Records a claim, if anything was measured for it.
fn say(ctx: &mut Context, claim: String, figures: &[Figure]) {
    if figures.is_empty() {
        return;
    }
    let holds = figures.iter().all(|figure| figure.holds);
    let says: Vec<&str> = figures.iter().map(|figure| figure.says.as_str()).collect();
    ctx.claim(claim, holds, says.join("; "));
}

fn is(case: &Case, source: &str) -> bool {
    case.0.get("source").is_some_and(|value| *value == source)
}

fn bucket(case: &Case) -> u64 {
    case.0.get("bucket_bytes").and_then(|value| value.as_u64()).unwrap_or(0)
}

/// ` at 15 kB`.
fn at(case: &Case) -> String {
    format!(" at {} kB", bucket(case) as f64 / 1e3)
}
