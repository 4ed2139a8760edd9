//! How deep a policer's bucket should be, and what a bucket lets through: for whoever must write a burst
//! size.
//!
//! - [`Rule`]: the rules of thumb in use, and what a TCP flow needs to fill the rate, as formulas.
//! - [`goodput`]: what TCP makes of a given bucket: the [law](goodput) with its derivation.
//! - [`bursty_source`]: what a source of so many bytes each so often passes, exactly.
//! - [`recommend`]: a burst, and why.
//!
//! Here a packet is an MTU, P is the bandwidth-delay product and B the bucket, both in packets. A policer
//! has no queue, so the round trip stays what it is, and a sender with window W sends W packets in it.

mod law;
mod source;

pub use law::{Goodput, goodput};
pub use source::{BurstySource, PACKETS_MAX, Passed, bursty_source};

use crate::{
    token_bucket::MAX_BURST,
    units::{Bytes, MAX_RATE_BIT_S, Nanos, Rate},
};

/// How a sender finds its rate.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CongestionControl {
    /// Half the window on loss, one packet more each round trip (RFC 5681).
    Reno,
    /// 0.7 of the window on loss, then a cubic back to it (RFC 9438): the default of Linux, Windows and
    /// macOS.
    #[default]
    Cubic,
    /// The largest rate that arrived in the last ten round trips, whatever is lost.
    Bbr,
}

/// A policer and the traffic that it meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// What the policer lets through.
    pub rate: Rate,
    /// Round-trip time of the flows.
    pub rtt: Nanos,
    /// How many TCP flows share it; at least one.
    pub flows: u32,
    /// How they find their rate.
    pub cc: CongestionControl,
    /// Line rate of the interface on which the packets come.
    pub interface: Rate,
    /// Bytes of a full-sized IP packet; at least one.
    pub mtu: u32,
}

/// Where a burst size comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Juniper's lower limit.
    TenMtu,
    /// Juniper: what the interface sends in 5 ms.
    Interface5Ms,
    /// Cisco class-based policing, when no burst is given.
    Over32,
    /// Cisco CAR, normal burst.
    Car,
    /// Cisco CAR, extended burst.
    CarExtended,
    /// What the flows need to fill the rate, if they pace their packets.
    Paced,
    /// What they need if each window leaves in one piece.
    Unpaced,
}

impl Rule {
    /// All of them.
    pub const ALL: [Rule; 7] = [
        Rule::TenMtu,
        Rule::Interface5Ms,
        Rule::Over32,
        Rule::Car,
        Rule::CarExtended,
        Rule::Paced,
        Rule::Unpaced,
    ];

    /// The burst that the rule gives, never below one packet.
    #[must_use]
    pub fn burst(self, path: &Path) -> Bytes {
        let ms = |ms: u64| Nanos(ms * 1_000_000);
        let mtu = u64::from(path.mtu);
        let bytes = match self {
            Rule::TenMtu => 10 * mtu,
            Rule::Interface5Ms => path.interface.bytes_in(ms(5)).0,
            Rule::Over32 => path.rate.bit_s() / 32,
            Rule::Car => path.rate.bytes_in(ms(1_500)).0,
            Rule::CarExtended => path.rate.bytes_in(ms(1_500)).0.saturating_mul(2),
            Rule::Paced => path.whole(law::full(path)),
            Rule::Unpaced => path.whole(law::full(path) + law::clump(path)),
        };
        Bytes(bytes.max(mtu))
    }

    /// A short name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Rule::TenMtu => "10 MTU",
            Rule::Interface5Ms => "interface x 5 ms",
            Rule::Over32 => "CIR / 32",
            Rule::Car => "CIR x 1.5 s",
            Rule::CarExtended => "CIR x 3 s",
            Rule::Paced => "TCP, paced",
            Rule::Unpaced => "TCP, unpaced",
        }
    }

    /// Whose rule it is, or where the formula comes from.
    #[must_use]
    pub fn why(self, cc: CongestionControl) -> &'static str {
        match self {
            Rule::TenMtu => "Juniper: never lower",
            Rule::Interface5Ms => "Juniper: to start with",
            Rule::Over32 => "Cisco class-based policing: the default (250 ms)",
            Rule::Car => "Cisco CAR: normal burst",
            Rule::CarExtended => "Cisco CAR: extended burst",
            Rule::Paced => match cc {
                CongestionControl::Reno => "BDP^2 / 18 packets: the sawtooth's tip",
                CongestionControl::Cubic => {
                    "0.0357 BDP^(4/3) / RTT packets, or Reno's way if that is less"
                }
                CongestionControl::Bbr => "a quarter of a BDP: one probe",
            },
            Rule::Unpaced => "the same, and a window that comes at line rate",
        }
    }
}

impl Path {
    /// The bandwidth-delay product in packets.
    #[must_use]
    pub fn bdp(&self) -> f64 {
        self.rate.bit_s() as f64 / 8e9 * self.rtt.0 as f64 / self.packet()
    }

    fn packet(&self) -> f64 {
        f64::from(self.mtu.max(1))
    }

    /// So many packets in whole bytes. A cast of a float saturates.
    fn whole(&self, packets: f64) -> u64 {
        let bytes = packets * self.packet();
        let floor = bytes as u64;
        floor.saturating_add(u64::from(bytes > floor as f64))
    }

    fn flows(&self) -> f64 {
        f64::from(self.flows.max(1))
    }

    /// The share of a clump that the policer's rate makes up while it comes at line rate.
    fn line_share(&self) -> f64 {
        (self.rate.bit_s() as f64 / self.interface.bit_s() as f64).min(1.0)
    }
}

/// The share of the rate that [`recommend`] wants a TCP flow to reach.
pub const TARGET: f64 = 0.95;
/// The longest burst that [`recommend`] names, as time at the policer's rate: what is longer is hardly a
/// limit any more, and what is behind the policer must queue it.
pub const SANE: Nanos = Nanos(250_000_000);

/// A burst, and what it reaches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recommendation {
    /// The burst.
    pub burst: Bytes,
    /// What TCP makes of it.
    pub goodput: Goodput,
    /// Why it is no deeper or shallower.
    pub reason: Reason,
}

/// What decides a recommendation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Unpaced flows reach [`TARGET`] with it.
    Reaches,
    /// It is Juniper's lower limit, and enough.
    Least,
    /// Flows would need more than [`SANE`] or than a bucket holds: a shaper, or paced senders, serve them
    /// better.
    TooLong,
}

/// The shallowest bucket with which unpaced flows reach [`TARGET`] of the rate, within ten packets and
/// [`SANE`]. A few hundred evaluations of the law.
#[must_use]
pub fn recommend(path: &Path) -> Recommendation {
    let least = Rule::TenMtu.burst(path);
    let most = path.rate.bytes_in(SANE).min(MAX_BURST).max(least);
    let reaches = |burst: u64| goodput(path, Bytes(burst)).unpaced >= TARGET;
    let (burst, reason) = if reaches(least.0) {
        (least, Reason::Least)
    } else if !reaches(most.0) {
        (most, Reason::TooLong)
    } else {
        let (mut low, mut high) = (least.0, most.0);
        while high - low > (high / 256).max(1) {
            let middle = low + (high - low) / 2;
            if reaches(middle) { high = middle } else { low = middle }
        }
        (Bytes(high), Reason::Reaches)
    };
    Recommendation { burst, goodput: goodput(path, burst), reason }
}

/// The round trip for which a policer's bucket is sized when nobody says how deep it shall be.
pub const UNSAID_RTT: Nanos = Nanos(20_000_000);

/// The depth of a policer's bucket when nobody says one: what a CUBIC flow over [`UNSAID_RTT`] needs to fill
/// the rate if its windows come in one piece ([`Rule::Unpaced`]), within ten packets and [`SANE`].
///
/// This rule of all, because its bucket is the shallowest with which the usual flow of the internet has the
/// rate, and because windows do come in one piece here: a program's socket and a virtual machine's interface
/// are as fast as memory. Juniper's and Cisco's rules know neither the round trip nor what TCP makes of it.
/// O(1).
#[must_use]
pub fn policer_burst(rate: Rate) -> Bytes {
    let path = Path {
        rate,
        rtt: UNSAID_RTT,
        flows: 1,
        cc: CongestionControl::Cubic,
        interface: Rate::from_bit_s(MAX_RATE_BIT_S).unwrap_or(rate),
        mtu: 1_500,
    };
    let least = Rule::TenMtu.burst(&path);
    let most = rate.bytes_in(SANE).min(MAX_BURST).max(least);
    Rule::Unpaced.burst(&path).clamp(least, most)
}

#[cfg(test)]
mod tests;
