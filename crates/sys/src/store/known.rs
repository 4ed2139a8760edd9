//! Where the limits of a store are, as far as a writer has seen since it has the lock: so that to put a
//! thousand on, or to take them off, does not look at a million. Limits that have gone since are still in it,
//! so whoever asks looks whether what is found is there.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, mem,
    path::{Path, PathBuf},
    sync::PoisonError,
};

use tidegate_core::Selector;

use super::{
    CGROUP, MAX_LIMITS, PARENT, Store, StoreError,
    members::{SELECT, remembered_in},
    name_in,
};
use crate::cgroup::Hierarchy;

/// Limits by where they are.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Names by the path of a cgroup: their own, or that of a member.
    cgroups: BTreeMap<String, Vec<String>>,
    /// Names by their selector.
    selectors: HashMap<PathBuf, Vec<String>>,
    /// Names by that of the parent.
    children: HashMap<String, Vec<String>>,
    /// Names that are not among them yet.
    newer: Vec<String>,
    /// How often one was noted.
    count: usize,
}

impl Known {
    fn note(&mut self, hierarchy: Option<&Hierarchy>, dir: &Path, name: &str) {
        self.count += 1;
        let mut on = |at: &Path| {
            let path = hierarchy.map(|hierarchy| hierarchy.relative(at)).unwrap_or_default();
            self.cgroups.entry(path).or_default().push(name.to_owned());
        };
        if let Ok(at) = fs::read_link(dir.join(CGROUP)) {
            on(&at);
        } else if let Ok(selector) = fs::read_link(dir.join(SELECT)) {
            remembered_in(dir).iter().for_each(|at| on(at));
            self.selectors.entry(selector).or_default().push(name.to_owned());
        }
        if let Some(parent) = name_in(dir, PARENT) {
            self.children.entry(parent).or_default().push(name.to_owned());
        }
    }
}

impl Store {
    fn known<T>(
        &self,
        hierarchy: Option<&Hierarchy>,
        ask: impl FnOnce(&Known) -> T,
    ) -> Result<T, StoreError> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &mut *known {
            for name in mem::take(&mut known.newer) {
                known.note(hierarchy, &self.root.join(&name), &name);
            }
        }
        let known = match &mut *known {
            Some(known) if known.count < MAX_LIMITS => known,
            known => {
                let mut found = Known::default();
                for name in self.names()? {
                    found.note(hierarchy, &self.root.join(&name), &name);
                }
                known.insert(found)
            }
        };
        Ok(ask(known))
    }

    /// Limits that may be on the cgroup of a path.
    pub(super) fn on_path(
        &self,
        hierarchy: &Hierarchy,
        path: &str,
    ) -> Result<Vec<String>, StoreError> {
        self.known(Some(hierarchy), |known| known.cgroups.get(path).cloned().unwrap_or_default())
    }

    /// Whether there are as many limits as there may be.
    pub(super) fn is_full(&self, hierarchy: &Hierarchy) -> Result<bool, StoreError> {
        self.known(Some(hierarchy), |known| known.count >= MAX_LIMITS)
    }

    /// Limits that may have a selector.
    pub(super) fn with_selector(
        &self,
        hierarchy: &Hierarchy,
        selector: &Selector,
    ) -> Result<Vec<String>, StoreError> {
        let selector = PathBuf::from(selector.to_string());
        self.known(Some(hierarchy), |known| {
            known.selectors.get(&selector).cloned().unwrap_or_default()
        })
    }

    /// A cgroup has joined a limit.
    pub(super) fn note_member(&self, path: &str, name: &str) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &mut *known {
            known.cgroups.entry(path.to_owned()).or_default().push(name.to_owned());
        }
    }

    /// Limits that may meet packets of the cgroup of a path: on it, or on one above or below it.
    pub(super) fn around_path(
        &self,
        hierarchy: &Hierarchy,
        path: &str,
    ) -> Result<Vec<String>, StoreError> {
        self.known(Some(hierarchy), |known| {
            let ends = path.match_indices('/').map(|(end, _)| &path[..end]);
            let above = [""].into_iter().chain(ends).filter(|above| *above != path);
            let above = above.filter_map(|above| known.cgroups.get(above));
            let inside = if path.is_empty() { String::new() } else { format!("{path}/") };
            let below = known.cgroups.range(inside.clone()..);
            let below = below.take_while(|(at, _)| at.starts_with(&inside)).map(|(_, names)| names);
            let own = known.cgroups.get(path).filter(|_| !path.is_empty());
            let found: BTreeSet<_> = above.chain(own).chain(below).flatten().cloned().collect();
            found.into_iter().collect()
        })
    }

    /// Limits inside another one.
    pub(super) fn children_of(&self, name: &str) -> Result<Vec<String>, StoreError> {
        let hierarchy = Hierarchy::find().ok();
        let mut children = self.known(hierarchy.as_ref(), |known| {
            known.children.get(name).cloned().unwrap_or_default()
        })?;
        children
            .retain(|child| name_in(&self.root.join(child), PARENT).is_some_and(|of| of == name));
        children.sort();
        children.dedup();
        Ok(children)
    }

    /// A limit is listed from now on.
    pub(super) fn note(&self, name: &str) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &mut *known {
            known.newer.push(name.to_owned());
        }
    }

    /// Another writer may have changed what is known.
    pub(super) fn forget_known(&self) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
