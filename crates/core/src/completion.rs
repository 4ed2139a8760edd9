//! Deferred completions: backpressure from a shaper to its senders.
//!
//! A packet is completed when it leaves the shaper, not when the shaper takes it, in whatever order packets
//! leave. Until then it counts against its flow's allowance. A flow without allowance waits: its data stays
//! with the sender, where it costs nothing and can still be cancelled. So a shaper holds at most two segments
//! a flow, however much its flows would like to send, and drops nothing (Carousel, Saeed et al., SIGCOMM
//! 2017; the allowance is that of TCP Small Queues).
//!
//! A *segment* is what a TCP stack sends at once: a millisecond at the flow's rate, 64 KB at most and a
//! packet at least (`tcp_tso_autosize` of Linux). A sender of smaller packets may have as many bytes of them
//! in the shaper. With only two packets of a fast flow there, a thread that is delayed by some microseconds
//! would cost the flow its time.
//!
//! The ledger is the sender's side. O(1) for each packet, 24 bytes a flow.

use alloc::{boxed::Box, vec};

use crate::units::{NANOS_PER_SEC, Nanos, Rate};

/// Segments that a flow may have in the shaper: one that leaves, and the next.
pub const ALLOWANCE_SEGMENTS: u32 = 2;
/// The longest segment, in bytes.
pub const SEGMENT_BYTES_MAX: u32 = 65_536;
/// The target time of a segment.
pub const SEGMENT_TIME: Nanos = Nanos(1_000_000);

/// The length of a segment of a flow of `rate` that sends one in `time`, in bytes. It may be less than a
/// packet.
#[must_use]
pub fn segment_bytes(rate: Rate, time: Nanos) -> u32 {
    let bytes = u128::from(rate.bit_s()) * u128::from(time.0) / u128::from(8 * NANOS_PER_SEC);
    bytes.min(SEGMENT_BYTES_MAX.into()) as u32
}

/// Packets and bytes of flows in the shaper. The owner numbers flows from zero.
#[derive(Debug, Clone)]
pub struct Ledger {
    flows: Box<[Account]>,
    allowance: u32,
    /// Completions for flows that had nothing in the shaper.
    unexpected: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Account {
    bytes: u64,
    in_shaper: u32,
    /// While one more packet stays within this, the flow may go on, however many packets that are.
    allowance_bytes: u32,
    waits: bool,
}

impl Account {
    #[inline]
    fn has_room(&self, allowance: u32) -> bool {
        let n = u64::from(self.in_shaper);
        // n packets and one more like them: bytes + bytes / n, against the allowance.
        self.in_shaper < allowance
            || self.bytes.saturating_mul(n + 1) <= n * u64::from(self.allowance_bytes)
    }
}

impl Ledger {
    /// A ledger of `flows` flows that may each have `allowance` packets in the shaper.
    #[must_use]
    pub fn new(flows: usize, allowance: u32) -> Self {
        Self {
            flows: vec![Account::default(); flows].into_boxed_slice(),
            allowance: allowance.max(1),
            unexpected: 0,
        }
    }

    /// Lets a flow have up to `bytes` in the shaper, in however many packets. It may go on while one more
    /// packet, of the average length, stays within.
    pub fn set_allowance_bytes(&mut self, flow: usize, bytes: u32) {
        if let Some(account) = self.flows.get_mut(flow) {
            account.allowance_bytes = bytes;
        }
    }

    /// Asks to give a packet to the shaper. False: not now; the flow may go on when [`Ledger::complete`]
    /// returns true. An unknown flow is never admitted.
    #[inline]
    pub fn admit(&mut self, flow: usize, bytes: u32) -> bool {
        let Some(account) = self.flows.get_mut(flow) else { return false };
        if !account.has_room(self.allowance) {
            account.waits = true;
            return false;
        }
        account.in_shaper += 1;
        account.bytes += u64::from(bytes);
        true
    }

    /// Whether [`Ledger::admit`] would admit a packet now. If not, the flow waits as if it had been refused.
    #[inline]
    pub fn poll_room(&mut self, flow: usize) -> bool {
        let Some(account) = self.flows.get_mut(flow) else { return false };
        let room = account.has_room(self.allowance);
        account.waits |= !room;
        room
    }

    /// Whether [`Ledger::admit`] would admit a packet now.
    #[must_use]
    pub fn has_room(&self, flow: usize) -> bool {
        self.flows.get(flow).is_some_and(|account| account.has_room(self.allowance))
    }

    /// A packet that was admitted with `bytes` has left the shaper, in whatever order. True if its flow waits
    /// and may send again.
    #[inline]
    pub fn complete(&mut self, flow: usize, bytes: u32) -> bool {
        match self.flows.get_mut(flow) {
            Some(account) if account.in_shaper > 0 => {
                account.in_shaper -= 1;
                account.bytes = account.bytes.saturating_sub(bytes.into());
                account.has_room(self.allowance) && core::mem::take(&mut account.waits)
            }
            _ => {
                self.unexpected += 1;
                false
            }
        }
    }

    /// How many packets of a flow are in the shaper.
    #[must_use]
    pub fn in_shaper(&self, flow: usize) -> u32 {
        self.flows.get(flow).map_or(0, |account| account.in_shaper)
    }

    /// Completions for flows that had nothing in the shaper: a fault of the caller.
    #[must_use]
    pub fn unexpected(&self) -> u64 {
        self.unexpected
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn segments_are_those_of_a_stack() {
        let bytes = |bit_s| segment_bytes(Rate::from_bit_s(bit_s).unwrap(), SEGMENT_TIME);
        assert_eq!([500_000, 300_000_000, 10_000_000_000].map(bytes), [62, 37_500, 65_536]);
        assert_eq!(segment_bytes(Rate::from_bit_s(u64::MAX).unwrap(), Nanos(u64::MAX)), 65_536);
        assert_eq!(segment_bytes(Rate::from_bit_s(1_000_000).unwrap(), Nanos(0)), 0);
    }

    proptest! {
        /// No flow exceeds its allowance, no waiting flow is forgotten, and flows are independent.
        #[test]
        fn holds_every_flow_to_its_allowance(
            allowance in 1u32..4,
            allowance_bytes in prop::sample::select(&[0u32, 3_000, 9_000][..]),
            steps in prop::collection::vec((0usize..5, prop::option::of(40u32..3_000)), 1..200),
        ) {
            let mut ledger = Ledger::new(4, allowance);
            (0..5).for_each(|flow| ledger.set_allowance_bytes(flow, allowance_bytes));
            let mut model = [const { (Vec::<u32>::new(), false) }; 5];
            for (flow, send) in steps {
                let known = flow < 4;
                let (out, waits) = &mut model[flow];
                let room = |out: &Vec<u32>| {
                    let (few, n) = (out.len() < allowance as usize, out.len() as u32);
                    known && (few || out.iter().sum::<u32>() * (n + 1) <= allowance_bytes * n)
                };
                if let Some(bytes) = send {
                    let room = room(out);
                    prop_assert_eq!(ledger.has_room(flow), room);
                    prop_assert_eq!(ledger.poll_room(flow), room);
                    prop_assert_eq!(ledger.admit(flow, bytes), room);
                    if room {
                        out.push(bytes);
                    }
                    *waits |= known && !room;
                } else {
                    let left = out.pop();
                    let wakes = left.is_some() && *waits && room(out);
                    prop_assert_eq!(ledger.complete(flow, left.unwrap_or(0)), wakes);
                    *waits &= !wakes;
                }
                prop_assert_eq!(ledger.in_shaper(flow) as usize, out.len());
            }
        }
    }
}
