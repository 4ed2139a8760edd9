//! What is claimed of `pace`, and every case in which it does not hold.

use super::{DEMAND, JAIN, MOST, Settling, USED};
use crate::{
    context::Context,
    report::{Case, distinct},
    stats,
};

const PACE: &str = "pace";

/// Joins and leaves of a run.
type Settled = (Case, Vec<Settling>, Vec<Settling>);

/// Records every claim, as far as its cases were run.
pub(super) fn record(ctx: &mut Context, settlings: &[Settled]) {
    bound(
        ctx,
        ("Jain's index of greedy flows is at least 0.99 in any second after their first", JAIN),
        3,
        |index| index >= 0.99,
    );
    settle(
        ctx,
        "a newcomer has 90 % of its share within 10 round trips or 20 ms, whichever is longer",
        settlings.iter().map(|(case, joins, _)| (case, joins)),
    );
    settle(
        ctx,
        "a leaver's share is used again within 10 round trips of those that stay, or 20 ms",
        settlings.iter().map(|(case, _, leaves)| (case, leaves)),
    );
    bound(ctx, ("never above 101 % of the limit over 1 s", MOST), 1, |percent| percent <= 101.0);
    bound(ctx, ("at least 97 % of the limit is used", USED), 1, |percent| percent >= 97.0);
    bound(ctx, ("a flow that wants less than its share has what it wants", DEMAND), 1, |percent| {
        percent >= 99.0
    });
}

/// One claim on a metric of each case.
fn bound(
    ctx: &mut Context,
    (sentence, metric): (&str, &str),
    digits: usize,
    holds: fn(f64) -> bool,
) {
    let cases = distinct(ctx.rows().iter().map(|row| row.case.clone()));
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for case in &cases {
        for value in ctx.values(PACE, metric, Some(case)) {
            all.push(value);
            if !holds(value) {
                failed.push(format!("{value:.digits$} with {}", in_words(case)));
            }
        }
    }
    let Some((least, most)) = stats::range(&all) else { return };
    let measured = format!("{least:.digits$} to {most:.digits$}{}", but(&failed));
    ctx.claim(format!("pace: {sentence}"), failed.is_empty(), measured);
}

/// One claim on the times of each run.
fn settle<'a>(
    ctx: &mut Context,
    sentence: &str,
    runs: impl Iterator<Item = (&'a Case, &'a Vec<Settling>)>,
) {
    let (mut took_ms, mut failed) = (Vec::new(), Vec::new());
    for (case, settlings) in runs {
        for settling in settlings {
            let ms = settling.took.map(|took| took.as_secs_f64() * 1e3);
            took_ms.extend(ms);
            if !settling.holds() {
                let took = ms.map_or("never".to_owned(), |ms| format!("{ms:.0} ms"));
                let within = settling.within.as_millis();
                failed.push(format!("{took} of {within} ms with {}", in_words(case)));
            }
        }
    }
    let Some((least, most)) = stats::range(&took_ms) else { return };
    let runs = took_ms.len();
    let measured = format!("{least:.0} to {most:.0} ms in {runs} cases{}", but(&failed));
    ctx.claim(format!("pace: {sentence}"), failed.is_empty(), measured);
}

fn but(failed: &[String]) -> String {
    match failed {
        [] => String::new(),
        failed => format!("; not in {}: {}", failed.len(), failed.join("; ")),
    }
}

/// `staircase, 5 flows at 1 Gbit/s`.
fn in_words(case: &Case) -> String {
    let scenario = case.0.get("scenario").and_then(|name| name.as_str()).unwrap_or_default();
    format!("{scenario}, {}", super::super::case_in_words(case))
}
