//! Items that are not due soon: a bucket for each run of slots, with its items in the order in which they
//! came.
//!
//! An insert appends to its bucket, so few cache lines are written at a time, however many items there are. A
//! bucket is read from its start to its end once, when its time is near.

use alloc::{boxed::Box, vec};

use crate::slot_set::SlotSet;

/// Entries in a chunk of the pool: with handles of four bytes a chunk is a page. Large, so that the next
/// chunk is rarely looked up, and is read in sequence.
const CHUNK: usize = 512;

#[derive(Debug, Clone, Copy, Default)]
struct Entry<T> {
    /// The lower half of its slot.
    slot: u32,
    item: T,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    /// Where in the pool its first entry is.
    start: u32,
    /// Where its next entry goes; always free.
    end: u32,
    len: u32,
    /// The lower half of the least slot since it was last empty.
    least: u32,
}

/// Buckets of items. A bucket owns the chunk of its own number, where it starts.
#[derive(Debug, Clone)]
pub(super) struct Far<T> {
    buckets: Box<[Bucket]>,
    occupied: SlotSet,
    pool: Box<[Entry<T>]>,
    /// The chunk that follows a chunk, in its bucket or among the free ones.
    next: Box<[u32]>,
    free: u32,
}

impl<T: Copy + Default> Far<T> {
    /// No items; room for `capacity`.
    pub(super) fn new(buckets: usize, capacity: usize) -> Self {
        // A full bucket continues in another chunk. In the bucket that is being read, its own chunk may be
        // done already, and the first and the last may be partly empty.
        let chunks = buckets + capacity / CHUNK + 2;
        Self {
            buckets: (0..buckets).map(empty).collect(),
            occupied: SlotSet::new(buckets),
            pool: vec![Entry::default(); chunks * CHUNK].into_boxed_slice(),
            next: (1..=chunks as u32).collect(),
            free: buckets as u32,
        }
    }

    /// Appends an item to a bucket. The caller makes sure that there is room.
    #[inline]
    pub(super) fn push(&mut self, bucket: u64, slot: u64, item: T) {
        let index = self.index(bucket);
        let bucket = &mut self.buckets[index];
        let at = bucket.end as usize;
        self.pool[at] = Entry { slot: slot as u32, item };
        bucket.end += 1;
        bucket.least = bucket.least.min(slot as u32);
        bucket.len += 1;
        if bucket.len == 1 {
            self.occupied.insert(index);
        }
        if at % CHUNK == CHUNK - 1 {
            self.extend(index, at / CHUNK);
        }
    }

    #[cold]
    fn extend(&mut self, index: usize, full: usize) {
        let chunk = self.free;
        self.free = self.next[chunk as usize];
        self.next[full] = chunk;
        self.buckets[index].end = chunk * CHUNK as u32;
    }

    /// How many items a bucket has.
    #[inline]
    pub(super) fn len(&self, bucket: u64) -> u32 {
        self.buckets[self.index(bucket)].len
    }

    /// Takes the first `count` items of a bucket, or as many as there are, with the lower halves of their
    /// slots.
    #[inline]
    pub(super) fn take(&mut self, bucket: u64, count: u32, mut take: impl FnMut(u32, T)) {
        let index = self.index(bucket);
        let Bucket { mut start, end, len, .. } = self.buckets[index];
        let mut left = count.min(len);
        self.buckets[index].len -= left;
        while left > 0 {
            let at = start as usize;
            let run = (CHUNK - at % CHUNK).min(left as usize);
            for entry in &self.pool[at..at + run] {
                take(entry.slot, entry.item);
            }
            left -= run as u32;
            start += run as u32;
            if at % CHUNK + run == CHUNK {
                let chunk = at / CHUNK;
                start = self.next[chunk] * CHUNK as u32;
                self.release(chunk);
            }
        }
        self.buckets[index].start = start;
        if count >= len {
            self.release(end as usize / CHUNK);
            self.buckets[index] = empty(index);
            self.occupied.remove(index);
        }
    }

    /// The lower half of the soonest slot, of bucket `from` and those behind it.
    #[inline]
    pub(super) fn soonest(&self, from: u64) -> Option<u32> {
        let index = self.occupied.next(self.index(from)).or_else(|| self.occupied.next(0))?;
        Some(self.buckets[index].least)
    }

    #[inline]
    fn index(&self, bucket: u64) -> usize {
        bucket as usize & (self.buckets.len() - 1)
    }

    /// Frees a chunk, unless it is a bucket's own.
    #[inline]
    fn release(&mut self, chunk: usize) {
        if chunk >= self.buckets.len() {
            self.next[chunk] = self.free;
            self.free = chunk as u32;
        }
    }
}

fn empty(index: usize) -> Bucket {
    let start = (index * CHUNK) as u32;
    Bucket { start, end: start, len: 0, least: u32::MAX }
}
