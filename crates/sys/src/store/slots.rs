//! Limits on cgroups that share programs and maps: each has a slot in a pool ([`SlotPool`]).
//!
//! ```text
//! NAME/{limit,queues,counters,sockets}   maps that it shares with others of its pool
//!      {egress,ingress,sockops}          its links
//!      room, place                       symbolic links to the name of the pool, and to its slot
//! +cgroups_ABI_NUMBER/                   a pool of limits that are in no other one
//! +cgroups_ABI_inside_QUEUES_SLOT_NUMBER/   of limits inside that of a slot in a map of queues, with this id
//! +cgroups_ABI_exempt_HASH_NUMBER/, +cgroups_ABI_inside_QUEUES_SLOT_exempt_HASH_NUMBER/
//!                            of limits that exempt the same prefixes
//!     {limits,queues,counters,sockets,slots,adoption}    its maps
//!     exempt                             the trie of the prefixes
//!     member_{egress,ingress,sockops}    its programs
//!     parent_{queues,sockets,place}      the maps of the parent and its slot in them, as a limit's
//!     adopt                              link of the iterator over sockets
//!     build                              symbolic link to the build whose programs they are
//!     N                                  symbolic link to the name of the limit in slot N
//! ```
//!
//! Links are a limit's own, so it comes and goes as any other. The map of slots says which limit a cgroup
//! has, and that of sockets has one entry for each socket. So no two limits of a pool meet the same packet:
//! one on the cgroup of another, above or below it, or that is to take its place, goes into another pool. A
//! pool comes with its first limit and goes with its last; a slot whose limit is not there is free, as with
//! limits of prefixes (see [`Store::sweep_pools`]).

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use libbpf_rs::{MapCore, MapHandle};
use tidegate_core::{Scope, Selector, exempt::Exempt};

use super::{
    BUILDING, CGROUP, PARENT, PinnedLimit, Store, StoreError, bpf_error, cgroup_in, io_error,
    limit_error,
    members::{self, cgroup_of_link, pin_programs, pin_successor, programs_in, selector_in},
    pins::{pin_each, pin_fd, pin_maps, pin_parent, remove_pins, update},
    pool_names::{KIND, POOL_PREFIX, build_of_pool, file_name, note_slot, sign_pool},
    pools::{limit_in, places_in},
    symlink,
};
use crate::{
    BUILD,
    cgroup::{Cgroup, Hierarchy},
    exempt, intf,
    limit::slot_pool::{ADOPT_PIN, SlotPool},
    limit::{Adopt, LimitError, LimitMaps, LimitOptions, Loaded, ParentMaps},
    schemes,
};

/// In the name of a pool whose limits are inside another one, before what identifies that.
const INSIDE: &str = "inside_";
/// The same for one whose limits exempt somebody, before a hash of the prefixes.
const EXEMPT_PREFIXES: &str = "exempt_";
/// Pools of one version, parent and prefixes: the limits that one packet meets, and more than a pool has
/// slots, are in several. Whatever finds no slot gets programs of its own.
const POOLS_MAX: u32 = 8;

/// A free slot.
pub(super) struct Free {
    pub(super) dir: PathBuf,
    pub(super) pool: SlotPool,
    pub(super) slot: u32,
}

impl Store {
    /// Puts a limit on a cgroup that shares programs with others. False: there is no slot for it.
    pub(super) fn install_in_slot(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        cgroup: &Cgroup,
        options: &LimitOptions,
        parent: Option<&PinnedLimit>,
    ) -> Result<bool, StoreError> {
        let refused = || limit_error(name);
        let limit = options.encode(cgroup.id()).map_err(|e| refused()(LimitError::Config(e)))?;
        let scope = Scope::Cgroup(cgroup.path().to_owned());
        if let Some(why) = schemes::of(options.scheme).why_unkept(hierarchy, &scope, Some(cgroup)) {
            return Err(refused()(why.into()));
        }
        let above = parent.map(|parent| &parent.maps);
        let around = hierarchy.ids_around(cgroup);
        let free = self.free_slot(hierarchy, name, &around, above, &options.exempt)?;
        let Some(Free { dir, pool, slot }) = free else { return Ok(false) };
        symlink(Path::new(name), &dir.join(slot.to_string()))?;
        let building = self.root.join(format!("{BUILDING}{name}"));
        let put = || {
            let maps = pool.take(slot, limit).map_err(refused())?;
            if let Some(above) = above {
                maps.start_in(above, options).map_err(refused())?;
            }
            let mut loaded = Loaded { maps, programs: programs_in(&dir)? };
            pin_maps(&mut loaded.maps, options, &building)?;
            symlink(&hierarchy.remembered(cgroup), &building.join(CGROUP))?;
            note_slot(&building, &dir, slot)?;
            if let Some(parent) = parent {
                symlink(Path::new(&parent.name), &building.join(PARENT))?;
            }
            for (name, link) in loaded.attach(cgroup).map_err(refused())? {
                pin_fd(link, &building, name)?;
            }
            if let Some(parent) = parent {
                self.put_parents_behind(cgroup, &building, &parent.name)?;
            }
            loaded.maps.adopt(hierarchy, cgroup, Adopt::Take).map_err(refused())?;
            self.publish(&building, name)
        };
        let done = put();
        if done.is_err() {
            if building.is_dir() {
                let _ = self.take_off(&format!("{BUILDING}{name}"));
            }
            self.free_place(&dir, slot);
        }
        done.map(|()| true)
    }

    /// Checks that no other limit is on a cgroup, but for those that are inside one another. It opens none
    /// but one that is there.
    pub(super) fn check_free(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        scope: &Scope,
        cgroup: &Cgroup,
        parent: Option<&PinnedLimit>,
    ) -> Result<(), StoreError> {
        let parent = parent.map(|parent| parent.name.as_str());
        let is_here = |other: &String| {
            let dir = self.root.join(other);
            let at = cgroup_in(hierarchy, &dir);
            at.is_some_and(|at| at == cgroup.path()) || members::has(&dir, cgroup.id())
        };
        let others = self.on_path(hierarchy, cgroup.path())?;
        for other in others.into_iter().filter(is_here) {
            let goes = other == name || self.leaving.contains(&other);
            if goes || self.is_kin(name, parent, &other) {
                continue;
            }
            let (scope, name) = (scope.clone(), other);
            return match self.open_at(hierarchy, &name) {
                Err(_) => Err(StoreError::ScopeUnreadable { scope, name }),
                // Its cgroup has been removed, and this is another one.
                Ok(there) if there.limit.cgroup_id != 0 && there.limit.cgroup_id != cgroup.id() => {
                    continue;
                }
                Ok(_) => Err(StoreError::ScopeTaken { scope, name }),
            };
        }
        Ok(())
    }

    /// Checks that no other limit has a selector.
    pub(super) fn check_selector(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        selector: &Selector,
        parent: Option<&PinnedLimit>,
    ) -> Result<(), StoreError> {
        let parent = parent.map(|parent| parent.name.as_str());
        for other in self.with_selector(hierarchy, selector)? {
            let is_there = selector_in(&self.root.join(&other)).as_ref() == Some(selector);
            let goes = other == name || self.leaving.contains(&other);
            if !is_there || goes || self.is_kin(name, parent, &other) {
                continue;
            }
            let (scope, name) = (Scope::Select(selector.clone()), other);
            return Err(match self.open_at(hierarchy, &name) {
                Err(_) => StoreError::ScopeUnreadable { scope, name },
                Ok(_) => StoreError::ScopeTaken { scope, name },
            });
        }
        Ok(())
    }

    /// A slot in the first pool that has one, and no limit on the cgroups of these ids: those that a limit is
    /// to have, and all above and below them.
    pub(super) fn free_slot(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        around: &[u64],
        above: Option<&LimitMaps>,
        exempt: &Exempt,
    ) -> Result<Option<Free>, StoreError> {
        let refused = || limit_error(name);
        let above = above.map(LimitMaps::as_parent).transpose().map_err(refused())?.flatten();
        let inside = above.as_ref().map(|above| above.key().map_err(refused())).transpose()?;
        let inside = inside.map_or(String::new(), |key| format!("{INSIDE}{key}_"));
        let exempts = if exempt.is_empty() { String::new() } else { exempts_in_name(exempt) };
        for number in 0..POOLS_MAX {
            let name_of_pool =
                format!("{POOL_PREFIX}{KIND}{}_{inside}{exempts}{number}", intf::ABI);
            let dir = self.root.join(name_of_pool);
            if dir.is_dir() {
                self.take_over_slots(hierarchy, &dir)?;
            } else {
                self.make_pool(name, &dir, above.as_ref(), exempt)?;
            }
            let pool = SlotPool::open(&dir).map_err(refused())?;
            if around.iter().any(|id| pool.slot_of(*id) != 0) {
                continue;
            }
            // Other prefixes may have the same hash.
            let trie = pool.exempt().map_err(refused())?;
            if trie.is_some_and(|trie| exempt::read(&trie, 0) != exempt.prefixes) {
                continue;
            }
            let taken = places_in(&dir)?;
            let slots = pool.size().map_err(refused())?;
            if let Some(slot) = (1..slots).find(|slot| taken.binary_search(slot).is_err()) {
                return Ok(Some(Free { dir, pool, slot }));
            }
        }
        Ok(None)
    }

    /// Whether the queues that a child knows are still those of the limit of its parent's name.
    pub(super) fn is_same_map(&self, theirs: &ParentMaps, parent: &str) -> bool {
        let id = |map: &MapHandle| map.info().map(|info| info.info.id).ok();
        let path = self.root.join(parent).join("queues");
        theirs.at == self.at_of(parent)
            && MapHandle::from_pinned_path(&path).is_ok_and(|now| id(&now) == id(&theirs.queues))
    }

    fn make_pool(
        &self,
        name: &str,
        dir: &Path,
        above: Option<&ParentMaps>,
        exempt: &Exempt,
    ) -> Result<(), StoreError> {
        let mut loaded = SlotPool::make(above, exempt).map_err(limit_error(name))?;
        let building = self.root.join(format!("{BUILDING}{}", file_name(dir)));
        fs::create_dir(&building).map_err(io_error(&building, "create"))?;
        let mut make = || {
            pin_each(loaded.maps.iter_mut().map(|(pin, map)| (*pin, map)), &building)?;
            if let Some(above) = &mut loaded.above {
                pin_parent(above, &building)?;
            }
            pin_programs(&loaded.programs, &building)?;
            let path = building.join(ADOPT_PIN);
            loaded.adopt_link.pin(&path).map_err(bpf_error(&path, "pin"))?;
            sign_pool(&building)?;
            fs::rename(&building, dir).map_err(io_error(dir, "rename to"))
        };
        make().inspect_err(|_| drop(remove_pins(&building)))
    }

    /// Has a pool run the programs of this build, for all limits in it. Links of limits that are on no cgroup
    /// any more stay as they are.
    pub(super) fn take_over_slots(
        &self,
        hierarchy: &Hierarchy,
        dir: &Path,
    ) -> Result<(), StoreError> {
        if build_of_pool(dir).is_some_and(|build| build == BUILD) {
            return Ok(());
        }
        let name = file_name(dir);
        let refused = || limit_error(&name);
        let pool = SlotPool::open(dir).map_err(refused())?;
        let loaded = pool.reload().map_err(refused())?;
        let limits = places_in(dir)?.into_iter().filter_map(|slot| {
            let limit = limit_in(dir, slot)?;
            (self.place_of(&limit)? == (dir.to_owned(), slot)).then_some(limit)
        });
        let limits: Vec<_> = limits.collect();
        for (link, program) in &loaded.programs {
            pin_successor(dir, link.as_ref(), program.as_fd())?;
            for limit in &limits {
                let dir = self.root.join(limit);
                let members = members::members_dirs(&dir).into_iter().map(|(_, member)| member);
                for dir in std::iter::once(dir.clone()).chain(members) {
                    let pin = dir.join(link);
                    if cgroup_of_link(&pin).is_some_and(|id| id != 0) {
                        update(&pin, program.as_fd())?;
                    }
                }
            }
        }
        update(&dir.join(ADOPT_PIN), loaded.adopt.as_fd())?;
        for limit in &limits {
            let pinned = self.open(hierarchy, limit)?;
            for cgroup in pinned.cgroups(hierarchy) {
                pinned.maps.adopt(hierarchy, &cgroup, Adopt::Take).map_err(refused())?;
            }
        }
        sign_pool(dir)
    }
}

/// The part of a pool's name that tells which prefixes its limits exempt. Code points are a limit's own.
fn exempts_in_name(exempt: &Exempt) -> String {
    let mut hasher = DefaultHasher::new();
    exempt.prefixes.to_string().hash(&mut hasher);
    format!("{EXEMPT_PREFIXES}{:016x}_", hasher.finish())
}

#[cfg(test)]
mod tests;
