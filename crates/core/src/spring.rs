//! SPRING: a shaper that limits how much TCP senders may have in flight, by the receive window of the ACKs
//! that come back to them (He et al., "Low Latency Software Rate Limiters for Cloud Networks", APNet 2017).
//! It needs no ECN, and no congestion control can ignore it.
//!
//! The law of the paper was not published. Earlier work of its authors (AC/DC, SIGCOMM 2016) is DCTCP outside
//! of the sender. That searches for a window that is known here: the rate, the queue and the round trip can
//! all be seen. So instead each flow gets
//!
//! ```text
//!   window = share x rate x (RTT + target)            at least 2 segments
//! ```
//!
//! where RTT is that of the path *behind* the queue: the time between a segment's arrival and its ACK, less
//! the time that the queue takes to be sent, read on arrival; of this the least of the last second. If all
//! flows use their windows, they have `rate x target` in the queue together, each its share of it. So all run
//! at exactly their share, whatever their round trips are. The shaper never idles; the delay is `target`.
//!
//! An ACK gets its window before it waits in the queue of the other direction, if that is limited, too. So
//! RTT is longer then by the [short debt](crate::wait::Account::short_debt) of that queue.
//!
//! `share` is the same for all flows: an equal part of what they leave over. An integral law (as in RCP,
//! Dukkipati 2007) finds it from what leaves the queue and from the queue's length:
//!
//! ```text
//!   every epoch:  share += share x ((1 - load) / 2 + (target - queue) / (2 (RTT + target)))
//!                 share  = clamp(share, 3/4 / flows, 2)
//!   a newcomer:   share x (flows - 1) / flows, but at least 1 / flows
//! ```
//!
//! - The right edge of the window is never taken back, and the receiver's own window is never exceeded. So a
//!   window shrinks only as data is acknowledged.
//! - A duplicate ACK is one by the window that its sender wrote. It gets the window of the ACK before it, so
//!   the receiver sees a duplicate, too.
//! - A share above one gives time instead, up to 1 ms: hosts stall, so the round trip is now and then longer
//!   than the least, and a flow that is alone would not fill the limit.
//! - Windows are whole segments, rounded so that each flow now and then gets one more.
//! - With less than two segments a receiver delays its ACK. If two segments of each flow are more than `rate
//!   x (RTT + target)` the queue is that long, and no window can help.
//! - The edge is known to the byte, so a sender that exceeds it is known as well: its data is dropped.
//! - Unknown flows are left alone: if the handshake was not seen the window scale is not known.
//!
//! O(1) a packet; about 80 bytes a flow. The kernel's copy is `bpf/acks/spring.h`.

use crate::units::{NANOS_PER_SEC, Nanos};

/// Shares and loads are fractions of the limit in 2^-24.
pub const ONE: u64 = 1 << 24;
/// The largest share.
pub const MOST: u64 = 2 * ONE;
/// The gain for a share of one, in time at the limit's rate.
pub const STALLS: Nanos = Nanos(1_000_000);
/// The target backlog, in time at the limit's rate.
pub const TARGET: Nanos = Nanos(50_000);
/// But at least this many full frames.
pub const LEAST_FRAMES: u64 = 4;
/// The least window, in segments: with less TCP delays its ACK.
pub const LEAST_SEGMENTS: u64 = 2;
/// How far a sender may exceed its window, in segments: it may probe.
pub const SLACK_SEGMENTS: u32 = 2;
/// Upper bound of a rate, in bytes a second: 100 Gbit/s.
pub const MAX_BYTE_S: u64 = 12_500_000_000;
/// Upper bound of a time; keeps the product with the largest rate in 64 bits.
pub const MAX_TIME: Nanos = Nanos(NANOS_PER_SEC);
/// The largest window that TCP can express, in bytes.
pub const MAX_BYTES: u64 = 1 << 30;
/// The largest window scale (RFC 7323, 2.3).
pub const MAX_SCALE: u8 = 14;
/// The least round trip that counts.
pub const MIN_RTT: Nanos = Nanos(1_000);
/// The least of a round trip is that of two such times.
pub const RTT_WINDOW: Nanos = Nanos(500_000_000);
/// A rate that changed by less than this part is the same.
pub const RATE_PART: u64 = 8;
/// The shortest epoch.
pub const MIN_EPOCH: Nanos = Nanos(2_000_000);
/// The longest: a flow of a longer path may be missed in one.
pub const MAX_EPOCH: Nanos = Nanos(100_000_000);
/// A flow that was silent for fewer epochs is not new.
pub const KNOWN_EPOCHS: u32 = 8;
/// Upper bound of the flow count.
pub const MAX_FLOWS: u32 = 1 << 16;
/// Headers of a full frame beyond its segment, in bytes: Ethernet, IPv4, TCP.
pub const HEADER_BYTES: u64 = 54;

/// The parameters of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The rate on the wire, in bytes a second.
    pub byte_s: u64,
    /// The target backlog of the queue.
    pub target: Nanos,
}

impl Config {
    /// For a limit of `byte_s` bytes a second whose full frames have `frame_bytes`: [`TARGET`], at least
    /// [`LEAST_FRAMES`].
    #[must_use]
    pub fn new(byte_s: u64, frame_bytes: u32) -> Self {
        let byte_s = byte_s.clamp(1, MAX_BYTE_S);
        let frames = LEAST_FRAMES * u64::from(frame_bytes) * NANOS_PER_SEC / byte_s;
        Config { byte_s, target: Nanos(frames.clamp(TARGET.0, MAX_TIME.0)) }
    }

    /// The bytes that are sent in a time.
    #[must_use]
    pub fn bytes(&self, time: Nanos) -> u64 {
        self.byte_s.min(MAX_BYTE_S) * time.min(MAX_TIME).0 / NANOS_PER_SEC
    }

    /// How long `bytes` take to be sent.
    #[must_use]
    pub fn time(&self, bytes: u64) -> Nanos {
        Nanos(bytes.min(MAX_BYTES) * NANOS_PER_SEC / self.byte_s.max(1)).min(MAX_TIME)
    }
}

/// The observations of one epoch of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch {
    /// How long it was.
    pub elapsed: Nanos,
    /// The bytes that left the queue.
    pub left_bytes: u64,
    /// The smoothed queue, in time at the limit's rate.
    pub backlog: Nanos,
    /// The longest round trip behind it of these flows.
    pub rtt: Nanos,
    /// Flows with acknowledged data.
    pub flows: u32,
}

/// The share of each flow in the next epoch.
#[must_use]
pub fn next_share(share: u64, config: &Config, epoch: &Epoch) -> u64 {
    let flows = u64::from(epoch.flows.clamp(1, MAX_FLOWS));
    let floor = ONE * 3 / 4 / flows;
    let elapsed = epoch.elapsed.0.clamp(1, MAX_TIME.0);
    let load = (config.time(epoch.left_bytes).0 * ONE / elapsed).min(ONE);
    let target = config.target.min(MAX_TIME).0;
    let delay = (epoch.rtt.min(MAX_TIME).0 + target).max(1);
    let backlog = epoch.backlog.min(MAX_TIME).0;
    let share = share.clamp(floor, MOST);
    let up = (share * (ONE - load)) >> 25;
    let share = if backlog <= target {
        share + up + ((share * ((target - backlog) * ONE / delay)) >> 25)
    } else {
        let over = ((backlog - target) * ONE / delay).min(ONE);
        share + up - ((share * over) >> 25)
    };
    share.clamp(floor, MOST)
}

/// The share for the rest of an epoch when the `flows`-th flow comes.
#[must_use]
pub fn join(share: u64, flows: u32) -> u64 {
    let flows = u64::from(flows.clamp(1, MAX_FLOWS));
    let share = share.min(ONE);
    (share * (flows - 1) / flows).max(share.min(ONE / flows))
}

/// How long an epoch must be to see all flows in it.
#[must_use]
pub fn epoch_length(config: &Config, rtt: Nanos, flows: u32, mss: u16) -> Nanos {
    let burst = LEAST_SEGMENTS * (u64::from(mss) + HEADER_BYTES);
    let round = config.time(u64::from(flows.min(MAX_FLOWS)) * burst).0;
    Nanos((2 * round.max(rtt.min(MAX_TIME).0)).clamp(MIN_EPOCH.0, MAX_EPOCH.0))
}

/// The part of a segment that a flow gets on top in an epoch, in 2^-16. Senders send whole segments: rounded
/// alike, the windows of many flows would all lose the same part at once. `hash` is any constant of the flow.
#[must_use]
pub fn phase(hash: u32, epoch: u32) -> u16 {
    // The golden ratio: over any run of epochs all parts occur evenly.
    (hash.wrapping_add(epoch.wrapping_mul(0x9e37_79b1)) >> 16) as u16
}

/// The window of a flow, payload in bytes: whole segments.
#[must_use]
pub fn window(config: &Config, share: u64, rtt: Nanos, mss: u16, phase: u16) -> u32 {
    let mss = u64::from(mss.max(1));
    let time = Nanos(rtt.min(MAX_TIME).0 + config.target.min(MAX_TIME).0).min(MAX_TIME);
    let (bytes, stalls) = (config.bytes(time), config.bytes(STALLS));
    let bytes = (bytes * share.min(ONE) + stalls * (share.clamp(ONE, MOST) - ONE)) >> 24;
    let segments = (bytes.min(MAX_BYTES) + ((mss * u64::from(phase)) >> 16)) / (mss + HEADER_BYTES);
    (segments.max(LEAST_SEGMENTS) * mss).min(MAX_BYTES) as u32
}

/// The round trip of a flow's path behind the queue.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct RoundTrip {
    /// The end of the segment that is timed, when it came, and how long it had to wait; zero time: none.
    pub probe: u32,
    /// See above.
    pub sent: Nanos,
    /// See above.
    pub wait: Nanos,
    /// The least so far, and the least of this window; zero: none.
    pub least: Nanos,
    /// See above.
    pub recent: Nanos,
    /// When this window began.
    pub since: Nanos,
    /// The cost of a byte when that segment came, in 2^-24 ns.
    pub cost: u64,
}

impl RoundTrip {
    /// Data that ends at `end` comes at `now`, and will wait for `wait` at this cost of a byte.
    pub fn on_data(&mut self, end: u32, now: Nanos, wait: Nanos, cost: u64) {
        if self.sent.0 == 0 {
            (self.probe, self.sent, self.wait, self.cost) = (end, now, wait, cost);
        }
    }

    /// Everything before `ack` has arrived, at this cost of a byte. True if there is a sample. There is none
    /// if the cost changed by more than 1 / [`RATE_PART`] meanwhile, as the wait of the segment is not known
    /// then.
    pub fn on_ack(&mut self, ack: u32, now: Nanos, cost: u64) -> bool {
        if self.sent.0 == 0 || (ack.wrapping_sub(self.probe) as i32) < 0 {
            return false;
        }
        if self.wait.0 > 0 && cost.abs_diff(self.cost) > cost.max(self.cost) / RATE_PART {
            self.sent = Nanos(0);
            return false;
        }
        let took = now.0.saturating_sub(self.sent.0).saturating_sub(self.wait.0);
        let took = Nanos(took.clamp(MIN_RTT.0, MAX_TIME.0));
        self.sent = Nanos(0);
        if self.least.0 == 0 || now.0.saturating_sub(self.since.0) > RTT_WINDOW.0 {
            self.least = if self.recent.0 == 0 { took } else { took.min(self.recent) };
            self.recent = took;
            self.since = now;
        } else {
            self.recent = self.recent.min(took);
            self.least = self.least.min(took);
        }
        true
    }
}

/// State of the windows of a flow.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// The furthest edge ever offered.
    pub edge: u32,
    /// The last ACK: its number, the window field that its sender wrote, and the one that it left with.
    pub ack: u32,
    /// See above.
    pub raw: u16,
    /// See above.
    pub said: u16,
    /// Whether there was one.
    pub known: bool,
}

/// An ACK as it comes from the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// Its number.
    pub ack: u32,
    /// The window field.
    pub raw: u16,
    /// The scale of it; 0 in a SYN.
    pub scale: u8,
    /// It carries no data.
    pub bare: bool,
}

impl Edge {
    /// The window field of the ACK that leaves, where the law gives `window` bytes. Never more than it came
    /// with.
    pub fn say(&mut self, ack: &Ack, window: u32) -> u16 {
        let scale = ack.scale.min(MAX_SCALE);
        let repeated = self.known && ack.ack == self.ack && ack.raw == self.raw;
        if repeated && ack.bare {
            return self.said.min(ack.raw);
        }
        let mut window = u64::from(window);
        let ahead = self.edge.wrapping_sub(ack.ack);
        if self.known && ahead < MAX_BYTES as u32 {
            window = window.max(u64::from(ahead));
        }
        // Rounded up, so that a window of some segments does not lose one of them.
        let units = window.div_ceil(1 << scale);
        let said = u64::from(ack.raw).min(units) as u16;
        let edge = ack.ack.wrapping_add(u32::from(said) << scale);
        if !self.known || (edge.wrapping_sub(self.edge) as i32) > 0 {
            self.edge = edge;
        }
        if !self.known || (ack.ack.wrapping_sub(self.ack) as i32) >= 0 {
            (self.ack, self.raw, self.said) = (ack.ack, ack.raw, said);
        }
        self.known = true;
        said
    }

    /// Whether data that ends at `end` is beyond all that the sender was ever allowed.
    #[must_use]
    pub fn is_beyond(&self, end: u32, mss: u16) -> bool {
        let beyond = end.wrapping_sub(self.edge) as i32;
        // Data far outside is not of this connection, and its receiver will say so.
        self.known && beyond > (SLACK_SEGMENTS * u32::from(mss)) as i32 && beyond < MAX_BYTES as i32
    }
}

#[cfg(test)]
mod tests;
