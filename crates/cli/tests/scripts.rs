//! The scripts that run the tests keep their own promises.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

/// A process that takes longer to end is one that does not end.
const DEADLINE: Duration = Duration::from_secs(60);

/// `scripts/bounded.sh` with this limit, around a shell that starts a process, prints its id and waits for
/// it.
fn bounded(limit: &str) -> (Child, BufReader<ChildStdout>, u32) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/bounded.sh");
    let mut child = Command::new(script)
        .args([limit, "bash", "-c", "sleep 600 >/dev/null & echo $!; wait"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the script starts");
    let mut lines = BufReader::new(child.stdout.take().expect("it has an output"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("it prints a line");
    let inner = line.trim().parse().expect("the id of a process");
    (child, lines, inner)
}

/// Waits until a process is gone, or only its parent has not heard of that yet.
fn wait_until_gone(process: u32) {
    let end = Instant::now() + DEADLINE;
    let runs = || {
        std::fs::read_to_string(format!("/proc/{process}/stat"))
            .is_ok_and(|stat| stat.contains("(sleep)") && !stat.contains(") Z "))
    };
    while runs() {
        assert!(Instant::now() < end, "process {process} still runs");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_command_that_takes_too_long_ends_with_all_that_it_started() {
    let (mut script, _lines, inner) = bounded("1");
    assert_eq!(script.wait().expect("it ends").code(), Some(124));
    wait_until_gone(inner);
}

#[test]
fn a_command_ends_with_the_script_that_runs_it() {
    let (mut script, _lines, inner) = bounded("600");
    let id = Pid::from_child(&script);
    kill_process(id, Signal::TERM).expect("the script still runs");
    assert!(!script.wait().expect("it ends").success());
    wait_until_gone(inner);
}
