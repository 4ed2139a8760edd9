//! `dctcp-threshold`: HTB that marks, under DCTCP. He et al. (APNet 2017), figure 4: one flow, limits of 1
//! and
//! 2 Gbit/s, thresholds of 20 to 100 KB; the rate over time, and the distribution of round trips.
//!
//! The paper shows a rate that oscillates at every threshold, since a mark is on a segment of 64 KB and takes
//! a round trip. DEM and SPRING, which are its answer, run in turn with it.

use std::{fmt, path::PathBuf, time::Duration};

use super::{
    bed::Control,
    case_in_words,
    guest::{P50, TENTH, Transfer, VARIATION, WIRE},
    he_2017,
    policers::Road,
    shapers::Shaper,
};
use crate::{
    chart::{Cdf, Lines, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::{Case, distinct},
    stats,
    units::Unit,
};

const GBIT: u64 = 1_000_000_000;
const KB: u64 = 1000;
const THRESHOLDS: [u64; 5] = [20 * KB, 40 * KB, 60 * KB, 80 * KB, 100 * KB];
const FLOWS: u32 = 1;
const MARK: &str = "mark_bytes";
/// The slowest tenth of a second, of the limit.
const LEAST: &str = "min_100ms_percent";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct DctcpThreshold {
    /// For tests: one limit and two thresholds, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl DctcpThreshold {
    /// One limit and two thresholds, seconds long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> DctcpThreshold {
        DctcpThreshold { tiny: Some(lab_binary) }
    }
}

/// A limit under one congestion control.
#[derive(Debug, Clone, Copy)]
struct Turn {
    shaper: Shaper,
    cc: &'static str,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shaper {
            Shaper::HtbEcn(bytes) => {
                write!(f, "{} from {}", self.shaper, Unit::split(MARK).1.human(bytes as f64))
            }
            shaper => write!(f, "{shaper} under {}", self.cc),
        }
    }
}

impl Turn {
    fn case(&self, ctx: &Context, limit_bit_s: u64) -> Case {
        let case =
            ctx.case().with("limit_bit_s", limit_bit_s).with("flows", FLOWS).with("cc", self.cc);
        match self.shaper {
            Shaper::HtbEcn(bytes) => case.with(MARK, bytes),
            _ => case,
        }
    }
}

impl Experiment for DctcpThreshold {
    fn name(&self) -> &'static str {
        "dctcp-threshold"
    }

    fn summary(&self) -> &'static str {
        "HTB that marks from 20 to 100 KB on under one flow of DCTCP at 1 and 2 Gbit/s: how its rate \
         oscillates and how long its packets wait, beside dem and spring"
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, _quick: bool) -> u32 {
        1
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let (limits, marks, seconds): (&[u64], &[u64], u64) = match (&self.tiny, ctx.quick) {
            (Some(_), _) => (&[GBIT], &[20 * KB, 100 * KB], 2),
            (None, true) => (&[GBIT, 2 * GBIT], &[20 * KB, 60 * KB, 100 * KB], 5),
            (None, false) => (&[GBIT, 2 * GBIT], &THRESHOLDS, 20),
        };
        ctx.note(
            "`wire` is the mean on the wire behind the limit from one second after the first data on, whole \
             frames counted; `variation` is the standard deviation of its tenths of a second, of the mean, \
             and `min 100 ms` the slowest of them, of the limit.",
        );
        let marking =
            marks.iter().map(|bytes| Turn { shaper: Shaper::HtbEcn(*bytes), cc: "dctcp" });
        let answers = [(Shaper::Dem, "dctcp"), (Shaper::Spring, "cubic")]
            .map(|(shaper, cc)| Turn { shaper, cc });
        let turns: Vec<Turn> = marking.chain(answers).collect();
        let mut road = Road::new(self.tiny.clone(), ctx.usual_link().into_iter().collect())?;
        // A guest gives its host segments of up to 64 KB.
        road.cut(false)?;
        for &limit_bit_s in limits {
            measure(ctx, &mut road, limit_bit_s, &turns, Duration::from_secs(seconds))?;
        }
        claims(ctx);
        Ok(())
    }
}

fn measure(
    ctx: &mut Context,
    road: &mut Road,
    limit_bit_s: u64,
    turns: &[Turn],
    duration: Duration,
) -> anyhow::Result<()> {
    let (mut over_time, mut round_trips) = (Vec::new(), Vec::new());
    ctx.alternate(turns, ctx.repeats, |ctx, turn, run| {
        let (control, shaper) = (Control::get(turn.cc)?, turn.shaper);
        let transfer = Transfer { shaper, limit_bit_s, flows: FLOWS, control: &control, duration };
        let seen = transfer.run(ctx, road)?;
        let tenths = seen.wire.rates_bit_s(TENTH);
        let published = |metric| match shaper {
            _ if ctx.usual_link().is_some() => None,
            Shaper::HtbEcn(bytes) if metric == P50 => he_2017::dctcp_rtt_us(limit_bit_s, bytes),
            Shaper::HtbEcn(_) => None,
            _ => he_2017::low_latency(shaper.name(), FLOWS, limit_bit_s, metric),
        };
        let mut values = seen.values();
        let least = stats::range(&tenths).map(|(least, _)| least / limit_bit_s as f64 * 100.0);
        values.extend(least.map(|percent| (LEAST, percent)));
        let values: Vec<_> = values.into_iter().map(|(m, v)| (m, v, published(m))).collect();
        let mut record = ctx.record(shaper, &turn.case(ctx, limit_bit_s), run);
        for (metric, value, published) in values {
            record = record.beside(metric, value, published);
        }
        if run == 1 {
            over_time.push(Series::every(turn.to_string(), TENTH.as_secs_f64(), &tenths));
            round_trips.push(Series::new(turn.to_string(), seen.probe.rtt_cdf_us));
        }
        Ok(())
    })?;
    if over_time.is_empty() {
        return Ok(());
    }
    let gbit = limit_bit_s / GBIT;
    let title = |what: &str| format!("{what}, one flow at {gbit} Gbit/s");
    ctx.figure(
        &format!("wire-over-time-{gbit}gbit"),
        Lines {
            title: title("Rate on the wire over 100 ms"),
            x: "time_s".to_owned(),
            y: WIRE.to_owned(),
            logarithmic: false,
            limit: Some(limit_bit_s as f64),
            series: over_time,
        },
    );
    ctx.figure(
        &format!("rtt-{gbit}gbit"),
        Cdf { title: title("Round trips"), metric: "rtt_us".to_owned(), series: round_trips },
    );
    Ok(())
}

fn claims(ctx: &mut Context) {
    let limit = |case: &Case| case.0.get("limit_bit_s").and_then(|limit| limit.as_u64());
    let mark = |case: &Case| case.0.get(MARK).and_then(|bytes| bytes.as_u64());
    let cases: Vec<Case> = distinct(ctx.rows().iter().map(|row| row.case.clone()));
    for bit_s in distinct(cases.iter().filter_map(limit)) {
        let here = || cases.iter().filter(|case| limit(case) == Some(bit_s));
        let of = |system: &str, metric: &str, case: &Case| ctx.median(system, metric, Some(case));
        let marking = here().filter_map(|case| Some((mark(case)?, case)));
        let medians: Vec<(u64, f64)> =
            marking.clone().filter_map(|(k, case)| Some((k, of("htb-ecn", P50, case)?))).collect();
        let words = case_in_words(&Case::new().with("flows", FLOWS).with("limit_bit_s", bit_s));
        let text: Vec<String> =
            medians.iter().map(|(k, us)| format!("{us:.0} µs from {} KB on", k / KB)).collect();
        let (first, last) = (medians.first().copied(), medians.last().copied());
        let worst = |system: &str| {
            let all = here().filter_map(|case| of(system, VARIATION, case));
            stats::range(&all.collect::<Vec<_>>())
        };
        let (marked, dem, spring) = (worst("htb-ecn"), worst("dem"), worst("spring"));
        if let (Some((low, low_us)), Some((high, high_us))) = (first, last)
            && low < high
        {
            let claim = format!("htb-ecn, {words}: the lower the threshold, the lower the median");
            ctx.claim(claim, low_us < high_us, text.join(", "));
        }
        if let (Some((least, most)), Some((_, dem)), Some((_, spring))) = (marked, dem, spring) {
            ctx.claim(
                format!("{words}: dem and spring vary less than htb-ecn at any threshold"),
                dem.max(spring) < least,
                format!("dem {dem:.1} %, spring {spring:.1} %, htb-ecn {least:.1} to {most:.1} %"),
            );
        }
    }
}
