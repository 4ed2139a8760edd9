//! Moving averages by elapsed time, not by tick, and the arrival rate of a limiter.
//!
//! ```text
//!   keep  = exp(-elapsed / tau)                 of what was known before
//!   value = (sum of x * (1 - keep) ...) / (the same sum with x = 1)
//! ```
//!
//! An average by tick forgets faster when ticks come more often, so each interval would need its own
//! constant. The published parameter, history counts 0.1 a second later (Cloud Control, SIGCOMM 2007), is
//! [`TAU`]: 0.109 for the new value at 50 ms, 0.206 at 100 ms, 0.684 at 500 ms. The division makes the first
//! values count in full: an average that starts at zero would hide the start of a load for half a second.
//! [`TAU`]: 0.109 for the new value at 50 ms, 0.206 at 100 ms, 0.684 at 500 ms. The division makes the first
//! values count in full: an average that starts at zero would hide the start of a load for half a second.

use crate::units::{NANOS_PER_SEC, Nanos};

/// The time in which old values fall to 1/e, if they fall to 0.1 in a second: 1 s / ln 10.
pub const TAU: Nanos = Nanos(434_294_482);

/// `exp(-x)` without a math library, to 1e-9; 0 above 40, and 1 below 0.
#[must_use]
pub fn exp_neg(x: f64) -> f64 {
    if x >= 40.0 {
        return 0.0;
    }
    // exp(-x) = exp(-x / 1024) ^ 1024
    let y = x.max(0.0) / 1024.0;
    let mut power = 1.0
        - y * (1.0
            - y / 2.0 * (1.0 - y / 3.0 * (1.0 - y / 4.0 * (1.0 - y / 5.0 * (1.0 - y / 6.0)))));
    for _ in 0..10 {
        power *= power;
    }
    power
}

/// An average in which a value's weight falls by 1/e in each `tau`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Average {
    tau: Nanos,
    sum: f64,
    weight: f64,
}

impl Average {
    /// An average that knows nothing yet.
    #[must_use]
    pub fn new(tau: Nanos) -> Self {
        Self { tau, sum: 0.0, weight: 0.0 }
    }

    /// Takes `value`, which held for the last `elapsed`, and returns the average. An elapsed time of zero has
    /// no weight.
    pub fn add(&mut self, value: f64, elapsed: Nanos) -> f64 {
        let keep = exp_neg(elapsed.0 as f64 / self.tau.0.max(1) as f64);
        self.sum = self.sum * keep + value * (1.0 - keep);
        self.weight = self.weight * keep + (1.0 - keep);
        self.value()
    }

    /// The average; 0 if there is none.
    #[must_use]
    pub fn value(&self) -> f64 {
        if self.weight > 0.0 { self.sum / self.weight } else { 0.0 }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        (self.sum, self.weight) = (0.0, 0.0);
    }
}

/// The rate at which bytes arrive at a limiter, measured before any drop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ArrivalRate {
    bytes: u64,
    since: Nanos,
    average: Average,
}

impl ArrivalRate {
    /// Nothing has arrived; the first interval starts now.
    #[must_use]
    pub fn new(now: Nanos, tau: Nanos) -> Self {
        Self { bytes: 0, since: now, average: Average::new(tau) }
    }

    /// Counts a packet of `bytes` on the wire.
    pub fn on_packet(&mut self, bytes: u32) {
        self.bytes = self.bytes.saturating_add(bytes.into());
    }

    /// Ends an interval; the average rate in bit/s. A clock that stands still or steps back ends none.
    pub fn on_interval(&mut self, now: Nanos) -> f64 {
        let elapsed = Nanos(now.0.saturating_sub(self.since.0));
        if elapsed.0 > 0 {
            let bit_s = self.bytes as f64 * 8.0 * NANOS_PER_SEC as f64 / elapsed.0 as f64;
            self.average.add(bit_s, elapsed);
            (self.bytes, self.since) = (0, now);
        }
        self.bit_s()
    }

    /// The average rate in bit/s at the end of the last interval.
    #[must_use]
    pub fn bit_s(&self) -> f64 {
        self.average.value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_published_parameter() {
        for (ms, new) in [(50u64, 0.109), (100, 0.206), (500, 0.684), (1_000, 0.9)] {
            let mut average = Average::new(TAU);
            average.add(0.0, Nanos(1 << 40));
            let value = average.add(1.0, Nanos(ms * 1_000_000));
            assert!((value - new).abs() < 5e-4, "{ms} ms: {value}");
        }
    }

    #[test]
    fn the_first_interval_counts_in_full() {
        let mut rate = ArrivalRate::new(Nanos(0), TAU);
        rate.on_packet(1_250);
        assert_eq!(rate.on_interval(Nanos(0)), 0.0);
        assert!((rate.on_interval(Nanos(1_000_000)) - 10e6).abs() < 1.0);
    }

    proptest! {
        #[test]
        fn exp_is_exp(x in 0.0f64..39.0) {
            prop_assert!((exp_neg(x) / (-x).exp() - 1.0).abs() < 1e-9);
        }

        /// The same signal gives the same average, however time is divided.
        #[test]
        fn ticks_do_not_count(cuts in prop::collection::vec(1u64..200_000_000, 1..50)) {
            let total: u64 = cuts.iter().sum();
            let (mut one, mut many) = (Average::new(TAU), Average::new(TAU));
            one.add(3.0, Nanos(1_000_000_000));
            many.add(3.0, Nanos(1_000_000_000));
            one.add(7.0, Nanos(total));
            for cut in cuts {
                many.add(7.0, Nanos(cut));
            }
            prop_assert!((one.value() - many.value()).abs() < 1e-6);
        }
    }
}
