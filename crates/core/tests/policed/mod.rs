//! TCP flows through a token bucket, packet by packet, in virtual time: what the laws and the estimators
//! are checked against. Compiled into the tests of `tidegate-core` and `tidegate-capture`, from this one
//! file.
//!
//! A sender has a congestion window and sends what it allows, either spread over the round trip or in one
//! piece at line rate. What the bucket passes is acknowledged a round trip later, packet by packet (as SACK
//! would); what was sent three packets before something that was acknowledged is lost, and sent again. With
//! nothing acknowledged for a time-out the window is one. Nothing queues anywhere. A seed replays a run.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use tidegate_core::{
    Bytes, Nanos, Rate, TokenBucket, burst::CongestionControl, token_bucket::BucketConfig,
};

/// The case that is simulated.
#[allow(dead_code, reason = "each of the tests reads some of it")]
#[derive(Debug, Clone, Copy)]
pub struct Scene {
    pub rate: Rate,
    pub bucket: Bytes,
    pub rtt: Nanos,
    pub flows: usize,
    pub cc: CongestionControl,
    pub paced: bool,
    /// Line rate of the senders.
    pub line: Rate,
    pub mtu: u32,
    pub duration: Nanos,
    pub seed: u64,
    /// Slow start goes on to the first loss; else it ends below the fair share, since the long run counts.
    pub slow_start: bool,
}

/// A packet that a sender sent.
#[allow(dead_code, reason = "each of the tests reads some of it")]
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    pub at: Nanos,
    pub flow: usize,
    /// Counts packets of data, not transmissions.
    pub seq: u32,
    pub passed: bool,
}

/// Packets before something acknowledged that are taken for reordered, not lost.
const REORDER: u64 = 3;
const RTO_MIN_NS: u64 = 200_000_000;
const BETA: f64 = 0.7;
const CUBIC_C: f64 = 0.4;

struct Outstanding {
    id: u64,
    seq: u32,
    at: u64,
    /// The bytes that had been delivered when it was sent, and the time of that.
    delivered: u64,
    delivered_at: u64,
}

struct Flow {
    cwnd: f64,
    ssthresh: f64,
    /// CUBIC's plateau, and when its curve began.
    plateau: f64,
    epoch: Option<u64>,
    friendly: f64,
    epoch_start: f64,
    outstanding: VecDeque<Outstanding>,
    lost: VecDeque<u32>,
    next_seq: u32,
    next_id: u64,
    /// No second reduction before this transmission is acknowledged.
    recover: u64,
    next_send: u64,
    last_ack: u64,
    newest_ack: u64,
    waking: bool,
    delivered: u64,
    delivered_at: u64,
    /// BBR: the rates of the last round trips in packets/ns, and when its cycle began.
    rates: VecDeque<(u64, f64)>,
    start: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ack(u64),
    Wake,
    Timeout,
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Runs the scene; `each` gets every packet, in order of time.
#[allow(dead_code, reason = "some of the tests have a gate of their own")]
pub fn run(scene: &Scene, each: impl FnMut(Sent)) {
    let config = BucketConfig::new(scene.rate, scene.bucket).expect("a bucket");
    let mut bucket = TokenBucket::new(config, Nanos(0));
    run_each(&vec![*scene; scene.flows], |now, _| bucket.on_packet(now, scene.mtu), each);
}

/// Runs flows that each have a scene of their own, of the same rate and duration; `gate` says what passes.
pub fn run_each(
    scenes: &[Scene],
    mut gate: impl FnMut(Nanos, usize) -> bool,
    mut each: impl FnMut(Sent),
) {
    let Some(Scene { seed, duration, .. }) = scenes.first() else { return };
    let mut random = Random(seed | 1);
    let mut events: BinaryHeap<Reverse<(u64, usize, Event)>> = BinaryHeap::new();
    let mut flows: Vec<Flow> = scenes
        .iter()
        .enumerate()
        .map(|(at, scene)| {
            let bdp = scene.rate.bit_s() as f64 / 8e9 * scene.rtt.0 as f64 / f64::from(scene.mtu);
            let fair = (bdp / scene.flows as f64).max(2.0);
            let start = random.next() % scene.rtt.0.max(1) * 5;
            events.push(Reverse((start, at, Event::Wake)));
            events.push(Reverse((start + RTO_MIN_NS, at, Event::Timeout)));
            let below = fair * (0.5 + (random.next() % 100) as f64 / 250.0);
            Flow::new(if scene.slow_start { f64::INFINITY } else { below }, start)
        })
        .collect();
    while let Some(Reverse((now, at, event))) = events.pop() {
        if now > duration.0 {
            break;
        }
        let (flow, scene) = (&mut flows[at], &scenes[at]);
        let gap = scene.line.time_for(Bytes(scene.mtu.into())).0.max(1);
        match event {
            Event::Ack(id) => flow.on_ack(now, id, scene),
            Event::Wake => flow.waking = false,
            Event::Timeout => {
                let rto = RTO_MIN_NS.max(2 * scene.rtt.0);
                if !flow.outstanding.is_empty() && now >= flow.last_ack + rto {
                    flow.on_timeout(now);
                }
                events.push(Reverse((flow.last_ack.max(now) + rto, at, Event::Timeout)));
            }
        }
        while flow.has_room(scene) {
            if flow.next_send > now {
                if !flow.waking {
                    flow.waking = true;
                    events.push(Reverse((flow.next_send, at, Event::Wake)));
                }
                break;
            }
            let seq = flow.send(now);
            let passed = gate(Nanos(now), at);
            each(Sent { at: Nanos(now), flow: at, seq, passed });
            if passed {
                // Within a hundredth of the round trip, in order.
                let late = if scene.paced { random.next() % (scene.rtt.0 / 100).max(1) } else { 0 };
                flow.newest_ack = flow.newest_ack.max(now + scene.rtt.0 + late);
                let back = flow.newest_ack;
                events.push(Reverse((back, at, Event::Ack(flow.next_id - 1))));
            }
            let pace = if scene.paced { flow.pace_ns(now, scene).max(gap) } else { gap };
            flow.next_send = now + pace;
        }
    }
}

impl Flow {
    fn new(ssthresh: f64, now: u64) -> Flow {
        Flow {
            cwnd: 10.0_f64.min(ssthresh),
            ssthresh,
            plateau: 0.0,
            epoch: None,
            friendly: 0.0,
            epoch_start: 0.0,
            outstanding: VecDeque::new(),
            lost: VecDeque::new(),
            next_seq: 0,
            next_id: 1,
            recover: 0,
            next_send: now,
            last_ack: now,
            newest_ack: 0,
            waking: true,
            delivered: 0,
            delivered_at: now,
            rates: VecDeque::new(),
            start: now,
        }
    }

    fn has_room(&self, scene: &Scene) -> bool {
        let window = match scene.cc {
            CongestionControl::Bbr => self.bbr_window(scene),
            _ => self.cwnd,
        };
        (self.outstanding.len() as f64) < window.max(1.0).floor()
    }

    fn send(&mut self, now: u64) -> u32 {
        let seq = self.lost.pop_front().unwrap_or_else(|| {
            self.next_seq += 1;
            self.next_seq - 1
        });
        if self.outstanding.is_empty() {
            self.last_ack = now;
            self.delivered_at = now;
        }
        let (delivered, delivered_at) = (self.delivered, self.delivered_at);
        self.outstanding.push_back(Outstanding {
            id: self.next_id,
            seq,
            at: now,
            delivered,
            delivered_at,
        });
        self.next_id += 1;
        seq
    }

    fn on_ack(&mut self, now: u64, id: u64, scene: &Scene) {
        let Some(at) = self.outstanding.iter().position(|o| o.id == id) else { return };
        let Some(acked) = self.outstanding.remove(at) else { return };
        self.last_ack = now;
        self.delivered += 1;
        self.delivered_at = now;
        if scene.cc == CongestionControl::Bbr {
            let time = (now - acked.delivered_at).max(now - acked.at).max(1);
            let rate = (self.delivered - acked.delivered) as f64 / time as f64;
            self.rates.retain(|(at, r)| now - at <= 10 * scene.rtt.0 && *r > rate);
            self.rates.push_back((now, rate));
        }
        let mut newest_lost = 0;
        while self.outstanding.front().is_some_and(|o| o.id + REORDER <= id) {
            let Some(lost) = self.outstanding.pop_front() else { break };
            newest_lost = lost.id;
            self.lost.push_back(lost.seq);
        }
        if newest_lost > self.recover {
            self.reduce(scene.cc);
            self.recover = self.next_id - 1;
        } else if id > self.recover {
            self.grow(now, scene);
        }
    }

    fn on_timeout(&mut self, now: u64) {
        self.lost.extend(self.outstanding.drain(..).map(|o| o.seq));
        self.ssthresh = (self.cwnd * 0.5).max(2.0);
        self.cwnd = 1.0;
        self.epoch = None;
        self.recover = self.next_id - 1;
        self.last_ack = now;
        self.next_send = now;
    }

    fn reduce(&mut self, cc: CongestionControl) {
        let beta = if cc == CongestionControl::Reno { 0.5 } else { BETA };
        let peak = self.cwnd;
        self.plateau = if peak < self.plateau { peak * (1.0 + BETA) / 2.0 } else { peak };
        self.friendly = peak;
        self.cwnd = (peak * beta).max(2.0);
        self.ssthresh = self.cwnd;
        self.epoch = None;
    }

    fn grow(&mut self, now: u64, scene: &Scene) {
        if self.cwnd < self.ssthresh {
            self.cwnd += 1.0;
            return;
        }
        if scene.cc != CongestionControl::Cubic {
            self.cwnd += 1.0 / self.cwnd;
            return;
        }
        let before = self.friendly;
        let epoch = *self.epoch.get_or_insert_with(|| {
            self.epoch_start = self.cwnd;
            now
        });
        let flat_at = ((self.plateau - self.epoch_start).max(0.0) / CUBIC_C).cbrt();
        let rtt = scene.rtt.0 as f64 / 1e9;
        let time = (now - epoch) as f64 / 1e9;
        let curve =
            |time: f64| self.plateau.max(self.epoch_start) + CUBIC_C * (time - flat_at).powi(3);
        let alpha = 3.0 * (1.0 - BETA) / (1.0 + BETA);
        let slow = self.epoch_start + alpha * time / rtt;
        let slow = if slow <= before { slow } else { before + (slow - before) / alpha };
        let target = if curve(time) < slow { slow } else { curve(time + rtt) };
        if target > self.cwnd {
            self.cwnd += ((target - self.cwnd) / self.cwnd).min(0.5);
        }
    }

    fn pace_ns(&self, now: u64, scene: &Scene) -> u64 {
        let rate = match scene.cc {
            CongestionControl::Bbr => self.bbr_rate() * self.bbr_gain(now, scene),
            // As Linux does: faster than the window by a fifth, twice in slow start.
            _ if self.cwnd < self.ssthresh => 2.0 * self.cwnd / scene.rtt.0 as f64,
            _ => 1.2 * self.cwnd / scene.rtt.0 as f64,
        };
        (1.0 / rate) as u64
    }

    fn bbr_rate(&self) -> f64 {
        self.rates.iter().map(|(_, rate)| *rate).fold(1e-9, f64::max)
    }

    fn bbr_gain(&self, now: u64, scene: &Scene) -> f64 {
        if self.delivered < 200 && (now - self.start) < 20 * scene.rtt.0 {
            return 2.0;
        }
        match (now - self.start) / scene.rtt.0.max(1) % 8 {
            0 => 1.25,
            1 => 0.75,
            _ => 1.0,
        }
    }

    fn bbr_window(&self, scene: &Scene) -> f64 {
        (2.0 * self.bbr_rate() * scene.rtt.0 as f64).max(10.0)
    }
}
