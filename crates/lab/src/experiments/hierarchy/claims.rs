//! What is claimed of Tidegate's tree, and every case in which it does not hold.

use super::{BACK_MS, GUARANTEE, MOST, P99, SPARE, SYSTEMS, USED, tree::Tree};
use crate::{
    context::Context,
    report::{Case, distinct},
    stats,
    systems::System,
};

/// Kept by our systems; said of HTB, too.
struct Bound {
    sentence: &'static str,
    metric: &'static str,
    unit: &'static str,
    holds: fn(f64) -> bool,
}

const BOUNDS: [Bound; 5] = [
    Bound {
        sentence: "guarantees are kept within 2 % in every step",
        metric: GUARANTEE,
        unit: " %",
        holds: |percent| percent >= 98.0,
    },
    Bound {
        sentence: "what is spare is shared within 5 % of the weights' proportion",
        metric: SPARE,
        unit: " %",
        holds: |percent| percent.abs() <= 5.0,
    },
    Bound {
        sentence: "at least 98 % of what the classes may have is used",
        metric: USED,
        unit: " %",
        holds: |percent| percent >= 98.0,
    },
    Bound {
        sentence: "never above 101 % of the root over 1 s",
        metric: MOST,
        unit: " %",
        holds: |percent| percent <= 101.0,
    },
    Bound {
        sentence: "a class that comes back has 90 % of its guarantee within 50 ms",
        metric: BACK_MS,
        unit: " ms",
        holds: |ms| ms <= 50.0,
    },
];
/// How far below HTB's the probe's p99 is to be.
const BELOW: f64 = 10.0;

/// Records every claim, as far as its cases were run.
pub(super) fn record(ctx: &mut Context, tree: &Tree) {
    let cases = distinct(ctx.rows().iter().map(|row| row.case.clone()));
    for system in SYSTEMS.into_iter().filter(|system| *system != System::Htb) {
        for Bound { sentence, metric, unit, holds } in BOUNDS {
            let Some((range, failed)) = judged(ctx, &cases, system, metric, unit, holds) else {
                continue;
            };
            let htb = judged(ctx, &cases, System::Htb, metric, unit, holds);
            let htb = htb.map(|(range, failed)| format!("; htb: {range}, not in {}", failed.len()));
            let text = format!("{range}{}{}", but(&failed), htb.unwrap_or_default());
            ctx.claim(format!("{system}: {sentence}"), failed.is_empty(), text);
        }
        below(ctx, &cases, system);
    }
    let mbit = tree.root_bit_s / 1_000_000;
    let classes = tree.classes.iter().map(|class| {
        let mbit = |bit_s: u64| bit_s / 1_000_000;
        let ceiling = class.ceiling_bit_s.map(|rate| format!(", at most {}", mbit(rate)));
        let inside = class.parent.map(|parent| format!(" (in {})", tree.classes[parent].name));
        format!(
            "{}{}: guarantee {}, weight {}{}",
            class.name,
            inside.unwrap_or_default(),
            mbit(class.guarantee_bit_s),
            class.weight,
            ceiling.unwrap_or_default()
        )
    });
    let classes = classes.collect::<Vec<_>>().join("; ");
    ctx.note(format!("The tree, in Mbit/s: {mbit} for all; {classes}."));
}

/// The range of what was measured, and where it breaks the bound; none if nothing was.
fn judged(
    ctx: &Context,
    cases: &[Case],
    system: System,
    metric: &str,
    unit: &str,
    holds: fn(f64) -> bool,
) -> Option<(String, Vec<String>)> {
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for case in cases {
        for value in ctx.values(system.name(), metric, Some(case)) {
            all.push(value);
            if !holds(value) {
                failed.push(format!("{value:.1}{unit}{}", in_words(case)));
            }
        }
    }
    let (least, most) = stats::range(&all)?;
    Some((format!("{least:.1} to {most:.1}{unit} in {} cases", all.len()), failed))
}

/// The probe beside HTB's in the same step.
fn below(ctx: &mut Context, cases: &[Case], system: System) {
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for case in cases {
        let p99 = |system: System| ctx.median(system.name(), P99, Some(case));
        let (Some(ours), Some(htb)) = (p99(system), p99(System::Htb)) else { continue };
        all.push(htb / ours);
        if htb / ours < BELOW {
            failed.push(format!("{ours:.0} µs beside {htb:.0}{}", in_words(case)));
        }
    }
    let Some((least, most)) = stats::range(&all) else { return };
    let text = format!("{least:.1} to {most:.1} times in {} steps{}", all.len(), but(&failed));
    let claim = format!("{system}: the probe's p99 is at least 10 times below htb's in every step");
    ctx.claim(claim, failed.is_empty(), text);
}

fn but(failed: &[String]) -> String {
    match failed.len() {
        0 => String::new(),
        count => format!("; not in {count}: {}", failed.join("; ")),
    }
}

/// ` with web, all greedy`.
fn in_words(case: &Case) -> String {
    let word = |key: &str| case.0.get(key).and_then(|value| value.as_str());
    match (word("class"), word("step")) {
        (Some(class), Some(step)) => format!(" for {class}, {step}"),
        (None, Some(step)) => format!(", {step}"),
        _ => String::new(),
    }
}
