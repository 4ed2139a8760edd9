//! The fair share of a paced limit: one rate for all its TCP flows, at which they fill the limit and need no
//! queue, mark or drop (the `pace` scheme).
//!
//! This is explicit-rate control as in ERICA (Kalyanaraman et al., 2000) and RCP (Dukkipati, 2007), at the
//! source itself. At the end of each epoch the limiter knows the load (the charge as a fraction of what the
//! limit allows), the backlog, how many flows took their share, and what is set aside for the others
//! ([`crate::unpaced`]). The next share is
//!
//! ```text
//!   target = 0.99 - backlog / 20 ms                               of the limit, so that a backlog drains
//!   share += share * (epoch / delay) * (target - load) / 2        RCP's integral law
//!   share -= share * (epoch / delay) * (load - target) / load     or so, if there is a backlog
//!   share  = clamp(share, (target - aside) / flows, target)       an equal part at least
//! ```
//!
//! The lower bound makes it quick and safe. With greedy flows it *is* the max-min share, without memory. So
//! joins and leaves act within an epoch, and no overload can drive the share so low that paced sockets get no
//! update for long. The integral law gives out what flows below their share leave. An epoch is long enough to
//! see every flow: two rounds of the smallest paced burst. Its gain knows the loop's delay, the longer of the
//! round-trip time and that round. So does the reaction to a backlog: it corrects all of an overload within
//! one delay. If each epoch of a round trip corrected all of it, a few replies that begin together would
//! leave a transfer with a small part of what it may use, until long after they have ended.
//!
//! Limits inside a limit share it by the same law ([`crate::class`]): each has a weight, of which a flow has
//! 100, and a guarantee that is set aside first. The share is then what a weight of 100 gets beyond its
//! guarantee.
//!
//! ```text
//!   floor   = (target - guarantees) * 100 / sum of weights
//!   ceiling = target * 100 / lightest weight         beyond it the lightest has all
//! ```
//!
//! Shares and loads are fractions of the limit in 2^-24, so the law does not know the rate, and a change of
//! the rate needs no care. O(1) time and memory. The kernel's copy is `bpf/common/fair_share.h`.

use crate::Nanos;

/// One, in the fixed point of shares and loads.
pub const ONE: u64 = 1 << 24;
/// The part of the limit that is given out: 99 %, so that the virtual queue drains.
pub const TARGET: u64 = ONE * 99 / 100;
/// A backlog is drained in about this time.
pub const DRAIN: Nanos = Nanos(20_000_000);
/// No more than this part of the limit is kept back to drain a backlog.
pub const MAX_DRAIN: u64 = ONE / 4;
/// The shortest epoch, and the shortest delay of the loop that is assumed.
pub const MIN_EPOCH: Nanos = Nanos(4_000_000);
/// Upper bound of an epoch.
pub const MAX_EPOCH: Nanos = Nanos(1 << 34);
/// Upper bound of the charge of an epoch.
pub const MAX_CHARGED: Nanos = Nanos(1 << 38);
/// After this many epochs without a packet everything known is stale.
pub const STALE_EPOCHS: u64 = 16;
/// More flows than this count as this many.
pub const MAX_FLOWS: u32 = 1 << 16;
/// The weight of a flow, and the default weight of a limit inside a limit; as in the cgroup controllers.
pub const WEIGHT: u32 = 100;
/// The largest share: all of the limit for a weight of one.
pub const MAX_SHARE: u64 = ONE * WEIGHT as u64;
/// However much is guaranteed, a weight keeps at least this part (a shift) of what it would have without.
const LEAST_SHIFT: u32 = 8;

/// The sharers of a limit: the flows, or classes, that sent data in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharers {
    /// How many.
    pub count: u32,
    /// Their weights together.
    pub weight: u32,
    /// The weight of the lightest.
    pub lightest: u32,
    /// Guaranteed to them, or among flows set aside for unpaced senders; as a fraction of the limit.
    pub reserved: u64,
}

impl Sharers {
    /// `count` equal flows.
    #[must_use]
    pub fn flows(count: u32) -> Sharers {
        let weight = count.clamp(1, MAX_FLOWS) * WEIGHT;
        Sharers { count, weight, lightest: WEIGHT, reserved: 0 }
    }

    /// The share of each if all of them take all that they may.
    fn floor(&self, target: u64) -> u64 {
        let weight = u64::from(self.weight.max(1));
        let least = (target * u64::from(WEIGHT) / weight) >> LEAST_SHIFT;
        ((target - self.reserved.min(target)) * u64::from(WEIGHT) / weight).max(least)
    }

    /// The share at which the lightest of them may take all.
    fn ceiling(&self, target: u64) -> u64 {
        target * u64::from(WEIGHT) / u64::from(self.lightest.max(1))
    }
}

/// A flow that was silent for fewer epochs is not new ([`join`]): it had its room, and the load says what it
/// needs.
pub const KNOWN_EPOCHS: u64 = 8;

/// The observations of one epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch {
    /// How long it was.
    pub elapsed: Nanos,
    /// The charge of the virtual queue, in time at the limit's rate.
    pub charged: Nanos,
    /// Backlog above the mark threshold at its end.
    pub backlog: Nanos,
    /// Smoothed round-trip time of the flows.
    pub rtt: Nanos,
    /// Time of the smallest paced burst, two segments, at the limit's rate.
    pub burst: Nanos,
    /// The flows or classes that sent data.
    pub sharers: Sharers,
}

/// How long an epoch must last for each of `flows` to be seen in it.
#[must_use]
pub fn epoch_length(flows: u32, burst: Nanos) -> Nanos {
    let round = 2 * u64::from(flows.min(MAX_FLOWS)) * burst.min(MAX_EPOCH).0;
    Nanos(round).clamp(MIN_EPOCH, MAX_EPOCH)
}

/// The part of the limit that may be given out while `backlog` drains.
#[must_use]
pub fn target(backlog: Nanos) -> u64 {
    TARGET - (backlog.min(DRAIN).0 * ONE / DRAIN.0).min(MAX_DRAIN)
}

/// The share for the rest of an epoch in which more were seen than in the one before: they get room at once.
#[must_use]
pub fn make_room(share: u64, sharers: &Sharers) -> u64 {
    share.min(sharers.floor(TARGET))
}

/// The same for one new flow, the `flows`-th, where existing flows may leave a part of their share to others:
/// all give it an equal part of what they may use. With greedy flows this is [`make_room`]. Beside flows that
/// come and go, greedy flows keep what those leave when one comes. A flow that was silent for up to
/// [`KNOWN_EPOCHS`] is not new.
#[must_use]
pub fn join(share: u64, flows: u32) -> u64 {
    let flows = u64::from(flows.clamp(1, MAX_FLOWS));
    let share = share.min(TARGET);
    (share * (flows - 1) / flows).max(share.min(TARGET / flows))
}

/// The share of each flow in the next epoch, after `share` in this one.
#[must_use]
pub fn next_share(share: u64, epoch: &Epoch) -> u64 {
    let need = epoch_length(epoch.sharers.count.max(1), epoch.burst);
    let target = target(epoch.backlog);
    let floor = epoch.sharers.floor(target);
    if epoch.elapsed.0 / STALE_EPOCHS > need.0 {
        return floor;
    }
    let elapsed = epoch.elapsed.clamp(Nanos(1), MAX_EPOCH);
    let load = (epoch.charged.min(MAX_CHARGED).0 * ONE / elapsed.0).min(16 * ONE);
    let delay = epoch.rtt.max(need).min(MAX_EPOCH);
    let step = elapsed.min(delay).0 * ONE / delay.0;
    let share = share.min(MAX_SHARE);
    let pull = (share * step) >> 24;
    let next = if load < target {
        share + ((pull * (target - load)) >> 25)
    } else {
        let lower = share - ((pull * (load - target).min(ONE)) >> 25);
        // Corrects all of the overload, but once a round trip, as sockets learn their share only then.
        let answered = share - pull * (load - target) / load.max(1);
        if epoch.backlog.0 > 0 { lower.min(answered) } else { lower }
    };
    next.min(epoch.sharers.ceiling(target)).max(floor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    const BURST: Nanos = Nanos(24_000);

    /// Flows that take the share, or less if they want less, after `delay` epochs; returns the load and the
    /// share of every epoch, both as fractions.
    fn drive(demands: impl Fn(usize) -> Vec<f64>, delay: usize, epochs: usize) -> Vec<(f64, f64)> {
        let mut shares = std::vec![TARGET; delay + 1];
        let (mut backlog, mut flows_before) = (0.0f64, 0);
        let mut out = Vec::new();
        for step in 0..epochs {
            let heard = shares[shares.len() - 1 - delay] as f64 / ONE as f64;
            let wants = demands(step);
            if wants.len() > flows_before {
                let last = shares.last_mut().unwrap();
                *last = make_room(*last, &Sharers::flows(wants.len() as u32));
            }
            flows_before = wants.len();
            let load: f64 = wants.iter().map(|want| want.min(heard)).sum();
            let length = epoch_length(wants.len() as u32, BURST);
            backlog = (backlog + (load - 1.0) * length.0 as f64).max(0.0);
            let epoch = Epoch {
                elapsed: length,
                charged: Nanos((load * length.0 as f64) as u64),
                backlog: Nanos((backlog - 2e6).max(0.0) as u64),
                rtt: Nanos(length.0 * delay as u64),
                burst: BURST,
                sharers: Sharers::flows(wants.len() as u32),
            };
            let share = next_share(*shares.last().unwrap(), &epoch);
            shares.push(share);
            out.push((load, share as f64 / ONE as f64));
        }
        out
    }

    #[test]
    fn greedy_flows_have_equal_shares() {
        for flows in [1, 2, 9, 100] {
            let run = drive(|_| std::vec![1.0; flows], 0, 50 * flows);
            let (load, share) = run[50 * flows - 1];
            assert!((share - 0.99 / flows as f64).abs() < 1e-3, "{flows} flows: {share}");
            assert!((load - 0.99).abs() < 0.01, "{flows} flows: load {load}");
        }
    }

    #[test]
    fn what_small_flows_leave_goes_to_the_large_one() {
        for delay in [0, 1, 3] {
            let run = drive(|_| std::vec![1.0, 0.05, 0.05, 0.05], delay, 200);
            let (load, share) = run[199];
            assert!((share - 0.84).abs() < 0.03, "delay {delay}: share {share}");
            assert!((load - 0.99).abs() < 0.03, "delay {delay}: load {load}");
        }
    }

    #[test]
    fn joins_and_leaves_settle_without_silence() {
        let run =
            drive(|step| std::vec![1.0; if (50..150).contains(&step) { 9 } else { 1 }], 1, 200);
        assert!((run[49].0 - 0.99).abs() < 0.01);
        // Eight start at the old rate; one epoch later all know the new one, and what they sent too much
        // drains.
        assert!((52..150).all(|i| (0.7..1.0).contains(&run[i].0)), "{:?}", &run[50..70]);
        assert!((run[149].0 - 0.99).abs() < 0.02, "{:?}", run[149]);
        assert!((153..200).all(|i| run[i].0 > 0.9), "{:?}", &run[150..160]);
    }

    #[test]
    fn newcomers_are_made_room_for_in_proportion() {
        // Greedy flows: as if it were computed anew.
        let all = (2..=9).fold(TARGET, join);
        assert!((all as i64 - (TARGET / 9) as i64).abs() < 16, "{all}");
        // Eight that leave almost all to one that may have 0.8; a tenth comes.
        assert_eq!(join(ONE * 8 / 10, 10), ONE * 8 / 10 * 9 / 10);
        assert_eq!(join(1, 10), 1, "a share is not raised");
        assert_eq!(join(u64::MAX, 0), TARGET);
    }

    /// An overload of two epochs of a round trip of ten: no flow knows of the first when the second ends.
    #[test]
    fn a_backlog_is_answered_once_a_round_trip() {
        let epoch = |rtt, charged| Epoch {
            elapsed: MIN_EPOCH,
            charged: Nanos(charged),
            backlog: Nanos(1),
            rtt,
            burst: BURST,
            // They take their shares.
            sharers: Sharers::flows(30),
        };
        let overloaded = |rtt| epoch(rtt, 3 * MIN_EPOCH.0);
        let share = ONE / 10;
        // Where all learn it within the epoch, the load must fall to the target at once.
        let at_once = next_share(
            share,
            &Epoch { elapsed: Nanos(10_000_000), charged: Nanos(30_000_000), ..epoch(Nanos(0), 0) },
        );
        assert!(at_once.abs_diff(share / 3) < share / 50, "{at_once}");
        let far = Nanos(10 * MIN_EPOCH.0);
        let twice = next_share(next_share(share, &overloaded(far)), &overloaded(far));
        assert!(twice > share * 80 / 100, "{twice} of {share}");
        let all = (0..10).fold(share, |share, _| next_share(share, &overloaded(far)));
        assert!(all < share / 2, "{all} of {share}");
    }

    #[test]
    fn an_idle_limit_starts_afresh() {
        let epoch = Epoch {
            elapsed: Nanos(1_000_000_000),
            charged: Nanos(1),
            backlog: Nanos(0),
            rtt: Nanos(0),
            burst: BURST,
            sharers: Sharers::flows(1),
        };
        assert_eq!(next_share(1, &epoch), TARGET);
    }

    prop_compose! {
        fn any_sharers()(count: u32, weight: u32, lightest: u32, reserved: u64) -> Sharers {
            Sharers { count, weight, lightest, reserved }
        }
    }

    #[test]
    fn flows_share_equally_and_guarantees_come_first() {
        assert_eq!(Sharers::flows(9).floor(TARGET), TARGET / 9);
        assert_eq!(Sharers::flows(9).ceiling(TARGET), TARGET);
        // Two classes, of weight 100 and 300, with a quarter guaranteed.
        let classes = Sharers { count: 2, weight: 400, lightest: 100, reserved: ONE / 4 };
        assert_eq!(classes.floor(ONE), ONE * 3 / 16);
        // What is guaranteed in full leaves little, but not nothing.
        assert_eq!(Sharers { reserved: ONE, ..classes }.floor(ONE), ONE / 4 / 256);
    }

    proptest! {
        /// Whatever is measured, the share stays between an equal part and the whole, and nothing overflows.
        #[test]
        fn the_share_keeps_its_bounds(
            share: u64, elapsed: u64, charged: u64, backlog: u64, rtt: u64, burst: u64,
            sharers in any_sharers(),
        ) {
            let epoch = Epoch {
                elapsed: Nanos(elapsed),
                charged: Nanos(charged),
                backlog: Nanos(backlog),
                rtt: Nanos(rtt),
                burst: Nanos(burst),
                sharers,
            };
            let next = next_share(share, &epoch);
            let target = target(epoch.backlog);
            prop_assert!((sharers.floor(target)..=MAX_SHARE).contains(&next));
        }

        /// Any demands at or below the limit settle on a load near the smaller of demand and target.
        #[test]
        fn any_demands_settle(demands in prop::collection::vec(0.01f64..1.0, 1..12), delay in 0usize..3) {
            let run = drive(|_| demands.clone(), delay, 600);
            let wanted: f64 = demands.iter().sum();
            let expected = wanted.min(0.99);
            let tail: f64 = run[500..].iter().map(|(load, _)| load).sum::<f64>() / 100.0;
            prop_assert!((tail - expected).abs() < 0.04, "load {tail}, expected {expected}");
        }
    }
}
