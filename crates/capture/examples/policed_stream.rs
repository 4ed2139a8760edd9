//! Writes a capture of UDP flows behind policers to standard output, as long as one asks for: to measure
//! how fast captures are analyzed.
//!
//!     cargo build --release -p tidegate -p tidegate-capture --examples --bins
//!     target/release/examples/policed_stream PACKETS FLOWS | (time target/release/tidegate burst analyze
//!     -)

#[path = "../tests/captures/mod.rs"]
mod captures;

use std::{
    env,
    io::{self, Write},
};

use captures::{Body, Capture, Packet, bucket};
use tidegate_core::Nanos;

fn main() -> io::Result<()> {
    let mut arguments = env::args().skip(1).map(|text| text.parse::<u64>());
    let mut next = |default| arguments.next().and_then(Result::ok).unwrap_or(default);
    let (packets, flows) = (next(1_000_000), next(1).clamp(1, 20_000));
    let mut out = io::stdout().lock();
    let mut capture = Capture::plain().snaplen(42);
    // Each flow offers bursts of 100 packets at four times what its bucket lets through.
    let mut buckets: Vec<_> = (0..flows).map(|_| bucket(10_000_000, 60_000)).collect();
    let (mut written, mut slot) = (0, 0_u64);
    while written < packets {
        let round = slot / flows;
        let flow = (slot % flows) as usize;
        let time_ns = round * 300_000 - round % 100 * 250_000 + slot % flows * (40_000 / flows);
        if buckets[flow].on_packet(Nanos(time_ns), 1_500) {
            let packet = Packet {
                time_ns,
                flow: flow as u16,
                ip_bytes: 1_500,
                id: round as u16,
                body: Body::Udp,
            };
            capture.packet(&packet);
            written += 1;
        }
        slot += 1;
        if capture.bytes.len() > 1 << 20 {
            out.write_all(&capture.bytes)?;
            capture.bytes.clear();
        }
    }
    out.write_all(&capture.bytes)
}
