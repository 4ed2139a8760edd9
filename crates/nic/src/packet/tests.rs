use proptest::prelude::*;

use super::*;
use crate::buffer::LARGE_BUFFER_BYTES;
use crate::pool::{PacketPool, PoolSize};

fn packet(frame: &[u8]) -> Packet {
    PacketPool::new(PoolSize { small: 1, large: 1 }).unwrap().packet(frame).unwrap()
}

/// What a frame is built from.
#[derive(Clone, Copy)]
struct Frame {
    tags: usize,
    v6: bool,
    protocol: u8,
    fragment: bool,
    source: u16,
    payload: usize,
}

const TCP_FRAME: Frame =
    Frame { tags: 0, v6: false, protocol: 6, fragment: false, source: 1000, payload: 100 };

impl Frame {
    /// With TCP options, 32 bytes of TCP header in all.
    fn bytes(self) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        for _ in 0..self.tags {
            frame.extend([0x81, 0, 0, 42]);
        }
        if self.v6 {
            frame.extend([
                0x86,
                0xdd,
                0x60,
                0,
                0,
                0,
                0,
                0,
                if self.fragment { 44 } else { self.protocol },
                64,
            ]);
            frame.extend([0xfd; 32]);
            if self.fragment {
                frame.extend([self.protocol, 0, 0, 1, 0, 0, 0, 9]);
            }
        } else {
            let more = if self.fragment { 0x20 } else { 0 };
            frame.extend([8, 0, 0x45, 0, 0, 0, 0, 0, more, 0, 64, self.protocol, 0, 0]);
            frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        }
        let mut transport = vec![0; if self.protocol == 6 { 32 } else { 8 }];
        transport[..2].copy_from_slice(&self.source.to_be_bytes());
        if self.protocol == 6 {
            transport[12] = 8 << 4;
        }
        frame.extend(transport);
        frame.resize(frame.len() + self.payload, 0xaa);
        frame
    }

    fn hash(self) -> u64 {
        packet(&self.bytes()).flow_hash(7)
    }
}

#[test]
fn segments_bring_their_headers() {
    struct Case {
        what: &'static str,
        frame: Frame,
        gso_type: u8,
        headers: u64,
    }
    let udp = Frame { protocol: 17, ..TCP_FRAME };
    let cases = [
        Case { what: "tcp4", frame: TCP_FRAME, gso_type: 1, headers: 14 + 20 + 32 },
        Case {
            what: "tcp6",
            frame: Frame { v6: true, ..TCP_FRAME },
            gso_type: 4,
            headers: 14 + 40 + 32,
        },
        Case {
            what: "tagged",
            frame: Frame { tags: 2, ..TCP_FRAME },
            gso_type: 0x81,
            headers: 22 + 20 + 32,
        },
        Case { what: "udp", frame: udp, gso_type: 5, headers: 14 + 20 + 8 },
    ];
    for Case { what, frame, gso_type, headers } in cases {
        for (payload, segments) in
            [(0, 1), (1, 1), (1448, 1), (1449, 2), (10 * 1448, 10), (64_000, 45)]
        {
            let bytes = Frame { payload, ..frame }.bytes();
            let mut packet = packet(&bytes);
            *packet.vnet_mut() = VnetHeader { gso_type, gso_size: 1448, ..VnetHeader::default() };
            let expected = (segments, bytes.len() as u64 + u64::from(segments - 1) * headers);
            assert_eq!((packet.segments(), packet.wire_bytes()), expected, "{what} {payload}");
            // The same, if the kernel says where the transport header is.
            packet.vnet_mut().flags = VnetHeader::NEEDS_CSUM;
            packet.vnet_mut().csum_start = headers as u16 - if gso_type == 5 { 8 } else { 32 };
            assert_eq!((packet.segments(), packet.wire_bytes()), expected, "{what} {payload}");
        }
    }
}

#[test]
fn a_plain_frame_is_its_length() {
    let packet = packet(&TCP_FRAME.bytes());
    assert_eq!((packet.segments(), packet.wire_bytes()), (1, 14 + 20 + 32 + 100));
}

#[test]
fn flows_differ_by_what_they_should() {
    let other_port = Frame { source: 1001, ..TCP_FRAME };
    let same_flow = Frame { payload: 7, tags: 1, ..TCP_FRAME };
    assert_eq!(TCP_FRAME.hash(), same_flow.hash());
    assert_ne!(TCP_FRAME.hash(), other_port.hash());
    assert_ne!(TCP_FRAME.hash(), Frame { protocol: 17, ..TCP_FRAME }.hash());
    assert_ne!(packet(&TCP_FRAME.bytes()).flow_hash(1), packet(&TCP_FRAME.bytes()).flow_hash(2));
    for v6 in [false, true] {
        // Later fragments have no ports, so no fragment's may count.
        let fragment = |source| Frame { v6, source, fragment: true, ..TCP_FRAME };
        assert_eq!(fragment(1).hash(), fragment(2).hash());
        assert_ne!(
            Frame { v6, source: 1, ..TCP_FRAME }.hash(),
            Frame { v6, source: 2, ..TCP_FRAME }.hash()
        );
    }
}

#[test]
fn other_frames_differ_by_their_addresses() {
    let arp = |last| packet(&[2, 0, 0, 0, 0, last, 2, 0, 0, 0, 0, 9, 8, 6, 1, 2, 3]).flow_hash(0);
    assert_eq!(arp(1), arp(1));
    assert_ne!(arp(1), arp(2));
}

#[test]
fn a_frame_grows_as_far_as_its_buffer() {
    let mut small = packet(b"x");
    assert!(small.fill(&[1; 2048]) && !small.fill(&[1; 2049]));
    assert_eq!(small.frame(), [1; 2048]);
    small.set_len(100_000);
    assert_eq!(small.frame().len(), 2048);
    assert!(!small.set_place(2000, 49) && !small.set_place(usize::MAX, 2));
    assert!(small.set_place(2000, 48));
    assert_eq!(small.room_mut().len(), 48);
    let large = packet(&[0; LARGE_BUFFER_BYTES]);
    assert_eq!(large.frame().len(), LARGE_BUFFER_BYTES);
}

fn any_vnet() -> impl Strategy<Value = VnetHeader> {
    any::<[u8; VnetHeader::BYTES]>().prop_map(|bytes| bytemuck::pod_read_unaligned(&bytes))
}

proptest! {
    #[test]
    fn any_bytes_can_be_asked(frame in prop::collection::vec(any::<u8>(), 0..300), vnet in any_vnet()) {
        let mut packet = packet(&frame);
        *packet.vnet_mut() = vnet;
        packet.flow_hash(0);
        prop_assert!(packet.wire_bytes() >= frame.len() as u64);
        prop_assert!(packet.segments() >= 1);
    }

    /// Random bytes seldom have headers: cut and bend some that do.
    #[test]
    fn any_broken_frame_can_be_asked(
        v6: bool, fragment: bool, tags in 0usize..4,
        protocol in prop::sample::select(vec![0u8, 6, 17, 43, 44, 60]),
        cut in 0usize..200, bent in 0usize..200, value: u8, vnet in any_vnet(),
    ) {
        let mut frame = Frame { v6, fragment, tags, protocol, ..TCP_FRAME }.bytes();
        let at = bent % frame.len();
        frame[at] = value;
        frame.truncate(cut);
        let mut packet = packet(&frame);
        *packet.vnet_mut() = vnet;
        packet.flow_hash(0);
        prop_assert!(packet.wire_bytes() >= frame.len() as u64);
    }
}
