//! Limits that leave their group. A limit that does not take another rate at that moment keeps the one that
//! the group has lent it, so the group counts it until the limit has taken it, or has fallen to what is the
//! host's in any case. Until then `share` gives nobody what the limit still passes, and no other group of the
//! host sets it.

use std::collections::{BTreeMap, BTreeSet};

use tidegate_core::{Nanos, Rate};

use super::{
    super::{
        backend::{GroupBackend, Place},
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

/// A limit that has left its group and may still have what the group lent it.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) gauge: Gauge,
    /// The rate to which it falls when its lease ends.
    then: Rate,
    to: Rate,
    /// Another group has it, and raises it as far as its own limits leave room.
    is_grouped: bool,
    /// That group may set it.
    is_passed: bool,
}

/// What became of a limit that has left its group.
enum Release {
    /// It has to be asked again.
    Waits,
    /// Another group may set it. It still has a part of what is the host's.
    Passed,
    /// The limit took the rate of the file, is gone, or has one that somebody else has set.
    Over,
}

impl Outgoing {
    /// The most that the limit passes, in bit/s.
    fn claim_bit_s(&self, now: Nanos, own: u64) -> u64 {
        self.gauge.claim_bit_s(now, None, self.then, own)
    }

    /// Tries to set the limit, and says what became of it.
    fn release<G: GroupBackend>(&mut self, now: Nanos, backend: &mut G) -> Release {
        if self.gauge.gone {
            return Release::Over;
        }
        if !self.gauge.is_open(now) {
            return Release::Waits;
        }
        let lent = self.gauge.lent_rates();
        self.gauge.measure(now, backend);
        if self.gauge.gone || !self.gauge.is_of(&lent) {
            // What fails here the next group, or who takes the limit off, does again.
            let _ = backend.leave(&self.gauge.place);
            return Release::Over;
        }
        let is_low = self.gauge.in_force(now).is_some_and(|is| is <= self.to);
        if self.is_grouped && is_low {
            return Release::Passed;
        }
        let doubt = self.gauge.doubt;
        if !self.gauge.apply(now, backend, self.to, None) && !self.gauge.gone {
            // What was to be set is the limit's own, and not the group's any more.
            self.gauge.doubt = doubt;
            return Release::Waits;
        }
        let _ = backend.leave(&self.gauge.place);
        if self.is_grouped { Release::Passed } else { Release::Over }
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
            let then = apply::equal_part(&self.spec, count, gauge.ceiling);
            let to = elsewhere.own.get(&gauge.place).copied().unwrap_or(then);
            self.outgoing.push(Outgoing { gauge, then, to, is_grouped, is_passed: false });
        }
    }

    /// Tries to set the limits that have left. Those that refuse are asked again later. One that has
    /// passed to another group counts as long as others wait: what the host holds is only given back when
    /// all of them together have no more than the host's reserved share.
    pub fn release<G: GroupBackend>(&mut self, now: Nanos, backend: &mut G) {
        self.outgoing.retain_mut(|one| {
            let released = if one.is_passed { Release::Passed } else { one.release(now, backend) };
            one.is_passed = matches!(released, Release::Passed);
            !matches!(released, Release::Over)
        });
        if self.outgoing.iter().all(|one| one.is_passed) {
            self.outgoing.clear();
        }
    }

    /// The limits that have left and are not set yet.
    pub fn outgoing(&self) -> impl Iterator<Item = &Place> {
        self.outgoing.iter().filter(|one| !one.is_passed).map(|one| &one.gauge.place)
    }

    /// The most that limits which have left still pass, in bit/s.
    pub(super) fn outgoing_bit_s(&self, now: Nanos) -> u64 {
        let ended = self.outgoing.iter().filter(|one| one.gauge.has_ended(now)).count();
        let own = self.spec.alone_bit_s() / ended.max(1) as u64;
        self.outgoing.iter().map(|one| one.claim_bit_s(now, own)).sum()
    }

    /// Whether all limits that have left pass no more than the host's reserved share.
    pub fn has_released(&self, now: Nanos) -> bool {
        self.outgoing_bit_s(now) <= self.spec.alone_bit_s()
    }
}
