//! FPS, flow proportional share: each limiter has a part of the limit as large as its part of the flows
//! (Cloud Control, SIGCOMM 2007).
//!
//! ```text
//!   demand >= local limit:  w = local limit / largest flow rate      flows of that size that would fill it
//!   demand <  local limit:  w = demand * W / (limit - demand)        what makes the local limit the demand
//!   w is averaged by elapsed time
//!   local limit = limit * w / (w + W)                                W: the weights of all others
//! ```
//!
//! Fixed point: a limiter with `a` greedy flows, of `A` in all, and flows that want `B` together, has `U * a
//! / A + B`, where `U` is what no such `B` takes. A limiter that had no demand and gets some counts as having
//! one flow, because it has no rate to derive more from.

use super::average::Average;
use crate::units::{Nanos, Rate};

/// Upper bound of a weight: 2^20 flows.
pub const MAX_WEIGHT: f64 = 1_048_576.0;

/// The parameters of [`Fps`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FpsOptions {
    /// The limit of all limiters together.
    pub limit: Rate,
    /// The time over which weights are averaged. Published: [`super::average::TAU`].
    pub tau: Nanos,
    /// The part of the local limit from which demand counts as limited, 0 to 1. Published: 1. A limiter that
    /// holds packets back instead of dropping them sees arrivals at its own rate and no more: use 0.95 there.
    pub limited_from: f64,
}

/// The measurements of a limiter in an interval, and the reports of the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FpsInput {
    /// The arrival rate in bit/s.
    pub demand_bit_s: f64,
    /// The largest flow's rate in bit/s, or another rate of a typical greedy flow.
    pub flow_bit_s: f64,
    /// The sum of the weights of all others.
    pub remote_weight: f64,
}

/// A limiter of FPS. See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub struct Fps {
    options: FpsOptions,
    average: Average,
    updated: Nanos,
    weight: f64,
    rate_bit_s: f64,
}

impl Fps {
    /// A limiter that starts with `rate_bit_s`, an equal part or nothing.
    #[must_use]
    pub fn new(now: Nanos, options: FpsOptions, rate_bit_s: f64) -> Self {
        let average = Average::new(options.tau);
        Self { options, average, updated: now, weight: 0.0, rate_bit_s }
    }

    /// Ends an interval: the new local limit in bit/s. Report [`Fps::weight`] to the others.
    pub fn on_interval(&mut self, now: Nanos, input: &FpsInput) -> f64 {
        let limit = self.options.limit.bit_s() as f64;
        let FpsInput { demand_bit_s: demand, flow_bit_s, remote_weight } = *input;
        let was_idle = self.weight <= 0.0;
        let wanted = if demand <= 0.0 {
            0.0
        } else if was_idle {
            1.0
        } else if demand >= self.rate_bit_s * self.options.limited_from || demand >= limit {
            self.rate_bit_s / flow_bit_s.max(1.0)
        } else {
            demand * remote_weight / (limit - demand)
        };
        if was_idle {
            self.average.clear();
        }
        let elapsed = Nanos(now.0.saturating_sub(self.updated.0).max(1));
        self.updated = self.updated.max(now);
        self.weight = self.average.add(wanted.clamp(0.0, MAX_WEIGHT), elapsed);
        let all = self.weight + remote_weight;
        self.rate_bit_s = if all > 0.0 { limit * self.weight / all } else { self.rate_bit_s };
        self.rate_bit_s
    }

    /// Changes the limit, from the next interval on: Cloud Control keeps `1/N` of it free for each silent
    /// limiter.
    pub fn set_limit(&mut self, limit: Rate) {
        self.options.limit = limit;
    }

    /// The weight: how many flows that take all they get.
    #[must_use]
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// The local limit in bit/s.
    #[must_use]
    pub fn rate_bit_s(&self) -> f64 {
        self.rate_bit_s
    }
}

#[cfg(test)]
mod tests {
    use super::super::average::TAU;
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    /// Limiters with (greedy flows, demand of the others in bit/s); local limits after a minute.
    fn settled(limit: f64, members: &[(u32, f64)]) -> Vec<f64> {
        let options = FpsOptions {
            limit: Rate::from_bit_s(limit as u64).unwrap(),
            tau: TAU,
            limited_from: 1.0,
        };
        let part = limit / members.len() as f64;
        let mut fleet: Vec<_> = members.iter().map(|_| Fps::new(Nanos(0), options, part)).collect();
        for step in 1..=1_200u64 {
            let weights: Vec<f64> = fleet.iter().map(Fps::weight).collect();
            let all: f64 = weights.iter().sum();
            for (i, (flows, others)) in members.iter().enumerate() {
                let rate = fleet[i].rate_bit_s();
                let greedy = *flows > 0;
                // Greedy flows push a little beyond what they get.
                let demand =
                    if greedy { rate.max(*others) * 1.02 } else { others.min(rate * 1.02) };
                let each = (rate - others).max(1.0) / f64::from((*flows).max(1));
                let input = FpsInput {
                    demand_bit_s: demand,
                    flow_bit_s: if greedy { each } else { others.min(rate) },
                    remote_weight: all - weights[i],
                };
                fleet[i].on_interval(Nanos(step * 50_000_000), &input);
            }
        }
        fleet.iter().map(Fps::rate_bit_s).collect()
    }

    #[test]
    fn splits_as_its_flows() {
        let rates = settled(10e6, &[(3, 0.0), (7, 0.0)]);
        assert!((rates[0] - 3e6).abs() < 1e4 && (rates[1] - 7e6).abs() < 1e4, "{rates:?}");
    }

    #[test]
    fn a_first_flow_counts_as_one() {
        let options =
            FpsOptions { limit: Rate::from_bit_s(1_000).unwrap(), tau: TAU, limited_from: 1.0 };
        let mut fps = Fps::new(Nanos(0), options, 0.0);
        let input = |demand_bit_s| FpsInput { demand_bit_s, flow_bit_s: 0.0, remote_weight: 3.0 };
        assert_eq!(fps.on_interval(Nanos(1), &input(0.0)), 0.0);
        assert_eq!(fps.on_interval(Nanos(50_000_000), &input(1.0)), 250.0);
    }

    proptest! {
        /// The published fixed point: U * a / A + B with greedy flows, B without.
        #[test]
        fn has_the_published_fixed_point(
            members in prop::collection::vec((1u32..9, 0.0f64..0.1), 2..6),
            bounded in 0.0f64..0.8,
        ) {
            let limit = 10e6;
            let parts = members.len() as f64;
            let mut all: Vec<_> = members.iter().map(|(a, b)| (*a, b * limit / parts)).collect();
            // A single flow that wants less than the others get.
            let flows: u32 = all.iter().map(|(a, _)| a).sum();
            let level = 0.8 * limit / f64::from(flows);
            all.push((0, bounded * level));
            let left = limit - all.iter().map(|(_, b)| b).sum::<f64>();
            let rates = settled(limit, &all);
            for ((a, b), rate) in all.iter().zip(rates) {
                let expected = left * f64::from(*a) / f64::from(flows) + b;
                prop_assert!((rate - expected).abs() < 0.01 * limit, "{rate} for {expected}");
            }
        }
    }
}
