//! Limits whose pins are there and whose maps, or intent, cannot be read: another version of Tidegate has put
//! them on, or somebody has taken a pin away. Such a limit is listed with the reason, it disturbs no other
//! one, and it comes off whole: what it has put on devices is found in the kernel ([`crate::remains`]) by the
//! programs that are pinned, and its sockets by its map of them, of which only the first members are read.

use std::{
    collections::BTreeSet,
    fs, io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
};

use libbpf_rs::{Iter, MapCore, MapHandle};
use tidegate_core::{Scope, class::MAX_DEPTH, htb::ROOT_SLOT};

use super::{
    CGROUP, DEV, Intent, PARENT, PORT, PinnedLimit, Store, StoreError,
    around::{is_held, known_programs},
    cgroup_in, check_name,
    htb::device_in,
    members::{SELECT, half_members, paths_in, selector_in},
    name_in,
    pins::{detach_links, pins_in, programs_in},
    pool_names::{is_slots, slot_in},
};
use crate::{
    attached::LimitId,
    bpf::{load_error, load_skel, open_skel},
    cgroup::Hierarchy,
    device::{CLSACT_MARK, is_in_this_namespace},
    intf,
    limit::slot_pool::SlotPool,
    limit::{LimitError, LimitOptions, settings},
    net::NetNs,
    process::{in_network_namespace, network_namespaces},
    remains::{self, Hooked, OnDevice},
    schemes::{
        htb::{self, ROOT, SLOT},
        police::pool::MapPool,
    },
    skel,
};

/// Sockets of versions that set receive windows have at least so many bytes in the map; of others at most 24.
const WITH_WINDOW_BYTES: u32 = 48;

/// The limits of a store.
#[derive(Debug, Default)]
pub struct Listing {
    /// Those that can be read, sorted by name.
    pub limits: Vec<PinnedLimit>,
    /// The others.
    pub unreadable: Vec<Unreadable>,
}

/// A limit that is pinned and cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    pub name: String,
    /// Where it was put on, as far as its pins tell.
    pub scope: Option<Scope>,
    /// With a selector: the cgroups that joined it.
    pub members: Vec<String>,
    /// The name of its parent.
    pub parent: Option<String>,
    pub why: String,
    /// By which the kernel's links tell it.
    pub id: Option<LimitId>,
    /// What it was asked to do, and by which version.
    pub intent: Option<Intent>,
}

impl Listing {
    /// The limit of a name that cannot be read.
    pub fn unreadable(&self, name: &str) -> Option<&Unreadable> {
        self.unreadable.iter().find(|limit| limit.name == name)
    }
}

impl Unreadable {
    /// What to say to who wants to work with it.
    pub fn error(&self) -> StoreError {
        let name = self.name.clone();
        match &self.intent {
            Some(intent) if intent.is_newer() => {
                StoreError::Newer { name, build: intent.build.clone() }
            }
            _ => StoreError::Unreadable { name, why: self.why.clone(), is_known: self.is_known() },
        }
    }

    /// Whether a newer version has made it.
    pub fn is_newer(&self) -> bool {
        self.intent.as_ref().is_some_and(Intent::is_newer)
    }

    /// Whether it can be put on again as it was.
    pub fn is_known(&self) -> bool {
        self.options().is_some() && self.scope.is_some()
    }

    /// What it does, if this version can do it.
    pub fn options(&self) -> Option<LimitOptions> {
        self.intent.as_ref().filter(|intent| !intent.is_newer())?.options
    }
}

/// Checks that the maps that every limit has are what this version makes.
pub(super) fn check_layout(limit: &MapHandle, counters: &MapHandle) -> Result<(), LimitError> {
    let is = |map: &MapHandle, sizes: [usize; 2]| sizes.contains(&(map.value_size() as usize));
    let lengths = [size_of::<intf::Counters>(), size_of::<intf::PoliceCounters>()];
    match (is(limit, settings::LENGTHS), is(counters, lengths)) {
        (false, _) => Err(LimitError::Layout("limit")),
        (_, false) => Err(LimitError::Layout("counters")),
        (true, true) => Ok(()),
    }
}

impl Store {
    /// A limit and those that it is inside of, as far as they are there.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if there is no limit of this name.
    pub fn list_above(&self, hierarchy: &Hierarchy, name: &str) -> Result<Listing, StoreError> {
        check_name(name)?;
        let mut listing = Listing::default();
        let mut next = Some(name.to_owned());
        for depth in 0..=MAX_DEPTH {
            let Some(name) = next.take() else { break };
            match self.open_at(hierarchy, &name) {
                Ok(limit) => {
                    next.clone_from(&limit.parent);
                    listing.limits.push(limit);
                }
                Err(StoreError::Missing(name)) if depth == 0 => {
                    return Err(StoreError::Missing(name));
                }
                Err(StoreError::Missing(_)) => {}
                Err(e) => listing.unreadable.push(self.unreadable(hierarchy, &name, &e)),
            }
        }
        Ok(listing)
    }

    /// What can be said of a limit that could not be opened, for a reason.
    pub(super) fn unreadable(
        &self,
        hierarchy: &Hierarchy,
        name: &str,
        why: &StoreError,
    ) -> Unreadable {
        let dir = self.root.join(name);
        let cgroup = cgroup_in(hierarchy, &dir).map(Scope::Cgroup);
        let cgroup = cgroup.or_else(|| selector_in(&dir).map(Scope::Select));
        let device = |link: &str, kind: fn(String) -> Scope| name_in(&dir, link).map(kind);
        let why = match why {
            StoreError::Limit { source, .. } => source.to_string(),
            other => other.to_string(),
        };
        let map = MapHandle::from_pinned_path(dir.join("limit"));
        Unreadable {
            name: name.to_owned(),
            scope: cgroup.or_else(|| device(DEV, Scope::Dev)).or_else(|| device(PORT, Scope::Port)),
            members: paths_in(hierarchy, &dir),
            parent: name_in(&dir, PARENT),
            why,
            id: map.ok().and_then(|map| LimitId::of(&map, slot_in(&dir))),
            intent: Intent::read(&dir),
        }
    }

    /// Takes off what a limit has put on devices and sockets, without reading its maps; its pins stay.
    pub(super) fn release_unread(&self, hierarchy: &Hierarchy, name: &str) {
        let dir = self.root.join(name);
        self.take_off_devices(&dir);
        self.leave_tree(&dir);
        if let Some((pool, index)) = self.place_of(name) {
            let _ = MapPool::open(&pool).and_then(|pool| pool.forget(index));
        }
        // Links first: a connection that opens meanwhile must not be set again.
        let _ = detach_links(&dir);
        if let Some((pool, slot)) = self.place_of(name).filter(|(pool, _)| is_slots(pool)) {
            // Its maps are others', too.
            for at in cgroup_in(hierarchy, &dir).into_iter().chain(paths_in(hierarchy, &dir)) {
                if let (Ok(cgroup), Ok(pool)) = (hierarchy.open(&at), SlotPool::open(&pool)) {
                    let _ = pool.release(hierarchy, &cgroup, slot);
                }
            }
            if let Ok(pool) = SlotPool::open(&pool) {
                half_members(&dir).into_iter().for_each(|id| pool.leave(id, slot));
            }
        } else if let Ok(sockets) = MapHandle::from_pinned_path(dir.join("sockets")) {
            // One that is removed, or of which nothing is known, may have left sockets anywhere.
            let cgroup = cgroup_in(hierarchy, &dir).and_then(|path| hierarchy.open(&path).ok());
            let Some(cgroup) = cgroup.or_else(|| hierarchy.open("").ok()) else { return };
            let _ = release_sockets(&sockets, &network_namespaces(hierarchy, &cgroup));
        }
    }

    /// Takes the programs that are pinned in `dir` off their devices, with the qdisc and the ifb device that
    /// belong to them: in this network namespace, else in whichever they are.
    fn take_off_devices(&self, dir: &Path) {
        if [CGROUP, SELECT].iter().any(|mark| fs::symlink_metadata(dir.join(mark)).is_ok()) {
            return;
        }
        let programs = programs_in(dir);
        let owns_clsact = pins_in(dir, 0).iter().any(|pin| pin.ends_with(CLSACT_MARK));
        let found = in_each_namespace(|| {
            let mut devices = remains::with_programs(&programs).unwrap_or_default();
            for device in &mut devices {
                let has = |what: fn(&Hooked) -> bool| device.hooked.iter().any(what);
                // One of a scheme that is not known has the qdisc that no other limit has.
                let may_have =
                    has(Hooked::is_unknown) && !self.has_qdisc_of_another(device.ifindex);
                if !has(Hooked::comes_with_qdisc) && !may_have {
                    (device.qdisc, device.ifb) = (None, None);
                }
                let _ = device.remove(owns_clsact);
            }
            !devices.is_empty()
        });
        if found {
            return;
        }
        // Somebody has taken the programs off, and left the qdisc. A name means another device elsewhere.
        let is_left = |device: &OnDevice| {
            device_in(dir).is_some_and(|name| name == device.device)
                && device.hooked.is_empty()
                && !self.has_qdisc_of_another(device.ifindex)
                && !is_held(device, &known_programs())
        };
        for device in remains::on_devices().unwrap_or_default().iter().filter(|d| is_left(d)) {
            let _ = device.remove(false);
        }
    }

    /// Whether another limit has the qdisc of a device in the network namespace of the calling thread.
    fn has_qdisc_of_another(&self, ifindex: u32) -> bool {
        let is_on = |limit: &intf::Limit| limit.ifindex == ifindex && is_in_this_namespace(limit);
        self.roots().iter().any(is_on) || self.has_qdisc_of_others(ifindex)
    }

    /// Takes the classes of a limit inside another one off the device of that: the one that has its programs,
    /// in whichever network namespace.
    fn leave_tree(&self, dir: &Path) {
        let slot = name_in(dir, SLOT).and_then(|slot| slot.parse().ok());
        let Some((slot, root)) = slot.zip(name_in(dir, ROOT)) else { return };
        if slot == ROOT_SLOT {
            return;
        }
        let root = self.root.join(root);
        let programs = programs_in(&root);
        in_each_namespace(|| {
            let mut devices = remains::on_devices().unwrap_or_default();
            devices.retain(|device| device.hooked.iter().any(|h| programs.contains(&h.program)));
            for device in &devices {
                htb::leave(device.ifindex, slot);
                device.ifb.iter().for_each(|ifb| htb::leave(*ifb, slot));
            }
            !devices.is_empty()
        });
        if let Ok(members) = MapHandle::from_pinned_path(root.join(htb::MEMBERS_PIN)) {
            htb::empty_slot(&members, slot);
        }
    }
}

/// Does something in this network namespace and then in all others, until it has found what it looks for.
fn in_each_namespace(work: impl Fn() -> bool + Sync) -> bool {
    work()
        || all_network_namespaces().iter().any(|namespace| {
            let mut found = false;
            in_network_namespace(namespace, || found = work());
            found
        })
}

/// The network namespaces that have a name or a process.
fn all_network_namespaces() -> Vec<OwnedFd> {
    let mut seen = BTreeSet::new();
    let files = NetNs::paths().filter_map(|path| fs::File::open(path).ok());
    let new = files.filter(|file| file.metadata().is_ok_and(|m| seen.insert(m.ino())));
    new.map(OwnedFd::from).collect()
}

/// Gives all sockets back that have something in a map of any version.
pub(crate) fn release_sockets(
    sockets: &MapHandle,
    namespaces: &[OwnedFd],
) -> Result<(), LimitError> {
    let mut storage = MaybeUninit::uninit();
    let mut open = open_skel::<skel::release::ReleaseSkelBuilder>(&mut storage, "release")?;
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.has_window = u8::from(sockets.value_size() >= WITH_WINDOW_BYTES);
    }
    let map = &mut open.maps.sockets_of_limit;
    map.reuse_fd(sockets.as_fd()).map_err(load_error("release"))?;
    let object = load_skel(open, "release")?;
    let link = object.progs.release.attach().map_err(load_error("release"))?;
    for namespace in namespaces {
        in_network_namespace(namespace, || {
            // A socket that ends meanwhile is no loss; neither is a namespace.
            let _ = Iter::new(&link).map(|mut iter| io::copy(&mut iter, &mut io::sink()));
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
