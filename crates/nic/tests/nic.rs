//! The NIC with its threads: stress, classes over several shapers, sleep, and the end.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    thread,
    time::{Duration, Instant},
};

use tidegate_core::{Nanos, Rate, units::NANOS_PER_SEC, wheel::WheelOptions};
use tidegate_nic::{
    Nic, NicOptions, Packet, PacketPool, PoolSize, Port, Producer,
    nic::{
        ClassOptions, Event, Flow, FlowOptions, NicCounters, NicError, Outcome, Refusal, WaitError,
    },
    port::{
        memory::MemoryPort,
        sink::{SinkPort, SinkReader},
    },
    waiter::{Mode, now},
};

/// Longer than any machine stalls.
const PATIENCE: Duration = Duration::from_secs(60);

fn rate(bit_s: u64) -> Option<Rate> {
    Rate::from_bit_s(bit_s)
}

/// Frames carry their flow in the first four bytes.
fn flow_of(packet: &Packet) -> usize {
    packet.frame().first_chunk().map_or(usize::MAX, |bytes| u32::from_ne_bytes(*bytes) as usize)
}

fn sinks(shapers: usize, flows: usize) -> (Vec<Box<dyn Port>>, Vec<SinkReader>) {
    let pairs = (0..shapers).map(|_| SinkPort::new(flows, flow_of));
    pairs.map(|(sink, reader)| (Box::new(sink) as Box<dyn Port>, reader)).unzip()
}

fn frame(pool: &mut PacketPool, flow: usize, bytes: usize) -> Option<Packet> {
    let mut packet = pool.take(bytes)?;
    packet.set_len(bytes);
    packet.frame_mut()[..4].copy_from_slice(&(flow as u32).to_ne_bytes());
    Some(packet)
}

fn soon() -> Option<Nanos> {
    Some(Nanos(now().0 + 50_000_000))
}

/// Waits until the counters are as they should be.
fn until(nic: &Nic, what: &str, holds: impl Fn(&NicCounters) -> bool) -> NicCounters {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let counters = nic.counters();
        if holds(&counters) {
            return counters;
        }
        assert!(Instant::now() < deadline, "{what}: {counters:?}");
        thread::yield_now();
    }
}

/// Sends `packets` of each flow, as fast as they are taken, and checks that each is answered once.
fn send_all(producer: &mut Producer, flows: &[Flow], first_flow: usize, packets: u64) {
    let mut pool = PacketPool::new(PoolSize { small: 1 << 12, large: 0 }).unwrap();
    let mut next = vec![0u64; flows.len()];
    let mut answered = vec![0u64; flows.len()];
    let mut ready: Vec<usize> = (0..flows.len()).collect();
    let place = |flow: Flow| flows.iter().position(|f| *f == flow).unwrap();
    // Flows of one producer that were opened first have dense indices.
    let by_index: Vec<_> = (0..flows.len()).map(|i| place(flows[i])).collect();
    assert!(by_index.iter().copied().eq(0..flows.len()));
    let deadline = Instant::now() + PATIENCE;
    let mut left = packets * flows.len() as u64;
    while left > 0 {
        assert!(Instant::now() < deadline, "{left} packets are not answered");
        for at in std::mem::take(&mut ready) {
            while next[at] < packets {
                let Some(packet) = frame(&mut pool, first_flow + at, 200) else {
                    ready.push(at);
                    break;
                };
                match producer.submit(flows[at], packet, next[at]) {
                    Ok(()) => next[at] += 1,
                    Err(error) => {
                        assert_ne!(error.reason, Refusal::NoSuchFlow);
                        break;
                    }
                }
            }
        }
        while let Some(event) = producer.poll_event() {
            match event {
                Event::Completion { flow, cookie, outcome, .. } => {
                    let at = place(flow);
                    assert_eq!((cookie, outcome), (answered[at], Outcome::Sent));
                    answered[at] += 1;
                    left -= 1;
                }
                Event::Writable { flow } => ready.push(place(flow)),
                Event::Closed { .. } => panic!("nobody closed it"),
            }
        }
        if ready.is_empty() && left > 0 {
            producer.wait(soon()).unwrap();
        }
    }
}

/// Three threads with rings that are too small, two shapers: each packet arrives and is answered once, in
/// the order of its flow.
#[test]
fn threads_lose_nothing() {
    const PRODUCERS: usize = 3;
    const FLOWS: usize = 20;
    const PACKETS: u64 = 400;
    for mode in [Mode::Sleep, Mode::Auto] {
        let options = NicOptions {
            wheel: WheelOptions { capacity: 64, ..WheelOptions::default() },
            producers: PRODUCERS,
            flows: FLOWS,
            ring: 16,
            pending: 32,
            shaper_mode: mode,
            producer_mode: mode,
            ..NicOptions::default()
        };
        let (ports, readers) = sinks(2, PRODUCERS * FLOWS);
        let nic = Nic::new(options, ports).unwrap();
        thread::scope(|scope| {
            for number in 0..PRODUCERS {
                let mut producer = nic.producer().unwrap();
                scope.spawn(move || {
                    let mut open = |at: usize| {
                        let rate = rate(2_000_000 * (1 + at as u64 % 7));
                        let options = FlowOptions { rate, ..FlowOptions::default() };
                        loop {
                            match producer.open_flow(options) {
                                Ok(flow) => return flow,
                                Err(_) => thread::yield_now(),
                            }
                        }
                    };
                    let flows: Vec<_> = (0..FLOWS).map(&mut open).collect();
                    send_all(&mut producer, &flows, number * FLOWS, PACKETS);
                });
            }
            assert!(matches!(nic.producer(), Err(NicError::TooManyProducers(PRODUCERS))));
        });
        let sent = PRODUCERS as u64 * FLOWS as u64 * PACKETS;
        let counters = until(&nic, "all is sent", |counters| {
            counters.sent_packets == sent && counters.open_flows == 0
        });
        assert_eq!((counters.submitted_packets, counters.taken_packets), (sent, sent));
        let most = 2 * (PRODUCERS * FLOWS) as u64;
        assert!(counters.held_packets_max <= most.min(64), "{counters:?}");
        assert_eq!((counters.lost_packets, counters.drop_full, counters.drop_closed), (0, 0, 0));
        assert!(counters.blocked_allowance > 0);
        assert!(nic.shaper_counters().iter().all(|shaper| shaper.sent_packets > 0), "both work");
        let mut bytes = vec![0; PRODUCERS * FLOWS];
        for reader in &readers {
            bytes.iter_mut().zip(reader.wire_bytes()).for_each(|(sum, more)| *sum += more);
        }
        assert!(bytes.iter().all(|bytes| *bytes == PACKETS * 200), "{bytes:?}");
        assert_eq!(nic.lateness().packets(), sent);
        // Their places are free again.
        assert!(nic.producer().is_ok());
    }
}

/// A class over three shapers holds its rate at any time, uses it, and follows a change at once.
#[test]
fn a_class_is_one_rate_on_all_shapers() {
    const FLOWS: usize = 12;
    const BYTES: usize = 1_000;
    let (ports, readers) = sinks(3, FLOWS);
    let nic = Nic::new(NicOptions::default(), ports).unwrap();
    let first = rate(80_000_000).unwrap();
    let class = nic
        .add_class(ClassOptions { rate: first, burst: Nanos(0), parent: None, fair: false })
        .unwrap();
    let mut producer = nic.producer().unwrap();
    let mut pool = PacketPool::new(PoolSize { small: 256, large: 0 }).unwrap();
    let options = FlowOptions { class: Some(class), ..FlowOptions::default() };
    // Most of the flows are on the first shaper that comes.
    let keys = (0..FLOWS as u64).map(|key| if key < 6 { 0 } else { key });
    let flows: Vec<_> = keys
        .map(|key| producer.open_flow(FlowOptions { key: Some(key), ..options }).unwrap())
        .collect();
    let received = || readers.iter().flat_map(SinkReader::wire_bytes).sum::<u64>();
    let mut send = |nic: &Nic, most: u64, bytes: u64| {
        let (begun, before) = (now(), received());
        let deadline = Instant::now() + PATIENCE;
        while received() - before < bytes {
            assert!(Instant::now() < deadline, "{} of {bytes} bytes", received() - before);
            for (at, flow) in flows.iter().enumerate() {
                while producer.is_writable(*flow)
                    && let Some(packet) = frame(&mut pool, at, BYTES)
                {
                    producer.submit(*flow, packet, 0).unwrap();
                }
            }
            while producer.poll_event().is_some() {}
            producer.wait(soon()).unwrap();
            // Read before the clock: late reading only makes the bound larger.
            let bytes = received() - before;
            let time = now().0 - begun.0;
            let bound = u128::from(most) * u128::from(time) / 8 / u128::from(NANOS_PER_SEC);
            // What was stamped before, a packet of each shaper, and a slot.
            let slack = (2 * FLOWS * BYTES + 3 * BYTES) as u64 + most / 8 / 100_000;
            assert!(u128::from(bytes) <= bound + u128::from(slack), "{bytes} in {time} ns");
        }
        assert_eq!(nic.counters().lost_packets, 0);
    };
    send(&nic, 80_000_000, 4_000_000);
    nic.set_class_rate(class, rate(20_000_000).unwrap()).unwrap();
    send(&nic, 20_000_000, 500_000);
    assert!(nic.set_class_rate(class, rate(1).unwrap()).is_err());
}

#[test]
fn an_idle_nic_sleeps_and_is_woken() {
    let options =
        NicOptions { shaper_mode: Mode::Auto, producer_mode: Mode::Sleep, ..NicOptions::default() };
    let (ports, readers) = sinks(1, 1);
    let nic = Nic::new(options, ports).unwrap();
    let mut producer = nic.producer().unwrap();
    let flow = producer.open_flow(FlowOptions::default()).unwrap();
    let mut pool = PacketPool::new(PoolSize { small: 4, large: 0 }).unwrap();
    for cookie in 0..20 {
        // Asleep for good, in no time that a test can name: turns do not go on.
        let deadline = Instant::now() + PATIENCE;
        let mut cpu = nic.cpu_times()[0];
        loop {
            thread::park_timeout(Duration::from_millis(2));
            let later = nic.cpu_times()[0];
            if later.0 - std::mem::replace(&mut cpu, later).0 < 200_000 {
                break;
            }
            assert!(Instant::now() < deadline, "it does not sleep: {:?}", nic.counters());
        }
        producer.submit(flow, frame(&mut pool, 0, 100).unwrap(), cookie).unwrap();
        let event = loop {
            assert!(Instant::now() < deadline, "it does not wake");
            match producer.poll_event() {
                Some(event) => break event,
                None => producer.wait(soon()).map(drop).unwrap(),
            }
        };
        assert!(matches!(event, Event::Completion { cookie: c, .. } if c == cookie), "{event:?}");
    }
    assert_eq!(readers[0].wire_bytes(), [2_000]);
}

#[test]
fn a_port_is_replaced_while_traffic_flows() {
    let (port, far) = MemoryPort::pair("first", 1 << 10);
    let nic = Nic::new(NicOptions::default(), vec![Box::new(port)]).unwrap();
    let mut producer = nic.producer().unwrap();
    let options = FlowOptions { rate: rate(8_000_000), ..FlowOptions::default() };
    let flow = producer.open_flow(options).unwrap();
    let mut pool = PacketPool::new(PoolSize { small: 64, large: 0 }).unwrap();
    let mut far = Some(far);
    let (mut lost, mut sent, mut reader) = (0, 0, None);
    let deadline = Instant::now() + PATIENCE;
    while sent < 20 {
        assert!(Instant::now() < deadline, "{lost} lost, {sent} sent");
        while producer.is_writable(flow) {
            producer.submit(flow, frame(&mut pool, 0, 1_000).unwrap(), 0).unwrap();
        }
        while let Some(event) = producer.poll_event() {
            match event {
                Event::Completion { outcome: Outcome::Lost, .. } => lost += 1,
                Event::Completion { .. } if reader.is_some() => sent += 1,
                Event::Completion { .. } => drop(far.take()),
                _ => {}
            }
        }
        if lost > 3 && reader.is_none() {
            let (sink, sink_reader) = SinkPort::new(1, flow_of);
            nic.attach_port(0, Box::new(sink)).unwrap();
            reader = Some(sink_reader);
        }
        producer.wait(soon()).unwrap();
    }
    assert!(nic.attach_port(1, Box::new(SinkPort::new(1, flow_of).0)).is_err());
    assert_eq!(until(&nic, "one went", |counters| counters.ports_gone > 0).ports_gone, 1);
}

#[test]
fn frames_that_arrive_find_their_receiver() {
    const FRAMES: usize = 5_000;
    let (port, mut far) = MemoryPort::pair("in", 128);
    let nic = Nic::new(NicOptions::default(), vec![Box::new(port)]).unwrap();
    let mut producer = nic.producer().unwrap();
    nic.receive_at(0, &mut producer).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut pool = PacketPool::new(PoolSize { small: 256, large: 0 }).unwrap();
            let (mut queue, mut made) = (std::collections::VecDeque::new(), 0);
            let deadline = Instant::now() + PATIENCE;
            while made < FRAMES || !queue.is_empty() {
                assert!(Instant::now() < deadline);
                if made < FRAMES
                    && let Some(packet) = frame(&mut pool, made, 64)
                {
                    queue.push_back(packet);
                    made += 1;
                }
                if far.transmit(&mut queue, &mut pool).unwrap() == 0 {
                    thread::yield_now();
                }
            }
            // Stays until all is read: a port that goes takes nothing back, but says so.
            while !far_is_read(&mut far, &mut pool) {
                assert!(Instant::now() < deadline);
                thread::yield_now();
            }
        });
        let deadline = Instant::now() + PATIENCE;
        for number in 0..FRAMES {
            let packet = loop {
                assert!(Instant::now() < deadline, "frame {number} does not come");
                match producer.receive() {
                    Some(packet) => break packet,
                    None => producer.wait(soon()).map(drop).unwrap(),
                }
            };
            assert_eq!(flow_of(&packet), number);
        }
        let flow = producer.open_flow(FlowOptions::default()).unwrap();
        let mut pool = PacketPool::new(PoolSize { small: 1, large: 0 }).unwrap();
        producer.submit(flow, frame(&mut pool, 0, 64).unwrap(), 0).unwrap();
    });
}

/// The other side answers with one frame when it has read all.
fn far_is_read(far: &mut MemoryPort, pool: &mut PacketPool) -> bool {
    let mut frames = Vec::new();
    far.receive(pool, &mut frames, 1).unwrap_or(1) > 0
}

#[test]
fn the_end_of_a_nic_is_reported() {
    let (ports, _readers) = sinks(2, 1);
    let nic = Nic::new(NicOptions::default(), ports).unwrap();
    let mut producer = nic.producer().unwrap();
    let options = FlowOptions { rate: rate(1_000), ..FlowOptions::default() };
    let flow = producer.open_flow(options).unwrap();
    let mut pool = PacketPool::new(PoolSize { small: 4, large: 0 }).unwrap();
    producer.submit(flow, frame(&mut pool, 0, 1_000).unwrap(), 7).unwrap();
    until(&nic, "it is taken", |counters| counters.taken_packets == 1);
    drop(nic);
    let event = producer.poll_event().unwrap();
    let lost = matches!(event, Event::Completion { cookie: 7, outcome: Outcome::Lost, .. });
    assert!(lost, "{event:?}");
    assert!(matches!(producer.wait(None), Err(WaitError::NicGone)));
}
