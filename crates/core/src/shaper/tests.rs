//! The shaper with greedy and sparse senders in virtual time.

use std::{vec, vec::Vec};

use proptest::prelude::*;

use super::*;
use crate::completion::Ledger;

const MS: u64 = 1_000_000;

fn rate(bit_s: u64) -> Rate {
    Rate::from_bit_s(bit_s).unwrap()
}

fn shaper(classes: usize) -> Shaper<u32> {
    let wheel = WheelOptions { capacity: 1 << 12, ..WheelOptions::default() };
    Shaper::new(ShaperOptions { wheel, flows: 64, classes }, Nanos(0)).unwrap()
}

/// Runs greedy senders of one segment size each, held by completions, for `for_ns`. Returns the bytes of
/// each and the longest stay of a packet that was due at once.
fn run_greedy(shaper: &mut Shaper<u32>, flows: &[(FlowId, u32)], for_ns: u64) -> Vec<u64> {
    let mut ledger = Ledger::new(64, crate::completion::ALLOWANCE_SEGMENTS);
    let mut sent = vec![0u64; flows.len()];
    let mut now = Nanos(0);
    let send = |shaper: &mut Shaper<u32>, ledger: &mut Ledger, now, index: usize| {
        let (flow, bytes) = flows[index];
        while ledger.admit(flow.index(), bytes) {
            shaper.on_packet(now, flow, bytes, index as u32).unwrap();
        }
    };
    for index in 0..flows.len() {
        send(shaper, &mut ledger, now, index);
    }
    while let Some(deadline) = shaper.next_deadline() {
        now = now.max(deadline);
        if now.0 > for_ns {
            break;
        }
        while let Some(departure) = shaper.poll(now) {
            sent[departure.handle as usize] += u64::from(departure.bytes);
            if ledger.complete(departure.flow.index(), departure.bytes) {
                send(shaper, &mut ledger, now, departure.handle as usize);
            }
            assert!(shaper.len() <= 2 * flows.len(), "more than two segments a flow");
        }
    }
    sent
}

fn near(got: u64, wanted: f64, tolerance: f64) -> bool {
    (got as f64 - wanted).abs() <= wanted * tolerance
}

#[test]
fn flows_leave_at_their_own_rates() {
    let mut shaper = shaper(0);
    let flows: Vec<_> = (1..=50u64)
        .map(|n| {
            let options = FlowOptions { rate: Some(rate(n * 1_000_000)), ..FlowOptions::default() };
            (shaper.open_flow(options).unwrap(), 1_514)
        })
        .collect();
    let sent = run_greedy(&mut shaper, &flows, 1_000 * MS);
    for (n, bytes) in (1..).zip(sent) {
        let wanted = f64::from(n) * 125_000.0;
        assert!((bytes as f64 - wanted).abs() <= 2.0 * 1_514.0, "flow {n}: {bytes} of {wanted}");
    }
    let counters = shaper.counters();
    assert_eq!(counters.on_time, counters.departed);
}

#[test]
fn the_least_of_several_rates_holds() {
    let mut shaper = shaper(3);
    let class = |rate_bit_s, parent| ClassOptions {
        rate: rate(rate_bit_s),
        burst: Nanos(0),
        parent,
        fair: false,
    };
    let top = shaper.add_class(class(100_000_000, None)).unwrap();
    let left = shaper.add_class(class(30_000_000, Some(top))).unwrap();
    let right = shaper.add_class(class(500_000_000, Some(top))).unwrap();
    let mut open = |class, own: Option<u64>| {
        let options =
            FlowOptions { class: Some(class), rate: own.map(rate), ..FlowOptions::default() };
        (shaper.open_flow(options).unwrap(), 1_000)
    };
    let flows = [open(left, None), open(left, Some(5_000_000)), open(right, None)];
    let sent = run_greedy(&mut shaper, &flows, 1_000 * MS);
    // Of 3.75 MB a second, the flow with 0.625 of its own; the rest of 12.5 goes right.
    assert!(near(sent[1], 625_000.0, 0.01), "{sent:?}");
    assert!(near(sent[0] + sent[1], 3_750_000.0, 0.01), "{sent:?}");
    assert!(near(sent.iter().sum(), 12_500_000.0, 0.01), "{sent:?}");
}

/// Segments of 64 KB beside packets of 500 bytes: each gets its weight's part in bytes.
#[test]
fn a_fair_class_shares_by_weight() {
    let mut shaper = shaper(1);
    let options =
        ClassOptions { rate: rate(1_000_000_000), burst: Nanos(MS), parent: None, fair: true };
    let class = shaper.add_class(options).unwrap();
    let mut open = |weight, bytes| {
        let options = FlowOptions { class: Some(class), weight, ..FlowOptions::default() };
        (shaper.open_flow(options).unwrap(), bytes)
    };
    let flows = [open(1, 65_226), open(1, 500), open(2, 1_514), open(4, 30_000)];
    let sent = run_greedy(&mut shaper, &flows, 1_000 * MS);
    let total = sent.iter().sum::<u64>() as f64;
    assert!((0.99..=1.002).contains(&(total / 125e6)), "{sent:?}");
    for (bytes, weight) in sent.iter().zip([1.0, 1.0, 2.0, 4.0]) {
        assert!(near(*bytes, total * weight / 8.0, 0.02), "{sent:?}");
    }
}

/// A flow that sends one packet now and then is not held up by one that keeps its allowance full.
#[test]
fn a_sparse_flow_passes_a_greedy_one() {
    let wait = |fair| {
        let mut shaper = shaper(1);
        let rate = rate(100_000_000);
        let class =
            shaper.add_class(ClassOptions { rate, burst: Nanos(0), parent: None, fair }).unwrap();
        let options = FlowOptions { class: Some(class), ..FlowOptions::default() };
        let greedy = shaper.open_flow(options).unwrap();
        let sparse = shaper.open_flow(options).unwrap();
        // Twenty segments without backpressure: 105 ms of the class.
        for _ in 0..20 {
            shaper.on_packet(Nanos(0), greedy, 65_226, 0).unwrap();
        }
        shaper.on_packet(Nanos(MS), sparse, 100, 1).unwrap();
        let mut now = Nanos(0);
        loop {
            now = now.max(shaper.next_deadline().unwrap());
            while let Some(departure) = shaper.poll(now) {
                if departure.handle == 1 {
                    return now.0 - MS;
                }
            }
        }
    };
    assert!(wait(false) > 100 * MS);
    // One segment may be on its way: 5.2 ms.
    assert!(wait(true) < 6 * MS, "{} ns", wait(true));
}

/// Two frames of MTU size are 24 us at 1 Gbit/s; a thread that wakes 60 us late still uses the rate.
#[test]
fn a_late_poller_costs_a_fair_class_no_rate() {
    for flows in [1, 3] {
        let mut shaper = shaper(1);
        let class =
            ClassOptions { rate: rate(1_000_000_000), burst: Nanos(MS), parent: None, fair: true };
        let class = Some(shaper.add_class(class).unwrap());
        let mut ledger = Ledger::new(64, crate::completion::ALLOWANCE_SEGMENTS);
        let mut sent = vec![0u64; flows];
        for flow in 0..flows {
            let id = shaper.open_flow(FlowOptions { class, ..FlowOptions::default() }).unwrap();
            while ledger.admit(id.index(), 1_514) {
                shaper.on_packet(Nanos(0), id, 1_514, flow as u32).unwrap();
            }
        }
        let mut now = Nanos(0);
        while now.0 < 1_000 * MS {
            now = Nanos(shaper.next_deadline().unwrap().0.max(now.0) + 60_000);
            while let Some(departure) = shaper.poll(now) {
                sent[departure.handle as usize] += u64::from(departure.bytes);
                ledger.complete(departure.flow.index(), departure.bytes);
                while ledger.admit(departure.flow.index(), 1_514) {
                    shaper.on_packet(now, departure.flow, 1_514, departure.handle).unwrap();
                }
            }
        }
        let total = sent.iter().sum::<u64>() as f64;
        assert!((0.995..=1.002).contains(&(total / 125e6)), "{flows} flows: {sent:?}");
        assert!(sent.iter().all(|&bytes| near(bytes, total / flows as f64, 0.02)), "{sent:?}");
    }
}

/// The last packets of 200 flows at 64 kbit/s are due in 38 s, far beyond the wheel's 2: they leave at the
/// rate nevertheless.
#[test]
fn a_fair_class_is_a_hard_limit_beyond_the_horizon() {
    let wheel = WheelOptions { capacity: 1 << 12, ..WheelOptions::default() };
    let options = ShaperOptions { wheel, flows: 200, classes: 1 };
    let mut shaper = Shaper::new(options, Nanos(0)).unwrap();
    let options = ClassOptions { rate: rate(64_000), burst: Nanos(0), parent: None, fair: true };
    let class = shaper.add_class(options).unwrap();
    for n in 0..200 {
        let options = FlowOptions { class: Some(class), ..FlowOptions::default() };
        let flow = shaper.open_flow(options).unwrap();
        shaper.on_packet(Nanos(0), flow, 1_514, n).unwrap();
    }
    let (mut now, mut left) = (Nanos(0), 0u64);
    while let Some(deadline) = shaper.next_deadline() {
        now = now.max(deadline);
        while shaper.poll(now).is_some() {
            left += 1_514;
            assert!(left <= rate(64_000).bytes_in(now).0 + 1_514, "{left} bytes at {now:?}");
        }
    }
    assert_eq!(left, 200 * 1_514);
}

/// Each flow's packet is due by the flow's turn and waits for the class, as after a step of the clock.
#[test]
fn a_poll_moves_a_bounded_number_of_packets_on() {
    const PACKETS: usize = 2 * MOVES_MAX + 9;
    let wheel = WheelOptions { capacity: PACKETS, ..WheelOptions::default() };
    let options = ShaperOptions { wheel, flows: PACKETS, classes: 1 };
    let now = Nanos(1_000 * MS);
    let mut shaper = Shaper::new(options, now).unwrap();
    let options = ClassOptions { rate: rate(1_000_000), burst: Nanos(0), parent: None, fair: true };
    let class = shaper.add_class(options).unwrap();
    for _ in 0..PACKETS {
        let options = FlowOptions { class: Some(class), ..FlowOptions::default() };
        let flow = shaper.open_flow(options).unwrap();
        shaper.on_packet(now, flow, 1_000, 0).unwrap();
    }
    let now = shaper.next_deadline().unwrap();
    let mut polls = || {
        assert_eq!(shaper.poll(now), None);
        shaper.next_deadline().unwrap() <= now
    };
    assert_eq!([polls(), polls(), polls()], [true, true, false], "it says to call again");
    assert_eq!(shaper.len(), PACKETS);
}

#[test]
fn a_closed_flow_still_drains_and_its_id_is_dead() {
    let mut shaper = shaper(0);
    let options = FlowOptions { rate: Some(rate(1_000_000)), ..FlowOptions::default() };
    let flow = shaper.open_flow(options).unwrap();
    shaper.on_packet(Nanos(0), flow, 1_000, 7).unwrap();
    shaper.close_flow(flow).unwrap();
    assert_eq!(shaper.on_packet(Nanos(0), flow, 1_000, 8), Err(Rejected::NoSuchFlow));
    assert_eq!(shaper.close_flow(flow), Err(ShaperError::NoSuchFlow));
    let departure = shaper.poll(Nanos(9 * MS)).unwrap();
    assert_eq!((departure.handle, departure.flow), (7, flow));
    let again = shaper.open_flow(options).unwrap();
    assert_eq!(again.index(), flow.index());
    assert_ne!(again, flow);
    assert_eq!(shaper.on_packet(Nanos(0), flow, 1_000, 8), Err(Rejected::NoSuchFlow));
}

#[test]
fn bad_options_change_nothing() {
    let mut shaper = shaper(2);
    let options =
        ClassOptions { rate: rate(1), burst: Nanos(0), parent: Some(ClassId(7)), fair: false };
    assert_eq!(shaper.add_class(options), Err(ShaperError::NoSuchClass));
    for weight in [0, MAX_WEIGHT + 1] {
        let options = FlowOptions { weight, ..FlowOptions::default() };
        assert_eq!(shaper.open_flow(options), Err(ShaperError::Weight(weight)));
    }
    let class = Some(ClassId(0));
    let options = FlowOptions { class, ..FlowOptions::default() };
    assert_eq!(shaper.open_flow(options), Err(ShaperError::NoSuchClass));
}

proptest! {
    /// Whatever comes, when it comes: every packet that was taken leaves once, none before its stamp, and no
    /// class sends more than its rate and burst allow.
    #[test]
    fn what_is_taken_leaves_within_the_rates(
        fair in any::<bool>(),
        bit_s in 500_000_000u64..4_000_000_000,
        burst in 0u64..2_000_000,
        steps in prop::collection::vec((0u64..200_000, 0usize..5, 40u32..66_000), 1..200),
    ) {
        let mut shaper = shaper(2);
        let class = ClassOptions { rate: rate(bit_s), burst: Nanos(burst), parent: None, fair };
        let top = shaper.add_class(ClassOptions { fair: false, ..class }).unwrap();
        let class = shaper.add_class(ClassOptions { parent: Some(top), ..class }).unwrap();
        let flows: Vec<_> = (0..5)
            .map(|n| shaper.open_flow(FlowOptions {
                class: Some(class),
                weight: n + 1,
                // Without isolation such a packet leaves after the time that it took of the class.
                rate: (fair && n == 0).then(|| rate(bit_s / 3)),
                burst: Nanos(0),
            }).unwrap())
            .collect();
        // Start late enough that no credit is cut by time zero.
        let mut now = Nanos(1 << 40);
        let (mut accepted, mut left) = (0u32, Vec::new());
        let mut seen = vec![false; steps.len()];
        let mut poll_all = |shaper: &mut Shaper<u32>, now: Nanos| {
            while let Some(departure) = shaper.poll(now) {
                assert!(departure.stamp <= now && !seen[departure.handle as usize]);
                seen[departure.handle as usize] = true;
                left.push((now, u64::from(departure.bytes)));
            }
        };
        for (number, (gap, flow, bytes)) in (0u32..).zip(steps) {
            now = Nanos(now.0 + gap);
            poll_all(&mut shaper, now);
            accepted += u32::from(shaper.on_packet(now, flows[flow], bytes, number).is_ok());
        }
        for _ in 0..10_000 {
            let Some(deadline) = shaper.next_deadline() else { break };
            now = now.max(deadline);
            poll_all(&mut shaper, now);
        }
        prop_assert!(shaper.is_empty());
        prop_assert_eq!(left.len() as u32, accepted);
        // A packet may leave later than its stamp because nobody polled: that much it may catch up.
        let slack = burst + 200_000 + 2 * shaper.granularity().0;
        for first in (0..left.len()).step_by(7) {
            let (start, mut bytes) = (left[first].0.0, 0);
            for &(end, size) in &left[first..] {
                bytes += size;
                let bound = rate(bit_s).bytes_in(Nanos(end.0 - start + slack)).0 + 66_000;
                prop_assert!(bytes <= bound, "{bytes} of {bound}");
            }
        }
    }

    /// A port that goes, floods of flows and packets, clocks that step, stamps in the past and beyond the
    /// horizon: each is counted, everything stays within its bounds, and nothing leaves before its stamp.
    #[test]
    fn takes_any_abuse(
        granularity in prop_oneof![Just(1u64), Just(1_000)],
        capacity in 1usize..20,
        refuse in any::<bool>(),
        steps in prop::collection::vec((any::<u64>(), 0u32..6, any::<u32>(), 0u8..9), 1..300),
    ) {
        let wheel = WheelOptions {
            granularity: Nanos(granularity),
            horizon: Nanos(1_000_000),
            capacity,
            beyond: if refuse { Beyond::Refuse } else { Beyond::Clamp },
        };
        let options = ShaperOptions { wheel, flows: 4, classes: 2 };
        let mut shaper = Shaper::<u32>::new(options, Nanos(0)).unwrap();
        let class = ClassOptions { rate: rate(1_000), burst: Nanos(1), parent: None, fair: false };
        let top = shaper.add_class(class).unwrap();
        let class = ClassOptions { parent: Some(top), fair: true, ..class };
        let class = shaper.add_class(class).unwrap();
        prop_assert_eq!(
            shaper.add_class(ClassOptions { rate: rate(1), burst: Nanos(0), parent: None, fair: true }),
            Err(ShaperError::ClassesFull)
        );
        let (mut ids, mut latest) = (vec![], Nanos(0));
        let (mut steps_back, mut full, mut beyond, mut unknown, mut drained) = (0, 0, 0, 0, 0);
        for (time, flow, bytes, what) in steps {
            let now = Nanos(time >> (time % 64));
            let mut clock = |now: Nanos| {
                steps_back += u64::from(now < latest);
                latest = latest.max(now);
            };
            let held = shaper.len();
            match what {
                0 => {
                    let class = [None, Some(class), Some(top)][flow as usize % 3];
                    let rate = Rate::from_bit_s(time);
                    match shaper.open_flow(FlowOptions { class, rate, ..FlowOptions::default() }) {
                        Ok(id) => ids.push(id),
                        error => prop_assert_eq!(error, Err(ShaperError::FlowsFull)),
                    }
                }
                1 => _ = ids.get(flow as usize).map(|id| shaper.close_flow(*id)),
                2 | 3 => {
                    clock(now);
                    if let Some(departure) = shaper.poll(now) {
                        prop_assert!(departure.stamp <= latest || !refuse);
                    }
                }
                4 => {
                    shaper.drain(|_| drained += 1);
                    prop_assert!(shaper.is_empty() && shaper.next_deadline().is_none());
                }
                5 => {
                    let rate = Rate::from_bit_s(time).unwrap_or(rate(u64::MAX));
                    prop_assert!(shaper.set_class_rate(class, rate).is_ok());
                    prop_assert!(shaper.set_class_burst(top, now).is_ok());
                    let _ = ids.get(flow as usize).map(|id| shaper.set_flow_rate(*id, Some(rate)));
                }
                _ => if let Some(id) = ids.get(flow as usize) {
                    clock(now);
                    match shaper.on_packet(now, *id, bytes, 0) {
                        Ok(_) => prop_assert_eq!(shaper.len(), held + 1),
                        Err(Rejected::Wheel(Refused::Full)) => {
                            prop_assert_eq!(held, capacity);
                            full += 1;
                        }
                        Err(Rejected::Wheel(Refused::Beyond)) => {
                            prop_assert!(refuse);
                            beyond += 1;
                        }
                        Err(Rejected::NoSuchFlow) => unknown += 1,
                    }
                }
            }
            let counters = shaper.counters();
            prop_assert!(shaper.len() <= capacity);
            prop_assert_eq!(counters.accepted, counters.departed + drained + shaper.len() as u64);
            prop_assert_eq!((counters.drained, counters.clock_steps), (drained, steps_back));
            prop_assert_eq!((counters.wheel.full, counters.no_such_flow), (full, unknown));
            prop_assert_eq!(counters.wheel.beyond, beyond);
        }
    }
}
