//! A TCP stack in user space feels the shaper's backpressure.

#[path = "../examples/backpressure/stacks.rs"]
mod stacks;

use std::time::Duration;

use stacks::{Load, run};
use tidegate_core::{Nanos, Rate, units::NANOS_PER_SEC};
use tidegate_nic::nic::Completions;

#[test]
fn tcp_flows_wait_in_their_sockets_and_lose_nothing() {
    const FLOWS: usize = 120;
    let rates = (0..FLOWS as u64).filter_map(|flow| Rate::from_bit_s(400_000 + flow * 10_000));
    let load = Load {
        rates: rates.collect(),
        time: Nanos(NANOS_PER_SEC),
        completions: Completions::Deferred,
        // Two segments a flow, and not one more.
        capacity: 2 * FLOWS,
        patience: Duration::from_secs(120),
    };
    let outcome = run(&load).expect("all bytes arrive as they were sent");
    let counters = outcome.counters;
    assert_eq!((counters.drop_full, counters.drop_closed, counters.lost_packets), (0, 0, 0));
    assert!(counters.held_packets_max <= 2 * FLOWS as u64, "{counters:?}");
    assert!(outcome.held_median <= counters.held_packets_max);
    assert!(counters.blocked_allowance > 0, "{counters:?}");
    for transfer in &outcome.transfers {
        assert_eq!(transfer.bytes, transfer.rate.bytes_in(load.time).0);
        assert!((1..=2).contains(&transfer.in_shaper_max), "{transfer:?}");
        // The time is measured from before the first packet to after the last: noise only lengthens it.
        let least = u128::from(transfer.wire_bytes) * 8 * u128::from(NANOS_PER_SEC);
        let least = least / u128::from(transfer.rate.bit_s());
        assert!(u128::from(transfer.time.0) >= least, "{least} ns at least: {transfer:?}");
    }
}
