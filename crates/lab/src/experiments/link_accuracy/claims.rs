//! What `link-accuracy` claims.

use crate::{
    context::Context,
    report::{Case, distinct},
};

/// The 99th percentile of the delay error.
const DELAY_ERROR_MOST_US: f64 = 50.0;
const RATE_ERROR_100MS_MOST_PERCENT: f64 = 1.0;
const RATE_ERROR_1S_MOST_PERCENT: f64 = 0.5;
/// Standard deviations of a binomial share: beyond these a seed would be a rare one.
const DEVIATIONS_MOST: f64 = 4.0;

const CABLE: &str = "cable";

pub(super) fn record(ctx: &mut Context) {
    let cases = distinct(ctx.rows().iter().map(|row| row.case.clone()));
    let number = |case: &Case, key: &str| case.0.get(key).and_then(serde_json::Value::as_f64);
    for load in [50.0, 90.0] {
        let (mut worst, mut failed, mut total) = (None::<(f64, String)>, Vec::new(), 0);
        for case in cases.iter().filter(|case| number(case, "load_percent") == Some(load)) {
            let Some(p99) = ctx.median(CABLE, "delay_error_p99_us", Some(case)) else { continue };
            total += 1;
            let name = format!(
                "{} ms at {} Mbit/s",
                number(case, "delay_ms").unwrap_or_default(),
                number(case, "rate_bit_s").unwrap_or_default() / 1e6
            );
            if p99 > DELAY_ERROR_MOST_US {
                failed.push(format!("{p99:.0} µs with {name}"));
            }
            if worst.as_ref().is_none_or(|(most, _)| p99 > *most) {
                worst = Some((p99, name));
            }
        }
        let Some((most, name)) = worst else { continue };
        let mut measured = format!("the worst of {total} cases is {most:.0} µs, with {name}");
        if !failed.is_empty() {
            measured = format!("{measured}; above it: {}", failed.join(", "));
        }
        let claim = format!(
            "cable, load {load} %: up to 1 Gbit/s, p99 of the delay error is at most \
             {DELAY_ERROR_MOST_US} µs"
        );
        ctx.claim(claim, failed.is_empty(), measured);
    }
    rates(ctx, &cases);
    fates(ctx, &cases);
}

fn rates(ctx: &mut Context, cases: &[Case]) {
    for (metric, window, most) in [
        ("rate_error_100ms_percent", "100 ms", RATE_ERROR_100MS_MOST_PERCENT),
        ("rate_error_1s_percent", "1 s", RATE_ERROR_1S_MOST_PERCENT),
    ] {
        let mut said = Vec::new();
        let mut holds = true;
        for case in cases {
            let Some(error) = ctx.median(CABLE, metric, Some(case)) else { continue };
            let rate = case.0.get("rate_bit_s").and_then(serde_json::Value::as_f64);
            holds &= error <= most;
            said.push(format!("{error:.2} % at {} Mbit/s", rate.unwrap_or_default() / 1e6));
        }
        if !said.is_empty() {
            let claim = format!("cable: the rate over any {window} is within {most} %");
            ctx.claim(claim, holds, said.join("; "));
        }
    }
}

fn fates(ctx: &mut Context, cases: &[Case]) {
    let mut said = Vec::new();
    let mut holds = true;
    for case in cases {
        let asked = |key: &str| case.0.get(key).and_then(serde_json::Value::as_f64);
        let Some(datagrams) = ctx.median(CABLE, "datagrams", Some(case)) else { continue };
        for (key, metric, word) in [
            ("loss_percent", "lost_percent", "lost"),
            ("reorder_percent", "overtaken_percent", "overtaken"),
        ] {
            let (Some(asked), Some(got)) = (asked(key), ctx.median(CABLE, metric, Some(case)))
            else {
                continue;
            };
            if asked == 0.0 && got == 0.0 {
                continue;
            }
            let share = asked / 100.0;
            let deviation = (share * (1.0 - share) / datagrams).sqrt() * 100.0;
            holds &= (got - asked).abs() <= DEVIATIONS_MOST * deviation;
            said.push(format!("{got:.2} % {word} of {asked} %"));
        }
    }
    if !said.is_empty() {
        let claim = "cable: the shares that are lost and overtaken are those asked for, within \
                     4 standard deviations";
        ctx.claim(claim, holds, said.join("; "));
    }
}
