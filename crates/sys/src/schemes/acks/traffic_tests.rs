//! Real traffic through the programs and a shaper: kernels, not simulated senders, on both ends.

use std::{
    collections::hash_map::DefaultHasher,
    fs,
    hash::Hasher,
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::fd::AsRawFd,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tidegate_core::{Rate, Scope, dem};

use super::{
    bed::{self, Bed, SERVER},
    *,
};
use crate::{bpffs::PrivateBpffs, device::Target, net::tun_path::TunPath};

const PATIENCE: Duration = Duration::from_secs(60);
const SERVER_V6: &str = "fd93:2::2";

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn use_congestion_control(stream: &TcpStream, cc: &str) {
    let (name, len) = (cc.as_ptr().cast(), cc.len() as libc::socklen_t);
    let fd = stream.as_raw_fd();
    // SAFETY: the descriptor is open, and the kernel reads `len` bytes of a name that lives through the call.
    let ret = unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, name, len) };
    assert_eq!(ret, 0, "{cc}: {}", std::io::Error::last_os_error());
}

/// Sends `bytes` in each of `flows` to the server, and checks that they arrive as they were. The median of
/// what waited in HTB's queue, in bytes.
fn transfer(bed: &Bed, server: &str, flows: usize, bytes: usize, cc: &'static str) -> u32 {
    let listener = bed.server.run(|| TcpListener::bind((server, 0)).unwrap()).unwrap();
    let port = listener.local_addr().unwrap().port();
    let chunk: Vec<u8> = (0..100_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    let mut expected = DefaultHasher::new();
    (0..bytes / chunk.len()).for_each(|_| expected.write(&chunk));
    let expected = expected.finish();
    let mut waiting = Vec::new();
    thread::scope(|scope| {
        let receivers: Vec<_> = (0..flows)
            .map(|_| {
                let listener = &listener;
                scope.spawn(move || {
                    let (mut stream, _) = listener.accept().unwrap();
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    let (mut hasher, mut buffer) = (DefaultHasher::new(), vec![0; 100_000]);
                    // Whole chunks, as the hasher was fed.
                    while stream.read_exact(&mut buffer).is_ok() {
                        hasher.write(&buffer);
                    }
                    hasher.finish()
                })
            })
            .collect();
        let senders: Vec<_> = (0..flows)
            .map(|_| {
                let chunk = &chunk;
                scope.spawn(move || {
                    let stream = bed.guest.run(|| TcpStream::connect((server, port)).unwrap());
                    let mut stream = stream.unwrap();
                    use_congestion_control(&stream, cc);
                    (0..bytes / chunk.len()).for_each(|_| stream.write_all(chunk).unwrap());
                    stream.shutdown(Shutdown::Write).unwrap();
                    // Until the other side has closed, too.
                    let _ = stream.read(&mut [0]);
                })
            })
            .collect();
        let mut netlink = bed.host.netlink().unwrap();
        let ifindex = netlink.index_of("up0").unwrap();
        while !senders.iter().all(|sender| sender.is_finished()) {
            let stats = netlink.qdisc_stats(ifindex).unwrap();
            waiting.extend(stats.iter().filter(|q| q.kind == "pfifo").map(|q| q.backlog_bytes));
            thread::sleep(Duration::from_millis(2));
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        for receiver in receivers {
            assert_eq!(receiver.join().unwrap(), expected, "what arrived is not what was sent");
        }
    });
    waiting.sort_unstable();
    waiting.get(waiting.len() / 2).copied().unwrap_or(0)
}

fn ecn(bed: &Bed, tcp_ecn: u8) {
    for netns in [&bed.guest, &bed.server] {
        bed::set(netns, "ipv4/tcp_ecn", tcp_ecn.into());
    }
}

/// That of the bed's HTB.
const BURST: Nanos = Nanos(1_000_000);

fn mbit(n: u64) -> Rate {
    Rate::from_bit_s(n * 1_000_000).unwrap()
}

/// Windows shorten the queue for every congestion control, ECN or not; nothing is lost, nothing corrupted.
#[test]
fn root_acks_spring_shortens_the_queue() {
    // So that a machine which is emulated has a queue, too.
    let rate = mbit(40);
    let Some(bed) = Bed::new("root_acks_spring_shortens_the_queue", rate) else { return };
    ecn(&bed, 0);
    // Neighbours are found before anything is measured.
    transfer(&bed, SERVER_V6, 1, 100_000, "cubic");
    let without = transfer(&bed, SERVER, 4, 1_000_000, "cubic");
    let options = AcksOptions { law: Law::Spring, rate, mark: None, burst: BURST, lease: None };
    let attached = bed.attach(&options);
    for (server, cc) in [(SERVER, "cubic"), (SERVER_V6, "cubic"), (SERVER, "reno")] {
        let with = transfer(&bed, server, 4, 1_000_000, cc);
        let counters = attached.maps.counters().unwrap();
        println!("{cc}: {with}, without {without}, {:?}", counters.packets);
        assert!(with * 2 < without, "{cc}: {with}, without {without}");
        assert!(counters.packets[2] > 0 && counters.packets[1] == 0, "{counters:?}");
        assert_eq!(counters.packets[3], 0, "a sender was thought to ignore its window");
    }
    // Live change, and off again: connections go on.
    attached.maps.set(&AcksOptions { mark: Some(Nanos(5_000_000)), ..options }).unwrap();
    transfer(&bed, SERVER, 2, 1_000_000, "cubic");
    bed.detach(attached);
    transfer(&bed, SERVER, 2, 1_000_000, "cubic");
}

/// A device such as TUN, WireGuard or PPP carries IP without a link header.
#[test]
fn root_acks_slow_senders_on_a_device_without_ethernet() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_acks_slow_senders_on_a_device_without_ethernet: needs root");
        return;
    }
    let rate = mbit(40);
    let path = TunPath::new("acks");
    let [near, far] = &path.ends;
    bed::shape(near, "tun0", rate);
    let backlog = bed::backlog_of(near, "tun0", rate);
    let options = AcksOptions { law: Law::Spring, rate, mark: None, burst: BURST, lease: None };
    let attached = near.run(|| {
        let target = Target::find(&Scope::Dev("tun0".to_owned())).unwrap();
        attach(&target, Direction::Egress, &options, &backlog, &new_states().unwrap()).unwrap()
    });
    let attached = attached.unwrap();
    let bind = || TcpListener::bind((TunPath::ADDRESSES[1], 0)).unwrap();
    let listener = far.run(bind).unwrap();
    let address = listener.local_addr().unwrap();
    let mut stream = near.run(|| TcpStream::connect(address).unwrap()).unwrap();
    let (mut received, _) = listener.accept().unwrap();
    let sink = thread::spawn(move || std::io::copy(&mut received, &mut std::io::sink()));
    assert_eq!(attached.maps.known(|_, _| true).len(), 1, "the connection is not known");
    // So much that a queue builds.
    for _ in 0..20 {
        stream.write_all(&[7; 100_000]).unwrap();
    }
    drop(stream);
    assert_eq!(sink.join().unwrap().unwrap(), 2_000_000);
    let counters = attached.maps.counters().unwrap();
    assert!(counters.packets[2] > 0 && counters.packets[3] == 0, "{counters:?}");
    near.run(|| drop(attached)).unwrap();
}

/// Pinned, the programs outlive who put them there, are found again, and go without a trace.
#[test]
fn root_acks_stay_when_pinned() {
    let test = "root_acks_stay_when_pinned";
    let rate = mbit(200);
    let Some(bed) = Bed::new(test, rate) else { return };
    let place = tempfile::tempdir().unwrap();
    let bpffs = PrivateBpffs::mount(place.path()).unwrap();
    let dir = bpffs.path().join("limit");
    let attached =
        bed.attach(&AcksOptions { law: Law::Spring, rate, mark: None, burst: BURST, lease: None });
    bed.host.run(|| attached.pin(&dir).map(drop)).unwrap().unwrap();
    let maps = AcksMaps::open(&dir).unwrap();
    let told = || maps.counters().unwrap().packets[2];
    transfer(&bed, SERVER, 1, 500_000, "cubic");
    let before = told();
    assert!(before > 0);
    let (limit, at) = bed
        .host
        .run(|| {
            let target = Target::find(&Scope::Port("port0".to_owned())).unwrap();
            let flags = crate::intf::FLAG_PORT;
            let (ifindex, cgroup_id) = (target.ifindex, target.namespace);
            let limit = crate::intf::Limit { ifindex, cgroup_id, flags, ..Default::default() };
            (limit, ifindex)
        })
        .unwrap();
    assert_eq!(bed.host.run(|| unhooked(&dir, &limit)).unwrap(), [""; 0]);
    bed.host.run(|| remove(&dir, &limit).unwrap()).unwrap();
    assert!(!dir.exists());
    transfer(&bed, SERVER, 1, 500_000, "cubic");
    assert_eq!(told(), before);
    let mut netlink = bed.host.netlink().unwrap();
    let kinds: Vec<_> = netlink.qdisc_stats(at).unwrap().into_iter().map(|q| q.kind).collect();
    assert!(!kinds.contains(&"clsact".to_owned()), "{kinds:?}");
}

/// Marks do so for flows with ECN, and leave others alone.
#[test]
fn root_acks_dem_shortens_the_queue() {
    // So that a machine which is emulated has a queue, too.
    let rate = mbit(40);
    let Some(bed) = Bed::new("root_acks_dem_shortens_the_queue", rate) else { return };
    ecn(&bed, 1);
    let without = transfer(&bed, SERVER, 2, 3_000_000, "cubic");
    for law in [dem::Law::Step, dem::Law::Pi] {
        let attached = bed.attach(&AcksOptions {
            law: Law::Dem(law),
            rate,
            mark: None,
            burst: BURST,
            lease: None,
        });
        ecn(&bed, 1);
        let with = transfer(&bed, SERVER, 2, 3_000_000, "cubic");
        let marks = attached.maps.counters().unwrap().packets[1];
        println!("{law:?}: {with}, without {without}, {marks} marks");
        assert!(with * 2 < without, "{law:?}: {with}, without {without}");
        assert!(marks > 0);
        ecn(&bed, 0);
        transfer(&bed, SERVER, 2, 1_000_000, "cubic");
        assert_eq!(attached.maps.counters().unwrap().packets[1], marks, "a flow without ECN");
        bed.detach(attached);
    }
}

/// Connections that end leave nothing behind, however they end, also where both sides end at the same moment,
/// on two CPUs; `ACKS_CONNECTIONS` says how many.
#[test]
fn root_acks_short_connections_leave_nothing() {
    let rate = mbit(1000);
    let Some(bed) = Bed::new("root_acks_short_connections_leave_nothing", rate) else { return };
    let attached =
        bed.attach(&AcksOptions { law: Law::Spring, rate, mark: None, burst: BURST, lease: None });
    let wanted = std::env::var("ACKS_CONNECTIONS").ok().and_then(|n| n.parse().ok());
    let wanted: usize = wanted.unwrap_or(20_000);
    for netns in [&bed.guest, &bed.server] {
        bed::set(netns, "ipv4/tcp_tw_reuse", 1);
    }
    let listener = bed.server.run(|| TcpListener::bind((SERVER, 0)).unwrap()).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut most = 0;
    thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..wanted {
                let (mut stream, _) = listener.accept().unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                // Every other one leaves something unread, so that closing it is a reset.
                let _ = stream.read_exact(&mut [0; 10]);
                let _ = stream.write_all(&[1; 100]);
            }
        });
        let most = &mut most;
        let maps = &attached.maps;
        bed.guest
            .run(move || {
                for i in 0..wanted {
                    let mut stream = TcpStream::connect((SERVER, port)).unwrap();
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    let bytes = if i % 2 == 0 { 10 } else { 20 };
                    stream.write_all(&vec![0; bytes]).unwrap();
                    let _ = stream.read(&mut [0; 100]);
                    drop(stream);
                    if i % 1000 == 999 {
                        *most = maps.known(|_, _| true).len().max(*most);
                    }
                }
            })
            .unwrap();
    });
    let deadline = Instant::now() + PATIENCE;
    let connections = || attached.maps.known(|_, _| true).len();
    while connections() > 0 {
        assert!(Instant::now() < deadline, "{} connections stay", connections());
        thread::sleep(Duration::from_millis(20));
    }
    println!("{wanted} connections, at most {most} known at once where looked at");
    assert!(most < 100, "{most} at once");
}

/// A web server behind the port, over HTTP/1.1 and HTTP/2, fetched from outside.
#[test]
fn root_acks_nginx_serves_through_windows() {
    let test = "root_acks_nginx_serves_through_windows";
    let has = |program: &str| Command::new(program).arg("-V").output().is_ok();
    if !has("nginx") || !has("curl") {
        eprintln!("SKIP {test}: nginx and curl are not here");
        return;
    }
    let rate = mbit(200);
    let Some(bed) = Bed::new(test, rate) else { return };
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    fs::create_dir(dir.path().join("www")).unwrap();
    fs::write(dir.path().join("www/large"), vec![7; 3_000_000]).unwrap();
    fs::write(dir.path().join("www/small"), vec![8; 1000]).unwrap();
    let conf = format!(
        "daemon off; master_process off; pid {at}/pid; error_log {at}/error; user root; events {{}}
         http {{ access_log off; client_body_temp_path {at}; proxy_temp_path {at}; fastcgi_temp_path {at};
                 uwsgi_temp_path {at}; scgi_temp_path {at}; root {at}/www;
                 server {{ listen 80; }} server {{ listen 81 http2; }} }}"
    );
    let path = dir.path().join("nginx.conf");
    fs::write(&path, conf).unwrap();
    let attached =
        bed.attach(&AcksOptions { law: Law::Spring, rate, mark: None, burst: BURST, lease: None });
    let nginx = bed.guest.run(|| {
        let null = Stdio::null;
        let mut command = Command::new("nginx");
        command.arg("-c").arg(&path).stdin(null()).stdout(null()).stderr(null()).spawn()
    });
    let _nginx = Running(nginx.unwrap().unwrap());
    let deadline = Instant::now() + PATIENCE;
    let listens = || bed.server.run(|| TcpStream::connect(("10.93.1.2", 81)).is_ok()).unwrap();
    while !listens() {
        assert!(Instant::now() < deadline, "nginx does not listen");
        thread::sleep(Duration::from_millis(20));
    }
    let curl = |words: &str| {
        let words = format!("curl -sS --fail -m 60 -w %{{http_version}} {words}");
        String::from_utf8(bed::sh(&bed.server, &words).stdout).unwrap()
    };
    for round in 0..3 {
        let (plain, h2) = (dir.path().join("plain"), dir.path().join("h2"));
        let version = curl(&format!("-o {} http://10.93.1.2/large", plain.display()));
        assert_eq!(version, "1.1");
        let words =
            format!("--http2-prior-knowledge -o {} http://10.93.1.2:81/large", h2.display());
        assert_eq!(curl(&words), "2");
        assert_eq!(fs::read(&plain).unwrap(), vec![7; 3_000_000], "round {round}");
        assert_eq!(fs::read(&h2).unwrap(), vec![7; 3_000_000], "round {round}");
        assert_eq!(curl("http://10.93.1.2/small").len(), 1000 + 3);
    }
    let counters = attached.maps.counters().unwrap();
    assert!(counters.packets[2] > 0, "{counters:?}");
    assert_eq!(counters.packets[3], 0, "{counters:?}");
}
