//! What a run has shown.

use tidegate_core::Nanos;

/// Jain's index of fairness: 1 if all have the same, 1/n if one has all.
pub fn jain(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    if squares > 0.0 { sum * sum / (values.len() as f64 * squares) } else { 1.0 }
}

/// The middle of `values`, or the mean of both.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// Length of a bin.
pub const BIN: Nanos = Nanos(50_000_000);

/// Bytes in bins of [`BIN`].
#[derive(Debug, Default, Clone)]
pub struct Bins(Vec<u64>);

impl Bins {
    /// Counts bytes at a time.
    pub fn add(&mut self, at: Nanos, bytes: u64) {
        let bin = (at.0 / BIN.0) as usize;
        if self.0.len() <= bin {
            self.0.resize(bin + 1, 0);
        }
        self.0[bin] += bytes;
    }

    /// The mean rate from `from` until `to`, in bit/s.
    pub fn rate(&self, from: Nanos, to: Nanos) -> f64 {
        let bins = (from.0 / BIN.0) as usize..(to.0 / BIN.0) as usize;
        let bytes: u64 = bins.map(|bin| self.0.get(bin).copied().unwrap_or(0)).sum();
        bytes as f64 * 8e9 / (to.0 - from.0) as f64
    }

    /// The least and the greatest mean over `window` that starts with any bin in `from..to - window`.
    pub fn extremes(&self, from: Nanos, to: Nanos, window: Nanos) -> (f64, f64) {
        let starts = (from.0..=to.0.saturating_sub(window.0)).step_by(BIN.0 as usize);
        let rates = starts.map(|at| self.rate(Nanos(at), Nanos(at + window.0)));
        rates.fold((f64::MAX, 0.0), |(least, most), rate| (rate.min(least), rate.max(most)))
    }

    /// Adds another's bins.
    pub fn merge(&mut self, other: &Bins) {
        for (bin, bytes) in other.0.iter().enumerate() {
            self.add(Nanos(bin as u64 * BIN.0), *bytes);
        }
    }
}
