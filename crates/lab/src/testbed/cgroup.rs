//! A cgroup (version 2) to start programs in: a throwaway one, or that of a process.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context;
use rustix::io::Errno;

use super::unique_name;

/// How long the kernel and the last process may take to leave a cgroup that is to be removed.
const EMPTY: Duration = Duration::from_secs(30);

/// A cgroup. One that was made here has a name of its own, directly below the root, and dropping it
/// removes it; processes still in it after a few seconds keep it, and a line on standard error says
/// so. It kills nothing.
#[derive(Debug)]
pub struct Cgroup {
    name: String,
    path: PathBuf,
    ours: bool,
}

impl Cgroup {
    /// Makes a cgroup. Needs root.
    pub fn create() -> anyhow::Result<Self> {
        Self::create_at_root(unique_name("cgroup"))
    }

    /// The same, with the name of a slice of systemd, which has units below it.
    pub fn create_slice() -> anyhow::Result<Self> {
        Self::create_at_root(unique_name("cgroup.slice"))
    }

    fn create_at_root(name: String) -> anyhow::Result<Self> {
        let path = root()?.join(&name);
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self { name, path, ours: true })
    }

    /// Makes a cgroup below this one, which must outlive it.
    pub fn create_below(&self, name: &str) -> anyhow::Result<Self> {
        let path = self.path.join(name);
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self { name: format!("{}/{name}", self.name), path, ours: true })
    }

    /// The cgroup in which a process is. Dropping the value leaves it alone.
    pub fn of_process(pid: u32) -> anyhow::Result<Self> {
        let file = format!("/proc/{pid}/cgroup");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        let name = cgroup2_path(&text).with_context(|| format!("{file} names no cgroup v2"))?;
        let path = root()?.join(&name);
        Ok(Self { name, path, ours: false })
    }

    /// The name below the root of the hierarchy, as a spec of Tidegate names it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file in which a process writes its pid to enter.
    pub fn open_procs(&self) -> anyhow::Result<OwnedFd> {
        let path = self.path.join("cgroup.procs");
        let file = fs::OpenOptions::new().write(true).open(&path);
        Ok(file.with_context(|| format!("cannot open {}", path.display()))?.into())
    }

    /// The processes in it.
    pub fn pids(&self) -> anyhow::Result<Vec<u32>> {
        let text = fs::read_to_string(self.path.join("cgroup.procs"))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        let started = Instant::now();
        loop {
            match fs::remove_dir(&self.path) {
                Err(e) if is_busy(&e) && started.elapsed() < EMPTY => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    eprintln!("warning: {} stays: {e}", self.path.display());
                    return;
                }
                _ => return,
            }
        }
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

fn root() -> anyhow::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    cgroup2_mount(&mounts).context("no cgroup v2 is mounted (see /proc/mounts)")
}

/// The path below the root in the text of `/proc/PID/cgroup`.
fn cgroup2_path(text: &str) -> Option<String> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(path.to_owned())
}

/// Where cgroup v2 is mounted. On a hybrid host that is not the root of `/sys/fs/cgroup`.
fn cgroup2_mount(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (_device, place, kind) = (fields.next()?, fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(unescape(place)))
    })
}

/// `/proc/mounts` writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(field.to_owned(), |text, (code, character)| text.replace(code, character))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hybrid_host_has_it_in_a_corner() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(cgroup2_mount(mounts).unwrap(), Path::new("/sys/fs/cgroup/unified"));
        let spaced = "cgroup2 /a\\040b cgroup2 rw 0 0";
        assert_eq!(cgroup2_mount(spaced).unwrap(), Path::new("/a b"));
        assert_eq!(cgroup2_mount("cgroup /x cgroup rw 0 0"), None);
    }

    #[test]
    fn a_process_is_in_one_cgroup_of_version_two() {
        let hybrid = "4:memory:/a\n1:name=systemd:/b\n0::/c/tidegate-run-1-2\n";
        assert_eq!(cgroup2_path(hybrid).unwrap(), "c/tidegate-run-1-2");
        assert_eq!(cgroup2_path("0::/\n").unwrap(), "");
        assert_eq!(cgroup2_path("4:memory:/a\n"), None);
    }
}
