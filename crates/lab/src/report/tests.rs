use std::collections::BTreeMap;

use super::*;

/// A report with two systems, two cases, two metrics, a published figure and a failure.
pub(crate) fn sample() -> Report {
    let mut rows = Vec::new();
    for (flows, htb, nrm) in [(1, 954e6, 941e6), (9, 956e6, 951e6)] {
        let case = Case::new().with("limit_bit_s", 1e9).with("flows", flows).with("cc", "cubic");
        for run in 1..=3 {
            let spread = f64::from(run - 2);
            let mut row = |system: &str, metric: &str, value: f64, published: Option<f64>| {
                let (system, metric) = (system.to_owned(), metric.to_owned());
                rows.push(Row {
                    system,
                    case: case.clone(),
                    metric,
                    run: run as u32,
                    value,
                    published,
                });
            };
            row("htb", "goodput_bit_s", htb + spread * 2e6, None);
            row("htb", "rtt_p50_us", 1825.0 * f64::from(flows) + spread * 10.0, None);
            row("nrm", "goodput_bit_s", nrm + spread * 3e6, (flows == 9).then_some(945e6));
            row("nrm", "rtt_p50_us", 31.5 + spread, None);
        }
    }
    Report {
        experiment: "nrm-egress".into(),
        summary: "Holds a program at 1 Gbit/s without a queue".into(),
        version: "0.1.0".into(),
        commit: None,
        dirty: None,
        kernel: "6.18.0".into(),
        cpu: "Some CPU".into(),
        host: Host {
            cores: 2,
            tools: BTreeMap::from([("tc".into(), "iproute2-6.1.0 | libbpf".into())]),
        },
        quick: true,
        command: "tidegate-lab run nrm-egress --quick".into(),
        started: "2025-06-01T12:00:00Z".into(),
        elapsed_s: 12.4,
        interrupted: false,
        stalls: Some(Stalls { count: 2, total_ms: 31.0, longest_ms: 18.0, stolen_ms: 0.0 }),
        rows,
        claims: vec![
            Claim { claim: "NRM queues nothing".into(), holds: true, measured: "31.5 µs".into() },
            Claim { claim: "NRM fills the link".into(), holds: false, measured: "95 %".into() },
        ],
        figures: vec![FigureFile { file: "rate.svg".into(), title: "Rate and RTT".into() }],
        notes: vec!["tbf, run 2 failed: no such qdisc".into()],
    }
}

#[test]
fn json_comes_back_as_it_was() {
    let report = sample();
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
}

#[test]
fn json_has_the_documented_shape() {
    let value: Value = serde_json::to_value(sample()).unwrap();
    let row = serde_json::to_string(&value["rows"][2]).unwrap();
    insta::assert_snapshot!(row, @r#"{"system":"nrm","case":{"limit_bit_s":1000000000.0,"flows":1,"cc":"cubic"},"metric":"goodput_bit_s","run":1,"value":938000000.0}"#);
    insta::assert_snapshot!(value["claims"][1].to_string(), @r#"{"claim":"NRM fills the link","holds":false,"measured":"95 %"}"#);
    insta::assert_snapshot!(value["host"].to_string(), @r#"{"cores":2,"tools":{"tc":"iproute2-6.1.0 | libbpf"}}"#);
    let keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    insta::assert_snapshot!(keys.join(" "), @"experiment summary version kernel cpu host quick command started elapsed_s stalls rows claims figures notes");
}

#[test]
fn awkward_floats_survive() {
    for value in [0.1 + 0.2, 1e-300, 950_999_999.999_999_9, 5e-324] {
        let mut report = sample();
        report.rows[0].value = value;
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap().rows[0].value, value);
    }
}

#[test]
fn the_page_says_how_the_machine_stood_still() {
    let text = |count, stolen_ms| {
        let stalls = Stalls { count, total_ms: 9.0, longest_ms: 5.0, stolen_ms };
        Report { stalls: Some(stalls), ..sample() }.stalls_text()
    };
    let left_out = "probes that overlap this are left out, of every system alike";
    let machine = "the whole machine stood still once, 9 ms in all, 5 ms at most";
    let cpu = "a hypervisor held a CPU or more for 12 ms";
    assert_eq!(text(0, 0.0), None);
    assert_eq!(text(1, 0.0), Some(format!("{machine}; {left_out}")));
    assert_eq!(text(0, 12.0), Some(format!("{cpu}; {left_out}")));
    assert_eq!(text(1, 12.0), Some(format!("{machine}; {cpu}; {left_out}")));
    assert_eq!(Report { stalls: None, ..sample() }.stalls_text(), None);
}

#[test]
fn markdown_page() {
    insta::assert_snapshot!(sample().markdown(), @r#"
    # nrm-egress

    Holds a program at 1 Gbit/s without a queue

    Made by `tidegate-lab run nrm-egress --quick` (version 0.1.0) on 2025-06-01T12:00:00Z in 12 s. This is the quick form: fewer and shorter runs.

    | machine | |
    |:--|:--|
    | kernel | 6.18.0 |
    | processor | Some CPU, 2 cores |
    | tc | iproute2-6.1.0 \| libbpf |
    | stalls | the whole machine stood still 2 times, 31 ms in all, 18 ms at most; probes that overlap this are left out, of every system alike |

    ## Claims

    - ✔ NRM queues nothing — 31.5 µs
    - ✘ NRM fills the link — 95 %

    ## Results

    Median [min–max] of the runs; in parentheses the published figure.

    **goodput (Mbit/s), limit 1 Gbit/s, cc cubic**

    | flows | htb | nrm |
    |:--|--:|--:|
    | 1 | 954 [952–956] | 941 [938–944] |
    | 9 | 956 [954–958] | 951 [948–954] (945) |

    **RTT p50 (µs), limit 1 Gbit/s, cc cubic**

    | flows | htb | nrm |
    |:--|--:|--:|
    | 1 | 1825 [1815–1835] | 31.5 [30.5–32.5] |
    | 9 | 16,425 [16,415–16,435] | 31.5 [30.5–32.5] |

    ## Figures

    ![Rate and RTT](rate.svg)

    ## Notes

    - tbf, run 2 failed: no such qdisc
    "#);
}

#[test]
fn an_empty_report_is_still_a_page() {
    let report =
        Report { rows: vec![], claims: vec![], figures: vec![], notes: vec![], ..sample() };
    let page = report.markdown();
    assert!(page.starts_with("# nrm-egress\n"));
    assert!(!page.contains("## "));
}

#[test]
fn files_are_whole_and_replace_the_old() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("nrm-egress");
    let drawn = [("rate.svg".to_owned(), "<svg/>".to_owned())];
    sample().write(&out, &drawn).unwrap();
    let second = Report { quick: false, ..sample() };
    second.write(&out, &drawn).unwrap();

    let json = fs::read_to_string(out.join("report.json")).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), second);
    let mut names: Vec<_> = fs::read_dir(&out)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["rate.svg", "report.json", "report.md"]);

    // A figure that is not of this report would be taken for one of it.
    Report { figures: vec![], ..sample() }.write(&out, &[]).unwrap();
    assert!(!out.join("rate.svg").exists());
}

#[test]
fn values_by_case() {
    let report = sample();
    let case = report.rows[0].case.clone();
    assert_eq!(report.values("htb", "goodput_bit_s", Some(&case)), [952e6, 954e6, 956e6]);
    assert_eq!(report.values("htb", "goodput_bit_s", None).len(), 6);
    assert_eq!(report.systems(), ["htb", "nrm"]);
    assert_eq!(report.metrics(), ["goodput_bit_s", "rtt_p50_us"]);
}

#[test]
fn the_page_says_the_commit() {
    let commit = Some("0123456789abcdef".to_owned());
    let report = |dirty| Report { commit: commit.clone(), dirty: Some(dirty), ..sample() };
    assert!(report(false).markdown().contains("(version 0.1.0, commit 0123456789ab)"));
    assert!(report(true).markdown().contains("(version 0.1.0, commit 0123456789ab, changed)"));
    let json = serde_json::to_value(report(true)).unwrap();
    assert_eq!((&json["commit"], &json["dirty"]), (&"0123456789abcdef".into(), &true.into()));
}
