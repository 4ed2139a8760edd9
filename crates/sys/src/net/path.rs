//! The devices by which packets to an address leave: the route's, and below a bridge the port.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage as Message,
    neighbour::{NeighbourAttribute, NeighbourMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteVia},
};

use super::{Device, NetError, Netlink};

/// VLANs on VLANs that are followed, at most.
const MAX_DEPTH: usize = 8;

/// The first step of a packet to an address.
#[derive(Debug)]
struct NextHop {
    device: u32,
    /// The gateway, or the address itself.
    address: IpAddr,
}

impl Netlink {
    /// The indices of the devices that a packet from one address to another passes on its way out, in this
    /// order; the last is the port of a bridge if its tables name one. Empty if no route leads there.
    ///
    /// # Errors
    /// [`NetError`] when the kernel refuses to look.
    pub fn way_out(&mut self, from: IpAddr, to: IpAddr) -> Result<Vec<u32>, NetError> {
        let Some(hop) = self.next_hop(from, to)? else { return Ok(Vec::new()) };
        let (mut way, bridge) = through_vlans(&self.devices()?, hop.device);
        if let Some(bridge) = bridge
            && let Some(link_address) = self.neighbour(&hop)?
        {
            way.extend(self.bridge_port(bridge, &link_address)?);
        }
        Ok(way)
    }

    /// Asks for the route; policy rules count, as far as they ask for the addresses.
    fn next_hop(&mut self, from: IpAddr, to: IpAddr) -> Result<Option<NextHop>, NetError> {
        let mut query = RouteMessage::default();
        query.header.address_family = to.into();
        let bits = if to.is_ipv4() { 32 } else { 128 };
        (query.header.source_prefix_length, query.header.destination_prefix_length) = (bits, bits);
        query.attributes =
            vec![RouteAttribute::Source(from.into()), RouteAttribute::Destination(to.into())];
        let answers = self.ask("find a route", Message::GetRoute(query), NLM_F_ACK);
        let answers = match answers {
            Err(e) if is_none(&e) => return Ok(None),
            answers => answers?,
        };
        let (mut device, mut address) = (None, to);
        for answer in answers {
            let Message::NewRoute(route) = answer else { continue };
            for attribute in route.attributes {
                match attribute {
                    RouteAttribute::Oif(index) => device = Some(index),
                    RouteAttribute::Gateway(RouteAddress::Inet(gateway))
                    | RouteAttribute::Via(RouteVia::Inet(gateway)) => address = gateway.into(),
                    RouteAttribute::Gateway(RouteAddress::Inet6(gateway))
                    | RouteAttribute::Via(RouteVia::Inet6(gateway)) => address = gateway.into(),
                    _ => {}
                }
            }
        }
        Ok(device.map(|device| NextHop { device, address }))
    }

    /// The link address of a neighbour, if the kernel knows it.
    fn neighbour(&mut self, hop: &NextHop) -> Result<Option<Vec<u8>>, NetError> {
        let mut query = NeighbourMessage::default();
        query.header.family = hop.address.into();
        query.header.ifindex = hop.device;
        query.attributes = vec![NeighbourAttribute::Destination(hop.address.into())];
        let answers = self.ask("find a neighbour", Message::GetNeighbour(query), NLM_F_ACK);
        let answers = match answers {
            Err(e) if is_none(&e) => return Ok(None),
            answers => answers?,
        };
        Ok(answers.into_iter().find_map(|answer| match answer {
            Message::NewNeighbour(neighbour) => {
                neighbour.attributes.into_iter().find_map(|attribute| match attribute {
                    NeighbourAttribute::LinkLayerAddress(address) => Some(address),
                    _ => None,
                })
            }
            _ => None,
        }))
    }

    /// The port of a bridge behind which a link address is, if the bridge has seen a frame from there.
    fn bridge_port(&mut self, bridge: u32, address: &[u8]) -> Result<Option<u32>, NetError> {
        let mut query = NeighbourMessage::default();
        query.header.family = AddressFamily::Bridge;
        let answers =
            self.ask("list the forwarding tables", Message::GetNeighbour(query), NLM_F_DUMP)?;
        Ok(answers.into_iter().find_map(|answer| {
            let Message::NewNeighbour(entry) = answer else { return None };
            let has = |wanted| entry.attributes.contains(&wanted);
            let is_it = has(NeighbourAttribute::Controller(bridge))
                && has(NeighbourAttribute::LinkLayerAddress(address.to_vec()));
            is_it.then_some(entry.header.ifindex)
        }))
    }
}

/// A device and those below it, as far as it is a VLAN; and the last if that is a bridge.
fn through_vlans(devices: &[Device], first: u32) -> (Vec<u32>, Option<u32>) {
    let at = |index: u32| devices.iter().find(|device| device.index == index);
    let below = |index: &u32| at(*index).filter(|device| device.kind == "vlan")?.below;
    let way: Vec<_> = std::iter::successors(Some(first), below).take(MAX_DEPTH).collect();
    let last = way.last().and_then(|index| at(*index));
    let bridge = last.filter(|device| device.kind == "bridge").map(|device| device.index);
    (way, bridge)
}

/// The kernel knows no such route or neighbour, or the route leads nowhere.
fn is_none(error: &NetError) -> bool {
    const NONE: [i32; 5] =
        [libc::ENOENT, libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EACCES, libc::EINVAL];
    error.errno().is_some_and(|errno| NONE.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vlans_are_followed_to_the_bridge_below() {
        let device = |index, kind: &str, below| Device {
            index,
            below,
            kind: kind.to_owned(),
            ..Device::default()
        };
        let devices = [
            device(2, "", None),
            device(3, "bridge", None),
            device(4, "vlan", Some(3)),
            device(5, "vlan", Some(4)),
            device(6, "vlan", Some(2)),
            device(7, "ipip", Some(2)),
            // No kernel has such a circle.
            device(8, "vlan", Some(8)),
        ];
        let from = |first| through_vlans(&devices, first);
        assert_eq!(from(2), (vec![2], None));
        assert_eq!(from(3), (vec![3], Some(3)));
        assert_eq!(from(5), (vec![5, 4, 3], Some(3)));
        assert_eq!(from(6), (vec![6, 2], None));
        assert_eq!(from(7), (vec![7], None));
        assert_eq!(from(8), (vec![8; MAX_DEPTH], None));
        assert_eq!(from(9), (vec![9], None), "it is gone");
    }
}
