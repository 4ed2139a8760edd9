//! Where the store is: in which BPF file system, and who may change it.
//!
//! The host's store lies in the BPF file system that process 1 sees ([`crate::mounts`]); where there is none,
//! the first writer mounts one there, and the last takes it away. Its directory is root's alone: who could
//! write into it could take limits off, and who could lock it could keep them as they are.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    mount::{MountFlags, UnmountFlags, mount, unmount},
};

use super::{BPFFS, DEFAULT_ROOT, Store, StoreError, StoreLock, io_error};
use crate::mounts::{end_with_us, host_path, on_host};

/// The source under which Tidegate mounts the BPF file system where none is: by it the mount is known.
const MOUNT_SOURCE: &str = "tidegate";
/// What the kernel itself puts in every BPF file system.
const KERNEL_FILES: [&str; 2] = ["maps.debug", "progs.debug"];
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
/// Of a directory of limits.
const MODE: u32 = 0o700;
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Others cannot rename or remove what is not theirs.
const STICKY: u32 = 0o1000;

/// Where a store is for this process.
pub(super) fn resolve(root: PathBuf) -> PathBuf {
    if root != Path::new(DEFAULT_ROOT) {
        return root;
    }
    let device = |path: &Path| fs::metadata(path).map(|m| m.dev()).ok();
    let hosts = host_path(Path::new(BPFFS));
    // The same one, and a path that everybody can read.
    let is_seen = is_bpffs(Path::new(BPFFS)) && device(Path::new(BPFFS)) == device(&hosts);
    if is_seen { root } else { host_path(&root) }
}

pub(super) fn is_bpffs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type as u64 == BPF_FS_MAGIC)
}

impl Store {
    /// Whether it is the host's, however this process reaches it.
    fn is_default(&self) -> bool {
        self.root == Path::new(DEFAULT_ROOT) || self.root == host_path(Path::new(DEFAULT_ROOT))
    }

    fn bpffs(&self) -> &Path {
        self.root.parent().unwrap_or(&self.root)
    }

    /// Mounts the BPF file system of the host where none is.
    pub(super) fn ensure_bpffs(&self) -> Result<(), StoreError> {
        if is_bpffs(self.bpffs()) || !self.is_default() {
            return Ok(());
        }
        if end_with_us() {
            let why = "it is the first process of a container".to_owned();
            return Err(StoreError::WouldEnd { why });
        }
        let mounted = on_host(|| mount_where_none(Path::new(BPFFS))).map_err(|e| {
            let why = format!("it may not enter the host's mount namespace: {e}");
            StoreError::WouldEnd { why }
        })?;
        mounted.map_err(io_error(Path::new(BPFFS), "mount bpf"))
    }

    /// Whether the last writer has unmounted the BPF file system of the host since it was looked for.
    pub(super) fn has_lost_bpffs(&self) -> bool {
        self.is_default() && !is_bpffs(self.bpffs())
    }

    /// Makes the directory if it is not there.
    pub(super) fn create_root(&self) -> Result<(), StoreError> {
        if !is_bpffs(self.bpffs()) {
            let (root, bpffs) = (self.root.display().to_string(), self.bpffs().display());
            return Err(StoreError::NotBpffs(root, bpffs.to_string()));
        }
        self.check_root()?;
        match fs::DirBuilder::new().mode(MODE).create(&self.root) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                Err(io_error(&self.root, "create")(e))
            }
            // An earlier version has let everybody look in, and thereby lock it.
            Err(_) => make_private(&self.root).map_err(io_error(&self.root, "open")),
            Ok(()) => Ok(()),
        }
    }

    /// Checks that nobody but root, or the user whom we run as, can change the store. One that is not there
    /// is safe.
    pub(super) fn check_root(&self) -> Result<(), StoreError> {
        let us = rustix::process::geteuid().as_raw();
        let is_ours = |m: &fs::Metadata| [0, us].contains(&m.uid());
        let refuse = |path: &Path, m: &fs::Metadata, fix: String| {
            let why = format!("owner {}, mode {:04o}", m.uid(), m.mode() & 0o7777);
            Err(StoreError::Open { path: path.display().to_string(), why, fix })
        };
        let above = self.bpffs();
        if let Ok(m) = fs::metadata(above) {
            let is_open = m.mode() & WRITABLE_BY_OTHERS != 0 && m.mode() & STICKY == 0;
            if !is_ours(&m) || is_open {
                let path = above.display();
                return refuse(above, &m, format!("chown 0:0 {path} && chmod 0700 {path}"));
            }
        }
        let Ok(m) = fs::symlink_metadata(&self.root) else { return Ok(()) };
        let path = self.root.display();
        if !is_ours(&m) || !m.is_dir() {
            // What is in it is not to be trusted.
            return refuse(&self.root, &m, format!("rm -r {path}"));
        }
        if m.mode() & WRITABLE_BY_OTHERS != 0 {
            return refuse(&self.root, &m, format!("chmod 0700 {path}"));
        }
        Ok(())
    }

    /// Removes the empty directory, and the BPF file system if Tidegate mounted it and nobody else uses
    /// it, so that the host is as it was.
    pub fn close(&self, lock: StoreLock) {
        let _ = fs::remove_dir(&self.root);
        drop(lock);
        if self.is_default() {
            let _ = on_host(unmount_if_unused);
        }
    }
}

/// Lets nobody else look into a directory, which is not followed to another one.
fn make_private(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let dir = rustix::fs::open(path, flags, Mode::empty())?;
    let _ = rustix::fs::fchmod(&dir, Mode::from_raw_mode(MODE));
    Ok(())
}

/// Keeps others from mounting or unmounting the BPF file system at `path` meanwhile. What lies above is the
/// same directory before and after.
fn lock_mount(path: &Path) -> io::Result<OwnedFd> {
    let above = path.parent().unwrap_or(path);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let above = rustix::fs::open(above, flags, Mode::empty())?;
    rustix::fs::flock(&above, FlockOperation::LockExclusive)?;
    Ok(above)
}

/// Mounts a BPF file system unless another writer has just done so.
fn mount_where_none(path: &Path) -> io::Result<()> {
    let _lock = lock_mount(path)?;
    if is_bpffs(path) {
        return Ok(());
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RELATIME;
    Ok(mount(MOUNT_SOURCE, path, "bpf", flags, Some(c"mode=0700"))?)
}

fn unmount_if_unused() {
    let Ok(_lock) = lock_mount(Path::new(BPFFS)) else { return };
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    let is_ours = mounts.lines().any(|line| {
        line.split_once(" - ").is_some_and(|(left, right)| {
            left.split(' ').nth(4) == Some(BPFFS)
                && right.starts_with(&format!("bpf {MOUNT_SOURCE} "))
        })
    });
    let is_used = |entry: io::Result<fs::DirEntry>| {
        entry.is_ok_and(|e| !KERNEL_FILES.contains(&e.file_name().to_string_lossy().as_ref()))
    };
    if is_ours && fs::read_dir(BPFFS).is_ok_and(|dir| !dir.into_iter().any(is_used)) {
        let _ = unmount(BPFFS, UnmountFlags::empty());
    }
}

#[cfg(test)]
mod tests;
