//! `drl-web`: bulk flows and web traffic under one limit over two routers. Table 1 of Cloud Control.

use std::{path::PathBuf, time::Duration};

use super::{
    JAIN, RTT, TOTAL,
    baseline::{FLOWS, KERNEL, LIMIT_BIT_S, Setup, case, of_tables, with_daemons},
    daemons::Daemons,
    fleet::{self, Flow},
    published::{self, SIZES},
};
use crate::{
    chart::BarsOf,
    context::Context,
    experiment::Experiment,
    host::Need,
    stats,
    testbed::{Child, Sites},
    tools::requests::{self, Request, Requests, RequestsArgs},
};

const SECOND: Duration = Duration::from_secs(1);
/// From when on figures count.
const FROM: Duration = Duration::from_secs(2);
/// What web traffic offers in all, as much as was published to get through.
const OFFERED_BIT_S: f64 = 2e6;
/// Payload of a full frame with timestamps.
const PAYLOAD: f64 = 1448.0 / 1514.0;

const BULK: &str = "bulk_bit_s";
const WEB: &str = "web_bit_s";
const HARMONIC: &str = "harmonic_mean_bit_s";
const MEDIAN: &str = "response_p50_ms";
const P99: &str = "response_p99_ms";
const UNANSWERED: &str = "unanswered";

/// See the [module](self).
#[derive(Debug, Default)]
pub struct DrlWeb {
    tiny: Option<PathBuf>,
}

impl DrlWeb {
    /// Runs of seconds; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> DrlWeb {
        DrlWeb { tiny: Some(lab_binary) }
    }
}

impl Experiment for DrlWeb {
    fn name(&self) -> &'static str {
        "drl-web"
    }

    fn summary(&self) -> &'static str {
        "Ten bulk flows and web traffic under one limit of 10 Mbit/s over two routers"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 3 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let lasts = match (&self.tiny, ctx.quick) {
            (Some(_), _) => SECOND * 4,
            (_, true) => SECOND * 30,
            _ => SECOND * 60,
        };
        ctx.note(format!(
            "Three greedy Reno flows at the one router and seven at the other, all 40 ms; at each, \
             requests that come by a Poisson process, each a connection of its own, from SYN to the \
             answer. The published sizes are those of a trace that is not at hand; ours are of a bounded \
             Pareto distribution, {:.1} kB on average, so many that they offer 2 Mbit/s, as much as was \
             published to get through, and the same requests for each system. Classes of sizes are the \
             published ones, and their rates the harmonic mean of payload by time. Bulk is payload, from \
             2 s to the end: frames, less headers.",
            requests::mean_bytes() / 1e3
        ));
        let sites = fleet::sites(ctx, 2, RTT, self.tiny.clone())?;
        let with_daemons = with_daemons(&of_tables(), self.tiny.is_some());
        ctx.alternate(&with_daemons, ctx.repeats, |ctx, &setup, run| {
            measure(ctx, &sites, setup, lasts, run)
        })?;
        for (name, title, metric) in [
            ("bulk", "What bulk flows have", BULK),
            ("response", "Median response of requests", MEDIAN),
        ] {
            ctx.bars(name, BarsOf { title, metric, points: None });
        }
        claims(ctx);
        Ok(())
    }
}

fn measure(
    ctx: &mut Context,
    sites: &Sites,
    setup: Setup,
    lasts: Duration,
    run: u32,
) -> anyhow::Result<()> {
    let mut daemons = Daemons::start(ctx, sites, setup.plan(sites.count()), sites.count())?;
    let flow =
        |limiter| Flow { site: setup.site_of(limiter), limiter, from: Duration::ZERO, to: lasts };
    let counts = FLOWS.iter().enumerate();
    let plan: Vec<Flow> =
        counts.flat_map(|(limiter, count)| (0..*count).map(move |_| flow(limiter))).collect();
    let args = |site: usize| RequestsArgs {
        server: fleet::server(sites),
        per_second: OFFERED_BIT_S / 8.0 / requests::mean_bytes() / FLOWS.len() as f64,
        lasts,
        cc: fleet::CC.to_owned(),
        seed: u64::from(run) << 8 | site as u64,
    };
    let mut web: Vec<Requests> = Vec::new();
    let ran = fleet::run(sites, &mut daemons, &plan, LIMIT_BIT_S, |daemons| {
        let start = |limiter: usize| {
            let site = daemons.site(setup.site_of(limiter));
            requests::start(sites.lab_binary(), site, &args(limiter))
        };
        let clients = (0..FLOWS.len()).map(start).collect::<anyhow::Result<Vec<Child>>>()?;
        for (limiter, client) in clients.into_iter().enumerate() {
            web.push(requests::finish(client, &args(limiter))?);
        }
        Ok(())
    })?;
    let answered: Vec<Request> =
        web.iter().flat_map(|requests| requests.answered.iter().copied()).collect();
    let unanswered: u64 = web.iter().map(|requests| requests.unanswered).sum();
    let ms: Vec<f64> = answered.iter().map(|request| request.seconds * 1e3).collect();
    let pushed = answered.iter().map(|request| request.bytes).sum::<u64>() as f64;
    let (bulk, web, jain) = match published::table_1(setup.name) {
        Some((bulk, web, jain)) => (Some(bulk), Some(web), Some(jain)),
        None => (None, None, None),
    };
    let passed = &ran.forwarded;
    let bulk_bit_s = passed.mean_bit_s(None, FROM);
    let mut record = ctx
        .record(setup, &case(KERNEL), run)
        .beside(BULK, bulk_bit_s * PAYLOAD, bulk)
        .beside(WEB, pushed * 8.0 / lasts.as_secs_f64(), web)
        .value(UNANSWERED, unanswered as f64);
    if let Some(is) = passed.jain(FROM) {
        record = record.beside(JAIN, is, jain);
    }
    for (metric, percent) in [(MEDIAN, 50.0), (P99, 99.0)] {
        record = match stats::percentile(&ms, percent) {
            Some(value) => record.value(metric, value),
            None => record,
        };
    }
    // Requests and gossip are all that is no flow's.
    let total = bulk_bit_s + ran.overhead_percent / 100.0 * LIMIT_BIT_S as f64;
    let _ = record.value(TOTAL, total);
    for (class, &from) in SIZES.iter().enumerate() {
        let until = SIZES.get(class + 1).copied().unwrap_or(u64::MAX);
        let of = answered.iter().filter(|r| (from..until).contains(&r.bytes));
        let slowness: Vec<f64> = of.map(|r| r.seconds / (r.bytes as f64 * 8.0)).collect();
        let Some(mean) = stats::mean(&slowness) else { continue };
        let published = published::table_1_class(setup.name, class);
        let record = ctx.record(setup, &case(KERNEL).with("from_bytes", from), run);
        let _ = record.beside(HARMONIC, 1.0 / mean, published);
    }
    Ok(())
}

fn claims(ctx: &mut Context) {
    for setup in of_tables().into_iter().filter(|setup| setup.is_ours()) {
        let median = |system: &str, metric: &str| ctx.median(system, metric, Some(&case(KERNEL)));
        let all = (median(setup.name, JAIN), median(setup.name, BULK), median(setup.name, WEB));
        let (Some(jain), Some(bulk), Some(web)) = all else { continue };
        let ((central, p50), total) = (
            (median("ctb", MEDIAN), median(setup.name, MEDIAN)),
            median(setup.name, TOTAL).unwrap_or(f64::NAN) / LIMIT_BIT_S as f64 * 100.0,
        );
        ctx.claim(
            format!(
                "{setup}: Jain's index of the bulk flows is at least the 0.962 published for FPS"
            ),
            jain >= 0.962,
            format!("{jain:.3}"),
        );
        ctx.claim(
            format!("{setup}: bulk and web have as much payload as published for FPS"),
            bulk + web >= 6989.76e3 + 2090.25e3,
            format!("{:.2} + {:.2} Mbit/s; 6.99 + 2.09 published", bulk / 1e6, web / 1e6),
        );
        ctx.claim(
            format!("{setup}: all frames together are at most 102 % of the limit"),
            total <= 102.0,
            format!("{total:.1} %"),
        );
        if let (Some(central), Some(p50)) = (central, p50) {
            ctx.claim(
                format!(
                    "{setup}: requests are answered within 1.25 times what they take at one limiter"
                ),
                p50 <= central * 1.25,
                format!("median {p50:.0} ms against {central:.0} ms"),
            );
        }
    }
}
