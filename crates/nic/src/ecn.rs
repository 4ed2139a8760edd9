//! Explicit congestion notification in the IP header (RFC 3168): read, and set to congestion experienced.

use crate::headers::{Headers, Network};

const ECN_BITS: u8 = 0b11;
const CE: u8 = 0b11;

/// What an IP header says of its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ecn {
    /// It hears losses only, or the frame is not IP.
    NotCapable,
    /// It hears marks: ECT(0) or ECT(1).
    Capable,
    /// It is marked already.
    Marked,
}

/// Reads the two bits.
pub fn read(frame: &[u8]) -> Ecn {
    match Headers::parse(frame).and_then(|headers| bits(frame, &headers)) {
        None | Some(0) => Ecn::NotCapable,
        Some(CE) => Ecn::Marked,
        Some(_) => Ecn::Capable,
    }
}

/// Marks a frame whose sender hears marks; of a segment that is still to be cut, all that it will be. True
/// if it is marked now. The checksum of IPv4 is kept right (RFC 1624); IPv6 has none.
pub fn mark(frame: &mut [u8]) -> bool {
    let Some(headers) = Headers::parse(frame) else { return false };
    let at = headers.network_at;
    match bits(frame, &headers) {
        None | Some(0) => return false,
        Some(CE) => return true,
        Some(_) => {}
    }
    if headers.network == Network::Ipv6 {
        frame[at + 1] |= CE << 4;
        return true;
    }
    let before = u16::from_be_bytes([frame[at], frame[at + 1]]);
    frame[at + 1] |= CE;
    let after = u16::from_be_bytes([frame[at], frame[at + 1]]);
    let checksum = u16::from_be_bytes([frame[at + 10], frame[at + 11]]);
    let sum = u32::from(!checksum) + u32::from(!before) + u32::from(after);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    frame[at + 10..at + 12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    true
}

/// The bits; none where there is no whole IP header.
fn bits(frame: &[u8], headers: &Headers) -> Option<u8> {
    let byte = *frame.get(headers.network_at + 1)?;
    match headers.network {
        Network::Ipv4 => Some(byte & ECN_BITS),
        Network::Ipv6 => Some(byte >> 4 & ECN_BITS),
        Network::Other => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checksum::{fold, sum};

    /// An IPv4 frame with this traffic class and rest of the header, its checksum right.
    fn ipv4(class: u8, rest: &[u8; 18]) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00, 0x45, class]);
        frame.extend(rest);
        frame[24..26].fill(0);
        let checksum = !fold(sum(&frame[14..34]));
        frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        frame
    }

    fn ipv6(class: u8) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x86, 0xdd, 0x60 | class >> 4, class << 4]);
        frame.resize(54, 7);
        frame
    }

    #[test]
    fn ipv6_is_marked_and_nothing_else_of_it_changes() {
        let mut frame = ipv6(0b1010_1001);
        assert_eq!(read(&frame), Ecn::Capable);
        assert!(mark(&mut frame));
        assert_eq!(frame, ipv6(0b1010_1011));
        assert_eq!(read(&frame), Ecn::Marked);
    }

    #[test]
    fn what_hears_no_marks_stays_as_it_is() {
        let mut arp = vec![0; 60];
        arp[12..14].copy_from_slice(&[0x08, 0x06]);
        for frame in [arp, ipv4(0b1010_1000, &[3; 18]), ipv6(0), vec![], vec![0; 13]] {
            let mut marked = frame.clone();
            assert!(!mark(&mut marked));
            assert_eq!((read(&frame), frame), (Ecn::NotCapable, marked));
        }
    }

    proptest! {
        #[test]
        fn the_checksum_of_ipv4_stays_right(class in any::<u8>(), rest in any::<[u8; 18]>()) {
            let mut frame = ipv4(class, &rest);
            let capable = class & 3 != 0;
            prop_assert_eq!(mark(&mut frame), capable);
            prop_assert_eq!(fold(sum(&frame[14..34])), 0xffff);
            prop_assert_eq!(frame[15], if capable { class | 3 } else { class });
        }

        #[test]
        fn any_bytes_may_be_read(mut frame in prop::collection::vec(any::<u8>(), 0..80)) {
            let before = read(&frame);
            prop_assert_eq!(mark(&mut frame), before != Ecn::NotCapable);
        }
    }
}
