//! Any sequence of operations on a shaper, on any clock: bytes are conserved, counters add up, nothing is
//! early.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tidegate_core::{
    Nanos, Rate,
    shaper::{
        ClassOptions, Departure, FlowId, FlowOptions, Rejected, Shaper, ShaperError, ShaperOptions,
    },
    wheel::{Beyond, Refused, WheelOptions},
};

#[derive(Debug, Arbitrary)]
struct Case {
    shift: u8,
    slots_log: u8,
    capacity: u16,
    refuse: bool,
    start: u64,
    steps: Vec<Step>,
}

#[derive(Debug, Arbitrary)]
enum Step {
    Class { bit_s: u64, burst_ns: u32, parent: Option<u8>, fair: bool },
    ClassRate { class: u8, bit_s: u64 },
    ClassBurst { class: u8, burst_ns: u64 },
    Open { class: Option<u8>, bit_s: Option<u64>, burst_ns: u32, weight: u16 },
    FlowRate { flow: u8, bit_s: Option<u64> },
    Close { flow: u8 },
    Packets { flow: u8, bytes: u32, count: u8 },
    Poll { count: u8 },
    Tick { by: u16 },
    Jump { by: i64 },
    ToDeadline,
    Drain,
}

const FLOWS: usize = 12;
const CLASSES: usize = 12;
const STEPS_MOST: usize = 1_000;

/// A packet that was taken, by its handle.
#[derive(Debug, Clone, Copy)]
struct Sent {
    flow: FlowId,
    bytes: u32,
    here: bool,
}

/// What comes out must have gone in, once.
fn leaves(sent: &mut [Sent], departure: &Departure<u32>) {
    let packet = &mut sent[departure.handle as usize];
    assert!(std::mem::take(&mut packet.here), "{departure:?} came twice");
    assert_eq!((packet.flow, packet.bytes), (departure.flow, departure.bytes));
}

fuzz_target!(|case: Case| {
    let shift = u32::from(case.shift % 20);
    let slots_log = 1 + u32::from(case.slots_log % 14);
    let capacity = usize::from(case.capacity % 300) + 1;
    let wheel = WheelOptions {
        granularity: Nanos(1 << shift),
        horizon: Nanos(1 << (slots_log + shift)),
        capacity,
        beyond: if case.refuse { Beyond::Refuse } else { Beyond::Clamp },
    };
    let (mut now, mut latest) = (case.start, case.start);
    let options = ShaperOptions { wheel, flows: FLOWS, classes: CLASSES };
    let mut shaper = Shaper::<u32>::new(options, Nanos(now)).expect("legal options");
    let (mut classes, mut flows) = (Vec::new(), Vec::new());
    let (mut sent, mut steps_back) = (Vec::new(), 0u64);
    let (mut departed, mut drained, mut full, mut beyond, mut closed) =
        (0u64, 0u64, 0u64, 0u64, 0u64);
    let rate = |bit_s: u64| Rate::from_bit_s(bit_s.max(1)).expect("not zero");
    for step in case.steps.iter().take(STEPS_MOST) {
        // A shaper's clock is held while the caller's is behind it.
        let mut reads = |now: u64| {
            steps_back += u64::from(now < latest);
            latest = latest.max(now);
            latest
        };
        match *step {
            Step::Class { bit_s, burst_ns, parent, fair } => {
                let parent = parent.and_then(|n| classes.get(usize::from(n)).copied());
                let burst = Nanos(burst_ns.into());
                match shaper.add_class(ClassOptions { rate: rate(bit_s), burst, parent, fair }) {
                    Ok(class) => classes.push(class),
                    Err(ShaperError::ClassesFull) => assert_eq!(classes.len(), CLASSES),
                    Err(error) => assert_eq!(error, ShaperError::TooDeep),
                }
            }
            Step::ClassRate { class, bit_s } => {
                let class = classes.get(usize::from(class));
                class.map(|class| shaper.set_class_rate(*class, rate(bit_s)).expect("a class"));
            }
            Step::ClassBurst { class, burst_ns } => {
                let (class, burst) = (classes.get(usize::from(class)), Nanos(burst_ns));
                class.map(|class| shaper.set_class_burst(*class, burst).expect("a class"));
            }
            Step::Open { class, bit_s, burst_ns, weight } => {
                let class = class.and_then(|n| classes.get(usize::from(n)).copied());
                let (rate, burst) = (bit_s.map(rate), Nanos(burst_ns.into()));
                let weight = u32::from(weight);
                match shaper.open_flow(FlowOptions { class, rate, burst, weight }) {
                    Ok(flow) => flows.push(flow),
                    Err(ShaperError::FlowsFull) => assert!(flows.len() >= FLOWS),
                    Err(error) => assert_eq!(error, ShaperError::Weight(weight)),
                }
            }
            Step::FlowRate { flow, bit_s } => {
                let flow = flows.get(usize::from(flow));
                let _ = flow.map(|flow| shaper.set_flow_rate(*flow, bit_s.map(rate)));
            }
            Step::Close { flow } => {
                let _ = flows.get(usize::from(flow)).map(|flow| shaper.close_flow(*flow));
            }
            Step::Packets { flow, bytes, count } => {
                let Some(&flow) = flows.get(usize::from(flow)) else { continue };
                for _ in 0..count {
                    let present = reads(now);
                    let held = shaper.len();
                    match shaper.on_packet(Nanos(now), flow, bytes, sent.len() as u32) {
                        Ok(stamp) => {
                            // A late flow of a fair class goes on in the past; no other does.
                            assert!(stamp.0 >= present || !classes.is_empty());
                            assert_eq!(shaper.len(), held + 1);
                            sent.push(Sent { flow, bytes, here: true });
                        }
                        Err(Rejected::Wheel(Refused::Full)) => {
                            assert_eq!(held, capacity);
                            full += 1;
                        }
                        Err(Rejected::Wheel(Refused::Beyond)) => {
                            assert!(case.refuse);
                            beyond += 1;
                        }
                        Err(Rejected::NoSuchFlow) => closed += 1,
                    }
                }
            }
            Step::Poll { count } => {
                for _ in 0..count {
                    let present = reads(now);
                    let clamped = shaper.counters().wheel.clamped;
                    let Some(departure) = shaper.poll(Nanos(now)) else { break };
                    leaves(&mut sent, &departure);
                    // Only a pacing stamp beyond the horizon may be cut short.
                    assert!(
                        departure.stamp.0 <= present || clamped > 0,
                        "{departure:?} at {present}"
                    );
                    departed += 1;
                }
            }
            Step::Tick { by } => now = now.saturating_add(by.into()),
            Step::Jump { by } => now = now.saturating_add_signed(by),
            Step::ToDeadline => now = shaper.next_deadline().map_or(now, |at| at.0),
            Step::Drain => {
                shaper.drain(|departure| {
                    leaves(&mut sent, &departure);
                    drained += 1;
                });
                assert!(shaper.is_empty() && shaper.next_deadline().is_none());
            }
        }
        let counters = shaper.counters();
        assert!(shaper.len() <= capacity);
        assert_eq!(counters.accepted, sent.len() as u64);
        assert_eq!(counters.accepted, departed + drained + shaper.len() as u64);
        assert_eq!((counters.departed, counters.drained), (departed, drained));
        assert_eq!((counters.wheel.full, counters.wheel.beyond), (full, beyond));
        assert_eq!((counters.no_such_flow, counters.clock_steps), (closed, steps_back));
        assert_eq!(shaper.next_deadline().is_none(), shaper.is_empty());
    }
    shaper.drain(|departure| leaves(&mut sent, &departure));
    assert!(sent.iter().all(|packet| !packet.here), "a packet was lost");
});
