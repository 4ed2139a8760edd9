//! The loaded programs with what a group asks of them: which packets are one flow, what is dropped at random,
//! and what a sample keeps of thousands of flows.

use std::collections::BTreeMap;

use libbpf_rs::ProgramInput;
use tidegate_core::{
    Bytes, Nanos, Scheme, Span, police::Policy, queue_options::VirtualQueueOptions,
    virtual_queue::MAX_SPAN,
};

use super::{
    kernel_tests::{boottime_ns, wait_to_earn},
    *,
};
use crate::{group::FLOWS_PER_CPU, limit::Lease};

const UDP: u8 = 17;
const TCP: u8 = 6;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
const PASSED: u32 = u32::MAX; // TC_ACT_UNSPEC
const DROPPED: u32 = 2; // TC_ACT_SHOT
const REDIRECTED: u32 = 7; // TC_ACT_REDIRECT

/// A frame of 1000 bytes with an IPv4 packet.
pub(super) fn v4(from: u8, protocol: u8, fragment: u16, ports: [u16; 2]) -> Vec<u8> {
    let mut frame = vec![0; 1000];
    frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    frame[16..18].copy_from_slice(&986u16.to_be_bytes());
    frame[20..22].copy_from_slice(&fragment.to_be_bytes());
    frame[23] = protocol;
    frame[26..30].copy_from_slice(&[10, 0, 0, from]);
    frame[30..34].copy_from_slice(&[10, 0, 1, 1]);
    put_ports(&mut frame, 34, ports);
    frame
}

/// The same of IPv6, with extension headers of these numbers, 8 bytes each.
fn v6(from: u8, headers: &[u8], protocol: u8, ports: [u16; 2]) -> Vec<u8> {
    let mut frame = vec![0; 1000];
    frame[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
    frame[18..20].copy_from_slice(&946u16.to_be_bytes());
    frame[22..38].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, from]);
    frame[38..54].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]);
    let (mut next, mut at) = (20, 54);
    for header in headers {
        frame[next] = *header;
        // Each is 8 bytes long: its length beyond them is 0.
        (next, at) = (at, at + 8);
    }
    frame[next] = protocol;
    put_ports(&mut frame, at, ports);
    frame
}

fn put_ports(frame: &mut [u8], at: usize, ports: [u16; 2]) {
    frame[at..at + 2].copy_from_slice(&ports[0].to_be_bytes());
    frame[at + 2..at + 4].copy_from_slice(&ports[1].to_be_bytes());
}

/// A limit that nothing exceeds.
fn roomy() -> LimitOptions {
    let options = VirtualQueueOptions {
        burst: Some(Span::Size(Bytes(1 << 30))),
        ..VirtualQueueOptions::new("100gbit".parse().unwrap())
    };
    LimitOptions {
        egress: Some(options),
        ingress: Some(options),
        loopback: true,
        scheme: Scheme::Police,
        ..LimitOptions::default()
    }
}

pub(super) fn run(program: &libbpf_rs::ProgramMut<'_>, frame: &[u8], times: u32) -> u32 {
    let input = ProgramInput { data_in: Some(frame), repeat: times, ..ProgramInput::default() };
    program.test_run(input).unwrap().return_value
}

pub(super) fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP {test}: needs root");
    }
    root
}

#[test]
fn root_group_packets_of_a_flow_are_counted_together() {
    if !is_root("root_group_packets_of_a_flow_are_counted_together") {
        return;
    }
    // What must be one flow stands in one line; no two lines may be the same flow.
    let flows = [
        vec![v4(1, UDP, 0, [1, 2]), v4(1, UDP, 0x4000, [1, 2])],
        vec![v4(1, UDP, 0, [2, 1])],
        vec![v4(1, TCP, 0, [1, 2])],
        vec![v4(2, UDP, 0, [1, 2])],
        // A first fragment, one in the middle, the last: no ports, no transport.
        vec![v4(1, UDP, 0x2000, [1, 2]), v4(1, UDP, 0x2010, [9, 9]), v4(1, TCP, 0x20, [8, 8])],
        vec![v6(1, &[], UDP, [1, 2]), v6(1, &[DESTINATION_OPTIONS], UDP, [1, 2])],
        vec![v6(1, &[], UDP, [1, 3])],
        vec![v6(2, &[], UDP, [1, 2])],
        vec![v6(1, &[FRAGMENT], UDP, [1, 2]), v6(1, &[FRAGMENT], UDP, [9, 9])],
        // No ports: a protocol that is no transport.
        vec![v4(1, 47, 0, [1, 2]), v4(1, 47, 0, [3, 4])],
    ];
    for place in [AttachPoint::Device, AttachPoint::Cgroup] {
        let mut storage = MaybeUninit::uninit();
        let police = load(&mut storage, place, false).unwrap();
        let maps = maps(&police, &roomy().encode(0).unwrap()).unwrap();
        let program = match place {
            AttachPoint::Cgroup => &police.progs.police_egress,
            _ => &police.progs.police_out,
        };
        assert!(maps.measure(Direction::Egress).unwrap().flows.is_empty());
        let mut seen = BTreeMap::new();
        for (line, frames) in flows.iter().enumerate() {
            frames.iter().for_each(|frame| _ = run(program, frame, 1));
            let found = maps.measure(Direction::Egress).unwrap().flows;
            assert_eq!(found.len(), 1, "line {line}: {found:?}");
            assert_eq!(found[0].bytes, 1000 * frames.len() as u64, "line {line}");
            assert_eq!(seen.insert(found[0].flow, line), None, "line {line} is another's flow");
        }
        // The other direction has counted nothing, and who has left counts no more.
        assert!(maps.measure(Direction::Ingress).unwrap().flows.is_empty());
        assert!(maps.measure(Direction::Ingress).unwrap().flows.is_empty());
        maps.leave_group(Direction::Egress).unwrap();
        maps.leave_group(Direction::Egress).unwrap();
        run(program, &flows[0][0], 1);
        assert!(maps.measure(Direction::Egress).unwrap().flows.is_empty());
        let all = 1 + flows.iter().map(Vec::len).sum::<usize>() as u64;
        let measured = maps.measure(Direction::Egress).unwrap();
        assert_eq!((measured.arrived.packets, measured.passed.bytes), (all, 1000 * all));
    }
}

#[test]
fn root_group_drops_at_the_probability_that_is_set() {
    if !is_root("root_group_drops_at_the_probability_that_is_set") {
        return;
    }
    const RUNS: u32 = 40_000;
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Device, false).unwrap();
    let maps = maps(&police, &roomy().encode(0).unwrap()).unwrap();
    let (frame, mut before) = (v4(1, UDP, 0, [1, 2]), maps.measure(Direction::Egress).unwrap());
    for probability in [0.0, 0.001, 0.25, 0.9, 1.0] {
        assert!(maps.set_drop(Direction::Egress, probability).unwrap());
        assert!((maps.drop_probability(Direction::Egress).unwrap() - probability).abs() < 1e-9);
        let returned = run(&police.progs.police_out, &frame, RUNS);
        let now = maps.measure(Direction::Egress).unwrap();
        let arrived = now.arrived.packets - before.arrived.packets;
        let dropped = arrived - (now.passed.packets - before.passed.packets);
        assert_eq!(arrived, u64::from(RUNS));
        assert_eq!(dropped, now.slowed.packets - before.slowed.packets);
        // Five standard deviations of a binomial: once in a million runs.
        let mean = f64::from(RUNS) * probability;
        let bound = 5.0 * (mean * (1.0 - probability)).sqrt() + 0.5;
        assert!((dropped as f64 - mean).abs() <= bound, "{probability}: {dropped} of {RUNS}");
        // Flows are counted before they are dropped.
        assert_eq!(now.flows.iter().map(|f| f.bytes).sum::<u64>(), u64::from(RUNS) * 1000);
        match probability {
            0.0 => assert_eq!(returned, PASSED),
            1.0 => assert_eq!(returned, DROPPED),
            _ => {}
        }
        before = now;
    }
    let index = intf::OUTCOME_TABLE.iter().position(|o| o.name == "drop_early").unwrap();
    let counters = maps.read(Direction::Egress).unwrap().counters;
    assert_eq!(counters.packets[index], before.slowed.packets);
    assert!(counters.last_ns[index] > 0);
    // The other direction is free.
    assert_eq!(run(&police.progs.police_in, &frame, 100), PASSED);
}

#[test]
fn root_group_finds_the_largest_of_thousands_of_flows() {
    if !is_root("root_group_finds_the_largest_of_thousands_of_flows") {
        return;
    }
    const FLOWS: u64 = 20_000;
    const LARGE: u64 = 5;
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Port, false).unwrap();
    let maps = maps(&police, &roomy().encode(0).unwrap()).unwrap();
    maps.measure(Direction::Ingress).unwrap();
    let program = &police.progs.police_out;
    let mut large = BTreeMap::new();
    for flow in 0..LARGE {
        run(program, &v4(2, UDP, 0, [flow as u16, 1]), 1);
        let alone = maps.measure(Direction::Ingress).unwrap().flows;
        large.insert(alone[0].flow, 0u64);
    }
    // A frame of each small flow; after each four one of a large.
    for flow in 0..FLOWS {
        run(program, &v4(1, UDP, 0, [flow as u16, (flow >> 12) as u16]), 1);
        if flow % 4 == 0 {
            run(program, &v4(2, UDP, 0, [(flow / 4 % LARGE) as u16, 1]), 1);
        }
    }
    let measured = maps.measure(Direction::Ingress).unwrap();
    let cpus = libbpf_rs::num_possible_cpus().unwrap();
    assert!(measured.flows.len() <= cpus * FLOWS_PER_CPU, "{}", measured.flows.len());
    measured.flows.iter().for_each(|f| _ = large.entry(f.flow).and_modify(|b| *b += f.bytes));
    let each = FLOWS / 4 / LARGE * 1000;
    assert!(large.values().all(|bytes| (each * 9 / 10..=each).contains(bytes)), "{large:?}");
    assert_eq!(measured.arrived.packets, FLOWS + FLOWS / 4 + LARGE);
}

/// The bucket follows the rate that a group sets, and nothing else changes.
#[test]
fn root_group_a_rate_is_the_buckets() {
    if !is_root("root_group_a_rate_is_the_buckets") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Device, false).unwrap();
    let maps = maps(&police, &roomy().encode(0).unwrap()).unwrap();
    maps.set_drop(Direction::Egress, 0.5).unwrap();
    let set = |rate: &str| maps.set_rate(&roomy(), Direction::Egress, rate.parse().unwrap(), None);
    assert!(set("50mbit").unwrap());
    let limit = maps.limit().unwrap();
    let rates = limit.police.map(|policy| policy.committed.rate);
    assert_eq!((rates, limit.rate_bit_s), ([50_000_000, 100_000_000_000], rates));
    assert_eq!(
        limit.police[0].committed.burst,
        roomy().encode(0).unwrap().police[0].committed.burst
    );
    // So slow that what the bucket held lasts longer than a limit can say.
    assert!(set("8kbit").unwrap());
    let bucket = maps.limit().unwrap().police[0].committed;
    assert_eq!((bucket.rate, bucket.fill_ns), (8_000, MAX_SPAN.0));
    // It has it again at a higher one.
    assert!(set("50mbit").unwrap());
    let burst = maps.limit().unwrap().police[0].committed.burst;
    assert_eq!(burst, limit.police[0].committed.burst);
    assert_eq!(maps.drop_probability(Direction::Egress).unwrap(), 0.5);
}

/// Nobody needs to be there when the time comes that a rate was lent for.
#[test]
fn root_group_a_rate_that_is_lent_ends_in_the_program() {
    if !is_root("root_group_a_rate_that_is_lent_ends_in_the_program") {
        return;
    }
    lent_ends(false);
    lent_ends(true);
}

fn lent_ends(fair: bool) {
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Device, false).unwrap();
    // Two packets, which are there again at once at a high rate, and in seconds at a low one.
    let options = VirtualQueueOptions {
        burst: Some(Span::Size(Bytes(2_500))),
        ..VirtualQueueOptions::new("10gbit".parse().unwrap())
    };
    let (egress, ingress, scheme) = (Some(options), Some(options), Scheme::Police);
    let limit = LimitOptions {
        egress,
        ingress,
        loopback: true,
        scheme,
        police: Policy { fair, ..Policy::default() },
        ..LimitOptions::default()
    };
    let maps = maps(&police, &limit.encode(0).unwrap()).unwrap();
    let rate = |text: &str| text.parse::<tidegate_core::Rate>().unwrap();
    let (out, inward) = (&police.progs.police_out, &police.progs.police_in);
    // Of five packets, what became of the last that did not pass.
    let last_of = |program: &libbpf_rs::ProgramMut<'_>| {
        let frame = v4(1, UDP, 0, [1, 2]);
        let verdicts = (0..5).map(|_| {
            wait_to_earn(frame.len() as u64, rate("10gbit"));
            run(program, &frame, 1)
        });
        verdicts.fold(PASSED, |seen, verdict| if verdict == PASSED { seen } else { verdict })
    };
    let lend = |until| {
        let lease = Lease { until: Nanos(until), then: rate("8kbit") };
        assert!(maps.set_rate(&limit, Direction::Egress, rate("10gbit"), Some(lease)).unwrap());
    };
    let now = boottime_ns();
    lend(now + 3_600_000_000_000);
    let lent = maps.limit().unwrap();
    assert_eq!(lent.rate(Direction::Egress), Some(rate("10gbit")));
    assert_eq!(last_of(out), PASSED);
    // It has ended.
    lend(now - 1);
    // What flows have parts of is dropped in silence.
    assert_eq!(last_of(out), if fair { REDIRECTED } else { DROPPED });
    assert_eq!(last_of(inward), PASSED, "the other direction goes on");
    let ended = maps.limit().unwrap();
    assert_eq!(ended.rate(Direction::Egress), Some(rate("8kbit")));
    assert_eq!(ended.rate(Direction::Ingress), Some(rate("10gbit")));
    // Lent again it has the bucket that it had, and for ever is for ever.
    lend(now + 3_600_000_000_000);
    let again = maps.limit().unwrap();
    let mut same = intf::Entry { police: again.police, ..lent };
    same.until_ns = again.until_ns;
    assert_eq!(again, same);
    let [is, was] = [again, lent].map(|limit| limit.police[0].committed);
    assert_eq!((is.rate, is.burst, is.fill_ns), (was.rate, was.burst, was.fill_ns));
    assert_eq!(last_of(out), PASSED);
    assert!(maps.set_rate(&limit, Direction::Egress, rate("10gbit"), None).unwrap());
    assert_eq!(maps.limit().unwrap().until_ns, [0, 0]);
    assert_eq!(last_of(out), PASSED);
}
