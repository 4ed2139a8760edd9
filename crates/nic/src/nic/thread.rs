//! The threads of a NIC: one around each [`ShaperLoop`], and one that fills the aggregates' rates into the
//! shapers' demands.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::thread::{CpuSet, sched_setaffinity};

use tidegate_sys::sched::make_realtime;

use super::shaper_loop::ShaperLoop;
use crate::{
    aggregate::{Aggregate, ROUND},
    waiter::{Mode, Waiter, now},
};

/// Where a shaper's thread runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// On this CPU alone.
    pub(super) cpu: Option<usize>,
    /// Before others, as far as it may.
    pub(super) realtime: bool,
}

/// Starts a shaper's thread.
pub(super) fn spawn_shaper(
    index: usize,
    mut shaper: ShaperLoop,
    mut waiter: Waiter,
    stop: Arc<AtomicBool>,
    place: Place,
) -> io::Result<JoinHandle<()>> {
    let (pinned, outcome) = std::sync::mpsc::sync_channel(1);
    let thread = thread::Builder::new().name(format!("tg-shaper-{index}")).spawn(move || {
        let done = place.cpu.map_or(Ok(()), pin);
        let refused = done.is_err();
        let _ = pinned.send(done);
        if !refused {
            let realtime = place.realtime && make_realtime().is_ok();
            run(&mut shaper, &mut waiter, &stop, realtime);
        }
    })?;
    match outcome.recv() {
        Ok(Err(error)) => {
            let _ = thread.join();
            Err(error)
        }
        _ => Ok(thread),
    }
}

fn pin(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

fn run(shaper: &mut ShaperLoop, waiter: &mut Waiter, stop: &AtomicBool, realtime: bool) {
    while !stop.load(Ordering::Relaxed) {
        if realtime {
            waiter.rest();
        }
        if shaper.turn(&mut now) {
            waiter.worked();
            continue;
        }
        // One that polls comes by again; a sleeper may not for long.
        if shaper.unpublished && waiter.mode() != Mode::Poll {
            shaper.publish(now());
        }
        let deadline = shaper.next_deadline();
        let waited = {
            let source = shaper.sources();
            let idle = || shaper.is_idle() && !stop.load(Ordering::Relaxed);
            waiter.wait(deadline, source.as_slice(), idle)
        };
        if waited.is_err() {
            // It asks again, and leaves the CPU to those who can mend it.
            shaper.counters.wait_errors += 1;
            thread::yield_now();
        }
        let waits = waiter.counters();
        let counters = &mut shaper.counters;
        counters.polls = waits.polls;
        counters.sleeps = waits.sleeps;
        counters.slept_ns = waits.slept_ns;
        counters.wakeups = waits.woken_by_waker;
        counters.wake_lateness_ns_max = waits.lateness_ns_max;
    }
    shaper.end(now());
}

/// The aggregates of a NIC, and what wakes the thread that divides them.
pub(super) struct Filler {
    pub(super) aggregates: Mutex<Vec<Aggregate>>,
    wake: Condvar,
    pub(super) parts_version: Arc<AtomicU64>,
}

impl Filler {
    pub(super) fn new() -> Self {
        let aggregates = Mutex::new(Vec::new());
        Self { aggregates, wake: Condvar::new(), parts_version: Arc::new(AtomicU64::new(0)) }
    }

    /// Tells the shapers that a part has changed.
    pub(super) fn changed(&self) {
        self.parts_version.fetch_add(1, Ordering::Release);
    }

    /// Ends the thread.
    pub(super) fn stop(&self, stop: &AtomicBool) {
        let _aggregates = self.aggregates.lock().unwrap_or_else(PoisonError::into_inner);
        stop.store(true, Ordering::Relaxed);
        self.wake.notify_all();
    }

    /// Starts the thread that does the rounds. One shaper needs none: its part is the whole.
    pub(super) fn spawn(self: &Arc<Self>, stop: Arc<AtomicBool>) -> io::Result<JoinHandle<()>> {
        let filler = Arc::clone(self);
        thread::Builder::new().name("tg-fill".into()).spawn(move || filler.run(&stop))
    }

    fn run(&self, stop: &AtomicBool) {
        let mut aggregates = self.aggregates.lock().unwrap_or_else(PoisonError::into_inner);
        while !stop.load(Ordering::Relaxed) {
            let now = now();
            // Each of them, whether another had its round or not.
            let rounds = aggregates.iter_mut().filter_map(|a| a.tick(now).then_some(())).count();
            if rounds > 0 {
                self.changed();
            }
            let pause = Duration::from_nanos(ROUND.0);
            let waited = self.wake.wait_timeout(aggregates, pause);
            aggregates = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
