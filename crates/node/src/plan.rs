//! What must be done so that the limits of a host are as a spec says. Pure: no kernel is asked.
//!
//! - A limit of the spec that the host does not have is added; one with other settings is changed in place.
//! - One on another cgroup or device than the spec says, or whose cgroup or device is gone, or whose programs
//!   somebody took off, or that gets a scheme of other programs, is taken off and put on again.
//! - A limit that only the host has is left alone, unless the plan prunes.
//!
//! Order: whatever is taken off first, so that names and cgroups are free; then changes; then additions.
//! Planning n limits takes O(n log n).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use tidegate_core::{Scheme, Scope};
use tidegate_sys::limit::LimitOptions;

use crate::settings::{Difference, canonical, differences};

/// A limit that shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// Its cgroup or device, which exists.
    pub scope: Scope,
    /// What it does.
    pub options: LimitOptions,
}

/// A limit that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Present {
    /// Its name.
    pub name: String,
    /// Its cgroup or device, or where it was.
    pub scope: Scope,
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
    /// Its cgroup or device has been removed.
    ScopeGone,
    /// Its cgroup or device is there, but its programs were taken off.
    Unhooked,
    /// With scheme `edt`: a device keeps no departure times, so that the limit only polices.
    Unkept,
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
        /// Its cgroup or device.
        scope: Scope,
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
    /// The spec has it on another cgroup or device.
    Moved,
    /// The spec has it with a scheme of other programs.
    OtherPrograms,
    /// Its cgroup or device is gone; it is put on the one that has taken its place.
    ScopeGone,
    /// Somebody took its programs off; it is put on again.
    Unhooked,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Pruned => "not in the file",
            Reason::Moved => "on something else in the file",
            Reason::OtherPrograms => "its scheme has other programs",
            Reason::ScopeGone => "what it was on was removed",
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
        "limits `{first}` and `{second}` are both on {scope}; put both directions in one limit, or \
         limit a cgroup above or below it"
    )]
    SameScope {
        /// One limit.
        first: String,
        /// The other.
        second: String,
        /// Their cgroup or device.
        scope: Scope,
    },
    /// A limit of the host that the spec does not have is on the cgroup or device.
    #[error(
        "limit `{name}`: {scope} already has limit `{other}`, which is not in the file; \
         take that one off with `tidegate limit del {other}`, or apply with --prune"
    )]
    ScopeTaken {
        /// The limit of the spec.
        name: String,
        /// The cgroup or device.
        scope: Scope,
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
    let mut taken: BTreeMap<&Scope, &str> = BTreeMap::new();
    for limit in wanted {
        if let Some(first) = taken.insert(&limit.scope, &limit.name) {
            return Err(PlanError::SameScope {
                first: first.to_owned(),
                second: limit.name.clone(),
                scope: limit.scope.clone(),
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
        let user = taken.get(&limit.scope);
        if let Some(name) = user.filter(|_| limit.standing != Standing::ScopeGone) {
            return Err(PlanError::ScopeTaken {
                name: (*name).to_owned(),
                scope: limit.scope.clone(),
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
            Standing::ScopeGone => Some(Reason::ScopeGone),
            Standing::Unhooked => Some(Reason::Unhooked),
            _ if is.scope != limit.scope => Some(Reason::Moved),
            _ if other_programs(&is.options, &limit.options) => Some(Reason::OtherPrograms),
            Standing::InForce | Standing::Unkept => None,
        };
        if let Some(reason) = reason {
            plan.actions.push(Action::Remove { limit: (*is).clone(), reason });
            additions.push(Action::Add { limit: limit.clone() });
        } else if canonical(&is.options) != canonical(&limit.options) {
            changes.push(Action::Change {
                name: limit.name.clone(),
                scope: limit.scope.clone(),
                from: is.options,
                to: limit.options,
            });
        }
    }
    plan.actions.extend(changes);
    plan.actions.extend(additions);
    Ok(plan)
}

/// Whether one limit can only be put in the place of the other, not changed into it.
#[must_use]
pub fn other_programs(from: &LimitOptions, to: &LimitOptions) -> bool {
    (from.scheme == Scheme::Edt) != (to.scheme == Scheme::Edt)
}

#[cfg(test)]
pub(crate) mod tests;
