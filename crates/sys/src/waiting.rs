//! Whose packets wait in the queue of a limiter, flow by flow, at one moment.
//!
//! `bpf/waiting/waiting.bpf.c` looks at the packets themselves, when somebody asks: it costs no packet
//! anything, and cannot drift. Queues are a FIFO, or an `fq_codel` of a kernel that says how it keeps its own
//! (BTF of the module).

use std::{
    mem::MaybeUninit,
    net::{Ipv6Addr, SocketAddr},
};

use bytemuck::bytes_of;
use libbpf_rs::{MapCore, MapFlags, OpenObject};
use tidegate_core::waiting::Flow;

use crate::{
    backlog::{Backlog, ask},
    bpf::{load_skel, map_error, open_skel, read},
    limit::LimitError,
    shared::{WaitingFlow, WaitingQuery},
    skel,
};

/// Packets, and their bytes on the wire.
pub use crate::shared::Count;

/// How often a queue is looked at that changes under the look.
const LOOKS_MAX: usize = 8;
const MAP: &str = "waiting";

/// What waits in a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    pub all: Count,
    /// By flow, who has most bytes first; 1024 flows at most.
    pub flows: Vec<(Flow, Count)>,
    /// Of no flow: what is no IP, and of flows beyond those.
    pub other: Count,
    /// Nothing that waited was missed; a queue may change faster than it can be looked at.
    pub whole: bool,
}

impl From<WaitingFlow> for Flow {
    fn from(key: WaitingFlow) -> Flow {
        let end = |ip: [u8; 16], port| {
            SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16::from_be_bytes(port))
        };
        Flow {
            protocol: key.protocol,
            from: end(key.from, key.from_port),
            to: end(key.to, key.to_port),
        }
    }
}

/// Looks at what waits; `None` if the queue is gone, or of a kind that the kernel does not explain.
///
/// # Errors
/// [`LimitError`] when the kernel refuses the program.
pub fn look(backlog: &Backlog) -> Result<Option<Waiting>, LimitError> {
    let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let open = open_skel::<skel::waiting::WaitingSkelBuilder>(&mut storage, MAP)?;
    let object = load_skel(open, MAP)?;
    let flows = &object.maps.waiting;
    let mut query = WaitingQuery::default();
    for _ in 0..LOOKS_MAX {
        for key in flows.keys().collect::<Vec<_>>() {
            flows.delete(&key).map_err(map_error(MAP))?;
        }
        query = WaitingQuery { at: *backlog, ..WaitingQuery::default() };
        ask(&object.progs.look, MAP, &mut query)?;
        if query.torn == 0 {
            break;
        }
    }
    if query.known == 0 {
        return Ok(None);
    }
    let mut list = Vec::new();
    for key in flows.keys() {
        let key: WaitingFlow = read(&key, MAP)?;
        let count = flows.lookup(bytes_of(&key), MapFlags::ANY).map_err(map_error(MAP))?;
        list.push((Flow::from(key), read(&count.unwrap_or_default(), MAP)?));
    }
    list.sort_by_key(|(flow, count): &(Flow, Count)| (std::cmp::Reverse(count.bytes), *flow));
    let WaitingQuery { all, other, torn, .. } = query;
    Ok(Some(Waiting { all, flows: list, other, whole: torn == 0 }))
}

#[cfg(test)]
mod tests;
