//! The run time of a loaded program in nanoseconds, by the kernel's own statistics.
//!
//! A program runs over and over on one packet (BPF_PROG_TEST_RUN), on one CPU or on several at once, while
//! the kernel adds up its run time (BPF_ENABLE_STATS). Reading the clock twice is part of every figure; the
//! empty program shows how much that is.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    time::Duration,
};

use libbpf_rs::{
    Program, libbpf_sys,
    skel::{OpenSkel, SkelBuilder},
};
use rustix::thread::CpuSet;
use tidegate_sys::links::{self, On};

use crate::skel;

/// Runs of one call into the kernel, which does not return before.
const RUNS_PER_CALL: u32 = 10_000;

/// The call that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {source}")]
pub struct RunTimeError {
    /// A phrase that follows "cannot".
    what: &'static str,
    source: std::io::Error,
}

fn refused(what: &'static str) -> impl FnOnce(std::io::Error) -> RunTimeError {
    move |source| RunTimeError { what, source }
}

pub(crate) fn refused_by_libbpf(
    what: &'static str,
) -> impl FnOnce(libbpf_rs::Error) -> RunTimeError {
    move |source| refused(what)(std::io::Error::other(source.to_string()))
}

/// An Ethernet frame with an IPv4 TCP packet of `bytes` bytes (at least 40), not ECN-capable.
#[must_use]
pub fn tcp_frame(bytes: u16) -> Vec<u8> {
    let mut frame = vec![0; 14 + usize::from(bytes)];
    frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    frame[16..18].copy_from_slice(&bytes.to_be_bytes());
    frame[23] = 6;
    frame[46] = 5 << 4;
    frame
}

/// Loads the empty program of a cgroup.
///
/// # Errors
/// [`RunTimeError`].
pub fn empty_program() -> Result<OwnedFd, RunTimeError> {
    const LOAD: &str = "load the empty program";
    let mut storage = MaybeUninit::uninit();
    let open = skel::nothing::NothingSkelBuilder::default().open(&mut storage);
    let object = open.and_then(OpenSkel::load).map_err(refused_by_libbpf(LOAD))?;
    object.progs.nothing.as_fd().try_clone_to_owned().map_err(refused(LOAD))
}

/// Mean run time of a program on a frame, on each of `cpus` at once, over at least `runs` runs on each.
///
/// # Errors
/// [`RunTimeError`].
pub fn mean_run_time(
    program: BorrowedFd<'_>,
    frame: &[u8],
    cpus: &[usize],
    runs: u32,
) -> Result<Duration, RunTimeError> {
    mean_of(program, frame, cpus, runs, RUNS_PER_CALL)
}

/// The same where each run has a packet of its own, for programs that change it: a packet that one of a
/// cgroup has dropped, for example, is marked dead.
///
/// # Errors
/// [`RunTimeError`].
pub fn mean_run_time_alone(
    program: BorrowedFd<'_>,
    frame: &[u8],
    cpus: &[usize],
    runs: u32,
) -> Result<Duration, RunTimeError> {
    mean_of(program, frame, cpus, runs, 1)
}

fn mean_of(
    program: BorrowedFd<'_>,
    frame: &[u8],
    cpus: &[usize],
    runs: u32,
    runs_per_call: u32,
) -> Result<Duration, RunTimeError> {
    let _statistics = run_time_statistics()?;
    run_on(program, frame, cpus, runs_per_call, runs_per_call)?;
    let before = run_statistics(program)?;
    run_on(program, frame, cpus, runs, runs_per_call)?;
    Ok(mean_between(before, run_statistics(program)?))
}

/// Mean run time on what a cgroup sends while `work` makes traffic: of the programs that are attached to it
/// by links, added up.
///
/// # Errors
/// [`RunTimeError`].
pub fn mean_in_traffic(cgroup_id: u64, work: impl FnOnce()) -> Result<Duration, RunTimeError> {
    let open = |id| Program::fd_from_id(id).map_err(refused_by_libbpf("open a program"));
    let programs = on_egress(cgroup_id).into_iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let of = |program: &OwnedFd| run_statistics(program.as_fd());
    let read = || programs.iter().map(of).collect::<Result<Vec<_>, _>>();
    let _statistics = run_time_statistics()?;
    let before = read()?;
    work();
    let after = read()?;
    let each = before.into_iter().zip(after);
    Ok(each.map(|(before, after)| mean_between(before, after)).sum())
}

/// The programs for what a cgroup sends that are attached to it by links, by the kernel's ids.
pub(crate) fn on_egress(cgroup_id: u64) -> Vec<u32> {
    let wanted = On::Cgroup { id: cgroup_id, attach_type: libbpf_sys::BPF_CGROUP_INET_EGRESS };
    links::all().filter(|link| link.on == wanted).map(|link| link.program).collect()
}

/// The kernel adds up what programs take as long as the descriptor is open.
fn run_time_statistics() -> Result<OwnedFd, RunTimeError> {
    // SAFETY: no pointers; a descriptor or a negative error comes back.
    let statistics = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
    if statistics < 0 {
        let source = std::io::Error::last_os_error();
        return Err(refused("switch the run-time statistics on")(source));
    }
    // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(statistics) })
}

fn mean_between(before: (u64, u64), after: (u64, u64)) -> Duration {
    let count = (after.1 - before.1).max(1);
    Duration::from_secs_f64((after.0 - before.0) as f64 / count as f64 / 1e9)
}

/// Runs the program at least `runs` times on each CPU, on all at once.
fn run_on(
    program: BorrowedFd<'_>,
    frame: &[u8],
    cpus: &[usize],
    runs: u32,
    runs_per_call: u32,
) -> Result<(), RunTimeError> {
    let on_one = |cpu: usize| {
        let mut set = CpuSet::new();
        set.set(cpu);
        rustix::thread::sched_setaffinity(None, &set)
            .map_err(|e| refused("move to a CPU")(e.into()))?;
        for _ in 0..runs.div_ceil(runs_per_call) {
            test_run(program, frame, &[], runs_per_call)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = cpus.iter().map(|cpu| scope.spawn(move || on_one(*cpu))).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

/// Runs a program `repeat` times on a frame, with the beginning of its context unless that is empty. Returns
/// what the program returned at last, and the mean time of a run by the kernel, without a clock in each.
///
/// # Errors
/// [`RunTimeError`].
pub fn test_run(
    program: BorrowedFd<'_>,
    frame: &[u8],
    context: &[u8],
    repeat: u32,
) -> Result<(u32, Duration), RunTimeError> {
    // SAFETY: a C struct of integers and pointers, for which zero is "not given".
    let mut opts: libbpf_sys::bpf_test_run_opts = unsafe { std::mem::zeroed() };
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    opts.sz = size_of_val(&opts) as _;
    opts.data_in = frame.as_ptr().cast();
    opts.data_size_in = length(frame);
    if !context.is_empty() {
        opts.ctx_in = context.as_ptr().cast();
        opts.ctx_size_in = length(context);
    }
    opts.repeat = i32::try_from(repeat).unwrap_or(i32::MAX);
    // SAFETY: the descriptor is open; frame and context live through the call with the sizes given.
    let ret = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut opts) };
    if ret < 0 {
        return Err(refused("run the program")(std::io::Error::from_raw_os_error(-ret)));
    }
    Ok((opts.retval, Duration::from_nanos(opts.duration.into())))
}

/// Run time in nanoseconds and number of runs so far.
fn run_statistics(program: BorrowedFd<'_>) -> Result<(u64, u64), RunTimeError> {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut len = size_of_val(&info) as u32;
    // SAFETY: `info` is a live struct of `len` bytes with no pointers set, so the kernel only fills it.
    let ret = unsafe {
        libbpf_sys::bpf_obj_get_info_by_fd(
            program.as_raw_fd(),
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    if ret < 0 {
        let source = std::io::Error::from_raw_os_error(-ret);
        return Err(refused("read the run-time statistics")(source));
    }
    Ok((info.run_time_ns, info.run_cnt))
}
