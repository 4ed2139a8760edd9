//! Requests of a real server beside a backup inside one limit: clients of nginx that ask again with each
//! reply, beside transfers of iperf3. Both systems are measured as in the experiment `applications`.

use std::{fmt, time::Duration};

use super::{SETTLED, System, ms};
use crate::{
    chart::{Cdf, Series},
    context::Context,
    experiments::{
        bed::{Bed, Control},
        requests::{App, Clusters, MBIT, Row, TIMER, Times},
    },
    report::Case,
    systems,
};

const NAME: &str = "requests beside a backup";
/// In a limit of so much a run has thousands of requests.
const LIMIT_BIT_S: u64 = 200 * MBIT;
const REPLY_KB: u64 = 10;
/// With the start of the transfers two seconds: iperf3 takes whole ones.
const REQUESTED: Duration = Duration::from_millis(1500);
/// The metrics that the demo reports.
const METRICS: [&str; 11] = [
    "requests",
    "latency_p50_us",
    "latency_p99_us",
    "latency_p99_9_us",
    "latency_max_us",
    "fair_us",
    "late_150ms_requests",
    "used_percent",
    "bulk_goodput_bit_s",
    "drops",
    "drops_at_risk",
];

/// A turn of a system.
struct Turn {
    shown: System,
    system: systems::System,
}

const TURNS: [Turn; 2] = [
    Turn { shown: System::Htb, system: systems::System::Htb },
    Turn { shown: System::Tidegate, system: systems::System::Pace },
];

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{NAME}: {}", self.shown)
    }
}

fn row() -> Row {
    Row::new(App::NginxKeep(REPLY_KB), LIMIT_BIT_S)
}

fn case() -> Case {
    let row = row();
    let case = Case::new().with("job", NAME).with("clients", row.clients);
    case.with("transfers", row.bulk).with("cc", row.cc).with("limit_bit_s", row.limit_bit_s)
}

/// Measures the systems in turn; the distribution of each, from its first run.
pub(super) fn measure(ctx: &mut Context, bed: &mut Bed) -> anyhow::Result<Vec<Series>> {
    let (row, case, clusters) = (row(), case(), Clusters::default());
    let control = Control::get(row.cc)?;
    let times = Times { settled: SETTLED, requests: REQUESTED };
    let mut curves = Vec::new();
    ctx.alternate(&TURNS, ctx.repeats, |ctx, turn, run| {
        let trial = row.trial(ctx, (bed, &clusters), (turn.system, &control), times)?;
        let values = trial.values(&row, turn.system);
        let mut record = ctx.record(turn.shown, &case, run);
        for (metric, value) in values.into_iter().filter(|(metric, _)| METRICS.contains(metric)) {
            record = record.value(metric, value);
        }
        if run == 1 {
            curves.push(Series::new(turn.shown.to_string(), trial.load.cdf_us()));
        }
        Ok(())
    })?;
    Ok(curves)
}

/// The figure and the claims: requests are answered sooner than under HTB, and none waits for a timer.
pub(super) fn conclude(ctx: &mut Context, curves: Vec<Series>) {
    if !curves.is_empty() {
        let (title, metric) = (format!("Latency of {NAME}"), "latency_us".to_owned());
        ctx.figure("requests-latency", Cdf { title, metric, series: curves });
    }
    let case = case();
    let of = |system: &str, metric: &str| ctx.median(system, metric, Some(&case));
    let runs = |metric: &str| ctx.values("tidegate", metric, Some(&case)).into_iter();
    let figures =
        |system: &str| Some((of(system, "latency_p50_us")?, of(system, "latency_p99_us")?));
    let (Some((p50, p99)), Some(fair_us)) = (figures("tidegate"), of("tidegate", "fair_us")) else {
        return;
    };
    let (late, requests) =
        (runs("late_150ms_requests").sum::<f64>(), runs("requests").sum::<f64>());
    let slowest = runs("latency_max_us").fold(0.0, f64::max);
    let in_time = of("tidegate", "late_150ms_requests") == Some(0.0);
    if let Some((htb50, htb99)) = figures("htb") {
        ctx.claim(
            format!("{NAME}: latency p50 and p99 below htb"),
            p50 < htb50 && p99 < htb99,
            format!("{}, {}; htb {}, {}", ms(p50), ms(p99), ms(htb50), ms(htb99)),
        );
    }
    // A machine that stands still for 150 ms makes requests late, too, but seldom in two runs.
    let timer = TIMER.as_millis();
    ctx.claim(
        format!(
            "{NAME}: none waits for TCP's timer, {timer} ms above its fair time, in the median run"
        ),
        in_time,
        format!(
            "{late:.0} of {requests:.0} in all runs; slowest {}, fair {}",
            ms(slowest),
            ms(fair_us)
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_take_whole_seconds() {
        assert_eq!((SETTLED + REQUESTED).subsec_nanos(), 0);
    }
}
