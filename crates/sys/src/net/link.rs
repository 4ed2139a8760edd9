//! Links, addresses and routes.

use std::{collections::BTreeSet, ffi::CString, net::IpAddr, os::fd::AsRawFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage as Message,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
};

use super::{NetError, NetNs, Netlink};

/// The longest device name the kernel takes (`IFNAMSIZ` less the final zero).
const NAME_BYTES_MAX: usize = 15;

/// Two virtual Ethernet devices joined by a cable.
#[derive(Debug)]
pub struct VethPair<'a> {
    /// The end that appears in the handle's namespace.
    pub name: &'a str,
    pub peer: &'a str,
    /// Where the other end appears; none: in the handle's namespace too.
    pub peer_netns: Option<&'a NetNs>,
}

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

/// Counters of a device since it was made.
///
/// `*_bytes` count a packet as the device saw it: the headers of a packet that is still to be
/// segmented count once. `tidegate-instruments` measures what is on the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkStats {
    pub rx_packets: u64,
    pub rx_bytes: u64,
    /// Packets that came in and were dropped.
    pub rx_dropped: u64,
    pub tx_packets: u64,
    pub tx_bytes: u64,
    /// Packets that were to be sent and were dropped by the device.
    pub tx_dropped: u64,
}

/// What a device is and what it is joined to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its index in its network namespace.
    pub index: u32,
    pub name: String,
    pub up: bool,
    pub loopback: bool,
    /// `bridge`, `veth`, `tun`, `vlan` ...; empty for hardware.
    pub kind: String,
    /// The bridge or bond that it is a port of.
    pub master: Option<u32>,
    /// The device that it sits on, as a VLAN does.
    pub below: Option<u32>,
    /// The index of the other end of a veth pair, in the namespace where that is.
    pub peer: Option<u32>,
}

impl Netlink {
    /// Every device of the namespace.
    pub fn devices(&mut self) -> Result<Vec<Device>, NetError> {
        let answers = self.dump("list the devices", Message::GetLink(LinkMessage::default()))?;
        let devices = answers.into_iter().filter_map(|answer| match answer {
            Message::NewLink(link) => Some(device(link)),
            _ => None,
        });
        Ok(devices.collect())
    }

    /// The indices of the devices that default routes of the main table lead to.
    pub fn default_route_devices(&mut self) -> Result<BTreeSet<u32>, NetError> {
        let mut devices = BTreeSet::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut query = RouteMessage::default();
            query.header.address_family = family;
            for answer in self.dump("list the routes", Message::GetRoute(query))? {
                let Message::NewRoute(route) = answer else { continue };
                let RouteHeader { destination_prefix_length, table, kind, .. } = route.header;
                if destination_prefix_length != 0
                    || table != RouteHeader::RT_TABLE_MAIN
                    || kind != RouteType::Unicast
                {
                    continue;
                }
                for attribute in route.attributes {
                    match attribute {
                        RouteAttribute::Oif(index) => drop(devices.insert(index)),
                        RouteAttribute::MultiPath(hops) => {
                            devices.extend(hops.iter().map(|hop| hop.interface_index));
                        }
                        _ => {}
                    }
                }
            }
        }
        Ok(devices)
    }

    /// Makes a pair of virtual Ethernet devices; both are down.
    pub fn add_veth(&mut self, pair: &VethPair<'_>) -> Result<(), NetError> {
        check_name(pair.name)?;
        check_name(pair.peer)?;
        let mut peer = LinkMessage::default();
        peer.attributes.push(LinkAttribute::IfName(pair.peer.into()));
        if let Some(netns) = pair.peer_netns {
            peer.attributes.push(LinkAttribute::NetNsFd(netns.fd().as_raw_fd()));
        }
        let mut link = LinkMessage::default();
        link.attributes = vec![
            LinkAttribute::IfName(pair.name.into()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
            ]),
        ];
        let action = format!("make the veth pair {} and {}", pair.name, pair.peer);
        self.request(&action, Message::NewLink(link), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Makes a bridge, which is down. It forwards from the moment that it and its ports are up.
    pub fn add_bridge(&mut self, name: &str) -> Result<(), NetError> {
        check_name(name)?;
        let mut link = LinkMessage::default();
        link.attributes = vec![
            LinkAttribute::IfName(name.into()),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]),
        ];
        let action = format!("make the bridge {name}");
        self.request(&action, Message::NewLink(link), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Makes an intermediate functional block: a device that what another one receives can be sent through,
    /// so that it meets a qdisc. It is down.
    pub fn add_ifb(&mut self, name: &str) -> Result<(), NetError> {
        check_name(name)?;
        let mut link = LinkMessage::default();
        link.attributes = vec![
            LinkAttribute::IfName(name.into()),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Ifb)]),
        ];
        let action = format!("make the ifb device {name}");
        self.request(&action, Message::NewLink(link), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Makes a device a port of a bridge.
    pub fn set_master(&mut self, index: u32, bridge: u32) -> Result<(), NetError> {
        self.set_attribute(index, "bridge", LinkAttribute::Controller(bridge))
    }

    /// Deletes a device; of a veth pair, both ends.
    pub fn delete_link(&mut self, index: u32) -> Result<(), NetError> {
        let action = format!("delete device {index}");
        self.request(&action, Message::DelLink(link_at(index)), 0)
    }

    /// The index of a device.
    pub fn index_of(&mut self, name: &str) -> Result<u32, NetError> {
        check_name(name)?;
        let mut link = LinkMessage::default();
        link.attributes.push(LinkAttribute::IfName(name.into()));
        Ok(self.get_link(&format!("find the device {name:?}"), link)?.header.index)
    }

    /// Sets a device up or down.
    pub fn set_up(&mut self, index: u32, up: bool) -> Result<(), NetError> {
        let mut link = link_at(index);
        link.header.change_mask = LinkFlags::Up;
        link.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
        let action = format!("set device {index} {}", if up { "up" } else { "down" });
        self.request(&action, Message::SetLink(link), 0)
    }

    /// Sets the largest packet, in bytes, without the Ethernet header.
    pub fn set_mtu(&mut self, index: u32, mtu_bytes: u32) -> Result<(), NetError> {
        self.set_attribute(index, "mtu", LinkAttribute::Mtu(mtu_bytes))
    }

    /// The largest packet, in bytes, without the Ethernet header.
    pub fn mtu(&mut self, index: u32) -> Result<u32, NetError> {
        let action = format!("read the mtu of device {index}");
        let link = self.get_link(&action, link_at(index))?;
        let mtu = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Mtu(mtu) => Some(*mtu),
            _ => None,
        });
        mtu.ok_or_else(|| NetError::Malformed { action, detail: "no mtu".into() })
    }

    /// The largest packet, in bytes, that the stack hands to the device to be segmented later.
    pub fn gso_max_size(&mut self, index: u32) -> Result<u32, NetError> {
        let action = format!("read the gso_max_size of device {index}");
        let link = self.get_link(&action, link_at(index))?;
        let bytes = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::GsoMaxSize(bytes) => Some(*bytes),
            _ => None,
        });
        bytes.ok_or_else(|| NetError::Malformed { action, detail: "no gso_max_size".into() })
    }

    /// Sets how many segments such a packet may have. With 1 every packet is sent on its own.
    pub fn set_gso_max_segs(&mut self, index: u32, segments: u32) -> Result<(), NetError> {
        self.set_attribute(index, "gso_max_segs", LinkAttribute::GsoMaxSegs(segments))
    }

    /// Sets the length, in packets, of queues that take the device's for their default.
    pub fn set_txqueuelen(&mut self, index: u32, packets: u32) -> Result<(), NetError> {
        self.set_attribute(index, "txqueuelen", LinkAttribute::TxQueueLen(packets))
    }

    /// Gives a device an address. An IPv6 address is usable at once: duplicate address detection
    /// is left out.
    pub fn add_address(
        &mut self,
        index: u32,
        address: IpAddr,
        prefix_len: u8,
    ) -> Result<(), NetError> {
        let mut message = AddressMessage::default();
        message.header.family = family(address);
        message.header.prefix_len = prefix_len;
        message.header.index = index;
        message.attributes =
            vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
        if address.is_ipv6() {
            message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        let action = format!("add the address {address}/{prefix_len} to device {index}");
        self.request(&action, Message::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Adds a route to the main table.
    pub fn add_route(&mut self, route: &Route) -> Result<(), NetError> {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: family(route.network),
            destination_prefix_length: route.prefix_len,
            table: RouteHeader::RT_TABLE_MAIN,
            protocol: RouteProtocol::Static,
            scope: RouteScope::Universe,
            kind: RouteType::Unicast,
            ..RouteHeader::default()
        };
        message.attributes.push(RouteAttribute::Gateway(route.gateway.into()));
        if route.prefix_len > 0 {
            message.attributes.push(RouteAttribute::Destination(route.network.into()));
        }
        let action =
            format!("add the route {}/{} via {}", route.network, route.prefix_len, route.gateway);
        self.request(&action, Message::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Reads a device's 64-bit counters.
    pub fn link_stats(&mut self, index: u32) -> Result<LinkStats, NetError> {
        let action = format!("read the counters of device {index}");
        let link = self.get_link(&action, link_at(index))?;
        link.attributes
            .iter()
            .find_map(|attribute| match attribute {
                LinkAttribute::Stats64(s) => Some(LinkStats {
                    rx_packets: s.rx_packets,
                    rx_bytes: s.rx_bytes,
                    rx_dropped: s.rx_dropped,
                    tx_packets: s.tx_packets,
                    tx_bytes: s.tx_bytes,
                    tx_dropped: s.tx_dropped,
                }),
                _ => None,
            })
            .ok_or_else(|| NetError::Malformed { action, detail: "no 64-bit counters".into() })
    }

    fn get_link(&mut self, action: &str, query: LinkMessage) -> Result<LinkMessage, NetError> {
        self.get(action, Message::GetLink(query))?
            .into_iter()
            .find_map(|answer| match answer {
                Message::NewLink(link) => Some(link),
                _ => None,
            })
            .ok_or_else(|| NetError::Malformed { action: action.into(), detail: "no link".into() })
    }

    fn set_attribute(
        &mut self,
        index: u32,
        what: &str,
        attribute: LinkAttribute,
    ) -> Result<(), NetError> {
        let mut link = link_at(index);
        let action = format!("set the {what} of device {index}");
        link.attributes.push(attribute);
        self.request(&action, Message::SetLink(link), 0)
    }
}

fn device(link: LinkMessage) -> Device {
    let flags = link.header.flags;
    let mut device = Device {
        index: link.header.index,
        name: String::new(),
        up: flags.contains(LinkFlags::Up),
        loopback: flags.contains(LinkFlags::Loopback),
        kind: String::new(),
        master: None,
        below: None,
        peer: None,
    };
    let (mut below, mut elsewhere) = (None, false);
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => device.name = name,
            LinkAttribute::Controller(master) => device.master = Some(master),
            LinkAttribute::Link(index) => below = Some(index),
            LinkAttribute::LinkNetNsId(_) => elsewhere = true,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    if let LinkInfo::Kind(kind) = info {
                        device.kind = kind.to_string();
                    }
                }
            }
            _ => {}
        }
    }
    // The other end of a veth pair is no device below.
    match device.kind == "veth" {
        true => device.peer = below,
        false => device.below = below.filter(|_| !elsewhere),
    }
    device
}

fn link_at(index: u32) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

pub(super) fn check_name(name: &str) -> Result<(), NetError> {
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len()) && CString::new(name).is_ok();
    if fits && !name.contains(['/', ' ', ':']) {
        return Ok(());
    }
    Err(NetError::Invalid {
        field: "the name of a device",
        read: format!("{name:?}"),
        expected: "use 1 to 15 bytes without space, slash or colon",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_checked_before_the_kernel_sees_them() {
        assert!(check_name("eth0").is_ok());
        for name in ["", "sixteen-bytes-ab", "a b", "a/b", "a:b", "a\0"] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }
}
