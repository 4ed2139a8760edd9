//! `tidegate doctor`: what this host can do for limits, and what to do.

use std::{fs, io::Write, os::unix::fs::MetadataExt, path::Path, process::ExitCode};

use anyhow::Result;
use tidegate_agent::{
    agent::{START_PODMAN, answers},
    directory,
    report::GateState,
    status::AgentStatus,
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

/// The advice where new cgroups cannot be held.
const HOLD: &str = "boot a kernel with CONFIG_BPF_EVENTS=y and CONFIG_DEBUG_INFO_BTF=y, and start the \
                    agent by its unit, which has the capabilities; until then a service that starts is \
                    limited some milliseconds late";
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
            agent.lacks.extend(lines.into_iter().map(|line| (line, HOLD.to_owned())));
        }
        _ => agent.does.extend(lines),
    }
    for (socket, state) in &status.report.engines {
        let line = format!("{socket}: {state}");
        match answers(state) {
            true => agent.does.push(line),
            false => agent.lacks.push((line, cure(socket, state))),
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

/// The advice about an engine, or the API server, that does not answer.
fn cure(socket: &str, state: &str) -> String {
    let user = if socket.starts_with("/run/user/") { " --user" } else { "" };
    let start = match socket.rsplit('/').next() {
        // That says it itself.
        _ if state.contains(START_PODMAN) => None,
        _ if !socket.starts_with('/') => {
            Some("see whether `kubectl get --raw /readyz` answers here".to_owned())
        }
        Some("docker.sock") => Some(format!("systemctl{user} start docker.service")),
        Some("podman.sock") => Some(format!("systemctl{user} start podman.socket")),
        _ => Some("start that engine".to_owned()),
    };
    let start = start.map_or_else(String::new, |start| format!("{start}; "));
    format!("{start}limits stay as they are until it answers")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_is_away_has_a_cure() {
        let podman = format!("away: Podman has no socket; type {START_PODMAN}");
        for (socket, state, what) in [
            ("/run/docker.sock", "away: refused", "systemctl start docker.service; "),
            ("/run/user/1000/docker.sock", "away: x", "systemctl --user start docker.service; "),
            ("/run/podman/podman.sock", "has not answered yet", "systemctl start podman.socket; "),
            ("/run/podman/podman.sock", &podman, ""),
            ("/srv/engine.sock", "away: x", "start that engine; "),
            ("pods of node a", "away: x", "see whether `kubectl get --raw /readyz` answers here; "),
        ] {
            let said = cure(socket, state);
            assert_eq!(said, format!("{what}limits stay as they are until it answers"), "{socket}");
        }
    }
}
