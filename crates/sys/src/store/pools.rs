//! Limits with prefixes in the store: those of a device share its pool ([`MapPool`]), and have a place in it.
//!
//! ```text
//! NAME/{limit,queues,counters}     maps that it shares with others of its device
//!      room, place                 symbolic links to the name of the pool, and to its number there
//! +KIND-INDEX-NAMESPACE/           the pool of a device
//!     {places,lengths,limits,queues,counters,exempts}   its maps
//!     {egress,ingress}, program_{egress,ingress}, clsact   its programs, as a limit's
//!     build                        symbolic link to the build whose programs they are
//!     N                            symbolic link to the name of the limit in place N
//! ```
//!
//! A pool comes with its first limit and goes with its last. Packets find a limit before it is listed,
//! and none that is taken off; a place whose limit is not there is free (see [`Store::sweep_pools`]).

use std::{
    fs,
    path::{Path, PathBuf},
};

use tidegate_core::{
    Scope,
    prefixes::{Prefix, Prefixes},
};

use super::{
    BUILDING, DEV, MAX_LIMITS, PORT, Store, StoreError, io_error, limit_error, name_in,
    pins::{detach_links, pin_each, pin_hooks, pin_maps, remove_pins},
    pool_names::{POOL, POOL_PREFIX, POOL_SLOT, file_name, is_slots, sign_pool},
    symlink,
};
use crate::{
    device::{self, Filters, Hooked, Target},
    intf,
    limit::{LimitError, LimitMaps, LimitOptions},
    schemes::police::{
        Place,
        pool::{MapPool, vacate},
    },
};

/// The links of a pool's programs.
const HOOKS: [&str; 2] = ["egress", "ingress"];

/// What a limit with prefixes is not in when its packets do not find it.
pub(super) const MATCH: &str = "match";

impl Store {
    /// Puts a limit with prefixes on a device.
    pub(super) fn install_matched(
        &self,
        name: &str,
        scope: &Scope,
        options: &LimitOptions,
    ) -> Result<(), StoreError> {
        let refused = || limit_error(name);
        if self.names()?.len() >= MAX_LIMITS {
            return Err(StoreError::Full);
        }
        let target = Target::find(scope).map_err(|e| refused()(e.into()))?;
        let limit = target.encode(options).map_err(refused())?;
        let dir = self.root.join(pool_name(&limit, scope));
        let is_new = !dir.is_dir();
        let pool = self.enter_pool(&dir, name, &target, &limit)?;
        let done = self.take_place(&dir, &pool, name, scope, options, limit);
        if done.is_err() && is_new {
            self.leave_pool(&dir);
        }
        done
    }

    fn take_place(
        &self,
        dir: &Path,
        pool: &MapPool,
        name: &str,
        scope: &Scope,
        options: &LimitOptions,
        limit: intf::Entry,
    ) -> Result<(), StoreError> {
        let refused = || limit_error(name);
        let taken = pool.taken(&options.matched, None).map_err(refused())?;
        check_prefixes(dir, scope, taken)?;
        let taken = places_in(dir)?;
        let free = (0..intf::PLACES).find(|index| taken.binary_search(index).is_err());
        let index = free.ok_or_else(|| refused()(LimitError::NoPlace))?;
        let link = dir.join(index.to_string());
        symlink(Path::new(name), &link)?;
        let building = self.root.join(format!("{BUILDING}{name}"));
        let put = || {
            let mut maps = pool.take(index, &options.matched).map_err(refused())?;
            let place = pool.place(index, &options.matched).map_err(refused())?;
            let exempt = &options.exempt.prefixes;
            place.write(&maps.limit, &limit.into(), exempt).map_err(refused())?;
            pin_maps(&mut maps, options, &building)?;
            let mark = if matches!(scope, Scope::Port(_)) { PORT } else { DEV };
            symlink(Path::new(scope.name()), &building.join(mark))?;
            symlink(Path::new(dir.file_name().unwrap_or_default()), &building.join(POOL))?;
            symlink(Path::new(&index.to_string()), &building.join(POOL_SLOT))?;
            let done = place.enter(&limit, &options.matched).map_err(refused());
            let done = done.and_then(|()| self.publish(&building, name));
            done.inspect_err(|_| drop(vacate(&place, &maps)))
        };
        let done = put();
        if done.is_err() {
            let _ = remove_pins(&building);
            let _ = fs::remove_file(&link);
        }
        done
    }

    /// Checks that a limit that is there can get other prefixes.
    pub(super) fn check_change(
        &self,
        name: &str,
        scope: &Scope,
        matched: &Prefixes,
    ) -> Result<(), StoreError> {
        let Some((dir, index)) = self.place_of(name).filter(|(dir, _)| !is_slots(dir)) else {
            return Ok(());
        };
        let pool = MapPool::open(&dir).map_err(limit_error(name))?;
        let taken = pool.taken(matched, Some(index)).map_err(limit_error(name))?;
        check_prefixes(&dir, scope, taken)
    }

    /// The pool of a device, made if there is none, its programs put back if somebody took them off.
    fn enter_pool(
        &self,
        dir: &Path,
        name: &str,
        target: &Target,
        limit: &intf::Limit,
    ) -> Result<MapPool, StoreError> {
        let refused = || limit_error(name);
        if !dir.is_dir() {
            let (mut pool, mut hooked) = MapPool::attach(target, None).map_err(refused())?;
            let building = self.root.join(format!("{BUILDING}{}", file_name(dir)));
            fs::create_dir(&building).map_err(io_error(&building, "create"))?;
            let mut pin = || {
                pin_each(pool.pins(), &building)?;
                pin_hooks(hooked.filters.as_ref(), &hooked.links, &building)?;
                sign_pool(&building)?;
                fs::rename(&building, dir).map_err(io_error(dir, "rename to"))
            };
            pin().inspect_err(|_| drop(remove_pins(&building)))?;
            hooked.filters.iter_mut().for_each(Filters::keep);
            return Ok(pool);
        }
        let pool = MapPool::open(dir).map_err(refused())?;
        if device::unhooked(dir, limit, &HOOKS).is_empty() {
            self.take_over_pool(dir, limit)?;
            return Ok(pool);
        }
        let (_, hooked) = MapPool::attach(target, Some(&pool)).map_err(refused())?;
        self.replace_hooks(dir, limit, hooked)?;
        Ok(pool)
    }

    fn replace_hooks(
        &self,
        dir: &Path,
        limit: &intf::Limit,
        mut hooked: Hooked,
    ) -> Result<(), StoreError> {
        take_hooks_off(dir, limit);
        pin_hooks(hooked.filters.as_ref(), &hooked.links, dir)?;
        hooked.filters.iter_mut().for_each(Filters::keep);
        sign_pool(dir)
    }

    /// Takes a pool away.
    fn leave_pool(&self, dir: &Path) {
        if is_slots(dir) {
            let _ = remove_pins(dir);
            return;
        }
        self.pass_clsact_on(&file_name(dir));
        take_hooks_off(dir, &limit_of_pool(&file_name(dir)).unwrap_or_default());
        let _ = remove_pins(dir);
    }

    /// The number of a limit in its maps, which it may share.
    pub(super) fn at_of(&self, name: &str) -> u32 {
        match self.place_of(name) {
            Some((dir, slot)) if is_slots(&dir) => slot,
            Some((_, index)) => index % intf::CHUNK,
            None => 0,
        }
    }

    /// Where the pool of a limit is, and its place: to be asked before its directory goes.
    pub(super) fn place_of(&self, name: &str) -> Option<(PathBuf, u32)> {
        let dir = self.root.join(name);
        let pool = self.root.join(name_in(&dir, POOL)?);
        Some((pool, name_in(&dir, POOL_SLOT)?.parse().ok()?))
    }

    /// The hooks at which a limit with prefixes no longer is.
    pub(super) fn unhooked_matched(
        &self,
        name: &str,
        limit: &intf::Limit,
        place: Option<&Place>,
    ) -> Vec<&'static str> {
        let Some((dir, _)) = self.place_of(name) else { return vec![MATCH] };
        let mut gone = device::unhooked(&dir, limit, &HOOKS);
        if !place.is_some_and(|place| place.is_entered(limit)) {
            gone.push(MATCH);
        }
        gone
    }

    /// Takes the limit out of its pool, before its directory goes.
    pub(super) fn vacate(&self, maps: &LimitMaps) -> Result<(), LimitError> {
        maps.own.place().map_or(Ok(()), |place| vacate(place, maps))
    }

    /// Frees the place of a limit that is gone, and takes the pool away if it was the last.
    pub(super) fn free_place(&self, dir: &Path, index: u32) {
        let _ = fs::remove_file(dir.join(index.to_string()));
        if unsorted_places_in(dir).is_ok_and(|mut places| places.next().is_none()) {
            self.leave_pool(dir);
        }
    }

    /// Frees the places of limits that a writer which died has left, and takes empty pools away.
    pub(super) fn sweep_pools(&self) {
        let pools = self.entries().unwrap_or_default();
        for name in pools.iter().filter(|name| name.starts_with(POOL_PREFIX)) {
            let dir = self.root.join(name);
            let places = places_in(&dir).unwrap_or_default();
            let is_there = |index: &u32| {
                let place = limit_in(&dir, *index).and_then(|limit| self.place_of(&limit));
                place.is_some_and(|place| place == (dir.clone(), *index))
            };
            let (there, gone): (Vec<_>, Vec<_>) = places.into_iter().partition(is_there);
            for index in gone {
                let _ = fs::remove_file(dir.join(index.to_string()));
            }
            if there.is_empty() {
                self.leave_pool(&dir);
            }
        }
    }
}

/// Refuses prefixes of which another limit of the device has one.
fn check_prefixes(
    dir: &Path,
    scope: &Scope,
    taken: Option<(u32, Prefix)>,
) -> Result<(), StoreError> {
    let Some((index, prefix)) = taken else { return Ok(()) };
    // Of a limit that a process which died has left: the new one takes it over.
    let Some(name) = limit_in(dir, index) else { return Ok(()) };
    Err(StoreError::PrefixTaken { scope: scope.clone(), prefix, name })
}

/// The name of the directory of a pool.
fn pool_name(limit: &intf::Limit, scope: &Scope) -> String {
    format!("{POOL_PREFIX}{}-{}-{}", scope.kind(), limit.ifindex, limit.cgroup_id)
}

/// What the name of a pool says of its limits.
pub(super) fn limit_of_pool(name: &str) -> Option<intf::Limit> {
    let mut words = name.strip_prefix(POOL_PREFIX)?.split('-');
    let flags = if words.next()? == PORT { intf::FLAG_PORT } else { 0 };
    let ifindex = words.next()?.parse().ok()?;
    let cgroup_id = words.next()?.parse().ok()?;
    Some(intf::Limit { flags, ifindex, cgroup_id, ..intf::Limit::default() })
}

/// The places of a pool that are taken, in order.
pub(super) fn places_in(dir: &Path) -> Result<Vec<u32>, StoreError> {
    let mut places: Vec<_> = unsorted_places_in(dir)?.collect();
    places.sort_unstable();
    Ok(places)
}

fn unsorted_places_in(dir: &Path) -> Result<impl Iterator<Item = u32>, StoreError> {
    let entries = fs::read_dir(dir).map_err(io_error(dir, "list"))?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// The name of the limit in a place.
pub(super) fn limit_in(dir: &Path, index: u32) -> Option<String> {
    name_in(dir, &index.to_string())
}

/// Takes the programs of a pool off, with their pins.
fn take_hooks_off(dir: &Path, limit: &intf::Limit) {
    device::remove_pinned_filters(dir, limit);
    let _ = detach_links(dir);
    for pin in HOOKS.into_iter().chain(device::PROGRAM_PINS).chain([device::CLSACT_MARK]) {
        let _ = fs::remove_file(dir.join(pin));
    }
}
