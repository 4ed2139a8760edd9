//! Puts a group's rates in force at the gates of its limits.
//!
//! ```text
//!   room    = the host's part - what gates have that cannot be changed now
//!   targets = room by weighted max-min, none below what every scheme takes
//!   lower first; then raise, as far as the sum of all that is in force stays within the part
//! ```
//!
//! A gate that refuses keeps what it has, and the others share the rest; it is asked again later. What is in
//! force is what gates have confirmed ([`Gauge::claim_bit_s`]), so nothing is raised by what could not be
//! lowered, and `share` tells nobody of it.
//!
//! Work: O(n log n) for n limits of the group on this host, times the gates that refuse.

use tidegate_core::{
    Nanos, Rate,
    fleet::level::{self, Capacity, Want},
};

use super::{
    super::{
        config::{GroupSpec, LEAST_BIT_S},
        gates::{Done, Gates, Lease, Place},
        gauge::{Gauge, LEAST_RATE},
    },
    Control, Group, Standing,
};

/// What a limit falls back to: its equal part of what is the host's in any case, of `count` limits. A spec
/// that was checked gives each at least [`LEAST_BIT_S`].
pub(super) fn then(spec: &GroupSpec, count: usize, ceiling: Rate) -> Rate {
    let alone = spec.alone_bit_s() / count.max(1) as u64;
    Rate::from_bit_s(alone.max(LEAST_BIT_S)).unwrap_or(LEAST_RATE).min(ceiling)
}

/// A limit leaves its group, of `count`. Unless it `keeps` another, and if it still has what this one gave
/// it, it falls to what is the host's in any case.
pub(super) fn release<G: Gates>(
    now: Nanos,
    gates: &mut G,
    spec: &GroupSpec,
    count: usize,
    gauge: &Gauge,
    keeps: impl Fn(&Place) -> bool,
) {
    // What fails here the next group, or who takes the limit off, does again.
    let _ = gates.leave(&gauge.place);
    let is = gates.measure(now, &gauge.place).ok().flatten();
    let ours = is.is_some_and(|is| Rate::from_bit_s(is.rate_bit_s) == gauge.applied);
    if ours && !keeps(&gauge.place) {
        let _ = gates.set_rate(&gauge.place, then(spec, count, gauge.ceiling), None);
        let _ = gates.leave(&gauge.place);
    }
}

impl Group {
    /// Puts the rates in force that follow from what is known now. False if more than the host's part may be
    /// in force: nothing may be told then that relies on less.
    pub fn apply<G: Gates>(&mut self, now: Nanos, gates: &mut G) -> bool {
        let looked = self.gauges.iter().any(|gauge| gauge.measured.is_some() || gauge.gone);
        if !looked && !self.stood_back && !matches!(self.control, Control::Share(_)) {
            // What is pinned is not known yet, and stays.
            return true;
        }
        let part = self.part_bit_s(now);
        let standing = self.standing(now);
        let until = self.until(now, standing);
        // Each round but the last finds a gate that refuses or is gone.
        for _ in 0..=self.gauges.len() {
            let targets = self.targets(now, part, until);
            if self.lower(now, gates, &targets, until) && self.raise(now, gates, &targets, until) {
                break;
            }
        }
        self.apply_drops(gates, standing);
        if self.cannot_drop && standing != Standing::CannotDrop {
            return self.apply(now, gates);
        }
        self.claims(now, until).iter().sum::<u64>() <= part
    }

    fn then(&self, gauge: &Gauge) -> Rate {
        then(&self.spec, self.gauges.len(), gauge.ceiling)
    }

    /// What each gate passes at most before `until`, in bit/s.
    fn claims(&self, now: Nanos, until: Option<Nanos>) -> Vec<u64> {
        self.gauges.iter().map(|gauge| gauge.claim_bit_s(now, until, self.then(gauge))).collect()
    }

    /// The rates of gates that can be changed now, by their places.
    fn targets(&self, now: Nanos, part: u64, until: Option<Nanos>) -> Vec<(usize, Rate)> {
        let claims = self.claims(now, until);
        let (mut room, mut open, mut wants) = (part, Vec::new(), Vec::new());
        for (i, gauge) in self.gauges.iter().enumerate() {
            if gauge.is_open(now) {
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
        let then = self.then(&self.gauges[i]);
        until.map(|until| Lease { until, then })
    }

    /// Lowers what is above its target. False if a gate could not be lowered.
    fn lower<G: Gates>(
        &mut self,
        now: Nanos,
        gates: &mut G,
        targets: &[(usize, Rate)],
        until: Option<Nanos>,
    ) -> bool {
        let claims = self.claims(now, until);
        let mut good = true;
        for (i, rate) in targets.iter().filter(|(i, rate)| rate.bit_s() <= claims[*i]) {
            let lease = self.lease(*i, until);
            good &= self.gauges[*i].apply(now, gates, *rate, lease);
        }
        good
    }

    /// Raises what is below its target, as far as all that is in force stays within the part. False if a gate
    /// could not be raised.
    fn raise<G: Gates>(
        &mut self,
        now: Nanos,
        gates: &mut G,
        targets: &[(usize, Rate)],
        until: Option<Nanos>,
    ) -> bool {
        let part = self.part_bit_s(now);
        let mut good = true;
        for (i, rate) in targets {
            let claims = self.claims(now, until);
            if rate.bit_s() <= claims[*i] {
                continue;
            }
            let others = claims.iter().sum::<u64>() - claims[*i];
            let most = part.saturating_sub(others).max(claims[*i]);
            let rate = Rate::from_bit_s(most).map_or(LEAST_RATE, |most| most.min(*rate));
            let lease = self.lease(*i, until);
            good &= self.gauges[*i].apply(now, gates, rate.max(LEAST_RATE), lease);
        }
        good
    }

    /// Sets or ends drops at random, which `grd` asks for.
    fn apply_drops<G: Gates>(&mut self, gates: &mut G, standing: Standing) {
        let is_grd = matches!(self.control, Control::Grd);
        let drops = is_grd && standing == Standing::Sharing;
        let probability = if drops { self.drop_probability } else { 0.0 };
        self.cannot_drop = false;
        // Of another algorithm once: what an earlier one has left must not stay.
        for gauge in self.gauges.iter_mut().filter(|gauge| is_grd || !gauge.drops_none) {
            if gauge.dropping == Some(probability) {
                continue;
            }
            match gates.set_drop(&gauge.place, probability) {
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
