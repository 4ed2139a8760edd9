//! The limits pinned on this host, as a plan sees them and acts on them.

use std::{collections::BTreeSet, path::Path, time::Duration};

use rustix::process::Signal;
use tidegate_core::{Scope, selector::Selector};
use tidegate_sys::{
    cgroup::Hierarchy,
    device::Target,
    features,
    limit::LimitOptions,
    preflight::{PreflightError, preflight, preflight_for_rates},
    process::SignalQueue,
    store::{PinnedLimit, Store, StoreError, StoreLock, Unreadable, Waiting},
};

use crate::{
    absent::{self, ScopeError, Waits},
    apply::Backend,
    auto::Trees,
    plan::{Present, State, Wanted},
    select,
    spec::{LimitSpec, Problem, Spec, SpecError},
    world::World,
};

/// This host: its cgroups, and where its limits are pinned.
#[derive(Debug, Clone)]
pub struct Host {
    hierarchy: Hierarchy,
    store: Store,
    problems: Vec<String>,
}

/// This host with other writers kept out. Signals that would end the process wait until a step is done.
#[derive(Debug)]
pub struct LockedHost {
    host: Host,
    lock: StoreLock,
    signals: SignalQueue,
}

/// The signals that stop a writer between two steps, with their names.
const STOPPING: [(Signal, &str); 3] =
    [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::HUP, "SIGHUP")];

impl Host {
    /// Checks that the host can hold limits at all. Nothing is touched, but what a writer that was killed has
    /// left half done is finished or undone.
    ///
    /// # Errors
    /// [`PreflightError`] names what it lacks.
    pub fn open(store: &Path) -> Result<Host, PreflightError> {
        let (hierarchy, store) = (preflight()?, Store::at(store));
        // Limits can be looked at all the same; a command that changes them gets an error.
        let problems = store.repair().unwrap_or_default();
        Ok(Host { hierarchy, store, problems })
    }

    /// The same for who only reads limits and changes their rates, which asks for fewer privileges; for a few
    /// more if rates `of_qdiscs` are among them, those of schemes `htb`, `dem` and `spring`.
    ///
    /// # Errors
    /// [`PreflightError`] names what the host lacks.
    pub fn open_for_rates(store: &Path, of_qdiscs: bool) -> Result<Host, PreflightError> {
        let hierarchy = preflight_for_rates(of_qdiscs)?;
        Ok(Host { hierarchy, store: Store::at(store), problems: Vec::new() })
    }

    /// Remains of a killed writer that could not be put right, a sentence each.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Its cgroups.
    pub fn hierarchy(&self) -> &Hierarchy {
        &self.hierarchy
    }

    /// Its pinned limits.
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

    /// The limits of a spec with their cgroups as this host writes them: those whose cgroup or device exists,
    /// and those that wait. Schemes that are chosen are chosen for this host.
    ///
    /// # Errors
    /// [`SpecError`] for the first one whose cgroup or device cannot be.
    pub fn wanted(
        &self,
        spec: &Spec,
        present: &[Present],
    ) -> Result<(Vec<Wanted>, Vec<Waits>), SpecError> {
        let spec = &self.chosen(spec, present)?;
        let (mut wanted, mut waiting) = (Vec::new(), Vec::new());
        let mut cgroups = self.cgroups();
        for limit in &spec.limits {
            let LimitSpec { name, scope, options, parent, asked, line, .. } = limit.clone();
            match self.resolve(&scope) {
                Ok(scope) => {
                    let is = present.iter().find(|is| is.name == name);
                    let members = cgroups.members(&scope, is);
                    wanted.push(Wanted { name, scope, members, options, parent, asked });
                }
                Err(e) if e.is_missing() => waiting.push(Waits { name, scope, parent: None }),
                Err(e) => {
                    return Err(SpecError {
                        file: spec.file.clone(),
                        line: Some(line),
                        limit: Some(name),
                        field: Some("scope"),
                        problem: Problem::Scope(e),
                    });
                }
            }
        }
        absent::with_parents(&mut wanted, &mut waiting);
        Ok((wanted, waiting))
    }

    /// A spec with schemes chosen for this host, or as they were chosen before.
    fn chosen(&self, spec: &Spec, present: &[Present]) -> Result<Spec, SpecError> {
        let mut spec = spec.clone();
        let is_auto = |limit: &LimitSpec| limit.options.chosen.is_some();
        if !spec.limits.iter().any(is_auto) {
            return Ok(spec);
        }
        let (kernel, mut trees) = (features::kernel(), Trees::of(present));
        for limit in &spec.limits {
            trees.add(&limit.name, limit.scope.is_device(), limit.parent.as_deref());
        }
        for limit in spec.limits.iter_mut().filter(|limit| is_auto(limit)) {
            let is = present.iter().find(|is| is.name == limit.name).map(|is| &is.options);
            let written = limit.written().options(&trees, kernel, is);
            limit.options = written.map_err(|e| SpecError::of(&spec.file, limit, e))?;
        }
        Ok(spec)
    }

    /// The limits that are not in force although their cgroup or device is there, as they shall be: of
    /// another version, taken off by somebody, or on a cgroup or device that was made anew; those that run
    /// the programs of another build; and those with cgroups outside of them, which are to join. With a name
    /// that one alone. Also says why the others that are not in force cannot be restored.
    ///
    /// # Errors
    /// [`StoreError`] when the store cannot be read.
    pub fn lost(&self, only: Option<&str>) -> Result<(Vec<Wanted>, Vec<StoreError>), StoreError> {
        let mut listing = self.store.list(&self.hierarchy)?;
        listing.limits.retain(|limit| only.is_none_or(|only| only == limit.name));
        listing.unreadable.retain(|limit| only.is_none_or(|only| only == limit.name));
        let (mut lost, mut refused) = (Vec::new(), Vec::new());
        for limit in &listing.unreadable {
            let is = present_unreadable(limit);
            match self.resolve(&is.scope) {
                Ok(_) if limit.is_known() => lost.push(is),
                Err(e) if limit.is_known() && e.is_missing() => {
                    refused.push(StoreError::ScopeGone { name: is.name, scope: is.scope });
                }
                _ => refused.push(limit.error()),
            }
        }
        let mut cgroups = self.cgroups();
        for mut limit in listing.limits.iter().map(present) {
            let outside = cgroups.outside(&limit.scope, &limit.members);
            let is_lost = match limit.state {
                State::Anew | State::Detached => true,
                State::InForce | State::NoFq | State::NoMembers => {
                    limit.other_build.is_some() || !outside.is_empty()
                }
                State::ScopeGone | State::Broken => false,
            };
            if is_lost {
                limit.members.extend(outside);
                lost.push(limit);
            } else if limit.state == State::ScopeGone && only.is_some() {
                refused.push(StoreError::ScopeGone { name: limit.name, scope: limit.scope });
            }
        }
        Ok((lost.into_iter().map(Wanted::again).collect(), refused))
    }

    /// The cgroups that limits with selectors are to have.
    pub fn cgroups(&self) -> Cgroups<'_> {
        Cgroups { host: self, world: None }
    }

    /// The cgroups that a limit with a selector is to have, as far as cgroups alone say which.
    pub fn members(&self, scope: &Scope) -> Vec<String> {
        self.cgroups().members(scope, None)
    }

    /// How long [`Host::lock`] waits for other writers.
    pub fn patience(&mut self, patience: Duration) {
        self.store.patience(patience);
    }

    /// A cgroup or device that exists, a cgroup's path as this host writes it.
    ///
    /// # Errors
    /// [`ScopeError`] when it does not exist.
    pub fn resolve(&self, scope: &Scope) -> Result<Scope, ScopeError> {
        match scope {
            Scope::Cgroup(path) => Ok(Scope::Cgroup(self.hierarchy.open(path)?.path().to_owned())),
            Scope::Dev(_) | Scope::Port(_) => Ok(Target::find(scope)?.scope),
            Scope::Select(_) => Ok(scope.clone()),
        }
    }

    /// Keeps other writers out.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn lock(&self) -> Result<LockedHost, StoreError> {
        let lock = self.store.lock()?;
        let signals = SignalQueue::block(&STOPPING.map(|(signal, _)| signal.as_raw()));
        Ok(LockedHost { host: self.clone(), lock, signals: signals.map_err(StoreError::Signals)? })
    }
}

/// The cgroups of a host, read when first asked for.
#[derive(Debug)]
pub struct Cgroups<'a> {
    host: &'a Host,
    world: Option<World>,
}

impl Cgroups<'_> {
    /// The cgroups that a limit with a selector is to have beside its members, as far as cgroups alone tell.
    pub fn outside(&mut self, scope: &Scope, members: &[String]) -> Vec<String> {
        let mut all = self.members(scope, None);
        all.retain(|path| !members.contains(path));
        all
    }

    /// The cgroups of a limit with a selector ([`members_in`]).
    fn members(&mut self, scope: &Scope, is: Option<&Present>) -> Vec<String> {
        let Scope::Select(selector) = scope else { return Vec::new() };
        let hierarchy = self.host.hierarchy();
        let world = self.world.get_or_insert_with(|| {
            let (paths, whole) = hierarchy.all_below("");
            let open = |path: String| Some((path.clone(), hierarchy.open(&path).ok()?.id()));
            let cgroups = paths.into_iter().filter_map(open).collect();
            World { cgroups, has_more: !whole, ..World::default() }
        });
        members_in(world, selector, is.map(|is| &is.members[..]))
    }
}

/// The cgroups that a limit with a selector is to have. It keeps those that it `has` where cgroups alone do
/// not say which, or where there are more than were looked at.
fn members_in(world: &World, selector: &Selector, has: Option<&[String]>) -> Vec<String> {
    if !select::is_by_cgroups(selector) || world.has_more && has.is_some() {
        return has.unwrap_or_default().to_vec();
    }
    select::members(world, selector)
}

/// A pinned limit as a plan sees it.
pub fn present(pinned: &PinnedLimit) -> Present {
    let state = match &pinned.scope {
        None if pinned.is_anew => State::Anew,
        None => State::ScopeGone,
        Some(_) if !pinned.unhooked.is_empty() => State::Detached,
        Some(Scope::Select(_)) if pinned.members.iter().all(|member| member.path.is_none()) => {
            State::NoMembers
        }
        Some(_) if pinned.unkept.is_some() => State::NoFq,
        Some(_) => State::InForce,
    };
    let nowhere = || Scope::Cgroup(String::new());
    let gone = pinned.members.iter().filter(|member| member.path.is_none() && !member.has_sockets);
    Present {
        members: pinned.members.iter().filter_map(|member| member.path.clone()).collect(),
        gone: gone.map(|member| member.joined_as.clone()).collect(),
        name: pinned.name.clone(),
        scope: pinned.scope.clone().or_else(|| pinned.installed_on.clone()).unwrap_or_else(nowhere),
        state,
        options: pinned.options(),
        parent: pinned.parent.clone(),
        other_build: pinned.other_build.clone(),
    }
}

/// A limit that cannot be read, of which a plan knows its place at most.
fn present_unreadable(limit: &Unreadable) -> Present {
    Present {
        members: limit.members.clone(),
        gone: Vec::new(),
        name: limit.name.clone(),
        scope: limit.scope.clone().unwrap_or_else(|| Scope::Cgroup("?".to_owned())),
        state: State::Broken,
        options: limit.options().unwrap_or_default(),
        parent: limit.parent.clone(),
        other_build: limit.intent.as_ref().map(|intent| intent.build.clone()),
    }
}

impl LockedHost {
    /// The store, which puts a limit on with its members.
    fn store_with(&self, limit: &Wanted) -> Store {
        let mut store = self.host.store.clone();
        store.begin_with(&limit.name, &limit.members);
        store
    }

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

    /// Makes sure, before anything changes, that what this process leaves, should it be killed, can be found
    /// again: room in the journal for each of its steps is reserved. Who only takes limits off needs none.
    ///
    /// # Errors
    /// [`StoreError::NoJournal`].
    pub fn reserve_journal(&self) -> Result<(), StoreError> {
        self.lock.reserve_journal()
    }

    /// Problems that did not stop the command, a sentence each.
    pub fn problems(&self) -> Vec<String> {
        self.lock.problems()
    }

    /// Lets other writers in. If no limit is left, nothing of Tidegate is left on the host.
    pub fn close(self) {
        self.host.store.close(self.lock);
    }

    /// The same for a process that goes on: signals that have come meanwhile are delivered.
    pub fn close_and_go_on(self) {
        self.host.store.close(self.lock);
        self.signals.restore();
    }
}

impl LockedHost {
    /// Remembers which limits of a spec wait, and that its others do not. Those of other specs are forgotten
    /// that `prune` names.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn note_waiting(
        &mut self,
        spec: &Spec,
        waiting: &[Waits],
        prune: impl Fn(&str) -> bool,
    ) -> Result<(), StoreError> {
        let store = &self.host.store;
        for Waiting { name, .. } in store.waiting() {
            if prune(&name) || spec.limits.iter().any(|limit| limit.name == name) {
                store.wait_no_more(&self.lock, &name)?;
            }
        }
        waiting.iter().try_for_each(|Waits { name, scope, .. }| {
            let limit = spec.limits.iter().find(|limit| limit.name == *name);
            let required = limit.is_some_and(|limit| limit.follow.required);
            let (name, scope) = (name.clone(), scope.clone());
            store.wait(&self.lock, &Waiting { name, scope, required })
        })
    }

    /// A limit is not waited for any more. True if it was.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn forget_waiting(&mut self, name: &str) -> Result<bool, StoreError> {
        self.host.store.wait_no_more(&self.lock, name)
    }
}

impl Backend for LockedHost {
    type Error = StoreError;

    fn add(&mut self, limit: &Wanted) -> Result<(), StoreError> {
        let Wanted { name, scope, options, parent, .. } = limit;
        let store = self.store_with(limit);
        store.install(&self.lock, &self.host.hierarchy, name, scope, options, parent.as_deref())
    }

    fn replace(&mut self, limit: &Wanted) -> Result<(), StoreError> {
        let Wanted { name, scope, options, parent, .. } = limit;
        let store = self.store_with(limit);
        store.replace(&self.lock, &self.host.hierarchy, name, scope, options, parent.as_deref())?;
        self.host.store.stays(name);
        Ok(())
    }

    fn set_members(&mut self, name: &str, cgroups: &[String]) -> Result<(), StoreError> {
        let Host { hierarchy, store, .. } = &self.host;
        // The store opens each member's links by itself.
        let before = store.member_paths(hierarchy, name);
        let done = store.set_members(&self.lock, hierarchy, name, cgroups);
        if done.is_err() {
            let _ = store.set_members(&self.lock, hierarchy, name, &before);
        }
        done
    }

    fn leaving(&mut self, names: BTreeSet<String>) {
        self.host.store.leaving(names);
    }

    fn make_way(&mut self, name: &str) -> Result<(), StoreError> {
        self.host.store.set_aside(&self.lock, name)
    }

    fn finish(&mut self) {
        self.host.store.forget_all(&self.lock);
    }

    fn stopped(&mut self) -> Option<StoreError> {
        // A child that ends is none of these.
        let received = self.signals.wait(Duration::ZERO).ok()??.signal;
        let stopping = STOPPING.into_iter().find(|(signal, _)| signal.as_raw() == received);
        stopping.map(|(_, name)| StoreError::Stopped { signal: received, name })
    }

    fn change(&mut self, name: &str, options: &LimitOptions) -> Result<(), StoreError> {
        self.host.store.change(&self.lock, &self.host.hierarchy, name, options)
    }

    fn take_over(&mut self, name: &str) -> Result<(), StoreError> {
        self.host.store.take_over(&self.lock, &self.host.hierarchy, name)
    }

    fn remove_unreadable(&mut self, name: &str) -> Result<(), StoreError> {
        let Host { hierarchy, store, .. } = &self.host;
        match store.open(hierarchy, name) {
            Err(newer @ StoreError::Newer { .. }) => Err(newer),
            _ => self.remove(name),
        }
    }

    fn remove(&mut self, name: &str) -> Result<(), StoreError> {
        self.host.store.remove(&self.lock, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_keeps_its_cgroups_where_there_are_too_many_to_look_at() {
        let selector: Selector = "cgroup:web/*".parse().unwrap();
        let has = ["web/deep".to_owned()];
        let cgroups = ["web", "web/new"].map(|path| (path.to_owned(), 1)).into();
        let mut world = World { cgroups, ..World::default() };
        // All were looked at: `web/deep` is gone.
        assert_eq!(members_in(&world, &selector, Some(&has)), ["web/new"]);
        world.has_more = true;
        assert_eq!(members_in(&world, &selector, Some(&has)), has);
        // A new limit has at least those that were seen.
        assert_eq!(members_in(&world, &selector, None), ["web/new"]);
    }
}
