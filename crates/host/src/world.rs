//! What runs on a host, and which cgroups of it a selector matches. Pure: cgroups, containers, programs and
//! users are read elsewhere.
//!
//! - A unit or slice of the system manager is a directory of its name with nothing but slices above it. What
//!   a user's manager or a container calls so is another thing.
//! - A user is the slice `user.slice/user-UID.slice`.
//! - A container is the outermost directory whose name has its id, whoever made it; one in a user's slice
//!   counts for a container of the host only if there is no other:
//!
//! ```text
//! docker/ID                       Docker, driver cgroupfs
//! system.slice/docker-ID.scope    Docker, driver systemd
//! machine.slice/libpod-ID.scope   Podman; [/container] below it
//! libpod_parent/libpod-ID         Podman, driver cgroupfs
//! system.slice/web.service/libpod-payload-ID                Podman in a unit (--cgroups=split)
//! user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope       rootless
//! kubepods.slice/.../crio-ID.scope, cri-containerd-ID.scope, kubepods/.../ID
//! ```
//!
//! - Pods are in [`crate::pods`].
//! - A program is those cgroups of its processes in which nothing else runs.

use std::collections::{BTreeMap, BTreeSet};

use glob::Pattern;
use serde::{Deserialize, Serialize};
use tidegate_core::{
    Scope,
    selector::{Selector, SelectorKind},
};

use crate::{pods::Pods, tree::ancestors};

mod pods;

/// Containers that engines of the host tell at most.
pub const MAX_CONTAINERS: usize = 10_000;
/// ... and those of each user.
pub const USER_CONTAINERS: usize = MAX_CONTAINERS / 16;
/// Programs that are looked at in one scan at most.
pub const MAX_PROGRAMS: usize = 100_000;
/// An id of a container, in hexadecimal digits.
const ID_BYTES: usize = 64;

/// What runs on a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct World {
    /// Paths of cgroups, each with its id.
    pub cgroups: BTreeMap<String, u64>,
    /// There are more, which are not known.
    pub has_more: bool,
    /// The containers that are known, those of the host first.
    pub containers: BTreeMap<ContainerId, Container>,
    /// Running processes; read only if a selector asks for programs.
    pub programs: Vec<Program>,
    pub pods: Pods,
    pub users: Users,
    /// The devices that were looked for, by name; `None`: there is none.
    pub devices: BTreeMap<String, Option<u32>>,
}

/// Numbers of users by name, as `/etc/passwd` has them.
pub type Users = BTreeMap<String, u32>;

/// The user whose engine runs a container (`None`: it is the host's), and the id that this engine tells. Such
/// a user's container is looked for in the user's slice alone.
pub type ContainerId = (Option<u32>, String);

/// A container as its engine tells it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    pub name: String,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pub pid: u32,
    /// The path of what it executes.
    pub exe: String,
    /// Its arguments, with spaces between.
    pub args: String,
    /// The path of its cgroup.
    pub cgroup: String,
}

/// A cgroup that a selector matches.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Match {
    /// The name of the unit, user, container, pod or program.
    pub name: String,
    pub cgroup: String,
}

/// The matches of a selector.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Sorted; none if it does not exist yet.
    pub matches: Vec<Match>,
    /// Cgroups of a program that are no match: others would be limited, too. Those of the host first.
    pub shared: Vec<Shared>,
}

/// A cgroup in which a program runs together with others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shared {
    pub cgroup: String,
    /// The path of another program that runs there.
    pub other: String,
}

impl World {
    /// The matches of a selector. O(cgroups), for containers times those that match.
    pub fn find(&self, selector: &Selector) -> Found {
        let Selector { kind, value } = selector;
        let mut found: Vec<_> = match kind {
            SelectorKind::Cgroup => {
                let is_it = glob(value.trim_matches('/'));
                let matching = self.cgroups.keys().filter(|path| is_it(path));
                matching.map(|path| named(path)).collect()
            }
            SelectorKind::Unit | SelectorKind::Slice => {
                // Of a thousand limits each looks at all cgroups.
                let pattern = is_pattern(value).then(|| glob(value));
                let is_it = |path: &&String| {
                    let name = path.rsplit('/').next().unwrap_or_default();
                    pattern.as_ref().map_or(value == name, |is_it| is_it(name)) && is_unit(path)
                };
                self.cgroups.keys().filter(is_it).map(|path| named(path)).collect()
            }
            SelectorKind::User => {
                let id = value.parse().ok().or_else(|| self.users.get(value).copied());
                let path = id.map(|id: u32| user_slice(id));
                let path = path.filter(|path| self.cgroups.contains_key(path));
                path.map(|cgroup| Match { name: value.clone(), cgroup }).into_iter().collect()
            }
            SelectorKind::Container => {
                let is_it = glob(value);
                self.containers(|container| is_it(&container.name))
            }
            SelectorKind::Labels => self
                .containers(|c| value.split(',').all(|label| has_label(&c.labels, label.trim()))),
            SelectorKind::Exe => return self.programs(value),
            SelectorKind::Pod => self.matching_pods(value),
        };
        found.sort();
        found.dedup();
        Found { matches: found, shared: Vec::new() }
    }

    /// The containers that pass and have a cgroup.
    pub fn containers(&self, passes: impl Fn(&Container) -> bool) -> Vec<Match> {
        let passing = self.containers.iter().filter(|(_, container)| passes(container));
        passing.filter_map(|(id, container)| self.container(id, container)).collect()
    }

    /// A container, if it has a cgroup.
    pub fn container(&self, (owner, id): &ContainerId, container: &Container) -> Option<Match> {
        let below = owner.map(|owner| user_slice(owner) + "/").unwrap_or_default();
        let paths = self.cgroups.range(below.clone()..).map(|(path, _)| path);
        let cgroup = container_cgroup(paths.take_while(|path| path.starts_with(&below)), id)?;
        Some(Match { name: container.name.clone(), cgroup })
    }

    /// Whether a cgroup is of a container that no engine has listed, and is in none that one has.
    pub fn is_unlisted(&self, path: &str) -> bool {
        let has = |owner, id: &str| self.containers.contains_key(&(owner, id.to_owned()));
        let user = user_of(path);
        let is_listed = |id| has(None, id) || user.is_some() && has(user, id);
        is_container(path) && !path.split('/').filter_map(id_in).any(is_listed)
    }

    /// The processes that a selector of kind `Exe` matches.
    pub fn matching<'a>(&'a self, value: &'a str) -> impl Iterator<Item = &'a Program> {
        let (exe, args) = value.split_once(' ').map_or((value, None), |(e, a)| (e, Some(a)));
        let (is_exe, are_args) = (glob(exe), args.map(any_of));
        let is_it = move |program: &&Program| {
            is_exe(&program.exe) && are_args.as_ref().is_none_or(|are| are.matches(&program.args))
        };
        self.programs.iter().filter(is_it)
    }

    fn programs(&self, value: &str) -> Found {
        let pids: BTreeSet<_> = self.matching(value).map(|program| program.pid).collect();
        let groups: BTreeMap<_, _> =
            self.matching(value).map(|program| (program.cgroup.as_str(), &program.exe)).collect();
        // Those below a cgroup are limited with it.
        let mut others = BTreeMap::new();
        for program in self.programs.iter().filter(|program| !pids.contains(&program.pid)) {
            for group in ancestors(&program.cgroup).filter(|group| groups.contains_key(group)) {
                others.entry(group).or_insert(&program.exe);
            }
        }
        let mut found = Found::default();
        for (group, exe) in groups {
            let cgroup = group.to_owned();
            match others.get(group) {
                Some(other) => found.shared.push(Shared { cgroup, other: (*other).clone() }),
                None => {
                    let name = exe.rsplit('/').next().unwrap_or_default().to_owned();
                    found.matches.push(Match { name, cgroup });
                }
            }
        }
        found.matches.sort();
        found.shared.sort_by_key(|shared| user_of(&shared.cgroup).is_some());
        found
    }

    /// The cgroups of a scope that exist; none of a device.
    pub fn cgroups_of(&self, scope: &Scope) -> Found {
        match scope {
            Scope::Select(selector) => self.find(selector),
            Scope::Cgroup(path) => {
                let path = path.split('/').filter(|part| !part.is_empty()).collect::<Vec<_>>();
                let path = path.join("/");
                let exists = path.is_empty() || self.cgroups.contains_key(&path);
                let matches = exists.then(|| named(&path)).into_iter().collect();
                Found { matches, shared: Vec::new() }
            }
            Scope::Dev(_) | Scope::Port(_) => Found::default(),
        }
    }
}

fn named(path: &str) -> Match {
    let name = path.rsplit('/').next().unwrap_or_default();
    Match { name: name.to_owned(), cgroup: path.to_owned() }
}

/// Whether a cgroup is a unit of the system manager, by its place.
fn is_unit(path: &str) -> bool {
    let above = path.rsplit_once('/').map_or("", |(above, _)| above);
    above.split('/').all(|part| part.is_empty() || part.ends_with(".slice"))
}

fn user_slice(id: u32) -> String {
    format!("user.slice/user-{id}.slice")
}

/// The user in whose slice a cgroup is.
pub fn user_of(path: &str) -> Option<u32> {
    let (id, _) = path.strip_prefix("user.slice/user-")?.split_once(".slice/")?;
    id.parse().ok()
}

/// `KEY=VALUE`, or `KEY` with any value.
pub(crate) fn has_label(labels: &BTreeMap<String, String>, label: &str) -> bool {
    match label.split_once('=') {
        Some((key, value)) => labels.get(key).is_some_and(|is| is == value),
        None => labels.contains_key(label),
    }
}

/// The cgroup of a container: the outermost one of some with its id. Each user may make cgroups of any name
/// in the slice of that user, so one elsewhere goes first.
fn container_cgroup<'a>(paths: impl IntoIterator<Item = &'a String>, id: &str) -> Option<String> {
    let found = paths.into_iter().filter_map(|path| {
        let at = path.split('/').position(|part| id_in(part) == Some(id))?;
        Some(path.split('/').take(at + 1).collect::<Vec<_>>().join("/"))
    });
    found.min_by_key(|path| (user_of(path).is_some(), path.len(), path.clone()))
}

/// Whether a text is the id of a container.
pub fn is_container_id(text: &str) -> bool {
    text.len() == ID_BYTES && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether a cgroup has the id of a container as a name, as engines write it in full.
pub fn is_container(path: &str) -> bool {
    path.rsplit('/').next().and_then(id_in).is_some()
}

/// The id of a container in the name of its cgroup.
fn id_in(name: &str) -> Option<&str> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let (kind, id) = name.split_at_checked(name.len().checked_sub(ID_BYTES)?)?;
    (is_container_id(id) && is_kind(kind)).then_some(id)
}

/// What stands before a container's id. Its monitor has a cgroup of its own.
fn is_kind(kind: &str) -> bool {
    kind.is_empty() || kind.ends_with('-') && !kind.contains("conmon")
}

/// Whether a text may match several names.
pub fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// Whether a text is all that a pattern says, as in a shell: `*` is any letters but `/`, `?` one, `[...]` one
/// of some. O(pattern x text).
pub fn glob(pattern: &str) -> impl Fn(&str) -> bool {
    // What is between slashes alone: a search goes no further back.
    let parts: Vec<_> = pattern.split('/').map(any_of).collect();
    move |text| {
        let mut texts = text.split('/');
        parts.iter().all(|part| texts.next().is_some_and(|text| part.matches(text)))
            && texts.next().is_none()
    }
}

/// The same, where a slash is a letter as others are.
fn any_of(text: &str) -> Pattern {
    let mut pattern = String::new();
    // To the library `**` is any number of directories.
    for letter in text.chars() {
        if letter != '*' || !pattern.ends_with('*') {
            pattern.push(letter);
        }
    }
    loop {
        let error = match Pattern::new(&pattern) {
            Ok(pattern) => return pattern,
            Err(error) => error,
        };
        // A `[` that nothing closes is itself.
        match pattern.char_indices().nth(error.pos) {
            Some((at, '[')) => pattern.replace_range(at..=at, "[[]"),
            _ => pattern = Pattern::escape(text),
        }
    }
}

#[cfg(test)]
mod tests;
