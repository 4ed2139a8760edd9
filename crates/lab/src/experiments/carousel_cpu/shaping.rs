//! What the decision about a frame costs: a lane of the software NIC in virtual time, on one thread, without
//! ports. Each flow has some frames in it; one that leaves arrives again at once.

use std::collections::VecDeque;

use anyhow::{Context as _, ensure};
use rustix::time::{ClockId, clock_gettime};
use tidegate_core::{Nanos, Rate};
use tidegate_nic::{
    PacketPool, PoolSize,
    lane::{FRAME_BYTES, Lane, LaneLimit, LaneOptions},
};

/// Of a flow, at any time: two in the shaper, and two that wait.
const FRAMES: usize = 4;
/// Nothing is marked or dropped before.
const NEVER: Nanos = Nanos(10_000_000_000);

/// CPU time for a frame to arrive, wait and leave, in nanoseconds.
pub(super) fn frame_ns(flows: u32, rate: Rate, frames: u64) -> anyhow::Result<f64> {
    let options =
        LaneOptions { target: Some(NEVER), interval: Some(NEVER), ..LaneOptions::default() };
    let mut lane = Lane::new(options, 1, Nanos(0))?;
    lane.set_limit(Some(LaneLimit { rate, burst: Nanos(1_000_000), mark: Some(NEVER) }));
    let small = u32::try_from(FRAMES)? * flows;
    let mut pool = PacketPool::new(PoolSize { small, large: 0 })?;
    let mut out = VecDeque::with_capacity(small as usize);
    for flow in 0..flows {
        for _ in 0..FRAMES {
            let packet = pool.packet(&frame(u16::try_from(flow)?)).context("the pool is empty")?;
            lane.take(Nanos(0), packet, &mut pool, &mut out);
        }
    }
    let mut left = 0;
    let mut turn = |until: u64| -> anyhow::Result<()> {
        while left < until {
            let now = lane.next_deadline().context("the lane is empty")?;
            lane.poll(now, usize::MAX, &mut out);
            for packet in out.drain(..) {
                left += 1;
                lane.take(now, packet, &mut pool, &mut VecDeque::new());
            }
        }
        Ok(())
    };
    // The memory is touched first.
    turn(frames / 10)?;
    let begun = thread_cpu();
    turn(frames / 10 + frames)?;
    let time = thread_cpu().saturating_sub(begun);
    let dropped = lane.backlog_counters();
    ensure!(dropped.drop_early_packets + dropped.drop_full_packets == 0, "frames were dropped");
    Ok(time as f64 / frames as f64)
}

/// UDP over IPv4 in a full frame; its flow is its source port.
fn frame(flow: u16) -> Vec<u8> {
    let mut frame = vec![0; FRAME_BYTES as usize];
    frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    frame[23] = 17;
    frame[34..36].copy_from_slice(&flow.to_be_bytes());
    frame
}

/// Of this thread, in nanoseconds.
fn thread_cpu() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_costs_something() {
        for flows in [1, 15, 100] {
            let ns = frame_ns(flows, Rate::from_bit_s(1_000_000_000).unwrap(), 10_000).unwrap();
            assert!(ns > 0.0);
        }
    }
}
