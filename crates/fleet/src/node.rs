//! A node of a fleet: sessions, membership, groups and their limits, as one state machine.
//!
//! After each call its caller sends what [`Node::poll_transmit`] gives and tells what [`Node::poll_event`]
//! gives; backend and storage are its own, behind traits, so that what `share` asks for holds in one place: a
//! promise is stored and a rate is in force before the message leaves that relies on it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::SocketAddr,
};

use rand::{Rng, SeedableRng, rngs::SmallRng, seq::SliceRandom};
use tidegate_core::{
    Nanos, Rate,
    fleet::{MemberId, message::Message},
};
use tidegate_host::fleet::{FleetError, FleetSpec, GroupSpec, member_id, number};

use super::{
    backend::{GroupBackend, Place},
    event::Event,
    frame::{Frame, GroupReport, REPORTS_MAX},
    group::{Elsewhere, Group, GroupOptions, State},
    keys::KeyRing,
    membership::{Change, Contact, Membership, Swim},
    seal::{CAUSES, DATAGRAM_MAX, Drops, Life, PAYLOAD_MAX, Sealer},
    session::Sessions,
    status::Traffic,
    storage::{Storage, StorageError},
};

mod receive;
mod show;

use receive::{Foreign, Rival};

/// A seed that is not heard is greeted so often.
const GREET: Nanos = Nanos(2_000_000_000);
/// A peer that was heard so lately needs no greeting.
const HEARD: Nanos = Nanos(15_000_000_000);
/// How often another gets a report of this host; more seldom in large fleets, where it would cost small
/// limits dear.
const REPORT: Nanos = Nanos(2_500_000_000);
const REPORT_PEERS: u64 = 16;
/// What others reported counts for so long.
pub const REPORT_LASTS: Nanos = Nanos(60_000_000_000);
/// The most addresses of one source.
pub const SEEDS_MAX: usize = 1_024;
/// The most events that wait to be read; the oldest go.
const EVENTS_MAX: usize = 256;
/// A group that is left, and hears nobody who would take what it holds, is dropped after so long.
const LEAVING_LASTS: Nanos = Nanos(5_000_000_000);
/// IPv6 and UDP.
const HEADERS_BYTES: u64 = 48;

#[derive(Debug)]
pub struct NodeOptions {
    /// `[fleet]`.
    pub fleet: FleetSpec,
    /// This node's name.
    pub name: String,
    /// The groups, each with the rates of its members in the file.
    pub groups: Vec<(GroupSpec, Vec<Rate>)>,
    pub keys: KeyRing,
    /// Where others reach it.
    pub addr: SocketAddr,
    /// Which life of it: greater than any before.
    pub session: u64,
    /// For everything that is drawn, from the kernel's randomness at each start: cookies need it to be
    /// unknown to others, and nonces need it to be another one in each life.
    pub seed: [u8; 32],
}

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("group `{0}`: {1}")]
    Group(String, FleetError),
    #[error(
        "group `{group}` is ctb, and its one limiter is on node `{center}`: this is `{node}`; name no \
         members of it here, or make this node its center"
    )]
    NotCenter { group: String, center: String, node: String },
}

/// A group, and what was said of it last.
#[derive(Debug)]
struct Held {
    group: Group,
    state: Option<State>,
    errors: BTreeSet<String>,
    /// Reports of others were refused lately.
    full: bool,
}

/// What a node reported.
#[derive(Debug)]
struct Reported {
    report: GroupReport,
    at: Nanos,
    differs: bool,
}

#[derive(Debug, Default)]
struct Seed {
    greeted: Option<Nanos>,
    is_own: bool,
}

/// A node. See the [module](self).
#[derive(Debug)]
pub struct Node<G, S> {
    fleet: FleetSpec,
    name: String,
    id: MemberId,
    addr: SocketAddr,
    life: Life,
    /// How many groups it began: each is an incarnation of its own for the others, or what they know of one
    /// that ended would count for the next.
    began: u32,
    cluster: u32,
    keys: KeyRing,
    random: SmallRng,
    backend: G,
    storage: S,
    storage_bad: bool,
    sealer: Sealer,
    sessions: Sessions,
    swim: Swim,
    contacts: BTreeMap<MemberId, Contact>,
    up: BTreeSet<MemberId>,
    groups: Vec<Held>,
    /// Groups that give back what they hold, and since when.
    leaving: Vec<(Nanos, Group)>,
    reports: BTreeMap<(MemberId, String), Reported>,
    report_due: Nanos,
    report_turn: usize,
    seeds: BTreeMap<String, BTreeMap<SocketAddr, Seed>>,
    greet_due: Nanos,
    stood_back: Option<SocketAddr>,
    /// Nodes of which two lives run, and addresses at which another version of the protocol is spoken.
    rivals: BTreeMap<MemberId, Rival>,
    foreign: BTreeMap<SocketAddr, Foreign>,
    started: Nanos,
    drops: Drops,
    drops_reported: [(u64, Option<Nanos>); CAUSES.len()],
    traffic: Traffic,
    /// Frames for nodes, until they are put into datagrams.
    frames: BTreeMap<MemberId, Vec<Frame>>,
    out: VecDeque<(SocketAddr, Vec<u8>)>,
    events: VecDeque<Event>,
}

impl<G: GroupBackend, S: Storage> Node<G, S> {
    /// A node that knows nobody.
    ///
    /// # Errors
    /// [`NodeError`]; no limit has been touched.
    pub fn new(
        now: Nanos,
        options: NodeOptions,
        backend: G,
        storage: S,
    ) -> Result<Node<G, S>, NodeError> {
        let NodeOptions { fleet, name, groups, keys, addr, session, seed } = options;
        let id = member_id(&name);
        let cluster = number(&[&fleet.name]);
        let mut random = SmallRng::from_seed(seed);
        let life = Life { session, salt: random.random() };
        let own = Contact { id, session, addr, name: name.clone() };
        let swim = Swim::new(own, random.random());
        let mut node = Node {
            id,
            addr,
            life,
            began: 0,
            cluster,
            keys,
            random,
            backend,
            storage,
            storage_bad: false,
            sealer: Sealer::new(cluster, id, life),
            sessions: Sessions::default(),
            swim,
            contacts: BTreeMap::new(),
            up: BTreeSet::new(),
            groups: Vec::new(),
            leaving: Vec::new(),
            reports: BTreeMap::new(),
            report_due: now,
            report_turn: 0,
            seeds: BTreeMap::new(),
            greet_due: now,
            stood_back: None,
            rivals: BTreeMap::new(),
            foreign: BTreeMap::new(),
            started: now,
            drops: Drops::default(),
            drops_reported: Default::default(),
            traffic: Traffic::default(),
            frames: BTreeMap::new(),
            out: VecDeque::new(),
            events: VecDeque::new(),
            fleet,
            name,
        };
        for (spec, ceilings) in &groups {
            let group = node.make(now, &node.fleet.clone(), spec, ceilings)?;
            node.groups.push(group);
        }
        Ok(node)
    }

    /// Only the center of a group with one has limits in it.
    fn check_center(&self, spec: &GroupSpec) -> Result<(), NodeError> {
        match spec.center.as_ref().filter(|center| **center != self.name) {
            Some(center) if !spec.members.is_empty() => {
                let (group, node) = (spec.name.clone(), self.name.clone());
                Err(NodeError::NotCenter { group, center: center.clone(), node })
            }
            _ => Ok(()),
        }
    }

    fn make(
        &mut self,
        now: Nanos,
        fleet: &FleetSpec,
        spec: &GroupSpec,
        ceilings: &[Rate],
    ) -> Result<Held, NodeError> {
        self.check_center(spec)?;
        // Under another number too: who promised something newer there promises nothing older here, and the
        // first epoch of a changed limit waits for the leases of the last.
        let saved = self.storage.load(&spec.name)?;
        let incarnation = self.life.session.saturating_add(self.began.into());
        self.began = self.began.saturating_add(1);
        let options = GroupOptions { spec, ceilings, fleet, node: &self.name, incarnation };
        let group =
            Group::new(now, &options, saved).map_err(|e| NodeError::Group(spec.name.clone(), e))?;
        Ok(Held { group, state: None, errors: BTreeSet::new(), full: false })
    }

    /// Takes another spec. Groups whose number is as it was go on, also with other limits of this host.
    /// Others begin anew with what is pinned, and those that are no more give back what they hold. `own` has
    /// the rates of the limits that are in no group: those that leave one get them. What changed, in words.
    ///
    /// # Errors
    /// [`NodeError`]; all is as before.
    pub fn reconfigure(
        &mut self,
        now: Nanos,
        fleet: FleetSpec,
        groups: &[(GroupSpec, Vec<Rate>)],
        own: &BTreeMap<Place, Rate>,
        keys: KeyRing,
    ) -> Result<Vec<String>, NodeError> {
        let mut fresh = Vec::new();
        for (spec, ceilings) in groups {
            self.check_center(spec)?;
            let number = spec.number(&fleet);
            let kept = self.groups.iter().position(|held| held.group.number() == number);
            fresh.push(match kept {
                Some(place) => Ok((place, spec, ceilings)),
                None => Err(self.make(now, &fleet, spec, ceilings)?),
            });
        }
        let mut changes = Vec::new();
        let mut old: Vec<_> = self.groups.drain(..).map(Some).collect();
        let places = |(spec, _): &(GroupSpec, Vec<Rate>)| {
            let direction = spec.direction;
            let place = |limit: &String| Place { limit: limit.clone(), direction };
            spec.members.iter().map(place).collect::<Vec<_>>()
        };
        let elsewhere =
            Elsewhere { grouped: groups.iter().flat_map(places).collect(), own: own.clone() };
        for one in fresh {
            match one {
                Ok((place, spec, ceilings)) => {
                    let Some(mut held) = old.get_mut(place).and_then(Option::take) else {
                        continue;
                    };
                    if held.group.change(now, &mut self.backend, spec, ceilings, &elsewhere) {
                        changes.push(format!("group `{}` changes", spec.name));
                    }
                    self.groups.push(held);
                }
                Err(mut held) => {
                    changes.push(format!("group `{}` begins", held.group.spec().name));
                    if self.stood_back.is_some() {
                        held.group.stand_back();
                    }
                    self.groups.push(held);
                }
            }
        }
        for mut held in old.into_iter().flatten() {
            let name = held.group.spec().name.clone();
            held.group.quit(now, &elsewhere);
            held.group.on_timer(now, &mut self.backend);
            if !self.groups.iter().any(|other| other.group.spec().name == name) {
                changes.push(format!("group `{name}` ends"));
            }
            self.gossip(&mut held.group);
            self.leaving.push((now, held.group));
        }
        self.fleet = fleet;
        self.keys = keys;
        self.agree();
        self.report_due = now;
        self.sync(now);
        Ok(changes)
    }

    /// Addresses at which there may be nodes, all that `source` has.
    pub fn discovered(&mut self, now: Nanos, source: &str, addresses: &[SocketAddr]) {
        let seeds = self.seeds.entry(source.to_owned()).or_default();
        let mut earlier = std::mem::take(seeds);
        for addr in addresses.iter().take(SEEDS_MAX) {
            seeds.insert(*addr, earlier.remove(addr).unwrap_or_default());
        }
        self.greet_due = now;
        self.sync(now);
    }

    /// A group that differed before this node read its file may be the same now.
    fn agree(&mut self) {
        let mut agreed = Vec::new();
        for ((from, group), reported) in self.reports.iter_mut().filter(|(_, r)| r.differs) {
            let ours = self.groups.iter().map(|held| held.group.spec());
            let ours = ours.filter(|spec| spec.name == *group);
            let mut numbers = ours.map(|spec| spec.settings_number(&self.fleet));
            if numbers.any(|number| number == reported.report.number) {
                reported.differs = false;
                agreed.push((*from, group.clone()));
            }
        }
        for (from, group) in agreed {
            let node = self.name_of(from);
            self.report(Event::Agrees { group, node });
        }
    }

    /// A node's name, or its number where that is not known.
    fn name_of(&self, id: MemberId) -> String {
        let known = self.contacts.get(&id).map(|contact| contact.name.clone());
        match known {
            Some(name) => name,
            None if id == self.id => self.name.clone(),
            None => format!("#{}", id.0),
        }
    }

    /// When [`Node::on_timer`] is to be called.
    pub fn next_deadline(&self, now: Nanos) -> Nanos {
        let leaving = self.leaving.iter().map(|(_, group)| group);
        let groups = self.groups.iter().map(|held| &held.group).chain(leaving);
        let groups = groups.map(|group| group.next_deadline(now)).min();
        let own = self.greet_due.min(self.report_due).min(self.swim.next_deadline());
        own.min(groups.unwrap_or(Nanos(u64::MAX)))
    }

    /// To be called at [`Node::next_deadline`], or at any time.
    pub fn on_timer(&mut self, now: Nanos) {
        self.swim.on_timer(now);
        let mut groups = std::mem::take(&mut self.groups);
        for Held { group, .. } in &mut groups {
            if group.on_timer(now, &mut self.backend) {
                self.gossip(group);
            }
        }
        self.groups = groups;
        let mut leaving = std::mem::take(&mut self.leaving);
        for (_, group) in &mut leaving {
            if group.on_timer(now, &mut self.backend) {
                self.gossip(group);
            }
        }
        self.leaving = leaving;
        self.leaving.retain(|(since, group)| {
            let waits = now.0 < since.0.saturating_add(LEAVING_LASTS.0);
            !group.has_released(now) || waits && (!group.has_left() || group.outgoing().count() > 0)
        });
        if now >= self.greet_due {
            self.greet_due = Nanos(now.0.saturating_add(GREET.0));
            self.greet(now);
            self.find_again(now);
        }
        if now >= self.report_due {
            let slower = (self.up.len() as u64 / REPORT_PEERS).max(1);
            self.report_due = Nanos(now.0.saturating_add(REPORT.0 * slower));
            self.reports.retain(|_, r| now.0.saturating_sub(r.at.0) < REPORT_LASTS.0);
            if let Some(peer) = self.peers_of(None, 1).first() {
                self.queue_report(*peer, now);
            }
        }
        self.sync(now);
    }

    /// Others that are up, chosen at random: of those that reported the group, if some did.
    fn peers_of(&mut self, group: Option<&GroupSpec>, count: usize) -> Vec<MemberId> {
        let mut peers: Vec<_> = match group {
            None => Vec::new(),
            Some(spec) => self
                .reports
                .iter()
                .filter(|((id, of), r)| {
                    *of == spec.name && r.report.hears(spec) && self.up.contains(id)
                })
                .map(|((id, _), _)| *id)
                .collect(),
        };
        if peers.is_empty() {
            peers = self.up.iter().copied().collect();
        }
        peers.partial_shuffle(&mut self.random, count).0.to_vec()
    }

    fn gossip(&mut self, group: &mut Group) {
        if !group.gossips() {
            return;
        }
        for peer in self.peers_of(Some(group.spec()), group.spec().branching) {
            if let Some(message) = group.news() {
                self.queue_message(peer, &message);
            }
        }
    }

    /// Greets addresses at which nobody has been heard lately.
    fn greet(&mut self, now: Nanos) {
        let heard = |addr: &SocketAddr| {
            self.sessions
                .proven()
                .any(|(_, peer)| peer.addr == *addr && now.0.saturating_sub(peer.heard.0) < HEARD.0)
        };
        let mut greeted: Vec<_> = Vec::new();
        for seeds in self.seeds.values_mut() {
            for (addr, seed) in seeds.iter_mut().filter(|(_, seed)| !seed.is_own) {
                let wait = seed.greeted.is_some_and(|at| now.0 < at.0.saturating_add(GREET.0 / 2));
                if !wait && !greeted.contains(addr) && !heard(addr) {
                    seed.greeted = Some(now);
                    greeted.push(*addr);
                }
            }
        }
        let hello = Frame::Hello { name: self.name.clone() };
        let mut payload = Vec::new();
        hello.encode(&mut payload);
        for addr in greeted {
            self.transmit(addr, None, &payload);
        }
    }

    /// A membership that has lost its last node asks nobody any more: not even one that is heard again.
    fn find_again(&mut self, now: Nanos) {
        if !self.up.is_empty() {
            return;
        }
        let lately = |heard: Nanos| now.0.saturating_sub(heard.0) < HEARD.0;
        let heard =
            self.sessions.proven().filter(|(id, peer)| *id != self.id && lately(peer.heard));
        let contacts = heard.filter_map(|(id, _)| self.contacts.get(&id));
        if let Some(contact) = contacts.last().cloned() {
            self.swim.join(now, &contact);
        }
    }

    fn queue_report(&mut self, to: MemberId, now: Nanos) {
        let count = self.groups.len();
        if count == 0 {
            return;
        }
        let at = self.report_turn;
        self.report_turn = (at + REPORTS_MAX) % count.max(1);
        let reports: Vec<_> = (0..count.min(REPORTS_MAX))
            .map(|i| {
                let group = &self.groups[(at + i) % count].group;
                GroupReport {
                    name: group.spec().name.clone(),
                    number: group.spec().settings_number(&self.fleet),
                    rate_bit_s: group.spec().rate.bit_s(),
                    algorithm: group.spec().algorithm,
                    share_bit_s: group.part_bit_s(now),
                    demand_bit_s: group.demand_bit_s() as u64,
                }
            })
            .collect();
        self.frames.entry(to).or_default().push(Frame::Report(reports));
    }

    fn queue_message(&mut self, to: MemberId, message: &Message) {
        let frame = Frame::of_message(message, self.life.session);
        self.frames.entry(to).or_default().push(frame);
    }

    /// Tries to set the limits that have left a group: those that are not set yet.
    fn release(&mut self, now: Nanos) -> BTreeSet<Place> {
        let groups = self.groups.iter_mut().map(|held| &mut held.group);
        let leaving = self.leaving.iter_mut().map(|(_, group)| group);
        let mut held = BTreeSet::new();
        for group in groups.chain(leaving) {
            group.release(now, &mut self.backend);
            held.extend(group.outgoing().cloned());
        }
        held
    }

    /// Carries out what the calls before have led to.
    fn sync(&mut self, now: Nanos) {
        let busy = self.release(now);
        let mut failed = None;
        let (mut messages, mut events) = (Vec::new(), Vec::new());
        for held in &mut self.groups {
            let group = &mut held.group;
            let (out, why) = group.outbox(now, &mut self.backend, &mut self.storage, &busy);
            messages.extend(out);
            failed = failed.or(why);
            let name = || group.spec().name.clone();
            let state = group.state(now);
            if held.state != Some(state) {
                held.state = Some(state);
                let part_bit_s = group.part_bit_s(now);
                events.push(Event::State { group: name(), state, part_bit_s });
            }
            let refused = group.refused(now);
            if let Some(reports) = refused.filter(|_| !held.full) {
                events.push(Event::Full { group: name(), reports });
            }
            held.full = refused.is_some();
            let errors = group.errors();
            if errors != held.errors {
                events.push(match errors.is_empty() {
                    true => Event::LimitsGood(name()),
                    false => {
                        let errors = errors.iter().cloned().collect();
                        Event::Limits { group: name(), errors }
                    }
                });
                held.errors = errors;
            }
        }
        for (_, group) in &mut self.leaving {
            let (out, why) = group.outbox(now, &mut self.backend, &mut self.storage, &busy);
            messages.extend(out);
            failed = failed.or(why);
        }
        match failed {
            Some(why) if !self.storage_bad => {
                self.storage_bad = true;
                events.push(Event::Storage(why));
            }
            None if self.storage_bad => {
                self.storage_bad = false;
                events.push(Event::StorageGood);
            }
            _ => {}
        }
        events.into_iter().for_each(|event| self.report(event));
        for (to, message) in messages {
            self.queue_message(to, &message);
        }
        while let Some((contact, bytes)) = self.swim.poll_transmit() {
            let id = contact.id;
            if !self.contacts.contains_key(&id) {
                self.know(contact);
            }
            self.frames.entry(id).or_default().push(Frame::Swim(bytes));
        }
        while let Some(change) = self.swim.poll_change() {
            match change {
                Change::Up(contact) => {
                    if self.up.insert(contact.id) {
                        self.report(Event::Up(contact.name.clone(), contact.addr));
                    }
                    self.know(contact);
                }
                Change::Down(contact) => {
                    if self.up.remove(&contact.id) {
                        self.report(Event::Down(contact.name, contact.addr));
                    }
                }
            }
        }
        self.flush();
    }

    /// Puts frames into as few datagrams as they need.
    fn flush(&mut self) {
        for (to, frames) in std::mem::take(&mut self.frames) {
            // Where it was heard, else where it is said to be.
            let heard = self.sessions.get(to).filter(|peer| peer.is_proven());
            let addr = heard.map(|peer| peer.addr);
            let Some(addr) = addr.or_else(|| Some(self.contacts.get(&to)?.addr)) else {
                self.traffic.nowhere_messages += frames.len() as u64;
                continue;
            };
            let mut payload = Vec::new();
            for frame in frames {
                let full = payload.len();
                frame.encode(&mut payload);
                if payload.len() > PAYLOAD_MAX && full > 0 {
                    let rest = payload.split_off(full);
                    self.transmit(addr, Some(to), &payload);
                    payload = rest;
                }
            }
            self.transmit(addr, Some(to), &payload);
        }
    }

    fn reply(&mut self, addr: SocketAddr, to: MemberId, frames: &[Frame]) {
        let mut payload = Vec::new();
        frames.iter().for_each(|frame| frame.encode(&mut payload));
        self.transmit(addr, Some(to), &payload);
    }

    fn transmit(&mut self, addr: SocketAddr, to: Option<MemberId>, payload: &[u8]) {
        if let Some(bytes) = self.sealer.seal(&self.keys, to, payload) {
            debug_assert!(bytes.len() <= DATAGRAM_MAX);
            self.traffic.sent_datagrams += 1;
            self.traffic.sent_bytes += bytes.len() as u64 + HEADERS_BYTES;
            self.out.push_back((addr, bytes));
        }
    }

    /// A datagram to be sent.
    pub fn poll_transmit(&mut self) -> Option<(SocketAddr, Vec<u8>)> {
        self.out.pop_front()
    }

    /// Something that happened.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Something that happened elsewhere and is to be reported with the rest.
    pub fn report(&mut self, event: Event) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Gives back what its groups hold, and goes. [`Node::has_left`] says when that is done.
    pub fn leave(&mut self, now: Nanos) {
        self.groups.iter_mut().for_each(|held| held.group.leave(now));
        self.on_timer(now);
    }

    /// Whether nothing is left to give back.
    pub fn has_left(&self) -> bool {
        self.groups.iter().all(|held| held.group.has_left())
    }

    /// The last call: limits keep the host's reserved share, and others hear that it goes. False if
    /// a limit could not be set.
    pub fn end(&mut self, now: Nanos) -> bool {
        let busy = self.release(now);
        let mut good = busy.is_empty();
        for held in &mut self.groups {
            good &= held.group.fall_back(now, &mut self.backend, &busy);
        }
        self.swim.leave(now);
        while let Some((contact, bytes)) = self.swim.poll_transmit() {
            self.frames.entry(contact.id).or_default().push(Frame::Swim(bytes));
        }
        self.flush();
        good
    }

    /// What it acts on.
    pub fn backend(&mut self) -> &mut G {
        &mut self.backend
    }

    /// The fleet as it is configured now.
    pub fn fleet(&self) -> &FleetSpec {
        &self.fleet
    }
}

#[cfg(test)]
mod tests;
