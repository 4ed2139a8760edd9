//! The scope of a limit: the traffic that it applies to.

use alloc::{borrow::ToOwned, string::String};
use core::fmt;

use crate::selector::{Selector, SelectorKind};

/// The traffic that a limit applies to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The programs of a cgroup: its path below the cgroup mount, empty for the root.
    Cgroup(String),
    /// All cgroups that a selector matches. They share the limit, and come and go while it stays.
    Select(Selector),
    /// A device of this host by its name: its `egress` is what leaves by it.
    Dev(String),
    /// The host's side of a virtual machine's or container's interface, by its name: what comes in by it is
    /// the `egress` of the workload behind it.
    Port(String),
}

impl Scope {
    /// The cgroup of a path; all that match if it is a pattern.
    #[must_use]
    pub fn of_cgroup(path: &str) -> Scope {
        if path.contains(['*', '?', '[']) {
            Scope::Select(Selector { kind: SelectorKind::Cgroup, value: path.to_owned() })
        } else {
            Scope::Cgroup(path.to_owned())
        }
    }

    /// The scope with this [`kind`](Self::kind) and [`name`](Self::name); `None` for another kind.
    #[must_use]
    pub fn named(kind: &str, name: &str) -> Option<Scope> {
        Some(match kind {
            "dev" => Scope::Dev(name.to_owned()),
            "port" => Scope::Port(name.to_owned()),
            "cgroup" => Scope::of_cgroup(name),
            kind => {
                let kind = SelectorKind::ALL.into_iter().find(|k| k.name() == kind)?;
                Scope::Select(Selector { kind, value: name.to_owned() })
            }
        })
    }

    /// `cgroup`, `dev`, `port` or what a selector looks at: as a spec file names it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Scope::Cgroup(_) => "cgroup",
            Scope::Dev(_) => "dev",
            Scope::Port(_) => "port",
            Scope::Select(selector) => selector.kind.name(),
        }
    }

    /// The cgroup's path, the device's name or what a selector matches.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Scope::Cgroup(name) | Scope::Dev(name) | Scope::Port(name) => name,
            Scope::Select(selector) => &selector.value,
        }
    }

    /// `cgroup`, `device` or `port`: what a scheme works on or not.
    #[must_use]
    pub fn noun(&self) -> &'static str {
        match self {
            Scope::Cgroup(_) | Scope::Select(_) => "cgroup",
            Scope::Dev(_) => "device",
            Scope::Port(_) => "port",
        }
    }

    /// Whether it is a network device, from either side.
    #[must_use]
    pub fn is_device(&self) -> bool {
        matches!(self, Scope::Dev(_) | Scope::Port(_))
    }
}

impl fmt::Display for Scope {
    /// As in a sentence: "cgroup `x`", "cgroup `x/*`", "unit `x.service`", "device `eth0`".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Cgroup(path) if path.is_empty() => f.write_str("the root cgroup"),
            Scope::Cgroup(path) => write!(f, "cgroup `{path}`"),
            Scope::Select(Selector { kind, value }) => {
                let kind = match kind {
                    SelectorKind::Labels => "container with",
                    SelectorKind::Exe => "program",
                    kind => kind.name(),
                };
                write!(f, "{kind} `{value}`")
            }
            Scope::Dev(name) => write!(f, "device `{name}`"),
            Scope::Port(name) => write!(f, "port `{name}`"),
        }
    }
}

/// The path of a cgroup in a sentence: that of the root is empty.
#[must_use]
pub fn shown(path: &str) -> &str {
    if path.is_empty() { "/" } else { path }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn a_scope_is_known_by_its_kind_and_name() {
        let scopes = ["cgroup a/b", "cgroup a/*", "dev eth0", "port tap0", "unit web.service"];
        for (kind, name) in scopes.into_iter().filter_map(|text| text.split_once(' ')) {
            let scope = Scope::named(kind, name).unwrap();
            assert_eq!((scope.kind(), scope.name()), (kind, name));
            assert_eq!(scope.is_device(), matches!(kind, "dev" | "port"));
        }
        assert_eq!(Scope::named("service", "web"), None);
        let shown = |kind, name| Scope::named(kind, name).unwrap().to_string();
        assert_eq!(shown("cgroup", "a/b"), "cgroup `a/b`");
        assert_eq!(shown("cgroup", "a/*"), "cgroup `a/*`");
        assert_eq!(shown("unit", "web.service"), "unit `web.service`");
    }
}
