//! What every limit does, look by look: for a screen that is drawn again and again.

use std::{collections::BTreeMap, time::SystemTime};

use tidegate_sys::clock::monotonic_ns;

use crate::{
    host::Host,
    live::{LiveError, Origin, live},
    status::{LimitSample, LimitStatus},
};

/// A limit at one look, and what it did since the look before.
#[derive(Debug, Clone)]
pub struct Watched {
    pub status: LimitStatus,
    /// Who keeps it on.
    pub origin: Origin,
    /// What it did; from its beginning if it has come since the look before.
    pub sample: LimitSample,
}

#[derive(Debug)]
pub struct Look {
    /// The limits, sorted by name.
    pub limits: Vec<Watched>,
    /// Why some limits of others could not be read.
    pub unread: Vec<LiveError>,
}

/// Looks at all limits of a host.
#[derive(Debug)]
pub struct Watch {
    host: Host,
    earlier: BTreeMap<(String, u64), LimitStatus>,
    earlier_ns: u64,
}

impl Watch {
    /// The first look.
    ///
    /// # Errors
    /// [`LiveError`].
    pub fn start(host: Host) -> Result<Watch, LiveError> {
        let mut watch = Watch { host, earlier: BTreeMap::new(), earlier_ns: monotonic_ns() };
        watch.look()?;
        Ok(watch)
    }

    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Looks again.
    ///
    /// # Errors
    /// [`LiveError`]; the next look counts from the last that had none.
    pub fn look(&mut self) -> Result<Look, LiveError> {
        let limits = live(&self.host, |_| true)?;
        let now_ns = monotonic_ns();
        let interval_ns = now_ns.saturating_sub(self.earlier_ns);
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let unix_ns = u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX);
        let key = |status: &LimitStatus, place| (status.name.clone(), place);
        let mut now = BTreeMap::new();
        let mut watched = Vec::with_capacity(limits.list.len());
        for limit in limits.list {
            let key = key(&limit.status, limit.place_ids.first().copied().unwrap_or_default());
            let earlier = self.earlier.get(&key);
            let sample = LimitSample::between(earlier, &limit.status, interval_ns, unix_ns);
            now.insert(key, limit.status.clone());
            watched.push(Watched { status: limit.status, origin: limit.origin, sample });
        }
        watched.sort_by(|a, b| a.status.name.cmp(&b.status.name));
        (self.earlier, self.earlier_ns) = (now, now_ns);
        Ok(Look { limits: watched, unread: limits.unread })
    }
}
