//! A timing wheel: one O(1) queue for all packets of all flows, sorted by departure time.
//!
//! The queue of Carousel (Saeed et al., SIGCOMM 2017): time is cut into slots of one granularity `g`, and `N`
//! slots make the horizon. A packet goes into the slot of its timestamp and comes out when that slot's time
//! has come; within a slot, first in, first out.
//!
//! ```text
//! insert(p, ts):  s = ceil(ts / g)
//!                 s <= front           into front: it is due
//!                 s >  front + N - 1   clamp into the last slot (pacing), or refuse (a hard limit)
//! pop(now):       the first of the first slot that is not empty, if that slot is <= now / g
//! ```
//!
//! The stamp is rounded up, so a packet never leaves before its time, and at most one granularity after it as
//! long as somebody calls [`Wheel::pop`]. (The published listing rounds down, tests slot `now % N` and moves
//! its front by nanoseconds where it counts slots; the rule here is the one that its text describes.)
//!
//! Insert and pop are O(1), and their cost must not depend on how many packets wait. A plain array of a
//! million lists is constant in instructions, but each packet then costs several misses of cache and TLB. So
//! the wheel is sorted in two steps, each within a small memory:
//!
//! ```text
//! insert -> far: a bucket a BUCKET slots --- as its time comes, a part at each move of the front ---.
//!        `-> near: a list a slot, for this bucket and the next  <----------------------------------'
//!             `-> pop: the next slot by a bitmap
//! ```
//!
//! - A far packet is appended to its bucket, which is written in sequence, and read in sequence, once.
//! - The near slots stay in the first caches.
//! - Bitmaps over slots and buckets skip those that are empty (Eiffel, NSDI 2019), which also gives a
//!   sleeping shaper its soonest deadline.
//! - Granularity and number of slots are powers of two: no division.
//!
//! The next bucket is moved in parts: 32 packets, or a sixty-fourth of it if that is more, each time the
//! front has moved 16 slots. Only when the clock or the first packet jumps into another bucket is that moved
//! at once. All memory is allocated, and written once, at the start: with handles of four bytes, 20 bytes for
//! each packet of the capacity and 4 kB a bucket.

use crate::{
    units::Nanos,
    wheel::{far::Far, near::Near},
};

mod far;
mod near;

/// The most slots that a wheel may have: half a minute of 2 us.
pub const MAX_SLOTS: u64 = 1 << 24;
/// The most packets that a wheel may be asked to hold.
pub const MAX_CAPACITY: usize = 1 << 27;

/// Slots in a bucket: the near ring holds two.
const BUCKET: u64 = near::RING as u64 / 2;
/// Upper bound of a clock, 292 years: sums of times stay in 64 bits.
const LATEST: Nanos = Nanos(u64::MAX >> 1);
/// The first packet's slot where there is none.
const NEVER: u64 = u64::MAX;
/// The front moves this many slots before more of the next bucket is moved.
const STRIDE: u64 = 16;
/// At least this many packets are moved, if there are as many.
const BATCH: u32 = 32;

/// The size of a wheel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WheelOptions {
    /// The granularity of times; rounded to the nearest power of two nanoseconds.
    pub granularity: Nanos,
    /// How far ahead a packet may be stamped; rounded up to a power of two of granularities.
    pub horizon: Nanos,
    /// The most packets that it holds.
    pub capacity: usize,
    /// The rule for packets stamped beyond the horizon.
    pub beyond: Beyond,
}

impl Default for WheelOptions {
    /// Carousel's: 2 us and 2 s; room for 65 536 packets.
    fn default() -> Self {
        Self {
            granularity: Nanos(2_000),
            horizon: Nanos(2_000_000_000),
            capacity: 1 << 16,
            beyond: Beyond::Clamp,
        }
    }
}

/// The rule for packets stamped beyond the horizon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Beyond {
    /// They leave at the horizon: right for pacing, where late is as bad as early.
    Clamp,
    /// They are refused: right for a hard limit.
    Refuse,
}

/// Why a wheel cannot be built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WheelError {
    /// No granularity, or one above a second.
    #[error("a wheel's granularity of {} ns is not within 1 ns and 1 s", .0.0)]
    Granularity(Nanos),
    /// Fewer than two slots, or too many.
    #[error(
        "a horizon of {} ns at {} ns is {slots} slots; a wheel has 2 to {MAX_SLOTS}",
        .horizon.0, .granularity.0
    )]
    Slots {
        /// As asked.
        horizon: Nanos,
        /// After rounding.
        granularity: Nanos,
        /// How many that would be.
        slots: u64,
    },
    /// A capacity of zero, or too large.
    #[error("a wheel for {0} packets; it holds 1 to {MAX_CAPACITY}")]
    Capacity(usize),
}

/// Why a packet was not taken. The wheel is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refused {
    /// It holds as many packets as it can.
    #[error("the wheel is full")]
    Full,
    /// The stamp is beyond the horizon.
    #[error("the stamp is beyond the horizon")]
    Beyond,
}

/// Counters of packets, since the start.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct WheelCounters {
    /// Stamped in the past, and due at once.
    pub past: u64,
    /// Stamped beyond the horizon and moved to its end.
    pub clamped: u64,
    /// Stamped beyond the horizon and refused.
    pub beyond: u64,
    /// Refused because the wheel was full.
    pub full: u64,
}

/// A timing wheel of handles. See the [module](self).
#[derive(Debug, Clone)]
pub struct Wheel<T> {
    near: Near<T>,
    far: Far<T>,
    /// The first slot that is not near: the start of a bucket, one or two behind that of the front. Items of
    /// the bucket that starts here may partly be near.
    near_end: u64,
    /// The front may not reach this slot before [`Wheel::follow`] has run.
    step_at: u64,
    shift: u32,
    /// The slot of the present, counted from time zero; never ahead of the clock.
    front: u64,
    /// The first slot that is not empty; [`NEVER`] if all are.
    next: u64,
    slots: u64,
    len: usize,
    capacity: usize,
    beyond: Beyond,
    counters: WheelCounters,
}

impl<T: Copy + Default> Wheel<T> {
    /// An empty wheel whose present is `now`.
    ///
    /// # Errors
    /// If a size is out of bounds.
    pub fn new(options: WheelOptions, now: Nanos) -> Result<Self, WheelError> {
        let WheelOptions { granularity, horizon, capacity, beyond } = options;
        if granularity.0 == 0 || granularity.0 > 1_000_000_000 {
            return Err(WheelError::Granularity(granularity));
        }
        let shift = nearest_power_of_two(granularity.0);
        let wanted = horizon.0.div_ceil(1 << shift);
        let slots = wanted.checked_next_power_of_two().unwrap_or(u64::MAX);
        if wanted < 2 || slots > MAX_SLOTS {
            let granularity = Nanos(1 << shift);
            return Err(WheelError::Slots { horizon, granularity, slots: wanted });
        }
        if capacity == 0 || capacity > MAX_CAPACITY {
            return Err(WheelError::Capacity(capacity));
        }
        let mut wheel = Self {
            near: Near::new(capacity),
            far: Far::new((slots / BUCKET).max(1) as usize, capacity),
            near_end: 0,
            step_at: 0,
            shift,
            front: now.min(LATEST).0 >> shift,
            next: NEVER,
            slots,
            len: 0,
            capacity,
            beyond,
            counters: WheelCounters::default(),
        };
        wheel.follow();
        Ok(wheel)
    }

    /// Takes a packet that may leave at `at`.
    ///
    /// # Errors
    /// If the wheel is full, or if `at` is beyond the horizon and the wheel refuses such.
    #[inline]
    pub fn insert(&mut self, now: Nanos, at: Nanos, item: T) -> Result<(), Refused> {
        self.insert_or(now, at, item, self.beyond)
    }

    /// As [`Wheel::insert`], with a separate rule for stamps beyond the horizon.
    ///
    /// # Errors
    /// As [`Wheel::insert`].
    #[inline]
    pub fn insert_or(
        &mut self,
        now: Nanos,
        at: Nanos,
        item: T,
        beyond: Beyond,
    ) -> Result<(), Refused> {
        if self.len == self.capacity {
            self.counters.full += 1;
            return Err(Refused::Full);
        }
        let mut slot = at.0.saturating_add((1 << self.shift) - 1) >> self.shift;
        if slot.wrapping_sub(self.front) >= self.slots {
            slot = self.within(now, slot, beyond)?;
        }
        if slot < self.next {
            self.becomes_first(slot);
        }
        if slot < self.near_end {
            self.near.push(slot, item);
        } else {
            self.far.push(slot / BUCKET, slot, item);
        }
        self.len += 1;
        Ok(())
    }

    /// The next packet whose time has come.
    #[inline]
    pub fn pop(&mut self, now: Nanos) -> Option<T> {
        let present = self.slot(now);
        if self.next > present {
            self.move_front(present);
            return None;
        }
        self.move_front(self.next);
        Some(self.take())
    }

    /// Takes all packets, the soonest first, whatever their time: for a port that has gone.
    pub fn drain(&mut self, mut take: impl FnMut(T)) {
        let present = self.front;
        while self.next != NEVER {
            self.move_front(self.next);
            take(self.take());
        }
        // The clock has not reached it.
        self.front = present;
        self.follow();
    }

    /// When the soonest packet may leave; `None` if the wheel is empty.
    #[inline]
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        (self.next != NEVER).then_some(Nanos(self.next << self.shift))
    }

    /// How many packets it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many packets it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The granularity of times.
    #[must_use]
    pub fn granularity(&self) -> Nanos {
        Nanos(1 << self.shift)
    }

    /// How far ahead a packet may be stamped.
    #[must_use]
    pub fn horizon(&self) -> Nanos {
        Nanos(self.slots << self.shift)
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> WheelCounters {
        self.counters
    }

    /// The slot of a clock's time.
    #[inline]
    fn slot(&self, now: Nanos) -> u64 {
        now.min(LATEST).0 >> self.shift
    }

    /// The slot for a stamp that is before the front, or seems beyond the horizon.
    #[cold]
    fn within(&mut self, now: Nanos, slot: u64, beyond: Beyond) -> Result<u64, Refused> {
        if slot > self.front {
            // The front is where the last pop left it. It may follow the clock up to the first packet.
            self.move_front(self.next.min(self.slot(now)));
        }
        let last = self.front + self.slots - 1;
        if slot < self.front {
            self.counters.past += 1;
            return Ok(self.front);
        }
        if slot <= last {
            return Ok(slot);
        }
        if beyond == Beyond::Refuse {
            self.counters.beyond += 1;
            return Err(Refused::Beyond);
        }
        self.counters.clamped += 1;
        Ok(last)
    }

    /// Separate, so that it is a branch: rarely taken, it keeps the next pop from waiting for this stamp.
    #[cold]
    fn becomes_first(&mut self, slot: u64) {
        self.next = slot;
    }

    /// Moves the front to a slot before which all are empty. A clock that steps back moves nothing.
    #[inline]
    fn move_front(&mut self, slot: u64) {
        self.front = self.front.max(slot);
        if self.front >= self.step_at {
            self.follow();
        }
    }

    /// Takes the first packet, where the front is. There is one.
    #[inline]
    fn take(&mut self) -> T {
        let (item, next) = self.near.take(self.next);
        self.next = if next < self.near_end { next } else { self.soonest_far() };
        self.len -= 1;
        item
    }

    /// The first slot from [`Wheel::near_end`] on that is not empty, when no other is.
    fn soonest_far(&self) -> u64 {
        // The stored half is enough: no slot is further than MAX_SLOTS from the front.
        self.far.soonest(self.near_end / BUCKET).map_or(NEVER, |least| {
            self.near_end + u64::from(least.wrapping_sub(self.near_end as u32))
        })
    }

    /// Makes the front's bucket near, and moves a part of the next one.
    #[inline(never)]
    fn follow(&mut self) {
        let bucket = self.front / BUCKET;
        if self.near_end <= bucket * BUCKET || self.near_end > (bucket + 2) * BUCKET {
            // What lies between is empty.
            self.bring_near(bucket, u32::MAX);
            self.near_end = (bucket + 1) * BUCKET;
        }
        let next = bucket + 1;
        if self.near_end == next * BUCKET {
            // Finished when half the distance is gone.
            let steps = (next * BUCKET - self.front).saturating_sub(BUCKET / 2) / STRIDE;
            let len = self.far.len(next);
            self.bring_near(next, (len / (steps as u32).max(1)).max(BATCH));
            if self.far.len(next) > 0 {
                self.step_at = self.front + STRIDE;
                return;
            }
            self.near_end += BUCKET;
        }
        self.step_at = next * BUCKET;
    }

    fn bring_near(&mut self, bucket: u64, count: u32) {
        let start = bucket * BUCKET;
        self.far.take(bucket, count, |slot, item| {
            self.near.push(start + u64::from(slot) % BUCKET, item);
        });
    }
}

/// The exponent of the power of two that is nearest to `n` in ratio.
fn nearest_power_of_two(n: u64) -> u32 {
    let below = n.ilog2();
    // Above the square root of two: n^2 > 2 x 4^below.
    let up = u128::from(n) * u128::from(n) > 2u128 << (2 * below);
    below + u32::from(up)
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
