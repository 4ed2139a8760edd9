//! The dashboards and alerts in `deploy/`, with Debian's Prometheus: rules are valid and do what they say,
//! and every panel's query finds something in recorded data.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::Value;

use crate::common::{Guard, port, skip, text, wait_for};

/// Scrapes of the recorded data, and their distance.
const SCRAPES: u64 = 60;
const EVERY_S: u64 = 15;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn has_promtool() -> bool {
    let has = Command::new("promtool").arg("--version").output().is_ok();
    if !has {
        skip("no promtool: apt install prometheus");
    }
    has
}

#[test]
fn deploy_alerts_are_valid_and_fire_when_they_should() {
    if !has_promtool() {
        return;
    }
    for (what, file) in [("check", "alerts.yaml"), ("test", "alerts_test.yaml")] {
        let file = root().join("deploy/prometheus").join(file);
        let output = Command::new("promtool").args([what, "rules"]).arg(file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}{said}", text(&output));
    }
}

/// What the web crate's test stores of a host, as two hosts have it over a quarter of an hour: counters grow.
fn recorded(now_s: u64) -> String {
    let name = "tidegate_web__metrics__tests__every_metric_is_written_in_base_units.snap";
    let path = root().join("crates/web/src/metrics/snapshots").join(name);
    let stored = fs::read_to_string(path).unwrap();
    let lines = || stored.lines().skip_while(|line| !line.starts_with("# HELP"));
    let mut out = String::new();
    let mut family: Vec<&str> = Vec::new();
    let mut end = |family: &mut Vec<&str>| {
        let (head, samples): (Vec<_>, Vec<_>) = family.drain(..).partition(|l| l.starts_with('#'));
        head.iter().for_each(|line| writeln!(out, "{line}").unwrap());
        for (sample, host) in
            samples.iter().flat_map(|s| ["a:9465", "b:9465"].map(|host| (s, host)))
        {
            let (series, value) = sample.rsplit_once(' ').unwrap();
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let comma = if labels == "}" { "" } else { "," };
            let value: f64 = value.parse().unwrap();
            for scrape in 0..SCRAPES {
                let grown =
                    if name.ends_with("_total") { value + (10 * scrape) as f64 } else { value };
                let at = now_s - (SCRAPES - scrape) * EVERY_S;
                writeln!(out, "{name}{{instance=\"{host}\"{comma}{labels} {grown} {at}").unwrap();
            }
        }
    };
    for line in lines() {
        if line.starts_with("# HELP") || line == "# EOF" {
            end(&mut family);
        }
        family.push(line);
    }
    out + "# EOF\n"
}

/// The queries of a dashboard, with the title of their panel.
fn queries(file: &str) -> Vec<(String, String)> {
    let path = root().join("deploy/grafana").join(file);
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let of = |panel: &Value| {
        let title = panel["title"].as_str().unwrap().to_owned();
        let targets = panel["targets"].as_array().unwrap().clone();
        targets.into_iter().map(move |t| (title.clone(), t["expr"].as_str().unwrap().to_owned()))
    };
    let queries: Vec<_> = panels.flat_map(of).collect();
    assert!(queries.len() > 10, "{file}");
    queries
}

#[test]
fn deploy_dashboards_find_recorded_data() {
    if !has_promtool() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("recorded.txt");
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    fs::write(&file, recorded(now_s)).unwrap();
    let data = dir.path().join("data");
    let output = Command::new("promtool")
        .args(["tsdb", "create-blocks-from", "openmetrics"])
        .args([&file, &data])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let config = dir.path().join("prometheus.yml");
    fs::write(&config, "").unwrap();
    let address = format!("127.0.0.1:{}", port());
    let mut command = Command::new("prometheus");
    command.arg(format!("--config.file={}", config.display()));
    command.arg(format!("--storage.tsdb.path={}", data.display()));
    command.arg(format!("--web.listen-address={address}"));
    let _prometheus = Guard(command.stderr(Stdio::null()).spawn().unwrap());
    let server = format!("http://{address}");
    let ask = |query: &str| {
        let time = format!("--time={}", now_s - 2 * EVERY_S);
        let output =
            Command::new("promtool").args(["query", "instant", &time, &server, query]).output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success().then(|| text(&output)).ok_or(said)
    };
    wait_for("Prometheus", || ask("tidegate_build_info").ok().filter(|found| !found.is_empty()));
    let mut asked = BTreeSet::new();
    for (title, query) in ["node.json", "fleet.json"].iter().flat_map(|file| queries(file)) {
        let query = query.replace("$__rate_interval", "1m");
        let query =
            query.replace("$instance", ".*").replace("$limit", ".*").replace("$group", ".*");
        assert!(!query.contains('$'), "{title}: {query}");
        match ask(&query) {
            Ok(found) => assert!(!found.is_empty(), "{title} finds nothing: {query}"),
            Err(why) => panic!("{title}: {query}: {why}"),
        }
        asked.insert(query);
    }
    assert!(asked.len() > 20, "{asked:?}");
}
