use proptest::prelude::*;
use std::vec;

use super::*;

fn epoch() -> impl Strategy<Value = Epoch> {
    (any::<u64>(), any::<u32>())
        .prop_map(|(number, leader)| Epoch { number, leader: MemberId(leader) })
}

fn mass() -> impl Strategy<Value = Mass> {
    (-1e300f64..1e300, -1e300f64..1e300).prop_map(|(value, weight)| Mass { value, weight })
}

fn body() -> impl Strategy<Value = Body> {
    let n = any::<u64>;
    let ask = (epoch(), n(), any::<(bool, bool)>(), (n(), n(), n(), n()), 0.0f32..1e30).prop_map(
        |(epoch, number, (entering, leaving), (held, given, taken, demand), flows)| {
            Body::Ask(Ask {
                epoch,
                number,
                entering,
                leaving,
                held_bit_s: held,
                given_bit_s: given,
                taken_bit_s: taken,
                flows,
                demand_bit_s: demand,
            })
        },
    );
    let account = (n(), n(), n()).prop_map(|(given_bit_s, taken_bit_s, target_bit_s)| Account {
        given_bit_s,
        taken_bit_s,
        target_bit_s,
    });
    let ages = prop::collection::vec(any::<Option<u32>>(), 0..=ACCEPTORS_MAX);
    let answer = (epoch(), n(), n(), epoch(), ages, prop::option::of(account)).prop_map(
        |(epoch, to_incarnation, number, newest, ages_us, account)| {
            Body::Answer(Answer { epoch, to_incarnation, number, newest, ages_us, account })
        },
    );
    let propose = (epoch(), n(), any::<bool>())
        .prop_map(|(epoch, number, poll)| Body::Propose(Propose { epoch, number, poll }));
    let promise = (epoch(), n(), n(), any::<(bool, bool)>(), epoch()).prop_map(
        |(epoch, to_incarnation, number, (poll, granted), before)| {
            Body::Promise(Promise { epoch, to_incarnation, number, poll, granted, before })
        },
    );
    let entry = (any::<u32>(), n(), -1e30f32..1e30).prop_map(|(member, version, value)| Entry {
        member: MemberId(member),
        version,
        value,
    });
    prop_oneof![
        ask,
        answer,
        epoch().prop_map(Body::Call),
        propose,
        promise,
        prop::collection::vec(entry, 0..=ENTRIES_MAX).prop_map(Body::Values),
        (n(), mass()).prop_map(|(number, mass)| Body::Mass { number, mass }),
    ]
}

proptest! {
    #[test]
    fn what_is_written_reads_back(
        group: u32, from: u32, incarnation: u64, body in body(), cut: prop::sample::Index,
    ) {
        let message = Message { group, from: MemberId(from), incarnation, body };
        let mut bytes = vec![];
        message.encode(&mut bytes);
        prop_assert!(bytes.len() <= MESSAGE_MAX);
        prop_assert_eq!(Message::decode(&bytes), Ok(message));
        prop_assert!(Message::decode(&bytes[..cut.index(bytes.len())]).is_err());
        bytes.push(0);
        prop_assert!(Message::decode(&bytes).is_err());
    }

    /// A message that is read has no other encoding: it is written as it was read.
    #[test]
    fn any_bytes_are_refused_or_are_one_message(mut bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        if bytes.len() > 2 {
            bytes[0] = VERSION;
            bytes[1] %= 10;
        }
        if let Ok(message) = Message::decode(&bytes) {
            let mut again = vec![];
            message.encode(&mut again);
            prop_assert_eq!(again, bytes);
        }
    }
}

/// A sum of no floats is -0.0.
#[test]
fn who_has_no_flows_is_read() {
    let flows = std::iter::empty::<f32>().sum();
    let body = Body::Ask(Ask { flows, ..Ask::default() });
    let message = Message { group: 7, from: MemberId(300), incarnation: 9, body };
    let mut bytes = vec![];
    message.encode(&mut bytes);
    assert_eq!(Message::decode(&bytes), Ok(message));
}

#[test]
fn refusals_say_why() {
    let mut bytes = vec![];
    let from = MemberId(300);
    Message { group: 7, from, incarnation: 9, body: Body::Call(Epoch::NONE) }.encode(&mut bytes);
    assert_eq!(bytes, [1, 3, 7, 0, 0, 0, 0xac, 2, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        Message::decode(&bytes).unwrap_err()
    };
    assert_eq!(with(0, 2), DecodeError::Version(2));
    assert_eq!(with(1, 9), DecodeError::Kind(9));
    assert_eq!(with(7, 0), DecodeError::Number, "a longer form of 44");
    assert_eq!(Message::decode(&[1; MESSAGE_MAX + 1]), Err(DecodeError::TooMany));
}
