//! `tidegate burst size`.

use std::{io::Write, process::ExitCode};

use anyhow::Result;
use serde::Serialize;
use tidegate_core::{
    Bytes, Rate,
    burst::{BurstySource, Path, Reason, Rule, bursty_source, goodput, recommend},
};

use super::percent;
use crate::{
    args::{SizeArgs, UdpSource},
    output::{self, Align, Column, Paint},
    refusal::UsageError,
};

const COLUMNS: [Column; 7] = [
    ("RULE", Align::Left),
    ("BURST", Align::Right),
    ("TIME", Align::Right),
    ("PACED", Align::Right),
    ("UNPACED", Align::Right),
    ("UDP", Align::Right),
    ("WHERE IT COMES FROM", Align::Left),
];
const UDP: usize = 5;
/// The line rate that is assumed.
const INTERFACE_BIT_S: u64 = 1_000_000_000;

#[derive(Serialize)]
struct Size {
    rate_bit_s: u64,
    rtt_ms: f64,
    flows: u32,
    congestion_control: String,
    interface_bit_s: u64,
    mtu_bytes: u32,
    bdp_packets: f64,
    bursts: Vec<Row>,
    recommended: Row,
}

/// A burst size and what it does.
#[derive(Serialize)]
struct Row {
    rule: String,
    burst_bytes: u64,
    burst_ms: f64,
    goodput_paced_bit_s: f64,
    goodput_unpaced_bit_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    udp_passed_bit_s: Option<u64>,
    why: String,
}

pub fn run(args: &SizeArgs) -> Result<ExitCode> {
    let interface = Rate::from_bit_s(INTERFACE_BIT_S).unwrap_or(args.rate).max(args.rate);
    let path = Path {
        rate: args.rate,
        rtt: args.rtt,
        flows: args.flows,
        cc: args.cc.into(),
        interface: args.interface.unwrap_or(interface),
        mtu: args.mtu,
    };
    if path.interface < path.rate {
        let (interface, rate) = (path.interface, path.rate);
        let text = format!(
            "--interface: {interface} is slower than the policer's {rate}, which then limits nothing"
        );
        return Err(UsageError(text).into());
    }
    if let Some(burst) = args.burst.iter().find(|burst| burst.0 < u64::from(path.mtu)) {
        let mtu = path.mtu;
        let text = format!(
            "--burst: no packet of {mtu} bytes passes a bucket of {burst}; write {mtu}b or more"
        );
        return Err(UsageError(text).into());
    }
    let row = |rule: &str, burst: Bytes, why: &str| row(&path, args.udp, rule, burst, why);
    let rules = Rule::ALL.iter().map(|rule| row(rule.name(), rule.burst(&path), rule.why(path.cc)));
    let given = args.burst.iter().map(|burst| row("--burst", *burst, "as given"));
    let mut bursts: Vec<Row> = rules.chain(given).collect::<Result<_>>()?;
    tell_what_is_too_deep(&mut bursts, path.rate);
    let best = recommend(&path);
    let why = match best.reason {
        Reason::Reaches => "the least with which unpaced flows reach 95 % of the rate",
        Reason::Least => "the least that Juniper allows is enough",
        Reason::TooLong => {
            "a quarter of a second, and not enough for unpaced flows: more is hardly a limit. Pace the \
             senders, or shape (`tidegate limit add`)"
        }
        Reason::Deepest => {
            "the deepest bucket that there is, and not enough for unpaced flows. Pace the senders, or shape \
             (`tidegate limit add`)"
        }
    };
    let recommended = row("recommended", best.burst, why)?;
    let size = Size {
        rate_bit_s: path.rate.bit_s(),
        rtt_ms: path.rtt.0 as f64 / 1e6,
        flows: path.flows,
        congestion_control: format!("{:?}", args.cc).to_lowercase(),
        interface_bit_s: path.interface.bit_s(),
        mtu_bytes: path.mtu,
        bdp_packets: path.bdp(),
        bursts,
        recommended,
    };
    let mut out = output::stdout();
    if args.look.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&size)?)?;
    } else {
        show(&mut out, &path, &size, args.udp.is_some())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Fast convergence of CUBIC makes a deeper bucket get less at times.
fn tell_what_is_too_deep(bursts: &mut [Row], rate: Rate) {
    let visible = rate.bit_s() as f64 / 1e3;
    for i in 0..bursts.len() {
        let deep = &bursts[i];
        let gets_more = |row: &Row| {
            row.burst_bytes < deep.burst_bytes
                && (row.goodput_paced_bit_s > deep.goodput_paced_bit_s + visible
                    || row.goodput_unpaced_bit_s > deep.goodput_unpaced_bit_s + visible)
        };
        if bursts.iter().any(gets_more) {
            bursts[i].why += "; a shallower one gets more";
        }
    }
}

fn row(path: &Path, udp: Option<UdpSource>, rule: &str, burst: Bytes, why: &str) -> Result<Row> {
    let share = goodput(path, burst);
    let rate = path.rate.bit_s() as f64;
    let passed = udp.map(|udp| {
        let source = BurstySource {
            burst: udp.burst,
            period: udp.period,
            packet: path.mtu,
            line: path.interface,
        };
        bursty_source(path.rate, burst, &source).map(|passed| passed.rate_bit_s)
    });
    // A rule may give more than a bucket holds; what was typed may not.
    let passed = match passed {
        Some(Err(error)) if rule == "--burst" => {
            return Err(UsageError(format!("--burst: {error}")).into());
        }
        passed => passed.and_then(|passed| passed.ok()),
    };
    Ok(Row {
        rule: rule.to_owned(),
        burst_bytes: burst.0,
        burst_ms: path.rate.time_for(burst).0 as f64 / 1e6,
        goodput_paced_bit_s: share.paced * rate,
        goodput_unpaced_bit_s: share.unpaced * rate,
        udp_passed_bit_s: passed,
        why: why.to_owned(),
    })
}

fn show(out: &mut impl Write, path: &Path, size: &Size, udp: bool) -> Result<()> {
    writeln!(
        out,
        "A policer of {} for {} {} flow{} with a round trip of {}, packets of {} bytes at {}: \
         a bandwidth-delay product of {:.1} packets ({}).\n",
        path.rate,
        path.flows,
        size.congestion_control,
        if path.flows == 1 { "" } else { "s" },
        path.rtt,
        path.mtu,
        path.interface,
        path.bdp(),
        output::size((path.bdp() * f64::from(path.mtu)) as u64),
    )?;
    let share = |goodput: f64| percent(goodput / path.rate.bit_s() as f64);
    let cells = |row: &Row| {
        vec![
            row.rule.clone(),
            output::size(row.burst_bytes),
            output::time((row.burst_ms * 1e6) as i64),
            share(row.goodput_paced_bit_s),
            share(row.goodput_unpaced_bit_s),
            row.udp_passed_bit_s.map_or_else(|| "-".to_owned(), output::rate),
            row.why.clone(),
        ]
    };
    let without = |mut cells: Vec<String>| {
        if !udp {
            cells.remove(UDP);
        }
        cells
    };
    let mut columns = COLUMNS.to_vec();
    if !udp {
        columns.remove(UDP);
    }
    let rows: Vec<Vec<String>> = size.bursts.iter().map(|row| without(cells(row))).collect();
    output::table(out, Paint::stdout(), &columns, &rows)?;
    let best = &size.recommended;
    let recommended = format!(
        "Recommended: {} ({}), {} paced, {} unpaced: {}.",
        output::size(best.burst_bytes),
        output::time((best.burst_ms * 1e6) as i64),
        share(best.goodput_paced_bit_s),
        share(best.goodput_unpaced_bit_s),
        best.why,
    );
    writeln!(out, "\n{}", Paint::stdout().bold(&recommended))?;
    Ok(())
}
