//! What a packet costs in the policer, and what its group adds.

use std::{mem::MaybeUninit, os::fd::AsFd, time::Duration};

use libbpf_rs::{MapCore, MapFlags};
use tidegate_core::{Direction, fleet::flows::WAYS};

use super::{Place, load, maps};
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
    }
}
