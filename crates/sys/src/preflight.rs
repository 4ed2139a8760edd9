//! What this host must have before anything is changed, asked for in one place with one clear answer.

use std::{fs, path::Path};

use crate::cgroup::{CgroupError, Hierarchy};

/// The oldest kernel that is supported: Debian 12's.
pub const OLDEST_KERNEL: (u32, u32) = (6, 1);

const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_BPF: u32 = 39;

/// Something that this host lacks. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub enum PreflightError {
    #[error("limits need the privileges of root (missing: {0}); {1}")]
    Privileges(String, &'static str),
    #[error("/proc is not mounted here; type: mount -t proc proc /proc")]
    NoProc,
    /// The kernel's type information cannot be seen.
    #[error("/sys is not mounted here; type: mount -t sysfs sysfs /sys")]
    NoSys,
    #[error(
        "kernel {0} is too old; Tidegate needs {a}.{b} or newer",
        a = OLDEST_KERNEL.0,
        b = OLDEST_KERNEL.1
    )]
    OldKernel(String),
    #[error(
        "the kernel has no BTF (/sys/kernel/btf/vmlinux); it must be built with CONFIG_DEBUG_INFO_BTF=y"
    )]
    NoBtf,
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

/// Checks privileges, kernel, BTF and cgroup v2, and returns the cgroup hierarchy.
///
/// # Errors
/// [`PreflightError`] names the first thing that is missing.
pub fn preflight() -> Result<Hierarchy, PreflightError> {
    check(&[CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN])
}

/// The same for who only reads limits that are pinned and changes their rates: `CAP_BPF` is enough, and
/// `CAP_NET_ADMIN` where the kernel's HTB keeps a rate (schemes `htb`, `dem`, `spring`).
///
/// # Errors
/// [`PreflightError`] names the first thing that is missing.
pub fn preflight_for_rates(of_qdiscs: bool) -> Result<Hierarchy, PreflightError> {
    check(if of_qdiscs { &[CAP_BPF, CAP_NET_ADMIN] } else { &[CAP_BPF] })
}

fn check(needed: &[u32]) -> Result<Hierarchy, PreflightError> {
    let Ok(status) = fs::read_to_string("/proc/self/status") else {
        return Err(PreflightError::NoProc);
    };
    let missing = missing_capabilities(&status, needed);
    if !missing.is_empty() {
        // Root without them is root of a container.
        let advice = match rustix::process::geteuid().is_root() {
            true => "you are root without them, as in a container: start that with --privileged",
            false => "run it with sudo",
        };
        return Err(PreflightError::Privileges(missing.join(", "), advice));
    }
    if is_older_than(OLDEST_KERNEL) {
        return Err(PreflightError::OldKernel(release()));
    }
    if !Path::new("/sys/kernel").exists() {
        return Err(PreflightError::NoSys);
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Err(PreflightError::NoBtf);
    }
    Ok(Hierarchy::find()?)
}

/// Which of the needed capabilities are not effective, by name.
fn missing_capabilities(status: &str, needed: &[u32]) -> Vec<&'static str> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    let has = |bit: u32| effective & (1 << bit) != 0;
    [("CAP_BPF", CAP_BPF), ("CAP_NET_ADMIN", CAP_NET_ADMIN), ("CAP_SYS_ADMIN", CAP_SYS_ADMIN)]
        .into_iter()
        .filter(|(_, bit)| needed.contains(bit) && !has(*bit))
        .map(|(name, _)| name)
        .collect()
}

/// Those of [`preflight`] that this process lacks, by name; `None` if it cannot tell.
pub(crate) fn lacking() -> Option<Vec<&'static str>> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    Some(missing_capabilities(&status, &[CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN]))
}

/// The release of the running kernel.
pub(crate) fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Whether the running kernel is older than a version, major and minor; one that does not say is not.
pub(crate) fn is_older_than(version: (u32, u32)) -> bool {
    kernel_version(&release()).is_some_and(|running| running < version)
}

/// Major and minor of a release such as `6.1.0-18-amd64`.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        let missing =
            |status| missing_capabilities(status, &[CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN]);
        assert!(missing("CapEff:\t000001ffffffffff\n").is_empty());
        assert_eq!(missing("CapEff:\t0000000000001000\n"), ["CAP_BPF", "CAP_SYS_ADMIN"]);
        assert_eq!(missing("").len(), 3);
        assert_eq!(missing_capabilities("", &[CAP_BPF]), ["CAP_BPF"]);
    }

    #[test]
    fn kernel_releases_read() {
        assert_eq!(kernel_version("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(kernel_version("5.15.0"), Some((5, 15)));
        assert_eq!(kernel_version("junk"), None);
    }
}
