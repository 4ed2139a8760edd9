//! Rates and depths that change while packets pass: whatever is changed when, no byte is given that no rate
//! has earned.

use crate::limit::Lease;
use std::{
    cell::UnsafeCell,
    ptr,
    sync::{
        Mutex,
        atomic::{AtomicPtr, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use tidegate_core::{
    Bytes, Direction, Nanos, Rate, Scheme, Span, TokenBucket,
    meter::{ColourMode, MeterKind},
    queue_options::VirtualQueueOptions,
    token_bucket::{BucketConfig, UNITS_PER_BYTE, earned},
};

use super::{
    group_tests::{is_root, run, v4},
    kernel_tests::{NativePacket, UDP, boottime_ns, native_pl_colour},
    *,
};
use crate::bpf::lookup;

unsafe extern "C" {
    fn native_fp_colour(
        policy: *const intf::Policy,
        meter: *mut intf::Meter,
        carry: *mut u64,
        table: *mut u64,
        now_ns: u64,
        flow: u64,
        wire_bytes: u32,
    ) -> u32;
    fn native_fp_table_bytes() -> u64;
}

const GREEN: u32 = 0;
const YELLOW: u32 = 1;
/// The longest packet of these tests.
const PACKET_BYTES: u32 = 70_000;
/// A change rounds away three bytes of what was used, three of what was earned, and at most two nanoseconds
/// at 100 Gbit/s: the time until the bucket is full is rounded up, and a change in the same nanosecond as the
/// one before begins a nanosecond later.
const ROUNDED_BYTES: u64 = 32;

/// A meter of the header with its state.
#[derive(Default)]
struct Native {
    policy: intf::Policy,
    meter: intf::Meter,
    carry: [u64; 2],
}

impl Native {
    /// The policy from `now_ns` on.
    fn change(&mut self, now_ns: u64, policy: intf::Policy) {
        self.policy = policy.carried_on(&self.policy, Nanos(now_ns));
    }

    fn colour(&mut self, now_ns: u64, wire_bytes: u32, may_owe: u32) -> u32 {
        let packet = NativePacket { wire_bytes, may_owe };
        // SAFETY: every pointer is to a live value of the layout that the header declares.
        unsafe {
            native_pl_colour(
                &self.policy,
                &mut self.meter,
                self.carry.as_mut_ptr(),
                now_ns,
                &packet,
                GREEN,
            )
        }
    }

    /// Units in the committed bucket.
    fn units(&self, now_ns: u64) -> u64 {
        let intf::Bucket { rate, burst, .. } = self.policy.committed;
        let full_ns = self.meter.side().full_ns;
        if full_ns < now_ns {
            return burst;
        }
        let missing = u128::from(full_ns - now_ns) * u128::from(rate) + u128::from(self.carry[0]);
        u64::try_from(u128::from(burst).saturating_sub(missing)).unwrap()
    }
}

fn one_bucket(bit_s: u64, burst: u64) -> (BucketConfig, intf::Policy) {
    let config = BucketConfig::new(Rate::from_bit_s(bit_s).unwrap(), Bytes(burst)).unwrap();
    (config, intf::Policy { committed: config.into(), ..intf::Policy::default() })
}

fn any_rate() -> impl Strategy<Value = u64> {
    prop_oneof![8_000u64..10_000_000, 8_000u64..=100_000_000_000]
}

fn any_gap() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..3_000, 0u64..3_000_000, 0u64..1_000_000_000]
}

/// The meters that there are, by number.
fn metered(kind: u8, rates: [u64; 2], bursts: [u64; 2]) -> intf::Policy {
    let rate = |bit_s| Rate::from_bit_s(bit_s).unwrap();
    let ([c, e], [cbs, ebs]) = (rates.map(rate), bursts.map(Bytes));
    let kind = match kind {
        0 => MeterKind::SingleRate { cir: c, cbs, ebs },
        1 => MeterKind::TwoRate { cir: c.min(e), cbs, pir: c.max(e), pbs: ebs },
        _ => MeterKind::Differentiated { cir: c, cbs, eir: e, ebs },
    };
    intf::Policy::default().metered(&kind.config(ColourMode::Blind).unwrap())
}

proptest! {
    /// A packet passes the header if it passes the model, which is told of each change at once, but for what
    /// changes have rounded away. Where several come before a packet, all of them count.
    #[test]
    fn a_change_leaves_the_header_with_what_the_model_has(
        start in 1u64..1 << 60,
        steps in prop::collection::vec(
            (any_gap(), 1u32..PACKET_BYTES,
             prop::option::of((
                 prop::collection::vec((any_gap(), any_rate()), 0..3), any_rate(), 1_500u64..200_000,
             ))),
            1..200,
        ),
    ) {
        let (config, policy) = one_bucket(1_000_000, 50_000);
        let mut now = start;
        let mut model = TokenBucket::new(config, Nanos(now));
        let mut native = Native::default();
        native.change(now, policy);
        prop_assert_eq!(native.colour(now, 0, 0), GREEN);
        let mut changes = 0;
        let mut depth = 50_000;
        for (gap, bytes, to) in steps {
            let (unmet, rate, burst) = to.unwrap_or((vec![], 0, depth));
            let last = (rate > 0).then_some((0, rate, burst));
            for (gap, bit_s, burst) in unmet.into_iter().map(|(g, r)| (g, r, depth)).chain(last) {
                now += gap;
                let (config, policy) = one_bucket(bit_s, burst);
                native.change(now, policy);
                model.set_config(Nanos(now), config);
                changes += 1;
            }
            depth = burst;
            now += gap;
            let passes = native.colour(now, bytes, 0) == GREEN;
            let slack = changes * ROUNDED_BYTES * UNITS_PER_BYTE;
            if passes {
                prop_assert!(model.on_packet(Nanos(now), bytes), "{bytes} at {now}");
            } else {
                let needed = u64::from(bytes) * UNITS_PER_BYTE;
                prop_assert!(model.units(Nanos(now)) < needed + slack);
            }
            let (has, should) = (native.units(now), model.units(Nanos(now)));
            prop_assert!(has <= should && should - has <= slack, "{has} {should} {changes}");
        }
    }

    /// No more passes than the deepest bucket, what each rate earned in its time, and the longest packet.
    #[test]
    fn no_change_adds_a_byte(
        start in 1u64..1 << 60,
        steps in prop::collection::vec(
            (any_gap(), 1u32..PACKET_BYTES, 0u32..3,
             prop::option::of((any_rate(), 1_500u64..200_000))),
            1..300,
        ),
    ) {
        let (mut native, mut now) = (Native::default(), start);
        native.change(now, one_bucket(1_000_000, 50_000).1);
        let (mut rate, mut deepest, mut units, mut passed) = (1_000_000u64, 50_000u64, 0u128, 0u128);
        for (gap, bytes, may_owe, change) in steps {
            now += gap;
            units += u128::from(gap) * u128::from(rate);
            if let Some((bit_s, burst)) = change {
                native.change(now, one_bucket(bit_s, burst).1);
                (rate, deepest) = (bit_s, deepest.max(burst));
            }
            if native.colour(now, bytes, may_owe) == GREEN {
                passed += u128::from(bytes);
            }
            let most = u128::from(deepest) + u128::from(PACKET_BYTES) + units / 8_000_000_000;
            prop_assert!(passed <= most, "{passed} of {most}");
        }
    }

    /// The same of a meter's two buckets.
    #[test]
    fn no_change_adds_a_byte_to_a_meter(
        kind in 0u8..3,
        start in 1u64..1 << 60,
        steps in prop::collection::vec(
            (any_gap(), 1u32..2_000,
             prop::option::of((any_rate(), any_rate(), 1_500u64..200_000, 1_500u64..200_000))),
            1..300,
        ),
    ) {
        let (mut native, mut now) = (Native::default(), start);
        let first = metered(kind, [1_000_000, 2_000_000], [50_000, 30_000]);
        native.change(now, first);
        let mut deepest = [50_000u64, 30_000];
        let (mut units, mut passed) = ([0u128; 2], [0u128; 2]);
        for (gap, bytes, change) in steps {
            now += gap;
            let rates = [native.policy.committed.rate, native.policy.second.rate];
            for (units, rate) in units.iter_mut().zip(rates) {
                *units += u128::from(gap) * u128::from(rate);
            }
            if let Some((c, e, cbs, ebs)) = change {
                native.change(now, metered(kind, [c, e], [cbs, ebs]));
                deepest = [deepest[0].max(cbs), deepest[1].max(ebs)];
            }
            match native.colour(now, bytes, 0) {
                GREEN => passed[0] += u128::from(bytes),
                YELLOW => passed[1] += u128::from(bytes),
                _ => {}
            }
            let earned = units.map(|units| units / 8_000_000_000);
            let [c, e] = [0, 1].map(|i| u128::from(deepest[i]) + earned[i] + 1);
            let all = passed[0] + passed[1];
            match kind {
                0 => prop_assert!(all <= c + u128::from(deepest[1]) && passed[0] <= c),
                1 => prop_assert!(all <= e && passed[0] <= c),
                _ => prop_assert!(passed[0] <= c && passed[1] <= e),
            }
        }
    }
}

/// From 2 Mbit/s to 8 kbit/s and back: the times of the report that found it.
#[test]
fn an_empty_bucket_stays_empty_when_the_rate_falls() {
    let [fast, slow] = [2_000_000, 8_000].map(|bit_s| one_bucket(bit_s, 75_000).1);
    let mut native = Native::default();
    let start = 1 << 40;
    native.change(start, fast);
    let pass = |native: &mut Native, now| {
        (0..200).filter(|_| native.colour(now, 1_000, 0) == GREEN).count()
    };
    assert_eq!(pass(&mut native, start), 75);
    native.change(start, slow);
    assert_eq!(pass(&mut native, start), 0);
    // Twenty alternations in 2 ms earn 250 bytes.
    for change in 1..=20u64 {
        let now = start + change * 100_000;
        native.change(now, if change.is_multiple_of(2) { fast } else { slow });
        assert_eq!(pass(&mut native, now), 0, "change {change}");
    }
}

/// A packet whose CPU stood still has the policy of before a change: it turns nothing back, and charges
/// nothing.
#[test]
fn a_late_packet_turns_no_meter_back() {
    for kind in 0..4 {
        let of = |rates| {
            if kind < 3 {
                metered(kind, rates, [75_000; 2])
            } else {
                one_bucket(rates[0], 75_000).1
            }
        };
        let mut native = Native::default();
        let start = 1 << 40;
        native.change(start, of([8_000; 2]));
        while native.colour(start, 1_000, 0) <= YELLOW {}
        let old = native.policy;
        // A day later by the books, and at once by the clock of the late packet.
        native.change(start + 1_000_000, of([10_000_000_000; 2]));
        let now = start + 2_000_000;
        while native.colour(now, 1_000, 0) <= YELLOW {}
        let (meter, new) = (native.meter, native.policy);
        for late_ns in [0, 1_000_000, 1_000_000_000] {
            native.policy = old;
            assert!(native.colour(now + late_ns, 1_000, 0) > YELLOW, "{kind}");
            assert_eq!(native.meter, meter, "{kind}");
        }
        native.policy = new;
        assert!(native.colour(now, 1_000, 0) > YELLOW, "{kind}: the bucket is as empty as it was");
    }
}

/// A lease's rate ends by the clock that packets are metered by, so a host that has slept through its end
/// finds the bucket that it would have had awake.
#[test]
fn a_lease_that_ends_asleep_shuts_nothing() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    let [lent, own] = [2_000_000, 8_000].map(|bit_s| one_bucket(bit_s, 75_000).1);
    let mut native = Native::default();
    let start = 1 << 40;
    native.change(start, lent);
    while native.colour(start, 1_000, 0) == GREEN {}
    let ends = start + HOUR_NS;
    native.change(ends, own);
    // Asleep for two hours; by the clock of the lease and of the packets it is now two hours later.
    let now = start + 2 * HOUR_NS;
    assert_eq!((0..200).filter(|_| native.colour(now, 1_000, 0) == GREEN).count(), 75);
}

/// How a packet meets the bucket.
#[derive(Debug, Clone, Copy)]
enum How {
    /// With the debt it may have, as `enum pl_debt`.
    Meter(u32),
    /// As one of several flows, which have equal parts.
    Fair,
}

/// What several CPUs work on.
struct Shared {
    meter: UnsafeCell<intf::Meter>,
    table: Vec<AtomicU64>,
    /// The one in force, and all that there have been.
    policy: AtomicPtr<intf::Policy>,
    policies: Mutex<Vec<&'static intf::Policy>>,
    now_ns: AtomicU64,
    /// What may have passed beyond what the books say, of each bucket; both only where a thread stands still.
    slack_bytes: [AtomicU64; 2],
    passed: [AtomicU64; 2],
    refused: AtomicU64,
}

impl Shared {
    /// Puts a policy in force.
    fn set(&self, policy: &intf::Policy) {
        let mut policies = self.policies.lock().unwrap();
        let earlier = policies.last().copied().copied().unwrap_or_default();
        let at_ns = self.now_ns.load(SeqCst);
        let next = policy.carried_on(&earlier, Nanos(at_ns));
        // Whoever works by it may be late.
        let next: &intf::Policy = Box::leak(Box::new(next));
        policies.push(next);
        self.policy.store(ptr::from_ref(next).cast_mut(), SeqCst);
        // Until it was there the earlier one was in force.
        let changed = next.since_ns != earlier.since_ns;
        let late = Nanos(if changed { self.now_ns.load(SeqCst) - at_ns } else { 0 });
        for (slack, bucket) in self.slack_bytes.iter().zip([earlier.committed, earlier.second]) {
            slack.fetch_add(earned(bucket.rate, late).0, SeqCst);
        }
    }
}

// SAFETY: meter and table are only ever touched through pointers, by the header's atomic operations.
unsafe impl Sync for Shared {}

/// Threads send packets through one meter while its policy changes; the time is an argument that they move on
/// together, so nothing depends on how fast they are or on who is interrupted where.
fn hammer(policies: &[intf::Policy], how: How) -> (intf::Policy, [u64; 2], u64) {
    const THREADS: usize = 4;
    const PACKETS: u64 = 50_000;
    const CHANGES: u64 = 400;
    const START_NS: u64 = 1 << 40;
    let shared = Shared {
        meter: UnsafeCell::default(),
        // SAFETY: it takes nothing and returns a constant.
        table: (0..unsafe { native_fp_table_bytes() } / 8).map(|_| AtomicU64::new(0)).collect(),
        policy: AtomicPtr::default(),
        policies: Mutex::default(),
        now_ns: AtomicU64::new(START_NS),
        slack_bytes: [0, 0].map(AtomicU64::new),
        passed: [0, 0].map(AtomicU64::new),
        refused: AtomicU64::new(0),
    };
    shared.set(&policies[0]);
    let first = shared.policy.load(SeqCst);
    let first_of_all = NativePacket { wire_bytes: 0, may_owe: 0 };
    // SAFETY: as below; the threads come later.
    unsafe {
        let meter = shared.meter.get();
        native_pl_colour(first, meter, [0; 2].as_mut_ptr(), START_NS, &first_of_all, GREEN);
    }
    thread::scope(|scope| {
        for thread in 0..THREADS as u64 {
            let shared = &shared;
            scope.spawn(move || {
                let mut carry = [0u64; 2];
                for i in 0..PACKETS {
                    if thread == 0 && i.is_multiple_of(PACKETS / CHANGES) {
                        shared.set(&policies[(i / (PACKETS / CHANGES)) as usize % policies.len()]);
                    }
                    // The time first: a policy that came later has not earned anything by then.
                    let now_ns = shared.now_ns.fetch_add(997, SeqCst);
                    let policy = shared.policy.load(SeqCst);
                    let wire_bytes = 60 + (i * 7919 + thread * 104_729) as u32 % 1_440;
                    let meter = shared.meter.get();
                    let carry = carry.as_mut_ptr();
                    // SAFETY: policies live until all threads have ended, the rest as long as `shared`.
                    let colour = unsafe {
                        match how {
                            How::Meter(may_owe) => {
                                let packet = NativePacket { wire_bytes, may_owe };
                                native_pl_colour(policy, meter, carry, now_ns, &packet, GREEN)
                            }
                            How::Fair => {
                                let (table, flow) =
                                    (shared.table.as_ptr().cast_mut().cast(), i % 7 + 1);
                                native_fp_colour(
                                    policy, meter, carry, table, now_ns, flow, wire_bytes,
                                )
                            }
                        }
                    };
                    match shared.passed.get(colour as usize) {
                        Some(passed) => passed.fetch_add(wire_bytes.into(), SeqCst),
                        None => shared.refused.fetch_add(1, SeqCst),
                    };
                }
            });
        }
    });
    let last = **shared.policies.lock().unwrap().last().unwrap();
    let end = Nanos(shared.now_ns.into_inner());
    let elapsed = Nanos(end.0.saturating_sub(last.since_ns));
    let mut ended = last;
    let slack = shared.slack_bytes.map(AtomicU64::into_inner);
    for (bucket, slack) in [&mut ended.committed, &mut ended.second].into_iter().zip(slack) {
        bucket.earned_bytes += earned(bucket.rate, elapsed).0 + slack;
    }
    let passed = shared.passed.map(AtomicU64::into_inner);
    assert_eq!(shared.meter.into_inner().turn % 2, 0);
    assert!(passed[0] > 0 && shared.refused.into_inner() > 0, "{passed:?}");
    (ended, passed, THREADS as u64 * 1_500)
}

#[test]
fn threads_pass_no_more_than_was_earned() {
    let policies =
        [80_000_000, 8_000, 400_000_000, 1_000_000].map(|bit_s| one_bucket(bit_s, 20_000).1);
    for policies in [&policies[..], &policies[..1]] {
        for how in [How::Meter(0), How::Meter(1), How::Meter(2), How::Fair] {
            let (ended, passed, packets) = hammer(policies, how);
            let earned = ended.committed.earned_bytes;
            let most = 20_000 + earned + packets;
            let count = policies.len();
            assert!(passed[0] <= most, "{how:?}, {count} policies: {} of {most}", passed[0]);
            // Packets want more all the time, and where nothing changes get all of it; then there is no
            // slack.
            let least = if policies.len() == 1 { earned - earned / 8 } else { 1 };
            assert!(passed[0] >= least, "{how:?}: {} of {least}", passed[0]);
        }
    }
}

#[test]
fn threads_get_no_more_colours_than_were_earned() {
    let of = |kind| {
        [[80_000_000, 90_000_000], [1_000_000, 400_000_000], [8_000, 8_000]]
            .map(|rates| metered(kind, rates, [20_000, 10_000]))
    };
    for kind in 0..3 {
        let (ended, passed, packets) = hammer(&of(kind), How::Meter(0));
        let committed = ended.committed.earned_bytes + 20_000 + packets;
        let second = ended.second.earned_bytes + 10_000 + packets;
        assert!(passed[0] <= committed, "{kind}: {passed:?} of {committed}");
        match kind {
            0 => assert!(passed[0] + passed[1] <= committed + 10_000, "{passed:?} of {committed}"),
            1 => assert!(passed[0] + passed[1] <= second, "{passed:?} of {second}"),
            _ => assert!(passed[1] <= second, "{passed:?} of {second}"),
        }
    }
}

/// A limit whose bucket is as many bytes at every rate.
fn limited(burst: u64, fair: bool) -> LimitOptions {
    let queue = VirtualQueueOptions {
        burst: Some(Span::Size(Bytes(burst))),
        ..VirtualQueueOptions::new("2mbit".parse().unwrap())
    };
    LimitOptions {
        egress: Some(queue),
        ingress: Some(queue),
        loopback: true,
        scheme: Scheme::Police,
        police: tidegate_core::police::Policy { fair, ..Default::default() },
        ..LimitOptions::default()
    }
}

/// Has a group change the rate while a flood of one flow passes; by the host's clock, which is only read.
fn alternate(maps: &LimitMaps, fair: bool, mut passes: impl FnMut() -> bool) {
    const BURST: u64 = 75_000;
    const BYTES: u64 = 1_000;
    let (fast, slow) = ("2mbit".parse::<Rate>().unwrap(), "8kbit".parse::<Rate>().unwrap());
    let start = boottime_ns();
    let mut passed = (0..200).filter(|_| passes()).count() as u64;
    let mut earned_ns = 0;
    let mut since = start;
    for change in 0..20u64 {
        let rate = if change.is_multiple_of(2) { slow } else { fast };
        assert!(maps.set_rate(&limited(BURST, fair), Direction::Egress, rate, None).unwrap());
        let now = boottime_ns();
        // Until now it was the other.
        earned_ns += if rate == slow { now - since } else { 0 };
        since = now;
        passed += (0..100).filter(|_| passes()).count() as u64;
    }
    let end = boottime_ns();
    earned_ns += end - since;
    let all = earned(fast.bit_s(), Nanos(earned_ns)).0 + earned(slow.bit_s(), Nanos(end - start)).0;
    let most = BURST + all + 2 * BYTES;
    assert!(passed * BYTES <= most, "{} bytes of {most}", passed * BYTES);
    // With equal parts a flow that is alone has eight ninths of the bucket.
    let least = if fair { BURST * 8 / 9 } else { BURST };
    assert!(passed * BYTES >= least, "{passed} packets");
}

#[test]
fn root_police_a_rate_that_changes_gives_nothing_away() {
    if !is_root("root_police_a_rate_that_changes_gives_nothing_away") {
        return;
    }
    let frame = v4(1, UDP, 0, [1, 2]);
    for (place, fair) in
        [(AttachPoint::Device, false), (AttachPoint::Device, true), (AttachPoint::Cgroup, false)]
    {
        let mut storage = MaybeUninit::uninit();
        let police = load(&mut storage, place, false).unwrap();
        let maps = maps(&police, &limited(75_000, fair).encode(0).unwrap()).unwrap();
        let program = match place {
            AttachPoint::Cgroup => &police.progs.police_egress,
            _ => &police.progs.police_out,
        };
        let passes = || {
            let before = maps.read(Direction::Egress).unwrap().counters.packets[0];
            run(program, &frame, 1);
            maps.read(Direction::Egress).unwrap().counters.packets[0] > before
        };
        alternate(&maps, fair, passes);
    }
}

/// A change leaves the settings in force as they are, whether a lease is on or over: a packet that has them
/// already sees no half of others, and a writer that dies has changed nothing.
#[test]
fn root_police_a_change_touches_nothing_in_force() {
    if !is_root("root_police_a_change_touches_nothing_in_force") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Device, false).unwrap();
    let asked = limited(75_000, false);
    let maps = maps(&police, &asked.encode(0).unwrap()).unwrap();
    let entries = || -> Vec<intf::Entry> {
        let at = |key| lookup(&maps.limit, "limit", key).unwrap();
        (0..intf::LIMITS as u32).map(at).collect()
    };
    let in_force = || {
        let all = entries();
        let copy = (all[0].copy != 0) as usize;
        let mut whole = all[copy * intf::COPY..][..intf::COPY].to_vec();
        whole[0].copy = 0;
        (copy, whole)
    };
    let rates: [Rate; 2] = ["3mbit", "8kbit"].map(|rate| rate.parse().unwrap());
    // Leases that are on, over already, and none.
    for (i, ends) in [3_600 * 1_000_000_000, 0, i64::MIN, 0, 0].into_iter().enumerate() {
        let until = Nanos(boottime_ns().saturating_add_signed(ends));
        let lease = (ends != i64::MIN).then_some(Lease { until, then: rates[1] });
        let (copy, before) = in_force();
        let frame = v4(1, UDP, 0, [1, 2]);
        run(&police.progs.police_out, &frame, 1);
        assert!(maps.set_rate(&asked, Direction::Egress, rates[i % 2], lease).unwrap());
        let (other, after) = in_force();
        assert_ne!(copy, other, "change {i}");
        let mut untouched = entries()[copy * intf::COPY..][..intf::COPY].to_vec();
        untouched[0].copy = 0;
        assert_eq!(untouched, before, "change {i}");
        // By the clock of its packets: nothing begins later than it is in force.
        let [is, then] = [0, 1].map(|i| after[i].police[0].since_ns);
        assert!(is <= boottime_ns() && is > before[0].police[0].since_ns, "change {i}");
        if lease.is_some() {
            let ends = until.0.max(is);
            assert!((ends..=ends + 1).contains(&then), "change {i}: {then}, not {ends}");
        }
    }
}

/// What is lent ends in the program, and the bucket has what it had.
#[test]
fn root_police_a_lease_that_ends_gives_nothing_away() {
    if !is_root("root_police_a_lease_that_ends_gives_nothing_away") {
        return;
    }
    let frame = v4(1, UDP, 0, [1, 2]);
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, AttachPoint::Device, false).unwrap();
    let asked = limited(75_000, false);
    let maps = maps(&police, &asked.encode(0).unwrap()).unwrap();
    let (fast, slow) = ("2mbit".parse::<Rate>().unwrap(), "8kbit".parse::<Rate>().unwrap());
    let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let boot = boot.tv_sec as u64 * 1_000_000_000 + boot.tv_nsec as u64;
    let start = boottime_ns();
    let until = Nanos(boot + 50_000_000);
    let lease = Lease { until, then: slow };
    assert!(maps.set_rate(&asked, Direction::Egress, fast, Some(lease)).unwrap());
    let passed = || maps.read(Direction::Egress).unwrap().counters.packets[0];
    let deadline = Instant::now() + Duration::from_secs(30);
    // Until it has ended, and for some packets after.
    let mut after = 0;
    while after < 500 {
        run(&police.progs.police_out, &frame, 1);
        let ended = maps.limit().unwrap().rate(Direction::Egress) == Some(slow);
        after += u32::from(ended);
        assert!(Instant::now() < deadline);
    }
    let lent = earned(fast.bit_s(), Nanos(50_000_000)).0;
    let most = 75_000 + lent + earned(slow.bit_s(), Nanos(boottime_ns() - start)).0 + 2_000;
    let bytes = passed() * 1_000;
    assert!(bytes <= most, "{bytes} bytes of {most}");
    assert!(bytes >= 75_000 + lent - 2_000, "{bytes} bytes, {lent} lent");
}
