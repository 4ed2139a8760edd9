//! The children that ask engines of containers, one for each socket: they are started with as few rights as
//! the socket allows, and their lines are read.

use std::{
    collections::BTreeMap,
    fs, io,
    os::{
        fd::BorrowedFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use tidegate_host::world::Container;

use crate::{
    agent::Event,
    child::{Asker, Line},
    rights::{Identity, NOBODY},
};

/// Sockets that are asked at most.
pub const SOCKETS_MAX: usize = 64;
/// Sockets are looked for so often.
pub const LOOK: Duration = Duration::from_secs(5);

struct Engine {
    asker: Asker,
    /// The user whose engine it is; none: the host's.
    owner: Option<Identity>,
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
    pub fn keep(&mut self, asked: bool, now: Duration) -> Vec<Event> {
        if !asked {
            self.end();
            self.looked = None;
            return Vec::new();
        }
        if self.looked.is_none_or(|looked| looked + LOOK <= now) {
            self.looked = Some(now);
            for (socket, owner) in self.sockets() {
                let room = self.engines.len() < SOCKETS_MAX;
                let engine = || Engine { asker: Asker::new(now), owner };
                if room || self.engines.contains_key(&socket) {
                    self.engines.entry(socket).or_insert_with(engine);
                }
            }
        }
        let program = &self.program;
        let started = self.engines.iter_mut().filter_map(|(socket, Engine { asker, owner })| {
            let away = asker.keep(|| command(program, socket, *owner), now)?;
            Some(event(socket, *owner, away))
        });
        started.collect()
    }

    fn end(&mut self) {
        std::mem::take(&mut self.engines).into_values().for_each(|engine| engine.asker.end());
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
        self.engines.values().filter_map(|engine| engine.asker.fd())
    }

    /// How long there is nothing to start.
    #[must_use]
    pub fn timeout(&self, now: Duration) -> Option<Duration> {
        let looks = self.looked.map(|looked| looked + LOOK);
        let due = self.engines.values().filter_map(|engine| engine.asker.due());
        Some(due.chain(looks).min()?.saturating_sub(now))
    }

    /// What the children have said.
    pub fn take(&mut self, now: Duration) -> Vec<Event> {
        let of = self.engines.iter_mut().flat_map(|(socket, Engine { asker, owner })| {
            asker.take(now).into_iter().map(|line| event(socket, *owner, line))
        });
        of.collect()
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        self.end();
    }
}

/// A line, with whose engine it is: a child is not asked that.
fn event(socket: &str, owner: Option<Identity>, line: Line<Container>) -> Event {
    Event::Engine { socket: socket.to_owned(), owner: owner.map(|owner| owner.uid), line }
}

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

/// The user who may write to a socket of the host and may do least else: nobody with the socket's group,
/// or its owner.
fn identity(socket: &Path) -> io::Result<Identity> {
    let meta = fs::metadata(socket)?;
    let by_group = meta.mode() & 0o020 != 0 && meta.gid() != 0;
    let uid = if by_group { NOBODY } else { meta.uid() };
    Ok(Identity { uid, gid: meta.gid() })
}

fn command(program: &Path, socket: &str, owner: Option<Identity>) -> io::Result<Command> {
    let who = owner.map_or_else(|| identity(Path::new(socket)), Ok)?;
    let mut command = Command::new(program);
    command.args(["agent-containers", socket, &who.uid.to_string(), &who.gid.to_string()]);
    command.env_clear();
    Ok(command)
}
