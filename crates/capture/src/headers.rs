//! The headers of a captured packet, as far as they were kept: which flow it belongs to, how long it is,
//! and what counts its packets.
//!
//! Lengths come from the headers, not from what was captured: a capture of 42 bytes a packet is as good as
//! a whole one.

use std::{fmt, net::IpAddr};

use crate::reader::Frame;

/// VLAN tags that are skipped.
pub const TAGS_MAX: usize = 8;
/// IPv6 extension headers that are skipped.
pub const EXTENSIONS_MAX: usize = 16;

/// SACK blocks of a packet, at most.
pub const SACKS_MAX: usize = 4;

const TCP: u8 = 6;
const UDP: u8 = 17;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;

/// What tells flows apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowKey {
    /// From.
    pub source: IpAddr,
    /// To.
    pub destination: IpAddr,
    /// From; 0 where there is none.
    pub source_port: u16,
    /// To; 0 where there is none.
    pub destination_port: u16,
    /// IP protocol number.
    pub protocol: u8,
}

impl FlowKey {
    /// The flow the other way.
    pub fn reversed(self) -> FlowKey {
        FlowKey {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            protocol: self.protocol,
        }
    }

    /// The protocol's name.
    pub fn protocol_name(&self) -> String {
        match self.protocol {
            TCP => "tcp".to_owned(),
            UDP => "udp".to_owned(),
            other => format!("ip{other}"),
        }
    }

    /// Whether it is TCP.
    pub fn is_tcp(&self) -> bool {
        self.protocol == TCP
    }
}

impl fmt::Display for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = |address: IpAddr, port: u16| match (address, port) {
            (address, 0) => address.to_string(),
            (IpAddr::V4(address), port) => format!("{address}:{port}"),
            (IpAddr::V6(address), port) => format!("[{address}]:{port}"),
        };
        let from = end(self.source, self.source_port);
        write!(
            f,
            "{} {from} > {}",
            self.protocol_name(),
            end(self.destination, self.destination_port)
        )
    }
}

/// A packet, read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// Its flow. A fragment that is not the first has no ports.
    pub key: FlowKey,
    /// Its length from the IP header on.
    pub ip_bytes: u32,
    /// Its length on the wire, as far as the capture shows it.
    pub wire_bytes: u32,
    /// The identification of IPv4.
    pub ip_id: Option<u16>,
    /// Whether it is a fragment, and which.
    pub fragment: Fragment,
    /// What it carries.
    pub transport: Transport,
}

/// Whether a packet is a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fragment {
    /// It is whole.
    Whole,
    /// The first, with this identification.
    First(u32),
    /// A later one.
    Later(u32),
}

/// What a packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp(Tcp),
    /// UDP; what could be RTP's sequence number and source.
    Udp {
        /// Sequence number and source, if the payload has the form of RTP.
        rtp: Option<(u16, u32)>,
    },
    /// Anything else, or cut off.
    Other,
}

/// A TCP segment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tcp {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement, if it has one.
    pub ack: Option<u32>,
    /// Sequence numbers that it takes: payload, SYN and FIN.
    pub length: u32,
    /// SYN is set.
    pub syn: bool,
    /// SACK blocks, as far as they were kept; an empty one ends them.
    pub sack: [(u32, u32); SACKS_MAX],
    /// The sender's time stamp (RFC 7323).
    pub stamp: Option<u32>,
}

impl Tcp {
    /// Its SACK blocks.
    pub fn sacks(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.sack.iter().copied().take_while(|(start, end)| start != end)
    }
}

fn u16_at(data: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(data.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(data.get(at..at + 4)?.try_into().ok()?))
}

/// Reads a packet; none if it is not IP or was cut off before its addresses.
pub fn parse(frame: &Frame<'_>) -> Option<Packet> {
    let data = frame.data;
    let (at, kind) = match frame.link {
        1 => ethernet(data, 12)?,
        // Linux cooked: the protocol stands last, or first.
        113 => ethernet(data, 14)?,
        276 => match u16_at(data, 0)? {
            protocol @ (0x8100 | 0x88a8 | 0x9100) => tags(data, 20, protocol)?,
            protocol => (20, protocol),
        },
        // Loopback: the address family in the byte order of some machine.
        0 | 108 => (4, version(data, 4)?),
        12 | 14 | 101 | 228 | 229 => (0, version(data, 0)?),
        _ => return None,
    };
    match kind {
        IPV4 => ipv4(frame, at),
        IPV6 => ipv6(frame, at),
        _ => None,
    }
}

/// Whether the link type is one that is read.
pub fn reads(link: i32) -> bool {
    matches!(link, 0 | 1 | 12 | 14 | 101 | 108 | 113 | 228 | 229 | 276)
}

/// The protocol by the version of the IP header at `at`.
fn version(data: &[u8], at: usize) -> Option<u16> {
    match data.get(at)? >> 4 {
        4 => Some(IPV4),
        6 => Some(IPV6),
        _ => None,
    }
}

/// Where the payload begins, and its protocol, if the protocol stands at `at`.
fn ethernet(data: &[u8], at: usize) -> Option<(usize, u16)> {
    tags(data, at + 2, u16_at(data, at)?)
}

/// Skips VLAN tags: each is two bytes of tag and the next protocol.
fn tags(data: &[u8], mut at: usize, mut protocol: u16) -> Option<(usize, u16)> {
    for _ in 0..TAGS_MAX {
        if !matches!(protocol, 0x8100 | 0x88a8 | 0x9100) {
            break;
        }
        protocol = u16_at(data, at + 2)?;
        at += 4;
    }
    // Point-to-point over Ethernet: six bytes of session, then its own protocol.
    if protocol == 0x8864 {
        protocol = match u16_at(data, at + 6)? {
            0x0021 => IPV4,
            0x0057 => IPV6,
            _ => return None,
        };
        at += 8;
    }
    Some((at, protocol))
}

fn ipv4(frame: &Frame<'_>, at: usize) -> Option<Packet> {
    let ip = frame.data.get(at..)?;
    let head = usize::from(ip.first()? & 0xf) * 4;
    if ip[0] >> 4 != 4 || head < 20 {
        return None;
    }
    let address = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(ip.get(at..at + 4)?).ok()?));
    let (source, destination) = (address(12)?, address(16)?);
    let left = frame.wire_bytes.saturating_sub(at as u32);
    // A segment that hardware will cut has no length yet.
    let ip_bytes = match u32::from(u16_at(ip, 2)?) {
        0 => left,
        length => length,
    };
    let id = u16_at(ip, 4)?;
    let flags = u16_at(ip, 6)?;
    let fragment = match (flags & 0x1fff, flags & 0x2000 != 0) {
        (0, false) => Fragment::Whole,
        (0, true) => Fragment::First(id.into()),
        _ => Fragment::Later(id.into()),
    };
    let key = FlowKey { source, destination, source_port: 0, destination_port: 0, protocol: ip[9] };
    let ip = Ip { key, bytes: ip_bytes, head_bytes: head, id: Some(id), fragment };
    Some(packet(frame, at, &ip))
}

fn ipv6(frame: &Frame<'_>, at: usize) -> Option<Packet> {
    let ip = frame.data.get(at..)?;
    if ip.first()? >> 4 != 6 {
        return None;
    }
    let address = |at: usize| Some(IpAddr::from(<[u8; 16]>::try_from(ip.get(at..at + 16)?).ok()?));
    let (source, destination) = (address(8)?, address(24)?);
    let left = frame.wire_bytes.saturating_sub(at as u32);
    let ip_bytes = match u32::from(u16_at(ip, 4)?) {
        // A jumbogram, or a segment that hardware will cut.
        0 => left,
        length => length + 40,
    };
    let (mut next, mut offset, mut fragment) = (ip[6], 40, Fragment::Whole);
    for _ in 0..EXTENSIONS_MAX {
        let length = match next {
            // Hop-by-hop, routing, destination, mobility, HIP, shim6.
            0 | 43 | 60 | 135 | 139 | 140 => ip.get(offset + 1).map(|l| usize::from(*l) * 8 + 8),
            44 => {
                let (offset_flags, id) = (u16_at(ip, offset + 2), u32_at(ip, offset + 4));
                let (Some(flags), Some(id)) = (offset_flags, id) else { break };
                fragment = match (flags >> 3, flags & 1) {
                    (0, 0) => Fragment::Whole,
                    (0, _) => Fragment::First(id),
                    _ => Fragment::Later(id),
                };
                Some(8)
            }
            // Authentication.
            51 => ip.get(offset + 1).map(|l| usize::from(*l) * 4 + 8),
            _ => break,
        };
        let (Some(length), Some(protocol)) = (length, ip.get(offset)) else { break };
        next = *protocol;
        offset += length;
    }
    let key = FlowKey { source, destination, source_port: 0, destination_port: 0, protocol: next };
    let ip = Ip { key, bytes: ip_bytes, head_bytes: offset, id: None, fragment };
    Some(packet(frame, at, &ip))
}

/// The part of a packet that its IP headers say.
struct Ip {
    key: FlowKey,
    bytes: u32,
    head_bytes: usize,
    id: Option<u16>,
    fragment: Fragment,
}

/// The packet whose IP header begins at `at`, with the ports and counters behind its headers.
fn packet(frame: &Frame<'_>, at: usize, ip: &Ip) -> Packet {
    let packet = Packet {
        time_ns: frame.time_ns,
        key: ip.key,
        ip_bytes: ip.bytes,
        wire_bytes: frame.wire_bytes,
        ip_id: ip.id,
        fragment: ip.fragment,
        transport: Transport::Other,
    };
    let payload = ip.bytes.saturating_sub(ip.head_bytes as u32);
    let data = frame.data.get(at + ip.head_bytes..).unwrap_or_default();
    let (Some(source_port), Some(destination_port)) = (u16_at(data, 0), u16_at(data, 2)) else {
        return packet;
    };
    if matches!(packet.fragment, Fragment::Later(_)) || !matches!(packet.key.protocol, TCP | UDP) {
        return packet;
    }
    let key = FlowKey { source_port, destination_port, ..packet.key };
    let transport = match packet.key.protocol {
        UDP => Transport::Udp { rtp: rtp(data) },
        _ => tcp(data, payload).map_or(Transport::Other, Transport::Tcp),
    };
    Packet { key, transport, ..packet }
}

/// Sequence number and source of what has the form of RTP (RFC 3550): version 2, no control packet.
fn rtp(udp: &[u8]) -> Option<(u16, u32)> {
    let (first, second) = (*udp.get(8)?, *udp.get(9)?);
    let control = (72..=76).contains(&(second & 0x7f));
    if first >> 6 != 2 || control {
        return None;
    }
    Some((u16_at(udp, 10)?, u32_at(udp, 16)?))
}

fn tcp(data: &[u8], payload: u32) -> Option<Tcp> {
    let (seq, ack) = (u32_at(data, 4)?, u32_at(data, 8)?);
    let head = usize::from(data.get(12)? >> 4) * 4;
    let flags = *data.get(13)?;
    let (fin, syn) = (flags & 1 != 0, flags & 2 != 0);
    let length = payload.checked_sub(head as u32)? + u32::from(fin) + u32::from(syn);
    let mut tcp =
        Tcp { seq, ack: (flags & 0x10 != 0).then_some(ack), length, syn, ..Tcp::default() };
    options(data.get(20..head.min(data.len())).unwrap_or_default(), &mut tcp);
    Some(tcp)
}

/// Reads SACK blocks (RFC 2018) and the time stamp (RFC 7323) from the options, as far as they were kept.
fn options(options: &[u8], tcp: &mut Tcp) -> Option<()> {
    let mut at = 0;
    // Each step is at least a byte.
    loop {
        let length = match options.get(at)? {
            0 => return None,
            1 => 1,
            _ => usize::from(*options.get(at + 1)?).max(2),
        };
        match options[at] {
            5 => {
                for (block, from) in tcp.sack.iter_mut().zip((at + 2..at + length).step_by(8)) {
                    *block = (u32_at(options, from)?, u32_at(options, from + 4)?);
                }
            }
            8 => tcp.stamp = Some(u32_at(options, at + 2)?),
            _ => {}
        }
        at += length;
    }
}
