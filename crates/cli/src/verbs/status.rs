//! `tidegate status` and `tidegate limit show`.

use std::{
    io::{Write, stdout},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use serde::Serialize;
use tidegate_core::Rate;
use tidegate_node::{host::Host, plan::Standing, status::LimitStatus};
use tidegate_sys::store;

use crate::{
    output::{self, Align, Column, Paint},
    refusal::say,
    verbs::limit::missing,
};

const COLUMNS: [Column; 13] = [
    ("NAME", Align::Left),
    ("ON", Align::Left),
    ("STATE", Align::Left),
    ("DIRECTION", Align::Left),
    ("RATE", Align::Right),
    ("BURST", Align::Right),
    ("MARK", Align::Right),
    ("DROP", Align::Right),
    ("BACKLOG", Align::Right),
    ("PASSED", Align::Right),
    ("MARKED", Align::Right),
    ("SLOWED", Align::Right),
    ("DROPPED", Align::Right),
];

#[derive(Serialize)]
struct Status<'a> {
    limits: &'a [LimitStatus],
}

/// Every limit, or the one of this name.
pub fn status(store: &Path, name: Option<&str>, json: bool) -> Result<ExitCode> {
    let host = Host::open(store)?;
    let pinned = match name {
        None => host.store().list(host.hierarchy())?,
        Some(name) => {
            store::check_name(name)?;
            vec![host.find(name)?.ok_or_else(|| missing(&host, name))?]
        }
    };
    let limits: Result<Vec<_>, _> = pinned.iter().map(LimitStatus::read).collect();
    let limits = limits?;
    let mut out = stdout().lock();
    if json {
        let text = match (name, limits.first()) {
            (Some(_), Some(limit)) => serde_json::to_string_pretty(limit)?,
            _ => serde_json::to_string_pretty(&Status { limits: &limits })?,
        };
        writeln!(out, "{text}")?;
    } else if limits.is_empty() {
        writeln!(out, "No limits in {}.", store.display())?;
    } else {
        let rows: Vec<_> = limits.iter().flat_map(rows).collect();
        output::table(&mut out, Paint::stdout(), &COLUMNS, &rows)?;
    }
    cry(&mut out, &limits, json)?;
    Ok(ExitCode::SUCCESS)
}

/// Says aloud which limits are not enforced: on the terminal below the table, else on standard error, too.
fn cry(out: &mut impl Write, limits: &[LimitStatus], json: bool) -> Result<()> {
    let alarms = limits.iter().filter_map(|l| output::alarm(&l.name, &l.scope, l.state));
    for alarm in alarms {
        if json {
            say(&format!("tidegate: warning: {alarm}"));
        } else {
            writeln!(out, "{}", Paint::stdout().red(&format!("WARNING: {alarm}")))?;
        }
    }
    Ok(())
}

fn rows(limit: &LimitStatus) -> Vec<Vec<String>> {
    let state = match limit.state {
        Standing::InForce => "in force",
        Standing::ScopeGone => "GONE",
        Standing::Unhooked => "TAKEN OFF",
        Standing::Unkept => "NO FQ",
    };
    let row = |(direction, d): (&str, &tidegate_node::status::DirectionStatus)| {
        let time = |ns: u64| output::time(i64::try_from(ns).unwrap_or(i64::MAX));
        vec![
            limit.name.clone(),
            output::scope(&limit.scope),
            state.to_owned(),
            direction.to_owned(),
            Rate::from_bit_s(d.rate_bit_s).map_or_else(String::new, |rate| rate.to_string()),
            time(d.burst_ns),
            time(d.mark_ns),
            time(d.drop_ns),
            output::time(d.backlog_ns),
            output::packets(d.counters.charged()),
            d.counters.packets_of("mark").to_string(),
            d.counters.packets_of("slow").to_string(),
            output::packets(d.counters.dropped()),
        ]
    };
    limit.directions().map(row).collect()
}
