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

/// The fastest stretch of a transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Peak {
    pub(super) bit_s: f64,
    pub(super) since_start: Duration,
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

    /// From its first bin to its last.
    pub(super) fn duration(&self) -> Duration {
        self.bin * u32::try_from(self.bytes.len()).unwrap_or(u32::MAX)
    }

    /// The mean rate between two times since the start; `None` when nothing lies between.
    pub(super) fn mean_bit_s(&self, from: Duration, to: Duration) -> Option<f64> {
        let (from, to) = (self.bins_in(from), self.bins_in(to).min(self.bytes.len()));
        let bins = self.bytes.get(from..to).filter(|bins| !bins.is_empty())?;
        Some(self.bit_s(bins))
    }

    /// The highest rate over any stretch of bins as long as `window`, and when that stretch begins;
    /// `None` when the transfer was shorter. O(bins times bins in the window).
    pub(super) fn peak(&self, window: Duration) -> Option<Peak> {
        let stretches = self.bytes.windows(self.bins_in(window).max(1)).enumerate();
        let peaks = stretches.map(|(at, bins)| Peak {
            bit_s: self.bit_s(bins),
            since_start: self.bin * u32::try_from(at).unwrap_or(u32::MAX),
        });
        // The first of equals.
        peaks.reduce(|most, peak| if peak.bit_s > most.bit_s { peak } else { most })
    }

    /// The same between two times since the start.
    pub(super) fn between(&self, from: Duration, to: Duration) -> Wire {
        let to = self.bins_in(to).min(self.bytes.len());
        let from = self.bins_in(from).min(to);
        Wire { bytes: self.bytes[from..to].to_vec(), bin: self.bin }
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
        assert_eq!(wire.duration(), ms(30));
        assert!(Wire::new(vec![0, 42], BIN).bytes.is_empty());
    }

    #[test]
    fn rates_over_stretches() {
        // 10 Mbit/s, and a burst that lies across two aligned stretches of 20 ms.
        let wire = Wire::new(vec![12_500, 25_000, 25_000, 12_500, 12_500], BIN);
        assert_eq!(wire.peak(ms(20)), Some(Peak { bit_s: 20e6, since_start: ms(10) }));
        assert_eq!(wire.peak(ms(60)), None);
        assert_eq!(wire.rates_bit_s(ms(20)), [15e6, 15e6]);
        assert_eq!(wire.mean_bit_s(ms(30), ms(1000)), Some(10e6));
        assert_eq!(wire.mean_bit_s(ms(50), ms(1000)), None);
        assert_eq!(wire.between(ms(10), ms(30)).rates_bit_s(ms(10)), [20e6, 20e6]);
        assert!(wire.between(ms(60), ms(100)).bytes.is_empty());
    }
}
