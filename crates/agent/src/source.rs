//! Events of cgroups and files from the kernel.

use std::{
    collections::BTreeSet,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use tidegate_sys::{
    cgroup::Cgroup,
    gate::{Gate, GateError, GateSettings},
};

use crate::report::{GateReport, GateState};

/// Cgroups that are watched at most; with more the tree is scanned at an interval.
pub const WATCHES_MAX: usize = 50_000;
/// Bytes of events that are read at once.
const BUFFER_BYTES: usize = 16 << 10;

/// In a volume of Kubernetes all files are links through this one, which is replaced when they change.
const VOLUME_DATA: &str = "..data";

/// Tells when cgroups come and go. It may also hold those that come until they are decided.
pub trait CgroupSource {
    /// Readable when there is an event.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Takes the events; true if there was one that counts.
    ///
    /// # Errors
    /// Those of the operating system.
    fn take(&mut self) -> io::Result<bool>;
    /// The cgroups that there are now. True if the source has learned of some only by this: what has come
    /// below them meanwhile is not known yet.
    fn follow(&mut self, mount: &Path, cgroups: &mut dyn Iterator<Item = &str>) -> bool;
    /// Whether it tells of every cgroup.
    fn is_whole(&self) -> bool;
    /// Holds these cgroups no longer.
    ///
    /// # Errors
    /// Those of the operating system. They are held until their deadline.
    fn decide(&mut self, cgroups: &BTreeSet<u64>) -> io::Result<()>;
    /// Whether it holds cgroups, and what became of them.
    fn gate(&self) -> GateReport;
}

/// The gate of the kernel, which reports each cgroup as it is made, and holds it.
#[derive(Debug)]
pub struct Held {
    gate: Gate,
    deadline: Duration,
}

impl Held {
    /// Holds what is made below `top` from now on.
    ///
    /// # Errors
    /// [`GateError`], where the kernel or the rights do not suffice.
    pub fn open(top: &Cgroup, deadline: Duration) -> Result<Held, GateError> {
        let gate = Gate::attach(top, GateSettings { deadline })?;
        Ok(Held { gate, deadline })
    }
}

impl CgroupSource for Held {
    fn fd(&self) -> BorrowedFd<'_> {
        self.gate.as_fd()
    }

    fn take(&mut self) -> io::Result<bool> {
        Ok(self.gate.events().map_err(io::Error::other)? > 0)
    }

    fn follow(&mut self, _: &Path, _: &mut dyn Iterator<Item = &str>) -> bool {
        false
    }

    fn is_whole(&self) -> bool {
        true
    }

    fn decide(&mut self, cgroups: &BTreeSet<u64>) -> io::Result<()> {
        // Nobody decides the others again.
        let all: Vec<_> = cgroups.iter().map(|id| self.gate.decide(*id)).collect();
        all.into_iter().collect::<Result<(), _>>().map_err(io::Error::other)
    }

    fn gate(&self) -> GateReport {
        let counters = self.gate.counters().unwrap_or_default();
        GateReport {
            state: GateState::Open,
            reason: None,
            deadline_ms: u64::try_from(self.deadline.as_millis()).unwrap_or(u64::MAX),
            late_bytes: counters.late_bytes,
            unheld_cgroups: counters.full,
            lost_events: counters.lost,
        }
    }
}

/// inotify on each directory of the tree.
#[derive(Debug)]
pub struct Inotify {
    fd: OwnedFd,
    watched: BTreeSet<String>,
    whole: bool,
}

fn new() -> io::Result<OwnedFd> {
    Ok(inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?)
}

/// Reads all events; true if one passes, or some were lost.
fn take(fd: &OwnedFd, passes: impl Fn(ReadFlags, &str) -> bool) -> io::Result<bool> {
    let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
    let mut reader = Reader::new(fd, &mut buffer);
    let mut any = false;
    loop {
        match reader.next() {
            Ok(event) => {
                let name = event.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
                let lost = event.events().contains(ReadFlags::QUEUE_OVERFLOW);
                any |= lost || passes(event.events(), &name);
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(any),
            Err(e) => return Err(e.into()),
        }
    }
}

impl Inotify {
    /// Watches nothing yet.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn new() -> io::Result<Inotify> {
        Ok(Inotify { fd: new()?, watched: BTreeSet::new(), whole: true })
    }
}

impl CgroupSource for Inotify {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn take(&mut self) -> io::Result<bool> {
        // Files of the kernel come and go with their directory, and with controllers.
        take(&self.fd, |flags, _| flags.contains(ReadFlags::ISDIR))
    }

    fn follow(&mut self, mount: &Path, cgroups: &mut dyn Iterator<Item = &str>) -> bool {
        let flags = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ONLYDIR;
        let (mut now, mut learned, mut whole) = (BTreeSet::new(), false, true);
        for path in cgroups {
            if now.len() == WATCHES_MAX {
                whole = false;
                break;
            }
            // One that was removed and made again has a new directory, and no watch: adding one that there is
            // changes nothing.
            match inotify::add_watch(&self.fd, mount.join(path), flags) {
                Ok(_) => {
                    learned |= !self.watched.contains(path);
                    now.insert(path.to_owned());
                }
                // It has gone meanwhile.
                Err(rustix::io::Errno::NOENT) => {}
                Err(_) => whole = false,
            }
        }
        (self.watched, self.whole) = (now, whole);
        learned
    }

    fn is_whole(&self) -> bool {
        self.whole
    }

    fn decide(&mut self, _: &BTreeSet<u64>) -> io::Result<()> {
        Ok(())
    }

    fn gate(&self) -> GateReport {
        GateReport::default()
    }
}

/// Tells when the files of a directory change. A directory that does not exist is waited for at the nearest
/// one above that does.
#[derive(Debug)]
pub struct Files {
    fd: OwnedFd,
    directory: PathBuf,
}

impl Files {
    /// Watches a directory.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn watch(directory: &Path) -> io::Result<Files> {
        let files = Files { fd: new()?, directory: directory.to_owned() };
        files.renew()?;
        Ok(files)
    }

    fn renew(&self) -> io::Result<()> {
        let flags = WatchFlags::CLOSE_WRITE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF;
        let above = WatchFlags::CREATE | WatchFlags::MOVED_TO;
        'again: loop {
            let mut missing = None;
            for path in self.directory.ancestors() {
                let at = if path.as_os_str().is_empty() { Path::new(".") } else { path };
                let flags = if missing.is_none() { flags } else { above };
                match inotify::add_watch(&self.fd, at, flags) {
                    Err(rustix::io::Errno::NOENT) => missing = Some(path),
                    Err(e) => return Err(e.into()),
                    // Made before that one was watched.
                    Ok(_) if missing.is_some_and(Path::exists) => continue 'again,
                    Ok(_) => return Ok(()),
                }
            }
            return Ok(());
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Takes the events; true if a file may be another.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn take(&self) -> io::Result<bool> {
        let names = self.directory.iter().map(|name| name.to_string_lossy());
        let names: BTreeSet<_> = names.collect();
        let any = take(&self.fd, |flags, name| {
            let itself = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::IGNORED;
            let is_named = name.ends_with(".toml") || name == VOLUME_DATA;
            is_named || flags.intersects(itself) || names.contains(name)
        })?;
        if any {
            self.renew()?;
        }
        Ok(any)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn directories_that_come_and_go_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut source = Inotify::new().unwrap();
        assert!(source.follow(dir.path(), &mut [""].into_iter()) && source.is_whole());
        assert!(!source.follow(dir.path(), &mut [""].into_iter()));
        assert!(!source.take().unwrap());
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(!source.take().unwrap());
        fs::create_dir(dir.path().join("a")).unwrap();
        assert!(source.take().unwrap());
        assert!(source.follow(dir.path(), &mut ["", "a"].into_iter()));
        fs::create_dir(dir.path().join("a/b")).unwrap();
        assert!(source.take().unwrap());
        fs::remove_dir(dir.path().join("a/b")).unwrap();
        fs::remove_dir(dir.path().join("a")).unwrap();
        assert!(source.take().unwrap());
        // Made again, it is a new directory.
        fs::create_dir(dir.path().join("a")).unwrap();
        assert!(source.take().unwrap());
        source.follow(dir.path(), &mut ["", "a"].into_iter());
        fs::create_dir(dir.path().join("a/b")).unwrap();
        assert!(source.take().unwrap());
    }

    /// Events of files say nothing of cgroups. That some were lost does.
    #[test]
    fn events_that_are_lost_are_told() {
        let events = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        let events: usize = events.trim().parse().unwrap();
        if events > 1 << 18 {
            return eprintln!("SKIP events_that_are_lost_are_told: {events} events are kept");
        }
        let dir = tempfile::tempdir().unwrap();
        let mut source = Inotify::new().unwrap();
        source.follow(dir.path(), &mut [""].into_iter());
        let file = dir.path().join("file");
        let make = || {
            fs::write(&file, "").unwrap();
            fs::remove_file(&file).unwrap();
        };
        // Two events each.
        (0..events / 2 - 1).for_each(|_| make());
        assert!(!source.take().unwrap(), "none was lost");
        (0..=events / 2).for_each(|_| make());
        assert!(source.take().unwrap());
        assert!(!source.take().unwrap());
    }

    #[test]
    fn a_configmap_that_changes_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let fill = |version: &str| {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("a.toml"), version).unwrap();
            symlink(version, at("..data_tmp")).unwrap();
            fs::rename(at("..data_tmp"), at("..data")).unwrap();
        };
        fill("..1");
        symlink("..data/a.toml", at("a.toml")).unwrap();
        let files = Files::watch(dir.path()).unwrap();
        assert!(!files.take().unwrap());
        fill("..2");
        assert_eq!(fs::read_to_string(at("a.toml")).unwrap(), "..2");
        assert!(files.take().unwrap());
    }

    #[test]
    fn a_directory_is_waited_for_that_comes_later_with_those_above_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let files = Files::watch(&at("opt/x/etc")).unwrap();
        for (made, moved) in [("opt", None), ("y/etc", Some("opt/x"))] {
            fs::create_dir_all(at(made)).unwrap();
            moved.into_iter().for_each(|to| fs::rename(at("y"), at(to)).unwrap());
            assert!(files.take().unwrap(), "{made}");
        }
        fs::write(at("opt/x/etc/a.toml"), "").unwrap();
        assert!(files.take().unwrap());
        // It goes with those above it, and all come again.
        fs::remove_dir_all(at("opt")).unwrap();
        while files.take().unwrap() {}
        fs::create_dir_all(at("opt/x/etc")).unwrap();
        assert!(files.take().unwrap());
        fs::write(at("opt/x/etc/a.toml"), "").unwrap();
        assert!(files.take().unwrap());
    }

    #[test]
    fn files_that_change_are_told_also_in_a_directory_that_comes_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tidegate");
        let files = Files::watch(&path).unwrap();
        assert!(!files.take().unwrap());
        fs::create_dir(&path).unwrap();
        assert!(files.take().unwrap());
        fs::write(path.join("a.toml"), "").unwrap();
        assert!(files.take().unwrap());
        fs::write(path.join("a.toml~"), "").unwrap();
        assert!(!files.take().unwrap());
        fs::remove_file(path.join("a.toml")).unwrap();
        assert!(files.take().unwrap());
    }
}
