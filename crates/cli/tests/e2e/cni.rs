//! `tidegate-cni`, the CNI plugin: what a runtime would do, with the binary under the plugin's name.

use std::{
    io::Write,
    os::unix::fs::symlink,
    path::PathBuf,
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_sys::net::NetNs;

use crate::{
    common::{Place, entries},
    edt::{BURST_BYTES, Bed, RECEIVER, into, is_free, is_held},
    need_root,
};

const LIMIT_BIT_S: f64 = 20e6;

/// The plugin on a host, which is the receiver of a bed; the sender is the container.
struct Runtime {
    place: Place,
    bed: Bed,
    plugin: PathBuf,
    _dir: TempDir,
}

impl Runtime {
    fn new() -> Runtime {
        let dir = tempfile::tempdir().unwrap();
        let plugin = dir.path().join("tidegate-cni");
        symlink(env!("CARGO_BIN_EXE_tidegate"), &plugin).unwrap();
        Runtime { place: Place::new(), bed: Bed::new(), plugin, _dir: dir }
    }

    fn host(&self, program: &str) -> Command {
        let mut command = into(&self.bed.receiver, program);
        command.env("TIDEGATE_BPFFS", self.place.store());
        command
    }

    fn netns(netns: &NetNs) -> String {
        format!("/run/netns/{}", netns.name())
    }

    /// Exit code and answer.
    fn call(&self, command: &str, config: &Value) -> (bool, Value) {
        self.call_for(command, "c1", &Self::netns(&self.bed.sender), config)
    }

    fn call_for(&self, command: &str, id: &str, netns: &str, config: &Value) -> (bool, Value) {
        self.call_with(command, (id, netns, ""), config)
    }

    /// The same with `CNI_ARGS`.
    fn call_with(
        &self,
        command: &str,
        (id, netns, args): (&str, &str, &str),
        config: &Value,
    ) -> (bool, Value) {
        let mut plugin = self.host(self.plugin.to_str().unwrap());
        plugin.env("CNI_COMMAND", command).env("CNI_CONTAINERID", id).env("CNI_IFNAME", "eth0");
        plugin.env("CNI_NETNS", netns).env("CNI_PATH", "/nowhere");
        plugin.env("CNI_ARGS", args);
        let mut child = plugin
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(config.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        let answer = match output.stdout.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&output.stdout).unwrap(),
        };
        assert!(error.is_empty(), "{error}");
        (output.status.success(), answer)
    }

    fn ok(&self, command: &str, config: &Value) -> Value {
        let (done, answer) = self.call(command, config);
        assert!(done, "{command}: {answer}");
        answer
    }

    fn refused(&self, command: &str, config: &Value) -> (u64, String) {
        let (done, answer) = self.call(command, config);
        assert!(!done, "{command}: {answer}");
        assert_eq!(answer["cniVersion"], config["cniVersion"]);
        (answer["code"].as_u64().unwrap(), answer["msg"].as_str().unwrap().to_owned())
    }

    fn limits(&self) -> Vec<Value> {
        let output = self.host(env!("CARGO_BIN_EXE_tidegate")).args(["status", "--json"]).output();
        let status: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
        status["limits"].as_array().unwrap().clone()
    }
}

/// A configuration as a runtime gives it after the plugin that made the interface.
fn config(version: &str, bandwidth: Value) -> Value {
    json!({
        "cniVersion": version,
        "name": "net",
        "type": "tidegate-cni",
        "capabilities": { "bandwidth": true },
        "runtimeConfig": { "bandwidth": bandwidth },
        "prevResult": {
            "cniVersion": version,
            "interfaces": [{ "name": "eth0" }, { "name": "eth0", "sandbox": "/run/netns/x" }],
            "ips": [{ "version": "4", "address": "10.97.0.1/24", "interface": 1 }],
            "dns": {},
        },
    })
}

fn egress(bit_s: f64) -> Value {
    json!({ "egressRate": bit_s as u64, "egressBurst": 8 * BURST_BYTES })
}

#[test]
fn root_cni_limits_a_container_until_it_is_deleted() {
    need_root!();
    let runtime = Runtime::new();
    let bed = &runtime.bed;
    for version in ["0.3.1", "0.4.0", "1.1.0"] {
        let asked = config(version, egress(LIMIT_BIT_S));
        assert_eq!(runtime.ok("ADD", &asked), asked["prevResult"], "the result goes on");
    }
    let asked = config("1.1.0", egress(LIMIT_BIT_S));
    let limits = runtime.limits();
    assert_eq!(limits.len(), 1, "adding twice is adding once: {limits:?}");
    assert_eq!(limits[0]["port"], "eth0");
    assert_eq!(limits[0]["egress"]["rate_bit_s"], LIMIT_BIT_S as u64);
    runtime.ok("CHECK", &asked);
    // Nothing would put it back.
    let file = runtime.place.file("none.toml", "limit = []\n");
    let mut apply = runtime.host(env!("CARGO_BIN_EXE_tidegate"));
    let said = apply.args(["apply", "--prune"]).arg(file).output().unwrap().stdout;
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("1 limit of others stays: 1 of `tidegate-cni`"), "{said}");
    let taken = "[[limit]]\nname = \"a\"\nscope = { port = \"eth0\" }\negress = \"1mbit\"\n";
    let file = runtime.place.file("taken.toml", taken);
    let mut apply = runtime.host(env!("CARGO_BIN_EXE_tidegate"));
    let refused = apply.args(["apply", "--prune"]).arg(file).output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("`tidegate-cni` removes with its container"), "{said}");
    assert_eq!(refused.status.code(), Some(1));
    runtime.ok("CHECK", &asked);
    let traffic = bed.free(&bed.sender, &format!("3 2 0 {RECEIVER}"));
    is_held(&traffic, LIMIT_BIT_S, BURST_BYTES);

    // Other rates are found, and set live.
    let other = config("1.1.0", egress(LIMIT_BIT_S / 2.0));
    let (code, message) = runtime.refused("CHECK", &other);
    assert!(code == 100 && message.contains("egress"), "{code} {message}");
    runtime.ok("ADD", &other);
    runtime.ok("CHECK", &other);

    // Added again without a rate, it is not limited any more.
    for none in [json!({}), egress(0.0)] {
        let mut free = config("1.1.0", none);
        free["runtimeConfig"]["bandwidth"]["egressBurst"] = json!(0);
        let (code, message) = runtime.refused("CHECK", &free);
        assert!(code == 100 && message.contains("is on"), "{code} {message}");
        runtime.ok("ADD", &free);
        assert!(runtime.limits().is_empty());
        runtime.ok("CHECK", &free);
        runtime.ok("ADD", &other);
    }

    assert_eq!(runtime.ok("DEL", &other), Value::Null);
    assert!(runtime.limits().is_empty());
    assert!(!runtime.place.store().exists());
    is_free(&bed.free(&bed.sender, &format!("2 1 0 {RECEIVER}")), LIMIT_BIT_S);
    let (code, message) = runtime.refused("CHECK", &other);
    assert!(code == 100 && message.contains("no limit"), "{code} {message}");
    // What is gone can be deleted, and what has gone with its namespace.
    runtime.ok("DEL", &other);
    let (done, answer) = runtime.call_for("DEL", "c1", "/run/netns/gone", &other);
    assert!(done, "{answer}");
}

/// A limit is named by its pod, and found again by a runtime that does not name that, or by GC. So is one
/// that an earlier version has put on.
#[test]
fn root_cni_names_a_limit_by_its_pod() {
    const POD: &str = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-7d4b9c6f5-x2x8q";
    need_root!();
    let runtime = Runtime::new();
    let asked = config("1.1.0", egress(LIMIT_BIT_S));
    let netns = Runtime::netns(&runtime.bed.sender);
    let add = |args: &str| {
        let (done, answer) = runtime.call_with("ADD", ("c1", &netns, args), &asked);
        assert!(done, "{answer}");
        let limits = runtime.limits();
        assert_eq!(limits.len(), 1, "{limits:?}");
        limits[0]["name"].as_str().unwrap().to_owned()
    };
    let collect = json!({
        "cniVersion": "1.1.0",
        "name": "net",
        "type": "tidegate-cni",
        "cni.dev/valid-attachments": [{ "containerID": "c1", "ifname": "eth0" }],
    });
    let name = add(POD);
    assert!(name.contains("-shop_web-7d4b9c6f5-x2x8q-"), "{name}");
    assert_eq!(add(""), name, "it keeps its name");
    runtime.ok("CHECK", &asked);
    runtime.ok("GC", &collect);
    assert_eq!(runtime.limits().len(), 1);
    runtime.ok("DEL", &asked);
    assert!(runtime.limits().is_empty());

    // Earlier versions have named all by their containers.
    let earlier = add("");
    assert!(earlier.contains("-c1-"), "{earlier}");
    assert_eq!(add(POD), earlier);
    let (done, answer) = runtime.call_with("CHECK", ("c1", &netns, POD), &asked);
    assert!(done, "{answer}");
    runtime.ok("GC", &collect);
    assert_eq!(runtime.limits().len(), 1);
    let (done, answer) = runtime.call_with("DEL", ("c1", &netns, POD), &asked);
    assert!(done && runtime.limits().is_empty(), "{answer}");
}

#[test]
fn root_cni_takes_off_what_is_not_valid_any_more() {
    need_root!();
    let runtime = Runtime::new();
    let asked = config("1.1.0", egress(LIMIT_BIT_S));
    runtime.ok("ADD", &asked);
    let collect = |valid: Value, network: &str| {
        let mut config = json!({ "cniVersion": "1.1.0", "name": network, "type": "tidegate-cni" });
        config["cni.dev/valid-attachments"] = valid;
        assert_eq!(runtime.ok("GC", &config), Value::Null);
        runtime.limits().len()
    };
    assert_eq!(collect(json!([{ "containerID": "c1", "ifname": "eth0" }]), "net"), 1);
    assert_eq!(collect(json!([]), "other"), 1, "another network's");
    assert_eq!(collect(json!([{ "containerID": "c2", "ifname": "eth0" }]), "net"), 0);
    assert!(entries(&runtime.place.store()).is_empty());
}

#[test]
fn root_cni_answers_what_cannot_be() {
    need_root!();
    let runtime = Runtime::new();
    let asked = config("1.0.0", egress(LIMIT_BIT_S));
    // No rate: the result goes on, and there is no limit.
    let free = config("1.0.0", json!({}));
    assert_eq!(runtime.ok("ADD", &free), free["prevResult"]);
    let mut unchained = asked.clone();
    unchained["prevResult"].take();
    let (code, message) = runtime.refused("ADD", &unchained);
    assert!(code == 7 && message.contains("prevResult"), "{code} {message}");
    let (done, answer) = runtime.call_for("ADD", "c1", "/run/netns/gone", &asked);
    assert!(!done && answer["code"] == 4, "{answer}");
    // The host's own namespace has an interface of that name, whose other end is elsewhere.
    let here = Runtime::netns(&runtime.bed.receiver);
    let (done, answer) = runtime.call_for("ADD", "c1", &here, &asked);
    assert!(!done && answer["code"] == 100, "{answer}");
    let (code, message) = runtime.refused("ADD", &config("1.0.0", egress(10.0)));
    assert!(code == 7 && message.contains("egress"), "{code} {message}");
    assert!(runtime.limits().is_empty());

    let version = runtime.ok("VERSION", &json!({ "cniVersion": "1.0.0" }));
    assert!(
        version["supportedVersions"].as_array().unwrap().contains(&json!("1.1.0")),
        "{version}"
    );
    runtime.ok("STATUS", &json!({ "cniVersion": "1.1.0", "name": "net", "type": "tidegate-cni" }));
}

#[test]
fn root_cni_leaves_subnets_alone_that_shall_not_be_shaped() {
    need_root!();
    let runtime = Runtime::new();
    let bed = &runtime.bed;
    let mut rates = egress(LIMIT_BIT_S);
    rates["unshapedSubnets"] = json!(["10.97.0.0/24"]);
    runtime.ok("ADD", &config("1.0.0", rates.clone()));
    is_free(&bed.free(&bed.sender, &format!("2 1 0 {RECEIVER}")), LIMIT_BIT_S);
    rates["unshapedSubnets"].take();
    rates["shapedSubnets"] = json!(["10.96.0.0/15"]);
    let mut shaped = config("1.0.0", rates);
    let bandwidth = &mut shaped["runtimeConfig"]["bandwidth"];
    bandwidth.as_object_mut().unwrap().remove("unshapedSubnets");
    runtime.ok("ADD", &shaped);
    let traffic = bed.free(&bed.sender, &format!("3 1 40e6 {RECEIVER}"));
    is_held(&traffic, LIMIT_BIT_S, BURST_BYTES);
}
