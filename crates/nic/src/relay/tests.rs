//! A relay between ports in memory: the loop in steps, and the threads.

use std::{
    collections::VecDeque,
    sync::{Mutex, mpsc},
    time::Instant,
};

use tidegate_core::Rate;

use super::*;
use crate::{
    packet::Packet,
    port::{Port, memory::MemoryPort},
};

const MS: u64 = 1_000_000;
const FRAMES: usize = 256;

/// Cables that a test plugs in: what is in the slot is opened, an empty slot is a device that is missing.
#[derive(Clone, Default)]
struct Slot(Arc<Mutex<Option<MemoryPort>>>);

impl Slot {
    /// Plugs a cable in; gives its other end.
    fn plug(&self) -> MemoryPort {
        let (near, far) = MemoryPort::pair("cable", FRAMES);
        *self.0.lock().unwrap() = Some(near);
        far
    }
}

impl PortSource for Slot {
    fn name(&self) -> &str {
        "slot"
    }

    fn open(&mut self, _pool: &mut PacketPool) -> Result<Box<dyn Port>, PortError> {
        let port = self.0.lock().unwrap().take();
        Ok(Box::new(port.ok_or(PortError::Gone { port: "slot".into() })?))
    }
}

/// One end of a cable, held by a test.
struct Plug {
    port: MemoryPort,
    pool: PacketPool,
    queue: VecDeque<Packet>,
    frames: Vec<Packet>,
}

impl Plug {
    fn new(port: MemoryPort) -> Self {
        let pool = PacketPool::new(PoolSize { small: 4_096, large: 0 }).unwrap();
        Self { port, pool, queue: VecDeque::new(), frames: Vec::new() }
    }

    fn send(&mut self, flow: u8, bytes: usize) -> bool {
        let mut frame = vec![0; bytes];
        frame[0] = flow;
        let Some(packet) = self.pool.packet(&frame) else { return false };
        self.queue.push_back(packet);
        let sent = self.port.transmit(&mut self.queue, &mut self.pool).is_ok_and(|sent| sent > 0);
        self.queue.clear();
        sent
    }

    /// Bytes that came.
    fn receive(&mut self) -> usize {
        while self.port.receive(&mut self.pool, &mut self.frames, FRAMES).is_ok_and(|n| n > 0) {}
        self.frames.drain(..).map(|packet| packet.frame().len()).sum()
    }
}

fn options() -> RelayOptions {
    let lane = LaneOptions { flows: 16, packets: 128, ..LaneOptions::default() };
    RelayOptions { lane, mode: Mode::Auto }
}

fn limit(bit_s: u64) -> Option<LaneLimit> {
    let rate = Rate::from_bit_s(bit_s).unwrap();
    Some(LaneLimit { rate, burst: Nanos(MS), mark: None })
}

fn worker() -> (Worker, [Slot; 2], [Plug; 2], Receiver<Event>) {
    let slots = [Slot::default(), Slot::default()];
    let plugs = slots.each_ref().map(|slot| Plug::new(slot.plug()));
    let (sender, events) = mpsc::sync_channel(16);
    let [a, b] = slots.clone();
    let worker = Worker::open(options(), [Box::new(a), Box::new(b)], 1, sender).unwrap();
    (worker, slots, plugs, events)
}

#[test]
fn each_direction_has_its_own_limit() {
    let (mut worker, _slots, [mut a, mut b], _events) = worker();
    for (to, limit) in [(End::B, limit(8_000_000)), (End::A, limit(80_000_000))] {
        worker.mailbox().put(Command::Limit { to, limit, share: None });
    }
    worker.obey();
    let (mut to_a, mut to_b) = (0, 0);
    let start = now().0;
    for step in 0..20_000u64 {
        // 160 Mbit/s both ways, for a second.
        a.send(1, 1_000);
        b.send(2, 1_000);
        worker.step(Nanos(start + step * 50_000));
        to_a += a.receive();
        to_b += b.receive();
    }
    assert!((990_000..=1_010_000).contains(&to_b), "{to_b}");
    assert!((9_900_000..=10_050_000).contains(&to_a), "{to_a}");
}

#[test]
fn without_a_limit_a_full_port_leaves_frames_to_the_kernel() {
    let (mut worker, _slots, [mut a, mut b], _events) = worker();
    let now = now();
    let mut sent = 0;
    for _ in 0..4 * FRAMES {
        sent += usize::from(a.send(1, 100));
        worker.step(now);
    }
    // Nobody reads B: its cable is full, then a batch, then A's cable.
    assert!((2 * FRAMES..=2 * FRAMES + BATCH).contains(&sent), "{sent}");
    let mut received = 0;
    while received < sent {
        let more = b.receive() / 100;
        assert!(worker.step(now) || more > 0, "{received} of {sent}");
        received += more;
    }
    let [report, _] = worker.sides.each_mut().map(|side| side.report());
    assert_eq!(report.port.rx_frames, sent as u64);
}

#[test]
fn a_port_that_goes_is_opened_again_and_what_was_for_it_is_counted() {
    let (mut worker, slots, [mut a, b], events) = worker();
    worker.mailbox().put(Command::Limit { to: End::B, limit: limit(1_000_000), share: None });
    worker.obey();
    let start = now().0;
    for _ in 0..10 {
        a.send(1, 1_000);
    }
    worker.step(Nanos(start));
    drop(b);
    let mut at = start;
    while events.try_recv() != Ok(Event::Gone(End::B)) {
        at += MS;
        worker.step(Nanos(at));
        assert!(at < start + 1_000 * MS);
    }
    // The other side stays up, and what it sends is counted.
    a.send(1, 1_000);
    worker.step(Nanos(at));
    let report = worker.sides[1].report();
    assert_eq!((report.open, report.load), (0, LaneLoad::default()));
    assert!((9..=11).contains(&report.backlog.drop_gone_packets), "{report:?}");

    let mut b = Plug::new(slots[1].plug());
    worker.step(Nanos(at + MS));
    assert_eq!(worker.sides[1].report().open, 0, "it does not look at every step");
    worker.step(Nanos(at + REOPEN_EVERY.0));
    assert_eq!(events.try_recv(), Ok(Event::Back(End::B)));
    a.send(1, 1_000);
    worker.step(Nanos(at + REOPEN_EVERY.0 + MS));
    worker.step(Nanos(at + REOPEN_EVERY.0 + 10 * MS));
    assert_eq!(b.receive(), 1_000);
}

#[test]
fn threads_share_a_limit_change_it_and_end() {
    let slots = [(); 4].map(|()| Slot::default());
    let mut plugs = slots.each_ref().map(|slot| Plug::new(slot.plug()));
    let [a0, a1, b0, b1] = slots;
    let mut relay = Relay::start(options(), (vec![a0, a1], vec![b0, b1]), 1).unwrap();
    relay.set_limit(End::B, limit(40_000_000)).unwrap();
    let started = Instant::now();
    let mut received = 0;
    // Only the first thread has traffic: it must get more than its half.
    while received < 4_000_000 {
        assert!(started.elapsed() < Duration::from_secs(60), "{received}");
        plugs[0].send(1, 1_400);
        received += plugs[2].receive();
        relay.tick(now());
    }
    // At 40 Mbit/s it takes 0.8 s; a burst and a round of the division apart, never less.
    assert!(started.elapsed() > Duration::from_millis(700), "{:?}", started.elapsed());
    assert!(relay.next_deadline().is_some() && relay.is_running());
    relay.set_limit(End::B, None).unwrap();
    assert!(relay.next_deadline().is_none());
    let reports = relay.report().unwrap();
    assert_eq!(reports.len(), 2);
    assert!(reports[0].ends[1].lane.passed_bytes >= 4_000_000);
    assert_eq!(reports[1].ends[1].lane.passed_bytes, 0);
    relay.stop().unwrap();
    assert!(plugs[0].port.receive(&mut plugs[0].pool, &mut Vec::new(), 1).unwrap_err().is_gone());
}

#[test]
fn a_port_that_cannot_be_opened_is_an_error() {
    let (a, b) = (Slot::default(), Slot::default());
    let _a = a.plug();
    let error = Relay::start(options(), (vec![a], vec![b]), 1).err();
    assert!(matches!(error, Some(RelayError::Port(e)) if e.is_gone()));
    let none = Relay::start(options(), (Vec::<Slot>::new(), Vec::<Slot>::new()), 1).err();
    assert!(matches!(none, Some(RelayError::Threads(0, 0))));
}
