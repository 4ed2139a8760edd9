//! Cloud Control's baseline in simulation: rates, fairness and the limit, of each scheme.
//!
//!     cargo run --release -p tidegate-sim --example baseline [RUNS] [SECONDS] [FLOWS OF THE FIRST, OF TEN]

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
    let first = number(3).min(10) as usize;
    let schemes =
        [Scheme::Ctb, Scheme::Gtb, Scheme::Grd, Scheme::Fps, Scheme::FpsShaped, Scheme::Share];
    println!(
        "scheme        first   second  total  Jain min/median/max    1 s: least  most  drops  overhead"
    );
    for scheme in schemes {
        let (mut fair, mut three, mut seven, mut total) = (vec![], vec![], vec![], vec![]);
        let (mut least, mut most, mut drops, mut overhead) = (f64::MAX, 0.0f64, vec![], 0.0);
        let mut peaks = vec![];
        for seed in 0..runs {
            let lasts = Nanos(seconds * SECOND);
            let options = WorldOptions::two_limiters(seed, scheme, lasts, [first, 10 - first]);
            let limit = options.limit.bit_s() as f64;
            let world = World::new(options).finished();
            let rates = world.rates(Nanos(2 * SECOND));
            fair.push(jain(&rates));
            three.push(rates[..first].iter().sum::<f64>() / 1e6);
            seven.push(rates[first..].iter().sum::<f64>() / 1e6);
            total.push(rates.iter().sum::<f64>() / 1e6);
            let (low, high) =
                world.total().extremes(Nanos(2 * SECOND), Nanos(seconds * SECOND), Nanos(SECOND));
            (least, most) = (least.min(low / limit), most.max(high / limit));
            // The highest 200 ms at the start.
            let start = world.total().extremes(Nanos(0), Nanos(2 * SECOND), Nanos(SECOND / 5));
            peaks.push(start.1 / limit);
            drops.push(world.drops() * 100.0);
            overhead = world.overhead() * 100.0;
        }
        let (min, max) = fair.iter().fold((1.0f64, 0.0f64), |(a, b), f| (a.min(*f), b.max(*f)));
        println!(
            "{:<10}  {:7.2}  {:7.2}  {:5.2}  {min:.3} / {:.3} / {max:.3}  {:11.3} {most:5.3} {:10.2} \
             {:5.1}% {overhead:8.2}%",
            format!("{scheme:?}"),
            median(&three),
            median(&seven),
            median(&total),
            median(&fair),
            least,
            median(&peaks),
            median(&drops),
        );
    }
}
