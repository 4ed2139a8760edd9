//! What must survive a restart, in files that are whole or as before.
//!
//! ```text
//!   STATE/fleet/session          the greatest session of this node
//!   STATE/fleet/group-NAME.json  what an acceptor promised
//! ```
//!
//! A file is written beside its place, to the disk, and renamed; what was torn is never read. A disk may take
//! long: [`Background`] has a thread of its own that waits for it.
//!
//! | disk | then |
//! |:--|:--|
//! | slow | what rests on a promise is sent when it is stored; all else goes on |
//! | full, or read-only | the node promises nothing and says so; it tries again each second |
//! | torn by a crash | the earlier file is there, whole |
//! | another's bytes | the daemon does not start, and says which file |

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use tidegate_core::fleet::{MemberId, message::Epoch, share::Saved};
use tidegate_sys::files::{open_regular, write_whole};

/// After a failure a file is not written again before so long.
const RETRY: Duration = Duration::from_secs(1);
/// The largest file that is read.
const FILE_MAX_BYTES: u64 = 64 << 10;

/// Storage that failed. What was to be written is not to be relied upon.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", .path.display())]
pub struct StorageError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// What became of a promise that is to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// It survives the process and the host.
    Durably,
    /// It is being written. Nothing that relies on it may be sent; ask again later.
    Pending,
}

/// Storage of a node.
pub trait Storage {
    /// What an acceptor promised in a group; `None` if it never ran.
    ///
    /// # Errors
    /// [`StorageError`].
    fn load(&mut self, group: &str) -> Result<Option<Saved>, StorageError>;

    /// Stores a promise, which replaces earlier ones of the group. Returns at once. To be called again with
    /// the same promise until it is stored.
    ///
    /// # Errors
    /// [`StorageError`] of the last try; the next call tries again.
    fn save(&mut self, group: &str, saved: Saved) -> Result<Stored, StorageError>;
}

/// Files in a directory.
#[derive(Debug, Clone)]
pub struct Files {
    dir: PathBuf,
}

/// As in the file. The aliases are the names of versions before this one: a promise outlives an upgrade.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Promises {
    promised_number: u64,
    #[serde(alias = "promised_auditor")]
    promised_leader: u32,
    before_number: u64,
    #[serde(alias = "before_auditor")]
    before_leader: u32,
}

impl From<Saved> for Promises {
    fn from(saved: Saved) -> Promises {
        Promises {
            promised_number: saved.promised.number,
            promised_leader: saved.promised.leader.0,
            before_number: saved.before.number,
            before_leader: saved.before.leader.0,
        }
    }
}

impl From<Promises> for Saved {
    fn from(file: Promises) -> Saved {
        let epoch = |number, leader| Epoch { number, leader: MemberId(leader) };
        Saved {
            promised: epoch(file.promised_number, file.promised_leader),
            before: epoch(file.before_number, file.before_leader),
        }
    }
}

impl Files {
    /// Makes the directory `STATE/fleet`.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn open(state: &Path) -> Result<Files, StorageError> {
        let dir = state.join("fleet");
        fs::create_dir_all(&dir).map_err(|source| StorageError { path: dir.clone(), source })?;
        Ok(Files { dir })
    }

    /// A session that is greater than any before, also after the clock was set back. `unix_ns` is the time,
    /// and `random` makes it another one where all storage was lost and the clock was, too, or where another
    /// machine has a copy of it.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn next_session(&self, unix_ns: u64, random: u64) -> Result<u64, StorageError> {
        /// Sessions are a second apart, 2^30 ns; half of that is left for what one life begins.
        const STEP_BITS: u32 = 30;
        const RANDOM_BITS: u32 = STEP_BITS - 1;
        let path = self.dir.join("session");
        let last: u64 = match self.read(&path)? {
            None => 0,
            Some(text) => text.trim().parse().map_err(|_| corrupt(&path))?,
        };
        let next = unix_ns.max(last.saturating_add(1 << STEP_BITS)) >> STEP_BITS << STEP_BITS;
        let session = next | (random & ((1 << RANDOM_BITS) - 1));
        self.write(&path, format!("{session}\n").as_bytes())?;
        Ok(session)
    }

    fn read(&self, path: &Path) -> Result<Option<String>, StorageError> {
        let error = |source| StorageError { path: path.to_owned(), source };
        let file = match open_regular(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(error)?,
        };
        let mut text = String::new();
        io::Read::read_to_string(&mut io::Read::take(file, FILE_MAX_BYTES), &mut text)
            .map_err(error)?;
        Ok(Some(text))
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), StorageError> {
        let written = write_whole(path, &path.with_extension("new"), bytes, None);
        written.map_err(|source| StorageError { path: path.to_owned(), source })
    }

    fn group(&self, group: &str) -> PathBuf {
        self.dir.join(format!("group-{group}.json"))
    }
}

fn corrupt(path: &Path) -> StorageError {
    let what = "is not a state file of tidegate; an acceptor that has lost its promises must get another \
                name; give its place among the acceptors to another node";
    StorageError { path: path.to_owned(), source: io::Error::other(what) }
}

impl Storage for Files {
    fn load(&mut self, group: &str) -> Result<Option<Saved>, StorageError> {
        let path = self.group(group);
        let Some(text) = self.read(&path)? else { return Ok(None) };
        let promises: Promises = serde_json::from_str(&text).map_err(|_| corrupt(&path))?;
        Ok(Some(promises.into()))
    }

    fn save(&mut self, group: &str, saved: Saved) -> Result<Stored, StorageError> {
        let path = self.group(group);
        let text = serde_json::to_vec(&Promises::from(saved)).map_err(|_| corrupt(&path))?;
        self.write(&path, &text).map(|()| Stored::Durably)
    }
}

/// Storage whose writes are made by a thread of its own. Of each group the newest promise is written, and
/// those before it that were not begun are left out.
#[derive(Debug)]
pub struct Background<S> {
    shared: Arc<Shared>,
    /// For reading, which is done at the start and when a file is read again.
    read: S,
}

#[derive(Debug, Default)]
struct Shared {
    jobs: Mutex<Jobs>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Jobs {
    groups: BTreeMap<String, Job>,
    ended: bool,
}

/// The promise of a group.
#[derive(Debug)]
struct Job {
    newest: Saved,
    stored: Option<Saved>,
    failed: Option<Failure>,
}

#[derive(Debug)]
struct Failure {
    error: StorageError,
    at: Instant,
}

impl Shared {
    /// Nothing panics while it has the lock.
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Jobs {
    /// The next promise to be written.
    fn due(&self) -> Option<(String, Saved)> {
        let mut due = self
            .groups
            .iter()
            .filter(|(_, job)| job.stored != Some(job.newest) && job.failed.is_none());
        due.next().map(|(group, job)| (group.clone(), job.newest))
    }
}

impl<S: Storage + Clone + Send + 'static> Background<S> {
    /// Starts the thread. `done` is called by it after each write, whether that failed or not.
    ///
    /// # Errors
    /// The operating system's, when there can be no thread.
    pub fn start(storage: S, done: impl Fn() + Send + 'static) -> io::Result<Background<S>> {
        let shared = Arc::new(Shared::default());
        let (theirs, read) = (Arc::clone(&shared), storage.clone());
        let thread = thread::Builder::new().name("storage".to_owned());
        // Not waited for: a disk that hangs must not keep a daemon from its end.
        thread.spawn(move || write_all(&theirs, storage, &done))?;
        Ok(Background { shared, read })
    }
}

fn write_all(shared: &Shared, mut storage: impl Storage, done: &impl Fn()) {
    let mut jobs = shared.jobs();
    loop {
        if jobs.ended {
            return;
        }
        let Some((group, saved)) = jobs.due() else {
            jobs = shared.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(jobs);
        let written = storage.save(&group, saved);
        jobs = shared.jobs();
        if let Some(job) = jobs.groups.get_mut(&group) {
            match written {
                Ok(_) => job.stored = Some(saved),
                Err(error) => job.failed = Some(Failure { error, at: Instant::now() }),
            }
        }
        done();
    }
}

impl<S> Drop for Background<S> {
    fn drop(&mut self) {
        self.shared.jobs().ended = true;
        self.shared.wake.notify_one();
    }
}

impl<S: Storage> Storage for Background<S> {
    fn load(&mut self, group: &str) -> Result<Option<Saved>, StorageError> {
        // What is being written counts: it may be stored by the time it is relied upon.
        match self.shared.jobs().groups.get(group) {
            Some(job) => Ok(Some(job.newest)),
            None => self.read.load(group),
        }
    }

    fn save(&mut self, group: &str, saved: Saved) -> Result<Stored, StorageError> {
        let mut jobs = self.shared.jobs();
        let job = jobs.groups.entry(group.to_owned()).or_insert(Job {
            newest: saved,
            stored: None,
            failed: None,
        });
        // A group that is being left must not put back an older promise than another one of its name has
        // made.
        if saved.promised < job.newest.promised {
            let covered = job.stored.is_some_and(|stored| stored.promised >= saved.promised);
            return Ok(if covered { Stored::Durably } else { Stored::Pending });
        }
        job.newest = saved;
        if job.stored == Some(saved) {
            return Ok(Stored::Durably);
        }
        if let Some(Failure { error, at }) = &job.failed {
            let StorageError { path, source } = error;
            let source = io::Error::new(source.kind(), source.to_string());
            let again = StorageError { path: path.clone(), source };
            if at.elapsed() >= RETRY {
                job.failed = None;
                self.shared.wake.notify_one();
            }
            return Err(again);
        }
        self.shared.wake.notify_one();
        Ok(Stored::Pending)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn sessions_grow_whatever_the_clock_says() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::open(dir.path()).unwrap();
        let first = files.next_session(1 << 60, 5).unwrap();
        let second = files.next_session(1 << 50, 5).unwrap();
        assert!(second > first);
        assert!(files.next_session((1 << 60) + (1 << 30), 5).unwrap() > second);
        // Of two copies with a clock that lags both begin in the same step, and not alike.
        let copy = tempfile::tempdir().unwrap();
        fs::create_dir(copy.path().join("fleet")).unwrap();
        let name = "fleet/session";
        fs::copy(dir.path().join(name), copy.path().join(name)).unwrap();
        let one = files.next_session(1, 0x1234_5678_9abc_def0).unwrap();
        let other =
            Files::open(copy.path()).unwrap().next_session(1, 0x0fed_cba9_8765_4321).unwrap();
        assert!(one != other && one.min(other) > second);
    }

    #[test]
    fn promises_come_back_and_a_broken_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Files::open(dir.path()).unwrap();
        assert_eq!(files.load("a.b").unwrap(), None);
        let epoch = |number| Epoch { number, leader: MemberId(u32::MAX) };
        let saved = Saved { promised: epoch(u64::MAX), before: epoch(3) };
        files.save("a.b", saved).unwrap();
        assert_eq!(Files::open(dir.path()).unwrap().load("a.b").unwrap(), Some(saved));
        fs::write(dir.path().join("fleet/group-a.b.json"), "{}").unwrap();
        let refused = files.load("a.b").unwrap_err().to_string();
        assert!(refused.contains("is not a state file of tidegate"), "{refused}");
    }

    fn saved(number: u64) -> Saved {
        let epoch = |number| Epoch { number, leader: MemberId(1) };
        Saved { promised: epoch(number), before: epoch(0) }
    }

    fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is() {
            assert!(Instant::now() < deadline, "waited in vain for: {what}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// A disk that ends a write when it is told to, and how.
    #[derive(Clone)]
    struct Slow {
        ends: Arc<Mutex<std::sync::mpsc::Receiver<io::Result<()>>>>,
        written: Arc<Mutex<Vec<Saved>>>,
    }

    impl Storage for Slow {
        fn load(&mut self, _: &str) -> Result<Option<Saved>, StorageError> {
            Ok(self.written.lock().unwrap().last().copied())
        }

        fn save(&mut self, _: &str, saved: Saved) -> Result<Stored, StorageError> {
            self.written.lock().unwrap().push(saved);
            let end = self.ends.lock().unwrap().recv().unwrap_or(Ok(()));
            end.map(|()| Stored::Durably)
                .map_err(|source| StorageError { path: "group-a.json".into(), source })
        }
    }

    #[test]
    fn a_slow_disk_is_not_waited_for_and_gets_the_newest_promise() {
        let (end, ends) = std::sync::mpsc::channel();
        let disk = Slow { ends: Arc::new(Mutex::new(ends)), written: Arc::default() };
        let written = Arc::clone(&disk.written);
        let (tell, told) = std::sync::mpsc::channel();
        let mut storage = Background::start(disk, move || tell.send(()).unwrap()).unwrap();
        assert_eq!(storage.save("a", saved(1)).unwrap(), Stored::Pending);
        wait_for("the first write", || written.lock().unwrap().len() == 1);
        for number in 2..=9 {
            assert_eq!(storage.save("a", saved(number)).unwrap(), Stored::Pending);
        }
        assert_eq!(storage.load("a").unwrap(), Some(saved(9)), "what was promised is known");
        end.send(Ok(())).unwrap();
        told.recv().unwrap();
        assert_eq!(storage.save("a", saved(9)).unwrap(), Stored::Pending, "an older one is stored");
        end.send(Ok(())).unwrap();
        told.recv().unwrap();
        assert_eq!(storage.save("a", saved(9)).unwrap(), Stored::Durably);
        assert_eq!(*written.lock().unwrap(), [saved(1), saved(9)]);
    }

    #[test]
    fn an_older_promise_is_not_put_back() {
        let (end, ends) = std::sync::mpsc::channel();
        let disk = Slow { ends: Arc::new(Mutex::new(ends)), written: Arc::default() };
        let written = Arc::clone(&disk.written);
        let mut storage = Background::start(disk, || {}).unwrap();
        assert_eq!(storage.save("a", saved(7)).unwrap(), Stored::Pending);
        // By a group of the same name that is being left.
        assert_eq!(storage.save("a", saved(3)).unwrap(), Stored::Pending);
        end.send(Ok(())).unwrap();
        let stored = |storage: &mut Background<Slow>, number| {
            storage.save("a", saved(number)).is_ok_and(|stored| stored == Stored::Durably)
        };
        wait_for("the newer one", || stored(&mut storage, 7));
        assert!(stored(&mut storage, 3), "the newer one stands for it");
        assert_eq!(storage.load("a").unwrap(), Some(saved(7)));
        assert_eq!(*written.lock().unwrap(), [saved(7)]);
    }

    #[test]
    fn a_disk_that_refuses_is_reported_and_tried_again() {
        let (end, ends) = std::sync::mpsc::channel();
        let disk = Slow { ends: Arc::new(Mutex::new(ends)), written: Arc::default() };
        let written = Arc::clone(&disk.written);
        let mut storage = Background::start(disk, || {}).unwrap();
        end.send(Err(io::Error::from(io::ErrorKind::StorageFull))).unwrap();
        let mut why = String::new();
        wait_for("the failure", || {
            let saved = storage.save("a", saved(1));
            why = saved.as_ref().map_or_else(ToString::to_string, |_| String::new());
            saved.is_err()
        });
        assert!(why.starts_with("group-a.json: no storage space"), "{why}");
        end.send(Ok(())).unwrap();
        wait_for("another try", || storage.save("a", saved(1)).is_ok_and(|s| s == Stored::Durably));
        // Tries are a second apart, however often it is asked.
        assert_eq!(written.lock().unwrap().len(), 2);
    }

    #[test]
    fn what_a_crash_has_torn_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Files::open(dir.path()).unwrap();
        files.save("a", saved(7)).unwrap();
        // A crash before the rename: half a file beside the whole one.
        fs::write(dir.path().join("fleet/group-a.new"), "{\"promised_num").unwrap();
        fs::write(dir.path().join("fleet/session.new"), "9").unwrap();
        let mut files = Files::open(dir.path()).unwrap();
        assert_eq!(files.load("a").unwrap(), Some(saved(7)));
        assert!(files.next_session(1 << 60, 0).unwrap() >= 1 << 60);
        files.save("a", saved(8)).unwrap();
        assert_eq!(files.load("a").unwrap(), Some(saved(8)));
    }

    #[test]
    fn root_a_full_disk_keeps_the_earlier_promise() {
        use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_a_full_disk_keeps_the_earlier_promise: needs root");
            return;
        }
        struct Disk(tempfile::TempDir);
        impl Drop for Disk {
            fn drop(&mut self) {
                let _ = unmount(self.0.path(), UnmountFlags::DETACH);
            }
        }
        let disk = Disk(tempfile::tempdir().unwrap());
        let small = Some(c"size=64k");
        mount("tmpfs", disk.0.path(), "tmpfs", MountFlags::empty(), small).unwrap();
        let mut files = Files::open(disk.0.path()).unwrap();
        files.save("a", saved(7)).unwrap();
        let fill = disk.0.path().join("fill");
        let mut file = fs::File::create(&fill).unwrap();
        while file.write_all(&[0; 1024]).is_ok() {}
        drop(file);
        let why = files.save("a", saved(8)).unwrap_err().to_string();
        assert!(why.contains("group-a.json: No space left on device"), "{why}");
        assert_eq!(files.load("a").unwrap(), Some(saved(7)));
        assert!(!disk.0.path().join("fleet/group-a.new").exists(), "half a file stays");
        fs::remove_file(&fill).unwrap();
        files.save("a", saved(8)).unwrap();
        assert_eq!(files.load("a").unwrap(), Some(saved(8)));
    }
}
