//! The C of the kernel against its Rust model: the pure headers compiled for this machine on any input,
//! and the loaded program on a table of packets.

use std::mem::MaybeUninit;

use libbpf_rs::{MapCore, MapFlags, ProgramInput};
use proptest::prelude::*;
use tidegate_core::{
    Bytes, Direction, DropReason, Nanos, Packet, Rate, Span, Transport, Verdict, VirtualQueue,
    class::{self, Floors},
    fair_share::{self, Sharers},
    queue_options::VirtualQueueOptions,
    virtual_queue,
};

use super::*;
use crate::{clock::monotonic_ns, intf};

/// `struct vq_packet`.
#[repr(C)]
struct NativePacket {
    wire_bytes: u32,
    ecn_capable: u8,
    tcp: u8,
    in_flight: u8,
    local: u8,
}

/// `struct fs_epoch`.
#[repr(C)]
struct NativeEpoch {
    elapsed_ns: u64,
    charged_ns: u64,
    backlog_ns: u64,
    rtt_ns: u64,
    burst_ns: u64,
    sharers: NativeSharers,
}

/// `struct fs_sharers`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct NativeSharers {
    count: u32,
    weight: u32,
    lightest: u32,
    reserved: u64,
}

impl From<Sharers> for NativeSharers {
    fn from(Sharers { count, weight, lightest, reserved }: Sharers) -> Self {
        NativeSharers { count, weight, lightest, reserved }
    }
}

unsafe extern "C" {
    fn native_vq_packet(
        conf: *const intf::QueueConf,
        finish_ns: *mut u64,
        skipped_ns: *mut u64,
        carry: *mut u32,
        now_ns: u64,
        packet: *const NativePacket,
        random: u32,
    ) -> u32;
    fn native_vq_rescaled_ns(backlog_ns: u64, from: u64, to: u64, drop_ns: u64) -> u64;
    fn native_fs_lesser(a: u64, b: u64) -> u64;
    fn native_fs_greater(a: u64, b: u64) -> u64;
    fn native_fs_next(share: u64, epoch: *const NativeEpoch) -> u64;
    fn native_fs_make_room(share: u64, sharers: *const NativeSharers) -> u64;
    fn native_fs_flows(sharers: *mut NativeSharers, count: u32);
    fn native_fs_join(share: u64, flows: u32) -> u64;
    fn native_fs_epoch_ns(flows: u32, burst_ns: u64) -> u64;
    fn native_cl_rate(
        class: *const intf::ClassConf,
        ceiling_bit_s: u64,
        parent_bit_s: u64,
        share: u64,
    ) -> u64;
    fn native_cl_config_at(
        ceiling: *const intf::QueueConf,
        class: *const intf::ClassConf,
        bit_s: u64,
        now: *mut intf::QueueConf,
    );
}

/// `enum vq_verdict` as the model says it.
fn verdict(native: u32) -> Verdict {
    match native {
        0 => Verdict::Pass,
        1 => Verdict::Mark,
        2 => Verdict::Slow,
        3 => Verdict::Drop(DropReason::Full),
        4 => Verdict::Drop(DropReason::Reserve),
        5 => Verdict::Drop(DropReason::Early),
        other => panic!("no verdict {other}"),
    }
}

fn any_packet() -> impl Strategy<Value = Packet> {
    let transport = prop_oneof![
        any::<bool>().prop_map(|in_flight| Transport::Tcp { in_flight }),
        Just(Transport::Other),
    ];
    let bytes = prop_oneof![1u32..200, 1000u32..70_000, any::<u32>()];
    (bytes, any::<bool>(), transport).prop_map(|(wire_bytes, ecn_capable, transport)| Packet {
        wire_bytes,
        ecn_capable,
        transport,
    })
}

proptest! {
    /// Packet by packet, verdict and state of the header are the model's.
    #[test]
    fn the_header_is_the_model(
        bit_s in 8_000u64..=100_000_000_000,
        egress: bool,
        start in 0u64..1 << 62,
        steps in prop::collection::vec((0u64..20_000_000, any_packet(), any::<u32>(), 0u64..1000), 1..200),
    ) {
        let config = VirtualQueueOptions::new(Rate::from_bit_s(bit_s).unwrap()).config().unwrap();
        let conf = intf::QueueConf::from(config);
        let direction = if egress { Direction::Egress } else { Direction::Ingress };
        let mut model = VirtualQueue::new(config, direction);
        let (mut finish_ns, mut skipped_ns, mut carry, mut now) = (0u64, 0u64, 0u32, start);
        let mut costs_ns = 0;
        for (gap, packet, random, back) in steps {
            now = (now + gap).saturating_sub(back);
            let (tcp, in_flight) = match packet.transport {
                Transport::Tcp { in_flight } => (1, u8::from(in_flight)),
                Transport::Other => (0, 0),
            };
            let native = NativePacket {
                wire_bytes: packet.wire_bytes,
                ecn_capable: u8::from(packet.ecn_capable),
                tcp,
                in_flight,
                local: u8::from(egress),
            };
            // SAFETY: every pointer is to a live value of the layout that the header declares.
            let got = unsafe {
                native_vq_packet(&conf, &mut finish_ns, &mut skipped_ns, &mut carry, now, &native, random)
            };
            prop_assert_eq!(verdict(got), model.on_packet(Nanos(now), &packet, random));
            prop_assert_eq!((finish_ns, carry), (model.finish().0, model.carry()));
            if verdict(got).passes() {
                let bytes = packet.wire_bytes.min(virtual_queue::MAX_PACKET_BYTES);
                costs_ns += u128::from(bytes) * u128::from(config.cost);
            }
            prop_assert_eq!(u128::from(finish_ns.wrapping_sub(skipped_ns)), costs_ns >> 24);
        }
    }

    /// A backlog at another rate, on any input at all.
    #[test]
    fn a_backlog_at_another_rate_is_the_model_s(
        backlog in prop_oneof![0u64..1 << 39, any::<u64>()],
        from in prop_oneof![0u64..1 << 45, any::<u64>()],
        to in prop_oneof![0u64..1 << 45, any::<u64>()],
        drop in prop_oneof![0u64..1 << 39, any::<u64>()],
    ) {
        // SAFETY: plain numbers.
        let got = unsafe { native_vq_rescaled_ns(backlog, from, to, drop) };
        let model = virtual_queue::rescaled(Nanos(backlog), from, to, Nanos(drop));
        prop_assert_eq!(got, model.0);
    }

    /// The lesser and the greater without a branch, of numbers far apart and of neighbours.
    #[test]
    fn the_lesser_and_the_greater_are_right(a in any_number(), other in any_number(), near in 0u64..3) {
        for b in [other, a.wrapping_add(near), a.wrapping_sub(near)] {
            // SAFETY: plain numbers.
            let got = unsafe { (native_fs_lesser(a, b), native_fs_greater(a, b)) };
            prop_assert_eq!(got, (a.min(b), a.max(b)));
        }
    }

    /// The law of the fair share, on any input at all.
    #[test]
    fn the_share_law_is_the_model(
        share: u64, elapsed in prop_oneof![0u64..1 << 30, any::<u64>()],
        charged in prop_oneof![0u64..1 << 30, any::<u64>()],
        backlog in prop_oneof![Just(0), 0u64..1 << 26, any::<u64>()], rtt in 0u64..1 << 30,
        burst in prop_oneof![0u64..1 << 24, any::<u64>()], sharers in any_sharers(),
    ) {
        let share = share % (2 * fair_share::MAX_SHARE);
        let epoch = fair_share::Epoch {
            elapsed: Nanos(elapsed), charged: Nanos(charged), backlog: Nanos(backlog),
            rtt: Nanos(rtt), burst: Nanos(burst), sharers,
        };
        let native = NativeEpoch {
            elapsed_ns: elapsed, charged_ns: charged, backlog_ns: backlog, rtt_ns: rtt,
            burst_ns: burst, sharers: sharers.into(),
        };
        // SAFETY: `native` is a live value of the layout that the header declares.
        let got = unsafe { native_fs_next(share, &native) };
        prop_assert_eq!(got, fair_share::next_share(share, &epoch));
        // SAFETY: as above, and plain numbers.
        let got = unsafe {
            (native_fs_make_room(share, &native.sharers), native_fs_epoch_ns(sharers.count, burst))
        };
        let length = fair_share::epoch_length(sharers.count, Nanos(burst)).0;
        prop_assert_eq!(got, (fair_share::make_room(share, &sharers), length));
        let mut flows = NativeSharers::default();
        // SAFETY: `flows` is a live value of the layout that the header declares.
        unsafe { native_fs_flows(&mut flows, sharers.count) };
        prop_assert_eq!(flows, Sharers::flows(sharers.count).into());
        // SAFETY: plain numbers.
        let got = unsafe { native_fs_join(share, sharers.count) };
        prop_assert_eq!(got, fair_share::join(share, sharers.count));
    }

    /// What a class may use, and its thresholds at that rate.
    #[test]
    fn the_class_is_the_model(
        guarantee in prop_oneof![Just(0), 8_000u64..=100_000_000_000], weight in 1u32..=10_000,
        ceiling in 8_000u64..=100_000_000_000, parent in 8_000u64..=100_000_000_000,
        share in prop_oneof![0u64..1 << 25, any::<u64>()], floors: [u32; 3], burst in 0u64..1 << 30,
    ) {
        let [burst_bytes, mark_bytes, drop_bytes] = floors;
        let conf = intf::ClassConf {
            guarantee_bit_s: guarantee, weight, burst_bytes, mark_bytes, drop_bytes,
        };
        let rate = |bit_s| Rate::from_bit_s(bit_s).unwrap();
        let model = conf.class().unwrap().rate(rate(ceiling), rate(parent), share);
        // SAFETY: `conf` is a live value of the layout that the header declares.
        let got = unsafe { native_cl_rate(&conf, ceiling, parent, share) };
        prop_assert_eq!(got, model.bit_s());

        let options = VirtualQueueOptions {
            burst: Some(Span::Time(Nanos(burst))), ..VirtualQueueOptions::new(rate(ceiling))
        };
        let at_ceiling = options.config().unwrap();
        let bytes = |floor| Bytes(u64::from(floor));
        let floors = Floors { burst: bytes(burst_bytes), mark: bytes(mark_bytes), drop: bytes(drop_bytes) };
        let mut now = intf::QueueConf::default();
        // SAFETY: every pointer is to a live value of the layout that the header declares.
        unsafe { native_cl_config_at(&at_ceiling.into(), &conf, got, &mut now) };
        let cost = virtual_queue::cost_of_byte(model);
        prop_assert_eq!(now, class::config_at(&at_ceiling, &floors, cost).into());
    }
}

/// Of any length in bits, and at the ends.
fn any_number() -> impl Strategy<Value = u64> {
    let ends = prop_oneof![Just(0), Just(u64::MAX), Just(1 << 63), Just((1 << 63) - 1)];
    prop_oneof![ends, (any::<u64>(), 0u32..64).prop_map(|(number, shift)| number >> shift)]
}

prop_compose! {
    fn any_sharers()(
        count in prop_oneof![0u32..20, any::<u32>()], weight in prop_oneof![0u32..2000, any::<u32>()],
        lightest in prop_oneof![0u32..200, any::<u32>()],
        reserved in prop_oneof![Just(0), 0u64..1 << 25, any::<u64>()],
    ) -> Sharers {
        Sharers { count, weight, lightest, reserved }
    }
}

const TCP: u8 = 6;
const UDP: u8 = 17;
const NOT_ECT: u8 = 0;
const ECT0: u8 = 2;
const CE: u8 = 3;

/// One second in nanoseconds: thresholds are so far apart that the time a test takes does not matter.
const S: u64 = 1_000_000_000;
const CONF: intf::QueueConf = intf::QueueConf {
    cost: 1000 << 24,
    burst_ns: S,
    mark_ns: 100 * S,
    large_drop_ns: 200 * S,
    drop_ns: 300 * S,
};

/// One line of the table: a packet, the queue it meets, and what must come of it.
#[derive(Clone)]
struct Row {
    what: &'static str,
    direction: Direction,
    backlog_s: u64,
    frame: Vec<u8>,
    segments: u32,
    segment_bytes: u32,
    mark: u32,
    flags: u32,
    returns: u32,
    outcome: &'static str,
    /// What was charged, on the wire.
    wire_bytes: u64,
    ecn: u8,
}

fn row(
    what: &'static str,
    backlog_s: u64,
    frame: Vec<u8>,
    returns: u32,
    outcome: &'static str,
    wire_bytes: u64,
    ecn: u8,
) -> Row {
    Row {
        what,
        direction: Direction::Egress,
        backlog_s,
        frame,
        segments: 0,
        segment_bytes: 0,
        mark: 0,
        flags: intf::FLAG_LOOPBACK,
        returns,
        outcome,
        wire_bytes,
        ecn,
    }
}

/// An Ethernet frame with an IP packet of `bytes`; the TCP header has 20 bytes of options if it fits.
fn frame(v6: bool, protocol: u8, ecn: u8, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; 14 + bytes];
    let transport = if v6 {
        frame[12..14].copy_from_slice(&[0x86, 0xdd]);
        frame[14] = 0x60;
        frame[15] = ecn << 4;
        frame[18..20].copy_from_slice(&(bytes as u16 - 40).to_be_bytes());
        frame[20] = protocol;
        54
    } else {
        frame[12..14].copy_from_slice(&[0x08, 0x00]);
        frame[14] = 0x45;
        frame[15] = ecn;
        frame[16..18].copy_from_slice(&(bytes as u16).to_be_bytes());
        frame[23] = protocol;
        34
    };
    if protocol == TCP && frame.len() > transport + 12 {
        frame[transport + 12] = 8 << 4;
    }
    frame
}

fn ecn_of(frame: &[u8], v6: bool) -> u8 {
    if v6 { (frame[15] >> 4) & 3 } else { frame[15] & 3 }
}

fn table() -> Vec<Row> {
    let v4 = |protocol, ecn, bytes| frame(false, protocol, ecn, bytes);
    let v6 = |protocol, ecn, bytes| frame(true, protocol, ecn, bytes);
    let inward = |row: Row| Row { direction: Direction::Ingress, ..row };
    let gso = |row: Row, segments, segment_bytes| Row { segments, segment_bytes, ..row };
    vec![
        row("idle: pass", 0, v4(TCP, ECT0, 1500), 1, "pass", 1514, ECT0),
        row("below the mark: pass", 50, v4(TCP, ECT0, 1500), 1, "pass", 1514, ECT0),
        row("above the mark, ECT: CE", 150, v4(TCP, ECT0, 1500), 1, "mark", 1514, CE),
        row("above the mark, CE stays", 150, v4(TCP, CE, 1500), 1, "mark", 1514, CE),
        row("IPv6 too", 150, v6(TCP, ECT0, 1500), 1, "mark", 1514, CE),
        row("UDP with ECT too", 150, v4(UDP, ECT0, 1500), 1, "mark", 1514, CE),
        row("reserve, small TCP: told", 250, v4(TCP, NOT_ECT, 60), 3, "slow", 74, NOT_ECT),
        row("reserve, small ECT: CE", 250, v4(TCP, ECT0, 60), 1, "mark", 74, CE),
        row("reserve, small UDP: pass", 250, v4(UDP, NOT_ECT, 60), 1, "pass", 74, NOT_ECT),
        row("reserve, large: drop", 250, v4(TCP, ECT0, 1500), 2, "drop_reserve", 1514, ECT0),
        row(
            "reserve, large UDP: drop",
            250,
            v4(UDP, NOT_ECT, 1500),
            2,
            "drop_reserve",
            1514,
            NOT_ECT,
        ),
        row("full: drop small", 350, v4(TCP, ECT0, 60), 2, "drop_full", 74, ECT0),
        row("full, IPv6: drop", 350, v6(UDP, ECT0, 1500), 2, "drop_full", 1514, ECT0),
        inward(row("inward: CE", 150, v4(TCP, ECT0, 1500), 1, "mark", 1514, CE)),
        inward(row("inward: drop is 0", 350, v4(TCP, ECT0, 1500), 0, "drop_full", 1514, ECT0)),
        inward(row("inward, small: pass", 250, v4(TCP, NOT_ECT, 60), 1, "pass", 74, NOT_ECT)),
        // IP 20 and TCP 32 bytes, and 14 of Ethernet, with each segment.
        gso(row("segments", 0, v4(TCP, ECT0, 52 + 7 * 400), 1, "pass", 7 * 466, ECT0), 7, 400),
        gso(
            row("last one short", 0, v4(TCP, ECT0, 52 + 2000), 1, "pass", 2000 + 132, ECT0),
            2,
            1448,
        ),
        gso(
            row("segments unsaid", 0, v4(TCP, ECT0, 52 + 2000), 1, "pass", 2000 + 132, ECT0),
            0,
            1448,
        ),
        gso(
            row("IPv6 segments", 0, v6(TCP, ECT0, 72 + 2 * 1428), 1, "pass", 2 * 1514, ECT0),
            2,
            1428,
        ),
        gso(
            row("UDP segments", 0, v4(UDP, ECT0, 28 + 2 * 1472), 1, "pass", 2 * 1514, ECT0),
            2,
            1472,
        ),
        Row { flags: 0, ..row("loopback", 350, v4(TCP, ECT0, 1500), 1, "exempt", 1514, ECT0) },
        Row { mark: 0x7d9a_7e1d, ..row("dead", 0, v4(TCP, ECT0, 1500), 2, "", 0, ECT0) },
        inward(Row {
            mark: 0x7d9a_7e1d,
            ..row("dead inward", 0, v4(TCP, 2, 1500), 0, "", 0, ECT0)
        }),
    ]
}

/// The context that BPF_PROG_TEST_RUN takes for a packet.
fn context(row: &Row) -> Vec<u8> {
    let mut skb = vec![0u8; 192];
    let mut put = |offset: usize, value: u32| {
        skb[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    };
    // Offsets of mark, gso_segs and gso_size in struct __sk_buff, which is UAPI.
    put(8, row.mark);
    put(164, row.segments);
    put(176, row.segment_bytes);
    skb
}

#[test]
fn root_the_loaded_program_follows_the_table() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_the_loaded_program_follows_the_table: needs root");
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm(&mut storage, &Sharing::default()).unwrap();
    for row in table() {
        let key = (intf::index(row.direction) as u32).to_ne_bytes();
        let limit = intf::Limit { queue: [CONF; 2], flags: row.flags, ..Default::default() };
        let zero = 0u32.to_ne_bytes();
        nrm.maps.limit.update(&zero, bytemuck::bytes_of(&limit), MapFlags::ANY).unwrap();
        let finish_ns = if row.backlog_s == 0 { 0 } else { monotonic_ns() + row.backlog_s * S };
        let queue = intf::NrmQueue::from(intf::Queue { finish_ns, ..Default::default() });
        nrm.maps.queues_of_limit.update(&key, bytemuck::bytes_of(&queue), MapFlags::ANY).unwrap();
        let cpus = nrm.maps.counters.lookup_percpu(&key, MapFlags::ANY).unwrap().unwrap();
        let clear = vec![vec![0u8; cpus[0].len()]; cpus.len()];
        nrm.maps.counters.update_percpu(&key, &clear, MapFlags::ANY).unwrap();

        let (mut context, mut out) = (context(&row), row.frame.clone());
        let program = match row.direction {
            Direction::Egress => &nrm.progs.nrm_egress,
            Direction::Ingress => &nrm.progs.nrm_ingress,
        };
        let began_ns = monotonic_ns();
        let run = program.test_run(ProgramInput {
            context_in: Some(&mut context),
            data_in: Some(&row.frame),
            data_out: Some(&mut out),
            ..Default::default()
        });
        assert_eq!(run.unwrap().return_value, row.returns, "{}: return value", row.what);
        let v6 = row.frame[12] == 0x86;
        assert_eq!(ecn_of(&out, v6), row.ecn, "{}: ECN", row.what);

        let mut counted = intf::Counters::default();
        for cpu in nrm.maps.counters.lookup_percpu(&key, MapFlags::ANY).unwrap().unwrap() {
            counted.add(&bytemuck::pod_read_unaligned(&cpu[..size_of::<intf::Counters>()]));
        }
        for (index, outcome) in intf::OUTCOME_TABLE.iter().enumerate() {
            let expected = if outcome.name == row.outcome { (1, row.wire_bytes) } else { (0, 0) };
            let found = (counted.packets[index], counted.bytes[index]);
            assert_eq!(found, expected, "{}: {}", row.what, outcome.name);
            let stamped =
                began_ns <= counted.last_ns[index] && counted.last_ns[index] <= monotonic_ns();
            let expected = outcome.slows() && outcome.name == row.outcome;
            assert_eq!(stamped, expected, "{}: time of {}", row.what, outcome.name);
        }
        let value = nrm.maps.queues_of_limit.lookup(&key, MapFlags::ANY).unwrap().unwrap();
        let after: intf::NrmQueue = bytemuck::pod_read_unaligned(&value);
        let charged = matches!(row.outcome, "pass" | "mark" | "slow");
        let cost_ns = if charged { row.wire_bytes * 1000 } else { 0 };
        if row.backlog_s > 0 || !charged {
            assert_eq!(after.finish_ns, finish_ns + cost_ns, "{}: finish time", row.what);
        } else {
            let credit = monotonic_ns().wrapping_add(cost_ns).wrapping_sub(after.finish_ns);
            assert!((S..2 * S).contains(&credit), "{}: an idle queue keeps its burst", row.what);
        }
    }
}

/// The linear law drops what can be neither marked nor told, sooner or later.
#[test]
fn root_early_drops_happen_in_the_loaded_program() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_early_drops_happen_in_the_loaded_program: needs root");
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm(&mut storage, &Sharing::default()).unwrap();
    // A byte costs nothing here, so the backlog stays in the middle: half of the packets are dropped.
    let conf = intf::QueueConf { cost: 1, ..CONF };
    let limit = intf::Limit { queue: [conf; 2], flags: intf::FLAG_LOOPBACK, ..Default::default() };
    let key = 0u32.to_ne_bytes();
    nrm.maps.limit.update(&key, bytemuck::bytes_of(&limit), MapFlags::ANY).unwrap();
    let queue = intf::NrmQueue::from(intf::Queue {
        finish_ns: monotonic_ns() + 150 * S,
        ..Default::default()
    });
    nrm.maps.queues_of_limit.update(&key, bytemuck::bytes_of(&queue), MapFlags::ANY).unwrap();
    let packet = frame(false, UDP, NOT_ECT, 1500);
    let mut returned = [0u32; 4];
    for _ in 0..400 {
        let input = ProgramInput { data_in: Some(&packet), ..Default::default() };
        let run = nrm.progs.nrm_egress.test_run(input).unwrap();
        returned[run.return_value as usize] += 1;
    }
    // 400 fair coins: fewer than 100 or more than 300 of a kind is 1 in 10^24.
    assert!(returned[1] > 100 && returned[2] > 100, "{returned:?}");
    assert_eq!(returned[0] + returned[3], 0, "{returned:?}");
}

/// What a queue is behind stays as many bytes when the rate changes, and is no charge of the epoch; an epoch
/// stays as many bursts.
#[test]
fn root_a_new_rate_rescales_the_backlog_in_the_loaded_program() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_a_new_rate_rescales_the_backlog_in_the_loaded_program: needs root");
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm(&mut storage, &Sharing::default()).unwrap();
    let (packet, flags) = (frame(false, TCP, NOT_ECT, 1500), intf::FLAG_LOOPBACK);
    let limit = intf::Limit { queue: [CONF; 2], flags, ..Default::default() };
    let zero = 0u32.to_ne_bytes();
    nrm.maps.limit.update(&zero, bytemuck::bytes_of(&limit), MapFlags::ANY).unwrap();
    // What a byte cost before, the backlog then and as it is to be now.
    let rows = [
        ("as before", CONF.cost, 90, 90),
        ("never met a packet", 0, 90, 90),
        ("faster by far", 100 * CONF.cost, 2000, 20),
        ("slower", CONF.cost / 2, 30, 60),
        ("slower by far: up to the drop threshold", CONF.cost / 1000, 50, 300),
    ];
    for program in [&nrm.progs.nrm_egress, &nrm.progs.nrm_ingress] {
        let direction = u32::from(std::ptr::eq(program, &nrm.progs.nrm_ingress)).to_ne_bytes();
        for (what, cost, backlog_s, expected_s) in rows {
            let now_ns = monotonic_ns();
            let was = intf::NrmQueue::from(intf::Queue {
                finish_ns: now_ns + backlog_s * S,
                epoch_base_ns: now_ns,
                epoch_start_ns: now_ns,
                epoch_us: 600_000_000,
                cost,
                ..Default::default()
            });
            let bytes = bytemuck::bytes_of(&was);
            nrm.maps.queues_of_limit.update(&direction, bytes, MapFlags::ANY).unwrap();
            let input = ProgramInput { data_in: Some(&packet), ..Default::default() };
            let returned = program.test_run(input).unwrap().return_value;
            let value = nrm.maps.queues_of_limit.lookup(&direction, MapFlags::ANY).unwrap();
            let is: intf::NrmQueue = bytemuck::pod_read_unaligned(&value.unwrap());
            assert_eq!(is.cost, CONF.cost, "{what}");
            let charged_ns = if expected_s < 100 { 1514 * 1000 } else { 0 };
            assert_eq!(returned == 1, charged_ns > 0, "{what}: {returned}");
            let moved = |is: u64, was: u64| is.wrapping_sub(was) as i64;
            let base = moved(is.epoch_base_ns, was.epoch_base_ns);
            assert_eq!(moved(is.finish_ns, was.finish_ns), base + charged_ns, "{what}");
            // A ratio is exact to 2^-16, and the packet came a little later.
            let (backlog, expected) = (base + (backlog_s * S) as i64, (expected_s * S) as i64);
            let error = (backlog - expected).abs();
            assert!(error < expected / 20 + S as i64 / 2, "{what}: {backlog} for {expected}");
            if cost == 100 * CONF.cost {
                assert!((5_900_000..=6_000_000).contains(&is.epoch_us), "{what}: {}", is.epoch_us);
            }
        }
    }
}

/// What a group lends has an end that the program itself sees.
#[test]
fn root_a_rate_that_is_lent_ends_in_the_loaded_program() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_a_rate_that_is_lent_ends_in_the_loaded_program: needs root");
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm(&mut storage, &Sharing::default()).unwrap();
    // A backlog that the one has room for and the other drops.
    let tight = intf::QueueConf { drop_ns: 1, large_drop_ns: 1, mark_ns: 1, ..CONF };
    let flags = intf::FLAG_LOOPBACK;
    let then = intf::Limit { queue: [tight; 2], flags, ..Default::default() };
    let roomy =
        intf::QueueConf { drop_ns: 900 * S, large_drop_ns: 900 * S, mark_ns: 800 * S, ..CONF };
    let returned = |until_ns: u64| {
        let limit =
            intf::Limit { queue: [roomy; 2], flags, until_ns: [until_ns, 0], ..Default::default() };
        for (key, limit) in [(0u32, limit), (1, then)] {
            let bytes = bytemuck::bytes_of(&limit);
            nrm.maps.limit.update(&key.to_ne_bytes(), bytes, MapFlags::ANY).unwrap();
        }
        [&nrm.progs.nrm_egress, &nrm.progs.nrm_ingress].map(|program| {
            let queue = intf::NrmQueue::from(intf::Queue {
                finish_ns: monotonic_ns() + 150 * S,
                ..Default::default()
            });
            for key in [0u32, 1] {
                let bytes = bytemuck::bytes_of(&queue);
                nrm.maps.queues_of_limit.update(&key.to_ne_bytes(), bytes, MapFlags::ANY).unwrap();
            }
            let packet = frame(false, UDP, NOT_ECT, 1500);
            let input = ProgramInput { data_in: Some(&packet), ..Default::default() };
            program.test_run(input).unwrap().return_value
        })
    };
    assert_eq!(returned(0), [1, 1], "for ever");
    assert_eq!(returned(u64::MAX), [1, 1]);
    assert_eq!(returned(1), [2, 1], "the end has come, of one direction");
}

/// Of a limit that drops all, one map at a time has no value for ingress, as if it had been made for less.
#[test]
fn root_a_packet_that_finds_no_state_passes() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_a_packet_that_finds_no_state_passes: needs root");
        return;
    }
    let drop_all = intf::Limit {
        queue: [CONF; 2],
        flags: intf::FLAG_LOOPBACK,
        // Its lease is over: the rate is that of another value.
        until_ns: [0, 1],
        ..Default::default()
    };
    for (missing, returns) in [("", 0), ("limit", 1), ("queues_of_limit", 1), ("counters", 1)] {
        let mut storage = MaybeUninit::uninit();
        let mut open = open_nrm(&mut storage, &Sharing::default()).unwrap();
        open.progs.tune.set_autoload(false);
        let maps = &mut open.maps;
        for map in [&mut maps.limit, &mut maps.queues_of_limit, &mut maps.counters] {
            if map.name() == missing {
                map.set_max_entries(1).unwrap();
            }
        }
        prepare(open.open_object_mut(), "nrm").unwrap();
        let nrm = open.load().unwrap();
        let queue = intf::NrmQueue::from(intf::Queue {
            finish_ns: monotonic_ns() + 350 * S,
            ..Default::default()
        });
        let values = [
            (&nrm.maps.limit, [0, 2], bytemuck::bytes_of(&drop_all)),
            (&nrm.maps.queues_of_limit, [0, 1], bytemuck::bytes_of(&queue)),
        ];
        for (map, keys, value) in values {
            for key in keys.into_iter().filter(|key| *key < map.max_entries()) {
                map.update(&key.to_ne_bytes(), value, MapFlags::ANY).unwrap();
            }
        }
        let packet = frame(false, UDP, NOT_ECT, 1500);
        let input = ProgramInput { data_in: Some(&packet), ..Default::default() };
        let run = nrm.progs.nrm_ingress.test_run(input).unwrap();
        assert_eq!(run.return_value, returns, "without {missing:?}");
    }
}

/// The program of a pool still runs for a cgroup that has left its limit. The kernel's test run has no slot.
#[test]
fn root_a_packet_of_a_cgroup_without_a_slot_passes() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_a_packet_of_a_cgroup_without_a_slot_passes: needs root");
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let pooled = Sharing { slots: Some(None), ..Sharing::default() };
    let nrm = load_nrm(&mut storage, &pooled).unwrap();
    let flags = intf::FLAG_LOOPBACK;
    let limit = intf::Limit { queue: [CONF; 2], flags, ..Default::default() };
    let queue = intf::NrmQueue::from(intf::Queue {
        finish_ns: monotonic_ns() + 350 * S,
        ..Default::default()
    });
    // In the slot that no limit gets.
    let zero = 0u32.to_ne_bytes();
    nrm.maps.limit.update(&zero, bytemuck::bytes_of(&limit), MapFlags::ANY).unwrap();
    for key in [0u32, 1] {
        let bytes = bytemuck::bytes_of(&queue);
        nrm.maps.queues_of_limit.update(&key.to_ne_bytes(), bytes, MapFlags::ANY).unwrap();
    }
    for program in [&nrm.progs.nrm_egress, &nrm.progs.nrm_ingress] {
        let packet = frame(false, UDP, NOT_ECT, 1500);
        let input = ProgramInput { data_in: Some(&packet), ..Default::default() };
        assert_eq!(program.test_run(input).unwrap().return_value, 1);
    }
}
