//! The half with privileges. It reads limits when the server asks, and can do nothing else for it: an
//! attacker who takes over the server can read what `tidegate status` shows.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use tidegate_agent::status::HostStatus;
use tidegate_core::Scope;
use tidegate_fleet::{
    api,
    http::{self, HttpError},
    status::NodeStatus,
};
use tidegate_host::{
    explain::{ExplainOptions, Explanation, Subject, explain},
    host::Host,
    status::LimitStatus,
    waiting::Queues,
};
use tidegate_sys::{clock::monotonic_ns, names, preflight::PreflightError};

use crate::link::{Head, REQUEST_MAX, Request, StatusHead};

/// How long the flows of a limit are watched.
pub const SAMPLE: Duration = Duration::from_millis(500);
/// Cgroups of a limit whose flows are watched at most.
pub const CGROUPS_MAX: usize = 8;
/// Flows of a cgroup that are shown at most, the fastest.
pub const FLOWS_MAX: usize = 100;
/// Limits that are looked at closely at the same time.
pub const LOOKS_MAX: usize = 4;
/// The daemon of a fleet is asked so often.
const FLEET_EVERY: Duration = Duration::from_secs(1);
/// Who may open the socket, if there is such a group.
const GROUP: &str = "tidegate";

/// Where things are.
#[derive(Debug, Clone)]
pub struct ReaderOptions {
    pub store: PathBuf,
    pub run_dir: PathBuf,
    /// The directory of the agent's files.
    pub files: PathBuf,
    /// The socket of the fleet's daemon.
    pub fleet: PathBuf,
    /// The socket that the server is given.
    pub socket: PathBuf,
    /// Arguments that make this program the server.
    pub server: Vec<String>,
}

/// Why it could not begin, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ReaderError {
    #[error("{0}: another `tidegate web` runs here; end that one first, or name another --run-dir")]
    Taken(String),
    #[error(transparent)]
    Socket(HttpError),
    #[error(transparent)]
    Preflight(#[from] PreflightError),
    #[error("the process that serves the page cannot be started: {0}")]
    Start(io::Error),
    /// It has said why.
    #[error("the process that serves the page has ended")]
    Ended,
}

/// Starts the server, and reads for it until SIGTERM or SIGINT comes, or the server ends.
///
/// # Errors
/// [`ReaderError`].
pub fn run(options: &ReaderOptions, started: impl FnOnce()) -> Result<(), ReaderError> {
    let host = Host::open(&options.store)?;
    let (link, theirs) = UnixStream::pair().map_err(ReaderError::Start)?;
    let stopped = ends_by_signal(&link).map_err(ReaderError::Start)?;
    let socket = http::bind(&options.socket).map_err(|e| match e {
        HttpError::Taken(path) => ReaderError::Taken(path),
        other => ReaderError::Socket(other),
    })?;
    open_to_group(&options.socket).map_err(ReaderError::Start)?;
    let mut child =
        start(&options.server, theirs.into(), socket.into()).map_err(ReaderError::Start)?;
    let reader = Reader {
        host,
        run_dir: options.run_dir.clone(),
        files: options.files.clone(),
        fleet: ask_fleet(options.fleet.clone()),
        looks: Arc::new(()),
    };
    let served = reader.serve(&link, started);
    let _ = child.kill();
    let _ = child.wait();
    let _ = std::fs::remove_file(&options.socket);
    if stopped.load(Ordering::Relaxed) {
        return Ok(());
    }
    served.map_err(ReaderError::Start).and(Err(ReaderError::Ended))
}

/// Ends the link when SIGTERM or SIGINT comes; the flag says that one has.
fn ends_by_signal(link: &UnixStream) -> io::Result<Arc<AtomicBool>> {
    let stopped = Arc::new(AtomicBool::new(false));
    let (mut told, tell) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stopped))?;
        signal_hook::low_level::pipe::register(signal, tell.try_clone()?)?;
    }
    let link = link.try_clone()?;
    thread::spawn(move || {
        let _ = told.read(&mut [0]);
        let _ = link.shutdown(Shutdown::Both);
    });
    Ok(stopped)
}

/// Members of the group may look, too.
fn open_to_group(socket: &Path) -> io::Result<()> {
    use std::os::unix::fs::{PermissionsExt, chown};
    let Some(gid) = names::group(GROUP) else { return Ok(()) };
    chown(socket, None, Some(gid))?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o660))
}

/// The server has the link as its standard input and the socket as its standard output.
fn start(arguments: &[String], link: OwnedFd, socket: OwnedFd) -> io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(arguments).env_clear().current_dir("/");
    command.stdin(Stdio::from(link)).stdout(Stdio::from(socket)).spawn()
}

/// The last status of a fleet's daemon, and the socket that it has left if it has died.
type Fleet = (Option<NodeStatus>, Option<PathBuf>);

/// What the fleet's daemon said last. It is asked by a thread: nobody waits for it.
fn ask_fleet(socket: PathBuf) -> Arc<Mutex<Fleet>> {
    let fleet = Arc::new(Mutex::new((None, None)));
    let (weak, mut first) = (Arc::downgrade(&fleet), true);
    thread::spawn(move || {
        while let Some(fleet) = weak.upgrade() {
            if !std::mem::take(&mut first) {
                thread::sleep(FLEET_EVERY);
            }
            let said = api::status(&socket).ok().flatten();
            let left = api::left(&socket);
            *fleet.lock().unwrap_or_else(PoisonError::into_inner) = (said, left);
        }
    });
    fleet
}

struct Reader {
    host: Host,
    run_dir: PathBuf,
    files: PathBuf,
    fleet: Arc<Mutex<Fleet>>,
    /// As many as are at work, and one.
    looks: Arc<()>,
}

impl Reader {
    /// Answers until the other end is closed. The first question comes when the server listens.
    fn serve(&self, link: &UnixStream, started: impl FnOnce()) -> io::Result<()> {
        let mut started = Some(started);
        let answers = Arc::new(Mutex::new(link.try_clone()?));
        let mut requests = BufReader::new(link);
        let mut line = String::new();
        loop {
            line.clear();
            if Read::by_ref(&mut requests).take(REQUEST_MAX).read_line(&mut line)? == 0 {
                return Ok(());
            }
            if let Some(started) = started.take() {
                started();
            }
            match serde_json::from_str(&line) {
                Ok(Request::Status) => {
                    let (head, body) = self.status();
                    write(&answers, &head, &body)?;
                }
                Ok(Request::Limit(name)) => self.look(name, &answers)?,
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn status(&self) -> (Head, String) {
        let start = Instant::now();
        let (fleet, left) = self.fleet.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let status = HostStatus::read(&self.host, &self.run_dir, fleet);
        let read = status.map_err(|e| e.to_string()).and_then(|mut status| {
            status.fleet_left = left;
            status.look_for_agent(&self.run_dir, &self.files);
            let body = serde_json::to_string(&status).map_err(|e| e.to_string())?;
            Ok((status, body))
        });
        let (status, body) = match read {
            Ok(read) => read,
            Err(why) => return (Head::Failed(why), String::new()),
        };
        let unix_ns = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let head = StatusHead {
            unix_ns: u64::try_from(unix_ns).unwrap_or(u64::MAX),
            monotonic_ns: monotonic_ns(),
            took_ns: u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            warnings: status.warnings(),
            fleet_died: status.fleet_left.is_some(),
            agent_missed: status.agent_missed.is_some(),
        };
        (Head::Status(head), body)
    }

    /// Looks at a limit closely, while others are answered.
    fn look(&self, name: String, answers: &Arc<Mutex<UnixStream>>) -> io::Result<()> {
        if Arc::strong_count(&self.looks) > LOOKS_MAX {
            let why = "others are being looked at; ask again".to_owned();
            return write(answers, &Head::Refused { limit: name, why }, "");
        }
        let (host, answers, at_work) =
            (self.host.clone(), Arc::clone(answers), Arc::clone(&self.looks));
        thread::spawn(move || {
            let (head, body) = match look(&host, &name) {
                Ok(body) => (Head::Limit(name), body),
                Err(why) => (Head::Refused { limit: name, why }, String::new()),
            };
            let _ = write(&answers, &head, &body);
            drop(at_work);
        });
        Ok(())
    }
}

fn write(answers: &Mutex<UnixStream>, head: &Head, body: &str) -> io::Result<()> {
    let mut text = serde_json::to_string(head)?;
    text.reserve(body.len() + 2);
    text.push('\n');
    text.push_str(body);
    text.push('\n');
    answers.lock().unwrap_or_else(PoisonError::into_inner).write_all(text.as_bytes())
}

/// A limit, with the flows in its cgroups or in its queues.
#[derive(Serialize)]
struct Look {
    limit: LimitStatus,
    explanations: Vec<Explanation>,
    /// Cgroups beyond [`CGROUPS_MAX`].
    cgroups_left_out: usize,
    /// Why a cgroup could not be looked at.
    errors: Vec<String>,
}

fn look(host: &Host, name: &str) -> Result<String, String> {
    let said = |e: &dyn std::fmt::Display| e.to_string();
    let pinned = host.find(name).map_err(|e| said(&e))?;
    let pinned = pinned.ok_or_else(|| format!("limit `{name}` is not on this host"))?;
    let mut limit = LimitStatus::read_or_broken(&pinned);
    limit.waiting = Queues::read(&pinned).unwrap_or_default();
    let mut cgroups = match (&limit.members, &limit.scope) {
        (Some(members), _) => members.clone(),
        (None, Scope::Cgroup(path)) => vec![path.clone()],
        _ => Vec::new(),
    };
    let cgroups_left_out = cgroups.len().saturating_sub(CGROUPS_MAX);
    cgroups.truncate(CGROUPS_MAX);
    let options = ExplainOptions { sample: SAMPLE, sockets: FLOWS_MAX };
    let looked: Vec<_> = thread::scope(|scope| {
        let look = |path: &String| {
            let subject = Subject::Cgroup(path.clone());
            scope.spawn(move || explain(host, &subject, &options))
        };
        let threads: Vec<_> = cgroups.iter().map(look).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let (mut explanations, mut errors) = (Vec::new(), Vec::new());
    for one in looked {
        match one {
            Ok(explanation) => explanations.push(explanation),
            Err(e) => errors.push(e.to_string()),
        }
    }
    let look = Look { limit, explanations, cgroups_left_out, errors };
    serde_json::to_string(&look).map_err(|e| said(&e))
}
