//! `pace-ingress`: the receive window as a limiter of what arrives, without ECN and with senders that know
//! nothing of it.
//!
//! iperf3 sends as much as CUBIC without ECN lets it: a sender that can only be told by loss, or by the
//! window. The rate on the wire is read before the limit, so it holds what the limit dropped; the loss is
//! what the sender sent again, as a share of the frames on the wire from beginning to end.
//!
//! HTB and TBF stand on the sender's device, where a receiver could not put them: they queue, and are the
//! ideal. A share of less than two segments a round trip is marked in the claims: no window can say it.

use std::{path::PathBuf, time::Duration};

use super::{
    bed::{Bed, Control},
    case_in_words,
};
use crate::{
    chart::{Bars, BarsOf},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::{Case, Row, distinct},
    stats,
    systems::{LimitCase, System},
    testbed::wait::pass_time,
    tools::{
        iperf::{IperfOptions, IperfRun, Load},
        probe,
    },
};

const MBIT: u64 = 1_000_000;
const GBIT: u64 = 1000 * MBIT;
const CC: &str = "cubic";
/// What we ask of ourselves: percent of the limit on the wire, and of the frames sent again.
const SHARE_LEAST: f64 = 97.0;
const SHARE_MOST: f64 = 101.0;
const LOSS_MOST: f64 = 0.01;
/// A full frame, and the least window in payload.
const FRAME_BITS: f64 = 8.0 * 1514.0;
const LEAST_WINDOW_BITS: f64 = 8.0 * 2.0 * 1448.0;
/// The flows run before they are measured: slow start takes some round trips.
const SETTLED: Duration = Duration::from_secs(1);
const TENTH: Duration = Duration::from_millis(100);
const PROBE_PORT: u16 = 7001;
/// A veth pair of one machine, as `limits` measures it idle.
const SHORT_PATH: Duration = Duration::from_micros(20);

/// See the [module](self).
#[derive(Debug, Default)]
pub struct PaceIngress {
    /// For tests: one case, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

/// A case, and what runs in it.
#[derive(Debug, Clone, Copy)]
struct Cell {
    limit_bit_s: u64,
    flows: u32,
    /// Of a link of its own; none: the path is what the user wants.
    rtt: Option<Duration>,
    systems: &'static [System],
}

const ALL: &[System] = &[System::Htb, System::Tbf, System::NrmPaper, System::Nrm, System::Pace];
const QUICK: &[System] = &[System::NrmPaper, System::Pace];

impl PaceIngress {
    /// One case of every system, seconds long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> PaceIngress {
        PaceIngress { tiny: Some(lab_binary) }
    }

    /// One bed after the other.
    fn plan(&self, quick: bool) -> Vec<Cell> {
        if self.tiny.is_some() {
            return vec![Cell { limit_bit_s: GBIT, flows: 2, rtt: None, systems: ALL }];
        }
        let far = |us| Some(Duration::from_micros(us));
        let rtts = [far(40_000), far(10_000), far(1000), far(250), None];
        let mut plan = Vec::new();
        for rtt in rtts {
            for limit_bit_s in [100 * MBIT, GBIT] {
                for flows in [1, 2, 5, 9] {
                    let systems = if quick { QUICK } else { ALL };
                    plan.push(Cell { limit_bit_s, flows, rtt, systems });
                }
            }
        }
        if quick {
            plan.retain(|cell| {
                let ends = matches!(cell.flows, 1 | 9) && cell.limit_bit_s == GBIT;
                ends && cell.rtt != rtts[0] || (cell.flows, cell.rtt) == (9, rtts[1])
            });
        }
        plan
    }
}

impl Experiment for PaceIngress {
    fn name(&self) -> &'static str {
        "pace-ingress"
    }

    fn summary(&self) -> &'static str {
        "Ingress limits under CUBIC senders without ECN, over paths of microseconds to 40 ms: how much of \
         them is used, and what is lost"
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, _quick: bool) -> u32 {
        1
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let seconds = if self.tiny.is_some() { 2 } else { 4 };
        ctx.note(
            "`used` is the mean rate on the wire before the limit, from a second after the first data to \
             the end, of the limit; `max 100 ms` the highest over any 100 ms. `lost` is the share of \
             frames that were sent again. `htb` and `tbf` stand on the sender's device, where a receiver \
             could not put them.",
        );
        for cells in self.plan(ctx.quick).chunk_by(|cell, next| cell.rtt == next.rtt) {
            let own = cells.first().and_then(|cell| cell.rtt).map(|rtt| ctx.link(rtt));
            let mut bed = Bed::new(self.tiny.clone(), own.or(ctx.usual_link()))?;
            for cell in cells {
                cell.measure(ctx, &mut bed, Duration::from_secs(seconds))?;
            }
        }
        figures(ctx);
        claims(ctx);
        Ok(())
    }
}

impl Cell {
    fn measure(&self, ctx: &mut Context, bed: &mut Bed, duration: Duration) -> anyhow::Result<()> {
        let &Cell { limit_bit_s, flows, rtt, systems } = self;
        let control = Control::get(CC)?;
        let case = Case::new()
            .with("limit_bit_s", limit_bit_s)
            .with("flows", flows)
            .with("cc", control.label)
            .with_link(rtt.map(|rtt| ctx.link(rtt)).or(ctx.usual_link()));
        ctx.step(case_in_words(&case));
        ctx.alternate(systems, ctx.repeats, |ctx, &system, run| {
            bed.set_ecn(control.ecn)?;
            let applied = system.apply(ctx, &bed.testbed, &LimitCase::ingress(limit_bit_s))?;
            bed.start_meter()?;
            let testbed = &bed.testbed;
            let (from, to) = (testbed.sender(), applied.site(testbed.receiver(0)));
            let probe_server = probe::start_server(testbed, to, bed.at(PROBE_PORT))?;
            let mut options = IperfOptions::tcp(bed.at(0).ip(), duration);
            options.parallel = flows;
            options.load = Load::Tcp { cc: Some(control.name().to_owned()) };
            let iperf = IperfRun::start(from, to, &options)?;
            pass_time(SETTLED)?;
            let mut probes = probe::ClientArgs::new(bed.at(PROBE_PORT), duration - SETTLED);
            probes.rate_hz = 50;
            probes.may_lose_all = true;
            let prober = probe::start_client(testbed, from, probes)?;
            let report = iperf.finish()?;
            let probe = probe::finish_client(prober, probes)?;
            // It is in the limit's cgroup, which goes next.
            drop(probe_server);
            let wire = bed.wire()?;
            let counters = applied.finish()?;

            let percent = |bit_s: f64| bit_s / limit_bit_s as f64 * 100.0;
            let shares: Vec<f64> = report.streams.iter().map(|flow| flow.received_bit_s).collect();
            let mut values = vec![("goodput_bit_s", report.received_bit_s)];
            values.extend(wire.mean_bit_s(SETTLED, duration).map(|r| ("used_percent", percent(r))));
            values.extend(wire.peak(TENTH).map(|peak| ("max_100ms_percent", percent(peak.bit_s))));
            if let (Some(again), Some(bit_s)) =
                (report.retransmits, wire.mean_bit_s(Duration::ZERO, duration))
            {
                let frames = bit_s * duration.as_secs_f64() / FRAME_BITS;
                values.push(("retransmits", again as f64));
                values.push(("lost_percent", again as f64 / frames * 100.0));
            }
            values.extend(stats::jain(&shares).map(|index| ("jain_index", index)));
            values.extend(counters.map(|counters| ("drops", counters.dropped as f64)));
            if probe.received > 0 {
                values.extend([("rtt_p50_us", probe.rtt.p50_us), ("rtt_p99_us", probe.rtt.p99_us)]);
            }
            let mut record = ctx.record(system, &case, run);
            for (metric, value) in values {
                record = record.value(metric, value);
            }
            Ok(())
        })
    }
}

fn figures(ctx: &mut Context) {
    let flows_of = |row: &Row| row.case.0.get("flows").and_then(|flows| flows.as_u64());
    for flows in distinct(ctx.rows().iter().filter_map(flows_of)) {
        let here = |row: &&Row| flows_of(row) == Some(flows);
        let rows: Vec<Row> = ctx.rows().iter().filter(here).cloned().collect();
        let s = if flows == 1 { "" } else { "s" };
        for (file, title, metric) in [
            ("used", "Share of the ingress limit on the wire", "used_percent"),
            ("lost", "Share of the frames sent again", "lost_percent"),
        ] {
            let title = format!("{title}, {flows} flow{s} of CUBIC without ECN");
            let what = BarsOf { title: &title, metric, points: None };
            if rows.iter().any(|row| row.metric == metric) {
                ctx.figure(&format!("{file}-{flows}"), Bars::from_rows(&rows, what));
            }
        }
    }
}

/// One claim a case.
fn claims(ctx: &mut Context) {
    let cases: Vec<Case> = distinct(ctx.rows().iter().map(|row| row.case.clone()));
    for case in cases {
        let of = |system, metric| ctx.median(system, metric, Some(&case));
        let both = |system| Some((of(system, "used_percent")?, of(system, "lost_percent")?));
        let words = |(used, lost)| format!("{used:.1} % used, {lost:.3} % lost");
        let Some((used, lost)) = both("pace") else { continue };
        let mut measured = words((used, lost));
        for peer in ["nrm-paper", "nrm", "tbf"] {
            if let Some(both) = both(peer) {
                measured += &format!("; {peer}: {}", words(both));
            }
        }
        let number = |key: &str| case.0.get(key).and_then(|value| value.as_f64());
        let rtt_s = number("rtt_us").map_or(SHORT_PATH.as_secs_f64(), |us| us / 1e6);
        let share_bits =
            number("limit_bit_s").unwrap_or(0.0) / number("flows").unwrap_or(1.0) * rtt_s;
        let short = if share_bits < LEAST_WINDOW_BITS { " (share below two segments)" } else { "" };
        let holds = (SHARE_LEAST..=SHARE_MOST).contains(&used) && lost < LOSS_MOST;
        let claim = format!(
            "pace, ingress, {}{short}: {SHARE_LEAST} % to {SHARE_MOST} % of the limit used, less than \
             {LOSS_MOST} % lost",
            case_in_words(&case)
        );
        ctx.claim(claim, holds, measured);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So that figures of both compare.
    #[test]
    fn the_quick_plan_is_a_part_of_the_full_one() {
        let [quick, full] = [true, false].map(|quick| PaceIngress::default().plan(quick));
        let same = |cell: &Cell, of: &Cell| {
            (cell.limit_bit_s, cell.flows, cell.rtt) == (of.limit_bit_s, of.flows, of.rtt)
                && cell.systems.iter().all(|system| of.systems.contains(system))
        };
        assert!(quick.len() < full.len());
        for cell in &quick {
            assert!(full.iter().any(|of| same(cell, of)), "{cell:?}");
        }
    }

    /// A bed is made for a run of cells with the same path: none is made twice.
    #[test]
    fn cells_with_the_same_path_follow_each_other() {
        for quick in [true, false] {
            let plan = PaceIngress::default().plan(quick);
            let beds = plan.chunk_by(|cell, next| cell.rtt == next.rtt).count();
            assert_eq!(beds, distinct(plan.iter().map(|cell| cell.rtt)).len());
        }
    }
}
