//! `tidegate run`: transparent to the command, and nothing left behind.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::Stdio,
    time::Instant,
};

use rustix::process::Signal;

use crate::{
    common::{Guard, Objects, PATIENCE, Place, refused, signal, started, text, wait_for},
    need_root,
};

const RATE: &[&str] = &["--egress", "50mbit"];
const BOTH: &[&str] = &["--egress", "50mbit", "--ingress", "50mbit"];

#[test]
fn root_run_exits_as_the_command_does() {
    need_root!();
    let place = Place::new();
    for code in [0, 1, 7, 255] {
        let status = place.run(RATE).args(["sh", "-c", &format!("exit {code}")]).status();
        assert_eq!(status.unwrap().code(), Some(code));
    }
    let killed = place.run(RATE).args(["sh", "-c", "kill -KILL $$"]).status();
    assert_eq!(killed.unwrap().code(), Some(128 + 9));
}

#[test]
fn root_run_says_why_a_command_does_not_start() {
    need_root!();
    let place = Place::new();
    let (code, message) = refused(place.run(RATE).arg("no-such-command"));
    assert_eq!(
        (code, message.as_str()),
        (127, "tidegate: error: `no-such-command`: command not found\n")
    );
    let (code, message) = refused(place.run(RATE).arg("/etc/passwd"));
    assert_eq!(code, 126);
    assert!(message.contains("cannot be executed: Permission denied"), "{message}");
    assert!(place.run_group().is_none());
}

#[test]
fn root_run_leaves_input_output_and_arguments_alone() {
    need_root!();
    let place = Place::new();
    let output = place.run(RATE).args(["printf", "%s|", "a b", "--stats", "-x"]).output().unwrap();
    assert_eq!(text(&output), "a b|--stats|-x|");
    assert!(output.stderr.is_empty(), "says nothing of its own");
}

#[test]
fn root_run_passes_signals_on() {
    need_root!();
    let place = Place::new();
    let signals = [
        Signal::TERM,
        Signal::INT,
        Signal::HUP,
        Signal::QUIT,
        Signal::USR1,
        Signal::USR2,
        Signal::WINCH,
    ];
    for (i, sent) in signals.into_iter().enumerate() {
        let code = 40 + i32::try_from(i).unwrap();
        let script = format!(
            "trap 'exit {code}' {}; echo ready; while :; do sleep 0.01; done",
            sent.as_raw()
        );
        let mut command = place.run(RATE);
        // A shell cannot trap what it was started to ignore, as `nohup` and `&` have it.
        command.args(["env", "--default-signal", "sh", "-c", &script]).stdout(Stdio::piped());
        let mut child = Guard(command.spawn().unwrap());
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        signal(child.0.id(), sent);
        assert_eq!(child.exit_code(), code, "{sent:?}");
    }
}

#[test]
fn root_run_gives_the_command_the_signal_mask_it_had_itself() {
    need_root!();
    let place = Place::new();
    let mask = |status: &str| {
        let line = status.lines().find(|line| line.starts_with("SigBlk:"));
        line.unwrap_or_default().to_owned()
    };
    let plain = place.inside(&place.group, "cat").arg("/proc/self/status").output().unwrap();
    let limited = place.run(RATE).args(["cat", "/proc/self/status"]).output().unwrap();
    assert_eq!(mask(&text(&limited)), mask(&text(&plain)));
}

#[test]
fn root_run_leaves_nothing() {
    need_root!();
    let place = Place::new();
    let mut command = place.run(BOTH);
    let mut child = Guard(command.arg("cat").stdin(Stdio::piped()).spawn().unwrap());
    let (group, objects) = wait_for("the command under its limit", || {
        let group = place.run_group()?;
        let objects = Objects::on(&group);
        (!started(&group).is_empty() && objects.is_whole()).then_some((group, objects))
    });
    drop(child.0.stdin.take());
    assert_eq!(child.exit_code(), 0);
    assert!(!group.absolute().exists());
    objects.wait_until_gone();
}

/// The kernel takes longest to check programs, so a start waits for those that it needs alone.
#[test]
fn root_run_loads_no_program_for_a_direction_without_a_limit() {
    need_root!();
    let place = Place::new();
    const POLICE: &[&str] = &["--scheme", "police"];
    for (rates, scheme, links) in
        [(RATE, &[][..], 2), (BOTH, &[][..], 3), (RATE, POLICE, 1), (BOTH, POLICE, 2)]
    {
        let flags = &[rates, scheme].concat();
        let mut command = place.run(flags);
        let mut child = Guard(command.arg("cat").stdin(Stdio::piped()).spawn().unwrap());
        let group = wait_for("the command in its cgroup", || {
            place.run_group().filter(|group| !started(group).is_empty())
        });
        assert_eq!(Objects::on(&group).links(), links, "{flags:?}");
        drop(child.0.stdin.take());
        assert_eq!(child.exit_code(), 0);
    }
}

#[test]
fn root_run_killed_leaves_what_the_next_start_sweeps() {
    need_root!();
    let place = Place::new();
    let mut command = place.run(BOTH);
    let mut child = Guard(command.args(["sleep", "1000"]).spawn().unwrap());
    let (group, objects, pid) = wait_for("the command under its limit", || {
        let group = place.run_group()?;
        let objects = Objects::on(&group);
        let pid = *started(&group).first()?;
        objects.is_whole().then_some((group, objects, pid))
    });
    signal(child.0.id(), Signal::KILL);
    child.exit_code();
    objects.wait_until_gone();
    assert_eq!(group.processes().unwrap(), [pid], "the command runs on, unlimited");

    assert!(place.run(RATE).arg("true").status().unwrap().success());
    assert!(group.absolute().exists(), "not swept while somebody is in it");
    signal(pid, Signal::KILL);
    // Whoever runs something beside this may sweep it first.
    wait_for("the end of the command", || {
        group.processes().map_or(true, |left| left.is_empty()).then_some(())
    });
    wait_for("the sweep", || {
        assert!(place.run(RATE).arg("true").status().unwrap().success());
        (!group.absolute().exists()).then_some(())
    });
}

/// The command's process waits in its cgroup while the programs are loaded.
#[test]
fn root_run_killed_before_the_command_starts_leaves_no_process() {
    need_root!();
    let place = Place::new();
    let mut command = place.run(BOTH);
    command.args(["sleep", "1000"]);
    wait_for("a kill that comes before the command", || {
        let mut child = Guard(command.spawn().unwrap());
        let group = wait_for("a process in the cgroup", || {
            place.run_group().filter(|group| group.processes().is_ok_and(|all| !all.is_empty()))
        });
        signal(child.0.id(), Signal::KILL);
        child.exit_code();
        let empty = || group.processes().unwrap().is_empty();
        let came_first = wait_for("the end of the process, or the command", || {
            (empty() || !started(&group).is_empty()).then(empty)
        });
        group.processes().unwrap().into_iter().for_each(|pid| signal(pid, Signal::KILL));
        group.remove(Instant::now() + PATIENCE).unwrap();
        came_first.then_some(())
    });
}

#[test]
fn root_run_moves_what_the_command_leaves_behind_to_the_callers_cgroup() {
    need_root!();
    let place = Place::new();
    let script = "setsid sleep 1000 > /dev/null 2>&1 & echo $!";
    let output = place.run(RATE).args(["sh", "-c", script]).output().unwrap();
    assert!(output.status.success());
    let pid: u32 = text(&output).parse().unwrap();
    assert!(place.run_group().is_none());
    assert!(place.group.processes().unwrap().contains(&pid));
}

#[test]
fn root_run_in_run_holds_both() {
    need_root!();
    let place = Place::new();
    let mut command = place.run(RATE);
    command.arg(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["run", "--egress", "20mbit", "--", "sh", "-c", "cat /proc/self/cgroup; exit 5"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(text(&output).matches("tidegate-run-").count(), 2);
    assert!(place.run_group().is_none());
}

#[test]
fn root_run_without_a_cgroup_to_write_says_so() {
    need_root!();
    let place = Place::new();
    let script = "mount -o remount,ro,bind \"$0\" && exec \"$@\"";
    let mut command = std::process::Command::new("unshare");
    command.args(["-m", "sh", "-c", script]).arg(place.hierarchy.mount());
    command.arg(env!("CARGO_BIN_EXE_tidegate")).args(["run", "--egress", "1mbit", "true"]);
    let (code, message) = refused(&mut command);
    assert_eq!(code, 2, "{message}");
    assert!(message.contains("mounted read-only"), "{message}");
    assert!(fs::read_dir(place.group.absolute()).is_ok());
}

/// A run in another PID namespace has a number that says nothing here; its lock does.
#[test]
fn root_run_of_another_pid_namespace_keeps_its_cgroup() {
    need_root!();
    let place = Place::new();
    let group = place.child("tidegate-run-4194305-1");
    assert!(group.try_lock());
    place.ok(&["detach"]);
    assert!(group.absolute().exists());
    let path = group.absolute().to_owned();
    drop(group);
    place.ok(&["detach"]);
    assert!(!path.exists());
}

#[test]
fn root_run_as_another_user() {
    need_root!();
    let place = Place::new();
    let script =
        "id -u; id -g; id -G; echo $HOME $USER $LOGNAME $SHELL; grep CapEff /proc/self/status";
    let as_user = |user: &str| {
        let mut command = place.run(&[RATE, &["--user", user]].concat());
        command.args(["sh", "-c", script]).env("SUDO_UID", "1").env("SUDO_GID", "1");
        command
    };
    let id = |flag: &str| {
        let output = std::process::Command::new("id").args([flag, "daemon"]).output().unwrap();
        text(&output)
    };
    let passwd = fs::read_to_string("/etc/passwd").unwrap();
    let entry: Vec<_> =
        passwd.lines().find(|line| line.starts_with("daemon:")).unwrap().split(':').collect();
    let expected = format!(
        "{}\n{}\n{}\n{} daemon daemon {}\nCapEff:\t0000000000000000",
        id("-u"),
        id("-g"),
        id("-G"),
        entry[5],
        entry[6]
    );
    assert_eq!(text(&as_user("daemon").output().unwrap()), expected);
    let invoker = text(&as_user("invoker").output().unwrap());
    assert!(invoker.starts_with("1\n1\n") && invoker.contains(" daemon daemon "), "{invoker}");
    let (code, said) = refused(&mut as_user("no-such-user"));
    assert_eq!(code, 1);
    assert!(said.contains("--user no-such-user: there is no such user"), "{said}");
    let mut plain = as_user("invoker");
    let (code, said) = refused(plain.env_remove("SUDO_UID"));
    assert!(code == 1 && said.contains("SUDO_UID is not"), "{code} {said}");
    // Without SUDO_GID the user's own group.
    let invoker = text(as_user("invoker").env_remove("SUDO_GID").output().as_ref().unwrap());
    assert!(invoker.starts_with(&format!("1\n{}\n", id("-g"))), "{invoker}");

    // Nothing of the session of who called.
    let mut command = place.run(&[RATE, &["--user", "daemon"]].concat());
    let callers = [
        ("XDG_RUNTIME_DIR", "/run/user/0"),
        ("XDG_CONFIG_HOME", "/home/caller/.config"),
        ("DBUS_SESSION_BUS_ADDRESS", "unix:path=/run/user/0/bus"),
        ("SSH_AUTH_SOCK", "/root/agent"),
        ("SSH_AGENT_PID", "1"),
        ("XAUTHORITY", "/home/caller/.Xauthority"),
        ("MAIL", "/var/mail/root"),
        ("USERNAME", "root"),
        ("KEPT", "/root"),
    ];
    let output = command.arg("env").envs(callers).output().unwrap();
    let said = text(&output);
    for (name, value) in callers {
        let is = said.lines().any(|line| line == format!("{name}={value}"));
        assert_eq!(is, name == "KEPT", "{name}: {said}");
    }
    assert!(said.lines().any(|line| line == "MAIL=/var/mail/daemon"), "{said}");
    assert!(said.lines().any(|line| line.starts_with("PATH=")), "{said}");
    assert!(place.run_group().is_none());
}
