//! A sample of a limiter's flows, of constant size: the large flows, and how many flows of that size there
//! are.
//!
//! Sample and hold (Estan, Varghese, SIGCOMM 2002), as Cloud Control needs it, in two steps. In an interval
//! [`FlowCounts`] counts bytes, in fixed memory whatever the number of flows. At its end [`FlowRates`]
//! averages the rates of the [`SAMPLE`] fastest and forgets the idle. Packets do the first, in the kernel by
//! `bpf/common/sample.h`; user space does the second. [`FlowSample`] is both.
//!
//! There are two estimates. The published one is the largest rate. It is the largest of several noisy
//! numbers, so a limiter with seven equal flows has a higher one than a limiter with three, and asks for less
//! than its part. [`FlowRates::typical_bit_s`] is the mean of rates weighted by their square,
//!
//! ```text
//!   typical = sum r^3 / sum r^2
//! ```
//!
//! which is near the large flows' rate where sizes differ, and near the mean where they do not.

mod counts;
mod rates;

pub use counts::{FlowBytes, FlowCounts, SETS, WAYS, flow_hash};
pub use rates::{FlowRates, SAMPLE, merge};

use crate::units::Nanos;

/// A sample of flows. See the [module](self).
#[derive(Debug, Clone)]
pub struct FlowSample {
    counts: FlowCounts,
    rates: FlowRates,
}

impl FlowSample {
    /// An empty sample, rates averaged over `tau`.
    #[must_use]
    pub fn new(now: Nanos, tau: Nanos) -> Self {
        Self { counts: FlowCounts::new(), rates: FlowRates::new(now, tau) }
    }

    /// Counts a packet of `flow`, a [`flow_hash`]. `random` is 32 uniform bits.
    pub fn on_packet(&mut self, flow: u64, bytes: u32, random: u32) {
        self.counts.on_packet(flow, bytes, random);
    }

    /// Ends an interval: new averages; idle flows are removed.
    pub fn on_interval(&mut self, now: Nanos) {
        self.rates.on_interval(now, self.counts.iter());
        self.counts.clear();
    }

    /// The rates of its flows.
    #[must_use]
    pub fn rates(&self) -> &FlowRates {
        &self.rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: u64 = 50_000_000;

    /// Feeds flows with so many packets an interval each, for `intervals`.
    fn fed(packets: impl Fn(u64) -> u64, flows: u64, intervals: u64) -> FlowSample {
        let mut sample = FlowSample::new(Nanos(0), super::super::average::TAU);
        let mut random = 1u64;
        for interval in 1..=intervals {
            let now = interval * INTERVAL;
            for flow in 0..flows {
                for _ in 0..packets(flow) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    sample.on_packet(flow_hash(0, &[flow]), 1_250, (random >> 32) as u32);
                }
            }
            sample.on_interval(Nanos(now));
        }
        sample
    }

    #[test]
    fn the_rates_of_few_flows_are_exact() {
        let sample = fed(|flow| 1 + flow, 7, 100);
        assert_eq!(sample.rates().len(), 7);
        assert!((sample.rates().max_bit_s() - 7.0 * 200_000.0).abs() < 1.0);
        let equal = fed(|_| 3, 7, 100);
        assert!((equal.rates().typical_bit_s() - 600_000.0).abs() < 1.0);
    }

    #[test]
    fn large_flows_are_found_among_thousands() {
        let sample = fed(|flow| if flow == 1_234 { 50 } else { 1 }, 3_000, 40);
        let largest = sample.rates().max_bit_s();
        assert!((9e6..=10e6 + 1.0).contains(&largest), "{largest}");
        assert!(sample.rates().typical_bit_s() > 9e6);
        assert!(sample.rates().len() <= SAMPLE);
    }

    #[test]
    fn small_flows_hardly_move_the_typical_rate() {
        let sample = fed(|flow| if flow == 0 { 50 } else { 1 }, 11, 40);
        assert!(sample.rates().typical_bit_s() > 0.98 * 10e6, "{}", sample.rates().typical_bit_s());
    }

    #[test]
    fn the_idle_are_forgotten() {
        let mut sample = fed(|_| 1, 5, 10);
        sample.on_interval(Nanos(4_000_000_000));
        assert!(sample.rates().is_empty());
    }
}
