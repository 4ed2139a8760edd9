use std::collections::VecDeque;

use proptest::prelude::*;
use tidegate_core::Rate;

use super::*;
use crate::pool::{PacketPool, PoolSize};

const MS: u64 = 1_000_000;
const BOUNDS: BacklogBounds = BacklogBounds { flows: 4, packets: 16 };

fn limits() -> BacklogLimits {
    let rate = Rate::from_bit_s(100_000_000).unwrap();
    BacklogLimits { bytes: 8_000, mark: Nanos(MS), codel: CodelOptions::for_rate(rate, 1_514) }
}

fn pool() -> PacketPool {
    PacketPool::new(PoolSize { small: 64, large: 0 }).unwrap()
}

/// A frame of IPv6 with a number in it.
fn frame(number: u16, bytes: usize, ecn: u8) -> Vec<u8> {
    let mut frame = vec![0; bytes.max(56)];
    frame[12..16].copy_from_slice(&[0x86, 0xdd, 0x60, ecn << 4]);
    frame[54..56].copy_from_slice(&number.to_be_bytes());
    frame
}

fn number(packet: &Packet) -> u16 {
    u16::from_be_bytes([packet.frame()[54], packet.frame()[55]])
}

#[test]
fn levels_are_a_quarter_apart() {
    assert!((1..1u64 << 33).step_by(99_991).all(|n| level(n) <= level(n + n / 4 + 1)));
    assert!((5..1u64 << 31).step_by(99_991).all(|n| level(n + n / 4 + 1) <= level(n) + 2));
    assert_eq!((level(0), level(u64::MAX)), (8, 127));
}

#[test]
fn two_segments_go_and_each_completion_calls_for_the_next() {
    let (mut backlog, mut pool) = (Backlog::new(BOUNDS, limits()), pool());
    let mut out = VecDeque::new();
    for n in 0..5 {
        let packet = pool.packet(&frame(n, 100, 0)).unwrap();
        out.extend(backlog.arrive(Nanos(0), 1, packet));
    }
    assert_eq!((out.len(), backlog.waiting()), (2, (3, 300)));
    // Another flow does not wait.
    let other = backlog.arrive(Nanos(0), 2, pool.packet(&frame(9, 60, 0)).unwrap()).unwrap();
    assert_eq!(number(&backlog.complete(Nanos(5), 2, other.handle).unwrap().packet), 9);
    for n in 0..5 {
        let ready = out.pop_front().unwrap();
        let left = backlog.complete(Nanos(7), 1, ready.handle).unwrap();
        assert_eq!((number(&left.packet), left.waited, ready.bytes), (n, Nanos(7), 100));
        out.extend(left.next);
        assert!(backlog.complete(Nanos(7), 1, ready.handle).is_none() || left.next.is_some());
    }
    assert!(backlog.is_idle(1) && backlog.packets() == 0);
    drop(out);
    assert_eq!(pool.free(), pool.size());
}

#[test]
fn long_waits_are_marked_or_dropped_by_the_law() {
    for (ecn, marks) in [(0b10, true), (0b00, false)] {
        let (mut backlog, mut pool) = (Backlog::new(BOUNDS, limits()), pool());
        let mut shaper = VecDeque::new();
        let mut marked = 0;
        // A packet comes and one leaves every 2 ms; ten wait all the time.
        for n in 0..200u16 {
            let now = Nanos(u64::from(n) * 2 * MS);
            let packet = pool.packet(&frame(n, 600, ecn)).unwrap();
            shaper.extend(backlog.arrive(now, 0, packet));
            if n >= 10 {
                let ready: Ready = shaper.pop_front().unwrap();
                let left = backlog.complete(now, 0, ready.handle).unwrap();
                marked += u64::from(ecn::read(left.packet.frame()) == Ecn::Marked);
                shaper.extend(left.next);
            }
        }
        let counters = backlog.counters();
        assert_eq!(counters.drop_full_packets, 0);
        if marks {
            assert_eq!(counters.drop_early_packets, 0);
            assert!(marked > 180 && counters.marked_packets >= marked, "{counters:?}");
        } else {
            assert_eq!(counters.marked_packets, 0);
            // Until no more than a frame waits behind the first.
            assert!((3..=10).contains(&counters.drop_early_packets), "{counters:?}");
            assert_eq!(counters.drop_early_bytes, 600 * counters.drop_early_packets);
        }
    }
}

#[test]
fn the_longest_queue_loses_from_its_head() {
    let (mut backlog, mut pool) = (Backlog::new(BOUNDS, limits()), pool());
    let mut arrive = |backlog: &mut Backlog, flow, n, bytes| {
        backlog.arrive(Nanos(0), flow, pool.packet(&frame(n, bytes, 0)).unwrap())
    };
    let mut first = None;
    for n in 0..8 {
        let ready = arrive(&mut backlog, 0, n, 1_000);
        first = first.or(ready);
    }
    for n in 0..4 {
        arrive(&mut backlog, 1, n, 500);
    }
    assert_eq!(backlog.waiting(), (8, 7_000));
    arrive(&mut backlog, 1, 4, 1_500);
    let counters = backlog.counters();
    assert_eq!((counters.drop_full_packets, counters.drop_full_bytes), (1, 1_000));
    // Flow 0 has lost its third packet; the first two are in the shaper.
    let next = backlog.complete(Nanos(0), 0, first.unwrap().handle).unwrap().next.unwrap();
    assert_eq!(number(&backlog.complete(Nanos(0), 0, next.handle).unwrap().packet), 3);
}

#[test]
fn a_port_that_goes_takes_what_waits_with_it() {
    let (mut backlog, mut pool) = (Backlog::new(BOUNDS, limits()), pool());
    let packet = |pool: &mut PacketPool| pool.packet(&frame(0, 100, 0)).unwrap();
    let ready: Vec<_> =
        (0..6).filter_map(|_| backlog.arrive(Nanos(0), 3, packet(&mut pool))).collect();
    backlog.clear();
    assert_eq!((backlog.waiting(), backlog.counters().drop_gone_packets), ((0, 0), 4));
    backlog.refused(3, ready[0].handle);
    assert!(backlog.complete(Nanos(0), 3, ready[1].handle).unwrap().next.is_none());
    assert!(backlog.is_idle(3) && backlog.packets() == 0);
    assert_eq!(pool.free(), pool.size());
}

proptest! {
    /// Whatever comes and leaves: within its bounds, in order in each flow, nothing twice, all accounted for.
    #[test]
    fn every_packet_leaves_or_is_counted(
        bytes in 100u64..10_000,
        steps in prop::collection::vec((0usize..5, 56usize..1_500, 0u8..4, 0u64..3 * MS), 1..300),
    ) {
        let bounds = BacklogBounds { flows: 4, packets: 12 };
        let limits = BacklogLimits { bytes, ..limits() };
        let (mut backlog, mut pool) = (Backlog::new(bounds, limits), pool());
        let mut shaper: VecDeque<(usize, Ready)> = VecDeque::new();
        let mut last = [None; 4];
        let (mut now, mut came, mut left_count) = (Nanos(0), 0u64, 0u64);
        for (n, (flow, size, ecn, gap)) in (0u16..).zip(steps) {
            now = Nanos(now.0 + gap);
            if ecn == 3 || pool.free().small == 0 {
                let Some((flow, ready)) = shaper.pop_front() else { continue };
                let left = backlog.complete(now, flow, ready.handle).unwrap();
                prop_assert!(last[flow] < Some(number(&left.packet)));
                last[flow] = Some(number(&left.packet));
                left_count += 1;
                shaper.extend(left.next.map(|ready| (flow, ready)));
                continue;
            }
            let packet = pool.packet(&frame(n, size, ecn)).unwrap();
            came += 1;
            shaper.extend(backlog.arrive(now, flow, packet).map(|ready| (flow, ready)));
            let (packets, waiting) = backlog.waiting();
            prop_assert!(waiting <= bytes.max(1_500));
            prop_assert_eq!(packets + shaper.len(), backlog.packets());
            prop_assert!(backlog.packets() <= bounds.packets);
            for flow in 0..4 {
                let out = shaper.iter().filter(|(of, _)| *of == flow).count();
                prop_assert!(out <= 2);
                // Who waits has two in the shaper.
                prop_assert!(out == 2 || backlog.queues[flow].first == NONE);
            }
            let counters = backlog.counters();
            let dropped = counters.drop_early_packets + counters.drop_full_packets;
            prop_assert_eq!(came, left_count + dropped + backlog.packets() as u64);
        }
        // The longest is what the levels say, to a quarter.
        let longest = backlog.queues.iter().map(|queue| queue.bytes).max().unwrap();
        match backlog.longest() {
            None => prop_assert_eq!(longest, 0),
            Some(flow) => prop_assert!(level(backlog.queues[flow].bytes) == level(longest)),
        }
        drop(backlog);
        prop_assert_eq!(pool.free(), pool.size());
    }
}
