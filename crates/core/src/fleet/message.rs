//! The messages of members, and their encoding.
//!
//! A compact binary form, version [`VERSION`], read strictly: every message has one encoding, and anything
//! else is refused with the cause. Lengths are bounded by [`MESSAGE_MAX`], so a message fits one datagram
//! with the transport's seal. Nothing here is secret or signed: authentication and freshness of the sender
//! belong to the transport.
//!
//! ```text
//!   version u8, kind u8, group u32, from varint, incarnation u64, then the body
//!   varint: LEB128, the shortest form only; fixed integers and floats little-endian; floats finite
//! ```

use alloc::vec::Vec;

use super::MemberId;

mod wire;

use wire::{Reader, Writer};

/// The version of the encoding; a reader refuses any other.
pub const VERSION: u8 = 1;
/// No message is longer, in bytes.
pub const MESSAGE_MAX: usize = 1_200;
/// The most acceptors of a group.
pub const ACCEPTORS_MAX: usize = 9;
/// The most entries of one [`Body::Values`].
pub const ENTRIES_MAX: usize = 60;

/// A message and its sender.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// The group. Members of other groups refuse the message.
    pub group: u32,
    /// The sender.
    pub from: MemberId,
    /// The incarnation of the sender: greater after every restart.
    pub incarnation: u64,
    /// The content.
    pub body: Body,
}

/// The content of a message.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// To a leader or an acceptor: the state of a member.
    Ask(Ask),
    /// To the sender of an [`Ask`].
    Answer(Answer),
    /// From a leader whose epoch has begun: join it, with what you hold.
    Call(Epoch),
    /// To an acceptor: promise to help no older epoch.
    Propose(Propose),
    /// From an acceptor.
    Promise(Promise),
    /// Parts of a versioned vector.
    Values(Vec<Entry>),
    /// A part of the sender's mass in push-sum, and its number to this receiver, from 1.
    Mass {
        /// Consecutive for each pair, so that a gap reveals losses.
        number: u64,
        /// The part.
        mass: Mass,
    },
}

/// A numbered division of the limit; see [`super::share`].
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch {
    /// Greater than any that its leader had seen.
    pub number: u64,
    /// The acceptor that leads the epoch.
    pub leader: MemberId,
}

impl Epoch {
    /// Before the first epoch.
    pub const NONE: Epoch = Epoch { number: 0, leader: MemberId(0) };
}

/// A member's state. Totals only grow within an epoch and cover it from its start, so any message contains
/// all that earlier ones said.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Ask {
    /// The epoch it is about.
    pub epoch: Epoch,
    /// The number of this ask, or proposal, of this incarnation of the sender.
    pub number: u64,
    /// The sender answers a call: `held` is what it brings, and it moves nothing in older epochs any more.
    pub entering: bool,
    /// The sender has given all it had and leaves.
    pub leaving: bool,
    /// Capacity it holds, in bit/s.
    pub held_bit_s: u64,
    /// Given to the leader in total, in bit/s.
    pub given_bit_s: u64,
    /// Taken from the leader in total, in bit/s.
    pub taken_bit_s: u64,
    /// Its greedy flows, at least 0.
    pub flows: f32,
    /// The most it can use, in bit/s.
    pub demand_bit_s: u64,
}

/// An answer to an [`Ask`].
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Answer {
    /// The epoch of the ask.
    pub epoch: Epoch,
    /// The incarnation of the asker.
    pub to_incarnation: u64,
    /// The number of the ask.
    pub number: u64,
    /// The newest epoch that the sender knows of.
    pub newest: Epoch,
    /// For each acceptor, in the group's order: how long ago it had promised nothing newer than the epoch, in
    /// microseconds; none if not known.
    pub ages_us: Vec<Option<u32>>,
    /// If the leader answers: what it gave and took, and what the member should hold.
    pub account: Option<Account>,
}

/// The leader's account of a member. Totals as in [`Ask`].
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    /// Given by the leader in total, in bit/s.
    pub given_bit_s: u64,
    /// Taken by the leader in total, in bit/s.
    pub taken_bit_s: u64,
    /// The capacity that the member should hold, in bit/s: it gives back the rest.
    pub target_bit_s: u64,
}

/// A proposal of an epoch.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Propose {
    /// The epoch.
    pub epoch: Epoch,
    /// Its number, in one sequence with the sender's asks.
    pub number: u64,
    /// Only asks whether it would be promised; commits nobody.
    pub poll: bool,
}

/// An acceptor's answer to a [`Propose`].
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Promise {
    /// The epoch proposed.
    pub epoch: Epoch,
    /// The incarnation of the proposer.
    pub to_incarnation: u64,
    /// The number of the proposal.
    pub number: u64,
    /// As in the proposal.
    pub poll: bool,
    /// Whether it is promised.
    pub granted: bool,
    /// The epoch that the acceptor had promised before or, if it refuses, the one that it has promised.
    pub before: Epoch,
}

/// One member's value in a versioned vector.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Entry {
    /// The member.
    pub member: MemberId,
    /// Grows with each change, also over restarts.
    pub version: u64,
    /// The value.
    pub value: f32,
}

/// A value with its weight, as in push-sum.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Mass {
    /// The value.
    pub value: f64,
    /// The weight.
    pub weight: f64,
}

/// Why bytes are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Another version of the encoding.
    #[error("version {0} of the encoding, where {VERSION} is read: run one release on all members")]
    Version(u8),
    /// No such kind of message.
    #[error("kind {0} of message is unknown")]
    Kind(u8),
    /// The message is truncated.
    #[error("the message ends in the middle")]
    Short,
    /// There are bytes after its end.
    #[error("{0} bytes after the end of the message")]
    Long(usize),
    /// More bytes or parts than a message may have.
    #[error("more parts than a message may have")]
    TooMany,
    /// A number that is not in its shortest form or does not fit.
    #[error("a number is not in its shortest form, or does not fit")]
    Number,
    /// A float that is not finite, or negative where that is not allowed; an invalid flag.
    #[error("a value is out of its range")]
    Range,
}

impl Message {
    /// Appends the message to `out`. At most [`MESSAGE_MAX`] bytes, as long as lists are within their bounds;
    /// longer ones are cut to them.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        w.u8(VERSION);
        w.u8(self.body.kind());
        w.u32(self.group);
        w.varint(self.from.0.into());
        w.u64(self.incarnation);
        match &self.body {
            Body::Ask(ask) => {
                w.epoch(ask.epoch);
                w.varint(ask.number);
                w.u8(u8::from(ask.entering) | u8::from(ask.leaving) << 1);
                w.varint(ask.held_bit_s);
                w.varint(ask.given_bit_s);
                w.varint(ask.taken_bit_s);
                // The sum of no floats is -0.0: zero has one encoding.
                w.f32(ask.flows + 0.0);
                // Usually there is no bound: that has the shortest form.
                w.varint(ask.demand_bit_s.wrapping_add(1));
            }
            Body::Answer(answer) => {
                w.epoch(answer.epoch);
                w.u64(answer.to_incarnation);
                w.varint(answer.number);
                w.epoch(answer.newest);
                let ages = &answer.ages_us[..answer.ages_us.len().min(ACCEPTORS_MAX)];
                w.u8(ages.len() as u8 | u8::from(answer.account.is_some()) << 7);
                for age in ages {
                    w.varint(age.map_or(0, |age| u64::from(age) + 1));
                }
                if let Some(account) = answer.account {
                    w.varint(account.given_bit_s);
                    w.varint(account.taken_bit_s);
                    w.varint(account.target_bit_s);
                }
            }
            Body::Call(epoch) => w.epoch(*epoch),
            Body::Propose(propose) => {
                w.epoch(propose.epoch);
                w.varint(propose.number);
                w.u8(propose.poll.into());
            }
            Body::Promise(promise) => {
                w.epoch(promise.epoch);
                w.u64(promise.to_incarnation);
                w.varint(promise.number);
                w.u8(u8::from(promise.poll) | u8::from(promise.granted) << 1);
                w.epoch(promise.before);
            }
            Body::Values(entries) => {
                let entries = &entries[..entries.len().min(ENTRIES_MAX)];
                w.u8(entries.len() as u8);
                for entry in entries {
                    w.varint(entry.member.0.into());
                    w.varint(entry.version);
                    w.f32(entry.value);
                }
            }
            Body::Mass { number, mass } => {
                w.varint(*number);
                w.mass(*mass);
            }
        }
    }

    /// Reads the message in `bytes`.
    ///
    /// # Errors
    /// If they are not exactly one message; see [`DecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Message, DecodeError> {
        if bytes.len() > MESSAGE_MAX {
            return Err(DecodeError::TooMany);
        }
        let mut r = Reader(bytes);
        let version = r.u8()?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let kind = r.u8()?;
        let group = r.u32()?;
        let from = r.member()?;
        let incarnation = r.u64()?;
        let body = match kind {
            1 => Body::Ask(ask(&mut r)?),
            2 => Body::Answer(answer(&mut r)?),
            3 => Body::Call(r.epoch()?),
            4 => Body::Propose(Propose {
                epoch: r.epoch()?,
                number: r.varint()?,
                poll: r.flags(1)? == 1,
            }),
            5 => {
                let (epoch, to_incarnation, number) = (r.epoch()?, r.u64()?, r.varint()?);
                let flags = r.flags(2)?;
                let (poll, granted) = (flags & 1 != 0, flags & 2 != 0);
                let before = r.epoch()?;
                Body::Promise(Promise { epoch, to_incarnation, number, poll, granted, before })
            }
            6 => {
                let count = usize::from(r.u8()?);
                if count > ENTRIES_MAX {
                    return Err(DecodeError::TooMany);
                }
                let entry = |r: &mut Reader<'_>| {
                    let (member, version) = (r.member()?, r.varint()?);
                    Ok(Entry { member, version, value: r.f32()? })
                };
                Body::Values((0..count).map(|_| entry(&mut r)).collect::<Result<_, _>>()?)
            }
            7 => Body::Mass { number: r.varint()?, mass: r.mass()? },
            other => return Err(DecodeError::Kind(other)),
        };
        match r.0.len() {
            0 => Ok(Message { group, from, incarnation, body }),
            more => Err(DecodeError::Long(more)),
        }
    }
}

impl Body {
    fn kind(&self) -> u8 {
        match self {
            Body::Ask(_) => 1,
            Body::Answer(_) => 2,
            Body::Call(_) => 3,
            Body::Propose(_) => 4,
            Body::Promise(_) => 5,
            Body::Values(_) => 6,
            Body::Mass { .. } => 7,
        }
    }
}

fn ask(r: &mut Reader<'_>) -> Result<Ask, DecodeError> {
    let (epoch, number, flags) = (r.epoch()?, r.varint()?, r.flags(2)?);
    Ok(Ask {
        epoch,
        number,
        entering: flags & 1 != 0,
        leaving: flags & 2 != 0,
        held_bit_s: r.varint()?,
        given_bit_s: r.varint()?,
        taken_bit_s: r.varint()?,
        flows: match r.f32()? {
            flows if flows.is_sign_negative() => return Err(DecodeError::Range),
            flows => flows,
        },
        demand_bit_s: r.varint()?.wrapping_sub(1),
    })
}

fn answer(r: &mut Reader<'_>) -> Result<Answer, DecodeError> {
    let (epoch, to_incarnation, number, newest) = (r.epoch()?, r.u64()?, r.varint()?, r.epoch()?);
    let head = r.u8()?;
    let count = usize::from(head & 0x7f);
    if count > ACCEPTORS_MAX {
        return Err(DecodeError::TooMany);
    }
    let age = |r: &mut Reader<'_>| match r.varint()? {
        0 => Ok(None),
        age => u32::try_from(age - 1).map(Some).map_err(|_| DecodeError::Number),
    };
    let ages_us = (0..count).map(|_| age(r)).collect::<Result<_, _>>()?;
    let account = if head & 0x80 != 0 {
        Some(Account {
            given_bit_s: r.varint()?,
            taken_bit_s: r.varint()?,
            target_bit_s: r.varint()?,
        })
    } else {
        None
    };
    Ok(Answer { epoch, to_incarnation, number, newest, ages_us, account })
}

#[cfg(test)]
mod tests;
