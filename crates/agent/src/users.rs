//! Limits for `tidegate run` of normal users: a socket in the run directory for members of a group.
//!
//! A thread of its own serves it, so that nobody who asks keeps the agent's loop waiting. A user can limit a
//! cgroup that belongs to them and that the asking process has made for its command. The limit is in the
//! store, beside the limits that hold the cgroups above: all of them hold. It ends with the connection. If
//! the agent ends first it stays, and the next agent takes it off when the process that asked has ended.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{PermissionsExt, chown},
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
        socket_with, sockopt,
    },
};
use tidegate_core::Scope;
use tidegate_host::{
    apply::Backend,
    auto::{Trees, Written},
    host::Host,
    plan::{Wanted, join},
    run::{
        is_left_over, runner_of,
        socket::{Answer, REQUEST_MAX, Request, SOCKET, receive, send},
    },
    settings::{Patch, fields::find},
    status::LimitStatus,
    summary::Summary,
};
use tidegate_sys::{cgroup::Hierarchy, features};

/// Connections at most, each of which is a limit.
const CLIENTS_MAX: usize = 256;
/// Those of one user.
const CLIENTS_PER_USER_MAX: usize = 16;
/// How long a connection may be without a limit.
const HELLO: Duration = Duration::from_secs(5);
/// Limits whose process has gone are looked for so often.
const SWEEP: Duration = Duration::from_secs(5);
const BACKLOG: i32 = 64;

/// Who asks, as the kernel says.
#[derive(Debug, Clone, Copy)]
struct Peer {
    uid: u32,
    pid: u32,
}

struct Client {
    socket: OwnedFd,
    peer: Peer,
    since: Instant,
    /// The name of its limit.
    limit: Option<String>,
}

struct Server {
    host: Host,
    listener: OwnedFd,
    clients: Vec<Client>,
    swept: Option<Instant>,
}

/// Makes the socket for members of a group, and serves it from now on. Without a group it is for root alone,
/// and limits that users have left end all the same.
///
/// # Errors
/// Those of the operating system.
pub fn serve(host: Host, run_dir: &Path, group: Option<u32>) -> io::Result<()> {
    let path = run_dir.join(SOCKET);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&listener, &SocketAddrUnix::new(&path)?)?;
    listen(&listener, BACKLOG)?;
    // Who may connect is answered: a socket without a listener looks as if there were no agent.
    chown(&path, None, group)?;
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
    let mut server = Server { host, listener, clients: Vec::new(), swept: None };
    thread::Builder::new().name("users".to_owned()).spawn(move || {
        loop {
            let started = Instant::now();
            if server.turn() {
                // Others have the store for as long as users had it.
                thread::sleep(started.elapsed());
            }
            server.wait();
        }
    })?;
    Ok(())
}

impl Server {
    fn wait(&self) {
        let sockets = self.clients.iter().map(|client| client.socket.as_fd());
        let all = std::iter::once(self.listener.as_fd()).chain(sockets);
        let mut all: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let timeout = Timespec::try_from(SWEEP.min(HELLO)).ok();
        let _ = poll(&mut all, timeout.as_ref());
    }

    /// Does what is to be done; at most one change of the host's limits, and whether there was one.
    fn turn(&mut self) -> bool {
        self.accept();
        let now = Instant::now();
        let mut at = 0;
        while let Some(client) = self.clients.get_mut(at) {
            let request = match receive::<Request>(&client.socket, REQUEST_MAX) {
                // It is late only now: what has come while this was busy counts.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if client.limit.is_none() && client.since + HELLO <= now {
                        self.clients.swap_remove(at);
                    } else {
                        at += 1;
                    }
                    continue;
                }
                request => request,
            };
            let answer = match (request, &client.limit) {
                (Ok(Some((Request::Limit(settings), Some(file)))), None) => {
                    match put_on(&self.host, client.peer, &file, &settings) {
                        Ok(name) => {
                            client.limit = Some(name);
                            Some(Answer::InForce)
                        }
                        Err(why) => Some(Answer::Refused(why)),
                    }
                }
                (Ok(Some((Request::End { exit_code, elapsed_ns }, None))), Some(name)) => {
                    let limit = self.host.find(name).ok().flatten();
                    let limit = limit.and_then(|limit| LimitStatus::read(&limit).ok());
                    Some(Answer::Ended(Summary { exit_code, elapsed_ns, limit }.report()))
                }
                (Ok(None), _) => None,
                _ => Some(Answer::Refused("that is no request of this version".to_owned())),
            };
            let goes_on = matches!(answer, Some(Answer::InForce));
            if !goes_on && let Some(name) = client.limit.take() {
                // What cannot be taken off now is swept.
                let _ = take_off(&self.host, &name);
            }
            let sent = answer.map(|answer| send(&client.socket, &answer, None));
            if !goes_on || sent.is_some_and(|sent| sent.is_err()) {
                let client = self.clients.swap_remove(at);
                client.limit.map(|name| take_off(&self.host, &name));
            }
            return true;
        }
        self.sweep(now)
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        for _ in 0..BACKLOG {
            let Ok(socket) = accept_with(&self.listener, flags) else { return };
            let Ok(peer) = sockopt::socket_peercred(&socket) else { continue };
            let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
            let peer = Peer { uid: peer.uid.as_raw(), pid };
            let of_user = self.clients.iter().filter(|client| client.peer.uid == peer.uid).count();
            if self.clients.len() >= CLIENTS_MAX || of_user >= CLIENTS_PER_USER_MAX {
                let why = format!(
                    "{CLIENTS_PER_USER_MAX} commands of a user and {CLIENTS_MAX} in all can be limited at \
                     once; wait for another one to end"
                );
                let _ = send(&socket, &Answer::Refused(why), None);
                continue;
            }
            self.clients.push(Client { socket, peer, since: Instant::now(), limit: None });
        }
    }

    /// Takes off a limit whose process has ended, if there is one.
    fn sweep(&mut self, now: Instant) -> bool {
        if self.swept.is_some_and(|swept| swept + SWEEP > now) {
            return false;
        }
        let names = self.host.store().names().unwrap_or_default().into_iter();
        let held = |name: &str| self.clients.iter().any(|c| c.limit.as_deref() == Some(name));
        let mut gone =
            names.filter(|name| is_left_over(name) && !held(name) && self.is_on_its_own(name));
        let taken = gone.next().is_some_and(|name| take_off(&self.host, &name).is_ok());
        if !taken {
            self.swept = Some(now);
        }
        taken
    }

    /// Whether a limit is on the cgroup of its name. One that somebody has named so by hand is not.
    fn is_on_its_own(&self, name: &str) -> bool {
        let limit = self.host.find(name).ok().flatten();
        let scope = limit.and_then(|limit| limit.scope.or(limit.installed_on));
        scope.is_none_or(|scope| scope.name().rsplit('/').next() == Some(name))
    }
}

/// Puts a limit on; its name.
fn put_on(
    host: &Host,
    peer: Peer,
    cgroup: &OwnedFd,
    settings: &[(String, String)],
) -> Result<String, String> {
    let path = own_cgroup(host.hierarchy(), peer, cgroup)?;
    let mut patch = Patch::default();
    for (key, text) in settings {
        let field = find(key).ok_or_else(|| format!("there is no setting `{key}`"))?;
        field.set(&mut patch, text).map_err(|e| format!("--{key}: {e}"))?;
    }
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    let scope = Scope::Cgroup(path);
    let written = Written { name: &name, scope: &scope, parent: None, patch: &patch };
    let options = written.options(&Trees::default(), features::kernel(), None);
    let options = options.map_err(|e| format!("--{}: {}", e.field, e.problem.as_flags()))?;
    let wanted = Wanted {
        name: name.clone(),
        scope,
        members: Vec::new(),
        options,
        parent: None,
        asked: patch.asked(),
    };
    let mut host = host.lock().map_err(|e| e.to_string())?;
    let done = host.reserve_journal().map_err(|e| e.to_string()).and_then(|()| {
        let present = host.host().present().map_err(|e| e.to_string())?;
        let wanted = join(&present, &wanted).map_err(|e| e.to_string())?;
        host.add(&wanted).map_err(|e| e.to_string())
    });
    host.close_and_go_on();
    done.map(|()| name)
}

fn take_off(host: &Host, name: &str) -> Result<(), String> {
    let mut host = host.lock().map_err(|e| e.to_string())?;
    let done = host.remove(name).map_err(|e| e.to_string());
    host.close_and_go_on();
    done
}

/// The path of a cgroup that the peer owns and has made for its command.
fn own_cgroup(hierarchy: &Hierarchy, peer: Peer, cgroup: &OwnedFd) -> Result<String, String> {
    let (path, owner) = hierarchy.of_directory(cgroup).map_err(|e| e.to_string())?;
    is_own(peer, &path, owner, runner_of(&path))?;
    Ok(path)
}

fn is_own(peer: Peer, path: &str, owner: u32, maker: Option<u32>) -> Result<(), String> {
    let Peer { uid, pid } = peer;
    if owner != uid {
        return Err(format!("cgroup `{path}` belongs to user {owner}, not to {uid}"));
    }
    if maker != Some(pid) {
        return Err(format!("cgroup `{path}` is not of process {pid}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::{
        net::{SocketType, socketpair},
        process::geteuid,
    };

    use super::*;

    #[test]
    fn root_users_a_request_that_has_waited_is_answered() {
        if !geteuid().is_root() {
            return println!("SKIP root_users_a_request_that_has_waited_is_answered: needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        let pair = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
        };
        let [(asks, its), (silent, other), (listener, _)] = [pair(), pair(), pair()];
        let client = |socket| Client {
            socket,
            peer: Peer { uid: 1000, pid: 7 },
            since: Instant::now().checked_sub(2 * HELLO).unwrap(),
            limit: None,
        };
        let host = Host::open(&dir.path().join("tidegate")).unwrap();
        let clients = vec![client(other), client(its)];
        let mut server = Server { host, listener, clients, swept: None };
        // Of no cgroup at all: what counts is that there is an answer.
        send(&asks, &Request::Limit(Vec::new()), None).unwrap();
        while server.turn() {}
        let answer = receive::<Answer>(&asks, REQUEST_MAX).unwrap();
        assert!(matches!(answer, Some((Answer::Refused(_), None))), "{answer:?}");
        // A program that another test starts has this end, too, until it runs.
        let mut end = [PollFd::new(&silent, PollFlags::IN)];
        poll(&mut end, Timespec::try_from(HELLO).ok().as_ref()).unwrap();
        assert!(receive::<Answer>(&silent, REQUEST_MAX).unwrap().is_none());
    }

    #[test]
    fn a_cgroup_is_the_peers_that_owns_and_has_made_it() {
        let is_own = |owner, maker| is_own(Peer { uid: 1000, pid: 7 }, "a", owner, maker);
        assert_eq!(is_own(1000, Some(7)), Ok(()));
        for (owner, maker) in [(0, Some(7)), (1001, Some(7)), (1000, Some(8)), (1000, None)] {
            assert!(is_own(owner, maker).is_err(), "{owner} {maker:?}");
        }
    }
}
