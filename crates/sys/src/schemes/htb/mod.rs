//! Scheme `htb`: the kernel's Hierarchical Token Bucket on devices, and limits inside theirs.
//!
//! ```text
//!  leaves by the device      htb_out ── priority ──► HTB at the root of the device ──► device
//!  comes in by the device    htb_in ──► ifb device ──► HTB at its root ──► on as if it had just come
//! ```
//!
//! The limit on a device or port is the root of a tree (`Root`); those inside it are on cgroups of this
//! host or on ports, and only have a slot in it: two classes, a queue, a place in the map that says whose
//! packets are whose. The options of HTB are computed in [`tidegate_core::htb`]; `tree` makes it so.
//! Everything in the kernel is found again by its name: the handle `7467:`, the device `tgifbN` of device
//! N, pins.

mod limit_class;
pub(crate) mod slot;
mod tree;

use std::{mem::MaybeUninit, path::Path};

use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenObject, ProgramMut};
use tidegate_core::{
    Bytes, Direction, Scope,
    htb::{self, Branch, ROOT_SLOT, SLOTS},
};

pub(crate) use limit_class::DROP_FULL;
use limit_class::{LimitClass, NoClass};
pub(crate) use slot::{MARKED_PIN, SLOTS_PIN};
use slot::{device_of, ifb_name};

use crate::{
    backlog::Backlog,
    bpf::{load_error, load_skel, lookup, map_error, open_skel, reuse},
    device::{self, Hooked, Target},
    features, intf,
    limit::{Handle, LimitError, LimitMaps},
    net::Netlink,
    remains::InTheWay,
    root_qdisc::{self, Undo},
    schemes::{LINKS, MapsByName, Pinned, Pinning, Scheme, Successor, acks, successors},
    shared::{
        HTB_CGROUP_LEVELS as CGROUP_LEVELS, HTB_HAS_CGROUPS as HAS_CGROUPS,
        HTB_HAS_PORTS as HAS_PORTS, HTB_PORT_KEY, HtbSlot,
    },
    skel::{self, htb::OpenHtbSkel},
};

const PORT_KEY: u64 = HTB_PORT_KEY.cast_unsigned();
/// A packet has 16 bits for the index of its port.
const PORT_IFINDEX_MAX: u32 = u16::MAX as u32;
/// What the stack builds at most, where a device does not say.
const SEGMENT: Bytes = Bytes(65_536);

/// The pin of the map that says who is in which slot.
pub(crate) const MEMBERS_PIN: &str = "members";

/// Who is inside a limit on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Member {
    /// The programs of a cgroup, by its id.
    Cgroup(u64),
    /// What comes in by a port, by its index.
    Port(u32),
}

impl Member {
    fn key(self) -> u64 {
        match self {
            Member::Cgroup(id) => id,
            Member::Port(ifindex) => PORT_KEY | u64::from(ifindex),
        }
    }
}

/// The limit on a device itself, as long as this value lives unless it is [kept](Root::keep).
#[derive(Debug)]
pub(crate) struct Root {
    pub(crate) maps: LimitMaps,
    pub(crate) slots: MapHandle,
    pub(crate) marked: MapHandle,
    pub(crate) members: MapHandle,
    pub(crate) hooked: Hooked,
    limit: intf::Limit,
    kept: bool,
}

impl Root {
    /// Puts a limit on a device that has none: its qdiscs, its ifb device, and the programs. Its classes come
    /// with [`sync`]. Removes what is `in_the_way` when the programs are loaded.
    pub(crate) fn put(
        target: &Target,
        limit: &intf::Limit,
        in_the_way: &InTheWay,
    ) -> Result<Root, LimitError> {
        let (out, ifindex) = (limit.leaving(), limit.ifindex);
        let (leaves, comes_in) = (limit.rate(out).is_some(), limit.rate(out.other()).is_some());
        let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
        let htb = load_skel(open_root(&mut storage, limit)?, "htb")?;
        let handle = |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("htb"));
        let maps = own_maps(&htb, limit)?;
        if comes_in && features::has_ifb() == Some(false) {
            return Err(LimitError::NoIfb);
        }

        in_the_way.remove(Some("htb"))?;
        let mut netlink = Netlink::open()?;
        let mut undo = Undo::nothing();
        let mut programs: Vec<(_, &ProgramMut<'_>)> = Vec::new();
        if leaves {
            let device = target.scope.name();
            tree::install_root(&mut netlink, ifindex, device, in_the_way.force)?;
            undo.arm(limit, remove_qdiscs);
            programs.push((out, &htb.progs.htb_out));
        }
        let mut ifb_ifindex = 0;
        if comes_in {
            let name = ifb_name(ifindex);
            // One that a process which died has left.
            remove_ifb(&mut netlink, ifindex);
            netlink.add_ifb(&name)?;
            undo.arm(limit, remove_qdiscs);
            ifb_ifindex = netlink.index_of(&name)?;
            tree::install_root(&mut netlink, ifb_ifindex, &name, true)?;
            netlink.set_up(ifb_ifindex, true)?;
        }
        let mut hooked = device::attach(target, &programs)?;
        if comes_in {
            let program = &htb.progs.htb_in;
            device::attach_redirecting(target, out.other(), program, ifb_ifindex, &mut hooked)?;
        }
        let root = Root {
            maps,
            slots: handle(&htb.maps.slots)?,
            marked: handle(&htb.maps.marked)?,
            members: handle(&htb.maps.members)?,
            hooked,
            limit: *limit,
            kept: false,
        };
        undo.keep();
        Ok(root)
    }

    /// Leaves it on the device.
    pub(crate) fn keep(mut self) {
        self.kept = true;
        self.hooked.filters.iter_mut().for_each(device::Filters::keep);
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        if !self.kept {
            // The programs first, or packets would be sent to an ifb device that is no more.
            self.hooked = Hooked::default();
            remove_qdiscs(&self.limit);
        }
    }
}

/// Opens the programs of a limit on a device, for the directions that it limits.
fn open_root<'a>(
    storage: &'a mut MaybeUninit<OpenObject>,
    limit: &intf::Limit,
) -> Result<OpenHtbSkel<'a>, LimitError> {
    let out = limit.leaving();
    let mut open = open_skel::<skel::htb::HtbSkelBuilder>(storage, "htb")?;
    open.progs.htb_out.set_autoload(limit.rate(out).is_some());
    open.progs.htb_in.set_autoload(limit.rate(out.other()).is_some());
    open.progs.htb_stamp.set_autoload(false);
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.direction_out = intf::index(out) as u32;
        rodata.direction_in = intf::index(out.other()) as u32;
    }
    Ok(open)
}

/// The same of one inside another, of which a port has a program.
fn open_inside(
    storage: &mut MaybeUninit<OpenObject>,
    is_port: bool,
) -> Result<OpenHtbSkel<'_>, LimitError> {
    let mut open = open_skel::<skel::htb::HtbSkelBuilder>(storage, "htb")?;
    open.progs.htb_out.set_autoload(false);
    open.progs.htb_in.set_autoload(false);
    open.progs.htb_stamp.set_autoload(is_port);
    for map in [&mut open.maps.slots, &mut open.maps.marked, &mut open.maps.members] {
        map.set_autocreate(false).map_err(load_error("htb"))?;
    }
    Ok(open)
}

/// The maps that every limit has, of a limit inside another one; on a port with the program there.
pub(crate) fn inside(
    limit: &intf::Limit,
    port: Option<&Target>,
) -> Result<(LimitMaps, Hooked), LimitError> {
    let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let htb = load_skel(open_inside(&mut storage, port.is_some())?, "htb")?;
    let maps = own_maps(&htb, limit)?;
    let stamp = [(Direction::Egress, &htb.progs.htb_stamp as &ProgramMut<'_>)];
    let hooked = port.map(|target| device::attach(target, &stamp)).transpose()?;
    Ok((maps, hooked.unwrap_or_default()))
}

fn own_maps(htb: &skel::htb::HtbSkel<'_>, limit: &intf::Limit) -> Result<LimitMaps, LimitError> {
    let handle = |map: &libbpf_rs::Map<'_>| MapHandle::try_from(map).map_err(load_error("htb"));
    let own = NoClass { lacks: None };
    let maps = LimitMaps::new(handle(&htb.maps.limit)?, handle(&htb.maps.counters)?, own);
    maps.write(intf::Entry::from(*limit))?;
    Ok(maps)
}

/// Checks that a packet can say that it is a member's.
pub(crate) fn check_member(member: Member, scope: &Scope, level: u32) -> Result<(), LimitError> {
    let why = match member {
        Member::Cgroup(_) if level > CGROUP_LEVELS => "it is more than 16 cgroups deep",
        Member::Port(ifindex) if ifindex > PORT_IFINDEX_MAX => "its index is above 65535",
        _ => return Ok(()),
    };
    Err(LimitError::NoMember { what: scope.clone(), why })
}

/// One limit of a tree as the store has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leaf {
    pub(crate) slot: u16,
    pub(crate) parent: Option<u16>,
    pub(crate) limit: intf::Limit,
    /// None: it is the root.
    pub(crate) member: Option<Member>,
}

/// Makes the tree of the limit `root` what `leaves` say, its own among them: classes, queues, who is who.
/// What the slots `kept` have stays: of limits that cannot be read.
///
/// # Errors
/// [`LimitError`]; settling what was before puts it back.
pub(crate) fn sync(
    root: &intf::Limit,
    slots: &MapHandle,
    members: &MapHandle,
    leaves: &[Leaf],
    kept: &[u16],
) -> Result<(), LimitError> {
    let mut netlink = Netlink::open()?;
    let has =
        |what: fn(&Member) -> bool| leaves.iter().any(|l| l.member.as_ref().is_some_and(what));
    let has_cgroups = has(|m| matches!(m, Member::Cgroup(_)));
    let has_ports = has(|m| matches!(m, Member::Port(_)));
    let flags = if has_cgroups { HAS_CGROUPS } else { 0 } | if has_ports { HAS_PORTS } else { 0 };
    for direction in Direction::BOTH {
        let Some(ifindex) = device_of(&mut netlink, root, direction)? else { continue };
        let segment = netlink.gso_max_size(root.ifindex).map_or(SEGMENT, |b| Bytes(b.into()));
        let branches = branches(leaves, direction, segment);
        let place = |slot: u16| intf::index(direction) as u32 * u32::from(SLOTS) + u32::from(slot);
        let known = |slot| {
            let known: HtbSlot = lookup(slots, SLOTS_PIN, place(slot)).ok()?;
            (known.backlog.ifindex == ifindex).then_some(known.backlog)
        };
        let backlogs = tree::sync(&mut netlink, ifindex, &branches, kept, known)?;
        for (branch, backlog) in branches.iter().zip(backlogs) {
            let mark =
                branch.mark.map_or(0, |mark| u32::try_from(mark.0).unwrap_or(u32::MAX).max(1));
            let flags = if branch.slot == ROOT_SLOT { flags } else { 0 };
            let slot = HtbSlot { mark_bytes: mark, flags, backlog };
            slots
                .update(&place(branch.slot).to_ne_bytes(), bytemuck::bytes_of(&slot), MapFlags::ANY)
                .map_err(map_error(SLOTS_PIN))?;
        }
    }
    let wanted = leaves.iter().filter_map(|leaf| Some((leaf.member?.key(), u32::from(leaf.slot))));
    let wanted: Vec<_> = wanted.collect();
    let stays = |key: &[u8]| {
        wanted.iter().any(|(k, _)| k.to_ne_bytes()[..] == *key)
            || slot_of_member(members, key).is_some_and(|slot| kept.contains(&slot))
    };
    for key in members.keys().filter(|key| !stays(key)).collect::<Vec<_>>() {
        members.delete(&key).map_err(map_error(MEMBERS_PIN))?;
    }
    for (key, slot) in wanted {
        members
            .update(&key.to_ne_bytes(), &slot.to_ne_bytes(), MapFlags::ANY)
            .map_err(map_error(MEMBERS_PIN))?;
    }
    Ok(())
}

fn slot_of_member(members: &MapHandle, key: &[u8]) -> Option<u16> {
    let slot = members.lookup(key, MapFlags::ANY).ok()??;
    u16::try_from(u32::from_ne_bytes(slot.try_into().ok()?)).ok()
}

/// Nobody is in a slot of a tree any more.
pub(crate) fn empty_slot(members: &MapHandle, slot: u16) {
    let is_inside = |key: &Vec<u8>| slot_of_member(members, key) == Some(slot);
    for key in members.keys().filter(is_inside).collect::<Vec<_>>() {
        let _ = members.delete(&key);
    }
}

/// The options of HTB in a direction.
fn branches(leaves: &[Leaf], direction: Direction, segment: Bytes) -> Vec<Branch> {
    let index = intf::index(direction);
    let limits = leaves.iter().filter_map(|leaf| {
        let class = &leaf.limit.class[index];
        Some(htb::Limit {
            slot: leaf.slot,
            parent: leaf.parent,
            ceiling: leaf.limit.rate(direction)?,
            class: class.class().unwrap_or_default(),
            config: leaf.limit.queue[index].into(),
            floors: class.floors(),
        })
    });
    htb::branches(&limits.collect::<Vec<_>>(), segment)
}

/// Where the packets of a limit on a device wait.
pub(crate) fn backlog_of(slots: &MapHandle, direction: Direction) -> Result<Backlog, LimitError> {
    let place = intf::index(direction) as u32 * u32::from(SLOTS) + u32::from(ROOT_SLOT);
    let slot: HtbSlot = lookup(slots, SLOTS_PIN, place)?;
    Ok(slot.backlog)
}

/// Takes the qdiscs of a limit off, and its ifb device; what cannot be found is off already.
pub(crate) fn remove_qdiscs(limit: &intf::Limit) {
    let Ok(mut netlink) = Netlink::open() else { return };
    if limit.rate(limit.leaving()).is_some() {
        let _ = root_qdisc::remove(&mut netlink, limit.ifindex);
    }
    if limit.rate(limit.leaving().other()).is_some() {
        remove_ifb(&mut netlink, limit.ifindex);
    }
}

/// Takes the classes of a limit inside that of a device off, with what waits in them.
pub(crate) fn leave(ifindex: u32, slot: u16) {
    let Ok(mut netlink) = Netlink::open() else { return };
    let _ = tree::remove_classes(&mut netlink, ifindex, slot);
}

/// Whether a limit on a device has an HTB on that, or on the ifb device for it.
pub(crate) fn has(limit: &intf::Limit, on_ifb: bool) -> bool {
    let out = limit.leaving();
    limit.rate(if on_ifb { out.other() } else { out }).is_some()
}

/// Removes the ifb device of a device; nothing if there is none.
pub(crate) fn clear_ifb(ifindex: u32) {
    if let Ok(mut netlink) = Netlink::open() {
        remove_ifb(&mut netlink, ifindex);
    }
}

fn remove_ifb(netlink: &mut Netlink, ifindex: u32) {
    let name = ifb_name(ifindex);
    let ifb = netlink.devices().unwrap_or_default().into_iter();
    for ifb in ifb.filter(|device| device.name == name && device.kind == "ifb") {
        let _ = netlink.delete_link(ifb.index);
    }
}

/// The symbolic links of a limit inside another one: its place in the tree, and the name of the limit on the
/// device.
pub(crate) const SLOT: &str = "slot";
pub(crate) const ROOT: &str = "root";

/// Schemes `htb`, `dem` and `spring`. Their limits are put on by the store, which knows the tree.
pub(crate) struct InTree {
    /// The kernel's HTB knows no end of a rate. The programs that act on ACKs do.
    ends_leases: bool,
}

/// Scheme `htb`.
pub(crate) static HTB: InTree = InTree { ends_leases: false };
/// Schemes `dem` and `spring`: an HTB, and programs on both sides of it.
pub(crate) static WITH_ACKS: InTree = InTree { ends_leases: true };

impl Scheme for InTree {
    fn links(&self, limit: &intf::Limit) -> &'static [&'static str] {
        links(limit)
    }

    fn open(&self, pinned: &Pinned<'_>) -> Result<Box<dyn Handle>, LimitError> {
        Ok(match LimitClass::open(pinned.dir, pinned.limit) {
            Some(class) => Box::new(class),
            None => Box::new(NoClass { lacks: Some("parent") }),
        })
    }

    fn of_program(&self, _maps: &mut MapsByName) -> Option<Box<dyn Handle>> {
        None
    }

    fn reload(
        &self,
        dir: &Path,
        limit: &intf::Limit,
        maps: &LimitMaps,
    ) -> Result<Vec<Successor>, LimitError> {
        let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
        let is_root = !limit.is_child();
        let mut open = match is_root {
            true => open_root(&mut storage, limit)?,
            false if limit.ifindex == 0 => return Ok(Vec::new()),
            false => open_inside(&mut storage, true)?,
        };
        reuse(&mut open.maps.limit, &maps.limit)?;
        reuse(&mut open.maps.counters, &maps.counters)?;
        if !is_root {
            let htb = load_skel(open, "htb")?;
            return successors(dir, &[(LINKS[0], &htb.progs.htb_stamp)]);
        }
        for (map, pin) in [
            (&mut open.maps.slots, SLOTS_PIN),
            (&mut open.maps.marked, MARKED_PIN),
            (&mut open.maps.members, MEMBERS_PIN),
        ] {
            reuse(map, &MapHandle::from_pinned_path(dir.join(pin)).map_err(map_error(pin))?)?;
        }
        let htb = load_skel(open, "htb")?;
        let out = limit.leaving();
        let link = |direction| LINKS[intf::index(direction)];
        let mut all = Vec::new();
        if limit.rate(out).is_some() {
            all.extend(successors(dir, &[(link(out), &htb.progs.htb_out)])?);
        }
        if limit.rate(out.other()).is_some() {
            let ifb = Netlink::open()?.index_of(&ifb_name(limit.ifindex))?;
            let to_ifb = successors(dir, &[(link(out.other()), &htb.progs.htb_in)])?;
            all.extend(to_ifb.into_iter().map(|s| Successor { redirected_to: Some(ifb), ..s }));
        }
        all.extend(acks::reload(dir, limit)?);
        Ok(all)
    }

    fn pinning(&self) -> Pinning {
        Pinning::Tree
    }

    fn ends_leases(&self) -> bool {
        self.ends_leases
    }
}

/// The names of the links that a limit has, as [`device`] names them: of the limited directions of one on a
/// device; inside another one only a port has a program, where its workload's egress comes in.
fn links(limit: &intf::Limit) -> &'static [&'static str] {
    let is_limited = |direction| limit.rate(direction).is_some();
    if limit.is_child() {
        return if limit.ifindex == 0 { &[] } else { &LINKS[..1] };
    }
    match (is_limited(Direction::Egress), is_limited(Direction::Ingress)) {
        (true, true) => &LINKS[..2],
        (true, false) => &LINKS[..1],
        (false, true) => &LINKS[1..2],
        (false, false) => &[],
    }
}

#[cfg(test)]
mod tests;
