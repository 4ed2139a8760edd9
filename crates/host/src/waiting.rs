//! Whose packets wait in the queues of limits of schemes `htb`, `dem` and `spring`, as data that serializes.
//!
//! The packets are looked at when somebody asks ([`tidegate_sys::waiting`]). A reading is of one moment.

use std::net::SocketAddr;

use serde::Serialize;
use tidegate_core::{Direction, Scope};
use tidegate_sys::{
    limit::LimitError,
    store::PinnedLimit,
    waiting::{Count, Waiting},
};

use crate::{explain::flow::Flow, host, plan::State};

/// The queues of a limit; none of a direction that is not limited, or of which nobody can tell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Queues {
    /// From the workload.
    pub egress: Option<Queue>,
    /// To the workload.
    pub ingress: Option<Queue>,
}

/// What waits in one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Queue {
    /// Packets as the stack sees them: one that is yet to be segmented counts once.
    pub packets: u64,
    /// Their bytes on the wire.
    pub bytes: u64,
    /// By flow, who has most bytes first.
    pub flows: Vec<FlowQueue>,
    /// Packets of no flow: what is no IP, and flows beyond the longest 1024.
    pub other_packets: u64,
    pub other_bytes: u64,
    /// Nothing that waited was missed while the queue changed.
    pub whole: bool,
}

/// What waits of a flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FlowQueue {
    /// `tcp`, `udp`, or a number.
    pub protocol: String,
    /// Who sent it; port 0 where there are none, and of fragments.
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub packets: u64,
    /// Bytes on the wire.
    pub bytes: u64,
}

/// A flow that passes a limit with a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Passing {
    pub limit: String,
    /// Its device or cgroup.
    #[serde(flatten, serialize_with = "crate::status::scope")]
    pub scope: Scope,
    pub scheme: &'static str,
    /// `egress` or `ingress`, of the workload.
    pub direction: &'static str,
    /// What waits of it.
    #[serde(flatten)]
    pub queue: FlowQueue,
}

impl Queues {
    /// Looks at those of a limit; `None` if its scheme has no queue.
    ///
    /// # Errors
    /// [`LimitError`] when the kernel refuses to look.
    pub fn read(pinned: &PinnedLimit) -> Result<Option<Queues>, LimitError> {
        if !pinned.limit.scheme().info().has_qdisc {
            return Ok(None);
        }
        let look = |direction| match pinned.limit.rate(direction) {
            Some(_) => pinned.maps().waiting(direction).map(|queue| queue.map(Queue::from)),
            None => Ok(None),
        };
        Ok(Some(Queues { egress: look(Direction::Egress)?, ingress: look(Direction::Ingress)? }))
    }

    /// Those of directions that could be looked at, with their names.
    pub fn directions(&self) -> impl Iterator<Item = (&'static str, &Queue)> {
        let egress = self.egress.iter().map(|queue| ("egress", queue));
        egress.chain(self.ingress.iter().map(|queue| ("ingress", queue)))
    }
}

impl From<Waiting> for Queue {
    fn from(waiting: Waiting) -> Queue {
        let Waiting { all, flows, other, whole } = waiting;
        let flows = flows.into_iter().map(|(flow, Count { packets, bytes })| FlowQueue {
            protocol: flow.protocol_name().map_or_else(|| flow.protocol.to_string(), str::to_owned),
            from: flow.from,
            to: flow.to,
            packets,
            bytes,
        });
        Queue {
            packets: all.packets,
            bytes: all.bytes,
            flows: flows.collect(),
            other_packets: other.packets,
            other_bytes: other.bytes,
            whole,
        }
    }
}

/// Where a flow passes limits that are enforced: where something of it waits now, and where `dem` or `spring`
/// know the connection.
///
/// # Errors
/// [`LimitError`] when the kernel refuses to look.
pub fn passing(limits: &[PinnedLimit], flow: &Flow) -> Result<Vec<Passing>, LimitError> {
    let mut found = Vec::new();
    for pinned in limits {
        let scheme = pinned.limit.scheme();
        let present = host::present(pinned);
        if !scheme.info().has_qdisc || present.state != State::InForce {
            continue;
        }
        for direction in Direction::BOTH {
            if pinned.limit.rate(direction).is_none() {
                continue;
            }
            let waiting = pinned.maps().waiting(direction)?.map(Queue::from);
            let mut queues = waiting.map(|queue| queue.flows).unwrap_or_default();
            queues.retain(|queue| flow.is(queue.from, queue.to));
            for (from, to) in pinned.maps().connections(direction, |a, b| flow.is(a, b)) {
                if !queues.iter().any(|queue| (queue.from, queue.to) == (from, to)) {
                    let protocol = "tcp".to_owned();
                    queues.push(FlowQueue { protocol, from, to, packets: 0, bytes: 0 });
                }
            }
            found.extend(queues.into_iter().map(|queue| Passing {
                limit: present.name.clone(),
                scope: present.scope.clone(),
                scheme: scheme.name(),
                direction: direction.name(),
                queue,
            }));
        }
    }
    Ok(found)
}
