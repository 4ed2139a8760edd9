//! CoDel: early drops for senders that react only to losses (RFC 8289).
//!
//! A queue that is short now and then is good; a standing queue is only delay. The two differ in the least
//! wait of a packet over an interval in which its sender could have reacted:
//!
//! ```text
//! ok = the packet waited at least `target`, and more than one frame waits behind it
//! not dropping:  ok for a whole `interval` without a break          drop, begin to drop
//! dropping:      not ok                                             stop
//!                now >= next                                        drop, count += 1
//!                next = next + interval / sqrt(count)
//! ```
//!
//! A TCP sender's rate is inverse to the root of its loss rate (Mathis et al., 1997). So drops whose
//! frequency grows as the root of their number slow it down evenly. If drops begin again soon after, the
//! number goes on from what was enough the last time.
//!
//! One state a flow, 40 bytes; O(1) a packet, and a square root a drop.

use crate::units::{Bytes, Nanos, Rate};

/// The smallest default of `target`.
pub const TARGET_MIN: Nanos = Nanos(1_000_000);
/// The default `interval` at the smallest target: twenty targets, as RFC 8289 has 5 ms and 100 ms.
pub const INTERVAL_MIN: Nanos = Nanos(20_000_000);
/// The default target is at least the time of this many frames: a sender has no smaller window than two.
const TARGET_FRAMES: u64 = 2;
/// This many intervals after the last drop the number of drops is forgotten.
const MEMORY_INTERVALS: u64 = 16;

/// The parameters of CoDel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodelOptions {
    /// The wait that a standing queue may have.
    pub target: Nanos,
    /// How long a sender may take to react: its round trip at worst.
    pub interval: Nanos,
    /// A frame of the largest size, in bytes: a packet with no more than this behind it is never dropped.
    pub frame_bytes: u32,
}

impl CodelOptions {
    /// Defaults for a queue that is emptied at `rate`: a target of 1 ms, but not below the time of two
    /// frames; an interval of 20 ms, longer by as much as the target is.
    #[must_use]
    pub fn for_rate(rate: Rate, frame_bytes: u32) -> Self {
        let frames = rate.time_for(Bytes(TARGET_FRAMES * u64::from(frame_bytes)));
        let target = TARGET_MIN.max(frames);
        let interval = Nanos(INTERVAL_MIN.0.saturating_add(target.0 - TARGET_MIN.0));
        Self { target, interval, frame_bytes }
    }
}

/// The state of one queue.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Codel {
    /// When a whole interval above the target will be over; none while below it.
    above_until: Option<Nanos>,
    next: Nanos,
    count: u32,
    count_before: u32,
    dropping: bool,
}

impl Codel {
    /// Whether to drop the packet at the head of the queue, which waited for `waited` and has `behind_bytes`
    /// behind it. Call it once for each packet taken from the queue; after a drop again for the next one, at
    /// the same `now`.
    #[inline]
    pub fn drops(
        &mut self,
        now: Nanos,
        waited: Nanos,
        behind_bytes: u64,
        options: &CodelOptions,
    ) -> bool {
        if waited < options.target || behind_bytes <= u64::from(options.frame_bytes) {
            self.above_until = None;
            self.dropping = false;
            return false;
        }
        let Some(above_until) = self.above_until else {
            self.above_until = Some(Nanos(now.0.saturating_add(options.interval.0)));
            return false;
        };
        if self.dropping {
            if now < self.next {
                return false;
            }
            self.count = self.count.saturating_add(1);
            self.next = self.after(self.next, options);
            return true;
        }
        if now < above_until {
            return false;
        }
        self.dropping = true;
        let since = self.count.saturating_sub(self.count_before);
        let recent = now.0.saturating_sub(self.next.0) < MEMORY_INTERVALS * options.interval.0;
        self.count = if recent && since > 1 { since } else { 1 };
        self.count_before = self.count;
        self.next = self.after(now, options);
        true
    }

    /// The control law.
    fn after(&self, time: Nanos, options: &CodelOptions) -> Nanos {
        let interval = u128::from(options.interval.0);
        let gap = (interval * interval / u128::from(self.count.max(1))).isqrt();
        // Never longer than the interval.
        Nanos(time.0.saturating_add(gap as u64))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::collections::VecDeque;

    use super::*;

    const MS: u64 = 1_000_000;
    const FRAME: u32 = 1_514;

    fn rate(bit_s: u64) -> Rate {
        Rate::from_bit_s(bit_s).unwrap()
    }

    fn options() -> CodelOptions {
        CodelOptions::for_rate(rate(100_000_000), FRAME)
    }

    #[test]
    fn defaults_follow_the_rate() {
        assert_eq!((options().target, options().interval), (TARGET_MIN, INTERVAL_MIN));
        let slow = CodelOptions::for_rate(rate(1_000_000), FRAME);
        assert_eq!((slow.target, slow.interval), (Nanos(24_224_000), Nanos(43_224_000)));
    }

    /// The times of RFC 8289's law: after one interval, then at interval / sqrt(n).
    #[test]
    fn a_standing_queue_loses_by_the_law() {
        let (mut codel, options) = (Codel::default(), options());
        let drops: std::vec::Vec<u64> = (0..10_000u64)
            .map(|n| n * MS / 100)
            .filter(|&now| codel.drops(Nanos(now), Nanos(2 * MS), 100_000, &options))
            .map(|now| now / 10_000)
            .collect();
        let mut wanted = std::vec![2_000.0f64];
        while wanted.len() < drops.len() {
            wanted.push(wanted[wanted.len() - 1] + 2_000.0 / (wanted.len() as f64).sqrt());
        }
        assert!(drops.len() == 7, "{drops:?}");
        for (got, want) in drops.iter().zip(&wanted) {
            assert!((*got as f64 - want).abs() <= 2.0, "{drops:?} {wanted:?}");
        }
    }

    #[test]
    fn a_break_below_the_target_starts_the_interval_anew() {
        let (mut codel, options) = (Codel::default(), options());
        for n in 0..1_000u64 {
            let waited = if n % 19 == 0 { 0 } else { 50 * MS };
            assert!(!codel.drops(Nanos(n * MS), Nanos(waited), 100_000, &options));
        }
        for n in 1_000..2_000u64 {
            let last = u64::from(FRAME);
            assert!(!codel.drops(Nanos(n * MS), Nanos(50 * MS), last, &options), "the last frame");
        }
    }

    /// A sender that halves on a loss and grows by a frame a round trip: its queue must not stand.
    #[test]
    fn an_adaptive_sender_ends_near_the_target() {
        let (mut codel, options) = (Codel::default(), options());
        let frame_ns = rate(100_000_000).time_for(Bytes(FRAME.into())).0;
        let (mut queue, mut window, mut in_flight) = (VecDeque::new(), 400.0f64, 0u32);
        let (mut last_cut, mut worst_late) = (0, 0);
        for n in 0..200_000u64 {
            let now = n * frame_ns;
            // A frame leaves, one comes in for it, and more if the window has grown.
            while f64::from(in_flight) < window {
                queue.push_back(now);
                in_flight += 1;
            }
            while let Some(arrived) = queue.pop_front() {
                let waited = now - arrived;
                let behind = queue.len() as u64 * u64::from(FRAME);
                in_flight -= 1;
                if codel.drops(Nanos(now), Nanos(waited), behind, &options) {
                    if now - last_cut > waited {
                        window = (window / 2.0).max(2.0);
                        last_cut = now;
                    }
                    continue;
                }
                window += 1.0 / window;
                if n > 100_000 {
                    worst_late = worst_late.max(waited);
                }
                break;
            }
        }
        assert!(worst_late < 8 * MS, "{worst_late} ns");
    }

    proptest! {
        /// Whatever the input, in whatever order: no panic, and no drop of a packet that waits less than the
        /// target.
        #[test]
        fn takes_anything(
            steps in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 1..200),
            target in any::<u64>(),
            interval in any::<u64>(),
        ) {
            let options =
                CodelOptions { target: Nanos(target), interval: Nanos(interval >> 8), frame_bytes: FRAME };
            let mut codel = Codel::default();
            for (now, waited, behind) in steps {
                let dropped = codel.drops(Nanos(now), Nanos(waited), behind, &options);
                prop_assert!(!dropped || (waited >= target && behind > u64::from(FRAME)));
            }
        }

        /// In time t at most 1 + (t / interval)^2 drops: the law's sum, whatever the queue does.
        #[test]
        fn drops_no_faster_than_its_law(
            waits in prop::collection::vec((0u64..2 * MS, 0u64..3 * MS), 1..2_000),
        ) {
            let (mut codel, options) = (Codel::default(), options());
            let (mut now, mut dropped) = (0, 0u64);
            for (gap, waited) in waits {
                now += gap;
                dropped += u64::from(codel.drops(Nanos(now), Nanos(waited), 1 << 20, &options));
            }
            let intervals = now / options.interval.0 + 1;
            prop_assert!(dropped <= 1 + intervals * intervals, "{dropped} in {intervals} intervals");
        }
    }
}
