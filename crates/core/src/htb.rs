//! Scheme `htb`: from limits to the classes of the kernel's Hierarchical Token Bucket (Devera).
//!
//! HTB itself is the kernel's. This computes its settings, so that its classes mean the same as limits inside
//! limits do everywhere ([`crate::class`]). Each limit becomes two classes, one above the other. The inner
//! class never becomes a leaf, nor the other way round: that would cost HTB the queue.
//!
//! ```text
//!   limit            inner class: rate = guarantee (of a root its rate), ceil = the lowest ceiling upwards
//!    |-- its leaf    own traffic, of no limit inside: borrows all that it sends from its inner class
//!    |-- limit inside ...
//! ```
//!
//! - **rate.** The guarantee, sent before anything is borrowed. Without a guarantee [`LEAST`].
//! - **burst.** HTB sends a packet of any length while its tokens are not negative, and lets them become
//!   negative. So the burst needs no room for a segment: it only has to cover how late a timer may be, or
//!   rate is lost. `burst` of the limit, 1 ms by default, and at least a frame.
//! - **quantum.** Classes that borrow take turns, by deficit round robin in bytes. A turn shorter than a
//!   packet would make all weights equal, since each turn sends at least one packet. So the lightest has
//!   turns of the longest segment, and the others longer ones in proportion to their weights.
//! - **queue.** In bytes, for the time that it may hold at the ceiling: the kernel's default of 1000 packets
//!   is 64 MB of segments.

use alloc::{collections::BTreeMap, vec::Vec};

use crate::{
    class::{Class, Floors, MAX_DEPTH},
    units::{Bytes, MIN_RATE_BIT_S, Rate},
    virtual_queue::{MAX_SPAN, VirtualQueueConfig},
};

/// Limits of one tree; slot 0 is none.
pub const SLOTS: u16 = 1024;
/// The slot of the limit that the tree is for.
pub const ROOT_SLOT: u16 = 1;
/// The major number of the qdisc: "tg".
pub const MAJOR: u16 = 0x7467;
/// The major number of a leaf's qdisc is this plus its slot.
pub const QUEUE_MAJOR: u16 = 0x7500;
/// The rate of a class without a guarantee: HTB has no zero.
pub const LEAST: u64 = MIN_RATE_BIT_S;
/// The weight of the traffic of a limit that belongs to none of those inside it: that of most limits.
const OWN_WEIGHT: u32 = 100;
/// A full-sized Ethernet frame.
const FRAME: Bytes = Bytes(1514);
/// The largest quantum of HTB.
const QUANTUM_MAX: u64 = i32::MAX as u64;

/// A limit of a tree, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Its slot in the tree, [`ROOT_SLOT`] to [`SLOTS`].
    pub slot: u16,
    /// The slot of its parent.
    pub parent: Option<u16>,
    /// Its ceiling.
    pub ceiling: Rate,
    /// Its guarantee and weight among its siblings; unused for a root.
    pub class: Class,
    /// Its burst, mark threshold and queue as times at its own ceiling.
    pub config: VirtualQueueConfig,
    /// The least lengths of these.
    pub floors: Floors,
}

/// The settings of an HTB class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Sent before anything is borrowed.
    pub rate: Rate,
    /// The ceiling.
    pub ceil: Rate,
    /// Sent at once at the rate.
    pub burst: Bytes,
    /// Sent at once at the ceiling.
    pub cburst: Bytes,
    /// For a leaf: the quantum.
    pub quantum: Bytes,
}

/// The two classes of a limit and the queue of its leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Branch {
    /// The slot of the limit.
    pub slot: u16,
    /// The slot of its parent.
    pub parent: Option<u16>,
    /// The class of the limit.
    pub inner: Shape,
    /// The class of its own traffic.
    pub leaf: Shape,
    /// Length of the queue, in bytes.
    pub queue: Bytes,
    /// Above this packets are marked; `None`: never.
    pub mark: Option<Bytes>,
}

/// The number of the class of a limit in the qdisc.
#[must_use]
pub fn inner_minor(slot: u16) -> u16 {
    slot << 4 | 1
}

/// The number of its leaf; its last four bits are 0, see `bpf/htb/htb.h`.
#[must_use]
pub fn leaf_minor(slot: u16) -> u16 {
    slot << 4
}

/// The classes of HTB, each limit after its parent. `segment` is the longest packet of the device. A limit
/// whose parent is not among them, or that is in a circle, is left out. O(n log n).
#[must_use]
pub fn branches(limits: &[Limit], segment: Bytes) -> Vec<Branch> {
    let by_slot: BTreeMap<u16, &Limit> = limits.iter().map(|limit| (limit.slot, limit)).collect();
    let has_children = |slot| limits.iter().any(|limit| limit.parent == Some(slot));
    let parents: BTreeMap<u16, bool> =
        limits.iter().map(|limit| (limit.slot, has_children(limit.slot))).collect();
    let weight = |limit: &Limit| match parents.get(&limit.slot) {
        _ if limit.parent.is_none() => OWN_WEIGHT,
        Some(true) => OWN_WEIGHT,
        _ => limit.class.weight.max(1),
    };
    let lightest = limits.iter().map(weight).min().unwrap_or(OWN_WEIGHT);
    let mut found: Vec<(usize, Branch)> = Vec::with_capacity(limits.len());
    for limit in limits {
        let parent = |limit: &&Limit| by_slot.get(&limit.parent?).copied();
        let above: Vec<_> =
            core::iter::successors(Some(limit), parent).take(MAX_DEPTH + 1).collect();
        let is_rooted = above.last().is_some_and(|top| top.parent.is_none());
        if !is_rooted {
            continue;
        }
        let ceil = above.iter().map(|limit| limit.ceiling).min().unwrap_or(limit.ceiling);
        let least = Rate::from_bit_s(LEAST).unwrap_or(ceil).min(ceil);
        let rate = match limit.parent {
            None => ceil,
            Some(_) => limit.class.guarantee.unwrap_or(least).min(ceil),
        };
        let (config, floors) = (&limit.config, &limit.floors);
        let burst = |rate: Rate| rate.bytes_in(config.burst).max(floors.burst).max(FRAME);
        let turn = u128::from(segment.0.max(FRAME.0)) * u128::from(weight(limit));
        let turn = u64::try_from(turn / u128::from(lightest)).unwrap_or(QUANTUM_MAX);
        let shape =
            |rate, quantum| Shape { rate, ceil, burst: burst(rate), cburst: burst(ceil), quantum };
        let queue = ceil.bytes_in(config.drop).max(floors.drop);
        let branch = Branch {
            slot: limit.slot,
            parent: limit.parent,
            inner: shape(rate, segment),
            leaf: shape(least, Bytes(turn.min(QUANTUM_MAX))),
            queue,
            mark: (config.mark < MAX_SPAN).then(|| ceil.bytes_in(config.mark).max(floors.mark)),
        };
        found.push((above.len(), branch));
    }
    found.sort_by_key(|(depth, branch)| (*depth, branch.slot));
    found.into_iter().map(|(_, branch)| branch).collect()
}

/// Whether a packet is marked that joins a queue with `waiting` bytes.
#[must_use]
pub fn marks(waiting: u32, mark: Option<u32>) -> bool {
    mark.is_some_and(|mark| mark > 0 && waiting > mark)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Span, queue_options::VirtualQueueOptions, scheme::QueueKind};

    const SEGMENT: Bytes = Bytes(65_536);

    fn rate(text: &str) -> Rate {
        text.parse().unwrap()
    }

    fn limit(slot: u16, parent: Option<u16>, ceiling: &str, class: Class) -> Limit {
        let options = VirtualQueueOptions {
            kind: QueueKind::Qdisc,
            ..VirtualQueueOptions::new(rate(ceiling))
        };
        Limit {
            slot,
            parent,
            ceiling: rate(ceiling),
            class,
            config: options.config().unwrap(),
            floors: options.floors(),
        }
    }

    fn class(guarantee: &str, weight: u32) -> Class {
        Class { guarantee: guarantee.parse().ok(), weight }
    }

    #[test]
    fn one_limit_has_its_rate_and_a_leaf_that_borrows() {
        let [branch] = branches(&[limit(1, None, "1gbit", Class::default())], SEGMENT)[..] else {
            panic!("one branch");
        };
        assert_eq!((branch.inner.rate, branch.inner.ceil), (rate("1gbit"), rate("1gbit")));
        assert_eq!(branch.inner.burst, Bytes(125_000), "1 ms");
        assert_eq!((branch.leaf.rate, branch.leaf.ceil), (rate("8kbit"), rate("1gbit")));
        assert_eq!((branch.leaf.quantum, branch.leaf.burst), (SEGMENT, FRAME));
        assert_eq!((branch.queue, branch.mark), (Bytes(2_500_000), None), "20 ms");
    }

    #[test]
    fn a_slow_queue_holds_two_segments_and_a_burst_a_frame() {
        let branch = branches(&[limit(1, None, "1mbit", Class::default())], SEGMENT)[0];
        assert_eq!(branch.inner.burst, FRAME);
        assert!(branch.queue.0 >= 2 * 65_536, "{:?}", branch.queue);
    }

    #[test]
    fn turns_are_as_the_weights_and_never_shorter_than_a_segment() {
        let tree = [
            limit(1, None, "1gbit", Class::default()),
            limit(2, Some(1), "100gbit", class("300mbit", 50)),
            limit(3, Some(1), "200mbit", class("", 200)),
        ];
        let found = branches(&tree, SEGMENT);
        let turns: Vec<_> = found.iter().map(|b| b.leaf.quantum.0 / SEGMENT.0).collect();
        assert_eq!(turns, [2, 1, 4]);
        let shapes: Vec<_> = found.iter().map(|b| (b.inner.rate, b.inner.ceil)).collect();
        assert_eq!(
            shapes,
            [
                (rate("1gbit"), rate("1gbit")),
                (rate("300mbit"), rate("1gbit")),
                (rate("8kbit"), rate("200mbit")),
            ]
        );
    }

    #[test]
    fn what_hangs_on_nothing_is_left_out() {
        let tree = [
            limit(2, Some(3), "1gbit", Class::default()),
            limit(3, Some(2), "1gbit", Class::default()),
            limit(4, Some(9), "1gbit", Class::default()),
        ];
        assert!(branches(&tree, SEGMENT).is_empty());
    }

    #[test]
    fn a_threshold_in_bytes_stays_so_at_a_lower_ceiling() {
        let mut inside = limit(2, Some(1), "100gbit", Class::default());
        let options = VirtualQueueOptions {
            kind: QueueKind::Qdisc,
            mark: Some(Span::Size(Bytes(60_000))),
            ..VirtualQueueOptions::new(rate("100gbit"))
        };
        (inside.config, inside.floors) = (options.config().unwrap(), options.floors());
        let tree = [limit(1, None, "10mbit", Class::default()), inside];
        assert_eq!(branches(&tree, SEGMENT)[1].mark, Some(Bytes(60_000)));
    }

    #[test]
    fn a_queue_marks_above_its_threshold() {
        for (waiting, mark, marked) in [
            (0, None, false),
            (1_000_000, None, false),
            (60_000, Some(60_000), false),
            (60_001, Some(60_000), true),
            (u32::MAX, Some(1), true),
            (5, Some(0), false),
        ] {
            assert_eq!(marks(waiting, mark), marked, "{waiting} {mark:?}");
        }
    }

    proptest! {
        #[test]
        fn no_class_is_guaranteed_more_than_its_ceiling_nor_stands_before_its_parent(
            given in prop::collection::vec(
                (1u16..SLOTS, prop::option::of(1u16..12), 8_000u64..=100_000_000_000,
                 prop::option::of(8_000u64..=100_000_000_000), 1u32..=10_000),
                0..24,
            ),
            segment in 0u64..600_000,
        ) {
            let limits: Vec<_> = given
                .iter()
                .map(|(slot, parent, ceiling, guarantee, weight)| {
                    let ceiling = Rate::from_bit_s(*ceiling).unwrap();
                    let class = Class { guarantee: guarantee.and_then(Rate::from_bit_s), weight: *weight };
                    Limit { ceiling, ..limit(*slot, *parent, "1gbit", class) }
                })
                .collect();
            let mut seen = Vec::new();
            for branch in branches(&limits, Bytes(segment)) {
                for shape in [branch.inner, branch.leaf] {
                    prop_assert!(shape.rate <= shape.ceil);
                    prop_assert!(shape.burst >= FRAME && shape.cburst >= shape.burst);
                }
                prop_assert!((FRAME.0..=QUANTUM_MAX).contains(&branch.leaf.quantum.0));
                prop_assert!(branch.parent.is_none_or(|parent| seen.contains(&parent)));
                seen.push(branch.slot);
            }
        }
    }
}
