//! The C of the kernel against its Rust model, and the loaded programs on a table of packets.

use libbpf_rs::{MapCore, MapFlags, ProgramInput};
use proptest::prelude::*;
use tidegate_core::{Bytes, Nanos, Rate, TokenBucket, token_bucket::BucketConfig};

use super::*;

/// `struct pl_packet`.
#[repr(C)]
struct NativePacket {
    wire_bytes: u32,
    may_owe: u32,
}

unsafe extern "C" {
    fn native_pl_take(
        bucket: *const intf::Bucket,
        full_ns: *mut u64,
        now_ns: u64,
        packet: *const NativePacket,
        carry: *mut u64,
    ) -> u32;
}

/// A bucket of the header, with its state.
struct Native {
    conf: intf::Bucket,
    full_ns: u64,
    carry: u64,
}

impl Native {
    fn take(&mut self, now_ns: u64, wire_bytes: u32, segments: bool) -> bool {
        let packet = NativePacket { wire_bytes, may_owe: segments.into() };
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
             prop_oneof![1u32..200, 1000u32..70_000, 0u32..1 << 20], any::<bool>()),
            1..200,
        ),
    ) {
        let config = config(bit_s, burst);
        let mut now = start;
        let mut model = TokenBucket::new(config, Nanos(now));
        let mut native = Native { conf: config.into(), full_ns: 0, carry: 0 };
        for (gap, wire_bytes, segments) in steps {
            now += gap;
            let expected = match segments {
                true => model.on_segments(Nanos(now), wire_bytes),
                false => model.on_packet(Nanos(now), wire_bytes),
            };
            prop_assert_eq!(native.take(now, wire_bytes, segments), expected);
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
            passed += if native.take(now, bytes, false) { u64::from(bytes) } else { 0 };
            let rate = Rate::from_bit_s(bit_s).unwrap();
            prop_assert!(passed <= burst + rate.bytes_in(Nanos(latest - start)).0);
        }
    }
}

/// One second in nanoseconds: the tables' times are so far apart that the time a test takes does not matter.
const S: u64 = 1_000_000_000;
const UDP: u8 = 17;
const FRAME_BYTES: u64 = 1000;
/// A byte takes 10 ms: a bucket of ten seconds holds one frame.
const BIT_S: u64 = 800;

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

/// An Ethernet frame of UDP.
fn frame() -> Vec<u8> {
    let mut frame = vec![0; FRAME_BYTES as usize];
    frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    frame[16..18].copy_from_slice(&986u16.to_be_bytes());
    frame[23] = UDP;
    frame
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * S + now.tv_nsec as u64
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
            Hook::CgroupEgress | Hook::CgroupIngress => Place::Cgroup,
            Hook::Out | Hook::In if row.port => Place::Port,
            Hook::Out | Hook::In => Place::Device,
        };
        let mut storage = MaybeUninit::uninit();
        let police = load(&mut storage, place).unwrap();
        let bucket = intf::Bucket {
            cost: (10_000_000 << 24),
            rate: BIT_S,
            burst: 2 * FRAME_BYTES * 8_000_000_000,
            fill_ns: 20 * S,
        };
        let direction = direction_of(&row);
        let mut limit = intf::Limit {
            flags: intf::FLAG_POLICE | if row.loopback { intf::FLAG_LOOPBACK } else { 0 },
            ..Default::default()
        };
        limit.police[direction] = bucket;
        let maps = maps(&police, &limit).unwrap();
        let key = (direction as u32).to_ne_bytes();
        let now = monotonic_ns();
        let finish_ns = now + row.missing_s * S;
        let queue = intf::Queue { finish_ns, ..Default::default() };
        maps.queues.update(&key, bytemuck::bytes_of(&queue), MapFlags::ANY).unwrap();

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
        for (index, outcome) in intf::OUTCOME_TABLE.iter().enumerate() {
            let expected = if outcome.name == row.outcome { (1, FRAME_BYTES) } else { (0, 0) };
            let found = (reading.counters.packets[index], reading.counters.bytes[index]);
            assert_eq!(found, expected, "{}: {}", row.what, outcome.name);
        }
        // A full bucket is paid from the present, which is a little later.
        let missing = reading.queue.finish_ns - now;
        let expected = row.missing_after_s * S;
        assert!((expected..expected + S).contains(&missing), "{}: {missing} ns", row.what);
    }
}
