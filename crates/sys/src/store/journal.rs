//! The journal of a store: what a writer is about to do, so that the next one can finish or undo it
//! should the writer die.
//!
//! ```text
//! /run/tidegate/ID/journal.json    mode 0700; there only while a writer changes something
//! ```
//!
//! It is written to a temporary file and renamed before the kernel is changed, and renamed back when all is
//! done. A writer of several steps makes the temporary file as long as any step before it begins, and writes
//! over it from then on: `/run` may become full meanwhile, and each step can still be written. ID tells
//! stores apart: the name of the store's directory, the number of its BPF file system and of the directory
//! above. The writer holds a lock on the directory as long as it lives.
//!
//! A step names the limit, the network namespace and the kernel objects that the step makes or removes.
//! What it does not name (links, maps) has no life beyond its pins, and those are in the store.

use std::{
    fs,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::OnceLock,
};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use serde::{Deserialize, Serialize};

use super::{StoreError, io_error};
use crate::mounts;

/// Where the journals of all stores are.
const RUN: &str = "/run/tidegate";
const FILE: &str = "journal.json";
const TEMPORARY: &str = "journal.json.tmp";
/// Of the format; another one is not read.
const VERSION: u32 = 1;
/// The largest journal that is read.
const BYTES_MAX: u64 = 1 << 16;
/// More than a step takes: so much is reserved.
const RESERVED_BYTES: u64 = 1 << 14;
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
    /// Has it run other programs with the maps that it has.
    TakeOver,
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
        ifindex: u32,
        /// These are other limits'.
        stay: Vec<u32>,
    },
    /// The ifb device of a device.
    Ifb { ifindex: u32 },
    /// The qdisc at the root of a device.
    #[serde(alias = "htb")]
    RootQdisc { ifindex: u32 },
    /// The qdisc clsact of a device; it goes only if nobody else uses it.
    Clsact {
        ifindex: u32,
        /// Somebody else made it.
        stays: bool,
    },
}

impl Object {
    /// The number of the device.
    pub(crate) fn ifindex(&self) -> u32 {
        match self {
            Object::Filters { ifindex, .. }
            | Object::Ifb { ifindex }
            | Object::RootQdisc { ifindex }
            | Object::Clsact { ifindex, .. } => *ifindex,
        }
    }
}

/// What a writer is about to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Step {
    pub deed: Deed,
    /// The name of the limit.
    pub limit: String,
    /// The inode of the network namespace of the objects.
    pub network_namespace: u64,
    /// The name of their device; empty: not known.
    #[serde(default)]
    pub device: String,
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

/// The journal of a store, held by its writer. Where it cannot be written limits still come off: then it is
/// remembered why, and nothing else is begun.
#[derive(Debug)]
pub(super) struct Journal {
    dir: PathBuf,
    /// Keeps others from taking the writer for dead.
    lock: io::Result<OwnedFd>,
    store: PathBuf,
    device: u64,
    /// Why it could not be written when a limit came off.
    refused: OnceLock<StoreError>,
}

impl Journal {
    /// That of the store at `root`, which exists and is locked.
    pub(super) fn open(root: &Path) -> Result<Journal, StoreError> {
        Self::open_in(&mounts::host_path(Path::new(RUN)), root)
    }

    fn open_in(run: &Path, root: &Path) -> Result<Journal, StoreError> {
        let above =
            fs::metadata(root.parent().unwrap_or(root)).map_err(io_error(root, "look at"))?;
        let name = root.file_name().unwrap_or_default().to_string_lossy();
        let device = above.dev();
        let dir = run.join(format!("{name}-{device:x}-{:x}", above.ino()));
        let lock = create_locked(run, &dir);
        Ok(Journal { dir, lock, store: absolute(root), device, refused: OnceLock::new() })
    }

    /// Reserves room for each step that this writer begins, before it begins the first for which the journal
    /// is needed.
    pub(super) fn reserve(&self) -> Result<(), StoreError> {
        let temporary = self.dir.join(TEMPORARY);
        let blank = [b' '; RESERVED_BYTES as usize];
        let done = self.is_open().and_then(|()| fs::write(&temporary, blank));
        done.map_err(|e| {
            let _ = fs::remove_file(&temporary);
            no_journal(&self.dir)(e)
        })
    }

    fn is_open(&self) -> io::Result<()> {
        let Err(e) = &self.lock else { return Ok(()) };
        Err(e.raw_os_error().map_or_else(|| e.kind().into(), io::Error::from_raw_os_error))
    }

    /// Why it could not be written when a limit came off without it.
    pub(super) fn refused(&self) -> Option<&StoreError> {
        self.refused.get()
    }

    /// Says what is about to be done, before it is. Only what takes a limit off is done all the same where
    /// nothing can be written.
    pub(super) fn begin(&self, step: Step) -> Result<(), StoreError> {
        let is_removal = step.deed == Deed::Remove;
        match self.write(step) {
            Err(e) if is_removal => {
                let _ = self.refused.set(e);
                Ok(())
            }
            done => done,
        }
    }

    fn write(&self, step: Step) -> Result<(), StoreError> {
        let (store, pid) = (self.store.clone(), std::process::id());
        let contents = Contents { version: VERSION, store, device: self.device, pid, step };
        let (temporary, file) = (self.dir.join(TEMPORARY), self.dir.join(FILE));
        let text = serde_json::to_vec_pretty(&contents).map_err(io::Error::other);
        self.is_open()
            .and(text)
            .and_then(|text| write_over(&temporary, &text))
            .and_then(|()| fs::rename(&temporary, &file))
            .map_err(no_journal(&self.dir))
    }

    /// All of it is done, or undone. Its room is the next step's.
    pub(super) fn end(&self) {
        let _ = fs::rename(self.dir.join(FILE), self.dir.join(TEMPORARY));
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

/// Writes a text and spaces up to the end of the file, if that is longer: what is reserved stays so.
fn write_over(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = fs::File::options().write(true).create(true).truncate(false).open(path)?;
    let rest = file.metadata()?.len().saturating_sub(text.len() as u64);
    file.write_all(text)?;
    io::copy(&mut io::repeat(b' ').take(rest), &mut file).map(drop)
}

fn no_journal(dir: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = dir.display().to_string();
    move |source| StoreError::NoJournal { path, source }
}

/// Makes the directory of a journal and waits until it is ours.
fn create_locked(run: &Path, dir: &Path) -> io::Result<OwnedFd> {
    fs::create_dir_all(run)?;
    loop {
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        if let Some(lock) = lock_dir(dir, FlockOperation::LockExclusive)? {
            return Ok(lock);
        }
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

/// The file that the agent of the store at `root` has locked.
pub(super) fn agent_lock(root: &Path) -> PathBuf {
    let store = absolute(root).to_string_lossy().trim_matches('/').replace('/', "-");
    mounts::host_path(Path::new(RUN)).join(format!("agent-{store}.lock"))
}

/// Whether a writer of the store at `root` has begun something and not ended it, or does so now.
pub(super) fn has_step(root: &Path) -> bool {
    let store = absolute(root);
    journals().any(|dir| read(&dir).is_some_and(|contents| contents.store == store))
}

fn journals() -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(mounts::host_path(Path::new(RUN))).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

fn read(dir: &Path) -> Option<Contents> {
    let file = dir.join(FILE);
    let is = fs::symlink_metadata(&file).ok()?;
    if is.len() > BYTES_MAX || !is.is_file() || is.uid() != rustix::process::geteuid().as_raw() {
        return None;
    }
    let contents: Contents = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    (contents.version == VERSION).then_some(contents)
}

/// The path of the store as the host has it; the store need not exist.
pub(super) fn absolute(root: &Path) -> PathBuf {
    let root = mounts::path_on_host(root);
    let above = root.parent().and_then(|above| above.canonicalize().ok());
    above.zip(root.file_name()).map_or_else(|| root.clone(), |(above, name)| above.join(name))
}

/// The locked directory; `None` if somebody else has it, or has just removed it.
fn lock_dir(dir: &Path, how: FlockOperation) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let held = match rustix::fs::open(dir, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        held => held?,
    };
    match flock(held.as_fd(), how) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        done => done?,
    }
    let is = rustix::fs::fstat(&held)?;
    if is.st_uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it belongs to another user; remove it"));
    }
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
    use rustix::{
        mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount},
        thread::{UnshareFlags, unshare_unsafe},
    };

    use super::*;

    fn step() -> Step {
        Step {
            deed: Deed::Install,
            limit: "up".to_owned(),
            network_namespace: 4_026_531_840,
            device: "eth0".to_owned(),
            objects: vec![
                Object::Filters { ifindex: 2, stay: vec![7] },
                Object::Ifb { ifindex: 2 },
                Object::RootQdisc { ifindex: 2 },
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
             \"install\",\"limit\":\"up\",\"network_namespace\":4026531840,\"device\":\"eth0\",\"objects\":[\
             {\"kind\":\"filters\",\"ifindex\":2,\"stay\":[7]},{\"kind\":\"ifb\",\"ifindex\":2},{\"kind\":\
             \"root_qdisc\",\"ifindex\":2},{\"kind\":\"clsact\",\"ifindex\":2,\"stays\":false}]}}"
        );
        assert_eq!(serde_json::from_str::<Contents>(&text).unwrap().step, step());
        // An earlier version had HTB alone at the root.
        let earlier = text.replace("root_qdisc", "htb");
        assert_eq!(serde_json::from_str::<Contents>(&earlier).unwrap().step, step());
        // The first writers did not name the device.
        let earlier = text.replace("\"device\":\"eth0\",", "");
        let expected = Step { device: String::new(), ..step() };
        assert_eq!(serde_json::from_str::<Contents>(&earlier).unwrap().step, expected);
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

    /// `/run` may fill up while a writer is at work: what it has reserved is enough for all its steps.
    #[test]
    fn root_a_journal_is_written_where_no_room_is_left() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_a_journal_is_written_where_no_room_is_left: needs root");
            return;
        }
        let in_small_run = || {
            // SAFETY: unsharing mounts touches no memory; only this thread, which ends, changes namespace.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            let run = tempfile::tempdir().unwrap();
            mount("tmpfs", run.path(), "tmpfs", MountFlags::empty(), Some(c"size=64k")).unwrap();
            let journal = Journal::open_in(run.path(), Path::new("/sys/t")).unwrap();
            journal.reserve().unwrap();
            let mut other = fs::File::create(run.path().join("other")).unwrap();
            while other.write_all(&[0; 1024]).is_ok() {}
            assert!(fs::write(run.path().join("more"), [0; 8192]).is_err(), "it is full");
            let with = |stay: usize| {
                let stay = (0..stay as u32).collect();
                Step { objects: vec![Object::Filters { ifindex: 2, stay }], ..step() }
            };
            // Also a short one after a long one.
            for count in [200, 3, 300, 0] {
                journal.begin(with(count)).unwrap();
                assert_eq!(journal.step(), Some(with(count)));
                journal.end();
                assert_eq!(journal.step(), None);
            }
            // A writer that begins without room says so, and the journal is as it was.
            drop(journal);
            while other.write_all(&[0; 1024]).is_ok() {}
            let journal = Journal::open_in(run.path(), Path::new("/sys/t")).unwrap();
            assert!(matches!(journal.reserve(), Err(StoreError::NoJournal { .. })));
            assert!(journal.begin(step()).is_err());
            assert_eq!(journal.step(), None);
            drop(journal);
            unmount(run.path(), UnmountFlags::DETACH).unwrap();
        };
        std::thread::scope(|scope| scope.spawn(in_small_run).join().unwrap());
    }

    #[test]
    fn a_mount_is_known_by_its_number() {
        assert!(is_mounted(fs::metadata("/proc").unwrap().dev()));
        assert!(!is_mounted(rustix::fs::makedev(0xfff, 0xfffff)));
    }
}
