//! The part of an epoch that a limit of scheme `pace` sets aside: for senders that cannot be paced (UDP,
//! QUIC, raw sockets), and for flows that want little.
//!
//! A flow that takes at least half of its share in an epoch is one of those that share the limit. A flow that
//! takes less is not counted; what it takes is set aside ([`Sent::takes`]). This is one step of max-min
//! fairness: a flow that wants less than a share gets that, and the others divide the rest. So twenty
//! connections with a small request each leave to a bulk transfer all that they do not use, and it leaves to
//! them what they do. A flow that is new, or that took as much when it last sent, is counted with its first
//! packet ([`Sent::took_much`]). Otherwise flows that begin together would each take less than half of a
//! share that was computed without them, none would count, and the share would stay as it is.
//!
//! An unpaced flow has a share as a TCP flow has ([`flows`]). What it sends beyond earns it nothing, however
//! much that is: the time of any number of bytes at any rate is computed without a wrap ([`time_of`]).
//!
//! A connection that is expected to end soon is not a flow with a share. What its first segments take is set
//! aside, up to one share of an epoch ([`Sent::is_within`]).
//!
//! On ingress the virtual queue has room for TCP's windows, which may all be sent at once
//! ([`crate::receive_window`]). A sender without a window has no use for that room and would only fill it:
//! with 4.2 MB above the rate at 1 Gbit/s. So such senders meet the thresholds of a queue alone
//! ([`thresholds`]). Within their shares only their own traffic counts, so that they do not pay for a window
//! that is on its way; beyond them all traffic counts. In any time `t` no more of them passes than `rate x (t
//! + burst + drop)` and one packet, with `drop` of these thresholds.
//!
//! O(1) time; 8 bytes a flow, and one finish time. The kernel's copy is `bpf/nrm/unpaced.h`.

pub mod flows;

use crate::{
    fair_share::{MAX_EPOCH, MAX_SHARE},
    units::Nanos,
    virtual_queue::{MAX_PACKET_BYTES, VirtualQueueConfig, time_of},
};

/// The thresholds of a queue alone, in time ...
const MARK: Nanos = Nanos(500_000);
const DROP: Nanos = Nanos(4_000_000);
/// ... and their least lengths in bytes: two frames, and four.
const MARK_BYTES: u64 = 2 * 1514;
const DROP_BYTES: u64 = 4 * 1514;
/// More bytes than this in an epoch are beyond every share.
pub const MAX_BYTES: u32 = 1 << 31;
/// Ethernet's largest frame. A paced flow sends at least two at once. So a flow that sends no more than one
/// in an epoch wants little, however small its share has become.
pub const FRAME_BYTES: u32 = 1514;

/// One share of an epoch, in time at the limit's rate.
#[must_use]
pub fn fair(share: u64, epoch: Nanos) -> Nanos {
    Nanos((epoch.min(MAX_EPOCH).0 * (share.min(MAX_SHARE) >> 8)) >> 16)
}

/// The bytes that a sender has sent in an epoch within its share.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// Which epoch, numbered from one.
    pub epoch: u32,
    /// Bytes on the wire, with [`MAX_BYTES`] set once a flow has taken half of its share.
    pub bytes: u32,
}

impl Sent {
    /// Whether the sender is still within `fair` of the epoch, at `cost` 2^-24 ns a byte; then the packet
    /// counts. The last packet may exceed it.
    pub fn is_within(&mut self, epoch: u32, bytes: u32, cost: u64, fair: Nanos) -> bool {
        let counted = if self.epoch == epoch { self.bytes } else { 0 };
        if counted >= MAX_BYTES || time_of(u64::from(counted), cost) >= fair {
            return false;
        }
        *self = Sent { epoch, bytes: counted + bytes.min(MAX_PACKET_BYTES) };
        true
    }

    /// Counts a packet of a flow with a share, which is `fair` of the epoch. Returns whether the flow takes
    /// at least half of it, and more than a frame, and what to set aside for it in nanoseconds: negative with
    /// the packet that reaches the half, as what was set aside before is given back.
    pub fn takes(&mut self, epoch: u32, bytes: u32, cost: u64, fair: Nanos) -> (bool, i64) {
        let before = if self.epoch == epoch { self.bytes } else { 0 };
        let time = |bytes: u32| time_of(u64::from(bytes), cost).0 as i64;
        let is_much =
            |bytes| bytes >= MAX_BYTES || (bytes > FRAME_BYTES && time(bytes) >= fair.0 as i64 / 2);
        if is_much(before) {
            return (true, 0);
        }
        let after = before + bytes.min(MAX_PACKET_BYTES);
        if is_much(after) {
            *self = Sent { epoch, bytes: after | MAX_BYTES };
            return (true, -time(before));
        }
        *self = Sent { epoch, bytes: after };
        (false, time(after) - time(before))
    }

    /// Whether a flow has taken half of its share in this epoch. Until then its packets may pass a longer
    /// queue, also if the flow was counted with its first one: they may be the reply to a request.
    #[must_use]
    pub fn has_much(&self, epoch: u32) -> bool {
        self.epoch == epoch && self.bytes & MAX_BYTES != 0
    }

    /// Whether the flow took at least half of a share in an epoch before this one: it is expected to take as
    /// much again.
    #[must_use]
    pub fn took_much(&self, epoch: u32) -> bool {
        self.epoch != epoch && self.bytes & MAX_BYTES != 0
    }
}

/// The thresholds for unpaced senders of a queue that has room for windows. Shorter thresholds of the queue
/// stay.
#[must_use]
pub fn thresholds(config: &VirtualQueueConfig) -> VirtualQueueConfig {
    let least = |time: Nanos, bytes| time.max(time_of(bytes, config.cost));
    let drop = least(DROP, DROP_BYTES).min(config.drop);
    VirtualQueueConfig {
        mark: least(MARK, MARK_BYTES).min(config.mark),
        large_drop: Nanos(drop.0 - drop.0 / 8),
        drop,
        ..*config
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        fair_share::ONE, queue_options::VirtualQueueOptions, scheme::QueueKind, units::Rate,
        virtual_queue::COST_SHIFT,
    };

    fn windows(bit_s: u64) -> VirtualQueueConfig {
        let rate = Rate::from_bit_s(bit_s).unwrap();
        let options =
            VirtualQueueOptions { kind: QueueKind::Windows, ..VirtualQueueOptions::new(rate) };
        options.config().unwrap()
    }

    /// A share of an epoch is 40 ms of 8 kbit/s, 40 bytes. Whatever is offered beyond one packet is not
    /// within: the product of bytes and cost once wrapped at 1.1 MB, and a flood earned new shares.
    #[test]
    fn a_flood_earns_one_share_an_epoch() {
        let (cost, fair) = (windows(8_000).cost, fair(ONE / 5, Nanos(200_000_000)));
        let mut sent = Sent::default();
        let within = (0..3_000_000).filter(|_| sent.is_within(1, 1514, cost, fair)).count();
        assert_eq!(within, 1);
        assert!(sent.is_within(2, 1514, cost, fair), "the next epoch");
        // A rate that falls within an epoch makes much of what was sent.
        let mut sent = Sent { epoch: 1, bytes: 50_000_000 };
        assert!(!sent.is_within(1, 1514, cost, fair));
    }

    #[test]
    fn thresholds_are_those_of_a_queue_that_works_alone() {
        for bit_s in [8_000, 1_000_000, 50_000_000, 1_000_000_000, 100_000_000_000] {
            let alone =
                VirtualQueueOptions::new(Rate::from_bit_s(bit_s).unwrap()).config().unwrap();
            let got = thresholds(&windows(bit_s));
            for (got, alone) in
                [(got.mark, alone.mark), (got.large_drop, alone.large_drop), (got.drop, alone.drop)]
            {
                assert!(
                    got.0.abs_diff(alone.0) <= alone.0 / 1_000_000 + 1,
                    "{bit_s}: {got} {alone}"
                );
            }
        }
        let short = VirtualQueueConfig {
            mark: Nanos(1),
            large_drop: Nanos(7),
            drop: Nanos(8),
            ..windows(8_000)
        };
        assert_eq!(thresholds(&short), short, "what was given shorter");
    }

    /// A queue behind windows, as in the kernel's program.
    struct Queue {
        config: VirtualQueueConfig,
        all: u64,
        unpaced: u64,
    }

    impl Queue {
        /// The verdict on an unmarked packet; with TCP's own window-sized room.
        fn on_packet(&mut self, now: u64, cost: u64, unpaced: bool, within: bool) -> bool {
            let strict = thresholds(&self.config);
            let behind = |finish: u64| finish as i64 - now as i64;
            let passes = match (unpaced, within) {
                (false, _) => behind(self.all) <= self.config.drop.0 as i64,
                (true, true) => {
                    behind(self.all) <= self.config.drop.0 as i64
                        && behind(self.unpaced) <= strict.large_drop.0 as i64
                }
                (true, false) => behind(self.all) <= strict.large_drop.0 as i64,
            };
            let charge = |finish: &mut u64| {
                *finish = (*finish).max(now.saturating_sub(strict.burst.0)) + cost;
            };
            if passes {
                charge(&mut self.all);
                if unpaced {
                    charge(&mut self.unpaced);
                }
            }
            passes
        }
    }

    proptest! {
        /// Beside any TCP, and whatever is within a share, unpaced senders pass no more than a queue alone
        /// would pass, in any time.
        #[test]
        fn unpaced_senders_pass_no_more_than_alone(
            bit_s in prop_oneof![8_000u64..1_000_000, 1_000_000u64..10_000_000_000],
            steps in prop::collection::vec(
                (0u64..3_000, 100u32..9_000, any::<bool>(), any::<bool>()), 1..400),
        ) {
            let config = windows(bit_s);
            let strict = thresholds(&config);
            let mut queue = Queue { config, all: 0, unpaced: 0 };
            let mut now = 1 << 40;
            let mut passed: Vec<(u64, u64)> = Vec::new();
            for (gap, bytes, unpaced, within) in steps {
                let cost = time_of(u64::from(bytes), config.cost).0;
                now += gap * time_of(1, config.cost).0;
                if queue.on_packet(now, cost, unpaced, within) && unpaced {
                    passed.push((now, cost));
                }
            }
            for (index, (from, _)) in passed.iter().enumerate() {
                let mut sum = 0;
                for (to, cost) in &passed[index..] {
                    let bound = to - from + strict.burst.0 + strict.drop.0 + cost;
                    sum += cost;
                    prop_assert!(sum <= bound, "{sum} ns in {} ns, {bound}", to - from);
                }
            }
        }

        /// The bytes of a flow are set aside while they are below half of its share, and none from then on.
        #[test]
        fn what_a_small_flow_takes_is_set_aside(
            bit_s in 8_000u64..=100_000_000_000, share in 0..=ONE, epoch in 0u64..1 << 34,
            packets in prop::collection::vec(1u32..100_000, 1..200),
        ) {
            let (cost, fair) = (windows(bit_s).cost, fair(share, Nanos(epoch)));
            let (mut sent, mut bytes, mut aside) = (Sent::default(), 0u64, 0);
            for packet in packets {
                let (takes, change) = sent.takes(1, packet, cost, fair);
                (bytes, aside) = (bytes + u64::from(packet), aside + change);
                let time = time_of(bytes, cost);
                prop_assert_eq!(takes, time.0 >= fair.0 / 2 && bytes > u64::from(FRAME_BYTES));
                prop_assert_eq!(aside, if takes { 0 } else { time.0 as i64 });
            }
        }

        /// Whatever is sent, no more than a share and a packet counts in an epoch.
        #[test]
        fn no_more_than_a_share_and_a_packet_counts(
            bit_s in 8_000u64..=100_000_000_000, share in 0..=ONE, epoch in 0u64..1 << 34,
            packets in prop::collection::vec(any::<u32>(), 1..200),
        ) {
            let (cost, fair) = (windows(bit_s).cost, fair(share, Nanos(epoch)));
            let (mut sent, mut counted, mut last) = (Sent::default(), 0u128, 0);
            for bytes in packets {
                if sent.is_within(1, bytes, cost, fair) {
                    last = u128::from(bytes.min(MAX_PACKET_BYTES));
                    counted += last;
                }
            }
            prop_assert!(((counted - last) * u128::from(cost)) >> COST_SHIFT <= u128::from(fair.0));
        }
    }
}
