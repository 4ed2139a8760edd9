//! `tidegate daemon`, and what other verbs say of its groups.

use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use serde::Serialize;
use tidegate_core::Direction;
use tidegate_fleet::{
    api,
    daemon::{self, DaemonOptions},
    keys::KeyRing,
    status::{GroupStatus, NodeStatus},
};
use tidegate_host::{fleet::GroupSpec, spec::Spec};

use crate::{
    args::DaemonArgs,
    output::{self, Align, Column, Paint},
    refusal::say,
};

const COLUMNS: [Column; 8] = [
    ("GROUP", Align::Left),
    ("ALGORITHM", Align::Left),
    ("STATE", Align::Left),
    ("MEMBER", Align::Left),
    ("LIMIT", Align::Right),
    ("SHARE", Align::Right),
    ("DEMAND", Align::Right),
    ("AGE", Align::Right),
];

pub fn run(store: &Path, args: &DaemonArgs) -> Result<ExitCode> {
    if let Some(id) = args.new_key {
        writeln!(output::stdout(), "{}", KeyRing::generate(id)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    // clap lets none through without one.
    let file = args.file.clone().unwrap_or_default();
    let options = DaemonOptions { file, store: store.to_owned() };
    if args.stand_down {
        let limits = daemon::stand_down(&options)?;
        say(&format!(
            "tidegate: {limits} limits of groups fall back to this host's reserved share"
        ));
        return Ok(ExitCode::SUCCESS);
    }
    daemon::run(
        &options,
        |event| {
            let level = if event.is_warning() { "warning: " } else { "" };
            say(&format!("tidegate: {level}{event}"));
        },
        |node, addr| say(&format!("tidegate: node `{node}` runs, reached at {addr}")),
    )?;
    Ok(ExitCode::SUCCESS)
}

/// A group of the file.
#[derive(Serialize)]
pub struct GroupJson<'a> {
    name: &'a str,
    algorithm: &'static str,
    rate_bit_s: u64,
    /// What a host may use that hears of nobody.
    alone_bit_s: u64,
    direction: &'static str,
    members: &'a [String],
    hosts: u32,
    interval_ns: u64,
    line: usize,
}

impl<'a> From<&'a GroupSpec> for GroupJson<'a> {
    fn from(group: &'a GroupSpec) -> GroupJson<'a> {
        GroupJson {
            name: &group.name,
            algorithm: group.algorithm.name(),
            rate_bit_s: group.rate.bit_s(),
            alone_bit_s: group.alone_bit_s(),
            direction: match group.direction {
                Direction::Egress => "egress",
                Direction::Ingress => "ingress",
            },
            members: &group.members,
            hosts: group.hosts,
            interval_ns: group.interval.0,
            line: group.line,
        }
    }
}

#[derive(Serialize)]
pub struct GroupPlanJson<'a> {
    name: &'a str,
    /// A daemon runs that has the group as the file says.
    in_force: bool,
}

/// The groups of a file, beside what the daemon of the file has, if one runs.
pub struct Groups<'a> {
    spec: &'a Spec,
    running: Option<NodeStatus>,
    why: Option<String>,
}

impl<'a> Groups<'a> {
    /// Asks the daemon; after an `apply` it reads its file again first.
    pub fn look(spec: &'a Spec, applied: bool) -> Groups<'a> {
        let mut groups = Groups { spec, running: None, why: None };
        let Some(fleet) = &spec.fleet else { return groups };
        let asked = api::status(&fleet.api).and_then(|running| match running {
            Some(running) if applied && same_file(&running.file, &spec.file) => {
                api::reload(&fleet.api)?;
                api::status(&fleet.api)
            }
            other => Ok(other),
        });
        match asked {
            Ok(running) => groups.running = running,
            Err(e) => groups.why = Some(e.to_string()),
        }
        groups
    }

    fn in_force(&self, group: &GroupSpec) -> bool {
        let groups = self.running.iter().flat_map(|running| &running.groups);
        let mut groups = groups.filter(|is| is.name == group.name);
        groups
            .any(|is| is.rate_bit_s == group.rate.bit_s() && is.algorithm == group.algorithm.name())
    }

    pub fn json(&self) -> Vec<GroupPlanJson<'a>> {
        let of = |group: &'a GroupSpec| GroupPlanJson {
            name: &group.name,
            in_force: self.in_force(group),
        };
        self.spec.groups.iter().map(of).collect()
    }

    /// What is true of the groups, which no `apply` can put in force.
    pub fn print(&self, out: &mut impl Write) -> io::Result<()> {
        for group in &self.spec.groups {
            let limits = match &group.members[..] {
                [] => "no limits here".to_owned(),
                members => members.join(", "),
            };
            let start = format!(
                "{limits}: no daemon has it, and its limits keep the rates that they have; start `tidegate \
                 daemon {}`",
                self.spec.file
            );
            let what = match (&self.running, &self.why) {
                (_, Some(why)) => format!("{limits}: the daemon cannot be asked: {why}"),
                (Some(running), _) if self.in_force(group) => {
                    let node = &running.node;
                    writeln!(out, "  group `{}` ({limits}): in force, node `{node}`", group.name)?;
                    continue;
                }
                (Some(running), _) => format!(
                    "{limits}: the daemon (process {}) runs by {} and has it otherwise; have it read this \
                     file",
                    running.pid, running.file
                ),
                (None, None) => start,
            };
            writeln!(
                out,
                "{}",
                Paint::stdout().yellow(&format!("! group `{}`: {what}", group.name))
            )?;
        }
        Ok(())
    }
}

fn same_file(running: &str, file: &str) -> bool {
    let real = |path: &str| Path::new(path).canonicalize().ok();
    real(running).is_some_and(|running| real(file) == Some(running))
}

/// A daemon that runs; one that cannot be asked is said on standard error.
pub fn running(socket: &Path) -> Option<NodeStatus> {
    api::status(socket).unwrap_or_else(|e| {
        say(&format!("tidegate: warning: {e}"));
        None
    })
}

/// The groups of a daemon, each with what every host has of it.
pub fn print(out: &mut impl Write, node: &NodeStatus) -> io::Result<()> {
    let up = node.peers.iter().filter(|peer| peer.up).count();
    let peers = match &node.peers[..] {
        [] => "no peers".to_owned(),
        peers => format!("{up} of {} peers up", peers.len()),
    };
    writeln!(out, "\nNode `{}` of fleet `{}`: {peers}", node.node, node.cluster)?;
    let rows: Vec<_> = node.groups.iter().flat_map(|group| rows(node, group)).collect();
    if !rows.is_empty() {
        output::table(out, Paint::stdout(), &COLUMNS, &rows)?;
    }
    for alert in &node.alerts {
        writeln!(out, "{}", Paint::stdout().red(&format!("WARNING: {alert}")))?;
    }
    Ok(())
}

fn rows(node: &NodeStatus, group: &GroupStatus) -> Vec<Vec<String>> {
    let time = |ns: u64| output::time(i64::try_from(ns).unwrap_or(i64::MAX));
    let drops = group.drop_probability.map(|p| format!(", drops {:.1} %", p * 100.0));
    let own = vec![
        group.name.clone(),
        group.algorithm.clone(),
        format!("{}{}", group.state.replace('_', " "), drops.unwrap_or_default()),
        node.node.clone(),
        output::rate(group.rate_bit_s),
        output::rate(group.share_bit_s),
        output::rate(group.demand_bit_s),
        "-".to_owned(),
    ];
    let member = |member: &tidegate_fleet::status::MemberStatus| {
        let empty = String::new;
        vec![
            empty(),
            empty(),
            if member.differs { "OTHER SETTINGS".to_owned() } else { empty() },
            member.node.clone(),
            empty(),
            output::rate(member.share_bit_s),
            output::rate(member.demand_bit_s),
            time(member.age_ns),
        ]
    };
    std::iter::once(own).chain(group.members.iter().map(member)).collect()
}
