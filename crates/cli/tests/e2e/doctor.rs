//! `tidegate doctor`: what it says of this host, of a limit that somebody took off, and to whom it says less.

use std::process::Command;

use serde_json::Value;
use tidegate_core::{Scheme, scheme::SCHEMES};

use crate::{common::*, need_root};

fn findings(report: &Value, verdict: &str) -> Vec<String> {
    let all = report["findings"].as_array().unwrap().iter();
    let all = all.filter(|finding| finding["verdict"] == verdict);
    all.map(|finding| format!("{}: {}", finding["about"], finding["found"])).collect()
}

#[test]
fn root_doctor_names_a_limit_that_is_lost() {
    need_root!();
    let place = Place::new();
    place.ok(&["limit", "add", "a", "--cgroup", place.group.path(), "--egress", "50mbit"]);
    let well = place.json(&["doctor", "--json"]);
    assert_eq!(well["works"], true);
    assert!(findings(&well, "problem").is_empty(), "{well}");
    let fine = findings(&well, "ok").join("\n");
    for line in ["1 limit is in force", "`pace` works on cgroups", "a cgroup gets `pace`"] {
        assert!(fine.contains(line), "{fine}");
    }
    // Its own programs are nobody else's.
    let on = place.group.path();
    assert!(
        !findings(&well, "ok").iter().any(|f| f.contains("others") && f.contains(on)),
        "{well}"
    );

    let link = tidegate_sys::libbpf_rs::Link::open(place.store().join("a/egress")).unwrap();
    link.detach().unwrap();
    let text = place.ok(&["doctor"]);
    let lost = text.lines().find(|line| line.starts_with("problem")).unwrap();
    assert!(lost.contains("`a` is NOT ENFORCED") && lost.contains("limit restore a"), "{text}");
}

#[test]
fn root_whoever_is_not_root_is_told_what_was_not_looked_at() {
    need_root!();
    let mut command = Command::new("setpriv");
    // A directory that only root may enter may have the binary: it is open before the user changes.
    let script =
        "exec 9<\"$0\"; exec setpriv --reuid 65534 --clear-groups /proc/self/fd/9 doctor --json";
    let output = command.args(["--", "sh", "-c", script, env!("CARGO_BIN_EXE_tidegate")]);
    let output = output.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["works"], true, "{report}");
    let said = findings(&report, "warning").join("\n");
    assert!(said.contains("limits need the privileges of root"), "{said}");
    let unknown = findings(&report, "unknown").join("\n");
    assert!(unknown.contains("cgroups were not looked at"), "{unknown}");
    let fine = findings(&report, "ok").join("\n");
    for info in SCHEMES.iter().filter(|info| info.scheme != Scheme::Carousel) {
        let name = format!("`{}` was not tested on", info.name);
        assert!(unknown.contains(&name), "{unknown}");
        assert!(!fine.contains(&format!("`{}` works", info.name)), "{fine}");
    }
}
