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
    agent::{Event, START_PODMAN},
    child::{Asker, Line},
    rights::{Identity, NOBODY},
};

/// Sockets of users that are asked at most.
pub const SOCKETS_MAX: usize = 64;
/// Sockets are looked for so often.
pub const LOOK: Duration = Duration::from_secs(5);

struct Engine {
    asker: Asker,
    /// The user whose engine it is; none: the host's.
    owner: Option<Owner>,
}

/// A user, and the directory that goes when this user has logged out.
#[derive(Debug, Clone)]
struct Owner {
    identity: Identity,
    directory: PathBuf,
}

/// All of them.
pub struct Engines {
    program: PathBuf,
    /// Sockets, or directories of users with sockets.
    places: Vec<PathBuf>,
    engines: BTreeMap<String, Engine>,
    /// A socket that is there and not asked, as there are too many.
    left_out: Option<String>,
    /// Podman, and whether it is here without a socket.
    podman: PathBuf,
    is_podman_silent: bool,
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

/// Where distributions have Podman, which runs containers also without a socket.
const PODMAN: &str = "/usr/bin/podman";
const PODMAN_SOCKET: &str = "podman/podman.sock";

impl Engines {
    /// Asks by `program agent-containers SOCKET`.
    pub fn new(program: PathBuf, sockets: Vec<PathBuf>) -> Engines {
        Engines {
            program,
            places: sockets,
            engines: BTreeMap::new(),
            left_out: None,
            podman: PODMAN.into(),
            is_podman_silent: false,
            looked: None,
        }
    }

    /// Starts what is due; what is not asked for ends.
    pub fn keep(&mut self, asked: bool, now: Duration) -> Vec<Event> {
        if !asked {
            self.end();
            self.looked = None;
            return Vec::new();
        }
        let mut events = Vec::new();
        if self.looked.is_none_or(|looked| looked + LOOK <= now) {
            self.looked = Some(now);
            self.look(now, &mut events);
        }
        let program = &self.program;
        let started = self.engines.iter_mut().filter_map(|(socket, Engine { asker, owner })| {
            let away = asker.keep(|| command(program, socket, owner.as_ref()), now)?;
            Some(event(socket, owner.as_ref(), away))
        });
        events.extend(started);
        events
    }

    /// Takes in sockets that are new, and forgets those of users who have logged out.
    fn look(&mut self, now: Duration, events: &mut Vec<Event>) {
        let is_there = |owner: &Owner| owner.directory.exists();
        let (there, gone) = std::mem::take(&mut self.engines)
            .into_iter()
            .partition(|(_, engine)| engine.owner.as_ref().is_none_or(is_there));
        self.engines = there;
        for (socket, Engine { asker, owner }) in gone {
            asker.end();
            events.push(Event::EngineGone { socket, owner: uid(owner.as_ref()) });
        }
        let mut left_out = None;
        for (socket, owner) in self.sockets() {
            let of_users = self.engines.values().filter(|engine| engine.owner.is_some()).count();
            if self.engines.contains_key(&socket) {
                continue;
            }
            // Those of the host are few.
            if owner.is_some() && of_users >= SOCKETS_MAX {
                left_out = Some((socket, owner));
            } else {
                self.engines.insert(socket, Engine { asker: Asker::new(now), owner });
            }
        }
        self.look_for_podman(events);
        let socket = left_out.as_ref().map(|(socket, _)| socket.clone());
        if socket == self.left_out {
            return;
        }
        if let Some(socket) = std::mem::replace(&mut self.left_out, socket) {
            events.push(Event::EngineGone { socket, owner: None });
        }
        if let Some((socket, _)) = left_out {
            let why = format!("not asked; {SOCKETS_MAX} sockets of users are asked at most");
            events.push(event(&socket, None, Line::Away(why)));
        }
    }

    /// Podman without a socket is away: nobody hears of its containers.
    fn look_for_podman(&mut self, events: &mut Vec<Event>) {
        let is_its = |place: &&PathBuf| place.ends_with(PODMAN_SOCKET);
        let of_host = |place: &&PathBuf| !place.to_string_lossy().contains('*');
        let Some(place) = self.places.iter().filter(is_its).find(of_host) else { return };
        let socket = place.to_string_lossy().into_owned();
        let is_served = self.engines.keys().any(|known| known.ends_with(PODMAN_SOCKET));
        let is_silent = !is_served && self.podman.exists();
        let was_silent = std::mem::replace(&mut self.is_podman_silent, is_silent);
        if is_silent && !was_silent {
            let why = format!("Podman has no socket; type {START_PODMAN}");
            events.push(event(&socket, None, Line::Away(why)));
        } else if was_silent && !is_silent && !self.engines.contains_key(&socket) {
            events.push(Event::EngineGone { socket, owner: None });
        }
    }

    fn end(&mut self) {
        self.is_podman_silent = false;
        self.left_out = None;
        std::mem::take(&mut self.engines).into_values().for_each(|engine| engine.asker.end());
    }

    /// The sockets that are there, each with the user whose it is.
    fn sockets(&self) -> BTreeMap<String, Option<Owner>> {
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
                let identity = Identity { uid, gid: meta.gid() };
                let owner = Owner { identity, directory: entry.path() };
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
    pub fn timeout(&self, now: Duration) -> Option<Duration> {
        let looks = self.looked.map(|looked| looked + LOOK);
        let due = self.engines.values().filter_map(|engine| engine.asker.due());
        Some(due.chain(looks).min()?.saturating_sub(now))
    }

    /// What the children have said.
    pub fn take(&mut self, now: Duration) -> Vec<Event> {
        let of = self.engines.iter_mut().flat_map(|(socket, Engine { asker, owner })| {
            asker.take(now).into_iter().map(|line| event(socket, owner.as_ref(), line))
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
fn event(socket: &str, owner: Option<&Owner>, line: Line<Container>) -> Event {
    Event::Engine { socket: socket.to_owned(), owner: uid(owner), line }
}

fn uid(owner: Option<&Owner>) -> Option<u32> {
    owner.map(|owner| owner.identity.uid)
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

fn command(program: &Path, socket: &str, owner: Option<&Owner>) -> io::Result<Command> {
    let who = owner.map_or_else(|| identity(Path::new(socket)), |owner| Ok(owner.identity))?;
    let mut command = Command::new(program);
    command.args(["agent-containers", socket, &who.uid.to_string(), &who.gid.to_string()]);
    command.env_clear();
    Ok(command)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn users_who_have_logged_out_leave_their_places_and_the_host_needs_none() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let places = [at("host.sock"), at("user/*/x.sock")];
        let user = |uid: usize| {
            let name = format!("user/{uid}");
            fs::create_dir_all(at(&name)).unwrap();
            drop(UnixListener::bind(at(&name).join("x.sock")).unwrap());
            at(&name).join("x.sock").display().to_string()
        };
        let sockets: Vec<_> = (100..=100 + SOCKETS_MAX).map(user).collect();
        // Nothing can be started, so each that is asked is away.
        let mut engines = Engines::new(at("no-program"), places.to_vec());
        let mut keep = |looks: u32| {
            let (mut away, mut gone, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
            for event in engines.keep(true, LOOK * looks) {
                match event {
                    Event::EngineGone { socket, .. } => gone.push(socket),
                    Event::Engine { socket, line: Line::Away(why), .. } => {
                        let left = why.starts_with("not asked; 64 sockets");
                        if left { left_out.push(socket) } else { away.push(socket) }
                    }
                    other => panic!("{other:?}"),
                }
            }
            (away, gone, left_out)
        };
        let (last, first) = (sockets[SOCKETS_MAX].clone(), sockets[0].clone());
        assert_eq!(keep(0), (sockets[..SOCKETS_MAX].to_vec(), vec![], vec![last.clone()]));
        drop(UnixListener::bind(at("host.sock")).unwrap());
        let (away, gone, left_out) = keep(1);
        assert!(away.contains(&at("host.sock").display().to_string()));
        assert!(gone.is_empty() && left_out.is_empty(), "once");
        // An engine that has ended may begin again.
        fs::remove_file(&first).unwrap();
        assert_eq!(keep(2).1, [""; 0]);
        fs::remove_dir(at("user/100")).unwrap();
        let (away, gone, left_out) = keep(3);
        assert_eq!((gone, left_out), (vec![first.clone(), last.clone()], vec![]));
        assert!(away.contains(&last) && !away.contains(&first));
    }

    #[test]
    fn podman_without_a_socket_is_away_until_it_or_that_of_a_user_has_one() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let socket = at(PODMAN_SOCKET).display().to_string();
        let places = [at("docker.sock"), at(PODMAN_SOCKET), at("user/*/podman/podman.sock")];
        let bind = |name: &str| {
            fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            drop(UnixListener::bind(at(name)).unwrap());
        };
        let looks = |installed: bool| {
            let mut engines = Engines::new(at("no-program"), places.to_vec());
            engines.podman = if installed { dir.path().to_owned() } else { at("none") };
            engines
        };
        // What is said of Podman's socket; of the others only that they are away.
        let said = |engines: &mut Engines, looks: u32| {
            let said =
                engines.keep(true, LOOK * looks).into_iter().filter_map(|event| match event {
                    Event::Engine { socket: of, line: Line::Away(why), .. } if of == socket => {
                        Some(why)
                    }
                    Event::EngineGone { socket: of, .. } if of == socket => Some("gone".to_owned()),
                    _ => None,
                });
            said.collect::<Vec<_>>()
        };
        bind("docker.sock");
        assert_eq!(said(&mut looks(false), 0), [""; 0]);
        let away = format!("Podman has no socket; type {START_PODMAN}");
        let mut engines = looks(true);
        assert_eq!(said(&mut engines, 0), [away.as_str()]);
        assert_eq!(said(&mut engines, 1), [""; 0], "once");
        bind("user/100/podman/podman.sock");
        assert_eq!(said(&mut engines, 2), ["gone"]);
        fs::remove_dir_all(at("user/100")).unwrap();
        assert_eq!(said(&mut engines, 3), [away.as_str()], "its user has logged out");
        // Its child cannot be started here, and says why.
        bind(PODMAN_SOCKET);
        let last = said(&mut engines, 4);
        assert!(last.len() == 1 && last[0] != away && last[0] != "gone", "{last:?}");
    }
}
