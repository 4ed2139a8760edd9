//! The page in headless Chromium, with real traffic behind it. With `TIDEGATE_SCREENSHOTS=DIR` also
//! pictures of it, after `TIDEGATE_SCREENSHOTS_AFTER` seconds of traffic:
//!
//!     TIDEGATE_SCREENSHOTS=docs/images TIDEGATE_SCREENSHOTS_AFTER=300 \
//!     cargo test -p tidegate --test e2e root_web_page

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use super::{Web, example_daemon, limits, sink, transfer};
use crate::{
    common::{Guard, Place, skip, text, wait_for},
    need_root,
    traffic::sender,
};

/// The page asks for its first values within this; the browser's clock waits for answers.
const BUDGET_MS: &str = "--virtual-time-budget=5000";

struct Browser<'a> {
    profile: &'a Path,
}

impl Browser<'_> {
    fn run(&self, flags: &[&str], address: &str) -> Option<String> {
        let profile = format!("--user-data-dir={}", self.profile.display());
        let output = Command::new("chromium")
            .args([
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                BUDGET_MS,
            ])
            .args([&*profile, "--lang=en-GB"])
            .args(flags)
            .arg(address)
            .output()
            .ok()?;
        output.status.success().then(|| text(&output))
    }

    fn shoot(&self, file: &Path, size: &str, dark: bool, address: &str) {
        let (file, size) =
            (format!("--screenshot={}", file.display()), format!("--window-size={size}"));
        let colours = format!("--blink-settings=preferredColorScheme={}", u8::from(!dark));
        self.run(&[&file, &size, &colours], address).expect("a picture");
    }
}

/// The numbers behind cells of this class, in the part of the page that is about a limit.
fn values(page: &str, limit: &str, class: &str) -> Vec<String> {
    let part = page.split("<tbody").find(|part| part.contains(&format!("#/limit/{limit}\"")));
    let part = part.unwrap_or_else(|| panic!("no limit {limit} in {page}"));
    let cells = part.split("<td ").filter(|cell| {
        let attributes = cell.split('>').next().unwrap_or_default();
        attributes.contains(&format!("class=\"number {class}"))
    });
    let value =
        |cell: &str| cell.split("data-value=\"").nth(1)?.split('"').next().map(str::to_owned);
    cells.filter_map(value).collect()
}

#[test]
fn root_web_page_shows_what_status_says() {
    need_root!();
    if Command::new("chromium").arg("--version").output().is_err() {
        return skip("no chromium: apt install chromium");
    }
    let place = Place::new();
    let groups = limits(&place);
    let profile = place.dir().join("chromium");
    let browser = Browser { profile: &profile };
    example_daemon(&place.dir().join("run/node.sock"));
    let web = Web::start(&place);
    transfer(&place, &groups);
    let status = web.settled();
    let page = format!("http://127.0.0.1:{}/", web.port);
    let dom = wait_for("the page", || {
        browser.run(&["--dump-dom"], &page).filter(|dom| dom.contains("data-ready=\"yes\""))
    });
    for limit in status["limits"].as_array().unwrap() {
        let name = limit["name"].as_str().unwrap();
        let state = format!("data-value=\"{}\"", limit["state"].as_str().unwrap());
        let part = dom.split("<tbody").find(|part| part.contains(&format!("#/limit/{name}\"")));
        assert!(part.unwrap().contains(&state), "{name}: {state}");
        let of = ["egress", "ingress"].iter().filter(|d| limit[d].is_object());
        let sum = |d: &str, outcomes: &[&str], unit: &str| {
            let counted =
                outcomes.iter().map(|o| limit[d][format!("{o}_{unit}")].as_u64().unwrap());
            counted.sum::<u64>().to_string()
        };
        let drops = ["drop_full", "drop_reserve", "drop_early"];
        let (mut rates, mut passed, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
        for d in of {
            rates.push(limit[d]["rate_bit_s"].to_string());
            passed.push(sum(d, &["pass", "mark", "slow"], "bytes"));
            dropped.push(sum(d, &drops, "packets"));
        }
        assert_eq!(values(&dom, name, "rate"), rates, "{name}");
        assert_eq!(values(&dom, name, "passed"), passed, "{name}");
        assert_eq!(values(&dom, name, "dropped"), dropped, "{name}");
    }
    // What waits stands on top, and each host of a group has its part.
    let attention = dom.split("id=\"attention\"").nth(1).unwrap().split("<main").next().unwrap();
    assert!(attention.contains("Waiting: ") && attention.contains("mail"), "{attention}");
    let groups_shown = dom.split("id=\"groups\"").nth(1).unwrap();
    for (host, share) in [("a (this host)", "40000000"), ("b", "24000000")] {
        assert!(groups_shown.contains(host), "{groups_shown}");
        assert!(groups_shown.contains(&format!("data-value=\"{share}\"")), "{groups_shown}");
    }
    if let Some(dir) = env::var_os("TIDEGATE_SCREENSHOTS") {
        pictures(&place, &browser, &page, Path::new(&dir), &groups);
    }
    place.ok(&["detach"]);
}

/// Serves what a server at `port` does, and refuses paths that begin with one of these. Its own port.
fn without(port: u16, refused: &'static [&'static str]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    let serve = move |mut stream: TcpStream| -> io::Result<()> {
        let lines = BufReader::new(&stream).lines().map_while(Result::ok);
        let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
        let path = head.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default();
        if refused.iter().any(|start| path.starts_with(start)) {
            let head = "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n";
            return write!(stream, "{head}content-length: 7\r\n\r\nnot yet");
        }
        let mut server = TcpStream::connect(("127.0.0.1", port))?;
        write!(server, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        io::copy(&mut server, &mut stream).map(drop)
    };
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream));
        }
    });
    own
}

/// A limit that is opened directly may have its history before the first reading of all.
#[test]
fn root_web_page_of_a_limit_waits_for_the_first_reading() {
    need_root!();
    if Command::new("chromium").arg("--version").output().is_err() {
        return skip("no chromium: apt install chromium");
    }
    let place = Place::new();
    let _groups = limits(&place);
    let profile = place.dir().join("chromium");
    let browser = Browser { profile: &profile };
    let web = Web::start(&place);
    let page = format!(
        "http://127.0.0.1:{}/#/limit/api",
        without(web.port, &["/api/live", "/api/limit/"])
    );
    let dom = wait_for("the page", || {
        let dom = browser.run(&["--dump-dom"], &page);
        dom.filter(|dom| dom.contains("nothing new is known: not yet"))
    });
    let shown = dom.split("id=\"detail\"").nth(1).unwrap();
    assert!(shown.contains("not yet") && !shown.contains("null"), "{shown}");
    place.ok(&["detach"]);
}

/// Waits until the page has these words, where there is a browser.
pub fn says(place: &Place, web: &Web<'_>, words: &str) {
    if Command::new("chromium").arg("--version").output().is_err() {
        return skip("no chromium: apt install chromium");
    }
    let profile = place.dir().join("chromium");
    let (browser, page) =
        (Browser { profile: &profile }, format!("http://127.0.0.1:{}/", web.port));
    wait_for("the page", || browser.run(&["--dump-dom"], &page).filter(|dom| dom.contains(words)));
}

/// Pictures with traffic that goes on.
fn pictures(
    place: &Place,
    browser: &Browser<'_>,
    page: &str,
    dir: &Path,
    groups: &[tidegate_sys::cgroup::Cgroup],
) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let dir = root.join(dir);
    std::fs::create_dir_all(&dir).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || sink(&mut stream));
        }
    });
    let start = |group| {
        let mut command = place.inside(group, "env");
        sender(&mut command, &format!("stream {address} 16000"));
        Guard(command.spawn().unwrap())
    };
    let _senders: Vec<_> = groups.iter().chain([&groups[0], &groups[2]]).map(start).collect();
    let after = env::var("TIDEGATE_SCREENSHOTS_AFTER").ok().and_then(|s| s.parse().ok());
    // History takes its time.
    let until = Instant::now() + Duration::from_secs(after.unwrap_or(5));
    thread::sleep(until - Instant::now());
    browser.shoot(&dir.join("web.png"), "1280,880", false, page);
    browser.shoot(&dir.join("web-dark.png"), "1280,880", true, page);
    let limit = format!("{page}#/limit/api");
    browser.shoot(&dir.join("web-limit.png"), "1280,1010", false, &limit);
}
