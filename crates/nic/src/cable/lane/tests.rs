use rand_xoshiro::rand_core::SeedableRng as _;
use tidegate_core::{Bytes, Rate};

use super::*;
use crate::{cable::STALL_MAX, pool::PoolSize, port::memory::MemoryPort};

const MS: u64 = 1_000_000;

/// A lane between two hosts, in virtual time.
struct Bench {
    lane: Lane,
    pool: PacketPool,
    near: MemoryPort,
    left: MemoryPort,
    right: MemoryPort,
    far: MemoryPort,
}

impl Bench {
    fn new(link: LinkOptions) -> Self {
        let size = Size::of(&link, false).unwrap();
        let (near, left) = MemoryPort::pair("near", 1024);
        let (right, far) = MemoryPort::pair("far", 1024);
        Self {
            lane: Lane::new(link, size, Xoshiro256PlusPlus::seed_from_u64(1), Nanos(0)).unwrap(),
            pool: PacketPool::new(PoolSize { small: 4096, large: 0 }).unwrap(),
            near,
            left,
            right,
            far,
        }
    }

    /// The sender puts frames of 1000 bytes into the port.
    fn send(&mut self, count: usize) {
        let mut frames = (0..count).map(|_| self.pool.packet(&[0; 1000]).unwrap()).collect();
        self.near.transmit(&mut frames, &mut self.pool).unwrap();
    }

    /// The lane looks at its port until it is empty.
    fn look(&mut self, now_ns: u64, woken_in_ns: Option<u64>) {
        let woken_in = woken_in_ns.map(Nanos);
        while self.lane.receive(&mut self.left, &mut self.pool, Nanos(now_ns), woken_in).unwrap() {}
    }

    /// How many packets are through at `now`.
    fn through(&mut self, now_ns: u64) -> usize {
        while self.lane.deliver(&mut self.right, &mut self.pool, Nanos(now_ns)).unwrap() {}
        let mut frames = Vec::new();
        self.far.receive(&mut self.pool, &mut frames, 1024).unwrap()
    }
}

fn delay(ms: u64) -> LinkOptions {
    LinkOptions { delay: Nanos(ms * MS), ..LinkOptions::default() }
}

/// A frame of 1000 bytes is a millisecond.
fn rate() -> LinkOptions {
    let (rate, queue) = (Rate::from_bit_s(8_000_000), Some(Bytes(50_000)));
    LinkOptions { rate, queue, ..LinkOptions::default() }
}

#[test]
fn a_packet_leaves_at_its_time_and_not_before() {
    let mut bench = Bench::new(delay(20));
    bench.look(5 * MS, None);
    bench.send(1);
    bench.look(5 * MS, None);
    let deadline = bench.lane.next_deadline().unwrap();
    assert!((25 * MS..25 * MS + 1_000).contains(&deadline.0), "{deadline:?}");
    assert_eq!(bench.through(25 * MS - 1), 0);
    assert_eq!(bench.through(25 * MS + 1_000), 1);
    assert!(bench.lane.counters().lateness_ns_max <= 1_000);
    assert_eq!(bench.lane.next_deadline(), None);
}

#[test]
fn a_full_queue_drops_and_the_rate_holds() {
    let mut bench = Bench::new(rate());
    bench.send(200);
    bench.look(0, None);
    let counters = bench.lane.counters();
    assert_eq!((counters.packets_in, counters.drop_queue), (200, 150));
    for ms in 1..=50 {
        assert_eq!(bench.through(ms * MS + MS / 2), 1, "{ms}");
    }
    assert_eq!(bench.through(1_000 * MS), 0);
}

#[test]
fn what_ended_a_sleep_is_dated_back_by_a_wake_up() {
    let mut bench = Bench::new(delay(20));
    bench.look(MS, None);
    bench.send(1);
    bench.look(10 * MS, Some(MS));
    assert_eq!(bench.through(29 * MS - 1), 0);
    assert_eq!(bench.through(29 * MS + 1_000), 1);
}

#[test]
fn what_came_between_two_looks_is_dated_to_their_middle() {
    let mut bench = Bench::new(delay(20));
    bench.look(2 * MS, None);
    bench.send(1);
    bench.look(4 * MS, None);
    assert_eq!(bench.through(23 * MS - 1), 0);
    assert_eq!(bench.through(23 * MS + 1_000), 1);
}

/// Thirty packets are on the link, and thirty more come while the thread is away for longer than the first
/// take: they follow at once.
#[test]
fn a_stall_of_the_thread_idles_no_link() {
    let mut bench = Bench::new(rate());
    bench.send(30);
    bench.look(0, None);
    bench.send(30);
    bench.look(100 * MS, None);
    assert_eq!(bench.through(60 * MS + 1_000), 60);
}

/// A thread that is away for up to [`STALL_MAX`] finds packets that are due long since, and takes in new ones
/// before it has handed those over: they come late, and none is dropped.
#[test]
fn a_stall_of_the_thread_delays_and_drops_nothing() {
    for (link, there, more) in [(rate(), 49, 0), (delay(30), 30, 30)] {
        for stall_ns in [MS, 2 * MS, 20 * MS, 50 * MS, STALL_MAX.0] {
            let mut bench = Bench::new(link);
            bench.send(there);
            bench.look(0, None);
            // The first is due, and the thread is away.
            let first = bench.lane.next_deadline().unwrap().0;
            let back = first + stall_ns;
            bench.send(more + (stall_ns / MS) as usize);
            bench.look(back, Some(0));
            let counters = bench.lane.counters();
            assert_eq!(counters.drop_no_room, 0, "{link:?}, away for {stall_ns} ns");
            let all = bench.through(back + 200 * MS) as u64;
            assert_eq!(all + counters.drop_queue, counters.packets_in, "{link:?}, {stall_ns} ns");
        }
    }
}

#[test]
fn memory_ends_in_counted_drops() {
    let mut bench = Bench::new(delay(20));
    bench.lane.free.truncate(10);
    bench.send(30);
    bench.look(0, None);
    assert_eq!(bench.lane.counters().drop_no_room, 20);
    assert_eq!(bench.through(30 * MS), 10);
    bench.send(10);
    bench.look(40 * MS, None);
    assert_eq!(bench.lane.counters().drop_no_room, 20, "there is room again");
}

#[test]
fn a_full_port_keeps_the_rest_back() {
    let mut bench = Bench::new(delay(0));
    let (right, _far) = MemoryPort::pair("narrow", 3);
    bench.right = right;
    bench.send(20);
    bench.look(0, None);
    while bench.lane.deliver(&mut bench.right, &mut bench.pool, Nanos(MS)).unwrap() {}
    assert!(bench.lane.is_blocked());
    assert_eq!(bench.lane.next_deadline(), None);
    assert_eq!(bench.right.counters().tx_frames, 3);
    assert!(bench.lane.due.len() <= BATCH);
}
