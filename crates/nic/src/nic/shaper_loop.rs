//! What one shaper thread does: takes packets and commands from the rings of its producers, stamps them,
//! hands what is due to the port in batches, and tells the producers what has left.
//!
//! ```text
//! producers' rings ──► take_in ──► Shaper (core): stamps, wheel ──► fill batch ──► Port::transmit ──►
//! answers
//! ```
//!
//! Batches go across flows, never within one (FlowBundler, INFOCOM 2023): a batch ends where a flow would
//! have a second packet in it, so that one system call serves many flows and no flow bursts.
//!
//! A [`ShaperLoop`] is a state and [`ShaperLoop::turn`]; the clock is an argument. The thread around it is in
//! [`super::thread`].

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
};

use tidegate_core::{
    Nanos,
    shaper::{ClassId, ClassOptions, Departure, FlowOptions, Rejected, Shaper},
    wheel::Refused,
};

use super::{
    counters::{Block, LatenessCells, NicCounters},
    handles::{Completions, ProducerToken},
    message::{Answer, AnswerKind, LaneFlow, Message, NewFlow, Outcome},
    store::{Store, Stored},
};
use crate::{
    aggregate::Share,
    packet::Packet,
    pool::PacketPool,
    port::Port,
    waiter::{Interest, Source, Waker},
};

/// The most packets that are handed to a port at once.
pub const BATCH_MAX: usize = 64;
/// The most messages that are taken from one producer in a turn.
pub const INTAKE_MAX: usize = 256;
/// The most batches in a turn: after them the producers are heard.
pub(super) const BATCHES_MAX: usize = 8;
/// The most frames that are received in a turn.
pub(super) const RECEIVE_MAX: usize = 64;
/// How often counters and classes are published while there is work.
const PUBLISH_EVERY: Nanos = Nanos(500_000);
/// A class whose rate is given away further ahead than this has more to send than it may.
const BACKLOGGED_AFTER: Nanos = Nanos(1_000_000);

/// A producer's end of the rings at a shaper.
pub(super) struct Lane {
    pub(super) messages: rtrb::Consumer<Message>,
    pub(super) answers: rtrb::Producer<Answer>,
    pub(super) waker: Waker,
    /// The producer wants to be woken when the ring has room.
    pub(super) wants_room: Arc<AtomicBool>,
    pub(super) flows: Box<[LaneFlow]>,
    /// Counts the producer as there until all its packets have left.
    pub(super) _token: Arc<ProducerToken>,
}

/// What a NIC tells its shapers.
pub(super) enum Control {
    Lane(Box<Lane>),
    Class { options: ClassOptions, parent: Option<u32>, share: Share },
    Port(Box<dyn Port>),
    Receiver { arrivals: rtrb::Producer<Packet>, waker: Waker },
}

pub(super) struct LaneHere {
    pub(super) lane: Box<Lane>,
    pub(super) held: u64,
    /// It has answers that it was not woken for.
    pub(super) notified: bool,
}

pub(super) struct ClassHere {
    pub(super) id: ClassId,
    pub(super) parent: Option<u32>,
    pub(super) share: Share,
    pub(super) sent_bytes: u64,
    /// It is in the list of those to publish.
    pub(super) listed: bool,
}

/// A packet that is being handed to the port; the packet itself is in `out`, in the same place.
pub(super) struct Leaving {
    pub(super) cookie: u64,
    pub(super) stamp: Nanos,
    pub(super) slot: u32,
    pub(super) lane: u32,
    pub(super) bytes: u32,
}

/// What a shaper is made of.
pub(super) struct ShaperParts {
    pub(super) shaper: Shaper<u32>,
    pub(super) capacity: usize,
    pub(super) completions: Completions,
    pub(super) control: rtrb::Consumer<Control>,
    pub(super) port: Box<dyn Port>,
    pub(super) pool: PacketPool,
    pub(super) block: Arc<Block>,
    pub(super) lateness: Arc<LatenessCells>,
    /// Rises when any part of an aggregate changes.
    pub(super) parts_version: Arc<AtomicU64>,
}

/// See the [module](self).
pub(super) struct ShaperLoop {
    pub(super) shaper: Shaper<u32>,
    pub(super) store: Store,
    pub(super) completions: Completions,
    pub(super) control: rtrb::Consumer<Control>,
    pub(super) port: Option<Box<dyn Port>>,
    pub(super) pool: PacketPool,
    pub(super) lanes: Vec<Option<LaneHere>>,
    pub(super) classes: Vec<ClassHere>,
    /// Classes that sent since they were published, or that are behind.
    pub(super) to_publish: Vec<u32>,
    pub(super) parts_version: Arc<AtomicU64>,
    pub(super) parts_seen: u64,
    pub(super) out: VecDeque<Packet>,
    pub(super) leaving: VecDeque<Leaving>,
    /// Due, and of a flow that the last batch had a packet of.
    pub(super) next: Option<Departure<u32>>,
    pub(super) batch: u32,
    pub(super) receiver: Option<(rtrb::Producer<Packet>, Waker)>,
    pub(super) received: Vec<Packet>,
    pub(super) receive_stalled: bool,
    /// How often the port has found no buffer.
    pub(super) no_buffer: u64,
    /// A ring was left with packets in it because the store was full.
    pub(super) full: bool,
    pub(super) published: Nanos,
    /// There was work since.
    pub(super) unpublished: bool,
    pub(super) counters: NicCounters,
    pub(super) block: Arc<Block>,
    pub(super) lateness: Arc<LatenessCells>,
}

impl ShaperLoop {
    pub(super) fn new(parts: ShaperParts) -> Self {
        Self {
            shaper: parts.shaper,
            store: Store::new(parts.capacity),
            completions: parts.completions,
            control: parts.control,
            port: Some(parts.port),
            pool: parts.pool,
            lanes: Vec::new(),
            classes: Vec::new(),
            to_publish: Vec::new(),
            parts_version: parts.parts_version,
            parts_seen: 0,
            out: VecDeque::with_capacity(BATCH_MAX),
            leaving: VecDeque::with_capacity(BATCH_MAX),
            next: None,
            batch: 0,
            receiver: None,
            received: Vec::with_capacity(RECEIVE_MAX),
            receive_stalled: false,
            no_buffer: 0,
            full: false,
            published: Nanos(0),
            unpublished: false,
            counters: NicCounters::default(),
            block: parts.block,
            lateness: parts.lateness,
        }
    }

    /// One round; says whether there was anything to do.
    pub(super) fn turn(&mut self, clock: &mut impl FnMut() -> Nanos) -> bool {
        let now = clock();
        let mut worked = self.obey();
        self.take_up_parts();
        worked |= self.take_in(now);
        worked |= self.depart(clock);
        worked |= self.receive(now);
        self.wake_producers();
        self.counters.turns += 1;
        self.unpublished |= worked;
        if now.0.abs_diff(self.published.0) >= PUBLISH_EVERY.0 {
            self.publish(now);
        }
        worked
    }

    /// When there is something to do again, if nothing comes.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        // While the port is full nothing can leave: its room is what is waited for.
        if !self.out.is_empty() {
            return None;
        }
        if self.next.is_some() { Some(Nanos(0)) } else { self.shaper.next_deadline() }
    }

    /// What ends a wait, besides wakers.
    pub(super) fn sources(&self) -> Option<Source<'_>> {
        let port = self.port.as_ref()?;
        let room = !self.out.is_empty();
        let arrivals = self.receiver.is_some() && !self.receive_stalled;
        let interest = match (arrivals, room) {
            (true, true) => Interest::Both,
            (true, false) => Interest::Arrivals,
            (false, true) => Interest::Room,
            // What is not read stays readable: it must be asked whether there is room for it now.
            (false, false) if self.receive_stalled => {
                return Some(Source::new(None, Interest::Room));
            }
            (false, false) => return None,
        };
        Some(Source::new(port.as_fd(), interest))
    }

    /// Whether nobody has put anything in a ring.
    pub(super) fn is_idle(&self) -> bool {
        let quiet = |here: &LaneHere| {
            (self.full || here.lane.messages.is_empty())
                && (here.held > 0 || !here.lane.messages.is_abandoned())
        };
        self.control.is_empty() && self.lanes.iter().flatten().all(quiet)
    }

    /// Writes down for other threads what was counted, and for the aggregates what was sent.
    pub(super) fn publish(&mut self, now: Nanos) {
        self.published = now;
        self.unpublished = false;
        let classes = &mut self.classes;
        self.to_publish.retain(|&index| {
            let class = &mut classes[index as usize];
            let behind = self.shaper.class_backlog(class.id, now) > BACKLOGGED_AFTER;
            class.share.publish(now, class.sent_bytes, behind);
            class.listed = behind;
            behind
        });
        let shaper = self.shaper.counters();
        self.counters.held_packets = self.held() as u64;
        self.counters.horizon_clamped = shaper.wheel.clamped;
        self.counters.past_stamps = shaper.wheel.past;
        self.counters.clock_steps = shaper.clock_steps;
        self.block.store(&self.counters);
    }

    /// The NIC ends: all packets are lost, and their senders are notified.
    pub(super) fn end(&mut self, now: Nanos) {
        self.lose_all(now);
        self.wake_producers();
        self.publish(now);
    }

    fn held(&self) -> usize {
        self.store.len() + self.out.len()
    }

    fn obey(&mut self) -> bool {
        let mut worked = false;
        // As many as the ring holds, at most.
        for _ in 0..self.control.slots() {
            let Ok(control) = self.control.pop() else { break };
            worked = true;
            match control {
                Control::Lane(lane) => {
                    let here = Some(LaneHere { lane, held: 0, notified: false });
                    match self.lanes.iter_mut().find(|lane| lane.is_none()) {
                        Some(free) => *free = here,
                        None => self.lanes.push(here),
                    }
                }
                Control::Class { options, parent, share } => {
                    let above = parent.and_then(|index| self.classes.get(index as usize));
                    let options = ClassOptions { parent: above.map(|class| class.id), ..options };
                    // The NIC has checked what the shaper checks.
                    if let Ok(id) = self.shaper.add_class(options) {
                        let (sent_bytes, listed) = (0, false);
                        self.classes.push(ClassHere { id, parent, share, sent_bytes, listed });
                        self.parts_seen = u64::MAX;
                    }
                }
                Control::Port(port) => {
                    self.port = Some(port);
                    (self.receive_stalled, self.no_buffer) = (false, 0);
                }
                Control::Receiver { arrivals, waker } => self.receiver = Some((arrivals, waker)),
            }
        }
        worked
    }

    /// Takes up what the aggregates gave this shaper, if anything changed.
    fn take_up_parts(&mut self) {
        let version = self.parts_version.load(Ordering::Acquire);
        if version == self.parts_seen {
            return;
        }
        self.parts_seen = version;
        for class in &mut self.classes {
            if let Some(rate) = class.share.take_change() {
                // The class is one of this shaper's.
                let _ = self.shaper.set_class_rate(class.id, rate);
            }
        }
    }

    /// Takes from every producer what it sent, up to a bound.
    fn take_in(&mut self, now: Nanos) -> bool {
        let mut worked = false;
        self.full = false;
        for index in 0..self.lanes.len() {
            let Some(here) = &mut self.lanes[index] else { continue };
            let waiting = here.lane.messages.slots().min(INTAKE_MAX);
            if waiting == 0 {
                if here.held == 0 && here.lane.messages.is_abandoned() {
                    worked |= self.forget_lane(index);
                }
                continue;
            }
            let taken = (0..waiting).take_while(|_| self.take_message(now, index)).count();
            worked |= taken > 0;
            let Some(here) = &self.lanes[index] else { continue };
            // What was taken is visible to a producer that asks for room after this.
            fence(Ordering::SeqCst);
            if here.lane.wants_room.load(Ordering::Relaxed)
                && taken > 0
                && here.lane.wants_room.swap(false, Ordering::Relaxed)
            {
                here.lane.waker.wake();
            }
        }
        worked
    }

    /// Takes one message. False: it must stay.
    #[inline]
    fn take_message(&mut self, now: Nanos, index: usize) -> bool {
        let Some(here) = &mut self.lanes[index] else { return false };
        let deferred = self.completions == Completions::Deferred;
        if deferred && self.store.is_full() {
            // What waits in the ring is not lost; commands behind it wait too.
            if let Ok(Message::Packet { .. }) = here.lane.messages.peek() {
                self.full = true;
                self.counters.full_waits += 1;
                return false;
            }
        }
        let Ok(message) = here.lane.messages.pop() else { return false };
        match message {
            Message::Packet { slot, wire_bytes, cookie, packet } => {
                let lane = index as u32;
                self.take_packet(now, Stored { packet, cookie, slot, lane }, wire_bytes);
            }
            Message::Open { slot, flow } => self.open_flow(index, slot, &flow),
            Message::Close { slot } => {
                let Some(flow) = here.lane.flows.get_mut(slot as usize) else { return true };
                flow.closing = true;
                if let Some(id) = flow.id {
                    // It is open.
                    let _ = self.shaper.close_flow(id);
                }
                if flow.held == 0 {
                    here.close(&mut self.counters, now, slot);
                }
            }
            Message::SetRate { slot, rate } => {
                if let Some(id) = here.lane.flows.get(slot as usize).and_then(|flow| flow.id) {
                    // It is open.
                    let _ = self.shaper.set_flow_rate(id, rate);
                }
            }
        }
        true
    }

    #[inline]
    fn take_packet(&mut self, now: Nanos, stored: Stored, wire_bytes: u32) {
        let (lane, slot, cookie) = (stored.lane as usize, stored.slot, stored.cookie);
        let Some(here) = &mut self.lanes[lane] else { return };
        let flow = here.lane.flows.get_mut(slot as usize);
        let outcome = match flow.as_ref().and_then(|flow| flow.id) {
            None => {
                self.counters.drop_closed += 1;
                Outcome::Dropped
            }
            Some(id) => match self.store.insert(stored) {
                Err(_) => {
                    self.counters.drop_full += 1;
                    Outcome::Dropped
                }
                Ok(handle) => match self.shaper.on_packet(now, id, wire_bytes, handle) {
                    Ok(_) => Outcome::Taken,
                    Err(rejected) => {
                        drop(self.store.take(handle));
                        match rejected {
                            Rejected::Wheel(Refused::Beyond) => self.counters.drop_beyond += 1,
                            Rejected::Wheel(Refused::Full) => self.counters.drop_full += 1,
                            Rejected::NoSuchFlow => self.counters.drop_closed += 1,
                        }
                        Outcome::Dropped
                    }
                },
            },
        };
        if outcome == Outcome::Taken {
            self.counters.taken_packets += 1;
            self.counters.taken_bytes += u64::from(wire_bytes);
            here.held += 1;
            if let Some(flow) = flow {
                flow.held += 1;
            }
            let held = (self.store.len() + self.out.len()) as u64;
            self.counters.held_packets_max = self.counters.held_packets_max.max(held);
        }
        if outcome == Outcome::Dropped || self.completions == Completions::Immediate {
            let kind = AnswerKind::Done(outcome);
            here.answer(Answer { slot, wire_bytes, kind, cookie, at: now });
        }
    }

    fn open_flow(&mut self, lane: usize, slot: u32, flow: &NewFlow) {
        let class = flow.class.map(|class| class.index);
        if class.is_some_and(|class| class as usize >= self.classes.len()) {
            // It was made before the flow was: what tells of it is in the other ring.
            self.obey();
        }
        let class_id = class.and_then(|class| self.classes.get(class as usize)).map(|here| here.id);
        let Some(here) = &mut self.lanes[lane] else { return };
        let Some(place) = here.lane.flows.get_mut(slot as usize) else { return };
        let options = FlowOptions { class: class_id, ..flow.options };
        // The table of flows is as long as those of all producers; a flow that cannot be opened drops.
        let id = if class.is_some() == class_id.is_some() {
            self.shaper.open_flow(options).ok()
        } else {
            None
        };
        let class_plus_one = class.map_or(0, |class| class + 1);
        *place = LaneFlow { id, class_plus_one, ..LaneFlow::default() };
        self.counters.opened_flows += 1;
        self.counters.open_flows += 1;
    }

    /// The producer has gone, and all that it sent has left.
    #[cold]
    fn forget_lane(&mut self, index: usize) -> bool {
        let Some(here) = &mut self.lanes[index] else { return false };
        // What it sent before it went is visible now.
        if !here.lane.messages.is_empty() {
            return true;
        }
        for flow in here.lane.flows.iter().filter(|flow| !flow.closing) {
            if let Some(id) = flow.id {
                let _ = self.shaper.close_flow(id);
                self.counters.open_flows = self.counters.open_flows.saturating_sub(1);
            }
        }
        self.lanes[index] = None;
        true
    }

    fn wake_producers(&mut self) {
        for here in self.lanes.iter_mut().flatten() {
            if std::mem::take(&mut here.notified) {
                here.lane.waker.wake();
            }
        }
    }
}

impl LaneHere {
    /// The last packet of a flow that was closed has left.
    pub(super) fn close(&mut self, counters: &mut NicCounters, now: Nanos, slot: u32) {
        if let Some(flow) = self.lane.flows.get_mut(slot as usize) {
            *flow = LaneFlow::default();
        }
        counters.open_flows = counters.open_flows.saturating_sub(1);
        self.answer(Answer { slot, wire_bytes: 0, kind: AnswerKind::Closed, cookie: 0, at: now });
    }

    #[inline]
    pub(super) fn answer(&mut self, answer: Answer) {
        // There is room: the producer bounds what it sends by it. One that has gone needs no answer.
        let _ = self.lane.answers.push(answer);
        self.notified = true;
    }
}

/// Counts what was sent for a class and those above it.
#[inline]
pub(super) fn charge(classes: &mut [ClassHere], to_publish: &mut Vec<u32>, class: u32, bytes: u32) {
    let mut above = Some(class);
    while let Some(index) = above {
        let Some(class) = classes.get_mut(index as usize) else { return };
        class.sent_bytes += u64::from(bytes);
        if !class.listed {
            class.listed = true;
            to_publish.push(index);
        }
        above = class.parent;
    }
}
