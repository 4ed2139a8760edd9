//! What a writer that died has left is finished or undone, by whoever opens the store next.
//!
//! A directory `_NAME` is to be taken off: it is half built, or was the limit NAME and is being removed,
//! or was replaced. `=NAME` was set aside for another limit: it comes back unless that is there. The
//! kernel objects that have no pins yet, or whose pins are lost, are named by the
//! [journal](super::journal). All steps may be done again.

use std::{collections::BTreeSet, fs, path::Path};

use tidegate_core::Scope;

use super::{
    ASIDE, BUILDING, CGROUP, DEV, PARENT, PORT, PinnedLimit, Store, StoreError, cgroup_in,
    contains,
    htb::device_in,
    is_above,
    journal::{self, Deed, Journal, Object, Step},
    limit_error,
    members::{self, SELECT},
    name_in,
    pins::{detach_links, programs_in, remove_pins, settings_in},
    pool_names::{POOL_PREFIX, file_name},
    pools::{limit_of_pool, places_in},
    symlink,
};
use crate::{
    cgroup::Hierarchy,
    device::{self, PROGRAM_PINS, Target, in_namespace},
    intf,
    limit::{Adopt, ParentMaps},
    net::Netlink,
    remains, root_qdisc,
    schemes::{
        acks,
        htb::{self, ROOT},
    },
};

impl Store {
    /// Finishes or undoes what a writer that died has left, if it left anything; one that lives is not waited
    /// for. For who only reads. Says what could not be put right.
    ///
    /// # Errors
    /// [`StoreError`]: it could not be looked at, and is as it was.
    pub fn repair(&self) -> Result<Vec<String>, StoreError> {
        let is_left = |name: &String| name.starts_with(BUILDING) || name.starts_with(ASIDE);
        if !journal::has_step(&self.root)
            && !self.entries()?.iter().any(is_left)
            && self.names_of_lost_children().is_empty()
            && !self
                .names()?
                .iter()
                .any(|name| !members::half_members(&self.root.join(name)).is_empty())
        {
            return Ok(Vec::new());
        }
        if self.root.is_dir() && self.try_lock()?.is_none() {
            return Ok(Vec::new());
        }
        let lock = self.lock()?;
        let problems = lock.problems.clone();
        self.close(lock);
        Ok(problems)
    }

    /// The same by a writer, who has the lock.
    pub(super) fn recover(&self, journal: &Journal) -> Vec<String> {
        let mut problems = Vec::new();
        let step = journal.step();
        let entries = self.entries().unwrap_or_default();
        let with = |prefix: char| entries.iter().filter(move |name| name.starts_with(prefix));
        for name in with(BUILDING) {
            if let Err(e) = self.take_off(name) {
                let name = name.trim_start_matches(BUILDING);
                problems.push(format!("what a killed command left of `{name}` is not off: {e}"));
            }
        }
        for (step, gone) in journal.steps_of_gone_stores() {
            self.clear(&step);
            gone.remove();
        }
        if let Some(step) = &step {
            self.clear(step);
        }
        for name in entries.iter().filter(|name| !name.starts_with([BUILDING, ASIDE, POOL_PREFIX]))
        {
            self.sweep_hook(&self.root.join(name));
            self.sweep_members(name);
        }
        // All of them are off before the first comes back: what they leave, such as a place among limits with
        // prefixes, is another's from then on.
        for name in with(ASIDE).map(|name| name.trim_start_matches(ASIDE)) {
            if !self.root.join(name).is_dir() {
                let _ = self.clear_aside(name);
            }
        }
        self.sweep_pools();
        // Parents come before the limits inside them.
        let mut aside: Vec<_> = with(ASIDE).collect();
        aside.sort_by_key(|entry| self.depth_of(entry));
        for name in aside.into_iter().map(|name| name.trim_start_matches(ASIDE)) {
            if let Err(e) = self.put_back_with(journal, name) {
                let why = "was removed by a command that was killed, and could not be put back";
                problems.push(format!("limit `{name}` {why}: {e}"));
            }
        }
        for name in self.names_of_lost_children() {
            if let Err(e) = self.join_parent_again(journal, &name) {
                let why =
                    "is not counted in its parent, which a command that was killed has replaced";
                problems.push(format!("limit `{name}` {why}: {e}"));
            }
        }
        problems.extend(self.restore_order());
        if let Some(Step { deed: Deed::TakeOver, limit, .. }) = &step
            && let Err(e) = self.take_over_again(limit)
        {
            problems
                .push(format!("limit `{limit}` is in force by the programs of two builds: {e}"));
        }
        if let Some(Step { deed: Deed::Install | Deed::Change, limit, .. }) = &step
            && let Err(e) = self.settle_again(limit)
        {
            let why = "was being changed by a command that was killed, and is not as it should be";
            problems.push(format!("limit `{limit}` {why}: {e}"));
        }
        journal.end();
        problems
    }

    /// How many limits one that is listed, or set aside, is inside of.
    fn depth_of(&self, entry: &str) -> usize {
        let aside: String = entry.chars().take_while(|first| *first == ASIDE).collect();
        let above =
            |entry: &String| Some(format!("{aside}{}", name_in(&self.root.join(entry), PARENT)?));
        std::iter::successors(above(&entry.to_owned()), above)
            .take(tidegate_core::class::MAX_DEPTH)
            .count()
    }

    /// The limits that work with the maps of an earlier parent, while their parent is another limit of that
    /// name, and all that are inside them; parents first. A writer replaces a parent before its children.
    fn names_of_lost_children(&self) -> Vec<String> {
        let mut names = self.names().unwrap_or_default();
        names.sort_by_cached_key(|name| self.depth_of(name));
        let mut lost: Vec<String> = Vec::new();
        for name in names {
            let Some(parent) = name_in(&self.root.join(&name), PARENT) else { continue };
            let is_lost = || {
                let dir = self.root.join(&name);
                self.root.join(&parent).join("queues").exists()
                    && matches!(ParentMaps::open(&dir), Ok(Some(theirs))
                        if !self.is_same_map(&theirs, &parent))
            };
            if lost.contains(&parent) || is_lost() {
                lost.push(name);
            }
        }
        lost
    }

    /// Puts a limit on again, with the same settings, in the limit that is its parent now.
    fn join_parent_again(&self, journal: &Journal, name: &str) -> Result<(), StoreError> {
        let hierarchy = Hierarchy::find().map_err(|e| limit_error(name)(e.into()))?;
        let pinned = match self.open(&hierarchy, name) {
            // It is reported, and installed again by hand.
            Err(StoreError::Unreadable { .. }) => return Ok(()),
            pinned => pinned?,
        };
        let Some(scope) = &pinned.scope else { return Ok(()) };
        let parent = pinned.parent.as_deref();
        self.install_with(journal, &hierarchy, name, scope, &pinned.asked, parent)?;
        self.take_off(&format!("{BUILDING}{name}"))
    }

    /// Takes all off that a directory holds, and removes it.
    pub(super) fn take_off(&self, entry: &str) -> Result<(), StoreError> {
        let dir = self.root.join(entry);
        let place = self.place_of(entry);
        self.take_hooks_off(entry)?;
        self.pass_clsact_on(entry);
        remove_pins(&dir)?;
        if let Some((pool, index)) = place {
            self.free_place(&pool, index);
        }
        Ok(())
    }

    /// The same, but its pins stay.
    pub(super) fn take_hooks_off(&self, entry: &str) -> Result<(), StoreError> {
        let there = self.namespace_of(entry);
        let there = there.and_then(|inode| in_namespace(inode, || self.take_hooks_off_here(entry)));
        there.unwrap_or_else(|| self.take_hooks_off_here(entry))
    }

    /// A clsact that came with this limit stays while another one has filters there, and goes with that.
    pub(super) fn pass_clsact_on(&self, entry: &str) {
        let is_there =
            |entry: &str, pin: &str| fs::symlink_metadata(self.root.join(entry).join(pin)).is_ok();
        if !is_there(entry, device::CLSACT_MARK) {
            return;
        }
        let device = |entry: &str| {
            let limit = self.settings_of(entry).filter(|limit| limit.ifindex != 0)?;
            Some((limit.ifindex, limit.cgroup_id))
        };
        let is_next = |other: &&String| {
            !other.starts_with([BUILDING, ASIDE])
                && *other != entry
                && PROGRAM_PINS.iter().any(|pin| is_there(other, pin))
                && device(other) == device(entry)
        };
        if let Some(next) = self.entries().unwrap_or_default().iter().find(is_next) {
            let mark = self.root.join(next).join(device::CLSACT_MARK);
            let _ = symlink(Path::new(device::CLSACT_MARK), &mark);
        }
    }

    /// The network namespace of the device that a limit is on, or in whose tree it is.
    pub(super) fn namespace_of(&self, entry: &str) -> Option<u64> {
        let root = name_in(&self.root.join(entry), ROOT);
        let limit = self.settings_of(root.as_deref().unwrap_or(entry))?;
        (limit.ifindex != 0).then_some(limit.cgroup_id)
    }

    fn take_hooks_off_here(&self, entry: &str) -> Result<(), StoreError> {
        let dir = self.root.join(entry);
        let hierarchy = Hierarchy::find().ok();
        let opened = hierarchy.as_ref().and_then(|hierarchy| self.open_at(hierarchy, entry).ok());
        let (pinned, hierarchy) = match (opened, hierarchy) {
            (Some(pinned), Some(hierarchy)) => (pinned, hierarchy),
            (_, hierarchy) => {
                self.take_half_off(hierarchy.as_ref(), entry);
                return Ok(());
            }
        };
        let PinnedLimit { limit, maps, .. } = &pinned;
        if limit.scheme().info().has_qdisc {
            self.remove_htb(&hierarchy, &pinned);
        }
        self.vacate(maps).map_err(limit_error(entry))?;
        device::remove_pinned_filters(&dir, limit);
        self.sweep_members(entry);
        // Links first: a connection that opens meanwhile must not be set again.
        detach_links(&dir)?;
        maps.leave(limit.cgroup_id);
        pinned.members.iter().for_each(|member| maps.leave(member.id));
        let sets_sockets = limit.scheme().info().sets_sockets;
        for cgroup in pinned.cgroups(&hierarchy).iter().filter(|_| sets_sockets) {
            let _ = maps.adopt(&hierarchy, cgroup, Adopt::Release);
            self.take_again(&hierarchy, entry, cgroup.path());
        }
        Ok(())
    }

    /// What a limit on a cgroup has given back is another one's that meets the same sockets: on that cgroup,
    /// above or below it. A socket that sends nothing, or that was there before its limit on a kernel before
    /// 6.12, would not hear of it.
    pub(super) fn take_again(&self, hierarchy: &Hierarchy, entry: &str, path: &str) {
        let own = entry.trim_start_matches([BUILDING, ASIDE]);
        for name in self.around_path(hierarchy, path).unwrap_or_default() {
            let dir = self.root.join(&name);
            let at = cgroup_in(hierarchy, &dir);
            // One that loses a member is named as leaving, too.
            let leaves = at.is_some() && name != own && self.leaving.contains(&name);
            if name == entry || leaves {
                continue;
            }
            for at in at.into_iter().chain(members::paths_in(hierarchy, &dir)) {
                if !contains(&at, path) && !is_above(path, &at) {
                    continue;
                }
                let (limit, cgroup) = (self.open(hierarchy, &name), hierarchy.open(&at));
                if let (Ok(limit), Ok(cgroup)) = (limit, cgroup) {
                    let _ = limit.maps.adopt(hierarchy, &cgroup, Adopt::Take);
                }
            }
        }
    }

    /// The same of what cannot be opened: a limit or pool that was being built, or a limit that another
    /// version has put on, or that has lost a pin.
    fn take_half_off(&self, hierarchy: Option<&Hierarchy>, entry: &str) {
        let dir = self.root.join(entry);
        // A limit that was once whole says where it is.
        let is_at = |mark: &&str| fs::symlink_metadata(dir.join(mark)).is_ok();
        if let Some(hierarchy) = hierarchy
            && [CGROUP, SELECT, DEV, PORT].iter().any(is_at)
        {
            self.release_unread(hierarchy, entry);
            let at = cgroup_in(hierarchy, &dir);
            for at in at.into_iter().chain(members::paths_in(hierarchy, &dir)) {
                self.take_again(hierarchy, entry, &at);
            }
        }
        let limit = self.settings_of(entry).filter(|limit| limit.ifindex != 0);
        if let Some(limit) = limit {
            acks::take_off(&dir, &limit);
            device::remove_pinned_filters(&dir, &limit);
        }
        let _ = detach_links(&dir);
        if let Some(limit) = limit.filter(|limit| limit.has_qdisc() != Some(false)) {
            self.remove_qdiscs(&dir, &limit);
        }
    }

    /// Takes the qdiscs of a limit on a device off, but for those that another one has by now. A limit that
    /// is known to have a qdisc has it, whatever one of an unknown scheme on its device may have.
    pub(super) fn remove_qdiscs(&self, dir: &Path, limit: &intf::Limit) {
        let mut limit = *limit;
        let mut others = self.roots();
        others.retain(|other| {
            (other.ifindex, other.cgroup_id) == (limit.ifindex, limit.cgroup_id)
                && (limit.has_qdisc().is_none() || other.has_qdisc().is_some())
        });
        // One may limit the device, and the other what is behind it as a port.
        let sides = [(false, limit.leaving()), (true, limit.leaving().other())];
        for (on_ifb, direction) in sides {
            if others.iter().any(|other| htb::has(other, on_ifb)) {
                limit.rate_bit_s[intf::index(direction)] = 0;
            }
        }
        // The device may be gone and its number another one's, with a limit of another store. One that was
        // renamed has no programs of an HTB any more: they went before.
        let name = device_in(dir);
        let is_others = || {
            let now = device::name_of(limit.ifindex);
            let is_other = name.is_some() && now.is_some() && now != name;
            is_other && remains::has_qdisc_programs(limit.ifindex)
                || self.has_qdisc_of_others(limit.ifindex)
        };
        let _ = in_namespace(limit.cgroup_id, || {
            if !is_others() {
                htb::remove_qdiscs(&limit);
            }
        });
    }

    /// What a directory says of its limit, or of all in a pool.
    fn settings_of(&self, entry: &str) -> Option<intf::Limit> {
        if let Some((pool, _)) = self.place_of(entry) {
            return limit_of_pool(&file_name(&pool));
        }
        let pool = || limit_of_pool(entry.trim_start_matches(BUILDING));
        settings_in(&self.root.join(entry)).or_else(pool)
    }

    /// The settings of the limits that have a qdisc at the root of their device, or may have one.
    pub(super) fn roots(&self) -> Vec<intf::Limit> {
        let names = self.names().unwrap_or_default().into_iter();
        let limits = names.filter(|name| !self.is_in_tree(name));
        let limits = limits.filter_map(|name| settings_in(&self.root.join(name)));
        limits.filter(|limit| limit.has_qdisc() != Some(false) && limit.ifindex != 0).collect()
    }

    /// Removes what a step has made and nobody has, or has not removed.
    fn clear(&self, step: &Step) {
        let roots = self.roots();
        let has_qdisc = |ifindex: u32, is_ifb: bool| {
            roots.iter().any(|limit| {
                (limit.ifindex, limit.cgroup_id) == (ifindex, step.network_namespace)
                    && htb::has(limit, is_ifb)
            }) || self.has_qdisc_of_others(ifindex)
        };
        let mut held = BTreeSet::new();
        for entry in self.entries().unwrap_or_default() {
            if !entry.starts_with([BUILDING, ASIDE]) {
                held.extend(programs_in(&self.root.join(entry)));
            }
        }
        let _ = in_namespace(step.network_namespace, || {
            for object in &step.objects {
                // Another device may have got the number since.
                let now = device::name_of(object.ifindex());
                if !step.device.is_empty() && now.is_some_and(|now| now != step.device) {
                    continue;
                }
                match object {
                    Object::Filters { ifindex, stay } => {
                        device::remove_filters_but(*ifindex, |id| {
                            stay.contains(&id) || held.contains(&id)
                        })
                    }
                    Object::Ifb { ifindex } if !has_qdisc(*ifindex, true) => {
                        htb::clear_ifb(*ifindex)
                    }
                    Object::RootQdisc { ifindex } if !has_qdisc(*ifindex, false) => {
                        let netlink = Netlink::open();
                        let _ = netlink.and_then(|mut n| root_qdisc::remove(&mut n, *ifindex));
                    }
                    Object::Clsact { ifindex, stays: false } => {
                        device::remove_unused_clsact(*ifindex)
                    }
                    _ => {}
                }
            }
        });
    }

    /// Puts a limit in force as its settings say, of which a writer that died may have done a part: where its
    /// device is. One that is no more needs none of it.
    fn settle_again(&self, name: &str) -> Result<(), StoreError> {
        match self.namespace_of(name) {
            Some(inode) => in_namespace(inode, || self.settle_here(name)).unwrap_or(Ok(())),
            None => self.settle_here(name),
        }
    }

    fn settle_here(&self, name: &str) -> Result<(), StoreError> {
        let hierarchy = Hierarchy::find().map_err(|e| limit_error(name)(e.into()))?;
        let pinned = match self.open(&hierarchy, name) {
            Err(StoreError::Missing(_)) => return Ok(()),
            pinned => pinned?,
        };
        let Some(scope) = &pinned.scope else { return Ok(()) };
        if let Some(place) = pinned.maps.own.place() {
            place.forget_others(&pinned.limit).map_err(limit_error(name))?;
        }
        let limit = pinned.encode(&pinned.asked)?;
        self.change_to(&hierarchy, &pinned, scope, &limit, &pinned.asked)
    }

    /// What putting a limit on a device makes there.
    pub(super) fn installation(
        &self,
        name: &str,
        target: Option<&Target>,
        has_qdisc: bool,
    ) -> Step {
        let mut step = Step {
            deed: Deed::Install,
            limit: name.to_owned(),
            network_namespace: target.map_or(0, |target| target.namespace),
            device: target.map_or_else(String::new, |target| target.scope.name().to_owned()),
            objects: Vec::new(),
        };
        let Some(ifindex) = target.map(|target| target.ifindex) else { return step };
        step.objects.push(Object::Filters { ifindex, stay: device::filters(ifindex) });
        if has_qdisc {
            step.objects.extend([Object::Ifb { ifindex }, Object::RootQdisc { ifindex }]);
        }
        step.objects.push(Object::Clsact { ifindex, stays: device::has_clsact(ifindex) });
        step
    }

    /// The name of the device of a limit: that of now, as it may have been renamed.
    fn device_now(&self, name: &str) -> Option<String> {
        let opened = Hierarchy::find().ok().and_then(|h| self.open(&h, name).ok());
        let scope = opened.and_then(|pinned| pinned.scope).filter(Scope::is_device);
        let now = scope.map(|scope| scope.name().to_owned());
        now.or_else(|| device_in(&self.root.join(name)))
    }

    /// What taking a limit off removes.
    pub(super) fn removal(&self, deed: Deed, name: &str) -> Step {
        let dir = self.root.join(name);
        let limit = self.settings_of(name).filter(|limit| limit.ifindex != 0);
        let mut step = Step {
            deed,
            limit: name.to_owned(),
            network_namespace: limit.map_or(0, |limit| limit.cgroup_id),
            device: self.device_now(name).unwrap_or_default(),
            objects: Vec::new(),
        };
        let Some(limit) = limit.filter(device::is_in_this_namespace) else { return step };
        let ifindex = limit.ifindex;
        let mut own = programs_in(&dir);
        if let Some((pool, _)) = self.place_of(name)
            && places_in(&pool).is_ok_and(|places| places.len() <= 1)
        {
            own.extend(programs_in(&pool));
        }
        let mut stay = device::filters(ifindex);
        stay.retain(|id| !own.contains(id));
        step.objects.push(Object::Filters { ifindex, stay });
        if limit.has_qdisc() != Some(false) && !self.is_in_tree(name) {
            step.objects.extend([Object::Ifb { ifindex }, Object::RootQdisc { ifindex }]);
        }
        let came = fs::symlink_metadata(dir.join(device::CLSACT_MARK)).is_ok();
        step.objects.push(Object::Clsact { ifindex, stays: !came });
        step
    }
}

#[cfg(test)]
mod tests;
