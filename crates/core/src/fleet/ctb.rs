//! CTB, the central token bucket: the whole limit at one limiter that all traffic passes.
//!
//! It is the reference for the distributed limiters, and the bucket that they use themselves:
//!
//! ```text
//!   tokens = min(depth, tokens + rate * elapsed);  a packet passes if they cover it
//! ```
//!
//! Tokens are counted in bits x 10^9, so the rate is exact. A change of the rate acts on later time only.
//! O(1) a packet.

use crate::{
    units::{Bytes, NANOS_PER_SEC, Nanos},
    verdict::{DropReason, Verdict},
};

/// A token bucket. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    bit_s: u64,
    depth: i128,
    tokens: i128,
    last: Nanos,
}

/// One in the unit of tokens is this part of a byte.
const BYTE: i128 = 8 * NANOS_PER_SEC as i128;

impl TokenBucket {
    /// A full bucket.
    #[must_use]
    pub fn new(now: Nanos, bit_s: u64, depth: Bytes) -> Self {
        let depth = i128::from(depth.0) * BYTE;
        Self { bit_s, depth, tokens: depth, last: now }
    }

    fn fill(&mut self, now: Nanos) {
        let elapsed = now.0.saturating_sub(self.last.0);
        let earned = i128::from(elapsed) * i128::from(self.bit_s);
        self.tokens = self.tokens.saturating_add(earned).min(self.depth);
        self.last = self.last.max(now);
    }

    /// Changes the rate, in bit/s, from now on.
    pub fn set_rate(&mut self, now: Nanos, bit_s: u64) {
        self.fill(now);
        self.bit_s = bit_s;
    }

    /// Takes tokens for bytes that went elsewhere; not below an empty bucket.
    pub fn debit(&mut self, now: Nanos, bytes: f64) {
        self.fill(now);
        // A cast of a float saturates, and takes NaN to zero.
        let taken = (bytes.max(0.0) * BYTE as f64) as i128;
        self.tokens = self.tokens.saturating_sub(taken).max(0);
    }

    /// Passes or drops a packet of `bytes` on the wire.
    pub fn on_packet(&mut self, now: Nanos, bytes: u32) -> Verdict {
        self.fill(now);
        let cost = i128::from(bytes) * BYTE;
        if self.tokens < cost {
            return Verdict::Drop(DropReason::Full);
        }
        self.tokens -= cost;
        Verdict::Pass
    }

    /// Whole bytes that may pass now.
    #[must_use]
    pub fn tokens(&self) -> Bytes {
        Bytes((self.tokens / BYTE) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// In any window no more than the depth and what the rate earns, to the byte.
        #[test]
        fn holds_its_rate(
            bit_s in 1_000u64..10_000_000_000,
            depth in 1_500u64..200_000,
            packets in prop::collection::vec((0u64..2_000_000, 60u32..1_514), 1..300),
        ) {
            let mut bucket = TokenBucket::new(Nanos(0), bit_s, Bytes(depth));
            let (mut now, mut passed) = (0u64, 0u128);
            for (gap, bytes) in packets {
                now += gap;
                if bucket.on_packet(Nanos(now), bytes).passes() {
                    passed += u128::from(bytes);
                }
                let most = u128::from(depth) + u128::from(now) * u128::from(bit_s) / 8_000_000_000;
                prop_assert!(passed <= most);
            }
        }
    }
}
