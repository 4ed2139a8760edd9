//! `bwlimit`: the limits that programs which copy files have of their own, beside `tidegate run`.
//!
//! rsync, rclone, restic and scp send from the sender to servers on the receiver; there curl and wget
//! download from the sender's nginx. So all data goes the same way, over an uplink that is faster than the
//! limit and has a queue. A neighbour behind the same uplink answers probes, open loop. Each copy runs with
//! its own limit and then, without it, under `tidegate run`, which is what limits the receiver's programs,
//! too. Several copies at a time are several connections of one process, or several processes.
//!
//! The wire is read where the uplink ends, without the neighbour's packets: behind a limit of what is sent,
//! before a limit of what is received. `copies` has the programs and their words, `page` what is made of the
//! results.

mod copies;
mod page;

use std::{
    ffi::OsString,
    fmt, fs,
    io::Read as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{anyhow, ensure};
use tempfile::TempDir;
use tidegate_core::{Bytes, Rate};
use tidegate_instruments::wire_meter::{FlowPorts, WireMeter};

use self::copies::{Job, PASSWORD, Places, SEVERAL, Tool, file_name, restic_init};
pub use self::page::tables;
use super::{bed::Bed, wire::Wire};
use crate::{
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    stop::Skip,
    testbed::{
        Child, Family, LinkSpec, Site, Testbed, TestbedOptions, Topology, command, wait::pass_time,
    },
    tools::{
        probe,
        rclone::{self, Protocol},
        sshd::SshServer,
        web::WebServer,
    },
};

const MBIT: u64 = 1_000_000;
const LIMITS: [u64; 2] = [5 * MBIT, 50 * MBIT];
/// The uplink, a router's: its queue is 50 ms.
const UPLINK_BIT_S: u64 = 100 * MBIT;
const UPLINK_RTT: Duration = Duration::from_millis(10);
const UPLINK_QUEUE: Bytes = Bytes(625_000);
/// Random, so that nothing of it is compressed or found to be there already, and enough for a whole run.
const FILE_BYTES: u64 = 96 << 20;
/// The file of nginx, which may be served several times at once.
const DOWNLOAD_BYTES: u64 = 1 << 30;

const SSH_PORT: u16 = 22;
const WEBDAV_PORT: u16 = 8081;
const RESTIC_PORT: u16 = 8082;
const WEB_PORT: u16 = 8080;
const NEIGHBOUR_PORT: u16 = 7001;
const NEIGHBOUR_HZ: u64 = 200;
const BIN: Duration = Duration::from_millis(10);
const BINS: u32 = 4096;
const SECOND: Duration = Duration::from_secs(1);
const TENTH: Duration = Duration::from_millis(100);
/// How much longer than its time a copy may take, until it begins.
const LATE: Duration = Duration::from_secs(25);
/// A copy that has ended is over when less than a frame has arrived in so long.
const QUIET: Duration = Duration::from_millis(300);
const FRAME_BYTES: u64 = 1514;
/// How long making a repository may take.
const MAKE: Duration = Duration::from_secs(60);

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Bwlimit {
    /// For tests: curl alone, for two seconds, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl Bwlimit {
    /// curl alone, for two seconds; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> Bwlimit {
        Bwlimit { tiny: Some(lab_binary) }
    }

    /// The limits and the copies, in the order in which they run.
    fn plan(&self, tools: &[Tool]) -> Vec<(u64, Job)> {
        if self.tiny.is_some() {
            return vec![(50 * MBIT, Job { tool: Tool::Curl, several: false })];
        }
        let copies = |limit: u64| {
            let of = move |several| tools.iter().map(move |&tool| (limit, Job { tool, several }));
            of(false).chain(of(true))
        };
        LIMITS.into_iter().flat_map(copies).collect()
    }
}

/// The limiter of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    OwnFlag,
    Tidegate,
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            System::OwnFlag => page::OWN,
            System::Tidegate => page::OURS,
        })
    }
}

impl Experiment for Bwlimit {
    fn name(&self) -> &'static str {
        "bwlimit"
    }

    fn summary(&self) -> &'static str {
        "rsync, rclone, restic, scp, curl and wget with their own limit, and under tidegate run: the first \
         second, the highest 100 ms, several copies at a time, a neighbour's latency on the same uplink"
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn check_choice(&self, only: &[String], systems: &[String]) -> Result<(), String> {
        only.iter().try_for_each(|name| name.parse().map(|_: Tool| ()))?;
        match systems.is_empty() {
            true => Ok(()),
            false => Err("bwlimit compares both systems: leave out --systems".to_owned()),
        }
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 3 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let tools = self.present(ctx)?;
        let (seconds, file_bytes) = match (self.tiny.is_some(), ctx.quick) {
            (true, _) => (2, 0),
            (_, true) => (6, FILE_BYTES),
            _ => (12, 2 * FILE_BYTES),
        };
        let duration = Duration::from_secs(seconds);
        let mut scene = Scene::new(ctx, self.tiny.clone(), &tools, file_bytes)?;
        scene.bed.idle(ctx, duration)?;
        notes(ctx);
        for (limit_bit_s, job) in self.plan(&tools) {
            let case = Case::new()
                .with("limit_bit_s", limit_bit_s)
                .with("at_once", job.at_once())
                .with("tool", job.tool.name());
            ctx.step(page::case_in_words(&case));
            ctx.alternate(
                &[System::OwnFlag, System::Tidegate],
                ctx.repeats,
                |ctx, &system, run| {
                    let values = scene.measure(ctx, (job, system), limit_bit_s, duration)?;
                    let mut record = ctx.record(system, &case, run);
                    for (metric, value) in values {
                        record = record.value(metric, value);
                    }
                    Ok(())
                },
            )?;
        }
        page::figures(ctx, &LIMITS);
        page::claims(ctx);
        Ok(())
    }
}

impl Bwlimit {
    /// The chosen tools that this machine has. Each of the others has a note.
    fn present(&self, ctx: &mut Context) -> anyhow::Result<Vec<Tool>> {
        let mut tools = match (&self.tiny, ctx.only.is_empty()) {
            (Some(_), _) => vec![Tool::Curl],
            (None, true) => Tool::ALL.to_vec(),
            (None, false) => {
                let named: Result<Vec<Tool>, String> =
                    ctx.only.iter().map(|name| name.parse()).collect();
                named.map_err(|why| anyhow!(why))?
            }
        };
        let mut reasons = Vec::new();
        tools.retain(|tool| {
            let reason = tool.missing(&ctx.tidegate);
            reasons.extend(reason.iter().map(|reason| format!("{tool} skipped: {reason}")));
            reason.is_none()
        });
        if tools.is_empty() {
            return Err(Skip(reasons.join("; ")).into());
        }
        reasons.into_iter().for_each(|reason| ctx.note(reason));
        let versions = tools.iter().filter_map(|tool| tool.version(&ctx.tidegate));
        let versions: Vec<_> = versions.collect();
        ctx.report.host.tools.extend(versions);
        Ok(tools)
    }
}

fn notes(ctx: &mut Context) {
    let queue_ms = UPLINK_QUEUE.0 * 8 * 1000 / UPLINK_BIT_S;
    ctx.note(format!(
        "The uplink has {} Mbit/s, {} ms and a queue of {queue_ms} ms. Rates are those of whole frames where \
         it ends, in percent of the limit; the tools' own limits count payload alone, of which 95 % of the \
         wire is. A copy begins with the first 100 ms that have half of what the limit gives: before are \
         handshakes. `used` is the mean from a second later on.",
        UPLINK_BIT_S / MBIT,
        UPLINK_RTT.as_millis(),
    ));
    ctx.note(
        "Round trips are those of probes to a neighbour whose answers leave by the same uplink, from the \
         start of the copy on; `idle` is the path without a copy. Of curl and wget `tidegate run` limits \
         what they receive, and the wire is read before the limit.",
    );
}

/// The uplink, what is at its ends, and what is copied.
struct Scene {
    // Servers end before their directories and hosts go.
    _servers: Vec<Child>,
    _ssh: Option<SshServer>,
    _web: Option<WebServer>,
    bed: Bed,
    directory: TempDir,
    places: Places,
}

impl Scene {
    fn new(
        ctx: &Context,
        lab_binary: Option<PathBuf>,
        tools: &[Tool],
        file_bytes: u64,
    ) -> anyhow::Result<Scene> {
        let options = TestbedOptions {
            lab_binary,
            link: Some(uplink(ctx)),
            ..TestbedOptions::new(Topology::Pair)
        };
        let testbed = Testbed::new(options)?;
        let ports = FlowPorts { first: NEIGHBOUR_PORT, count: 1 };
        let (receiver, dev) = (testbed.receiver(0), testbed.receiver_dev(0));
        let meter = WireMeter::attach_flows(receiver, dev, BINS, BIN, ports)?;
        let bed = Bed { meter, testbed };

        let directory = tempfile::Builder::new().prefix("tidegate-bwlimit-").tempdir()?;
        let sub = |name: &str| directory.path().join(name);
        let (one, several, incoming) = (sub("one"), sub("several"), sub("incoming"));
        for path in [&one, &several, &incoming] {
            fs::create_dir(path)?;
        }
        let testbed = &bed.testbed;
        let (sender, receiver) = (testbed.sender(), testbed.receiver(0));
        let uses = |some: &[Tool]| tools.iter().any(|tool| some.contains(tool));
        if file_bytes > 0 {
            (0..SEVERAL).try_for_each(|n| random_file(&several.join(file_name(n)), file_bytes))?;
            fs::hard_link(several.join(file_name(0)), one.join(file_name(0)))?;
        }
        let ssh_at = bed.at(SSH_PORT);
        let ssh =
            tools.iter().any(|tool| tool.uses_ssh()).then(|| SshServer::start(receiver, ssh_at));
        let ssh = ssh.transpose()?;
        let (webdav, restic) = (bed.at(WEBDAV_PORT), bed.at(RESTIC_PORT));
        let mut servers = vec![probe::start_server(testbed, sender, neighbour(testbed))?];
        for (tool, protocol, at) in
            [(Tool::Rclone, Protocol::Webdav, webdav), (Tool::Restic, Protocol::Restic, restic)]
        {
            if uses(&[tool]) {
                servers.push(rclone::serve(receiver, protocol, &incoming, at)?);
            }
        }
        let web_at = SocketAddr::new(testbed.sender_addr(Family::V4), WEB_PORT);
        let web = uses(&[Tool::Curl, Tool::Wget])
            .then(|| WebServer::start(sender, web_at, DOWNLOAD_BYTES))
            .transpose()?;
        let places = Places {
            one,
            several,
            incoming,
            ssh: ssh_at,
            ssh_options: ssh.as_ref().map(SshServer::options).unwrap_or_default(),
            webdav,
            restic,
            url: web.as_ref().map(WebServer::url).unwrap_or_default(),
        };
        Ok(Scene { _servers: servers, _ssh: ssh, _web: web, bed, directory, places })
    }

    /// One copy under one limit, for so long.
    fn measure(
        &mut self,
        ctx: &Context,
        (job, system): (Job, System),
        limit_bit_s: u64,
        duration: Duration,
    ) -> anyhow::Result<Vec<(&'static str, f64)>> {
        self.empty_incoming()?;
        let testbed = &self.bed.testbed;
        let (from, to) = (testbed.sender(), testbed.receiver(0));
        let site = Site::from(if job.tool.downloads() { to } else { from });
        if job.tool == Tool::Restic {
            self.start(site, &restic_init(&self.places))?.finish(MAKE)?;
        }
        let (own, runner) = match system {
            System::OwnFlag => (Some(limit_bit_s), Vec::new()),
            System::Tidegate => (None, runner(ctx, job.tool, limit_bit_s)?),
        };
        self.bed.meter.start()?;
        let testbed = &self.bed.testbed;
        let mut args = probe::ClientArgs::new(neighbour(testbed), duration);
        args.rate_hz = NEIGHBOUR_HZ;
        args.may_lose_all = true;
        let neighbour = probe::start_client(testbed, testbed.receiver(0), args)?;
        let mut copying = self.start(site.under(&runner), &job.command(&self.places, own))?;
        let neighbour = probe::finish_client(neighbour, args)?;
        let wire = self.wait_for_wire(&mut copying, limit_bit_s, duration)?;
        copying.stop()?;
        self.wait_until_quiet()?;
        let mut values = wire_values(&wire, limit_bit_s, duration)?;
        if neighbour.mostly_came_back() {
            values.extend([
                ("rtt_p50_us", neighbour.rtt.p50_us),
                ("rtt_p99_us", neighbour.rtt.p99_us),
                ("rtt_max_us", neighbour.rtt.max_us),
            ]);
        }
        values.push(("probes_lost_percent", neighbour.lost_percent()));
        Ok(values)
    }

    fn start(&self, site: Site<'_>, words: &[String]) -> anyhow::Result<Child> {
        let [program, rest @ ..] = words else { return Err(anyhow!("no command")) };
        let mut command = command(site, program)?;
        command.args(rest).env(PASSWORD.0, PASSWORD.1).env("HOME", self.directory.path());
        Child::spawn(command)
    }

    /// Removes the files of earlier copies: a program would not copy them again.
    fn empty_incoming(&self) -> anyhow::Result<()> {
        for entry in fs::read_dir(&self.places.incoming)? {
            let (entry, path) = entry.map(|entry| (entry.file_type(), entry.path()))?;
            if entry?.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
        }
        Ok(())
    }

    /// Waits until a copy has lasted for `duration`; returns the bytes that arrived since it began.
    fn wait_for_wire(
        &self,
        copying: &mut Child,
        limit_bit_s: u64,
        duration: Duration,
    ) -> anyhow::Result<Wire> {
        let started = Instant::now();
        loop {
            // One that has ended has failed, or copied less than it was to.
            copying.check_running()?;
            let wire = self.wire(limit_bit_s)?;
            let left = duration.saturating_sub(wire.duration());
            if left.is_zero() {
                return Ok(wire.between(Duration::ZERO, duration));
            }
            ensure!(started.elapsed() < LATE, "the copy had lasted {:?} only", wire.duration());
            pass_time(left.max(TENTH))?;
        }
    }

    /// Waits until nothing of a copy that has ended arrives: what is in a socket's buffer is sent, also
    /// without its process, and at the rate that its limit has set.
    fn wait_until_quiet(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            self.bed.meter.start()?;
            pass_time(QUIET)?;
            if self.arrived()?.iter().sum::<u64>() < FRAME_BYTES {
                return Ok(());
            }
            ensure!(started.elapsed() < LATE, "data of a copy that has ended still arrives");
        }
    }

    /// The bytes that have arrived since a copy began.
    fn wire(&self, limit_bit_s: u64) -> anyhow::Result<Wire> {
        Ok(Wire::new(begun(self.arrived()?, limit_bit_s), self.bed.meter.bin()))
    }

    /// The bytes of each bin since the meter was started, without the neighbour's answers.
    fn arrived(&self) -> anyhow::Result<Vec<u64>> {
        let meter = &self.bed.meter;
        let all = meter.bins()?.into_iter().map(|bin| bin.bytes);
        let neighbours = meter.flow_bins()?.into_iter().flatten();
        Ok(all.zip(neighbours).map(|(all, neighbour)| all.saturating_sub(neighbour)).collect())
    }
}

/// The bins from the first 100 ms on that have half of what a limit gives: before are handshakes.
fn begun(mut bytes: Vec<u64>, limit_bit_s: u64) -> Vec<u64> {
    let window = (TENTH.as_millis() / BIN.as_millis()) as usize;
    let least = (limit_bit_s as f64 / 8.0 * TENTH.as_secs_f64() / 2.0) as u64;
    let begins = bytes.windows(window).position(|bins| bins.iter().sum::<u64>() >= least);
    bytes.drain(..begins.unwrap_or(bytes.len()));
    bytes
}

/// Metric and value of what was on the wire; percent are those of the limit.
fn wire_values(
    wire: &Wire,
    limit_bit_s: u64,
    duration: Duration,
) -> anyhow::Result<Vec<(&'static str, f64)>> {
    let percent = |bit_s: f64| bit_s / limit_bit_s as f64 * 100.0;
    let first = wire.mean_bit_s(Duration::ZERO, SECOND);
    let used = wire.mean_bit_s(SECOND, duration);
    let peaks = wire.peak(SECOND).zip(wire.peak(TENTH));
    let all = first.zip(used).zip(peaks);
    ensure!(all.is_some(), "the copy did not last for more than a second");
    let metrics = all.map(|((first, used), (second, tenth))| {
        vec![
            ("first_second_bytes", first / 8.0),
            ("first_second_percent", percent(first)),
            ("used_percent", percent(used)),
            ("max_1s_percent", percent(second.bit_s)),
            ("max_100ms_percent", percent(tenth.bit_s)),
            ("max_100ms_at_s", tenth.since_start.as_secs_f64()),
        ]
    });
    Ok(metrics.unwrap_or_default())
}

/// The words that a user types before the command.
fn runner(ctx: &Context, tool: Tool, limit_bit_s: u64) -> anyhow::Result<Vec<OsString>> {
    let rate = Rate::from_bit_s(limit_bit_s).ok_or_else(|| anyhow!("a limit of zero"))?;
    let flag = if tool.downloads() { "--ingress" } else { "--egress" };
    let words = ["run", flag, &rate.to_string(), "--"].map(OsString::from);
    Ok([ctx.tidegate.clone().into_os_string()].into_iter().chain(words).collect())
}

fn uplink(ctx: &Context) -> LinkSpec {
    let mut link = ctx.link(UPLINK_RTT);
    for way in [&mut link.there, &mut link.back] {
        (way.rate, way.queue) = (Rate::from_bit_s(UPLINK_BIT_S), Some(UPLINK_QUEUE));
    }
    link
}

/// Where the neighbour answers: a host behind the uplink, as the sender is.
fn neighbour(testbed: &Testbed) -> SocketAddr {
    SocketAddr::new(testbed.sender_addr(Family::V4), NEIGHBOUR_PORT)
}

fn random_file(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let mut random = fs::File::open("/dev/urandom")?.take(bytes);
    std::io::copy(&mut random, &mut fs::File::create(path)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_has_each_tool_at_each_limit_alone_and_several_times() {
        let plan = Bwlimit::default().plan(&Tool::ALL);
        assert_eq!(plan.len(), 2 * 2 * Tool::ALL.len());
        let (limit, job) = plan[0];
        assert_eq!((limit, job.several), (5 * MBIT, false));
    }

    #[test]
    fn a_choice_is_read_or_says_what_to_type() {
        let check = |only: &str| Bwlimit::default().check_choice(&[only.to_owned()], &[]);
        assert_eq!(check("scp"), Ok(()));
        let refused = "no row is named `ftp`: use some of rsync, rclone, restic, scp, curl, wget";
        assert_eq!(check("ftp"), Err(refused.to_owned()));
    }

    #[test]
    fn shares_are_of_the_limit_and_the_first_second_is_apart() {
        // 2 Mbit in the first second, 1 Mbit/s after it; frames are too small to begin later.
        let bins: Vec<u64> =
            [vec![12_500; 20], vec![0; 80], vec![12_500; 10], vec![0; 89], vec![12_500]].concat();
        let wire = Wire::new(bins, BIN);
        let values = wire_values(&wire, MBIT, 2 * SECOND).unwrap();
        let of = |metric| values.iter().find(|(name, _)| *name == metric).unwrap().1.round();
        assert_eq!((of("first_second_bytes"), of("first_second_percent")), (250_000.0, 200.0));
        assert_eq!((of("used_percent"), of("max_1s_percent")), (110.0, 200.0));
        assert_eq!((of("max_100ms_percent"), of("max_100ms_at_s")), (1000.0, 0.0));
        // Half of what the limit gives in 100 ms are 6250 bytes.
        let bytes = [vec![3000, 0, 0], vec![0; 20], vec![4000; 9]].concat();
        assert_eq!(begun(bytes, MBIT), [vec![0; 8], vec![4000; 2], vec![4000; 7]].concat());
        assert!(begun(vec![100; 50], MBIT).is_empty());
        let short = Wire::new(vec![12_500; 50], BIN);
        assert!(wire_values(&short, MBIT, SECOND).is_err());
    }
}
