//! DCTCP on the wire: who speaks it, and what becomes of it when its registration ends.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod bed;

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use bed::{Cgroup, Net, Process, SERVER, connections, iperf3_server, root, take_turn, wait_for};
use rustix::net::sockopt::{set_tcp_congestion, tcp_congestion};
use tidegate_sys::congestion::{TG_DCTCP, attach_to_cgroup, ensure};

/// The control and data connection of an iperf3, both seen in the namespace.
fn both_connections(ns: &str) -> Vec<Vec<String>> {
    wait_for("two connections", || {
        let seen = connections(ns);
        (seen.len() >= 2).then_some(seen)
    })
}

fn has(connection: &[String], word: &str) -> bool {
    connection.iter().any(|w| w == word)
}

fn iperf3_client(net: &Net, cgroup: &Cgroup, options: &str) -> Process {
    cgroup.spawn(&net.client, &format!("iperf3 -c {SERVER} -t 60{options}"))
}

/// The largest bytes_acked of the connections in the namespace.
fn acked(ns: &str) -> u64 {
    let all = connections(ns);
    let words = all.iter().flatten().filter_map(|w| w.strip_prefix("bytes_acked:"));
    words.filter_map(|n| n.parse().ok()).max().unwrap_or(0)
}

#[track_caller]
fn assert_all(ns: &str, control: &str, ecn: bool) {
    for connection in both_connections(ns) {
        assert!(has(&connection, control), "no {control}: {connection:?}");
        assert_eq!(has(&connection, "ecn"), ecn, "{connection:?}");
    }
}

#[test]
fn root_a_cgroup_speaks_dctcp_in_both_directions() {
    if !root("root_a_cgroup_speaks_dctcp_in_both_directions") {
        return;
    }
    let _turn = take_turn();
    let (net, cgroup) = (Net::new(), Cgroup::new());
    let dctcp = ensure(TG_DCTCP).unwrap();
    let _attached = attach_to_cgroup(cgroup.open().as_fd(), dctcp.name()).unwrap();
    for reverse in ["", " -R"] {
        let _server = iperf3_server(&net, &cgroup);
        assert!(bed::ss(&net.server, "-tlniOH").contains(TG_DCTCP), "the listener has it");
        let _client = iperf3_client(&net, &cgroup, reverse);
        assert_all(&net.client, TG_DCTCP, true);
        assert_all(&net.server, TG_DCTCP, true);
    }
}

#[test]
fn root_a_listener_older_than_the_programs_answers_for_ecn() {
    if !root("root_a_listener_older_than_the_programs_answers_for_ecn") {
        return;
    }
    let _turn = take_turn();
    let (net, cgroup) = (Net::new(), Cgroup::new());
    let _server = iperf3_server(&net, &cgroup);
    let dctcp = ensure(TG_DCTCP).unwrap();
    let _attached = attach_to_cgroup(cgroup.open().as_fd(), dctcp.name()).unwrap();
    let _client = iperf3_client(&net, &cgroup, "");
    assert_all(&net.client, TG_DCTCP, true);
    assert_all(&net.server, TG_DCTCP, true);
}

#[test]
fn root_one_end_alone_runs_reno_without_ecn() {
    if !root("root_one_end_alone_runs_reno_without_ecn") {
        return;
    }
    let _turn = take_turn();
    let net = Net::new();
    let (attached, plain) = (Cgroup::new(), Cgroup::new());
    let dctcp = ensure(TG_DCTCP).unwrap();
    let _attached = attach_to_cgroup(attached.open().as_fd(), dctcp.name()).unwrap();
    {
        let _server = iperf3_server(&net, &plain);
        let _client = iperf3_client(&net, &attached, "");
        assert_all(&net.client, "reno", false);
    }
    let _server = iperf3_server(&net, &attached);
    let _client = iperf3_client(&net, &plain, " -R");
    assert_all(&net.server, "reno", false);
}

#[test]
fn root_a_programs_own_choice_stands() {
    if !root("root_a_programs_own_choice_stands") {
        return;
    }
    let _turn = take_turn();
    let (net, cgroup) = (Net::new(), Cgroup::new());
    let dctcp = ensure(TG_DCTCP).unwrap();
    let _attached = attach_to_cgroup(cgroup.open().as_fd(), dctcp.name()).unwrap();
    let _server = iperf3_server(&net, &cgroup);
    let _client = iperf3_client(&net, &cgroup, " -C cubic");
    // iperf3 makes its choice when the connection is there.
    wait_for("the program's choice", || {
        both_connections(&net.client).iter().any(|c| has(c, "cubic")).then_some(())
    });
}

#[test]
fn root_connections_outlive_the_registration() {
    if !root("root_connections_outlive_the_registration") {
        return;
    }
    let _turn = take_turn();
    let (net, cgroup) = (Net::new(), Cgroup::new());
    let dctcp = ensure(TG_DCTCP).unwrap();
    let attached = attach_to_cgroup(cgroup.open().as_fd(), dctcp.name()).unwrap();
    let server = iperf3_server(&net, &cgroup);
    let client = iperf3_client(&net, &cgroup, "");
    assert_all(&net.client, TG_DCTCP, true);
    drop((attached, dctcp));

    // Nobody can choose it now ...
    let cgroup_fd = cgroup.open();
    assert!(attach_to_cgroup(cgroup_fd.as_fd(), TG_DCTCP).is_err());
    // ... yet what runs goes on ...
    let before = acked(&net.client);
    wait_for("more bytes are acknowledged", || (acked(&net.client) > before).then_some(()));
    assert_all(&net.client, TG_DCTCP, true);
    drop(client);
    // ... what begins now begins with the default ...
    let client = iperf3_client(&net, &cgroup, "");
    let new = both_connections(&net.client);
    assert!(!new.iter().any(|c| has(c, TG_DCTCP)), "{new:?}");
    // ... and the name can be had again.
    let again = ensure(TG_DCTCP).unwrap();
    assert!(again.is_ours());
    drop((client, server));
}

#[test]
fn root_a_listener_hands_on_what_nobody_can_choose_any_more() {
    if !root("root_a_listener_hands_on_what_nobody_can_choose_any_more") {
        return;
    }
    let _turn = take_turn();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accepted = || {
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        (tcp_congestion(&server).unwrap(), client)
    };
    let (default, _) = accepted();
    let dctcp = ensure(TG_DCTCP).unwrap();
    set_tcp_congestion(&listener, TG_DCTCP).unwrap();
    // The client does not ask for ECN: our init sees that and goes over to Reno.
    assert_eq!(accepted().0, "reno");
    drop(dctcp);
    assert!(set_tcp_congestion(TcpListener::bind("127.0.0.1:0").unwrap(), TG_DCTCP).is_err());
    assert_eq!(tcp_congestion(&listener).unwrap(), TG_DCTCP);
    assert_eq!(accepted().0, "reno", "still through our init, not {default}");

    // A second registration and the first, held by the listener, go side by side.
    let again = ensure(TG_DCTCP).unwrap();
    set_tcp_congestion(TcpListener::bind("127.0.0.1:0").unwrap(), again.name()).unwrap();
    assert_eq!(accepted().0, "reno");
}
