//! Which flow of the shaper a packet is of: a bounded table of hashes.
//!
//! A flow is opened in the shaper when its first packet comes. It stays open while it is idle, until its
//! place is needed: then the one that has been idle longest is closed. Where all are busy, further flows go
//! along with one that is, which their hash chooses: nothing is refused. O(1) a packet.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use tidegate_core::shaper::{ClassId, FlowId, FlowOptions, Shaper, ShaperError};

const NONE: u32 = u32::MAX;

/// The key is a hash already.
#[derive(Debug, Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    flow: FlowId,
    hash: u64,
    /// In the list of idle flows.
    idle: bool,
    older: u32,
    younger: u32,
}

/// See the [module](self). Flows are numbered as in the shaper.
#[derive(Debug)]
pub struct FlowTable {
    class: ClassId,
    by_hash: HashMap<u64, u32, BuildHasherDefault<Identity>>,
    entries: Box<[Option<Entry>]>,
    oldest: u32,
    youngest: u32,
    idle: usize,
    shared: u64,
}

impl FlowTable {
    /// An empty table for a shaper of `flows` flows, which it opens in `class`.
    pub fn new(class: ClassId, flows: usize) -> Self {
        Self {
            class,
            by_hash: HashMap::with_capacity_and_hasher(flows, BuildHasherDefault::default()),
            entries: vec![None; flows].into_boxed_slice(),
            oldest: NONE,
            youngest: NONE,
            idle: 0,
            shared: 0,
        }
    }

    /// The flow of a packet with this hash. It counts as busy from now on.
    ///
    /// # Errors
    /// Those of the shaper, which has no flows, or not this class.
    pub fn flow<T: Copy + Default>(
        &mut self,
        hash: u64,
        shaper: &mut Shaper<T>,
    ) -> Result<FlowId, ShaperError> {
        if let Some(&index) = self.by_hash.get(&hash)
            && let Some(entry) = self.entries[index as usize]
        {
            self.unlink(index);
            return Ok(entry.flow);
        }
        let options = FlowOptions { class: Some(self.class), ..FlowOptions::default() };
        let mut opened = shaper.open_flow(options);
        if opened == Err(ShaperError::FlowsFull) {
            if self.oldest == NONE {
                return self.share(hash).ok_or(ShaperError::FlowsFull);
            }
            self.close(self.oldest, shaper);
            opened = shaper.open_flow(options);
        }
        let flow = opened?;
        self.by_hash.insert(hash, flow.index() as u32);
        let entry = Entry { flow, hash, idle: false, older: NONE, younger: NONE };
        self.entries[flow.index()] = Some(entry);
        Ok(flow)
    }

    /// Nothing of this flow is left anywhere.
    pub fn idle(&mut self, index: usize) {
        let Some(Some(entry)) = self.entries.get_mut(index) else { return };
        if entry.idle {
            return;
        }
        (entry.idle, entry.older, entry.younger) = (true, self.youngest, NONE);
        match self.youngest {
            NONE => self.oldest = index as u32,
            youngest => self.with(youngest, |entry| entry.younger = index as u32),
        }
        self.youngest = index as u32;
        self.idle += 1;
    }

    /// How many flows have packets.
    pub fn busy(&self) -> usize {
        self.by_hash.len() - self.idle
    }

    /// How many packets had to go along with another flow's.
    pub fn shared(&self) -> u64 {
        self.shared
    }

    /// A flow for one more where all are busy.
    fn share(&mut self, hash: u64) -> Option<FlowId> {
        self.shared += 1;
        let index = (hash % self.entries.len().max(1) as u64) as usize;
        (*self.entries.get(index)?).map(|entry| entry.flow)
    }

    fn close<T: Copy + Default>(&mut self, index: u32, shaper: &mut Shaper<T>) {
        self.unlink(index);
        if let Some(entry) = self.entries[index as usize].take() {
            self.by_hash.remove(&entry.hash);
            // It has nothing in the shaper, so its place is free at once.
            let _ = shaper.close_flow(entry.flow);
        }
    }

    /// Takes a flow from the list of idle ones, if it is there.
    fn unlink(&mut self, index: u32) {
        let Some(Some(entry)) = self.entries.get_mut(index as usize) else { return };
        if !std::mem::take(&mut entry.idle) {
            return;
        }
        let (older, younger) = (entry.older, entry.younger);
        match older {
            NONE => self.oldest = younger,
            older => self.with(older, |entry| entry.younger = younger),
        }
        match younger {
            NONE => self.youngest = older,
            younger => self.with(younger, |entry| entry.older = older),
        }
        self.idle -= 1;
    }

    fn with(&mut self, index: u32, change: impl FnOnce(&mut Entry)) {
        if let Some(Some(entry)) = self.entries.get_mut(index as usize) {
            change(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_core::{
        Nanos, Rate,
        shaper::{ClassOptions, ShaperOptions},
        wheel::WheelOptions,
    };

    use super::*;

    const FLOWS: usize = 4;

    fn shaper() -> (Shaper<u32>, ClassId) {
        let wheel = WheelOptions { capacity: 64, ..WheelOptions::default() };
        let mut shaper =
            Shaper::new(ShaperOptions { wheel, flows: FLOWS, classes: 1 }, Nanos(0)).unwrap();
        let rate = Rate::from_bit_s(1_000_000).unwrap();
        let class = ClassOptions { rate, burst: Nanos(0), parent: None, fair: true };
        let class = shaper.add_class(class).unwrap();
        (shaper, class)
    }

    proptest! {
        /// A model with a list: the same flow for the same hash, the longest idle one goes, and never a
        /// busy one.
        #[test]
        fn the_longest_idle_flow_makes_room(
            steps in prop::collection::vec((0u64..8, any::<bool>()), 1..200),
        ) {
            let (mut shaper, class) = shaper();
            let mut table = FlowTable::new(class, FLOWS);
            // Hash, flow, busy; the longest idle first.
            let mut model: Vec<(u64, FlowId, bool)> = Vec::new();
            let mut shared = 0;
            for (hash, comes) in steps {
                let known = model.iter().position(|flow| flow.0 == hash);
                if !comes {
                    if let Some(at) = known {
                        let mut flow = model.remove(at);
                        table.idle(flow.1.index());
                        let was_busy = std::mem::replace(&mut flow.2, false);
                        model.insert(if was_busy { model.len() } else { at }, flow);
                    }
                } else if let Some(at) = known {
                    prop_assert_eq!(table.flow(hash, &mut shaper).unwrap(), model[at].1);
                    model[at].2 = true;
                } else {
                    let flow = table.flow(hash, &mut shaper).unwrap();
                    if model.len() == FLOWS {
                        match model.iter().position(|flow| !flow.2) {
                            Some(at) => {
                                let gone = model.remove(at);
                                prop_assert_ne!(gone.1, flow, "an id of its own");
                                model.push((hash, flow, true));
                            }
                            None => {
                                prop_assert!(model.iter().any(|other| other.1 == flow));
                                shared += 1;
                            }
                        }
                    } else {
                        model.push((hash, flow, true));
                    }
                }
                prop_assert_eq!(table.busy(), model.iter().filter(|flow| flow.2).count());
                prop_assert_eq!(table.shared(), shared);
            }
        }
    }
}
