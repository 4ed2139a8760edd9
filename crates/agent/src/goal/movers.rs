//! Which limit moves a process that several match (`move = true`).

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
};

use tidegate_core::{
    Scope,
    class::MAX_DEPTH,
    selector::{Selector, SelectorKind},
};
use tidegate_host::{
    spec::LimitSpec,
    world::{Program, World},
};

use super::own_cgroup;

/// The limits that move processes, by process, in the order of the files.
#[derive(Debug, Default)]
pub struct Movers {
    by_pid: BTreeMap<u32, Vec<String>>,
    parents: BTreeMap<String, String>,
}

impl Movers {
    /// Finds the movers among the limits of all files.
    pub fn of<'a>(limits: impl Iterator<Item = &'a LimitSpec>, world: &World) -> Movers {
        let mut movers = Movers::default();
        for limit in limits {
            movers
                .parents
                .extend(limit.parent.iter().map(|parent| (limit.name.clone(), parent.clone())));
            let Some(selector) = moved_by(limit) else { continue };
            let pids: BTreeSet<_> = world.matching(&selector.value).map(|one| one.pid).collect();
            for pid in pids {
                movers.by_pid.entry(pid).or_default().push(limit.name.clone());
            }
        }
        movers
    }

    /// The cgroup for a process that a limit matches, and whether it is to be moved there for this limit. Of
    /// limits one inside the other the innermost moves it, and all are on its cgroup. Of others the first has
    /// it; the error names both.
    pub fn cgroup_for(&self, limit: &str, program: &Program) -> Result<(String, bool), String> {
        let matching = self.by_pid.get(&program.pid).map_or(&[][..], Vec::as_slice);
        let first = matching.first().map_or(limit, String::as_str);
        let owner =
            matching.iter().fold(first, |owner, other| match self.is_inside(other, owner) {
                true => other,
                false => owner,
            });
        if !self.is_inside(owner, limit) {
            return Err(format!(
                "limits `{owner}` and `{limit}` both match process {} ({}); `{owner}`, which comes first, \
                 has it",
                program.pid, program.exe
            ));
        }
        let into = own_place(owner, matching, &program.cgroup);
        let is_there = program.cgroup == into || program.cgroup.starts_with(&format!("{into}/"));
        Ok((into, owner == limit && !is_there))
    }

    /// Whether a limit is another one, or inside it.
    fn is_inside(&self, inner: &str, outer: &str) -> bool {
        let above = |name: &&str| self.parents.get(*name).map(String::as_str);
        iter::successors(Some(inner), above).take(MAX_DEPTH).any(|name| name == outer)
    }
}

/// The selector of a limit that moves what it matches.
pub fn moved_by(limit: &LimitSpec) -> Option<&Selector> {
    match &limit.scope {
        Scope::Select(selector) if limit.follow.moves && selector.kind == SelectorKind::Exe => {
            Some(selector)
        }
        _ => None,
    }
}

/// The limit's own cgroup next to where a process is. It may be in that already, or in a cgroup that it has
/// made below that. Those of other limits that match it do not count as where it is.
fn own_place(owner: &str, matching: &[String], cgroup: &str) -> String {
    let own = own_cgroup(owner);
    let mut parts: Vec<_> = cgroup.split('/').filter(|part| !part.is_empty()).collect();
    match parts.iter().position(|part| *part == own) {
        Some(at) => parts.truncate(at),
        None => {
            while parts
                .last()
                .is_some_and(|last| matching.iter().any(|name| own_cgroup(name) == *last))
            {
                parts.pop();
            }
        }
    }
    parts.push(&own);
    parts.join("/")
}
