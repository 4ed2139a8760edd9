//! What is claimed of policed TCP.

use tidegate_core::{Rate, burst::policer_burst};

use super::{GOODPUT, JAIN, LAW_PACED, LAW_UNPACED, USED};
use crate::{
    context::Context,
    experiments::case_in_words,
    report::{Case, Row, distinct},
};

/// Our own bounds: percent of the limit that one flow over 10 ms uses with the default bucket
/// of `tidegate`, and how equal flows are where without fairness they are not.
const FILLED_LEAST: f64 = 97.0;
const FILLED_RTT_US: f64 = 10_000.0;
const FAIR_LEAST: f64 = 0.95;
const UNFAIR_MOST: f64 = 0.8;
/// By how much of the limit TCP may be outside of what the law says of paced and unpaced senders.
const LAW_WITHIN: f64 = 5.0;
/// Between our figures and Carousel's.
const FACTOR: f64 = 2.0;
const POLICE: &str = "police";
const FAIR: &str = "police-fair";

/// Records every claim, as far as its cases were run.
pub(super) fn record(ctx: &mut Context) {
    let cases: Vec<Case> = distinct(ctx.rows().iter().map(|row| row.case.clone()));
    for case in &cases {
        filled(ctx, case);
        fair(ctx, case);
    }
    by_the_law(ctx, &cases);
    as_published(ctx);
}

fn number(case: &Case, key: &str) -> Option<f64> {
    case.0.get(key).and_then(|value| value.as_f64())
}

/// ` with a bucket of 250 ms`.
fn bucket(case: &Case) -> String {
    let ms = number(case, "bucket_us").unwrap_or(0.0) / 1e3;
    format!("bucket {} ms", (ms * 10.0).round() / 10.0)
}

fn filled(ctx: &mut Context, case: &Case) {
    let unsaid = number(case, "limit_bit_s")
        .and_then(|bit_s| Rate::from_bit_s(bit_s as u64))
        .map(|rate| (policer_burst(rate).0 as f64 * 8e6 / rate.bit_s() as f64).round());
    let is = |key: &str, value: f64| number(case, key) == Some(value);
    let cubic = case.0.get("cc").is_some_and(|cc| *cc == "cubic");
    if number(case, "bucket_us") != unsaid
        || !is("rtt_us", FILLED_RTT_US)
        || !is("flows", 1.0)
        || !cubic
    {
        return;
    }
    let Some(used) = ctx.median(POLICE, USED, Some(case)) else { return };
    let claim = format!(
        "police, {}: {FILLED_LEAST} % of the limit with the default bucket",
        case_in_words(case)
    );
    ctx.claim(claim, used >= FILLED_LEAST, format!("{used:.1} %, {}", bucket(case)));
}

fn fair(ctx: &mut Context, case: &Case) {
    let jain = |system: &str| ctx.median(system, JAIN, Some(case));
    let (Some(plain), Some(fair)) = (jain(POLICE), jain(FAIR)) else { return };
    if plain >= UNFAIR_MOST {
        return;
    }
    let claim =
        format!("police-fair, {}: Jain's index of {FAIR_LEAST} or more", case_in_words(case));
    ctx.claim(claim, fair >= FAIR_LEAST, format!("{fair:.3}; without fairness {plain:.3}"));
}

/// TCP of Linux is neither paced nor unpaced, but between.
fn by_the_law(ctx: &mut Context, cases: &[Case]) {
    let (mut all, mut outside) = (0, Vec::new());
    for case in cases {
        let used = |system: &str| ctx.median(system, USED, Some(case));
        let laws = (used(LAW_UNPACED), used(LAW_PACED));
        let (Some(is), (Some(least), Some(most))) = (used(POLICE), laws) else { continue };
        all += 1;
        if is < least - LAW_WITHIN || is > most + LAW_WITHIN {
            let words = case_in_words(case);
            let of = format!("law {least:.0} to {most:.0} %");
            outside.push(format!("{is:.1} % ({of}) for {words}, {}", bucket(case)));
        }
    }
    if all == 0 {
        return;
    }
    let claim = format!(
        "police: within {LAW_WITHIN} % of the limit of what the law says of paced to unpaced senders"
    );
    let mut measured = format!("in {} of {all} cases", all - outside.len());
    if !outside.is_empty() {
        measured += &format!("; not: {}", outside.join("; "));
    }
    ctx.claim(claim, outside.is_empty(), measured);
}

fn as_published(ctx: &mut Context) {
    for (name, bucket_us) in [("1 ms", 1e3), ("1 s", 1e6)] {
        let rows: Vec<Row> = ctx.rows().to_vec();
        let here =
            |row: &&Row| row.metric == GOODPUT && number(&row.case, "bucket_us") == Some(bucket_us);
        let (mut says, mut holds) = (Vec::new(), true);
        for case in distinct(rows.iter().filter(here).map(|row| row.case.clone())) {
            let published = rows.iter().filter(here).filter(|row| row.case == case);
            let Some(published) = published.filter_map(|row| row.published).next() else {
                continue;
            };
            let Some(is) = ctx.median(POLICE, GOODPUT, Some(&case)) else { continue };
            let ratio = (is / published).max(published / is);
            holds &= ratio <= FACTOR;
            let rtt_ms = number(&case, "rtt_us").unwrap_or(0.0) / 1e3;
            says.push(format!("{:.0} ({:.0}) at {rtt_ms} ms", is / 1e6, published / 1e6));
        }
        if !says.is_empty() {
            let claim = format!(
                "police, one CUBIC flow at 1 Gbit/s, bucket of {name}: within a factor of {FACTOR} of \
                 Carousel's figure 3"
            );
            ctx.claim(claim, holds, format!("Mbit/s: {}", says.join(", ")));
        }
    }
}
