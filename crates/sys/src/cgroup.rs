//! Control groups, version 2: where the hierarchy is, opening, making and removing groups.
//!
//! Paths are relative to the mount point, as systemd and `/proc/PID/cgroup` write them, without a
//! leading slash; the empty path is the root.

use std::{
    collections::VecDeque,
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen},
};
use tidegate_core::scope::shown;

use crate::mounts;

const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// Cgroups that one walk of the hierarchy visits at most.
pub const MAX_CGROUPS: usize = 100_000;

/// What can go wrong with control groups. Nothing has been changed unless said otherwise.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No cgroup2 file system is mounted.
    #[error(
        "no cgroup v2 hierarchy is mounted{}, and this process may not mount one ({source}); as root, mount \
         it at any empty directory: mkdir -p /run/cgroup2 && mount -t cgroup2 none /run/cgroup2",
        if *.v1 { " (only v1)" } else { "" }
    )]
    NoHierarchy {
        /// A version 1 hierarchy is there.
        v1: bool,
        source: io::Error,
    },
    #[error(
        "cgroup `{path}` does not exist below {mount}; `systemd-cgls` or `ls {mount}` shows those that do (a \
         service has one only while it runs)"
    )]
    Missing { path: String, mount: String },
    #[error("`{0}` is no cgroup but a file; name the directory")]
    NotADirectory(String),
    #[error("cgroup path `{0}` must be relative to the cgroup mount and free of `..`")]
    BadPath(String),
    #[error(
        "cannot make a cgroup in {mount}: it is mounted read-only, as in most containers; run \
         tidegate on the host, or give the container a writable cgroup file system"
    )]
    ReadOnly { mount: String },
    #[error("cgroup `{}`: cannot {action}: {source}", shown(path))]
    Io { path: String, action: &'static str, source: io::Error },
}

/// The cgroup2 hierarchy. There is one on a host, whoever mounts it where.
#[derive(Debug, Clone)]
pub struct Hierarchy {
    mount: PathBuf,
    /// Where the host has it, for people and for what is remembered.
    shown: PathBuf,
    /// A mount of this process, which is nowhere to be seen, while it is used.
    own: Option<Arc<OwnedFd>>,
}

/// An open control group.
#[derive(Debug)]
pub struct Cgroup {
    path: String,
    dir: OwnedFd,
    absolute: PathBuf,
    id: u64,
}

impl Hierarchy {
    /// Finds the hierarchy in `/proc/self/mountinfo`. Where it is not mounted, or hidden as by `ip netns
    /// exec`, this process mounts it for itself, where nobody sees it.
    ///
    /// # Errors
    /// [`CgroupError::NoHierarchy`].
    pub fn find() -> Result<Hierarchy, CgroupError> {
        let read = || fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
        let mut mounts = read();
        if reaches_beyond_namespace(&mounts) && mounts::see_cgroups_as_host().is_ok() {
            mounts = read();
        }
        // Another mount may lie above it.
        let mut visible = mounts_of(&mounts, "cgroup2").filter(|mount| is_cgroup2(mount));
        if let Some(mount) = visible.next() {
            return Ok(Hierarchy { shown: mount.clone(), mount, own: None });
        }
        let own = mount_detached().map_err(|e| CgroupError::NoHierarchy {
            v1: mounts_of(&mounts, "cgroup").next().is_some(),
            source: e.into(),
        })?;
        let mount = PathBuf::from(format!("/proc/self/fd/{}", own.as_raw_fd()));
        let hosts = fs::read_to_string(mounts::of_host_process("mountinfo")).unwrap_or_default();
        let shown = mounts_of(&hosts, "cgroup2").next().unwrap_or_else(|| mount.clone());
        Ok(Hierarchy { mount, shown, own: Some(Arc::new(own)) })
    }

    /// The path of a group from an absolute one, as the host or this process has it.
    pub fn relative(&self, absolute: &Path) -> String {
        let inside =
            absolute.strip_prefix(&self.mount).or_else(|_| absolute.strip_prefix(&self.shown));
        // Without its empty parts: one group has one path.
        let parts: PathBuf = inside.unwrap_or(absolute).components().collect();
        parts.to_string_lossy().trim_matches('/').to_owned()
    }

    /// Where the host has a group, to be remembered.
    pub(crate) fn remembered(&self, group: &Cgroup) -> PathBuf {
        self.shown.join(group.path())
    }

    /// Where this process finds it; a path of no other one.
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// Opens a group by its path; an absolute path below the mount point is understood too.
    ///
    /// # Errors
    /// [`CgroupError`]: it does not exist, is a file, or lies outside.
    pub fn open(&self, path: &str) -> Result<Cgroup, CgroupError> {
        let relative = self.relative(Path::new(path));
        let relative = relative.as_str();
        if relative.split('/').any(|part| part == ".." || part == ".") {
            return Err(CgroupError::BadPath(path.to_owned()));
        }
        let absolute = self.mount.join(relative);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&absolute, flags, Mode::empty()).map_err(|e| match e {
            rustix::io::Errno::NOENT => CgroupError::Missing {
                path: path.to_owned(),
                mount: self.shown.display().to_string(),
            },
            rustix::io::Errno::NOTDIR => CgroupError::NotADirectory(path.to_owned()),
            other => io_error(path, "open")(other.into()),
        })?;
        let stat = rustix::fs::fstat(&dir).map_err(|e| io_error(path, "stat")(e.into()))?;
        Ok(Cgroup { path: relative.to_owned(), dir, absolute, id: stat.st_ino })
    }

    /// The group of the calling process.
    ///
    /// # Errors
    /// [`CgroupError`] when it cannot be read or opened.
    pub fn current(&self) -> Result<Cgroup, CgroupError> {
        self.of_process("self")
    }

    /// The group of a process, named by its id or `self`.
    ///
    /// # Errors
    /// [`CgroupError`] when it cannot be read or opened.
    pub fn of_process(&self, pid: &str) -> Result<Cgroup, CgroupError> {
        let file = format!("/proc/{pid}/cgroup");
        let text = fs::read_to_string(&file).map_err(io_error(&file, "read"))?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::"));
        self.open(path.unwrap_or("/").trim_end_matches(" (deleted)"))
    }

    /// The path of a group by its directory, opened by somebody else, and the user that owns it.
    ///
    /// # Errors
    /// [`CgroupError::Io`] when it is no group, or has been removed.
    pub fn of_directory(&self, directory: impl AsFd) -> Result<(String, u32), CgroupError> {
        let refuse = |e: rustix::io::Errno| io_error("?", "look at it")(e.into());
        let directory = directory.as_fd();
        let kind = rustix::fs::fstatfs(directory).map_err(refuse)?;
        let stat = rustix::fs::fstat(directory).map_err(refuse)?;
        if kind.f_type as u64 != CGROUP2_MAGIC {
            return Err(refuse(rustix::io::Errno::NOTDIR));
        }
        let path = self.path_of(stat.st_ino).ok_or_else(|| refuse(rustix::io::Errno::NOENT))?;
        Ok((path, stat.st_uid))
    }

    /// Makes a group below `parent` and opens it.
    ///
    /// # Errors
    /// [`CgroupError::Io`], also when it exists.
    pub fn create(&self, parent: &Cgroup, name: &str) -> Result<Cgroup, CgroupError> {
        let path = if parent.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}/{name}", parent.path)
        };
        fs::create_dir(self.mount.join(&path)).map_err(|e| match e.kind() {
            io::ErrorKind::ReadOnlyFilesystem => {
                CgroupError::ReadOnly { mount: self.shown.display().to_string() }
            }
            _ => io_error(&path, "create")(e),
        })?;
        self.open(&path)
    }

    /// The path of the group with this id, if it still exists. Only for who has `CAP_DAC_READ_SEARCH`, as the
    /// kernel wants it: others are told `None`, and do not make the system call, which may be fatal for them
    /// (`SystemCallFilter` of the daemon's unit).
    pub fn path_of(&self, id: u64) -> Option<String> {
        // A kernfs file handle is the 64-bit id alone, of this type.
        const FILEID_KERNFS: libc::c_int = 0xfe;
        #[repr(C)]
        struct Handle {
            bytes: libc::c_uint,
            kind: libc::c_int,
            id: u64,
        }
        let has = rustix::thread::capabilities(None).ok()?.effective;
        if !has.contains(rustix::thread::CapabilitySet::DAC_READ_SEARCH) {
            return None;
        }
        let mut handle = Handle { bytes: 8, kind: FILEID_KERNFS, id };
        let mount = fs::File::open(&self.mount).ok()?;
        // SAFETY: `handle` has the layout of struct file_handle with eight bytes of payload, as its
        // `bytes` says, and outlives the call.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                mount.as_raw_fd(),
                (&raw mut handle).cast::<libc::c_void>(),
                libc::O_PATH | libc::O_CLOEXEC,
            )
        };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let path = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
        // A mount that is nowhere to be seen has no path before it.
        let root = if self.own.is_some() { Path::new("/") } else { &self.mount };
        let path = path.strip_prefix(root).ok()?;
        // A removed group keeps its inode while something holds it; its name is gone.
        let live = fs::metadata(self.mount.join(path)).is_ok_and(|m| m.ino() == id);
        live.then(|| path.to_string_lossy().into_owned())
    }

    /// Removes a group with all groups below it; processes still in them are moved to `into`.
    ///
    /// # Errors
    /// [`CgroupError`] when groups are left at the deadline, because processes could not be moved or new
    /// ones came faster.
    pub fn dissolve(
        &self,
        group: &Cgroup,
        into: &Cgroup,
        deadline: Instant,
    ) -> Result<(), CgroupError> {
        loop {
            let groups = self.find_below(group.path(), |_| true);
            for path in groups.iter().rev() {
                let Ok(group) = self.open(path) else { continue };
                for pid in group.processes().unwrap_or_default() {
                    // One that has ended meanwhile needs no moving.
                    let _ = into.add(pid);
                }
                let _ = fs::remove_dir(group.absolute());
            }
            match group.remove(Instant::now() + Duration::from_millis(20)) {
                Err(_) if Instant::now() < deadline => {}
                done => return done,
            }
        }
    }

    /// The ids of a cgroup, of all above it and of all below it.
    pub(crate) fn ids_around(&self, cgroup: &Cgroup) -> Vec<u64> {
        let path = cgroup.path();
        let ends = path.char_indices().filter(|(_, letter)| *letter == '/').map(|(end, _)| end);
        let above = [0].into_iter().chain(ends).map(|end| path[..end].to_owned());
        let all = above.chain(self.find_below(path, |_| true));
        let ids = all.filter_map(|path| Some(self.open(&path).ok()?.id()));
        ids.chain([cgroup.id()]).collect()
    }

    /// The paths of all groups at or below `path` whose name passes `filter`, parents first; at most
    /// [`MAX_CGROUPS`] groups are visited.
    pub fn find_below(&self, path: &str, filter: impl Fn(&str) -> bool) -> Vec<String> {
        self.find_some_below(path, filter, MAX_CGROUPS).0
    }

    /// The same of all groups, and whether these are all: the deepest are left out where there are more.
    pub fn all_below(&self, path: &str) -> (Vec<String>, bool) {
        self.find_some_below(path, |_| true, MAX_CGROUPS)
    }

    fn find_some_below(
        &self,
        path: &str,
        filter: impl Fn(&str) -> bool,
        max: usize,
    ) -> (Vec<String>, bool) {
        let mut found = Vec::new();
        // By levels: whoever makes very many inside a group of theirs hides none above.
        let mut open = VecDeque::from([path.trim_matches('/').to_owned()]);
        let mut visited = 0;
        while let Some(group) = open.pop_front() {
            if visited == max {
                return (found, false);
            }
            visited += 1;
            if filter(group.rsplit('/').next().unwrap_or_default()) {
                found.push(group.clone());
            }
            let Ok(entries) = fs::read_dir(self.mount.join(&group)) else { continue };
            for entry in entries.flatten() {
                if entry.file_type().is_ok_and(|t| t.is_dir()) {
                    let name = entry.file_name();
                    let name = name.to_string_lossy();
                    open.push_back(if group.is_empty() {
                        name.into_owned()
                    } else {
                        format!("{group}/{name}")
                    });
                }
            }
        }
        (found, true)
    }
}

impl Cgroup {
    /// Path relative to the mount point.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Where its directory is.
    pub fn absolute(&self) -> &Path {
        &self.absolute
    }

    /// Its id: the inode number, and what eBPF programs call the cgroup id.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Locks the group, for as long as this value lives: by that others know that somebody is at work on it,
    /// in whatever PID namespace. False if it is locked already.
    pub fn try_lock(&self) -> bool {
        rustix::fs::flock(&self.dir, FlockOperation::NonBlockingLockExclusive).is_ok()
    }

    /// How deep it lies; the root is at 0.
    pub fn level(&self) -> u32 {
        self.path.split('/').filter(|part| !part.is_empty()).count() as u32
    }

    /// The processes in the group itself.
    ///
    /// # Errors
    /// [`CgroupError::Io`].
    pub fn processes(&self) -> Result<Vec<u32>, CgroupError> {
        let text = fs::read_to_string(self.absolute.join("cgroup.procs"))
            .map_err(io_error(&self.path, "read cgroup.procs"))?;
        // A process of an outer PID namespace reads as 0.
        Ok(text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid != 0).collect())
    }

    /// Opens `cgroup.procs` for writing: a process that writes `0` there moves itself in.
    ///
    /// # Errors
    /// [`CgroupError::Io`].
    pub fn open_procs(&self) -> Result<fs::File, CgroupError> {
        let file = fs::OpenOptions::new().write(true).open(self.absolute.join("cgroup.procs"));
        file.map_err(io_error(&self.path, "open cgroup.procs"))
    }

    /// Moves a process into the group.
    ///
    /// # Errors
    /// [`CgroupError::Io`].
    pub fn add(&self, pid: u32) -> Result<(), CgroupError> {
        fs::write(self.absolute.join("cgroup.procs"), pid.to_string())
            .map_err(io_error(&self.path, "move a process into it"))
    }

    /// Removes the group, which must hold no process; tries again until `deadline` while processes that
    /// have just ended still leave it.
    ///
    /// # Errors
    /// [`CgroupError::Io`]; the group is still there.
    pub fn remove(&self, deadline: Instant) -> Result<(), CgroupError> {
        loop {
            match fs::remove_dir(&self.absolute) {
                Ok(()) => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(e) => return Err(io_error(&self.path, "remove")(e)),
            }
        }
    }
}

impl AsFd for Cgroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

/// The mount points of a type of file system; what is mounted of a whole hierarchy comes first.
pub(crate) fn mounts_of<'a>(
    mountinfo: &'a str,
    fs_type: &'a str,
) -> impl Iterator<Item = PathBuf> + 'a {
    // "ID PARENT DEV ROOT MOUNTPOINT OPTIONS ... - FSTYPE SOURCE OPTIONS"
    let all = mountinfo.lines().filter_map(move |line| {
        let (left, right) = line.split_once(" - ")?;
        let mut words = left.split(' ').skip(3);
        let is_whole = words.next()? == "/";
        let mount = words.next().filter(|_| right.split(' ').next() == Some(fs_type))?;
        Some((is_whole, PathBuf::from(mount)))
    });
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|(is_whole, _)| !is_whole);
    all.into_iter().map(|(_, mount)| mount)
}

/// Whether a tree is mounted that is larger than this cgroup namespace, as the host's in a container. The
/// kernel writes paths relative to the namespace, also those of processes, and they are no paths of the tree.
fn reaches_beyond_namespace(mountinfo: &str) -> bool {
    let lines = mountinfo.lines().filter(|line| line.contains(" - cgroup2 "));
    lines.filter_map(|line| line.split(' ').nth(3)).any(|root| root.starts_with("/.."))
}

pub(crate) fn is_cgroup2(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type as u64 == CGROUP2_MAGIC)
}

/// Mounts the hierarchy where nobody sees it; it goes with the descriptor.
fn mount_detached() -> rustix::io::Result<OwnedFd> {
    let context = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

fn io_error(path: &str, action: &'static str) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Io { path, action, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hierarchy_is_found_wherever_it_is_mounted() {
        let hybrid = "30 20 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      31 20 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n";
        let found: Vec<_> = mounts_of(hybrid, "cgroup2").collect();
        assert_eq!(found, [Path::new("/sys/fs/cgroup/unified")]);
        let part = "32 20 0:27 /a /mnt/part rw - cgroup2 cgroup2 rw\n";
        let found: Vec<_> = mounts_of(&format!("{part}{hybrid}"), "cgroup2").collect();
        assert_eq!(found, [Path::new("/sys/fs/cgroup/unified"), Path::new("/mnt/part")]);
    }

    #[test]
    fn the_tree_of_the_host_in_a_container_is_known() {
        let own = "31 20 0:27 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let hosts = "32 20 0:27 /../../.. /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
        assert!(!reaches_beyond_namespace(own));
        assert!(
            reaches_beyond_namespace(hosts) && reaches_beyond_namespace(&format!("{own}{hosts}"))
        );
    }

    #[test]
    fn a_group_has_one_path() {
        let (mount, shown) = (PathBuf::from("/mnt/own"), PathBuf::from("/sys/fs/cgroup"));
        let hierarchy = Hierarchy { mount, shown, own: None };
        for path in ["a/b", "a//b", "/a/b/", "///a///b", "/sys/fs/cgroup//a/b", "/mnt/own/a/./b"] {
            assert_eq!(hierarchy.relative(Path::new(path)), "a/b", "{path}");
        }
        assert_eq!(hierarchy.relative(Path::new("/")), "");
        assert_eq!(hierarchy.relative(Path::new("a/../b")), "a/../b");
    }

    #[test]
    fn a_walk_that_is_cut_short_says_so_and_leaves_out_the_deepest() {
        let mount = tempfile::tempdir().unwrap();
        for path in ["a", "b/c/d", "b/e", "f"] {
            fs::create_dir_all(mount.path().join(path)).unwrap();
        }
        let mount = mount.path().to_owned();
        let hierarchy = Hierarchy { shown: mount.clone(), mount, own: None };
        let find = |max| {
            let (mut found, whole) = hierarchy.find_some_below("", |_| true, max);
            found.sort();
            (found, whole)
        };
        assert_eq!(find(6).0, ["", "a", "b", "b/c", "b/e", "f"]);
        assert_eq!((find(6).1, find(7).1, find(7).0.len()), (false, true, 7));
    }

    #[test]
    fn version_one_alone_is_said_so() {
        let source = || io::Error::from_raw_os_error(libc::EPERM);
        let message = |v1| CgroupError::NoHierarchy { v1, source: source() }.to_string();
        assert!(message(true).contains("(only v1)") && message(true).contains("mount -t cgroup2"));
        assert!(!message(false).contains("only v1"));
    }
}
