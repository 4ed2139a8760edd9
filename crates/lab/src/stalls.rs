//! Notices when the machine stands still, or one of its CPUs, so that the lab does not report it as latency.
//!
//! A virtual machine that shares its processors stops now and then: all of its CPUs at once, or one of
//! them, for milliseconds. A probe that is on its way then comes late whatever limit it passes. The watch
//! has one real-time thread on each CPU, above the probes' priority, that sleeps for `PERIOD` at a time. A
//! wake-up that comes late is a gap of that CPU. No program, limit or queue of the machine can cause two
//! kinds of gaps:
//!
//! - The times that are gaps of every CPU, for `LATE` or more, are stalls. Interrupts and other threads hold
//!   up one CPU at a time, and not for so long.
//! - A gap of one CPU is stolen if at least half of it is, by the kernel's own clock (`steal_clock`), and
//!   `STOLEN_LATE` or more.
//!
//! The probe client leaves out the probes that overlap either, for every system alike. The report says for
//! how long that was.

mod steal_clock;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::{
    thread::{CpuSet, clock_nanosleep_absolute, sched_getaffinity, sched_setaffinity},
    time::{ClockId, Timespec, clock_gettime},
};
use serde::{Deserialize, Serialize};
use tidegate_sys::sched::make_realtime_above;

use self::steal_clock::StealClock;

/// How long each thread of the watch sleeps.
const PERIOD: Duration = Duration::from_millis(1);
/// A wake-up that comes late by this much is a gap.
const LATE: Duration = Duration::from_millis(3);
/// A wake-up that comes late by this much is a gap if at least half of it was stolen.
const STOLEN_LATE: Duration = Duration::from_millis(1);
/// The stolen time is read at late wake-ups, and once in so many periods: a gap is not charged for what was
/// stolen long before.
const STEAL_PERIODS: u32 = 8;
/// A watch that sees more gaps than this on one CPU keeps the first ones.
const GAPS_MAX: usize = 100_000;
const NS_PER_S: u64 = 1_000_000_000;

/// A time during which a CPU, or all of them, ran nothing, on the monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// The first moment at which it may have stood still, in nanoseconds.
    pub start_ns: u64,
    /// The moment from which it ran again, in nanoseconds.
    pub end_ns: u64,
}

/// The times that a watch saw, each kind in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// The times in which all CPUs stood still at once.
    pub stalls: Vec<Stall>,
    /// The times in which any CPU was stolen.
    pub stolen: Vec<Stall>,
}

impl Seen {
    /// The times of either kind.
    pub fn either(&self) -> Vec<Stall> {
        merged([&self.stalls[..], &self.stolen].concat())
    }
}

/// The stalls of an experiment, as its report has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stalls {
    /// How often all CPUs stood still at once.
    pub count: u64,
    /// How long in all, in milliseconds.
    pub total_ms: f64,
    /// The longest, in milliseconds.
    pub longest_ms: f64,
    /// How long any CPU was stolen, in milliseconds; also while all of them stood still.
    #[serde(default)]
    pub stolen_ms: f64,
}

impl Stalls {
    /// The sum of what a watch has seen.
    pub fn of(seen: &Seen) -> Stalls {
        let ms = |stall: &Stall| (stall.end_ns - stall.start_ns) as f64 / 1e6;
        // A sum of nothing is -0.
        let sum = |stalls: &[Stall]| stalls.iter().map(ms).sum::<f64>() + 0.0;
        Stalls {
            count: seen.stalls.len() as u64,
            total_ms: sum(&seen.stalls),
            longest_ms: seen.stalls.iter().map(ms).fold(0.0, f64::max),
            stolen_ms: sum(&seen.stolen),
        }
    }
}

/// A late wake-up of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Gap {
    time: Stall,
    is_stolen: bool,
}

/// Threads that notice stalls until they are stopped.
#[derive(Debug)]
pub struct StallWatch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<io::Result<Vec<Gap>>>>,
}

impl StallWatch {
    /// Starts a thread on every CPU that this thread may use.
    ///
    /// # Errors
    ///
    /// Those of making threads and of asking for the CPUs.
    pub fn start() -> io::Result<StallWatch> {
        let cpus = sched_getaffinity(None)?;
        let sees_steal = steal_clock::counts_steal_alone();
        let mut watch = StallWatch { stop: Arc::default(), threads: Vec::new() };
        for cpu in (0..CpuSet::MAX_CPU).filter(|&cpu| cpus.is_set(cpu)) {
            let stop = Arc::clone(&watch.stop);
            let builder = thread::Builder::new().name(format!("stalls {cpu}"));
            watch.threads.push(builder.spawn(move || gaps_of(cpu, sees_steal, &stop))?);
        }
        Ok(watch)
    }

    /// Ends the threads and returns what they saw; none if they could not watch, because this process may not
    /// use the real-time class or a CPU was taken from it.
    pub fn stop(mut self) -> Option<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        let mut gaps = Vec::new();
        for thread in self.threads.drain(..) {
            gaps.push(thread.join().ok()?.ok()?);
        }
        let stolen = gaps.iter().flatten().filter(|gap| gap.is_stolen).map(|gap| gap.time);
        let stolen = merged(stolen.collect());
        let long = |gaps: Vec<Gap>| gaps.into_iter().map(|gap| gap.time).filter(is_long).collect();
        Some(Seen { stalls: together(gaps.into_iter().map(long).collect()), stolen })
    }
}

impl Drop for StallWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Watches one CPU until told to stop.
fn gaps_of(cpu: usize, sees_steal: bool, stop: &AtomicBool) -> io::Result<Vec<Gap>> {
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(None, &only)?;
    make_realtime_above()?;
    let mut steal = if sees_steal { StealClock::of_this_thread() } else { None };
    let mut gaps = Vec::new();
    let mut due_ns = monotonic_ns();
    let mut periods = 0;
    while !stop.load(Ordering::Relaxed) {
        due_ns += PERIOD.as_nanos() as u64;
        let due =
            Timespec { tv_sec: (due_ns / NS_PER_S) as i64, tv_nsec: (due_ns % NS_PER_S) as _ };
        while clock_nanosleep_absolute(ClockId::Monotonic, &due).is_err() {}
        let woke_ns = monotonic_ns();
        let is_late = woke_ns.saturating_sub(due_ns) >= STOLEN_LATE.as_nanos() as u64;
        periods = if is_late { STEAL_PERIODS } else { periods + 1 };
        let mut stolen_ns = 0;
        if periods >= STEAL_PERIODS {
            stolen_ns = steal.as_mut().map_or(0, StealClock::stolen_ns);
            periods = 0;
        }
        if let Some(gap) = gap(due_ns, woke_ns, stolen_ns) {
            if gaps.len() < GAPS_MAX {
                gaps.push(gap);
            }
            // The wake-ups that were missed are not made up for.
            due_ns = woke_ns;
        }
    }
    Ok(gaps)
}

/// The gap that a wake-up shows. The CPU ran at the wake-up before, one period earlier than this was due.
fn gap(due_ns: u64, woke_ns: u64, stolen_ns: u64) -> Option<Gap> {
    let late_ns = woke_ns.saturating_sub(due_ns);
    let start_ns = due_ns.saturating_sub(PERIOD.as_nanos() as u64);
    let time = Stall { start_ns, end_ns: woke_ns };
    let is_stolen = late_ns >= STOLEN_LATE.as_nanos() as u64 && stolen_ns >= late_ns / 2;
    (is_stolen || late_ns >= LATE.as_nanos() as u64).then_some(Gap { time, is_stolen })
}

/// Whether a gap is late enough to be a part of a stall.
fn is_long(gap: &Stall) -> bool {
    gap.end_ns - gap.start_ns >= (PERIOD + LATE).as_nanos() as u64
}

/// Times in order, those that meet as one.
fn merged(mut times: Vec<Stall>) -> Vec<Stall> {
    times.sort_by_key(|time| time.start_ns);
    times.dedup_by(|next, time| {
        let meets = next.start_ns <= time.end_ns;
        if meets {
            time.end_ns = time.end_ns.max(next.end_ns);
        }
        meets
    });
    times
}

/// The times that are gaps of every CPU. Each CPU's gaps are in order and apart from each other.
fn together(gaps: Vec<Vec<Stall>>) -> Vec<Stall> {
    let both = |a: Vec<Stall>, b: Vec<Stall>| {
        let (mut at_a, mut at_b, mut stalls) = (0, 0, Vec::new());
        while let (Some(a), Some(b)) = (a.get(at_a), b.get(at_b)) {
            let (start_ns, end_ns) = (a.start_ns.max(b.start_ns), a.end_ns.min(b.end_ns));
            if start_ns + (LATE.as_nanos() as u64) <= end_ns {
                stalls.push(Stall { start_ns, end_ns });
            }
            if a.end_ns <= b.end_ns { at_a += 1 } else { at_b += 1 }
        }
        stalls
    };
    gaps.into_iter().reduce(both).unwrap_or_default()
}

/// Whether a time overlaps a stall. A stall counts one period longer, in which what it held up is worked off.
pub fn overlaps(stalls: &[Stall], start_ns: u64, end_ns: u64) -> bool {
    let after_ns = PERIOD.as_nanos() as u64;
    let first = stalls.partition_point(|stall| stall.end_ns + after_ns < start_ns);
    stalls.get(first).is_some_and(|stall| stall.start_ns <= end_ns)
}

/// How much of a time, in nanoseconds, the machine stood still. O(log stalls) where few overlap it.
pub fn within_ns(stalls: &[Stall], start_ns: u64, end_ns: u64) -> u64 {
    let first = stalls.partition_point(|stall| stall.end_ns < start_ns);
    let overlapping = stalls[first..].iter().take_while(|stall| stall.start_ns < end_ns);
    overlapping
        .map(|stall| stall.end_ns.min(end_ns).saturating_sub(stall.start_ns.max(start_ns)))
        .sum()
}

/// Now, on the clock of the stalls.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * NS_PER_S + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn stall(start_ms: u64, end_ms: u64) -> Stall {
        Stall { start_ns: start_ms * MS, end_ns: end_ms * MS }
    }

    #[test]
    fn no_stalls_are_zero() {
        assert_eq!(
            serde_json::to_string(&Stalls::of(&Seen::default())).unwrap(),
            r#"{"count":0,"total_ms":0.0,"longest_ms":0.0,"stolen_ms":0.0}"#
        );
    }

    #[test]
    fn a_late_wake_up_is_a_gap() {
        let time = |due_ns, woke_ns| gap(due_ns, woke_ns, 0).map(|gap| gap.time);
        assert_eq!(time(10 * MS, 10 * MS), None);
        assert_eq!(time(10 * MS, 13 * MS - 1), None);
        assert_eq!(time(10 * MS, 13 * MS), Some(stall(9, 13)));
        assert!(is_long(&stall(9, 13)) && !is_long(&stall(9, 12)));
        // The clock of a thread that is early by rounding.
        assert_eq!(time(10 * MS, 10 * MS - 1), None);
    }

    #[test]
    fn a_short_gap_counts_if_half_of_it_was_stolen() {
        let is_stolen = |late_ns, stolen_ns| {
            gap(10 * MS, 10 * MS + late_ns, stolen_ns).map(|gap| gap.is_stolen)
        };
        assert_eq!(is_stolen(MS - 1, MS), None);
        assert_eq!(is_stolen(MS, MS / 2 - 1), None);
        assert_eq!(is_stolen(MS, MS / 2), Some(true));
        assert_eq!(is_stolen(3 * MS, MS), Some(false));
        assert_eq!(is_stolen(3 * MS, 2 * MS), Some(true));
    }

    #[test]
    fn times_that_meet_are_one() {
        let times = vec![stall(30, 40), stall(1, 5), stall(35, 37), stall(5, 9), stall(40, 50)];
        assert_eq!(merged(times), [stall(1, 9), stall(30, 50)]);
        assert_eq!(merged(vec![]), []);
        let seen = Seen { stalls: vec![stall(10, 20)], stolen: vec![stall(3, 5), stall(12, 22)] };
        assert_eq!(seen.either(), [stall(3, 5), stall(10, 22)]);
    }

    #[test]
    fn only_what_stops_every_cpu_is_a_stall() {
        let one = vec![stall(10, 30), stall(50, 60), stall(80, 90)];
        let other = vec![stall(12, 20), stall(25, 35), stall(55, 57), stall(85, 99)];
        // 55 to 57 is shorter than a gap, 25 to 30 and 85 to 90 are what both have.
        let expected = vec![stall(12, 20), stall(25, 30), stall(85, 90)];
        assert_eq!(together(vec![one.clone(), other.clone()]), expected);
        assert_eq!(together(vec![other, one]), expected);
        assert_eq!(together(vec![vec![stall(1, 9)], vec![]]), []);
        assert_eq!(together(vec![vec![stall(1, 9)]]), [stall(1, 9)]);
        assert_eq!(together(vec![]), []);
    }

    #[test]
    fn a_time_overlaps_a_stall_or_not() {
        let stalls = [stall(10, 20), stall(40, 50)];
        for (start_ms, end_ms, expected) in [
            (0, 9, false),
            (0, 10, true),
            (12, 13, true),
            (21, 22, true),
            (22, 39, false),
            (22, 40, true),
            (0, 100, true),
            (52, 60, false),
        ] {
            let seen = overlaps(&stalls, start_ms * MS, end_ms * MS);
            assert_eq!(seen, expected, "{start_ms} to {end_ms} ms");
        }
        assert!(!overlaps(&[], 0, u64::MAX));
    }

    #[test]
    fn stalls_add_up() {
        let stalls = vec![stall(10, 20), stall(40, 45)];
        let sum = Stalls::of(&Seen { stalls, stolen: vec![stall(10, 21)] });
        let expected = Stalls { count: 2, total_ms: 15.0, longest_ms: 10.0, stolen_ms: 11.0 };
        assert_eq!(sum, expected);
        assert_eq!(Stalls::of(&Seen::default()), Stalls::default());
    }

    #[test]
    fn a_watch_ends_and_what_it_saw_is_in_order() {
        let watch = StallWatch::start().unwrap();
        // Without the right to the real-time class it says that it saw nothing, which is none of zero stalls.
        let Some(seen) = watch.stop() else { return };
        for times in [&seen.stalls, &seen.stolen] {
            assert!(times.windows(2).all(|pair| pair[0].end_ns <= pair[1].start_ns), "{times:?}");
        }
    }
}
