//! A real SSH server for what scp and rsync send: OpenSSH's, with keys and a configuration of its own.
//!
//! It sees a file system of its own in two places: `/run`, where it wants a directory, and `/etc/shadow`,
//! where root may be locked on the host. Nothing of the host is changed.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;
use tempfile::TempDir;

use crate::{
    host,
    stop::Skip,
    testbed::{self, Child, Site, wait_for_listener},
};

const HOST_KEY: &str = "host";
const USER_KEY: &str = "user";
/// How long making a key may take.
const MAKE: Duration = Duration::from_secs(60);
/// Its words: the directory of the server and the program.
const SCRIPT: &str = "mount --bind \"$0/shadow\" /etc/shadow && mount -t tmpfs none /run && \
                      mkdir /run/sshd && exec \"$1\" -D -e -f \"$0/config\"";

/// A running server. Dropping it ends it and removes its keys.
#[derive(Debug)]
pub struct SshServer {
    // Before the directory that it uses.
    _server: Child,
    directory: TempDir,
}

impl SshServer {
    /// The path of sshd.
    ///
    /// # Errors
    ///
    /// [`Skip`] where it is missing.
    pub fn program() -> Result<PathBuf, Skip> {
        // Users may not have the directories of administrators in PATH.
        let programs = ["sshd", "/usr/sbin/sshd"];
        let found = programs.iter().find_map(|name| host::which(Path::new(name)));
        found.ok_or_else(|| Skip("needs `sshd`, which is not in PATH: install it".to_owned()))
    }

    /// Starts it at `site`; root may log in with the key of [`options`](Self::options).
    ///
    /// # Errors
    ///
    /// [`Skip`] where sshd is missing.
    pub fn start<'a>(site: impl Into<Site<'a>>, address: SocketAddr) -> anyhow::Result<SshServer> {
        let site = site.into();
        let sshd = SshServer::program()?;
        let directory = tempfile::Builder::new().prefix("tidegate-sshd-").tempdir()?;
        let at = directory.path();
        for key in [HOST_KEY, USER_KEY] {
            let mut make = Command::new("ssh-keygen");
            make.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(at.join(key));
            Child::spawn(make)?.finish(MAKE)?;
        }
        fs::write(at.join("shadow"), "root:*:1::::::\n")?;
        fs::write(at.join("config"), config(address, at))?;
        let mut command = testbed::command(site, "unshare")?;
        command.args(["--mount", "sh", "-c", SCRIPT]).arg(at).arg(sshd);
        let mut server = Child::spawn(command)?;
        wait_for_listener(site.netns, address.port(), &mut server).context("sshd")?;
        Ok(SshServer { _server: server, directory })
    }

    /// What ssh and scp need to log in: no file of the user's is read or written.
    pub fn options(&self) -> Vec<String> {
        let key = self.directory.path().join(USER_KEY).display().to_string();
        let set = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"];
        let set = set.iter().flat_map(|option| ["-o".to_owned(), (*option).to_owned()]);
        ["-F", "/dev/null", "-i", &key].map(str::to_owned).into_iter().chain(set).collect()
    }
}

fn config(address: SocketAddr, at: &Path) -> String {
    let at = at.display();
    format!(
        "ListenAddress {address}\n\
         HostKey {at}/{HOST_KEY}\n\
         AuthorizedKeysFile {at}/{USER_KEY}.pub\n\
         StrictModes no\n\
         UsePAM no\n\
         PidFile none\n\
         MaxStartups 100\n\
         Subsystem sftp internal-sftp\n"
    )
}
