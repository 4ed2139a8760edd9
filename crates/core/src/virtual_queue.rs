//! The virtual queue of NRM (Brakmo and Starovoitov, "BPF Host Network Resource Management"), without its
//! lock, with thresholds in time.
//!
//! A queue that holds no packet. It only stores when a link of the limit's rate would have finished sending
//! all that passed, the theoretical finish time. The distance from now to that time is the backlog, in
//! nanoseconds at the limit's rate; it is negative while burst credit is left. The backlog decides what
//! happens to the next packet:
//!
//! ```text
//!   -burst        0        mark                    large_drop       drop
//!      |----------|----------|--------------------------|-------------|------->  backlog
//!      :        pass         : mark, slow or early drop : small only  : drop all
//! ```
//!
//! - above `mark` an ECN-capable packet is marked; a local TCP sender reduces its congestion window, and what
//!   is not TCP is dropped, both with a probability that grows linearly to 1 at `large_drop`;
//! - above `large_drop` only small packets (ACK, SYN, DNS) pass, and those of a TCP sender with nothing in
//!   flight, which no ACK would make try again;
//! - above `drop` everything is dropped. A dropped packet is not charged.
//!
//! The backlog is read before the packet is added, so a packet of any size passes an idle queue: traffic
//! flows rather than stops. In any window of length `t` at most `rate x (t + burst + drop)` and one packet
//! pass.
//!
//! This differs from the published rule. The state is one 64-bit time, which the kernel's copy
//! (`bpf/common/vqueue.h`) advances with one atomic instruction where NRM took a spin lock. Thresholds are
//! times (600 000 bytes are 0.5 ms at 10 Gbit/s but 480 ms at 10 Mbit/s) with a floor of a few segments. The
//! cost of a byte is a fixed-point number with 24 fractional bits whose remainder is carried from packet to
//! packet, so the rate error stays below 1e-6 from [`MIN_RATE_BIT_S`](crate::units::MIN_RATE_BIT_S) to
//! [`MAX_RATE_BIT_S`](crate::units::MAX_RATE_BIT_S).
//!
//! The settings and their defaults are in [`crate::queue_options`].
//!
//! Each packet costs O(1) time; a queue is 16 bytes of state.

use crate::{
    units::{NANOS_PER_SEC, Nanos, Rate},
    verdict::{DropReason, Verdict},
};

/// Fractional bits of the cost of a byte.
pub const COST_SHIFT: u32 = 24;
/// Upper bound of a packet: 1 MiB, twice the largest segment that Linux builds.
pub const MAX_PACKET_BYTES: u32 = (1 << 20) - 1;
/// Upper bound of a burst or threshold: 512 s, a megabyte at the slowest rate.
pub const MAX_SPAN: Nanos = Nanos(512 * NANOS_PER_SEC);
/// A packet up to this length on the wire is small: an ACK, a SYN, a DNS question.
pub const SMALL_BYTES: u32 = 120;

/// The direction of packets, from the point of view of the limited workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the workload: congestion can be signalled to a local TCP sender.
    Egress,
    /// To the workload: only marks and drops reach the sender.
    Ingress,
}

impl Direction {
    /// Egress first.
    pub const BOTH: [Direction; 2] = [Direction::Egress, Direction::Ingress];

    /// The one of what comes back.
    #[must_use]
    pub fn other(self) -> Direction {
        if self == Direction::Egress { Direction::Ingress } else { Direction::Egress }
    }

    /// As users write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        if self == Direction::Egress { "egress" } else { "ingress" }
    }
}

/// The properties of a packet for the virtual queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Length on the wire with all headers of all its segments; clamped to [`MAX_PACKET_BYTES`].
    pub wire_bytes: u32,
    /// Whether its IP header says ECT(0), ECT(1) or CE.
    pub ecn_capable: bool,
    /// The transport that it carries.
    pub transport: Transport,
}

/// The transport of a packet, as far as it changes the signal to its sender.
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

/// Rate and thresholds of a virtual queue, in the form for the packet path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtualQueueConfig {
    /// Cost of a byte in 2^-24 ns.
    pub cost: u64,
    /// Credit that an idle queue may save up.
    pub burst: Nanos,
    /// Backlog above which congestion is signalled.
    pub mark: Nanos,
    /// Backlog above which large packets are dropped.
    pub large_drop: Nanos,
    /// Backlog above which every packet is dropped.
    pub drop: Nanos,
}

/// The cost of a byte at `rate` in 2^-24 ns, rounded to the nearest.
#[must_use]
pub fn cost_of_byte(rate: Rate) -> u64 {
    let one_second = u128::from(8 * NANOS_PER_SEC) << COST_SHIFT;
    let bit_s = u128::from(rate.bit_s());
    u64::try_from((one_second + bit_s / 2) / bit_s).unwrap_or(u64::MAX)
}

/// How long `bytes` take when each costs `cost` 2^-24 ns, rounded down. The kernel's header is exact for
/// bytes of 32 bits and each cost up to 2^56, which is more than that at 2 bit/s.
#[must_use]
pub fn time_of(bytes: u64, cost: u64) -> Nanos {
    let time = (u128::from(bytes) * u128::from(cost)) >> COST_SHIFT;
    Nanos(u64::try_from(time).unwrap_or(u64::MAX))
}

/// Upper bounds of a time and of a cost of a byte for [`scaled`].
const MAX_SCALED: Nanos = Nanos(1 << 44);
const MAX_COST: u64 = 1 << 46;

/// The time of the same bytes when one costs `to` and no longer `from`, to 2^-16 of the ratio.
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

/// A backlog at another rate: the same bytes. At a slower rate it grows, but not beyond the `drop` threshold,
/// which bounds how long old traffic can delay new packets.
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

    /// A queue with a backlog, for tests and simulation.
    #[must_use]
    pub fn with_finish(
        config: VirtualQueueConfig,
        direction: Direction,
        finish: Nanos,
        carry: u32,
    ) -> Self {
        VirtualQueue { config, direction, finish, carry }
    }

    /// Changes rate and thresholds. The backlog keeps its bytes ([`rescaled`]): kept as time, a small backlog
    /// at a slow rate would drop everything for seconds at a fast one.
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

    /// The backlog at `now`, in nanoseconds; negative for the credit that is left.
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
            // A remote sender would halve its window after an early drop, which is too much.
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
