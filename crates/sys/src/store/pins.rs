//! Pins: what keeps a limit when the process that put it on has ended.

use std::{
    collections::BTreeSet,
    fs,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
};

use libbpf_rs::{Link, MapHandle, Program, libbpf_sys};

use super::{
    EXEMPT, Intent, MEMBERS, StoreError, bpf_error, io_error, pool_names::slot_in, symlink,
};
use crate::{
    bpf::Links,
    device::{CLSACT_MARK, Filters, XDP_PIN, is_program_pin},
    intf,
    limit::{AttachedLimit, LimitMaps, LimitOptions, ParentMaps, settings::Settings},
    query,
    schemes::LINKS,
};

/// Directories of a limit's pins are no deeper.
const DEPTH_MAX: usize = 3;

/// The pins and marks in a directory and those below.
pub(super) fn pins_in(dir: &Path, depth: usize) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true if depth < DEPTH_MAX => found.extend(pins_in(&entry.path(), depth + 1)),
            true => {}
            false => found.push(entry.path()),
        }
    }
    found
}

/// The kernel's ids of the programs that are pinned in a directory, or whose links are.
pub(crate) fn programs_in(dir: &Path) -> BTreeSet<u32> {
    let program = |path: PathBuf| {
        let name = path.file_name()?.to_str()?;
        if is_program_pin(name) {
            return Program::id_from_fd(Program::fd_from_pinned_path(&path).ok()?.as_fd()).ok();
        }
        let is_link = LINKS.contains(&name) || name == XDP_PIN;
        let link = is_link.then(|| Link::open(&path).ok()).flatten()?;
        Some(link.info().ok()?.prog_id)
    };
    pins_in(dir, 0).into_iter().filter_map(program).collect()
}

/// The settings pinned in a directory.
pub(super) fn settings_in(dir: &Path) -> Option<intf::Limit> {
    let map = MapHandle::from_pinned_path(dir.join("limit")).ok()?;
    Settings::read(&map, slot_in(dir)).ok().map(|settings| settings.limit.common)
}

/// Has a link run another program.
pub(super) fn update(pin: &Path, program: BorrowedFd<'_>) -> Result<(), StoreError> {
    let link = Link::open(pin).map_err(bpf_error(pin, "open"))?;
    let (link, program) = (link.as_fd().as_raw_fd(), program.as_raw_fd());
    // SAFETY: both descriptors are open, and no options are given.
    match unsafe { libbpf_sys::bpf_link_update(link, program, std::ptr::null()) } {
        0 => Ok(()),
        errno => Err(io_error(pin, "update")(std::io::Error::from_raw_os_error(-errno))),
    }
}

/// Pins the maps of a limit in a new directory. First what is asked of it: a limit that is killed while it is
/// built can then be opened, and taken off as a whole.
pub(super) fn pin_maps(
    maps: &mut LimitMaps,
    options: &LimitOptions,
    dir: &Path,
) -> Result<(), StoreError> {
    fs::create_dir(dir).map_err(io_error(dir, "create"))?;
    Intent::write(dir, options)?;
    pin_each([("limit", &mut maps.limit), ("counters", &mut maps.counters)], dir)?;
    pin_each(maps.exempt.as_mut().map(|exempt| (EXEMPT, exempt)), dir)?;
    pin_each(maps.own.maps(), dir)?;
    maps.own.parent().map_or(Ok(()), |parent| remember_place(parent, dir))
}

/// Pins maps in a directory.
pub(crate) fn pin_each<'a>(
    maps: impl IntoIterator<Item = (&'static str, &'a mut MapHandle)>,
    dir: &Path,
) -> Result<(), StoreError> {
    for (name, map) in maps {
        let path = dir.join(name);
        map.pin(&path).map_err(bpf_error(&path, "pin"))?;
    }
    Ok(())
}

/// Opens the map that is pinned in a directory.
pub(crate) fn open_map(dir: &Path, name: &str) -> Result<MapHandle, StoreError> {
    let path = dir.join(name);
    MapHandle::from_pinned_path(&path).map_err(bpf_error(&path, "open"))
}

/// Pins a program or a link in a directory.
pub(super) fn pin_fd(held: impl AsFd, dir: &Path, name: &str) -> Result<(), StoreError> {
    let path = dir.join(name);
    query::pin(held, &path).map_err(io_error(&path, "pin"))
}

/// Pins the maps of a parent in the directory of who works with them.
pub(super) fn pin_parent(parent: &mut ParentMaps, dir: &Path) -> Result<(), StoreError> {
    pin_each(parent.pins(), dir)?;
    remember_place(parent, dir)
}

fn remember_place(parent: &ParentMaps, dir: &Path) -> Result<(), StoreError> {
    parent.remember_place(dir).map_err(io_error(dir, "write to"))
}

/// Pins the maps and links of a limit in a new directory.
pub(super) fn pin(
    attached: &mut AttachedLimit,
    options: &LimitOptions,
    dir: &Path,
) -> Result<(), StoreError> {
    pin_maps(&mut attached.maps, options, dir)?;
    pin_hooks(attached.filters.as_ref(), &attached.links, dir)?;
    attached.xdp.as_ref().map_or(Ok(()), |link| pin_fd(link, dir, XDP_PIN))
}

/// Pins what holds the programs of a limit.
pub(crate) fn pin_hooks(
    filters: Option<&Filters>,
    links: &Links,
    dir: &Path,
) -> Result<(), StoreError> {
    if let Some(filters) = filters {
        for (name, program) in filters.programs() {
            pin_fd(program, dir, name)?;
        }
        if filters.owns_clsact {
            symlink(Path::new(CLSACT_MARK), &dir.join(CLSACT_MARK))?;
        }
    }
    links.iter().try_for_each(|(name, link)| pin_fd(link, dir, name))
}

/// Detaches the links pinned in `dir`, and those of members, at once, whoever else may hold them open.
pub(super) fn detach_links(dir: &Path) -> Result<(), StoreError> {
    for member in fs::read_dir(dir.join(MEMBERS)).into_iter().flatten().flatten() {
        detach_links(&member.path())?;
    }
    LINKS.into_iter().chain([XDP_PIN]).try_for_each(|name| detach_link(dir, name))
}

/// The same of one link, if there is one.
pub(crate) fn detach_link(dir: &Path, name: &str) -> Result<(), StoreError> {
    let path = dir.join(name);
    if path.exists() {
        let link = Link::open(&path).map_err(bpf_error(&path, "open"))?;
        // A link whose cgroup or device is gone is detached already.
        let _ = link.detach();
    }
    Ok(())
}

pub(crate) fn remove_pins(dir: &Path) -> Result<(), StoreError> {
    for entry in fs::read_dir(dir).map_err(io_error(dir, "list"))?.flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_pins(&path)?;
            continue;
        }
        fs::remove_file(&path).map_err(io_error(&path, "remove"))?;
    }
    fs::remove_dir(dir).map_err(io_error(dir, "remove"))
}
