//! SPRING: a shaper that tells TCP senders how much they may have on their way, in the receive window of the
//! ACKs that come back to them (He et al., "Low Latency Software Rate Limiters for Cloud Networks", APNet
//! 2017). No part in ECN is needed, and no congestion control can ignore it.
//!
//! The law of the paper was not published; what its authors did before (AC/DC, SIGCOMM 2016) is DCTCP, run
//! outside of the sender. It hunts for a window that is known here: the rate, the queue and the round trip
//! can all be seen. So instead each flow is told
//!
//! ```text
//!   window = share x rate x (RTT + target)            at least 2 segments
//! ```
//!
//! where RTT is that of the path *behind* the queue: what passed between a segment's arrival and its ACK,
//! less what the queue, looked at on arrival, takes to be sent; of this the least of the last second. If all
//! flows use their windows, they have `rate x target` in the queue together, each its share of it, and so all
//! run at their share exactly, whatever their round trips are. The shaper never idles; the delay is `target`.
//!
//! `share` is common to all flows. It is an equal part of what they leave over, found by an integral law (as
//! RCP, Dukkipati 2007) from what leaves the queue and from how long it is:
//!
//! ```text
//!   every epoch:  share += share x ((1 - load) / 2 + (target - queue) / (2 (RTT + target)))
//!                 share  = clamp(share, 3/4 / flows, 2)
//!   a newcomer:   share x (flows - 1) / flows, but at least 1 / flows
//! ```
//!
//! - The right edge of the window is never taken back, and the window that the receiver said is never
//!   exceeded. A smaller window therefore comes about as data is acknowledged.
//! - A duplicate ACK is one by the window that its sender said. It is given the window that the one before it
//!   was given, so it is a duplicate for who receives it too.
//! - A share above one gives time instead, up to 1 ms: hosts stall, so that the round trip is now and then
//!   longer than the least, and a flow that is alone would not fill the limit.
//! - Windows are whole segments, rounded so that each flow is now and then given one more.
//! - With less than two segments a receiver delays its ACK. Where two segments of each flow are more than
//!   `rate x (RTT + target)` the queue is as long as that, and no window can help.
//! - The edge is known to the byte, so a sender that goes beyond it is known as well: its data is dropped.
//! - What is not known is left alone: a flow whose handshake was not seen has no window scale.
//!
//! O(1) a packet; about 80 bytes a flow. The kernel's copy is `bpf/spring.h`.

use crate::units::{NANOS_PER_SEC, Nanos};

/// Shares and loads are fractions of the limit in 2^-24.
pub const ONE: u64 = 1 << 24;
/// The largest share.
pub const MOST: u64 = 2 * ONE;
/// What a share of one more gives, in time at the limit's rate.
pub const STALLS: Nanos = Nanos(1_000_000);
/// How much shall wait, in time at the limit's rate.
pub const TARGET: Nanos = Nanos(50_000);
/// But no less than so many full frames.
pub const LEAST_FRAMES: u64 = 4;
/// The least window, in segments: with less TCP delays its ACK.
pub const LEAST_SEGMENTS: u64 = 2;
/// What a sender may go beyond its window, in segments: it may probe.
pub const SLACK_SEGMENTS: u32 = 2;
/// No rate counts as higher, in bytes a second: 100 Gbit/s.
pub const MAX_BYTE_S: u64 = 12_500_000_000;
/// No time counts as longer; keeps the product with the largest rate in 64 bits.
pub const MAX_TIME: Nanos = Nanos(NANOS_PER_SEC);
/// No window is larger than TCP can say, in bytes.
pub const MAX_BYTES: u64 = 1 << 30;
/// The largest window scale (RFC 7323, 2.3).
pub const MAX_SCALE: u8 = 14;
/// Segments of a peer that does not say (RFC 9293, 3.7.1).
pub const DEFAULT_MSS: u16 = 536;
/// The least round trip that is believed.
pub const MIN_RTT: Nanos = Nanos(1_000);
/// The least of a round trip is that of two such times.
pub const RTT_WINDOW: Nanos = Nanos(500_000_000);
/// A rate that has changed by less than this part of it is the same.
pub const RATE_PART: u64 = 8;
/// The shortest epoch.
pub const MIN_EPOCH: Nanos = Nanos(2_000_000);
/// The longest: a flow of a longer path may be missed in one.
pub const MAX_EPOCH: Nanos = Nanos(100_000_000);
/// A flow that was silent for fewer epochs is no newcomer.
pub const KNOWN_EPOCHS: u32 = 8;
/// More flows count as so many.
pub const MAX_FLOWS: u32 = 1 << 16;
/// Headers of a full frame beyond its segment, in bytes: Ethernet, IPv4, TCP.
pub const HEADER_BYTES: u64 = 54;

/// What a limit is held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The rate on the wire, in bytes a second.
    pub byte_s: u64,
    /// How much shall wait in the queue.
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

    /// What is sent in a time, in bytes.
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

/// What one epoch has seen of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch {
    /// How long it was.
    pub elapsed: Nanos,
    /// What left the queue, in bytes.
    pub left_bytes: u64,
    /// The smoothed queue, in time at the limit's rate.
    pub backlog: Nanos,
    /// The longest round trip behind it of these flows.
    pub rtt: Nanos,
    /// Flows that data was acknowledged of.
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

/// How long an epoch must be for all flows to be seen in it.
#[must_use]
pub fn epoch_length(config: &Config, rtt: Nanos, flows: u32, mss: u16) -> Nanos {
    let burst = LEAST_SEGMENTS * (u64::from(mss) + HEADER_BYTES);
    let round = config.time(u64::from(flows.min(MAX_FLOWS)) * burst).0;
    Nanos((2 * round.max(rtt.min(MAX_TIME).0)).clamp(MIN_EPOCH.0, MAX_EPOCH.0))
}

/// What of a segment a flow is given on top in an epoch, in 2^-16. Senders send whole segments: rounded
/// alike, the windows of many flows would all lose the same part at once. `hash` is any constant of the flow.
#[must_use]
pub fn phase(hash: u32, epoch: u32) -> u16 {
    // The golden ratio: in any row of epochs all parts come up evenly.
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
    /// The end of the segment that is waited for, when it came, and what it had to wait; no time: none.
    pub probe: u32,
    /// See above.
    pub sent: Nanos,
    /// See above.
    pub wait: Nanos,
    /// The least so far, and of this window; zero: none.
    pub least: Nanos,
    /// See above.
    pub recent: Nanos,
    /// When this window began.
    pub since: Nanos,
    /// What a byte cost when that segment came, in 2^-24 ns.
    pub cost: u64,
}

impl RoundTrip {
    /// Data that ends at `end` comes at `now`, and will wait for `wait` where a byte has this cost.
    pub fn on_data(&mut self, end: u32, now: Nanos, wait: Nanos, cost: u64) {
        if self.sent.0 == 0 {
            (self.probe, self.sent, self.wait, self.cost) = (end, now, wait, cost);
        }
    }

    /// Data is sent again: what is acknowledged next may be either (Karn).
    pub fn on_repeat(&mut self) {
        self.sent = Nanos(0);
    }

    /// Everything before `ack` has arrived, and a byte has this cost. True if there is a sample: what has
    /// waited while that changed by more than 1 / [`RATE_PART`] is none, as nobody knows for how long.
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

/// What is known of the windows of a flow.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// The furthest that was ever said.
    pub edge: u32,
    /// Of the last ACK: its number, the window field that its sender wrote, and the one that went on.
    pub ack: u32,
    /// See above.
    pub raw: u16,
    /// See above.
    pub said: u16,
    /// There was one.
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
    /// It carries nothing else.
    pub bare: bool,
}

impl Edge {
    /// The window field to go on with, where the law gives `window` bytes. Never more than came.
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

    /// Whether data that ends at `end` is beyond what the sender was ever allowed.
    #[must_use]
    pub fn is_beyond(&self, end: u32, mss: u16) -> bool {
        let beyond = end.wrapping_sub(self.edge) as i32;
        // What is far out is not of this connection, and its receiver will say so.
        self.known && beyond > (SLACK_SEGMENTS * u32::from(mss)) as i32 && beyond < MAX_BYTES as i32
    }
}

#[cfg(test)]
mod tests;
