//! What a limit applies to.

use alloc::string::String;
use core::fmt;

/// What a limit applies to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The programs of a cgroup: its path below the cgroup mount, empty for the root.
    Cgroup(String),
    /// A device of this host by its name: its `egress` is what leaves by it.
    Dev(String),
    /// The host's side of a virtual machine's or container's interface, by its name: what comes in by it is
    /// the `egress` of the workload behind it.
    Port(String),
}

impl Scope {
    /// `cgroup`, `dev` or `port`: as a spec file names it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Scope::Cgroup(_) => "cgroup",
            Scope::Dev(_) => "dev",
            Scope::Port(_) => "port",
        }
    }

    /// The cgroup's path or the device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Scope::Cgroup(name) | Scope::Dev(name) | Scope::Port(name) => name,
        }
    }

    /// Whether it is a network device, from either side.
    #[must_use]
    pub fn is_device(&self) -> bool {
        !matches!(self, Scope::Cgroup(_))
    }
}

impl fmt::Display for Scope {
    /// As in a sentence: "cgroup `x`", "device `eth0`", "port `tap0`".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Cgroup(path) if path.is_empty() => f.write_str("the root cgroup"),
            Scope::Cgroup(path) => write!(f, "cgroup `{path}`"),
            Scope::Dev(name) => write!(f, "device `{name}`"),
            Scope::Port(name) => write!(f, "port `{name}`"),
        }
    }
}
