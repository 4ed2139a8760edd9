//! The data of one TCP flow: what was lost of it, and the round trips of its acknowledgements.
//!
//! Seen at the receiver's side of a loss, sequence numbers jump: a *hole*, which is filled when the data is
//! sent again. Seen at the sender's side the lost packet is there, and comes *twice*. Which of the two
//! happens more says where the capture was taken.

use crate::headers::Tcp;

/// The most holes that are open at a time; beyond, the oldest is forgotten.
pub const HOLES_MAX: usize = 64;
/// A hole that is filled within so many packets and so long was reordering.
const REORDER_PACKETS: u64 = 3;
const REORDER_NS: u64 = 3_000_000;
/// A jump further than this is another connection, or a capture with a pause.
const JUMP_MAX: i32 = 1 << 28;
/// Classes of round trips: an eighth apart, from 1 us.
const CLASSES: usize = 160;

#[derive(Debug, Clone, Copy)]
struct Hole {
    start: u32,
    end: u32,
    /// The packet after it, its time and how many packets had been seen then.
    event: u64,
    time_ns: u64,
    packets: u64,
}

/// What a segment says of losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// New data, after so many packets that are missing.
    New {
        /// Packets missing before it.
        missing: u16,
    },
    /// It fills a hole that came from reordering: the packet of that number had that gap wrongly.
    Overtaken {
        /// The packet after the hole.
        event: u64,
    },
    /// It fills a hole: what was lost is sent again.
    Filled,
    /// It was there before.
    Again,
    /// No data.
    Nothing,
}

/// What is known of the data of a flow.
#[derive(Debug, Clone)]
pub struct TcpTrack {
    /// The end of what was seen.
    next: Option<u32>,
    /// The longest payload.
    segment: u32,
    holes: Vec<Hole>,
    packets: u64,
    /// Holes that were filled later.
    filled: u64,
    /// Segments that came twice.
    again: u64,
    /// Segments that were overtaken.
    overtaken: u64,
    syn: bool,
    /// Data whose acknowledgement is awaited.
    timed: Option<(u32, u64)>,
    /// Until this is acknowledged, acknowledgements wait for what was lost, and time nothing.
    recovering: Option<u32>,
    round_trips: Histogram,
    at_loss: Histogram,
    last_round_trip: Option<u64>,
}

/// Times by classes.
#[derive(Debug, Clone)]
struct Histogram {
    counts: Box<[u32; CLASSES]>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: Box::new([0; CLASSES]), total: 0 }
    }
}

fn class(ns: u64) -> usize {
    let us = (ns / 125).max(8);
    let exponent = us.ilog2();
    // Three bits after the first.
    let part = (us >> (exponent - 3)) & 7;
    ((exponent as usize - 3) * 8 + part as usize).min(CLASSES - 1)
}

/// The middle of a class, ns.
fn middle(class: usize) -> f64 {
    let (exponent, part) = (class / 8, class % 8);
    125.0 * 2_f64.powi(exponent as i32) * (8.0 + part as f64 + 0.5)
}

impl Histogram {
    fn add(&mut self, ns: u64) {
        let count = &mut self.counts[class(ns)];
        *count = count.saturating_add(1);
        self.total += 1;
    }

    fn quantile(&self, share: f64) -> Option<f64> {
        let wanted = (self.total as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        self.counts
            .iter()
            .position(|count| {
                seen += u64::from(*count);
                seen >= wanted
            })
            .filter(|_| self.total > 0)
            .map(middle)
    }

    fn share_above(&self, ns: f64) -> f64 {
        let above = self.counts.iter().enumerate().filter(|(class, _)| middle(*class) > ns);
        let above: u64 = above.map(|(_, count)| u64::from(*count)).sum();
        if self.total > 0 { above as f64 / self.total as f64 } else { 0.0 }
    }
}

fn ahead(to: u32, from: u32) -> i32 {
    to.wrapping_sub(from) as i32
}

impl Default for TcpTrack {
    fn default() -> Self {
        TcpTrack {
            next: None,
            segment: 1,
            holes: Vec::new(),
            packets: 0,
            filled: 0,
            again: 0,
            overtaken: 0,
            syn: false,
            timed: None,
            recovering: None,
            round_trips: Histogram::default(),
            at_loss: Histogram::default(),
            last_round_trip: None,
        }
    }
}

impl TcpTrack {
    /// Takes a segment that will be the packet `event` of the trace.
    pub fn segment(&mut self, tcp: &Tcp, time_ns: u64, event: u64) -> Seen {
        if tcp.length == 0 {
            return Seen::Nothing;
        }
        self.packets += 1;
        let (start, end) = (tcp.seq, tcp.seq.wrapping_add(tcp.length));
        let jumps = self.next.is_none_or(|next| ahead(start, next).abs() > JUMP_MAX);
        if tcp.syn || jumps {
            self.syn |= tcp.syn;
            self.next = Some(end);
            self.holes.clear();
            self.timed = None;
            self.recovering = None;
            return Seen::New { missing: 0 };
        }
        self.segment = self.segment.max(tcp.length);
        let next = self.next.unwrap_or(end);
        if ahead(end, next) <= 0 {
            return self.old(start, end, time_ns);
        }
        self.next = Some(end);
        if self.timed.is_none() && self.recovering.is_none() {
            self.timed = Some((end, time_ns));
        }
        let jump = ahead(start, next);
        if jump <= 0 {
            return Seen::New { missing: 0 };
        }
        if self.holes.len() == HOLES_MAX {
            self.holes.remove(0);
        }
        let packets = self.packets;
        self.holes.push(Hole { start: next, end: start, event, time_ns, packets });
        self.lost();
        let missing = (jump as u32).div_ceil(self.segment);
        Seen::New { missing: missing.min(u16::MAX.into()) as u16 }
    }

    /// Data that ends before what was seen.
    fn old(&mut self, start: u32, end: u32, time_ns: u64) -> Seen {
        // What is sent again is acknowledged nobody knows when.
        self.timed = None;
        let found =
            self.holes.iter().position(|h| ahead(start, h.end) < 0 && ahead(end, h.start) > 0);
        let Some(at) = found else {
            self.again += 1;
            self.recovering = self.next;
            self.lost();
            return Seen::Again;
        };
        let hole = self.holes[at];
        let soon = self.packets - hole.packets <= REORDER_PACKETS
            && time_ns.saturating_sub(hole.time_ns) <= REORDER_NS;
        let (before, after) = (ahead(start, hole.start) > 0, ahead(hole.end, end) > 0);
        match (before, after) {
            (false, false) => {
                self.holes.remove(at);
            }
            (true, false) => self.holes[at].end = start,
            (_, true) => self.holes[at].start = end,
        }
        if soon {
            self.overtaken += 1;
            return Seen::Overtaken { event: hole.event };
        }
        self.filled += 1;
        Seen::Filled
    }

    fn lost(&mut self) {
        if let Some(round_trip) = self.last_round_trip {
            self.at_loss.add(round_trip);
        }
    }

    /// The other side acknowledges all before `ack`.
    pub fn acknowledged(&mut self, ack: u32, time_ns: u64) {
        if self.recovering.is_some_and(|end| ahead(ack, end) >= 0) {
            self.recovering = None;
        }
        let Some((end, sent)) = self.timed else { return };
        if ahead(ack, end) >= 0 {
            let round_trip = time_ns.saturating_sub(sent);
            self.round_trips.add(round_trip);
            self.last_round_trip = Some(round_trip);
            self.timed = None;
        }
    }

    /// What the first SACK block of an acknowledgement says came twice (RFC 2883): it begins before `ack`.
    #[must_use]
    pub fn duplicate(ack: u32, sack: Option<(u32, u32)>) -> Option<u32> {
        sack.filter(|(start, _)| ahead(ack, *start) > 0).map(|(start, _)| start)
    }

    /// Whether lost packets are in the capture, because it was taken before they were lost.
    #[must_use]
    pub fn at_sender(&self) -> bool {
        self.again > self.filled + self.holes.len() as u64
    }

    /// Segments that came twice, and holes, filled or not.
    #[must_use]
    pub fn evidence(&self) -> (u64, u64) {
        (self.again, self.filled + self.holes.len() as u64)
    }

    /// Whether the flow began in the capture.
    #[must_use]
    pub fn began(&self) -> bool {
        self.syn
    }

    /// Segments that were overtaken.
    #[must_use]
    pub fn overtaken(&self) -> u64 {
        self.overtaken
    }

    /// The tenth percentile of the round trips from here to the receiver and back, ns.
    #[must_use]
    pub fn base_round_trip_ns(&self) -> Option<f64> {
        self.round_trips.quantile(0.1)
    }

    /// The median of the round trips, ns.
    #[must_use]
    pub fn median_round_trip_ns(&self) -> Option<f64> {
        self.round_trips.quantile(0.5)
    }

    /// The share of losses at which the last round trip was longer than `limit_ns`.
    #[must_use]
    pub fn losses_after_round_trips_above(&self, limit_ns: f64) -> Option<f64> {
        (self.at_loss.total > 0).then(|| self.at_loss.share_above(limit_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(seq: u32, length: u32) -> Tcp {
        Tcp { seq, ack: Some(1), length, syn: false, sack: None }
    }

    /// Segments of 1000 by their number, a microsecond apart.
    fn seen(track: &mut TcpTrack, numbers: &[u32]) -> Vec<Seen> {
        let first = u32::MAX - 5_000;
        let each = |(at, number): (usize, &u32)| {
            let tcp = data(first.wrapping_add(number * 1_000), 1_000);
            track.segment(&tcp, at as u64 * 10_000_000, at as u64)
        };
        numbers.iter().enumerate().map(each).collect()
    }

    #[test]
    fn holes_at_the_receiver() {
        let mut track = TcpTrack::default();
        let new = |missing| Seen::New { missing };
        let numbers = [0, 1, 4, 5, 6, 7, 2, 3, 8];
        let found = seen(&mut track, &numbers);
        assert_eq!(found[2], new(2));
        assert_eq!(found[6..], [Seen::Filled, Seen::Filled, new(0)]);
        assert!(!track.at_sender());
        assert_eq!(track.evidence(), (0, 2));
    }

    #[test]
    fn twice_at_the_sender() {
        let mut track = TcpTrack::default();
        let found = seen(&mut track, &[0, 1, 2, 3, 1, 4]);
        assert_eq!(found[4], Seen::Again);
        assert!(track.at_sender());
    }

    #[test]
    fn overtaken_is_not_lost() {
        let mut track = TcpTrack::default();
        let times = [(0, 0), (1_000, 1_000), (3_000, 2_000), (2_000, 3_000)];
        let found = times.map(|(seq, time)| track.segment(&data(seq, 1_000), time, time));
        assert_eq!(found[3], Seen::Overtaken { event: 2_000 });
        assert_eq!(track.evidence(), (0, 0));
    }

    #[test]
    fn round_trips_are_timed() {
        let mut track = TcpTrack::default();
        track.segment(&data(0, 1_000), 0, 0);
        for at in 1..100_u32 {
            let time = u64::from(at) * 100_000_000;
            track.segment(&data(at * 1_000, 1_000), time, 0);
            track.acknowledged((at + 1) * 1_000, time + 20_000_000);
        }
        let base = track.base_round_trip_ns().unwrap();
        assert!((base / 20e6 - 1.0).abs() < 0.07, "{base}");
    }

    #[test]
    fn a_duplicate_is_told_by_sack() {
        assert_eq!(TcpTrack::duplicate(5_000, Some((3_000, 4_000))), Some(3_000));
        assert_eq!(TcpTrack::duplicate(5_000, Some((6_000, 7_000))), None);
    }
}
