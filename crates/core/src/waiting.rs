//! The flow of a packet that waits in a queue, by its network header: the model of `bpf/waiting/waiting.h`.

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Bytes of a packet that are read: the longest header of IPv4, and ports.
pub const HEADER_BYTES: usize = 64;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Packets of one protocol from one end to another. Ports are 0 where there are none, and for fragments, so
/// that all fragments of a packet are one flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// The protocol number of IPv4; for IPv6 of what follows its header.
    pub protocol: u8,
    /// The source.
    pub from: SocketAddr,
    /// The destination.
    pub to: SocketAddr,
}

impl Flow {
    /// Reads a packet from its network header on; `None` if that is not IP.
    #[must_use]
    pub fn read(packet: &[u8]) -> Option<Flow> {
        let version = packet.first()? >> 4;
        let v4 = |at: usize| -> Option<IpAddr> {
            let octets: [u8; 4] = packet.get(at..at + 4)?.try_into().ok()?;
            Some(octets.into())
        };
        let v6 = |at: usize| -> Option<IpAddr> {
            let octets: [u8; 16] = packet.get(at..at + 16)?.try_into().ok()?;
            Some(Ipv6Addr::from(octets).to_canonical())
        };
        let (protocol, from, to, header, whole) = match version {
            4 => {
                let header = usize::from(packet[0] & 15) * 4;
                let (from, to) = (v4(12)?, v4(16)?);
                let whole = packet[6] & 0x3f == 0 && packet[7] == 0;
                (packet[9], from, to, Some(header).filter(|header| *header >= 20)?, whole)
            }
            6 => {
                let (from, to) = (v6(8)?, v6(24)?);
                (packet[6], from, to, 40, true)
            }
            _ => return None,
        };
        let ports =
            packet.get(header..header + 4).filter(|_| whole && matches!(protocol, TCP | UDP));
        let port =
            |at: usize| ports.map_or(0, |ports| u16::from_be_bytes([ports[at], ports[at + 1]]));
        Some(Flow {
            protocol,
            from: SocketAddr::new(from, port(0)),
            to: SocketAddr::new(to, port(2)),
        })
    }

    /// `tcp`, `udp`, or the number of another protocol.
    #[must_use]
    pub fn protocol_name(&self) -> Option<&'static str> {
        match self.protocol {
            TCP => Some("tcp"),
            UDP => Some("udp"),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An IPv4 header without options from 10.0.0.1 to 10.0.0.2, and what follows it.
    fn packet(protocol: u8, fragment: [u8; 2], rest: &[u8]) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[0] = 0x45;
        bytes[6..8].copy_from_slice(&fragment);
        bytes[9] = protocol;
        bytes[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        bytes[20..20 + rest.len()].copy_from_slice(rest);
        bytes
    }

    fn flow(protocol: u8, from: &str, to: &str) -> Option<Flow> {
        Some(Flow { protocol, from: from.parse().unwrap(), to: to.parse().unwrap() })
    }

    #[test]
    fn ends_are_read_from_headers() {
        let ports = [0x1f, 0x90, 0, 80];
        let whole = packet(TCP, [0x40, 0], &ports);
        assert_eq!(Flow::read(&whole), flow(TCP, "10.0.0.1:8080", "10.0.0.2:80"));
        assert_eq!(Flow::read(&whole[..23]), flow(TCP, "10.0.0.1:0", "10.0.0.2:0"));
        assert_eq!(Flow::read(&whole[..19]), None);
        assert_eq!(Flow::read(&packet(1, [0, 0], &ports)), flow(1, "10.0.0.1:0", "10.0.0.2:0"));
    }

    #[test]
    fn all_fragments_of_a_packet_are_one_flow() {
        let [first, last] = [[0x20, 0], [0, 9]].map(|at| Flow::read(&packet(UDP, at, &[1; 4])));
        assert_eq!(first, flow(UDP, "10.0.0.1:0", "10.0.0.2:0"));
        assert_eq!(first, last);
    }

    #[test]
    fn what_is_no_ip_is_of_nobody() {
        assert_eq!(Flow::read(&[]), None);
        assert_eq!(Flow::read(&[0x55; 64]), None);
        assert_eq!(Flow::read(&[0x41; 64]), None, "a header of 4 bytes");
    }
}
