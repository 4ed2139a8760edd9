//! What a group reads and sets in a limit of this host.

use tidegate_core::{Direction, Nanos, Rate, fleet::flows::FlowBytes, flow_count::Sums};
use tidegate_sys::limit::Lease;

/// One direction of a limit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The limit's name.
    pub limit: String,
    /// Egress or ingress.
    pub direction: Direction,
}

/// What a limit met since it was last measured.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Bytes on the wire that arrived, those that were dropped included.
    pub arrived_bytes: u64,
    /// Of these, those that were dropped, marked or slowed down: who sent them wants more.
    pub slowed_bytes: u64,
    /// Some of the flows, the largest rather than others; none where the limit does not tell them apart.
    pub flows: Vec<FlowBytes>,
    /// The flows of the limit's last period, where it counts them itself.
    pub flow_count: Option<Sums>,
    /// What a flow has that takes all it gets, in bit/s, where the limit itself says so.
    pub flow_bit_s: Option<u64>,
    /// What it is set to, in bit/s.
    pub rate_bit_s: u64,
    /// Until when that is good; none: for ever.
    pub until: Option<Nanos>,
}

/// What became of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// It is in force.
    Set,
    /// There is nothing to be limited: the limit, or what it was on, is gone.
    Gone,
    /// The limit cannot do that.
    Cannot,
    /// Somebody else is changing limits; what is set is as before, and it can be tried again later.
    Busy,
}

/// The limits of a host, as far as groups act on them.
pub trait GroupBackend {
    /// Why it failed; what was asked to be set is as before.
    type Error: std::error::Error;

    /// What arrived since the last time; the first time nothing. `None`: the limit is gone.
    ///
    /// # Errors
    /// As the backend has it.
    fn measure(&mut self, now: Nanos, place: &Place) -> Result<Option<Sample>, Self::Error>;

    /// Sets the rate, for packets from now on, until the end of the lease if there is one, by the clock that
    /// the node is driven by. The limit itself falls back then, whether anybody is there or not.
    ///
    /// # Errors
    /// As the backend has it.
    fn set_rate(
        &mut self,
        place: &Place,
        rate: Rate,
        lease: Option<Lease>,
    ) -> Result<Done, Self::Error>;

    /// Has each packet dropped with this probability, 0 to 1, besides what the rate does.
    ///
    /// # Errors
    /// As the backend has it.
    fn set_drop(&mut self, place: &Place, probability: f64) -> Result<Done, Self::Error>;

    /// Nothing is dropped at random any more, and flows are not counted.
    ///
    /// # Errors
    /// As the backend has it.
    fn leave(&mut self, place: &Place) -> Result<(), Self::Error>;
}
