//! The queues that `wheel` compares: each keeps elements sorted by the time at which they may leave.
//!
//! | name | what it is | its order within a time |
//! |:--|:--|:--|
//! | `wheel` | [`tidegate_core::wheel`] | first in, first out |
//! | `list` | Carousel's first form: a linked list a slot, a node an allocation; lent our bitmap | the same |
//! | `crate` | [`hierarchical_hash_wheel_timer`], four wheels of 256 slots | as they come |
//! | `heap` | [`BinaryHeap`] over (time, number) | first in, first out |
//! | `tree` | [`BTreeMap`] over (time, number) | the same |
//! | `fq` | as the kernel's FQ: a hash of flows, a FIFO a flow, a tree over their first packets | the same |
//! | `nothing` | none: what the loop and its random numbers cost | |

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, LinkedList};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

use hierarchical_hash_wheel_timer::wheels::Skip;
use hierarchical_hash_wheel_timer::wheels::quad_wheel::QuadWheelWithOverflow;
use tidegate_core::Nanos;
use tidegate_core::slot_set::SlotSet;
use tidegate_core::wheel::{Wheel, WheelError, WheelOptions};

/// The granularity and horizon of every wheel, as Carousel has them by default: 2 us and 2 s, in powers of
/// two.
const SHIFT: u32 = 11;
const SLOTS: usize = 1 << 20;
/// How many packets of a flow wait on average in `fq`: with deferred completion a flow may have two in the
/// shaper, without it more.
const PACKETS_A_FLOW: usize = 4;

/// A queue of elements sorted by time.
pub(super) trait TimeQueue {
    /// Takes an element that may leave at `at_ns`.
    fn push(&mut self, at_ns: u64, item: u32);

    /// The element that may leave soonest, and the clock by which it may: never behind an earlier answer.
    fn pop(&mut self) -> Option<(u64, u32)>;
}

/// Tidegate's wheel, and the clock that it is asked with.
pub(super) struct OurWheel {
    wheel: Wheel<u32>,
    now: Nanos,
}

impl OurWheel {
    pub(super) fn new(elements: usize) -> Result<Self, WheelError> {
        let options = WheelOptions { capacity: elements, ..WheelOptions::default() };
        Ok(Self { wheel: Wheel::new(options, Nanos(0))?, now: Nanos(0) })
    }
}

impl TimeQueue for OurWheel {
    #[inline(always)]
    fn push(&mut self, at_ns: u64, item: u32) {
        // There is room: the queue was made for as many as there are.
        let _ = self.wheel.insert(self.now, Nanos(at_ns), item);
    }

    /// As a shaper that sleeps until the soonest is due.
    #[inline(always)]
    fn pop(&mut self) -> Option<(u64, u32)> {
        self.now = self.now.max(self.wheel.next_deadline()?);
        self.wheel.pop(self.now).map(|item| (self.now.0, item))
    }
}

/// A linked list a slot.
pub(super) struct ListWheel {
    slots: Vec<LinkedList<u32>>,
    occupied: SlotSet,
    front: u64,
}

impl ListWheel {
    pub(super) fn new() -> Self {
        let slots = (0..SLOTS).map(|_| LinkedList::new()).collect();
        Self { slots, occupied: SlotSet::new(SLOTS), front: 0 }
    }
}

impl TimeQueue for ListWheel {
    #[inline(always)]
    fn push(&mut self, at_ns: u64, item: u32) {
        let last = self.front + SLOTS as u64 - 1;
        let slot = at_ns.div_ceil(1 << SHIFT).clamp(self.front, last) as usize % SLOTS;
        if self.slots[slot].is_empty() {
            self.occupied.insert(slot);
        }
        self.slots[slot].push_back(item);
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<(u64, u32)> {
        let at = self.front as usize % SLOTS;
        let slot = self.occupied.next(at).or_else(|| self.occupied.next(0))?;
        self.front += (slot.wrapping_sub(at) % SLOTS) as u64;
        let item = self.slots[slot].pop_front()?;
        if self.slots[slot].is_empty() {
            self.occupied.remove(slot);
        }
        Some((self.front << SHIFT, item))
    }
}

/// The wheels of a crate. Its tick, which it calls a millisecond, stands for a slot.
pub(super) struct CrateWheel {
    wheel: QuadWheelWithOverflow<u32>,
    ticks: u64,
    due: std::vec::IntoIter<u32>,
}

impl CrateWheel {
    pub(super) fn new() -> Self {
        Self { wheel: QuadWheelWithOverflow::default(), ticks: 0, due: Vec::new().into_iter() }
    }
}

impl TimeQueue for CrateWheel {
    #[inline(always)]
    fn push(&mut self, at_ns: u64, item: u32) {
        // It refuses what is due at once; the next tick is the soonest that it knows.
        let ahead = at_ns.div_ceil(1 << SHIFT).saturating_sub(self.ticks).max(1);
        let _ = self.wheel.insert_with_delay(item, Duration::from_millis(ahead));
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<(u64, u32)> {
        loop {
            if let Some(item) = self.due.next() {
                return Some((self.ticks << SHIFT, item));
            }
            match self.wheel.can_skip() {
                Skip::Empty => return None,
                Skip::Millis(ticks) => {
                    self.wheel.skip(ticks);
                    self.ticks += u64::from(ticks);
                }
                Skip::None => {}
            }
            self.due = self.wheel.tick().into_iter();
            self.ticks += 1;
        }
    }
}

/// A binary heap.
#[derive(Default)]
pub(super) struct Heap {
    heap: BinaryHeap<Reverse<(u64, u32, u32)>>,
    number: u32,
}

impl TimeQueue for Heap {
    #[inline(always)]
    fn push(&mut self, at_ns: u64, item: u32) {
        self.number = self.number.wrapping_add(1);
        self.heap.push(Reverse((at_ns, self.number, item)));
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<(u64, u32)> {
        self.heap.pop().map(|Reverse((at_ns, _, item))| (at_ns, item))
    }
}

/// A B-tree.
#[derive(Default)]
pub(super) struct Tree {
    tree: BTreeMap<(u64, u32), u32>,
    number: u32,
}

impl TimeQueue for Tree {
    #[inline(always)]
    fn push(&mut self, at_ns: u64, item: u32) {
        self.number = self.number.wrapping_add(1);
        self.tree.insert((at_ns, self.number), item);
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<(u64, u32)> {
        self.tree.pop_first().map(|((at_ns, _), item)| (at_ns, item))
    }
}

/// A multiplication, as cheap as the kernel's hash.
#[derive(Default)]
pub(super) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 ^= self.0 >> 32;
    }
}

/// First and last packet of a flow; the packets between are linked in [`Fq::packets`].
#[derive(Clone, Copy)]
struct Flow {
    first: u32,
    last: u32,
}

const NONE: u32 = u32::MAX;

/// Flows sorted by when their first packet may leave.
pub(super) struct Fq {
    flows: HashMap<u32, Flow, BuildHasherDefault<Mix>>,
    /// (time of the first packet, a number that makes it unique) of a flow.
    tree: BTreeMap<(u64, u32), u32>,
    /// Time and successor, by the packet's handle.
    packets: Vec<(u64, u32)>,
    flow_count: u32,
    number: u32,
    now: u64,
}

impl Fq {
    pub(super) fn new(elements: usize) -> Self {
        Self {
            flows: HashMap::default(),
            tree: BTreeMap::new(),
            packets: vec![(0, NONE); elements],
            flow_count: (elements / PACKETS_A_FLOW).max(1) as u32,
            number: 0,
            now: 0,
        }
    }

    fn schedule(&mut self, flow: u32, at_ns: u64) {
        self.number = self.number.wrapping_add(1);
        self.tree.insert((at_ns.max(self.now), self.number), flow);
    }
}

impl TimeQueue for Fq {
    #[inline(always)]
    fn push(&mut self, at_ns: u64, item: u32) {
        self.packets[item as usize] = (at_ns, NONE);
        let flow = item % self.flow_count;
        let ends = self.flows.entry(flow).or_insert(Flow { first: NONE, last: NONE });
        if ends.first == NONE {
            *ends = Flow { first: item, last: item };
            self.schedule(flow, at_ns);
        } else {
            self.packets[ends.last as usize].1 = item;
            ends.last = item;
        }
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<(u64, u32)> {
        let ((at_ns, _), flow) = self.tree.pop_first()?;
        self.now = at_ns;
        let ends = self.flows.get_mut(&flow)?;
        let item = ends.first;
        ends.first = self.packets[item as usize].1;
        if ends.first != NONE {
            let next = self.packets[ends.first as usize].0;
            self.schedule(flow, next);
        }
        Some((at_ns, item))
    }
}

/// No queue: gives back what it was given last.
#[derive(Default)]
pub(super) struct Nothing {
    at_ns: u64,
    item: u32,
}

impl TimeQueue for Nothing {
    #[inline(always)]
    fn push(&mut self, at_ns: u64, item: u32) {
        (self.at_ns, self.item) = (at_ns, item);
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<(u64, u32)> {
        Some((self.at_ns, self.item))
    }
}
