//! `carousel-cpu`: what shaping costs the processors. The same greedy TCP flows go through each limiter
//! at the same rate, between two network namespaces, in turn.
//!
//! | system | what it is | the path |
//! |---|---|---|
//! | `pfifo` | a queue without a limit; the program asks for the rate itself (`iperf3 --bitrate`) | veth |
//! | `htb`, `tbf` | the kernel's | veth |
//! | `pace` | `tidegate run`: paced sockets | veth |
//! | `carousel-auto`, `-poll`, `-sleep` | `tidegate nic` in a mode of waiting | two TAP devices |
//! | `lane` | the shaper of `tidegate nic` without ports and threads, in virtual time | none |
//!
//! What a path costs is the CPU time of its processes (sender, receiver, `tidegate nic`) and of the
//! network's softirqs outside of them (`cpu`). Others may work on the machine meanwhile. Where
//! the machine was quiet before the load, `machine_cpus` is what its CPUs did besides, all of it: time
//! not idle in `/proc/stat` less that of the moment before. The rate is that on the wire, from the same
//! window.
//!
//! A software NIC moves every packet through user space and back, where a qdisc hands on a pointer.
//! Beside the whole path therefore stands what is spent on the decision alone: `shaping_ns` of `lane`,
//! and for `htb` what a frame costs more than with `pfifo`.

mod claims;
mod machine;
mod nic;
mod shaping;

use std::{
    fmt,
    net::IpAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tidegate_core::Rate;
use tidegate_instruments::wire_meter::WireMeter;
use tidegate_sys::net::NetNs;

use super::{
    case_in_words,
    cpu::{PathMeter, Spent, process_cpu},
};
use crate::{
    chart::BarsOf,
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    systems::{Applied, LimitCase, System},
    testbed::{Family, Site, Testbed, TestbedOptions, Topology, peers::Peer, wait::pass_time},
    tools::iperf::{IperfOptions, IperfRun, Load},
};

use machine::{Busy, Quiet};
use nic::{Nic, Wait};

const MBIT: u64 = 1_000_000;
const GBIT: u64 = 1_000 * MBIT;

const WIRE: &str = "wire_bit_s";
const PER_CPU: &str = "wire_per_cpu_bit_s";
const PER_FRAME: &str = "cpu_per_frame_ns";
const AGAINST_HTB: &str = "cpu_against_htb_percent";
const SHAPING: &str = "shaping_ns";
const LANE: &str = "lane";

/// A full Ethernet frame on the wire, in bytes.
const FRAME_BYTES: f64 = 1_514.0;
/// TCP's start is over, and all flows run.
const SETTLED: Duration = Duration::from_millis(500);
/// Bins of the meter, and how many.
const BIN: Duration = Duration::from_millis(10);
const BINS: u32 = 1_000;
/// Frames that pass the lane in a run.
const LANE_FRAMES: u64 = 2_000_000;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct CarouselCpu {
    /// For tests: one case, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

/// A limiter under load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limiter {
    Pfifo,
    Kernel(System),
    Carousel(Wait),
}

const LIMITERS: [Limiter; 7] = [
    Limiter::Pfifo,
    Limiter::Kernel(System::Htb),
    Limiter::Kernel(System::Tbf),
    Limiter::Kernel(System::Pace),
    Limiter::Carousel(Wait::Auto),
    Limiter::Carousel(Wait::Poll),
    Limiter::Carousel(Wait::Sleep),
];

impl fmt::Display for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Limiter::Pfifo => "pfifo",
            Limiter::Kernel(system) => system.name(),
            Limiter::Carousel(Wait::Auto) => "carousel-auto",
            Limiter::Carousel(Wait::Poll) => "carousel-poll",
            Limiter::Carousel(Wait::Sleep) => "carousel-sleep",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    limit_bit_s: u64,
    flows: u32,
}

impl Cell {
    /// Sleeping is for those who need no exact times: one case shows what it saves.
    fn limiters(self) -> &'static [Limiter] {
        let sleeps = (self.limit_bit_s, self.flows) == (GBIT, 15);
        if sleeps { &LIMITERS } else { &LIMITERS[..LIMITERS.len() - 1] }
    }

    fn case(self) -> Case {
        Case::new().with("limit_bit_s", self.limit_bit_s).with("flows", self.flows)
    }
}

impl CarouselCpu {
    /// One case of every system, seconds long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> CarouselCpu {
        CarouselCpu { tiny: Some(lab_binary) }
    }

    fn plan(&self, quick: bool) -> Vec<Cell> {
        let cell = |limit_bit_s, flows| Cell { limit_bit_s, flows };
        if self.tiny.is_some() {
            return vec![cell(500 * MBIT, 2)];
        }
        if quick {
            return vec![cell(GBIT, 15)];
        }
        let rates = [500 * MBIT, GBIT, 2 * GBIT, 4 * GBIT].map(|rate| cell(rate, 15));
        rates.into_iter().chain([1, 100].map(|flows| cell(GBIT, flows))).collect()
    }
}

impl Experiment for CarouselCpu {
    fn name(&self) -> &'static str {
        "carousel-cpu"
    }

    fn summary(&self) -> &'static str {
        "CPU time that limits of 0.5 to 4 Gbit/s cost: the kernel's qdiscs, paced sockets, the software NIC"
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 2 } else { 3 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let options =
            TestbedOptions { lab_binary: self.tiny.clone(), ..TestbedOptions::new(Topology::Pair) };
        let testbed = Testbed::new(options)?;
        let seconds = if self.tiny.is_some() || ctx.quick { 2 } else { 3 };
        let mut quiet = match (self.tiny.is_some(), ctx.quick) {
            (true, _) => Quiet::within(Duration::ZERO),
            (_, true) => Quiet::within(Duration::from_secs(6)),
            _ => Quiet::within(Duration::from_secs(20)),
        };
        let plan = self.plan(ctx.quick);
        for cell in &plan {
            let case = cell.case();
            ctx.step(case_in_words(&case));
            ctx.alternate(cell.limiters(), ctx.repeats, |ctx, limiter, run| {
                let load = Run { cell: *cell, duration: Duration::from_secs(seconds) };
                load.measure(ctx, &testbed, *limiter, run, &mut quiet)
            })?;
        }
        claims::against_htb(ctx, &plan);
        self.lanes(ctx, &plan)?;
        notes(ctx, &quiet);
        for (file, title, metric) in [
            ("per-cpu", "Rate on the wire for each busy CPU", PER_CPU),
            ("per-frame", "CPU time of a full frame, all of the path", PER_FRAME),
            ("against-htb", "CPU time of a full frame, against htb", AGAINST_HTB),
        ] {
            ctx.bars(file, BarsOf { title, metric, points: None });
        }
        claims::record(ctx, &plan);
        Ok(())
    }
}

impl CarouselCpu {
    /// The shaper alone, in the cases of the plan.
    fn lanes(&self, ctx: &mut Context, plan: &[Cell]) -> anyhow::Result<()> {
        let frames = if self.tiny.is_some() { LANE_FRAMES / 100 } else { LANE_FRAMES };
        for cell in plan {
            ctx.alternate(&[LANE], ctx.repeats, |ctx, system, run| {
                let ns = shaping::frame_ns(cell.flows, rate(cell.limit_bit_s)?, frames)?;
                ctx.record(system, &cell.case(), run).value(SHAPING, ns);
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// One run of one limiter.
#[derive(Debug, Clone, Copy)]
struct Run {
    cell: Cell,
    duration: Duration,
}

/// A limiter in force, and the path on which it is.
struct Path<'a> {
    site: Site<'a>,
    to: IpAddr,
    device: &'static str,
    /// The process that shapes.
    pid: Option<u32>,
}

impl Run {
    fn measure(
        self,
        ctx: &mut Context,
        testbed: &Testbed,
        limiter: Limiter,
        run: u32,
        quiet: &mut Quiet,
    ) -> anyhow::Result<()> {
        let limit_bit_s = self.cell.limit_bit_s;
        let veth = |site| Path {
            site,
            to: testbed.addr(0, Family::V4),
            device: testbed.receiver_dev(0),
            pid: None,
        };
        let sender = testbed.sender();
        match limiter {
            Limiter::Pfifo => {
                let _peer = Peer::pfifo(testbed)?;
                self.load(ctx, testbed, limiter, &veth(sender.into()), (run, quiet))
            }
            Limiter::Kernel(system) => {
                let applied: Applied =
                    system.apply(ctx, testbed, &LimitCase::egress(limit_bit_s))?;
                self.load(ctx, testbed, limiter, &veth(applied.site(sender)), (run, quiet))?;
                applied.finish().map(drop)
            }
            Limiter::Carousel(wait) => {
                let nic = Nic::start(ctx, testbed, rate(limit_bit_s)?, wait)?;
                let path = Path {
                    site: sender.into(),
                    to: nic::RECEIVER,
                    device: nic::DEVICE,
                    pid: Some(nic.pid()),
                };
                self.load(ctx, testbed, limiter, &path, (run, quiet))?;
                nic.finish()
            }
        }
    }

    /// Sends through the path, and records what it cost.
    fn load(
        self,
        ctx: &mut Context,
        testbed: &Testbed,
        limiter: Limiter,
        path: &Path<'_>,
        (run, quiet): (u32, &mut Quiet),
    ) -> anyhow::Result<()> {
        let receiver: &NetNs = testbed.receiver(0);
        let mut meter = WireMeter::attach(receiver, path.device, BINS, BIN)?;
        let mut options = IperfOptions::tcp(path.to, self.duration);
        options.parallel = self.cell.flows;
        if limiter == Limiter::Pfifo {
            let rate_bit_s = self.cell.limit_bit_s / u64::from(self.cell.flows);
            options.load = Load::TcpAt { rate_bit_s };
        }
        let before = quiet.look(|| path.pid.map(process_cpu).transpose())?;
        let iperf = IperfRun::start(path.site, receiver, &options)?;
        let processes: Vec<u32> =
            [iperf.client_pid(), iperf.server_pid()].into_iter().chain(path.pid).collect();
        let path_meter = PathMeter::attach(processes)?;
        pass_time(SETTLED)?;
        let read = || -> anyhow::Result<(Busy, Spent, Option<Duration>)> {
            Ok((Busy::now()?, path_meter.read()?, path.pid.map(process_cpu).transpose()?))
        };
        meter.start()?;
        let (begun, was) = (Instant::now(), read()?);
        pass_time(self.duration - 2 * SETTLED)?;
        let (is, seconds) = (read()?, begun.elapsed().as_secs_f64());
        let bytes: u64 = meter.bins()?.iter().map(|bin| bin.bytes).sum();
        iperf.finish()?;

        let cpus = is.1.since(&was.1);
        let path_cpus = cpus.total();
        let wire_bit_s = bytes as f64 * 8.0 / seconds;
        let frames_per_s = wire_bit_s / 8.0 / FRAME_BYTES;
        let mut values = vec![
            (WIRE, wire_bit_s),
            ("path_cpus", path_cpus),
            ("softirq_cpus", cpus.softirqs),
            (PER_CPU, wire_bit_s / path_cpus),
            (PER_FRAME, path_cpus * 1e9 / frames_per_s),
        ];
        if let Some((is, was)) = is.2.zip(was.2) {
            let nic_cpus = is.saturating_sub(was).as_secs_f64() / seconds;
            values.push(("nic_cpus", nic_cpus));
            values.push(("nic_per_frame_ns", nic_cpus * 1e9 / frames_per_s));
        }
        if let Some(before) = before {
            values.push(("machine_cpus", (is.0.since(&was.0) - before).max(0.0)));
        }
        let mut record = ctx.record(limiter, &self.cell.case(), run);
        for (metric, value) in values {
            record = record.value(metric, value);
        }
        Ok(())
    }
}

fn notes(ctx: &mut Context, quiet: &Quiet) {
    ctx.note(
        "`path cpus` is the CPU time of sender, receiver and tidegate nic, and of the network's \
         softirqs outside of them (`softirq cpus`); hard interrupts and the idle task are not in it. \
         `machine cpus`, where the machine was quiet before, is all time in which its CPUs were not \
         idle, less that of the moment before. `nic` is tidegate nic alone. `wire per CPU` and `cpu \
         per frame` are the rate on the wire and a frame of 1514 bytes against path cpus; `cpu against \
         htb` is the latter in the same round.",
    );
    ctx.note(
        "With `pfifo` nothing limits: iperf3 asks for the rate itself, in blocks of 128 KB, and so sends \
         the longest segments of all; a part of what others cost more is that theirs are shorter. \
         `shaping` is of `lane` in virtual time, without ports, and each frame is one of its own. A \
         thread that polls takes what CPU it is given: on a machine that has none to spare that is less \
         than one, and the rate suffers. There are no published figures for these paths.",
    );
    if quiet.disturbed > 0 {
        ctx.note(format!(
            "{} of {} runs began while others worked on this machine, and have no machine cpus; caches \
             that are shared with others make all figures higher",
            quiet.disturbed, quiet.runs
        ));
    }
}

fn rate(bit_s: u64) -> anyhow::Result<Rate> {
    Rate::from_bit_s(bit_s).context("a limit of zero")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_plan_has_the_rates_and_flows_that_are_claimed() {
        let full = CarouselCpu::default().plan(false);
        for limit_bit_s in [500 * MBIT, GBIT, 2 * GBIT, 4 * GBIT] {
            assert!(full.contains(&Cell { limit_bit_s, flows: 15 }));
        }
        for flows in [1, 15, 100] {
            assert!(full.contains(&Cell { limit_bit_s: GBIT, flows }));
        }
        let sleeps = |cell: &&Cell| cell.limiters().len() == LIMITERS.len();
        assert_eq!(full.iter().filter(sleeps).count(), 1);
    }
}
