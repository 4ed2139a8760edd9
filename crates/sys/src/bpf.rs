//! Kernel objects through libbpf: what every scheme needs to load programs, attach them to cgroups, and speak
//! to their maps.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use libbpf_rs::{AsRawLibbpf, MapCore, MapFlags, MapHandle, libbpf_sys};

use crate::{cgroup::Cgroup, limit::LimitError, query};

/// Keeps libbpf's own messages off the terminal; errors carry what matters.
pub(crate) fn quiet_libbpf() {
    libbpf_rs::set_print(None);
}

/// A number that nobody outside knows, so that they cannot choose flows that meet in one place.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

pub(crate) fn load_error(program: &'static str) -> impl FnOnce(libbpf_rs::Error) -> LimitError {
    move |source| LimitError::Load { program, source }
}

pub(crate) fn map_error(map: &'static str) -> impl FnOnce(libbpf_rs::Error) -> LimitError {
    move |source| LimitError::Map { map, source }
}

/// Reads what a value of a map begins with.
pub(crate) fn lookup<T: bytemuck::Pod>(
    map: &MapHandle,
    name: &'static str,
    key: u32,
) -> Result<T, LimitError> {
    let value = map.lookup(&key.to_ne_bytes(), MapFlags::ANY).map_err(map_error(name))?;
    value
        .and_then(|bytes| bytemuck::try_pod_read_unaligned(bytes.get(..size_of::<T>())?).ok())
        .ok_or(LimitError::Layout(name))
}

/// Has an object that is open use a map that is there. One of another build may have another layout.
pub(crate) fn reuse(
    map: &mut libbpf_rs::OpenMapMut<'_>,
    with: &MapHandle,
) -> Result<(), LimitError> {
    // The kernel keeps so much of a name.
    let kept = |name: &std::ffi::OsStr| {
        name.as_encoded_bytes().iter().copied().take(15).collect::<Vec<_>>()
    };
    if kept(map.name()) != kept(with.name()) || map.value_size() != with.value_size() {
        return Err(LimitError::Layout("shared"));
    }
    map.reuse_fd(with.as_fd()).map_err(load_error("companion"))
}

/// The links of a limit, by the name under which they are pinned.
pub(crate) type Links = Vec<(&'static str, OwnedFd)>;

/// Attaches a loaded program to a hook of a cgroup, beside those of others. The name is that of a limit's
/// link.
pub(crate) fn attach(
    program: BorrowedFd<'_>,
    name: &'static str,
    cgroup: &Cgroup,
) -> Result<OwnedFd, LimitError> {
    // SAFETY: both descriptors are open, and options may be left out.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(
            program.as_raw_fd(),
            cgroup.as_fd().as_raw_fd(),
            query::hook_of(name),
            std::ptr::null(),
        )
    };
    if fd >= 0 {
        // SAFETY: a new descriptor that nobody else owns.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let source = libbpf_rs::Error::from_raw_os_error(-fd);
    let denied = matches!(source.kind(), libbpf_rs::ErrorKind::PermissionDenied);
    Err(match query::exclusive_holder(cgroup).filter(|_| denied) {
        Some(holder) => LimitError::Occupied { cgroup: cgroup.path().to_owned(), holder },
        None => LimitError::Attach { program: name, cgroup: cgroup.path().to_owned(), source },
    })
}

/// Makes the maps of an object before its programs are loaded.
pub(crate) fn make_maps(
    object: &mut libbpf_rs::OpenObject,
    name: &'static str,
) -> Result<(), LimitError> {
    // SAFETY: the object is open. libbpf goes on from here when it loads it.
    let ret = unsafe { libbpf_sys::bpf_object__prepare(object.as_libbpf_object().as_ptr()) };
    if ret < 0 { Err(load_error(name)(libbpf_rs::Error::from_raw_os_error(-ret))) } else { Ok(()) }
}

/// A map of an object whose maps are made.
pub(crate) fn made_map(
    map: &libbpf_rs::OpenMapMut<'_>,
    name: &'static str,
) -> Result<MapHandle, LimitError> {
    // SAFETY: the object of the map lives as long as the borrow, and is not changed meanwhile.
    let map = libbpf_rs::Map::new(unsafe { map.as_libbpf_object().as_ref() });
    MapHandle::try_from(&map).map_err(load_error(name))
}

/// A program that stays loaded when its skeleton goes.
pub(crate) fn keep(
    program: &libbpf_rs::ProgramMut<'_>,
    name: &'static str,
) -> Result<OwnedFd, LimitError> {
    program.as_fd().try_clone_to_owned().map_err(|e| load_error(name)(e.into()))
}
