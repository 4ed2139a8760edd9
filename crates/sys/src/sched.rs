//! Scheduling of the calling thread.

use std::io;

/// Puts the calling thread in the real-time class `SCHED_FIFO` at the lowest priority, so that
/// only other real-time threads and interrupts delay it. Threads made later by it inherit this.
///
/// Errors: `EPERM` without the capability `CAP_SYS_NICE`, or where the CPU controller gives the
/// process's cgroup no real-time budget. The thread then stays in its class.
pub fn make_realtime() -> io::Result<()> {
    make_fifo(1)
}

/// Puts the calling thread in `SCHED_FIFO` one priority above [`make_realtime`], for a thread that watches
/// those. It must sleep nearly always. Errors: as there.
pub fn make_realtime_above() -> io::Result<()> {
    make_fifo(2)
}

fn make_fifo(priority: i32) -> io::Result<()> {
    // SAFETY: a `sched_param` is plain integers, for which all zeros is a value.
    let mut param: libc::sched_param = unsafe { std::mem::zeroed() };
    param.sched_priority = priority;
    // SAFETY: pid 0 is the calling thread, and `param` outlives the call.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &param) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
