//! The backend of this host: limits that are pinned, opened for each look, so that one that was taken off and
//! put on again is followed.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tidegate_core::{Direction, Nanos, Rate};
use tidegate_host::fleet::GroupSpec;
use tidegate_sys::{
    limit::{Lease, LimitError},
    store::{RateSet, StoreError},
};

use super::backend::{Done, GroupBackend, Place, Sample};
use tidegate_host::{host::Host, status::LimitStatus};

/// How long who stands down waits for another writer, in all; less than the `TimeoutStopSec` of the unit.
const STAND_DOWN_PATIENCE: Duration = Duration::from_secs(8);

/// Limits of a host.
#[derive(Debug)]
pub struct LocalBackend {
    host: Host,
    /// How long another writer such as `tidegate apply` is waited for. A daemon does not wait: its loop
    /// serves all groups, and a watchdog looks at it.
    patience: Duration,
    /// What had arrived and what was slowed down at the last look, in bytes.
    counted: BTreeMap<Place, (u64, u64)>,
}

/// Why a limit could not be read or set.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Limit(#[from] LimitError),
}

impl LocalBackend {
    /// Those of a host.
    pub fn new(host: Host) -> LocalBackend {
        LocalBackend { host, patience: Duration::ZERO, counted: BTreeMap::new() }
    }

    /// Has the limits of groups keep the host's reserved share, for when no daemon runs that would
    /// take the rest back. Other writers are waited for. What could not be set.
    pub fn stand_down(&mut self, groups: &[(GroupSpec, Vec<Rate>)]) -> Vec<(String, LocalError)> {
        let mut failed = Vec::new();
        let deadline = Instant::now() + STAND_DOWN_PATIENCE;
        for (group, ceilings) in groups {
            let alone = group.alone_bit_s() / group.members.len().max(1) as u64;
            for (limit, ceiling) in group.members.iter().zip(ceilings) {
                let place = Place { limit: limit.clone(), direction: group.direction };
                let rate = Rate::from_bit_s(alone).unwrap_or(*ceiling).min(*ceiling);
                self.patience = deadline.saturating_duration_since(Instant::now());
                let set = self.put(&place, rate, None).and_then(|_| self.leave(&place));
                if let Err(e) = set {
                    failed.push((limit.clone(), e));
                }
            }
        }
        self.patience = Duration::ZERO;
        failed
    }
}

impl LocalBackend {
    /// Leases are by `CLOCK_BOOTTIME`, which the daemon's clock is.
    fn put(&self, place: &Place, rate: Rate, lease: Option<Lease>) -> Result<Done, LocalError> {
        let (hierarchy, store) = (self.host.hierarchy(), self.host.store());
        let (limit, direction) = (&place.limit, place.direction);
        match store.set_rate(hierarchy, limit, direction, rate, lease, self.patience) {
            Ok(RateSet::Set) => Ok(Done::Set),
            Ok(RateSet::Nothing) | Err(StoreError::Missing(_)) => Ok(Done::Gone),
            Err(e) => Err(e.into()),
        }
    }
}

impl GroupBackend for LocalBackend {
    type Error = LocalError;

    fn measure(&mut self, _now: Nanos, place: &Place) -> Result<Option<Sample>, LocalError> {
        let Some(pinned) = self.host.find(&place.limit)?.filter(|limit| limit.scope.is_some())
        else {
            self.counted.remove(place);
            return Ok(None);
        };
        let status = LimitStatus::read(&pinned)?;
        let until = pinned.limit.until(place.direction);
        let direction = match place.direction {
            Direction::Egress => status.egress,
            Direction::Ingress => status.ingress,
        };
        let Some(direction) = direction else {
            self.counted.remove(place);
            return Ok(None);
        };
        let measured = pinned.maps().measure(place.direction)?;
        let (arrived, slowed) = (measured.arrived.bytes, measured.slowed.bytes);
        let (arrived_before, slowed_before) =
            self.counted.insert(place.clone(), (arrived, slowed)).unwrap_or((arrived, slowed));
        let fair = direction.fair.filter(|fair| fair.flows > 0);
        Ok(Some(Sample {
            // One that was put on anew counts from zero.
            arrived_bytes: arrived.saturating_sub(arrived_before),
            slowed_bytes: slowed.saturating_sub(slowed_before),
            flows: measured.flows,
            flow_count: measured.flow_count,
            flow_bit_s: fair.map(|fair| fair.share_bit_s),
            rate_bit_s: direction.rate_bit_s,
            until: Some(until).filter(|until| until.0 > 0),
        }))
    }

    fn set_rate(
        &mut self,
        place: &Place,
        rate: Rate,
        lease: Option<Lease>,
    ) -> Result<Done, LocalError> {
        match self.put(place, rate, lease) {
            Err(LocalError::Store(StoreError::Busy(_))) => Ok(Done::Busy),
            done => done,
        }
    }

    fn set_drop(&mut self, place: &Place, probability: f64) -> Result<Done, LocalError> {
        let Some(pinned) = self.host.find(&place.limit)?.filter(|limit| limit.scope.is_some())
        else {
            return Ok(Done::Gone);
        };
        let set = pinned.maps().set_drop(place.direction, probability)?;
        Ok(if set { Done::Set } else { Done::Cannot })
    }

    fn leave(&mut self, place: &Place) -> Result<(), LocalError> {
        match self.host.find(&place.limit)? {
            Some(pinned) => Ok(pinned.maps().leave_group(place.direction)?),
            None => Ok(()),
        }
    }
}
