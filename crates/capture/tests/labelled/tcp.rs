//! A TCP sender and a TCP receiver, packet by packet.
//!
//! The sender has a scoreboard (RFC 6675) and finds losses by transmissions: what was sent three packets
//! before something that arrived is lost, a retransmission too (as RACK does, RFC 8985). The receiver
//! acknowledges each second packet, after 40 ms, or at once where data is missing, with SACK and DSACK
//! (RFC 2018, 2883). CUBIC is RFC 9438 without its start by delay; BBR is version 1 without its long-term
//! rate.

use std::collections::VecDeque;

use tidegate_core::burst::CongestionControl;

/// Packets before something that arrived that are taken for reordered, not lost.
const REORDER: u64 = 3;
const RTO_MIN_NS: u64 = 200_000_000;
const RTO_MAX_NS: u64 = 10_000_000_000;
const DELAYED_ACK_NS: u64 = 40_000_000;
const BETA: f64 = 0.7;
const CUBIC_C: f64 = 0.4;
/// What a receiver's window allows, in packets.
const WINDOW_MAX: f64 = 4_000.0;
const BBR_STARTUP: f64 = 2.885;
const BBR_PROBE_RTT_EVERY_NS: u64 = 10_000_000_000;
const BBR_PROBE_RTT_NS: u64 = 200_000_000;

/// A packet of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Data {
    /// Which transmission of the sender.
    pub id: u64,
    /// Which packet of the data.
    pub seq: u32,
    /// When it was sent.
    pub sent_ns: u64,
}

/// An acknowledgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ack {
    /// All before this packet has arrived.
    pub next: u32,
    /// SACK blocks, in packets; the first may be a DSACK.
    pub blocks: Vec<(u32, u32)>,
    /// What arrived since the last one.
    pub news: Vec<Data>,
}

#[derive(Debug, Clone, Copy)]
struct Flying {
    data: Data,
    delivered: u64,
    delivered_ns: u64,
}

/// A sender that always has data.
#[derive(Debug)]
pub struct Sender {
    cc: CongestionControl,
    paced: bool,
    cwnd: f64,
    ssthresh: f64,
    /// CUBIC's plateau, when its curve began and from where, and Reno's window beside it.
    plateau: f64,
    epoch: Option<(u64, f64)>,
    friendly: f64,
    flying: VecDeque<Flying>,
    lost: VecDeque<u32>,
    next_seq: u32,
    next_id: u64,
    /// The latest transmission that arrived.
    arrived: u64,
    /// No second reduction before this transmission has arrived.
    recover: u64,
    next_send_ns: u64,
    srtt_ns: f64,
    rttvar_ns: f64,
    backoff: u32,
    /// When the timer runs out.
    pub timer_ns: u64,
    delivered: u64,
    delivered_ns: u64,
    rates: VecDeque<(u64, f64)>,
    min_rtt: (u64, u64),
    full: (f64, u32, u64),
    started: bool,
    probe_rtt_until: Option<u64>,
}

impl Sender {
    /// One that begins at `now`.
    pub fn new(cc: CongestionControl, paced: bool, now: u64) -> Sender {
        Sender {
            cc,
            paced: paced || cc == CongestionControl::Bbr,
            cwnd: 10.0,
            ssthresh: f64::INFINITY,
            plateau: 0.0,
            epoch: None,
            friendly: 0.0,
            flying: VecDeque::new(),
            lost: VecDeque::new(),
            next_seq: 0,
            next_id: 1,
            arrived: 0,
            recover: 0,
            next_send_ns: now,
            srtt_ns: 0.0,
            rttvar_ns: 0.0,
            backoff: 0,
            timer_ns: now + 1_000_000_000,
            delivered: 0,
            delivered_ns: now,
            rates: VecDeque::new(),
            min_rtt: (u64::MAX, now),
            full: (0.0, 0, 0),
            started: false,
            probe_rtt_until: None,
        }
    }

    fn rto_ns(&self) -> u64 {
        let first = if self.srtt_ns > 0.0 { self.srtt_ns + 4.0 * self.rttvar_ns } else { 1e9 };
        ((first as u64).max(RTO_MIN_NS) << self.backoff.min(6)).min(RTO_MAX_NS)
    }

    /// What is sent now; or when to ask again, none until something is acknowledged.
    pub fn poll(&mut self, now: u64) -> Result<Data, Option<u64>> {
        let window = match self.cc {
            CongestionControl::Bbr => self.bbr_window(now),
            _ => self.cwnd,
        };
        if self.flying.len() as f64 + 1.0 > window.clamp(1.0, WINDOW_MAX) {
            return Err(None);
        }
        if self.next_send_ns > now {
            return Err(Some(self.next_send_ns));
        }
        let seq = self.lost.pop_front().unwrap_or_else(|| {
            self.next_seq += 1;
            self.next_seq - 1
        });
        if self.flying.is_empty() {
            self.delivered_ns = now;
            self.timer_ns = now + self.rto_ns();
        }
        let data = Data { id: self.next_id, seq, sent_ns: now };
        self.next_id += 1;
        let (delivered, delivered_ns) = (self.delivered, self.delivered_ns);
        self.flying.push_back(Flying { data, delivered, delivered_ns });
        if self.paced {
            self.next_send_ns = now + self.pace_ns(now);
        }
        Ok(data)
    }

    /// Takes an acknowledgement.
    pub fn on_ack(&mut self, now: u64, ack: &Ack) {
        for data in &ack.news {
            if let Some(at) = self.flying.iter().position(|f| f.data.seq == data.seq) {
                if let Some(flying) = self.flying.remove(at) {
                    self.delivered += 1;
                    self.delivered_ns = now;
                    self.sample(now, &flying);
                }
            } else if let Some(at) = self.lost.iter().position(|seq| *seq == data.seq) {
                self.lost.remove(at);
                self.delivered += 1;
            }
            self.arrived = self.arrived.max(data.id);
            // What is sent twice is timed by its time stamp.
            self.time((now - data.sent_ns) as f64);
        }
        let mut newest_lost = 0;
        while let Some(front) = self.flying.front().filter(|f| f.data.id + REORDER <= self.arrived)
        {
            newest_lost = front.data.id;
            self.lost.push_back(front.data.seq);
            self.flying.pop_front();
        }
        if !ack.news.is_empty() {
            self.backoff = 0;
            self.timer_ns = now + self.rto_ns();
        }
        if newest_lost > self.recover {
            self.reduce();
            self.recover = self.next_id - 1;
        } else if self.arrived > self.recover {
            for _ in &ack.news {
                self.grow(now);
            }
        }
    }

    fn time(&mut self, rtt_ns: f64) {
        if self.srtt_ns == 0.0 {
            (self.srtt_ns, self.rttvar_ns) = (rtt_ns, rtt_ns / 2.0);
        } else {
            self.rttvar_ns += ((rtt_ns - self.srtt_ns).abs() - self.rttvar_ns) / 4.0;
            self.srtt_ns += (rtt_ns - self.srtt_ns) / 8.0;
        }
    }

    /// To be called when the timer runs out.
    pub fn on_timer(&mut self, now: u64) {
        if now < self.timer_ns {
            return;
        }
        if !self.flying.is_empty() {
            self.lost.extend(self.flying.drain(..).map(|f| f.data.seq));
            self.lost.make_contiguous().sort_unstable();
            self.ssthresh = (self.cwnd * 0.5).max(2.0);
            self.cwnd = 1.0;
            self.epoch = None;
            self.recover = self.next_id - 1;
            self.backoff += 1;
            self.next_send_ns = now;
        }
        self.timer_ns = now + self.rto_ns();
    }

    fn reduce(&mut self) {
        let beta = if self.cc == CongestionControl::Reno { 0.5 } else { BETA };
        let peak = self.cwnd;
        self.plateau = if peak < self.plateau { peak * (1.0 + BETA) / 2.0 } else { peak };
        self.friendly = peak;
        self.cwnd = (peak * beta).max(2.0);
        self.ssthresh = self.cwnd;
        self.epoch = None;
    }

    fn grow(&mut self, now: u64) {
        self.cwnd = self.cwnd.min(WINDOW_MAX);
        if self.cwnd < self.ssthresh {
            self.cwnd += 1.0;
            return;
        }
        if self.cc != CongestionControl::Cubic {
            self.cwnd += 1.0 / self.cwnd;
            return;
        }
        let (epoch, from) = *self.epoch.get_or_insert((now, self.cwnd));
        let flat_at = ((self.plateau - from).max(0.0) / CUBIC_C).cbrt();
        let (rtt, time) = (self.srtt_ns / 1e9, (now - epoch) as f64 / 1e9);
        let curve = self.plateau.max(from) + CUBIC_C * (time + rtt - flat_at).powi(3);
        let alpha = 3.0 * (1.0 - BETA) / (1.0 + BETA);
        let slow = from + alpha * time / rtt.max(1e-6);
        let before = self.friendly;
        let slow = if slow <= before { slow } else { before + (slow - before) / alpha };
        let target = curve.max(slow);
        if target > self.cwnd {
            self.cwnd += ((target - self.cwnd) / self.cwnd).min(0.5);
        }
    }

    fn pace_ns(&self, now: u64) -> u64 {
        let rtt = if self.srtt_ns > 0.0 { self.srtt_ns } else { 1e8 };
        let rate = match self.cc {
            CongestionControl::Bbr if self.rates.is_empty() => BBR_STARTUP * 10.0 / rtt,
            CongestionControl::Bbr => self.bbr_rate() * self.bbr_gain(now),
            // As Linux does: faster than the window by a fifth, twice in slow start.
            _ if self.cwnd < self.ssthresh / 2.0 => 2.0 * self.cwnd / rtt,
            _ => 1.2 * self.cwnd / rtt,
        };
        (1.0 / rate) as u64
    }

    /// BBR's rate and round trip, from a packet that arrived.
    fn sample(&mut self, now: u64, flying: &Flying) {
        let rtt = now - flying.data.sent_ns;
        if rtt <= self.min_rtt.0 {
            self.min_rtt = (rtt, now);
        }
        if self.cc != CongestionControl::Bbr {
            return;
        }
        if let Some(until) = self.probe_rtt_until {
            if now >= until {
                self.probe_rtt_until = None;
                self.min_rtt.1 = now;
            }
        } else if now - self.min_rtt.1 > BBR_PROBE_RTT_EVERY_NS {
            self.probe_rtt_until = Some(now + BBR_PROBE_RTT_NS.max(self.min_rtt.0));
            self.min_rtt.0 = rtt;
        }
        let time = (now - flying.delivered_ns).max(rtt).max(1);
        let rate = (self.delivered - flying.delivered) as f64 / time as f64;
        let window = 10 * self.min_rtt.0;
        self.rates.retain(|(at, r)| now - at <= window && *r > rate);
        self.rates.push_back((now, rate));
        // The start ends when the rate has not grown by a quarter in three round trips.
        if !self.started && flying.delivered >= self.full.2 {
            self.full.2 = self.delivered;
            if self.bbr_rate() >= self.full.0 * 1.25 {
                self.full = (self.bbr_rate(), 0, self.full.2);
            } else {
                self.full.1 += 1;
                self.started = self.full.1 >= 3;
            }
        }
    }

    fn bbr_rate(&self) -> f64 {
        self.rates.iter().map(|(_, rate)| *rate).fold(1e-9, f64::max)
    }

    fn bbr_gain(&self, now: u64) -> f64 {
        if !self.started {
            return BBR_STARTUP;
        }
        match now / self.min_rtt.0.max(1) % 8 {
            0 => 1.25,
            1 => 0.75,
            _ => 1.0,
        }
    }

    fn bbr_window(&self, now: u64) -> f64 {
        if self.probe_rtt_until.is_some_and(|until| now < until) {
            return 4.0;
        }
        let gain = if self.started { 2.0 } else { BBR_STARTUP };
        let rtt = if self.min_rtt.0 == u64::MAX { 0.0 } else { self.min_rtt.0 as f64 };
        (gain * self.bbr_rate() * rtt).max(10.0)
    }
}

/// A receiver.
#[derive(Debug, Default)]
pub struct Receiver {
    next: u32,
    /// What arrived early, the latest first.
    blocks: Vec<(u32, u32)>,
    news: Vec<Data>,
    /// When the delayed acknowledgement is due.
    pub due_ns: Option<u64>,
}

impl Receiver {
    /// Takes a packet: the acknowledgement that it brings at once.
    pub fn on_data(&mut self, now: u64, data: Data) -> Option<Ack> {
        let seq = data.seq;
        let known = seq < self.next || self.blocks.iter().any(|(a, b)| (*a..*b).contains(&seq));
        if known {
            return Some(self.ack(Some((seq, seq + 1))));
        }
        self.news.push(data);
        let missing = !self.blocks.is_empty();
        if seq > self.next {
            let mut block = (seq, seq + 1);
            self.blocks.retain(|(start, end)| {
                let joins = *end == block.0 || *start == block.1;
                if joins {
                    block = (block.0.min(*start), block.1.max(*end));
                }
                !joins
            });
            self.blocks.insert(0, block);
            return Some(self.ack(None));
        }
        self.next += 1;
        while let Some(at) = self.blocks.iter().position(|(start, _)| *start <= self.next) {
            self.next = self.next.max(self.blocks.remove(at).1);
        }
        if missing || self.news.len() >= 2 {
            return Some(self.ack(None));
        }
        self.due_ns = Some(now + DELAYED_ACK_NS);
        None
    }

    /// To be called when the delayed acknowledgement may be due.
    pub fn on_timer(&mut self, now: u64) -> Option<Ack> {
        self.due_ns.is_some_and(|due| due <= now).then(|| self.ack(None))
    }

    fn ack(&mut self, twice: Option<(u32, u32)>) -> Ack {
        self.due_ns = None;
        let blocks = twice.into_iter().chain(self.blocks.iter().copied()).take(3).collect();
        Ack { next: self.next, blocks, news: std::mem::take(&mut self.news) }
    }
}
