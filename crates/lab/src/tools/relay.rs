//! A limiter in user space: it takes each packet that the kernel has queued for it (NFQUEUE), decides, and
//! returns a verdict. What a program that is no part of the kernel can do, and how re-implementations of
//! Cloud Control have done it.
//!
//! It decides what the policer of a group decides, with the models of the same algorithms: a bucket, and
//! counters of flows. Of a packet it takes the headers alone.

use anyhow::Context as _;
use clap::Args;
use nfq::{Queue, Verdict};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng as _, SeedableRng as _},
};
use rustix::time::{ClockId, clock_gettime};
use tidegate_core::{
    Bytes, Nanos, Rate,
    fleet::flows::{FlowCounts, flow_hash},
    token_bucket::{BucketConfig, TokenBucket},
};

use crate::testbed::{self, Child, Site, wait::wait_until};

/// Headers of IPv4 and of a transport; what is not there is not of the flow.
const HEADER_BYTES: u16 = 40;
/// Of Ethernet, which the queue does not see.
const LINK_BYTES: usize = 14;
/// Packets that wait for a verdict.
const QUEUE_PACKETS: u32 = 4096;
const READY: std::time::Duration = std::time::Duration::from_secs(20);
const SAYS: &str = "takes packets";

/// What a relay is told.
#[derive(Debug, Clone, Copy, Args)]
pub struct RelayArgs {
    /// The number of the queue
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub queue: u16,
    /// What it lets through
    #[arg(long, value_name = "RATE")]
    pub rate: Rate,
    /// The depth of its bucket
    #[arg(long = "burst", value_name = "BYTES")]
    pub burst_bytes: u64,
}

/// Starts a relay and waits until it takes packets.
pub fn start<'a>(
    lab_binary: &std::path::Path,
    site: impl Into<Site<'a>>,
    args: RelayArgs,
) -> anyhow::Result<Child> {
    let mut command = testbed::tool(lab_binary, site, "relay")?;
    let RelayArgs { queue, rate, burst_bytes } = args;
    command.args([
        format!("--queue={queue}"),
        format!("--rate={rate}"),
        format!("--burst={burst_bytes}"),
    ]);
    let mut child = Child::spawn(command)?;
    wait_until("a relay that takes packets", READY, || {
        child.check_running()?;
        Ok(child.output().stderr.contains(SAYS).then_some(()))
    })?;
    Ok(child)
}

/// The relay, until it is killed.
pub fn relay(args: &RelayArgs) -> anyhow::Result<()> {
    let mut queue = Queue::open().context("cannot open a socket for queued packets")?;
    queue.bind(args.queue).context("cannot take the queue: has another program it?")?;
    queue.set_copy_range(args.queue, HEADER_BYTES)?;
    queue.set_queue_max_len(args.queue, QUEUE_PACKETS)?;
    let mut gate = Gate::new(args.rate, Bytes(args.burst_bytes))?;
    eprintln!("{SAYS} of queue {}", args.queue);
    loop {
        let mut packet = queue.recv().context("no more packets")?;
        let bytes = packet.get_original_len() + LINK_BYTES;
        let passes = gate.on_packet(now(), packet.get_payload(), bytes as u32);
        packet.set_verdict(if passes { Verdict::Accept } else { Verdict::Drop });
        queue.verdict(packet).context("cannot return a verdict")?;
    }
}

fn now() -> Nanos {
    let now = clock_gettime(ClockId::Monotonic);
    Nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

/// What the policer of a group does with a packet.
struct Gate {
    bucket: TokenBucket,
    flows: FlowCounts,
    random: Xoshiro256PlusPlus,
    seed: u64,
}

impl Gate {
    fn new(rate: Rate, burst: Bytes) -> anyhow::Result<Gate> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(now().0);
        let seed = random.next_u64();
        let bucket = TokenBucket::new(BucketConfig::new(rate, burst)?, now());
        Ok(Gate { bucket, flows: FlowCounts::new(), random, seed })
    }

    fn on_packet(&mut self, now: Nanos, headers: &[u8], bytes: u32) -> bool {
        self.flows.on_packet(self.flow(headers), bytes, self.random.next_u64() as u32);
        self.bucket.on_packet(now, bytes)
    }

    /// Addresses, transport and ports of IPv4; all else is one flow.
    fn flow(&self, headers: &[u8]) -> u64 {
        let word = |from: usize| {
            let bytes = headers.get(from..from + 4).and_then(|bytes| bytes.try_into().ok());
            u64::from(bytes.map_or(0, u32::from_be_bytes))
        };
        let Some(first) = headers.first().filter(|first| **first >> 4 == 4) else { return 1 };
        let ports = usize::from(first & 0xf) * 4;
        let protocol = headers.get(9).copied().map_or(0, u64::from);
        flow_hash(self.seed, &[word(12) << 32 | word(16), protocol << 32 | word(ports)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_are_distinguished_and_the_bucket_decides() {
        let mut gate = Gate::new(Rate::from_bit_s(8_000).unwrap(), Bytes(1_000)).unwrap();
        let mut headers = [0; 40];
        headers[0] = 0x45;
        headers[9] = 17;
        let one = gate.flow(&headers);
        headers[21] = 1;
        assert_ne!(gate.flow(&headers), one, "another port");
        assert_eq!(gate.flow(&[0x60; 40]), 1);
        assert_eq!(gate.flow(&[]), 1);
        let now = now();
        assert!(gate.on_packet(now, &headers, 1_000));
        assert!(!gate.on_packet(now, &headers, 1_000), "nothing is left");
    }
}
