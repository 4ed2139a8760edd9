//! The wheel against a sorted list.

use std::{vec, vec::Vec};

use proptest::prelude::*;

use super::*;

/// A list sorted by slot, first in, first out within a slot: what the wheel must be equal to.
struct Model {
    shift: u32,
    slots: u64,
    capacity: usize,
    beyond: Beyond,
    /// Never ahead of the clock.
    front: u64,
    items: Vec<(u64, u32)>,
}

impl Model {
    fn advance(&mut self, now: u64) {
        let present = now >> self.shift;
        let first = self.items.first().map_or(present, |item| item.0.min(present));
        self.front = self.front.max(first);
    }

    fn insert(&mut self, now: u64, at: u64, item: u32) -> Result<(), Refused> {
        if self.items.len() == self.capacity {
            return Err(Refused::Full);
        }
        let mut slot = at.saturating_add((1 << self.shift) - 1) >> self.shift;
        if slot > self.front && slot - self.front >= self.slots {
            self.advance(now);
        }
        let last = self.front + self.slots - 1;
        if slot > last && self.beyond == Beyond::Refuse {
            return Err(Refused::Beyond);
        }
        slot = slot.clamp(self.front, last);
        let place = self.items.partition_point(|item| item.0 <= slot);
        self.items.insert(place, (slot, item));
        Ok(())
    }

    fn pop(&mut self, now: u64) -> Option<u32> {
        self.advance(now);
        let due = self.items.first().is_some_and(|item| item.0 <= now >> self.shift);
        due.then(|| self.items.remove(0).1)
    }
}

#[derive(Debug, Clone)]
enum Step {
    Insert { ahead: i64 },
    Pop,
    Tick { by: i64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (-3_000i64..30_000).prop_map(|ahead| Step::Insert { ahead }),
        1 => (-1_000_000_000i64..i64::MAX).prop_map(|ahead| Step::Insert { ahead }),
        5 => Just(Step::Pop),
        4 => (0i64..4_000).prop_map(|by| Step::Tick { by }),
        1 => (-50_000i64..1_000_000_000).prop_map(|by| Step::Tick { by }),
    ]
}

proptest! {
    /// Every answer of the wheel is that of a sorted list, also with stamps in the past and beyond the
    /// horizon, a full pool, and a clock that steps.
    #[test]
    fn is_a_sorted_list(
        shift in 0u32..12,
        slots_log in 1u32..12,
        capacity in 1usize..60,
        refuse in any::<bool>(),
        start in prop_oneof![Just(0u64), any::<u32>().prop_map(u64::from), Just(u64::MAX >> 8)],
        steps in prop::collection::vec(step(), 1..400),
    ) {
        let beyond = if refuse { Beyond::Refuse } else { Beyond::Clamp };
        let slots = 1u64 << slots_log;
        let options = WheelOptions {
            granularity: Nanos(1 << shift),
            horizon: Nanos(slots << shift),
            capacity,
            beyond,
        };
        let mut wheel = Wheel::new(options, Nanos(start)).unwrap();
        let mut model =
            Model { shift, slots, capacity, beyond, front: start >> shift, items: vec![] };
        let mut now = start;
        for (number, step) in (0u32..).zip(steps) {
            match step {
                Step::Insert { ahead } => {
                    let at = now.saturating_add_signed(ahead);
                    let got = wheel.insert(Nanos(now), Nanos(at), number);
                    prop_assert_eq!(got, model.insert(now, at, number));
                }
                Step::Pop => prop_assert_eq!(wheel.pop(Nanos(now)), model.pop(now)),
                Step::Tick { by } => now = now.saturating_add_signed(by),
            }
            prop_assert_eq!(wheel.len(), model.items.len());
            let deadline = model.items.first().map(|item| Nanos(item.0 << shift));
            prop_assert_eq!(wheel.next_deadline(), deadline);
        }
        let mut left = Vec::new();
        wheel.drain(|item| left.push(item));
        prop_assert_eq!(left, model.items.iter().map(|item| item.1).collect::<Vec<_>>());
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
