//! Whose packets wait in the queue of a guest's port: `status --flows` and `explain`.

use std::{
    env,
    net::{SocketAddr, TcpStream},
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    common::{Guard, Place, wait_for},
    edt::{Bed, PORT, RECEIVER, blast, into, ok, refused},
    htb::{guest, json},
    need_root,
};

const GREEDY: u16 = PORT + 1;
const SPARSE: u16 = PORT + 3;

/// Ends the senders, also after a failure.
struct Seen<'a>(&'a AtomicBool);

impl Drop for Seen<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What waits for a port of the receiver.
fn bytes_to(queue: &Value, port: u16) -> u64 {
    let to = format!("{RECEIVER}:{port}");
    let flows = queue["flows"].as_array().unwrap().iter();
    flows.filter(|flow| flow["to"] == to).filter_map(|flow| flow["bytes"].as_u64()).sum()
}

/// A flow that sends twice what may leave, and one that sends a tenth of that: who is who in the queue.
#[test]
fn root_waiting_tells_the_greedy_from_the_sparse() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let guest = guest(&bed);
    ok(&place, &bed, "limit add guest --port tap0 --scheme htb --egress 2mbit --drop 1s");
    assert!(json(&place, &bed, "status --json")["limits"][0]["waiting"].is_null());
    let _server = bed.serve();
    let seen = AtomicBool::new(false);
    thread::scope(|scope| {
        let _seen = Seen(&seen);
        for (port, bit_s) in [(GREEDY, 4e6), (SPARSE, 4e5)] {
            let (guest, seen) = (&guest, &seen);
            let a_while =
                move || blast(RECEIVER, port, bit_s, Instant::now() + Duration::from_millis(500));
            scope.spawn(move || {
                while !seen.load(Ordering::Relaxed) {
                    guest.run(a_while).unwrap();
                }
            });
        }
        let queue = wait_for("a queue that is the greedy one's", || {
            let status = json(&place, &bed, "status --json --flows");
            let queue = status["limits"][0]["waiting"]["egress"].clone();
            if queue.is_null() {
                // One of fq_codel, by a kernel that does not explain it.
                return Some(queue);
            }
            let (greedy, sparse) = (bytes_to(&queue, GREEDY), bytes_to(&queue, SPARSE));
            (greedy > 50_000 && greedy > 4 * sparse).then_some(queue)
        });
        if queue.is_null() {
            crate::common::skip("this kernel does not explain its fq_codel");
            return;
        }
        let sum: u64 =
            queue["flows"].as_array().unwrap().iter().map(|f| f["bytes"].as_u64().unwrap()).sum();
        assert_eq!(sum + queue["other_bytes"].as_u64().unwrap(), queue["bytes"].as_u64().unwrap());
        // Both at a glance, and one of them by its address.
        let table = ok(&place, &bed, "limit show guest --flows");
        assert!(table.contains("guest egress, what waits: "), "{table}");
        assert!(table.contains(&format!(" > {RECEIVER}:{GREEDY}: ")), "{table}");
        let explained = json(&place, &bed, &format!("explain {RECEIVER}:{GREEDY} --json"));
        let passing = &explained["passing"][0];
        assert_eq!((&passing["limit"], &passing["port"]), (&"guest".into(), &"tap0".into()));
        assert_eq!((&passing["scheme"], &passing["protocol"]), (&"htb".into(), &"udp".into()));
        assert!(passing["bytes"].as_u64().unwrap() > 10_000, "{explained}");
        let text = ok(&place, &bed, &format!("explain {RECEIVER}:{GREEDY}"));
        assert!(text.contains("Limit `guest` on port `tap0`: htb, egress udp"), "{text}");
    });
    ok(&place, &bed, "detach");
}

/// A connection that `spring` knows passes its limit also while nothing of it waits.
#[test]
fn root_waiting_knows_the_connections_of_spring() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let guest = guest(&bed);
    ok(&place, &bed, "limit add guest --port tap0 --scheme spring --egress 20mbit");
    let _server = bed.serve();
    let stream = guest.run(|| TcpStream::connect((RECEIVER, PORT)).unwrap()).unwrap();
    let local: SocketAddr = stream.local_addr().unwrap();
    let explained = json(&place, &bed, &format!("explain {local} {RECEIVER}:{PORT} --json"));
    let passing = &explained["passing"][0];
    assert_eq!((&passing["limit"], &passing["direction"]), (&"guest".into(), &"egress".into()));
    assert_eq!((&passing["from"], &passing["bytes"]), (&local.to_string().into(), &0.into()));
    drop(stream);
    let message = refused(&place, &bed, "explain 10.96.0.2:1");
    assert!(message.contains("nothing of it waits in a queue"), "{message}");
    ok(&place, &bed, "detach");
}

/// The limit of a port holds back a process or a connection behind it, whatever its scheme.
#[test]
fn root_waiting_explain_names_the_limit_of_the_port() {
    need_root!();
    for scheme in ["police", "spring"] {
        let (place, bed) = (Place::new(), Bed::new());
        let guest = guest(&bed);
        ok(&place, &bed, &format!("limit add guest --port tap0 --scheme {scheme} --egress 20mbit"));
        let _server = bed.serve();
        let mut command = into(&guest, env::current_exe().unwrap().to_str().unwrap());
        command
            .args(["helper", "--exact", "--nocapture"])
            .env("TIDEGATE_TEST_EDT", format!("600 2 0 {RECEIVER}"));
        let sender = Guard(command.stdout(Stdio::null()).spawn().unwrap());
        let pid = sender.0.id().to_string();
        let flow = format!("{RECEIVER}:{PORT}");
        // The receiver's end is behind no port: only the queue knows the connection.
        let subjects = if scheme == "spring" { vec![&pid, &flow] } else { vec![&pid] };
        for subject in subjects {
            wait_for("a verdict that names the limit", || {
                let explained =
                    json(&place, &bed, &format!("explain --sample 200ms --json {subject}"));
                let places = explained["places"].as_array().unwrap();
                let mut said = places.iter().map(|place| place["sentence"].as_str().unwrap());
                let is_wrong = said.clone().any(|said| said.contains("not limited"));
                (!is_wrong && said.any(|said| said.contains("limit `guest`"))).then_some(())
            });
        }
        let text = ok(&place, &bed, &format!("explain --sample 10ms {pid}"));
        assert!(text.contains(&format!("Limit `guest` on port `tap0`: {scheme}")), "{text}");
        drop(sender);
        ok(&place, &bed, "detach");
    }
}
