//! The qdisc that a limit puts at the root of a device: one for each device, known by its handle, `7467:`.

use tidegate_core::htb::MAJOR;

use crate::{
    intf,
    limit::LimitError,
    net::{
        NetError, Netlink,
        qdisc::{Handle, Place, Qdisc, QueueStats, Verb},
    },
};

/// Its handle.
pub(crate) const ROOT: Handle = Handle::new(MAJOR, 0);

/// The qdisc of ours at the root of a device, if there is one.
pub(crate) fn ours(qdiscs: &[QueueStats]) -> Option<&QueueStats> {
    qdiscs.iter().find(|q| q.parent == Handle::ROOT && q.handle == ROOT)
}

/// The qdisc that somebody else has put at the root of a device; those that the kernel puts there by itself
/// have no handle.
pub(crate) fn foreign(qdiscs: &[QueueStats]) -> Option<&QueueStats> {
    let is_put = |q: &&QueueStats| q.handle != Handle::UNSPEC && q.handle != ROOT;
    qdiscs.iter().filter(|q| q.parent == Handle::ROOT).find(is_put)
}

/// Puts a qdisc at the root of a device that no other limit has. One that somebody has put there is only
/// replaced with `force`; those of the kernel come back by themselves. One of ours was left by a process that
/// died.
///
/// # Errors
/// [`LimitError::ForeignQdisc`]; [`LimitError::NoQdisc`] if the kernel lacks this kind.
pub(crate) fn put(
    netlink: &mut Netlink,
    ifindex: u32,
    device: &str,
    force: bool,
    qdisc: &dyn Qdisc,
) -> Result<(), LimitError> {
    let qdiscs = netlink.qdisc_stats(ifindex)?;
    let mut verb = Verb::Add;
    if ours(&qdiscs).is_some() {
        netlink.delete_qdisc(ifindex, Handle::ROOT)?;
    } else if let Some(foreign) = foreign(&qdiscs) {
        if !force {
            let (device, kind) = (device.to_owned(), foreign.kind.clone());
            let handle = foreign.handle.to_string();
            return Err(LimitError::ForeignQdisc { device, kind, handle });
        }
        verb = Verb::Replace;
    }
    set(netlink, ifindex, verb, qdisc)
}

/// Makes the qdisc at the root of a device, or changes it in place: then what waits in it stays.
///
/// # Errors
/// [`LimitError`]; it is as it was.
pub(crate) fn set(
    netlink: &mut Netlink,
    ifindex: u32,
    verb: Verb,
    qdisc: &dyn Qdisc,
) -> Result<(), LimitError> {
    let place = Place { ifindex, parent: Handle::ROOT, handle: ROOT };
    netlink.set_qdisc(verb, place, qdisc).map_err(|e| match e.is_absent() {
        true => LimitError::NoQdisc { kind: qdisc.kind() },
        false => e.into(),
    })
}

/// Takes ours off a device; the kernel puts there what it has for such a device.
pub(crate) fn remove(netlink: &mut Netlink, ifindex: u32) -> Result<(), NetError> {
    match netlink.qdisc_stats(ifindex) {
        Ok(qdiscs) if ours(&qdiscs).is_some() => netlink.delete_qdisc(ifindex, Handle::ROOT),
        _ => Ok(()),
    }
}

/// Takes what was put on the device of a limit off again, unless it is [kept](Undo::keep).
#[derive(Debug)]
pub(crate) struct Undo(Option<(intf::Limit, TakeOff)>);

type TakeOff = fn(&intf::Limit);

impl Undo {
    /// Nothing was put there yet.
    pub(crate) fn nothing() -> Undo {
        Undo(None)
    }

    /// From now on there is something, which `how` takes off.
    pub(crate) fn arm(&mut self, limit: &intf::Limit, how: TakeOff) {
        self.0 = Some((*limit, how));
    }

    pub(crate) fn keep(&mut self) {
        self.0 = None;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some((limit, how)) = self.0 {
            how(&limit);
        }
    }
}
