//! What a loop does when it has nothing to do now: ask again at once, or sleep until the soonest deadline,
//! until a descriptor is ready, or until another thread wakes it.
//!
//! A sleeping thread wakes late: tens of microseconds where the CPU was idle meanwhile, more in a virtual
//! machine. A thread that never sleeps is in time and takes a CPU. [`Mode::Auto`] does both:
//!
//! ```text
//! margin = average lateness of its wake-ups + 2 x their average deviation, at most MARGIN_MAX
//! deadline - now <= margin            ask again: a sleep would end too late
//! it had work less than margin ago    ask again: more may come sooner than a wake-up takes
//! else                                sleep until deadline - margin - slack
//! ```
//!
//! The second rule is that of the ski rental: a loop that spins for as long as a wake-up costs, and then
//! sleeps, never wastes more than twice what it had to. An idle loop sleeps. The slack is what the kernel
//! allows itself in poll(2): a thousandth of the time to sleep (`select_estimate_accuracy`).
//!
//! The clock is `CLOCK_MONOTONIC`, everywhere in this crate: [`now`].
//!
//! ```text
//! loop {
//!     if did_something() { waiter.worked(); continue; }
//!     waiter.wait(wheel.next_deadline(), &sources, || rings_are_empty() && !stop)?;
//! }
//! ```

use std::{
    io,
    num::NonZeroU64,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
    },
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    io::Errno,
    thread::{clock_nanosleep_relative, set_current_timer_slack},
    time::{ClockId, Timespec, clock_gettime},
};
use tidegate_core::{Nanos, units::NANOS_PER_SEC};

/// The earliest that [`Mode::Auto`] wakes before a deadline, however late its wake-ups are: on a machine
/// that is busier than that, spinning only makes it worse.
pub const MARGIN_MAX: Nanos = Nanos(200_000);
/// Longest sleep while a source has no descriptor and must be asked.
pub const ASK_EVERY: Nanos = Nanos(50_000);

/// The part of its time that [`Waiter::rest`] leaves to others, in percent.
pub const REST_PERCENT: u64 = 10;
/// How long a rest is at least; with the wake-up it is longer, and the next is due so much later.
pub const REST: Nanos = Nanos(30_000);
/// What sleeps count for in advance, at most.
pub const REST_CREDIT_MAX: Nanos = Nanos(5_000_000);

/// CPU time of going to sleep and waking.
const SLEEP_COST_NS: u64 = 15_000;
/// The margin before the first wake-up is measured.
const MARGIN_FIRST_NS: u64 = 50_000;
/// A new sample weighs an eighth, as in `sch_fq`'s average of its lateness.
const SMOOTHING_BITS: u32 = 3;
/// poll(2) may end late by this part of its time.
const POLL_SLACK_PART: u64 = 1_000;

/// What a loop does while it waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Ask again, always: in time, and a CPU is taken.
    Poll,
    /// Sleep, always: no CPU is wasted, and everything is late by a wake-up.
    Sleep,
    /// Sleep if there is time for it; see the [module](self).
    #[default]
    Auto,
}

/// What is waited for on a descriptor. Errors and hang-ups always end a sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Interest {
    /// Something to read.
    Arrivals,
    /// Room to write.
    Room,
    /// Either.
    Both,
}

/// One thing that can end a sleep.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    fd: Option<BorrowedFd<'a>>,
    interest: Interest,
}

impl<'a> Source<'a> {
    /// A source as [`Port::as_fd`](crate::Port::as_fd) gives it. Without a descriptor the loop must ask, and
    /// sleeps for [`ASK_EVERY`] at most.
    pub fn new(fd: Option<BorrowedFd<'a>>, interest: Interest) -> Self {
        Self { fd, interest }
    }
}

/// Why [`Waiter::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Woken {
    /// It did not sleep.
    AtOnce,
    /// The deadline has come, or is so near that the loop should ask until it has.
    Deadline,
    /// A descriptor is ready, or a signal came.
    Source,
    /// Another thread called [`Waker::wake`].
    Waker,
}

crate::counters::counter_table! {
    /// How a loop has waited since it began.
    WaiterCounters, WaiterCounter:
    polls: "times that the loop had nothing to do and asked again at once",
    sleeps: "times that it slept",
    slept_ns: "time that it slept, in nanoseconds",
    woken_by_deadline: "sleeps that ended because a deadline came near",
    woken_by_source: "sleeps that ended because a descriptor was ready",
    woken_by_waker: "sleeps that another thread ended",
    rests: "sleeps that nothing asked for, so that others have the CPU",
    lateness_ns_average: "how late wake-ups for deadlines are, in ns: moving average, weight 1/8",
    lateness_ns_max: "the latest wake-up for a deadline, in nanoseconds",
}

/// The present, on the clock of this crate.
pub fn now() -> Nanos {
    let now = clock_gettime(ClockId::Monotonic);
    Nanos(now.tv_sec as u64 * NANOS_PER_SEC + now.tv_nsec as u64)
}

/// What the sleeper and its wakers share.
#[derive(Debug)]
struct Bell {
    /// The loop sleeps, or is about to.
    sleeps: AtomicBool,
    eventfd: OwnedFd,
}

/// Wakes one loop, from any thread. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Waker(Arc<Bell>);

impl Waker {
    /// Ends the loop's sleep, after something was put where its `idle` looks. No system call, and false,
    /// if it does not sleep.
    #[inline]
    pub fn wake(&self) -> bool {
        // What was put is visible to a loop that sets the flag after this.
        fence(Ordering::SeqCst);
        self.0.sleeps.load(Ordering::Relaxed) && self.ring()
    }

    #[cold]
    fn ring(&self) -> bool {
        // Of several wakers one rings. The counter of the eventfd cannot overflow: it is emptied on waking.
        self.0.sleeps.swap(false, Ordering::Relaxed)
            && rustix::io::write(&self.0.eventfd, &1u64.to_ne_bytes()).is_ok()
    }
}

/// How one loop waits. See the [module](self). Belongs to the thread that first waits.
#[derive(Debug)]
pub struct Waiter {
    mode: Mode,
    bell: Arc<Bell>,
    /// The thread's timer slack was set.
    prepared: bool,
    /// Since when there was nothing to do; none: there was, last time.
    idle_since: Option<Nanos>,
    lateness_ns: u64,
    deviation_ns: u64,
    /// How long it should have slept more by `debt_at`, in nanoseconds; negative if it did.
    debt_ns: i64,
    debt_at: Nanos,
    counters: WaiterCounters,
}

impl Waiter {
    /// A waiter for one loop.
    ///
    /// Errors: no descriptor is left.
    pub fn new(mode: Mode) -> io::Result<Self> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            mode,
            bell: Arc::new(Bell { sleeps: AtomicBool::new(false), eventfd }),
            prepared: false,
            idle_since: None,
            lateness_ns: MARGIN_FIRST_NS,
            deviation_ns: 0,
            debt_ns: 0,
            debt_at: now(),
            counters: WaiterCounters::default(),
        })
    }

    /// What other threads wake the loop with.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.bell))
    }

    /// What the loop does while it waits.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// How long before a deadline [`Mode::Auto`] stops to sleep.
    pub fn margin(&self) -> Nanos {
        Nanos((self.lateness_ns + 2 * self.deviation_ns).min(MARGIN_MAX.0))
    }

    /// How long a wake-up takes here: the average lateness, in which a stall counts as [`MARGIN_MAX`].
    pub fn wake_up(&self) -> Nanos {
        Nanos(self.lateness_ns)
    }

    /// How it has waited.
    pub fn counters(&self) -> WaiterCounters {
        self.counters
    }

    /// The loop had something to do.
    #[inline]
    pub fn worked(&mut self) {
        self.idle_since = None;
    }

    /// The loop has nothing to do before `deadline`; none: before a source is ready or a waker calls. Returns
    /// when it should look again, which may be at once and without reason.
    ///
    /// `idle` is asked after wakers know that the loop sleeps, and says whether there is still nothing
    /// to do: that the rings which other threads fill are empty, and nobody has asked it to stop.
    ///
    /// Errors: poll(2) refused, for want of memory or because a descriptor is not one.
    #[inline]
    pub fn wait(
        &mut self,
        deadline: Option<Nanos>,
        sources: &[Source<'_>],
        idle: impl FnOnce() -> bool,
    ) -> io::Result<Woken> {
        if self.mode == Mode::Poll {
            return Ok(self.at_once(Woken::AtOnce));
        }
        let now = now();
        let mut margin = Nanos(0);
        if self.mode == Mode::Auto {
            margin = self.margin();
            let idle_since = *self.idle_since.get_or_insert(now);
            if now.0.saturating_sub(idle_since.0) < margin.0 {
                return Ok(self.at_once(Woken::AtOnce));
            }
        }
        if deadline.is_some_and(|deadline| deadline.0 <= now.0.saturating_add(margin.0)) {
            return Ok(self.at_once(Woken::Deadline));
        }
        self.sleep(now, deadline.map(|deadline| Nanos(deadline.0 - margin.0)), sources, idle)
    }

    /// Lets others have the CPU for [`REST`] if the loop has slept for less than [`REST_PERCENT`] of the
    /// time. For threads in the real-time class, which the kernel would hold up for 50 ms if they took more
    /// than 95 % of a second (`sched_rt_runtime_us`).
    #[inline]
    pub fn rest(&mut self) {
        let now = now();
        self.awake_until(now);
        if self.debt_ns < 0 {
            return;
        }
        self.prepare();
        let time = Timespec { tv_sec: 0, tv_nsec: REST.0 as i64 };
        let _ = clock_nanosleep_relative(ClockId::Monotonic, &time);
        let woke = self::now();
        self.slept(now, woke);
        self.learn(woke.0.saturating_sub(now.0 + REST.0));
        self.counters.rests += 1;
    }

    /// Takes in a sleep.
    fn slept(&mut self, since: Nanos, woke: Nanos) {
        let slept_ns = woke.0.saturating_sub(since.0);
        self.counters.sleeps += 1;
        self.counters.slept_ns += slept_ns;
        self.awake_until(since);
        // Of what is shorter, most is the system call; of what is longer, some.
        if slept_ns >= REST.0 {
            self.debt_ns = self.debt_ns.saturating_sub_unsigned(slept_ns - SLEEP_COST_NS);
            self.debt_ns = self.debt_ns.max(-(REST_CREDIT_MAX.0 as i64));
            self.debt_at = woke;
        }
    }

    /// The loop did not sleep until `now`.
    fn awake_until(&mut self, now: Nanos) {
        let awake_ns = now.0.saturating_sub(self.debt_at.0);
        self.debt_ns = self.debt_ns.saturating_add_unsigned(awake_ns * REST_PERCENT / 100);
        self.debt_at = now.max(self.debt_at);
    }

    fn prepare(&mut self) {
        if !self.prepared {
            // Without it the kernel may be 50 us late on purpose; the lateness is then what is measured.
            let _ = set_current_timer_slack(NonZeroU64::new(1));
            self.prepared = true;
        }
    }

    #[inline]
    fn at_once(&mut self, woken: Woken) -> Woken {
        self.counters.polls += 1;
        std::hint::spin_loop();
        woken
    }

    /// Sleeps until `until`, which is in the future.
    fn sleep(
        &mut self,
        now: Nanos,
        until: Option<Nanos>,
        sources: &[Source<'_>],
        idle: impl FnOnce() -> bool,
    ) -> io::Result<Woken> {
        self.prepare();
        let mut fds = Vec::with_capacity(sources.len() + 1);
        fds.push(PollFd::from_borrowed_fd(self.bell.eventfd.as_fd(), PollFlags::IN));
        let mut longest = None;
        for source in sources {
            match source.fd {
                Some(fd) => fds.push(PollFd::from_borrowed_fd(fd, source.interest.flags())),
                None => longest = Some(ASK_EVERY.0),
            }
        }
        let slack = |ns: u64| ns - ns / POLL_SLACK_PART;
        let sleep_ns = until.map(|until| slack(until.0.saturating_sub(now.0)));
        let timeout_ns = sleep_ns.into_iter().chain(longest).min();
        let timeout = timeout_ns.map(|ns| Timespec {
            tv_sec: (ns / NANOS_PER_SEC) as i64,
            tv_nsec: (ns % NANOS_PER_SEC) as i64,
        });
        self.bell.sleeps.store(true, Ordering::Relaxed);
        // Whoever does not see the flag put its work where `idle` sees it.
        fence(Ordering::SeqCst);
        if !idle() {
            self.bell.sleeps.store(false, Ordering::Relaxed);
            self.counters.polls += 1;
            return Ok(Woken::AtOnce);
        }
        let outcome = poll(&mut fds, timeout.as_ref());
        self.bell.sleeps.store(false, Ordering::Relaxed);
        let rung = !fds[0].revents().is_empty();
        drop(fds);
        if rung {
            let _ = rustix::io::read(&self.bell.eventfd, &mut [0; 8]);
        }
        let woke = self::now();
        self.slept(now, woke);
        match outcome {
            Ok(0) => {
                // Of a sleep that was cut short to ask, the lateness is measured as of any other.
                let ended = timeout_ns.map_or(woke.0, |ns| now.0.saturating_add(ns));
                self.learn(
                    woke.0.saturating_sub(ended + ended.saturating_sub(now.0) / POLL_SLACK_PART),
                );
                self.counters.woken_by_deadline += 1;
                Ok(Woken::Deadline)
            }
            Ok(_) if rung => {
                self.counters.woken_by_waker += 1;
                Ok(Woken::Waker)
            }
            Ok(_) | Err(Errno::INTR) => {
                self.counters.woken_by_source += 1;
                Ok(Woken::Source)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Takes in how late a wake-up was.
    fn learn(&mut self, late_ns: u64) {
        let average = &mut self.counters.lateness_ns_average;
        *average = smooth(*average, late_ns);
        self.counters.lateness_ns_max = self.counters.lateness_ns_max.max(late_ns);
        // One stall of the machine must not make the loop spin for long.
        let late_ns = late_ns.min(MARGIN_MAX.0);
        self.deviation_ns = smooth(self.deviation_ns, late_ns.abs_diff(self.lateness_ns));
        self.lateness_ns = smooth(self.lateness_ns, late_ns);
    }
}

/// The average with a new sample in it.
fn smooth(average: u64, sample: u64) -> u64 {
    average - (average >> SMOOTHING_BITS) + (sample >> SMOOTHING_BITS)
}

impl Interest {
    fn flags(self) -> PollFlags {
        match self {
            Interest::Arrivals => PollFlags::IN,
            Interest::Room => PollFlags::OUT,
            Interest::Both => PollFlags::IN | PollFlags::OUT,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicU64, thread};

    use super::*;

    /// Longer than any machine stalls: a wake-up that comes by this deadline was lost.
    const LOST_NS: u64 = 20 * NANOS_PER_SEC;

    fn after(ns: u64) -> Option<Nanos> {
        Some(Nanos(now().0 + ns))
    }

    #[test]
    fn a_sleep_ends_at_its_deadline() {
        let mut waiter = Waiter::new(Mode::Sleep).unwrap();
        let begun = now();
        assert_eq!(waiter.wait(after(3_000_000), &[], || true).unwrap(), Woken::Deadline);
        let slept = now().0 - begun.0;
        // Early by the slack at most.
        assert!(slept >= 2_990_000, "{slept}");
        let counters = waiter.counters();
        assert_eq!((counters.sleeps, counters.woken_by_deadline, counters.polls), (1, 1, 0));
        assert!(counters.slept_ns >= 2_990_000);
        assert_eq!(waiter.wait(Some(begun), &[], || true).unwrap(), Woken::Deadline);
        assert_eq!(waiter.counters().polls, 1, "the past is no reason to sleep");
    }

    #[test]
    fn polling_never_sleeps() {
        let mut waiter = Waiter::new(Mode::Poll).unwrap();
        for _ in 0..100 {
            assert_eq!(waiter.wait(None, &[], || true).unwrap(), Woken::AtOnce);
        }
        assert_eq!((waiter.counters().polls, waiter.counters().sleeps), (100, 0));
    }

    #[test]
    fn auto_asks_for_a_margin_after_work_and_before_a_deadline() {
        let mut waiter = Waiter::new(Mode::Auto).unwrap();
        waiter.worked();
        assert_eq!(waiter.wait(None, &[], || true).unwrap(), Woken::AtOnce);
        waiter.idle_since = Some(Nanos(0));
        let near = after(waiter.margin().0 / 2);
        assert_eq!(waiter.wait(near, &[], || true).unwrap(), Woken::Deadline);
        assert_eq!(waiter.counters().sleeps, 0);
        assert_eq!(waiter.wait(after(5_000_000), &[], || true).unwrap(), Woken::Deadline);
        assert_eq!(waiter.counters().sleeps, 1);
    }

    #[test]
    fn a_loop_that_never_sleeps_rests_for_its_part_of_the_time() {
        let mut waiter = Waiter::new(Mode::Auto).unwrap();
        // Awake for a second, it owes its part, and pays with every sleep.
        waiter.debt_at = Nanos(now().0 - NANOS_PER_SEC);
        waiter.rest();
        let counters = waiter.counters();
        assert_eq!((counters.rests, counters.sleeps), (1, 1));
        assert!(counters.slept_ns >= REST.0, "{}", counters.slept_ns);
        let paid = (counters.slept_ns - SLEEP_COST_NS) as i64;
        assert!(
            waiter.debt_ns >= (NANOS_PER_SEC * REST_PERCENT / 100) as i64 - paid,
            "{} after {paid}",
            waiter.debt_ns
        );
        // One that has slept enough is left alone.
        waiter.slept(waiter.debt_at, Nanos(waiter.debt_at.0 + NANOS_PER_SEC));
        assert_eq!(waiter.debt_ns, -(REST_CREDIT_MAX.0 as i64));
        waiter.debt_at = now();
        waiter.rest();
        assert_eq!(waiter.counters().rests, 1);
    }

    #[test]
    fn it_learns_how_late_it_wakes_and_forgets_a_stall() {
        let mut waiter = Waiter::new(Mode::Auto).unwrap();
        for _ in 0..100 {
            waiter.learn(20_000);
        }
        let usual = waiter.margin().0;
        assert!((19_000..22_000).contains(&usual), "{usual}");
        waiter.learn(NANOS_PER_SEC);
        assert!(waiter.margin() <= MARGIN_MAX);
        assert_eq!(waiter.counters().lateness_ns_max, NANOS_PER_SEC);
        for _ in 0..100 {
            waiter.learn(20_000);
        }
        assert!(waiter.margin().0 < usual + 1_000);
    }

    #[test]
    fn a_ready_descriptor_ends_a_sleep() {
        let ready = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        let mut waiter = Waiter::new(Mode::Sleep).unwrap();
        let source = Source::new(Some(ready.as_fd()), Interest::Arrivals);
        assert_eq!(waiter.wait(after(LOST_NS), &[source], || true).unwrap(), Woken::Source);
    }

    #[test]
    fn a_source_without_a_descriptor_is_asked() {
        let mut waiter = Waiter::new(Mode::Sleep).unwrap();
        let source = Source::new(None, Interest::Arrivals);
        assert_eq!(waiter.wait(None, &[source], || true).unwrap(), Woken::Deadline);
    }

    #[test]
    fn a_busy_loop_costs_its_wakers_no_call() {
        let mut waiter = Waiter::new(Mode::Sleep).unwrap();
        let waker = waiter.waker();
        assert!(!waker.wake());
        assert_eq!(waiter.wait(after(LOST_NS), &[], || false).unwrap(), Woken::AtOnce);
        assert!(!waker.wake());
        // One of two wakers rings.
        let woken = waiter.wait(after(LOST_NS), &[], || waker.wake() && !waker.wake());
        assert_eq!(woken.unwrap(), Woken::Waker);
    }

    /// A producer and a sleeper hand a number to and fro. A lost wake-up leaves one asleep for good.
    #[test]
    fn no_wake_up_is_lost() {
        const TURNS: u64 = 20_000;
        let turn = AtomicU64::new(0);
        let mut ends = [Waiter::new(Mode::Sleep).unwrap(), Waiter::new(Mode::Sleep).unwrap()];
        let wakers = [ends[1].waker(), ends[0].waker()];
        thread::scope(|scope| {
            for (parity, (waiter, other)) in ends.iter_mut().zip(wakers).enumerate() {
                let turn = &turn;
                scope.spawn(move || {
                    loop {
                        let at = turn.load(Ordering::Acquire);
                        if at >= TURNS {
                            return;
                        }
                        if at % 2 == parity as u64 {
                            turn.store(at + 1, Ordering::Release);
                            other.wake();
                            continue;
                        }
                        let idle = || turn.load(Ordering::Acquire) == at;
                        let woken = waiter.wait(after(LOST_NS), &[], idle).unwrap();
                        assert_ne!(woken, Woken::Deadline, "turn {at}");
                    }
                });
            }
        });
    }
}
