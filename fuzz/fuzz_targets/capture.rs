//! Any bytes as a capture, bare or behind the head of a good one, whole or in pieces: nothing panics,
//! nothing takes more memory than is allowed, and what is reported adds up.

#![no_main]

use std::io::Read;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tidegate_capture::{Options, analyze};

#[derive(Debug, Arbitrary)]
struct Case {
    head: Head,
    /// How much is read at once, at most.
    piece: u8,
    packets: Vec<(u32, u16, Vec<u8>)>,
    bytes: Vec<u8>,
}

#[derive(Debug, Arbitrary)]
enum Head {
    None,
    Pcap { big_endian: bool, nanoseconds: bool, link: u8 },
    PcapNg { link: u8, resolution: u8 },
}

const LINKS: [u32; 10] = [0, 1, 12, 101, 108, 113, 228, 229, 276, 147];

struct Pieces<'a>(&'a [u8], usize);

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = buffer.len().min(self.1);
        Read::read(&mut self.0, &mut buffer[..length])
    }
}

fn words(bytes: &mut Vec<u8>, words: &[u32], big_endian: bool) {
    for word in words {
        bytes.extend(if big_endian { word.to_be_bytes() } else { word.to_le_bytes() });
    }
}

fn build(case: &Case) -> Vec<u8> {
    let mut bytes = Vec::new();
    let link = |link: u8| LINKS[usize::from(link) % LINKS.len()];
    match case.head {
        Head::None => {}
        Head::Pcap { big_endian, nanoseconds, link: number } => {
            let magic = if nanoseconds { 0xa1b2_3c4d } else { 0xa1b2_c3d4 };
            let version = if big_endian { 0x0002_0004 } else { 0x0004_0002 };
            words(&mut bytes, &[magic, version, 0, 0, 65_535, link(number)], big_endian);
            for (time, wire, data) in &case.packets {
                let head = [time >> 20, time & 0xf_ffff, data.len() as u32, u32::from(*wire)];
                words(&mut bytes, &head, big_endian);
                bytes.extend(data);
            }
        }
        Head::PcapNg { link: number, resolution } => {
            words(&mut bytes, &[0x0a0d_0d0a, 28, 0x1a2b_3c4d, 1, u32::MAX, u32::MAX, 28], false);
            words(
                &mut bytes,
                &[1, 32, link(number), 0, 0x0001_0009, resolution.into(), 0, 32],
                false,
            );
            for (time, wire, data) in &case.packets {
                let length = data.len() as u32;
                let padded = length.next_multiple_of(4);
                words(&mut bytes, &[6, 32 + padded, 0, 0, *time, length, u32::from(*wire)], false);
                bytes.extend(data);
                bytes.resize(bytes.len() + (padded - length) as usize, 0);
                words(&mut bytes, &[32 + padded], false);
            }
        }
    }
    bytes.extend(&case.bytes);
    bytes
}

fuzz_target!(|case: Case| {
    let bytes = build(&case);
    let pieces = Pieces(&bytes, usize::from(case.piece) + 1);
    let Ok(report) = analyze(pieces, &Options { top: usize::MAX, flow: None }) else { return };
    assert!(report.capture.file_bytes <= bytes.len() as u64);
    let packets: u64 = report.flows.iter().map(|flow| flow.packets).sum();
    assert!(packets + report.capture.skipped_packets <= report.capture.packets);
    for estimate in report.flows.iter().filter_map(|flow| flow.estimate.as_ref()) {
        assert!(estimate.rate_bit_s.is_finite() && estimate.rate_bit_s > 0.0);
        assert!(estimate.rate_low_bit_s <= estimate.rate_high_bit_s);
        assert!(estimate.depth_bytes.is_finite() && estimate.depth_bytes > 0.0);
    }
});
