//! What meets the packets at a limiter.

use tidegate_core::{
    Nanos, Verdict,
    fleet::{ctb::TokenBucket, grd::Grd, gtb::Gtb, share::Grant},
    units::{Bytes, NANOS_PER_SEC},
    verdict::DropReason,
};

/// A gate.
#[derive(Debug)]
pub enum Gate {
    /// A policer, as published.
    Bucket(TokenBucket),
    /// GTB's bucket.
    Global(Gtb),
    /// GRD's drops.
    Random(Grd),
    /// A queue that holds packets back.
    Shaper(Shaper),
}

impl Gate {
    /// A packet of `bytes`; `random` is 64 uniform bits.
    pub fn on_packet(&mut self, now: Nanos, bytes: u32, random: u64) -> Verdict {
        match self {
            Gate::Bucket(bucket) => bucket.on_packet(now, bytes),
            Gate::Global(gtb) => gtb.on_packet(now, bytes),
            Gate::Random(grd) => grd.on_packet((random >> 32) as u32),
            Gate::Shaper(shaper) => shaper.on_packet(now, bytes, random),
        }
    }
}

/// A wait at which every packet is dropped.
pub const WAIT_MAX: Nanos = Nanos(250_000_000);
/// So many bytes may wait at any rate: two segments and a handshake.
const LEAST_BYTES: u64 = 3_200;

/// Packets wait for their turn at the rate, and are dropped at random, with the square of how long they
/// would wait: `p = (wait / 250 ms)^2`. A flow of Reno sends as the inverse root of `p`, so the wait is in
/// proportion to how many flows there are, and no flow is dropped more than another.
///
/// The rate changes for all that wait; when its grant ends it falls by itself.
#[derive(Debug)]
pub struct Shaper {
    grant: Grant,
    backlog_bytes: f64,
    last: Nanos,
}

impl Shaper {
    /// An idle shaper.
    #[must_use]
    pub fn new(grant: Grant) -> Self {
        Self { grant, backlog_bytes: 0.0, last: Nanos(0) }
    }

    /// An idle shaper of one rate for ever, in bit/s.
    #[must_use]
    pub fn with_rate(bit_s: u64) -> Self {
        Self::new(Grant { bit_s, until: Nanos(u64::MAX), floor_bit_s: bit_s })
    }

    fn drain(&mut self, now: Nanos) {
        let rate = |bit_s: u64, ns: u64| bit_s as f64 / 8.0 * ns as f64 / NANOS_PER_SEC as f64;
        let end = self.grant.until.clamp(self.last, now.max(self.last));
        let sent = rate(self.grant.bit_s, end.0 - self.last.0)
            + rate(self.grant.floor_bit_s, now.0.saturating_sub(end.0));
        self.backlog_bytes = (self.backlog_bytes - sent).max(0.0);
        self.last = self.last.max(now);
    }

    /// A new grant, from now on.
    pub fn set_grant(&mut self, now: Nanos, grant: Grant) {
        self.drain(now);
        self.grant = grant;
    }

    /// What it sent by `now`, given what was let in.
    pub fn backlog(&mut self, now: Nanos) -> f64 {
        self.drain(now);
        self.backlog_bytes
    }

    /// Lets a packet in or not. When it leaves is estimated at the present rate.
    pub fn on_packet(&mut self, now: Nanos, bytes: u32, random: u64) -> Verdict {
        self.drain(now);
        let bit_s = self.grant.at(now).max(1) as f64;
        let wait_ns = self.backlog_bytes * 8e9 / bit_s;
        let part = wait_ns / WAIT_MAX.0 as f64;
        if self.backlog_bytes > LEAST_BYTES as f64 {
            if part >= 1.0 {
                return Verdict::Drop(DropReason::Full);
            }
            if (random >> 11) as f64 / ((1u64 << 53) as f64) < part * part {
                return Verdict::Drop(DropReason::Early);
            }
        }
        self.backlog_bytes += f64::from(bytes);
        Verdict::SendAt(Nanos(now.0 + (self.backlog_bytes * 8e9 / bit_s) as u64))
    }
}

/// A bucket's depth as published.
pub const PUBLISHED_DEPTH: Bytes = Bytes(75_000);
