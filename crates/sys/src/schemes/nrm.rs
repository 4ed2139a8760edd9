//! The programs of schemes `pace` and `nrm`, on a cgroup.
//!
//! Three objects share the maps of a limit: `nrm` (both directions of cgroup_skb), `tune` (sock_ops, for
//! new connections) and `adopt` (an iterator, for sockets that exist when the limit comes, changes or goes;
//! see [`LimitMaps`]).

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
    schemes::{LINKS, Scheme, Successor, successors},
    skel,
};

/// Schemes `pace` and `nrm`.
pub(crate) struct Nrm;

impl Scheme for Nrm {
    fn links(&self, _limit: &intf::Limit) -> &'static [&'static str] {
        &LINKS
    }

    fn load(
        &self,
        cgroup_id: u64,
        options: &LimitOptions,
        parent: Option<&LimitMaps>,
    ) -> Result<Loaded, LimitError> {
        let limit = options.encode(cgroup_id)?;
        let above = parent.map(ParentMaps::of).transpose()?.flatten();
        load(above, !options.exempt.is_empty(), None, |maps, [egress, ingress, tune]| {
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
        load(above, maps.exempt.is_some(), Some(maps), |_, [egress, ingress, tune]| {
            successors(dir, &[(LINKS[0], egress), (LINKS[1], ingress), (LINKS[2], tune)])
        })
    }
}

/// Loads the programs of both directions and of the sockets, for work with them and their maps: new ones, or
/// those of a limit that is there.
fn load<T>(
    parent: Option<ParentMaps>,
    exempts: bool,
    earlier: Option<&LimitMaps>,
    work: impl FnOnce(LimitMaps, [&ProgramMut<'_>; 3]) -> Result<T, LimitError>,
) -> Result<T, LimitError> {
    quiet_libbpf();
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm_with(&mut storage, parent.as_ref(), exempts, earlier)?;
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

    let mut tune_storage = MaybeUninit::uninit();
    let mut tune = skel::tune::TuneSkelBuilder::default()
        .open(&mut tune_storage)
        .map_err(load_error("tune"))?;
    if let Some(rodata) = tune.maps.rodata_data.as_deref_mut() {
        // The kernel's coarse clocks go on with each tick.
        let tick = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse);
        rodata.tick_ns = tick.tv_nsec as u64;
    }
    reuse(&mut tune.maps.limit, &maps.limit)?;
    reuse(&mut tune.maps.queues_of_limit, &maps.queues)?;
    if let Some(sockets) = &maps.sockets {
        reuse(&mut tune.maps.sockets_of_limit, sockets)?;
    }
    set_parent!(tune, maps.parent.as_ref(), "tune");
    set_exempt!(tune, exempts, maps.exempt.as_ref(), "tune");
    let tune = tune.load().map_err(load_error("tune"))?;
    work(maps, [&nrm.progs.nrm_egress, &nrm.progs.nrm_ingress, &tune.progs.tune])
}

/// Opens and loads the virtual queue's object, for a limit in `parent` if there is one.
pub(crate) fn load_nrm<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    parent: Option<&LimitMaps>,
    exempts: bool,
) -> Result<skel::nrm::NrmSkel<'a>, LimitError> {
    let parent = parent.map(ParentMaps::of).transpose()?.flatten();
    load_nrm_with(storage, parent.as_ref(), exempts, None)
}

/// The same with the maps of a limit that is there.
fn load_nrm_with<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    parent: Option<&ParentMaps>,
    exempts: bool,
    earlier: Option<&LimitMaps>,
) -> Result<skel::nrm::NrmSkel<'a>, LimitError> {
    let mut open = skel::nrm::NrmSkelBuilder::default().open(storage).map_err(load_error("nrm"))?;
    set_parent!(open, parent, "nrm");
    set_exempt!(open, exempts, earlier.and_then(|maps| maps.exempt.as_ref()), "nrm");
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
