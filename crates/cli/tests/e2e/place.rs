//! Where it runs: with mounts of its own, in another root, in a container, beside a BPF file system that is
//! open to others. A host is played by a process that is the first of its PID namespace, with mounts of its
//! own and no BPF file system at `/sys/fs/bpf`.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use tidegate_sys::net::NetNs;

use crate::{
    common::{Guard, Place, skip},
    edt::into,
    need_root,
};

const TIDEGATE: &str = env!("CARGO_BIN_EXE_tidegate");

/// A shell that is the first process of a host.
pub struct Host {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _shell: Guard,
}

impl Host {
    /// `None`, and SKIP, where namespaces cannot be had.
    pub fn new() -> Option<Host> {
        Host::start(Command::new("unshare"))
    }

    pub fn with_network(netns: &NetNs) -> Option<Host> {
        Host::start(into(netns, "unshare"))
    }

    fn start(mut command: Command) -> Option<Host> {
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh"]);
        command.env_remove("TIDEGATE_BPFFS").env("T", TIDEGATE);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child: Child = command.spawn().ok()?;
        let (input, output) = (child.stdin.take()?, BufReader::new(child.stdout.take()?));
        let mut host = Host { input, output, _shell: Guard(child) };
        let script = "while umount -l /sys/fs/bpf; do :; done 2>/dev/null; echo $$";
        if host.sh(script).1.trim() != "1" {
            skip("needs mount and PID namespaces");
            return None;
        }
        Some(host)
    }

    /// Exit code, and what was said on both outputs.
    pub fn sh(&mut self, script: &str) -> (i32, String) {
        writeln!(self.input, "{{ {script}\n}} 2>&1 < /dev/null; printf '\\nEND %d\\n' $?").unwrap();
        let mut said = String::new();
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line).unwrap_or(0) == 0 {
                return (-1, said);
            }
            if let Some(code) = line.strip_prefix("END ") {
                return (code.trim().parse().unwrap(), said);
            }
            said += &line;
        }
    }

    pub fn ok(&mut self, script: &str) -> String {
        let (code, said) = self.sh(script);
        assert_eq!(code, 0, "{script}: {said}");
        said
    }

    fn has_bpffs(&mut self) -> bool {
        self.ok("cat /proc/self/mountinfo").contains(" /sys/fs/bpf ")
    }
}

/// Every verb, through a command that gives it other mounts.
fn works_through(host: &mut Host, through: &str, place: &Place) {
    let cgroup = place.group.path();
    host.ok(&format!("{through} $T limit add place-a --cgroup {cgroup} --egress 50mbit"));
    // It has outlived the command, and the host sees it.
    assert!(host.has_bpffs(), "{through}");
    for from in ["", through] {
        let table = host.ok(&format!("{from} $T status"));
        assert!(table.contains("place-a") && table.contains("in force"), "{from}: {table}");
        assert!(table.contains(cgroup), "{from}: {table}");
        let said = host.ok(&format!("{from} $T explain {cgroup} --sample 10ms"));
        assert!(said.contains("`place-a`") && !said.contains("another store"), "{from}: {said}");
        let said = host.ok(&format!("{from} $T doctor"));
        assert!(said.contains("version 2 at /sys/fs/cgroup"), "{from}: {said}");
    }
    host.ok(&format!("{through} $T limit set place-a --egress 20mbit"));
    host.ok(&format!("{through} $T run --egress 1mbit true"));
    let file = place.file(
        "limits.toml",
        &format!("[[limit]]\nname = \"place-a\"\nscope = {{ cgroup = \"{cgroup}\" }}\negress = \"9mbit\"\n"),
    );
    host.ok(&format!("{through} $T apply {}", file.display()));
    assert!(host.ok("$T status").contains("9mbit"));
    host.ok(&format!("{through} $T detach"));
    assert!(host.ok("$T status").contains("No limits"));
    assert!(!host.has_bpffs(), "{through}");
}

#[test]
fn root_limits_are_the_hosts_whatever_a_command_has_mounted() {
    need_root!();
    let place = Place::new();
    let netns = NetNs::create(&format!("tidegate-place-{}", std::process::id())).unwrap();
    let Some(mut host) = Host::new() else { return };
    let name = netns.name();
    works_through(&mut host, "", &place);
    works_through(&mut host, "unshare -m", &place);
    works_through(&mut host, "nsenter -t 1 -m", &place);
    if host.sh(&format!("ip netns exec {name} true")).0 == 0 {
        works_through(&mut host, &format!("ip netns exec {name}"), &place);
        // Devices are those of the namespace.
        let add = "limit add place-b --dev lo --scheme police --egress 50mbit";
        host.ok(&format!("ip netns exec {name} $T {add}"));
        assert!(host.ok(&format!("ip netns exec {name} $T status")).contains("in force"));
        host.ok(&format!("ip netns exec {name} $T detach"));
    } else {
        skip("one of its parts needs `ip netns exec`");
    }
    // With a BPF file system that the host has mounted.
    host.ok("mount -t bpf -o mode=0700 bpf /sys/fs/bpf");
    let add = format!("limit add place-c --cgroup {} --egress 50mbit", place.group.path());
    host.ok(&format!("unshare -m $T {add}"));
    assert!(host.ok("$T status").contains("in force"));
    host.ok("unshare -m $T detach");
    assert!(host.has_bpffs(), "it is not ours");
}

#[test]
fn root_limits_are_the_hosts_in_another_root() {
    need_root!();
    let place = Place::new();
    let Some(mut host) = Host::new() else { return };
    // Never removed with what is in it: that may be everything.
    let root = tempfile::tempdir().unwrap().keep();
    let r = root.display();
    host.ok(&format!(
        "mount --rbind / {r}; for d in proc sys; do mount -t tmpfs none {r}/$d; done"
    ));
    let add = format!("limit add place-d --cgroup {} --egress 50mbit", place.group.path());
    // Each refusal says what to type, and that works.
    for (at, says) in [
        ("proc", "/proc is not mounted here; type: mount -t proc proc /proc"),
        ("sys", "/sys is not mounted here; type: mount -t sysfs sysfs /sys"),
    ] {
        let (code, said) = host.sh(&format!("chroot {r} $T {add}"));
        assert!(code == 2 && said.contains(says), "{at}: {code} {said}");
        host.ok(&format!("chroot {r} {}", said.trim().rsplit_once("type: ").unwrap().1));
    }
    works_through(&mut host, &format!("chroot {r}"), &place);
    drop(host);
    let _ = fs::remove_dir(&root);
}

#[test]
fn root_a_limit_that_would_end_with_its_container_is_refused() {
    need_root!();
    let place = Place::new();
    let Some(mut host) = Host::new() else { return };
    let container = "unshare --mount --pid --fork --mount-proc";
    let add = format!("limit add place-e --cgroup {} --egress 50mbit", place.group.path());
    let (code, said) = host.sh(&format!("{container} $T {add}"));
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("first process of a container"), "{said}");
    assert!(said.contains("-v /sys/fs/bpf:/sys/fs/bpf"), "{said}");
    // What needs no store works, and so does what is advised.
    host.ok(&format!("{container} $T run --egress 1mbit true"));
    assert!(host.ok(&format!("{container} $T status")).contains("No limits"));
    host.ok("mount -t bpf -o mode=0700 bpf /sys/fs/bpf");
    host.ok(&format!("{container} $T {add}"));
    assert!(host.ok("$T status").contains("in force"));
    host.ok("$T detach");
    // One without privileges.
    let (code, said) =
        host.sh(&format!("{container} setpriv --bounding-set -sys_admin,-bpf $T {add}"));
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("missing: CAP_BPF, CAP_SYS_ADMIN"), "{said}");
    assert!(said.contains("--privileged"), "{said}");
}

/// A container has a cgroup namespace of its own, in which its cgroup is the root.
#[test]
fn root_a_limit_is_the_same_in_another_cgroup_namespace() {
    need_root!();
    let place = Place::new();
    let contained = |args: &[&str]| {
        let script = "exec 2>&1; umount -l \"$0\" && mount -t cgroup2 none \"$0\" && exec \"$@\"";
        let mut command = place.inside(&place.group, "unshare");
        command.args(["--cgroup", "--mount", "sh", "-c", script]).arg(place.hierarchy.mount());
        let output = command.arg(TIDEGATE).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{args:?}: {said}");
        said
    };
    let cgroup = place.group.path();
    contained(&["limit", "add", "inside", "--cgroup", "/", "--egress", "50mbit"]);
    let seen = place.ok(&["status"]);
    assert!(seen.contains("in force") && seen.contains(cgroup), "{seen}");
    place.ok(&["limit", "set", "inside", "--egress", "20mbit"]);
    let seen = contained(&["status"]);
    assert!(seen.contains("in force") && seen.contains("20mbit"), "{seen}");
    place.ok(&["limit", "del", "inside"]);

    place.ok(&["limit", "add", "outside", "--cgroup", cgroup, "--egress", "50mbit"]);
    let seen = contained(&["status"]);
    assert!(seen.contains("in force"), "{seen}");
    contained(&["limit", "del", "outside"]);
    assert!(place.ok(&["status"]).contains("No limits"));
}

/// As in a container that has the host's tree mounted.
#[test]
fn root_processes_have_the_cgroups_of_the_host_in_another_cgroup_namespace() {
    need_root!();
    let place = Place::new();
    let mut command = place.inside(&place.group, "unshare");
    command.args(["--cgroup", "sh", "-c", "exec 2>&1 \"$0\" explain $$ --sample 10ms", TIDEGATE]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains(&format!("in cgroup {}", place.group.path())), "{said}");
}

#[test]
fn root_a_store_that_others_can_change_is_refused() {
    need_root!();
    let place = Place::new();
    let (store, bpffs) = (place.store(), place.store().parent().unwrap().to_owned());
    let add = ["limit", "add", "a", "--cgroup", place.group.path(), "--egress", "50mbit"];
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().mode() & 0o7777;
    let set = |path: &std::path::Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    // What is typed in the end is what the refusal says.
    let refused_and_mended = |verb: &[&str]| {
        let (code, said) = place.refused(verb);
        assert_eq!(code, 2, "{said}");
        assert!(said.contains("open to other users"), "{said}");
        let advice = said.trim().rsplit_once("type: ").unwrap().1.to_owned();
        assert!(Command::new("sh").args(["-c", &advice]).status().unwrap().success(), "{advice}");
    };
    set(&bpffs, 0o777);
    refused_and_mended(&add);
    place.ok(&add);
    assert_eq!(mode(&store), 0o700);
    set(&store, 0o777);
    for verb in [&add[..], &["status"], &["detach"]] {
        set(&store, 0o777);
        refused_and_mended(verb);
    }
    assert!(place.ok(&["status"]).contains("in force"));
    place.ok(&["detach"]);
    // Somebody else was there first.
    fs::create_dir(&store).unwrap();
    chown(&store, Some(65_534), Some(65_534)).unwrap();
    refused_and_mended(&add);
    // An earlier version has let others look, and lock.
    fs::create_dir(&store).unwrap();
    set(&store, 0o755);
    place.ok(&add);
    assert_eq!(mode(&store), 0o700);
}
