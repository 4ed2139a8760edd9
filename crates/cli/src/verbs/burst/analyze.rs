//! `tidegate burst analyze`.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use tidegate_capture::{
    Estimate, FlowReport, GroupReport, Options, Report, analyze, report::Curve,
};
use tidegate_chart::Tokens;

use super::percent;
use crate::{
    args::AnalyzeArgs,
    output::{self, Align, Column, Paint},
    refusal::{UsageError, say},
};

const COLUMNS: [Column; 8] = [
    ("FLOW", Align::Left),
    ("PACKETS", Align::Right),
    ("LOST", Align::Right),
    ("RATE", Align::Right),
    ("VERDICT", Align::Left),
    ("POLICER", Align::Right),
    ("BUCKET", Align::Right),
    ("DELAY", Align::Right),
];

/// Packets of a flow below which nothing is said of it unless it lost some.
const FEW: u64 = 100;

pub fn run(args: &AnalyzeArgs) -> Result<ExitCode> {
    let name = match args.file.to_str() {
        Some("-") => "standard input".to_owned(),
        _ => args.file.display().to_string(),
    };
    let refused = |what: String| UsageError(format!("{name}: {what}"));
    let source: Box<dyn Read> = if args.file == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(open(&args.file).map_err(refused)?)
    };
    let options = Options { top: args.top as usize, flow: args.flow.clone() };
    let report = analyze(source, &options).map_err(|e| refused(e.to_string()))?;
    if let (Some(text), true) = (&args.flow, report.flows.is_empty()) {
        let flows = report.names.join("`, `");
        return Err(UsageError(format!(
            "--flow: no flow of {name} has `{text}` in it; there are `{flows}`"
        ))
        .into());
    }
    if let Some(warning) = &report.capture.warning {
        say(&format!("tidegate: warning: {name} {warning}; what comes before that was analyzed"));
    }
    if let Some(out) = &args.svg {
        draw(out, &report)?;
    }
    let mut out = output::stdout();
    if args.look.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        show(&mut out, &name, &report)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens a file; what is a directory says so only when it is read.
fn open(path: &Path) -> Result<File, String> {
    let file = File::open(path).map_err(|e| format!("cannot be read: {e}"))?;
    match file.metadata() {
        Ok(metadata) if metadata.is_dir() => Err("is a directory; name a file".to_owned()),
        _ => Ok(file),
    }
}

fn draw(out: &Path, report: &Report) -> Result<()> {
    let group = report.groups.first().map(|group| {
        let of = format!("{} flows, {}", group.flows.len(), group.verdict.words());
        (of, &group.estimate, &group.curve, &group.delay_before_loss)
    });
    let flow = report.flows.iter().find_map(|flow| {
        let of = format!("{}, {}", flow.flow, flow.verdict.words());
        Some((of, flow.estimate.as_ref()?, &flow.curve, &flow.delay_before_loss))
    });
    let Some((of, estimate, curve, delay)) = group.or(flow) else {
        let text = "--svg: no bucket was found, so there is nothing to draw; leave --svg out";
        return Err(UsageError(text.to_owned()).into());
    };
    let Curve { tokens, losses, depth_bytes } = curve.clone();
    let mut title = format!(
        "Tokens of {of}: {}, bucket {}",
        rate(estimate.rate_bit_s),
        size(estimate.depth_bytes)
    );
    if let Some(delay) = delay {
        title +=
            &format!(", delay before loss {:.1} of {:.1} ms", delay.median_ms, delay.bucket_ms);
    }
    let svg = Tokens { title, tokens, losses, depth_bytes }.svg()?;
    fs::write(out, svg).map_err(|e| UsageError(format!("--svg: {}: {e}", out.display())))?;
    Ok(())
}

fn rate(bit_s: f64) -> String {
    output::rate(bit_s as u64)
}

fn size(bytes: f64) -> String {
    output::size(bytes as u64)
}

fn show(out: &mut impl Write, name: &str, report: &Report) -> Result<()> {
    let capture = &report.capture;
    let plural =
        |count: u64, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let mut head = format!(
        "{name}: {} in {:.2} s, {}",
        plural(capture.packets, "packet"),
        capture.duration_s,
        plural(capture.flows, "flow")
    );
    for (count, what) in [
        (capture.skipped_packets, "packets not IP"),
        (capture.stamps_back, "time stamps went back"),
        (capture.evicted_flows, "flows forgotten, there were too many"),
        (capture.forgotten_windows, "windows forgotten, there was too much to remember"),
    ] {
        if count > 0 {
            head += &format!("; {count} {what}");
        }
    }
    writeln!(out, "{head}\n")?;
    let rows: Vec<Vec<String>> =
        report.flows.iter().map(|flow| cells(flow, &report.groups)).collect();
    output::table(out, Paint::stdout(), &COLUMNS, &rows)?;
    for group in &report.groups {
        let title = format!(
            "group {}: {}, {}",
            group.group,
            group.verdict.words(),
            policer(&group.estimate)
        );
        writeln!(out, "\n{}", Paint::stdout().bold(&title))?;
        for flow in &group.flows {
            writeln!(out, "  {flow}")?;
        }
        tell(out, Some(&group.estimate), &group.evidence)?;
    }
    // What a few packets do not tell need not be said.
    let worth = |flow: &&FlowReport| {
        !flow.evidence.is_empty() && (flow.lost_packets > 0 || flow.packets >= FEW)
    };
    for flow in report.flows.iter().filter(worth) {
        let mut title = format!("{}: {}", flow.flow, flow.verdict.words());
        if let Some(estimate) = &flow.estimate {
            title += &format!(", {}", policer(estimate));
        }
        writeln!(out, "\n{}", Paint::stdout().bold(&title))?;
        writeln!(out, "  captured at the {}: {}", vantage(flow), flow.vantage_why)?;
        let runs = &flow.runs;
        writeln!(
            out,
            "  {} without a loss: mean {:.1} packets, half of them at most {}, longest {}; between \
             them {:.1} lost, at most {}",
            plural(runs.runs, "run"),
            runs.mean_packets,
            runs.median_packets_at_most,
            runs.longest_packets,
            runs.mean_gap_packets,
            runs.longest_gap_packets,
        )?;
        if flow.uncaptured_packets > 0 {
            writeln!(
                out,
                "  {} arrived, but are not in the capture: it missed them, the network did not lose them",
                plural(flow.uncaptured_packets, "packet")
            )?;
        }
        tell(out, flow.estimate.as_ref(), &flow.evidence)?;
    }
    Ok(())
}

fn cells(flow: &FlowReport, groups: &[GroupReport]) -> Vec<String> {
    let group = flow.group.and_then(|number| groups.get(number));
    let estimate = flow.estimate.as_ref().or(group.map(|group| &group.estimate));
    // Right before the losses.
    let delay = flow.delay_before_loss.or(group.and_then(|group| group.delay_before_loss));
    let shown = |what: fn(&Estimate) -> String| estimate.map_or_else(|| "-".to_owned(), what);
    let verdict = match flow.group {
        Some(number) => format!("{}, group {number}", flow.verdict.words()),
        None => flow.verdict.words().to_owned(),
    };
    vec![
        flow.flow.clone(),
        flow.packets.to_string(),
        flow.lost_packets.to_string(),
        rate(flow.rate_bit_s),
        verdict,
        shown(|estimate| rate(estimate.rate_bit_s)),
        shown(|estimate| match estimate.depth_high_bytes {
            Some(_) => size(estimate.depth_bytes),
            None => format!("at least {}", size(estimate.depth_low_bytes)),
        }),
        delay.map_or_else(|| "-".to_owned(), |delay| format!("{:.1}ms", delay.median_ms)),
    ]
}

fn vantage(flow: &FlowReport) -> &'static str {
    use tidegate_capture::flow::Vantage::{Receiver, Sender, Unknown};
    match flow.vantage {
        Receiver => "receiver's side",
        Sender => "sender's side",
        Unknown => "receiver's or the sender's side",
    }
}

/// Rate and depth with their intervals.
fn policer(estimate: &Estimate) -> String {
    let depth = match estimate.depth_high_bytes {
        Some(high) => format!(
            "bucket {} ({} to {})",
            size(estimate.depth_bytes),
            size(estimate.depth_low_bytes),
            size(high)
        ),
        None => format!("bucket at least {}", size(estimate.depth_low_bytes)),
    };
    format!(
        "{} ({} to {}), {depth}",
        rate(estimate.rate_bit_s),
        rate(estimate.rate_low_bit_s),
        rate(estimate.rate_high_bit_s)
    )
}

fn tell(out: &mut impl Write, estimate: Option<&Estimate>, evidence: &[String]) -> Result<()> {
    if let Some(estimate) = estimate {
        writeln!(
            out,
            "  rate counted from the IP header on; {} with link headers. The depth: {}",
            rate(estimate.rate_frames_bit_s),
            estimate.depth_known
        )?;
        if estimate.losses_explained < 0.97 {
            writeln!(
                out,
                "  {} of the losses are not explained by it",
                percent(1.0 - estimate.losses_explained)
            )?;
        }
    }
    evidence.iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    Ok(())
}
