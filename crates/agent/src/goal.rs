//! What the limits of a host shall be at a moment: the files, what runs on the host, and the time give it.
//! Pure.
//!
//! Each limit of the files has a state. One that cannot be, waits or is refused alone: the others are not
//! touched. Of two limits that match one cgroup the first, in the order of the files, has it, unless one is
//! inside the other.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{Timestamp, Zoned};
use tidegate_core::{
    Scope,
    choice::Kernel,
    fnv,
    scope::shown,
    selector::{Selector, SelectorKind},
};
use tidegate_host::{
    absent::{self, Waits},
    auto::Trees,
    plan::{Present, Wanted},
    pods::{Pods, pod_cgroup},
    select,
    settings::{Patch, SettingsError},
    spec::{Follow, LimitSpec, Scheduled, Spec},
    tree::{Parents, are_strangers},
    world::{Found, Match, Shared, World, user_of},
};
use tidegate_sys::store::{MAX_LIMITS, check_name};

use crate::report::{LEFT_OUT_MAX, LimitReport, LimitState};
use movers::{Movers, moved_by};

mod annotations;
mod labels;
mod movers;

/// The longest name of a limit, as the store has it.
const MAX_NAME_BYTES: usize = 63;

/// The files of the agent's directory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Files {
    /// Those that can be read, in the order of their names.
    pub specs: Vec<Spec>,
    /// What is wrong with them, a sentence each.
    pub errors: Vec<String>,
}

impl Files {
    /// Whether one of their limits has a selector of these kinds.
    pub fn select(&self, kinds: &[SelectorKind]) -> bool {
        self.specs.iter().flat_map(|spec| &spec.limits).any(|limit| {
            matches!(&limit.scope, Scope::Select(selector) if kinds.contains(&selector.kind))
        })
    }

    /// Whether containers are to be known.
    pub fn ask_for_containers(&self) -> bool {
        let kinds = [SelectorKind::Container, SelectorKind::Labels];
        self.select(&kinds) || self.specs.iter().any(|spec| spec.labels)
    }

    /// Whether pods are to be known.
    pub fn ask_for_pods(&self) -> bool {
        self.select(&[SelectorKind::Pod]) || self.specs.iter().any(|spec| spec.annotations)
    }
}

/// A limit that can be now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GoalLimit {
    /// As written, with the rates of this moment; of `each` with the name of its match.
    pub limit: LimitSpec,
    /// The file that has it.
    pub file: String,
    /// Its cgroups, each with its id; none for a device.
    pub cgroups: Vec<(String, u64)>,
    /// The number of its device, if that is known: one that is made again has another.
    pub device: Option<u32>,
}

impl GoalLimit {
    /// The paths of its cgroups.
    pub fn members(&self) -> Vec<String> {
        self.cgroups.iter().map(|(path, _)| path.clone()).collect()
    }
}

/// Gives the limits that select their cgroups those that the goal has found. One on containers keeps those of
/// its cgroups whose engine has not told of them yet: another may have answered already.
pub fn set_members(goal: &Goal, present: &[Present], wanted: &mut [Wanted]) {
    let goals: BTreeMap<_, _> =
        goal.limits.iter().map(|goal| (goal.limit.name.as_str(), goal)).collect();
    for limit in wanted {
        let Scope::Select(Selector { kind, .. }) = limit.scope else { continue };
        let Some(goal_limit) = goals.get(limit.name.as_str()) else { continue };
        limit.members = goal_limit.members();
        let is = present.iter().find(|is| is.name == limit.name && is.scope == limit.scope);
        if let (SelectorKind::Container, Some(is)) = (kind, is) {
            let kept = is.members.iter().filter(|path| goal.unlisted.contains(*path));
            limit.members.extend(kept.cloned());
        }
    }
}

/// A process that is to be moved into a cgroup of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    pub pid: u32,
    /// The cgroup, which may not exist yet.
    pub into: String,
}

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Goal {
    /// To be in force, in the order of the files.
    pub limits: Vec<GoalLimit>,
    /// Every limit of the files, with its state as far as it is known before it is put on.
    pub reports: Vec<LimitReport>,
    /// Those that wait, with what they wait for.
    pub waiting: Vec<Waits>,
    /// Names of limits that are taken off: those that have no rate at this time, those whose cgroup an
    /// earlier limit has, and those inside one of these.
    pub off: BTreeSet<String>,
    pub moves: Vec<Move>,
    /// It asks for pods, and which there are is not known yet: limits that it does not have may be theirs.
    pub unsure: bool,
    /// Cgroups of containers that no engine has listed, if it asks for containers: a limit on one of them may
    /// be its own.
    pub unlisted: BTreeSet<String>,
    /// When a schedule may say otherwise.
    pub next: Option<Timestamp>,
}

impl Goal {
    /// The names that stay as they are, if they are on the host: those that wait or are refused.
    pub fn kept(&self) -> impl Iterator<Item = &LimitReport> {
        let kept = [LimitState::Waiting, LimitState::Refused];
        // One of another file may have the name.
        let in_force: BTreeSet<_> = self.limits.iter().map(|goal| &goal.limit.name).collect();
        let is_kept = move |report: &&LimitReport| {
            let has_name = self.off.contains(&report.name) || in_force.contains(&report.name);
            kept.contains(&report.state) && !has_name
        };
        self.reports.iter().filter(is_kept)
    }

    /// Whether the files have a limit of this name that is not off.
    pub fn has(&self, name: &str) -> bool {
        !self.off.contains(name) && self.reports.iter().any(|report| report.name == name)
    }

    /// Whether nobody asks any more for a limit on these cgroups.
    pub fn is_over<'a>(&self, name: &str, mut on: impl Iterator<Item = &'a str>) -> bool {
        !self.has(name) && !self.unsure && !on.any(|path| self.unlisted.contains(path))
    }
}

/// The name of the cgroup into which the processes of a program are moved.
pub fn own_cgroup(limit: &str) -> String {
    format!("tidegate.{limit}")
}

/// What the files ask for. O(limits × cgroups).
pub fn goal(files: &Files, world: &World, now: &Zoned) -> Goal {
    let (goal, names) = (Goal::default(), BTreeMap::new());
    let moments: Vec<_> = files.specs.iter().map(|spec| (spec, spec.at(now))).collect();
    let known = moments.iter().filter_map(|(_, moment)| moment.as_ref().ok());
    let movers = Movers::of(known.flat_map(|moment| &moment.spec.limits), world);
    let mut builder = Builder { world, goal, names, movers, scheduled: None, guest: false };
    for (spec, moment) in moments {
        match moment {
            Ok(moment) => {
                builder.goal.next = builder.goal.next.into_iter().chain(moment.next).min();
                for limit in moment.off {
                    builder.scheduled = moment.scheduled.get(&limit.name).cloned();
                    builder.off(&spec.file, limit);
                }
                for limit in moment.spec.limits {
                    builder.scheduled = moment.scheduled.get(&limit.name).cloned();
                    builder.limit(&spec.file, limit);
                }
                builder.scheduled = None;
            }
            // A row was checked when the file was read.
            Err(error) => builder.all_refused(spec, &error.to_string()),
        }
    }
    builder.guest = true;
    let labels = files.specs.iter().find(|spec| spec.labels);
    if let Some(spec) = labels {
        builder.by_labels(&spec.file, |owner| owner.is_none());
    }
    if let Some(spec) = files.specs.iter().find(|spec| spec.annotations) {
        builder.by_annotations(&spec.file);
    }
    // Last, as names are bounded.
    if let Some(spec) = labels {
        builder.by_labels(&spec.file, |owner| owner.is_some());
    }
    builder.goal.unsure = files.ask_for_pods() && world.pods == Pods::NotListed;
    if files.ask_for_containers() {
        // No engine tells of the containers of a pod.
        let paths = world.cgroups.keys().filter(|path| pod_cgroup(path).is_none());
        builder.goal.unlisted = paths.filter(|path| world.is_unlisted(path)).cloned().collect();
    }
    builder.conflicts();
    builder.with_parents();
    for report in &mut builder.goal.reports {
        report.guest &= report.state == LimitState::Refused;
    }
    builder.goal
}

struct Builder<'a> {
    world: &'a World,
    goal: Goal,
    /// The file of each name.
    names: BTreeMap<String, String>,
    movers: Movers,
    /// The schedule of the limit at hand, at this moment.
    scheduled: Option<Scheduled>,
    /// Whether containers and pods ask for the limits at hand themselves.
    guest: bool,
}

impl Builder<'_> {
    fn report(&mut self, file: &str, limit: &LimitSpec, state: LimitState, reason: Option<String>) {
        let (row, change) = match self.scheduled.clone() {
            Some(Scheduled { row, change }) => (row, change),
            None => (None, None),
        };
        let (when, rates) = change.unzip();
        self.goal.reports.push(LimitReport {
            name: limit.name.clone(),
            file: file.to_owned(),
            scope: limit.scope.to_string(),
            state,
            reason,
            stays: false,
            guest: self.guest,
            required: limit.follow.required,
            schedule: row,
            next_change: when.map(|when| when.strftime("%Y-%m-%dT%H:%M%:z").to_string()),
            next_rates: rates,
            cgroups: Vec::new(),
            left_out: Vec::new(),
        });
    }

    fn refuse(&mut self, file: &str, limit: &LimitSpec, reason: String) {
        self.report(file, limit, LimitState::Refused, Some(reason));
    }

    fn waits(&mut self, file: &str, limit: LimitSpec, reason: String) {
        self.report(file, &limit, LimitState::Waiting, Some(reason));
        self.goal.waiting.push(Waits { name: limit.name, scope: limit.scope, parent: None });
    }

    fn all_refused(&mut self, spec: &Spec, reason: &str) {
        for limit in &spec.limits {
            self.refuse(&spec.file, limit, reason.to_owned());
        }
    }

    /// Takes a name; the reason if another file has it.
    fn name(&mut self, file: &str, name: &str) -> Result<(), String> {
        match self.names.get(name) {
            Some(other) => Err(format!("{other} has a limit of this name; give each its own name")),
            None if self.names.len() == MAX_LIMITS => Err(format!("more than {MAX_LIMITS} limits")),
            None => {
                self.names.insert(name.to_owned(), file.to_owned());
                Ok(())
            }
        }
    }

    fn off(&mut self, file: &str, limit: LimitSpec) {
        match self.name(file, &limit.name) {
            Err(reason) => self.refuse(file, &limit, reason),
            Ok(()) => {
                self.report(
                    file,
                    &limit,
                    LimitState::Off,
                    Some("its schedule has no rate now".to_owned()),
                );
                if limit.follow.each
                    && let Ok((Found { matches, .. }, _)) = self.matches(&limit)
                {
                    let names = names_of_each(&limit.name, &matches);
                    let own = names.into_iter().filter(|name| self.name(file, name).is_ok());
                    let own: Vec<_> = own.collect();
                    self.goal.off.extend(own);
                }
                self.goal.off.insert(limit.name);
            }
        }
    }

    fn limit(&mut self, file: &str, limit: LimitSpec) {
        if let Err(reason) = self.name(file, &limit.name) {
            return self.refuse(file, &limit, reason);
        }
        if limit.scope.is_device() {
            if self.world.devices.get(limit.scope.name()) == Some(&None) {
                let reason = absent::missing(&limit.scope, &self.world.users);
                return self.waits(file, limit, reason);
            }
            return self.add(file, limit, Vec::new(), &[]);
        }
        let (Found { mut matches, shared }, is_moved) = match self.matches(&limit) {
            Ok((found, moves)) => {
                let is_moved = !moves.is_empty();
                self.goal.moves.extend(moves);
                (found, is_moved)
            }
            Err(reason) => return self.refuse(file, &limit, reason),
        };
        if matches.is_empty() && !shared.is_empty() {
            // Any user may run the program beside others, as in a session.
            return match shared.iter().all(|shared| user_of(&shared.cgroup).is_some()) {
                true => self.waits(file, limit, shared_words(&shared)),
                false => self.refuse(file, &limit, shared_words(&shared)),
            };
        }
        if matches.is_empty() {
            let reason = match is_moved {
                true => format!("{} is yet to be moved into a cgroup of its own", limit.scope),
                false => self.missing(&limit.scope),
            };
            return self.waits(file, limit, reason);
        }
        if !limit.follow.each {
            return self.add(file, limit, select::outermost(matches), &shared);
        }
        // Users name what is theirs. It takes no name of the host's.
        matches.sort_by_key(|found| user_of(&found.cgroup).is_some());
        let names = names_of_each(&limit.name, &matches);
        // It is said once.
        let mut shared = shared.as_slice();
        for (name, found) in names.into_iter().zip(matches) {
            let scope = Scope::Cgroup(found.cgroup.clone());
            let one = LimitSpec { name, scope, ..limit.clone() };
            match self.name(file, &one.name) {
                Ok(()) => self.add(file, one, vec![found], std::mem::take(&mut shared)),
                Err(reason) => self.refuse(file, &one, reason),
            }
        }
    }

    /// Why a limit waits that matches nothing.
    fn missing(&self, scope: &Scope) -> String {
        let missing = absent::nothing_on(scope, &self.world.users);
        if !matches!(scope, Scope::Select(selector) if selector.kind == SelectorKind::Pod) {
            // As where systemd has version 1 alone.
            return match self.world.cgroups.keys().all(String::is_empty) {
                true => {
                    format!(
                        "{missing}; no service has a cgroup of version 2 here: see `tidegate doctor`"
                    )
                }
                false => missing,
            };
        }
        match (&self.world.pods, self.world.unknown_pods()) {
            (Pods::NotAsked, _) => absent::missing(scope, &self.world.users),
            (Pods::NotListed, _) => {
                "the API server has not listed the pods of this node yet".to_owned()
            }
            (Pods::Known(_), 0) => missing,
            (Pods::Known(_), n) => format!("{missing}; {n} pods here are not known yet"),
        }
    }

    /// The cgroups of a limit, and processes that are to be moved for it.
    fn matches(&self, limit: &LimitSpec) -> Result<(Found, Vec<Move>), String> {
        let Some(selector) = moved_by(limit) else {
            if limit.follow.moves {
                return Err("only programs are moved".to_owned());
            }
            return Ok((self.world.cgroups_of(&limit.scope), Vec::new()));
        };
        let (mut found, mut moves) = (BTreeSet::new(), Vec::new());
        for program in self.world.matching(&selector.value) {
            let (into, is_moved) = self.movers.cgroup_for(&limit.name, program)?;
            if is_moved {
                moves.push(Move { pid: program.pid, into: into.clone() });
            }
            if self.world.cgroups.contains_key(&into) {
                let name = program.exe.rsplit('/').next().unwrap_or_default().to_owned();
                found.insert(Match { name, cgroup: into });
            }
        }
        let matches = found.into_iter().collect();
        Ok((Found { matches, shared: Vec::new() }, moves))
    }

    /// Has a limit be in force on what it matches; but not where others share a cgroup with its program.
    fn add(&mut self, file: &str, limit: LimitSpec, matches: Vec<Match>, shared: &[Shared]) {
        let reason = (!shared.is_empty()).then(|| {
            let cgroups = if shared.len() == 1 { "cgroup" } else { "cgroups" };
            format!("not on {} {cgroups}: {}", shared.len(), shared_words(shared))
        });
        self.report(file, &limit, LimitState::InForce, reason);
        let id = |path: &str| self.world.cgroups.get(path).copied().unwrap_or_default();
        let cgroups: Vec<_> =
            matches.into_iter().map(|found| (found.cgroup.clone(), id(&found.cgroup))).collect();
        if let Some(report) = self.goal.reports.last_mut() {
            report.cgroups = cgroups.iter().map(|(path, _)| path.clone()).collect();
            let shared = shared.iter().take(LEFT_OUT_MAX);
            report.left_out = shared.map(|shared| shared.cgroup.clone()).collect();
        }
        let device = limit.scope.is_device().then(|| self.world.devices.get(limit.scope.name()));
        let device = device.flatten().copied().flatten();
        self.goal.limits.push(GoalLimit { limit, file: file.to_owned(), cgroups, device });
    }

    /// Each limit that can be, with the name of its parent.
    fn parents(&self) -> Parents<'_> {
        let limits = self.goal.limits.iter().map(|goal| &goal.limit);
        limits.map(|limit| (limit.name.as_str(), limit.parent.as_deref())).collect()
    }

    /// Refuses limits on a cgroup that an earlier one has, unless one is inside the other. They are taken
    /// off, as the earlier one could not be put on beside them.
    fn conflicts(&mut self) {
        let parents = self.parents();
        // Of a tree that goes on in a limit of no file only the plan can tell.
        let mut by_cgroup: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut refused = BTreeMap::new();
        for GoalLimit { limit, cgroups, .. } in &self.goal.limits {
            let is_in_the_way = |other: &&&str| are_strangers(other, &limit.name, &parents);
            let first = |path: &str| by_cgroup.get(path)?.iter().find(is_in_the_way).copied();
            let found = cgroups.iter().find_map(|(path, _)| Some((path, first(path)?)));
            if let Some((path, first)) = found {
                let reason = format!(
                    "limits `{first}` and `{}` both match cgroup `{}`; `{first}`, which comes first, \
                     has it",
                    limit.name,
                    shown(path)
                );
                refused.insert(limit.name.clone(), reason);
                continue;
            }
            for (path, _) in cgroups {
                by_cgroup.entry(path).or_default().push(&limit.name);
            }
        }
        self.give_up(LimitState::Refused, &refused);
        self.goal.off.extend(refused.into_keys());
    }

    /// Has limits wait whose parent does.
    fn with_parents(&mut self) {
        loop {
            let absent: BTreeSet<_> = self.goal.kept().map(|report| report.name.clone()).collect();
            let (mut waits, mut off) = (BTreeMap::new(), Vec::new());
            for GoalLimit { limit, .. } in &self.goal.limits {
                let Some(parent) = &limit.parent else { continue };
                if self.goal.off.contains(parent) {
                    off.push(limit.name.clone());
                } else if !absent.contains(parent) {
                    continue;
                }
                let reason = format!("its parent `{parent}` waits or is refused");
                waits.insert(limit.name.clone(), reason);
            }
            if waits.is_empty() {
                break;
            }
            self.goal.off.extend(off);
            self.give_up(LimitState::Waiting, &waits);
        }
        let off = &self.goal.off;
        self.goal.waiting.retain(|waits| !off.contains(&waits.name));
    }

    fn give_up(&mut self, state: LimitState, names: &BTreeMap<String, String>) {
        let (kept, given_up) = std::mem::take(&mut self.goal.limits)
            .into_iter()
            .partition::<Vec<_>, _>(|goal| !names.contains_key(&goal.limit.name));
        self.goal.limits = kept;
        if state == LimitState::Waiting {
            self.goal.waiting.extend(given_up.into_iter().map(|GoalLimit { limit, .. }| Waits {
                name: limit.name,
                scope: limit.scope,
                parent: limit.parent,
            }));
        }
        for report in self.goal.reports.iter_mut().filter(|r| r.state == LimitState::InForce) {
            if let Some(reason) = names.get(&report.name) {
                (report.state, report.reason) = (state, Some(reason.clone()));
            }
        }
    }
}

/// Why a limit on a program is not on these cgroups, and what to do.
fn shared_words(shared: &[Shared]) -> String {
    let one =
        |Shared { cgroup, other }: &Shared| format!("`{other}` in cgroup `{}`", shown(cgroup));
    let mut named: Vec<_> = shared.iter().take(LEFT_OUT_MAX).map(one).collect();
    let more = shared.len() - named.len();
    if more > 0 {
        named.push(format!("those in {more} more"));
    }
    format!(
        "other programs would be limited, too: {}; limit the cgroup, or write move = true to have the \
         processes of the program moved into one of their own",
        named.join(", ")
    )
}

/// A limit without rates.
fn blank(name: &str) -> Result<LimitSpec, String> {
    check_name(name).map_err(|e| e.to_string())?;
    Ok(LimitSpec {
        name: name.to_owned(),
        scope: Scope::Cgroup(String::new()),
        options: tidegate_sys::limit::LimitOptions::default(),
        parent: None,
        asked: tidegate_host::settings::Asked::default(),
        patch: Patch::default(),
        follow: Follow::default(),
        line: 0,
    })
}

/// Sets the options of a limit from its rates.
fn set_options(limit: &mut LimitSpec) -> Result<(), SettingsError> {
    limit.asked = limit.patch.asked();
    let mut trees = Trees::default();
    trees.add(&limit.name, false, limit.parent.as_deref());
    limit.options = limit.written().options(&trees, Kernel::WHOLE, None)?;
    Ok(())
}

/// A name for each match: `NAME-MATCH`. Letters that no name has become `_`, and long ones are cut. Where two
/// would be the same, or something is lost by the cut, a hash of the cgroup's path makes each its own.
/// A cgroup in a user's slice changes the name of no other one.
fn names_of_each(limit: &str, matches: &[Match]) -> Vec<String> {
    let plain = |found: &Match| {
        let good = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
        format!("{limit}-{}", found.name.chars().map(good).collect::<String>())
    };
    let is_users = |found: &Match| user_of(&found.cgroup).is_some();
    // All of a name, and those among them that no user has named.
    let mut count: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for found in matches {
        let (all, host) = count.entry(plain(found)).or_default();
        (*all, *host) = (*all + 1, *host + usize::from(!is_users(found)));
    }
    let name = |found: &Match| {
        let plain = plain(found);
        let (all, host) = count.get(&plain).copied().unwrap_or_default();
        let is_own = if is_users(found) { all == 1 } else { host == 1 };
        let is_good = is_own && plain.len() <= MAX_NAME_BYTES;
        if is_good { plain } else { hashed(&plain, &found.cgroup) }
    };
    matches.iter().map(name).collect()
}

/// A name with a hash at its end.
fn hashed(name: &str, of: &str) -> String {
    let hash = fnv(of.bytes());
    let hash = format!("-{:08x}", hash >> 32 ^ hash & 0xffff_ffff);
    let kept: String = name.chars().take(MAX_NAME_BYTES - hash.len()).collect();
    kept + &hash
}

#[cfg(test)]
mod tests;
