//! Files that are written as a whole, files that are locked, and files that are opened without a wait.

use std::{
    fs::{self, File, Metadata, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
};

/// How long a file that others only look at is waited for.
const PATIENCE: Duration = Duration::from_millis(500);

/// Writes a file beside its place, to the disk, then in its place, and that to the disk too. It gets the mode
/// and owner of another one if that is given.
///
/// # Errors
/// The operating system's. The file is as before, and nothing is left beside it.
pub fn write_whole(
    path: &Path,
    beside: &Path,
    bytes: &[u8],
    like: Option<&Metadata>,
) -> io::Result<()> {
    let written = (|| {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o644).open(beside)?;
        if let Some(is) = like {
            fchown(&file, Some(is.uid()), Some(is.gid()))?;
            file.set_permissions(Permissions::from_mode(is.mode() & 0o7777))?;
        }
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(beside, path)
    })();
    // A part of a file takes space on a disk that has little.
    written.inspect_err(|_| drop(fs::remove_file(beside)))?;
    let directory = path.parent().filter(|parent| *parent != Path::new(""));
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

/// Opens a file to read it, if it is a regular one. A pipe would be waited for, and a device might never end.
///
/// # Errors
/// The operating system's; also if it is something else.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    if meta.is_file() {
        return Ok(file);
    }
    let is_other = if meta.is_dir() { io::ErrorKind::IsADirectory } else { io::ErrorKind::Other };
    Err(io::Error::new(is_other, "it is not a regular file"))
}

/// Locks a file as long as it is open, and makes it if need be; `None` if another process has it.
///
/// # Errors
/// Errors of the operating system.
pub fn lock(path: &Path) -> io::Result<Option<File>> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
            // A process that asks whether it is locked holds the lock for a moment.
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(PATIENCE / 50);
            }
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn nobody_waits_for_a_pipe() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        for other in [pipe.as_path(), dir.path(), Path::new("/dev/zero")] {
            let error = open_regular(other).unwrap_err().to_string();
            assert_eq!(error, "it is not a regular file", "{}", other.display());
        }
        let file = dir.path().join("file");
        assert_eq!(open_regular(&file).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&file, "text").unwrap();
        assert_eq!(io::read_to_string(open_regular(&file).unwrap()).unwrap(), "text");
    }
}
