//! Any frames between two ports in memory, by a lane, on any clock: each is sent, dropped and counted,
//! or held.

#![no_main]

use std::{cell::RefCell, collections::VecDeque};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tidegate_core::{Nanos, Rate, units::Bytes};
use tidegate_nic::{
    PacketPool, PoolSize, Port, VnetHeader,
    lane::{Lane, LaneLimit, LaneOptions},
    port::memory::MemoryPort,
};

#[derive(Debug, Arbitrary)]
struct Case {
    flows: u8,
    packets: u8,
    queue_bytes: Option<u16>,
    start: u64,
    bit_s: Option<u64>,
    steps: Vec<Step>,
}

#[derive(Debug, Arbitrary)]
enum Step {
    /// Of UDP over IPv4; its flow is its source port.
    Packets {
        flow: u8,
        ecn: u8,
        bytes: u16,
        count: u8,
    },
    Segment {
        flow: u8,
        bytes: u16,
        size: u16,
    },
    Raw {
        bytes: Vec<u8>,
        vnet: [u8; 4],
        csum_start: u16,
    },
    Limit {
        bit_s: Option<u64>,
        burst_ns: u32,
        mark_ns: Option<u32>,
    },
    Part {
        bit_s: u64,
    },
    Poll {
        most: u8,
    },
    /// The far side takes what has come, so that the port has room.
    Read,
    Tick {
        by: u32,
    },
    Jump {
        by: i64,
    },
    ToDeadline,
    /// The port goes, and another comes.
    Unplug,
}

const STEPS_MOST: usize = 500;
/// Frames in the cable.
const CABLE: usize = 16;
const SMALL: u32 = 700;

thread_local! {
    /// Few buffers, so that they run out. All memory is taken once.
    static POOL: RefCell<PacketPool> =
        RefCell::new(PacketPool::new(PoolSize { small: SMALL, large: 8 }).expect("memory"));
}

fn udp(flow: u8, ecn: u8, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; bytes.max(42)];
    frame[12..16].copy_from_slice(&[0x08, 0x00, 0x45, ecn & 3]);
    frame[23] = 17;
    frame[35] = flow;
    frame
}

fn limit(bit_s: Option<u64>, burst_ns: u32, mark_ns: Option<u32>) -> Option<LaneLimit> {
    let rate = Rate::from_bit_s(bit_s?.max(1))?;
    let mark = mark_ns.map(|ns| Nanos(ns.into()));
    Some(LaneLimit { rate, burst: Nanos(burst_ns.into()), mark })
}

fuzz_target!(|case: Case| POOL.with_borrow_mut(|pool| run(&case, pool)));

fn run(case: &Case, pool: &mut PacketPool) {
    let packets = usize::from(case.packets) + 1;
    let options = LaneOptions {
        flows: usize::from(case.flows % 32) + 1,
        packets,
        bytes: case.queue_bytes.map(|bytes| Bytes(bytes.into())),
        granularity: Nanos(1 << 12),
        horizon: Nanos(1 << 22),
        ..LaneOptions::default()
    };
    let free = pool.free();
    let mut now = case.start;
    let mut lane = Lane::new(options, 7, Nanos(now)).expect("legal options");
    lane.set_limit(limit(case.bit_s, 0, None));
    let (mut near, mut far) = MemoryPort::pair("fuzz", CABLE);
    let (mut out, mut frames) = (VecDeque::new(), Vec::new());
    let (mut came, mut sent, mut before, mut gone) = (0u64, 0u64, 0u64, 0u64);
    for step in case.steps.iter().take(STEPS_MOST) {
        match step {
            Step::Packets { flow, ecn, bytes, count } => {
                for _ in 0..*count {
                    let frame = udp(*flow, *ecn, usize::from(bytes % 1_600));
                    let Some(packet) = pool.packet(&frame) else { break };
                    came += 1;
                    lane.take(Nanos(now), packet, pool, &mut out);
                }
            }
            Step::Segment { flow, bytes, size } => {
                let frame = udp(*flow, 0, usize::from(*bytes));
                if let Some(mut packet) = pool.packet(&frame) {
                    (packet.vnet_mut().gso_type, packet.vnet_mut().gso_size) = (5, *size);
                    let (pieces, cut) = (packet.segments(), lane.counters().cut_segments);
                    lane.take(Nanos(now), packet, pool, &mut out);
                    let was_cut = lane.counters().cut_segments > cut;
                    came += if was_cut { u64::from(pieces) } else { 1 };
                }
            }
            Step::Raw { bytes, vnet, csum_start } => {
                if let Some(mut packet) = pool.packet(bytes) {
                    let [flags, gso_type, high, low] = *vnet;
                    let gso_size = u16::from_be_bytes([high, low]);
                    let (csum_start, csum_offset) = (*csum_start, 6);
                    *packet.vnet_mut() = VnetHeader {
                        flags,
                        gso_type,
                        hdr_len: 0,
                        gso_size,
                        csum_start,
                        csum_offset,
                    };
                    let (pieces, cut) = (packet.segments(), lane.counters().cut_segments);
                    lane.take(Nanos(now), packet, pool, &mut out);
                    let was_cut = lane.counters().cut_segments > cut;
                    came += if was_cut { u64::from(pieces) } else { 1 };
                }
            }
            Step::Limit { bit_s, burst_ns, mark_ns } => {
                lane.set_limit(limit(*bit_s, *burst_ns, *mark_ns));
            }
            Step::Part { bit_s } => {
                lane.set_part(Rate::from_bit_s((*bit_s).max(1)).expect("not zero"));
            }
            Step::Poll { most } => {
                let left = lane.poll(Nanos(now), usize::from(*most), &mut out);
                assert!(left <= usize::from(*most));
                sent += near.transmit(&mut out, pool).expect("the far side is there") as u64;
            }
            Step::Read => {
                far.receive(pool, &mut frames, CABLE).expect("the near side is there");
                frames.drain(..).for_each(|packet| pool.recycle(packet));
            }
            Step::Tick { by } => now = now.saturating_add((*by).into()),
            Step::Jump { by } => now = now.saturating_add_signed(*by),
            Step::ToDeadline => now = lane.next_deadline().map_or(now, |at| at.0),
            Step::Unplug => {
                drop(far);
                assert!(out.is_empty() || near.transmit(&mut out, pool).is_err());
                // As a relay does: what is on its way out has passed the lane.
                before += out.len() as u64;
                gone += out.len() as u64;
                for packet in out.drain(..) {
                    lane.gone(&packet);
                }
                lane.clear(Nanos(now));
                assert_eq!((lane.load(), lane.next_deadline()), (Default::default(), None));
                (near, far) = MemoryPort::pair("fuzz", CABLE);
            }
        }
        let (load, counters, backlog) = (lane.load(), lane.counters(), lane.backlog_counters());
        let held = (load.waiting_packets + load.shaper_packets) as u64;
        assert!(held as usize <= packets);
        assert!(load.flows <= options.flows && load.shaper_packets <= 2 * options.flows);
        assert!(held > 0 || load == Default::default(), "{load:?}");
        assert_eq!(counters.passed_packets, sent + before + out.len() as u64);
        let dropped =
            backlog.drop_early_packets + backlog.drop_full_packets + backlog.drop_gone_packets;
        // Those that passed and then found no port are counted there and here.
        assert_eq!(came, counters.passed_packets + dropped - gone + held);
        let shaper = lane.shaper_counters();
        assert_eq!((shaper.wheel.full, shaper.no_such_flow, shaper.wheel.beyond), (0, 0, 0));
    }
    drop((lane, near, far, out));
    assert_eq!(pool.free(), free, "a buffer was lost");
}
