//! What must survive a restart, in files that are whole or as before.
//!
//! ```text
//!   STATE/fleet/session          the greatest session of this node
//!   STATE/fleet/group-NAME.json  what a keeper promised
//! ```

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use tidegate_core::fleet::{MemberId, message::Epoch, share::Saved};

/// The largest file that is read.
const FILE_MAX_BYTES: u64 = 64 << 10;

/// Storage that failed. What was to be written is not to be relied upon.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", .path.display())]
pub struct StorageError {
    /// The file.
    pub path: PathBuf,
    /// Why.
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
    /// What a keeper promised in a group; `None` if it never ran.
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

/// As in the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Promises {
    promised_number: u64,
    promised_auditor: u32,
    before_number: u64,
    before_auditor: u32,
}

impl From<Saved> for Promises {
    fn from(saved: Saved) -> Promises {
        Promises {
            promised_number: saved.promised.number,
            promised_auditor: saved.promised.auditor.0,
            before_number: saved.before.number,
            before_auditor: saved.before.auditor.0,
        }
    }
}

impl From<Promises> for Saved {
    fn from(file: Promises) -> Saved {
        let epoch = |number, auditor| Epoch { number, auditor: MemberId(auditor) };
        Saved {
            promised: epoch(file.promised_number, file.promised_auditor),
            before: epoch(file.before_number, file.before_auditor),
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
    /// and
    /// `random` makes it another one where all storage was lost and the clock was, too.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn next_session(&self, unix_ns: u64, random: u64) -> Result<u64, StorageError> {
        /// About a millisecond.
        const RANDOM_BITS: u32 = 20;
        let path = self.dir.join("session");
        let last = match self.read(&path)? {
            None => 0,
            Some(text) => text.trim().parse().map_err(|_| corrupt(&path))?,
        };
        let mask = (1u64 << RANDOM_BITS) - 1;
        let session = ((unix_ns & !mask) | (random & mask)).max(last + 1);
        self.write(&path, format!("{session}\n").as_bytes())?;
        Ok(session)
    }

    fn read(&self, path: &Path) -> Result<Option<String>, StorageError> {
        let error = |source| StorageError { path: path.to_owned(), source };
        let file = match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(error)?,
        };
        let mut text = String::new();
        io::Read::read_to_string(&mut io::Read::take(file, FILE_MAX_BYTES), &mut text)
            .map_err(error)?;
        Ok(Some(text))
    }

    /// Beside it, to the disk, then in its place, and that to the disk too.
    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), StorageError> {
        let write = || {
            let beside = path.with_extension("new");
            let mut file = File::create(&beside)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&beside, path)?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(|source| StorageError { path: path.to_owned(), source })
    }

    fn group(&self, group: &str) -> PathBuf {
        self.dir.join(format!("group-{group}.json"))
    }
}

fn corrupt(path: &Path) -> StorageError {
    let what = "is not what a tidegate has written; a keeper that has lost what it promised must get another \
                name, and others its place among the keepers";
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_grow_whatever_the_clock_says() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::open(dir.path()).unwrap();
        let first = files.next_session(1 << 60, 5).unwrap();
        let second = files.next_session(1 << 50, 5).unwrap();
        assert!(second > first);
        assert!(files.next_session((1 << 60) + (1 << 30), 5).unwrap() > second);
    }

    #[test]
    fn promises_come_back_and_a_broken_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Files::open(dir.path()).unwrap();
        assert_eq!(files.load("a.b").unwrap(), None);
        let epoch = |number| Epoch { number, auditor: MemberId(u32::MAX) };
        let saved = Saved { promised: epoch(u64::MAX), before: epoch(3) };
        files.save("a.b", saved).unwrap();
        assert_eq!(Files::open(dir.path()).unwrap().load("a.b").unwrap(), Some(saved));
        fs::write(dir.path().join("fleet/group-a.b.json"), "{}").unwrap();
        let refused = files.load("a.b").unwrap_err().to_string();
        assert!(refused.contains("is not what a tidegate has written"), "{refused}");
    }
}
