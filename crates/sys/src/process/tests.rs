use std::{thread, time::Instant};

use super::*;
use crate::schemes::nrm::tree_tests::Nest;

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn root_a_command_waits_in_its_cgroup_and_ends_if_it_is_not_started() {
    const TEST: &str = "root_a_command_waits_in_its_cgroup_and_ends_if_it_is_not_started";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let nest = Nest::new("waits", 1);
    let group = &nest.groups[0];
    let signals = SignalQueue::block(&[libc::SIGTERM]).unwrap();
    let prepare = |program: &str| signals.prepare(Command::new(program), group, None).unwrap();

    let prepared = prepare("true");
    let deadline = Instant::now() + PATIENCE;
    let process = loop {
        if let [process] = group.processes().unwrap()[..] {
            break process;
        }
        assert!(Instant::now() < deadline, "nothing entered the cgroup");
        thread::sleep(Duration::from_millis(1));
    };
    let program = |pid: u32| fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    assert_eq!(program(process), program(std::process::id()), "the command has not begun");
    drop(prepared);
    assert!(group.processes().unwrap().is_empty());

    assert!(prepare("true").start().unwrap().wait().unwrap().success());
    let error = prepare("no-such-command-at-all").start().unwrap_err();
    assert!(
        matches!(&error, SpawnError::NotFound(name) if name == "no-such-command-at-all"),
        "{error}"
    );
    signals.restore();
}
