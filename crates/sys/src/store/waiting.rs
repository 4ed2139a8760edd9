//! Limits of a file that wait: what they are to be on does not exist yet. They have no pins. A symbolic link
//! beside the directories of limits remembers each, for whoever asks what is not in force, and lasts as long
//! as pins do.
//!
//! ```text
//! /sys/fs/bpf/tidegate/~NAME -> cgroup:system.slice/backup.service
//! ```

use std::{fs, path::PathBuf};

use tidegate_core::Scope;

use super::{Store, StoreError, StoreLock, io_error, symlink};

/// Before the scope of one that is required.
const REQUIRED: &str = "!";
/// Before the name of a limit that waits; no limit's name starts with it.
const PREFIX: &str = "~";

/// A limit that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    pub name: String,
    /// The cgroup or device that it is to be on.
    pub scope: Scope,
    /// While it waits, something is wrong.
    pub required: bool,
}

impl Store {
    fn mark_of(&self, name: &str) -> PathBuf {
        self.root.join(format!("{PREFIX}{name}"))
    }

    /// The limits that wait, sorted by name. One that has been put on meanwhile does not wait.
    pub fn waiting(&self) -> Vec<Waiting> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let waiting = entries.filter_map(|entry| {
            let file = entry.file_name();
            let name = file.to_str()?.strip_prefix(PREFIX)?;
            if self.root.join(name).is_dir() {
                return None;
            }
            let scope = fs::read_link(entry.path()).ok()?;
            let scope = scope.to_str()?;
            let required = scope.starts_with(REQUIRED);
            let (kind, of) = scope.trim_start_matches(REQUIRED).split_once(':')?;
            Some(Waiting { name: name.to_owned(), scope: Scope::named(kind, of)?, required })
        });
        let mut waiting: Vec<_> = waiting.collect();
        waiting.sort_by(|a, b| a.name.cmp(&b.name));
        waiting
    }

    /// Remembers that a limit waits.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn wait(&self, lock: &StoreLock, waiting: &Waiting) -> Result<(), StoreError> {
        self.wait_no_more(lock, &waiting.name)?;
        let Waiting { name, scope, required } = waiting;
        let required = if *required { REQUIRED } else { "" };
        let target = format!("{required}{}:{}", scope.kind(), scope.name());
        symlink(target.as_ref(), &self.mark_of(name))
    }

    /// A limit does not wait any more. True if it did.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn wait_no_more(&self, _lock: &StoreLock, name: &str) -> Result<bool, StoreError> {
        let mark = self.mark_of(name);
        match fs::remove_file(&mark) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            done => done.map(|()| true).map_err(io_error(&mark, "remove")),
        }
    }
}
