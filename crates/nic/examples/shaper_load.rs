//! How much one shaper thread carries, and how exactly: flows at rates of their own into a port that
//! discards.
//!
//!     cargo run --release -p tidegate-nic --example shaper_load -- [FLOWS] [MBIT] [BYTES] [SECONDS]
//!     [poll|auto]
//!
//! The flows send MBIT Mbit/s together, in frames of BYTES; each always has two of them in the shaper.

use std::{collections::HashMap, env, process::ExitCode};

use tidegate_core::{Nanos, Rate, units::NANOS_PER_SEC};
use tidegate_nic::{
    Nic, NicOptions, Packet, PacketPool, PoolSize, Producer,
    nic::{Event, Flow, FlowOptions},
    port::sink::{SinkPort, SinkReader},
    waiter::{Mode, now},
};

/// A bin of the deviation, as in Carousel's figures.
const BIN_NS: u64 = 100_000_000;
const FLOWS_MAX: usize = 1 << 19;

struct Options {
    flows: usize,
    total_bit_s: u64,
    frame_bytes: usize,
    seconds: u64,
    mode: Mode,
}

fn options() -> Option<Options> {
    let mut arguments = env::args().skip(1);
    let mut number = |default: u64| match arguments.next() {
        Some(text) => text.parse().ok(),
        None => Some(default),
    };
    let (flows, mbit) = (number(1_000)? as usize, number(5_000)?);
    let (frame_bytes, seconds) = (number(1_500)? as usize, number(3)?);
    let mode = match arguments.next().as_deref() {
        None | Some("poll") => Mode::Poll,
        Some("auto") => Mode::Auto,
        Some(_) => return None,
    };
    let fits = (1..=FLOWS_MAX).contains(&flows)
        && (64..=2_048).contains(&frame_bytes)
        && (1..=60).contains(&seconds)
        && mbit > 0;
    let total_bit_s = mbit.checked_mul(1_000_000)?;
    fits.then_some(Options { flows, total_bit_s, frame_bytes, seconds, mode })
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!(
            "usage: shaper_load [FLOWS] [MBIT] [BYTES, 64 to 2048] [SECONDS, 1 to 60] [poll|auto]"
        );
        return ExitCode::from(1);
    };
    match measure(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The rate of each flow: from half to one and a half of the average.
fn rates(options: &Options) -> Vec<Rate> {
    let average = options.total_bit_s / options.flows as u64;
    let rate = |flow: usize| average / 2 + average * flow as u64 / options.flows as u64;
    (0..options.flows).filter_map(|flow| Rate::from_bit_s(rate(flow).max(1))).collect()
}

fn measure(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let flows = options.flows;
    let (sink, reader) = SinkPort::new(flows, |packet| {
        packet.frame().first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes) as usize)
    });
    let mut nic_options = NicOptions {
        producers: 1,
        flows,
        ring: 8_192,
        owed: 4 * flows,
        shaper_mode: options.mode,
        ..NicOptions::default()
    };
    nic_options.wheel.capacity = 2 * flows;
    let nic = Nic::new(nic_options, vec![Box::new(sink)])?;
    let mut load = Load {
        producer: nic.producer()?,
        pool: PacketPool::new(PoolSize { small: 2 * flows as u32 + 8_192, large: 0 })?,
        number_of: HashMap::new(),
        frame_bytes: options.frame_bytes,
        waits: Vec::new(),
    };
    let rates = rates(options);
    load.open(&rates)?;
    // A second to begin: each flow has its packets in the wheel, all memory was touched.
    load.run(Nanos(now().0 + NANOS_PER_SEC), |_| {})?;
    report(options, &nic, &mut load, &rates, &reader)
}

fn report(
    options: &Options,
    nic: &Nic,
    load: &mut Load,
    rates: &[Rate],
    reader: &SinkReader,
) -> Result<(), Box<dyn std::error::Error>> {
    let (begun, before) = (now(), nic.counters());
    let (lateness, bytes) = (nic.lateness(), reader.wire_bytes());
    let cpu = nic.cpu_times()[0];
    let mut samples = vec![(begun, before.sent_bytes, before.held_packets)];
    load.run(Nanos(begun.0 + options.seconds * NANOS_PER_SEC), |now| {
        if now.0 - samples[samples.len() - 1].0.0 >= BIN_NS {
            let counters = nic.counters();
            samples.push((now, counters.sent_bytes, counters.held_packets));
        }
    })?;
    let (ended, after) = (now(), nic.counters());
    let lateness = nic.lateness().since(&lateness);
    let cpu = nic.cpu_times()[0].0 - cpu.0;
    let seconds = (ended.0 - begun.0) as f64 / 1e9;
    let packets = after.sent_packets - before.sent_packets;
    let total: u64 = rates.iter().map(|rate| rate.bit_s()).sum();
    let sent = (after.sent_bytes - before.sent_bytes) as f64 * 8.0 / seconds;
    println!(
        "packets         {:.3} M/s, {packets} in {seconds:.2} s",
        packets as f64 / seconds / 1e6
    );
    println!("rate            {:.4} Gbit/s of {:.4}", sent / 1e9, total as f64 / 1e9);
    let bins: Vec<f64> = samples
        .windows(2)
        .map(|pair| (pair[1].1 - pair[0].1) as f64 * 8e9 / (pair[1].0.0 - pair[0].0.0) as f64)
        .collect();
    let off = bins.iter().map(|bin| (bin - total as f64).powi(2)).sum::<f64>();
    let off = (off / bins.len().max(1) as f64).sqrt();
    println!("deviation       {:.2} Mbit/s over 100 ms (rms from the target)", off / 1e6);
    let now_bytes = reader.wire_bytes();
    let mut errors: Vec<f64> = rates
        .iter()
        .zip(now_bytes.iter().zip(&bytes))
        .map(|(rate, (now, then))| {
            let wanted = rate.bit_s() as f64 * seconds / 8.0;
            // A packet more or less is no error of the rate.
            (((now - then) as f64 - wanted).abs() - options.frame_bytes as f64).max(0.0) / wanted
        })
        .collect();
    errors.sort_by(f64::total_cmp);
    let at = |part: f64| errors[((errors.len() - 1) as f64 * part) as usize] * 100.0;
    println!(
        "of a flow       {:.3} % median, {:.3} % p99, {:.3} % worst",
        at(0.5),
        at(0.99),
        at(1.0)
    );
    println!(
        "lateness        {:.1} % within 2 us, {:.1} % within 4.1 us; p50 {} p99 {} p99.9 {} max {} us",
        lateness.share_within(Nanos(2_048)) * 100.0,
        lateness.share_within(Nanos(4_100)) * 100.0,
        lateness.quantile(0.5).0 as f64 / 1e3,
        lateness.quantile(0.99).0 as f64 / 1e3,
        lateness.quantile(0.999).0 as f64 / 1e3,
        lateness.quantile(1.0).0 as f64 / 1e3,
    );
    let mut held: Vec<u64> = samples.iter().map(|sample| sample.2).collect();
    held.sort_unstable();
    println!("held            {} median, {} most", held[held.len() / 2], after.held_packets_max);
    println!("CPU             {:.1} % of the shaper's thread", cpu as f64 / 1e7 / seconds);
    let batches = after.batches - before.batches;
    println!("batches         {:.1} packets", packets as f64 / batches.max(1) as f64);
    println!("dropped, lost   {}, {}", after.drop_full, after.lost_packets);
    Ok(())
}

/// An application that always has more to send.
struct Load {
    producer: Producer,
    pool: PacketPool,
    /// Of each flow, as far as its index is not its number.
    number_of: HashMap<usize, usize>,
    frame_bytes: usize,
    /// Flows that wait for a buffer.
    waits: Vec<Flow>,
}

impl Load {
    fn open(&mut self, rates: &[Rate]) -> Result<(), Box<dyn std::error::Error>> {
        for (number, rate) in rates.iter().enumerate() {
            let options = FlowOptions { rate: Some(*rate), ..FlowOptions::default() };
            let deadline = now().0 + 10 * NANOS_PER_SEC;
            let flow = loop {
                match self.producer.open_flow(options) {
                    Ok(flow) => break flow,
                    Err(error) if now().0 > deadline => return Err(error.into()),
                    Err(_) => std::thread::yield_now(),
                }
            };
            if flow.index() != number {
                self.number_of.insert(flow.index(), number);
            }
            self.waits.extend([flow, flow]);
        }
        Ok(())
    }

    fn run(
        &mut self,
        until: Nanos,
        mut each_turn: impl FnMut(Nanos),
    ) -> Result<(), Box<dyn std::error::Error>> {
        loop {
            let now = now();
            each_turn(now);
            if now >= until {
                return Ok(());
            }
            for flow in std::mem::take(&mut self.waits) {
                self.send(flow);
            }
            for _ in 0..256 {
                match self.producer.poll_event() {
                    Some(Event::Completion { flow, .. } | Event::Writable { flow }) => {
                        self.send(flow);
                    }
                    Some(Event::Closed { .. }) => {}
                    None => {
                        let soon = Nanos(now.0 + 1_000_000).min(until);
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

    fn frame(&mut self, flow: Flow) -> Option<Packet> {
        let mut packet = self.pool.take(self.frame_bytes)?;
        packet.set_len(self.frame_bytes);
        let number = self.number_of.get(&flow.index()).copied().unwrap_or(flow.index());
        packet.frame_mut()[..4].copy_from_slice(&(number as u32).to_ne_bytes());
        Some(packet)
    }
}
