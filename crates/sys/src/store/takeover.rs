//! A limit that goes on with the programs of this build and the maps that it has.
//!
//! Each program takes the place of its predecessor in one step, under the same link or filter: a packet meets
//! one or the other, and state and counters go on. The builds share a layout, or the limit could not be
//! read, so programs of both work together. The intent names the new build when all of them are there: if the
//! process dies before, the next writer does it again.

use std::{os::fd::AsFd, path::Path};

use tidegate_core::Scope;

use super::{
    Intent, PinnedLimit, Store, StoreError, StoreLock,
    journal::{Deed, Step},
    limit_error, members,
    pins::update,
    pool_names::{build_of_pool, file_name, is_slots, sign_pool},
};
use crate::{
    BUILD,
    cgroup::Hierarchy,
    device::{self, in_namespace},
    intf,
    limit::Adopt,
    schemes::{self, Successor, police::pool::MapPool},
};

impl Store {
    /// Has a limit in force run the programs of this build.
    ///
    /// # Errors
    /// [`StoreError`]; the limit is in force all the same.
    pub fn take_over(
        &self,
        lock: &StoreLock,
        hierarchy: &Hierarchy,
        name: &str,
    ) -> Result<(), StoreError> {
        // Nothing is made that could be left behind.
        lock.journal.begin(Step { objects: Vec::new(), ..self.removal(Deed::TakeOver, name) })?;
        let done = self.open(hierarchy, name).and_then(|p| self.exchange_programs(hierarchy, &p));
        lock.journal.end();
        done
    }

    /// The same of one whose writer has died meanwhile, where its device is.
    pub(super) fn take_over_again(&self, name: &str) -> Result<(), StoreError> {
        let again = || {
            let hierarchy = Hierarchy::find().map_err(|e| limit_error(name)(e.into()))?;
            self.exchange_programs(&hierarchy, &self.open(&hierarchy, name)?)
        };
        match self.namespace_of(name) {
            Some(inode) => in_namespace(inode, again).unwrap_or(Ok(())),
            None => again(),
        }
    }

    fn exchange_programs(
        &self,
        hierarchy: &Hierarchy,
        pinned: &PinnedLimit,
    ) -> Result<(), StoreError> {
        let PinnedLimit { name, limit, scope, maps, .. } = pinned;
        let refused = || limit_error(name);
        let dir = self.root.join(name);
        if pinned.other_build.is_none() {
            return Ok(());
        }
        let Some(scope) = scope else {
            let scope = pinned.installed_on.clone();
            let scope = scope.unwrap_or_else(|| Scope::Cgroup("?".to_owned()));
            return Err(StoreError::ScopeGone { name: name.clone(), scope });
        };
        if let Some((pool, _)) = self.place_of(name).filter(|(pool, _)| is_slots(pool)) {
            self.take_over_slots(hierarchy, &pool)?;
        } else if let Some((pool, _)) = self.place_of(name) {
            self.take_over_pool(&pool, limit)?;
        } else {
            let scheme = schemes::of(limit.scheme());
            for successor in scheme.reload(&dir, limit, maps).map_err(refused())? {
                match scope {
                    Scope::Select(_) => exchange_in_members(&dir, pinned, &successor)?,
                    _ => exchange(&successor, limit)?,
                }
            }
            for cgroup in pinned.cgroups(hierarchy) {
                maps.adopt(hierarchy, &cgroup, Adopt::Take).map_err(refused())?;
            }
        }
        Intent::sign(&dir, &pinned.asked)
    }

    /// Has a pool run the programs of this build, for all limits in it.
    pub(super) fn take_over_pool(&self, dir: &Path, limit: &intf::Limit) -> Result<(), StoreError> {
        if build_of_pool(dir).is_some_and(|build| build == BUILD) {
            return Ok(());
        }
        let is_port = limit.flags & intf::FLAG_PORT != 0;
        let name = file_name(dir);
        for successor in MapPool::reload(dir, is_port).map_err(limit_error(&name))? {
            exchange(&successor, limit)?;
        }
        sign_pool(dir)
    }

    /// Whose programs a limit runs, if they are those of another build.
    pub(super) fn other_build(&self, name: &str, own: &str) -> Option<String> {
        let pool = self.place_of(name).and_then(|(pool, _)| build_of_pool(&pool));
        Some(pool.unwrap_or_else(|| own.to_owned())).filter(|build| build != BUILD)
    }
}

/// Has a program run in all cgroups of a limit with a selector, and in those that will join.
fn exchange_in_members(
    dir: &Path,
    pinned: &PinnedLimit,
    successor: &Successor,
) -> Result<(), StoreError> {
    let link = successor.pin.file_name().unwrap_or_default();
    members::pin_successor(dir, link, successor.program.as_fd())?;
    for member in pinned.members.iter().filter(|member| member.path.is_some()) {
        update(&members::dir_of(dir, member.id).join(link), successor.program.as_fd())?;
    }
    Ok(())
}

/// Has a program run in the place of the one that does.
fn exchange(successor: &Successor, limit: &intf::Limit) -> Result<(), StoreError> {
    let Successor { pin, program, redirected_to } = successor;
    if pin.exists() {
        return update(pin, program.as_fd());
    }
    let name = pin.file_name().unwrap_or_default().to_string_lossy();
    let dir = pin.parent().unwrap_or(pin);
    let done = device::replace_filter(dir, limit, &name, program.as_fd(), *redirected_to);
    done.map(drop).map_err(limit_error(&name))
}
