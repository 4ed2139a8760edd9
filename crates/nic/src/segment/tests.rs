use proptest::prelude::*;

use super::*;
use crate::{pool::PoolSize, vnet::VnetHeader};

const SEQUENCE: u32 = u32::MAX - 1000;
const ALL_FLAGS: u8 = 0xff;

/// A frame as the stack leaves it to a device: lengths of the whole, no checksums.
fn frame(kind: Segmentation, v6: bool, tagged: bool, payload: &[u8]) -> Vec<u8> {
    let tcp = kind != Segmentation::Udp;
    let mut frame = vec![2; 12];
    if tagged {
        frame.extend([0x81, 0, 0, 42]);
    }
    let protocol = if tcp { 6 } else { 17 };
    if v6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, protocol, 64]);
        frame.extend((0..32).map(|n| n * 7));
    } else {
        // With four bytes of options.
        frame.extend([8, 0, 0x46, 0, 0, 0, 0xff, 0xfe, 0x40, 0, 64, protocol, 0xaa, 0xaa]);
        frame.extend([10, 0, 0, 1, 10, 0, 0, 2, 1, 1, 1, 1]);
    }
    frame.extend([0x10, 0x01, 0x20, 0x02]);
    if tcp {
        frame.extend(SEQUENCE.to_be_bytes());
        frame.extend([0, 0, 0, 1, 0x60, ALL_FLAGS, 1, 0, 0xaa, 0xaa, 0, 0, 1, 1, 1, 1]);
    } else {
        frame.extend([0, 0, 0xaa, 0xaa]);
    }
    frame.extend(payload);
    frame
}

fn packet(pool: &mut PacketPool, frame: &[u8], gso_type: u8, gso_size: u16) -> Packet {
    let mut packet = pool.packet(frame).unwrap();
    *packet.vnet_mut() = VnetHeader { gso_type, gso_size, ..VnetHeader::default() };
    packet
}

proptest! {
    /// What a receiver of the segments checks, and that they are together what was cut.
    #[test]
    fn segments_are_what_the_stack_would_have_sent(
        case in prop::sample::select(vec![
            (Segmentation::Tcp4, 1u8, false), (Segmentation::Tcp6, 4, true),
            (Segmentation::Udp, 5, false), (Segmentation::Udp, 5, true),
        ]),
        tagged: bool, size in 48u16..1900, payload in prop::collection::vec(any::<u8>(), 1..20_000),
    ) {
        let (kind, gso_type, v6) = case;
        let mut pool = PacketPool::new(PoolSize { small: 450, large: 1 }).unwrap();
        let whole = frame(kind, v6, tagged, &payload);
        let packet = packet(&mut pool, &whole, gso_type, size);
        let mut segments = VecDeque::new();
        cut(&packet, &mut pool, &mut segments).unwrap();
        prop_assert_eq!(segments.len(), packet.segments() as usize);
        let wire_bytes: u64 = segments.iter().map(Packet::wire_bytes).sum();
        prop_assert_eq!(wire_bytes, packet.wire_bytes());

        let mut joined: Vec<u8> = Vec::new();
        for (index, segment) in segments.iter().enumerate() {
            let (bytes, last) = (segment.frame(), index + 1 == segments.len());
            prop_assert_eq!(*segment.vnet(), VnetHeader::default());
            let headers = Headers::parse(bytes).unwrap();
            let (ip, transport) = bytes.split_at(headers.transport_at.unwrap());
            let ip = &ip[headers.network_at..];
            let be16 = |b: &[u8], at: usize| u16::from_be_bytes([b[at], b[at + 1]]);
            if v6 {
                prop_assert_eq!(usize::from(be16(ip, 4)), transport.len());
            } else {
                prop_assert_eq!(usize::from(be16(ip, 2)), ip.len() + transport.len());
                prop_assert_eq!(fold(sum(ip)), 0xffff);
                prop_assert_eq!(be16(ip, 4), 0xfffeu16.wrapping_add(index as u16));
            }
            let pseudo = sum(headers.addresses(bytes))
                + u64::from(headers.protocol.unwrap()) + transport.len() as u64;
            prop_assert_eq!(fold(pseudo + sum(transport)), 0xffff);
            if kind == Segmentation::Udp {
                prop_assert_eq!(usize::from(be16(transport, 4)), transport.len());
            } else {
                let expected = SEQUENCE.wrapping_add((index * usize::from(size)) as u32);
                prop_assert_eq!(&transport[4..8], expected.to_be_bytes());
                let missing = if last { 0 } else { TCP_LAST } | if index == 0 { 0 } else { TCP_FIRST };
                prop_assert_eq!(transport[13], ALL_FLAGS & !missing);
            }
            let part = &bytes[headers.bytes(bytes)..];
            prop_assert!(last || part.len() == usize::from(size));
            joined.extend(part);
        }
        prop_assert_eq!(joined, payload);
    }

    #[test]
    fn any_bytes_are_cut_or_refused(
        mut bytes in prop::collection::vec(any::<u8>(), 0..400), gso_type in 1u8..6, size in 1u16..2000,
        v6: bool, bent in 0usize..100, value: u8,
    ) {
        let kind = if gso_type == 5 { Segmentation::Udp } else { Segmentation::Tcp4 };
        let payload = bytes.clone();
        if value % 4 != 0 {
            bytes = frame(kind, v6, false, &payload);
            let at = bent % bytes.len();
            bytes[at] = value;
        }
        let mut pool = PacketPool::new(PoolSize { small: 500, large: 1 }).unwrap();
        let packet = packet(&mut pool, &bytes, gso_type, size);
        let mut segments = VecDeque::new();
        if cut(&packet, &mut pool, &mut segments).is_err() {
            prop_assert!(segments.is_empty());
        }
    }
}

#[test]
fn a_frame_is_cut_whole_or_not_at_all() {
    let mut pool = PacketPool::new(PoolSize { small: 3, large: 1 }).unwrap();
    let tcp = frame(Segmentation::Tcp4, false, false, &[1; 4000]);
    let mut segments = VecDeque::new();
    let four = packet(&mut pool, &tcp, 1, 1000);
    assert_eq!(cut(&four, &mut pool, &mut segments), Err(CutError::NoBuffer));
    drop(four);
    assert_eq!((segments.len(), pool.free().small), (0, 3));
    let long = packet(&mut pool, &tcp, 1, 2000);
    assert_eq!(cut(&long, &mut pool, &mut segments), Err(CutError::TooLong));
    drop(long);
    // The metadata has the transport header where it is not: that it is longer there, or shorter.
    for csum_start in [0, 20, 60] {
        let mut elsewhere = packet(&mut pool, &tcp, 1, 1900);
        elsewhere.vnet_mut().flags = VnetHeader::NEEDS_CSUM;
        elsewhere.vnet_mut().csum_start = csum_start;
        assert_eq!(cut(&elsewhere, &mut pool, &mut segments), Err(CutError::Unknown));
    }
    // UDP said, TCP found; fragments of UDP (UFO).
    for gso_type in [5, 3] {
        let wrong = packet(&mut pool, &tcp, gso_type, 1400);
        assert_eq!(cut(&wrong, &mut pool, &mut segments), Err(CutError::Unknown));
    }
}
