//! One direction of a cable: the link that judges, the wheel that keeps, the packets on the way.

use std::collections::VecDeque;

use rand_xoshiro::{Xoshiro256PlusPlus, rand_core::Rng as _};
use tidegate_core::{
    DropReason, Nanos, Verdict,
    link::{Link, LinkOptions},
    wheel::Wheel,
};

use super::{CableError, LaneCounters, Size};
use crate::{
    buffer::SMALL_BUFFER_BYTES,
    packet::Packet,
    pool::PacketPool,
    port::{Port, PortError},
};

/// Most packets that one look at a port or a wheel moves: the other direction waits no longer.
pub(super) const BATCH: usize = 8;
/// Packets that leave later than this after their time are counted.
const LATE_NS: u64 = 50_000;

/// A packet on the way, and when it arrives.
struct Traveller {
    packet: Packet,
    arrival: Nanos,
}

/// See the [module](self).
pub(super) struct Lane {
    link: Link,
    wheel: Wheel<u32>,
    /// What the wheel's handles stand for.
    travellers: Box<[Option<Traveller>]>,
    /// Places in it that are free.
    free: Vec<u32>,
    /// How many travellers are in large buffers, and how many may be.
    segments: u32,
    segments_max: u32,
    arrived: Vec<Packet>,
    /// When the port was last found empty.
    looked: Nanos,
    /// The latest arrival.
    dated: Nanos,
    /// Due, and not yet taken by the port: [`BATCH`] at most.
    due: VecDeque<Packet>,
    rng: Xoshiro256PlusPlus,
    counters: LaneCounters,
}

impl Lane {
    pub(super) fn new(
        link: LinkOptions,
        size: Size,
        rng: Xoshiro256PlusPlus,
        now: Nanos,
    ) -> Result<Self, CableError> {
        Ok(Self {
            link: Link::new(link),
            wheel: size.wheel(now)?,
            travellers: (0..size.frames).map(|_| None).collect(),
            free: (0..size.frames).rev().collect(),
            segments: 0,
            segments_max: size.segments,
            arrived: Vec::with_capacity(BATCH),
            looked: now,
            dated: Nanos(0),
            due: VecDeque::with_capacity(BATCH),
            rng,
            counters: LaneCounters::default(),
        })
    }

    /// Takes in what has come until `now`. True if there was anything. `woken_in`: the thread has slept,
    /// and that is how long it usually takes to wake.
    pub(super) fn receive(
        &mut self,
        port: &mut impl Port,
        pool: &mut PacketPool,
        now: Nanos,
        woken_in: Option<Nanos>,
    ) -> Result<bool, PortError> {
        let mut arrived = std::mem::take(&mut self.arrived);
        let outcome = port.receive(pool, &mut arrived, BATCH);
        let count = arrived.len();
        for packet in arrived.drain(..) {
            self.dated = self.date(now, woken_in);
            if let Err(packet) = self.admit(self.dated, packet) {
                pool.recycle(packet);
            }
        }
        self.arrived = arrived;
        if count < BATCH {
            self.looked = now;
        }
        outcome.map(|_| count > 0)
    }

    /// When a packet came that was found at `now`. See [`super`] for the rule.
    fn date(&self, now: Nanos, woken_in: Option<Nanos>) -> Nanos {
        let guess = match woken_in {
            Some(wake_up) => Nanos(now.0 - wake_up.0.min(now.0)).max(self.looked),
            None => {
                let middle = Nanos(self.looked.0 + now.0.saturating_sub(self.looked.0) / 2);
                let idle_since = self.link.busy_until().filter(|until| *until > self.looked);
                idle_since.map_or(middle, |until| until.min(middle))
            }
        };
        guess.max(self.dated).min(now)
    }

    /// Puts a packet that came at `now` on its way, or gives it back.
    fn admit(&mut self, now: Nanos, packet: Packet) -> Result<(), Packet> {
        let bytes = packet.wire_bytes();
        self.counters.packets_in += 1;
        self.counters.wire_bytes_in += bytes;
        let random = self.rng.next_u64();
        let arrival = match self.link.on_packet(now, bytes.try_into().unwrap_or(u32::MAX), random) {
            Verdict::SendAt(arrival) => arrival,
            Verdict::Drop(DropReason::Lost) => {
                self.counters.drop_lost += 1;
                return Err(packet);
            }
            _ => {
                self.counters.drop_queue += 1;
                return Err(packet);
            }
        };
        let large = packet.frame().len() > SMALL_BUFFER_BYTES;
        let place = match self.free.last() {
            Some(&place) if !large || self.segments < self.segments_max => place,
            _ => {
                self.counters.drop_no_room += 1;
                return Err(packet);
            }
        };
        if self.wheel.insert(now, arrival, place).is_err() {
            self.counters.drop_no_room += 1;
            return Err(packet);
        }
        self.free.pop();
        self.segments += u32::from(large);
        self.travellers[place as usize] = Some(Traveller { packet, arrival });
        Ok(())
    }

    /// Hands over what is due at `now`. True if the port took anything.
    pub(super) fn deliver(
        &mut self,
        port: &mut impl Port,
        pool: &mut PacketPool,
        now: Nanos,
    ) -> Result<bool, PortError> {
        if !self.wheel.is_empty() {
            while self.due.len() < BATCH {
                let Some(place) = self.wheel.pop(now) else { break };
                // Every handle in the wheel has its packet.
                let Some(traveller) = self.travellers[place as usize].take() else { continue };
                self.free.push(place);
                self.leave(now, &traveller);
                self.due.push_back(traveller.packet);
            }
        }
        if self.due.is_empty() {
            return Ok(false);
        }
        Ok(port.transmit(&mut self.due, pool)? > 0)
    }

    fn leave(&mut self, now: Nanos, traveller: &Traveller) {
        let frame_bytes = traveller.packet.frame().len();
        self.segments -= u32::from(frame_bytes > SMALL_BUFFER_BYTES);
        let late_ns = now.0.saturating_sub(traveller.arrival.0);
        let counters = &mut self.counters;
        counters.packets_out += 1;
        counters.wire_bytes_out += traveller.packet.wire_bytes();
        let average = counters.lateness_ns_average;
        counters.lateness_ns_average = average - (average >> 3) + (late_ns >> 3);
        counters.lateness_ns_max = counters.lateness_ns_max.max(late_ns);
        counters.late_packets += u64::from(late_ns > LATE_NS);
    }

    /// Packets are due, and the port does not take them now.
    pub(super) fn is_blocked(&self) -> bool {
        !self.due.is_empty()
    }

    /// When the next packet is due; none while earlier ones wait for the port.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        if self.is_blocked() { None } else { self.wheel.next_deadline() }
    }

    pub(super) fn counters(&self) -> LaneCounters {
        self.counters
    }
}

#[cfg(test)]
mod tests;
