//! What an algorithm may answer for a packet.

use crate::Nanos;

/// The answer of a limiter for one packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Send it on as it is.
    Pass,
    /// Send it on with the ECN codepoint set to Congestion Experienced (RFC 3168).
    Mark,
    /// Send it on and tell the local TCP sender to reduce its congestion window (NRM's `cn`).
    Slow,
    /// Discard it, for the reason given. Nothing was charged for it.
    Drop(DropReason),
    /// Send it on, not before this time.
    SendAt(Nanos),
}

/// Why a packet was discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DropReason {
    /// The backlog stood above the drop threshold.
    Full,
    /// A large packet found only the room that is kept for small ones.
    Reserve,
    /// Picked by the linear drop probability: the packet could neither be marked nor its sender told.
    Early,
    /// Lost on the way, at the probability that a link was given.
    Lost,
}

impl Verdict {
    /// Whether the packet goes on, now or later.
    #[must_use]
    pub fn passes(self) -> bool {
        !matches!(self, Verdict::Drop(_))
    }
}
