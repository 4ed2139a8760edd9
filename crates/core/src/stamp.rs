//! Timestampers: from a rate to the time at which a packet may leave.
//!
//! Carousel's rule (Saeed et al., SIGCOMM 2017), with the `max` that its listing lacks, without which an idle
//! class would earn unlimited burst:
//!
//! ```text
//! LTS = max(LTS, now - burst) + len / R        the packet may leave at LTS, its last byte sent
//! ```
//!
//! A packet under several policies (its flow's rate, the rate of an aggregate, of the aggregate's parent)
//! leaves at the latest of their stamps: the least of several rates. In any window of length `t` a
//! timestamper passes at most `rate x (t + burst)` and one packet.
//!
//! The time of a packet is exact: the remainder of a division is carried to the next packet, so the error
//! does not grow. O(1) a packet; 40 bytes of state.

use crate::units::{NANOS_PER_SEC, Nanos, Rate};

/// Upper bound of a packet: 1 MiB, twice the largest segment that Linux builds.
pub const MAX_PACKET_BYTES: u32 = (1 << 20) - 1;

/// One policy: a rate, a burst, and its last stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timestamper {
    rate: Rate,
    burst: Nanos,
    last: Nanos,
    /// The remainder of the last division, in bits x 10^9 / (bit/s).
    rest: u64,
}

impl Timestamper {
    /// A policy of `rate`. `burst` is the time for which an idle flow may save up credit: it may send `rate x
    /// burst` at once.
    #[must_use]
    pub fn new(rate: Rate, burst: Nanos) -> Self {
        Self { rate, burst, last: Nanos(0), rest: 0 }
    }

    /// The time at which a packet of `bytes` that comes now may leave; charges it.
    #[inline]
    pub fn stamp(&mut self, now: Nanos, bytes: u32) -> Nanos {
        let earliest = Nanos(now.0.saturating_sub(self.burst.0));
        if self.last < earliest {
            self.last = earliest;
            self.rest = 0;
        }
        // 2^20 x 8 x 10^9 is below 2^53, and the remainder is below the rate: together they are too much only
        // at a rate that no device has, and there the remainder is zero.
        let bits = u64::from(bytes.min(MAX_PACKET_BYTES)) * 8 * NANOS_PER_SEC;
        let bits = bits.saturating_add(self.rest);
        let rate = self.rate.bit_s();
        self.last = Nanos(self.last.0.saturating_add(bits / rate));
        self.rest = bits % rate;
        self.last
    }

    /// How long `bytes` take at the rate, in whole nanoseconds.
    #[inline]
    #[must_use]
    pub fn time_for(&self, bytes: u32) -> Nanos {
        Nanos(u64::from(bytes.min(MAX_PACKET_BYTES)) * 8 * NANOS_PER_SEC / self.rate.bit_s())
    }

    /// Changes the rate for later packets; stamps that were given stay.
    pub fn set_rate(&mut self, rate: Rate) {
        self.rate = rate;
        self.rest = 0;
    }

    /// Changes for how long an idle flow may save up credit, from its next packet on.
    pub fn set_burst(&mut self, burst: Nanos) {
        self.burst = burst;
    }

    /// For how long an idle flow may save up credit.
    #[must_use]
    pub fn burst(&self) -> Nanos {
        self.burst
    }

    /// The rate.
    #[must_use]
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// The last stamp, or the time until which credit has expired.
    #[must_use]
    pub fn last(&self) -> Nanos {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::vec::Vec;

    use super::*;

    fn rate(bit_s: u64) -> Rate {
        Rate::from_bit_s(bit_s).unwrap()
    }

    #[test]
    fn an_idle_policy_earns_no_more_than_its_burst() {
        // 1000 bytes take 1 ms at 8 Mbit/s.
        let mut policy = Timestamper::new(rate(8_000_000), Nanos(2_000_000));
        let now = Nanos(10_000_000_000);
        let stamps: Vec<_> =
            (0..4).map(|_| policy.stamp(now, 1_000).0 as i64 - now.0 as i64).collect();
        assert_eq!(stamps, [-1_000_000, 0, 1_000_000, 2_000_000]);
    }

    /// At the largest rate, while time stands still, as for a clock that stepped back.
    #[test]
    fn no_rate_is_too_large() {
        let mut policy = Timestamper::new(rate(u64::MAX), Nanos(0));
        for _ in 0..5_000 {
            assert!(policy.stamp(Nanos(7), u32::MAX).0 <= 9);
        }
    }

    proptest! {
        /// A backlog of packets leaves at the rate, to the nanosecond, however long it is.
        #[test]
        fn no_error_grows(
            bit_s in 1u64..400_000_000_000,
            sizes in prop::collection::vec(0u32..=MAX_PACKET_BYTES, 1..300),
        ) {
            let mut policy = Timestamper::new(rate(bit_s), Nanos(0));
            let mut bytes = 0u128;
            for size in sizes {
                let stamp = policy.stamp(Nanos(0), size);
                bytes += u128::from(size);
                let exact = bytes * 8 * u128::from(NANOS_PER_SEC) / u128::from(bit_s);
                prop_assert_eq!(u128::from(stamp.0), exact);
            }
        }

        /// No window holds more than rate x (its length + burst) and a packet.
        #[test]
        fn no_window_passes_more_than_its_bound(
            bit_s in 1_000_000u64..10_000_000_000,
            burst in 0u64..5_000_000,
            arrivals in prop::collection::vec((0u64..3_000_000, 40u32..20_000), 2..200),
        ) {
            let mut policy = Timestamper::new(rate(bit_s), Nanos(burst));
            let (mut now, mut left) = (Nanos(1 << 40), Vec::new());
            for (gap, size) in arrivals {
                now = Nanos(now.0 + gap);
                left.push((policy.stamp(now, size).max(now), u64::from(size)));
            }
            for (first, &(start, _)) in left.iter().enumerate() {
                let mut bytes = 0;
                for &(end, size) in &left[first..] {
                    bytes += size;
                    let span = Nanos(end.0 - start.0 + burst);
                    prop_assert!(bytes <= rate(bit_s).bytes_in(span).0 + left[first].1 + 2);
                }
            }
        }
    }
}
