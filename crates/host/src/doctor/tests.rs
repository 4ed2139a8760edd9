use std::path::PathBuf;

use tidegate_sys::survey::KernelFacts;

use super::*;

/// A host on which everything works, and nobody else is.
fn whole() -> Seen {
    let hooks = [Hook::Cgroup, Hook::SockOps, Hook::Tcx, Hook::Clsact, Hook::Xdp];
    let survey = Survey {
        kernel: KernelFacts {
            release: "6.12.1".into(),
            old: false,
            sys: true,
            proc: true,
            btf: true,
            jit: Some(true),
        },
        cgroups: CgroupMounts { v2: Some("/sys/fs/cgroup".into()), ..CgroupMounts::default() },
        bpffs: Some("/sys/fs/bpf".into()),
        root: true,
        lacking: Some(Vec::new()),
        hooks: hooks.map(|hook| (hook, Some(true))).to_vec(),
        qdiscs: ["fq", "htb", "tbf"].map(|kind| (kind, Some(true))).into(),
        ifb: Some(true),
        on_cgroups: Some(Vec::new()),
        on_devices: Some(Vec::new()),
    };
    Seen { survey, limits: Some(Limits::default()), services: Vec::new() }
}

/// What is not well, a line each.
fn complaints(change: impl FnOnce(&mut Seen)) -> (bool, String) {
    let mut seen = whole();
    change(&mut seen);
    let report = judge(&seen);
    let lines = report.findings.iter().filter(|finding| finding.verdict != Verdict::Ok);
    let lines = lines.map(|f| {
        let advice = f.advice.as_deref().unwrap_or("-");
        format!("{:?} {}: {}; {advice}", f.verdict, f.about, f.found)
    });
    (report.works, lines.collect::<Vec<_>>().join("\n"))
}

#[test]
fn a_host_on_which_everything_works_has_no_complaints() {
    assert_eq!(complaints(|_| ()), (true, String::new()));
    let report = judge(&whole());
    let auto = report.findings.iter().filter(|finding| finding.about == "auto");
    let auto: Vec<_> = auto.map(|finding| finding.found.as_str()).collect();
    assert_eq!(
        auto,
        [
            "a cgroup gets `pace` (first choice on a cgroup)",
            "a device gets `spring` (first choice on a device)",
            "a port gets `spring` (first choice on a device)",
        ]
    );
    let schemes = report.findings.iter().filter(|finding| finding.about == "schemes");
    assert_eq!(schemes.count(), SCHEMES.len());
}

#[test]
fn limits_cannot_work_without_their_foundations() {
    type Change = fn(&mut Survey);
    let cases: [(Change, &str); 5] = [
        (
            |s| s.kernel.old = true,
            "Problem kernel: Linux 6.12.1 is too old; boot Linux 6.1 or newer",
        ),
        (|s| s.kernel.btf = false, "Problem BTF: the kernel has no /sys/kernel/btf/vmlinux; boot"),
        (
            |s| s.lacking = Some(vec!["CAP_BPF"]),
            "Problem privileges: root without CAP_BPF, as in a",
        ),
        (|s| s.lacking = None, "Problem privileges: /proc is not mounted; mount -t proc"),
        (
            |s| (s.cgroups.v2, s.cgroups.unmounted) = (None, Some(Err("not permitted".into()))),
            "Problem cgroups: version 2 cannot be reached: not permitted; mkdir -p /run/cgroup2",
        ),
    ];
    for (change, begin) in cases {
        let (works, said) = complaints(|seen| change(&mut seen.survey));
        assert!(!works && said.starts_with(begin) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn what_is_missing_costs_some_schemes_and_is_named_with_what_to_do() {
    type Change = fn(&mut Survey);
    let cases: [(Change, &str, usize); 6] = [
        (
            |s| {
                s.qdiscs.insert("fq", Some(false));
            },
            "`edt` does not work: the kernel has no qdisc `fq`; modprobe sch_fq, or boot",
            1,
        ),
        (
            |s| {
                s.qdiscs.insert("htb", Some(false));
            },
            "`spring` does not work: the kernel has no",
            3,
        ),
        (|s| s.ifb = Some(false), "`htb` cannot limit what comes in by a device", 3),
        (|s| s.hooks[0].1 = Some(false), "`pace` does not work: the kernel refuses programs", 5),
        (|s| s.kernel.jit = Some(false), "sysctl net.core.bpf_jit_enable=1", 1),
        (
            |s| {
                s.cgroups.unmounted = Some(Ok(()));
                (s.cgroups.v2, s.cgroups.v1) = (None, vec![PathBuf::from("/sys/fs/cgroup/cpu")]);
            },
            "only version 1 is: `run`, devices and ports can be limited, services cannot; boot with",
            1,
        ),
    ];
    for (change, holds, lines) in cases {
        let (works, said) = complaints(|seen| change(&mut seen.survey));
        assert!(works && said.contains(holds) && said.lines().count() == lines, "{said}");
    }
    // A kernel without tcx has filters.
    assert_eq!(complaints(|seen| seen.survey.hooks[2].1 = Some(false)), (true, String::new()));
    // auto evades.
    let mut seen = whole();
    seen.survey.qdiscs.insert("htb", Some(false));
    let auto = judge(&seen).findings.into_iter().filter(|finding| finding.about == "auto");
    let device = auto.map(|finding| finding.found).nth(1).unwrap();
    assert_eq!(device, "a device gets `police` (the kernel has no HTB)");
}

#[test]
fn what_was_not_tested_is_unknown() {
    let nobody = |survey: &mut Survey| {
        (survey.root, survey.lacking) = (false, Some(vec!["CAP_BPF"]));
        (survey.on_cgroups, survey.ifb) = (None, None);
        survey.qdiscs.values_mut().for_each(|there| *there = None);
        survey.hooks.iter_mut().for_each(|(_, there)| *there = None);
    };
    let (works, said) = complaints(|seen| {
        nobody(&mut seen.survey);
        seen.limits = None;
    });
    assert!(works);
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(
        lines[0],
        "Warning privileges: limits need the privileges of root; some things could not be looked at; sudo \
         tidegate doctor"
    );
    assert_eq!(lines[1], "Unknown hooks: not tested; it needs root to tell; sudo tidegate doctor");
    // All but the one that needs nothing of the kernel.
    let schemes: Vec<_> = lines.iter().filter(|line| line.contains(" schemes: ")).collect();
    assert_eq!(schemes.len(), SCHEMES.len() - 1, "{said}");
    assert_eq!(
        *schemes[2],
        "Unknown schemes: `edt` was not tested on cgroups, devices, ports; it needs root to tell; sudo \
         tidegate doctor"
    );
    let auto: Vec<_> = lines.iter().filter(|line| line.contains(" auto: ")).collect();
    assert_eq!(
        *auto[0],
        "Unknown auto: a device gets `spring` or `police`, by what the kernel has; it needs root to tell; \
         sudo tidegate doctor"
    );
    assert_eq!(auto.len(), 2, "{said}");
    let others =
        "Unknown others: cgroups were not looked at; it needs root to tell; sudo tidegate doctor";
    assert_eq!(lines[lines.len() - 2], others);
    assert!(lines[lines.len() - 1].starts_with("Unknown limits: not looked at"), "{said}");

    // Each thing that a scheme needs makes it unknown.
    type Change = fn(&mut Survey);
    let cases: [(Change, &str); 4] = [
        (|s| s.hooks[0].1 = None, "pace nrm edt police"),
        (|s| (s.hooks[2].1, s.hooks[3].1) = (None, None), "edt police htb dem spring tbf"),
        (|s| _ = s.qdiscs.insert("fq", None), "edt"),
        (|s| s.ifb = None, "htb dem spring"),
    ];
    for (change, names) in cases {
        let mut seen = whole();
        change(&mut seen.survey);
        let unknown = judge(&seen).findings.into_iter();
        let unknown = unknown.filter(|f| f.about == "schemes" && f.verdict == Verdict::Unknown);
        let unknown = unknown.map(|f| f.found.split('`').nth(1).unwrap().to_owned());
        assert_eq!(unknown.collect::<Vec<_>>().join(" "), names);
    }
    // What is known not to work stays that.
    let (_, said) = complaints(|seen| {
        nobody(&mut seen.survey);
        seen.survey.qdiscs.insert("fq", Some(false));
    });
    assert!(said.contains("Warning schemes: `edt` does not work"), "{said}");
}

#[test]
fn who_else_is_attached_is_named() {
    let program = |name: &str| ForeignProgram { name: name.into(), id: 7 };
    let (works, said) = complaints(|seen| {
        seen.survey.on_devices = Some(vec![OnDevice {
            device: "eth0".into(),
            qdisc: Some("fq_codel 8001:".into()),
            tcx: vec![program("cil_from_netdev")],
            filters: vec!["flower".into()],
            xdp: Some(program("")),
        }]);
        seen.survey.on_cgroups = Some(vec![
            OnCgroup {
                cgroup: "x".into(),
                hook: "egress",
                programs: vec![program("mine")],
                exclusive: true,
            },
            OnCgroup {
                cgroup: String::new(),
                hook: "egress",
                programs: vec![program("sd_fw_egress")],
                exclusive: false,
            },
        ]);
    });
    assert!(works);
    let lines: Vec<_> = said.lines().collect();
    assert!(lines[0].contains("`mine` holds the egress hook of cgroup `x` exclusively"), "{said}");
    assert!(
        lines[1].contains("device `eth0` has the qdisc `fq_codel 8001:` of somebody else"),
        "{said}"
    );
    assert!(lines[1].contains("`dem`, `htb`, `spring`, `tbf` replace it, and only with"), "{said}");
    assert!(lines[2].contains("filters: `cil_from_netdev` of Cilium, `flower`"), "{said}");
    assert!(lines[3].contains("has program 7 in XDP"), "{said}");
    assert_eq!(lines.len(), 4, "{said}");
}

#[test]
fn limits_that_are_not_in_force_and_services_that_do_not_run_are_said() {
    let (works, said) = complaints(|seen| {
        seen.limits = Some(Limits {
            installed: 2,
            alarms: vec!["limit `a` is NOT ENFORCED: ...".into()],
            waiting: vec!["limit `b` waits: ...".into()],
        });
        let file = "/etc/tidegate/fleet.toml";
        let daemon = Service { verb: "daemon", file, wanted: true, ..Service::default() };
        let agent = Service {
            verb: "agent",
            runs: true,
            does: vec!["/run/docker.sock: running".into()],
            lacks: vec![("/run/podman.sock is away: refused".into(), "start it".into())],
            ..Service::default()
        };
        seen.services = vec![daemon.clone(), Service { wanted: false, ..daemon }, agent];
    });
    assert!(works, "others can be");
    assert_eq!(
        said,
        "Problem limits: limit `a` is NOT ENFORCED: ...; -\n\
         Warning limits: limit `b` waits: ...; -\n\
         Warning services: `tidegate daemon` does not run, though there is /etc/tidegate/fleet.toml; \
         systemctl enable --now tidegate-daemon\n\
         Warning services: `tidegate agent`: /run/podman.sock is away: refused; start it"
    );
}
