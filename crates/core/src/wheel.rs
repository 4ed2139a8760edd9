//! A timing wheel: one O(1) queue for all packets of all flows, sorted by departure time.
//!
//! The queue of Carousel (Saeed et al., SIGCOMM 2017): time is cut into slots of one granularity `g`, and
//! `N` slots make the horizon. A packet goes into the slot of its timestamp and comes out when that slot's
//! time has come; within a slot, first in, first out.
//!
//! ```text
//! insert(p, ts):  s = ceil(ts / g)
//!                 s <= front           into front: it is due
//!                 s >  front + N - 1   clamp into the last slot (pacing), or refuse (a hard limit)
//! pop(now):       the first of the first slot that is not empty, if that slot is <= now / g
//! ```
//!
//! The stamp is rounded up, so a packet never leaves before its time, and at most one granularity after
//! it as long as somebody calls [`Wheel::pop`]. (The published listing rounds down, tests slot `now % N`
//! and moves its front by nanoseconds where it counts slots; the rule here is the one that its text
//! describes.)
//!
//! What makes it fast:
//! - granularity and number of slots are powers of two: no division;
//! - a slot is eight bytes, and its packets lie in chunks of [`CHUNK`] drawn from one pool, so an insert
//!   touches the slot and one line of the pool, and a pop reads the pool in sequence;
//! - a [`SlotSet`] over the slots skips those that are empty (Eiffel, NSDI 2019), which also gives a
//!   sleeping shaper its soonest deadline.
//!
//! Insert and pop are O(1), whatever the number of packets; the memory is allocated once, at the start.

use alloc::{boxed::Box, vec};

use crate::{slot_set::SlotSet, units::Nanos};

/// Packets in a chunk of the pool: eight handles of eight bytes are a cache line.
pub const CHUNK: usize = 8;
/// The most slots that a wheel may have: 134 million bytes of slots, half a minute of 2 us.
pub const MAX_SLOTS: u64 = 1 << 24;
/// The most packets that a wheel may be asked to hold.
pub const MAX_CAPACITY: usize = 1 << 27;

/// No position in the pool.
const NONE: u32 = u32::MAX;

/// The size of a wheel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WheelOptions {
    /// How finely times are told apart; taken to the nearest power of two nanoseconds.
    pub granularity: Nanos,
    /// How far ahead a packet may be stamped; taken up to a power of two of granularities.
    pub horizon: Nanos,
    /// How many packets it holds at most.
    pub capacity: usize,
    /// What becomes of a packet that is stamped beyond the horizon.
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

/// What becomes of a packet that is stamped beyond the horizon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Beyond {
    /// It leaves at the horizon: right for pacing, where late is as bad as early.
    Clamp,
    /// It is refused: right for a hard limit.
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
    /// No room, or too much.
    #[error("a wheel for {0} packets; it holds 1 to {MAX_CAPACITY}")]
    Capacity(usize),
}

/// Why a packet was not taken. The wheel is as it was before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refused {
    /// It holds as many packets as it can.
    #[error("the wheel is full")]
    Full,
    /// The stamp is beyond the horizon.
    #[error("the stamp is beyond the horizon")]
    Beyond,
}

/// What happened to packets, since the start.
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

/// First and last packet of a slot, as positions in the pool.
#[derive(Debug, Clone, Copy)]
struct Slot {
    head: u32,
    last: u32,
}

/// A timing wheel of handles. See the [module](self).
#[derive(Debug, Clone)]
pub struct Wheel<T> {
    slots: Box<[Slot]>,
    occupied: SlotSet,
    /// [`CHUNK`] items a chunk.
    pool: Box<[T]>,
    /// The chunk that follows a chunk, in its slot or in the list of free ones.
    next: Box<[u32]>,
    free: u32,
    /// Chunks from here on were never used.
    fresh: u32,
    shift: u32,
    /// The slot of the present, counted from time zero; never ahead of the clock.
    front: u64,
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
        // The worst that can be: a started chunk in every slot, and one more where pop has begun.
        let chunks = capacity.min(capacity / CHUNK + slots as usize) + 1;
        Ok(Self {
            slots: vec![Slot { head: NONE, last: NONE }; slots as usize].into_boxed_slice(),
            occupied: SlotSet::new(slots as usize),
            pool: vec![T::default(); chunks * CHUNK].into_boxed_slice(),
            next: vec![0; chunks].into_boxed_slice(),
            free: NONE,
            fresh: 0,
            shift,
            front: now.0 >> shift,
            len: 0,
            capacity,
            beyond,
            counters: WheelCounters::default(),
        })
    }

    /// Takes a packet that may leave at `at`.
    ///
    /// # Errors
    /// If the wheel is full, or if `at` is beyond the horizon and the wheel refuses such.
    #[inline]
    pub fn insert(&mut self, now: Nanos, at: Nanos, item: T) -> Result<(), Refused> {
        self.insert_or(now, at, item, self.beyond)
    }

    /// As [`Wheel::insert`], with its own rule for what is beyond the horizon.
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
        if slot.saturating_sub(self.front) >= self.slots.len() as u64 {
            // The front stands where the last pop left it.
            self.advance(now);
            let last = self.front + self.slots.len() as u64 - 1;
            if slot > last {
                if beyond == Beyond::Refuse {
                    self.counters.beyond += 1;
                    return Err(Refused::Beyond);
                }
                self.counters.clamped += 1;
                slot = last;
            }
        }
        if slot < self.front {
            self.counters.past += 1;
            slot = self.front;
        }
        self.push(self.index(slot), item);
        Ok(())
    }

    /// The next packet whose time has come.
    #[inline]
    pub fn pop(&mut self, now: Nanos) -> Option<T> {
        let index = self.index(self.front);
        if self.slots[index].head != NONE && self.front <= now.0 >> self.shift {
            return Some(self.take(index));
        }
        self.advance(now);
        let index = self.index(self.front);
        let due = self.slots[index].head != NONE && self.front <= now.0 >> self.shift;
        due.then(|| self.take(index))
    }

    /// Takes all packets, the soonest first, whatever their time: when their port has gone.
    pub fn drain(&mut self, mut take: impl FnMut(T)) {
        while let Some(slot) = self.soonest() {
            take(self.take(self.index(slot)));
        }
    }

    /// When the soonest packet may leave; none in an empty wheel.
    #[inline]
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.soonest().map(|slot| Nanos(slot << self.shift))
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

    /// How finely times are told apart.
    #[must_use]
    pub fn granularity(&self) -> Nanos {
        Nanos(1 << self.shift)
    }

    /// How far ahead a packet may be stamped.
    #[must_use]
    pub fn horizon(&self) -> Nanos {
        Nanos((self.slots.len() as u64) << self.shift)
    }

    /// What happened to packets.
    #[must_use]
    pub fn counters(&self) -> WheelCounters {
        self.counters
    }

    #[inline]
    fn index(&self, slot: u64) -> usize {
        slot as usize & (self.slots.len() - 1)
    }

    /// The first slot that is not empty.
    #[inline]
    fn soonest(&self) -> Option<u64> {
        if self.len == 0 {
            return None;
        }
        let front = self.index(self.front);
        let index = self.occupied.next(front).or_else(|| self.occupied.next(0))?;
        Some(self.front + (index.wrapping_sub(front) & (self.slots.len() - 1)) as u64)
    }

    /// Moves the front to the first packet, but not into the future. A clock that steps back moves nothing.
    #[inline]
    fn advance(&mut self, now: Nanos) {
        let present = now.0 >> self.shift;
        self.front = self.front.max(self.soonest().map_or(present, |slot| slot.min(present)));
    }

    #[inline]
    fn push(&mut self, index: usize, item: T) {
        let Slot { head, last } = self.slots[index];
        let position = if head == NONE {
            let chunk = self.allocate();
            let position = chunk * CHUNK as u32;
            self.slots[index] = Slot { head: position, last: position };
            self.occupied.insert(index);
            position
        } else if (last as usize + 1).is_multiple_of(CHUNK) {
            let chunk = self.allocate();
            self.next[last as usize / CHUNK] = chunk;
            self.slots[index].last = chunk * CHUNK as u32;
            chunk * CHUNK as u32
        } else {
            self.slots[index].last = last + 1;
            last + 1
        };
        self.pool[position as usize] = item;
        self.len += 1;
    }

    /// Takes the first of a slot that is not empty.
    #[inline]
    fn take(&mut self, index: usize) -> T {
        let Slot { head, last } = self.slots[index];
        let item = self.pool[head as usize];
        let chunk = head as usize / CHUNK;
        if head == last {
            self.slots[index] = Slot { head: NONE, last: NONE };
            self.occupied.remove(index);
            self.release(chunk);
        } else if (head as usize + 1).is_multiple_of(CHUNK) {
            self.slots[index].head = self.next[chunk] * CHUNK as u32;
            self.release(chunk);
        } else {
            self.slots[index].head = head + 1;
        }
        self.len -= 1;
        item
    }

    /// A free chunk. There is one: see where the pool is made.
    #[inline]
    fn allocate(&mut self) -> u32 {
        if self.free == NONE {
            self.fresh += 1;
            return self.fresh - 1;
        }
        let chunk = self.free;
        self.free = self.next[chunk as usize];
        chunk
    }

    #[inline]
    fn release(&mut self, chunk: usize) {
        self.next[chunk] = self.free;
        self.free = chunk as u32;
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
mod tests;
