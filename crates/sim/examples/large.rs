//! The larger claims in simulation: a new flow, a killed member, 490 and 10 000 limiters.
//!
//!     cargo run --release -p tidegate-sim --example large [RUNS]

use tidegate_core::{Nanos, Rate, fleet::level::Want};
use tidegate_sim::{
    faults::{Fleet, FleetOptions, share_options},
    measure::{jain, median},
    net::NetOptions,
    random::Random,
    world::{Scheme, World, WorldOptions},
};

const SECOND: u64 = 1_000_000_000;

fn main() {
    let runs = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(10);
    new_flow(runs);
    killed(runs);
    figure_8();
    ten_thousand();
}

/// An eleventh flow comes to the limiter of three after 10 s: when its mean over 1 s first is 90 % of a
/// tenth, and when the limiter's part is.
fn new_flow(runs: u64) {
    for scheme in [Scheme::Fps, Scheme::FpsShaped, Scheme::Share] {
        for host in [0, 2] {
            let (mut flow_took, mut part_took) = (vec![], vec![]);
            for seed in 0..runs {
                let mut options = WorldOptions::baseline(seed, scheme, Nanos(40 * SECOND));
                options.hosts = 3;
                options.branches = 2;
                options.share = share_options(3, 3);
                options.add_flows(host, 1, Nanos(10 * SECOND));
                let fair = options.limit.bit_s() as f64 / 11.0;
                let flows_there = if host == 0 { 4.0 } else { 1.0 };
                let mut world = World::new(options);
                let mut part = None;
                for step in 200..800u64 {
                    world.run_until(Nanos(step * SECOND / 20));
                    if part.is_none() && world.local_limit(host) >= 0.9 * fair * flows_there {
                        part = Some(step as f64 / 20.0 - 10.1);
                    }
                }
                part_took.push(part.unwrap_or(f64::INFINITY));
                let flow = world.flows().last().expect("the new one");
                let took = (0..560)
                    .map(|step| 10 * SECOND + step * SECOND / 20)
                    .find(|at| flow.rate(Nanos(*at), Nanos(at + SECOND)) >= 0.9 * fair);
                flow_took.push(took.map_or(f64::INFINITY, |at| at as f64 / 1e9 + 1.0 - 10.1));
            }
            let worst = |took: &[f64]| took.iter().copied().fold(0.0, f64::max);
            println!(
                "new flow at host {host}, {scheme:?}: its limiter's part after {:.2} s (worst {:.2}), \
                 90 % of a fair rate over 1 s by {:.2} s (worst {:.2})",
                median(&part_took),
                worst(&part_took),
                median(&flow_took),
                worst(&flow_took)
            );
        }
    }
}

/// One of five members is killed after 10 s: when the others pass 98 % of the limit again, and at worst how
/// much was passed in a second.
fn killed(runs: u64) {
    for victim in [0, 4] {
        let (mut took, mut most) = (vec![], 0.0f64);
        for seed in 0..runs {
            let mut options = WorldOptions::baseline(seed, Scheme::Share, Nanos(30 * SECOND));
            options.hosts = 5;
            options.share = share_options(3, 5);
            for host in 2..5 {
                options.add_flows(host, 4, Nanos(0));
            }
            let limit = options.limit.bit_s() as f64;
            let mut world = World::new(options);
            world.run_until(Nanos(10 * SECOND));
            world.kill(victim);
            world.run_until(Nanos(30 * SECOND));
            let total = world.total();
            let back = (0..300).map(|step| 10 * SECOND + step * SECOND / 20).find(|at| {
                let later =
                    |from: u64| total.rate(Nanos(from), Nanos(from + SECOND)) >= 0.98 * limit;
                *at > 10 * SECOND + SECOND / 5 && later(*at)
            });
            took.push(back.map_or(f64::INFINITY, |at| at as f64 / 1e9 - 10.0));
            let all = total.extremes(Nanos(2 * SECOND), Nanos(30 * SECOND), Nanos(SECOND));
            most = most.max(all.1 / limit);
        }
        println!(
            "member {victim} of 5 killed: 98 % of the limit in use again after {:.2} s (worst {:.2}); \
             never above {most:.3}",
            median(&took),
            took.iter().copied().fold(0.0, f64::max)
        );
    }
}

/// Figure 8: 50 Mbit/s, up to 490 limiters and 1249 flows over them.
fn figure_8() {
    println!("limiters  scheme      Mbit/s  Jain   1 s: least  most   overhead");
    for hosts in [7usize, 70, 490] {
        let cases = [
            (Scheme::Ctb, false),
            (Scheme::Fps, false),
            (Scheme::Fps, true),
            (Scheme::FpsShaped, false),
            (Scheme::Share, false),
        ];
        for (scheme, push_sum) in cases {
            let mut options = WorldOptions::baseline(1, scheme, Nanos(60 * SECOND));
            options.hosts = hosts;
            options.limit = Rate::from_bit_s(50_000_000).expect("not zero");
            options.flows.clear();
            let mut random = Random::new(8);
            for flow in 0..1_249 {
                let host = if flow < hosts { flow } else { random.below(hosts as u64) as usize };
                options.add_flows(host, 1, random.time(Nanos(SECOND)));
            }
            options.interval = Nanos(SECOND / 2);
            options.branches = if push_sum { 1 } else { 3 };
            options.push_sum = push_sum;
            options.depth = tidegate_core::Bytes(75_000);
            options.share = share_options(3, hosts as u32);
            options.share.limit = options.limit;
            options.share.interval = Nanos(650_000_000);
            options.share.lease = Nanos(2_500_000_000);
            options.share.suspect = Nanos(2_500_000_000);
            let limit = options.limit.bit_s() as f64;
            let world = World::new(options).finished();
            let rates = world.rates(Nanos(20 * SECOND));
            let (least, most) =
                world.total().extremes(Nanos(20 * SECOND), Nanos(60 * SECOND), Nanos(SECOND));
            println!(
                "{hosts:8}  {:<10}  {:6.2}  {:.3}  {:11.3} {:5.3}  {:6.2}%",
                format!("{scheme:?}{}", if push_sum { "/sum" } else { "" }),
                rates.iter().sum::<f64>() / 1e6,
                jain(&rates),
                least / limit,
                most / limit,
                world.overhead() * 100.0
            );
        }
    }
}

/// 10 000 members of `share`, 10 Gbit/s, 1 % loss, a tenth of them killed after 20 s.
fn ten_thousand() {
    let members = 10_000usize;
    let mut share = share_options(5, members as u32);
    share.limit = Rate::from_bit_s(10_000_000_000).expect("not zero");
    share.interval = Nanos(SECOND);
    share.lease = Nanos(4 * SECOND);
    share.suspect = Nanos(4 * SECOND);
    let net = NetOptions { loss: 0.01, duplicate: 0.01, ..NetOptions::default() };
    let limit = share.limit.bit_s() as f64;
    let mut fleet = Fleet::new(FleetOptions { seed: 1, members, net, share });
    for host in 0..members {
        let flows = fleet.random().below(10) as f32;
        fleet.set_want(host, Want { flows, demand_bit_s: u64::MAX });
    }
    for second in [2u64, 5, 10, 20] {
        fleet.run_until(Nanos(second * SECOND));
        println!(
            "10 000 members: {:.4} of the limit in use after {second} s",
            fleet.in_use() as f64 / limit
        );
    }
    (0..1_000).for_each(|host| fleet.kill(9 * host + 9));
    for second in [24u64, 30, 40] {
        fleet.run_until(Nanos(second * SECOND));
        println!(
            "1000 killed at 20 s: {:.4} in use after {second} s",
            fleet.in_use() as f64 / limit
        );
    }
    let (bytes, messages) = fleet.sent();
    println!(
        "limit broken: {:?}; {:.3} % overhead, {messages} messages",
        fleet.breach(),
        bytes as f64 * 8.0 / 40.0 / limit * 100.0
    );
}
