//! `tidegate monitor`: what every limit does, interval by interval.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::Path,
    process::ExitCode,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::Result;
use tidegate_core::Rate;
use tidegate_host::{
    host::Host,
    status::{LimitSample, LimitStatus, hold_ceilings},
};

use tidegate_sys::clock::monotonic_ns;

use crate::{
    args::MonitorArgs,
    output::{self, Align, Column, Paint},
};

/// The head is said again after so many lines.
const HEAD_EVERY: usize = 24;

const COLUMNS: [Column; 10] = [
    ("NAME", Align::Left),
    ("DIRECTION", Align::Left),
    ("LIMIT", Align::Right),
    ("NOW", Align::Right),
    ("USED", Align::Right),
    ("USED%", Align::Right),
    ("BACKLOG", Align::Right),
    ("MARKED", Align::Right),
    ("SLOWED", Align::Right),
    ("DROPPED", Align::Right),
];
/// That of the names grows with them.
const WIDTHS: [usize; COLUMNS.len()] = [16, 9, 10, 10, 10, 6, 8, 8, 8, 8];
/// The longest name of a limit, with its indentation in most trees.
const NAME_WIDTH_MAX: usize = 72;

/// All limits at one moment.
struct Moment {
    at_ns: u64,
    limits: BTreeMap<String, LimitStatus>,
}

pub fn run(store: &Path, args: &MonitorArgs) -> Result<ExitCode> {
    let host = super::open(store)?;
    let mut earlier = look(&host)?;
    let mut screen = Screen { lines: 0, quiet: false, widths: WIDTHS };
    let mut next = Instant::now();
    let mut left = args.count;
    while left != Some(0) {
        // After a stop it goes on from now.
        next = (next + args.interval).max(Instant::now());
        thread::sleep(next.saturating_duration_since(Instant::now()));
        let now = look(&host)?;
        let interval_ns = now.at_ns - earlier.at_ns;
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let unix_ns = u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX);
        let samples = now.limits.iter().map(|(name, limit)| {
            LimitSample::between(earlier.limits.get(name), limit, interval_ns, unix_ns)
        });
        let samples: Vec<_> = samples.collect();
        let mut out = output::stdout();
        if args.json {
            for sample in &samples {
                writeln!(out, "{}", serde_json::to_string(sample)?)?;
            }
        } else {
            screen.show(&mut out, &samples)?;
        }
        out.flush()?;
        earlier = now;
        left = left.map(|n| n - 1);
    }
    Ok(ExitCode::SUCCESS)
}

fn look(host: &Host) -> Result<Moment> {
    let at_ns = monotonic_ns();
    let mut limits = LimitStatus::all(&host.store().list(host.hierarchy())?);
    hold_ceilings(&mut limits);
    let limits = limits.into_iter().map(|limit| (limit.name.clone(), limit));
    Ok(Moment { at_ns, limits: limits.collect() })
}

/// The lines said so far.
struct Screen {
    lines: usize,
    quiet: bool,
    widths: [usize; COLUMNS.len()],
}

impl Screen {
    fn show(&mut self, out: &mut impl Write, samples: &[LimitSample]) -> io::Result<()> {
        let paint = Paint::stdout();
        if samples.is_empty() {
            if !self.quiet {
                writeln!(out, "No limits; waiting for one.")?;
            }
            self.quiet = true;
            return Ok(());
        }
        self.quiet = false;
        let tree: Vec<_> = output::as_tree(samples, |s| (&s.name, &s.parent)).collect();
        let names = tree.iter().map(|(depth, sample)| output::indented(*depth, &sample.name).len());
        let widest = names.max().unwrap_or_default().min(NAME_WIDTH_MAX);
        if widest > self.widths[0] {
            (self.widths[0], self.lines) = (widest, 0);
        }
        for (depth, sample) in tree {
            if let Some(alarm) = output::alarm(&sample.name, &sample.scope, sample.state) {
                writeln!(out, "{}", paint.red(&format!("WARNING: {alarm}")))?;
                continue;
            }
            for (direction, d) in sample.directions() {
                if self.lines.is_multiple_of(HEAD_EVERY) {
                    let heads = COLUMNS.map(|(head, _)| head.to_owned());
                    writeln!(out, "{}", paint.bold(&output::line(&COLUMNS, &self.widths, &heads)))?;
                }
                self.lines += 1;
                let limit = Rate::from_bit_s(d.rate_bit_s).map(|rate| rate.to_string());
                let cells = [
                    output::indented(depth, &sample.name),
                    direction.to_owned(),
                    limit.unwrap_or_default(),
                    d.now_bit_s.map_or_else(|| "-".to_owned(), output::rate),
                    output::rate(d.used_bit_s),
                    format!("{:.1}", 100.0 * d.used_bit_s as f64 / d.rate_bit_s.max(1) as f64),
                    output::time(d.backlog_ns.max(0)),
                    d.counters.packets_of("mark").to_string(),
                    d.counters.packets_of("slow").to_string(),
                    d.counters.dropped().0.to_string(),
                ];
                writeln!(out, "{}", output::line(&COLUMNS, &self.widths, &cells))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::top::tests::limit;

    #[test]
    fn columns_stand_below_their_heads_whatever_the_names() {
        let mut screen = Screen { lines: 0, quiet: false, widths: WIDTHS };
        let mut said = |name: &str| {
            let mut sample = limit("a.service", Some((200, 100)), None).sample;
            sample.name = name.to_owned();
            let mut out = Vec::new();
            screen.show(&mut out, &[sample]).unwrap();
            String::from_utf8(out).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let starts = |line: &str, word| line.find(word).unwrap();
        assert_eq!(said("web").len(), 2);
        assert_eq!(said("db").len(), 1, "the head is not said again");
        let long = said("cni-6163d2e8-8f1c8f1c8f1c8f1c8f1c8f1c8f1c8f1c-0cf56b686b3ab552");
        assert_eq!(starts(&long[0], "DIRECTION"), starts(&long[1], "egress"));
        assert_eq!(long[0].len(), long[1].len());
        assert_eq!(said("web").len(), 1);
    }
}
