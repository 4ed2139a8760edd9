use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use tidegate_core::Rate;
use tidegate_sys::net::NetNs;

use super::*;
use crate::{
    packet::Packet,
    port::{
        memory::MemoryPort,
        tap::{TapOptions, TapPort},
    },
};

/// How long anything in here may take on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two hosts and the cable between them.
struct Bench {
    near: MemoryPort,
    far: MemoryPort,
    pool: PacketPool,
    cable: Cable,
}

impl Bench {
    fn new(options: CableOptions) -> Self {
        let (near, left) = MemoryPort::pair("near", 4096);
        let (right, far) = MemoryPort::pair("far", 4096);
        let cable =
            Cable::start(left, right, &CableOptions { realtime: false, ..options }).unwrap();
        let pool = PacketPool::new(PoolSize { small: 8192, large: 0 }).unwrap();
        Self { near, far, pool, cable }
    }

    /// Sends frames of 1000 bytes that begin with their number.
    fn send(&mut self, count: u32) {
        let numbered = |n: u32| {
            let mut frame = [0; 1000];
            frame[..4].copy_from_slice(&n.to_be_bytes());
            frame
        };
        let mut frames: VecDeque<Packet> =
            (0..count).map(|n| self.pool.packet(&numbered(n)).unwrap()).collect();
        self.near.transmit(&mut frames, &mut self.pool).unwrap();
        assert!(frames.is_empty());
    }

    /// Waits until `count` packets are through or dropped; returns the numbers of those that came, in order.
    fn collect(&mut self, count: u64) -> Vec<u32> {
        let (mut frames, deadline) = (Vec::new(), Instant::now() + PATIENCE);
        loop {
            let c = self.cable.counters().rightward;
            let ended = c.drop_lost + c.drop_queue + c.drop_no_room + c.packets_out == count;
            self.far.receive(&mut self.pool, &mut frames, 4096).unwrap();
            if ended && frames.len() as u64 == c.packets_out {
                break;
            }
            assert!(Instant::now() < deadline, "{c:?}");
            thread::yield_now();
        }
        let number = |p: &Packet| u32::from_be_bytes(*p.frame().first_chunk().unwrap());
        frames.iter().map(number).collect()
    }
}

#[test]
fn what_comes_in_goes_out_and_is_counted() {
    let link = LinkOptions { delay: Nanos(5_000_000), ..LinkOptions::default() };
    let mut bench = Bench::new(CableOptions::symmetric(link, 1));
    bench.send(100);
    assert!(bench.collect(100).into_iter().eq(0..100));
    let counters = bench.cable.counters();
    let lane = counters.rightward;
    assert_eq!((lane.wire_bytes_in, lane.wire_bytes_out), (100_000, 100_000));
    assert_eq!(counters.leftward, LaneCounters::default());
    assert_eq!((counters.left.rx_frames, counters.right.tx_frames), (100, 100));
    assert_eq!(bench.cable.state(), CableState::Running);
}

#[test]
fn a_seed_decides_who_is_lost() {
    let link = LinkOptions { loss: 0.1, ..LinkOptions::default() };
    let lost = |seed| {
        let mut bench = Bench::new(CableOptions::symmetric(link, seed));
        bench.send(2000);
        bench.collect(2000)
    };
    let first = lost(7);
    assert!((1650..1950).contains(&first.len()), "{}", first.len());
    assert_eq!(first, lost(7));
    assert_ne!(first, lost(8));
}

#[test]
fn what_is_held_up_is_overtaken() {
    let link = LinkOptions {
        delay: Nanos(1_000_000),
        reorder: 0.1,
        reorder_by: Nanos(300_000_000),
        ..LinkOptions::default()
    };
    let mut bench = Bench::new(CableOptions::symmetric(link, 7));
    bench.send(1000);
    let through = bench.collect(1000);
    assert_eq!(through.len(), 1000);
    assert!(!through.is_sorted());
}

#[test]
fn the_other_end_of_a_port_may_go() {
    let Bench { near, far: _far, pool: _, cable } =
        Bench::new(CableOptions::symmetric(LinkOptions::default(), 1));
    drop(near);
    let deadline = Instant::now() + PATIENCE;
    while cable.state() == CableState::Running {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    assert!(matches!(cable.state(), CableState::Gone { why } if why.contains("near")));
}

#[test]
fn a_segment_is_for_fast_links_that_lose_nothing() {
    let at = |bit_s| LinkOptions { rate: Rate::from_bit_s(bit_s), ..LinkOptions::default() };
    assert!(wants_segments(&LinkOptions::default()));
    assert!(wants_segments(&at(10_000_000_000)));
    assert!(!wants_segments(&at(1_000_000_000)));
    assert!(!wants_segments(&LinkOptions { loss: 0.01, ..LinkOptions::default() }));
    assert!(!wants_segments(&LinkOptions { reorder: 0.01, ..LinkOptions::default() }));
}

#[test]
fn memory_is_bounded_and_long_ways_are_refused() {
    let rate = Rate::from_bit_s(10_000);
    let way =
        |delay, queue| LinkOptions { delay: Nanos(delay), rate, queue, ..LinkOptions::default() };
    assert!(Size::of(&way(5_000_000_000, Some(Bytes(0))), false).is_err());
    assert!(Size::of(&way(0, Some(Bytes(1 << 20))), false).is_err());
    let fast = LinkOptions { delay: Nanos(1_000_000_000), ..LinkOptions::default() };
    let size = Size::of(&fast, true).unwrap();
    assert_eq!((size.frames, size.segments), (FRAMES_MAX, SEGMENTS_MAX));
    assert!(size.wheel(Nanos(0)).unwrap().horizon() >= size.horizon);
    let unbounded = LinkOptions { rate: Rate::from_bit_s(1_000_000_000), ..LinkOptions::default() };
    let wheel = Size::of(&unbounded, false).unwrap().wheel(Nanos(0)).unwrap();
    assert!(wheel.granularity() <= Nanos(1 << 14), "{:?}", wheel.granularity());
}

#[test]
fn root_a_deleted_device_ends_the_cable() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_a_deleted_device_ends_the_cable: needs root");
        return;
    }
    let name = |role: &str| format!("tidegate-cable-{}-{role}", std::process::id());
    let [near, far] = ["near", "far"].map(|role| NetNs::create(&name(role)).unwrap());
    let tap = |netns: &NetNs| TapPort::open(netns, &TapOptions::new("eth0")).unwrap();
    let options = CableOptions::symmetric(LinkOptions::default(), 1);
    let cable = Cable::start(tap(&near), tap(&far), &options).unwrap();
    let mut netlink = far.netlink().unwrap();
    let index = netlink.index_of("eth0").unwrap();
    netlink.delete_link(index).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while cable.state() == CableState::Running {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    assert!(matches!(cable.state(), CableState::Gone { .. }), "{:?}", cable.state());
}
