//! Sums over the fleet: the demand of all members, the sum of their weights.
//!
//! | | exact | a message | what loss does |
//! |:--|:--|:--|:--|
//! | [`Vector`] | yes | entries that changed | late, never wrong: a version is as good as the next |
//! | [`PushSum`] | in the limit | 16 bytes | takes mass away; gaps are seen and made up for, roughly |
//! | [`PushFlow`] | in the limit | 16 bytes | mended by the next message; the dead are taken out |
//!
//! [`Kind::for_members`] chooses. The caller knows the time, draws the peers and carries the messages.

pub mod push_flow;
pub mod push_sum;
pub mod vector;

pub use push_flow::{NEIGHBOURS_MAX, PushFlow};
pub use push_sum::{PushSum, SENDERS_MAX};
pub use vector::{REPEAT, TELL_EXTRA, VECTOR_MAX, Vector};

/// How a fleet adds up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Exact, O(members) memory.
    Vector,
    /// O(neighbours) memory and messages of constant size.
    PushFlow,
}

impl Kind {
    /// The vector up to its maximum, for it is exact; push-flow beyond. Push-sum is what was published. It is
    /// never chosen, because it needs a network that reports its losses.
    #[must_use]
    pub fn for_members(members: usize) -> Kind {
        if members <= VECTOR_MAX { Kind::Vector } else { Kind::PushFlow }
    }
}
