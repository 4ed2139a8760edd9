//! The programs that act on ACKs, so that they stay: a directory in the BPF file system.
//!
//! ```text
//! DIR/{limits,states,backlogs,counters,flows}      the maps
//!     {egress,ingress}                             the links, by the workload's direction of their packets
//!     {program_egress,program_ingress,clsact}      where there are no tcx links
//! ```

use std::{fs, path::Path};

use libbpf_rs::{Link, MapHandle};

use super::{AcksMaps, AttachedAcks};
use crate::{
    device::{self, Filters},
    intf,
    store::{
        StoreError, bpf_error, io_error,
        pins::{pin_hooks, remove_pins},
    },
};

/// The names of the maps.
const MAPS: [&str; 5] = ["limits", "states", "backlogs", "counters", "flows"];
/// Those of the links.
const LINKS: [&str; 2] = ["egress", "ingress"];

impl AttachedAcks {
    /// Leaves the programs on the device, pinned in the new directory `dir`; the maps go on as before.
    ///
    /// # Errors
    /// [`StoreError`]; the programs are off then, and nothing is pinned.
    pub fn pin(mut self, dir: &Path) -> Result<AcksMaps, StoreError> {
        fs::create_dir(dir).map_err(io_error(dir, "create"))?;
        if let Err(e) = self.pin_all(dir) {
            let _ = remove_pins(dir);
            return Err(e);
        }
        self.hooked.filters.iter_mut().for_each(Filters::keep);
        Ok(self.maps)
    }

    fn pin_all(&mut self, dir: &Path) -> Result<(), StoreError> {
        let m = &mut self.maps;
        let maps = [&mut m.limits, &mut m.states, &mut m.backlogs, &mut m.counters, &mut m.flows];
        for (name, map) in MAPS.into_iter().zip(maps) {
            let path = dir.join(name);
            map.pin(&path).map_err(bpf_error(&path, "pin"))?;
        }
        pin_hooks(self.hooked.filters.as_ref(), &mut self.hooked.links, dir)
    }
}

impl AcksMaps {
    /// Those that are pinned in `dir`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(dir: &Path) -> Result<AcksMaps, StoreError> {
        let open = |name: &str| {
            let path = dir.join(name);
            MapHandle::from_pinned_path(&path).map_err(bpf_error(&path, "open"))
        };
        let [limits, states, backlogs, counters, flows] = MAPS.map(open);
        Ok(AcksMaps {
            limits: limits?,
            states: states?,
            backlogs: backlogs?,
            counters: counters?,
            flows: flows?,
        })
    }
}

/// The hooks at which the programs pinned in `dir` are no more, of a limit on a device of this namespace.
#[must_use]
pub fn unhooked(dir: &Path, limit: &intf::Limit) -> Vec<&'static str> {
    device::unhooked(dir, limit, &LINKS)
}

/// Takes the programs pinned in `dir` off the device of their limit, and removes the directory.
///
/// # Errors
/// [`StoreError`].
pub fn remove(dir: &Path, limit: &intf::Limit) -> Result<(), StoreError> {
    device::remove_pinned_filters(dir, limit);
    for name in LINKS {
        let path = dir.join(name);
        if path.exists() {
            let link = Link::open(&path).map_err(bpf_error(&path, "open"))?;
            // One whose device is gone is off already.
            let _ = link.detach();
        }
    }
    remove_pins(dir)
}
