//! Files that are written as a whole, and files that are locked.

use std::{
    fs::{self, File, Metadata, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
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
