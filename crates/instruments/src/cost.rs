//! The cost of a packet in the programs of a limit that is in force, in nanoseconds ([`crate::run_time`]).
//!
//! A limit is put on a cgroup, or on a device, of its own, with programs and maps as any other has. Its queue
//! or bucket is given a state that lasts, and each of its programs is run on one packet over and over, on one
//! CPU or on several that contend for the limit. What the limit has counted shows that the state has lasted.

use std::{
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use tidegate_core::{
    Bytes, Direction, Rate, Scheme, Span,
    fleet::flows::WAYS,
    police::{ColourMap, Hook, MeterOptions, MeterType, Policy},
    queue_options::VirtualQueueOptions,
    token_bucket::{MAX_BURST, UNITS_PER_BYTE},
    units::MAX_RATE_BIT_S,
    virtual_queue::COST_SHIFT,
};
use tidegate_sys::{
    cgroup::Hierarchy,
    clock::{boottime, monotonic_ns},
    intf,
    limit::{AttachedLimit, LimitMaps, LimitOptions},
};

use crate::{
    run_time::{
        empty_program, mean_run_time, mean_run_time_alone, on_egress, refused_by_libbpf, test_run,
    },
    scene::{DeviceStore, LoadedProgram, OwnCgroup},
};

pub use crate::scene::CostError;

/// How many runs a call of its own for each takes the place of.
const SINGLE_RUNS_SHARE: u32 = 20;
/// Runs with which a bucket of a gigabyte that fills at 100 Gbit/s stays between full and empty.
const BUSY_BUCKET_RUNS: u32 = 200_000;
/// The rate of a bucket that is always full.
const FAST_BIT_S: u64 = 1 << 43;
const HOUR_NS: u64 = 3_600_000_000_000;
/// A probability that is drawn for each packet and hits none: dropped packets are marked, and cost less.
const SELDOM: f64 = 1e-9;
const NAME: &str = "cost";
/// Walks over all links and programs of the host in which a program is looked for.
const WALKS_MAX: usize = 1000;

/// The largest that there is.
const RATE: Rate = match Rate::from_bit_s(MAX_RATE_BIT_S) {
    Some(rate) => rate,
    None => unreachable!(),
};

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

/// The work that a group asks of a policer.
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

/// How the virtual queue or bucket stands when packets come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueState {
    /// Every packet finds the queue idle: compare and swap.
    Idle,
    /// Every packet finds a backlog below the mark: atomic add.
    Busy,
    /// Every packet is dropped. Where that marks the packet dead each run is a call of its own.
    Full,
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
    let asked = Measurement { program, state, frame, cpus, runs };
    match program {
        Program::Nothing => asked.run(empty_program()?.as_fd()),
        Program::Incoming(hook) => DeviceStore::with(|on| asked.on_device(on, hook)),
        _ => asked.on_cgroup(),
    }
}

#[derive(Clone, Copy)]
struct Measurement<'a> {
    program: Program,
    state: QueueState,
    frame: &'a [u8],
    cpus: &'a [usize],
    runs: u32,
}

impl Measurement<'_> {
    /// The limit whose program is measured.
    fn options(&self) -> LimitOptions {
        let bucket = VirtualQueueOptions {
            burst: Some(Span::Size(Bytes(MAX_BURST.0 / 2))),
            ..VirtualQueueOptions::new(RATE)
        };
        let meter = (self.program == Program::Meter).then(|| MeterOptions {
            colours: Some(ColourMap::default()),
            ..MeterOptions::new(MeterType::SrTcm)
        });
        let policer = LimitOptions {
            scheme: Scheme::Police,
            police: Policy { meter, ..Policy::default() },
            // The kernel's test packets are on the loopback device.
            loopback: true,
            ..LimitOptions::default()
        };
        let queue = Rate::from_bit_s(1_000_000_000).map(VirtualQueueOptions::new);
        match self.program {
            Program::Nrm => LimitOptions { scheme: Scheme::Nrm, egress: queue, ..policer },
            Program::Pace => LimitOptions { scheme: Scheme::Pace, egress: queue, ..policer },
            Program::Incoming(hook) => LimitOptions {
                ingress: Some(bucket),
                police: Policy { hook, ..policer.police },
                ..policer
            },
            _ => LimitOptions { egress: Some(bucket), ..policer },
        }
    }

    fn on_cgroup(&self) -> Result<Duration, CostError> {
        let options = self.options();
        let on = OwnCgroup::create()?;
        let limit = AttachedLimit::attach(&on.hierarchy, &on.group, &options, None)?;
        // A walk over all links ends early at one that somebody is just making.
        let found = (0..WALKS_MAX).find_map(|_| {
            let attached = on_egress(on.group.id());
            LoadedProgram::find(|program| attached.contains(&program.id)).ok()
        });
        let program = found.ok_or(CostError::NoProgram)?;
        let maps = limit.maps();
        if options.scheme == Scheme::Police {
            self.set_bucket(&on.hierarchy, maps, &options, &program)?;
        } else {
            self.set_queue(&on.hierarchy, maps, &options, &program)?;
        }
        if let Program::Grouped(asked) = self.program {
            join(maps, &program, asked)?;
        }
        let cost = self.run(program.as_fd())?;
        self.check(maps, Direction::Egress)?;
        Ok(cost)
    }

    fn on_device(&self, on: &DeviceStore, hook: Hook) -> Result<Duration, CostError> {
        let options = self.options();
        on.install(NAME, &options)?;
        let limit = on.open(NAME)?;
        let name = if hook == Hook::Xdp { "police_xdp" } else { "police_in" };
        let program = on.program(name, NAME, "limit")?;
        self.set_bucket(&on.hierarchy, limit.maps(), &options, &program)?;
        let cost = self.run(program.as_fd())?;
        self.check(limit.maps(), Direction::Ingress)?;
        Ok(cost)
    }

    fn run(&self, program: BorrowedFd<'_>) -> Result<Duration, CostError> {
        let Measurement { frame, cpus, runs, .. } = *self;
        // The first packet converts a meter to other settings; those of other CPUs are refused meanwhile.
        test_run(program, frame, &[], 1)?;
        let has_bucket = !matches!(self.program, Program::Nothing | Program::Nrm | Program::Pace);
        Ok(match self.state {
            QueueState::Busy if has_bucket => {
                mean_run_time(program, frame, cpus, runs.min(BUSY_BUCKET_RUNS))
            }
            // A packet that is dropped on a device is not marked dead.
            QueueState::Full if !matches!(self.program, Program::Incoming(_)) => {
                mean_run_time_alone(program, frame, cpus, runs / SINGLE_RUNS_SHARE)
            }
            _ => mean_run_time(program, frame, cpus, runs),
        }?)
    }

    /// Gives the virtual queue its state: a byte costs next to nothing, and thresholds are hours away.
    fn set_queue(
        &self,
        hierarchy: &Hierarchy,
        maps: &LimitMaps,
        options: &LimitOptions,
        program: &LoadedProgram,
    ) -> Result<(), CostError> {
        let mut limit = maps.limit()?;
        let conf = &mut limit.queue[intf::index(Direction::Egress)];
        conf.cost = 1;
        if self.state == QueueState::Idle {
            conf.burst_ns = 0;
        }
        // A processor that stops for milliseconds between its clock and its charge finds no backlog either.
        if self.state != QueueState::Full {
            conf.mark_ns = 2 * HOUR_NS;
            conf.large_drop_ns = 3 * HOUR_NS;
            conf.drop_ns = 4 * HOUR_NS;
        }
        maps.set(hierarchy, [], &limit, options)?;
        if self.state == QueueState::Idle {
            return Ok(());
        }
        let queue = intf::Queue { finish_ns: monotonic_ns() + HOUR_NS, ..Default::default() };
        let map = program.map("queues_of_limit")?;
        // A scheme has more behind it.
        let mut value = bytemuck::bytes_of(&queue).to_vec();
        value.resize(map.value_size() as usize, 0);
        put(&map, Direction::Egress, &value)
    }

    /// Gives the bucket of a policer its state.
    fn set_bucket(
        &self,
        hierarchy: &Hierarchy,
        maps: &LimitMaps,
        options: &LimitOptions,
        program: &LoadedProgram,
    ) -> Result<(), CostError> {
        if self.state == QueueState::Idle {
            return fill_buckets(hierarchy, maps, options);
        }
        let limit = maps.limit()?;
        let now = boottime().0;
        for direction in [Direction::Egress, Direction::Ingress] {
            let full_ns = match self.state {
                QueueState::Full => now + HOUR_NS,
                _ => now + limit.police[intf::index(direction)].committed.fill_ns / 2,
            };
            let side = intf::Side { full_ns, second_full_ns: full_ns, ..Default::default() };
            let meter = intf::Meter { side: [side, intf::Side::default()], ..Default::default() };
            put(&program.map("meters_of_limit")?, direction, bytemuck::bytes_of(&meter))?;
        }
        Ok(())
    }

    /// Checks by what was counted that the limit was in its state all the time.
    fn check(&self, maps: &LimitMaps, direction: Direction) -> Result<(), CostError> {
        let counters = maps.read(direction)?.counters;
        let passed = counters.of(|outcome| outcome.passed).packets;
        let dropped = counters.arrived().packets - passed;
        let (wanted, other) = match self.state {
            QueueState::Full => (dropped, passed),
            _ => (passed, dropped),
        };
        match wanted != 0 && other == 0 {
            true => Ok(()),
            false => Err(CostError::State { passed, dropped }),
        }
    }
}

/// Makes the buckets of a policer so fast that each packet finds them full: one of 1500 bytes costs 1.4 ns.
pub(crate) fn fill_buckets(
    hierarchy: &Hierarchy,
    maps: &LimitMaps,
    options: &LimitOptions,
) -> Result<(), CostError> {
    let mut limit = maps.limit()?;
    for policy in &mut limit.police {
        for bucket in [&mut policy.committed, &mut policy.second] {
            bucket.rate = FAST_BIT_S;
            bucket.cost = (UNITS_PER_BYTE << COST_SHIFT) / FAST_BIT_S;
            bucket.fill_ns = bucket.burst / FAST_BIT_S;
        }
    }
    Ok(maps.set(hierarchy, [], &limit, options)?)
}

fn put(map: &MapHandle, direction: Direction, value: &[u8]) -> Result<(), CostError> {
    let key = (intf::index(direction) as u32).to_ne_bytes();
    Ok(map.update(&key, value, MapFlags::ANY).map_err(refused_by_libbpf("set the state"))?)
}

/// Has egress do for a group what is asked.
fn join(maps: &LimitMaps, program: &LoadedProgram, asked: Asked) -> Result<(), CostError> {
    const FILL: &str = "fill the counters of flows";
    if asked == Asked::Drop {
        maps.set_drop(Direction::Egress, SELDOM)?;
        return Ok(());
    }
    maps.measure(Direction::Egress)?;
    if asked == Asked::KnownFlow {
        return Ok(());
    }
    let mut cells: intf::FlowCells = bytemuck::Zeroable::zeroed();
    for (i, cell) in cells.set.iter_mut().flatten().enumerate() {
        // In its own set, and no hash that a packet may have.
        *cell = intf::FlowCell { flow: 1 + (i % WAYS) as u64, bytes: 1 << 40 };
    }
    let samples = program.map("samples_of_limit")?;
    let key = (intf::index(Direction::Egress) as u32).to_ne_bytes();
    let id = samples.lookup(&key, MapFlags::ANY).map_err(refused_by_libbpf(FILL))?;
    let id = id.and_then(|id| id.try_into().ok()).map(u32::from_ne_bytes);
    let sample = MapHandle::from_map_id(id.ok_or(CostError::NoMap("flows"))?)
        .map_err(refused_by_libbpf(FILL))?;
    let cpus = libbpf_rs::num_possible_cpus().map_err(refused_by_libbpf(FILL))?;
    let all = vec![bytemuck::bytes_of(&cells).to_vec(); cpus];
    let filled = sample.update_percpu(&0u32.to_ne_bytes(), &all, MapFlags::ANY);
    Ok(filled.map_err(refused_by_libbpf(FILL))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_time::tcp_frame;

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
                for cpus in [&[0][..], &[0, 1]] {
                    let all = std::thread::available_parallelism().unwrap().get();
                    let cpus = &cpus[..cpus.len().min(all)];
                    let cost = measure(program, state, &frame, cpus, 20_000).unwrap();
                    assert!(cost > Duration::ZERO, "{program:?} {state:?}");
                }
            }
        }
    }
}
