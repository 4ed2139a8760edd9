use std::{collections::BTreeMap, path::Path};

use super::*;
use crate::{link::StatusHead, snapshot::tests::snapshot};

fn rendered(snapshot: &Snapshot) -> String {
    let (head, mut history) =
        (StatusHead { took_ns: 1_500_000, ..StatusHead::default() }, History::default());
    for second in 0..2 {
        history.push(snapshot, second * 1_000_000_000, second * 1_000_000_000);
    }
    render(View { snapshot, head: &head, history: &history }).unwrap()
}

#[test]
fn every_metric_is_written_in_base_units() {
    let text = rendered(&snapshot());
    let build = format!("build=\"{BUILD}\"");
    insta::assert_snapshot!(text.replace(&build, "build=\"BUILD\""));
}

#[test]
fn nothing_is_known_of_a_host_without_limits() {
    let text = rendered(&Snapshot { limits: Vec::new(), ..Snapshot::default() });
    let values: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let names: Vec<_> = values.iter().filter_map(|line| line.split([' ', '{']).next()).collect();
    assert_eq!(
        names,
        [
            "tidegate_limits_without_metrics",
            "tidegate_warnings",
            "tidegate_reading_duration_seconds",
            "tidegate_build_info"
        ]
    );
}

#[test]
fn a_daemon_that_has_died_is_down() {
    let (head, history) =
        (StatusHead { fleet_died: true, ..StatusHead::default() }, History::default());
    let snapshot = Snapshot::default();
    let text = render(View { snapshot: &snapshot, head: &head, history: &history }).unwrap();
    assert!(text.contains("\ntidegate_fleet_up 0\n"), "{text}");
}

/// As `tidegate status --check` has it.
#[test]
fn an_agent_is_down_if_something_asks_for_it() {
    let up = |snapshot: &Snapshot, agent_missed| {
        let (head, history) =
            (StatusHead { agent_missed, ..StatusHead::default() }, History::default());
        let text = render(View { snapshot, head: &head, history: &history }).unwrap();
        text.lines().find_map(|line| line.strip_prefix("tidegate_agent_up ")?.parse::<u8>().ok())
    };
    let none = Snapshot::default();
    assert_eq!((up(&none, false), up(&none, true)), (None, Some(0)));
    let mut ended = snapshot();
    assert_eq!(up(&ended, false), Some(1));
    let agent = ended.agent.as_mut().unwrap();
    agent.running = false;
    assert_eq!(up(&ended, false), Some(0));
    let agent = ended.agent.as_mut().unwrap();
    (agent.report.limits, agent.report.managed) = Default::default();
    assert_eq!(up(&ended, false), None, "its files ask for nothing");
}

/// As `tidegate status --check` has it: what is off by schedule, and what a container may not have, is no
/// limit that is lost; one that must be in force is, also while it waits.
#[test]
fn a_limit_that_is_lost_is_one_of_which_the_check_warns() {
    let mut snapshot = snapshot();
    snapshot.limits[2].required = true;
    let report = &mut snapshot.agent.as_mut().unwrap().report;
    let like = |name: &str, state| {
        let name = name.to_owned();
        LimitReport { name, state, ..report.limits[1].clone() }
    };
    let guest = LimitReport { guest: true, ..like("container-x", LimitState::Refused) };
    let required = LimitReport { required: true, ..like("vm", LimitState::Waiting) };
    let more = [
        like("night", LimitState::Off),
        guest,
        required,
        like("later", LimitState::Waiting),
        // The host still has it as one that waits.
        like("web", LimitState::Refused),
    ];
    report.limits.pop();
    report.limits.extend(more);
    let text = rendered(&snapshot);
    let of = |metric: &str| -> BTreeMap<&str, u8> {
        let series = text.lines().filter_map(|line| {
            let (name, value) =
                line.strip_prefix(metric)?.strip_prefix("{limit=\"")?.split_once("\"} ")?;
            Some((name, value.parse().unwrap()))
        });
        series.collect()
    };
    let in_force = of("tidegate_limit_in_force");
    let waiting = of("tidegate_limit_waiting");
    let required = of("tidegate_limit_required");
    let series = in_force.iter().map(|(name, is)| (*name, [*is, waiting[name], required[name]]));
    let expected = [
        ("batch", [1, 0, 0]),
        ("later", [0, 1, 0]),
        ("twice", [0, 0, 0]),
        ("uplink", [0, 0, 0]),
        ("vm", [0, 1, 1]),
        ("web", [0, 0, 1]),
    ];
    assert_eq!(series.collect::<Vec<_>>(), expected);
}

#[test]
fn a_name_ends_no_label() {
    let mut snapshot = snapshot();
    snapshot.limits.truncate(1);
    snapshot.limits[0].name = "a\\x2d\"} 1\nforged{b=\"c".to_owned();
    let text = rendered(&snapshot);
    assert!(text.contains(r#"limit="a\\x2d\"} 1\nforged{b=\"c""#), "{text}");
    assert!(!text.lines().any(|line| line.starts_with("forged")), "{text}");
}

#[test]
fn series_are_bounded() {
    let mut one = snapshot().limits.remove(0);
    one.ingress.clone_from(&one.egress);
    let limits = (0..METRIC_LIMITS_MAX + 7).map(|i| {
        let mut limit = one.clone();
        limit.name = format!("l{i:05}");
        limit
    });
    let many = Snapshot { limits: limits.collect(), ..Snapshot::default() };
    let text = rendered(&many);
    let mut series: BTreeMap<&str, usize> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some((_, rest)) = line.split_once("limit=\"") {
            *series.entry(rest.split('"').next().unwrap()).or_default() += 1;
        }
    }
    assert_eq!(series.len(), METRIC_LIMITS_MAX);
    // A schedule would be one more.
    assert!(series.values().all(|count| *count < SERIES_MAX), "{series:?}");
    assert!(text.contains("\ntidegate_limits_without_metrics 7\n"));
}

#[test]
fn the_docs_list_every_metric() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (begin, end) =
        ("<!-- metrics: made from crates/web/src/metrics.rs -->\n", "<!-- end -->\n");
    let start = page.find(begin).expect("the place of the table") + begin.len();
    let stop = start + page[start..].find(end).expect("the end of the table");
    let mut table = String::from("| metric | type | labels | meaning |\n|:--|:--|:--|:--|\n");
    for metric in all() {
        let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let kind = format!("{:?}", metric.kind).to_lowercase();
        // As Prometheus stores it.
        let total = if metric.kind == Kind::Counter { "_total" } else { "" };
        let (name, labels) = (format!("{PREFIX}_{}{total}", metric.name), labels.join(", "));
        table += &format!("| `{name}` | {kind} | {labels} | {} |\n", metric.help);
    }
    if std::env::var("INSTA_UPDATE").is_ok_and(|update| update == "always") {
        let page = format!("{}{table}{}", &page[..start], &page[stop..]);
        std::fs::write(&path, page).unwrap();
        return;
    }
    assert!(
        page[start..stop] == table,
        "docs/metrics.md is not what the code says: INSTA_UPDATE=always cargo test -p tidegate-web docs writes it"
    );
}
