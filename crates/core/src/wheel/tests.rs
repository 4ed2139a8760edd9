//! The wheel against a sorted list.

use std::vec::Vec;

use proptest::prelude::*;

use super::{model::Model, *};

#[derive(Debug, Clone)]
enum Step {
    Insert { ahead: i64, count: u32 },
    Pop { count: usize },
    Tick { by: i64 },
    Drain,
}

fn step() -> impl Strategy<Value = Step> {
    // Several of one stamp fill more than a chunk; the larger ticks skip buckets.
    let count = || prop_oneof![4 => Just(1u32), 1 => 2u32..400];
    prop_oneof![
        24 => ((-3_000i64..30_000), count()).prop_map(|(ahead, count)| Step::Insert { ahead, count }),
        8 => ((0i64..100_000_000), count()).prop_map(|(ahead, count)| Step::Insert { ahead, count }),
        4 => (-1_000_000_000i64..i64::MAX).prop_map(|ahead| Step::Insert { ahead, count: 1 }),
        20 => count().prop_map(|count| Step::Pop { count: count as usize }),
        16 => (0i64..4_000).prop_map(|by| Step::Tick { by }),
        4 => (0i64..3_000_000).prop_map(|by| Step::Tick { by }),
        4 => (-50_000i64..1_000_000_000).prop_map(|by| Step::Tick { by }),
        1 => Just(Step::Drain),
    ]
}

proptest! {
    /// Every answer of the wheel is that of a sorted list, also with stamps in the past and beyond the
    /// horizon, a full pool, and a clock that steps.
    #[test]
    fn is_a_sorted_list(
        shift in 0u32..12,
        slots_log in 1u32..17,
        capacity in prop_oneof![1usize..60, 1usize..3_000],
        refuse in any::<bool>(),
        start in prop_oneof![
            Just(0u64), any::<u32>().prop_map(u64::from), Just(u64::MAX), Just((1 << 63) - 9_000),
            Just((1 << 32) - 9_000)
        ],
        steps in prop::collection::vec(step(), 1..400),
    ) {
        let options = WheelOptions {
            granularity: Nanos(1 << shift),
            horizon: Nanos(1 << (slots_log + shift)),
            capacity,
            beyond: if refuse { Beyond::Refuse } else { Beyond::Clamp },
        };
        let mut wheel = Wheel::new(options, Nanos(start)).unwrap();
        let mut model = Model::new(options, start);
        let mut now = start;
        let mut number = 0u32;
        for step in steps {
            match step {
                Step::Insert { ahead, count } => for _ in 0..count {
                    let at = now.saturating_add_signed(ahead);
                    let got = wheel.insert(Nanos(now), Nanos(at), number);
                    prop_assert_eq!(got, model.insert(now, at, number));
                    number += 1;
                },
                Step::Pop { count } => {
                    let got: Vec<u32> = (0..count).map_while(|_| wheel.pop(Nanos(now))).collect();
                    let due: Vec<u32> = (0..count).map_while(|_| model.pop(now)).collect();
                    prop_assert_eq!(got, due);
                }
                Step::Tick { by } => now = now.saturating_add_signed(by),
                Step::Drain => {
                    let mut left = Vec::new();
                    wheel.drain(|item| left.push(item));
                    prop_assert_eq!(left, model.drain());
                }
            }
            prop_assert_eq!(wheel.len(), model.len());
            prop_assert_eq!(wheel.next_deadline(), model.next_deadline().map(Nanos));
        }
        let mut left = Vec::new();
        wheel.drain(|item| left.push(item));
        prop_assert_eq!(left, model.drain());
        prop_assert!(wheel.is_empty());
    }

    /// Nothing leaves before its time, nor more than a granularity after it when somebody asks.
    #[test]
    fn leaves_at_its_time(stamps in prop::collection::vec(0u64..1_000_000, 1..200)) {
        let mut wheel = Wheel::new(WheelOptions::default(), Nanos(0)).unwrap();
        for stamp in &stamps {
            wheel.insert(Nanos(0), Nanos(*stamp), *stamp).unwrap();
        }
        let granularity = wheel.granularity().0;
        while let Some(deadline) = wheel.next_deadline() {
            let stamp = wheel.pop(deadline).expect("a packet at the deadline");
            prop_assert!(deadline.0 >= stamp && deadline.0 - stamp < granularity);
        }
    }
}

#[test]
fn sizes_are_checked_and_rounded() {
    let with = |granularity, horizon, capacity| {
        let options = WheelOptions {
            granularity: Nanos(granularity),
            horizon: Nanos(horizon),
            capacity,
            beyond: Beyond::Clamp,
        };
        Wheel::<u32>::new(options, Nanos(0)).map(|w| (w.granularity().0, w.horizon().0))
    };
    assert_eq!(with(2_000, 2_000_000_000, 1), Ok((2_048, 2_048 << 20)));
    assert_eq!(with(1, 2, 1), Ok((1, 2)));
    assert_eq!(with(0, 2, 1), Err(WheelError::Granularity(Nanos(0))));
    assert_eq!(with(2_000_000_000, 2, 1), Err(WheelError::Granularity(Nanos(2_000_000_000))));
    assert!(matches!(with(1, u64::MAX, 1), Err(WheelError::Slots { .. })));
    assert!(matches!(with(1_024, 1_024, 1), Err(WheelError::Slots { slots: 1, .. })));
    assert_eq!(with(1_024, 4_096, 0), Err(WheelError::Capacity(0)));
}

/// An idle wheel that is used again after more than its horizon takes stamps from the present on.
#[test]
fn an_idle_wheel_follows_the_clock() {
    let options = WheelOptions {
        granularity: Nanos(1_024),
        horizon: Nanos(1 << 20),
        capacity: 8,
        beyond: Beyond::Refuse,
    };
    let mut wheel = Wheel::new(options, Nanos(0)).unwrap();
    let now = Nanos(50 << 20);
    wheel.insert(now, Nanos(now.0 + 5_000), 1u32).unwrap();
    assert_eq!(wheel.pop(now), None);
    assert_eq!(wheel.pop(Nanos(now.0 + 6_144)), Some(1));
}

/// Ten thousand packets for one slot, each behind the other, come out in order wherever the clock goes.
#[test]
fn a_crowded_slot_keeps_its_order() {
    let options = WheelOptions { capacity: 10_000, ..WheelOptions::default() };
    let at = Nanos(1_000_000_000);
    for gap_ns in [50_000, 3_000_000, 999_000_000] {
        let mut wheel = Wheel::new(options, Nanos(0)).unwrap();
        for number in 0..5_000u32 {
            wheel.insert(Nanos(0), at, number).unwrap();
        }
        let mut now = Nanos(0);
        while now.0 + gap_ns < at.0 {
            now = Nanos(now.0 + gap_ns);
            assert_eq!(wheel.pop(now), None);
        }
        for number in 5_000..10_000 {
            wheel.insert(now, at, number).unwrap();
        }
        assert_eq!(wheel.insert(now, at, 0), Err(Refused::Full));
        let due = wheel.next_deadline().unwrap();
        let mut expected = 0..10_000;
        while let Some(number) = wheel.pop(due) {
            assert_eq!(Some(number), expected.next());
        }
        assert_eq!(expected.next(), None);
    }
}
