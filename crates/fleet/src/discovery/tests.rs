//! Against the real servers, on loopback and ports of their own.

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::Instant,
};

use super::*;

const PATIENT: Duration = Duration::from_secs(30);

/// A server that does not outlive its test.
struct Server {
    child: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn wait_for_port(port: u16) {
    let deadline = Instant::now() + PATIENT;
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < deadline, "no server at port {port}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts a server, or says SKIP where it is not installed.
fn start(
    test: &str,
    program: &str,
    port: u16,
    args: impl Fn(u16, &str) -> Vec<String>,
) -> Option<Server> {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(program);
    command.args(args(port, dir.path().to_str().unwrap()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.spawn() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let _ = writeln!(io::stdout(), "SKIP {test}: there is no {program}");
            None
        }
        child => {
            let server = Server { child: child.unwrap(), port, _dir: dir };
            wait_for_port(port);
            Some(server)
        }
    }
}

fn redis(test: &str, port: u16, password: Option<&str>) -> Option<Server> {
    start(test, "redis-server", port, |port, dir| {
        let mut args = vec![
            "--port".to_owned(),
            port.to_string(),
            "--bind".into(),
            "127.0.0.1".into(),
            "--save".into(),
            String::new(),
            "--dir".into(),
            dir.to_owned(),
        ];
        args.extend(password.iter().flat_map(|p| ["--requirepass".to_owned(), (*p).to_owned()]));
        args
    })
}

fn etcd(test: &str, port: u16) -> Option<Server> {
    start(test, "etcd", port, |port, dir| {
        let peer = free_port();
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        vec![
            format!("--data-dir={dir}/etcd"),
            format!("--listen-client-urls={}", url(port)),
            format!("--advertise-client-urls={}", url(port)),
            format!("--listen-peer-urls={}", url(peer)),
            format!("--initial-advertise-peer-urls={}", url(peer)),
            format!("--initial-cluster=default={}", url(peer)),
        ]
    })
}

fn entry(node: &str, port: u16) -> Entry {
    let addr = SocketAddr::from(([127, 0, 0, 1], port));
    Entry { cluster: "prod".into(), node: node.into(), addr }
}

/// Two nodes find each other, one goes, and those of another cluster are not seen.
async fn finds(source: Source) {
    let (one, two) = (entry("one", 1), entry("two", 2));
    let other = Entry { cluster: "prod2".into(), ..entry("three", 3) };
    let deadline = Instant::now() + PATIENT;
    // A server that has just started may not answer yet.
    while let Err(e) = source.look(&one).await {
        assert!(Instant::now() < deadline, "{e}");
        time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(source.look(&other).await.unwrap().addresses, [other.addr]);
    let mut found = source.look(&two).await.unwrap().addresses;
    found.sort();
    assert_eq!(found, [one.addr, two.addr]);
    source.withdraw(&one).await.unwrap();
    assert_eq!(source.look(&two).await.unwrap().addresses, [two.addr]);
}

/// Away: said at once, with the wait; back: found, without anybody doing anything.
async fn comes_back(source: Source, restart: impl Fn() -> Option<Server>) {
    if restart().is_none() {
        return;
    }
    let (tell, mut news) = mpsc::channel(4);
    let task = tokio::spawn(source.run(entry("one", 1), tell));
    let mut next = async || time::timeout(PATIENT, news.recv()).await.unwrap().unwrap();
    let News { found, again, .. } = next().await;
    let e = found.unwrap_err();
    assert!(e.to_string().contains("cannot be reached"), "{e}");
    assert_eq!(again, WAIT);
    let News { found, again, .. } = next().await;
    assert!(found.is_err());
    assert_eq!(again, 2 * WAIT);
    let server = restart();
    let deadline = Instant::now() + PATIENT;
    loop {
        match next().await.found {
            Ok(found) => {
                assert_eq!(found.addresses, [entry("one", 1).addr]);
                break;
            }
            Err(e) => assert!(Instant::now() < deadline, "{e}"),
        }
    }
    task.abort();
    drop(server);
}

#[tokio::test]
async fn nodes_find_each_other_in_a_redis() {
    let Some(server) = redis("nodes_find_each_other_in_a_redis", free_port(), Some("s3cr:t"))
    else {
        return;
    };
    let url = |login: &str| {
        let text = format!("redis://{login}127.0.0.1:{}/3", server.port);
        Source::Redis(Url::parse(&text, "redis").unwrap())
    };
    let refused = url("").look(&entry("one", 1)).await.unwrap_err().to_string();
    assert!(refused.contains("NOAUTH"), "{refused}");
    let refused = url(":wrong@").look(&entry("one", 1)).await.unwrap_err().to_string();
    assert!(refused.contains("WRONGPASS"), "{refused}");
    finds(url(":s3cr%3at@")).await;
}

#[tokio::test]
async fn nodes_find_each_other_in_an_etcd() {
    let Some(server) = etcd("nodes_find_each_other_in_an_etcd", free_port()) else { return };
    let text = format!("http://127.0.0.1:{}", server.port);
    finds(Source::Etcd(Url::parse(&text, "http").unwrap())).await;
}

#[tokio::test]
async fn a_redis_that_is_away_is_asked_again() {
    let port = free_port();
    let url = Url::parse(&format!("redis://127.0.0.1:{port}"), "redis").unwrap();
    let server = || redis("a_redis_that_is_away_is_asked_again", port, None);
    comes_back(Source::Redis(url), server).await;
}

#[tokio::test]
async fn an_etcd_that_is_away_is_asked_again() {
    let port = free_port();
    let url = Url::parse(&format!("http://127.0.0.1:{port}"), "http").unwrap();
    let server = || etcd("an_etcd_that_is_away_is_asked_again", port);
    comes_back(Source::Etcd(url), server).await;
}

#[tokio::test]
async fn what_is_no_registry_is_said_to_be_none() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut bytes = [0; 1024];
            let _ = io::Read::read(&mut stream, &mut bytes);
            let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno");
        }
    });
    let redis = Url::parse(&format!("redis://127.0.0.1:{port}"), "redis").unwrap();
    let e = Source::Redis(redis).look(&entry("one", 1)).await.unwrap_err();
    assert_eq!(e.to_string(), "answers something else than a Redis");
    let etcd = Url::parse(&format!("http://127.0.0.1:{port}"), "http").unwrap();
    let e = Source::Etcd(etcd).look(&entry("one", 1)).await.unwrap_err();
    assert_eq!(e.to_string(), "answers something else than an etcd of version 3.4 or newer");
    server.join().unwrap();
}

#[tokio::test]
async fn names_and_addresses_resolve() {
    let peers = ["127.0.0.9", "localhost:7000", "[::1]:5"].map(str::to_owned).to_vec();
    let found = Source::Peers(peers).look(&entry("one", 1)).await.unwrap().addresses;
    assert!(found.contains(&"127.0.0.9:7946".parse().unwrap()), "{found:?}");
    assert!(found.contains(&"127.0.0.1:7000".parse().unwrap()), "{found:?}");
    assert!(found.contains(&"[::1]:5".parse().unwrap()), "{found:?}");
    let some = ["127.0.0.9", "no-such-name.invalid"].map(str::to_owned).to_vec();
    let found = Source::Peers(some).look(&entry("one", 1)).await.unwrap();
    assert_eq!(found.addresses, ["127.0.0.9:7946".parse().unwrap()]);
    let why = found.failed.unwrap().to_string();
    assert!(why.starts_with("does not resolve: `no-such-name.invalid`: "), "{why}");
    let e = Source::Dns("no-such-name.invalid".into()).look(&entry("one", 1)).await.unwrap_err();
    assert!(e.to_string().starts_with("cannot be reached: "), "{e}");
}
