//! Whose mounts this process sees: the host's, or some of its own.
//!
//! `ip netns exec` gives a command a new `/sys`, `unshare -m` and services with `PrivateMounts=` a copy of
//! all mounts, `chroot` another root. What a process mounts there ends with it, and what the host has mounted
//! may be hidden. Limits are the host's, so their pins are too: in the BPF file system that process 1 sees. A
//! BPF file system is another one with each mount, so no mount of our own could stand for that; it is reached
//! through `/proc/1/root`, and mounted, where there is none, in the mount namespace of process 1. Where
//! process 1 may not be asked, the outermost ancestor that may stands for it.
//!
//! In a container with processes of its own, process 1 is the container's first.

use std::{
    fs, io,
    os::fd::AsFd,
    panic,
    path::{Path, PathBuf},
    sync::OnceLock,
    thread,
};

use rustix::{
    fs::{AtFlags, CWD, StatxFlags, statx},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

const ANCESTORS_MAX: usize = 256;

/// The process whose mounts are the host's: process 1, or where it may not be asked, as root of a restricted
/// machine may not, the outermost ancestor that may.
fn host_process() -> u32 {
    static FOUND: OnceLock<u32> = OnceLock::new();
    let mounts = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    *FOUND.get_or_init(|| {
        if mounts(1).is_some() {
            return 1;
        }
        let us = std::process::id();
        let ancestors = std::iter::successors(Some(us), |pid| parent_of(*pid).filter(|p| *p > 1));
        ancestors.take(ANCESTORS_MAX).filter(|pid| mounts(*pid).is_some()).last().unwrap_or(us)
    })
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // "PID (NAME) STATE PARENT ..."; a name may hold anything.
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// A file of the host's process.
pub(crate) fn of_host_process(file: &str) -> PathBuf {
    Path::new("/proc").join(host_process().to_string()).join(file)
}

/// Whether this process has the root and the mounts of the host.
fn are_hosts() -> bool {
    // A directory may be the root of several mounts.
    let root = |path: &Path| {
        let asked = StatxFlags::INO | StatxFlags::MNT_ID;
        let found = statx(CWD, path, AtFlags::empty(), asked).ok()?;
        Some((found.stx_mnt_id, found.stx_ino))
    };
    let mounts = |path: &Path| fs::read_link(path).ok();
    root(Path::new("/")) == root(&of_host_process("root/."))
        && mounts(Path::new("/proc/self/ns/mnt")) == mounts(&of_host_process("ns/mnt"))
}

/// A path of the host as this process can use it: the same where its mounts are the host's.
pub fn host_path(path: &Path) -> PathBuf {
    if are_hosts() {
        return path.to_owned();
    }
    of_host_process("root").join(path.strip_prefix("/").unwrap_or(path))
}

/// The same path as the host has it: one name for a place, whoever comes to it from where.
pub fn path_on_host(path: &Path) -> PathBuf {
    let rest = path.strip_prefix(of_host_process("root"));
    rest.map_or_else(|_| path.to_owned(), |rest| Path::new("/").join(rest))
}

/// Does something in the host's mount namespace, where paths mean what they mean to process 1.
///
/// # Errors
/// The kernel's, when this process may not go there; nothing is done.
pub(crate) fn on_host<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    if are_hosts() {
        return Ok(work());
    }
    let namespace = fs::File::open(of_host_process("ns/mnt"))?;
    // The thread ends with the work, and the process stays where it is.
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the thread gets a root and a working directory of its own, which nobody else uses.
            unsafe { unshare_unsafe(UnshareFlags::FS) }?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
    })
}

/// Has this thread, and those that it starts from now on, read and write paths of cgroups as the host does.
///
/// # Errors
/// The kernel's, when this process may not go there.
pub(crate) fn see_cgroups_as_host() -> io::Result<()> {
    let namespace = fs::File::open(of_host_process("ns/cgroup"))?;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::ControlGroup))?)
}

/// Whether a mount that this process makes lasts only as long as itself: it is the first of a container.
pub(crate) fn end_with_us() -> bool {
    std::process::id() == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_paths_of_the_host_are_reached_from_another_mount_namespace() {
        if !rustix::process::geteuid().is_root() {
            eprintln!(
                "SKIP root_paths_of_the_host_are_reached_from_another_mount_namespace: needs root"
            );
            return;
        }
        let path = host_path(Path::new("/proc/version"));
        assert!(path.exists(), "{}", path.display());
        assert_eq!(path_on_host(&path), Path::new("/proc/version"));
        let seen = of_host_process("root").join("run/a");
        assert_eq!(path_on_host(&seen), Path::new("/run/a"));
        let before = fs::read_link("/proc/thread-self/ns/mnt").unwrap();
        on_host(|| assert!(Path::new("/proc/self/mountinfo").exists())).unwrap();
        assert_eq!(fs::read_link("/proc/thread-self/ns/mnt").unwrap(), before);
    }
}
