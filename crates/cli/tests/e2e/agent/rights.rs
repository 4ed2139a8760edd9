//! The capabilities of the agent's unit are enough for all that it does, and none of them is too much.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;

use super::{Bed, Slice, engine::Engine, limit};
use crate::{
    common::{Guard, PATIENCE, Place, copy_program, signal},
    need_root,
};

const UNIT: &str = include_str!("../../../../../packaging/systemd/tidegate-agent.service");
const USER: u32 = 54321;
/// What does not work by then fails.
const FAILS: Duration = Duration::from_secs(5);

fn capabilities() -> Vec<&'static str> {
    let set = UNIT.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    set.split_whitespace().collect()
}

/// The agent with no more than these capabilities.
fn start(bed: &Bed<'_>, capabilities: &[&str]) -> Guard {
    let names = capabilities.iter().map(|name| name.strip_prefix("CAP_").unwrap().to_lowercase());
    let names: String = names.map(|name| format!(",+{name}")).collect();
    let agent = bed.agent();
    let mut command = Command::new("setpriv");
    command.arg(format!("--bounding-set=-all{names}")).args(["--inh-caps=-all", "--no-new-privs"]);
    command.arg(agent.get_program()).args(agent.get_args()).args(["--group", "daemon"]);
    command.envs(agent.get_envs().filter_map(|(name, value)| Some((name, value?))));
    Guard(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn give(path: &Path, mode: u32) {
    chown(path, Some(USER), Some(USER)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Whether an agent with these capabilities limits a service, asks the engine of a user, moves and limits a
/// program of that user, ends the child that asks, though the user has stopped it, and limits a command of a
/// member of its group by `tidegate`, where that user may execute it.
fn works(tidegate: &Path, capabilities: &[&str], patience: Duration) -> bool {
    let place = Place::new();
    let slice = Slice::new(&place);
    let mut bed = Bed::new(&place, &slice.group);
    let top = bed.dir.parent().unwrap().to_owned();
    fs::set_permissions(&top, fs::Permissions::from_mode(0o755)).unwrap();
    let home = top.join(format!("users/{USER}"));
    fs::create_dir_all(&home).unwrap();
    bed.sockets = vec![top.join("users/*/engine.sock")];
    let engine = Engine::start(home.join("engine.sock"));
    give(&engine.socket, 0o660);
    give(&home, 0o700);
    let (service, users) = (slice.make("a.service"), slice.make("user.service"));
    for file in ["", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"] {
        chown(place.hierarchy.mount().join(users.path()).join(file), Some(USER), Some(USER))
            .unwrap();
    }
    let program = top.join("program");
    copy_program("/bin/sleep", &program);
    let mut command = place.inside(&users, "setpriv");
    command.args([
        format!("--reuid={USER}"),
        format!("--regid={USER}"),
        "--clear-groups".to_owned(),
    ]);
    let _program = Guard(command.arg(&program).arg("1000").spawn().unwrap());
    let unit = |rate: &str| {
        limit("unit", &format!("cgroup = \"{}\"", service.path()), &format!("egress = \"{rate}\""))
    };
    let exe = format!("exe = \"{}\"", program.display());
    let rest = limit("program", &exe, "egress = \"5mbit\"\nmove = true")
        + &limit("web", "container = \"web\"", "egress = \"5mbit\"");
    bed.write("a.toml", &(unit("5mbit") + &rest));
    let mut agent = start(&bed, capabilities);
    let id = agent.0.id();
    let end = Instant::now() + patience;
    let mut until = |is: &dyn Fn() -> bool| {
        while !is() {
            if Instant::now() > end || agent.0.try_wait().unwrap().is_some() {
                return false;
            }
            thread::sleep(Duration::from_millis(50));
        }
        true
    };
    let socket = engine.socket.to_str().unwrap();
    let asked = || bed.status()["agent"]["engines"][socket] == "running";
    let limited = |name: &str| bed.said(name).0 == "in_force";
    let runs = || {
        let mut command = place.inside(&users, "setpriv");
        command.args([&format!("--reuid={USER}"), "--regid=daemon", "--clear-groups"]);
        command.arg(tidegate).args(["run", "--egress", "9mbit", "--", "true"]);
        command.env("TIDEGATE_RUN_DIR", &bed.run).env_remove("XDG_RUNTIME_DIR");
        command.stderr(Stdio::null()).status().unwrap().success()
    };
    let all = until(&|| limited("unit") && limited("program") && asked()) && runs();
    let children = children(id);
    children.iter().for_each(|child| signal(*child, Signal::STOP));
    bed.write("a.toml", &unit("6mbit"));
    let changed = all && until(&|| bed.rate("unit") == Some(6_000_000));
    bed.write("a.toml", &unit("7mbit"));
    let again = changed && until(&|| bed.rate("unit") == Some(7_000_000));
    drop(agent);
    children.iter().for_each(|child| signal(*child, Signal::KILL));
    place.ok(&["detach"]);
    again
}

#[test]
fn root_agent_needs_the_capabilities_of_its_unit() {
    need_root!();
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let tidegate = dir.path().join("tidegate");
    copy_program(env!("CARGO_BIN_EXE_tidegate"), &tidegate);
    let all = capabilities();
    assert!(works(&tidegate, &all, PATIENCE), "{all:?} are not enough");
    for name in &all {
        let others: Vec<_> = all.iter().filter(|other| *other != name).copied().collect();
        assert!(!works(&tidegate, &others, FAILS), "{name} is not needed");
    }
}
