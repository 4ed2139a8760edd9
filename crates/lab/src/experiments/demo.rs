//! `demo`: the main job, in throwaway network namespaces. A transfer with iperf3 and a download from nginx
//! with curl, as they are, under the kernel's HTB, and under `tidegate run`, one after the other. Then
//! requests of nginx beside transfers in one limit (`requests`), under HTB and under Tidegate.
//!
//! The limited program is on the sender: iperf3's client, and nginx. HTB stands where an administrator puts
//! it, on the sender's device; `tidegate run` starts the program as a user does. Probes leave on a schedule
//! from inside the same limit, so their latency is what the program's own packets meet.

mod requests;

use std::{
    ffi::OsString,
    fmt, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;

use super::bed::Bed;
use crate::{
    chart::{BarsOf, Cdf, Lines, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    systems::counters_in,
    testbed::{Cgroup, Site, peers::Peer, set_sysctl, stack::StackCounters, wait::wait_until},
    tools::{
        iperf::{IperfOptions, IperfRun},
        probe::{self, ProbeReport},
        web::WebServer,
    },
};

const LIMIT_BIT_S: u64 = 100_000_000;
const LIMIT: &str = "100mbit";
/// What Linux uses unless told otherwise.
const CONTROL: &str = "cubic";
const TRANSFER_FLOWS: u32 = 4;

const WEB_PORT: u16 = 8080;
const PROBE_PORT: u16 = 7001;
/// How long a transfer takes, and so how large a file is.
const DURATION: Duration = Duration::from_secs(4);
const FILE_BYTES: u64 = LIMIT_BIT_S / 8 * DURATION.as_secs();
/// TCP's start is over; from here on, probes count.
const SETTLED: Duration = Duration::from_millis(500);
const PROBED: Duration = Duration::from_secs(3);
/// So that the 99th percentile of a run rests on thirty probes. They take 0.8 % of the limit.
const PROBES_HZ: u64 = 1000;
const START: Duration = Duration::from_secs(60);
const FETCH: Duration = Duration::from_secs(60);
const TENTH: Duration = Duration::from_millis(100);

/// The claims: percent of the limit on the wire, and microseconds.
const USED_LEAST: f64 = 97.0;
const USED_MOST: f64 = 101.0;
const BELOW_HTB_LEAST: f64 = 10.0;
const LOST_MOST: f64 = 1.0;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Demo {
    /// For tests: the download alone, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl Demo {
    /// The download alone; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> Demo {
        Demo { tiny: Some(lab_binary) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    Unlimited,
    Htb,
    /// HTB with fq_codel in its class, where the kernel has that.
    FqCodel,
    Tidegate,
}

impl System {
    /// Those that this kernel has.
    fn all() -> Vec<System> {
        let mut systems = vec![System::Unlimited, System::Htb];
        systems.extend(Peer::check_kernel("fq_codel").is_ok().then_some(System::FqCodel));
        systems.push(System::Tidegate);
        systems
    }
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            System::Unlimited => "unlimited",
            System::Htb => "htb",
            System::FqCodel => "htb, fq_codel",
            System::Tidegate => "tidegate",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Job {
    /// iperf3, sending.
    Transfer,
    /// curl, from nginx.
    Download,
}

impl Job {
    fn name(self) -> &'static str {
        match self {
            Job::Transfer => "iperf3",
            Job::Download => "nginx to curl",
        }
    }

    fn case(self) -> Case {
        let flows = if self == Job::Transfer { TRANSFER_FLOWS } else { 1 };
        Case::new().with("job", self.name()).with("flows", flows).with("limit_bit_s", LIMIT_BIT_S)
    }
}

/// A job under a system.
#[derive(Debug, Clone, Copy)]
struct Turn {
    job: Job,
    system: System,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.job.name(), self.system)
    }
}

/// What one run of a job came to.
struct Outcome {
    goodput_bit_s: f64,
    /// What the limited program's runner said on standard error.
    said: String,
    probe: ProbeReport,
}

impl Experiment for Demo {
    fn name(&self) -> &'static str {
        "demo"
    }

    fn summary(&self) -> &'static str {
        "A transfer, a download, and requests beside a backup in one limit: no limit, tc htb, tidegate run"
    }

    fn needs(&self) -> Vec<Need> {
        vec![
            Need::Root,
            Need::Tidegate,
            Need::Command { name: "iperf3", version_flag: "--version" },
            Need::Command { name: "nginx", version_flag: "-v" },
            Need::Command { name: "curl", version_flag: "--version" },
        ]
    }

    fn in_demo(&self) -> bool {
        true
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 3 } else { 5 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let mut bed = Bed::new(self.tiny.clone(), ctx.usual_link())?;
        let set = set_sysctl(bed.testbed.sender(), "net.ipv4.tcp_congestion_control", CONTROL);
        if set.is_err() {
            // A host whose default is another one keeps it for namespaces too.
            let control = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control")?;
            ctx.note(format!("TCP uses {}, as this host does", control.trim()));
        }
        let systems = System::all();
        let mut curves = Vec::new();
        let jobs: &[Job] = match self.tiny {
            None => &[Job::Transfer, Job::Download],
            Some(_) => &[Job::Download],
        };
        for &job in jobs {
            let (mut rates, mut latencies, mut over_time) = (Vec::new(), Vec::new(), Vec::new());
            let turns: Vec<_> = systems.iter().map(|&system| Turn { job, system }).collect();
            ctx.alternate(&turns, ctx.repeats, |ctx, turn, run| {
                let mut curve = measure(ctx, &mut bed, *turn, run)?;
                if run == 1 {
                    let system = turn.system.to_string();
                    latencies.push(Series::new(&system, curve.latencies));
                    over_time.push(Series::new(&system, curve.over_time));
                    if turn.system != System::Unlimited {
                        let bins = DURATION.as_millis() / TENTH.as_millis();
                        curve.rates_bit_s.truncate(bins as usize);
                        rates.push(Series::every(&system, TENTH.as_secs_f64(), &curve.rates_bit_s));
                    }
                }
                Ok(())
            })?;
            if let Some(story) = story(job, over_time, &systems) {
                ctx.figure("latency", story);
            }
            curves.push((job, rates, latencies));
        }
        let answered = requests::measure(ctx, &mut bed)?;
        ctx.bars(
            "rate",
            BarsOf {
                title: "A limit of 100 Mbit/s: rate on the wire (bars), latency inside it (diamonds)",
                metric: "rate_on_wire_bit_s",
                points: Some("latency_p50_us"),
            },
        );
        for (job, rates, latencies) in curves {
            figures(ctx, job, rates, latencies);
        }
        claims(ctx);
        requests::conclude(ctx, answered);
        Ok(())
    }
}

/// What figures show of a run.
struct Curve {
    /// The rate on the wire in bins of 100 ms.
    rates_bit_s: Vec<f64>,
    /// (microseconds, share of the probes that took no longer).
    latencies: Vec<(f64, f64)>,
    /// (seconds, microseconds).
    over_time: Vec<(f64, f64)>,
}

/// Runs a job once under a system, and records it.
fn measure(
    ctx: &mut Context,
    bed: &mut Bed,
    Turn { job, system }: Turn,
    run: u32,
) -> anyhow::Result<Curve> {
    let runner: Vec<OsString> = match system {
        System::Tidegate => {
            let words = ["run", "--egress", LIMIT, "--stats", "--json", "--"].map(OsString::from);
            [ctx.tidegate.clone().into_os_string()].into_iter().chain(words).collect()
        }
        System::Unlimited | System::Htb | System::FqCodel => Vec::new(),
    };
    let peer = match system {
        System::Htb => Some(Peer::htb(&bed.testbed, LIMIT_BIT_S)?),
        System::FqCodel => Some(Peer::htb_fq_codel(&bed.testbed, LIMIT_BIT_S)?),
        System::Unlimited | System::Tidegate => None,
    };
    let resent_before = StackCounters::read(bed.testbed.sender())?.retransmits;
    bed.start_meter()?;
    let outcome = match job {
        Job::Transfer => transfer(bed, &runner)?,
        Job::Download => download(bed, &runner)?,
    };
    let resent = StackCounters::read(bed.testbed.sender())?.retransmits - resent_before;
    let wire = bed.wire()?;
    let drops = match peer {
        Some(mut peer) => peer.qdisc_stats()?.iter().map(|stats| u64::from(stats.drops)).max(),
        None if system == System::Tidegate => Some(counters_in(&outcome.said)?.dropped),
        None => None,
    };

    let Outcome { goodput_bit_s, probe, .. } = outcome;
    let rate_bit_s = wire.mean_bit_s(SETTLED, DURATION).context("nothing was on the wire")?;
    let record = ctx
        .record(system, &job.case(), run)
        .value("rate_on_wire_bit_s", rate_bit_s)
        .value("goodput_bit_s", goodput_bit_s)
        .value("latency_p50_us", probe.rtt.p50_us)
        .value("latency_p99_us", probe.rtt.p99_us)
        .value("probes_lost_percent", probe.lost_percent())
        .value("retransmissions", resent as f64);
    if let Some(drops) = drops {
        record.value("drops", drops as f64);
    }
    Ok(Curve {
        rates_bit_s: wire.rates_bit_s(TENTH),
        latencies: probe.rtt_cdf_us,
        over_time: probe.rtt_over_time_us,
    })
}

/// iperf3 sends from inside the limit.
fn transfer(bed: &Bed, runner: &[OsString]) -> anyhow::Result<Outcome> {
    let (sender, receiver) = (bed.testbed.sender(), bed.testbed.receiver(0));
    let mut options = IperfOptions::tcp(bed.at(0).ip(), DURATION);
    options.parallel = TRANSFER_FLOWS;
    let iperf = IperfRun::start(Site::from(sender).under(runner), receiver, &options)?;
    let inside = inside(iperf.client_pid(), !runner.is_empty())?;
    let probe = probe(bed, inside.as_ref())?;
    let (report, said) = iperf.finish_with_stderr()?;
    Ok(Outcome { goodput_bit_s: report.received_bit_s, said, probe })
}

/// nginx serves from inside the limit. Where the file comes sooner than planned, it comes again.
fn download(bed: &Bed, runner: &[OsString]) -> anyhow::Result<Outcome> {
    let (sender, receiver) = (bed.testbed.sender(), bed.testbed.receiver(0));
    let at = SocketAddr::new(bed.testbed.sender_addr(crate::testbed::Family::V4), WEB_PORT);
    let server = WebServer::start(Site::from(sender).under(runner), at, FILE_BYTES)?;
    let inside = inside(server.pid(), !runner.is_empty())?;
    let (fetches, probe) = std::thread::scope(|scope| {
        let fetches = scope.spawn(|| {
            let started = Instant::now();
            let mut bytes = 0;
            while started.elapsed() < SETTLED + PROBED {
                bytes += server.finish_fetch(server.start_fetch(receiver)?, FETCH)?.bytes;
            }
            anyhow::Ok(bytes as f64 * 8.0 / started.elapsed().as_secs_f64())
        });
        let probe = probe(bed, inside.as_ref());
        let fetches = fetches.join().map_err(|_| anyhow::anyhow!("the fetching thread panicked"));
        (fetches.and_then(|fetched| fetched), probe)
    });
    let said = server.stop()?.stderr;
    Ok(Outcome { goodput_bit_s: fetches?, said, probe: probe? })
}

/// Probes the way from the sender to the receiver and back, from inside the limited cgroup if there is one.
fn probe(bed: &Bed, inside: Option<&Cgroup>) -> anyhow::Result<ProbeReport> {
    let testbed = &bed.testbed;
    let _server = probe::start_server(testbed, testbed.receiver(0), bed.at(PROBE_PORT))?;
    let mut site = Site::from(testbed.sender());
    if let Some(cgroup) = inside {
        site = site.in_cgroup(cgroup);
    }
    let mut args = probe::ClientArgs::new(bed.at(PROBE_PORT), SETTLED + PROBED);
    args.settle = SETTLED;
    args.rate_hz = PROBES_HZ;
    probe::finish_client(probe::start_client(testbed, site, args)?, args)
}

/// The cgroup into which `tidegate run` of process id `pid` put its command; none without a runner.
fn inside(pid: u32, runs: bool) -> anyhow::Result<Option<Cgroup>> {
    if !runs {
        return Ok(None);
    }
    let own = Cgroup::of_process(pid)?;
    let children = format!("/proc/{pid}/task/{pid}/children");
    wait_until("a command of tidegate run in a cgroup of its own", START, || {
        let pids = fs::read_to_string(&children).unwrap_or_default();
        let cgroups = pids.split_ascii_whitespace().filter_map(|pid| pid.parse().ok());
        // A child that has just ended has no cgroup to name.
        let mut cgroups = cgroups.filter_map(|pid| Cgroup::of_process(pid).ok());
        Ok(cgroups.find(|cgroup| cgroup.path() != own.path() && is_cgroup(cgroup.path())))
    })
    .map(Some)
}

fn is_cgroup(path: &Path) -> bool {
    path.join("cgroup.procs").exists()
}

/// The picture of the whole: what a probe meets while a transfer runs, without a limit, under the best HTB
/// that the kernel has, and under Tidegate.
fn story(job: Job, mut series: Vec<Series>, systems: &[System]) -> Option<Lines> {
    if systems.contains(&System::FqCodel) {
        series.retain(|series| series.system != System::Htb.to_string());
    }
    (job == Job::Transfer).then(|| Lines {
        title: "A transfer in a limit of 100 Mbit/s: latency of a probe beside it".to_owned(),
        x: "time_s".to_owned(),
        y: "latency_us".to_owned(),
        logarithmic: true,
        limit: None,
        series,
    })
}

fn figures(ctx: &mut Context, job: Job, rates: Vec<Series>, latencies: Vec<Series>) {
    let file = if job == Job::Transfer { "iperf3" } else { "nginx" };
    ctx.figure(
        &format!("{file}-latency"),
        Cdf {
            title: format!("Latency of the probe inside the limit, {}", job.name()),
            metric: "latency_us".to_owned(),
            series: latencies,
        },
    );
    ctx.figure(
        &format!("{file}-rate"),
        Lines {
            title: format!("Rate on the wire in bins of 100 ms, {}", job.name()),
            x: "time_s".to_owned(),
            y: "rate_bit_s".to_owned(),
            logarithmic: false,
            limit: Some(LIMIT_BIT_S as f64),
            series: rates,
        },
    );
}

fn ms(us: f64) -> String {
    format!("{:.2} ms", us / 1e3)
}

fn claims(ctx: &mut Context) {
    for job in [Job::Transfer, Job::Download] {
        let (name, case) = (job.name(), job.case());
        if let Some(rate_bit_s) = ctx.median("tidegate", "rate_on_wire_bit_s", Some(&case)) {
            let used = rate_bit_s / LIMIT_BIT_S as f64 * 100.0;
            ctx.claim(
                format!("{name}: {USED_LEAST} to {USED_MOST} % of the limit on the wire"),
                (USED_LEAST..=USED_MOST).contains(&used),
                format!("{used:.1} %"),
            );
        }
        let p99 = |system| ctx.median(system, "latency_p99_us", Some(&case));
        let lost = ctx.median("tidegate", "probes_lost_percent", Some(&case)).unwrap_or(100.0);
        if let (Some(htb_us), Some(ours_us)) = (p99("htb"), p99("tidegate")) {
            let ratio = htb_us / ours_us;
            ctx.claim(
                format!("{name}: latency p99 at least {BELOW_HTB_LEAST}x below htb"),
                ratio >= BELOW_HTB_LEAST && lost < LOST_MOST,
                format!("{ratio:.0}x: {}, htb {}; {lost:.1} % lost", ms(ours_us), ms(htb_us)),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_lasts_as_long_as_a_transfer() {
        assert_eq!(FILE_BYTES, 50_000_000);
        assert!(SETTLED + PROBED < DURATION);
    }
}
