//! Runs experiments one after the other, writes their reports, prints their summaries.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use rustix::fs::{FlockOperation, flock};
use tidegate_core::Nanos;

use crate::awake::Awake;
use crate::context::{Context, Links, Options};
use crate::experiment::Experiment;
use crate::host::{self, Host};
use crate::progress::Progress;
use crate::report::{Claim, Report, percent};
use crate::stalls::{StallWatch, Stalls};
use crate::stop::{Interrupted, Skip};
use crate::table;
use crate::terminal::Terminal;
use crate::testbed::Means;

/// The letters of a claim and of what was measured that fit one line of a narrow terminal, signs left out.
const CLAIM_MOST: usize = 75;

/// How an experiment ended.
#[derive(Debug)]
pub enum Outcome {
    /// It measured. The report is written.
    Done(Box<Report>),
    /// It measured. Not all of the report could be written.
    Unwritten(Box<Report>, anyhow::Error),
    /// This machine lacks something. What it had recorded before is written.
    Skipped(String),
    /// It could not measure. What it had recorded before is written.
    Failed(anyhow::Error),
}

/// Runs the experiments, each with its report and its summary. A failure does not keep the next from
/// running, an interrupt does.
///
/// # Errors
///
/// Only those of writing to `out`.
pub fn all<W: Write>(
    experiments: &[&dyn Experiment],
    options: &Options,
    out: &mut Terminal<W>,
) -> io::Result<Vec<(&'static str, Outcome)>> {
    let mut outcomes = Vec::new();
    for (at, experiment) in experiments.iter().enumerate() {
        if at > 0 {
            writeln!(out)?;
        }
        let outcome = one(*experiment, options, Progress::on_stderr(experiment.name()));
        print(out, experiment.name(), &outcome, options)?;
        outcomes.push((experiment.name(), outcome));
        if options.interrupted.load(Ordering::Relaxed) {
            break;
        }
    }
    if experiments.len() > 1 {
        tally(out, &outcomes)?;
    }
    Ok(outcomes)
}

/// Runs one experiment and writes its report.
pub fn one(experiment: &dyn Experiment, options: &Options, progress: Progress) -> Outcome {
    let needs = experiment.needs();
    if let Some(reason) = needs.iter().find_map(|need| need.missing(&options.tidegate)) {
        return Outcome::Skipped(reason);
    }
    let repeats = options.repeats.unwrap_or_else(|| experiment.repeats(options.quick));
    let mut head = head(experiment, options, repeats);
    head.host.tools = needs.iter().filter_map(|need| need.version(&options.tidegate)).collect();

    let mut context = Context::new(options, repeats, head, progress);
    if let Err(error) = fs::create_dir_all(&context.out_dir) {
        let dir = context.out_dir.display();
        return Outcome::Failed(
            anyhow!(error).context(format!("cannot make {dir}: try --out DIR")),
        );
    }
    let in_use = File::open(&context.out_dir).and_then(|dir| {
        flock(&dir, FlockOperation::NonBlockingLockExclusive)?;
        Ok(dir)
    });
    if in_use.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
        let dir = context.out_dir.display();
        return Outcome::Failed(anyhow!(
            "another run writes into {dir}: wait for it, or use --out DIR"
        ));
    }
    let began = Instant::now();
    let _awake = Awake::keep();
    let watch = StallWatch::start();
    let ended = catch_unwind(AssertUnwindSafe(|| experiment.run(&mut context)))
        .unwrap_or_else(|panic| Err(anyhow!("panicked: {}", panic_text(panic.as_ref()))));
    let drawn = context.draw();
    let Context { mut report, mut out_dir, .. } = context;
    report.elapsed_s = began.elapsed().as_secs_f64();
    report.stalls = watch.ok().and_then(StallWatch::stop).map(|seen| Stalls::of(&seen));

    if report.rows.is_empty()
        && let Err(error) = ended
    {
        // Leave no empty directory; one that holds something stays.
        let _ = fs::remove_dir(&out_dir);
        return match error.downcast_ref() {
            Some(Skip(reason)) => Outcome::Skipped(reason.clone()),
            None => Outcome::Failed(error),
        };
    }
    if let Err(error) = &ended {
        report.notes.push(format!("stopped before its end: {error:#}"));
        report.interrupted = true;
        // A part does not replace a whole.
        if Report::read(&out_dir).is_some_and(|before| !before.interrupted) {
            out_dir.set_file_name(format!("{}-interrupted", experiment.name()));
        }
    }
    if options.only.is_empty() && options.systems.is_empty() {
        let gone = claims_gone(&out_dir, &report);
        report.notes.extend(gone);
    }
    let written = report.write(&out_dir, &drawn).with_context(|| {
        let dir = out_dir.display();
        format!("cannot write all of the report into {dir} (free space there, or use --out DIR)")
    });
    match (ended, written) {
        (Err(error), Ok(())) => {
            let place = format!("what it measured is in {}", out_dir.display());
            match error.downcast_ref() {
                Some(Skip(reason)) => Outcome::Skipped(format!("{reason}; {place}")),
                None => Outcome::Failed(error.context(place)),
            }
        }
        (Err(error), Err(unwritten)) => Outcome::Failed(error.context(format!("{unwritten:#}"))),
        (Ok(()), _) if report.rows.is_empty() => {
            let notes = report.notes.join("; ");
            Outcome::Failed(anyhow!("nothing could be measured: {notes}"))
        }
        (Ok(()), Err(error)) => Outcome::Unwritten(Box::new(report), error),
        (Ok(()), Ok(())) => Outcome::Done(Box::new(report)),
    }
}

/// A note for each claim that the report in `dir` makes and the one that replaces it does not: a claim that could
/// not be judged, or that was taken out, is missed.
fn claims_gone(dir: &Path, report: &Report) -> Vec<String> {
    let Some(before) = Report::read(dir) else { return Vec::new() };
    let made = |claim: &Claim| report.claims.iter().any(|now| now.claim == claim.claim);
    let gone = before.claims.iter().filter(|claim| before.quick == report.quick && !made(claim));
    gone.map(|claim| {
        format!("the report before this one claimed, and this one does not: {}", claim.claim)
    })
    .collect()
}

/// The part of a report that is known beforehand.
fn head(experiment: &dyn Experiment, options: &Options, repeats: u32) -> Report {
    let started = jiff::Timestamp::now();
    let commit = host::commit(&options.tidegate);
    Report {
        experiment: experiment.name().to_owned(),
        summary: experiment.summary().to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        dirty: commit.as_ref().map(|commit| commit.dirty),
        commit: commit.map(|commit| commit.hash),
        kernel: host::kernel(),
        cpu: host::cpu(),
        host: Host { cores: host::cores(), ..Host::default() },
        quick: options.quick,
        command: command(experiment.name(), options, repeats),
        started: started.round(jiff::Unit::Second).unwrap_or(started).to_string(),
        ..Report::default()
    }
}

/// The command that makes the report again. Where the output goes and where binaries lie is the
/// reader's own affair.
fn command(name: &str, options: &Options, repeats: u32) -> String {
    let quick = if options.quick { " --quick" } else { "" };
    let listed = |flag: &str, names: &[String]| match names {
        [] => String::new(),
        names => format!(" --{flag} {}", names.join(",")),
    };
    let (only, systems) = (listed("only", &options.only), listed("systems", &options.systems));
    let links = links(&options.links);
    format!("tidegate-lab run {name}{quick} --repeats {repeats}{only}{systems}{links}")
}

/// The options that make links again.
fn links(links: &Links) -> String {
    let mut words = String::new();
    let mut add = |name: &str, value: &dyn Display| words.push_str(&format!(" --{name} {value}"));
    if let Some(way) = links.way {
        add("rtt", &Nanos(2 * way.delay.0));
        if let Some(rate) = way.rate {
            add("link-rate", &rate);
        }
        if let Some(queue) = way.queue {
            add("link-queue", &queue);
        }
        if way.loss > 0.0 {
            add("loss", &format!("{}%", percent(way.loss)));
        }
        if way.reorder > 0.0 {
            add("reorder", &format!("{}%", percent(way.reorder)));
            add("reorder-by", &way.reorder_by);
        }
    }
    if links.seed != Links::default().seed {
        add("seed", &links.seed);
    }
    if links.means == Means::Netem {
        words.push_str(" --netem");
    }
    words
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

fn print<W: Write>(
    out: &mut Terminal<W>,
    name: &str,
    outcome: &Outcome,
    options: &Options,
) -> io::Result<()> {
    let paint = out.paint;
    match outcome {
        Outcome::Skipped(reason) => writeln!(out, "{} {name}: {reason}", paint.yellow("skipped")),
        Outcome::Failed(error) if error.is::<Interrupted>() => {
            let place = if error.chain().len() > 1 { format!(": {error}") } else { String::new() };
            writeln!(out, "{} {name}{place}", paint.yellow("interrupted"))
        }
        Outcome::Failed(error) => writeln!(out, "{} {name}: {error:#}", paint.red("failed")),
        Outcome::Unwritten(report, error) => {
            results(out, report)?;
            writeln!(out, "{} {name}: {error:#}", paint.red("failed"))
        }
        Outcome::Done(report) => {
            results(out, report)?;
            if let Some(text) = report.stalls_text() {
                writeln!(out, "{} {text}", paint.yellow("note:"))?;
            }
            let page = options.out.join(name).join("report.md");
            writeln!(out, "{}", paint.dim(&format!("report: {}", page.display())))?;
            let Some(first) = report.figures.first() else { return Ok(()) };
            let first = page.with_file_name(&first.file);
            let more = match report.figures.len() {
                1 => String::new(),
                all => format!(", and {} more", all - 1),
            };
            writeln!(out, "{}", paint.dim(&format!("figure: {}{more}", first.display())))
        }
    }
}

/// Prints the medians, the claims and the notes.
pub fn results<W: Write>(out: &mut Terminal<W>, report: &Report) -> io::Result<()> {
    let paint = out.paint;
    writeln!(out, "{}: {}\n", paint.bold(&report.experiment), report.summary)?;
    for table in table::medians(report) {
        writeln!(out, "{}", table.text(paint))?;
    }
    for claim in &report.claims {
        let sign = if claim.holds { paint.green("✔") } else { paint.red("✘") };
        let on_one_line = claim.claim.chars().count() + claim.measured.chars().count() < CLAIM_MOST;
        let gap = if on_one_line { " — " } else { "\n  " };
        writeln!(out, "{sign} {}{gap}{}", claim.claim, claim.measured)?;
    }
    for note in &report.notes {
        writeln!(out, "{} {note}", paint.yellow("note:"))?;
    }
    Ok(())
}

/// One line for each of several experiments.
fn tally<W: Write>(out: &mut Terminal<W>, outcomes: &[(&str, Outcome)]) -> io::Result<()> {
    let paint = out.paint;
    let width = outcomes.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    writeln!(out)?;
    for (name, outcome) in outcomes {
        let word = match outcome {
            Outcome::Done(report) => {
                let held = report.claims.iter().filter(|claim| claim.holds).count();
                match report.claims.len() {
                    0 => paint.green("done"),
                    all if held == all => {
                        paint.green(&format!("done, {held} of {all} claims hold"))
                    }
                    all => paint.yellow(&format!("done, {held} of {all} claims hold")),
                }
            }
            Outcome::Skipped(reason) => paint.yellow(&format!("skipped: {reason}")),
            Outcome::Failed(error) if error.is::<Interrupted>() => paint.yellow("interrupted"),
            Outcome::Failed(error) | Outcome::Unwritten(_, error) => {
                paint.red(&format!("failed: {error:#}"))
            }
        };
        writeln!(out, "{name:width$}  {word}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::experiments::example::{Ending, Example};

    fn options(out: &Path) -> Options {
        Options {
            quick: true,
            repeats: Some(3),
            out: out.to_owned(),
            tidegate: "tidegate".into(),
            links: Links::default(),
            only: Vec::new(),
            systems: Vec::new(),
            interrupted: Arc::default(),
        }
    }

    #[test]
    fn a_whole_experiment() {
        let dir = tempfile::tempdir().unwrap();
        let example = Example("example", Ending::Well);
        let Outcome::Done(report) = one(&example, &options(dir.path()), Progress::silent()) else {
            panic!("it ends well");
        };
        assert_eq!(report.rows.len(), 2 * 2 * 2 * 3);
        assert_eq!(report.host.tools["echo"], "echo 1.2");
        assert_eq!(report.command, "tidegate-lab run example --quick --repeats 3");
        let json = fs::read_to_string(dir.path().join("example/report.json")).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), *report);
        for figure in &report.figures {
            let svg = fs::read_to_string(dir.path().join("example").join(&figure.file)).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        }
        let mut printed = Vec::new();
        results(&mut Terminal::plain(&mut printed), &report).unwrap();
        insta::assert_snapshot!(String::from_utf8(printed).unwrap(), @r#"
        example: Made-up figures

        goodput (Mbit/s), limit 1 Gbit/s
          flows  htb  pace
          1      957   994
          9      957   994

        RTT p50 (µs), limit 1 Gbit/s
          flows   htb  pace
          1      1825    30
          9      1825    30

        ✔ pace queues less than htb — 61 times
        ✘ pace is free — 0.4 % of a core
        "#);
    }

    #[test]
    fn a_command_names_the_rows_and_systems() {
        let chosen = Options {
            only: vec!["redis-1b-50m".into(), "dns-1g".into()],
            systems: vec!["pace".into()],
            ..options(Path::new("out"))
        };
        let again = command("applications", &chosen, 1);
        let expected = "tidegate-lab run applications --quick --repeats 1 --only \
                        redis-1b-50m,dns-1g --systems pace";
        assert_eq!(again, expected);
    }

    #[test]
    fn one_failure_does_not_keep_the_next_from_running() {
        let dir = tempfile::tempdir().unwrap();
        let examples = [
            Example("bad", Ending::Failed),
            Example("absent", Ending::Skipped),
            Example("worse", Ending::Panicked),
            Example("good", Ending::Well),
        ];
        let examples: Vec<&dyn Experiment> =
            examples.iter().map(|e| e as &dyn Experiment).collect();
        let mut printed = Vec::new();
        let outcomes =
            all(&examples, &options(dir.path()), &mut Terminal::plain(&mut printed)).unwrap();
        assert!(matches!(outcomes[3].1, Outcome::Done(_)));
        let printed = String::from_utf8(printed).unwrap();
        let tally = printed.rsplit_once("\n\n").unwrap().1;
        insta::assert_snapshot!(tally, @r#"
        bad     failed: no such device
        absent  skipped: needs fq, which this kernel does not have
        worse   failed: panicked: index out of bounds
        good    done, 1 of 2 claims hold
        "#);
    }

    #[test]
    fn what_was_measured_before_a_failure_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let example = Example("late", Ending::FailedLate);
        let outcome = one(&example, &options(dir.path()), Progress::silent());
        assert!(matches!(outcome, Outcome::Failed(_)));
        let json = fs::read_to_string(dir.path().join("late/report.json")).unwrap();
        let report: Report = serde_json::from_str(&json).unwrap();
        assert!(!report.rows.is_empty() && report.interrupted);
        assert_eq!(report.notes, ["stopped before its end: the link went away"]);
    }

    #[test]
    fn a_part_does_not_replace_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let run =
            |ending| one(&Example("example", ending), &options(dir.path()), Progress::silent());
        let Outcome::Done(whole) = run(Ending::Well) else { panic!("it ends well") };
        let Outcome::Failed(error) = run(Ending::FailedLate) else { panic!("it fails late") };
        let part = dir.path().join("example-interrupted");
        assert!(error.to_string().ends_with(&part.display().to_string()), "{error}");
        assert_eq!(Report::read(&dir.path().join("example")), Some(*whole));
        assert!(Report::read(&part).unwrap().interrupted);
        let page = fs::read_to_string(part.join("report.md")).unwrap();
        assert!(page.contains("It stopped before its end"), "{page}");
        // A part replaces a part, and a whole replaces it with its figures.
        fs::remove_dir_all(dir.path().join("example")).unwrap();
        fs::rename(&part, dir.path().join("example")).unwrap();
        assert!(matches!(run(Ending::FailedLate), Outcome::Failed(_)) && !part.exists());
        assert!(matches!(run(Ending::Well), Outcome::Done(_)) && !part.exists());
    }

    #[test]
    fn two_runs_do_not_write_into_one_directory() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("example");
        fs::create_dir(&place).unwrap();
        let other = File::open(&place).unwrap();
        flock(&other, FlockOperation::LockExclusive).unwrap();
        let run =
            || one(&Example("example", Ending::Well), &options(dir.path()), Progress::silent());
        let Outcome::Failed(error) = run() else { panic!("it must wait") };
        assert!(error.to_string().starts_with("another run writes into"), "{error}");
        flock(&other, FlockOperation::Unlock).unwrap();
        assert!(matches!(run(), Outcome::Done(_)));
    }

    #[test]
    fn what_cannot_be_written_is_said_and_shown() {
        let dir = tempfile::tempdir().unwrap();
        let in_the_way = dir.path().join("example/report.md");
        fs::create_dir_all(&in_the_way).unwrap();
        let example = Example("example", Ending::Well);
        let mut printed = Vec::new();
        let outcomes =
            all(&[&example], &options(dir.path()), &mut Terminal::plain(&mut printed)).unwrap();
        assert!(matches!(&outcomes[0].1, Outcome::Unwritten(..)), "{outcomes:?}");
        let printed = String::from_utf8(printed).unwrap();
        for part in ["goodput (Mbit/s)", "failed example: cannot write all", "report.md: "] {
            assert!(printed.contains(part), "{part}: {printed}");
        }
        let report = Report::read(&dir.path().join("example")).unwrap();
        assert!(!report.rows.is_empty() && !report.figures.is_empty());
        for entry in fs::read_dir(dir.path().join("example")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(!name.ends_with(".new"), "{name}");
        }
        assert!(dir.path().join("example").join(&report.figures[0].file).exists());
    }

    #[test]
    fn a_claim_that_is_gone_is_missed() {
        let dir = tempfile::tempdir().unwrap();
        let page = dir.path().join("example/report.json");
        let run = |only: &[&str], quick| {
            let only = only.iter().map(|word| (*word).to_owned()).collect();
            let options = Options { only, quick, ..options(dir.path()) };
            match one(&Example("example", Ending::Well), &options, Progress::silent()) {
                Outcome::Done(report) => report.notes,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(run(&[], true), [""; 0]);
        assert_eq!(run(&[], true), [""; 0], "the same claims again");
        let mut before: Report = serde_json::from_str(&fs::read_to_string(&page).unwrap()).unwrap();
        before.claims[0].claim = "htb is free".to_owned();
        let before = serde_json::to_string(&before).unwrap();
        let missed = "the report before this one claimed, and this one does not: htb is free";
        for (only, quick, notes) in
            [(&[][..], true, &[missed][..]), (&[], false, &[]), (&["a-row"], true, &[])]
        {
            fs::write(&page, &before).unwrap();
            assert_eq!(run(only, quick), notes, "{only:?} {quick}");
        }
    }

    #[test]
    fn an_interrupt_ends_the_series() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        options.interrupted.store(true, Ordering::Relaxed);
        let (a, b) = (Example("a", Ending::Well), Example("b", Ending::Well));
        let mut out = Terminal::plain(Vec::new());
        let outcomes = all(&[&a, &b], &options, &mut out).unwrap();
        assert_eq!(outcomes.len(), 1);
        assert!(matches!(&outcomes[0].1, Outcome::Failed(e) if e.is::<Interrupted>()));
    }
}
