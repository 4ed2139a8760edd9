//! Cloud Control's baseline in simulation: rates, fairness and the limit, of each scheme.
//!
//!     cargo run --release -p tidegate-sim --example baseline [RUNS] [SECONDS]

use tidegate_core::Nanos;
use tidegate_sim::{
    measure::{jain, median},
    world::{Scheme, World, WorldOptions},
};

const SECOND: u64 = 1_000_000_000;

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default: u64| args.next().and_then(|a| a.parse().ok()).unwrap_or(default);
    let (runs, seconds) = (number(10), number(60));
    let schemes =
        [Scheme::Ctb, Scheme::Gtb, Scheme::Grd, Scheme::Fps, Scheme::FpsShaped, Scheme::Share];
    println!(
        "scheme      3 flows  7 flows  total  Jain min/median/max    1 s: least  most  drops  overhead"
    );
    for scheme in schemes {
        let (mut fair, mut three, mut seven, mut total) = (vec![], vec![], vec![], vec![]);
        let (mut least, mut most, mut drops, mut overhead) = (f64::MAX, 0.0f64, vec![], 0.0);
        for seed in 0..runs {
            let options = WorldOptions::baseline(seed, scheme, Nanos(seconds * SECOND));
            let limit = options.limit.bit_s() as f64;
            let world = World::new(options).finished();
            let rates = world.rates(Nanos(2 * SECOND));
            fair.push(jain(&rates));
            three.push(rates[..3].iter().sum::<f64>() / 1e6);
            seven.push(rates[3..].iter().sum::<f64>() / 1e6);
            total.push(rates.iter().sum::<f64>() / 1e6);
            let (low, high) =
                world.total().extremes(Nanos(2 * SECOND), Nanos(seconds * SECOND), Nanos(SECOND));
            (least, most) = (least.min(low / limit), most.max(high / limit));
            drops.push(world.drops() * 100.0);
            overhead = world.overhead() * 100.0;
        }
        let (min, max) = fair.iter().fold((1.0f64, 0.0f64), |(a, b), f| (a.min(*f), b.max(*f)));
        println!(
            "{:<10}  {:7.2}  {:7.2}  {:5.2}  {min:.3} / {:.3} / {max:.3}  {:11.3} {most:5.3} {:5.1}% {overhead:8.2}%",
            format!("{scheme:?}"),
            median(&three),
            median(&seven),
            median(&total),
            median(&fair),
            least,
            median(&drops),
        );
    }
}
