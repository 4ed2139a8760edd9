//! What is answered to which path. It needs no operating system: the state goes in, an answer comes out.
//!
//! ```text
//!   /                      the page               /metrics             metrics, OpenMetrics text
//!   /api/status            as `tidegate status --json` says it
//!   /api/live              what the page shows of each limit, every second
//!   /api/minutes           what each limit used in each minute of the last hour
//!   /api/history/NAME      the last hour of a limit
//!   /api/limit/NAME        a limit, its flows, and what holds them back
//! ```

use std::net::IpAddr;

use hyper::{
    StatusCode,
    body::Bytes,
    header::{HeaderName, HeaderValue},
};
use serde::Serialize;
use serde_json::json;
use tidegate_agent::report::LimitReport;
use tidegate_fleet::{
    http::{Answer, JSON, PLAIN, answer},
    status::NodeStatus,
};

use crate::{
    history::History,
    link::StatusHead,
    metrics::{self, View},
    snapshot::{Direction, Limit, Snapshot},
};

const PAGE: &str = include_str!("page/index.html");
const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = include_str!("page/page.js");
const CHARTS: &str = include_str!("page/charts.js");
const ICON: &str = include_str!("page/icon.svg");

/// The page loads what is served here and nothing else, runs no script that is not a file of its own, and is shown
/// in no frame.
const HEADERS: [(HeaderName, HeaderValue); 6] = [
    (
        HeaderName::from_static("content-security-policy"),
        HeaderValue::from_static(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
    ),
    (HeaderName::from_static("x-content-type-options"), HeaderValue::from_static("nosniff")),
    (HeaderName::from_static("x-frame-options"), HeaderValue::from_static("DENY")),
    (HeaderName::from_static("referrer-policy"), HeaderValue::from_static("no-referrer")),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        HeaderValue::from_static("same-origin"),
    ),
    (HeaderName::from_static("cache-control"), HeaderValue::from_static("no-store")),
];

/// What is known.
#[derive(Debug, Default)]
pub struct State {
    /// The name of this host.
    pub host: String,
    pub head: StatusHead,
    /// As it was read.
    pub body: Bytes,
    pub snapshot: Snapshot,
    pub history: History,
    /// Why nothing newer is known.
    pub failed: Option<String>,
}

impl State {
    /// Takes a reading.
    pub fn read(&mut self, head: StatusHead, body: Bytes) {
        match serde_json::from_slice::<Snapshot>(&body) {
            Ok(snapshot) => {
                self.history.push(&snapshot, head.unix_ns, head.monotonic_ns);
                (self.head, self.body, self.snapshot, self.failed) = (head, body, snapshot, None);
            }
            Err(e) => self.failed = Some(e.to_string()),
        }
    }
}

/// What to answer.
#[derive(Debug)]
pub enum Route {
    Answer(Answer),
    /// What the reader says of a limit.
    Look(String),
}

/// Whether a name that a browser has for this server is one of its own: its address, `localhost`, or the host's
/// name. A page of somebody else whose name leads here is refused that way.
pub fn is_own_name(host: Option<&str>, own: &str) -> bool {
    let Some(host) = host else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let short = own.split('.').next().unwrap_or(own);
    address.parse::<IpAddr>().is_ok()
        || ["localhost", own, short].iter().any(|own| own.eq_ignore_ascii_case(name))
}

/// What is at a path, for a GET.
pub fn route(state: &State, path: &str) -> Route {
    const HTML: &str = "text/html; charset=utf-8";
    const CSS: &str = "text/css; charset=utf-8";
    const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
    let ok = |kind, body: Bytes| Route::Answer(answer(StatusCode::OK, kind, body));
    let text = |kind, body: &'static str| ok(kind, Bytes::from_static(body.as_bytes()));
    let json = |value: serde_json::Result<Vec<u8>>| match value {
        Ok(body) => ok(JSON, body.into()),
        Err(e) => Route::Answer(answer(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, e.to_string())),
    };
    match path {
        "/" => return text(HTML, PAGE),
        "/style.css" => return text(CSS, STYLE),
        "/page.js" => return text(JAVASCRIPT, SCRIPT),
        "/charts.js" => return text(JAVASCRIPT, CHARTS),
        "/icon.svg" => return text("image/svg+xml", ICON),
        _ => {}
    }
    if state.body.is_empty() {
        let why = state.failed.as_deref().unwrap_or("nothing has been read yet; ask again");
        return Route::Answer(answer(StatusCode::SERVICE_UNAVAILABLE, PLAIN, format!("{why}\n")));
    }
    match path.trim_start_matches('/').split('/').collect::<Vec<_>>()[..] {
        ["metrics"] => {
            let State { head, snapshot, history, .. } = state;
            match metrics::render(View { snapshot, head, history }) {
                Ok(text) => ok(metrics::CONTENT_TYPE, text.into()),
                Err(e) => {
                    let why = e.to_string();
                    Route::Answer(answer(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, why))
                }
            }
        }
        ["api", "status"] => ok(JSON, state.body.clone()),
        ["api", "live"] => json(serde_json::to_vec(&Live::of(state))),
        ["api", "minutes"] => json(serde_json::to_vec(&minutes(state))),
        ["api", "history", name] => match state.history.of(name) {
            Some(history) => json(serde_json::to_vec(&history)),
            None => not_found(&format!("nothing is known of a limit `{name}`\n")),
        },
        ["api", "limit", name] => match state.snapshot.limits.iter().any(|l| l.name == name) {
            true => Route::Look(name.to_owned()),
            false => not_found(&format!("there is no limit `{name}`\n")),
        },
        _ => not_found("there are / and /metrics, and for programs /api/status\n"),
    }
}

fn not_found(why: &str) -> Route {
    Route::Answer(answer(StatusCode::NOT_FOUND, PLAIN, why.to_owned()))
}

/// Every answer has these.
pub fn secure(answer: &mut Answer) {
    answer.headers_mut().extend(HEADERS);
}

fn minutes(state: &State) -> serde_json::Value {
    let unix_s = u32::try_from(state.head.unix_ns / 1_000_000_000).unwrap_or(u32::MAX);
    let round = |rates: Vec<Option<f32>>| -> Vec<Option<u64>> {
        rates.into_iter().map(|rate| rate.map(|rate| rate as u64)).collect()
    };
    let of = |(name, [egress, ingress]): (&str, [Vec<Option<f32>>; 2])| {
        (name.to_owned(), json!({ "egress": round(egress), "ingress": round(ingress) }))
    };
    state.history.minutes(unix_s).map(of).collect()
}

/// What the page shows every second.
#[derive(Serialize)]
struct Live<'a> {
    host: &'a str,
    unix_ns: u64,
    failed: Option<&'a str>,
    alarms: &'a [String],
    waiting: &'a [String],
    limits: Vec<LiveLimit<'a>>,
    agent: Option<LiveAgent<'a>>,
    fleet: Option<&'a NodeStatus>,
}

#[derive(Serialize)]
struct LiveLimit<'a> {
    name: &'a str,
    state: &'a str,
    parent: Option<&'a str>,
    /// In words.
    on: String,
    scheme: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    egress: Option<LiveDirection>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ingress: Option<LiveDirection>,
}

#[derive(Serialize)]
struct LiveDirection {
    rate_bit_s: u64,
    may_use_bit_s: u64,
    used_bit_s: Option<u64>,
    backlog_ns: i64,
    flows: Option<u32>,
    share_bit_s: Option<u64>,
    passed_packets: u64,
    passed_bytes: u64,
    dropped_packets: u64,
}

#[derive(Serialize)]
struct LiveAgent<'a> {
    works: bool,
    directory: &'a str,
    /// Limits of its files that have something to say beyond what is on the host.
    limits: Vec<&'a LimitReport>,
}

impl<'a> Live<'a> {
    fn of(state: &'a State) -> Live<'a> {
        let State { head, snapshot, history, failed, .. } = state;
        let agent = snapshot.agent.as_ref().map(|agent| LiveAgent {
            works: agent.works(),
            directory: &agent.report.directory,
            limits: {
                let limits = agent.report.limits.iter();
                limits
                    .filter(|limit| limit.reason.is_some() || limit.schedule_words().is_some())
                    .collect()
            },
        });
        Live {
            host: &state.host,
            unix_ns: head.unix_ns,
            failed: failed.as_deref(),
            alarms: &head.warnings.alarms,
            waiting: &head.warnings.waiting,
            limits: snapshot.limits.iter().map(|limit| LiveLimit::of(limit, history)).collect(),
            agent,
            fleet: snapshot.fleet.as_ref(),
        }
    }
}

impl<'a> LiveLimit<'a> {
    fn of(limit: &'a Limit, history: &History) -> LiveLimit<'a> {
        let live = |direction: &Option<Direction>, name| {
            let d = direction.as_ref()?;
            let (passed_packets, passed_bytes) = d.charged();
            Some(LiveDirection {
                rate_bit_s: d.rate_bit_s,
                may_use_bit_s: d.may_use_bit_s(),
                used_bit_s: history.used_bit_s(&limit.name, name).map(|used| used as u64),
                backlog_ns: d.backlog_ns,
                flows: d.fair.map(|fair| fair.flows),
                share_bit_s: d.fair.map(|fair| fair.share_bit_s),
                passed_packets,
                passed_bytes,
                dropped_packets: d.dropped().0,
            })
        };
        LiveLimit {
            name: &limit.name,
            state: &limit.state,
            parent: limit.parent.as_deref(),
            on: limit.scope().map_or_else(String::new, |scope| scope.to_string()),
            scheme: limit.scheme.as_deref(),
            egress: live(&limit.egress, "egress"),
            ingress: live(&limit.ingress, "ingress"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let mut state = State { host: "web-1".to_owned(), ..State::default() };
        let body = Bytes::from_static(include_bytes!("snapshot/example.json"));
        for second in 1..=2 {
            let now = second * 1_000_000_000;
            let head = StatusHead { unix_ns: now, monotonic_ns: now, ..StatusHead::default() };
            state.read(head, body.clone());
        }
        state
    }

    fn get(state: &State, path: &str) -> (StatusCode, String) {
        let Route::Answer(answer) = route(state, path) else { panic!("{path}") };
        let (head, body) = answer.into_parts();
        // A whole body has no frames that wait.
        let body = format!("{body:?}");
        (head.status, body)
    }

    #[test]
    fn every_path_has_its_answer() {
        let state = state();
        for path in ["/", "/style.css", "/page.js", "/charts.js", "/icon.svg", "/metrics"] {
            assert_eq!(get(&state, path).0, StatusCode::OK, "{path}");
        }
        for path in ["/api/status", "/api/live", "/api/minutes", "/api/history/batch"] {
            assert_eq!(get(&state, path).0, StatusCode::OK, "{path}");
        }
        assert!(matches!(route(&state, "/api/limit/batch"), Route::Look(name) if name == "batch"));
        for path in ["/api/limit/none", "/api/history/none", "/etc/passwd", "//", "/api"] {
            assert_eq!(get(&state, path).0, StatusCode::NOT_FOUND, "{path}");
        }
        let (status, _) = get(&State::default(), "/metrics");
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "nothing was read");
    }

    #[test]
    fn what_could_not_be_read_is_said_beside_the_last_reading() {
        let mut state = state();
        let before = ["/metrics", "/api/status", "/api/history/batch"].map(|p| get(&state, p));
        let live = |state: &State| serde_json::to_value(Live::of(state)).unwrap();
        let mut then = live(&state);
        assert_eq!(then["failed"], serde_json::Value::Null);
        // As the server has it, and a reading that is none.
        state.failed = Some("no store".to_owned());
        for why in ["no store", "expected value at line 1 column 1"] {
            then["failed"] = why.into();
            assert_eq!(live(&state), then);
            let now = ["/metrics", "/api/status", "/api/history/batch"].map(|p| get(&state, p));
            assert_eq!(now, before, "{why}");
            state.read(StatusHead::default(), Bytes::from_static(b"?"));
        }
    }

    #[test]
    fn the_page_has_what_it_shows() {
        let live = serde_json::to_string_pretty(&Live::of(&state())).unwrap();
        insta::assert_snapshot!(live);
    }

    #[test]
    fn a_name_of_somebody_else_is_refused() {
        for own in [
            "127.0.0.1:9465",
            "[::1]:9465",
            "[fd00::1]",
            "localhost:80",
            "WEB-1",
            "web-1.example.org:1",
        ] {
            assert!(is_own_name(Some(own), "web-1.example.org"), "{own}");
        }
        for other in
            ["evil.example", "evil.example:9465", "web-1.evil.example", "", "127.0.0.1.evil"]
        {
            assert!(!is_own_name(Some(other), "web-1.example.org"), "{other}");
        }
        assert!(!is_own_name(None, "web-1"));
    }

    #[test]
    fn the_page_asks_nobody_else() {
        for text in [PAGE, STYLE, SCRIPT, CHARTS] {
            let links = text.replace("http://www.w3.org/2000/svg", "");
            assert!(
                !links.contains("http:") && !links.contains("https:") && !links.contains("//#")
            );
        }
        assert!(
            !PAGE.contains("<style") && !PAGE.contains(" style=") && !PAGE.contains(" onclick=")
        );
        assert_eq!(
            PAGE.matches("<script").count(),
            PAGE.matches("<script type=\"module\" src=\"/").count()
        );
    }
}
