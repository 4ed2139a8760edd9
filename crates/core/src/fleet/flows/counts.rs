//! Byte counters of some flows, in fixed memory and a few cells a packet: the counts of the packet path in an
//! interval.
//!
//! There are [`SETS`] sets of [`WAYS`] cells; a flow's hash chooses its set, so that a packet reads four
//! cells whatever the number of flows. Each set is sample and hold: a packet of a flow without a cell takes a
//! free one, or with a probability that of the smallest flow,
//!
//! ```text
//!   odds = bytes / (bytes of the smallest + bytes)
//! ```
//!
//! so a flow that sends much gets in soon and stays in. A flow is counted from the packet with which it got
//! in: it may have sent more, never less. In the kernel each CPU has its own counters, without a lock; the
//! bytes of a flow are the sum over them.
//!
//! The eBPF side is `bpf/common/sample.h`; a property test compares the two, bit by bit.

/// Sets of cells; a power of two.
pub const SETS: usize = 64;
/// Cells of a set.
pub const WAYS: usize = 4;

/// The set is in the upper bits, which a multiplication mixes best.
const SET_SHIFT: u32 = u64::BITS - SETS.trailing_zeros();
/// 2^64 divided by the golden ratio, odd.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// The bytes of a flow in an interval.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct FlowBytes {
    /// A hash of its addresses and ports; 0 is no flow.
    pub flow: u64,
    /// Bytes on the wire.
    pub bytes: u64,
}

/// The hash of a flow's addresses and ports, cut into words; never 0.
#[must_use]
pub fn flow_hash(seed: u64, words: &[u64]) -> u64 {
    let hash = words.iter().fold(seed, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(MIX);
        hash ^ hash >> 32
    });
    hash.max(1)
}

/// Counters of up to [`SETS`] times [`WAYS`] flows: sample and hold in each set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowCounts {
    sets: [[FlowBytes; WAYS]; SETS],
}

impl Default for FlowCounts {
    fn default() -> Self {
        Self::new()
    }
}

impl FlowCounts {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { sets: [[FlowBytes { flow: 0, bytes: 0 }; WAYS]; SETS] }
    }

    /// Counts a packet of `flow`, a [`flow_hash`]. `random` is 32 uniform bits.
    pub fn on_packet(&mut self, flow: u64, bytes: u32, random: u32) {
        let set = &mut self.sets[(flow >> SET_SHIFT) as usize];
        let held = set.iter_mut().find(|cell| cell.flow == flow || cell.flow == 0);
        if let Some(cell) = held {
            *cell = FlowBytes { flow, bytes: cell.bytes.saturating_add(bytes.into()) };
            return;
        }
        let Some(least) = set.iter_mut().min_by_key(|cell| cell.bytes) else { return };
        // More than 4 GiB in the cell counts as 4 GiB: the products fit.
        let all = least.bytes.min((u32::MAX - bytes).into()) + u64::from(bytes);
        if u64::from(random) * all < u64::from(bytes) << 32 {
            *least = FlowBytes { flow, bytes: bytes.into() };
        }
    }

    /// The flows that have a cell.
    pub fn iter(&self) -> impl Iterator<Item = FlowBytes> {
        self.sets.iter().flatten().copied().filter(|cell| cell.flow != 0)
    }

    /// Forgets all, for the next interval.
    pub fn clear(&mut self) {
        *self = Self::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn few_flows_are_counted_to_the_byte() {
        let mut counts = FlowCounts::new();
        for packet in 0..1_000u64 {
            counts.on_packet(flow_hash(7, &[packet % 10]), packet as u32, u32::MAX);
        }
        let mut sums = BTreeMap::new();
        (0..1_000u64).for_each(|p| *sums.entry(flow_hash(7, &[p % 10])).or_insert(0) += p);
        let found: BTreeMap<_, _> = counts.iter().map(|cell| (cell.flow, cell.bytes)).collect();
        assert_eq!(found, sums);
        counts.clear();
        assert_eq!(counts.iter().count(), 0);
    }

    #[test]
    fn the_smallest_goes_at_the_odds() {
        // All in one set: the upper bits are the same.
        let mut full = FlowCounts::new();
        for flow in 1..=WAYS as u64 {
            full.on_packet(flow, 300 * flow as u32, 0);
        }
        let with = |random| {
            let mut counts = full.clone();
            counts.on_packet(99, 100, random);
            counts.iter().any(|cell| cell == FlowBytes { flow: 99, bytes: 100 })
        };
        // 100 / (300 + 100)
        assert!(with(u32::MAX / 4 - 9) && !with(u32::MAX / 4 + 9));
        assert_eq!(full.iter().count(), WAYS);
    }

    #[test]
    fn hashes_spread_over_the_sets() {
        let mut sets = [0u32; SETS];
        for flow in 0..64 * SETS as u64 {
            sets[(flow_hash(1, &[flow]) >> SET_SHIFT) as usize] += 1;
        }
        assert!(sets.iter().all(|n| (16..160).contains(n)), "{sets:?}");
        assert_ne!(flow_hash(MIX, &[MIX]), 0);
    }
}
