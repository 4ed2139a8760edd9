//! The sockets of the load: one thread, one epoll, any number of clients.
//!
//! A connection that has had its one reply stays open until the server closes it, as it does after
//! `Connection: close`; its client goes on meanwhile. So the server keeps the state of closed connections,
//! and the client's ports are free again.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    net::SocketAddr,
    os::fd::OwnedFd,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send,
        socket_with, sockopt,
    },
    time::{ClockId, clock_gettime},
};
use tidegate_instruments::sock::{recv_stamped, stamp_received};

use super::{
    CONNECTED, LoadArgs,
    protocol::{BadReply, Protocol, Reader},
    schedule::{Handed, Schedule, Took},
};
use crate::stalls::monotonic_ns;

/// Clients that keep their connections have so long to make them before the clock starts.
pub(super) const CONNECT: Duration = Duration::from_secs(30);
/// A resolver asks again after this.
const RETRY: Duration = Duration::from_secs(1);
/// So many more connections may break than requests are answered, before it gives up. A server may close a
/// connection after some requests.
pub(super) const ERRORS_MAX: u64 = 1000;
const EVENTS_MAX: usize = 256;
const CHUNK_BYTES: usize = 64 * 1024;
const WAIT_MAX: Duration = Duration::from_millis(100);

/// What the clients saw.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// When the first request was due, on the monotonic clock.
    pub(super) start_ns: u64,
    /// The requests with a reply.
    pub(super) answered: Vec<Took>,
    /// Those without one, until nobody waited any longer.
    pub(super) unanswered: Vec<Took>,
    /// Connections that broke and replies that were wrong. Their requests are sent again.
    pub(super) errors: u64,
    /// Datagrams that were sent again.
    pub(super) retries: u64,
    /// What replies were made of, HTTP's heads included.
    pub(super) reply_bytes: u64,
}

pub(super) fn run(args: &LoadArgs) -> anyhow::Result<Seen> {
    let mut load = Load {
        args,
        poller: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        connections: Vec::new(),
        empty: Vec::new(),
        clients: (0..args.clients).map(|_| Client::default()).collect(),
        retries: VecDeque::new(),
        chunk: vec![0; CHUNK_BYTES],
        real_ahead_ns: real_ns().saturating_sub(monotonic_ns()),
        seen: Seen::default(),
    };
    if !args.protocol.closes() {
        load.connect_all()?;
    }
    eprintln!("{CONNECTED}");
    let start_ns = monotonic_ns() + args.lead.as_nanos() as u64;
    let end_ns = start_ns + args.duration.as_nanos() as u64;
    let schedule = Schedule::new(args.clients, args.rate_hz, (start_ns, end_ns));
    load.seen.start_ns = start_ns;
    load.serve(schedule, end_ns + args.drain.as_nanos() as u64)?;
    Ok(load.seen)
}

#[derive(Debug)]
struct Load<'a> {
    args: &'a LoadArgs,
    poller: OwnedFd,
    /// By the number that epoll knows them by.
    connections: Vec<Option<Connection>>,
    /// The numbers of those that are gone.
    empty: Vec<usize>,
    clients: Vec<Client>,
    /// Datagrams and when they are sent again, in order.
    retries: VecDeque<(u64, Handed)>,
    chunk: Vec<u8>,
    /// The clock of the day, in which the kernel notes when bytes came, less the monotonic one.
    real_ahead_ns: u64,
    seen: Seen,
}

#[derive(Debug, Default)]
struct Client {
    connection: Option<usize>,
    request: Option<Handed>,
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    /// None: it waits for the server to close.
    client: Option<usize>,
    state: State,
    /// What it is to say first, or has said and has no answer to yet.
    greets: bool,
}

#[derive(Debug)]
enum State {
    Connecting,
    /// Connected; nothing is asked.
    Idle,
    /// So many bytes of the request are sent.
    Writing(Vec<u8>, usize),
    Reading(Reader),
}

/// What came of looking at a connection.
enum Looked {
    /// It waits for the network.
    Waits,
    Connected,
    /// The reply is complete, since this time of the monotonic clock.
    Replied(u64),
    /// The server closed it, or it broke.
    Gone,
}

impl Load<'_> {
    /// Makes the connections of clients that keep them.
    fn connect_all(&mut self) -> anyhow::Result<()> {
        for client in 0..self.clients.len() {
            self.open(client)?;
        }
        let deadline_ns = monotonic_ns() + CONNECT.as_nanos() as u64;
        let connecting = |load: &Self| {
            let all = load.connections.iter().flatten();
            all.filter(|one| one.greets || matches!(one.state, State::Connecting)).count()
        };
        while connecting(self) > 0 {
            ensure!(monotonic_ns() < deadline_ns, "cannot connect to {}", self.args.server);
            self.wait(Some(deadline_ns))?;
        }
        Ok(())
    }

    /// Sends what is due and reads what comes, until all is answered or `last_ns`.
    fn serve(&mut self, mut schedule: Schedule, last_ns: u64) -> anyhow::Result<()> {
        loop {
            let now_ns = monotonic_ns();
            self.retry(now_ns)?;
            while let Some(handed) = schedule.next(now_ns) {
                self.clients[handed.client].request = Some(handed);
                self.ask(handed)?;
            }
            let busy = self.clients.iter().any(|client| client.request.is_some());
            let ended = !busy && now_ns >= last_ns - self.args.drain.as_nanos() as u64;
            if ended || now_ns >= last_ns {
                break;
            }
            let retry_ns = self.retries.front().map(|(at_ns, _)| *at_ns);
            let wakes_ns = schedule.wakes_ns().into_iter().chain(retry_ns).min();
            for client in self.wait(Some(wakes_ns.unwrap_or(last_ns).min(last_ns)))? {
                schedule.set_free(client);
            }
        }
        let ended_ns = monotonic_ns();
        let left =
            self.clients.iter().filter_map(|client| client.request.map(|handed| handed.due_ns));
        let never = schedule.never_sent();
        let left = left.chain(never).map(|due_ns| Took { due_ns, ended_ns });
        self.seen.unanswered.extend(left);
        Ok(())
    }

    /// Sends a client's request, on a new connection if there is none.
    fn ask(&mut self, handed: Handed) -> anyhow::Result<()> {
        let request = self.args.protocol.request(&self.args.path, handed.number);
        let at = match self.clients[handed.client].connection {
            Some(at) => at,
            None => self.open(handed.client)?,
        };
        if let Some(connection) = &mut self.connections[at] {
            if connection.greets || matches!(connection.state, State::Connecting) {
                // It is sent when the connection is there.
                return Ok(());
            }
            connection.state = State::Writing(request, 0);
        }
        if self.args.protocol == Protocol::Datagram {
            let again_ns = monotonic_ns() + RETRY.as_nanos() as u64;
            self.retries.push_back((again_ns, handed));
        }
        // What comes of it shows with the next event.
        self.write(at);
        Ok(())
    }

    /// Sends datagrams again that had no reply in time.
    fn retry(&mut self, now_ns: u64) -> anyhow::Result<()> {
        while let Some((_, handed)) = self.retries.front().copied().filter(|(at, _)| *at <= now_ns)
        {
            self.retries.pop_front();
            if self.clients[handed.client].request == Some(handed) {
                self.seen.retries += 1;
                self.ask(handed)?;
            }
        }
        Ok(())
    }

    /// Waits for events, at most until `until_ns`, and deals with them. Returns the clients that have their
    /// reply.
    fn wait(&mut self, until_ns: Option<u64>) -> anyhow::Result<Vec<usize>> {
        let most_ns = WAIT_MAX.as_nanos() as u64;
        let rest_ns = until_ns.map_or(most_ns, |until| until.saturating_sub(monotonic_ns()));
        let rest = Timespec { tv_sec: 0, tv_nsec: rest_ns.min(most_ns) as _ };
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS_MAX);
        match epoll::wait(&self.poller, spare_capacity(&mut events), Some(&rest)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for the sockets"),
        }
        let (mut free, mut gone) = (Vec::new(), Vec::new());
        for event in &events {
            let at = event.data.u64() as usize;
            let Some(client) = self.connections[at].as_ref().map(|one| one.client) else {
                continue;
            };
            match (self.look(at)?, client) {
                (Looked::Waits | Looked::Connected, _) => {}
                (Looked::Replied(ended_ns), Some(client)) => {
                    if let Some(handed) = self.clients[client].request.take() {
                        self.seen.answered.push(Took { due_ns: handed.due_ns, ended_ns });
                        free.push(client);
                    }
                    if self.args.protocol.closes() {
                        self.clients[client].connection = None;
                        // It may be closed already, and then no event comes any more.
                        match self.look_for_end(at)? {
                            Looked::Gone => gone.push(at),
                            _ => self.let_go(at),
                        }
                    }
                }
                (Looked::Replied(_) | Looked::Gone, None) => gone.push(at),
                (Looked::Gone, Some(client)) => {
                    gone.push(at);
                    self.clients[client].connection = None;
                    // A kept connection may be closed between two requests.
                    if self.clients[client].request.is_some() {
                        self.seen.errors += 1;
                        let most = ERRORS_MAX + self.seen.answered.len() as u64;
                        ensure!(self.seen.errors < most, "too many connections break");
                        self.open(client)?;
                    }
                }
            }
        }
        // Only now, so that no event of this batch meets another connection of the same number.
        for at in gone {
            self.connections[at] = None;
            self.empty.push(at);
        }
        Ok(free)
    }

    /// Begins a connection for a client; its number.
    fn open(&mut self, client: usize) -> anyhow::Result<usize> {
        let server = self.args.server;
        let socket = socket(server, self.args.protocol)?;
        let state = match connect(&socket, &server) {
            Ok(()) => State::Idle,
            Err(Errno::INPROGRESS) => State::Connecting,
            Err(error) => return Err(error).with_context(|| format!("cannot connect to {server}")),
        };
        let at = self.empty.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let all = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP;
        let data = epoll::EventData::new_u64(at as u64);
        epoll::add(&self.poller, &socket, data, all | epoll::EventFlags::ET)?;
        let greets = self.args.protocol.greeting().is_some();
        self.connections[at] = Some(Connection { socket, client: Some(client), state, greets });
        self.clients[client].connection = Some(at);
        Ok(at)
    }

    /// Leaves a connection to the server, who closes it.
    fn let_go(&mut self, at: usize) {
        if let Some(connection) = &mut self.connections[at] {
            connection.client = None;
            connection.state = State::Idle;
        }
    }

    /// Does what a connection can do now.
    fn look(&mut self, at: usize) -> anyhow::Result<Looked> {
        let Some(connection) = &mut self.connections[at] else { return Ok(Looked::Gone) };
        if matches!(connection.state, State::Connecting) {
            match sockopt::socket_error(&connection.socket)? {
                Err(_) => return Ok(Looked::Gone),
                Ok(()) if rustix::net::getpeername(&connection.socket).is_err() => {
                    return Ok(Looked::Waits);
                }
                Ok(()) => connection.state = State::Idle,
            }
            self.begin(at);
        }
        let Some(connection) = &mut self.connections[at] else { return Ok(Looked::Gone) };
        if matches!(connection.state, State::Writing(..)) {
            match self.write(at) {
                Looked::Connected => {}
                other => return Ok(other),
            }
        }
        let Some(connection) = &mut self.connections[at] else { return Ok(Looked::Gone) };
        let State::Reading(reader) = &mut connection.state else { return self.look_for_end(at) };
        loop {
            match recv_stamped(&connection.socket, &mut self.chunk) {
                Ok((0, _)) if self.args.protocol != Protocol::Datagram => return Ok(Looked::Gone),
                Ok((bytes, stamp_ns)) => {
                    self.seen.reply_bytes += if connection.greets { 0 } else { bytes as u64 };
                    match reader.feed(&self.chunk[..bytes]) {
                        Ok(false) => {}
                        Ok(true) if connection.greets => {
                            connection.greets = false;
                            connection.state = State::Idle;
                            self.begin(at);
                            return Ok(self.write(at));
                        }
                        Ok(true) => {
                            connection.state = State::Idle;
                            // The client may have waited for a CPU since; the network had no part in that.
                            let came_ns = stamp_ns.map(|ns| ns.saturating_sub(self.real_ahead_ns));
                            let now_ns = monotonic_ns();
                            return Ok(Looked::Replied(
                                came_ns.map_or(now_ns, |ns| ns.min(now_ns)),
                            ));
                        }
                        Err(BadReply(why)) => bail!("{}: {why}", self.args.server),
                    }
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return Ok(Looked::Waits),
                    ErrorKind::Interrupted => {}
                    ErrorKind::ConnectionRefused if self.args.protocol == Protocol::Datagram => {}
                    _ => return Ok(Looked::Gone),
                },
            }
        }
    }

    /// What a connection that is ready says next: its greeting, or the request that waits for it.
    fn begin(&mut self, at: usize) {
        let Some(connection) = &mut self.connections[at] else { return };
        let protocol = self.args.protocol;
        let request = connection.client.and_then(|client| self.clients[client].request);
        let words = match protocol.greeting().filter(|_| connection.greets) {
            Some(greeting) => Some(greeting),
            None => request.map(|handed| protocol.request(&self.args.path, handed.number)),
        };
        if let Some(words) = words {
            connection.state = State::Writing(words, 0);
        }
    }

    /// Sends what is left of a request.
    fn write(&mut self, at: usize) -> Looked {
        let Some(connection) = &mut self.connections[at] else { return Looked::Gone };
        let State::Writing(request, sent) = &mut connection.state else { return Looked::Connected };
        while *sent < request.len() {
            match send(&connection.socket, &request[*sent..], SendFlags::NOSIGNAL) {
                Ok(bytes) => *sent += bytes,
                Err(Errno::AGAIN) => return Looked::Waits,
                Err(Errno::INTR) => {}
                // The limit dropped the datagram on its way out; it is sent again in time.
                Err(Errno::PERM | Errno::NOBUFS | Errno::CONNREFUSED)
                    if self.args.protocol == Protocol::Datagram =>
                {
                    *sent = request.len();
                }
                Err(_) => return Looked::Gone,
            }
        }
        let request = connection.client.and_then(|client| self.clients[client].request);
        let number = request.map_or(0, |handed| handed.number);
        connection.state = State::Reading(self.args.protocol.reader(number));
        Looked::Connected
    }

    /// Reads from a connection that nothing is to come from but its end.
    fn look_for_end(&mut self, at: usize) -> anyhow::Result<Looked> {
        let Some(connection) = &self.connections[at] else { return Ok(Looked::Gone) };
        loop {
            match recv(&connection.socket, self.chunk.as_mut_slice(), RecvFlags::empty()) {
                // A doubled or late datagram.
                Ok((_, 1..)) => {}
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Looked::Waits),
                Err(Errno::CONNREFUSED) if self.args.protocol == Protocol::Datagram => {}
                Ok(_) | Err(_) => return Ok(Looked::Gone),
            }
        }
    }
}

/// Now, on the clock of the day.
fn real_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn socket(server: SocketAddr, protocol: Protocol) -> io::Result<OwnedFd> {
    let family = if server.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let kind = if protocol == Protocol::Datagram { SocketType::DGRAM } else { SocketType::STREAM };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, kind, flags, None)?;
    stamp_received(&socket)?;
    if kind == SocketType::STREAM {
        sockopt::set_tcp_nodelay(&socket, true)?;
    }
    Ok(socket)
}
