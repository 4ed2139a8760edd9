//! The flows of senders that cannot be paced, in a limit of scheme `pace`.
//!
//! An HTTP/3 server has one socket for all its clients. So a share belongs to a flow (addresses, transport
//! and ports), not to a socket. A flow earns its share all the time, and its packets pass while they are no
//! more than [`DEPTH`] ahead of that. So a reply of some packets arrives at once, and the flow has earned the
//! next one when its share says so. The packets of such a flow cannot be held here; beyond its share they
//! meet the virtual queue like senders of scheme `nrm`.
//!
//! A flow counts as a TCP flow does, by the bytes that it takes ([`super::Sent::takes`]): a flow that takes
//! half of a share is one of those that divide the limit, and what a smaller one takes is set aside for it.
//! If all of them were set aside, the share of the others would be what is left, and what is set aside would
//! be as many of those shares: with twenty such flows beside four the gain of this loop is five.
//!
//! A flow that is ahead of its share counts until it has earned that, also in epochs in which it is silent: a
//! link of its share would still be busy. So flows that send in bursts count like flows that send evenly.
//!
//! A flow that no earlier epoch has seen is a stranger. What it takes is set aside, it does not divide the
//! limit, and all strangers of an epoch together have half of it. So a sender that addresses each packet to
//! another host does not get a share with each packet. Beyond that half strangers meet the virtual queue.
//!
//! O(1) time. A flow has a cell of 40 bytes in a set of [`WAYS`]; a limit has [`SETS`] sets. A flow whose set
//! is full shares a cell, and its share, with another flow. The kernel's copy is `bpf/nrm/unpaced_flow.h`.

use crate::{
    fair_share::{KNOWN_EPOCHS, ONE},
    units::Nanos,
    virtual_queue::time_of,
};

use super::Sent;

/// Cells of a set.
pub const WAYS: usize = 4;
/// Sets of a limit.
pub const SETS: usize = 512;
/// The time by which a flow may be ahead of its share.
pub const DEPTH: Nanos = Nanos(50_000_000);
/// Bounds how long old traffic can delay the packets of a flow, however small its share was.
pub const MOST: Nanos = Nanos(1 << 34);

/// A flow.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// The hash of the flow that has the cell; 0: the cell is unused.
    pub flow: u64,
    /// When a link of the flow's share would have sent all that passed.
    pub finish: Nanos,
    /// The bytes that the flow took in its last epoch.
    pub sent: Sent,
    /// The last epoch in which it counted.
    pub seen: u32,
    /// The epoch in which the flow got the cell: in that epoch it is a stranger.
    pub began: u32,
}

/// How long a packet takes at `share` of the limit, in 2^-24, where a byte costs `cost` 2^-24 ns.
#[must_use]
pub fn time_at(bytes: u32, cost: u64, share: u64) -> Nanos {
    let time = time_of(bytes.into(), cost).min(MOST).0;
    Nanos(time * ONE / share.clamp(1, ONE)).min(MOST)
}

impl Flow {
    /// Whether a packet is within the flow's share; then it is charged.
    pub fn earns(&mut self, now: Nanos, bytes: u32, cost: u64, share: u64) -> bool {
        if self.finish.0 as i64 - now.0 as i64 > DEPTH.0 as i64 {
            return false;
        }
        self.finish = Nanos(self.finish.max(now).0 + time_at(bytes, cost, share).0);
        true
    }

    /// Whether the cell is free.
    #[must_use]
    pub fn is_free(&self, now: Nanos, epoch: u32) -> bool {
        self.flow == 0
            || (self.finish <= now && epoch.wrapping_sub(self.sent.epoch) > KNOWN_EPOCHS as u32)
    }
}

/// The cell of a flow, which is not 0, in its set.
pub fn find(set: &mut [Flow; WAYS], flow: u64, now: Nanos, epoch: u32) -> &mut Flow {
    let own = set.iter().position(|cell| cell.flow == flow);
    let index = own.unwrap_or_else(|| match set.iter().position(|cell| cell.is_free(now, epoch)) {
        Some(free) => {
            let sent = Sent { epoch, bytes: 0 };
            set[free] = Flow { flow, finish: set[free].finish, sent, seen: 0, began: epoch };
            free
        }
        None => flow as usize % WAYS,
    });
    &mut set[index]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{units::Rate, virtual_queue::cost_of_byte};

    const MS: u64 = 1_000_000;

    /// An HTTP/3 server answers with 10 kB a client, at a share of 2 Mbit/s: 40 ms of it.
    #[test]
    fn a_reply_comes_at_once_and_the_next_when_it_is_earned() {
        let cost = cost_of_byte(Rate::from_bit_s(50_000_000).unwrap());
        let share = ONE / 25;
        let mut flow = Flow::default();
        let passes = |flow: &mut Flow, at: u64| {
            flow.earns(Nanos(10_000 * MS + at * MS), 10_000, cost, share)
        };
        assert!(passes(&mut flow, 0));
        assert!(passes(&mut flow, 1), "39 ms ahead");
        assert!(!passes(&mut flow, 2), "78 ms ahead");
        assert!(passes(&mut flow, 31), "49 ms ahead");
    }

    #[test]
    fn a_flow_that_is_silent_leaves_its_cell() {
        let mut set = [Flow::default(); WAYS];
        let now = Nanos(MS);
        for flow in 1..=4 {
            let cell = find(&mut set, flow, now, 1);
            cell.sent.epoch = 1;
            cell.finish = Nanos(flow * MS);
        }
        assert_eq!(find(&mut set, 5, now, 2).flow, 2, "no cell is free: it shares one");
        let later = 1 + KNOWN_EPOCHS as u32;
        assert_eq!(find(&mut set, 5, Nanos(4 * MS), later).flow, 2, "epochs know them still");
        let cell = find(&mut set, 5, now, later + 1);
        assert_eq!((cell.flow, cell.sent.bytes), (5, 0), "the first has paid");
        assert_eq!(find(&mut set, 6, now, later + 1).flow, 3, "the others have not");
    }

    proptest! {
        /// In any time no flow passes more than its share, what it may be ahead, and a packet.
        #[test]
        fn a_flow_passes_its_share_and_no_more(
            bit_s in 8_000u64..=100_000_000_000, share in 1..=ONE,
            packets in prop::collection::vec((0u64..100 * MS, 1u32..70_000), 1..200),
        ) {
            let cost = cost_of_byte(Rate::from_bit_s(bit_s).unwrap());
            let (mut flow, begin) = (Flow::default(), Nanos(1 << 40));
            let (mut now, mut passed) = (begin, 0);
            for (gap, bytes) in packets {
                now = Nanos(now.0 + gap);
                let time = time_at(bytes, cost, share).0;
                if flow.earns(now, bytes, cost, share) {
                    passed += time;
                    prop_assert!(passed <= now.0 - begin.0 + DEPTH.0 + time);
                } else {
                    prop_assert!(passed > DEPTH.0);
                }
            }
        }
    }
}
