//! Named network namespaces, as `ip netns` makes them.
//!
//! A namespace lives as long as something refers to it; a bind mount of its file on
//! `/run/netns/NAME` is what gives it a name. The thread that makes one must be in it for a moment,
//! so a helper thread does that and ends: the caller never changes namespace.

use std::{
    fs::{self, File, Metadata},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    panic,
    path::{Path, PathBuf},
    thread,
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    mount::{
        MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change,
        unmount,
    },
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

use super::{NetError, Netlink};

/// Where `ip netns` looks for names.
const NETNS_DIR: &str = "/run/netns";
/// The current thread's namespace; `/proc/self` would be the main thread's.
const THREAD_NETNS: &str = "/proc/thread-self/ns/net";

/// A network namespace: one made here (and removed on drop) or one that existed before.
#[derive(Debug)]
pub struct NetNs {
    name: String,
    fd: OwnedFd,
    /// The mount to remove, if this value made it.
    owned_mount: Option<PathBuf>,
}

impl NetNs {
    /// Makes a namespace named `name` with its loopback device up. Dropping the value removes the
    /// name; the namespace itself goes when the last process and file descriptor in it are gone.
    ///
    /// On error nothing is left behind.
    pub fn create(name: &str) -> Result<Self, NetError> {
        let path = path_of(name)?;
        let action = format!("make the network namespace {name:?}");
        share_netns_dir().map_err(|e| NetError::refused(&action, e))?;
        // Fails if the name is taken.
        File::create_new(&path).map_err(|e| NetError::refused(&action, e))?;
        let made = thread::scope(|scope| {
            join(scope.spawn(|| -> io::Result<OwnedFd> {
                // SAFETY: unsharing the network namespace touches no memory and no file
                // descriptor; only this helper thread, which ends below, changes namespace.
                unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
                let fd = OwnedFd::from(File::open(THREAD_NETNS)?);
                mount_bind(THREAD_NETNS, &path)?;
                Ok(fd)
            }))
        });
        let fd = match made {
            Ok(fd) => fd,
            Err(e) => {
                let _ = fs::remove_file(&path);
                return Err(NetError::refused(action, e));
            }
        };
        // From here on, drop cleans up.
        let netns = Self { name: name.into(), fd, owned_mount: Some(path) };
        let mut netlink = netns.netlink()?;
        let loopback = netlink.index_of("lo")?;
        netlink.set_up(loopback, true)?;
        Ok(netns)
    }

    /// Opens an existing named namespace; dropping the value leaves it alone.
    pub fn open(name: &str) -> Result<Self, NetError> {
        let file = File::open(path_of(name)?).map_err(|e| {
            NetError::refused(format!("open the network namespace {name:?} (see `ip netns`)"), e)
        })?;
        Ok(Self { name: name.into(), fd: file.into(), owned_mount: None })
    }

    /// Opens a namespace by the path of its file; dropping the value leaves it alone.
    ///
    /// # Errors
    /// [`NetError`] if there is no such file, or it is no network namespace when it is entered.
    pub fn at(path: &Path) -> Result<Self, NetError> {
        let shown = path.display().to_string();
        let action = format!("open the network namespace {shown}");
        let file = File::open(path).map_err(|e| NetError::refused(action, e))?;
        Ok(Self { name: shown, fd: file.into(), owned_mount: None })
    }

    /// Finds a namespace by the inode of its file, among those that have a name and those of processes;
    /// `None` if nothing that can be seen here is in it.
    pub fn find(inode: u64) -> Option<Self> {
        let is_it = |found: io::Result<Metadata>| found.is_ok_and(|m| m.ino() == inode);
        // A path may lead to another one when it is opened: names and process ids are used again.
        let file = Self::paths()
            .filter(|path| is_it(fs::metadata(path)))
            .filter_map(|path| File::open(path).ok())
            .find(|file| is_it(file.metadata()))?;
        Some(Self { name: String::new(), fd: file.into(), owned_mount: None })
    }

    /// The files of the namespaces that have a name or a process; some are of the same one.
    pub(crate) fn paths() -> impl Iterator<Item = PathBuf> {
        let list = |dir: &str| fs::read_dir(dir).into_iter().flatten().flatten();
        let named = list(NETNS_DIR).map(|entry| entry.path());
        named.chain(list("/proc").map(|entry| entry.path().join("ns/net")))
    }

    /// Opens the namespace that the calling thread is in.
    pub fn current() -> Result<Self, NetError> {
        let file = File::open(THREAD_NETNS)
            .map_err(|e| NetError::refused("open the current network namespace", e))?;
        Ok(Self { name: String::new(), fd: file.into(), owned_mount: None })
    }

    /// A second handle to the same namespace, which does not own its name.
    pub fn try_clone(&self) -> Result<Self, NetError> {
        let fd = self.fd.try_clone().map_err(|e| {
            NetError::refused("duplicate the file descriptor of a network namespace", e)
        })?;
        Ok(Self { name: self.name.clone(), fd, owned_mount: None })
    }

    /// The name under `/run/netns`; empty for [`NetNs::current`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file descriptor that `setns` takes.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A netlink socket in the namespace.
    ///
    /// # Errors
    /// [`NetError`] when the namespace cannot be entered, or refuses the socket.
    pub fn netlink(&self) -> Result<Netlink, NetError> {
        self.run(Netlink::open)?
    }

    /// Runs `f` in a thread that has entered the namespace, and returns what it returned. The
    /// caller's thread stays where it is. Sockets opened by `f` stay in the namespace. A panic of
    /// `f` goes on in the caller.
    ///
    /// Do not spawn processes that die with their parent in `f`: the kernel takes the end of the
    /// thread for the end of the parent. Use [`super::prepare`] in the calling thread instead.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T, NetError> {
        thread::scope(|scope| {
            join(scope.spawn(|| {
                self.enter_current_thread().map_err(|e| {
                    NetError::refused(format!("enter the network namespace {:?}", self.name), e)
                })?;
                Ok(f())
            }))
        })
    }

    /// Moves the calling thread into the namespace, for good. One system call on a descriptor
    /// that is already open: async-signal-safe, fit for a hook between `fork` and `exec`.
    pub fn enter_current_thread(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(self.fd(), Some(LinkNameSpaceType::Network))?)
    }
}

impl Drop for NetNs {
    fn drop(&mut self) {
        if let Some(path) = &self.owned_mount {
            let _ = unmount(path, UnmountFlags::DETACH);
            let _ = fs::remove_file(path);
        }
    }
}

/// Makes the directory of names a mount point whose mounts all mount namespaces share, as the first
/// `ip netns add` of a host does. If that came later it would cover the names that are there, and they could
/// not be removed any more.
fn share_netns_dir() -> io::Result<()> {
    fs::create_dir_all(NETNS_DIR)?;
    let directory = File::open(NETNS_DIR)?;
    // `ip netns` takes the same lock.
    flock(&directory, FlockOperation::LockExclusive)?;
    let share =
        || mount_change(NETNS_DIR, MountPropagationFlags::SHARED | MountPropagationFlags::REC);
    match share() {
        // It is no mount point yet.
        Err(Errno::INVAL) => {
            mount_bind_recursive(NETNS_DIR, NETNS_DIR)?;
            Ok(share()?)
        }
        shared => Ok(shared?),
    }
}

fn path_of(name: &str) -> Result<PathBuf, NetError> {
    let fits = !name.is_empty() && name.len() < 256 && name != "." && name != "..";
    if !fits || name.contains(['/', '\0']) {
        return Err(NetError::Invalid {
            field: "the name of a network namespace",
            read: format!("{name:?}"),
            expected: "use 1 to 255 characters without a slash",
        });
    }
    Ok(Path::new(NETNS_DIR).join(name))
}

fn join<T>(handle: thread::ScopedJoinHandle<'_, T>) -> T {
    handle.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        process::Command,
        sync::atomic::{AtomicBool, Ordering},
    };

    use rustix::mount::{MountFlags, mount};

    use super::*;

    #[test]
    fn names_that_would_leave_the_directory_are_refused() {
        for name in ["", ".", "..", "a/b", "a\0b"] {
            assert!(matches!(path_of(name), Err(NetError::Invalid { .. })), "{name:?}");
        }
        assert_eq!(path_of("a-b").unwrap(), Path::new("/run/netns/a-b"));
    }

    /// On a host where nobody has used `ip netns` yet, the first `ip netns add` takes no name from its owner.
    #[test]
    fn root_a_name_is_removed_although_ip_netns_came_later() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_a_name_is_removed_although_ip_netns_came_later: needs root");
            return;
        }
        let fresh_host = || {
            // SAFETY: unsharing mounts touches no memory; only this thread, which ends, changes namespace.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            mount("tmpfs", "/run", "tmpfs", MountFlags::empty(), None).unwrap();
            let netns = NetNs::create("a").unwrap();
            let ip = |verb: &str| {
                let done = Command::new("ip").args(["netns", verb, "b"]).status().unwrap();
                assert!(done.success(), "ip netns {verb}");
            };
            ip("add");
            drop(netns);
            assert!(!Path::new(NETNS_DIR).join("a").exists());
            ip("del");
        };
        thread::scope(|scope| join(scope.spawn(fresh_host)));
    }

    /// A name that leads to another namespace by the time it is opened is not taken for the first one.
    #[test]
    fn root_find_opens_the_namespace_that_it_has_found() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_find_opens_the_namespace_that_it_has_found: needs root");
            return;
        }
        let flip = || {
            // SAFETY: unsharing mounts touches no memory; only this thread, which ends, changes namespace.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            mount("tmpfs", "/run", "tmpfs", MountFlags::empty(), None).unwrap();
            let [one, other] = ["/run/one", "/run/other"].map(|path| {
                File::create_new(path).unwrap();
                let name = path.trim_start_matches("/run/");
                let netns = NetNs::create(name).unwrap();
                mount_bind(path_of(name).unwrap(), path).unwrap();
                // Only the file in `/run` leads there from now on.
                drop(netns);
                path
            });
            let inode = |path: &str| fs::metadata(path).unwrap().ino();
            let (wanted, stop) = (inode(one), AtomicBool::new(false));
            assert_ne!(wanted, inode(other));
            thread::scope(|scope| {
                scope.spawn(|| {
                    for target in [one, other].into_iter().cycle() {
                        symlink(target, format!("{NETNS_DIR}/next")).unwrap();
                        fs::rename(format!("{NETNS_DIR}/next"), format!("{NETNS_DIR}/flips"))
                            .unwrap();
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
                let found: Vec<_> = (0..300).filter_map(|_| NetNs::find(wanted)).collect();
                stop.store(true, Ordering::Relaxed);
                let opened =
                    found.iter().map(|netns| rustix::fs::fstat(netns.fd()).unwrap().st_ino);
                assert_eq!(
                    opened.filter(|inode| *inode != wanted).count(),
                    0,
                    "of {}",
                    found.len()
                );
            });
        };
        thread::scope(|scope| join(scope.spawn(flip)));
    }
}
