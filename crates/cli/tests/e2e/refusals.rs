//! Bad input and hosts that cannot: one message, the right exit code, nothing changed.

use std::{
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    process::{Command, Stdio},
};

use tidegate_sys::cgroup::Hierarchy;

use crate::{
    common::{Place, refused, skip},
    need_root,
};

fn tidegate(args: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    refused(command.args(args).env("TIDEGATE_BPFFS", "/nonexistent/bpffs").stdin(Stdio::null()))
}

#[test]
fn usage_errors_exit_1_and_say_what_to_type() {
    for (args, says) in [
        (&["run", "--egress", "50mbps", "true"][..], "write `50mbit` for megabits, or `400mbit`"),
        (&["run", "--egress", "50", "true"], "`50` has no unit"),
        (&["run", "--egress", "0mbit", "true"], "is zero"),
        (&["run", "--egress=-5mbit", "true"], "is negative"),
        (&["run", "--egress", "900gbit", "true"], "--egress: 900gbit is out of range"),
        (&["run", "--egress", "1gbit", "--rto-min", "5s", "true"], "--rto-min: 5s is out of range"),
        (&["run", "--egress", "1gbit", "--mark", "5ms", "true"], "--mark: mark threshold 5ms"),
        (
            &["run", "--egress", "1gbit", "--scheme", "pace", "--pace-ceiling=false", "true"],
            "--pace-ceiling: scheme `pace`",
        ),
        (&["run", "true"], "--egress: neither egress nor ingress"),
        (&["run", "--egress", "1mbit"], "COMMAND"),
        (&["run", "--egres", "1mbit", "true"], "--egress"),
        (&["run", "--egress", "1gbit", "--scheme", "htb", "true"], "on another cgroup write"),
        (
            &["run", "--egress", "1gbit", "--scheme", "htb", "--parent", "a", "true"],
            "on another cgroup write --scheme pace, nrm, edt or police",
        ),
        (&["run", "--egress", "1gbit", "--scheme", "dem", "true"], "on a cgroup write --scheme"),
        (&["run", "--scheme", "tbf", "--help"], "on a cgroup write --scheme pace, nrm, edt or"),
        (&["run", "--ingress", "1gbit", "--scheme", "edt", "true"], "`edt` limits egress only"),
        (
            &["limit", "add", "a", "--cgroup=x", "--egress", "1gbit", "--scheme", "tbf"],
            "--scheme: scheme `tbf` works on devices, ports; on a cgroup write --scheme pace,",
        ),
        (
            &["limit", "add", "a", "--port=x", "--egress", "1gbit", "--scheme", "tbf"],
            "--egress: on a port, scheme `tbf` limits ingress only; write --egress none, or --sch",
        ),
        (&["run", "--egress", "1gbit", "--scheme", "fast", "true"], "--scheme"),
        (&["plan", "a.toml", "--at", "x"], "write for example 2026-03-02T09:00"),
        (&["limit", "add", "a b", "--cgroup", "x", "--egress", "1mbit"], "limit name `a b`"),
        (&["limit", "add", "a", "--cgroup", "", "--egress", "1mbit"], "--cgroup: empty path"),
        (&["limit", "add", "a", "--egress", "1mbit"], "--cgroup"),
        (&["limit", "set", "a"], "name what to change"),
        (&["monitor", "--interval", "1ns"], "out of range"),
        (&["monitor", "--interval", "5"], "has no unit"),
        (&["explain"], "<PID|CGROUP|FLOW>"),
        (&["explain", "1", "--sample", "61s"], "write 10ms to 60s"),
        (&["top"], "needs a terminal to draw on; `tidegate monitor` writes lines"),
        (&["top", "--interval", "1ms"], "write 100ms to 60s"),
        (&["frobnicate"], "frobnicate"),
        (&[], "requires a subcommand"),
        (&["limit", "add", "a", "--cgroup=x", "--egress", "-5mbit"], "unexpected argument '-5'"),
        (&["run", "--egress", "0", "true"], "`0` is zero"),
        (&["plan", "/"], "/: is a directory"),
        (&["check", "/nonexistent/limits.toml"], "cannot be read: No such file"),
        (&["check", "/dev/zero"], "larger than 4 MiB"),
        (&["man", "/nonexistent"], "name a directory that exists"),
    ] {
        let (code, message) = tidegate(args);
        assert_eq!(code, 1, "{args:?}: {message}");
        assert!(message.starts_with("tidegate: error: "), "{args:?}: {message}");
        assert_eq!(message.matches("error: ").count(), 1, "{message}");
        assert!(message.contains(says), "{args:?}: {message}");
        for wrong in ["Usage: ", "web-server", "'-- -"] {
            assert!(!message.contains(wrong), "{args:?}: {message}");
        }
    }
}

/// Lines of several processes on one terminal do not run into each other.
#[test]
fn an_error_is_one_write() {
    let (reads, writes) = UnixDatagram::pair().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["run", "true"]).stdin(Stdio::null()).stderr(OwnedFd::from(writes));
    assert_eq!(command.status().unwrap().code(), Some(1));
    let mut line = [0; 4096];
    let bytes = reads.recv(&mut line).unwrap();
    let line = str::from_utf8(&line[..bytes]).unwrap();
    assert!(line.starts_with("tidegate: error: ") && line.ends_with('\n'), "{line:?}");
}

#[test]
fn help_and_version_are_no_errors() {
    for args in [&["--help"][..], &["--version"], &["run", "--help"], &["limit", "set", "-h"]] {
        assert_eq!(tidegate(args), (0, String::new()));
    }
}

#[test]
fn completions_know_the_verbs_and_a_reader_who_goes_away() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output = command.args(["completions", "bash"]).output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().contains("--dry-run"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
}

#[test]
fn every_verb_has_a_man_page() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(tidegate(&["man", dir.path().to_str().unwrap()]).0, 0);
    for page in ["tidegate.1", "tidegate-run.1", "tidegate-limit-add.1", "tidegate-apply.1"] {
        assert!(dir.path().join(page).exists(), "{page}");
    }
}

/// Runs tidegate in a mount namespace of its own after a script.
fn after(script: &str, argument: &str, args: &[&str]) -> (i32, String) {
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &format!("{script} && exec \"$@\"")]).arg(argument);
    refused(command.arg(env!("CARGO_BIN_EXE_tidegate")).args(args))
}

const LIMIT: [&str; 6] = ["limit", "add", "a", "--cgroup=x", "--egress", "1mbit"];
const RUN: [&str; 4] = ["run", "--egress", "1mbit", "true"];

#[test]
fn root_without_privileges_says_which() {
    need_root!();
    for args in [&LIMIT[..], &RUN, &["status"], &["detach"]] {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-all", "--inh-caps", "-all"]);
        let Ok(output) = command.arg(env!("CARGO_BIN_EXE_tidegate")).args(args).output() else {
            return skip("needs setpriv");
        };
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains("missing: CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN"), "{message}");
        // Root without privileges is that of a container.
        assert!(message.contains("--privileged"), "{message}");
    }
}

#[test]
fn root_without_btf_says_so() {
    need_root!();
    for args in [&LIMIT[..], &RUN] {
        let (code, message) = after("mount -t tmpfs none \"$0\"", "/sys/kernel/btf", args);
        assert_eq!(code, 2, "{message}");
        assert!(message.contains("CONFIG_DEBUG_INFO_BTF=y"), "{message}");
    }
}

#[test]
fn root_a_cgroup_hierarchy_that_is_not_mounted_is_no_obstacle() {
    need_root!();
    let place = Place::new();
    let mount = Hierarchy::find().unwrap().mount().to_str().unwrap().to_owned();
    let store = place.store();
    let (group, store) = (place.group.path(), store.to_str().unwrap());
    let add = ["--bpffs", store, "limit", "add", "a", "--cgroup", group, "--egress", "1mbit"];
    for args in [&add[..], &RUN] {
        let (code, message) = after("umount -l \"$0\"", &mount, args);
        assert_eq!(code, 0, "{message}");
    }
    let status = place.json(&["status", "--json"]);
    assert_eq!(status["limits"][0]["state"], "in_force");
    assert_eq!(status["limits"][0]["cgroup"], group);
}

#[test]
fn root_a_store_outside_a_bpf_file_system_is_refused_and_not_made() {
    need_root!();
    let place = Place::new();
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("limits");
    let add = ["limit", "add", "a", "--cgroup", place.group.path(), "--egress", "1mbit"];
    let (code, message) = refused(place.tidegate().args(add).arg("--bpffs").arg(&store));
    assert_eq!(code, 2, "{message}");
    assert!(
        message.contains("not in a BPF file system") && message.contains("mount -t bpf"),
        "{message}"
    );
    assert!(!store.exists());
}

#[test]
fn root_cgroups_that_are_none() {
    need_root!();
    let place = Place::new();
    let file = format!("{}/cgroup.procs", place.group.path());
    for (cgroup, says) in [
        ("no/such", "does not exist below"),
        (file.as_str(), "is no cgroup but a file"),
        ("../..", "without `.` and `..`"),
    ] {
        let (code, message) =
            place.refused(&["limit", "add", "a", "--cgroup", cgroup, "--egress", "1mbit"]);
        assert_eq!(code, 1, "{message}");
        assert!(message.contains(says), "{message}");
    }
    let (code, message) = place.refused(&["limit", "set", "nobody", "--egress", "1mbit"]);
    assert_eq!(code, 1);
    assert!(message.contains("there is no limit `nobody`"), "{message}");
    assert!(!place.store().exists());
}
