//! Acceptors: the register of promises, and what follows from several of them.

use alloc::vec::Vec;

use super::{
    super::{
        MemberId,
        message::{ACCEPTORS_MAX, Body, Epoch, Promise, Propose},
    },
    Event, Share,
};
use crate::units::Nanos;

/// A member that is an acceptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acceptor {
    /// The member.
    pub id: MemberId,
    /// Its votes. With as many on both sides of a cut, both go on with what they hold. With one more vote for
    /// one acceptor, its side takes what the other's held.
    pub votes: u32,
}

/// The promises that an acceptor must not forget.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    /// The newest epoch that it promised.
    pub promised: Epoch,
    /// The epoch that it had promised before that one.
    pub before: Epoch,
}

/// An acceptor's own promise.
#[derive(Debug)]
pub(super) struct Register {
    /// Its index among the acceptors.
    pub place: usize,
    saved: Saved,
    /// The promises that are stored.
    stored: Saved,
}

impl Register {
    pub fn new(place: usize, saved: Saved) -> Self {
        Self { place, saved, stored: saved }
    }

    #[cfg(test)]
    pub fn saved(&self) -> Saved {
        self.saved
    }

    pub fn promised(&self) -> Epoch {
        self.saved.promised
    }

    pub fn on_stored(&mut self, saved: Saved) {
        self.stored = saved;
    }

    pub fn is_stored(&self) -> bool {
        self.stored == self.saved
    }

    /// Promises `epoch` unless a newer one is promised: returns what was promised before it.
    fn promise(&mut self, epoch: Epoch) -> Option<Epoch> {
        if epoch < self.saved.promised {
            return None;
        }
        if epoch > self.saved.promised {
            self.saved = Saved { promised: epoch, before: self.saved.promised };
        }
        Some(self.saved.before)
    }
}

/// For each acceptor, the latest time of the own clock at which it had promised nothing newer than the epoch
/// in question.
#[derive(Debug, Clone)]
pub(super) struct Freshness(Vec<Option<Nanos>>);

impl Freshness {
    pub fn new(acceptors: usize) -> Self {
        Self(alloc::vec![None; acceptors])
    }

    pub fn learn(&mut self, place: usize, at: Nanos) {
        if let Some(known) = self.0.get_mut(place) {
            *known = Some(known.map_or(at, |known| known.max(at)));
        }
    }

    /// How long ago, in microseconds, rounded up.
    pub fn ages_us(&self, now: Nanos) -> Vec<Option<u32>> {
        let age = |at: &Nanos| u32::try_from(now.0.saturating_sub(at.0).div_ceil(1_000)).ok();
        self.0.iter().map(|at| at.as_ref().and_then(age)).collect()
    }
}

/// Votes.
#[derive(Debug)]
pub(super) struct Quorum {
    votes: Vec<u64>,
    all: u64,
}

impl Quorum {
    pub fn new(acceptors: &[Acceptor]) -> Self {
        let votes: Vec<_> = acceptors.iter().map(|acceptor| u64::from(acceptor.votes)).collect();
        Self { all: votes.iter().sum(), votes }
    }

    /// More than half: enough to begin an epoch.
    pub fn begins(&self, places: u16) -> bool {
        let votes = self.votes.iter().enumerate();
        let sum: u64 = votes.filter(|(i, _)| places >> i & 1 == 1).map(|(_, votes)| votes).sum();
        2 * sum > self.all
    }

    /// The latest time at or after which acceptors with at least half of the votes had promised nothing
    /// newer.
    pub fn lease_since(&self, fresh: &Freshness) -> Option<Nanos> {
        let mut times = [(Nanos(0), 0u64); ACCEPTORS_MAX];
        let mut count = 0;
        for (at, votes) in fresh.0.iter().zip(&self.votes).take(ACCEPTORS_MAX) {
            if let Some(at) = at {
                times[count] = (*at, *votes);
                count += 1;
            }
        }
        times[..count].sort_unstable_by(|a, b| b.cmp(a));
        let mut sum = 0;
        times[..count].iter().find_map(|(at, votes)| {
            sum += votes;
            (2 * sum >= self.all).then_some(*at)
        })
    }
}

impl Share {
    pub(super) fn promise(&mut self, epoch: Epoch) -> Option<Epoch> {
        let register = self.register.as_mut()?;
        let known = register.saved;
        let before = register.promise(epoch);
        if register.saved != known {
            self.events.push_back(Event::Store(register.saved));
            self.newest = self.newest.max(epoch);
        }
        before
    }

    /// An acceptor is asked for its promise.
    pub(super) fn on_propose(&mut self, from: MemberId, incarnation: u64, propose: &Propose) {
        let Propose { epoch, number, poll } = *propose;
        let Some(register) = &self.register else { return };
        if epoch.leader != from {
            return;
        }
        let promised = register.promised();
        let before = if poll {
            // A vote for another is a vote against the leader that answers.
            let free = self.fresh_epoch().leader == from || self.misses_leader();
            (epoch > promised && free).then_some(promised)
        } else {
            self.promise(epoch)
        };
        self.newest = self.newest.max(promised);
        let promise = Promise {
            epoch,
            to_incarnation: incarnation,
            number,
            poll,
            granted: before.is_some(),
            before: before.unwrap_or(promised),
        };
        self.send(from, Body::Promise(promise));
    }

    /// Whether a leader was silent for so long that it may be dead.
    pub(super) fn misses_leader(&self) -> bool {
        let silence = self.now.0.saturating_sub(self.heard.0);
        self.audit.is_none()
            && (self.fresh_epoch() == Epoch::NONE || silence > self.options.suspect.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn acceptors(votes: &[u32]) -> Vec<Acceptor> {
        let acceptor =
            |(i, votes): (usize, &u32)| Acceptor { id: MemberId(i as u32), votes: *votes };
        votes.iter().enumerate().map(acceptor).collect()
    }

    proptest! {
        /// Acceptors that keep a lease alive and acceptors that begin an epoch have one in common.
        #[test]
        fn half_and_more_than_half_meet(
            votes in prop::collection::vec(0u32..5, 1..=ACCEPTORS_MAX), one: u16, other: u16,
        ) {
            prop_assume!(votes.iter().any(|votes| *votes > 0));
            let quorum = Quorum::new(&acceptors(&votes));
            let mut fresh = Freshness::new(votes.len());
            (0..votes.len()).filter(|i| one >> i & 1 == 1).for_each(|i| fresh.learn(i, Nanos(5)));
            if quorum.lease_since(&fresh).is_some() && quorum.begins(other) {
                prop_assert!(one & other & ((1 << votes.len()) - 1) != 0);
            }
        }

        /// The time of a lease is one at which half of the votes were still valid.
        #[test]
        fn a_lease_counts_from_the_time_of_half(
            known in prop::collection::vec((0u32..5, prop::option::of(0u64..100)), 1..=ACCEPTORS_MAX),
        ) {
            let votes: Vec<_> = known.iter().map(|(votes, _)| *votes).collect();
            let quorum = Quorum::new(&acceptors(&votes));
            let mut fresh = Freshness::new(known.len());
            for (i, (_, at)) in known.iter().enumerate() {
                at.iter().for_each(|at| fresh.learn(i, Nanos(*at)));
            }
            let all: u32 = votes.iter().sum();
            let at_least = |time: u64| -> u32 {
                known.iter().filter(|(_, at)| at.is_some_and(|at| at >= time)).map(|(v, _)| v).sum()
            };
            let found = quorum.lease_since(&fresh).map(|at| at.0);
            let model = (0..100u64).rev().find(|time| 2 * at_least(*time) >= all && known.iter().any(
                |(_, at)| at.is_some_and(|at| at >= *time)));
            prop_assert_eq!(found, model);
        }
    }
}
