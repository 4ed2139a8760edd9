//! Meters that colour packets green, yellow or red: srTCM (RFC 2697), trTCM (RFC 2698) and the
//! differentiated-service meter of RFC 4115.
//!
//! Each is two token buckets, committed and second, full at the start. The meters differ in how these fill
//! and which is charged:
//!
//! ```text
//! srTCM    C fills at CIR; what finds C full goes to E
//!          C >= length: green, C pays; else E >= length: yellow, E pays; else red
//! trTCM    C fills at CIR, P at PIR
//!          P < length: red; else C < length: yellow, P pays; else green, both pay
//! RFC 4115 C fills at CIR, E at EIR, neither gives to the other
//!          C >= length: green, C pays; else E >= length: yellow, E pays; else red
//! ```
//!
//! A colour-blind meter treats every packet as green. A colour-aware one keeps a colour or worsens it: a
//! yellow packet skips the committed bucket, a red one stays red and pays nothing.
//!
//! The RFCs count tokens in steps of a byte; here a bucket fills continuously, in the exact units of
//! [`token_bucket`](crate::token_bucket), so nothing is ever rounded. (RFC 4115 writes "more than" where the
//! other two write "at least"; here all are "at least", else a packet as long as the burst would never pass.)
//!
//! The state is two 64-bit counts of units and one time in ns, no fraction; all arithmetic stays in unsigned
//! 64 bits, which is what an eBPF program has. O(1) a packet.

use crate::{
    token_bucket::{BucketConfig, BucketError, MAX_BURST, UNITS_PER_BYTE, check_rate},
    units::{Bytes, Nanos, Rate},
};

/// The colour of a packet; a later one is worse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Colour {
    /// Within the committed rate.
    Green,
    /// Above it, within the excess or peak.
    Yellow,
    /// Above both: a policer drops it.
    Red,
}

/// Whether the incoming colour of a packet counts.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ColourMode {
    /// Every packet counts as green.
    #[default]
    Blind,
    /// A colour is kept or worsened.
    Aware,
}

/// The rates and bursts of a meter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MeterKind {
    /// srTCM: one rate, two bursts.
    SingleRate {
        /// Committed rate.
        cir: Rate,
        /// Committed burst.
        cbs: Bytes,
        /// Excess burst, filled by the overflow of the committed bucket.
        ebs: Bytes,
    },
    /// trTCM: a committed and a peak rate; the peak covers all traffic.
    TwoRate {
        /// Committed rate.
        cir: Rate,
        /// Committed burst.
        cbs: Bytes,
        /// Peak rate, at least the committed one.
        pir: Rate,
        /// Peak burst.
        pbs: Bytes,
    },
    /// RFC 4115: a committed rate and an excess rate on top of it.
    Differentiated {
        /// Committed rate.
        cir: Rate,
        /// Committed burst.
        cbs: Bytes,
        /// Excess rate.
        eir: Rate,
        /// Excess burst.
        ebs: Bytes,
    },
}

/// Why a meter is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MeterError {
    /// A rate or burst that no bucket can have.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// The peak is below the committed rate.
    #[error("peak rate {pir} is below the committed rate {cir}; a peak rate covers all traffic")]
    Peak {
        /// Committed rate.
        cir: Rate,
        /// Peak rate.
        pir: Rate,
    },
}

/// How the buckets of a meter work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Coupling {
    /// The overflow of the committed bucket goes to the second (srTCM).
    Overflow,
    /// A green packet pays from both (trTCM).
    Covering,
    /// Nothing is shared (RFC 4115).
    Apart,
}

/// A meter in the form for the packet path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeterConfig {
    /// How the buckets work together.
    pub coupling: Coupling,
    /// Whether colours count.
    pub mode: ColourMode,
    /// The committed bucket.
    pub committed: BucketConfig,
    /// The excess or peak bucket; with [`Coupling::Overflow`] its rate is the committed one.
    pub second: BucketConfig,
}

impl MeterKind {
    /// The meter, checked.
    ///
    /// # Errors
    /// [`MeterError`] for a rate outside 8 kbit/s to 100 Gbit/s, bursts that are both nothing or together
    /// above [`MAX_BURST`], and a peak rate below the committed one. One of the bursts may be nothing.
    pub fn config(self, mode: ColourMode) -> Result<MeterConfig, MeterError> {
        let (coupling, (cir, cbs), (rate, burst)) = match self {
            MeterKind::SingleRate { cir, cbs, ebs } => (Coupling::Overflow, (cir, cbs), (cir, ebs)),
            MeterKind::TwoRate { cir, cbs, pir, pbs } => {
                (Coupling::Covering, (cir, cbs), (pir, pbs))
            }
            MeterKind::Differentiated { cir, cbs, eir, ebs } => {
                (Coupling::Apart, (cir, cbs), (eir, ebs))
            }
        };
        let bucket = |rate: Rate, burst: Bytes| {
            let (rate, burst) = (rate.bit_s(), burst.0.saturating_mul(UNITS_PER_BYTE));
            BucketConfig { rate, burst, fill: burst.div_ceil(rate) }
        };
        let (committed, second) = (bucket(cir, cbs), bucket(rate, burst));
        let config = MeterConfig { coupling, mode, committed, second };
        config.check()?;
        Ok(config)
    }
}

impl MeterConfig {
    /// Checks the buckets, alone and together.
    ///
    /// # Errors
    /// As [`MeterKind::config`].
    pub fn check(&self) -> Result<(), MeterError> {
        let rate = |bucket: &BucketConfig| {
            let rate = Rate::from_bit_s(bucket.rate).ok_or(BucketError::Burst(Bytes(0)))?;
            check_rate(rate).map(|()| rate)
        };
        let (cir, second) = (rate(&self.committed)?, rate(&self.second)?);
        if self.coupling == Coupling::Covering && second < cir {
            return Err(MeterError::Peak { cir, pir: second });
        }
        let sum = self.committed.burst.saturating_add(self.second.burst);
        if sum == 0 || sum > MAX_BURST.0 * UNITS_PER_BYTE {
            return Err(BucketError::Burst(Bytes(sum / UNITS_PER_BYTE)).into());
        }
        Ok(())
    }
}

/// A meter. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meter {
    config: MeterConfig,
    /// Units in the committed bucket at `last`.
    committed: u64,
    /// Units in the other one.
    second: u64,
    last: Nanos,
}

impl Meter {
    /// A meter whose buckets are full at `now`.
    #[must_use]
    pub fn new(config: MeterConfig, now: Nanos) -> Self {
        let (committed, second) = (config.committed.burst, config.second.burst);
        Meter { config, committed, second, last: now }
    }

    /// Units in the committed and in the other bucket as the last packet left them, and when that was.
    #[must_use]
    pub fn state(&self) -> (u64, u64, Nanos) {
        (self.committed, self.second, self.last)
    }

    /// Changes the meter from `now` on. The buckets keep their content as far as it fits.
    pub fn set_config(&mut self, now: Nanos, config: MeterConfig) {
        self.fill(now);
        self.committed = self.committed.min(config.committed.burst);
        self.second = self.second.min(config.second.burst);
        self.config = config;
    }

    /// Colours a packet of `bytes`, and charges it. A colour-blind meter ignores `incoming`.
    pub fn on_packet(&mut self, now: Nanos, bytes: u32, incoming: Colour) -> Colour {
        self.fill(now);
        let cost = u64::from(bytes) * UNITS_PER_BYTE;
        let incoming = match self.config.mode {
            ColourMode::Blind => Colour::Green,
            ColourMode::Aware => incoming,
        };
        let (committed, second) = (self.committed >= cost, self.second >= cost);
        let colour = match self.config.coupling {
            Coupling::Covering if !second => Colour::Red,
            _ if committed => Colour::Green,
            _ if second => Colour::Yellow,
            _ => Colour::Red,
        };
        let colour = match incoming {
            Colour::Green => colour,
            Colour::Yellow if second => Colour::Yellow,
            Colour::Yellow | Colour::Red => Colour::Red,
        };
        if colour == Colour::Green {
            self.committed -= cost;
        }
        let covers = colour == Colour::Green && self.config.coupling == Coupling::Covering;
        if colour == Colour::Yellow || covers {
            self.second -= cost;
        }
        colour
    }

    fn fill(&mut self, now: Nanos) {
        let MeterConfig { coupling, committed, second, .. } = self.config;
        let time = now.0.saturating_sub(self.last.0);
        self.last = self.last.max(now);
        if coupling == Coupling::Overflow {
            if time >= committed.fill + second.fill {
                (self.committed, self.second) = (committed.burst, second.burst);
                return;
            }
            // Less than both buckets hold, which is within 64 bits.
            let gain = committed.rate * time;
            let taken = gain.min(committed.burst - self.committed);
            self.committed += taken;
            self.second += (gain - taken).min(second.burst - self.second);
            return;
        }
        for (tokens, bucket) in [(&mut self.committed, committed), (&mut self.second, second)] {
            *tokens = match time < bucket.fill {
                true => *tokens + (bucket.rate * time).min(bucket.burst - *tokens),
                false => bucket.burst,
            };
        }
    }
}

#[cfg(test)]
mod tests;
