//! An experiment that measures nothing: made-up figures through every part of the lab.

use anyhow::bail;

use crate::chart::{BarsOf, Cdf, Lines, Series};
use crate::context::Context;
use crate::experiment::Experiment;
use crate::host::Need;
use crate::report::Case;
use crate::stats;
use crate::stop::Skip;

/// How the example ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Well,
    Skipped,
    Failed,
    Panicked,
    FailedLate,
}

pub(crate) struct Example(pub(crate) &'static str, pub(crate) Ending);

impl Experiment for Example {
    fn name(&self) -> &'static str {
        self.0
    }

    fn summary(&self) -> &'static str {
        "Made-up figures"
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Command { name: "echo", version_flag: "echo 1.2" }]
    }

    fn in_demo(&self) -> bool {
        true
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        match self.1 {
            Ending::Skipped => {
                return Err(Skip("needs fq, which this kernel does not have".into()).into());
            }
            Ending::Failed => bail!("no such device"),
            Ending::Panicked => panic!("index out of bounds"),
            Ending::Well | Ending::FailedLate => {}
        }
        for flows in [1, 9] {
            let case = Case::new().with("limit_bit_s", 1e9).with("flows", flows);
            ctx.alternate(&["htb", "pace"], ctx.repeats, |ctx, system, run| {
                let (rate, rtt_us) = if *system == "htb" { (955e6, 1825.0) } else { (992e6, 30.0) };
                ctx.record(system, &case, run)
                    .beside("goodput_bit_s", rate + f64::from(run) * 1e6, Some(919e6))
                    .value("rtt_p50_us", rtt_us);
                Ok(())
            })?;
        }
        ctx.bars(
            "rate",
            BarsOf { title: "Rate", metric: "goodput_bit_s", points: Some("rtt_p50_us") },
        );
        let rtts: Vec<f64> = (1..100).map(f64::from).collect();
        ctx.figure(
            "rtt",
            Cdf {
                title: "RTT".into(),
                metric: "rtt_us".into(),
                series: vec![Series::new("htb", stats::cdf(&rtts))],
            },
        );
        ctx.figure(
            "time",
            Lines {
                title: "Rate over time".into(),
                x: "time_s".into(),
                y: "rate_bit_s".into(),
                logarithmic: false,
                limit: Some(1e9),
                series: vec![Series::every("pace", 0.1, &[9.9e8; 20])],
            },
        );
        let ratio =
            ctx.median("htb", "rtt_p50_us", None).zip(ctx.median("pace", "rtt_p50_us", None));
        let ratio = ratio.map_or(f64::NAN, |(htb, pace)| htb / pace);
        ctx.claim("pace queues less than htb", ratio > 1.0, format!("{ratio:.0} times"));
        ctx.claim("pace is free", false, "0.4 % of a core");
        if self.1 == Ending::FailedLate {
            bail!("the link went away");
        }
        Ok(())
    }
}
