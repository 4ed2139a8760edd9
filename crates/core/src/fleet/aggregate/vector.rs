//! A versioned vector: every member's value, exactly, spread by sending changes.
//!
//! A member raises the version of its own entry with each change; of two entries the higher version is kept.
//! So loss, duplicates and reordering do no harm, and there is no mass to lose. An entry that is new to a
//! member is passed on in its next [`TELL_EXTRA`] + log2(members) messages, newest first. [`REPEAT`] others
//! go along, in turn, so that in time every member has everything.
//!
//! O(members) memory, at most [`VECTOR_MAX`] of them. In a full vector a new member takes the place of the
//! one that has left and was silent for longest. Where none has left it is refused, and counted
//! ([`Vector::refused`]). After a leave that is forgotten, older news of its member may still come, from
//! another that was cut off meanwhile. So a member that took such a place counts only once its version has
//! grown here: that of a living one does in its next interval. Until then its place is free for others.
//!
//! Versions must grow over restarts too: a caller without storage starts at a clock's reading.

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
    /// False: it took the place of another, and no later version has come.
    lives: bool,
}

impl Known {
    fn counts(&self) -> bool {
        self.lives && self.value >= 0.0
    }
}

/// A member's view of the vector. See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub struct Vector {
    own: MemberId,
    entries: BTreeMap<MemberId, Known>,
    refused: u64,
    refused_at: Option<Nanos>,
}

impl Vector {
    /// A view that knows only its own value, 0 at `version`.
    #[must_use]
    pub fn new(own: MemberId, version: u64, now: Nanos) -> Self {
        let known = Known { version, value: 0.0, heard: now, reports: 0, lives: true };
        Self { own, entries: BTreeMap::from([(own, known)]), refused: 0, refused_at: None }
    }

    /// Sets its own value. An unchanged value is also a new version: a sign of life.
    pub fn set_own(&mut self, now: Nanos, value: f32) {
        let version = self.entries.get(&self.own).map_or(0, |known| known.version);
        let version = version.saturating_add(1);
        self.entries
            .insert(self.own, Known { version, value, heard: now, reports: 0, lives: true });
    }

    /// Reports that it has left, so that nothing is reserved for it. [`Vector::set_own`] revokes this.
    pub fn leave(&mut self, now: Nanos) {
        self.set_own(now, LEFT);
    }

    /// Takes entries that a peer sent; old ones are ignored.
    pub fn on_values(&mut self, now: Nanos, entries: &[Entry]) {
        let own = self.own;
        for entry in entries.iter().filter(|entry| entry.member != own) {
            let known = self.entries.get(&entry.member).map(|known| known.version);
            let lives = match known {
                Some(version) if version >= entry.version => continue,
                Some(_) => true,
                None if self.entries.len() < VECTOR_MAX => true,
                // Nothing is reserved for a member that has left and is not known.
                None if entry.value < 0.0 => continue,
                None if self.make_room() => false,
                None => {
                    self.refused += 1;
                    self.refused_at = Some(now);
                    continue;
                }
            };
            let Entry { member, version, value } = *entry;
            self.entries.insert(member, Known { version, value, heard: now, reports: 0, lives });
        }
    }

    /// Forgets one that does not count, of these the one that was silent for longest; false if there is none.
    fn make_room(&mut self) -> bool {
        let free =
            self.entries.iter().filter(|(member, known)| **member != self.own && !known.counts());
        let longest = free.min_by_key(|(member, known)| (known.heard, **member));
        let Some(longest) = longest.map(|(member, _)| *member) else { return false };
        self.entries.remove(&longest).is_some()
    }

    /// How many entries of members beyond [`VECTOR_MAX`] were refused so far, and when last.
    #[must_use]
    pub fn refused(&self) -> (u64, Option<Nanos>) {
        (self.refused, self.refused_at)
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
        member != self.own && known.counts()
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

    fn entry(member: u32, version: u64, value: f32) -> Entry {
        Entry { member: MemberId(member), version, value }
    }

    /// A vector that 600 members have joined and left in turn.
    fn crowded() -> Vector {
        let mut vector = Vector::new(MemberId(0), 1, Nanos(0));
        for member in 1..=600u32 {
            let at = Nanos(member.into());
            vector.on_values(at, &[entry(member, 10, 5.0)]);
            vector.on_values(at, &[entry(member, 11, LEFT)]);
        }
        assert_eq!((vector.entries.len(), vector.refused()), (VECTOR_MAX, (0, None)));
        vector
    }

    #[test]
    fn those_that_left_make_room_for_those_that_come() {
        let (now, fresh) = (Nanos(1_000), Nanos(5));
        let mut vector = crowded();
        vector.on_values(now, &[entry(601, 10, 7.0)]);
        assert!(vector.news().contains(&entry(601, 10, 7.0)), "and is passed on");
        vector.on_values(now, &[entry(601, 11, 7.0)]);
        assert_eq!((vector.others(now, fresh), vector.silent(now, fresh)), (7.0, (1, 0)));
        assert_eq!(vector.entries.len(), VECTOR_MAX);
        // It may leave as well, and come back.
        vector.on_values(now, &[entry(601, 12, LEFT)]);
        assert_eq!(vector.silent(now, fresh), (0, 0));
        vector.on_values(now, &[entry(601, 13, 3.0)]);
        assert_eq!(vector.others(now, fresh), 3.0);
    }

    /// A member that was cut off for long still passes on what another said before it left.
    #[test]
    fn old_news_of_one_that_was_forgotten_gives_it_nothing() {
        let (now, fresh) = (Nanos(1_000), Nanos(5));
        let mut vector = crowded();
        assert!(!vector.entries.contains_key(&MemberId(1)), "it is forgotten");
        for old in [entry(1, 10, 5.0), entry(1, 10, 5.0), entry(2, 9, 5.0)] {
            vector.on_values(now, &[old]);
            assert_eq!((vector.others(now, fresh), vector.silent(now, fresh)), (0.0, (0, 0)));
            assert_eq!(vector.unheard(Nanos(5_000), fresh).count(), 0);
        }
        // Its place is free for those that live, however many such there are.
        for member in 3..=600 {
            vector.on_values(now, &[entry(member, 10, 5.0)]);
        }
        for version in [10, 11] {
            vector.on_values(now, &[entry(601, version, 7.0)]);
        }
        assert_eq!((vector.others(now, fresh), vector.silent(now, fresh)), (7.0, (1, 0)));
        assert_eq!(vector.refused(), (0, None));
        // A leave takes nobody's place.
        let before = vector.clone();
        vector.on_values(now, &[entry(10_000, 11, LEFT)]);
        assert_eq!(vector, before);
        // It lives after all.
        for version in [20, 21] {
            vector.on_values(now, &[entry(1, version, 2.0)]);
        }
        assert_eq!(vector.others(now, fresh), 9.0);
    }

    #[test]
    fn more_than_are_known_at_once_are_refused_and_counted() {
        let mut vector = Vector::new(MemberId(0), 1, Nanos(0));
        for member in 1..=600u32 {
            vector.on_values(Nanos(member.into()), &[entry(member, 10, 1.0)]);
        }
        let others = VECTOR_MAX - 1;
        assert_eq!(vector.others(Nanos(600), Nanos(600)), others as f64);
        assert_eq!(vector.refused(), (600 - others as u64, Some(Nanos(600))));
        // A new one takes the place of the first that leaves.
        vector.on_values(Nanos(700), &[entry(9, 11, LEFT)]);
        for version in [10, 11] {
            vector.on_values(Nanos(700), &[entry(600, version, 3.0)]);
        }
        assert_eq!(vector.others(Nanos(700), Nanos(700)), others as f64 + 2.0);
        assert_eq!(vector.refused(), (600 - others as u64, Some(Nanos(600))));
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
