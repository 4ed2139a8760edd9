//! One application thread and one shaper: flows at rates of their own, each always with as much in the
//! shaper as it may have.

use std::{sync::Arc, thread, time::Duration};

use anyhow::{Context as _, anyhow, ensure};
use tidegate_core::{
    Nanos, Rate,
    completion::{ALLOWANCE_SEGMENTS, SEGMENT_TIME, segment_bytes},
    wheel::WheelOptions,
};
use tidegate_nic::{
    Nic, NicOptions, Packet, PacketPool, PoolSize, Port, Producer,
    nic::{Completions, Event, Flow, FlowError, FlowOptions, Lateness, NicCounters},
    waiter::{Mode, now},
};
use tidegate_sys::sched::make_realtime;

use super::{
    BIN, CATCH_UP, FINE_SLOT_NS, SECOND,
    departures::{CountingPort, Departures, NUMBER_AT},
};
use crate::{stop::Interrupted, testbed::wait};

/// Until each flow has its packets in the wheel and all memory was touched.
const WARM_UP: Duration = Duration::from_millis(800);
/// Packets that stood in the shaper are counted so often.
const HELD_EVERY: Duration = Duration::from_millis(1);
const OPEN: Duration = Duration::from_secs(10);
/// Flows begin in so many groups.
const BEGIN_STEPS: usize = 1_000;
const RING: usize = 8_192;
/// With more flows their departures are kept by the second.
const FINE_FLOWS_MAX: usize = 1_000;
/// Packets that fit a small buffer.
const SMALL_BYTES: usize = 2_048;
/// What is taken from the producer before flows that lacked a buffer are tried again.
const EVENTS: usize = 256;

/// What is sent, and how it is shaped.
#[derive(Debug, Clone)]
pub(super) struct Load {
    /// Of each flow.
    pub(super) rates: Vec<Rate>,
    /// Of each flow: the length of its packets.
    pub(super) frames_bytes: Vec<usize>,
    pub(super) time: Duration,
    pub(super) mode: Mode,
    pub(super) completions: Completions,
    pub(super) granularity: Nanos,
    /// For how long a flow may save up credit.
    pub(super) burst: Duration,
    /// The threads go before all others, and rest now and then.
    pub(super) realtime: bool,
    /// Packets that the shaper holds; none: as many as there can be.
    pub(super) capacity: Option<usize>,
}

pub(super) struct Outcome {
    pub(super) departures: Arc<Departures>,
    /// In the measured time alone, but for those that are the largest of all.
    pub(super) before: NicCounters,
    pub(super) after: NicCounters,
    pub(super) lateness: Lateness,
    /// Of the shaper's thread, as a part of the time.
    pub(super) cpu: f64,
    /// Packets in the shaper, a sample a millisecond.
    pub(super) held: Vec<f64>,
}

impl Load {
    /// The shaper polls, completions are deferred, a flow may catch up.
    pub(super) fn new(rates: Vec<Rate>, frames_bytes: Vec<usize>, time: Duration) -> Load {
        Load {
            rates,
            frames_bytes,
            time,
            mode: Mode::Poll,
            completions: Completions::Deferred,
            granularity: Nanos(FINE_SLOT_NS),
            burst: CATCH_UP,
            realtime: true,
            capacity: None,
        }
    }

    /// The most packets that each flow may have in the shaper: two segments, or as much in packets.
    pub(super) fn allowances(&self) -> Vec<usize> {
        let of = |(rate, frame): (&Rate, &usize)| {
            let bytes = ALLOWANCE_SEGMENTS as usize * segment_bytes(*rate, SEGMENT_TIME) as usize;
            (bytes / *frame).max(ALLOWANCE_SEGMENTS as usize)
        };
        self.rates.iter().zip(&self.frames_bytes).map(of).collect()
    }

    /// Sends into a port that discards.
    pub(super) fn run(&self) -> anyhow::Result<Outcome> {
        let departures = self.departures();
        let port = CountingPort::sink(Arc::clone(&departures));
        self.run_into(departures, port, || Ok(()))
    }

    /// Sends into a port; `start` is called when the measured time begins.
    pub(super) fn run_to(
        &self,
        port: Box<dyn Port>,
        start: impl FnOnce() -> anyhow::Result<()> + Send,
    ) -> anyhow::Result<Outcome> {
        let departures = self.departures();
        let port = CountingPort::new(port, Arc::clone(&departures));
        self.run_into(departures, port, start)
    }

    fn departures(&self) -> Arc<Departures> {
        let flow_bin = if self.rates.len() <= FINE_FLOWS_MAX { BIN } else { SECOND };
        Departures::new(self.rates.len(), self.time, flow_bin)
    }

    fn run_into(
        &self,
        departures: Arc<Departures>,
        port: CountingPort,
        start: impl FnOnce() -> anyhow::Result<()> + Send,
    ) -> anyhow::Result<Outcome> {
        ensure!(self.rates.len() == self.frames_bytes.len(), "a length of packets for each flow");
        let flows = self.rates.len();
        let held = self.capacity.unwrap_or_else(|| self.allowances().iter().sum());
        let options = NicOptions {
            wheel: WheelOptions {
                granularity: self.granularity,
                capacity: held,
                ..WheelOptions::default()
            },
            producers: 1,
            flows,
            ring: RING,
            pending: held + 2 * RING,
            completions: self.completions,
            shaper_mode: self.mode,
            producer_mode: self.mode,
            ..NicOptions::default()
        };
        // A thread of its own: it leaves no settings behind. It and the shaper's must not wait for whatever
        // else the machine does; without the right to that, it is measured as it is.
        thread::scope(|scope| {
            let run = || {
                let realtime = self.realtime && make_realtime().is_ok();
                let options = NicOptions { realtime, ..options };
                let nic = Nic::new(options, vec![Box::new(port)])?;
                let sender = Sender {
                    producer: nic.producer()?,
                    pool: self.pool(held)?,
                    flows: Vec::with_capacity(flows),
                    number_of: vec![0; flows],
                    frames_bytes: &self.frames_bytes,
                    waits: Vec::new(),
                    realtime,
                };
                self.measure(&nic, sender, departures, start)
            };
            scope.spawn(run).join()
        })
        .map_err(|_| anyhow!("the application's thread panicked"))?
    }

    /// For `held` packets in the shaper, and those on the way.
    fn pool(&self, held: usize) -> anyhow::Result<PacketPool> {
        let is_long = self.frames_bytes.iter().any(|bytes| *bytes > SMALL_BYTES);
        let small = (held + 2 * RING) as u32;
        // Long ones are of few flows.
        let large = if is_long { held as u32 + 64 } else { 0 };
        Ok(PacketPool::new(PoolSize { small, large })?)
    }

    fn measure(
        &self,
        nic: &Nic,
        mut sender: Sender,
        departures: Arc<Departures>,
        start: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Outcome> {
        sender.open(&self.rates, self.burst, self.allowances())?;
        sender.begin(WARM_UP / 2)?;
        sender.run(later(now(), WARM_UP / 2), |_| {})?;
        start()?;
        let (begun, before) = (now(), nic.counters());
        departures.start(begun);
        let (lateness, cpu) = (nic.lateness(), nic.cpu_times()[0]);
        let (mut held, mut sampled) = (Vec::new(), begun);
        sender.run(later(begun, self.time), |now| {
            if now >= later(sampled, HELD_EVERY) {
                sampled = now;
                held.push(nic.counters().held_packets as f64);
            }
        })?;
        let passed = now().0.saturating_sub(begun.0) as f64;
        Ok(Outcome {
            departures,
            before,
            after: nic.counters(),
            lateness: nic.lateness().since(&lateness),
            cpu: (nic.cpu_times()[0].0 - cpu.0) as f64 / passed,
            held,
        })
    }
}

impl Outcome {
    /// Packets that were dropped or lost while it was measured.
    pub(super) fn dropped(&self) -> u64 {
        let of = |counters: &NicCounters| {
            counters.drop_full + counters.drop_beyond + counters.drop_closed + counters.lost_packets
        };
        of(&self.after) - of(&self.before)
    }
}

fn later(at: Nanos, by: Duration) -> Nanos {
    Nanos(at.0.saturating_add(by.as_nanos() as u64))
}

/// An application that always has more to send.
struct Sender<'a> {
    producer: Producer,
    pool: PacketPool,
    flows: Vec<Flow>,
    /// The number of a flow by its index at the producer.
    number_of: Vec<u32>,
    frames_bytes: &'a [usize],
    /// Flows that wait for a buffer; one that waits for two is here twice.
    waits: Vec<Flow>,
    /// Its thread goes before others, and so must rest.
    realtime: bool,
}

impl Sender<'_> {
    /// Opens the flows; each is to send as many packets as it may have in the shaper.
    fn open(
        &mut self,
        rates: &[Rate],
        burst: Duration,
        allowances: Vec<usize>,
    ) -> anyhow::Result<()> {
        let deadline = later(now(), OPEN);
        let burst = Nanos(burst.as_nanos() as u64);
        for (number, (rate, allowance)) in rates.iter().zip(allowances).enumerate() {
            let options = FlowOptions { rate: Some(*rate), burst, ..FlowOptions::default() };
            let flow = loop {
                match self.producer.open_flow(options) {
                    Err(FlowError::RingFull) if now() < deadline => thread::yield_now(),
                    outcome => break outcome.context("cannot open a flow")?,
                }
            };
            *self.number_of.get_mut(flow.index()).context("a flow too many")? = number as u32;
            self.flows.push(flow);
            self.waits.extend(std::iter::repeat_n(flow, allowance));
        }
        Ok(())
    }

    /// Has the flows begin one after the other: those of one rate would else send at the same instants for
    /// ever.
    fn begin(&mut self, within: Duration) -> anyhow::Result<()> {
        let (begun, all) = (now(), std::mem::take(&mut self.waits));
        let mut rest = all.as_slice();
        for step in 1..=BEGIN_STEPS {
            let (some, later_on) =
                rest.split_at(all.len() * step / BEGIN_STEPS - (all.len() - rest.len()));
            self.waits.extend(some);
            rest = later_on;
            self.run(later(begun, within * step as u32 / BEGIN_STEPS as u32), |_| {})?;
        }
        Ok(())
    }

    fn run(&mut self, until: Nanos, mut each_turn: impl FnMut(Nanos)) -> anyhow::Result<()> {
        let mut waits = Vec::new();
        loop {
            let now = now();
            each_turn(now);
            if now >= until {
                return Ok(());
            }
            if wait::interrupted() {
                return Err(Interrupted.into());
            }
            std::mem::swap(&mut waits, &mut self.waits);
            if self.realtime {
                self.producer.rest();
            }
            for flow in waits.drain(..) {
                self.send(flow);
            }
            for _ in 0..EVENTS {
                match self.producer.poll_event() {
                    // One that was refused has a packet less out than it wants: it is told, too.
                    Some(Event::Completion { flow, .. } | Event::Writable { flow }) => {
                        self.send(flow);
                    }
                    Some(Event::Closed { .. }) => {}
                    None => {
                        let soon = later(now, HELD_EVERY).min(until);
                        self.producer.wait(Some(soon))?;
                        break;
                    }
                }
            }
        }
    }

    fn send(&mut self, flow: Flow) {
        let Some(packet) = self.frame(flow) else {
            self.waits.push(flow);
            return;
        };
        // Who is refused is told when to go on.
        let _ = self.producer.submit(flow, packet, 0);
    }

    /// An Ethernet frame that no host is meant by, and that says its flow's number.
    fn frame(&mut self, flow: Flow) -> Option<Packet> {
        let number = self.number_of[flow.index()];
        let bytes = self.frames_bytes[number as usize];
        let mut packet = self.pool.take(bytes)?;
        packet.set_len(bytes);
        let frame = packet.frame_mut();
        // A destination of nobody's, EtherType 0x88B5: for experiments (IEEE 802).
        frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
        frame[NUMBER_AT..NUMBER_AT + 4].copy_from_slice(&number.to_ne_bytes());
        Some(packet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowances_are_two_segments() {
        let rates = [1_000_000, 300_000_000, 10_000_000_000].map(Rate::from_bit_s);
        let rates: Vec<Rate> = rates.into_iter().flatten().collect();
        let load = Load::new(rates.clone(), vec![1_500; 3], SECOND);
        assert_eq!(load.allowances(), [2, 50, 87]);
        let load = Load::new(rates.clone(), super::super::segments(&rates), SECOND);
        assert_eq!(load.allowances(), [2, 2, 2]);
    }
}
