//! `applications`: requests of real servers beside bulk transfers, inside one limit.
//!
//! ```text
//! plan (rows) -> requests (servers, load, transfers) -> claims
//! ```

mod claims;
mod plan;

use std::{path::PathBuf, time::Duration};

use anyhow::anyhow;

use super::{
    bed::{Bed, Control},
    requests::{Clusters, Row, Times},
};
use crate::{
    chart::{Bars, BarsOf, Cdf, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report,
    stop::Skip,
    systems::System,
    testbed::set_sysctl,
};

/// In a round of a row. The peers are the kernel's, as users and as experts set them up.
const SYSTEMS: [System; 9] = [
    System::Unlimited,
    System::Pace,
    System::Nrm,
    System::Htb,
    System::HtbShort,
    System::Tbf,
    System::Fq,
    System::FqCodel,
    System::Cake,
];
/// The short form leaves these out.
const LONG_ONLY: [System; 2] = [System::Unlimited, System::Nrm];
const PEERS: [System; 6] =
    [System::Htb, System::HtbShort, System::Tbf, System::Fq, System::FqCodel, System::Cake];
/// The row of a test.
const TINY: &str = "nginx-close-1k-3c-1b-50m";
/// Transfers run so long before the requests come, and so many round trips more: iperf3 needs nine before it
/// sends data, and TCP some to find its window.
const SETTLED: Duration = Duration::from_secs(1);
const SETTLED_TRIPS: u32 = 20;
/// A client's ports: each connection of its own needs one until the server has forgotten the last.
const CLIENT_PORTS: &str = "10000 65535";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Applications {
    /// For tests: one short row, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl Applications {
    /// One row of every system, a second long; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> Applications {
        Applications { tiny: Some(lab_binary) }
    }

    fn rows(&self, ctx: &Context) -> anyhow::Result<Vec<Row>> {
        let names = match &self.tiny {
            Some(_) => &[TINY.to_owned()][..],
            None if ctx.only.is_empty() => return Ok(plan::plan(ctx.quick)),
            None => &ctx.only,
        };
        let mut rows = named_rows(names).map_err(|why| anyhow!(why))?;
        rows.sort_by_key(|row| row.rtt);
        Ok(rows)
    }
}

fn named_rows(names: &[String]) -> Result<Vec<Row>, String> {
    names.iter().map(|name| name.trim().parse()).collect()
}

/// How long transfers run over a path of this round trip before the requests come. iperf3 takes whole
/// seconds.
fn settled(rtt: Duration) -> Duration {
    let exact = SETTLED + SETTLED_TRIPS * rtt;
    Duration::from_secs(exact.as_millis().div_ceil(1000) as u64)
}

/// The systems of these names; none: those of the short or the whole form.
fn systems(names: &[String], quick: bool) -> Result<Vec<System>, String> {
    if names.is_empty() {
        let all = SYSTEMS.into_iter();
        return Ok(all.filter(|system| !quick || !LONG_ONLY.contains(system)).collect());
    }
    let named = |name: &String| {
        let found = SYSTEMS.iter().find(|system| system.name() == name.trim()).copied();
        let known = || SYSTEMS.map(System::name).join(", ");
        found.ok_or_else(|| format!("no system is named `{name}`: use some of {}", known()))
    };
    names.iter().map(named).collect()
}

/// The systems that this kernel can have. Each of the others has one note, and not one in every row.
fn present(ctx: &mut Context, mut systems: Vec<System>) -> anyhow::Result<Vec<System>> {
    let mut failed = Ok(());
    systems.retain(|system| match system.check_kernel() {
        Ok(()) => true,
        Err(error) if error.is::<Skip>() => {
            ctx.note(format!("{system} skipped: {error:#}"));
            false
        }
        Err(error) => {
            failed = Err(error);
            false
        }
    });
    failed?;
    if systems.is_empty() {
        return Err(Skip("this kernel has none of the systems that were chosen".to_owned()).into());
    }
    Ok(systems)
}

impl Experiment for Applications {
    fn name(&self) -> &'static str {
        "applications"
    }

    fn summary(&self) -> &'static str {
        "Requests of nginx, HTTP/3, Redis, PostgreSQL and a DNS-like server beside bulk transfers in one \
         limit: requests a second, latency to the slowest, waits for TCP's timers, drops, use of the limit"
    }

    fn needs(&self) -> Vec<Need> {
        let iperf3 = Need::Command { name: "iperf3", version_flag: "--version" };
        vec![Need::Root, Need::Tidegate, iperf3]
    }

    fn repeats(&self, _quick: bool) -> u32 {
        1
    }

    fn check_choice(&self, only: &[String], chosen: &[String]) -> Result<(), String> {
        named_rows(only)?;
        systems(chosen, true).map(|_| ())
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let rows = self.rows(ctx)?;
        let systems = systems(&ctx.systems, ctx.quick).map_err(|why| anyhow!(why))?;
        let systems = present(ctx, systems)?;
        let seconds = match (self.tiny.is_some(), ctx.quick) {
            (true, _) => 2,
            (_, true) => 5,
            _ => 11,
        };
        ctx.note(
            "A request's latency is from when it was due to the last byte of its reply; a connection of its \
             own is made within. `fair` is how long it takes at its part of the limit if all connections \
             always want theirs: serialization and round trips. `late` counts the requests that take 10 or \
             150 ms longer.",
        );
        ctx.note(
            "TCP's counters are those of both ends, transfers included. `used` is the mean rate on the wire \
             while requests come, of the limit; `max` the highest over any such time, start included. On \
             ingress the wire is read before the limit.",
        );
        let clusters = Clusters::default();
        for rows in rows.chunk_by(|row, next| row.rtt == next.rtt) {
            let own = rows.first().and_then(|row| row.rtt).map(|rtt| ctx.link(rtt));
            let mut bed = Bed::new(self.tiny.clone(), own.or(ctx.usual_link()))?;
            set_sysctl(bed.testbed.receiver(0), "net.ipv4.ip_local_port_range", CLIENT_PORTS)?;
            for row in rows {
                let requests = Duration::from_secs(seconds) - SETTLED;
                let times = Times { settled: settled(row.rtt.unwrap_or_default()), requests };
                let curves = measure(row, ctx, (&mut bed, &clusters), &systems, times)?;
                let case = row.case(ctx);
                claims::record(ctx, row, &case);
                let title = format!("Latency of requests, {row}");
                if curves.iter().any(|curve| !curve.points.is_empty()) {
                    let metric = "latency_us".to_owned();
                    ctx.figure(&format!("latency-{row}"), Cdf { title, metric, series: curves });
                }
            }
        }
        figures(ctx);
        Ok(())
    }
}

/// Measures the systems in turn; the distribution of each, from its first run.
fn measure(
    row: &Row,
    ctx: &mut Context,
    (bed, clusters): (&mut Bed, &Clusters),
    systems: &[System],
    times: Times,
) -> anyhow::Result<Vec<Series>> {
    let control = Control::get(row.cc)?;
    let case = row.case(ctx);
    let mut curves = Vec::new();
    ctx.step(row.to_string());
    ctx.alternate(systems, ctx.repeats, |ctx, &system, run| {
        let trial = row.trial(ctx, (bed, clusters), (system, &control), times)?;
        let mut record = ctx.record(system, &case, run);
        for (metric, value) in trial.values(row, system) {
            record = record.value(metric, value);
        }
        if run == 1 {
            curves.push(Series::new(system.name(), trial.load.cdf_us()));
        }
        Ok(())
    })?;
    Ok(curves)
}

/// Bars of all rows of a direction.
fn figures(ctx: &mut Context) {
    for direction in ["egress", "ingress"] {
        let here = |row: &&report::Row| {
            row.case.0.get("direction").is_some_and(|found| *found == direction)
                && row.system != System::Unlimited.name()
        };
        let rows: Vec<report::Row> = ctx.rows().iter().filter(here).cloned().collect();
        for (file, what, metric) in [
            ("p50", "median", "latency_p50_us"),
            ("p99", "99th percentile", "latency_p99_us"),
            ("p99-9", "99.9th percentile", "latency_p99_9_us"),
        ] {
            let title = format!("Latency of requests inside a limit on {direction}, {what}");
            let what = BarsOf { title: &title, metric, points: None };
            if rows.iter().any(|row| row.metric == metric) {
                ctx.figure(&format!("{file}-{direction}"), Bars::from_rows(&rows, what));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_settle_for_whole_seconds() {
        let after = |ms| settled(Duration::from_millis(ms)).as_secs_f64();
        assert_eq!([0, 1, 20, 100].map(after), [1.0, 2.0, 2.0, 3.0]);
    }

    #[test]
    fn a_choice_is_read_or_says_what_to_type() {
        let check = |only: &str, systems: &str| {
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            Applications::default().check_choice(&words(only), &words(systems))
        };
        assert_eq!(check("", ""), Ok(()));
        assert_eq!(check("redis-1b-50m nginx-keep-10k-1g", "pace htb-20ms"), Ok(()));
        assert!(check("redis", "").unwrap_err().contains("no limit is said"));
        let refused = check("", "sfq").unwrap_err();
        let known = "unlimited, pace, nrm, htb, htb-20ms, tbf, fq, fq_codel, cake";
        assert_eq!(refused, format!("no system is named `sfq`: use some of {known}"));
    }
}
