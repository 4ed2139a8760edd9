//! The Internet checksum (RFC 1071), for devices that do not compute it.

/// Completes the checksum that the stack has left to the device: the field at `start + offset` holds the
/// sum of the pseudo header, and everything from `start` on is added. False, and nothing is changed, if the
/// field is not within the frame.
pub fn complete(frame: &mut [u8], start: usize, offset: usize) -> bool {
    let Some(covered) = frame.get_mut(start..) else { return false };
    let sum = fold(sum(covered));
    let Some(field) = covered.get_mut(offset..offset.saturating_add(2)) else { return false };
    // Zero means "none" to UDP; the two are the same number otherwise.
    let checksum = if sum == 0xffff { 0xffff } else { !sum };
    field.copy_from_slice(&checksum.to_be_bytes());
    true
}

/// The sum of 16-bit big-endian words; an odd byte counts as the upper half of one.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(4);
    let whole: u64 =
        words.by_ref().map(|w| u64::from(u32::from_be_bytes([w[0], w[1], w[2], w[3]]))).sum();
    let mut rest = [0; 4];
    rest[..words.remainder().len()].copy_from_slice(words.remainder());
    whole + u64::from(u32::from_be_bytes(rest))
}

/// Folds a sum to 16 bits, the carries added in.
pub(crate) fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_example_of_rfc_1071() {
        assert_eq!(fold(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7])), 0xddf2);
    }

    #[test]
    fn a_field_outside_the_frame_changes_nothing() {
        let mut frame = [1; 10];
        for (start, offset) in [(11, 0), (8, 1), (0, 9), (usize::MAX, 0), (0, usize::MAX)] {
            assert!(!complete(&mut frame, start, offset), "{start} {offset}");
        }
        assert_eq!(frame, [1; 10]);
    }

    proptest! {
        /// A receiver's sum over pseudo header and packet is all ones.
        #[test]
        fn what_is_complete_verifies(
            mut frame in prop::collection::vec(any::<u8>(), 40..200), start in 0usize..20, pseudo: u16,
        ) {
            let at = start + 6;
            frame[at..at + 2].copy_from_slice(&pseudo.to_be_bytes());
            prop_assert!(complete(&mut frame, start, 6));
            prop_assert_eq!(fold(sum(&frame[start..]) + u64::from(pseudo)), 0xffff);
        }
    }
}
