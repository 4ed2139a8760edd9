//! A policer whose ingress goes from tc to XDP, or back, while it is in force.
//!
//! Both programs have the limit's maps. The new one comes first, then the settings that name it, then the
//! old one goes: for that moment both charge what comes in, and nothing is unlimited or stopped. If the
//! process dies meanwhile both stay, and the next writer takes the one off that the settings do not name.

use std::{fs, path::Path};

use libbpf_rs::MapHandle;
use tidegate_core::Scope;

use super::{
    LINKS, PinnedLimit, Store, StoreError, limit_error,
    pins::{detach_link, pin_hooks, pin_xdp},
};
use crate::{
    cgroup::Hierarchy,
    device::{self, Filters, Hooked, PROGRAM_PINS, Target, XDP_PIN},
    intf,
    limit::{LimitError, lookup},
    police,
};

/// What may be pinned of an ingress at tc: its link, or the program of its filter.
const AT_TC: [&str; 2] = [LINKS[1], PROGRAM_PINS[1]];

/// Where the program of the ingress is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Tc,
    Xdp,
}

impl At {
    fn of(limit: &intf::Limit) -> At {
        if limit.flags & intf::FLAG_XDP != 0 { At::Xdp } else { At::Tc }
    }

    fn other(self) -> At {
        if self == At::Tc { At::Xdp } else { At::Tc }
    }

    fn pins(self) -> &'static [&'static str] {
        if self == At::Tc { &AT_TC } else { &[XDP_PIN] }
    }

    fn is_pinned(self, dir: &Path) -> bool {
        self.pins().iter().any(|pin| dir.join(pin).exists())
    }

    /// Takes it off, with its pins.
    fn take_off(self, dir: &Path, limit: &intf::Limit) -> Result<(), StoreError> {
        device::remove_pinned_filters_of(dir, limit, self.pins());
        for pin in self.pins() {
            if !PROGRAM_PINS.contains(pin) {
                detach_link(dir, pin)?;
            }
            let _ = fs::remove_file(dir.join(pin));
        }
        Ok(())
    }
}

impl Store {
    /// Changes a limit whose ingress program goes elsewhere.
    pub(super) fn change_hook(
        &self,
        hierarchy: &Hierarchy,
        pinned: &PinnedLimit,
        scope: &Scope,
        limit: &intf::Limit,
    ) -> Result<(), StoreError> {
        let refused = || limit_error(&pinned.name);
        let (dir, to) = (self.root.join(&pinned.name), At::of(limit));
        let target = Target::find(scope).map_err(|e| refused()(LimitError::Fq(e)))?;
        let (mut hooked, xdp) = match to {
            At::Xdp => (Hooked::default(), Some(police::xdp::attach(&target, &pinned.maps))),
            At::Tc => (police::attach_ingress(&target, &pinned.maps).map_err(refused())?, None),
        };
        let xdp = xdp.transpose().map_err(refused())?;
        let put = pin_hooks(hooked.filters.as_ref(), &mut hooked.links, &dir)
            .and_then(|()| xdp.as_ref().map_or(Ok(()), |link| pin_xdp(link, &dir)))
            .and_then(|()| pinned.maps.set(hierarchy, None, limit).map_err(refused()));
        if let Err(e) = put {
            let _ = to.take_off(&dir, limit);
            return Err(e);
        }
        hooked.filters.iter_mut().for_each(Filters::keep);
        to.other().take_off(&dir, limit)
    }

    /// Of a limit that a writer which died has left at both places: takes it off the one that its settings do
    /// not name.
    pub(super) fn sweep_hook(&self, dir: &Path) {
        if !At::Xdp.is_pinned(dir) || !At::Tc.is_pinned(dir) {
            return;
        }
        let map = MapHandle::from_pinned_path(dir.join("limit")).ok();
        let limit = map.and_then(|map| lookup::<intf::Limit>(&map, "limit", 0).ok());
        if let Some(limit) = limit {
            let _ = At::of(&limit).other().take_off(dir, &limit);
        }
    }
}
