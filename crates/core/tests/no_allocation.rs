//! Wheels and shapers allocate when they are made, and never after.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use tidegate_core::shaper::{ClassOptions, FlowOptions, Shaper, ShaperOptions};
use tidegate_core::wheel::{Beyond, Wheel, WheelOptions};
use tidegate_core::{Nanos, Rate};

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
        popped += (0..3).map_while(|_| wheel.pop(now)).count();
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

#[test]
fn a_shaper_allocates_only_when_it_is_made() {
    let wheel = WheelOptions { capacity: 500, ..WheelOptions::default() };
    let mut shaper = Shaper::new(ShaperOptions { wheel, flows: 64, classes: 8 }, Nanos(0)).unwrap();
    let before = CALLS.get();
    let rate = Rate::from_bit_s(100_000_000);
    let (mut parent, mut drained, mut now) = (None, 0u64, Nanos(0));
    for fair in [false, true, false, true] {
        let burst = Nanos(1_000_000);
        let class = ClassOptions { rate: rate.unwrap(), burst, parent, fair };
        parent = Some(shaper.add_class(class).unwrap());
    }
    let mut flows = [None; 64];
    let mut random = 1u64;
    for step in 0..200_000u64 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let slot = &mut flows[(random >> 58) as usize];
        let flow = *slot.get_or_insert_with(|| {
            let rate = rate.filter(|_| random & 1 << 40 != 0);
            shaper.open_flow(FlowOptions { class: parent, rate, ..FlowOptions::default() }).unwrap()
        });
        let _ = shaper.on_packet(now, flow, (random >> 32) as u32 % 4_000, step);
        if step % 4_096 == 4_095 {
            // With its last packet its place is free.
            shaper.close_flow(flow).unwrap();
            shaper.drain(|_| drained += 1);
            *slot = None;
        }
        now = Nanos(now.0 + 100_000);
        while shaper.poll(now).is_some() {}
    }
    let calls = CALLS.get() - before;
    let counters = shaper.counters();
    assert!(
        drained > 1_000 && counters.departed > 1_000 && counters.wheel.full > 0,
        "{counters:?}"
    );
    assert_eq!(counters.accepted, counters.departed + drained + shaper.len() as u64);
    assert_eq!(calls, 0);
}
