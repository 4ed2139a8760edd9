//! A row of a table: one mix of requests, bulk transfers, limit and path.
//!
//! The name of a row says all of it, in words joined by hyphens; what it leaves out has its usual value:
//!
//! | words | what | usual |
//! |---|---|---|
//! | `nginx-close-10k`, `nginx-keep-1k`, `h3-10k`, `redis`, `pgbench`, `dns`, `trickle` | the requests | – |
//! | `20m`, `1g` | the limit, in bit/s | – |
//! | `5c` | clients | 20; 5 of `trickle` |
//! | `1b` | bulk flows beside them | 4 |
//! | `open` | requests come on a schedule, for 30 % of the limit | the next with each reply |
//! | `ingress` | the clients' side is limited, and receives | the servers' side is, and sends |
//! | `bbr` | congestion control of all | CUBIC |
//! | `20ms` | round trip of the path | a plain cable |

use std::{fmt, str::FromStr, time::Duration};

use tidegate_core::Direction;

use crate::{context::Context, report::Case, tools::load::Protocol};

const KBIT: u64 = 1000;
pub(in crate::experiments) const MBIT: u64 = 1000 * KBIT;
pub(in crate::experiments) const GBIT: u64 = 1000 * MBIT;
const CC: &str = "cubic";
const CLIENTS: usize = 20;
const BULK: u32 = 4;
/// A person at a terminal types so fast.
const TRICKLE_CLIENTS: usize = 5;
const TRICKLE_HZ: u64 = 10;
/// Queries of DNS a second, of each client.
const DNS_HZ: u64 = 10;
/// What an open loop asks of the limit, and at most.
const OPEN_SHARE: f64 = 0.3;
const OPEN_MOST_HZ: u64 = 5000;

/// Of each TCP segment: Ethernet, IPv4, TCP with timestamps.
const HEADER_BYTES: f64 = 66.0;
const SEGMENT_BYTES: f64 = 1448.0;
/// What a server sends besides the reply on a connection of its own: SYN, the ACK of the request, FIN.
const CONNECTION_BYTES: f64 = 74.0 + 66.0 + 66.0;
/// Ethernet, IPv4, UDP.
const UDP_HEADER_BYTES: f64 = 42.0;
/// Of each datagram of quinn: the short header with 8 bytes of an id, the stream frame's, the seal.
const QUIC_HEADER_BYTES: f64 = 35.0;
/// The rest of the 1452 bytes that it sends in one.
const QUIC_DATA_BYTES: f64 = 1452.0 - QUIC_HEADER_BYTES;
/// What TCP sends at once on a new connection.
const FIRST_SEGMENTS: f64 = 10.0;

/// What the requests are, and the server that answers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::experiments) enum App {
    /// nginx and its file of so many kB, one connection a request.
    NginxClose(u64),
    /// The same, one connection a client.
    NginxKeep(u64),
    /// So many kB over HTTP/3, one connection a client.
    Http3(u64),
    Redis,
    /// pgbench's SELECT from PostgreSQL.
    Pgbench,
    /// Datagrams that a server echoes.
    Dns,
    /// Keystrokes that come back, 10 a second on each connection.
    Trickle,
}

impl App {
    pub(in crate::experiments) fn protocol(self) -> Protocol {
        match self {
            App::NginxClose(_) => Protocol::HttpClose,
            App::NginxKeep(_) => Protocol::HttpKeep,
            App::Http3(_) => Protocol::Http3,
            App::Redis => Protocol::Redis,
            App::Pgbench => Protocol::Postgres,
            App::Dns => Protocol::Datagram,
            App::Trickle => Protocol::RedisEcho,
        }
    }

    /// The file that a web server serves.
    pub(in crate::experiments) fn file_bytes(self) -> Option<u64> {
        match self {
            App::NginxClose(kb) | App::NginxKeep(kb) | App::Http3(kb) => Some(kb * 1000),
            _ => None,
        }
    }

    fn usual_clients(self) -> usize {
        if self == App::Trickle { TRICKLE_CLIENTS } else { CLIENTS }
    }
}

impl fmt::Display for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            App::NginxClose(kb) => write!(f, "nginx-close-{kb}k"),
            App::NginxKeep(kb) => write!(f, "nginx-keep-{kb}k"),
            App::Http3(kb) => write!(f, "h3-{kb}k"),
            App::Redis => f.write_str("redis"),
            App::Pgbench => f.write_str("pgbench"),
            App::Dns => f.write_str("dns"),
            App::Trickle => f.write_str("trickle"),
        }
    }
}

/// A row. Its name is its [`fmt::Display`], and is read back by [`FromStr`].
#[derive(Debug, Clone, PartialEq)]
pub(in crate::experiments) struct Row {
    pub(in crate::experiments) app: App,
    pub(in crate::experiments) limit_bit_s: u64,
    pub(in crate::experiments) clients: usize,
    pub(in crate::experiments) bulk: u32,
    /// Requests come on a schedule.
    pub(in crate::experiments) open: bool,
    pub(in crate::experiments) direction: Direction,
    pub(in crate::experiments) cc: &'static str,
    /// Of a link of its own; none: the path is what the user wants.
    pub(in crate::experiments) rtt: Option<Duration>,
}

impl Row {
    pub(in crate::experiments) fn new(app: App, limit_bit_s: u64) -> Row {
        Row {
            app,
            limit_bit_s,
            clients: app.usual_clients(),
            bulk: BULK,
            open: false,
            direction: Direction::Egress,
            cc: CC,
            rtt: None,
        }
    }

    pub(in crate::experiments) fn case(&self, ctx: &Context) -> Case {
        let direction = if self.direction == Direction::Egress { "egress" } else { "ingress" };
        let case = Case::new()
            .with("app", self.app.to_string())
            .with("clients", self.clients)
            .with("bulk_flows", self.bulk)
            .with("loop", if self.rate_hz().is_some() { "open" } else { "closed" })
            .with("direction", direction)
            .with("limit_bit_s", self.limit_bit_s)
            .with("cc", self.cc);
        case.with_link(self.rtt.map(|rtt| ctx.link(rtt)).or(ctx.usual_link()))
    }

    /// Requests a second, where they come on a schedule.
    pub(in crate::experiments) fn rate_hz(&self) -> Option<u64> {
        match self.app {
            App::Dns => return Some(DNS_HZ * self.clients as u64),
            App::Trickle => return Some(TRICKLE_HZ * self.clients as u64),
            _ => {}
        }
        let reply_bytes = self.app.file_bytes().unwrap_or(0) as f64;
        let fits_hz = OPEN_SHARE * self.limit_bit_s as f64 / 8.0 / self.wire_bytes(reply_bytes);
        self.open.then(|| (fits_hz as u64).clamp(1, OPEN_MOST_HZ))
    }

    /// How long a request takes, in microseconds, whose reply passes at the part of the limit that each of
    /// all connections has, if all of them always want it: serialization and round trips, nothing else. `rtt`
    /// is that of the empty path.
    pub(in crate::experiments) fn fair_us(&self, reply_bytes: f64, rtt: Duration) -> f64 {
        let connections = self.clients as f64 + f64::from(self.bulk);
        let part_bit_s = self.limit_bit_s as f64 / connections;
        let sent_us = self.wire_bytes(reply_bytes) * 8.0 / part_bit_s * 1e6;
        let slow_start = match self.app.protocol().closes() {
            true => (segments(reply_bytes) / FIRST_SEGMENTS + 1.0).log2().ceil(),
            false => 1.0,
        };
        let connect = if self.app.protocol().closes() { 1.0 } else { 0.0 };
        sent_us + (connect + slow_start) * rtt.as_secs_f64() * 1e6
    }

    /// What a reply of so many bytes takes on the wire, with what the server sends besides.
    fn wire_bytes(&self, reply_bytes: f64) -> f64 {
        match self.app {
            App::Dns => return reply_bytes + UDP_HEADER_BYTES,
            App::Http3(_) => {
                let datagrams = (reply_bytes / QUIC_DATA_BYTES).ceil().max(1.0);
                return reply_bytes + datagrams * (QUIC_HEADER_BYTES + UDP_HEADER_BYTES);
            }
            _ => {}
        }
        let besides = if self.app.protocol().closes() { CONNECTION_BYTES } else { 0.0 };
        reply_bytes + segments(reply_bytes) * HEADER_BYTES + besides
    }
}

fn segments(bytes: f64) -> f64 {
    (bytes / SEGMENT_BYTES).ceil().max(1.0)
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let usual = Row::new(self.app, self.limit_bit_s);
        write!(f, "{}", self.app)?;
        if self.clients != usual.clients {
            write!(f, "-{}c", self.clients)?;
        }
        if self.bulk != usual.bulk {
            write!(f, "-{}b", self.bulk)?;
        }
        if self.open {
            f.write_str("-open")?;
        }
        if self.direction == Direction::Ingress {
            f.write_str("-ingress")?;
        }
        match self.limit_bit_s {
            bit_s if bit_s % GBIT == 0 => write!(f, "-{}g", bit_s / GBIT)?,
            bit_s if bit_s % MBIT == 0 => write!(f, "-{}m", bit_s / MBIT)?,
            bit_s => write!(f, "-{}k", bit_s / KBIT)?,
        }
        if self.cc != usual.cc {
            write!(f, "-{}", self.cc)?;
        }
        match self.rtt {
            Some(rtt) => write!(f, "-{}ms", rtt.as_millis()),
            None => Ok(()),
        }
    }
}

impl FromStr for Row {
    type Err = String;

    fn from_str(name: &str) -> Result<Row, String> {
        let refuse = |why: &str| {
            format!(
                "`{name}`: {why}; say for example nginx-close-10k-4b-200m or redis-1b-ingress-50m-20ms"
            )
        };
        let mut words = name.split('-');
        let app = match words.next() {
            Some("redis") => App::Redis,
            Some("pgbench") => App::Pgbench,
            Some("dns") => App::Dns,
            Some("trickle") => App::Trickle,
            Some("h3") => {
                let kb = words.next().and_then(|word| word.strip_suffix('k')?.parse().ok());
                App::Http3(kb.ok_or_else(|| refuse("h3 has a size in kB"))?)
            }
            Some("nginx") => {
                let close = words.next();
                let kb = words.next().and_then(|word| word.strip_suffix('k')?.parse().ok());
                match (close, kb) {
                    (Some("close"), Some(kb)) => App::NginxClose(kb),
                    (Some("keep"), Some(kb)) => App::NginxKeep(kb),
                    _ => return Err(refuse("nginx is close or keep, and a size in kB")),
                }
            }
            _ => return Err(refuse("the first word is nginx, h3, redis, pgbench, dns or trickle")),
        };
        let mut row = Row::new(app, 0);
        for word in words {
            let digits = word.find(|c: char| !c.is_ascii_digit()).unwrap_or(word.len());
            let number = word[..digits].parse().ok();
            match (number, &word[digits..]) {
                (Some(number), "g") => row.limit_bit_s = number * GBIT,
                (Some(number), "m") => row.limit_bit_s = number * MBIT,
                (Some(number), "k") => row.limit_bit_s = number * KBIT,
                (Some(number @ 1..=500), "c") => row.clients = number as usize,
                (Some(number @ 0..=128), "b") => row.bulk = number as u32,
                (Some(number), "ms") => row.rtt = Some(Duration::from_millis(number)),
                (None, "open") => row.open = true,
                (None, "egress") => row.direction = Direction::Egress,
                (None, "ingress") => row.direction = Direction::Ingress,
                (None, "cubic") => row.cc = "cubic",
                (None, "bbr") => row.cc = "bbr",
                (None, "reno") => row.cc = "reno",
                _ => return Err(refuse(&format!("`{word}` is no word of a row"))),
            }
        }
        match row.limit_bit_s {
            0 => Err(refuse("no limit is said")),
            _ => Ok(row),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_names_say_why() {
        let refused = |name: &str| name.parse::<Row>().unwrap_err();
        assert!(refused("apache-10k").contains("the first word is nginx"));
        assert!(refused("nginx-10k-200m").contains("close or keep"));
        assert!(refused("h3-200m").contains("h3 has a size"));
        assert!(refused("redis-1b").contains("no limit"));
        assert!(refused("redis-200m-501c").contains("`501c` is no word"));
        assert!(refused("redis-200m-fast").contains("`fast`"));
    }

    #[test]
    fn a_fair_part_is_what_arithmetic_says() {
        let fair_ms = |name: &str, reply_bytes, ms| {
            let row: Row = name.parse().unwrap();
            row.fair_us(reply_bytes, Duration::from_millis(ms)) / 1000.0
        };
        // 24 connections share 200 Mbit/s; 10 240 bytes are 8 segments.
        let expected = (10_240.0 + 8.0 * 66.0) * 8.0 * 24.0 / 200e6 * 1e3;
        let got = fair_ms("nginx-keep-10k-200m", 10_240.0, 0);
        assert!((got - expected).abs() < 1e-9, "{got}");
        let closes = fair_ms("nginx-close-10k-200m", 10_240.0, 0);
        assert!((closes - expected - 206.0 * 8.0 * 24.0 / 200e6 * 1e3).abs() < 1e-9);
        let quic = fair_ms("h3-10k-200m", 10_000.0, 0);
        assert!((quic - (10_000.0 + 8.0 * 77.0) * 8.0 * 24.0 / 200e6 * 1e3).abs() < 1e-9);
        // The handshake, and 70 segments as 10, 20, 40.
        let trips = |name| fair_ms(name, 70.0 * 1448.0, 20) - fair_ms(name, 70.0 * 1448.0, 0);
        assert!((trips("nginx-close-100k-200m") - 80.0).abs() < 1e-9);
        assert!((trips("nginx-keep-100k-200m") - 20.0).abs() < 1e-9);
    }

    #[test]
    fn an_open_loop_leaves_room() {
        let rate = |name: &str| name.parse::<Row>().unwrap().rate_hz();
        assert_eq!(rate("nginx-keep-10k-200m"), None);
        assert_eq!(rate("trickle-20m"), Some(50));
        assert_eq!(rate("dns-20m"), Some(200));
        let hz = rate("nginx-keep-10k-open-200m").unwrap();
        assert!((700..750).contains(&hz), "{hz}");
        assert_eq!(rate("redis-open-1g"), Some(OPEN_MOST_HZ));
    }
}
