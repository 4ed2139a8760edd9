//! The limits pinned on this host, as a plan sees them and acts on them.

use std::path::Path;

use tidegate_core::Scope;
use tidegate_sys::{
    cgroup::{CgroupError, Hierarchy},
    device::Target,
    fq::FqError,
    limit::LimitOptions,
    preflight::{PreflightError, preflight, preflight_for_rates},
    store::{PinnedLimit, Store, StoreError, StoreLock, Unreadable},
};

use crate::{
    apply::Gates,
    plan::{Present, Standing, Wanted},
    spec::{LimitSpec, Problem, Spec, SpecError},
};

/// This host: its cgroups, and where its limits are pinned.
#[derive(Debug, Clone)]
pub struct Host {
    hierarchy: Hierarchy,
    store: Store,
}

/// This host with other writers kept out.
#[derive(Debug)]
pub struct LockedHost {
    host: Host,
    lock: StoreLock,
}

impl Host {
    /// Checks that the host can hold limits at all. Nothing is touched.
    ///
    /// # Errors
    /// [`PreflightError`] names what it lacks.
    pub fn open(store: &Path) -> Result<Host, PreflightError> {
        Ok(Host { hierarchy: preflight()?, store: Store::at(store) })
    }

    /// The same for who only reads limits and changes their rates, which asks for fewer privileges.
    ///
    /// # Errors
    /// [`PreflightError`] names what the host lacks.
    pub fn open_for_rates(store: &Path) -> Result<Host, PreflightError> {
        Ok(Host { hierarchy: preflight_for_rates()?, store: Store::at(store) })
    }

    /// Its cgroups.
    #[must_use]
    pub fn hierarchy(&self) -> &Hierarchy {
        &self.hierarchy
    }

    /// Its pinned limits.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Every limit, sorted by name, those that cannot be read among them.
    ///
    /// # Errors
    /// [`StoreError`] when the store cannot be read.
    pub fn present(&self) -> Result<Vec<Present>, StoreError> {
        let listing = self.store.list(&self.hierarchy)?;
        let broken = listing.unreadable.iter().map(present_unreadable);
        let mut all: Vec<_> = listing.limits.iter().map(present).chain(broken).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// One limit; `None` if there is none of this name.
    ///
    /// # Errors
    /// [`StoreError`] when it cannot be read.
    pub fn find(&self, name: &str) -> Result<Option<PinnedLimit>, StoreError> {
        match self.store.open(&self.hierarchy, name) {
            Err(StoreError::Missing(_)) => Ok(None),
            found => found.map(Some),
        }
    }

    /// The limits of a spec with their cgroups as this host writes them: all cgroups and devices exist.
    ///
    /// # Errors
    /// [`SpecError`] for the first one whose cgroup or device does not.
    pub fn wanted(&self, spec: &Spec) -> Result<Vec<Wanted>, SpecError> {
        let resolve = |limit: &LimitSpec| {
            let scope = self.resolve(&limit.scope).map_err(|e| SpecError {
                file: spec.file.clone(),
                line: Some(limit.line),
                limit: Some(limit.name.clone()),
                field: Some("scope"),
                problem: Problem::Scope(e),
            })?;
            let LimitSpec { name, options, parent, asked, .. } = limit.clone();
            Ok(Wanted { name, scope, options, parent, asked })
        };
        spec.limits.iter().map(resolve).collect()
    }

    /// A cgroup or device that exists, a cgroup's path as this host writes it.
    ///
    /// # Errors
    /// [`ScopeError`] when it does not exist.
    pub fn resolve(&self, scope: &Scope) -> Result<Scope, ScopeError> {
        match scope {
            Scope::Cgroup(path) => Ok(Scope::Cgroup(self.hierarchy.open(path)?.path().to_owned())),
            Scope::Dev(_) | Scope::Port(_) => Ok(Target::find(scope)?.scope),
        }
    }

    /// Keeps other writers out.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn lock(&self) -> Result<LockedHost, StoreError> {
        let lock = self.store.lock()?;
        Ok(LockedHost { host: self.clone(), lock })
    }
}

/// What a limit is to be put on does not exist.
#[derive(Debug, thiserror::Error)]
pub enum ScopeError {
    /// The cgroup.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The device.
    #[error(transparent)]
    Device(#[from] FqError),
}

/// A pinned limit as a plan sees it.
#[must_use]
pub fn present(pinned: &PinnedLimit) -> Present {
    let standing = match &pinned.scope {
        None => Standing::ScopeGone,
        Some(_) if !pinned.unhooked.is_empty() => Standing::Unhooked,
        Some(_) if pinned.unkept.is_some() => Standing::Unkept,
        Some(_) => Standing::InForce,
    };
    let nowhere = || Scope::Cgroup(String::new());
    Present {
        name: pinned.name.clone(),
        scope: pinned.scope.clone().or_else(|| pinned.installed_on.clone()).unwrap_or_else(nowhere),
        standing,
        options: LimitOptions::from(&pinned.limit),
        parent: pinned.parent.clone(),
    }
}

/// A limit that cannot be read, of which a plan knows its place at most.
fn present_unreadable(limit: &Unreadable) -> Present {
    Present {
        name: limit.name.clone(),
        scope: limit.scope.clone().unwrap_or_else(|| Scope::Cgroup("?".to_owned())),
        standing: Standing::Broken,
        options: LimitOptions::default(),
        parent: limit.parent.clone(),
    }
}

impl LockedHost {
    /// The host.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Whether a qdisc that somebody has put on a device is replaced by a limit that needs one.
    pub fn force(&mut self, force: bool) {
        self.host.store.force(force);
    }

    /// Takes off what processes that died have left on devices of this network namespace; says what.
    pub fn remove_orphans(&self) -> Vec<String> {
        self.host.store.remove_orphans(&self.lock)
    }

    /// Lets other writers in. If no limit is left, nothing of Tidegate is left on the host.
    pub fn close(self) {
        self.host.store.close(self.lock);
    }
}

impl Gates for LockedHost {
    type Error = StoreError;

    fn add(
        &mut self,
        name: &str,
        scope: &Scope,
        options: &LimitOptions,
        parent: Option<&str>,
    ) -> Result<(), StoreError> {
        let Host { hierarchy, store } = &self.host;
        store.install(&self.lock, hierarchy, name, scope, options, parent)
    }

    fn change(&mut self, name: &str, options: &LimitOptions) -> Result<(), StoreError> {
        self.host.store.change(&self.lock, &self.host.hierarchy, name, options)
    }

    fn remove(&mut self, name: &str) -> Result<(), StoreError> {
        self.host.store.remove(&self.lock, &self.host.hierarchy, name)
    }
}
