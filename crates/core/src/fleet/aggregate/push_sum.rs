//! Push-sum (Kempe, Dobra, Gehrke, FOCS 2003).
//!
//! Each member has a value and a weight. In each round it keeps half of both and sends half to a random peer;
//! the estimate is `value / weight`. Neither sum ever changes, and the expected potential, how far the values
//! are from their parts, falls to 1/2 - 1/2n of itself a round. For a sum one member starts with weight 1 and
//! the others with 0; for a mean all start with 1.
//!
//! A lost message takes mass away. If the network reports it, call [`PushSum::take_back`]. If not, a receiver
//! sees a gap in the sender's numbers and counts the newest mass once more for each lost one, as Cloud
//! Control does. That is right on average, as long as the lost messages were like those that came. A crash
//! takes what the member had.

use alloc::collections::BTreeMap;

use super::super::{MemberId, message::Mass};

/// Numbers of this many senders are kept; a further one displaces the least id.
pub const SENDERS_MAX: usize = 1_024;
/// Upper bound of a gap.
const GAP_MAX: u64 = 64;

/// A member of push-sum. See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub struct PushSum {
    mass: Mass,
    sent: BTreeMap<MemberId, u64>,
    heard: BTreeMap<MemberId, u64>,
}

impl PushSum {
    /// A member that adds `mass` to the sum.
    #[must_use]
    pub fn new(mass: Mass) -> Self {
        Self { mass, sent: BTreeMap::new(), heard: BTreeMap::new() }
    }

    /// Its value changes by `difference`, and the sum with it.
    pub fn add(&mut self, difference: f64) {
        self.mass.value += difference;
    }

    /// Half of the mass, for `peer`, and its number.
    pub fn split(&mut self, peer: MemberId) -> (u64, Mass) {
        self.mass = Mass { value: self.mass.value / 2.0, weight: self.mass.weight / 2.0 };
        let number = bounded(&mut self.sent, peer);
        *number += 1;
        (*number, self.mass)
    }

    /// A message that is known to be lost comes back.
    pub fn take_back(&mut self, mass: Mass) {
        self.mass.value += mass.value;
        self.mass.weight += mass.weight;
    }

    /// Takes the mass that `from` sent as `number`. Duplicates and overtaken messages are refused, because
    /// the gap was counted for them.
    pub fn on_mass(&mut self, from: MemberId, number: u64, mass: Mass) -> bool {
        let last = bounded(&mut self.heard, from);
        if number <= *last {
            return false;
        }
        let times = (number - *last).min(GAP_MAX) as f64;
        *last = number;
        self.mass.value += mass.value * times;
        self.mass.weight += mass.weight * times;
        true
    }

    /// The sum, or the mean, as far as it is known.
    #[must_use]
    pub fn estimate(&self) -> Option<f64> {
        (self.mass.weight > 0.0).then(|| self.mass.value / self.mass.weight)
    }

    /// The mass that it holds.
    #[must_use]
    pub fn mass(&self) -> Mass {
        self.mass
    }
}

fn bounded(numbers: &mut BTreeMap<MemberId, u64>, peer: MemberId) -> &mut u64 {
    if numbers.len() >= SENDERS_MAX && !numbers.contains_key(&peer) {
        numbers.pop_first();
    }
    numbers.entry(peer).or_insert(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn next(random: &mut u64) -> u64 {
        *random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *random >> 33
    }

    fn round(fleet: &mut [PushSum], random: &mut u64, mut lost: impl FnMut(&mut u64) -> bool) {
        let n = fleet.len() as u64;
        let sent: Vec<_> = (0..fleet.len())
            .map(|i| {
                let to = (i as u64 + 1 + next(random) % (n - 1)) % n;
                let (number, mass) = fleet[i].split(MemberId(to as u32));
                (MemberId(i as u32), to as usize, number, mass)
            })
            .collect();
        for (from, to, number, mass) in sent {
            if !lost(random) {
                assert!(fleet[to].on_mass(from, number, mass));
                assert!(!fleet[to].on_mass(from, number, mass), "a duplicate");
            }
        }
    }

    fn fleet(values: &[f64]) -> Vec<PushSum> {
        values.iter().map(|&value| PushSum::new(Mass { value, weight: 1.0 })).collect()
    }

    proptest! {
        #[test]
        fn mass_is_conserved(
            values in prop::collection::vec(0.0f64..1e9, 2..40), seed: u64, rounds in 1usize..60,
        ) {
            let mut fleet = fleet(&values);
            let mut random = seed;
            for _ in 0..rounds {
                round(&mut fleet, &mut random, |_| false);
            }
            let (value, weight) = fleet.iter().fold((0.0, 0.0), |(v, w), member| {
                (v + member.mass().value, w + member.mass().weight)
            });
            let sum: f64 = values.iter().sum();
            prop_assert!((value - sum).abs() <= 1e-9 * sum.max(1.0));
            prop_assert!((weight - values.len() as f64).abs() < 1e-9);
        }
    }

    /// The potential of Kempe et al.: each member's mass is split by origin, and the potential is how far
    /// each origin's part is from even.
    #[test]
    fn the_potential_halves_each_round() {
        let n = 64usize;
        let mut random = 7u64;
        let (mut ratios, mut count) = (0.0, 0);
        for _ in 0..20 {
            let mut parts = std::vec![std::vec![0.0f64; n]; n];
            (0..n).for_each(|i| parts[i][i] = 1.0);
            let potential = |parts: &[Vec<f64>]| -> f64 {
                let one = |row: &Vec<f64>| {
                    let even = row.iter().sum::<f64>() / n as f64;
                    row.iter().map(|part| (part - even) * (part - even)).sum::<f64>()
                };
                parts.iter().map(one).sum()
            };
            for _ in 0..15 {
                let before = potential(&parts);
                let mut next_parts = std::vec![std::vec![0.0f64; n]; n];
                for i in 0..n {
                    let to = (next(&mut random) % n as u64) as usize;
                    for k in 0..n {
                        next_parts[i][k] += parts[i][k] / 2.0;
                        next_parts[to][k] += parts[i][k] / 2.0;
                    }
                }
                parts = next_parts;
                ratios += potential(&parts) / before;
                count += 1;
            }
        }
        let mean = ratios / f64::from(count);
        assert!((mean - (0.5 - 0.5 / n as f64)).abs() < 0.02, "falls to {mean} of itself");
    }

    #[test]
    fn gaps_are_made_up_for_on_average() {
        let values: Vec<f64> = (0..50).map(f64::from).collect();
        let mut fleet = fleet(&values);
        let mut random = 3;
        for _ in 0..60 {
            round(&mut fleet, &mut random, |random| next(random).is_multiple_of(10));
        }
        // The mean is a ratio, so what is lost of both does not count; what they were is made up for.
        for member in &fleet {
            let estimate = member.estimate().unwrap();
            assert!((estimate - 24.5).abs() < 5.0, "{estimate}");
        }
    }

    #[test]
    fn what_is_taken_back_is_not_lost() {
        let mut member = PushSum::new(Mass { value: 8.0, weight: 1.0 });
        let (_, mass) = member.split(MemberId(1));
        member.take_back(mass);
        assert_eq!(member.mass(), Mass { value: 8.0, weight: 1.0 });
        assert_eq!(PushSum::new(Mass { value: 1.0, weight: 0.0 }).estimate(), None);
    }
}
