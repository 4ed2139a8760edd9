//! What the maps of a limit say.

use tidegate_core::flow_count;

use crate::intf;

/// What a limit's queue and counters say at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// The virtual queue and the fair share.
    pub queue: intf::Queue,
    /// Counters, summed over CPUs.
    pub counters: intf::Counters,
    /// With scheme `police`: packets and bytes by colour.
    pub colours: Option<Colours>,
    /// With schemes `dem` and `spring`: its flows in the last period, if there was one lately.
    pub flow_count: Option<flow_count::Sums>,
}

/// Packets and bytes by the colour that a policer gave them: green, yellow, red.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Colours {
    pub packets: [u64; intf::COLOURS],
    /// Bytes on the wire.
    pub bytes: [u64; intf::COLOURS],
}

impl Colours {
    pub(super) fn add(&mut self, cpu: &intf::PoliceCounters) {
        let sum = |to: &mut [u64], from: &[u64]| {
            to.iter_mut().zip(from).for_each(|(t, f)| *t = t.wrapping_add(*f));
        };
        sum(&mut self.packets, &cpu.packets);
        sum(&mut self.bytes, &cpu.bytes);
    }
}
