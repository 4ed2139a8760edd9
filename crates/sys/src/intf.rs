//! The values in the maps that the eBPF programs and user space share: bindgen's view of `intf.h` in
//! `bpf/common`, `bpf/nrm`, `bpf/edt` and `bpf/police`, where fields are explained, and the conversions from
//! and to the types of `tidegate-core`.

use std::ops::{Deref, DerefMut};

use tidegate_core::{
    Bytes, Class, Direction, Nanos, Rate, Scheme, VirtualQueueConfig,
    class::Floors,
    exempt::Exempt,
    fleet::flows::{SETS, WAYS},
    prefixes::MAX_PREFIXES,
    scheme::SCHEMES,
    token_bucket::BucketConfig,
    virtual_queue::cost_of_byte,
};

#[allow(dead_code, missing_docs, non_camel_case_types, clippy::all, clippy::pedantic)]
pub(crate) mod headers {
    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}
pub use headers::{
    Adoption, Bucket, ClassConf, Counters, EdtQueue, Entry, FlowCell, FlowCells, Group, Kept,
    Length, Lengths, Limit, Meter, NrmQueue, PlaceKey, PoliceCounters, Policy, Queue, QueueConf,
    Side, Slot, Turns,
};

/// The version of all that is here, and of the pins of a limit: one does not read the maps of another.
/// Kept with each limit (see `store/intent.rs`).
pub const ABI: u32 = 6;
/// The length of every per-direction array.
pub const DIRECTIONS: usize = headers::TG_DIRECTIONS as usize;
/// A limit, and after it by direction what it is once its time has come.
pub const COPY: usize = headers::TG_COPY as usize;
/// All of it twice.
pub const LIMITS: usize = headers::TG_LIMITS as usize;
/// Queues of a limit of schemes `pace` and `nrm`.
pub const QUEUES: usize = headers::TG_QUEUES as usize;
/// Slots of a pool of limits on cgroups, and of one whose limits are inside another. Slot 0 has no limit.
pub const SLOTS: u32 = headers::TG_SLOTS;
pub const SLOTS_INSIDE: u32 = headers::TG_SLOTS_INSIDE;
/// Sets of unpaced flows of a pool for each of its slots.
pub const SETS_PER_SLOT: u32 = headers::TG_SETS_PER_SLOT;
/// Number of outcomes that a packet may have.
pub const OUTCOMES: usize = headers::TG_OUTCOMES as usize;
/// Number of causes for which TCP waits for a timer.
pub const RISKS: usize = headers::TG_RISKS as usize;
/// Number of colours that a packet may have.
pub const COLOURS: usize = headers::PL_COLOURS as usize;
/// Buffers of each sample of flows.
pub const BUFFERS: u32 = headers::TG_BUFFERS;
/// Limits with prefixes that share maps.
pub const CHUNK: u32 = headers::TG_CHUNK;
/// Limits with prefixes that a device holds at most.
pub const PLACES: u32 = CHUNK * headers::TG_CHUNKS;
/// Prefixes of a device at most.
pub const PREFIXES_MAX: u32 = headers::TG_PREFIXES_MAX;
/// Different lengths of prefixes of one version of IP in one direction.
pub const LENGTHS_MAX: usize = headers::TG_LENGTHS_MAX as usize;
/// Versions of IP.
pub const FAMILIES: usize = headers::TG_FAMILIES as usize;

pub use headers::{
    TG_FLAG_EXEMPT as FLAG_EXEMPT, TG_FLAG_LOOPBACK as FLAG_LOOPBACK, TG_FLAG_MATCH as FLAG_MATCH,
    TG_FLAG_PACE_CEILING as FLAG_PACE_CEILING, TG_FLAG_PACE_FAIR as FLAG_PACE_FAIR,
    TG_FLAG_PORT as FLAG_PORT, TG_FLAG_XDP as FLAG_XDP,
};

// What the models have, too.
const _: () = assert!(
    headers::TG_EXEMPT_MAX as usize == MAX_PREFIXES
        && size_of::<FlowCells>() == SETS * WAYS * size_of::<FlowCell>()
);

/// The place of a direction in a per-direction array.
pub fn index(direction: Direction) -> usize {
    match direction {
        Direction::Egress => headers::TG_EGRESS as usize,
        Direction::Ingress => headers::TG_INGRESS as usize,
    }
}

impl From<VirtualQueueConfig> for QueueConf {
    fn from(config: VirtualQueueConfig) -> Self {
        QueueConf {
            cost: config.cost,
            burst_ns: config.burst.0,
            mark_ns: config.mark.0,
            large_drop_ns: config.large_drop.0,
            drop_ns: config.drop.0,
        }
    }
}

impl From<QueueConf> for VirtualQueueConfig {
    fn from(conf: QueueConf) -> Self {
        VirtualQueueConfig {
            cost: conf.cost,
            burst: Nanos(conf.burst_ns),
            mark: Nanos(conf.mark_ns),
            large_drop: Nanos(conf.large_drop_ns),
            drop: Nanos(conf.drop_ns),
        }
    }
}

impl ClassConf {
    /// As it lies in the map.
    pub fn new(class: Option<Class>, floors: &Floors) -> ClassConf {
        let bytes = |floor: Bytes| u32::try_from(floor.0).unwrap_or(u32::MAX);
        ClassConf {
            guarantee_bit_s: class.and_then(|c| c.guarantee).map_or(0, Rate::bit_s),
            weight: class.map_or(0, |c| c.weight),
            burst_bytes: bytes(floors.burst),
            mark_bytes: bytes(floors.mark),
            drop_bytes: bytes(floors.drop),
        }
    }

    /// Lengths below which no threshold falls.
    pub fn floors(&self) -> Floors {
        let bytes = |floor: u32| Bytes(floor.into());
        Floors {
            burst: bytes(self.burst_bytes),
            mark: bytes(self.mark_bytes),
            drop: bytes(self.drop_bytes),
        }
    }

    /// The place among siblings; `None` without a parent.
    pub fn class(&self) -> Option<Class> {
        let guarantee = Rate::from_bit_s(self.guarantee_bit_s);
        (self.weight != 0).then_some(Class { guarantee, weight: self.weight })
    }
}

impl Limit {
    /// How it acts. A limit whose maps this version reads has one of its schemes.
    pub fn scheme(&self) -> Scheme {
        SCHEMES.get(self.scheme as usize).map_or_else(Scheme::default, |info| info.scheme)
    }

    /// Whether its scheme has a qdisc at the root of a device; `None`: this version does not know the scheme,
    /// so it may have one.
    pub(crate) fn has_qdisc(&self) -> Option<bool> {
        SCHEMES.get(self.scheme as usize).map(|info| info.has_qdisc)
    }

    /// The direction, of the workload, of what leaves by the device of the limit.
    pub fn leaving(&self) -> Direction {
        if self.flags & FLAG_PORT != 0 { Direction::Ingress } else { Direction::Egress }
    }

    /// Whether it exempts somebody.
    pub fn exempts(&self) -> bool {
        self.exempt_dscps != 0 || self.flags & FLAG_EXEMPT != 0
    }

    /// Sets who is exempt, but for the prefixes themselves.
    pub fn set_exempt(&mut self, exempt: &Exempt) {
        self.exempt_dscps = exempt.dscps;
        self.flags &= !FLAG_EXEMPT;
        self.flags |= if exempt.prefixes.is_empty() { 0 } else { FLAG_EXEMPT };
    }

    /// Whether it has the packets of some prefixes alone.
    pub fn is_matched(&self) -> bool {
        self.flags & FLAG_MATCH != 0
    }

    /// Whether it is inside another limit.
    pub fn is_child(&self) -> bool {
        self.class.iter().any(|class| class.weight != 0)
    }
}

impl From<Limit> for Entry {
    fn from(common: Limit) -> Entry {
        Entry { common, ..Entry::default() }
    }
}

impl Deref for Entry {
    type Target = Limit;

    fn deref(&self) -> &Limit {
        &self.common
    }
}

impl DerefMut for Entry {
    fn deref_mut(&mut self) -> &mut Limit {
        &mut self.common
    }
}

#[cfg(test)]
impl From<Queue> for NrmQueue {
    fn from(common: Queue) -> NrmQueue {
        NrmQueue { common, ..NrmQueue::default() }
    }
}

impl Deref for NrmQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.common
    }
}

#[cfg(test)]
impl DerefMut for NrmQueue {
    fn deref_mut(&mut self) -> &mut Queue {
        &mut self.common
    }
}

impl From<BucketConfig> for Bucket {
    fn from(config: BucketConfig) -> Self {
        let BucketConfig { rate, burst, fill } = config;
        let cost = Rate::from_bit_s(rate).map_or(0, cost_of_byte);
        Bucket { cost, rate, burst, fill_ns: fill, earned_bytes: 0 }
    }
}

impl Meter {
    /// The side that packets use.
    pub fn side(&self) -> &Side {
        &self.side[(self.turn >> 1 & 1) as usize]
    }
}

impl Counters {
    /// Adds what another CPU has counted.
    pub fn add(&mut self, other: &Counters) {
        let sum = |to: &mut [u64], from: &[u64]| {
            to.iter_mut().zip(from).for_each(|(t, f)| *t = t.wrapping_add(*f));
        };
        sum(&mut self.packets, &other.packets);
        sum(&mut self.bytes, &other.bytes);
        let later = |(to, from): (&mut u64, &u64)| *to = (*to).max(*from);
        self.last_ns.iter_mut().zip(&other.last_ns).for_each(later);
    }
}

/// One kind of outcome: its place in [`Counters`], its name in JSON, and what it means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Name in snake case.
    pub name: &'static str,
    /// One sentence for help, documentation and metrics.
    pub help: &'static str,
    /// The packet went on.
    pub passed: bool,
}

impl Outcome {
    /// Whether it makes a sender slower: marks, signals and drops. Only these have a time in
    /// [`Counters::last_ns`], so that a packet that passes costs nothing.
    pub fn slows(&self) -> bool {
        !matches!(self.name, "pass" | "exempt")
    }
}

/// Every outcome in the order of `enum tg_outcome`: the one table from which status, JSON and docs speak.
pub const OUTCOME_TABLE: [Outcome; OUTCOMES] = [
    Outcome { name: "pass", help: "passed untouched", passed: true },
    Outcome { name: "mark", help: "passed with ECN congestion experienced", passed: true },
    Outcome { name: "slow", help: "passed, and the sender reduces its window", passed: true },
    Outcome { name: "drop_full", help: "dropped: backlog above the drop threshold", passed: false },
    Outcome {
        name: "drop_reserve",
        help: "dropped: only the reserve for small packets was left",
        passed: false,
    },
    Outcome {
        name: "drop_early",
        help: "dropped at random: for a group, or because the sender can neither be marked nor slowed",
        passed: false,
    },
    Outcome {
        name: "exempt",
        help: "passed uncharged: loopback, or named by `exempt`",
        passed: true,
    },
];

/// Why a packet was dropped that leaves TCP with nothing in flight, so that its request waits for a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Risk {
    /// Name in snake case.
    pub name: &'static str,
    /// What was dropped, and why.
    pub help: &'static str,
    /// What a user can do.
    pub remedy: &'static str,
    /// It is counted on ingress, where nobody knows what the sender has in flight.
    pub on_ingress: bool,
}

/// Every cause in the order of `enum tg_risk`: the one table from which status, JSON and docs speak.
pub const RISK_TABLE: [Risk; RISKS] = [
    Risk {
        name: "connecting",
        help: "the first packet of a connection (SYN or SYN-ACK), which TCP sends again when its timer ends",
        remedy: "raise the rate, or open fewer connections at once",
        on_ingress: true,
    },
    Risk {
        name: "credit_used",
        help: "the limit was behind by more than the credit for a packet with nothing else in flight",
        remedy: "raise the rate, or let fewer connections send at once",
        on_ingress: false,
    },
    Risk {
        name: "not_paced",
        help: "the limit does not pace its connection, and has no credit for it",
        remedy: "use scheme pace, and do not set SO_MAX_PACING_RATE above the share",
        on_ingress: false,
    },
];

#[cfg(test)]
mod tests {
    #[test]
    fn the_layout_is_that_of_the_abi() {
        assert_eq!(
            (super::ABI, env!("TIDEGATE_LAYOUT")),
            (6, "6531611906240412758"),
            "the layout has changed: raise ABI, and note its sum here"
        );
    }
}
