//! What the policers of a device cost a packet.

use std::{mem::MaybeUninit, net::Ipv4Addr, ops::Range, os::fd::AsFd, time::Duration};

use tidegate_core::prefixes::{Prefix, Prefixes};

use super::{AttachPoint, load, maps, pool};
use crate::{
    cost::{CostError, mean_run_time},
    intf,
};

/// A bucket so fast that it is full whenever a packet comes.
const FULL: intf::Bucket = intf::Bucket {
    cost: (8_000_000_000 << 24) >> 43,
    rate: 1 << 43,
    burst: 1 << 62,
    fill_ns: 1 << 19,
    earned_bytes: 0,
};

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
const DESTINATION: Range<usize> = 30..34;

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
    let mut limit = intf::Entry::default();
    let action = [0, 1, 1];
    limit.police[0] = intf::Policy { committed: FULL, action, ..intf::Policy::default() };
    limit.rate_bit_s[0] = FULL.rate;
    match policers {
        Policers::Hosts(count) => {
            let host = |i: u32| Ipv4Addr::from_bits(0x0a00_0000 + i);
            let mut storage = MaybeUninit::uninit();
            let programs = pool::load(&mut storage, false, None)?;
            let pool = pool::maps_of(&programs)?;
            for i in 0..count {
                let mut prefixes = Prefixes::default();
                prefixes.insert(Prefix { address: host(i).to_ipv6_mapped().octets(), bits: 128 });
                let maps = pool.take(i, &prefixes)?;
                maps.write(limit)?;
                maps.place.map_or(Ok(()), |place| place.enter(&limit, &prefixes))?;
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
                let police = load(&mut storage, AttachPoint::Device, false)?;
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
    fn root_police_match_every_cost_can_be_measured() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_police_match_every_cost_can_be_measured: needs root");
            return;
        }
        for policers in [Policers::Hosts(1), Policers::Hosts(20), Policers::Programs(2)] {
            let cost = cost_on_device(policers, &tcp_frame(60), &[0], 20_000).unwrap();
            assert!(cost > Duration::ZERO, "{policers:?}");
        }
    }
}
