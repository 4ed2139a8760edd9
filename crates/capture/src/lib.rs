//! Reads packet captures and says which losses a policer made: its rate, the depth of its bucket, and why
//! one should believe it.
//!
//! ```text
//! reader (pcap, pcapng) -> headers -> analyzer: flows -> counter, tcp: what is missing -> trace
//!                          end of a window -> fit: rate and depth -> verdict, group -> report
//! ```
//!
//! A capture is read once, as a stream, in bounded memory: [`reader::BLOCK_MAX`] for a block,
//! [`analyzer::FLOWS_MAX`] flows, [`analyzer::EVENTS_MAX`] remembered packets, [`trace::TRACE_MAX`] of one
//! flow. What does not fit is counted and said. Nothing here prints, and no input panics.

#![forbid(unsafe_code)]

pub mod analyzer;
pub mod counter;
pub mod delay;
pub mod fit;
pub mod flow;
pub mod group;
pub mod headers;
pub mod reader;
pub mod report;
pub mod round_trip;
pub mod series;
pub mod stamps;
pub mod tcp;
pub mod trace;
pub mod verdict;

pub use analyzer::{Analyzer, Options, analyze};
pub use reader::{CaptureError, Frame, Reader};
pub use report::{Estimate, FlowReport, GroupReport, Report};
pub use verdict::Verdict;
