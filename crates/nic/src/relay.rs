//! A software NIC between two ports: what comes in at one leaves at the other, each direction by its limit.
//!
//! ```text
//!            ┌─ thread 0 ───────────────────────────────┐
//! port A ──►─┤ queue 0 ──► lane A→B ──► queue 0 ├──►── port B
//!        ◄───┤         ◄── lane B→A ◄──         ├───◄
//!            └──────────────────────────────────────────┘   thread 1: queue 1 ...
//! ```
//!
//! A thread a queue, with a shaper for each direction and no lock between threads; a limit is divided among
//! them ([`crate::aggregate`]). A thread that has nothing to do waits ([`crate::waiter`]).
//!
//! A port that goes away takes the packets that are for it with it; the other one stays up, and the port is
//! opened again when it comes back ([`REOPEN_EVERY`]). What happens is reported as [`Event`]s.
//!
//! Every queue here is bounded: by [`LaneOptions`], by [`BATCH`] packets on their way out of a lane, and by
//! the pools, which are made for just that.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tidegate_core::{
    Nanos,
    shaper::{ShaperCounters, ShaperError},
};

use crate::{
    aggregate::{Aggregate, AggregateError},
    backlog::BacklogCounters,
    lane::{Lane, LaneCounters, LaneLimit, LaneLoad, LaneOptions},
    pool::{PacketPool, PoolError, PoolSize},
    port::{PortCounters, PortError},
    source::PortSource,
    waiter::{Mode, Waiter, WaiterCounters, Waker, now},
};

mod worker;

use worker::{Command, Mailbox, Worker};

/// Packets that are taken from a port, or brought to one, at a time.
pub const BATCH: usize = 64;
/// Time between two attempts to open a port that went away, and between two looks at a quiet port.
pub const REOPEN_EVERY: Nanos = Nanos(200_000_000);
/// Most threads.
pub const THREADS_MAX: usize = 64;
/// A thread that does not answer for so long is taken for stuck.
const PATIENCE: Duration = Duration::from_secs(5);
/// Events that wait to be read; further ones are dropped.
const EVENTS_MAX: usize = 1_024;

/// One of the two ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// The first.
    A,
    /// The second.
    B,
}

impl End {
    /// Both.
    pub const BOTH: [End; 2] = [End::A, End::B];

    /// The other one.
    #[must_use]
    pub fn other(self) -> End {
        match self {
            End::A => End::B,
            End::B => End::A,
        }
    }
}

/// What a relay is to be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RelayOptions {
    /// Its lanes.
    pub lane: LaneOptions,
    /// What its threads do while they wait.
    pub mode: Mode,
}

/// Why there is no relay. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// None, or too many, or not as many sources for one port as for the other.
    #[error(
        "a relay with {0} queues of one port and {1} of the other: use 1 to {THREADS_MAX}, the same for both"
    )]
    Threads(usize, usize),
    /// A port cannot be opened.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The memory for packets.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// An option of the lanes.
    #[error(transparent)]
    Shaper(#[from] ShaperError),
    /// A limit cannot be divided.
    #[error(transparent)]
    Aggregate(#[from] AggregateError),
    /// A thread, or what it waits with.
    #[error("cannot start a thread for packets: {0}")]
    Thread(io::Error),
    /// A thread has ended.
    #[error("a thread for packets has ended: {0}")]
    Ended(String),
}

/// Something that an operator wants to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A queue of a port went away.
    Gone(End),
    /// It is back.
    Back(End),
    /// Its device is there, but it cannot be opened; said once.
    Refused(End, String),
}

/// What one end did since the start, over all its queues.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct EndReport {
    /// Queues that are open.
    pub open: usize,
    /// The port, since it was opened last.
    pub port: PortCounters,
    /// The lane that leads to it.
    pub lane: LaneCounters,
    /// The lane's backlog.
    pub backlog: BacklogCounters,
    /// Its shaper.
    pub shaper: ShaperCounters,
    /// What it holds now.
    pub load: LaneLoad,
    /// The longest that a packet waited since the last report.
    pub waited_max: Nanos,
}

/// What one thread did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ThreadReport {
    /// By end: A, B.
    pub ends: [EndReport; 2],
    /// How it waited.
    pub waiter: WaiterCounters,
}

struct Thread {
    mailbox: Arc<Mailbox>,
    waker: Waker,
    handle: Option<JoinHandle<io::Result<()>>>,
}

/// A running relay. Dropping it ends its threads and closes its ports.
pub struct Relay {
    threads: Vec<Thread>,
    events: Receiver<Event>,
    limits: [Option<LaneLimit>; 2],
    /// By the end that the limited lane leads to; none with one thread, or without a limit.
    aggregates: [Option<Aggregate>; 2],
}

impl Relay {
    /// Opens all ports and starts a thread for each pair of queues. `sources` has those of A and those of B.
    ///
    /// # Errors
    /// If a port cannot be opened, or an option is out of bounds.
    pub fn start<A: PortSource + 'static, B: PortSource + 'static>(
        options: RelayOptions,
        sources: (Vec<A>, Vec<B>),
        seed: u64,
    ) -> Result<Self, RelayError> {
        let (a, b) = sources;
        if a.len() != b.len() || !(1..=THREADS_MAX).contains(&a.len()) {
            return Err(RelayError::Threads(a.len(), b.len()));
        }
        let (sender, events) = mpsc::sync_channel(EVENTS_MAX);
        let mut workers = Vec::with_capacity(a.len());
        for (a, b) in a.into_iter().zip(b) {
            workers.push(Worker::open(options, [Box::new(a), Box::new(b)], seed, sender.clone())?);
        }
        let mut relay =
            Self { threads: Vec::new(), events, limits: [None; 2], aggregates: [None, None] };
        for (index, worker) in workers.into_iter().enumerate() {
            let (mailbox, waker) = (worker.mailbox(), worker.waker());
            let name = format!("tidegate-nic-{index}");
            let handle = thread::Builder::new().name(name).spawn(move || worker.run());
            let handle = Some(handle.map_err(RelayError::Thread)?);
            relay.threads.push(Thread { mailbox, waker, handle });
        }
        Ok(relay)
    }

    /// Changes the limit of the lane that leads to `to`; none: there is none. No packet is lost, and those
    /// that have their time keep it.
    ///
    /// # Errors
    /// If the limit is too little to be divided among the threads; nothing is changed then.
    pub fn set_limit(&mut self, to: End, limit: Option<LaneLimit>) -> Result<(), RelayError> {
        let slot = to as usize;
        if self.limits[slot] == limit {
            return Ok(());
        }
        let mut shares = Vec::new();
        if self.threads.len() > 1 {
            match (limit, &mut self.aggregates[slot]) {
                (None, aggregate) => *aggregate = None,
                (Some(limit), Some(aggregate)) => aggregate.set_rate(limit.rate)?,
                (Some(limit), aggregate) => {
                    let (whole, parts) = Aggregate::new(limit.rate, self.threads.len())?;
                    *aggregate = Some(whole);
                    shares = parts;
                }
            }
        }
        self.limits[slot] = limit;
        let mut shares = shares.into_iter();
        for thread in &self.threads {
            thread.send(Command::Limit { to, limit, share: shares.next() });
        }
        Ok(())
    }

    /// When [`Relay::tick`] has something to do; none while no limit is divided.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.aggregates.iter().flatten().map(Aggregate::next_deadline).min()
    }

    /// Divides limits among the threads, if it is time.
    pub fn tick(&mut self, now: Nanos) {
        for aggregate in self.aggregates.iter_mut().flatten() {
            aggregate.tick(now);
        }
    }

    /// The next thing that happened.
    pub fn event(&self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// What each thread did.
    ///
    /// # Errors
    /// If a thread has ended or does not answer.
    pub fn report(&mut self) -> Result<Vec<ThreadReport>, RelayError> {
        let ask = |thread: &Thread| {
            let (reply, answer) = mpsc::sync_channel(1);
            thread.send(Command::Report(reply));
            answer
        };
        let answers: Vec<_> = self.threads.iter().map(ask).collect();
        let reports: Option<Vec<_>> =
            answers.iter().map(|answer| answer.recv_timeout(PATIENCE).ok()).collect();
        reports.ok_or_else(|| RelayError::Ended(self.why_ended()))
    }

    /// Whether all threads run.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let runs = |thread: &Thread| thread.handle.as_ref().is_some_and(|h| !h.is_finished());
        self.threads.iter().all(runs)
    }

    /// Ends all threads and closes the ports. What waits is dropped.
    ///
    /// # Errors
    /// If a thread had ended before.
    pub fn stop(mut self) -> Result<(), RelayError> {
        match self.end() {
            Some(why) => Err(RelayError::Ended(why)),
            None => Ok(()),
        }
    }

    fn why_ended(&mut self) -> String {
        self.end().unwrap_or_else(|| "it does not answer".to_owned())
    }

    /// Ends what runs; says why something had ended before.
    fn end(&mut self) -> Option<String> {
        self.threads.iter().for_each(|thread| thread.send(Command::Stop));
        let mut why = None;
        for thread in &mut self.threads {
            match thread.handle.take().map(JoinHandle::join) {
                None | Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => why = why.or(Some(error.to_string())),
                Some(Err(_)) => why = why.or(Some("it panicked".to_owned())),
            }
        }
        why
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

impl Thread {
    fn send(&self, command: Command) {
        self.mailbox.put(command);
        self.waker.wake();
    }
}

#[cfg(test)]
mod tests;
