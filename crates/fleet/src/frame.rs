//! What is in a datagram: frames, one after the other, until its end.
//!
//! ```text
//!   kind u8, length, body              little-endian; names: length u8, then ASCII
//!   length: below 128 one byte, else the low seven bits with bit 7 set, and the rest
//! ```
//!
//! Read strictly, as [`tidegate_core::fleet::message`] is: a kind that is not known, or a body that is not
//! exactly one, and the whole datagram is none.

use std::net::{IpAddr, SocketAddr};

use tidegate_core::fleet::{
    MemberId,
    message::{DecodeError, Message},
};
use tidegate_host::fleet::{Algorithm, GroupSpec, check_name};

use super::seal::Life;

/// No body is longer.
const BODY_MAX: usize = (1 << 14) - 1;
/// The most groups of one [`Frame::Report`].
pub const REPORTS_MAX: usize = 12;

#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// I am here.
    Hello { name: String },
    /// Show that you live: send this number back.
    Challenge(u64),
    /// The number of a challenge.
    Echo { cookie: u64, name: String },
    /// Somebody of your name has a later life.
    Superseded { life: Life, addr: SocketAddr },
    /// A message of an algorithm, as it encodes itself, but for what the datagram says: whose it is. Before
    /// it the number of the group among those that this life of the sender began: an incarnation is the
    /// session and that.
    Message(Vec<u8>),
    /// Of the membership, as it encodes itself.
    Swim(Vec<u8>),
    /// The groups of the sender, or some of them, in turn.
    Report(Vec<GroupReport>),
}

/// What a node tells of a group.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupReport {
    /// The group's name.
    pub name: String,
    /// Of its settings ([`GroupSpec::settings_number`]): who has another has another limit or other options.
    pub number: u32,
    /// The limit of all.
    pub rate_bit_s: u64,
    /// How it is divided.
    pub algorithm: Algorithm,
    /// What the node may use now.
    pub share_bit_s: u64,
    /// What arrives there.
    pub demand_bit_s: u64,
}

impl GroupReport {
    /// Whether the node has the same rate and algorithm: with all algorithms but `share` it hears the others
    /// of the group then.
    pub fn hears(&self, spec: &GroupSpec) -> bool {
        self.rate_bit_s == spec.rate.bit_s() && self.algorithm == spec.algorithm
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        Some(self.array::<1>()?[0])
    }

    /// In its shortest form.
    fn length(&mut self) -> Option<usize> {
        let low = self.u8()?;
        if low & 0x80 == 0 {
            return Some(low.into());
        }
        let high = self.u8()?;
        (1..0x80).contains(&high).then(|| usize::from(high) << 7 | usize::from(low & 0x7f))
    }

    /// LEB128, in its shortest form.
    fn number(&mut self) -> Option<u32> {
        let mut number = 0u64;
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.u8()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                let shortest = shift == 0 || byte > 0;
                return u32::try_from(number).ok().filter(|_| shortest);
            }
        }
        None
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.array()?))
    }

    fn life(&mut self) -> Option<Life> {
        Some(Life { session: self.u64()?, salt: u32::from_le_bytes(self.array()?) })
    }

    fn name(&mut self) -> Option<String> {
        let length = self.u8()?;
        let name = str::from_utf8(self.take(length.into())?).ok()?;
        check_name(name).ok()?;
        Some(name.to_owned())
    }

    fn addr(&mut self) -> Option<SocketAddr> {
        let ip: IpAddr = match self.u8()? {
            4 => self.array::<4>()?.into(),
            6 => self.array::<16>()?.into(),
            _ => return None,
        };
        Some(SocketAddr::new(ip, u16::from_le_bytes(self.array()?)))
    }
}

/// LEB128.
fn put_number(out: &mut Vec<u8>, mut number: u32) {
    while number > 0x7f {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    // Names are checked where they come in: 63 bytes at most.
    out.push(name.len() as u8);
    out.extend(name.as_bytes());
}

/// Writes an address: 4 or 6, its bytes, the port.
pub(super) fn put_addr(out: &mut Vec<u8>, addr: SocketAddr) {
    match addr.ip() {
        IpAddr::V4(ip) => {
            out.push(4);
            out.extend(ip.octets());
        }
        IpAddr::V6(ip) => {
            out.push(6);
            out.extend(ip.octets());
        }
    }
    out.extend(addr.port().to_le_bytes());
}

/// Where a message says whose it is: after version, kind and group, a number in LEB128 and 8 bytes.
const SENDER_AT: usize = 6;

impl Frame {
    /// A message of this sender's, in this session of it.
    pub fn of_message(message: &Message, session: u64) -> Frame {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        let number = bytes[SENDER_AT..].iter().take_while(|byte| *byte & 0x80 != 0).count() + 1;
        bytes.drain(SENDER_AT..SENDER_AT + number + 8);
        let mut whole = Vec::with_capacity(bytes.len() + 1);
        put_number(&mut whole, message.incarnation.saturating_sub(session) as u32);
        whole.extend(bytes);
        Frame::Message(whole)
    }

    /// A message, of whom the datagram is.
    ///
    /// # Errors
    /// As [`Message::decode`] has it.
    pub fn to_message(bytes: &[u8], from: MemberId, session: u64) -> Result<Message, DecodeError> {
        let mut r = Reader(bytes);
        let began = r.number().ok_or(DecodeError::Short)?;
        let (head, body) = r.0.split_at_checked(SENDER_AT).ok_or(DecodeError::Short)?;
        let mut whole = head.to_vec();
        put_number(&mut whole, from.0);
        whole.extend(session.saturating_add(began.into()).to_le_bytes());
        whole.extend(body);
        Message::decode(&whole)
    }

    fn kind(&self) -> u8 {
        match self {
            Frame::Hello { .. } => 1,
            Frame::Challenge(_) => 2,
            Frame::Echo { .. } => 3,
            Frame::Superseded { .. } => 4,
            Frame::Message(_) => 5,
            Frame::Swim(_) => 6,
            Frame::Report(_) => 7,
        }
    }

    /// Appends the frame to a payload.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.kind());
        let at = out.len();
        match self {
            Frame::Hello { name } => put_name(out, name),
            Frame::Challenge(cookie) => out.extend(cookie.to_le_bytes()),
            Frame::Echo { cookie, name } => {
                out.extend(cookie.to_le_bytes());
                put_name(out, name);
            }
            Frame::Superseded { life, addr } => {
                out.extend(life.session.to_le_bytes());
                out.extend(life.salt.to_le_bytes());
                put_addr(out, *addr);
            }
            Frame::Message(bytes) | Frame::Swim(bytes) => out.extend(bytes),
            Frame::Report(groups) => {
                for group in groups.iter().take(REPORTS_MAX) {
                    put_name(out, &group.name);
                    out.extend(group.number.to_le_bytes());
                    out.extend(group.rate_bit_s.to_le_bytes());
                    out.push(place(group.algorithm));
                    out.extend(group.share_bit_s.to_le_bytes());
                    out.extend(group.demand_bit_s.to_le_bytes());
                }
            }
        }
        // What is cut here is no frame for who reads it; messages have bounds far below.
        out.truncate(at + BODY_MAX);
        let length = out.len() - at;
        let head =
            [length as u8 & 0x7f | if length > 0x7f { 0x80 } else { 0 }, (length >> 7) as u8];
        out.splice(at..at, head[..if length > 0x7f { 2 } else { 1 }].iter().copied());
    }

    /// Reads all frames of a payload; `None` if it is not exactly frames.
    pub fn decode(payload: &[u8]) -> Option<Vec<Frame>> {
        let mut r = Reader(payload);
        let mut frames = Vec::new();
        while !r.0.is_empty() {
            let kind = r.u8()?;
            let length = r.length()?;
            let mut body = Reader(r.take(length)?);
            frames.push(match kind {
                1 => Frame::Hello { name: body.name()? },
                2 => Frame::Challenge(body.u64()?),
                3 => Frame::Echo { cookie: body.u64()?, name: body.name()? },
                4 => Frame::Superseded { life: body.life()?, addr: body.addr()? },
                5 => Frame::Message(body.take(length)?.to_vec()),
                6 => Frame::Swim(body.take(length)?.to_vec()),
                7 => Frame::Report(reports(&mut body)?),
                _ => return None,
            });
            if !body.0.is_empty() {
                return None;
            }
        }
        Some(frames)
    }
}

fn place(algorithm: Algorithm) -> u8 {
    Algorithm::ALL.iter().position(|(one, _)| *one == algorithm).unwrap_or(0) as u8
}

fn reports(body: &mut Reader<'_>) -> Option<Vec<GroupReport>> {
    let mut groups = Vec::new();
    while !body.0.is_empty() {
        if groups.len() == REPORTS_MAX {
            return None;
        }
        groups.push(GroupReport {
            name: body.name()?,
            number: u32::from_le_bytes(body.array()?),
            rate_bit_s: body.u64()?,
            algorithm: Algorithm::ALL.get(usize::from(body.u8()?))?.0,
            share_bit_s: body.u64()?,
            demand_bit_s: body.u64()?,
        });
    }
    Some(groups)
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::{super::seal::PAYLOAD_MAX, *};

    pub fn frames() -> impl Strategy<Value = Frame> {
        let name = "[a-z0-9][a-z0-9._-]{0,62}";
        let addr = (any::<IpAddr>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port));
        let report =
            (name, any::<(u32, u64, u64, u64)>(), 0usize..5).prop_map(|(name, n, a)| GroupReport {
                name,
                number: n.0,
                rate_bit_s: n.1,
                algorithm: Algorithm::ALL[a].0,
                share_bit_s: n.2,
                demand_bit_s: n.3,
            });
        let bytes = || prop::collection::vec(any::<u8>(), 0..50);
        prop_oneof![
            name.prop_map(|name| Frame::Hello { name }),
            any::<u64>().prop_map(Frame::Challenge),
            (any::<u64>(), name).prop_map(|(cookie, name)| Frame::Echo { cookie, name }),
            (any::<(u64, u32)>(), addr).prop_map(|((session, salt), addr)| Frame::Superseded {
                life: Life { session, salt },
                addr,
            }),
            bytes().prop_map(Frame::Message),
            bytes().prop_map(Frame::Swim),
            prop::collection::vec(report, 0..=REPORTS_MAX).prop_map(Frame::Report),
        ]
    }

    proptest! {
        #[test]
        fn frames_have_one_form(
            frames in prop::collection::vec(frames(), 0..5),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = Vec::new();
            frames.iter().for_each(|frame| frame.encode(&mut bytes));
            prop_assert_eq!(Frame::decode(&bytes), Some(frames));
            if !bytes.is_empty() {
                let part = &bytes[..cut.index(bytes.len())];
                if let Some(frames) = Frame::decode(part) {
                    let mut again = Vec::new();
                    frames.iter().for_each(|frame| frame.encode(&mut again));
                    prop_assert_eq!(again, part);
                }
            }
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Some(frames) = Frame::decode(&bytes) {
                let mut again = Vec::new();
                frames.iter().for_each(|frame| frame.encode(&mut again));
                prop_assert_eq!(again, bytes);
            }
        }
    }

    #[test]
    fn a_message_comes_back_with_its_sender() {
        use tidegate_core::fleet::message::{Ask, Body};
        let max = u64::from(u32::MAX);
        for (id, began) in [(0, 0), (127, 1), (128, 127), (1 << 20, 128), (u32::MAX, max)] {
            for session in [1, 1 << 60, u64::MAX - max] {
                let (from, body) = (MemberId(id), Body::Ask(Ask::default()));
                let message = Message { group: 7, from, incarnation: session + began, body };
                let Frame::Message(bytes) = Frame::of_message(&message, session) else {
                    unreachable!()
                };
                assert_eq!(Frame::to_message(&bytes, from, session), Ok(message));
            }
        }
        for short in [&[1, 2][..], &[], &[0x80], &[0x80, 0], &[0xff; 9]] {
            assert_eq!(Frame::to_message(short, MemberId(1), 1), Err(DecodeError::Short));
        }
    }

    #[test]
    fn the_longest_report_fits_a_datagram() {
        let report = GroupReport {
            name: "x".repeat(63),
            number: 1,
            rate_bit_s: 1,
            algorithm: Algorithm::Fps,
            share_bit_s: 1,
            demand_bit_s: 1,
        };
        let mut bytes = Vec::new();
        Frame::Report(vec![report; REPORTS_MAX + 3]).encode(&mut bytes);
        assert!(bytes.len() <= PAYLOAD_MAX && Frame::decode(&bytes).is_some());
    }
}
