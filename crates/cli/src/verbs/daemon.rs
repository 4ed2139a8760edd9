//! `tidegate daemon`, and what other verbs say of its groups.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use serde::Serialize;
use tidegate_core::Rate;
use tidegate_fleet::{
    api,
    daemon::{self, DaemonOptions},
    http::HttpError,
    keys::KeyRing,
    status::{GroupStatus, NodeStatus},
};
use tidegate_host::{
    fleet::{FleetSpec, GroupSpec},
    settings::Difference,
    spec::Spec,
};

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
            direction: group.direction.name(),
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
    /// The daemon does this with it when it reads the file, or has done so.
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<&'static str>,
    #[serde(skip_serializing_if = "<[Difference]>::is_empty")]
    differences: &'a [Difference],
}

/// How a group of the running daemon differs from the file.
struct Change {
    name: String,
    /// `add`, `change` or `remove`, as for limits.
    verb: &'static str,
    differences: Vec<Difference>,
}

/// The groups of a file, beside what the daemon of the file has, if one runs.
pub struct Groups<'a> {
    spec: &'a Spec,
    running: Option<NodeStatus>,
    why: Option<String>,
    changes: Vec<Change>,
    applied: bool,
    /// Why the daemon does not take the file.
    pub refused: Option<String>,
}

impl<'a> Groups<'a> {
    /// Asks the daemon; after an `apply` it reads its file again.
    pub fn look(spec: &'a Spec, applied: bool) -> Groups<'a> {
        let (running, why, changes, refused) = (None, None, Vec::new(), None);
        let mut groups = Groups { spec, running, why, changes, applied, refused };
        if let Some(fleet) = &spec.fleet
            && let Err(e) = groups.ask(fleet, applied)
        {
            groups.why = Some(e.to_string());
        }
        groups
    }

    fn ask(&mut self, fleet: &FleetSpec, applied: bool) -> Result<(), HttpError> {
        self.running = api::status(&fleet.api)?;
        let Some(running) = &self.running else { return Ok(()) };
        // One that waits has no groups yet.
        if running.up_ns == 0 || !same_file(&running.file, &self.spec.file) {
            return Ok(());
        }
        let changes = changes(self.spec, fleet, running);
        if applied {
            match api::reload(&fleet.api) {
                Err(HttpError::Refused { why, .. }) => {
                    self.refused = Some(why);
                    return Ok(());
                }
                done => drop(done?),
            }
            self.running = api::status(&fleet.api)?;
        }
        // One that has ended meanwhile has none.
        self.changes = if self.running.is_some() { changes } else { Vec::new() };
        Ok(())
    }

    fn in_force(&self, group: &GroupSpec) -> bool {
        let (Some(fleet), Some(running)) = (&self.spec.fleet, &self.running) else { return false };
        let is = running.groups.iter().find(|is| is.name == group.name);
        is.is_some_and(|is| differences(self.spec, fleet, group, is).is_empty())
    }

    /// The names of the groups that change, by what is done with them.
    pub fn changed(&self, verb: &str) -> impl Iterator<Item = &str> {
        let changes = self.changes.iter().filter(move |change| change.verb == verb);
        changes.map(|change| &change.name[..])
    }

    fn changes(&self, group: &str) -> Option<&Change> {
        self.changes.iter().find(|change| change.name == group)
    }

    /// Whether the daemon has them as the file says, or is not the file's.
    pub fn is_same(&self) -> bool {
        self.changes.is_empty()
    }

    pub fn json(&self) -> Vec<GroupPlanJson<'_>> {
        let groups = self.spec.groups.iter().map(|group| (&group.name[..], self.in_force(group)));
        let all = groups.chain(self.changed("remove").map(|name| (name, false)));
        let of = |(name, in_force)| {
            let change = self.changes(name);
            GroupPlanJson {
                name,
                in_force,
                action: change.map(|change| change.verb),
                differences: change.map_or(&[], |change| &change.differences),
            }
        };
        all.map(of).collect()
    }

    /// Prints the changes that the daemon makes when it reads the file, or has made.
    pub fn print_changes(&self, out: &mut impl Write) -> io::Result<()> {
        let paint = Paint::stdout();
        for Change { name, verb, differences } in &self.changes {
            let line = match *verb {
                "add" => paint.green(&format!("+ group `{name}`")),
                "remove" => paint.red(&format!("- group `{name}` (not in the file)")),
                _ => {
                    let all: Vec<_> = differences.iter().map(ToString::to_string).collect();
                    let all = all.join(", ");
                    paint.yellow(&format!("~ group `{name}`: {all}"))
                }
            };
            writeln!(out, "{line}")?;
        }
        Ok(())
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
                _ if !self.applied && self.changes(&group.name).is_some() => continue,
                (Some(running), _) if self.refused.is_some() => {
                    format!("{limits}: the daemon (process {}) refused this file", running.pid)
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

fn changes(spec: &Spec, fleet: &FleetSpec, running: &NodeStatus) -> Vec<Change> {
    let of = |group: &GroupSpec| {
        let name = group.name.clone();
        let Some(is) = running.groups.iter().find(|is| is.name == name) else {
            return Some(Change { name, verb: "add", differences: Vec::new() });
        };
        let differences = differences(spec, fleet, group, is);
        (!differences.is_empty()).then_some(Change { name, verb: "change", differences })
    };
    let is_gone = |is: &&GroupStatus| !spec.groups.iter().any(|group| group.name == is.name);
    let ends = running.groups.iter().filter(is_gone).map(|is| Change {
        name: is.name.clone(),
        verb: "remove",
        differences: Vec::new(),
    });
    spec.groups.iter().filter_map(of).chain(ends).collect()
}

/// The settings in which the daemon's group differs from the file.
fn differences(
    spec: &Spec,
    fleet: &FleetSpec,
    group: &GroupSpec,
    is: &GroupStatus,
) -> Vec<Difference> {
    let (mut from, mut to) = (is.settings.clone(), group.settings(fleet));
    if from.is_empty() {
        // A daemon of an earlier version says no more.
        let rate = Rate::from_bit_s(is.rate_bit_s).map(|rate| rate.to_string());
        from = [("rate", rate.unwrap_or_default()), ("algorithm", is.algorithm.clone())]
            .map(|(field, text)| (field.to_owned(), text))
            .into();
        to.retain(|field, _| from.contains_key(field));
    }
    let none = || "none".to_owned();
    let fields: BTreeSet<_> = to.keys().chain(from.keys()).collect();
    let settings = fields.into_iter().map(|field| {
        let text = |of: &BTreeMap<_, String>| of.get(field).cloned().unwrap_or_else(none);
        Difference { field: field.clone(), from: text(&from), to: text(&to) }
    });
    let caps = is.limits.iter().filter_map(|limit| {
        let to = spec.limits.iter().find(|one| one.name == limit.limit)?;
        let to = to.options.queue(group.direction)?.rate;
        Some(Difference {
            field: format!("{} of {}", group.direction.name(), limit.limit),
            from: output::rate(limit.ceiling_bit_s),
            to: output::rate(to.bit_s()),
        })
    });
    settings.chain(caps).filter(|d| d.from != d.to).collect()
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
