//! Direct ECE marking (DEM): a shaper that signals congestion to TCP senders in the ACKs that come back to
//! them (He et al., "Low Latency Software Rate Limiters for Cloud Networks", APNet 2017).
//!
//! The sender is behind a port and its stack is not ours, but its ACKs pass here. When one does, the queue in
//! front of the shaper is read as it is *now*, and ECE is set in the ACK if the queue is too long. Compared
//! with CE marks on packets that enter the queue this saves the time that a mark needs to come back, and no
//! 64 KB segment is marked as a whole.
//!
//! Two laws:
//!
//! ```text
//!   step:  ECE while q > K
//!   PI:    every T:  p += A (q - K) / K + B (q - q before) / K        in [0, 1]
//!          of the segments that an ACK acknowledges the part 2p is marked where the sender is DCTCP or the
//!          like, p^2 where it halves its window (as DualPI2, RFC 9332); all of them while q > 4 K,
//!          none while q < K / 4
//! ```
//!
//! The PI law spreads its marks evenly: the flow keeps the fraction of a mark that is left, so no randomness
//! is needed. It is the default: where windows are halved, or many flows last long, it holds the rate better,
//! with a queue of up to 2.2 times the mean (`tests/port_laws.rs` has the table).
//!
//! O(1) an ACK; 24 bytes a limit, 4 bytes a flow. The kernel's copy is `bpf/acks/dem.h`.

use crate::units::Nanos;

/// Probabilities in 2^-24.
pub const ONE: u64 = 1 << 24;
/// The least threshold, in full frames. The paper's figures imply 10 to 13 KB. Here the three or four frames
/// that a guest sends at once come on top of it; with six the median was 20 to 40 us longer.
pub const LEAST_FRAMES: u64 = 4;
/// The threshold in time at the limit's rate, if that is more.
pub const THRESHOLD: Nanos = Nanos(30_000);
/// The interval at which the PI law reads the queue.
pub const PERIOD: Nanos = Nanos(500_000);
/// Its integral gain, A.
pub const INTEGRAL: u64 = ONE / 256;
/// Its proportional gain, B.
pub const PROPORTIONAL: u64 = ONE / 32;
/// The PI law marks every ACK while the queue is longer than this many thresholds: a slow start fills 20 ms
/// before p has grown.
pub const CERTAIN_THRESHOLDS: u64 = 4;
/// It marks none while the queue is shorter than this part of a threshold: after a host stalled, p belongs to
/// a queue that is gone.
pub const NEVER_PART: u64 = 4;
/// Clamps the distance from the threshold, in thresholds.
pub const MAX_THRESHOLDS: u64 = 8;
/// Clamps the length of an ACK, in segments.
pub const MAX_SEGMENTS: u32 = 64;
/// Clamps the queue, in bytes; keeps the products in 64 bits.
pub const MAX_BYTES: u64 = 1 << 34;

/// The law for marks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Law {
    /// All ACKs while the queue is above the threshold.
    Step,
    /// As many ACKs as hold it at the threshold.
    #[default]
    Pi,
}

/// The parameters of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// K, in bytes on the wire.
    pub threshold_bytes: u64,
    /// The law.
    pub law: Law,
}

impl Config {
    /// The parameters of a limit of `byte_s` bytes a second whose full frames have `frame_bytes`: a threshold
    /// of [`THRESHOLD`], at least [`LEAST_FRAMES`].
    #[must_use]
    pub fn new(byte_s: u64, frame_bytes: u32) -> Self {
        let time = u128::from(byte_s) * u128::from(THRESHOLD.0) / 1_000_000_000;
        let time = u64::try_from(time).unwrap_or(MAX_BYTES);
        let threshold = time.max(LEAST_FRAMES * u64::from(frame_bytes));
        Config { threshold_bytes: threshold.min(MAX_BYTES), law: Law::default() }
    }
}

/// State of the PI law for a limit.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Marker {
    /// When the probability was last set.
    pub updated: Nanos,
    /// p, in 2^-24.
    pub probability: u64,
    /// The queue then, in bytes.
    pub before_bytes: u64,
}

/// State of a flow: the fraction of the next mark that is due, in 2^-24.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Due(pub u32);

/// A passing ACK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// Full segments that it acknowledges, partial ones counted.
    pub segments: u32,
    /// The sender reacts to the fraction of marked segments, as DCTCP does.
    pub scalable: bool,
}

/// `value` times `gain` over `threshold`.
fn scaled(value: u64, gain: u64, threshold: u64) -> u64 {
    value.min(threshold * MAX_THRESHOLDS) * gain / threshold
}

impl Marker {
    /// Whether the ACK that passes at `now` gets ECE, where the queue has `backlog_bytes`. Only for flows
    /// that have agreed on ECN as in RFC 3168.
    pub fn on_ack(
        &mut self,
        config: &Config,
        now: Nanos,
        backlog_bytes: u64,
        ack: Ack,
        due: &mut Due,
    ) -> bool {
        let backlog = backlog_bytes.min(MAX_BYTES);
        if config.law == Law::Step {
            return backlog > config.threshold_bytes;
        }
        self.update(config, now, backlog);
        if backlog > config.threshold_bytes.min(MAX_BYTES) * CERTAIN_THRESHOLDS {
            return true;
        }
        if backlog < config.threshold_bytes / NEVER_PART {
            return false;
        }
        let p = self.probability;
        let part = if ack.scalable { (2 * p).min(ONE) } else { p * p / ONE };
        let sum = u64::from(due.0) + part * u64::from(ack.segments.min(MAX_SEGMENTS));
        // One ACK carries one mark; the next ones carry the rest.
        let (mark, left) = if sum >= ONE { (true, sum - ONE) } else { (false, sum) };
        due.0 = left.min(ONE) as u32;
        mark
    }

    /// The PI law.
    fn update(&mut self, config: &Config, now: Nanos, backlog: u64) {
        if now.0.saturating_sub(self.updated.0) < PERIOD.0 {
            return;
        }
        let threshold = config.threshold_bytes.max(1);
        let (mut up, mut down) = (0, 0);
        if backlog > threshold {
            up += scaled(backlog - threshold, INTEGRAL, threshold);
        } else {
            down += scaled(threshold - backlog, INTEGRAL, threshold);
        }
        if backlog > self.before_bytes {
            up += scaled(backlog - self.before_bytes, PROPORTIONAL, threshold);
        } else {
            down += scaled(self.before_bytes - backlog, PROPORTIONAL, threshold);
        }
        self.probability = (self.probability + up).saturating_sub(down).min(ONE);
        self.before_bytes = backlog;
        self.updated = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ACK: Ack = Ack { segments: 2, scalable: true };

    #[test]
    fn the_threshold_is_frames_or_a_time() {
        assert_eq!(Config::new(125_000_000, 1514).threshold_bytes, 4 * 1514);
        assert_eq!(Config::new(1_250_000_000, 1514).threshold_bytes, 37_500);
        assert_eq!(Config::new(u64::MAX, 1514).threshold_bytes, MAX_BYTES);
    }

    #[test]
    fn the_step_is_at_the_threshold() {
        let config = Config { threshold_bytes: 12_000, law: Law::Step };
        let mut marker = Marker::default();
        let mut due = Due::default();
        assert!(!marker.on_ack(&config, Nanos(1), 12_000, ACK, &mut due));
        assert!(marker.on_ack(&config, Nanos(2), 12_001, ACK, &mut due));
    }

    #[test]
    fn a_long_queue_raises_the_probability_and_an_empty_one_takes_it_back() {
        let config = Config { threshold_bytes: 12_000, law: Law::Pi };
        let (mut marker, mut due) = (Marker::default(), Due::default());
        let mut now = Nanos(1);
        let mut marks = 0;
        for _ in 0..2000 {
            now.0 += PERIOD.0;
            marks += u32::from(marker.on_ack(&config, now, 24_000, ACK, &mut due));
        }
        assert_eq!(marker.probability, ONE);
        assert!(marks > 1500, "{marks}");
        for _ in 0..2000 {
            now.0 += PERIOD.0;
            marker.on_ack(&config, now, 0, ACK, &mut due);
        }
        assert_eq!(marker.probability, 0);
    }

    proptest! {
        /// Marks come at the probability, evenly, whatever the flow.
        #[test]
        fn marks_are_spread(p in 0u64..=ONE, scalable: bool) {
            let config = Config { threshold_bytes: 12_000, law: Law::Pi };
            let mut marker = Marker { updated: Nanos(1), probability: p, before_bytes: 12_000 };
            let mut due = Due::default();
            let ack = Ack { segments: 1, scalable };
            let marks: u64 =
                (0..1000).map(|_| u64::from(marker.on_ack(&config, Nanos(2), 12_000, ack, &mut due))).sum();
            let part = if scalable { (2 * p).min(ONE) } else { p * p / ONE };
            prop_assert!((part * 1000 / ONE).abs_diff(marks) <= 1);
        }

        /// Nothing that can be measured leaves its bounds.
        #[test]
        fn anything_goes(
            threshold in 0..=MAX_BYTES,
            steps in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u32>(), any::<bool>()), 1..50),
        ) {
            let config = Config { threshold_bytes: threshold, law: Law::Pi };
            let (mut marker, mut due) = (Marker::default(), Due::default());
            for (now, backlog, segments, scalable) in steps {
                marker.on_ack(&config, Nanos(now), backlog, Ack { segments, scalable }, &mut due);
                prop_assert!(marker.probability <= ONE && u64::from(due.0) <= ONE);
            }
        }
    }
}
