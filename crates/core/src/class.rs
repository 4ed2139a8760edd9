//! Limits inside a limit: the rate that a child may use now.
//!
//! As in HTB (Devera), a class has a guarantee, borrows what its siblings leave in proportion to its weight,
//! and never exceeds its ceiling:
//!
//! ```text
//!   rate = min(ceiling, guarantee + share * parent's rate * weight / 100)
//! ```
//!
//! The parent's `share` follows the law of [`crate::fair_share`], with classes for flows. It knows the load
//! of all classes together, which were active, their weight and their guarantees. So no token walks up a
//! tree, there is no loop over siblings, and a packet costs each limit above it the same whatever their
//! number. For the children of a class its present rate is the parent's rate, at any depth up to
//! [`MAX_DEPTH`].
//!
//! A class follows its parent at the end of each of its own epochs (4 ms or longer). At a lower rate,
//! thresholds given in bytes become longer times, and so do the least lengths of the others ([`Floors`]). The
//! kernel's copy is `bpf/common/class.h`.

use crate::{
    fair_share::WEIGHT,
    units::{Bytes, MAX_RATE_BIT_S, MIN_RATE_BIT_S, Nanos, Rate},
    virtual_queue::{self, MAX_SPAN, VirtualQueueConfig},
};

/// Limits above each other in a tree, the root included.
pub const MAX_DEPTH: usize = 8;
/// The lightest class.
pub const MIN_WEIGHT: u32 = 1;
/// The heaviest class.
pub const MAX_WEIGHT: u32 = 10_000;
/// No ceiling: the parent's rate holds, whatever it is at the time. It is the largest rate there is, so the
/// rule above needs no case for it.
pub const NO_CEILING_BIT_S: u64 = MAX_RATE_BIT_S;

/// Guarantee and weight of a limit among its siblings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Class {
    /// The rate that it always gets when it wants it; `None`: nothing.
    pub guarantee: Option<Rate>,
    /// Its part of what is not guaranteed, [`MIN_WEIGHT`] to [`MAX_WEIGHT`].
    pub weight: u32,
}

impl Default for Class {
    fn default() -> Class {
        Class { guarantee: None, weight: WEIGHT }
    }
}

impl Class {
    /// The rate that it may use of a parent that has `parent` and gives `share` (of that rate, in 2^-24) to a
    /// weight of 100.
    #[must_use]
    pub fn rate(&self, ceiling: Rate, parent: Rate, share: u64) -> Rate {
        let guarantee = self.guarantee.map_or(0, Rate::bit_s);
        let part = (parent.bit_s() * (share.min(crate::fair_share::MAX_SHARE) >> 8)) >> 16;
        let borrowed = part * u64::from(self.weight) / u64::from(WEIGHT);
        let most = ceiling.bit_s().min(parent.bit_s());
        let rate = (guarantee + borrowed).min(most).max(MIN_RATE_BIT_S);
        Rate::from_bit_s(rate).unwrap_or(ceiling)
    }
}

/// The least lengths of thresholds in bytes, whatever the rate.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Floors {
    /// The least length of the burst.
    pub burst: Bytes,
    /// The least length of the mark threshold.
    pub mark: Bytes,
    /// The least length of the drop threshold.
    pub drop: Bytes,
}

/// The virtual queue of a class whose bytes cost `cost` now ([`virtual_queue::cost_of_byte`]); `config` is
/// the one at its ceiling. All follows from this one number, which the kernel's programs change in one step.
#[must_use]
pub fn config_at(config: &VirtualQueueConfig, floors: &Floors, cost: u64) -> VirtualQueueConfig {
    let threshold = |at_ceiling: Nanos, floor: Bytes| {
        at_ceiling.max(virtual_queue::time_of(floor.0, cost).min(MAX_SPAN))
    };
    let drop = threshold(config.drop, floors.drop);
    let large_drop = Nanos(drop.0 - drop.0 / 8);
    let mark = threshold(config.mark, floors.mark);
    VirtualQueueConfig {
        cost,
        burst: threshold(config.burst, floors.burst),
        mark: if mark < large_drop { mark } else { Nanos(large_drop.0 / 2) },
        large_drop,
        drop,
    }
}

#[cfg(test)]
mod tests;
