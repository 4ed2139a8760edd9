//! The virtual queue of NRM (Brakmo and Starovoitov, "BPF Host Network Resource Management"), without
//! its lock, with thresholds in time.
//!
//! A queue that holds no packet: it only remembers when a link of the limit's rate would have finished
//! sending all that passed, the theoretical finish time. The distance from now to that time is the
//! backlog, in nanoseconds at the limit's rate; it is negative while burst credit is left. The backlog
//! decides what happens to the next packet:
//!
//! ```text
//!   -burst        0        mark                    large_drop       drop
//!      |----------|----------|--------------------------|-------------|------->  backlog
//!      :        pass         : mark, slow or early drop : small only  : drop all
//! ```
//!
//! - above `mark` an ECN-capable packet is marked; a local TCP sender is told to reduce its congestion
//!   window, and what is not TCP is dropped, both with a probability that grows linearly to 1 at
//!   `large_drop`;
//! - above `large_drop` only small packets (ACK, SYN, DNS) pass, and those of a TCP sender with nothing in
//!   flight, which no ACK would wake to try again;
//! - above `drop` everything is dropped. A dropped packet is not charged.
//!
//! The backlog is taken before the packet is added, so a packet of any size passes an idle queue: traffic
//! flows rather than stops. In any window of length `t` no more than
//! `rate x (t + burst + drop)` and one packet pass.
//!
//! Where this differs from the published rule: the state is one 64-bit time, which the kernel's copy
//! (`bpf/vqueue.h`) advances with one atomic instruction where NRM took a spin lock; thresholds are times
//! (600 000 bytes are 0.5 ms at 10 Gbit/s but 480 ms at 10 Mbit/s) with a floor of a few segments; and the
//! cost of a byte is a fixed-point number with 24 fractional bits whose remainder is carried from packet to
//! packet, so the rate error stays below 1e-6 from [`MIN_RATE_BIT_S`] to [`MAX_RATE_BIT_S`].
//!
//! Each packet costs O(1) time; a queue is 16 bytes of state.

use crate::burst::policer_burst;
use crate::class::Floors;
use crate::meter::MeterError;
use crate::token_bucket::{BucketConfig, BucketError};
use crate::units::{Bytes, NANOS_PER_SEC, Nanos, Rate, Span};
use crate::verdict::{DropReason, Verdict};

/// Fractional bits of the cost of a byte.
pub const COST_SHIFT: u32 = 24;
/// The slowest limit: below it the cost of a large segment leaves 64 bits.
pub const MIN_RATE_BIT_S: u64 = 8_000;
/// The fastest limit: above it the fixed-point cost of a byte is off by more than 1e-6.
pub const MAX_RATE_BIT_S: u64 = 100_000_000_000;
/// A packet counts as no longer than this: 1 MiB, twice the largest segment that Linux builds.
pub const MAX_PACKET_BYTES: u32 = (1 << 20) - 1;
/// No burst and no threshold is longer than this: 512 s, a megabyte at the slowest rate.
pub const MAX_SPAN: Nanos = Nanos(512 * NANOS_PER_SEC);
/// A packet up to this length on the wire is small: an ACK, a SYN, a DNS question.
pub const SMALL_BYTES: u32 = 120;

/// A full-sized Ethernet frame without its checksum, the unit of the floors.
const FRAME: Bytes = Bytes(1514);

/// Which way the limited workload's packets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the workload: a local TCP sender can be told to slow down.
    Egress,
    /// To the workload: only marks and drops reach the sender.
    Ingress,
}

/// What the virtual queue needs to know of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Length on the wire with all headers of all its segments; above [`MAX_PACKET_BYTES`] it is cut.
    pub wire_bytes: u32,
    /// Whether its IP header says ECT(0), ECT(1) or CE.
    pub ecn_capable: bool,
    /// What it carries.
    pub transport: Transport,
}

/// What a packet carries, as far as the feedback to its sender differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP; the sender has other packets in flight or not (always `true` on ingress, where it is unknown).
    Tcp {
        /// Whether an ACK is still to come that would make the sender try again.
        in_flight: bool,
    },
    /// Anything else.
    Other,
}

/// Rate and thresholds of a virtual queue, in the form that the packet path works with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtualQueueConfig {
    /// Cost of a byte in 2^-24 ns.
    pub cost: u64,
    /// Credit that an idle queue may save up.
    pub burst: Nanos,
    /// Backlog above which senders are told.
    pub mark: Nanos,
    /// Backlog above which large packets are dropped.
    pub large_drop: Nanos,
    /// Backlog above which every packet is dropped.
    pub drop: Nanos,
}

/// What a user may set of a virtual queue; `None` takes the default of [`VirtualQueueOptions::config`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtualQueueOptions {
    /// The limit.
    pub rate: Rate,
    /// Credit that an idle queue may save up.
    pub burst: Option<Span>,
    /// Backlog above which senders are told.
    pub mark: Option<Span>,
    /// Backlog above which every packet is dropped.
    pub drop: Option<Span>,
    /// What the thresholds are for: their defaults.
    pub kind: QueueKind,
}

/// What the thresholds of a limit are for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// A virtual queue that works alone.
    #[default]
    Alone,
    /// The flows are paced at their fair share ([`crate::fair_share`]) and the queue is their safety net: its
    /// defaults leave room for the bursts of many paced flows that happen to meet.
    Paced,
    /// The flows are told their fair share as a receive window ([`crate::receive_window`]): what they send at
    /// once is a window, not a segment.
    Windows,
    /// Packets wait for their departure ([`crate::edt`]); `drop` is the horizon.
    Departures,
    /// The bucket of a policer ([`crate::token_bucket`]): it is `burst` deep, and drops when that is gone.
    Bucket,
    /// Packets wait in a qdisc ([`crate::htb`]), which holds as much as `drop` says; they are marked only if
    /// a threshold is given.
    Qdisc,
    /// The same, kept short by what its senders are told ([`crate::dem`], [`crate::spring`]): a host that
    /// stalls finds it empty, and what it could not send meanwhile it may send after.
    ShortQdisc,
}

/// Why a virtual queue cannot be built as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The rate is out of bounds.
    #[error("{0} is out of range; a limit is between 8kbit and 100gbit")]
    Rate(Rate),
    /// A burst or threshold is longer than [`MAX_SPAN`].
    #[error("{name} of {span} is longer than {} at {rate}; make it shorter", MAX_SPAN)]
    Span {
        /// Which one.
        name: &'static str,
        /// As given.
        span: Span,
        /// The limit's rate.
        rate: Rate,
    },
    /// The scheme has no virtual queue.
    #[error("scheme `{0}` does not work by a virtual queue")]
    Scheme(crate::Scheme),
    /// A policer's bucket.
    #[error(transparent)]
    Bucket(BucketError),
    /// A policer's meter.
    #[error(transparent)]
    Meter(MeterError),
    /// A policer has no queue that could have thresholds.
    #[error(
        "a policer drops when its bucket is empty and has no mark or drop threshold; leave them out"
    )]
    Thresholds,
    /// The mark threshold does not lie below the drop threshold.
    #[error("mark threshold {mark} must be below drop threshold {drop}")]
    Order {
        /// Mark threshold.
        mark: Nanos,
        /// Drop threshold.
        drop: Nanos,
    },
}

impl VirtualQueueOptions {
    /// A limit of `rate` with every default of a queue that works alone.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        VirtualQueueOptions { rate, burst: None, mark: None, drop: None, kind: QueueKind::Alone }
    }

    /// A limit of `rate` with every default of a queue behind paced flows.
    #[must_use]
    pub fn paced(rate: Rate) -> Self {
        VirtualQueueOptions { kind: QueueKind::Paced, ..Self::new(rate) }
    }

    /// The thresholds at the rate. Defaults: burst 1 ms but at least one frame; mark 0.5 ms but at least
    /// two frames, paced 2 ms but at least 16 frames; drop 4 ms but at least four frames, paced 32. The last
    /// eighth below `drop` is kept for small packets. Behind windows: mark 16 ms but at least 32 frames, drop
    /// 40 ms but at least 96. Of departures: mark 2 ms but at least 8 frames, horizon
    /// 10 ms but at least 32 frames. Of a qdisc: no mark, room for 20 ms but for two segments of 64 KB at
    /// least; of a short one burst 10 ms.
    ///
    /// # Errors
    /// [`ConfigError`] for a rate, span or order of thresholds that cannot be kept.
    pub fn config(&self) -> Result<VirtualQueueConfig, ConfigError> {
        let rate = self.rate;
        if !(MIN_RATE_BIT_S..=MAX_RATE_BIT_S).contains(&rate.bit_s()) {
            return Err(ConfigError::Rate(rate));
        }
        let span = |name, given: Option<Span>, default_ns: u64, floor: Bytes| {
            let Some(span) = given else {
                return Ok(Nanos(default_ns).max(rate.time_for(floor)));
            };
            let time = span.at(rate);
            if time > MAX_SPAN { Err(ConfigError::Span { name, span, rate }) } else { Ok(time) }
        };
        if self.kind == QueueKind::Bucket {
            return self.bucket_config();
        }
        let floors = self.kind.floors();
        let (mark_ns, drop_ns) = match self.kind {
            QueueKind::Alone => (500_000, 4_000_000),
            QueueKind::Paced => (2_000_000, 4_000_000),
            QueueKind::Windows => (16_000_000, 40_000_000),
            QueueKind::Departures => (2_000_000, 10_000_000),
            QueueKind::Bucket => (0, 0),
            QueueKind::Qdisc | QueueKind::ShortQdisc => (MAX_SPAN.0, 20_000_000),
        };
        let burst_ns = if self.kind == QueueKind::ShortQdisc { 10_000_000 } else { 1_000_000 };
        let burst = span("burst", self.burst, burst_ns, floors.burst)?;
        let mark = span("mark threshold", self.mark, mark_ns, floors.mark)?;
        let drop = span("drop threshold", self.drop, drop_ns, floors.drop)?;
        // A qdisc keeps no room for small packets.
        let is_qdisc = matches!(self.kind, QueueKind::Qdisc | QueueKind::ShortQdisc);
        let reserve = if is_qdisc { 0 } else { drop.0 / 8 };
        let large_drop = Nanos(drop.0 - reserve);
        let is_marked = !is_qdisc || self.mark.is_some();
        if is_marked && mark >= large_drop {
            return Err(ConfigError::Order { mark, drop });
        }
        Ok(VirtualQueueConfig { cost: cost_of_byte(rate), burst, mark, large_drop, drop })
    }

    /// The bucket of a policer: [`policer_burst`] deep if not said.
    ///
    /// # Errors
    /// [`ConfigError::Bucket`] for a rate or depth that no bucket has.
    pub fn bucket(&self) -> Result<BucketConfig, ConfigError> {
        let config = match self.burst {
            None => BucketConfig::new(self.rate, policer_burst(self.rate)),
            Some(Span::Size(bytes)) => BucketConfig::new(self.rate, bytes),
            Some(Span::Time(time)) => BucketConfig::lasting(self.rate, time),
        };
        config.map_err(ConfigError::Bucket)
    }

    fn bucket_config(&self) -> Result<VirtualQueueConfig, ConfigError> {
        let (name, rate) = ("burst", self.rate);
        let bucket = self.bucket().map_err(|e| match e {
            ConfigError::Bucket(BucketError::Rate(rate)) => ConfigError::Rate(rate),
            e => e,
        })?;
        if self.mark.is_some() || self.drop.is_some() {
            return Err(ConfigError::Thresholds);
        }
        let burst = match self.burst {
            Some(Span::Time(time)) => time,
            _ => Nanos(bucket.fill),
        };
        if burst > MAX_SPAN {
            let span = self.burst.unwrap_or(Span::Time(burst));
            return Err(ConfigError::Span { name, span, rate });
        }
        let none = Nanos(0);
        let cost = cost_of_byte(rate);
        Ok(VirtualQueueConfig { cost, burst, mark: none, large_drop: none, drop: none })
    }

    /// The lengths below which no threshold falls when the rate is lower than here: what was given in bytes
    /// stays as many, what was given as a time stays a time.
    #[must_use]
    pub fn floors(&self) -> Floors {
        let mut floors = self.kind.floors();
        if self.kind == QueueKind::Bucket {
            floors.burst = policer_burst(self.rate);
        }
        let floor = |given: Option<Span>, default| match given {
            None => default,
            Some(Span::Size(bytes)) => bytes,
            Some(Span::Time(_)) => Bytes(0),
        };
        Floors {
            burst: floor(self.burst, floors.burst),
            mark: floor(self.mark, floors.mark),
            drop: floor(self.drop, floors.drop),
        }
    }
}

impl QueueKind {
    /// The least lengths of thresholds that are not given.
    fn floors(self) -> Floors {
        let frames = |count| Bytes(count * FRAME.0);
        let (mark, drop) = match self {
            QueueKind::Alone => (2, 4),
            QueueKind::Paced => (16, 32),
            QueueKind::Windows => (32, 96),
            QueueKind::Departures => (8, 32),
            QueueKind::Bucket => (0, 0),
            QueueKind::Qdisc | QueueKind::ShortQdisc => (0, 88),
        };
        Floors { burst: frames(1), mark: frames(mark), drop: frames(drop) }
    }
}

/// The cost of a byte at `rate` in 2^-24 ns, rounded to the nearest.
#[must_use]
pub fn cost_of_byte(rate: Rate) -> u64 {
    let one_second = u128::from(8 * NANOS_PER_SEC) << COST_SHIFT;
    let bit_s = u128::from(rate.bit_s());
    u64::try_from((one_second + bit_s / 2) / bit_s).unwrap_or(u64::MAX)
}

/// No time is longer to [`scaled`], no cost of a byte higher, and no count of bytes to [`time_of`].
const MAX_SCALED: Nanos = Nanos(1 << 44);
const MAX_COST: u64 = 1 << 46;
const MAX_BYTES: u64 = 1 << 40;

/// How long `bytes` take when each costs `cost` 2^-24 ns, rounded down. More than 2^40 bytes count as so many,
/// and a cost above 2^46 as that: nothing wraps.
#[must_use]
pub fn time_of(bytes: u64, cost: u64) -> Nanos {
    let product = u128::from(bytes.min(MAX_BYTES)) * u128::from(cost.min(MAX_COST));
    Nanos((product >> COST_SHIFT) as u64)
}

/// The time of as many bytes when one costs `to` and no longer `from`, to 2^-16 of the ratio.
#[must_use]
pub fn scaled(time: Nanos, from: u64, to: u64) -> Nanos {
    let ns = time.min(MAX_SCALED).0;
    let (from, to) = (from.min(MAX_COST), to.min(MAX_COST));
    if from == 0 || to == 0 {
        Nanos(ns)
    } else if to <= from {
        Nanos((ns * ((to << 16) / from)) >> 16)
    } else {
        Nanos((ns << 16) / ((from << 16) / to).max(1))
    }
}

/// A backlog at another rate: as many bytes. At a slower one it grows, but not beyond the `drop` threshold:
/// what was right when it passed keeps nobody out for long.
#[must_use]
pub fn rescaled(backlog: Nanos, from: u64, to: u64, drop: Nanos) -> Nanos {
    let scaled = scaled(backlog, from, to);
    if scaled <= backlog { scaled } else { scaled.min(drop).max(backlog) }
}

/// A limiter that holds no packet.
#[derive(Debug, Clone)]
pub struct VirtualQueue {
    config: VirtualQueueConfig,
    direction: Direction,
    /// When a link of the limit's rate would have sent all that passed.
    finish: Nanos,
    /// The part of the last cost below a nanosecond, in 2^-24 ns.
    carry: u32,
}

impl VirtualQueue {
    /// A queue with its full burst credit.
    #[must_use]
    pub fn new(config: VirtualQueueConfig, direction: Direction) -> Self {
        VirtualQueue { config, direction, finish: Nanos(0), carry: 0 }
    }

    /// A queue in the middle of its work, for tests and simulation.
    #[must_use]
    pub fn with_finish(
        config: VirtualQueueConfig,
        direction: Direction,
        finish: Nanos,
        carry: u32,
    ) -> Self {
        VirtualQueue { config, direction, finish, carry }
    }

    /// Changes rate and thresholds. The backlog stays what it is in bytes ([`rescaled`]): as time, what is
    /// little at a slow rate would keep all out for seconds at a fast one.
    pub fn set_config(&mut self, now: Nanos, config: VirtualQueueConfig) {
        if let Ok(backlog @ 1..) = u64::try_from(backlog_ns(self.finish, now)) {
            let (from, to) = (self.config.cost, config.cost);
            self.finish = Nanos(now.0 + rescaled(Nanos(backlog), from, to, config.drop).0);
        }
        self.config = config;
    }

    /// The theoretical finish time.
    #[must_use]
    pub fn finish(&self) -> Nanos {
        self.finish
    }

    /// The part of a nanosecond that is still to be charged, in 2^-24 ns.
    #[must_use]
    pub fn carry(&self) -> u32 {
        self.carry
    }

    /// How far the queue is behind at `now`, in nanoseconds; negative for the credit that is left.
    #[must_use]
    pub fn backlog_ns(&self, now: Nanos) -> i64 {
        backlog_ns(self.finish, now).max(-(self.config.burst.0 as i64))
    }

    /// Judges a packet and charges it unless it is dropped. `random` is uniform over all of `u32`.
    pub fn on_packet(&mut self, now: Nanos, packet: &Packet, random: u32) -> Verdict {
        let verdict = self.decide(backlog_ns(self.finish, now), packet, random);
        if verdict.passes() {
            self.charge(now, packet.wire_bytes);
        }
        verdict
    }

    fn decide(&self, backlog_ns: i64, packet: &Packet, random: u32) -> Verdict {
        let above = |threshold: Nanos| backlog_ns > threshold.0 as i64;
        let config = &self.config;
        let large = packet.wire_bytes > SMALL_BYTES;
        if above(config.drop) {
            return Verdict::Drop(DropReason::Full);
        }
        if above(config.large_drop)
            && large
            && packet.transport != (Transport::Tcp { in_flight: false })
        {
            return Verdict::Drop(DropReason::Reserve);
        }
        if !above(config.mark) {
            return Verdict::Pass;
        }
        if packet.ecn_capable {
            return Verdict::Mark;
        }
        if !linear_law(config, backlog_ns, random) {
            return Verdict::Pass;
        }
        match (packet.transport, self.direction) {
            (Transport::Tcp { .. }, Direction::Egress) => Verdict::Slow,
            // A remote sender would take an early drop for more than is meant: half its window.
            (Transport::Tcp { .. }, Direction::Ingress) => Verdict::Pass,
            (Transport::Other, _) if large => Verdict::Drop(DropReason::Early),
            (Transport::Other, _) => Verdict::Pass,
        }
    }

    fn charge(&mut self, now: Nanos, wire_bytes: u32) {
        let bytes = u64::from(wire_bytes.min(MAX_PACKET_BYTES));
        let cost = bytes * self.config.cost + u64::from(self.carry);
        self.carry = (cost & ((1 << COST_SHIFT) - 1)) as u32;
        let idle_since = now.0.saturating_sub(self.config.burst.0);
        self.finish = Nanos(self.finish.0.max(idle_since) + (cost >> COST_SHIFT));
    }
}

fn backlog_ns(finish: Nanos, now: Nanos) -> i64 {
    finish.0.wrapping_sub(now.0) as i64
}

/// True with probability (backlog - mark) / (large_drop - mark).
fn linear_law(config: &VirtualQueueConfig, backlog_ns: i64, random: u32) -> bool {
    let range = config.large_drop.0 - config.mark.0;
    let over = backlog_ns as u64 - config.mark.0;
    (u64::from(random >> 8) * range) >> 24 < over
}

#[cfg(test)]
mod tests;
