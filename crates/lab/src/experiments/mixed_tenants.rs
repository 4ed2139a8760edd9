//! `mixed-tenants`: two guests on one uplink, a busy one and one that has bought more of it. Who has what
//! when
//! the second idles and comes back, and what a packet of each waits.
//!
//! The busy guest has more flows. It sends throughout; the other in the first and the last third. `htb` is
//! Tidegate's tree: each guest's port has a minimum inside the uplink's limit and borrows what the other
//! leaves, as the two classes of He et al. (APNet 2017), table 2. `htb-ecn` is the same tree with a
//! threshold.
//! `dem` and `spring` have no trees: one limit on the uplink, which both share flow by flow. Where marks are
//! made, flows ask for ECN.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::{Duration, Instant},
};

use tidegate_instruments::wire_meter::{FlowPorts, WireMeter};

use super::{bed::Control, shapers::MARK_BYTES};
use crate::{
    chart::{BarsOf, Lines, Series},
    context::Context,
    experiment::Experiment,
    host::Need,
    report::Case,
    testbed::{Family, Store, Testbed, TestbedOptions, Topology, set_sysctl, wait::pass_time},
    tools::{
        flows::{self, FlowPlan, FlowsArgs, Want},
        probe::{self, ProbeReport},
        rpc,
    },
};

const MBIT: u64 = 1_000_000;
const UPLINK_BIT_S: u64 = 1000 * MBIT;
const UPLINK: &str = "uplink";
const PORT: u16 = 7000;
const PROBE_PORT: u16 = 7001;
const FIRST_PORT: u16 = 20_000;
const BIN: Duration = Duration::from_millis(10);
/// Bins of the figure.
const SHOWN: usize = 5;
/// Bins over which a guest that is back is looked at.
const BACK_BINS: usize = 2;
const BACK: f64 = 0.9;
const SETTLED: Duration = Duration::from_millis(400);
const EARLY: Duration = Duration::from_millis(100);
/// What waits longest, HTB's queue, waits less.
const DRAIN: Duration = Duration::from_millis(200);
const MARGIN: Duration = Duration::from_secs(2);

const RATE: &str = "guest_bit_s";
const P50: &str = "rtt_p50_us";
const P99: &str = "rtt_p99_us";
const BACK_MS: &str = "back_ms";
const USED: &str = "used_percent";

/// A guest: its minimum, and its flows.
struct Guest {
    name: &'static str,
    minimum_bit_s: u64,
    flows: u16,
}

const GUESTS: [Guest; 2] = [
    Guest { name: "busy", minimum_bit_s: 300 * MBIT, flows: 8 },
    Guest { name: "buyer", minimum_bit_s: 600 * MBIT, flows: 2 },
];
const BUSY: usize = 0;
const BUYER: usize = 1;
/// The steps, and whether the buyer sends.
const STEPS: [(&str, bool); 3] = [("both", true), ("one idles", false), ("back", true)];
const MINIMUM_LEAST: f64 = 0.95;
/// How much of the uplink the other must have when one idles.
const BORROWED_LEAST: f64 = 95.0;
const BACK_MOST_MS: f64 = 100.0;
const HTB_TIMES_LEAST: f64 = 10.0;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct MixedTenants {
    /// For tests: short steps, and where the lab's tools are.
    tiny: Option<PathBuf>,
}

impl MixedTenants {
    /// Short steps; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> MixedTenants {
        MixedTenants { tiny: Some(lab_binary) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Uplink {
    Htb,
    HtbEcn,
    Dem,
    Spring,
}

impl fmt::Display for Uplink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Uplink::Htb => "htb",
            Uplink::HtbEcn => "htb-ecn",
            Uplink::Dem => "dem",
            Uplink::Spring => "spring",
        })
    }
}

impl Uplink {
    const ALL: [Uplink; 4] = [Uplink::Htb, Uplink::HtbEcn, Uplink::Dem, Uplink::Spring];

    fn has_minimums(self) -> bool {
        matches!(self, Uplink::Htb | Uplink::HtbEcn)
    }

    /// Under which congestion control its guests are.
    fn cc(self) -> &'static str {
        match self {
            Uplink::HtbEcn | Uplink::Dem => "cubic+ecn",
            Uplink::Htb | Uplink::Spring => "cubic",
        }
    }

    /// The words of `tidegate` that put it on the host, one command after the other.
    fn commands(self, testbed: &Testbed) -> Vec<Vec<String>> {
        let words = |text: String| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let scheme = if self.has_minimums() { "htb" } else { &self.to_string() };
        let mbit = |bit_s: u64| bit_s / MBIT;
        let mut commands = vec![words(format!(
            "limit add {UPLINK} --dev {} --scheme {scheme} --egress {}mbit",
            testbed.router_dev(),
            mbit(UPLINK_BIT_S)
        ))];
        for (at, guest) in GUESTS.iter().enumerate().filter(|_| self.has_minimums()) {
            let mut add = words(format!(
                "limit add {} --port {} --parent {UPLINK} --scheme htb --guarantee {}mbit",
                guest.name,
                testbed.router_dev_to(at),
                mbit(guest.minimum_bit_s)
            ));
            if self == Uplink::HtbEcn {
                add.extend(["--ecn".to_owned(), format!("{MARK_BYTES}b")]);
            }
            commands.push(add);
        }
        commands
    }
}

impl Experiment for MixedTenants {
    fn name(&self) -> &'static str {
        "mixed-tenants"
    }

    fn summary(&self) -> &'static str {
        "Two guests on an uplink of 1 Gbit/s, with minimums and borrowing in HTB's tree, and without in dem \
         and spring: who has what when one idles and comes back, and how long packets wait"
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Root, Need::Tidegate]
    }

    fn repeats(&self, quick: bool) -> u32 {
        if quick { 1 } else { 3 }
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let step = match (&self.tiny, ctx.quick) {
            (Some(_), _) => Duration::from_millis(800),
            (None, true) => Duration::from_secs(2),
            (None, false) => Duration::from_secs(5),
        };
        ctx.note(
            "Rates are on the wire behind the uplink, whole frames counted, from 0.4 s after the begin of a \
             step to shortly before its end. `busy` has 8 flows and a minimum of 300 Mbit/s, `buyer` 2 flows \
             and 600 Mbit/s. `back` is from the begin of the last step to the end of the first 20 ms over \
             which the buyer had 90 % of its minimum. Each guest is probed throughout.",
        );
        let (lab_binary, link) = (self.tiny.clone(), ctx.usual_link());
        let options =
            TestbedOptions { lab_binary, link, ..TestbedOptions::new(Topology::TwoReceivers) };
        let testbed = Testbed::new(options)?;
        ctx.alternate(&Uplink::ALL, ctx.repeats, |ctx, &uplink, run| {
            let seen = measure(ctx, &testbed, uplink, step)?;
            seen.record(ctx, uplink, run);
            if run == 1 {
                seen.figure(ctx, uplink);
            }
            Ok(())
        })?;
        let title = "Rates of the guests (bars), median round trip (diamonds)";
        ctx.bars("rates", BarsOf { title, metric: RATE, points: Some(P50) });
        claims(ctx);
        Ok(())
    }
}

/// What a run showed.
struct Seen {
    /// By guest: what it sent in each bin.
    bytes: [Vec<u64>; 2],
    /// By step and guest.
    probes: Vec<[ProbeReport; 2]>,
    /// The bins in which the first flow began, and those of a step.
    start: usize,
    step: usize,
    /// The bin in which the buyer was back.
    back: usize,
}

fn measure(
    ctx: &Context,
    testbed: &Testbed,
    uplink: Uplink,
    step: Duration,
) -> anyhow::Result<Seen> {
    let control = Control::get(uplink.cc())?;
    let guests = [testbed.receiver(BUSY), testbed.receiver(BUYER)];
    // Behind the uplink.
    let peer = testbed.sender();
    for host in [guests[BUSY], guests[BUYER], peer] {
        set_sysctl(host, "net.ipv4.tcp_ecn", if control.ecn { "1" } else { "0" })?;
    }
    let addr: IpAddr = testbed.sender_addr(Family::V4);
    let _server = rpc::start_server(testbed, peer, SocketAddr::new(addr, PORT))?;
    let probed = SocketAddr::new(addr, PROBE_PORT);
    let _echo = probe::start_server(testbed, peer, probed)?;
    let host = testbed.router().unwrap_or(peer);
    let mut store = Store::new(&ctx.tidegate, host)?;
    for command in uplink.commands(testbed) {
        store.tidegate(command)?;
    }

    let steps = STEPS.len() as u32;
    let bins = ((step * steps + MARGIN).as_nanos() / BIN.as_nanos()) as u32;
    let all: u16 = GUESTS.iter().map(|guest| guest.flows).sum();
    // The buyer's flows of the last step are others.
    let ports = FlowPorts { first: FIRST_PORT, count: all + GUESTS[BUYER].flows };
    let mut meter = WireMeter::attach_flows(peer, testbed.sender_dev(), bins, BIN, ports)?;
    meter.start()?;
    let plan =
        |from: u32, to: u32| FlowPlan { from: step * from, to: step * to, want: Want::Greedy };
    let plans = [
        vec![plan(0, steps); GUESTS[BUSY].flows.into()],
        [(0, 1), (2, steps)]
            .iter()
            .flat_map(|(from, to)| vec![plan(*from, *to); GUESTS[BUYER].flows.into()])
            .collect(),
    ];
    let firsts = [FIRST_PORT, FIRST_PORT + GUESTS[BUSY].flows];
    let args = plans.into_iter().zip(firsts).map(|(flows, first_port)| FlowsArgs {
        servers: vec![SocketAddr::new(addr, PORT)],
        first_port,
        cc: control.name().to_owned(),
        seed: ctx.links.seed,
        flows,
    });
    let args: Vec<FlowsArgs> = args.collect();
    let started = Instant::now();
    let clients = args.iter().zip(guests).map(|(args, guest)| flows::start(testbed, guest, args));
    let clients = clients.collect::<anyhow::Result<Vec<_>>>()?;
    let mut probes = Vec::new();
    for at in 0..steps {
        let due = started + step * at + SETTLED;
        pass_time(due.saturating_duration_since(Instant::now()))?;
        let args = probe::ClientArgs {
            may_lose_all: true,
            drain: DRAIN,
            ..probe::ClientArgs::new(probed, step - SETTLED - EARLY)
        };
        let [busy, buyer] =
            guests.map(|guest| Ok((probe::start_client(testbed, guest, args)?, args)));
        probes.push([busy, buyer].map(|started: anyhow::Result<_>| {
            let (client, args) = started?;
            probe::finish_client(client, args)
        }));
    }
    let probes = probes.into_iter().map(|[busy, buyer]| Ok([busy?, buyer?]));
    let probes = probes.collect::<anyhow::Result<Vec<_>>>()?;
    let times = clients.into_iter().zip(&args).map(|(client, args)| flows::finish(client, args));
    let times = times.collect::<anyhow::Result<Vec<_>>>()?;

    let bin_of = |ns: u64| (ns.saturating_sub(meter.started_ns()) / BIN.as_nanos() as u64) as usize;
    let flow_bins = meter.flow_bins()?;
    let sum = |flows: &[Vec<u64>]| -> Vec<u64> {
        (0..bins as usize).map(|at| flows.iter().map(|flow| flow[at]).sum()).collect()
    };
    let (busy, buyer) = flow_bins.split_at(GUESTS[BUSY].flows.into());
    let began = |guest: usize, from: usize| times[guest][from..].iter().map(|t| t.began_ns).min();
    Ok(Seen {
        bytes: [sum(busy), sum(buyer)],
        probes,
        start: bin_of(began(BUSY, 0).unwrap_or_default()),
        step: bins_in(step),
        back: bin_of(began(BUYER, GUESTS[BUYER].flows.into()).unwrap_or_default()),
    })
}

fn bins_in(time: Duration) -> usize {
    (time.as_nanos() / BIN.as_nanos()) as usize
}

/// The mean rate of some bins.
fn bit_s(bytes: &[u64]) -> f64 {
    bytes.iter().sum::<u64>() as f64 * 8.0 / (BIN.as_secs_f64() * bytes.len().max(1) as f64)
}

fn case_of(step: &str, guest: &Guest) -> Case {
    Case::new()
        .with("limit_bit_s", UPLINK_BIT_S)
        .with("step", step)
        .with("guest", guest.name)
        .with("minimum_bit_s", guest.minimum_bit_s)
}

fn step_case(step: &str) -> Case {
    Case::new().with("limit_bit_s", UPLINK_BIT_S).with("step", step)
}

impl Seen {
    fn record(&self, ctx: &mut Context, uplink: Uplink, run: u32) {
        for (at, (step, both)) in STEPS.into_iter().enumerate() {
            let from = self.start + self.step * at;
            let settled = from + bins_in(SETTLED)..from + self.step - bins_in(EARLY);
            let rates = [BUSY, BUYER]
                .map(|guest| bit_s(self.bytes[guest].get(settled.clone()).unwrap_or(&[])));
            let used = rates.iter().sum::<f64>() / UPLINK_BIT_S as f64 * 100.0;
            ctx.record(uplink, &step_case(step), run).value(USED, used);
            for (guest, of) in GUESTS.iter().enumerate() {
                let probe = &self.probes[at][guest];
                let mut record = ctx.record(uplink, &case_of(step, of), run);
                if both || guest == BUSY {
                    record = record.value(RATE, rates[guest]);
                }
                if probe.received > 0 {
                    record = record.value(P50, probe.rtt.p50_us).value(P99, probe.rtt.p99_us);
                }
                let _ = record;
            }
        }
        let minimum = GUESTS[BUYER].minimum_bit_s as f64 * BACK;
        let after = self.bytes[BUYER].get(self.back..).unwrap_or(&[]);
        let at = after.windows(BACK_BINS).take(self.step).position(|bins| bit_s(bins) >= minimum);
        // Never: longer than was looked.
        let took = BIN * at.map_or(self.step, |at| at + BACK_BINS) as u32;
        let case = case_of(STEPS[2].0, &GUESTS[BUYER]);
        ctx.record(uplink, &case, run).value(BACK_MS, took.as_secs_f64() * 1e3);
    }

    /// The rates of the guests over time.
    fn figure(&self, ctx: &mut Context, uplink: Uplink) {
        let series = GUESTS.iter().zip(&self.bytes).map(|(guest, bytes)| {
            let end = (self.start + self.step * STEPS.len()).min(bytes.len());
            let shown = bytes.get(self.start..end).unwrap_or(&[]);
            let rates: Vec<f64> = shown.chunks_exact(SHOWN).map(bit_s).collect();
            Series::every(guest.name, BIN.as_secs_f64() * SHOWN as f64, &rates)
        });
        let lines = Lines {
            title: format!("{uplink}: rates of the guests on the wire in bins of 50 ms"),
            x: "time_s".to_owned(),
            y: "wire_bit_s".to_owned(),
            logarithmic: false,
            limit: Some(UPLINK_BIT_S as f64),
            series: series.collect(),
        };
        ctx.figure(&format!("guests-{uplink}"), lines);
    }
}

fn claims(ctx: &mut Context) {
    let of = |ctx: &Context, system: &str, metric: &str, case: &Case| {
        ctx.median(system, metric, Some(case))
    };
    let [both, idles, back] = STEPS.map(|(step, _)| step);
    for system in ["htb", "htb-ecn"] {
        let mut says = Vec::new();
        let mut holds = true;
        for guest in &GUESTS {
            let Some(rate) = of(ctx, system, RATE, &case_of(both, guest)) else { continue };
            holds &= rate >= guest.minimum_bit_s as f64 * MINIMUM_LEAST;
            says.push(format!(
                "{} {:.0} of {} Mbit/s",
                guest.name,
                rate / 1e6,
                guest.minimum_bit_s / MBIT
            ));
        }
        if !says.is_empty() {
            let percent = MINIMUM_LEAST * 100.0;
            let claim =
                format!("{system}: each guest has {percent} % of its minimum while both send");
            ctx.claim(claim, holds, says.join(", "));
        }
        if let Some(took) = of(ctx, system, BACK_MS, &case_of(back, &GUESTS[BUYER])) {
            let claim = format!(
                "{system}: a guest that is back has 90 % of its minimum within {BACK_MOST_MS} ms"
            );
            ctx.claim(claim, took <= BACK_MOST_MS, format!("{took:.0} ms"));
        }
    }
    for system in Uplink::ALL.map(|uplink| uplink.to_string()) {
        if let Some(used) = of(ctx, &system, USED, &step_case(idles)) {
            let claim =
                format!("{system}: when one idles the other has {BORROWED_LEAST} % of the uplink");
            ctx.claim(claim, used >= BORROWED_LEAST, format!("{used:.1} %"));
        }
    }
    for system in ["dem", "spring"] {
        let case = case_of(both, &GUESTS[BUYER]);
        let (htb, us) = (of(ctx, "htb", P50, &case), of(ctx, system, P50, &case));
        if let (Some(htb), Some(us)) = (htb, us) {
            let claim =
                format!("{system}: median round trip of the buyer {HTB_TIMES_LEAST}x below htb's");
            let holds = htb >= us * HTB_TIMES_LEAST;
            ctx.claim(claim, holds, format!("{us:.0} µs, htb {htb:.0} µs"));
        }
    }
}
