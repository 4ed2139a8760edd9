//! What goes through the rings between a producer and a shaper.

use tidegate_core::{
    Nanos, Rate,
    shaper::{FlowId, FlowOptions},
};

use super::handles::Class;
use crate::packet::Packet;

/// To a shaper. A flow is known by its place in the producer's table.
#[derive(Debug)]
pub(super) enum Message {
    /// Shape it.
    Packet { slot: u32, wire_bytes: u32, cookie: u64, packet: Packet },
    /// A flow in a place that is free.
    Open { slot: u32, flow: Box<NewFlow> },
    /// Answered by [`Answer::Closed`] when its last packet has left.
    Close { slot: u32 },
    /// For packets to come.
    SetRate { slot: u32, rate: Option<Rate> },
}

/// A flow as the NIC knows it; the shaper has its own names of classes.
#[derive(Debug)]
pub(super) struct NewFlow {
    pub(super) options: FlowOptions,
    pub(super) class: Option<Class>,
}

/// Back to the producer: one for each packet and each close, so that their number is bounded by what the
/// producer sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Answer {
    pub(super) slot: u32,
    /// Of the packet, on the wire.
    pub(super) wire_bytes: u32,
    pub(super) kind: AnswerKind,
    pub(super) cookie: u64,
    pub(super) at: Nanos,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum AnswerKind {
    Done(Outcome),
    Closed,
}

/// What became of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The port has it.
    Sent,
    /// The shaper has it: the only message with immediate completion.
    Taken,
    /// The port went away, or there was none when its time had come.
    Lost,
    /// The shaper had no room, or its time was beyond the horizon, or its flow could not be opened there.
    Dropped,
}

/// A flow of a producer, as its shaper sees it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LaneFlow {
    /// None: it is not open.
    pub(super) id: Option<FlowId>,
    /// The class, as the NIC counts them, and one; zero: none.
    pub(super) class_plus_one: u32,
    /// Packets that have not left.
    pub(super) held: u32,
    /// The last batch that had a packet of it.
    pub(super) batch: u32,
    pub(super) closing: bool,
}
