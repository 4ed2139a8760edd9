//! The programs of schemes `dem` and `spring`: they slow TCP senders down by the ACKs that come back to them.
//!
//! Two programs on one device, `acks_data` on the side that senders send to and `acks_back` on the other.
//! They hold no rate: the queue in front of which they stand does, a qdisc that is told by a [`Backlog`]. On
//! kernels before 6.6 they are filters of clsact instead of tcx links.

pub mod intf;
mod pins;

use std::{
    mem::MaybeUninit,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd},
    path::Path,
};

use bytemuck::{bytes_of, pod_read_unaligned};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, OpenObject, ProgramAttachType};
use tidegate_core::{Direction, Nanos, Rate, dem, spring, wait};

use crate::{
    backlog::Backlog,
    bpf::{create_map, load_error, load_skel, lookup_cpus, map_error, open_skel, reuse},
    device::{self, Hooked, Target, is_ethernet},
    limit::{Lease, LimitError},
    query::Side,
    schemes::{LINKS, Successor, successors},
    skel,
};

pub(crate) use pins::{change, dir_of, gone, put, take_off};
pub use pins::{remove, unhooked};

/// A full frame of Ethernet, which thresholds are made of.
pub const FRAME_BYTES: u32 = 1514;

/// What acts on ACKs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Law {
    /// ECE, for flows that agreed on ECN.
    Dem(dem::Law),
    /// The window, for all.
    Spring,
}

/// The settings of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcksOptions {
    /// What acts on ACKs.
    pub law: Law,
    /// The rate at which the queue is emptied.
    pub rate: Rate,
    /// How long packets shall wait in it: DEM's threshold, SPRING's target. `None`: what
    /// [`dem::Config::new`] and [`spring::Config::new`] say.
    pub mark: Option<Nanos>,
    /// What the queue saves up when it is empty.
    pub burst: Nanos,
    /// The end of the rate, if it has one. The programs themselves hold the other one then, whatever the
    /// queue does.
    pub lease: Option<Lease>,
}

impl AcksOptions {
    /// Those of a direction of a limit as it lies in the map.
    pub(crate) fn of(
        limit: &crate::intf::Limit,
        direction: Direction,
    ) -> Result<AcksOptions, LimitError> {
        let law = match limit.scheme() {
            tidegate_core::Scheme::Spring => Law::Spring,
            _ => Law::Dem(dem::Law::default()),
        };
        let rate = Rate::from_bit_s(limit.rate_bit_s[crate::intf::index(direction)]);
        let rate = rate.ok_or(LimitError::Layout("limit"))?;
        let burst = Nanos(limit.queue[crate::intf::index(direction)].burst_ns);
        Ok(AcksOptions { law, rate, mark: None, burst, lease: None })
    }

    /// As it lies in the map, and what is in force when its time is over: the same where it has no end.
    /// Programs whose earlier lease is over read that one until the first is written.
    pub fn encode(&self) -> [intf::Limit; 2] {
        let now = self.encode_one();
        let Some(Lease { until, then }) = self.lease else { return [now; 2] };
        let then = AcksOptions { rate: then, lease: None, ..*self };
        let most_ns = wait::Config::new(then.rate, then.burst).most().0;
        // Zero is for ever.
        let now = intf::Limit { until_ns: until.0.max(1), ..now };
        [now, intf::Limit { most_ns, ..then.encode_one() }]
    }

    fn encode_one(&self) -> intf::Limit {
        let byte_s = self.rate.bit_s() / 8;
        let mut marks = dem::Config::new(byte_s, FRAME_BYTES);
        let mut windows = spring::Config::new(byte_s, FRAME_BYTES);
        if let Some(mark) = self.mark {
            let bytes = u128::from(byte_s) * u128::from(mark.0) / 1_000_000_000;
            marks.threshold_bytes = u64::try_from(bytes).unwrap_or(u64::MAX).min(dem::MAX_BYTES);
            windows.target = mark;
        }
        if let Law::Dem(law) = self.law {
            marks.law = law;
        }
        intf::Limit {
            spring: windows.into(),
            dem: marks.into(),
            wait: wait::Config::new(self.rate, self.burst).into(),
            until_ns: 0,
            most_ns: 0,
            scheme: if self.law == Law::Spring { intf::SPRING } else { intf::DEM },
            pad: 0,
        }
    }
}

/// The maps of the programs.
#[derive(Debug)]
pub struct AcksMaps {
    limits: MapHandle,
    states: MapHandle,
    backlogs: MapHandle,
    counters: MapHandle,
    flows: MapHandle,
}

/// The programs in force as long as this value lives.
#[derive(Debug)]
pub struct AttachedAcks {
    /// Their maps.
    pub maps: AcksMaps,
    /// What holds them on the device.
    pub(crate) hooked: Hooked,
}

const KEY: [u8; 4] = 0u32.to_ne_bytes();

/// The states that the flows of a direction share, by the index of the direction. The programs of a
/// direction read how long ACKs wait in the queue of the other one.
///
/// # Errors
/// [`LimitError::Map`].
pub fn new_states() -> Result<[MapHandle; 2], LimitError> {
    let one = || {
        let states = create_map(MapType::Array, "states", size_of::<intf::State>(), 1)?;
        let state = intf::State { share: spring::ONE, ..intf::State::default() };
        states.update(&KEY, bytes_of(&state), MapFlags::ANY).map(|()| states)
    };
    Ok([one().map_err(map_error("states"))?, one().map_err(map_error("states"))?])
}

/// Puts the programs on a device, in front of the queue that `backlog` tells, for what the workload sends or
/// receives. `states` are those of both directions ([`new_states`]).
///
/// # Errors
/// [`LimitError`]; nothing is left then.
pub fn attach(
    target: &Target,
    direction: Direction,
    options: &AcksOptions,
    backlog: &Backlog,
    states: &[MapHandle; 2],
) -> Result<AttachedAcks, LimitError> {
    let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let states = |direction| &states[crate::intf::index(direction)];
    let (own, other) = (states(direction), states(direction.other()));
    let place = Place { is_port: target.is_port(), is_ethernet: is_ethernet(target.ifindex) };
    let acks = load(&mut storage, place, direction, own, Some(other), None)?;
    let handle = |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("acks"));
    let maps = AcksMaps {
        limits: handle(&acks.maps.limits)?,
        states: handle(&acks.maps.states)?,
        backlogs: handle(&acks.maps.backlogs)?,
        counters: handle(&acks.maps.counters)?,
        flows: handle(&acks.maps.flows)?,
    };
    maps.set(options)?;
    maps.set_backlog(backlog)?;
    let programs = [(direction, &acks.progs.acks_data), (direction.other(), &acks.progs.acks_back)];
    // What sends packets elsewhere must not come before.
    let hooked = device::attach_before(target, direction, &programs)?;
    Ok(AttachedAcks { maps, hooked })
}

/// A device as the programs need to know it.
#[derive(Clone, Copy)]
struct Place {
    is_port: bool,
    is_ethernet: bool,
}

/// Loads the programs, with the states of their direction and of the other one, if that is limited, and with
/// maps that are there if there are some.
fn load<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    place: Place,
    direction: Direction,
    states: &MapHandle,
    other: Option<&MapHandle>,
    earlier: Option<&AcksMaps>,
) -> Result<skel::acks::AcksSkel<'a>, LimitError> {
    let mut open = open_skel::<skel::acks::AcksSkelBuilder>(storage, "acks")?;
    let side = |direction| match Side::of(direction, place.is_port) {
        Side::In => ProgramAttachType::TcxIngress,
        Side::Out => ProgramAttachType::TcxEgress,
    };
    open.progs.acks_data.set_attach_type(side(direction));
    open.progs.acks_back.set_attach_type(side(direction.other()));
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut()
        && !place.is_ethernet
    {
        rodata.link_bytes = 0;
    }
    reuse(&mut open.maps.states, states)?;
    if let Some(other) = other {
        // Linux 6.1 takes no map whose types are not described as those of the first one are.
        let done = open.maps.other_states.set_inner_map_fd(other.as_fd());
        done.map_err(load_error("acks"))?;
    }
    if let Some(maps) = earlier {
        reuse(&mut open.maps.limits, &maps.limits)?;
        reuse(&mut open.maps.backlogs, &maps.backlogs)?;
        reuse(&mut open.maps.counters, &maps.counters)?;
        reuse(&mut open.maps.flows, &maps.flows)?;
    }
    let acks = load_skel(open, "acks")?;
    if let Some(other) = other {
        let fd = other.as_fd().as_raw_fd().to_ne_bytes();
        let done = acks.maps.other_states.update(&KEY, &fd, MapFlags::ANY);
        done.map_err(map_error("other_states"))?;
    }
    Ok(acks)
}

/// Loads the programs of a limit that is pinned in `dir` once more, with the maps that they have.
pub(crate) fn reload(dir: &Path, limit: &crate::intf::Limit) -> Result<Vec<Successor>, LimitError> {
    let mut all = Vec::new();
    let is_ethernet = device::in_namespace(limit.cgroup_id, || is_ethernet(limit.ifindex));
    let place = Place {
        is_port: limit.flags & crate::intf::FLAG_PORT != 0,
        is_ethernet: is_ethernet.unwrap_or(true),
    };
    let open =
        |direction| AcksMaps::open(&dir_of(dir, direction)).map_err(|_| LimitError::Layout("acks"));
    for direction in pins::directions(limit) {
        let maps = open(direction)?;
        let mut both = pins::directions(limit);
        let other = both.find(|other| *other != direction).map(open).transpose()?;
        let other = other.as_ref().map(|other| &other.states);
        let dir = dir_of(dir, direction);
        let mut storage = MaybeUninit::uninit();
        let acks = load(&mut storage, place, direction, &maps.states, other, Some(&maps))?;
        let link = |direction| LINKS[crate::intf::index(direction)];
        let (data, back) = (&acks.progs.acks_data, &acks.progs.acks_back);
        let programs = [(link(direction), data), (link(direction.other()), back)];
        all.extend(successors(&dir, &programs)?);
    }
    Ok(all)
}

impl AcksMaps {
    /// Changes what they do, from the next packet on.
    ///
    /// # Errors
    /// [`LimitError::Map`].
    pub fn set(&self, options: &AcksOptions) -> Result<(), LimitError> {
        let [now, then] = options.encode();
        // What comes after is there before.
        for (key, limit) in [(intf::THEN, then), (intf::NOW, now)] {
            let done = self.limits.update(&key.to_ne_bytes(), bytes_of(&limit), MapFlags::ANY);
            done.map_err(map_error("limits"))?;
        }
        Ok(())
    }

    /// Tells them where packets wait.
    ///
    /// # Errors
    /// [`LimitError::Map`].
    pub fn set_backlog(&self, backlog: &Backlog) -> Result<(), LimitError> {
        self.backlogs.update(&KEY, bytes_of(backlog), MapFlags::ANY).map_err(map_error("backlogs"))
    }

    /// What all flows share at this moment.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn state(&self) -> Result<intf::State, LimitError> {
        let value = self.states.lookup(&KEY, MapFlags::ANY).map_err(map_error("states"))?;
        let value = value.filter(|value| value.len() == size_of::<intf::State>());
        value.map(|value| pod_read_unaligned(&value)).ok_or(LimitError::Layout("states"))
    }

    /// Packets of the data's way that passed or were beyond their window, and ACKs that were changed (as
    /// `mark` and `slow`), summed over CPUs.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn counters(&self) -> Result<crate::intf::Counters, LimitError> {
        let mut sum = crate::intf::Counters::default();
        for cpu in lookup_cpus(&self.counters, "counters", 0)? {
            sum.add(&cpu);
        }
        Ok(sum)
    }

    /// The connections that are known and wanted, who sends first. Asks the kernel once for each.
    pub fn known(
        &self,
        wanted: impl Fn(SocketAddr, SocketAddr) -> bool,
    ) -> Vec<(SocketAddr, SocketAddr)> {
        let keys = self.flows.keys().take(intf::FLOWS_MAX);
        let keys = keys.filter_map(|key| bytemuck::try_pod_read_unaligned::<intf::Key>(&key).ok());
        keys.map(intf::Key::ends).filter(|(own, other)| wanted(*own, *other)).collect()
    }
}

#[cfg(test)]
mod bed;
#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod traffic_tests;
