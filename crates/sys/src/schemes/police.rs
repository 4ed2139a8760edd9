//! The programs of scheme `police`: on both directions of a cgroup, or of a device from either side (see
//! [`crate::device`]), or in XDP.

use std::{mem::MaybeUninit, path::Path};

use libbpf_rs::{MapHandle, OpenObject, skel::OpenSkel};
use tidegate_core::{Direction, police::Hook};

use crate::{
    bpf::{self, load_error, load_skel, open_fitted, prepare, random_seed},
    cgroup::Hierarchy,
    device::{self, Target, XDP_PIN},
    exempt::set_exempt,
    group::GroupMaps,
    intf,
    limit::{AttachedLimit, Handle, LimitError, LimitMaps, LimitOptions, Loaded},
    query::Side,
    remains::InTheWay,
    schemes::{AttachPoint, LINKS, MapsByName, Pinned, Programs, Scheme, Successor, successors},
    skel,
};

/// Has an object that is open use the maps of a limit; the skeletons have no common type.
macro_rules! share {
    ($open:expr, $limit:expr) => {
        let limit: &LimitMaps = $limit;
        let own: &$crate::schemes::police::Policer = limit.own_as()?;
        $crate::bpf::reuse(&mut $open.maps.limit, &limit.limit)?;
        $crate::bpf::reuse(&mut $open.maps.meters_of_limit, &own.meters)?;
        $crate::bpf::reuse(&mut $open.maps.counters, &limit.counters)?;
        if let Some(group) = &own.group {
            $crate::bpf::reuse(&mut $open.maps.group_of_limit, &group.group)?;
            $crate::bpf::reuse(&mut $open.maps.samples_of_limit, &group.samples)?;
        }
    };
}
mod place;
mod policer;
mod policy;
pub(crate) mod pool;
pub(crate) mod xdp;

pub(crate) use place::Place;
pub(crate) use policer::Policer;
use pool::MapPool;

/// Loads the programs of one place.
fn load(
    storage: &mut MaybeUninit<OpenObject>,
    at: AttachPoint,
    exempts: bool,
) -> Result<skel::police::PoliceSkel<'_>, LimitError> {
    load_with(storage, at, exempts, None, &Direction::BOTH)
}

/// The same with the maps of a limit that is there, or of some directions of a cgroup.
fn load_with<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    at: AttachPoint,
    exempts: bool,
    earlier: Option<&LimitMaps>,
    directions: &[Direction],
) -> Result<skel::police::PoliceSkel<'a>, LimitError> {
    let mut open = open_fitted!(skel::police::PoliceSkelBuilder, storage, "police");
    let programs = [&mut open.progs.police_egress, &mut open.progs.police_ingress];
    for (program, direction) in programs.into_iter().zip(Direction::BOTH) {
        program.set_autoload(at == AttachPoint::Cgroup && directions.contains(&direction));
    }
    for program in [&mut open.progs.police_out, &mut open.progs.police_in] {
        program.set_autoload(at != AttachPoint::Cgroup);
    }
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.is_port = u8::from(at == AttachPoint::Port);
        rodata.flow_seed = random_seed();
    }
    set_exempt!(open, exempts, earlier.and_then(|limit| limit.exempt.as_ref()), "police");
    if let Some(earlier) = earlier {
        share!(open, earlier);
    }
    prepare(open.open_object_mut(), "police")?;
    load_skel(open, "police")
}

/// The maps of loaded programs, with the limit in them.
fn maps(
    police: &skel::police::PoliceSkel<'_>,
    limit: &intf::Entry,
) -> Result<LimitMaps, LimitError> {
    let handle = |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("police"));
    let own = Policer {
        meters: handle(&police.maps.meters_of_limit)?,
        group: Some(GroupMaps {
            group: handle(&police.maps.group_of_limit)?,
            samples: handle(&police.maps.samples_of_limit)?,
            dir: None,
        }),
        place: None,
    };
    let maps = LimitMaps {
        exempt: limit.exempts().then(|| handle(&police.maps.exempt_prefixes)).transpose()?,
        ..LimitMaps::new(handle(&police.maps.limit)?, handle(&police.maps.counters)?, own)
    };
    maps.write(*limit)?;
    Ok(maps)
}

/// The links of a limit whose ingress is in XDP.
const LINKS_WITH_XDP: [&str; 2] = [LINKS[0], XDP_PIN];

/// Scheme `police`.
pub(crate) struct Police;

impl Scheme for Police {
    fn links(&self, limit: &intf::Limit) -> &'static [&'static str] {
        match limit.flags & intf::FLAG_XDP {
            // One with prefixes has those of its map pool (see `store/pools.rs`).
            _ if limit.is_matched() => &[],
            0 => &LINKS[..2],
            _ => &LINKS_WITH_XDP,
        }
    }

    fn load(
        &self,
        cgroup_id: u64,
        options: &LimitOptions,
        _parent: Option<&LimitMaps>,
        programs: Programs,
    ) -> Result<Loaded, LimitError> {
        let limit = options.encode(cgroup_id)?;
        let is_needed = |direction: &Direction| {
            programs == Programs::All || options.queue(*direction).is_some()
        };
        let directions: Vec<_> = Direction::BOTH.into_iter().filter(is_needed).collect();
        let mut storage = MaybeUninit::uninit();
        let exempts = !options.exempt.is_empty();
        let police = load_with(&mut storage, AttachPoint::Cgroup, exempts, None, &directions)?;
        let maps = maps(&police, &limit)?;
        maps.exempt(&options.exempt.prefixes)?;
        let program = |direction: &Direction| match direction {
            Direction::Egress => {
                Ok((LINKS[0], bpf::keep(&police.progs.police_egress, "police_egress")?))
            }
            Direction::Ingress => {
                Ok((LINKS[1], bpf::keep(&police.progs.police_ingress, "police_ingress")?))
            }
        };
        let programs = directions.iter().map(program).collect::<Result<_, LimitError>>()?;
        Ok(Loaded { maps, programs })
    }

    fn attach_device(
        &self,
        _hierarchy: &Hierarchy,
        target: &Target,
        options: &LimitOptions,
        in_the_way: &InTheWay,
    ) -> Result<AttachedLimit, LimitError> {
        let limit = target.encode(options)?;
        let mut storage = MaybeUninit::uninit();
        let police = load(&mut storage, AttachPoint::of(&limit), !options.exempt.is_empty())?;
        let maps = maps(&police, &limit)?;
        maps.exempt(&options.exempt.prefixes)?;
        in_the_way.remove(None)?;
        // First: it may be refused.
        let in_xdp = options.police.hook == Hook::Xdp;
        let xdp = in_xdp.then(|| xdp::attach(target, &maps)).transpose()?;
        let directions = Direction::BOTH
            .into_iter()
            .filter(|direction| !in_xdp || *direction == Direction::Egress);
        let hooked = attach(target, &police, directions)?;
        Ok(AttachedLimit { xdp, ..AttachedLimit::on_device(maps, hooked) })
    }

    fn reload(
        &self,
        dir: &Path,
        limit: &intf::Limit,
        maps: &LimitMaps,
    ) -> Result<Vec<Successor>, LimitError> {
        let at = AttachPoint::of(limit);
        let mut storage = MaybeUninit::uninit();
        let police =
            load_with(&mut storage, at, maps.exempt.is_some(), Some(maps), &Direction::BOTH)?;
        let programs = &police.progs;
        let (egress, ingress) = match at {
            AttachPoint::Cgroup => (&programs.police_egress, &programs.police_ingress),
            AttachPoint::Device => (&programs.police_out, &programs.police_in),
            AttachPoint::Port => (&programs.police_in, &programs.police_out),
        };
        let both = [(LINKS[0], egress), (LINKS[1], ingress)];
        if !self.links(limit).contains(&XDP_PIN) {
            return successors(dir, &both);
        }
        let mut storage = MaybeUninit::uninit();
        let xdp = xdp::load(&mut storage, maps)?;
        successors(dir, &[both[0], (XDP_PIN, &xdp.progs.police_xdp)])
    }

    fn open(&self, pinned: &Pinned<'_>) -> Result<Box<dyn Handle>, LimitError> {
        let place = pinned.pool.and_then(|(pool, index)| {
            MapPool::open(pool).and_then(|pool| pool.place(index, &pinned.asked.matched)).ok()
        });
        Ok(Box::new(Policer::open(pinned.dir, place)?))
    }

    fn of_program(&self, maps: &mut MapsByName) -> Option<Box<dyn Handle>> {
        let meters = maps.remove("meters_of_limit")?;
        Some(Box::new(Policer { meters, group: None, place: None }))
    }
}

/// Puts the programs of directions on a device.
fn attach(
    target: &Target,
    police: &skel::police::PoliceSkel<'_>,
    directions: impl Iterator<Item = Direction>,
) -> Result<device::Hooked, LimitError> {
    let program = |direction| match target.side(direction) {
        Side::Out => (direction, &police.progs.police_out),
        Side::In => (direction, &police.progs.police_in),
    };
    device::attach(target, &directions.map(program).collect::<Vec<_>>())
}

/// Puts the ingress program of a limit that is there on its device, with its maps.
pub(crate) fn attach_ingress(
    target: &Target,
    limit: &LimitMaps,
) -> Result<device::Hooked, LimitError> {
    let mut storage = MaybeUninit::uninit();
    let exempts = limit.exempt.is_some();
    let police =
        load_with(&mut storage, AttachPoint::Device, exempts, Some(limit), &Direction::BOTH)?;
    attach(target, &police, [Direction::Ingress].into_iter())
}

#[cfg(test)]
mod kernel_tests;

#[cfg(test)]
mod group_tests;

#[cfg(test)]
mod fair_tests;

#[cfg(test)]
mod rate_tests;

#[cfg(test)]
mod pool_tests;

#[cfg(test)]
mod xdp_tests;
