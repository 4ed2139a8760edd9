//! A policer whose ingress goes from tc to XDP, or back, while it is in force.
//!
//! Both programs have the limit's maps. The new one comes first, then the settings that name it, then the
//! old one goes: for that moment both charge what comes in, and nothing is unlimited or stopped. If the
//! process dies meanwhile both stay, and the next writer takes the one off that the settings do not name.

use std::{fs, path::Path};

use libbpf_rs::MapHandle;
use tidegate_core::Scope;

use super::{
    PinnedLimit, Store, StoreError, limit_error,
    pins::{detach_link, pin_fd, pin_hooks},
};
use crate::{
    cgroup::Hierarchy,
    device::{self, Filters, Hooked, PROGRAM_PINS, Target, XDP_PIN},
    intf,
    limit::{LimitError, LimitOptions, settings::Settings},
    schemes::{self, LINKS, police},
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
        let links = schemes::of(limit.scheme()).links(limit);
        if links.contains(&XDP_PIN) { At::Xdp } else { At::Tc }
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
        limit: &intf::Entry,
        options: &LimitOptions,
    ) -> Result<(), StoreError> {
        let refused = || limit_error(&pinned.name);
        let (dir, to) = (self.root.join(&pinned.name), At::of(limit));
        let target = Target::find(scope).map_err(|e| refused()(LimitError::Fq(e)))?;
        let (mut hooked, xdp) = match to {
            At::Xdp => (Hooked::default(), Some(police::xdp::attach(&target, &pinned.maps))),
            At::Tc => (police::attach_ingress(&target, &pinned.maps).map_err(refused())?, None),
        };
        let xdp = xdp.transpose().map_err(refused())?;
        let put = pin_hooks(hooked.filters.as_ref(), &hooked.links, &dir)
            .and_then(|()| xdp.as_ref().map_or(Ok(()), |link| pin_fd(link, &dir, XDP_PIN)))
            .and_then(|()| pinned.maps.set(hierarchy, None, limit, options).map_err(refused()));
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
        let settings = map.and_then(|map| Settings::read(&map, 0).ok());
        if let Some(Settings { limit, .. }) = settings {
            let _ = At::of(&limit).other().take_off(dir, &limit);
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::{
        Scheme,
        police::{Hook, Policy},
        queue_options::VirtualQueueOptions,
    };

    use super::*;
    use crate::{
        bpffs::PrivateBpffs,
        limit::LimitOptions,
        net::NetNs,
        xdp::{XdpMode, on_device},
    };

    /// Wherever a writer dies that moves a limit, the next one leaves the program that the settings name.
    #[test]
    fn root_police_xdp_what_a_dead_writer_leaves_is_put_right() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_police_xdp_what_a_dead_writer_leaves_is_put_right: needs root");
            return;
        }
        let netns = NetNs::create(&format!("tidegate-hook-{}", std::process::id())).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
        let check = || {
            let (store, hierarchy) =
                (Store::at(bpffs.path().join("t")), Hierarchy::find().unwrap());
            let scope = Scope::Dev("lo".to_owned());
            let target = Target::find(&scope).unwrap();
            let options = |hook| LimitOptions {
                ingress: Some(VirtualQueueOptions::new("1gbit".parse().unwrap())),
                scheme: Scheme::Police,
                police: Policy { hook, ..Policy::default() },
                ..LimitOptions::default()
            };
            let dir = store.root.join("a");
            let is_at = |at: At| {
                let there = [At::Tc, At::Xdp].map(|at| at.is_pinned(&dir));
                assert_eq!(there, [at == At::Tc, at == At::Xdp]);
                assert_eq!(on_device(target.ifindex).is_some(), at == At::Xdp);
                let pinned = store.open(&hierarchy, "a").unwrap();
                assert!(pinned.unhooked.is_empty(), "{:?}", pinned.unhooked);
                // The loopback device has no driver that could.
                assert_eq!(pinned.xdp_mode, (at == At::Xdp).then_some(XdpMode::Generic));
            };
            let lock = store.lock().unwrap();
            store.install(&lock, &hierarchy, "a", &scope, &options(Hook::Auto), None).unwrap();
            is_at(At::Tc);
            let come = || {
                let pinned = store.open(&hierarchy, "a").unwrap();
                let link = police::xdp::attach(&target, &pinned.maps).unwrap();
                pin_fd(link, &dir, XDP_PIN).unwrap();
                assert!(on_device(target.ifindex).is_some());
                pinned
            };
            come();
            drop(lock);
            let lock = store.lock().unwrap();
            is_at(At::Tc);
            let pinned = come();
            let limit = target.encode(&options(Hook::Xdp)).unwrap();
            pinned.maps.set(&hierarchy, None, &limit, &options(Hook::Xdp)).unwrap();
            drop(lock);
            let lock = store.lock().unwrap();
            is_at(At::Xdp);
            store.change(&lock, &hierarchy, "a", &options(Hook::Auto)).unwrap();
            is_at(At::Tc);
            store.change(&lock, &hierarchy, "a", &options(Hook::Xdp)).unwrap();
            is_at(At::Xdp);
            store.remove(&lock, "a").unwrap();
            assert!(on_device(target.ifindex).is_none());
        };
        netns.run(check).unwrap();
    }
}
