//! Sample figures of every kind, to look at after a change to the charts:
//! `cargo run -p tidegate-lab --example gallery -- DIR`.

use std::path::PathBuf;

use anyhow::Context as _;
use tidegate_lab::chart::{Bars, BarsOf, Cdf, Figure, Lines, Palette, Series};
use tidegate_lab::report::{Case, Row};
use tidegate_lab::stats;

const SYSTEMS: [&str; 6] = ["unlimited", "htb", "tbf", "nrm-paper", "nrm", "pace"];

fn main() -> anyhow::Result<()> {
    let dir = PathBuf::from(std::env::args_os().nth(1).context("say where: gallery DIR")?);
    std::fs::create_dir_all(&dir)?;
    let rows = rows();
    let some = |systems: &[&str], flows: &[u64]| -> Vec<Row> {
        let flows: Vec<_> = flows.iter().map(|n| serde_json::json!(n)).collect();
        let wanted = |row: &&Row| {
            systems.contains(&row.system.as_str()) && flows.contains(&row.case.0["flows"])
        };
        rows.iter().filter(wanted).cloned().collect()
    };
    let bars = |rows: &[Row], title, points| -> Figure {
        Bars::from_rows(rows, BarsOf { title, metric: "goodput_bit_s", points }).into()
    };
    let figures: [(&str, Figure); 7] = [
        (
            "rate-over-delay",
            bars(&rows, "What a limit delivers, and the delay it costs", Some("rtt_p50_us")),
        ),
        ("few", bars(&some(&["htb", "pace"], &[1, 9]), "Goodput at each limit", None)),
        ("one", bars(&some(&["htb"], &[1])[..6], "A single bar", None)),
        (
            "many",
            bars(
                &many(),
                "Five gigabit, ten to a thousand flows, and a title so long that it does not fit on \
                 one line of the figure",
                None,
            ),
        ),
        ("time", time().into()),
        ("rtt", rtt().into()),
        ("narrow", Cdf { title: "Within one decade".into(), ..narrow() }.into()),
    ];
    for (name, figure) in figures {
        std::fs::write(dir.join(format!("{name}.svg")), figure.svg(&Palette::default())?)?;
    }
    Ok(())
}

/// Repeatable noise from -1 to 1.
fn noise(seed: u64) -> f64 {
    let mixed = seed
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .rotate_left(29)
        .wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (mixed >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut seed = 0;
    for (limit_bit_s, flows) in [(200e6, 1), (200e6, 9), (1e9, 1), (1e9, 9), (5e9, 9)] {
        let case =
            Case::new().with("limit_bit_s", limit_bit_s).with("flows", flows).with("cc", "cubic");
        for run in 1..=5 {
            for (at, system) in SYSTEMS.into_iter().enumerate() {
                seed += 1;
                let share = [38e9 / limit_bit_s, 0.95, 0.93, 0.86, 0.97, 0.99][at];
                let rtt_us = [45.0, 126_000.0, 31_000.0, 105.0, 62.0, 31.0][at];
                let goodput = limit_bit_s * share * (1.0 + noise(seed) * 0.03);
                let published = (*system == *"nrm-paper").then_some(limit_bit_s * 0.904);
                for (metric, value, published) in [
                    ("goodput_bit_s", goodput, published),
                    ("rtt_p50_us", rtt_us * (1.0 + noise(seed + 99) * 0.1), None),
                ] {
                    let (system, metric) = (system.to_owned(), metric.to_owned());
                    rows.push(Row { system, case: case.clone(), metric, run, value, published });
                }
            }
        }
    }
    rows
}

fn many() -> Vec<Row> {
    let mut rows = Vec::new();
    for flows in [10, 20, 50, 100, 200, 300, 400, 500, 750, 1000] {
        for cc in ["cubic", "bbr"] {
            for (at, system) in ["htb", "fq", "carousel", "stranger"].into_iter().enumerate() {
                let value =
                    5e9 * [0.95, 0.8, 0.99, 0.9][at] * (1.0 + noise(flows + at as u64) * 0.02);
                let case = Case::new().with("flows", flows).with("cc", cc);
                let (system, metric) = (system.to_owned(), "goodput_bit_s".to_owned());
                rows.push(Row { system, case, metric, run: 1, value, published: None });
            }
        }
    }
    rows
}

fn time() -> Lines {
    let bins = |seed: u64, base: f64, swing: f64| -> Vec<f64> {
        (0..100).map(|at| base + swing * noise(seed * 1000 + at)).collect()
    };
    Lines {
        title: "Rate on the wire in bins of 100 ms, nine CUBIC flows".into(),
        x: "time_s".into(),
        y: "wire_rate_bit_s".into(),
        logarithmic: false,
        limit: Some(1e9),
        series: vec![
            Series::every("nrm-paper", 0.1, &bins(1, 0.86e9, 0.1e9)),
            Series::every("htb", 0.1, &bins(2, 0.957e9, 0.02e9)),
            Series::every("pace", 0.1, &bins(3, 0.992e9, 0.002e9)),
        ],
    }
}

fn rtt() -> Cdf {
    let samples = |seed: u64, base: f64| -> Vec<f64> {
        (0..2000).map(|at| base * (1.0 + noise(seed * 10_000 + at)).powi(2) + base * 0.3).collect()
    };
    let systems = [("unlimited", 40.0), ("htb", 120_000.0), ("nrm", 70.0), ("pace", 28.0)];
    let series = systems.iter().enumerate();
    let series = series.map(|(at, (system, base))| {
        Series::new(*system, stats::cdf(&samples(at as u64 + 1, *base)))
    });
    Cdf {
        title: "Round trip of open-loop probes at 1 Gbit/s".into(),
        metric: "rtt_us".into(),
        series: series.collect(),
    }
}

fn narrow() -> Cdf {
    let series = Series::new("pace", stats::cdf(&[30.0, 31.0, 31.5, 33.0, 35.0, 44.0, 70.0]));
    Cdf { title: String::new(), metric: "rtt_us".into(), series: vec![series] }
}
