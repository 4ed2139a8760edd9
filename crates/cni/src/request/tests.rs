use std::collections::BTreeMap;

use serde_json::json;

use super::*;

const ADD: [(&str, &str); 4] = [
    ("CNI_COMMAND", "ADD"),
    ("CNI_CONTAINERID", "c1"),
    ("CNI_NETNS", "/run/netns/c1"),
    ("CNI_IFNAME", "eth0"),
];

fn read(variables: &[(&str, &str)], config: &Value) -> Result<Request, CniError> {
    let variables: BTreeMap<_, _> = variables.iter().copied().collect();
    let look = |name: &str| variables.get(name).map(|value| (*value).to_owned());
    Request::read(look, &config.to_string())
}

fn with(changes: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
    ADD.iter().chain(changes).copied().collect()
}

fn config() -> Value {
    json!({ "cniVersion": "1.0.0", "name": "net", "type": "tidegate-cni" })
}

/// A configuration with more fields.
fn having(more: Value) -> Value {
    let mut config = config();
    let more = more.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(more);
    config
}

#[test]
fn rates_come_from_the_configuration_or_else_from_the_runtime() {
    let rates = |bit_s: u64| json!({ "egressRate": bit_s, "egressBurst": 80_000 });
    let egress = |config: &Value| {
        let request = read(&ADD, config).unwrap();
        request.bandwidth.map(|bandwidth| bandwidth.egress_rate)
    };
    assert_eq!(egress(&config()), None);
    assert_eq!(egress(&having(rates(5_000_000))), Some(5_000_000));
    let runtime = json!({ "runtimeConfig": { "bandwidth": rates(7_000_000), "mac": "x" } });
    assert_eq!(egress(&having(runtime.clone())), Some(7_000_000));
    let mut both = having(runtime);
    both.as_object_mut().unwrap().extend(rates(5_000_000).as_object().unwrap().clone());
    assert_eq!(egress(&both), Some(5_000_000));
    assert_eq!(egress(&having(json!({ "runtimeConfig": { "bandwidth": {} } }))), None);
}

#[test]
fn a_pod_has_the_names_that_the_runtime_gives() {
    let pod = |args: &'static str| {
        let pod = read(&with(&[("CNI_ARGS", args)]), &config()).unwrap().pod;
        pod.map(|pod| (pod.namespace, pod.name))
    };
    let all = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=7";
    assert_eq!(pod(all), Some(("shop".to_owned(), "web-0".to_owned())));
    for none in ["", "a", ";;=", "K8S_POD_NAME=web-0", "K8S_POD_NAMESPACE=;K8S_POD_NAME=web-0"] {
        assert_eq!(pod(none), None, "{none}");
    }
}

/// Kubernetes writes the rates, and who sets up the network the subnets.
#[test]
fn each_field_that_the_configuration_lacks_is_the_runtime_s() {
    let runtime = json!({
        "egressRate": 7_000_000, "egressBurst": 2_147_483_647,
        "ingressRate": 9_000_000, "ingressBurst": 2_147_483_647,
        "unshapedSubnets": ["10.1.0.0/16"],
    });
    let own = json!({
        "ingressRate": 5_000_000, "egressRate": 0, "egressBurst": 80_000,
        "unshapedSubnets": ["10.99.0.0/16"], "runtimeConfig": { "bandwidth": runtime },
    });
    let expected = Bandwidth {
        ingress_rate: 5_000_000,
        ingress_burst: 2_147_483_647,
        egress_rate: 7_000_000,
        egress_burst: 80_000,
        shaped_subnets: vec![],
        unshaped_subnets: vec!["10.99.0.0/16".to_owned()],
    };
    assert_eq!(read(&ADD, &having(own)).unwrap().bandwidth, Some(expected));
}

/// containerd 1.6 writes capitals: its fields have no names for JSON, and plugins in Go read any case.
#[test]
fn rates_of_containerd_are_read() {
    let bandwidth = json!({
        "IngressRate": 20_000_000,
        "IngressBurst": 4_294_967_295_u64,
        "EgressRate": 10_000_000,
        "EgressBurst": 4_294_967_295_u64,
    });
    let config = having(json!({ "runtimeConfig": { "bandwidth": bandwidth } }));
    let expected = Bandwidth {
        ingress_rate: 20_000_000,
        ingress_burst: 4_294_967_295,
        egress_rate: 10_000_000,
        egress_burst: 4_294_967_295,
        ..Bandwidth::default()
    };
    assert_eq!(read(&ADD, &config).unwrap().bandwidth, Some(expected));
}

#[test]
fn a_rate_needs_a_burst_as_with_the_plugin_bandwidth() {
    for (more, says) in [
        (json!({ "egressRate": 1_000_000 }), "egressBurst must be"),
        (json!({ "ingressBurst": 1_000_000 }), "ingressRate must be"),
        (json!({ "egressRate": 1, "egressBurst": 34_359_738_360_u64 }), "more than 4 GB"),
        (
            json!({ "shapedSubnets": ["10.0.0.0/8"], "unshapedSubnets": ["::/0"] }),
            "exclude each other",
        ),
        (json!({ "unshapedSubnets": ["10.0.0.0/33"] }), "10.0.0.0/33"),
    ] {
        let error = read(&ADD, &having(more.clone())).unwrap_err();
        assert_eq!(error.code, Code::Config, "{more}");
        assert!(error.message.contains(says), "{error}");
        // What was never added can be deleted.
        assert!(read(&with(&[("CNI_COMMAND", "DEL")]), &having(more)).is_ok());
    }
    let negative = read(&ADD, &having(json!({ "egressRate": -1 }))).unwrap_err();
    assert_eq!(negative.code, Code::Decode);
}

#[test]
fn the_environment_is_checked_by_its_names() {
    for (changes, says) in [
        (("CNI_COMMAND", "REMOVE"), "CNI_COMMAND"),
        (("CNI_COMMAND", ""), "CNI_COMMAND"),
        (("CNI_CONTAINERID", ""), "CNI_CONTAINERID"),
        (("CNI_CONTAINERID", "../x"), "CNI_CONTAINERID"),
        (("CNI_IFNAME", "a/b"), "CNI_IFNAME"),
        (("CNI_NETNS", ""), "CNI_NETNS"),
    ] {
        let error = read(&with(&[changes]), &config()).unwrap_err();
        assert_eq!(error.code, Code::Environment, "{changes:?}");
        assert!(error.message.starts_with(says), "{error}");
    }
    // The namespace may be gone by then.
    let del = read(&with(&[("CNI_COMMAND", "DEL"), ("CNI_NETNS", "")]), &config()).unwrap();
    assert_eq!((del.command, del.netns), (Command::Del, None));
}

#[test]
fn a_command_needs_a_version_that_has_it() {
    for (command, version, known) in [
        ("ADD", "0.2.0", false),
        ("ADD", "0.3.0", true),
        ("ADD", "1.1.0", true),
        ("ADD", "2.0.0", false),
        ("CHECK", "0.3.1", false),
        ("CHECK", "0.4.0", true),
        ("GC", "1.0.0", false),
        ("GC", "1.1.0", true),
        ("STATUS", "1.0.0", false),
        ("STATUS", "1.1.0", true),
        ("VERSION", "9.9.9", true),
    ] {
        let config = json!({ "cniVersion": version, "cni.dev/valid-attachments": [] });
        let request = read(&with(&[("CNI_COMMAND", command)]), &having(config));
        match request {
            Ok(_) => assert!(known, "{command} {version}"),
            Err(e) => assert!(!known && e.code == Code::Version, "{command} {version}: {e}"),
        }
    }
}

#[test]
fn what_is_no_configuration_is_said() {
    let look = |name: &str| ADD.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
    assert_eq!(Request::read(look, "{").unwrap_err().code, Code::Decode);
    assert_eq!(Request::read(look, "").unwrap_err().code, Code::Decode);
    let nameless = read(&ADD, &json!({ "cniVersion": "1.0.0" })).unwrap_err();
    assert_eq!(nameless.code, Code::Config);
    let scheme = read(&ADD, &having(json!({ "scheme": "fast" }))).unwrap_err();
    assert!(scheme.code == Code::Config && scheme.message.starts_with("scheme: "), "{scheme}");
}

/// Without them it would take off the limits of containers that run on.
#[test]
fn gc_needs_the_interfaces_that_stay() {
    let gc = |config: &Value| read(&with(&[("CNI_COMMAND", "GC")]), config);
    let mut config = having(json!({}));
    config["cniVersion"] = json!("1.1.0");
    let error = gc(&config).unwrap_err();
    assert_eq!(error.code, Code::Config);
    assert!(error.message.contains("cni.dev/valid-attachments"), "{error}");
    // CRI-O has null for a network without pods.
    config["cni.dev/valid-attachments"] = Value::Null;
    assert_eq!(gc(&config).unwrap().valid, []);
}
