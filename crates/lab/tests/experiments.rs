//! Runs a tiny form of each experiment and looks at the report's shape, not at its figures. Most need root.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use tidegate_core::{Bytes, Nanos, Rate, link::LinkOptions};
use tidegate_lab::{
    context::{Links, Options},
    experiment::Experiment,
    experiments::{
        agent::Agent,
        applications::Applications,
        bwlimit::Bwlimit,
        carousel::{
            backpressure::Backpressure, conformance::Conformance, flows::Flows,
            granularity::Granularity,
        },
        carousel_cpu::CarouselCpu,
        dctcp_threshold::DctcpThreshold,
        demo::Demo,
        drl::{
            cost::DrlCost, dynamic::DrlDynamic, failures::DrlFailures, fairness::DrlFairness,
            fig3::DrlFig3, rtt::DrlRtt, scale::DrlScale, web::DrlWeb,
        },
        hierarchy::Hierarchy,
        htb_latency::HtbLatency,
        limits::Limits,
        link_accuracy::LinkAccuracy,
        low_latency::LowLatency,
        mixed_tenants::MixedTenants,
        nrm_egress::NrmEgress,
        nrm_ingress::NrmIngress,
        pace_dynamics::PaceDynamics,
        pace_egress::PaceEgress,
        pace_ingress::PaceIngress,
        policer_burst::PolicerBurst,
        policer_tcp::PolicerTcp,
        wheel::Wheel,
    },
    progress::Progress,
    report::{Report, Row},
    run::{self, Outcome},
    testbed::{Means, root_or_skip},
};

fn lab_binary() -> PathBuf {
    env!("CARGO_BIN_EXE_tidegate-lab").into()
}

/// The binary beside the lab's; building the workspace builds both.
fn tidegate() -> PathBuf {
    lab_binary().with_file_name("tidegate")
}

/// How many experiments run. Nobody looks at their figures, so they may disturb each other.
static RUNNING: Mutex<u32> = Mutex::new(0);

/// The namespaces of this process.
fn left_over() -> Vec<String> {
    let ours = format!("tidegate-{}-", std::process::id());
    let names = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with(&ours))
        .collect()
}

/// Runs it into `out`; `None` when it was skipped.
fn report(test: &str, experiment: &dyn Experiment, out: &Path) -> Option<Report> {
    match outcome(experiment, out, Links::default()) {
        Outcome::Done(report) => Some(*report),
        Outcome::Skipped(reason) => {
            eprintln!("SKIP {test}: {reason}");
            None
        }
        Outcome::Failed(error) | Outcome::Unwritten(_, error) => panic!("{error:#}"),
    }
}

/// Runs it into `out`, over these links where it has none of its own.
fn outcome(experiment: &dyn Experiment, out: &Path, links: Links) -> Outcome {
    let options = Options {
        quick: true,
        repeats: Some(1),
        out: out.to_owned(),
        tidegate: tidegate(),
        links,
        only: Vec::new(),
        systems: Vec::new(),
        interrupted: Arc::default(),
    };
    let running = || RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    *running() += 1;
    let outcome = run::one(experiment, &options, Progress::silent());
    let mut running = running();
    *running -= 1;
    // Where no other one runs, nothing may be left of any.
    assert!(*running > 0 || left_over().is_empty(), "{:?}", left_over());
    outcome
}

/// What every report of an experiment must have.
fn check(report: &Report, out: &Path, systems: &[&str], metrics: &[&str]) {
    let failed: Vec<&String> = report.notes.iter().filter(|note| note.contains("failed")).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(report.systems(), systems);
    for system in systems.iter().filter(|system| **system != "idle") {
        for metric in metrics {
            let values = report.values(system, metric, None);
            assert!(!values.is_empty(), "{system} has no {metric}");
        }
    }
    assert!(!report.claims.is_empty());
    assert!(report.claims.iter().all(|claim| !claim.measured.is_empty()), "{:?}", report.claims);
    let dir = out.join(&report.experiment);
    assert!(!report.figures.is_empty());
    for file in report.figures.iter().map(|figure| figure.file.as_str()).chain(["report.md"]) {
        assert!(dir.join(file).is_file(), "{file}");
    }
    let json = fs::read_to_string(dir.join("report.json")).expect("a report");
    assert_eq!(serde_json::from_str::<Report>(&json).expect("a report"), *report);
}

#[test]
fn root_the_demo_reports_every_system() {
    let test = "root_the_demo_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &Demo::tiny(lab_binary()), out.path()) else { return };
    let metrics = ["rate_on_wire_bit_s", "goodput_bit_s", "latency_p99_us", "retransmissions"];
    check(&report, out.path(), &["unlimited", "htb", "tidegate"], &metrics);
    assert!(!report.values("tidegate", "drops", None).is_empty());
}

#[test]
fn root_limits_of_programs_report_both_systems() {
    let test = "root_limits_of_programs_report_both_systems";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &Bwlimit::tiny(lab_binary()), out.path()) else { return };
    let metrics = ["first_second_bytes", "max_100ms_percent", "used_percent", "rtt_p99_us"];
    check(&report, out.path(), &["idle", "own flag", "tidegate run"], &metrics);
}

#[test]
fn root_htb_latency_reports_every_system() {
    let test = "root_htb_latency_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &HtbLatency::tiny(lab_binary()), out.path()) else { return };
    let guests = ["idle", "unlimited", "tidegate-htb", "dem", "spring", "police"];
    let systems = [&["baseline", "htb", "tbf", "nrm", "pace"], &guests[..]].concat();
    check(&report, out.path(), &systems, &["rtt_p50_us", "rtt_p99_9_us"]);
    assert!(report.rows.iter().any(|row| row.published.is_some()));
    let each = report.values("htb", "class_goodput_bit_s", None);
    assert_eq!(each.len(), 2, "a class for each receiver");
    for way in ["routed", "bridged"] {
        let here =
            report.rows.iter().filter(|row| row.case.0.get("guest").is_some_and(|g| g == way));
        let wire: Vec<&Row> = here.filter(|row| row.metric == "wire_bit_s").collect();
        assert_eq!(wire.len(), 6, "every limit on a guest that is {way}, and none");
        assert!(wire.iter().all(|row| row.value > 0.0), "{wire:?}");
    }
}

#[test]
fn root_dctcp_threshold_reports_every_threshold() {
    let test = "root_dctcp_threshold_reports_every_threshold";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let experiment = DctcpThreshold::tiny(lab_binary());
    let Some(report) = report(test, &experiment, out.path()) else { return };
    let metrics = ["wire_bit_s", "variation_percent", "rtt_p50_us"];
    check(&report, out.path(), &["htb-ecn", "dem", "spring"], &metrics);
    assert_eq!(report.values("htb-ecn", "rtt_p50_us", None).len(), 2);
}

#[test]
fn root_low_latency_reports_every_system() {
    let test = "root_low_latency_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &LowLatency::tiny(lab_binary()), out.path()) else { return };
    let mut systems = vec!["idle", "htb", "htb-ecn", "dem", "spring"];
    systems.extend(report.systems().contains(&"edt").then_some("edt"));
    check(&report, out.path(), &systems, &["wire_bit_s", "variation_percent", "rtt_p50_us"]);
    assert!(report.rows.iter().any(|row| row.published.is_some()));
}

#[test]
fn root_mixed_tenants_reports_every_uplink() {
    let test = "root_mixed_tenants_reports_every_uplink";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &MixedTenants::tiny(lab_binary()), out.path()) else { return };
    let systems = ["htb", "htb-ecn", "dem", "spring"];
    check(&report, out.path(), &systems, &["guest_bit_s", "used_percent", "back_ms", "rtt_p50_us"]);
}

#[test]
fn root_nrm_egress_reports_every_system() {
    let test = "root_nrm_egress_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &NrmEgress::tiny(lab_binary()), out.path()) else { return };
    let systems = ["unlimited", "htb", "tbf", "nrm-paper", "nrm-kernel-timers", "nrm", "pace"];
    let metrics = ["goodput_bit_s", "wire_bit_s", "rtt_p99_us", "rpc_10kb_per_s", "retransmits"];
    check(&report, out.path(), &systems, &metrics);
    assert!(report.rows.iter().any(|row| row.published.is_some()));
}

#[test]
fn root_the_links_that_a_user_wants_are_in_the_cases() {
    let test = "root_the_links_that_a_user_wants_are_in_the_cases";
    if !root_or_skip(test) {
        return;
    }
    let way = LinkOptions {
        delay: Nanos(2_000_000),
        rate: Rate::from_bit_s(500_000_000),
        queue: Some(Bytes(1_000_000)),
        loss: 0.001,
        reorder: 0.001,
        reorder_by: Nanos(1_000_000),
    };
    let links = Links { way: Some(way), ..Links::default() };
    let out = tempfile::tempdir().unwrap();
    match outcome(&NrmIngress::tiny(lab_binary()), out.path(), links) {
        Outcome::Skipped(reason) => eprintln!("SKIP {test}: {reason}"),
        Outcome::Failed(error) | Outcome::Unwritten(_, error) => panic!("{error:#}"),
        Outcome::Done(report) => {
            let over = |row: &&Row| row.case.0.get("link_bit_s").is_some();
            let row = report.rows.iter().find(over).expect("a case over the link");
            for (key, value) in [
                ("rtt_us", 4000.0),
                ("link_queue_bytes", 1e6),
                ("loss_percent", 0.1),
                ("reorder_percent", 0.1),
            ] {
                let said = row.case.0.get(key).and_then(serde_json::Value::as_f64);
                assert_eq!(said, Some(value), "{key}");
            }
            assert!(report.rows.iter().filter(over).all(|row| row.published.is_none()));
            let again = "--rtt 4ms --link-rate 500mbit";
            assert!(report.command.contains(again), "{}", report.command);
        }
    }
}

/// Whoever asks for netem gets it, or is told that there is none: never another link.
#[test]
fn root_netem_is_used_or_refused() {
    if !root_or_skip("root_netem_is_used_or_refused") {
        return;
    }
    let way = LinkOptions { delay: Nanos(1_000_000), ..LinkOptions::default() };
    let links = Links { way: Some(way), means: Means::Netem, ..Links::default() };
    let out = tempfile::tempdir().unwrap();
    match outcome(&NrmIngress::tiny(lab_binary()), out.path(), links) {
        Outcome::Skipped(reason) if reason.contains("tidegate") && !reason.contains("netem") => {
            eprintln!("SKIP root_netem_is_used_or_refused: {reason}");
        }
        Outcome::Skipped(reason) => assert!(reason.contains("no netem"), "{reason}"),
        Outcome::Failed(error) | Outcome::Unwritten(_, error) => panic!("{error:#}"),
        Outcome::Done(report) => assert!(report.command.contains("--netem"), "{}", report.command),
    }
}

#[test]
fn root_nrm_ingress_reports_every_system() {
    let test = "root_nrm_ingress_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &NrmIngress::tiny(lab_binary()), out.path()) else { return };
    let metrics = ["goodput_bit_s", "rpc_1mb_p50_us", "rpc_10kb_p99_9_us", "retransmits"];
    check(&report, out.path(), &["tbf", "nrm-paper", "nrm", "pace"], &metrics);
}

#[test]
fn root_pace_ingress_reports_every_system() {
    let test = "root_pace_ingress_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &PaceIngress::tiny(lab_binary()), out.path()) else { return };
    let metrics = ["used_percent", "max_100ms_percent", "goodput_bit_s", "lost_percent"];
    check(&report, out.path(), &["htb", "tbf", "nrm-paper", "nrm", "pace"], &metrics);
}

/// A row from end to end: counts and their order, no times.
#[test]
fn root_applications_accounts_for_every_request() {
    let test = "root_applications_accounts_for_every_request";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &Applications::tiny(lab_binary()), out.path()) else { return };
    let skipped = |note: &&String| note.contains("skipped: needs");
    if let Some(why) = report.notes.iter().find(skipped) {
        eprintln!("SKIP {test}: {why}");
        return;
    }
    let systems = ["pace", "htb", "htb-20ms", "tbf"];
    let ascending = [
        "latency_p50_us",
        "latency_p90_us",
        "latency_p99_us",
        "latency_p99_9_us",
        "latency_max_us",
    ];
    let counts = ["late_150ms_requests", "late_10ms_requests", "requests"];
    let others = ["timeouts", "retransmits", "drops", "bulk_goodput_bit_s", "fair_us"];
    check(&report, out.path(), &systems, &[&ascending[..], &counts, &others].concat());
    for system in systems {
        let value = |metric: &&str| report.values(system, metric, None)[0];
        for metrics in [&ascending[..], &counts] {
            let values: Vec<f64> = metrics.iter().map(value).collect();
            assert!(values.is_sorted(), "{system}: {metrics:?} are {values:?}");
        }
        assert!(value(&"requests") >= 3.0, "{system}: each client has sent one");
    }
    assert!(report.claims.len() >= 2, "{:?}", report.claims);
}

#[test]
fn root_limits_reports_every_system() {
    let test = "root_limits_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &Limits::tiny(lab_binary()), out.path()) else { return };
    let metrics = ["used_percent", "max_100ms_percent", "jain_index", "rtt_p99_us", "drops"];
    check(&report, out.path(), &["idle", "pace", "nrm", "htb"], &metrics);
    let claims = report.claims.iter().filter(|claim| claim.claim.starts_with("pace, 1 Gbit/s"));
    assert!(claims.count() >= 4, "{:?}", report.claims);
}

#[test]
fn root_pace_egress_reports_every_system() {
    let test = "root_pace_egress_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &PaceEgress::tiny(lab_binary()), out.path()) else { return };
    let systems = ["idle", "pace", "htb", "tbf", "nrm-paper", "nrm"];
    let metrics = [
        "used_percent",
        "max_1s_percent",
        "retransmits",
        "cpu_seconds_per_gbit",
        "calls_used_percent",
        "calls_retransmits",
        "rtt_p99_us",
    ];
    check(&report, out.path(), &systems, &metrics);
    assert!(report.claims.len() >= 9, "{:?}", report.claims);
}

#[test]
fn root_pace_dynamics_reports_every_scenario() {
    let test = "root_pace_dynamics_reports_every_scenario";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &PaceDynamics::tiny(lab_binary()), out.path()) else { return };
    check(&report, out.path(), &["pace", "htb"], &["used_percent"]);
    let values = |metric: &str| report.values("pace", metric, None);
    assert_eq!(values("used_percent").len(), 5, "a row for each scenario");
    assert!(values("used_percent").iter().all(|percent| *percent > 0.0));
    assert!(values("small_flow_percent").iter().all(|percent| *percent > 0.0));
    assert!(!values("least_jain_1s").is_empty(), "equal flows ran for two seconds");
    assert_eq!(report.rows.iter().filter(|row| row.metric == "used_percent").count(), 6);
}

#[test]
fn root_hierarchy_reports_every_system() {
    let test = "root_hierarchy_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &Hierarchy::tiny(lab_binary()), out.path()) else { return };
    check(&report, out.path(), &["rule", "pace", "nrm", "htb"], &["class_bit_s"]);
    let rule: f64 = report.values("rule", "class_bit_s", None)[..3].iter().sum();
    assert_eq!(rule, 200e6, "the parts of all are the whole");
    for system in ["pace", "nrm", "htb"] {
        assert_eq!(report.values(system, "back_ms", None).len(), 3, "{system}");
        let sent = report.values(system, "used_percent", None);
        assert!(sent.len() == 7 && sent.iter().all(|percent| *percent > 0.0), "{system}: {sent:?}");
    }
    assert!(report.claims.len() >= 12, "{:?}", report.claims);
}

#[test]
fn root_policer_burst_reports_every_system() {
    let test = "root_policer_burst_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &PolicerBurst::tiny(lab_binary()), out.path()) else { return };
    // nftables may be absent.
    let nft = ["nft", "nft-bytes"].into_iter().filter(|name| report.systems().contains(name));
    let systems: Vec<&str> = ["police", "law"].into_iter().chain(nft).chain(["tbf"]).collect();
    check(&report, out.path(), &systems, &["used_percent", "goodput_bit_s"]);
    assert!(report.values("police", "drops", None).iter().all(|drops| *drops > 0.0));
    assert!(report.rows.iter().any(|row| row.published == Some(6.77e6)));
    assert!(report.claims.len() >= 6, "{:?}", report.claims);
    let left = fs::read_dir(out.path().join("policer-burst")).unwrap().flatten();
    let left = left.filter(|entry| entry.path().extension().is_some_and(|end| end == "pcap"));
    assert_eq!(left.count(), 0, "the captures are gone");
}

#[test]
fn root_policer_tcp_reports_every_system() {
    let test = "root_policer_tcp_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &PolicerTcp::tiny(lab_binary()), out.path()) else { return };
    // nftables may be absent.
    let nft = report.systems().contains(&"nft");
    let fair = report.systems().contains(&"police-fair");
    let mut systems = vec!["police"];
    systems.extend(nft.then_some("nft"));
    systems.extend(["tbf", "law-paced", "law-unpaced"]);
    systems.extend(fair.then_some("police-fair"));
    check(&report, out.path(), &systems, &["used_percent"]);
    for metric in ["goodput_bit_s", "jain_index", "first_part_percent", "drops"] {
        assert!(!report.values("police", metric, None).is_empty(), "{metric}");
    }
    assert!(report.claims.len() >= 2, "{:?}", report.claims);
}

#[test]
fn root_carousel_cpu_reports_every_system() {
    let test = "root_carousel_cpu_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &CarouselCpu::tiny(lab_binary()), out.path()) else { return };
    let systems = ["pfifo", "htb", "tbf", "pace", "carousel-auto", "carousel-poll"];
    let lane = [&systems[..], &["lane"]].concat();
    check(&report, out.path(), &lane, &[]);
    for system in systems {
        for metric in ["wire_bit_s", "wire_per_cpu_bit_s", "cpu_per_frame_ns"] {
            assert!(!report.values(system, metric, None).is_empty(), "{system} has no {metric}");
        }
    }
    assert!(!report.values("carousel-poll", "nic_cpus", None).is_empty());
    assert!(report.values("lane", "shaping_ns", None)[0] > 0.0);
}

#[test]
fn the_wheel_reports_every_queue() {
    let out = tempfile::tempdir().unwrap();
    let report = report("the_wheel_reports_every_queue", &Wheel::tiny(), out.path());
    let systems = ["nothing", "wheel", "list", "crate", "heap", "tree", "fq"];
    check(&report.expect("it needs nothing"), out.path(), &systems, &["pair_ns"]);
}

#[test]
fn root_carousel_flows_reports_every_system() {
    let test = "root_carousel_flows_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &Flows::tiny(), out.path()) else { return };
    let metrics = ["rate_bit_s", "flow_error_1s_worst_percent", "deviation_100ms_bit_s"];
    check(
        &report,
        out.path(),
        &["carousel", "carousel-auto", "carousel-realtime", "htb"],
        &metrics,
    );
    for system in report.systems() {
        assert!(report.values(system, "rate_bit_s", None)[0] > 0.0, "{system} sent nothing");
    }
}

#[test]
fn root_carousel_conformance_reports_every_system() {
    let test = "root_carousel_conformance_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &Conformance::tiny(), out.path()) else { return };
    let systems = ["carousel", "carousel-no-burst", "carousel-tap", "htb", "tbf", "unlimited"];
    check(&report, out.path(), &systems, &["rate_bit_s", "deviation_percent"]);
    for system in systems {
        assert!(report.values(system, "rate_bit_s", None)[0] > 0.0, "{system} sent nothing");
    }
    let flows = report.values("tbf", "flow_deviation_worst_percent", None);
    assert_eq!(flows.len(), 1, "the classes of its flows were read");
}

#[test]
fn the_backpressure_reports_both_completions() {
    let out = tempfile::tempdir().unwrap();
    let test = "the_backpressure_reports_both_completions";
    let report = report(test, &Backpressure::tiny(), out.path()).expect("it needs nothing");
    check(&report, out.path(), &["deferred", "immediate"], &["held_p50", "held_max"]);
    assert_eq!(report.values("deferred", "dropped_per_s", None), [0.0]);
    let held = report.values("deferred", "held_max", None)[0];
    assert!(held <= report.values("deferred", "allowed", None)[0], "{held}");
}

#[test]
fn the_granularity_reports_every_slot() {
    let out = tempfile::tempdir().unwrap();
    let report = report("the_granularity_reports_every_slot", &Granularity::tiny(), out.path());
    let report = report.expect("it needs nothing");
    // Slots are cases of one system.
    assert_eq!(report.values("carousel", "deviation_100ms_bit_s", None).len(), 2);
    assert_eq!((report.systems(), report.figures.len()), (vec!["carousel"], 2));
    assert!(!report.claims.is_empty());
}

#[test]
fn a_fleet_in_simulation_reports_every_system() {
    let out = tempfile::tempdir().unwrap();
    let test = "a_fleet_in_simulation_reports_every_system";
    let report = report(test, &DrlScale::tiny(), out.path()).expect("it needs nothing");
    let systems = [
        "ctb",
        "fps, 1 peer",
        "fps, 3 peers",
        "fps, 7 peers",
        "fps-sum, 1 peer",
        "fps-sum, 3 peers",
        "fps-sum, 7 peers",
        "share",
    ];
    let metrics = ["gossip_percent"];
    check(&report, out.path(), &systems, &metrics);
    assert!(!report.values("fps, 3 peers", "jain", None).is_empty());
    assert!(!report.values("share", "in_use_percent", None).is_empty());
}

#[test]
fn root_a_fleet_of_two_routers_reports_every_system() {
    let test = "root_a_fleet_of_two_routers_reports_every_system";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &DrlFig3::tiny(lab_binary()), out.path()) else { return };
    let systems =
        ["ctb", "gtb", "grd", "fps", "fps, spring", "share", "share, spring", "share, pace"];
    check(&report, out.path(), &systems, &["jain", "total_bit_s", "gossip_percent"]);
    let daemons = |row: &&Row| row.case.0["in"] == "namespaces" && row.metric == "total_bit_s";
    assert!(report.rows.iter().filter(daemons).count() >= 5, "{:?}", report.notes);
}

#[test]
fn root_a_fleet_reports_its_cost() {
    let test = "root_a_fleet_reports_its_cost";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &DrlCost::tiny(lab_binary()), out.path()) else { return };
    let mut systems = vec!["police", "police, flow counted", "forwarding alone"];
    // Where there are no queues for user space, or no iptables to fill them.
    systems.extend(report.systems().contains(&"relay").then_some("relay"));
    systems.extend(["fps", "share"]);
    check(&report, out.path(), &systems, &[]);
    assert_eq!(report.values("police, flow counted", "program_ns", None).len(), 1);
    let passed = report.values("police", "passed_percent", None);
    assert!(passed.iter().all(|percent| *percent > 50.0), "{passed:?}");
    for system in ["fps", "share"] {
        assert!(report.values(system, "gossip_per_host_bit_s", None)[0] > 0.0, "{system}");
    }
}

#[test]
fn root_a_fleet_reports_round_trips() {
    let test = "root_a_fleet_reports_round_trips";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(rtt) = report(test, &DrlRtt::tiny(lab_binary()), out.path()) else { return };
    let systems = ["ctb", "grd", "fps", "share", "share, spring"];
    check(&rtt, out.path(), &systems, &["total_bit_s", "short_flow_bit_s", "long_flow_bit_s"]);
    for system in ["ctb", "fps", "share"] {
        assert_eq!(rtt.values(system, "total_bit_s", None).len(), 2, "{system}: simulated and not");
    }
}

#[test]
fn root_a_fleet_reports_the_web() {
    let test = "root_a_fleet_reports_the_web";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(web) = report(test, &DrlWeb::tiny(lab_binary()), out.path()) else { return };
    let systems = ["ctb", "fps", "share"];
    check(&web, out.path(), &systems, &["bulk_bit_s", "web_bit_s", "jain", "harmonic_mean_bit_s"]);
    let answered = web.values("share", "response_p50_ms", None);
    assert!(answered[0] > 0.0, "{answered:?}");
}

/// Runs an experiment of a fleet; there are so many values of a metric at least, in simulation and not.
fn check_fleet(test: &str, experiment: &dyn Experiment, metric: &str, least: usize) {
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().expect("a directory");
    let Some(report) = report(test, experiment, out.path()) else { return };
    let systems: Vec<&str> = report.systems();
    assert!(systems.contains(&"share") && systems.contains(&"fps"), "{systems:?}");
    let count = report.rows.iter().filter(|row| row.metric == metric).count();
    assert!(count >= least, "{count} of {metric}: {:?}", report.notes);
    assert!(!report.claims.is_empty() && !report.figures.is_empty());
}

#[test]
fn root_a_fleet_reports_fairness() {
    let test = "root_a_fleet_reports_fairness";
    check_fleet(test, &DrlFairness::tiny(lab_binary()), "jain", 15);
}

#[test]
fn root_a_fleet_reports_joins() {
    check_fleet("root_a_fleet_reports_joins", &DrlDynamic::tiny(lab_binary()), "join_s", 8);
}

#[test]
fn root_a_fleet_reports_failures() {
    let test = "root_a_fleet_reports_failures";
    check_fleet(test, &DrlFailures::tiny(lab_binary()), "used_again_s", 10);
}

#[test]
fn root_link_accuracy_reports_every_path() {
    let test = "root_link_accuracy_reports_every_path";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &LinkAccuracy::tiny(lab_binary()), out.path()) else { return };
    let systems = match report.systems().contains(&"netem") {
        true => ["veth", "cable", "netem"].to_vec(),
        false => ["veth", "cable"].to_vec(),
    };
    let metrics =
        ["delay_error_p50_us", "delay_error_p99_us", "delay_error_max_us", "lost_percent"];
    check(&report, out.path(), &systems, &metrics);
    assert!(!report.values("cable", "rate_error_100ms_percent", None).is_empty());
    assert!(!report.values("cable", "overtaken_percent", None).is_empty());
}

#[test]
fn root_the_agent_reports_starts_and_what_limits_cost() {
    let test = "root_the_agent_reports_starts_and_what_limits_cost";
    if !root_or_skip(test) {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let Some(report) = report(test, &Agent::tiny(), out.path()) else { return };
    let starts = ["one limit over all services", "a limit for each service"];
    let commands = ["run of root", "run of a user, with the agent"];
    let limits = ["cgroups by path", "cgroups by unit"];
    check(&report, out.path(), &[starts, commands, limits].concat(), &[]);
    for system in starts {
        assert_eq!(report.values(system, "start_max_ns", None).len(), 1);
    }
    for system in commands {
        assert_eq!(report.values(system, "run_p50_ns", None).len(), 1);
    }
    assert_eq!(report.values(commands[1], "first_run_ns", None).len(), 1);
    for system in limits {
        assert_eq!(report.values(system, "peak_bytes", None).len(), 1);
    }
}
