//! How deep a policer's bucket should be, and what a bucket passes: for anyone who must choose a burst size.
//!
//! - [`Rule`]: the rules of thumb in use, and formulas for what a TCP flow needs to fill the rate.
//! - [`goodput`]: the rate that TCP reaches with a given bucket: the [law](goodput) with its derivation.
//! - [`bursty_source`]: what a bursty source gets through, exactly.
//! - [`recommend`]: a burst, and the reason.
//!
//! Here a packet is an MTU, P is the bandwidth-delay product and B the bucket, both in packets. A policer has
//! no queue, so the round trip stays what it is, and a sender with window W sends W packets in it.

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
    /// The largest rate that arrived in the last ten round trips; losses are ignored.
    Bbr,
}

/// A policer and its traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// The rate of the policer.
    pub rate: Rate,
    /// Round-trip time of the flows.
    pub rtt: Nanos,
    /// How many TCP flows share it; at least one.
    pub flows: u32,
    /// Their congestion control.
    pub cc: CongestionControl,
    /// Line rate of the incoming interface.
    pub interface: Rate,
    /// Bytes of a full-sized IP packet; at least one.
    pub mtu: u32,
}

/// A source of a burst size.
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
    /// The burst that paced flows need to fill the rate.
    Paced,
    /// The burst that flows need if each window leaves in one piece.
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

    /// A short name, for tables.
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

    /// The vendor, or the source of the formula.
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

    /// Packets in whole bytes. A cast of a float saturates.
    fn whole(&self, packets: f64) -> u64 {
        let bytes = packets * self.packet();
        let floor = bytes as u64;
        floor.saturating_add(u64::from(bytes > floor as f64))
    }

    fn flows(&self) -> f64 {
        f64::from(self.flows.max(1))
    }

    /// The part of a clump that arrives as tokens while the clump comes at line rate.
    fn line_share(&self) -> f64 {
        (self.rate.bit_s() as f64 / self.interface.bit_s() as f64).min(1.0)
    }
}

/// The share of the rate that a TCP flow should reach with [`recommend`].
pub const TARGET: f64 = 0.95;
/// The longest burst that [`recommend`] gives, as time at the policer's rate. A longer one is hardly a limit,
/// and the next hop must queue it.
pub const SANE: Nanos = Nanos(250_000_000);

/// A burst, and what it reaches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recommendation {
    /// The burst.
    pub burst: Bytes,
    /// The share of the rate that TCP reaches with it.
    pub goodput: Goodput,
    /// Why it is not deeper or shallower.
    pub reason: Reason,
}

/// The reason of a recommendation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Unpaced flows reach [`TARGET`] with it.
    Reaches,
    /// Juniper's lower limit is enough.
    Least,
    /// Flows would need more than [`SANE`]: use a shaper, or paced senders.
    TooLong,
    /// The same, and [`MAX_BURST`] is less than that.
    Deepest,
}

/// The shallowest bucket with which unpaced flows reach [`TARGET`] of the rate, within ten packets and
/// [`SANE`]. Costs a few hundred evaluations of the law.
#[must_use]
pub fn recommend(path: &Path) -> Recommendation {
    let least = Rule::TenMtu.burst(path);
    let sane = path.rate.bytes_in(SANE);
    let most = sane.min(MAX_BURST).max(least);
    let reaches = |burst: u64| goodput(path, Bytes(burst)).unpaced >= TARGET;
    let (burst, reason) = if reaches(least.0) {
        (least, Reason::Least)
    } else if !reaches(most.0) {
        (most, if sane > MAX_BURST { Reason::Deepest } else { Reason::TooLong })
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

/// The round trip for the default depth of a policer's bucket.
pub const UNSAID_RTT: Nanos = Nanos(20_000_000);

/// The default depth of a policer's bucket: what a CUBIC flow over [`UNSAID_RTT`] needs to fill the rate if
/// its windows come in one piece ([`Rule::Unpaced`]), within ten packets and [`SANE`].
///
/// Among the rules this has the shallowest bucket with which the usual flow of the internet reaches the rate.
/// And windows do come in one piece here: a program's socket and a virtual machine's interface are as fast as
/// memory. Juniper's and Cisco's rules know neither the round trip nor what TCP makes of it. O(1).
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
