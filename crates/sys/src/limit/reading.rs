//! What the maps of a limit say.

use tidegate_core::flow_count;

use crate::intf;

/// What a limit's queue and counters say at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// When a link of its rate would have sent all that passed; of a policer, when its bucket will be full.
    /// In nanoseconds of `CLOCK_MONOTONIC`.
    pub finish_ns: u64,
    /// Inside another limit: its part of that, if it is known.
    pub part: Option<Part>,
    /// Where those that use the limit have shares of it.
    pub fair: Option<FairShare>,
    /// Dropped packets that left TCP with nothing in flight, since the limit began, where they are counted
    /// ([`intf::RISK_TABLE`]).
    pub at_risk: Option<[u64; intf::RISKS]>,
    /// Counters, summed over CPUs.
    pub counters: intf::Counters,
    /// With scheme `police`: packets and bytes by colour.
    pub colours: Option<Colours>,
    /// With schemes `dem` and `spring`: its flows in the last period, if there was one lately.
    pub flow_count: Option<flow_count::Sums>,
}

/// The rate that a parent gives a limit inside it now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The cost of a byte, in 2^-24 ns.
    pub cost: u64,
    /// In bit/s.
    pub rate_bit_s: u64,
}

/// The share of each flow of a queue, or of each limit inside.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FairShare {
    /// Share of each, of what the limit may use, in 2^-24; 0: not computed yet.
    pub share: u32,
    /// When its epoch began, in nanoseconds of `CLOCK_MONOTONIC`.
    pub epoch_start_ns: u64,
    /// The flows, or limits, that sent data in this epoch, or in the one before if they were more.
    pub flows: u32,
    /// Until when the share is that of the limits inside.
    pub children_until_ns: u64,
    /// Smoothed round-trip time of the flows; 0: not known.
    pub rtt_ns: u64,
    /// How many new connections had to wait for their turn.
    pub held: u32,
}

impl From<&intf::Queue> for FairShare {
    fn from(queue: &intf::Queue) -> FairShare {
        FairShare {
            share: queue.share,
            epoch_start_ns: queue.epoch_start_ns,
            flows: queue.flows.max(queue.flows_before),
            ..FairShare::default()
        }
    }
}

/// Packets and bytes by the colour that a policer gave them: green, yellow, red.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Colours {
    pub packets: [u64; intf::COLOURS],
    /// Bytes on the wire.
    pub bytes: [u64; intf::COLOURS],
}

impl Colours {
    pub(crate) fn add(&mut self, cpu: &intf::PoliceCounters) {
        let sum = |to: &mut [u64], from: &[u64]| {
            to.iter_mut().zip(from).for_each(|(t, f)| *t = t.wrapping_add(*f));
        };
        sum(&mut self.packets, &cpu.packets);
        sum(&mut self.bytes, &cpu.bytes);
    }
}
