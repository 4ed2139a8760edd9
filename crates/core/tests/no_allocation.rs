//! A wheel allocates when it is made, and never after.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use tidegate_core::Nanos;
use tidegate_core::wheel::{Beyond, Wheel, WheelOptions};

/// The system's allocator, which counts the calls of each thread.
struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is left to the system's allocator; the counter is a plain cell of this thread, whose
// access allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_wheel_allocates_only_when_it_is_made() {
    let options = WheelOptions { capacity: 5_000, ..WheelOptions::default() };
    let before = CALLS.get();
    let mut wheel = Wheel::new(options, Nanos(0)).unwrap();
    assert!(CALLS.get() > before, "the allocations are not counted");

    let before = CALLS.get();
    let (mut random, mut now, mut popped) = (1u64, Nanos(0), 0usize);
    for step in 0..200_000u64 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // Mostly within the horizon of two seconds, now and then beyond it or in one crowded slot.
        let ahead = match random >> 60 {
            0 => 1 << 32,
            1 => 1_000_000,
            _ => random >> 33,
        };
        let beyond = if step % 2 == 0 { Beyond::Clamp } else { Beyond::Refuse };
        let _ = wheel.insert_or(now, Nanos(now.0 + ahead), step, beyond);
        now = Nanos(now.0 + 100_000);
        popped += wheel.pop_batch(now, 3, |_| ());
        popped += usize::from(wheel.next_deadline().and_then(|at| wheel.pop(at)).is_some());
        if step % 50_000 == 49_999 {
            wheel.drain(|_| popped += 1);
        } else if step % 20_000 > 13_000 {
            now = Nanos(now.0 + 5_000_000);
        }
    }
    let calls = CALLS.get() - before;
    assert!(popped > 100_000 && wheel.counters().clamped > 0, "{popped}, {:?}", wheel.counters());
    assert_eq!(calls, 0);
}
