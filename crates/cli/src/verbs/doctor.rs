//! `tidegate doctor`: what this host can do for limits, and what to do.

use std::{fs, io::Write, os::unix::fs::MetadataExt, path::Path, process::ExitCode};

use anyhow::Result;
use tidegate_agent::{
    agent::answers, directory, engines::START_PODMAN, report::GateState, status::AgentStatus,
};
use tidegate_fleet::api;
use tidegate_host::{
    doctor::{Finding, Report, Seen, Service, Verdict, judge},
    run::socket::SOCKET,
};
use tidegate_sys::survey::Survey;

use crate::{
    args::LookArgs,
    output::{self, Paint},
    refusal::REFUSED,
    verbs::status,
};

/// The file of the agent that comes with packages.
const LIMITS_FILE: &str = "/etc/tidegate/limits.toml";
/// The file that the unit of the daemon wants.
const FLEET_FILE: &str = "/etc/tidegate/fleet.toml";

pub fn run(
    store: &Path,
    (run_dir, files): (&Path, &Path),
    socket: &Path,
    look: LookArgs,
) -> Result<ExitCode> {
    let daemon = api::status(socket).is_ok_and(|running| running.is_some());
    let wanted = |file| Path::new(file).exists();
    let daemon = Service {
        verb: "daemon",
        file: FLEET_FILE,
        wanted: wanted(FLEET_FILE),
        runs: daemon,
        ..Service::default()
    };
    let agent = Service { wanted: wanted(LIMITS_FILE), ..agent(run_dir) };
    let services = vec![agent, daemon];
    let limits = status::seen(store, (run_dir, files), socket);
    let seen = Seen { survey: Survey::take(store), limits, services };
    let report = judge(&seen);
    let mut out = output::stdout();
    if look.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        print(&mut out, Paint::stdout(), &report)?;
    }
    Ok(if report.works { ExitCode::SUCCESS } else { REFUSED.into() })
}

/// The agent, as far as it works.
fn agent(run_dir: &Path) -> Service {
    let mut agent = Service { verb: "agent", file: LIMITS_FILE, ..Service::default() };
    let Some(status) = AgentStatus::find(run_dir).filter(|status| status.running) else {
        return agent;
    };
    agent.runs = true;
    let gate = &status.report.gate;
    let lines = status::gate_lines(gate);
    match gate.state {
        GateState::Unavailable => {
            let advice = "a service that starts is limited some milliseconds late".to_owned();
            agent.lacks.extend(lines.into_iter().map(|line| (line, advice.clone())));
        }
        _ => agent.does.extend(lines),
    }
    for (socket, state) in &status.report.engines {
        let line = format!("{socket}: {state}");
        match answers(state) {
            true => agent.does.push(line),
            false => {
                agent.lacks.push((line, "limits stay as they are until it answers".to_owned()))
            }
        }
    }
    let is_socket = |name: &String| name.starts_with('/');
    let files = directory::read(Path::new(&status.report.directory));
    if files.ask_for_containers() && !status.report.engines.keys().any(is_socket) {
        agent.lacks.push((
            "its files ask for containers, and no engine of containers has a socket".to_owned(),
            format!(
                "for Podman {START_PODMAN}; for Docker `systemctl enable --now docker.service`"
            ),
        ));
    }
    // Without the group it is for root alone.
    match fs::metadata(run_dir.join(SOCKET)).is_ok_and(|meta| meta.mode() & 0o060 != 0) {
        true => agent.does.push("members of its group may use `tidegate run`".to_owned()),
        false => agent.lacks.push((
            "only root may use `tidegate run`: there was no group `tidegate` when it started"
                .to_owned(),
            "groupadd --system tidegate, and systemctl restart tidegate-agent".to_owned(),
        )),
    }
    agent
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
