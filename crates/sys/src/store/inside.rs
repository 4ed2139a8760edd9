//! Which limits can be inside which, by what they are on.

use std::iter;

use tidegate_core::{Scheme, Scope, class::MAX_DEPTH};

use super::{PARENT, PinnedLimit, Store, StoreError, name_in};
use crate::cgroup::Hierarchy;

/// Whether a limit on `above` sees all packets of one on `below`. Only with scheme `htb` does a device
/// contain cgroups and ports: what they send by it; and only there no two limits have one cgroup.
pub fn can_contain(above: &Scope, below: &Scope, scheme: Scheme) -> bool {
    match (above, below) {
        (Scope::Cgroup(above), Scope::Cgroup(below)) => match scheme {
            Scheme::Htb => is_above(above, below),
            _ => contains(above, below),
        },
        (Scope::Dev(_), Scope::Cgroup(_) | Scope::Port(_)) => scheme == Scheme::Htb,
        _ => false,
    }
}

/// Whether a cgroup contains another one, by their paths below the mount.
pub fn is_above(above: &str, below: &str) -> bool {
    let (above, below) = (above.trim_matches('/'), below.trim_matches('/'));
    let rest = below.strip_prefix(above);
    above != below && (above.is_empty() || rest.is_some_and(|rest| rest.starts_with('/')))
}

/// Whether it contains the other one, or is it.
pub fn contains(above: &str, below: &str) -> bool {
    above.trim_matches('/') == below.trim_matches('/') || is_above(above, below)
}

impl Store {
    /// Opens the parent of a limit that is to be put on, and checks that it can be that.
    pub(super) fn find_parent(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        parent: &str,
        scope: &Scope,
        scheme: Scheme,
    ) -> Result<PinnedLimit, StoreError> {
        let missing = || StoreError::NoParent { name: name.to_owned(), parent: parent.to_owned() };
        let found = match self.open(hierarchy, parent) {
            _ if parent == name => return Err(missing()),
            Err(StoreError::Missing(_)) => return Err(missing()),
            found => found?,
        };
        let parent_scope = found.scope.clone().or_else(|| found.installed_on.clone());
        let parent_scope = parent_scope.unwrap_or_else(|| Scope::Cgroup(String::new()));
        let parent_scheme = found.limit.scheme();
        let is_good = match scheme {
            scheme if scheme.info().has_qdisc => parent_scheme == scheme,
            _ => parent_scheme.info().sets_sockets,
        };
        let contains = match (&parent_scope, scope) {
            // Each member is looked at when it joins.
            (above, Scope::Select(_)) => !above.is_device(),
            (Scope::Select(_), Scope::Cgroup(path)) => found.contains(path),
            (above, below) => can_contain(above, below, scheme),
        };
        if !contains || !is_good {
            return Err(StoreError::NotAbove {
                name: name.to_owned(),
                scope: scope.clone(),
                parent: parent.to_owned(),
                parent_scope,
                parent_scheme,
            });
        }
        // The limit itself, and all above it.
        let above = |limit: &String| name_in(&self.root.join(limit), PARENT);
        let above = iter::successors(Some(parent.to_owned()), above);
        if 1 + above.take(MAX_DEPTH).count() > MAX_DEPTH {
            return Err(StoreError::TooDeep(name.to_owned()));
        }
        Ok(found)
    }
}
