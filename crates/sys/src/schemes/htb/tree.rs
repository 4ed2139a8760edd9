//! The HTB of a device: its qdisc, classes and leaves, as [`tidegate_core::htb`] wants them.
//!
//! Whatever is there already is changed in place, so that no packet is lost that waits: only a leaf that gets
//! another kind of queue is made anew. All of it is known by the qdisc's handle, `7467:`.

use std::time::Duration;

use tidegate_core::{
    Bytes, Rate,
    htb::{self, Branch, MAJOR, QUEUE_MAJOR, ROOT_SLOT, Shape},
};

use crate::{
    backlog::{self, Backlog},
    limit::LimitError,
    net::{
        NetError, Netlink,
        qdisc::{Fifo, FqCodel, Handle, Htb, HtbClass, Place, Qdisc, Verb},
    },
    root_qdisc::{self, ROOT},
};

/// What CoDel is content with, at least; and at low rates the time of so many frames.
const CODEL_TARGET: Duration = Duration::from_millis(5);
const CODEL_FRAMES: Bytes = Bytes(2 * 1514);
/// The kernel's own default.
const CODEL_PACKETS: u32 = 10_240;
/// The memory that a queue's packets take is no more than so many times their bytes, for frames.
const MEMORY_FACTOR: u64 = 2;

fn class(minor: u16) -> Handle {
    Handle::new(MAJOR, minor)
}

fn queue(slot: u16) -> Handle {
    Handle::new(QUEUE_MAJOR + slot, 0)
}

/// Puts an HTB at the root of a device that no other limit has (see [`root_qdisc::put`]).
pub(crate) fn install_root(
    netlink: &mut Netlink,
    ifindex: u32,
    device: &str,
    force: bool,
) -> Result<(), LimitError> {
    let htb = Htb::new(htb::leaf_minor(ROOT_SLOT));
    root_qdisc::put(netlink, ifindex, device, force, &htb)
}

/// Takes the two classes of a limit off a device with our HTB.
pub(crate) fn remove_classes(
    netlink: &mut Netlink,
    ifindex: u32,
    slot: u16,
) -> Result<(), NetError> {
    if root_qdisc::ours(&netlink.qdisc_stats(ifindex)?).is_none() {
        return Ok(());
    }
    netlink.delete_class(ifindex, class(htb::leaf_minor(slot)))?;
    netlink.delete_class(ifindex, class(htb::inner_minor(slot)))
}

/// Makes the classes of a device what they shall be, and says where the packets of each limit wait: in the
/// order of `branches`. `known` has what was said before. The classes of the slots `kept` stay as they are.
pub(crate) fn sync(
    netlink: &mut Netlink,
    ifindex: u32,
    branches: &[Branch],
    kept: &[u16],
    known: impl Fn(u16) -> Option<Backlog>,
) -> Result<Vec<Backlog>, LimitError> {
    let classes = netlink.class_stats(ifindex)?;
    let qdiscs = netlink.qdisc_stats(ifindex)?;
    let is_there = |handle: Handle| classes.iter().any(|class| class.handle == handle);
    let mut backlogs = Vec::with_capacity(branches.len());
    for branch in branches {
        let above = branch.parent.map_or(ROOT, |parent| class(htb::inner_minor(parent)));
        let inner = class(htb::inner_minor(branch.slot));
        let leaf = class(htb::leaf_minor(branch.slot));
        for (handle, parent, shape) in [(inner, above, &branch.inner), (leaf, inner, &branch.leaf)]
        {
            let verb = if is_there(handle) { Verb::Change } else { Verb::Add };
            netlink.set_class(verb, Place { ifindex, parent, handle }, &of_shape(shape))?;
        }
        let is = qdiscs.iter().find(|q| q.parent == leaf && q.handle == queue(branch.slot));
        let stays = set_queue(
            netlink,
            Place { ifindex, parent: leaf, handle: queue(branch.slot) },
            branch,
            is.map(|q| q.kind.as_str()),
        )?;
        let rate = branch.inner.ceil;
        backlogs.push(match known(branch.slot).filter(|backlog| stays && backlog.qdisc != 0) {
            Some(backlog) => Backlog { rate_bit_s: rate.bit_s(), ..backlog },
            None => backlog::locate(ifindex, queue(branch.slot), rate)?,
        });
    }
    // What no limit has any more: first leaves, then whatever has become empty.
    let is_wanted =
        |slot: u16| kept.contains(&slot) || branches.iter().any(|branch| branch.slot == slot);
    let mut leftover: Vec<_> = classes
        .iter()
        .filter(|c| c.handle.major == MAJOR && !is_wanted(c.handle.minor >> 4))
        .collect();
    for _ in 0..=tidegate_core::class::MAX_DEPTH {
        leftover.retain(|class| netlink.delete_class(ifindex, class.handle).is_err());
    }
    match leftover.first() {
        None => Ok(backlogs),
        Some(class) => Err(netlink
            .delete_class(ifindex, class.handle)
            .err()
            .map_or_else(|| LimitError::NoQueue { ifindex }, LimitError::from)),
    }
}

/// Makes the queue of a leaf what it shall be; false if it has been made anew.
fn set_queue(
    netlink: &mut Netlink,
    place: Place,
    branch: &Branch,
    is: Option<&str>,
) -> Result<bool, LimitError> {
    let bytes = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
    let fifo = Fifo::Bytes(bytes(branch.queue.0));
    let fair = FqCodel {
        limit_packets: CODEL_PACKETS,
        memory_bytes: bytes(branch.queue.0.saturating_mul(MEMORY_FACTOR)),
        target: CODEL_TARGET.max(Duration::from_nanos(branch.inner.ceil.time_for(CODEL_FRAMES).0)),
    };
    // With a threshold of its own a queue is one queue, whose length means something.
    let wanted: &[&dyn Qdisc] = if branch.mark.is_some() { &[&fifo] } else { &[&fair, &fifo] };
    if let Some(same) = wanted.iter().find(|qdisc| is == Some(qdisc.kind())) {
        netlink.set_qdisc(Verb::Change, place, *same)?;
        return Ok(true);
    }
    if is.is_some() {
        // A qdisc of another kind cannot get a handle that is taken.
        netlink.delete_qdisc(place.ifindex, place.parent)?;
    }
    for (i, qdisc) in wanted.iter().enumerate() {
        match netlink.set_qdisc(Verb::Replace, place, *qdisc) {
            Err(e) if e.is_absent() && i + 1 < wanted.len() => {}
            done => return done.map(|()| false).map_err(LimitError::from),
        }
    }
    Ok(false)
}

fn of_shape(shape: &Shape) -> HtbClass {
    let bytes = |bytes: Bytes| Some(u32::try_from(bytes.0).unwrap_or(u32::MAX));
    // The kernel counts in bytes a second; a rate is never above its limit.
    let rate = |rate: Rate| rate.bit_s() / 8 * 8;
    HtbClass {
        ceil_bit_s: Some(rate(shape.ceil)),
        burst_bytes: bytes(shape.burst),
        cburst_bytes: bytes(shape.cburst),
        quantum_bytes: bytes(shape.quantum).unwrap_or(u32::MAX),
        ..HtbClass::new(rate(shape.rate))
    }
}

/// What the kernel says of a limit's classes.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Figures {
    /// What its inner class has sent, with those inside it.
    pub sent_packets: u64,
    pub sent_bytes: u64,
    /// What its own queue has dropped.
    pub dropped_packets: u64,
    /// What waits in its own queue.
    pub waiting_bytes: u64,
}

/// Reads what a limit does; `None` when its classes are not there.
pub(crate) fn figures(
    netlink: &mut Netlink,
    ifindex: u32,
    slot: u16,
) -> Result<Option<Figures>, NetError> {
    let classes = netlink.class_stats(ifindex)?;
    let qdiscs = netlink.qdisc_stats(ifindex)?;
    let inner = classes.iter().find(|c| c.handle == class(htb::inner_minor(slot)));
    let queue = qdiscs.iter().find(|q| q.handle == queue(slot));
    let (Some(inner), Some(queue)) = (inner, queue.filter(|_| root_qdisc::ours(&qdiscs).is_some()))
    else {
        return Ok(None);
    };
    Ok(Some(Figures {
        sent_packets: inner.sent_packets,
        sent_bytes: inner.sent_bytes,
        dropped_packets: queue.drops.into(),
        waiting_bytes: queue.backlog_bytes.into(),
    }))
}
