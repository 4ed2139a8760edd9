//! What a NIC counts, and how other threads read it while the data path runs on.
//!
//! Each thread counts for itself, in plain memory, and now and then stores the counts in a block that only it
//! writes. Readers add the blocks up. No lock, no atomic addition.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::Nanos;

crate::counters::counter_table! {
    /// What a NIC did since it was made: of one shaper, one producer, or all together. Names in `_max` are
    /// the largest of all, the others the sum.
    NicCounters, NicCounter:
    submitted_packets: "packets that producers handed to a shaper",
    blocked_allowance: "times that a flow had to wait because it had its allowance in the shaper",
    blocked_ring: "times that a flow had to wait because the ring to its shaper was full",
    refused_flows: "flows that could not be opened: all that a producer may have are open",
    taken_packets: "packets that shapers took",
    taken_bytes: "their bytes on the wire",
    sent_packets: "packets that ports took",
    sent_bytes: "their bytes on the wire",
    lost_packets: "packets lost with their port, or due while there was none; their senders were notified",
    drop_full: "packets dropped because the shaper was full (immediate completion only)",
    drop_beyond: "packets dropped because their time was beyond the horizon of a wheel that refuses such",
    drop_closed: "packets dropped because their flow could not be opened in the shaper",
    held_packets: "packets in the shapers now",
    held_packets_max: "the most packets that a shaper has held",
    full_waits: "times that a shaper left packets in a ring because it was full (deferred completion)",
    horizon_clamped: "packets whose time was beyond the horizon, and that left at its end",
    past_stamps: "packets that were due when they came, or that went on where their late flow was",
    clock_steps: "times that the clock stood before an earlier reading",
    on_time_packets: "packets sent within two slots of their time: the rounding to a slot, and one",
    lateness_ns_sum: "time between when packets might leave and when their port had them, in nanoseconds",
    lateness_ns_max: "the longest such time of a packet, in nanoseconds",
    batches: "batches handed to ports",
    batch_splits: "batches that ended because the next packet was of a flow that had one in it",
    port_full: "times that a port did not take a whole batch",
    port_errors: "times that a port failed but is still there; the packet at its front was lost",
    ports_gone: "ports that went away",
    received_packets: "packets that came in from ports",
    receive_waits: "times that arrivals stayed in the port because their receiver had no room",
    open_flows: "flows that are open now, or closed with packets still to leave",
    opened_flows: "flows that were opened",
    turns: "rounds of the shapers' loops",
    polls: "rounds in which a shaper had nothing to do and asked again at once",
    sleeps: "times that a shaper slept",
    slept_ns: "time that shapers slept, in nanoseconds",
    wakeups: "sleeps that a producer ended",
    wake_lateness_ns_max: "the latest wake-up of a sleeping shaper for a packet, in nanoseconds",
    wait_errors: "times that a shaper could not sleep because the kernel refused",
}

impl NicCounters {
    /// Takes in those of another thread.
    pub fn add(&mut self, other: &NicCounters) {
        let (mut ours, theirs) = (self.values(), other.values());
        for ((ours, theirs), counter) in ours.iter_mut().zip(theirs).zip(Self::TABLE) {
            let largest = counter.name.ends_with("_max");
            *ours = if largest { (*ours).max(theirs) } else { ours.saturating_add(theirs) };
        }
        *self = Self::from_values(ours);
    }
}

/// The counters of one thread, as others see them. Cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Block([AtomicU64; NicCounters::TABLE.len()]);

impl Block {
    pub(crate) fn new() -> Self {
        Self([const { AtomicU64::new(0) }; NicCounters::TABLE.len()])
    }

    /// By the thread that counts.
    pub(crate) fn store(&self, counters: &NicCounters) {
        for (cell, value) in self.0.iter().zip(counters.values()) {
            cell.store(value, Ordering::Relaxed);
        }
    }

    pub(crate) fn load(&self) -> NicCounters {
        NicCounters::from_values(self.0.each_ref().map(|cell| cell.load(Ordering::Relaxed)))
    }
}

/// Buckets for each doubling: a bucket is an eighth of its octave wide.
const STEPS_BITS: u32 = 3;
/// Times from 2^40 ns, a quarter of an hour, are in the last bucket.
const OCTAVES: u32 = 40;
const BUCKETS: usize = ((OCTAVES - STEPS_BITS + 1) << STEPS_BITS) as usize;

/// How late packets left: a histogram with buckets of at most an eighth of their value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lateness {
    counts: Vec<u64>,
}

impl Lateness {
    /// Of no packets.
    pub(crate) fn none() -> Self {
        Self { counts: vec![0; BUCKETS] }
    }

    /// How many packets.
    #[must_use]
    pub fn packets(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The part of the packets that left at most so late, 0 to 1; a bucket that `limit` cuts counts not at
    /// all. 1 of no packets.
    #[must_use]
    pub fn share_within(&self, limit: Nanos) -> f64 {
        let packets = self.packets();
        if packets == 0 {
            return 1.0;
        }
        let within = (0..BUCKETS).take_while(|bucket| last_of(*bucket) <= limit.0);
        within.map(|bucket| self.counts[bucket]).sum::<u64>() as f64 / packets as f64
    }

    /// The time within which a part of the packets left, 0 to 1: an upper bound, an eighth too high at most.
    #[must_use]
    pub fn quantile(&self, part: f64) -> Nanos {
        let wanted = (self.packets() as f64 * part.clamp(0.0, 1.0)).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted && seen > 0 {
                return Nanos(last_of(bucket));
            }
        }
        Nanos(0)
    }

    /// What was added since an earlier reading.
    #[must_use]
    pub fn since(&self, earlier: &Lateness) -> Lateness {
        let pairs = self.counts.iter().zip(&earlier.counts);
        Lateness { counts: pairs.map(|(now, then)| now.saturating_sub(*then)).collect() }
    }

    /// The buckets that hold something: the longest time in it, and how many packets.
    pub fn buckets(&self) -> impl Iterator<Item = (Nanos, u64)> + '_ {
        let all = self.counts.iter().enumerate();
        all.filter(|(_, count)| **count > 0).map(|(at, count)| (Nanos(last_of(at)), *count))
    }
}

/// A [`Lateness`] that one thread writes and all may read.
#[derive(Debug)]
pub(crate) struct LatenessCells(Box<[AtomicU64]>);

impl LatenessCells {
    pub(crate) fn new() -> Self {
        Self((0..BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }

    /// By the one thread.
    #[inline]
    pub(crate) fn record(&self, late: Nanos) {
        let cell = &self.0[bucket_of(late.0)];
        cell.store(cell.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(crate) fn add_to(&self, lateness: &mut Lateness) {
        for (count, cell) in lateness.counts.iter_mut().zip(&*self.0) {
            *count += cell.load(Ordering::Relaxed);
        }
    }
}

/// Exact up to 2^STEPS_BITS, then octaves in equal steps.
#[inline]
fn bucket_of(ns: u64) -> usize {
    let ns = ns.min((1 << OCTAVES) - 1);
    let octave = (ns | 1).ilog2().saturating_sub(STEPS_BITS);
    // The leading one of the value counts the octave on.
    (octave << STEPS_BITS) as usize + (ns >> octave) as usize
}

/// The longest time in a bucket, in nanoseconds.
fn last_of(bucket: usize) -> u64 {
    let octave = (bucket >> STEPS_BITS).saturating_sub(1);
    let step = bucket - (octave << STEPS_BITS);
    ((step as u64 + 1) << octave) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn largest_values_stay_and_others_add_up() {
        let one = NicCounters { sent_packets: 3, lateness_ns_max: 9, ..NicCounters::default() };
        let mut all = NicCounters { sent_packets: 2, lateness_ns_max: 4, ..NicCounters::default() };
        all.add(&one);
        assert_eq!((all.sent_packets, all.lateness_ns_max), (5, 9));
        let block = Block::new();
        block.store(&all);
        assert_eq!(block.load(), all);
    }

    #[test]
    fn shares_and_quantiles() {
        let cells = LatenessCells::new();
        (1..=100).for_each(|n| cells.record(Nanos(n * 1_000)));
        let mut lateness = Lateness::none();
        cells.add_to(&mut lateness);
        assert_eq!(lateness.packets(), 100);
        let half = lateness.quantile(0.5).0;
        assert!((50_000..=56_250).contains(&half), "{half}");
        assert!((0.4..=0.5).contains(&lateness.share_within(Nanos(50_000))));
        assert_eq!(lateness.since(&lateness).packets(), 0);
        assert_eq!(Lateness::none().share_within(Nanos(0)), 1.0);
    }

    proptest! {
        #[test]
        fn each_time_is_in_the_bucket_that_ends_at_or_after_it(ns in 0u64..1 << OCTAVES) {
            let bucket = bucket_of(ns);
            prop_assert!(bucket < BUCKETS);
            let last = last_of(bucket);
            prop_assert!(last >= ns && last - ns <= ns / 8, "{ns} in {bucket}, to {last}");
            prop_assert!(bucket == 0 || last_of(bucket - 1) < ns);
        }
    }
}
