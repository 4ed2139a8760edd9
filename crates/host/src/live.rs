//! Every limit that holds now: those pinned in the store, and those that only a process holds, as `tidegate
//! run` does. A limit of another store is found too, without its name.

use std::collections::BTreeSet;

use serde::Serialize;
use tidegate_core::{Scope, scope::shown};
use tidegate_sys::{
    attached::{self, LimitId},
    limit::LimitError,
    store::StoreError,
};

use crate::{
    host::Host,
    plan::State,
    run::runner_of,
    status::{LimitStatus, hold_ceilings},
};

/// Who keeps a limit on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "held_by", rename_all = "snake_case")]
pub enum Origin {
    /// It is pinned in the store.
    Pinned,
    /// A `tidegate run` that lives.
    Run { runner_pid: u32 },
    /// Something else: another store, or another program that uses Tidegate.
    Elsewhere,
}

/// A limit, and who keeps it on.
#[derive(Debug, Clone)]
pub struct Live {
    pub status: LimitStatus,
    /// Who keeps it on.
    pub origin: Origin,
    /// The ids of its cgroups; of a device the inode of its network namespace.
    pub place_ids: Vec<u64>,
    /// The number of its device there; 0 of cgroups.
    pub ifindex: u32,
    /// The kernel's id of the map of its settings; `None` if it could not be asked.
    pub id: Option<LimitId>,
}

/// Why limits could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("a limit on cgroup `{}` that something else holds: {source}", shown(cgroup))]
    Elsewhere { cgroup: String, source: LimitError },
}

/// The limits of a host.
#[derive(Debug, Default)]
pub struct Limits {
    pub list: Vec<Live>,
    /// Of limits that something else holds, why they could not: another version has put them on.
    pub unread: Vec<LiveError>,
}

/// The limits of a host: of cgroups those whose id passes, and all of devices.
///
/// # Errors
/// [`LiveError`] for the first of the store that cannot be read.
pub fn live(host: &Host, wanted: impl Fn(u64) -> bool) -> Result<Limits, LiveError> {
    let mut limits = Limits::default();
    let (mut known, mut pinned_limits) = (BTreeSet::new(), Vec::new());
    // Also those that are not asked for: the ceiling of one inside them may be theirs.
    let listing = host.store().list(host.hierarchy())?;
    for broken in &listing.unreadable {
        known.extend(broken.id);
        let own = match &broken.scope {
            Some(Scope::Cgroup(path)) => Some(path),
            _ => None,
        };
        let groups = own.into_iter().chain(&broken.members);
        let groups = groups.filter_map(|path| host.hierarchy().open(path).ok());
        let place_ids: Vec<_> = groups.map(|group| group.id()).collect();
        let (status, id) = (LimitStatus::broken(broken), broken.id);
        let asked = place_ids.is_empty() || place_ids.iter().copied().any(&wanted);
        let live = Live { status, origin: Origin::Pinned, place_ids, ifindex: 0, id };
        pinned_limits.push((live, asked));
    }
    for pinned in listing.limits {
        let id = pinned.maps().id();
        known.extend(id);
        let status = LimitStatus::read_or_broken(&pinned);
        let own = Some(pinned.limit.cgroup_id).filter(|id| *id != 0);
        let members = pinned.members.iter().map(|member| member.id);
        let place_ids: Vec<_> = own.into_iter().chain(members).collect();
        let ifindex = pinned.limit.ifindex;
        let asked = ifindex != 0 || place_ids.iter().copied().any(&wanted);
        let live = Live { status, origin: Origin::Pinned, place_ids, ifindex, id };
        pinned_limits.push((live, asked));
    }
    hold_ceilings(pinned_limits.iter_mut().map(|(limit, _)| &mut limit.status));
    limits.list.extend(pinned_limits.into_iter().filter(|(_, asked)| *asked).map(|(l, _)| l));
    for found in attached::attached(&wanted) {
        if known.contains(&found.id) {
            continue;
        }
        let Some(path) = host.hierarchy().path_of(found.cgroup_id) else { continue };
        let origin = match runner_of(&path) {
            Some(runner_pid) => Origin::Run { runner_pid },
            None => Origin::Elsewhere,
        };
        let last = path.rsplit('/').next().unwrap_or_default();
        let name = if last.is_empty() { "/" } else { last }.to_owned();
        let scope = Scope::Cgroup(path.clone());
        let status = found.maps.options().and_then(|options| {
            LimitStatus::of_maps(name, scope, State::InForce, &found.maps, &options)
        });
        match status {
            Ok(status) => limits.list.push(Live {
                status,
                origin,
                place_ids: vec![found.cgroup_id],
                ifindex: 0,
                id: Some(found.id),
            }),
            Err(source) => limits.unread.push(LiveError::Elsewhere { cgroup: path, source }),
        }
    }
    Ok(limits)
}
