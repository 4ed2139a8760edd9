//! Labelled captures: TCP flows, simulated packet by packet in virtual time, through a policer, a queue, an
//! active queue manager or random loss, as a capture at the sender and one at the receiver see them.
//!
//! A [`Case`] describes one run; its name replays it, and says by a hash whether it belongs to the half on
//! which thresholds are chosen or to the half on which they are judged ([`Case::is_held_out`]).

#![allow(dead_code, reason = "the test and the example each use some of it")]

pub mod net;
pub mod tcp;

use std::{cmp::Reverse, collections::BinaryHeap, fmt};

use tidegate_core::{Bytes, Nanos, Rate, burst::CongestionControl};

use crate::captures::{Body, Capture, Packet};
use net::{Gate, Kind, Noise, Random};
use tcp::{Ack, Data, Receiver, Sender};

const IP_BYTES: u32 = 1_500;
/// Losses without which, and slices of a round trip in which, a flow is not counted.
const PLACES_MIN: usize = 15;
const SLICES_MIN: usize = 3;
/// The flow number of what is no TCP.
const CROSS: usize = 500;
/// The most packets of a run.
const PACKETS_MAX: u64 = 120_000;

/// Other traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cross {
    None,
    /// Datagrams at 40 % of the rate, half of the time, through the same policer or queue.
    Shared,
    /// On a faster link behind it.
    Elsewhere,
}

/// Where the capture is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Sender,
    Receiver,
}

/// One run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    pub kind: Kind,
    pub rate_kbit_s: u64,
    /// The bucket's depth, or the queue's length.
    pub bytes: u64,
    pub rtt_ms: u64,
    pub flows: usize,
    pub cc: CongestionControl,
    pub paced: bool,
    pub cross: Cross,
    /// TCP time stamps.
    pub stamps: bool,
    /// The senders' lines over the rate.
    pub line: u64,
    pub seed: u64,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}-{}k-{}b-{}ms-{}x{:?}-{}-{:?}-{}-{}x-{}",
            self.kind,
            self.rate_kbit_s,
            self.bytes,
            self.rtt_ms,
            self.flows,
            self.cc,
            if self.paced { "paced" } else { "bursts" },
            self.cross,
            if self.stamps { "stamps" } else { "plain" },
            self.line,
            self.seed
        )
    }
}

const KINDS: [Kind; 16] = [
    Kind::Policer,
    Kind::Fifo,
    Kind::Policer,
    Kind::Shaper,
    Kind::Policer,
    Kind::Codel,
    Kind::Policer,
    Kind::Fifo,
    Kind::Policer,
    Kind::Red,
    Kind::Policer,
    Kind::Pie,
    Kind::Policer,
    Kind::Chance(1),
    Kind::Policer,
    Kind::Chance(2),
];

impl Case {
    /// The case of that number: half of them have a policer.
    pub fn number(number: u64) -> Case {
        let mut random = Random::new(number + 1);
        let mut of = |values: &[u64]| values[(random.next() % values.len() as u64) as usize];
        loop {
            let case = Case {
                kind: KINDS[(number % 16) as usize],
                rate_kbit_s: of(&[500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000]),
                bytes: of(&[8_000, 16_000, 32_000, 64_000, 100_000, 250_000, 500_000, 2_000_000]),
                rtt_ms: of(&[10, 20, 50, 100, 200]),
                flows: of(&[1, 1, 1, 1, 2, 2, 3, 5]) as usize,
                cc: [CongestionControl::Cubic, CongestionControl::Reno, CongestionControl::Bbr]
                    [of(&[0, 0, 1, 2]) as usize],
                paced: of(&[0, 1]) == 1,
                cross: [Cross::None, Cross::Shared, Cross::Elsewhere][of(&[0, 0, 1, 2]) as usize],
                stamps: of(&[0, 1, 1, 1]) == 1,
                line: of(&[2, 10, 100]),
                seed: number,
            };
            // A bucket or queue of more than two seconds is none that anybody has.
            if case.bytes * 8 <= case.rate_kbit_s * 2_000 {
                return case;
            }
        }
    }

    /// Whether no threshold may be chosen with it: by a hash (FNV-1a) of its name.
    pub fn is_held_out(&self) -> bool {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let hash = self.to_string().bytes().fold(0xcbf2_9ce4_8422_2325, step);
        (hash >> 32) & 1 == 1
    }

    pub fn is_policed(&self) -> bool {
        self.kind == Kind::Policer
    }

    pub fn rate(&self) -> Rate {
        Rate::from_bit_s(self.rate_kbit_s * 1_000).expect("a rate")
    }

    fn duration_ns(&self) -> u64 {
        let bits = self.bytes as f64 * 8.0 / (self.rate_kbit_s as f64 * 1e3);
        let rtt = self.rtt_ms as f64 / 1e3;
        let packet = 12_000.0 / (self.rate_kbit_s as f64 * 1e3);
        let wanted = 10.0_f64.max(60.0 * rtt).max(8.0 * bits).max(2_500.0 * packet).min(60.0);
        (wanted.min(PACKETS_MAX as f64 * packet) * 1e9) as u64
    }
}

/// What became of a flow.
#[derive(Debug, Clone, Copy, Default)]
pub struct Truth {
    pub packets: u64,
    pub dropped: u64,
    /// Runs of dropped packets.
    pub places: usize,
    /// Slices of a round trip with a loss.
    pub slices: usize,
}

impl Truth {
    /// Whether it lost enough to be judged.
    pub fn counts(&self) -> bool {
        self.places >= PLACES_MIN && self.slices >= SLICES_MIN
    }
}

#[derive(Debug)]
enum Event {
    Wake(usize),
    Arrive(usize, Data),
    Leave,
    Deliver(usize, Data),
    Delayed(usize),
    Acked(usize, Ack),
    Timer(usize),
    Datagram,
}

struct Timed(u64, u64, Event);

impl PartialEq for Timed {
    fn eq(&self, other: &Timed) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Timed {}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Timed) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timed {
    fn cmp(&self, other: &Timed) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

struct Flow {
    sender: Sender,
    receiver: Receiver,
    line_free_ns: u64,
    acked_ns: u64,
    wake_ns: Option<u64>,
    truth: Truth,
    last_dropped: bool,
    last_slice: u64,
}

struct Run {
    case: Case,
    random: Random,
    events: BinaryHeap<Reverse<Timed>>,
    order: u64,
    flows: Vec<Flow>,
    gate: Gate<(usize, Data)>,
    leaving: bool,
    noise: Noise,
    datagrams: u64,
    packets: [Vec<Packet>; 2],
}

/// Runs a case: what became of each flow, and its packets as seen at the sender and at the receiver.
pub fn run(case: Case) -> (Vec<Truth>, [Vec<Packet>; 2]) {
    let mut run = Run {
        case,
        random: Random::new(case.seed ^ 0x5eed),
        events: BinaryHeap::new(),
        order: 0,
        flows: Vec::new(),
        gate: Gate::new(case.kind, case.rate(), case.bytes),
        leaving: false,
        noise: Noise::new(case.rate()),
        datagrams: 0,
        packets: [Vec::new(), Vec::new()],
    };
    for at in 0..case.flows {
        // Late enough for the capture to have begun before.
        let start = 50_000_000 + run.random.next() % (500_000_000 * case.flows as u64);
        run.flows.push(Flow {
            sender: Sender::new(case.cc, case.paced, start),
            receiver: Receiver::default(),
            line_free_ns: 0,
            acked_ns: 0,
            wake_ns: Some(start),
            truth: Truth::default(),
            last_dropped: false,
            last_slice: u64::MAX,
        });
        run.push(start, Event::Wake(at));
        run.push(start + 1_000_000_000, Event::Timer(at));
        for side in 0..2 {
            let late = if side == 1 { case.rtt_ms * 500_000 } else { 0 };
            let body = Body::Data { seq: 0, syn: true, stamp: None };
            let time_ns = start - 10_000_000 + late;
            let syn = Packet { time_ns, flow: at as u16, ip_bytes: 40, id: 0, body };
            run.packets[side].push(syn);
        }
    }
    if case.cross == Cross::Shared {
        run.push(0, Event::Datagram);
    }
    let end = case.duration_ns();
    while let Some(Reverse(Timed(now, _, event))) = run.events.pop() {
        if now > end {
            break;
        }
        run.event(now, event);
    }
    for side in &mut run.packets {
        side.retain(|packet| packet.time_ns <= end);
        side.sort_by_key(|packet| packet.time_ns);
    }
    (run.flows.iter().map(|flow| flow.truth).collect(), run.packets)
}

/// The packets as a capture: time stamps in nanoseconds, 96 bytes of each packet.
pub fn write(packets: &[Packet]) -> Capture {
    let mut capture = Capture::plain();
    for packet in packets {
        capture.packet(packet);
    }
    capture
}

fn number(seq: u32, stamps: bool) -> u32 {
    let payload = IP_BYTES - 40 - if stamps { 12 } else { 0 };
    1 + seq.wrapping_mul(payload)
}

impl Run {
    fn push(&mut self, time: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse(Timed(time, self.order, event)));
    }

    fn event(&mut self, now: u64, event: Event) {
        match event {
            Event::Wake(at) => {
                if self.flows[at].wake_ns.is_some_and(|wake| wake <= now) {
                    self.flows[at].wake_ns = None;
                }
                self.send(now, at);
            }
            Event::Arrive(at, data) => self.arrive(now, at, data),
            Event::Leave => self.leave(now),
            Event::Deliver(at, data) => self.deliver(now, at, data),
            Event::Delayed(at) => {
                if let Some(ack) = self.flows[at].receiver.on_timer(now) {
                    self.acknowledge(now, at, ack);
                }
            }
            Event::Acked(at, ack) => {
                self.flows[at].sender.on_ack(now, &ack);
                self.send(now, at);
            }
            Event::Timer(at) => {
                self.flows[at].sender.on_timer(now);
                self.send(now, at);
                let again = self.flows[at].sender.timer_ns.max(now + 1_000_000);
                self.push(again, Event::Timer(at));
            }
            Event::Datagram => self.datagram(now),
        }
    }

    fn send(&mut self, now: u64, at: usize) {
        let line = self.case.rate().bit_s() * self.case.line;
        let line = Rate::from_bit_s(line.min(10_000_000_000)).expect("a rate");
        // A host leaves no more than a few packets to its line, and stamps them then.
        let ahead = 4 * line.time_for(Bytes(IP_BYTES.into())).0;
        loop {
            let free = self.flows[at].line_free_ns;
            let next = if free > now + ahead {
                Err(Some(free - ahead))
            } else {
                self.flows[at].sender.poll(now)
            };
            match next {
                Ok(data) => {
                    let flow = &mut self.flows[at];
                    let free = flow.line_free_ns.max(now) + line.time_for(Bytes(1_500)).0;
                    flow.line_free_ns = free;
                    self.capture_data(Side::Sender, free, at, data);
                    self.push(free, Event::Arrive(at, data));
                }
                Err(Some(again)) => {
                    let flow = &mut self.flows[at];
                    if flow.wake_ns.is_none_or(|wake| wake > again) {
                        flow.wake_ns = Some(again);
                        self.push(again, Event::Wake(at));
                    }
                    return;
                }
                Err(None) => return,
            }
        }
    }

    fn capture_data(&mut self, side: Side, time_ns: u64, at: usize, data: Data) {
        let stamp = self.case.stamps.then_some((data.sent_ns / 1_000_000) as u32 + 77_000);
        let seq = number(data.seq, self.case.stamps);
        let body = if at == CROSS { Body::Udp } else { Body::Data { seq, syn: false, stamp } };
        let (flow, id) = (at as u16, data.seq as u16);
        let packet = Packet { time_ns, flow, ip_bytes: IP_BYTES, id, body };
        self.packets[usize::from(side == Side::Receiver)].push(packet);
    }

    fn datagram(&mut self, now: u64) {
        let data = Data { id: 0, seq: self.datagrams as u32, sent_ns: now };
        let on = (now / 500_000_000).is_multiple_of(2);
        if on {
            self.datagrams += 1;
            self.capture_data(Side::Sender, now, CROSS, data);
            self.push(now, Event::Arrive(CROSS, data));
        }
        let gap = self.case.rate().time_for(Bytes(1_500)).0 as f64 / 0.4;
        let next = if on { now + self.random.exponential(gap) as u64 } else { now + 1_000_000 };
        self.push(next + 1, Event::Datagram);
    }

    fn arrive(&mut self, now: u64, at: usize, data: Data) {
        let passed = match &mut self.gate {
            Gate::Policer(bucket) => {
                let passed = bucket.on_packet(Nanos(now), IP_BYTES);
                if passed {
                    self.travel(now, at, data);
                }
                passed
            }
            Gate::Queue(queue) => queue.push(now, IP_BYTES, (at, data), &mut self.random),
        };
        self.note(now, at, passed);
        self.begin(now);
    }

    fn begin(&mut self, now: u64) {
        if let Gate::Queue(queue) = &mut self.gate
            && !self.leaving
            && let Some(next) = queue.next_ns(now)
        {
            self.leaving = true;
            self.push(next, Event::Leave);
        }
    }

    fn leave(&mut self, now: u64) {
        self.leaving = false;
        let mut dropped = Vec::new();
        if let Gate::Queue(queue) = &mut self.gate
            && let Some((at, data)) = queue.pop(now, &mut dropped)
        {
            self.travel(now, at, data);
        }
        for (at, _) in dropped {
            self.note(now, at, false);
        }
        self.begin(now);
    }

    fn note(&mut self, now: u64, at: usize, passed: bool) {
        let Some(flow) = self.flows.get_mut(at) else { return };
        flow.truth.packets += u64::from(passed);
        if !passed {
            let slice = now / (self.case.rtt_ms * 1_000_000);
            flow.truth.dropped += 1;
            flow.truth.places += usize::from(!flow.last_dropped);
            flow.truth.slices += usize::from(slice != flow.last_slice);
            flow.last_slice = slice;
        }
        flow.last_dropped = !passed;
    }

    fn travel(&mut self, now: u64, at: usize, data: Data) {
        let left = match self.case.cross {
            Cross::Elsewhere => self.noise.pass(now, IP_BYTES, &mut self.random),
            _ => now,
        };
        let time = left + self.case.rtt_ms * 500_000;
        self.push(time, Event::Deliver(at, data));
    }

    fn deliver(&mut self, now: u64, at: usize, data: Data) {
        self.capture_data(Side::Receiver, now, at, data);
        let Some(flow) = self.flows.get_mut(at) else { return };
        let ack = flow.receiver.on_data(now, data);
        if let Some(due) = flow.receiver.due_ns {
            self.push(due, Event::Delayed(at));
        }
        if let Some(ack) = ack {
            self.acknowledge(now, at, ack);
        }
    }

    fn acknowledge(&mut self, now: u64, at: usize, ack: Ack) {
        // A host answers when it comes to it.
        let late = 5_000 + self.random.next() % 50_000;
        let stamps = self.case.stamps;
        let flow = &mut self.flows[at];
        let left = (now + late).max(flow.acked_ns + 1);
        flow.acked_ns = left;
        let back = left + self.case.rtt_ms * 500_000;
        let mut blocks = [(0, 0); 3];
        let given = ack.blocks.iter().map(|(a, b)| (number(*a, stamps), number(*b, stamps)));
        blocks.iter_mut().zip(given).for_each(|(block, given)| *block = given);
        let body = Body::Sack {
            ack: number(ack.next, stamps),
            blocks,
            count: ack.blocks.len(),
            stamp: stamps.then_some((left / 1_000_000) as u32 + 5_000),
        };
        // Headers alone: with a byte more it would be data.
        let sacks = if ack.blocks.is_empty() { 0 } else { 4 + 8 * ack.blocks.len() as u32 };
        let ip_bytes = 40 + if stamps { 12 } else { 0 } + sacks;
        for (side, time_ns) in [(1, left), (0, back)] {
            let packet = Packet { time_ns, flow: at as u16, ip_bytes, id: 0, body };
            self.packets[side].push(packet);
        }
        self.push(back, Event::Acked(at, ack));
    }
}
