//! The journal of a store: what a writer is about to do, so that the next one can finish or undo it should the
//! writer die.
//!
//! ```text
//! /run/tidegate/ID/journal.json    mode 0700; there only while a writer changes something
//! ```
//!
//! It is written to a temporary file and renamed before the kernel is changed, and removed when all is done. ID
//! tells stores apart: the name of the store's directory, the number of its BPF file system and of the
//! directory above. The writer holds a lock on the directory as long as it lives.
//!
//! A step names the limit, the network namespace and the kernel objects that the step makes or removes. What it
//! does not name (links, maps) has no life beyond its pins, and those are in the store.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use serde::{Deserialize, Serialize};

use super::{StoreError, io_error};

/// Where the journals of all stores are.
const RUN: &str = "/run/tidegate";
const FILE: &str = "journal.json";
const TEMPORARY: &str = "journal.json.tmp";
/// Of the format; another one is not read.
const VERSION: u32 = 1;
/// The largest journal that is read.
const BYTES_MAX: u64 = 1 << 16;
/// Where the mounts of this process and of the host are listed.
const MOUNTS: [&str; 2] = ["/proc/self/mountinfo", "/proc/1/mountinfo"];

/// What a writer does to a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Deed {
    /// Puts it on, or another one in its place.
    Install,
    /// Changes it in place.
    Change,
    /// Takes it off.
    Remove,
    /// Takes it off until another one is in its place, or put back if that fails.
    SetAside,
}

/// A kernel object of a device that the step makes or removes. If the step ends half way it goes, unless it
/// `stays` or a limit of the store has it by then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Object {
    /// Filters of clsact with our programs, but for those whose program's id is given.
    Filters {
        /// The device.
        ifindex: u32,
        /// These are other limits'.
        stay: Vec<u32>,
    },
    /// The ifb device of a device.
    Ifb {
        /// The device that it is for.
        ifindex: u32,
    },
    /// The HTB at the root of a device.
    Htb {
        /// The device.
        ifindex: u32,
    },
    /// The qdisc clsact of a device; it goes only if nobody else uses it.
    Clsact {
        /// The device.
        ifindex: u32,
        /// Somebody else made it.
        stays: bool,
    },
}

/// What a writer is about to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Step {
    pub deed: Deed,
    /// The name of the limit.
    pub limit: String,
    /// The inode of the network namespace of the objects.
    pub network_namespace: u64,
    /// In the order in which they go.
    pub objects: Vec<Object>,
}

/// What is in the file.
#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    version: u32,
    /// The path of the store.
    store: PathBuf,
    /// The number of its BPF file system.
    device: u64,
    /// The writer.
    pid: u32,
    step: Step,
}

/// The journal of a store, held by its writer.
#[derive(Debug)]
pub(super) struct Journal {
    dir: PathBuf,
    /// Keeps others from taking the writer for dead.
    _lock: OwnedFd,
    store: PathBuf,
    device: u64,
}

impl Journal {
    /// That of the store at `root`, which exists and is locked.
    pub(super) fn open(root: &Path) -> Result<Journal, StoreError> {
        let above =
            fs::metadata(root.parent().unwrap_or(root)).map_err(io_error(root, "look at"))?;
        let name = root.file_name().unwrap_or_default().to_string_lossy();
        let device = above.dev();
        let dir = Path::new(RUN).join(format!("{name}-{device:x}-{:x}", above.ino()));
        fs::create_dir_all(RUN).map_err(io_error(Path::new(RUN), "create"))?;
        loop {
            match fs::DirBuilder::new().mode(0o700).create(&dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(io_error(&dir, "create")(e));
                }
                _ => {}
            }
            match lock_dir(&dir, FlockOperation::LockExclusive) {
                Ok(Some(lock)) => {
                    return Ok(Journal { dir, _lock: lock, store: absolute(root), device });
                }
                Ok(None) => {}
                Err(e) => return Err(io_error(&dir, "lock")(e)),
            }
        }
    }

    /// Says what is about to be done, before it is.
    pub(super) fn begin(&self, step: Step) -> Result<(), StoreError> {
        let (store, pid) = (self.store.clone(), std::process::id());
        let contents = Contents { version: VERSION, store, device: self.device, pid, step };
        let (temporary, file) = (self.dir.join(TEMPORARY), self.dir.join(FILE));
        let text = serde_json::to_vec_pretty(&contents).map_err(io::Error::other);
        text.and_then(|text| fs::write(&temporary, text))
            .and_then(|()| fs::rename(&temporary, &file))
            .map_err(io_error(&file, "write"))
    }

    /// All of it is done, or undone.
    pub(super) fn end(&self) {
        let _ = fs::remove_file(self.dir.join(FILE));
    }

    /// What a writer that died was about to do.
    pub(super) fn step(&self) -> Option<Step> {
        read(&self.dir).map(|contents| contents.step)
    }

    /// The same of writers whose store is no more: the BPF file system that was here has been unmounted.
    pub(super) fn steps_of_gone_stores(&self) -> Vec<(Step, GoneJournal)> {
        let gone = |dir: PathBuf| {
            let contents = read(&dir).filter(|contents| contents.store == self.store)?;
            if contents.device == self.device || is_mounted(contents.device) {
                return None;
            }
            let lock = lock_dir(&dir, FlockOperation::NonBlockingLockExclusive).ok()??;
            Some((contents.step, GoneJournal { dir, _lock: lock }))
        };
        journals().filter_map(gone).collect()
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.dir.join(TEMPORARY));
        // Not if a step is in it.
        let _ = fs::remove_dir(&self.dir);
    }
}

/// A journal whose store is no more.
#[derive(Debug)]
pub(super) struct GoneJournal {
    dir: PathBuf,
    _lock: OwnedFd,
}

impl GoneJournal {
    pub(super) fn remove(self) {
        for file in [FILE, TEMPORARY] {
            let _ = fs::remove_file(self.dir.join(file));
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Whether a writer of the store at `root` has begun something and not ended it, or does so now.
pub(super) fn has_step(root: &Path) -> bool {
    let store = absolute(root);
    journals().any(|dir| read(&dir).is_some_and(|contents| contents.store == store))
}

fn journals() -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(RUN).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

fn read(dir: &Path) -> Option<Contents> {
    let file = dir.join(FILE);
    if fs::metadata(&file).ok()?.len() > BYTES_MAX {
        return None;
    }
    let contents: Contents = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    (contents.version == VERSION).then_some(contents)
}

/// The path of the store, which need not exist.
fn absolute(root: &Path) -> PathBuf {
    let above = root.parent().and_then(|above| above.canonicalize().ok());
    above.zip(root.file_name()).map_or_else(|| root.to_owned(), |(above, name)| above.join(name))
}

/// The locked directory; `None` if somebody else has it, or has just removed it.
fn lock_dir(dir: &Path, how: FlockOperation) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let held = match rustix::fs::open(dir, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        held => held?,
    };
    match flock(held.as_fd(), how) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        done => done?,
    }
    let is = rustix::fs::fstat(&held)?;
    let named = fs::metadata(dir).is_ok_and(|m| (m.dev(), m.ino()) == (is.st_dev, is.st_ino));
    Ok(named.then_some(held))
}

/// Whether a file system is mounted, here or on the host.
fn is_mounted(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let number = format!("{major}:{minor}");
    MOUNTS.iter().any(|file| {
        let mounts = fs::read_to_string(file).unwrap_or_default();
        mounts.lines().any(|line| line.split(' ').nth(2) == Some(number.as_str()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> Step {
        Step {
            deed: Deed::Install,
            limit: "up".to_owned(),
            network_namespace: 4_026_531_840,
            objects: vec![
                Object::Filters { ifindex: 2, stay: vec![7] },
                Object::Ifb { ifindex: 2 },
                Object::Htb { ifindex: 2 },
                Object::Clsact { ifindex: 2, stays: false },
            ],
        }
    }

    #[test]
    fn the_format_is_plain_and_has_a_version() {
        let contents = Contents {
            version: VERSION,
            store: "/sys/fs/bpf/tidegate".into(),
            device: 28,
            pid: 9,
            step: step(),
        };
        let text = serde_json::to_string(&contents).unwrap();
        assert_eq!(
            text,
            "{\"version\":1,\"store\":\"/sys/fs/bpf/tidegate\",\"device\":28,\"pid\":9,\"step\":{\"deed\":\
             \"install\",\"limit\":\"up\",\"network_namespace\":4026531840,\"objects\":[{\"kind\":\"filters\",\
             \"ifindex\":2,\"stay\":[7]},{\"kind\":\"ifb\",\"ifindex\":2},{\"kind\":\"htb\",\"ifindex\":2},\
             {\"kind\":\"clsact\",\"ifindex\":2,\"stays\":false}]}}"
        );
        assert_eq!(serde_json::from_str::<Contents>(&text).unwrap().step, step());
    }

    #[test]
    fn a_torn_or_foreign_journal_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read(dir.path()).is_none(), "there is none");
        for text in ["", "{", "{\"version\":2}", "[]"] {
            fs::write(dir.path().join(FILE), text).unwrap();
            assert!(read(dir.path()).is_none(), "{text}");
        }
    }

    #[test]
    fn a_mount_is_known_by_its_number() {
        assert!(is_mounted(fs::metadata("/proc").unwrap().dev()));
        assert!(!is_mounted(rustix::fs::makedev(0xfff, 0xfffff)));
    }
}
