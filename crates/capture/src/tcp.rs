//! The data of one TCP flow: what was lost of it, and what its acknowledgements say.
//!
//! Seen at the receiver's side of a loss, sequence numbers jump: a *hole*, which is filled when the data is
//! sent again. Seen at the sender's side the lost packet is there, and comes *twice*. Which of the two
//! happens more says where the capture was taken. A hole that is acknowledged though nothing filled it was
//! made by the capture, which missed a packet that arrived.

use std::collections::VecDeque;

use crate::{
    headers::Tcp,
    round_trip::{RoundTrips, ahead},
};

/// The most holes that are open at a time; beyond, the oldest is forgotten. Each holds a packet of the trace,
/// so all flows together have no more than the traces have packets.
pub const HOLES_MAX: usize = 8_192;
/// A hole that is filled within so many packets and so long was reordering.
const REORDER_PACKETS: u64 = 3;
const REORDER_NS: u64 = 3_000_000;
/// A jump further than this is another connection, or a capture with a pause.
const JUMP_MAX: i32 = 1 << 28;
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
    Again {
        /// An acknowledgement had said so: the first was not lost.
        arrived: bool,
    },
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
    /// In order of sequence numbers.
    holes: VecDeque<Hole>,
    packets: u64,
    /// Holes that were filled later.
    filled: u64,
    /// Segments that came twice.
    again: u64,
    /// Segments that were overtaken.
    overtaken: u64,
    syn: bool,
    /// Round trips from here to the receiver and back.
    pub trips: RoundTrips,
}

impl Default for TcpTrack {
    fn default() -> Self {
        TcpTrack {
            next: None,
            segment: 1,
            holes: VecDeque::new(),
            packets: 0,
            filled: 0,
            again: 0,
            overtaken: 0,
            syn: false,
            trips: RoundTrips::default(),
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
            self.trips.restart();
            self.trips.sent(start, end, event, time_ns);
            return Seen::New { missing: 0 };
        }
        self.segment = self.segment.max(tcp.length);
        let next = self.next.unwrap_or(end);
        if ahead(end, next) <= 0 {
            return self.old(start, end, time_ns);
        }
        self.next = Some(end);
        self.trips.sent(start, end, event, time_ns);
        let jump = ahead(start, next);
        if jump <= 0 {
            return Seen::New { missing: 0 };
        }
        if self.holes.len() == HOLES_MAX {
            self.holes.pop_front();
        }
        let packets = self.packets;
        self.holes.push_back(Hole { start: next, end: start, event, time_ns, packets });
        Seen::New { missing: self.segments(jump as u32) }
    }

    /// Packets that so many bytes of data come in.
    fn segments(&self, bytes: u32) -> u16 {
        bytes.div_ceil(self.segment).min(u16::MAX.into()) as u16
    }

    /// Data that ends before what was seen.
    fn old(&mut self, start: u32, end: u32, time_ns: u64) -> Seen {
        let arrived = self.trips.sent_again(start, end);
        let at = self.holes.partition_point(|hole| ahead(hole.end, start) <= 0);
        if self.holes.get(at).is_none_or(|hole| ahead(end, hole.start) <= 0) {
            self.again += u64::from(!arrived);
            return Seen::Again { arrived };
        }
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

    /// The other side acknowledges all before `ack`: `missed` gets each hole that nothing filled, by the
    /// packet after it and how many packets the capture missed there.
    pub fn acknowledged(&mut self, ack: u32, mut missed: impl FnMut(u64, u16)) {
        while let Some(hole) = self.holes.front().copied() {
            let covered = ahead(ack, hole.start).min(ahead(hole.end, hole.start));
            if covered <= 0 {
                break;
            }
            missed(hole.event, self.segments(covered as u32));
            if ahead(hole.end, ack) > 0 {
                self.holes[0].start = ack;
                break;
            }
            self.holes.pop_front();
        }
    }

    /// Forgets what is known of packets before that number of the trace.
    pub fn forget(&mut self, before: u64) {
        self.holes.retain(|hole| hole.event >= before);
        self.holes.shrink_to_fit();
        self.trips.forget(before);
    }

    /// What the first SACK block of an acknowledgement says came twice (RFC 2883): it begins before `ack`.
    pub fn duplicate(tcp: &Tcp) -> Option<u32> {
        let (ack, (start, _)) = (tcp.ack?, tcp.sacks().next()?);
        (ahead(ack, start) > 0).then_some(start)
    }

    /// Whether lost packets are in the capture, because it was taken before they were lost.
    pub fn at_sender(&self) -> bool {
        self.again > self.filled + self.holes.len() as u64
    }

    /// Segments that came twice, and holes, filled or not.
    pub fn evidence(&self) -> (u64, u64) {
        (self.again, self.filled + self.holes.len() as u64)
    }

    /// Whether the flow began in the capture.
    pub fn began(&self) -> bool {
        self.syn
    }

    /// Segments that were overtaken.
    pub fn overtaken(&self) -> u64 {
        self.overtaken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(seq: u32, length: u32) -> Tcp {
        Tcp { seq, ack: Some(1), length, ..Tcp::default() }
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
        assert_eq!(found[4], Seen::Again { arrived: false });
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
    fn a_hole_that_is_acknowledged_was_made_by_the_capture() {
        let mut track = TcpTrack::default();
        seen(&mut track, &[0, 1, 4, 5, 8]);
        let seq = |number: u32| (u32::MAX - 5_000).wrapping_add(number * 1_000);
        let mut missed = Vec::new();
        track.acknowledged(seq(2), |event, packets| missed.push((event, packets)));
        assert_eq!(missed, []);
        // Half of the first hole, then all of it; the second is still open.
        track.acknowledged(seq(3), |event, packets| missed.push((event, packets)));
        track.acknowledged(seq(6), |event, packets| missed.push((event, packets)));
        assert_eq!(missed, [(2, 1), (2, 1)]);
        assert_eq!(track.evidence(), (0, 1));
    }

    #[test]
    fn a_thousand_holes_are_remembered() {
        let mut track = TcpTrack::default();
        let every_other: Vec<u32> = (0..1_000).map(|number| 2 * number).collect();
        seen(&mut track, &every_other);
        let filled = seen(&mut track, &[1, 997, 1_501]);
        assert_eq!(filled, [Seen::Filled; 3]);
        assert!(!track.at_sender());
    }

    #[test]
    fn a_duplicate_is_recognised_by_sack() {
        let sack = |start, end| {
            let mut tcp = Tcp { ack: Some(5_000), ..Tcp::default() };
            tcp.sack[0] = (start, end);
            tcp
        };
        assert_eq!(TcpTrack::duplicate(&sack(3_000, 4_000)), Some(3_000));
        assert_eq!(TcpTrack::duplicate(&sack(6_000, 7_000)), None);
    }
}
