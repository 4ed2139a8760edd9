//! Links with a delay, a rate, loss: what joins two hosts of a testbed where a plain cable is too good.
//!
//! [`Means::Cable`] is the project's own: two TAP devices joined by a [`Cable`] of `tidegate-nic`, in this
//! process. [`Means::Netem`] is the kernel's netem, where it has it: on the devices of a namespace between
//! the two hosts, so that the hosts' own devices stay free for the limiters that are measured.

use std::{fmt, time::Duration};

use tidegate_core::{Bytes, Nanos, Rate, link::LinkOptions};
use tidegate_instruments::{
    plumbing::{add_bridge, set_gso_max_segs, set_master, set_txqueuelen},
    qdiscs::Netem,
};
use tidegate_nic::{
    cable::{Cable, CableCounters, CableError, CableOptions, wants_segments},
    port::tap::{TapOptions, TapPort},
};
use tidegate_sys::net::{
    NetNs, VethPair,
    qdisc::{Handle, Place, Verb},
};

use crate::stop::Skip;

/// Frames that wait in a TAP device for the cable's thread before the kernel drops: more than the window of
/// any flow that the lab runs.
const TAP_QUEUE_FRAMES: u32 = 16_384;
/// What a link with a rate queues at least.
const QUEUE_LEAST: Duration = Duration::from_millis(20);
const QUEUE_LEAST_BYTES: u64 = 64 << 10;
/// netem counts packets, and drops above this many.
const NETEM_PACKETS: u32 = 100_000;

/// What makes a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Means {
    /// The project's own.
    #[default]
    Cable,
    /// The kernel's netem.
    Netem,
}

impl fmt::Display for Means {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Means::Cable => "cable",
            Means::Netem => "netem",
        })
    }
}

/// A link between the sender and a receiver.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSpec {
    /// Towards the receiver.
    pub there: LinkOptions,
    /// From the receiver.
    pub back: LinkOptions,
    /// Decides what is lost and reordered.
    pub seed: u64,
    pub means: Means,
}

impl LinkSpec {
    /// A link with this round trip, half of it in each direction, and nothing else.
    pub fn rtt(rtt: Duration) -> LinkSpec {
        LinkSpec::symmetric(LinkOptions { delay: nanos(rtt / 2), ..LinkOptions::default() })
    }

    /// The same in both directions. With a rate and no queue, the queue is as long as the round trip at that
    /// rate, at least 20 ms and 64 KB.
    pub fn symmetric(mut way: LinkOptions) -> LinkSpec {
        if let (Some(rate), None) = (way.rate, way.queue) {
            let time = Nanos(2 * way.delay.0).max(nanos(QUEUE_LEAST));
            way.queue = Some(rate.bytes_in(time).max(Bytes(QUEUE_LEAST_BYTES)));
        }
        LinkSpec { there: way, back: way, seed: 1, means: Means::Cable }
    }

    /// Refuses what no link can be, whatever makes it.
    ///
    /// Errors: a packet could be on the way for longer than a cable can hold it.
    pub fn check(&self) -> Result<(), CableError> {
        self.cable_options().check()
    }

    fn cable_options(&self) -> CableOptions {
        CableOptions {
            leftward: self.back,
            segments: self.takes_segments(),
            ..CableOptions::symmetric(self.there, self.seed)
        }
    }

    /// True if the link takes segments of up to 64 KB whole.
    pub fn takes_segments(&self) -> bool {
        wants_segments(&self.there) && wants_segments(&self.back)
    }
}

/// A link in place. It goes with the value.
#[derive(Debug)]
pub enum Joint {
    /// With the ends' devices, which are its ports.
    Cable(Cable),
    /// The namespace between.
    Netem {
        /// Its devices go with it, and the ends' with them.
        between: NetNs,
    },
}

impl Joint {
    /// Makes the devices of both ends, which are down and have no address, and the link between them. An end
    /// is its host and device. `between` names a namespace for the means that need one.
    pub(super) fn new(
        near: (&NetNs, &str),
        far: (&NetNs, &str),
        spec: &LinkSpec,
        between: &str,
    ) -> anyhow::Result<Joint> {
        match spec.means {
            Means::Cable => Ok(Joint::Cable(cable(near, far, spec)?)),
            Means::Netem => Ok(Joint::Netem { between: netem(near, far, spec, between)? }),
        }
    }

    /// What the cable's thread has counted; none with other means.
    pub fn counters(&self) -> Option<CableCounters> {
        match self {
            Joint::Cable(cable) => Some(cable.counters()),
            Joint::Netem { .. } => None,
        }
    }
}

fn cable(near: (&NetNs, &str), far: (&NetNs, &str), spec: &LinkSpec) -> anyhow::Result<Cable> {
    let segments = spec.takes_segments();
    let tap = |(netns, dev): (&NetNs, &str)| -> anyhow::Result<TapPort> {
        let port =
            TapPort::open(netns, &TapOptions { offloads: segments, ..TapOptions::new(dev) })?;
        let mut netlink = netns.netlink()?;
        let index = netlink.index_of(dev)?;
        set_txqueuelen(&mut netlink, index, TAP_QUEUE_FRAMES)?;
        Ok(port)
    };
    Ok(Cable::start(tap(near)?, tap(far)?, &spec.cable_options())?)
}

/// Joins the hosts through a bridge in a namespace of its own, netem at each way out of it.
fn netem(
    near: (&NetNs, &str),
    far: (&NetNs, &str),
    spec: &LinkSpec,
    name: &str,
) -> anyhow::Result<NetNs> {
    if [spec.there, spec.back].iter().any(|way| way.reorder > 0.0) {
        return Err(Skip("netem reorders by other rules than the lab's links".to_owned()).into());
    }
    let between = NetNs::create(name)?;
    let mut netlink = between.netlink()?;
    add_bridge(&mut netlink, "bridge")?;
    let bridge = netlink.index_of("bridge")?;
    netlink.set_up(bridge, true)?;
    for ((netns, dev), port, way) in [(near, "near", spec.back), (far, "far", spec.there)] {
        let pair = VethPair { name: port, peer: dev, peer_netns: Some(netns) };
        netlink.add_veth(&pair)?;
        let index = netlink.index_of(port)?;
        set_master(&mut netlink, index, bridge)?;
        if !spec.takes_segments() {
            // The hosts' own devices: what they send is cut before it gets here.
            let mut host = netns.netlink()?;
            let index = host.index_of(dev)?;
            set_gso_max_segs(&mut host, index, 1)?;
        }
        let place = Place { ifindex: index, parent: Handle::ROOT, handle: Handle::new(1, 0) };
        let qdisc = netem_options(&way, spec.seed);
        netlink.set_qdisc(Verb::Add, place, &qdisc).map_err(|error| match error.is_absent() {
            true => Skip("this kernel has no netem (the module sch_netem)".to_owned()).into(),
            false => anyhow::Error::from(error).context("cannot make the link"),
        })?;
        netlink.set_up(index, true)?;
    }
    Ok(between)
}

fn netem_options(way: &LinkOptions, seed: u64) -> Netem {
    // It counts packets where a link counts bytes: those of MTU size that the queue holds, and those on the
    // way.
    let packets = |rate: Rate| {
        let queue = way.queue.unwrap_or(Bytes(u64::MAX));
        let bytes = queue.0.saturating_add(rate.bytes_in(way.delay).0);
        u32::try_from(bytes / 1514 + 1).unwrap_or(NETEM_PACKETS).min(NETEM_PACKETS)
    };
    Netem {
        delay_ns: way.delay.0,
        rate_bit_s: way.rate.map(Rate::bit_s),
        limit_packets: way.rate.map_or(NETEM_PACKETS, packets),
        loss: way.loss,
        seed: Some(seed),
    }
}

fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
