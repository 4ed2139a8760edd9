//! The C of the kernel against its Rust model, and the loaded programs on a table of packets.

use libbpf_rs::{MapCore, MapFlags, ProgramInput};
use proptest::prelude::*;
use tidegate_core::{
    Bytes, Colour, Meter, Nanos, Rate, Scheme, Span, TokenBucket,
    exempt::Exempt,
    meter::{ColourMode, MeterConfig, MeterKind},
    police::{Action, ColourMap, Dscp, MeterOptions, MeterType, Policy},
    prefixes::MAX_PREFIXES,
    queue_options::VirtualQueueOptions,
    token_bucket::BucketConfig,
};

use super::*;
use crate::{bpf::open_skel, exempt::trie_of};

/// `struct pl_packet`.
#[repr(C)]
pub(super) struct NativePacket {
    pub(super) wire_bytes: u32,
    pub(super) may_owe: u32,
}

unsafe extern "C" {
    fn native_pl_take(
        bucket: *const intf::Bucket,
        full_ns: *mut u64,
        now_ns: u64,
        packet: *const NativePacket,
        carry: *mut u64,
    ) -> u32;
    pub(super) fn native_pl_colour(
        policy: *const intf::Policy,
        meter: *mut intf::Meter,
        carry: *mut u64,
        now_ns: u64,
        packet: *const NativePacket,
        incoming: u32,
    ) -> u32;
    fn native_pl_incoming(policy: *const intf::Policy, dscp: u8) -> u32;
}

/// `enum pl_colour`.
const COLOURS: [Colour; 3] = [Colour::Green, Colour::Yellow, Colour::Red];

fn any_meter() -> impl Strategy<Value = MeterConfig> {
    let bit_s = || prop_oneof![8_000u64..=100_000_000_000, 8_000u64..1_000_000];
    let bytes = || prop_oneof![1u64..200_000, 1..=1u64 << 30];
    let mode = prop_oneof![Just(ColourMode::Blind), Just(ColourMode::Aware)];
    (bit_s(), bytes(), bit_s(), bytes(), 0..3, mode).prop_map(|(c, cbs, e, ebs, kind, mode)| {
        let rate = |bit_s| Rate::from_bit_s(bit_s).unwrap();
        let (cir, other, cbs, ebs) = (rate(c), rate(e), Bytes(cbs), Bytes(ebs));
        let kind = match kind {
            0 => MeterKind::SingleRate { cir, cbs, ebs },
            1 => MeterKind::TwoRate { cir: cir.min(other), cbs, pir: cir.max(other), pbs: ebs },
            _ => MeterKind::Differentiated { cir, cbs, eir: other, ebs },
        };
        kind.config(mode).unwrap()
    })
}

proptest! {
    /// Packet by packet the colour is the model's.
    #[test]
    fn the_meter_of_the_header_is_the_model(
        config in any_meter(),
        start in 1u64..1 << 61,
        steps in prop::collection::vec(
            (prop_oneof![0u64..3_000, 0u64..20_000_000, 0..1u64 << 54],
             prop_oneof![1u32..200, 1000u32..70_000, 0u32..1 << 20], 0usize..3),
            1..300,
        ),
    ) {
        let policy = intf::Policy::default().metered(&config);
        let mut now = start;
        let mut model = Meter::new(config, Nanos(now));
        let (mut state, mut carry) = (intf::Meter::default(), [0u64; 2]);
        for (gap, wire_bytes, incoming) in steps {
            now += gap;
            let expected = model.on_packet(Nanos(now), wire_bytes, COLOURS[incoming]);
            let packet = NativePacket { wire_bytes, may_owe: 0 };
            let incoming = if config.mode == ColourMode::Aware { incoming as u32 } else { 0 };
            // SAFETY: every pointer is to a live value of the layout that the header declares.
            let got = unsafe {
                native_pl_colour(
                    &policy, &mut state, carry.as_mut_ptr(), now, &packet, incoming,
                )
            };
            prop_assert_eq!(COLOURS[got as usize], expected);
        }
    }

    #[test]
    fn incoming_colours_are_the_models(yellow: u64, red: u64, dscp in 0u8..64) {
        let map = ColourMap { yellow, red };
        let policy =
            intf::Policy { yellow_dscps: yellow, red_dscps: red, ..intf::Policy::default() };
        // SAFETY: the pointer is to a live value of the layout that the header declares.
        let got = unsafe { native_pl_incoming(&policy, dscp) };
        prop_assert_eq!(COLOURS[got as usize], map.colour(Dscp::new(dscp).unwrap()));
    }
}

/// A bucket of the header, with its state.
struct Native {
    conf: intf::Bucket,
    full_ns: u64,
    carry: u64,
}

impl Native {
    /// `may_owe`: `enum pl_debt`.
    fn take(&mut self, now_ns: u64, wire_bytes: u32, may_owe: u32) -> bool {
        let packet = NativePacket { wire_bytes, may_owe };
        // SAFETY: every pointer is to a live value of the layout that the header declares.
        let got = unsafe {
            native_pl_take(&self.conf, &mut self.full_ns, now_ns, &packet, &mut self.carry)
        };
        got == 1
    }

    /// Units that it has at `now_ns`.
    fn units(&self, now_ns: u64) -> u64 {
        if self.full_ns < now_ns {
            return self.conf.burst;
        }
        let missing = u128::from(self.full_ns - now_ns) * u128::from(self.conf.rate);
        let missing = missing + u128::from(self.carry);
        u64::try_from(u128::from(self.conf.burst).saturating_sub(missing)).unwrap()
    }
}

fn config(bit_s: u64, burst: u64) -> BucketConfig {
    BucketConfig::new(Rate::from_bit_s(bit_s).unwrap(), Bytes(burst)).unwrap()
}

proptest! {
    /// Packet by packet, verdict and tokens of the header are the model's, to the last unit.
    #[test]
    fn the_header_is_the_model(
        bit_s in prop_oneof![8_000u64..=100_000_000_000, 8_000u64..1_000_000],
        burst in prop_oneof![1u64..200_000, 1..=1u64 << 31],
        start in 1u64..1 << 61,
        steps in prop::collection::vec(
            (prop_oneof![0u64..3_000, 0u64..20_000_000, 0..1u64 << 54],
             prop_oneof![1u32..200, 1000u32..70_000, 0u32..1 << 20], 0u32..3),
            1..200,
        ),
    ) {
        let config = config(bit_s, burst);
        let mut now = start;
        let mut model = TokenBucket::new(config, Nanos(now));
        let mut native = Native { conf: config.into(), full_ns: 0, carry: 0 };
        for (gap, wire_bytes, may_owe) in steps {
            now += gap;
            let expected = match may_owe {
                0 => model.on_packet(Nanos(now), wire_bytes),
                1 => model.on_segments(Nanos(now), wire_bytes),
                _ => model.on_part(Nanos(now), wire_bytes),
            };
            prop_assert_eq!(native.take(now, wire_bytes, may_owe), expected);
            prop_assert!(native.carry < bit_s);
            prop_assert_eq!(native.units(now), model.units(Nanos(now)));
        }
    }

    /// A clock that steps back, as those of two CPUs may differ, gives nothing away.
    #[test]
    fn a_clock_that_steps_back_adds_nothing(
        bit_s in 8_000u64..1_000_000_000,
        burst in 1_500u64..100_000,
        steps in prop::collection::vec((0u64..2_000_000, 0u64..1_000_000, 60u32..1_500), 1..300),
    ) {
        let start = 1u64 << 40;
        let mut native = Native { conf: config(bit_s, burst).into(), full_ns: start, carry: 0 };
        let (mut now, mut latest, mut passed) = (start, start, 0);
        for (gap, back, bytes) in steps {
            now = (now + gap).saturating_sub(back);
            latest = latest.max(now);
            passed += if native.take(now, bytes, 0) { u64::from(bytes) } else { 0 };
            let rate = Rate::from_bit_s(bit_s).unwrap();
            prop_assert!(passed <= burst + rate.bytes_in(Nanos(latest - start)).0);
        }
    }
}

/// One second in nanoseconds: the tables' times are so far apart that the time a test takes does not matter.
pub(super) const S: u64 = 1_000_000_000;

/// The clock by which a rate is lent.
pub(super) fn boottime_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * S + now.tv_nsec as u64
}

/// Waits until so many bytes are earned at this rate, however fast the machine is.
pub(super) fn wait_to_earn(bytes: u64, rate: Rate) {
    let earned_at = boottime_ns() + bytes * 8 * S / rate.bit_s();
    while boottime_ns() <= earned_at {}
}

pub(super) const UDP: u8 = 17;
pub(super) const FRAME_BYTES: u64 = 1000;
/// A byte takes 10 ms: a bucket of ten seconds holds one frame.
const BIT_S: u64 = 800;
pub(super) const BUCKET: intf::Bucket = intf::Bucket {
    cost: (10_000_000 << 24),
    rate: BIT_S,
    burst: 2 * FRAME_BYTES * 8_000_000_000,
    fill_ns: 20 * S,
    earned_bytes: 0,
};

/// Where a program is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hook {
    CgroupEgress,
    CgroupIngress,
    Out,
    In,
}

/// One line of the table: a packet, and what must come of it.
struct Row {
    what: &'static str,
    hook: Hook,
    port: bool,
    /// How long until the bucket is full; it takes 20 s to fill.
    missing_s: u64,
    mark: u32,
    loopback: bool,
    returns: u32,
    outcome: &'static str,
    /// Seconds until it is full afterwards.
    missing_after_s: u64,
}

fn table() -> Vec<Row> {
    let row = |what, hook, missing_s, returns, outcome, missing_after_s| Row {
        what,
        hook,
        port: false,
        missing_s,
        mark: 0,
        loopback: true,
        returns,
        outcome,
        missing_after_s,
    };
    let next = u32::MAX; // TC_ACT_UNSPEC
    let port = |row: Row| Row { port: true, ..row };
    vec![
        row("full", Hook::CgroupEgress, 0, 1, "pass", 10),
        row("half", Hook::CgroupEgress, 9, 1, "pass", 19),
        row("too little: drop and tell", Hook::CgroupEgress, 11, 2, "drop_full", 11),
        row("ingress", Hook::CgroupIngress, 9, 1, "pass", 19),
        row("ingress: drop", Hook::CgroupIngress, 11, 0, "drop_full", 11),
        Row { mark: 0x7d9a_7e1d, ..row("dead", Hook::CgroupEgress, 0, 2, "", 0) },
        Row { loopback: false, ..row("loopback", Hook::CgroupEgress, 11, 1, "exempt", 11) },
        row("device", Hook::Out, 9, next, "pass", 19),
        row("device: drop", Hook::Out, 11, 2, "drop_full", 11),
        row("device, in", Hook::In, 9, next, "pass", 19),
        row("device, in: drop", Hook::In, 11, 2, "drop_full", 11),
        port(row("port: from the machine", Hook::In, 9, next, "pass", 19)),
        port(row("port: from the machine: drop", Hook::In, 11, 2, "drop_full", 11)),
        port(row("port: to the machine: drop", Hook::Out, 11, 2, "drop_full", 11)),
    ]
}

/// Buckets that are full at a time, under a policy that they have not met.
pub(super) fn full_at(full_ns: u64) -> intf::Meter {
    let side = intf::Side { full_ns, second_full_ns: full_ns, ..Default::default() };
    intf::Meter { side: [side, intf::Side::default()], ..Default::default() }
}

/// An Ethernet frame of UDP.
fn frame() -> Vec<u8> {
    let mut frame = vec![0; FRAME_BYTES as usize];
    frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    frame[16..18].copy_from_slice(&986u16.to_be_bytes());
    frame[23] = UDP;
    frame
}

/// Offset of the mark in struct __sk_buff, which is UAPI.
const SKB_MARK: usize = 8;
const SKB_BYTES: usize = 192;

/// Which direction's bucket a hook must take from.
fn direction_of(row: &Row) -> usize {
    match (row.hook, row.port) {
        (Hook::CgroupEgress, _) | (Hook::Out, false) | (Hook::In, true) => 0,
        _ => 1,
    }
}

#[test]
fn root_police_the_loaded_program_follows_the_table() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_police_the_loaded_program_follows_the_table: needs root");
        return;
    }
    for row in table() {
        let place = match row.hook {
            Hook::CgroupEgress | Hook::CgroupIngress => AttachPoint::Cgroup,
            Hook::Out | Hook::In if row.port => AttachPoint::Port,
            Hook::Out | Hook::In => AttachPoint::Device,
        };
        let mut storage = MaybeUninit::uninit();
        let police = load(&mut storage, place, false).unwrap();
        let direction = direction_of(&row);
        let flags = if row.loopback { intf::FLAG_LOOPBACK } else { 0 };
        let mut limit = intf::Entry::from(intf::Limit { flags, ..Default::default() });
        limit.police[direction] =
            intf::Policy { committed: BUCKET, action: [0, 0, 1], ..intf::Policy::default() };
        let maps = maps(&police, &limit).unwrap();
        let key = (direction as u32).to_ne_bytes();
        let now = boottime_ns();
        let finish_ns = now + row.missing_s * S;
        let queue = full_at(finish_ns);
        maps.own_as::<Policer>()
            .unwrap()
            .meters
            .update(&key, bytemuck::bytes_of(&queue), MapFlags::ANY)
            .unwrap();

        let mut context = vec![0u8; SKB_BYTES];
        context[SKB_MARK..SKB_MARK + 4].copy_from_slice(&row.mark.to_ne_bytes());
        let mut context_after = vec![0u8; SKB_BYTES];
        let sent = frame();
        let program = match row.hook {
            Hook::CgroupEgress => &police.progs.police_egress,
            Hook::CgroupIngress => &police.progs.police_ingress,
            Hook::Out => &police.progs.police_out,
            Hook::In => &police.progs.police_in,
        };
        let run = program.test_run(ProgramInput {
            context_in: Some(&mut context),
            context_out: Some(&mut context_after),
            data_in: Some(&sent),
            ..Default::default()
        });
        assert_eq!(run.unwrap().return_value, row.returns, "{}: return value", row.what);
        let direction = [Direction::Egress, Direction::Ingress][direction];
        let reading = maps.read(direction).unwrap();
        assert_eq!((reading.at_risk, reading.fair, reading.part), (None, None, None));
        for (index, outcome) in intf::OUTCOME_TABLE.iter().enumerate() {
            let expected = if outcome.name == row.outcome { (1, FRAME_BYTES) } else { (0, 0) };
            let found = (reading.counters.packets[index], reading.counters.bytes[index]);
            assert_eq!(found, expected, "{}: {}", row.what, outcome.name);
        }
        // A full bucket is paid from the present, which is a little later.
        let missing = reading.finish_ns - now;
        let expected = row.missing_after_s * S;
        assert!((expected..expected + S).contains(&missing), "{}: {missing} ns", row.what);
    }
}

/// Of a limit that drops all, one map at a time has no value for ingress, as if it had been made for less.
#[test]
fn root_police_a_packet_that_finds_no_state_passes() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_police_a_packet_that_finds_no_state_passes: needs root");
        return;
    }
    // Its lease is over: the rate is that of another value.
    let common = intf::Limit { flags: intf::FLAG_LOOPBACK, until_ns: [0, 1], ..Default::default() };
    let mut limit = intf::Entry::from(common);
    limit.police[1] =
        intf::Policy { committed: BUCKET, action: [0, 0, 1], ..intf::Policy::default() };
    for (missing, returns) in [("", 0), ("limit", 1), ("meters_of_limit", 1), ("counters", 1)] {
        let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
        let mut open =
            open_skel::<skel::police::PoliceSkelBuilder>(&mut storage, "police").unwrap();
        let (progs, maps) = (&mut open.progs, &mut open.maps);
        for unused in [&mut progs.police_egress, &mut progs.police_out, &mut progs.police_in] {
            unused.set_autoload(false);
        }
        for map in [&mut maps.limit, &mut maps.meters_of_limit, &mut maps.counters] {
            if map.name() == missing {
                map.set_max_entries(1).unwrap();
            }
        }
        prepare(open.open_object_mut(), "police").unwrap();
        let police = load_skel(open, "police").unwrap();
        let meter = full_at(boottime_ns() + 11 * S);
        let values = [
            (&police.maps.limit, [0, 2], bytemuck::bytes_of(&limit)),
            (&police.maps.meters_of_limit, [0, 1], bytemuck::bytes_of(&meter)),
        ];
        for (map, keys, value) in values {
            for key in keys.into_iter().filter(|key: &u32| *key < map.max_entries()) {
                map.update(&key.to_ne_bytes(), value, MapFlags::ANY).unwrap();
            }
        }
        let input = ProgramInput { data_in: Some(&frame()), ..Default::default() };
        let run = police.progs.police_ingress.test_run(input).unwrap();
        assert_eq!(run.return_value, returns, "without {missing:?}");
    }
}

/// An action, the packet that it meets, and what comes of it. The bucket has tokens for none.
struct Act {
    what: &'static str,
    hook: Hook,
    action: &'static str,
    ipv6: bool,
    tos: u8,
    tos_after: u8,
    outcome: &'static str,
}

#[test]
fn root_police_actions_follow_the_table() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_police_actions_follow_the_table: needs root");
        return;
    }
    let act = |what, hook, action, ipv6, tos, tos_after, outcome| Act {
        what,
        hook,
        action,
        ipv6,
        tos,
        tos_after,
        outcome,
    };
    const EF: u8 = 46 << 2;
    const AF12: u8 = 12 << 2;
    let table = [
        act("pass", Hook::Out, "pass", false, EF, EF, "pass"),
        act("dscp", Hook::Out, "dscp af12", false, EF, AF12, "pass"),
        act("dscp, the ECN bits stay", Hook::In, "dscp af12", false, EF | 2, AF12 | 2, "pass"),
        act("dscp, the same", Hook::In, "dscp ef", false, EF | 1, EF | 1, "pass"),
        act("dscp, IPv6", Hook::Out, "dscp af12", true, EF | 1, AF12 | 1, "pass"),
        act("dscp, IPv6, from none", Hook::In, "dscp 63", true, 0, 63 << 2, "pass"),
        act("ce, ECT(0)", Hook::Out, "ce", false, EF | 2, EF | 3, "mark"),
        act("ce, ECT(1), IPv6", Hook::In, "ce", true, 1, 3, "mark"),
        act("ce, CE already", Hook::Out, "ce", false, 3, 3, "mark"),
        act("ce, not ECT", Hook::Out, "ce", false, EF, EF, "drop_full"),
        act("ce on a cgroup", Hook::CgroupEgress, "ce", false, 2, 3, "mark"),
        act("ce on a cgroup, not ECT", Hook::CgroupIngress, "ce", true, 0, 0, "drop_full"),
        act("drop", Hook::In, "drop", true, 2, 2, "drop_full"),
    ];
    for Act { what, hook, action, ipv6, tos, tos_after, outcome } in table {
        let place = match hook {
            Hook::Out | Hook::In => AttachPoint::Device,
            _ => AttachPoint::Cgroup,
        };
        let mut storage = MaybeUninit::uninit();
        let police = load(&mut storage, place, false).unwrap();
        let action = action.parse::<Action>().unwrap();
        let policy = Policy { actions: [Action::Pass, Action::Pass, action], ..Policy::default() };
        let queue = VirtualQueueOptions::new("8kbit".parse().unwrap());
        let policy = intf::Policy::new(&policy, &queue).unwrap();
        let policy = intf::Policy { committed: BUCKET, ..policy };
        let mut limit = intf::Entry { police: [policy; 2], ..Default::default() };
        limit.flags = intf::FLAG_LOOPBACK;
        let maps = maps(&police, &limit).unwrap();
        let full = full_at(boottime_ns() + 20 * S);
        for key in 0..2u32 {
            let bytes = bytemuck::bytes_of(&full);
            maps.own_as::<Policer>()
                .unwrap()
                .meters
                .update(&key.to_ne_bytes(), bytes, MapFlags::ANY)
                .unwrap();
        }
        let sent = if ipv6 { frame_v6(tos) } else { frame_v4(tos) };
        let mut received = sent.clone();
        let (program, direction) = match hook {
            Hook::CgroupEgress => (&police.progs.police_egress, Direction::Egress),
            Hook::CgroupIngress => (&police.progs.police_ingress, Direction::Ingress),
            Hook::Out => (&police.progs.police_out, Direction::Egress),
            Hook::In => (&police.progs.police_in, Direction::Ingress),
        };
        let run = program.test_run(ProgramInput {
            data_in: Some(&sent),
            data_out: Some(&mut received),
            ..Default::default()
        });
        run.unwrap();
        let expected = if ipv6 { frame_v6(tos_after) } else { frame_v4(tos_after) };
        assert!(received[14..] == expected[14..], "{what}: {:x?}", &received[14..34]);
        let reading = maps.read(direction).unwrap();
        let index = intf::OUTCOME_TABLE.iter().position(|o| o.name == outcome).unwrap();
        assert_eq!(reading.counters.packets[index], 1, "{what}");
        assert_eq!(reading.colours.map(|c| c.packets), Some([0, 0, 1]), "{what}");
    }
}

/// An Ethernet frame of IPv4 with a right checksum.
pub(super) fn frame_v4(tos: u8) -> Vec<u8> {
    let mut frame = frame();
    frame[15] = tos;
    frame[22] = 64;
    let words = frame[14..34].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let checksum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame
}

pub(super) fn frame_v6(traffic_class: u8) -> Vec<u8> {
    let mut frame = vec![0; FRAME_BYTES as usize];
    frame[12..14].copy_from_slice(&[0x86, 0xdd]);
    frame[14] = 0x60 | traffic_class >> 4;
    frame[15] = traffic_class << 4 | 0x0a;
    frame[18..20].copy_from_slice(&(FRAME_BYTES as u16 - 54).to_be_bytes());
    frame[20] = UDP;
    frame
}

/// A loaded srTCM, colour-aware: green while the committed bucket lasts, then yellow, then red.
#[test]
fn root_police_the_loaded_meter_colours() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_police_the_loaded_meter_colours: needs root");
        return;
    }
    let meter = MeterOptions {
        burst: Some(Span::Size(Bytes(3 * FRAME_BYTES))),
        colours: Some(ColourMap::default()),
        ..MeterOptions::new(MeterType::SrTcm)
    };
    let actions = [Action::Pass, Action::Dscp(Dscp::new(12).unwrap()), Action::Drop];
    let policy = Policy { meter: Some(meter), actions, ..Policy::default() };
    let queue = VirtualQueueOptions {
        burst: Some(Span::Size(Bytes(2 * FRAME_BYTES))),
        ..VirtualQueueOptions::new("8kbit".parse().unwrap())
    };
    let policy = intf::Policy::new(&policy, &queue).unwrap();
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Device, false).unwrap();
    let limit = intf::Entry { police: [policy; 2], ..Default::default() };
    let maps = maps(&police, &limit).unwrap();
    // af12 first: it is yellow and pays from the second bucket; then three of af11, and af13.
    let mut colours = Vec::new();
    for tos in [12 << 2, 10 << 2, 10 << 2, 10 << 2, 14 << 2, 10 << 2, 10 << 2] {
        let sent = frame_v4(tos);
        let mut received = sent.clone();
        let run = police.progs.police_out.test_run(ProgramInput {
            data_in: Some(&sent),
            data_out: Some(&mut received),
            ..Default::default()
        });
        colours.push((run.unwrap().return_value as i32, received[15] >> 2));
    }
    let (green, yellow) = ((-1, 10), (-1, 12));
    assert_eq!(colours, [yellow, green, green, yellow, (2, 14), yellow, (2, 10)]);
    let reading = maps.read(Direction::Egress).unwrap();
    assert_eq!(reading.colours.unwrap().packets, [2, 3, 2]);
    assert_eq!(reading.colours.unwrap().bytes, [2, 3, 2].map(|n| n * FRAME_BYTES));
}

/// Who is exempt by prefix or code point passes an empty bucket uncharged; others do not.
#[test]
fn root_police_exempt_packets_follow_the_table() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_police_exempt_packets_follow_the_table: needs root");
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Device, true).unwrap();
    let exempt: Exempt = "10.0.0.0/8,192.0.2.1,2001:db8::/32,dscp:ef".parse().unwrap();
    let policy = intf::Policy { committed: BUCKET, action: [0, 0, 1], ..intf::Policy::default() };
    let mut limit = intf::Entry { police: [policy; 2], ..Default::default() };
    limit.set_exempt(&exempt);
    let maps = maps(&police, &limit).unwrap();
    maps.exempt(&exempt.prefixes).unwrap();
    let full = full_at(boottime_ns() + 20 * S);
    for key in 0..2u32 {
        let bytes = bytemuck::bytes_of(&full);
        maps.own_as::<Policer>()
            .unwrap()
            .meters
            .update(&key.to_ne_bytes(), bytes, MapFlags::ANY)
            .unwrap();
    }
    let v4 = |source: [u8; 4], destination: [u8; 4], dscp: u8| {
        let mut frame = frame_v4(dscp << 2);
        frame[26..30].copy_from_slice(&source);
        frame[30..34].copy_from_slice(&destination);
        frame
    };
    let v6 = |source: &str, destination: &str, dscp: u8| {
        let mut frame = frame_v6(dscp << 2);
        let octets = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets();
        frame[22..38].copy_from_slice(&octets(source));
        frame[38..54].copy_from_slice(&octets(destination));
        frame
    };
    let (near, far) = ([10, 1, 2, 3], [198, 51, 100, 7]);
    let table = [
        ("egress: to the prefix", Hook::Out, v4(far, near, 0), true),
        ("egress: from the prefix", Hook::Out, v4(near, far, 0), false),
        ("ingress: from the prefix", Hook::In, v4(near, far, 0), true),
        ("ingress: to the prefix", Hook::In, v4(far, near, 0), false),
        ("one address", Hook::Out, v4(far, [192, 0, 2, 1], 0), true),
        ("the address after it", Hook::Out, v4(far, [192, 0, 2, 2], 0), false),
        ("by code point", Hook::In, v4(far, far, 46), true),
        ("another code point", Hook::In, v4(far, far, 45), false),
        ("IPv6, egress", Hook::Out, v6("::1", "2001:db8::7", 0), true),
        ("IPv6, ingress", Hook::In, v6("::1", "2001:db8::7", 0), false),
        ("IPv6, by code point", Hook::In, v6("::1", "::2", 46), true),
        ("IPv6, another", Hook::Out, v6("2001:db8::7", "2001:db9::7", 1), false),
    ];
    let passes = |hook, frame: &[u8]| {
        let program =
            if hook == Hook::Out { &police.progs.police_out } else { &police.progs.police_in };
        let run = program.test_run(ProgramInput { data_in: Some(frame), ..Default::default() });
        run.unwrap().return_value != 2
    };
    for (what, hook, frame, exempt) in &table {
        assert_eq!(passes(*hook, frame), *exempt, "{what}");
    }
    let exempt_packets = |direction| maps.read(direction).unwrap().counters.packets[6];
    let by_hook = |hook| table.iter().filter(|row| row.1 == hook && row.3).count() as u64;
    assert_eq!(exempt_packets(Direction::Egress), by_hook(Hook::Out));
    assert_eq!(exempt_packets(Direction::Ingress), by_hook(Hook::In));

    // Others in their place, while the programs run.
    let exempt: Exempt = "198.51.100.0/24".parse().unwrap();
    limit.set_exempt(&exempt);
    maps.write(limit).unwrap();
    maps.exempt(&exempt.prefixes).unwrap();
    assert_eq!(maps.options().unwrap().exempt, exempt);
    assert!(passes(Hook::Out, &v4(near, far, 0)));
    assert!(!passes(Hook::Out, &v4(far, near, 0)) && !passes(Hook::In, &v4(near, near, 46)));
}

/// A limit that exempts as many as it may exempts others, and has other rates. Where its trie takes nobody
/// more, all is as before.
#[test]
fn root_police_a_full_trie_of_exempt_prefixes_changes_as_a_whole_or_not() {
    if !rustix::process::geteuid().is_root() {
        eprintln!(
            "SKIP root_police_a_full_trie_of_exempt_prefixes_changes_as_a_whole_or_not: needs root"
        );
        return;
    }
    let hierarchy = Hierarchy::find().unwrap();
    let of = |net: u8, rate: &str| {
        let exempt: Vec<_> = (0..MAX_PREFIXES).map(|i| format!("10.{net}.{i}.0/24")).collect();
        LimitOptions {
            egress: Some(VirtualQueueOptions::new(rate.parse().unwrap())),
            scheme: Scheme::Police,
            exempt: exempt.join(",").parse().unwrap(),
            ..LimitOptions::default()
        }
    };
    let begin = of(0, "1mbit");
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Device, true).unwrap();
    let mut maps = maps(&police, &begin.encode(0).unwrap()).unwrap();
    maps.exempt(&begin.exempt.prefixes).unwrap();
    let set = |maps: &LimitMaps, options: &LimitOptions| {
        maps.set(&hierarchy, [], &options.encode(0).unwrap(), options)
    };
    for options in [of(1, "1mbit"), of(1, "2mbit"), of(2, "3mbit")] {
        set(&maps, &options).unwrap();
        let now = maps.options().unwrap();
        assert_eq!(
            (now.egress.unwrap().rate, now.exempt),
            (options.egress.unwrap().rate, options.exempt)
        );
    }

    maps.exempt = Some(trie_of(2));
    maps.exempt(&"192.0.2.1,192.0.2.2".parse::<Exempt>().unwrap().prefixes).unwrap();
    let (earlier, since) = (maps.options().unwrap(), maps.limit().unwrap().police[0].since_ns);
    set(&maps, &of(3, "4mbit")).unwrap_err();
    assert_eq!(maps.options().unwrap(), earlier);
    // A packet that has met the refused policy must not find an older one.
    assert!(maps.limit().unwrap().police[0].since_ns > since);
}
