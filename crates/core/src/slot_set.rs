//! A set of slot numbers that finds the next one from a slot on in a handful of instructions.
//!
//! Bitmaps over bitmaps: a bit of a word says that the 64-bit word below it is not empty, up to a single
//! word. Insert, remove and next are O(log64 n): four levels for 16 million slots. This is the hierarchical
//! find-first-set of Eiffel (Saeed et al., NSDI 2019). With it a sleeping timing wheel knows its soonest
//! deadline without a walk over empty slots.

use alloc::{boxed::Box, vec, vec::Vec};

/// The most levels of a set: 64^5 slots are a billion.
const MAX_LEVELS: usize = 5;

/// A set of numbers below a fixed bound.
#[derive(Debug, Clone)]
pub struct SlotSet {
    /// `levels[0]` has a bit a slot; the last level is one word.
    levels: Vec<Box<[u64]>>,
}

impl SlotSet {
    /// An empty set of numbers below `slots`. Allocates a little more than `slots / 8` bytes, once.
    ///
    /// # Panics
    /// If `slots` is zero or above 64^5.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        assert!(slots > 0, "a set of no slots");
        let mut levels = Vec::with_capacity(MAX_LEVELS);
        let mut words = slots;
        while levels.is_empty() || words > 1 {
            words = words.div_ceil(64);
            levels.push(vec![0; words].into_boxed_slice());
        }
        assert!(levels.len() <= MAX_LEVELS, "a set of {slots} slots");
        Self { levels }
    }

    /// Adds a slot.
    #[inline]
    pub fn insert(&mut self, slot: usize) {
        let mut at = slot;
        for level in &mut self.levels {
            let word = &mut level[at >> 6];
            let was_empty = *word == 0;
            *word |= 1 << (at & 63);
            if !was_empty {
                return;
            }
            at >>= 6;
        }
    }

    /// Takes a slot out.
    #[inline]
    pub fn remove(&mut self, slot: usize) {
        let mut at = slot;
        for level in &mut self.levels {
            let word = &mut level[at >> 6];
            *word &= !(1 << (at & 63));
            if *word != 0 {
                return;
            }
            at >>= 6;
        }
    }

    /// The least slot that is `from` or above.
    #[inline]
    #[must_use]
    pub fn next(&self, from: usize) -> Option<usize> {
        let mut at = from;
        for (height, level) in self.levels.iter().enumerate() {
            let word = *level.get(at >> 6)? & (u64::MAX << (at & 63));
            if word != 0 {
                at = (at & !63) | word.trailing_zeros() as usize;
                return Some(self.descend(height, at));
            }
            // No more in this word: look right of it one level up.
            at = (at >> 6) + 1;
        }
        None
    }

    /// The least slot below bit `at` of level `height`.
    #[inline]
    fn descend(&self, height: usize, mut at: usize) -> usize {
        for level in self.levels[..height].iter().rev() {
            at = (at << 6) | level[at].trailing_zeros() as usize;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    use super::*;

    proptest! {
        #[test]
        fn is_a_set_of_numbers(
            slots in 1usize..300_000,
            steps in prop::collection::vec((any::<u32>(), any::<bool>()), 1..300),
        ) {
            let mut set = SlotSet::new(slots);
            let mut model = BTreeSet::new();
            for (number, add) in steps {
                let slot = number as usize % slots;
                if add {
                    set.insert(slot);
                    model.insert(slot);
                } else {
                    set.remove(slot);
                    model.remove(&slot);
                }
                for from in [0, slot, slot + 1, slots - 1, slots, slots + 64] {
                    prop_assert_eq!(set.next(from), model.range(from..).next().copied());
                }
            }
        }
    }
}
