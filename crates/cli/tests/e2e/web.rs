//! `tidegate web` with a real limit and traffic: what metrics, the page and its API say is what `status`
//! says.

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
};

use serde_json::Value;
use tidegate_sys::cgroup::Cgroup;

use crate::{
    common::{Guard, Place, port, skip, wait_for},
    need_root,
    traffic::sender,
};

mod browser;

/// What a finite transfer sends.
const TRANSFER_BYTES: usize = 2_000_000;

/// `tidegate web` of a place.
struct Web<'a> {
    place: &'a Place,
    run: PathBuf,
    port: u16,
    web: Guard,
}

impl<'a> Web<'a> {
    fn start(place: &'a Place) -> Web<'a> {
        let run = place.dir().join("run");
        let port = port();
        let mut command = place.tidegate();
        command.env("TIDEGATE_RUN_DIR", &run).env("TIDEGATE_SOCKET", run.join("node.sock"));
        command.arg("web").arg("--listen").arg(format!("127.0.0.1:{port}"));
        let web = Guard(command.stderr(Stdio::null()).spawn().unwrap());
        let web = Web { place, run, port, web };
        wait_for("the first reading", || web.get("/api/status"));
        web
    }

    /// The body, if the answer is 200.
    fn get(&self, path: &str) -> Option<String> {
        let (head, body) = self.ask("GET", path, "localhost")?;
        head.starts_with("HTTP/1.1 200 ").then_some(body)
    }

    /// Head and body.
    fn ask(&self, method: &str, path: &str, host: &str) -> Option<(String, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        write!(stream, "{method} {path} HTTP/1.1\r\nhost: {host}\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let (head, body) = text.split_once("\r\n\r\n")?;
        Some((head.to_owned(), body.to_owned()))
    }

    fn tidegate(&self, args: &[&str]) -> Output {
        let mut command = self.place.tidegate();
        command
            .env("TIDEGATE_RUN_DIR", &self.run)
            .env("TIDEGATE_SOCKET", self.run.join("node.sock"));
        command.args(args).output().unwrap()
    }

    /// What `status --json` says.
    fn status(&self) -> Value {
        let output = self.tidegate(&["status", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Waits until a reading was taken after the last packet: all that does not move with the clock is the
    /// same.
    fn settled(&self) -> Value {
        wait_for("the page's status to be that of `status`", || {
            let status = still(self.status());
            let said = still(serde_json::from_str(&self.get("/api/status")?).ok()?);
            // Two readings apart, rates are those of silence.
            let live: Value = serde_json::from_str(&self.get("/api/live")?).ok()?;
            let mut limits = live["limits"].as_array()?.iter();
            let silent = limits.all(|limit| {
                ["egress", "ingress"].iter().all(|d| limit[d]["used_bit_s"].as_f64() <= Some(0.0))
            });
            (said == status && silent).then_some(status)
        })
    }
}

/// Without what changes as time goes by.
fn still(mut value: Value) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.retain(|key, _| {
                    !key.ends_with("_ago_ns") && key != "backlog_ns" && key != "up_ns"
                });
                map.values_mut().for_each(strip);
            }
            Value::Array(list) => list.iter_mut().for_each(strip),
            _ => {}
        }
    }
    strip(&mut value);
    value
}

/// A parent with two limits inside, one beside, and one that waits.
fn limits(place: &Place) -> [Cgroup; 3] {
    let [shop, backup] = ["shop", "backup"].map(|name| place.child(name));
    let [api, worker] = ["api", "worker"].map(|name| place.hierarchy.create(&shop, name).unwrap());
    let spec = format!(
        "[[limit]]\nname = \"shop\"\nscope = {{ cgroup = \"{0}\" }}\negress = \"80mbit\"\nloopback = true\n\
         [[limit]]\nname = \"api\"\nscope = {{ cgroup = \"{0}/api\" }}\nparent = \"shop\"\n\
         guarantee = \"30mbit\"\negress = \"60mbit\"\nloopback = true\n\
         [[limit]]\nname = \"worker\"\nscope = {{ cgroup = \"{0}/worker\" }}\nparent = \"shop\"\n\
         weight = 50\negress = \"40mbit\"\nloopback = true\n\
         [[limit]]\nname = \"backup\"\nscope = {{ cgroup = \"{1}\" }}\negress = \"20mbit\"\n\
         ingress = \"20mbit\"\n\
         loopback = true\n\
         [[limit]]\nname = \"mail\"\nscope = {{ cgroup = \"{1}-mail\" }}\negress = \"5mbit\"\n",
        shop.path(),
        backup.path(),
    );
    let file = place.file("limits.toml", &spec);
    place.ok(&["apply", file.to_str().unwrap()]);
    [api, worker, backup]
}

/// Sends a finite transfer from each cgroup.
fn transfer(place: &Place, groups: &[Cgroup]) {
    for group in groups {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let sink = thread::spawn(move || sink(&mut listener.accept().unwrap().0));
        let mut command = place.inside(group, "env");
        sender(&mut command, &format!("tcp {address} {TRANSFER_BYTES}"));
        assert!(command.status().unwrap().success());
        assert!(sink.join().unwrap() >= TRANSFER_BYTES);
    }
}

fn sink(stream: &mut TcpStream) -> usize {
    let mut buffer = vec![0; 64 << 10];
    std::iter::from_fn(|| stream.read(&mut buffer).ok().filter(|n| *n > 0)).sum()
}

/// The samples of a text: by name and labels.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// In the form that Prometheus had before OpenMetrics, which `promtool check metrics` reads: there the type
/// names a counter with its `_total`.
fn classic(text: &str) -> String {
    let mut counters = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("# TYPE ").and_then(|l| l.strip_suffix(" counter")) {
            counters.push(name.to_owned());
        }
    }
    let mut out = String::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        let words: Vec<_> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", what, name, rest] if counters.iter().any(|counter| counter == name) => {
                out += &format!("# {what} {name}_total {rest}\n");
            }
            _ => out += &format!("{line}\n"),
        }
    }
    out
}

#[test]
fn root_web_says_what_status_says() {
    need_root!();
    let place = Place::new();
    let groups = limits(&place);
    let web = Web::start(&place);
    transfer(&place, &groups);
    let status = web.settled();
    let text = web.get("/metrics").unwrap();
    assert!(text.ends_with("# EOF\n"));
    let samples = samples(&text);
    let rows = status["limits"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    let mut passed = 0;
    for limit in rows {
        let (name, state) = (limit["name"].as_str().unwrap(), limit["state"].as_str().unwrap());
        let sample = |metric: &str, labels: &str| {
            let key = format!("tidegate_{metric}{{limit=\"{name}\"{labels}}}");
            *samples.get(&key).unwrap_or_else(|| panic!("no {key} in {text}"))
        };
        assert_eq!(sample("limit_in_force", ""), f64::from(state == "in_force"));
        assert_eq!(sample("limit_waiting", ""), f64::from(state == "waiting"));
        for direction in ["egress", "ingress"] {
            let Some(of) = limit[direction].as_object() else { continue };
            let labels = format!(",direction=\"{direction}\"");
            let rate = of["rate_bit_s"].as_u64().unwrap();
            assert_eq!(sample("limit_rate_bytes_per_second", &labels), rate as f64 / 8.0);
            for (key, value) in of {
                for unit in ["packets", "bytes"] {
                    let Some(outcome) = key.strip_suffix(&format!("_{unit}")) else { continue };
                    let labels = format!("{labels},outcome=\"{outcome}\"");
                    let value = value.as_u64().unwrap();
                    assert_eq!(
                        sample(&format!("limit_{unit}_total"), &labels),
                        value as f64,
                        "{labels}"
                    );
                    passed += if key == "pass_bytes" { value } else { 0 };
                }
            }
        }
    }
    assert!(passed > 3 * TRANSFER_BYTES as u64, "{text}");
    promtool_accepts(&text);
    history(&web);
    // What a limit's flows do is asked of the reader; an idle one has none.
    let look: Value = serde_json::from_str(&web.get("/api/limit/api").unwrap()).unwrap();
    assert_eq!(look["limit"]["name"], "api");
    assert_eq!(look["explanations"][0]["places"][0]["verdict"]["reason"], "idle", "{look}");
    refuses(&web);
    has_no_rights(&web);
    place.ok(&["detach"]);
}

fn promtool_accepts(text: &str) {
    let Ok(mut promtool) = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
    else {
        return skip("no promtool: apt install prometheus");
    };
    promtool.stdin.take().unwrap().write_all(classic(text).as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said =
        format!("{}{}", crate::common::text(&output), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.is_empty(), "{said}");
}

fn history(web: &Web<'_>) {
    let output = web.tidegate(&["history", "backup", "--json"]);
    let history: Value = serde_json::from_slice(&output.stdout).unwrap();
    let points = history["egress"]["fine"].as_array().unwrap();
    let bits: f64 = points.iter().filter_map(|point| point["used_bit_s"].as_f64()).sum();
    // Each point is a second, or as long as the machine took.
    assert!(bits > TRANSFER_BYTES as f64, "{history}");
    let svg = crate::common::text(&web.tidegate(&["history", "backup", "--svg"]));
    assert!(svg.starts_with("<svg") && svg.contains("Limit backup"), "{svg}");
    let table = crate::common::text(&web.tidegate(&["history", "backup"]));
    assert!(table.starts_with("TIME") && table.contains("egress"), "{table}");
    let none = web.tidegate(&["history", "none"]);
    let said = String::from_utf8_lossy(&none.stderr);
    assert!(
        none.status.code() == Some(1) && said.contains("nothing is known of a limit `none`"),
        "{said}"
    );
}

fn refuses(web: &Web<'_>) {
    let (head, _) = web.ask("POST", "/api/status", "localhost").unwrap();
    assert!(head.starts_with("HTTP/1.1 405"), "{head}");
    let (head, body) = web.ask("HEAD", "/api/status", "localhost").unwrap();
    assert!(head.starts_with("HTTP/1.1 200") && body.is_empty(), "{head}");
    let (head, _) = web.ask("GET", "/api/status", "evil.example").unwrap();
    assert!(head.starts_with("HTTP/1.1 421"), "a page of somebody else: {head}");
    let (head, _) = web.ask("GET", "/", "localhost").unwrap();
    let policy = head.lines().find_map(|line| line.strip_prefix("content-security-policy: "));
    assert!(policy.unwrap().starts_with("default-src 'none'; script-src 'self'"), "{head}");
    let second = web.tidegate(&["web"]);
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(
        !second.status.success() && said.contains("another `tidegate web` runs here"),
        "{said}"
    );
}

/// The process that serves may do nothing, and is not root.
fn has_no_rights(web: &Web<'_>) {
    let id = web.web.0.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let server = children.split_whitespace().next().expect("a server");
    let status = fs::read_to_string(format!("/proc/{server}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(field("CapEff:"), ["0000000000000000"]);
    assert_eq!(field("CapPrm:"), ["0000000000000000"]);
    assert_eq!(field("NoNewPrivs:"), ["1"]);
    assert_eq!(field("Uid:"), ["65534"; 4]);
}

#[test]
fn root_web_ends_with_its_reader_and_history_says_who_is_missing() {
    need_root!();
    let place = Place::new();
    let mut web = Web::start(&place);
    let id = web.web.0.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let server = PathBuf::from("/proc").join(children.trim());
    crate::common::signal(id, rustix::process::Signal::KILL);
    web.web.exit_code();
    wait_for("the end of the server", || (!server.exists()).then_some(()));
    let output = web.tidegate(&["history", "backup"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(2) && said.contains("`tidegate web` does not run"),
        "{said}"
    );
}

#[test]
fn root_web_says_where_it_cannot_listen() {
    need_root!();
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    for address in [taken.local_addr().unwrap().to_string(), "192.0.2.1:9465".to_owned()] {
        let mut command = place.tidegate();
        command.env("TIDEGATE_RUN_DIR", place.dir().join("run"));
        let output = command.args(["web", "--listen", &address]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(&format!("cannot listen at {address}: ")), "{said}");
        assert!(!said.contains("the page is at"), "{said}");
    }
}

#[test]
fn root_web_ends_with_its_server_and_limits_stay() {
    need_root!();
    let place = Place::new();
    let _groups = limits(&place);
    let mut web = Web::start(&place);
    let id = web.web.0.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let before = web.status();
    crate::common::signal(children.trim().parse().unwrap(), rustix::process::Signal::KILL);
    // The unit starts it again.
    assert_ne!(web.web.exit_code(), 0);
    assert_eq!(still(web.status()), still(before));
    place.ok(&["detach"]);
}

/// A store that others can change is not read.
#[test]
fn root_web_shows_the_last_reading_and_says_why_there_is_no_newer_one() {
    need_root!();
    let place = Place::new();
    let _groups = limits(&place);
    let web = Web::start(&place);
    let live = || serde_json::from_str::<Value>(&web.get("/api/live")?).ok();
    let failed = || live().map(|live| live["failed"].clone());
    wait_for("a reading", || failed().filter(Value::is_null));
    let set = |mode| fs::set_permissions(place.store(), Permissions::from_mode(mode)).unwrap();
    set(0o777);
    let why = wait_for("a reading that fails", || failed().filter(Value::is_string));
    assert!(why.as_str().unwrap().contains("open to other users"), "{why}");
    let last = live().unwrap();
    assert_eq!(last["limits"].as_array().unwrap().len(), 5, "{last}");
    assert!(web.get("/metrics").unwrap().contains("tidegate_limit_in_force{limit=\"api\"} 1\n"));
    browser::says(&place, &web, "limits cannot be read: ");
    // Nothing is newer than that.
    assert_eq!(live().unwrap()["unix_ns"], last["unix_ns"]);
    set(0o700);
    wait_for("the next reading", || failed().filter(Value::is_null));
    assert!(live().unwrap()["unix_ns"].as_u64() > last["unix_ns"].as_u64());
    place.ok(&["detach"]);
}

#[test]
fn root_web_removes_its_socket_when_it_is_stopped() {
    need_root!();
    let place = Place::new();
    let mut web = Web::start(&place);
    let id = web.web.0.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let server: u32 = children.trim().parse().unwrap();
    assert!(web.run.join("web.sock").exists());
    // The order in which both have the signal is not the same each time.
    for process in [server, id] {
        crate::common::signal(process, rustix::process::Signal::TERM);
    }
    assert_eq!(web.web.exit_code(), 0);
    assert!(!web.run.join("web.sock").exists());
    assert!(!Path::new(&format!("/proc/{server}")).exists());
}

/// A daemon that says what is in the example of the web crate.
fn example_daemon(socket: &Path) {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../web/src/snapshot/example.json");
    let example: Value = serde_json::from_str(&fs::read_to_string(example).unwrap()).unwrap();
    let body = example["fleet"].to_string();
    fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.read(&mut [0; 4096]);
            let _ =
                write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        }
    });
}
