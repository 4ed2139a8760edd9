//! What a limit of a tree has in the kernel: its slot, and the device on which it is.

use tidegate_core::Direction;

use crate::{
    intf,
    net::{NetError, Netlink},
};

/// The pins of maps of a root that its limits read, beside those of every limit.
pub(crate) const SLOTS_PIN: &str = "slots";
pub(crate) const MARKED_PIN: &str = "marked";

/// The ifb device of a device.
pub(super) fn ifb_name(ifindex: u32) -> String {
    format!("tgifb{ifindex}")
}

/// The index of the device that an ifb device of this name serves.
pub(crate) fn served_by(ifb: &str) -> Option<u32> {
    let ifindex = ifb.strip_prefix("tgifb")?.parse().ok()?;
    (ifb == ifb_name(ifindex)).then_some(ifindex)
}

/// The device whose qdisc holds a direction of a limit; `None` if that is not limited.
pub(super) fn device_of(
    netlink: &mut Netlink,
    root: &intf::Limit,
    direction: Direction,
) -> Result<Option<u32>, NetError> {
    if root.rate(direction).is_none() {
        return Ok(None);
    }
    if direction == root.leaving() {
        return Ok(Some(root.ifindex));
    }
    netlink.index_of(&ifb_name(root.ifindex)).map(Some)
}
