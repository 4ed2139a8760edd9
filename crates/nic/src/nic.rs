//! The software NIC as a library: network stacks in user space hand it packets, and it sends each when the
//! rates of its flow and of its classes allow (Carousel: Saeed et al., SIGCOMM 2017).
//!
//! ```text
//! application thread            shaper thread, one a core
//! ┌──────────┐ packets, flows  ┌──────────────────────────────┐
//! │ Producer ├───── ring ─────►│ stamps ─► wheel ─► batches   ├──► Port
//! │          │◄──── ring ──────┤ answers                      │◄── arrivals
//! └──────────┘ completions     └──────────────────────────────┘
//! ```
//!
//! Each application thread has a [`Producer`] of its own, each shaper a thread; between any two of them is a
//! pair of rings with one writer and one reader, so that the data path takes no lock. A flow belongs to one
//! producer and, by its key, to one shaper. A class may have flows anywhere: its rate is divided over the
//! shapers ten times a second ([`crate::aggregate`]). Inside a shaper the flows of a fair class share by
//! weight; between shapers the class is divided by demand, whatever the number of flows.
//!
//! **Backpressure.** A completion is given when the packet leaves, not when the shaper takes it. Until then
//! it counts against the flow's allowance of two segments, and a flow without allowance is refused and
//! notified when it may go on ([`Event::Writable`]): its data stays with the application. So the shaper holds
//! two segments a flow at most, or as much in smaller packets, and nothing is dropped.
//! [`Completions::Immediate`] is what shapers did before: packets pile up in the wheel, and what does not fit
//! is dropped and counted.
//!
//! **Failure.** All tables and rings are bounded; what is full refuses, counts, and tells when there is room.
//! A port that goes away takes its packets along, their senders are notified ([`Outcome::Lost`]), and the
//! shaper goes on: packets are lost when their time has come, until [`Nic::attach_port`] brings a new port.
//! What was counted can be read from any thread at any time ([`Nic::counters`]).

pub mod counters;
mod departures;
mod handles;
mod message;
pub mod producer;
mod shaper_loop;
mod store;
mod thread;

use std::{
    collections::VecDeque,
    io,
    os::unix::thread::JoinHandleExt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{JoinHandle, yield_now},
    time::{Duration, Instant},
};

use rtrb::RingBuffer;
use tidegate_core::{
    Nanos, Rate, completion,
    shaper::{self, MAX_CLASSES, MAX_DEPTH, MAX_FLOWS, Shaper, ShaperError, ShaperOptions},
    wheel::WheelOptions,
};

use self::{
    counters::{Block, LatenessCells},
    handles::ProducerToken,
    message::{Answer, LaneFlow, Message},
    producer::{Link, ProducerParts},
    shaper_loop::{Control, Lane, ShaperLoop, ShaperParts},
    thread::{Filler, Place},
};
pub use self::{
    counters::{Lateness, NicCounter, NicCounters},
    handles::{Class, Completions},
    message::Outcome,
    producer::{Event, Flow, FlowError, FlowOptions, Producer, Refusal, SubmitError, WaitError},
    shaper_loop::{BATCH_MAX, INTAKE_MAX},
};
use crate::{
    aggregate::{Aggregate, AggregateError},
    packet::Packet,
    pool::{PacketPool, PoolError, PoolSize},
    port::Port,
    waiter::{Mode, Waiter, Waker, now},
};

/// The most shapers of a NIC.
pub const SHAPERS_MAX: usize = 256;
/// The most producers of a NIC.
pub const PRODUCERS_MAX: usize = 1 << 16;
/// The most entries of a ring.
pub const RING_MAX: usize = 1 << 22;
/// Frames that may wait for an application to receive them, of one port.
const ARRIVALS: usize = 1_024;
/// Commands that may wait for a shaper.
const CONTROLS: usize = 64;
/// How long a command waits for a shaper that does not listen.
const CONTROL_PATIENCE: Duration = Duration::from_secs(2);

/// The size and the ways of a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicOptions {
    /// The wheel of each shaper; its capacity is how many packets a shaper holds.
    pub wheel: WheelOptions,
    /// How many classes there may be.
    pub classes: usize,
    /// How many producers there may be at once.
    pub producers: usize,
    /// How many flows each producer may have open.
    pub flows: usize,
    /// How many packets and commands may wait in a ring from a producer to a shaper.
    pub ring: usize,
    /// How many packets of one producer may be in one shaper, or on the way there and back.
    pub pending: usize,
    /// How many segments a flow may have in the shaper.
    pub allowance: u32,
    /// The time in which a flow sends a segment of [`SEGMENT_BYTES_MAX`] at most: one with a rate of its own
    /// may have as many bytes in the shaper as its segments would be. Zero, or no rate: each packet counts
    /// as a segment, however short.
    ///
    /// [`SEGMENT_BYTES_MAX`]: tidegate_core::completion::SEGMENT_BYTES_MAX
    pub segment_time: Nanos,
    /// When completions are given.
    pub completions: Completions,
    /// How shapers wait.
    pub shaper_mode: Mode,
    /// How producers wait.
    pub producer_mode: Mode,
    /// The CPU of each shaper's thread, in order; those without one run where the kernel puts them.
    pub cpus: Vec<usize>,
    /// The shapers' threads ask for the real-time class, and leave others a tenth of the time
    /// ([`Waiter::rest`]): nothing else that runs delays them for long. They work without it, less exactly.
    pub realtime: bool,
    /// The buffers of each shaper, for frames that arrive and those that a port must copy.
    pub pool: PoolSize,
    /// What flows' keys are hashed with: secret where a sender could choose flows that share a shaper.
    pub hash_seed: u64,
}

impl Default for NicOptions {
    /// For some thousands of flows of a few threads.
    fn default() -> Self {
        Self {
            wheel: WheelOptions::default(),
            classes: 1_024,
            producers: 4,
            flows: 16_384,
            ring: 4_096,
            pending: 65_536,
            allowance: completion::ALLOWANCE_SEGMENTS,
            segment_time: completion::SEGMENT_TIME,
            completions: Completions::Deferred,
            shaper_mode: Mode::Auto,
            producer_mode: Mode::Auto,
            cpus: Vec::new(),
            realtime: false,
            pool: PoolSize { small: 4_096, large: 64 },
            hash_seed: 0,
        }
    }
}

/// What a class is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassOptions {
    /// What its flows may send together.
    pub rate: Rate,
    /// For how long an idle class may save up credit.
    pub burst: Nanos,
    /// The class that it is a part of.
    pub parent: Option<Class>,
    /// Whether its flows are isolated and share by weight, on each shaper.
    pub fair: bool,
}

/// Why a NIC cannot be had, or does not do what it was asked. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// A number is out of range.
    #[error("{field} is {read}: use {expected}")]
    Invalid {
        /// Which.
        field: &'static str,
        /// What was given.
        read: usize,
        /// What to give.
        expected: &'static str,
    },
    /// A shaper cannot be that large.
    #[error(transparent)]
    Shaper(#[from] ShaperError),
    /// A class cannot have that rate.
    #[error(transparent)]
    Aggregate(#[from] AggregateError),
    /// Not enough memory for packets.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The kernel refused.
    #[error("cannot {action}: {source}")]
    Refused {
        /// What was asked, as a phrase that follows "cannot".
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// All producers are there.
    #[error("the NIC has {0} producers: drop one, or give it more (NicOptions::producers)")]
    TooManyProducers(usize),
    /// The class is another NIC's.
    #[error("there is no such class")]
    NoSuchClass,
    /// The shaper does not take commands: its CPU is taken by others, or its thread has ended.
    #[error("shaper {0} does not answer")]
    Deaf(usize),
}

/// The NIC's end of a shaper.
struct ShaperEnd {
    control: rtrb::Producer<Control>,
    waker: Waker,
    block: Arc<Block>,
    lateness: Arc<LatenessCells>,
    thread: Option<JoinHandle<()>>,
}

/// What only commands touch, never packets.
struct State {
    shapers: Vec<ShaperEnd>,
    /// The parent of each class.
    parents: Vec<Option<u32>>,
    producers_made: u32,
    /// Of producers that are there.
    producers: Vec<Arc<Block>>,
    /// Of those that have gone.
    past: NicCounters,
}

/// A software NIC. See the [module](self). Dropping it ends its threads; what has not left is lost.
pub struct Nic {
    options: NicOptions,
    number: u64,
    state: Mutex<State>,
    filler: Arc<Filler>,
    filler_thread: Option<JoinHandle<()>>,
    producers_there: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
}

impl Nic {
    /// A NIC with a shaper for each port: one port has one shaper, and a device with several queues gives
    /// a port for each.
    ///
    /// # Errors
    /// If a size is out of range, or there is not enough memory, threads or descriptors.
    pub fn new(options: NicOptions, ports: Vec<Box<dyn Port>>) -> Result<Self, NicError> {
        check(&options, ports.len())?;
        let filler = Arc::new(Filler::new());
        static MADE: AtomicU64 = AtomicU64::new(0);
        let state = State {
            shapers: Vec::with_capacity(ports.len()),
            parents: Vec::new(),
            producers_made: 0,
            producers: Vec::new(),
            past: NicCounters::default(),
        };
        let mut nic = Self {
            number: MADE.fetch_add(1, Ordering::Relaxed),
            state: Mutex::new(state),
            filler,
            filler_thread: None,
            producers_there: Arc::new(AtomicUsize::new(0)),
            stop: Arc::new(AtomicBool::new(false)),
            options,
        };
        // If one fails, dropping the NIC ends those before it.
        for (index, port) in ports.into_iter().enumerate() {
            let end = nic.start_shaper(index, port)?;
            nic.lock().shapers.push(end);
        }
        if nic.shapers() > 1 {
            let thread = nic.filler.spawn(Arc::clone(&nic.stop));
            nic.filler_thread = Some(thread.map_err(refused("start a thread"))?);
        }
        Ok(nic)
    }

    /// How many shapers it has.
    #[must_use]
    pub fn shapers(&self) -> usize {
        self.lock().shapers.len()
    }

    /// A producer for one more application thread.
    ///
    /// # Errors
    /// If there are as many as there may be, or no descriptor is left.
    pub fn producer(&self) -> Result<Producer, NicError> {
        let options = &self.options;
        let mut state = self.lock();
        if self.producers_there.load(Ordering::Relaxed) >= options.producers {
            return Err(NicError::TooManyProducers(options.producers));
        }
        let waiter = Waiter::new(options.producer_mode).map_err(refused("make an eventfd"))?;
        self.producers_there.fetch_add(1, Ordering::Relaxed);
        let token = Arc::new(ProducerToken(Arc::clone(&self.producers_there)));
        let mut links = Vec::with_capacity(state.shapers.len());
        for index in 0..state.shapers.len() {
            let (messages, from_producer) = RingBuffer::<Message>::new(options.ring);
            let (to_producer, answers) = RingBuffer::<Answer>::new(options.pending);
            let wants_room = Arc::new(AtomicBool::new(false));
            let lane = Lane {
                messages: from_producer,
                answers: to_producer,
                waker: waiter.waker(),
                wants_room: Arc::clone(&wants_room),
                flows: vec![LaneFlow::default(); options.flows].into_boxed_slice(),
                _token: Arc::clone(&token),
            };
            // Shapers that have a lane of a producer that was not made see it abandoned.
            state.tell(index, Control::Lane(Box::new(lane)))?;
            links.push(Link {
                messages,
                answers,
                waker: state.shapers[index].waker.clone(),
                wants_room,
                pending: 0,
                pending_max: options.pending,
                waiting: VecDeque::new(),
                notified: 0,
                closing: VecDeque::new(),
            });
        }
        let block = Arc::new(Block::new());
        state.retire_producers();
        state.producers.push(Arc::clone(&block));
        state.producers_made = state.producers_made.wrapping_add(1);
        Ok(Producer::new(ProducerParts {
            number: state.producers_made,
            links,
            flows: options.flows,
            allowance: match options.completions {
                Completions::Deferred => options.allowance,
                // Nothing but the rings holds it back.
                Completions::Immediate => u32::MAX,
            },
            segment_time: options.segment_time,
            hash_seed: options.hash_seed,
            nic: self.number,
            waiter,
            block,
            token,
        }))
    }

    /// Makes a class. Classes last as long as the NIC.
    ///
    /// # Errors
    /// If there are too many, or too many above each other, the rate is too small, or the parent is
    /// another NIC's.
    pub fn add_class(&self, options: ClassOptions) -> Result<Class, NicError> {
        let ClassOptions { rate, burst, parent, fair } = options;
        let mut state = self.lock();
        if state.parents.len() >= self.options.classes {
            return Err(ShaperError::ClassesFull.into());
        }
        if parent.is_some_and(|parent| parent.nic != self.number) {
            return Err(NicError::NoSuchClass);
        }
        let parent = parent.map(|parent| parent.index);
        let above = |index: &u32| state.parents.get(*index as usize).copied().flatten();
        if std::iter::successors(parent, above).count() >= MAX_DEPTH {
            return Err(ShaperError::TooDeep.into());
        }
        let (aggregate, shares) = Aggregate::new(rate, state.shapers.len())?;
        for index in 0..state.shapers.len() {
            state.room(index)?;
        }
        let index = state.parents.len() as u32;
        state.parents.push(parent);
        self.aggregates().push(aggregate);
        for (shaper, share) in shares.into_iter().enumerate() {
            let options = shaper::ClassOptions { rate: share.part(), burst, parent: None, fair };
            state.tell(shaper, Control::Class { options, parent, share })?;
        }
        Ok(Class { index, nic: self.number })
    }

    /// Changes a class's rate, at once. Packets that are stamped keep their time.
    ///
    /// # Errors
    /// If the rate is too small, or the class is another NIC's.
    pub fn set_class_rate(&self, class: Class, rate: Rate) -> Result<(), NicError> {
        let mut aggregates = self.aggregates();
        let ours = class.nic == self.number;
        let aggregate = aggregates.get_mut(class.index as usize).filter(|_| ours);
        aggregate.ok_or(NicError::NoSuchClass)?.set_rate(rate)?;
        self.filler.changed();
        Ok(())
    }

    /// Gives a shaper another port, in place of the one that it has or that has gone.
    ///
    /// # Errors
    /// If there is no such shaper, or it does not answer.
    pub fn attach_port(&self, shaper: usize, port: Box<dyn Port>) -> Result<(), NicError> {
        self.lock().tell(shaper, Control::Port(port))
    }

    /// Lets a producer receive the frames that arrive at a shaper's port ([`Producer::receive`]), in place
    /// of who did before. Without a receiver a port is not read.
    ///
    /// # Errors
    /// If there is no such shaper, or it does not answer.
    pub fn receive_at(&self, shaper: usize, producer: &mut Producer) -> Result<(), NicError> {
        let (arrivals, consumer) = RingBuffer::<Packet>::new(ARRIVALS);
        let waker = producer.waker();
        self.lock().tell(shaper, Control::Receiver { arrivals, waker })?;
        producer.add_arrivals(consumer);
        Ok(())
    }

    /// What all of it did, as of half a millisecond ago.
    #[must_use]
    pub fn counters(&self) -> NicCounters {
        let state = self.lock();
        let mut all = state.past;
        let blocks = state.shapers.iter().map(|end| &end.block).chain(&state.producers);
        blocks.for_each(|block| all.add(&block.load()));
        all
    }

    /// What each shaper did.
    #[must_use]
    pub fn shaper_counters(&self) -> Vec<NicCounters> {
        self.lock().shapers.iter().map(|end| end.block.load()).collect()
    }

    /// How late packets left, by all shapers.
    #[must_use]
    pub fn lateness(&self) -> Lateness {
        let mut lateness = Lateness::none();
        self.lock().shapers.iter().for_each(|end| end.lateness.add_to(&mut lateness));
        lateness
    }

    /// The CPU time of each shaper's thread; zero of one that has ended.
    #[must_use]
    pub fn cpu_times(&self) -> Vec<Nanos> {
        self.lock()
            .shapers
            .iter()
            .map(|end| end.thread.as_ref().map_or(Nanos(0), cpu_time))
            .collect()
    }

    fn start_shaper(&self, index: usize, port: Box<dyn Port>) -> Result<ShaperEnd, NicError> {
        let options = &self.options;
        let sizes = ShaperOptions {
            wheel: options.wheel,
            flows: options.producers * options.flows,
            classes: options.classes,
        };
        let (control, from_nic) = RingBuffer::new(CONTROLS);
        let waiter = Waiter::new(options.shaper_mode).map_err(refused("make an eventfd"))?;
        let (block, lateness) = (Arc::new(Block::new()), Arc::new(LatenessCells::new()));
        let shaper = ShaperLoop::new(ShaperParts {
            shaper: Shaper::new(sizes, now())?,
            capacity: options.wheel.capacity,
            completions: options.completions,
            control: from_nic,
            port,
            pool: PacketPool::new(options.pool)?,
            block: Arc::clone(&block),
            lateness: Arc::clone(&lateness),
            parts_version: Arc::clone(&self.filler.parts_version),
        });
        let place = Place { cpu: options.cpus.get(index).copied(), realtime: options.realtime };
        let waker = waiter.waker();
        let thread = thread::spawn_shaper(index, shaper, waiter, Arc::clone(&self.stop), place)
            .map_err(refused("start a thread with the CPU that was asked for"))?;
        Ok(ShaperEnd { control, waker, block, lateness, thread: Some(thread) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn aggregates(&self) -> MutexGuard<'_, Vec<Aggregate>> {
        self.filler.aggregates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        self.filler.stop(&self.stop);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for end in &state.shapers {
            end.waker.wake();
        }
        let shapers = state.shapers.iter_mut().filter_map(|end| end.thread.take());
        for thread in shapers.chain(self.filler_thread.take()) {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl State {
    /// Sends a command to a shaper.
    fn tell(&mut self, shaper: usize, control: Control) -> Result<(), NicError> {
        self.room(shaper)?;
        let end = &mut self.shapers[shaper];
        end.control.push(control).map_err(|_| NicError::Deaf(shaper))?;
        end.waker.wake();
        Ok(())
    }

    /// Waits until a shaper takes commands.
    fn room(&self, shaper: usize) -> Result<(), NicError> {
        let Some(end) = self.shapers.get(shaper) else {
            let (field, expected) = ("the shaper", "the number of one of the NIC's, from zero");
            return Err(NicError::Invalid { field, read: shaper, expected });
        };
        let deadline = Instant::now() + CONTROL_PATIENCE;
        while end.control.is_full() && !end.control.is_abandoned() && Instant::now() < deadline {
            end.waker.wake();
            yield_now();
        }
        if end.control.is_full() || end.control.is_abandoned() {
            return Err(NicError::Deaf(shaper));
        }
        Ok(())
    }

    /// Keeps what producers counted that have gone.
    fn retire_producers(&mut self) {
        let past = &mut self.past;
        self.producers.retain(|block| {
            let there = Arc::strong_count(block) > 1;
            if !there {
                past.add(&block.load());
            }
            there
        });
    }
}

fn check(options: &NicOptions, ports: usize) -> Result<(), NicError> {
    let sizes = [
        ("the number of ports", ports, SHAPERS_MAX, "1 to 256"),
        ("the number of producers", options.producers, PRODUCERS_MAX, "1 to 65536"),
        ("the number of flows", options.flows, MAX_FLOWS, "1 to 1048576"),
        ("the ring", options.ring, RING_MAX, "1 to 4194304"),
        ("pending completions", options.pending, RING_MAX, "1 to 4194304"),
    ];
    for (field, read, most, expected) in sizes {
        if !(1..=most).contains(&read) {
            return Err(NicError::Invalid { field, read, expected });
        }
    }
    let flows = options.producers.saturating_mul(options.flows);
    if flows > MAX_FLOWS || options.classes > MAX_CLASSES {
        return Err(ShaperError::Size(flows, options.classes).into());
    }
    Ok(())
}

fn refused(action: &'static str) -> impl Fn(io::Error) -> NicError {
    move |source| NicError::Refused { action, source }
}

fn cpu_time(thread: &JoinHandle<()>) -> Nanos {
    if thread.is_finished() {
        return Nanos(0);
    }
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the handle was not joined, so the thread's description is there, if the thread is not.
    let known = unsafe { libc::pthread_getcpuclockid(thread.as_pthread_t(), &raw mut clock) };
    // SAFETY: `time` is one timespec.
    if known != 0 || unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Nanos(0);
    }
    Nanos(time.tv_sec as u64 * tidegate_core::units::NANOS_PER_SEC + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests;
