//! `rclone serve`: the server for what rclone and restic send.

use std::{net::SocketAddr, path::Path};

use crate::testbed::{self, Child, Site, wait_for_listener};

/// What it speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Webdav,
    /// That of restic's REST servers.
    Restic,
}

/// Serves a directory at `site` until the child is dropped.
pub fn serve<'a>(
    site: impl Into<Site<'a>>,
    protocol: Protocol,
    directory: &Path,
    address: SocketAddr,
) -> anyhow::Result<Child> {
    let site = site.into();
    let word = match protocol {
        Protocol::Webdav => "webdav",
        Protocol::Restic => "restic",
    };
    let mut command = testbed::command(site, "rclone")?;
    // No file of the user's.
    command.args(["--config", "", "serve", word, "--addr", &address.to_string()]);
    if protocol == Protocol::Restic {
        // It may serve a repository that was there before, and is no more.
        command.arg("--cache-objects=false");
    }
    command.arg(directory);
    let mut server = Child::spawn(command)?;
    wait_for_listener(site.netns, address.port(), &mut server)?;
    Ok(server)
}
