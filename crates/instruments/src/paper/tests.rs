use std::ffi::c_int;
use std::fs::{self, File};
use std::mem::{offset_of, size_of};

use proptest::prelude::*;

use super::*;

/// `struct np_queue`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct Queue {
    credit_bytes: i64,
    last_ns: u64,
}

/// `struct np_packet`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Packet {
    bytes: u32,
    ecn_capable: u8,
    tcp: u8,
}

/// `enum np_verdict`.
const PASS: c_int = 0;
const MARK: c_int = 1;
const SLOW: c_int = 2;
const DROP: c_int = 3;

unsafe extern "C" {
    fn native_np_packet(
        queue: *mut Queue,
        now_ns: u64,
        byte_s: u64,
        packet: *const Packet,
        random: u32,
    ) -> c_int;
}

fn native(
    mut queue: Queue,
    now_ns: u64,
    byte_s: u64,
    packet: Packet,
    random: u32,
) -> (c_int, Queue) {
    // SAFETY: both pointers are to live values of the layout that the header declares.
    let verdict = unsafe { native_np_packet(&mut queue, now_ns, byte_s, &packet, random) };
    (verdict, queue)
}

/// The rule of the paper with real numbers: credit, and the verdict, after one packet.
fn model(queue: Queue, now_ns: u64, byte_s: u64, packet: Packet, random: u32) -> (c_int, f64) {
    let idle_s = now_ns.saturating_sub(queue.last_ns) as f64 / 1e9;
    let filled = (queue.credit_bytes as f64 + idle_s * byte_s as f64).min(150_000.0);
    // The program works with whole bytes.
    let filled = filled.floor();
    let credit = filled - f64::from(packet.bytes);
    let large = packet.bytes > 120;
    let chance = (-credit - 60_000.0) / 517_500.0;
    let verdict = if credit < -600_000.0 || (large && credit < -577_500.0) {
        DROP
    } else if credit >= -60_000.0 {
        PASS
    } else if packet.ecn_capable != 0 {
        MARK
    } else if packet.tcp != 0 {
        if f64::from(random) / 2f64.powi(32) < chance { SLOW } else { PASS }
    } else if large {
        DROP
    } else {
        PASS
    };
    (verdict, if verdict == DROP { filled } else { credit })
}

proptest! {
    #[test]
    fn the_header_follows_the_paper(
        credit_bytes in -800_000i64..=150_000,
        idle_ns in prop_oneof![Just(0u64), 0u64..10_000_000, 0u64..10_000_000_000],
        byte_s in 1u64..12_500_000_000,
        bytes in prop_oneof![40u32..=130, 1500u32..=65_535],
        ecn_capable in 0u8..2,
        tcp in 0u8..2,
        random: u32,
    ) {
        let queue = Queue { credit_bytes, last_ns: 1 << 40 };
        let now_ns = queue.last_ns + idle_ns;
        let packet = Packet { bytes, ecn_capable, tcp };
        let (verdict, after) = native(queue, now_ns, byte_s, packet, random);
        let (expected, credit) = model(queue, now_ns, byte_s, packet, random);
        // A byte of rounding may decide at a threshold or in the lottery; both verdicts are then right.
        if verdict == expected {
            prop_assert!((after.credit_bytes as f64 - credit).abs() <= 1.0);
        } else {
            let less = Queue { credit_bytes: credit_bytes - 1, ..queue };
            let more = Queue { credit_bytes: credit_bytes + 1, ..queue };
            let near = [less, more].map(|q| model(q, now_ns, byte_s, packet, random).0);
            prop_assert!(near.contains(&verdict), "{verdict} instead of {expected}");
        }
        prop_assert_eq!(after.last_ns, now_ns);
        prop_assert!(after.credit_bytes <= 150_000);
    }
}

#[test]
fn a_clock_that_lags_earns_nothing() {
    let queue = Queue { credit_bytes: 0, last_ns: 1000 };
    let packet = Packet { bytes: 100, ecn_capable: 0, tcp: 1 };
    let (_, after) = native(queue, 900, 1_000_000_000, packet, 0);
    assert_eq!(after, Queue { credit_bytes: -100, last_ns: 1000 });
}

#[test]
fn a_year_of_idle_time_at_the_fastest_rate_does_not_overflow() {
    let queue = Queue { credit_bytes: i64::from(i32::MIN), last_ns: 0 };
    let packet = Packet { bytes: 100, ecn_capable: 0, tcp: 1 };
    let (verdict, after) = native(queue, 31_536_000_000_000_000, 12_500_000_000, packet, 0);
    assert_eq!((verdict, after.credit_bytes), (PASS, 149_900));
}

#[test]
fn the_state_is_what_the_program_declares() {
    type Declared = skel::nrm_paper::types::np_state;
    assert_eq!(size_of::<Declared>(), STATE_BYTES);
    assert_eq!(offset_of!(Declared, queue), 8);
    assert_eq!(offset_of!(Declared, packets), 24);
    assert_eq!(offset_of!(Declared, bytes), 56);
}

/// A cgroup that nobody is in, removed when dropped.
struct Cgroup(std::path::PathBuf);

impl Cgroup {
    fn new(name: &str) -> Cgroup {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mount = mounts.lines().find(|l| l.split(' ').nth(2) == Some("cgroup2"));
        let mount = mount.and_then(|l| l.split(' ').nth(1)).expect("cgroup v2 is mounted");
        let path = format!("{mount}/tgtest-{name}-{}", std::process::id());
        fs::create_dir(&path).unwrap();
        Cgroup(path.into())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

const TCP: u8 = 6;
const UDP: u8 = 17;
const NOT_ECT: u8 = 0;
const ECT0: u8 = 2;
const CE: u8 = 3;

fn frame(v6: bool, protocol: u8, ecn: u8, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; 14 + bytes];
    let ip = 14;
    if v6 {
        frame[12..14].copy_from_slice(&[0x86, 0xdd]);
        frame[ip] = 0x60;
        frame[ip + 1] = ecn << 4;
        frame[ip + 4..ip + 6].copy_from_slice(&(bytes as u16 - 40).to_be_bytes());
        frame[ip + 6] = protocol;
    } else {
        frame[12..14].copy_from_slice(&[0x08, 0x00]);
        frame[ip] = 0x45;
        frame[ip + 1] = ecn;
        frame[ip + 2..ip + 4].copy_from_slice(&(bytes as u16).to_be_bytes());
        frame[ip + 9] = protocol;
    }
    frame
}

/// From what a run gives back, in which the kernel has zeroed the Ethernet header.
fn ecn_of(frame: &[u8], v6: bool) -> u8 {
    if v6 { (frame[15] >> 4) & 3 } else { frame[15] & 3 }
}

struct Row {
    what: &'static str,
    direction: Direction,
    credit_bytes: i64,
    v6: bool,
    protocol: u8,
    ecn: u8,
    bytes: usize,
    /// Return value, ECN of the packet, credit after.
    expect: (u32, u8, i64),
}

fn table() -> Vec<Row> {
    let row = |what, credit_bytes, protocol, ecn, bytes, expect| Row {
        what,
        direction: Direction::Egress,
        credit_bytes,
        v6: false,
        protocol,
        ecn,
        bytes,
        expect,
    };
    vec![
        row("credit: pass", 0, TCP, NOT_ECT, 1500, (1, NOT_ECT, -1500)),
        row("at the mark: pass", -58_500, TCP, ECT0, 1500, (1, ECT0, -60_000)),
        row("below the mark, ECT: CE", -58_501, TCP, ECT0, 1500, (1, CE, -60_001)),
        row("below the mark, UDP with ECT: CE", -58_501, UDP, ECT0, 1500, (1, CE, -60_001)),
        row("below the mark, UDP: drop", -58_501, UDP, NOT_ECT, 1500, (0, NOT_ECT, -58_501)),
        row("below the mark, small UDP: pass", -59_999, UDP, NOT_ECT, 120, (1, NOT_ECT, -60_119)),
        row("probability 1: cn", -576_000, TCP, NOT_ECT, 1500, (3, NOT_ECT, -577_500)),
        row("large drop, TCP: drop and cn", -576_001, TCP, ECT0, 1500, (2, ECT0, -576_001)),
        row("large drop, UDP: drop", -576_001, UDP, ECT0, 1500, (0, ECT0, -576_001)),
        row("large drop, small: cn", -577_500, TCP, NOT_ECT, 120, (3, NOT_ECT, -577_620)),
        row("at the drop, small ECT: CE", -599_880, TCP, ECT0, 120, (1, CE, -600_000)),
        row("below the drop, small: drop", -599_881, TCP, ECT0, 120, (2, ECT0, -599_881)),
        Row { v6: true, ..row("IPv6: CE", -100_000, TCP, ECT0, 1500, (1, CE, -101_500)) },
        Row { v6: true, ..row("IPv6: cn", -577_400, TCP, NOT_ECT, 100, (3, NOT_ECT, -577_500)) },
        Row {
            direction: Direction::Ingress,
            ..row("ingress: CE", -100_000, TCP, ECT0, 1500, (1, CE, -101_500))
        },
        Row {
            direction: Direction::Ingress,
            ..row("ingress: no cn", -577_400, TCP, NOT_ECT, 100, (1, NOT_ECT, -577_500))
        },
        Row {
            direction: Direction::Ingress,
            ..row("ingress: drop", -576_001, TCP, ECT0, 1500, (0, ECT0, -576_001))
        },
    ]
}

#[test]
fn root_the_loaded_program_follows_the_table() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_the_loaded_program_follows_the_table: needs root");
        return;
    }
    let cgroup = Cgroup::new("paper-table");
    let rate = "1gbit".parse().ok();
    let options = PaperOptions { egress: rate, ingress: rate };
    let dir = File::open(&cgroup.0).unwrap();
    let paper = NrmPaper::attach(dir.as_fd(), options).unwrap();
    for row in table() {
        let gate = paper.gate(row.direction);
        let mut state = [0u64; STATE_WORDS];
        state[1] = row.credit_bytes.cast_unsigned();
        // In the future: no credit is earned meanwhile.
        state[2] = u64::MAX;
        let state: Vec<u8> = state.iter().flat_map(|w| w.to_ne_bytes()).collect();
        gate.state.update(&0u32.to_ne_bytes(), &state, MapFlags::ANY).unwrap();

        let frame = frame(row.v6, row.protocol, row.ecn, row.bytes);
        let mut out = frame.clone();
        let run = paper.run(row.direction, &frame, 1, Some(&mut out)).unwrap();
        let after = gate.read().unwrap();
        let found = (run.verdict, ecn_of(&out, row.v6), after.credit_bytes);
        assert_eq!(found, row.expect, "{}", row.what);
        let c = after.counters;
        let counted = [c.passed, c.marked, c.slowed, c.dropped];
        let total: u64 = counted.iter().map(|c| c.packets).sum();
        let bytes: u64 = counted.iter().map(|c| c.bytes.0).sum();
        assert_eq!((total, bytes), (1, row.bytes as u64), "{}", row.what);
    }
}

#[test]
fn a_limit_is_needed() {
    let dir = File::open("/").unwrap();
    let refused = NrmPaper::attach(dir.as_fd(), PaperOptions::default());
    assert!(matches!(refused, Err(PaperError::NoLimit)));
}
