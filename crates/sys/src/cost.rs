//! What a packet costs in a loaded program: nanoseconds by the kernel's own run-time statistics.
//!
//! A program runs over and over on one packet (BPF_PROG_TEST_RUN), on one CPU or on several that contend for
//! the same limit, while the kernel adds up its run time (BPF_ENABLE_STATS). Reading the clock twice is part
//! of every figure; the empty program shows how much that is.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    time::Duration,
};

use libbpf_rs::{
    MapCore, MapFlags, libbpf_sys,
    skel::{OpenSkel, SkelBuilder},
};
use rustix::thread::CpuSet;
use tidegate_core::{Rate, Scheme, police::Hook, queue_options::VirtualQueueOptions};

use crate::{
    cgroup::Cgroup,
    intf,
    limit::{LimitError, LimitOptions},
    query,
    schemes::nrm::load_nrm,
    schemes::police,
    skel,
};

/// Runs of one call into the kernel, which does not return before.
const RUNS_PER_CALL: u32 = 10_000;
/// How many runs a call of its own for each takes the place of.
const SINGLE_RUNS_SHARE: u32 = 20;

/// Runs with which a bucket that fills at 100 Gbit/s stays between full and empty.
const BUSY_BUCKET_RUNS: u32 = 200_000;

/// A program whose cost is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// The empty program: the hook and the clock.
    Nothing,
    /// The virtual queue alone.
    Nrm,
    /// The virtual queue with the fair share of paced flows.
    Pace,
    /// The bucket of a policer.
    Police,
    /// The same for what comes in by a device, at a hook.
    Incoming(Hook),
    /// Its meter: srTCM, colour-aware.
    Meter,
    /// The bucket of a policer that is in a group.
    Grouped(Asked),
}

/// What a group asks of a policer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Packets are dropped at random.
    Drop,
    /// Its flows are counted, and the packet's has a counter.
    KnownFlow,
    /// Its flows are counted, and the packet's finds all counters of its set with flows that are larger by
    /// far.
    NewFlow,
}

/// How the virtual queue stands when packets come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueState {
    /// Every packet finds the queue idle: compare and swap.
    Idle,
    /// Every packet finds a backlog below the mark: atomic add.
    Busy,
    /// Every packet is dropped. The kernel runs the program again and again on one packet, and a packet that
    /// was dropped once is marked dead: so here each run is a call of its own.
    Full,
}

/// Why a cost could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum CostError {
    #[error(transparent)]
    Limit(#[from] LimitError),
    #[error("{what}: {source}")]
    Kernel { what: &'static str, source: std::io::Error },
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

/// Mean run time of a program on a frame, on each of `cpus` at once, over at least `runs` runs on each.
///
/// # Errors
/// [`CostError`].
pub fn measure(
    program: Program,
    state: QueueState,
    frame: &[u8],
    cpus: &[usize],
    runs: u32,
) -> Result<Duration, CostError> {
    if program == Program::Nothing {
        let mut storage = MaybeUninit::uninit();
        let open = skel::nothing::NothingSkelBuilder::default().open(&mut storage);
        let object = open.and_then(|open| open.load()).map_err(of_libbpf("load nothing"))?;
        let nothing = object.progs.nothing.as_fd();
        return match state {
            QueueState::Full => mean_of(nothing, frame, cpus, runs / SINGLE_RUNS_SHARE, 1),
            QueueState::Idle | QueueState::Busy => mean_run_time(nothing, frame, cpus, runs),
        };
    }
    if let Program::Incoming(hook) = program {
        let (mut storage, mut of_xdp) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        let (police, maps) = police::prepare(&mut storage, program, state)?;
        let runs = if state == QueueState::Busy { runs.min(BUSY_BUCKET_RUNS) } else { runs };
        // A packet that is dropped here is not marked dead.
        return match hook {
            Hook::Auto => mean_run_time(police.progs.police_in.as_fd(), frame, cpus, runs),
            Hook::Xdp => {
                let xdp = police::xdp::load(&mut of_xdp, &maps)?;
                mean_run_time(xdp.progs.police_xdp.as_fd(), frame, cpus, runs)
            }
        };
    }
    if matches!(program, Program::Police | Program::Meter | Program::Grouped(_)) {
        let mut storage = MaybeUninit::uninit();
        let (police, _maps) = police::prepare(&mut storage, program, state)?;
        let program = police.progs.police_egress.as_fd();
        return match state {
            QueueState::Full => mean_of(program, frame, cpus, runs / SINGLE_RUNS_SHARE, 1),
            QueueState::Idle => mean_run_time(program, frame, cpus, runs),
            // A bucket of two gigabytes lasts no longer.
            QueueState::Busy => mean_run_time(program, frame, cpus, runs.min(BUSY_BUCKET_RUNS)),
        };
    }
    let mut storage = MaybeUninit::uninit();
    let nrm = load_nrm(&mut storage, None, false)?;
    let rate = Rate::from_bit_s(1_000_000_000).map(VirtualQueueOptions::new);
    let scheme = if program == Program::Pace { Scheme::Pace } else { Scheme::Nrm };
    let options = LimitOptions { egress: rate, loopback: true, scheme, ..LimitOptions::default() };
    let mut limit = options.encode(0).map_err(LimitError::Config)?;
    // A byte that costs next to nothing and thresholds hours away: the state lasts.
    limit.queue[0].cost = 1;
    let hour = 3_600_000_000_000u64;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec as u64;
    let mut queue = intf::Queue::default();
    match state {
        QueueState::Idle => limit.queue[0].burst_ns = 0,
        QueueState::Busy => {
            limit.queue[0].mark_ns = 2 * hour;
            limit.queue[0].large_drop_ns = 3 * hour;
            limit.queue[0].drop_ns = 4 * hour;
            queue.finish_ns = now * 1_000_000_000 + hour;
        }
        QueueState::Full => queue.finish_ns = now * 1_000_000_000 + hour,
    }
    let key = 0u32.to_ne_bytes();
    let (limit, queue) = (bytemuck::bytes_of(&limit.common), bytemuck::bytes_of(&queue));
    nrm.maps.limit.update(&key, limit, MapFlags::ANY).map_err(of_libbpf("write the limit"))?;
    nrm.maps
        .queues_of_limit
        .update(&key, queue, MapFlags::ANY)
        .map_err(of_libbpf("write the queue"))?;
    let program = nrm.progs.nrm_egress.as_fd();
    match state {
        QueueState::Full => mean_of(program, frame, cpus, runs / SINGLE_RUNS_SHARE, 1),
        QueueState::Idle | QueueState::Busy => mean_run_time(program, frame, cpus, runs),
    }
}

fn of_libbpf(what: &'static str) -> impl FnOnce(libbpf_rs::Error) -> CostError {
    move |source| CostError::Kernel { what, source: std::io::Error::other(source.to_string()) }
}

/// Mean run time by the kernel's statistics of a program that is loaded; as [`measure`].
///
/// # Errors
/// [`CostError::Kernel`].
pub fn mean_run_time(
    program: BorrowedFd<'_>,
    frame: &[u8],
    cpus: &[usize],
    runs: u32,
) -> Result<Duration, CostError> {
    mean_of(program, frame, cpus, runs, RUNS_PER_CALL)
}

pub(crate) fn mean_of(
    program: BorrowedFd<'_>,
    frame: &[u8],
    cpus: &[usize],
    runs: u32,
    runs_per_call: u32,
) -> Result<Duration, CostError> {
    let _statistics = run_time_statistics()?;
    run_on(program, frame, cpus, runs_per_call, runs_per_call)?;
    let before = run_statistics(program)?;
    run_on(program, frame, cpus, runs, runs_per_call)?;
    Ok(mean_between(before, run_statistics(program)?))
}

/// Mean run time on what a cgroup sends while `work` makes traffic: of the programs that are attached to it,
/// added up. The clock is part of it, as of all.
///
/// # Errors
/// [`CostError::Kernel`].
pub fn mean_in_traffic(cgroup: &Cgroup, work: impl FnOnce()) -> Result<Duration, CostError> {
    let failed = |source| CostError::Kernel { what: "find the programs", source };
    let on_hooks = query::on_cgroup(cgroup).map_err(failed)?;
    let egress = on_hooks.into_iter().filter(|(hook, _)| *hook == "egress");
    let programs: Vec<_> = egress
        .flat_map(|(_, on_hook)| on_hook.programs)
        .map(|id| libbpf_rs::Program::fd_from_id(id).map_err(of_libbpf("open a program")))
        .collect::<Result<_, _>>()?;
    let of = |program: &OwnedFd| run_statistics(program.as_fd());
    let read = || programs.iter().map(of).collect::<Result<Vec<_>, _>>();
    let _statistics = run_time_statistics()?;
    let before = read()?;
    work();
    let after = read()?;
    let each = before.into_iter().zip(after);
    Ok(each.map(|(before, after)| mean_between(before, after)).sum())
}

/// The kernel adds up what programs take as long as the descriptor is open.
fn run_time_statistics() -> Result<OwnedFd, CostError> {
    // SAFETY: no pointers; a descriptor or a negative error comes back.
    let statistics = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
    if statistics < 0 {
        let source = std::io::Error::last_os_error();
        return Err(CostError::Kernel { what: "switch the run-time statistics on", source });
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
) -> Result<(), CostError> {
    let on_one = |cpu: usize| {
        let mut set = CpuSet::new();
        set.set(cpu);
        rustix::thread::sched_setaffinity(None, &set)
            .map_err(|e| CostError::Kernel { what: "move to a CPU", source: e.into() })?;
        for _ in 0..runs.div_ceil(runs_per_call) {
            test_run(program, frame, runs_per_call)?;
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

fn test_run(program: BorrowedFd<'_>, frame: &[u8], repeat: u32) -> Result<(), CostError> {
    // SAFETY: a C struct of integers and pointers, for which zero is "not given".
    let mut opts: libbpf_sys::bpf_test_run_opts = unsafe { std::mem::zeroed() };
    opts.sz = size_of_val(&opts) as _;
    opts.data_in = frame.as_ptr().cast();
    opts.data_size_in = u32::try_from(frame.len()).unwrap_or(u32::MAX);
    opts.repeat = i32::try_from(repeat).unwrap_or(i32::MAX);
    // SAFETY: the descriptor is open, and the frame lives through the call with the size given.
    let ret = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut opts) };
    if ret < 0 {
        let source = std::io::Error::from_raw_os_error(-ret);
        return Err(CostError::Kernel { what: "run the program", source });
    }
    Ok(())
}

/// Run time in nanoseconds and number of runs so far.
fn run_statistics(program: BorrowedFd<'_>) -> Result<(u64, u64), CostError> {
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
        return Err(CostError::Kernel { what: "read the run-time statistics", source });
    }
    Ok((info.run_time_ns, info.run_cnt))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_every_state_can_be_measured() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_every_state_can_be_measured: needs root");
            return;
        }
        let frame = tcp_frame(60);
        let plain =
            [Program::Nothing, Program::Nrm, Program::Pace, Program::Police, Program::Meter];
        let grouped = [Asked::Drop, Asked::KnownFlow, Asked::NewFlow].map(Program::Grouped);
        let incoming = [Hook::Auto, Hook::Xdp].map(Program::Incoming);
        for program in plain.into_iter().chain(grouped).chain(incoming) {
            for state in [QueueState::Idle, QueueState::Busy, QueueState::Full] {
                let cost = measure(program, state, &frame, &[0], 20_000).unwrap();
                assert!(cost > Duration::ZERO, "{program:?} {state:?}");
            }
        }
    }
}
