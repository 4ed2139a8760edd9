//! GTB, the global token bucket: each limiter has a bucket at the global rate and removes from it what the
//! others report (Cloud Control, SIGCOMM 2007).
//!
//! ```text
//!   tokens += limit * elapsed - (sum of remote rates) * elapsed - local bytes that passed
//! ```
//!
//! It is known to be unfair, and is kept to show that. The reports are averages that are old by an interval
//! and a delay, while the bucket judges single packets. The limiter with more flows always has bursts; the
//! others find tokens only while it rests.

use super::ctb::TokenBucket;
use crate::{
    units::{Bytes, NANOS_PER_SEC, Nanos, Rate},
    verdict::Verdict,
};

/// A limiter of GTB. See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub struct Gtb {
    bucket: TokenBucket,
    remote_bit_s: f64,
    debited: Nanos,
}

impl Gtb {
    /// A full bucket at the global limit; no reports yet.
    #[must_use]
    pub fn new(now: Nanos, limit: Rate, depth: Bytes) -> Self {
        let bucket = TokenBucket::new(now, limit.bit_s(), depth);
        Self { bucket, remote_bit_s: 0.0, debited: now }
    }

    /// The rate that all other limiters report together, in bit/s, from now on.
    pub fn set_remote(&mut self, now: Nanos, bit_s: f64) {
        self.debit(now);
        self.remote_bit_s = bit_s.max(0.0);
    }

    fn debit(&mut self, now: Nanos) {
        let elapsed = now.0.saturating_sub(self.debited.0);
        self.debited = self.debited.max(now);
        let bytes = self.remote_bit_s * elapsed as f64 / NANOS_PER_SEC as f64 / 8.0;
        self.bucket.debit(now, bytes);
    }

    /// Passes or drops a packet of `bytes` on the wire.
    pub fn on_packet(&mut self, now: Nanos, bytes: u32) -> Verdict {
        self.debit(now);
        self.bucket.on_packet(now, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_send_is_taken_out() {
        let limit = Rate::from_bit_s(8_000_000).unwrap();
        let mut gtb = Gtb::new(Nanos(0), limit, Bytes(1_000));
        gtb.set_remote(Nanos(0), 6_000_000.0);
        let mut passed = 0;
        for ms in 1..=1_000u64 {
            for _ in 0..4 {
                let at = Nanos(ms * 1_000_000);
                passed += u64::from(gtb.on_packet(at, 100).passes()) * 100;
            }
        }
        assert!((200_000..=270_000).contains(&passed), "{passed} bytes at 2 of 8 Mbit/s");
    }
}
