//! A daemon that starts before the network does: no name resolves, and there is no route to anywhere.

use super::*;

/// In the host's namespace, with a file of its own for `/etc/hosts`.
fn start(host: &Host, hosts: &str) -> Daemon {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let said = host.dir().join(format!("said-names-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
    let mut command = Command::new("unshare");
    let script = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";
    command.args(["--mount", "sh", "-c", script, hosts]);
    command.arg(env!("CARGO_BIN_EXE_tidegate")).args(["daemon", host.file()]);
    command.env("TIDEGATE_BPFFS", host.place.store()).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(fs::File::create(&said).unwrap());
    let process = host.netns.as_ref().unwrap().run(|| command.spawn().unwrap()).unwrap();
    Daemon { process: Guard(process), said }
}

#[test]
fn root_a_daemon_waits_for_names_and_routes_and_says_so() {
    need_root!();
    let netns = NetNs::create(&format!("tidegate-names-{}", std::process::id())).unwrap();
    let fleet = "acceptors = [\"h0\"]\npeers = [\"tg-peer.test\"]";
    let host = Host::new("h0", Some(netns), fleet);
    let hosts = host.place.file("hosts", "127.0.0.1 localhost\n");
    let hosts = hosts.to_str().unwrap();
    host.apply();
    let waits = "cannot tell yet where others reach this node: does not resolve: `tg-peer.test`: ";

    // One that is to end while it waits does. It is ready then, and watched: it has written its session.
    let mut daemon = start(&host, hosts);
    daemon.wait_to_say(waits);
    assert!(host.dir().join("state/fleet/session").exists());
    signal(daemon.process.0.id(), Signal::TERM);
    assert_eq!(daemon.process.exit_code(), 0, "{}", daemon.said());
    assert!(!host.dir().join("api").exists());

    let mut daemon = start(&host, hosts);
    daemon.wait_to_say(waits);
    let alerts = host.status()["fleet"]["alerts"].to_string();
    assert!(alerts.contains("tg-peer.test"), "{alerts}");
    assert_eq!(host.rate(), ALONE);

    // The network comes, then the name.
    let mut netlink = host.netns.as_ref().unwrap().netlink().unwrap();
    netlink.add_veth(&VethPair { name: "v0", peer: "v1", peer_netns: None }).unwrap();
    let index = netlink.index_of("v0").unwrap();
    netlink.add_address(index, "10.97.0.1".parse().unwrap(), 24).unwrap();
    for device in ["lo", "v0", "v1"] {
        let index = netlink.index_of(device).unwrap();
        netlink.set_up(index, true).unwrap();
    }
    fs::write(hosts, "127.0.0.1 localhost\n10.97.0.2 tg-peer.test\n").unwrap();
    daemon.wait_to_say("node `h0` runs, reached at 10.97.0.1:7946");
    wait_for("its part", || (host.rate() == LIMIT - 3 * ALONE).then_some(()));
    let sources = host.status()["fleet"]["sources"].clone();
    assert_eq!(sources[0]["addresses"], 1, "{sources}");
    signal(daemon.process.0.id(), Signal::TERM);
    assert_eq!(daemon.process.exit_code(), 0, "{}", daemon.said());
}
