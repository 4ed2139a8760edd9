//! The cost of the policers of a device, for each packet.

use std::{net::Ipv4Addr, ops::Range, os::fd::AsFd, time::Duration};

use tidegate_core::{
    Rate, Scheme,
    prefixes::{Prefix, Prefixes},
    queue_options::VirtualQueueOptions,
};
use tidegate_sys::limit::LimitOptions;

use crate::{
    cost::{CostError, fill_buckets},
    run_time::mean_run_time,
    scene::DeviceStore,
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
    DeviceStore::with(|on| match policers {
        Policers::Hosts(count) => of_hosts(on, count, frame, cpus, runs),
        Policers::Programs(count) => {
            let costs = (0..count).map(|_| {
                let options = policer(Prefixes::default());
                on.install("all", &options)?;
                fill_buckets(&on.hierarchy, on.open("all")?.maps(), &options)?;
                let program = on.program("police_out", "all", "limit")?;
                let cost = mean_run_time(program.as_fd(), frame, cpus, runs / count)?;
                on.remove("all")?;
                Ok(cost)
            });
            costs.sum()
        }
    })
}

fn of_hosts(
    on: &DeviceStore,
    count: u32,
    frame: &[u8],
    cpus: &[usize],
    runs: u32,
) -> Result<Duration, CostError> {
    let host = |i: u32| Ipv4Addr::from_bits(0x0a00_0000 + i);
    let name = |i: u32| format!("host-{i}");
    for i in 0..count {
        let mut prefixes = Prefixes::default();
        prefixes.insert(Prefix { address: host(i).to_ipv6_mapped().octets(), bits: 128 });
        let options = policer(prefixes);
        on.install(&name(i), &options)?;
        fill_buckets(&on.hierarchy, on.open(&name(i))?.maps(), &options)?;
    }
    let program = on.program("match_out", &name(0), "places")?;
    let measured = count.min(HOSTS_MEASURED);
    let costs = (0..measured).map(|i| {
        let mut frame = frame.to_vec();
        let octets = host(i * (count / measured)).octets();
        if let Some(to) = frame.get_mut(DESTINATION) {
            to.copy_from_slice(&octets);
        }
        mean_run_time(program.as_fd(), &frame, cpus, runs / measured)
    });
    Ok(costs.sum::<Result<Duration, _>>()? / measured.max(1))
}

fn policer(matched: Prefixes) -> LimitOptions {
    let egress = Rate::from_bit_s(1_000_000_000).map(VirtualQueueOptions::new);
    LimitOptions { egress, scheme: Scheme::Police, matched, ..LimitOptions::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_time::tcp_frame;

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
