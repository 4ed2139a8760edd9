//! The verdict of an algorithm on a packet.

use crate::Nanos;

/// The verdict of a limiter on one packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The packet passes unchanged.
    Pass,
    /// It passes with the ECN codepoint set to Congestion Experienced (RFC 3168).
    Mark,
    /// It passes, and the local TCP sender reduces its congestion window (NRM's `cn`).
    Slow,
    /// It is dropped, for the given reason. Nothing was charged for it.
    Drop(DropReason),
    /// It leaves not before this time.
    SendAt(Nanos),
}

/// Why a packet was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DropReason {
    /// The backlog was above the drop threshold.
    Full,
    /// A large packet found only the room that is reserved for small ones.
    Reserve,
    /// By the linear drop probability: the packet could not be marked, nor its sender slowed.
    Early,
    /// Lost on the way, at the probability of a link.
    Lost,
}

impl Verdict {
    /// Whether the packet passes, now or later.
    #[must_use]
    pub fn passes(self) -> bool {
        !matches!(self, Verdict::Drop(_))
    }
}
