//! What happens next: events by time, and in the order in which they were put in where times are equal.

use std::{cmp::Ordering, collections::BinaryHeap};

use tidegate_core::Nanos;

#[derive(Debug)]
struct Entry<T> {
    at: Nanos,
    number: u64,
    event: T,
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl<T> Eq for Entry<T> {}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

/// Events by time.
#[derive(Debug)]
pub struct Queue<T> {
    heap: BinaryHeap<Entry<T>>,
    number: u64,
    now: Nanos,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), number: 0, now: Nanos(0) }
    }
}

impl<T> Queue<T> {
    /// Puts in an event; one in the past happens now.
    pub fn push(&mut self, at: Nanos, event: T) {
        self.number += 1;
        self.heap.push(Entry { at: at.max(self.now), number: self.number, event });
    }

    /// The next event before `end`, and its time, which is now from then on.
    pub fn pop(&mut self, end: Nanos) -> Option<(Nanos, T)> {
        if self.heap.peek()?.at >= end {
            return None;
        }
        let entry = self.heap.pop()?;
        self.now = entry.at;
        Some((entry.at, entry.event))
    }
}
