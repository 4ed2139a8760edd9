//! The C of the kernel against its Rust model, and the loaded programs on a table of packets.

use libbpf_rs::{MapCore, MapFlags, ProgramInput};
use proptest::prelude::*;
use tidegate_core::{
    DropReason, Nanos, Rate, Verdict,
    edt::{self as model, Class, Flow},
    fair_share,
    queue_options::VirtualQueueOptions,
    scheme::QueueKind,
};

use super::*;
use crate::{bpf::open_skel, clock::monotonic_ns};

/// `struct edt_class`.
#[repr(C)]
#[derive(Clone, Copy)]
struct NativeClass {
    finish_ns: u64,
    latest_ns: u64,
    share: u64,
}

/// `struct edt_flow`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
struct NativeFlow {
    finish_ns: u64,
    last_ns: u64,
    mean_ns: u64,
    epoch: u32,
    room_epoch: u32,
}

unsafe extern "C" {
    fn native_edt_packet(
        conf: *const intf::QueueConf,
        class: *mut NativeClass,
        carry: *mut u32,
        flow: *mut NativeFlow,
        now_ns: u64,
        wire_bytes: u32,
        ecn_capable: u8,
        held: u8,
        departure_ns: *mut u64,
    ) -> u32;
    static native_edt_flow_bytes: u32;
}

proptest! {
    /// Packet by packet, verdict, departure and state of the header are the model's.
    #[test]
    fn the_header_is_the_model(
        bit_s in 8_000u64..=100_000_000_000,
        start in 0u64..1 << 62,
        shares in prop::collection::vec(prop_oneof![0..2 * fair_share::ONE, any::<u64>()], 8),
        steps in prop::collection::vec(
            (0u64..20_000_000, 0usize..4, prop_oneof![1u32..200, 1000u32..70_000, any::<u32>()],
             any::<bool>(), any::<bool>(), 0u64..1000),
            1..200,
        ),
    ) {
        let options = VirtualQueueOptions::new(Rate::from_bit_s(bit_s).unwrap());
        let config = VirtualQueueOptions { kind: QueueKind::Departures, ..options }.config().unwrap();
        let conf = intf::QueueConf::from(config);
        let mut class = Class::new();
        let mut flows = [Flow::default(); 4];
        let mut native = NativeClass { finish_ns: 0, latest_ns: 0, share: class.share };
        let mut native_flows = [NativeFlow::default(); 4];
        let (mut carry, mut now) = (0u32, start);
        for (step, (gap, flow, wire_bytes, ecn_capable, held, back)) in steps.into_iter().enumerate() {
            now = (now + gap).saturating_sub(back);
            class.share = shares[step / 25];
            native.share = class.share;
            let packet = model::Packet { wire_bytes, ecn_capable, held };
            let expected = class.on_packet(&config, &mut flows[flow], Nanos(now), &packet);
            let mut departure_ns = 0;
            // SAFETY: every pointer is to a live value of the layout that the header declares.
            let got = unsafe {
                native_edt_packet(
                    &conf, &mut native, &mut carry, &mut native_flows[flow], now, wire_bytes,
                    ecn_capable.into(), held.into(), &mut departure_ns,
                )
            };
            let verdict = match got {
                0 => Verdict::Pass,
                1 => Verdict::Mark,
                3 => Verdict::Drop(DropReason::Full),
                other => panic!("no verdict {other}"),
            };
            prop_assert_eq!((verdict, Nanos(departure_ns)), (expected.verdict, expected.at));
            prop_assert_eq!((native.finish_ns, native.latest_ns), (class.finish.0, class.latest.0));
            prop_assert_eq!(carry, class.carry);
            let (flow, native) = (flows[flow], native_flows[flow]);
            prop_assert_eq!(
                (native.finish_ns, native.last_ns, native.mean_ns),
                (flow.finish.0, flow.last.0, flow.mean.0)
            );
        }
    }
}

#[test]
fn a_flow_is_as_long_as_the_headers() {
    // SAFETY: a constant of the test's C library, of this type.
    assert_eq!(unsafe { native_edt_flow_bytes } as usize, size_of::<NativeFlow>());
}

/// One second in nanoseconds: thresholds are so far apart that the time a test takes does not matter.
const S: u64 = 1_000_000_000;
/// A byte takes a microsecond; a flow has no more than a frame saved up.
const CONF: intf::QueueConf = intf::QueueConf {
    cost: 1000 << 24,
    burst_ns: 0,
    mark_ns: 3 * S / 2,
    large_drop_ns: 0,
    drop_ns: 3 * S,
};
const ECT0: u8 = 2;
const CE: u8 = 3;
const UDP: u8 = 17;

/// One line of the table: a packet, the flow's and the class's backlog that it meets, what must come of it.
struct Row {
    what: &'static str,
    hook: AttachPoint,
    flow_s: u64,
    class_s: u64,
    ecn: u8,
    mark: u32,
    own_stamp_s: u64,
    returns: u32,
    outcome: &'static str,
    ecn_after: u8,
    /// When it leaves, in tenths of a second from now; none: at once.
    leaves_ds: Option<u64>,
}

fn table() -> Vec<Row> {
    let row = |what, flow_s, ecn, outcome, ecn_after, leaves_ds| Row {
        what,
        hook: AttachPoint::Cgroup,
        flow_s,
        class_s: 0,
        ecn,
        mark: 0,
        own_stamp_s: 0,
        returns: 1,
        outcome,
        ecn_after,
        leaves_ds,
    };
    let next = u32::MAX; // TC_ACT_UNSPEC
    let on = |hook, returns, row: Row| Row { hook, returns, ..row };
    vec![
        row("idle: at once", 0, 0, "pass", 0, None),
        row("its flow's turn", 1, ECT0, "pass", ECT0, Some(10)),
        Row { own_stamp_s: 2, ..row("TCP's own time is later", 1, 0, "pass", 0, Some(20)) },
        Row { own_stamp_s: 1 << 30, ..row("a time of another clock", 1, 0, "pass", 0, Some(10)) },
        row("above the mark, ECT: CE", 2, ECT0, "mark", CE, Some(20)),
        row("above the mark, no ECT: waits", 2, 0, "pass", 0, Some(20)),
        Row { returns: 2, ..row("beyond the horizon", 4, ECT0, "drop_full", ECT0, None) },
        Row {
            class_s: 4,
            ..row("the class is ahead by less than the horizon and lead", 0, 0, "pass", 0, Some(10))
        },
        Row { class_s: 7, returns: 2, ..row("by more", 0, 0, "drop_full", 0, None) },
        Row { mark: 0x7d9a_7e1d, returns: 2, ..row("dead", 0, 0, "", 0, None) },
        on(AttachPoint::Device, next, row("device: at once", 0, 0, "pass", 0, None)),
        on(AttachPoint::Device, next, row("device: its flow's turn", 1, 0, "pass", 0, Some(10))),
        on(AttachPoint::Device, next, row("device: CE", 2, ECT0, "mark", CE, Some(20))),
        on(AttachPoint::Device, 2, row("device: beyond the horizon", 4, 0, "drop_full", 0, None)),
        on(AttachPoint::Port, next, row("port: CE", 2, ECT0, "mark", CE, Some(20))),
        on(AttachPoint::Port, 2, row("port: beyond the horizon", 4, 0, "drop_full", 0, None)),
    ]
}

/// An Ethernet frame of UDP.
fn frame(ecn: u8) -> Vec<u8> {
    let mut frame = vec![0; 14 + 986];
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    frame[14] = 0x45;
    frame[15] = ecn;
    frame[16..18].copy_from_slice(&986u16.to_be_bytes());
    frame[23] = UDP;
    frame
}

/// Offsets of mark and tstamp in struct __sk_buff, which is UAPI.
const SKB_MARK: usize = 8;
const SKB_TSTAMP: usize = 152;
const SKB_BYTES: usize = 192;

#[test]
fn root_edt_the_loaded_program_follows_the_table() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_edt_the_loaded_program_follows_the_table: needs root");
        return;
    }
    let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let open = open_skel::<skel::edt::EdtSkelBuilder>(&mut storage, "edt").unwrap();
    let edt = load_skel(open, "edt").unwrap();
    let zero = 0u32.to_ne_bytes();
    for row in table() {
        let limit =
            intf::Limit { queue: [CONF; 2], flags: intf::FLAG_LOOPBACK, ..Default::default() };
        edt.maps.limit.update(&zero, bytemuck::bytes_of(&limit), MapFlags::ANY).unwrap();
        let now = monotonic_ns();
        let at = |seconds: u64| if seconds == 0 { 0 } else { now + seconds * S };
        // An epoch that does not end while the test runs.
        let queue = intf::Queue {
            finish_ns: at(row.class_s),
            epoch_start_ns: now,
            epoch_us: u32::MAX,
            share: fair_share::ONE as u32,
            ..Default::default()
        };
        let state = intf::EdtQueue { common: queue, ..Default::default() };
        edt.maps.queues_of_limit.update(&zero, bytemuck::bytes_of(&state), MapFlags::ANY).unwrap();
        // The place of the packet's flow depends on a random seed: fill them all.
        let flow = NativeFlow { finish_ns: at(row.flow_s), ..Default::default() };
        for place in 0..model::FLOWS as u32 {
            let key = place.to_ne_bytes();
            edt.maps.flows.update(&key, bytemuck::bytes_of(&flow), MapFlags::ANY).unwrap();
        }
        let cpus = edt.maps.counters.lookup_percpu(&zero, MapFlags::ANY).unwrap().unwrap();
        let clear = vec![vec![0u8; cpus[0].len()]; cpus.len()];
        edt.maps.counters.update_percpu(&zero, &clear, MapFlags::ANY).unwrap();

        let mut context = vec![0u8; SKB_BYTES];
        context[SKB_MARK..SKB_MARK + 4].copy_from_slice(&row.mark.to_ne_bytes());
        context[SKB_TSTAMP..SKB_TSTAMP + 8].copy_from_slice(&at(row.own_stamp_s).to_ne_bytes());
        let mut context_after = vec![0u8; SKB_BYTES];
        let sent = frame(row.ecn);
        let mut received = sent.clone();
        let program = match row.hook {
            AttachPoint::Cgroup => &edt.progs.edt_cgroup,
            AttachPoint::Device => &edt.progs.edt_device,
            AttachPoint::Port => &edt.progs.edt_port,
        };
        let run = program.test_run(ProgramInput {
            context_in: Some(&mut context),
            context_out: Some(&mut context_after),
            data_in: Some(&sent),
            data_out: Some(&mut received),
            ..Default::default()
        });
        assert_eq!(run.unwrap().return_value, row.returns, "{}: return value", row.what);
        assert_eq!(received[15] & 3, row.ecn_after, "{}: ECN", row.what);

        let mut counted = intf::Counters::default();
        for cpu in edt.maps.counters.lookup_percpu(&zero, MapFlags::ANY).unwrap().unwrap() {
            counted.add(&bytemuck::pod_read_unaligned(&cpu[..size_of::<intf::Counters>()]));
        }
        for (index, outcome) in intf::OUTCOME_TABLE.iter().enumerate() {
            let expected = if outcome.name == row.outcome { (1, 1000) } else { (0, 0) };
            let found = (counted.packets[index], counted.bytes[index]);
            assert_eq!(found, expected, "{}: {}", row.what, outcome.name);
        }
        let mut stamp = [0; 8];
        stamp.copy_from_slice(&context_after[SKB_TSTAMP..SKB_TSTAMP + 8]);
        let leaves_ns = u64::from_ne_bytes(stamp);
        match row.leaves_ds {
            None => assert_eq!(leaves_ns, at(row.own_stamp_s), "{}: time", row.what),
            Some(ds) => {
                let leaves_ns = leaves_ns.wrapping_sub(now);
                let range = ds * S / 10 - S / 2..ds * S / 10 + S / 2;
                assert!(range.contains(&leaves_ns), "{}: {leaves_ns} ns", row.what);
            }
        }
    }
}

/// The debt of a class is kept in bytes: at another rate they take another time.
#[test]
fn root_edt_a_class_follows_its_rate() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_edt_a_class_follows_its_rate: needs root");
        return;
    }
    let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let open = open_skel::<skel::edt::EdtSkelBuilder>(&mut storage, "edt").unwrap();
    let edt = load_skel(open, "edt").unwrap();
    let zero = 0u32.to_ne_bytes();
    // As much faster, the backlog before, and after.
    for (faster, before_s, after_s) in [(1, 100, 100), (10, 100, 10), (1000, 100, 0)] {
        let cost = CONF.cost / faster;
        let limit = intf::Limit {
            queue: [intf::QueueConf { cost, ..CONF }; 2],
            flags: intf::FLAG_LOOPBACK,
            ..Default::default()
        };
        edt.maps.limit.update(&zero, bytemuck::bytes_of(&limit), MapFlags::ANY).unwrap();
        let now = monotonic_ns();
        let queue = intf::Queue {
            finish_ns: now + before_s * S,
            cost: CONF.cost,
            epoch_start_ns: now,
            epoch_us: 1_000_000_000,
            share: fair_share::ONE as u32,
            ..Default::default()
        };
        let state = intf::EdtQueue { common: queue, ..Default::default() };
        edt.maps.queues_of_limit.update(&zero, bytemuck::bytes_of(&state), MapFlags::ANY).unwrap();
        let input = ProgramInput { data_in: Some(&frame(0)), ..Default::default() };
        edt.progs.edt_cgroup.test_run(input).unwrap();
        let value = edt.maps.queues_of_limit.lookup(&zero, MapFlags::ANY).unwrap().unwrap();
        let is = bytemuck::pod_read_unaligned::<intf::EdtQueue>(&value).common;
        // What the packet itself may have added, and the time that this took, is far less than a second.
        let behind_ns = is.finish_ns.saturating_sub(now);
        assert!(behind_ns.abs_diff(after_s * S) < S, "{faster} times: {behind_ns} ns");
        assert_eq!(is.cost, cost);
    }
}

/// A rate that a group lends has an end, which the program itself sees.
#[test]
fn root_edt_a_rate_that_is_lent_ends_in_the_loaded_program() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_edt_a_rate_that_is_lent_ends_in_the_loaded_program: needs root");
        return;
    }
    let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let open = open_skel::<skel::edt::EdtSkelBuilder>(&mut storage, "edt").unwrap();
    let edt = load_skel(open, "edt").unwrap();
    let roomy = intf::QueueConf { drop_ns: 900 * S, ..CONF };
    // A backlog that the one has room for and the other drops.
    let returned = |until_ns: u64| {
        let flags = intf::FLAG_LOOPBACK;
        let then = intf::Limit { queue: [CONF; 2], flags, ..Default::default() };
        let lent = intf::Limit { queue: [roomy; 2], until_ns: [until_ns, 0], ..then };
        for (key, limit) in [(0u32, lent), (1, then)] {
            let bytes = bytemuck::bytes_of(&limit);
            edt.maps.limit.update(&key.to_ne_bytes(), bytes, MapFlags::ANY).unwrap();
        }
        let finish_ns = monotonic_ns() + 7 * S;
        let common = intf::Queue { finish_ns, cost: CONF.cost, ..Default::default() };
        let state = intf::EdtQueue { common, ..Default::default() };
        let zero = 0u32.to_ne_bytes();
        edt.maps.queues_of_limit.update(&zero, bytemuck::bytes_of(&state), MapFlags::ANY).unwrap();
        let input = ProgramInput { data_in: Some(&frame(0)), ..Default::default() };
        edt.progs.edt_cgroup.test_run(input).unwrap().return_value
    };
    assert_eq!([returned(0), returned(u64::MAX)], [1, 1], "for ever, and for long");
    assert_eq!(returned(1), 2, "the end has come");
}

/// The lease of a limit that drops all is over, and there is no value for what holds then.
#[test]
fn root_edt_a_packet_that_finds_no_limit_passes() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_edt_a_packet_that_finds_no_limit_passes: needs root");
        return;
    }
    let next = u32::MAX; // TC_ACT_UNSPEC
    for (entries, expected) in [(intf::LIMITS as u32, [2; 3]), (1, [1, next, next])] {
        let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
        let mut open = open_skel::<skel::edt::EdtSkelBuilder>(&mut storage, "edt").unwrap();
        open.maps.limit.set_max_entries(entries).unwrap();
        let edt = load_skel(open, "edt").unwrap();
        let flags = intf::FLAG_LOOPBACK;
        let limit = intf::Limit { queue: [CONF; 2], flags, until_ns: [1, 0], ..Default::default() };
        for key in (0..2).filter(|key| *key < entries) {
            let bytes = bytemuck::bytes_of(&limit);
            edt.maps.limit.update(&key.to_ne_bytes(), bytes, MapFlags::ANY).unwrap();
        }
        let finish_ns = monotonic_ns() + 7 * S;
        let common = intf::Queue { finish_ns, ..Default::default() };
        let state = intf::EdtQueue { common, ..Default::default() };
        let zero = 0u32.to_ne_bytes();
        edt.maps.queues_of_limit.update(&zero, bytemuck::bytes_of(&state), MapFlags::ANY).unwrap();
        let programs = [&edt.progs.edt_cgroup, &edt.progs.edt_device, &edt.progs.edt_port];
        let returned = programs.map(|program| {
            let input = ProgramInput { data_in: Some(&frame(0)), ..Default::default() };
            program.test_run(input).unwrap().return_value
        });
        assert_eq!(returned, expected, "{entries} values");
    }
}
