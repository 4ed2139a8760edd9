//! Any bytes as a datagram of the gossip, and any payload that is sealed well: nothing panics, frames have
//! one form, and what is altered is not opened.

#![no_main]

use std::{net::SocketAddr, path::Path};

use libfuzzer_sys::fuzz_target;
use tidegate_core::{Nanos, fleet::MemberId};
use tidegate_fleet::{
    frame::Frame,
    keys::KeyRing,
    membership::{Contact, Membership, Swim},
    seal::{Life, PAYLOAD_MAX, Sealer, open},
    session::Sessions,
};

fuzz_target!(|bytes: &[u8]| {
    let keys = KeyRing::parse(Path::new("k"), &format!("1 {}", "07".repeat(32))).expect("a key");
    let (own, other) = (MemberId(1), MemberId(2));
    let from = SocketAddr::from(([10, 0, 0, 1], 7946));
    assert!(open(&keys, 7, own, bytes).is_err(), "nobody has sealed it");
    let payload = &bytes[..bytes.len().min(PAYLOAD_MAX)];
    let life = Life { session: 1, salt: 2 };
    let mut sealed =
        Sealer::new(7, other, life).seal(&keys, Some(own), payload).expect("not too long");
    let opened = open(&keys, 7, own, &sealed).expect("sealed well");
    assert_eq!(opened.payload, payload);
    let mut sessions = Sessions::default();
    sessions.accept(Nanos(0), from, &opened, 3);
    if let Some(frames) = Frame::decode(payload) {
        let mut again = Vec::new();
        frames.iter().for_each(|frame| frame.encode(&mut again));
        assert_eq!(again, payload, "one payload, one form");
        let contact = Contact { id: own, session: 1, addr: from, name: "n".into() };
        let mut swim = Swim::new(contact, 1);
        for frame in frames {
            if let Frame::Swim(bytes) = frame {
                let _ = swim.on_bytes(Nanos(0), other, &bytes);
                while swim.poll_transmit().is_some() {}
            }
        }
    }
    let mut swim = Swim::new(Contact { id: own, session: 1, addr: from, name: "n".into() }, 1);
    let _ = swim.on_bytes(Nanos(0), other, bytes);
    if let Some(first) = payload.first() {
        let at = usize::from(*first) * 31 % sealed.len();
        sealed[at] ^= 1 << (payload.len() % 8);
        assert!(open(&keys, 7, own, &sealed).is_err(), "altered at {at}");
    }
});
