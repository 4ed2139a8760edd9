//! The machine the lab runs on: what it is, and what it lacks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

/// Facts about the machine, besides kernel and processor, which stand in the report itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Cores that this process may use.
    pub cores: usize,
    /// Version of each tool used, by the tool's name.
    pub tools: BTreeMap<String, String>,
}

/// Something an experiment cannot do without.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    Root,
    /// The `tidegate` binary.
    Tidegate,
    /// A command in PATH. The report names its version.
    Command {
        name: &'static str,
        /// The flag that makes it print its version.
        version_flag: &'static str,
    },
    /// A kernel of at least this major and minor version.
    Kernel(u32, u32),
    /// Anything else that can be probed without leaving a trace.
    Feature {
        /// Its name: `HTB`, `cgroup v2`.
        name: &'static str,
        present: fn() -> bool,
    },
}

impl Need {
    /// In a word or two, for lists.
    pub fn name(&self) -> String {
        match self {
            Need::Root => "root".to_owned(),
            Need::Tidegate => "tidegate".to_owned(),
            Need::Command { name, .. } | Need::Feature { name, .. } => (*name).to_owned(),
            Need::Kernel(major, minor) => format!("kernel {major}.{minor}"),
        }
    }

    /// Why the need is not met and what to do about it; `None` if it is met.
    pub fn missing(&self, tidegate: &Path) -> Option<String> {
        match self {
            Need::Root => (!rustix::process::geteuid().is_root())
                .then(|| "needs root: run it with sudo".to_owned()),
            Need::Tidegate => which(tidegate).is_none().then(|| {
                format!(
                    "needs the tidegate binary, and {} is none: build it with \
                     `cargo build --release -p tidegate`, or say where it is with --tidegate PATH",
                    tidegate.display()
                )
            }),
            Need::Command { name, .. } => which(Path::new(name))
                .is_none()
                .then(|| format!("needs `{name}`, which is not in PATH: install it")),
            Need::Kernel(major, minor) => {
                let release = kernel();
                (version_of(&release)? < (*major, *minor))
                    .then(|| format!("needs Linux {major}.{minor} or later; this is {release}"))
            }
            Need::Feature { name, present } => {
                (!present()).then(|| format!("needs {name}, which this kernel does not have"))
            }
        }
    }

    /// The tool's name and version, where the need is a tool.
    pub fn version(&self, tidegate: &Path) -> Option<(String, String)> {
        let (name, path, flag) = match self {
            Need::Tidegate => ("tidegate", tidegate, "--version"),
            Need::Command { name, version_flag } => (*name, Path::new(name), *version_flag),
            Need::Root | Need::Kernel(..) | Need::Feature { .. } => return None,
        };
        Some((name.to_owned(), first_line(path, flag)?))
    }
}

/// The state of a work tree of git.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The whole hash of what is checked out.
    pub hash: String,
    /// Whether tracked files differ from it.
    pub dirty: bool,
}

/// The commit of the work tree in which a binary lies; none if it lies in none, or there is no git.
pub fn commit(binary: &Path) -> Option<Commit> {
    let dir = which(binary)?.parent()?.to_owned();
    // It may belong to the user who called sudo.
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.args(["-c", "safe.directory=*", "-c", "core.fsmonitor=false"]).args(arguments);
        let output = git.current_dir(&dir).stdin(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let hash = git(&["rev-parse", "HEAD"])?;
    let dirty = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(Commit { hash, dirty })
}

/// The kernel's release.
pub fn kernel() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    known(release.trim())
}

/// The processor's model; its architecture where the kernel does not name a model.
pub fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    model_in(&info).unwrap_or(std::env::consts::ARCH).to_owned()
}

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The path of an executable: `name` itself if it has a directory, else the first in PATH.
pub fn which(name: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let executable = |path: &Path| {
        fs::metadata(path)
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    if name.components().count() > 1 {
        return executable(name).then(|| name.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| executable(path))
}

fn known(text: &str) -> String {
    if text.is_empty() { "unknown".to_owned() } else { text.to_owned() }
}

fn model_in(cpuinfo: &str) -> Option<&str> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim()).filter(|model| !model.is_empty())
}

/// `6.1.0-18-amd64` is (6, 1).
fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The first line that a command prints; tools disagree on whether a version is output or an error.
fn first_line(command: &Path, flag: &str) -> Option<String> {
    const WIDTH: usize = 80;
    let output = Command::new(command).arg(flag).stdin(Stdio::null()).output().ok()?;
    let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    Some(line.chars().take(WIDTH).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOWHERE: &str = "/nowhere/tidegate";

    #[test]
    fn kernel_versions() {
        assert_eq!(version_of("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(version_of("6.18.5"), Some((6, 18)));
        assert_eq!(version_of("unknown"), None);
        assert!(version_of("6.9.1").unwrap() < version_of("6.18.0").unwrap());
    }

    #[test]
    fn models() {
        assert_eq!(model_in("processor\t: 0\nmodel name\t: Some CPU\n"), Some("Some CPU"));
        assert_eq!(model_in("processor\t: 0\n"), None);
    }

    #[test]
    fn this_machine_has_facts() {
        assert!(version_of(&kernel()).is_some());
        assert!(!cpu().is_empty());
        assert!(cores() >= 1);
    }

    #[test]
    fn needs_that_are_met_say_nothing() {
        let sh = Need::Command { name: "sh", version_flag: "--version" };
        assert_eq!(sh.missing(Path::new(NOWHERE)), None);
        assert_eq!(Need::Kernel(2, 6).missing(Path::new(NOWHERE)), None);
        assert_eq!(Need::Tidegate.missing(Path::new("sh")), None);
    }

    #[test]
    fn needs_that_are_not_say_what_to_do() {
        let missing = |need: Need| need.missing(Path::new(NOWHERE)).unwrap();
        assert!(missing(Need::Tidegate).contains("--tidegate PATH"));
        assert!(missing(Need::Kernel(99, 0)).contains("Linux 99.0"));
        let absent = Need::Command { name: "no-such-tool", version_flag: "-V" };
        assert!(missing(absent).contains("`no-such-tool`"));
        let feature = Need::Feature { name: "HTB", present: || false };
        assert!(missing(feature).contains("HTB"));
    }

    #[test]
    fn a_binary_in_a_work_tree_has_a_commit() {
        assert_eq!(commit(Path::new(NOWHERE)), None);
        let dir = tempfile::tempdir().unwrap();
        let git = |arguments: &[&str]| {
            let mut git = Command::new("git");
            git.args(["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]);
            git.args(arguments).current_dir(dir.path()).stdout(Stdio::null()).status()
        };
        let binary = dir.path().join("binary");
        fs::copy("/bin/true", &binary).unwrap();
        if git(&["init", "--quiet"]).is_err() {
            eprintln!("SKIP a_binary_in_a_work_tree_has_a_commit: needs git");
            return;
        }
        assert_eq!(commit(&binary), None, "nothing is committed");
        git(&["add", "binary"]).unwrap();
        git(&["commit", "--quiet", "--no-verify", "--message=x"]).unwrap();
        let clean = commit(&binary).unwrap();
        assert_eq!((clean.hash.len(), clean.dirty), (40, false));
        fs::OpenOptions::new().append(true).open(&binary).unwrap().set_len(0).unwrap();
        assert_eq!(commit(&binary), Some(Commit { dirty: true, ..clean }));
    }

    #[test]
    fn a_version_is_one_line() {
        let cargo = Need::Command { name: "echo", version_flag: "echo 1.2" };
        assert_eq!(cargo.version(Path::new(NOWHERE)), Some(("echo".into(), "echo 1.2".into())));
        assert_eq!(Need::Root.version(Path::new(NOWHERE)), None);
    }
}
