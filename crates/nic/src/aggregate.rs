//! One rate for flows that are spread over several shapers, with no lock between them.
//!
//! Carousel runs a shaper on each core. An aggregate that has flows on several of them is divided: each
//! shaper writes what it sent in a cache line of its own ([`Share::publish`]), a job that runs ten times a
//! second reads these lines, fills the aggregate's rate into the demands ([`water_fill`]) and writes each
//! shaper's part beside them ([`Aggregate::tick`]), and the shaper takes its part up when it next looks
//! ([`Share::take_change`]). A shaper that sends nothing keeps a reserve, so that a flow that starts there is
//! not mute until the next round.
//!
//! ```text
//! shaper i:   publish: line[i] = (bytes sent, time, backlogged)     part = line[i].part
//! every 100 ms: demand[i] = bytes / time, or all that there is      line[i].part = water_fill(rate,
//! demand)[i]
//! ```
//!
//! The parts never add up to more than the whole: those that shrink are written before those that grow. A
//! shaper uses its old part until it looks, which is once a loop.
//!
//! No I/O, and no clock: the caller says what time it is, and which thread does it. O(1) a publication,
//! O(n^2) a round for n shapers, at most [`MAX_MEMBERS`].

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};

use tidegate_core::{
    Nanos, Rate,
    units::NANOS_PER_SEC,
    water_fill::{Demand, MAX_MEMBERS, water_fill},
};

/// Time between two rounds: about that of Carousel.
pub const ROUND: Nanos = Nanos(100_000_000);
/// The least rate of an aggregate, in bit/s: with less, a reserve would be nothing.
pub const AGGREGATE_BIT_S_MIN: u64 = 1_000;
/// How often a round reads a line that its shaper writes at the same time, before it takes the demand for
/// unchanged.
const READS_MAX: usize = 8;
/// What stands for a part of nothing, which no aggregate has.
const LEAST: Rate = match Rate::from_bit_s(1) {
    Some(rate) => rate,
    None => unreachable!(),
};

/// Why an aggregate cannot be had. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AggregateError {
    /// None, or too many.
    #[error("an aggregate over {0} shapers: use 1 to {MAX_MEMBERS}")]
    Shapers(usize),
    /// Too little to be divided.
    #[error("an aggregate of {} bit/s: use {AGGREGATE_BIT_S_MIN} bit/s or more", .0.bit_s())]
    Rate(Rate),
}

/// Messages from and to a shaper. A cache line of its own (two, as they are fetched in pairs): shapers do
/// not slow each other.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line {
    /// Odd while the shaper writes.
    version: AtomicU64,
    sent_bytes: AtomicU64,
    time: AtomicU64,
    backlogged: AtomicBool,
    /// In bit/s; written by the rounds only.
    part: AtomicU64,
}

/// What a shaper published, of one moment.
#[derive(Debug, Default, Clone, Copy)]
struct Published {
    sent_bytes: u64,
    time: Nanos,
    backlogged: bool,
}

/// The whole: held by who does the rounds. See the [module](self).
#[derive(Debug)]
pub struct Aggregate {
    rate: Rate,
    lines: Arc<[Line]>,
    before: Vec<Published>,
    demands: Vec<Demand>,
    parts: Vec<u64>,
    /// The last round; none before the first.
    last: Option<Nanos>,
}

/// A shaper's side of an [`Aggregate`].
#[derive(Debug)]
pub struct Share {
    lines: Arc<[Line]>,
    index: usize,
    /// The part that was taken up last, in bit/s.
    taken: u64,
}

impl Aggregate {
    /// An aggregate over `shapers` shapers, and the share of each, in order. All have equal parts until
    /// the second round, which is the first to know what they want.
    ///
    /// # Errors
    /// If there are too many shapers or too little rate.
    pub fn new(rate: Rate, shapers: usize) -> Result<(Self, Vec<Share>), AggregateError> {
        if shapers == 0 || shapers > MAX_MEMBERS {
            return Err(AggregateError::Shapers(shapers));
        }
        check(rate)?;
        let lines: Arc<[Line]> = (0..shapers).map(|_| Line::default()).collect();
        let mut whole = Self {
            rate,
            lines: Arc::clone(&lines),
            before: vec![Published::default(); shapers],
            demands: vec![Demand::Greedy; shapers],
            parts: vec![0; shapers],
            last: None,
        };
        whole.divide();
        let share = |index| Share { lines: Arc::clone(&lines), index, taken: 0 };
        Ok((whole, (0..shapers).map(share).collect()))
    }

    /// The whole.
    #[must_use]
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Changes the whole. The shapers' parts follow at once, by what they wanted last.
    ///
    /// # Errors
    /// If it is too little.
    pub fn set_rate(&mut self, rate: Rate) -> Result<(), AggregateError> {
        check(rate)?;
        self.rate = rate;
        self.divide();
        Ok(())
    }

    /// When the next round is due.
    #[must_use]
    pub fn next_deadline(&self) -> Nanos {
        self.last.map_or(Nanos(0), |last| Nanos(last.0.saturating_add(ROUND.0)))
    }

    /// Does a round if one is due; says whether it did. A clock that stepped back starts the time anew.
    pub fn tick(&mut self, now: Nanos) -> bool {
        let stepped_back = self.last.is_some_and(|last| now < last);
        if now < self.next_deadline() && !stepped_back {
            return false;
        }
        let last = self.last.replace(now);
        for (index, line) in self.lines.iter().enumerate() {
            let Some(published) = line.read() else { continue };
            let before = std::mem::replace(&mut self.before[index], published);
            let Some(last) = last.filter(|_| !stepped_back) else { continue };
            // With packets and without a look since the last round, its thread did not run: what it wants
            // is not known.
            if published.backlogged && published.time <= last {
                continue;
            }
            let bytes = published.sent_bytes.wrapping_sub(before.sent_bytes);
            let used =
                u128::from(bytes) * 8 * u128::from(NANOS_PER_SEC) / u128::from(now.0 - last.0);
            let used = u64::try_from(used).unwrap_or(u64::MAX);
            self.demands[index] = Demand::measured(used, self.parts[index], published.backlogged);
        }
        self.divide();
        true
    }

    /// What each shaper may send, in bit/s; together at most the whole.
    #[must_use]
    pub fn parts(&self) -> &[u64] {
        &self.parts
    }

    fn divide(&mut self) {
        let mut parts = vec![0; self.parts.len()];
        water_fill(self.rate, &self.demands, &mut parts);
        let write = |grows: bool| {
            for ((line, new), old) in self.lines.iter().zip(&parts).zip(&self.parts) {
                if (new > old) == grows {
                    line.part.store(*new, Ordering::Release);
                }
            }
        };
        write(false);
        write(true);
        self.parts = parts;
    }
}

impl Share {
    /// Tells what the shaper has sent for the aggregate in all, now, and whether more waits than it may
    /// send. Once a loop is right.
    pub fn publish(&mut self, now: Nanos, sent_bytes: u64, backlogged: bool) {
        self.line().write(Published { sent_bytes, time: now, backlogged });
    }

    /// The part that the shaper may send.
    #[must_use]
    pub fn part(&self) -> Rate {
        let part = self.line().part.load(Ordering::Acquire);
        // Every part is at least a hundredth, or an equal part, of the least whole.
        Rate::from_bit_s(part).unwrap_or(LEAST)
    }

    /// The part, if it is another than the last time; at first always.
    #[inline]
    pub fn take_change(&mut self) -> Option<Rate> {
        let part = self.line().part.load(Ordering::Acquire);
        if part == self.taken {
            return None;
        }
        self.taken = part;
        Rate::from_bit_s(part)
    }

    #[inline]
    fn line(&self) -> &Line {
        &self.lines[self.index]
    }
}

impl Line {
    /// By the shaper only.
    #[inline]
    fn write(&self, published: Published) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        // Whoever sees one of the values below also sees that the version was odd.
        fence(Ordering::Release);
        self.sent_bytes.store(published.sent_bytes, Ordering::Relaxed);
        self.time.store(published.time.0, Ordering::Relaxed);
        self.backlogged.store(published.backlogged, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// None if the shaper was writing each time.
    fn read(&self) -> Option<Published> {
        for _ in 0..READS_MAX {
            let version = self.version.load(Ordering::Acquire);
            let published = Published {
                sent_bytes: self.sent_bytes.load(Ordering::Relaxed),
                time: Nanos(self.time.load(Ordering::Relaxed)),
                backlogged: self.backlogged.load(Ordering::Relaxed),
            };
            fence(Ordering::Acquire);
            let unchanged = self.version.load(Ordering::Relaxed) == version;
            if unchanged && version.is_multiple_of(2) {
                return Some(published);
            }
        }
        None
    }
}

fn check(rate: Rate) -> Result<(), AggregateError> {
    if rate.bit_s() < AGGREGATE_BIT_S_MIN {
        return Err(AggregateError::Rate(rate));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;
    use tidegate_core::water_fill::HEADROOM_PERCENT;

    use super::*;

    const GBIT: u64 = 1_000_000_000;

    fn rate(bit_s: u64) -> Rate {
        Rate::from_bit_s(bit_s).unwrap()
    }

    /// Shapers that want so much each, send what they may, and tell so every millisecond.
    struct World {
        whole: Aggregate,
        shares: Vec<Share>,
        sent_bytes: Vec<u64>,
        now: Nanos,
    }

    impl World {
        fn new(bit_s: u64, shapers: usize) -> Self {
            let (whole, shares) = Aggregate::new(rate(bit_s), shapers).unwrap();
            Self { whole, shares, sent_bytes: vec![0; shapers], now: Nanos(GBIT) }
        }

        fn round(&mut self, wanted_bit_s: &[u64]) {
            for _ in 0..ROUND.0 / 1_000_000 {
                self.now.0 += 1_000_000;
                for (index, share) in self.shares.iter_mut().enumerate() {
                    let part = share.part().bit_s();
                    let sent = wanted_bit_s[index].min(part);
                    self.sent_bytes[index] += sent / 8_000;
                    share.publish(self.now, self.sent_bytes[index], wanted_bit_s[index] > part);
                }
            }
            assert!(self.whole.tick(self.now));
            let parts: u64 = self.shares.iter().map(|share| share.part().bit_s()).sum();
            assert!(parts <= self.whole.rate().bit_s());
        }
    }

    #[test]
    fn sizes_are_checked() {
        for shapers in [0, MAX_MEMBERS + 1] {
            let error = Aggregate::new(rate(GBIT), shapers).unwrap_err();
            assert_eq!(error, AggregateError::Shapers(shapers));
        }
        let least = rate(AGGREGATE_BIT_S_MIN);
        let (mut whole, shares) = Aggregate::new(least, MAX_MEMBERS).unwrap();
        assert!(shares.iter().all(|share| share.part().bit_s() > 0));
        let less = rate(AGGREGATE_BIT_S_MIN - 1);
        assert_eq!(whole.set_rate(less), Err(AggregateError::Rate(less)));
        assert_eq!(whole.rate(), least);
    }

    /// At a rate where a packet takes longer than a round, so that in many rounds nobody sends.
    #[test]
    fn who_waits_for_its_packet_is_not_idle() {
        const PACKET: u64 = 1500;
        let (mut whole, mut shares) = Aggregate::new(rate(200_000), 2).unwrap();
        let (mut sent, mut credit, mut now) = ([0; 2], [0, PACKET * 4], Nanos(GBIT));
        for _ in 0..2000 {
            now.0 += ROUND.0;
            for (i, share) in shares.iter_mut().enumerate() {
                credit[i] += share.part().bit_s() * ROUND.0 / GBIT;
                if credit[i] >= PACKET * 8 {
                    (credit[i], sent[i]) = (credit[i] - PACKET * 8, sent[i] + PACKET);
                }
                share.publish(now, sent[i], true);
            }
            whole.tick(now);
        }
        assert!(sent[0].abs_diff(sent[1]) <= PACKET, "{sent:?}");
    }

    #[test]
    fn demand_that_moves_finds_the_rate_in_two_rounds() {
        let mut world = World::new(GBIT, 4);
        for _ in 0..3 {
            world.round(&[10 * GBIT, 0, 0, GBIT / 10]);
        }
        let parts = world.whole.parts();
        assert!(parts[0] > 870_000_000, "{parts:?}");
        assert!(parts[1] >= GBIT / 100, "the reserve: {parts:?}");
        for _ in 0..2 {
            world.round(&[0, 0, 10 * GBIT, GBIT / 10]);
        }
        let parts = world.whole.parts();
        assert!(parts[2] > 870_000_000, "{parts:?}");
        assert!(parts[3] >= GBIT / 10 - 1_000, "{parts:?}");
    }

    #[test]
    fn a_new_rate_is_everybody_s_at_once() {
        let mut world = World::new(GBIT, 2);
        world.round(&[GBIT, GBIT]);
        assert!(world.shares.iter_mut().all(|share| share.take_change().is_some()));
        assert!(world.shares.iter_mut().all(|share| share.take_change().is_none()));
        world.whole.set_rate(rate(GBIT / 10)).unwrap();
        let parts: Vec<_> = world.shares.iter_mut().map(Share::take_change).collect();
        assert_eq!(parts, [Some(rate(GBIT / 20)); 2]);
    }

    #[test]
    fn a_shaper_that_does_not_run_keeps_what_it_wanted() {
        let mut world = World::new(GBIT, 2);
        (0..3).for_each(|_| world.round(&[10 * GBIT, 10 * GBIT]));
        let before = world.whole.parts().to_vec();
        // Only the first tells anything.
        for _ in 0..3 {
            world.now.0 += ROUND.0;
            world.sent_bytes[0] += before[0] / 80;
            world.shares[0].publish(world.now, world.sent_bytes[0], true);
            assert!(world.whole.tick(world.now));
        }
        assert_eq!(world.whole.parts(), before);
    }

    #[test]
    fn rounds_are_a_tenth_of_a_second_apart_on_any_clock() {
        let (mut whole, _shares) = Aggregate::new(rate(GBIT), 2).unwrap();
        assert!(whole.tick(Nanos(5 * GBIT)));
        assert!(!whole.tick(Nanos(5 * GBIT + ROUND.0 - 1)));
        assert_eq!(whole.next_deadline(), Nanos(5 * GBIT + ROUND.0));
        assert!(whole.tick(Nanos(GBIT)), "the clock stepped back");
        assert!(whole.tick(Nanos(GBIT + ROUND.0)));
    }

    /// A reader sees no mix of two publications, and never more parts than the whole.
    #[test]
    fn threads_need_no_lock() {
        const PUBLICATIONS: u64 = 200_000;
        let (mut whole, shares) = Aggregate::new(rate(GBIT), 2).unwrap();
        let lines = Arc::clone(&whole.lines);
        thread::scope(|scope| {
            let writers: Vec<_> = shares
                .into_iter()
                .map(|mut share| {
                    scope.spawn(move || {
                        for n in 0..PUBLICATIONS {
                            share.publish(Nanos(n), n * 3, n % 2 == 1);
                            assert!(share.part().bit_s() < GBIT);
                        }
                    })
                })
                .collect();
            let mut now = Nanos(0);
            while !writers.iter().all(thread::ScopedJoinHandle::is_finished) {
                for line in &*lines {
                    let Some(seen) = line.read() else { continue };
                    assert_eq!(seen.sent_bytes, seen.time.0 * 3);
                    assert_eq!(seen.backlogged, seen.time.0 % 2 == 1);
                }
                now.0 += ROUND.0;
                whole.tick(now);
                assert!(whole.parts().iter().sum::<u64>() <= GBIT);
            }
        });
    }

    proptest! {
        /// Whatever shapers want and however the rate changes: at every step that a shaper could see, the
        /// parts are within the whole, and after three rounds of the same demands the rate is used.
        #[test]
        fn the_parts_are_the_whole(
            bit_s in 1_000_000u64..100_000_000_000,
            shapers in 1usize..9,
            shifts in prop::collection::vec(
                (prop::collection::vec(0u64..200, 8), prop::option::of(50u64..150)),
                1..6,
            ),
        ) {
            let mut world = World::new(bit_s, shapers);
            for (per_cent, change) in shifts {
                if let Some(change) = change {
                    world.whole.set_rate(rate(bit_s / 100 * change)).unwrap();
                    let parts: u64 = world.shares.iter().map(|share| share.part().bit_s()).sum();
                    prop_assert!(parts <= bit_s / 100 * change);
                }
                let whole = world.whole.rate().bit_s();
                let wanted: Vec<_> =
                    per_cent[..shapers].iter().map(|per_cent| whole / 100 * per_cent).collect();
                // The shift is seen in the first, greed that a small part had limited in the second, and
                // in the third that who used most of a part wanted no more.
                (0..3).for_each(|_| world.round(&wanted));
                let used: u64 =
                    world.whole.parts().iter().zip(&wanted).map(|(part, want)| part.min(want)).sum();
                let could: u64 = wanted.iter().sum::<u64>().min(whole);
                // A reserve may lie idle at each shaper, and the headroom of those that have enough.
                let idle = whole / 100 * (shapers as u64 + HEADROOM_PERCENT);
                prop_assert!(used + idle >= could, "{used} of {could}: {:?}", world.whole.parts());
            }
        }
    }
}
