//! When a new connection may begin in a limit of scheme `pace` that is in use.
//!
//! TCP does not pace the first ten segments of a connection, so pacing never slows a client that opens a
//! connection for each request. It would take many times the limit, or meet drops, each of which costs it a
//! timer of 200 ms. So the connection is *held* before it begins: its SYN-ACK is dropped on egress, and the
//! kernel sends it again when the timer ends that the SYN-ACK was given. Nothing else has to wake up, no
//! packet is stored, and no timer of the client runs out.
//!
//! **Turns.** Connections begin at the rate at which the limit can carry what they take ([`Turns::ask`]).
//! The need of one connection, up to the ten segments, is learnt from those that have ended
//! ([`Turns::ended`]). With `w` waiting connections and `f` paced flows a turn takes `(w + f) / w` times as
//! long as the limit needs for one connection, so each of them has the part of a flow. A connection that
//! begins and never comes lowers the average, so a flood of SYNs does not delay others.
//!
//! **The least time.** The kernel keeps an unconfirmed connection for as many times of the timer as it
//! retries the SYN-ACK, each twice as long as the one before. A client that answers later is refused. So the
//! timer is long enough for the client to have about a second and [`PATIENCE_ROUNDS`] smoothed round trips of
//! the limit ([`hold_ticks`]): 16 ms with the kernel's five retries. All connections that are held for so
//! long begin in the same tick of the kernel's clock, and the limit is idle before. So the listeners of a
//! limit get seven retries ([`answer_retries`]): 4 ms. The cost: the kernel keeps a connection that was not
//! held, and is never confirmed, for 255 s, not 63.
//!
//! **Outgoing connections.** A connection that a program in the limit opens is held at its SYN, in the same
//! way: the SYN is dropped, and the kernel sends it when its timer ends ([`syn_ticks`]). As each further try
//! comes after twice the time, it gets more tries ([`syn_retries`]).
//!
//! O(1) time and 24 bytes a limit and direction. The kernel's copy is `bpf/nrm/admission.h`.

use crate::{fair_share::MAX_FLOWS, units::Nanos, virtual_queue::time_of};

/// Each connection that ends moves the average by one part in 2^6.
const AVERAGE_SHIFT: u32 = 6;
/// TCP's first ten segments, in bytes on the wire; what a connection sends later is paced.
pub const MOST_BYTES: u64 = 10 * FRAME_BYTES;
/// A full frame on the wire.
const FRAME_BYTES: u64 = 1514;
/// A backlog up to this delays no connection.
pub const SLACK: Nanos = Nanos(4_000_000);
/// No connection waits longer: a client retries after a second.
pub const MOST: Nanos = Nanos(850_000_000);
/// A client has this time and [`PATIENCE_ROUNDS`] round trips to answer a held SYN-ACK.
pub const PATIENCE: Nanos = Nanos(992_000_000);
/// See [`PATIENCE`].
pub const PATIENCE_ROUNDS: u64 = 16;
/// The least time may be at most this, or twice the time until the turn.
pub const LEAST: Nanos = Nanos(32_000_000);
/// The first timer of a SYN that is not held. A hold of a millisecond is ten doublings shorter.
const SECOND: Nanos = Nanos(1_000_000_000);
const SYN_DOUBLINGS: u32 = 10;
/// The largest value of `TCP_SYNCNT`.
const SYN_RETRIES_MAX: u32 = 127;
/// More retries of a SYN-ACK than this gain nothing.
const MAX_RETRIES: u32 = 15;
/// The SYN-ACK retries that a listener in a limit gets, and the kernel's default.
pub const ANSWER_RETRIES: u32 = 7;
const DEFAULT_RETRIES: u32 = 5;
/// The kernel sends a held SYN-ACK again after twice its time. A path up to twice as long gets it once.
const ONCE: Nanos = Nanos(16_000_000);

/// The turns that the new connections of a limit take.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Turns {
    /// When the next turn comes.
    pub next: Nanos,
    /// Average bytes that a connection takes before it is paced, in 2^-6 bytes.
    pub average: u32,
}

impl Turns {
    /// A connection that took `bytes` on the wire has ended.
    pub fn ended(&mut self, bytes: u64) {
        let bytes = bytes.min(MOST_BYTES) as u32;
        let average = match self.average {
            0 => bytes << AVERAGE_SHIFT,
            average => average + bytes,
        };
        self.average = average.min((MOST_BYTES as u32) << AVERAGE_SHIFT);
    }

    /// Whether connections take at most a frame: then their programs only ask, and wait only for the turn of
    /// their replies.
    #[must_use]
    pub fn only_asks(&self) -> bool {
        u64::from(self.average >> AVERAGE_SHIFT) <= FRAME_BYTES
    }

    /// Whether a connection that has moved `segments` of data most likely ends before it is paced: it has
    /// moved at most twice what others took. Until then it is not a flow with a share. If no connection has
    /// ended yet, none ends soon: transfers that begin together count at once.
    #[must_use]
    pub fn ends_soon(&self, segments: u32) -> bool {
        (u64::from(segments) * FRAME_BYTES) << AVERAGE_SHIFT <= 2 * u64::from(self.average)
    }

    /// A connection begins: returns how long it has to wait. `cost` is that of a byte, in 2^-24 ns; `paced`
    /// is the number of paced flows; `backlog` is in nanoseconds, negative if the virtual queue has credit.
    pub fn ask(&mut self, now: Nanos, backlog: i64, cost: u64, paced: u32) -> Nanos {
        let wait = self.next.0.saturating_sub(now.0).min(MOST.0);
        let bytes = u64::from(self.average >> AVERAGE_SHIFT).min(MOST_BYTES);
        let own = time_of(bytes, cost).0;
        let paced = u64::from(paced.min(MAX_FLOWS));
        // The paced flows have their parts of the time until the turn.
        let waiting = (wait / own.max(1)).saturating_sub(paced).max(1);
        self.average -= self.average >> AVERAGE_SHIFT;
        self.next = Nanos(now.0 + wait + own + own * paced / waiting);
        let behind = u64::try_from(backlog).unwrap_or(0).saturating_sub(SLACK.0).min(MOST.0);
        Nanos(wait.max(behind))
    }
}

/// How long to hold the SYN-ACK of a connection that has to wait, in ticks of the kernel's timers; `None`:
/// not at all. `retries` is how often the kernel sends a SYN-ACK again, `rtt` the smoothed round trip of the
/// limit, `tick` the time of a tick.
#[must_use]
pub fn hold_ticks(wait: Nanos, retries: u32, rtt: Nanos, tick: Nanos) -> Option<u32> {
    let tick = tick.0.max(1);
    let times = (2u64 << retries.min(MAX_RETRIES)) - 2;
    if times == 0 || wait < SLACK {
        return None;
    }
    let patience = PATIENCE.0 + PATIENCE_ROUNDS * rtt.min(MOST).0;
    let least = (patience / times).max((rtt.min(MOST).0 * 3 / 4).min(ONCE.0));
    if least > LEAST.0.max(2 * wait.0) {
        return None;
    }
    Some((wait.0 / tick).max((least + tick / 2) / tick).max(1) as u32)
}

/// How often a listener should send a SYN-ACK again, so that a held one goes after 4 ms; `None`: no change.
/// `chosen` is the program's own choice (0: none), which stays. `host` is the default of the host
/// (`net.ipv4.tcp_synack_retries`); if that is below the kernel's default, it stays, too.
#[must_use]
pub fn answer_retries(chosen: u32, host: u32) -> Option<u32> {
    (chosen == 0 && (DEFAULT_RETRIES..ANSWER_RETRIES).contains(&host)).then_some(ANSWER_RETRIES)
}

/// How long to hold the SYN of a connection that has to wait, in ticks of the kernel's timers; `None`: not at
/// all. The kernel sends the SYN when the timer ends, and again after the same time, so the hold is longer
/// than a round trip.
#[must_use]
pub fn syn_ticks(wait: Nanos, rtt: Nanos, tick: Nanos) -> Option<u32> {
    let least = rtt.min(MOST).0 * 3 / 2;
    if wait < SLACK || least > MOST.0 {
        return None;
    }
    Some(wait.0.max(least).div_ceil(tick.0.max(1)).max(1) as u32)
}

/// How many times the kernel must retry a SYN that was held for `ticks`, so that the connection fails no
/// earlier than with `retries` after a first timer of a second. Each time is twice as long as the one before.
#[must_use]
pub fn syn_retries(ticks: u32, tick: Nanos, retries: u32) -> u32 {
    let held = u64::from(ticks) * tick.0.max(1);
    let doublings = (0..SYN_DOUBLINGS).take_while(|n| held << n < SECOND.0).count();
    (retries + doublings as u32).min(SYN_RETRIES_MAX)
}

#[cfg(test)]
mod tests {
    use alloc::{format, vec::Vec};

    use super::*;
    use crate::{Rate, virtual_queue::cost_of_byte};

    const TICK: Nanos = Nanos(4_000_000);

    fn cost(mbit: u64) -> u64 {
        cost_of_byte(Rate::from_bit_s(mbit * 1_000_000).unwrap())
    }

    /// Connections that took `bytes` each, so many that the average is that.
    fn learnt(bytes: u64) -> Turns {
        let mut turns = Turns::default();
        turns.ended(bytes);
        turns
    }

    #[test]
    fn nobody_waits_where_connections_take_less_than_the_limit() {
        let mut turns = learnt(10_000);
        // 10 kB in 1 ms are 80 of 100 Mbit/s.
        for i in 1..1000 {
            turns.ended(10_000);
            let wait = turns.ask(Nanos(i * 1_000_000), -1000, cost(100), 0);
            assert_eq!(wait, Nanos(0), "{i}");
        }
    }

    #[test]
    fn connections_and_flows_have_equal_parts() {
        for (clients, flows) in [(1u64, 1u32), (5, 1), (20, 4), (100, 1)] {
            // Each client asks again when its connection has ended, at once after its turn.
            let mut turns = learnt(10_000);
            let mut asks: Vec<u64> = (0..clients).map(|i| 1000 + i).collect();
            let end = 60_000_000_000;
            let mut count = 0u64;
            loop {
                asks.sort_unstable();
                let now = asks[0];
                if now > end {
                    break;
                }
                count += 1;
                turns.ended(10_000);
                asks[0] = now + turns.ask(Nanos(now), 0, cost(20), flows).0 + 1000;
            }
            let taken = count as f64 * 80_000.0 / (end as f64 / 1e9) / 20e6;
            let fair = clients as f64 / (clients + u64::from(flows)) as f64;
            let what =
                format!("{clients} clients beside {flows} flows take {taken:.3} of {fair:.3}");
            assert!((taken / fair - 1.0).abs() < 0.05, "{what}");
        }
    }

    #[test]
    fn what_never_comes_keeps_nobody_waiting() {
        let mut turns = learnt(15_000);
        // 10 000 SYNs a second, of which one in a hundred becomes a connection.
        let mut longest = Nanos(0);
        for i in 0..100_000u64 {
            if i % 100 == 0 {
                turns.ended(15_000);
            }
            let wait = turns.ask(Nanos(i * 100_000), 0, cost(100), 0);
            if i > 1000 {
                longest = longest.max(wait);
            }
        }
        assert!(longest < Nanos(2_000_000), "{longest:?}");
    }

    #[test]
    fn who_is_behind_holds_until_that_is_paid() {
        let mut turns = Turns::default();
        assert_eq!(turns.ask(Nanos(1), 30_000_000, cost(100), 4), Nanos(26_000_000));
        assert_eq!(turns.ask(Nanos(1), 4_000_000, cost(100), 4), Nanos(0));
        assert_eq!(turns.ask(Nanos(1), i64::MAX, cost(100), 4), MOST);
        assert_eq!(turns.ask(Nanos(1), i64::MIN, cost(100), 4), Nanos(0));
    }

    #[test]
    fn listeners_that_nobody_has_set_send_their_answers_more_often() {
        assert_eq!([5, 6].map(|host| answer_retries(0, host)), [Some(7); 2]);
        assert_eq!([0, 2, 4, 7, 15].map(|host| answer_retries(0, host)), [None; 5]);
        assert_eq!(answer_retries(3, 5), None);
    }

    #[test]
    fn a_client_has_a_second_to_answer_what_was_held() {
        let hold = |wait_ms: u64, retries, rtt_ms: u64| {
            let (wait, rtt) = (Nanos(wait_ms * 1_000_000), Nanos(rtt_ms * 1_000_000));
            hold_ticks(wait, retries, rtt, TICK)
        };
        assert_eq!(hold(3, 5, 0), None, "not worth it");
        assert_eq!(hold(4, 5, 0), Some(4), "16 ms");
        assert_eq!(hold(4, ANSWER_RETRIES, 0), Some(1), "4 ms");
        assert_eq!(hold(4, ANSWER_RETRIES, 20), Some(4), "the answer is sent again after 32 ms");
        assert_eq!(hold(8, ANSWER_RETRIES, 20), Some(4));
        assert_eq!(hold(40, ANSWER_RETRIES, 20), Some(10));
        assert_eq!(hold(40, 5, 0), Some(10));
        assert_eq!(hold(40, 5, 100), Some(10));
        assert_eq!(hold(4, 5, 100), None, "42 ms are too long for 4");
        assert_eq!(hold(30, 5, 100), Some(10), "42 ms");
        assert_eq!(hold(100, 0, 0), None, "nobody sends it again");
        assert_eq!(hold(30, 2, 0), None, "two retries would have to begin with 165 ms");
        assert_eq!(hold(100, 2, 0), Some(41));
        assert_eq!(hold(4, 200, 0), Some(1));
    }
}
