//! The limiters of today, set on the sender's egress device as `tc` would set them.

use std::{net::IpAddr, time::Duration};

use anyhow::{bail, ensure};
use tidegate_core::Rate;
use tidegate_instruments::qdiscs::{Cake, DestinationFilter, Fq, add_filter};
use tidegate_sys::net::{
    NetNs, Netlink,
    qdisc::{Fifo, FqCodel, Handle, Htb, HtbClass, Place, Qdisc, QueueStats, Tbf, Verb},
};

use super::{Family, Testbed};
use crate::stop::Skip;

const ROOT: Handle = Handle::new(1, 0);
/// The class that the others borrow from.
const SHARED: Handle = Handle::new(1, 1);

/// Packets that a class of HTB queues by default: the `txqueuelen` of an Ethernet device.
const QUEUE_PACKETS: u32 = 1000;
/// What [`Peer::htb_short`] queues at least.
const SHORT_LEAST_BYTES: u32 = 2 * 65_536;
/// The queue of class 1:N is named N plus this.
const QUEUES: u16 = 0x100;
/// A class that holds nothing back.
const OPEN_BIT_S: u64 = 100_000_000_000;
const OPEN_BURST_BYTES: u32 = 16 << 20;

/// A qdisc at the root of a device, the sender's unless said otherwise. Dropping it removes it, with what it
/// has queued.
#[derive(Debug)]
pub struct Peer {
    netlink: Netlink,
    ifindex: u32,
}

/// A class of [`Peer::htb_tree`].
#[derive(Debug, Clone)]
pub struct HtbNode {
    /// The class that it is inside of, by its place in the list; none: that of the whole rate.
    pub parent: Option<usize>,
    /// Its rate, ceiling and quantum.
    pub shape: HtbClass,
    /// Whose packets it has; none: those of the classes inside it.
    pub to: Option<IpAddr>,
}

/// How a [`Tbf`] is sized: TBF has no defaults of its own.
#[derive(Debug, Clone, Copy)]
pub struct TbfOptions {
    /// What may be sent at once.
    pub burst_bytes: u32,
    /// How long a packet may wait.
    pub latency: Duration,
}

impl TbfOptions {
    /// What manuals advise: the rate of one tick of a 250 Hz clock, at least one large packet of
    /// the stack, and a queue of 50 ms.
    pub fn usual(rate_bit_s: u64) -> Self {
        let per_tick = u32::try_from(rate_bit_s / 8 / 250).unwrap_or(u32::MAX);
        Self { burst_bytes: per_tick.max(65_536), latency: Duration::from_millis(50) }
    }

    /// As `tc` takes them: what may wait is what the rate sends in the latency, and one burst.
    fn tbf(self, rate_bit_s: u64) -> Tbf {
        let Self { burst_bytes, latency } = self;
        let waiting_bytes = (rate_bit_s / 8) as f64 * latency.as_secs_f64();
        let limit_bytes = (waiting_bytes + f64::from(burst_bytes)) as u32;
        Tbf { rate_bit_s, burst_bytes, limit_bytes }
    }
}

impl Peer {
    /// As `tc qdisc add dev DEV root handle 1: pfifo limit 1000`: a queue without a limit.
    pub fn pfifo(testbed: &Testbed) -> anyhow::Result<Self> {
        Self::at_root(testbed, &Fifo::Packets(QUEUE_PACKETS))
    }

    /// As `tc qdisc add dev DEV root handle 1: htb default 1` and
    /// `tc class add dev DEV parent 1: classid 1:1 htb rate RATE`.
    pub fn htb(testbed: &Testbed, rate_bit_s: u64) -> anyhow::Result<Self> {
        Self::htb_on(testbed.sender(), testbed.sender_dev(), rate_bit_s)
    }

    pub fn htb_on(host: &NetNs, dev: &str, rate_bit_s: u64) -> anyhow::Result<Self> {
        let mut peer = Self::on(host, dev, &Htb::new(SHARED.minor))?;
        peer.class(ROOT, SHARED, &HtbClass::new(rate_bit_s))?;
        peer.queue(SHARED)?;
        Ok(peer)
    }

    /// [`Peer::htb`] whose class queues no longer than a time, as by
    /// `tc qdisc add dev DEV parent 1:1 bfifo limit BYTES`. Two segments of 64 KB fit in any case, as the
    /// stack sends them.
    pub fn htb_short(testbed: &Testbed, rate_bit_s: u64, queue: Duration) -> anyhow::Result<Self> {
        let bytes = (rate_bit_s as f64 / 8.0 * queue.as_secs_f64()) as u32;
        let queue = Fifo::Bytes(bytes.max(SHORT_LEAST_BYTES));
        Self::htb_with(testbed, rate_bit_s, &queue)
    }

    /// [`Peer::htb`] whose class has the queue `fq`, as by `tc qdisc add dev DEV parent 1:1 fq`; [`Skip`]
    /// where the kernel has none.
    pub fn htb_fq(testbed: &Testbed, rate_bit_s: u64) -> anyhow::Result<Self> {
        Self::htb_with(testbed, rate_bit_s, &Fq)
    }

    /// The same with `fq_codel`.
    pub fn htb_fq_codel(testbed: &Testbed, rate_bit_s: u64) -> anyhow::Result<Self> {
        Self::htb_with(testbed, rate_bit_s, &FqCodel::usual())
    }

    /// As `tc qdisc add dev DEV root cake bandwidth RATE`; [`Skip`] where the kernel has none.
    pub fn cake(testbed: &Testbed, rate_bit_s: u64) -> anyhow::Result<Self> {
        Self::at_root(testbed, &Cake { bandwidth_bit_s: rate_bit_s })
    }

    fn htb_with(testbed: &Testbed, rate_bit_s: u64, queue: &dyn Qdisc) -> anyhow::Result<Self> {
        let mut peer = Self::at_root(testbed, &Htb::new(SHARED.minor))?;
        peer.class(ROOT, SHARED, &HtbClass::new(rate_bit_s))?;
        peer.queue_of(SHARED, queue)?;
        Ok(peer)
    }

    /// Whether the kernel has the queues `fq`, `fq_codel` or `cake`: one is put on the loopback device of a
    /// namespace that goes again.
    ///
    /// # Errors
    ///
    /// [`Skip`] where it has not.
    pub fn check_kernel(kind: &str) -> anyhow::Result<()> {
        let qdisc: &dyn Qdisc = match kind {
            "fq" => &Fq,
            "fq_codel" => &FqCodel::usual(),
            "cake" => &Cake { bandwidth_bit_s: OPEN_BIT_S },
            _ => bail!("{kind} is no queue that is looked for"),
        };
        let netns = NetNs::create(&format!("tidegate-{}-{kind}", std::process::id()))?;
        Self::on(&netns, "lo", qdisc).map(drop)
    }

    /// As `tc qdisc add dev DEV root fq`; [`Skip`] where the kernel has none.
    pub fn fq_on(host: &NetNs, dev: &str) -> anyhow::Result<Self> {
        Self::on(host, dev, &Fq)
    }

    /// As `tc qdisc add dev DEV root handle 1: tbf rate RATE burst B latency L`.
    pub fn tbf(testbed: &Testbed, rate_bit_s: u64, options: TbfOptions) -> anyhow::Result<Self> {
        Self::tbf_on(testbed.sender(), testbed.sender_dev(), rate_bit_s, options)
    }

    /// The same on any device of any host.
    pub fn tbf_on(
        host: &NetNs,
        dev: &str,
        rate_bit_s: u64,
        options: TbfOptions,
    ) -> anyhow::Result<Self> {
        Self::on(host, dev, &options.tbf(rate_bit_s))
    }

    /// HTB with one class for each receiver: each gets its minimum, and what the others leave of
    /// the total. Traffic to others (there is none but ARP and neighbour discovery) is not limited.
    pub fn htb_minimums(
        testbed: &Testbed,
        total_bit_s: u64,
        minimums_bit_s: &[u64],
    ) -> anyhow::Result<Self> {
        let receivers = testbed.receiver_count();
        ensure!(
            minimums_bit_s.len() == receivers,
            "{} minimums for {receivers} receivers: give one for each",
            minimums_bit_s.len()
        );
        let sum: u64 = minimums_bit_s.iter().sum();
        ensure!(
            sum <= total_bit_s,
            "the minimums add up to {sum}bit, the total is {total_bit_s}bit"
        );
        let mut peer = Self::at_root(testbed, &Htb::new(0))?;
        peer.class(ROOT, SHARED, &HtbClass::new(total_bit_s))?;
        for (receiver, &minimum_bit_s) in minimums_bit_s.iter().enumerate() {
            let class = receiver_class(receiver);
            let shape = HtbClass { ceil_bit_s: Some(total_bit_s), ..HtbClass::new(minimum_bit_s) };
            peer.class(SHARED, class, &shape)?;
            peer.queue(class)?;
            for family in [Family::V4, Family::V6] {
                let network = testbed.addr(receiver, family);
                let prefix_len = if network.is_ipv4() { 32 } else { 128 };
                let ifindex = peer.ifindex;
                let filter =
                    DestinationFilter { ifindex, parent: ROOT, network, prefix_len, class };
                add_filter(&mut peer.netlink, &filter)?;
            }
        }
        Ok(peer)
    }

    /// HTB with classes inside classes, each after its parent, below one of the whole rate.
    ///
    /// As `tc class add dev DEV parent 1:1 classid 1:10 htb rate RATE ceil CEIL quantum BYTES`, and a filter
    /// by destination for each class that has one.
    pub fn htb_tree(testbed: &Testbed, rate_bit_s: u64, nodes: &[HtbNode]) -> anyhow::Result<Self> {
        let mut peer = Self::at_root(testbed, &Htb::new(0))?;
        peer.class(ROOT, SHARED, &HtbClass::new(rate_bit_s))?;
        for (index, node) in nodes.iter().enumerate() {
            let class = receiver_class(index);
            peer.class(node.parent.map_or(SHARED, receiver_class), class, &node.shape)?;
            let Some(network) = node.to else { continue };
            peer.queue(class)?;
            let prefix_len = if network.is_ipv4() { 32 } else { 128 };
            let ifindex = peer.ifindex;
            let filter = DestinationFilter { ifindex, parent: ROOT, network, prefix_len, class };
            add_filter(&mut peer.netlink, &filter)?;
        }
        Ok(peer)
    }

    /// HTB with a class for each rate, for packets whose priority names [`Peer::class_of`] it.
    pub fn htb_each(testbed: &Testbed, rates: &[Rate]) -> anyhow::Result<Self> {
        let mut peer = Self::at_root(testbed, &Htb::new(0))?;
        for (flow, rate) in rates.iter().enumerate() {
            peer.class(ROOT, Self::class_of(flow), &HtbClass::new(rate.bit_s()))?;
        }
        Ok(peer)
    }

    /// A TBF for each rate, for packets whose priority names [`Peer::class_of`] it. They hang from classes of
    /// HTB that are too fast to matter: of the qdiscs with classes it is the one that every kernel here has.
    pub fn tbf_each(testbed: &Testbed, rates: &[Rate]) -> anyhow::Result<Self> {
        let mut peer = Self::at_root(testbed, &Htb::new(0))?;
        for (flow, rate) in rates.iter().enumerate() {
            let parent = Self::class_of(flow);
            let free = HtbClass {
                burst_bytes: Some(OPEN_BURST_BYTES),
                cburst_bytes: Some(OPEN_BURST_BYTES),
                ..HtbClass::new(OPEN_BIT_S)
            };
            peer.class(ROOT, parent, &free)?;
            let handle = Handle::new(parent.minor + QUEUES, 0);
            let place = Place { ifindex: peer.ifindex, parent, handle };
            let tbf = TbfOptions::usual(rate.bit_s()).tbf(rate.bit_s());
            peer.netlink.set_qdisc(Verb::Add, place, &tbf)?;
        }
        Ok(peer)
    }

    /// The class of a flow in [`Peer::htb_each`] and [`Peer::tbf_each`]: 1:1, 1:2.
    pub fn class_of(flow: usize) -> Handle {
        Handle::new(ROOT.major, flow as u16 + 1)
    }

    /// Counters of the qdiscs.
    pub fn qdisc_stats(&mut self) -> anyhow::Result<Vec<QueueStats>> {
        Ok(self.netlink.qdisc_stats(self.ifindex)?)
    }

    /// Counters of the classes.
    pub fn class_stats(&mut self) -> anyhow::Result<Vec<QueueStats>> {
        Ok(self.netlink.class_stats(self.ifindex)?)
    }

    fn at_root(testbed: &Testbed, qdisc: &dyn Qdisc) -> anyhow::Result<Self> {
        Self::on(testbed.sender(), testbed.sender_dev(), qdisc)
    }

    fn on(host: &NetNs, dev: &str, qdisc: &dyn Qdisc) -> anyhow::Result<Self> {
        let mut netlink = host.netlink()?;
        let ifindex = netlink.index_of(dev)?;
        let place = Place { ifindex, parent: Handle::ROOT, handle: ROOT };
        set_qdisc(&mut netlink, place, qdisc)?;
        Ok(Self { netlink, ifindex })
    }

    fn class(&mut self, parent: Handle, handle: Handle, class: &HtbClass) -> anyhow::Result<()> {
        let place = Place { ifindex: self.ifindex, parent, handle };
        Ok(self.netlink.set_class(Verb::Add, place, class)?)
    }
}

impl Peer {
    /// The queue that a class of HTB has by itself on a device with the usual `txqueuelen`: that of a link's
    /// device is longer.
    fn queue(&mut self, class: Handle) -> anyhow::Result<()> {
        self.queue_of(class, &Fifo::Packets(QUEUE_PACKETS))
    }

    fn queue_of(&mut self, class: Handle, queue: &dyn Qdisc) -> anyhow::Result<()> {
        let handle = Handle::new(class.minor + QUEUES, 0);
        let place = Place { ifindex: self.ifindex, parent: class, handle };
        set_qdisc(&mut self.netlink, place, queue)
    }
}

/// [`Skip`] where the kernel has no such qdisc.
fn set_qdisc(netlink: &mut Netlink, place: Place, qdisc: &dyn Qdisc) -> anyhow::Result<()> {
    netlink.set_qdisc(Verb::Add, place, qdisc).map_err(|error| match error.is_absent() {
        true => Skip(format!("this kernel has no {0} (the module sch_{0})", qdisc.kind())).into(),
        false => error.into(),
    })
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.netlink.delete_qdisc(self.ifindex, Handle::ROOT);
    }
}

/// The class of a receiver in [`Peer::htb_minimums`]: 1:10, 1:11.
pub fn receiver_class(receiver: usize) -> Handle {
    Handle::new(1, 0x10 + receiver as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tbf_turns_latency_into_a_limit() {
        let options = TbfOptions { burst_bytes: 10_000, latency: Duration::from_millis(50) };
        // 1 MB/s x 50 ms + burst
        assert_eq!(options.tbf(8_000_000).limit_bytes, 60_000);
    }
}
