//! Segmentation in software, for devices that cannot: a TCP or UDP segment of up to 64 KB becomes frames of
//! MTU size, with lengths, numbers, flags and checksums as the kernel's GSO would set them.

use std::collections::VecDeque;

use crate::{
    buffer::SMALL_BUFFER_BYTES,
    checksum::{fold, sum},
    headers::{Headers, Network},
    packet::Packet,
    pool::PacketPool,
    vnet::Segmentation,
};

/// Most segments of a frame: 64 KB at the least segment size that Linux negotiates (48 bytes), and more.
pub const SEGMENTS_MAX: u32 = 2048;

const IPV6_BYTES: usize = 40;
/// The flags of TCP that only the last segment has: FIN and PSH.
const TCP_LAST: u8 = 0x01 | 0x08;
/// The flag of TCP that only the first segment has: CWR.
const TCP_FIRST: u8 = 0x80;

/// Why a frame was not cut. Nothing was appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutError {
    /// The pool has not enough free small buffers now.
    NoBuffer,
    /// A segment would not fit a small buffer.
    TooLong,
    /// The headers are not those of what the metadata says, or there are more than [`SEGMENTS_MAX`].
    Unknown,
}

/// Cuts a frame with [`Segmentation`] into finished frames in small buffers of `pool`, appended to
/// `segments`.
///
/// Time is linear in the frame's length; each byte is copied once and summed once.
pub fn cut(
    packet: &Packet,
    pool: &mut PacketPool,
    segments: &mut VecDeque<Packet>,
) -> Result<(), CutError> {
    let frame = packet.frame();
    let size = usize::from(packet.vnet().gso_size);
    let headers = Headers::parse(frame).ok_or(CutError::Unknown)?;
    let transport_at = headers.transport_at.filter(|_| !headers.fragment);
    let transport_at = transport_at.ok_or(CutError::Unknown)?;
    let kind = packet.vnet().segmentation().ok_or(CutError::Unknown)?;
    // Where the transport's own length or checksum is; and the whole header must be there.
    let (checksum_at, least_bytes) = match (kind, headers.network, headers.protocol) {
        (Segmentation::Tcp4, Network::Ipv4, Some(6))
        | (Segmentation::Tcp6, Network::Ipv6, Some(6)) => (transport_at + 16, 20),
        (Segmentation::Udp, Network::Ipv4 | Network::Ipv6, Some(17)) => (transport_at + 6, 8),
        _ => return Err(CutError::Unknown),
    };
    let headers_bytes = headers.bytes(frame);
    // The metadata may have the transport header elsewhere: that is no frame that we know how to cut.
    let (segments_count, repeated_bytes) = packet.segmented();
    if headers_bytes < transport_at + least_bytes
        || headers_bytes != repeated_bytes
        || segments_count > SEGMENTS_MAX
    {
        return Err(CutError::Unknown);
    }
    if headers_bytes + size > SMALL_BUFFER_BYTES {
        return Err(CutError::TooLong);
    }
    let before = segments.len();
    let last = segments_count as usize - 1;
    let (head, payload) = frame.split_at(headers_bytes);
    for index in 0..=last {
        let part = &payload[index * size..payload.len().min((index + 1) * size)];
        let Some(mut segment) = pool.take(headers_bytes + part.len()) else {
            segments.truncate(before);
            return Err(CutError::NoBuffer);
        };
        segment.set_len(headers_bytes + part.len());
        let bytes = segment.frame_mut();
        bytes[..headers_bytes].copy_from_slice(head);
        bytes[headers_bytes..].copy_from_slice(part);
        finish_network(bytes, &headers, index);
        if kind == Segmentation::Udp {
            put16(bytes, transport_at + 4, bytes.len() - transport_at);
        } else {
            let at = transport_at + 4;
            let number =
                u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            let number = number.wrapping_add((index * size) as u32);
            bytes[at..at + 4].copy_from_slice(&number.to_be_bytes());
            if index != last {
                bytes[transport_at + 13] &= !TCP_LAST;
            }
            if index != 0 {
                bytes[transport_at + 13] &= !TCP_FIRST;
            }
        }
        finish_checksum(bytes, &headers, transport_at, checksum_at);
        segments.push_back(segment);
    }
    Ok(())
}

/// Sets the length, and of IPv4 the identification and the header's checksum.
fn finish_network(bytes: &mut [u8], headers: &Headers, index: usize) {
    let at = headers.network_at;
    if headers.network == Network::Ipv6 {
        put16(bytes, at + 4, bytes.len() - at - IPV6_BYTES);
        return;
    }
    let header_bytes = usize::from(bytes[at] & 0xf) * 4;
    put16(bytes, at + 2, bytes.len() - at);
    let identification = u16::from_be_bytes([bytes[at + 4], bytes[at + 5]]);
    put16(bytes, at + 4, usize::from(identification.wrapping_add(index as u16)));
    put16(bytes, at + 10, 0);
    let checksum = !fold(sum(&bytes[at..at + header_bytes]));
    put16(bytes, at + 10, checksum.into());
}

/// Sets the checksum of TCP or UDP over pseudo header, header and payload.
fn finish_checksum(bytes: &mut [u8], headers: &Headers, transport_at: usize, checksum_at: usize) {
    put16(bytes, checksum_at, 0);
    let transport = &bytes[transport_at..];
    let pseudo = sum(headers.addresses(bytes))
        + u64::from(headers.protocol.unwrap_or_default())
        + transport.len() as u64;
    let checksum = match fold(pseudo + sum(transport)) {
        // Zero means "none" to UDP; the two are the same number otherwise.
        0xffff => 0xffff,
        sum => !sum,
    };
    put16(bytes, checksum_at, checksum.into());
}

/// Writes 16 bits, big-endian; what is above them is cut off.
fn put16(bytes: &mut [u8], at: usize, value: usize) {
    bytes[at..at + 2].copy_from_slice(&(value as u16).to_be_bytes());
}

#[cfg(test)]
mod tests;
