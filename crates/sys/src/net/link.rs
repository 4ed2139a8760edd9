//! Links, addresses and routes.

use std::{collections::BTreeSet, ffi::CString, net::IpAddr, os::fd::AsRawFd};

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage as Message,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::{
        InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType,
        LinkMessage,
    },
    nsid::{NsidAttribute, NsidMessage},
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteType},
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

/// What a device is and what it is joined to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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
        let answers =
            self.ask("list the devices", Message::GetLink(LinkMessage::default()), NLM_F_DUMP)?;
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
            for answer in self.ask("list the routes", Message::GetRoute(query), NLM_F_DUMP)? {
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

    /// The largest packet, in bytes, without the Ethernet header.
    pub fn mtu(&mut self, index: u32) -> Result<u32, NetError> {
        self.attribute(index, "mtu", |attribute| match attribute {
            LinkAttribute::Mtu(mtu) => Some(mtu),
            _ => None,
        })
    }

    /// The largest packet, in bytes, that the stack hands to the device to be segmented later.
    pub fn gso_max_size(&mut self, index: u32) -> Result<u32, NetError> {
        self.attribute(index, "gso_max_size", |attribute| match attribute {
            LinkAttribute::GsoMaxSize(bytes) => Some(bytes),
            _ => None,
        })
    }

    /// Whether the packets of a device have Ethernet's header. Those of TUN, WireGuard and PPP begin with
    /// IP.
    pub fn is_ethernet(&mut self, index: u32) -> Result<bool, NetError> {
        let link = self.get_link(&format!("read the type of device {index}"), link_at(index))?;
        let layer = link.header.link_layer_type;
        Ok(matches!(layer, LinkLayerType::Ether | LinkLayerType::Loopback))
    }

    /// What the kernel says of a device in the attribute that `pick` takes.
    pub fn attribute<T>(
        &mut self,
        index: u32,
        what: &str,
        pick: impl Fn(LinkAttribute) -> Option<T>,
    ) -> Result<T, NetError> {
        let action = format!("read the {what} of device {index}");
        let link = self.get_link(&action, link_at(index))?;
        let found = link.attributes.into_iter().find_map(pick);
        found.ok_or_else(|| NetError::Malformed { action, detail: format!("no {what}") })
    }

    /// Which of some devices have their other end in another network namespace, as that of a pod.
    ///
    /// # Errors
    /// [`NetError`] when the kernel does not tell. A device that is gone leads nowhere.
    pub fn leading_into(
        &mut self,
        devices: &BTreeSet<u32>,
        netns: &NetNs,
    ) -> Result<BTreeSet<u32>, NetError> {
        // The kernel gives a namespace its number when it lists a device that leads there.
        self.devices()?;
        let mut query = NsidMessage::default();
        query.attributes.push(NsidAttribute::Fd(netns.fd().as_raw_fd().cast_unsigned()));
        let action = "find the number of a network namespace";
        let answers = self.ask(action, Message::GetNsId(query), NLM_F_ACK)?;
        let id = answers.into_iter().find_map(|answer| match answer {
            Message::NewNsId(message) => message.attributes.into_iter().find_map(|a| match a {
                // One without a number has -1: no device leads there.
                NsidAttribute::Id(id) if id >= 0 => Some(id),
                _ => None,
            }),
            _ => None,
        });
        let Some(id) = id else { return Ok(BTreeSet::new()) };
        let leads_there = |link: &LinkMessage| {
            link.attributes.iter().any(|a| matches!(a, LinkAttribute::LinkNetNsId(to) if *to == id))
        };
        let there = devices.iter().copied().filter(|index| {
            self.get_link("find a device", link_at(*index)).is_ok_and(|link| leads_there(&link))
        });
        Ok(there.collect())
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
        message.header.family =
            if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
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

    fn get_link(&mut self, action: &str, query: LinkMessage) -> Result<LinkMessage, NetError> {
        self.ask(action, Message::GetLink(query), NLM_F_ACK)?
            .into_iter()
            .find_map(|answer| match answer {
                Message::NewLink(link) => Some(link),
                _ => None,
            })
            .ok_or_else(|| NetError::Malformed { action: action.into(), detail: "no link".into() })
    }
}

fn device(link: LinkMessage) -> Device {
    let flags = link.header.flags;
    let mut device = Device {
        index: link.header.index,
        up: flags.contains(LinkFlags::Up),
        loopback: flags.contains(LinkFlags::Loopback),
        ..Device::default()
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

/// Whether a device may have this name.
///
/// # Errors
/// [`NetError::Invalid`] if the kernel would not take it.
pub fn check_name(name: &str) -> Result<(), NetError> {
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
