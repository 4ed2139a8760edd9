//! `tidegate status` and `tidegate limit show`.

use std::{io::Write, path::Path, process::ExitCode};

use anyhow::Result;
use serde_json::Value;
use tidegate_agent::{
    report::{GateReport, GateState, LimitState, Report},
    status::{HostStatus, WAITING, Warnings, gone},
};
use tidegate_core::{
    Bytes, Nanos, Rate, Scheme,
    police::{COLOUR_NAMES, Policy},
};
use tidegate_fleet::api;
use tidegate_host::{
    doctor::Limits, host::Host, plan::State, status::LimitStatus, waiting::Queues,
};
use tidegate_sys::{
    limit::Colours,
    store::{Listing, StoreError, Waiting},
};

use crate::{
    args::StatusArgs,
    output::{self, Align, Column, Paint},
    refusal::{CHANGES, say},
    verbs::{daemon, missing},
};

/// Those of limits inside others, which stand at [`AFTER_RATE`] where there are some.
const INSIDE: [Column; 3] =
    [("NOW", Align::Right), ("GUARANTEE", Align::Right), ("WEIGHT", Align::Right)];
const AFTER_RATE: usize = 6;
/// Flows of a queue, below the table.
const FLOWS_SHOWN: usize = 10;

const COLUMNS: [Column; 14] = [
    ("NAME", Align::Left),
    ("ON", Align::Left),
    ("STATE", Align::Left),
    ("SCHEME", Align::Left),
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

/// Every limit, with those of the software NICs that run. Files of the agent are in the second directory.
pub fn all(
    store: &Path,
    (run_dir, files): (&Path, &Path),
    socket: &Path,
    how: StatusArgs,
) -> Result<ExitCode> {
    show(store, run_dir, None, Some((socket, files)), how)
}

/// Every limit that is on this host, or the one of this name.
pub fn status(
    store: &Path,
    run_dir: &Path,
    name: Option<&str>,
    how: StatusArgs,
) -> Result<ExitCode> {
    show(store, run_dir, name, None, how)
}

/// Shows limits; with the socket of a daemon and the directory of the agent's files also what these and
/// software NICs say.
fn show(
    store: &Path,
    run_dir: &Path,
    name: Option<&str>,
    others: Option<(&Path, &Path)>,
    how: StatusArgs,
) -> Result<ExitCode> {
    let json = how.look.json;
    let (socket, files) = others.unzip();
    let fleet = socket.and_then(daemon::running);
    let host = super::open(store)?;
    let listing = match name {
        None => host.store().list(host.hierarchy()),
        Some(name) => host.store().list_above(host.hierarchy(), name),
    };
    let mut listing = match (listing, name) {
        (Err(StoreError::Missing(_)), Some(_)) => Listing::default(),
        (listing, _) => listing?,
    };
    let mut status = HostStatus::of(&host, &listing, run_dir, fleet);
    status.fleet_left = socket.and_then(api::left);
    files.into_iter().for_each(|files| status.look_for_agent(run_dir, files));
    if let Some(name) = name {
        status.keep(name);
        if status.is_empty() {
            return Err(missing(&host, name));
        }
        listing.limits.retain(|pinned| pinned.name == name);
    }
    if socket.is_none() {
        status.nics.clear();
    }
    for pinned in listing.limits.iter().filter(|_| how.flows) {
        let limit = status.limits.iter_mut().find(|limit| limit.name == pinned.name);
        if let Some(limit) = limit.filter(|limit| limit.state != State::Broken) {
            limit.waiting = Queues::read(pinned)?;
        }
    }
    let HostStatus { limits, waiting, nics, fleet, agent, .. } = &status;
    let mut out = output::stdout();
    if json {
        let text = match name {
            Some(_) => serde_json::to_string_pretty(&status.first())?,
            None => serde_json::to_string_pretty(&status)?,
        };
        writeln!(out, "{text}")?;
    } else if limits.is_empty() && nics.is_empty() && waiting.is_empty() && name.is_some() {
        let kept = agent.iter().flat_map(|agent| &agent.report.limits);
        for limit in kept {
            writeln!(out, "{} on {}: {}", limit.name, limit.scope, limit.words())?;
        }
    } else if limits.is_empty() && nics.is_empty() && waiting.is_empty() {
        writeln!(out, "No limits in {}.", store.display())?;
    } else {
        let mut table: Vec<_> = output::as_tree(limits, |limit| (&limit.name, &limit.parent))
            .flat_map(|(depth, limit)| rows(depth, limit))
            .collect();
        table.extend(nics.iter().flat_map(nic_rows));
        table.extend(waiting.iter().map(waiting_row));
        let mut columns = COLUMNS.to_vec();
        if limits.iter().any(|limit| limit.parent.is_some()) {
            columns.splice(AFTER_RATE..AFTER_RATE, INSIDE);
        } else {
            table.iter_mut().for_each(|row| drop(row.drain(AFTER_RATE..AFTER_RATE + INSIDE.len())));
        }
        output::table(&mut out, Paint::stdout(), &columns, &table)?;
    }
    if !json {
        tell_schemes(&mut out, limits, name)?;
        tell_colours(&mut out, limits)?;
        tell_hooks(&mut out, limits)?;
        tell_members(&mut out, limits)?;
        tell_builds(&mut out, limits)?;
        tell_unfollowed(&mut out, limits)?;
        tell_at_risk(&mut out, limits)?;
        tell_waiting(&mut out, limits)?;
    }
    let kept = agent.as_ref().filter(|_| !json && socket.is_none());
    for limit in kept.into_iter().flat_map(|agent| &agent.report.limits) {
        if let Some(words) = limit.schedule_words() {
            writeln!(out, "{}: {words}", limit.name)?;
        }
    }
    let warnings = status.warnings();
    warn(&mut out, &warnings, json)?;
    if let Some(fleet) = fleet.as_ref().filter(|_| !json) {
        daemon::print(&mut out, fleet)?;
    }
    let agent = agent.as_ref().filter(|agent| agent.running && !json && socket.is_some());
    if let Some(agent) = agent {
        tell_agent(&mut out, &agent.report, limits)?;
    }
    Ok(if how.check && !warnings.alarms.is_empty() { CHANGES.into() } else { ExitCode::SUCCESS })
}

/// Below the table, why the limit that was asked for has its scheme.
fn tell_schemes(out: &mut impl Write, limits: &[LimitStatus], name: Option<&str>) -> Result<()> {
    for limit in limits.iter().filter(|limit| name == Some(&limit.name)) {
        writeln!(out, "{}: scheme {}", limit.name, output::scheme(&limit.settings))?;
    }
    Ok(())
}

/// ... and what the meters of policers have said.
fn tell_colours(out: &mut impl Write, limits: &[LimitStatus]) -> Result<()> {
    for limit in limits {
        let Some(Policy { meter: Some(meter), actions, .. }) = limit.settings.police() else {
            continue;
        };
        for (direction, d) in limit.directions() {
            let Some(Colours { packets, bytes }) = d.colours else { continue };
            let counts = COLOUR_NAMES.iter().zip(actions).enumerate().map(|(i, (name, action))| {
                format!("{name} {} ({action})", output::packets((packets[i], bytes[i])))
            });
            let counts = counts.collect::<Vec<_>>().join(", ");
            writeln!(out, "{} {direction}, {}: {counts}", limit.name, meter.kind.name())?;
        }
    }
    Ok(())
}

/// ... and which of them are in XDP, and how.
fn tell_hooks(out: &mut impl Write, limits: &[LimitStatus]) -> Result<()> {
    for limit in limits {
        if let Some(mode) = limit.settings.xdp_mode {
            writeln!(out, "{} ingress, hook xdp: {}", limit.name, output::xdp_mode(mode))?;
        }
    }
    Ok(())
}

/// Below the table, the cgroups of limits with a selector.
fn tell_members(out: &mut impl Write, limits: &[LimitStatus]) -> Result<()> {
    for limit in limits {
        if let Some(members) = limit.members.as_ref().filter(|members| !members.is_empty()) {
            writeln!(out, "{}: {}", limit.name, output::members(members))?;
        }
    }
    Ok(())
}

/// ... and which limits run the programs of another build.
fn tell_builds(out: &mut impl Write, limits: &[LimitStatus]) -> Result<()> {
    for limit in limits.iter().filter(|limit| limit.state != State::Broken) {
        if let Some(build) = &limit.other_build {
            let (name, own) = (&limit.name, tidegate_sys::BUILD);
            writeln!(
                out,
                "{name}: made by another build, {build} (this one is {own}); `tidegate limit restore {name}` \
                 has it run the programs of this one"
            )?;
        }
    }
    Ok(())
}

/// ... and which have the rates of a schedule that nobody follows.
fn tell_unfollowed(out: &mut impl Write, limits: &[LimitStatus]) -> Result<()> {
    for limit in limits.iter().filter(|limit| limit.settings.is_unfollowed()) {
        let line = format!(
            "{}: nobody follows its schedule: apply its file again at each change, or have `tidegate agent` \
             keep it",
            limit.name
        );
        writeln!(out, "{}", Paint::stdout().yellow(&line))?;
    }
    Ok(())
}

/// ... and which of them make requests wait for a timer of TCP.
fn tell_at_risk(out: &mut impl Write, limits: &[LimitStatus]) -> Result<()> {
    for limit in limits {
        for (direction, d) in limit.directions() {
            let Some(words) = d.at_risk.and_then(|at_risk| at_risk.words()) else { continue };
            let member = limit.members.iter().flatten().next();
            let on = member.map_or_else(|| output::scope(&limit.scope), String::clone);
            let what = format!("{words}; `tidegate explain {on}` says what to do");
            writeln!(out, "{} {direction}, requests at risk: {what}", limit.name)?;
        }
    }
    Ok(())
}

/// Below the table, whose packets wait.
fn tell_waiting(out: &mut impl Write, limits: &[LimitStatus]) -> Result<()> {
    for limit in limits {
        for (direction, queue) in limit.waiting.iter().flat_map(Queues::directions) {
            let all = output::packets((queue.packets, queue.bytes));
            let torn = if queue.whole { "" } else { ", some missed" };
            writeln!(out, "{} {direction}, what waits: {all}{torn}", limit.name)?;
            for flow in queue.flows.iter().take(FLOWS_SHOWN) {
                let count = output::packets((flow.packets, flow.bytes));
                writeln!(out, "  {} {} > {}: {count}", flow.protocol, flow.from, flow.to)?;
            }
            let more = queue.flows.len().saturating_sub(FLOWS_SHOWN);
            if more > 0 {
                writeln!(out, "  and {more} flows more (--json)")?;
            }
            if queue.other_packets > 0 {
                let count = output::packets((queue.other_packets, queue.other_bytes));
                writeln!(out, "  of no flow: {count}")?;
            }
        }
    }
    Ok(())
}

/// Says it aloud: on the terminal below the table, else on standard error, too.
fn warn(out: &mut impl Write, warnings: &Warnings, json: bool) -> Result<()> {
    let Warnings { alarms, waiting } = warnings;
    for line in waiting.iter().filter(|_| !json) {
        writeln!(out, "{}", Paint::stdout().yellow(line))?;
    }
    for alarm in alarms {
        if json {
            say(&format!("tidegate: warning: {alarm}"));
        } else {
            writeln!(out, "{}", Paint::stdout().red(&format!("WARNING: {alarm}")))?;
        }
    }
    Ok(())
}

/// The limits of the host as `tidegate doctor` judges them; `None` if they cannot be read.
pub fn seen(store: &Path, (run_dir, files): (&Path, &Path), socket: &Path) -> Option<Limits> {
    let host = Host::open(store).ok()?;
    let mut status = HostStatus::read(&host, run_dir, None).ok()?;
    status.fleet_left = api::left(socket);
    status.look_for_agent(run_dir, files);
    let Warnings { mut alarms, waiting } = status.warnings();
    alarms.extend(host.store().orphans().into_iter().map(|device| {
        format!(
            "a lost limit has left what may still limit: {device}; a new limit there replaces it, and \
             `tidegate detach` removes it with all limits"
        )
    }));
    Some(Limits { installed: status.limits.len(), alarms, waiting })
}

/// What the agent keeps, and what its schedules say now.
fn tell_agent(out: &mut impl Write, report: &Report, limits: &[LimitStatus]) -> Result<()> {
    let holds = |name: &str| limits.iter().any(|is| is.name == name && is.state == State::InForce);
    let in_force = report.limits.iter().filter(|limit| limit.state == LimitState::InForce);
    let in_force = in_force.filter(|limit| holds(&limit.name)).count();
    let (pid, dir, all) = (report.pid, &report.directory, report.limits.len());
    writeln!(out, "\nAgent (process {pid}) keeps {dir}: {in_force} of {all} limits in force")?;
    for limit in &report.limits {
        if let Some(what) = limit.schedule_words() {
            writeln!(out, "  {}: {what}", limit.name)?;
        }
    }
    for line in gate_lines(&report.gate) {
        writeln!(out, "  {line}")?;
    }
    for (socket, state) in &report.engines {
        writeln!(out, "  {socket}: {state}")?;
    }
    Ok(())
}

/// What becomes of new cgroups until the agent has decided which limits are on them.
pub fn gate_lines(gate: &GateReport) -> Vec<String> {
    let reason = gate.reason.as_deref().unwrap_or_default();
    let mut lines = match gate.state {
        GateState::Unneeded => return Vec::new(),
        GateState::Unavailable => vec![format!("new cgroups are followed, not held: {reason}")],
        GateState::Open => {
            let deadline = Nanos(gate.deadline_ms.saturating_mul(1_000_000));
            vec![format!("a new cgroup gets 64 KiB until it is decided, {deadline} at most")]
        }
    };
    let counted = [
        (gate.late_bytes, "bytes passed after that, undecided"),
        (gate.unheld_cgroups, "cgroups were not held: too many were new at once"),
        (gate.lost_events, "events of cgroups were lost; all cgroups were looked at again"),
    ];
    lines.extend(counted.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")));
    lines
}

/// A limit that waits has a name, a scope and a state.
fn waiting_row(waits: &Waiting) -> Vec<String> {
    let known = [waits.name.clone(), output::scope(&waits.scope), WAITING.to_owned()];
    let columns = COLUMNS.len() + INSIDE.len();
    known.into_iter().chain(std::iter::repeat_n("-".to_owned(), columns)).take(columns).collect()
}

/// The limits of a software NIC that runs, as it wrote them last.
fn nic_rows(nic: &Value) -> Vec<Vec<String>> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut rows = Vec::new();
    let state = if gone(nic).next().is_some() { "PORT GONE" } else { "in force" };
    for limit in list(&nic["limits"]) {
        for name in ["egress", "ingress"] {
            let held = &limit[name];
            let Some(rate) = held["rate_bit_s"].as_u64().and_then(Rate::from_bit_s) else {
                continue;
            };
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let lane = &nic["directions"][held["direction"].as_u64().unwrap_or_default() as usize];
            let number = |key: &str| lane[key].as_u64().unwrap_or_default();
            let time = |ns: &Value| output::time(ns.as_i64().unwrap_or_default());
            let dropped = ["drop_early", "drop_full", "drop_gone"]
                .map(|what| (number(&format!("{what}_packets")), number(&format!("{what}_bytes"))));
            let dropped =
                dropped.iter().fold((0, 0), |(p, b), (packets, bytes)| (p + packets, b + bytes));
            let none = || "-".to_owned();
            rows.push(vec![
                text(&limit["name"]),
                format!("{} {}", text(&limit["kind"]), text(&limit["scope"])),
                format!("{state}, nic {}", nic["pid"]),
                Scheme::Carousel.to_string(),
                name.to_owned(),
                rate.to_string(),
                none(),
                none(),
                none(),
                time(&held["burst_ns"]),
                time(&held["mark_ns"]),
                none(),
                output::time(
                    i64::try_from(rate.time_for(Bytes(number("waiting_bytes"))).0).unwrap_or(0),
                ),
                output::packets((number("passed_packets"), number("passed_bytes"))),
                number("marked_packets").to_string(),
                none(),
                output::packets(dropped),
            ]);
        }
    }
    rows
}

fn rows(depth: usize, limit: &LimitStatus) -> Vec<Vec<String>> {
    let none = || "-".to_owned();
    let guarantee = limit.guarantee_bit_s.map_or_else(none, output::rate);
    let weight = limit.weight.map_or_else(none, |weight| weight.to_string());

    let state = match limit.state {
        State::InForce => "in force",
        State::ScopeGone | State::NoMembers => WAITING,
        State::Anew | State::Detached => "DETACHED",
        State::NoFq => "NO FQ",
        State::Broken => "BROKEN",
    };
    let row = |(direction, d): (&str, &tidegate_host::status::DirectionStatus)| {
        let time = |ns: u64| output::time(i64::try_from(ns).unwrap_or(i64::MAX));
        vec![
            output::indented(depth, &limit.name),
            output::part(&limit.scope, &limit.settings.matched()),
            state.to_owned(),
            limit.settings.scheme().to_owned(),
            direction.to_owned(),
            Rate::from_bit_s(d.rate_bit_s).map_or_else(String::new, |rate| rate.to_string()),
            // A silent one has nothing now, and takes it with its first packet.
            d.now_bit_s.map_or_else(none, output::rate),
            guarantee.clone(),
            weight.clone(),
            time(d.burst_ns),
            d.mark_ns.map_or_else(none, time),
            d.drop_ns.map_or_else(none, time),
            output::time(d.backlog_ns.max(0)),
            output::packets(d.counters.charged()),
            d.counters.packets_of("mark").to_string(),
            d.counters.packets_of("slow").to_string(),
            output::packets(d.counters.dropped()),
        ]
    };
    let mut rows: Vec<_> = limit.directions().map(row).collect();
    if rows.is_empty() {
        let known =
            [output::indented(depth, &limit.name), output::scope(&limit.scope), state.to_owned()];
        let unknown = COLUMNS.len() + INSIDE.len() - known.len();
        rows.push(known.into_iter().chain((0..unknown).map(|_| none())).collect());
    }
    rows
}

#[cfg(test)]
mod tests {
    use tidegate_host::risk::AtRisk;

    use super::*;
    use crate::verbs::top::tests::limit;

    fn at_risk_text(at_risk: Option<AtRisk>) -> String {
        let mut limit = limit("system.slice/web.service", Some((200, 100)), None).status;
        limit.egress.as_mut().unwrap().at_risk = at_risk;
        let mut out = Vec::new();
        tell_at_risk(&mut out, &[limit]).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn requests_at_risk_are_a_line_where_there_are_some() {
        assert_eq!(at_risk_text(None), "");
        assert_eq!(at_risk_text(Some(AtRisk([Some(0); 3]))), "");
        insta::assert_snapshot!(at_risk_text(Some(AtRisk([Some(1), Some(11), Some(0)]))), @"web.service egress, requests at risk: 12 packets dropped with nothing else in flight (1 connecting, 11 credit_used); `tidegate explain system.slice/web.service` says what to do");
    }
}
