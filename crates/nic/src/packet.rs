//! A frame in a buffer.

use std::{fmt, mem, ptr::NonNull, slice};

use crate::{
    buffer::{Head, give_back},
    headers::{Headers, Network, tcp_bytes},
    vnet::{Segmentation, VnetHeader},
};

/// Length of the header of UDP, in bytes.
const UDP_BYTES: usize = 8;

/// An Ethernet frame in a buffer of a [`PacketPool`](crate::PacketPool), with its offload metadata beside
/// it.
///
/// One pointer long, so it may be moved about freely. Dropping it, in any thread, gives the buffer back.
pub struct Packet(NonNull<Head>);

// SAFETY: a packet is the only user of its head and buffer, and comes home by atomic operations only.
unsafe impl Send for Packet {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Packet {}

impl Packet {
    /// # Safety
    ///
    /// The head belongs to nobody else, and its pool counts it as abroad.
    pub(crate) unsafe fn from_head(head: NonNull<Head>) -> Self {
        Self(head)
    }

    /// The head, which is the caller's to bring home now.
    pub(crate) fn into_head(self) -> NonNull<Head> {
        let head = self.0;
        mem::forget(self);
        head
    }

    pub(crate) fn head(&self) -> &Head {
        // SAFETY: heads live while a packet is abroad, and this packet is its only user.
        unsafe { self.0.as_ref() }
    }

    fn head_mut(&mut self) -> &mut Head {
        // SAFETY: as in `head`.
        unsafe { self.0.as_mut() }
    }

    /// The Ethernet frame, without FCS.
    pub fn frame(&self) -> &[u8] {
        let head = self.head();
        // SAFETY: `start + len` is within the buffer, which is ours alone; it was zeroed when made.
        unsafe {
            slice::from_raw_parts(head.data.as_ptr().add(head.start as usize), head.len as usize)
        }
    }

    /// The Ethernet frame, to be changed in place.
    pub fn frame_mut(&mut self) -> &mut [u8] {
        let len = self.head().len as usize;
        &mut self.room_mut()[..len]
    }

    /// All of the buffer from the begin of the frame on: what a frame can grow to. What is behind the
    /// frame is left over from earlier ones.
    pub fn room_mut(&mut self) -> &mut [u8] {
        let head = self.head_mut();
        let (start, bytes) = (head.start as usize, head.class.bytes());
        // SAFETY: `start` is within the buffer of `bytes`, which is ours alone.
        unsafe { slice::from_raw_parts_mut(head.data.as_ptr().add(start), bytes - start) }
    }

    /// Says how long the frame is, in bytes, after it was written into [`room_mut`](Self::room_mut). More
    /// than there is room for counts as all of the room.
    pub fn set_len(&mut self, bytes: usize) {
        let room = self.room_mut().len();
        self.head_mut().len = bytes.min(room) as u32;
    }

    /// Puts the frame that the kernel has written at `start` in the buffer. False, and nothing is changed,
    /// if it is not within the buffer.
    pub(crate) fn set_place(&mut self, start: usize, bytes: usize) -> bool {
        let head = self.head_mut();
        let fits = start.checked_add(bytes).is_some_and(|end| end <= head.class.bytes());
        if fits {
            (head.start, head.len) = (start as u32, bytes as u32);
        }
        fits
    }

    /// Replaces the frame by a copy of another. False, and nothing is changed, if it does not fit.
    pub fn fill(&mut self, frame: &[u8]) -> bool {
        let Some(room) = self.room_mut().get_mut(..frame.len()) else { return false };
        room.copy_from_slice(frame);
        self.set_len(frame.len());
        true
    }

    /// The offload metadata.
    pub fn vnet(&self) -> &VnetHeader {
        &self.head().vnet
    }

    /// The offload metadata, to be changed.
    pub fn vnet_mut(&mut self) -> &mut VnetHeader {
        &mut self.head_mut().vnet
    }

    /// How many frames this will be on the wire: 1 if it is not to be cut.
    pub fn segments(&self) -> u32 {
        self.segmented().0
    }

    /// Bytes on the wire: those of every segment, each with all its headers. The Ethernet header counts,
    /// the FCS does not, as everywhere in Tidegate.
    pub fn wire_bytes(&self) -> u64 {
        let (segments, headers) = self.segmented();
        self.frame().len() as u64 + u64::from(segments - 1) * headers as u64
    }

    /// Segments, and the bytes of headers that each of them carries.
    pub(crate) fn segmented(&self) -> (u32, usize) {
        let Some(segmentation) = self.vnet().segmentation() else { return (1, 0) };
        let headers = self.header_bytes(segmentation);
        let payload = self.frame().len() - headers;
        (payload.div_ceil(usize::from(self.vnet().gso_size)).max(1) as u32, headers)
    }

    /// Bytes of headers of a frame that is to be cut; at most the frame's.
    fn header_bytes(&self, segmentation: Segmentation) -> usize {
        let (frame, vnet) = (self.frame(), self.vnet());
        let at = usize::from(vnet.csum_start);
        // The kernel says where the transport header is: true behind tunnels and unknown extensions too.
        let transport_bytes = match segmentation {
            _ if !vnet.needs_checksum() || at >= frame.len() => None,
            Segmentation::Tcp4 | Segmentation::Tcp6 => tcp_bytes(frame, at),
            Segmentation::Udp => Some(UDP_BYTES),
            Segmentation::Other => None,
        };
        match transport_bytes {
            Some(bytes) => (at + bytes).min(frame.len()),
            None => Headers::parse(frame).map_or(frame.len(), |headers| headers.bytes(frame)),
        }
    }

    /// A number that all packets of a flow share: from addresses, protocol and ports; of fragments and
    /// other protocols without ports; of frames other than IP from the MAC addresses and the EtherType. The
    /// two directions of a connection differ. `seed` is the same for all, and secret where a sender must
    /// not be able to choose flows that share a number.
    pub fn flow_hash(&self, seed: u64) -> u64 {
        let frame = self.frame();
        let Some(headers) = Headers::parse(frame) else { return mix(seed, frame.len() as u64) };
        let (source, destination) = headers.ports(frame).unwrap_or_default();
        let kind = match headers.network {
            Network::Other => u64::from(headers.ethertype),
            Network::Ipv4 | Network::Ipv6 => headers.protocol.unwrap_or_default().into(),
        };
        let rest = kind << 32 | u64::from(source) << 16 | u64::from(destination);
        headers.addresses(frame).chunks(8).fold(mix(seed, rest), |hash, chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            mix(hash, u64::from_ne_bytes(word))
        })
    }
}

/// Multiplies to 128 bits and folds: every bit of the input reaches the whole output.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    // The first digits of pi and of e after the point: odd enough, and nothing up the sleeve.
    let product = u128::from(a ^ 0x243f_6a88_85a3_08d3) * u128::from(b ^ 0xb7e1_5162_8aed_2a6b);
    product as u64 ^ (product >> 64) as u64
}

impl Drop for Packet {
    fn drop(&mut self) {
        // SAFETY: this was the only user of the buffer.
        unsafe { give_back(self.0) };
    }
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packet")
            .field("bytes", &self.frame().len())
            .field("vnet", self.vnet())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
