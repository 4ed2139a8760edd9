//! By what the parts of a NIC know each other.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// When a packet's completion is given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Completions {
    /// When it leaves: backpressure. See [`crate::nic`].
    #[default]
    Deferred,
    /// When the shaper has it: for comparison.
    Immediate,
}

/// An aggregate of flows, on all shapers of a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Class {
    pub(crate) index: u32,
    /// Whose it is.
    pub(crate) nic: u64,
}

/// Counts a producer as there, until the last of its packets has left.
#[derive(Debug)]
pub(super) struct ProducerToken(pub(super) Arc<AtomicUsize>);

impl Drop for ProducerToken {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
