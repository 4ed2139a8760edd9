//! The programs of schemes `pace` and `nrm`, on a cgroup.
//!
//! Three objects share the maps of a limit: `nrm` (both directions of cgroup_skb), `tune` (sock_ops, for
//! new connections) and `adopt` (an iterator, for sockets that exist when the limit comes, changes or goes;
//! see [`LimitMaps`]). One loaded copy of them serves a limit, or all of a [`SlotPool`].

use std::{mem::MaybeUninit, path::Path};

use libbpf_rs::{
    MapHandle, OpenObject, ProgramMut,
    skel::{OpenSkel, SkelBuilder},
};

use crate::{
    bpf::{keep, load_error, quiet_libbpf, random_seed, reuse},
    exempt::set_exempt,
    intf,
    limit::{LimitError, LimitMaps, LimitOptions, Loaded, ParentMaps, set_parent},
    schemes::{LINKS, Pinning, Scheme, Successor, successors},
    skel,
};

mod pool;

/// Schemes `pace` and `nrm`.
pub(crate) struct Nrm;

impl Scheme for Nrm {
    fn links(&self, _limit: &intf::Limit) -> &'static [&'static str] {
        &LINKS
    }

    fn pinning(&self) -> Pinning {
        Pinning::Shared
    }

    fn load(
        &self,
        cgroup_id: u64,
        options: &LimitOptions,
        parent: Option<&LimitMaps>,
    ) -> Result<Loaded, LimitError> {
        let limit = options.encode(cgroup_id)?;
        let above = parent.map(ParentMaps::of).transpose()?.flatten();
        let sharing = Sharing {
            parent: above,
            exempts: !options.exempt.is_empty(),
            earlier: None,
            slots: None,
        };
        load(sharing, |maps, _, [egress, ingress, tune]| {
            maps.write(limit)?;
            maps.exempt(&options.exempt.prefixes)?;
            if let Some(parent) = parent {
                maps.start_in(parent, options)?;
            }
            let programs = vec![
                (LINKS[0], keep(egress, "nrm_egress")?),
                (LINKS[1], keep(ingress, "nrm_ingress")?),
                (LINKS[2], keep(tune, "tune")?),
            ];
            Ok(Loaded { maps, programs })
        })
    }

    fn reload(
        &self,
        dir: &Path,
        _limit: &intf::Limit,
        maps: &LimitMaps,
    ) -> Result<Vec<Successor>, LimitError> {
        let above = maps.parent.as_ref().map(ParentMaps::again).transpose()?;
        let exempts = maps.exempt.is_some();
        let sharing = Sharing { parent: above, exempts, earlier: Some(maps), slots: None };
        load(sharing, |_, _, [egress, ingress, tune]| {
            successors(dir, &[(LINKS[0], egress), (LINKS[1], ingress), (LINKS[2], tune)])
        })
    }
}

/// Which maps programs get.
#[derive(Default)]
struct Sharing<'a> {
    /// Those of the parent.
    parent: Option<ParentMaps>,
    /// Whether there is a trie of those who are exempt.
    exempts: bool,
    /// Those of limits that are there; else new ones are made.
    earlier: Option<&'a LimitMaps>,
    /// Of limits of a pool; the map with the slots of cgroups, if there is one.
    slots: Option<Option<&'a MapHandle>>,
}

/// Loads the programs of both directions and of the sockets, for work with them, their maps and that of
/// slots.
fn load<T>(
    sharing: Sharing<'_>,
    work: impl FnOnce(LimitMaps, Option<MapHandle>, [&ProgramMut<'_>; 3]) -> Result<T, LimitError>,
) -> Result<T, LimitError> {
    quiet_libbpf();
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm(&mut storage, &sharing)?;
    let Sharing { parent, exempts, slots, .. } = sharing;
    let handle = |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("nrm"));
    let maps = LimitMaps {
        sockets: Some(handle(&nrm.maps.sockets_of_limit)?),
        exempt: exempts.then(|| handle(&nrm.maps.exempt_prefixes)).transpose()?,
        parent,
        ..LimitMaps::new(
            handle(&nrm.maps.limit)?,
            handle(&nrm.maps.queues_of_limit)?,
            handle(&nrm.maps.counters)?,
        )
    };

    let slots = slots.map(|_| handle(&nrm.maps.slots_of_cgroups)).transpose()?;

    let mut tune_storage = MaybeUninit::uninit();
    let mut tune = skel::tune::TuneSkelBuilder::default()
        .open(&mut tune_storage)
        .map_err(load_error("tune"))?;
    if let Some(rodata) = tune.maps.rodata_data.as_deref_mut() {
        // The kernel's coarse clocks go on with each tick.
        let tick = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse);
        rodata.tick_ns = tick.tv_nsec as u64;
        rodata.is_pooled = u8::from(slots.is_some());
    }
    match &slots {
        Some(slots) => reuse(&mut tune.maps.slots_of_cgroups, slots)?,
        None => tune.maps.slots_of_cgroups.set_autocreate(false).map_err(load_error("tune"))?,
    }
    reuse(&mut tune.maps.limit, &maps.limit)?;
    reuse(&mut tune.maps.queues_of_limit, &maps.queues)?;
    if let Some(sockets) = &maps.sockets {
        reuse(&mut tune.maps.sockets_of_limit, sockets)?;
    }
    set_parent!(tune, maps.parent.as_ref(), "tune");
    set_exempt!(tune, exempts, maps.exempt.as_ref(), "tune");
    let tune = tune.load().map_err(load_error("tune"))?;
    work(maps, slots, [&nrm.progs.nrm_egress, &nrm.progs.nrm_ingress, &tune.progs.tune])
}

/// Opens and loads the virtual queue's object.
fn load_nrm<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    sharing: &Sharing<'_>,
) -> Result<skel::nrm::NrmSkel<'a>, LimitError> {
    let mut open = skel::nrm::NrmSkelBuilder::default().open(storage).map_err(load_error("nrm"))?;
    let Sharing { parent, exempts, earlier, slots } = sharing;
    set_parent!(open, parent.as_ref(), "nrm");
    set_exempt!(open, *exempts, earlier.and_then(|maps| maps.exempt.as_ref()), "nrm");
    match slots {
        Some(Some(with)) => reuse(&mut open.maps.slots_of_cgroups, with)?,
        Some(None) => {}
        None => open.maps.slots_of_cgroups.set_autocreate(false).map_err(load_error("nrm"))?,
    }
    if slots.is_some() {
        for (map, entries) in [
            (&mut open.maps.limit, intf::SLOTS * intf::LIMITS as u32),
            (&mut open.maps.queues_of_limit, intf::SLOTS * intf::QUEUES as u32),
            (&mut open.maps.counters, intf::SLOTS * intf::DIRECTIONS as u32),
            (&mut open.maps.unpaced_flows, intf::POOL_SETS),
        ] {
            map.set_max_entries(entries).map_err(load_error("nrm"))?;
        }
    }
    if let Some(maps) = earlier {
        reuse(&mut open.maps.limit, &maps.limit)?;
        reuse(&mut open.maps.queues_of_limit, &maps.queues)?;
        reuse(&mut open.maps.counters, &maps.counters)?;
        if let Some(sockets) = &maps.sockets {
            reuse(&mut open.maps.sockets_of_limit, sockets)?;
        }
    }
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.flow_seed = random_seed();
        if slots.is_some() {
            rodata.is_pooled = 1;
            rodata.set_shift = intf::POOL_SET_SHIFT;
        }
    }
    open.load().map_err(load_error("nrm"))
}

#[cfg(test)]
mod admission_tests;

#[cfg(test)]
mod asking_tests;

#[cfg(test)]
mod kernel_tests;

#[cfg(test)]
mod pacing_tests;

#[cfg(test)]
mod race_tests;

#[cfg(test)]
mod thread_tests;

#[cfg(test)]
mod timer_tests;

#[cfg(test)]
pub(crate) mod tree_tests;

#[cfg(test)]
mod unpaced_tests;

#[cfg(test)]
mod window_tests;
