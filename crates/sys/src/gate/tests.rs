//! What a gate reports, what it holds, and what it does where its bounds are reached.

use std::{
    os::fd::{AsRawFd, FromRawFd},
    time::{Duration, Instant},
};

use libbpf_rs::libbpf_sys;
use rustix::event::{PollFd, PollFlags, poll};

use super::*;
use crate::{query, schemes::nrm::tree_tests::Nest};

/// Longer than any test takes: nobody is late by accident.
pub(super) const LONG: GateSettings = GateSettings { deadline: Duration::from_secs(3600) };
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Whether the test may run; says so when not.
pub(super) fn root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP {test}: needs root");
    }
    root
}

pub(super) fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A cgroup with a gate on it.
pub(super) fn gated(name: &str, settings: GateSettings) -> (Nest, Gate) {
    let nest = Nest::new(name, 1);
    let gate = Gate::attach(&nest.groups[0], settings).unwrap();
    (nest, gate)
}

/// One more cgroup below the one at `parent`.
pub(super) fn make(nest: &mut Nest, parent: usize, name: &str) -> u64 {
    nest.groups.push(nest.hierarchy.create(&nest.groups[parent], name).unwrap());
    nest.groups.last().unwrap().id()
}

pub(super) fn remove_last(nest: &mut Nest) {
    nest.groups.pop().unwrap().remove(Instant::now() + PATIENCE).unwrap();
}

impl Gate {
    /// The cgroups that wait for a decision, also after their deadline.
    pub(super) fn undecided(&self) -> Result<Vec<u64>, LimitError> {
        let all = self.all_held()?;
        Ok(all.into_iter().filter(|(_, held)| held.until_ns != 0).map(|(id, _)| id).collect())
    }
}

fn is_readable(gate: &Gate) -> bool {
    let mut fds = [PollFd::new(gate, PollFlags::IN)];
    poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

#[test]
fn root_cgroups_below_the_chosen_one_are_reported_and_held() {
    if !root("root_cgroups_below_the_chosen_one_are_reported_and_held") {
        return;
    }
    let (mut nest, mut gate) = gated("gate-events", LONG);
    let elsewhere = Nest::new("gate-elsewhere", 2);
    assert!(!is_readable(&gate), "not what is made elsewhere");
    let parent = nest.groups[0].id();
    let outer = make(&mut nest, 0, "outer");
    let inner = make(&mut nest, 1, "inner");
    wait_until("the gate is readable", || is_readable(&gate));
    assert_eq!(gate.events().unwrap(), 2);
    assert_eq!(gate.events().unwrap(), 0);
    assert!(!is_readable(&gate));
    let above = |id| gate.held(id).unwrap().map(|held| held.parent);
    assert_eq!((above(outer), above(inner)), (Some(parent), Some(outer)));
    let mut undecided = gate.undecided().unwrap();
    undecided.sort_unstable();
    assert_eq!(undecided, [outer, inner]);

    remove_last(&mut nest);
    assert_eq!(gate.events().unwrap(), 1);
    assert_eq!(gate.undecided().unwrap(), [outer]);
    gate.decide(inner).unwrap();
    gate.decide(elsewhere.groups[1].id()).unwrap();
    gate.decide(outer).unwrap();
    assert_eq!(gate.undecided().unwrap(), [0; 0]);
    assert_eq!(gate.counters().unwrap(), GateCounters { cgroups: 2, ..GateCounters::default() });
}

#[test]
fn root_a_decided_cgroup_waits_for_those_above_it() {
    if !root("root_a_decided_cgroup_waits_for_those_above_it") {
        return;
    }
    let (mut nest, mut gate) = gated("gate-order", LONG);
    let [outer, middle, inner] = [0, 1, 2].map(|at| make(&mut nest, at, "inside"));
    gate.decide(inner).unwrap();
    gate.decide(middle).unwrap();
    assert_eq!(gate.undecided().unwrap(), [outer]);
    assert_eq!(gate.all_held().unwrap().len(), 3, "packets find their way up");
    let late = make(&mut nest, 3, "late");
    gate.decide(outer).unwrap();
    assert_eq!(gate.undecided().unwrap(), [late]);
    assert_eq!(gate.all_held().unwrap().len(), 1);
    gate.decide(late).unwrap();
    assert_eq!(gate.all_held().unwrap(), []);
}

/// A daemon that does not read: the rest of the host goes on, and it learns that it must look again.
#[test]
fn root_a_flooded_ring_reports_what_it_lost() {
    if !root("root_a_flooded_ring_reports_what_it_lost") {
        return;
    }
    /// More than the ring holds.
    const PAIRS: u64 = 1200;
    let (mut nest, mut gate) = gated("gate-flood", LONG);
    for _ in 0..PAIRS {
        make(&mut nest, 0, "short");
        remove_last(&mut nest);
    }
    assert_eq!(gate.undecided().unwrap(), [0; 0]);
    let lost = gate.counters().unwrap().lost;
    assert!(lost > 0 && lost <= 2 * PAIRS - 2000, "{lost} lost");
    assert_eq!((gate.events().unwrap(), gate.events().unwrap()), (2 * PAIRS, 0));
    assert!(!is_readable(&gate));
    let id = make(&mut nest, 0, "after");
    assert_eq!(gate.events().unwrap(), 1);
    assert_eq!(gate.undecided().unwrap(), [id]);
    let counters = gate.counters().unwrap();
    assert_eq!((counters.cgroups, counters.lost, counters.full), (PAIRS + 1, lost, 0));
}

#[test]
fn root_a_cgroup_that_finds_the_map_full_is_reported_and_not_held() {
    if !root("root_a_cgroup_that_finds_the_map_full_is_reported_and_not_held") {
        return;
    }
    let (mut nest, mut gate) = gated("gate-full", LONG);
    let other = Undecided { until_ns: u64::MAX, ..Undecided::default() };
    // Ids that no cgroup has.
    let ids: Vec<u64> = (1..=UNDECIDED_MAX as u64).map(|number| u64::MAX - number).collect();
    for id in &ids {
        gate.undecided.update(&id.to_ne_bytes(), bytes_of(&other), MapFlags::ANY).unwrap();
    }
    let id = make(&mut nest, 0, "one-more");
    assert_eq!(gate.held(id).unwrap(), None);
    assert_eq!(gate.events().unwrap(), 1);
    assert_eq!(gate.undecided().unwrap().len(), UNDECIDED_MAX);
    let counters = gate.counters().unwrap();
    assert_eq!((counters.cgroups, counters.full), (1, 1));
    gate.decide(ids[0]).unwrap();
    let id = make(&mut nest, 0, "next");
    assert!(gate.held(id).unwrap().is_some(), "there is room again");
}

/// As those that user space never sees: their names are no text, or too long.
#[test]
fn root_cgroups_that_nobody_decides_give_up_their_places_after_the_deadline() {
    if !root("root_cgroups_that_nobody_decides_give_up_their_places_after_the_deadline") {
        return;
    }
    let (mut nest, gate) = gated("gate-late", LONG);
    let id = |number: u64| u64::MAX - 1 - number;
    // Of six one is late, and two wait for it; one is held still, and two wait for that.
    for number in 0..UNDECIDED_MAX as u64 {
        let (parent, until_ns) = match number % 6 {
            0 => (0, 1),
            3 => (0, u64::MAX),
            _ => (id(number - 1), 0),
        };
        let other = Undecided { parent, until_ns, bytes: 0 };
        gate.undecided.update(&id(number).to_ne_bytes(), bytes_of(&other), MapFlags::ANY).unwrap();
    }
    let new = make(&mut nest, 0, "new");
    assert!(gate.held(new).unwrap().is_some());
    let counters = gate.counters().unwrap();
    assert_eq!((counters.cgroups, counters.full), (1, 0));
    let held: BTreeSet<_> = gate.all_held().unwrap().into_iter().map(|(id, _)| id).collect();
    let still = (0..UNDECIDED_MAX as u64).filter(|number| number % 6 >= 3).map(id);
    assert_eq!(held, still.chain([new]).collect());
}

/// A program of somebody else on the egress hook, as systemd has them (BPF_F_ALLOW_MULTI), or alone (0).
fn attach_foreign(cgroup: &Cgroup, flags: u32) {
    let mut pass = [libbpf_sys::bpf_insn::default(), libbpf_sys::bpf_insn::default()];
    // r0 = 1; exit
    (pass[0].code, pass[0].imm, pass[1].code) = (0xb7, 1, 0x95);
    // SAFETY: names are terminated, `pass` holds two instructions, no options are given, and both descriptors
    // are open.
    unsafe {
        let program = libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_CGROUP_SKB,
            c"gate_foreign".as_ptr(),
            c"GPL".as_ptr(),
            pass.as_ptr(),
            2,
            std::ptr::null_mut(),
        );
        assert!(program >= 0);
        let (fd, hook) = (cgroup.as_fd().as_raw_fd(), libbpf_sys::BPF_CGROUP_INET_EGRESS);
        assert_eq!(libbpf_sys::bpf_prog_attach(program, fd, hook, flags), 0);
        drop(OwnedFd::from_raw_fd(program));
    }
}

#[test]
fn root_a_gate_stands_beside_programs_of_others_and_goes_alone() {
    if !root("root_a_gate_stands_beside_programs_of_others_and_goes_alone") {
        return;
    }
    let nest = Nest::new("gate-beside", 1);
    attach_foreign(&nest.groups[0], libbpf_sys::BPF_F_ALLOW_MULTI);
    let names = |cgroup: &Cgroup| -> BTreeSet<String> {
        let hooks = query::on_cgroup(cgroup).unwrap().into_iter();
        hooks.flat_map(|(_, on)| on.programs).filter_map(query::program_name).collect()
    };
    let gate = Gate::attach(&nest.groups[0], LONG).unwrap();
    let all = ["gate_foreign", query::GATE_PROGRAMS[0], query::GATE_PROGRAMS[1]].map(str::to_owned);
    assert_eq!(names(&nest.groups[0]), all.into());
    drop(gate);
    assert_eq!(names(&nest.groups[0]), ["gate_foreign".to_owned()].into());

    // Somebody has the hook for himself, and is named.
    let alone = Nest::new("gate-alone", 1);
    attach_foreign(&alone.groups[0], 0);
    let refused = Gate::attach(&alone.groups[0], LONG);
    let occupied = matches!(&refused, Err(GateError::Limit(LimitError::Occupied { .. })));
    assert!(occupied, "{refused:?}");
}
