//! What deploy/ has for Kubernetes fits the rest: rights, versions, the file of limits. `make test-kube` asks
//! a real API server.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

const AGENT: &str = "packaging/systemd/tidegate-agent.service";
const WEB: &str = "packaging/systemd/tidegate-web.service";
const CHART: &str = "deploy/helm/tidegate/templates/daemonset.yaml";
const BASE: &str = "deploy/kustomize/base/daemonset.yaml";
const WITH_WEB: &str = "deploy/kustomize/web/daemonset.yaml";
const LIMITS: &str = "deploy/kustomize/base/limits.toml";
const VALUES: &str = "deploy/helm/tidegate/values.yaml";

fn read(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    fs::read_to_string(root.join(path)).unwrap()
}

/// The lines that begin so, without that.
fn lines<'a>(text: &'a str, start: &'a str) -> Vec<&'a str> {
    text.lines().filter_map(|line| line.trim_start().strip_prefix(start)).collect()
}

fn capabilities_of_unit(path: &str) -> BTreeSet<String> {
    let text = read(path);
    let set = lines(&text, "CapabilityBoundingSet=");
    set[0].split(' ').map(|name| name.trim_start_matches("CAP_").to_owned()).collect()
}

/// Those of each container.
fn capabilities(path: &str) -> Vec<BTreeSet<String>> {
    let text = read(path);
    let set = |list: &str| list.trim_end_matches(']').split(", ").map(str::to_owned).collect();
    lines(&text, "add: [").into_iter().map(set).collect()
}

#[test]
fn containers_have_the_capabilities_of_the_units() {
    let (agent, web) = (capabilities_of_unit(AGENT), capabilities_of_unit(WEB));
    assert_eq!(capabilities(BASE), std::slice::from_ref(&agent));
    assert_eq!(capabilities(WITH_WEB), std::slice::from_ref(&web));
    assert_eq!(capabilities(CHART), [agent, web]);
    for path in [BASE, WITH_WEB, CHART] {
        let text = read(path);
        let containers = capabilities(path).len();
        for line in ["privileged: false", "drop: [ALL]", "allowPrivilegeEscalation: false"] {
            assert_eq!(lines(&text, line).len(), containers, "{path}: {line}");
        }
    }
}

#[test]
fn all_name_the_version_of_the_workspace() {
    let version = env!("CARGO_PKG_VERSION");
    let chart = read("deploy/helm/tidegate/Chart.yaml");
    assert_eq!(lines(&chart, "version: "), [version]);
    assert_eq!(lines(&chart, "appVersion: "), [version]);
    for path in [BASE, WITH_WEB] {
        assert_eq!(lines(&read(path), "image: tidegate:"), [version], "{path}");
    }
}

#[test]
fn the_values_of_the_chart_are_those_of_its_schema() {
    let schema = read("deploy/helm/tidegate/values.schema.json");
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    let known = schema["properties"].as_object().unwrap().keys();
    // Helm itself sets this one.
    let known: BTreeSet<_> = known.map(String::as_str).filter(|key| *key != "global").collect();
    let values = read(VALUES);
    let is_key = |line: &&str| line.starts_with(|c: char| c.is_ascii_alphabetic());
    let values: BTreeSet<_> =
        values.lines().filter(is_key).filter_map(|line| Some(line.split_once(':')?.0)).collect();
    assert_eq!(values, known);
}

fn check(text: &str) {
    let mut check = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["check", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    check.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = check.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_default_file_and_its_examples_are_right() {
    let text = read(LIMITS);
    check(&text);
    let is_example =
        |line: &str| line.starts_with("#[") || line.starts_with('#') && line.contains(" = ");
    let all = text.lines().map(|line| if is_example(line) { &line[1..] } else { line });
    check(&all.collect::<Vec<_>>().join("\n"));
    let indented = text
        .lines()
        .map(|line| if line.is_empty() { "\n".into() } else { format!("    {line}\n") });
    assert!(read(VALUES).contains(&indented.collect::<String>()), "{VALUES} has another file");
}
