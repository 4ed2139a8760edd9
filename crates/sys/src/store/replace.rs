//! A limit in the place of another one.
//!
//! Where the kernel lets both be, the new one is built beside the earlier one, their directories are
//! exchanged, and the earlier one is taken off. Else the earlier one is set aside, so that it can be put
//! back.

use std::{fs, path::Path};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use tidegate_core::{Direction, Scope, police::Hook};

use super::{
    ASIDE, BUILDING, DEV, Intent, PARENT, PORT, PinnedLimit, Store, StoreError, StoreLock,
    bpf_error, cgroup_in,
    htb::device_in,
    io_error,
    journal::{Deed, Journal},
    limit_error,
    members::selector_in,
    name_in,
    pins::{open_map, remove_pins},
    pool_names::{POOL, POOL_SLOT},
    symlink,
};
use crate::{
    bpf::{create_map, lookup},
    cgroup::Hierarchy,
    device::{self, PROGRAM_PINS, XDP_PIN},
    intf::{self, DIRECTIONS},
    limit::{Carried, LimitError, LimitMaps, LimitOptions, Reading},
    schemes::{
        LINKS,
        htb::{DROP_FULL, ROOT, SLOT, SLOTS_PIN},
    },
};

/// The pin of the settings of a limit that was set aside.
const SETTINGS: &str = "settings";
/// A symbolic link as the intent is: any version can read it.
const CARRIED: &str = "carried";
/// What takes its place.
const NEXT: &str = "carried_next";
/// The same: what a limit had counted when it was set aside.
const COUNTED: &str = "counted";

impl Store {
    /// Puts a limit in the place of another one of its name. Where the kernel lets both be, the new one comes
    /// first; else the other one is off for the moment between the two: a device has one HTB, one program in
    /// XDP, one holder of a prefix, and on kernels without tcx one filter of ours.
    ///
    /// # Errors
    /// [`StoreError`]; the earlier limit is in force.
    pub fn replace(
        &self,
        lock: &StoreLock,
        hierarchy: &Hierarchy,
        name: &str,
        scope: &Scope,
        options: &LimitOptions,
        parent: Option<&str>,
    ) -> Result<(), StoreError> {
        let install = || self.install_with(&lock.journal, hierarchy, name, scope, options, parent);
        let fits = match self.open(hierarchy, name) {
            Err(StoreError::Unreadable { .. }) if !self.fits_beside_unread(name, options) => {
                // It cannot be put back.
                let counted = self.counted_in(hierarchy, name);
                self.take_away(lock, name)?;
                install()?;
                self.carry(name, &counted);
                return Ok(());
            }
            Err(StoreError::Unreadable { .. }) => true,
            earlier => self.fits_beside(&earlier?, scope, options),
        };
        if fits {
            install()?;
            let earlier = format!("{BUILDING}{name}");
            // Both have counted for a moment.
            let counted = self.counted_in(hierarchy, &earlier);
            let counted = counted.minus(&self.counted_in(hierarchy, name));
            self.carry(name, &counted);
            return self.take_off(&earlier);
        }
        self.set_aside(lock, name)?;
        match install() {
            Ok(()) => self.forget(name),
            Err(e) => Err(self.put_back_after(lock, name, e)),
        }
    }

    /// Reads the counters of a limit; those of another version are read without its scheme, from their map.
    fn counted_in(&self, hierarchy: &Hierarchy, entry: &str) -> Carried {
        let readable = self.open_at(hierarchy, entry).ok().and_then(|limit| {
            let mut readings = [Reading::default(); DIRECTIONS];
            for direction in Direction::BOTH {
                readings[intf::index(direction)] = limit.maps.read(direction).ok()?;
            }
            Some(Carried::of_readings(&readings))
        });
        readable.unwrap_or_else(|| {
            let counters = MapHandle::from_pinned_path(self.root.join(entry).join("counters"));
            let at = self.at_of(entry);
            let counted = counters.map(|counters| Carried::of(&counters, at)).unwrap_or_default();
            counted.plus(&self.carried_in(entry))
        })
    }

    /// What an earlier version had counted when a limit was replaced.
    pub(super) fn carried_in(&self, entry: &str) -> Carried {
        self.written_in(entry, CARRIED).unwrap_or_default()
    }

    /// Does what may give a limit another queue of the kernel. That begins to count what it drops anew, so
    /// the limit goes on from the count of the earlier one.
    pub(super) fn keep_drops<T>(&self, limit: &PinnedLimit, change: impl FnOnce() -> T) -> T {
        let before = dropped(&limit.maps);
        let done = change();
        if let (Ok(before), Ok(now)) = (before, dropped(&limit.maps)) {
            let lost = before.minus(&now);
            if lost != Carried::default() {
                let dir = self.root.join(&limit.name);
                let _ = fs::remove_file(dir.join(NEXT));
                self.write_in(&limit.name, NEXT, &limit.maps.carried.plus(&lost));
                let _ = fs::rename(dir.join(NEXT), dir.join(CARRIED));
            }
        }
        done
    }

    /// Has a limit go on from what its predecessor has counted.
    fn carry(&self, name: &str, counted: &Carried) {
        self.write_in(name, CARRIED, counted);
    }

    fn written_in(&self, entry: &str, link: &str) -> Option<Carried> {
        serde_json::from_str(&name_in(&self.root.join(entry), link)?).ok()
    }

    /// Writes what was counted, once. A limit is in force also where that fails.
    fn write_in(&self, entry: &str, link: &str, counted: &Carried) {
        // Numbers always are JSON.
        let text = serde_json::to_string(counted).unwrap_or_default();
        let _ = symlink(Path::new(&text), &self.root.join(entry).join(link));
    }

    /// Puts a limit back that made way for another one; why that is not on, and this one perhaps neither.
    fn put_back_after(&self, lock: &StoreLock, name: &str, source: StoreError) -> StoreError {
        match self.put_back_with(&lock.journal, name) {
            Ok(()) => source,
            Err(back) => {
                let (source, back) = (Box::new(source), Box::new(back));
                StoreError::NotPutBack { name: name.to_owned(), source, back }
            }
        }
    }

    /// Whether a limit can be put on while an earlier one of its name still is that cannot be read. On a
    /// device that is so where its pins are links of tcx alone, and the new one changes no qdisc.
    fn fits_beside_unread(&self, name: &str, options: &LimitOptions) -> bool {
        let dir = self.root.join(name);
        if device_in(&dir).is_none() {
            return true;
        }
        let is_pinned = |pin: &&str| fs::symlink_metadata(dir.join(pin)).is_ok();
        let one_a_device = [XDP_PIN, SLOTS_PIN, SLOT, ROOT, POOL, PROGRAM_PINS[0], PROGRAM_PINS[1]];
        LINKS.iter().any(is_pinned)
            && !one_a_device.iter().any(is_pinned)
            && !options.scheme.info().has_qdisc
    }

    /// Whether a limit can be put on while an earlier one of its name still is.
    fn fits_beside(&self, earlier: &PinnedLimit, scope: &Scope, options: &LimitOptions) -> bool {
        let Some(Scope::Dev(there) | Scope::Port(there)) = &earlier.scope else { return true };
        if scope.name() != there || !scope.is_device() {
            return true;
        }
        let is = earlier.options();
        let both = |has: fn(&LimitOptions) -> bool| has(&is) && has(options);
        let dir = self.root.join(&earlier.name);
        let has_filters = PROGRAM_PINS.iter().any(|pin| dir.join(pin).exists());
        !(has_filters
            || both(|o| o.scheme.info().has_qdisc)
            || both(|o| o.police.hook == Hook::Xdp)
            || both(|o| !o.matched.is_empty()))
    }

    /// Takes a limit off for another one that cannot be beside it. Its settings stay until that is there
    /// ([`Store::forget_all`]); else it is put back by whoever opens the store next.
    ///
    /// # Errors
    /// [`StoreError`]; the limit is as before, unless the error is [`StoreError::NotPutBack`].
    pub fn set_aside(&self, lock: &StoreLock, name: &str) -> Result<(), StoreError> {
        let (dir, aside) = (self.root.join(name), self.root.join(format!("{ASIDE}{name}")));
        let hierarchy = Hierarchy::find().map_err(|e| limit_error(name)(e.into()))?;
        // What it shares with others is cleared, and a qdisc counts no more.
        keep_settings(&self.open(&hierarchy, name)?.limit, &dir)?;
        let counted = self.counted_in(&hierarchy, name);
        lock.journal.begin(self.removal(Deed::SetAside, name))?;
        fs::rename(&dir, &aside).map_err(io_error(&dir, "rename"))?;
        self.write_in(&format!("{ASIDE}{name}"), COUNTED, &counted);
        let done = self.clear_aside(name);
        lock.journal.end();
        done.map_err(|e| self.put_back_after(lock, name, e))
    }

    /// Takes all of a limit off that was set aside, but its settings.
    pub(super) fn clear_aside(&self, name: &str) -> Result<(), StoreError> {
        let aside = format!("{ASIDE}{name}");
        let place = self.place_of(&aside);
        self.take_hooks_off(&aside)?;
        // Others may have its place among prefixes, or in a tree, from now on.
        for link in [POOL, POOL_SLOT, ROOT, SLOT] {
            let _ = fs::remove_file(self.root.join(&aside).join(link));
        }
        if let Some((pool, index)) = place {
            self.free_place(&pool, index);
        }
        Ok(())
    }

    /// Other limits are in the places of all that were set aside.
    pub fn forget_all(&self, _lock: &StoreLock) {
        for entry in self.entries().unwrap_or_default().iter().filter(|e| e.starts_with(ASIDE)) {
            let _ = self.forget(entry.trim_start_matches(ASIDE));
        }
    }

    /// Another limit is in the place of one that was set aside; with its name it goes on from its count.
    pub(super) fn forget(&self, name: &str) -> Result<(), StoreError> {
        let (aside, gone) = (format!("{ASIDE}{name}"), format!("{BUILDING}{name}"));
        let gone = self.root.join(gone);
        self.pass_clsact_on(&aside);
        if let Some(counted) = self.written_in(&aside, COUNTED) {
            self.carry(name, &counted);
        }
        // In one step, or what is left of it might be put back.
        fs::rename(self.root.join(aside), &gone).map_err(io_error(&gone, "rename to"))?;
        remove_pins(&gone)
    }

    /// Puts a limit back that was set aside, in the network namespace of its device; where that cannot be
    /// found it stays aside.
    pub(super) fn put_back_with(&self, journal: &Journal, name: &str) -> Result<(), StoreError> {
        let dir = self.root.join(format!("{ASIDE}{name}"));
        let inode =
            settings_in(&dir).filter(|limit| limit.ifindex != 0).map(|limit| limit.cgroup_id);
        let put = || self.put_back_here(journal, name);
        inode.map_or_else(put, |inode| device::in_namespace(inode, put).unwrap_or(Ok(())))
    }

    fn put_back_here(&self, journal: &Journal, name: &str) -> Result<(), StoreError> {
        let aside = format!("{ASIDE}{name}");
        if self.root.join(name).is_dir() {
            return self.forget(name);
        }
        let put = || {
            // Whoever set it aside may have died meanwhile.
            self.clear_aside(name)?;
            let hierarchy = Hierarchy::find().map_err(|e| limit_error(name)(e.into()))?;
            let dir = self.root.join(&aside);
            let scope = scope_in(&hierarchy, &dir);
            let scope = scope.ok_or_else(|| StoreError::Missing(name.to_owned()))?;
            let options = Intent::read(&dir).and_then(|intent| intent.options);
            let options = options.ok_or_else(|| StoreError::Missing(name.to_owned()))?;
            let parent = name_in(&dir, PARENT);
            let parent = parent.as_deref();
            self.install_with(journal, &hierarchy, name, &scope, &options, parent)
        };
        match put() {
            Ok(()) => self.forget(name),
            // Others have its place by now.
            Err(
                StoreError::ScopeTaken { .. }
                | StoreError::PrefixTaken { .. }
                | StoreError::NoParent { .. },
            ) => self.forget(name),
            Err(e) => {
                // So that it is seen that it should be on.
                let _ = fs::rename(self.root.join(&aside), self.root.join(name));
                self.note(name);
                Err(e)
            }
        }
    }

    /// Lists a limit that has been built, in the place of another one of its name if there is one: that is
    /// to be taken off then.
    pub(super) fn publish(&self, building: &Path, name: &str) -> Result<(), StoreError> {
        let target = self.root.join(name);
        let done = match target.is_dir() {
            true => renameat_with(CWD, building, CWD, &target, RenameFlags::EXCHANGE),
            false => rustix::fs::rename(building, &target),
        };
        done.map_err(|e| io_error(&target, "rename to")(e.into()))?;
        self.note(name);
        Ok(())
    }
}

/// How many packets queues have dropped; nothing else.
fn dropped(maps: &LimitMaps) -> Result<Carried, LimitError> {
    let mut readings = [Reading::default(); DIRECTIONS];
    for direction in Direction::BOTH {
        let drops = maps.read(direction)?.counters.packets[DROP_FULL];
        readings[intf::index(direction)].counters.packets[DROP_FULL] = drops;
    }
    Ok(Carried::of_readings(&readings))
}

/// Pins a copy of the settings of a limit in its directory.
pub(super) fn keep_settings(limit: &intf::Limit, dir: &Path) -> Result<(), StoreError> {
    let path = dir.join(SETTINGS);
    let _ = fs::remove_file(&path);
    create_map(MapType::Array, SETTINGS, size_of::<intf::Limit>(), 1)
        .and_then(|mut map| {
            map.update(&0u32.to_ne_bytes(), bytemuck::bytes_of(limit), MapFlags::ANY)?;
            map.pin(&path)
        })
        .map_err(bpf_error(&path, "pin"))
}

/// The settings of a limit that was set aside.
fn settings_in(dir: &Path) -> Option<intf::Limit> {
    open_map(dir, SETTINGS).ok().and_then(|map| lookup(&map, SETTINGS, 0).ok())
}

/// Where the limit of a directory was. Its device may have another name now.
fn scope_in(hierarchy: &Hierarchy, dir: &Path) -> Option<Scope> {
    let cgroup = || cgroup_in(hierarchy, dir).map(Scope::Cgroup);
    let device = |mark, kind: fn(String) -> Scope| {
        let now = || device::name_of(settings_in(dir)?.ifindex);
        name_in(dir, mark).map(|name| kind(now().unwrap_or(name)))
    };
    let select = selector_in(dir).map(Scope::Select);
    select.or_else(|| device(DEV, Scope::Dev)).or_else(|| device(PORT, Scope::Port)).or_else(cgroup)
}
