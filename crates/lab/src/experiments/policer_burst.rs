//! `policer-burst`: the four tests of J. Cardone's article "Rate Limiting", with the source that its author
//! had and with a smooth one.
//!
//! A policer of 50 Mbit/s is offered 100 Mbit/s of datagrams, for buckets of 15 to 1000 kB. The article's
//! iperf3 sent its datagrams in bursts, a tenth of a second's worth each tenth of a second, at line rate; the
//! smooth source sends the same datagrams evenly. What passes is counted at the receiver, and captured there:
//! `tidegate burst analyze` is to find the policer in the capture. `law` is what a token bucket passes of the
//! source as it sent: bursts as long as they took.
//!
//! Rates and depths count whole frames, as the policers do; the goodput is payload, as iperf3 counts it.

mod claims;

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use serde_json::Value;
use tidegate_core::{
    Bytes, Nanos, Rate,
    burst::{BurstySource, bursty_source},
};
use tidegate_sys::net::NetNs;

use super::policers::{Depth, FRAME_BYTES, Policer, Road};
use crate::{
    chart::{Bars, BarsOf},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::{Case, Row},
    testbed::{Child, Family, command, wait::wait_until},
    tools::udp::{self, SourceArgs, SourceReport},
};

const LIMIT_BIT_S: u64 = 50_000_000;
/// Of payload.
const OFFERED_BIT_S: u64 = 100_000_000;
const PAYLOAD_BYTES: u64 = 1472;
/// The article's generator woke up ten times a second.
const PERIOD: Duration = Duration::from_millis(100);
/// The line on which its bursts came.
const LINE_BIT_S: u64 = 1_000_000_000;
const PORT: u16 = 7002;
/// The article's buckets, and what they passed of iperf3's payload in its tests.
const PUBLISHED: [(u64, f64); 4] =
    [(15_000, 6.77e6), (150_000, 17.2e6), (600_000, 48.4e6), (1_000_000, 48.7e6)];
/// One frame, and two.
const SMALL: [u64; 2] = [FRAME_BYTES, 2 * FRAME_BYTES];

/// Until then the deepest bucket, a second of nft's bytes, is empty. Half a period off the bursts, so that
/// none lies on an edge.
const SETTLED: Duration = Duration::from_millis(1250);
/// How long tcpdump may take to start.
const READY: Duration = Duration::from_secs(60);
/// Headers of a datagram.
const SNAP_BYTES: u32 = 64;
const ANALYSIS: Duration = Duration::from_secs(120);

const SYSTEMS: [Policer; 4] = [Policer::Police, Policer::Nft, Policer::NftBytes, Policer::Tbf];
/// The name under which what the law says is recorded.
const LAW: &str = "law";
const BURSTY: &str = "bursty";
const SMOOTH: &str = "smooth";

const USED: &str = "used_percent";
const GOODPUT: &str = "goodput_bit_s";
const RATE: &str = "found_rate_bit_s";
const DEPTH: &str = "found_depth_bytes";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct PolicerBurst {
    /// For tests: one bucket, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

/// A case, and what runs in it.
#[derive(Debug, Clone, PartialEq)]
struct Cell {
    bucket_bytes: u64,
    source: &'static str,
    systems: Vec<Policer>,
}

impl PolicerBurst {
    /// One bucket under every system, seconds long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> PolicerBurst {
        PolicerBurst { tiny: Some(lab_binary) }
    }

    fn plan(&self, quick: bool) -> Vec<Cell> {
        let cell = |bucket_bytes, source, systems: &[Policer]| Cell {
            bucket_bytes,
            source,
            systems: systems.to_vec(),
        };
        if self.tiny.is_some() {
            return vec![cell(15_000, BURSTY, &SYSTEMS), cell(15_000, SMOOTH, &SYSTEMS[..1])];
        }
        let mut plan = Vec::new();
        for source in [BURSTY, SMOOTH] {
            for (bucket_bytes, _) in PUBLISHED {
                let peers = !quick || (bucket_bytes, source) == (15_000, BURSTY);
                plan.push(cell(bucket_bytes, source, &SYSTEMS[..if peers { 4 } else { 1 }]));
            }
        }
        plan.extend(SMALL.map(|bytes| cell(bytes, SMOOTH, &SYSTEMS[..1])));
        plan
    }
}

impl Experiment for PolicerBurst {
    fn name(&self) -> &'static str {
        "policer-burst"
    }

    fn summary(&self) -> &'static str {
        "A policer of 50 Mbit/s under 100 Mbit/s of bursty and of smooth datagrams, for buckets of one frame \
         to 1000 kB: what passes beside the token bucket's law, and whether a capture shows the policer"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        let tcpdump = Need::Command { name: "tcpdump", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, tcpdump]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 3 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let duration = match (&self.tiny, ctx.quick) {
            (Some(_), _) => Duration::from_secs(2),
            (None, true) => Duration::from_secs(4),
            (None, false) => Duration::from_secs(8),
        };
        ctx.note(
            "`used` is what arrives of the limit, whole frames counted, from 1.25 s after the first datagram \
             on; the goodput is its payload. The published goodputs are those of the article's policer, for \
             the bursty source. `law` is what a token bucket passes of bursts as long as those that the \
             source under `police` sent. `found` is what `tidegate burst analyze` reads off a capture at the \
             receiver. `nft` counts packets. `nft-bytes` is the same rule in bytes, whose bucket the kernel \
             makes a second deeper than it is told. `tbf` is no policer: what waits up to 50 ms.",
        );
        let mut road = Road::new(self.tiny.clone(), Vec::new())?;
        for cell in self.plan(ctx.quick) {
            cell.measure(ctx, &mut road, duration)?;
        }
        figures(ctx);
        claims::record(ctx);
        Ok(())
    }
}

impl Cell {
    fn case(&self) -> Case {
        Case::new()
            .with("limit_bit_s", LIMIT_BIT_S)
            .with("source", self.source)
            .with("bucket_bytes", self.bucket_bytes)
    }

    /// What the source is told: whole periods.
    fn source(&self, to: SocketAddr, duration: Duration) -> SourceArgs {
        let apart_ns = PAYLOAD_BYTES * 8 * 1_000_000_000 / OFFERED_BIT_S;
        let period_ns = PERIOD.as_nanos() as u64;
        let payload_bytes = PAYLOAD_BYTES as usize;
        if self.source == SMOOTH {
            let bursts = duration.as_nanos() as u64 / apart_ns;
            return SourceArgs {
                to,
                payload_bytes,
                burst_datagrams: 1,
                period_ns: apart_ns,
                gap_ns: 0,
                bursts,
            };
        }
        SourceArgs {
            to,
            payload_bytes,
            burst_datagrams: (period_ns / apart_ns) as u32,
            period_ns,
            gap_ns: FRAME_BYTES * 8 * 1_000_000_000 / LINE_BIT_S,
            bursts: duration.as_nanos() as u64 / period_ns,
        }
    }

    fn measure(
        &self,
        ctx: &mut Context,
        road: &mut Road,
        duration: Duration,
    ) -> anyhow::Result<()> {
        let limit = Rate::from_bit_s(LIMIT_BIT_S).context("a limit of zero")?;
        let case = self.case();
        ctx.step(format!("{} bytes, a {} source", self.bucket_bytes, self.source));
        ctx.alternate(&self.systems, ctx.repeats, |ctx, &system, run| {
            let depth = Depth::Bytes(self.bucket_bytes);
            road.start_meters()?;
            let testbed = &road.testbed;
            let policed = system.apply(ctx, testbed, limit, depth)?;
            let to = SocketAddr::new(testbed.addr(0, Family::V4), PORT);
            // Nobody reads it: what matters has been counted by then.
            let _sink = testbed.receiver(0).run(|| UdpSocket::bind(to))??;
            let capture =
                Capture::start(testbed.receiver(0), testbed.receiver_dev(0), &ctx.out_dir)?;
            let args = self.source(to, duration);
            let source = udp::finish(udp::start(testbed, testbed.sender(), args)?, args)?;
            let file = capture.stop()?;
            let dropped = policed.finish()?;
            let wires = road.wires()?;
            let wire = wires.first().context("there is no receiver")?;
            let found = file.analyze(&ctx.tidegate)?;

            let until = args.duration() - PERIOD / 2 * 3;
            let rate = wire.mean_bit_s(SETTLED.min(until / 2), until).context("nothing arrived")?;
            let percent = |bit_s: f64| bit_s / LIMIT_BIT_S as f64 * 100.0;
            let goodput = rate * PAYLOAD_BYTES as f64 / FRAME_BYTES as f64;
            let published = PUBLISHED.iter().find(|(bucket, _)| *bucket == self.bucket_bytes);
            let published = published.map(|(_, bit_s)| *bit_s);
            let published =
                published.filter(|_| self.source == BURSTY && system == Policer::Police);
            let mut record = ctx
                .record(system, &case, run)
                .value(USED, percent(rate))
                .beside(GOODPUT, goodput, published)
                .value("drops", dropped as f64)
                .value("late_max_us", source.late_max_us);
            if let Some((rate_bit_s, depth_bytes)) = found {
                record = record.value(RATE, rate_bit_s).value(DEPTH, depth_bytes);
            }
            let _ = record;
            if system == Policer::Police {
                let law = self.law(limit, &args, &source)?;
                ctx.record(LAW, &case, run)
                    .value(USED, percent(law))
                    .value(GOODPUT, law * PAYLOAD_BYTES as f64 / FRAME_BYTES as f64);
            }
            Ok(())
        })
    }

    /// What the token bucket passes of the source as it sent, frames counted whole.
    fn law(&self, limit: Rate, args: &SourceArgs, sent: &SourceReport) -> anyhow::Result<f64> {
        // A smooth source is one whose bursts last as long as their period.
        let (frames, period_ns, line_bit_s) = match args.burst_datagrams {
            1 => (
                PERIOD.as_nanos() as u64 / args.period_ns,
                PERIOD.as_nanos() as u64 / args.period_ns * args.period_ns,
                FRAME_BYTES as f64 * 8e9 / args.period_ns as f64,
            ),
            frames => {
                let apart_us = sent.burst_mean_us / f64::from(frames - 1);
                (frames.into(), args.period_ns, FRAME_BYTES as f64 * 8e6 / apart_us)
            }
        };
        let source = BurstySource {
            burst: Bytes(frames * FRAME_BYTES),
            period: Nanos(period_ns),
            packet: FRAME_BYTES as u32,
            line: Rate::from_bit_s(line_bit_s as u64).context("the source did not send")?,
        };
        Ok(bursty_source(limit, Bytes(self.bucket_bytes), &source)?.rate_bit_s as f64)
    }
}

/// tcpdump at the receiver.
struct Capture {
    tcpdump: Child,
    file: CaptureFile,
}

/// What it wrote; removed when dropped.
struct CaptureFile(PathBuf);

impl Capture {
    fn start(host: &NetNs, dev: &str, dir: &Path) -> anyhow::Result<Capture> {
        fs::create_dir_all(dir)?;
        let file = CaptureFile(dir.join(format!("capture-{}.pcap", std::process::id())));
        let mut tcpdump = command(host, "tcpdump")?;
        tcpdump.args(["-i", dev, "-nn", "-Z", "root", "--immediate-mode", "-B", "16384"]);
        tcpdump.args(["-s", &SNAP_BYTES.to_string(), "-w"]).arg(&file.0);
        tcpdump.arg(format!("udp and dst port {PORT}"));
        let mut tcpdump = Child::spawn(tcpdump)?;
        wait_until("the start of tcpdump", READY, || {
            tcpdump.check_running()?;
            Ok(tcpdump.output().stderr.contains("listening on").then_some(()))
        })?;
        Ok(Capture { tcpdump, file })
    }

    fn stop(self) -> anyhow::Result<CaptureFile> {
        self.tcpdump.stop()?;
        Ok(self.file)
    }
}

impl CaptureFile {
    /// Rate and depth of the policer in it, frames counted whole; none if `tidegate` sees no policer.
    fn analyze(&self, tidegate: &Path) -> anyhow::Result<Option<(f64, f64)>> {
        let mut analyze = std::process::Command::new(tidegate);
        analyze.args(["burst", "analyze", "--json"]).arg(&self.0);
        estimate_in(&Child::spawn(analyze)?.finish(ANALYSIS)?.json()?)
    }
}

impl Drop for CaptureFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The estimate of the one flow.
fn estimate_in(report: &Value) -> anyhow::Result<Option<(f64, f64)>> {
    let flow = report["flows"].get(0).context("tidegate burst analyze found no flow")?;
    let estimate = &flow["estimate"];
    if flow["verdict"] != "policed" || estimate.is_null() {
        return Ok(None);
    }
    let number = |key: &str| {
        estimate[key].as_f64().with_context(|| format!("tidegate burst analyze says no {key}"))
    };
    let (rate, rate_frames) = (number("rate_bit_s")?, number("rate_frames_bit_s")?);
    Ok(Some((rate_frames, number("depth_bytes")? * rate_frames / rate)))
}

fn figures(ctx: &mut Context) {
    for source in [BURSTY, SMOOTH] {
        let here = |row: &&Row| row.case.0.get("source").is_some_and(|value| *value == source);
        let rows: Vec<Row> = ctx.rows().iter().filter(here).cloned().collect();
        let title = format!("What passes 50 Mbit/s of a {source} source of 100 Mbit/s, by bucket");
        let what = BarsOf { title: &title, metric: GOODPUT, points: None };
        if !rows.is_empty() {
            ctx.figure(&format!("goodput-{source}"), Bars::from_rows(&rows, what));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cell(source: &'static str, bucket_bytes: u64) -> Cell {
        Cell { bucket_bytes, source, systems: Vec::new() }
    }

    #[test]
    fn the_plan_has_the_articles_tests() {
        for quick in [true, false] {
            let plan = PolicerBurst::default().plan(quick);
            for source in [BURSTY, SMOOTH] {
                for (bucket, _) in PUBLISHED {
                    let is = |cell: &&Cell| (cell.bucket_bytes, cell.source) == (bucket, source);
                    assert_eq!(plan.iter().filter(is).count(), 1);
                }
            }
            let all = plan.iter().flat_map(|cell| &cell.systems);
            assert!(all.clone().any(|system| *system == Policer::Tbf));
            assert!(!quick || all.count() < 16);
        }
    }

    #[test]
    fn sources_offer_the_same() {
        let to = "10.77.1.1:7002".parse().unwrap();
        let second = Duration::from_secs(1);
        let bit_s = |args: SourceArgs| {
            let sent = u64::from(args.burst_datagrams) * args.bursts * PAYLOAD_BYTES * 8;
            sent as f64 / args.duration().as_secs_f64()
        };
        for source in [BURSTY, SMOOTH] {
            let offered = bit_s(cell(source, 1).source(to, second));
            assert!((offered / OFFERED_BIT_S as f64 - 1.0).abs() < 1e-3, "{source}: {offered}");
        }
    }

    #[test]
    fn the_law_knows_how_long_bursts_took() {
        let to = "10.77.1.1:7002".parse().unwrap();
        let limit = Rate::from_bit_s(LIMIT_BIT_S).unwrap();
        let law = |source, bucket, burst_mean_us| {
            let cell = cell(source, bucket);
            let sent = SourceReport {
                sent: 0,
                refused: 0,
                burst_mean_us,
                late_mean_us: 0.0,
                late_max_us: 0.0,
                realtime: true,
            };
            cell.law(limit, &cell.source(to, PERIOD), &sent).unwrap() / 1e6
        };
        // 15 kB and what 50 Mbit/s adds in 10.3 ms, ten times a second.
        assert!((law(BURSTY, 15_000, 10_271.0) - 6.3).abs() < 0.15);
        // 1 ms more is 62.5 kB a second more.
        let longer = law(BURSTY, 15_000, 11_271.0) - law(BURSTY, 15_000, 10_271.0);
        assert!((longer - 0.5).abs() < 0.13, "{longer}");
        assert!((law(BURSTY, 1_000_000, 10_271.0) - 50.0).abs() < 0.2);
        assert!((law(SMOOTH, 15_000, 0.0) - 50.0).abs() < 0.1);
        // Of a bucket of one frame a third has gone before the next datagram comes.
        assert!((law(SMOOTH, FRAME_BYTES, 0.0) - 34.3).abs() < 0.2);
    }

    #[test]
    fn an_estimate_counts_frames() {
        let report = |verdict: &str| {
            json!({"flows": [{"verdict": verdict, "estimate": {
                "rate_bit_s": 100.0, "rate_frames_bit_s": 101.0, "depth_bytes": 1000.0}}]})
        };
        assert_eq!(estimate_in(&report("policed")).unwrap(), Some((101.0, 1010.0)));
        assert_eq!(estimate_in(&report("random")).unwrap(), None);
        assert!(estimate_in(&json!({"flows": []})).is_err());
    }
}
