//! Against the real servers, on loopback and ports of their own.

use std::{
    fs,
    io::Write,
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Instant,
};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tidegate_host::{
    fleet::{TlsFiles, url::Url},
    spec::Spec,
};
use tokio::task::{LocalSet, yield_now};

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

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn redis(test: &str, port: u16, more: &[&str]) -> Option<Server> {
    start(test, "redis-server", port, |port, dir| {
        let port = port.to_string();
        let common = ["--port", &port, "--bind", "127.0.0.1", "--save", "", "--dir", dir];
        words(&[&common[..], more].concat())
    })
}

fn etcd(test: &str, scheme: &str, port: u16, more: &[&str]) -> Option<Server> {
    start(test, "etcd", port, |port, dir| {
        let peer = format!("http://127.0.0.1:{}", free_port());
        let client = format!("{scheme}://127.0.0.1:{port}");
        let common = [
            format!("--data-dir={dir}/etcd"),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=default={peer}"),
        ];
        [common.to_vec(), words(more)].concat()
    })
}

/// A registry of this host.
fn registry(scheme: &str, port: u16, tls: TlsFiles) -> Registry {
    let text = format!("{scheme}://127.0.0.1:{port}");
    let base = if scheme.starts_with("redis") { "redis" } else { "http" };
    Registry { url: Url::parse(&text, base).unwrap(), tls }
}

/// Certificates of servers and of nodes, all signed by one authority, in files.
struct Certificates(tempfile::TempDir);

impl Certificates {
    fn new() -> Certificates {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, label: &str, der: &[u8]| {
            let text = BASE64_STANDARD.encode(der);
            let lines: Vec<_> =
                text.as_bytes().chunks(64).map(|l| str::from_utf8(l).unwrap()).collect();
            let pem =
                format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"));
            fs::write(dir.path().join(name), pem).unwrap();
        };
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority.distinguished_name.push(DnType::CommonName, "authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        write("ca.pem", "CERTIFICATE", authority.self_signed(&key).unwrap().der());
        let issuer = Issuer::new(authority, key);
        for name in ["server", "node"] {
            let key = KeyPair::generate().unwrap();
            let leaf = CertificateParams::new(words(&["127.0.0.1"])).unwrap();
            let cert = leaf.signed_by(&key, &issuer).unwrap();
            write(&format!("{name}.pem"), "CERTIFICATE", cert.der());
            write(&format!("{name}.key"), "PRIVATE KEY", &key.serialize_der());
        }
        Certificates(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

/// Nodes find each other in a registry that wants TLS, and a certificate of them; others get no further.
async fn finds_over_tls(
    certificates: &Certificates,
    scheme: &str,
    source: impl Fn(Registry) -> Source,
    port: u16,
) {
    let path = |name| Some(certificates.path(name));
    let files = TlsFiles { ca: path("ca.pem"), cert: path("node.pem"), key: path("node.key") };
    finds(source(registry(scheme, port, files.clone()))).await;
    let cases = [
        (TlsFiles { ca: path("node.pem"), ..files.clone() }, "invalid peer certificate"),
        (
            TlsFiles { ca: path("node.key"), ..files.clone() },
            "node.key: there is no certificate in it",
        ),
        (TlsFiles { key: path("none.key"), ..files.clone() }, "none.key: No such file"),
        (TlsFiles { key: path(""), ..files.clone() }, "it is not a regular file"),
        (TlsFiles { key: path("ca.pem"), ..files.clone() }, "ca.pem: "),
        (TlsFiles { cert: None, key: None, ..files }, "cannot be reached: "),
    ];
    for (files, why) in cases {
        let source = source(registry(scheme, port, files));
        let refused = source.look(&entry("one", 1)).await.unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
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
    let password = ["--requirepass", "s3cr:t"];
    let Some(server) = redis("nodes_find_each_other_in_a_redis", free_port(), &password) else {
        return;
    };
    let source = |login: &str| {
        let text = format!("redis://{login}127.0.0.1:{}/3", server.port);
        Source::Redis(Registry {
            url: Url::parse(&text, "redis").unwrap(),
            tls: TlsFiles::default(),
        })
    };
    let refused = source("").look(&entry("one", 1)).await.unwrap_err().to_string();
    assert!(refused.contains("NOAUTH"), "{refused}");
    let refused = source(":wrong@").look(&entry("one", 1)).await.unwrap_err().to_string();
    assert!(refused.contains("WRONGPASS"), "{refused}");
    finds(source(":s3cr%3at@")).await;
}

#[tokio::test]
async fn nodes_find_each_other_in_an_etcd() {
    let Some(server) = etcd("nodes_find_each_other_in_an_etcd", "http", free_port(), &[]) else {
        return;
    };
    finds(Source::Etcd(registry("http", server.port, TlsFiles::default()))).await;
}

#[tokio::test]
async fn nodes_find_each_other_in_a_redis_over_tls() {
    let certificates = Certificates::new();
    let [ca, cert, key] =
        ["ca.pem", "server.pem", "server.key"].map(|name| certificates.text(name));
    let tls_port = free_port().to_string();
    let more = [
        ["--tls-port", &tls_port],
        ["--tls-ca-cert-file", &ca],
        ["--tls-cert-file", &cert],
        ["--tls-key-file", &key],
    ];
    let name = "nodes_find_each_other_in_a_redis_over_tls";
    let Some(_server) = redis(name, free_port(), more.as_flattened()) else { return };
    let tls_port = tls_port.parse().unwrap();
    wait_for_port(tls_port);
    finds_over_tls(&certificates, "rediss", Source::Redis, tls_port).await;
}

#[tokio::test]
async fn nodes_find_each_other_in_an_etcd_over_tls() {
    let certificates = Certificates::new();
    let [ca, cert, key] =
        ["ca.pem", "server.pem", "server.key"].map(|name| certificates.text(name));
    let more = [
        "--client-cert-auth",
        &format!("--trusted-ca-file={ca}"),
        &format!("--cert-file={cert}"),
        &format!("--key-file={key}"),
    ];
    let name = "nodes_find_each_other_in_an_etcd_over_tls";
    let Some(server) = etcd(name, "https", free_port(), &more) else { return };
    finds_over_tls(&certificates, "https", Source::Etcd, server.port).await;
}

#[tokio::test]
async fn a_redis_that_is_away_is_asked_again() {
    let port = free_port();
    let server = || redis("a_redis_that_is_away_is_asked_again", port, &[]);
    comes_back(Source::Redis(registry("redis", port, TlsFiles::default())), server).await;
}

#[tokio::test]
async fn an_etcd_that_is_away_is_asked_again() {
    let port = free_port();
    let server = || etcd("an_etcd_that_is_away_is_asked_again", "http", port, &[]);
    comes_back(Source::Etcd(registry("http", port, TlsFiles::default())), server).await;
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
    let registry = |scheme| registry(scheme, port, TlsFiles::default());
    let e = Source::Redis(registry("redis")).look(&entry("one", 1)).await.unwrap_err();
    assert_eq!(e.to_string(), "answers something else than a Redis");
    let e = Source::Etcd(registry("http")).look(&entry("one", 1)).await.unwrap_err();
    assert_eq!(e.to_string(), "answers something else than an etcd of version 3.4 or newer");
    server.join().unwrap();
}

/// In a process of its own, as the authorities are those that its environment names.
#[tokio::test]
async fn a_host_that_trusts_no_authority_is_told_what_to_do() {
    const NAME: &str = "discovery::tests::a_host_that_trusts_no_authority_is_told_what_to_do";
    const FILE: &str = "SSL_CERT_FILE";
    const NONE: &str = "/no/such/authorities.pem";
    if std::env::var(FILE).is_ok_and(|file| file == NONE) {
        let registry = registry("https", 1, TlsFiles::default());
        let e = Source::Etcd(registry).look(&entry("one", 1)).await.unwrap_err().to_string();
        assert!(e.contains("this host trusts no authority (") && e.contains(NONE), "{e}");
        assert!(e.ends_with("name one with tls_ca, or install ca-certificates"), "{e}");
        return;
    }
    let mut itself = Command::new(std::env::current_exe().unwrap());
    itself.args(["--exact", NAME, "--nocapture"]).env_remove("SSL_CERT_DIR").env(FILE, NONE);
    let output = itself.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}

/// A reload asks the registry anew.
#[test]
fn other_files_are_another_source() {
    let sources = |line: &str| {
        let text =
            format!("[fleet]\nname = \"prod\"\nkeys = \"k\"\netcd = \"https://10.0.0.9\"\n{line}");
        Source::of(&Spec::parse("f.toml", &text).unwrap().fleet.unwrap())
    };
    assert_eq!(sources(""), sources(""));
    assert_ne!(sources(""), sources("tls_ca = \"ca.pem\""));
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

#[tokio::test]
async fn news_of_sources_that_are_asked_no_more_is_dropped() {
    let local = LocalSet::new();
    let test = local.run_until(async {
        let own = entry("one", 1);
        let peers = |port| vec![Source::Peers(vec![format!("127.0.0.1:{port}")])];
        for after in [vec![], peers(8)] {
            let mut sources = Sources::new(peers(7), &own);
            while sources.news.is_empty() {
                yield_now().await;
            }
            sources = Sources::new(after.clone(), &own);
            let found = sources.news().await.map(|news| news.found.unwrap().addresses[0].port());
            assert_eq!(found, after.first().map(|_| 8));
        }
    });
    time::timeout(PATIENT, test).await.unwrap();
}
