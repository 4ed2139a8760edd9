//! The software NIC: what stands between the ports of virtual machines or containers and the uplink, and
//! shapes all that passes (Carousel: Saeed et al., SIGCOMM 2017).
//!
//! - [`pool`]: all the memory that packets will ever have, taken once.
//! - [`packet`]: a frame in a buffer, with its offload metadata, its size on the wire and its flow.
//! - [`headers`]: where a frame's headers are.
//! - [`vnet`]: the offload metadata.
//! - [`checksum`], [`segment`]: what a device does that has offloads, for those that have not.
//! - [`port`]: where frames come from and go to: TAP, AF_XDP, memory.
//! - [`lane`]: one direction between two ports: flows ([`flow_table`]), what waits ([`backlog`], [`ecn`]) and
//!   the shaper; [`relay`]: the threads that run lanes between ports, which come from a [`source`].
//! - [`nic`]: shapers in threads of their own, and what applications hand them packets with.
//! - `device` (feature `smoltcp`): a TCP/IP stack in user space on a flow of the NIC.
//! - [`aggregate`]: one rate for flows on several shapers.
//! - [`cable`]: two ports joined by a link with rate, delay, loss.
//! - [`waiter`]: what a loop does when it has nothing to do.
//!
//! Frames go between threads over rings of the crate `rtrb`: bounded, wait-free, one producer and one
//! consumer. A [`Packet`] may be dropped in any thread; its buffer finds its way home.

#![warn(missing_docs)]

pub mod aggregate;
pub mod backlog;
pub mod buffer;
pub mod cable;
pub mod checksum;
mod counters;
#[cfg(feature = "smoltcp")]
pub mod device;
pub mod ecn;
pub mod flow_table;
pub mod headers;
pub mod lane;
pub mod nic;
pub mod packet;
pub mod pool;
pub mod port;
pub mod relay;
pub mod segment;
pub mod source;
pub mod vnet;
pub mod waiter;

pub use cable::{Cable, CableOptions};
pub use headers::Headers;
pub use nic::{Nic, NicOptions, Producer};
pub use packet::Packet;
pub use pool::{PacketPool, PoolError, PoolSize};
pub use port::{Port, PortCounters, PortError};
pub use vnet::VnetHeader;
pub use waiter::{Waiter, Waker};
