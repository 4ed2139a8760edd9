//! `nrm-ingress`: the table of ingress rates of "BPF Host Network Resource Management" (seed 004): what a
//! program receives is limited where it is received, and the sender is elsewhere.
//!
//! The limit marks packets with ECN or drops them; it cannot tell the sender's TCP anything else. So the paper
//! measured DCTCP alone; here CUBIC is there too, with ECN and without. The rate on the wire is read
//! before the limit: what it has above the goodput and its headers was sent in vain.
//!
//! No tool of today shapes what arrives. TBF at the sender's end of the cable, which a receiver does not have,
//! stands for the ideal.

use std::{path::PathBuf, time::Duration};

use tidegate_core::Direction;

use super::{
    bed::{Bed, Control},
    case_in_words,
    mix::{Mix, Spell},
    published,
};
use crate::{
    chart::{Bars, BarsOf},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::{Case, Row, distinct},
    systems::System,
};

const GBIT: u64 = 1_000_000_000;
/// What the paper reached of 5 Gbit/s is 92 %; what we ask of ourselves.
const SHARE: f64 = 0.97;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct NrmIngress {
    /// For tests: one case, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

/// A case, and what runs in it.
#[derive(Debug, Clone, Copy)]
struct Cell {
    limit_bit_s: u64,
    flows: usize,
    cc: &'static str,
    systems: &'static [System],
}

const ALL: &[System] = &[System::Tbf, System::NrmPaper, System::Nrm, System::Pace];
const OURS: &[System] = &[System::NrmPaper, System::Nrm, System::Pace];
const QUICK: &[System] = &[System::NrmPaper, System::Pace];

impl NrmIngress {
    /// One case of every system, a second long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> NrmIngress {
        NrmIngress { tiny: Some(lab_binary) }
    }

    fn plan(&self, quick: bool) -> Vec<Cell> {
        if self.tiny.is_some() {
            return vec![Cell { limit_bit_s: GBIT, flows: 2, cc: "dctcp", systems: ALL }];
        }
        let mut plan = Vec::new();
        let mut cells = |limit_bit_s, cc, flows: &[usize], systems| {
            plan.extend(flows.iter().map(|&flows| Cell { limit_bit_s, flows, cc, systems }));
        };
        if quick {
            cells(GBIT, "dctcp", &[1, 9], ALL);
            cells(GBIT, "cubic+ecn", &[9], QUICK);
            cells(GBIT, "cubic", &[9], QUICK);
            cells(5 * GBIT, "dctcp", &[9], OURS);
            return plan;
        }
        cells(GBIT, "dctcp", &[1, 2, 5, 9], ALL);
        cells(5 * GBIT, "dctcp", &[1, 2, 5, 9], ALL);
        cells(GBIT, "cubic+ecn", &[1, 9], OURS);
        cells(5 * GBIT, "cubic+ecn", &[1, 9], OURS);
        cells(GBIT, "cubic", &[1, 9], OURS);
        cells(5 * GBIT, "cubic", &[1, 9], OURS);
        plan
    }
}

impl Experiment for NrmIngress {
    fn name(&self) -> &'static str {
        "nrm-ingress"
    }

    fn summary(&self) -> &'static str {
        "Calls of 1 MB and 10 KB to a program whose ingress is limited: rate, retransmissions and tail latency"
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 2 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let mut bed = Bed::new(self.tiny.clone())?;
        let (warmup_ms, measured_ms) = match (&self.tiny, ctx.quick) {
            (Some(_), _) => (100, 300),
            (None, true) => (300, 1700),
            (None, false) => (500, 2500),
        };
        let spell = Spell {
            warmup: Duration::from_millis(warmup_ms),
            measured: Duration::from_millis(measured_ms),
        };
        for Cell { limit_bit_s, flows, cc, systems } in self.plan(ctx.quick) {
            let control = Control::get(cc)?;
            ctx.step(format!("{flows} flows of {cc}, {} Mbit/s", limit_bit_s / 1_000_000));
            ctx.alternate(systems, ctx.repeats, |ctx, &system, run| {
                let mix = Mix {
                    system,
                    limit_bit_s,
                    direction: Direction::Ingress,
                    flows,
                    control: &control,
                    kernel_timers: false,
                    spell,
                };
                let mixed = mix.run(ctx, &mut bed)?;
                let published = |metric: &str| {
                    published::ingress(system.name(), limit_bit_s, flows, cc, metric)
                };
                mixed.record(ctx, system.name(), &mix.case(), run, published);
                Ok(())
            })?;
        }
        figures(ctx);
        claims(ctx);
        Ok(())
    }
}

fn figures(ctx: &mut Context) {
    for (limit_bit_s, name) in [(GBIT, "1gbit"), (5 * GBIT, "5gbit")] {
        let here = |row: &&Row| row.case.0["limit_bit_s"] == limit_bit_s;
        let rows: Vec<Row> = ctx.rows().iter().filter(here).cloned().collect();
        if rows.is_empty() {
            continue;
        }
        let gbit = limit_bit_s / GBIT;
        for (file, title, metric, points) in [
            ("rate", "Rate received, and the round trip", "goodput_bit_s", "rtt_p50_us"),
            ("latency-1mb", "Latency of 1 MB calls", "rpc_1mb_p99_9_us", "rpc_1mb_p50_us"),
            ("latency-10kb", "Latency of 10 KB calls", "rpc_10kb_p99_9_us", "rpc_10kb_p50_us"),
        ] {
            let title = format!("{title}, ingress limit {gbit} Gbit/s");
            let what = BarsOf { title: &title, metric, points: Some(points) };
            ctx.figure(&format!("{file}-{name}"), Bars::from_rows(&rows, what));
        }
    }
}

/// One claim a congestion control: they are told in different ways.
fn claims(ctx: &mut Context) {
    let cases: Vec<Case> = distinct(ctx.rows().iter().map(|row| row.case.clone()));
    for cc in ["dctcp", "cubic+ecn", "cubic"] {
        let mut said = Vec::new();
        let mut holds = true;
        for case in cases.iter().filter(|case| case.0["cc"] == cc) {
            let Some(limit) = case.0["limit_bit_s"].as_f64() else { continue };
            let Some(goodput) = ctx.median("pace", "goodput_bit_s", Some(case)) else { continue };
            let share = goodput * super::FRAME_PER_PAYLOAD / limit;
            holds &= share >= SHARE && share <= 1.01;
            said.push(format!("{:.1} % with {}", share * 100.0, case_in_words(case)));
        }
        if !said.is_empty() {
            ctx.claim(
                format!("ingress, {cc}: 97 % to 101 % of the limit are received, headers counted"),
                holds,
                said.join("; "),
            );
        }
    }
}
