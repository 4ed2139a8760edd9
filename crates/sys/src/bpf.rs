//! Kernel objects through libbpf: what every scheme needs to load programs, attach them to cgroups, and speak
//! to their maps.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    os::fd::{AsFd, AsRawFd},
};

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};

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

pub(crate) fn lookup<T: bytemuck::Pod>(
    map: &MapHandle,
    name: &'static str,
    key: u32,
) -> Result<T, LimitError> {
    let value = map.lookup(&key.to_ne_bytes(), MapFlags::ANY).map_err(map_error(name))?;
    let value = value.filter(|bytes| bytes.len() == size_of::<T>());
    value
        .and_then(|bytes| bytemuck::try_pod_read_unaligned(&bytes).ok())
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

/// Attaches a program to a cgroup, beside those of others.
pub(crate) fn attach(
    program: &libbpf_rs::ProgramMut<'_>,
    name: &'static str,
    cgroup: &Cgroup,
) -> Result<Link, LimitError> {
    program.attach_cgroup(cgroup.as_fd().as_raw_fd()).map_err(|source| {
        let denied = matches!(source.kind(), libbpf_rs::ErrorKind::PermissionDenied);
        match query::exclusive_holder(cgroup).filter(|_| denied) {
            Some(holder) => LimitError::Occupied { cgroup: cgroup.path().to_owned(), holder },
            None => LimitError::Attach { program: name, cgroup: cgroup.path().to_owned(), source },
        }
    })
}
