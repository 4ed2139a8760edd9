//! Where others see that a software NIC runs: a file for each in a directory of `/run`, locked as long as the
//! process lives, however it ends. So what is read is true: a file without a lock is what a killed process
//! left, and counts for nothing.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde_json::Value;
use tidegate_core::{Direction, Scheme, Scope};
use tidegate_nic::{
    lane::{LaneLimit, mark_at},
    relay::End,
};
use tidegate_sys::files::lock;

use super::{NicSpec, sample::NicSample};

/// Where the files are, by default.
pub const DEFAULT_DIR: &str = "/run/tidegate";
/// The largest file that is read.
const MAX_BYTES: u64 = 1 << 20;
/// How often a file is read while it is written.
const TRIES: usize = 16;

/// Why the state of software NICs cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("nic `{name}` runs already{}; end that first", process(*.pid))]
    Running { name: String, pid: Option<u64> },
    #[error("{}: {source}{}", .path.display(), as_root(.source))]
    Io { path: PathBuf, source: io::Error },
}

fn process(pid: Option<u64>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (process {pid})"))
}

fn as_root(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => " (run as root)",
        _ => "",
    }
}

/// What is in the file.
#[derive(Debug, Serialize)]
pub struct NicStatus<'a> {
    pub name: &'a str,
    pub pid: u32,
    pub spec: Option<&'a Path>,
    pub limits: Vec<LimitState<'a>>,
    /// What it has done since it started.
    #[serde(flatten)]
    pub totals: &'a NicSample,
}

#[derive(Debug, Serialize)]
pub struct LimitState<'a> {
    name: &'a str,
    /// `port` or `dev`.
    kind: &'static str,
    scope: &'a str,
    scheme: &'static str,
    egress: Option<RateState>,
    ingress: Option<RateState>,
}

#[derive(Debug, Serialize)]
struct RateState {
    /// Which of the two directions it holds.
    direction: usize,
    rate_bit_s: u64,
    burst_ns: u64,
    mark_ns: u64,
}

impl LimitState<'_> {
    pub fn of(spec: &NicSpec) -> Vec<LimitState<'_>> {
        let rate = |limit: &super::NicLimit, direction| {
            let LaneLimit { rate, burst, mark } = limit.direction(direction)?;
            let direction = usize::from(limit.leads_to(direction) == End::A);
            let mark_ns = mark.unwrap_or_else(|| mark_at(rate)).0;
            Some(RateState { direction, rate_bit_s: rate.bit_s(), burst_ns: burst.0, mark_ns })
        };
        spec.limits
            .iter()
            .map(|of| {
                let egress = rate(of, Direction::Egress);
                let ingress = rate(of, Direction::Ingress);
                let (kind, scope) = (of.scope.kind(), Scope::name(&of.scope));
                let scheme = Scheme::Carousel.name();
                LimitState { name: &of.name, kind, scope, scheme, egress, ingress }
            })
            .collect()
    }
}

#[derive(Debug, Clone)]
pub struct RunDir(PathBuf);

/// A name that no other process can have while this value lives.
#[derive(Debug)]
pub struct Claim {
    file: File,
    path: PathBuf,
}

impl RunDir {
    /// The directory at `path`, which need not exist yet. Nothing is touched.
    pub fn at(path: &Path) -> RunDir {
        RunDir(path.to_owned())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(format!("nic-{name}.json"))
    }

    /// Takes the name of a software NIC for this process.
    ///
    /// # Errors
    /// [`StateError::Running`] if another one has it.
    pub fn claim(&self, name: &str) -> Result<Claim, StateError> {
        let path = self.path(name);
        self.sweep();
        let refused = |source| StateError::Io { path: path.clone(), source };
        while let Some(file) = lock(&path).map_err(refused)? {
            // One that had it before may have removed it in between.
            if is_at(&file, &path) {
                return Ok(Claim { file, path });
            }
        }
        let pid = self.find(name).and_then(|is| is["pid"].as_u64());
        Err(StateError::Running { name: name.to_owned(), pid })
    }

    /// What a software NIC that runs has written last; `None` if it does not run.
    pub fn find(&self, name: &str) -> Option<Value> {
        read(&self.path(name))
    }

    pub fn running(&self) -> Vec<Value> {
        self.files().iter().filter_map(|path| read(path)).collect()
    }

    /// Removes what processes left that were killed.
    fn sweep(&self) {
        for path in self.files() {
            let Ok(file) = File::open(&path) else { continue };
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() && is_at(&file, &path)
            {
                let _ = fs::remove_file(&path);
            }
        }
    }

    /// Those of software NICs, by name.
    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let is_ours = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with("nic-") && name.ends_with(".json"))
        };
        let mut paths: Vec<_> = entries.map(|entry| entry.path()).filter(is_ours).collect();
        paths.sort();
        paths
    }
}

/// Whether a path leads to this very file.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |meta: &fs::Metadata| (meta.dev(), meta.ino());
    matches!((file.metadata(), fs::metadata(path)), (Ok(a), Ok(b)) if id(&a) == id(&b))
}

/// None if nobody has it locked.
fn read(path: &Path) -> Option<Value> {
    for _ in 0..TRIES {
        let mut file = File::open(path).ok()?;
        if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
            return None;
        }
        let mut text = String::new();
        Read::by_ref(&mut file).take(MAX_BYTES).read_to_string(&mut text).ok()?;
        if let Ok(status) = serde_json::from_str(&text) {
            return Some(status);
        }
        // It is being written.
        std::thread::yield_now();
    }
    None
}

impl Claim {
    /// Writes what others shall read.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn write(&mut self, status: &NicStatus<'_>) -> Result<(), StateError> {
        let mut write = || {
            let text = serde_json::to_vec(status)?;
            self.file.rewind()?;
            self.file.write_all(&text)?;
            self.file.set_len(text.len() as u64)
        };
        write().map_err(|source| StateError::Io { path: self.path.clone(), source })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        // Others may have files here.
        let _ = self.path.parent().map(fs::remove_dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_process_s_and_a_file_without_a_lock_counts_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let run = RunDir::at(&path);
        assert!(run.running().is_empty() && run.find("a").is_none());
        let mut claim = run.claim("a").unwrap();
        assert!(run.claim("b").is_ok(), "another name is free");
        claim.file.write_all(br#"{"pid": 7}"#).unwrap();
        let message = run.claim("a").unwrap_err().to_string();
        assert_eq!(message, "nic `a` runs already (process 7); end that first");
        assert_eq!(run.find("a").unwrap()["pid"], 7);
        assert_eq!(run.running().len(), 1);
        drop(claim);
        assert!(!path.exists(), "nothing is left");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("nic-a.json"), "{}").unwrap();
        assert!(run.find("a").is_none(), "left by a process that was killed");
        let claim = run.claim("b").unwrap();
        assert!(!path.join("nic-a.json").exists(), "the next one sweeps");
        assert!(run.claim("a").is_ok());
        assert!(path.join("nic-b.json").exists(), "one that runs is left alone");
        drop(claim);
    }
    #[test]
    fn a_reader_keeps_nobody_out() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::at(dir.path());
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = run.find("a");
                }
            });
            let claimed = (0..500).all(|_| run.claim("a").is_ok());
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(claimed);
        });
    }
}
