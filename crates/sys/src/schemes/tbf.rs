//! Scheme `tbf`: the kernel's token bucket filter at the root of a device or port.
//!
//! It holds what leaves by the device, in one queue: what a program of this host sends by a device, or what
//! the workload behind a port receives. The program `tbf_out` counts what comes to it.

use std::{mem::MaybeUninit, path::Path};

use libbpf_rs::{MapHandle, OpenObject, ProgramMut};
use tidegate_core::{Bytes, Direction, Nanos, queue_options::ConfigError};

use crate::{
    bpf::{load_error, load_skel, open_skel, reuse},
    cgroup::Hierarchy,
    clock::monotonic_ns,
    device::{self, Target},
    intf,
    limit::{AttachedLimit, Handle, LimitError, LimitMaps, LimitOptions, Reading},
    net::{
        Netlink,
        qdisc::{Qdisc, Tbf, Verb},
    },
    remains::InTheWay,
    root_qdisc::{self, Undo},
    schemes::{LINKS, MapsByName, Pinned, Scheme, Successor, successors},
    skel,
};

/// The outcomes of [`intf::Counters`] that a qdisc knows.
const PASS: usize = 0;
const DROP_FULL: usize = 3;

/// The header of a frame, which an MTU leaves out.
const LINK_HEADER_BYTES: u32 = 14;

/// Scheme `tbf`.
pub(crate) struct TokenBucketFilter;

impl Scheme for TokenBucketFilter {
    fn links(&self, limit: &intf::Limit) -> &'static [&'static str] {
        let at = intf::index(limit.leaving());
        &LINKS[at..=at]
    }

    fn attach_device(
        &self,
        _hierarchy: &Hierarchy,
        target: &Target,
        options: &LimitOptions,
        in_the_way: &InTheWay,
    ) -> Result<AttachedLimit, LimitError> {
        let limit = target.encode(options)?;
        let out = limit.leaving();
        let mut netlink = Netlink::open()?;
        let qdisc = qdisc_of(&limit, netlink.mtu(limit.ifindex)?)?;
        let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
        let tbf = load(&mut storage, &limit, None)?;
        let handle = |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("tbf"));
        let own = OnDevice { limit: limit.common };
        let maps = LimitMaps::new(handle(&tbf.maps.limit)?, handle(&tbf.maps.counters)?, own);
        maps.write(limit)?;

        in_the_way.remove(Some(qdisc.kind()))?;
        let (device, force) = (target.scope.name(), in_the_way.force);
        root_qdisc::put(&mut netlink, limit.ifindex, device, force, &qdisc)?;
        let mut undo = Undo::nothing();
        undo.arm(&limit, remove);
        let program: &ProgramMut<'_> = &tbf.progs.tbf_out;
        let hooked = device::attach(target, &[(out, program)])?;
        Ok(AttachedLimit { qdisc: undo, ..AttachedLimit::on_device(maps, hooked) })
    }

    fn open(&self, pinned: &Pinned<'_>) -> Result<Box<dyn Handle>, LimitError> {
        Ok(Box::new(OnDevice { limit: *pinned.limit }))
    }

    fn of_program(&self, _maps: &mut MapsByName) -> Option<Box<dyn Handle>> {
        None
    }

    fn reload(
        &self,
        dir: &Path,
        limit: &intf::Limit,
        maps: &LimitMaps,
    ) -> Result<Vec<Successor>, LimitError> {
        let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
        let tbf = load(&mut storage, limit, Some(maps))?;
        successors(dir, &[(self.links(limit)[0], &tbf.progs.tbf_out)])
    }

    /// The qdisc knows no end of a rate.
    fn ends_leases(&self) -> bool {
        false
    }
}

/// Loads the program, with the maps of a limit if it is there.
fn load<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    limit: &intf::Limit,
    earlier: Option<&LimitMaps>,
) -> Result<skel::tbf::TbfSkel<'a>, LimitError> {
    let mut open = open_skel::<skel::tbf::TbfSkelBuilder>(storage, "tbf")?;
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.direction_out = intf::index(limit.leaving()) as u32;
    }
    if let Some(maps) = earlier {
        reuse(&mut open.maps.limit, &maps.limit)?;
        reuse(&mut open.maps.counters, &maps.counters)?;
    }
    load_skel(open, "tbf")
}

/// Takes the qdisc off again.
fn remove(limit: &intf::Limit) {
    let netlink = Netlink::open();
    let _ = netlink.and_then(|mut netlink| root_qdisc::remove(&mut netlink, limit.ifindex));
}

/// The qdisc of a limit on a device with an MTU. What it sends at once is at least one frame, or none would
/// pass.
fn qdisc_of(limit: &intf::Limit, mtu_bytes: u32) -> Result<Tbf, LimitError> {
    let out = limit.leaving();
    let rate = limit.rate(out).ok_or(ConfigError::Scheme(limit.scheme()))?;
    let conf = limit.queue[intf::index(out)];
    let least = mtu_bytes.saturating_add(LINK_HEADER_BYTES);
    let bytes = |time: u64, least: u32| {
        u32::try_from(rate.bytes_in(Nanos(time)).0).unwrap_or(u32::MAX).max(least)
    };
    Ok(Tbf {
        rate_bit_s: rate.bit_s(),
        burst_bytes: bytes(conf.burst_ns, least),
        limit_bytes: bytes(conf.drop_ns, least),
    })
}

/// A limit in force.
#[derive(Debug)]
struct OnDevice {
    limit: intf::Limit,
}

impl OnDevice {
    /// By what came to the qdisc, too.
    fn read_here(
        &self,
        came: &intf::Counters,
        direction: Direction,
    ) -> Result<Reading, LimitError> {
        let mut reading = Reading::default();
        if direction != self.limit.leaving() {
            return Ok(reading);
        }
        let qdiscs = Netlink::open()?.qdisc_stats(self.limit.ifindex)?;
        let Some(qdisc) = root_qdisc::ours(&qdiscs) else { return Ok(reading) };
        let waiting = u64::from(qdisc.backlog_bytes);
        if let Some(rate) = self.limit.rate(direction) {
            reading.finish_ns = monotonic_ns() + rate.time_for(Bytes(waiting)).0;
        }
        let counters = &mut reading.counters;
        counters.packets[PASS] = qdisc.sent_packets;
        counters.bytes[PASS] = qdisc.sent_bytes;
        counters.packets[DROP_FULL] = qdisc.drops.into();
        if qdisc.drops > 0 {
            let left = qdisc.sent_bytes + waiting;
            counters.bytes[DROP_FULL] = came.bytes[PASS].saturating_sub(left);
        }
        Ok(reading)
    }
}

impl Handle for OnDevice {
    fn read(&self, maps: &LimitMaps, direction: Direction) -> Result<Reading, LimitError> {
        let came = maps.counters(direction)?;
        device::in_namespace(self.limit.cgroup_id, || self.read_here(&came, direction))
            .unwrap_or_else(|| Ok(Reading::default()))
    }

    fn missing(&self) -> Vec<&'static str> {
        let is_there = || {
            let qdiscs = Netlink::open()?.qdisc_stats(self.limit.ifindex)?;
            Ok::<_, LimitError>(root_qdisc::ours(&qdiscs).is_some_and(|q| q.kind == "tbf"))
        };
        let is_there = device::in_namespace(self.limit.cgroup_id, || is_there().unwrap_or(false));
        if is_there.unwrap_or(false) { Vec::new() } else { vec!["qdisc"] }
    }

    fn change(&self, limit: &intf::Limit) -> Result<(), LimitError> {
        let change = || {
            let mut netlink = Netlink::open()?;
            let qdisc = qdisc_of(limit, netlink.mtu(limit.ifindex)?)?;
            root_qdisc::set(&mut netlink, limit.ifindex, Verb::Change, &qdisc)
        };
        device::in_namespace(limit.cgroup_id, change)
            .unwrap_or(Err(LimitError::NoQueue { ifindex: limit.ifindex }))
    }
}
