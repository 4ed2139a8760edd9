//! Why the store refused.

use std::{fmt, io};

use tidegate_core::{Scheme, Scope, class::MAX_DEPTH, prefixes::Prefix};

use super::{BPFFS, MAX_LIMITS};
use crate::limit::LimitError;

/// Why the store refused. Unless said otherwise the host is as before.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A name that cannot be a directory of the BPF file system.
    #[error(
        "limit name `{0}` must be 1 to 63 letters, digits, `-` or `_`, and start with a letter or digit"
    )]
    BadName(String),
    /// There is no such limit.
    #[error("there is no limit `{0}`; `tidegate status` lists those there are")]
    Missing(String),
    /// There is one already.
    #[error("limit `{0}` exists already; change it with `tidegate limit set {0} ...`")]
    Exists(String),
    /// Another limit has the cgroup or device.
    #[error("{scope} already has limit `{name}`; change it with `tidegate limit set {name} ...`")]
    ScopeTaken { scope: Scope, name: String },
    /// Another limit has the prefix.
    #[error(
        "{scope} already has limit `{name}` for {prefix}; put both directions in that one, or take the \
         prefix out with `tidegate limit set {name} --match ...`"
    )]
    PrefixTaken { scope: Scope, prefix: Prefix, name: String },
    /// The cgroup or device of a limit has been removed.
    #[error(
        "the {scope} of limit `{name}` is gone, so nothing is limited; when it is there again, reattach the \
         limit with `tidegate limit restore {name}`"
    )]
    ScopeGone { name: String, scope: Scope },
    /// The programs of the other scheme are others.
    #[error("limit `{0}` cannot change to other programs in place: remove it and add it again")]
    OtherPrograms(String),
    /// There is no such parent.
    #[error("limit `{name}`: there is no limit `{parent}` that could be its parent")]
    NoParent { name: String, parent: String },
    /// The parent's programs do not see the child's packets.
    #[error(
        "limit `{name}`: its parent `{parent}` must be on {scope} or on a cgroup above it, with scheme \
         `pace` or `nrm`, or both have scheme `htb` in a tree on a device; {parent} is on {parent_scope} \
         with `{parent_scheme}`"
    )]
    NotAbove {
        name: String,
        scope: Scope,
        parent: String,
        parent_scope: Scope,
        parent_scheme: Scheme,
    },
    /// A limit on one cgroup or device.
    #[error(
        "limit `{0}` has one scope, which cannot be changed; only one with a selector has members"
    )]
    NoSelector(String),
    /// Some cgroups could not join or leave. All others are as asked.
    #[error("limit `{name}`: {}", Failed(.failed))]
    Members { name: String, failed: Vec<(String, StoreError)> },
    /// A member that the parent's programs do not see.
    #[error(
        "limit `{name}`: {scope} is not inside its parent `{parent}`; leave the parent out, or write a scope \
         that is inside it"
    )]
    MemberOutside { name: String, scope: Scope, parent: String },
    /// Too many limits above each other.
    #[error("limit `{0}`: more than {MAX_DEPTH} limits above each other; take some out")]
    TooDeep(String),
    /// A limit with children.
    #[error("limit `{name}` is the parent of {}; remove those first", .children.join(", "))]
    HasChildren { name: String, children: Vec<String> },
    /// A limit with a parent that shall have none, or the other way round.
    #[error("limit `{0}` cannot get or lose its parent in place: remove it and add it again")]
    OtherParent(String),
    /// Other writers, one or many, have had the store for as long as this one waits.
    #[error("other tidegate commands are still changing the limits in {0}; try again later")]
    Busy(String),
    /// Too many limits.
    #[error("this host holds its {MAX_LIMITS} limits already; remove some first")]
    Full,
    /// The place for pins is no BPF file system.
    #[error(
        "{0} is not in a BPF file system; leave --bpffs (TIDEGATE_BPFFS) out, or mount one there: mkdir -p \
         {1} && mount -t bpf -o mode=0700 bpf {1}"
    )]
    NotBpffs(String, String),
    /// What would be pinned would go with this process or its container.
    #[error(
        "no BPF file system is mounted at {BPFFS}, and one that this process mounted would end with it \
         ({why}), and the limit with that; mount it on the host first (mount -t bpf -o mode=0700 bpf \
         {BPFFS}), and start a container with -v {BPFFS}:{BPFFS}"
    )]
    WouldEnd { why: String },
    /// Others than root may change the directory of the limits.
    #[error("{path} is open to other users ({why}), who could remove limits; type: {fix}")]
    Open { path: String, why: String, fix: String },
    /// A limit of another version, or one that has lost a pin.
    #[error(
        "limit `{name}` cannot be read ({why}); {}remove it with `tidegate limit del {name}`, or \
         replace it with `tidegate limit add {name} ...` or `tidegate apply`",
        AsItWas(*.is_known, .name)
    )]
    Unreadable {
        name: String,
        why: String,
        /// Whether it can be put on again as it was.
        is_known: bool,
    },
    /// A limit of a newer version.
    #[error(
        "limit `{name}` was made by tidegate {build}, which is newer than this one; use that version, or \
         remove the limit with `tidegate limit del {name}`"
    )]
    Newer { name: String, build: String },
    /// A limit that cannot be read has the cgroup or device.
    #[error(
        "{scope} already has limit `{name}`, which cannot be read (`tidegate status` says why); remove it \
         with `tidegate limit del {name}`"
    )]
    ScopeUnreadable { scope: Scope, name: String },
    /// Nothing says what is to be done again should this process die.
    #[error(
        "the journal {path} cannot be written ({source}), and without it a command that is killed could \
         leave a host half limited; make it writable, or make room there (`tidegate limit del` and \
         `tidegate detach` work without it)"
    )]
    NoJournal { path: String, source: io::Error },
    /// A limit was taken off for another one, which could not be put on; nor could the earlier one.
    #[error(
        "{source}; and limit `{name}`, which was removed for it, could not be put back: {back}; attach it \
         with `tidegate apply` or `tidegate limit add` once that is fixed"
    )]
    NotPutBack {
        name: String,
        /// Why the other one is not on.
        source: Box<StoreError>,
        /// Why the earlier one is not on.
        back: Box<StoreError>,
    },
    /// A device has an HTB of ours that is no limit's of this store.
    #[error(
        "{scope} has an HTB of Tidegate that may be another store's or another container's; remove it \
         there with `tidegate detach`, or replace it with `tidegate limit add --force`"
    )]
    OtherStore { scope: Scope },
    /// A signal has come, between two steps.
    #[error("stopped by {name}")]
    Stopped { signal: i32, name: &'static str },
    /// Signals cannot be kept waiting.
    #[error("cannot block signals: {0}")]
    Signals(io::Error),
    /// The limit itself.
    #[error("limit `{name}`: {source}")]
    Limit { name: String, source: LimitError },
    /// A pin could not be made, read or removed.
    #[error("{path}: {action}: {source}")]
    Io { path: String, action: &'static str, source: io::Error },
}

struct Failed<'a>(&'a [(String, StoreError)]);

impl fmt::Display for Failed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (cgroup, why)) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            write!(f, "{separator}cgroup `{cgroup}`: {why}")?;
        }
        Ok(())
    }
}

struct AsItWas<'a>(bool, &'a String);

impl fmt::Display for AsItWas<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AsItWas(true, name) => {
                write!(f, "attach it again as it was with `tidegate limit restore {name}`, ")
            }
            AsItWas(false, _) => Ok(()),
        }
    }
}
