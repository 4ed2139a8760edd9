//! A group at one host: from what its limits measured, and what others reported, to their rates.
//!
//! ```text
//!   samples ─► gauges ─► want, demand, weight ─► controller ─► the host's part ─► level ─► rates
//! ```
//!
//! Rates of flows: a limit that paces knows what a flow gets; one that sees acknowledgements counts those
//! that take all they get ([`tidegate_core::flow_count`]); a policer gives a sample
//! ([`tidegate_core::fleet::flows`]);
//! where none of these is known a limit counts as one flow.
//!
//! **Hearing nobody.** A host of `share` falls to its fixed part by itself when its lease ends. One of the
//! others keeps `1/N` of the limit free for each of the `N` hosts that it does not hear, as Cloud Control has
//! it, and when it hears none has an equal part of as many hosts as there may be. Either way the parts of all
//! never add up to more than the limit.

use std::collections::BTreeSet;

use tidegate_core::{
    Nanos, Rate,
    fleet::{
        MemberId,
        aggregate::{VECTOR_MAX, Vector},
        average::TAU,
        fps::{Fps, FpsInput, FpsOptions},
        grd::Grd,
        level::Want,
        message::{Body, Message},
        share::{Event, Saved, Share},
    },
    units::NANOS_PER_SEC,
};
use tidegate_host::fleet::{Algorithm, FleetSpec, GroupSpec, LEAST_BIT_S, member_id};

use super::{
    backend::{GroupBackend, Place},
    gauge::{Gauge, LIMITED_FROM},
    storage::{Storage, Stored},
};

mod apply;
mod release;

pub use release::Elsewhere;
use release::Outgoing;

/// What an earlier life of a node lent a limit has ended after so many leases of the present file.
const LENT_LEASES: u64 = 4;
/// Who has left a group says so in so many of its intervals.
const QUIT_ROUNDS: u32 = 4;
/// What could not be stored is tried again after this: a full disk may be slow to say so.
const SAVE_AGAIN: Nanos = Nanos(NANOS_PER_SEC / 2);
/// What others reported counts for so many intervals at least.
const FRESH_INTERVALS: u64 = 10;
/// ... and for so long.
const FRESH_LEAST: Nanos = Nanos(3 * NANOS_PER_SEC);
/// There are more hosts than can be known for so long after one was refused last.
const REFUSED_LASTS: Nanos = Nanos(60 * NANOS_PER_SEC);

/// How a group stands at this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It has not heard anybody yet, and keeps what it has; with `share` its reserved share, also
    /// while it hears others, until the first epoch has begun.
    Starting,
    /// It has its part by what all want.
    Sharing,
    /// It hears nobody, and has its reserved share.
    Alone,
    /// Another node has its name; it has its reserved share.
    StoodBack,
    /// Its limits cannot do what the algorithm asks for; they have the host's reserved share.
    CannotDrop,
}

#[derive(Debug)]
enum Control {
    Ctb,
    Gtb,
    Grd,
    Fps(Fps),
    Share(Box<Share>),
}

/// What a group of a host is made of.
#[derive(Debug, Clone)]
pub struct GroupOptions<'a> {
    pub spec: &'a GroupSpec,
    /// For each of its members, the rate in the file.
    pub ceilings: &'a [Rate],
    pub fleet: &'a FleetSpec,
    /// This node's name.
    pub node: &'a str,
    /// Which life of the group there: greater than any before.
    pub incarnation: u64,
}

/// A group at one host. See the [module](self).
#[derive(Debug)]
pub struct Group {
    spec: GroupSpec,
    ceilings: Vec<Rate>,
    number: u32,
    own: MemberId,
    incarnation: u64,
    gauges: Vec<Gauge>,
    outgoing: Vec<Outgoing>,
    control: Control,
    vector: Vector,
    due: Nanos,
    started: Nanos,
    heard_any: bool,
    stood_back: bool,
    cannot_drop: bool,
    /// What the limits had at the start, in all.
    found_bit_s: u64,
    unsaved: Option<Saved>,
    unsaved_why: Option<String>,
    save_due: Nanos,
    left: bool,
    /// Rounds in which others still get a message that it has left.
    quits: Option<u32>,
    drop_probability: f64,
}

/// When all has ended that was lent before now, whoever lent it.
fn lent_until(spec: &GroupSpec, now: Nanos) -> Nanos {
    let lease = match spec.algorithm {
        Algorithm::Share => spec.lease,
        _ => fresh(spec, VECTOR_MAX),
    };
    Nanos(now.0.saturating_add(lease.0.saturating_mul(LENT_LEASES)))
}

/// For how long what another reported counts, where so many are known.
fn fresh(spec: &GroupSpec, known: usize) -> Nanos {
    let intervals = FRESH_INTERVALS.max(known as u64 / 8);
    Nanos(spec.interval.0.saturating_mul(intervals)).max(FRESH_LEAST)
}

/// One limit of a group, for whoever shows it.
#[derive(Debug, Clone, serde::Serialize)]
pub struct GaugeStatus {
    pub limit: String,
    /// What it is set to, in bit/s.
    pub rate_bit_s: Option<u64>,
    /// The most that the file lets it have.
    pub ceiling_bit_s: u64,
    /// What arrives, in bit/s.
    pub demand_bit_s: u64,
    /// Flows that take all they get.
    pub flows: f64,
    /// The limit, or what it was on, is gone.
    pub gone: bool,
    /// Why it could not be set or read, if so.
    pub error: Option<String>,
}

impl Group {
    /// A group that has heard nobody. `saved` is what was stored last.
    ///
    /// # Errors
    /// As [`Share::new`] has it; a spec that was checked gives none.
    pub fn new(
        now: Nanos,
        options: &GroupOptions<'_>,
        saved: Option<Saved>,
    ) -> Result<Group, tidegate_host::fleet::FleetError> {
        let GroupOptions { spec, ceilings, fleet, node, incarnation } = options;
        let gauge = |(limit, ceiling): (&String, &Rate)| {
            let place = Place { limit: limit.clone(), direction: spec.direction };
            Gauge::new(now, place, *ceiling, lent_until(spec, now))
        };
        let control = match spec.algorithm {
            Algorithm::Ctb => Control::Ctb,
            Algorithm::Gtb => Control::Gtb,
            Algorithm::Grd => Control::Grd,
            Algorithm::Fps => {
                let options = FpsOptions { limit: spec.rate, tau: TAU, limited_from: LIMITED_FROM };
                Control::Fps(Fps::new(now, options, spec.alone_bit_s() as f64))
            }
            Algorithm::Share => {
                let options = spec.share_options(fleet, node, *incarnation);
                Control::Share(Box::new(Share::new(now, options, saved)?))
            }
        };
        let own = member_id(node);
        Ok(Group {
            number: spec.number(fleet),
            own,
            incarnation: *incarnation,
            gauges: spec.members.iter().zip(*ceilings).map(gauge).collect(),
            outgoing: Vec::new(),
            ceilings: ceilings.to_vec(),
            control,
            vector: Vector::new(own, *incarnation, now),
            due: now,
            started: now,
            heard_any: false,
            stood_back: false,
            cannot_drop: false,
            found_bit_s: 0,
            unsaved: None,
            unsaved_why: None,
            save_due: now,
            left: false,
            quits: None,
            drop_probability: 0.0,
            spec: (*spec).clone(),
        })
    }

    /// As in the file.
    pub fn spec(&self) -> &GroupSpec {
        &self.spec
    }

    /// Its number on the wire.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Whether it tells peers in its intervals.
    pub fn gossips(&self) -> bool {
        matches!(self.control, Control::Gtb | Control::Grd | Control::Fps(_)) && !self.stood_back
    }

    /// When [`Group::on_timer`] is to be called.
    pub fn next_deadline(&self, now: Nanos) -> Nanos {
        let Control::Share(share) = &self.control else { return self.due };
        let until = Some(share.grant().until).filter(|until| *until > now);
        self.due.min(share.next_deadline()).min(until.unwrap_or(Nanos(u64::MAX)))
    }

    fn fresh(&self) -> Nanos {
        let (known, _) = self.vector.silent(Nanos(0), Nanos(0));
        fresh(&self.spec, known)
    }

    /// What there is to divide, in bit/s, as far as others are heard.
    fn limit_bit_s(&self, now: Nanos) -> u64 {
        let (known, silent) = self.vector.silent(now, self.fresh());
        if known == silent {
            return self.spec.alone_bit_s();
        }
        let hosts = known as u64 + 1;
        let part = u128::from(self.spec.rate.bit_s()) * u128::from(hosts - silent as u64);
        (part / u128::from(hosts)) as u64
    }

    /// The rate that it keeps free for members that it does not hear, in bit/s, and these members.
    pub fn kept_free(&self, now: Nanos) -> (u64, Vec<MemberId>) {
        match self.gossips() && self.state(now) == State::Sharing {
            true => (
                self.spec.rate.bit_s() - self.limit_bit_s(now),
                self.vector.unheard(now, self.fresh()).collect(),
            ),
            false => (0, Vec::new()),
        }
    }

    /// How many reports were refused of hosts beyond those that can be known, if there still are such hosts.
    pub fn refused(&self, now: Nanos) -> Option<u64> {
        let (reports, at) = self.vector.refused();
        at.filter(|at| now.0 < at.0.saturating_add(REFUSED_LASTS.0)).map(|_| reports)
    }

    pub fn state(&self, now: Nanos) -> State {
        if self.stood_back {
            return State::StoodBack;
        }
        if self.cannot_drop {
            return State::CannotDrop;
        }
        let alone = match &self.control {
            Control::Ctb => false,
            Control::Share(share) => now >= share.grant().until,
            _ => {
                let (known, silent) = self.vector.silent(now, self.fresh());
                known == silent && self.spec.hosts > 1
            }
        };
        let heard = match &self.control {
            // In an epoch without a lease yet, it waits for one.
            Control::Share(share) => share.grant().until > self.started,
            _ => self.heard_any,
        };
        let starting = !heard && now.0 < self.started.0.saturating_add(FRESH_LEAST.0);
        // Acceptors may have answered, but nothing is divided before an epoch has begun.
        let divides = !matches!(&self.control, Control::Share(s) if s.epoch().number == 0);
        match alone {
            false if !divides => State::Starting,
            false => State::Sharing,
            true if starting => State::Starting,
            true => State::Alone,
        }
    }

    /// What the host may use, in bit/s.
    pub fn part_bit_s(&self, now: Nanos) -> u64 {
        let alone = self.spec.alone_bit_s();
        match self.state(now) {
            State::StoodBack | State::Alone | State::CannotDrop => return alone,
            // What is pinned was legal when it was set, and others keep it free.
            State::Starting if !matches!(self.control, Control::Share(_)) => {
                return self.found_bit_s.clamp(alone, self.spec.rate.bit_s());
            }
            State::Starting | State::Sharing => {}
        }
        match &self.control {
            Control::Ctb | Control::Grd => self.limit_or_rate(now),
            Control::Gtb => {
                let others = self.vector.others(now, self.fresh());
                (self.limit_bit_s(now)).saturating_sub(others as u64).max(self.least_bit_s())
            }
            Control::Fps(fps) => (fps.rate_bit_s() as u64).max(self.least_bit_s()),
            Control::Share(share) => share.grant().at(now),
        }
    }

    /// What its limits cannot do without, in bit/s.
    fn least_bit_s(&self) -> u64 {
        LEAST_BIT_S * self.gauges.len().max(1) as u64
    }

    /// Until when others keep free what the host has, if they count on it that it falls back then: a limit
    /// does, also when nobody is there any more to have it do so.
    fn until(&self, now: Nanos, state: State) -> Option<Nanos> {
        if state != State::Sharing {
            return None;
        }
        match &self.control {
            Control::Ctb => None,
            Control::Share(share) => Some(share.grant().until),
            // From then on it is silent for the others, who keep its part of the limit free and no more.
            _ => Some(Nanos(now.0.saturating_add(self.fresh().0))),
        }
    }

    fn limit_or_rate(&self, now: Nanos) -> u64 {
        match self.control {
            Control::Ctb => self.spec.rate.bit_s(),
            _ => self.limit_bit_s(now),
        }
    }

    /// What arrives at all its limits, in bit/s.
    pub fn demand_bit_s(&self) -> f64 {
        self.gauges.iter().map(|gauge| gauge.demand.value()).sum()
    }

    /// Ends an interval if it is time; the rest of what time brings. True if the interval ended.
    pub fn on_timer<G: GroupBackend>(&mut self, now: Nanos, backend: &mut G) -> bool {
        let ends = now >= self.due;
        if ends {
            self.due = Nanos(now.0.saturating_add(self.spec.interval.0));
            let first = self.gauges.iter().all(|gauge| gauge.measured.is_none());
            let mut found = 0;
            for gauge in &mut self.gauges {
                found += gauge.measure(now, backend);
            }
            if first {
                self.found_bit_s = found;
                self.take_over(now);
            }
            self.control(now);
        }
        if let Control::Share(share) = &mut self.control
            && !self.stood_back
        {
            share.on_timer(now);
        }
        ends
    }

    /// Starts with what the limits had.
    fn take_over(&mut self, now: Nanos) {
        let (alone, limit) = (self.spec.alone_bit_s(), self.spec.rate);
        let found = self.found_bit_s.clamp(alone, limit.bit_s());
        if let Control::Fps(fps) = &mut self.control {
            let options = FpsOptions { limit, tau: TAU, limited_from: LIMITED_FROM };
            *fps = Fps::new(now, options, found as f64);
        }
    }

    fn control(&mut self, now: Nanos) {
        if let Some(rounds) = &mut self.quits {
            *rounds = rounds.saturating_sub(1);
            self.left = *rounds == 0;
            return self.vector.leave(now);
        }
        let demand = self.demand_bit_s();
        // Of a limit that holds senders back no more arrives than its rate, and averages are behind that.
        let limited =
            self.gauges.iter().map(|gauge| gauge.demand.value().max(gauge.held_bit_s(now)));
        let limited: f64 = limited.sum();
        let wants: Vec<_> = self.gauges.iter().map(|gauge| gauge.want(now)).collect();
        let flow = self.typical_bit_s(&wants);
        let mut limit = self.limit_bit_s(now);
        let mut others = self.vector.others(now, self.fresh());
        if self.state(now) == State::Starting && matches!(self.control, Control::Fps(_)) {
            // As many others as make what was found its part.
            limit = self.spec.rate.bit_s();
            let found = self.found_bit_s.clamp(self.spec.alone_bit_s(), limit);
            let flows: f64 = wants.iter().map(|want| f64::from(want.flows)).sum();
            others = flows.max(1.0) * (limit - found) as f64 / found.max(1) as f64;
        }
        let report = match &mut self.control {
            Control::Ctb => return,
            Control::Gtb => demand,
            Control::Grd => {
                // The law itself needs a limit above zero; a part of one always is.
                let rate = Rate::from_bit_s(limit).unwrap_or(self.spec.rate);
                self.drop_probability = Grd::new(rate).set_demand(demand + others);
                demand
            }
            Control::Fps(fps) => {
                if let Some(limit) = Rate::from_bit_s(limit) {
                    fps.set_limit(limit);
                }
                let input =
                    FpsInput { demand_bit_s: limited, flow_bit_s: flow, remote_weight: others };
                fps.on_interval(now, &input);
                fps.weight()
            }
            Control::Share(share) => {
                let most: u64 = self.gauges.iter().map(|g| g.ceiling.bit_s()).sum();
                let wanted = wants.iter().map(|want| want.demand_bit_s);
                let wanted = wanted.fold(0u64, u64::saturating_add).min(most);
                let flows = wants.iter().map(|want| want.flows).sum();
                share.set_want(now, Want { flows, demand_bit_s: wanted });
                return;
            }
        };
        self.vector.set_own(now, report as f32);
    }

    /// What a flow has that takes all it gets, over all limits: large flows count more. A limit whose flows
    /// are not known counts as one.
    fn typical_bit_s(&self, wants: &[Want]) -> f64 {
        let (mut cubes, mut squares) = (0.0, 0.0);
        for (gauge, want) in self.gauges.iter().zip(wants) {
            let demand = gauge.demand.value();
            let rate = if gauge.flow_bit_s > 0.0 { gauge.flow_bit_s } else { demand };
            cubes += f64::from(want.flows) * rate * rate * rate;
            squares += f64::from(want.flows) * rate * rate;
        }
        if squares > 0.0 { cubes / squares } else { 0.0 }
    }

    /// A message for a peer, if this group gossips.
    pub fn news(&mut self) -> Option<Message> {
        let body = Body::Values(self.vector.news());
        let (group, from, incarnation) = (self.number, self.own, self.incarnation);
        self.gossips().then_some(Message { group, from, incarnation, body })
    }

    pub fn on_message(&mut self, now: Nanos, message: &Message) {
        if self.stood_back {
            return;
        }
        match (&mut self.control, &message.body) {
            (Control::Share(share), _) => share.on_message(now, message),
            (Control::Ctb, _) => {}
            (_, Body::Values(entries)) => {
                self.heard_any = true;
                self.vector.on_values(now, entries);
            }
            _ => {}
        }
    }

    /// What `share` has to say, after what it promised is stored and its grant is in force. What relies on a
    /// promise waits while that is being stored, and is dropped if storing failed; of what was given while a
    /// limit refuses nothing is said. The rest goes out. The second is why storing failed. Limits that are
    /// `held` by a group that they have left are not touched.
    pub fn outbox<G: GroupBackend, S: Storage>(
        &mut self,
        now: Nanos,
        backend: &mut G,
        storage: &mut S,
        held: &BTreeSet<Place>,
    ) -> (Vec<(MemberId, Message)>, Option<String>) {
        self.store(now, storage);
        let failed = self.unsaved_why.clone();
        let in_force = self.apply(now, backend, held);
        let Control::Share(share) = &mut self.control else { return (Vec::new(), failed) };
        let mut out = Vec::new();
        while let Some(transmit) = share.poll_transmit(in_force) {
            out.push((transmit.to, transmit.message));
        }
        if failed.is_some() {
            share.drop_waiting();
        }
        if self.stood_back {
            out.clear();
        }
        (out, failed)
    }

    /// Takes what happened in `share`, and stores what it promised.
    fn store<S: Storage>(&mut self, now: Nanos, storage: &mut S) {
        let Control::Share(share) = &mut self.control else { return };
        // A promise that is stored may lead to the next one.
        for _ in 0..2 {
            let mut news = false;
            while let Some(event) = share.poll_event() {
                match event {
                    Event::Store(saved) => (self.unsaved, news) = (Some(saved), true),
                    Event::Entered(_) => {}
                    Event::Left => self.left = true,
                }
            }
            let Some(saved) = self.unsaved.filter(|_| news || now >= self.save_due) else { return };
            match storage.save(&self.spec.name, saved) {
                Ok(Stored::Durably) => {
                    (self.unsaved, self.unsaved_why) = (None, None);
                    share.on_stored(now, saved);
                }
                // What failed has failed until it is stored.
                Ok(Stored::Pending) => return,
                Err(e) => {
                    self.save_due = Nanos(now.0.saturating_add(SAVE_AGAIN.0));
                    self.unsaved_why = Some(e.to_string());
                    return;
                }
            }
        }
    }

    /// Messages that wait until a promise is stored.
    #[cfg(test)]
    pub(super) fn waiting_messages(&self) -> usize {
        match &self.control {
            Control::Share(share) => share.waiting(),
            _ => 0,
        }
    }

    /// Another node has this one's name.
    pub fn stand_back(&mut self) {
        self.stood_back = true;
    }

    /// Gives back what it holds; [`Group::has_left`] says when. Its limits keep what is the host's own in any
    /// case.
    pub fn leave(&mut self, now: Nanos) {
        match &mut self.control {
            Control::Share(share) if !self.stood_back => share.leave(now),
            _ => self.left = true,
        }
    }

    /// Takes a spec of the same number: other limits of this host, or other times. What is held stays. True
    /// if something changed. A limit that is taken out is treated as by [`Group::quit`].
    pub fn change<G: GroupBackend>(
        &mut self,
        now: Nanos,
        backend: &mut G,
        spec: &GroupSpec,
        ceilings: &[Rate],
        elsewhere: &Elsewhere,
    ) -> bool {
        let same = GroupSpec { line: self.spec.line, ..spec.clone() } == self.spec;
        if same && self.ceilings == ceilings {
            self.spec.line = spec.line;
            return false;
        }
        let mut old = std::mem::take(&mut self.gauges);
        let count = old.len();
        for (limit, ceiling) in spec.members.iter().zip(ceilings) {
            let place = Place { limit: limit.clone(), direction: spec.direction };
            let known = old.iter().position(|gauge| gauge.place == place);
            let back = self.outgoing.iter().position(|one| one.gauge.place == place);
            let mut gauge = match (known, back) {
                (Some(at), _) => old.swap_remove(at),
                (None, Some(at)) => self.outgoing.swap_remove(at).gauge,
                (None, None) => Gauge::new(now, place, *ceiling, lent_until(spec, now)),
            };
            gauge.ceiling = *ceiling;
            if gauge.measured.is_none() || gauge.gone {
                gauge.measure(now, backend);
            }
            self.gauges.push(gauge);
        }
        self.send_away(old, count, elsewhere);
        if let Control::Share(share) = &mut self.control {
            share.set_interval(spec.interval);
        }
        (self.spec, self.ceilings) = (spec.clone(), ceilings.to_vec());
        self.due = now;
        true
    }

    /// As [`Group::leave`], of a host that is in the group no more: its limits are another's from now on, and
    /// nobody need keep anything for it. A limit that still has what this group gave it gets the rate of the
    /// file if no group has it, and else falls to the host's reserved share.
    pub fn quit(&mut self, now: Nanos, elsewhere: &Elsewhere) {
        let gauges = std::mem::take(&mut self.gauges);
        let count = gauges.len();
        self.send_away(gauges, count, elsewhere);
        match &mut self.control {
            Control::Share(share) if !self.stood_back => share.retire(now),
            _ => self.left = true,
        }
        // Its successor promises from now on, and newer epochs: this one's must not come after them.
        (self.unsaved, self.unsaved_why) = (None, None);
        if self.gossips() {
            (self.quits, self.left) = (Some(QUIT_ROUNDS), false);
            self.due = now;
        }
    }

    /// Whether it has nothing left to give back.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// Has its limits keep the host's reserved share, for when nobody sets them any more.
    pub fn fall_back<G: GroupBackend>(
        &mut self,
        now: Nanos,
        backend: &mut G,
        held: &BTreeSet<Place>,
    ) -> bool {
        self.stood_back = true;
        self.apply(now, backend, held)
    }

    /// The epoch and its leader, and how long the lease lasts, with `share`.
    pub fn epoch(&self, now: Nanos) -> Option<(u64, MemberId, u64)> {
        let Control::Share(share) = &self.control else { return None };
        let epoch = share.epoch();
        let left = share.grant().until.0.saturating_sub(now.0);
        Some((epoch.number, epoch.leader, left))
    }

    /// The probability with which packets are dropped, with `grd`.
    pub fn drop_probability(&self) -> Option<f64> {
        matches!(self.control, Control::Grd).then_some(self.drop_probability)
    }

    /// Its limits, for whoever shows them.
    pub fn gauges(&self, now: Nanos) -> Vec<GaugeStatus> {
        let of = |gauge: &Gauge| GaugeStatus {
            limit: gauge.place.limit.clone(),
            rate_bit_s: gauge.applied.map(Rate::bit_s),
            ceiling_bit_s: gauge.ceiling.bit_s(),
            demand_bit_s: gauge.demand.value() as u64,
            flows: f64::from(gauge.want(now).flows),
            gone: gauge.gone,
            error: gauge.error.clone(),
        };
        self.gauges.iter().map(of).collect()
    }

    /// What is wrong at its limits.
    pub fn errors(&self) -> BTreeSet<String> {
        let of = |gauge: &Gauge| {
            gauge.error.as_ref().map(|e| format!("limit `{}`: {e}", gauge.place.limit))
        };
        let outgoing = self.outgoing.iter().map(|one| &one.gauge);
        self.gauges.iter().chain(outgoing).filter_map(of).collect()
    }
}
