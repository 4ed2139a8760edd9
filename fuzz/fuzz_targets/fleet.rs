//! Any bytes as a message of a fleet: refused, or written again as they were. Any messages, forged ones too,
//! to a member of `share`: nothing panics, and it never takes more than the limit.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tidegate_core::{
    Nanos, Rate,
    fleet::{
        MemberId,
        level::Want,
        message::{Account, Answer, Ask, Body, Epoch, MESSAGE_MAX, Message, Promise, Propose},
        share::{Acceptor, Event, Share, ShareOptions},
    },
};

#[derive(Debug, Arbitrary)]
struct Case {
    id: u8,
    reserve: u16,
    steps: Vec<Step>,
}

/// Small numbers, so that they meet what the member knows.
#[derive(Debug, Arbitrary)]
enum Step {
    Time(u32),
    Timer,
    Leave,
    Want(u8, u64),
    Bytes(Vec<u8>),
    Ask { from: u8, life: u8, epoch: (u8, u8), number: u8, flags: u8, sums: [u64; 3] },
    Answer { from: u8, epoch: (u8, u8), number: u8, ages: [Option<u32>; 3], sums: Option<[u64; 3]> },
    Call { from: u8, epoch: (u8, u8) },
    Propose { from: u8, epoch: (u8, u8), poll: bool },
    Promise { from: u8, epoch: (u8, u8), number: u8, poll: bool, granted: bool, before: (u8, u8) },
}

const LIMIT: u64 = 10_000_000;

fn epoch((number, leader): (u8, u8)) -> Epoch {
    Epoch { number: (number % 8).into(), leader: MemberId((leader % 4).into()) }
}

fn body(step: &Step) -> Option<(u8, u8, Body)> {
    Some(match step {
        Step::Ask { from, life, epoch: at, number, flags, sums } => {
            let ask = Ask {
                epoch: epoch(*at),
                number: (*number).into(),
                entering: flags & 1 != 0,
                leaving: flags & 2 != 0,
                held_bit_s: sums[0],
                given_bit_s: sums[1],
                taken_bit_s: sums[2],
                flows: 1.0,
                demand_bit_s: u64::MAX,
            };
            (*from, *life, Body::Ask(ask))
        }
        Step::Answer { from, epoch: at, number, ages, sums } => {
            let account = sums.map(|[given_bit_s, taken_bit_s, target_bit_s]| Account {
                given_bit_s,
                taken_bit_s,
                target_bit_s,
            });
            let answer = Answer {
                epoch: epoch(*at),
                to_incarnation: 1,
                number: (*number).into(),
                newest: epoch(*at),
                ages_us: ages.to_vec(),
                account,
            };
            (*from, 1, Body::Answer(answer))
        }
        Step::Call { from, epoch: at } => (*from, 1, Body::Call(epoch(*at))),
        Step::Propose { from, epoch: at, poll } => {
            (*from, 1, Body::Propose(Propose { epoch: epoch(*at), number: 1, poll: *poll }))
        }
        Step::Promise { from, epoch: at, number, poll, granted, before } => {
            let promise = Promise {
                epoch: epoch(*at),
                to_incarnation: 1,
                number: (*number).into(),
                poll: *poll,
                granted: *granted,
                before: epoch(*before),
            };
            (*from, 1, Body::Promise(promise))
        }
        _ => return None,
    })
}

fuzz_target!(|case: Case| {
    let options = ShareOptions {
        group: 1,
        id: MemberId((case.id % 4).into()),
        incarnation: 1,
        limit: Rate::from_bit_s(LIMIT).expect("not zero"),
        reserve_per_mille: case.reserve % 1_001,
        members_max: 4,
        acceptors: (0..3).map(|id| Acceptor { id: MemberId(id), votes: 1 }).collect(),
        interval: Nanos(100_000_000),
        lease: Nanos(1_000_000_000),
        suspect: Nanos(1_000_000_000),
        rate_error_ppm: 1_000,
    };
    let mut now = Nanos(1_000_000_000_000);
    let mut share = Share::new(now, options, None).expect("good options");
    for step in &case.steps {
        match step {
            Step::Time(us) => now = Nanos(now.0 + u64::from(*us) * 1_000),
            Step::Timer => share.on_timer(now),
            Step::Leave => share.leave(now),
            Step::Want(flows, demand_bit_s) => {
                share.set_want(now, Want { flows: (*flows).into(), demand_bit_s: *demand_bit_s });
            }
            Step::Bytes(bytes) => {
                if let Ok(message) = Message::decode(bytes) {
                    let mut again = Vec::new();
                    message.encode(&mut again);
                    assert_eq!(&again, bytes, "one message, one form");
                    share.on_message(now, &message);
                }
            }
            other => {
                if let Some((from, life, body)) = body(other) {
                    let (from, incarnation) = (MemberId((from % 5).into()), (life % 4).into());
                    share.on_message(now, &Message { group: 1, from, incarnation, body });
                }
            }
        }
        assert!(share.grant().at(now) <= LIMIT);
        while let Some(event) = share.poll_event() {
            if let Event::Store(saved) = event {
                share.on_stored(now, saved);
            }
        }
        while let Some(transmit) = share.poll_transmit(true) {
            let mut bytes = Vec::new();
            transmit.message.encode(&mut bytes);
            assert!(bytes.len() <= MESSAGE_MAX);
            assert_eq!(Message::decode(&bytes).as_ref(), Ok(&transmit.message));
        }
    }
});
