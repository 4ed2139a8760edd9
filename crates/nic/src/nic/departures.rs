//! The way out of a shaper: batches, the port, answers to producers; and the way in from the port.

use tidegate_core::{Nanos, shaper::Departure};

use super::{
    handles::Completions,
    message::{Answer, AnswerKind, Outcome},
    shaper_loop::{BATCH_MAX, BATCHES_MAX, Leaving, RECEIVE_MAX, ShaperLoop, charge},
};
use crate::port::PortError;

impl ShaperLoop {
    /// Hands what is due to the port.
    pub(super) fn depart(&mut self, clock: &mut impl FnMut() -> Nanos) -> bool {
        let mut worked = false;
        for _ in 0..BATCHES_MAX {
            let now = clock();
            if self.out.is_empty() {
                self.fill(now);
            }
            if self.out.is_empty() {
                break;
            }
            worked |= self.transmit(clock);
            if !self.out.is_empty() {
                // The port is full.
                self.counters.port_full += 1;
                break;
            }
        }
        worked
    }

    /// Collects what is due now, of each flow one packet at most.
    fn fill(&mut self, now: Nanos) {
        self.batch = self.batch.wrapping_add(1);
        while self.out.len() < BATCH_MAX {
            let Some(departure) = self.next.take().or_else(|| self.shaper.poll(now)) else { break };
            if !self.leave(&departure) {
                self.next = Some(departure);
                self.counters.batch_splits += 1;
                break;
            }
        }
        self.counters.batches += u64::from(!self.out.is_empty());
    }

    /// Puts a packet into the batch. False: its flow has one in it.
    #[inline]
    fn leave(&mut self, departure: &Departure<u32>) -> bool {
        let Some(stored) = self.store.get(departure.handle) else { return true };
        let (slot, lane) = (stored.slot, stored.lane);
        if let Some(here) = &mut self.lanes[lane as usize]
            && let Some(flow) = here.lane.flows.get_mut(slot as usize)
        {
            if flow.batch == self.batch {
                return false;
            }
            flow.batch = self.batch;
        }
        let Some(stored) = self.store.take(departure.handle) else { return true };
        self.out.push_back(stored.packet);
        let (cookie, stamp, bytes) = (stored.cookie, departure.stamp, departure.bytes);
        self.leaving.push_back(Leaving { cookie, stamp, slot, lane, bytes });
        true
    }

    /// Hands the batch to the port; says whether any packet left.
    fn transmit(&mut self, clock: &mut impl FnMut() -> Nanos) -> bool {
        let before = self.out.len();
        let Some(port) = &mut self.port else {
            self.out.clear();
            self.answer_for(before, clock(), Outcome::Lost);
            return true;
        };
        let result = port.transmit(&mut self.out, &mut self.pool);
        let now = clock();
        self.answer_for(before - self.out.len(), now, Outcome::Sent);
        if let Err(error) = result {
            self.failed(&error, now);
        }
        self.out.len() < before
    }

    /// Tells of the first packets of the batch what became of them.
    fn answer_for(&mut self, packets: usize, now: Nanos, outcome: Outcome) {
        let on_time = 2 * self.shaper.granularity().0;
        for leaving in self.leaving.drain(..packets) {
            let Leaving { cookie, stamp, slot, lane, bytes } = leaving;
            if outcome == Outcome::Sent {
                let late = now.0.saturating_sub(stamp.0);
                self.lateness.record(Nanos(late));
                self.counters.sent_packets += 1;
                self.counters.sent_bytes += u64::from(bytes);
                self.counters.lateness_ns_sum += late;
                self.counters.lateness_ns_max = self.counters.lateness_ns_max.max(late);
                self.counters.on_time_packets += u64::from(late <= on_time);
            } else {
                self.counters.lost_packets += 1;
            }
            let Some(here) = &mut self.lanes[lane as usize] else { continue };
            here.held -= 1;
            if self.completions == Completions::Deferred {
                let kind = AnswerKind::Done(outcome);
                here.answer(Answer { slot, wire_bytes: bytes, kind, cookie, at: now });
            }
            let Some(flow) = here.lane.flows.get_mut(slot as usize) else { continue };
            flow.held -= 1;
            let last = flow.closing && flow.held == 0;
            if outcome == Outcome::Sent && flow.class_plus_one > 0 {
                let class = flow.class_plus_one - 1;
                charge(&mut self.classes, &mut self.to_publish, class, bytes);
            }
            if last {
                here.close(&mut self.counters, now, slot);
            }
        }
    }

    /// The port failed. If it has gone, what is here is lost, and the shaper waits for a new one.
    #[cold]
    fn failed(&mut self, error: &PortError, now: Nanos) {
        if error.is_gone() {
            self.counters.ports_gone += 1;
            self.port = None;
            self.lose_all(now);
        } else {
            // A packet must not stand before the others for good.
            self.counters.port_errors += 1;
            let lost = usize::from(self.out.pop_front().is_some());
            self.answer_for(lost, now, Outcome::Lost);
        }
    }

    /// Everything that is here is lost, whatever its time.
    pub(super) fn lose_all(&mut self, now: Nanos) {
        let in_batch = self.out.len();
        self.out.clear();
        self.answer_for(in_batch, now, Outcome::Lost);
        let mut departures: Vec<_> = self.next.take().into_iter().collect();
        self.shaper.drain(|departure| departures.push(departure));
        for departure in departures {
            let Some(stored) = self.store.take(departure.handle) else { continue };
            let (cookie, stamp, bytes) = (stored.cookie, departure.stamp, departure.bytes);
            let (slot, lane) = (stored.slot, stored.lane);
            self.leaving.push_back(Leaving { cookie, stamp, slot, lane, bytes });
            self.answer_for(1, now, Outcome::Lost);
        }
    }

    /// Hands what has arrived to the receiver, as much as it has room for.
    pub(super) fn receive(&mut self, now: Nanos) -> bool {
        let (Some(port), Some((arrivals, waker))) = (&mut self.port, &mut self.receiver) else {
            return false;
        };
        if arrivals.is_abandoned() {
            self.receiver = None;
            return false;
        }
        let room = arrivals.slots().min(RECEIVE_MAX);
        if room == 0 {
            self.counters.receive_waits += u64::from(!self.receive_stalled);
            self.receive_stalled = true;
            return false;
        }
        let result = port.receive(&mut self.pool, &mut self.received, room);
        let frames = self.received.len();
        // Without a buffer the port stays readable, and a wait for arrivals would end at once.
        let no_buffer = port.counters().rx_no_buffer;
        self.receive_stalled = frames == 0 && no_buffer > self.no_buffer;
        self.no_buffer = no_buffer;
        for packet in self.received.drain(..) {
            // There is room.
            let _ = arrivals.push(packet);
        }
        if frames > 0 {
            self.counters.received_packets += frames as u64;
            waker.wake();
        }
        if let Err(error) = result {
            self.failed(&error, now);
        }
        frames > 0
    }
}
