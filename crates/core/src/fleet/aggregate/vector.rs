//! A versioned vector: every member's value, exactly, spread by sending changes.
//!
//! A member raises the version of its own entry with each change; of two entries the higher version is kept.
//! So loss, duplicates and reordering do no harm, and there is no mass to lose. An entry that is new to a
//! member is passed on in its next [`TELL_EXTRA`] + log2(members) messages, newest first. [`REPEAT`] others
//! go along, in turn, so that in time every member has everything.
//!
//! O(members) memory, at most [`VECTOR_MAX`] of them. Versions must grow over restarts too: a caller without
//! storage starts at a clock's reading.

use alloc::{collections::BTreeMap, vec::Vec};

use super::super::{
    MemberId,
    message::{ENTRIES_MAX, Entry},
};
use crate::units::Nanos;

/// The most members of a vector.
pub const VECTOR_MAX: usize = 512;
/// How often an entry is passed on, beyond log2 of the members.
pub const TELL_EXTRA: u32 = 2;
/// How many old entries go with each message.
pub const REPEAT: usize = 2;

/// The value of a member that has left: rates and weights are never below zero.
const LEFT: f32 = -1.0;

#[derive(Debug, Clone, Copy, PartialEq)]
struct Known {
    version: u64,
    value: f32,
    heard: Nanos,
    reports: u32,
}

impl Known {
    fn has_left(&self) -> bool {
        self.value < 0.0
    }
}

/// A member's view of the vector. See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub struct Vector {
    own: MemberId,
    entries: BTreeMap<MemberId, Known>,
}

impl Vector {
    /// A view that knows only its own value, 0 at `version`.
    #[must_use]
    pub fn new(own: MemberId, version: u64, now: Nanos) -> Self {
        let known = Known { version, value: 0.0, heard: now, reports: 0 };
        Self { own, entries: BTreeMap::from([(own, known)]) }
    }

    /// Sets its own value. An unchanged value is also a new version: a sign of life.
    pub fn set_own(&mut self, now: Nanos, value: f32) {
        let entry = self.entries.entry(self.own);
        let known = entry.or_insert(Known { version: 0, value, heard: now, reports: 0 });
        *known = Known { version: known.version.saturating_add(1), value, heard: now, reports: 0 };
    }

    /// Reports that it has left, so that nothing is reserved for it. [`Vector::set_own`] revokes this.
    pub fn leave(&mut self, now: Nanos) {
        self.set_own(now, LEFT);
    }

    /// Takes entries that a peer sent; old ones are ignored.
    pub fn on_values(&mut self, now: Nanos, entries: &[Entry]) {
        for entry in entries.iter().filter(|entry| entry.member != self.own) {
            let fresh =
                Known { version: entry.version, value: entry.value, heard: now, reports: 0 };
            let known = self.entries.get(&entry.member).map(|known| known.version);
            let room = known.is_some() || self.entries.len() < VECTOR_MAX;
            if room && known.is_none_or(|version| version < entry.version) {
                self.entries.insert(entry.member, fresh);
            }
        }
    }

    /// The entries to send to a peer now: at most [`ENTRIES_MAX`], those that were sent least first.
    pub fn news(&mut self) -> Vec<Entry> {
        let tell = self.entries.len().next_power_of_two().trailing_zeros() + TELL_EXTRA;
        let mut order: Vec<_> = self
            .entries
            .iter()
            .filter(|(member, _)| **member != self.own)
            .map(|(member, known)| (known.reports, core::cmp::Reverse(known.heard), *member))
            .collect();
        order.sort_unstable();
        let fresh = order.partition_point(|(reports, ..)| *reports < tell);
        order.truncate((fresh + REPEAT).min(ENTRIES_MAX - 1));
        order.push((0, core::cmp::Reverse(Nanos(0)), self.own));
        let mut news = Vec::with_capacity(order.len());
        for (_, _, member) in order {
            if let Some(known) = self.entries.get_mut(&member) {
                known.reports = known.reports.saturating_add(1);
                news.push(Entry { member, version: known.version, value: known.value });
            }
        }
        news
    }

    /// The sum of the values of all others with news within `fresh`. Older values do not count: they would
    /// hold capacity for a member that may be gone.
    #[must_use]
    pub fn others(&self, now: Nanos, fresh: Nanos) -> f64 {
        let since = now.0.saturating_sub(fresh.0);
        let of = |(member, known): (&MemberId, &Known)| {
            let counts = self.counts(*member, known) && known.heard.0 >= since;
            if counts { f64::from(known.value) } else { 0.0 }
        };
        self.entries.iter().map(of).sum()
    }

    /// How many other members are known, and how many of them had no news within `fresh`. In Cloud Control
    /// each limiter keeps `1/N` of the limit free for each of the latter.
    #[must_use]
    pub fn silent(&self, now: Nanos, fresh: Nanos) -> (usize, usize) {
        let others = self.entries.iter().filter(|(member, known)| self.counts(**member, known));
        (others.count(), self.unheard(now, fresh).count())
    }

    /// The members that had no news within `fresh`, and have not left.
    pub fn unheard(&self, now: Nanos, fresh: Nanos) -> impl Iterator<Item = MemberId> {
        let since = now.0.saturating_sub(fresh.0);
        let of = move |(member, known): (&MemberId, &Known)| {
            (self.counts(*member, known) && known.heard.0 < since).then_some(*member)
        };
        self.entries.iter().filter_map(of)
    }

    fn counts(&self, member: MemberId, known: &Known) -> bool {
        member != self.own && !known.has_left()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever order, loss and duplicates: the last version counts, and the sum is exact.
        #[test]
        fn is_exact_in_any_order(
            reports in prop::collection::vec((1u32..9, 1u64..20), 1..200),
        ) {
            let value = |member: u32, version: u64| (member * 100 + version as u32) as f32;
            let mut vector = Vector::new(MemberId(0), 1, Nanos(0));
            let mut last = BTreeMap::new();
            for (member, version) in reports {
                let entry = Entry { member: MemberId(member), version, value: value(member, version) };
                vector.on_values(Nanos(1), &[entry, entry]);
                let newest = last.entry(member).or_insert(version);
                *newest = version.max(*newest);
            }
            let sum: f64 = last.iter().map(|(member, version)| f64::from(value(*member, *version))).sum();
            prop_assert_eq!(vector.others(Nanos(1), Nanos(5)), sum);
            prop_assert_eq!(vector.others(Nanos(10), Nanos(5)), 0.0);
            prop_assert_eq!(vector.silent(Nanos(10), Nanos(5)), (last.len(), last.len()));
        }
    }

    #[test]
    fn who_has_left_is_nobody_s_and_may_come_back() {
        let (one, fresh) = (MemberId(1), Nanos(5));
        let mut vector = Vector::new(MemberId(0), 1, Nanos(0));
        let mut other = Vector::new(one, 1, Nanos(0));
        other.set_own(Nanos(1), 7.0);
        vector.on_values(Nanos(1), &other.news());
        assert_eq!((vector.others(Nanos(1), fresh), vector.silent(Nanos(1), fresh)), (7.0, (1, 0)));
        other.leave(Nanos(2));
        vector.on_values(Nanos(2), &other.news());
        assert_eq!((vector.others(Nanos(2), fresh), vector.silent(Nanos(9), fresh)), (0.0, (0, 0)));
        assert!(vector.news().iter().any(|entry| entry.member == one), "and is passed on");
        other.set_own(Nanos(3), 2.0);
        vector.on_values(Nanos(3), &other.news());
        assert_eq!((vector.others(Nanos(3), fresh), vector.silent(Nanos(3), fresh)), (2.0, (1, 0)));
    }

    #[test]
    fn news_reach_all_in_few_rounds() {
        let n = 200u32;
        let mut fleet: Vec<_> = (0..n).map(|i| Vector::new(MemberId(i), 1, Nanos(0))).collect();
        for (i, vector) in fleet.iter_mut().enumerate() {
            vector.set_own(Nanos(0), i as f32);
        }
        let mut random = 5u64;
        for _ in 0..150 {
            for i in 0..n as usize {
                for _ in 0..2 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let to = (random >> 33) as usize % n as usize;
                    let news = fleet[i].news();
                    fleet[to].on_values(Nanos(0), &news);
                }
            }
        }
        let all: f64 = (0..n).map(f64::from).sum();
        for (i, vector) in fleet.iter().enumerate() {
            assert_eq!(vector.others(Nanos(0), Nanos(1)), all - i as f64);
        }
    }
}
