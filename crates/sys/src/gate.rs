//! Cgroups as the kernel makes and removes them, and the bound on what a new one sends and receives until it
//! is decided which limits hold it (`bpf/gate/`, model `tidegate_core::gate`).
//!
//! Who decides attaches a [`Gate`] to a cgroup, reads [`Gate::events`], attaches the limits of each new
//! cgroup, and calls [`Gate::decide`] for it. Until then, or until its deadline, 64 KiB of it pass.
//! Nothing is pinned: when the gate is dropped, or its process dies, everything passes.

use std::{
    collections::BTreeSet,
    mem::{self, MaybeUninit},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use bytemuck::bytes_of;
use libbpf_rs::{
    ErrorKind, Link, MapCore, MapFlags, MapHandle, OpenObject, RingBuffer, RingBufferBuilder,
};

use crate::{
    bpf::{attach, load_skel, lookup_cpus, map_error, open_skel, read},
    cgroup::Cgroup,
    limit::LimitError,
    shared::{GT_UNDECIDED_MAX, Undecided},
    skel::{self, gate::GateSkel},
};

/// The counters of a gate since it was attached.
pub use crate::shared::GateCounters;

/// Cgroups that are undecided at a time; one beyond them is not held, unless another is late.
pub const UNDECIDED_MAX: usize = GT_UNDECIDED_MAX as usize;
/// Events that are read at once at most. What is left keeps the gate readable.
const EVENTS_MAX: usize = 2048;

const PROGRAM: &str = "gate";
const UNDECIDED: &str = "undecided";
const EVENTS: &str = "cgroup_events";
const COUNTERS: &str = "gate_counters";

/// Why a gate could not be attached. The host is as before.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The kernel does not report cgroups.
    #[error(
        "could not attach the eBPF program `{program}` to the kernel's tracepoint: {source}; `uname -r` must \
         be 6.1 or newer, with BTF (/sys/kernel/btf/vmlinux)"
    )]
    Tracepoint { program: &'static str, source: libbpf_rs::Error },
    #[error(transparent)]
    Limit(#[from] LimitError),
}

/// How a gate works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateSettings {
    /// How long after its creation a cgroup is held at most.
    pub deadline: Duration,
}

impl GateCounters {
    fn add(&mut self, more: &GateCounters) {
        self.cgroups += more.cgroups;
        self.full += more.full;
        self.lost += more.lost;
        self.passed_bytes += more.passed_bytes;
        self.dropped_packets += more.dropped_packets;
        self.late_bytes += more.late_bytes;
    }
}

/// A gate on some cgroups, while it lives. It can be polled: readable means that there are events.
#[derive(Debug)]
pub struct Gate {
    undecided: MapHandle,
    events: MapHandle,
    counters: MapHandle,
    ring: RingBuffer<'static>,
    /// Lost events that a caller knows of.
    lost: u64,
    /// There are decided cgroups that wait for one above them.
    has_waiting: bool,
    // The kernel detaches what no descriptor holds.
    _programs: [OwnedFd; 2],
    _tracepoints: [Link; 2],
}

impl Gate {
    /// Holds all cgroups that are made below `top` from now on, and reports those that are made and removed.
    /// `top` itself and what exists below it is not held. It lies at most 32 levels deep (`GT_DEPTH_MAX`).
    ///
    /// # Errors
    /// [`GateError`].
    pub fn attach(top: &Cgroup, settings: GateSettings) -> Result<Gate, GateError> {
        let mut storage = MaybeUninit::uninit();
        let object = load(&mut storage, top.id(), settings)?;
        // First those for packets: who is in the map is held from then on.
        let programs = [
            attach(object.progs.gate_out.as_fd(), "egress", top)?,
            attach(object.progs.gate_in.as_fd(), "ingress", top)?,
        ];
        let tracepoint = |program| move |source| GateError::Tracepoint { program, source };
        let made = object.progs.gate_made.attach().map_err(tracepoint("gate_made"))?;
        let removed = object.progs.gate_removed.attach().map_err(tracepoint("gate_removed"))?;

        let handle = |map: &_, name| MapHandle::try_from(map).map_err(map_error(name));
        let maps = &object.maps;
        let mut ring = RingBufferBuilder::new();
        ring.add(&maps.cgroup_events, |_| 0).map_err(map_error(EVENTS))?;
        Ok(Gate {
            undecided: handle(&maps.undecided, UNDECIDED)?,
            events: handle(&maps.cgroup_events, EVENTS)?,
            counters: handle(&maps.gate_counters, COUNTERS)?,
            ring: ring.build().map_err(map_error(EVENTS))?,
            lost: 0,
            has_waiting: false,
            _programs: programs,
            _tracepoints: [made, removed],
        })
    }

    /// How many cgroups were made or removed since the call before, without waiting. Whoever follows cgroups
    /// looks at all of them again, and so finds those that were not in the ring because it was full.
    ///
    /// # Errors
    /// [`LimitError::Map`].
    pub fn events(&mut self) -> Result<u64, LimitError> {
        let read = self.ring.consume_raw_n(EVENTS_MAX);
        let refused = |_| map_error(EVENTS)(libbpf_rs::Error::from_raw_os_error(-read));
        let read = u64::try_from(read).map_err(refused)?;
        let lost = self.counters()?.lost;
        Ok(read + lost - mem::replace(&mut self.lost, lost))
    }

    /// Holds a cgroup no longer: call it when the cgroup's limits are attached, or when it has none. If
    /// cgroups above it are undecided, it is still held with them. A cgroup that is not held is left alone.
    ///
    /// # Errors
    /// [`LimitError::Map`].
    pub fn decide(&mut self, id: u64) -> Result<(), LimitError> {
        let Some(held) = self.held(id)? else { return Ok(()) };
        if self.held(held.parent)?.is_some() {
            let waiting = Undecided { until_ns: 0, ..held };
            let written =
                self.undecided.update(&id.to_ne_bytes(), bytes_of(&waiting), MapFlags::EXIST);
            self.has_waiting = true;
            return unless_gone(written);
        }
        self.release(id)?;
        if self.has_waiting {
            self.release_waiting()?;
        }
        Ok(())
    }

    /// What the gate has seen.
    ///
    /// # Errors
    /// [`LimitError::Map`].
    pub fn counters(&self) -> Result<GateCounters, LimitError> {
        let mut sum = GateCounters::default();
        for cpu in lookup_cpus(&self.counters, COUNTERS, 0)? {
            sum.add(&cpu);
        }
        Ok(sum)
    }

    fn held(&self, id: u64) -> Result<Option<Undecided>, LimitError> {
        let found = self.undecided.lookup(&id.to_ne_bytes(), MapFlags::ANY);
        found.map_err(map_error(UNDECIDED))?.map(|value| read(&value, UNDECIDED)).transpose()
    }

    fn all_held(&self) -> Result<Vec<(u64, Undecided)>, LimitError> {
        let all = self.undecided.lookup_batch(UNDECIDED_MAX as u32, MapFlags::ANY, MapFlags::ANY);
        let all = all.map_err(map_error(UNDECIDED))?;
        all.map(|(id, held)| Ok((read(&id, UNDECIDED)?, read(&held, UNDECIDED)?))).collect()
    }

    fn release(&self, id: u64) -> Result<(), LimitError> {
        unless_gone(self.undecided.delete(&id.to_ne_bytes()))
    }

    /// Lets go decided cgroups whose parents are not held any more, from the top down.
    fn release_waiting(&mut self) -> Result<(), LimitError> {
        let mut all = self.all_held()?;
        loop {
            let ids: BTreeSet<u64> = all.iter().map(|(id, _)| *id).collect();
            let (free, rest) = all.into_iter().partition(|(_, held): &(u64, Undecided)| {
                held.until_ns == 0 && !ids.contains(&held.parent)
            });
            all = rest;
            for (id, _) in &free {
                self.release(*id)?;
            }
            if free.is_empty() {
                self.has_waiting = all.iter().any(|(_, held)| held.until_ns == 0);
                return Ok(());
            }
        }
    }
}

impl AsFd for Gate {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

fn load<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    top_id: u64,
    settings: GateSettings,
) -> Result<GateSkel<'a>, LimitError> {
    let mut open = open_skel::<skel::gate::GateSkelBuilder>(storage, PROGRAM)?;
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.top_id = top_id;
        rodata.deadline_ns = u64::try_from(settings.deadline.as_nanos()).unwrap_or(u64::MAX >> 1);
    }
    load_skel(open, PROGRAM)
}

/// A cgroup that is removed leaves the map by itself.
fn unless_gone(done: libbpf_rs::Result<()>) -> Result<(), LimitError> {
    match done {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        done => done.map_err(map_error(UNDECIDED)),
    }
}

#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod traffic_tests;
