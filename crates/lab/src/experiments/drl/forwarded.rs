//! What passed the limiters, flow by flow, in bins of time; the same for a simulation and for a wire.

use std::time::Duration;

use crate::{chart::Series, stats};

/// A bin: of a simulation's [`tidegate_sim::measure::BIN`], and of the meters of the wire.
pub(super) const BIN: Duration = Duration::from_millis(50);

/// What passed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Forwarded {
    /// The bytes of each flow in each [`BIN`].
    pub(super) flows: Vec<Vec<u64>>,
    /// The limiter of each flow.
    pub(super) limiter: Vec<usize>,
    /// The limit of all together.
    pub(super) limit_bit_s: f64,
}

pub(super) fn bins_in(time: Duration) -> usize {
    (time.as_nanos() / BIN.as_nanos()) as usize
}

fn bit_s(bytes: &[u64]) -> f64 {
    bytes.iter().sum::<u64>() as f64 * 8.0 / (BIN.as_secs_f64() * bytes.len().max(1) as f64)
}

impl Forwarded {
    /// Bytes in each bin, of the flows of one limiter or of all.
    pub(super) fn sum(&self, limiter: Option<usize>) -> Vec<u64> {
        let bins = self.flows.iter().map(Vec::len).max().unwrap_or(0);
        let mut sum = vec![0; bins];
        for (bytes, of) in self.flows.iter().zip(&self.limiter) {
            if limiter.is_none_or(|limiter| limiter == *of) {
                sum.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += bytes);
            }
        }
        sum
    }

    /// The mean rate of the flows of one limiter, or of all, from a time to the end.
    pub(super) fn mean_bit_s(&self, limiter: Option<usize>, from: Duration) -> f64 {
        let sum = self.sum(limiter);
        bit_s(sum.get(bins_in(from)..).unwrap_or_default())
    }

    /// The mean rate of each flow from a time to the end.
    pub(super) fn rates_bit_s(&self, from: Duration) -> Vec<f64> {
        let rate = |bytes: &Vec<u64>| bit_s(bytes.get(bins_in(from)..).unwrap_or_default());
        self.flows.iter().map(rate).collect()
    }

    /// Jain's index of the flows' means from a time to the end.
    pub(super) fn jain(&self, from: Duration) -> Option<f64> {
        stats::jain(&self.rates_bit_s(from))
    }

    /// The least and the greatest mean over any `window` after a time, as parts of the limit in percent.
    /// None: there is no such window.
    pub(super) fn extremes_percent(&self, from: Duration, window: Duration) -> Option<(f64, f64)> {
        let sum = self.sum(None);
        let windows = sum.get(bins_in(from)..)?.windows(bins_in(window).max(1));
        let rates: Vec<f64> =
            windows.map(|window| bit_s(window) / self.limit_bit_s * 100.0).collect();
        stats::range(&rates)
    }

    /// The rate of a limiter, or of all, in stretches of `every`.
    pub(super) fn series(&self, name: &str, limiter: Option<usize>, every: Duration) -> Series {
        let sum = self.sum(limiter);
        let rates: Vec<f64> = sum.chunks_exact(bins_in(every).max(1)).map(bit_s).collect();
        Series::every(name, every.as_secs_f64(), &rates)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 6250 bytes in 50 ms are 1 Mbit/s.
    const MBIT: u64 = 6_250;

    #[test]
    fn means_extremes_and_fairness() {
        let forwarded = Forwarded {
            flows: vec![vec![9 * MBIT, MBIT, MBIT, 2 * MBIT], vec![0, MBIT, MBIT, 0]],
            limiter: vec![0, 1],
            limit_bit_s: 2e6,
        };
        let (from, window) = (BIN, BIN * 2);
        let near = |is: f64, should: f64| assert!((is - should).abs() < 1e-9 * should, "{is}");
        near(forwarded.mean_bit_s(None, from), 2e6);
        near(forwarded.mean_bit_s(Some(0), BIN * 3), 2e6);
        let rates = forwarded.rates_bit_s(BIN * 2);
        near(rates[0], 1.5e6);
        near(rates[1], 0.5e6);
        let (least, most) = forwarded.extremes_percent(from, window).unwrap();
        near(least, 100.0);
        near(most, 100.0);
        assert_eq!(forwarded.extremes_percent(BIN * 3, window), None);
        assert!((forwarded.jain(BIN * 2).unwrap() - 0.8).abs() < 1e-9);
    }
}
