//! One greedy class beside many that send little: what they take from it.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use tidegate_instruments::wire_meter::WireMeter;

use super::{
    BIN, DROPS, PORT, SETTLED, USED, bin_of, bins_in, bit_s,
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
        rpc,
    },
};

const ROOT_BIT_S: u64 = 100_000_000;
/// The guarantee of each class: together half of the root.
const GUARANTEE_BIT_S: u64 = 1_000_000;
const WEIGHT: u32 = 100;
/// Classes that send little.
pub(super) const CLASSES: usize = 49;
/// A second, in each of them.
const DATAGRAMS: u64 = 10;
/// The place of the greedy class in the tree.
const GREEDY: usize = 0;
const FIRST_PORT: u16 = 30_000;
/// The small classes start one after the other, all of them before the greedy one.
const STARTS: Duration = Duration::from_secs(1);

fn tree() -> Tree {
    let class = |name| Class {
        name,
        parent: None,
        guarantee_bit_s: GUARANTEE_BIT_S,
        weight: WEIGHT,
        ceiling_bit_s: None,
    };
    let small = (1..=CLASSES).map(|at| format!("small-{at}"));
    let names = ["greedy".to_owned()].into_iter().chain(small);
    Tree { root_bit_s: ROOT_BIT_S, classes: names.map(class).collect() }
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
    let mut force = Force::apply(ctx, testbed, &tree, system)?;
    let bins = ((STARTS + time * 2).as_nanos() / BIN.as_nanos()) as u32;
    let mut meter = WireMeter::attach(to, testbed.receiver_dev(0), bins, BIN)?;

    let sends = |class: usize, time: Duration, want: Want| FlowsArgs {
        servers: vec![SocketAddr::new(force::addr(class), PORT)],
        first_port: FIRST_PORT + class as u16,
        cc: "cubic".to_owned(),
        seed: ctx.links.seed,
        flows: vec![FlowPlan { from: Duration::ZERO, to: time, want }],
    };
    let started = Instant::now();
    let small = (GREEDY + 1..tree.classes.len()).map(|class| {
        let args = sends(class, STARTS + time, Want::Datagrams(DATAGRAMS));
        Ok((flows::start(testbed, force.site(testbed, class), &args)?, args))
    });
    let small = small.collect::<anyhow::Result<Vec<_>>>()?;
    pass_time(STARTS.saturating_sub(started.elapsed()))?;
    meter.start()?;
    let args = sends(GREEDY, time, Want::Greedy);
    let greedy = flows::start(testbed, force.site(testbed, GREEDY), &args)?;
    let times = flows::finish(greedy, &args)?;
    let small = small.into_iter().map(|(client, args)| flows::finish(client, &args));
    let _ = small.collect::<anyhow::Result<Vec<_>>>()?;

    let settled =
        bin_of(&meter, times[0].began_ns) + bins_in(SETTLED)..bin_of(&meter, times[0].ended_ns);
    let bytes: Vec<u64> = meter.bins()?.iter().map(|bin| bin.bytes).collect();
    let used = bytes.get(settled).map_or(0.0, bit_s) / ROOT_BIT_S as f64 * 100.0;
    let drops: u64 = force.drops(&tree)?[GREEDY + 1..=CLASSES].iter().sum();
    let case = Case::new()
        .with("limit_bit_s", ROOT_BIT_S)
        .with("step", format!("one beside {CLASSES} that send little"));
    let small = case.clone().with("class", "small");
    ctx.record(system, &case, run).value(USED, used);
    ctx.record(system, &small, run).value(DROPS, drops as f64);
    Ok(())
}
