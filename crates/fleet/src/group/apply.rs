//! Puts a group's rates in force at its limits.
//!
//! ```text
//!   room    = the host's part - what limits have that cannot be changed now
//!   targets = room by weighted max-min, none below what every scheme takes
//!   lower the rates in force; once all are lower, raise the others, as far as the sum stays within the part
//! ```
//!
//! A limit that refuses ends the round. It keeps what it has, and the next round divides the rest among the
//! others; it is asked again later. What a limit may have is what it has confirmed ([`Gauge::claim_bit_s`]),
//! so nothing is raised by what could not be lowered, and `share` tells nobody of it.
//!
//! Work: O(n²) for n limits of the group on this host, times the limits that refuse.

use std::collections::BTreeSet;

use tidegate_core::{
    Nanos, Rate,
    fleet::level::{self, Capacity, Want},
};
use tidegate_host::fleet::{GroupSpec, LEAST_BIT_S};
use tidegate_sys::limit::Lease;

use super::{
    super::{
        backend::{Done, GroupBackend, Place},
        gauge::{Gauge, LEAST_RATE},
    },
    Control, Group, State,
};

/// A limit's equal part of the host's reserved share, of `count` limits. A spec
/// that was checked gives each at least [`LEAST_BIT_S`].
pub(super) fn equal_part(spec: &GroupSpec, count: usize, ceiling: Rate) -> Rate {
    let alone = spec.alone_bit_s() / count.max(1) as u64;
    Rate::from_bit_s(alone.max(LEAST_BIT_S)).unwrap_or(LEAST_RATE).min(ceiling)
}

impl Group {
    /// Puts the rates in force that follow from what is known now. False if more than the host's part may be
    /// in force: no message may be sent then that relies on less.
    /// Limits that are `held` by a group that they have left are not touched.
    pub fn apply<G: GroupBackend>(
        &mut self,
        now: Nanos,
        backend: &mut G,
        held: &BTreeSet<Place>,
    ) -> bool {
        let looked = self.gauges.iter().any(|gauge| gauge.measured.is_some() || gauge.gone);
        if !looked && !self.stood_back && !matches!(self.control, Control::Share(_)) {
            // What is pinned is not known yet, and stays.
            return true;
        }
        let part = self.part_bit_s(now);
        let state = self.state(now);
        let until = self.until(now, state);
        // Each round but the last finds a limit that refuses or is gone.
        for _ in 0..=self.gauges.len() {
            let targets = self.targets(now, part, until, held);
            if self.lower(now, backend, &targets, until)
                && self.raise(now, backend, &targets, until)
            {
                break;
            }
        }
        self.apply_drops(backend, state, held);
        if self.cannot_drop && state != State::CannotDrop {
            return self.apply(now, backend, held);
        }
        self.claims(now, until).iter().sum::<u64>() + self.outgoing_bit_s(now) <= part
    }

    fn equal_part(&self, gauge: &Gauge) -> Rate {
        equal_part(&self.spec, self.gauges.len(), gauge.ceiling)
    }

    /// What a limit falls back to: its equal part, or less beside limits that cannot be set and keep more
    /// than theirs, so that all together keep the host's reserved share.
    fn then(&self, i: usize) -> Rate {
        let most = self.equal_part(&self.gauges[i]);
        let alone = self.spec.alone_bit_s();
        let others = self.gauges.iter().enumerate().filter(|(other, _)| *other != i);
        let keep: Vec<_> =
            others.filter_map(|(_, g)| g.keeps_bit_s(self.equal_part(g), alone)).collect();
        let room =
            alone.saturating_sub(keep.iter().fold(0, |sum: u64, one| sum.saturating_add(*one)));
        let part = room / (self.gauges.len() - keep.len()) as u64;
        Rate::from_bit_s(part.max(LEAST_BIT_S)).unwrap_or(LEAST_RATE).min(most)
    }

    /// What each limit passes at most before `until`, in bit/s. Those of which nothing is known, and for
    /// which all that was lent has ended, have the host's reserved share together.
    fn claims(&self, now: Nanos, until: Option<Nanos>) -> Vec<u64> {
        let ended = self.gauges.iter().filter(|gauge| gauge.has_ended(now)).count();
        let own = self.spec.alone_bit_s() / ended.max(1) as u64;
        let claim = |gauge: &Gauge| gauge.claim_bit_s(now, until, self.equal_part(gauge), own);
        self.gauges.iter().map(claim).collect()
    }

    /// The rates of limits that can be changed now, by their places.
    fn targets(
        &self,
        now: Nanos,
        part: u64,
        until: Option<Nanos>,
        held: &BTreeSet<Place>,
    ) -> Vec<(usize, Rate)> {
        let claims = self.claims(now, until);
        let mut room = part.saturating_sub(self.outgoing_bit_s(now));
        let (mut open, mut wants) = (Vec::new(), Vec::new());
        for (i, gauge) in self.gauges.iter().enumerate() {
            if gauge.is_open(now) && !held.contains(&gauge.place) {
                let want = gauge.want(now);
                let demand_bit_s = want.demand_bit_s.min(gauge.ceiling.bit_s());
                open.push(i);
                wants.push(Want { demand_bit_s, ..want });
            } else {
                room = room.saturating_sub(claims[i]);
            }
        }
        let mut targets = Vec::new();
        level::fill(Capacity { bit_s: room, least_bit_s: LEAST_BIT_S }, &wants, &mut targets);
        let rate = |(i, target): (usize, &u64)| {
            let rate = Rate::from_bit_s(*target).unwrap_or(LEAST_RATE).max(LEAST_RATE);
            (i, rate.min(self.gauges[i].ceiling))
        };
        open.into_iter().zip(&targets).map(rate).collect()
    }

    fn lease(&self, i: usize, until: Option<Nanos>) -> Option<Lease> {
        until.map(|until| Lease { until, then: self.then(i) })
    }

    /// Sets the rates that are in force and not below their targets. False at the first limit that refuses.
    fn lower<G: GroupBackend>(
        &mut self,
        now: Nanos,
        backend: &mut G,
        targets: &[(usize, Rate)],
        until: Option<Nanos>,
    ) -> bool {
        // What falls at the end of its lease gets a later end after what rises then has got its own.
        let rises = |(i, rate): &(usize, Rate)| *rate < self.then(*i);
        let (rising, falling): (Vec<_>, Vec<_>) = targets.iter().copied().partition(rises);
        rising.into_iter().chain(falling).all(|(i, rate)| {
            let lease = self.lease(i, until);
            let gauge = &mut self.gauges[i];
            gauge.in_force(now).is_none_or(|is| is < rate) || gauge.apply(now, backend, rate, lease)
        })
    }

    /// Raises what is below its target, as far as all that may be in force stays within the part. False at
    /// the first limit that refuses.
    fn raise<G: GroupBackend>(
        &mut self,
        now: Nanos,
        backend: &mut G,
        targets: &[(usize, Rate)],
        until: Option<Nanos>,
    ) -> bool {
        let part = self.part_bit_s(now).saturating_sub(self.outgoing_bit_s(now));
        // Limits of which nothing is known may have more than their targets: each leaves room for the others
        // once it is set, which the second time gives them.
        let twice = targets.iter().chain(targets);
        for (i, rate) in twice {
            if self.gauges[*i].in_force(now).is_some_and(|is| is >= *rate) {
                continue;
            }
            let claims = self.claims(now, until);
            let room = part.saturating_sub(claims.iter().sum::<u64>() - claims[*i]);
            let rate = Rate::from_bit_s(room).map_or(LEAST_RATE, |room| room.min(*rate));
            let lease = self.lease(*i, until);
            if !self.gauges[*i].apply(now, backend, rate.max(LEAST_RATE), lease) {
                return false;
            }
        }
        true
    }

    /// Sets or ends drops at random, which `grd` asks for.
    fn apply_drops<G: GroupBackend>(
        &mut self,
        backend: &mut G,
        state: State,
        held: &BTreeSet<Place>,
    ) {
        let is_grd = matches!(self.control, Control::Grd);
        let drops = is_grd && state == State::Sharing;
        let probability = if drops { self.drop_probability } else { 0.0 };
        self.cannot_drop = false;
        // Of another algorithm once: what an earlier one has left must not stay.
        for gauge in self.gauges.iter_mut().filter(|gauge| is_grd || !gauge.drops_none) {
            if gauge.dropping == Some(probability) || held.contains(&gauge.place) {
                continue;
            }
            match backend.set_drop(&gauge.place, probability) {
                Ok(Done::Cannot) => (self.cannot_drop, gauge.drops_none) = (is_grd, true),
                Ok(Done::Set) => {
                    (gauge.drops_none, gauge.dropping) = (!drops, Some(probability));
                }
                Ok(Done::Gone | Done::Busy) => {}
                Err(e) => gauge.error = Some(e.to_string()),
            }
        }
    }
}
