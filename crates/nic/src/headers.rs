//! Where a frame's headers are: Ethernet with its VLAN tags, IPv4 or IPv6 with its extensions, TCP or UDP.
//!
//! Every access is checked, so any bytes may be read: what a truncated or unknown header would have said
//! is simply absent.

/// Most VLAN tags that are skipped.
pub const VLAN_TAGS_MAX: usize = 2;
/// Most IPv6 extension headers that are skipped: `TG_MAX_EXTENSION_HEADERS` of the eBPF programs.
pub const EXTENSION_HEADERS_MAX: usize = 4;
/// Length of the Ethernet header without tags, in bytes.
pub const ETHERNET_BYTES: usize = 14;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
/// 802.1Q, 802.1ad, and what was used before it.
const ETHERTYPES_VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Hop-by-hop, routing, fragment, destination options.
const EXTENSIONS: [u8; 4] = [0, 43, FRAGMENT, 60];
const FRAGMENT: u8 = 44;

/// The network header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// IPv4, whole.
    Ipv4,
    /// IPv6, whole.
    Ipv6,
    /// Something else.
    Other,
}

/// What [`Headers::parse`] found. Offsets are in bytes from the begin of the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headers {
    /// The type after all tags.
    pub ethertype: u16,
    /// The network header.
    pub network: Network,
    /// Where it begins; at most the frame's length.
    pub network_at: usize,
    /// The transport protocol (TCP 6, UDP 17, ...); none if IP does not say or the frame is not IP.
    pub protocol: Option<u8>,
    /// Where the transport header begins, if all before it is whole; at most the frame's length.
    pub transport_at: Option<usize>,
    /// One of several fragments, so that only the first has a transport header.
    pub fragment: bool,
}

impl Headers {
    /// Reads an Ethernet frame. None if it has not even an Ethernet header.
    pub fn parse(frame: &[u8]) -> Option<Self> {
        let mut ethertype = be16(frame, ETHERNET_BYTES - 2)?;
        let mut network_at = ETHERNET_BYTES;
        for _ in 0..VLAN_TAGS_MAX {
            let inner = be16(frame, network_at + 2);
            let Some(inner) = inner.filter(|_| ETHERTYPES_VLAN.contains(&ethertype)) else { break };
            ethertype = inner;
            network_at += 4;
        }
        let mut headers = Self {
            ethertype,
            network: Network::Other,
            network_at,
            protocol: None,
            transport_at: None,
            fragment: false,
        };
        match ethertype {
            ETHERTYPE_IPV4 => headers.parse_ipv4(frame),
            ETHERTYPE_IPV6 => headers.parse_ipv6(frame),
            _ => {}
        }
        Some(headers)
    }

    fn parse_ipv4(&mut self, frame: &[u8]) {
        let at = self.network_at;
        let Some(ip) = frame.get(at..at + IPV4_BYTES) else { return };
        let header_bytes = usize::from(ip[0] & 0xf) * 4;
        if ip[0] >> 4 != 4 || header_bytes < IPV4_BYTES {
            return;
        }
        self.network = Network::Ipv4;
        self.protocol = Some(ip[9]);
        // More fragments, or not the first.
        self.fragment = u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff != 0;
        self.transport_at = Some(at + header_bytes).filter(|end| *end <= frame.len());
    }

    fn parse_ipv6(&mut self, frame: &[u8]) {
        let at = self.network_at;
        let Some(ip) = frame.get(at..at + IPV6_BYTES) else { return };
        if ip[0] >> 4 != 6 {
            return;
        }
        self.network = Network::Ipv6;
        let mut protocol = ip[6];
        let mut end = at + IPV6_BYTES;
        for _ in 0..EXTENSION_HEADERS_MAX {
            if !EXTENSIONS.contains(&protocol) {
                break;
            }
            let Some(extension) = frame.get(end..end + 8) else { return };
            if protocol == FRAGMENT {
                self.fragment |= u16::from_be_bytes([extension[2], extension[3]]) & 0xfff9 != 0;
                end += 8;
            } else {
                end += (usize::from(extension[1]) + 1) * 8;
            }
            protocol = extension[0];
        }
        if !EXTENSIONS.contains(&protocol) {
            self.protocol = Some(protocol);
            self.transport_at = Some(end).filter(|end| *end <= frame.len());
        }
    }

    /// Source and destination address, one after the other: 8 bytes of IPv4, 32 of IPv6; of anything
    /// else the two MAC addresses.
    pub fn addresses<'a>(&self, frame: &'a [u8]) -> &'a [u8] {
        let range = match self.network {
            Network::Ipv4 => self.network_at + 12..self.network_at + 20,
            Network::Ipv6 => self.network_at + 8..self.network_at + 40,
            Network::Other => 0..12,
        };
        frame.get(range).unwrap_or_default()
    }

    /// Source and destination port of TCP or UDP; none of a fragment.
    pub fn ports(&self, frame: &[u8]) -> Option<(u16, u16)> {
        let at = self.transport_at.filter(|_| !self.fragment)?;
        if !matches!(self.protocol?, TCP | UDP) {
            return None;
        }
        Some((be16(frame, at)?, be16(frame, at + 2)?))
    }

    /// Length of all headers up to the payload of TCP or UDP, in bytes: what each segment repeats. Of
    /// other protocols up to the end of IP; at most the frame's length.
    pub fn bytes(&self, frame: &[u8]) -> usize {
        let Some(at) = self.transport_at else { return self.network_at };
        let transport_bytes = match self.protocol {
            Some(TCP) => tcp_bytes(frame, at).unwrap_or(0),
            Some(UDP) => UDP_BYTES,
            _ => 0,
        };
        (at + transport_bytes).min(frame.len())
    }
}

/// The length of the TCP header that begins at `at`, in bytes.
pub(crate) fn tcp_bytes(frame: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(frame.get(at + 12)? >> 4) * 4)
}

fn be16(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*frame.get(at..at + 2)?.first_chunk()?))
}
