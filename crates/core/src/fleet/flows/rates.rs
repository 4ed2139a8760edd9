//! The rates of the largest flows, from the counts of each interval.

use alloc::vec::Vec;

use super::FlowBytes;
use crate::{
    fleet::average::Average,
    units::{NANOS_PER_SEC, Nanos},
};

/// How many flows are followed.
pub const SAMPLE: usize = 64;
/// A flow without a packet for this long is removed.
const IDLE: Nanos = Nanos(3_000_000_000);

#[derive(Debug, Clone, Copy)]
struct Followed {
    flow: u64,
    seen: Nanos,
    rate: Average,
}

/// The rates of up to [`SAMPLE`] flows, averaged over time.
///
/// A new flow counts as present for the whole interval: its rate is rather too low than far too high. If all
/// slots are taken it takes that of the slowest, if it was faster in the interval. O(n log n) an interval of
/// n flows; nothing a packet.
#[derive(Debug, Clone)]
pub struct FlowRates {
    tau: Nanos,
    since: Nanos,
    flows: Vec<Followed>,
}

impl FlowRates {
    /// No flows, rates averaged over `tau`.
    #[must_use]
    pub fn new(now: Nanos, tau: Nanos) -> Self {
        Self { tau, since: now, flows: Vec::with_capacity(SAMPLE) }
    }

    /// Ends an interval in which these flows were counted. Counts of a flow from several CPUs are added up. A
    /// clock that stands still or steps back ends none: the counts are then lost, and no rate changes.
    pub fn on_interval(&mut self, now: Nanos, counted: impl IntoIterator<Item = FlowBytes>) {
        let elapsed = Nanos(now.0.saturating_sub(self.since.0));
        if elapsed.0 == 0 {
            return;
        }
        self.since = now;
        let mut counted: Vec<_> = counted.into_iter().collect();
        merge(&mut counted);
        let bit_s = |bytes: u64| bytes as f64 * 8.0 * NANOS_PER_SEC as f64 / elapsed.0 as f64;
        for followed in &mut self.flows {
            let found = counted.binary_search_by_key(&followed.flow, |count| count.flow);
            // Flows added here are not new.
            let bytes = found.map_or(0, |at| core::mem::take(&mut counted[at].bytes));
            followed.rate.add(bit_s(bytes), elapsed);
            if bytes > 0 {
                followed.seen = now;
            }
        }
        self.flows.retain(|followed| now.0.saturating_sub(followed.seen.0) <= IDLE.0);
        counted.retain(|count| count.bytes > 0);
        counted.sort_unstable_by_key(|count| core::cmp::Reverse((count.bytes, count.flow)));
        let slower = |a: &Followed, b: &Followed| b.rate.value().total_cmp(&a.rate.value());
        self.flows.sort_by(slower);
        for count in counted {
            if self.flows.len() == SAMPLE {
                let slowest = self.flows.last().map_or(0.0, |followed| followed.rate.value());
                if bit_s(count.bytes) <= slowest {
                    break;
                }
                self.flows.pop();
            }
            let mut rate = Average::new(self.tau);
            rate.add(bit_s(count.bytes), elapsed);
            let new = Followed { flow: count.flow, seen: now, rate };
            let at = self.flows.partition_point(|other| slower(other, &new).is_le());
            self.flows.insert(at, new);
        }
    }

    fn rates(&self) -> impl Iterator<Item = f64> {
        self.flows.iter().map(|followed| followed.rate.value())
    }

    /// The largest rate in bit/s; 0 without flows.
    #[must_use]
    pub fn max_bit_s(&self) -> f64 {
        self.rates().fold(0.0, f64::max)
    }

    /// The rate in bit/s of a flow that takes all it gets; 0 without flows.
    #[must_use]
    pub fn typical_bit_s(&self) -> f64 {
        let squares: f64 = self.rates().map(|rate| rate * rate).sum();
        let cubes: f64 = self.rates().map(|rate| rate * rate * rate).sum();
        if squares > 0.0 { cubes / squares } else { 0.0 }
    }

    /// How many flows are followed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Whether no flow is followed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }
}

/// Sorts by flow, and adds up those that come more than once.
pub fn merge(counted: &mut Vec<FlowBytes>) {
    counted.sort_unstable_by_key(|count| count.flow);
    counted.dedup_by(|again, kept| {
        let same = again.flow == kept.flow;
        if same {
            kept.bytes = kept.bytes.saturating_add(again.bytes);
        }
        same
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAU: Nanos = Nanos(100_000_000);

    fn counted(flows: &[(u64, u64)]) -> Vec<FlowBytes> {
        flows.iter().map(|&(flow, bytes)| FlowBytes { flow, bytes }).collect()
    }

    #[test]
    fn what_two_cpus_counted_is_one_flow() {
        let mut rates = FlowRates::new(Nanos(0), TAU);
        rates.on_interval(Nanos(NANOS_PER_SEC), counted(&[(1, 1000), (2, 500), (1, 250)]));
        assert_eq!(rates.len(), 2);
        assert!((rates.max_bit_s() - 10_000.0).abs() < 1e-6);
    }

    #[test]
    fn a_faster_flow_takes_the_place_of_the_slowest() {
        let mut rates = FlowRates::new(Nanos(0), TAU);
        let flows: Vec<_> = (1..=SAMPLE as u64).map(|flow| (flow, 100 * flow)).collect();
        rates.on_interval(Nanos(NANOS_PER_SEC), counted(&flows));
        let mut next = flows.clone();
        next.extend([(1000, 50), (1001, 5_000)]);
        rates.on_interval(Nanos(2 * NANOS_PER_SEC), counted(&next));
        assert_eq!(rates.len(), SAMPLE);
        let has = |rates: &FlowRates, flow| rates.flows.iter().any(|f| f.flow == flow);
        assert!(has(&rates, 1001) && !has(&rates, 1000) && !has(&rates, 1) && has(&rates, 2));
    }

    #[test]
    fn a_clock_that_stands_changes_nothing() {
        let mut rates = FlowRates::new(Nanos(5), TAU);
        rates.on_interval(Nanos(5), counted(&[(1, 1000)]));
        rates.on_interval(Nanos(4), counted(&[(1, 1000)]));
        assert!(rates.is_empty());
    }
}
