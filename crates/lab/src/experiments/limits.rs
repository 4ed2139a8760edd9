//! `limits`: does a limit hold, and is it used? Every rate, number of flows and congestion control that
//! Tidegate claims, measured on the wire.
//!
//! iperf3 sends as much as it can (`bulk`). From bins of 10 ms on the wire come, as shares of the limit:
//!
//! - `used`: the mean from half a second after the first data, when all flows run, to the end;
//! - `max 1 s`, `max 100 ms`: the highest rate over any 1 s and any 100 ms, start and end included, the
//!   window moved in steps of 10 ms.
//!
//! The probe's datagrams pass the same limit; they are counted, and too few to matter.

mod claims;

use std::{path::PathBuf, time::Duration};

use super::{
    bed::{Bed, Control},
    bulk::{self, Bulk, TENTH},
    case_in_words,
};
use crate::{
    chart::{Bars, BarsOf, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Row,
    systems::System,
};

const MBIT: u64 = 1_000_000;
const GBIT: u64 = 1000 * MBIT;
const LIMITS: [u64; 4] = [10 * MBIT, 100 * MBIT, GBIT, 5 * GBIT];
const CONTROLS: [&str; 4] = ["reno", "cubic", "bbr", "dctcp"];
const SYSTEMS: &[System] = &[System::Pace, System::Nrm, System::Htb];

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Limits {
    /// For tests: one case, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

/// A case, and what runs in it.
#[derive(Debug, Clone, Copy)]
struct Cell {
    limit_bit_s: u64,
    flows: u32,
    cc: &'static str,
    systems: &'static [System],
}

impl Limits {
    /// One case of every system, seconds long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> Limits {
        Limits { tiny: Some(lab_binary) }
    }

    fn plan(&self, quick: bool) -> Vec<Cell> {
        let cell = |limit_bit_s, flows, cc, systems| Cell { limit_bit_s, flows, cc, systems };
        if self.tiny.is_some() {
            return vec![cell(GBIT, 9, "cubic", SYSTEMS)];
        }
        if quick {
            return vec![
                cell(10 * MBIT, 9, "cubic", &[System::Pace]),
                cell(100 * MBIT, 1, "cubic", &[System::Pace]),
                cell(GBIT, 9, "cubic", SYSTEMS),
                cell(GBIT, 1, "bbr", &[System::Pace, System::Nrm]),
                cell(5 * GBIT, 9, "cubic", &[System::Pace]),
            ];
        }
        let mut plan = Vec::new();
        for limit_bit_s in LIMITS {
            for flows in [1, 9] {
                plan.extend(CONTROLS.iter().map(|cc| cell(limit_bit_s, flows, cc, SYSTEMS)));
            }
        }
        plan
    }
}

impl Experiment for Limits {
    fn name(&self) -> &'static str {
        "limits"
    }

    fn summary(&self) -> &'static str {
        "Limits of 10 Mbit/s to 5 Gbit/s under 1 and 9 flows of four congestion controls: how much \
         of them is used, and by how much they are passed"
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, _quick: bool) -> u32 {
        1
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let mut bed = Bed::new(self.tiny.clone(), ctx.usual_link())?;
        let seconds = if self.tiny.is_some() { 1 } else { 3 };
        bed.idle(ctx, Duration::from_secs(seconds))?;
        ctx.note(
            "Shares are of the limit, on the wire, whole frames counted. `used` is the mean from \
             half a second after the first data to the end; `max 1 s` and `max 100 ms` are the \
             highest over any such time, the window moved in steps of 10 ms; `max 100 ms at` is \
             when that time began, after the first data. Round trips are those of the probes that \
             came back. `idle` is the path without load and without a limit.",
        );
        let mut over_time = Vec::new();
        for cell in self.plan(ctx.quick) {
            let control = Control::get(cell.cc)?;
            let case = ctx
                .case()
                .with("limit_bit_s", cell.limit_bit_s)
                .with("flows", cell.flows)
                .with("cc", cell.cc);
            ctx.step(case_in_words(&case));
            ctx.alternate(cell.systems, ctx.repeats, |ctx, system, run| {
                let bulk = Bulk {
                    system: *system,
                    limit_bit_s: cell.limit_bit_s,
                    flows: cell.flows,
                    control: &control,
                    duration: Duration::from_secs(seconds),
                    probe_hz: Some(probe_rate_hz(cell.limit_bit_s)),
                };
                let transferred = bulk.run(ctx, &mut bed)?;
                let mut record = ctx.record(system, &case, run);
                for (metric, value) in transferred.values() {
                    record = record.value(metric, value);
                }
                let rates = transferred.wire.rates_bit_s(TENTH);
                if (cell.limit_bit_s, cell.flows, cell.cc, run) == (GBIT, 9, "cubic", 1) {
                    over_time.push(Series::every(system.name(), TENTH.as_secs_f64(), &rates));
                }
                Ok(())
            })?;
        }
        figures(ctx, over_time);
        claims::record(ctx);
        Ok(())
    }
}

/// 500 a second, but no more than half a percent of the limit: a probe is 106 bytes on the wire.
fn probe_rate_hz(limit_bit_s: u64) -> u64 {
    (limit_bit_s / 200 / (106 * 8)).clamp(20, 500)
}

fn figures(ctx: &mut Context, over_time: Vec<Series>) {
    for (file, title, metric) in [
        ("used", "Share of the limit that is used, from half a second on", "used_percent"),
        ("max-100ms", "Highest share of the limit over any 100 ms", "max_100ms_percent"),
    ] {
        for flows in [1, 9] {
            let here = |row: &&Row| row.case.0.get("flows").is_some_and(|value| *value == flows);
            let rows: Vec<Row> = ctx.rows().iter().filter(here).cloned().collect();
            let s = if flows == 1 { "" } else { "s" };
            let title = format!("{title}, {flows} flow{s}");
            let what = BarsOf { title: &title, metric, points: None };
            if rows.iter().any(|row| row.metric == metric) {
                ctx.figure(&format!("{file}-{flows}"), Bars::from_rows(&rows, what));
            }
        }
    }
    let at_1_gbit = |row: &&Row| row.case.0.get("limit_bit_s").is_some_and(|limit| *limit == GBIT);
    let rows: Vec<Row> = ctx.rows().iter().filter(at_1_gbit).cloned().collect();
    let title = "Round trip of the probe inside a limit of 1 Gbit/s, 99th percentile";
    let what = BarsOf { title, metric: "rtt_p99_us", points: None };
    ctx.figure("rtt-1gbit", Bars::from_rows(&rows, what));
    bulk::over_time(ctx, "Rate on the wire in bins of 100 ms, 9 flows of cubic", GBIT, over_time);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_plan_is_the_claim() {
        let plan = Limits::default().plan(false);
        assert_eq!(plan.len(), 4 * 2 * 4);
        let quick = Limits::default().plan(true);
        for limit in LIMITS {
            assert!(quick.iter().any(|cell| cell.limit_bit_s == limit), "{limit}");
        }
    }

    #[test]
    fn a_probe_stays_small() {
        assert_eq!(probe_rate_hz(10 * MBIT), 58);
        assert_eq!(probe_rate_hz(GBIT), 500);
        assert_eq!(probe_rate_hz(1000), 20);
    }
}
