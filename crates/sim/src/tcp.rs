//! A TCP sender: NewReno with SACK (RFC 5681, 6582, 6675), in packets.
//!
//! Each packet that passes is acknowledged by itself, and no acknowledgement is lost, so what was sacked is
//! what arrived. A retransmission that is lost waits for the timer, as in RFC 6675.

use std::collections::VecDeque;

use tidegate_core::Nanos;

/// The initial window, in packets (RFC 3390).
const INITIAL_WINDOW: f64 = 3.0;
/// Packets sacked above one that is not, until it counts as lost.
const DUP_THRESH: usize = 3;
/// The least retransmission time-out, as Linux has it.
const RTO_MIN: u64 = 200_000_000;
/// The first one (RFC 6298).
const RTO_FIRST: u64 = 1_000_000_000;
/// The greatest.
const RTO_MAX: u64 = 60_000_000_000;
/// No window grows beyond this, in packets.
const WINDOW_MAX: f64 = 10_000.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Segment {
    Sent,
    Resent,
    Lost,
    Sacked,
}

/// A greedy sender. See the [module](self).
#[derive(Debug)]
pub struct Sender {
    window: f64,
    threshold: f64,
    window_max: f64,
    first: u64,
    board: VecDeque<Segment>,
    flight: usize,
    holes: bool,
    recover: Option<u64>,
    smoothed: Option<(f64, f64)>,
    rto: u64,
    deadline: Option<Nanos>,
}

impl Sender {
    /// A sender with at most `window_max` packets on the way; none: no bound.
    pub fn new(window_max: Option<f64>) -> Self {
        Self {
            window: INITIAL_WINDOW,
            threshold: WINDOW_MAX,
            window_max: window_max.unwrap_or(WINDOW_MAX).min(WINDOW_MAX),
            first: 0,
            board: VecDeque::new(),
            flight: 0,
            holes: false,
            recover: None,
            smoothed: None,
            rto: RTO_FIRST,
            deadline: None,
        }
    }

    /// When [`Sender::on_timer`] is due.
    pub fn deadline(&self) -> Option<Nanos> {
        self.deadline
    }

    /// The number of a packet to be sent now, if one may be.
    pub fn poll_packet(&mut self, now: Nanos) -> Option<u64> {
        if self.flight as f64 + 1.0 > self.window.min(self.window_max).max(1.0) {
            return None;
        }
        self.flight += 1;
        if self.deadline.is_none() {
            self.deadline = Some(Nanos(now.0 + self.rto));
        }
        let lost = if self.holes {
            self.board.iter().position(|segment| *segment == Segment::Lost)
        } else {
            None
        };
        if let Some(at) = lost {
            self.board[at] = Segment::Resent;
            return Some(self.first + at as u64);
        }
        self.board.push_back(Segment::Sent);
        Some(self.first + self.board.len() as u64 - 1)
    }

    /// The acknowledgement of packet `number`, which took `rtt`; `None` where it was sent twice (Karn).
    pub fn on_ack(&mut self, now: Nanos, number: u64, rtt: Nanos) {
        let Some(at) = number.checked_sub(self.first).map(|at| at as usize) else { return };
        let Some(segment) = self.board.get_mut(at) else { return };
        match *segment {
            Segment::Sacked => return,
            Segment::Sent => {
                self.measure(rtt);
                self.flight -= 1;
            }
            Segment::Resent => self.flight -= 1,
            Segment::Lost => {}
        }
        self.board[at] = Segment::Sacked;
        let mut acked = 0;
        while self.board.front() == Some(&Segment::Sacked) {
            self.board.pop_front();
            self.first += 1;
            acked += 1;
        }
        if acked > 0 {
            self.deadline = (!self.board.is_empty()).then(|| Nanos(now.0 + self.rto));
        }
        self.holes = self.holes || at >= acked;
        if self.recover.is_some_and(|recover| self.first >= recover) {
            self.recover = None;
        }
        if self.holes {
            self.find_lost();
            self.holes = self.board.iter().any(|s| matches!(s, Segment::Sacked | Segment::Lost));
        }
        if self.recover.is_none() {
            let gain = if self.window < self.threshold { 1.0 } else { 1.0 / self.window };
            self.window = (self.window + gain).min(WINDOW_MAX);
        }
    }

    fn find_lost(&mut self) {
        let mut above = 0;
        let mut lost = false;
        for segment in self.board.iter_mut().rev() {
            match segment {
                Segment::Sacked => above += 1,
                Segment::Sent if above >= DUP_THRESH => {
                    *segment = Segment::Lost;
                    self.flight -= 1;
                    lost = true;
                }
                _ => {}
            }
        }
        if lost && self.recover.is_none() {
            self.recover = Some(self.first + self.board.len() as u64);
            self.threshold = (self.window.min(self.window_max) / 2.0).max(2.0);
            self.window = self.threshold;
        }
    }

    fn measure(&mut self, rtt: Nanos) {
        let rtt = rtt.0 as f64;
        let (mean, deviation) = match self.smoothed {
            None => (rtt, rtt / 2.0),
            Some((mean, deviation)) => {
                (mean + (rtt - mean) / 8.0, deviation + ((rtt - mean).abs() - deviation) / 4.0)
            }
        };
        self.smoothed = Some((mean, deviation));
        self.rto = ((mean + 4.0 * deviation) as u64).clamp(RTO_MIN, RTO_MAX);
    }

    /// To be called at the deadline, or at any time.
    pub fn on_timer(&mut self, now: Nanos) {
        if self.deadline.is_none_or(|deadline| deadline > now) {
            return;
        }
        self.threshold = (self.flight as f64 / 2.0).max(2.0);
        self.window = 1.0;
        for segment in &mut self.board {
            if *segment != Segment::Sacked {
                *segment = Segment::Lost;
            }
        }
        self.flight = 0;
        self.holes = true;
        // No fast retransmit until all that was sent before is acknowledged (RFC 6582).
        self.recover = None;
        self.rto = (self.rto * 2).min(RTO_MAX);
        self.deadline = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::Queue;

    const RTT: u64 = 40_000_000;

    /// A sender over a path that drops what `lost` says; packets sent, and the time taken, for `packets`.
    fn transfer(packets: u64, mut lost: impl FnMut(u64) -> bool) -> (u64, Nanos) {
        let mut sender = Sender::new(Some(64.0));
        let mut queue = Queue::default();
        let (mut now, mut sent) = (Nanos(0), 0);
        while sender.first < packets {
            while let Some(number) = sender.poll_packet(now) {
                sent += 1;
                if !lost(sent) {
                    queue.push(Nanos(now.0 + RTT), (number, now));
                }
            }
            let timer = sender.deadline().unwrap_or(Nanos(u64::MAX));
            match queue.pop(timer) {
                Some((at, (number, then))) => {
                    now = at;
                    sender.on_ack(now, number, Nanos(now.0 - then.0));
                }
                None => {
                    now = timer;
                    sender.on_timer(now);
                }
            }
        }
        (sent, now)
    }

    #[test]
    fn without_loss_it_fills_its_window() {
        let (sent, took) = transfer(6_400, |_| false);
        assert!(sent <= 6_464, "{sent}");
        // Five rounds of slow start, then 64 packets a round.
        assert!((100 * RTT..108 * RTT).contains(&took.0), "{} rounds", took.0 / RTT);
    }

    #[test]
    fn a_single_loss_costs_no_time_out() {
        let (sent, took) = transfer(6_400, |n| n == 700);
        assert_eq!(sent - transfer(6_400, |_| false).0, 1);
        assert!(took.0 < 130 * RTT, "{} rounds", took.0 / RTT);
    }

    #[test]
    fn the_inverse_root_law_holds() {
        let mut random = crate::random::Random::new(3);
        let (_, took) = transfer(200_000, |_| random.chance(0.01));
        let window = 200_000.0 * RTT as f64 / took.0 as f64;
        // sqrt(3/2) / sqrt(p) without time-outs; an acknowledgement for each packet.
        assert!((9.5..13.0).contains(&window), "{window} packets a round");
    }

    #[test]
    fn everything_lost_for_a_while_ends() {
        let (_, took) = transfer(100, |n| (20..40).contains(&n));
        assert!(took.0 < 300_000_000_000);
    }
}
