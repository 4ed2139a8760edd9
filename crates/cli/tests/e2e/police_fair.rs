//! `fair` of scheme `police`: a TCP flow beside a flood of datagrams, which minds no losses.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{
    common::Place,
    edt::{Bed, PORT, ok, refused},
    need_root,
};

const LIMIT_BIT_S: f64 = 20e6;
const FLOOD_BIT_S: u64 = 60_000_000;
const SETTLE: Duration = Duration::from_secs(2);
const MEASURE: Duration = Duration::from_secs(4);

/// Datagrams at [`FLOOD_BIT_S`] until told to stop.
fn flood(bed: &Bed, stop: &AtomicBool) {
    let socket = bed.sender.run(|| UdpSocket::bind(("0.0.0.0", 0)).unwrap()).unwrap();
    let datagram = [7; 1_000];
    let (start, mut sent) = (Instant::now(), 0);
    while !stop.load(Ordering::Relaxed) {
        let due = FLOOD_BIT_S * start.elapsed().as_micros() as u64 / 8_000_000;
        while sent < due {
            // Refused or dropped is as good as sent.
            let _ = socket.send_to(&datagram, ("10.97.0.2", PORT + 1));
            sent += datagram.len() as u64;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// What one TCP flow gets beside the flood, in bit/s.
fn tcp_beside_a_flood(bed: &Bed) -> f64 {
    let listener = bed.receiver.run(|| TcpListener::bind(("0.0.0.0", PORT)).unwrap()).unwrap();
    let stream = bed.sender.run(|| TcpStream::connect(("10.97.0.2", PORT)).unwrap()).unwrap();
    let (mut sink, _) = listener.accept().unwrap();
    sink.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| flood(bed, &stop));
        // Ends when the connection is shut down.
        scope.spawn(move || while writer.write_all(&[7; 1 << 14]).is_ok() {});
        let (start, mut buffer, mut bytes) = (Instant::now(), vec![0; 1 << 16], 0);
        while start.elapsed() < SETTLE + MEASURE {
            // A time-out is a starved flow.
            let read = sink.read(&mut buffer).unwrap_or(0);
            bytes += if start.elapsed() > SETTLE { read } else { 0 };
        }
        stop.store(true, Ordering::Relaxed);
        let _ = stream.shutdown(Shutdown::Both);
        let _ = sink.shutdown(Shutdown::Both);
        bytes as f64 * 8.0 / MEASURE.as_secs_f64()
    })
}

#[test]
fn root_police_fair_saves_tcp_from_a_flood() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    ok(&place, &bed, "limit add up --dev eth0 --scheme police --egress 20mbit");
    let plain = tcp_beside_a_flood(&bed);
    let changed = ok(&place, &bed, "limit set up --fair");
    assert!(changed.contains("fair false -> true"), "{changed}");
    let fair = tcp_beside_a_flood(&bed);
    eprintln!("TCP beside a flood: {plain:.0} bit/s plain, {fair:.0} fair");
    assert!(fair > 0.25 * LIMIT_BIT_S && plain < fair / 2.0, "{plain} {fair}");
    let status: serde_json::Value =
        serde_json::from_str(&ok(&place, &bed, "status --json")).unwrap();
    assert_eq!(status["limits"][0]["police"]["fair"], true, "{status}");
    let message = refused(&place, &bed, "limit set up --meter srtcm");
    assert!(message.contains("--meter: a limit with a meter has no equal parts"), "{message}");
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
    assert!(again.contains("nothing"), "{again}");
    ok(&place, &bed, "detach");
    let message = refused(&place, &bed, "run --egress 20mbit --fair -- true");
    assert!(message.contains("--fair: only scheme `police` has `fair`"), "{message}");
}
