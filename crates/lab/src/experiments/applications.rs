//! `applications`: requests of real servers beside bulk transfers, inside one limit.
//!
//! ```text
//! rows (what is measured) -> applications (servers, load, transfers) -> claims
//! ```
//!
//! nginx, redis-server, PostgreSQL, a server of HTTP/3 and an echo of datagrams answer [`load`]; iperf3
//! sends beside them. On egress the servers and the senders of the transfers are limited; on ingress the
//! clients and the receivers are. Tidegate limits the cgroup of the limited side. The kernel's qdiscs stand
//! on the sender's device, also where ingress is limited and a receiver could not put them.
//!
//! The wire is read on the receiver's device: behind an egress limit, before an ingress limit.

mod claims;
mod rows;

use std::{cell::OnceCell, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use tidegate_core::Direction;

use self::rows::{App, Row};
use super::bed::{Bed, Control};
use crate::{
    chart::{Bars, BarsOf, Cdf, Series},
    context::Context,
    experiment::{Experiment, Skip},
    host::{self, Need},
    report,
    systems::{LimitCase, System},
    testbed::{Child, Site, set_sysctl, stack::StackCounters, wait::pass_time},
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

/// In a round of a row. The peers are the kernel's, as users and as experts set them up.
const SYSTEMS: [System; 9] = [
    System::Unlimited,
    System::Pace,
    System::Nrm,
    System::Htb,
    System::HtbShort,
    System::Tbf,
    System::Fq,
    System::FqCodel,
    System::Cake,
];
/// The short form leaves these out.
const LONG_ONLY: [System; 2] = [System::Unlimited, System::Nrm];
const PEERS: [System; 6] =
    [System::Htb, System::HtbShort, System::Tbf, System::Fq, System::FqCodel, System::Cake];
/// The row of a test.
const TINY: &str = "nginx-close-1k-3c-1b-50m";
/// Transfers run before the requests come.
const SETTLED: Duration = Duration::from_secs(1);
/// A request is late that takes longer than its fair time and this.
const LATE: Duration = Duration::from_millis(10);
/// Where no queue is long, a request has waited for a timer of TCP if it took longer than its fair time and
/// this: the shortest timer is 200 ms.
const TIMER: Duration = Duration::from_millis(150);
const SECOND: Duration = Duration::from_secs(1);
const TENTH: Duration = Duration::from_millis(100);
const HTTP_PORT: u16 = 8080;
const HTTP3_PORT: u16 = 4433;
const REDIS_PORT: u16 = 6379;
const POSTGRES_PORT: u16 = 5432;
const DNS_PORT: u16 = 7001;
/// A client's ports: each connection of its own needs one until the server has forgotten the last.
const CLIENT_PORTS: &str = "10000 65535";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Applications {
    /// For tests: one short row, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl Applications {
    /// One row of every system, a second long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> Applications {
        Applications { tiny: Some(lab_binary) }
    }

    fn rows(&self, ctx: &Context) -> anyhow::Result<Vec<Row>> {
        let names = match &self.tiny {
            Some(_) => &[TINY.to_owned()][..],
            None if ctx.only.is_empty() => return Ok(rows::plan(ctx.quick)),
            None => &ctx.only,
        };
        let mut rows = named_rows(names).map_err(|why| anyhow!(why))?;
        rows.sort_by_key(|row| row.rtt);
        Ok(rows)
    }
}

fn named_rows(names: &[String]) -> Result<Vec<Row>, String> {
    names.iter().map(|name| name.trim().parse()).collect()
}

/// The systems of these names; none: those of the short or the whole form.
fn systems(names: &[String], quick: bool) -> Result<Vec<System>, String> {
    if names.is_empty() {
        let all = SYSTEMS.into_iter();
        return Ok(all.filter(|system| !quick || !LONG_ONLY.contains(system)).collect());
    }
    let named = |name: &String| {
        let found = SYSTEMS.iter().find(|system| system.name() == name.trim()).copied();
        let known = || SYSTEMS.map(System::name).join(", ");
        found.ok_or_else(|| format!("no system is named `{name}`: use some of {}", known()))
    };
    names.iter().map(named).collect()
}

/// Those that this kernel can have; the others cost one note, and not one in every row.
fn present(ctx: &mut Context, mut systems: Vec<System>) -> anyhow::Result<Vec<System>> {
    let mut failed = Ok(());
    systems.retain(|system| match system.check_kernel() {
        Ok(()) => true,
        Err(error) if error.is::<Skip>() => {
            ctx.note(format!("{system} skipped: {error:#}"));
            false
        }
        Err(error) => {
            failed = Err(error);
            false
        }
    });
    failed?;
    if systems.is_empty() {
        return Err(Skip("this kernel has none of the systems that were chosen".to_owned()).into());
    }
    Ok(systems)
}

impl Experiment for Applications {
    fn name(&self) -> &'static str {
        "applications"
    }

    fn summary(&self) -> &'static str {
        "Requests of nginx, HTTP/3, Redis, PostgreSQL and a DNS-like server beside bulk transfers in one \
         limit: requests a second, latency to the slowest, waits for TCP's timers, drops, use of the limit"
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, _quick: bool) -> u32 {
        1
    }

    fn check_choice(&self, only: &[String], chosen: &[String]) -> Result<(), String> {
        named_rows(only)?;
        systems(chosen, true).map(|_| ())
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let rows = self.rows(ctx)?;
        let systems = systems(&ctx.systems, ctx.quick).map_err(|why| anyhow!(why))?;
        let systems = present(ctx, systems)?;
        let seconds = match (self.tiny.is_some(), ctx.quick) {
            (true, _) => 2,
            (_, true) => 5,
            _ => 11,
        };
        ctx.note(
            "A request's latency is from when it was due to the last byte of its reply; a connection of its \
             own is made within. `fair` is how long it takes at its part of the limit if all connections \
             always want theirs: serialization and round trips. `late` counts the requests that take 10 or \
             150 ms longer.",
        );
        ctx.note(
            "TCP's counters are those of both ends, transfers included. `used` is the mean rate on the wire \
             while requests come, of the limit; `max` the highest over any such time, start included. On \
             ingress the wire is read before the limit.",
        );
        let clusters = Clusters::default();
        for rows in rows.chunk_by(|row, next| row.rtt == next.rtt) {
            let own = rows.first().and_then(|row| row.rtt).map(|rtt| ctx.link(rtt));
            let mut bed = Bed::new(self.tiny.clone(), own.or(ctx.usual_link()))?;
            set_sysctl(bed.testbed.receiver(0), "net.ipv4.ip_local_port_range", CLIENT_PORTS)?;
            for row in rows {
                let duration = Duration::from_secs(seconds);
                let curves = row.measure(ctx, (&mut bed, &clusters), &systems, duration)?;
                let case = row.case(ctx);
                claims::record(ctx, row, &case);
                let title = format!("Latency of requests, {row}");
                if curves.iter().any(|curve| !curve.points.is_empty()) {
                    let metric = "latency_us".to_owned();
                    ctx.figure(&format!("latency-{row}"), Cdf { title, metric, series: curves });
                }
            }
        }
        figures(ctx);
        Ok(())
    }
}

impl Row {
    /// Measures the systems in turn; the distribution of each, from its first run.
    fn measure(
        &self,
        ctx: &mut Context,
        (bed, clusters): (&mut Bed, &Clusters),
        systems: &[System],
        duration: Duration,
    ) -> anyhow::Result<Vec<Series>> {
        let control = Control::get(self.cc)?;
        let case = self.case(ctx);
        let mut curves = Vec::new();
        ctx.step(self.to_string());
        ctx.alternate(systems, ctx.repeats, |ctx, &system, run| {
            let trial = self.trial(ctx, (bed, clusters), system, &control, duration)?;
            let mut record = ctx.record(system, &case, run);
            for (metric, value) in trial.values(self, system) {
                record = record.value(metric, value);
            }
            if run == 1 {
                curves.push(Series::new(system.name(), trial.load.cdf_us()));
            }
            Ok(())
        })?;
        Ok(curves)
    }

    fn trial(
        &self,
        ctx: &Context,
        (bed, clusters): (&mut Bed, &Clusters),
        system: System,
        control: &Control,
        duration: Duration,
    ) -> anyhow::Result<Trial> {
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
            duration: duration - SETTLED,
            drain: Duration::from_secs(3),
        };
        let before = stack()?;
        // A handshake of QUIC that is dropped is sent again after seconds, when the transfers have ended.
        let early = match self.app {
            App::Http3(_) if self.bulk > 0 => {
                args.lead = SETTLED;
                Some(load::start_connected(testbed, to, &args)?)
            }
            _ => None,
        };
        bed.meter.start()?;
        let transfers = match self.bulk {
            0 => None,
            parallel => {
                let mut options = IperfOptions::tcp(bed.at(0).ip(), duration);
                options.parallel = parallel;
                options.load = Load::Tcp { cc: Some(control.name().to_owned()) };
                let transfers = IperfRun::start(from, to, &options)?;
                if early.is_none() {
                    pass_time(SETTLED)?;
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
        let drops = applied.finish()?.map(|counters| counters.dropped);
        if load.requests() == 0 {
            bail!("no request was sent");
        }
        let from = if self.bulk == 0 { Duration::ZERO } else { SETTLED };
        Ok(Trial {
            bulk_bit_s: bulk_bit_s.map(|report| report.received_bit_s),
            used_bit_s: wire.mean_bit_s(from, from + args.duration),
            second_bit_s: wire.peak(SECOND).map(|peak| peak.bit_s),
            tenth_bit_s: wire.peak(TENTH).map(|peak| peak.bit_s),
            rtt: self.rtt.or(ctx.usual_link().map(|link| rtt(&link))).unwrap_or_default(),
            load,
            stack,
            drops,
        })
    }
}

/// The round trip of an empty link.
fn rtt(link: &crate::testbed::LinkSpec) -> Duration {
    Duration::from_nanos(link.there.delay.0 + link.back.delay.0)
}

/// The database of pgbench, which takes long to make: once for all rows that need it.
#[derive(Default)]
struct Clusters(OnceCell<Cluster>);

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

/// What one run came to.
struct Trial {
    load: LoadReport,
    stack: StackCounters,
    drops: Option<u64>,
    bulk_bit_s: Option<f64>,
    used_bit_s: Option<f64>,
    second_bit_s: Option<f64>,
    tenth_bit_s: Option<f64>,
    /// Of the empty path.
    rtt: Duration,
}

impl Trial {
    fn values(&self, row: &Row, system: System) -> Vec<(&'static str, f64)> {
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

/// Bars of all rows of a direction.
fn figures(ctx: &mut Context) {
    for direction in ["egress", "ingress"] {
        let here = |row: &&report::Row| {
            row.case.0.get("direction").is_some_and(|found| *found == direction)
                && row.system != System::Unlimited.name()
        };
        let rows: Vec<report::Row> = ctx.rows().iter().filter(here).cloned().collect();
        for (file, what, metric) in [
            ("p50", "median", "latency_p50_us"),
            ("p99", "99th percentile", "latency_p99_us"),
            ("p99-9", "99.9th percentile", "latency_p99_9_us"),
        ] {
            let title = format!("Latency of requests inside a limit on {direction}, {what}");
            let what = BarsOf { title: &title, metric, points: None };
            if rows.iter().any(|row| row.metric == metric) {
                ctx.figure(&format!("{file}-{direction}"), Bars::from_rows(&rows, what));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_or_says_what_to_type() {
        let check = |only: &str, systems: &str| {
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            Applications::default().check_choice(&words(only), &words(systems))
        };
        assert_eq!(check("", ""), Ok(()));
        assert_eq!(check("redis-1b-50m nginx-keep-10k-1g", "pace htb-20ms"), Ok(()));
        assert!(check("redis", "").unwrap_err().contains("no limit is said"));
        let refused = check("", "sfq").unwrap_err();
        let known = "unlimited, pace, nrm, htb, htb-20ms, tbf, fq, fq_codel, cake";
        assert_eq!(refused, format!("no system is named `sfq`: use some of {known}"));
    }
}
