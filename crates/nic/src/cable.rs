//! A cable with a rate, a queue, a delay, loss and reordering: two ports joined by a
//! [`Link`](tidegate_core::link::Link) of each direction, run by one thread. What netem is elsewhere, in
//! user space.
//!
//! ```text
//! left port ──► link ──► timing wheel ──► right port
//! left port ◄── timing wheel ◄── link ◄── right port
//! ```
//!
//! The link says when a packet's last bit arrives; the wheel keeps it until then; the thread sleeps as its
//! [`Waiter`] finds right. How long a packet waited in the kernel for this thread is not known to it; so
//! arrivals are dated back, by a rule that is right in the mean:
//!
//! ```text
//! arrival = now - usual wake-up                if it ended a sleep
//!         = middle of (last look, now)         else; with a rate, no later than the link fell idle, if that
//!                                              was after the last look: a stall of the thread idles no link
//! ```
//!
//! A packet whose time is over when it is found leaves at once. [`LaneCounters`] has how late packets left.
//!
//! The unit is what a port hands over: with offloads a segment of up to 64 KB, which then takes its whole
//! time on the link before its first byte arrives, and would be lost as a whole. [`wants_segments`] says
//! when that does not matter; otherwise open the ports without offloads.
//!
//! All memory is taken at the start: for as many packets as the delay and the queue hold at the rate, at most
//! [`FRAMES_MAX`] and [`SEGMENTS_MAX`] a direction. What comes beyond is dropped, and counted as such. A
//! stall of the thread delays packets and drops none, up to [`STALL_MAX`].

mod lane;

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use rand_xoshiro::{Xoshiro256PlusPlus, rand_core::SeedableRng as _};
use tidegate_core::{
    Bytes, Nanos, Rate,
    link::LinkOptions,
    wheel::{Beyond, Wheel, WheelError, WheelOptions},
};
use tidegate_sys::sched::make_realtime;

use crate::{
    pool::{PacketPool, PoolError, PoolSize},
    port::{Port, PortCounters, PortError},
    waiter::{Interest, Mode, Source, Waiter, WaiterCounters, Waker, Woken, now},
};
use lane::Lane;

/// Most packets of one direction on the way at once.
pub const FRAMES_MAX: u32 = 1 << 16;
/// Most of these that may be longer than [`SMALL_BUFFER_BYTES`](crate::buffer::SMALL_BUFFER_BYTES).
pub const SEGMENTS_MAX: u32 = 1 << 12;
/// Longest time on the way, queue included: what a queue without bound is cut to.
pub const HORIZON_MAX: Nanos = Nanos(4_000_000_000);
/// A thread that is away for so long after a packet was due drops none when it comes back: what it finds then
/// is late. Whole machines have been seen to stand still for 20 ms.
pub const STALL_MAX: Nanos = Nanos(60_000_000);
/// A link that sends a segment in less than this may have it whole.
pub const SEGMENT_TIME_MAX: Nanos = Nanos(250_000);

/// The longest segment, in bytes.
const SEGMENT_BYTES: u64 = 1 << 16;
/// Slots of a wheel: as fine as this number allows, and never coarser than 16 us.
const SLOTS: u64 = 1 << 18;
const GRANULARITY_MIN_NS: u64 = 256;
/// What a link without a rate is taken for when memory is reserved.
const FASTEST_BIT_S: u64 = 10_000_000_000;
/// Mean sizes that memory is reserved for, and how many there are at least.
const FRAME_BYTES_MEAN: u64 = 512;
const SEGMENT_BYTES_MEAN: u64 = 8192;
const FRAMES_MIN: u64 = 2048;
const SEGMENTS_MIN: u64 = 128;
/// How often counters are published while there is no time to sleep.
const PUBLISH_EVERY_NS: u64 = 1_000_000;

/// What a cable is to be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CableOptions {
    /// From the left port to the right.
    pub rightward: LinkOptions,
    /// From the right port to the left.
    pub leftward: LinkOptions,
    /// Decides which packets are lost and overtaken. The same seed and the same packets, the same fate.
    pub seed: u64,
    /// How the thread waits.
    pub mode: Mode,
    /// The thread asks for the real-time class; it works without, less exactly.
    pub realtime: bool,
    /// The ports hand over segments of up to 64 KB.
    pub segments: bool,
}

impl CableOptions {
    /// The same link in both directions; segments as [`wants_segments`] says.
    pub fn symmetric(link: LinkOptions, seed: u64) -> Self {
        Self {
            rightward: link,
            leftward: link,
            seed,
            mode: Mode::Auto,
            realtime: true,
            segments: wants_segments(&link),
        }
    }
}

impl CableOptions {
    /// Whether a cable of these can be made.
    ///
    /// Errors: [`CableError::TooLong`].
    pub fn check(&self) -> Result<(), CableError> {
        Size::of(&self.rightward, self.segments)?;
        Size::of(&self.leftward, self.segments).map(drop)
    }
}

/// True if a link may be given segments of up to 64 KB: if it sends one within [`SEGMENT_TIME_MAX`], and
/// loses and reorders nothing.
pub fn wants_segments(link: &LinkOptions) -> bool {
    let quick = |rate: Rate| rate.time_for(Bytes(SEGMENT_BYTES)) <= SEGMENT_TIME_MAX;
    link.rate.is_none_or(quick) && link.loss <= 0.0 && link.reorder <= 0.0
}

/// Why a cable cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CableError {
    /// Its times are out of range.
    #[error("a packet may be on the way for {}: use a delay and a queue of less than 4s together, or a \
             higher rate", .0)]
    TooLong(Nanos),
    /// The wheel refused.
    #[error("the cable's wheel: {0}")]
    Wheel(#[from] WheelError),
    /// No memory for packets.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// No thread, or no descriptor for its waker.
    #[error("cannot start the cable's thread: {0}")]
    Thread(#[from] io::Error),
}

/// What a cable does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CableState {
    /// It carries packets.
    #[default]
    Running,
    /// It was told to stop.
    Stopped,
    /// The device of a port was deleted; packets on the way are lost.
    Gone {
        /// Which, and what was said.
        why: String,
    },
    /// A port, or poll(2), refused for another reason.
    Failed {
        /// Which, and what was said.
        why: String,
    },
}

crate::counters::counter_table! {
    /// What happened to packets of one direction. A segment that stays whole is one packet.
    LaneCounters, LaneCounter:
    packets_in: "packets that came in",
    wire_bytes_in: "their bytes on the wire",
    packets_out: "packets that were delivered",
    wire_bytes_out: "their bytes on the wire",
    drop_queue: "packets dropped because the link's queue was full",
    drop_lost: "packets lost on the link, as asked",
    drop_no_room: "packets dropped for want of memory: more were on the way than it was made for",
    lateness_ns_average: "how much after their time packets leave, in ns: moving average, weight 1/8",
    lateness_ns_max: "the latest packet, in nanoseconds",
    late_packets: "packets that left more than 50 us after their time",
}

/// What a cable has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CableCounters {
    /// From the left port to the right.
    pub rightward: LaneCounters,
    /// From the right port to the left.
    pub leftward: LaneCounters,
    /// At the left port.
    pub left: PortCounters,
    /// At the right port.
    pub right: PortCounters,
    /// How the thread waited.
    pub waiter: WaiterCounters,
}

/// A cable. See the [module](self). Dropping it stops it, loses what is on the way, and closes the ports.
#[derive(Debug)]
pub struct Cable {
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and its owner share.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    news: Mutex<News>,
}

/// What the thread tells.
#[derive(Debug, Default, Clone)]
struct News {
    state: CableState,
    counters: CableCounters,
}

impl Cable {
    /// Joins two ports.
    pub fn start(
        left: impl Port + 'static,
        right: impl Port + 'static,
        options: &CableOptions,
    ) -> Result<Self, CableError> {
        let sizes = [
            Size::of(&options.rightward, options.segments)?,
            Size::of(&options.leftward, options.segments)?,
        ];
        let small = sizes.iter().map(|size| size.frames + lane::BATCH as u32).sum();
        let large = match options.segments {
            true => sizes.iter().map(|size| size.segments + lane::BATCH as u32).sum(),
            false => 0,
        };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(options.seed);
        let rightward = Lane::new(options.rightward, sizes[0], rng.clone(), now())?;
        // 2^128 draws on: the two directions share none.
        rng.jump();
        let leftward = Lane::new(options.leftward, sizes[1], rng, now())?;
        let waiter = Waiter::new(options.mode)?;
        let (waker, shared) = (waiter.waker(), Arc::new(Shared::default()));
        let mut runner = Runner {
            left,
            right,
            rightward,
            leftward,
            pool: PacketPool::new(PoolSize { small, large })?,
            waiter,
            realtime: false,
            woken_in: None,
            published: now(),
            shared: Arc::clone(&shared),
        };
        let realtime = options.realtime;
        let thread = thread::Builder::new().name("cable".into()).spawn(move || {
            runner.realtime = realtime && make_realtime().is_ok();
            let state = runner.run();
            runner.publish(state);
        })?;
        Ok(Self { shared, waker, thread: Some(thread) })
    }

    /// What it does.
    pub fn state(&self) -> CableState {
        self.news().state
    }

    /// What it has done, a millisecond ago at most unless it does nothing.
    pub fn counters(&self) -> CableCounters {
        self.news().counters
    }

    fn news(&self) -> News {
        self.shared.news.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed there; here it ends as a cable that stopped.
            let _ = thread.join();
        }
    }
}

/// How much a lane must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size {
    horizon: Nanos,
    frames: u32,
    /// Of these, how many may be in large buffers.
    segments: u32,
}

impl Size {
    fn of(link: &LinkOptions, segments: bool) -> Result<Self, CableError> {
        let way_ns = link.delay.0.saturating_add(link.reorder_by.0);
        let queue_ns = match (link.rate, link.queue) {
            (None, _) => 0,
            // The longest packet fits an idle link whatever its queue.
            (Some(rate), Some(queue)) => rate.time_for(Bytes(queue.0.max(SEGMENT_BYTES))).0,
            (Some(_), None) => HORIZON_MAX.0.saturating_sub(way_ns),
        };
        // A lane looks at a packet a moment after the present of its wheel.
        let horizon = Nanos(way_ns.saturating_add(queue_ns).saturating_add(PUBLISH_EVERY_NS));
        if way_ns >= HORIZON_MAX.0 || queue_ns > HORIZON_MAX.0 {
            return Err(CableError::TooLong(horizon));
        }
        let rate = link.rate.or(Rate::from_bit_s(FASTEST_BIT_S));
        let bytes = rate.map_or(0, |rate| rate.bytes_in(horizon).0);
        let frames = (bytes / FRAME_BYTES_MEAN).clamp(FRAMES_MIN, FRAMES_MAX.into()) as u32;
        let segments = match segments {
            true => (bytes / SEGMENT_BYTES_MEAN).clamp(SEGMENTS_MIN, SEGMENTS_MAX.into()) as u32,
            false => 0,
        };
        Ok(Self { horizon, frames, segments })
    }

    /// The wheel's first packet may be due since a stall of the thread while new ones are put in.
    fn wheel(&self, now: Nanos) -> Result<Wheel<u32>, CableError> {
        let horizon = Nanos(self.horizon.0 + STALL_MAX.0);
        let finest = (horizon.0 / SLOTS).next_power_of_two();
        let options = WheelOptions {
            granularity: Nanos(finest.max(GRANULARITY_MIN_NS)),
            horizon,
            capacity: self.frames as usize,
            beyond: Beyond::Refuse,
        };
        Ok(Wheel::new(options, now)?)
    }
}

/// The thread.
struct Runner<L, R> {
    left: L,
    right: R,
    rightward: Lane,
    leftward: Lane,
    pool: PacketPool,
    waiter: Waiter,
    realtime: bool,
    /// A packet has just ended a sleep, which takes about so long.
    woken_in: Option<Nanos>,
    published: Nanos,
    shared: Arc<Shared>,
}

impl<L: Port, R: Port> Runner<L, R> {
    /// Carries packets until it is told to stop, or cannot.
    fn run(&mut self) -> CableState {
        self.publish(CableState::Running);
        while !self.shared.stop.load(Ordering::Acquire) {
            if let Err(state) = self.turn() {
                return state;
            }
        }
        CableState::Stopped
    }

    /// Looks at everything once, and waits if nothing was there.
    fn turn(&mut self) -> Result<(), CableState> {
        let Self { left, right, rightward, leftward, pool, waiter, realtime, woken_in, .. } = self;
        let woken_in = woken_in.take();
        if *realtime {
            waiter.rest();
        }
        let mut worked = rightward.receive(left, pool, now(), woken_in)?;
        worked |= rightward.deliver(right, pool, now())?;
        worked |= leftward.receive(right, pool, now(), woken_in)?;
        worked |= leftward.deliver(left, pool, now())?;
        if worked {
            waiter.worked();
            if now().0 - self.published.0 >= PUBLISH_EVERY_NS {
                self.publish(CableState::Running);
            }
            return Ok(());
        }
        let deadlines = [rightward.next_deadline(), leftward.next_deadline()];
        let deadline = deadlines.into_iter().flatten().min();
        let interest = |lane: &Lane| match lane.is_blocked() {
            true => Interest::Both,
            false => Interest::Arrivals,
        };
        let (to_left, to_right) = (interest(leftward), interest(rightward));
        if deadline.is_none_or(|deadline| deadline.0 > self.published.0 + PUBLISH_EVERY_NS) {
            self.publish(CableState::Running);
        }
        let Self { left, right, waiter, shared, .. } = self;
        let sources = [Source::new(left.as_fd(), to_left), Source::new(right.as_fd(), to_right)];
        let woken = waiter.wait(deadline, &sources, || !shared.stop.load(Ordering::Acquire));
        let woken = woken.map_err(|error| CableState::Failed { why: format!("poll: {error}") })?;
        self.woken_in = (woken == Woken::Source).then(|| self.waiter.wake_up());
        Ok(())
    }

    fn publish(&mut self, state: CableState) {
        self.published = now();
        let counters = CableCounters {
            rightward: self.rightward.counters(),
            leftward: self.leftward.counters(),
            left: self.left.counters(),
            right: self.right.counters(),
            waiter: self.waiter.counters(),
        };
        let mut news = self.shared.news.lock().unwrap_or_else(PoisonError::into_inner);
        *news = News { state, counters };
    }
}

impl From<PortError> for CableState {
    fn from(error: PortError) -> Self {
        let why = error.to_string();
        if error.is_gone() { Self::Gone { why } } else { Self::Failed { why } }
    }
}

#[cfg(test)]
mod tests;
