//! The program in XDP beside the one at tc: what they say of the same frame, and of frames that only XDP
//! sees, with VLAN tags and longer than the device's MTU.

use std::process::Command;

use libbpf_rs::{MapCore, MapFlags, ProgramInput};
use proptest::prelude::*;
use tidegate_core::{
    Bytes, Scheme, Scope, Span,
    exempt::Exempt,
    police::{Action, ColourMap, MeterOptions, MeterType, Policy},
    queue_options::VirtualQueueOptions,
};

use super::{
    group_tests::{is_root, v4},
    kernel_tests::{BUCKET, FRAME_BYTES, S, UDP, boottime_ns, frame_v4, frame_v6, full_at},
    *,
};
use crate::{
    bpf::lookup,
    net::{NetNs, tun_path::TunPath},
};

const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;
const SHOT: u32 = 2;
const UNSPEC: u32 = u32::MAX;
/// Seconds until [`BUCKET`] is full, when nothing is left in it.
const EMPTY_S: u64 = 20;

unsafe extern "C" {
    fn native_tg_checksum(checksum: u16, was: u16, is: u16) -> u16;
    fn native_tg_with_dscp(tos: u8, dscp: u8) -> u8;
    fn native_tg_set_traffic_class(first: *mut u8, tos: u8) -> u8;
}

/// RFC 791: the complement of the sum in ones' complement, of big-endian words.
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

proptest! {
    /// The checksum that follows a change is that of the whole header, and the ECN bits stay.
    #[test]
    fn the_checksum_follows_the_type_of_service(mut header: [u8; 20], dscp in 0u8..64) {
        header[0] = 0x45;
        header[10..12].fill(0);
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        let was = u16::from_ne_bytes([header[0], header[1]]);
        // SAFETY: no pointers.
        let tos = unsafe { native_tg_with_dscp(header[1], dscp) };
        prop_assert_eq!((tos >> 2, tos & 3), (dscp, header[1] & 3));
        header[1] = tos;
        let is = u16::from_ne_bytes([header[0], header[1]]);
        let there = u16::from_ne_bytes([header[10], header[11]]);
        // SAFETY: no pointers.
        let sum = unsafe { native_tg_checksum(there, was, is) };
        header[10..12].copy_from_slice(&sum.to_ne_bytes());
        prop_assert_eq!(checksum(&header), 0);
    }

    /// Version and flow label stay.
    #[test]
    fn a_traffic_class_is_its_eight_bits(first: [u8; 2], tos: u8) {
        let mut now = first;
        // SAFETY: two bytes are read and written.
        let was = unsafe { native_tg_set_traffic_class(now.as_mut_ptr(), tos) };
        let (word, new) = (u16::from_be_bytes(first), u16::from_be_bytes(now));
        prop_assert_eq!(was, (word >> 4) as u8);
        prop_assert_eq!(new, word & 0xf00f | u16::from(tos) << 4);
    }
}

/// Where a frame is met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Tc,
    Xdp,
}

/// What came of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Met {
    passed: bool,
    frame: Vec<u8>,
    outcome: Vec<(&'static str, u64)>,
    colours: [u64; 3],
    /// Seconds until the buckets are full.
    missing_s: [u64; 2],
}

/// Has a limit on ingress meet frames, each with buckets that are full so many seconds later.
fn meet(at: At, policer: &Policer, missing_s: u64, frames: &[Vec<u8>]) -> Vec<Met> {
    let Policer(limit, exempt) = policer;
    let exempts = !exempt.is_empty();
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Device, exempts).unwrap();
    let maps = maps(&police, limit).unwrap();
    maps.exempt(&exempt.prefixes).unwrap();
    let mut storage = MaybeUninit::uninit();
    let xdp = xdp::load(&mut storage, &maps).unwrap();
    let program = if at == At::Tc { &police.progs.police_in } else { &xdp.progs.police_xdp };
    let mut before = maps.read(Direction::Ingress).unwrap();
    let mut all = Vec::new();
    for sent in frames {
        let now = boottime_ns();
        let full_ns = now + missing_s * S;
        let queue = full_at(full_ns);
        maps.own_as::<super::Policer>()
            .unwrap()
            .meters
            .update(&1u32.to_ne_bytes(), bytemuck::bytes_of(&queue), MapFlags::ANY)
            .unwrap();
        let mut frame = sent.clone();
        let run = program.test_run(ProgramInput {
            data_in: Some(sent),
            data_out: Some(&mut frame),
            ..Default::default()
        });
        let verdicts = if at == At::Tc { [UNSPEC, SHOT] } else { [XDP_PASS, XDP_DROP] };
        let returned = run.unwrap().return_value;
        assert!(verdicts.contains(&returned), "{at:?} {returned}");
        let after = maps.read(Direction::Ingress).unwrap();
        let meter: intf::Meter =
            lookup(&maps.own_as::<super::Policer>().unwrap().meters, "queues", 1).unwrap();
        let after_side = *meter.side();
        let outcomes = intf::OUTCOME_TABLE.iter().enumerate();
        let bytes = |i: usize| after.counters.bytes[i] - before.counters.bytes[i];
        let [was, is] = [&before, &after].map(|r| r.colours.unwrap().packets);
        all.push(Met {
            passed: returned == verdicts[0],
            frame,
            outcome: outcomes.map(|(i, o)| (o.name, bytes(i))).filter(|(_, b)| *b > 0).collect(),
            colours: std::array::from_fn(|i| is[i] - was[i]),
            missing_s: [after_side.full_ns, after_side.second_full_ns]
                .map(|full_ns| (full_ns.saturating_sub(now) + S / 2) / S),
        });
        before = after;
    }
    all
}

/// A limit, and who is exempt from it.
struct Policer(intf::Entry, Exempt);

fn limit(policy: &Policy, exempt: &str) -> Policer {
    let queue = VirtualQueueOptions::new("8kbit".parse().unwrap());
    let policy = intf::Policy::new(policy, &queue).unwrap();
    let policy = intf::Policy { committed: BUCKET, second: BUCKET, ..policy };
    let exempt: Exempt =
        if exempt.is_empty() { Exempt::default() } else { exempt.parse().unwrap() };
    let mut limit = intf::Entry { police: [policy; 2], ..Default::default() };
    limit.flags = intf::FLAG_XDP;
    limit.set_exempt(&exempt);
    Policer(limit, exempt)
}

fn red(action: &str) -> Policy {
    let actions = [Action::Pass, Action::Pass, action.parse().unwrap()];
    Policy { actions, ..Policy::default() }
}

/// A meter that colours by where packets come from, too, and writes all of it down.
fn aware(kind: MeterType) -> Policy {
    let meter = MeterOptions {
        rate: (kind != MeterType::SrTcm).then(|| "10kbit".parse().unwrap()),
        burst: Some(Span::Size(Bytes(2 * FRAME_BYTES))),
        colours: Some(ColourMap::default()),
        ..MeterOptions::new(kind)
    };
    let actions = ["dscp 1", "dscp af42", "ce"].map(|action| action.parse().unwrap());
    Policy { meter: Some(meter), actions, ..Policy::default() }
}

/// Frames of every kind, with every ECN code point.
fn frames() -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for tos in [0, 1, 2, 3, 46 << 2 | 2, 12 << 2, 14 << 2 | 1, 10 << 2, 63 << 2 | 3] {
        frames.push(frame_v4(tos));
        frames.push(frame_v6(tos));
        let mut from = frame_v4(tos);
        from[26..30].copy_from_slice(&[10, 1, 2, 3]);
        frames.push(from);
        let mut from = frame_v6(tos);
        from[22..26].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]);
        frames.push(from);
        let mut mapped = frame_v6(tos);
        mapped[32..38].copy_from_slice(&[0xff, 0xff, 10, 1, 2, 3]);
        frames.push(mapped);
        // A header with options.
        let mut options = frame_v4(tos);
        options[14] = 0x46;
        options[24..26].fill(0);
        let sum = checksum(&options[14..38]);
        options[24..26].copy_from_slice(&sum.to_be_bytes());
        frames.push(options);
    }
    let of_type = |kind: u16, bytes| {
        let mut frame = vec![0x5a; bytes];
        frame[12..14].copy_from_slice(&kind.to_be_bytes());
        frame
    };
    // ARP, LLC, PPPoE.
    frames.extend([of_type(0x806, 60), of_type(38, 60), of_type(0x8864, 900)]);
    frames
}

/// The same frame with a VLAN tag.
fn tagged(frame: &[u8], kind: u16) -> Vec<u8> {
    let mut tagged = frame[..12].to_vec();
    tagged.extend(kind.to_be_bytes());
    tagged.extend([0x20, 0x07]);
    tagged.extend(&frame[12..]);
    tagged
}

#[test]
fn root_police_xdp_says_of_a_frame_what_tc_does() {
    if !is_root("root_police_xdp_says_of_a_frame_what_tc_does") {
        return;
    }
    let exempt = "10.0.0.0/8,2001:db8::/32,dscp:ef";
    let meters = [MeterType::SrTcm, MeterType::TrTcm, MeterType::Rfc4115].map(aware);
    let policies = ["pass", "drop", "ce", "dscp af12", "dscp 0"].map(red);
    let mut exempted = 0;
    for policy in policies.into_iter().chain(meters) {
        for (exempt, missing_s) in [("", 0), ("", 9), ("", EMPTY_S), (exempt, EMPTY_S)] {
            let (limit, frames) = (limit(&policy, exempt), frames());
            let [tc, xdp] = [At::Tc, At::Xdp].map(|at| meet(at, &limit, missing_s, &frames));
            for ((sent, tc), xdp) in frames.iter().zip(&tc).zip(&xdp) {
                let head = &sent[..40.min(sent.len())];
                assert_eq!(xdp, tc, "{policy:?}, {missing_s} s, {head:x?}");
                exempted += u32::from(xdp.outcome[0].0 == "exempt");
            }
            // A tag, which tc would meet beside the packet.
            let sent: Vec<_> = frames.iter().map(|frame| tagged(frame, 0x8100)).collect();
            for (tc, xdp) in tc.iter().zip(meet(At::Xdp, &limit, missing_s, &sent)) {
                assert_eq!(xdp, Met { frame: tagged(&tc.frame, 0x8100), ..tc.clone() });
            }
        }
    }
    assert!(exempted > 100, "{exempted}");
}

/// Two tags, of which tc would have taken off one; three are not looked behind, and neither are frames that
/// end before what they promise.
#[test]
fn root_police_xdp_looks_behind_two_tags() {
    if !is_root("root_police_xdp_looks_behind_two_tags") {
        return;
    }
    let limit = limit(&red("dscp af12"), "");
    let one = tagged(&frame_v4(2), 0x8100);
    let two = tagged(&one, 0x88a8);
    let three = tagged(&two, 0x88a8);
    let (cut, runt) = (two[..20].to_vec(), frame_v4(0)[..33].to_vec());
    let frames = [two, three.clone(), cut.clone(), runt.clone()];
    let met = meet(At::Xdp, &limit, EMPTY_S, &frames);
    let expected = tagged(&tagged(&frame_v4(12 << 2 | 2), 0x8100), 0x88a8);
    assert_eq!((&met[0].frame, &met[0].outcome[..]), (&expected, &[("pass", FRAME_BYTES + 4)][..]));
    assert_eq!((&met[1].frame, &met[1].outcome[..]), (&three, &[("pass", FRAME_BYTES + 8)][..]));
    assert_eq!((&met[2].frame, &met[2].outcome[..]), (&cut, &[("pass", 16)][..]));
    assert_eq!((&met[3].frame, &met[3].outcome[..]), (&runt, &[("pass", 33)][..]));
}

/// A frame longer than the MTU has the headers of those that would have carried it; one that is not is as
/// long as it is, however long.
#[test]
fn root_police_xdp_counts_the_headers_of_aggregates() {
    if !is_root("root_police_xdp_counts_the_headers_of_aggregates") {
        return;
    }
    const MTU: usize = 1500;
    let tcp = |payload: usize| {
        let mut frame = vec![0; 54 + payload];
        frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
        frame[16..18].copy_from_slice(&((40 + payload) as u16).to_be_bytes());
        frame[23] = 6;
        frame[46] = 5 << 4;
        frame
    };
    let segment = MTU - 40;
    let rows: [(_, u64); 7] = [
        (tcp(segment), 1514),
        (tagged(&tcp(segment), 0x8100), 1514),
        (tcp(segment + 1), 1514 + 55),
        (tcp(6 * segment), 6 * 1514),
        (tagged(&tcp(6 * segment), 0x8100), 6 * 1514),
        (tcp(20 * segment - 7), 20 * 1514 - 7),
        // Not IP: as it is.
        (vec![0; 5000], 5000),
    ];
    let name = format!("tidegate-xdp-{}", std::process::id());
    let netns = NetNs::create(&name).unwrap();
    // The test's frames come in by this namespace's loopback device.
    let mtu = |bytes: u32| {
        let words = format!("link set lo mtu {bytes}");
        let set = || Command::new("ip").args(words.split(' ')).status().unwrap();
        assert!(netns.run(set).unwrap().success(), "{words}");
    };
    let (frames, sizes): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    let limit = limit(&red("drop"), "");
    let met = || netns.run(|| meet(At::Xdp, &limit, 0, &frames)).unwrap();
    mtu(MTU as u32);
    let bytes = |met: &Met| met.outcome[0].1;
    assert_eq!(met().iter().map(bytes).collect::<Vec<_>>(), sizes);
    // One may be longer than half the bucket, and all of it, when that is half full.
    let passed = |missing_s| {
        let met = netns.run(|| meet(At::Xdp, &limit, missing_s, &frames[3..4])).unwrap();
        met[0].passed
    };
    assert_eq!([9, 11].map(passed), [true, false]);
    mtu(9000);
    let plain = [1514, 1514, 1515, 54 + 6 * 1460, 54 + 6 * 1460, 20 * 1514 - 7, 5000];
    let long = met();
    for (i, plain) in plain.into_iter().enumerate().filter(|(i, _)| *i != 5) {
        assert_eq!(bytes(&long[i]), plain, "{i}");
    }
    // Five times 8960 bytes of payload would be more: four frames.
    assert_eq!(bytes(&long[5]), (54 + 20 * 1460 - 7) + 3 * 54);
    // Longer than the bucket is deep, and no aggregate.
    assert_eq!((long[3].passed, long[6].passed), (false, false));
}

/// A frame there is IP alone, so the program would not find the addresses that are exempt.
#[test]
fn root_police_xdp_refuses_a_device_without_ethernet() {
    if !is_root("root_police_xdp_refuses_a_device_without_ethernet") {
        return;
    }
    let path = TunPath::new("xdp");
    let Policer(limit, _) = limit(&red("drop"), "");
    let refused = path.ends[0].run(|| {
        let mut storage = MaybeUninit::uninit();
        let police = load(&mut storage, AttachPoint::Device, false).unwrap();
        let target = Target::find(&Scope::Dev("tun0".to_owned())).unwrap();
        xdp::attach(&target, &maps(&police, &limit).unwrap()).map(drop)
    });
    let refused = refused.unwrap().unwrap_err();
    assert!(
        matches!(&refused, LimitError::XdpWithoutEthernet(name) if name == "tun0"),
        "{refused}"
    );
}

/// The law of a group, and equal parts, in the program of XDP.
#[test]
fn root_police_xdp_serves_groups_and_flows() {
    if !is_root("root_police_xdp_serves_groups_and_flows") {
        return;
    }
    let queue = VirtualQueueOptions {
        burst: Some(Span::Size(Bytes(90_000))),
        ..VirtualQueueOptions::new("10kbit".parse().unwrap())
    };
    let options = |fair| LimitOptions {
        ingress: Some(queue),
        scheme: Scheme::Police,
        police: Policy { fair, hook: Hook::Xdp, ..Policy::default() },
        ..LimitOptions::default()
    };
    for fair in [true, false] {
        let mut storage = MaybeUninit::uninit();
        let police = load(&mut storage, AttachPoint::Device, false).unwrap();
        let maps = maps(&police, &options(fair).encode(0).unwrap()).unwrap();
        assert_eq!(LimitOptions::from(&maps.limit().unwrap()).police, options(fair).police);
        let mut storage = MaybeUninit::uninit();
        let xdp = xdp::load(&mut storage, &maps).unwrap();
        let run = |flow: u8, frames: u32| {
            let passed = || maps.read(Direction::Ingress).unwrap().counters.packets[0];
            let before = passed();
            for _ in 0..frames {
                group_tests::run(&xdp.progs.police_xdp, &v4(flow, UDP, 0, [1, 2]), 1);
            }
            passed() - before
        };
        assert!(maps.measure(Direction::Ingress).unwrap().flows.is_empty());
        let (first, second) = (run(1, 120), run(2, 4));
        match fair {
            // Eight ninths of the bucket, and one more; room for who comes.
            true => assert!((70..=88).contains(&first) && second == 4, "{first} {second}"),
            false => assert!(first >= 78 && second == 0, "{first} {second}"),
        }
        let mut counted: Vec<_> =
            maps.measure(Direction::Ingress).unwrap().flows.iter().map(|f| f.bytes).collect();
        counted.sort_unstable();
        assert_eq!(counted, [4_000, 120_000]);
        // At random, before the bucket.
        assert!(maps.set_drop(Direction::Ingress, 1.0).unwrap());
        let early = || {
            let index = intf::OUTCOME_TABLE.iter().position(|o| o.name == "drop_early");
            maps.read(Direction::Ingress).unwrap().counters.packets[index.unwrap()]
        };
        assert_eq!((run(3, 10), early()), (0, 10));
    }
}
