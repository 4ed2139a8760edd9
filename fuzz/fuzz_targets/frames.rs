//! Any bytes as a frame with any offload metadata: nothing panics; a mark and a completed checksum are right;
//! what is cut is, put together, what was cut.

#![no_main]

use std::{cell::RefCell, collections::VecDeque};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tidegate_nic::{
    Headers, PacketPool, PoolSize, VnetHeader, checksum,
    ecn::{self, Ecn},
    headers::Network,
    segment::{self, CutError, SEGMENTS_MAX},
};

#[derive(Debug, Arbitrary)]
struct Case {
    /// Puts headers that are whole before the bytes: random ones seldom are.
    headers: Option<Build>,
    flags: u8,
    gso_type: u8,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
    bend: Option<(u8, u8)>,
    payload: Vec<u8>,
    /// Further bytes, without a need to find them all.
    more: u16,
}

#[derive(Debug, Arbitrary)]
struct Build {
    tags: u8,
    v6: bool,
    tcp: bool,
    class: u8,
    options: u8,
}

const LONGEST: usize = 65_000;

thread_local! {
    /// All memory is taken once: a pool a case would be most of the work.
    static POOL: RefCell<PacketPool> =
        RefCell::new(PacketPool::new(PoolSize { small: 3_000, large: 2 }).expect("memory"));
}

/// The sum of RFC 1071, as slow and plain as it is written there.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
    let mut sum: u64 = words.map(u64::from).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn build(frame: &mut Vec<u8>, build: &Build) {
    frame.extend([2; 12]);
    for _ in 0..build.tags % 4 {
        frame.extend([0x81, 0, 0, 42]);
    }
    let protocol = if build.tcp { 6 } else { 17 };
    if build.v6 {
        frame.extend([
            0x86,
            0xdd,
            0x60 | build.class >> 4,
            build.class << 4,
            0,
            0,
            0,
            0,
            protocol,
            64,
        ]);
        frame.extend([0xfd; 32]);
    } else {
        let words = 5 + build.options % 11;
        let at = frame.len() + 2;
        frame.extend([8, 0, 0x40 | words, build.class, 0, 0, 0, 1, 0x40, 0, 64, protocol, 0, 0]);
        frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        frame.resize(at + usize::from(words) * 4, 1);
        let checksum = !sum(&frame[at..]);
        frame[at + 10..at + 12].copy_from_slice(&checksum.to_be_bytes());
    }
    let mut transport = vec![0; if build.tcp { 20 } else { 8 }];
    if build.tcp {
        transport[12] = 5 << 4;
    }
    frame.extend(transport);
}

/// The IPv4 header of a frame that has a whole one.
fn ipv4<'a>(frame: &'a [u8], headers: &Headers) -> Option<&'a [u8]> {
    let end = headers.transport_at.filter(|_| headers.network == Network::Ipv4)?;
    let bytes = usize::from(frame[headers.network_at] & 0xf) * 4;
    frame.get(headers.network_at..headers.network_at + bytes).filter(|_| end <= frame.len())
}

fuzz_target!(|case: Case| {
    let mut frame = Vec::new();
    if let Some(headers) = &case.headers {
        build(&mut frame, headers);
    }
    frame.extend(&case.payload);
    frame.resize(frame.len() + usize::from(case.more), 0x5a);
    frame.truncate(LONGEST);
    if let Some((at, value)) = case.bend
        && let Some(byte) = frame.get_mut(usize::from(at))
    {
        *byte = value;
    }

    let mut marked = frame.clone();
    let before = ecn::read(&frame);
    assert_eq!(ecn::mark(&mut marked), before != Ecn::NotCapable);
    let headers = Headers::parse(&frame);
    if before == Ecn::Capable {
        assert_eq!(ecn::read(&marked), Ecn::Marked);
        let headers = headers.expect("an IP header");
        let header = ipv4(&frame, &headers).zip(ipv4(&marked, &headers));
        if let Some((was, is)) = header
            && sum(was) == 0xffff
        {
            assert_eq!(sum(is), 0xffff, "a wrong checksum");
        }
    } else {
        assert_eq!(frame, marked);
    }

    let (start, offset) = (usize::from(case.csum_start), usize::from(case.csum_offset));
    let mut complete = frame.clone();
    if !checksum::complete(&mut complete, start, offset) {
        assert_eq!(frame, complete);
    } else if offset % 2 == 0 {
        // The field held the sum of the pseudo header; a receiver adds that to what it got.
        let pseudo = [frame[start + offset], frame[start + offset + 1]];
        let mut covered = complete[start..].to_vec();
        covered.resize(covered.len().next_multiple_of(2), 0);
        covered.extend(pseudo);
        assert_eq!(sum(&covered), 0xffff);
    }

    POOL.with_borrow_mut(|pool| {
        let free = pool.free();
        let mut packet = pool.packet(&frame).expect("a buffer");
        *packet.vnet_mut() = VnetHeader {
            flags: case.flags,
            gso_type: case.gso_type,
            hdr_len: 0,
            gso_size: case.gso_size,
            csum_start: case.csum_start,
            csum_offset: case.csum_offset,
        };
        let _ = packet.flow_hash(7);
        assert!(packet.segments() >= 1 && packet.wire_bytes() >= frame.len() as u64);
        let mut segments = VecDeque::new();
        match segment::cut(&packet, pool, &mut segments) {
            Ok(()) => {
                assert_eq!(segments.len(), packet.segments() as usize);
                assert!(segments.len() <= SEGMENTS_MAX as usize);
                let wire_bytes: u64 = segments.iter().map(|segment| segment.wire_bytes()).sum();
                assert_eq!(wire_bytes, packet.wire_bytes());
                let head = headers.expect("headers").bytes(&frame);
                let mut joined: Vec<u8> = Vec::new();
                for segment in &segments {
                    let headers = Headers::parse(segment.frame()).expect("headers");
                    assert!(ipv4(segment.frame(), &headers).is_none_or(|ip| sum(ip) == 0xffff));
                    joined.extend(&segment.frame()[head..]);
                }
                assert_eq!(joined, &frame[head..]);
            }
            Err(error) => {
                assert!(segments.is_empty());
                assert_ne!(
                    error,
                    CutError::NoBuffer,
                    "there are more than a frame can be cut into"
                );
            }
        }
        drop((packet, segments));
        assert_eq!(pool.free(), free, "a buffer was lost");
    });
});
