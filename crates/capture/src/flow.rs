//! One flow: its counts, what is missing of it, and the window over its last packets.

use serde::Serialize;

use crate::{
    counter::{Counter, Step},
    fit::Fit,
    headers::{FlowKey, Packet, Tcp, Transport},
    stamps::StampClock,
    tcp::{Seen, TcpTrack},
    trace::{Event, LossSource, Runs, Trace},
};

/// The most windows of a flow whose estimates are kept; then every other is.
pub const WINDOWS_MAX: usize = 64;
/// How far back the packet is looked for that was sent again.
const LOOK_BACK: usize = 8_192;

/// On which side of the loss the capture was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Vantage {
    /// Behind it: only what passed is there.
    Receiver,
    /// Before it: what was lost is there too.
    Sender,
    /// It is unknown.
    Unknown,
}

/// A flow of the table.
#[derive(Debug)]
pub struct Flow {
    /// Which.
    pub key: FlowKey,
    /// First packet, ns since 1970.
    pub first_ns: u64,
    /// Last packet.
    pub last_ns: u64,
    /// Packets.
    pub packets: u64,
    /// Their bytes from the IP header on.
    pub bytes: u64,
    /// Their bytes on the wire.
    pub wire_bytes: u64,
    /// Losses as they were counted on the way, from whichever counter; for eviction.
    pub losses: u64,
    /// Packets that arrived, but are not in the capture.
    pub missed: u64,
    /// The window over its last packets.
    pub trace: Trace,
    /// Its runs, as far as they have left the window.
    pub runs: Runs,
    /// What the windows came to.
    pub fits: Vec<Fit>,
    /// Every so many windows one is kept.
    every: u32,
    windows: u32,
    /// Losses that have left the window, by source: ID, sequence, retransmission.
    gone: [u64; 3],
    id: Counter,
    rtp: Counter,
    rtp_source: Option<u32>,
    /// TCP only.
    pub tcp: Option<TcpTrack>,
    /// The sender's clock, if its packets carry time stamps.
    pub clock: StampClock,
}

impl Flow {
    /// A flow that begins with this packet.
    pub fn new(packet: &Packet) -> Flow {
        Flow {
            key: packet.key,
            first_ns: packet.time_ns,
            last_ns: packet.time_ns,
            packets: 0,
            bytes: 0,
            wire_bytes: 0,
            losses: 0,
            missed: 0,
            trace: Trace::default(),
            runs: Runs::default(),
            fits: Vec::new(),
            every: 1,
            windows: 0,
            gone: [0; 3],
            id: Counter::default(),
            rtp: Counter::default(),
            rtp_source: None,
            tcp: packet.key.is_tcp().then(TcpTrack::default),
            clock: StampClock::default(),
        }
    }

    /// Takes a packet. `shared` says that its identification follows that of the sender's last packet to
    /// another flow. Whether it was remembered.
    pub fn packet(&mut self, packet: &Packet, shared: bool) -> bool {
        // A stamp that goes back is that of a packet on another CPU.
        let time_ns = packet.time_ns.max(self.last_ns);
        self.last_ns = time_ns;
        self.packets += 1;
        self.bytes += u64::from(packet.ip_bytes);
        self.wire_bytes += u64::from(packet.wire_bytes);
        let mut event = Event { time_ns, bytes: packet.ip_bytes, ..Event::default() };
        match packet.transport {
            Transport::Tcp(tcp) => return self.segment(&tcp, event),
            Transport::Udp { rtp } => {
                event.gap_seq = rtp.map_or(0, |(seq, source)| self.rtp(seq, source));
            }
            Transport::Other => {}
        }
        if let Some(id) = packet.ip_id {
            event.gap_id = match self.id.step(id, shared) {
                Step::Missing(gap) => gap,
                Step::Late => {
                    self.came_late(|e| &mut e.gap_id);
                    0
                }
                Step::Unclear => 0,
            };
        }
        self.losses += u64::from(event.gap_id.max(event.gap_seq));
        self.trace.push(event);
        true
    }

    fn rtp(&mut self, seq: u16, source: u32) -> u16 {
        if self.rtp_source.replace(source).is_some_and(|last| last != source) {
            self.rtp = Counter::default();
        }
        match self.rtp.step(seq, false) {
            Step::Missing(gap) => gap,
            Step::Late => {
                self.came_late(|e| &mut e.gap_seq);
                0
            }
            Step::Unclear => 0,
        }
    }

    /// One of the last gap was not lost.
    fn came_late(&mut self, gap: impl Fn(&mut Event) -> &mut u16) {
        let near = self.trace.events_mut().rev().take(usize::from(u8::MAX));
        if let Some(gap) = near.map(gap).find(|gap| **gap > 0) {
            *gap -= 1;
        }
    }

    fn segment(&mut self, tcp: &Tcp, mut event: Event) -> bool {
        let Some(track) = &mut self.tcp else { return false };
        event.seq = tcp.seq;
        event.stamp = tcp.stamp.unwrap_or(0);
        self.clock.see(event.time_ns, tcp.stamp);
        // The number that it will have.
        let number = self.trace.next();
        match track.segment(tcp, event.time_ns, number) {
            Seen::Nothing => return false,
            Seen::New { missing } => {
                event.gap_seq = missing;
                self.losses += u64::from(missing);
            }
            Seen::Overtaken { event } => {
                if let Some(event) = self.trace.get_mut(event) {
                    event.gap_seq = event.gap_seq.saturating_sub(1);
                }
            }
            Seen::Filled => event.fills = true,
            Seen::Again { arrived } => {
                event.fills = true;
                self.losses += u64::from(!arrived);
                let mut before = self.trace.events_mut().rev().take(LOOK_BACK);
                if let Some(lost) = before.find(|e| e.seq == tcp.seq && !e.resent) {
                    lost.resent = !arrived;
                }
            }
        }
        self.trace.push(event);
        true
    }

    /// The other side's acknowledgement.
    pub fn acknowledged(&mut self, tcp: &Tcp, time_ns: u64) {
        let (Some(track), Some(ack)) = (&mut self.tcp, tcp.ack) else { return };
        let trace = &mut self.trace;
        track.trips.acknowledged(tcp, time_ns, |event, round_trip_ns| {
            if let Some(event) = trace.get_mut(event) {
                event.round_trip_us = (round_trip_ns / 1_000).clamp(1, u32::MAX.into()) as u32;
            }
        });
        let (losses, missed) = (&mut self.losses, &mut self.missed);
        track.acknowledged(ack, |event, packets| {
            if let Some(event) = trace.get_mut(event) {
                let packets = packets.min(event.gap_seq);
                event.gap_seq -= packets;
                event.uncaptured = event.uncaptured.saturating_add(packets);
                *losses = losses.saturating_sub(packets.into());
                *missed += u64::from(packets);
            }
        });
        // It has this twice: sending it again was not needed, and the first was not lost.
        if let Some(seq) = TcpTrack::duplicate(tcp) {
            let mut before = self.trace.events_mut().rev().take(LOOK_BACK);
            if let Some(event) = before.find(|e| e.seq == seq && e.resent) {
                event.resent = false;
            }
        }
    }

    /// How its losses are seen, and from which side.
    pub fn source(&self) -> (LossSource, Vantage) {
        if let Some(tcp) = &self.tcp {
            return match tcp.evidence() {
                (0, 0) => (LossSource::TcpHoles, Vantage::Unknown),
                _ if tcp.at_sender() => (LossSource::TcpRetransmissions, Vantage::Sender),
                _ => (LossSource::TcpHoles, Vantage::Receiver),
            };
        }
        let source = if self.rtp.counts() {
            LossSource::RtpSequence
        } else if self.id.counts() {
            LossSource::Ipv4Id
        } else {
            return (LossSource::None, Vantage::Unknown);
        };
        let vantage = if self.lost_by(source) > 0 { Vantage::Receiver } else { Vantage::Unknown };
        (source, vantage)
    }

    /// Why the vantage is taken to be what it is.
    pub fn vantage_why(&self) -> String {
        if let Some(tcp) = &self.tcp {
            let (again, holes) = tcp.evidence();
            return match self.source().1 {
                Vantage::Unknown => "nothing is missing and nothing was sent again".to_owned(),
                Vantage::Sender => format!(
                    "{again} segments are there twice and {holes} holes, so what was lost is in the capture"
                ),
                Vantage::Receiver => format!(
                    "{holes} holes in the sequence numbers and {again} segments twice, so what was lost is \
                     not in the capture"
                ),
            };
        }
        match self.source() {
            (LossSource::None, _) if self.id.is_shared() => {
                "the sender's IPv4 identification counts all its flows together".to_owned()
            }
            (LossSource::None, _) => {
                "neither RTP nor an IPv4 identification that counts up".to_owned()
            }
            (_, Vantage::Receiver) => {
                "numbers are missing, so what was lost is not in the capture".to_owned()
            }
            _ => {
                "no number is missing: nothing was lost before here; what is lost later cannot be \
                  seen"
                    .to_owned()
            }
        }
    }

    /// Packets that were overtaken.
    pub fn reordered(&self) -> u64 {
        match self.source().0 {
            LossSource::TcpHoles | LossSource::TcpRetransmissions => {
                self.tcp.as_ref().map_or(0, TcpTrack::overtaken)
            }
            LossSource::RtpSequence => self.rtp.late(),
            LossSource::Ipv4Id => self.id.late(),
            LossSource::None => 0,
        }
    }

    /// Packets lost, by that source.
    pub fn lost_by(&self, source: LossSource) -> u64 {
        let here: u64 = self.trace.events().map(|event| event.losses(source)).sum();
        here + match source {
            LossSource::Ipv4Id => self.gone[0],
            LossSource::TcpHoles | LossSource::RtpSequence => self.gone[1],
            LossSource::TcpRetransmissions => self.gone[2],
            LossSource::None => 0,
        }
    }

    /// Whether its traffic began in the capture, as far as the window still holds the beginning.
    pub fn began(&self, capture_start_ns: u64) -> bool {
        const SILENT_NS: u64 = 10_000_000;
        let silent = self.first_ns.saturating_sub(capture_start_ns) >= SILENT_NS;
        self.trace.is_whole() && (silent || self.tcp.as_ref().is_some_and(TcpTrack::began))
    }

    /// The window is full: its estimate is kept, if there is one, and its older half goes.
    pub fn end_window(&mut self, fit: Option<Fit>, origin_ns: u64) {
        self.windows += 1;
        if self.windows.is_multiple_of(self.every)
            && let Some(fit) = fit
        {
            self.fits.push(fit);
            if self.fits.len() == WINDOWS_MAX {
                let mut odd = false;
                self.fits.retain(|_| {
                    odd = !odd;
                    odd
                });
                self.every *= 2;
            }
        }
        self.forget(self.trace.len() / 2, origin_ns);
    }

    /// Forgets the oldest packets; what they showed of losses and runs is kept.
    pub fn forget(&mut self, packets: usize, origin_ns: u64) {
        let source = self.source().0;
        self.clock.forget(self.trace.events().take(packets));
        for event in self.trace.drain(packets) {
            self.gone[0] += u64::from(event.gap_id);
            self.gone[1] += u64::from(event.gap_seq);
            self.gone[2] += u64::from(event.resent);
            run(&mut self.runs, &event, source, origin_ns);
        }
        if let Some(track) = &mut self.tcp {
            track.forget(self.trace.first());
        }
    }

    /// Its runs over the whole capture.
    pub fn all_runs(&self, origin_ns: u64) -> Runs {
        let mut runs = self.runs.clone();
        let source = self.source().0;
        for event in self.trace.events() {
            run(&mut runs, event, source, origin_ns);
        }
        runs
    }
}

/// Adds a packet to the runs.
fn run(runs: &mut Runs, event: &Event, source: LossSource, origin_ns: u64) {
    if source == LossSource::TcpRetransmissions && event.resent {
        runs.lost(1, origin_ns);
    } else {
        let lost = if source == LossSource::TcpRetransmissions { 0 } else { event.losses(source) };
        runs.passed(event.time_ns, event.bytes, lost, origin_ns);
    }
}
