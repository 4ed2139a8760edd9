//! A pool of limits on cgroups: one copy of the programs, and maps in which each limit has a slot
//! (`bpf/nrm/slot.h`). The kernel keeps the slot of its limit with each cgroup.

use std::{any::Any, mem::MaybeUninit, os::fd::OwnedFd, path::Path};

use libbpf_rs::{Link, MapCore, MapHandle};
use tidegate_core::exempt::Exempt;

use super::{Queues, Sharing, Sockets, load};
use crate::{
    bpf::{self, Links, keep, load_error, open_map},
    cgroup::{Cgroup, Hierarchy},
    intf,
    limit::{
        Adopt, LimitError, LimitMaps, ParentMaps, attach,
        slot_pool::{PINS, SlotPool},
    },
};

/// Programs, by the names of their links.
pub(crate) type Programs = Vec<(&'static str, OwnedFd)>;

/// What is loaded for a pool, to be pinned.
pub(crate) struct LoadedPool {
    /// With their pins.
    pub(crate) maps: Vec<(&'static str, MapHandle)>,
    /// Those of the parent, if its limits have one.
    pub(crate) above: Option<ParentMaps>,
    pub(crate) programs: Programs,
    /// The iterator over sockets.
    pub(crate) adopt: OwnedFd,
    /// Its link.
    pub(crate) adopt_link: Link,
}

impl SlotPool {
    /// Loads the programs of a new pool, whose limits are inside another one if it has a parent, and exempt
    /// the same prefixes.
    pub(crate) fn make(
        parent: Option<&ParentMaps>,
        exempt: &Exempt,
    ) -> Result<LoadedPool, LimitError> {
        Self::load(parent, None, !exempt.is_empty(), |maps| maps.exempt(&exempt.prefixes))
    }

    /// Loads the programs again, with the maps that the pool has.
    pub(crate) fn reload(&self) -> Result<LoadedPool, LimitError> {
        let maps = self.all_maps()?;
        Self::load(maps.own.parent(), Some(self), maps.exempt.is_some(), |_| Ok(()))
    }

    fn load(
        parent: Option<&ParentMaps>,
        earlier: Option<&SlotPool>,
        exempts: bool,
        fill: impl FnOnce(&LimitMaps) -> Result<(), LimitError>,
    ) -> Result<LoadedPool, LimitError> {
        let maps_there = earlier.map(SlotPool::all_maps).transpose()?;
        let adoption = earlier.map(SlotPool::adoption).transpose()?;
        let slots = Some(earlier.map(|pool| &pool.slots));
        let parent = parent.map(ParentMaps::again).transpose()?;
        let earlier = maps_there.as_ref();
        let sharing = Sharing { parent, earlier, slots, exempts, ..Sharing::default() };
        load(sharing, |maps, slots, programs| {
            fill(&maps)?;
            let mut storage = MaybeUninit::uninit();
            let adopt =
                maps.own_as::<Sockets>()?.load_adopt(&maps, &mut storage, adoption.as_ref())?;
            let handle = MapHandle::try_from(&adopt.maps.adoption).map_err(load_error("adopt"))?;
            let adopt_link = adopt.progs.adopt.attach().map_err(load_error("adopt"))?;
            let adopt = keep(&adopt.progs.adopt, "adopt")?;
            let LimitMaps { limit, counters, exempt, own, .. } = maps;
            let own: Box<dyn Any> = own;
            let own = own.downcast::<Sockets>().map_err(|_| LimitError::Layout("queues"))?;
            let Sockets { queues, sockets, parent: above, .. } = *own;
            let every = [limit, queues.0, counters, sockets].map(Some);
            let all = every.into_iter().chain([slots, Some(handle), exempt]);
            let maps = PINS.into_iter().zip(all).filter_map(|(pin, map)| Some((pin, map?)));
            Ok(LoadedPool { maps: maps.collect(), above, programs, adopt, adopt_link })
        })
    }

    /// The maps of all limits.
    fn all_maps(&self) -> Result<LimitMaps, LimitError> {
        let exempt = self.exempt()?;
        Ok(LimitMaps { exempt, ..maps_in(&self.dir, None)? })
    }

    /// The maps for the limit in a slot.
    fn maps_of(self, at: u32) -> Result<LimitMaps, LimitError> {
        let (exempt, dir) = (self.exempt()?, self.dir.clone());
        Ok(LimitMaps { exempt, at, ..maps_in(&dir, Some(self))? })
    }

    /// How many slots it has, the one that no limit gets included.
    pub(crate) fn size(&self) -> Result<u32, LimitError> {
        Ok(open_map(&self.dir, PINS[0])?.max_entries() / intf::LIMITS as u32)
    }

    /// The maps of a new limit in a slot.
    pub(crate) fn take(self, slot: u32, limit: intf::Entry) -> Result<LimitMaps, LimitError> {
        let maps = self.maps_of(slot)?;
        clear(&maps)?;
        maps.write(limit)?;
        Ok(maps)
    }

    /// Puts a limit in force on a cgroup.
    pub(crate) fn enter(
        &self,
        programs: &[(&'static str, OwnedFd)],
        cgroup: &Cgroup,
        slot: u32,
    ) -> Result<Links, LimitError> {
        // The kernel keeps the slot of a limit that the cgroup had before.
        let _ = self.set(cgroup.id(), slot);
        let links = attach(programs, cgroup)?;
        // From here on, in all directions at once.
        self.set(cgroup.id(), slot)?;
        Ok(links)
    }

    /// Takes a cgroup, whose links are gone, out of a limit that cannot be read. One that has another limit
    /// of the pool by now is not touched.
    pub(crate) fn release(
        self,
        hierarchy: &Hierarchy,
        cgroup: &Cgroup,
        slot: u32,
    ) -> Result<(), LimitError> {
        if self.slot_of(cgroup.id()) != slot {
            return Ok(());
        }
        self.leave(cgroup.id(), slot);
        self.maps_of(slot)?.adopt(hierarchy, cgroup, Adopt::Release)
    }
}

/// The maps that are pinned in the directory of a pool.
fn maps_in(dir: &Path, pool: Option<SlotPool>) -> Result<LimitMaps, LimitError> {
    let [limits, queues, counters, sockets, ..] = PINS;
    let open = |name| open_map(dir, name);
    let parent = ParentMaps::open(dir)?;
    let queues = Queues(open(queues)?);
    let own = Sockets { queues, sockets: open(sockets)?, parent, pool };
    Ok(LimitMaps::new(open(limits)?, open(counters)?, own))
}

/// A slot as new.
fn clear(maps: &LimitMaps) -> Result<(), LimitError> {
    let own = |entries: usize| maps.at * entries as u32..(maps.at + 1) * entries as u32;
    bpf::clear::<intf::Limit>(&maps.limit, "limit", own(intf::LIMITS))?;
    bpf::clear::<intf::NrmQueue>(&maps.own_as::<Sockets>()?.queues.0, "queues", own(intf::QUEUES))?;
    bpf::clear::<intf::Counters>(&maps.counters, "counters", own(intf::DIRECTIONS))
}
