//! Deferred completions: backpressure from a shaper to its senders.
//!
//! A sender is told that a packet is done when the packet leaves the shaper, not when the shaper takes it,
//! and in whatever order packets leave. Until then the packet counts against its flow's allowance, and a
//! flow without allowance waits: its data stays with the sender, where it costs nothing and can still be
//! cancelled. So a shaper holds two segments a flow at most, however much its flows would like to send,
//! and drops nothing (Carousel, Saeed et al., SIGCOMM 2017; the allowance is that of TCP Small Queues).
//!
//! The ledger is the sender's side. O(1) for each packet, 8 bytes a flow.

use alloc::{boxed::Box, vec};

/// Segments that a flow may have in the shaper: one that leaves, and one to follow it.
pub const ALLOWANCE_SEGMENTS: u32 = 2;

/// What flows have in the shaper. Flows are numbered from zero by the owner.
#[derive(Debug, Clone)]
pub struct Ledger {
    flows: Box<[Account]>,
    allowance: u32,
    /// Completions for flows that had nothing in the shaper.
    unexpected: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Account {
    in_shaper: u32,
    waits: bool,
}

impl Ledger {
    /// A ledger of `flows` flows that may each have `allowance` segments in the shaper.
    #[must_use]
    pub fn new(flows: usize, allowance: u32) -> Self {
        Self {
            flows: vec![Account::default(); flows].into_boxed_slice(),
            allowance: allowance.max(1),
            unexpected: 0,
        }
    }

    /// Asks to hand a segment to the shaper. False: not now; the flow is told to go on by the
    /// [`Ledger::complete`] that returns true. An unknown flow is never admitted.
    #[inline]
    pub fn admit(&mut self, flow: usize) -> bool {
        let Some(account) = self.flows.get_mut(flow) else { return false };
        if account.in_shaper >= self.allowance {
            account.waits = true;
            return false;
        }
        account.in_shaper += 1;
        true
    }

    /// Whether [`Ledger::admit`] would admit a segment now.
    #[must_use]
    pub fn has_room(&self, flow: usize) -> bool {
        self.flows.get(flow).is_some_and(|account| account.in_shaper < self.allowance)
    }

    /// A segment has left the shaper, in whatever order. True if its flow waits and may send again.
    #[inline]
    pub fn complete(&mut self, flow: usize) -> bool {
        match self.flows.get_mut(flow) {
            Some(account) if account.in_shaper > 0 => {
                account.in_shaper -= 1;
                core::mem::take(&mut account.waits)
            }
            _ => {
                self.unexpected += 1;
                false
            }
        }
    }

    /// How many segments of a flow are in the shaper.
    #[must_use]
    pub fn in_shaper(&self, flow: usize) -> u32 {
        self.flows.get(flow).map_or(0, |account| account.in_shaper)
    }

    /// How many completions came for flows that had nothing in the shaper: a fault of the caller.
    #[must_use]
    pub fn unexpected(&self) -> u64 {
        self.unexpected
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// No flow has more than its allowance out, none that waits is forgotten, and flows are apart.
        #[test]
        fn holds_every_flow_to_its_allowance(
            allowance in 1u32..4,
            steps in prop::collection::vec((0usize..5, any::<bool>()), 1..200),
        ) {
            let mut ledger = Ledger::new(4, allowance);
            let mut model = [(0u32, false); 5];
            for (flow, send) in steps {
                let known = flow < 4;
                let (out, waits) = &mut model[flow];
                if send {
                    let room = known && *out < allowance;
                    prop_assert_eq!(ledger.has_room(flow), room);
                    prop_assert_eq!(ledger.admit(flow), room);
                    *out += u32::from(room);
                    *waits |= known && !room;
                } else {
                    let wakes = *out > 0 && *waits;
                    prop_assert_eq!(ledger.complete(flow), wakes);
                    *waits &= *out == 0;
                    *out = out.saturating_sub(1);
                }
                prop_assert_eq!(ledger.in_shaper(flow), *out);
            }
        }
    }
}
