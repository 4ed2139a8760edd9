//! `nrm-egress`: the egress experiments of "BPF Host Network Resource Management": its figures
//! 3 to 6 and its tables 1 and 2, the row of 5 Gbit/s, and table 3: 1 Gbit/s over a round trip of 10 ms.
//!
//! The published system is there twice: `nrm-paper` as its program is printed, without the change that its
//! authors made to the kernel's probe timer and that never went upstream; and `nrm`, Tidegate's, where a
//! companion sets TCP's minimum retransmission time-out and delayed ACK instead. `nrm-kernel-timers` is `nrm`
//! without that companion's settings: what they are worth is the difference.

use std::{path::PathBuf, time::Duration};

use tidegate_core::Direction;

use super::{
    bed::{Bed, Control},
    case_in_words,
    mix::{Mix, Spell},
    published,
};
use crate::{
    chart::{Bars, BarsOf, Lines, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::{Case, Row},
    stats,
    systems::System,
};

const GBIT: u64 = 1_000_000_000;
/// `nrm` without the companion's settings of TCP's timers.
const KERNEL_TIMERS: &str = "nrm-kernel-timers";
/// The round trip of table 3.
const TABLE_3_RTT: Duration = Duration::from_millis(10);
/// What Tidegate asks of the small calls.
const SMALL_GAIN: f64 = 5.0;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct NrmEgress {
    /// For tests: one case, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl NrmEgress {
    /// One case of every system, a second long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> NrmEgress {
        NrmEgress { tiny: Some(lab_binary) }
    }

    fn plan(&self, quick: bool) -> Vec<Cell> {
        if self.tiny.is_some() {
            let cell =
                |rtt, systems| Cell { limit_bit_s: GBIT, flows: 2, cc: "cubic", rtt, systems };
            return vec![cell(None, CUBIC_ALL), cell(Some(TABLE_3_RTT), &PACE)];
        }
        let mut plan = Vec::new();
        let mut over = |rtt, limit_bit_s, cc, flows: &[usize], systems| {
            plan.extend(flows.iter().map(|&flows| Cell { limit_bit_s, flows, cc, rtt, systems }));
        };
        // One bed after the other.
        let far = match quick {
            true => vec![("cubic", &[9][..], LIMITED)],
            false => vec![
                ("cubic", &[1, 9][..], LIMITED),
                ("cubic+ecn", &[1, 9], ECN),
                ("dctcp", &[1, 9], ECN),
            ],
        };
        for (cc, flows, systems) in far {
            over(Some(TABLE_3_RTT), GBIT, cc, flows, systems);
        }
        let mut cells =
            |limit_bit_s, cc, flows, systems| over(None, limit_bit_s, cc, flows, systems);
        if quick {
            cells(GBIT, "cubic", &[2, 9], CUBIC_ALL);
            cells(GBIT, "dctcp", &[9], ECN);
            return plan;
        }
        cells(GBIT, "cubic", &[1, 2, 5, 9], CUBIC_ALL);
        cells(GBIT, "cubic+ecn", &[1, 2, 5, 9], ECN);
        cells(GBIT, "dctcp", &[1, 2, 5, 9], ECN);
        cells(5 * GBIT, "cubic", &[1, 9], CUBIC);
        cells(5 * GBIT, "dctcp", &[1, 9], ECN);
        plan
    }
}

/// A system as this experiment runs it.
type Entry = (&'static str, System);

const CUBIC_ALL: &[Entry] = &[
    ("unlimited", System::Unlimited),
    ("htb", System::Htb),
    ("tbf", System::Tbf),
    ("nrm-paper", System::NrmPaper),
    (KERNEL_TIMERS, System::Nrm),
    ("nrm", System::Nrm),
    ("pace", System::Pace),
];
const CUBIC: &[Entry] = &[
    ("unlimited", System::Unlimited),
    ("htb", System::Htb),
    ("nrm-paper", System::NrmPaper),
    ("nrm", System::Nrm),
    ("pace", System::Pace),
];
/// A qdisc of today marks nothing, so ECN makes no difference to it; the paper left it out too.
const ECN: &[Entry] =
    &[("nrm-paper", System::NrmPaper), ("nrm", System::Nrm), ("pace", System::Pace)];

/// Table 3 has no `unlimited` either.
const LIMITED: &[Entry] = CUBIC.split_at(1).1;
/// Enough to try a link.
const PACE: [Entry; 1] = [("pace", System::Pace)];

/// A case, and what runs in it.
#[derive(Debug, Clone, Copy)]
struct Cell {
    limit_bit_s: u64,
    flows: usize,
    cc: &'static str,
    /// Of a link of its own; none: the path is what the user wants.
    rtt: Option<Duration>,
    systems: &'static [Entry],
}

impl Experiment for NrmEgress {
    fn name(&self) -> &'static str {
        "nrm-egress"
    }

    fn summary(&self) -> &'static str {
        "Calls of 1 MB and 10 KB from a limited program: rate, round trip and tail latency beside HTB, TBF \
         and NRM as published"
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
            "`nrm-paper` is NRM as published, on a kernel without its authors' change to the probe \
             timer; the published figures beside it are with that change. `nrm-kernel-timers` is \
             `nrm` without the minimum retransmission time-out and delayed ACK that Tidegate sets \
             in its place. The qdiscs and `unlimited` were run with cubic alone: they mark \
             nothing.",
        );
        let mut over_time = Vec::new();
        for cells in self.plan(ctx.quick).chunk_by(|cell, next| cell.rtt == next.rtt) {
            let own = cells.first().and_then(|cell| cell.rtt).map(|rtt| ctx.link(rtt));
            let mut bed = Bed::new(self.tiny.clone(), own.or(ctx.usual_link()))?;
            for cell in cells {
                self.cell(ctx, &mut bed, *cell, spell, &mut over_time)?;
            }
        }
        figures(ctx, over_time);
        claims(ctx);
        Ok(())
    }
}

impl NrmEgress {
    fn cell(
        &self,
        ctx: &mut Context,
        bed: &mut Bed,
        cell: Cell,
        spell: Spell,
        over_time: &mut Vec<Series>,
    ) -> anyhow::Result<()> {
        let Cell { limit_bit_s, flows, cc, rtt, systems } = cell;
        let link = rtt.map(|rtt| ctx.link(rtt)).or(ctx.usual_link());
        let control = Control::get(cc)?;
        let names: Vec<&str> = systems.iter().map(|(name, _)| *name).collect();
        ctx.step(format!("{flows} flows of {cc}, {} Mbit/s", limit_bit_s / 1_000_000));
        ctx.alternate(&names, ctx.repeats, |ctx, name, run| {
            let entry = systems.iter().find(|(known, _)| known == name);
            let mix = Mix {
                system: entry.map_or(System::Unlimited, |(_, system)| *system),
                limit_bit_s,
                direction: Direction::Egress,
                flows,
                control: &control,
                kernel_timers: *name == KERNEL_TIMERS,
                link,
                spell,
            };
            let mixed = mix.run(ctx, bed)?;
            let figure = published::Figure { system: name, limit_bit_s, flows, cc, link };
            let published = |metric: &str| figure.egress(metric);
            mixed.record(ctx, name, &mix.case(), run, published);
            let shown = (limit_bit_s, cc, run) == (GBIT, "cubic", 1)
                && *name != "unlimited"
                && cell.rtt.is_none();
            // The largest number of flows stays.
            if shown {
                over_time.retain(|series: &Series| series.system != *name);
                let every = Duration::from_millis(100);
                let rates = mixed.wire.rates_bit_s(every);
                over_time.push(Series::every(*name, every.as_secs_f64(), &rates));
            }
            Ok(())
        })
    }
}

fn figures(ctx: &mut Context, over_time: Vec<Series>) {
    let of = |limit_bit_s: u64| move |row: &&Row| row.case.0["limit_bit_s"] == limit_bit_s;
    for (limit_bit_s, name) in [(GBIT, "1gbit"), (5 * GBIT, "5gbit")] {
        let rows: Vec<Row> = ctx.rows().iter().filter(of(limit_bit_s)).cloned().collect();
        if rows.is_empty() {
            continue;
        }
        let gbit = limit_bit_s / GBIT;
        for (file, title, metric, points) in [
            ("rate", "Rate of all flows, and the round trip", "goodput_bit_s", Some("rtt_p50_us")),
            (
                "calls",
                "Rate of 1 MB calls, and of 10 KB calls",
                "rpc_1mb_bit_s",
                Some("rpc_10kb_bit_s"),
            ),
            ("latency-1mb-p50", "Latency of 1 MB calls, median", "rpc_1mb_p50_us", None),
            ("latency-1mb-tail", "Latency of 1 MB calls, p99.9", "rpc_1mb_p99_9_us", None),
            ("latency-10kb-p50", "Latency of 10 KB calls, median", "rpc_10kb_p50_us", None),
            ("latency-10kb-tail", "Latency of 10 KB calls, p99.9", "rpc_10kb_p99_9_us", None),
        ] {
            let title = format!("{title}, limit {gbit} Gbit/s");
            let what = BarsOf { title: &title, metric, points };
            ctx.figure(&format!("{file}-{name}"), Bars::from_rows(&rows, what));
        }
    }
    let lines = Lines {
        title: "Rate on the wire in bins of 100 ms, the most flows of cubic".to_owned(),
        x: "time_s".to_owned(),
        y: "wire_bit_s".to_owned(),
        logarithmic: false,
        limit: Some(GBIT as f64),
        series: over_time,
    };
    ctx.figure("wire-over-time", lines);
}

fn claims(ctx: &mut Context) {
    let cases = crate::report::distinct(ctx.rows().iter().map(|row| row.case.clone()));
    for system in ["pace", "nrm"] {
        let mut ratios = Vec::new();
        let (mut said, mut far) = (Vec::new(), Vec::new());
        for case in &cases {
            let of = |system| ctx.median(system, "rpc_10kb_per_s", Some(case));
            let (Some(ours), Some(htb)) = (of(system), of("htb")) else { continue };
            let words = format!(
                "{:.1}x ({ours:.0}/s against {htb:.0}/s) in {}",
                ours / htb,
                case_in_words(case)
            );
            if case.0.contains_key("rtt_us") {
                far.push(words);
                continue;
            }
            ratios.push(ours / htb);
            said.push(words);
        }
        if !far.is_empty() {
            ctx.note(format!(
                "Over a link a call takes a round trip at least, whatever the limiter does, so those \
                 cases are not held to 5x. {system}: 10 KB calls get {} of their rate under htb.",
                far.join("; ")
            ));
        }
        if said.is_empty() {
            continue;
        }
        let holds = stats::range(&ratios).is_some_and(|(least, _)| least >= SMALL_GAIN);
        ctx.claim(
            format!(
                "{system}: where the path adds nothing, 10 KB calls beside 1 MB calls get at least 5x \
                 the rate that they get under htb"
            ),
            holds,
            said.join("; "),
        );
    }
    timers(ctx, &cases);
}

/// What the companion's settings of TCP's timers are worth, as the paper's tables 1 and 2 ask.
fn timers(ctx: &mut Context, cases: &[Case]) {
    let mut said = Vec::new();
    for case in cases {
        let of = |system, metric| ctx.median(system, metric, Some(case));
        let rate = (of(KERNEL_TIMERS, "goodput_bit_s"), of("nrm", "goodput_bit_s"));
        let tail = (of(KERNEL_TIMERS, "rpc_1mb_p99_9_us"), of("nrm", "rpc_1mb_p99_9_us"));
        let ((Some(rate_without), Some(rate)), (Some(tail_without), Some(tail))) = (rate, tail)
        else {
            continue;
        };
        said.push(format!(
            "{}: {:.0} to {:.0} Mbit/s, p99.9 of 1 MB calls {:.1} to {:.1} ms",
            case_in_words(case),
            rate_without / 1e6,
            rate / 1e6,
            tail_without / 1e3,
            tail / 1e3,
        ));
    }
    if !said.is_empty() {
        ctx.note(format!(
            "The effect of TCP's timers (nrm with the kernel's, then with the companion's 20 ms minimum \
             retransmission time-out and 5 ms delayed ACK): {}.",
            said.join("; ")
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plans_hold_what_the_paper_compares() {
        let full = NrmEgress::default().plan(false);
        for cc in ["cubic", "cubic+ecn", "dctcp"] {
            for flows in [1, 2, 5, 9] {
                let cell =
                    |cell: &&Cell| (cell.limit_bit_s, cell.cc, cell.flows) == (GBIT, cc, flows);
                assert!(full.iter().any(|c| cell(&c)), "{cc} {flows}");
            }
        }
        let runs: usize = full.iter().map(|cell| cell.systems.len()).sum();
        assert!(runs <= 90, "{runs} runs of 3 s each, twice, take too long");
    }
}
