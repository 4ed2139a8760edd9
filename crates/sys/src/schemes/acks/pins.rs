//! The programs that act on ACKs, so that they stay: a directory in the BPF file system.
//!
//! ```text
//! DIR/{limits,states,backlogs,counters,flows}      the maps
//!     {egress,ingress}                             the links, by the workload's direction of their packets
//!     {program_egress,program_ingress,clsact}      where there are no tcx links
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
};

use tidegate_core::{Direction, Scheme};

use super::{AcksMaps, AcksOptions, AttachedAcks};
use crate::{
    backlog::Backlog,
    device::{self, Filters, Target},
    intf,
    limit::{Lease, LimitError},
    store::{
        StoreError, io_error, limit_error,
        pins::{detach_link, open_map, pin_each, pin_hooks, remove_pins},
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
        pin_each(MAPS.into_iter().zip(maps), dir)?;
        pin_hooks(self.hooked.filters.as_ref(), &self.hooked.links, dir)
    }
}

impl AcksMaps {
    /// Those that are pinned in `dir`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(dir: &Path) -> Result<AcksMaps, StoreError> {
        let [limits, states, backlogs, counters, flows] = MAPS.map(|name| open_map(dir, name));
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
        detach_link(dir, name)?;
    }
    remove_pins(dir)
}

/// The directories of a limit's programs, in that of the limit.
const DIRS: [&str; 2] = ["acks_egress", "acks_ingress"];

/// The directory of the programs of a direction of the limit in `dir`.
pub(crate) fn dir_of(dir: &Path, direction: Direction) -> PathBuf {
    dir.join(DIRS[intf::index(direction)])
}

/// The directions of a limit in which ACKs are acted on.
pub(super) fn directions(limit: &intf::Limit) -> impl Iterator<Item = Direction> {
    let acts = matches!(limit.scheme(), Scheme::Dem | Scheme::Spring);
    let limited = Direction::BOTH.into_iter().filter(|direction| limit.rate(*direction).is_some());
    limited.filter(move |_| acts)
}

/// Puts the programs of a limit that has none on its device, pinned in its directory.
pub(crate) fn put(
    target: &Target,
    limit: &intf::Limit,
    dir: &Path,
    name: &str,
    backlog: impl Fn(Direction) -> Result<Backlog, LimitError>,
) -> Result<(), StoreError> {
    let states = super::new_states().map_err(limit_error(name))?;
    for direction in directions(limit) {
        let attached = AcksOptions::of(limit, direction).and_then(|options| {
            super::attach(target, direction, &options, &backlog(direction)?, &states)
        });
        attached.map_err(limit_error(name))?.pin(&dir_of(dir, direction))?;
    }
    Ok(())
}

/// Tells them what has changed: a limit, and what is lent of it.
pub(crate) fn change(
    dir: &Path,
    limit: &intf::Limit,
    lease: impl Fn(Direction) -> Result<Option<Lease>, LimitError>,
    name: &str,
    backlog: impl Fn(Direction) -> Result<Backlog, LimitError>,
) -> Result<(), StoreError> {
    for direction in directions(limit) {
        let maps = AcksMaps::open(&dir_of(dir, direction))?;
        let done = AcksOptions::of(limit, direction)
            .and_then(|options| maps.set(&AcksOptions { lease: lease(direction)?, ..options }))
            .and_then(|()| maps.set_backlog(&backlog(direction)?));
        done.map_err(limit_error(name))?;
    }
    Ok(())
}

/// Takes all of a limit's off again, as far as that can be done.
pub(crate) fn take_off(dir: &Path, limit: &intf::Limit) {
    // A clsact that came with the first goes when all others are off.
    for direction in Direction::BOTH.into_iter().rev() {
        let dir = dir_of(dir, direction);
        if dir.exists() {
            let _ = remove(&dir, limit);
        }
    }
}

/// The hooks at which those of a limit are no more.
pub(crate) fn gone(dir: &Path, limit: &intf::Limit) -> Vec<&'static str> {
    directions(limit).flat_map(|direction| unhooked(&dir_of(dir, direction), limit)).collect()
}
