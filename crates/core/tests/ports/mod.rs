//! A port in virtual time: TCP senders, the shaper's queue in front of them, a path behind it. What acts on
//! the ACKs is an argument.

use std::{cmp::Reverse, collections::BinaryHeap, collections::VecDeque};

use tidegate_core::{
    Nanos,
    dem::{self, Due, Marker},
    spring::{self, Ack, Config, Edge, RoundTrip},
};

pub const MSS: u64 = 1448;
pub const FRAME: u64 = 1514;
const MSS_OPTION: u16 = 1460;
const SCALE: u8 = 9;
/// Segments that come within this time may be acknowledged together; a lone one waits for so long.
const DELAYED_ACK: u64 = 40_000_000;
const EVENTS_MAX: usize = 20_000_000;

/// How a sender answers ECE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    /// Not at all: its window is as large as it may be (CUBIC without a loss, BBR).
    Deaf,
    /// Once a window, by its half (Reno).
    Reno,
    /// Once a window, by 3/10 (CUBIC).
    Cubic,
    /// By half of the part that was marked (DCTCP).
    Dctcp,
}

/// The law that acts on the ACKs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Law {
    Dem(dem::Law),
    Spring,
    /// AC/DC (SIGCOMM 2016), as SPRING was probably built: DCTCP outside of the sender.
    AcDc,
}

#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub sender: Sender,
    pub rtt: u64,
    /// Bytes a second that it wants; none: all.
    pub wants: Option<u64>,
    pub from: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Start(usize),
    /// The queue's head has left.
    Departure,
    /// A segment reaches the receiver.
    Arrival(usize),
    DelayedAck(usize, u64),
    /// An ACK of so many bytes passes the port.
    Ack(usize, u64),
    /// A flow that wants less may have more to send.
    Wants(usize),
}

struct Flow {
    plan: Plan,
    cwnd: f64,
    ssthresh: f64,
    /// No further reduction before this is acknowledged; DCTCP's window ends here too.
    window_end: u64,
    reduced_until: u64,
    alpha: f64,
    marked: u64,
    covered: u64,
    sent: u64,
    acked: u64,
    allowed: u64,
    arrived: u64,
    unacked_segments: u64,
    timer: u64,
    due: Due,
    rtt: RoundTrip,
    edge: Edge,
    epoch: Option<u64>,
    outer: AcDc,
}

#[derive(Default)]
struct AcDc {
    rwnd: f64,
    ssthresh: f64,
    alpha: f64,
    marked: u64,
    total: u64,
    end: u64,
    cut_until: u64,
}

pub struct Outcome {
    /// The used part of the limit, from `from` on.
    pub used: f64,
    /// Mean of the queue as a time, and what is exceeded by 1 % of the samples; microseconds.
    pub queue_us: f64,
    pub queue_p99_us: f64,
    /// Bytes of each flow.
    pub bytes: Vec<u64>,
}

impl Outcome {
    /// Jain's index of the flows that want all.
    pub fn jain(&self, plans: &[Plan]) -> f64 {
        let all: Vec<f64> = self
            .bytes
            .iter()
            .zip(plans)
            .filter(|(_, p)| p.wants.is_none())
            .map(|(b, _)| *b as f64)
            .collect();
        let (sum, squares): (f64, f64) = (all.iter().sum(), all.iter().map(|b| b * b).sum());
        sum * sum / (all.len() as f64 * squares)
    }
}

struct World {
    byte_s: u64,
    law: Law,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    serial: u64,
    flows: Vec<Flow>,
    queue: VecDeque<usize>,
    left: u64,
    marker: Marker,
    marks: dem::Config,
    config: Config,
    share: u64,
    epoch: u64,
    epoch_start: u64,
    epoch_left: u64,
    epoch_flows: u32,
    epoch_flows_before: u32,
    backlog: u64,
    longest: u64,
    longest_before: u64,
}

impl World {
    fn at(&mut self, time: u64, event: Event) {
        self.serial += 1;
        self.events.push(Reverse((time, self.serial, event)));
    }

    fn backlog_bytes(&self) -> u64 {
        self.queue.len() as u64 * FRAME
    }

    fn cost(&self) -> u64 {
        FRAME * 1_000_000_000 / self.byte_s
    }

    /// The sender sends what it may.
    fn send(&mut self, index: usize) {
        loop {
            let flow = &mut self.flows[index];
            let window = (flow.acked + (flow.cwnd * MSS as f64) as u64).min(flow.allowed);
            let wants = flow
                .plan
                .wants
                .map_or(u64::MAX, |byte_s| (self.now - flow.plan.from) * byte_s / 1_000_000_000);
            if flow.sent + MSS > window || flow.sent + MSS > wants {
                return;
            }
            flow.sent += MSS;
            let wait = self.config.time(self.queue.len() as u64 * FRAME);
            flow.rtt.on_data(flow.sent as u32, Nanos(self.now), wait, 0);
            self.queue.push_back(index);
            if self.queue.len() == 1 {
                self.at(self.now + self.cost(), Event::Departure);
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Start(i) => {
                // The handshake gave the round trip.
                let rtt = self.flows[i].plan.rtt.max(1);
                let flow = &mut self.flows[i];
                flow.rtt.on_data(0, Nanos(self.now.saturating_sub(rtt).max(1)), Nanos(0), 0);
                self.on_ack(i, 0);
                if let Some(byte_s) = self.flows[i].plan.wants {
                    self.at(self.now + MSS * 1_000_000_000 / byte_s + 1, Event::Wants(i));
                }
            }
            Event::Wants(i) => {
                self.send(i);
                if let Some(byte_s) = self.flows[i].plan.wants {
                    self.at(self.now + MSS * 1_000_000_000 / byte_s + 1, Event::Wants(i));
                }
            }
            Event::Departure => {
                let Some(i) = self.queue.pop_front() else { return };
                self.left += FRAME;
                self.at(self.now + self.flows[i].plan.rtt / 2, Event::Arrival(i));
                if !self.queue.is_empty() {
                    self.at(self.now + self.cost(), Event::Departure);
                }
            }
            Event::Arrival(i) => {
                let flow = &mut self.flows[i];
                flow.arrived += MSS;
                flow.unacked_segments += 1;
                if flow.unacked_segments >= 2 {
                    self.acknowledge(i);
                } else {
                    let timer = flow.timer;
                    self.at(self.now + DELAYED_ACK, Event::DelayedAck(i, timer));
                }
            }
            Event::DelayedAck(i, timer) => {
                if self.flows[i].timer == timer {
                    self.acknowledge(i);
                }
            }
            Event::Ack(i, number) => self.on_ack(i, number),
        }
    }

    fn acknowledge(&mut self, i: usize) {
        let flow = &mut self.flows[i];
        flow.timer += 1;
        flow.unacked_segments = 0;
        let (arrived, rtt) = (flow.arrived, flow.plan.rtt);
        self.at(self.now + rtt - rtt / 2, Event::Ack(i, arrived));
    }

    /// An ACK passes the port and reaches the sender.
    fn on_ack(&mut self, i: usize, number: u64) {
        let backlog = self.backlog_bytes();
        let newly = number - self.flows[i].acked;
        let mut ece = false;
        match self.law {
            Law::Dem(_) => {
                let flow = &mut self.flows[i];
                let ack = dem::Ack {
                    segments: newly.div_ceil(MSS) as u32,
                    scalable: flow.plan.sender == Sender::Dctcp,
                };
                ece = self.marker.on_ack(&self.marks, Nanos(self.now), backlog, ack, &mut flow.due);
                flow.allowed = u64::MAX;
            }
            Law::Spring => self.spring(i, number, newly),
            Law::AcDc => self.ac_dc(i, number, newly, backlog),
        }
        self.react(i, number, newly, ece);
        self.send(i);
    }

    fn spring(&mut self, i: usize, number: u64, newly: u64) {
        let wait = self.config.time(self.backlog_bytes()).0;
        self.backlog = self.backlog - self.backlog / 16 + wait / 16;
        let flow = &mut self.flows[i];
        flow.rtt.on_ack(number as u32, Nanos(self.now), 0);
        self.longest = self.longest.max(flow.rtt.least.0);
        if (newly > 0 || number == 0) && flow.epoch != Some(self.epoch) {
            let known = flow.epoch.is_some_and(|e| self.epoch - e <= spring::KNOWN_EPOCHS.into());
            flow.epoch = Some(self.epoch);
            self.epoch_flows += 1;
            if !known && self.epoch_flows > self.epoch_flows_before {
                self.share = spring::join(self.share, self.epoch_flows);
            }
        }
        let rtt = Nanos(self.longest.max(self.longest_before));
        let length = spring::epoch_length(&self.config, rtt, self.epoch_flows_before, MSS_OPTION);
        if self.now - self.epoch_start >= length.0 {
            let epoch = spring::Epoch {
                elapsed: Nanos(self.now - self.epoch_start),
                left_bytes: self.left - self.epoch_left,
                backlog: Nanos(self.backlog),
                rtt,
                flows: self.epoch_flows.max(self.epoch_flows_before),
            };
            self.share = spring::next_share(self.share, &self.config, &epoch);
            (self.epoch_start, self.epoch_left) = (self.now, self.left);
            (self.epoch_flows_before, self.epoch_flows) = (self.epoch_flows, 0);
            (self.longest_before, self.longest) = (self.longest, 0);
            self.epoch += 1;
        }
        let phase = spring::phase((i as u32).wrapping_mul(0x85eb_ca6b), self.epoch as u32);
        let window = spring::window(&self.config, self.share, flow.rtt.least, MSS_OPTION, phase);
        let ack = Ack { ack: number as u32, raw: u16::MAX, scale: SCALE, bare: false };
        let said = u64::from(flow.edge.say(&ack, window)) << SCALE;
        flow.allowed = flow.allowed.max(number + said);
    }

    fn ac_dc(&mut self, i: usize, number: u64, newly: u64, backlog: u64) {
        let mss = MSS as f64;
        let marked = backlog > self.marks.threshold_bytes;
        let clamp = self.byte_s as f64 * (self.flows[i].plan.rtt as f64 + 1e6) / 1e9;
        let flow = &mut self.flows[i];
        let sent = flow.sent;
        let outer = &mut flow.outer;
        if outer.rwnd == 0.0 {
            (outer.rwnd, outer.ssthresh, outer.alpha) = (10.0 * mss, clamp / 2.0, 1.0);
        }
        outer.total += newly;
        if marked {
            outer.marked += newly;
        }
        if number >= outer.end {
            let part = outer.marked as f64 / outer.total.max(1) as f64;
            outer.alpha += (part - outer.alpha) / 16.0;
            (outer.marked, outer.total, outer.end) = (0, 0, sent);
        }
        if marked && number >= outer.cut_until {
            outer.rwnd = (outer.rwnd * (1.0 - outer.alpha / 2.0)).max(mss);
            (outer.ssthresh, outer.cut_until) = (outer.rwnd, sent);
        } else if !marked && number >= outer.cut_until {
            outer.rwnd += if outer.rwnd < outer.ssthresh {
                newly as f64
            } else {
                mss * newly as f64 / outer.rwnd
            };
        }
        outer.rwnd = outer.rwnd.min(clamp);
        let said = ((outer.rwnd as u64) >> SCALE << SCALE).max(MSS);
        flow.allowed = flow.allowed.max(number + said);
    }

    /// The reaction of the sender's congestion control.
    fn react(&mut self, i: usize, number: u64, newly: u64, ece: bool) {
        let flow = &mut self.flows[i];
        // Whether the window, not what there is to send, holds it.
        let limited = flow.sent + 2 * MSS > flow.acked + (flow.cwnd * MSS as f64) as u64;
        flow.acked = number;
        let segments = newly as f64 / MSS as f64;
        if flow.plan.sender == Sender::Deaf {
            flow.cwnd = 1e6;
            return;
        }
        flow.covered += newly;
        flow.marked += if ece { newly } else { 0 };
        if number >= flow.window_end {
            if flow.plan.sender == Sender::Dctcp && flow.covered > 0 {
                flow.alpha += (flow.marked as f64 / flow.covered as f64 - flow.alpha) / 16.0;
            }
            (flow.marked, flow.covered, flow.window_end) = (0, 0, flow.sent);
        }
        if ece && number >= flow.reduced_until {
            let keep = match flow.plan.sender {
                Sender::Cubic => 0.7,
                Sender::Dctcp => 1.0 - flow.alpha / 2.0,
                _ => 0.5,
            };
            flow.cwnd = (flow.cwnd * keep).max(2.0);
            (flow.ssthresh, flow.reduced_until) = (flow.cwnd, flow.sent);
        } else if number >= flow.reduced_until && limited {
            // On paths this short CUBIC grows as Reno would.
            flow.cwnd += if flow.cwnd < flow.ssthresh { segments } else { segments / flow.cwnd };
        }
    }
}

/// Runs flows over a shaper of `byte_s` until `end`; what is reported is from `from` on.
pub fn run(byte_s: u64, law: Law, plans: &[Plan], from: u64, end: u64) -> Outcome {
    let flow = |plan: &Plan| Flow {
        plan: *plan,
        cwnd: 10.0,
        ssthresh: f64::MAX,
        window_end: 0,
        reduced_until: 0,
        alpha: 1.0,
        marked: 0,
        covered: 0,
        sent: 0,
        acked: 0,
        allowed: 0,
        arrived: 0,
        unacked_segments: 0,
        timer: 0,
        due: Due::default(),
        rtt: RoundTrip::default(),
        edge: Edge::default(),
        epoch: None,
        outer: AcDc::default(),
    };
    let mut marks = dem::Config::new(byte_s, FRAME as u32);
    if let Law::Dem(law) = law {
        marks.law = law;
    }
    let mut world = World {
        byte_s,
        law,
        now: 0,
        events: BinaryHeap::new(),
        serial: 0,
        flows: plans.iter().map(flow).collect(),
        queue: VecDeque::new(),
        left: 0,
        marker: Marker::default(),
        marks,
        config: Config::new(byte_s, FRAME as u32),
        share: spring::ONE,
        epoch: 0,
        epoch_start: 0,
        epoch_left: 0,
        epoch_flows: 0,
        epoch_flows_before: 0,
        backlog: 0,
        longest: 0,
        longest_before: 0,
    };
    for (i, plan) in plans.iter().enumerate() {
        world.at(plan.from, Event::Start(i));
    }
    let (mut samples, mut next, mut base) = (Vec::new(), from, None);
    for _ in 0..EVENTS_MAX {
        let Some(Reverse((time, _, event))) = world.events.pop() else { break };
        while next <= time.min(end) {
            // What a packet that came now would wait.
            samples.push(world.config.time(world.backlog_bytes()).0 as f64 / 1e3);
            next += 10_000;
        }
        if time >= from && base.is_none() {
            base = Some((world.left, world.flows.iter().map(|f| f.arrived).collect::<Vec<_>>()));
        }
        if time > end {
            break;
        }
        world.now = time;
        world.on_event(event);
    }
    let (left, arrived) = base.expect("events after the beginning");
    samples.sort_by(f64::total_cmp);
    Outcome {
        used: (world.left - left) as f64 / (byte_s as f64 * (end - from) as f64 / 1e9),
        queue_us: samples.iter().sum::<f64>() / samples.len() as f64,
        queue_p99_us: samples[samples.len() * 99 / 100],
        bytes: world.flows.iter().zip(arrived).map(|(f, base)| f.arrived - base).collect(),
    }
}
