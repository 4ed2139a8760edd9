//! Judges labelled captures: how many policed flows `tidegate burst analyze` finds, and what it calls the
//! others.
//!
//!     cargo run --release -p tidegate-capture --example labelled -- [training|held-out|all] [CASES] [PART]
//!
//!     cargo run --release -p tidegate-capture --example labelled -- files FILE...
//!
//! FILEs are captures that `scripts/vm.sh captures` made: their names begin with what the flows met.
//! CASES are those below that number (2000), or `FIRST..END`; PART is a part of a case's name: only those
//! run, and are shown.

#[path = "../tests/captures/mod.rs"]
mod captures;
#[path = "../tests/labelled/mod.rs"]
mod labelled;

use std::{collections::BTreeMap, env, fs::File, io::BufReader, thread};

use labelled::{Case, Side, Truth, run, write};
use tidegate_capture::{FlowReport, Options, Report, analyze};

/// A flow that was judged.
struct Judged {
    case: Case,
    side: Side,
    verdict: &'static str,
    in_group: bool,
    text: String,
}

fn judge(case: Case) -> Vec<Judged> {
    let (truths, packets) = run(case);
    let mut judged = Vec::new();
    for (side, packets) in [Side::Sender, Side::Receiver].into_iter().zip(&packets) {
        let capture = write(packets);
        let Ok(report) = analyze(&capture.bytes[..], &Options::default()) else { continue };
        for (at, truth) in truths.iter().enumerate().filter(|(_, truth)| truth.counts()) {
            let name = format!(":{} > ", 40_000 + at);
            let Some(flow) = report.flows.iter().find(|flow| flow.flow.contains(&name)) else {
                continue;
            };
            judged.push(Judged {
                case,
                side,
                verdict: flow.verdict.words(),
                in_group: flow.group.is_some(),
                text: text(flow, &report, truth),
            });
        }
    }
    judged
}

fn text(flow: &FlowReport, report: &Report, truth: &Truth) -> String {
    let group = flow.group.and_then(|number| report.groups.get(number));
    let estimate = flow.estimate.as_ref().or(group.map(|group| &group.estimate));
    let Truth { dropped, places, .. } = truth;
    let lost = flow.lost_packets;
    let mut text = format!("lost {lost} of {dropped} in {places} places, {:?}", flow.vantage);
    if let Some(estimate) = estimate {
        text += &format!(", {:.0} bit/s {:.0} B", estimate.rate_bit_s, estimate.depth_bytes);
    }
    for line in flow.evidence.iter().chain(group.iter().flat_map(|group| &group.evidence)) {
        text += &format!("\n      {line}");
    }
    text
}

/// Shows what was judged wrongly, or all that was asked for by name.
fn print(judged: &Judged, part: Option<&str>) {
    let Judged { case, side, verdict, in_group, text } = judged;
    if part.is_some() || (*verdict == "policed") != case.is_policed() {
        let group = if *in_group { " (group)" } else { "" };
        println!("{case} {side:?}: {verdict}{group}: {text}");
    }
}

/// The verdicts on the flows of a capture that a real kernel made.
fn judge_file(path: &str) {
    let name = path.rsplit('/').next().unwrap_or(path);
    let file = File::open(path).expect("a capture");
    let report = analyze(BufReader::new(file), &Options::default()).expect("a report");
    for flow in report.flows.iter().filter(|flow| flow.flow.ends_with(":5201")) {
        let estimate = flow.estimate.as_ref().or(flow
            .group
            .and_then(|number| report.groups.get(number))
            .map(|group| &group.estimate));
        let (verdict, lost) = (flow.verdict.words(), flow.lost_packets);
        print!("{name}: {verdict}: lost {lost} of {} packets, {:?}", flow.packets, flow.vantage);
        if let Some(estimate) = estimate {
            print!(", {:.0} bit/s {:.0} B", estimate.rate_frames_bit_s, estimate.depth_bytes);
        }
        println!();
    }
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "files") {
        arguments[1..].iter().for_each(|path| judge_file(path));
        return;
    }
    let half = arguments.first().map_or("training", String::as_str);
    let numbers = arguments.get(1).map_or("2000", String::as_str);
    let (first, end) = numbers.split_once("..").unwrap_or(("0", numbers));
    let (first, end) = (first.parse().expect("FIRST"), end.parse().expect("CASES or END"));
    let part = arguments.get(2).map(String::as_str);
    let wanted = |case: &Case| {
        let side = half == "all" || case.is_held_out() == (half == "held-out");
        side && part.is_none_or(|part| case.to_string().contains(part))
    };
    let cases: Vec<Case> = (first..end).map(Case::number).filter(wanted).collect();
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let judged: Vec<Judged> = thread::scope(|scope| {
        let parts = (0..threads).map(|first| {
            let cases = &cases;
            scope.spawn(move || {
                let mine = cases.iter().skip(first).step_by(threads);
                mine.flat_map(|case| judge(*case))
                    .inspect(|judged| print(judged, part))
                    .collect::<Vec<_>>()
            })
        });
        let parts: Vec<_> = parts.collect();
        parts.into_iter().flat_map(|part| part.join().expect("a part")).collect()
    });
    let mut table: BTreeMap<(String, String), BTreeMap<&str, usize>> = BTreeMap::new();
    for j in &judged {
        let flows = if j.case.flows == 1 { "one flow" } else { "several flows" };
        let kind = format!("{:?}", j.case.kind);
        let kind = kind.split('(').next().unwrap_or_default().to_owned();
        let all = if j.case.is_policed() { "ALL policed" } else { "ALL others" };
        let side = format!("{:?}", j.side);
        let rows = [
            (kind.clone(), format!("{side}, {flows}")),
            (kind, "both".to_owned()),
            (all.to_owned(), side),
            (all.to_owned(), "both".to_owned()),
        ];
        for row in rows {
            *table.entry(row).or_default().entry(j.verdict).or_default() += 1;
        }
    }
    println!("{} cases, {} flows judged", cases.len(), judged.len());
    for ((kind, side), verdicts) in &table {
        let all: usize = verdicts.values().sum();
        let policed = verdicts.get("policed").copied().unwrap_or(0);
        println!(
            "{kind:>12} {side:<24} {all:>5} policed {policed:>5} {:>6.1} %  {verdicts:?}",
            100.0 * policed as f64 / all as f64
        );
    }
}
