//! Push-flow (Gansterer, Niederbrucker, Straková, Schulze Grotthoff, 2013): push-sum that repairs itself.
//!
//! A member does not send mass away. For each neighbour `j` it keeps how much has flowed there in total, and
//! sends that total. The neighbour takes its negative as its own flow back:
//!
//! ```text
//!   estimate of i = own - sum over j of flow(i, j)
//!   to push:        flow(i, j) += estimate / 2;  send flow(i, j)
//!   on receipt:     flow(i, j)  = -flow(j, i)
//!   j is dead:      flow(i, j)  = 0
//! ```
//!
//! The total is sent and overwritten. So the next message repairs loss, duplicates and reordering, and mass
//! that a dead neighbour held comes back. A member's own value may change at any time.

use alloc::collections::BTreeMap;

use super::super::{MemberId, message::Mass};

/// The most neighbours with whom a flow is kept.
pub const NEIGHBOURS_MAX: usize = 64;

/// A member of push-flow. See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub struct PushFlow {
    own: Mass,
    flows: BTreeMap<MemberId, Mass>,
}

impl PushFlow {
    /// A member that adds `own` to the sum.
    #[must_use]
    pub fn new(own: Mass) -> Self {
        Self { own, flows: BTreeMap::new() }
    }

    /// Changes its own value.
    pub fn set_own(&mut self, own: Mass) {
        self.own = own;
    }

    /// What it holds now.
    #[must_use]
    pub fn mass(&self) -> Mass {
        self.flows.values().fold(self.own, |mass, flow| Mass {
            value: mass.value - flow.value,
            weight: mass.weight - flow.weight,
        })
    }

    /// Moves half of what it holds towards `neighbour`; returns the flow to send there. `None` if it has
    /// [`NEIGHBOURS_MAX`] others.
    pub fn push(&mut self, neighbour: MemberId) -> Option<Mass> {
        let held = self.mass();
        let flow = self.flow(neighbour)?;
        flow.value += held.value / 2.0;
        flow.weight += held.weight / 2.0;
        Some(*flow)
    }

    /// Takes the flow that `neighbour` sent. False if there are [`NEIGHBOURS_MAX`] others.
    pub fn on_flow(&mut self, neighbour: MemberId, flow: Mass) -> bool {
        let Some(back) = self.flow(neighbour) else { return false };
        *back = Mass { value: -flow.value, weight: -flow.weight };
        true
    }

    /// A neighbour is dead or gone: cancels what flowed there and back.
    pub fn remove(&mut self, neighbour: MemberId) {
        self.flows.remove(&neighbour);
    }

    fn flow(&mut self, neighbour: MemberId) -> Option<&mut Mass> {
        if self.flows.len() >= NEIGHBOURS_MAX && !self.flows.contains_key(&neighbour) {
            return None;
        }
        Some(self.flows.entry(neighbour).or_default())
    }

    /// The sum, or the mean, as far as it is known.
    #[must_use]
    pub fn estimate(&self) -> Option<f64> {
        let mass = self.mass();
        (mass.weight > 1e-12).then(|| mass.value / mass.weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    struct Net {
        fleet: Vec<Option<PushFlow>>,
        random: u64,
    }

    impl Net {
        fn new(members: u32) -> Net {
            let own = |i: u32| PushFlow::new(Mass { value: f64::from(i), weight: 1.0 });
            Net { fleet: (0..members).map(|i| Some(own(i))).collect(), random: 11 }
        }

        fn next(&mut self, below: u64) -> u64 {
            self.random = self
                .random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.random >> 33) % below
        }

        /// Neighbours on a ring at distances 1, 2, 4 and 8; loss in per cent; every third arrives twice.
        fn rounds(&mut self, rounds: usize, loss: u64) {
            let n = self.fleet.len();
            for _ in 0..rounds {
                for i in 0..n {
                    let step = 1 << self.next(4);
                    let j = if self.next(2) == 0 { (i + step) % n } else { (i + n - step) % n };
                    let (from, to) = (MemberId(i as u32), MemberId(j as u32));
                    if self.fleet[j].is_none() {
                        if let Some(member) = &mut self.fleet[i] {
                            member.remove(to);
                        }
                        continue;
                    }
                    let Some(flow) = self.fleet[i].as_mut().and_then(|m| m.push(to)) else {
                        continue;
                    };
                    let copies = if self.next(3) == 0 { 2 } else { 1 };
                    for _ in 0..copies {
                        if self.next(100) >= loss {
                            assert!(self.fleet[j].as_mut().unwrap().on_flow(from, flow));
                        }
                    }
                }
            }
        }

        fn worst(&self) -> f64 {
            let alive = || self.fleet.iter().flatten();
            let mean = alive().map(|m| m.own.value).sum::<f64>() / alive().count() as f64;
            alive().map(|m| (m.estimate().unwrap_or(0.0) - mean).abs()).fold(0.0, f64::max)
        }
    }

    #[test]
    fn loss_and_duplicates_mend() {
        let mut net = Net::new(32);
        net.rounds(300, 30);
        net.rounds(300, 0);
        assert!(net.worst() < 1e-6, "{}", net.worst());
    }

    #[test]
    fn a_crash_mends_and_a_value_may_change() {
        let mut net = Net::new(32);
        net.rounds(100, 10);
        net.fleet[5] = None;
        net.fleet[31] = None;
        net.fleet[7].as_mut().unwrap().set_own(Mass { value: 500.0, weight: 1.0 });
        net.rounds(600, 0);
        assert!(net.worst() < 1e-6, "{}", net.worst());
    }

    #[test]
    fn neighbours_are_bounded() {
        let mut member = PushFlow::new(Mass { value: 1.0, weight: 1.0 });
        for peer in 0..NEIGHBOURS_MAX as u32 {
            assert!(member.on_flow(MemberId(peer), Mass::default()));
        }
        assert!(!member.on_flow(MemberId(1_000), Mass::default()));
        assert_eq!(member.push(MemberId(1_000)), None);
    }
}
