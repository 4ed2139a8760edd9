//! Sums over the fleet: the demand of all members, the sum of their weights.
//!
//! | | exact | a message | what loss does |
//! |:--|:--|:--|:--|
//! | [`Vector`] | yes | entries that changed | late, never wrong: a version is as good as the next |
//! | [`PushSum`] | in the limit | 16 bytes | takes mass away; gaps are seen and made up for, roughly |
//!
//! The daemon uses the vector, because it is exact. Push-sum is what was published; the simulation compares
//! with it. The caller knows the time, draws the peers and carries the messages.

pub mod push_sum;
pub mod vector;

pub use push_sum::{PushSum, SENDERS_MAX};
pub use vector::{REPEAT, TELL_EXTRA, VECTOR_MAX, Vector};
