//! Tidegate in seeded virtual time.
//!
//! `tidegate-core` takes time, randomness and messages as arguments, so it runs here unchanged. A run is a
//! function of its options, of which one is a seed: what fails once fails again.
//!
//! - [`queue`]: what happens next.
//! - [`random`]: the one source of chance.
//! - [`net`]: what becomes of a message: loss, delay, duplicates, reordering, cuts.
//! - [`clock`]: clocks that start anywhere and run a little wrong.
//! - [`tcp`]: a greedy TCP sender, NewReno with SACK.
//! - [`gate`]: what meets the packets: a bucket, a random drop, a queue that shapes.
//! - [`world`]: hosts with limiters and flows, packet by packet.
//! - [`faults`]: members of `share` without packets, and everything that can go wrong with them.
//! - [`measure`]: Jain's index, rates in windows.
//!
//! It is no network simulator: paths have a delay and no bottleneck but the limiters, and acknowledgements
//! are never lost.

pub mod clock;
pub mod faults;
pub mod gate;
pub mod measure;
pub mod net;
pub mod queue;
pub mod random;
pub mod tcp;
pub mod world;
