//! The next slots: a ring of lists, each first in, first out, and a bitmap over them.
//!
//! Everything here is indexed within one small ring, so it stays in the first caches. An insert has no branch
//! that depends on the slot's content:
//! - a node's number is also its link, and the first [`RING`] nodes are the heads of the lists, so an item is
//!   linked behind the last node of its slot whether the slot has items or not;
//! - two levels of bitmap find the next slot with an item in two look-ups;
//! - free nodes are a stack of numbers: a list of them would be followed node by node, each in another cache
//!   line.

use alloc::{boxed::Box, vec};
use core::array;

/// Slots in the ring; a power of two.
pub(super) const RING: usize = 64 * WORDS;
/// A bit each in [`Near::top`].
const WORDS: usize = 64;

#[derive(Debug, Clone, Copy)]
struct Node<T> {
    item: T,
    /// The next node; undefined in the last of a slot.
    next: u32,
}

/// Lists of items in [`RING`] slots. Slots are counted from time zero; the caller knows which of them are in
/// the ring.
#[derive(Debug, Clone)]
pub(super) struct Near<T> {
    /// The heads of the slots, then the items.
    nodes: Box<[Node<T>]>,
    /// The last node of a slot: its head if it is empty.
    last: Box<[u32; RING]>,
    /// Numbers of free nodes, up to `free_len`.
    free: Box<[u32]>,
    free_len: usize,
    /// A bit a slot that has items.
    words: [u64; WORDS],
    /// A bit a word that is not zero.
    top: u64,
}

impl<T: Copy + Default> Near<T> {
    /// No items; room for `capacity`.
    pub(super) fn new(capacity: usize) -> Self {
        let node = Node { item: T::default(), next: 0 };
        Self {
            nodes: vec![node; RING + capacity].into_boxed_slice(),
            last: Box::new(array::from_fn(|slot| slot as u32)),
            free: (RING as u32..(RING + capacity) as u32).rev().collect(),
            free_len: capacity,
            words: [0; WORDS],
            top: 0,
        }
    }

    /// Puts an item behind the others of its slot. The caller makes sure that there is room.
    #[inline]
    pub(super) fn push(&mut self, slot: u64, item: T) {
        let slot = slot as usize % RING;
        self.free_len -= 1;
        let node = self.free[self.free_len];
        self.nodes[node as usize].item = item;
        self.nodes[self.last[slot] as usize].next = node;
        self.last[slot] = node;
        self.words[slot / 64] |= 1 << (slot % 64);
        self.top |= 1 << (slot / 64);
    }

    /// Takes the first item of a slot that has one, and returns which is the first slot then: `u64::MAX` if
    /// there is none. No item may be in a slot before it, or in one that is a ring less 64 slots after it or
    /// more.
    #[inline]
    pub(super) fn take(&mut self, slot: u64) -> (T, u64) {
        let head = slot as usize % RING;
        let node = self.nodes[head].next;
        let Node { item, next } = self.nodes[node as usize];
        self.nodes[head].next = next;
        self.free[self.free_len] = node;
        self.free_len += 1;
        if self.last[head] != node {
            return (item, slot);
        }
        self.last[head] = head as u32;
        let (word, start) = (head / 64, slot & !63);
        let rest = self.words[word] & !(1 << (head % 64));
        self.words[word] = rest;
        if rest != 0 {
            return (item, start + u64::from(rest.trailing_zeros()));
        }
        self.top &= !(1 << word);
        if self.top == 0 {
            return (item, u64::MAX);
        }
        let ahead = self.top.rotate_right(word as u32).trailing_zeros();
        let found = self.words[(word + ahead as usize) % WORDS];
        (item, start + u64::from(64 * ahead + found.trailing_zeros()))
    }
}
