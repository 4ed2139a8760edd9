//! Any sequence of operations on a timing wheel gives what a sorted list gives.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tidegate_core::Nanos;
use tidegate_core::wheel::{Beyond, Wheel, WheelOptions};

#[path = "../../crates/core/src/wheel/model.rs"]
mod model;

use model::Model;

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
    /// Several of one stamp, so far ahead of the clock.
    Insert {
        ahead: i32,
        count: u8,
    },
    InsertFar {
        ahead: i64,
    },
    Pop {
        count: u8,
    },
    Tick {
        by: u16,
    },
    Jump {
        by: i64,
    },
    ToDeadline,
    Drain,
}

/// The model is a list, whose inserts are linear.
const STEPS_MOST: usize = 2_000;

fuzz_target!(|case: Case| {
    let shift = u32::from(case.shift % 20);
    let slots_log = 1 + u32::from(case.slots_log % 18);
    let options = WheelOptions {
        granularity: Nanos(1 << shift),
        horizon: Nanos(1 << (slots_log + shift)),
        capacity: usize::from(case.capacity % 4_096) + 1,
        beyond: if case.refuse { Beyond::Refuse } else { Beyond::Clamp },
    };
    let mut now = case.start;
    let mut wheel = Wheel::new(options, Nanos(now)).expect("legal options");
    let mut model = Model::new(options, now);
    let mut number = 0u32;
    let mut insert = |wheel: &mut Wheel<u32>, model: &mut Model, now: u64, at: u64| {
        let got = wheel.insert(Nanos(now), Nanos(at), number);
        assert_eq!(got, model.insert(now, at, number));
        number += 1;
    };
    for step in case.steps.iter().take(STEPS_MOST) {
        match *step {
            Step::Insert { ahead, count } => {
                for _ in 0..count {
                    insert(&mut wheel, &mut model, now, now.saturating_add_signed(ahead.into()));
                }
            }
            Step::InsertFar { ahead } => {
                insert(&mut wheel, &mut model, now, now.saturating_add_signed(ahead));
            }
            Step::Pop { count } => {
                for _ in 0..count {
                    assert_eq!(wheel.pop(Nanos(now)), model.pop(now));
                }
            }
            Step::Tick { by } => now = now.saturating_add(by.into()),
            Step::Jump { by } => now = now.saturating_add_signed(by),
            Step::ToDeadline => now = wheel.next_deadline().map_or(now, |at| at.0),
            Step::Drain => {
                let mut left = Vec::new();
                wheel.drain(|item| left.push(item));
                assert_eq!(left, model.drain());
            }
        }
        assert_eq!(wheel.len(), model.len());
        assert_eq!(wheel.next_deadline().map(|at| at.0), model.next_deadline());
    }
});
