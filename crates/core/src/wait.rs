//! How long a packet waits that reaches a shaper now.
//!
//! The shaper's queue is not all. HTB sends a segment of 64 KB as a whole when those before it are paid, and
//! then sends nothing until it is paid itself: half a millisecond at 1 Gbit/s, while its queue is empty. A
//! law that reads only the bytes of the queue takes such a limit for an idle one, and fills it. So an account
//! of the shaper is kept beside it, packet by packet as they come:
//!
//! ```text
//!   packet:  finish = max(finish, now - burst) + length / rate
//!   wait     = clamp(finish - now, queued / rate, queued / rate + longest)
//! ```
//!
//! `queued` is the kernel's own number, and always right. The account adds the debt of the packet that has
//! left last, at most `longest`. If the account is higher, packets were dropped that it has counted, and it
//! is corrected.
//!
//! An ACK that gets its window before it reaches a shaper waits for the [short debt](Account::short_debt): a
//! debt that is longer is a queue, which that shaper's own law is about to remove. A window that made up for
//! such a queue in the other direction would be a queue in this one, and the two would feed each other.
//!
//! When a lease ends, the rate is no longer that of the shaper, but its qdisc goes on as before. Then the
//! account alone holds the lower rate: what comes when the [debt](Account::debt) exceeds [`Config::most`] is
//! dropped.
//!
//! O(1) a packet; 16 bytes a limit. The kernel's copy is `bpf/acks/wait.h`.

use crate::{
    units::{Nanos, Rate},
    virtual_queue::{COST_SHIFT, MAX_PACKET_BYTES, cost_of_byte, scaled, time_of},
};

/// The default of the longest packet that a stack builds, with the headers of its segments.
pub const LONGEST_BYTES: u64 = 65_536 + 45 * 66;
/// Four full frames.
const FIRST_BYTES: u64 = 4 * 1514;
/// Upper bound of a wait.
pub const MAX_WAIT: Nanos = Nanos(1_000_000_000);

/// The shaper whose account is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The cost of a byte, in 2^-24 ns.
    pub cost: u64,
    /// The credit that it saves up when it is idle.
    pub burst: Nanos,
    /// The time of the longest packet.
    pub longest: Nanos,
}

impl Config {
    /// The parameters of a shaper of this rate and burst.
    #[must_use]
    pub fn new(rate: Rate, burst: Nanos) -> Self {
        let cost = cost_of_byte(rate);
        Config { cost, burst, longest: time_of(LONGEST_BYTES, cost).min(MAX_WAIT) }
    }

    /// The largest debt where only the account holds the rate: the credit, or a connection's first segments.
    #[must_use]
    pub fn most(&self) -> Nanos {
        let first = (u128::from(FIRST_BYTES) * u128::from(self.cost)) >> COST_SHIFT;
        self.burst.max(Nanos(u64::try_from(first).unwrap_or(u64::MAX))).clamp(Nanos(1), MAX_WAIT)
    }
}

/// The account.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    /// When all that came will be paid.
    pub finish: Nanos,
    /// The part of a nanosecond that is still to be charged, in 2^-24 ns.
    pub carry: u32,
    /// The cost of a byte in the debt; 0: not known.
    pub cost: u64,
}

impl Account {
    /// A packet reaches the shaper.
    pub fn charge(&mut self, config: &Config, now: Nanos, wire_bytes: u32) {
        let bytes = u64::from(wire_bytes.min(MAX_PACKET_BYTES));
        let cost = bytes * config.cost + u64::from(self.carry);
        self.carry = (cost & ((1 << COST_SHIFT) - 1)) as u32;
        self.turn(config, now);
        let idle_since = now.0.saturating_sub(config.burst.0);
        self.finish = Nanos(self.finish.0.max(idle_since) + (cost >> COST_SHIFT));
    }

    /// The debt is in bytes: at another rate it is another time.
    fn turn(&mut self, config: &Config, now: Nanos) {
        let was = core::mem::replace(&mut self.cost, config.cost);
        let debt = self.debt(now).min(MAX_WAIT);
        if was != config.cost && was > 0 && debt.0 > 0 {
            self.finish = Nanos(now.0 + scaled(debt, was, config.cost).min(MAX_WAIT).0);
        }
    }

    /// The debt: what was let go and is still to be paid.
    #[must_use]
    pub fn debt(&self, now: Nanos) -> Nanos {
        Nanos(self.finish.0.saturating_sub(now.0))
    }

    /// The debt, at most that of the longest packet.
    #[must_use]
    pub fn short_debt(&self, now: Nanos) -> Nanos {
        self.debt(now).min(time_of(LONGEST_BYTES, self.cost))
    }

    /// How long a packet waits that comes now. `queued` is the queue as a time at the rate.
    pub fn look(&mut self, config: &Config, now: Nanos, queued: Nanos) -> Nanos {
        self.turn(config, now);
        let queued = queued.min(MAX_WAIT).0;
        let most = queued + config.longest.min(MAX_WAIT).0;
        let debt = self.debt(now).0;
        if debt > most {
            self.finish = Nanos(now.0 + most);
        }
        Nanos(debt.clamp(queued, most).min(MAX_WAIT.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config::new(Rate::from_bit_s(1_000_000_000).unwrap(), Nanos(1_000_000))
    }

    #[test]
    fn what_has_left_is_still_to_be_paid() {
        let (config, mut account) = (config(), Account::default());
        let now = Nanos(10_000_000);
        account.finish = now;
        account.charge(&config, now, 62_500);
        // It has left, and the queue is empty.
        assert_eq!(account.look(&config, now, Nanos(0)), Nanos(500_000));
        assert_eq!(account.look(&config, Nanos(now.0 + 400_000), Nanos(0)), Nanos(100_000));
        assert_eq!(account.look(&config, Nanos(now.0 + 700_000), Nanos(0)), Nanos(0));
    }

    #[test]
    fn the_debt_has_bounds() {
        let most =
            |bit_s, burst| Config::new(Rate::from_bit_s(bit_s).unwrap(), Nanos(burst)).most();
        assert_eq!(most(1_000_000_000, 10_000_000), Nanos(10_000_000));
        assert!(most(1_000_000, 10_000_000).0.abs_diff(48_448_000) < 10);
        assert_eq!(most(1, 0), MAX_WAIT);
        assert_eq!(most(u64::MAX, 0), Nanos(1));
    }

    #[test]
    fn the_debt_is_in_bytes() {
        let (fast, mut account) = (config(), Account::default());
        let slow = Config::new(Rate::from_bit_s(100_000_000).unwrap(), fast.burst);
        let now = Nanos(10_000_000);
        account.look(&slow, now, Nanos(0));
        account.finish = now;
        account.charge(&slow, now, 62_500);
        assert_eq!(account.look(&slow, now, Nanos(0)), Nanos(5_000_000));
        // To 2^-16 of the ratio.
        assert!(account.look(&fast, now, Nanos(0)).0.abs_diff(500_000) < 100);
        assert!(account.look(&slow, now, Nanos(0)).0.abs_diff(5_000_000) < 2_000);
    }

    #[test]
    fn credit_is_no_more_than_the_burst() {
        let (config, mut account) = (config(), Account::default());
        let now = Nanos(10_000_000);
        account.charge(&config, now, 125_000);
        assert_eq!(account.look(&config, now, Nanos(0)), Nanos(0));
        account.charge(&config, now, 12_500);
        assert_eq!(account.look(&config, now, Nanos(0)), Nanos(100_000));
    }

    #[test]
    fn the_queue_is_believed() {
        let (config, mut account) = (config(), Account::default());
        let now = Nanos(10_000_000);
        // It is late.
        assert_eq!(account.look(&config, now, Nanos(300_000)), Nanos(300_000));
        // It has dropped what came.
        for _ in 0..1000 {
            account.charge(&config, now, 62_500);
        }
        assert_eq!(account.look(&config, now, Nanos(1000)), Nanos(1000 + config.longest.0));
        assert_eq!(account.finish, Nanos(now.0 + 1000 + config.longest.0));
    }
}
