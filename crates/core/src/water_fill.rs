//! Water-filling: divides one rate among members that want parts of it, max-min fair.
//!
//! Carousel runs a shaper on each core without a lock between them, so an aggregate with flows on several
//! cores is divided. About every 100 ms each shaper's demand is computed from what it sent, and the
//! aggregate's rate is filled into the demands like water: each gets what it wants or an equal level. A
//! shaper that wants nothing keeps [`RESERVE_PERCENT`], so that a flow that starts there need not wait for
//! the next round. The parts never add up to more than the whole.
//!
//! O(n^2) for n members, at most [`MAX_MEMBERS`], without allocation; it runs ten times a second.

use crate::units::Rate;

/// The most members that share one rate.
pub const MAX_MEMBERS: usize = 256;
/// The part of a member that wants nothing, in per cent of the whole.
pub const RESERVE_PERCENT: u64 = 1;
/// A member that used this much of its part, in per cent, may want more: its demand is not known.
pub const GREEDY_PERCENT: u64 = 95;
/// The part of a member above what it used, in per cent: with a part that is just enough it would look greedy
/// in the next round, and its part would swing.
pub const HEADROOM_PERCENT: u64 = 8;

/// The demand of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demand {
    /// This rate in bit/s; zero for an idle member.
    Rate(u64),
    /// As much as there is.
    Greedy,
}

impl Demand {
    /// The demand of a member that sent `used_bit_s` of a part of `part_bit_s`, and whether packets wait
    /// beyond what it may send.
    #[must_use]
    pub fn measured(used_bit_s: u64, part_bit_s: u64, backlogged: bool) -> Self {
        let greedy =
            u128::from(used_bit_s) * 100 >= u128::from(part_bit_s) * u128::from(GREEDY_PERCENT);
        // At a low rate a packet takes longer than a round: who sent nothing may still have some to send.
        if backlogged || used_bit_s > 0 && greedy {
            Demand::Greedy
        } else {
            Demand::Rate(used_bit_s.saturating_add(used_bit_s / 100 * HEADROOM_PERCENT))
        }
    }
}

/// Divides `total` among `demands`: writes the part of each, in bit/s, to `parts`, and spreads what nobody
/// wants equally. Every part is at least the reserve: 1 % of the total, or an equal part of it where there
/// are more than 100 members. `sum(parts) <= total` always.
///
/// # Panics
/// If `parts` is not as long as `demands`, or longer than [`MAX_MEMBERS`].
pub fn water_fill(total: Rate, demands: &[Demand], parts: &mut [u64]) {
    assert_eq!(demands.len(), parts.len(), "a part for each demand");
    assert!(demands.len() <= MAX_MEMBERS, "{} members", demands.len());
    let members = demands.len() as u64;
    if members == 0 {
        return;
    }
    let total = total.bit_s();
    let reserve = (total / 100 * RESERVE_PERCENT).min(total / members);
    parts.fill(reserve);
    let mut left = total - reserve * members;
    // Each round satisfies at least one member, or ends.
    for _ in 0..=members {
        let wants = |part: u64, demand: &Demand| match demand {
            Demand::Rate(rate) => rate.saturating_sub(part),
            Demand::Greedy => u64::MAX,
        };
        let hungry = parts.iter().zip(demands).filter(|(p, d)| wants(**p, d) > 0).count() as u64;
        let Some(level) = left.checked_div(hungry) else { break };
        if level == 0 {
            break;
        }
        for (part, demand) in parts.iter_mut().zip(demands) {
            let taken = wants(*part, demand).min(level);
            *part += taken;
            left -= taken;
        }
    }
    // What nobody wants now may be wanted before the next round.
    let bonus = left / members;
    for part in parts {
        *part += bonus;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::{vec, vec::Vec};

    use super::*;

    fn filled(total: u64, demands: &[Demand]) -> Vec<u64> {
        let mut parts = vec![0; demands.len()];
        water_fill(Rate::from_bit_s(total).unwrap(), demands, &mut parts);
        parts
    }

    #[test]
    fn fills_like_water() {
        use Demand::{Greedy, Rate};
        assert_eq!(filled(1_000, &[Greedy, Greedy]), [500, 500]);
        assert_eq!(filled(1_000, &[Rate(0), Greedy]), [10, 990]);
        assert_eq!(filled(1_000, &[Rate(200), Greedy, Greedy]), [200, 400, 400]);
        assert_eq!(filled(1_000, &[Rate(0), Rate(0)]), [500, 500]);
        assert_eq!(filled(1_000, &[Rate(100), Rate(300)]), [400, 600]);
        assert_eq!(filled(3, &[Greedy; 5]), [0; 5]);
        assert_eq!(filled(3, &[]), Vec::<u64>::new());
    }

    #[test]
    fn what_has_enough_is_not_taken_for_greedy() {
        let used = 400_000_000;
        let Demand::Rate(part) = Demand::measured(used, 2 * used, false) else { panic!() };
        assert_eq!(Demand::measured(used, part, false), Demand::Rate(part));
        assert_eq!(Demand::measured(used, used, false), Demand::Greedy);
        assert_eq!(Demand::measured(used, part, true), Demand::Greedy);
        assert_eq!(Demand::measured(0, part, true), Demand::Greedy);
        assert_eq!(Demand::measured(0, 0, false), Demand::Rate(0));
    }

    proptest! {
        #[test]
        fn is_max_min_fair_and_never_above_the_total(
            total in 1u64..1_000_000_000_000,
            demands in prop::collection::vec(
                prop_oneof![
                    (0u64..1_000_000_000_000).prop_map(Demand::Rate),
                    (0u64..1_000).prop_map(Demand::Rate),
                    Just(Demand::Greedy),
                ],
                1..64,
            ),
        ) {
            let parts = filled(total, &demands);
            prop_assert!(parts.iter().sum::<u64>() <= total);
            let members = demands.len() as u64;
            let reserve = (total / 100).min(total / members);
            let most = *parts.iter().max().unwrap();
            for (part, demand) in parts.iter().zip(&demands) {
                prop_assert!(*part >= reserve);
                // A member with less than another has all that it wants, but for rounding.
                let wanted = match demand { Demand::Rate(rate) => *rate, Demand::Greedy => u64::MAX };
                prop_assert!(*part >= wanted || *part + members + 1 >= most.min(wanted));
            }
        }
    }
}
