//! Captures as a stream: pcap and pcapng, one packet after the other, in bounded memory.
//!
//! The grammar of both formats is pcap-parser's; the buffer is ours, so that no length in a damaged file
//! can ask for more than [`BLOCK_MAX`], and an error keeps its cause and says how far it came.

use std::io::{self, Read};

use pcap_parser::{
    Block, PcapError,
    nom::{self, Needed},
    parse_block_be, parse_block_le, parse_pcap_frame, parse_pcap_frame_be,
    parse_pcap_frame_modified, parse_pcap_header, parse_sectionheaderblock,
};

/// The longest packet or block that is read; a longer one is damage.
pub const BLOCK_MAX: usize = 16 << 20;
/// The most interfaces of a pcapng section that are distinguished.
pub const INTERFACES_MAX: usize = 4_096;
/// What is read at once.
const BUFFER: usize = 256 << 10;

/// Why a capture cannot be read, or not further.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The system could not read it.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// There is nothing in it.
    #[error("is empty; capture with: tcpdump -i DEVICE -s 128 -w FILE")]
    Empty,
    /// It is something else.
    #[error("is not a capture: it begins with {found}, and pcap or pcapng was expected; {instead}")]
    NotACapture { found: String, instead: &'static str },
    /// It ends within a packet.
    #[error("ends in the middle of packet {}, as when the capture was cut off", packets + 1)]
    Truncated {
        /// Packets before that.
        packets: u64,
    },
    /// What stands there makes no sense.
    #[error("is damaged after packet {packets}, at byte {at}: {what}")]
    Damaged {
        /// Packets before that.
        packets: u64,
        /// Bytes of the file before the damage.
        at: u64,
        what: String,
    },
    /// Nothing of it is IP.
    #[error(
        "has no IP packet among {packets}{}; what is read: Ethernet, Linux cooked (SLL, SLL2), raw IP, \
         loopback",
        link.map(|link| format!(" (link type {link})")).unwrap_or_default()
    )]
    NoIp {
        /// Packets in it.
        packets: u64,
        /// A link type that is not read.
        link: Option<i32>,
    },
}

/// A packet of a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// What its first header is, by the number that pcap gives it.
    pub link: i32,
    /// Its length on the wire.
    pub wire_bytes: u32,
    /// What of it was kept.
    pub data: &'a [u8],
}

/// The clock of a pcapng interface.
#[derive(Debug, Clone, Copy)]
struct Interface {
    link: i32,
    snaplen: u32,
    /// Its ticks a second.
    resolution: u64,
    offset_s: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Little,
    Big,
    /// An old variant with longer heads of packets.
    Modified,
}

enum Format {
    Pcap { order: Order, nanoseconds: bool, link: i32 },
    PcapNg { order: Order, interfaces: Vec<Interface> },
}

/// Reads a capture packet by packet.
pub struct Reader<R> {
    source: R,
    buffer: Vec<u8>,
    /// What of the buffer is not yet consumed.
    start: usize,
    end: usize,
    exhausted: bool,
    format: Format,
    packets: u64,
    consumed: u64,
}

/// A packet within the buffer.
struct Found {
    time_ns: u64,
    link: i32,
    wire_bytes: u32,
    data: (usize, usize),
}

/// What came of trying to parse what is in the buffer.
enum Step {
    /// Bytes of it are done, with a packet in them or without.
    Done(usize, Option<Found>),
    /// More bytes are needed.
    More(usize),
    Damage(String),
}

impl<R: Read> Reader<R> {
    /// Reads the head of a capture.
    ///
    /// # Errors
    /// [`CaptureError`] if there is none.
    pub fn new(source: R) -> Result<Self, CaptureError> {
        let format = Format::PcapNg { order: Order::Little, interfaces: Vec::new() };
        let buffer = vec![0; BUFFER];
        let mut reader = Reader {
            source,
            buffer,
            start: 0,
            end: 0,
            exhausted: false,
            format,
            packets: 0,
            consumed: 0,
        };
        while reader.end < 24 && !reader.exhausted {
            reader.refill(24)?;
        }
        let head = &reader.buffer[..reader.end];
        if head.is_empty() {
            return Err(CaptureError::Empty);
        }
        if head.starts_with(&[0x0a, 0x0d, 0x0d, 0x0a]) {
            return Ok(reader);
        }
        let Ok((rest, header)) = parse_pcap_header(head) else {
            return Err(not_a_capture(head));
        };
        let used = head.len() - rest.len();
        let order = match (header.is_modified_format(), header.is_bigendian()) {
            (true, _) => Order::Modified,
            (_, true) => Order::Big,
            _ => Order::Little,
        };
        reader.format = Format::Pcap {
            order,
            nanoseconds: header.is_nanosecond_precision(),
            // The upper bits say whether frames have a checksum.
            link: header.network.0 & 0xffff,
        };
        reader.consume(used);
        Ok(reader)
    }

    /// Packets read so far.
    pub fn packets(&self) -> u64 {
        self.packets
    }

    /// Bytes read so far.
    pub fn bytes(&self) -> u64 {
        self.consumed
    }

    /// The next packet; none at the end.
    ///
    /// # Errors
    /// [`CaptureError`] where the file cannot be read further.
    pub fn read(&mut self) -> Result<Option<Frame<'_>>, CaptureError> {
        loop {
            if self.start == self.end {
                if self.exhausted {
                    return Ok(None);
                }
                self.refill(1)?;
                continue;
            }
            match self.step() {
                Step::Done(used, found) => {
                    let at = self.start;
                    self.consume(used);
                    let Some(Found { time_ns, link, wire_bytes, data: (from, to) }) = found else {
                        continue;
                    };
                    self.packets += 1;
                    let data = &self.buffer[at + from..at + to];
                    return Ok(Some(Frame { time_ns, link, wire_bytes, data }));
                }
                Step::More(bytes) if bytes > BLOCK_MAX => {
                    let what = format!("a length of {bytes} bytes, of {BLOCK_MAX} at most");
                    return Err(self.damaged(what));
                }
                Step::More(_) if self.exhausted => {
                    return Err(CaptureError::Truncated { packets: self.packets });
                }
                Step::More(bytes) => self.refill(bytes)?,
                Step::Damage(what) => return Err(self.damaged(what)),
            }
        }
    }

    fn damaged(&self, what: String) -> CaptureError {
        CaptureError::Damaged { packets: self.packets, at: self.consumed, what }
    }

    fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        self.consumed += bytes as u64;
    }

    /// Makes room for `bytes` more and reads what there is.
    fn refill(&mut self, bytes: usize) -> io::Result<()> {
        let held = self.end - self.start;
        if self.start > 0 && self.buffer.len() - self.end < bytes {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, held);
        }
        if self.buffer.len() - self.end < bytes {
            self.buffer.resize((self.end + bytes).next_power_of_two(), 0);
        }
        let read = loop {
            match self.source.read(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.exhausted = read == 0;
        self.end += read;
        Ok(())
    }

    fn step(&mut self) -> Step {
        let data = &self.buffer[self.start..self.end];
        match &mut self.format {
            Format::Pcap { order, nanoseconds, link } => {
                let parse = match order {
                    Order::Little => parse_pcap_frame,
                    Order::Big => parse_pcap_frame_be,
                    Order::Modified => parse_pcap_frame_modified,
                };
                match parse(data) {
                    Ok((rest, frame)) => {
                        let per_unit = if *nanoseconds { 1 } else { 1_000 };
                        let time_ns = u64::from(frame.ts_sec) * 1_000_000_000
                            + u64::from(frame.ts_usec) * per_unit;
                        let used = data.len() - rest.len();
                        let found = Found {
                            time_ns,
                            link: *link,
                            wire_bytes: frame.origlen.max(frame.caplen),
                            data: (used - frame.data.len(), used),
                        };
                        Step::Done(used, Some(found))
                    }
                    Err(error) => failed(error),
                }
            }
            Format::PcapNg { order, interfaces } => {
                // A section may turn the byte order.
                if data.starts_with(&[0x0a, 0x0d, 0x0d, 0x0a]) {
                    return match parse_sectionheaderblock(data) {
                        Ok((rest, section)) => {
                            *order = if section.big_endian() { Order::Big } else { Order::Little };
                            interfaces.clear();
                            Step::Done(data.len() - rest.len(), None)
                        }
                        Err(error) => failed(error),
                    };
                }
                let parse = if *order == Order::Big { parse_block_be } else { parse_block_le };
                match parse(data) {
                    Ok((rest, block)) => {
                        let used = data.len() - rest.len();
                        match packet_of(&block, data, interfaces) {
                            Ok(found) => Step::Done(used, found),
                            Err(what) => Step::Damage(what),
                        }
                    }
                    Err(error) => failed(error),
                }
            }
        }
    }
}

fn failed(error: nom::Err<PcapError<&[u8]>>) -> Step {
    match error {
        nom::Err::Incomplete(Needed::Size(bytes)) => Step::More(bytes.get()),
        nom::Err::Incomplete(Needed::Unknown) => Step::More(1),
        nom::Err::Error(_) | nom::Err::Failure(_) => {
            Step::Damage("what stands there is no block".to_owned())
        }
    }
}

/// The packet of a block, if it has one; remembers interfaces.
fn packet_of(
    block: &Block<'_>,
    data: &[u8],
    interfaces: &mut Vec<Interface>,
) -> Result<Option<Found>, String> {
    // Where a part of the block lies within the data.
    let place = |part: &[u8], length: usize| {
        let from = part.as_ptr() as usize - data.as_ptr() as usize;
        (from, from + length.min(part.len()))
    };
    match block {
        Block::InterfaceDescription(block) => {
            if interfaces.len() == INTERFACES_MAX {
                return Err(format!("more than {INTERFACES_MAX} interfaces"));
            }
            interfaces.push(Interface {
                link: block.linktype.0,
                snaplen: block.snaplen,
                resolution: block.ts_resolution().filter(|r| *r > 0).unwrap_or(1_000_000),
                offset_s: block.ts_offset(),
            });
            Ok(None)
        }
        Block::EnhancedPacket(block) => {
            let Some(interface) = interfaces.get(block.if_id as usize) else {
                return Err(format!(
                    "a packet of interface {}, which was not described",
                    block.if_id
                ));
            };
            let ticks = u128::from(block.ts_high) << 32 | u128::from(block.ts_low);
            let ns = ticks * 1_000_000_000 / u128::from(interface.resolution);
            let offset = i128::from(interface.offset_s) * 1_000_000_000;
            let ns = i128::try_from(ns).unwrap_or(i128::MAX).saturating_add(offset).max(0);
            Ok(Some(Found {
                time_ns: u64::try_from(ns).unwrap_or(u64::MAX),
                link: interface.link,
                wire_bytes: block.origlen.max(block.caplen),
                data: place(block.data, block.caplen as usize),
            }))
        }
        Block::SimplePacket(block) => {
            let Some(interface) = interfaces.first() else {
                return Err("a packet before any interface".to_owned());
            };
            // It has no time: all at one, in order.
            let kept = if interface.snaplen == 0 {
                block.origlen
            } else {
                block.origlen.min(interface.snaplen)
            };
            Ok(Some(Found {
                time_ns: 0,
                link: interface.link,
                wire_bytes: block.origlen,
                data: place(block.data, kept as usize),
            }))
        }
        _ => Ok(None),
    }
}

fn not_a_capture(head: &[u8]) -> CaptureError {
    let packed: [(&[u8], &str); 4] = [
        (&[0x1f, 0x8b], "unpack it first: zcat FILE | tidegate burst analyze -"),
        (&[0x28, 0xb5, 0x2f, 0xfd], "unpack it first: zstdcat FILE | tidegate burst analyze -"),
        (&[0xfd, b'7', b'z', b'X', b'Z'], "unpack it first: xzcat FILE | tidegate burst analyze -"),
        (b"BZh", "unpack it first: bzcat FILE | tidegate burst analyze -"),
    ];
    let known = packed.iter().find(|(magic, _)| head.starts_with(magic));
    let instead =
        known.map_or("write one with: tcpdump -i DEVICE -s 128 -w FILE", |(_, what)| what);
    let printable = head.iter().all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace());
    let first = &head[..head.len().min(12)];
    let found = if printable {
        format!("the text {:?}", String::from_utf8_lossy(first))
    } else {
        let bytes: Vec<String> = first.iter().take(4).map(|b| format!("{b:02x}")).collect();
        format!("the bytes {}", bytes.join(" "))
    };
    CaptureError::NotACapture { found, instead }
}
