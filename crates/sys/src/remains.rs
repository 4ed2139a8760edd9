//! What Tidegate has put on devices, found in the kernel itself: no map is read and no pin is
//! needed. The store uses it for limits that another version has pinned, and for what a process that died has
//! left.
//!
//! A thing is ours by a name that nobody else gives:
//!
//! | thing | known by |
//! |:--|:--|
//! | qdisc | the handle `7467:` at the root of a device |
//! | ifb device | its kind, and the name `tgifbN`; N is the index of the device that it serves |
//! | filter of clsact | its priority and handle, and the name of its program |
//! | link (tcx, XDP) | the name of its program |
//!
//! A program of a limit whose scheme this version does not know has any name. It is known by its pin.
//!
//! Devices are those of the network namespace of the calling thread. Looking takes O(devices) requests.

use std::{collections::BTreeSet, fmt};

use tidegate_core::scheme::{SCHEMES, SchemeInfo};

use crate::{
    device, features,
    limit::LimitError,
    links::{self, On},
    net::{
        NetError, Netlink,
        qdisc::{Filter, Handle},
    },
    query::{self, OnSide, Side},
    root_qdisc,
    schemes::htb::slot,
    xdp,
};

/// A program of ours on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hooked {
    /// The kernel's id of the program.
    pub(crate) program: u32,
    pub(crate) name: String,
    at: At,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum At {
    /// A link (tcx, XDP), by the kernel's id.
    Link(u32),
    Filter(Side, Filter),
}

impl Hooked {
    /// A link holds it, not a filter.
    pub(crate) fn is_link(&self) -> bool {
        matches!(self.at, At::Link(_))
    }

    /// Whether no scheme that this version knows has a program of this name.
    pub(crate) fn is_unknown(&self) -> bool {
        !query::is_on_devices(&self.name)
    }

    /// Whether it belongs to the qdisc at the root of its device.
    pub(crate) fn comes_with_qdisc(&self) -> bool {
        SCHEMES.iter().any(|info| info.qdisc_programs.contains(&self.name.as_str()))
    }

    /// Whether it is of a scheme that has a qdisc there.
    pub(crate) fn is_of_limit_with_qdisc(&self) -> bool {
        let has = |info: &SchemeInfo| info.device_programs.contains(&self.name.as_str());
        SCHEMES.iter().any(|info| info.has_qdisc && has(info))
    }
}

/// What is ours on one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OnDevice {
    /// The device; of an ifb device the one that it serves, which may be gone.
    pub(crate) ifindex: u32,
    /// Its name; empty if it is gone.
    pub(crate) device: String,
    /// The kind of the qdisc `7467:` at its root.
    pub(crate) qdisc: Option<String>,
    /// The index of its ifb device.
    pub(crate) ifb: Option<u32>,
    /// Its programs.
    pub(crate) hooked: Vec<Hooked>,
}

impl OnDevice {
    pub(crate) fn is_empty(&self) -> bool {
        self.qdisc.is_none() && self.ifb.is_none() && self.hooked.is_empty()
    }

    /// Takes all of it off: programs first, or packets would be sent to an ifb device that is no more; a
    /// clsact without filters goes if it `owns_clsact`. What is off already is no error.
    ///
    /// # Errors
    /// [`NetError`] of the first thing that would not go; the rest is off, but for the ifb device if a
    /// program stays.
    pub(crate) fn remove(&self, owns_clsact: bool) -> Result<(), NetError> {
        let mut netlink = Netlink::open()?;
        let mut refused = None;
        let keep = |refused: &mut Option<NetError>, done: Result<(), NetError>| match done {
            Err(e) if !is_gone(&e) => *refused = refused.take().or(Some(e)),
            _ => {}
        };
        for hooked in &self.hooked {
            let done = match &hooked.at {
                At::Link(id) => query::detach_link(*id)
                    .map_err(|e| NetError::refused(format!("detach `{}`", hooked.name), e)),
                At::Filter(side, filter) => {
                    netlink.delete_filter(self.ifindex, side.clsact(), filter)
                }
            };
            keep(&mut refused, done);
        }
        let ifb = self.ifb.filter(|_| refused.is_none());
        if owns_clsact && device::has_unused_clsact(&mut netlink, self.ifindex) {
            keep(&mut refused, netlink.delete_qdisc(self.ifindex, Handle::CLSACT));
        }
        if self.qdisc.is_some() {
            keep(&mut refused, netlink.delete_qdisc(self.ifindex, Handle::ROOT));
        }
        if let Some(ifb) = ifb {
            keep(&mut refused, netlink.delete_link(ifb));
        }
        refused.map_or(Ok(()), Err)
    }
}

/// The objects on a device that make way for a limit that begins there, once it is checked and loaded:
/// remains of a process that died or of a lost BPF file system, or the limit of another store.
#[derive(Debug, Default)]
pub(crate) struct InTheWay {
    /// Ours, but of no limit of this store.
    pub(crate) there: OnDevice,
    /// A qdisc of somebody else goes, too.
    pub(crate) force: bool,
}

impl InTheWay {
    /// Takes it off, unless the kernel lacks the qdisc that shall come in its place.
    ///
    /// # Errors
    /// [`LimitError::NoQdisc`]; [`LimitError::Net`] if some of it would not go.
    pub(crate) fn remove(&self, for_qdisc: Option<&'static str>) -> Result<(), LimitError> {
        if self.there.is_empty() {
            return Ok(());
        }
        if let Some(kind) = for_qdisc.filter(|kind| features::has_qdisc(kind) == Some(false)) {
            return Err(LimitError::NoQdisc { kind });
        }
        Ok(self.there.remove(false)?)
    }
}

impl fmt::Display for OnDevice {
    /// `device eth0: qdisc htb 7467:, ifb device, filter of htb_in`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = if self.device.is_empty() { "that is gone" } else { &self.device };
        let mut what = Vec::new();
        what.extend(self.qdisc.as_ref().map(|kind| format!("qdisc {kind} 7467:")));
        what.extend(self.ifb.map(|_| "ifb device".to_owned()));
        what.extend(self.hooked.iter().map(|hooked| format!("program {}", hooked.name)));
        write!(f, "device {device}: {}", what.join(", "))
    }
}

/// Somebody else was faster.
fn is_gone(error: &NetError) -> bool {
    matches!(error.errno(), Some(libc::ENOENT | libc::ENODEV | libc::EINVAL))
}

/// What is ours on every device that has something, in the order of their indices.
///
/// # Errors
/// [`NetError`] when the kernel does not list its devices.
pub(crate) fn on_devices() -> Result<Vec<OnDevice>, NetError> {
    on_those(|_| true, is_named)
}

/// The devices that have some of these programs, whatever their names; of the programs only these.
///
/// # Errors
/// [`NetError`] when the kernel does not list its devices.
pub(crate) fn with_programs(programs: &BTreeSet<u32>) -> Result<Vec<OnDevice>, NetError> {
    let mut found = on_those(|_| true, |id, _| programs.contains(&id))?;
    found.retain(|device| !device.hooked.is_empty());
    Ok(found)
}

/// The same of one device.
///
/// # Errors
/// [`NetError`].
pub(crate) fn on_device(ifindex: u32) -> Result<OnDevice, NetError> {
    Ok(on_those(|index| index == ifindex, is_named)?.pop().unwrap_or_default())
}

/// Whether a program is ours by its name.
fn is_named(_id: u32, name: &str) -> bool {
    query::is_on_devices(name)
}

fn on_those(
    wanted: impl Fn(u32) -> bool,
    is_ours: impl Fn(u32, &str) -> bool,
) -> Result<Vec<OnDevice>, NetError> {
    let mut netlink = Netlink::open()?;
    let devices = netlink.devices()?;
    let ifbs = devices.iter().filter(|device| device.kind == "ifb");
    let ifbs: Vec<_> =
        ifbs.filter_map(|ifb| Some((slot::served_by(&ifb.name)?, ifb.index))).collect();
    let mut found = Vec::new();
    // Our qdisc on an ifb device of ours goes with that.
    let is_ifb = |index: u32| ifbs.iter().any(|(_, ifb)| *ifb == index);
    for device in devices.iter().filter(|device| wanted(device.index) && !is_ifb(device.index)) {
        let ifb = ifbs.iter().find(|(of, _)| *of == device.index).map(|(_, ifb)| *ifb);
        let all = OnDevice {
            ifindex: device.index,
            device: device.name.clone(),
            qdisc: netlink
                .qdisc_stats(device.index)
                .ok()
                .and_then(|qdiscs| Some(root_qdisc::ours(&qdiscs)?.kind.clone())),
            ifb,
            hooked: hooked(&mut netlink, device.index, &is_ours),
        };
        found.extend(Some(all).filter(|all| !all.is_empty()));
    }
    let is_gone = |of: u32| !devices.iter().any(|device| device.index == of);
    let alone = ifbs.iter().filter(|(of, _)| wanted(*of) && is_gone(*of));
    found.extend(alone.map(|(of, ifb)| OnDevice {
        ifindex: *of,
        ifb: Some(*ifb),
        ..OnDevice::default()
    }));
    found.sort_by_key(|all| all.ifindex);
    Ok(found)
}

/// Whether a device has programs of the limit whose qdisc is at its root.
pub(crate) fn has_qdisc_programs(ifindex: u32) -> bool {
    let hooked = Netlink::open().map(|mut netlink| hooked(&mut netlink, ifindex, &is_named));
    hooked.is_ok_and(|hooked| hooked.iter().any(Hooked::comes_with_qdisc))
}

/// The kernel's ids of all programs on a device that a limit may have, whatever their names.
pub(crate) fn programs_on(ifindex: u32) -> Vec<u32> {
    let hooked = Netlink::open().map(|mut netlink| hooked(&mut netlink, ifindex, &|_, _| true));
    hooked.unwrap_or_default().into_iter().map(|hooked| hooked.program).collect()
}

fn hooked(
    netlink: &mut Netlink,
    ifindex: u32,
    is_ours: &impl Fn(u32, &str) -> bool,
) -> Vec<Hooked> {
    let ours = |program: u32, at: At| {
        let name = query::program_name(program).unwrap_or_default();
        is_ours(program, &name).then_some(Hooked { program, name, at })
    };
    let mut found = Vec::new();
    for side in [Side::Out, Side::In] {
        for OnSide { program, link } in query::tcx_programs(ifindex, side) {
            found.extend((link != 0).then(|| ours(program, At::Link(link))).flatten());
        }
        for filter in netlink.filters(ifindex, side.clsact()).unwrap_or_default() {
            let program = filter.program.filter(|_| device::is_our_place(&filter));
            found.extend(program.and_then(|program| ours(program, At::Filter(side, filter))));
        }
    }
    if let Some(on_device) = xdp::on_device(ifindex) {
        let mut links = links::all().filter(|link| link.on == On::Xdp);
        let link = links.find(|link| link.program == on_device.program);
        found.extend(link.and_then(|link| ours(link.program, At::Link(link.id))));
    }
    found
}
