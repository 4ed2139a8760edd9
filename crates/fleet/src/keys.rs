//! The keys that datagrams are sealed with, in a file that only its owner may read.
//!
//! ```text
//!   # ID KEY: a number from 1 to 255, and 64 hexadecimal digits
//!   2 8b1f...
//!   1 03c4...
//! ```
//!
//! The first key seals; all of them open. To change keys without a gap: add the new one as the last line on
//! all nodes, then make it the first on all, then take the old one out.

use std::{
    fmt::Write as _,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use chacha20poly1305::{Key as CipherKey, KeyInit, XChaCha20Poly1305};
use tidegate_sys::files::open_regular;

/// Length of a key, in bytes.
pub const KEY_BYTES: usize = 32;
/// The most keys of a file.
pub const KEYS_MAX: usize = 8;
/// The largest file that is read.
const FILE_MAX_BYTES: u64 = 64 << 10;

/// Why a file has no keys.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error(
        "{}: {source}; make one with: tidegate daemon --new-key 1 | sudo install -m 600 /dev/stdin {}",
        .path.display(), .path.display()
    )]
    Unreadable { path: PathBuf, source: io::Error },
    #[error(
        "{}: others may read or change it (mode {mode:03o}, owner {owner}); type: chmod 600 {0}, and have it \
         owned by root or by who runs the daemon",
        .path.display()
    )]
    Exposed { path: PathBuf, mode: u32, owner: u32 },
    #[error(
        "{}:{line}: {what}; a line is a number from 1 to 255 and 64 hexadecimal digits",
        .path.display()
    )]
    Line {
        path: PathBuf,
        /// From 1.
        line: usize,
        what: &'static str,
    },
    #[error("{}: no key in it; make one with: tidegate daemon --new-key 1", .0.display())]
    Empty(PathBuf),
    #[error("the kernel gives no random numbers: {0}")]
    Random(String),
}

/// The keys of a file, in its order.
#[derive(Clone)]
pub struct KeyRing {
    keys: Vec<(u8, XChaCha20Poly1305)>,
}

impl std::fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.ids()).finish()
    }
}

impl KeyRing {
    /// Reads a file.
    ///
    /// # Errors
    /// [`KeyError`]; also if others may read or change the file.
    pub fn read(path: &Path) -> Result<KeyRing, KeyError> {
        let unreadable = |source| KeyError::Unreadable { path: path.to_owned(), source };
        let file = open_regular(path).map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        let (mode, owner) = (meta.mode() & 0o777, meta.uid());
        let trusted = owner == 0 || owner == rustix::process::geteuid().as_raw();
        if mode & 0o077 != 0 || !trusted {
            return Err(KeyError::Exposed { path: path.to_owned(), mode, owner });
        }
        let mut text = String::new();
        io::Read::read_to_string(&mut io::Read::take(file, FILE_MAX_BYTES), &mut text)
            .map_err(unreadable)?;
        KeyRing::parse(path, &text)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn parse(path: &Path, text: &str) -> Result<KeyRing, KeyError> {
        let mut keys: Vec<(u8, XChaCha20Poly1305)> = Vec::new();
        for (i, line) in text.lines().enumerate() {
            let refuse = |what| KeyError::Line { path: path.to_owned(), line: i + 1, what };
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let mut words = line.split_whitespace();
            let (Some(id), Some(key), None) = (words.next(), words.next(), words.next()) else {
                return Err(refuse("not two words"));
            };
            let id = id.parse().ok().filter(|id| *id > 0);
            let id = id.ok_or_else(|| refuse("its number is none"))?;
            let key = unhex(key).ok_or_else(|| refuse("its key is none"))?;
            if keys.iter().any(|(other, _)| *other == id) {
                return Err(refuse("another key has this number"));
            }
            if keys.len() == KEYS_MAX {
                return Err(refuse("more keys than are read"));
            }
            keys.push((id, XChaCha20Poly1305::new(CipherKey::from_slice(&key))));
        }
        if keys.is_empty() {
            return Err(KeyError::Empty(path.to_owned()));
        }
        Ok(KeyRing { keys })
    }

    /// A line with a new key.
    ///
    /// # Errors
    /// [`KeyError::Random`].
    pub fn generate(id: u8) -> Result<String, KeyError> {
        let mut key = [0u8; KEY_BYTES];
        getrandom::fill(&mut key).map_err(|e| KeyError::Random(e.to_string()))?;
        let mut line = format!("{id} ");
        for byte in key {
            let _ = write!(line, "{byte:02x}");
        }
        Ok(line)
    }

    pub(super) fn sealing(&self) -> (u8, &XChaCha20Poly1305) {
        let (id, cipher) = &self.keys[0];
        (*id, cipher)
    }

    pub(super) fn opening(&self, id: u8) -> Option<&XChaCha20Poly1305> {
        self.keys.iter().find(|(other, _)| *other == id).map(|(_, cipher)| cipher)
    }

    /// The numbers of the keys, that of the sealing one first.
    pub fn ids(&self) -> impl Iterator<Item = u8> {
        self.keys.iter().map(|(id, _)| *id)
    }
}

fn unhex(text: &str) -> Option<[u8; KEY_BYTES]> {
    let digits: Vec<_> = text.chars().map(|c| c.to_digit(16)).collect::<Option<_>>()?;
    let bytes: Vec<_> = digits.chunks_exact(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect();
    (digits.len() == 2 * KEY_BYTES).then(|| bytes.try_into().ok())?
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn keys_read_and_are_refused() {
        let key = "ab".repeat(32);
        let parse = |text: &str| KeyRing::parse(Path::new("k"), text);
        let ring = parse(&format!("# keys\n7 {key}\n\n 3 {key} # old\n")).unwrap();
        assert_eq!(ring.ids().collect::<Vec<_>>(), [7, 3]);
        assert_eq!(format!("{ring:?}"), "[7, 3]", "no key in a log");
        let why = |text: &str| parse(text).unwrap_err().to_string();
        let line = "; a line is a number from 1 to 255 and 64 hexadecimal digits";
        assert_eq!(why("\n1"), format!("k:2: not two words{line}"));
        assert_eq!(why(&format!("0 {key}")), format!("k:1: its number is none{line}"));
        assert_eq!(why(&format!("1 {key}0")), format!("k:1: its key is none{line}"));
        assert_eq!(
            why(&format!("1 {key}\n1 {key}")),
            format!("k:2: another key has this number{line}")
        );
        assert_eq!(why("#"), "k: no key in it; make one with: tidegate daemon --new-key 1");
        let new = KeyRing::generate(9).unwrap();
        assert_eq!(parse(&new).unwrap().ids().collect::<Vec<_>>(), [9]);
        assert_ne!(KeyRing::generate(9).unwrap(), new);
    }

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        assert!(KeyRing::read(&path).unwrap_err().to_string().contains("--new-key 1"));
        fs::write(&path, KeyRing::generate(1).unwrap()).unwrap();
        for (mode, good) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let read = KeyRing::read(&path);
            assert_eq!(read.is_ok(), good, "{mode:o}: {read:?}");
        }
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let error = KeyRing::read(&path).unwrap_err().to_string();
        assert!(error.contains("keys: it is not a regular file; "), "{error}");
    }
}
