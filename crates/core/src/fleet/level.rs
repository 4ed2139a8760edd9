//! Weighted max-min: the target of each member of a capacity, given its flows and its demand.
//!
//! ```text
//!   target = min(demand, level * flows), the level such that the targets fill the capacity
//! ```
//!
//! A level is the rate of one greedy flow, the same at every member: the fixed point of FPS in one step.
//! Capacity that nobody wants is spread in proportion to flows, for the next demand. Each member has
//! [`LEAST_PER_MILLE`] of an equal part whatever it wants, so that a first packet passes. It has the caller's
//! least if that is more: where a target becomes a rate, the least rate of every backend.
//!
//! O(n log n); the targets never add up to more than the capacity.

use alloc::vec::Vec;

/// The part of a member that wants nothing, in thousandths of an equal part.
pub const LEAST_PER_MILLE: u64 = 2;

/// The demand of a member.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Want {
    /// How many greedy flows; 0 counts as very little.
    pub flows: f32,
    /// The most that it can use, in bit/s; `u64::MAX`: no bound.
    pub demand_bit_s: u64,
}

/// Lower bound of a member's flows.
const FLOWS_LEAST: f64 = 1e-3;

/// The capacity to divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// All of it, in bit/s.
    pub bit_s: u64,
    /// No target is below this, in bit/s, unless an equal part is.
    pub least_bit_s: u64,
}

/// Writes the target of each of `wants` to `targets`.
pub fn fill(capacity: Capacity, wants: &[Want], targets: &mut Vec<u64>) {
    targets.clear();
    let members = wants.len() as u64;
    if members == 0 {
        return;
    }
    let Capacity { bit_s: capacity_bit_s, least_bit_s } = capacity;
    let equal = capacity_bit_s / members;
    let least = (equal * LEAST_PER_MILLE / 1_000).max(least_bit_s).min(equal);
    let flows = |want: &Want| f64::from(want.flows.max(0.0)).max(FLOWS_LEAST);
    let demand = |want: &Want| want.demand_bit_s.saturating_sub(least);
    // Sorted by the level at which a member has all it wants.
    let mut order: Vec<(f64, usize)> =
        wants.iter().enumerate().map(|(i, want)| (demand(want) as f64 / flows(want), i)).collect();
    order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    targets.resize(wants.len(), least);
    let mut left = capacity_bit_s - least * members;
    let mut flows_left: f64 = wants.iter().map(flows).sum();
    for (_, i) in order {
        let part = left as f64 * (flows(&wants[i]) / flows_left).min(1.0);
        let given = demand(&wants[i]).min(part as u64).min(left);
        targets[i] += given;
        left -= given;
        flows_left = (flows_left - flows(&wants[i])).max(FLOWS_LEAST);
    }
    let all: f64 = wants.iter().map(flows).sum();
    let spare = left as f64;
    for (target, want) in targets.iter_mut().zip(wants) {
        let bonus = ((spare * (flows(want) / all)) as u64).min(left);
        *target += bonus;
        left -= bonus;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    fn filled(capacity: u64, wants: &[(f32, u64)]) -> Vec<u64> {
        let wants: Vec<_> =
            wants.iter().map(|&(flows, demand_bit_s)| Want { flows, demand_bit_s }).collect();
        let mut targets = vec![];
        fill(Capacity { bit_s: capacity, least_bit_s: 0 }, &wants, &mut targets);
        targets
    }

    #[test]
    fn nobody_has_less_than_the_least() {
        let wants = [Want::default(), Want { flows: 9.0, demand_bit_s: u64::MAX }];
        let targets = |bit_s| {
            let mut targets = vec![];
            fill(Capacity { bit_s, least_bit_s: 8_000 }, &wants, &mut targets);
            targets
        };
        let [idle, busy] = targets(625_000)[..] else { unreachable!() };
        assert!((8_000..8_100).contains(&idle) && busy > 616_000, "{idle} {busy}");
        // Below twice the least there is an equal part for each.
        assert_eq!(targets(10_000), [5_000, 5_000]);
    }

    #[test]
    fn fills_by_flows_and_demands() {
        let near = |a: &[u64], b: &[u64]| {
            assert!(a.iter().zip(b).all(|(a, b)| a.abs_diff(*b) < 40), "{a:?} for {b:?}");
        };
        near(&filled(10_000, &[(3.0, u64::MAX), (7.0, u64::MAX)]), &[3_000, 7_000]);
        near(
            &filled(10_000, &[(1.0, 1_000), (2.0, u64::MAX), (1.0, u64::MAX)]),
            &[1000, 6000, 3000],
        );
        near(&filled(10_000, &[(0.0, 0), (2.0, u64::MAX)]), &[10, 9_990]);
        near(&filled(10_000, &[(1.0, 1_000), (1.0, 1_000)]), &[5_000, 5_000]);
        assert!(filled(10_000, &[]).is_empty());
        assert_eq!(filled(0, &[(1.0, 5)]), [0]);
    }

    proptest! {
        #[test]
        fn never_above_the_capacity_and_fair(
            capacity in 0u64..1_000_000_000_000,
            wants in prop::collection::vec(
                (0.0f32..1e4, prop_oneof![Just(u64::MAX), 0u64..1_000_000_000]), 1..50),
        ) {
            let targets = filled(capacity, &wants);
            prop_assert!(targets.iter().sum::<u64>() <= capacity);
            // A member that wants more than it has, has no lower level than others above their least.
            let n = wants.len() as u64;
            let least = capacity / n * LEAST_PER_MILLE / 1_000;
            let level = |i: usize| (targets[i] - least) as f64 / f64::from(wants[i].0).max(1e-3);
            for i in (0..wants.len()).filter(|i| wants[*i].1 > targets[*i] + n) {
                for j in 0..wants.len() {
                    let slack = 1e-6 * level(j) + (n as f64 + 2.0) / f64::from(wants[i].0).max(1e-3);
                    let rounded = n as f64 / f64::from(wants[j].0).max(1e-3);
                    prop_assert!(level(i) + slack + rounded >= level(j), "{i} {j} {targets:?}");
                }
            }
        }
    }
}
