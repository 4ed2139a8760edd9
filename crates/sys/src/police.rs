//! The programs of scheme `police`: on both directions of a cgroup, or of a device from either side (see
//! [`crate::device`]).

use std::mem::MaybeUninit;

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, OpenObject,
    skel::{OpenSkel, SkelBuilder},
};
use tidegate_core::{
    Bytes, Direction, Rate, Span,
    police::{ColourMap, MeterOptions, MeterType, Policy},
    token_bucket::{MAX_BURST, UNITS_PER_BYTE},
    virtual_queue::{MAX_RATE_BIT_S, VirtualQueueOptions},
};

use crate::{
    cgroup::Cgroup,
    cost::Standing,
    device::{self, Side, Target},
    edt::random_seed,
    exempt::set_exempt,
    group::GroupMaps,
    intf,
    limit::{self, AttachedLimit, LimitError, LimitMaps, LimitOptions},
};

mod policy;

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

mod cost;

pub use cost::{Ask, cost};

const HOUR_NS: u64 = 3_600_000_000_000;

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

/// Loads the programs of a cgroup with a bucket that stays as `standing` says, to have their cost measured.
pub(crate) fn prepare(
    storage: &mut MaybeUninit<OpenObject>,
    meter: bool,
    standing: Standing,
) -> Result<skel::PoliceSkel<'_>, LimitError> {
    let police = load(storage, Place::Cgroup, false)?;
    let Some(rate) = Rate::from_bit_s(MAX_RATE_BIT_S) else { return Ok(police) };
    let queue = VirtualQueueOptions {
        burst: Some(Span::Size(Bytes(MAX_BURST.0 / 2))),
        ..VirtualQueueOptions::new(rate)
    };
    let meter = meter.then(|| MeterOptions {
        colours: Some(ColourMap::default()),
        ..MeterOptions::new(MeterType::SrTcm)
    });
    let policy = Policy { meter, ..Policy::default() };
    let mut policy = intf::Policy::new(&policy, &queue).map_err(LimitError::Config)?;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    let half_ns = policy.committed.fill_ns / 2;
    let full_ns = match standing {
        Standing::Idle => {
            // So fast that a packet costs nothing.
            for bucket in [&mut policy.committed, &mut policy.second] {
                (bucket.cost, bucket.rate) = (1, MAX_BURST.0 * UNITS_PER_BYTE / 2);
            }
            0
        }
        Standing::Busy => now_ns + half_ns,
        Standing::Full => now_ns + HOUR_NS,
    };
    let limit = intf::Limit {
        police: [policy; 2],
        flags: intf::FLAG_POLICE | intf::FLAG_LOOPBACK,
        ..Default::default()
    };
    let maps = maps(&police, &limit)?;
    let queue = intf::Queue { finish_ns: full_ns, rtt_ns: full_ns, ..Default::default() };
    maps.queues
        .update(&0u32.to_ne_bytes(), bytemuck::bytes_of(&queue), MapFlags::ANY)
        .map_err(limit::map_error("queues"))?;
    Ok(police)
}

#[cfg(test)]
mod kernel_tests;

#[cfg(test)]
mod group_tests;

#[cfg(test)]
mod fair_tests;
