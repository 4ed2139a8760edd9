//! `drl-cost`: what one limit over many hosts costs: the gate in the kernel beside a relay in user space that
//! does the same ([`crate::tools::relay`]), and what daemons tell each other.

use std::{
    fmt,
    net::{SocketAddr, UdpSocket},
    path::PathBuf,
    time::Duration,
};

use anyhow::Context as _;
use tidegate_core::Rate;
use tidegate_instruments::cost::{Asked, Program, QueueState};
use tidegate_sys::net::NetNs;

use super::{
    OVERHEAD, RTT,
    baseline::{LIMIT_BIT_S, SETUPS, Setup},
    daemons::Daemons,
    fleet::{self, Flow},
};
use crate::{
    chart::BarsOf,
    context::Context,
    experiment::Experiment,
    experiments::{
        cpu::PathMeter,
        policers::{Depth, FRAME_BYTES, Policer, Road},
        program_cost::net_cost,
    },
    host::Need,
    report::Case,
    stop::Skip,
    testbed::{Child, Family, Testbed, command},
    tools::{
        relay::{self, RelayArgs},
        udp::{self, SourceArgs},
    },
};

const SECOND: Duration = Duration::from_secs(1);
/// Packets leave in bursts so often: a source that sleeps between shows what the path costs.
const PERIOD: Duration = Duration::from_millis(1);
const PACKETS_S: [u64; 2] = [5_000, 20_000];
const PAYLOAD_BYTES: usize = 1472;
const PORT: u16 = 7003;
/// So fast that nothing is dropped, which would spare the rest of the path.
const RATE_BIT_S: u64 = 10_000_000_000;
const BURST_BYTES: u64 = 2_000_000;
/// From the first packet until processes and caches are warm.
const WARM: Duration = Duration::from_millis(500);
const COMMAND: Duration = Duration::from_secs(30);
/// How much dearer a relay is to be.
const TIMES: f64 = 20.0;
/// What may be told, of the limit.
const TOLD_PERCENT: f64 = 3.0;
/// The paper's messages: 48 bytes, 20 times a second, to three peers at most.
const PUBLISHED_BIT_S: f64 = 48.0 * 8.0 * 20.0;
const PUBLISHED_PEERS: usize = 3;

const PROGRAM: &str = "program_ns";
const CPU: &str = "cpu_ns_per_packet";
const PASSED: &str = "passed_percent";
const GOSSIP: &str = "gossip_per_host_bit_s";
/// Which of our programs a packet costs what.
const PROGRAMS: [(&str, Program); 2] =
    [("police", Program::Police), ("police, flow counted", Program::Grouped(Asked::KnownFlow))];

/// What decides on the router.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Limiter {
    Nothing,
    Police,
    Relay,
}

impl fmt::Display for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Limiter::Nothing => "forwarding alone",
            Limiter::Police => "police",
            Limiter::Relay => "relay",
        })
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct DrlCost {
    tiny: Option<PathBuf>,
}

impl DrlCost {
    /// One rate, two hosts, seconds; the lab's tools run from `lab_binary`.
    pub fn tiny(lab_binary: PathBuf) -> DrlCost {
        DrlCost { tiny: Some(lab_binary) }
    }
}

impl Experiment for DrlCost {
    fn name(&self) -> &'static str {
        "drl-cost"
    }

    fn summary(&self) -> &'static str {
        "What a packet costs in the gate and in a relay in user space, and what daemons tell each other"
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
        let (runs, lasts, rates, hosts): (_, _, &[u64], &[u8]) = match (&self.tiny, ctx.quick) {
            (Some(_), _) => (20_000, SECOND * 2, &PACKETS_S[..1], &[2]),
            (_, true) => (200_000, SECOND * 5, &PACKETS_S, &[2, 4, 7, 10]),
            _ => (2_000_000, SECOND * 10, &PACKETS_S, &[2, 3, 4, 5, 6, 7, 8, 9, 10]),
        };
        ctx.note(
            "`program` is the run time of the policer's program for a full frame, by the kernel's \
             statistics, less that of the empty program; the bucket is neither full nor empty. `relay` \
             takes each packet from an NFQUEUE, its headers alone, decides by the same bucket and \
             counters of flows, and returns a verdict. CPU time of a packet is that of the whole path, \
             source and softirqs and relay; what a limiter costs is the difference to the path that \
             forwards alone. The clock of processes counts in 10 ms: of a run of 5 s at 20 000 packets a \
             second that is 0.1 us a packet. Gossip is all that routers send besides flows, a greedy flow \
             at each: frames with all headers, membership and reports included. The published figure is \
             48 bytes 20 times a second to each of three peers at most.",
        );
        let program = Case::new().with("in", "program");
        ctx.alternate(&PROGRAMS.map(|(name, _)| name), ctx.repeats, |ctx, name, run| {
            let found = PROGRAMS.iter().find(|(known, _)| known == name);
            let (_, asked) = found.context("no such program")?;
            let cost = net_cost(*asked, QueueState::Busy, &[0], runs)?;
            ctx.record(name, &program, run).value(PROGRAM, cost);
            Ok(())
        })?;
        self.measure_paths(ctx, rates, lasts)?;
        for &count in hosts {
            self.measure_gossip(ctx, count, lasts)?;
        }
        ctx.bars(
            "cpu",
            BarsOf { title: "CPU time of a packet on its path", metric: CPU, points: None },
        );
        let gossip = BarsOf { title: "What a host tells the others", metric: GOSSIP, points: None };
        ctx.bars("gossip", gossip);
        claims(ctx, rates, hosts);
        Ok(())
    }
}

fn path_case(packets_s: u64) -> Case {
    Case::new().with("in", "path").with("packets_per_ms", packets_s as f64 / 1e3)
}

fn hosts_case(hosts: u8) -> Case {
    Case::new().with("limit_bit_s", LIMIT_BIT_S).with("hosts", hosts)
}

impl DrlCost {
    fn measure_paths(
        &self,
        ctx: &mut Context,
        rates: &[u64],
        lasts: Duration,
    ) -> anyhow::Result<()> {
        let mut road = Road::new(self.tiny.clone(), Vec::new())?;
        for &packets_s in rates {
            let limiters = [Limiter::Nothing, Limiter::Police, Limiter::Relay];
            ctx.alternate(&limiters, ctx.repeats, |ctx, &limiter, run| {
                let (cpu_ns, passed) = path(ctx, &mut road, limiter, packets_s, lasts)?;
                let record = ctx.record(limiter, &path_case(packets_s), run);
                let _ = record.value(CPU, cpu_ns).value(PASSED, passed);
                Ok(())
            })?;
        }
        Ok(())
    }

    fn measure_gossip(&self, ctx: &mut Context, hosts: u8, lasts: Duration) -> anyhow::Result<()> {
        let sites = fleet::sites(ctx, hosts, RTT, self.tiny.clone())?;
        ctx.alternate(&gossips(), ctx.repeats, |ctx, &setup, run| {
            let count = sites.count();
            let mut daemons = Daemons::start(ctx, &sites, setup.plan(count), count)?;
            let flow = |site| Flow { site, limiter: site, from: Duration::ZERO, to: lasts };
            let plan: Vec<Flow> = (0..count).map(flow).collect();
            let ran = fleet::run(&sites, &mut daemons, &plan, LIMIT_BIT_S, |_| Ok(()))?;
            let bit_s = ran.overhead_percent / 100.0 * LIMIT_BIT_S as f64 / count as f64;
            let peers = PUBLISHED_PEERS.min(count - 1) as f64;
            let published = (setup.name == "fps").then_some(PUBLISHED_BIT_S * peers);
            let record = ctx.record(setup, &hosts_case(hosts), run);
            let record = record.beside(GOSSIP, bit_s, published);
            let _ = record.value(OVERHEAD, ran.overhead_percent);
            Ok(())
        })
    }
}

/// Those that tell each other something, `gtb` and `grd` as much as `fps`.
fn gossips() -> Vec<Setup> {
    SETUPS.into_iter().filter(|setup| ["fps", "share"].contains(&setup.name)).collect()
}

/// CPU time of a packet on its path, in nanoseconds, and how many of all arrived, in percent.
fn path(
    ctx: &Context,
    road: &mut Road,
    limiter: Limiter,
    packets_s: u64,
    lasts: Duration,
) -> anyhow::Result<(f64, f64)> {
    let per_period = packets_s * PERIOD.as_nanos() as u64 / 1_000_000_000;
    road.start_meters()?;
    let testbed = &road.testbed;
    let router = testbed.router().context("there is no router")?;
    let rate = Rate::from_bit_s(RATE_BIT_S).context("a rate of zero")?;
    let policed = match limiter {
        Limiter::Police => {
            Some(Policer::Police.apply(ctx, testbed, rate, Depth::Bytes(BURST_BYTES))?)
        }
        _ => None,
    };
    let relay = match limiter {
        Limiter::Relay => Some(Queued::start(testbed, router, rate)?),
        _ => None,
    };
    let to = SocketAddr::new(testbed.addr(0, Family::V4), PORT);
    // Nobody reads it: what it cannot take is dropped after all that is measured.
    let _sink = testbed.receiver(0).run(|| UdpSocket::bind(to))??;
    let args = SourceArgs {
        to,
        payload_bytes: PAYLOAD_BYTES,
        burst_datagrams: per_period as u32,
        period_ns: PERIOD.as_nanos() as u64,
        gap_ns: 0,
        bursts: ((lasts + WARM * 3).as_nanos() / PERIOD.as_nanos()) as u64,
    };
    let source = udp::start(testbed, testbed.sender(), args)?;
    let processes = [Some(source.pid()), relay.as_ref().map(|queued| queued.relay.pid())];
    let meter = PathMeter::attach(processes.into_iter().flatten().collect())?;
    std::thread::sleep(WARM);
    let before = meter.read()?;
    std::thread::sleep(lasts);
    let spent = meter.read()?.since(&before);
    udp::finish(source, args)?;
    let wires = road.wires()?;
    drop((policed, relay));
    // The meters have run a little longer than the source.
    let arrived = wires.first().and_then(|wire| wire.mean_bit_s(WARM * 2, lasts));
    let arrived = arrived.context("nothing arrived")?;
    let sent = (packets_s * FRAME_BYTES * 8) as f64;
    Ok((spent.total() * 1e9 / packets_s as f64, arrived / sent * 100.0))
}

/// A relay, and the rule that gives it the packets.
struct Queued<'a> {
    router: &'a NetNs,
    dev: &'a str,
    relay: Child,
}

impl<'a> Queued<'a> {
    fn start(testbed: &'a Testbed, router: &'a NetNs, rate: Rate) -> anyhow::Result<Queued<'a>> {
        if crate::host::which("iptables".as_ref()).is_none() {
            let why = "needs `iptables`, which is not in PATH: install it";
            return Err(Skip(why.to_owned()).into());
        }
        let dev = testbed.router_dev();
        let args = RelayArgs { queue: 0, rate, burst_bytes: BURST_BYTES };
        let relay = relay::start(testbed.lab_binary(), router, args)?;
        rule(router, "-A", dev).map_err(|error| Skip(format!("this kernel cannot: {error:#}")))?;
        Ok(Queued { router, dev, relay })
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        // It would go with its host, too.
        if let Err(error) = rule(self.router, "-D", self.dev) {
            eprintln!("warning: a rule stays in {}: {error:#}", self.router.name());
        }
    }
}

/// What is forwarded from a device goes to queue 0.
fn rule(router: &NetNs, verb: &str, dev: &str) -> anyhow::Result<()> {
    let mut iptables = command(router, "iptables")?;
    iptables.args(["-w", "-t", "mangle", verb, "FORWARD", "-i", dev]);
    iptables.args(["-j", "NFQUEUE", "--queue-num", "0"]);
    Child::spawn(iptables)?.finish(COMMAND).map(drop)
}

fn claims(ctx: &mut Context, rates: &[u64], hosts: &[u8]) {
    let program = Case::new().with("in", "program");
    for &packets_s in rates {
        let case = path_case(packets_s);
        let median =
            |ctx: &Context, limiter: Limiter| ctx.median(&limiter.to_string(), CPU, Some(&case));
        let paths = (median(ctx, Limiter::Relay), median(ctx, Limiter::Nothing));
        let (Some(relay), Some(nothing)) = paths else { continue };
        for (name, _) in PROGRAMS {
            let Some(ours) = ctx.median(name, PROGRAM, Some(&program)) else { continue };
            let theirs = relay - nothing;
            ctx.claim(
                format!("{name}: at least {TIMES} times below the relay, at {packets_s} packets/s"),
                theirs >= TIMES * ours,
                format!("{ours:.0} ns against {theirs:.0} ns: {:.0} times", theirs / ours),
            );
        }
    }
    for setup in gossips() {
        let of = |count: &u8| ctx.median(setup.name, OVERHEAD, Some(&hosts_case(*count)));
        let told: Vec<(u8, f64)> =
            hosts.iter().filter_map(|count| Some((*count, of(count)?))).collect();
        if told.is_empty() {
            continue;
        }
        let measured: Vec<String> =
            told.iter().map(|(count, percent)| format!("{count}: {percent:.2} %")).collect();
        ctx.claim(
            format!(
                "{}: hosts tell each other less than {TOLD_PERCENT} % of 10 Mbit/s",
                setup.name
            ),
            told.iter().all(|(_, percent)| *percent < TOLD_PERCENT),
            measured.join(", "),
        );
    }
}
