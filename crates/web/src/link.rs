//! What the server asks the reader, and how that answers: a line of JSON each way. An answer's line is its
//! head; its body is a second line, which the server passes on as it is.

use serde::{Deserialize, Serialize};
use tidegate_agent::status::Warnings;

/// The longest request that is read.
pub const REQUEST_MAX: u64 = 4096;
/// The longest answer that is read.
pub const ANSWER_MAX: u64 = 64 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// All that `tidegate status --json` says.
    Status,
    /// The flows of a limit, and what holds them back. Takes as long as [`SAMPLE`](crate::reader::SAMPLE).
    Limit(String),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Head {
    Status(StatusHead),
    /// Of the limit of this name.
    Limit(String),
    /// Why there is no answer about the limit of this name.
    Refused {
        limit: String,
        why: String,
    },
    /// Why the limits could not be read.
    Failed(String),
}

/// What belongs to a reading.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct StatusHead {
    /// When it was taken: nanoseconds since 1970.
    pub unix_ns: u64,
    /// ... and by the clock that no one sets.
    pub monotonic_ns: u64,
    /// How long it took.
    pub took_ns: u64,
    pub warnings: Warnings,
    /// The daemon of a fleet has died.
    pub fleet_died: bool,
    /// An agent is missed that has not run since the host started.
    pub agent_missed: bool,
}
