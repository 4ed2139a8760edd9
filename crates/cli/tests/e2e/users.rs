//! `tidegate run` of normal users, whose limits the agent holds.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::{net, process::Signal};
use serde_json::Value;
use tidegate_host::run::socket::{ANSWER_MAX, Answer, Asked, receive};
use tidegate_sys::cgroup::Cgroup;

use crate::{
    common::{Guard, Objects, Place, copy_program, refused, signal, started, text, wait_for},
    need_root,
};

/// The user `daemon`, in a group of that number.
const USER: u32 = 1;

/// A cgroup that belongs to a user, and an agent for members of the user's group.
struct Bed<'a> {
    place: &'a Place,
    group: Cgroup,
    program: PathBuf,
}

impl<'a> Bed<'a> {
    fn new(place: &'a Place) -> Bed<'a> {
        let program = place.dir().join("tidegate");
        let dir = place.dir();
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
        // Where the user may execute it, wherever this was built.
        copy_program(env!("CARGO_BIN_EXE_tidegate"), &program);
        fs::create_dir(dir.join("etc")).unwrap();
        let group = place.child("user");
        for file in ["", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"] {
            chown(group.absolute().join(file), Some(USER), Some(USER)).unwrap();
        }
        Bed { place, group, program }
    }

    fn dir(&self) -> &Path {
        self.program.parent().unwrap()
    }

    fn socket(&self) -> PathBuf {
        self.dir().join("run/agent.sock")
    }

    fn agent(&self) -> Guard {
        self.agent_of("daemon", 0o660)
    }

    fn agent_of(&self, group: &str, mode: u32) -> Guard {
        let _ = fs::remove_file(self.socket());
        let mut command = self.place.tidegate();
        command.arg("agent").arg(self.dir().join("etc")).args(["--group", group, "--engine"]);
        command.arg(self.dir().join("none.sock")).args(["--below", self.place.group.path()]);
        let agent = Guard(command.stdout(Stdio::null()).spawn().unwrap());
        wait_for("the agent", || {
            let socket = fs::metadata(self.socket()).ok()?;
            (socket.permissions().mode() & 0o777 == mode).then_some(())
        });
        agent
    }

    /// `tidegate run` as a user, inside a cgroup.
    fn run_as(&self, user: u32, inside: &Cgroup, flags: &[&str]) -> Command {
        let mut command = self.place.inside(inside, "setpriv");
        let (uid, gid) = (format!("--reuid={user}"), format!("--regid={user}"));
        command.args([uid.as_str(), gid.as_str(), "--clear-groups"]).arg(&self.program);
        command.arg("run").args(flags).arg("--").env_remove("XDG_RUNTIME_DIR");
        command
    }

    fn run(&self, flags: &[&str]) -> Command {
        self.run_as(USER, &self.group, flags)
    }

    /// Starts a command that waits for its input to end, and returns with it when it is limited.
    fn start(&self) -> (Guard, Cgroup, Objects) {
        let mut command = self.run(&["--egress", "9mbit"]);
        let child = Guard(command.arg("cat").stdin(Stdio::piped()).spawn().unwrap());
        let (group, objects) = wait_for("the command under its limit", || {
            let group = self.place.run_group()?;
            let objects = Objects::on(&group);
            (!started(&group).is_empty() && objects.is_whole()).then_some((group, objects))
        });
        (child, group, objects)
    }
}

#[test]
fn root_users_run_is_limited_by_the_agent() {
    need_root!();
    let place = Place::new();
    let bed = Bed::new(&place);
    let _agent = bed.agent();
    let mut command = bed.run(&["--egress", "9mbit", "--loopback", "--stats", "--json"]);
    let script = "id -u; cat /proc/self/cgroup; exec 3<>/dev/udp/127.0.0.1/9; echo x >&3; exit 7";
    let output = command.args(["bash", "-c", script]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{error}");
    let said = text(&output);
    assert!(said.starts_with("1\n") && said.contains("/user/tidegate-run-"), "{said}");
    let stats: Value = serde_json::from_str(&error).unwrap();
    assert_eq!(stats["egress"]["rate_bit_s"], 9_000_000);
    assert_eq!((&stats["egress"]["pass_packets"], &stats["exit_code"]), (&1.into(), &7.into()));
    assert!(place.limits().is_empty() && place.run_group().is_none());

    let (mut child, group, objects) = bed.start();
    let name = group.path().rsplit('/').next().unwrap();
    assert_eq!(place.json(&["limit", "show", name, "--json"])["state"], "in_force");
    drop(child.0.stdin.take());
    assert_eq!(child.exit_code(), 0);
    assert!(place.limits().is_empty() && !group.absolute().exists());
    objects.wait_until_gone();
}

#[test]
fn root_prune_leaves_alone_what_the_agent_and_runs_of_users_keep() {
    need_root!();
    let place = Place::new();
    let bed = Bed::new(&place);
    let groups = ["kept", "by-hand", "around"].map(|name| place.child(name));
    let [kept, by_hand, around] = groups.each_ref().map(|group| group.path());
    let inside = place.hierarchy.create(&groups[2], "inside").unwrap();
    let limit = |name: &str, cgroup: &str, more: &str| {
        format!("[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{cgroup}\" }}\n{more}\n")
    };
    let rate = "egress = \"9mbit\"";
    let text = limit("kept", kept, rate)
        + &limit("inside", inside.path(), "parent = \"around\"\nweight = 10")
        + &limit("later", "none", rate);
    for (name, cgroup) in [("by-hand", by_hand), ("around", around)] {
        place.ok(&["limit", "add", name, "--cgroup", cgroup, "--egress", "20mbit"]);
    }
    fs::write(bed.dir().join("etc/a.toml"), text).unwrap();
    let agent = bed.agent();
    let (mut child, group, _objects) = bed.start();
    let run = group.path().rsplit('/').next().unwrap();
    let mut all =
        ["around", "by-hand", "inside", "kept", run, "~later"].map(str::to_owned).to_vec();
    all.sort();
    let has = |names: &[String]| {
        let mut is = place.limits();
        is.sort();
        is == names
    };
    // The agent has said so, too.
    wait_for("all limits", || {
        let status = place.json(&["status", "--json"]);
        let said = status["agent"]["limits"].as_array()?.iter();
        let in_force = said.filter(|limit| limit["state"] == "in_force").count();
        (in_force == 2 && has(&all)).then_some(())
    });
    let none = place.file("none.toml", "limit = []\n");
    let apply = ["apply", "--prune", none.to_str().unwrap()];
    let stay = "4 limits of others stay: 3 of `tidegate agent`, 1 of `tidegate run`";
    let plan = place.ok(&["plan", none.to_str().unwrap()]);
    assert!(plan.contains("by-hand: not in the file") && plan.contains(stay), "{plan}");
    let said = place.ok(&apply);
    assert!(said.contains("- by-hand on") && said.contains(stay), "{said}");
    assert!(said.contains("0 added, 0 changed, 1 removed"), "{said}");
    all.retain(|name| name != "by-hand");
    assert!(has(&all), "{:?}", place.limits());
    let taken = place.file("taken.toml", &limit("mine", kept, rate));
    let (code, said) = place.refused(&["apply", "--prune", taken.to_str().unwrap()]);
    let who = "limit `kept`, which `tidegate agent` removes when its files";
    assert!(code == 1 && said.contains(who), "{code} {said}");
    // With its command and its agent they are nobody's.
    drop(child.0.stdin.take());
    assert_eq!(child.exit_code(), 0);
    drop(agent);
    assert!(place.ok(&apply).contains("3 removed"));
    assert!(place.limits().is_empty());
}

#[test]
fn root_users_limit_ends_with_the_run_and_outlives_the_agent() {
    need_root!();
    let place = Place::new();
    let bed = Bed::new(&place);
    let mut agent = bed.agent();
    // The shell that started it has become it.
    let (mut child, group, objects) = bed.start();
    let command = group.processes().unwrap();
    signal(child.0.id(), Signal::KILL);
    child.exit_code();
    wait_for("the end of the limit", || place.limits().is_empty().then_some(()));
    objects.wait_until_off();
    command.iter().for_each(|pid| signal(*pid, Signal::KILL));

    let _ = group.remove(std::time::Instant::now() + crate::common::PATIENCE);
    let (mut child, group, objects) = bed.start();
    signal(agent.0.id(), Signal::KILL);
    agent.exit_code();
    assert!(objects.is_whole() && Objects::on(&group).is_whole());
    let mut agent = bed.agent();
    assert!(Objects::on(&group).is_whole());
    // It runs on, and ends, while another agent is there.
    drop(child.0.stdin.take());
    assert_eq!(child.exit_code(), 0);
    wait_for("the sweep", || place.limits().is_empty().then_some(()));

    // It ends while there is none: the next one finds that nobody asks any more.
    let (mut child, _, objects) = bed.start();
    signal(agent.0.id(), Signal::KILL);
    agent.exit_code();
    drop(child.0.stdin.take());
    assert_eq!(child.exit_code(), 0);
    assert!(objects.is_whole() && place.limits().len() == 1);
    // What an administrator names so stays. The sweep comes to it first.
    let by_hand = ["tidegate-run--x", "tidegate-run-0-1"];
    for name in by_hand {
        let other = place.child(&format!("by-hand{name}"));
        place.ok(&["limit", "add", name, "--cgroup", other.path(), "--egress", "1mbit"]);
    }
    // Also one that serves no group.
    let mut agent = bed.agent_of("no-such-group", 0o600);
    objects.wait_until_off();
    wait_for("the sweep", || (place.limits().len() <= 2).then_some(()));
    assert_eq!(place.limits(), by_hand);
    let doctor = place.tidegate().arg("doctor").output().unwrap();
    let said = String::from_utf8(doctor.stdout).unwrap();
    assert!(said.contains("there was no group `tidegate`"), "{said}");
    let output = bed.run(&["--egress", "1mbit"]).arg("true").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("sudo groupadd --system"), "{said}");
    signal(agent.0.id(), Signal::TERM);
    assert_eq!(agent.exit_code(), 0);
}

#[test]
fn root_users_limit_is_inside_the_limits_around_it() {
    need_root!();
    let place = Place::new();
    let bed = Bed::new(&place);
    let around = ["--cgroup", bed.group.path(), "--egress", "1mbit", "--loopback"];
    place.ok(&[&["limit", "add", "around"][..], &around].concat());
    let _agent = bed.agent();
    let mut command = bed.run(&["--egress", "1gbit", "--loopback", "--stats", "--json"]);
    let script = "exec 3<>/dev/udp/127.0.0.1/9; echo x >&3";
    let output = command.args(["bash", "-c", script]).output().unwrap();
    let stats: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(stats["egress"]["pass_packets"], 1);
    let around = place.json(&["limit", "show", "around", "--json"]);
    assert_eq!(
        (&around["egress"]["pass_packets"], &around["egress"]["rate_bit_s"]),
        (&1.into(), &1_000_000.into())
    );
}

#[test]
fn root_users_may_limit_nothing_but_their_own() {
    need_root!();
    let place = Place::new();
    let bed = Bed::new(&place);
    let fails = |command: &mut Command, words: &str| {
        let (code, said) = refused(command.arg("true"));
        assert!(code == 2 && said.contains(words) && said.lines().count() == 1, "{code} {said}");
    };
    let rate = &["--egress", "9mbit"];
    fails(&mut bed.run(rate), "members of group `tidegate`");
    // Nobody has a cgroup made to learn that.
    fails(&mut bed.run_as(USER, &place.group, rate), "members of group `tidegate`");
    let _agent = bed.agent();
    fails(&mut bed.run_as(2, &bed.group, rate), "members of group `daemon`");
    let theirs = bed.place.child("theirs");
    chown(theirs.absolute(), Some(2), Some(2)).unwrap();
    fails(&mut bed.run_as(2, &theirs, rate), "members of group `daemon`");
    fails(&mut bed.run_as(USER, &place.group, rate), "is not this user's");
    fails(&mut bed.run(&[&rate[..], &["--parent", "x"]].concat()), "--parent needs the privileges");
    fails(&mut bed.run(&[&rate[..], &["--user", "root"]].concat()), "--user needs the privileges");

    // This process is root's: what is another's is refused also to that.
    let given = [("egress".to_owned(), "9mbit".to_owned())];
    let asked = || Asked::connect(&bed.socket()).unwrap();
    let ask = |cgroup: &Cgroup| asked().limit(cgroup, &given).unwrap_err().to_string();
    let said = ask(&bed.group);
    assert!(said.contains("belongs to user 1, not to 0"), "{said}");
    let said = ask(&place.group);
    assert!(said.contains("is not of process"), "{said}");
    let file = fs::File::open(&bed.program).unwrap();
    let said = asked().limit(&file, &given).unwrap_err().to_string();
    assert!(said.contains("Not a directory"), "{said}");
    assert!(place.limits().is_empty());

    // Too many at once.
    let address = net::SocketAddrUnix::new(bed.socket()).unwrap();
    let connect = || {
        let (family, kind) = (net::AddressFamily::UNIX, net::SocketType::SEQPACKET);
        let socket = net::socket(family, kind, None).unwrap();
        net::connect(&socket, &address).unwrap();
        socket
    };
    let sockets: Vec<_> = (0..17).map(|_| connect()).collect();
    let (answer, _) = receive::<Answer>(sockets.last().unwrap(), ANSWER_MAX).unwrap().unwrap();
    assert!(matches!(answer, Answer::Refused(why) if why.starts_with("16 commands of a user")));
}
