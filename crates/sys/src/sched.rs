//! Scheduling of the calling thread.

use std::{
    io,
    time::{Duration, Instant},
};

/// Puts the calling thread in the real-time class `SCHED_FIFO` at the lowest priority, so that
/// only other real-time threads and interrupts delay it. Threads made later by it inherit this.
///
/// Errors: `EPERM` without the capability `CAP_SYS_NICE`, or where the CPU controller gives the
/// process's cgroup no real-time budget. The thread then stays in its class.
pub fn make_realtime() -> io::Result<()> {
    // SAFETY: a `sched_param` is plain integers, for which all zeros is a value.
    let mut param: libc::sched_param = unsafe { std::mem::zeroed() };
    param.sched_priority = 1;
    // SAFETY: pid 0 is the calling thread, and `param` outlives the call.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &param) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A part of a CPU that is a thread's whenever it wants it: `runtime` in each `period`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reservation {
    /// How long it may run, at least 1.024 us.
    pub runtime: Duration,
    /// In each time so long.
    pub period: Duration,
}

impl Default for Reservation {
    /// About what the kernel gives at most, of each millisecond: a thread that polls leaves the rest to
    /// others, in pieces that a shaper makes up for.
    fn default() -> Self {
        Self { runtime: Duration::from_micros(940), period: Duration::from_millis(1) }
    }
}

/// What a thread had that has ended is given away again a period later.
const PATIENCE: Duration = Duration::from_millis(100);

/// `struct sched_attr` as of its first version.
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Gives the calling thread a reservation (`SCHED_DEADLINE`): it goes before all threads without one, and
/// when it has had its time it waits for the next period. Threads made later by it have none.
///
/// Errors: `EPERM` without the capability `CAP_SYS_NICE` or for a thread that is kept on some CPUs;
/// `EBUSY` if the CPUs are given away, of which the kernel gives 95 % (`sched_rt_runtime_us`); `EINVAL` for
/// times that are none. The thread then stays in its class.
pub fn reserve_cpu(reservation: Reservation) -> io::Result<()> {
    let Reservation { runtime, period } = reservation;
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let attr = SchedAttr {
        size: size_of::<SchedAttr>() as u32,
        policy: libc::SCHED_DEADLINE as u32,
        flags: libc::SCHED_FLAG_RESET_ON_FORK as u64,
        nice: 0,
        priority: 0,
        runtime_ns: ns(runtime),
        deadline_ns: ns(period),
        period_ns: ns(period),
    };
    let begun = Instant::now();
    loop {
        // SAFETY: pid 0 is the calling thread; `attr` outlives the call, and says how long it is.
        let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::ResourceBusy || begun.elapsed() >= PATIENCE {
            return Err(error);
        }
        std::thread::sleep(PATIENCE / 20);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_of_more_than_all_is_refused() {
        let ms = Duration::from_millis(1);
        let none = Reservation { runtime: 2 * ms, period: ms };
        assert!(reserve_cpu(none).is_err());
    }

    #[test]
    fn root_a_thread_with_a_reservation_runs() {
        let tenth =
            Reservation { runtime: Duration::from_millis(1), period: Duration::from_millis(10) };
        let outcome = std::thread::spawn(move || reserve_cpu(tenth)).join();
        match outcome.expect("no panic") {
            Ok(()) => {}
            Err(error) => eprintln!("SKIP root_a_thread_with_a_reservation_runs: {error}"),
        }
    }
}
