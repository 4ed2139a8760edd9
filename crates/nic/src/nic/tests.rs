//! A shaper's loop and a producer on a clock of the test's, without threads.

use std::{cell::RefCell, os::fd::BorrowedFd, rc::Rc, sync::mpsc};

use proptest::prelude::*;
use tidegate_core::{units::NANOS_PER_SEC, wheel::Beyond};

use super::*;
use crate::port::{PortCounters, PortError, memory::MemoryPort};

const START: Nanos = Nanos(1 << 40);

/// What one call of a [`Recorder`] was given: the first byte of each frame.
type Calls = mpsc::Receiver<Vec<u8>>;

/// A port that takes `room` frames a call, and tells which.
struct Recorder {
    room: usize,
    gone: Arc<AtomicBool>,
    calls: mpsc::Sender<Vec<u8>>,
}

impl Recorder {
    fn new(room: usize) -> (Self, Calls, Arc<AtomicBool>) {
        let (calls, receiver) = mpsc::channel();
        let gone = Arc::new(AtomicBool::new(false));
        (Self { room, gone: Arc::clone(&gone), calls }, receiver, gone)
    }
}

impl Port for Recorder {
    fn receive(
        &mut self,
        _pool: &mut PacketPool,
        _frames: &mut Vec<Packet>,
        _max: usize,
    ) -> Result<usize, PortError> {
        Ok(0)
    }

    fn transmit(
        &mut self,
        frames: &mut VecDeque<Packet>,
        _pool: &mut PacketPool,
    ) -> Result<usize, PortError> {
        if self.gone.load(Ordering::Relaxed) {
            return Err(PortError::Gone { port: "test".into() });
        }
        let taken: Vec<_> = frames.drain(..self.room.min(frames.len())).collect();
        let _ = self.calls.send(taken.iter().map(|packet| packet.frame()[0]).collect());
        Ok(taken.len())
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn counters(&self) -> PortCounters {
        PortCounters::default()
    }
}

/// One shaper and one producer.
struct World {
    shaper: ShaperLoop,
    control: rtrb::Producer<Control>,
    producer: Option<Producer>,
    pool: PacketPool,
    now: Rc<RefCell<Nanos>>,
    there: Arc<AtomicUsize>,
}

impl World {
    fn new(options: &NicOptions, port: impl Port + 'static) -> Self {
        let sizes =
            ShaperOptions { wheel: options.wheel, flows: options.flows, classes: options.classes };
        let (mut control, from_nic) = RingBuffer::new(CONTROLS);
        let shaper = ShaperLoop::new(ShaperParts {
            shaper: Shaper::new(sizes, START).unwrap(),
            capacity: options.wheel.capacity,
            completions: options.completions,
            control: from_nic,
            port: Box::new(port),
            pool: PacketPool::new(PoolSize { small: 8, large: 0 }).unwrap(),
            block: Arc::new(Block::new()),
            lateness: Arc::new(LatenessCells::new()),
            parts_version: Arc::new(AtomicU64::new(0)),
        });
        let there = Arc::new(AtomicUsize::new(1));
        let token = Arc::new(ProducerToken(Arc::clone(&there)));
        let waiter = Waiter::new(Mode::Poll).unwrap();
        let (messages, from_producer) = RingBuffer::new(options.ring);
        let (to_producer, answers) = RingBuffer::new(options.pending);
        let wants_room = Arc::new(AtomicBool::new(false));
        let lane = Lane {
            messages: from_producer,
            answers: to_producer,
            waker: waiter.waker(),
            wants_room: Arc::clone(&wants_room),
            flows: vec![LaneFlow::default(); options.flows].into_boxed_slice(),
            _token: Arc::clone(&token),
        };
        control.push(Control::Lane(Box::new(lane))).ok().unwrap();
        let link = Link {
            messages,
            answers,
            waker: Waiter::new(Mode::Poll).unwrap().waker(),
            wants_room,
            pending: 0,
            pending_max: options.pending,
            waiting: VecDeque::new(),
            notified: 0,
            closing: VecDeque::new(),
        };
        let producer = Producer::new(ProducerParts {
            number: 1,
            links: vec![link],
            flows: options.flows,
            allowance: match options.completions {
                Completions::Deferred => options.allowance,
                Completions::Immediate => u32::MAX,
            },
            segment_time: options.segment_time,
            hash_seed: 0,
            nic: 0,
            waiter,
            block: Arc::new(Block::new()),
            token,
        });
        Self {
            shaper,
            control,
            producer: Some(producer),
            pool: PacketPool::new(PoolSize { small: 1 << 10, large: 0 }).unwrap(),
            now: Rc::new(RefCell::new(START)),
            there,
        }
    }

    fn producer(&mut self) -> &mut Producer {
        self.producer.as_mut().unwrap()
    }

    fn open(&mut self, bit_s: u64) -> Flow {
        let options = FlowOptions { rate: Rate::from_bit_s(bit_s), ..FlowOptions::default() };
        self.producer().open_flow(options).unwrap()
    }

    /// A frame of 1000 bytes whose first is the flow's number.
    fn submit(&mut self, flow: Flow, cookie: u64) -> Result<(), Refusal> {
        let packet = self.pool.packet(&[flow.index() as u8; 1_000]).unwrap();
        self.producer().submit(flow, packet, cookie).map_err(|error| error.reason)
    }

    /// Lets time pass, in turns of a tenth of it.
    fn pass(&mut self, ns: u64) {
        for _ in 0..10 {
            self.now.borrow_mut().0 += ns / 10;
            self.turn();
        }
    }

    fn turn(&mut self) {
        let now = Rc::clone(&self.now);
        // Bounded: a loop that always has something to do is a fault.
        let turns = (0..10_000).take_while(|_| self.shaper.turn(&mut || *now.borrow())).count();
        assert!(turns < 10_000);
    }

    fn events(&mut self) -> Vec<Event> {
        let producer = self.producer();
        std::iter::from_fn(|| producer.poll_event()).collect()
    }

    fn outcomes(&mut self) -> Vec<(u64, Outcome)> {
        let events = self.events();
        let done = events.iter().filter_map(|event| match event {
            Event::Completion { cookie, outcome, .. } => Some((*cookie, *outcome)),
            _ => None,
        });
        done.collect()
    }

    fn counters(&mut self) -> NicCounters {
        let now = *self.now.borrow();
        self.shaper.publish(now);
        self.shaper.counters
    }
}

fn small() -> NicOptions {
    NicOptions {
        wheel: WheelOptions { capacity: 64, ..WheelOptions::default() },
        classes: 4,
        producers: 1,
        flows: 16,
        ring: 32,
        pending: 64,
        ..NicOptions::default()
    }
}

/// 1000 bytes take a millisecond.
const MBIT_8: u64 = 8_000_000;

#[test]
fn a_flow_has_two_segments_in_the_shaper_and_is_notified_when_one_left() {
    let mut world = World::new(&small(), Recorder::new(100).0);
    let (slow, fast) = (world.open(MBIT_8), world.open(10 * MBIT_8));
    assert!(world.producer().is_writable(slow));
    assert_eq!(world.submit(slow, 1), Ok(()));
    assert_eq!(world.submit(slow, 2), Ok(()));
    assert!(!world.producer().is_writable(slow));
    assert_eq!(world.submit(slow, 3), Err(Refusal::Allowance));
    assert_eq!(world.producer().in_shaper(slow), 2);
    // The other flow is not held up, and its completion overtakes.
    assert_eq!(world.submit(fast, 4), Ok(()));
    world.turn();
    assert!(world.events().is_empty(), "nothing has left");
    world.pass(500_000);
    assert_eq!(world.outcomes(), [(4, Outcome::Sent)]);
    world.pass(600_000);
    let at = *world.now.borrow();
    let events = world.events();
    let Event::Completion { flow, cookie: 1, outcome: Outcome::Sent, at: left } = events[0] else {
        panic!("{events:?}");
    };
    assert!(flow == slow && left <= at && left.0 >= START.0 + 1_000_000);
    assert_eq!(events[1..], [Event::Writable { flow: slow }]);
    assert_eq!(world.submit(slow, 3), Ok(()));
    world.pass(3_000_000);
    assert_eq!(world.outcomes(), [(2, Outcome::Sent), (3, Outcome::Sent)]);
    let counters = world.counters();
    assert_eq!((counters.sent_packets, counters.sent_bytes), (4, 4_000));
    assert_eq!((counters.held_packets, counters.held_packets_max), (0, 3));
    assert_eq!((counters.lost_packets, counters.drop_full), (0, 0));
}

#[test]
fn batches_go_across_flows_and_never_within_one() {
    let (port, calls, _) = Recorder::new(100);
    let mut world = World::new(&small(), port);
    let flows: Vec<_> = (0..8).map(|_| world.open(1_000 * MBIT_8)).collect();
    for flow in flows.iter().chain(&flows) {
        world.submit(*flow, 0).unwrap();
    }
    world.turn();
    world.pass(1_000_000);
    let calls: Vec<_> = calls.try_iter().collect();
    assert_eq!(calls.iter().map(Vec::len).sum::<usize>(), 16);
    for call in &calls {
        let mut flows = call.clone();
        flows.sort_unstable();
        flows.dedup();
        assert_eq!(flows.len(), call.len(), "{calls:?}");
    }
    assert!(calls.len() <= 4, "{calls:?}");
    assert!(world.counters().batch_splits > 0);
}

#[test]
fn what_a_full_port_does_not_take_leaves_later() {
    let (port, mut far) = MemoryPort::pair("full", 3);
    let mut world = World::new(&small(), port);
    let flows: Vec<_> = (0..8).map(|_| world.open(1_000 * MBIT_8)).collect();
    for (cookie, flow) in flows.iter().enumerate() {
        world.submit(*flow, cookie as u64).unwrap();
    }
    world.pass(1_000_000);
    assert_eq!(world.outcomes().len(), 3);
    assert_eq!(world.shaper.next_deadline(), None, "it is the port that is waited for");
    assert_eq!(world.counters().held_packets, 5);
    let mut frames = Vec::new();
    for _ in 0..4 {
        far.receive(&mut world.pool, &mut frames, 100).unwrap();
        world.pass(1_000);
    }
    assert_eq!(frames.len(), 8);
    assert_eq!(world.outcomes().len(), 5);
    assert!(world.counters().port_full > 0);
}

#[test]
fn a_port_that_goes_takes_its_packets_along_and_a_new_one_goes_on() {
    let (port, _calls, gone) = Recorder::new(100);
    let mut world = World::new(&small(), port);
    let flows: Vec<_> = (0..4).map(|_| world.open(MBIT_8)).collect();
    for (cookie, flow) in flows.iter().chain(&flows).enumerate() {
        world.submit(*flow, cookie as u64).unwrap();
    }
    world.turn();
    gone.store(true, Ordering::Relaxed);
    world.pass(1_100_000);
    let mut outcomes = world.outcomes();
    outcomes.sort_unstable_by_key(|(cookie, _)| *cookie);
    assert_eq!(outcomes, (0..8).map(|cookie| (cookie, Outcome::Lost)).collect::<Vec<_>>());
    // Without a port packets are paced, and lost when they would leave.
    world.submit(flows[0], 9).unwrap();
    world.turn();
    assert!(world.outcomes().is_empty());
    world.pass(4_000_000);
    assert_eq!(world.outcomes(), [(9, Outcome::Lost)]);
    let (port, calls, _) = Recorder::new(100);
    world.control.push(Control::Port(Box::new(port))).ok().unwrap();
    world.submit(flows[0], 10).unwrap();
    world.pass(4_000_000);
    assert_eq!(world.outcomes(), [(10, Outcome::Sent)]);
    assert_eq!(calls.try_iter().map(|call| call.len()).sum::<usize>(), 1);
    let counters = world.counters();
    assert_eq!((counters.ports_gone, counters.lost_packets, counters.sent_packets), (1, 9, 1));
    assert_eq!(counters.held_packets, 0);
}

#[test]
fn with_immediate_completion_what_does_not_fit_is_dropped() {
    let wheel = WheelOptions { capacity: 4, ..WheelOptions::default() };
    let options = NicOptions { wheel, completions: Completions::Immediate, ..small() };
    let mut world = World::new(&options, Recorder::new(100).0);
    let flow = world.open(MBIT_8);
    (0..6).for_each(|cookie| world.submit(flow, cookie).unwrap());
    world.turn();
    let outcomes = world.outcomes();
    assert_eq!(outcomes[..4], [0, 1, 2, 3].map(|cookie| (cookie, Outcome::Taken)));
    assert_eq!(outcomes[4..], [4, 5].map(|cookie| (cookie, Outcome::Dropped)));
    world.pass(10_000_000);
    assert!(world.events().is_empty());
    let counters = world.counters();
    assert_eq!((counters.sent_packets, counters.drop_full, counters.held_packets_max), (4, 2, 4));
}

#[test]
fn a_full_shaper_drops_nothing_with_deferred_completion() {
    let wheel = WheelOptions { capacity: 4, ..WheelOptions::default() };
    let mut world = World::new(&NicOptions { wheel, ..small() }, Recorder::new(100).0);
    let flows: Vec<_> = (0..8).map(|_| world.open(MBIT_8)).collect();
    for (cookie, flow) in flows.iter().enumerate() {
        world.submit(*flow, cookie as u64).unwrap();
    }
    world.turn();
    assert!(world.shaper.is_idle(), "it may sleep until something leaves");
    world.pass(10_000_000);
    let sent: Vec<_> = world.outcomes();
    assert!(sent.len() == 8 && sent.iter().all(|(_, outcome)| *outcome == Outcome::Sent));
    let counters = world.counters();
    assert!(counters.full_waits > 0);
    assert_eq!((counters.drop_full, counters.held_packets_max), (0, 4));
}

#[test]
fn beyond_the_horizon_of_a_hard_limit_is_dropped_and_said() {
    let wheel = WheelOptions {
        capacity: 16,
        horizon: Nanos(2_000_000),
        beyond: Beyond::Refuse,
        ..WheelOptions::default()
    };
    let mut world = World::new(&NicOptions { wheel, ..small() }, Recorder::new(100).0);
    let flow = world.open(MBIT_8 / 10);
    world.submit(flow, 1).unwrap();
    world.turn();
    assert_eq!(world.outcomes(), [(1, Outcome::Dropped)]);
    assert_eq!((world.counters().drop_beyond, world.counters().held_packets), (1, 0));
    assert!(world.producer().is_writable(flow));
}

#[test]
fn a_flow_closes_when_its_last_packet_has_left() {
    let mut world = World::new(&small(), Recorder::new(100).0);
    let flow = world.open(MBIT_8);
    world.submit(flow, 1).unwrap();
    world.producer().close_flow(flow).unwrap();
    assert_eq!(world.submit(flow, 2), Err(Refusal::NoSuchFlow));
    assert_eq!(world.producer().close_flow(flow), Err(FlowError::NoSuchFlow));
    world.turn();
    assert!(world.events().is_empty());
    assert_eq!(world.counters().open_flows, 1);
    world.pass(2_000_000);
    let events = world.events();
    assert!(matches!(events[0], Event::Completion { cookie: 1, .. }), "{events:?}");
    assert_eq!(events[1..], [Event::Closed { flow }]);
    assert_eq!((world.counters().open_flows, world.counters().opened_flows), (0, 1));
    let next = world.open(MBIT_8);
    assert!(next != flow && next.index() == flow.index());
    assert_eq!(world.submit(flow, 3), Err(Refusal::NoSuchFlow));
    assert_eq!(world.submit(next, 4), Ok(()));
}

#[test]
fn a_flood_of_flows_is_refused_and_counted() {
    let mut world = World::new(&small(), Recorder::new(100).0);
    let flows: Vec<_> = (0..16).map(|_| world.open(MBIT_8)).collect();
    for _ in 0..1_000 {
        let refused = world.producer().open_flow(FlowOptions::default());
        assert_eq!(refused, Err(FlowError::TooMany(16)));
    }
    world.turn();
    for flow in flows {
        world.producer().close_flow(flow).unwrap();
    }
    // The flood meets a shaper that does not listen: the ring is full, and later it is not.
    world.turn();
    world.events();
    let mut opened = 0;
    for _ in 0..1_000 {
        match world.producer().open_flow(FlowOptions::default()) {
            Ok(flow) => {
                opened += 1;
                let _ = world.producer().close_flow(flow);
            }
            Err(FlowError::TooMany(_) | FlowError::RingFull) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(opened >= 16);
    world.turn();
    world.events();
    world.turn();
    world.events();
    assert_eq!(world.counters().open_flows, 0);
    assert!(world.producer().open_flow(FlowOptions::default()).is_ok());
}

#[test]
fn who_found_the_ring_full_is_reported_room() {
    let mut world = World::new(&NicOptions { ring: 4, ..small() }, Recorder::new(100).0);
    let first = world.open(MBIT_8);
    let flows = [first, world.open(MBIT_8), world.open(MBIT_8)];
    world.turn();
    for cookie in [10, 11] {
        assert_eq!(world.producer().set_flow_rate(first, Rate::from_bit_s(cookie)), Ok(()));
    }
    assert_eq!(world.submit(flows[0], 0), Ok(()));
    assert_eq!(world.submit(flows[1], 1), Ok(()));
    assert_eq!(world.submit(flows[2], 2), Err(Refusal::RingFull));
    assert_eq!(world.submit(flows[2], 2), Err(Refusal::RingFull));
    assert!(world.events().is_empty());
    world.turn();
    assert_eq!(world.events(), [Event::Writable { flow: flows[2] }]);
    assert_eq!(world.submit(flows[2], 2), Ok(()));
}

#[test]
fn a_new_rate_holds_for_packets_to_come() {
    let mut world = World::new(&small(), Recorder::new(100).0);
    let flow = world.open(MBIT_8 / 1_000);
    assert_eq!(world.producer().set_flow_rate(flow, Rate::from_bit_s(MBIT_8)), Ok(()));
    world.submit(flow, 1).unwrap();
    world.turn();
    world.pass(1_100_000);
    assert_eq!(world.outcomes().len(), 1);
    assert_eq!(world.producer().set_flow_rate(flow, None), Ok(()));
    world.submit(flow, 2).unwrap();
    world.turn();
    world.pass(10_000);
    assert_eq!(world.outcomes().len(), 1);
}

#[test]
fn a_clock_that_steps_is_held_and_counted() {
    let mut world = World::new(&small(), Recorder::new(100).0);
    let flow = world.open(MBIT_8);
    world.submit(flow, 1).unwrap();
    world.pass(500_000);
    *world.now.borrow_mut() = Nanos(1);
    world.submit(flow, 2).unwrap();
    world.turn();
    *world.now.borrow_mut() = Nanos(START.0 + 3600 * NANOS_PER_SEC);
    world.turn();
    assert_eq!(world.outcomes().len(), 2);
    assert!(world.counters().clock_steps > 0);
}

/// Of a rate that is far too low, and of a clock that steps back: pacing is cut at the horizon.
#[test]
fn stamps_in_the_past_and_beyond_the_horizon_are_counted() {
    let mut world = World::new(&small(), Recorder::new(100).0);
    let (slow, fast) = (world.open(1_000), world.open(1_000 * MBIT_8));
    world.submit(slow, 1).unwrap();
    world.turn();
    assert_eq!(world.counters().horizon_clamped, 1);
    // A clock that was far ahead: what comes now is due since long.
    world.pass(100_000_000);
    *world.now.borrow_mut() = START;
    world.submit(fast, 2).unwrap();
    world.turn();
    world.pass(4 * NANOS_PER_SEC);
    let mut outcomes = world.outcomes();
    outcomes.sort_unstable_by_key(|(cookie, _)| *cookie);
    assert_eq!(outcomes, [(1, Outcome::Sent), (2, Outcome::Sent)]);
    assert!(world.counters().clock_steps > 0);
    assert_eq!(world.counters().past_stamps, world.shaper.shaper.counters().wheel.past);
}

#[test]
fn without_buffers_what_arrives_stays_with_the_port() {
    /// A port that needs a buffer for each frame.
    struct Device(PortCounters);

    impl Port for Device {
        fn receive(
            &mut self,
            pool: &mut PacketPool,
            frames: &mut Vec<Packet>,
            max: usize,
        ) -> Result<usize, PortError> {
            let before = frames.len();
            for _ in 0..max {
                let Some(packet) = pool.packet(&[7; 60]) else {
                    self.0.rx_no_buffer += 1;
                    break;
                };
                frames.push(packet);
            }
            Ok(frames.len() - before)
        }

        fn transmit(
            &mut self,
            frames: &mut VecDeque<Packet>,
            _pool: &mut PacketPool,
        ) -> Result<usize, PortError> {
            Ok(frames.drain(..).count())
        }

        fn as_fd(&self) -> Option<BorrowedFd<'_>> {
            None
        }

        fn counters(&self) -> PortCounters {
            self.0
        }
    }

    let mut world = World::new(&small(), Device(PortCounters::default()));
    let (arrivals, mut received) = RingBuffer::new(100);
    let waker = world.producer().waker();
    world.control.push(Control::Receiver { arrivals, waker }).ok().unwrap();
    world.turn();
    assert!(world.shaper.receive_stalled);
    // The shaper's pool has eight.
    assert_eq!((received.slots(), world.counters().received_packets), (8, 8));
    assert!(world.shaper.port.as_ref().unwrap().counters().rx_no_buffer > 0);
    received.pop().unwrap();
    world.turn();
    assert_eq!((received.slots(), world.counters().received_packets), (8, 9));
    // What is sent needs none of these.
    let flow = world.open(MBIT_8);
    world.submit(flow, 1).unwrap();
    world.pass(2_000_000);
    assert_eq!(world.outcomes(), [(1, Outcome::Sent)]);
}

#[test]
fn a_producer_that_goes_leaves_nothing_behind() {
    let mut world = World::new(&small(), Recorder::new(100).0);
    let flows = [world.open(MBIT_8), world.open(MBIT_8)];
    world.submit(flows[0], 1).unwrap();
    world.submit(flows[1], 2).unwrap();
    world.turn();
    world.producer = None;
    world.turn();
    assert_eq!(world.there.load(Ordering::Relaxed), 1, "its packets are here");
    world.pass(2_000_000);
    assert_eq!(world.there.load(Ordering::Relaxed), 0);
    let counters = world.counters();
    assert_eq!((counters.sent_packets, counters.open_flows), (2, 0));
    assert!(world.shaper.is_idle());
}

proptest! {
    /// Whatever is done and whatever the port does: each packet is answered once, no flow has more than
    /// its allowance here, and when all has left nothing is.
    #[test]
    fn each_packet_is_answered_once(
        immediate in any::<bool>(),
        capacity in 2usize..40,
        ring in 2usize..40,
        room in 1usize..5,
        steps in prop::collection::vec((0u8..8, 0usize..16, 1u64..4_000_000), 1..250),
    ) {
        let options = NicOptions {
            wheel: WheelOptions { capacity, ..WheelOptions::default() },
            ring,
            completions: if immediate { Completions::Immediate } else { Completions::Deferred },
            ..small()
        };
        let (port, _calls, gone) = Recorder::new(room);
        let mut world = World::new(&options, port);
        let (mut flows, mut open_cookies, mut cookie) = (Vec::new(), Vec::new(), 0u64);
        let mut submitted = 0u64;
        for (step, which, ns) in steps {
            match step {
                0 => {
                    let rate = Rate::from_bit_s(ns * 10);
                    let options = FlowOptions { rate, ..FlowOptions::default() };
                    flows.extend(world.producer().open_flow(options).ok());
                }
                1 if !flows.is_empty() => {
                    let flow = flows.swap_remove(which % flows.len());
                    prop_assert!(world.producer().close_flow(flow).is_ok());
                }
                2..=4 if !flows.is_empty() => {
                    let flow = flows[which % flows.len()];
                    cookie += 1;
                    if world.submit(flow, cookie).is_ok() {
                        open_cookies.push(cookie);
                        submitted += 1;
                    }
                    // Two milliseconds of 40 Mbit/s, the fastest here.
                    prop_assert!(immediate || world.producer().in_shaper(flow) <= 10);
                }
                5 if which == 0 => gone.store(true, Ordering::Relaxed),
                _ => world.pass(ns),
            }
            for (cookie, _) in world.outcomes() {
                let at = open_cookies.iter().position(|open| *open == cookie);
                prop_assert!(at.is_some(), "{} was answered twice", cookie);
                open_cookies.swap_remove(at.unwrap());
            }
        }
        for flow in flows {
            world.producer().close_flow(flow).unwrap();
        }
        // The slowest rate sends a packet in 800 s, and the horizon clamps that to 2 s.
        for _ in 0..200 {
            world.pass(100_000_000);
            for (cookie, _) in world.outcomes() {
                open_cookies.retain(|open| *open != cookie);
            }
        }
        prop_assert!(open_cookies.is_empty());
        let counters = world.counters();
        prop_assert_eq!((counters.held_packets, counters.open_flows), (0, 0));
        let ends = counters.sent_packets + counters.lost_packets + counters.drop_full;
        prop_assert_eq!(ends, submitted);
        world.producer = None;
        world.pass(1_000);
        prop_assert_eq!(world.there.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn sizes_are_checked() {
    let ports = |n: usize| -> Vec<Box<dyn Port>> {
        (0..n).map(|_| Box::new(Recorder::new(1).0) as Box<dyn Port>).collect()
    };
    let wrong = [
        NicOptions { producers: 0, ..small() },
        NicOptions { flows: 0, ..small() },
        NicOptions { ring: 0, ..small() },
        NicOptions { pending: RING_MAX + 1, ..small() },
        NicOptions { flows: MAX_FLOWS, producers: 2, ..small() },
        NicOptions { classes: MAX_CLASSES + 1, ..small() },
        NicOptions { cpus: vec![100_000], ..small() },
    ];
    for options in wrong {
        assert!(Nic::new(options.clone(), ports(1)).is_err(), "{options:?}");
    }
    assert!(Nic::new(small(), ports(0)).is_err());
    assert!(Nic::new(small(), ports(SHAPERS_MAX + 1)).is_err());
}
