//! A sample of a limiter's flows, of constant size: who is large, and how many flows of that size there are.
//!
//! Sample and hold (Estan, Varghese, SIGCOMM 2002), as Cloud Control needs it: [`SAMPLE`] byte counters
//! whatever the number of flows. A packet of a flow outside the sample takes a free slot, or with a
//! probability that of the smallest flow: `bytes / (bytes of the smallest + bytes)`, so large flows get in
//! and stay in. Slots whose flow is idle or small at the end of an interval are freed.
//!
//! Two readings. The published one is the largest rate. It is the largest of several noisy numbers, so a
//! limiter with seven equal flows reads higher than one with three and asks for less than its part.
//! [`FlowSample::typical_bit_s`] is the mean of rates weighted by their square,
//!
//! ```text
//!   typical = sum r^3 / sum r^2
//! ```
//!
//! which is near the large flows' rate where sizes differ, and near the mean where they do not.

use super::average::Average;
use crate::units::{NANOS_PER_SEC, Nanos};

/// How many flows are followed.
pub const SAMPLE: usize = 64;
/// A flow below this part of the largest is discarded when the sample is full.
const SMALL: f64 = 0.01;
/// A flow without a packet for so long is discarded.
const IDLE: Nanos = Nanos(3_000_000_000);

#[derive(Debug, Clone, Copy)]
struct Slot {
    flow: u64,
    bytes: u64,
    seen: Nanos,
    rate: Average,
}

/// A sample of flows. See the [module](self). A packet costs a scan of at most [`SAMPLE`] slots.
#[derive(Debug, Clone)]
pub struct FlowSample {
    tau: Nanos,
    since: Nanos,
    slots: [Option<Slot>; SAMPLE],
}

impl FlowSample {
    /// An empty sample, rates averaged over `tau`. A flow that is new counts as having been there for the
    /// whole interval: its rate is rather too low than far too high.
    #[must_use]
    pub fn new(now: Nanos, tau: Nanos) -> Self {
        Self { tau, since: now, slots: [None; SAMPLE] }
    }

    /// Counts a packet of `flow` (a hash of its addresses and ports). `random` is 32 uniform bits.
    pub fn on_packet(&mut self, now: Nanos, flow: u64, bytes: u32, random: u32) {
        let mut free = None;
        let mut smallest: Option<(usize, u64)> = None;
        for (at, slot) in self.slots.iter_mut().enumerate() {
            match slot {
                Some(slot) if slot.flow == flow => {
                    slot.bytes = slot.bytes.saturating_add(bytes.into());
                    slot.seen = now;
                    return;
                }
                Some(slot) if smallest.is_none_or(|(_, least)| slot.bytes < least) => {
                    smallest = Some((at, slot.bytes));
                }
                None if free.is_none() => free = Some(at),
                _ => {}
            }
        }
        let chosen = free.or_else(|| {
            let (at, least) = smallest?;
            let odds = (u64::from(bytes) << 32) / least.saturating_add(bytes.into()).max(1);
            (u64::from(random) < odds).then_some(at)
        });
        if let Some(at) = chosen {
            let rate = Average::new(self.tau);
            self.slots[at] = Some(Slot { flow, bytes: bytes.into(), seen: now, rate });
        }
    }

    /// Ends an interval: new averages; the idle go, and the small if the sample is full.
    pub fn on_interval(&mut self, now: Nanos) {
        let elapsed = Nanos(now.0.saturating_sub(self.since.0));
        self.since = self.since.max(now);
        for place in &mut self.slots {
            let Some(slot) = place else { continue };
            if elapsed.0 > 0 {
                let bit_s = slot.bytes as f64 * 8.0 * NANOS_PER_SEC as f64 / elapsed.0 as f64;
                slot.rate.add(bit_s, elapsed);
                slot.bytes = 0;
            }
            if now.0.saturating_sub(slot.seen.0) > IDLE.0 {
                *place = None;
            }
        }
        if self.slots.iter().all(Option::is_some) {
            let small = self.max_bit_s() * SMALL;
            for place in &mut self.slots {
                if place.is_some_and(|slot| slot.rate.value() < small) {
                    *place = None;
                }
            }
        }
    }

    fn rates(&self) -> impl Iterator<Item = f64> {
        self.slots.iter().flatten().map(|slot| slot.rate.value())
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
        self.slots.iter().flatten().count()
    }

    /// Whether no flow is followed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
                    sample.on_packet(Nanos(now - 1), flow, 1_250, (random >> 32) as u32);
                }
            }
            sample.on_interval(Nanos(now));
        }
        sample
    }

    #[test]
    fn the_rates_of_few_flows_are_exact() {
        let sample = fed(|flow| 1 + flow, 7, 100);
        assert_eq!(sample.len(), 7);
        assert!((sample.max_bit_s() - 7.0 * 200_000.0).abs() < 1.0);
        let equal = fed(|_| 3, 7, 100);
        assert!((equal.typical_bit_s() - 600_000.0).abs() < 1.0);
    }

    #[test]
    fn large_flows_are_found_among_thousands() {
        let sample = fed(|flow| if flow == 1_234 { 50 } else { 1 }, 3_000, 40);
        assert!((sample.max_bit_s() - 10e6).abs() < 1e5, "{}", sample.max_bit_s());
        assert!(sample.typical_bit_s() > 9e6);
        assert!(sample.len() <= SAMPLE);
    }

    #[test]
    fn small_flows_hardly_move_the_typical_rate() {
        let sample = fed(|flow| if flow == 0 { 50 } else { 1 }, 11, 40);
        assert!(sample.typical_bit_s() > 0.98 * 10e6, "{}", sample.typical_bit_s());
    }

    #[test]
    fn the_idle_are_forgotten() {
        let mut sample = fed(|_| 1, 5, 10);
        sample.on_interval(Nanos(4_000_000_000));
        assert!(sample.is_empty());
    }
}
