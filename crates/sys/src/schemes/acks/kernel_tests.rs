//! The loaded programs on tables of packets, and on any packets at all (BPF_PROG_TEST_RUN).

use std::{net::UdpSocket, os::fd::AsFd, time::Duration};

use libbpf_rs::ProgramInput;
use proptest::{prelude::*, test_runner::TestRunner};
use tidegate_instruments::run_time::{empty_program, mean_run_time, mean_run_time_alone};

use super::*;
use crate::net::{
    NetNs, Netlink, VethPair,
    qdisc::{Fifo, Handle, Htb, HtbClass, Place as TcPlace, Verb},
};

const FIN: u16 = 0x01;
const SYN: u16 = 0x02;
const RST: u16 = 0x04;
const ACK: u16 = 0x10;
const ECE: u16 = 0x40;
const CWR: u16 = 0x80;
const AE: u16 = 0x100;

/// `TC_ACT_UNSPEC`, `TC_ACT_SHOT`.
const PASS: u32 = u32::MAX;
const SHOT: u32 = 2;

const MSS_1460: [u8; 4] = [2, 4, 5, 180];
/// Scale 9, after a NOP.
const SCALE_9: [u8; 4] = [1, 3, 3, 9];
const TIMESTAMPS: [u8; 12] = [1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8];
/// NOP, NOP, SACK of one block.
const SACK: [u8; 12] = [1, 1, 5, 10, 0, 0, 1, 0, 0, 0, 2, 0];

/// A segment between the workload and the other side.
#[derive(Debug, Clone)]
struct Segment {
    v6: bool,
    /// From the workload.
    out: bool,
    flags: u16,
    seq: u32,
    ack: u32,
    window: u16,
    options: Vec<u8>,
    payload: usize,
    ecn: u8,
}

fn out(flags: u16, seq: u32, ack: u32) -> Segment {
    let (window, options) = (1000, Vec::new());
    Segment { v6: false, out: true, flags, seq, ack, window, options, payload: 0, ecn: 0 }
}

fn back(flags: u16, seq: u32, ack: u32) -> Segment {
    Segment { out: false, ..out(flags, seq, ack) }
}

fn sum(bytes: &[u8], start: u32) -> u32 {
    bytes.chunks(2).fold(start, |sum, word| {
        sum + (u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)))
    })
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

impl Segment {
    fn window(self, window: u16) -> Segment {
        Segment { window, ..self }
    }

    fn payload(self, payload: usize) -> Segment {
        Segment { payload, ..self }
    }

    fn options(mut self, options: &[u8]) -> Segment {
        self.options.extend(options);
        self
    }

    fn ip_bytes(&self) -> usize {
        if self.v6 { 40 } else { 20 }
    }

    /// An Ethernet frame with checksums that are right.
    fn frame(&self) -> Vec<u8> {
        let tcp = 20 + self.options.len() + self.payload;
        let mut frame = vec![2; 12];
        if self.v6 {
            frame.extend([0x86, 0xdd, 0x60, self.ecn << 4, 0, 0]);
            frame.extend((tcp as u16).to_be_bytes());
            frame.extend([6, 64]);
        } else {
            frame.extend([8, 0, 0x45, self.ecn]);
            frame.extend((20 + tcp as u16).to_be_bytes());
            frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0]);
        }
        let (near, far) = if self.v6 {
            let mut near = [0xfd; 16];
            near[15] = 1;
            (near.to_vec(), vec![0xfd; 16])
        } else {
            (vec![10, 0, 0, 1], vec![10, 0, 0, 2])
        };
        let (source, target) = if self.out { (&near, &far) } else { (&far, &near) };
        frame.extend(source);
        frame.extend(target);
        let at = 14 + self.ip_bytes();
        let ports: [u16; 2] = if self.out { [4000, 80] } else { [80, 4000] };
        frame.extend(ports.map(u16::to_be_bytes).concat());
        frame.extend(self.seq.to_be_bytes());
        frame.extend(self.ack.to_be_bytes());
        let word = (5 + self.options.len() as u16 / 4) << 12 | self.flags;
        frame.extend(word.to_be_bytes());
        frame.extend(self.window.to_be_bytes());
        frame.extend([0; 4]);
        frame.extend(&self.options);
        frame.resize(frame.len() + self.payload, 0x5a);
        let pseudo = sum(source, sum(target, 6 + tcp as u32));
        let check = !fold(sum(&frame[at..], pseudo));
        frame[at + 16..at + 18].copy_from_slice(&check.to_be_bytes());
        frame
    }
}

/// Whether the TCP checksum of a frame is right.
fn is_right(frame: &[u8], v6: bool) -> bool {
    let (at, addresses) = if v6 { (54, 22..54) } else { (34, 26..34) };
    let pseudo = sum(&frame[addresses], 6 + (frame.len() - at) as u32);
    fold(sum(&frame[at..], pseudo)) == 0xffff
}

/// The programs, loaded, in front of a queue.
struct Loaded<'a> {
    acks: skel::acks::AcksSkel<'a>,
}

impl<'a> Loaded<'a> {
    fn new(storage: &'a mut MaybeUninit<OpenObject>) -> Loaded<'a> {
        let open = open_skel::<skel::acks::AcksSkelBuilder>(storage, "acks").unwrap();
        Loaded { acks: load_skel(open, "acks").unwrap() }
    }

    fn reset(&self, options: &AcksOptions, backlog: &Backlog) {
        let maps = &self.acks.maps;
        let state = intf::State { share: spring::ONE, ..intf::State::default() };
        let cpus = libbpf_rs::num_possible_cpus().unwrap();
        let counters = vec![vec![0; size_of::<crate::intf::Counters>()]; cpus];
        for (key, limit) in (0u32..).zip(options.encode()) {
            maps.limits.update(&key.to_ne_bytes(), bytes_of(&limit), MapFlags::ANY).unwrap();
        }
        maps.states.update(&KEY, bytes_of(&state), MapFlags::ANY).unwrap();
        maps.backlogs.update(&KEY, bytes_of(backlog), MapFlags::ANY).unwrap();
        maps.counters.update_percpu(&KEY, &counters, MapFlags::ANY).unwrap();
        let keys: Vec<_> = maps.flows.keys().collect();
        for key in keys {
            maps.flows.delete(&key).unwrap();
        }
    }

    fn flows(&self) -> Vec<intf::Flow> {
        let maps = &self.acks.maps;
        let value = |key: Vec<u8>| maps.flows.lookup(&key, MapFlags::ANY).unwrap();
        maps.flows.keys().filter_map(value).map(|v| pod_read_unaligned(&v)).collect()
    }

    /// What becomes of a frame.
    fn run(&self, out: bool, frame: &[u8]) -> (u32, Vec<u8>) {
        self.run_merged(out, frame, 0)
    }

    /// The same of one that the kernel treats as segments of this length.
    fn run_merged(&self, out: bool, frame: &[u8], gso_size: u32) -> (u32, Vec<u8>) {
        // A struct __sk_buff, which is UAPI, and the offset of gso_size in it.
        let mut context = vec![0; 192];
        context[176..180].copy_from_slice(&gso_size.to_ne_bytes());
        let program = if out { &self.acks.progs.acks_data } else { &self.acks.progs.acks_back };
        let mut after = frame.to_vec();
        let run = program.test_run(ProgramInput {
            context_in: Some(&mut context),
            data_in: Some(frame),
            data_out: Some(&mut after),
            ..ProgramInput::default()
        });
        (run.unwrap().return_value, after)
    }

    /// What becomes of a segment: the verdict, its flags and window. Nothing else may change.
    fn segment(&self, what: &str, segment: &Segment) -> (u32, u16, u16) {
        let before = segment.frame();
        let (verdict, after) = self.run(segment.out, &before);
        untouched(what, &before, &after, 14 + segment.ip_bytes());
        assert!(is_right(&after, segment.v6), "{what}: checksum");
        let at = 14 + segment.ip_bytes() + 12;
        let word = |at: usize| u16::from_be_bytes([after[at], after[at + 1]]);
        (verdict, word(at) & 0x1ff, word(at + 2))
    }
}

/// Only flags (of which ECE may be set), window and checksum may be others, and the window no larger.
fn untouched(what: &str, before: &[u8], after: &[u8], tcp: usize) {
    assert_eq!(before.len(), after.len(), "{what}: length");
    for (at, (was, is)) in before.iter().zip(after).enumerate() {
        let may = (tcp + 13..tcp + 18).contains(&at);
        assert!(was == is || may, "{what}: byte {at} was {was}, is {is}");
    }
    if let (Some(was), Some(is)) = (before.get(tcp + 13..tcp + 16), after.get(tcp + 13..tcp + 16)) {
        assert!(is[0] == was[0] || is[0] == was[0] | ECE as u8, "{what}: flags");
        assert!(is[1..] <= was[1..], "{what}: the window was raised");
    }
}

fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP {test}: needs root");
    }
    root
}

/// A queue that holds packets for as long as the test lasts.
fn standing_queue(test: &str) -> (NetNs, Backlog) {
    let netns = NetNs::create(&format!("tidegate-{}-{test}", std::process::id())).unwrap();
    let rate = Rate::from_bit_s(8000).unwrap();
    let found = netns.run(|| {
        let mut netlink = Netlink::open().unwrap();
        netlink.add_veth(&VethPair { name: "a", peer: "b", peer_netns: None }).unwrap();
        let ifindex = netlink.index_of("a").unwrap();
        let at = |parent, handle| TcPlace { ifindex, parent, handle };
        let (one, class, leaf) = (Handle::new(1, 0), Handle::new(1, 1), Handle::new(0x7500, 0));
        netlink.set_qdisc(Verb::Add, at(Handle::ROOT, one), &Htb::new(1)).unwrap();
        let shape = HtbClass::new(rate.bit_s());
        netlink.set_class(Verb::Add, at(one, class), &shape).unwrap();
        let fifo = Fifo::Packets(100);
        netlink.set_qdisc(Verb::Add, at(class, leaf), &fifo).unwrap();
        netlink.add_address(ifindex, [10, 97, 0, 1].into(), 24).unwrap();
        let peer = netlink.index_of("b").unwrap();
        netlink.set_up(peer, true).unwrap();
        netlink.set_up(ifindex, true).unwrap();
        bed::run("ip neigh add 10.97.0.2 lladdr 02:00:00:00:00:02 dev a");
        let socket = UdpSocket::bind("10.97.0.1:0").unwrap();
        for _ in 0..90 {
            socket.send_to(&[0; 1000], "10.97.0.2:9").unwrap();
        }
        crate::backlog::locate(ifindex, leaf, rate).unwrap()
    });
    (netns, found.unwrap())
}

const SPRING: AcksOptions = AcksOptions {
    law: Law::Spring,
    // So that every window is the least, however long the test takes between two packets.
    rate: Rate::from_bit_s(8000).unwrap(),
    mark: Some(Nanos(1)),
    burst: Nanos(1_000_000),
    lease: None,
};
/// Two segments of 1460 bytes.
const LEAST: u32 = 2920;

/// A step of a table: a segment, and its verdict, flags and window after.
type Step = (&'static str, Segment, u32, u16, u16);

fn same(what: &'static str, segment: Segment) -> Step {
    let (flags, window) = (segment.flags, segment.window);
    (what, segment, PASS, flags, window)
}

fn window(what: &'static str, segment: Segment, window: u16) -> Step {
    let flags = segment.flags;
    (what, segment, PASS, flags, window)
}

/// A connection that the workload opens; windows are said in units of 512 bytes.
fn opened() -> Vec<Step> {
    let syn = out(SYN, 99, 0).options(&MSS_1460).options(&SCALE_9);
    let answer = back(SYN | ACK, 499, 100).options(&MSS_1460).options(&SCALE_9).window(65_535);
    vec![
        same("SYN", syn),
        window("SYN-ACK: no scale yet", answer, LEAST as u16),
        same("ACK", out(ACK, 100, 500)),
    ]
}

/// Of so many bytes, in units of 512.
fn units(bytes: u32) -> u16 {
    bytes.div_ceil(512) as u16
}

fn check(loaded: &Loaded<'_>, table: &str, steps: Vec<Step>, flows_left: usize) {
    for v6 in [false, true] {
        for flow in loaded.acks.maps.flows.keys().collect::<Vec<_>>() {
            loaded.acks.maps.flows.delete(&flow).unwrap();
        }
        for (what, segment, verdict, flags, window) in &steps {
            let what = format!("{table}: {what} (v6 {v6})");
            let got = loaded.segment(&what, &Segment { v6, ..segment.clone() });
            assert_eq!(got, (*verdict, *flags, *window), "{what}: verdict, flags, window");
        }
        assert_eq!(loaded.flows().len(), flows_left, "{table}: connections left");
    }
}

#[test]
fn root_acks_spring_follows_the_table() {
    if !is_root("root_acks_spring_follows_the_table") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let loaded = Loaded::new(&mut storage);
    loaded.reset(&SPRING, &Backlog::default());
    let with = |more: Vec<Step>| opened().into_iter().chain(more).collect::<Vec<_>>();
    let ack = |number: u32| back(ACK, 500, number).window(60_000);
    let data = |seq: u32| out(ACK, seq, 500).payload(1460);

    check(
        &loaded,
        "windows",
        with(vec![
            same("data", data(100)),
            same("data", data(1560)),
            same("one segment beyond: it may probe", data(3020)),
            same("two", data(4480)),
            ("three", data(5940), SHOT, ACK, 1000),
            window("ACK", ack(1560), units(LEAST)),
            window("duplicate ACK", ack(1560), units(LEAST)),
            window("with SACK", ack(1560).options(&SACK), units(LEAST)),
            window("window update", ack(1560).window(59_999), units(LEAST)),
            same("smaller than ours", ack(1560).window(2)),
            same("zero", ack(1560).window(0)),
            window("open again", ack(1560), units(LEAST)),
            window("with timestamps", ack(3020).options(&TIMESTAMPS), units(LEAST)),
            window("with data", ack(3020).payload(700), units(LEAST)),
            window("its keep-alive", back(ACK, 499, 3020).window(60_000), units(LEAST)),
            same("ours", out(ACK, 99, 500).payload(1)),
            window("ECE is kept", back(ACK | ECE, 500, 3020).window(60_000), units(LEAST)),
            same("acknowledges what was not sent", ack(5_000_000)),
            same("no ACK at all", back(0, 500, 3020).window(60_000)),
        ]),
        1,
    );
    check(
        &loaded,
        "an older ACK moves nothing",
        with(vec![
            same("data", data(100)),
            same("data", data(1560)),
            window("ACK of both", ack(3020), units(LEAST)),
            window("ACK of one: up to the same edge", ack(1560), units(LEAST + 1460)),
        ]),
        1,
    );
    check(
        &loaded,
        "ends",
        with(vec![
            same("FIN", out(FIN | ACK, 100, 500)),
            window("FIN", back(FIN | ACK, 500, 101).window(60_000), units(LEAST)),
            same("ACK", out(ACK, 101, 501)),
        ]),
        0,
    );
    check(
        &loaded,
        "is reset",
        with(vec![same("RST", out(RST, 100, 0)), same("unknown now", ack(100))]),
        0,
    );
    check(
        &loaded,
        "is reset from outside",
        with(vec![
            same("out of place", back(RST, 77, 0)),
            window("goes on", ack(100), units(LEAST)),
            same("in place", back(RST, 500, 0)),
            same("unknown now", ack(100)),
        ]),
        0,
    );
    check(
        &loaded,
        "is reset before its data is acknowledged",
        with(vec![
            window("data", ack(100).payload(300), units(LEAST)),
            same("behind it", back(RST, 800, 0)),
        ]),
        0,
    );
    check(
        &loaded,
        "seen in the middle",
        vec![same("data", data(100)), same("far beyond", data(10_000_000)), same("ACK", ack(1560))],
        0,
    );
    check(
        &loaded,
        "a spoofed SYN changes nothing",
        with(vec![
            same("SYN", back(SYN, 7, 0).options(&[3, 3, 14, 0])),
            window("goes on", ack(100), units(LEAST)),
        ]),
        1,
    );
    check(
        &loaded,
        "without scales",
        vec![
            same("SYN", out(SYN, 99, 0).options(&MSS_1460)),
            window(
                "SYN-ACK",
                back(SYN | ACK, 499, 100).options(&MSS_1460).window(65_535),
                LEAST as u16,
            ),
            window("ACK", ack(100), LEAST as u16),
            same("small", ack(100).window(2919)),
        ],
        1,
    );
    check(
        &loaded,
        "one scale is none; no segment size is 536",
        vec![
            same("SYN", out(SYN, 99, 0).options(&SCALE_9)),
            window("SYN-ACK", back(SYN | ACK, 499, 100).window(65_535), 1072),
            window("ACK", ack(100), 1072),
        ],
        1,
    );
    check(
        &loaded,
        "opened from outside",
        vec![
            same("SYN", back(SYN, 499, 0).options(&MSS_1460).options(&SCALE_9).window(65_535)),
            same("SYN-ACK", out(SYN | ACK, 99, 500).options(&MSS_1460).options(&[1, 3, 3, 2])),
            window("ACK", ack(100), units(LEAST)),
            same("data", data(100)),
            same("data", data(1560)),
            same("and SYN-ACK again", out(SYN | ACK, 99, 500).options(&MSS_1460)),
            window("ACK", ack(3020), units(LEAST)),
        ],
        1,
    );
    check(
        &loaded,
        "a new one in its place",
        with(vec![
            same("SYN", out(SYN, 9_000_099, 0).options(&MSS_1460)),
            window(
                "SYN-ACK",
                back(SYN | ACK, 70_499, 9_000_100).options(&MSS_1460).window(65_535),
                LEAST as u16,
            ),
            window("ACK", back(ACK, 70_500, 9_000_100).window(60_000), LEAST as u16),
        ]),
        1,
    );
}

/// A probe for the MTU of the path, or short segments that were merged, are small for a moment.
#[test]
fn root_acks_spring_follows_the_segment_size_up_again() {
    if !is_root("root_acks_spring_follows_the_segment_size_up_again") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let loaded = Loaded::new(&mut storage);
    loaded.reset(&SPRING, &Backlog::default());
    for from_outside in [false, true] {
        for key in loaded.acks.maps.flows.keys().collect::<Vec<_>>() {
            loaded.acks.maps.flows.delete(&key).unwrap();
        }
        let handshake = if from_outside {
            vec![
                same("SYN", back(SYN, 499, 0).options(&MSS_1460).options(&SCALE_9)),
                same("SYN-ACK", out(SYN | ACK, 99, 500).options(&MSS_1460).options(&SCALE_9)),
            ]
        } else {
            opened()
        };
        for (what, segment, ..) in handshake {
            loaded.segment(what, &segment);
        }
        let mut seq = 100;
        let mut least = |what: &str, payload: u32, gso_size: u32| {
            let data = out(ACK, seq, 500).payload(payload as usize);
            assert_eq!(loaded.run_merged(true, &data.frame(), gso_size).0, PASS, "{what}");
            seq += payload;
            let flows = loaded.flows();
            let [flow] = &flows[..] else { panic!("{what}: {} connections", flows.len()) };
            let mss = flow.mss;
            let (_, _, window) = loaded.segment(what, &back(ACK, 500, seq).window(60_000));
            assert!(window >= units(2 * u32::from(mss)), "{what}: {window}, {mss}");
            mss
        };
        assert_eq!(least("as announced", 1460, 0), 1460);
        assert_eq!(least("two of 512", 1024, 512), 512);
        assert_eq!(least("a last one", 300, 0), 512);
        assert_eq!(least("one, whole", 1000, 0), 1000);
        assert_eq!(least("two with timestamps", 2 * 1448, 1448), 1448);
        assert_eq!(least("short again", 200, 100), 100);
        assert_eq!(least("less than is announced", 150, 0), 150);
        assert_eq!(least("one of 1448", 1448, 0), 1448);
        assert_eq!(least("merged, unsaid", 2000, 0), 1460);
    }
}

/// If both directions are limited, an ACK waits in the other one's queue after it got its window.
#[test]
fn root_acks_spring_knows_how_long_the_ack_waits() {
    if !is_root("root_acks_spring_knows_how_long_the_ack_waits") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let [own, states] = new_states().unwrap();
    let place = Place { is_port: false, is_ethernet: true };
    let acks = load(&mut storage, place, Direction::Egress, &own, Some(&states), None).unwrap();
    let loaded = Loaded { acks };
    let rate = Rate::from_bit_s(80_000_000).unwrap();
    let options = AcksOptions { rate, ..SPRING };
    loaded.reset(&options, &Backlog::default());
    // More than a segment of 64 KB, of which that counts.
    let cost = wait::Config::new(rate, options.burst).cost;
    let account = intf::Account { finish_ns: u64::MAX / 2, cost, ..intf::Account::default() };
    let other = intf::State { account, ..intf::State::default() };
    states.update(&KEY, bytes_of(&other), MapFlags::ANY).unwrap();
    for (what, segment, ..) in opened() {
        loaded.segment(what, &segment);
    }
    let (_, _, window) = loaded.segment("ACK", &back(ACK, 500, 100).window(60_000));
    let segments = wait::LONGEST_BYTES / (1460 + 54);
    assert!(u64::from(window) * 512 >= segments * 1460, "{window}");
}

/// What was lent ends by itself: what HTB knows nothing of is held by the debt.
#[test]
fn root_acks_hold_the_rate_after_a_lease() {
    if !is_root("root_acks_hold_the_rate_after_a_lease") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let loaded = Loaded::new(&mut storage);
    let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = boot.tv_sec as u64 * 1_000_000_000;
    let rate = |bit_s| Rate::from_bit_s(bit_s).unwrap();
    let hour = 3_600_000_000_000;
    for law in [Law::Spring, Law::Dem(dem::Law::Pi)] {
        let lent = |until, then| {
            let lease = Some(Lease { until: Nanos(until), then: rate(then) });
            AcksOptions { law, rate: rate(10_000_000_000), mark: None, lease, ..SPRING }
        };
        for (what, options, passes) in [
            ("for ever", AcksOptions { lease: None, ..lent(0, 1) }, 20),
            ("lent", lent(now + hour, 8_000), 20),
            // A second is the most that the debt may be; a frame is 1.5.
            ("slow from now on", lent(now - 1, 8_000), 1),
            // Of 4 x 1514 bytes; the next comes at that debt.
            ("less slow", lent(now - 1, 1_000_000), 5),
        ] {
            loaded.reset(&options, &Backlog::default());
            let frame = out(ACK, 1, 1).payload(1460).frame();
            let passed = (0..20).filter(|_| loaded.run(true, &frame).0 == PASS).count();
            assert!(
                passed.abs_diff(passes) <= usize::from(passes == 5),
                "{law:?}, {what}: {passed}"
            );
            let counters: Vec<crate::intf::Counters> = (loaded.acks.maps.counters)
                .lookup_percpu(&KEY, MapFlags::ANY)
                .unwrap()
                .unwrap()
                .iter()
                .map(|cpu| pod_read_unaligned(&cpu[..size_of::<crate::intf::Counters>()]))
                .collect();
            let dropped: u64 = counters.iter().map(|cpu| cpu.packets[3]).sum();
            assert_eq!(dropped as usize, 20 - passed, "{law:?}, {what}: counted");
        }
    }
}

#[test]
fn a_limit_without_an_end_is_the_same_at_any_time() {
    for law in [Law::Spring, Law::Dem(dem::Law::Pi)] {
        let [now, then] = AcksOptions { law, ..SPRING }.encode();
        assert_eq!(bytes_of(&then), bytes_of(&now));
    }
}

/// A writer that dies between the two entries leaves a limit in force, also where the lease before is over.
#[test]
fn root_acks_hold_a_limit_while_a_lease_is_taken_away() {
    if !is_root("root_acks_hold_a_limit_while_a_lease_is_taken_away") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let loaded = Loaded::new(&mut storage);
    let lease = Lease { until: Nanos(1), then: Rate::from_bit_s(10_000_000_000).unwrap() };
    loaded.reset(&AcksOptions { lease: Some(lease), ..SPRING }, &Backlog::default());
    let [_, then] = SPRING.encode();
    let (key, limits) = (intf::THEN.to_ne_bytes(), &loaded.acks.maps.limits);
    limits.update(&key, bytes_of(&then), MapFlags::ANY).unwrap();
    check(&loaded, "half written", opened(), 1);
}

#[test]
fn root_acks_dem_follows_the_table() {
    if !is_root("root_acks_dem_follows_the_table") {
        return;
    }
    let (_netns, backlog) = standing_queue("root_acks_dem_follows_the_table");
    let mut storage = MaybeUninit::uninit();
    let loaded = Loaded::new(&mut storage);
    // What waits is above the threshold, and then below.
    for (mark_ns, above) in [(1_000_000, true), (3_600_000_000_000, false)] {
        let options = AcksOptions {
            law: Law::Dem(dem::Law::Step),
            rate: Rate::from_bit_s(8000).unwrap(),
            mark: Some(Nanos(mark_ns)),
            ..SPRING
        };
        loaded.reset(&options, &backlog);
        let ece = |what: &'static str, segment: Segment, marked: bool| {
            let (flags, window) = (segment.flags, segment.window);
            let flags = if marked && above { flags | ECE } else { flags };
            (what, segment, PASS, flags, window)
        };
        let asks = |flags: u16, answers: u16| {
            vec![
                same("SYN", out(SYN | flags, 99, 0)),
                same("SYN-ACK", back(SYN | ACK | answers, 499, 100)),
                same("data", out(ACK, 100, 500).payload(1000)),
            ]
        };
        let ack = || back(ACK, 500, 1100);
        let table = |name: &str, flags: u16, answers: u16, marked: bool| {
            let mut steps = asks(flags, answers);
            steps.push(ece("ACK", ack(), marked));
            steps.push(ece("with data", ack().payload(100), marked));
            steps.push(same("the network's ECE is kept", back(ACK | ECE, 500, 1100)));
            check(&loaded, name, steps, 1);
        };
        table("ECN", ECE | CWR, ECE, true);
        table("no ECN", 0, 0, false);
        table("not agreed", ECE | CWR, 0, false);
        table("agreed on what nobody asked for", 0, ECE, false);
        table("Accurate ECN", AE | ECE | CWR, CWR, false);
        table("Accurate ECN, ECT(1)", AE | ECE | CWR, CWR | ECE, false);
        table("Accurate ECN, CE", AE | ECE | CWR, AE, false);
        table("Accurate ECN that falls back", AE | ECE | CWR, ECE, true);
        let outside = vec![
            same("SYN", back(SYN | ECE | CWR, 499, 0)),
            same("SYN-ACK", out(SYN | ACK | ECE, 99, 500)),
            ece("ACK", back(ACK, 500, 100), true),
        ];
        check(&loaded, "opened from outside", outside, 1);
        check(&loaded, "seen in the middle", vec![same("ACK", ack())], 0);
    }
}

/// Segments of a live connection, bent at random: whatever they are, the programs change nothing but what
/// they may, keep a right checksum right, and drop nothing on the way back.
#[test]
fn root_acks_bent_packets_pass_or_drop() {
    if !is_root("root_acks_bent_packets_pass_or_drop") {
        return;
    }
    let (_netns, backlog) = standing_queue("root_acks_bent_packets_pass_or_drop");
    let mut storage = MaybeUninit::uninit();
    let loaded = Loaded::new(&mut storage);
    let number = prop_oneof![0u32..20_000, any::<u32>()];
    let segment = (
        any::<(bool, u16, u16, u8)>(),
        (number.clone(), number),
        prop::collection::vec(prop_oneof![0u8..12, any::<u8>()], 0..=10),
        0usize..1500,
    );
    let segment = segment.prop_map(|((out, flags, window, ecn), (seq, ack), words, payload)| {
        // Mostly what a connection is made of.
        let flags = if flags & 0x8000 == 0 { ACK | flags & (ECE | CWR) } else { flags & 0x1ff };
        let options = words.iter().flat_map(|word| [*word, 4, word ^ 1, 2]).collect();
        let v6 = window % 2 == 0;
        Segment { v6, out, flags, seq, ack, window, options, payload, ecn: ecn % 4 }
    });
    let bend = prop::option::of((12usize..90, any::<u8>()));
    // Shorter ones the kernel does not take here.
    let cut = prop::option::of(14 + 40usize..120);
    let steps = prop::collection::vec((segment, bend, cut), 1..40);
    let laws = prop_oneof![
        Just(Law::Spring),
        Just(Law::Dem(dem::Law::Step)),
        Just(Law::Dem(dem::Law::Pi))
    ];
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let result = runner.run(&(laws, steps), |(law, steps)| {
        loaded.reset(&AcksOptions { law, ..SPRING }, &backlog);
        for v6 in [false, true] {
            let syn = out(SYN | ECE | CWR, 99, 0).options(&MSS_1460).options(&SCALE_9);
            let answer = back(SYN | ACK | ECE, 499, 100).options(&MSS_1460).options(&SCALE_9);
            loaded.segment("SYN", &Segment { v6, ..syn });
            loaded.segment("SYN-ACK", &Segment { v6, ..answer });
        }
        for (segment, bend, cut) in steps {
            let mut frame = segment.frame();
            if let Some((at, value)) = bend
                && let Some(byte) = frame.get_mut(at)
            {
                *byte = value;
            }
            if let Some(cut) = cut {
                frame.truncate(cut);
            }
            let (verdict, after) = loaded.run(segment.out, &frame);
            prop_assert!(verdict == PASS || verdict == SHOT && segment.out);
            // A bent header length moves the TCP header.
            let ihl = usize::from(frame.get(14).copied().unwrap_or(0) & 0xf) * 4;
            let v4 = frame[12..14] == [8, 0];
            let tcp = 14 + if v4 { ihl } else { 40 };
            untouched("bent", &frame, &after, tcp);
            let plain = bend.is_none() && cut.is_none();
            prop_assert!(!plain || is_right(&after, segment.v6));
        }
        Ok(())
    });
    result.unwrap();
}

/// What a packet costs with all of it in the caches, by the kernel's statistics of programs. Printed; how
/// busy the machine is no test can know.
#[test]
fn root_acks_cost_of_a_packet() {
    if !is_root("root_acks_cost_of_a_packet") {
        return;
    }
    let (_netns, backlog) = standing_queue("root_acks_cost_of_a_packet");
    let mut storage = MaybeUninit::uninit();
    let loaded = Loaded::new(&mut storage);
    let progs = &loaded.acks.progs;
    let syn = out(SYN | ECE | CWR, 99, 0).options(&MSS_1460).options(&SCALE_9);
    let answer = back(SYN | ACK | ECE, 499, 100).options(&MSS_1460).options(&SCALE_9);
    let acks = back(ACK, 500, 1548).window(60_000).options(&TIMESTAMPS).frame();
    let data = out(ACK, 100, 500).payload(1448).frame();
    let least = |program: std::os::fd::BorrowedFd<'_>, frame: &[u8]| {
        let measure = || mean_run_time(program, frame, &[0], 50_000).unwrap();
        (0..5).map(|_| measure()).min().unwrap()
    };
    let empty = empty_program().unwrap();
    let warm = mean_run_time(empty.as_fd(), &data, &[0], 50_000).unwrap();
    let single = mean_run_time_alone(empty.as_fd(), &data, &[0], 2000).unwrap();
    println!("no program: {warm:?}, on a packet of its own {single:?}");
    for law in [Law::Spring, Law::Dem(dem::Law::Step), Law::Dem(dem::Law::Pi)] {
        loaded.reset(&AcksOptions { law, ..SPRING }, &backlog);
        loaded.segment("SYN", &syn);
        loaded.segment("SYN-ACK", &answer);
        loaded.run(true, &data);
        let back = least(progs.acks_back.as_fd(), &acks);
        // One that is changed is not changed again: here each run has a packet of its own.
        let changed = mean_run_time_alone(progs.acks_back.as_fd(), &acks, &[0], 2000).unwrap();
        let data = least(progs.acks_data.as_fd(), &data);
        println!("{law:?}: an ACK {back:?}, changed {changed:?}; data {data:?}");
        assert!(back > Duration::ZERO && data > Duration::ZERO);
    }
}
