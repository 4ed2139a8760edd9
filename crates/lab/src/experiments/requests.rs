//! Requests of real servers beside bulk transfers, inside one limit: what is measured, and one run of it.
//!
//! nginx, redis-server, PostgreSQL, a server of HTTP/3 and an echo of datagrams answer [`load`]; iperf3
//! sends beside them. On egress the servers and the senders of the transfers are limited; on ingress the
//! clients and the receivers are. Tidegate limits the cgroup of the limited side. The kernel's qdiscs stand
//! on the sender's device, also where ingress is limited and a receiver could not put them.
//!
//! The wire is read on the receiver's device: behind an egress limit, before an ingress limit.

mod row;

use std::{cell::OnceCell, net::SocketAddr, time::Duration};

use anyhow::{Context as _, bail};
use tidegate_core::Direction;

pub(super) use self::row::{App, GBIT, MBIT, Row};
use super::bed::{Bed, Control};
use crate::{
    context::Context,
    host,
    stop::Skip,
    systems::{LimitCase, System},
    testbed::{Child, Site, stack::StackCounters, wait::pass_time},
    tools::{
        http3,
        iperf::{IperfOptions, IperfRun, Load},
        load::{self, LoadArgs, LoadReport},
        postgres::{Cluster, PostgresServer},
        probe,
        redis::RedisServer,
        web::{self, WebServer},
    },
};

/// A request is late that takes longer than its fair time and this.
pub(super) const LATE: Duration = Duration::from_millis(10);
/// Where no queue is long, a request has waited for a timer of TCP if it took longer than its fair time and
/// this: the shortest timer is 200 ms.
pub(super) const TIMER: Duration = Duration::from_millis(150);
const SECOND: Duration = Duration::from_secs(1);
const TENTH: Duration = Duration::from_millis(100);
const HTTP_PORT: u16 = 8080;
const HTTP3_PORT: u16 = 4433;
const REDIS_PORT: u16 = 6379;
const POSTGRES_PORT: u16 = 5432;
const DNS_PORT: u16 = 7001;

/// How long a run takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// Transfers run before the requests come.
    pub(super) settled: Duration,
    /// Requests are sent.
    pub(super) requests: Duration,
}

impl Row {
    /// Measures it once under a system, which is off again afterwards.
    ///
    /// # Errors
    ///
    /// [`Skip`] where a server is not installed or the system cannot limit that way.
    pub(super) fn trial(
        &self,
        ctx: &Context,
        (bed, clusters): (&mut Bed, &Clusters),
        (system, control): (System, &Control),
        times: Times,
    ) -> anyhow::Result<Trial> {
        let Times { settled, requests } = times;
        bed.set_ecn(control.ecn)?;
        bed.set_control(control)?;
        let limit = match self.direction {
            Direction::Egress => LimitCase::egress(self.limit_bit_s),
            Direction::Ingress => LimitCase::ingress(self.limit_bit_s),
        };
        let applied = system.apply(ctx, &bed.testbed, &limit)?;
        let testbed = &bed.testbed;
        let (sender, receiver) = (Site::from(testbed.sender()), Site::from(testbed.receiver(0)));
        let (from, to) = match self.direction {
            Direction::Egress => (applied.site(testbed.sender()), receiver),
            Direction::Ingress => (sender, applied.site(testbed.receiver(0))),
        };
        let stack = || -> anyhow::Result<StackCounters> {
            let at = |host| StackCounters::read(host);
            Ok(at(testbed.sender())? + at(testbed.receiver(0))?)
        };
        let server = Server::start(self.app, bed, clusters, from)?;
        let mut args = LoadArgs {
            server: server.address,
            protocol: self.app.protocol(),
            path: web::PATH.to_owned(),
            clients: self.clients,
            rate_hz: self.rate_hz(),
            lead: load::LEAD,
            duration: requests,
            drain: Duration::from_secs(3),
        };
        let before = stack()?;
        // A handshake of QUIC that is dropped is sent again after seconds, when the transfers have ended.
        let early = match self.app {
            App::Http3(_) if self.bulk > 0 => {
                args.lead = settled;
                Some(load::start_connected(testbed, to, &args)?)
            }
            _ => None,
        };
        bed.meter.start()?;
        let transfers = match self.bulk {
            0 => None,
            parallel => {
                let mut options = IperfOptions::tcp(bed.at(0).ip(), settled + requests);
                options.parallel = parallel;
                options.load = Load::Tcp { cc: Some(control.name().to_owned()) };
                let transfers = IperfRun::start(from, to, &options)?;
                if early.is_none() {
                    pass_time(settled)?;
                }
                Some(transfers)
            }
        };
        let load = early.map_or_else(|| load::start(testbed, to, &args), Ok)?;
        let load = load::finish(load, &args)?;
        let bulk_bit_s = transfers.map(|run| run.finish()).transpose()?;
        let stack = stack()? - before;
        let wire = bed.wire()?;
        // It is in the limit's cgroup, which goes next.
        drop(server);
        let counters = applied.finish()?;
        if load.requests() == 0 {
            bail!("no request was sent");
        }
        let from = if self.bulk == 0 { Duration::ZERO } else { settled };
        Ok(Trial {
            bulk_bit_s: bulk_bit_s.map(|report| report.received_bit_s),
            used_bit_s: wire.mean_bit_s(from, from + args.duration),
            second_bit_s: wire.peak(SECOND).map(|peak| peak.bit_s),
            tenth_bit_s: wire.peak(TENTH).map(|peak| peak.bit_s),
            rtt: self.rtt.or(ctx.usual_link().map(|link| rtt(&link))).unwrap_or_default(),
            load,
            stack,
            drops: counters.map(|counters| counters.dropped),
            at_risk: counters.and_then(|counters| counters.at_risk),
        })
    }
}

/// The round trip of an empty link.
fn rtt(link: &crate::testbed::LinkSpec) -> Duration {
    Duration::from_nanos(link.there.delay.0 + link.back.delay.0)
}

/// The database of pgbench, which takes long to make: once for all rows that need it.
#[derive(Default)]
pub(super) struct Clusters(OnceCell<Cluster>);

impl Clusters {
    fn get(&self, bed: &Bed) -> anyhow::Result<&Cluster> {
        if self.0.get().is_none() {
            let cluster = Cluster::make(bed.testbed.sender())?;
            return Ok(self.0.get_or_init(|| cluster));
        }
        self.0.get().context("it is there")
    }
}

/// The server of a row. Dropping it ends it.
struct Server {
    address: SocketAddr,
    _running: Running,
}

/// Held for its drop.
#[expect(dead_code, reason = "it lives as long as the row's requests")]
enum Running {
    Nginx(WebServer),
    Redis(RedisServer),
    Postgres(PostgresServer),
    /// One of the lab's own.
    Tool(Child),
}

impl Server {
    /// # Errors
    ///
    /// [`Skip`] where the server is not installed.
    fn start(app: App, bed: &Bed, clusters: &Clusters, site: Site<'_>) -> anyhow::Result<Server> {
        let needs = |name: &str| match host::which(name.as_ref()) {
            Some(_) => Ok(()),
            None => Err(Skip(format!("needs `{name}`, which is not in PATH: install it"))),
        };
        let at = |port| SocketAddr::new(bed.testbed.sender_addr(crate::testbed::Family::V4), port);
        let (address, running) = match app {
            App::NginxClose(_) | App::NginxKeep(_) => {
                needs("nginx")?;
                let bytes = app.file_bytes().unwrap_or_default();
                (at(HTTP_PORT), Running::Nginx(WebServer::start(site, at(HTTP_PORT), bytes)?))
            }
            App::Http3(_) => {
                let reply_bytes = app.file_bytes().unwrap_or_default() as usize;
                let args = http3::ServerArgs { listen: at(HTTP3_PORT), reply_bytes };
                let server = http3::start_server(&bed.testbed, site, args)?;
                (at(HTTP3_PORT), Running::Tool(server))
            }
            App::Redis | App::Trickle => {
                needs("redis-server")?;
                (at(REDIS_PORT), Running::Redis(RedisServer::start(site, at(REDIS_PORT))?))
            }
            App::Pgbench => {
                let postgres = clusters.get(bed)?.start(site, at(POSTGRES_PORT))?;
                (at(POSTGRES_PORT), Running::Postgres(postgres))
            }
            App::Dns => {
                let echo = probe::start_server(&bed.testbed, site, at(DNS_PORT))?;
                (at(DNS_PORT), Running::Tool(echo))
            }
        };
        Ok(Server { address, _running: running })
    }
}

/// The result of one run.
pub(super) struct Trial {
    pub(super) load: LoadReport,
    stack: StackCounters,
    drops: Option<u64>,
    at_risk: Option<u64>,
    bulk_bit_s: Option<f64>,
    used_bit_s: Option<f64>,
    second_bit_s: Option<f64>,
    tenth_bit_s: Option<f64>,
    /// The round trip of the empty path.
    rtt: Duration,
}

impl Trial {
    /// Metric and value of all that is known.
    pub(super) fn values(&self, row: &Row, system: System) -> Vec<(&'static str, f64)> {
        let Trial { load, stack, .. } = self;
        let fair_us = row.fair_us(load.reply_bytes, self.rtt);
        let slower = |by: Duration| load.slower_than(fair_us + by.as_secs_f64() * 1e6) as f64;
        let mut values = vec![
            ("requests_per_s", load.requests_per_s),
            ("requests", load.requests() as f64),
            ("latency_p50_us", load.latency.p50_us),
            ("latency_p90_us", load.latency.p90_us),
            ("latency_p99_us", load.latency.p99_us),
            ("latency_p99_9_us", load.latency.p99_9_us),
            ("latency_max_us", load.latency.max_us),
            ("fair_us", fair_us),
            ("late_10ms_requests", slower(LATE)),
            ("late_150ms_requests", slower(TIMER)),
            ("unanswered", load.unanswered as f64),
            ("broken_connections", load.errors as f64),
            ("datagrams_again", load.retries as f64),
            ("timeouts", stack.timeouts as f64),
            ("lost_retransmits", stack.lost_retransmits as f64),
            ("syn_retransmits", stack.syn_retransmits as f64),
            ("retransmits", stack.retransmits as f64),
            ("loss_probes", stack.loss_probes as f64),
        ];
        values.retain(|(metric, value)| {
            *value > 0.0 || !["broken_connections", "datagrams_again"].contains(metric)
        });
        values.extend(self.drops.map(|drops| ("drops", drops as f64)));
        values.extend(self.at_risk.map(|drops| ("drops_at_risk", drops as f64)));
        values.extend(self.bulk_bit_s.map(|bit_s| ("bulk_goodput_bit_s", bit_s)));
        let rates = [
            ("used_percent", self.used_bit_s),
            ("max_1s_percent", self.second_bit_s),
            ("max_100ms_percent", self.tenth_bit_s),
        ];
        if system != System::Unlimited {
            let percent = |bit_s: f64| bit_s / row.limit_bit_s as f64 * 100.0;
            values.extend(rates.iter().filter_map(|(name, rate)| Some((*name, percent((*rate)?)))));
        }
        values
    }
}
