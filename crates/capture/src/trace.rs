//! What is remembered of a flow's packets: a window of the last ones, and the runs between losses over all.

use std::collections::VecDeque;

use serde::Serialize;

/// The most packets that are remembered of one flow: the window in which rate and depth are estimated.
pub const TRACE_MAX: usize = 1 << 16;
/// The most runs of a flow that are kept one by one: the first ones.
pub const RUNS_KEPT: usize = 256;
/// Classes of the length of a run, by powers of two.
const CLASSES: usize = 24;

/// How the losses of a flow are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossSource {
    /// Holes in TCP's sequence numbers.
    TcpHoles,
    /// TCP data that is sent again.
    TcpRetransmissions,
    /// Gaps in RTP's sequence numbers.
    RtpSequence,
    /// Gaps in the identification of IPv4.
    Ipv4Id,
    /// Nothing counts its packets.
    None,
}

impl LossSource {
    /// Whether acknowledgements tell of losses behind the capture.
    pub fn is_tcp(self) -> bool {
        matches!(self, LossSource::TcpHoles | LossSource::TcpRetransmissions)
    }
}

/// A packet that is remembered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Event {
    /// When, never before its predecessor.
    pub time_ns: u64,
    /// TCP sequence number.
    pub seq: u32,
    /// Its length from the IP header on.
    pub bytes: u32,
    /// Packets missing before it, by the identification of IPv4.
    pub gap_id: u16,
    /// Packets missing before it, by TCP's or RTP's sequence number.
    pub gap_seq: u16,
    /// Packets before it that arrived, but are not in the capture.
    pub uncaptured: u16,
    /// It fills a hole: what it brings was lost before, and it is not what follows its predecessor.
    pub fills: bool,
    /// It was sent again later, so it was lost after it was captured.
    pub resent: bool,
    /// Its round trip from here to the receiver and back, us; 0 where it is not known.
    pub round_trip_us: u32,
    /// Its sender's time stamp; 0 where there is none.
    pub stamp: u32,
}

impl Event {
    /// Packets that were lost right before it, or whether it was lost itself, by how losses are seen.
    pub fn losses(&self, source: LossSource) -> u64 {
        match source {
            LossSource::Ipv4Id => self.gap_id.into(),
            LossSource::TcpHoles | LossSource::RtpSequence => self.gap_seq.into(),
            LossSource::TcpRetransmissions => self.resent.into(),
            LossSource::None => 0,
        }
    }
}

/// A window over the last packets.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    events: VecDeque<Event>,
    /// How many have left.
    gone: u64,
}

impl Trace {
    /// Remembers a packet.
    pub fn push(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// The number by which [`Trace::get_mut`] will find the next packet.
    pub fn next(&self) -> u64 {
        self.gone + self.events.len() as u64
    }

    /// The packet of that number, if it is still there.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut Event> {
        self.events.get_mut(usize::try_from(number.checked_sub(self.gone)?).ok()?)
    }

    /// The number of the oldest packet.
    pub fn first(&self) -> u64 {
        self.gone
    }

    /// The packets, oldest first.
    pub fn events(&self) -> impl DoubleEndedIterator<Item = &Event> + ExactSizeIterator {
        self.events.iter()
    }

    /// The packets, to be changed.
    pub fn events_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut Event> {
        self.events.iter_mut()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether the first packet is still there.
    pub fn is_whole(&self) -> bool {
        self.gone == 0
    }

    /// Whether the window is full.
    pub fn is_full(&self) -> bool {
        self.events.len() >= TRACE_MAX
    }

    /// Takes out so many of the oldest.
    pub fn drain(&mut self, packets: usize) -> impl Iterator<Item = Event> + '_ {
        let packets = packets.min(self.events.len());
        self.gone += packets as u64;
        self.events.drain(..packets)
    }

    /// Gives the memory back that is not needed.
    pub fn shrink(&mut self) {
        self.events.shrink_to_fit();
    }
}

/// Packets that passed one after the other without a loss between them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Run {
    /// When it began, from the start of the capture.
    pub start_s: f64,
    /// Packets in it.
    pub packets: u64,
    /// Their bytes, from the IP header on.
    pub bytes: u64,
    /// From its first packet to its last.
    pub duration_s: f64,
    /// The rate of all but the first packet; none for a run of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_bit_s: Option<f64>,
    /// Packets lost after it.
    pub lost_after_packets: u64,
}

/// The runs of a flow.
#[derive(Debug, Clone, Default)]
pub struct Runs {
    first: Vec<Run>,
    count: u64,
    packets: u64,
    longest: u64,
    /// Runs of 1, 2 to 3, 4 to 7, ... packets.
    classes: [u64; CLASSES],
    gaps: u64,
    lost: u64,
    longest_gap: u64,
    open: Option<Open>,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    start: u64,
    end: u64,
    packets: u64,
    bytes: u64,
    first_bytes: u64,
}

/// The runs of a flow, for a report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunReport {
    /// How many.
    pub runs: u64,
    /// Mean length.
    pub mean_packets: f64,
    /// The length that half of the runs do not exceed, to the next power of two.
    pub median_packets_at_most: u64,
    /// The longest.
    pub longest_packets: u64,
    /// Packets lost between two runs, on average.
    pub mean_gap_packets: f64,
    /// The most lost between two.
    pub longest_gap_packets: u64,
    /// The first ones.
    pub first: Vec<Run>,
}

impl Runs {
    /// A packet that passed, `lost` packets after the last one that did.
    pub fn passed(&mut self, time_ns: u64, bytes: u32, lost: u64, origin_ns: u64) {
        if lost > 0 {
            self.close(lost, origin_ns);
        }
        let bytes = u64::from(bytes);
        let open = self.open.get_or_insert(Open {
            start: time_ns,
            end: time_ns,
            packets: 0,
            bytes: 0,
            first_bytes: bytes,
        });
        open.end = time_ns;
        open.packets += 1;
        open.bytes += bytes;
    }

    /// So many packets that did not pass.
    pub fn lost(&mut self, packets: u64, origin_ns: u64) {
        if self.open.is_some() {
            self.close(packets, origin_ns);
        } else {
            self.lost += packets;
        }
    }

    fn close(&mut self, lost: u64, origin_ns: u64) {
        let Some(open) = self.open.take() else { return };
        self.count += 1;
        self.packets += open.packets;
        self.longest = self.longest.max(open.packets);
        let class = (open.packets.max(1).ilog2() as usize).min(CLASSES - 1);
        self.classes[class] += 1;
        if lost > 0 {
            self.gaps += 1;
            self.lost += lost;
            self.longest_gap = self.longest_gap.max(lost);
        }
        if self.first.len() < RUNS_KEPT {
            let duration_s = (open.end - open.start) as f64 / 1e9;
            let rest = open.bytes - open.first_bytes;
            self.first.push(Run {
                start_s: open.start.saturating_sub(origin_ns) as f64 / 1e9,
                packets: open.packets,
                bytes: open.bytes,
                duration_s,
                rate_bit_s: (duration_s > 0.0).then(|| rest as f64 * 8.0 / duration_s),
                lost_after_packets: lost,
            });
        }
    }

    /// What came of it.
    pub fn report(mut self, origin_ns: u64) -> RunReport {
        self.close(0, origin_ns);
        let mut seen = 0;
        let median = self.classes.iter().position(|count| {
            seen += count;
            seen * 2 >= self.count && seen > 0
        });
        let mean = |sum: u64, count: u64| if count > 0 { sum as f64 / count as f64 } else { 0.0 };
        RunReport {
            runs: self.count,
            mean_packets: mean(self.packets, self.count),
            median_packets_at_most: median.map_or(0, |class| (2 << class) - 1).min(self.longest),
            longest_packets: self.longest,
            mean_gap_packets: mean(self.lost, self.gaps),
            longest_gap_packets: self.longest_gap,
            first: self.first,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_runs_are_no_longer_than_the_longest() {
        let mut runs = Runs::default();
        (0..706).for_each(|i| runs.passed(i, 1_500, 0, 0));
        let report = runs.report(0);
        assert_eq!((report.longest_packets, report.median_packets_at_most), (706, 706));
        assert_eq!(Runs::default().report(0).median_packets_at_most, 0);
    }
}
