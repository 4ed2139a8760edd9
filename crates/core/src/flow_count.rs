//! Counts the flows of a limit that take all they get, from what is acknowledged to each of them.
//!
//! A group divides its limit by flows. A flow that wants little must not count like one that is held back. So
//! each counts by its part of the limit, over a period:
//!
//! ```text
//!   part  = bytes acknowledged to it since it was last counted / what the limit lets through meanwhile
//!   flows = sum part * sum part^2 / sum part^3
//! ```
//!
//! The count is the sum of their rates divided by the rate of a typical large flow
//! ([`fleet::flows`](crate::fleet::flows)), without a table: n equal flows count as n, whatever their rate
//! is, and small flows beside them count by their rates. A flow is counted with its first acknowledgement in
//! a period, so a period lasts until all have one.
//!
//! O(1) an acknowledgement; 88 bytes a limit, 16 a flow. The kernel's copy is `bpf/acks/flow_count.h`.

use crate::{
    spring::{Config, MAX_BYTES, MAX_FLOWS},
    units::Nanos,
};

/// The bytes that the limit passes in a time.
pub const ONE: u64 = 1 << 16;
/// Upper bound of a flow's part: a whole queue may be acknowledged at once.
pub const MOST: u64 = 2 * ONE;
/// The least length of a period, and the largest.
pub const MIN_PERIOD: Nanos = Nanos(100_000_000);
/// See [`MIN_PERIOD`].
pub const MAX_PERIOD: Nanos = Nanos(1_000_000_000);
/// Two full frames: the most that a receiver acknowledges at once.
pub const ROUND_BYTES: u64 = 2 * 1514;

/// The flows of a period.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Sums {
    /// Sum of their parts in [`ONE`].
    pub parts: u64,
    /// Sum of the squares of these.
    pub squares: u64,
    /// Sum of their cubes.
    pub cubes: u64,
    /// How many were counted.
    pub flows: u64,
}

impl Sums {
    /// How many flows take all they get; `None` if nothing was acknowledged to any.
    #[must_use]
    pub fn flows(&self) -> Option<f64> {
        (self.cubes > 0).then(|| self.parts as f64 * self.squares as f64 / self.cubes as f64)
    }
}

/// The count of a limit.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct FlowCount {
    /// When this period began.
    pub start: Nanos,
    /// How long it lasts.
    pub period: Nanos,
    /// Counts of this period so far.
    pub sums: Sums,
    /// Counts of the one before.
    pub before: Sums,
    /// Number of this period.
    pub number: u32,
}

/// When a flow was last counted.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// The time.
    pub at: Nanos,
    /// How far it was acknowledged then.
    pub acked: u32,
    /// The number of the period plus one; 0: never.
    pub number: u32,
}

/// The part of a flow to which this many bytes were acknowledged in this time.
#[must_use]
pub fn part(config: &Config, bytes: u32, elapsed: Nanos) -> u64 {
    let all = config.bytes(elapsed).max(1);
    ((u64::from(bytes).min(MAX_BYTES) << 16) / all).min(MOST)
}

/// How long a period must be to see this many flows in it.
#[must_use]
pub fn period(config: &Config, flows: u64) -> Nanos {
    let round = 2 * config.time(flows.min(u64::from(MAX_FLOWS)) * ROUND_BYTES).0;
    Nanos(round).clamp(MIN_PERIOD, MAX_PERIOD)
}

impl FlowCount {
    /// Everything before `ack` of a flow has arrived.
    pub fn count(&mut self, config: &Config, mark: &mut Mark, ack: u32, now: Nanos) {
        if now.0.saturating_sub(self.start.0) >= self.period.0 {
            self.start = now;
            self.before = core::mem::take(&mut self.sums);
            self.period = period(config, self.before.flows);
            self.number = self.number.wrapping_add(1);
        }
        let number = self.number.wrapping_add(1);
        if mark.number == number {
            return;
        }
        let bytes = ack.wrapping_sub(mark.acked);
        if mark.number != 0 && bytes as i32 > 0 {
            let part = part(config, bytes, Nanos(now.0.saturating_sub(mark.at.0)));
            self.sums.parts = self.sums.parts.wrapping_add(part);
            self.sums.squares = self.sums.squares.wrapping_add(part * part);
            self.sums.cubes = self.sums.cubes.wrapping_add(part * part * part);
            self.sums.flows += 1;
        }
        *mark = Mark { at: now, acked: ack, number };
    }
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use super::*;

    /// The count of flows with these rates in bit/s, at a limit of 10 Mbit/s, with an ACK for two segments.
    fn counted(rates: &[u64]) -> f64 {
        let config = Config::new(1_250_000, 1514);
        let mut flow_count = FlowCount::default();
        let mut marks = vec![Mark::default(); rates.len()];
        let gaps: Vec<u64> = rates.iter().map(|rate| 2920 * 8 * 1_000_000_000 / rate).collect();
        let mut due: Vec<(u64, u32)> = gaps.iter().map(|gap| (gap / 2, 0)).collect();
        while let Some((i, &(at, ack))) =
            due.iter().enumerate().min_by_key(|(_, d)| d.0).filter(|(_, d)| d.0 < 5_000_000_000)
        {
            flow_count.count(&config, &mut marks[i], ack, Nanos(at));
            due[i] = (at + gaps[i], ack.wrapping_add(2920));
        }
        flow_count.before.flows().unwrap_or(0.0)
    }

    #[test]
    fn equal_flows_are_as_many_as_they_are() {
        for flows in [1u64, 2, 7, 50, 200] {
            let rates = vec![10_000_000 / flows; flows as usize];
            let got = counted(&rates);
            assert!((got / flows as f64 - 1.0).abs() < 0.05, "{flows}: {got}");
        }
    }

    #[test]
    fn small_flows_count_for_what_they_have() {
        let mut rates = vec![3_000_000; 3];
        rates.extend([50_000; 20]);
        let got = counted(&rates);
        assert!((3.0..3.5).contains(&got), "{got}");
    }

    #[test]
    fn who_is_silent_is_not_counted() {
        let config = Config::new(1_250_000, 1514);
        let (mut flow_count, mut mark) = (FlowCount::default(), Mark::default());
        flow_count.count(&config, &mut mark, 1, Nanos(1_000_000_000));
        flow_count.count(&config, &mut mark, 1, Nanos(3_000_000_000));
        flow_count.count(&config, &mut mark, 1, Nanos(5_000_000_000));
        assert_eq!(flow_count.before.flows(), None);
    }
}
