//! Limits of scheme `htb` in the store: a tree of them on a device.
//!
//! ```text
//! NAME/{slots,marked,members}        of the limit on the device: the maps of its tree
//!     slot                           of one inside it: symbolic link to the number of its place
//!     root                           ... and to the name of the limit on the device
//! ```

use std::path::Path;

use libbpf_rs::MapHandle;
use tidegate_core::{Scope, class::MAX_DEPTH, htb::ROOT_SLOT};

use super::{
    BUILDING, CGROUP, DEV, PARENT, PORT, PinnedLimit, Store, StoreError, limit_error, name_in,
    pins::{detach_links, open_map, pin_each, pin_hooks, pin_maps, remove_pins},
    symlink,
};
use crate::{
    cgroup::{Cgroup, Hierarchy},
    device::{self, Target},
    fq::FqError,
    intf,
    limit::{LimitError, LimitOptions, settings::Settings},
    remains::InTheWay,
    schemes::acks,
    schemes::htb::{
        self, Leaf, MARKED_PIN, MEMBERS_PIN, Member, ROOT, Root, SLOT, SLOTS_PIN, check_member,
    },
};

/// What is to be put on.
pub(super) struct Asked<'a> {
    pub name: &'a str,
    pub scope: &'a Scope,
    /// Of a cgroup scope.
    pub cgroup: Option<&'a Cgroup>,
    pub options: &'a LimitOptions,
    pub parent: Option<&'a PinnedLimit>,
    pub in_the_way: &'a InTheWay,
}

impl Store {
    /// Puts a limit on a device, or inside one that is.
    pub(super) fn install_htb(
        &self,
        hierarchy: &Hierarchy,
        asked: &Asked<'_>,
    ) -> Result<(), StoreError> {
        match (asked.parent, asked.cgroup) {
            (Some(parent), _) => self.install_leaf(hierarchy, parent, asked),
            (None, None) => self.install_root(hierarchy, asked),
            (None, Some(cgroup)) => {
                let what = Scope::Cgroup(cgroup.path().to_owned());
                let why =
                    "without a parent; name a limit on a device as its parent, with scheme `htb`";
                Err(limit_error(asked.name)(LimitError::NoMember { what, why }))
            }
        }
    }

    fn install_root(&self, hierarchy: &Hierarchy, asked: &Asked<'_>) -> Result<(), StoreError> {
        let refused = || limit_error(asked.name);
        let target = Target::find(asked.scope).map_err(|e| refused()(e.into()))?;
        let limit = target.encode(asked.options).map_err(refused())?;
        let mut root = Root::put(&target, &limit, asked.in_the_way).map_err(refused())?;
        let leaf = Leaf { slot: ROOT_SLOT, parent: None, limit: *limit, member: None };
        // Those inside the one in whose place this one comes are inside this one.
        let mut inside = self.inside(hierarchy, asked.name)?;
        inside.leaves.insert(0, leaf);
        htb::sync(&limit, &root.slots, &root.members, &inside.leaves, &[]).map_err(refused())?;
        let building = self.root.join(format!("{BUILDING}{}", asked.name));
        let done = pin_root(&mut root, asked.options, &building).and_then(|()| {
            let backlog = |direction| htb::backlog_of(&root.slots, direction);
            acks::put(&target, &limit, &building, asked.name, backlog)?;
            let mark = if matches!(asked.scope, Scope::Port(_)) { PORT } else { DEV };
            symlink(Path::new(asked.scope.name()), &building.join(mark))?;
            self.publish(&building, asked.name)
        });
        if done.is_err() {
            acks::take_off(&building, &limit);
            let _ = remove_pins(&building);
            return done;
        }
        root.keep();
        Ok(())
    }

    fn install_leaf(
        &self,
        hierarchy: &Hierarchy,
        parent: &PinnedLimit,
        asked: &Asked<'_>,
    ) -> Result<(), StoreError> {
        let refused = || limit_error(asked.name);
        let tree = self.tree_of(hierarchy, &parent.name)?;
        let (limit, member, target) = match asked.cgroup {
            Some(cgroup) => {
                let limit = asked.options.encode(cgroup.id()).map_err(|e| refused()(e.into()))?;
                check_member(Member::Cgroup(cgroup.id()), asked.scope, cgroup.level())
                    .map_err(refused())?;
                (limit, Member::Cgroup(cgroup.id()), None)
            }
            None => {
                let target = Target::find(asked.scope).map_err(|e| refused()(e.into()))?;
                let limit = target.encode(asked.options).map_err(refused())?;
                check_member(Member::Port(target.ifindex), asked.scope, 0).map_err(refused())?;
                (limit, Member::Port(target.ifindex), Some(target))
            }
        };
        let taken: Vec<_> =
            tree.leaves.iter().map(|leaf| leaf.slot).chain(tree.kept.clone()).collect();
        let free = (ROOT_SLOT + 1..tidegate_core::htb::SLOTS).find(|slot| !taken.contains(slot));
        let slot = free.ok_or_else(|| refused()(LimitError::NoSlot))?;
        let above = tree.leaves.iter().zip(&tree.names).find(|(_, name)| **name == parent.name);
        let leaf = Leaf {
            slot,
            parent: above.map(|(leaf, _)| leaf.slot),
            limit: *limit,
            member: Some(member),
        };
        asked.in_the_way.remove(None).map_err(refused())?;
        let (mut maps, mut hooked) = htb::inside(&limit, target.as_ref()).map_err(refused())?;
        let building = self.root.join(format!("{BUILDING}{}", asked.name));
        let done = pin_maps(&mut maps, asked.options, &building).and_then(|()| {
            pin_hooks(hooked.filters.as_ref(), &hooked.links, &building)?;
            let (mark, at) = match asked.cgroup {
                Some(cgroup) => (CGROUP, hierarchy.remembered(cgroup)),
                None => (PORT, asked.scope.name().into()),
            };
            symlink(&at, &building.join(mark))?;
            symlink(Path::new(&parent.name), &building.join(PARENT))?;
            symlink(Path::new(&tree.root), &building.join(ROOT))?;
            symlink(Path::new(&slot.to_string()), &building.join(SLOT))?;
            // But for the one in whose place it comes.
            let others = tree.leaves.iter().zip(&tree.names);
            let others = others.filter(|(_, name)| **name != asked.name).map(|(leaf, _)| *leaf);
            let leaves: Vec<_> = others.chain([leaf]).collect();
            let synced = tree.sync(&leaves).and_then(|()| self.publish(&building, asked.name));
            if synced.is_err() {
                let _ = tree.sync(&tree.leaves);
            }
            synced
        });
        match done {
            Err(_) => drop(remove_pins(&building)),
            Ok(()) => hooked.filters.iter_mut().for_each(device::Filters::keep),
        }
        done
    }

    /// Puts another limit in force, and the whole tree with it: no packet that waits is lost. On an error the
    /// `earlier` settings are in force, whatever is in the map already.
    pub(super) fn change_htb(
        &self,
        hierarchy: &Hierarchy,
        pinned: &PinnedLimit,
        limit: &intf::Entry,
        options: &LimitOptions,
        earlier: Settings,
    ) -> Result<(), StoreError> {
        let refused = || limit_error(&pinned.name);
        let change = || {
            self.check_above(hierarchy, &pinned.name)?;
            let settings = pinned.maps.keep_leases(*limit, options).map_err(refused())?;
            let limit = settings.limit;
            pinned.maps.write(settings).map_err(refused())?;
            let tree = self.tree_of(hierarchy, &pinned.name)?;
            tree.sync(&tree.leaves)?;
            let backlog = |direction| htb::backlog_of(&tree.slots, direction);
            let lease = |direction| pinned.maps.lease(direction);
            acks::change(&self.root.join(&pinned.name), &limit, lease, &pinned.name, backlog)
        };
        let done = change();
        if done.is_err() {
            let _ = pinned.maps.put_back(&earlier);
            let _ = self.tree_of(hierarchy, &pinned.name).and_then(|tree| tree.sync(&tree.leaves));
        }
        done
    }

    /// Takes what a limit has put on devices off; its pins stay.
    pub(super) fn remove_htb(&self, hierarchy: &Hierarchy, pinned: &PinnedLimit) {
        let dir = self.root.join(&pinned.name);
        let is_here = pinned.scope.is_some();
        // Also where the device has another name by now.
        if pinned.limit.ifindex != 0 {
            acks::take_off(&dir, &pinned.limit);
            device::remove_pinned_filters(&dir, &pinned.limit);
        }
        if pinned.limit.is_child() {
            if let Ok(tree) = self.tree_of(hierarchy, &pinned.name) {
                let slot = name_in(&dir, SLOT).and_then(|slot| slot.parse().ok());
                let others = tree.leaves.iter().filter(|leaf| Some(leaf.slot) != slot);
                let _ = tree.sync(&others.copied().collect::<Vec<_>>());
            }
        } else if is_here || device::is_in_this_namespace(&pinned.limit) {
            // The links before the qdiscs, or packets would be sent to a device that is no more.
            // An ifb device outlives the device that it is for.
            let _ = detach_links(&dir);
            self.remove_qdiscs(&dir, &pinned.limit);
        }
    }

    /// The tree that a limit is in.
    fn tree_of(&self, hierarchy: &Hierarchy, name: &str) -> Result<Tree, StoreError> {
        let root = name_in(&self.root.join(name), ROOT).unwrap_or_else(|| name.to_owned());
        let dir = self.root.join(&root);
        let mut tree = Tree {
            root: root.clone(),
            limit: Settings::read(&open_map(&dir, "limit")?, 0)
                .map_err(limit_error(&root))?
                .limit
                .common,
            slots: open_map(&dir, SLOTS_PIN)?,
            members: open_map(&dir, MEMBERS_PIN)?,
            device: device_in(&dir).unwrap_or_default(),
            names: vec![root.clone()],
            leaves: Vec::new(),
            kept: Vec::new(),
        };
        tree.leaves.push(Leaf { slot: ROOT_SLOT, parent: None, limit: tree.limit, member: None });
        let Inside { leaves, names, kept } = self.inside(hierarchy, &root)?;
        tree.leaves.extend(leaves);
        tree.names.extend(names);
        tree.kept = kept;
        Ok(tree)
    }

    /// Checks that all limits that one is inside of can be read: its classes are below theirs.
    fn check_above(&self, hierarchy: &Hierarchy, name: &str) -> Result<(), StoreError> {
        let above = |name: &String| name_in(&self.root.join(name), PARENT);
        let above = std::iter::successors(above(&name.to_owned()), above).take(MAX_DEPTH);
        for name in above {
            self.open(hierarchy, &name)?;
        }
        Ok(())
    }

    /// Whether a limit is inside another one's HTB.
    pub(super) fn is_in_tree(&self, name: &str) -> bool {
        name_in(&self.root.join(name), ROOT).is_some()
    }

    /// The limits inside the one on a device.
    fn inside(&self, hierarchy: &Hierarchy, root: &str) -> Result<Inside, StoreError> {
        let mut inside = Inside::default();
        let is_inside =
            |name: &String| name_in(&self.root.join(name), ROOT).as_deref() == Some(root);
        let slot_of = |name: &str| match name == root {
            true => Some(ROOT_SLOT),
            false => name_in(&self.root.join(name), SLOT)?.parse().ok(),
        };
        for name in self.names()?.into_iter().filter(is_inside) {
            let Some(slot) = slot_of(&name) else { continue };
            let Ok(pinned) = self.open(hierarchy, &name) else {
                inside.kept.push(slot);
                continue;
            };
            let member = match pinned.limit.ifindex {
                0 => Member::Cgroup(pinned.limit.cgroup_id),
                ifindex => Member::Port(ifindex),
            };
            inside.leaves.push(Leaf {
                slot,
                parent: pinned.parent.as_deref().and_then(slot_of),
                limit: *pinned.limit,
                member: Some(member),
            });
            inside.names.push(name);
        }
        // With all that is inside those.
        let Inside { leaves, names, kept } = &mut inside;
        while let Some(at) =
            leaves.iter().position(|leaf| leaf.parent.is_some_and(|slot| kept.contains(&slot)))
        {
            kept.push(leaves.remove(at).slot);
            names.remove(at);
        }
        Ok(inside)
    }
}

/// The limits inside the one on a device.
#[derive(Default)]
struct Inside {
    leaves: Vec<Leaf>,
    /// Of the leaves.
    names: Vec<String>,
    /// The slots of limits that cannot be read, and of those inside them: they stay as they are.
    kept: Vec<u16>,
}

/// The limits on a device and inside that.
struct Tree {
    /// The name of the one on the device.
    root: String,
    limit: intf::Limit,
    /// The name of the device.
    device: String,
    slots: MapHandle,
    members: MapHandle,
    /// Of the leaves.
    names: Vec<String>,
    leaves: Vec<Leaf>,
    /// As of [`Inside`].
    kept: Vec<u16>,
}

impl Tree {
    /// In the network namespace of the device, wherever the limits inside it are changed.
    fn sync(&self, leaves: &[Leaf]) -> Result<(), StoreError> {
        let Tree { limit, slots, members, kept, .. } = self;
        let sync = || htb::sync(limit, slots, members, leaves, kept);
        let gone = || Err(FqError::Missing(self.device.clone()).into());
        device::in_namespace(limit.cgroup_id, sync)
            .unwrap_or_else(gone)
            .map_err(limit_error(&self.root))
    }
}

/// The name of the device that the limit of a directory is on.
pub(super) fn device_in(dir: &Path) -> Option<String> {
    name_in(dir, DEV).or_else(|| name_in(dir, PORT))
}

fn pin_root(root: &mut Root, options: &LimitOptions, dir: &Path) -> Result<(), StoreError> {
    pin_maps(&mut root.maps, options, dir)?;
    let maps = [
        (SLOTS_PIN, &mut root.slots),
        (MARKED_PIN, &mut root.marked),
        (MEMBERS_PIN, &mut root.members),
    ];
    pin_each(maps, dir)?;
    pin_hooks(root.hooked.filters.as_ref(), &root.hooked.links, dir)
}
