//! The offload metadata that stands before each frame of a TAP: the virtio-net header (virtio 1.2, 5.1.6).
//!
//! It says that a checksum is still to be computed, or that the frame is a segment of up to 64 KB that a
//! later device cuts. The software NIC hands it on beside the frame, so segments stay whole.

use bytemuck::{Pod, Zeroable};

/// `struct virtio_net_hdr`, in the byte order of this machine.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct VnetHeader {
    /// [`NEEDS_CSUM`](Self::NEEDS_CSUM).
    pub flags: u8,
    /// What the frame is cut into; see [`Segmentation`].
    pub gso_type: u8,
    /// A hint at the length of all headers, in bytes: not to be relied on.
    pub hdr_len: u16,
    /// Payload of each segment in bytes; 0: one packet.
    pub gso_size: u16,
    /// With [`NEEDS_CSUM`](Self::NEEDS_CSUM): where the transport header begins, in bytes.
    pub csum_start: u16,
    /// With [`NEEDS_CSUM`](Self::NEEDS_CSUM): where its checksum is, in bytes from `csum_start`.
    pub csum_offset: u16,
}

/// How a frame is to be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segmentation {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP datagrams of one size, each with its header (USO).
    Udp,
    /// Something else: fragments of one UDP datagram (UFO), or a kind newer than this program.
    Other,
}

impl VnetHeader {
    /// Length in bytes.
    pub const BYTES: usize = size_of::<Self>();
    /// The transport checksum covers only the pseudo header yet.
    pub const NEEDS_CSUM: u8 = 1;

    const GSO_TCPV4: u8 = 1;
    const GSO_TCPV6: u8 = 4;
    const GSO_UDP_L4: u8 = 5;
    /// Flag in `gso_type`: the segments have CWR set on the first only.
    const GSO_ECN: u8 = 0x80;

    /// How the frame is to be cut; none for a single packet.
    pub fn segmentation(&self) -> Option<Segmentation> {
        if self.gso_size == 0 {
            return None;
        }
        match self.gso_type & !Self::GSO_ECN {
            0 => None,
            Self::GSO_TCPV4 => Some(Segmentation::Tcp4),
            Self::GSO_TCPV6 => Some(Segmentation::Tcp6),
            Self::GSO_UDP_L4 => Some(Segmentation::Udp),
            _ => Some(Segmentation::Other),
        }
    }

    /// True if the frame's checksum is still to be computed.
    pub fn needs_checksum(&self) -> bool {
        self.flags & Self::NEEDS_CSUM != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_virtio_s() {
        assert_eq!(VnetHeader::BYTES, 10);
        let header: VnetHeader = bytemuck::pod_read_unaligned(&[1, 0x81, 0, 0, 5, 5, 0, 0, 0, 0]);
        assert!(header.needs_checksum());
        assert_eq!(header.segmentation(), Some(Segmentation::Tcp4));
    }

    #[test]
    fn no_size_is_one_packet() {
        let header = VnetHeader { gso_type: 1, ..VnetHeader::default() };
        assert_eq!(header.segmentation(), None);
        let header = VnetHeader { gso_size: 1448, ..VnetHeader::default() };
        assert_eq!(header.segmentation(), None);
    }
}
