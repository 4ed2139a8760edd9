//! The rate of a pinned limit, for who sets it many times a second.

use std::time::{Duration, Instant};

use tidegate_core::{Direction, Rate};

use super::{LOCK_POLL, Store, StoreError, limit_error};
use crate::{
    cgroup::Hierarchy,
    limit::Lease,
    schemes::{self, Pinning},
};

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RateSet {
    /// It is in force.
    Set,
    /// The cgroup or device is gone, or the direction is free: nothing is limited.
    Nothing,
}

impl Store {
    /// Changes the rate of one direction of a limit, for ever or until the end of a lease; other writers are
    /// kept out meanwhile, and waited for no longer than `patience`.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Busy`], or what its maps say; the earlier rate is in force.
    pub fn set_rate(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        direction: Direction,
        rate: Rate,
        lease: Option<Lease>,
        patience: Duration,
    ) -> Result<RateSet, StoreError> {
        if !self.root.join(name).is_dir() {
            return Err(StoreError::Missing(name.to_owned()));
        }
        let deadline = Instant::now() + patience;
        let _lock = loop {
            match self.try_lock()? {
                Some(dir) => break dir,
                None if Instant::now() >= deadline => {
                    return Err(StoreError::Busy(self.root.display().to_string()));
                }
                None => std::thread::sleep(LOCK_POLL.min(patience)),
            }
        };
        let pinned = self.open(hierarchy, name)?;
        if pinned.scope.is_none() {
            return Ok(RateSet::Nothing);
        }
        let scheme = schemes::of(pinned.limit.scheme());
        let lease = lease.filter(|_| scheme.ends_leases());
        let earlier = pinned.maps.settings().map_err(limit_error(name))?;
        let set = pinned.maps.set_rate(&pinned.asked, direction, rate, lease);
        let set = set.map_err(limit_error(name))?;
        let limit = pinned.maps.limit().map_err(limit_error(name))?;
        if limit != pinned.limit {
            match scheme.pinning() {
                Pinning::Tree => {
                    self.change_htb(hierarchy, &pinned, &limit, &pinned.asked, earlier)?;
                }
                Pinning::Own | Pinning::Shared => {
                    let done = pinned.maps.change_beside(&limit);
                    // Else the same rate would be found in force at the next attempt.
                    let done = done.inspect_err(|_| drop(pinned.maps.put_back(&earlier)));
                    done.map_err(limit_error(name))?;
                }
            }
        }
        Ok(if set { RateSet::Set } else { RateSet::Nothing })
    }
}

#[cfg(test)]
mod tests;
