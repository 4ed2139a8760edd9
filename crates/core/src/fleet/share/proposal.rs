//! Proposals: how an acceptor begins an epoch.
//!
//! It first asks whether the others would promise, which commits nobody. An acceptor that is cut off, or
//! alone in missing the leader, must not end the existing leases.

use super::{
    super::{
        MemberId,
        message::{Body, Epoch, Promise, Propose},
    },
    Audit, Event, Holding, Share,
};
use crate::units::Nanos;

/// Indexes of acceptors, a bit for each.
type Places = u16;

#[derive(Debug)]
enum Phase {
    /// Asks whether they would promise: those that would.
    Poll(Places),
    /// Asks for promises: those that gave one, and those of them that had never given any.
    Collect(Places, Places),
}

/// An epoch that may begin.
#[derive(Debug)]
pub(super) struct Proposal {
    pub epoch: Epoch,
    phase: Phase,
    pub due: Nanos,
}

impl Share {
    /// An acceptor that misses the leader proposes itself; the next after the leader in the group's order
    /// first.
    pub(super) fn watch_leader(&mut self) {
        let Some(register) = &self.register else { return };
        if self.proposal.is_some() || self.leaving || !self.misses_leader() {
            return;
        }
        let acceptors = &self.options.acceptors;
        let of = acceptors.iter().position(|acceptor| acceptor.id == self.newest.leader);
        let first = if self.newest == Epoch::NONE { 0 } else { of.map_or(0, |of| of + 1) };
        let rank = (register.place + acceptors.len() - first % acceptors.len()) % acceptors.len();
        let patience = self.options.interval.0.saturating_mul(2 * rank as u64);
        let suspect = if self.fresh_epoch() == Epoch::NONE { 0 } else { self.options.suspect.0 };
        if self.now.0.saturating_sub(self.heard.0) >= patience.saturating_add(suspect) {
            self.propose();
        }
    }

    /// Proposes an epoch newer than all known.
    pub(super) fn propose(&mut self) {
        let Some(register) = &self.register else { return };
        let newest = self.newest.max(register.promised());
        let epoch = Epoch { number: newest.number.saturating_add(1), leader: self.options.id };
        let phase = Phase::Poll(1 << register.place);
        self.proposal = Some(Proposal { epoch, phase, due: self.now });
    }

    /// Whether there is still a reason for an epoch: a leader that audits again has one.
    fn may_propose(&self) -> bool {
        self.audit.is_some() || self.misses_leader()
    }

    /// Continues a proposal as far as possible now.
    pub(super) fn run_proposal(&mut self) {
        self.pass_phase();
        let Some(proposal) = &self.proposal else { return };
        let poll = matches!(proposal.phase, Phase::Poll(_));
        let epoch = proposal.epoch;
        if epoch < self.newest || (poll && !self.may_propose()) {
            // Another was quicker, or the leader lives.
            self.proposal = None;
            return;
        }
        if self.now < proposal.due {
            return;
        }
        let number = self.number();
        let own = self.options.id;
        for at in 0..self.options.acceptors.len() {
            let to = self.options.acceptors[at].id;
            if to != own {
                self.send(to, Body::Propose(Propose { epoch, number, poll }));
            }
        }
        if let Some(proposal) = &mut self.proposal {
            proposal.due = Nanos(self.now.0.saturating_add(self.options.interval.0 / 2).max(1));
        }
    }

    fn pass_phase(&mut self) {
        let (Some(proposal), Some(register)) = (&mut self.proposal, &self.register) else { return };
        let (epoch, place) = (proposal.epoch, register.place);
        if let Phase::Poll(places) = proposal.phase {
            if !self.quorum.begins(places) {
                return;
            }
            let Some(before) = self.promise(epoch) else {
                self.proposal = None;
                return;
            };
            let never = Places::from(before == Epoch::NONE) << place;
            // Its own promise counts once it is stored.
            let phase = Phase::Collect(0, never);
            self.proposal = Some(Proposal { epoch, phase, due: self.now });
        }
        let Some(Proposal { phase: Phase::Collect(places, never), .. }) = self.proposal else {
            return;
        };
        let places = places | Places::from(self.is_stored()) << place;
        if self.quorum.begins(places) && self.newest <= epoch {
            // Where more than half had never promised anything, there are no older leases.
            let first = self.quorum.begins(never);
            self.begin(epoch, first);
        }
    }

    /// The epoch begins: the leader joins first, and calls all members that it knows.
    fn begin(&mut self, epoch: Epoch, first: bool) {
        let wait = if first { Nanos(0) } else { self.options.stretched(self.options.lease) };
        let end = Nanos(self.now.0.saturating_add(wait.0));
        let held = self.usable();
        self.heed(epoch);
        self.proposal = None;
        self.audit = Some(Audit::new(epoch, self.now, end, held));
        self.holding = Holding { epoch, held, given: 0, announced: 0, taken: 0 };
        self.heard = self.now;
        self.due = self.now;
        self.events.push_back(Event::Entered(epoch));
        let since = self.now.0.saturating_sub(self.options.suspect.0);
        self.seen.retain(|_, at| at.0 >= since);
        let acceptors = self.options.acceptors.iter().map(|acceptor| (acceptor.id, self.now));
        self.seen.extend(acceptors);
        self.seen.remove(&self.options.id);
        let all: alloc::vec::Vec<MemberId> = self.seen.keys().copied().collect();
        for to in all {
            self.send(to, Body::Call(epoch));
        }
    }

    /// An acceptor answers.
    pub(super) fn on_promise(&mut self, from: MemberId, promise: &Promise) {
        if !promise.granted {
            self.newest = self.newest.max(promise.before);
            return;
        }
        let place = self.options.acceptors.iter().position(|acceptor| acceptor.id == from);
        let asked = self.asked_at(promise.number);
        let (Some(place), Some(_)) = (place, asked) else { return };
        let Some(proposal) = &mut self.proposal else { return };
        if promise.to_incarnation != self.options.incarnation || proposal.epoch != promise.epoch {
            return;
        }
        match &mut proposal.phase {
            Phase::Poll(places) if promise.poll => *places |= 1 << place,
            Phase::Collect(places, never) if !promise.poll => {
                *places |= 1 << place;
                *never |= Places::from(promise.before == Epoch::NONE) << place;
            }
            _ => {}
        }
    }
}
