//! stub for now
use std::{path::Path, process::ExitCode};
pub fn run(_: &Path, _: &crate::args::TopArgs) -> anyhow::Result<ExitCode> {
    Ok(ExitCode::SUCCESS)
}
