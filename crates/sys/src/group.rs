//! What a limit does for a group of hosts: its arrivals and the bytes of its flows are measured, and packets
//! dropped at random. The rate is the limit's own.
//!
//! Scheme `police` does all of it, on cgroups, devices and ports; of others arrivals are known, of `dem` and
//! `spring` also how many flows take all they get. A limit needs
//! no preparation: the first [`LimitMaps::measure`] of a direction has its flows counted from then on, and
//! [`LimitMaps::leave_group`] ends that. All state is in pinned maps, so a daemon that comes back goes on
//! where it was, and while it is away packets are dropped at the last probability.
//!
//! Flows are counted in buffers of fixed size, one for each CPU ([`tidegate_core::fleet::flows`]): [`SETS`] x
//! [`WAYS`] cells of 16 bytes, twice, so that packets fill one buffer while the other is read and cleared. A
//! packet that is on its way through the program while the buffers change may count an interval later.

use tidegate_core::{
    Direction,
    fleet::{
        flows::{FlowBytes, SETS, WAYS},
        grd,
    },
    flow_count,
};

use crate::{
    intf,
    limit::{LimitError, LimitMaps, Reading},
};

mod maps;

pub(crate) use maps::GroupMaps;

/// Most flows that a measurement has: so many on each CPU.
pub const FLOWS_PER_CPU: usize = SETS * WAYS;

/// Packets and their bytes on the wire.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Packets, of which one that is still to be cut into segments is one.
    pub packets: u64,
    /// Bytes on the wire.
    pub bytes: u64,
}

/// One direction of a limit, measured.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Measured {
    /// All that came since the limit was put on, before any was dropped; not what is exempt.
    pub arrived: Traffic,
    pub passed: Traffic,
    /// Of this what made a sender slower: marked, slowed or dropped.
    pub slowed: Traffic,
    /// The bytes of flows since the last measurement, before any was dropped, by flow, each once. The first
    /// time, and where flows are not counted, there are none.
    pub flows: Vec<FlowBytes>,
    /// With schemes `dem` and `spring`: the flows of the last period, if there was one lately.
    pub flow_count: Option<flow_count::Sums>,
}

impl intf::Counters {
    /// What met one of the outcomes.
    pub fn of(&self, wanted: impl Fn(&intf::Outcome) -> bool) -> Traffic {
        let mut sum = Traffic::default();
        for (index, outcome) in intf::OUTCOME_TABLE.iter().enumerate() {
            if wanted(outcome) {
                sum.packets += self.packets[index];
                sum.bytes += self.bytes[index];
            }
        }
        sum
    }

    /// All that came, before any was dropped; not what is exempt.
    pub fn arrived(&self) -> Traffic {
        self.of(|outcome| outcome.name != "exempt")
    }
}

impl LimitMaps {
    /// Measures a direction, and begins the next interval of its flows. One process at a time: two that
    /// measure take flows from each other.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn measure(&self, direction: Direction) -> Result<Measured, LimitError> {
        let flows = match self.own.group() {
            Some(group) => group.take_flows(direction)?,
            None => Vec::new(),
        };
        let Reading { counters, flow_count, .. } = self.read(direction)?;
        Ok(Measured {
            arrived: counters.arrived(),
            passed: counters.of(|outcome| outcome.passed && outcome.name != "exempt"),
            slowed: counters.of(intf::Outcome::slows),
            flows,
            flow_count,
        })
    }

    /// Has each packet of a direction dropped with this probability, 0 to 1 in steps of 2^-32, before the
    /// limit itself sees it; counted as `drop_early`. It stays until it is set anew. False if the scheme
    /// cannot.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`]; the earlier probability is in force.
    pub fn set_drop(&self, direction: Direction, probability: f64) -> Result<bool, LimitError> {
        let Some(group) = self.own.group() else { return Ok(false) };
        let now = group.get(direction)?;
        group.set(direction, intf::Group { drop: grd::threshold(probability), ..now })?;
        Ok(true)
    }

    /// The probability that is set.
    ///
    /// # Errors
    /// [`LimitError::Map`], [`LimitError::Layout`].
    pub fn drop_probability(&self, direction: Direction) -> Result<f64, LimitError> {
        let Some(group) = self.own.group() else { return Ok(0.0) };
        Ok(f64::from(group.get(direction)?.drop) / 4_294_967_296.0)
    }

    /// Nothing is dropped at random any more, flows are not counted, and the memory for them is given back.
    ///
    /// # Errors
    /// [`LimitError::Map`].
    pub fn leave_group(&self, direction: Direction) -> Result<(), LimitError> {
        let Some(group) = self.own.group() else { return Ok(()) };
        group.set(direction, intf::Group::default())?;
        group.remove_sample(direction)
    }
}

#[cfg(test)]
mod tests;
