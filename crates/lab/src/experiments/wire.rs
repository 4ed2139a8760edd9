//! Rates on the wire, from the bytes of equal bins of time.

use std::time::Duration;

/// Two full frames: less than this in a bin is no transfer yet, but a neighbour being looked up.
const BEGUN_BYTES: u64 = 2 * 1514;

/// What a transfer put on the wire, from its first bin to its last.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Wire {
    bytes: Vec<u64>,
    bin: Duration,
}

impl Wire {
    /// Cuts off the silence before and after.
    pub(super) fn new(mut bytes: Vec<u64>, bin: Duration) -> Wire {
        let busy = |bytes: &u64| *bytes >= BEGUN_BYTES;
        let end = bytes.iter().rposition(busy).map_or(0, |last| last + 1);
        bytes.truncate(end);
        bytes.drain(..bytes.iter().position(busy).unwrap_or(0));
        Wire { bytes, bin }
    }

    /// The mean rate between two times since the start; `None` when nothing lies between.
    pub(super) fn mean_bit_s(&self, from: Duration, to: Duration) -> Option<f64> {
        let (from, to) = (self.bins_in(from), self.bins_in(to).min(self.bytes.len()));
        let bins = self.bytes.get(from..to).filter(|bins| !bins.is_empty())?;
        Some(self.bit_s(bins))
    }

    /// The highest rate over any stretch of bins as long as `window`; `None` when the transfer was
    /// shorter. O(n).
    pub(super) fn max_bit_s(&self, window: Duration) -> Option<f64> {
        let sums = self.bytes.windows(self.bins_in(window).max(1));
        sums.map(|bins| self.bit_s(bins)).max_by(f64::total_cmp)
    }

    /// The rate in each stretch of `every`, one after the other.
    pub(super) fn rates_bit_s(&self, every: Duration) -> Vec<f64> {
        let chunks = self.bytes.chunks_exact(self.bins_in(every).max(1));
        chunks.map(|bins| self.bit_s(bins)).collect()
    }

    fn bins_in(&self, time: Duration) -> usize {
        (time.as_nanos() / self.bin.as_nanos().max(1)) as usize
    }

    fn bit_s(&self, bins: &[u64]) -> f64 {
        bins.iter().sum::<u64>() as f64 * 8.0 / (self.bin.as_secs_f64() * bins.len() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BIN: Duration = Duration::from_millis(10);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn silence_is_cut_off() {
        let wire = Wire::new(vec![0, 60, 12_500, 0, 12_500, 70, 0], BIN);
        assert_eq!(wire.bytes, [12_500, 0, 12_500]);
        assert!(Wire::new(vec![0, 42], BIN).bytes.is_empty());
    }

    #[test]
    fn rates_over_stretches() {
        // 10 Mbit/s, and a burst that lies across two aligned stretches of 20 ms.
        let wire = Wire::new(vec![12_500, 25_000, 25_000, 12_500, 12_500], BIN);
        assert_eq!(wire.max_bit_s(ms(20)), Some(20e6));
        assert_eq!(wire.max_bit_s(ms(60)), None);
        assert_eq!(wire.rates_bit_s(ms(20)), [15e6, 15e6]);
        assert_eq!(wire.mean_bit_s(ms(30), ms(1000)), Some(10e6));
        assert_eq!(wire.mean_bit_s(ms(50), ms(1000)), None);
    }
}
