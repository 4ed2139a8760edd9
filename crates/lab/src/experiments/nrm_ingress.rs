//! `nrm-ingress`: the table of ingress rates of "BPF Host Network Resource Management": what a
//! program receives is limited where it is received, and the sender is elsewhere.
//!
//! The limit of the paper marks packets with ECN or drops them; it cannot tell the sender's TCP anything
//! else (`pace` can: `pace-ingress`). So the paper measured DCTCP alone; here CUBIC is there too, with ECN
//! and without. The rate on the wire is read before the limit: what it has above the goodput and its headers
//! was sent in vain.
//!
//! Over a round trip of 10 ms, as in its table 3 of egress, the paper has no figures of ingress.
//!
//! No tool of today shapes what arrives. TBF at the sender's end of the cable, which a receiver does not
//! have, stands for the ideal.

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
/// A path that is not short.
const RTT: Duration = Duration::from_millis(10);
/// What we ask of ourselves, in percent of the limit; the paper's table comes to 92 % to 98 %.
const SHARE_LEAST: f64 = 97.0;
const SHARE_MOST: f64 = 101.0;
/// Bytes on the wire for a byte of payload: a full TCP segment with timestamps over IPv4 on Ethernet.
const FRAME_PER_PAYLOAD: f64 = 1514.0 / 1448.0;

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
    /// Of a link of its own; none: the path is what the user wants.
    rtt: Option<Duration>,
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
            return vec![Cell {
                limit_bit_s: GBIT,
                flows: 2,
                cc: "dctcp",
                rtt: None,
                systems: ALL,
            }];
        }
        let mut plan = Vec::new();
        let mut over = |rtt, limit_bit_s, cc, flows: &[usize], systems| {
            plan.extend(flows.iter().map(|&flows| Cell { limit_bit_s, flows, cc, rtt, systems }));
        };
        // One bed after the other.
        for flows in if quick { &[9][..] } else { &[1, 9] } {
            over(Some(RTT), GBIT, "dctcp", &[*flows], if quick { QUICK } else { ALL });
        }
        let mut cells =
            |limit_bit_s, cc, flows, systems| over(None, limit_bit_s, cc, flows, systems);
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
        "Calls of 1 MB and 10 KB to a program whose ingress is limited: rate, retransmissions and \
         tail latency"
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 2 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let spell = Spell::new(self.tiny.is_some(), ctx.quick);
        ctx.note(
            "The rate on the wire is read before the limit, so it holds what the limit dropped. \
             `tbf` stands on the sender's device, where a receiver could not put it: it is the \
             ideal. `pace` tells a sender on another host its share by the receive window.",
        );
        for cells in self.plan(ctx.quick).chunk_by(|cell, next| cell.rtt == next.rtt) {
            let own = cells.first().and_then(|cell| cell.rtt).map(|rtt| ctx.link(rtt));
            let mut bed = Bed::new(self.tiny.clone(), own.or(ctx.usual_link()))?;
            for cell in cells {
                cell.measure(ctx, &mut bed, spell)?;
            }
        }
        figures(ctx);
        claims(ctx);
        Ok(())
    }
}

impl Cell {
    fn measure(&self, ctx: &mut Context, bed: &mut Bed, spell: Spell) -> anyhow::Result<()> {
        let &Cell { limit_bit_s, flows, cc, rtt, systems } = self;
        let link = rtt.map(|rtt| ctx.link(rtt)).or(ctx.usual_link());
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
                link,
                spell,
            };
            let mixed = mix.run(ctx, bed)?;
            let figure = published::Figure { system: system.name(), limit_bit_s, flows, cc, link };
            let published = |metric: &str| figure.ingress(metric);
            mixed.record(ctx, system.name(), &mix.case(), run, published);
            Ok(())
        })
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
            ("rate", "Rate received, and the round trip", "goodput_bit_s", Some("rtt_p50_us")),
            ("latency-1mb-p50", "Latency of 1 MB calls, median", "rpc_1mb_p50_us", None),
            ("latency-1mb-tail", "Latency of 1 MB calls, p99.9", "rpc_1mb_p99_9_us", None),
            ("latency-10kb-p50", "Latency of 10 KB calls, median", "rpc_10kb_p50_us", None),
            ("latency-10kb-tail", "Latency of 10 KB calls, p99.9", "rpc_10kb_p99_9_us", None),
        ] {
            let title = format!("{title}, ingress limit {gbit} Gbit/s");
            let what = BarsOf { title: &title, metric, points };
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
            let share = |system| {
                let goodput = ctx.median(system, "goodput_bit_s", Some(case))?;
                Some(goodput * FRAME_PER_PAYLOAD / limit * 100.0)
            };
            let Some(ours) = share("pace") else { continue };
            holds &= (SHARE_LEAST..=SHARE_MOST).contains(&ours);
            let paper = share("nrm-paper").map(|paper| format!(" (nrm-paper {paper:.1} %)"));
            let case = case_in_words(case);
            said.push(format!("{ours:.1} % with {case}{}", paper.unwrap_or_default()));
        }
        if !said.is_empty() {
            let claim = format!(
                "pace, ingress, {cc}: {SHARE_LEAST} % to {SHARE_MOST} % of the limit received, \
                 headers counted"
            );
            ctx.claim(claim, holds, said.join("; "));
        }
    }
}
