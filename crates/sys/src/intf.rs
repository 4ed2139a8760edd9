//! The Rust side of `bpf/common/intf.h`: what lies in the maps that the eBPF programs and user space share.
//!
//! Layout is compared with the C header by a test. Field meanings are in the header; here are the
//! conversions from and to the types of `tidegate-core`.

use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};
use tidegate_core::{
    Bytes, Class, Direction, Nanos, Rate, Scheme, VirtualQueueConfig,
    class::Floors,
    exempt::Exempt,
    fleet::flows::{SETS, WAYS},
    scheme::SCHEMES,
    token_bucket::BucketConfig,
    virtual_queue::cost_of_byte,
};

/// Number of directions, and the length of every per-direction array.
pub const DIRECTIONS: usize = 2;
/// The version of all that is below: maps of one are not read by another. Kept with each limit (see
/// `store/intent.rs`).
pub const ABI: u32 = 3;
/// A limit, and after it by direction what it is once its time has come: `TG_COPY`.
pub const COPY: usize = 1 + DIRECTIONS;
/// All of it twice: `TG_LIMITS`.
pub const LIMITS: usize = 2 * COPY;
/// Number of queues of a limit: those of its directions, and those of what belongs to none of its children.
pub const QUEUES: usize = 2 * DIRECTIONS;
/// Number of outcomes that a packet may have.
pub const OUTCOMES: usize = 7;
/// Number of causes for which TCP waits for a timer.
pub const RISKS: usize = 3;
/// `TG_STAYS`: epochs ahead in which a flow that cannot be paced may count.
pub const STAYS: usize = 16;

/// `TG_FLAG_LOOPBACK`.
pub const FLAG_LOOPBACK: u32 = 1 << 0;
/// `TG_FLAG_PACE_CEILING`.
pub const FLAG_PACE_CEILING: u32 = 1 << 1;

/// `TG_FLAG_PACE_FAIR`.
pub const FLAG_PACE_FAIR: u32 = 1 << 2;
/// `TG_FLAG_PORT`.
pub const FLAG_PORT: u32 = 1 << 3;
/// `TG_FLAG_XDP`.
pub const FLAG_XDP: u32 = 1 << 4;
/// `TG_FLAG_EXEMPT`.
pub const FLAG_EXEMPT: u32 = 1 << 5;
/// `TG_FLAG_MATCH`.
pub const FLAG_MATCH: u32 = 1 << 6;

/// The place of a direction in a per-direction array.
#[must_use]
pub fn index(direction: Direction) -> usize {
    match direction {
        Direction::Egress => 0,
        Direction::Ingress => 1,
    }
}

/// `struct vq_conf`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct QueueConf {
    /// Cost of a byte in 2^-24 ns; 0 is no limit.
    pub cost: u64,
    /// Credit of an idle queue.
    pub burst_ns: u64,
    /// Mark threshold.
    pub mark_ns: u64,
    /// Drop threshold of large packets.
    pub large_drop_ns: u64,
    /// Drop threshold.
    pub drop_ns: u64,
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

/// `struct cl_class`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ClassConf {
    /// What the limit has at least.
    pub guarantee_bit_s: u64,
    /// Its weight among its siblings; 0: it has no parent.
    pub weight: u32,
    /// Least length of the burst.
    pub burst_bytes: u32,
    /// Least mark threshold.
    pub mark_bytes: u32,
    /// Least drop threshold.
    pub drop_bytes: u32,
}

impl ClassConf {
    /// As it lies in the map.
    #[must_use]
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
    #[must_use]
    pub fn floors(&self) -> Floors {
        let bytes = |floor: u32| Bytes(floor.into());
        Floors {
            burst: bytes(self.burst_bytes),
            mark: bytes(self.mark_bytes),
            drop: bytes(self.drop_bytes),
        }
    }

    /// The place among siblings; `None` without a parent.
    #[must_use]
    pub fn class(&self) -> Option<Class> {
        let guarantee = Rate::from_bit_s(self.guarantee_bit_s);
        (self.weight != 0).then_some(Class { guarantee, weight: self.weight })
    }
}

/// `struct tg_limit`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Limit {
    /// By direction.
    pub queue: [QueueConf; DIRECTIONS],
    /// By direction.
    pub rate_bit_s: [u64; DIRECTIONS],
    /// By direction: its place among its siblings.
    pub class: [ClassConf; DIRECTIONS],
    /// The cgroup's inode number; of a device that of its network namespace.
    pub cgroup_id: u64,
    /// `FLAG_*`.
    pub flags: u32,
    /// Minimum retransmission time-out of TCP sockets; 0 leaves the kernel's.
    pub rto_min_us: u32,
    /// Longest delayed ACK of TCP sockets; 0 leaves the kernel's.
    pub delack_max_us: u32,
    /// The device's index; 0: a cgroup.
    pub ifindex: u32,
    /// The row of its scheme in [`SCHEMES`]; see [`Limit::scheme`].
    pub scheme: u32,
    /// Zero.
    pub pad: u32,
    /// Bit d is set if DSCP d is exempt.
    pub exempt_dscps: u64,
    /// By direction: from when on what stands at its place after this is in force; 0: never.
    pub until_ns: [u64; DIRECTIONS],
    /// Of the first entry of a map: the copy in force. Elsewhere it is zero.
    pub copy: u64,
}

impl Limit {
    /// How it acts. A limit whose maps this version reads has one of its schemes.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        SCHEMES.get(self.scheme as usize).map_or_else(Scheme::default, |info| info.scheme)
    }

    /// The direction, of the workload, of what leaves by the device of the limit.
    #[must_use]
    pub fn leaving(&self) -> Direction {
        if self.flags & FLAG_PORT != 0 { Direction::Ingress } else { Direction::Egress }
    }

    /// Whether it exempts somebody.
    #[must_use]
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
    #[must_use]
    pub fn is_matched(&self) -> bool {
        self.flags & FLAG_MATCH != 0
    }

    /// Whether it is inside another limit.
    #[must_use]
    pub fn is_child(&self) -> bool {
        self.class.iter().any(|class| class.weight != 0)
    }
}

/// `struct tg_police_limit`, the entry of the map of a policer. That of another scheme is its beginning.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Entry {
    /// As every scheme's.
    pub common: Limit,
    /// By direction.
    pub police: [Policy; DIRECTIONS],
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

/// `struct pl_bucket`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Bucket {
    /// Cost of a byte in 2^-24 ns; 0 is no limit.
    pub cost: u64,
    /// Units that a nanosecond adds: bit/s.
    pub rate: u64,
    /// Units that fit.
    pub burst: u64,
    /// How long an empty one takes to fill.
    pub fill_ns: u64,
    /// Bytes that it had been given, ever, when the policy came into force.
    pub earned_bytes: u64,
}

impl From<BucketConfig> for Bucket {
    fn from(config: BucketConfig) -> Self {
        let BucketConfig { rate, burst, fill } = config;
        let cost = Rate::from_bit_s(rate).map_or(0, cost_of_byte);
        Bucket { cost, rate, burst, fill_ns: fill, earned_bytes: 0 }
    }
}

/// Colours that a packet may have.
pub const COLOURS: usize = 3;

/// `struct pl_policy`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Policy {
    /// The bucket of the limit's own rate; its cost of 0 is no limit.
    pub committed: Bucket,
    /// The second one of a meter.
    pub second: Bucket,
    /// Bit d: what comes with code point d is yellow already.
    pub yellow_dscps: u64,
    /// ... or red.
    pub red_dscps: u64,
    /// `enum pl_kind`.
    pub kind: u8,
    /// Whether incoming colours count.
    pub aware: u8,
    /// `enum pl_action`, by colour.
    pub action: [u8; COLOURS],
    /// By colour: the new code point.
    pub dscp: [u8; COLOURS],
    /// How the depth of the second bucket was given: not, as time, or as bytes.
    pub second_given: u32,
    /// Whether the flows have equal parts of the committed bucket.
    pub fair: u32,
    /// When it came into force, CLOCK_BOOTTIME; always later than the one before.
    pub since_ns: u64,
}

/// `struct tg_queue`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Queue {
    /// Theoretical finish time, CLOCK_MONOTONIC.
    pub finish_ns: u64,
    /// How much idle time the finish time has skipped, ever.
    pub skipped_ns: u64,
    /// When this epoch began, CLOCK_MONOTONIC.
    pub epoch_start_ns: u64,
    /// Finish less skipped time when this epoch began.
    pub epoch_base_ns: u64,
    /// Smoothed round-trip time of the paced flows.
    pub rtt_ns: u64,
    /// Share of each flow, of the limit in 2^-24.
    pub share: u32,
    /// Number of this epoch.
    pub epoch: u32,
    /// Flows that sent data in this epoch.
    pub flows: u32,
    /// Flows that sent data in the epoch before.
    pub flows_before: u32,
    /// Flows established in this epoch.
    pub newcomers: u32,
    /// How long this epoch must last.
    pub epoch_us: u32,
    /// Of a child: what a byte costs at its present rate, from which its thresholds follow; 0: not yet.
    pub cost_now: u64,
    /// Of a child: its rate now; of a parent: what its children take parts of.
    pub rate_bit_s: u64,
    /// Of a parent: until when traffic of no child is a class of its own, CLOCK_MONOTONIC.
    pub children_until_ns: u64,
    /// What a byte cost when the last packet came, in 2^-24 ns; 0: none has.
    pub cost: u64,
    /// 1 while a CPU changes what is kept of the epoch.
    pub entered: u32,
    /// Zero.
    pub wait_ns: u32,
    /// When new connections begin.
    pub turns: Turns,
    /// Of a parent: what is guaranteed to its children that sent data in this epoch.
    pub reserved_bit_s: u64,
    /// ... and in the epoch before.
    pub reserved_before_bit_s: u64,
    /// Of a parent: what its children that sent data in this epoch weigh.
    pub weight: u32,
    /// ... and in the epoch before.
    pub weight_before: u32,
    /// Of a parent: what the lightest of them weighs.
    pub lightest: u32,
    /// ... and in the epoch before.
    pub lightest_before: u32,
    /// What is set aside in this epoch: for senders that cannot be paced up to one share each, and what flows
    /// take that take less than half of theirs.
    pub aside_ns: u64,
    /// ... and what was in the epoch before, of the limit in 2^-24.
    pub aside_before: u64,
    /// Of a child: the last epoch of its parent in which it was counted.
    pub counted_epoch: u32,
    /// Whether a sender that cannot be paced wanted more than one share in this epoch.
    pub flooded: u32,
    /// Behind windows: the finish time of what unpaced senders alone have sent.
    pub unpaced_finish_ns: u64,
    /// Flows that cannot be paced and count in an epoch, by its number, though they may be silent in it.
    pub stays: [u16; STAYS],
    /// The time of the packets of such flows that began in this epoch.
    pub strangers_ns: u64,
    /// By [`RISK_TABLE`]: dropped packets that leave TCP with nothing in flight, ever.
    pub at_risk: [u64; RISKS],
}

/// `struct ad_turns`: what new connections of a queue share.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Turns {
    /// When the turn of the next one comes, CLOCK_MONOTONIC.
    pub next_ns: u64,
    /// What a connection that is asked for takes before it is paced, in 2^-6 bytes.
    pub average: u32,
    /// The last one whose answer is to be held.
    pub asked: u32,
    /// How many were held, ever; it wraps.
    pub held: u32,
    /// The least retries of an answer that a listener has; 0: none is known.
    pub retries: u8,
    /// 1 while the listener that was seen last has many connections that wait, 2 from when one was seen that
    /// sends no answer again.
    pub crowded: u8,
    /// The direction whose turn the last one waits for.
    pub asked_of: u8,
    /// Zero.
    pub pad: u8,
}

/// `struct pl_kept`: a bucket whose times a side keeps.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Kept {
    /// Bit/s; 0: no bucket yet.
    pub rate: u64,
    /// Units that fit.
    pub burst: u64,
    /// As of [`Bucket`].
    pub earned_bytes: u64,
}

/// `struct pl_side`: the times of a meter, and the policy under which they were kept.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Side {
    /// When the committed bucket is full, CLOCK_BOOTTIME.
    pub full_ns: u64,
    /// For how long the committed bucket has been full, ever.
    pub skipped_ns: u64,
    /// When the second bucket is full; with srTCM by the clock of `skipped_ns`.
    pub second_full_ns: u64,
    /// Of the policy.
    pub since_ns: u64,
    /// The buckets.
    pub committed: Kept,
    /// ... of a meter.
    pub second: Kept,
    /// `enum pl_kind`.
    pub kind: u64,
}

/// `struct pl_meter`: what a policer has in the place of a [`Queue`].
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Meter {
    /// Twice the number of policies that it has met; odd while it is turned over to another.
    pub turn: u64,
    /// Every other turn has the first.
    pub side: [Side; 2],
}

impl Meter {
    /// The side that packets use.
    #[must_use]
    pub fn side(&self) -> &Side {
        &self.side[(self.turn >> 1 & 1) as usize]
    }
}

/// `struct tg_edt_queue`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct EdtQueue {
    /// As every scheme's.
    pub common: Queue,
    /// The latest departure of a flow's own schedule.
    pub latest_ns: u64,
    /// The largest packet of this epoch.
    pub largest_bytes: u32,
    /// Zero.
    pub pad: u32,
}

/// `struct tg_counters`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Counters {
    /// By outcome.
    pub packets: [u64; OUTCOMES],
    /// By outcome, on the wire.
    pub bytes: [u64; OUTCOMES],
    /// Fraction of a nanosecond still to be charged, in 2^-24 ns.
    pub carry: u32,
    /// Zero.
    pub pad: u32,
    /// When the last packet met each outcome that [slows](Outcome::slows), CLOCK_MONOTONIC; 0 is never.
    pub last_ns: [u64; OUTCOMES],
}

/// `struct tg_police_counters`: what a policer has in the place of [`Counters`].
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct PoliceCounters {
    /// As every scheme's.
    pub common: Counters,
    /// The part of the last cost below a nanosecond, in units.
    pub carry: u64,
    /// The same of the second bucket.
    pub second_carry: u64,
    /// By the colour that they got.
    pub packets: [u64; COLOURS],
    /// By the colour that they got, on the wire.
    pub bytes: [u64; COLOURS],
}

/// Limits of a device that share maps: `TG_CHUNK`.
pub const CHUNK: u32 = 32;
/// ... and how many times: `TG_CHUNKS`.
pub const CHUNKS: u32 = 128;
/// Limits with prefixes that a device holds at most.
pub const PLACES: u32 = CHUNK * CHUNKS;
/// Prefixes of a device at most.
pub const PREFIXES_MAX: u32 = 65_536;
/// Different lengths of prefixes of one version of IP in one direction.
pub const LENGTHS_MAX: usize = 16;
/// Versions of IP.
pub const FAMILIES: usize = 2;

/// `struct tg_length`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Length {
    /// Of an address that begins with a prefix of this length: the bits that count.
    pub mask: [[u8; 4]; 4],
    /// The length, as of an IPv6 address.
    pub bits: u32,
}

/// `struct tg_lengths`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Lengths {
    /// How many there are.
    pub count: u32,
    /// They, the longest first.
    pub length: [Length; LENGTHS_MAX],
}

/// `struct tg_place`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Pod, Zeroable)]
pub struct PlaceKey {
    /// The prefix.
    pub address: [u8; 16],
    /// Direction, family and length.
    pub what: u32,
}

/// Buffers of each sample of flows.
pub const BUFFERS: u32 = 2;

/// `struct tg_group`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Group {
    /// The probability at which a packet is dropped, in 2^-32.
    pub drop: u32,
    /// Into which buffer flows are counted, from 1 on; 0: they are not.
    pub sample: u32,
}

/// `struct sm_cell`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct FlowCell {
    /// The flow; 0 is none.
    pub flow: u64,
    /// Its bytes on the wire.
    pub bytes: u64,
}

/// `struct sm_counts`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct FlowCells {
    /// By set.
    pub sets: [[FlowCell; WAYS]; SETS],
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
    #[must_use]
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
    use std::mem::offset_of;

    use tidegate_core::prefixes::MAX_PREFIXES;

    use super::*;

    unsafe extern "C" {
        static native_intf_layout: [u64; 85];
        static native_intf_layout_len: u32;
    }

    #[test]
    fn the_layout_is_the_headers() {
        // SAFETY: both are constants of the test's C library, of these types.
        let (layout, len) = unsafe { (native_intf_layout, native_intf_layout_len) };
        let ours = [
            size_of::<QueueConf>(),
            size_of::<Limit>(),
            offset_of!(Limit, rate_bit_s),
            offset_of!(Limit, class),
            size_of::<ClassConf>(),
            offset_of!(ClassConf, drop_bytes),
            offset_of!(Limit, cgroup_id),
            offset_of!(Limit, flags),
            offset_of!(Limit, delack_max_us),
            offset_of!(Limit, ifindex),
            offset_of!(Limit, scheme),
            offset_of!(Limit, exempt_dscps),
            offset_of!(Limit, until_ns),
            offset_of!(Limit, copy),
            MAX_PREFIXES,
            size_of::<Entry>(),
            offset_of!(Entry, police),
            size_of::<EdtQueue>(),
            offset_of!(EdtQueue, latest_ns),
            offset_of!(EdtQueue, largest_bytes),
            size_of::<Policy>(),
            offset_of!(Policy, yellow_dscps),
            offset_of!(Policy, kind),
            offset_of!(Policy, second_given),
            offset_of!(Policy, since_ns),
            size_of::<Bucket>(),
            offset_of!(Bucket, earned_bytes),
            size_of::<Meter>(),
            offset_of!(Meter, side),
            size_of::<Side>(),
            offset_of!(Side, since_ns),
            offset_of!(Side, second),
            offset_of!(Side, kind),
            size_of::<Kept>(),
            offset_of!(Kept, earned_bytes),
            size_of::<Queue>(),
            offset_of!(Queue, epoch_base_ns),
            offset_of!(Queue, share),
            offset_of!(Queue, newcomers),
            offset_of!(Queue, cost_now),
            offset_of!(Queue, entered),
            offset_of!(Queue, turns),
            size_of::<Turns>(),
            offset_of!(Turns, crowded),
            offset_of!(Queue, lightest_before),
            offset_of!(Queue, unpaced_finish_ns),
            offset_of!(Queue, stays),
            STAYS,
            offset_of!(Queue, at_risk),
            RISKS,
            size_of::<Counters>(),
            offset_of!(Counters, bytes),
            offset_of!(Counters, carry),
            offset_of!(Counters, last_ns),
            size_of::<PoliceCounters>(),
            offset_of!(PoliceCounters, packets),
            offset_of!(PoliceCounters, bytes),
            size_of::<Group>(),
            offset_of!(Group, sample),
            size_of::<FlowCells>(),
            BUFFERS as usize,
            CHUNK as usize,
            CHUNKS as usize,
            PREFIXES_MAX as usize,
            LENGTHS_MAX,
            FAMILIES,
            size_of::<Length>(),
            offset_of!(Length, bits),
            size_of::<Lengths>(),
            size_of::<PlaceKey>(),
            offset_of!(PlaceKey, what),
            COPY,
            LIMITS,
            DIRECTIONS,
            QUEUES,
            OUTCOMES,
            FLAG_LOOPBACK as usize,
            FLAG_PACE_CEILING as usize,
            FLAG_PACE_FAIR as usize,
            FLAG_PORT as usize,
            FLAG_XDP as usize,
            FLAG_EXEMPT as usize,
            FLAG_MATCH as usize,
            index(Direction::Egress),
            index(Direction::Ingress),
        ];
        assert_eq!(len as usize, ours.len());
        assert_eq!(layout.map(|value| value as usize), ours);
        // FNV-1a of the numbers above.
        let sum = ours.iter().fold(0xcbf2_9ce4_8422_2325u64, |sum, value| {
            (sum ^ *value as u64).wrapping_mul(0x100_0000_01b3)
        });
        assert_eq!(
            (ABI, sum),
            (3, 5_447_722_162_735_945_823),
            "the layout has changed: raise ABI, and note its sum here"
        );
    }
}
