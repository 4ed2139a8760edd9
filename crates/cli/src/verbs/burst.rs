//! `tidegate burst`: what a burst size does, and which one a capture went through.

mod analyze;
mod size;

use std::process::ExitCode;

use anyhow::Result;

use crate::args::BurstVerb;

pub fn run(verb: &BurstVerb) -> Result<ExitCode> {
    match verb {
        BurstVerb::Size(args) => size::run(args),
        BurstVerb::Analyze(args) => analyze::run(args),
    }
}

/// A share as per cent.
fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}
