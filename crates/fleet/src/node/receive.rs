//! What a node does with a datagram.
//!
//! One that is not sealed as it should be, was taken before or is of an earlier life costs no more than
//! opening it: groups, backend and storage are looked at only after frames were read.

use super::{
    super::{
        membership::MembershipError,
        seal::{Cause, Opened, VERSION, claim, open},
        session::{Accept, Echoed, PEERS_MAX, Peer},
    },
    BTreeMap, Contact, Event, Frame, GroupBackend, GroupReport, HEADERS_BYTES, MemberId,
    Membership, Nanos, Node, Reported, Rng, SocketAddr, Storage, member_id,
};

/// Dropped datagrams are reported no more often, for each cause.
const TELL_DROPS: Nanos = Nanos(60_000_000_000);
/// Another version of the protocol, or a second life of a node, counts as there for so long after it was
/// heard.
const STRANGE_LASTS: Nanos = Nanos(60_000_000_000);
/// The most of each that are remembered: what is not sealed can be forged.
const STRANGE_MAX: usize = 64;

/// An address at which another version of the protocol is spoken.
#[derive(Debug)]
pub(super) struct Foreign {
    pub(super) version: u8,
    /// As it says.
    pub(super) id: MemberId,
    pub(super) datagrams: u64,
    pub(super) heard: Nanos,
}

/// A second life of a node, beside the one that is heard.
#[derive(Debug)]
pub(super) struct Rival {
    pub(super) addr: SocketAddr,
    pub(super) heard: Nanos,
}

/// Makes room for a key; false if there is none.
fn has_room<K: Ord + Copy, V>(
    map: &mut BTreeMap<K, V>,
    key: K,
    is_over: impl Fn(&V) -> bool,
) -> bool {
    if map.len() >= STRANGE_MAX && !map.contains_key(&key) {
        map.retain(|_, value| !is_over(value));
    }
    map.len() < STRANGE_MAX || map.contains_key(&key)
}

fn is_over(now: Nanos, heard: Nanos) -> bool {
    now.0.saturating_sub(heard.0) >= STRANGE_LASTS.0
}

impl<G: GroupBackend, S: Storage> Node<G, S> {
    pub fn on_datagram(&mut self, now: Nanos, from: SocketAddr, bytes: &[u8]) {
        self.traffic.heard_datagrams += 1;
        self.traffic.heard_bytes += bytes.len() as u64 + HEADERS_BYTES;
        let taken = self.take(now, from, bytes);
        if let Err(cause) = taken {
            self.drops.count(cause);
            match claim(self.cluster, bytes).filter(|_| cause == Cause::Version) {
                Some((version, id)) => self.on_foreign(now, from, version, id),
                None => self.tell_drop(now, from, cause),
            }
        }
        if matches!(taken, Ok(true) | Err(Cause::Content | Cause::Sender)) {
            self.sync(now);
        }
    }

    /// Somebody of this cluster speaks another version.
    fn on_foreign(&mut self, now: Nanos, from: SocketAddr, version: u8, id: MemberId) {
        if !has_room(&mut self.foreign, from, |one| is_over(now, one.heard)) {
            return;
        }
        // Nobody has proven what it is, so an address is reported once, whatever versions come from it.
        let known = self.foreign.get(&from).filter(|one| !is_over(now, one.heard));
        let (is_new, datagrams) = (known.is_none(), known.map_or(1, |one| one.datagrams + 1));
        self.foreign.insert(from, Foreign { version, id, datagrams, heard: now });
        if is_new {
            self.report(Event::Version {
                node: self.name_of(id),
                from,
                theirs: version,
                ours: VERSION,
            });
        }
    }

    /// Those that speak another version, as far as they were heard lately.
    pub(super) fn foreign(&self, now: Nanos) -> impl Iterator<Item = (&SocketAddr, &Foreign)> {
        self.foreign.iter().filter(move |(_, one)| !is_over(now, one.heard))
    }

    /// Two lives of a node run, this one's too: the earlier of them is at `addr`.
    fn on_rival(&mut self, now: Nanos, id: MemberId, addr: SocketAddr) {
        if !has_room(&mut self.rivals, id, |one| is_over(now, one.heard)) {
            return;
        }
        let before = self.rivals.insert(id, Rival { addr, heard: now });
        if before.is_none_or(|one| is_over(now, one.heard))
            && let Some(event) = self.rival(id, addr)
        {
            self.report(event);
        }
    }

    /// None if the life that is heard has taken the place of the other.
    fn rival(&self, id: MemberId, earlier: SocketAddr) -> Option<Event> {
        if id == self.id {
            return Some(Event::SameName(self.name.clone(), earlier));
        }
        let later = self.sessions.get(id)?.addr;
        let node = self.name_of(id);
        (later != earlier).then_some(Event::TwoLives { node, later, earlier })
    }

    /// Nodes of which two lives run, as far as both were heard lately.
    pub(super) fn rivals(&self, now: Nanos) -> impl Iterator<Item = Event> {
        let here = self.rivals.iter().filter(move |(_, one)| !is_over(now, one.heard));
        here.filter_map(|(id, one)| self.rival(*id, one.addr))
    }

    /// Takes a datagram: whether frames of a node that is proven were read, so that something may have
    /// changed.
    fn take(&mut self, now: Nanos, from: SocketAddr, bytes: &[u8]) -> Result<bool, Cause> {
        let opened = open(&self.keys, self.cluster, self.id, bytes)?;
        if opened.sender == self.id && opened.life == self.life {
            // It has greeted itself.
            let own = self.seeds.values_mut().filter_map(|seeds| seeds.get_mut(&from));
            own.for_each(|seed| seed.is_own = true);
            return Ok(false);
        }
        let random = self.random.random();
        let accept = self.sessions.accept(now, from, &opened, random);
        let (mut proven, challenge) = match accept {
            Accept::Proven => (true, None),
            Accept::Unproven(cookie) => (false, cookie),
            Accept::Stale(cookie) => {
                if let (Some(cookie), Some(peer)) = (cookie, self.sessions.get(opened.sender)) {
                    let (life, addr) = (peer.life, peer.addr);
                    let frames = [Frame::Superseded { life, addr }, Frame::Challenge(cookie)];
                    self.reply(from, opened.sender, &frames);
                }
                for frame in Frame::decode(&opened.payload).into_iter().flatten() {
                    let Frame::Echo { cookie, .. } = frame else { continue };
                    let echoed = self.sessions.on_echo(now, from, &opened, cookie);
                    if echoed == Ok(Echoed::Rival) {
                        self.on_rival(now, opened.sender, from);
                    }
                }
                return Err(Cause::Stale);
            }
            Accept::Dropped(cause) => return Err(cause),
        };
        let frames = Frame::decode(&opened.payload).ok_or(Cause::Content)?;
        let (mut replies, mut unproven) = (Vec::new(), false);
        for frame in frames {
            match frame {
                Frame::Challenge(cookie) => {
                    replies.push(Frame::Echo { cookie, name: self.name.clone() });
                }
                Frame::Echo { cookie, name } => {
                    if member_id(&name) != opened.sender {
                        return Err(Cause::Sender);
                    }
                    if proven {
                        continue;
                    }
                    if self.sessions.on_echo(now, from, &opened, cookie)? == Echoed::Proves {
                        proven = true;
                        self.on_proven(now, from, &opened, name);
                    }
                }
                Frame::Hello { name } if member_id(&name) != opened.sender => {
                    return Err(Cause::Sender);
                }
                // Where both have another address only greetings arrive. A node that is up has shown where it
                // is.
                Frame::Hello { .. } if proven && !self.up.contains(&opened.sender) => {
                    self.sessions.moved(opened.sender, from);
                }
                Frame::Hello { .. } => {}
                // Its own name at another node: that was reported when it was proven.
                _ if proven && opened.sender == self.id => {}
                frame if proven && !opened.for_anyone => self.on_frame(now, &opened, frame)?,
                _ => unproven = true,
            }
        }
        if !proven {
            replies.extend(challenge.map(Frame::Challenge));
        }
        if !replies.is_empty() {
            self.reply(from, opened.sender, &replies);
        }
        if unproven && !proven { Err(Cause::Unproven) } else { Ok(proven) }
    }

    /// A node has shown that it lives.
    fn on_proven(&mut self, now: Nanos, from: SocketAddr, opened: &Opened, name: String) {
        if opened.sender != self.id {
            let (id, session) = (opened.sender, opened.life.session);
            let contact = Contact { id, session, addr: from, name };
            self.swim.join(now, &contact);
            self.know(contact);
            self.queue_report(id, now);
            return;
        }
        if name != self.name {
            self.report(Event::SameNumber(self.name.clone(), name, from));
        }
        if opened.life > self.life {
            self.stand_back(from);
        } else {
            self.on_rival(now, self.id, from);
            let (life, addr) = (self.life, self.addr);
            self.reply(from, opened.sender, &[Frame::Superseded { life, addr }]);
        }
    }

    fn stand_back(&mut self, by: SocketAddr) {
        if self.stood_back.is_none() {
            self.stood_back = Some(by);
            self.report(Event::StoodBack(self.name.clone(), by));
            self.groups.iter_mut().for_each(|held| held.group.stand_back());
        }
    }

    /// Remembers where a node is; of too many one that is gone is forgotten.
    pub(super) fn know(&mut self, contact: Contact) {
        if self.contacts.len() >= PEERS_MAX && !self.contacts.contains_key(&contact.id) {
            let gone = |id: &&MemberId| {
                !self.up.contains(id) && !self.sessions.get(**id).is_some_and(Peer::is_proven)
            };
            let Some(gone) = self.contacts.keys().find(gone).copied() else { return };
            self.contacts.remove(&gone);
        }
        self.contacts.insert(contact.id, contact);
    }

    fn on_frame(&mut self, now: Nanos, opened: &Opened, frame: Frame) -> Result<(), Cause> {
        match frame {
            Frame::Message(bytes) => {
                let message = Frame::to_message(&bytes, opened.sender, opened.life.session);
                let message = message.map_err(|_| Cause::Content)?;
                let groups = self.groups.iter_mut().map(|held| &mut held.group);
                let leaving = self.leaving.iter_mut().map(|(_, group)| group);
                // One that is left may have begun again: what is for it says so itself.
                for group in groups.chain(leaving).filter(|g| g.number() == message.group) {
                    group.on_message(now, &message);
                }
            }
            Frame::Swim(bytes) => {
                let taken = self.swim.on_bytes(now, opened.sender, &bytes);
                taken.map_err(|e| match e {
                    MembershipError::Content => Cause::Content,
                    MembershipError::Sender => Cause::Sender,
                })?;
            }
            Frame::Report(reports) => self.on_report(now, opened.sender, reports),
            Frame::Superseded { life, addr } if life > self.life => self.stand_back(addr),
            _ => {}
        }
        Ok(())
    }

    fn on_report(&mut self, now: Nanos, from: MemberId, reports: Vec<GroupReport>) {
        for report in reports {
            let ours = self.groups.iter().find(|held| held.group.spec().name == report.name);
            let Some(ours) = ours.map(|held| &held.group) else { continue };
            let differs = ours.spec().settings_number(&self.fleet) != report.number;
            let (rate, algorithm) = (ours.spec().rate.bit_s(), ours.spec().algorithm);
            let node = self.name_of(from);
            let group = report.name.clone();
            let theirs = (report.rate_bit_s, report.algorithm);
            let reported = Reported { report, at: now, differs };
            let earlier = self.reports.insert((from, group.clone()), reported);
            let differed = earlier.is_some_and(|earlier| earlier.differs);
            if differs && !differed {
                self.report(Event::Differs { group, node, theirs, ours: (rate, algorithm) });
            } else if differed && !differs {
                self.report(Event::Agrees { group, node });
            }
        }
    }

    fn tell_drop(&mut self, now: Nanos, from: SocketAddr, cause: Cause) {
        // A few of these come with every start.
        if matches!(cause, Cause::Unproven | Cause::Replay | Cause::Stale) {
            return;
        }
        let count = self.drops.of(cause);
        let (before, at) = &mut self.drops_reported[cause as usize];
        if at.is_none_or(|at| now.0 >= at.0.saturating_add(TELL_DROPS.0)) {
            let event = Event::Dropping { cause, from, count: count - *before };
            (*before, *at) = (count, Some(now));
            self.report(event);
        }
    }
}
