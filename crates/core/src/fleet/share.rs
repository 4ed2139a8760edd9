//! `share`: capacity that moves between members and is conserved, so that the local limits never add up to
//! more than the limit, whatever is lost, duplicated, reordered, delayed, cut or dead.
//!
//! **The floor.** [`ShareOptions::reserve_per_mille`] of the limit is divided by the largest number of
//! members; each always has that part. A member without contact to others may use it.
//!
//! **Epochs.** The rest is divided anew in each *epoch*. Some members are *acceptors*. Each acceptor
//! stores one number, the newest epoch it promised. An epoch begins when acceptors with more than half of the
//! votes have promised it to the acceptor that proposed it, its *leader*.
//!
//! **Leases.** A member may use what it holds in an epoch until `lease` after a moment of its own clock at
//! which acceptors with at least half of the votes had promised nothing newer. It learns that moment from
//! answers to its asks: they say how old their knowledge is, and the member counts from when it asked. No two
//! clocks are compared, only durations; clocks may run wrong by [`ShareOptions::rate_error_ppm`]. Half of the
//! votes and more than half have one acceptor in common. So when an epoch has begun, no lease of an older one
//! is renewed, and after `lease` (with the clocks' error) none is left.
//!
//! **Transfers.** Within an epoch capacity moves between a member and the leader only by totals: what I gave
//! you in this epoch, what I took. A giver lowers its own limit before it says so; a taker takes the
//! difference to what it took before. A lost message is repaired by the next, and a duplicate adds nothing.
//! The leader knows all flows and demands, so it decides who should hold what ([`super::level`]).
//!
//! **Audits.** The leader of a new epoch has nothing. It calls the members. A member that comes stops moving
//! capacity in its old epoch, reports what it holds there under a valid lease, and gets that in the new one.
//! When all older leases must have ended, and acceptors with at least half of the votes say afterwards that
//! they promised nothing newer, the leader has all that nobody brought: what dead members held, and what was
//! in transit. If more than half have never promised anything there is nothing to wait for.
//!
//! `docs/fleet-design.md` has the proof that this is safe. Work and memory: O(1) for a member, O(members) for
//! a leader, O(members log members) for it in each interval.
//!
//! After every call a caller must (1) store what [`Event::Store`] says and call [`Share::on_stored`] once
//! that is done, (2) apply [`Share::grant`], with its end, and only then (3) send all that
//! [`Share::poll_transmit`] gives. Until (1) is done nothing relies on the promise: no message contains it,
//! and this member begins no epoch with it. If (2) failed, messages give nothing that relies on it: the
//! member goes on as if it had given nothing since. The backend itself must fall back to the floor at the
//! grant's end, so that a process that stalls does not exceed it. The clock must also count while the host
//! sleeps.

use alloc::{
    collections::{BTreeMap, VecDeque},
    vec::Vec,
};

use super::{
    MemberId,
    level::Want,
    message::{ACCEPTORS_MAX, Answer, Ask, Body, Epoch, Message},
};
use crate::units::{Nanos, Rate};

mod acceptor;
mod audit;
mod proposal;

use acceptor::{Freshness, Quorum, Register};
use audit::Audit;
use proposal::Proposal;

pub use acceptor::{Acceptor, Saved};

/// The most members of a group.
pub const MEMBERS_MAX: u32 = 65_536;
/// Upper bound of a lease, and of any wait for a member.
pub const TIME_MAX: Nanos = Nanos(3_600_000_000_000);
/// How many messages may wait for a promise to be stored; beyond, the oldest are dropped.
const WAITING_MAX: usize = 64;
/// How many asks are remembered; an answer to an older one renews nothing.
const ASKS_MAX: usize = 32;
/// Clamp of the clocks' error: 10 %.
const RATE_ERROR_MAX_PPM: u32 = 100_000;

/// The options of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareOptions {
    /// The group; the same at all members.
    pub group: u32,
    /// This member.
    pub id: MemberId,
    /// The incarnation of this member: greater after each restart.
    pub incarnation: u64,
    /// The limit of all together; the same at all members.
    pub limit: Rate,
    /// The part of the limit, in thousandths, that is the floor of all members; the same at all members.
    pub reserve_per_mille: u16,
    /// The largest number of members; the same at all members.
    pub members_max: u32,
    /// The acceptors, in the same order at all members; at most [`ACCEPTORS_MAX`].
    pub acceptors: Vec<Acceptor>,
    /// How often a member asks.
    pub interval: Nanos,
    /// How long a lease lasts; the same at all members.
    pub lease: Nanos,
    /// A member that is silent for this long counts as dead.
    pub suspect: Nanos,
    /// The largest error of any clock's rate, in millionths, at most 10 %; the same at all members.
    pub rate_error_ppm: u32,
}

/// Why options are invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// No acceptor, too many, one twice, or none with a vote.
    #[error("name 1 to {ACCEPTORS_MAX} different acceptors, at least one with a vote")]
    Acceptors,
    /// Too few or too many members.
    #[error("members_max is {0}: give 1 to {MEMBERS_MAX}")]
    Members(u32),
    /// More is reserved than there is.
    #[error("reserve_per_mille is {0}: give 0 to 1000")]
    Reserve(u16),
    /// Times that do not fit together.
    #[error("give an interval above zero, and lease and suspect from twice that to an hour")]
    Times,
    /// An impossible clock error.
    #[error("rate_error_ppm is {0}: give at most {RATE_ERROR_MAX_PPM}")]
    RateError(u32),
}

impl ShareOptions {
    fn check(&self) -> Result<(), OptionsError> {
        let acceptors = &self.acceptors;
        let twice =
            |(i, acceptor): (usize, &Acceptor)| acceptors[..i].iter().any(|k| k.id == acceptor.id);
        let votes = acceptors.iter().any(|acceptor| acceptor.votes > 0);
        if acceptors.len() > ACCEPTORS_MAX || !votes || acceptors.iter().enumerate().any(twice) {
            return Err(OptionsError::Acceptors);
        }
        if !(1..=MEMBERS_MAX).contains(&self.members_max) {
            return Err(OptionsError::Members(self.members_max));
        }
        if self.reserve_per_mille > 1_000 {
            return Err(OptionsError::Reserve(self.reserve_per_mille));
        }
        let times = self.interval.0.saturating_mul(2)..=TIME_MAX.0;
        let fit = times.contains(&self.lease.0) && times.contains(&self.suspect.0);
        if self.interval.0 == 0 || !fit {
            return Err(OptionsError::Times);
        }
        if self.rate_error_ppm > RATE_ERROR_MAX_PPM {
            return Err(OptionsError::RateError(self.rate_error_ppm));
        }
        Ok(())
    }

    /// The floor of each member, in bit/s.
    #[must_use]
    pub fn floor_bit_s(&self) -> u64 {
        let reserve = u128::from(self.limit.bit_s()) * u128::from(self.reserve_per_mille) / 1_000;
        (reserve / u128::from(self.members_max.max(1))) as u64
    }

    /// The capacity that an epoch divides, in bit/s.
    #[must_use]
    pub fn divided_bit_s(&self) -> u64 {
        self.limit.bit_s() - self.floor_bit_s() * u64::from(self.members_max)
    }

    /// The longest that a duration of another clock may be on this one; apply it once for each of the two
    /// clocks.
    fn stretched(&self, time: Nanos) -> Nanos {
        let once = |ns: u128| ns + ns * u128::from(self.rate_error_ppm) / 1_000_000 + 1;
        Nanos(u64::try_from(once(once(time.0.into()))).unwrap_or(u64::MAX))
    }
}

/// The rate that a member may use, in bit/s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Until the end.
    pub bit_s: u64,
    /// The end, by the member's own clock.
    pub until: Nanos,
    /// The rate from then on.
    pub floor_bit_s: u64,
}

impl Grant {
    /// The rate that may be used at `now`, in bit/s.
    #[must_use]
    pub fn at(&self, now: Nanos) -> u64 {
        if now < self.until { self.bit_s } else { self.floor_bit_s }
    }
}

/// An event for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// To be stored, then passed to [`Share::on_stored`], and given to [`Share::new`] after a restart. Only
    /// at acceptors.
    Store(Saved),
    /// The member takes part in this epoch from now on.
    Entered(Epoch),
    /// The member has nothing left and may be stopped.
    Left,
}

/// A message and its receiver.
#[derive(Debug, Clone, PartialEq)]
pub struct Transmit {
    /// The receiver.
    pub to: MemberId,
    /// The message.
    pub message: Message,
}

/// Whether a message may be sent only once the last promise is stored.
fn relies_on_promise(body: &Body) -> bool {
    match body {
        Body::Promise(promise) => !promise.poll,
        Body::Propose(propose) => !propose.poll,
        Body::Call(_) => true,
        _ => false,
    }
}

/// The capacity that a member holds in an epoch.
#[derive(Debug, Clone, Copy)]
struct Holding {
    epoch: Epoch,
    held: u64,
    /// Totals with the leader; both zero at the leader itself.
    given: u64,
    /// The part of `given` that a message has reported.
    announced: u64,
    taken: u64,
}

/// A member. See the [module](self).
#[derive(Debug)]
pub struct Share {
    options: ShareOptions,
    quorum: Quorum,
    holding: Holding,
    /// When each acceptor had promised nothing newer than the epoch of the call. What is known of an older
    /// epoch is true of a newer one too.
    fresh: Freshness,
    until: Nanos,
    /// The newest epoch to which the member reported what it holds; it moves nothing in older ones.
    called: Epoch,
    newest: Epoch,
    want: Want,
    leaving: bool,
    numbers: u64,
    asks: [(u64, Nanos); ASKS_MAX],
    asked: Nanos,
    due: Nanos,
    /// When the leader last answered.
    heard: Nanos,
    register: Option<Register>,
    proposal: Option<Proposal>,
    audit: Option<Audit>,
    /// At an acceptor: when members asked last, so that they can be called.
    seen: BTreeMap<MemberId, Nanos>,
    now: Nanos,
    outbox: VecDeque<Transmit>,
    /// Messages that rely on a promise that is not stored yet.
    waiting: VecDeque<Transmit>,
    events: VecDeque<Event>,
}

impl Share {
    /// A member that holds nothing yet. `saved` is what it stored last; `None` only if it never ran before:
    /// an acceptor that forgets its promise can break the limit.
    ///
    /// # Errors
    /// If the options do not fit together; see [`OptionsError`].
    pub fn new(
        now: Nanos,
        options: ShareOptions,
        saved: Option<Saved>,
    ) -> Result<Share, OptionsError> {
        options.check()?;
        let quorum = Quorum::new(&options.acceptors);
        let place = options.acceptors.iter().position(|acceptor| acceptor.id == options.id);
        let saved = saved.unwrap_or_default();
        let fresh = Freshness::new(options.acceptors.len());
        Ok(Share {
            quorum,
            holding: Holding { epoch: Epoch::NONE, held: 0, given: 0, announced: 0, taken: 0 },
            fresh,
            until: Nanos(0),
            called: Epoch::NONE,
            newest: saved.promised,
            want: Want::default(),
            leaving: false,
            numbers: 0,
            asks: [(0, Nanos(0)); ASKS_MAX],
            asked: now,
            due: now,
            heard: now,
            register: place.map(|place| Register::new(place, saved)),
            proposal: None,
            audit: None,
            seen: BTreeMap::new(),
            now,
            outbox: VecDeque::new(),
            waiting: VecDeque::new(),
            events: VecDeque::new(),
            options,
        })
    }

    /// The rate that this member may use, from now on.
    #[must_use]
    pub fn grant(&self) -> Grant {
        let floor = self.options.floor_bit_s();
        Grant {
            bit_s: floor.saturating_add(self.holding.held),
            until: self.until,
            floor_bit_s: floor,
        }
    }

    /// The epoch it takes part in.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.holding.epoch
    }

    /// Whether this member is the leader of its epoch.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.audit.is_some()
    }

    /// Sets the interval of asks from now on, clamped to half of [`ShareOptions::lease`] and of
    /// [`ShareOptions::suspect`].
    pub fn set_interval(&mut self, interval: Nanos) {
        let most = self.options.lease.min(self.options.suspect).0 / 2;
        self.options.interval = Nanos(interval.0.clamp(1, most.max(1)));
    }

    /// Sets the demand of the flows here. A demand that appears, or that is no longer met, is reported at
    /// once.
    pub fn set_want(&mut self, now: Nanos, want: Want) {
        let woke = self.want.demand_bit_s == 0 && want.demand_bit_s > 0;
        let grew = want.flows > 1.25 * self.want.flows + 0.5;
        self.want = want;
        if (woke || grew) && now.0 >= self.asked.0.saturating_add(self.options.interval.0 / 4) {
            self.due = self.due.min(now);
        }
    }

    /// Gives back all that it holds, and leaves: [`Event::Left`] comes when it has nothing left.
    ///
    /// A leader does not wait: the next one finds what it held, as if it had died. Acceptors are named in the
    /// options of all members, so remove one that leaves for good there.
    pub fn leave(&mut self, now: Nanos) {
        self.leaving = true;
        self.proposal = None;
        if self.audit.is_some() || self.fresh_epoch() == Epoch::NONE {
            self.events.push_back(Event::Left);
        }
        self.due = self.due.min(now);
    }

    /// As [`Share::leave`], for a member that another one on the same host replaces: from now on that one
    /// keeps the promises of this one.
    pub fn retire(&mut self, now: Nanos) {
        self.leave(now);
        (self.register, self.proposal, self.audit) = (None, None, None);
        self.waiting.clear();
        self.outbox.retain(|transmit| !relies_on_promise(&transmit.message.body));
        self.events.retain(|event| !matches!(event, Event::Store(_)));
    }

    /// When to call [`Share::on_timer`].
    #[must_use]
    pub fn next_deadline(&self) -> Nanos {
        let audit = self.audit.as_ref().map_or(Nanos(u64::MAX), Audit::next_deadline);
        let proposal = self.proposal.as_ref().map_or(Nanos(u64::MAX), |proposal| proposal.due);
        self.due.min(audit).min(proposal)
    }

    /// The promise of [`Event::Store`] is stored. A promise older than the last changes nothing.
    pub fn on_stored(&mut self, now: Nanos, saved: Saved) {
        let Some(register) = &mut self.register else { return };
        register.on_stored(saved);
        self.advance(now);
        self.run_proposal();
        self.run_audit();
    }

    /// Whether its last promise is stored.
    fn is_stored(&self) -> bool {
        self.register.as_ref().is_none_or(Register::is_stored)
    }

    /// The next message to send, if there is one. What relies on a promise waits until that is stored.
    /// `in_force`: no backend passes more than [`Share::grant`]. Otherwise messages report nothing of what
    /// was given meanwhile.
    pub fn poll_transmit(&mut self, in_force: bool) -> Option<Transmit> {
        let is_stored = self.is_stored();
        loop {
            let first = if is_stored { self.waiting.pop_front() } else { None };
            let mut transmit = first.or_else(|| self.outbox.pop_front())?;
            let audits = self.audit.is_some();
            let body = &mut transmit.message.body;
            if relies_on_promise(body) && !is_stored {
                if self.waiting.len() >= WAITING_MAX {
                    self.waiting.pop_front();
                }
                self.waiting.push_back(transmit);
                continue;
            }
            match body {
                Body::Ask(ask) => {
                    if in_force {
                        self.holding.announced = self.holding.announced.max(ask.given_bit_s);
                    }
                    let more = ask.given_bit_s.saturating_sub(self.holding.announced);
                    ask.given_bit_s -= more;
                    if self.now < self.until {
                        ask.held_bit_s = ask.held_bit_s.saturating_add(more);
                    }
                }
                // A leader relies on its own promise.
                Body::Answer(answer) if audits && !is_stored => answer.account = None,
                Body::Answer(answer) => {
                    if let Some(account) = &mut answer.account {
                        account.given_bit_s =
                            self.may_tell(transmit.to, account.given_bit_s, in_force);
                    }
                }
                _ => {}
            }
            return Some(transmit);
        }
    }

    /// How many messages wait for a promise to be stored.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Drops these messages: the promise could not be stored. They will be asked for again.
    pub fn drop_waiting(&mut self) {
        self.waiting.clear();
    }

    /// The next event, if there is one.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn send(&mut self, to: MemberId, body: Body) {
        let ShareOptions { group, id: from, incarnation, .. } = self.options;
        self.outbox.push_back(Transmit { to, message: Message { group, from, incarnation, body } });
    }

    /// A number for a message that wants an answer, and the time from which the answer will count.
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.asks[self.numbers as usize % ASKS_MAX] = (self.numbers, self.now);
        self.numbers
    }

    fn asked_at(&self, number: u64) -> Option<Nanos> {
        let (known, at) = self.asks[number as usize % ASKS_MAX];
        (known == number && number > 0).then_some(at)
    }

    /// Time never goes back for decisions here.
    fn advance(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        if let Some(register) = &self.register {
            // An acceptor's own state is known as of now.
            let (place, promised) = (register.place, register.promised());
            if promised <= self.fresh_epoch() {
                self.fresh.learn(place, self.now);
            }
        }
        self.renew();
    }

    /// The epoch that `fresh` is about.
    fn fresh_epoch(&self) -> Epoch {
        self.called.max(self.holding.epoch)
    }

    /// Takes the lease that follows from what is known. While the member is called elsewhere, its knowledge
    /// is about the new epoch and renews nothing in the old.
    fn renew(&mut self) {
        if self.called <= self.holding.epoch
            && let Some(since) = self.quorum.lease_since(&self.fresh)
        {
            self.until = self.until.max(Nanos(since.0.saturating_add(self.options.lease.0)));
        }
    }

    /// The capacity that it holds under a valid lease.
    fn usable(&self) -> u64 {
        if self.now < self.until { self.holding.held } else { 0 }
    }

    /// Call it at [`Share::next_deadline`], or at any time.
    pub fn on_timer(&mut self, now: Nanos) {
        self.advance(now);
        self.watch_leader();
        self.run_proposal();
        self.run_audit();
        if self.now >= self.due {
            self.ask();
        }
    }

    /// Asks the leader, and the acceptors too if it does not answer.
    fn ask(&mut self) {
        let epoch = self.fresh_epoch();
        let interval = self.options.interval.0;
        let audits = self.audit.is_some();
        let silent = !audits && self.now.0.saturating_sub(self.heard.0) > interval * 3 / 2;
        self.asked = self.now;
        self.due = Nanos(self.now.0.saturating_add(if silent { interval / 2 } else { interval }));
        if self.leaving && !audits && self.called <= self.holding.epoch {
            self.give(self.holding.held);
        }
        let number = self.number();
        let ask = Ask {
            epoch,
            number,
            entering: self.called > self.holding.epoch,
            leaving: self.leaving,
            held_bit_s: self.usable(),
            given_bit_s: self.holding.given,
            taken_bit_s: self.holding.taken,
            flows: self.want.flows,
            demand_bit_s: self.want.demand_bit_s,
        };
        let own = self.options.id;
        let newest = self.newest.max(epoch);
        let mut targets: Vec<MemberId> = Vec::new();
        if epoch != Epoch::NONE {
            targets.push(epoch.leader);
        }
        if newest != epoch {
            targets.push(newest.leader);
        }
        // A leader needs answers of the acceptors.
        if silent || audits || epoch == Epoch::NONE {
            targets.extend(self.options.acceptors.iter().map(|acceptor| acceptor.id));
        }
        targets.sort_unstable();
        targets.dedup();
        for to in targets.into_iter().filter(|to| *to != own) {
            self.send(to, Body::Ask(ask));
        }
    }

    /// Lowers its own limit and adds to what it gave. Not at a leader, and not after a call.
    fn give(&mut self, bit_s: u64) {
        let bit_s = bit_s.min(self.holding.held);
        self.holding.held -= bit_s;
        self.holding.given += bit_s;
    }

    /// Raises its own limit: nobody holds more than there is, whatever was sent.
    fn hold(&mut self, bit_s: u64) {
        let held = self.holding.held.saturating_add(bit_s);
        self.holding.held = held.min(self.options.divided_bit_s());
    }

    /// Takes a message. One of another group is ignored.
    pub fn on_message(&mut self, now: Nanos, message: &Message) {
        self.advance(now);
        if message.group != self.options.group || message.from == self.options.id {
            return;
        }
        match &message.body {
            Body::Ask(ask) => self.on_ask(message.from, message.incarnation, ask),
            Body::Answer(answer) => self.on_answer(message.from, answer),
            Body::Call(epoch) => self.on_call(message.from, *epoch),
            Body::Propose(propose) => self.on_propose(message.from, message.incarnation, propose),
            Body::Promise(promise) => self.on_promise(message.from, promise),
            Body::Values(_) | Body::Mass { .. } => {}
        }
        self.renew();
        self.run_proposal();
        self.run_audit();
    }

    fn on_answer(&mut self, from: MemberId, answer: &Answer) {
        self.newest = self.newest.max(answer.newest);
        if answer.to_incarnation != self.options.incarnation || answer.epoch > self.fresh_epoch() {
            return;
        }
        let epoch = answer.epoch;
        if let Some(asked) = self.asked_at(answer.number) {
            for (place, age) in answer.ages_us.iter().enumerate() {
                let Some(age) = age else { continue };
                let age = self.options.stretched(Nanos(u64::from(*age) * 1_000));
                if let Some(then) = asked.0.checked_sub(age.0) {
                    self.fresh.learn(place, Nanos(then));
                }
            }
        }
        let Some(account) = answer.account else { return };
        if from != epoch.leader || epoch != self.fresh_epoch() {
            return;
        }
        self.heard = self.now;
        if self.holding.epoch != epoch {
            // Called: what was held is held there from now on. A lease of an older epoch is one of a newer.
            let taken = account.given_bit_s;
            let held = taken.min(self.options.divided_bit_s());
            self.holding = Holding { epoch, held, given: 0, announced: 0, taken };
            self.events.push_back(Event::Entered(epoch));
            return;
        }
        let more = account.given_bit_s.saturating_sub(self.holding.taken);
        self.holding.taken += more;
        self.hold(more);
        if self.leaving {
            let all_taken = account.taken_bit_s == self.holding.given;
            if self.holding.held == 0 && all_taken {
                self.events.push_back(Event::Left);
            }
            return;
        }
        // Small differences are measurement noise, and stay.
        let target = account.target_bit_s;
        let above = self.holding.held.saturating_sub(target);
        if above > target / 128 {
            let much = above > self.holding.held / 32;
            self.give(above);
            if much && self.asked.0.saturating_add(self.options.interval.0 / 4) <= self.now.0 {
                self.due = self.now;
            }
        }
    }

    /// A leader whose epoch has begun calls.
    fn on_call(&mut self, from: MemberId, epoch: Epoch) {
        self.newest = self.newest.max(epoch);
        if from != epoch.leader || epoch <= self.fresh_epoch() {
            return;
        }
        self.heed(epoch);
        self.heard = self.now;
        self.due = self.now;
    }

    /// From here on nothing moves in older epochs.
    fn heed(&mut self, epoch: Epoch) {
        self.called = epoch;
        self.audit = None;
        if self.proposal.as_ref().is_some_and(|proposal| proposal.epoch <= epoch) {
            self.proposal = None;
        }
    }
}

#[cfg(test)]
mod tests;
