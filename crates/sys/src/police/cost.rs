//! What a packet costs in the policer, and what its group adds.

use std::{mem::MaybeUninit, os::fd::AsFd, time::Duration};

use libbpf_rs::{MapCore, MapFlags};
use tidegate_core::{Direction, exempt::Prefix, fleet::flows::WAYS, prefixes::Prefixes};

use super::{Place, load, maps, room};
use crate::{
    cost::{CostError, mean_run_time},
    intf,
    limit::map_error,
};

/// What a group asks of the policer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Packets are dropped at random.
    Drop,
    /// It is in none.
    Nothing,
    /// Its flows are counted, and the packet's has a counter.
    KnownFlow,
    /// Its flows are counted, and the packet's finds all counters of its set with flows that are larger by
    /// far.
    NewFlow,
}

/// A bucket so fast that it is full whenever a packet comes.
const FULL: intf::Bucket = intf::Bucket {
    cost: (8_000_000_000 << 24) >> 43,
    rate: 1 << 43,
    burst: 1 << 62,
    fill_ns: 1 << 19,
};

/// A probability that is drawn for each packet and hits none: dropped packets are marked, and cost less.
const SELDOM: f64 = 1e-9;

/// Mean run time of the program of a cgroup's egress on a frame; as [`crate::cost::measure`].
///
/// # Errors
/// [`CostError`].
pub fn cost(ask: Ask, frame: &[u8], cpus: &[usize], runs: u32) -> Result<Duration, CostError> {
    let mut storage = MaybeUninit::uninit();
    let police = load(&mut storage, Place::Cgroup, false)?;
    let mut limit =
        intf::Limit { flags: intf::FLAG_POLICE | intf::FLAG_LOOPBACK, ..intf::Limit::default() };
    let action = [0, 1, 1];
    limit.police[0] = intf::Policy { committed: FULL, action, ..intf::Policy::default() };
    let maps = maps(&police, &limit)?;
    match ask {
        Ask::Nothing => {}
        Ask::KnownFlow => _ = maps.measure(Direction::Egress)?,
        Ask::NewFlow => {
            maps.measure(Direction::Egress)?;
            let large = intf::FlowCell { flow: 0, bytes: 1 << 40 };
            let mut cells: intf::FlowCells = bytemuck::Zeroable::zeroed();
            for (i, cell) in cells.sets.iter_mut().flatten().enumerate() {
                // In its own set, and no hash that a packet may have.
                *cell = intf::FlowCell { flow: 1 + (i % WAYS) as u64, ..large };
            }
            let sample = maps.group.as_ref().map(|group| group.sample(Direction::Egress));
            if let Some(sample) = sample.transpose()?.flatten() {
                let count = libbpf_rs::num_possible_cpus().map_err(map_error("flows"))?;
                let all = vec![bytemuck::bytes_of(&cells).to_vec(); count];
                sample
                    .update_percpu(&0u32.to_ne_bytes(), &all, MapFlags::ANY)
                    .map_err(map_error("flows"))?;
            }
        }
        Ask::Drop => _ = maps.set_drop(Direction::Egress, SELDOM)?,
    }
    mean_run_time(police.progs.police_egress.as_fd(), frame, cpus, runs)
}

/// The policers of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policers {
    /// Each for a host of its own, in one program.
    Hosts(u32),
    /// Each for all, in a program of its own.
    Programs(u32),
}

/// Hosts whose packets are measured, at most: spread over all.
const HOSTS_MEASURED: u32 = 10;
/// Where in a frame of IPv4 its destination is.
const DESTINATION: std::ops::Range<usize> = 30..34;

/// Mean run time of the programs by which a frame leaves a device, added up; as [`crate::cost::measure`]. All
/// buckets are full.
///
/// # Errors
/// [`CostError`].
pub fn cost_on_device(
    policers: Policers,
    frame: &[u8],
    cpus: &[usize],
    runs: u32,
) -> Result<Duration, CostError> {
    let mut limit = intf::Limit { flags: intf::FLAG_POLICE, ..intf::Limit::default() };
    let action = [0, 1, 1];
    limit.police[0] = intf::Policy { committed: FULL, action, ..intf::Policy::default() };
    limit.rate_bit_s[0] = FULL.rate;
    match policers {
        Policers::Hosts(count) => {
            let host = |i: u32| std::net::Ipv4Addr::from_bits(0x0a00_0000 + i);
            let mut storage = MaybeUninit::uninit();
            let programs = room::load(&mut storage, false, None)?;
            let room = room::maps_of(&programs)?;
            for i in 0..count {
                let mut prefixes = Prefixes::default();
                prefixes.insert(Prefix { address: host(i).to_ipv6_mapped().octets(), bits: 128 });
                room.take(i)?.write(&intf::Limit { matched: (&prefixes).into(), ..limit })?;
            }
            let measured = count.min(HOSTS_MEASURED);
            let costs = (0..measured).map(|i| {
                let mut frame = frame.to_vec();
                let octets = host(i * (count / measured)).octets();
                if let Some(to) = frame.get_mut(DESTINATION) {
                    to.copy_from_slice(&octets);
                }
                mean_run_time(programs.progs.match_out.as_fd(), &frame, cpus, runs / measured)
            });
            Ok(costs.sum::<Result<Duration, _>>()? / measured.max(1))
        }
        Policers::Programs(count) => {
            let costs = (0..count).map(|_| {
                let mut storage = MaybeUninit::uninit();
                let police = load(&mut storage, Place::Device, false)?;
                let _maps = maps(&police, &limit)?;
                mean_run_time(police.progs.police_out.as_fd(), frame, cpus, runs / count)
            });
            costs.sum()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::tcp_frame;

    #[test]
    fn root_group_every_cost_can_be_measured() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_group_every_cost_can_be_measured: needs root");
            return;
        }
        for ask in [Ask::Nothing, Ask::Drop, Ask::KnownFlow, Ask::NewFlow] {
            let cost = cost(ask, &tcp_frame(60), &[0], 20_000).unwrap();
            assert!(cost > Duration::ZERO, "{ask:?}");
        }
        for policers in [Policers::Hosts(1), Policers::Hosts(20), Policers::Programs(2)] {
            let cost = cost_on_device(policers, &tcp_frame(60), &[0], 20_000).unwrap();
            assert!(cost > Duration::ZERO, "{policers:?}");
        }
    }
}
