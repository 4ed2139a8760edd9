//! A lane in virtual time.

use proptest::prelude::*;

use super::*;
use crate::pool::PoolSize;

const MS: u64 = 1_000_000;

fn pool() -> PacketPool {
    PacketPool::new(PoolSize { small: 4_096, large: 64 }).unwrap()
}

fn limit(bit_s: u64) -> Option<LaneLimit> {
    let rate = Rate::from_bit_s(bit_s).unwrap();
    Some(LaneLimit { rate, burst: Nanos(MS), mark: None })
}

fn lane(limited: Option<LaneLimit>) -> Lane {
    let options = LaneOptions { flows: 64, packets: 1_024, ..LaneOptions::default() };
    let mut lane = Lane::new(options, 7, Nanos(0)).unwrap();
    lane.set_limit(limited);
    lane
}

/// A frame of UDP over IPv4 whose flow is its source port.
fn frame(flow: u16, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; bytes];
    frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    frame[23] = 17;
    frame[34..36].copy_from_slice(&flow.to_be_bytes());
    frame
}

fn flow_of(packet: &Packet) -> u16 {
    u16::from_be_bytes([packet.frame()[34], packet.frame()[35]])
}

#[test]
fn without_a_limit_packets_go_straight_through() {
    let (mut lane, mut pool, mut out) = (lane(None), pool(), VecDeque::new());
    lane.take(Nanos(5), pool.packet(&frame(1, 1_000)).unwrap(), &mut pool, &mut out);
    assert_eq!((out.len(), lane.next_deadline()), (1, None));
    assert_eq!((lane.counters().passed_packets, lane.counters().passed_bytes), (1, 1_000));
}

/// Two floods and a sparse flow, for a second: the rate is used and shared, and the sparse flow passes.
#[test]
fn floods_share_the_rate_and_a_sparse_flow_passes_them() {
    let (mut lane, mut pool, mut out) = (lane(limit(100_000_000)), pool(), VecDeque::new());
    let (mut bytes, mut sparse_waits) = ([0usize; 3], Vec::new());
    let (mut now, mut sparse_since) = (0, None);
    while now < 1_000 * MS {
        // Each flood comes at 97 Mbit/s, a ping every 10 ms.
        for flow in [1, 2] {
            lane.take(Nanos(now), pool.packet(&frame(flow, 1_514)).unwrap(), &mut pool, &mut out);
        }
        if now / (10 * MS) != (now + 125_000) / (10 * MS) {
            lane.take(Nanos(now), pool.packet(&frame(0, 98)).unwrap(), &mut pool, &mut out);
            sparse_since = Some(now);
        }
        let until = now + 125_000;
        while let Some(at) = lane.next_deadline().filter(|at| at.0 < until) {
            lane.poll(at, usize::MAX, &mut out);
            for packet in out.drain(..) {
                bytes[usize::from(flow_of(&packet))] += packet.frame().len();
                if flow_of(&packet) == 0 {
                    sparse_waits.extend(sparse_since.take().map(|since| at.0 - since));
                }
                pool.recycle(packet);
            }
        }
        now = until;
    }
    let total: usize = bytes.iter().sum();
    assert!((12_400_000..=12_640_000).contains(&total), "{bytes:?}");
    assert!(bytes[1].abs_diff(bytes[2]) < total / 50, "{bytes:?}");
    assert!(sparse_waits.len() >= 98, "{sparse_waits:?}");
    // Two frames and the granularity; the floods wait for milliseconds.
    assert!(sparse_waits.iter().all(|wait| *wait < 300_000), "{sparse_waits:?}");
    assert!(lane.backlog_counters().drop_early_packets > 0);
}

#[test]
fn a_limit_changes_and_goes_without_a_loss() {
    let (mut lane, mut pool, mut out) = (lane(limit(1_000_000)), pool(), VecDeque::new());
    for n in 0..20 {
        lane.take(Nanos(0), pool.packet(&frame(n, 1_000)).unwrap(), &mut pool, &mut out);
    }
    lane.set_limit(limit(80_000_000));
    lane.poll(Nanos(MS), usize::MAX, &mut out);
    lane.set_limit(None);
    // What was stamped keeps its time, and what comes waits behind it in its flow.
    lane.take(Nanos(2 * MS), pool.packet(&frame(0, 1_000)).unwrap(), &mut pool, &mut out);
    while let Some(at) = lane.next_deadline() {
        lane.poll(at, usize::MAX, &mut out);
    }
    assert_eq!(out.len(), 21);
    assert_eq!(lane.load(), LaneLoad::default());
    lane.take(Nanos(3 * MS), pool.packet(&frame(0, 1_000)).unwrap(), &mut pool, &mut out);
    assert_eq!((out.len(), lane.next_deadline()), (22, None));
}

#[test]
fn long_segments_are_cut_where_the_rate_is_low() {
    for (bit_s, pieces) in [(100_000_000, 10), (1_000_000_000, 1)] {
        let (mut lane, mut pool, mut out) = (lane(limit(bit_s)), pool(), VecDeque::new());
        let mut segment = frame(1, 42 + 10 * 1_000);
        segment[38..40].copy_from_slice(&10_008u16.to_be_bytes());
        let mut packet = pool.packet(&segment).unwrap();
        (packet.vnet_mut().gso_type, packet.vnet_mut().gso_size) = (5, 1_000);
        lane.take(Nanos(0), packet, &mut pool, &mut out);
        while let Some(at) = lane.next_deadline() {
            lane.poll(at, usize::MAX, &mut out);
        }
        assert_eq!(out.len(), pieces, "{bit_s}");
        assert_eq!(lane.counters().passed_bytes, 10 * 1_042);
        assert_eq!(lane.counters().cut_segments, u64::from(pieces > 1));
    }
}

#[test]
fn more_flows_than_there_are_share_queues() {
    let options = LaneOptions { flows: 2, packets: 64, ..LaneOptions::default() };
    let mut lane = Lane::new(options, 7, Nanos(0)).unwrap();
    lane.set_limit(limit(1_000_000));
    let (mut pool, mut out) = (pool(), VecDeque::new());
    for n in 0..9 {
        lane.take(Nanos(0), pool.packet(&frame(n, 100)).unwrap(), &mut pool, &mut out);
    }
    assert_eq!((lane.load().flows, lane.counters().shared_packets), (2, 7));
    lane.clear(Nanos(0));
    assert_eq!((lane.load(), lane.backlog_counters().drop_gone_packets), (LaneLoad::default(), 9));
    lane.take(Nanos(0), pool.packet(&frame(77, 100)).unwrap(), &mut pool, &mut out);
    assert_eq!(lane.load().flows, 1);
}

/// A clock that steps back is held and counted, one that steps far ahead lets no burst through, and what is
/// stamped far beyond the horizon leaves no sooner than the limit allows.
#[test]
fn wrong_clocks_and_far_stamps_break_no_limit() {
    let options = LaneOptions { flows: 64, packets: 512, ..LaneOptions::default() };
    let start = 3_600_000 * MS;
    let mut lane = Lane::new(options, 7, Nanos(start)).unwrap();
    lane.set_limit(limit(100_000));
    let (mut pool, mut out) = (pool(), VecDeque::new());
    // 64 flows of two segments: 10 s of the limit, and the wheel has 2 s.
    for n in 0..128 {
        lane.take(Nanos(start), pool.packet(&frame(n % 64, 1_000)).unwrap(), &mut pool, &mut out);
    }
    assert_eq!(lane.poll(Nanos(1), 9, &mut out), 0);
    assert_eq!(lane.shaper_counters().clock_steps, 1);
    let mut now = start;
    while let Some(at) = lane.next_deadline() {
        now = now.max(at.0);
        lane.poll(Nanos(now), usize::MAX, &mut out);
        // 80 ms a frame; it may save up 1 ms.
        assert!(out.len() as u64 <= (now - start + MS) / (80 * MS), "{} at {now}", out.len());
    }
    assert_eq!((out.len(), lane.load()), (128, LaneLoad::default()));
    // Hours later, again, and the sum of the waits must not be too much either.
    for later in [u64::MAX >> 2, u64::MAX >> 1, u64::MAX] {
        for n in 0..10 {
            lane.take(Nanos(now), pool.packet(&frame(n, 1_000)).unwrap(), &mut pool, &mut out);
        }
        out.clear();
        lane.poll(Nanos(later), usize::MAX, &mut out);
        assert!(out.len() <= 10);
        now = later;
    }
    lane.clear(Nanos(now));
    assert_eq!(lane.load(), LaneLoad::default());
}

#[test]
fn without_buffers_a_segment_stays_whole_and_is_counted() {
    let (mut lane, mut out) = (lane(limit(100_000_000)), VecDeque::new());
    let mut pool = PacketPool::new(PoolSize { small: 4, large: 1 }).unwrap();
    let mut packet = pool.packet(&frame(1, 42 + 10 * 1_000)).unwrap();
    (packet.vnet_mut().gso_type, packet.vnet_mut().gso_size) = (5, 1_000);
    lane.take(Nanos(0), packet, &mut pool, &mut out);
    while let Some(at) = lane.next_deadline() {
        lane.poll(at, usize::MAX, &mut out);
    }
    let counters = lane.counters();
    assert_eq!((out.len(), counters.cut_segments, counters.whole_segments), (1, 0, 1));
    // It counts for what it will be.
    assert_eq!((counters.passed_bytes, pool.free().small), (10 * 1_042, 4));
}

/// Headers that are not what the metadata says, and 60 000 segments of a byte, with 2.5 MB of headers.
#[test]
fn what_cannot_be_cut_stays_whole_and_is_charged_up_to_a_mebibyte() {
    let (mut lane, mut pool, mut out) = (lane(limit(800_000_000)), pool(), VecDeque::new());
    let mut left = Vec::new();
    for (gso_type, gso_size) in [(5, 1), (1, 1_000)] {
        let mut packet = pool.packet(&frame(1, 42 + 60_000)).unwrap();
        (packet.vnet_mut().gso_type, packet.vnet_mut().gso_size) = (gso_type, gso_size);
        lane.take(Nanos(0), packet, &mut pool, &mut out);
    }
    while let Some(at) = lane.next_deadline() {
        lane.poll(at, usize::MAX, &mut out);
        left.resize(out.len(), at.0);
    }
    let counters = lane.counters();
    assert_eq!((out.len(), counters.cut_segments, counters.whole_segments), (2, 0, 2));
    // A MiB takes 10.5 ms.
    assert!((9 * MS..11 * MS).contains(&left[0]), "{left:?}");
}

/// A lane of no flows has room for no packet, and one without bytes is a packet.
#[test]
fn what_has_no_flow_or_no_bytes_is_counted() {
    let options = LaneOptions { flows: 0, packets: 4, ..LaneOptions::default() };
    let mut none = Lane::new(options, 7, Nanos(0)).unwrap();
    none.set_limit(limit(1_000_000));
    let (mut lane, mut pool, mut out) = (lane(limit(1_000_000)), pool(), VecDeque::new());
    none.take(Nanos(0), pool.packet(&frame(1, 100)).unwrap(), &mut pool, &mut out);
    assert_eq!(none.backlog_counters().drop_full_packets, 1);
    for _ in 0..5 {
        lane.take(Nanos(0), pool.packet(&[]).unwrap(), &mut pool, &mut out);
    }
    assert_eq!(lane.load().waiting_packets, 3);
    lane.clear(Nanos(0));
    assert_eq!((lane.load(), lane.backlog_counters().drop_gone_packets), (LaneLoad::default(), 5));
}

proptest! {
    /// Whatever comes, and however the limit changes: each packet leaves or is counted, and no window holds
    /// more than its rates allow.
    #[test]
    fn every_packet_leaves_or_is_counted(
        steps in prop::collection::vec(
            (0u64..400_000, 0u16..80, 60usize..1_514, prop::option::weighted(0.05, 1u64..500)),
            1..300,
        ),
    ) {
        let options = LaneOptions { flows: 8, packets: 64, ..LaneOptions::default() };
        let mut lane = Lane::new(options, 7, Nanos(0)).unwrap();
        lane.set_limit(limit(50_000_000));
        let (mut pool, mut out) = (pool(), VecDeque::new());
        let (mut now, mut came, mut fastest) = (1u64 << 40, 0, 50u64);
        let start = now;
        for (gap, flow, bytes, change) in steps {
            now += gap;
            if let Some(mbit) = change {
                lane.set_limit(limit(mbit * 1_000_000));
                fastest = fastest.max(mbit);
            }
            lane.take(Nanos(now), pool.packet(&frame(flow, bytes)).unwrap(), &mut pool, &mut out);
            came += 1;
            lane.poll(Nanos(now), usize::MAX, &mut out);
            let sent: usize = out.iter().map(|packet| packet.frame().len()).sum();
            // Bursts of 1 ms, and 0.4 ms without a look.
            let bound = fastest * 125 * (now - start + 2 * MS) / MS + 2 * 1_514;
            prop_assert!(sent as u64 <= bound, "{sent} of {bound}");
        }
        while let Some(at) = lane.next_deadline() {
            lane.poll(at, usize::MAX, &mut out);
        }
        let counters = lane.backlog_counters();
        let dropped = counters.drop_early_packets + counters.drop_full_packets;
        prop_assert_eq!(came, out.len() as u64 + dropped);
        prop_assert_eq!(lane.counters().passed_packets, out.len() as u64);
        prop_assert_eq!(lane.load(), LaneLoad::default());
    }
}
