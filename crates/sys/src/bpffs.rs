//! A BPF file system of one's own: where tests and the laboratory pin what nobody else shall see.
//!
//! `/sys/fs/bpf` is the host's. Often nothing is mounted there, and what is pinned there stays when a test is
//! killed.

use std::{
    io,
    path::{Path, PathBuf},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A new, empty BPF file system that is unmounted when the value is dropped. What is still pinned in it goes
/// with it.
#[derive(Debug)]
pub struct PrivateBpffs(PathBuf);

impl PrivateBpffs {
    /// Mounts it on a directory that exists, accessible to root alone.
    ///
    /// # Errors
    /// What `mount` says: `EPERM` without `CAP_SYS_ADMIN`, `ENODEV` where the kernel has no BPF file system.
    pub fn mount(directory: impl Into<PathBuf>) -> io::Result<PrivateBpffs> {
        let directory = directory.into();
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("tidegate-private", &directory, "bpf", flags, Some(c"mode=0700"))?;
        Ok(PrivateBpffs(directory))
    }

    /// Its root directory.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for PrivateBpffs {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}
