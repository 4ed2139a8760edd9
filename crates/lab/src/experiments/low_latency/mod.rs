//! `low-latency`: how long a guest's packets wait in a limiter, and how much of the rate its TCP gets. He et
//! al. (APNet 2017), sections 3 and 4: HTB, HTB that marks under DCTCP, DEM, SPRING.
//!
//! Limits of 1 and 2 Gbit/s on a guest's port (`shapers`), 1 to 16 flows, on the path of
//! the
//! machine and on links of 0.1 to 10 ms. The systems run in turn, after each round's look at the path without
//! limit and load, so that they are compared in the same mood of the machine. The probe is open loop and
//! passes
//! the same port.

mod claims;
mod plan;

use std::{path::PathBuf, time::Duration};

use super::{
    bed::Control,
    case_in_words,
    guest::{P50, Rounds, TENTH, Transfer, VARIATION, WIRE},
    policers::Road,
    shapers::Shaper,
};
use crate::{
    chart::{BarsOf, Cdf, Lines, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    stop::Skip,
};
use plan::{Cell, Turn, plan};

/// See the [module](self).
#[derive(Debug, Default)]
pub struct LowLatency {
    /// For tests: one case, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl LowLatency {
    /// One case under every system, seconds long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> LowLatency {
        LowLatency { tiny: Some(lab_binary) }
    }
}

impl Experiment for LowLatency {
    fn name(&self) -> &'static str {
        "low-latency"
    }

    fn summary(&self) -> &'static str {
        "How long a guest's packets wait in HTB, in HTB that marks under DCTCP, in dem and spring at 1 and \
         2 Gbit/s, and how much of the rate TCP gets, how evenly, over paths of microseconds to 10 ms"
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 3 } else { 1 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let seconds = match (&self.tiny, ctx.quick) {
            (Some(_), _) => 2,
            (None, true) => 3,
            (None, false) => 5,
        };
        ctx.note(
            "`wire` is the mean on the wire behind the limit from one second after the first data on, whole \
             frames counted, and `variation` the standard deviation of its tenths of a second, of the mean. \
             Published are goodputs: of 1 Gbit/s on the wire TCP has at most 956 Mbit/s. `above idle p50` is \
             how much longer the median round trip of the probe is than on the path without limit and load, \
             in the same round. `htb` has the queue of 1000 packets that `tc` gives it, `htb-ecn` marks from \
             60 KB on.",
        );
        // What this kernel has not is said once.
        let (mut curves, mut absent) = (Curves::default(), Vec::new());
        for cells in
            plan(self.tiny.is_some(), ctx.quick).chunk_by(|cell, next| cell.rtt == next.rtt)
        {
            let own = cells.first().and_then(|cell| cell.rtt).map(|rtt| ctx.link(rtt));
            let links = own.or(ctx.usual_link()).into_iter().collect();
            let mut road = Road::new(self.tiny.clone(), links)?;
            // A guest gives its host segments of up to 64 KB.
            road.cut(false)?;
            for cell in cells {
                cell.measure(
                    ctx,
                    &mut road,
                    Duration::from_secs(seconds),
                    &mut curves,
                    &mut absent,
                )?;
            }
        }
        curves.figures(ctx);
        for (file, title, metric, points) in [
            (
                "wire-and-rtt",
                "On the wire (bars) and median round trip (diamonds)",
                WIRE,
                Some(P50),
            ),
            ("variation", "Variation of the rate over 100 ms", VARIATION, None),
        ] {
            ctx.bars(file, BarsOf { title, metric, points });
        }
        claims::record(ctx);
        Ok(())
    }
}

impl Cell {
    fn case(&self, ctx: &Context, turn: &Turn) -> Case {
        let case = Case::new().with("limit_bit_s", self.limit_bit_s).with("flows", self.flows);
        let case = if turn.shaper == Shaper::Idle { case } else { case.with("cc", turn.cc) };
        case.with_link(self.rtt.map(|rtt| ctx.link(rtt)).or(ctx.usual_link()))
    }

    fn measure(
        &self,
        ctx: &mut Context,
        road: &mut Road,
        duration: Duration,
        curves: &mut Curves,
        absent: &mut Vec<Shaper>,
    ) -> anyhow::Result<()> {
        if let Some(first) = self.turns.first() {
            ctx.step(case_in_words(&self.case(ctx, first)));
        }
        let turns: Vec<Turn> =
            self.turns.iter().copied().filter(|turn| !absent.contains(&turn.shaper)).collect();
        let mut rounds = Rounds::new(self.rtt.is_some() || ctx.usual_link().is_some());
        ctx.alternate(&turns, ctx.repeats, |ctx, turn, run| {
            let control = Control::get(turn.cc)?;
            let (shaper, limit_bit_s, flows) = (turn.shaper, self.limit_bit_s, self.flows);
            let transfer = Transfer { shaper, limit_bit_s, flows, control: &control, duration };
            let case = self.case(ctx, turn);
            let seen = rounds.run(ctx, road, &transfer, &case, run).inspect_err(|error| {
                absent.extend(error.is::<Skip>().then_some(shaper));
            })?;
            if run == 1 && self.rtt.is_none() {
                let tenths = seen.wire.rates_bit_s(TENTH);
                curves.add(&case, turn, seen.probe.rtt_cdf_us, &tenths);
            }
            Ok(())
        })
    }
}

/// What the first runs were like, for the figures.
#[derive(Default)]
struct Curves(Vec<Curve>);

struct Curve {
    limit_bit_s: Option<u64>,
    /// What the figure is of, beside the limit.
    case: Case,
    system: String,
    cdf: Vec<(f64, f64)>,
    tenths: Vec<f64>,
}

impl Curves {
    fn add(&mut self, case: &Case, turn: &Turn, cdf: Vec<(f64, f64)>, tenths: &[f64]) {
        let mut of = case.clone();
        of.0.remove("cc");
        let limit_bit_s = case.0.get("limit_bit_s").and_then(|limit| limit.as_u64());
        let system = turn.to_string();
        self.0.push(Curve { limit_bit_s, case: of, system, cdf, tenths: tenths.to_vec() });
    }

    /// Of each case the round trips, and the rate over time.
    fn figures(self, ctx: &mut Context) {
        for (at, curves) in self.0.chunk_by(|curve, next| curve.case == next.case).enumerate() {
            let Some(first) = curves.first() else { continue };
            let words = case_in_words(&first.case);
            let cdf =
                curves.iter().map(|curve| Series::new(curve.system.as_str(), curve.cdf.clone()));
            ctx.figure(
                &format!("rtt-{}", at + 1),
                Cdf {
                    title: format!("Round trips, {words}"),
                    metric: "rtt_us".to_owned(),
                    series: cdf.collect(),
                },
            );
            let loaded = curves.iter().filter(|curve| !curve.tenths.is_empty());
            let series = loaded.map(|curve| {
                Series::every(curve.system.as_str(), TENTH.as_secs_f64(), &curve.tenths)
            });
            ctx.figure(
                &format!("wire-over-time-{}", at + 1),
                Lines {
                    title: format!("Rate on the wire over 100 ms, {words}"),
                    x: "time_s".to_owned(),
                    y: WIRE.to_owned(),
                    logarithmic: false,
                    limit: first.limit_bit_s.map(|limit| limit as f64),
                    series: series.collect(),
                },
            );
        }
    }
}
