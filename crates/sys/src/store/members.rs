//! Limits over several cgroups, whose members come and go while the limit stays.
//!
//! ```text
//! NAME/select                                        symbolic link to its selector
//!      room, place                                   its pool and its slot there, or else
//!      member_{egress,ingress,sockops}               its own programs, also while it has no member
//!      members/ID/{egress,ingress,sockops}           links of a member; ID is the cgroup's
//!                 cgroup                             symbolic link to its directory
//!      members/_ID/                                  one that joins or leaves
//! ```
//!
//! All members have one slot of a pool ([`super::slots`]), or one copy of the programs and maps, so rate,
//! share and counters are of all together. A member joins and leaves by its links, and by the slot that the
//! kernel keeps with the cgroup. If one joins that another limit of the pool meets, too, its limit goes into
//! another pool. A directory `_ID` is taken off by the next writer, whatever is in it.
//!
//! A cgroup that is removed is a member as long as there are sockets of it: what a service leaves in its send
//! buffers when it is stopped is limited, too. The kernel then takes the links off, and the member leaves
//! with the next change.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use libbpf_rs::{Link, Program, query::LinkTypeInfo};
use tidegate_core::{Scope, Selector};

use super::{
    ASIDE, BUILDING, CGROUP, MEMBERS, PARENT, PinnedLimit, Store, StoreError, StoreLock, bpf_error,
    cgroup_in, check_name, contains, io_error, limit_error, name_in,
    pins::{detach_links, pin_fd, pin_maps, remove_pins},
    pool_names::note_slot,
    symlink,
};
use crate::{
    cgroup::{Cgroup, CgroupError, Hierarchy},
    limit::{Adopt, LimitError, LimitMaps, LimitOptions, Loaded},
    query,
    schemes::{self, LINKS, Pinning, Programs},
};

/// Removed cgroups with sockets that a limit holds at most.
const REMOVED_MAX: usize = 1024;
/// The symbolic link to the selector of a limit.
pub(super) const SELECT: &str = "select";
/// The pins of its programs, by the links that members get of them.
const PROGRAMS: [(&str, &str); 3] =
    [(LINKS[0], "member_egress"), (LINKS[1], "member_ingress"), (LINKS[2], "member_sockops")];

/// A cgroup that a limit holds beside others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The cgroup's id.
    pub id: u64,
    /// Its path; `None` if it has been removed.
    pub path: Option<String>,
    /// The path that it had when it joined.
    pub joined_as: String,
    /// It has been removed, and sockets of it may still send: the limit holds them.
    pub has_sockets: bool,
    /// Hooks at which the limit's program no longer is: somebody took it off.
    pub unhooked: Vec<&'static str>,
}

/// The selector of the limit in a directory.
pub(super) fn selector_in(dir: &Path) -> Option<Selector> {
    name_in(dir, SELECT)?.parse().ok()
}

/// The directories of members, with the cgroups' ids.
pub(super) fn members_dirs(dir: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(dir.join(MEMBERS)).into_iter().flatten().flatten();
    let ids = entries.filter_map(|e| Some((e.file_name().to_str()?.parse().ok()?, e.path())));
    let mut found: Vec<_> = ids.collect();
    found.sort();
    found
}

/// Whether a cgroup is a member of the limit in a directory.
pub(super) fn has(dir: &Path, id: u64) -> bool {
    fs::symlink_metadata(dir.join(MEMBERS).join(id.to_string())).is_ok()
}

/// The paths under which the members of the limit in a directory joined.
pub(super) fn paths_in(hierarchy: &Hierarchy, dir: &Path) -> Vec<String> {
    remembered_in(dir).into_iter().map(|at| hierarchy.relative(&at)).collect()
}

/// The same as they are written down.
pub(super) fn remembered_in(dir: &Path) -> Vec<PathBuf> {
    let at = |(_, member): (u64, PathBuf)| fs::read_link(member.join(CGROUP)).ok();
    members_dirs(dir).into_iter().filter_map(at).collect()
}

/// The members of the limit in a directory, whose programs have these links.
pub(super) fn members_in(hierarchy: &Hierarchy, dir: &Path, hooks: &[&'static str]) -> Vec<Member> {
    let member = |(id, dir): (u64, PathBuf)| {
        let joined_as = cgroup_in(hierarchy, &dir).unwrap_or_default();
        let path = path_now(hierarchy, id, &joined_as);
        let is_hooked = |name: &str| cgroup_of_link(&dir.join(name)) == Some(id);
        let (hooked, off): (Vec<_>, Vec<_>) =
            hooks.iter().copied().partition(|name| is_hooked(name));
        let has_sockets = path.is_none() && !hooked.is_empty();
        let unhooked = if path.is_some() { off } else { Vec::new() };
        Member { id, path, joined_as, has_sockets, unhooked }
    };
    members_dirs(dir).into_iter().map(member).collect()
}

/// The path of the cgroup of an id that joined under this one; `None` if it has been removed.
fn path_now(hierarchy: &Hierarchy, id: u64, joined_as: &str) -> Option<String> {
    let is_it = hierarchy.open(joined_as).is_ok_and(|cgroup| cgroup.id() == id);
    if is_it { Some(joined_as.to_owned()) } else { hierarchy.path_of(id) }
}

/// The id of the cgroup that a pinned link is on; 0 if that has been removed.
pub(super) fn cgroup_of_link(pin: &Path) -> Option<u64> {
    match Link::open(pin).and_then(|link| link.info()).ok()?.info {
        LinkTypeInfo::Cgroup(cgroup) => Some(cgroup.cgroup_id),
        _ => None,
    }
}

/// The ids of members that a writer which died has left half way.
pub(super) fn half_members(dir: &Path) -> Vec<u64> {
    let entries = fs::read_dir(dir.join(MEMBERS)).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter_map(|name| name.strip_prefix(BUILDING)?.parse().ok()).collect()
}

/// Pins programs that cgroups will get.
pub(super) fn pin_programs(
    programs: &[(&'static str, OwnedFd)],
    dir: &Path,
) -> Result<(), StoreError> {
    for (link, program) in programs {
        let Some((_, pin)) = PROGRAMS.iter().find(|(name, _)| name == link) else { continue };
        pin_fd(program, dir, pin)?;
    }
    Ok(())
}

/// Pins the selector of a limit.
fn pin_selector(selector: &Selector, dir: &Path) -> Result<(), StoreError> {
    let members = dir.join(MEMBERS);
    fs::create_dir(&members).map_err(io_error(&members, "create"))?;
    symlink(Path::new(&selector.to_string()), &dir.join(SELECT))
}

/// Pins another program of a limit in the place of that of a link, for members that join from now on.
pub(super) fn pin_successor(
    dir: &Path,
    link: &OsStr,
    program: BorrowedFd<'_>,
) -> Result<(), StoreError> {
    let Some((_, pin)) = PROGRAMS.iter().find(|(name, _)| link == *name) else { return Ok(()) };
    let (pin, next) = (dir.join(pin), dir.join(format!("{pin}_next")));
    // A writer that died may have been here.
    let _ = fs::remove_file(&next);
    query::pin(program, &next).map_err(io_error(&next, "pin"))?;
    fs::rename(&next, &pin).map_err(io_error(&pin, "rename to"))
}

/// The directory of a member.
pub(super) fn dir_of(dir: &Path, id: u64) -> PathBuf {
    dir.join(MEMBERS).join(id.to_string())
}

/// The programs pinned in a directory.
pub(super) fn programs_in(dir: &Path) -> Result<Vec<(&'static str, OwnedFd)>, StoreError> {
    let pinned = PROGRAMS.iter().filter(|(_, pin)| dir.join(pin).exists());
    let open = |(link, pin): &(&'static str, &str)| {
        let path = dir.join(pin);
        let program = Program::fd_from_pinned_path(&path);
        Ok((*link, program.map_err(bpf_error(&path, "open"))?))
    };
    pinned.map(open).collect()
}

impl PinnedLimit {
    /// Its cgroups that exist: its own, or its members'.
    pub(super) fn cgroups(&self, hierarchy: &Hierarchy) -> Vec<Cgroup> {
        let own = match &self.scope {
            Some(Scope::Cgroup(path)) => Some(path),
            _ => None,
        };
        let members = self.members.iter().filter_map(|member| member.path.as_ref());
        own.into_iter().chain(members).filter_map(|path| hierarchy.open(path).ok()).collect()
    }

    /// Whether its programs meet all packets of a cgroup: its own or one of its members, or one below that.
    pub(super) fn contains(&self, path: &str) -> bool {
        match &self.scope {
            Some(Scope::Cgroup(own)) => contains(own, path),
            Some(Scope::Select(_)) => {
                let members = self.members.iter().filter_map(|member| member.path.as_deref());
                members.into_iter().any(|member| contains(member, path))
            }
            _ => false,
        }
    }
}

/// Whether a cgroup that is to join a limit, or one above or below it, has another limit of its pool.
fn meets_its_pool<'a>(
    hierarchy: &Hierarchy,
    pinned: &PinnedLimit,
    mut new: impl Iterator<Item = &'a Cgroup>,
) -> bool {
    let Some(pool) = pinned.maps.own.pool() else { return false };
    let is_others = |id| ![0, pinned.maps.at].contains(&pool.slot_of(id));
    new.any(|cgroup| hierarchy.ids_around(cgroup).into_iter().any(is_others))
}

/// The result of a change of members, with those that could not join or leave.
fn all_joined(name: &str, failed: BTreeMap<String, StoreError>) -> Result<(), StoreError> {
    match failed.is_empty() {
        true => Ok(()),
        false => {
            Err(StoreError::Members { name: name.to_owned(), failed: failed.into_iter().collect() })
        }
    }
}

/// Who joins what.
pub(super) struct Joining<'a> {
    pub(super) hierarchy: &'a Hierarchy,
    pub(super) name: &'a str,
    /// Its directory.
    pub(super) dir: &'a Path,
    pub(super) loaded: &'a Loaded,
    pub(super) parent: Option<&'a PinnedLimit>,
}

impl Store {
    /// Puts a limit with a selector on.
    pub(super) fn install_select(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        selector: &Selector,
        options: &LimitOptions,
        parent: Option<&PinnedLimit>,
    ) -> Result<(), StoreError> {
        let (info, scheme) = (options.scheme.info(), schemes::of(options.scheme));
        if info.cgroup_programs.is_empty() || scheme.pinning() == Pinning::Tree {
            return Err(limit_error(name)(LimitError::NoMembers(options.scheme)));
        }
        let cgroups = match &self.begin_with {
            Some((of, cgroups)) if of == name => cgroups.clone(),
            _ => [name.to_owned(), format!("{ASIDE}{name}")]
                .iter()
                .flat_map(|entry| paths_in(hierarchy, &self.root.join(entry)))
                .collect(),
        };
        let free = match schemes::share_programs(options) {
            true => {
                let there = cgroups.iter().filter_map(|path| hierarchy.open(path).ok());
                let around: Vec<_> =
                    there.flat_map(|cgroup| hierarchy.ids_around(&cgroup)).collect();
                let above = parent.map(|parent| &parent.maps);
                self.free_slot(hierarchy, name, &around, above, &options.exempt)?
            }
            false => None,
        };
        let slot = free.as_ref().map(|free| (free.dir.clone(), free.slot));
        let refused = || limit_error(name);
        let load = || match free {
            None => {
                let above = parent.map(|parent| &parent.maps);
                scheme.load(0, options, above, Programs::All).map_err(refused())
            }
            Some(free) => {
                let (dir, slot) = (&free.dir, free.slot);
                symlink(Path::new(name), &dir.join(slot.to_string()))?;
                let limit = options.encode(0).map_err(|e| refused()(LimitError::Config(e)))?;
                let maps = free.pool.take(slot, limit).map_err(refused())?;
                if let Some(parent) = parent {
                    maps.start_in(&parent.maps, options).map_err(refused())?;
                }
                Ok(Loaded { maps, programs: programs_in(dir)? })
            }
        };
        let building = self.root.join(format!("{BUILDING}{name}"));
        let put_on = || {
            let mut loaded = load()?;
            pin_maps(&mut loaded.maps, options, &building)?;
            match &slot {
                None => pin_programs(&loaded.programs, &building)?,
                Some((pool, slot)) => note_slot(&building, pool, *slot)?,
            }
            pin_selector(selector, &building)?;
            if let Some(parent) = parent {
                symlink(Path::new(&parent.name), &building.join(PARENT))?;
            }
            let (dir, loaded) = (building.as_path(), &loaded);
            let joining = Joining { hierarchy, name, dir, loaded, parent };
            for path in &cgroups {
                match hierarchy.open(path) {
                    Ok(cgroup) => self.join(&joining, &cgroup)?,
                    Err(CgroupError::Missing { .. }) => {}
                    Err(e) => return Err(limit_error(name)(e.into())),
                }
            }
            self.publish(&building, name)
        };
        let done = put_on();
        if done.is_err() {
            if building.is_dir() {
                let _ = self.take_off(&format!("{BUILDING}{name}"));
            }
            if let Some((pool, slot)) = slot {
                self.free_place(&pool, slot);
            }
        }
        done
    }

    /// Names the cgroups that a limit with a selector has from when it is put on; else it keeps those that an
    /// earlier limit of its name has.
    pub fn begin_with(&mut self, name: &str, cgroups: &[String]) {
        self.begin_with = Some((name.to_owned(), cgroups.to_vec()));
    }

    /// The paths of the cgroups of a limit with a selector. Opens none of their links.
    pub fn member_paths(&self, hierarchy: &Hierarchy, name: &str) -> Vec<String> {
        let path = |(id, dir): (u64, PathBuf)| {
            path_now(hierarchy, id, &cgroup_in(hierarchy, &dir).unwrap_or_default())
        };
        members_dirs(&self.root.join(name)).into_iter().filter_map(path).collect()
    }

    /// Gives a limit with a selector these cgroups: new ones join, those not named, or removed, leave, all
    /// others are not touched. One that does not exist any more is left out; if it is a member and there are
    /// sockets of it, it stays.
    ///
    /// # Errors
    /// [`StoreError`]; with [`StoreError::Members`] all cgroups but those named are as asked.
    pub fn set_members(
        &self,
        lock: &StoreLock,
        hierarchy: &Hierarchy,
        name: &str,
        cgroups: &[String],
    ) -> Result<(), StoreError> {
        check_name(name)?;
        let pinned = self.open(hierarchy, name)?;
        if !matches!(pinned.scope, Some(Scope::Select(_))) {
            return Err(StoreError::NoSelector(name.to_owned()));
        }
        let dir = self.root.join(name);
        let parent = pinned.parent.as_deref().map(|parent| self.open(hierarchy, parent));
        let parent = parent.transpose()?;
        let mut failed = BTreeMap::new();
        let mut wanted = BTreeMap::new();
        for path in cgroups {
            match hierarchy.open(path) {
                Ok(cgroup) => drop(wanted.insert(cgroup.id(), cgroup)),
                Err(CgroupError::Missing { .. }) => {}
                Err(e) => drop(failed.insert(path.clone(), limit_error(name)(e.into()))),
            }
        }
        let is_new = |id: &u64| pinned.members.iter().all(|member| member.id != *id);
        for (_, cgroup) in wanted.iter().filter(|(id, _)| is_new(id)) {
            if let Err(refused) = self.check_member(hierarchy, name, cgroup, parent.as_ref()) {
                failed.insert(cgroup.path().to_owned(), refused);
            }
        }
        wanted.retain(|_, cgroup| !failed.contains_key(cgroup.path()));
        let new = wanted.iter().filter(|(id, _)| is_new(id)).map(|(_, cgroup)| cgroup);
        if meets_its_pool(hierarchy, &pinned, new) {
            let wanted: Vec<_> = wanted.values().map(|cgroup| cgroup.path().to_owned()).collect();
            self.change_pool(lock, hierarchy, &pinned, &wanted)?;
            return all_joined(name, failed);
        }
        let pool = pinned.maps.own.pool();
        let programs = programs_in(pool.map_or(dir.as_path(), |pool| &pool.dir))?;
        let before = pinned.members;
        let loaded = Loaded { maps: pinned.maps, programs };
        let joining =
            Joining { hierarchy, name, dir: &dir, loaded: &loaded, parent: parent.as_ref() };
        for cgroup in wanted.values() {
            let is = before.iter().find(|member| member.id == cgroup.id());
            let done = match is {
                Some(member) if member.unhooked.is_empty() => continue,
                Some(member) => self.part(hierarchy, &dir, member.id, Some(&loaded.maps)),
                None => Ok(()),
            };
            let done = done.and_then(|()| self.join(&joining, cgroup));
            if let Err(e) = done {
                failed.insert(cgroup.path().to_owned(), e);
            }
        }
        let mut removed = 0;
        for member in before.iter().filter(|member| !wanted.contains_key(&member.id)) {
            removed += usize::from(member.has_sockets);
            if member.has_sockets && removed <= REMOVED_MAX {
                continue;
            }
            if let Err(e) = self.part(hierarchy, &dir, member.id, Some(&loaded.maps)) {
                failed.insert(member.joined_as.clone(), e);
            }
        }
        all_joined(name, failed)
    }

    /// Puts a limit into another pool, with these cgroups, and all that are inside it behind it: no two
    /// limits of a pool meet the same packet. It has the rates that were asked for: one that was lent comes
    /// with the next message. A removed cgroup with sockets cannot be taken along.
    fn change_pool(
        &self,
        lock: &StoreLock,
        hierarchy: &Hierarchy,
        pinned: &PinnedLimit,
        cgroups: &[String],
    ) -> Result<(), StoreError> {
        let mut store = self.clone();
        let mut again = |limit: &PinnedLimit, cgroups: &[String]| {
            let Some(scope) = &limit.scope else { return Ok(()) };
            store.begin_with(&limit.name, cgroups);
            let options = limit.asked;
            let parent = limit.parent.as_deref();
            store.replace(lock, hierarchy, &limit.name, scope, &options, parent)
        };
        again(pinned, cgroups)?;
        let mut inside = self.children_of(&pinned.name)?;
        while let Some(name) = inside.pop() {
            // One that cannot be read is reported, and installed again by hand.
            let Ok(child) = self.open(hierarchy, &name) else { continue };
            let paths = child.members.iter().filter_map(|member| member.path.clone());
            again(&child, &paths.collect::<Vec<_>>())?;
            inside.extend(self.children_of(&name)?);
        }
        Ok(())
    }

    /// Checks that a cgroup can join a limit: no other limit is on it, and it is in that of the parent.
    fn check_member(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        cgroup: &Cgroup,
        parent: Option<&PinnedLimit>,
    ) -> Result<(), StoreError> {
        let scope = Scope::Cgroup(cgroup.path().to_owned());
        self.check_free(hierarchy, name, &scope, cgroup, parent)?;
        match parent.filter(|parent| !parent.contains(cgroup.path())) {
            Some(above) => {
                let (name, parent) = (name.to_owned(), above.name.clone());
                Err(StoreError::MemberOutside { name, scope, parent })
            }
            None => Ok(()),
        }
    }

    /// Puts the programs of a limit on a cgroup. Nothing of it is left if that fails.
    pub(super) fn join(&self, joining: &Joining<'_>, cgroup: &Cgroup) -> Result<(), StoreError> {
        let Joining { hierarchy, name, dir, loaded, parent } = *joining;
        let scope = Scope::Cgroup(cgroup.path().to_owned());
        let refused = || limit_error(name);
        self.check_member(hierarchy, name, cgroup, parent)?;
        let limit = loaded.maps.limit().map_err(refused())?;
        let unkept = schemes::of(limit.scheme()).why_unkept(hierarchy, &scope, Some(cgroup));
        if let Some(why) = unkept {
            return Err(refused()(why.into()));
        }
        let half = dir.join(MEMBERS).join(format!("{BUILDING}{}", cgroup.id()));
        fs::create_dir(&half).map_err(io_error(&half, "create"))?;
        let join = || {
            symlink(&hierarchy.remembered(cgroup), &half.join(CGROUP))?;
            for (name, link) in loaded.attach(cgroup).map_err(refused())? {
                pin_fd(link, &half, name)?;
            }
            if let Some(above) = parent {
                self.put_parents_behind(cgroup, &half, &above.name)?;
            }
            loaded.maps.adopt(hierarchy, cgroup, Adopt::Take).map_err(refused())?;
            let whole = dir.join(MEMBERS).join(cgroup.id().to_string());
            fs::rename(&half, &whole).map_err(io_error(&whole, "rename to"))?;
            self.note_member(cgroup.path(), name);
            Ok(())
        };
        let done: Result<(), StoreError> = join();
        if done.is_err() {
            let _ = self.take_member_off(hierarchy, dir, cgroup.id(), Some(&loaded.maps));
        }
        done
    }

    /// Takes the programs of a limit off a member and gives its sockets back.
    fn part(
        &self,
        hierarchy: &Hierarchy,
        dir: &Path,
        id: u64,
        maps: Option<&LimitMaps>,
    ) -> Result<(), StoreError> {
        let members = dir.join(MEMBERS);
        let (whole, half) = (members.join(id.to_string()), members.join(format!("{BUILDING}{id}")));
        fs::rename(&whole, &half).map_err(io_error(&whole, "rename"))?;
        self.take_member_off(hierarchy, dir, id, maps)
    }

    /// The same of one that is on its way.
    fn take_member_off(
        &self,
        hierarchy: &Hierarchy,
        dir: &Path,
        id: u64,
        maps: Option<&LimitMaps>,
    ) -> Result<(), StoreError> {
        let half = dir.join(MEMBERS).join(format!("{BUILDING}{id}"));
        // Links first: a connection that opens meanwhile must not be set again.
        detach_links(&half)?;
        if let Some(maps) = maps {
            maps.leave(id);
        }
        let at = cgroup_in(hierarchy, &half);
        let cgroup = at.and_then(|at| hierarchy.open(&at).ok()).filter(|c| c.id() == id);
        if let (Some(cgroup), Some(maps)) = (&cgroup, maps)
            && maps.limit().is_ok_and(|limit| limit.scheme().info().sets_sockets)
        {
            let _ = maps.adopt(hierarchy, cgroup, Adopt::Release);
            // Not this one, of which it is no member any more.
            self.take_again(hierarchy, "", cgroup.path());
        }
        remove_pins(&half)
    }

    /// Takes off what a writer that died has left of members that joined or left.
    pub(super) fn sweep_members(&self, entry: &str) {
        let dir = self.root.join(entry);
        let half = half_members(&dir);
        let Some(hierarchy) = Hierarchy::find().ok().filter(|_| !half.is_empty()) else { return };
        let maps = self.open_at(&hierarchy, entry).ok().map(|pinned| pinned.maps);
        for id in half {
            let _ = self.take_member_off(&hierarchy, &dir, id, maps.as_ref());
        }
    }
}

#[cfg(test)]
mod tests;
