//! The order of programs where a limit is on the same cgroup as its parent.
//!
//! The kernel runs the programs of one cgroup in the order in which they were attached, and a child must
//! judge a packet before its parent. So after a child comes to a cgroup, the programs of its parents there
//! are attached once more, innermost first, and get behind it. Each new link takes the pin of the earlier one
//! in one step, and then the earlier one goes: for that moment both charge the same queue, and nothing is
//! unlimited. A link that is on its way is pinned in `__order`, which the next writer takes off should this
//! one die; that writer looks at the order, too (see [`Store::restore_order`]). Programs that are exchanged
//! under their links keep their place.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs, io, iter,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use libbpf_rs::{Link, Program, query::LinkTypeInfo};
use tidegate_core::class::MAX_DEPTH;

use super::{
    CGROUP, PARENT, Store, StoreError, bpf_error, io_error, limit_error,
    members::{self, dir_of},
    name_in,
    pins::{remove_pins, settings_in},
};
use crate::{
    bpf,
    cgroup::{Cgroup, Hierarchy},
    query,
    schemes::LINKS,
};

/// Where links are that shall take the pins of others. No limit's directory has this name on its way.
const ON_ITS_WAY: &str = "__order";

impl Store {
    /// The limits on a cgroup in the order in which a packet that leaves, one that comes in, and a socket
    /// meet them; programs of others are left out.
    ///
    /// # Errors
    /// The kernel's error: it cannot be asked.
    pub fn order_on(&self, cgroup: &Cgroup) -> io::Result<[Vec<String>; LINKS.len()]> {
        let names = self.names().unwrap_or_default().into_iter();
        let dirs = names.filter_map(|name| Some((self.links_on(&name, cgroup)?, name)));
        let dirs: Vec<_> = dirs.collect();
        let mut order = LINKS.map(|_| Vec::new());
        for (names, link) in order.iter_mut().zip(LINKS) {
            for program in query::in_order(cgroup, link)? {
                let is_it = |dir: &Path| program_of(&dir.join(link), cgroup) == Some(program);
                let found = dirs.iter().filter(|(dir, _)| is_it(dir));
                names.extend(found.map(|(_, name)| name.clone()));
            }
        }
        Ok(order)
    }

    /// The parent of a limit, and all above it, innermost first.
    pub(super) fn parents_of(&self, name: &str) -> impl Iterator<Item = String> {
        let parent = |name: &String| name_in(&self.root.join(name), PARENT);
        iter::successors(parent(&name.to_owned()), parent).take(MAX_DEPTH)
    }

    /// Whether a limit may be on the cgroup of another one: one of the two is inside the other.
    pub(super) fn is_kin(&self, name: &str, parent: Option<&str>, other: &str) -> bool {
        let inside =
            |parent: &str| parent == other || self.parents_of(parent).any(|above| above == other);
        parent.is_some_and(inside) || self.parents_of(other).any(|above| above == name)
    }

    /// Has the programs of a parent on a cgroup, and those of all above it, run after those in the directory
    /// `inner`.
    pub(super) fn put_parents_behind(
        &self,
        cgroup: &Cgroup,
        inner: &Path,
        parent: &str,
    ) -> Result<(), StoreError> {
        let done = self.sort(cgroup, Some(inner.to_owned()), parent);
        if done.is_err() {
            // Without the child, which goes again.
            let _ = self.sort(cgroup, None, parent);
        }
        done
    }

    fn sort(
        &self,
        cgroup: &Cgroup,
        inner: Option<PathBuf>,
        parent: &str,
    ) -> Result<(), StoreError> {
        let parents = iter::once(parent.to_owned()).chain(self.parents_of(parent));
        let there = parents.take(MAX_DEPTH).filter_map(|name| self.links_on(&name, cgroup));
        let chain: Vec<PathBuf> = inner.into_iter().chain(there).collect();
        if chain.len() < 2 {
            return Ok(());
        }
        for link in LINKS {
            let mut inner = None;
            for dir in &chain {
                let Some(program) = program_of(&dir.join(link), cgroup) else { continue };
                if inner.is_some_and(|inner| !runs_after(cgroup, link, inner, program)) {
                    self.attach_again(cgroup, dir, link, program)?;
                }
                inner = Some(program);
            }
        }
        Ok(())
    }

    /// Puts the programs of all limits in order that are on a cgroup of their parent.
    pub(super) fn restore_order(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, parent, at) in self.beside_parents() {
            let sort = || {
                let hierarchy = Hierarchy::find().map_err(|e| limit_error(&name)(e.into()))?;
                let Ok(cgroup) = hierarchy.open(&hierarchy.relative(&at)) else { return Ok(()) };
                self.sort(&cgroup, self.links_on(&name, &cgroup), &parent)
            };
            if let Err(e) = sort() {
                problems.push(format!(
                    "limit `{name}` runs after its parent `{parent}` on the same cgroup, which counts its \
                     packets as others': {e}"
                ));
            }
        }
        problems
    }

    /// Limits with the name of their parent and a cgroup that they share with one above them.
    fn beside_parents(&self) -> Vec<(String, String, PathBuf)> {
        let mut found = Vec::new();
        // Many may be inside one that has many cgroups.
        let mut above: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
        for name in self.names().unwrap_or_default() {
            let Some(parent) = name_in(&self.root.join(&name), PARENT) else { continue };
            let own = self.remembered(&name);
            let mut shared = BTreeSet::new();
            for over in self.parents_of(&name) {
                let there = match above.entry(over) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => {
                        let there = self.remembered(new.key());
                        new.insert(there.into_iter().collect())
                    }
                };
                shared.extend(own.iter().filter(|at| there.contains(*at)).cloned());
            }
            found.extend(shared.into_iter().map(|at| (name.clone(), parent.clone(), at)));
        }
        found
    }

    /// The cgroups of a limit, as they are written down.
    fn remembered(&self, name: &str) -> Vec<PathBuf> {
        let dir = self.root.join(name);
        match fs::read_link(dir.join(CGROUP)) {
            Ok(own) => vec![own],
            Err(_) => members::remembered_in(&dir),
        }
    }

    /// The directory of the links by which a limit is on a cgroup.
    fn links_on(&self, name: &str, cgroup: &Cgroup) -> Option<PathBuf> {
        let dir = self.root.join(name);
        if members::has(&dir, cgroup.id()) {
            return Some(dir_of(&dir, cgroup.id()));
        }
        let limit = settings_in(&dir)?;
        (limit.ifindex == 0 && limit.cgroup_id == cgroup.id()).then_some(dir)
    }

    /// Attaches the program of a link again, behind all others of its hook.
    fn attach_again(
        &self,
        cgroup: &Cgroup,
        dir: &Path,
        link: &'static str,
        program: u32,
    ) -> Result<(), StoreError> {
        let (pin, way) = (dir.join(link), self.root.join(ON_ITS_WAY));
        let earlier = Link::open(&pin).map_err(bpf_error(&pin, "open"))?;
        let program =
            Program::fd_from_id(program).map_err(bpf_error(&pin, "open the program of"))?;
        let later = bpf::attach(program.as_fd(), link, cgroup);
        let later = later.map_err(|e| limit_error(&pin.display().to_string())(e))?;
        fs::create_dir(&way).map_err(io_error(&way, "create"))?;
        let next = way.join(link);
        let put = || {
            query::pin(later.as_fd(), &next).map_err(io_error(&next, "pin"))?;
            fs::rename(&next, &pin).map_err(io_error(&pin, "rename to"))
        };
        let done: Result<(), StoreError> = put();
        let cleared = remove_pins(&way);
        done?;
        let _ = earlier.detach();
        cleared
    }
}

/// The kernel's id of the program that a pinned link has on a cgroup.
fn program_of(pin: &Path, cgroup: &Cgroup) -> Option<u32> {
    let info = Link::open(pin).ok()?.info().ok()?;
    match info.info {
        LinkTypeInfo::Cgroup(at) if at.cgroup_id == cgroup.id() => Some(info.prog_id),
        _ => None,
    }
}

/// Whether a program runs after another one, at the hook of a link; so if nobody can say.
fn runs_after(cgroup: &Cgroup, link: &str, inner: u32, outer: u32) -> bool {
    let there = query::in_order(cgroup, link).unwrap_or_default();
    let last = there.iter().rposition(|id| *id == inner);
    let first = there.iter().position(|id| *id == outer);
    last.zip(first).is_none_or(|(last, first)| last < first)
}

#[cfg(test)]
mod tests;
