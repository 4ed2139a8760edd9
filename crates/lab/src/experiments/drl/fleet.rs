//! A run of a fleet: flows that are sent through the limiters of sites, and what passed.

use std::{net::SocketAddr, time::Duration};

use tidegate_instruments::wire_meter::{FlowPorts, WireMeter};

use super::{
    daemons::Daemons,
    forwarded::{BIN, Forwarded, bins_in},
};
use crate::{
    context::Context,
    testbed::{Child, LinkSpec, Sites},
    tools::{
        flows::{self, FlowPlan, FlowTimes, FlowsArgs, Want},
        rpc,
    },
};

const PORT: u16 = 7000;
/// Source ports: those of a site begin here, and so far apart.
const FIRST_PORT: u16 = 20_000;
const PORTS: u16 = 100;
/// Beyond the last flow's end.
const MARGIN: Duration = Duration::from_secs(3);
/// TCP that the published figures are of.
pub(super) const CC: &str = "reno";

#[derive(Debug, Clone, Copy)]
pub(super) struct Flow {
    /// Where its packets go through.
    pub(super) site: usize,
    /// The limiter under which figures count it.
    pub(super) limiter: usize,
    pub(super) from: Duration,
    pub(super) to: Duration,
}

/// What a run showed.
#[derive(Debug)]
pub(super) struct Ran {
    /// From the first flow's connection on.
    pub(super) forwarded: Forwarded,
    /// When each flow was connected, on the same clock.
    pub(super) began: Vec<Duration>,
    /// What the routers sent besides, gossip above all, as a part of the limit.
    pub(super) overhead_percent: f64,
}

/// A testbed on which routers are `rtt` apart, and senders from the receiver.
pub(super) fn sites(
    ctx: &Context,
    count: u8,
    rtt: Duration,
    lab_binary: Option<std::path::PathBuf>,
) -> anyhow::Result<Sites> {
    let link: LinkSpec = ctx.link(rtt / 2);
    Sites::new(count, link, lab_binary)
}

/// Sends the flows and counts what passes. `meanwhile` is called once all have been started, and the run
/// goes on when it returns.
pub(super) fn run(
    sites: &Sites,
    daemons: &mut Daemons<'_>,
    plan: &[Flow],
    limit_bit_s: u64,
    meanwhile: impl FnOnce(&mut Daemons<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<Ran> {
    let lasts = plan.iter().map(|flow| flow.to).max().unwrap_or_default();
    let bins = bins_in(lasts + MARGIN) as u32;
    let server = server(sites);
    let server: (SocketAddr, Child) =
        (server, rpc::start_server_with(sites.lab_binary(), sites.receiver(), server)?);
    let mut meters = attach(sites, daemons.is_at_hub(), plan, bins)?;
    meters.iter_mut().try_for_each(|metered| metered.meter.start())?;
    let mut clients = Vec::new();
    for site in 0..sites.count() {
        let flows: Vec<usize> = (0..plan.len()).filter(|at| plan[*at].site == site).collect();
        if flows.is_empty() {
            continue;
        }
        let of = |at: &usize| {
            let Flow { from, to, .. } = plan[*at];
            FlowPlan { from, to, want: Want::Greedy }
        };
        let args = FlowsArgs {
            servers: vec![server.0],
            first_port: first_port(site),
            cc: CC.to_owned(),
            seed: 1,
            flows: flows.iter().map(of).collect(),
        };
        let client = flows::start_with(sites.lab_binary(), daemons.site(site), &args)?;
        clients.push((flows, client, args));
    }
    meanwhile(daemons)?;
    let mut times: Vec<Option<FlowTimes>> = vec![None; plan.len()];
    for (flows, client, args) in clients {
        for (at, of) in flows.iter().zip(flows::finish(client, &args)?) {
            times[*at] = Some(of);
        }
    }
    drop(server);

    let begun_ns = times.iter().flatten().map(|times| times.began_ns).min().unwrap_or(0);
    let mut bytes = vec![Vec::new(); plan.len()];
    let mut besides = 0.0;
    for Metered { meter, first_port, flows } in &meters {
        let skip = bins_at(begun_ns.saturating_sub(meter.started_ns()));
        let wanted = skip..(skip + bins_in(lasts)).min(bins as usize);
        let mut of_flows = 0;
        let all = meter.flow_bins()?;
        for (at, port) in flows {
            let Some(all) = all.get(usize::from(port - first_port)) else { continue };
            bytes[*at] = all[wanted.clone()].to_vec();
            of_flows += bytes[*at].iter().sum::<u64>();
        }
        let all: u64 = meter.bins()?[wanted].iter().map(|bin| bin.bytes).sum();
        besides += (all - of_flows) as f64;
    }
    let began = times.iter().map(|times| {
        let ns = times.map_or(begun_ns, |times| times.began_ns);
        Duration::from_nanos(ns - begun_ns)
    });
    let limit_bit_s = limit_bit_s as f64;
    Ok(Ran {
        began: began.collect(),
        overhead_percent: besides * 8.0 / lasts.as_secs_f64() / limit_bit_s * 100.0,
        forwarded: Forwarded {
            flows: bytes,
            limiter: plan.iter().map(|flow| flow.limiter).collect(),
            limit_bit_s,
        },
    })
}

/// Where what takes all listens, while flows run.
pub(super) fn server(sites: &Sites) -> SocketAddr {
    SocketAddr::new(sites.addr(), PORT)
}

fn first_port(site: usize) -> u16 {
    FIRST_PORT + PORTS * site as u16
}

/// A meter, and which flows it counts at which ports.
struct Metered {
    meter: WireMeter,
    first_port: u16,
    flows: Vec<(usize, u16)>,
}

/// Behind what limits: at the hub's end of each site's link, or at the receiver.
fn attach(
    sites: &Sites,
    at_receiver: bool,
    plan: &[Flow],
    bins: u32,
) -> anyhow::Result<Vec<Metered>> {
    let mut ports: Vec<Vec<(usize, u16)>> = vec![Vec::new(); sites.count()];
    for (at, flow) in plan.iter().enumerate() {
        let nth = ports[flow.site].len() as u16;
        ports[flow.site].push((at, first_port(flow.site) + nth));
    }
    if at_receiver {
        ports = vec![ports.concat()];
    }
    let metered = |(site, flows): (usize, Vec<(usize, u16)>)| {
        let first = first_port(site);
        let last = flows.iter().map(|(_, port)| *port).max();
        let of = FlowPorts { first, count: last.map_or(0, |last| last + 1 - first) };
        let (host, dev) = match at_receiver {
            true => (sites.receiver(), sites.receiver_dev().to_owned()),
            false => (sites.hub(), sites.hub_dev(site)),
        };
        let meter = WireMeter::attach_flows(host, &dev, bins, BIN, of)?;
        Ok(Metered { meter, first_port: first, flows })
    };
    ports.into_iter().enumerate().map(metered).collect()
}

fn bins_at(ns: u64) -> usize {
    (u128::from(ns) / BIN.as_nanos()) as usize
}
