//! What is claimed of a limit, one claim a scheme, rate and part, so that a reader sees which part holds.

use super::{
    super::{bed::IDLE, case_in_words},
    GBIT, LIMITS,
};
use crate::{
    context::Context,
    report::{Case, Row, distinct},
    stats,
    table::circumstance,
};

const SCHEMES: [&str; 2] = ["pace", "nrm"];

/// What is claimed of a share of the limit, in percent.
struct Part {
    sentence: &'static str,
    metric: &'static str,
    holds: fn(f64) -> bool,
}

const PARTS: [Part; 3] = [
    Part { sentence: "at least 97 % used", metric: "used_percent", holds: |used| used >= 97.0 },
    Part {
        sentence: "never above 101 % over any 1 s",
        metric: "max_1s_percent",
        holds: |most| most <= 101.0,
    },
    Part {
        sentence: "never above 105 % over any 100 ms",
        metric: "max_100ms_percent",
        holds: |most| most <= 105.0,
    },
];

/// Of the probe, under 9 flows at 1 Gbit/s.
const ABOVE_IDLE_MOST_US: f64 = 1000.0;
const BELOW_HTB_LEAST: f64 = 10.0;

/// Records every claim, as far as its cases were run.
pub(super) fn record(ctx: &mut Context) {
    for system in SCHEMES {
        for limit_bit_s in LIMITS {
            let limit = circumstance("limit_bit_s", &limit_bit_s.into());
            for Part { sentence, metric, holds } in PARTS {
                let here = |row: &&Row| {
                    row.system == system
                        && row.metric == metric
                        && row.case.0.get("limit_bit_s").is_some_and(|limit| *limit == limit_bit_s)
                };
                let rows: Vec<&Row> = ctx.rows().iter().filter(here).collect();
                if rows.is_empty() {
                    continue;
                }
                let all = rows.iter().all(|row| holds(row.value));
                let measured = judged(ctx.rows(), &rows, holds);
                ctx.claim(format!("{system}, {limit}: {sentence}"), all, measured);
            }
        }
        delays(ctx, system);
    }
}

/// The range of `rows`, one a run, and every run in which the claim does not hold.
fn judged(all: &[Row], rows: &[&Row], holds: fn(f64) -> bool) -> String {
    let values: Vec<f64> = rows.iter().map(|row| row.value).collect();
    let (least, most) = stats::range(&values).unwrap_or_default();
    let mut text = match rows.len() {
        1 => format!("{least:.1} % in 1 run"),
        runs => format!("{least:.1} % to {most:.1} % in {runs} runs"),
    };
    let failed: Vec<String> = rows
        .iter()
        .filter(|row| !holds(row.value))
        .map(|row| {
            let peak = peak_at_s(all, row).map(|at_s| format!(" at {at_s:.2} s"));
            let (share, flows) = (row.value, flows_in_words(&row.case));
            format!("{share:.1} % with {flows}{}", peak.unwrap_or_default())
        })
        .collect();
    if !failed.is_empty() {
        text += &format!("; not in {}: {}", failed.len(), failed.join(", "));
    }
    text
}

/// When the fastest 100 ms of a run began, after its first data.
fn peak_at_s(all: &[Row], of: &Row) -> Option<f64> {
    let same = |row: &&Row| {
        row.metric == "max_100ms_at_s"
            && (&row.system, &row.case, row.run) == (&of.system, &of.case, of.run)
    };
    let row = all.iter().find(same).filter(|_| of.metric == "max_100ms_percent")?;
    Some(row.value)
}

/// What the probe saw in a case: its 99th percentile, endless when more than one of a hundred was lost.
struct Delay {
    p99_us: f64,
    text: String,
}

fn delay(ctx: &Context, system: &str, case: &Case) -> Option<Delay> {
    let lost = ctx.median(system, "probes_lost_percent", Some(case))?;
    let p99_us = ctx.median(system, "rtt_p99_us", Some(case));
    let known = p99_us.filter(|_| lost <= 1.0);
    Some(Delay {
        p99_us: known.unwrap_or(f64::INFINITY),
        text: match known {
            Some(p99_us) => format!("{p99_us:.0} µs"),
            None => format!("{lost:.0} % lost"),
        },
    })
}

/// The two claims on the probe at 1 Gbit/s under 9 flows.
fn delays(ctx: &mut Context, system: &str) {
    let Some(idle_us) = ctx.median(IDLE, "rtt_p99_us", None) else { return };
    let is = |case: &Case, key: &str, value: u64| case.0.get(key).is_some_and(|v| *v == value);
    let here = |case: &&Case| is(case, "limit_bit_s", GBIT) && is(case, "flows", 9);
    let cases = distinct(ctx.rows().iter().map(|row| &row.case).filter(here));
    let (mut within, mut within_said) = (true, Vec::new());
    let (mut below, mut below_said) = (true, Vec::new());
    for case in cases {
        let Some(ours) = delay(ctx, system, case) else { continue };
        let cc = case.0["cc"].as_str().unwrap_or_default();
        within &= ours.p99_us - idle_us <= ABOVE_IDLE_MOST_US;
        within_said.push(format!("{} ({cc})", ours.text));
        if let Some(htb) = delay(ctx, "htb", case) {
            let ratio = htb.p99_us / ours.p99_us;
            below &= ratio >= BELOW_HTB_LEAST;
            let times = if ratio.is_finite() && ratio > 0.0 {
                format!("{ratio:.0}x, ")
            } else {
                String::new()
            };
            below_said.push(format!("{cc}: {times}{} against {}", ours.text, htb.text));
        }
    }
    if !within_said.is_empty() {
        ctx.claim(
            format!("{system}, 1 Gbit/s, 9 flows: probe p99 within 1 ms of the idle path"),
            within,
            format!("{}; idle {idle_us:.0} µs", within_said.join(", ")),
        );
    }
    if !below_said.is_empty() {
        ctx.claim(
            format!(
                "{system}, 1 Gbit/s, 9 flows: probe p99 at least 10x below htb in the same run"
            ),
            below,
            below_said.join("; "),
        );
    }
}

/// `9 flows of cubic`.
fn flows_in_words(case: &Case) -> String {
    let mut case = case.clone();
    case.0.shift_remove("limit_bit_s");
    case_in_words(&case)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(flows: u32, metric: &str, value: f64) -> Row {
        Row {
            system: "nrm".into(),
            case: Case::new().with("limit_bit_s", GBIT).with("flows", flows).with("cc", "reno"),
            metric: metric.into(),
            run: 1,
            value,
            published: None,
        }
    }

    #[test]
    fn a_claim_names_the_runs_that_break_it() {
        let all = [row(1, "used_percent", 98.8), row(9, "used_percent", 91.26)];
        let text = judged(&all, &all.iter().collect::<Vec<_>>(), PARTS[0].holds);
        assert_eq!(text, "91.3 % to 98.8 % in 2 runs; not in 1: 91.3 % with 9 flows of reno");
    }

    #[test]
    fn a_peak_says_when() {
        let all = [row(9, "max_100ms_percent", 119.9), row(9, "max_100ms_at_s", 0.15)];
        let text = judged(&all, &[&all[0]], PARTS[2].holds);
        assert_eq!(text, "119.9 % in 1 run; not in 1: 119.9 % with 9 flows of reno at 0.15 s");
    }
}
