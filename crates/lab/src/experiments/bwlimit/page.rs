//! What is made of the results: claims, figures, and the tables of `docs/bwlimit.md`.

use std::fmt::Write as _;

use super::super::{bed::IDLE, tally::Tally};
use crate::{
    chart::{Bars, BarsOf},
    context::Context,
    report::{Case, Report, Row, distinct},
    stats,
    table::circumstance,
};

pub(super) const OWN: &str = "own flag";
pub(super) const OURS: &str = "tidegate run";

/// What is claimed of `tidegate run`, in percent of the limit.
struct Part {
    sentence: &'static str,
    metric: &'static str,
    holds: fn(f64) -> bool,
}

const PARTS: [Part; 4] = [
    Part {
        sentence: "the first second carries at most 101 % of what the limit gives",
        metric: "first_second_percent",
        holds: |first| first <= 101.0,
    },
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
    Part { sentence: "at least 95 % used", metric: "used_percent", holds: |used| used >= 95.0 },
];
/// Of the neighbour's probes: what a busy machine does to them by itself.
const ABOVE_MOST_US: f64 = 1000.0;

/// `rsync at 5 Mbit/s, 4 processes`.
pub(super) fn case_in_words(case: &Case) -> String {
    let word =
        |key: &str| case.0.get(key).map(|value| circumstance(key, value)).unwrap_or_default();
    let at_once = match word("at_once") {
        one if one == "1" => String::new(),
        several => format!(", {several}"),
    };
    format!("{} at {}{at_once}", word("tool"), word("limit_bit_s"))
}

/// One claim a part, in the median of the runs of each case.
pub(super) fn claims(ctx: &mut Context) {
    let cases: Vec<Case> = distinct(ctx.rows().iter().map(|row| &row.case))
        .into_iter()
        .filter(|case| case.0.contains_key("tool"))
        .cloned()
        .collect();
    for Part { sentence, metric, holds } in PARTS {
        let mut tally = Tally::default();
        for case in &cases {
            let Some(value) = ctx.median(OURS, metric, Some(case)) else { continue };
            tally.add(holds(value), format!("{value:.1} % with {}", case_in_words(case)));
        }
        tally.claim(ctx, format!("{OURS}: {sentence}"));
    }
    let Some(idle_us) = ctx.median(IDLE, "rtt_p99_us", None) else { return };
    let (mut near, mut below) = (Tally::default(), Tally::default());
    for case in &cases {
        let p99 = |system| ctx.median(system, "rtt_p99_us", Some(case));
        let Some(ours) = p99(OURS) else { continue };
        let words = case_in_words(case);
        near.add(ours - idle_us <= ABOVE_MOST_US, format!("{} with {words}", ms(ours)));
        let Some(own) = p99(OWN) else { continue };
        below.add(
            ours - own <= ABOVE_MOST_US,
            format!("{} against {} with {words}", ms(ours), ms(own)),
        );
    }
    near.claim(ctx, format!("{OURS}: the neighbour's p99 is within 1 ms of the idle path's"));
    let sentence = "the neighbour's p99 is at most 1 ms above that beside the own flag";
    below.claim(ctx, format!("{OURS}: {sentence}"));
}

fn kb(bytes: f64) -> String {
    format!("{:.0} kB", bytes / 1e3)
}

fn ms(us: f64) -> String {
    format!("{:.1} ms", us / 1e3)
}

pub(super) fn figures(ctx: &mut Context, limits: &[u64]) {
    for (file, title, metric) in [
        ("first-second", "Share of the limit in the first second", "first_second_percent"),
        ("max-100ms", "Highest share of the limit over any 100 ms", "max_100ms_percent"),
        ("neighbour", "Round trip of a neighbour, 99th percentile", "rtt_p99_us"),
    ] {
        for &limit_bit_s in limits {
            let here =
                |row: &&Row| row.case.0.get("limit_bit_s").is_some_and(|is| *is == limit_bit_s);
            let rows: Vec<Row> = ctx.rows().iter().filter(here).cloned().collect();
            if rows.is_empty() {
                continue;
            }
            let title =
                format!("{title}, limit {}", circumstance("limit_bit_s", &limit_bit_s.into()));
            let bars = Bars::from_rows(&rows, BarsOf { title: &title, metric, points: None });
            ctx.figure(&format!("{file}-{}mbit", limit_bit_s / 1_000_000), bars);
        }
    }
}

/// How a figure is written.
type Show = fn(f64) -> String;

/// The tables of the page: one a limit, a row a copy, medians of the runs.
pub fn tables(report: &Report) -> String {
    let limits = report.rows.iter().filter_map(|row| row.case.0.get("limit_bit_s"));
    let mut text = String::new();
    for limit in distinct(limits) {
        let heads = ["first second", "highest 100 ms", "used", "neighbour p99", "neighbour max"];
        let pairs = heads.map(|head| format!("{head}: {OWN} | {OURS}")).join(" | ");
        let words = circumstance("limit_bit_s", limit);
        let second_bytes = limit.as_f64().unwrap_or_default() / 8.0;
        let _ = writeln!(text, "**Limit {words}: {} a second**\n", kb(second_bytes));
        let _ = writeln!(text, "| tool | at once | {pairs} |");
        let _ = writeln!(text, "|:--|:--|{}", "--:|".repeat(2 * heads.len()));
        let here = |case: &&Case| case.0.get("limit_bit_s") == Some(limit);
        for case in distinct(report.rows.iter().map(|row| &row.case)).into_iter().filter(here) {
            let cell = |system: &str, metric: &str, show: Show| {
                let median = stats::median(&report.values(system, metric, Some(case)));
                median.map_or_else(|| "-".to_owned(), show)
            };
            let percent = |value| format!("{value:.0} %");
            let shows: [(&str, Show); 5] = [
                ("first_second_bytes", kb),
                ("max_100ms_percent", percent),
                ("used_percent", percent),
                ("rtt_p99_us", ms),
                ("rtt_max_us", ms),
            ];
            let word = |key: &str| case.0.get(key).map(|value| circumstance(key, value));
            let names = ["tool", "at_once"].map(|key| word(key).unwrap_or_default());
            let figures = shows
                .iter()
                .flat_map(|(metric, show)| [OWN, OURS].map(|system| cell(system, metric, *show)));
            let cells: Vec<_> = names.into_iter().chain(figures).collect();
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let case = Case::new().with("limit_bit_s", 5e6).with("at_once", "1").with("tool", "scp");
        let row = |system: &str, metric: &str, value| Row {
            system: system.into(),
            case: case.clone(),
            metric: metric.into(),
            run: 1,
            value,
            published: None,
        };
        let rows = vec![
            row(OWN, "first_second_bytes", 1_500_400.0),
            row(OURS, "first_second_bytes", 616_000.0),
            row(OWN, "rtt_p99_us", 31_000.0),
        ];
        Report { rows, ..Report::default() }
    }

    #[test]
    fn a_table_has_both_systems_side_by_side() {
        let tables = tables(&report());
        let tables = tables.trim_end();
        let row = tables.lines().last().unwrap();
        let empty = "- | - | - | - |";
        assert_eq!(row, format!("| scp | 1 | 1500 kB | 616 kB | {empty} 31.0 ms | - | - | - |"));
        let head =
            "**Limit 5 Mbit/s: 625 kB a second**\n\n| tool | at once | first second: own flag |";
        assert!(tables.starts_with(head), "{tables}");
        let columns = tables.lines().skip(2).map(|line| line.matches('|').count());
        assert_eq!(columns.collect::<Vec<_>>(), [13; 3]);
    }

    #[test]
    fn a_copy_in_words() {
        let case = Case::new().with("limit_bit_s", 5e6).with("tool", "scp");
        let words = |at_once: &str| case_in_words(&case.clone().with("at_once", at_once));
        assert_eq!(words("1"), "scp at 5 Mbit/s");
        assert_eq!(words("4 processes"), "scp at 5 Mbit/s, 4 processes");
    }
}
