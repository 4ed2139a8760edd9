//! Requests as bytes, and readers of their replies. No I/O: whoever has bytes feeds them.

use std::fmt::Write as _;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The longest head of an HTTP reply, and the longest line of a Redis reply.
const HEAD_BYTES_MAX: usize = 8192;
/// The payload of a trickled message: a keystroke of SSH, encrypted and padded.
const KEYSTROKE_BYTES: usize = 48;
/// A DNS query or a short answer. The server echoes it.
const DATAGRAM_BYTES: usize = 120;
/// The key that a client of Redis gets, and that [`set_request`] sets.
const KEY: &str = "key";
const VALUE: &str = "abc";
/// The version of PostgreSQL's protocol: 3.0.
const POSTGRES_VERSION: u32 = 3 << 16;
/// The user and the database that PostgreSQL has from the start.
pub const DATABASE: &str = "postgres";
/// The rows of pgbench's table at scale 1, and a prime, so that each request takes another row.
const ACCOUNTS: u64 = 100_000;
const ACCOUNTS_STEP: u64 = 7919;
/// A message of PostgreSQL begins with its kind and its length, which does not count the kind.
const POSTGRES_HEAD_BYTES: usize = 5;

/// How a client talks to its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// HTTP/1.1, one connection a client
    HttpKeep,
    /// HTTP/1.1, one connection a request
    HttpClose,
    /// HTTP/3, one connection a client
    Http3,
    /// GET of three bytes from Redis
    Redis,
    /// ECHO of 48 bytes by Redis, as a keystroke over SSH
    RedisEcho,
    /// SELECT of one row of pgbench's table from PostgreSQL
    Postgres,
    /// One datagram each way, sent again after a second
    Datagram,
}

impl Protocol {
    /// True if each request has a connection of its own.
    pub fn closes(self) -> bool {
        self == Protocol::HttpClose
    }

    /// What a new connection says before its first request, which is answered as a request is.
    pub(super) fn greeting(self) -> Option<Vec<u8>> {
        let words = format!("user\0{DATABASE}\0database\0{DATABASE}\0\0");
        let startup = [&POSTGRES_VERSION.to_be_bytes()[..], words.as_bytes()].concat();
        (self == Protocol::Postgres).then(|| with_length(&startup))
    }

    /// The bytes of a request. `path` is that of HTTP; `number` tells datagrams apart.
    pub(super) fn request(self, path: &str, number: u64) -> Vec<u8> {
        let mut text = String::new();
        match self {
            Protocol::HttpKeep | Protocol::HttpClose => {
                let connection = if self.closes() { "Connection: close\r\n" } else { "" };
                let _ = write!(text, "GET {path} HTTP/1.1\r\nHost: lab\r\n{connection}\r\n");
            }
            // Its client writes and reads no bytes: see `http3`.
            Protocol::Http3 => {}
            Protocol::Redis => text = command(&["GET", KEY]),
            Protocol::RedisEcho => text = command(&["ECHO", &"k".repeat(KEYSTROKE_BYTES)]),
            Protocol::Postgres => {
                let aid = number * ACCOUNTS_STEP % ACCOUNTS + 1;
                let query = format!("SELECT abalance FROM pgbench_accounts WHERE aid = {aid};\0");
                return [&b"Q"[..], &with_length(query.as_bytes())].concat();
            }
            Protocol::Datagram => {
                let mut datagram = vec![0; DATAGRAM_BYTES];
                datagram[..8].copy_from_slice(&number.to_be_bytes());
                return datagram;
            }
        }
        text.into_bytes()
    }

    /// A reader for the reply to request `number`.
    pub(super) fn reader(self, number: u64) -> Reader {
        let state = match self {
            Protocol::HttpKeep | Protocol::HttpClose | Protocol::Http3 => State::HttpHead,
            Protocol::Redis | Protocol::RedisEcho => State::RedisLine,
            Protocol::Postgres => State::PostgresHead,
            Protocol::Datagram => State::Datagram(number),
        };
        Reader { state, head: Vec::new() }
    }
}

/// The request that sets the key which [`Protocol::Redis`] gets.
pub fn set_request() -> Vec<u8> {
    command(&["SET", KEY, VALUE]).into_bytes()
}

/// A command as Redis reads it: an array of strings, each with its length.
fn command(words: &[&str]) -> String {
    let mut text = format!("*{}\r\n", words.len());
    for word in words {
        let _ = write!(text, "${}\r\n{word}\r\n", word.len());
    }
    text
}

/// A message of PostgreSQL: its length, which counts itself, and what follows.
fn with_length(bytes: &[u8]) -> Vec<u8> {
    let length = bytes.len() as u32 + 4;
    [&length.to_be_bytes()[..], bytes].concat()
}

/// Reads one reply, in pieces of any length.
#[derive(Debug)]
pub(super) struct Reader {
    state: State,
    /// What has come of the head or line.
    head: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    HttpHead,
    RedisLine,
    PostgresHead,
    /// So many bytes of a message are missing; with the last one the reply is complete.
    PostgresBody(u64, bool),
    /// So many bytes are missing.
    Body(u64),
    /// The number that the reply repeats.
    Datagram(u64),
}

/// A reply that breaks its protocol or reports an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BadReply(pub(super) String);

impl Reader {
    /// Takes what came; true once the reply is complete.
    ///
    /// # Errors
    ///
    /// [`BadReply`] also if more comes than one reply. The connection is of no further use then.
    pub(super) fn feed(&mut self, mut bytes: &[u8]) -> Result<bool, BadReply> {
        match self.state {
            // A late reply to an earlier try or request is none to this one.
            State::Datagram(number) => {
                let first = bytes.first_chunk().map(|eight| u64::from_be_bytes(*eight));
                return Ok(first == Some(number));
            }
            State::PostgresHead | State::PostgresBody(..) => return self.feed_postgres(bytes),
            State::HttpHead => match self.head_until(&mut bytes, b"\r\n\r\n")? {
                None => return Ok(false),
                Some(head) => self.state = State::Body(content_length(&head)?),
            },
            State::RedisLine => match self.head_until(&mut bytes, b"\r\n")? {
                None => return Ok(false),
                Some(line) => self.state = State::Body(bulk_length(&line)?),
            },
            State::Body(_) => {}
        }
        let State::Body(missing) = &mut self.state else { return Ok(false) };
        if bytes.len() as u64 > *missing {
            return Err(BadReply(format!("{} bytes too many", bytes.len() as u64 - *missing)));
        }
        *missing -= bytes.len() as u64;
        Ok(*missing == 0)
    }

    /// Messages follow each other until the one that says that the server is ready.
    fn feed_postgres(&mut self, mut bytes: &[u8]) -> Result<bool, BadReply> {
        loop {
            if let State::PostgresBody(missing, last) = &mut self.state {
                let take = bytes.len().min(usize::try_from(*missing).unwrap_or(usize::MAX));
                *missing -= take as u64;
                bytes = &bytes[take..];
                match (*missing, *last, bytes.len()) {
                    (0, true, 0) => return Ok(true),
                    (0, true, more) => return Err(BadReply(format!("{more} bytes too many"))),
                    (0, false, _) => self.state = State::PostgresHead,
                    _ => return Ok(false),
                }
            }
            let take = bytes.len().min(POSTGRES_HEAD_BYTES - self.head.len());
            self.head.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            let &[kind, ref length @ ..] = self.head.as_slice() else { return Ok(false) };
            let Ok(length) = <[u8; 4]>::try_from(length) else { return Ok(false) };
            if kind == b'E' {
                return Err(BadReply("the server reports an error".to_owned()));
            }
            let length = u32::from_be_bytes(length);
            let missing = length.checked_sub(4).ok_or_else(|| BadReply("a bad length".into()))?;
            self.head.clear();
            self.state = State::PostgresBody(missing.into(), kind == b'Z');
        }
    }

    /// Collects a head up to and with its `end`, and leaves what follows in `bytes`.
    fn head_until(&mut self, bytes: &mut &[u8], end: &[u8]) -> Result<Option<String>, BadReply> {
        // The end may lie across two pieces.
        let from = self.head.len().saturating_sub(end.len() - 1);
        let had = self.head.len();
        let take = bytes.len().min(HEAD_BYTES_MAX - had);
        self.head.extend_from_slice(&bytes[..take]);
        let found = self.head[from..].windows(end.len()).position(|window| window == end);
        match found {
            Some(at) => {
                let head_bytes = from + at + end.len();
                *bytes = &bytes[head_bytes - had..];
                self.head.truncate(head_bytes);
                Ok(Some(String::from_utf8_lossy(&self.head).into_owned()))
            }
            None if self.head.len() == HEAD_BYTES_MAX => {
                Err(BadReply(format!("a head longer than {HEAD_BYTES_MAX} bytes")))
            }
            None => Ok(None),
        }
    }
}

/// The length of the body that follows an HTTP head.
fn content_length(head: &str) -> Result<u64, BadReply> {
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(BadReply(format!("the server answered `{status}`")));
    }
    let length = lines.filter_map(|line| line.split_once(':')).find_map(|(name, value)| {
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    length.ok_or_else(|| BadReply("an answer without Content-Length".to_owned()))
}

/// The bytes that follow the first line of a Redis reply.
fn bulk_length(line: &str) -> Result<u64, BadReply> {
    let bad = || BadReply(format!("the server answered `{}`", line.trim_end()));
    let (kind, rest) = line.split_at_checked(1).ok_or_else(bad)?;
    match kind {
        "+" | ":" => Ok(0),
        "$" => match rest.trim_end().parse::<i64>().map_err(|_| bad())? {
            // No such key.
            ..0 => Ok(0),
            bytes => Ok(bytes as u64 + 2),
        },
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HTTP: &[u8] = b"HTTP/1.1 200 OK\r\nServer: x\r\ncontent-length: 5\r\n\r\nhello";

    /// Feeds pieces of `piece` bytes; the number of bytes after which the reply was complete.
    fn fed(protocol: Protocol, reply: &[u8], piece: usize) -> Result<Option<usize>, BadReply> {
        let mut reader = protocol.reader(7);
        let mut taken = 0;
        for piece in reply.chunks(piece) {
            taken += piece.len();
            if reader.feed(piece)? {
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    #[test]
    fn replies_are_complete_with_their_last_byte_in_pieces_of_any_length() {
        let empty: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        for (protocol, reply) in [
            (Protocol::HttpClose, HTTP),
            (Protocol::HttpKeep, empty),
            (Protocol::Redis, b"$3\r\nabc\r\n"),
            (Protocol::Redis, b"$-1\r\n"),
            (Protocol::Redis, b"$0\r\n\r\n"),
            (Protocol::Redis, b"+OK\r\n"),
            (Protocol::Postgres, b"T\0\0\0\x06abD\0\0\0\x04Z\0\0\0\x05I"),
        ] {
            for piece in 1..=reply.len() {
                assert_eq!(fed(protocol, reply, piece), Ok(Some(reply.len())), "pieces of {piece}");
            }
            assert_eq!(fed(protocol, &reply[..reply.len() - 1], 3), Ok(None));
        }
    }

    #[test]
    fn bad_replies_are_refused() {
        let refused = |protocol, reply: &[u8]| fed(protocol, reply, 1000).unwrap_err().0;
        assert_eq!(
            refused(Protocol::HttpKeep, b"HTTP/1.1 404 Not Found\r\n\r\n"),
            "the server answered `HTTP/1.1 404 Not Found`"
        );
        let endless = b"HTTP/1.1 200 OK\r\n\r\n";
        assert_eq!(refused(Protocol::HttpKeep, endless), "an answer without Content-Length");
        assert_eq!(refused(Protocol::HttpKeep, &[HTTP, b"more"].concat()), "4 bytes too many");
        assert_eq!(refused(Protocol::Redis, b"-ERR no\r\n"), "the server answered `-ERR no`");
        assert_eq!(refused(Protocol::Redis, b"$x\r\n"), "the server answered `$x`");
        assert_eq!(refused(Protocol::Postgres, b"E\0\0\0\x05x"), "the server reports an error");
        assert_eq!(refused(Protocol::Postgres, b"T\0\0\0\x03"), "a bad length");
        assert_eq!(refused(Protocol::Postgres, b"Z\0\0\0\x05IT"), "1 bytes too many");
        let long = [b'x'; 2 * HEAD_BYTES_MAX];
        assert_eq!(refused(Protocol::Redis, &long), "a head longer than 8192 bytes");
        assert!(fed(Protocol::HttpKeep, &long, 1000).is_err());
    }

    #[test]
    fn a_datagram_answers_its_own_request_only() {
        let reader = |number| Protocol::Datagram.reader(number);
        let datagram = Protocol::Datagram.request("", 7);
        assert_eq!(datagram.len(), DATAGRAM_BYTES);
        assert_eq!(reader(7).feed(&datagram), Ok(true));
        assert_eq!(reader(8).feed(&datagram), Ok(false));
        assert_eq!(reader(7).feed(&datagram[..7]), Ok(false));
    }

    #[test]
    fn requests_are_what_servers_read() {
        let text = |protocol: Protocol| String::from_utf8(protocol.request("/10k", 0)).unwrap();
        assert_eq!(text(Protocol::HttpKeep), "GET /10k HTTP/1.1\r\nHost: lab\r\n\r\n");
        assert_eq!(
            text(Protocol::HttpClose),
            "GET /10k HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n"
        );
        assert_eq!(text(Protocol::Redis), "*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n");
        assert!(text(Protocol::RedisEcho).starts_with("*2\r\n$4\r\nECHO\r\n$48\r\nkkk"));
        assert_eq!(Protocol::Redis.greeting(), None);
        let startup = Protocol::Postgres.greeting().unwrap();
        assert_eq!(startup, b"\0\0\0\x29\0\x03\0\0user\0postgres\0database\0postgres\0\0");
        let query = b"SELECT abalance FROM pgbench_accounts WHERE aid = 7920;\0";
        let request = Protocol::Postgres.request("", 1);
        assert_eq!(request, [&b"Q\0\0\0\x3c"[..], query].concat());
        assert_eq!(set_request(), b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$3\r\nabc\r\n");
    }
}
