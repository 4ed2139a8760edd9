//! A datagram: a header in the clear, and what is sealed with XChaCha20-Poly1305.
//!
//! ```text
//!   0  version u8, 2; with bit 7 for whoever receives it, else for one node
//!   1  number of the key u8
//!   2  cluster, low 16 bits   4  sender u32
//!   8  session u64   16  salt u32   20  number, 48 bits
//!   26 sealed payload      then the tag, 16 bytes             all little-endian
//!   nonce = sender, session, salt, number, "t2"
//!   also authenticated: the header, the receiver u32, the cluster u32
//! ```
//!
//! A session is one life of a sender, greater after each restart, and numbers its datagrams from 1. The salt
//! is drawn afresh in each life, so two machines that were copied from one, with its name, keys and state,
//! never use one nonce twice either. Whose datagrams are taken is [`super::session`]'s affair; here is only
//! what one datagram says for itself.
//!
//! The first eight bytes are the same in every version, so that nodes of two releases can say of each other
//! that they do not understand each other ([`claim`]).

use chacha20poly1305::{AeadInPlace, Tag, XNonce};
use tidegate_core::fleet::MemberId;

use super::keys::KeyRing;

/// The version of the form; others are dropped.
pub const VERSION: u8 = 2;
/// For whoever receives it.
const ANYONE: u8 = 0x80;
/// Length of the header.
pub const HEADER_BYTES: usize = 26;
/// Length of what is the same in every version.
const CLAIM_BYTES: usize = 8;
/// A session has no more datagrams: at a million a second, nine years.
const NUMBER_MAX: u64 = (1 << 48) - 1;
/// Length of the tag.
pub const TAG_BYTES: usize = 16;
/// No payload is longer: with the headers of UDP and IPv6 a datagram fits 1400 bytes.
pub const PAYLOAD_MAX: usize = 1_300;
/// No datagram is longer.
pub const DATAGRAM_MAX: usize = HEADER_BYTES + PAYLOAD_MAX + TAG_BYTES;

/// Why a datagram was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// Too short or too long for one of ours.
    Length,
    /// Of another version of the protocol.
    Version,
    Cluster,
    /// Under a key that is not in the file.
    Key,
    /// Not as it was sealed: another key of this number, another receiver, or altered.
    Seal,
    /// It was taken before, or is too old to tell.
    Replay,
    /// Of an earlier life of its sender.
    Stale,
    /// Its sender has yet to show that it lives.
    Unproven,
    /// What was sealed is not in the form that is read.
    Content,
    /// It speaks for another node than its sender.
    Sender,
    /// There are as many nodes as can be known.
    Crowd,
}

/// Every cause, with its name in metrics and what to think of it.
pub const CAUSES: [(Cause, &str, &str); 11] = [
    (Cause::Length, "length", "too short or long: not from a tidegate"),
    (Cause::Version, "version", "another version of the protocol: run one release on all nodes"),
    (Cause::Cluster, "cluster", "of another cluster: their [fleet] name differs"),
    (Cause::Key, "key", "under a key whose number is not in the key file"),
    (Cause::Seal, "seal", "not as sealed: another key of the same number, or altered on the way"),
    (Cause::Replay, "replay", "taken before, or long overtaken"),
    (Cause::Stale, "stale", "of an earlier life of its sender"),
    (
        Cause::Unproven,
        "unproven",
        "before its sender has answered a challenge: a few at each start",
    ),
    (Cause::Content, "content", "sealed well, but not in the form that is read"),
    (Cause::Sender, "sender", "speaks for another node than its sender"),
    (Cause::Crowd, "crowd", "from one node more than can be known"),
];

/// How many datagrams were dropped, by cause.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Drops([u64; CAUSES.len()]);

impl Drops {
    pub fn count(&mut self, cause: Cause) {
        self.0[cause as usize] += 1;
    }

    pub fn of(&self, cause: Cause) -> u64 {
        self.0[cause as usize]
    }
}

/// One life of a node. Of two the greater is the later.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Life {
    /// Greater than any before.
    pub session: u64,
    /// Drawn at the start: what tells copies of one machine apart.
    pub salt: u32,
}

/// A datagram that was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    pub sender: MemberId,
    /// Which life of it.
    pub life: Life,
    /// Its number in that life.
    pub number: u64,
    /// Whether it was for whoever receives it.
    pub for_anyone: bool,
    /// What was sealed.
    pub payload: Vec<u8>,
}

/// Seals the datagrams of one life of a node.
#[derive(Debug)]
pub struct Sealer {
    cluster: u32,
    sender: MemberId,
    life: Life,
    number: u64,
}

impl Sealer {
    /// A new life.
    pub fn new(cluster: u32, sender: MemberId, life: Life) -> Sealer {
        Sealer { cluster, sender, life, number: 0 }
    }

    /// Seals a payload for `to`, or for whoever receives it. One that is too long gives nothing.
    pub fn seal(
        &mut self,
        keys: &KeyRing,
        to: Option<MemberId>,
        payload: &[u8],
    ) -> Option<Vec<u8>> {
        if payload.len() > PAYLOAD_MAX || self.number == NUMBER_MAX {
            return None;
        }
        self.number += 1;
        let (key, cipher) = keys.sealing();
        let mut out = Vec::with_capacity(HEADER_BYTES + payload.len() + TAG_BYTES);
        out.push(VERSION | if to.is_none() { ANYONE } else { 0 });
        out.push(key);
        out.extend(&self.cluster.to_le_bytes()[..2]);
        out.extend(self.sender.0.to_le_bytes());
        out.extend(self.life.session.to_le_bytes());
        out.extend(self.life.salt.to_le_bytes());
        out.extend(&self.number.to_le_bytes()[..6]);
        let nonce = nonce(&out);
        let aad = authenticated(&out, to.unwrap_or_default(), self.cluster);
        out.extend(payload);
        let sealed = &mut out[HEADER_BYTES..];
        let tag = cipher.encrypt_in_place_detached(&nonce, &aad, sealed).ok()?;
        out.extend(tag);
        Some(out)
    }
}

/// The sender, life and number of a header, and what tells it from nonces of other versions.
fn nonce(header: &[u8]) -> XNonce {
    let mut nonce = [0u8; 24];
    nonce[..22].copy_from_slice(&header[4..HEADER_BYTES]);
    nonce[22..].copy_from_slice(b"t2");
    XNonce::from(nonce)
}

fn number_at(header: &[u8], at: usize, bytes: usize) -> u64 {
    header[at..at + bytes].iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte))
}

/// The version and the sender that a datagram of this cluster claims to have, if the version is another.
/// Nothing of that is authenticated.
pub fn claim(cluster: u32, bytes: &[u8]) -> Option<(u8, MemberId)> {
    if !(CLAIM_BYTES + TAG_BYTES..=DATAGRAM_MAX).contains(&bytes.len()) {
        return None;
    }
    let version = bytes[0] & !ANYONE;
    let ours = number_at(bytes, 2, 2) == u64::from(cluster & 0xffff);
    let sender = MemberId(number_at(bytes, 4, 4) as u32);
    (ours && version != VERSION && version > 0).then_some((version, sender))
}

fn authenticated(header: &[u8], to: MemberId, cluster: u32) -> [u8; HEADER_BYTES + 8] {
    let mut aad = [0u8; HEADER_BYTES + 8];
    aad[..HEADER_BYTES].copy_from_slice(&header[..HEADER_BYTES]);
    aad[HEADER_BYTES..HEADER_BYTES + 4].copy_from_slice(&to.0.to_le_bytes());
    aad[HEADER_BYTES + 4..].copy_from_slice(&cluster.to_le_bytes());
    aad
}

/// Opens a datagram for `own`.
///
/// # Errors
/// The [`Cause`] to drop it for.
pub fn open(keys: &KeyRing, cluster: u32, own: MemberId, bytes: &[u8]) -> Result<Opened, Cause> {
    if !(HEADER_BYTES + TAG_BYTES..=DATAGRAM_MAX).contains(&bytes.len()) {
        return Err(Cause::Length);
    }
    let (header, rest) = bytes.split_at(HEADER_BYTES);
    if header[0] & !ANYONE != VERSION {
        return Err(Cause::Version);
    }
    if number_at(header, 2, 2) != u64::from(cluster & 0xffff) {
        return Err(Cause::Cluster);
    }
    let cipher = keys.opening(header[1]).ok_or(Cause::Key)?;
    let for_anyone = header[0] & ANYONE != 0;
    let to = if for_anyone { MemberId::default() } else { own };
    let (sealed, tag) = rest.split_at(rest.len() - TAG_BYTES);
    let mut payload = sealed.to_vec();
    cipher
        .decrypt_in_place_detached(
            &nonce(header),
            &authenticated(header, to, cluster),
            &mut payload,
            Tag::from_slice(tag),
        )
        .map_err(|_| Cause::Seal)?;
    let sender = MemberId(number_at(header, 4, 4) as u32);
    let life = Life { session: number_at(header, 8, 8), salt: number_at(header, 16, 4) as u32 };
    Ok(Opened { sender, life, number: number_at(header, 20, 6), for_anyone, payload })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn ring(lines: &[(u8, u8)]) -> KeyRing {
        let line = |(id, key): &(u8, u8)| format!("{id} {}\n", format!("{key:02x}").repeat(32));
        let text: String = lines.iter().map(line).collect();
        KeyRing::parse(Path::new("k"), &text).unwrap()
    }

    fn life(session: u64) -> Life {
        Life { session, salt: 77 }
    }

    /// Two copies of one machine: name, keys, session and numbers are the same.
    #[test]
    fn copies_of_a_machine_share_no_nonce() {
        let keys = ring(&[(1, 1)]);
        let sealed = |salt| {
            let mut sealer = Sealer::new(7, MemberId(1), Life { session: 5, salt });
            sealer.seal(&keys, Some(MemberId(2)), &[0; 32]).unwrap()
        };
        let (one, other) = (sealed(1), sealed(2));
        assert_ne!(nonce(&one), nonce(&other));
        // What is sealed is zeros, so these are the key streams.
        assert_ne!(one[HEADER_BYTES..][..32], other[HEADER_BYTES..][..32]);
    }

    #[test]
    fn other_versions_are_distinguished_from_other_clusters_and_junk() {
        let keys = ring(&[(1, 1)]);
        let mut bytes = Sealer::new(7, MemberId(9), life(5)).seal(&keys, None, b"hello").unwrap();
        assert_eq!(claim(7, &bytes), None, "of this version");
        for version in [VERSION - 1, VERSION + 1, 0x7f] {
            bytes[0] = version | ANYONE;
            assert_eq!(open(&keys, 7, MemberId(2), &bytes), Err(Cause::Version));
            assert_eq!(claim(7, &bytes), Some((version, MemberId(9))));
            assert_eq!(claim(8, &bytes), None, "of another cluster");
            assert_eq!(claim(7, &bytes[..CLAIM_BYTES]), None, "too short");
        }
        // As the first release wrote it: a header of 22 bytes.
        let mut old = vec![1, 1, 7, 0];
        old.extend(9u32.to_le_bytes());
        old.extend([0; 14 + TAG_BYTES]);
        assert_eq!(claim(7, &old), Some((1, MemberId(9))));
    }

    #[test]
    fn causes_are_in_the_order_of_their_table() {
        for (i, (cause, name, _)) in CAUSES.iter().enumerate() {
            assert_eq!(*cause as usize, i, "{name}");
        }
    }

    #[test]
    fn keys_are_changed_without_a_gap() {
        let (old, both) = (ring(&[(1, 1)]), ring(&[(1, 1), (2, 2)]));
        let (turned, new) = (ring(&[(2, 2), (1, 1)]), ring(&[(2, 2)]));
        let mut sealer = Sealer::new(1, MemberId(1), life(1));
        let mut seal = |keys| sealer.seal(keys, Some(MemberId(2)), b"x").unwrap();
        let opens = |keys, bytes: &[u8]| open(keys, 1, MemberId(2), bytes).map(drop);
        for (sends, hears) in
            [(&old, &both), (&both, &old), (&both, &turned), (&turned, &both), (&turned, &new)]
        {
            assert_eq!(opens(hears, &seal(sends)), Ok(()));
        }
        assert_eq!(opens(&old, &seal(&new)), Err(Cause::Key));
        assert_eq!(
            opens(&ring(&[(1, 9)]), &seal(&old)),
            Err(Cause::Seal),
            "same number, other key"
        );
    }

    #[test]
    fn datagrams_for_others_and_other_clusters_are_dropped() {
        let keys = ring(&[(1, 1)]);
        let mut sealer = Sealer::new(7, MemberId(1), life(5));
        let one = sealer.seal(&keys, Some(MemberId(2)), b"hello").unwrap();
        assert_eq!(open(&keys, 7, MemberId(3), &one), Err(Cause::Seal));
        assert_eq!(open(&keys, 8, MemberId(2), &one), Err(Cause::Cluster));
        let opened = open(&keys, 7, MemberId(2), &one).unwrap();
        assert_eq!((opened.sender, opened.life, opened.number), (MemberId(1), life(5), 1));
        assert!(!opened.for_anyone && opened.payload == b"hello");
        let any = sealer.seal(&keys, None, b"hello").unwrap();
        assert!(open(&keys, 7, MemberId(3), &any).unwrap().for_anyone);
        assert_eq!(sealer.seal(&keys, None, &[0; PAYLOAD_MAX + 1]), None);
    }

    /// Every bit counts, and so does the length. The header says more than that it is not as sealed.
    #[test]
    fn nothing_altered_is_opened() {
        let keys = ring(&[(1, 1)]);
        for to in [None, Some(MemberId(2))] {
            let bytes = Sealer::new(7, MemberId(1), life(5)).seal(&keys, to, b"hello").unwrap();
            let opens = |bytes: &[u8]| open(&keys, 7, MemberId(2), bytes);
            assert_eq!(opens(&bytes).unwrap().payload, b"hello");
            for (at, bit) in (0..bytes.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
                let cause = match at {
                    0 if bit < 7 => Cause::Version,
                    1 => Cause::Key,
                    2 | 3 => Cause::Cluster,
                    _ => Cause::Seal,
                };
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                assert_eq!(opens(&bad), Err(cause), "bit {bit} of byte {at}");
            }
            for length in 0..bytes.len() {
                let too_short = length < HEADER_BYTES + TAG_BYTES;
                let cause = if too_short { Cause::Length } else { Cause::Seal };
                assert_eq!(opens(&bytes[..length]), Err(cause), "{length} bytes");
            }
            assert_eq!(opens(&[&bytes[..], &[0]].concat()), Err(Cause::Seal), "one byte more");
        }
    }

    /// The header of one datagram does not open the payload of another.
    #[test]
    fn parts_of_two_datagrams_are_not_opened() {
        let keys = ring(&[(1, 1)]);
        let mut sealer = Sealer::new(7, MemberId(1), life(5));
        let mut seal = || sealer.seal(&keys, None, b"hello").unwrap();
        let (first, second) = (seal(), seal());
        assert_ne!(nonce(&first), nonce(&second));
        let mixed = [&first[..HEADER_BYTES], &second[HEADER_BYTES..]].concat();
        assert_eq!(open(&keys, 7, MemberId(2), &mixed), Err(Cause::Seal));
    }

    proptest! {
        #[test]
        fn what_was_sealed_is_opened(
            payload in prop::collection::vec(any::<u8>(), 0..=PAYLOAD_MAX),
            to in prop::option::of(Just(MemberId(2))),
        ) {
            let keys = ring(&[(1, 1)]);
            let bytes = Sealer::new(7, MemberId(1), life(5)).seal(&keys, to, &payload).unwrap();
            prop_assert_eq!(open(&keys, 7, MemberId(2), &bytes).unwrap().payload, payload);
        }

        /// Bytes behind a header that passes, so that they reach the cipher.
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), HEADER_BYTES..DATAGRAM_MAX + 50)) {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&[VERSION, 1, 7, 0]);
            let fits = (HEADER_BYTES + TAG_BYTES..=DATAGRAM_MAX).contains(&bytes.len());
            let cause = if fits { Cause::Seal } else { Cause::Length };
            prop_assert_eq!(open(&ring(&[(1, 1)]), 7, MemberId(2), &bytes), Err(cause));
        }
    }
}
