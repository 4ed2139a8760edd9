//! Who is there: SWIM (Das, Gupta, Motivala, DSN 2002), by the crate `foca`, behind a trait.
//!
//! Each node probes one other in each period, directly and then through others, and changes spread with the
//! probes. Like the rest it is a state machine: its caller carries the bytes and keeps the time.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    num::{NonZeroU8, NonZeroUsize},
    time::Duration,
};

use bytes::{Buf, BufMut};
use foca::{
    AccumulatingRuntime, Codec, Config, Foca, Header, Identity, Member, Message, NoCustomBroadcast,
    OwnedNotification, PeriodicParams, State, Timer,
};
use rand::{SeedableRng, rngs::SmallRng};
use tidegate_core::{Nanos, fleet::MemberId};
use tidegate_host::fleet::{check_name, member_id};

/// One node is probed in each period. No algorithm waits for it: they hear for themselves who is silent.
const PROBE: Duration = Duration::from_secs(5);
/// It answers within this, or others are asked to probe it.
const PROBE_RTT: Duration = Duration::from_secs(1);
/// Who was suspected for so long is down.
const SUSPECT: Duration = Duration::from_secs(10);
/// How often others are asked whom they know, and those that are down whether they are.
const ANNOUNCE: Duration = Duration::from_secs(15);
/// Who is down is remembered so long.
const REMEMBER: Duration = Duration::from_secs(3_600);
/// A change is passed on so often.
const TELL: u8 = 10;
/// No message is longer, in bytes.
const BYTES_MAX: usize = 1_200;
const TIMERS_MAX: usize = 65_536;

/// A node as others tell of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contact {
    pub id: MemberId,
    /// Which life of it.
    pub session: u64,
    pub addr: SocketAddr,
    pub name: String,
}

/// What was learnt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A node is there.
    Up(Contact),
    /// It does not answer, or has left.
    Down(Contact),
}

/// Bytes that are no message of a membership, or not of their sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MembershipError {
    #[error("not a message of the membership")]
    Content,
    #[error("a message of another node than its sender")]
    Sender,
}

/// Who is there. After each call, its caller takes what there is to send and what changed.
pub trait Membership {
    /// A node was found.
    fn join(&mut self, now: Nanos, contact: &Contact);

    /// Takes what a node sent.
    ///
    /// # Errors
    /// [`MembershipError`]; nothing changed.
    fn on_bytes(&mut self, now: Nanos, from: MemberId, bytes: &[u8])
    -> Result<(), MembershipError>;

    /// To be called at [`Membership::next_deadline`], or at any time.
    fn on_timer(&mut self, now: Nanos);

    /// When to call [`Membership::on_timer`].
    fn next_deadline(&self) -> Nanos;

    /// Something to be sent.
    fn poll_transmit(&mut self) -> Option<(Contact, Vec<u8>)>;

    fn poll_change(&mut self) -> Option<Change>;

    /// The others that are there.
    fn members(&self) -> Vec<Contact>;

    /// Says that this node goes.
    fn leave(&mut self, now: Nanos);
}

/// A contact; who was declared down by mistake comes back as its next generation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    contact: Contact,
    generation: u16,
}

impl Identity for Node {
    type Addr = MemberId;

    fn renew(&self) -> Option<Node> {
        Some(Node { contact: self.contact.clone(), generation: self.generation.checked_add(1)? })
    }

    fn addr(&self) -> MemberId {
        self.contact.id
    }

    fn win_addr_conflict(&self, adversary: &Node) -> bool {
        let order = |node: &Node| (node.contact.session, node.generation);
        order(self) > order(adversary)
    }
}

/// A compact form: no self-description, bounded strings, everything checked.
#[derive(Debug)]
struct Form;

impl Form {
    fn put_node(node: &Node, buf: &mut impl BufMut) -> Result<(), MembershipError> {
        let mut bytes = Vec::with_capacity(40);
        let contact = &node.contact;
        bytes.extend(contact.id.0.to_le_bytes());
        bytes.extend(contact.session.to_le_bytes());
        bytes.extend(node.generation.to_le_bytes());
        super::frame::put_addr(&mut bytes, contact.addr);
        bytes.push(contact.name.len() as u8);
        bytes.extend(contact.name.as_bytes());
        put(buf, &bytes)
    }

    fn node(buf: &mut impl Buf) -> Result<Node, MembershipError> {
        let id = MemberId(buf.try_get_u32_le().map_err(content)?);
        let session = buf.try_get_u64_le().map_err(content)?;
        let generation = buf.try_get_u16_le().map_err(content)?;
        let ip = match buf.try_get_u8().map_err(content)? {
            4 => {
                let mut ip = [0u8; 4];
                buf.try_copy_to_slice(&mut ip).map_err(content)?;
                ip.into()
            }
            6 => {
                let mut ip = [0u8; 16];
                buf.try_copy_to_slice(&mut ip).map_err(content)?;
                ip.into()
            }
            _ => return Err(MembershipError::Content),
        };
        let addr = SocketAddr::new(ip, buf.try_get_u16_le().map_err(content)?);
        let mut name = vec![0u8; buf.try_get_u8().map_err(content)?.into()];
        buf.try_copy_to_slice(&mut name).map_err(content)?;
        let name = String::from_utf8(name).map_err(content)?;
        check_name(&name).map_err(content)?;
        if member_id(&name) != id {
            return Err(MembershipError::Content);
        }
        Ok(Node { contact: Contact { id, session, addr, name }, generation })
    }
}

fn content<E>(_: E) -> MembershipError {
    MembershipError::Content
}

/// All of it or nothing, as foca asks.
fn put(buf: &mut impl BufMut, bytes: &[u8]) -> Result<(), MembershipError> {
    if buf.remaining_mut() < bytes.len() {
        return Err(MembershipError::Content);
    }
    buf.put_slice(bytes);
    Ok(())
}

impl Codec<Node> for Form {
    type Error = MembershipError;

    fn encode_header(
        &mut self,
        header: &Header<Node>,
        mut buf: impl BufMut,
    ) -> Result<(), MembershipError> {
        let mut bytes = Vec::with_capacity(120);
        Form::put_node(&header.src, &mut bytes)?;
        bytes.extend(header.src_incarnation.to_le_bytes());
        Form::put_node(&header.dst, &mut bytes)?;
        let (kind, number, other) = match &header.message {
            Message::Ping(n) => (1, Some(*n), None),
            Message::Ack(n) => (2, Some(*n), None),
            Message::PingReq { target, probe_number } => (3, Some(*probe_number), Some(target)),
            Message::IndirectPing { origin, probe_number } => {
                (4, Some(*probe_number), Some(origin))
            }
            Message::IndirectAck { target, probe_number } => (5, Some(*probe_number), Some(target)),
            Message::ForwardedAck { origin, probe_number } => {
                (6, Some(*probe_number), Some(origin))
            }
            Message::Announce => (7, None, None),
            Message::Feed => (8, None, None),
            Message::Gossip => (9, None, None),
            Message::Broadcast => (10, None, None),
            Message::TurnUndead => (11, None, None),
        };
        bytes.push(kind);
        bytes.extend(number);
        if let Some(other) = other {
            Form::put_node(other, &mut bytes)?;
        }
        put(&mut buf, &bytes)
    }

    fn decode_header(&mut self, mut buf: impl Buf) -> Result<Header<Node>, MembershipError> {
        let src = Form::node(&mut buf)?;
        let src_incarnation = buf.try_get_u16_le().map_err(content)?;
        let dst = Form::node(&mut buf)?;
        let kind = buf.try_get_u8().map_err(content)?;
        let mut number = || buf.try_get_u8().map_err(content);
        let message = match kind {
            1 => Message::Ping(number()?),
            2 => Message::Ack(number()?),
            3..=6 => {
                let probe_number = number()?;
                let other = Form::node(&mut buf)?;
                match kind {
                    3 => Message::PingReq { target: other, probe_number },
                    4 => Message::IndirectPing { origin: other, probe_number },
                    5 => Message::IndirectAck { target: other, probe_number },
                    _ => Message::ForwardedAck { origin: other, probe_number },
                }
            }
            7 => Message::Announce,
            8 => Message::Feed,
            9 => Message::Gossip,
            11 => Message::TurnUndead,
            _ => return Err(MembershipError::Content),
        };
        Ok(Header { src, src_incarnation, dst, message })
    }

    fn encode_member(
        &mut self,
        member: &Member<Node>,
        mut buf: impl BufMut,
    ) -> Result<(), MembershipError> {
        let mut bytes = Vec::with_capacity(50);
        Form::put_node(member.id(), &mut bytes)?;
        bytes.extend(member.incarnation().to_le_bytes());
        bytes.push(match member.state() {
            State::Alive => 0,
            State::Suspect => 1,
            State::Down => 2,
        });
        put(&mut buf, &bytes)
    }

    fn decode_member(&mut self, mut buf: impl Buf) -> Result<Member<Node>, MembershipError> {
        let node = Form::node(&mut buf)?;
        let incarnation = buf.try_get_u16_le().map_err(content)?;
        let state = match buf.try_get_u8().map_err(content)? {
            0 => State::Alive,
            1 => State::Suspect,
            2 => State::Down,
            _ => return Err(MembershipError::Content),
        };
        Ok(Member::new(node, incarnation, state))
    }
}

/// SWIM, by `foca`.
pub struct Swim {
    foca: Foca<Node, Form, SmallRng, NoCustomBroadcast>,
    runtime: AccumulatingRuntime<Node>,
    timers: BTreeMap<(Nanos, u64), Timer<Node>>,
    timer_number: u64,
    changes: VecDeque<Change>,
}

impl std::fmt::Debug for Swim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Swim").field("members", &self.members()).finish_non_exhaustive()
    }
}

fn once(frequency: Duration) -> Option<PeriodicParams> {
    Some(PeriodicParams { frequency, num_members: NonZeroUsize::MIN })
}

impl Swim {
    /// A node that knows nobody. `seed` decides whom it probes when.
    pub fn new(own: Contact, seed: u64) -> Swim {
        let config = Config {
            probe_period: PROBE,
            probe_rtt: PROBE_RTT,
            num_indirect_probes: NonZeroUsize::new(3).unwrap_or(NonZeroUsize::MIN),
            max_transmissions: NonZeroU8::new(TELL).unwrap_or(NonZeroU8::MIN),
            suspect_to_down_after: SUSPECT,
            remove_down_after: REMEMBER,
            max_packet_size: NonZeroUsize::new(BYTES_MAX).unwrap_or(NonZeroUsize::MIN),
            notify_down_members: true,
            periodic_announce: once(ANNOUNCE),
            periodic_announce_to_down_members: once(ANNOUNCE),
            // Changes go with the probes: constant messages of their own would cost small limits dear.
            periodic_gossip: None,
        };
        let own = Node { contact: own, generation: 0 };
        Swim {
            foca: Foca::new(own, config, SmallRng::seed_from_u64(seed), Form),
            runtime: AccumulatingRuntime::new(),
            timers: BTreeMap::new(),
            timer_number: 0,
            changes: VecDeque::new(),
        }
    }

    /// Takes over what foca asks for.
    fn sync(&mut self, now: Nanos) {
        while let Some((after, timer)) = self.runtime.to_schedule() {
            self.timer_number += 1;
            let after = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
            if self.timers.len() < TIMERS_MAX {
                let at = Nanos(now.0.saturating_add(after));
                self.timers.insert((at, self.timer_number), timer);
            }
        }
        while let Some(notification) = self.runtime.to_notify() {
            match notification {
                OwnedNotification::MemberUp(node) => {
                    self.changes.push_back(Change::Up(node.contact));
                }
                OwnedNotification::MemberDown(node) => {
                    self.changes.push_back(Change::Down(node.contact));
                }
                // Up or down as it was, at another place or in another life.
                OwnedNotification::Rename(_, after)
                    if self.foca.iter_members().any(|member| *member.id() == after) =>
                {
                    self.changes.push_back(Change::Up(after.contact));
                }
                _ => {}
            }
        }
    }
}

impl Membership for Swim {
    fn join(&mut self, now: Nanos, contact: &Contact) {
        let node = Node { contact: contact.clone(), generation: 0 };
        // It fails only if the form does, which bounds its strings before.
        let _ = self.foca.announce(node, &mut self.runtime);
        self.sync(now);
    }

    fn on_bytes(
        &mut self,
        now: Nanos,
        from: MemberId,
        bytes: &[u8],
    ) -> Result<(), MembershipError> {
        let header = Form.decode_header(bytes)?;
        if header.src.contact.id != from {
            return Err(MembershipError::Sender);
        }
        let taken = self.foca.handle_data(bytes, &mut self.runtime);
        self.sync(now);
        taken.map_err(content)
    }

    fn on_timer(&mut self, now: Nanos) {
        while let Some(entry) = self.timers.first_entry()
            && entry.key().0 <= now
        {
            let timer = entry.remove();
            // Errors here are late timers; foca goes on.
            let _ = self.foca.handle_timer(timer, &mut self.runtime);
            self.sync(now);
        }
    }

    fn next_deadline(&self) -> Nanos {
        self.timers.first_key_value().map_or(Nanos(u64::MAX), |((at, _), _)| *at)
    }

    fn poll_transmit(&mut self) -> Option<(Contact, Vec<u8>)> {
        let (to, bytes) = self.runtime.to_send()?;
        Some((to.contact, bytes.to_vec()))
    }

    fn poll_change(&mut self) -> Option<Change> {
        self.changes.pop_front()
    }

    fn members(&self) -> Vec<Contact> {
        self.foca.iter_members().map(|member| member.id().contact.clone()).collect()
    }

    fn leave(&mut self, now: Nanos) {
        let _ = self.foca.leave_cluster(&mut self.runtime);
        self.sync(now);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn contact(i: u32) -> Contact {
        let name = format!("n{i}");
        let addr = SocketAddr::from(([10, 0, 0, i as u8], 1));
        Contact { id: member_id(&name), session: 1, addr, name }
    }

    /// Nodes in virtual time; those in `dead` hear and say nothing.
    struct Net {
        nodes: Vec<Swim>,
        dead: Vec<usize>,
        now: Nanos,
        up: usize,
        down: usize,
    }

    impl Net {
        fn new(nodes: u32) -> Net {
            let nodes = (0..nodes).map(|i| Swim::new(contact(i), u64::from(i))).collect();
            Net { nodes, dead: vec![], now: Nanos(0), up: 0, down: 0 }
        }

        fn run(&mut self, until: u64) {
            while self.now.0 < until {
                self.now.0 += 50_000_000;
                for i in 0..self.nodes.len() {
                    if self.dead.contains(&i) {
                        continue;
                    }
                    self.nodes[i].on_timer(self.now);
                    while let Some(change) = self.nodes[i].poll_change() {
                        match change {
                            Change::Up(_) => self.up += 1,
                            Change::Down(_) => self.down += 1,
                        }
                    }
                    let from = contact(i as u32).id;
                    while let Some((to, bytes)) = self.nodes[i].poll_transmit() {
                        let j = (0..self.nodes.len()).find(|j| contact(*j as u32).id == to.id);
                        if let Some(j) = j.filter(|j| !self.dead.contains(j)) {
                            self.nodes[j].on_bytes(self.now, from, &bytes).unwrap();
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn all_find_all_through_one_and_the_dead_are_found() {
        let mut net = Net::new(6);
        for i in 1..6 {
            net.nodes[i].join(Nanos(0), &contact(0));
        }
        net.run(30 * SECOND);
        assert!(net.nodes.iter().all(|node| node.members().len() == 5));
        net.dead.push(3);
        net.run(120 * SECOND);
        let living = [0, 1, 2, 4, 5];
        assert!(living.iter().all(|i| net.nodes[*i].members().len() == 4));
        assert!(net.down >= 5, "{}", net.down);
        net.nodes[2].leave(net.now);
        net.run(140 * SECOND);
        assert!([0, 1, 4, 5].iter().all(|i| net.nodes[*i].members().len() == 3));
        // It was not dead, only away.
        net.dead.clear();
        net.run(300 * SECOND);
        assert!([0, 1, 3, 4, 5].iter().all(|i| net.nodes[*i].members().len() == 4));
    }

    #[test]
    fn nobody_speaks_for_others() {
        let (mut a, mut b) = (Swim::new(contact(1), 1), Swim::new(contact(2), 2));
        a.join(Nanos(0), &contact(2));
        let (to, bytes) = a.poll_transmit().unwrap();
        assert_eq!(to, contact(2));
        let refused = b.on_bytes(Nanos(0), contact(3).id, &bytes);
        assert_eq!(refused, Err(MembershipError::Sender));
        assert_eq!(b.on_bytes(Nanos(0), contact(1).id, &bytes), Ok(()));
        assert_eq!(b.poll_change(), Some(Change::Up(contact(1))));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut swim = Swim::new(contact(1), 1);
            let _ = swim.on_bytes(Nanos(0), contact(2).id, &bytes);
        }
    }
}
