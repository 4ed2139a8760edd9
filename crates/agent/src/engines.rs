//! The children that ask engines of containers, one for each socket: they are started with as few rights as
//! the socket allows, their lines are read, and they are started again with back-off. Their absence is a
//! state.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use tidegate_host::world::Container;

use crate::{
    agent::EngineEvent,
    rights::{Identity, NOBODY},
};

/// Sockets that are asked at most.
pub const SOCKETS_MAX: usize = 64;
/// The longest line of a child.
pub const LINE_MAX: usize = 16 << 20;
/// Bytes that are read of a child at once.
const READ_BYTES: usize = 64 << 10;
/// Sockets are looked for so often.
pub const LOOK: Duration = Duration::from_secs(5);
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// A line of a child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    Listed(BTreeMap<String, Container>),
    Changed(String, Container),
    Gone(String),
    Away(String),
}

struct Engine {
    child: Option<(Child, ChildStdout)>,
    part: Vec<u8>,
    /// The user whose engine it is; none: the host's.
    owner: Option<Identity>,
    due: Duration,
    wait: Duration,
}

/// All of them.
pub struct Engines {
    program: PathBuf,
    /// Sockets, or directories of users with sockets.
    places: Vec<PathBuf>,
    engines: BTreeMap<String, Engine>,
    looked: Option<Duration>,
}

impl std::fmt::Debug for Engines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engines").field("sockets", &self.engines.keys()).finish_non_exhaustive()
    }
}

/// Where Docker and Podman have their sockets; `*` is a user's number.
pub const SOCKETS: [&str; 4] = [
    "/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/user/*/docker.sock",
    "/run/user/*/podman/podman.sock",
];

impl Engines {
    /// Asks by `program agent-containers SOCKET`.
    #[must_use]
    pub fn new(program: PathBuf, sockets: Vec<PathBuf>) -> Engines {
        Engines { program, places: sockets, engines: BTreeMap::new(), looked: None }
    }

    /// Starts what is due; what is not asked for ends.
    pub fn keep(&mut self, asked: bool, now: Duration) -> Vec<(String, EngineEvent)> {
        let mut events = Vec::new();
        if !asked {
            std::mem::take(&mut self.engines).into_values().for_each(Engine::end);
            self.looked = None;
            return events;
        }
        if self.looked.is_none_or(|looked| looked + LOOK <= now) {
            self.looked = Some(now);
            for (socket, owner) in self.sockets() {
                let room = self.engines.len() < SOCKETS_MAX;
                let engine =
                    || Engine { child: None, part: Vec::new(), owner, due: now, wait: RETRY_MIN };
                if room || self.engines.contains_key(&socket) {
                    self.engines.entry(socket).or_insert_with(engine);
                }
            }
        }
        for (socket, engine) in &mut self.engines {
            if engine.child.is_some() || engine.due > now {
                continue;
            }
            let who = engine.owner.map_or_else(|| identity(Path::new(socket)), Ok);
            let started = who.and_then(|who| start(&self.program, socket, who));
            match started {
                Ok(child) => engine.child = Some(child),
                Err(e) => {
                    engine.fails(now);
                    events.push((socket.clone(), EngineEvent::Away(e.to_string())));
                }
            }
        }
        events
    }

    /// The sockets that are there, each with the user whose it is.
    fn sockets(&self) -> BTreeMap<String, Option<Identity>> {
        let mut found = BTreeMap::new();
        for place in &self.places {
            let text = place.to_string_lossy();
            let Some((users, rest)) = text.split_once("/*/") else {
                if is_socket(place) {
                    found.insert(text.into_owned(), None);
                }
                continue;
            };
            for entry in fs::read_dir(users).into_iter().flatten().flatten() {
                let user = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
                let socket = entry.path().join(rest);
                let (Some(uid), Ok(meta)) = (user.filter(|_| is_socket(&socket)), entry.metadata())
                else {
                    continue;
                };
                // Nobody else may enter the directory.
                let owner = Identity { uid, gid: meta.gid() };
                found.insert(socket.display().to_string(), Some(owner));
            }
        }
        found
    }

    /// Readable when a child has said something.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.engines.values().filter_map(|engine| Some(engine.child.as_ref()?.1.as_fd()))
    }

    /// How long there is nothing to start.
    #[must_use]
    pub fn timeout(&self, now: Duration) -> Option<Duration> {
        let looks = self.looked.map(|looked| looked + LOOK);
        let waiting = self.engines.values().filter(|engine| engine.child.is_none());
        let due = waiting.map(|engine| engine.due).chain(looks).min()?;
        Some(due.saturating_sub(now))
    }

    /// What the children have said.
    pub fn take(&mut self, now: Duration) -> Vec<(String, EngineEvent)> {
        let mut events = Vec::new();
        for (socket, engine) in &mut self.engines {
            let (lines, ended) = engine.read();
            if !lines.is_empty() {
                engine.wait = RETRY_MIN;
            }
            let mut why = None;
            for line in lines {
                match event(line, engine.owner.map(|owner| owner.uid)) {
                    EngineEvent::Away(reason) => why = Some(reason),
                    event => events.push((socket.clone(), event)),
                }
            }
            if ended {
                engine.fails(now);
                why.get_or_insert_with(|| "its child has ended".to_owned());
            }
            events.extend(why.map(|why| (socket.clone(), EngineEvent::Away(why))));
        }
        events
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        std::mem::take(&mut self.engines).into_values().for_each(Engine::end);
    }
}

impl Engine {
    fn end(mut self) {
        if let Some((mut child, _)) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn fails(&mut self, now: Duration) {
        if let Some((mut child, _)) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        self.part.clear();
        self.due = now + self.wait;
        self.wait = (self.wait * 2).min(RETRY_MAX);
    }

    /// Whole lines that have come, and whether the child is at its end.
    fn read(&mut self) -> (Vec<Line>, bool) {
        let Some((_, pipe)) = &mut self.child else { return (Vec::new(), false) };
        let (mut lines, mut ended) = (Vec::new(), false);
        let mut buffer = vec![0; READ_BYTES];
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => {
                    ended = true;
                    break;
                }
                Ok(n) => self.part.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    ended = true;
                    break;
                }
            }
            while let Some(end) = self.part.iter().position(|byte| *byte == b'\n') {
                let line: Vec<_> = self.part.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(line) => lines.push(line),
                    Err(_) => return (lines, true),
                }
            }
            if self.part.len() > LINE_MAX {
                return (lines, true);
            }
        }
        (lines, ended)
    }
}

/// A line, with whose engine it is: a child is not asked that.
fn event(line: Line, owner: Option<u32>) -> EngineEvent {
    let own = |container| Container { owner, ..container };
    match line {
        Line::Listed(all) => {
            EngineEvent::Listed(all.into_iter().map(|(id, c)| (id, own(c))).collect())
        }
        Line::Changed(id, container) => EngineEvent::Changed(id, own(container)),
        Line::Gone(id) => EngineEvent::Gone(id),
        Line::Away(reason) => EngineEvent::Away(reason),
    }
}

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

/// Who may write to a socket of the host and may do least else: nobody with the socket's group, or its owner.
fn identity(socket: &Path) -> io::Result<Identity> {
    let meta = fs::metadata(socket)?;
    let by_group = meta.mode() & 0o020 != 0 && meta.gid() != 0;
    let uid = if by_group { NOBODY } else { meta.uid() };
    Ok(Identity { uid, gid: meta.gid() })
}

fn start(program: &Path, socket: &str, who: Identity) -> io::Result<(Child, ChildStdout)> {
    let mut command = Command::new(program);
    command.args(["agent-containers", socket, &who.uid.to_string(), &who.gid.to_string()]);
    // It ends when this is closed.
    command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let pipe = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let flags = rustix::fs::fcntl_getfl(&pipe)?;
    rustix::fs::fcntl_setfl(&pipe, flags | OFlags::NONBLOCK)?;
    Ok((child, pipe))
}
