//! The published NRM with the congestion control that it was meant for, over a path with a round trip.
//!
//! The round trip makes the outcome the same on every machine: the least window of TCP, two packets, is then
//! far below the limit. On a bare veth pair it is above 2 to 8 Gbit/s, depending on the machine.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    fs::File,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use tidegate_core::{Direction, Rate};
use tidegate_instruments::paper::{NrmPaper, PaperOptions};
use tidegate_lab::testbed::{
    Cgroup, Child, Family, LinkSpec, Site, Testbed, TestbedOptions, Topology, command,
    root_or_skip, wait_for_listener,
};
use tidegate_sys::congestion::{TG_DCTCP, attach_to_cgroup, ensure};

/// So low that every machine can send more.
const LIMIT: &str = "20mbit";
const ROUND_TRIP: Duration = Duration::from_millis(4);
const TRANSFER_BYTES: u64 = 4_000_000;
/// A socket's buffers. The kernel doubles it; what is under way at once is then too little to run from the
/// threshold of marks to that of drops before the sender has heard of the marks, even if the machine stalls.
const BUFFER_BYTES: u64 = 64 << 10;
/// How long the transfer may take; undisturbed it is 1.6 s.
const PATIENCE: Duration = Duration::from_secs(240);
/// Credit that the limit begins with, and what a sender may overdraw: bytes, as published.
const CREDIT_BYTES: u64 = 150_000 + 600_000;
const PORT: u16 = 5201;

/// `tg_dctcp` exists once on a host: tests that look whether it does take turns.
fn take_turn() -> File {
    let path = std::env::temp_dir().join("tidegate-test-tg_dctcp.lock");
    let file = File::create(path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    file
}

/// One transfer of a limited DCTCP flow is held to its rate by marks alone: nothing is dropped.
fn dctcp_is_held_by_marks(direction: Direction) {
    let _turn = take_turn();
    let options = TestbedOptions {
        link: Some(LinkSpec::rtt(ROUND_TRIP)),
        lab_binary: Some(env!("CARGO_BIN_EXE_tidegate-lab").into()),
        ..TestbedOptions::new(Topology::Pair)
    };
    let testbed = Testbed::new(options).unwrap();
    let dctcp = ensure(TG_DCTCP).unwrap();
    let (client, server) = (Cgroup::create().unwrap(), Cgroup::create().unwrap());
    let open = |cgroup: &Cgroup| File::open(cgroup.path()).unwrap();
    let _attached = [&client, &server]
        .map(|cgroup| attach_to_cgroup(open(cgroup).as_fd(), dctcp.name()).unwrap());
    let rate: Rate = LIMIT.parse().unwrap();
    let (limited, options) = match direction {
        Direction::Egress => (&client, PaperOptions { egress: Some(rate), ingress: None }),
        Direction::Ingress => (&server, PaperOptions { egress: None, ingress: Some(rate) }),
    };
    let paper = NrmPaper::attach(open(limited).as_fd(), options).unwrap();

    let site = Site::from(testbed.receiver(0)).in_cgroup(&server);
    let mut iperf = command(site, "iperf3").unwrap();
    iperf.args(["--server", "--one-off", "--port", &PORT.to_string()]);
    let mut listening = Child::spawn(iperf).unwrap();
    wait_for_listener(testbed.receiver(0), PORT, &mut listening).unwrap();
    let site = Site::from(testbed.sender()).in_cgroup(&client);
    let mut iperf = command(site, "iperf3").unwrap();
    let (bytes, window) = (TRANSFER_BYTES.to_string(), BUFFER_BYTES.to_string());
    let address = testbed.addr(0, Family::V4).to_string();
    iperf.args(["--client", &address, "--port", &PORT.to_string()]);
    iperf.args(["--bytes", &bytes, "--window", &window]);
    let started = Instant::now();
    Child::spawn(iperf).unwrap().finish(PATIENCE).unwrap();
    let took = started.elapsed();
    drop(listening);

    let counters = paper.counters(direction).unwrap();
    println!("{direction:?}: {took:?} {counters:?}");
    assert_eq!(counters.dropped.packets, 0, "{counters:?}");
    assert!(counters.marked.packets > 0, "{counters:?}");
    let charged = counters.passed.bytes.0 + counters.marked.bytes.0;
    // At its end iperf3 throws away what is still in the buffers.
    assert!(charged > TRANSFER_BYTES - 4 * BUFFER_BYTES, "{counters:?}");
    let at_least = (charged - CREDIT_BYTES) as f64 * 8.0 / rate.bit_s() as f64;
    assert!(took.as_secs_f64() > at_least, "{took:?} is less than {at_least} s: {counters:?}");
}

#[test]
fn root_egress_dctcp_is_held_by_marks_alone() {
    if root_or_skip("root_egress_dctcp_is_held_by_marks_alone") {
        dctcp_is_held_by_marks(Direction::Egress);
    }
}

#[test]
fn root_ingress_dctcp_is_held_by_marks_alone() {
    if root_or_skip("root_ingress_dctcp_is_held_by_marks_alone") {
        dctcp_is_held_by_marks(Direction::Ingress);
    }
}
