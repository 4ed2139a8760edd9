//! The loop: sockets, signals and the clock around a [`Node`].
//!
//! One thread. Time is `CLOCK_BOOTTIME`, which also counts while the host sleeps, as leases need it. Nothing
//! here decides anything: datagrams, time, what sources found and what others ask go in, datagrams and lines
//! go out.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use sd_notify::NotifyState;
use tidegate_core::{Nanos, Rate, units::NANOS_PER_SEC};
use tidegate_host::fleet::{FleetError, FleetSpec, GroupSpec, check_name};
use tidegate_sys::preflight::PreflightError;
use tokio::{
    net::UdpSocket,
    runtime, select,
    signal::unix::{Signal, SignalKind, signal},
    sync::{Notify, mpsc},
    task::{LocalSet, spawn_local},
    time,
};

use super::{
    api::{self, Ask, REQUESTS_MAX},
    backend::Place,
    discovery::{Entry, Found, News, Source, Sources},
    event::Event,
    http::HttpError,
    keys::{KeyError, KeyRing},
    local::{LocalBackend, LocalError},
    node::{Node, NodeError, NodeOptions},
    rates::{of_no_group, with_ceilings},
    seal::DATAGRAM_MAX,
    status::NodeStatus,
    storage::{Background, Files, StorageError},
};
use tidegate_host::{
    host::Host,
    spec::{Spec, SpecError},
};

mod address;

use address::OwnAddress;

/// Datagrams that are read before anything else is looked at again.
const BATCH_MAX: usize = 64;
/// The loop turns at least so often, so that a host that has slept is noticed.
const TURN_MAX: Duration = Duration::from_millis(500);
/// Who ends gives back what it holds within this, or goes without.
const LEAVE_PATIENCE: Nanos = Nanos(2 * NANOS_PER_SEC);
/// ... and sets its limits to what is the host's own, which it tries so often within the same time.
const END_POLL: Duration = Duration::from_millis(20);
/// That datagrams cannot be sent is said no more often.
const TELL_SENDING: Nanos = Nanos(60 * NANOS_PER_SEC);

#[derive(Debug, Clone)]
pub struct DaemonOptions {
    /// The spec file, read again on SIGHUP.
    pub file: PathBuf,
    /// Where limits are pinned.
    pub store: PathBuf,
}

/// Why the daemon does not run. Limits are as they were.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("{0}: no `[fleet]` in it; write one with name and keys, and a `[[group]]`")]
    NoFleet(String),
    #[error("the host is called `{0}`, and a node's name {1}; write node = \"...\" in [fleet]")]
    HostName(String, FleetError),
    #[error("[fleet] {field} {addr}: {source}{}", in_use(.source))]
    Bind { field: &'static str, addr: SocketAddr, source: io::Error },
    #[error("[fleet] api: {0}")]
    Api(#[from] HttpError),
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error("[fleet] state: {0}")]
    Storage(#[from] StorageError),
    #[error(transparent)]
    Preflight(#[from] PreflightError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    /// Limits could not be set to what is the host's own.
    #[error("limit `{0}` keeps the rate that it has: {1}")]
    StandDown(String, LocalError),
}

fn in_use(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "; another daemon or program has it: end that (`ss -lntup` names it), or write another port"
        }
        _ => "",
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> DaemonError {
    move |source| DaemonError::System { what, source }
}

/// `CLOCK_BOOTTIME`.
pub fn now() -> Nanos {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (s, ns) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    Nanos(s.unwrap_or(0).saturating_mul(NANOS_PER_SEC) + ns.unwrap_or(0))
}

/// What a spec says to a daemon.
struct Configured {
    fleet: FleetSpec,
    groups: Vec<(GroupSpec, Vec<Rate>)>,
    /// The rates of the limits that are in no group.
    own: BTreeMap<Place, Rate>,
    keys: KeyRing,
    /// A limit of a group has a rate that the kernel's HTB keeps.
    sets_qdiscs: bool,
}

fn configured(file: &Path) -> Result<Configured, DaemonError> {
    let spec = Spec::read_regular(file)?;
    let (groups, own) = (with_ceilings(&spec), of_no_group(&spec));
    let sets_qdiscs = sets_qdiscs(&spec);
    let fleet = spec.fleet.ok_or(DaemonError::NoFleet(spec.file))?;
    let keys = KeyRing::read(&fleet.keys)?;
    Ok(Configured { fleet, groups, own, keys, sets_qdiscs })
}

/// Whether a limit of a group has a scheme whose rate is that of a qdisc: setting it asks for
/// `CAP_NET_ADMIN`, where others are set by a write to a map.
fn sets_qdiscs(spec: &Spec) -> bool {
    let members: BTreeSet<_> = spec.groups.iter().flat_map(|group| &group.members).collect();
    let mut limits = spec.limits.iter().filter(|limit| members.contains(&limit.name));
    limits.any(|limit| limit.options.scheme.info().has_qdisc)
}

/// Of the calling thread, and of those that it starts.
fn give_up_net_admin() -> io::Result<()> {
    let mut sets = rustix::thread::capabilities(None)?;
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(rustix::thread::CapabilitySet::NET_ADMIN);
    }
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

fn real_path(file: &Path) -> String {
    file.canonicalize().unwrap_or_else(|_| file.to_owned()).display().to_string()
}

fn node_name(fleet: &FleetSpec) -> Result<String, DaemonError> {
    if let Some(name) = &fleet.node {
        return Ok(name.clone());
    }
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy().into_owned();
    check_name(&name).map_err(|e| DaemonError::HostName(name.clone(), e))?;
    Ok(name)
}

/// Runs until a signal ends it. `say` gets what an operator wants to know, `ready` is called once everything
/// is open and before the first limit is touched.
///
/// # Errors
/// [`DaemonError`] if it cannot start.
pub fn run(
    options: &DaemonOptions,
    say: impl FnMut(&Event),
    ready: impl FnOnce(&str, SocketAddr),
) -> Result<(), DaemonError> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(system("cannot start"))?;
    let local = LocalSet::new();
    let ended = local.block_on(&runtime, async {
        let Some(mut daemon) = Daemon::start(options, say).await? else { return Ok(()) };
        ready(&daemon.entry.node, daemon.entry.addr);
        daemon.run().await
    });
    // Not waiting for a name server that does not answer.
    runtime.shutdown_background();
    ended
}

struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
}

struct Daemon<F> {
    file: PathBuf,
    node: Node<LocalBackend, Background<Files>>,
    entry: Entry,
    /// Where others reach it is that of the default route.
    guessed: bool,
    /// It may change qdiscs, as limits of groups need that.
    sets_qdiscs: bool,
    socket: UdpSocket,
    api: PathBuf,
    asks: mpsc::Receiver<Ask>,
    sources: Sources,
    /// Sources that cannot be asked: their name and why.
    failing: BTreeMap<&'static str, (String, String)>,
    /// A promise has been written, or could not be.
    stored: Arc<Notify>,
    signals: Signals,
    watchdog: Option<Duration>,
    send_failed: Option<Nanos>,
    leaving: Option<Nanos>,
    say: F,
}

impl<F: FnMut(&Event)> Daemon<F> {
    /// `None` if a signal ends it before it has begun.
    async fn start(options: &DaemonOptions, mut say: F) -> Result<Option<Daemon<F>>, DaemonError> {
        let Configured { fleet, groups, keys, sets_qdiscs, .. } = configured(&options.file)?;
        let name = node_name(&fleet)?;
        let host = Host::open_for_rates(&options.store, sets_qdiscs)?;
        if !sets_qdiscs {
            // Datagrams and files are read without it.
            give_up_net_admin().map_err(system("cannot give up CAP_NET_ADMIN"))?;
        }
        // All that may be refused comes before anything is touched.
        let bind = |field, addr| move |source| DaemonError::Bind { field, addr, source };
        let socket = UdpSocket::bind(fleet.listen).await;
        let socket = socket.map_err(bind("listen", fleet.listen))?;
        let listener = api::bind(&fleet.api)?;
        let files = Files::open(&fleet.state)?;
        let mut seed = [0u8; 32];
        let fill = |bytes: &mut [u8]| {
            getrandom::fill(bytes)
                .map_err(|e| system("no random numbers")(io::Error::other(e.to_string())))
        };
        fill(&mut seed)?;
        let mut random = [0u8; 8];
        fill(&mut random)?;
        // The disk may take long. From READY on, which may come before a network does, the loop is watched.
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_ns = u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX);
        let session = files.next_session(unix_ns, u64::from_le_bytes(random))?;
        let on = |kind| signal(kind).map_err(system("cannot wait for signals"));
        let mut signals = Signals {
            term: on(SignalKind::terminate())?,
            int: on(SignalKind::interrupt())?,
            hup: on(SignalKind::hangup())?,
        };
        let mut usec = 0;
        let watched = sd_notify::watchdog_enabled(false, &mut usec);
        let watchdog = watched.then(|| Duration::from_micros(usec / 3));
        let (tell_asks, mut asks) = mpsc::channel(REQUESTS_MAX);
        spawn_local(api::serve(listener, tell_asks.clone()));
        let file = options.file.clone();
        let waits = |why: &str| NodeStatus::waits(&name, &fleet, &real_path(&file), why);
        let found = address::find(&fleet, &mut asks, &mut signals, watchdog, &mut say, waits).await;
        let Some(OwnAddress { addr, guessed }) = found else {
            let _ = std::fs::remove_file(&fleet.api);
            return Ok(None);
        };
        let stored = Arc::new(Notify::new());
        let tell_stored = Arc::clone(&stored);
        let storage = Background::start(files, move || tell_stored.notify_one());
        let storage = storage.map_err(system("cannot start a thread"))?;
        let entry = Entry { cluster: fleet.name.clone(), node: name.clone(), addr };
        let (sources, path) = (Sources::new(Source::of(&fleet), &entry), fleet.api.clone());
        let of_node = NodeOptions { fleet, name, groups, keys, addr, session, seed };
        let node = Node::new(now(), of_node, LocalBackend::new(host), storage)?;
        Ok(Some(Daemon {
            file,
            node,
            entry,
            guessed,
            sets_qdiscs,
            socket,
            api: path,
            asks,
            sources,
            failing: BTreeMap::new(),
            stored,
            signals,
            watchdog,
            send_failed: None,
            leaving: None,
            say,
        }))
    }

    /// Has these sources asked from now on, and no others.
    fn ask_sources(&mut self, sources: Vec<Source>) {
        // News of the earlier ones that nobody has taken goes with them.
        let before = std::mem::replace(&mut self.sources, Sources::new(sources, &self.entry));
        for source in before.iter() {
            if !self.sources.iter().any(|other| other.kind() == source.kind()) {
                self.node.discovered(now(), source.kind(), &[]);
                self.failing.remove(source.kind());
            }
        }
    }

    async fn run(&mut self) -> Result<(), DaemonError> {
        self.node.on_timer(now());
        self.flush();
        notify(&[NotifyState::Ready]);
        let mut bytes = vec![0u8; DATAGRAM_MAX + 1];
        loop {
            let at = now();
            if self.leaving.is_some_and(|until| at >= until || self.node.has_left()) {
                return self.end().await;
            }
            let due = Duration::from_nanos(self.node.next_deadline(at).0.saturating_sub(at.0));
            let pause = due.min(self.watchdog.unwrap_or(TURN_MAX)).min(TURN_MAX);
            select! {
                readable = self.socket.readable() => {
                    if readable.is_ok() {
                        self.receive(&mut bytes);
                    }
                }
                () = time::sleep(pause) => {}
                // What waits for it is sent.
                () = self.stored.notified() => self.node.on_timer(now()),
                Some(news) = self.sources.news() => self.on_news(news),
                Some(ask) = self.asks.recv() => self.on_ask(ask),
                _ = self.signals.hup.recv() => drop(self.reload()),
                _ = self.signals.term.recv() => self.leave(),
                _ = self.signals.int.recv() => self.leave(),
            }
            // Under a flood of datagrams time goes on, too.
            let at = now();
            if self.node.next_deadline(at) <= at {
                self.node.on_timer(at);
            }
            self.flush();
            if self.watchdog.is_some() {
                notify(&[NotifyState::Watchdog]);
            }
        }
    }

    fn receive(&mut self, bytes: &mut [u8]) {
        for _ in 0..BATCH_MAX {
            match self.socket.try_recv_from(bytes) {
                // One that is longer than any fills the buffer, and is dropped for its length.
                Ok((length, from)) => self.node.on_datagram(now(), from, &bytes[..length]),
                Err(_) => return,
            }
        }
    }

    /// Sends and says what there is.
    fn flush(&mut self) {
        while let Some((to, bytes)) = self.node.poll_transmit() {
            // A full buffer drops, as a full network does.
            let Err(e) = self.socket.try_send_to(&bytes, to) else { continue };
            let at = now();
            let again = |last: Nanos| at.0 >= last.0.saturating_add(TELL_SENDING.0);
            if e.kind() != io::ErrorKind::WouldBlock && self.send_failed.is_none_or(again) {
                self.send_failed = Some(at);
                self.node.report(Event::Warning(format!("cannot send to {to}: {e}")));
            }
        }
        while let Some(event) = self.node.poll_event() {
            (self.say)(&event);
        }
    }

    fn on_news(&mut self, news: News) {
        let News { source, which, found, again } = news;
        let failed = match found {
            Ok(Found { addresses, failed }) => {
                self.check_guess(&addresses);
                self.node.discovered(now(), source, &addresses);
                failed
            }
            Err(e) => Some(e),
        };
        let Some(why) = failed.map(|e| e.to_string()) else {
            if self.failing.remove(source).is_some() {
                self.node.report(Event::RegistryGood(which));
            }
            return;
        };
        // Once, and again when it fails otherwise.
        if self.failing.get(source).is_none_or(|(_, last)| *last != why) {
            let (which, why) = (which.clone(), why.clone());
            self.node.report(Event::Registry { which, why, again_s: again.as_secs() });
        }
        self.failing.insert(source, (which, why));
    }

    /// Says so when a node that advertises the address of its default route is elsewhere for the others.
    fn check_guess(&mut self, addresses: &[SocketAddr]) {
        let Some(to) = addresses.first().filter(|_| self.guessed) else { return };
        let Ok(ip) = address::source_to(*to) else { return };
        self.guessed = false;
        let is = self.entry.addr;
        if ip != is.ip() && !ip.is_loopback() {
            let text = format!(
                "others know this node at {is}, and its route to {to} leaves from {ip}: restart \
                 the daemon, or write advertise = \"{}\" in [fleet]",
                SocketAddr::new(ip, is.port())
            );
            self.node.report(Event::Warning(text));
        }
    }

    fn on_ask(&mut self, ask: Ask) {
        match ask {
            // Who asked may have gone away meanwhile.
            Ask::Status(tell) => _ = tell.send(Box::new(self.status())),
            Ask::Reload(tell) => _ = tell.send(self.reload()),
        }
    }

    fn status(&self) -> NodeStatus {
        let mut status = self.node.status(now());
        status.file = real_path(&self.file);
        for (source, (which, why)) in &self.failing {
            status.alerts.push(format!("{which}: {why}; known nodes stay known"));
            match status.sources.iter_mut().find(|known| known.source == *source) {
                Some(known) => known.error = Some(why.clone()),
                None => status.sources.push(super::status::SourceStatus {
                    source: (*source).to_owned(),
                    addresses: 0,
                    error: Some(why.clone()),
                }),
            }
        }
        status
    }

    /// Reads the spec again; what changed, or why all is as before.
    fn reload(&mut self) -> Result<Vec<String>, String> {
        let mut states = vec![NotifyState::Reloading];
        states.extend(NotifyState::monotonic_usec_now());
        notify(&states);
        let changes = self.take_spec();
        let event = match &changes {
            Ok(changes) => Event::Reloaded(changes.clone()),
            Err(why) => Event::NotReloaded(why.clone()),
        };
        self.node.report(event);
        notify(&[NotifyState::Ready]);
        changes
    }

    fn take_spec(&mut self) -> Result<Vec<String>, String> {
        let Configured { fleet, groups, own, keys, sets_qdiscs } =
            configured(&self.file).map_err(|e| e.to_string())?;
        if sets_qdiscs && !self.sets_qdiscs {
            return Err("a limit of a group has scheme htb, dem or spring now, and the daemon has given up \
                        the privilege to change qdiscs (CAP_NET_ADMIN): restart the daemon for that"
                .to_owned());
        }
        let name = node_name(&fleet).map_err(|e| e.to_string())?;
        let is = self.node.fleet();
        let fixed = [
            ("name", is.name == fleet.name),
            ("node", self.entry.node == name),
            ("listen", is.listen == fleet.listen),
            ("advertise", is.advertise == fleet.advertise),
            ("state", is.state == fleet.state),
            ("api", is.api == fleet.api),
        ];
        if let Some((field, _)) = fixed.iter().find(|(_, same)| !same) {
            return Err(format!("[fleet] {field} is another: restart the daemon for that"));
        }
        let sources = Some(Source::of(&fleet)).filter(|sources| *sources != Source::of(is));
        let changed = self.node.reconfigure(now(), fleet, &groups, &own, keys);
        let mut changes = changed.map_err(|e| e.to_string())?;
        if let Some(sources) = sources {
            changes.push("peers are looked for elsewhere".to_owned());
            self.ask_sources(sources);
        }
        Ok(changes)
    }

    fn leave(&mut self) {
        notify(&[NotifyState::Stopping]);
        let at = now();
        if self.leaving.is_none() {
            self.node.leave(at);
            self.leaving = Some(Nanos(at.0.saturating_add(LEAVE_PATIENCE.0)));
        } else {
            // Asked twice.
            self.leaving = Some(at);
        }
    }

    async fn end(&mut self) -> Result<(), DaemonError> {
        let deadline = now().0.saturating_add(LEAVE_PATIENCE.0);
        let mut done = self.node.end(now());
        // Another writer such as `tidegate apply` may be at work.
        while !done && now().0 < deadline {
            time::sleep(END_POLL).await;
            if self.watchdog.is_some() {
                notify(&[NotifyState::Watchdog]);
            }
            done = self.node.end(now());
        }
        if !done {
            let what = "a limit of a group could not be set to this host's reserved share";
            self.node.report(Event::Warning(what.to_owned()));
        }
        self.flush();
        self.sources.end();
        for source in self.sources.iter().filter(|s| !self.failing.contains_key(s.kind())) {
            // The entry ends by itself otherwise.
            let _ = source.withdraw(&self.entry).await;
        }
        let _ = std::fs::remove_file(&self.api);
        Ok(())
    }
}

/// Tells systemd, if it listens.
fn notify(states: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(false, states);
}

/// For when a daemon has died: the limits of its groups keep this host's reserved share.
///
/// # Errors
/// [`DaemonError`]; other limits were set all the same.
pub fn stand_down(options: &DaemonOptions) -> Result<usize, DaemonError> {
    let spec = Spec::read_regular(&options.file)?;
    let groups = with_ceilings(&spec);
    let host = Host::open_for_rates(&options.store, sets_qdiscs(&spec))?;
    let mut backend = LocalBackend::new(host);
    match backend.stand_down(&groups).into_iter().next() {
        Some((limit, e)) => Err(DaemonError::StandDown(limit, e)),
        None => Ok(groups.iter().map(|(group, _)| group.members.len()).sum()),
    }
}
