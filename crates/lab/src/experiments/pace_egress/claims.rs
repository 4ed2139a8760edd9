//! What is claimed of `pace`, and every case in which it does not hold.

use super::{super::bed::IDLE, CALLS_MOST, CALLS_USED, CPU, SYSTEMS, case_in_words};
use crate::{
    context::Context,
    report::{Case, distinct},
    stats,
    systems::System,
};

const PACE: &str = "pace";
/// Above the idle path.
const P50_MOST_US: f64 = 20.0;
const P99_MOST_US: f64 = 200.0;

/// A claim on one metric of each case: what it is called, and what it must be.
struct Bound {
    sentence: &'static str,
    metric: &'static str,
    unit: &'static str,
    holds: fn(f64) -> bool,
}

const BOUNDS: [Bound; 6] = [
    Bound {
        sentence: "greedy flows use at least 99 % of the limit on the wire",
        metric: "used_percent",
        unit: " %",
        holds: |used| used >= 99.0,
    },
    Bound {
        sentence: "calls use at least 99 % of the limit on the wire",
        metric: CALLS_USED,
        unit: " %",
        holds: |used| used >= 99.0,
    },
    Bound {
        sentence: "greedy flows are never above 101 % over 1 s",
        metric: "max_1s_percent",
        unit: " %",
        holds: |most| most <= 101.0,
    },
    Bound {
        sentence: "calls are never above 101 % over 1 s",
        metric: CALLS_MOST,
        unit: " %",
        holds: |most| most <= 101.0,
    },
    Bound {
        sentence: "greedy flows retransmit nothing",
        metric: "retransmits",
        unit: "",
        holds: |count| count == 0.0,
    },
    Bound {
        sentence: "calls retransmit nothing",
        metric: "calls_retransmits",
        unit: "",
        holds: |count| count == 0.0,
    },
];

/// Records every claim, as far as its cases were run.
pub(super) fn record(ctx: &mut Context) {
    let cases = distinct(ctx.rows().iter().map(|row| row.case.clone()));
    for Bound { sentence, metric, unit, holds } in BOUNDS {
        let verdicts = cases.iter().flat_map(|case| {
            let values = ctx.values(PACE, metric, Some(case));
            values.into_iter().map(move |value| Verdict {
                value,
                holds: holds(value),
                text: format!("{value:.1}{unit} with {}", case_in_words(case)),
            })
        });
        let verdicts: Vec<Verdict> = verdicts.collect();
        judge(ctx, sentence, unit, &verdicts);
    }
    above_idle(ctx, &cases, ("rtt_p50_us", "p50", P50_MOST_US));
    above_idle(ctx, &cases, ("rtt_p99_us", "p99", P99_MOST_US));
    let others = || SYSTEMS.into_iter().filter(|system| *system != System::Pace);
    for (metric, what) in [("rpc_10kb_p99_us", "10 KB"), ("rpc_1mb_p99_us", "1 MB")] {
        let verdicts = against(ctx, &cases, metric, others().map(System::name), 1.0);
        judge(
            ctx,
            &format!("p99 of {what} calls no worse than the best of the others"),
            " times",
            &verdicts,
        );
    }
    let htb = against(ctx, &cases, CPU, ["htb"].into_iter(), 1e3);
    judge(ctx, "greedy flows cost no more CPU time a Gbit than with htb", " times", &htb);
}

/// One case or run of a claim.
struct Verdict {
    value: f64,
    holds: bool,
    text: String,
}

/// Records a claim: the range of what was measured, and all that breaks it.
fn judge(ctx: &mut Context, sentence: &str, unit: &str, verdicts: &[Verdict]) {
    let values: Vec<f64> = verdicts.iter().map(|verdict| verdict.value).collect();
    let Some((least, most)) = stats::range(&values) else { return };
    let digits = if unit == " times" { 2 } else { 1 };
    let mut text = format!("{least:.digits$} to {most:.digits$}{unit} in {} cases", values.len());
    let failed: Vec<&str> = verdicts
        .iter()
        .filter(|verdict| !verdict.holds)
        .map(|verdict| verdict.text.as_str())
        .collect();
    if !failed.is_empty() {
        text += &format!("; not in {}: {}", failed.len(), failed.join("; "));
    }
    ctx.claim(format!("pace: {sentence}"), failed.is_empty(), text);
}

/// The probe beside the idle path of this run.
fn above_idle(ctx: &mut Context, cases: &[Case], (metric, quantile, most_us): (&str, &str, f64)) {
    let Some(idle_us) = ctx.median(IDLE, metric, None) else { return };
    let verdicts: Vec<Verdict> = cases
        .iter()
        .filter_map(|case| {
            let us = ctx.median(PACE, metric, Some(case))?;
            let lost = ctx.median(PACE, "probes_lost_percent", Some(case)).unwrap_or_default();
            let above = us - idle_us;
            // The time of those that came back is no time if many did not.
            let holds = above <= most_us && lost <= 1.0;
            let text = format!("{above:.0} µs with {} ({lost:.1} % lost)", case_in_words(case));
            Some(Verdict { value: above, holds, text })
        })
        .collect();
    let sentence =
        format!("probe {quantile} within {most_us:.0} µs of the idle path ({idle_us:.0} µs)");
    judge(ctx, &sentence, " µs", &verdicts);
}

/// Ours as a multiple of the least of `others`, case by case; values are said divided by `1 / scale`.
fn against<'a>(
    ctx: &Context,
    cases: &[Case],
    metric: &str,
    others: impl Iterator<Item = &'a str> + Clone,
    scale: f64,
) -> Vec<Verdict> {
    let verdict = |case: &Case| {
        let ours = ctx.median(PACE, metric, Some(case))?;
        let theirs = others
            .clone()
            .filter_map(|system| Some((system, ctx.median(system, metric, Some(case))?)))
            .min_by(|a, b| a.1.total_cmp(&b.1))?;
        let (system, best) = theirs;
        let text = format!(
            "{:.0} against {:.0} ({system}) with {}",
            ours * scale,
            best * scale,
            case_in_words(case)
        );
        Some(Verdict { value: ours / best, holds: ours <= best, text })
    };
    cases.iter().filter_map(verdict).collect()
}
