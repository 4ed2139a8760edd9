//! `tidegate doctor`: what this host can do for limits, and what to do.

use std::{
    io::{Write, stdout},
    path::Path,
    process::ExitCode,
};

use anyhow::Result;
use tidegate_fleet::api;
use tidegate_host::doctor::{Finding, Report, Seen, Service, Verdict, judge};
use tidegate_sys::survey::Survey;

use crate::{args::LookArgs, output::Paint, refusal::REFUSED, verbs::status};

/// The file of the agent that comes with packages.
const LIMITS_FILE: &str = "/etc/tidegate/limits.toml";
/// The file that the unit of the daemon wants.
const FLEET_FILE: &str = "/etc/tidegate/fleet.toml";

pub fn run(store: &Path, run_dir: &Path, socket: &Path, look: LookArgs) -> Result<ExitCode> {
    let daemon = api::status(socket).is_ok_and(|running| running.is_some());
    let services =
        [("agent", LIMITS_FILE, status::agent_runs(run_dir)), ("daemon", FLEET_FILE, daemon)];
    let services = services.map(|(verb, file, runs)| Service {
        verb,
        file,
        wanted: Path::new(file).exists(),
        runs,
    });
    let services = services.to_vec();
    let seen = Seen { survey: Survey::take(), limits: status::seen(store, run_dir), services };
    let report = judge(&seen);
    let mut out = stdout().lock();
    if look.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        print(&mut out, Paint::stdout(), &report)?;
    }
    Ok(if report.works { ExitCode::SUCCESS } else { REFUSED.into() })
}

fn print(out: &mut impl Write, paint: Paint, report: &Report) -> Result<()> {
    let about = report.findings.iter().map(|finding| finding.about.len()).max().unwrap_or(0);
    for Finding { about: what, verdict, found, advice } in &report.findings {
        let word = match verdict {
            Verdict::Ok => "ok     ".to_owned(),
            Verdict::Unknown => "unknown".to_owned(),
            Verdict::Warning => paint.bold("warning"),
            Verdict::Problem => paint.red("problem"),
        };
        let advice = advice.iter().map(|advice| format!("; {advice}")).collect::<String>();
        writeln!(out, "{word}  {what:about$}  {found}{advice}")?;
    }
    if !report.works {
        writeln!(out, "No limit can work here.")?;
    }
    Ok(())
}
