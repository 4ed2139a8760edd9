//! One thread of a relay: a queue of each port, and the two lanes between them.

use std::{
    collections::VecDeque,
    mem,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::SyncSender,
    },
};

use super::*;
use crate::{
    aggregate::Share,
    packet::Packet,
    port::Port,
    waiter::{Interest, Source},
};

/// What a thread is asked.
pub(super) enum Command {
    Limit { to: End, limit: Option<LaneLimit>, share: Option<Share> },
    Report(SyncSender<ThreadReport>),
    Stop,
}

/// Where a thread is asked. A busy thread reads one flag a round.
#[derive(Default)]
pub(super) struct Mailbox {
    full: AtomicBool,
    commands: Mutex<Vec<Command>>,
}

impl Mailbox {
    pub(super) fn put(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.full.store(true, Ordering::Release);
    }

    fn is_empty(&self) -> bool {
        !self.full.load(Ordering::Acquire)
    }

    fn take(&self) -> Vec<Command> {
        if self.is_empty() {
            return Vec::new();
        }
        self.full.store(false, Ordering::Relaxed);
        mem::take(&mut self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A port, and the lane that leads to it.
pub(super) struct Side {
    end: End,
    source: Box<dyn PortSource>,
    port: Option<Box<dyn Port>>,
    /// When to look for it again.
    retry_at: Nanos,
    complained: bool,
    lane: Lane,
    /// This lane's part of its limit, where several share it.
    share: Option<Share>,
    /// On their way to the port.
    out: VecDeque<Packet>,
}

pub(super) struct Worker {
    pub(super) sides: [Side; 2],
    pool: PacketPool,
    waiter: Waiter,
    mailbox: Arc<Mailbox>,
    events: SyncSender<Event>,
    frames: Vec<Packet>,
    ended: bool,
}

impl Worker {
    pub(super) fn open(
        options: RelayOptions,
        sources: [Box<dyn PortSource>; 2],
        seed: u64,
        events: SyncSender<Event>,
    ) -> Result<Self, RelayError> {
        // For all that may wait in both lanes, be on its way in and out, and be cut.
        let packets = options.lane.packets.saturating_add(4 * BATCH).saturating_mul(2);
        let packets = u32::try_from(packets).unwrap_or(u32::MAX);
        let lent: u32 = sources.iter().map(|source| source.buffers()).sum();
        let size = PoolSize { small: packets.saturating_add(lent), large: packets };
        let mut pool = PacketPool::new(size)?;
        let waiter = Waiter::new(options.mode).map_err(RelayError::Thread)?;
        let now = now();
        let mut side = |end, mut source: Box<dyn PortSource>| {
            let port = Some(source.open(&mut pool)?);
            let lane = Lane::new(options.lane, seed, now)?;
            Ok::<_, RelayError>(Side {
                end,
                source,
                port,
                retry_at: now,
                complained: false,
                lane,
                share: None,
                out: VecDeque::with_capacity(BATCH),
            })
        };
        let [a, b] = sources;
        let sides = [side(End::A, a)?, side(End::B, b)?];
        let frames = Vec::with_capacity(BATCH);
        let mailbox = Arc::default();
        Ok(Self { sides, pool, waiter, mailbox, events, frames, ended: false })
    }

    pub(super) fn mailbox(&self) -> Arc<Mailbox> {
        Arc::clone(&self.mailbox)
    }

    pub(super) fn waker(&self) -> Waker {
        self.waiter.waker()
    }

    pub(super) fn run(mut self) -> io::Result<()> {
        loop {
            self.obey();
            if self.ended {
                return Ok(());
            }
            let now = now();
            if self.step(now) {
                self.waiter.worked();
            } else {
                self.wait(now)?;
            }
        }
    }

    /// Does what there is to do now; false if that was nothing.
    pub(super) fn step(&mut self, now: Nanos) -> bool {
        let mut worked = false;
        for end in End::BOTH {
            worked |= self.receive(now, end);
        }
        for side in &mut self.sides {
            worked |= side.send(now, &mut self.pool, &self.events);
            side.account(now);
            side.reopen(now, &mut self.pool, &self.events);
        }
        worked
    }

    fn receive(&mut self, now: Nanos, end: End) -> bool {
        let [a, b] = &mut self.sides;
        let (from, to) = if end == End::A { (a, b) } else { (b, a) };
        if !to.takes() {
            return false;
        }
        let Some(port) = &mut from.port else { return false };
        let done = port.receive(&mut self.pool, &mut self.frames, BATCH);
        let came = !self.frames.is_empty();
        for packet in self.frames.drain(..) {
            if to.port.is_some() {
                to.lane.take(now, packet, &mut self.pool, &mut to.out);
            } else {
                to.lane.gone(&packet);
                self.pool.recycle(packet);
            }
        }
        if let Err(error) = done {
            from.lose(now, error, &self.events);
        }
        came
    }

    fn wait(&mut self, now: Nanos) -> io::Result<()> {
        // A quiet port must be looked at now and then: poll(2) does not tell of the end of every kind.
        let mut deadline = Nanos(now.0.saturating_add(REOPEN_EVERY.0));
        for side in &self.sides {
            let at = match &side.port {
                None => Some(side.retry_at),
                // A port that is full makes room when it does, not when time has come.
                Some(_) if !side.out.is_empty() => None,
                Some(_) => side.lane.next_deadline(),
            };
            deadline = at.map_or(deadline, |at| deadline.min(at));
        }
        let [a, b] = &self.sides;
        let sources = [a.awaits(b), b.awaits(a)];
        let mailbox = &self.mailbox;
        let idle = || mailbox.is_empty();
        match &sources {
            [Some(a), Some(b)] => self.waiter.wait(Some(deadline), &[*a, *b], idle)?,
            [Some(one), None] | [None, Some(one)] => {
                self.waiter.wait(Some(deadline), &[*one], idle)?
            }
            [None, None] => self.waiter.wait(Some(deadline), &[], idle)?,
        };
        Ok(())
    }

    pub(super) fn obey(&mut self) {
        for command in self.mailbox.take() {
            match command {
                Command::Stop => self.ended = true,
                Command::Limit { to, limit, share } => {
                    let side = &mut self.sides[to as usize];
                    side.lane.set_limit(limit);
                    if limit.is_none() {
                        side.share = None;
                    }
                    if share.is_some() {
                        side.share = share;
                    }
                    if let Some(share) = &side.share {
                        side.lane.set_part(share.part());
                    }
                }
                Command::Report(reply) => {
                    let ends = self.sides.each_mut().map(Side::report);
                    // Who does not wait for it any more does not need it.
                    let _ = reply.try_send(ThreadReport { ends, waiter: self.waiter.counters() });
                }
            }
        }
    }
}

impl Side {
    /// Whether what comes in for it may be taken. Without a limit nothing is queued here: while the port is
    /// full, frames wait in the kernel's queue, where their sender notices.
    fn takes(&self) -> bool {
        self.out.is_empty() || self.lane.limit().is_some()
    }

    /// What of its port can end a sleep.
    fn awaits(&self, other: &Side) -> Option<Source<'_>> {
        let port = self.port.as_ref()?;
        let interest = match (other.takes(), !self.out.is_empty()) {
            (true, true) => Interest::Both,
            (true, false) => Interest::Arrivals,
            (false, true) => Interest::Room,
            (false, false) => return None,
        };
        Some(Source::new(port.as_fd(), interest))
    }

    /// Brings to the port what is due.
    fn send(&mut self, now: Nanos, pool: &mut PacketPool, events: &SyncSender<Event>) -> bool {
        let Some(port) = &mut self.port else { return false };
        let mut worked = false;
        // Ends when nothing is due or the port is full: what is due at `now` is bounded by the lane.
        loop {
            if self.out.len() < BATCH {
                self.lane.poll(now, BATCH - self.out.len(), &mut self.out);
            }
            if self.out.is_empty() {
                return worked;
            }
            match port.transmit(&mut self.out, pool) {
                Ok(0) => return worked,
                Ok(_) => worked = true,
                Err(error) => {
                    self.lose(now, error, events);
                    return true;
                }
            }
        }
    }

    /// Takes up the lane's part of a limit, and says what it did with it.
    fn account(&mut self, now: Nanos) {
        let Some(share) = &mut self.share else { return };
        let counters = self.lane.counters();
        let backlogged = self.lane.load().waiting_packets > 0;
        share.publish(now, counters.passed_bytes, backlogged);
        if let Some(part) = share.take_change() {
            self.lane.set_part(part);
        }
    }

    /// The port is of no more use.
    fn lose(&mut self, now: Nanos, error: PortError, events: &SyncSender<Event>) {
        self.port = None;
        self.retry_at = Nanos(now.0.saturating_add(REOPEN_EVERY.0));
        for packet in self.out.drain(..) {
            self.lane.gone(&packet);
        }
        self.lane.clear(now);
        let _ = events.try_send(Event::Gone(self.end));
        if !error.is_gone() {
            self.complain(&error, events);
        }
    }

    fn reopen(&mut self, now: Nanos, pool: &mut PacketPool, events: &SyncSender<Event>) {
        if self.port.is_some() || now < self.retry_at {
            return;
        }
        self.retry_at = Nanos(now.0.saturating_add(REOPEN_EVERY.0));
        match self.source.open(pool) {
            Ok(port) => {
                self.port = Some(port);
                self.complained = false;
                let _ = events.try_send(Event::Back(self.end));
            }
            Err(error) if is_missing(&error) => {}
            Err(error) => self.complain(&error, events),
        }
    }

    fn complain(&mut self, error: &PortError, events: &SyncSender<Event>) {
        if !mem::replace(&mut self.complained, true) {
            let _ = events.try_send(Event::Refused(self.end, error.to_string()));
        }
    }

    pub(super) fn report(&mut self) -> EndReport {
        let port = self.port.as_ref();
        EndReport {
            open: usize::from(port.is_some()),
            port: port.map(|port| port.counters()).unwrap_or_default(),
            lane: self.lane.counters(),
            backlog: self.lane.backlog_counters(),
            shaper: self.lane.shaper_counters(),
            load: self.lane.load(),
            waited_max: self.lane.take_waited_max(),
        }
    }
}

/// The device, or its namespace, is not there.
fn is_missing(error: &PortError) -> bool {
    let missing = |errno| matches!(errno, Some(libc::ENODEV | libc::ENOENT | libc::ENXIO));
    match error {
        PortError::Gone { .. } => true,
        PortError::Net(error) => missing(error.errno()),
        _ => false,
    }
}
