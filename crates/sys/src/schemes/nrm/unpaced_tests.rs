//! Senders that cannot be paced: the header against its model, and the loaded program at ingress.

use std::mem::MaybeUninit;

use libbpf_rs::{MapCore, MapFlags, ProgramInput};
use proptest::prelude::*;
use tidegate_core::{
    Nanos, Rate,
    queue_options::VirtualQueueOptions,
    scheme::QueueKind,
    unpaced::{
        self, Sent,
        flows::{self, Flow, WAYS},
    },
    virtual_queue,
};

use super::*;
use crate::intf;

unsafe extern "C" {
    fn native_vq_time_ns(bytes: u32, cost: u64) -> u64;
    fn native_up_fair_ns(share: u64, epoch_ns: u64) -> u64;
    fn native_up_within(sent: *mut u64, epoch: u32, bytes: u32, cost: u64, fair_ns: u64) -> u32;
    fn native_up_has_much(sent: u64, epoch: u32) -> u32;
    fn native_up_took_much(sent: u64, epoch: u32) -> u32;
    fn native_up_takes(
        sent: *mut u64,
        epoch: u32,
        bytes: u32,
        cost: u64,
        fair_ns: u64,
        aside_ns: *mut i64,
    ) -> u32;
    fn native_up_packet(
        conf: *const intf::QueueConf,
        queue: *mut intf::NrmQueue,
        flow: *mut NativeFlow,
        packet: *const NativePacket,
    ) -> i32;
    fn native_uf_find(
        set: *mut [NativeFlow; WAYS],
        flow: u64,
        now: u64,
        epoch: u32,
    ) -> *mut NativeFlow;
    fn native_uf_earns(cell: *mut NativeFlow, now: u64, bytes: u32, cost: u64, share: u64) -> u32;
    fn native_up_config(conf: *const intf::QueueConf, out: *mut intf::QueueConf);
}

/// `struct uf_flow`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct NativeFlow {
    flow: u64,
    finish_ns: u64,
    sent: u64,
    seen: u32,
    until: u32,
    began: u32,
    pad: u32,
}

/// `struct native_pace_packet`.
#[repr(C)]
struct NativePacket {
    now_ns: u64,
    rate_bit_s: u64,
    wire_bytes: u32,
    unpaced: u32,
    random: u32,
    burst_bytes: u32,
}

fn any_cost() -> impl Strategy<Value = u64> {
    (8_000u64..=100_000_000_000)
        .prop_map(|bit_s| virtual_queue::cost_of_byte(Rate::from_bit_s(bit_s).unwrap()))
}

proptest! {
    /// The time of bytes is exact at each rate that a limit may have, and far below.
    #[test]
    fn the_time_of_bytes_is_the_model_s(bytes: u32, cost in prop_oneof![any_cost(), 0..=1u64 << 56]) {
        // SAFETY: plain numbers.
        let got = unsafe { native_vq_time_ns(bytes, cost) };
        prop_assert_eq!(got, virtual_queue::time_of(bytes.into(), cost).0);
        prop_assert_eq!(u128::from(got), (u128::from(bytes) * u128::from(cost)) >> 24);
    }

    /// Packet by packet, over epochs and rates that change.
    #[test]
    fn a_share_s_use_is_the_model_s(
        share: u64, epoch_ns: u64,
        steps in prop::collection::vec(
            (0u32..2, prop_oneof![1u32..2000, any::<u32>()], any_cost()), 1..200),
    ) {
        let fair = unpaced::fair(share, Nanos(epoch_ns));
        // SAFETY: plain numbers.
        prop_assert_eq!(unsafe { native_up_fair_ns(share, epoch_ns) }, fair.0);
        let (mut model, mut sent, mut epoch) = (Sent::default(), 0u64, 1);
        for (turns, bytes, cost) in steps {
            epoch += turns;
            // SAFETY: `sent` is a live word.
            let got = unsafe { native_up_within(&mut sent, epoch, bytes, cost, fair.0) };
            prop_assert_eq!(got == 1, model.is_within(epoch, bytes, cost, fair));
            prop_assert_eq!(sent, (u64::from(model.epoch) << 32) | u64::from(model.bytes));
        }
    }

    #[test]
    fn what_is_set_aside_for_a_flow_is_the_model_s(
        share: u64, epoch_ns: u64,
        steps in prop::collection::vec(
            (0u32..2, prop_oneof![1u32..2000, any::<u32>()], any_cost()), 1..200),
    ) {
        let fair = unpaced::fair(share, Nanos(epoch_ns));
        let (mut model, mut sent, mut epoch) = (Sent::default(), 0u64, 1);
        for (turns, bytes, cost) in steps {
            epoch += turns;
            // SAFETY: plain numbers.
            let much = unsafe { native_up_took_much(sent, epoch) } == 1;
            prop_assert_eq!(much, model.took_much(epoch));
            let mut aside = 7;
            // SAFETY: both are live words.
            let got = unsafe { native_up_takes(&mut sent, epoch, bytes, cost, fair.0, &mut aside) };
            prop_assert_eq!((got == 1, aside), model.takes(epoch, bytes, cost, fair));
            // SAFETY: plain numbers.
            let much = unsafe { native_up_has_much(sent, epoch) } == 1;
            prop_assert_eq!(much, model.has_much(epoch));
            prop_assert_eq!(sent, (u64::from(model.epoch) << 32) | u64::from(model.bytes));
        }
    }

    /// A word that other epochs have left, be they ahead of these or behind, counts for none of them, but for
    /// the few epochs that a CPU may be late.
    #[test]
    fn bytes_of_other_epochs_do_not_count(
        epoch in 1u32..1 << 20, other in prop_oneof![16u32..100_000, any::<u32>()], bytes in 1u32..1_000_000,
    ) {
        prop_assume!((16..u32::MAX - (1 << 20)).contains(&other));
        let mut sent = u64::from(epoch.wrapping_add(other)) << 32 | u64::from(bytes);
        // SAFETY: `sent` is a live word.
        let got = unsafe { native_up_within(&mut sent, epoch, 100, 1 << 24, 1) };
        prop_assert_eq!((got, sent), (1, u64::from(epoch) << 32 | 100));
    }

    /// The cell of a flow, and whether each packet passes.
    #[test]
    fn flows_of_unpaced_senders_are_the_model_s(
        steps in prop::collection::vec(
            (0u64..30_000_000, 0u32..3, 1u64..9, 1u32..100_000, any_cost(), 0u64..=2 << 24), 1..300),
    ) {
        let (mut model, mut set) = ([Flow::default(); WAYS], [NativeFlow::default(); WAYS]);
        let (mut now, mut epoch) = (S, 1);
        for (gap, turns, flow, bytes, cost, share) in steps {
            (now, epoch) = (now + gap, epoch + turns);
            let is = flows::find(&mut model, flow, Nanos(now), epoch);
            // SAFETY: the set is a live value of the layout that the header declares, and outlives its cell.
            let cell = unsafe { &mut *native_uf_find(&mut set, flow, now, epoch) };
            // SAFETY: `cell` is a live value.
            let passes = unsafe { native_uf_earns(cell, now, bytes, cost, share) } == 1;
            prop_assert_eq!(passes, is.earns(Nanos(now), bytes, cost, share));
            if passes {
                (is.sent, is.seen) = (Sent { epoch, bytes }, epoch);
                (cell.sent, cell.seen) = (u64::from(epoch) << 32 | u64::from(bytes), epoch);
            }
            for (is, cell) in model.iter().zip(set) {
                let sent = u64::from(is.sent.epoch) << 32 | u64::from(is.sent.bytes);
                let is = NativeFlow {
                    began: is.began, pad: 0,
                    flow: is.flow, finish_ns: is.finish.0, sent, seen: is.seen, until: 0,
                };
                prop_assert_eq!(is, cell);
            }
        }
    }

    #[test]
    fn thresholds_of_unpaced_senders_are_the_model_s(bit_s in 8_000u64..=100_000_000_000) {
        let conf = windows(bit_s);
        let mut got = intf::QueueConf::default();
        // SAFETY: both are live values of the layout that the header declares.
        unsafe { native_up_config(&conf, &mut got) };
        prop_assert_eq!(got, unpaced::thresholds(&conf.into()).into());
    }
}

fn windows(bit_s: u64) -> intf::QueueConf {
    let rate = Rate::from_bit_s(bit_s).unwrap();
    let options =
        VirtualQueueOptions { kind: QueueKind::Windows, ..VirtualQueueOptions::new(rate) };
    options.config().unwrap().into()
}

/// Who sends in a limit that paces, in virtual time.
#[derive(Clone, Copy)]
enum Source {
    /// A TCP flow that always has data, paced at its share, 3 ms of it at once.
    Greedy,
    /// A socket that cannot be paced: packets of so many bytes, this part of the limit.
    Unpaced { bytes: u32, offered: f64 },
    /// The same to somebody else with each packet.
    Strangers { bytes: u32, offered: f64 },
    /// A TCP flow that wants no more than this part of the limit, in packets of so many bytes.
    Requests { bytes: u32, offered: f64 },
}

/// What a source got in four seconds after two: of the limit, and how many packets were dropped.
#[derive(Debug, Clone, Copy, Default)]
struct Got {
    part: f64,
    drops: u32,
}

/// What each gets of a limit.
fn share_a_limit(bit_s: u64, sources: &[Source]) -> Vec<Got> {
    let rate = Rate::from_bit_s(bit_s).unwrap();
    let conf: intf::QueueConf = VirtualQueueOptions::new(rate).config().unwrap().into();
    let mut queue = intf::NrmQueue::default();
    let mut flows = vec![(S, NativeFlow::default(), Got::default()); sources.len()];
    let (begin, end) = (2 * S, 6 * S);
    let mut random = 1u32;
    loop {
        let (index, now_ns) =
            flows.iter().map(|flow| flow.0).enumerate().min_by_key(|(_, next)| *next).unwrap();
        if now_ns > end {
            break;
        }
        let share =
            if queue.share == 0 { 1.0 } else { f64::from(queue.share) / f64::from(1 << 24) };
        let (wire_bytes, offered) = match sources[index] {
            Source::Greedy => (burst(bit_s, share), share),
            Source::Unpaced { bytes, offered }
            | Source::Strangers { bytes, offered }
            | Source::Requests { bytes, offered } => (bytes, offered),
        };
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let packet = NativePacket {
            now_ns,
            rate_bit_s: bit_s,
            wire_bytes,
            unpaced: matches!(sources[index], Source::Unpaced { .. } | Source::Strangers { .. })
                .into(),
            random,
            burst_bytes: burst(bit_s, 1.0 / f64::from(queue.flows.max(queue.flows_before).max(1))),
        };
        let (next, flow, got) = &mut flows[index];
        if matches!(sources[index], Source::Strangers { .. }) {
            *flow = NativeFlow { began: queue.epoch + 1, ..NativeFlow::default() };
        }
        let cost_ns = virtual_queue::time_of(wire_bytes.into(), conf.cost).0;
        // SAFETY: every pointer is to a live value of the layout that the header declares.
        let passed = unsafe { native_up_packet(&conf, &mut queue, flow, &packet) } == 1;
        if now_ns > begin {
            got.part += if passed { cost_ns as f64 / (end - begin) as f64 } else { 0.0 };
            got.drops += u32::from(!passed);
        }
        // Not in step with each other.
        let jitter = f64::from(random >> 8) / f64::from(1 << 24) + 0.5;
        *next += (cost_ns as f64 / offered * jitter) as u64 + 1;
    }
    flows.into_iter().map(|flow| flow.2).collect()
}

/// What a paced flow sends at once that has this share.
fn burst(bit_s: u64, share: f64) -> u32 {
    (bit_s as f64 * 0.003 / 8.0 * share).clamp(3_028.0, 65_536.0) as u32
}

/// However small the packets of a flood are, it gets one share beside paced flows, and they get theirs.
#[test]
fn a_flood_of_small_packets_gets_one_share() {
    // At 1 Mbit/s a frame is 12 ms long, and an epoch few of them.
    for (bit_s, at_least, at_most) in [(1_000_000, 0.5, 2.0), (40_000_000, 0.9, 1.1)] {
        for (paced, offered) in [(1, 1.2), (1, 1.5), (1, 5.0), (4, 1.5), (4, 5.0)] {
            for bytes in [60, 120, 121, 1_514] {
                let fair = 1.0 / (paced + 1) as f64;
                let mut sources = vec![Source::Greedy; paced];
                sources.push(Source::Unpaced { bytes, offered });
                let got = share_a_limit(bit_s, &sources);
                let least = got[..paced].iter().map(|got| got.part).fold(1.0, f64::min);
                let flood = got[paced].part;
                let what = format!(
                    "{bit_s} bit/s, {paced} flows, {bytes} B, {offered}: each {least:.3}, flood {flood:.3}"
                );
                assert!(least >= at_least * fair, "{what}");
                assert!(flood <= at_most * fair, "{what}");
            }
        }
    }
}

/// Clients of a server of HTTP/3 have a share each beside transfers, whatever each of them could use. Were
/// what they take only set aside, the share would swing between all and nothing. Did they count only in the
/// epochs in which they send, each would have a share of those alone that do so in the same epoch.
#[test]
fn flows_that_cannot_be_paced_have_shares_as_transfers_have() {
    for bit_s in [20_000_000, 200_000_000] {
        for (paced, unpaced, offered, bytes) in
            [(4, 20, 0.05, 1_242), (4, 20, 0.5, 1_242), (4, 20, 0.5, 10_800), (4, 1, 1.5, 1_242)]
        {
            let mut sources = vec![Source::Greedy; paced];
            sources.extend(vec![Source::Unpaced { bytes, offered }; unpaced]);
            let got = share_a_limit(bit_s, &sources);
            let fair = 1.0 / (paced + unpaced) as f64;
            let part = |got: &[Got]| got.iter().map(|got| got.part).sum::<f64>() / got.len() as f64;
            let (transfers, clients) = (part(&got[..paced]) / fair, part(&got[paced..]) / fair);
            let what = format!("{bit_s} bit/s, {paced} transfers beside {unpaced}, {bytes} bytes");
            assert!((0.8..1.2).contains(&transfers), "{what}: {transfers:.2}, {clients:.2}");
            assert!((0.8..1.2).contains(&clients), "{what}: {transfers:.2}, {clients:.2}");
            for got in got {
                assert!((0.7 * fair..=1.3 * fair).contains(&got.part), "{what}: {got:?}");
            }
        }
    }
}

/// Paced flows whose bursts are longer than their share of two epochs, as TCP's windows make them on a short
/// path: all of them count all the time. Did they count only in the epochs in which they send, the share
/// would be too high in many of these, and a class with such flows would have more than its part of what is
/// spare.
#[test]
fn paced_flows_with_long_bursts_count_until_they_are_paid_for() {
    const FLOWS: usize = 8;
    for (bit_s, segments) in
        [(60_000_000, 2), (60_000_000, 5), (60_000_000, 10), (1_000_000_000, 40)]
    {
        let conf: intf::QueueConf =
            VirtualQueueOptions::new(Rate::from_bit_s(bit_s).unwrap()).config().unwrap().into();
        let mut queue = intf::NrmQueue::default();
        let mut sockets = [(S, NativeFlow::default()); FLOWS];
        let wire_bytes = segments * 1_514;
        let cost_ns = virtual_queue::time_of(wire_bytes.into(), conf.cost).0;
        let (mut random, mut sum, mut bursts) = (1u32, 0.0, 0);
        loop {
            let (now_ns, socket) =
                sockets.iter_mut().map(|(at, s)| (at, s)).min_by_key(|(at, _)| **at).unwrap();
            if *now_ns > 6 * S {
                break;
            }
            let packet = NativePacket {
                now_ns: *now_ns,
                rate_bit_s: bit_s,
                wire_bytes,
                unpaced: 0,
                random: 0,
                burst_bytes: burst(
                    bit_s,
                    1.0 / f64::from(queue.flows.max(queue.flows_before).max(1)),
                ),
            };
            // SAFETY: every pointer is to a live value of the layout that the header declares.
            unsafe { native_up_packet(&conf, &mut queue, socket, &packet) };
            let share = f64::from(queue.share.max(1)) / f64::from(1 << 24);
            if *now_ns > 2 * S {
                (sum, bursts) = (sum + share, bursts + 1);
            }
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let jitter = f64::from(random >> 8) / f64::from(1 << 24) * 0.2 + 0.9;
            *now_ns += (cost_ns as f64 / share * jitter) as u64 + 1;
        }
        let mean = sum / f64::from(bursts) * FLOWS as f64;
        eprintln!("{bit_s} bit/s, {segments} segments at once: {mean:.3}");
        assert!(
            (0.95..1.05).contains(&mean),
            "{bit_s} bit/s, {segments} segments at once: {mean:.3}"
        );
    }
}

/// A sender that addresses each packet to another host has half of the limit at most, and not a share with
/// each packet.
#[test]
fn a_flood_to_strangers_leaves_half_to_transfers() {
    for bit_s in [20_000_000, 200_000_000] {
        for bytes in [60, 121, 1_514, 10_800] {
            for offered in [0.3, 1.5, 5.0] {
                let mut sources = vec![Source::Greedy; 4];
                sources.push(Source::Strangers { bytes, offered });
                let got = share_a_limit(bit_s, &sources);
                let transfers = got[..4].iter().map(|got| got.part).sum::<f64>();
                let what = format!("{bit_s} bit/s, {bytes} bytes, {offered}: {got:?}");
                assert!(transfers >= 0.35, "{transfers:.2}: {what}");
                assert!(got[4].part >= 0.28, "{what}");
            }
        }
    }
}

/// Connections that want less than their shares get what they want, without a drop, whatever the size of
/// their packets; and bulk gets the rest.
#[test]
fn requests_get_what_they_want_and_bulk_the_rest() {
    let mut missed = Vec::new();
    for bit_s in [20_000_000, 200_000_000] {
        for (bulk, connections, wanted) in
            [(1, 20, 0.68), (4, 20, 0.2), (4, 20, 0.7), (1, 100, 0.5)]
        {
            for bytes in [66, 89, 120, 121, 600, 1_514] {
                let offered = wanted / f64::from(connections);
                let mut sources = vec![Source::Greedy; bulk];
                sources.extend((0..connections).map(|_| Source::Requests { bytes, offered }));
                let got = share_a_limit(bit_s, &sources);
                let of = |got: &[Got]| got.iter().map(|got| got.part).sum::<f64>();
                let drops: u32 = got[bulk..].iter().map(|got| got.drops).sum();
                let (of_bulk, of_requests) = (of(&got[..bulk]), of(&got[bulk..]));
                let what = format!(
                    "{bit_s} bit/s, {bulk} bulk, {connections} connections, {bytes} B: bulk {of_bulk:.3}, \
                     requests {of_requests:.3} of {wanted}, {drops} drops"
                );
                if drops > 0
                    || (of_requests - wanted).abs() > 0.03
                    || !(0.95..=1.01).contains(&(of_bulk + of_requests))
                {
                    missed.push(what);
                }
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Nine flows begin together over a path of 10 ms, and windows hold them to their shares. They never send
/// much more than the limit carries, though none of them takes half of a share that was computed without the
/// others.
#[test]
fn flows_that_begin_together_make_room_for_each_other() {
    const FLOWS: u32 = 9;
    const RTT_NS: u64 = 10_000_000;
    const FRAME: u32 = 1_514;
    for bit_s in [100_000_000, 1_000_000_000] {
        let rate = Rate::from_bit_s(bit_s).unwrap();
        let options =
            VirtualQueueOptions { kind: QueueKind::Windows, ..VirtualQueueOptions::new(rate) };
        let conf: intf::QueueConf = options.config().unwrap().into();
        let frame_ns = virtual_queue::time_of(FRAME.into(), conf.cost).0;
        let begin = intf::Queue { share: 99 * (1 << 24) / 100, ..Default::default() };
        let mut queue = intf::NrmQueue::from(begin);
        let mut sockets = [NativeFlow::default(); FLOWS as usize];
        let mut window = 4;
        for round in 1..20 {
            let share = f64::from(queue.share) / f64::from(1 << 24);
            let granted = (RTT_NS as f64 * share) as u64 / frame_ns;
            let frames = granted.clamp(2, window);
            let offered_ns = u64::from(FLOWS) * frames * frame_ns;
            assert!(offered_ns < RTT_NS * 3 / 2, "{bit_s} bit/s: {offered_ns} ns in round {round}");
            // One after the other, each at once.
            for (flow, socket) in sockets.iter_mut().enumerate() {
                for frame in 0..frames {
                    let packet = NativePacket {
                        now_ns: S + round * RTT_NS + flow as u64 * RTT_NS / 20 + frame,
                        rate_bit_s: bit_s,
                        wire_bytes: FRAME,
                        unpaced: 0,
                        random: 0,
                        burst_bytes: (RTT_NS * bit_s / 8 / S) as u32
                            / (2 * queue.flows_before.max(1)),
                    };
                    // SAFETY: every pointer is to a live value of the layout that the header declares.
                    unsafe { native_up_packet(&conf, &mut queue, socket, &packet) };
                }
            }
            window *= 2;
        }
    }
}

/// A second in nanoseconds: thresholds are so far apart that the time a test takes does not matter.
const S: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;
const KEY: [u8; 4] = 1u32.to_ne_bytes();
const FRAME_BYTES: u64 = 1514;

/// A UDP datagram of 1500 bytes that may be marked.
fn datagram() -> Vec<u8> {
    let mut frame = vec![0; FRAME_BYTES as usize];
    frame[12..16].copy_from_slice(&[0x08, 0x00, 0x45, 0x02]);
    frame[16..18].copy_from_slice(&1500u16.to_be_bytes());
    frame[23] = 17;
    frame
}

fn put(nrm: &skel::nrm::NrmSkel<'_>, conf: intf::QueueConf, bit_s: u64, queue: &intf::NrmQueue) {
    let flags = intf::FLAG_LOOPBACK | intf::FLAG_PACE_FAIR;
    let rate_bit_s = [bit_s; 2];
    let limit = intf::Limit { queue: [conf; 2], rate_bit_s, flags, ..Default::default() };
    let bytes = bytemuck::bytes_of(&limit);
    nrm.maps.limit.update(&0u32.to_ne_bytes(), bytes, MapFlags::ANY).unwrap();
    nrm.maps.queues_of_limit.update(&KEY, bytemuck::bytes_of(queue), MapFlags::ANY).unwrap();
}

fn queue_of(nrm: &skel::nrm::NrmSkel<'_>) -> intf::NrmQueue {
    let value = nrm.maps.queues_of_limit.lookup(&KEY, MapFlags::ANY).unwrap().unwrap();
    bytemuck::pod_read_unaligned(&value)
}

fn passed_bytes(nrm: &skel::nrm::NrmSkel<'_>) -> u64 {
    let cpus = nrm.maps.counters.lookup_percpu(&KEY, MapFlags::ANY).unwrap().unwrap();
    let one = |cpu: &Vec<u8>| -> intf::Counters {
        bytemuck::pod_read_unaligned(&cpu[..size_of::<intf::Counters>()])
    };
    cpus.iter().map(one).map(|c| c.bytes[0] + c.bytes[1] + c.bytes[2]).sum()
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * S + now.tv_nsec as u64
}

/// A flood at ingress passes no more above the rate than with scheme `nrm`, though the queue has room for
/// windows; judged by the clock that the program reads, so that a machine that stalls is no error.
#[test]
fn root_a_flood_at_ingress_gets_no_room_for_windows() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_a_flood_at_ingress_gets_no_room_for_windows: needs root");
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm(&mut storage, &Sharing::default()).unwrap();
    for bit_s in [8_000, 1_000_000, 50_000_000, 1_000_000_000] {
        let conf = windows(bit_s);
        let strict = unpaced::thresholds(&conf.into());
        // With a round trip of 50 ms, for which a window has room as well.
        put(&nrm, conf, bit_s, &intf::NrmQueue { rtt_ns: 50_000_000, ..Default::default() });
        let before = passed_bytes(&nrm);
        let started = now_ns();
        for _ in 0..300 {
            let packet = datagram();
            let input = ProgramInput { data_in: Some(&packet), repeat: 100, ..Default::default() };
            nrm.progs.nrm_ingress.test_run(input).unwrap();
        }
        let elapsed = now_ns() - started;
        let passed = passed_bytes(&nrm) - before;
        let time = virtual_queue::time_of(passed, conf.cost).0;
        let packet = virtual_queue::time_of(FRAME_BYTES, conf.cost).0;
        let bound = elapsed + strict.burst.0 + strict.drop.0 + packet;
        assert!(time <= bound, "{bit_s} bit/s: {passed} bytes take {time} ns, bound {bound}");
        assert!(time >= strict.large_drop.0.min(30_000 * packet), "{bit_s} bit/s: {passed} bytes");
    }
}

/// Packets within a share do not pay for windows on their way, nor for replies that pass on credit; packets
/// beyond it do, however small.
#[test]
fn root_unpaced_senders_within_a_share_do_not_pay_for_windows() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_unpaced_senders_within_a_share_do_not_pay_for_windows: needs root");
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm(&mut storage, &Sharing::default()).unwrap();
    // A frame takes 1.5 s; the drop threshold is 145 s, and 6 s without windows.
    let conf = windows(8_000);
    let large = datagram();
    let small = {
        let mut frame = large[..74].to_vec();
        frame[17] = 60;
        frame[16] = 0;
        frame
    };
    // Whether the packet is within the share of its flow, what all and what unpaced senders are behind, in
    // milliseconds; and whether a large and a small packet pass.
    let drop_ms = conf.drop_ns / 1_000_000;
    let rows = [
        ("idle, within", true, 0, 0, [true, true]),
        ("idle, beyond", false, 0, 0, [true, true]),
        ("windows are on their way, within", true, 100_000, 0, [true, true]),
        ("windows are on their way, beyond", false, 100_000, 0, [false, false]),
        ("replies pass on credit", true, drop_ms + 100, 0, [true, true]),
        ("beyond that credit, too", true, 200_000, 0, [false, false]),
        ("unpaced senders are behind", true, 100_000, 60_000, [false, false]),
    ];
    let mut port = 0u16;
    for (what, within, all_ms, unpaced_ms, expected) in rows {
        for (frame, passes) in [&large, &small].into_iter().zip(expected) {
            port += 1;
            let mut frame = frame.clone();
            frame[34..36].copy_from_slice(&port.to_be_bytes());
            let run = |all_ms: u64, unpaced_ms: u64| {
                let now = now_ns();
                let was = intf::NrmQueue {
                    unpaced_finish_ns: now + unpaced_ms * MS,
                    ..intf::NrmQueue::from(intf::Queue {
                        finish_ns: now + all_ms * MS,
                        epoch_start_ns: now,
                        epoch_us: 600_000_000,
                        // The least there is: zero stands for a share that is not known yet.
                        share: 1,
                        cost: conf.cost,
                        ..Default::default()
                    })
                };
                put(&nrm, conf, 8_000, &was);
                let input = ProgramInput { data_in: Some(&frame), ..Default::default() };
                let returned = nrm.progs.nrm_ingress.test_run(input).unwrap().return_value;
                (now, was, returned == 1)
            };
            // A flow's first packet is within its share, and uses it for seconds.
            assert!(within || run(0, 0).2, "{what}: the first packet of {} bytes", frame.len());
            let (now, was, passed) = run(all_ms, unpaced_ms);
            assert_eq!(passed, passes, "{what}, {} bytes", frame.len());
            let is = queue_of(&nrm);
            let cost =
                if passes { virtual_queue::time_of(frame.len() as u64, conf.cost).0 } else { 0 };
            // An idle queue has moved on to the present, less its burst.
            let charged = |is: u64, was: u64| was < now + S || is.abs_diff(was + cost) <= 1;
            assert!(charged(is.finish_ns, was.finish_ns), "{what}: {is:?}");
            assert!(charged(is.unpaced_finish_ns, was.unpaced_finish_ns), "{what}: {is:?}");
        }
    }
}

/// Where many join a few, the next epoch is two bursts of each, as the many send them.
#[test]
fn root_an_epoch_is_as_long_as_the_bursts_of_those_who_joined() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_an_epoch_is_as_long_as_the_bursts_of_those_who_joined: needs root");
        return;
    }
    const BIT_S: u64 = 100_000_000;
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm(&mut storage, &Sharing::default()).unwrap();
    let conf: intf::QueueConf =
        VirtualQueueOptions::new(Rate::from_bit_s(BIT_S).unwrap()).config().unwrap().into();
    let key = 0u32.to_ne_bytes();
    for (flows, flows_before, expected_us) in [(24, 4, 11_628), (4, 24, 4000), (4, 4, 6000)] {
        let now = now_ns();
        let queue = intf::NrmQueue::from(intf::Queue {
            flows,
            flows_before,
            finish_ns: now,
            epoch_base_ns: now,
            epoch_start_ns: now - S,
            epoch_us: 4000,
            cost: conf.cost,
            ..Default::default()
        });
        put(&nrm, conf, BIT_S, &queue);
        nrm.maps.queues_of_limit.update(&key, bytemuck::bytes_of(&queue), MapFlags::ANY).unwrap();
        let packet = datagram();
        let input = ProgramInput { data_in: Some(&packet), ..Default::default() };
        nrm.progs.nrm_egress.test_run(input).unwrap();
        let value = nrm.maps.queues_of_limit.lookup(&key, MapFlags::ANY).unwrap().unwrap();
        let is: intf::NrmQueue = bytemuck::pod_read_unaligned(&value);
        assert_eq!(is.epoch, 1, "the packet ends the epoch");
        let what = format!("{flows} flows after {flows_before}");
        assert!(is.epoch_us.abs_diff(expected_us) <= 16, "{what}: {} us", is.epoch_us);
    }
}
