//! What is done to a queue: stamps, uniform or in runs, and the steady state in which they are measured.
//!
//! The steady state is the "hold" of the literature on calendar queues and what Carousel's own benchmark
//! measures: a step takes the soonest element out, sets the clock to its time, and puts it back with a new
//! time ahead, so as many stand in the queue after it as before.

use std::hint::black_box;
use std::time::Duration;

use clap::ValueEnum;
use rustix::time::{ClockId, clock_gettime};

use super::queues::TimeQueue;

/// How far ahead elements are stamped at most: the horizon of the wheels is 2.1 s.
const AHEAD_NS: u64 = 2_000_000_000;
/// As many elements in a row get one stamp when they come in bursts.
const BURST: u32 = 16;

/// Which stamps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stamping {
    /// Each its own, uniform over two seconds ahead.
    Uniform,
    /// Sixteen in a row the same, the runs uniform over two seconds ahead.
    Bursts,
}

impl Stamping {
    /// As reports call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Stamping::Uniform => "uniform",
            Stamping::Bursts => "bursts",
        }
    }
}

/// Stamps, the same for every queue.
pub(super) struct Stamps {
    random: u64,
    run: u32,
    left: u32,
    at_ns: u64,
}

impl Stamps {
    pub(super) fn new(stamping: Stamping) -> Self {
        let run = match stamping {
            Stamping::Uniform => 1,
            Stamping::Bursts => BURST,
        };
        Self { random: 0x5851_F42D_4C95_7F2D, run, left: 0, at_ns: 0 }
    }

    /// The next stamp: not in the past, and within [`AHEAD_NS`].
    #[inline]
    fn next(&mut self, now_ns: u64) -> u64 {
        if self.left == 0 {
            self.left = self.run;
            // Knuth's MMIX generator; its upper half is good enough here.
            self.random =
                self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            self.at_ns = now_ns + (((self.random >> 32) * AHEAD_NS) >> 32);
        }
        self.left -= 1;
        self.at_ns.max(now_ns)
    }
}

/// How much processor time of this thread something takes: what others on the machine use is not in it.
pub(super) fn timed<R>(work: impl FnOnce() -> R) -> (Duration, R) {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let start = now();
    let result = work();
    (now() - start, result)
}

/// A queue under load, whichever it is. The loops are compiled for each queue.
pub(super) trait Load {
    /// Puts elements 0 to `elements` in.
    fn fill(&mut self, stamps: &mut Stamps, elements: u32);

    /// Takes the soonest out and puts it in again, `steps` times.
    fn hold(&mut self, stamps: &mut Stamps, steps: u64);

    /// Takes all out; how many there were.
    fn empty(&mut self) -> u32;
}

impl<Q: TimeQueue> Load for Q {
    #[inline(never)]
    fn fill(&mut self, stamps: &mut Stamps, elements: u32) {
        for item in 0..elements {
            self.push(stamps.next(0), item);
        }
    }

    #[inline(never)]
    fn hold(&mut self, stamps: &mut Stamps, steps: u64) {
        for _ in 0..steps {
            let Some((now_ns, item)) = self.pop() else { break };
            self.push(stamps.next(now_ns), black_box(item));
        }
    }

    #[inline(never)]
    fn empty(&mut self) -> u32 {
        let mut count = 0;
        while let Some((_, item)) = self.pop() {
            black_box(item);
            count += 1;
        }
        count
    }
}
