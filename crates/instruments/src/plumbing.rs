//! Requests to the kernel that the networks of tests and the lab need, and no limit does: bridges, routes,
//! settings and counters of devices.

use std::{io, net::IpAddr, os::fd::AsRawFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage as Message,
    link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage, Stats64},
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
};
use rustix::net::{SocketFlags, SocketType, socket_with};
use tidegate_sys::net::{NetError, NetNs, Netlink, check_name};

/// `ETHTOOL_STXCSUM`.
const SET_TX_CHECKSUM: u32 = 0x17;

/// A way to a network.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// The network's address; an unspecified address with prefix 0 is the default route.
    pub network: IpAddr,
    /// Length of the network's prefix in bits.
    pub prefix_len: u8,
    /// The next hop.
    pub gateway: IpAddr,
}

/// Makes a bridge, which is down. It forwards from the moment that it and its ports are up.
pub fn add_bridge(netlink: &mut Netlink, name: &str) -> Result<(), NetError> {
    check_name(name)?;
    let mut link = LinkMessage::default();
    link.attributes = vec![
        LinkAttribute::IfName(name.into()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]),
    ];
    let action = format!("make the bridge {name}");
    netlink.request(&action, Message::NewLink(link), NLM_F_CREATE | NLM_F_EXCL)
}

/// Makes a device a port of a bridge.
pub fn set_master(netlink: &mut Netlink, index: u32, bridge: u32) -> Result<(), NetError> {
    set_attribute(netlink, index, "bridge", LinkAttribute::Controller(bridge))
}

/// Sets the largest packet, in bytes, without the Ethernet header.
pub fn set_mtu(netlink: &mut Netlink, index: u32, mtu_bytes: u32) -> Result<(), NetError> {
    set_attribute(netlink, index, "mtu", LinkAttribute::Mtu(mtu_bytes))
}

/// Sets how many segments a packet may have that the stack hands to the device to be segmented later. With 1
/// every packet is sent on its own.
pub fn set_gso_max_segs(netlink: &mut Netlink, index: u32, segments: u32) -> Result<(), NetError> {
    set_attribute(netlink, index, "gso_max_segs", LinkAttribute::GsoMaxSegs(segments))
}

/// Sets the length, in packets, of queues that take the device's for their default.
pub fn set_txqueuelen(netlink: &mut Netlink, index: u32, packets: u32) -> Result<(), NetError> {
    set_attribute(netlink, index, "txqueuelen", LinkAttribute::TxQueueLen(packets))
}

fn set_attribute(
    netlink: &mut Netlink,
    index: u32,
    what: &str,
    attribute: LinkAttribute,
) -> Result<(), NetError> {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.attributes.push(attribute);
    let action = format!("set the {what} of device {index}");
    netlink.request(&action, Message::SetLink(link), 0)
}

/// Adds a route to the main table.
pub fn add_route(netlink: &mut Netlink, route: &Route) -> Result<(), NetError> {
    let Route { network, prefix_len, gateway } = *route;
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: match network {
            IpAddr::V4(_) => AddressFamily::Inet,
            IpAddr::V6(_) => AddressFamily::Inet6,
        },
        destination_prefix_length: prefix_len,
        table: RouteHeader::RT_TABLE_MAIN,
        protocol: RouteProtocol::Static,
        scope: RouteScope::Universe,
        kind: RouteType::Unicast,
        ..RouteHeader::default()
    };
    message.attributes.push(RouteAttribute::Gateway(gateway.into()));
    if prefix_len > 0 {
        message.attributes.push(RouteAttribute::Destination(network.into()));
    }
    let action = format!("add the route {network}/{prefix_len} via {gateway}");
    netlink.request(&action, Message::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL)
}

/// Reads a device's 64-bit counters, since it was made.
///
/// The counters of bytes count a packet as the device saw it: the headers of a packet that is still to be
/// segmented count once. The [wire meter](crate::wire_meter) measures what is on the wire.
pub fn link_stats(netlink: &mut Netlink, index: u32) -> Result<Stats64, NetError> {
    netlink.attribute(index, "64-bit counters", |attribute| match attribute {
        LinkAttribute::Stats64(stats) => Some(stats),
        _ => None,
    })
}

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Sets whether the stack may leave checksums, and with them segmentation, to the device (`ethtool -K
/// DEVICE tx on|off`). A veth device passes such packets on as they are, and whoever reads its other end by
/// AF_XDP cannot know: switch it off there.
pub fn set_tx_offload(netns: &NetNs, device: &str, on: bool) -> Result<(), NetError> {
    check_name(device)?;
    let refused = |source: io::Error| {
        let action = format!("switch the tx offload of device {device:?}");
        NetError::Refused { action, source, detail: String::new() }
    };
    let open = || {
        socket_with(rustix::net::AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
    };
    let socket = netns.run(open)?.map_err(|e| refused(e.into()))?;
    let mut value = Value { command: SET_TX_CHECKSUM, data: on.into() };
    // SAFETY: `ifreq` is integers and pointers, for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.as_bytes()) {
        *to = *from as _;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the kernel reads `request` and the `ethtool_value` that it points to; both are alive.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &mut request) };
    if done < 0 { Err(refused(io::Error::last_os_error())) } else { Ok(()) }
}
