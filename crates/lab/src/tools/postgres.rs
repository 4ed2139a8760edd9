//! A real PostgreSQL with the tables of pgbench at scale 1. It runs as the user `postgres`, because it
//! refuses to run as root.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use tempfile::TempDir;
use tidegate_sys::net::NetNs;

use super::load::DATABASE;
use crate::{
    host,
    stop::Skip,
    testbed::{self, Child, Site, wait_for_listener},
};

/// Where Debian keeps what is not for users.
const VERSIONS: &str = "/usr/lib/postgresql";
const USER: &str = "postgres";
const CONNECTIONS_MAX: u32 = 600;
/// How long making the files may take.
const MAKE: Duration = Duration::from_secs(120);
const LOCAL: &str = "127.0.0.1:5432";

/// The files of a server. Dropping it removes them.
#[derive(Debug)]
pub struct Cluster {
    programs: PathBuf,
    directory: TempDir,
}

/// A running server. Dropping it ends it.
#[derive(Debug)]
pub struct PostgresServer {
    _server: Child,
}

impl Cluster {
    /// Makes the files and fills the tables; the server runs on `host` meanwhile, on its loopback.
    ///
    /// # Errors
    ///
    /// [`Skip`] where PostgreSQL or its user is missing.
    pub fn make(host: &NetNs) -> anyhow::Result<Cluster> {
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let missing = |what: &str| Skip(format!("needs {what}: install postgresql"));
        let (uid, gid) = ids_of(&passwd, USER).ok_or_else(|| missing("the user postgres"))?;
        let programs = programs().ok_or_else(|| missing("PostgreSQL and pgbench"))?;
        let directory = tempfile::Builder::new().prefix("tidegate-postgres-").tempdir()?;
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o711))?;
        let cluster = Cluster { programs, directory };
        fs::create_dir(cluster.data())?;
        chown(cluster.data(), Some(uid), Some(gid))?;
        let mut init = cluster.command(host.into(), "initdb")?;
        init.args(["--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C", "-D"]);
        init.arg(cluster.data());
        Child::spawn(init)?.finish(MAKE)?;
        // Only hosts of the testbed can reach it.
        fs::write(cluster.data().join("pg_hba.conf"), "host all all all trust\n")?;
        let local: SocketAddr = LOCAL.parse()?;
        let _server = cluster.start(host.into(), local)?;
        let mut fill = cluster.command(host.into(), "pgbench")?;
        fill.args(["--initialize", "--quiet", "--host", &local.ip().to_string(), DATABASE]);
        Child::spawn(fill)?.finish(MAKE)?;
        Ok(cluster)
    }

    /// Starts the server at `site`, in the foreground. Nothing is to survive it, so nothing is synced.
    pub fn start(&self, site: Site<'_>, address: SocketAddr) -> anyhow::Result<PostgresServer> {
        let mut command = self.command(site, "postgres")?;
        command.arg("-D").arg(self.data()).args(["-p", &address.port().to_string()]);
        let settings = [
            format!("listen_addresses={}", address.ip()),
            format!("max_connections={CONNECTIONS_MAX}"),
            "unix_socket_directories=".to_owned(),
            "fsync=off".to_owned(),
        ];
        command.args(settings.iter().flat_map(|setting| ["-c", setting]));
        let mut server = Child::spawn(command)?;
        wait_for_listener(site.netns, address.port(), &mut server)?;
        Ok(PostgresServer { _server: server })
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// A program of PostgreSQL as its user, who loses the signal of a parent that dies and gets it again.
    fn command(&self, site: Site<'_>, program: &str) -> anyhow::Result<Command> {
        let mut command = testbed::command(site, "setpriv")?;
        let user = [format!("--reuid={USER}"), format!("--regid={USER}")];
        command.args(user).args(["--clear-groups", "--pdeathsig=INT", "--"]);
        command.arg(self.programs.join(program)).current_dir("/");
        Ok(command)
    }
}

/// The directory of `initdb` and the others: that of PATH, or Debian's newest.
fn programs() -> Option<PathBuf> {
    let all = |dir: &Path| {
        ["initdb", "postgres", "pgbench"].iter().all(|name| host::which(&dir.join(name)).is_some())
    };
    let on_path = host::which("initdb".as_ref()).and_then(|path| Some(path.parent()?.to_owned()));
    let versions = fs::read_dir(VERSIONS).into_iter().flatten().flatten();
    let mut versions: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    versions.sort();
    on_path.into_iter().chain(versions.into_iter().rev()).find(|dir| all(dir))
}

/// The ids of a user and of its group, from the text of `/etc/passwd`.
fn ids_of(passwd: &str, user: &str) -> Option<(u32, u32)> {
    let mut lines = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let fields = lines.find(|fields| fields.first() == Some(&user))?;
    Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_found_by_name() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\npostgres:x:101:104:,,,:/var:/bin/bash\n";
        assert_eq!(ids_of(passwd, "postgres"), Some((101, 104)));
        assert_eq!(ids_of(passwd, "post"), None);
        assert_eq!(ids_of("postgres:x\n", "postgres"), None);
    }
}
