//! Containers, told by an engine that is made up: an API server on a Unix socket.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::{
        fs::{PermissionsExt, chown},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::{Bed, Slice, limit, whole};
use crate::{
    common::{Guard, Objects, Place, signal, wait_for},
    need_root,
};

/// What the server knows: containers, and who listens to events.
#[derive(Default)]
struct Known {
    containers: Vec<Value>,
    listeners: Vec<UnixStream>,
    /// How often it was asked for containers.
    asked: usize,
    /// It does not answer.
    is_busy: bool,
}

/// An engine. Its threads end with its socket's connections.
pub(super) struct Engine {
    pub(super) socket: PathBuf,
    known: Arc<Mutex<Known>>,
    over: Arc<AtomicBool>,
}

impl Engine {
    pub(super) fn start(socket: PathBuf) -> Engine {
        let listener = UnixListener::bind(&socket).unwrap();
        let (known, over) = (Arc::<Mutex<Known>>::default(), Arc::new(AtomicBool::new(false)));
        let (shared, ends) = (Arc::clone(&known), Arc::clone(&over));
        thread::spawn(move || {
            for stream in listener.incoming() {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(stream.unwrap(), &shared));
            }
        });
        Engine { socket, known, over }
    }

    fn container(id: &str, name: &str, labels: &Value) -> Value {
        // A state that Docker does not have, and members that nobody reads.
        json!({ "Id": id, "Names": [format!("/{name}")], "Labels": labels, "State": "stopping", "X": [1] })
    }

    fn add(&self, id: &str, name: &str, labels: &Value) {
        let mut known = self.known.lock().unwrap();
        known.containers.push(Engine::container(id, name, labels));
        known.tell("create", id);
    }

    fn remove(&self, id: &str) {
        let mut known = self.known.lock().unwrap();
        known.containers.retain(|container| container["Id"] != id);
        known.tell("destroy", id);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = fs::remove_file(&self.socket);
        self.known.lock().unwrap().listeners.iter().for_each(|listener| {
            let _ = listener.shutdown(std::net::Shutdown::Both);
        });
    }
}

impl Known {
    fn tell(&mut self, action: &str, id: &str) {
        // As Docker and Podman write it: everything twice.
        let event = json!({
            "status": action, "id": id, "from": "image",
            "Type": "container", "Action": action, "Actor": { "ID": id, "Attributes": {} },
        });
        let event = event.to_string();
        self.listeners.retain_mut(|listener| {
            // In two chunks: an event need not come whole.
            let (one, two) = event.split_at(event.len() / 2);
            let chunks = [one, two].map(|part| format!("{:x}\r\n{part}\r\n", part.len()));
            listener.write_all(chunks.concat().as_bytes()).is_ok()
        });
    }
}

fn serve(mut stream: UnixStream, shared: &Mutex<Known>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(request) = lines.next() else { return };
    let _ = lines.take_while(|line| !line.is_empty()).count();
    let path = request.split(' ').nth(1).unwrap().to_owned();
    let mut known = shared.lock().unwrap();
    if path.starts_with("/events") {
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
        known.listeners.push(stream);
        return;
    }
    known.asked += 1;
    if known.is_busy {
        drop(known);
        wait_for("an engine that answers", || (!shared.lock().unwrap().is_busy).then_some(()));
        known = shared.lock().unwrap();
    }
    let asked = |container: &&Value| {
        !path.contains("filters") || path.contains(container["Id"].as_str().unwrap())
    };
    let body = json!(known.containers.iter().filter(asked).collect::<Vec<_>>()).to_string();
    let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
}

fn id(letter: char) -> String {
    letter.to_string().repeat(64)
}

/// The child by itself: what it says, and that it ends with its parent.
#[test]
fn agent_child_tells_the_containers_of_an_engine() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::start(dir.path().join("engine.sock"));
    engine.add(&id('a'), "web", &json!({ "app": "web" }));
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .arg("agent-containers")
        .arg(&engine.socket)
        .args([uid.to_string(), gid.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let parent = child.stdin.take().unwrap();
    let mut child = Guard(child);
    let mut line = || serde_json::from_str::<Value>(&lines.next().unwrap()).unwrap();
    assert_eq!(line()["listed"][id('a')], json!({ "name": "web", "labels": { "app": "web" } }));
    // It has no rights.
    let status = fs::read_to_string(format!("/proc/{}/status", child.0.id())).unwrap();
    for none in ["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1"] {
        assert!(status.contains(none), "{none}: {status}");
    }
    engine.add(&id('b'), "db", &json!({}));
    assert_eq!(line()["changed"][1]["name"], "db");
    // Podman also removes what has no such id.
    engine.remove("pod");
    engine.remove(&id('a'));
    assert_eq!(line()["gone"], id('a'));
    // Many come while it is busy: they are asked for together.
    engine.known.lock().unwrap().is_busy = true;
    let before = engine.known.lock().unwrap().asked;
    engine.add(&id('c'), "first", &json!({}));
    wait_for("the request", || (engine.known.lock().unwrap().asked > before).then_some(()));
    let all: BTreeSet<_> = (0..100).map(|n| format!("{n:064}")).collect();
    all.iter().for_each(|id| engine.add(id, "one of many", &json!({})));
    engine.known.lock().unwrap().is_busy = false;
    assert_eq!(line()["changed"][0], id('c'));
    let changed: BTreeSet<_> =
        all.iter().map(|_| line()["changed"][0].as_str().unwrap().to_owned()).collect();
    assert_eq!(changed, all);
    let asked = engine.known.lock().unwrap().asked - before;
    assert!(asked < all.len(), "asked {asked} times for 101 containers");
    drop(parent);
    assert_eq!(child.exit_code(), 0);
}

#[test]
fn root_agent_limits_containers_by_name_and_by_their_labels() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let mut bed = Bed::new(&place, &slice.group);
    let socket: PathBuf = bed.dir.with_file_name("engine.sock");
    bed.sockets = vec![socket.clone()];
    // The child may be nobody: it must reach the socket.
    open(socket.parent().unwrap());
    let rate = "egress = \"20mbit\"";
    let text = "labels = true\n".to_owned() + &limit("web", "container = \"web\"", rate);
    bed.write("a.toml", &text);
    let mut agent = bed.start();
    let reason = bed.wait_said("web", "waiting");
    let none =
        "no container `web` runs; no engine of containers answers; for Podman: `systemctl enable";
    assert!(reason.starts_with(none), "{reason}");
    let doctor = || {
        let output = bed.tidegate().arg("doctor").output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let no_socket = "its files ask for containers, and no engine of containers has a socket";
    let said = doctor();
    let line = said.lines().find(|line| line.contains(no_socket));
    assert!(
        line.is_some_and(|line| line.starts_with("warning") && line.contains("podman.socket")),
        "{said}"
    );
    let engine = Engine::start(socket.clone());
    let (web, db) = (id('c'), id('d'));
    engine.add(&web, "web", &json!({}));
    let scope = slice.make(&format!("libpod-{web}.scope"));
    whole(&scope);
    // The monitor is not the container.
    let monitor = slice.make(&format!("libpod-conmon-{web}.scope"));
    engine.add(&db, "my db", &json!({ "tidegate.egress": "5mbit" }));
    let other = slice.make(&format!("docker-{db}.scope"));
    whole(&other);
    wait_for("the rate", || (bed.rate("container-my_db") == Some(5_000_000)).then_some(()));
    assert_eq!(Objects::on(&monitor).links(), 0);
    // Restarted: a new cgroup, of a container that is known.
    slice.remove(&scope);
    bed.wait_said("web", "waiting");
    let scope = slice.make(&format!("libpod-{web}.scope"));
    whole(&scope);
    // The same of one that has brought its rate: its limit stays meanwhile, and counts on.
    slice.remove(&other);
    assert_eq!(bed.wait_said("container-my_db", "waiting"), "container `my db` does not run");
    assert_eq!(bed.rate("container-my_db"), Some(5_000_000));
    let other = slice.make(&format!("docker-{db}.scope"));
    whole(&other);
    let engine_is = |word: &str| {
        wait_for(&format!("the engine {word}"), || {
            let status = bed.status();
            let state = status["agent"]["engines"][socket.to_str().unwrap()].as_str()?.to_owned();
            state.starts_with(word).then_some(())
        });
    };
    // The next agent leaves it as it is, before it knows of any container and then.
    let before = Objects::on(&other);
    signal(agent.0.id(), Signal::KILL);
    agent.exit_code();
    let agent = bed.start();
    wait_for("the next agent's report", || {
        (bed.status()["agent"]["pid"] == agent.0.id()).then_some(())
    });
    engine_is("running");
    bed.wait_said("container-my_db", "in_force");
    assert_eq!(Objects::on(&other), before);
    // The engine is away: its containers are held.
    drop(engine);
    engine_is("away: ");
    let said = doctor();
    let cure = "start that engine; limits stay as they are until it answers";
    assert!(said.contains(cure) && !said.contains(no_socket), "{said}");
    assert!(Objects::on(&scope).is_whole() && Objects::on(&other).is_whole());
    slice.remove(&other);
    let engine = Engine::start(socket);
    engine.add(&web, "web", &json!({}));
    wait_for("the limit of a container that is gone", || {
        bed.rate("container-my_db").is_none().then_some(())
    });
    assert!(Objects::on(&scope).is_whole());
    place.ok(&["detach"]);
}

/// Only the user may enter the directory of the socket.
#[test]
fn root_agent_asks_the_engine_of_a_user_as_that_user() {
    need_root!();
    const USER: u32 = 54321;
    let place = Place::new();
    let slice = Slice::new(&place);
    let mut bed = Bed::new(&place, &slice.group);
    let users = bed.dir.with_file_name("users");
    let home = users.join(USER.to_string());
    fs::create_dir_all(&home).unwrap();
    open(users.parent().unwrap());
    bed.sockets = vec![users.join("*/engine.sock")];
    bed.write("a.toml", &limit("web", "container = \"web\"", "egress = \"20mbit\""));
    let engine = Engine::start(home.join("engine.sock"));
    for (path, mode) in [(&engine.socket, 0o660), (&home, 0o700)] {
        chown(path, Some(USER), Some(USER)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let _agent = bed.start();
    wait_for("the engine's answer", || {
        let status = bed.status();
        let state = status["agent"]["engines"][engine.socket.to_str().unwrap()].as_str()?;
        assert!(!state.starts_with("away"), "{state}");
        state.starts_with("running").then_some(())
    });
    place.ok(&["detach"]);
}

fn open(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}
