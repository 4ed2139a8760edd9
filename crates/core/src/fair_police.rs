//! Equal parts for the flows of a policer, without a queue (`fair` of the `police` scheme).
//!
//! A token bucket serves packets as they come, so a flow that comes back sooner after a loss, or ignores
//! losses, gets nearly all of the rate. Here each flow also has a phantom queue: a number that says how much
//! of the bucket's deficit this flow caused. No packet waits in it.
//!
//! ```text
//!   deficit = full - now                       what the bucket lacks, in time at its rate
//!   ahead   = finish - level                   a flow's phantom queue, none if the level is higher
//!   level:    sum of ahead over all flows = deficit
//!   fits if   ahead x busy <= 8 (fill - deficit)
//!   passes if the bucket has no debt yet:      finish = max(finish, level) + length / rate
//! ```
//!
//! The level is the virtual time of generalized processor sharing (Demers, Keshav and Shenker, 1989): busy
//! phantom queues drain at equal parts of the rate, and what a flow leaves goes to the others, as in max-min.
//! GPS computes the level from flows that come and go. Here it is computed from the bucket, which knows
//! exactly how much they hold together. So it cannot drift, needs no lock, and an error by a race is
//! corrected a turn later. Each turn takes one step of Newton's method from the previous level, which is
//! nearly right. Between turns the level rises by time over the number of busy flows.
//!
//! Phantom queues come from BC-PQP (SIGCOMM 2024), and a limit that shrinks with the room that all leave from
//! FairPolicer (INFOCOM 2021). Times the number of busy flows it leaves a ninth of the bucket for new flows,
//! however many there are, and eight ninths to a flow that is alone. A flow that takes less than its part has
//! an empty phantom queue most of the time and loses nothing.
//!
//! A packet that fits passes even if the bucket holds less than the packet: a segment of 64 KB may be longer
//! than a ninth of a bucket, and a ninth of a small bucket less than a frame. The rest becomes a debt, of one
//! packet at a time ([`TokenBucket::on_part`]).
//!
//! There are [`SETS`] sets of [`WAYS`] cells; a flow's hash chooses its set ([`flow_hash`]). An empty phantom
//! queue holds no state, so any flow may take its cell. Flows that find all cells of their set busy share one
//! cell, that of the others, as one flow. Memory is fixed, and a packet reads four cells.
//!
//! Once in each [`FairConfig::turn`] all cells are visited, in eight steps over that time, each by the packet
//! that comes when it is due. After a turn without a packet, and when the rate has changed, one packet visits
//! them all.
//!
//! The eBPF side is `bpf/police/fair_police.h`; a property test compares the two, bit by bit.
//!
//! [`TokenBucket::on_part`]: crate::TokenBucket::on_part
//! [`flow_hash`]: crate::fleet::flows::flow_hash

use crate::{
    token_bucket::BucketConfig,
    units::{Nanos, Rate},
    virtual_queue::{COST_SHIFT, cost_of_byte, scaled},
};

/// Sets of cells; a power of two.
pub const SETS: usize = 128;
/// Cells of a set.
pub const WAYS: usize = 4;
/// The set is in the upper bits, which the hash mixes best.
const SET_SHIFT: u32 = u64::BITS - SETS.trailing_zeros();
/// The phantom queues together may be this many times (a shift) as long as what is left in the bucket.
const ROOM_SHIFT: u32 = 3;
/// How often the level is computed in the time that the bucket takes to fill (a shift).
const TURN_SHIFT: u32 = 5;
/// The least and the most time between two computations.
pub const TURN: (Nanos, Nanos) = (Nanos(250_000), Nanos(4_000_000));
/// Steps of a turn.
const STEPS: u64 = 8;
/// Cells that a step visits.
const STEP_CELLS: usize = SETS * WAYS / STEPS as usize;
/// The longest packet.
pub const MAX_PACKET_BYTES: u32 = (1 << 20) - 1;

/// The bucket, in the form that phantom queues work with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FairConfig {
    /// Cost of a byte at the whole rate, in 2^-24 ns.
    cost: u64,
    /// How long an empty bucket takes to fill.
    fill: u64,
}

impl FairConfig {
    /// The parameters for the bucket that the flows share.
    #[must_use]
    pub fn new(bucket: &BucketConfig) -> FairConfig {
        let cost = Rate::from_bit_s(bucket.rate).map_or(0, cost_of_byte);
        FairConfig { cost, fill: bucket.fill }
    }

    /// How long a level is valid.
    #[must_use]
    pub fn turn(&self) -> Nanos {
        Nanos((self.fill >> TURN_SHIFT).clamp(TURN.0.0, TURN.1.0))
    }
}

/// A phantom queue.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Phantom {
    /// The flow; 0: free.
    flow: u64,
    /// The level at which it is empty.
    finish: u64,
    /// The cost of a byte at the rate at which `finish` is kept; 0: the cell is unused.
    cost: u64,
}

impl Phantom {
    /// Converts it to the rate at which a byte costs `cost`; the bytes stay.
    fn follow(&mut self, level: u64, cost: u64) {
        let ahead = self.finish.saturating_sub(level);
        if ahead > 0 && self.cost != cost {
            self.finish = level + scaled(Nanos(ahead), self.cost, cost).0;
        }
        self.cost = cost;
    }
}

/// A flow's slot: a cell of a set, or that of the others.
type Place = Option<(usize, usize)>;

/// The verdict of a flow's phantom queue on a packet; [charge](FairPolice::charge) it if the bucket takes the
/// packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Fit {
    place: Place,
    finish: u64,
    /// Whether the flow may send it, if there are tokens.
    pub fits: bool,
}

/// The sums over the steps of a turn.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Sum {
    /// The sum over all phantom queues, each against the level of its step.
    ahead: u64,
    busy: u32,
    /// When the last is empty.
    latest: u64,
    /// The deficit of the bucket, added up over the steps.
    deficit: u64,
}

impl Sum {
    fn add(&mut self, level: u64, cost: u64, cell: &mut Phantom) {
        cell.follow(level, cost);
        let ahead = cell.finish.saturating_sub(level);
        if ahead > 0 {
            self.ahead += ahead;
            self.busy += 1;
            self.latest = self.latest.max(cell.finish);
        }
    }
}

/// The phantom queues of the flows of a bucket. See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FairPolice {
    config: FairConfig,
    /// When the last step was taken, which is next, and the sums of this turn.
    stepped: u64,
    step: u64,
    sum: Sum,
    /// The level, when it was computed, and how many flows were busy.
    level: u64,
    turned: u64,
    busy: u32,
    /// The cost of a byte at the last step; 0: none yet.
    cost: u64,
    others: Phantom,
    sets: [[Phantom; WAYS]; SETS],
}

impl FairPolice {
    /// No flows yet.
    #[must_use]
    pub fn new(config: FairConfig) -> FairPolice {
        let none = Phantom { flow: 0, finish: 0, cost: 0 };
        let sets = [[none; WAYS]; SETS];
        let (sum, level, turned) = (Sum::default(), 0, 0);
        let (stepped, step, busy, cost) = (0, 0, 1, 0);
        FairPolice { config, stepped, step, sum, level, turned, busy, cost, others: none, sets }
    }

    /// Changes the bucket. Phantom queues keep their bytes.
    pub fn set_config(&mut self, config: FairConfig) {
        self.config = config;
    }

    /// Flows that were busy at the last turn, at least one.
    #[must_use]
    pub fn busy(&self) -> u32 {
        self.busy
    }

    /// The level by the last turn.
    #[must_use]
    pub fn level(&self) -> Nanos {
        Nanos(self.level)
    }

    /// Whether a packet of `flow`, a hash, fits its part, while the bucket will be full again at `full`.
    pub fn fit(&mut self, now: Nanos, full: Nanos, flow: u64, bytes: u32) -> Fit {
        let deficit = full.0.saturating_sub(now.0);
        self.look(now.0, deficit);
        let level = self.level_at(now.0);
        let place = self.place(level, flow);
        let byte = self.config.cost;
        self.at(place).follow(level, byte);
        let ahead = self.at(place).finish.saturating_sub(level).min(deficit);
        let room = self.config.fill.saturating_sub(deficit) << ROOM_SHIFT;
        let cost = (u64::from(bytes.min(MAX_PACKET_BYTES)) * byte) >> COST_SHIFT;
        let fits = ahead * u64::from(self.busy) <= room;
        Fit { place, finish: level + ahead + cost, fits }
    }

    /// The bucket has taken the packet.
    pub fn charge(&mut self, fit: Fit) {
        self.at(fit.place).finish = fit.finish;
    }

    /// The cell of a flow. It may have been another flow's.
    fn place(&mut self, level: u64, flow: u64) -> Place {
        let at = (flow >> SET_SHIFT) as usize;
        let set = &mut self.sets[at];
        if let Some(way) = set.iter().position(|cell| cell.flow == flow) {
            return Some((at, way));
        }
        let way = set.iter().position(|cell| cell.finish <= level)?;
        set[way].flow = flow;
        Some((at, way))
    }

    fn at(&mut self, place: Place) -> &mut Phantom {
        match place {
            Some((set, way)) => &mut self.sets[set][way],
            None => &mut self.others,
        }
    }

    /// The level at `now`, as if no flow became busy, or idle, since the last turn.
    fn level_at(&self, now: u64) -> u64 {
        let since = now.saturating_sub(self.turned).min(self.config.turn().0);
        self.level + since / u64::from(self.busy)
    }

    /// Takes the steps that are due.
    fn look(&mut self, now: u64, deficit: u64) {
        let turn = self.config.turn().0;
        let (each, since) = (turn / STEPS, now.saturating_sub(self.stepped));
        let changed = self.cost != self.config.cost;
        if since < each && !changed {
            return;
        }
        let anew = changed || since >= turn;
        if anew {
            self.step = 0;
        }
        let due = if anew { STEPS } else { (since / each).min(STEPS - self.step) };
        self.stepped = if anew { now } else { self.stepped + due * each };
        if self.step == 0 {
            self.sum = Sum::default();
        }
        let cost = self.config.cost;
        self.cost = cost;
        let level = self.level_at(now);
        self.sum.deficit += due * deficit;
        let cells = self.sets.as_flattened_mut().iter_mut();
        let from = self.step as usize * STEP_CELLS;
        for cell in cells.skip(from).take(due as usize * STEP_CELLS) {
            self.sum.add(level, cost, cell);
        }
        self.step += due;
        if self.step == STEPS {
            self.step = 0;
            self.sum.add(level, cost, &mut self.others);
            self.turn(now, level, deficit);
        }
    }

    /// Computes the level at which the phantom queues hold the deficit: a step of Newton's method.
    fn turn(&mut self, now: u64, level: u64, deficit: u64) {
        let Sum { ahead, busy, latest, deficit: lacks } = self.sum;
        let lacks = lacks / STEPS;
        self.busy = busy.max(1);
        self.turned = now;
        self.level = if deficit == 0 {
            level.max(latest)
        } else if ahead > lacks {
            level + (ahead - lacks) / u64::from(self.busy)
        } else {
            // It rose too much since the last turn: more flows had become busy.
            level.saturating_sub((lacks - ahead) / u64::from(self.busy)).max(self.level)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TokenBucket, fleet::flows::flow_hash, units::Bytes};
    use std::{format, vec, vec::Vec};

    const RATE_BIT_S: u64 = 100_000_000;
    const BYTES: u32 = 1_000;

    /// Flows that each send evenly so much of the rate; what of the rate each got after the first half.
    fn parts(demands: &[f64], burst_bytes: u64) -> Vec<f64> {
        let rate = Rate::from_bit_s(RATE_BIT_S).unwrap();
        let config = BucketConfig::new(rate, Bytes(burst_bytes)).unwrap();
        let mut bucket = TokenBucket::new(config, Nanos(0));
        let mut police = FairPolice::new(FairConfig::new(&config));
        let packet_ns = rate.time_for(Bytes(BYTES.into())).0 as f64;
        let end_ns = 8e8;
        // Evenly out of step.
        let start = |(i, want): (usize, &f64)| (i as f64 * 0.618).fract() * packet_ns / want;
        let mut next: Vec<f64> = demands.iter().enumerate().map(start).collect();
        let mut passed = vec![0u32; demands.len()];
        loop {
            let (flow, at) =
                next.iter().copied().enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
            if at > end_ns {
                break;
            }
            next[flow] += packet_ns / demands[flow];
            let now = Nanos(at as u64);
            let fit = police.fit(now, bucket.full_at(now), flow_hash(3, &[flow as u64]), BYTES);
            if fit.fits && bucket.on_part(now, BYTES) {
                police.charge(fit);
                passed[flow] += u32::from(at > end_ns / 2.0);
            }
        }
        let whole = end_ns / 2.0 / packet_ns;
        passed.iter().map(|packets| f64::from(*packets) / whole).collect()
    }

    fn are(got: &[f64], expected: &[f64]) {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 0.012;
        assert!(got.iter().zip(expected).all(near), "{got:?}, not {expected:?}");
    }

    #[test]
    fn parts_are_max_min() {
        for burst_bytes in [15_000, 60_000, 250_000] {
            are(&parts(&[0.7], burst_bytes), &[0.7]);
            are(&parts(&[1.9], burst_bytes), &[1.0]);
            are(&parts(&[0.3, 5.0], burst_bytes), &[0.3, 0.7]);
            are(&parts(&[1.0, 2.0, 8.0], burst_bytes), &[1.0 / 3.0; 3]);
            are(&parts(&[0.05, 0.11, 1.0, 2.0], burst_bytes), &[0.05, 0.11, 0.42, 0.42]);
            are(&parts(&[0.2, 0.3, 0.4], burst_bytes), &[0.2, 0.3, 0.4]);
        }
    }

    #[test]
    fn many_small_flows_lose_nothing_to_a_large_one() {
        let demands = [vec![2.0], vec![0.005; 100]].concat();
        let got = parts(&demands, 250_000);
        are(&got[..1], &[0.5]);
        assert!(got[1..].iter().all(|part| *part > 0.0048), "{got:?}");
    }

    /// The rate changes, the first steps of a turn are taken, and then none for so long that the next turn
    /// begins anew: the phantom queues of two flows, which hold the same bytes in the first cell and the
    /// last, still do.
    #[test]
    fn phantom_queues_follow_a_rate_once() {
        let config = |bit_s| {
            let rate = Rate::from_bit_s(bit_s).unwrap();
            FairConfig::new(&BucketConfig::new(rate, Bytes(250_000)).unwrap())
        };
        for (from, to) in [(80_000_000, 8_000_000), (8_000_000, 80_000_000)] {
            let mut police = FairPolice::new(config(from));
            let flows = [1, 127 << SET_SHIFT | 1];
            let ns = |bytes: u64, bit_s: u64| bytes * 8_000_000_000 / bit_s;
            let mut now = 1_000_000_000;
            for packet in 0..20u64 {
                for flow in flows {
                    let lacks = ns(packet * 2 * u64::from(BYTES), from);
                    let fit = police.fit(Nanos(now), Nanos(now + lacks), flow, BYTES);
                    police.charge(fit);
                }
            }
            police.set_config(config(to));
            let (step, full) = (police.config.turn().0 / STEPS, now + ns(40_000, to));
            for gap in [step, step, 16 * step, step, 16 * step] {
                now += gap;
                let _ = police.fit(Nanos(now), Nanos(full), 77 << SET_SHIFT | 1, 0);
            }
            let level = police.level_at(now);
            let ahead = flows.map(|flow| {
                let place = police.place(level, flow);
                police.at(place).finish.saturating_sub(level)
            });
            let all = full - now;
            let what = format!("{from} to {to}: {ahead:?} of {all}");
            assert!(ahead[0].abs_diff(ahead[1]) <= all / 50, "{what}");
            assert!((ahead[0] + ahead[1]).abs_diff(all) <= all / 10, "{what}");
        }
    }

    #[test]
    fn more_flows_than_cells_use_the_whole_rate() {
        let got = parts(&vec![0.003; 800], 250_000);
        assert!((got.iter().sum::<f64>() - 1.0).abs() < 0.01, "{}", got.iter().sum::<f64>());
    }
}
