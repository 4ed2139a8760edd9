//! What a shaper holds: packets by number, so that its wheel moves four bytes and not a packet.

use crate::packet::Packet;

/// A packet in a shaper, and whose it is.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) packet: Packet,
    pub(super) cookie: u64,
    pub(super) slot: u32,
    pub(super) lane: u32,
}

/// A table of packets with a list of its free places. All memory is taken at the start.
#[derive(Debug)]
pub(super) struct Store {
    places: Box<[Option<Stored>]>,
    free: Vec<u32>,
}

impl Store {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            places: (0..capacity).map(|_| None).collect(),
            // The lowest first: what is used is dense.
            free: (0..capacity as u32).rev().collect(),
        }
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Gives the packet back if there is no place.
    #[inline]
    pub(super) fn insert(&mut self, stored: Stored) -> Result<u32, Stored> {
        let Some(handle) = self.free.pop() else { return Err(stored) };
        self.places[handle as usize] = Some(stored);
        Ok(handle)
    }

    #[inline]
    pub(super) fn get(&self, handle: u32) -> Option<&Stored> {
        self.places.get(handle as usize)?.as_ref()
    }

    #[inline]
    pub(super) fn take(&mut self, handle: u32) -> Option<Stored> {
        let stored = self.places.get_mut(handle as usize)?.take()?;
        self.free.push(handle);
        Some(stored)
    }
}
