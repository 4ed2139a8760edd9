//! The programs of schemes `pace` and `nrm`, on a cgroup.
//!
//! Two objects share the maps of a limit: `nrm` (both directions of cgroup_skb, and sock_ops for new
//! connections) and `adopt` (an iterator, for sockets that exist when the limit comes, changes or goes; see
//! [`Sockets`]). One loaded copy of them serves a limit, or all of a [`SlotPool`].

use std::{mem::MaybeUninit, os::fd::OwnedFd, path::Path};

use libbpf_rs::{MapHandle, OpenMapMut, OpenObject, skel::OpenSkel};

use crate::{
    bpf::{load_at_once, load_error, made_map, open_fitted, prepare, random_seed, reuse},
    exempt::set_exempt,
    intf,
    limit::{Handle, LimitError, LimitMaps, LimitOptions, Loaded, ParentMaps, set_parent},
    schemes::{LINKS, MapsByName, Pinned, Pinning, Programs, Scheme, Successor},
    skel,
};

mod pool;
mod sockets;

use sockets::{Queues, Sockets};

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
        programs: Programs,
    ) -> Result<Loaded, LimitError> {
        let limit = options.encode(cgroup_id)?;
        let above = parent.map(LimitMaps::as_parent).transpose()?.flatten();
        let sharing = Sharing {
            parent: above,
            exempts: !options.exempt.is_empty(),
            // Connections wait for their turn on egress, whatever is limited.
            has_ingress: programs == Programs::All || options.ingress.is_some(),
            can_be_parent: programs == Programs::All,
            ..Sharing::default()
        };
        load(sharing, |maps, _, programs| {
            maps.write(limit)?;
            maps.exempt(&options.exempt.prefixes)?;
            if let Some(parent) = parent {
                maps.start_in(parent, options)?;
            }
            Ok(Loaded { maps, programs })
        })
    }

    fn reload(
        &self,
        dir: &Path,
        _limit: &intf::Limit,
        maps: &LimitMaps,
    ) -> Result<Vec<Successor>, LimitError> {
        let above = maps.own_as::<Sockets>()?.parent.as_ref().map(ParentMaps::again).transpose()?;
        let exempts = maps.exempt.is_some();
        let sharing = Sharing { parent: above, exempts, earlier: Some(maps), ..Sharing::default() };
        load(sharing, |_, _, programs| {
            let successor =
                |(link, program)| Successor { pin: dir.join(link), program, redirected_to: None };
            Ok(programs.into_iter().map(successor).collect())
        })
    }

    fn open(&self, pinned: &Pinned<'_>) -> Result<Box<dyn Handle>, LimitError> {
        Ok(Box::new(Sockets::open(pinned)?))
    }

    fn of_program(&self, maps: &mut MapsByName) -> Option<Box<dyn Handle>> {
        Some(Box::new(Queues(maps.remove("queues_of_limit")?)))
    }
}

/// Which maps programs get.
struct Sharing<'a> {
    /// Those of the parent.
    parent: Option<ParentMaps>,
    /// Whether there is a trie of those who are exempt.
    exempts: bool,
    /// Those of limits that are there; else new ones are made.
    earlier: Option<&'a LimitMaps>,
    /// Of limits of a pool; the map with the slots of cgroups, if there is one.
    slots: Option<Option<&'a MapHandle>>,
    /// Whether the program of ingress is loaded.
    has_ingress: bool,
    /// Whether limits can be inside of it.
    can_be_parent: bool,
}

impl Default for Sharing<'_> {
    fn default() -> Self {
        Sharing {
            parent: None,
            exempts: false,
            earlier: None,
            slots: None,
            has_ingress: true,
            can_be_parent: true,
        }
    }
}

/// The programs of the links, in the same order.
const PROGRAMS: [&str; 3] = ["nrm_egress", "nrm_ingress", "tune"];

/// Programs, by the names of their links.
type ByLink = Vec<(&'static str, OwnedFd)>;

/// Loads the programs of both directions and of the sockets, for work with them, their maps and that of
/// slots.
fn load<T>(
    sharing: Sharing<'_>,
    work: impl FnOnce(LimitMaps, Option<MapHandle>, ByLink) -> Result<T, LimitError>,
) -> Result<T, LimitError> {
    let mut storage = MaybeUninit::uninit();
    let mut nrm = open_nrm(&mut storage, &sharing)?;
    prepare(nrm.open_object_mut(), "nrm")?;
    let Sharing { parent, exempts, slots, .. } = sharing;
    let handle = |map: &OpenMapMut<'_>| made_map(map, "nrm");
    let own = Sockets {
        queues: Queues(handle(&nrm.maps.queues_of_limit)?),
        sockets: handle(&nrm.maps.sockets_of_limit)?,
        parent,
        pool: None,
    };
    let maps = LimitMaps {
        exempt: exempts.then(|| handle(&nrm.maps.exempt_prefixes)).transpose()?,
        ..LimitMaps::new(handle(&nrm.maps.limit)?, handle(&nrm.maps.counters)?, own)
    };
    let slots = slots.map(|_| handle(&nrm.maps.slots_of_cgroups)).transpose()?;

    let mut loaded = load_at_once(nrm.open_object(), "nrm")?;
    let by_link = LINKS.into_iter().zip(PROGRAMS).filter_map(|(link, program)| {
        let at = loaded.iter().position(|(name, _)| name == program)?;
        Some((link, loaded.swap_remove(at).1))
    });
    work(maps, slots, by_link.collect())
}

/// Opens the virtual queue's object, and sets it up.
fn open_nrm<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    sharing: &Sharing<'_>,
) -> Result<skel::nrm::OpenNrmSkel<'a>, LimitError> {
    let mut open = open_fitted!(skel::nrm::NrmSkelBuilder, storage, "nrm");
    let Sharing { parent, exempts, earlier, slots, has_ingress, can_be_parent } = sharing;
    open.progs.nrm_ingress.set_autoload(*has_ingress);
    set_parent!(open, parent.as_ref(), "nrm");
    set_exempt!(open, *exempts, earlier.and_then(|maps| maps.exempt.as_ref()), "nrm");
    match slots {
        Some(Some(with)) => reuse(&mut open.maps.slots_of_cgroups, with)?,
        Some(None) => {}
        None => open.maps.slots_of_cgroups.set_autocreate(false).map_err(load_error("nrm"))?,
    }
    let size = if parent.is_some() { intf::SLOTS_INSIDE } else { intf::SLOTS };
    let sets = size * intf::SETS_PER_SLOT;
    if slots.is_some() {
        for (map, entries) in [
            (&mut open.maps.limit, size * intf::LIMITS as u32),
            (&mut open.maps.queues_of_limit, size * intf::QUEUES as u32),
            (&mut open.maps.counters, size * intf::DIRECTIONS as u32),
            (&mut open.maps.unpaced_flows, sets),
        ] {
            map.set_max_entries(entries).map_err(load_error("nrm"))?;
        }
    }
    if let Some(maps) = earlier {
        let own = maps.own_as::<Sockets>()?;
        reuse(&mut open.maps.limit, &maps.limit)?;
        reuse(&mut open.maps.queues_of_limit, &own.queues.0)?;
        reuse(&mut open.maps.counters, &maps.counters)?;
        reuse(&mut open.maps.sockets_of_limit, &own.sockets)?;
    }
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.flow_seed = random_seed();
        // The kernel's coarse clocks go on with each tick.
        let tick = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse);
        rodata.tick_ns = tick.tv_nsec as u64;
        rodata.can_be_parent = u8::from(*can_be_parent);
        if slots.is_some() {
            rodata.is_pooled = 1;
            rodata.set_shift = u64::BITS - sets.ilog2();
        }
    }
    Ok(open)
}

#[cfg(test)]
fn load_nrm<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    sharing: &Sharing<'_>,
) -> Result<skel::nrm::NrmSkel<'a>, LimitError> {
    let mut nrm = open_nrm(storage, sharing)?;
    nrm.progs.tune.set_autoload(false);
    prepare(nrm.open_object_mut(), "nrm")?;
    nrm.load().map_err(load_error("nrm"))
}

#[cfg(test)]
mod admission_tests;

#[cfg(test)]
mod asking_tests;

#[cfg(test)]
mod clamp_tests;

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
