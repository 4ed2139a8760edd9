//! Tables of results, for terminals and for Markdown.
//!
//! One table a metric: cases as rows, systems as columns, all cells in one unit, which the caption
//! names. Circumstances that every case shares move into the caption. An experiment with few cases and
//! many metrics gets a table a case, with a metric a row, instead.

use std::collections::HashMap;
use std::iter;

use serde_json::Value;
use tidegate_chart::text::{self, Align, Paint};

use crate::report::{Case, Report, distinct};
use crate::stats::Summary;
use crate::units::{Unit, measured, with_symbol};

/// The cell of a system that has no value.
const ABSENT: &str = "–";
/// With fewer metrics than this, two cases are read more easily side by side.
const ROWS_LEAST: usize = 5;
/// So many cases have a table each if there is nothing to read side by side: their metrics differ.
const APART_MOST: usize = 4;

/// Text in rows and columns. The first `left` columns name things and are set flush left; the others
/// hold figures and are set flush right.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// What the figures are.
    pub caption: String,
    /// A name a column.
    pub header: Vec<String>,
    /// How many columns name things.
    pub left: usize,
    /// Cells, a header's length each.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// As GitHub's Markdown.
    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(|cell| escaped(cell)).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let rule: Vec<&str> =
            (0..self.header.len()).map(|at| if at < self.left { ":--" } else { "--:" }).collect();
        let mut text = format!("**{}**\n\n", self.caption);
        text += &line(&self.header);
        text += &format!("|{}|\n", rule.join("|"));
        for row in &self.rows {
            text += &line(row);
        }
        text
    }

    /// As columns for a terminal.
    pub fn text(&self, paint: Paint) -> String {
        let widths = text::widths(iter::once(&self.header).chain(&self.rows));
        let aligned = || (0..).map(|at| if at < self.left { Align::Left } else { Align::Right });
        let set = |cells: &[String]| format!("  {}", text::line(aligned(), &widths, cells));
        let mut text =
            format!("{}\n{}\n", paint.bold(&self.caption), paint.dim(&set(&self.header)));
        for row in &self.rows {
            text += &format!("{}\n", set(row));
        }
        text
    }
}

/// The medians, for a terminal.
pub fn medians(report: &Report) -> Vec<Table> {
    tables(report, |cell, unit| measured(unit(cell.summary.median)))
}

/// Medians with their range and the published figures, for the page.
pub fn full(report: &Report) -> Vec<Table> {
    tables(report, |cell, unit| {
        let Summary { median, min, max, .. } = cell.summary;
        let mut text = measured(unit(median));
        if cell.summary.runs > 1 {
            text += &format!(" [{}–{}]", measured(unit(min)), measured(unit(max)));
        }
        if let Some(published) = cell.published {
            text += &format!(" ({})", measured(unit(published)));
        }
        text
    })
}

/// Text that cannot end a Markdown cell.
pub fn escaped(cell: &str) -> String {
    cell.replace('|', "\\|").replace('\n', " ")
}

/// A circumstance for people: `1 Gbit/s`, `9`, `cubic`.
pub fn circumstance(key: &str, value: &Value) -> String {
    match value {
        Value::Number(number) => {
            number.as_f64().map_or_else(String::new, |v| Unit::split(key).1.human(v))
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// All runs of one system in one case.
struct Cell {
    summary: Summary,
    published: Option<f64>,
}

/// Shows a cell, given how a stored figure is turned into the table's unit.
type Show = fn(&Cell, &dyn Fn(f64) -> f64) -> String;

fn tables(report: &Report, show: Show) -> Vec<Table> {
    let cases = distinct(report.rows.iter().map(|row| &row.case));
    let metrics = report.metrics();
    let of_case = |case: &Case| {
        distinct(report.rows.iter().filter(|r| r.case == *case).map(|r| r.metric.as_str()))
    };
    let differ = cases.windows(2).any(|pair| of_case(pair[0]) != of_case(pair[1]));
    let apart = cases.len() == 2 || (cases.len() <= APART_MOST && differ);
    match cases[..] {
        [case] if metrics.len() > 1 => vec![one_case(case, report, show)],
        [_, _, ..] if apart && metrics.len() >= ROWS_LEAST => {
            let only = |case: &&Case| {
                let rows = report.rows.iter().filter(|row| row.case == **case).cloned().collect();
                let table = one_case(case, &Report { rows, ..report.clone() }, show);
                Table { caption: split_keys(&[case]).1.unwrap_or_default(), ..table }
            };
            cases.iter().map(only).collect()
        }
        _ => metrics.into_iter().map(|metric| metric_table(report, metric, show)).collect(),
    }
}

fn metric_table(report: &Report, metric: &str, show: Show) -> Table {
    let (name, unit) = Unit::split(metric);
    let cells = cells(report, metric);
    let cases = distinct(report.rows.iter().filter(|r| r.metric == metric).map(|r| &r.case));
    let systems =
        distinct(report.rows.iter().filter(|r| r.metric == metric).map(|r| r.system.as_str()));
    let scale = unit.scale_for(cells.values().map(|cell| cell.summary.median));
    let (varying, shared) = split_keys(&cases);

    let mut caption = with_symbol(&name, scale.symbol);
    if let Some(shared) = shared {
        caption += &format!(", {shared}");
    }
    let rows = cases.iter().enumerate().map(|(at, case)| {
        let names = varying.iter().map(|key| {
            case.0.get(*key).map_or_else(|| ABSENT.to_owned(), |value| circumstance(key, value))
        });
        let figures = systems.iter().map(|system| match cells.get(&(*system, at)) {
            Some(cell) => show(cell, &|value| unit.shown(value, scale)),
            None => ABSENT.to_owned(),
        });
        names.chain(figures).collect()
    });
    let names = varying.iter().map(|key| Unit::split(key).0);
    let header = names.chain(systems.iter().map(|s| (*s).to_owned())).collect();
    Table { caption, header, left: varying.len(), rows: rows.collect() }
}

/// The table of an experiment with a single case: a metric a row.
fn one_case(case: &Case, report: &Report, show: Show) -> Table {
    let systems = report.systems();
    let rows = report.metrics().into_iter().map(|metric| {
        let (name, unit) = Unit::split(metric);
        let cells = cells(report, metric);
        let scale = unit.scale_for(cells.values().map(|cell| cell.summary.median));
        let figures = systems.iter().map(|system| match cells.get(&(*system, 0)) {
            Some(cell) => show(cell, &|value| unit.shown(value, scale)),
            None => ABSENT.to_owned(),
        });
        iter::once(with_symbol(&name, scale.symbol)).chain(figures).collect()
    });
    let header = iter::once(String::new()).chain(systems.iter().map(|s| (*s).to_owned()));
    let caption = match split_keys(&[case]).1 {
        Some(shared) => format!("{}, {shared}", report.experiment),
        None => report.experiment.clone(),
    };
    Table { caption, header: header.collect(), left: 1, rows: rows.collect() }
}

/// The cells of one metric by system and index of the case.
fn cells<'a>(report: &'a Report, metric: &str) -> HashMap<(&'a str, usize), Cell> {
    let rows = || report.rows.iter().filter(|row| row.metric == metric);
    let cases = distinct(rows().map(|row| &row.case));
    let mut cells = HashMap::new();
    for (at, case) in cases.into_iter().enumerate() {
        for system in distinct(rows().map(|row| row.system.as_str())) {
            let Some(summary) = Summary::of(&report.values(system, metric, Some(case))) else {
                continue;
            };
            let same = |row: &&crate::report::Row| row.system == system && row.case == *case;
            let published = rows().filter(same).find_map(|row| row.published);
            cells.insert((system, at), Cell { summary, published });
        }
    }
    cells
}

/// The keys in which the cases differ, and the shared circumstances in words.
pub(crate) fn split_keys<'a>(cases: &[&'a Case]) -> (Vec<&'a str>, Option<String>) {
    let keys = distinct(cases.iter().flat_map(|case| case.0.keys().map(String::as_str)));
    let varies = |key: &&str| cases.iter().any(|case| case.0.get(*key) != cases[0].0.get(*key));
    let (varying, shared): (Vec<&str>, Vec<&str>) = keys.into_iter().partition(varies);
    let words: Vec<String> = shared
        .iter()
        .filter_map(|key| {
            Some(format!("{} {}", Unit::split(key).0, circumstance(key, cases[0].0.get(*key)?)))
        })
        .collect();
    (varying, (!words.is_empty()).then(|| words.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::sample;

    fn text(tables: &[Table]) -> String {
        tables.iter().map(|table| table.text(Paint::plain())).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn medians_for_a_terminal() {
        insta::assert_snapshot!(text(&medians(&sample())), @r#"
        goodput (Mbit/s), limit 1 Gbit/s, cc cubic
          flows  htb  nrm
          1      954  941
          9      956  951

        RTT p50 (µs), limit 1 Gbit/s, cc cubic
          flows     htb   nrm
          1        1825  31.5
          9      16,425  31.5
        "#);
    }

    #[test]
    fn one_case_gets_one_table() {
        let mut report = sample();
        let first = report.rows[0].case.clone();
        report.rows.retain(|row| row.case == first);
        insta::assert_snapshot!(text(&medians(&report)), @r#"
        nrm-egress, limit 1 Gbit/s, flows 1, cc cubic
                             htb   nrm
          goodput (Mbit/s)   954   941
          RTT p50 (µs)      1825  31.5
        "#);
    }

    #[test]
    fn cases_that_cannot_be_compared_have_a_table_each() {
        let mut report = sample();
        let values = (0..ROWS_LEAST).map(|i| format!("figure_{i}"));
        let case = Case::new().with("job", "another");
        for metric in values {
            let row = report.rows[0].clone();
            report.rows.push(crate::report::Row { metric, case: case.clone(), ..row });
        }
        let captions: Vec<_> = medians(&report).into_iter().map(|table| table.caption).collect();
        assert_eq!(captions.len(), 3, "{captions:?}");
        assert_eq!(captions.last().map(String::as_str), Some("job another"));
    }

    #[test]
    fn a_system_without_values_shows_a_dash() {
        let mut report = sample();
        let first = report.rows[0].case.clone();
        report.rows.retain(|row| row.system != "nrm" || row.case == first);
        let tables = medians(&report);
        assert_eq!(tables[0].rows[1], ["9", "956", ABSENT]);
    }

    #[test]
    fn no_rows_no_tables() {
        let report = Report { rows: vec![], ..sample() };
        assert!(medians(&report).is_empty());
    }

    #[test]
    fn a_bar_cannot_end_a_cell() {
        let table =
            Table { caption: "c".into(), header: vec!["a|b".into()], left: 1, rows: vec![] };
        assert!(table.markdown().contains("| a\\|b |"));
    }

    #[test]
    fn colour_stays_out_of_the_widths() {
        let tables = medians(&sample());
        let painted = tables[0].text(Paint::coloured());
        assert!(painted.contains("\x1b[1m"));
        let plain = painted.replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "");
        assert_eq!(plain, tables[0].text(Paint::plain()));
    }
}
