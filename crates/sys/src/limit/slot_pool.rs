//! The pool of a limit that shares maps with others, as far as one limit acts on it. What is loaded for a
//! pool is in `schemes/nrm/pool.rs`.

use std::path::{Path, PathBuf};

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};

use super::LimitError;
use crate::{
    bpf::{load_error, map_error, open_map},
    intf,
};

/// The pins of the maps.
pub(crate) const PINS: [&str; 7] =
    ["limits", "queues", "counters", "sockets", "slots", "adoption", "exempt"];
/// The pin of the link of the iterator over sockets.
pub(crate) const ADOPT_PIN: &str = "adopt";

/// A pool that is pinned.
#[derive(Debug)]
pub(crate) struct SlotPool {
    pub(crate) dir: PathBuf,
    pub(crate) slots: MapHandle,
}

impl SlotPool {
    /// Opens the one pinned in a directory.
    pub(crate) fn open(dir: &Path) -> Result<SlotPool, LimitError> {
        let slots = open_map(dir, PINS[4])?;
        Ok(SlotPool { dir: dir.to_owned(), slots })
    }

    /// The iterator over sockets, and the map that says what it does.
    pub(crate) fn adopter(&self) -> Result<(MapHandle, Link), LimitError> {
        let link = Link::open(self.dir.join(ADOPT_PIN)).map_err(load_error("adopt"))?;
        Ok((self.adoption()?, link))
    }

    /// The map that says what the iterator does.
    pub(crate) fn adoption(&self) -> Result<MapHandle, LimitError> {
        open_map(&self.dir, PINS[5])
    }

    /// The trie of those whom all its limits exempt, if they do.
    pub(crate) fn exempt(&self) -> Result<Option<MapHandle>, LimitError> {
        let pin = PINS[6];
        self.dir.join(pin).exists().then(|| open_map(&self.dir, pin)).transpose()
    }

    /// A cgroup has left the limit of a slot, if it has that: it may be another one's by now.
    pub(crate) fn leave(&self, cgroup_id: u64, slot: u32) {
        // One that is gone has no slot.
        if self.slot_of(cgroup_id) == slot {
            let _ = self.set(cgroup_id, 0);
        }
    }

    /// The slot of a cgroup; 0: it has no limit of this pool.
    pub(crate) fn slot_of(&self, cgroup_id: u64) -> u32 {
        slot_of(&self.slots, cgroup_id)
    }

    pub(crate) fn set(&self, cgroup_id: u64, slot: u32) -> Result<(), LimitError> {
        let slot = intf::Slot { index: slot, zero: 0 };
        self.slots
            .update(&cgroup_id.to_ne_bytes(), bytemuck::bytes_of(&slot), MapFlags::ANY)
            .map_err(map_error("slots"))
    }
}

/// What a map of slots says of a cgroup.
pub(crate) fn slot_of(slots: &MapHandle, cgroup_id: u64) -> u32 {
    let value = slots.lookup(&cgroup_id.to_ne_bytes(), MapFlags::ANY).ok().flatten();
    let slot = value.and_then(|bytes| bytemuck::try_pod_read_unaligned::<intf::Slot>(&bytes).ok());
    slot.map_or(0, |slot| slot.index)
}
