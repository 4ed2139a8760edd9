//! `fair` of scheme `police`: as it is written, changed and shown, and a TCP flow beside a flood of
//! datagrams, which minds no losses.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::net::sockopt::set_tcp_congestion;

use crate::{
    common::{PATIENCE, Place},
    edt::{Bed, PORT, RECEIVER, blast, bound, ok, refused},
    need_root,
};

const LIMIT_BIT_S: f64 = 20e6;
const FLOOD_BIT_S: f64 = 60e6;
/// TCP is looked at over so long.
const LOOK: Duration = Duration::from_secs(2);
/// Reads end so often, that a starved flow is seen.
const READ: Duration = Duration::from_millis(100);

/// What one TCP flow has beside the flood in the first look that has `enough`, or in the last before patience
/// ends, in bit/s. The very first does not count, as the flow begins with a full bucket. It is a flow of
/// CUBIC: over a path of microseconds BBR takes the time-outs between its losses for the rate, and keeps to
/// that.
fn tcp_beside_a_flood(bed: &Bed, enough: f64) -> f64 {
    let listener = bed.receiver.run(|| bound(|| TcpListener::bind((RECEIVER, PORT)))).unwrap();
    let stream = bed.sender.run(|| TcpStream::connect((RECEIVER, PORT)).unwrap()).unwrap();
    set_tcp_congestion(&stream, "cubic").unwrap();
    let (mut sink, _) = listener.accept().unwrap();
    sink.set_read_timeout(Some(READ)).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let (end, done) = (Instant::now() + PATIENCE, AtomicBool::new(false));
    let flood = || {
        while !done.load(Ordering::Relaxed) {
            blast(RECEIVER, PORT + 1, FLOOD_BIT_S, Instant::now() + READ);
        }
    };
    let mut got: Vec<f64> = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| bed.sender.run(flood).unwrap());
        // Ends when the connection is shut down.
        scope.spawn(move || while writer.write_all(&[7; 1 << 14]).is_ok() {});
        let mut buffer = vec![0; 1 << 16];
        while got.len() < 2 || (got.last() < Some(&enough) && Instant::now() < end) {
            let (start, mut bytes) = (Instant::now(), 0);
            while start.elapsed() < LOOK {
                bytes += sink.read(&mut buffer).unwrap_or(0);
            }
            got.push(bytes as f64 * 8.0 / start.elapsed().as_secs_f64());
        }
        done.store(true, Ordering::Relaxed);
        let _ = stream.shutdown(Shutdown::Both);
        let _ = sink.shutdown(Shutdown::Both);
    });
    println!("TCP beside a flood: {got:.0?} bit/s");
    got.last().copied().unwrap_or(0.0)
}

/// The senders are on the host that polices: TCP finds its losses as behind a router, and waits for no timer.
#[test]
fn root_police_fair_saves_tcp_from_a_flood() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    // Two packets each 50 us are more than the limit, so only time-outs slow TCP down here: the bucket is
    // deeper than the least of them.
    ok(&place, &bed, "limit add up --dev eth0 --scheme police --egress 20mbit --burst 250ms");
    let changed = ok(&place, &bed, "limit set up --fair");
    assert!(changed.contains("fair false -> true"), "{changed}");
    // Without `fair` it has a thousandth of its part. How much of its part TCP can use is a matter of its
    // time-outs, and they are a matter of the machine: a quarter to a third was seen.
    let enough = LIMIT_BIT_S / 20.0;
    let got = tcp_beside_a_flood(&bed, enough);
    assert!(got >= enough, "TCP is starved beside a flood: {got:.0} bit/s");
    ok(&place, &bed, "detach");
}

#[test]
fn root_police_fair_is_written_in_a_file() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let text = "[[limit]]\nname = \"up\"\nscope = { dev = \"eth0\" }\nscheme = \"police\"\n\
                egress = \"20mbit\"\nfair = true\n";
    let file = place.file("limits.toml", text);
    let done = ok(&place, &bed, &format!("apply {}", file.display()));
    assert!(done.contains("scheme police, fair"), "{done}");
    let again = ok(&place, &bed, &format!("apply {}", file.display()));
    assert!(again.contains("Nothing to do"), "{again}");
    let status: serde_json::Value =
        serde_json::from_str(&ok(&place, &bed, "status --json")).unwrap();
    assert_eq!(status["limits"][0]["fair"], true, "{status}");
    let message = refused(&place, &bed, "limit set up --meter srtcm");
    assert!(message.contains("--meter: `fair` and `meter` do not work together"), "{message}");
    let message = refused(&place, &bed, "limit set up --match 10.0.0.0/24");
    assert!(message.contains("--match: `fair` and `match` do not work together"), "{message}");
    let changed = ok(&place, &bed, "limit set up --fair=false");
    assert!(changed.contains("fair true -> false"), "{changed}");
    ok(&place, &bed, "detach");
    let message = refused(&place, &bed, "run --scheme pace --egress 20mbit --fair -- true");
    assert!(message.contains("--fair: scheme `pace` has no `fair`"), "{message}");
}
