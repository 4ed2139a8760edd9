//! What meets the packets at a limiter.

use std::collections::VecDeque;

use tidegate_core::{
    Nanos, Verdict,
    fleet::{ctb::TokenBucket, grd::Grd, gtb::Gtb, share::Grant},
    units::{Bytes, NANOS_PER_SEC},
    verdict::DropReason,
};

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
    /// A packet of `bytes` at a gate that decides at once; `random` is 64 uniform bits.
    pub fn on_packet(&mut self, now: Nanos, bytes: u32, random: u64) -> Verdict {
        match self {
            Gate::Bucket(bucket) => bucket.on_packet(now, bytes),
            Gate::Global(gtb) => gtb.on_packet(now, bytes),
            Gate::Random(grd) => grd.on_packet((random >> 32) as u32),
            Gate::Shaper(_) => Verdict::Drop(DropReason::Full),
        }
    }
}

/// A wait at which every packet is dropped.
pub const WAIT_MAX: Nanos = Nanos(250_000_000);
/// So many bytes may wait at any rate: two segments and a handshake.
const LEAST_BYTES: f64 = 3_200.0;

/// A packet that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    pub flow: usize,
    /// Its number in the flow.
    pub number: u64,
    pub sent: Nanos,
}

/// Packets wait for their turn at the rate, and are dropped at random, with the square of how long they
/// would wait: `p = (wait / 250 ms)^2`. A flow of Reno sends as the inverse root of `p`, so the wait is in
/// proportion to how many flows there are, and no flow is dropped more than another.
///
/// The rate changes for all that wait; when its grant ends it falls by itself. A packet leaves when its last
/// bit has been paid for.
#[derive(Debug)]
pub struct Shaper {
    grant: Grant,
    /// What was paid for, and what was let in, in bytes since the start; the latter is the end of the last
    /// packet.
    paid: f64,
    offered: f64,
    last: Nanos,
    waiting: VecDeque<(f64, Waiting)>,
}

impl Shaper {
    /// An idle shaper.
    pub fn new(grant: Grant) -> Self {
        Self { grant, paid: 0.0, offered: 0.0, last: Nanos(0), waiting: VecDeque::new() }
    }

    /// An idle shaper of one rate for ever, in bit/s.
    pub fn with_rate(bit_s: u64) -> Self {
        Self::new(Grant { bit_s, until: Nanos(u64::MAX), floor_bit_s: bit_s })
    }

    fn pay(&mut self, now: Nanos) {
        let now = now.max(self.last);
        let bytes = |bit_s: u64, ns: u64| bit_s as f64 / 8.0 * ns as f64 / NANOS_PER_SEC as f64;
        let end = self.grant.until.clamp(self.last, now);
        let paid = bytes(self.grant.bit_s, end.0 - self.last.0)
            + bytes(self.grant.floor_bit_s, now.0 - end.0);
        self.paid = (self.paid + paid).min(self.offered);
        self.last = now;
    }

    /// A new grant, from now on.
    pub fn set_grant(&mut self, now: Nanos, grant: Grant) {
        self.pay(now);
        self.grant = grant;
    }

    /// Lets a packet in or not; `random` is 64 uniform bits.
    pub fn offer(&mut self, now: Nanos, packet: Waiting, bytes: u32, random: u64) -> Verdict {
        self.pay(now);
        let bit_s = self.grant.at(now).max(1) as f64;
        let backlog = self.offered - self.paid;
        let part = backlog * 8e9 / bit_s / WAIT_MAX.0 as f64;
        if backlog > LEAST_BYTES {
            if part >= 1.0 {
                return Verdict::Drop(DropReason::Full);
            }
            if (random >> 11) as f64 / ((1u64 << 53) as f64) < part * part {
                return Verdict::Drop(DropReason::Early);
            }
        }
        self.offered += f64::from(bytes);
        self.waiting.push_back((self.offered, packet));
        Verdict::Pass
    }

    /// When the next packet leaves, as things are.
    pub fn next_departure(&self) -> Option<Nanos> {
        let left = (self.waiting.front()?.0 - self.paid).max(0.0) * 8e9;
        let Grant { bit_s, until, floor_bit_s } = self.grant;
        let good = until.0.saturating_sub(self.last.0) as f64;
        let ns = if left <= good * bit_s as f64 {
            left / bit_s.max(1) as f64
        } else {
            good + (left - good * bit_s as f64) / floor_bit_s.max(1) as f64
        };
        Some(Nanos(self.last.0.saturating_add(ns as u64 + 1)))
    }

    /// A packet that leaves now, if one does.
    pub fn pop(&mut self, now: Nanos) -> Option<Waiting> {
        self.pay(now);
        // What a sum of fractions may be off by.
        if self.waiting.front()?.0 > self.paid + 1e-3 {
            return None;
        }
        self.waiting.pop_front().map(|(_, packet)| packet)
    }
}

/// A bucket's depth as published.
pub const PUBLISHED_DEPTH: Bytes = Bytes(75_000);
