//! The leader of an epoch: collects what members hold, and divides it.

use alloc::{collections::BTreeMap, vec::Vec};

use super::{
    super::{
        MemberId,
        level::{self, Capacity, Want},
        message::{Account as Totals, Answer, Ask, Body, Epoch},
    },
    Freshness, MEMBERS_MAX, Share,
};
use crate::units::Nanos;

/// The account of a member at its leader, as long as the epoch lasts: forgotten totals would count twice.
#[derive(Debug, Clone, Copy)]
struct Account {
    incarnation: u64,
    /// The newest ask that was read for the following fields.
    number: u64,
    given: u64,
    /// The part of `given` that a message has reported; see [`Share::poll_transmit`].
    announced: u64,
    taken: u64,
    /// The capacity that the member holds, or will hold when it has taken all that was given.
    held: u64,
    want: Want,
    target: u64,
    heard: Nanos,
    left: bool,
}

/// An epoch that has begun, at its leader.
#[derive(Debug)]
pub(super) struct Audit {
    epoch: Epoch,
    began: Nanos,
    /// When the older leases have ended; `None` once all that nobody brought is here.
    end: Option<Nanos>,
    /// The capacity that has been brought in total.
    brought: u64,
    accounts: BTreeMap<MemberId, Account>,
    targets: Vec<u64>,
    /// When to divide again.
    due: Nanos,
    /// A member is missing, or came back without what it held.
    stale: bool,
}

impl Audit {
    pub fn new(epoch: Epoch, now: Nanos, end: Nanos, brought: u64) -> Self {
        let (accounts, targets) = (BTreeMap::new(), Vec::new());
        let end = Some(end);
        Self { epoch, began: now, end, brought, accounts, targets, due: now, stale: false }
    }

    pub fn next_deadline(&self) -> Nanos {
        self.due
    }
}

impl Share {
    /// Continues an audit as far as possible now.
    pub(super) fn run_audit(&mut self) {
        let now = self.now;
        let Some(audit) = &mut self.audit else { return };
        if let Some(end) = audit.end {
            // Half of the votes, as they were after the end: nobody has begun an epoch before it.
            let confirmed = self.quorum.lease_since(&self.fresh).is_some_and(|at| at >= end);
            if now >= end && confirmed {
                let divided = self.options.divided_bit_s();
                let missing = divided.saturating_sub(audit.brought);
                audit.brought += missing;
                audit.end = None;
                audit.due = now;
                let held = self.holding.held.saturating_add(missing);
                self.holding.held = held.min(divided);
            }
        }
        if now >= audit.due {
            audit.due = Nanos(now.0.saturating_add((self.options.interval.0 / 4).max(1)));
            self.divide();
        }
    }

    /// A member reports what it holds and wants, or asks how old its lease is.
    pub(super) fn on_ask(&mut self, from: MemberId, incarnation: u64, ask: &Ask) {
        let Some(register) = &self.register else { return };
        let (place, promised) = (register.place, register.promised());
        if self.seen.len() < MEMBERS_MAX as usize || self.seen.contains_key(&from) {
            self.seen.insert(from, self.now);
        }
        let mut account = None;
        if let Some(audit) = &self.audit {
            if ask.epoch < audit.epoch {
                let epoch = audit.epoch;
                self.send(from, Body::Call(epoch));
            } else if ask.epoch == audit.epoch {
                account = self.on_account(from, incarnation, ask);
            }
        }
        // What is known of an older epoch is true of a newer one; of an older one an acceptor knows only its
        // own promises.
        let ages_us = if self.fresh_epoch() <= ask.epoch {
            self.fresh.ages_us(self.now)
        } else {
            let mut own = Freshness::new(self.options.acceptors.len());
            if promised <= ask.epoch {
                own.learn(place, self.now);
            }
            own.ages_us(self.now)
        };
        let answer = Answer {
            epoch: ask.epoch,
            to_incarnation: incarnation,
            number: ask.number,
            newest: self.newest.max(self.fresh_epoch()),
            ages_us,
            account,
        };
        self.send(from, Body::Answer(answer));
    }

    /// Reads a member's account, gives it what it lacks, and says what it should hold.
    fn on_account(&mut self, from: MemberId, incarnation: u64, ask: &Ask) -> Option<Totals> {
        let now = self.now;
        let divided = self.options.divided_bit_s();
        let audit = self.audit.as_mut()?;
        let known = audit.accounts.get(&from).map(|account| account.incarnation);
        if known.is_some_and(|known| incarnation < known) {
            return None;
        }
        if known != Some(incarnation) {
            // An unknown member has never entered, whatever it says.
            if !ask.entering || audit.accounts.len() >= MEMBERS_MAX as usize {
                return None;
            }
            // The next audit finds what an earlier incarnation held.
            audit.stale |= known.is_some();
            let held = ask.held_bit_s.min(divided.saturating_sub(audit.brought));
            audit.brought += held;
            audit.accounts.insert(from, Account::new(incarnation, now, held));
        }
        let account = audit.accounts.get_mut(&from)?;
        account.heard = now;
        let mut taken = 0;
        if !ask.entering {
            let more = ask.given_bit_s.saturating_sub(account.taken);
            account.taken += more;
            taken = more;
        }
        if ask.number > account.number {
            account.number = ask.number;
            account.want = Want { flows: ask.flows, demand_bit_s: ask.demand_bit_s };
            account.left = ask.leaving;
            if !ask.entering {
                let under_way = account.given.saturating_sub(ask.taken_bit_s);
                account.held = ask.held_bit_s.saturating_add(under_way);
            }
        }
        self.hold(taken);
        let audit = self.audit.as_mut()?;
        // What the leader has above its own target goes to members that lack some.
        let own = audit.accounts.get(&self.options.id).map_or(0, |own| own.target);
        let account = audit.accounts.get_mut(&from)?;
        if account.left {
            account.target = 0;
        }
        let lacks = account.target.saturating_sub(account.held);
        let spare = self.holding.held.saturating_sub(own);
        if lacks > account.target / 128 {
            let given = lacks.min(spare);
            self.holding.held -= given;
            account.given = account.given.saturating_add(given);
            account.held = account.held.saturating_add(given);
        }
        let (given_bit_s, taken_bit_s) = (account.given, account.taken);
        Some(Totals { given_bit_s, taken_bit_s, target_bit_s: account.target })
    }

    /// The total that an answer to `to` may report as given. The grant in force covers the total that was
    /// reported before. Capacity given since is reported once the grant without it is in force.
    pub(super) fn may_tell(&mut self, to: MemberId, given_bit_s: u64, in_force: bool) -> u64 {
        let Some(account) = self.audit.as_mut().and_then(|a| a.accounts.get_mut(&to)) else {
            return 0;
        };
        if in_force {
            account.announced = account.announced.max(given_bit_s);
        }
        given_bit_s.min(account.announced)
    }

    /// Divides anew, and looks for missing members.
    fn divide(&mut self) {
        let (now, own) = (self.now, self.options.id);
        let divided = self.options.divided_bit_s();
        let suspect = self.options.suspect.0;
        let Some(audit) = &mut self.audit else { return };
        let incarnation = self.options.incarnation;
        let account =
            audit.accounts.entry(own).or_insert_with(|| Account::new(incarnation, now, 0));
        account.want = if self.leaving { Want::default() } else { self.want };
        (account.held, account.heard) = (self.holding.held, now);
        let here = |account: &&mut Account| !account.left;
        let wants: Vec<Want> =
            audit.accounts.values().filter(|account| !account.left).map(|a| a.want).collect();
        // Each member also has its floor, so no target is too small for a backend.
        let capacity = Capacity { bit_s: divided, least_bit_s: 0 };
        level::fill(capacity, &wants, &mut audit.targets);
        for (account, target) in audit.accounts.values_mut().filter(here).zip(&audit.targets) {
            account.target = *target;
            audit.stale |= now.0.saturating_sub(account.heard.0) > suspect;
        }
        // Without a lease for that long: acceptors have promised an epoch that never began.
        let idle = self.until.max(audit.began).0.saturating_add(suspect);
        let again = (audit.stale && audit.end.is_none()) || now.0 > idle;
        if again && !self.leaving && self.proposal.is_none() {
            self.propose();
            self.run_proposal();
        }
    }
}

impl Account {
    /// A member that brings `held`, and keeps it until the next division.
    fn new(incarnation: u64, heard: Nanos, held: u64) -> Self {
        Account {
            incarnation,
            number: 0,
            given: held,
            announced: held,
            taken: 0,
            held,
            want: Want::default(),
            target: held,
            heard,
            left: false,
        }
    }
}
