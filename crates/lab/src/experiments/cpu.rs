//! What traffic costs the processors: the CPU time of the processes at both ends of a path, and of the
//! network's softirqs that run outside of them ([`SoftirqMeter`]).
//!
//! Others may work on the machine meanwhile. Hard interrupts and the idle task are not counted.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tidegate_instruments::softirq_meter::SoftirqMeter;

/// The unit of `/proc`: `USER_HZ`, which is part of the kernel's interface.
pub(super) const TICK: Duration = Duration::from_millis(10);

/// Reads the CPU time of a path.
#[derive(Debug)]
pub(super) struct PathMeter {
    processes: Vec<u32>,
    softirqs: SoftirqMeter,
}

/// CPU time until a moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spent {
    at: Instant,
    processes: Duration,
    softirqs: Duration,
}

/// CPUs that were busy, on average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cpus {
    /// With the path's processes, their softirqs included.
    pub(super) processes: f64,
    /// With softirqs outside of them.
    pub(super) softirqs: f64,
}

impl PathMeter {
    /// Counts from now on, for the path of these processes.
    pub(super) fn attach(processes: Vec<u32>) -> anyhow::Result<PathMeter> {
        let softirqs = SoftirqMeter::attach(&processes)?;
        Ok(PathMeter { processes, softirqs })
    }

    /// All until now. The processes must still be there.
    pub(super) fn read(&self) -> anyhow::Result<Spent> {
        let of = |pid: &u32| process_cpu(*pid);
        let processes = self.processes.iter().map(of).sum::<anyhow::Result<Duration>>()?;
        Ok(Spent { at: Instant::now(), processes, softirqs: self.softirqs.spent()? })
    }
}

impl Spent {
    pub(super) fn since(&self, earlier: &Spent) -> Cpus {
        let seconds = (self.at - earlier.at).as_secs_f64();
        let cpus = |is: Duration, was: Duration| is.saturating_sub(was).as_secs_f64() / seconds;
        Cpus {
            processes: cpus(self.processes, earlier.processes),
            softirqs: cpus(self.softirqs, earlier.softirqs),
        }
    }
}

impl Cpus {
    pub(super) fn total(self) -> f64 {
        self.processes + self.softirqs
    }
}

/// CPU time of a process until now, its threads' included.
pub(super) fn process_cpu(pid: u32) -> anyhow::Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    process_ticks(&stat).map(|ticks| TICK * ticks).with_context(|| format!("no times in {stat}"))
}

/// Fields 14 and 15 of proc_pid_stat(5), counted after the name, which may hold anything.
fn process_ticks(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    Some(fields.next()?.parse::<u32>().ok()? + fields.next()?.parse::<u32>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_be_called_anything() {
        let stat = "7 (a b) 3) S 1 7 7 0 -1 0 1 2 3 4 250 50 0 0 20 0 3 0 5";
        assert_eq!(process_ticks(stat), Some(300));
        assert_eq!(process_ticks("7 (x) S 1"), None);
        assert!(process_cpu(std::process::id()).is_ok());
    }
}
