//! How busy the machine is.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::Context as _;

use super::super::cpu::TICK;
use crate::testbed::wait::pass_time;

/// How long it is looked whether the machine is quiet.
const LOOK: Duration = Duration::from_millis(400);
/// CPUs that may be busy on a quiet machine.
const QUIET_CPUS: f64 = 0.15;

/// How long the CPUs were idle until now, all together.
///
/// Busy is what is not idle: the kernel knows idle time exactly, also if an interrupt comes in between, and
/// samples what it did instead. What a hypervisor took counts as idle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Busy {
    at: Instant,
    idle: Duration,
    cpus: usize,
}

impl Busy {
    pub(super) fn now() -> anyhow::Result<Busy> {
        Busy::read(&fs::read_to_string("/proc/stat")?).context("cannot read /proc/stat")
    }

    fn read(stat: &str) -> Option<Busy> {
        let fields: Vec<u32> = stat
            .lines()
            .next()?
            .strip_prefix("cpu ")?
            .split_ascii_whitespace()
            .map_while(|field| field.parse().ok())
            .collect();
        // user nice system idle iowait irq softirq steal: proc_stat(5)
        let idle = fields.get(3)? + fields.get(4)? + fields.get(7)?;
        let is_cpu = |line: &&str| {
            line.strip_prefix("cpu")
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let cpus = stat.lines().filter(is_cpu).count();
        Some(Busy { at: Instant::now(), idle: TICK * idle, cpus })
    }

    /// CPUs that were busy since, on average.
    pub(super) fn since(&self, earlier: &Busy) -> f64 {
        let time = (self.at - earlier.at).as_secs_f64();
        let idle = self.idle.saturating_sub(earlier.idle).as_secs_f64();
        (self.cpus as f64 - idle / time).max(0.0)
    }
}

/// Waits for the machine to be quiet, as long as there is time left for that.
#[derive(Debug)]
pub(super) struct Quiet {
    left: Duration,
    /// Runs that began on a machine that was not.
    pub(super) disturbed: u32,
    pub(super) runs: u32,
}

impl Quiet {
    /// At most so long in all.
    pub(super) fn within(time: Duration) -> Quiet {
        Quiet { left: time, disturbed: 0, runs: 0 }
    }

    /// CPUs that are busy now, those of the process whose CPU time `own` reads not among them; none if the
    /// machine is not quiet.
    pub(super) fn look(
        &mut self,
        own: impl Fn() -> anyhow::Result<Option<Duration>>,
    ) -> anyhow::Result<Option<f64>> {
        self.runs += 1;
        loop {
            let (busy, was) = (Busy::now()?, own()?);
            pass_time(LOOK)?;
            let (now, is) = (Busy::now()?, own()?);
            let time = (now.at - busy.at).as_secs_f64();
            let own = is.zip(was).map_or(0.0, |(is, was)| (is - was).as_secs_f64() / time);
            let others = (now.since(&busy) - own).max(0.0);
            if others <= QUIET_CPUS {
                return Ok(Some(others));
            }
            if self.left < LOOK {
                self.disturbed += 1;
                return Ok(None);
            }
            self.left -= LOOK;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_what_is_not_idle() {
        let stat = |idle: u32, iowait: u32, steal: u32| {
            let text = format!(
                "cpu  9 9 9 {idle} {iowait} 5 6 {steal} 0 0\ncpu0 1 2\ncpu1 3 4\nctxt 5\ncpus 7\n"
            );
            Busy::read(&text).unwrap()
        };
        let was = stat(100, 10, 0);
        // Two CPUs, a second: 100 ticks of 200 idle, waiting or stolen.
        let is = Busy { at: was.at + Duration::from_secs(1), ..stat(190, 15, 5) };
        assert_eq!(is.cpus, 2);
        assert!((is.since(&was) - 1.0).abs() < 1e-9, "{}", is.since(&was));
        assert!(Busy::read("intr 5").is_none());
    }
}
