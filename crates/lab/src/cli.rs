//! The command line.
//!
//! Exit codes: 0 done, 1 usage, 2 the kernel refused or an experiment failed to run, 4 something that
//! an experiment needs is absent, 130 interrupted. Claims that do not hold change none of them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{Args, Parser, Subcommand};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use tidegate_core::{Nanos, Rate, Span, link::LinkOptions};
use tidegate_sys::features::has_qdisc;

use crate::context::{Links, Options};
use crate::experiment::Experiment;
use crate::experiments;
use crate::host;
use crate::run::{self, Outcome};
use crate::terminal::Terminal;
use crate::testbed::Means;
use crate::tools::Tool;

/// How much later a packet arrives that is overtaken, unless the user says.
const REORDER_BY: Nanos = Nanos(1_000_000);
const USAGE: u8 = 1;
const FAILED: u8 = 2;
const SKIPPED: u8 = 4;
const INTERRUPTED: u8 = 130;

/// Measures Tidegate beside the tools people use today, and writes reports.
#[derive(Debug, Parser)]
#[command(name = "tidegate-lab", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the experiments and what they need
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Run experiments; write a report for each
    Run {
        /// Experiments, as `tidegate-lab list` names them
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// Fewer and shorter runs
        #[arg(long)]
        quick: bool,
        /// Runs of each system in each case [default: as the experiment thinks fit]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
        repeats: Option<u32>,
        /// Only these rows, as the report names them, such as `redis-1b-50m`
        #[arg(long, value_name = "ROW", value_delimiter = ',')]
        only: Vec<String>,
        /// Only these systems, such as `pace,htb`
        #[arg(long, value_name = "NAME", value_delimiter = ',')]
        systems: Vec<String>,
        #[command(flatten)]
        links: LinkArgs,
        #[command(flatten)]
        places: Places,
    },
    /// Show in a few minutes what Tidegate does
    Demo {
        #[command(flatten)]
        places: Places,
    },
    /// Run one traffic tool; it prints one JSON object
    #[command(hide = true, subcommand)]
    Tool(Tool),
}

#[derive(Args, Debug)]
struct LinkArgs {
    /// Round trip of paths that have none of their own, such as `10ms`
    #[arg(long, value_name = "TIME")]
    rtt: Option<Nanos>,
    /// Rate of these paths, in each direction, such as `100mbit`
    #[arg(long, value_name = "RATE")]
    link_rate: Option<Rate>,
    /// What may wait at that rate [default: the round trip, at least 20ms and 64kb]
    #[arg(long, value_name = "TIME|SIZE", requires = "link_rate")]
    link_queue: Option<Span>,
    /// Share of packets that these paths lose in each direction, such as `0.1%`
    #[arg(long, value_name = "SHARE", value_parser = share)]
    loss: Option<f64>,
    /// Share of packets that those after them overtake
    #[arg(long, value_name = "SHARE", value_parser = share)]
    reorder: Option<f64>,
    /// How much later these arrive [default: 1ms]
    #[arg(long, value_name = "TIME", requires = "reorder")]
    reorder_by: Option<Nanos>,
    /// Make links with the kernel's netem instead of the lab's own; refused where the kernel has none
    #[arg(long, conflicts_with = "reorder")]
    netem: bool,
    /// Decides which packets links lose and reorder
    #[arg(long, value_name = "N", default_value_t = Links::default().seed)]
    seed: u64,
}

/// Reads a share such as `0.1%`.
fn share(text: &str) -> Result<f64, String> {
    let percent = text.trim().strip_suffix('%').and_then(|number| number.trim().parse().ok());
    match percent {
        Some(percent) if (0.0..=100.0).contains(&percent) => Ok(percent / 100.0),
        _ => Err("say a share from 0% to 100%, such as 0.1%".to_owned()),
    }
}

impl LinkArgs {
    fn links(self) -> Result<Links, Refusal> {
        let Self { rtt, link_rate, link_queue, loss, reorder, reorder_by, netem, seed } = self;
        let wanted = rtt.is_some() || link_rate.is_some() || loss.is_some() || reorder.is_some();
        let queue = |rate: Rate| match link_queue? {
            Span::Time(time) => Some(rate.bytes_in(time)),
            Span::Size(size) => Some(size),
        };
        let links = Links {
            way: wanted.then(|| LinkOptions {
                delay: Nanos(rtt.map_or(0, |rtt| rtt.0 / 2)),
                rate: link_rate,
                queue: link_rate.and_then(queue),
                loss: loss.unwrap_or(0.0),
                reorder: reorder.unwrap_or(0.0),
                reorder_by: reorder.map_or(Nanos(0), |_| reorder_by.unwrap_or(REORDER_BY)),
            }),
            means: if netem { Means::Netem } else { Means::Cable },
            seed,
        };
        let checked = links.usual().map_or(Ok(()), |link| link.check());
        checked.map_err(|error| Refusal(USAGE, format!("this link cannot be: {error}")))?;
        Ok(links)
    }
}

#[derive(Args, Debug)]
struct Places {
    /// Write the reports into DIR/NAME
    #[arg(long, value_name = "DIR", default_value = "lab-results")]
    out: PathBuf,
    /// The tidegate binary [default: the one beside this program, else the one in PATH]
    #[arg(long, value_name = "PATH")]
    tidegate: Option<PathBuf>,
}

/// Does what the command line says.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come as errors too; only the true ones are for standard error.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    let mut out = Terminal::stdout();
    let code =
        perform(cli.command, &experiments::all(), &mut out).unwrap_or_else(|Refusal(code, why)| {
            let _ = writeln!(std::io::stderr(), "error: {why}");
            code
        });
    ExitCode::from(code)
}

/// Why nothing was done: exit code and message.
#[derive(Debug)]
struct Refusal(u8, String);

impl From<std::io::Error> for Refusal {
    fn from(error: std::io::Error) -> Refusal {
        Refusal(FAILED, format!("cannot write to standard output: {error}"))
    }
}

fn perform<W: Write>(
    verb: Verb,
    known: &[Box<dyn Experiment>],
    out: &mut Terminal<W>,
) -> Result<u8, Refusal> {
    match verb {
        Verb::Tool(tool) => {
            tool.run().map_err(|error| Refusal(FAILED, format!("{error:#}")))?;
            Ok(0)
        }
        Verb::List { json } => {
            list(known, json, out)?;
            Ok(0)
        }
        Verb::Run { names, quick, repeats, only, systems, links, places } => {
            let chosen = choose(&names, known)?;
            let links = links.links()?;
            if links.means == Means::Netem && has_qdisc("netem") == Some(false) {
                let why =
                    "--netem: this kernel has no netem (the module sch_netem): leave --netem out";
                return Err(Refusal(SKIPPED, why.to_owned()));
            }
            let fixed = chosen.iter().find(|experiment| !experiment.takes_links());
            if let (Some(fixed), true) = (fixed, links != Links::default()) {
                let why = "has no path to put a link on, or links of its own: run it without \
                           options for links";
                return Err(Refusal(USAGE, format!("{} {why}", fixed.name())));
            }
            for experiment in &chosen {
                let checked = experiment.check_choice(&only, &systems);
                checked.map_err(|why| Refusal(USAGE, why))?;
            }
            let options = Options { links, only, systems, ..options(places, quick, repeats)? };
            let outcomes = run::all(&chosen, &options, out)?;
            Ok(exit_code(&outcomes))
        }
        Verb::Demo { places } => {
            let chosen: Vec<&dyn Experiment> =
                known.iter().map(Box::as_ref).filter(|experiment| experiment.in_demo()).collect();
            if chosen.is_empty() {
                return Err(Refusal(
                    FAILED,
                    "this build has no experiment for the demo".to_owned(),
                ));
            }
            let outcomes = run::all(&chosen, &options(places, true, None)?, out)?;
            Ok(exit_code(&outcomes))
        }
    }
}

fn exit_code(outcomes: &[(&str, Outcome)]) -> u8 {
    use crate::stop::Interrupted;
    let code = |(_, outcome): &(&str, Outcome)| match outcome {
        Outcome::Done(_) => 0,
        Outcome::Skipped(_) => SKIPPED,
        Outcome::Failed(error) if error.is::<Interrupted>() => INTERRUPTED,
        Outcome::Failed(_) | Outcome::Unwritten(..) => FAILED,
    };
    let codes: Vec<u8> = outcomes.iter().map(code).collect();
    [INTERRUPTED, FAILED, SKIPPED].into_iter().find(|code| codes.contains(code)).unwrap_or(0)
}

fn list<W: Write>(
    known: &[Box<dyn Experiment>],
    json: bool,
    out: &mut Terminal<W>,
) -> std::io::Result<()> {
    let tidegate = default_tidegate();
    if json {
        let entries: Vec<_> = known
            .iter()
            .map(|experiment| {
                let needs = experiment.needs();
                let needs = needs
                    .iter()
                    .map(|need| json!({"name": need.name(), "missing": need.missing(&tidegate)}));
                json!({
                    "name": experiment.name(),
                    "summary": experiment.summary(),
                    "needs": needs.collect::<Vec<_>>(),
                    "demo": experiment.in_demo(),
                })
            })
            .collect();
        return writeln!(out, "{:#}", json!(entries));
    }
    let paint = out.paint;
    let width = known.iter().map(|experiment| experiment.name().len()).max().unwrap_or(0);
    for experiment in known {
        let name = format!("{:width$}", experiment.name());
        writeln!(out, "{}  {}", paint.bold(&name), experiment.summary())?;
        for missing in experiment.needs().iter().filter_map(|need| need.missing(&tidegate)) {
            writeln!(out, "{:width$}  {}", "", paint.yellow(&missing))?;
        }
    }
    Ok(())
}

/// The experiments of these names, each once.
fn choose<'a>(
    names: &[String],
    known: &'a [Box<dyn Experiment>],
) -> Result<Vec<&'a dyn Experiment>, Refusal> {
    crate::report::distinct(names)
        .into_iter()
        .map(|name| {
            let found = known.iter().find(|experiment| experiment.name() == name);
            found.map(Box::as_ref).ok_or_else(|| {
                let why =
                    format!("no experiment is named `{name}`: `tidegate-lab list` shows them all");
                Refusal(USAGE, why)
            })
        })
        .collect()
}

fn options(places: Places, quick: bool, repeats: Option<u32>) -> Result<Options, Refusal> {
    let tidegate = match places.tidegate {
        None => default_tidegate(),
        Some(path) => {
            host::which(&path).and_then(|path| path.canonicalize().ok()).ok_or_else(|| {
                Refusal(USAGE, format!("--tidegate {}: there is no such program", path.display()))
            })?
        }
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The first ends the experiment in good order, the second at once.
        let code = INTERRUPTED.into();
        signal_hook::flag::register_conditional_shutdown(signal, code, Arc::clone(&interrupted))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&interrupted)))
            .map_err(|error| Refusal(FAILED, format!("cannot catch signals: {error}")))?;
    }
    let links = Links::default();
    let (only, systems) = (Vec::new(), Vec::new());
    Ok(Options { quick, repeats, out: places.out, tidegate, links, only, systems, interrupted })
}

/// The `tidegate` beside this program, else the one in PATH, else the bare name.
fn default_tidegate() -> PathBuf {
    let name = Path::new("tidegate");
    let beside =
        std::env::current_exe().ok().and_then(|exe| host::which(&exe.with_file_name(name)));
    beside.or_else(|| host::which(name)).unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::experiments::example::{Ending, Example};

    fn run(arguments: &[&str]) -> (u8, String) {
        let known: Vec<Box<dyn Experiment>> = vec![
            Box::new(Example("example", Ending::Well)),
            Box::new(Example("absent", Ending::Skipped)),
            Box::new(Example("bad", Ending::Failed)),
        ];
        let cli = Cli::try_parse_from(arguments).unwrap();
        let mut printed = Vec::new();
        let code = perform(cli.command, &known, &mut Terminal::plain(&mut printed)).unwrap_or_else(
            |Refusal(code, why)| {
                printed = why.into_bytes();
                code
            },
        );
        (code, String::from_utf8(printed).unwrap())
    }

    #[test]
    fn the_parser_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn exit_codes() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().to_str().unwrap();
        let code =
            |names: &[&str]| run(&[&["tidegate-lab", "run", "--out", out], names].concat()).0;
        assert_eq!(code(&["example"]), 0, "a claim that does not hold is no failure");
        assert_eq!(code(&["absent", "example"]), SKIPPED);
        assert_eq!(code(&["bad", "absent", "example"]), FAILED);
        assert_eq!(code(&["no-such"]), USAGE);
        assert_eq!(code(&["example", "--tidegate", "/nowhere/tidegate"]), USAGE);
        assert_eq!(run(&["tidegate-lab", "demo", "--out", out]).0, FAILED);
    }

    #[test]
    fn rows_are_chosen_where_an_experiment_has_rows() {
        for words in [["--only", "redis-50m"], ["--systems", "pace,htb"]] {
            let (code, why) = run(&[&["tidegate-lab", "run", "example"], &words[..]].concat());
            assert_eq!(code, USAGE);
            assert_eq!(why, "example is run as a whole: leave out --only and --systems");
        }
        let words = ["tidegate-lab", "run", "x", "--only", "redis-50m,dns-1g", "--systems=pace"];
        let Verb::Run { only, systems, .. } = Cli::try_parse_from(words).unwrap().command else {
            panic!()
        };
        assert_eq!(
            (only, systems),
            (vec!["redis-50m".into(), "dns-1g".into()], vec!["pace".to_owned()])
        );
    }

    #[test]
    fn an_unknown_name_says_what_to_type() {
        let (_, why) = run(&["tidegate-lab", "run", "exmaple"]);
        assert_eq!(why, "no experiment is named `exmaple`: `tidegate-lab list` shows them all");
    }

    #[test]
    fn lists() {
        let (code, text) = run(&["tidegate-lab", "list"]);
        assert_eq!(code, 0);
        assert_eq!(text.lines().next(), Some("example  Made-up figures"));
        let (_, text) = run(&["tidegate-lab", "list", "--json"]);
        let list: serde_json::Value = serde_json::from_str(&text).unwrap();
        insta::assert_snapshot!(list[0].to_string(), @r#"{"name":"example","summary":"Made-up figures","needs":[{"name":"echo","missing":null}],"demo":true}"#);
    }

    /// What comes of options for links: exit code and message.
    fn refused(arguments: &[&str]) -> (u8, String) {
        let words = [&["tidegate-lab", "run", "example"], arguments].concat();
        match Cli::try_parse_from(&words) {
            Ok(_) => run(&words),
            Err(error) => (USAGE, error.to_string().lines().next().unwrap_or("").to_owned()),
        }
    }

    #[test]
    fn netem_is_refused_at_once_where_there_is_none() {
        if has_qdisc("netem") == Some(false) {
            let (code, why) = refused(&["--netem"]);
            assert_eq!(code, SKIPPED);
            assert!(why.contains("no netem"), "{why}");
        }
    }

    #[test]
    fn a_link_is_what_the_user_says() {
        let words = [
            "--rtt=10ms",
            "--link-rate=100mbit",
            "--link-queue=20ms",
            "--loss=0.5%",
            "--reorder=2%",
            "--reorder-by=3ms",
            "--seed=7",
        ];
        let cli = [&["tidegate-lab", "run", "x"], &words[..]].concat();
        let Verb::Run { links, .. } = Cli::try_parse_from(cli).unwrap().command else { panic!() };
        let links = links.links().unwrap();
        let way = LinkOptions {
            delay: Nanos(5_000_000),
            rate: Rate::from_bit_s(100_000_000),
            queue: Some(tidegate_core::Bytes(250_000)),
            loss: 0.005,
            reorder: 0.02,
            reorder_by: Nanos(3_000_000),
        };
        assert_eq!(links, Links { way: Some(way), means: Means::Cable, seed: 7 });
    }

    #[test]
    fn a_link_that_cannot_be_is_refused_in_a_line() {
        let said = |arguments: &[&str]| {
            let (code, why) = refused(arguments);
            assert_eq!(code, USAGE, "{why}");
            why
        };
        for (words, part) in [
            (&["--rtt=10"][..], "10ms"),
            (&["--rtt=9s"], "less than 4s together"),
            (&["--link-rate=10kbit", "--link-queue=1mb"], "less than 4s together"),
            (&["--link-rate=1bit"], "or a higher rate"),
            (&["--link-rate=0bit"], "link-rate"),
            (&["--link-queue=10ms"], "required"),
            (&["--loss=1"], "such as 0.1%"),
            (&["--loss=101%"], "from 0% to 100%"),
            (&["--loss=-1%"], "from 0% to 100%"),
            (&["--loss=nan%"], "from 0% to 100%"),
            (&["--reorder-by=1ms"], "required"),
            (&["--netem", "--reorder=1%"], "cannot be used with"),
        ] {
            let why = said(words);
            assert!(why.contains(part), "{words:?}: {why}");
        }
    }

    #[test]
    fn repeats_are_at_least_one() {
        assert!(Cli::try_parse_from(["tidegate-lab", "run", "x", "--repeats", "0"]).is_err());
        assert!(Cli::try_parse_from(["tidegate-lab", "run"]).is_err());
    }
}
