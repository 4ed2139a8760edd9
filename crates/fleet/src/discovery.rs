//! Addresses of peers: from names, a Redis, an etcd. None is needed, and none is trusted: it says where to
//! knock, and who opens shows a key.
//!
//! Each source is asked by a task of its own, again and again: every [`LOOK`] while it answers, with
//! a growing wait while it does not. What it gave last stays good meanwhile, so a registry that is away costs
//! nothing but news. In a registry a node enters itself for [`ENTRY_LASTS`].

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use tokio::{
    net::lookup_host,
    sync::mpsc,
    task::{JoinHandle, JoinSet, spawn_local},
    time,
};

use tidegate_host::fleet::{FleetSpec, PORT};

pub mod etcd;
pub mod http;
pub mod redis;
pub mod registry;

use registry::Registry;

/// How often a source is asked.
pub const LOOK: Duration = Duration::from_secs(10);
/// An entry in a registry is gone after so long.
pub const ENTRY_LASTS: Duration = Duration::from_secs(40);
/// A source must have answered within.
const PATIENCE: Duration = Duration::from_secs(5);
/// A name must have been resolved within, so that others of the source count all the same.
const RESOLVE_PATIENCE: Duration = Duration::from_secs(4);
/// The first wait after a failure, and the longest.
pub const WAIT: Duration = Duration::from_secs(1);
const WAIT_MAX: Duration = Duration::from_secs(60);
/// The most entries that are read of a source.
pub const ENTRIES_MAX: usize = 1_024;
/// News of sources that wait.
const NEWS_MAX: usize = 16;

/// Why a source cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Late,
    #[error("cannot be reached: {0}")]
    Io(#[from] io::Error),
    #[error("does not resolve: {0}")]
    Names(String),
    /// A file, or whom to trust.
    #[error("cannot be reached over TLS: {0}")]
    Tls(String),
    #[error("refuses: {0}")]
    Refused(String),
    #[error("answers something else than {0}")]
    Protocol(&'static str),
}

/// What this node enters in a registry.
#[derive(Debug, Clone)]
pub struct Entry {
    pub cluster: String,
    pub node: String,
    /// Where others reach it.
    pub addr: SocketAddr,
}

/// Where peers are found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Names or addresses of the file.
    Peers(Vec<String>),
    /// A name whose addresses are nodes.
    Dns(String),
    Redis(Registry),
    Etcd(Registry),
}

#[derive(Debug)]
pub struct News {
    /// Which: `peers`, `dns`, `redis` or `etcd`.
    pub source: &'static str,
    /// Its name or address, for people.
    pub which: String,
    /// What it found, or why nothing; and after which wait it is asked again.
    pub found: Result<Found, SourceError>,
    /// ... in so long.
    pub again: Duration,
}

/// Addresses of a source.
#[derive(Debug, Default)]
pub struct Found {
    pub addresses: Vec<SocketAddr>,
    /// Names that could not be resolved, and why: the others are good all the same.
    pub failed: Option<SourceError>,
}

impl From<Vec<SocketAddr>> for Found {
    fn from(addresses: Vec<SocketAddr>) -> Found {
        Found { addresses, failed: None }
    }
}

impl Source {
    pub fn of(fleet: &FleetSpec) -> Vec<Source> {
        let mut sources = Vec::new();
        if !fleet.peers.is_empty() {
            sources.push(Source::Peers(fleet.peers.clone()));
        }
        sources.extend(fleet.dns.clone().map(Source::Dns));
        let registry = |url| Registry { url, tls: fleet.tls.clone() };
        sources.extend(fleet.redis.clone().map(registry).map(Source::Redis));
        sources.extend(fleet.etcd.clone().map(registry).map(Source::Etcd));
        sources
    }

    /// `peers`, `dns`, `redis` or `etcd`.
    pub fn kind(&self) -> &'static str {
        match self {
            Source::Peers(_) => "peers",
            Source::Dns(_) => "dns",
            Source::Redis(_) => "redis",
            Source::Etcd(_) => "etcd",
        }
    }

    /// For people; without a password.
    pub fn which(&self) -> String {
        match self {
            Source::Peers(_) => "peers of [fleet]".to_owned(),
            Source::Dns(name) => format!("DNS name {name}"),
            Source::Redis(Registry { url, .. }) => format!("Redis at {url}"),
            Source::Etcd(Registry { url, .. }) => format!("etcd at {url}"),
        }
    }

    /// Enters the node, where there are entries, and lists all.
    ///
    /// # Errors
    /// [`SourceError`] if it has found nothing at all.
    pub async fn look(&self, own: &Entry) -> Result<Found, SourceError> {
        let look = async {
            match self {
                Source::Peers(names) => {
                    let found = resolve_all(names).await;
                    match found.failed {
                        Some(failed) if found.addresses.is_empty() => Err(failed),
                        failed => Ok(Found { failed, ..found }),
                    }
                }
                Source::Dns(name) => Ok(resolve(name).await?.into()),
                Source::Redis(registry) => redis::look(registry, own).await.map(Found::from),
                Source::Etcd(registry) => {
                    etcd::look(&registry.connector().await?, own).await.map(Found::from)
                }
            }
        };
        time::timeout(PATIENCE, look).await.unwrap_or(Err(SourceError::Late))
    }

    /// Takes the node's entry out, where there is one.
    ///
    /// # Errors
    /// [`SourceError`]; the entry ends by itself.
    pub async fn withdraw(&self, own: &Entry) -> Result<(), SourceError> {
        let withdraw = async {
            match self {
                Source::Peers(_) | Source::Dns(_) => Ok(()),
                Source::Redis(registry) => redis::withdraw(registry, own).await,
                Source::Etcd(registry) => etcd::withdraw(&registry.connector().await?, own).await,
            }
        };
        time::timeout(PATIENCE / 5, withdraw).await.unwrap_or(Err(SourceError::Late))
    }

    /// Asks for ever; ends when nobody listens any more.
    pub async fn run(self, own: Entry, tell: mpsc::Sender<News>) {
        let mut wait = WAIT;
        loop {
            let found = self.look(&own).await;
            let again = if found.is_ok() { LOOK } else { wait };
            wait = if found.is_ok() { WAIT } else { longer(wait) };
            let news = News { source: self.kind(), which: self.which(), found, again };
            if tell.send(news).await.is_err() {
                return;
            }
            time::sleep(again).await;
        }
    }
}

/// The sources that are asked, each by a task on this thread. The tasks end with it, and so does news that
/// nobody has taken yet.
#[derive(Debug)]
pub struct Sources {
    list: Vec<Source>,
    tasks: Vec<JoinHandle<()>>,
    news: mpsc::Receiver<News>,
}

impl Sources {
    /// Begins to ask, in a `LocalSet`.
    pub fn new(list: Vec<Source>, own: &Entry) -> Sources {
        let (tell, news) = mpsc::channel(NEWS_MAX);
        let ask = |source: &Source| spawn_local(source.clone().run(own.clone(), tell.clone()));
        Sources { tasks: list.iter().map(ask).collect(), list, news }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Source> {
        self.list.iter()
    }

    /// The next news; none if there is no source.
    pub async fn news(&mut self) -> Option<News> {
        self.news.recv().await
    }

    /// Asks no more.
    pub fn end(&mut self) {
        self.tasks.drain(..).for_each(|task| task.abort());
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        self.end();
    }
}

/// The wait after the next failure.
pub fn longer(wait: Duration) -> Duration {
    (wait * 2).min(WAIT_MAX)
}

/// The addresses of all names, each looked up beside the others and within a time of its own: one whose
/// server does not answer keeps nobody waiting.
pub async fn resolve_all(names: &[String]) -> Found {
    let mut lookups = JoinSet::new();
    for (i, name) in names.iter().cloned().enumerate() {
        lookups.spawn(async move {
            let found = time::timeout(RESOLVE_PATIENCE, resolve(&name)).await;
            let found = found.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            (i, found.map_err(|e| format!("`{name}`: {e}")))
        });
    }
    let mut done: Vec<_> = lookups.join_all().await;
    done.sort_by_key(|(i, _)| *i);
    let (mut addresses, mut failed) = (Vec::new(), Vec::new());
    for (_, found) in done {
        match found {
            Ok(found) => addresses.extend(found),
            Err(why) => failed.push(why),
        }
    }
    let failed = (!failed.is_empty()).then(|| SourceError::Names(failed.join(", ")));
    Found { addresses, failed }
}

/// The addresses of a name or address, with a port or [`PORT`].
///
/// # Errors
/// Those of the resolver.
pub async fn resolve(name: &str) -> io::Result<Vec<SocketAddr>> {
    if let Ok(addr) = name.parse::<SocketAddr>() {
        return Ok(vec![addr]);
    }
    if let Ok(ip) = name.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, PORT)]);
    }
    let with_port = if name.contains(':') { name.to_owned() } else { format!("{name}:{PORT}") };
    Ok(lookup_host(with_port).await?.take(ENTRIES_MAX).collect())
}

#[cfg(test)]
mod tests;
