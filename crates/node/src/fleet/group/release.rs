//! Limits that leave their group. A gate that does not take another rate at that moment keeps the one that
//! the group has lent it, so the group counts it until the gate has taken it, or has fallen to what is the
//! host's in any case. Until then `share` gives nobody what the gate still passes, and no other group of the
//! host sets it.

use std::collections::{BTreeMap, BTreeSet};

use tidegate_core::{Nanos, Rate};

use super::{
    super::{
        gates::{Gates, Place},
        gauge::Gauge,
    },
    Control, Group, apply,
};

/// The limits that leave a group, by where they go.
#[derive(Debug, Clone, Default)]
pub struct Elsewhere {
    /// Limits that another group has now.
    pub grouped: BTreeSet<Place>,
    /// The rates of the file for those that no group has.
    pub own: BTreeMap<Place, Rate>,
}

/// A limit that has left its group, and whose gate may still have what the group lent it.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) gauge: Gauge,
    /// The rate to which it falls when its lease ends.
    then: Rate,
    /// The host's own part, which it has in any case, in bit/s.
    alone_bit_s: u64,
    /// The rate that it gets.
    to: Rate,
    /// Another group has it, and raises it as far as its own limits leave room.
    is_grouped: bool,
}

impl Outgoing {
    /// The most that the gate passes, in bit/s.
    pub(super) fn claim_bit_s(&self, now: Nanos) -> u64 {
        self.gauge.claim_bit_s(now, None, self.then)
    }

    /// Whether the gate passes no more than what is the host's in any case.
    fn has_fallen(&self, now: Nanos) -> bool {
        self.claim_bit_s(now) <= self.alone_bit_s
    }

    /// Tries to set the gate. True if the group has nothing more to do with it: the gate took the rate, is
    /// gone, or has one that somebody else has set.
    fn release<G: Gates>(&mut self, now: Nanos, gates: &mut G) -> bool {
        if self.gauge.gone {
            return true;
        }
        if !self.gauge.is_open(now) {
            return false;
        }
        let lent = self.gauge.lent_rates();
        self.gauge.measure(now, gates);
        if self.gauge.gone || !self.gauge.is_of(&lent) {
            // What fails here the next group, or who takes the limit off, does again.
            let _ = gates.leave(&self.gauge.place);
            return true;
        }
        let is_low = self.gauge.in_force(now).is_some_and(|is| is <= self.to);
        if self.is_grouped && is_low {
            return true;
        }
        let is_set = self.gauge.apply(now, gates, self.to, None) || self.gauge.gone;
        if is_set {
            let _ = gates.leave(&self.gauge.place);
        }
        is_set
    }
}

impl Group {
    /// Has limits leave, of `count`. With `share` one that another group has falls first to what is the
    /// host's in any case; the other algorithms leave it as it is.
    pub(super) fn send_away(&mut self, gauges: Vec<Gauge>, count: usize, elsewhere: &Elsewhere) {
        let shares = matches!(self.control, Control::Share(_));
        for gauge in gauges {
            let is_grouped = elsewhere.grouped.contains(&gauge.place);
            if !shares && is_grouped {
                continue;
            }
            let then = apply::then(&self.spec, count, gauge.ceiling);
            let to = elsewhere.own.get(&gauge.place).copied().unwrap_or(then);
            let alone_bit_s = self.spec.alone_bit_s();
            self.outgoing.push(Outgoing { gauge, then, alone_bit_s, to, is_grouped });
        }
    }

    /// Tries to set the gates of limits that have left. Those that refuse are asked again later.
    pub fn release<G: Gates>(&mut self, now: Nanos, gates: &mut G) {
        self.outgoing.retain_mut(|one| !one.release(now, gates));
    }

    /// The limits that have left, and whose gates are not set yet.
    pub fn outgoing(&self) -> impl Iterator<Item = &Place> {
        self.outgoing.iter().map(|one| &one.gauge.place)
    }

    /// Whether each limit that has left passes no more than what is the host's in any case.
    #[must_use]
    pub fn has_released(&self, now: Nanos) -> bool {
        self.outgoing.iter().all(|one| one.has_fallen(now))
    }
}
