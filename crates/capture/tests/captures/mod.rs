//! Captures made of nothing: traffic through the token bucket of the core, written as pcap or pcapng.

#![allow(dead_code, reason = "each of the tests uses some of it")]

use tidegate_core::{Bytes, Nanos, Rate, TokenBucket, token_bucket::BucketConfig};

/// The two containers, and their kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Container {
    Pcap { nanoseconds: bool, big_endian: bool },
    PcapNg,
}

/// What stands before the IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    Ethernet,
    Vlan,
    QinQ,
    Sll,
    Sll2,
    Raw,
    Loopback,
}

impl Link {
    pub const ALL: [Link; 7] =
        [Link::Ethernet, Link::Vlan, Link::QinQ, Link::Sll, Link::Sll2, Link::Raw, Link::Loopback];

    fn number(self) -> u32 {
        match self {
            Link::Ethernet | Link::Vlan | Link::QinQ => 1,
            Link::Sll => 113,
            Link::Sll2 => 276,
            Link::Raw => 101,
            Link::Loopback => 0,
        }
    }

    fn header(self, v6: bool) -> Vec<u8> {
        let kind: [u8; 2] = if v6 { [0x86, 0xdd] } else { [8, 0] };
        let mut bytes = match self {
            Link::Ethernet => vec![2; 12],
            Link::Vlan => [&[2; 12][..], &[0x81, 0, 0, 42]].concat(),
            Link::QinQ => [&[2; 12][..], &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 42]].concat(),
            Link::Sll => [&[0, 0, 0, 1, 0, 6][..], &[2; 8]].concat(),
            Link::Sll2 => return [&kind[..], &[0; 18]].concat(),
            Link::Raw => return Vec::new(),
            Link::Loopback => return vec![if v6 { 30 } else { 2 }, 0, 0, 0],
        };
        bytes.extend(kind);
        bytes
    }
}

/// A capture that is being written.
pub struct Capture {
    pub bytes: Vec<u8>,
    container: Container,
    link: Link,
    snaplen: usize,
    v6: bool,
}

/// A packet to write.
#[derive(Debug, Clone, Copy)]
pub struct Packet {
    pub time_ns: u64,
    /// Which flow: addresses and ports.
    pub flow: u16,
    /// From the IP header on.
    pub ip_bytes: u32,
    pub id: u16,
    pub body: Body,
}

#[derive(Debug, Clone, Copy)]
pub enum Body {
    Udp,
    Rtp(u16),
    Tcp {
        seq: u32,
        syn: bool,
    },
    /// From the receiver back: acknowledges.
    Ack(u32),
    /// TCP data with a time stamp.
    Data {
        seq: u32,
        syn: bool,
        stamp: Option<u32>,
    },
    /// From the receiver back, with SACK blocks and a time stamp.
    Sack {
        ack: u32,
        blocks: [(u32, u32); 3],
        count: usize,
        stamp: Option<u32>,
    },
}

/// TCP's options: a time stamp and SACK blocks.
fn tcp_options(stamp: Option<u32>, blocks: &[(u32, u32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(stamp) = stamp {
        bytes.extend([1, 1, 8, 10]);
        bytes.extend(stamp.to_be_bytes());
        bytes.extend([0, 0, 0, 9]);
    }
    if !blocks.is_empty() {
        bytes.extend([1, 1, 5, 2 + 8 * blocks.len() as u8]);
        for (start, end) in blocks {
            bytes.extend(start.to_be_bytes());
            bytes.extend(end.to_be_bytes());
        }
    }
    bytes
}

/// When all captures begin.
pub const START_NS: u64 = 1_700_000_000_000_000_000;

impl Capture {
    pub fn new(container: Container, link: Link) -> Capture {
        let mut capture = Capture { bytes: Vec::new(), container, link, snaplen: 96, v6: false };
        match container {
            Container::Pcap { nanoseconds, .. } => {
                capture.u32(if nanoseconds { 0xa1b2_3c4d } else { 0xa1b2_c3d4 });
                capture.u16(2);
                capture.u16(4);
                for word in [0, 0, 96, link.number()] {
                    capture.u32(word);
                }
            }
            Container::PcapNg => {
                for word in [0x0a0d_0d0a, 28, 0x1a2b_3c4d, 1, u32::MAX, u32::MAX, 28] {
                    capture.u32(word);
                }
                // An interface with a clock of nanoseconds.
                for word in [1, 32, link.number(), 96] {
                    capture.u32(word);
                }
                capture.bytes.extend([9, 0, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
                capture.u32(32);
            }
        }
        capture
    }

    /// Classic: microseconds, Ethernet.
    pub fn plain() -> Capture {
        Capture::new(Container::Pcap { nanoseconds: false, big_endian: false }, Link::Ethernet)
    }

    pub fn v6(mut self) -> Capture {
        self.v6 = true;
        self
    }

    pub fn snaplen(mut self, snaplen: usize) -> Capture {
        self.snaplen = snaplen;
        self
    }

    fn u16(&mut self, value: u16) {
        let big = matches!(self.container, Container::Pcap { big_endian: true, .. });
        self.bytes.extend(if big { value.to_be_bytes() } else { value.to_le_bytes() });
    }

    fn u32(&mut self, value: u32) {
        let big = matches!(self.container, Container::Pcap { big_endian: true, .. });
        self.bytes.extend(if big { value.to_be_bytes() } else { value.to_le_bytes() });
    }

    pub fn packet(&mut self, packet: &Packet) {
        let mut frame = self.link.header(self.v6);
        let link = frame.len();
        let back = matches!(packet.body, Body::Ack(_) | Body::Sack { .. });
        let tcp = !matches!(packet.body, Body::Udp | Body::Rtp(_));
        let protocol = if tcp { 6 } else { 17 };
        let (mut from, mut to) = ([10, 0, 1, 100], [10, 0, 2, 100]);
        let (mut source, mut destination) = (40_000 + packet.flow, 5_201_u16);
        if back {
            std::mem::swap(&mut from, &mut to);
            std::mem::swap(&mut source, &mut destination);
        }
        if self.v6 {
            let length = (packet.ip_bytes - 40) as u16;
            frame.extend([0x60, 0, 0, 0, (length >> 8) as u8, length as u8, protocol, 64]);
            for end in [from, to] {
                frame.extend([0xfd; 12]);
                frame.extend(end);
            }
        } else {
            let length = packet.ip_bytes as u16;
            frame.extend([0x45, 0, (length >> 8) as u8, length as u8]);
            frame.extend(packet.id.to_be_bytes());
            frame.extend([0x40, 0, 64, protocol, 0, 0]);
            frame.extend(from);
            frame.extend(to);
        }
        frame.extend(source.to_be_bytes());
        frame.extend(destination.to_be_bytes());
        match packet.body {
            Body::Udp | Body::Rtp(_) => {
                frame.extend((packet.ip_bytes as u16).to_be_bytes());
                frame.extend([0, 0]);
                if let Body::Rtp(seq) = packet.body {
                    frame.extend([0x80, 96]);
                    frame.extend(seq.to_be_bytes());
                    frame.extend([0, 0, 0, 0, 1, 2, 3, 4]);
                }
            }
            Body::Tcp { seq, syn } => {
                frame.extend(seq.to_be_bytes());
                frame.extend([0, 0, 0, 1, 0x50, if syn { 2 } else { 0x10 }, 1, 0, 0, 0, 0, 0]);
            }
            Body::Ack(ack) => {
                frame.extend([0, 0, 0, 1]);
                frame.extend(ack.to_be_bytes());
                frame.extend([0x50, 0x10, 1, 0, 0, 0, 0, 0]);
            }
            Body::Data { seq, syn, stamp } => {
                let options = tcp_options(stamp, &[]);
                let head = (5 + options.len() as u8 / 4) << 4;
                frame.extend(seq.to_be_bytes());
                frame.extend([0, 0, 0, 1, head, if syn { 2 } else { 0x10 }, 1, 0, 0, 0, 0, 0]);
                frame.extend(options);
            }
            Body::Sack { ack, blocks, count, stamp } => {
                let options = tcp_options(stamp, &blocks[..count]);
                let head = (5 + options.len() as u8 / 4) << 4;
                frame.extend([0, 0, 0, 1]);
                frame.extend(ack.to_be_bytes());
                frame.extend([head, 0x10, 1, 0, 0, 0, 0, 0]);
                frame.extend(options);
            }
        }
        let wire = link as u32 + packet.ip_bytes;
        frame.resize(frame.len().max(self.snaplen), 0);
        frame.truncate(self.snaplen.min(wire as usize));
        self.frame(packet.time_ns, &frame, wire);
    }

    pub fn frame(&mut self, time_ns: u64, frame: &[u8], wire: u32) {
        let time = START_NS + time_ns;
        match self.container {
            Container::Pcap { nanoseconds, .. } => {
                self.u32((time / 1_000_000_000) as u32);
                let part = time % 1_000_000_000;
                self.u32(if nanoseconds { part } else { part / 1_000 } as u32);
                self.u32(frame.len() as u32);
                self.u32(wire);
                self.bytes.extend(frame);
            }
            Container::PcapNg => {
                let padded = frame.len().next_multiple_of(4);
                let length = 32 + padded as u32;
                let head =
                    [6, length, 0, (time >> 32) as u32, time as u32, frame.len() as u32, wire];
                for word in head {
                    self.u32(word);
                }
                self.bytes.extend(frame);
                self.bytes.resize(self.bytes.len() + padded - frame.len(), 0);
                self.u32(length);
            }
        }
    }
}

pub fn rate(bit_s: u64) -> Rate {
    Rate::from_bit_s(bit_s).expect("a rate")
}

pub fn bucket(bit_s: u64, bytes: u64) -> TokenBucket {
    let config = BucketConfig::new(rate(bit_s), Bytes(bytes)).expect("a bucket");
    TokenBucket::new(config, Nanos(0))
}

/// UDP in bursts: so many bytes each so often, at line rate, what the bucket passes of it.
#[derive(Debug, Clone, Copy)]
pub struct Udp {
    pub rate: u64,
    pub depth: u64,
    pub burst: u64,
    pub period_ns: u64,
    pub line: u64,
    pub duration_ns: u64,
    /// Packets are stamped late by up to so much.
    pub jitter_ns: u64,
}

impl Udp {
    /// The article's source.
    pub fn iperf3(depth: u64) -> Udp {
        Udp {
            rate: 50_000_000,
            depth,
            burst: 1_270_000,
            period_ns: 100_000_000,
            line: 1_000_000_000,
            duration_ns: 10_000_000_000,
            jitter_ns: 0,
        }
    }

    pub fn smooth(offered: u64, rate: u64, depth: u64) -> Udp {
        let period_ns = 1_500 * 8_000_000_000 / offered;
        let (burst, line) = (1_500, 10_000_000_000);
        Udp { rate, depth, burst, period_ns, line, duration_ns: 5_000_000_000, jitter_ns: 0 }
    }

    /// The packets that passed, as (time, number), from 50 ms on.
    pub fn passed(&self) -> Vec<(u64, u32)> {
        let mut bucket = bucket(self.rate, self.depth);
        let mut passed = Vec::new();
        let (mut number, mut random) = (0_u32, 88_172_645_463_325_252_u64);
        let mut start = 50_000_000;
        while start < self.duration_ns {
            let mut sent = 0;
            while sent < self.burst {
                let time = start + rate(self.line).time_for(Bytes(sent)).0;
                if bucket.on_packet(Nanos(time), 1_500) {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    passed.push((time + random % (self.jitter_ns + 1), number));
                }
                number += 1;
                sent += 1_500;
            }
            start += self.period_ns;
        }
        passed.sort_unstable();
        passed
    }

    pub fn write(&self, capture: &mut Capture, flow: u16) {
        // Something before: the flow begins in the capture.
        let body = Body::Tcp { seq: 1, syn: true };
        capture.packet(&Packet { time_ns: 0, flow: 999, ip_bytes: 60, id: 1, body });
        for (time_ns, number) in self.passed() {
            let id = (number + 60_000) as u16;
            capture.packet(&Packet { time_ns, flow, ip_bytes: 1_500, id, body: Body::Udp });
        }
    }
}
