//! The shaper of Carousel: timestampers in front of one timing wheel.
//!
//! ```text
//! on_packet ──► stamps: the flow's rate, its class, the class's parents ──► wheel ──► poll: departures
//!               the latest counts                                            sorted by stamp
//! ```
//!
//! A *flow* is paced alone: it may have a rate of its own. A *class* is an aggregate of flows with a rate
//! that they share, and may have a parent class, up to [`MAX_DEPTH`]. There are two kinds of classes:
//!
//! - `fair: false`, the published rule: a packet is stamped by all its policies when it comes and leaves at
//!   the latest stamp. The class is one queue, first come first served, and relies on deferred completions
//!   ([`crate::completion`]) to keep each flow's part of it short. (A packet that its own rate holds longer
//!   than its class has used the class's time already: the class may exceed its rate by that much.)
//! - `fair: true`: the flows are isolated. A packet is first stamped by its flow alone, at the flow's share
//!   of the class, `rate x weight / weights of the flows that have packets here`. Only when that time has
//!   come is it stamped by the class. A flow with a long backlog fills its own time only, and a flow that
//!   starts goes ahead of those that are ahead of their share. The shares add up to the rate, so the second
//!   stamp moves a packet only while the shares change. A flow whose packet left late, because nobody polled,
//!   continues from where its share was, by up to the class's burst: a thread that wakes late costs no rate.
//!
//! O(1) a packet (twice for a fair class); no allocation after the start. Times come from one clock of the
//! caller's choice. A clock that steps back is held until it has caught up, and counted.

use alloc::{boxed::Box, vec, vec::Vec};

use crate::{
    stamp::Timestamper,
    units::{Nanos, Rate},
    wheel::{Beyond, Refused, Wheel, WheelCounters, WheelError, WheelOptions},
};

/// Classes above a flow at most.
pub const MAX_DEPTH: usize = 8;
/// The largest weight of a flow.
pub const MAX_WEIGHT: u32 = 10_000;
/// The most flows of a shaper.
pub const MAX_FLOWS: usize = 1 << 20;
/// The most classes of a shaper.
pub const MAX_CLASSES: usize = 1 << 16;

/// The most packets that one [`Shaper::poll`] moves on before the caller must call it again.
pub const MOVES_MAX: usize = 1 << 14;

/// The size of a shaper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShaperOptions {
    /// Its wheel.
    pub wheel: WheelOptions,
    /// How many flows may be open at once.
    pub flows: usize,
    /// How many classes there may be.
    pub classes: usize,
}

/// A class. Valid for its own shaper only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClassId(u32);

/// A flow. Valid for its own shaper, until the flow is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlowId {
    index: u32,
    generation: u32,
}

impl FlowId {
    /// A small number that no other open flow of the shaper has: for tables of the caller.
    #[must_use]
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// An aggregate of flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassOptions {
    /// The rate of its flows together.
    pub rate: Rate,
    /// For how long an idle class may save up credit.
    pub burst: Nanos,
    /// Its parent class.
    pub parent: Option<ClassId>,
    /// Whether its flows are isolated and share by weight; see the [module](self).
    pub fair: bool,
}

/// One flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowOptions {
    /// Its class.
    pub class: Option<ClassId>,
    /// Its own rate, if it has one.
    pub rate: Option<Rate>,
    /// For how long an idle flow may save up credit of its own rate.
    pub burst: Nanos,
    /// Its weight among the flows of a fair class: 1 to [`MAX_WEIGHT`].
    pub weight: u32,
}

impl Default for FlowOptions {
    /// A flow of no class and without a rate: its packets leave at once.
    fn default() -> Self {
        Self { class: None, rate: None, burst: Nanos(0), weight: 1 }
    }
}

/// Why a shaper, class or flow was refused. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShaperError {
    /// The wheel cannot be built.
    #[error(transparent)]
    Wheel(#[from] WheelError),
    /// More flows or classes than a shaper has.
    #[error("a shaper for {0} flows and {1} classes; it has at most {MAX_FLOWS} and {MAX_CLASSES}")]
    Size(usize, usize),
    /// All flows are open.
    #[error("the shaper has no room for another flow")]
    FlowsFull,
    /// All classes are used.
    #[error("the shaper has no room for another class")]
    ClassesFull,
    /// The class is not one of this shaper's.
    #[error("there is no such class")]
    NoSuchClass,
    /// The flow is closed, or not one of this shaper's.
    #[error("there is no such flow")]
    NoSuchFlow,
    /// The tree of classes is too deep.
    #[error("a class under {MAX_DEPTH} others")]
    TooDeep,
    /// A weight of zero, or above [`MAX_WEIGHT`].
    #[error("a weight of {0}; a flow's weight is 1 to {MAX_WEIGHT}")]
    Weight(u32),
}

/// Why a packet was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Rejected {
    /// The wheel did not take it. If it is [`Refused::Beyond`] its flow and class were charged nevertheless:
    /// the stamp says what was asked of them.
    #[error(transparent)]
    Wheel(#[from] Refused),
    /// The flow is closed, or not one of this shaper's.
    #[error("there is no such flow")]
    NoSuchFlow,
}

/// A packet whose time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure<T> {
    /// The handle that came with the packet.
    pub handle: T,
    /// Its flow: the completion is for this one.
    pub flow: FlowId,
    /// Its length on the wire.
    pub bytes: u32,
    /// Its departure time: the difference to now is the shaper's lateness.
    pub stamp: Nanos,
}

/// Counters of a shaper, since its start.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ShaperCounters {
    /// Packets taken.
    pub accepted: u64,
    /// Packets that left.
    pub departed: u64,
    /// Packets that were removed because their port had gone.
    pub drained: u64,
    /// Packets refused because their flow was closed or never open. The wheel counts what it refuses itself.
    pub no_such_flow: u64,
    /// Packets that left within two granularities of their stamp, including the rounding of the wheel.
    pub on_time: u64,
    /// The longest time between a stamp and its departure.
    pub lateness_max: Nanos,
    /// How often the clock was before an earlier reading.
    pub clock_steps: u64,
    /// Counters of the wheel.
    pub wheel: WheelCounters,
}

#[derive(Debug, Clone, Copy)]
struct Class {
    policy: Timestamper,
    parent: Option<u32>,
    fair: bool,
    /// The weights of the flows with packets here.
    active_weight: u64,
}

#[derive(Debug, Clone, Copy)]
struct Flow {
    generation: u32,
    state: FlowState,
    class: Option<u32>,
    policy: Option<Timestamper>,
    weight: u32,
    /// When its share of a fair class is used up until.
    share_finish: Nanos,
    /// When its last packet left.
    left: Nanos,
    /// Packets in the wheel.
    held: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FlowState {
    Free,
    Open,
    /// Closed by its owner, with packets still to leave.
    Closing,
}

#[derive(Debug, Default, Clone, Copy)]
struct Entry<T> {
    handle: T,
    stamp: Nanos,
    flow: u32,
    bytes: u32,
    /// The class is still to be asked.
    unstamped_class: bool,
    /// The stamp is that of a class alone: a hard limit, also where the wheel had to clamp it.
    hard: bool,
}

/// All flows, open or not.
#[derive(Debug)]
struct Flows {
    all: Box<[Flow]>,
    /// Numbers of the free ones.
    free: Vec<u32>,
}

/// A shaper of packets known by handles `T`. See the [module](self).
#[derive(Debug)]
pub struct Shaper<T> {
    wheel: Wheel<Entry<T>>,
    flows: Flows,
    classes: Vec<Class>,
    class_capacity: usize,
    now: Nanos,
    counters: ShaperCounters,
}

impl<T: Copy + Default> Shaper<T> {
    /// An empty shaper.
    ///
    /// # Errors
    /// If a size is out of bounds.
    pub fn new(options: ShaperOptions, now: Nanos) -> Result<Self, ShaperError> {
        let ShaperOptions { wheel, flows, classes } = options;
        if flows > MAX_FLOWS || classes > MAX_CLASSES {
            return Err(ShaperError::Size(flows, classes));
        }
        let free = Flow {
            generation: 0,
            state: FlowState::Free,
            class: None,
            policy: None,
            weight: 1,
            share_finish: Nanos(0),
            left: Nanos(0),
            held: 0,
        };
        Ok(Self {
            wheel: Wheel::new(wheel, now)?,
            flows: Flows {
                all: vec![free; flows].into_boxed_slice(),
                free: (0..flows as u32).rev().collect(),
            },
            classes: Vec::with_capacity(classes),
            class_capacity: classes,
            now,
            counters: ShaperCounters::default(),
        })
    }

    /// Makes a class. Classes last as long as the shaper.
    ///
    /// # Errors
    /// If all classes are used, or its parent is not a class here.
    pub fn add_class(&mut self, options: ClassOptions) -> Result<ClassId, ShaperError> {
        let ClassOptions { rate, burst, parent, fair } = options;
        if self.classes.len() == self.class_capacity {
            return Err(ShaperError::ClassesFull);
        }
        let parent = parent.map(|ClassId(index)| index);
        let (mut above, mut depth) = (parent, 0);
        while let Some(index) = above {
            above = self.classes.get(index as usize).ok_or(ShaperError::NoSuchClass)?.parent;
            depth += 1;
        }
        if depth >= MAX_DEPTH {
            return Err(ShaperError::TooDeep);
        }
        let policy = Timestamper::new(rate, burst);
        self.classes.push(Class { policy, parent, fair, active_weight: 0 });
        Ok(ClassId(self.classes.len() as u32 - 1))
    }

    /// Changes a class's rate. Stamped packets keep their time.
    ///
    /// # Errors
    /// If there is no such class.
    pub fn set_class_rate(&mut self, class: ClassId, rate: Rate) -> Result<(), ShaperError> {
        let class = self.classes.get_mut(class.0 as usize).ok_or(ShaperError::NoSuchClass)?;
        class.policy.set_rate(rate);
        Ok(())
    }

    /// How far ahead of now a class has given its rate away: its backlog as a time. For a fair class, whose
    /// packets ask it only when their flow's time has come, it is what came at once.
    #[must_use]
    pub fn class_backlog(&self, class: ClassId, now: Nanos) -> Nanos {
        let last = self.classes.get(class.0 as usize).map_or(Nanos(0), |class| class.policy.last());
        Nanos(last.0.saturating_sub(now.0))
    }

    /// Changes for how long an idle class may save up credit.
    ///
    /// # Errors
    /// If there is no such class.
    pub fn set_class_burst(&mut self, class: ClassId, burst: Nanos) -> Result<(), ShaperError> {
        let class = self.classes.get_mut(class.0 as usize).ok_or(ShaperError::NoSuchClass)?;
        class.policy.set_burst(burst);
        Ok(())
    }

    /// Opens a flow.
    ///
    /// # Errors
    /// If there is no room, or an option is wrong.
    pub fn open_flow(&mut self, options: FlowOptions) -> Result<FlowId, ShaperError> {
        let FlowOptions { class, rate, burst, weight } = options;
        if weight == 0 || weight > MAX_WEIGHT {
            return Err(ShaperError::Weight(weight));
        }
        if class.is_some_and(|ClassId(index)| index as usize >= self.classes.len()) {
            return Err(ShaperError::NoSuchClass);
        }
        let index = self.flows.free.pop().ok_or(ShaperError::FlowsFull)?;
        let flow = &mut self.flows.all[index as usize];
        *flow = Flow {
            generation: flow.generation,
            state: FlowState::Open,
            class: class.map(|ClassId(index)| index),
            policy: rate.map(|rate| Timestamper::new(rate, burst)),
            weight,
            share_finish: Nanos(0),
            left: Nanos(0),
            held: 0,
        };
        Ok(FlowId { index, generation: flow.generation })
    }

    /// Changes a flow's own rate. Stamped packets keep their time.
    ///
    /// # Errors
    /// If there is no such flow.
    pub fn set_flow_rate(&mut self, flow: FlowId, rate: Option<Rate>) -> Result<(), ShaperError> {
        let flow = self.flow(flow).ok_or(ShaperError::NoSuchFlow)?;
        match (&mut flow.policy, rate) {
            (Some(policy), Some(rate)) => policy.set_rate(rate),
            (policy, rate) => *policy = rate.map(|rate| Timestamper::new(rate, Nanos(0))),
        }
        Ok(())
    }

    /// Closes a flow. Its packets in the shaper still leave; its slot is free after that.
    ///
    /// # Errors
    /// If there is no such flow.
    pub fn close_flow(&mut self, id: FlowId) -> Result<(), ShaperError> {
        let flow = self.flow(id).ok_or(ShaperError::NoSuchFlow)?;
        flow.state = FlowState::Closing;
        let empty = flow.held == 0;
        if empty {
            self.flows.free(id.index);
        }
        Ok(())
    }

    /// Takes a packet of `bytes` on the wire; returns when it may leave, as far as known now.
    ///
    /// # Errors
    /// If the wheel does not take it, or the flow is not open.
    #[inline]
    pub fn on_packet(
        &mut self,
        now: Nanos,
        id: FlowId,
        bytes: u32,
        handle: T,
    ) -> Result<Nanos, Rejected> {
        let now = self.clock(now);
        if self.wheel.len() == self.wheel.capacity() {
            self.counters.wheel.full += 1;
            return Err(Refused::Full.into());
        }
        let known =
            |flow: &&mut Flow| flow.generation == id.generation && flow.state == FlowState::Open;
        let Some(flow) = self.flows.all.get_mut(id.index()).filter(known) else {
            self.counters.no_such_flow += 1;
            return Err(Rejected::NoSuchFlow);
        };
        let mut stamp =
            flow.policy.as_mut().map_or(now, |policy| policy.stamp(now, bytes)).max(now);
        let mut unstamped_class = false;
        if let Some(class) = flow.class {
            let fair = self.classes[class as usize].fair;
            if fair {
                let class = &self.classes[class as usize];
                // The flow itself counts among those that are active.
                let others =
                    class.active_weight - u64::from(flow.weight) * u64::from(flow.held > 0);
                let weights = others + u64::from(flow.weight);
                let time = class.policy.time_for(bytes).0.saturating_mul(weights);
                // A flow that just had a packet leave was not idle but late: it goes on in the past.
                let credit = Nanos(now.0.saturating_sub(class.policy.burst().0));
                if flow.left >= credit && flow.policy.is_none() {
                    stamp = credit;
                }
                stamp = stamp.max(flow.share_finish);
                flow.share_finish = Nanos(stamp.0.saturating_add(time / u64::from(flow.weight)));
                unstamped_class = true;
            } else {
                stamp = stamp.max(Self::reserve(&mut self.classes, class, now, bytes));
            }
        }
        let entry = Entry { handle, stamp, flow: id.index, bytes, unstamped_class, hard: false };
        self.wheel.insert(now, stamp, entry)?;
        let flow = &mut self.flows.all[id.index()];
        flow.held += 1;
        if flow.held == 1
            && let Some(class) = flow.class
        {
            self.classes[class as usize].active_weight += u64::from(flow.weight);
        }
        self.counters.accepted += 1;
        Ok(stamp)
    }

    /// The next packet whose time has come. `None`: there is none now; or it has moved [`MOVES_MAX`] packets
    /// on, which have to wait for their class, and [`Shaper::next_deadline`] says to call again.
    #[inline]
    pub fn poll(&mut self, now: Nanos) -> Option<Departure<T>> {
        let now = self.clock(now);
        // Every round takes a packet out or moves one on, by a horizon at most: after a large clock step that
        // may still be in the past.
        for _ in 0..MOVES_MAX {
            let entry = self.wheel.pop(now)?;
            let mut stamp = entry.stamp;
            if entry.hard && stamp > now {
                // It was beyond the horizon, and has come nearer. There is room: it has just left it.
                if self.wheel.insert_or(now, stamp, entry, Beyond::Clamp).is_ok() {
                    continue;
                }
            }
            if entry.unstamped_class
                && let Some(class) = self.flows.all[entry.flow as usize].class
            {
                // By its own time, not by now: lateness must not cost the class its rate.
                let own = entry.stamp.min(now);
                stamp = stamp.max(Self::reserve(&mut self.classes, class, own, entry.bytes));
                if stamp > now {
                    let moved = Entry { stamp, unstamped_class: false, hard: true, ..entry };
                    if self.wheel.insert_or(now, stamp, moved, Beyond::Clamp).is_ok() {
                        continue;
                    }
                }
            }
            return Some(self.depart(now, stamp, entry));
        }
        None
    }

    /// When [`Shaper::poll`] has the next packet; `None` if the shaper is empty.
    #[inline]
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.wheel.next_deadline()
    }

    /// Takes all packets, whatever their time: for a port that has gone.
    pub fn drain(&mut self, mut take: impl FnMut(Departure<T>)) {
        let Self { wheel, flows, classes, counters, .. } = self;
        wheel.drain(|entry| {
            let flow = flows.leave(entry.flow, classes);
            counters.drained += 1;
            take(Departure { handle: entry.handle, flow, bytes: entry.bytes, stamp: entry.stamp });
        });
    }

    /// How many packets it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.wheel.len()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.wheel.is_empty()
    }

    /// The granularity of departure times.
    #[must_use]
    pub fn granularity(&self) -> Nanos {
        self.wheel.granularity()
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> ShaperCounters {
        let wheel = self.wheel.counters();
        let full = wheel.full + self.counters.wheel.full;
        ShaperCounters { wheel: WheelCounters { full, ..wheel }, ..self.counters }
    }

    fn flow(&mut self, id: FlowId) -> Option<&mut Flow> {
        let flow = self.flows.all.get_mut(id.index())?;
        (flow.generation == id.generation && flow.state == FlowState::Open).then_some(flow)
    }

    /// A clock that never goes back.
    #[inline]
    fn clock(&mut self, now: Nanos) -> Nanos {
        if now < self.now {
            self.counters.clock_steps += 1;
        } else {
            self.now = now;
        }
        self.now
    }

    /// The latest stamp of a class and its ancestors; charges all.
    #[inline]
    fn reserve(classes: &mut [Class], class: u32, now: Nanos, bytes: u32) -> Nanos {
        let (mut stamp, mut above) = (Nanos(0), Some(class));
        while let Some(index) = above {
            let class = &mut classes[index as usize];
            stamp = stamp.max(class.policy.stamp(now, bytes));
            above = class.parent;
        }
        stamp
    }

    #[inline]
    fn depart(&mut self, now: Nanos, stamp: Nanos, entry: Entry<T>) -> Departure<T> {
        let late = now.0.saturating_sub(stamp.0);
        self.counters.departed += 1;
        self.counters.on_time += u64::from(late <= 2 * self.wheel.granularity().0);
        self.counters.lateness_max = self.counters.lateness_max.max(Nanos(late));
        let flow = self.flows.leave(entry.flow, &mut self.classes);
        self.flows.all[flow.index()].left = now;
        Departure { handle: entry.handle, flow, bytes: entry.bytes, stamp }
    }
}

impl Flows {
    /// A packet of this flow has left the shaper.
    #[inline]
    fn leave(&mut self, index: u32, classes: &mut [Class]) -> FlowId {
        let flow = &mut self.all[index as usize];
        let id = FlowId { index, generation: flow.generation };
        flow.held -= 1;
        if flow.held == 0 {
            if let Some(class) = flow.class {
                classes[class as usize].active_weight -= u64::from(flow.weight);
            }
            if flow.state == FlowState::Closing {
                self.free(index);
            }
        }
        id
    }

    fn free(&mut self, index: u32) {
        let flow = &mut self.all[index as usize];
        flow.state = FlowState::Free;
        flow.generation = flow.generation.wrapping_add(1);
        self.free.push(index);
    }
}

#[cfg(test)]
mod tests;
