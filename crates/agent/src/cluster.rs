//! The API server of Kubernetes, as the agent asks it: by a child that may read its credentials and do
//! nothing else.

use std::{
    env, fs, io,
    os::{fd::BorrowedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use tidegate_host::pods::Pod;

use crate::{
    child::{Asker, Line},
    rights::{Identity, NOBODY},
};

/// The token of a pod's service account.
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";
/// The variables of a pod's environment that name the API server.
const SERVER: [&str; 2] = ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"];
/// The file of who is no pod, unless another is named.
const KUBECONFIG: &str = "KUBECONFIG";
/// The longest name of a node.
const MAX_NODE_BYTES: usize = 253;

/// The node whose pods are followed, and the credentials.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    pub node: String,
    /// None: the service account of the pod in which this runs, else what `KUBECONFIG` names.
    pub kubeconfig: Option<PathBuf>,
}

/// Whether a text can be the name of a node.
pub fn is_node(name: &str) -> bool {
    let is_its = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    (1..=MAX_NODE_BYTES).contains(&name.len()) && name.bytes().all(is_its)
}

/// That of this host, as kubelet names its node.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().to_lowercase()
}

/// It, if it is asked.
#[derive(Debug)]
pub struct Cluster {
    program: PathBuf,
    options: Option<ClusterOptions>,
    asker: Option<Asker>,
}

impl Cluster {
    /// Asks by `program agent-pods`; without options nobody.
    pub fn new(program: PathBuf, options: Option<ClusterOptions>) -> Cluster {
        Cluster { program, options, asker: None }
    }

    /// Starts the child if it is due; ends it if it is not asked for.
    pub fn keep(&mut self, asked: bool, now: Duration) -> Option<Line<Pod>> {
        let (Some(options), true) = (&self.options, asked) else {
            self.end();
            return None;
        };
        let asker = self.asker.get_or_insert_with(|| Asker::new(now));
        asker.keep(|| command(&self.program, options), now)
    }

    /// Readable when it has said something.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.asker.as_ref()?.fd()
    }

    /// How long there is nothing to start.
    pub fn timeout(&self, now: Duration) -> Option<Duration> {
        Some(self.asker.as_ref()?.due()?.saturating_sub(now))
    }

    /// The lines that have come.
    pub fn take(&mut self, now: Duration) -> Vec<Line<Pod>> {
        self.asker.as_mut().map(|asker| asker.take(now)).unwrap_or_default()
    }

    fn end(&mut self) {
        self.asker.take().into_iter().for_each(Asker::end);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.end();
    }
}

fn command(program: &Path, options: &ClusterOptions) -> io::Result<Command> {
    let in_pod = Path::new(TOKEN).exists().then(|| PathBuf::from(TOKEN));
    let environment = || env::var_os(KUBECONFIG).map(PathBuf::from);
    let named = options.kubeconfig.clone();
    let kubeconfig = named.or_else(|| if in_pod.is_some() { None } else { environment() });
    let who = match kubeconfig.as_deref().or(in_pod.as_deref()) {
        Some(file) => reader(file)?,
        None => Identity { uid: NOBODY, gid: NOBODY },
    };
    let mut command = Command::new(program);
    command.args(["agent-pods", &options.node, &who.uid.to_string(), &who.gid.to_string()]);
    command.args(kubeconfig).env_clear();
    command.envs(SERVER.into_iter().filter_map(|name| Some((name, env::var_os(name)?))));
    Ok(command)
}

/// The user who may read a file and may do least else: nobody, or its owner.
fn reader(file: &Path) -> io::Result<Identity> {
    // Not opened: the agent itself need not be able to read it.
    let found = fs::metadata(file).and_then(|meta| match meta.is_file() {
        true => Ok(meta),
        false => Err(io::Error::other("it is not a regular file")),
    });
    let meta = found.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.display())))?;
    Ok(match meta.mode() & 0o004 {
        0 => Identity { uid: meta.uid(), gid: meta.gid() },
        _ => Identity { uid: NOBODY, gid: NOBODY },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_child_is_whoever_may_read_its_credentials() {
        use std::os::unix::fs::PermissionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        let own = fs::metadata(file.path()).unwrap();
        let reads = |mode| {
            fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
            reader(file.path()).unwrap()
        };
        assert_eq!(reads(0o644), Identity { uid: NOBODY, gid: NOBODY });
        assert_eq!(reads(0o600), Identity { uid: own.uid(), gid: own.gid() });
        let none = reader(Path::new("/nowhere/config")).unwrap_err().to_string();
        assert!(none.starts_with("/nowhere/config: "), "{none}");
        let device = reader(Path::new("/dev/null")).unwrap_err().to_string();
        assert_eq!(device, "/dev/null: it is not a regular file");
    }

    #[test]
    fn names_of_nodes_go_into_a_path_as_they_are() {
        assert!(is_node("worker-1.example.org") && is_node("a"));
        for none in ["", "Worker", "a b", "a/b", "a%20", "a&b", &"x".repeat(254)] {
            assert!(!is_node(none), "{none}");
        }
    }
}
