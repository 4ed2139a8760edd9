//! The application's side: one [`Producer`] a thread that sends.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tidegate_core::{
    Nanos, Rate,
    completion::{Ledger, segment_bytes},
    shaper::{FlowOptions as CoreFlowOptions, MAX_WEIGHT},
};

use super::{
    counters::{Block, NicCounters},
    handles::{Class, ProducerToken},
    message::{Answer, AnswerKind, Message, NewFlow, Outcome},
};
use crate::{
    packet::Packet,
    waiter::{Waiter, Waker, Woken},
};

/// How many submissions are counted before other threads see them; a wait shows all.
const PUBLISH_EVERY: u32 = 1_024;

/// A flow of a producer. Valid for the producer that opened it, until [`Event::Closed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    slot: u32,
    generation: u32,
    producer: u32,
}

impl Flow {
    /// A small number that no other open flow of the producer has: for tables of the caller's.
    #[must_use]
    pub fn index(self) -> usize {
        self.slot as usize
    }
}

/// What a flow is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowOptions {
    /// The aggregate that it is a part of.
    pub class: Option<Class>,
    /// Its own rate, if it has one.
    pub rate: Option<Rate>,
    /// For how long it may save up credit of its own rate when it is idle.
    pub burst: Nanos,
    /// Its weight among the flows of a fair class.
    pub weight: u32,
    /// What picks its shaper: flows with the same key share one. None: a number of its own. A packet's
    /// [`flow_hash`](Packet::flow_hash) is right.
    pub key: Option<u64>,
}

impl Default for FlowOptions {
    /// Of no class and without a rate: its packets leave at once.
    fn default() -> Self {
        let CoreFlowOptions { rate, burst, weight, .. } = CoreFlowOptions::default();
        Self { class: None, rate, burst, weight, key: None }
    }
}

/// Why a flow was not opened, changed or closed. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// All that the producer may have are open, or closed with packets still to leave.
    #[error("the producer has {0} flows open: close some, or give it more (NicOptions::flows)")]
    TooMany(usize),
    /// The ring to the flow's shaper is full: try again after [`Producer::wait`].
    #[error("the ring to the shaper is full: try again")]
    RingFull,
    /// The flow is closed, or another producer's.
    #[error("there is no such flow")]
    NoSuchFlow,
    /// The class is another NIC's.
    #[error("there is no such class")]
    NoSuchClass,
    /// A weight of zero, or a huge one.
    #[error("a weight of {0}; a flow's weight is 1 to {MAX_WEIGHT}")]
    Weight(u32),
}

/// Why a packet was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// The flow has its allowance in the shaper. [`Event::Writable`] follows.
    #[error("the flow has as much in the shaper as it may")]
    Allowance,
    /// The ring to the flow's shaper is full. [`Event::Writable`] follows.
    #[error("the ring to the shaper is full")]
    RingFull,
    /// The flow is closed, or another producer's.
    #[error("there is no such flow")]
    NoSuchFlow,
}

/// A packet that was not taken: it is the caller's again.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct SubmitError {
    /// The packet.
    pub packet: Packet,
    /// Why.
    pub reason: Refusal,
}

/// The NIC was dropped: nothing that was not answered will be.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// The NIC was dropped, and all its answers are taken.
    #[error("the NIC has gone")]
    NicGone,
    /// The kernel refused to let the thread sleep.
    #[error("cannot wait: {0}")]
    Refused(#[from] io::Error),
}

/// Messages to a producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A packet is done with. Of different flows in any order.
    Completion {
        /// Its flow.
        flow: Flow,
        /// What it was submitted with.
        cookie: u64,
        /// What became of it.
        outcome: Outcome,
        /// When.
        at: Nanos,
    },
    /// A flow that was refused may try again. It may have to wait again.
    Writable {
        /// The flow.
        flow: Flow,
    },
    /// A closed flow's last packet has left, and the flow is no more.
    Closed {
        /// What it was.
        flow: Flow,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Open,
    Closing,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    generation: u32,
    shaper: u32,
    state: State,
    /// It is in the list of those that wait for room in the ring.
    waits_for_room: bool,
}

/// The rings to one shaper and back.
pub(super) struct Link {
    pub(super) messages: rtrb::Producer<Message>,
    pub(super) answers: rtrb::Consumer<Answer>,
    pub(super) waker: Waker,
    pub(super) wants_room: Arc<AtomicBool>,
    /// What is to be answered; at most what the ring of answers holds.
    pub(super) pending: usize,
    pub(super) pending_max: usize,
    /// Flows that wait for room in the ring; each at most once.
    pub(super) waiting: VecDeque<u32>,
    /// How many of them were notified since the events ran out: not more than there is room for.
    pub(super) notified: usize,
    /// Closed flows that the shaper does not know yet; each at most once.
    pub(super) closing: VecDeque<u32>,
}

/// What a producer is made of.
pub(super) struct ProducerParts {
    pub(super) number: u32,
    pub(super) links: Vec<Link>,
    pub(super) flows: usize,
    pub(super) allowance: u32,
    pub(super) segment_time: Nanos,
    pub(super) hash_seed: u64,
    pub(super) nic: u64,
    pub(super) waiter: Waiter,
    pub(super) block: Arc<Block>,
    pub(super) token: Arc<ProducerToken>,
}

/// One application thread's way to the shapers: it opens flows, submits packets, and hears what became of
/// them. Dropping it closes its flows; what it submitted still leaves.
pub struct Producer {
    number: u32,
    links: Vec<Link>,
    flows: Box<[Entry]>,
    free: Vec<u32>,
    ledger: Ledger,
    allowance: u32,
    segment_time: Nanos,
    hash_seed: u64,
    nic: u64,
    opened: u64,
    /// The shaper whose answers are read next.
    turn: usize,
    /// A flow that a completion made writable: the next event.
    writable: Option<Flow>,
    arrivals: Vec<rtrb::Consumer<Packet>>,
    waiter: Waiter,
    counters: NicCounters,
    unpublished: u32,
    block: Arc<Block>,
    _token: Arc<ProducerToken>,
}

impl Producer {
    pub(super) fn new(parts: ProducerParts) -> Self {
        let free = Entry { generation: 0, shaper: 0, state: State::Free, waits_for_room: false };
        Self {
            number: parts.number,
            links: parts.links,
            flows: vec![free; parts.flows].into_boxed_slice(),
            free: (0..parts.flows as u32).rev().collect(),
            ledger: Ledger::new(parts.flows, parts.allowance),
            allowance: parts.allowance,
            segment_time: parts.segment_time,
            hash_seed: parts.hash_seed,
            nic: parts.nic,
            opened: 0,
            turn: 0,
            writable: None,
            arrivals: Vec::new(),
            waiter: parts.waiter,
            counters: NicCounters::default(),
            unpublished: 0,
            block: parts.block,
            _token: parts.token,
        }
    }

    /// Opens a flow, at the shaper that its key picks.
    ///
    /// # Errors
    /// If there are too many, the ring to the shaper is full, or an option is wrong.
    pub fn open_flow(&mut self, options: FlowOptions) -> Result<Flow, FlowError> {
        let FlowOptions { class, rate, burst, weight, key } = options;
        if weight == 0 || weight > MAX_WEIGHT {
            return Err(FlowError::Weight(weight));
        }
        if class.is_some_and(|class| class.nic != self.nic) {
            return Err(FlowError::NoSuchClass);
        }
        let Some(&slot) = self.free.last() else {
            self.counters.refused_flows += 1;
            self.publish();
            return Err(FlowError::TooMany(self.flows.len()));
        };
        let shaper = self.shaper_of(key.unwrap_or(self.opened ^ u64::from(self.number) << 48));
        let options = CoreFlowOptions { class: None, rate, burst, weight };
        let flow = Box::new(NewFlow { options, class });
        self.send(shaper, Message::Open { slot, flow })?;
        self.free.pop();
        self.opened += 1;
        let entry = &mut self.flows[slot as usize];
        entry.shaper = shaper as u32;
        entry.state = State::Open;
        self.allow(slot, rate);
        Ok(self.handle(slot))
    }

    /// Changes a flow's own rate, for packets to come.
    ///
    /// # Errors
    /// If the flow is not open, or the ring to its shaper is full.
    pub fn set_flow_rate(&mut self, flow: Flow, rate: Option<Rate>) -> Result<(), FlowError> {
        let shaper = self.shaper_of_open(flow).ok_or(FlowError::NoSuchFlow)?;
        self.send(shaper, Message::SetRate { slot: flow.slot, rate })?;
        self.allow(flow.slot, rate);
        Ok(())
    }

    /// Closes a flow. What it has in the shaper still leaves and is answered; then comes [`Event::Closed`].
    ///
    /// # Errors
    /// If the flow is not open.
    pub fn close_flow(&mut self, flow: Flow) -> Result<(), FlowError> {
        let shaper = self.shaper_of_open(flow).ok_or(FlowError::NoSuchFlow)?;
        self.flows[flow.index()].state = State::Closing;
        self.links[shaper].closing.push_back(flow.slot);
        self.send_closes(shaper);
        Ok(())
    }

    /// Hands a packet of a flow to its shaper. `cookie` comes back with the completion.
    ///
    /// # Errors
    /// With the packet, if the flow has its allowance in the shaper, the ring is full (in both cases
    /// [`Event::Writable`] follows), or the flow is not open.
    #[inline]
    pub fn submit(&mut self, flow: Flow, packet: Packet, cookie: u64) -> Result<(), SubmitError> {
        let Some(shaper) = self.shaper_of_open(flow) else {
            return Err(SubmitError { packet, reason: Refusal::NoSuchFlow });
        };
        if !self.has_room(shaper) {
            self.wait_for_room(flow.slot, shaper);
            return Err(SubmitError { packet, reason: Refusal::RingFull });
        }
        let wire_bytes = u32::try_from(packet.wire_bytes()).unwrap_or(u32::MAX);
        if !self.ledger.admit(flow.index(), wire_bytes) {
            self.counters.blocked_allowance += 1;
            return Err(SubmitError { packet, reason: Refusal::Allowance });
        }
        let link = &mut self.links[shaper];
        // There is room.
        let _ = link.messages.push(Message::Packet { slot: flow.slot, wire_bytes, cookie, packet });
        link.pending += 1;
        link.waker.wake();
        self.counters.submitted_packets += 1;
        self.unpublished += 1;
        if self.unpublished >= PUBLISH_EVERY {
            self.publish();
        }
        Ok(())
    }

    /// Whether [`Producer::submit`] would take a packet of the flow now. A flow that it would not is not
    /// notified when it would, unless it tries.
    #[must_use]
    pub fn is_writable(&self, flow: Flow) -> bool {
        self.shaper_of_open(flow).is_some_and(|shaper| self.has_room(shaper))
            && self.ledger.has_room(flow.index())
    }

    /// As [`Producer::is_writable`], and if not, [`Event::Writable`] follows when it would (of a flow that
    /// is open).
    pub fn poll_writable(&mut self, flow: Flow) -> bool {
        let Some(shaper) = self.shaper_of_open(flow) else { return false };
        if !self.has_room(shaper) {
            self.wait_for_room(flow.slot, shaper);
            return false;
        }
        let writable = self.ledger.poll_room(flow.index());
        self.counters.blocked_allowance += u64::from(!writable);
        writable
    }

    /// The next event.
    #[inline]
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(flow) = self.writable.take() {
            return Some(Event::Writable { flow });
        }
        for _ in 0..self.links.len() {
            let shaper = self.turn;
            if let Ok(answer) = self.links[shaper].answers.pop() {
                self.links[shaper].pending -= 1;
                return Some(self.answered(answer));
            }
            self.send_closes(shaper);
            self.turn = if shaper + 1 == self.links.len() { 0 } else { shaper + 1 };
        }
        self.poll_room()
    }

    /// The next frame that has arrived at a port whose frames this producer receives
    /// ([`Nic::receive_at`](super::Nic::receive_at)).
    pub fn receive(&mut self) -> Option<Packet> {
        self.arrivals.iter_mut().find_map(|arrivals| arrivals.pop().ok())
    }

    /// Waits until there is an event, a frame has arrived, or `deadline` has come; none: for as long as it
    /// takes. May return at once and without reason.
    ///
    /// # Errors
    /// If the NIC has gone and nothing is left to be read, or the kernel refuses.
    pub fn wait(&mut self, deadline: Option<Nanos>) -> Result<Woken, WaitError> {
        self.publish();
        for shaper in 0..self.links.len() {
            self.send_closes(shaper);
            let link = &mut self.links[shaper];
            link.notified = 0;
            let wants = !link.waiting.is_empty() || !link.closing.is_empty();
            link.wants_room.store(wants, Ordering::Relaxed);
        }
        let (links, arrivals, writable) = (&self.links, &self.arrivals, self.writable);
        let idle = || {
            let waits = |link: &Link| !link.waiting.is_empty() || !link.closing.is_empty();
            writable.is_none()
                && links.iter().all(|link| {
                    link.answers.is_empty()
                        && !link.answers.is_abandoned()
                        && !(waits(link) && link.has_room())
                })
                && arrivals.iter().all(rtrb::Consumer::is_empty)
        };
        if !idle() {
            let read = links.iter().all(|link| link.answers.is_empty())
                && arrivals.iter().all(rtrb::Consumer::is_empty);
            if read && writable.is_none() && links.iter().any(|link| link.answers.is_abandoned()) {
                return Err(WaitError::NicGone);
            }
            return Ok(Woken::AtOnce);
        }
        Ok(self.waiter.wait(deadline, &[], idle)?)
    }

    /// For a loop that polls in the real-time class: see [`Waiter::rest`].
    pub fn rest(&mut self) {
        self.waiter.rest();
    }

    /// What ends this producer's waits, from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waiter.waker()
    }

    /// How many packets of the flow are in the shaper, or on the way there.
    #[must_use]
    pub fn in_shaper(&self, flow: Flow) -> u32 {
        self.shaper_of_open(flow).map_or(0, |_| self.ledger.in_shaper(flow.index()))
    }

    pub(super) fn add_arrivals(&mut self, arrivals: rtrb::Consumer<Packet>) {
        self.arrivals.push(arrivals);
    }

    /// Sets how much a flow may have in the shaper, if it sends less than whole segments.
    fn allow(&mut self, slot: u32, rate: Option<Rate>) {
        let segment = rate.map_or(0, |rate| segment_bytes(rate, self.segment_time));
        self.ledger.set_allowance_bytes(slot as usize, self.allowance.saturating_mul(segment));
    }

    #[inline]
    fn shaper_of_open(&self, flow: Flow) -> Option<usize> {
        let entry = self.flows.get(flow.index())?;
        let ours = flow.producer == self.number && entry.generation == flow.generation;
        (ours && entry.state == State::Open).then_some(entry.shaper as usize)
    }

    fn shaper_of(&self, key: u64) -> usize {
        // The high half of the product: no division, and every bit of the key counts.
        let hash = crate::packet::mix(self.hash_seed, key);
        ((u128::from(hash) * self.links.len() as u128) >> 64) as usize
    }

    fn handle(&self, slot: u32) -> Flow {
        Flow { slot, generation: self.flows[slot as usize].generation, producer: self.number }
    }

    #[inline]
    fn has_room(&self, shaper: usize) -> bool {
        let link = &self.links[shaper];
        // Closes go first.
        link.has_room() && link.closing.is_empty()
    }

    #[cold]
    fn wait_for_room(&mut self, slot: u32, shaper: usize) {
        self.counters.blocked_ring += 1;
        let entry = &mut self.flows[slot as usize];
        if !std::mem::replace(&mut entry.waits_for_room, true) {
            self.links[shaper].waiting.push_back(slot);
        }
    }

    /// A flow that waits for room in a ring that has some.
    fn poll_room(&mut self) -> Option<Event> {
        for shaper in 0..self.links.len() {
            // As many as wait, at most: those that were closed meanwhile are passed over.
            while self.links[shaper].notified < self.links[shaper].room() {
                let Some(slot) = self.links[shaper].waiting.pop_front() else { break };
                let entry = &mut self.flows[slot as usize];
                entry.waits_for_room = false;
                if entry.state == State::Open {
                    self.links[shaper].notified += 1;
                    return Some(Event::Writable { flow: self.handle(slot) });
                }
            }
            self.links[shaper].notified = 0;
        }
        None
    }

    #[inline]
    fn answered(&mut self, answer: Answer) -> Event {
        self.waiter.worked();
        let Answer { slot, wire_bytes, kind, cookie, at } = answer;
        let flow = self.handle(slot);
        match kind {
            AnswerKind::Done(outcome) => {
                let wakes = self.ledger.complete(flow.index(), wire_bytes);
                if wakes && self.flows[slot as usize].state == State::Open {
                    self.writable = Some(flow);
                }
                Event::Completion { flow, cookie, outcome, at }
            }
            AnswerKind::Closed => {
                let entry = &mut self.flows[slot as usize];
                entry.state = State::Free;
                entry.generation = entry.generation.wrapping_add(1);
                self.free.push(slot);
                Event::Closed { flow }
            }
        }
    }

    /// Sends a command that needs no answer.
    fn send(&mut self, shaper: usize, message: Message) -> Result<(), FlowError> {
        let link = &mut self.links[shaper];
        if link.messages.push(message).is_err() {
            self.counters.blocked_ring += 1;
            return Err(FlowError::RingFull);
        }
        link.waker.wake();
        Ok(())
    }

    #[inline]
    fn send_closes(&mut self, shaper: usize) {
        let link = &mut self.links[shaper];
        while let Some(&slot) = link.closing.front()
            && link.has_room()
            && link.messages.push(Message::Close { slot }).is_ok()
        {
            link.closing.pop_front();
            link.pending += 1;
            link.waker.wake();
        }
    }

    fn publish(&mut self) {
        self.unpublished = 0;
        self.block.store(&self.counters);
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.publish();
        // The rings end first, so that the shapers see it when they look.
        let wakers: Vec<_> = self.links.drain(..).map(|link| link.waker).collect();
        for waker in wakers {
            waker.wake();
        }
    }
}

impl Link {
    #[inline]
    fn has_room(&self) -> bool {
        self.pending < self.pending_max && !self.messages.is_full()
    }

    fn room(&self) -> usize {
        self.messages.slots().min(self.pending_max - self.pending)
    }
}
