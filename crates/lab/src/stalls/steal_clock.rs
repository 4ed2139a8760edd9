//! The time that a hypervisor takes from one CPU, by the kernel's own clock.
//!
//! The scheduler has a clock for each CPU that stands still while a hypervisor runs something else on it
//! (`rq_clock_task`, with CONFIG_PARAVIRT_TIME_ACCOUNTING). `/proc/thread-self/sched` gives the moment by
//! that clock at which a thread was last put on the CPU. So the distance between that and the monotonic
//! clock grows by what is stolen. With CONFIG_IRQ_TIME_ACCOUNTING it also grows by the time of interrupts,
//! which packets cause. On such kernels, and where the configuration cannot be read, nothing counts as
//! stolen.

use std::{
    fs::File,
    io::{Read, Seek},
    process::Command,
};

use super::monotonic_ns;

/// The clock of the CPU to which a thread is bound.
#[derive(Debug)]
pub(super) struct StealClock {
    file: File,
    text: String,
    behind_ns: i64,
}

impl StealClock {
    /// That of the calling thread, which stays on one CPU; none if the kernel does not show it.
    pub(super) fn of_this_thread() -> Option<StealClock> {
        let file = File::open("/proc/thread-self/sched").ok()?;
        let mut clock = StealClock { file, text: String::new(), behind_ns: 0 };
        clock.behind_ns = clock.behind_ns()?;
        Some(clock)
    }

    /// How long the CPU was stolen since the last call, in nanoseconds.
    pub(super) fn stolen_ns(&mut self) -> u64 {
        let Some(behind_ns) = self.behind_ns() else { return 0 };
        let before_ns = std::mem::replace(&mut self.behind_ns, behind_ns);
        u64::try_from(behind_ns - before_ns).unwrap_or(0)
    }

    fn behind_ns(&mut self) -> Option<i64> {
        self.text.clear();
        self.file.rewind().ok()?;
        self.file.read_to_string(&mut self.text).ok()?;
        Some(monotonic_ns() as i64 - began_ns(&self.text)? as i64)
    }
}

/// When a thread was last put on its CPU, in nanoseconds of the scheduler's clock.
fn began_ns(sched: &str) -> Option<u64> {
    let line = sched.lines().find(|line| line.starts_with("se.exec_start"))?;
    // Milliseconds with six decimals.
    let (ms, ns) = line.rsplit_once(':')?.1.trim().split_once('.')?;
    (ns.len() == 6).then_some(())?;
    Some(ms.parse::<u64>().ok()? * 1_000_000 + ns.parse::<u64>().ok()?)
}

/// Whether the clock stands still for stolen time and nothing else, by the running kernel's configuration.
pub(super) fn counts_steal_alone() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let files = ["/proc/config.gz".to_owned(), format!("/boot/config-{release}")];
    files.iter().any(|file| {
        let config = Command::new("zcat").args(["-f", file]).output();
        config.is_ok_and(|config| is_for_steal_alone(&String::from_utf8_lossy(&config.stdout)))
    })
}

fn is_for_steal_alone(config: &str) -> bool {
    config.lines().any(|line| line == "CONFIG_PARAVIRT_TIME_ACCOUNTING=y")
        && config.lines().any(|line| line == "# CONFIG_IRQ_TIME_ACCOUNTING is not set")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_read_from_what_the_kernel_shows() {
        let text = "cat (32043, #threads: 1)\n-----\n\
                    se.exec_start                                :      84947682.650404\n\
                    se.vruntime                                  :        163739.735663\n";
        assert_eq!(began_ns(text), Some(84_947_682_650_404));
        assert_eq!(began_ns("se.vruntime : 1.000000\n"), None);
        assert_eq!(began_ns("se.exec_start : 1.5\n"), None);
        assert_eq!(began_ns(""), None);
    }

    #[test]
    fn a_kernel_that_counts_interrupts_too_shows_nothing_stolen() {
        let steal = "CONFIG_PARAVIRT_TIME_ACCOUNTING=y\n";
        let interrupts = "# CONFIG_IRQ_TIME_ACCOUNTING is not set\n";
        assert!(is_for_steal_alone(&format!("{steal}CONFIG_SMP=y\n{interrupts}")));
        assert!(!is_for_steal_alone(&format!("{steal}CONFIG_IRQ_TIME_ACCOUNTING=y\n")));
        assert!(!is_for_steal_alone(steal));
        assert!(!is_for_steal_alone(interrupts));
        assert!(!is_for_steal_alone(""));
    }
}
