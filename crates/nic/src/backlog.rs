//! What waits in front of a shaper, for senders that cannot be made to wait: a bounded queue for each flow.
//!
//! A sender inside the process keeps its data until a completion calls for more
//! ([`tidegate_core::completion`]). A virtual machine behind a port cannot be made to wait: it learns by
//! marks and losses, and until it reacts its packets wait here.
//!
//! ```text
//! arrive(p) ──► its flow has less than two segments in the shaper ─────────────────────────► shaper
//!          └──► waits in the flow's queue ──► complete() of a packet of the flow: the next ──► shaper
//!                                              waited > mark and ECN-capable: marked CE
//!                                              else CoDel's law: dropped, and the next one
//! ```
//!
//! So the shaper holds two segments a flow, whatever waits; it shares the rate among flows, and a sparse flow
//! never waits here. Flows have queues of their own and cannot make each other lose, until there is no
//! room at all: then the longest queue (to a quarter) loses from its head, where a sender learns of it
//! soonest. O(1) a packet; no allocation after the start; time is an argument.

use tidegate_core::{
    Nanos,
    codel::{Codel, CodelOptions},
    completion::{ALLOWANCE_SEGMENTS, Ledger},
};

use crate::{
    ecn::{self, Ecn},
    packet::Packet,
};

const NONE: u32 = u32::MAX;
/// Sizes of queues that are distinguished: four to each power of two.
const LEVELS: usize = 128;

/// The bounds of a backlog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BacklogBounds {
    /// Flows.
    pub flows: usize,
    /// Packets, those in the shaper among them.
    pub packets: usize,
}

/// How long packets may wait, and how much of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BacklogLimits {
    /// Bytes that may wait, those in the shaper not among them.
    pub bytes: u64,
    /// A packet that waited longer is marked if its sender hears marks.
    pub mark: Nanos,
    /// When packets of other senders are dropped.
    pub codel: CodelOptions,
}

crate::counters::counter_table! {
    /// What a backlog did with packets.
    BacklogCounters, BacklogCounter:
    marked_packets: "packets marked with congestion experienced: they waited longer than `mark`",
    drop_early_packets: "packets dropped by CoDel's law: their sender hears no marks",
    drop_early_bytes: "their bytes on the wire",
    drop_full_packets: "packets dropped from the longest queue because the backlog was full",
    drop_full_bytes: "their bytes on the wire",
    drop_gone_packets: "packets dropped because the port that they were for was gone",
    drop_gone_bytes: "their bytes on the wire",
}

/// A packet on its way through the shaper.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Handle(u32);

/// A packet that is to be handed to the shaper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// What the shaper hands back.
    pub handle: Handle,
    /// Its length on the wire.
    pub bytes: u32,
}

/// A packet that has left the shaper.
#[derive(Debug)]
pub struct Left {
    /// The packet.
    pub packet: Packet,
    /// Since it arrived.
    pub waited: Nanos,
    /// The next one of its flow.
    pub next: Option<Ready>,
}

#[derive(Debug)]
struct Node {
    packet: Option<Packet>,
    arrived: Nanos,
    bytes: u32,
    next: u32,
}

/// The queue of a flow.
#[derive(Debug, Clone, Copy)]
struct Queue {
    first: u32,
    last: u32,
    bytes: u64,
    codel: Codel,
    /// Neighbours among the queues of its level; none while it is empty.
    before: u32,
    behind: u32,
    level: u8,
}

/// See the [module](self). Flows are numbered from zero by the owner.
#[derive(Debug)]
pub struct Backlog {
    limits: BacklogLimits,
    nodes: Box<[Node]>,
    free: u32,
    used: usize,
    queues: Box<[Queue]>,
    ledger: Ledger,
    /// The first queue of each level, and which levels have one.
    levels: [u32; LEVELS],
    occupied: u128,
    waiting_packets: usize,
    waiting_bytes: u64,
    counters: BacklogCounters,
}

impl Backlog {
    /// An empty backlog.
    pub fn new(bounds: BacklogBounds, limits: BacklogLimits) -> Self {
        let BacklogBounds { flows, packets } = bounds;
        let packets = packets.min(NONE as usize);
        let node = |next| Node { packet: None, arrived: Nanos(0), bytes: 0, next };
        let nodes: Box<[Node]> = (1..=packets as u32).map(node).collect();
        let queue = Queue {
            first: NONE,
            last: NONE,
            bytes: 0,
            codel: Codel::default(),
            before: NONE,
            behind: NONE,
            level: 0,
        };
        Self {
            limits,
            nodes,
            free: 0,
            used: 0,
            queues: vec![queue; flows].into_boxed_slice(),
            ledger: Ledger::new(flows, ALLOWANCE_SEGMENTS),
            levels: [NONE; LEVELS],
            occupied: 0,
            waiting_packets: 0,
            waiting_bytes: 0,
            counters: BacklogCounters::default(),
        }
    }

    /// Changes how long and how much may wait. What waits already is dropped only as more arrives.
    pub fn set_limits(&mut self, limits: BacklogLimits) {
        self.limits = limits;
    }

    /// Takes a packet in. If its flow may send, it is to be handed to the shaper now. Where there is no room
    /// and nothing else to drop, it is dropped itself.
    pub fn arrive(&mut self, now: Nanos, flow: usize, packet: Packet) -> Option<Ready> {
        // A queue with a packet in it has a length, also if a port gives a frame that has none.
        let bytes = u32::try_from(packet.wire_bytes()).unwrap_or(u32::MAX).max(1);
        let queued = self.queues.get(flow).is_none_or(|queue| queue.first != NONE);
        if self.used == self.nodes.len() && !self.drop_longest() {
            return self.refuse(bytes);
        }
        // One that waits already is first.
        if !queued && self.ledger.admit(flow, bytes) {
            let handle = Handle(self.store(now, bytes, packet));
            return Some(Ready { handle, bytes });
        }
        if flow >= self.queues.len() {
            return self.refuse(bytes);
        }
        let more = u64::from(bytes);
        while self.waiting_bytes + more > self.limits.bytes.max(more) && self.drop_longest() {}
        let node = self.store(now, bytes, packet);
        let queue = &mut self.queues[flow];
        match queue.last {
            NONE => queue.first = node,
            last => self.nodes[last as usize].next = node,
        }
        queue.last = node;
        self.resize(flow, more as i64);
        self.waiting_packets += 1;
        // The dropping above may have emptied the flow's own queue while it may send.
        self.next(now, flow)
    }

    /// A packet has left the shaper: gives it back, and the next one of its flow. None for a handle that is
    /// not out.
    pub fn complete(&mut self, now: Nanos, flow: usize, handle: Handle) -> Option<Left> {
        let node = self.nodes.get_mut(handle.0 as usize)?;
        let (arrived, bytes) = (node.arrived, node.bytes);
        let packet = node.packet.take()?;
        self.release(handle.0);
        self.ledger.complete(flow, bytes);
        let waited = Nanos(now.0.saturating_sub(arrived.0));
        Some(Left { packet, waited, next: self.next(now, flow) })
    }

    /// A packet that was to be handed to the shaper was refused there: drops it.
    pub fn refused(&mut self, flow: usize, handle: Handle) {
        if let Some(node) = self.nodes.get_mut(handle.0 as usize)
            && node.packet.take().is_some()
        {
            let bytes = node.bytes;
            self.release(handle.0);
            self.ledger.complete(flow, bytes);
            self.refuse(bytes);
        }
    }

    /// Drops a packet for a port that is gone: one that came out of the shaper, or that just arrived.
    pub fn gone(&mut self, packet: &Packet) {
        self.counters.drop_gone_packets += 1;
        self.counters.drop_gone_bytes += packet.wire_bytes();
    }

    /// Drops a packet that just arrived and has no flow.
    pub fn no_room(&mut self, packet: &Packet) {
        self.counters.drop_full_packets += 1;
        self.counters.drop_full_bytes += packet.wire_bytes();
    }

    /// Drops all that waits, because the port that it was for is gone. What is in the shaper is still to be
    /// completed.
    pub fn clear(&mut self) {
        while let Some(bytes) = self.longest().and_then(|flow| self.drop_first(flow)) {
            self.counters.drop_gone_packets += 1;
            self.counters.drop_gone_bytes += u64::from(bytes);
        }
    }

    /// Whether nothing of a flow is here or in the shaper.
    pub fn is_idle(&self, flow: usize) -> bool {
        self.ledger.in_shaper(flow) == 0
            && self.queues.get(flow).is_none_or(|queue| queue.first == NONE)
    }

    /// How many packets are here and in the shaper.
    pub fn packets(&self) -> usize {
        self.used
    }

    /// How many packets wait, and their bytes.
    pub fn waiting(&self) -> (usize, u64) {
        (self.waiting_packets, self.waiting_bytes)
    }

    /// What it did.
    pub fn counters(&self) -> BacklogCounters {
        self.counters
    }

    /// The next packet of a flow, if it has one and may send it.
    fn next(&mut self, now: Nanos, flow: usize) -> Option<Ready> {
        if self.queues.get(flow)?.first == NONE || !self.ledger.poll_room(flow) {
            return None;
        }
        // Each round takes one out; CoDel leaves the last.
        loop {
            let queue = &mut self.queues[flow];
            let first = queue.first;
            let node = &mut self.nodes[first as usize];
            let Some(packet) = &mut node.packet else { return None };
            let bytes = node.bytes;
            let waited = Nanos(now.0.saturating_sub(node.arrived.0));
            let behind = queue.bytes - u64::from(bytes);
            let capable = ecn::read(packet.frame()) != Ecn::NotCapable;
            // Asked in any case, so that its state is true for a flow of both kinds.
            let drops = queue.codel.drops(now, waited, behind, &self.limits.codel);
            if drops && !capable {
                self.counters.drop_early_packets += 1;
                self.counters.drop_early_bytes += u64::from(bytes);
                self.drop_first(flow);
                continue;
            }
            if waited > self.limits.mark && ecn::mark(packet.frame_mut()) {
                self.counters.marked_packets += 1;
            }
            self.take_first(flow);
            self.ledger.admit(flow, bytes);
            return Some(Ready { handle: Handle(first), bytes });
        }
    }

    /// Drops the first packet of the longest queue, if any waits.
    fn drop_longest(&mut self) -> bool {
        let dropped = self.longest().and_then(|flow| self.drop_first(flow));
        if let Some(bytes) = dropped {
            self.counters.drop_full_packets += 1;
            self.counters.drop_full_bytes += u64::from(bytes);
        }
        dropped.is_some()
    }

    fn refuse(&mut self, bytes: u32) -> Option<Ready> {
        self.counters.drop_full_packets += 1;
        self.counters.drop_full_bytes += u64::from(bytes);
        None
    }

    /// Drops the first packet of a queue; gives its length.
    fn drop_first(&mut self, flow: usize) -> Option<u32> {
        let node = self.take_first(flow)?;
        self.nodes[node as usize].packet = None;
        self.release(node);
        Some(self.nodes[node as usize].bytes)
    }

    /// Takes the first packet out of a queue; its node stays used.
    fn take_first(&mut self, flow: usize) -> Option<u32> {
        let queue = &mut self.queues[flow];
        let first = queue.first;
        let node = self.nodes.get(first as usize)?;
        queue.first = node.next;
        if queue.first == NONE {
            queue.last = NONE;
        }
        let bytes = i64::from(node.bytes);
        self.resize(flow, -bytes);
        self.waiting_packets -= 1;
        Some(first)
    }

    fn store(&mut self, now: Nanos, bytes: u32, packet: Packet) -> u32 {
        let index = self.free;
        let node = &mut self.nodes[index as usize];
        self.free = node.next;
        *node = Node { packet: Some(packet), arrived: now, bytes, next: NONE };
        self.used += 1;
        index
    }

    fn release(&mut self, index: u32) {
        self.nodes[index as usize].next = self.free;
        self.free = index;
        self.used -= 1;
    }

    /// The longest queue, to a quarter; none if nothing waits.
    fn longest(&self) -> Option<usize> {
        let level = (LEVELS as u32 - 1).checked_sub(self.occupied.leading_zeros())?;
        Some(self.levels[level as usize] as usize)
    }

    /// A queue has become longer or shorter: puts it among those of its level.
    fn resize(&mut self, flow: usize, by_bytes: i64) {
        let queue = &mut self.queues[flow];
        let (was, before) = (queue.bytes, queue.level);
        queue.bytes = was.saturating_add_signed(by_bytes);
        self.waiting_bytes = self.waiting_bytes.saturating_add_signed(by_bytes);
        queue.level = level(queue.bytes);
        let (is_empty, stays) = (queue.bytes == 0, queue.level == before);
        if was > 0 && (is_empty || !stays) {
            let Queue { before: left, behind: right, .. } = *queue;
            match left {
                NONE => self.levels[before as usize] = right,
                left => self.queues[left as usize].behind = right,
            }
            if right != NONE {
                self.queues[right as usize].before = left;
            }
            if self.levels[before as usize] == NONE {
                self.occupied &= !(1 << before);
            }
        }
        let queue = &mut self.queues[flow];
        if queue.bytes > 0 && (was == 0 || !stays) {
            let level = queue.level as usize;
            let right = std::mem::replace(&mut self.levels[level], flow as u32);
            (queue.before, queue.behind) = (NONE, right);
            if right != NONE {
                self.queues[right as usize].before = flow as u32;
            }
            self.occupied |= 1 << level;
        }
    }
}

/// The power of two that is not above `bytes`, and which quarter of the way to the next one.
fn level(bytes: u64) -> u8 {
    let bytes = bytes.clamp(4, u32::MAX.into());
    let power = bytes.ilog2();
    (power * 4) as u8 + (bytes >> (power - 2) & 3) as u8
}

#[cfg(test)]
mod tests;
