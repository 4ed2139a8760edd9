//! The clocks of the kernel, as its programs read them.

use rustix::time::{ClockId, clock_gettime};
use tidegate_core::Nanos;

fn read(clock: ClockId) -> Nanos {
    let now = clock_gettime(clock);
    Nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

/// `CLOCK_BOOTTIME`, by which leases end and policers meter. It goes on while the host sleeps, as the other
/// hosts of a group do, to whom a lent rate then goes back.
pub fn boottime() -> Nanos {
    read(ClockId::Boottime)
}

/// `CLOCK_MONOTONIC` in ns: `bpf_ktime_get_ns()`.
pub fn monotonic_ns() -> u64 {
    read(ClockId::Monotonic).0
}

/// How far `CLOCK_BOOTTIME` is ahead of `CLOCK_MONOTONIC`, ns: how long the host has slept since it booted.
pub fn asleep_ns() -> u64 {
    // First the one that may be ahead: where nobody has slept the difference is none.
    let boottime = boottime();
    boottime.0.saturating_sub(monotonic_ns())
}
