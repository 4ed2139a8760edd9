//! The algorithms of Tidegate and their types.
//!
//! Nothing here knows an operating system: no I/O, no clock, no source of randomness, no threads, no
//! `unsafe`. Time ([`Nanos`]), random bits and packets are arguments, so the same code runs in unit tests, in
//! simulation and in production. Each file is one algorithm, under the name that the field uses.
//!
//! The code that runs in the kernel is C, in the pure headers of `bpf/`. The Rust here is its model, and a
//! property test in `tidegate-sys` compares the two.
//!
//! - [`units`]: rates, byte counts and times, and the parser for a user's text.
//! - [`edt`]: departure times, a schedule for each flow (the `edt` scheme).
//! - [`fair_share`]: one rate for all flows of a limit (the `pace` scheme).
//! - [`admission`]: when a new connection may begin in a limit that is in use (`pace`).
//! - [`htb`]: the settings of the kernel's HTB (the `htb` scheme).
//! - [`choice`]: which scheme a limit gets that names none.
//! - [`class`]: limits inside a limit: guarantees, weights, borrowing.
//! - [`token_bucket`], [`meter`]: policing: pass or drop, green, yellow or red (RFC 2697, 2698, 4115).
//! - [`police`]: the action for each colour; [`fair_police`]: equal parts for a policer's flows.
//! - [`exempt`]: exemptions from a limit.
//! - [`burst`]: how deep a policer's bucket should be, and what it passes.
//! - [`receive_window`]: the fair share as a window, for remote senders (`pace` on ingress).
//! - [`dem`], [`spring`]: how a shaper's queue slows senders down by the ACKs that come back to them.
//! - [`wait`]: how long a packet waits in a shaper; [`waiting`]: the flow of a waiting packet.
//! - [`virtual_queue`]: the limiter without a queue (the `nrm` scheme).
//! - [`shaper`]: Carousel (the `carousel` scheme): timestampers ([`stamp`]) in front of a timing [`wheel`]
//!   over a [`slot_set`], backpressure by deferred [`completion`], aggregates divided by [`water_fill`].
//! - [`codel`]: early drops from queues of senders that react only to losses.
//! - [`link`]: delay, rate, queue, loss and reordering as one more timestamper.
//! - [`fleet`]: one limit over many hosts.
//! - [`gate`]: what a new cgroup may send until it is decided which limits hold it.
//! - [`scheme`]: the names of the schemes.
//! - [`scope`]: what a limit applies to.
//! - [`verdict`]: the verdicts of algorithms on packets.
//!
//! This crate must not grow: sockets, files, clocks, maps, async, or a policy that only one host needs.

#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

#[cfg(test)]
extern crate std;
// The model of the wheel is compiled here and by the fuzzer, from one file.
#[cfg(test)]
extern crate self as tidegate_core;

pub mod admission;
pub mod burst;
pub mod choice;
pub mod class;
pub mod codel;
pub mod completion;
pub mod dem;
pub mod edt;
pub mod exempt;
pub mod fair_police;
pub mod fair_share;
pub mod fleet;
pub mod flow_count;
pub mod gate;
pub mod htb;
pub mod link;
pub mod meter;
pub mod police;
pub mod prefixes;
pub mod queue_options;
pub mod receive_window;
pub mod scheme;
pub mod scope;
pub mod selector;
pub mod shaper;
pub mod slot_set;
pub mod spring;
pub mod stamp;
pub mod token_bucket;
pub mod units;
pub mod unpaced;
pub mod verdict;
pub mod virtual_queue;
pub mod wait;
pub mod waiting;
pub mod water_fill;
pub mod wheel;

pub use class::Class;
pub use meter::{Colour, Meter};
pub use scheme::Scheme;
pub use scope::Scope;
pub use selector::{Selector, SelectorKind};
pub use token_bucket::TokenBucket;
pub use units::{Bytes, Nanos, Rate, Span};
pub use verdict::{DropReason, Verdict};
pub use virtual_queue::{Direction, Packet, Transport, VirtualQueue, VirtualQueueConfig};

/// FNV-1a of 64 bits: the same on every host and in every version.
pub fn fnv(bytes: impl Iterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.fold(0xcbf2_9ce4_8422_2325, step)
}
