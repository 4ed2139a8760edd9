//! The round trip of each packet of a TCP flow, from its acknowledgements.
//!
//! A packet is timed by the first acknowledgement that covers it, cumulative or SACK (RFC 2018). What was
//! sent twice is not timed (Karn): nobody knows which of the two is acknowledged. Nor is what an
//! acknowledgement covers together with such a packet: it may have waited for it.
//!
//! O(log packets in flight) for an acknowledgement, besides the packets that it covers.

use std::collections::VecDeque;

use crate::headers::Tcp;

/// Classes of round trips: an eighth apart, from 1 us.
const CLASSES: usize = 160;

/// A packet whose acknowledgement is awaited.
#[derive(Debug, Clone, Copy)]
struct Flying {
    start: u32,
    end: u32,
    /// Its number in the trace.
    event: u64,
    sent_ns: u64,
    /// It was sent again.
    again: bool,
    /// A SACK block covered it.
    sacked: bool,
}

/// Packets in flight, and the round trips of those that arrived.
#[derive(Debug, Clone, Default)]
pub struct RoundTrips {
    /// In order of sequence numbers.
    flying: VecDeque<Flying>,
    classes: Histogram,
    least_ns: Option<u64>,
}

/// Whether `to` comes after `from`, and by how much.
pub(crate) fn ahead(to: u32, from: u32) -> i32 {
    to.wrapping_sub(from) as i32
}

impl RoundTrips {
    /// New data that will be the packet `event` of the trace.
    pub fn sent(&mut self, start: u32, end: u32, event: u64, sent_ns: u64) {
        self.flying.push_back(Flying { start, end, event, sent_ns, again: false, sacked: false });
    }

    /// Where the first packet is that ends after `seq`.
    fn place(&self, seq: u32) -> usize {
        self.flying.partition_point(|flying| ahead(flying.end, seq) <= 0)
    }

    /// Data that is sent again. Whether all of it had arrived before, so that it was not lost.
    pub fn sent_again(&mut self, start: u32, end: u32) -> bool {
        let from = self.place(start);
        let mut arrived = self.flying.get(from).is_some();
        for flying in self.flying.range_mut(from..) {
            if ahead(flying.start, end) >= 0 {
                break;
            }
            flying.again = true;
            arrived &= flying.sacked;
        }
        arrived
    }

    /// An acknowledgement: `timed` gets each packet that it covers first, and its round trip in ns.
    pub fn acknowledged(&mut self, tcp: &Tcp, time_ns: u64, mut timed: impl FnMut(u64, u64)) {
        let Some(ack) = tcp.ack else { return };
        let mut time = |flying: &Flying, classes: &mut Histogram, least: &mut Option<u64>| {
            let round_trip = time_ns.saturating_sub(flying.sent_ns);
            classes.add(round_trip);
            *least = Some(least.map_or(round_trip, |least| least.min(round_trip)));
            timed(flying.event, round_trip);
        };
        let covered = self.place(ack);
        let waited = self.flying.range(..covered).any(|flying| flying.again);
        for flying in self.flying.drain(..covered) {
            if !waited && !flying.sacked {
                time(&flying, &mut self.classes, &mut self.least_ns);
            }
        }
        for (start, end) in tcp.sacks() {
            // Each block grows at its end; what is known already begins where it was found before.
            let from = self.flying.partition_point(|flying| ahead(flying.start, start) < 0);
            let to = self.place(end).max(from);
            for flying in self.flying.range_mut(from..to).rev() {
                if flying.sacked {
                    break;
                }
                flying.sacked = true;
                if !flying.again {
                    time(flying, &mut self.classes, &mut self.least_ns);
                }
            }
        }
    }

    /// Whether no ACK says what became of the data at `seq`, though ACKs tell of other data.
    pub fn awaits(&self, seq: u32) -> bool {
        let at = self.flying.get(self.place(seq.wrapping_add(1)));
        self.least_ns.is_some()
            && at.is_some_and(|flying| ahead(seq, flying.start) >= 0 && !flying.sacked)
    }

    /// Forgets the packets before that number.
    pub fn forget(&mut self, before: u64) {
        self.flying.retain(|flying| flying.event >= before);
        self.flying.shrink_to_fit();
    }

    /// Forgets what is in flight.
    pub fn restart(&mut self) {
        self.flying.clear();
    }

    /// The least round trip, ns.
    pub fn least_ns(&self) -> Option<u64> {
        self.least_ns
    }

    /// The round trip that this share of all does not exceed, within a sixteenth, ns.
    pub fn quantile_ns(&self, share: f64) -> Option<f64> {
        self.classes.quantile(share)
    }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn ack(ack: u32, blocks: &[(u32, u32)]) -> Tcp {
        let mut tcp = Tcp { ack: Some(ack), ..Tcp::default() };
        tcp.sack[..blocks.len()].copy_from_slice(blocks);
        tcp
    }

    /// Packets of 1000 bytes, a millisecond apart, from just below where numbers begin anew.
    fn sent(count: u32) -> RoundTrips {
        let mut trips = RoundTrips::default();
        for at in 0..count {
            trips.sent(seq(at), seq(at + 1), at.into(), u64::from(at) * MS);
        }
        trips
    }

    fn seq(packet: u32) -> u32 {
        (u32::MAX - 1_999).wrapping_add(packet * 1_000)
    }

    fn timed(trips: &mut RoundTrips, tcp: &Tcp, at_ms: u64) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        trips.acknowledged(tcp, at_ms * MS, |event, ns| all.push((event, ns / MS)));
        all
    }

    #[test]
    fn the_first_acknowledgement_that_covers_a_packet_times_it() {
        let mut trips = sent(8);
        assert_eq!(timed(&mut trips, &ack(seq(2), &[]), 20), [(0, 20), (1, 19)]);
        // Packet 2 is missing: 3 and 4 are known by SACK, once.
        assert_eq!(timed(&mut trips, &ack(seq(2), &[(seq(3), seq(4))]), 23), [(3, 20)]);
        assert_eq!(timed(&mut trips, &ack(seq(2), &[(seq(3), seq(5))]), 24), [(4, 20)]);
        assert_eq!(trips.least_ns(), Some(19 * MS));
        // 2 comes again: what its acknowledgement covers, waited for it.
        assert!(!trips.sent_again(seq(2), seq(3)));
        assert_eq!(timed(&mut trips, &ack(seq(6), &[]), 45), []);
        assert_eq!(timed(&mut trips, &ack(seq(8), &[]), 46), [(6, 40), (7, 39)]);
    }

    #[test]
    fn what_is_not_acknowledged_is_awaited() {
        let mut trips = sent(5);
        // Nothing is acknowledged, as where the capture has one direction alone.
        assert!(!trips.awaits(seq(0)));
        timed(&mut trips, &ack(seq(2), &[(seq(3), seq(4))]), 20);
        let awaited = (0..7).map(|at| trips.awaits(seq(at)));
        assert_eq!(awaited.collect::<Vec<_>>(), [false, false, true, false, true, false, false]);
    }

    #[test]
    fn what_had_arrived_was_not_lost() {
        let mut trips = sent(4);
        timed(&mut trips, &ack(seq(1), &[(seq(2), seq(3))]), 20);
        assert!(trips.sent_again(seq(2), seq(3)));
        assert!(!trips.sent_again(seq(1), seq(3)));
        assert!(!trips.sent_again(seq(9), seq(10)));
    }
}
