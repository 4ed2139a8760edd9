//! Pods, told by an API server that is made up, with cgroups as kubelet makes them.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::{Value, json};
use tidegate_core::gate::BYTES;
use tidegate_sys::cgroup::Cgroup;

use super::{
    Bed, Slice,
    gate::{LIMIT, LIMIT_BYTES_S, LONG, Net, limited, most},
    limit, whole,
};
use crate::{
    common::{Guard, Objects, Place, signal, wait_for},
    need_root,
};

const EGRESS: &str = "kubernetes.io/egress-bandwidth";
/// At a low rate scheme `pace` lets a flood of UDP have a backlog of 32 frames, and a burst of one.
const PACE_BYTES: u64 = 33 * 1514;
/// Over this what is sent to two limits would be seen.
const WATCHED: Duration = Duration::from_secs(4);

/// What the server knows: pods, who watches them, and what was asked for.
#[derive(Default)]
struct Known {
    pods: Vec<Value>,
    version: u64,
    watchers: Vec<TcpStream>,
    asked: Vec<String>,
    /// It refuses all.
    refuses: bool,
}

/// An API server, which answers a page with one pod.
struct Server {
    address: SocketAddr,
    known: Arc<Mutex<Known>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(address: &str, pods: &[Value]) -> Server {
        let listener = wait_for("the port", || TcpListener::bind(address).ok());
        let address = listener.local_addr().unwrap();
        let known = Known { pods: pods.to_vec(), version: 7, ..Known::default() };
        let (known, over) = (Arc::new(Mutex::new(known)), Arc::<AtomicBool>::default());
        let (shared, ends) = (Arc::clone(&known), Arc::clone(&over));
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(stream.unwrap(), &shared));
            }
        });
        Server { address, known, over, thread: Some(thread) }
    }

    /// The file with which it is found.
    fn kubeconfig(&self, directory: &Path) -> PathBuf {
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: it\ncontexts:\n- name: it\n  context: {{ \
             cluster: it, user: it }}\nclusters:\n- name: it\n  cluster: {{ server: 'http://{}' }}\nusers:\n\
             - name: it\n  user: {{ token: secret }}\n",
            self.address
        );
        let file = directory.join("kubeconfig");
        fs::write(&file, text).unwrap();
        file
    }

    /// A pod comes or is another one.
    fn set(&self, pod: &Value) {
        let mut known = self.known.lock().unwrap();
        let uid = &pod["metadata"]["uid"];
        let before = known.pods.len();
        known.pods.retain(|other| other["metadata"]["uid"] != *uid);
        let kind = if known.pods.len() < before { "MODIFIED" } else { "ADDED" };
        known.pods.push(pod.clone());
        known.tell(kind, pod.clone());
    }

    fn remove(&self, uid: &str) {
        let mut known = self.known.lock().unwrap();
        let at = known.pods.iter().position(|pod| pod["metadata"]["uid"] == uid).unwrap();
        let pod = known.pods.remove(at);
        known.tell("DELETED", pod);
    }

    fn say(&self, text: &str) {
        self.known.lock().unwrap().write(text);
    }

    fn cut(&self) {
        self.known.lock().unwrap().cut();
    }

    /// Waits for a request with these words, and forgets what was asked before.
    fn wait_asked(&self, words: &[&str]) {
        wait_for(&format!("a request with {words:?}"), || {
            let mut known = self.known.lock().unwrap();
            let has = |path: &String| words.iter().all(|word| path.contains(word));
            let at = known.asked.iter().position(has)?;
            known.asked.drain(..=at);
            Some(())
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.take().unwrap().join();
        self.cut();
    }
}

impl Known {
    fn tell(&mut self, kind: &str, mut object: Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.write(&format!("{}\n", json!({ "type": kind, "object": object })));
    }

    fn write(&mut self, text: &str) {
        self.watchers.retain_mut(|watcher| {
            // In two chunks: an event need not come whole.
            let (one, two) = text.split_at(text.len() / 2);
            let chunks = [one, two].map(|part| format!("{:x}\r\n{part}\r\n", part.len()));
            watcher.write_all(chunks.concat().as_bytes()).is_ok()
        });
    }

    fn cut(&mut self) {
        self.watchers.drain(..).for_each(|watcher| drop(watcher.shutdown(Shutdown::Both)));
    }

    fn page(&self, path: &str) -> Value {
        let number = |name: &str| path.split(name).nth(1).and_then(|rest| rest.parse().ok());
        let from: usize = number("&continue=").unwrap_or_default();
        let next = (from + 1 < self.pods.len()).then(|| (from + 1).to_string());
        let metadata = json!({
            "resourceVersion": self.version.to_string(), "continue": next.unwrap_or_default(),
        });
        // The API server writes null where there is none.
        let items: Vec<_> = self.pods.iter().skip(from).take(1).collect();
        json!({ "metadata": metadata, "items": (!items.is_empty()).then_some(items) })
    }
}

fn serve(mut stream: TcpStream, known: &Mutex<Known>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(request) = lines.next() else { return };
    let heads: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
    let path = request.split(' ').nth(1).unwrap().to_owned();
    let mut known = known.lock().unwrap();
    let is_right =
        heads.iter().any(|line| line.eq_ignore_ascii_case("authorization: Bearer secret"))
            && path.starts_with("/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-a&");
    known.asked.push(path.clone());
    let (status, body) = if known.refuses || !is_right {
        ("403 Forbidden", json!({ "kind": "Status", "code": 403, "message": "pods are not yours" }))
    } else if path.contains("&watch=1") {
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
        return known.watchers.push(stream);
    } else {
        ("200 OK", known.page(&path))
    };
    let body = body.to_string();
    let head =
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    let _ = stream.write_all((head + &body).as_bytes());
}

fn uid(digit: char) -> String {
    let part = |n: usize| digit.to_string().repeat(n);
    [part(8), part(4), part(4), part(4), part(12)].join("-")
}

fn pod(digit: char, name: &str, annotations: &Value) -> Value {
    // Members that nobody reads.
    json!({
        "kind": "PartialObjectMetadata", "spec": { "nodeName": "node-a" },
        "metadata": {
            "uid": uid(digit), "namespace": "prod", "name": name, "labels": { "app": "api" },
            "annotations": annotations, "resourceVersion": "1", "generation": 1, "managedFields": [],
        },
    })
}

/// The child by itself, and what it says.
struct Child {
    guard: Guard,
    lines: Box<dyn Iterator<Item = String>>,
    parent: Option<std::process::ChildStdin>,
}

impl Child {
    fn start(kubeconfig: &Path) -> Child {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["agent-pods", "node-a", &uid.to_string(), &gid.to_string()])
            .arg(kubeconfig)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let parent = child.stdin.take();
        Child { guard: Guard(child), lines: Box::new(lines), parent }
    }

    fn line(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap()).unwrap()
    }

    /// What it says last, and that it ends.
    fn away(mut self) -> String {
        let mut line = self.line();
        while line["away"].is_null() {
            line = self.line();
        }
        assert_eq!(self.guard.exit_code(), 0);
        line["away"].as_str().unwrap().to_owned()
    }
}

#[test]
fn agent_child_tells_the_pods_of_its_node() {
    let dir = tempfile::tempdir().unwrap();
    let mut static_pod =
        pod('b', "etcd", &json!({ "kubernetes.io/config.mirror": "c".repeat(32) }));
    static_pod["metadata"]["ownerReferences"] = json!([{ "kind": "Node", "name": "node-a" }]);
    let annotations =
        json!({ EGRESS: "1M", "kubernetes.io/config.mirror": "d".repeat(32), "other": "x" });
    let pods = [pod('a', "api-0", &annotations), static_pod];
    let server = Server::start("127.0.0.1:0", &pods);
    let mut child = Child::start(&server.kubeconfig(dir.path()));
    let listed = child.line()["listed"].clone();
    assert_eq!(
        listed[uid('a')],
        json!({
            "namespace": "prod", "name": "api-0", "labels": { "app": "api" }, "annotations": { EGRESS: "1M" },
        })
    );
    assert_eq!(listed[uid('b')]["static_uid"], "c".repeat(32));
    let status = fs::read_to_string(format!("/proc/{}/status", child.guard.0.id())).unwrap();
    for none in ["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1"] {
        assert!(status.contains(none), "{none}: {status}");
    }
    server.wait_asked(&["watch=1", "allowWatchBookmarks=true", "resourceVersion=7&"]);
    // What is not read of a pod is no change of it.
    let mut same = pod('a', "api-0", &annotations);
    same["metadata"]["generation"] = 2.into();
    server.set(&same);
    server.set(&pod('a', "api-0", &json!({ EGRESS: "2M" })));
    assert_eq!(child.line()["changed"][1]["annotations"][EGRESS], "2M");
    server.remove(&uid('b'));
    assert_eq!(child.line()["gone"], uid('b'));
    // A bookmark says up to where; a watch that is cut goes on there.
    server
        .say("{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"4711\"}}}\n");
    server.cut();
    server.wait_asked(&["watch=1", "resourceVersion=4711&"]);
    server.set(&pod('c', "api-1", &Value::Null));
    assert_eq!(child.line()["changed"][1]["name"], "api-1");
    // The server has forgotten where it was.
    server.say("{\"type\":\"ERROR\",\"object\":{\"code\":410,\"message\":\"too old\"}}\n");
    assert_eq!(child.line()["listed"].as_object().unwrap().len(), 2);
    drop(child.parent.take());
    assert_eq!(child.guard.exit_code(), 0);
}

#[test]
fn agent_child_says_why_the_api_server_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start("127.0.0.1:0", &[]);
    let kubeconfig = server.kubeconfig(dir.path());
    let start = || {
        let mut child = Child::start(&kubeconfig);
        assert_eq!(child.line()["listed"], json!({}));
        server.wait_asked(&["watch=1"]);
        child
    };
    let said = |text: &str| {
        let child = start();
        server.say(text);
        child.away()
    };
    let garbage = said("pods? what pods?\n");
    assert!(garbage.starts_with("answers with something else than pods: "), "{garbage}");
    let unknown = said("{\"type\":\"NEWS\",\"object\":{}}\n");
    assert!(unknown.contains("an event of an unknown kind"), "{unknown}");
    let error =
        said("{\"type\":\"ERROR\",\"object\":{\"code\":500,\"message\":\"etcd is away\"}}\n");
    assert_eq!(error, "answers 500: etcd is away");
    // It need not take all of that.
    assert_eq!(said(&"x".repeat(3 << 20)), "answers with more than is read");
    let gone = said("{\"type\":\"ERROR\",\"object\":{\"code\":410}}\n");
    assert!(gone.contains("what it has listed just now is gone"), "{gone}");
    server.known.lock().unwrap().refuses = true;
    assert_eq!(Child::start(&kubeconfig).away(), "answers 403: pods are not yours");
    drop(server);
    let away = Child::start(&kubeconfig).away();
    assert!(away.contains("refused"), "{away}");
    fs::write(&kubeconfig, "clusters: 7").unwrap();
    assert!(!Child::start(&kubeconfig).away().is_empty());
}

/// Cgroups below one, each made if it does not exist.
fn make(slice: &Slice<'_>, path: &str) -> Cgroup {
    let mut made = format!("{}/", slice.group.path());
    for part in path.split('/') {
        made += part;
        let _ = fs::create_dir(slice.place.hierarchy.mount().join(&made));
        made.push('/');
    }
    slice.place.hierarchy.open(made.trim_end_matches('/')).unwrap()
}

/// The cgroup of a pod as kubelet makes it with driver systemd, and that of a container in it.
fn of_systemd(slice: &Slice<'_>, digit: char) -> [Cgroup; 2] {
    let uid = uid(digit).replace('-', "_");
    let pod = format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice");
    let container = format!("{pod}/cri-containerd-{}.scope", digit.to_string().repeat(64));
    [make(slice, &pod), make(slice, &container)]
}

/// The same with driver cgroupfs.
fn of_cgroupfs(slice: &Slice<'_>, digit: char) -> [Cgroup; 2] {
    let pod = format!("kubepods/besteffort/pod{}", uid(digit));
    [make(slice, &pod), make(slice, &format!("{pod}/{}", digit.to_string().repeat(64)))]
}

impl Bed<'_> {
    fn reach(&mut self, server: &Server) {
        self.kubeconfig = Some(server.kubeconfig(self.dir.parent().unwrap()));
    }

    fn cluster(&self) -> String {
        let state = self.status()["agent"]["engines"]["pods of node node-a"].clone();
        state.as_str().unwrap_or_default().to_owned()
    }

    fn wait_cluster(&self, says: &str) {
        wait_for(says, || self.cluster().contains(says).then_some(()));
    }
}

#[test]
fn root_agent_limits_pods_by_their_annotations_before_64_kib() {
    need_root!();
    let (place, net) = (Place::new(), Net::new());
    let slice = Slice::new(&place);
    let mut bed = Bed::new(&place, &slice.group);
    let server = Server::start("127.0.0.1:0", &[]);
    bed.reach(&server);
    bed.write("a.toml", "annotations = true\n");
    let _agent = bed.start_with(LONG);
    bed.wait_cluster("connected");
    for (digit, name, make) in [
        ('a', "api-0", of_systemd as fn(&Slice<'_>, char) -> [Cgroup; 2]),
        ('b', "api-1", of_cgroupfs),
    ] {
        let name_of_limit = format!("pod-prod_{name}");
        let made = Instant::now();
        let [cgroup, container] = make(&slice, digit);
        let process = net.send_from(&place, &container);
        let mut sum = 0;
        wait_for("what is undecided gets", || {
            sum += net.arrived();
            (sum > BYTES / 2).then_some(())
        });
        // kubelet is faster than the API server, whose word is waited for.
        bed.wait_cluster("1 pods here are not known yet");
        sum += net.arrived();
        assert!(sum <= BYTES, "{sum} bytes of a pod that is not known");
        server.set(&pod(digit, name, &json!({ EGRESS: "64k" })));
        whole(&cgroup);
        bed.wait_said(&name_of_limit, "in_force");
        sum += net.arrived();
        assert!(sum <= most(made, PACE_BYTES), "{sum} bytes");
        wait_for("traffic", || (net.arrived() > 0).then_some(()));
        assert_eq!(bed.rate(&name_of_limit), Some(64_000));
        // Changed live: the limit goes on, with its counters.
        let counted = || {
            let limits = bed.status()["limits"].clone();
            let limits = limits.as_array().unwrap().iter();
            let limit = limits.clone().find(|limit| limit["name"] == name_of_limit).unwrap();
            limit["egress"]["pass_packets"].as_u64().unwrap()
        };
        let (before, programs) = (counted(), Objects::on(&cgroup));
        assert!(before > 0);
        server.set(&pod(digit, name, &json!({ EGRESS: "80e3" })));
        wait_for("the other rate", || (bed.rate(&name_of_limit) == Some(80_000)).then_some(()));
        assert!(counted() >= before && programs.is_whole());
        server.set(&pod(digit, name, &json!({ EGRESS: "80kbit" })));
        let reason = bed.wait_said(&name_of_limit, "refused");
        assert!(reason.contains("`80kbit` is no quantity of Kubernetes"), "{reason}");
        assert!(programs.is_whole(), "what was in force stays");
        server.set(&pod(digit, name, &Value::Null));
        wait_for("the end of the limit", || bed.rate(&name_of_limit).is_none().then_some(()));
        drop(process);
        net.arrived();
    }
    place.ok(&["detach"]);
}

/// A pod limits itself within what the node gives it, before it has a container.
#[test]
fn root_agent_limits_a_pod_by_its_annotations_inside_the_limit_that_has_it() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let mut bed = Bed::new(&place, &slice.group);
    let annotated = |rate: &str| pod('a', "api-0", &json!({ EGRESS: rate }));
    let server = Server::start("127.0.0.1:0", &[annotated("64k")]);
    bed.reach(&server);
    let tenant = limit("tenant", "pod = { namespace = \"prod\" }", "egress = \"9mbit\"");
    bed.write("a.toml", &format!("annotations = true\n{tenant}"));
    let _agent = bed.start_with(LONG);
    let [cgroup, container] = of_systemd(&slice, 'a');
    let on = |names: &[&str]| {
        wait_for("the limits of the pod", || {
            (Objects::on(&cgroup).links() == 3 * names.len()).then_some(())
        });
        names.iter().for_each(|name| drop(bed.wait_said(name, "in_force")));
        assert_eq!(place.order(&cgroup), names);
        assert_eq!(Objects::on(&container).links(), 0);
    };
    on(&["pod-prod_api-0", "tenant"]);
    server.set(&annotated("80k"));
    wait_for("the other rate", || (bed.rate("pod-prod_api-0") == Some(80_000)).then_some(()));
    on(&["pod-prod_api-0", "tenant"]);
    server.set(&pod('a', "api-0", &Value::Null));
    on(&["tenant"]);
    server.set(&annotated("64k"));
    on(&["pod-prod_api-0", "tenant"]);
    // It goes out of the limit, and comes into it again.
    bed.write("a.toml", "annotations = true\n");
    on(&["pod-prod_api-0"]);
    bed.write("a.toml", &format!("annotations = true\n{tenant}"));
    on(&["pod-prod_api-0", "tenant"]);
    place.ok(&["detach"]);
}

#[test]
fn root_agent_holds_replicas_together_while_the_api_server_is_away() {
    need_root!();
    let (place, net) = (Place::new(), Net::new());
    let slice = Slice::new(&place);
    let mut bed = Bed::new(&place, &slice.group);
    let pods = [pod('a', "api-0", &Value::Null), pod('b', "api-1", &Value::Null)];
    let server = Server::start("127.0.0.1:0", &pods);
    bed.reach(&server);
    let text = limit("api", "pod = { namespace = \"prod\", labels = \"app=api\" }", LIMIT)
        + &limit("each", "pod = { name = \"own-*\" }", &format!("{LIMIT}\neach = true"));
    bed.write("a.toml", &text);
    let mut agent = bed.start_with("2s");
    wait_for("the pods", || {
        (bed.said("api").1 == "there is no pod `prod/*/app=api`").then_some(())
    });
    let ([one, in_one], [two, in_two]) = (of_systemd(&slice, 'a'), of_cgroupfs(&slice, 'b'));
    limited(&one);
    limited(&two);
    let mut own = pod('c', "own-0", &Value::Null);
    own["metadata"]["labels"] = json!({});
    server.set(&own);
    let [own, _] = of_systemd(&slice, 'c');
    limited(&own);
    bed.wait_said("each-own-0", "in_force");
    let _senders = [net.send_from(&place, &in_one), net.send_from(&place, &in_two)];
    // Two limits would let twice as much pass.
    let shared = || {
        net.arrived();
        let (before, mut sum) = (Instant::now(), 0);
        wait_for("some seconds of traffic", || {
            sum += net.arrived();
            (before.elapsed() >= WATCHED).then_some(())
        });
        let most = LIMIT_BYTES_S * (before.elapsed().as_secs() + 1) + 12_000;
        assert!(sum > 0 && sum <= most, "{sum} bytes, {most} at most");
    };
    shared();
    // It is away: nothing changes, also not by an agent that starts meanwhile.
    let address = server.address.to_string();
    drop(server);
    bed.wait_cluster("away: ");
    signal(agent.0.id(), Signal::TERM);
    assert_eq!(agent.exit_code(), 0);
    let _agent = bed.start();
    let stays = "the API server has not listed the pods of this node yet; the limit on the host stays \
                 meanwhile";
    let says = |reason: &str| {
        let is = ("in_force".to_owned(), reason.to_owned());
        wait_for("another reason", || (bed.said("api") == is).then_some(()));
    };
    says(stays);
    let [new, _] = of_cgroupfs(&slice, 'd');
    bed.wait_cluster("4 pods here are not known yet");
    for cgroup in [&one, &two, &own] {
        assert!(Objects::on(cgroup).links() > 0, "{}", cgroup.path());
    }
    assert!(bed.rate("each-own-0").is_some());
    shared();
    // It is back, and lists another replica; what is gone meanwhile is limited no longer.
    let pods = [pods.to_vec(), vec![pod('d', "api-2", &Value::Null)]].concat();
    let server = Server::start(&address, &pods);
    limited(&new);
    says("");
    wait_for("the end of the limit", || bed.rate("each-own-0").is_none().then_some(()));
    assert!(Objects::on(&one).links() > 0 && Objects::on(&two).links() > 0);
    shared();
    // A pod that has other labels leaves.
    let mut other = pod('d', "api-2", &Value::Null);
    other["metadata"]["labels"] = json!({ "app": "other" });
    server.set(&other);
    wait_for("the pod to leave", || (Objects::on(&new).links() == 0).then_some(()));
    place.ok(&["detach"]);
}

/// The limit around it waits from then on.
#[test]
fn root_agent_takes_off_the_limit_of_the_last_pod_of_another_limit() {
    need_root!();
    let place = Place::new();
    let slice = Slice::new(&place);
    let mut bed = Bed::new(&place, &slice.group);
    let server = Server::start("127.0.0.1:0", &[]);
    bed.reach(&server);
    let jobs = limit("jobs", "pod = { labels = \"app=api\" }", "egress = \"9mbit\"");
    bed.write("a.toml", &("annotations = true\n".to_owned() + &jobs));
    let _agent = bed.start();
    bed.wait_cluster("connected");
    for (digit, name) in [('a', "job-0"), ('b', "job-1")] {
        let name_of_limit = format!("pod-prod_{name}");
        let [cgroup, container] = of_systemd(&slice, digit);
        server.set(&pod(digit, name, &json!({ EGRESS: "1M" })));
        bed.wait_said(&name_of_limit, "in_force");
        wait_for("its rate", || (bed.rate(&name_of_limit) == Some(1_000_000)).then_some(()));
        server.remove(&uid(digit));
        slice.remove(&container);
        slice.remove(&cgroup);
        bed.wait_said("jobs", "waiting");
        wait_for("the end of the limit", || bed.rate(&name_of_limit).is_none().then_some(()));
        wait_for("a status without an alarm", || (bed.check() == Some(0)).then_some(()));
    }
    place.ok(&["detach"]);
}

#[test]
fn root_limit_by_hand_says_who_knows_containers() {
    need_root!();
    let place = Place::new();
    for name in ["web", "web-*"] {
        let args = ["limit", "add", "c", "--container", name, "--egress", "10mbit"];
        let (code, message) = place.refused(&args);
        let says =
            "only `tidegate agent` knows which containers are here; with --persist the agent";
        assert!(code == 1 && message.contains(says), "{code} {message}");
    }
    assert!(!place.store().exists());
}

#[test]
fn root_plan_by_hand_says_who_knows_pods() {
    need_root!();
    let place = Place::new();
    let file = place.file("pods.toml", &limit("api", "pod = { namespace = \"prod\" }", LIMIT));
    let said = place.ok(&["plan", file.to_str().unwrap()]);
    let expected =
        "api waits: only `tidegate agent --kubernetes` knows which pods are here, and attaches it";
    assert!(said.contains(expected), "{said}");
}
