//! `policer-tcp`: what TCP makes of a policer, by round trip and by the depth of the bucket.
//!
//! Flows of iperf3 go through a router that polices them (`policers`) and over a link with a delay. A policer
//! has no queue, so the round trip is that of the link. Carousel's figure 3 (SIGCOMM 2017) is the case of one
//! CUBIC flow at 1 Gbit/s. Beside each figure of one congestion control stands what `tidegate burst size`
//! says of it: `law-paced` for senders that spread their packets, `law-unpaced` for windows in one piece.
//!
//! Flows of unlike kinds share one policer in the cases of fairness (`plan`).

mod claims;
mod plan;

use std::{path::PathBuf, time::Duration};

use anyhow::Context as _;
use tidegate_core::{
    Bytes, Nanos, Rate,
    burst::{self, CongestionControl},
};

use super::{
    bed::Control,
    case_in_words,
    policers::{FRAME_BYTES, Policer, Road},
};
use crate::{
    chart::{Bars, BarsOf},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::{Case, Row, distinct},
    stats,
    testbed::{Family, set_sysctl},
    tools::iperf::{IperfOptions, IperfReport, IperfRun, Load},
};
use plan::{Cell, Group, plan};

/// The flows run so long before they are counted.
const OMITTED: Duration = Duration::from_secs(1);
const PORT: u16 = 5201;
/// The interface that the law is told.
const INTERFACE_BIT_S: u64 = 10_000_000_000;
const PACKET_BYTES: u32 = 1500;

/// Carousel's figure 3: goodput of one CUBIC flow at 1 Gbit/s, by round trip in microseconds, with a bucket
/// of 1 ms and with one of 1 s.
const PUBLISHED: [(u64, f64, f64); 5] = [
    (100, 906e6, 962e6),
    (1_000, 658e6, 951e6),
    (10_000, 84e6, 841e6),
    (50_000, 24e6, 273e6),
    (100_000, 22e6, 217e6),
];

const LAW_PACED: &str = "law-paced";
const LAW_UNPACED: &str = "law-unpaced";
const USED: &str = "used_percent";
const GOODPUT: &str = "goodput_bit_s";
const JAIN: &str = "jain_index";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct PolicerTcp {
    /// For tests: one case of each kind, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl PolicerTcp {
    /// One case under every system and one of fairness, seconds long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> PolicerTcp {
        PolicerTcp { tiny: Some(lab_binary) }
    }
}

impl Experiment for PolicerTcp {
    fn name(&self) -> &'static str {
        "policer-tcp"
    }

    fn summary(&self) -> &'static str {
        "TCP through policers of 100 Mbit/s and 1 Gbit/s on a router, over round trips of 0.1 to 100 ms, \
         with buckets of 1 ms to 1 s: how much of the rate it gets, beside the law, and how flows share it"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, _quick: bool) -> u32 {
        1
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let duration = match (&self.tiny, ctx.quick) {
            (Some(_), _) => Duration::from_secs(1),
            (None, true) => Duration::from_secs(4),
            (None, false) => Duration::from_secs(10),
        };
        ctx.note(
            "`used` is the mean on the wire behind the policer from one second after the first data on, of \
             the limit, whole frames counted; the goodput is iperf3's. `law-paced` and `law-unpaced` are \
             what `tidegate burst size` says of the long run, in which slow start and its losses are \
             forgotten. The published goodputs are Carousel's. `first part` is what the flows named first \
             have of all. At 100 Mbit/s packets come of MTU size, at 1 Gbit/s as segments of up to 64 KB, \
             since the lab's links carry some 25 000 packets a second. `tbf` is no policer: what waits up to \
             50 ms, which is in the round trip that TCP measures.",
        );
        let plan = plan(self.tiny.is_some(), ctx.quick);
        for cells in plan.chunk_by(|cell, next| cell.rtts_us == next.rtts_us) {
            let rtts = cells.first().map_or(&[][..], |cell| cell.rtts_us);
            let links = rtts.iter().map(|us| ctx.link(Duration::from_micros(*us))).collect();
            let mut road = Road::new(self.tiny.clone(), links)?;
            for host in [road.testbed.sender(), road.testbed.receiver(0)] {
                set_sysctl(host, "net.ipv4.tcp_ecn", "0")?;
            }
            for cell in cells {
                cell.measure(ctx, &mut road, duration)?;
            }
        }
        figures(ctx);
        claims::record(ctx);
        Ok(())
    }
}

impl Cell {
    /// A link of this machine carries some 25 000 packets a second, which is enough at 100 Mbit/s. At
    /// 1 Gbit/s the policer meets segments of up to 64 KB, as that of a host does.
    fn is_cut(&self) -> bool {
        self.limit_bit_s < plan::GBIT
    }

    fn rate(&self) -> anyhow::Result<Rate> {
        Rate::from_bit_s(self.limit_bit_s).context("a limit of zero")
    }

    fn case(&self) -> anyhow::Result<Case> {
        let bucket = self.depth.bytes(self.rate()?);
        let names = distinct(self.groups.iter().map(|group| group.cc));
        let mut case = Case::new().with("limit_bit_s", self.limit_bit_s);
        for (key, us) in ["rtt_us", "far_rtt_us"].iter().zip(self.rtts_us) {
            case = case.with(key, *us);
        }
        let bucket_us = bucket.0 as f64 * 8e6 / self.limit_bit_s as f64;
        Ok(case
            .with("flows", self.flows())
            .with("cc", names.join("+"))
            .with("bucket_us", bucket_us.round()))
    }

    fn measure(
        &self,
        ctx: &mut Context,
        road: &mut Road,
        duration: Duration,
    ) -> anyhow::Result<()> {
        let (rate, case) = (self.rate()?, self.case()?);
        ctx.step(case_in_words(&case));
        let controls = self.groups.iter().map(|group| Control::get(group.cc));
        let controls = controls.collect::<anyhow::Result<Vec<_>>>()?;
        ctx.alternate(self.systems, ctx.repeats, |ctx, &system, run| {
            road.cut(self.is_cut())?;
            road.start_meters()?;
            let policed = system.apply(ctx, &road.testbed, rate, self.depth)?;
            let groups = self.groups.iter().zip(&controls).zip(PORT..);
            let runs =
                groups.map(|((group, control), port)| group.start(road, control, port, duration));
            let runs = runs.collect::<anyhow::Result<Vec<_>>>()?;
            let reports = runs.into_iter().map(IperfRun::finish);
            let reports = reports.collect::<anyhow::Result<Vec<_>>>()?;
            let wires = road.wires()?;
            let dropped = policed.finish()?;

            let used = wires.iter().map(|wire| wire.mean_bit_s(OMITTED, OMITTED + duration));
            let used: f64 = used.flatten().sum();
            let goodput: f64 = reports.iter().map(|report| report.received_bit_s).sum();
            let published = (system == Policer::Police).then(|| self.published()).flatten();
            let mut record = ctx
                .record(system, &case, run)
                .value(USED, used / self.limit_bit_s as f64 * 100.0)
                .beside(GOODPUT, goodput, published);
            for (metric, value) in self.values(&reports) {
                record = record.value(metric, value);
            }
            let _ = record.value("drops", dropped as f64);
            Ok(())
        })?;
        if let Some(law) = self.law(rate) {
            for (name, share) in [(LAW_PACED, law.paced), (LAW_UNPACED, law.unpaced)] {
                ctx.record(name, &case, 1).value(USED, share * 100.0);
            }
        }
        Ok(())
    }

    /// What iperf3 says besides the goodput.
    fn values(&self, reports: &[IperfReport]) -> Vec<(&'static str, f64)> {
        let streams = || reports.iter().flat_map(|report| &report.streams);
        let mut values = Vec::new();
        if self.flows() > 1 {
            let shares: Vec<f64> = streams().map(|flow| flow.received_bit_s).collect();
            values.extend(stats::jain(&shares).map(|index| (JAIN, index)));
        }
        if let [first, _, ..] = reports {
            let all: f64 = reports.iter().map(|report| report.received_bit_s).sum();
            values.push(("first_part_percent", first.received_bit_s / all * 100.0));
        }
        let again: u64 = reports.iter().filter_map(|report| report.retransmits).sum();
        values.push(("retransmits", again as f64));
        let rtts: Vec<f64> = streams().filter_map(|flow| flow.rtt_mean_us).collect();
        values.extend(stats::mean(&rtts).map(|rtt| ("tcp_rtt_mean_us", rtt)));
        values
    }

    /// Carousel's figure of this case.
    fn published(&self) -> Option<f64> {
        let one = [Group { cc: "cubic", flows: 1, receiver: 0 }];
        if self.limit_bit_s != plan::GBIT || self.groups != one {
            return None;
        }
        let rtt_us = self.rtts_us.first()?;
        let (_, shallow, deep) = PUBLISHED.iter().find(|(us, ..)| us == rtt_us)?;
        match self.depth {
            plan::MS_1 => Some(*shallow),
            plan::S_1 => Some(*deep),
            _ => None,
        }
    }

    /// What `tidegate burst size` says of these flows; none for those of more than one kind.
    fn law(&self, rate: Rate) -> Option<burst::Goodput> {
        let ([group], [rtt_us]) = (self.groups, self.rtts_us) else { return None };
        let cc = match group.cc {
            "reno" => CongestionControl::Reno,
            "cubic" => CongestionControl::Cubic,
            "bbr" => CongestionControl::Bbr,
            _ => return None,
        };
        let path = burst::Path {
            rate,
            rtt: Nanos(rtt_us * 1000),
            flows: group.flows,
            cc,
            interface: Rate::from_bit_s(INTERFACE_BIT_S)?,
            mtu: PACKET_BYTES,
        };
        let ip = self.depth.bytes(rate).0 * u64::from(PACKET_BYTES) / FRAME_BYTES;
        Some(burst::goodput(&path, Bytes(ip)))
    }
}

impl Group {
    fn start(
        &self,
        road: &Road,
        control: &Control,
        port: u16,
        duration: Duration,
    ) -> anyhow::Result<IperfRun> {
        let testbed = &road.testbed;
        let mut options = IperfOptions::tcp(testbed.addr(self.receiver, Family::V4), duration);
        options.port = port;
        options.parallel = self.flows;
        options.omit = OMITTED;
        options.load = Load::Tcp { cc: Some(control.name().to_owned()) };
        IperfRun::start(testbed.sender(), testbed.receiver(self.receiver), &options)
    }
}

fn figures(ctx: &mut Context) {
    let has = |row: &Row, key: &str, value: f64| {
        row.case.0.get(key).and_then(|said| said.as_f64()) == Some(value)
    };
    for (file, title, bucket_us) in [
        ("goodput-1ms", "One CUBIC flow at 1 Gbit/s, bucket of 1 ms, by round trip", 1e3),
        ("goodput-1s", "One CUBIC flow at 1 Gbit/s, bucket of 1 s, by round trip", 1e6),
    ] {
        let here = |row: &&Row| {
            has(row, "limit_bit_s", plan::GBIT as f64)
                && has(row, "bucket_us", bucket_us)
                && has(row, "flows", 1.0)
                && row.metric == GOODPUT
        };
        let rows: Vec<Row> = ctx.rows().iter().filter(here).cloned().collect();
        let what = BarsOf { title, metric: GOODPUT, points: None };
        if !rows.is_empty() {
            ctx.figure(file, Bars::from_rows(&rows, what));
        }
    }
    let rows: Vec<Row> = ctx.rows().iter().filter(|row| row.metric == JAIN).cloned().collect();
    if !rows.is_empty() {
        let title = "Jain's index of the flows that share a policer";
        ctx.figure("jain", Bars::from_rows(&rows, BarsOf { title, metric: JAIN, points: None }));
    }
}

#[cfg(test)]
mod tests;
