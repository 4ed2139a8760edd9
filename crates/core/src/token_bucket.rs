//! The token bucket of a policer: a packet passes if there are tokens for all of it, and else it is dropped.
//!
//! ```text
//! tokens = min(burst, tokens + rate x (now - last));  last = now
//! passes if tokens >= length;                         tokens -= length
//! ```
//!
//! It is exact. A token is a byte, and tokens are counted in units of which a byte has 8e9. So a rate of R
//! bit/s adds exactly R of them in each nanosecond: there is no fraction to round or to carry, and no drift
//! at any rate over any time. With bursts up to [`MAX_BURST`] all arithmetic stays in 64 bits: a bucket that
//! was idle longer than it takes to fill is full, and a shorter time's tokens are less than a full bucket. A
//! clock that steps back adds nothing.
//!
//! A packet longer than the burst never passes. In any window of length `t` at most `burst + rate x t`
//! passes. O(1) a packet; 24 bytes of state.
//!
//! Packets that will still be cut into segments ([`TokenBucket::on_segments`]) are up to a megabyte long; a
//! policer in the network would have met their segments one by one. Here a packet longer than half the bucket
//! passes a bucket that is half full, and the rest becomes a debt: the rate stays exact, and the bound grows
//! by one such packet. The same holds where flows have parts ([`TokenBucket::on_part`]): others may have left
//! less than a packet in the bucket, which is no fault of a flow that still has its part.

use crate::units::{Bytes, MAX_RATE_BIT_S, MIN_RATE_BIT_S, NANOS_PER_SEC, Nanos, Rate};

/// Units of tokens in a byte: one bit/s adds one unit each nanosecond.
pub const UNITS_PER_BYTE: u64 = 8_000_000_000;
/// The deepest bucket, and the most that the two buckets of a meter hold together: 2 GiB. Its units take up
/// all but a tenth of 64 bits, which leaves room for the longest packet.
pub const MAX_BURST: Bytes = Bytes(1 << 31);

/// Why a bucket is invalid. The message says what to type instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BucketError {
    /// A rate that is not supported.
    #[error("rate {0} is out of range; write 8kbit to 100gbit, for example 50mbit")]
    Rate(Rate),
    /// A burst that is not supported.
    #[error("burst {0} is out of range; write 1b to {MAX_BURST}, for example 150kb")]
    Burst(Bytes),
}

/// Rate and depth, in the form for the packet path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketConfig {
    /// Units that a nanosecond adds: the rate in bit/s.
    pub rate: u64,
    /// Depth in units.
    pub burst: u64,
    /// Nanoseconds after which an empty bucket is full.
    pub fill: u64,
}

impl BucketConfig {
    /// A bucket of `burst` bytes that fills at `rate`.
    ///
    /// # Errors
    /// [`BucketError`] for a rate outside 8 kbit/s to 100 Gbit/s, a burst of nothing or above
    /// [`MAX_BURST`].
    pub fn new(rate: Rate, burst: Bytes) -> Result<Self, BucketError> {
        check_rate(rate)?;
        if burst.0 == 0 || burst > MAX_BURST {
            return Err(BucketError::Burst(burst));
        }
        let units = burst.0 * UNITS_PER_BYTE;
        Ok(BucketConfig { rate: rate.bit_s(), burst: units, fill: units.div_ceil(rate.bit_s()) })
    }

    /// A bucket that takes `time` to fill at `rate`.
    ///
    /// # Errors
    /// [`BucketError`] as for [`BucketConfig::new`].
    pub fn lasting(rate: Rate, time: Nanos) -> Result<Self, BucketError> {
        check_rate(rate)?;
        let bytes = rate.bytes_in(time);
        let units = u128::from(rate.bit_s()) * u128::from(time.0);
        if units < u128::from(UNITS_PER_BYTE) || bytes >= MAX_BURST {
            return Err(BucketError::Burst(bytes));
        }
        // Below the deepest bucket's, so within 64 bits.
        let burst = rate.bit_s() * time.0;
        Ok(BucketConfig { rate: rate.bit_s(), burst, fill: time.0 })
    }
}

/// The bytes that a rate in bit/s adds in a time, rounded down by less than three bytes.
#[must_use]
pub fn earned(bit_s: u64, time: Nanos) -> Bytes {
    let (seconds, rest) = (time.0 / NANOS_PER_SEC, time.0 % NANOS_PER_SEC);
    let whole = seconds * (bit_s >> 3) + ((seconds * (bit_s & 7)) >> 3);
    Bytes(whole + rest * (bit_s >> 3) / NANOS_PER_SEC)
}

/// Whether a bucket can have this rate.
pub(crate) fn check_rate(rate: Rate) -> Result<(), BucketError> {
    let supported = (MIN_RATE_BIT_S..=MAX_RATE_BIT_S).contains(&rate.bit_s());
    if supported { Ok(()) } else { Err(BucketError::Rate(rate)) }
}

/// A token bucket. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    config: BucketConfig,
    /// Units in it at `last`.
    tokens: u64,
    /// The debt: units taken beyond those, which must come in first.
    debt: u64,
    last: Nanos,
}

impl TokenBucket {
    /// A bucket that is full at `now`.
    #[must_use]
    pub fn new(config: BucketConfig, now: Nanos) -> Self {
        TokenBucket { config, tokens: config.burst, debt: 0, last: now }
    }

    /// Changes rate or depth from `now` on. The content stays as far as it fits, and the debt stays: no
    /// change adds a byte.
    pub fn set_config(&mut self, now: Nanos, config: BucketConfig) {
        (self.tokens, self.debt) = self.balance(now);
        self.last = self.last.max(now);
        self.tokens = self.tokens.min(config.burst);
        self.config = config;
    }

    /// Takes the tokens of a packet of `bytes`, or returns `false` and takes nothing.
    pub fn on_packet(&mut self, now: Nanos, bytes: u32) -> bool {
        let cost = u64::from(bytes) * UNITS_PER_BYTE;
        self.take(now, cost, cost)
    }

    /// The same for a packet that will be cut into segments, of at most a megabyte.
    pub fn on_segments(&mut self, now: Nanos, bytes: u32) -> bool {
        let cost = u64::from(bytes) * UNITS_PER_BYTE;
        self.take(now, cost, cost.min(self.config.burst / 2))
    }

    /// The same for a packet that is within its flow's part (see [`crate::fair_police`]), of at most a
    /// megabyte: it passes unless the bucket has a debt for another.
    pub fn on_part(&mut self, now: Nanos, bytes: u32) -> bool {
        self.take(now, u64::from(bytes) * UNITS_PER_BYTE, 0)
    }

    /// Takes `cost` if there is as much as `needed`.
    fn take(&mut self, now: Nanos, cost: u64, needed: u64) -> bool {
        (self.tokens, self.debt) = self.balance(now);
        self.last = self.last.max(now);
        let passes = self.tokens >= needed && self.debt == 0;
        if passes {
            self.debt = cost.saturating_sub(self.tokens);
            self.tokens = self.tokens.saturating_sub(cost);
        }
        passes
    }

    /// Its units and its debt at `now`; one of them is zero.
    fn balance(&self, now: Nanos) -> (u64, u64) {
        let BucketConfig { rate, burst, fill } = self.config;
        let time = now.0.saturating_sub(self.last.0);
        if time >= fill + self.debt.div_ceil(rate) {
            return (burst, 0);
        }
        // Less than a full bucket and the debt, so it stays within 64 bits.
        let gain = rate * time;
        let debt = self.debt.saturating_sub(gain);
        (self.tokens + gain.saturating_sub(self.debt).min(burst - self.tokens), debt)
    }

    /// Its content at `now`, in units of which a byte has [`UNITS_PER_BYTE`].
    #[must_use]
    pub fn units(&self, now: Nanos) -> u64 {
        self.balance(now).0
    }

    /// When it will be full, if nothing is taken after `now`; not before `now`.
    #[must_use]
    pub fn full_at(&self, now: Nanos) -> Nanos {
        let (tokens, debt) = self.balance(now);
        let missing = u128::from(self.config.burst - tokens) + u128::from(debt);
        // A full bucket and the longest packet, at the lowest rate: less than a year.
        Nanos(now.0.saturating_add(missing.div_ceil(u128::from(self.config.rate)) as u64))
    }

    /// Its content at `now`, in whole bytes.
    #[must_use]
    pub fn tokens(&self, now: Nanos) -> Bytes {
        Bytes(self.units(now) / UNITS_PER_BYTE)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::string::ToString;

    use super::*;

    fn bucket(bit_s: u64, bytes: u64) -> TokenBucket {
        let config = BucketConfig::new(Rate::from_bit_s(bit_s).unwrap(), Bytes(bytes)).unwrap();
        TokenBucket::new(config, Nanos(0))
    }

    /// The same rule in fractions: numerators over 8e9, without a bound on time or size.
    struct Naive {
        rate: i128,
        burst: i128,
        tokens: i128,
        last: u64,
    }

    impl Naive {
        /// `owes`: nothing, half a bucket, all.
        fn on_packet(&mut self, now: u64, bytes: u32, owes: u8) -> bool {
            let time = i128::from(now.saturating_sub(self.last));
            self.last = self.last.max(now);
            self.tokens = self.burst.min(self.tokens + self.rate * time);
            let cost = i128::from(bytes) * i128::from(UNITS_PER_BYTE);
            let needed = [cost, cost.min(self.burst / 2), 0][usize::from(owes)];
            let passes = self.tokens >= needed;
            self.tokens -= if passes { cost } else { 0 };
            passes
        }
    }

    #[test]
    fn passes_its_burst_and_then_its_rate() {
        let mut bucket = bucket(8_000_000, 3_000);
        let mut passes = |at| bucket.on_packet(Nanos(at), 1_000);
        assert_eq!([passes(0), passes(0), passes(0), passes(0)], [true, true, true, false]);
        assert!(!passes(999_999));
        assert!(passes(1_000_000));
        assert!(!passes(0), "a clock that steps back adds nothing");
        assert!(!passes(1_000_000));
        assert!(passes(u64::MAX), "584 years later");
    }

    #[test]
    fn no_drift_at_any_rate() {
        for bit_s in [MIN_RATE_BIT_S, 9_999, 333_333_333, 1_000_000_007, MAX_RATE_BIT_S] {
            let rate = Rate::from_bit_s(bit_s).unwrap();
            let mut bucket = bucket(bit_s, 15_000);
            let step = rate.time_for(Bytes(1_500)).0 / 7 * 2 + 1;
            assert!(bucket.on_packet(Nanos(0), 15_000));
            let (mut now, mut passed) = (0_u64, 15_000_u64);
            for _ in 0..2_000_000 {
                now += step;
                passed += if bucket.on_packet(Nanos(now), 1_500) { 1_500 } else { 0 };
            }
            let exact = u128::from(now) * u128::from(bit_s) / u128::from(UNITS_PER_BYTE) + 15_000;
            let left = u128::from(bucket.tokens(Nanos(now)).0);
            assert!(exact - left - u128::from(passed) <= 1, "{bit_s}: {exact} {left} {passed}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let new = |bit_s, bytes| BucketConfig::new(Rate::from_bit_s(bit_s).unwrap(), Bytes(bytes));
        assert!(matches!(new(7_999, 1_500), Err(BucketError::Rate(_))));
        assert!(matches!(new(100_000_000_001, 1_500), Err(BucketError::Rate(_))));
        assert!(matches!(new(8_000, 0), Err(BucketError::Burst(_))));
        let text = new(8_000, MAX_BURST.0 + 1).unwrap_err().to_string();
        assert!(text.contains("write 1b to 2gb"), "{text}");
        assert!(new(100_000_000_000, MAX_BURST.0).is_ok());
    }

    #[test]
    fn a_slower_rate_gives_nothing_away() {
        let config =
            |bit_s| BucketConfig::new(Rate::from_bit_s(bit_s).unwrap(), Bytes(75_000)).unwrap();
        let (fast, slow) = (config(2_000_000), config(8_000));
        let mut bucket = TokenBucket::new(fast, Nanos(0));
        let mut passed = 0;
        // 20 alternations in 2 ms.
        for change in 0..20u64 {
            let now = Nanos(change * 100_000);
            bucket.set_config(now, if change % 2 == 0 { fast } else { slow });
            passed += (0..200).filter(|_| bucket.on_packet(now, 1_000)).count();
        }
        assert_eq!(passed, 75);
        // 1.0 ms of the fast rate and 0.9 of the slow one, and then the slow one.
        assert_eq!(bucket.tokens(Nanos(1_900_000)), Bytes(250));
        assert!(!bucket.on_packet(Nanos(750_900_000), 1_000));
        assert!(bucket.on_packet(Nanos(751_100_000), 1_000));
    }

    /// A packet, or another rate and depth, after some time.
    type Step = (u64, u32, u8, Option<(u64, u64)>);

    fn any_steps() -> impl Strategy<Value = std::vec::Vec<Step>> {
        let rate = prop_oneof![MIN_RATE_BIT_S..10_000_000, MIN_RATE_BIT_S..=MAX_RATE_BIT_S];
        let change = prop::option::of((rate, 1_500u64..200_000));
        let gap = prop_oneof![0u64..3_000, 0u64..3_000_000, 0u64..1_000_000_000];
        prop::collection::vec((gap, 60u32..70_000, 0u8..3, change), 1..300)
    }

    proptest! {
        /// Whatever the rates and depths were: no more than the deepest bucket, what each rate earned in its
        /// time, and the longest packet.
        #[test]
        fn no_change_adds_a_byte(steps in any_steps()) {
            let mut bucket = bucket(1_000_000, 50_000);
            let (mut now, mut rate, mut deepest) = (0u64, 1_000_000u64, 50_000u64);
            let (mut earned_units, mut passed) = (0u128, 0u128);
            for (gap, bytes, owes, change) in steps {
                now += gap;
                earned_units += u128::from(gap) * u128::from(rate);
                if let Some((bit_s, burst)) = change {
                    let config = BucketConfig::new(Rate::from_bit_s(bit_s).unwrap(), Bytes(burst));
                    bucket.set_config(Nanos(now), config.unwrap());
                    (rate, deepest) = (bit_s, deepest.max(burst));
                }
                let passes = match owes {
                    0 => bucket.on_packet(Nanos(now), bytes),
                    1 => bucket.on_segments(Nanos(now), bytes),
                    _ => bucket.on_part(Nanos(now), bytes),
                };
                passed += if passes { u128::from(bytes) } else { 0 };
                let most = u128::from(deepest + 70_000) + earned_units / u128::from(UNITS_PER_BYTE);
                prop_assert!(passed <= most, "{passed} of {most}");
            }
        }

        #[test]
        fn what_a_rate_earns_is_a_little_less_than_exact(
            bit_s in MIN_RATE_BIT_S..=MAX_RATE_BIT_S,
            ns in prop_oneof![0u64..10_000_000_000, 0u64..1 << 56],
        ) {
            let exact = u128::from(bit_s) * u128::from(ns) / u128::from(UNITS_PER_BYTE);
            let earned = u128::from(earned(bit_s, Nanos(ns)).0);
            prop_assert!(earned <= exact && exact - earned < 3, "{earned} of {exact}");
        }

        #[test]
        fn is_the_naive_model(
            bit_s in prop_oneof![MIN_RATE_BIT_S..=MAX_RATE_BIT_S, MIN_RATE_BIT_S..100_000],
            burst in prop_oneof![1u64..200_000, 1..=MAX_BURST.0],
            packets in prop::collection::vec(
                (
                    prop_oneof![0u64..3_000_000, 0..1u64 << 52, any::<u64>()],
                    any::<u16>(),
                    0u8..3,
                ),
                1..300,
            ),
        ) {
            let mut exact = bucket(bit_s, burst);
            let units = i128::from(burst) * i128::from(UNITS_PER_BYTE);
            let mut naive = Naive { rate: bit_s.into(), burst: units, tokens: units, last: 0 };
            let mut now = 0_u64;
            for (gap, bytes, owes) in packets {
                // Now and then the clock steps back.
                now = if gap % 7 == 3 { now.saturating_sub(gap) } else { now.saturating_add(gap) };
                let passes = naive.on_packet(now, bytes.into(), owes);
                let got = match owes {
                    0 => exact.on_packet(Nanos(now), bytes.into()),
                    1 => exact.on_segments(Nanos(now), bytes.into()),
                    _ => exact.on_part(Nanos(now), bytes.into()),
                };
                prop_assert_eq!(got, passes);
                prop_assert_eq!(i128::from(exact.tokens) - i128::from(exact.debt), naive.tokens);
            }
        }

        #[test]
        fn never_passes_more_than_burst_and_rate(
            bit_s in MIN_RATE_BIT_S..1_000_000_000,
            burst in 1_500u64..100_000,
            packets in prop::collection::vec((0u64..2_000_000, 60u32..1_500), 1..300),
        ) {
            let mut bucket = bucket(bit_s, burst);
            let (mut now, mut passed) = (0_u64, 0_u64);
            for (gap, bytes) in packets {
                now += gap;
                passed += if bucket.on_packet(Nanos(now), bytes) { u64::from(bytes) } else { 0 };
                let rate = Rate::from_bit_s(bit_s).unwrap();
                prop_assert!(passed <= burst + rate.bytes_in(Nanos(now)).0);
            }
        }
    }
}
