//! A policer that stays as it is while its cost is measured ([`crate::cost`]).

use std::mem::MaybeUninit;

use libbpf_rs::{MapCore, MapFlags, OpenObject};
use tidegate_core::{
    Bytes, Direction, Rate, Span,
    fleet::flows::WAYS,
    police::{ColourMap, MeterOptions, MeterType, Policy},
    queue_options::VirtualQueueOptions,
    token_bucket::{MAX_BURST, UNITS_PER_BYTE},
    units::MAX_RATE_BIT_S,
};

use super::{AttachPoint, load, maps};
use crate::{
    bpf::map_error,
    cost::{Asked, Program, QueueState},
    intf,
    limit::{LimitError, LimitMaps},
    skel,
};

/// The largest that there is.
const RATE: Rate = match Rate::from_bit_s(MAX_RATE_BIT_S) {
    Some(rate) => rate,
    None => unreachable!(),
};

const HOUR_NS: u64 = 3_600_000_000_000;

/// A probability that is drawn for each packet and hits none: dropped packets are marked, and cost less.
const SELDOM: f64 = 1e-9;

/// Loads the programs of a cgroup, or those of a device that an incoming packet meets, with buckets that stay
/// as `state` says, and what `program` has besides.
pub(crate) fn prepare(
    storage: &mut MaybeUninit<OpenObject>,
    program: Program,
    state: QueueState,
) -> Result<(skel::police::PoliceSkel<'_>, LimitMaps), LimitError> {
    let is_incoming = matches!(program, Program::Incoming(_));
    let police =
        load(storage, if is_incoming { AttachPoint::Device } else { AttachPoint::Cgroup }, false)?;
    let queue = VirtualQueueOptions {
        burst: Some(Span::Size(Bytes(MAX_BURST.0 / 2))),
        ..VirtualQueueOptions::new(RATE)
    };
    let meter = (program == Program::Meter).then(|| MeterOptions {
        colours: Some(ColourMap::default()),
        ..MeterOptions::new(MeterType::SrTcm)
    });
    let policy = Policy { meter, ..Policy::default() };
    let mut policy = intf::Policy::new(&policy, &queue).map_err(LimitError::Config)?;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    let half_ns = policy.committed.fill_ns / 2;
    let full_ns = match state {
        QueueState::Idle => {
            // So fast that a packet costs nothing.
            for bucket in [&mut policy.committed, &mut policy.second] {
                (bucket.cost, bucket.rate) = (1, MAX_BURST.0 * UNITS_PER_BYTE / 2);
            }
            0
        }
        QueueState::Busy => now_ns + half_ns,
        QueueState::Full => now_ns + HOUR_NS,
    };
    let mut limit = intf::Entry { police: [policy; 2], ..Default::default() };
    limit.flags = intf::FLAG_LOOPBACK;
    let maps = maps(&police, &limit)?;
    let side = intf::Side { full_ns, second_full_ns: full_ns, ..Default::default() };
    let meter = intf::Meter { side: [side, intf::Side::default()], ..Default::default() };
    for key in 0..intf::DIRECTIONS as u32 {
        maps.queues
            .update(&key.to_ne_bytes(), bytemuck::bytes_of(&meter), MapFlags::ANY)
            .map_err(map_error("queues"))?;
    }
    if let Program::Grouped(asked) = program {
        join(&maps, asked)?;
    }
    Ok((police, maps))
}

/// Has egress do for a group what is asked.
fn join(maps: &LimitMaps, asked: Asked) -> Result<(), LimitError> {
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
    let sample = maps.group.as_ref().map(|group| group.sample(Direction::Egress));
    if let Some(sample) = sample.transpose()?.flatten() {
        let count = libbpf_rs::num_possible_cpus().map_err(map_error("flows"))?;
        let all = vec![bytemuck::bytes_of(&cells).to_vec(); count];
        sample
            .update_percpu(&0u32.to_ne_bytes(), &all, MapFlags::ANY)
            .map_err(map_error("flows"))?;
    }
    Ok(())
}
