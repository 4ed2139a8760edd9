//! The reference for the wheel: a list sorted by slot, first in, first out within a slot. For its property
//! test and for the fuzzer.

use std::{vec, vec::Vec};

use tidegate_core::wheel::{Beyond, Refused, WheelOptions};

/// Upper bound of a wheel's clock.
const LATEST: u64 = u64::MAX >> 1;

/// A list of numbered packets.
pub struct Model {
    shift: u32,
    slots: u64,
    capacity: usize,
    beyond: Beyond,
    /// Never ahead of the clock.
    front: u64,
    /// Slot and number.
    items: Vec<(u64, u32)>,
}

impl Model {
    /// An empty list. Granularity and horizon must be powers of two.
    pub fn new(options: WheelOptions, now: u64) -> Self {
        let shift = options.granularity.0.ilog2();
        let slots = options.horizon.0 >> shift;
        let WheelOptions { capacity, beyond, .. } = options;
        Self { shift, slots, capacity, beyond, front: now.min(LATEST) >> shift, items: vec![] }
    }

    fn advance(&mut self, now: u64) {
        let present = now.min(LATEST) >> self.shift;
        let first = self.items.first().map_or(present, |item| item.0.min(present));
        self.front = self.front.max(first);
    }

    /// As `Wheel::insert`.
    pub fn insert(&mut self, now: u64, at: u64, item: u32) -> Result<(), Refused> {
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

    /// As `Wheel::pop`.
    pub fn pop(&mut self, now: u64) -> Option<u32> {
        self.advance(now);
        let due = self.items.first().is_some_and(|item| item.0 <= now.min(LATEST) >> self.shift);
        due.then(|| self.items.remove(0).1)
    }

    /// As `Wheel::drain`.
    pub fn drain(&mut self) -> Vec<u32> {
        self.items.drain(..).map(|item| item.1).collect()
    }

    /// As `Wheel::next_deadline`.
    pub fn next_deadline(&self) -> Option<u64> {
        self.items.first().map(|item| item.0 << self.shift)
    }

    /// As `Wheel::len`.
    pub fn len(&self) -> usize {
        self.items.len()
    }
}
