//! A real Redis, with the one key that the load asks for.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use super::load::set_request;
use crate::testbed::{self, Child, Site, wait_for_listener};

/// How long it may take to answer the first command.
const ANSWER: Duration = Duration::from_secs(30);

/// A running redis-server, with a directory of its own. Dropping it ends it and removes the directory.
#[derive(Debug)]
pub struct RedisServer {
    // Before the directory that it uses.
    _server: Child,
    _directory: TempDir,
}

impl RedisServer {
    /// Starts redis-server at `site`, in the foreground and without files.
    pub fn start<'a>(site: impl Into<Site<'a>>, address: SocketAddr) -> anyhow::Result<Self> {
        let site = site.into();
        let directory = tempfile::Builder::new().prefix("tidegate-redis-").tempdir()?;
        let mut command = testbed::command(site, "redis-server")?;
        command.arg("--port").arg(address.port().to_string());
        command.arg("--bind").arg(address.ip().to_string());
        command.args(["--daemonize", "no", "--protected-mode", "no", "--save", "", "--dir"]);
        command.arg(directory.path());
        let mut server = Child::spawn(command)?;
        wait_for_listener(site.netns, address.port(), &mut server)?;
        // From its own host, whose loopback no limit of a device holds up.
        let set = || -> anyhow::Result<()> {
            let mut stream = TcpStream::connect_timeout(&address, ANSWER)?;
            stream.set_read_timeout(Some(ANSWER))?;
            stream.write_all(&set_request())?;
            let mut answer = [0; 5];
            stream.read_exact(&mut answer)?;
            ensure!(&answer == b"+OK\r\n", "it says {:?}", String::from_utf8_lossy(&answer));
            Ok(())
        };
        site.netns.run(set)?.context("redis-server takes no key")?;
        Ok(Self { _server: server, _directory: directory })
    }
}
