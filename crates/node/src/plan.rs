//! What must be done so that the limits of a host are as a spec says. Pure: no kernel is asked.
//!
//! - A limit of the spec that the host does not have is added; one with other settings is changed in place.
//! - One on another cgroup than the spec says, or whose cgroup is gone, or whose programs somebody took off,
//!   is taken off and put on again.
//! - A limit that only the host has is left alone, unless the plan prunes.
//!
//! Order: whatever is taken off first, so that names and cgroups are free; then changes; then additions.
//! Planning n limits takes O(n log n).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use tidegate_sys::limit::LimitOptions;

use crate::settings::{Difference, canonical, differences};

/// A limit that shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// Path of its cgroup, which exists.
    pub cgroup: String,
    /// What it does.
    pub options: LimitOptions,
}

/// A limit that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Present {
    /// Its name.
    pub name: String,
    /// Path of its cgroup, or where it was.
    pub cgroup: String,
    /// Whether it is enforced.
    pub standing: Standing,
    /// What it does.
    pub options: LimitOptions,
}

/// Whether a limit is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is.
    InForce,
    /// Its cgroup has been removed.
    CgroupGone,
    /// Its cgroup is there, but its programs were taken off.
    Unhooked,
}

/// One step. Each can be undone, save the taking off of a limit that was not enforced any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Take a limit off.
    Remove {
        /// The limit as it is.
        limit: Present,
        /// Why.
        reason: Reason,
    },
    /// Change it in place.
    Change {
        /// Its name.
        name: String,
        /// Its cgroup.
        cgroup: String,
        /// As it is.
        from: LimitOptions,
        /// As it shall be.
        to: LimitOptions,
    },
    /// Put a limit on.
    Add {
        /// The limit as it shall be.
        limit: Wanted,
    },
}

/// Why a limit is taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The spec does not have it, and the plan prunes.
    Pruned,
    /// The spec has it on another cgroup.
    Moved,
    /// Its cgroup is gone; it is put on the one that has taken its place.
    CgroupGone,
    /// Somebody took its programs off; it is put on again.
    Unhooked,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Pruned => "not in the file",
            Reason::Moved => "on another cgroup in the file",
            Reason::CgroupGone => "its cgroup was removed",
            Reason::Unhooked => "its programs were taken off",
        })
    }
}

impl Action {
    /// Name of the limit.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Action::Remove { limit, .. } => &limit.name,
            Action::Change { name, .. } => name,
            Action::Add { limit } => &limit.name,
        }
    }

    /// `add`, `change` or `remove`.
    #[must_use]
    pub fn verb(&self) -> &'static str {
        match self {
            Action::Remove { .. } => "remove",
            Action::Change { .. } => "change",
            Action::Add { .. } => "add",
        }
    }

    /// What a change changes; empty for other actions.
    #[must_use]
    pub fn differences(&self) -> Vec<Difference> {
        match self {
            Action::Change { from, to, .. } => differences(from, to),
            _ => Vec::new(),
        }
    }
}

/// Steps in the order in which to do them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// To do.
    pub actions: Vec<Action>,
    /// Names of limits of the host that the spec does not have and that are left alone.
    pub unmanaged: Vec<String>,
}

/// Why there is no plan. Nothing has been changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Two limits of the spec name one cgroup in two ways.
    #[error(
        "limits `{first}` and `{second}` are both on cgroup `{cgroup}`; put both directions in one limit, or \
         limit a cgroup above or below it"
    )]
    SameCgroup {
        /// One limit.
        first: String,
        /// The other.
        second: String,
        /// Their cgroup.
        cgroup: String,
    },
    /// A limit of the host that the spec does not have is on the cgroup.
    #[error(
        "limit `{name}`: cgroup `{cgroup}` already has limit `{other}`, which is not in the file; \
         take that one off with `tidegate limit del {other}`, or apply with --prune"
    )]
    CgroupTaken {
        /// The limit of the spec.
        name: String,
        /// The cgroup.
        cgroup: String,
        /// The limit on it.
        other: String,
    },
}

/// Plans the way from `present` to `wanted`. Names are unique in each.
///
/// # Errors
/// [`PlanError`] when two limits would be on one cgroup.
pub fn plan(present: &[Present], wanted: &[Wanted], prune: bool) -> Result<Plan, PlanError> {
    let wanted_names: BTreeSet<_> = wanted.iter().map(|limit| &limit.name).collect();
    let present_by_name: BTreeMap<_, _> =
        present.iter().map(|limit| (&limit.name, limit)).collect();
    let mut taken: BTreeMap<&str, &str> = BTreeMap::new();
    for limit in wanted {
        if let Some(first) = taken.insert(&limit.cgroup, &limit.name) {
            return Err(PlanError::SameCgroup {
                first: first.to_owned(),
                second: limit.name.clone(),
                cgroup: limit.cgroup.clone(),
            });
        }
    }

    let mut plan = Plan::default();
    let (mut changes, mut additions) = (Vec::new(), Vec::new());
    for limit in present.iter().filter(|limit| !wanted_names.contains(&limit.name)) {
        if prune {
            plan.actions.push(Action::Remove { limit: limit.clone(), reason: Reason::Pruned });
            continue;
        }
        let user = taken.get(limit.cgroup.as_str());
        if let Some(name) = user.filter(|_| limit.standing != Standing::CgroupGone) {
            return Err(PlanError::CgroupTaken {
                name: (*name).to_owned(),
                cgroup: limit.cgroup.clone(),
                other: limit.name.clone(),
            });
        }
        plan.unmanaged.push(limit.name.clone());
    }
    for limit in wanted {
        let Some(is) = present_by_name.get(&limit.name) else {
            additions.push(Action::Add { limit: limit.clone() });
            continue;
        };
        let reason = match is.standing {
            Standing::CgroupGone => Some(Reason::CgroupGone),
            Standing::Unhooked => Some(Reason::Unhooked),
            Standing::InForce if is.cgroup != limit.cgroup => Some(Reason::Moved),
            Standing::InForce => None,
        };
        if let Some(reason) = reason {
            plan.actions.push(Action::Remove { limit: (*is).clone(), reason });
            additions.push(Action::Add { limit: limit.clone() });
        } else if canonical(&is.options) != canonical(&limit.options) {
            changes.push(Action::Change {
                name: limit.name.clone(),
                cgroup: limit.cgroup.clone(),
                from: is.options,
                to: limit.options,
            });
        }
    }
    plan.actions.extend(changes);
    plan.actions.extend(additions);
    Ok(plan)
}

#[cfg(test)]
pub(crate) mod tests;
