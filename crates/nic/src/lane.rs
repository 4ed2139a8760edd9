//! One direction of a software NIC: what comes in at one port leaves at the other, by a limit.
//!
//! ```text
//! take(p) ──► hash ──► flow ──► backlog ──► shaper (one fair class) ──► poll()
//!                                  ▲                                      │
//!                                  └──────────── completion ◄─────────────┘
//! ```
//!
//! A segment that would occupy the limit for long is cut first ([`crate::segment`]), so that nobody waits
//! behind 64 KB. Without a limit packets go straight through.
//!
//! No I/O and no clock: time is an argument.

use std::collections::VecDeque;

use tidegate_core::{
    Nanos, Rate,
    codel::CodelOptions,
    shaper::{ClassId, ClassOptions, Shaper, ShaperCounters, ShaperError, ShaperOptions},
    units::Bytes,
    wheel::{Beyond, WheelOptions},
};

use crate::{
    backlog::{Backlog, BacklogBounds, BacklogCounters, BacklogLimits, Handle, Ready},
    flow_table::FlowTable,
    packet::Packet,
    pool::PacketPool,
    segment,
};

/// A frame of the usual MTU with its Ethernet header, in bytes.
pub const FRAME_BYTES: u32 = 1_514;
/// By default as much may wait as the limit sends in this time.
pub const QUEUE_TIME: Nanos = Nanos(50_000_000);
/// By default at least so much may wait: a few segments.
pub const QUEUE_BYTES_MIN: u64 = 256 << 10;
/// By default packets that waited longer are marked, but not below the time of [`MARK_FRAMES`].
pub const MARK: Nanos = Nanos(1_000_000);
/// See [`MARK`].
pub const MARK_FRAMES: u64 = 4;
/// The rate of a class that holds nothing back.
const UNLIMITED: Rate = match Rate::from_bit_s(u64::MAX) {
    Some(rate) => rate,
    None => unreachable!(),
};

/// The size of a lane, and what it does where its limit says nothing. Those with `None` follow the rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneOptions {
    /// Flows that are distinguished.
    pub flows: usize,
    /// Packets that may wait or be in the shaper.
    pub packets: usize,
    /// Bytes that may wait.
    pub bytes: Option<Bytes>,
    /// Slot of the timing wheel.
    pub granularity: Nanos,
    /// How far ahead the wheel reaches.
    pub horizon: Nanos,
    /// Segments that take longer at the limit's rate are cut into frames of MTU size.
    pub segment: Nanos,
    /// Wait from which packets are marked.
    pub mark: Option<Nanos>,
    /// Standing wait from which packets that cannot be marked are dropped.
    pub target: Option<Nanos>,
    /// How long senders may take to react.
    pub interval: Option<Nanos>,
}

impl Default for LaneOptions {
    /// 4096 flows, 8192 packets, a wheel of 2 us and 2 s, segments of 0.6 ms.
    fn default() -> Self {
        let WheelOptions { granularity, horizon, .. } = WheelOptions::default();
        Self {
            flows: 4_096,
            packets: 8_192,
            bytes: None,
            granularity,
            horizon,
            segment: Nanos(600_000),
            mark: None,
            target: None,
            interval: None,
        }
    }
}

/// What a lane holds its packets to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneLimit {
    /// The rate on the wire.
    pub rate: Rate,
    /// For how long an idle lane may save up credit.
    pub burst: Nanos,
    /// Wait from which packets are marked; none: as the lane's options have it.
    pub mark: Option<Nanos>,
}

crate::counters::counter_table! {
    /// What a lane did, since its start.
    LaneCounters, LaneCounter:
    passed_packets: "packets that left; a segment that stays whole is one",
    passed_bytes: "their bytes on the wire",
    waited_ns: "the sum of what they waited, in nanoseconds",
    cut_segments: "segments that were cut because they would have occupied the limit for long",
    whole_segments: "segments that should have been cut but stayed whole: no buffers, or unknown headers",
    shared_packets: "packets that shared a queue because more flows were busy than the lane tells apart",
}

/// What a lane holds now.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct LaneLoad {
    /// Flows with packets here.
    pub flows: usize,
    /// Packets that wait, those in the shaper not among them.
    pub waiting_packets: usize,
    /// Their bytes.
    pub waiting_bytes: u64,
    /// Packets in the shaper.
    pub shaper_packets: usize,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Lane {
    options: LaneOptions,
    limit: Option<LaneLimit>,
    /// This lane's part of the rate, where several share it.
    rate: Rate,
    seed: u64,
    class: ClassId,
    flows: FlowTable,
    backlog: Backlog,
    shaper: Shaper<Handle>,
    /// Of a segment that is being cut.
    pieces: VecDeque<Packet>,
    counters: LaneCounters,
    waited_max: Nanos,
}

impl Lane {
    /// An empty lane. `seed` is random, so that no sender can choose the flow that it meets.
    ///
    /// # Errors
    /// If an option is out of bounds.
    pub fn new(options: LaneOptions, seed: u64, now: Nanos) -> Result<Self, ShaperError> {
        let LaneOptions { flows, packets, granularity, horizon, .. } = options;
        let wheel = WheelOptions { granularity, horizon, capacity: packets, beyond: Beyond::Clamp };
        let mut shaper = Shaper::new(ShaperOptions { wheel, flows, classes: 1 }, now)?;
        let class = ClassOptions { rate: UNLIMITED, burst: Nanos(0), parent: None, fair: true };
        let class = shaper.add_class(class)?;
        Ok(Self {
            options,
            limit: None,
            rate: UNLIMITED,
            seed,
            class,
            flows: FlowTable::new(class, flows),
            backlog: Backlog::new(
                BacklogBounds { flows, packets },
                limits(&options, None, UNLIMITED),
            ),
            shaper,
            pieces: VecDeque::new(),
            counters: LaneCounters::default(),
            waited_max: Nanos(0),
        })
    }

    /// Changes the limit; none: there is none. Packets keep the times that they have.
    pub fn set_limit(&mut self, limit: Option<LaneLimit>) {
        self.limit = limit;
        self.set_part(limit.map_or(UNLIMITED, |limit| limit.rate));
        let burst = limit.map_or(Nanos(0), |limit| limit.burst);
        // The class is this shaper's.
        let _ = self.shaper.set_class_burst(self.class, burst);
    }

    /// Changes this lane's part of the limit's rate.
    pub fn set_part(&mut self, rate: Rate) {
        self.rate = rate;
        let _ = self.shaper.set_class_rate(self.class, rate);
        self.backlog.set_limits(limits(&self.options, self.limit, rate));
    }

    /// The limit.
    pub fn limit(&self) -> Option<LaneLimit> {
        self.limit
    }

    /// Takes a packet in; what may leave at once, because there is no limit, goes to `out`. Buffers for
    /// pieces come from `pool`; if it has none, a segment stays whole.
    pub fn take(
        &mut self,
        now: Nanos,
        packet: Packet,
        pool: &mut PacketPool,
        out: &mut VecDeque<Packet>,
    ) {
        if self.limit.is_none() && self.backlog.packets() == 0 {
            self.pass(packet, Nanos(0), out);
            return;
        }
        let hash = packet.flow_hash(self.seed);
        let longest = self.rate.bytes_in(self.options.segment).0.max(FRAME_BYTES.into());
        if packet.segments() > 1 && packet.wire_bytes() > longest {
            if segment::cut(&packet, pool, &mut self.pieces).is_ok() {
                self.counters.cut_segments += 1;
                pool.recycle(packet);
                while let Some(piece) = self.pieces.pop_front() {
                    self.arrive(now, hash, piece);
                }
                return;
            }
            self.counters.whole_segments += 1;
        }
        self.arrive(now, hash, packet);
    }

    /// Moves up to `max` packets whose time has come to `out`. Returns how many.
    pub fn poll(&mut self, now: Nanos, max: usize, out: &mut VecDeque<Packet>) -> usize {
        let mut left = 0;
        while left < max
            && let Some(departure) = self.shaper.poll(now)
        {
            let flow = departure.flow.index();
            if let Some(packet) = self.backlog.complete(now, flow, departure.handle) {
                self.pass(packet.packet, packet.waited, out);
                left += 1;
                self.forward(now, departure.flow, packet.next);
            }
            if self.backlog.is_idle(flow) {
                self.flows.idle(flow);
            }
        }
        left
    }

    /// When [`Lane::poll`] has the next packet; none if it holds none.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.shaper.next_deadline()
    }

    /// Drops all packets, because the port that they were for is gone.
    pub fn clear(&mut self, now: Nanos) {
        self.backlog.clear();
        let (backlog, flows) = (&mut self.backlog, &mut self.flows);
        self.shaper.drain(|departure| {
            let flow = departure.flow.index();
            if let Some(left) = backlog.complete(now, flow, departure.handle) {
                backlog.gone(&left.packet);
            }
            if backlog.is_idle(flow) {
                flows.idle(flow);
            }
        });
    }

    /// Drops a packet that is for a port that is gone.
    pub fn gone(&mut self, packet: &Packet) {
        self.backlog.gone(packet);
    }

    /// What it did.
    pub fn counters(&self) -> LaneCounters {
        LaneCounters { shared_packets: self.flows.shared(), ..self.counters }
    }

    /// The longest that a packet waited since this was asked last.
    pub fn take_waited_max(&mut self) -> Nanos {
        std::mem::take(&mut self.waited_max)
    }

    /// What its backlog did.
    pub fn backlog_counters(&self) -> BacklogCounters {
        self.backlog.counters()
    }

    /// What its shaper did.
    pub fn shaper_counters(&self) -> ShaperCounters {
        self.shaper.counters()
    }

    /// What it holds now.
    pub fn load(&self) -> LaneLoad {
        let (waiting_packets, waiting_bytes) = self.backlog.waiting();
        LaneLoad {
            flows: self.flows.busy(),
            waiting_packets,
            waiting_bytes,
            shaper_packets: self.shaper.len(),
        }
    }

    fn pass(&mut self, packet: Packet, waited: Nanos, out: &mut VecDeque<Packet>) {
        let counters = &mut self.counters;
        counters.passed_packets += 1;
        counters.passed_bytes += packet.wire_bytes();
        // A clock that stepped far: the sum must not end the thread.
        counters.waited_ns = counters.waited_ns.saturating_add(waited.0);
        self.waited_max = self.waited_max.max(waited);
        out.push_back(packet);
    }

    fn arrive(&mut self, now: Nanos, hash: u64, packet: Packet) {
        // There is a flow for every packet: the class is the shaper's, and a full table shares.
        let Ok(flow) = self.flows.flow(hash, &mut self.shaper) else {
            return self.backlog.no_room(&packet);
        };
        let ready = self.backlog.arrive(now, flow.index(), packet);
        self.forward(now, flow, ready);
        if self.backlog.is_idle(flow.index()) {
            self.flows.idle(flow.index());
        }
    }

    /// Hands a flow's next packet to the shaper, which has room for all that the backlog has.
    fn forward(&mut self, now: Nanos, flow: tidegate_core::shaper::FlowId, ready: Option<Ready>) {
        let Some(Ready { handle, bytes }) = ready else { return };
        if self.shaper.on_packet(now, flow, bytes, handle).is_err() {
            self.backlog.refused(flow.index(), handle);
        }
    }
}

/// The wait from which packets are marked at this rate where neither limit nor options say: [`MARK`], but not
/// below the time of [`MARK_FRAMES`].
#[must_use]
pub fn mark_at(rate: Rate) -> Nanos {
    MARK.max(rate.time_for(Bytes(MARK_FRAMES * u64::from(FRAME_BYTES))))
}

/// How much and how long may wait: what was asked for, or what fits the rate.
fn limits(options: &LaneOptions, limit: Option<LaneLimit>, rate: Rate) -> BacklogLimits {
    let defaults = CodelOptions::for_rate(rate, FRAME_BYTES);
    let bytes = options.bytes.unwrap_or_else(|| rate.bytes_in(QUEUE_TIME));
    let least = if options.bytes.is_some() { 0 } else { QUEUE_BYTES_MIN };
    BacklogLimits {
        bytes: bytes.0.max(least),
        mark: limit.and_then(|limit| limit.mark).or(options.mark).unwrap_or_else(|| mark_at(rate)),
        codel: CodelOptions {
            target: options.target.unwrap_or(defaults.target),
            interval: options.interval.unwrap_or(defaults.interval),
            ..defaults
        },
    }
}

#[cfg(test)]
mod tests;
