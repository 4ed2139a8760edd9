//! The programs of scheme `police`: on both directions of a cgroup, or of a device from either side (see
//! [`crate::device`]).

use std::mem::MaybeUninit;

use libbpf_rs::{
    MapHandle, OpenObject,
    skel::{OpenSkel, SkelBuilder},
};
use tidegate_core::Direction;

use crate::{
    cgroup::Cgroup,
    device::{self, Side, Target},
    edt::random_seed,
    exempt::set_exempt,
    group::GroupMaps,
    intf,
    limit::{self, AttachedLimit, LimitError, LimitMaps, LimitOptions},
};

mod cost;
mod cost_on_device;
mod policy;
pub(crate) mod room;

pub(crate) use cost::prepare;
pub use cost_on_device::{Policers, cost_on_device};

mod skel {
    #![allow(
        missing_docs,
        unused_qualifications,
        clippy::all,
        clippy::undocumented_unsafe_blocks,
        clippy::unwrap_used
    )]
    include!(concat!(env!("OUT_DIR"), "/police.skel.rs"));
}

/// Where the programs sit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Cgroup,
    Device,
    Port,
}

/// Loads the programs of one place.
fn load(
    storage: &mut MaybeUninit<OpenObject>,
    place: Place,
    exempts: bool,
) -> Result<skel::PoliceSkel<'_>, LimitError> {
    limit::quiet_libbpf();
    let mut open =
        skel::PoliceSkelBuilder::default().open(storage).map_err(limit::load_error("police"))?;
    for program in [&mut open.progs.police_egress, &mut open.progs.police_ingress] {
        program.set_autoload(place == Place::Cgroup);
    }
    for program in [&mut open.progs.police_out, &mut open.progs.police_in] {
        program.set_autoload(place != Place::Cgroup);
    }
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.is_port = u8::from(place == Place::Port);
        rodata.flow_seed = u64::from(random_seed()) << 32 | u64::from(random_seed());
    }
    set_exempt!(open, exempts, None, "police");
    open.load().map_err(limit::load_error("police"))
}

/// The maps of loaded programs, with the limit in them.
fn maps(police: &skel::PoliceSkel<'_>, limit: &intf::Limit) -> Result<LimitMaps, LimitError> {
    let handle =
        |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(limit::load_error("police"));
    let maps = LimitMaps {
        limit: handle(&police.maps.limit)?,
        queues: handle(&police.maps.queues_of_limit)?,
        counters: handle(&police.maps.counters)?,
        sockets: None,
        exempt: match limit.exempt.is_empty() {
            true => None,
            false => Some(handle(&police.maps.exempt_prefixes)?),
        },
        parent: None,
        seat: None,
        at: 0,
        place: None,
        group: Some(GroupMaps {
            group: handle(&police.maps.group_of_limit)?,
            samples: handle(&police.maps.samples_of_limit)?,
        }),
    };
    maps.write(limit)?;
    Ok(maps)
}

/// Puts a limit on a cgroup.
pub(crate) fn attach_cgroup(
    cgroup: &Cgroup,
    options: &LimitOptions,
) -> Result<AttachedLimit, LimitError> {
    let limit = options.encode(cgroup.id())?;
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, Place::Cgroup, !options.exempt.is_empty())?;
    let maps = maps(&police, &limit)?;
    let links = vec![
        ("egress", limit::attach(&police.progs.police_egress, "police_egress", cgroup)?),
        ("ingress", limit::attach(&police.progs.police_ingress, "police_ingress", cgroup)?),
    ];
    Ok(AttachedLimit { maps, links, filters: None })
}

/// Puts a limit on a device.
pub(crate) fn attach_device(
    target: &Target,
    options: &LimitOptions,
) -> Result<AttachedLimit, LimitError> {
    let limit = target.encode(options)?;
    let mut storage = MaybeUninit::uninit();
    let place = if target.is_port() { Place::Port } else { Place::Device };
    let police = load(&mut storage, place, !options.exempt.is_empty())?;
    let maps = maps(&police, &limit)?;
    let program = |direction| match target.side(direction) {
        Side::Out => (direction, &police.progs.police_out),
        Side::In => (direction, &police.progs.police_in),
    };
    let programs = [Direction::Egress, Direction::Ingress].map(program);
    let device::Hooked { links, filters } = device::attach(target, &programs)?;
    Ok(AttachedLimit { maps, links, filters })
}

#[cfg(test)]
mod kernel_tests;

#[cfg(test)]
mod group_tests;

#[cfg(test)]
mod fair_tests;

#[cfg(test)]
mod room_tests;
