//! The verbs, one a file.

use std::path::Path;

use tidegate_host::{
    host::{Host, LockedHost},
    key::nearest,
};
use tidegate_sys::{preflight::PreflightError, store::StoreError};

use crate::refusal::{UsageError, warn};

pub mod agent;
pub mod burst;
pub mod daemon;
pub mod detach;
pub mod doctor;
pub mod explain;
pub mod generate;
pub mod keepers;
pub mod limit;
pub mod monitor;
pub mod nic;
pub mod run;
pub mod spec;
pub mod status;
pub mod top;
pub mod web;

/// The host; what a killed command has left broken is said.
fn open(store: &Path) -> Result<Host, PreflightError> {
    let host = Host::open(store)?;
    host.problems().iter().for_each(|problem| warn(problem));
    Ok(host)
}

/// Lets other writers in, and says what went wrong meanwhile.
fn close(host: LockedHost) {
    host.problems().iter().for_each(|problem| warn(problem));
    host.close();
}

/// There is no limit of this name; the error names the one that was probably meant.
fn missing(host: &Host, name: &str) -> anyhow::Error {
    let names = host.store().names().unwrap_or_default();
    match nearest(name, names.iter().map(String::as_str)) {
        Some(other) => {
            UsageError(format!("there is no limit `{name}`; did you mean `{other}`?")).into()
        }
        None => StoreError::Missing(name.to_owned()).into(),
    }
}
