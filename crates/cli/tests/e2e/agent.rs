//! The agent as a process: what it limits comes and goes, files change, it is killed and started again.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Instant,
};

use rustix::process::Signal;
use serde_json::{Value, json};
use tidegate_sys::{
    cgroup::Cgroup,
    net::{NetNs, SpawnInto, prepare},
};

use crate::{
    common::{Guard, Objects, PATIENCE, Place, copy_program, refused, signal, wait_for},
    need_root,
    place::Host,
};

mod by_hand;
mod device;
mod engine;
mod gate;
mod missed;
mod pods;
mod rights;

/// A slice at the root of the hierarchy, as systemd makes them, with whatever a test puts below it.
pub struct Slice<'a> {
    place: &'a Place,
    pub group: Cgroup,
    pub unique: String,
}

impl<'a> Slice<'a> {
    pub fn new(place: &'a Place) -> Slice<'a> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let unique = format!("t{}x{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let root = place.hierarchy.open("").unwrap();
        let group = place.hierarchy.create(&root, &format!("{unique}.slice")).unwrap();
        Slice { place, group, unique }
    }

    pub fn make(&self, name: &str) -> Cgroup {
        self.place.hierarchy.create(&self.group, name).unwrap()
    }

    pub fn remove(&self, cgroup: &Cgroup) {
        cgroup.remove(Instant::now() + PATIENCE).unwrap();
    }
}

impl Drop for Slice<'_> {
    fn drop(&mut self) {
        let root = self.place.hierarchy.open("").unwrap();
        for path in self.place.hierarchy.find_below(self.group.path(), |_| true) {
            let group = self.place.hierarchy.open(&path);
            let processes = group.and_then(|group| group.processes());
            processes.unwrap_or_default().into_iter().for_each(|pid| signal(pid, Signal::KILL));
        }
        let _ = self.place.hierarchy.dissolve(&self.group, &root, Instant::now() + PATIENCE);
    }
}

/// The agent's directory, and where it says what it does.
struct Bed<'a> {
    place: &'a Place,
    dir: PathBuf,
    run: PathBuf,
    sockets: Vec<PathBuf>,
    /// How it reaches an API server of Kubernetes, if it does.
    kubeconfig: Option<PathBuf>,
    /// It keeps to what is below this cgroup, so no other test is held by its gate.
    below: String,
    /// Where it and all other commands run, if not in the test's own.
    netns: Option<NetNs>,
}

impl<'a> Bed<'a> {
    fn new(place: &'a Place, below: &Cgroup) -> Bed<'a> {
        let marker = place.file("marker", "");
        let (dir, run) = (marker.with_file_name("etc"), marker.with_file_name("run"));
        fs::create_dir(&dir).unwrap();
        let (sockets, below) = (vec![marker.with_file_name("none.sock")], below.path().to_owned());
        Bed { place, dir, run, sockets, kubeconfig: None, below, netns: None }
    }

    fn tidegate(&self) -> Command {
        let mut command = self.place.tidegate();
        command.env("TIDEGATE_RUN_DIR", &self.run);
        if self.netns.is_some() {
            let netns = self.netns.as_ref();
            prepare(&mut command, SpawnInto { netns, ..SpawnInto::default() }).unwrap();
        }
        command
    }

    fn agent(&self) -> Command {
        let mut command = self.tidegate();
        command.arg("agent").arg(&self.dir).args(["--below", &self.below]).stdout(Stdio::null());
        for socket in &self.sockets {
            command.arg("--engine").arg(socket);
        }
        if let Some(kubeconfig) = &self.kubeconfig {
            command.args(["--kubernetes", "--node", "node-a", "--kubeconfig"]).arg(kubeconfig);
        }
        command
    }

    fn start(&self) -> Guard {
        Guard(self.agent().spawn().unwrap())
    }

    /// As an editor does: whole at once.
    fn write(&self, name: &str, text: &str) {
        let part = self.dir.join(format!(".{name}.part"));
        fs::write(&part, text).unwrap();
        fs::rename(part, self.dir.join(name)).unwrap();
    }

    fn status(&self) -> Value {
        let output = self.tidegate().args(["status", "--json"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// State and reason of a limit, as the agent says.
    fn said(&self, name: &str) -> (String, String) {
        let status = self.status();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let limits = status["agent"]["limits"].as_array().cloned().unwrap_or_default();
        let limit = limits.into_iter().find(|limit| limit["name"] == name).unwrap_or_default();
        (text(&limit["state"]), text(&limit["reason"]))
    }

    fn wait_said(&self, name: &str, state: &str) -> String {
        wait_for(&format!("{name} {state}"), || {
            let (is, reason) = self.said(name);
            (is == state).then_some(reason)
        })
    }

    /// The egress rate of a limit in the store.
    fn rate(&self, name: &str) -> Option<u64> {
        let status = self.status();
        let mut limits = status["limits"].as_array()?.iter();
        limits.find(|limit| limit["name"] == name)?["egress"]["rate_bit_s"].as_u64()
    }

    fn check(&self) -> Option<i32> {
        self.tidegate().args(["status", "--check"]).output().unwrap().status.code()
    }
}

fn limit(name: &str, scope: &str, rest: &str) -> String {
    format!("[[limit]]\nname = \"{name}\"\nscope = {{ {scope} }}\n{rest}\n")
}

fn whole(cgroup: &Cgroup) {
    wait_for("the limit", || Objects::on(cgroup).is_whole().then_some(()));
}

#[test]
fn root_agent_follows_a_unit_that_is_removed_and_made_again() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let unit = format!("{}.service", slice.unique);
    let required = "egress = \"20mbit\"\nrequired = true";
    bed.write("a.toml", &limit("web", &format!("unit = \"{unit}\""), required));
    let mut agent = bed.start();
    let reason = bed.wait_said("web", "waiting");
    assert_eq!(reason, format!("no unit `{unit}` runs"));
    assert_eq!(bed.check(), Some(3), "it is required");
    assert_eq!(bed.status()["limits"][0]["required"], true);
    for _ in 0..3 {
        let cgroup = slice.make(&unit);
        whole(&cgroup);
        bed.wait_said("web", "in_force");
        assert_eq!(bed.check(), Some(0));
        slice.remove(&cgroup);
        bed.wait_said("web", "waiting");
    }
    let cgroup = slice.make(&unit);
    whole(&cgroup);
    signal(agent.0.id(), Signal::TERM);
    assert_eq!(agent.exit_code(), 0);
    assert!(Objects::on(&cgroup).is_whole(), "the agent has ended, the limit stays");
    assert_eq!(bed.check(), Some(3), "nobody would limit it again");
    // Of another store it says nothing.
    let other = Place::new();
    let detach =
        |place: &Place| bed.tidegate().args(["--bpffs"]).arg(place.store()).arg("detach").status();
    assert!(detach(&other).unwrap().success());
    assert_eq!(bed.check(), Some(3));
    assert!(detach(&place).unwrap().success());
    assert_eq!(bed.check(), Some(0), "nobody wants a limit any more");
}

/// An agent that is ended is missed if its files ask for something.
#[test]
fn root_agent_is_missed_while_its_files_ask_for_something() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let off = "schedule = [{ days = \"DAY\", egress = \"3mbit\" }]";
    let day = jiff::Zoned::now().checked_add(jiff::Span::new().days(3)).unwrap();
    let off = off.replace("DAY", &day.strftime("%a").to_string().to_lowercase());
    for (text, code) in [
        ("", 0),
        ("limit = []", 0),
        ("labels = true", 3),
        (&limit("never", "unit = \"never.service\"", "egress = \"20mbit\""), 3),
        (&limit("off", "dev = \"lo\"", &off), 3),
    ] {
        bed.write("a.toml", text);
        let mut agent = bed.start();
        let pid = agent.0.id();
        wait_for("the agent's report", || (bed.status()["agent"]["pid"] == pid).then_some(()));
        assert_eq!(bed.check(), Some(0), "{text}");
        signal(pid, Signal::TERM);
        assert_eq!(agent.exit_code(), 0);
        assert_eq!(bed.check(), Some(code), "{text}");
    }
    // Nothing is in force, and all the same it shall be as if there had been no agent.
    assert!(bed.tidegate().arg("detach").status().unwrap().success());
    assert_eq!(bed.check(), Some(0));
}

/// Of two limits of one name in two files the first counts at the start, and none later.
#[test]
fn root_agent_a_name_in_two_files_is_an_error() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let on = |name: &str| {
        let cgroup = slice.make(name);
        let scope = format!("cgroup = \"{}\"", cgroup.path());
        (cgroup, limit("g1", &scope, "egress = \"9mbit\""))
    };
    let ((a, on_a), (b, on_b)) = (on("a"), on("b"));
    bed.write("a.toml", &on_a);
    bed.write("b.toml", &on_b);
    let check = || refused(bed.tidegate().arg("check").arg(&bed.dir));
    let [a_toml, b_toml] =
        ["a.toml", "b.toml"].map(|name| bed.dir.join(name).display().to_string());
    let error = format!("{b_toml}:1: limit `g1`: {a_toml} has a limit of this name");
    let (code, said) = check();
    assert!(code == 1 && said.contains(&error), "{code} {said}");
    let _agent = bed.start();
    whole(&a);
    bed.wait_said("g1", "in_force");
    let output = bed.tidegate().args(["status", "--check"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains(&error) && !said.contains("NOT ENFORCED"), "{said}");
    // It keeps what is in force until no other file has the name.
    bed.write("a.toml", &on_b);
    bed.write("c.toml", "[[limit]");
    wait_for("the other error", || {
        bed.status()["agent"]["errors"].to_string().contains("c.toml").then_some(())
    });
    assert!(Objects::on(&a).is_whole() && Objects::on(&b) == Objects::default());
    fs::remove_file(bed.dir.join("c.toml")).unwrap();
    fs::remove_file(bed.dir.join("b.toml")).unwrap();
    whole(&b);
    wait_for("the end of the limit", || (Objects::on(&a) == Objects::default()).then_some(()));
    assert_eq!(check(), (0, String::new()));
    place.ok(&["detach"]);
}

/// A change needs room for its journal, and the agent has kept some.
#[test]
fn root_agent_follows_a_unit_on_a_full_run() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let Some(mut host) = Host::new() else { return };
    let unit = format!("{}.service", slice.unique);
    bed.write("a.toml", &limit("web", &format!("unit = \"{unit}\""), "egress = \"20mbit\""));
    host.ok("mount -t tmpfs -o size=256k tmpfs /run");
    host.ok(&format!("export TIDEGATE_BPFFS={}", place.store().display()));
    let [dir, socket] = [&bed.dir, &bed.sockets[0]].map(|path| path.display());
    let below = &bed.below;
    host.ok(&format!("$T agent {dir} --below {below} --engine {socket} > /dev/null 2>&1 &"));
    let cgroup = slice.make(&unit);
    whole(&cgroup);
    wait_for("the agent's report", || {
        host.ok("$T status").contains("1 of 1 limits in force").then_some(())
    });
    let (code, said) = host.sh("cat /dev/zero > /run/full");
    assert!(code != 0 && said.contains("No space left"), "{said}");
    slice.remove(&cgroup);
    let cgroup = slice.make(&unit);
    whole(&cgroup);
    host.ok("rm /run/full; $T detach");
}

#[test]
fn root_agent_forgets_what_waited_in_vain() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    bed.write("a.toml", &limit("never", "unit = \"never.service\"", "egress = \"20mbit\""));
    let _agent = bed.start();
    bed.wait_said("never", "waiting");
    assert_eq!(bed.status()["limits"][0]["state"], "waiting");
    bed.write("a.toml", "");
    wait_for("an empty status", || (bed.status()["limits"] == json!([])).then_some(()));
}

#[test]
fn root_agent_one_wrong_limit_keeps_none_of_the_others_away() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let u = &slice.unique;
    let (a, b) = (slice.make(&format!("{u}-a.service")), slice.make(&format!("{u}-b.service")));
    let egress = "egress = \"20mbit\"";
    let text = [
        limit("a", &format!("unit = \"{u}-a.service\""), egress),
        limit("wrong", &format!("unit = \"{u}-w.service\""), "egress = \"20mbps\""),
        limit("never", "container = \"never\"", egress),
        limit("both", &format!("slice = \"{u}.slice\""), egress),
        limit("twice", &format!("unit = \"{u}-?.service\""), "egress = \"9mbit\"\neach = true"),
    ]
    .concat();
    bed.write("a.toml", &text);
    let _agent = bed.start();
    whole(&a);
    whole(&b);
    // Beside the two programs of the gate.
    wait_for("the limit of the slice", || (Objects::on(&slice.group).links() == 5).then_some(()));
    let never = bed.wait_said("never", "waiting");
    assert!(
        never.starts_with("no container `never` runs; no engine of containers answers; "),
        "{never}"
    );
    let twice = bed.wait_said(&format!("twice-{u}-a_service"), "refused");
    let expected = format!("limits `a` and `twice-{u}-a_service` both match cgroup `{}`", a.path());
    assert!(twice.starts_with(&expected), "{twice}");
    bed.wait_said(&format!("twice-{u}-b_service"), "in_force");
    let status = bed.status();
    let error = status["agent"]["errors"][0].as_str().unwrap();
    assert!(error.contains("a.toml:") && error.contains("limit `wrong`: egress"), "{error}");
    assert_eq!(bed.check(), Some(3));
    place.ok(&["detach"]);
}

#[test]
fn root_agent_an_earlier_limit_takes_a_cgroup_over() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let unit = format!("unit = \"{}.service\"", slice.unique);
    let cgroup = slice.make(&format!("{}.service", slice.unique));
    let below = place.hierarchy.create(&cgroup, "below").unwrap();
    let inside = format!("cgroup = \"{}\"", below.path());
    let later = limit("later", &unit, "egress = \"20mbit\"")
        + &limit("inside", &inside, "egress = \"9mbit\"\nparent = \"later\"");
    bed.write("b.toml", &later);
    let _agent = bed.start();
    bed.wait_said("inside", "in_force");
    assert_eq!(bed.rate("later"), Some(20_000_000));
    for _ in 0..2 {
        bed.write("a.toml", &limit("first", &unit, "egress = \"10mbit\""));
        bed.wait_said("first", "in_force");
        let reason = bed.wait_said("later", "refused");
        assert!(reason.ends_with("`first`, which comes first, has it"), "{reason}");
        assert_eq!(bed.wait_said("inside", "waiting"), "its parent `later` waits or is refused");
        wait_for("the other limit", || (bed.rate("first") == Some(10_000_000)).then_some(()));
        assert_eq!((bed.rate("later"), bed.rate("inside")), (None, None));
        whole(&cgroup);
        fs::remove_file(bed.dir.join("a.toml")).unwrap();
        bed.wait_said("inside", "in_force");
        wait_for("the limit", || (bed.rate("inside") == Some(9_000_000)).then_some(()));
        assert_eq!((bed.rate("first"), bed.rate("later")), (None, Some(20_000_000)));
    }
    place.ok(&["detach"]);
}

#[test]
fn root_agent_reads_files_again_and_an_error_leaves_what_is_in_force() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let u = &slice.unique;
    let (a, b) = (slice.make(&format!("{u}-a.service")), slice.make(&format!("{u}-b.service")));
    let unit = |name: &str, rate: &str| {
        limit(name, &format!("unit = \"{u}-{name}.service\""), &format!("egress = \"{rate}\""))
    };
    bed.write("a.toml", &unit("a", "10mbit"));
    bed.write("b.toml", &unit("b", "10mbit"));
    let agent = bed.start();
    whole(&a);
    whole(&b);
    bed.write("a.toml", &unit("a", "20mbit"));
    wait_for("the other rate", || (bed.rate("a") == Some(20_000_000)).then_some(()));
    // An error: nothing changes, also not by the other file.
    bed.write("a.toml", "[[limit]]\nname = ");
    wait_for("the error", || {
        bed.status()["agent"]["errors"][0]
            .as_str()
            .is_some_and(|e| e.contains("a.toml"))
            .then_some(())
    });
    bed.write("b.toml", &unit("b", "30mbit"));
    signal(agent.0.id(), Signal::HUP);
    assert_eq!((bed.rate("a"), bed.rate("b")), (Some(20_000_000), Some(10_000_000)));
    // All of them away is an error, too.
    let away = bed.dir.with_extension("away");
    fs::rename(&bed.dir, &away).unwrap();
    signal(agent.0.id(), Signal::HUP);
    let error = format!("{}: cannot be read: No such file", bed.dir.display());
    wait_for("the error", || {
        bed.status()["agent"]["errors"][0].as_str()?.starts_with(&error).then_some(())
    });
    assert_eq!((bed.rate("a"), bed.rate("b")), (Some(20_000_000), Some(10_000_000)));
    fs::rename(away, &bed.dir).unwrap();
    // Put right, with one gone: what is not in the files any more is taken off, what is of others stays.
    let other = place.child("other");
    place.ok(&["limit", "add", "other", "--cgroup", other.path(), "--egress", "1mbit"]);
    fs::remove_file(bed.dir.join("a.toml")).unwrap();
    wait_for("the limit to be taken off", || bed.rate("a").is_none().then_some(()));
    wait_for("the other rate", || (bed.rate("b") == Some(30_000_000)).then_some(()));
    assert!(bed.status()["agent"]["errors"].as_array().unwrap().is_empty());
    assert_eq!(bed.rate("other"), Some(1_000_000));
    place.ok(&["detach"]);
}

#[test]
fn root_agent_killed_leaves_limits_and_the_next_takes_over() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let u = &slice.unique;
    let (a, b) = (slice.make(&format!("{u}-a.service")), slice.make(&format!("{u}-b.service")));
    let unit =
        |name: &str| limit(name, &format!("unit = \"{u}-{name}.service\""), "egress = \"10mbit\"");
    bed.write("a.toml", &(unit("a") + &unit("b")));
    let mut agent = bed.start();
    whole(&a);
    whole(&b);
    bed.wait_said("b", "in_force");
    let (store, run2, other) = (place.store(), bed.run.with_file_name("run2"), Place::new());
    // The lock is the store's, whatever the run directory is; and each directory is one agent's.
    for (run_dir, store, words) in [
        (bed.run.clone(), &store, format!("keeps the limits of {}", store.display())),
        (run2, &store, format!("keeps the limits of {}", store.display())),
        (bed.run.clone(), &other.store(), format!("has {}", bed.run.display())),
    ] {
        let mut second = bed.agent();
        second.env("TIDEGATE_RUN_DIR", run_dir).env("TIDEGATE_BPFFS", store);
        let (code, said) = refused(&mut second);
        let first = format!("another agent (process {}) {words}; end that one first", agent.0.id());
        assert!(code == 2 && said.contains(&first), "{code} {said}");
    }
    let other = Bed::new(&other, &slice.group);
    let second = other.start();
    let its = second.0.id();
    wait_for("its report", || (other.status()["agent"]["pid"] == its).then_some(()));
    drop(second);
    signal(agent.0.id(), Signal::KILL);
    agent.exit_code();
    assert!(Objects::on(&a).is_whole() && Objects::on(&b).is_whole());
    // The next one cannot read the files: it keeps what there is.
    let away = bed.dir.with_extension("away");
    fs::rename(&bed.dir, &away).unwrap();
    let _agent = bed.start();
    wait_for("the error", || {
        let status = bed.status();
        status["agent"]["errors"][0].as_str()?.contains("cannot be read").then_some(())
    });
    assert!(Objects::on(&a).is_whole() && Objects::on(&b).is_whole());
    // What the other one has put on is its own to take off.
    fs::write(away.join("a.toml"), unit("b")).unwrap();
    fs::rename(&away, &bed.dir).unwrap();
    wait_for("the limit to be taken off", || bed.rate("a").is_none().then_some(()));
    assert!(Objects::on(&b).is_whole());
    // Somebody takes it off: it is seen, at the latest when the files are read again.
    place.ok(&["limit", "del", "b"]);
    signal(_agent.0.id(), Signal::HUP);
    whole(&b);
    place.ok(&["detach"]);
}

#[test]
fn root_agent_agrees_with_limits_that_are_persisted() {
    need_root!();
    let place = Place::new();
    let bed = Bed::new(&place, &place.group);
    let group = place.child("service");
    let file = bed.dir.join("limits.toml");
    let tidegate = |args: &[&str]| {
        let output = bed.tidegate().env("TIDEGATE_HOST_FILE", &file).args(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let agent = bed.start();
    let pid = agent.0.id();
    wait_for("the agent's report", || (bed.status()["agent"]["pid"] == pid).then_some(()));
    let add = ["limit", "add", "a", "--cgroup", group.path(), "--egress", "9mbit", "--persist"];
    let said = tidegate(&add);
    assert!(said.contains("written to") && !said.contains("no agent keeps it"), "{said}");
    bed.wait_said("a", "in_force");
    tidegate(&["limit", "set", "a", "--egress", "8mbit"]);
    signal(pid, Signal::HUP);
    bed.wait_said("a", "in_force");
    assert_eq!(bed.rate("a"), Some(8_000_000));
    tidegate(&["limit", "del", "a"]);
    wait_for("the agent to know of no limit", || bed.said("a").0.is_empty().then_some(()));
    assert_eq!(bed.rate("a"), None);
    place.ok(&["detach"]);
}

/// A limit that waits, or is off by its schedule, is shown, and changed in the file.
#[test]
fn root_limit_verbs_know_what_the_agent_keeps() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let file = bed.dir.join("limits.toml");
    let tidegate = |args: &[&str]| {
        let output = bed.tidegate().env("TIDEGATE_HOST_FILE", &file).args(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let unit = format!("{}-a.service", slice.unique);
    let add = ["limit", "add", "a", "--unit", &unit, "--egress", "9mbit"];
    let (code, message) = place.refused(&add);
    assert!(code == 1 && message.contains(&format!("no unit `{unit}` runs")), "{message}");
    // Without an agent it is only written.
    let persist = [&add[..], &["--persist"]].concat();
    let said = tidegate(&persist);
    assert!(
        said.contains("limits.toml, and is waiting") && said.contains("enable --now"),
        "{said}"
    );
    let _agent = bed.start();
    bed.wait_said("a", "waiting");
    let shown = tidegate(&["limit", "show", "a"]);
    assert!(shown.contains(&format!("unit {unit}")) && shown.contains("waits: no unit"), "{shown}");
    let said = tidegate(&["limit", "set", "a", "--egress", "8mbit"]);
    assert!(said.contains(&format!("waiting: no unit `{unit}` runs; changed in")), "{said}");
    let a = slice.make(&unit);
    whole(&a);
    wait_for("the rate", || (bed.rate("a") == Some(8_000_000)).then_some(()));
    // The agent has seen what is added now.
    let said =
        tidegate(&["limit", "add", "c", "--container", "web", "--egress", "1mbit", "--persist"]);
    assert!(said.contains("waiting: no container `web` runs"), "{said}");
    assert!(tidegate(&["limit", "del", "c"]).contains("taken out of"));
    // A row holds all day: the rate of other times is changed in the file alone.
    let row = "schedule = [{ egress = \"3mbit\" }]\n";
    let text = fs::read_to_string(&file).unwrap();
    bed.write("limits.toml", &(text.trim_end().to_owned() + "\n" + row));
    wait_for("the rate of the row", || (bed.rate("a") == Some(3_000_000)).then_some(()));
    let said = tidegate(&["limit", "set", "a", "--egress", "7mbit"]);
    assert!(said.contains("its schedule (daily 00:00-24:00) holds now"), "{said}");
    assert_eq!(bed.rate("a"), Some(3_000_000));
    assert!(fs::read_to_string(&file).unwrap().contains("egress = \"7mbit\""));
    let shown = tidegate(&["limit", "show", "a"]);
    assert!(shown.contains("a: schedule daily 00:00-24:00"), "{shown}");
    // No row and no rate: it is off, and known.
    let day = jiff::Zoned::now().checked_add(jiff::Span::new().days(3)).unwrap();
    let day = day.strftime("%a").to_string().to_lowercase();
    let row = format!("schedule = [{{ days = \"{day}\", egress = \"3mbit\" }}]");
    bed.write("limits.toml", &limit("a", &format!("unit = \"{unit}\""), &row));
    bed.wait_said("a", "off");
    wait_for("the limit to be taken off", || bed.rate("a").is_none().then_some(()));
    let shown = tidegate(&["limit", "show", "a"]);
    assert!(shown.contains("off: its schedule has no rate now"), "{shown}");
    assert!(shown.contains(", then egress 3mbit"), "{shown}");
    let shown: Value = serde_json::from_str(&tidegate(&["limit", "show", "a", "--json"])).unwrap();
    assert_eq!((&shown["state"], &shown["next_rates"]), (&"off".into(), &"egress 3mbit".into()));
    let said = tidegate(&["limit", "set", "a", "--drop", "400ms"]);
    assert!(said.contains("off: its schedule has no rate now; changed in"), "{said}");
    let said = tidegate(&["limit", "set", "a", "--egress", "6mbit"]);
    assert!(said.contains("off until the agent attaches it; changed in"), "{said}");
    wait_for("the rate that was set", || (bed.rate("a") == Some(6_000_000)).then_some(()));
    let doctor: Value = serde_json::from_str(&tidegate(&["doctor", "--json"])).unwrap();
    let says = |text: &str| doctor["findings"].to_string().contains(text);
    assert!(says("`tidegate agent` runs") && says("a new cgroup gets 64 KiB"), "{doctor}");
    place.ok(&["detach"]);
}

#[test]
fn root_agent_moves_a_program_out_of_a_cgroup_that_others_are_in() {
    need_root!();
    let place = Place::new();
    let bed = Bed::new(&place, &place.group);
    let program = bed.dir.join("program");
    copy_program("/bin/sleep", &program);
    let spawn = |program: &Path| {
        let mut command = place.inside(&place.group, program.to_str().unwrap());
        Guard(command.arg("1000").spawn().unwrap())
    };
    let exe = format!("exe = \"{}\"", program.display());
    bed.write("a.toml", &limit("prog", &exe, "egress = \"10mbit\""));
    let agent = bed.start();
    let reason = bed.wait_said("prog", "waiting");
    assert_eq!(reason, format!("no program `{}` runs", program.display()));
    let (_other, mut one) = (spawn(Path::new("/bin/sleep")), spawn(&program));
    // The agent keeps to the cgroups below one. Outside of it another program is beside the process, too.
    let elsewhere = Place::new();
    let mut outside = elsewhere.inside(&elsewhere.group, program.to_str().unwrap());
    let outside = Guard(outside.arg("1000").spawn().unwrap());
    wait_for("the program", || {
        (fs::read_link(format!("/proc/{}/exe", one.0.id())).ok()? == program).then_some(())
    });
    let reason = bed.wait_said("prog", "refused");
    let status = place.ok(&["status"]);
    assert!(status.contains("NOT ENFORCED") && !status.contains("waits"), "{status}");
    let words = "other programs would be limited, too: ";
    assert!(reason.starts_with(words) && reason.contains("write move = true"), "{reason}");
    // A cgroup of its own is limited all the same, and the other one is named.
    let alone = place.child("alone");
    let mut command = place.inside(&alone, program.to_str().unwrap());
    let mut lonely = Guard(command.arg("1000").spawn().unwrap());
    let reason = bed.wait_said("prog", "in_force");
    assert!(reason.starts_with(&format!("not on 1 cgroup: {words}")), "{reason}");
    whole(&alone);
    assert_eq!(bed.status()["limits"][0]["members"], json!([alone.path()]));
    let said = format!("is in force, but {reason}");
    let status = String::from_utf8(bed.tidegate().arg("status").output().unwrap().stdout).unwrap();
    assert!(status.contains(&said) && bed.check() == Some(3), "{status}");
    let output = bed.tidegate().arg("plan").arg(bed.dir.join("a.toml")).output().unwrap();
    let plan = String::from_utf8(output.stdout).unwrap();
    // All of the host, not only below: the same program runs elsewhere, too.
    assert!(plan.contains("! prog: not on ") && plan.contains(words), "{plan}");
    lonely.0.kill().unwrap();
    lonely.exit_code();
    bed.wait_said("prog", "refused");
    bed.write("a.toml", &limit("prog", &exe, "egress = \"10mbit\"\nmove = true"));
    bed.wait_said("prog", "in_force");
    let own = place.hierarchy.open(&format!("{}/tidegate.prog", place.group.path())).unwrap();
    whole(&own);
    assert_eq!(own.processes().unwrap(), [one.0.id()]);
    assert_eq!(elsewhere.group.processes().unwrap(), [outside.0.id()], "it is not below");
    // Without its limit it goes back.
    bed.write("a.toml", "");
    wait_for("the end of its cgroup", || (!own.absolute().exists()).then_some(()));
    assert!(place.group.processes().unwrap().contains(&one.0.id()));
    bed.write("a.toml", &limit("prog", &exe, "egress = \"10mbit\"\nmove = true"));
    bed.wait_said("prog", "in_force");
    // It ends, and its cgroup goes.
    one.0.kill().unwrap();
    one.exit_code();
    wait_for("the end of its cgroup", || (!own.absolute().exists()).then_some(()));
    bed.wait_said("prog", "waiting");
    // When the agent has ended, the next one that is moved stays until its limit is removed.
    let again = spawn(&program);
    bed.wait_said("prog", "in_force");
    let own = place.hierarchy.open(own.path()).unwrap();
    drop(agent);
    assert_eq!(own.processes().unwrap(), [again.0.id()]);
    // A limit of the same name in another store is another one.
    let other = Place::new();
    let path = other.group.path();
    other.ok(&["limit", "add", "prog", "--cgroup", path, "--egress", "10mbit"]);
    other.ok(&["detach"]);
    assert_eq!(own.processes().unwrap(), [again.0.id()]);
    let said = place.ok(&["limit", "del", "prog"]);
    assert!(said.contains("are in the cgroup above again"), "{said}");
    assert!(!own.absolute().exists(), "its cgroup is left");
    assert!(place.group.processes().unwrap().contains(&again.0.id()));
    let agent = bed.start();
    // What the agent before has said is no proof.
    wait_for("the limit", || place.limits().contains(&"prog".to_owned()).then_some(()));
    drop(agent);
    place.ok(&["detach"]);
    assert!(!own.absolute().exists(), "its cgroup is left");
    assert!(place.group.processes().unwrap().contains(&again.0.id()));
    let said = place.ok(&["apply", bed.dir.join("a.toml").to_str().unwrap()]);
    assert!(said.contains("only `tidegate agent` moves processes, and attaches it"), "{said}");
}

#[test]
fn root_agent_keeps_a_schedule() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let bed = Bed::new(&place, &slice.group);
    let u = &slice.unique;
    let a = slice.make(&format!("{u}-a.service"));
    let scope = format!("unit = \"{u}-a.service\"");
    // Applied by hand nobody follows it, until the agent does.
    let later = jiff::Zoned::now().checked_add(jiff::Span::new().days(3)).unwrap();
    let later = later.strftime("%a").to_string().to_lowercase();
    let rows = format!("schedule = [{{ days = \"{later}\", egress = \"3mbit\" }}]");
    bed.write("a.toml", &limit("a", &scope, &format!("egress = \"9mbit\"\n{rows}")));
    place.ok(&["apply", bed.dir.join("a.toml").to_str().unwrap()]);
    let unfollowed = || place.json(&["status", "--json"])["limits"][0]["unfollowed"].clone();
    assert_eq!(unfollowed(), true);
    let _agent = bed.start();
    wait_for("the agent to follow it", || unfollowed().is_null().then_some(()));
    assert_eq!(bed.rate("a"), Some(9_000_000));
    bed.write(
        "a.toml",
        &limit("a", &scope, "egress = \"9mbit\"\nschedule = [{ egress = \"3mbit\" }]"),
    );
    whole(&a);
    // Every day, all day.
    wait_for("the rate", || (bed.rate("a") == Some(3_000_000)).then_some(()));
    // Two rows that never hold now: yesterday and tomorrow are other days.
    let today = jiff::Zoned::now();
    let days = [-2, 2].map(|days| {
        let day = today.checked_add(jiff::Span::new().days(days)).unwrap();
        day.strftime("%a").to_string().to_lowercase()
    });
    let rows = days.map(|day| format!("{{ days = \"{day}\", egress = \"3mbit\" }}")).join(", ");
    bed.write("a.toml", &limit("a", &scope, &format!("schedule = [{rows}]")));
    bed.wait_said("a", "off");
    wait_for("the limit to be taken off", || bed.rate("a").is_none().then_some(()));
    assert_eq!(bed.check(), Some(0));
    place.ok(&["detach"]);
}
