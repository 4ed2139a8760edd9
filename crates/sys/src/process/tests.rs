use std::{sync::mpsc, thread, time::Instant};

use rustix::process::Pid;

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
    let signals = SignalQueue::block(&[libc::SIGTERM, libc::SIGTSTP]).unwrap();
    let prepare = |program: &str| signals.prepare(Command::new(program), group, None).unwrap();

    let entered = || {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let [process] = group.processes().unwrap()[..] {
                break process;
            }
            assert!(Instant::now() < deadline, "nothing entered the cgroup");
            thread::sleep(Duration::from_millis(1));
        }
    };
    let prepared = prepare("true");
    let process = entered();
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

    // ^Z while the process waits is dropped: a stopped child would keep its parent waiting.
    let prepared = prepare("true");
    let process = Pid::from_raw(entered().try_into().unwrap()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::TSTP).unwrap();
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(prepared.start()));
    let mut child = receiver.recv_timeout(PATIENCE).expect("the command starts").unwrap();
    assert!(child.wait().unwrap().success());
    signals.restore();
}
