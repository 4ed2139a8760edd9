//! One greedy class beside many that send little: what they take from it.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use tidegate_instruments::wire_meter::WireMeter;

use super::{
    BIN, DRAIN, LOST, PORT, PROBE_PORT, SETTLED, USED, bit_s,
    force::{self, Force},
    tree::{Class, Tree},
};
use crate::{
    context::Context,
    report::Case,
    systems::System,
    testbed::{Testbed, wait::pass_time},
    tools::{
        flows::{self, FlowPlan, FlowsArgs, Want},
        probe, rpc,
    },
};

const ROOT_BIT_S: u64 = 100_000_000;
/// What each class is guaranteed: together half of the root.
const GUARANTEE_BIT_S: u64 = 1_000_000;
const WEIGHT: u32 = 100;
/// Classes that send little.
pub(super) const CLASSES: usize = 49;
/// A second, in each of them, of this payload.
const DATAGRAMS: u64 = 10;
const DATAGRAM_BYTES: usize = 100;
const GREEDY: usize = 0;
const GREEDY_PORT: u16 = 30_000;
/// The clients of the small classes start one after the other.
const STARTS: Duration = Duration::from_secs(1);

fn tree() -> Tree {
    let class = |name| Class {
        name,
        parent: None,
        guarantee_bit_s: GUARANTEE_BIT_S,
        weight: WEIGHT,
        ceiling_bit_s: None,
    };
    let small = (1..=CLASSES).map(|at| class(format!("small-{at}")));
    Tree {
        root_bit_s: ROOT_BIT_S,
        classes: [class("greedy".to_owned())].into_iter().chain(small).collect(),
    }
}

/// Records how much of the root is used while one class is greedy for `time`, and what the others lose.
pub(super) fn measure(
    ctx: &mut Context,
    testbed: &Testbed,
    system: System,
    run: u32,
    time: Duration,
) -> anyhow::Result<()> {
    let tree = tree();
    let to = testbed.receiver(0);
    let _server = rpc::start_server(testbed, to, SocketAddr::from(([0, 0, 0, 0], PORT)))?;
    let echo = |class| SocketAddr::new(force::addr(class), PROBE_PORT);
    let small = GREEDY + 1..tree.classes.len();
    let echoes = small.clone().map(|class| probe::start_server(testbed, to, echo(class)));
    let _echoes = echoes.collect::<anyhow::Result<Vec<_>>>()?;
    let force = Force::apply(ctx, testbed, &tree, system)?;

    let bins = ((STARTS + time * 2).as_nanos() / BIN.as_nanos()) as u32;
    let mut meter = WireMeter::attach(to, testbed.receiver_dev(0), bins, BIN)?;
    let started = Instant::now();
    let probers = small.map(|class| {
        let args = probe::ClientArgs {
            rate_hz: DATAGRAMS,
            size_bytes: DATAGRAM_BYTES,
            drain: DRAIN,
            may_lose_all: true,
            ..probe::ClientArgs::new(echo(class), STARTS + time)
        };
        Ok((probe::start_client(testbed, force.site(testbed, class), args)?, args))
    });
    let probers = probers.collect::<anyhow::Result<Vec<_>>>()?;
    pass_time(STARTS.saturating_sub(started.elapsed()))?;
    let args = FlowsArgs {
        servers: vec![SocketAddr::new(force::addr(GREEDY), PORT)],
        first_port: GREEDY_PORT,
        cc: "cubic".to_owned(),
        seed: ctx.links.seed,
        flows: vec![FlowPlan { from: Duration::ZERO, to: time, want: Want::Greedy }],
    };
    meter.start()?;
    let greedy = flows::start(testbed, force.site(testbed, GREEDY), &args)?;
    let times = flows::finish(greedy, &args)?;
    let probes = probers.into_iter().map(|(client, args)| probe::finish_client(client, args));
    let probes = probes.collect::<anyhow::Result<Vec<_>>>()?;

    let bin_of = |ns: u64| (ns.saturating_sub(meter.started_ns()) / BIN.as_nanos() as u64) as usize;
    let (from, to) = (bin_of(times[0].began_ns), bin_of(times[0].ended_ns));
    let bytes: Vec<u64> = meter.bins()?.iter().map(|bin| bin.bytes).collect();
    let settled = from + super::bins_in(SETTLED);
    let used = bytes.get(settled..to).map_or(0.0, bit_s) / ROOT_BIT_S as f64 * 100.0;
    let lost = probes.iter().map(probe::ProbeReport::lost_percent).sum::<f64>();
    let case = Case::new()
        .with("limit_bit_s", ROOT_BIT_S)
        .with("step", format!("one beside {CLASSES} that send little"));
    ctx.record(system, &case, run).value(USED, used).value(LOST, lost / probes.len() as f64);
    Ok(())
}
