//! Metrics as OpenMetrics text, in base units: bytes and seconds. One table, `METRICS`, has every metric;
//! the page `docs/metrics.md` is made from it.

use std::{borrow::Cow, collections::BTreeSet, fmt};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text::encode},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};
use tidegate_agent::{
    agent::answers,
    report::{LimitReport, LimitState},
    status::AgentStatus,
};
use tidegate_sys::{BUILD, intf::OUTCOME_TABLE};

use crate::{
    history::History,
    link::StatusHead,
    snapshot::{Direction, Limit, Snapshot},
};

mod fleet;

/// Limits that have metrics; those beyond, in the order of their names, are only counted. A limit has at most
/// [`SERIES_MAX`] series.
pub const METRIC_LIMITS_MAX: usize = 1000;
/// Series of a limit at most.
pub const SERIES_MAX: usize = 51;
/// What OpenMetrics text is called.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Before every name.
const PREFIX: &str = "tidegate";

/// What metrics are made of.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub snapshot: &'a Snapshot,
    pub head: &'a StatusHead,
    pub history: &'a History,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    Whole(u64),
    Real(f64),
}

/// The series of a metric: the values of its labels, and its value.
pub type Series = Vec<(Vec<String>, Number)>;

/// One metric.
#[derive(Debug)]
pub struct Metric {
    /// Without the prefix `tidegate_`, and of a counter without `_total`.
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
    read: fn(View<'_>, &mut Series),
}

impl Metric {
    const fn counter(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
        read: fn(View<'_>, &mut Series),
    ) -> Metric {
        Metric { name, kind: Kind::Counter, labels, help, read }
    }

    const fn gauge(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
        read: fn(View<'_>, &mut Series),
    ) -> Metric {
        Metric { name, kind: Kind::Gauge, labels, help, read }
    }
}

const DIRECTION: &[&str] = &["limit", "direction"];
const OUTCOME: &[&str] = &["limit", "direction", "outcome"];

/// Those of limits, the agent and this process; [`fleet::METRICS`] has the others.
const METRICS: [Metric; 22] = [
    Metric::counter("limit_packets", OUTCOME, "Packets by outcome", |view, to| {
        by_outcome(view, to, |(packets, _)| packets);
    }),
    Metric::counter("limit_bytes", OUTCOME, "Bytes on the wire by outcome", |view, to| {
        by_outcome(view, to, |(_, bytes)| bytes);
    }),
    Metric::counter(
        "limit_at_risk_packets",
        &["limit", "direction", "cause"],
        "Dropped packets for which TCP waits for a timer",
        |view, to| {
            for (limit, name, direction) in directions(view) {
                for (key, packets) in direction.at_risk.iter().flatten() {
                    let Some(packets) = packets else { continue };
                    let cause = key.trim_end_matches("_packets");
                    to.push((text([limit, name, cause]), Number::Whole(*packets)));
                }
            }
        },
    ),
    Metric::gauge(
        "limit_rate_bytes_per_second",
        DIRECTION,
        "The rate of the limit; with a parent its ceiling",
        |view, to| by_direction(view, to, |d| Some(d.rate_bit_s as f64 / 8.0)),
    ),
    Metric::gauge(
        "limit_available_bytes_per_second",
        DIRECTION,
        "The rate that it may use now: with a parent its present part of that",
        |view, to| by_direction(view, to, |d| Some(d.may_use_bit_s() as f64 / 8.0)),
    ),
    Metric::gauge(
        "limit_used_bytes_per_second",
        DIRECTION,
        "What passed and was charged in the last second",
        |view, to| {
            for (limit, name, _) in directions(view) {
                let used = view.history.used_bit_s(limit, name);
                to.extend(used.map(|used| (text([limit, name]), real(f64::from(used) / 8.0))));
            }
        },
    ),
    Metric::gauge(
        "limit_backlog_seconds",
        DIRECTION,
        "How far the queue is behind, as time at the rate; negative is unused credit",
        |view, to| by_direction(view, to, |d| Some(d.backlog_ns as f64 / 1e9)),
    ),
    Metric::gauge("limit_flows", DIRECTION, "Flows among which it is shared", |view, to| {
        by_direction(view, to, |d| Some(f64::from(d.fair?.flows)));
    }),
    Metric::gauge(
        "limit_flow_share_bytes_per_second",
        DIRECTION,
        "What each of its flows may send",
        |view, to| by_direction(view, to, |d| Some(d.fair?.share_bit_s as f64 / 8.0)),
    ),
    Metric::gauge(
        "limit_info",
        &["limit", "kind", "scope", "scheme", "parent"],
        "Always 1: what the limit is on, and how it acts",
        |view, to| {
            for limit in limits(view) {
                let scope = limit.scope();
                let (kind, scope) = scope.as_ref().map_or(("", ""), |s| (s.kind(), s.name()));
                let scheme = limit.scheme.as_deref().unwrap_or_default();
                let parent = limit.parent.as_deref().unwrap_or_default();
                to.push((text([&limit.name, kind, scope, scheme, parent]), Number::Whole(1)));
            }
        },
    ),
    Metric::gauge("limit_in_force", &["limit"], "1: the limit is in force", |view, to| {
        for limit in limits(view) {
            to.push((text([&limit.name]), flag(limit.state == "in_force")));
        }
        for limit in missing(view) {
            to.push((text([&limit.name]), flag(false)));
        }
    }),
    Metric::gauge(
        "limit_waiting",
        &["limit"],
        "1: what the limit is to be on does not exist",
        |view, to| {
            let refused = of_files(view).filter(|limit| limit.state == LimitState::Refused);
            let refused: BTreeSet<_> = refused.map(|limit| &*limit.name).collect();
            for limit in limits(view) {
                let waits = limit.state == "waiting" && !refused.contains(&*limit.name);
                to.push((text([&limit.name]), flag(waits)));
            }
            for limit in missing(view) {
                to.push((text([&limit.name]), flag(limit.state == LimitState::Waiting)));
            }
        },
    ),
    Metric::gauge(
        "limit_required",
        &["limit"],
        "1: the limit must be in force, also if what it is to be on does not exist",
        |view, to| {
            for limit in limits(view) {
                to.push((text([&limit.name]), flag(limit.required)));
            }
            for limit in missing(view) {
                to.push((text([&limit.name]), flag(limit.required)));
            }
        },
    ),
    Metric::gauge(
        "limit_schedule_info",
        &["limit", "row"],
        "Always 1: the row of the limit's schedule that holds",
        |view, to| {
            let agent = view.snapshot.agent.iter().flat_map(|agent| &agent.report.limits);
            for limit in agent.take(METRIC_LIMITS_MAX) {
                let row = limit.schedule.as_ref();
                to.extend(row.map(|row| (text([&limit.name, row]), Number::Whole(1))));
            }
        },
    ),
    Metric::gauge("limits_without_metrics", &[], "Limits beyond the first 1000", |view, to| {
        let all = view.snapshot.limits.len();
        to.push((Vec::new(), Number::Whole(all.saturating_sub(METRIC_LIMITS_MAX) as u64)));
    }),
    Metric::gauge("warnings", &[], "Number of warnings in `tidegate status`", |view, to| {
        to.push((Vec::new(), Number::Whole(view.head.warnings.alarms.len() as u64)));
    }),
    Metric::gauge(
        "agent_up",
        &[],
        "1: the agent works; 0: it has ended, is stopped, hangs, or has not run since the host started; \
         absent: nothing asks for it",
        |view, to| {
            let agent = view.snapshot.agent.as_ref().filter(|agent| agent.is_wanted());
            let works = agent.map(AgentStatus::works).or(view.head.agent_missed.then_some(false));
            to.extend(works.map(|works| (Vec::new(), flag(works))));
        },
    ),
    Metric::gauge(
        "agent_limits",
        &["state"],
        "Limits of the agent's files by state",
        |view, to| {
            let Some(agent) = &view.snapshot.agent else { return };
            for (state, name) in AGENT_STATES {
                let count = agent.report.limits.iter().filter(|limit| limit.state == state);
                to.push((text([name]), Number::Whole(count.count() as u64)));
            }
        },
    ),
    Metric::gauge("agent_file_errors", &[], "Errors in the agent's files", |view, to| {
        let agent = view.snapshot.agent.as_ref();
        let errors = agent.map(|agent| agent.report.errors.len() as u64);
        to.extend(errors.map(|errors| (Vec::new(), Number::Whole(errors))));
    }),
    Metric::gauge(
        "agent_engine_up",
        &["socket"],
        "1: an engine of containers answers",
        |view, to| {
            let engines = view.snapshot.agent.iter().flat_map(|agent| &agent.report.engines);
            for (socket, state) in engines {
                to.push((text([socket]), flag(answers(state))));
            }
        },
    ),
    Metric::gauge(
        "reading_duration_seconds",
        &[],
        "How long it took to read all limits, the last time",
        |view, to| to.push((Vec::new(), real(view.head.took_ns as f64 / 1e9))),
    ),
    Metric::gauge("build_info", &["version", "build"], "Always 1: what runs here", |_, to| {
        to.push((text([env!("CARGO_PKG_VERSION"), BUILD]), Number::Whole(1)));
    }),
];

const AGENT_STATES: [(LimitState, &str); 4] = [
    (LimitState::InForce, "in_force"),
    (LimitState::Waiting, "waiting"),
    (LimitState::Refused, "refused"),
    (LimitState::Off, "off"),
];

/// Every metric, in the order in which it is written.
pub fn all() -> impl Iterator<Item = &'static Metric> {
    static OF_HOST: [Metric; 22] = METRICS;
    static OF_FLEET: [Metric; 19] = fleet::METRICS;
    OF_HOST.iter().chain(&OF_FLEET)
}

fn text<const N: usize>(labels: [&str; N]) -> Vec<String> {
    labels.map(str::to_owned).to_vec()
}

fn flag(is: bool) -> Number {
    Number::Whole(u64::from(is))
}

fn real(value: f64) -> Number {
    Number::Real(value)
}

fn limits<'a>(view: View<'a>) -> impl Iterator<Item = &'a Limit> {
    view.snapshot.limits.iter().take(METRIC_LIMITS_MAX)
}

/// What the agent says of the limits of its files; not of those that containers and pods ask for and cannot
/// have.
fn of_files<'a>(view: View<'a>) -> impl Iterator<Item = &'a LimitReport> {
    let reports = view.snapshot.agent.iter().flat_map(|agent| &agent.report.limits);
    reports.filter(|limit| !limit.guest)
}

/// Limits of the agent's files that are to be on the host, and are neither on it nor wait there.
fn missing<'a>(view: View<'a>) -> impl Iterator<Item = &'a LimitReport> {
    let on_host: BTreeSet<_> = view.snapshot.limits.iter().map(|limit| &*limit.name).collect();
    let room = METRIC_LIMITS_MAX.saturating_sub(on_host.len());
    let shall_be = of_files(view).filter(|limit| limit.state != LimitState::Off);
    shall_be.filter(move |limit| !on_host.contains(&*limit.name)).take(room)
}

fn directions<'a>(view: View<'a>) -> impl Iterator<Item = (&'a str, &'static str, &'a Direction)> {
    limits(view).flat_map(|limit| limit.directions().map(|(name, d)| (&*limit.name, name, d)))
}

fn by_direction(view: View<'_>, to: &mut Series, read: fn(&Direction) -> Option<f64>) {
    let values = directions(view);
    to.extend(values.filter_map(|(limit, name, d)| Some((text([limit, name]), real(read(d)?)))));
}

fn by_outcome(view: View<'_>, to: &mut Series, read: fn((u64, u64)) -> u64) {
    for (limit, name, direction) in directions(view) {
        for outcome in &OUTCOME_TABLE {
            let value = Number::Whole(read(direction.count(outcome)));
            to.push((text([limit, name, outcome.name]), value));
        }
    }
}

#[derive(Debug)]
struct Families(Vec<(&'static Metric, Series)>);

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (metric, series) in &self.0 {
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
            };
            let mut descriptor = encoder.encode_descriptor(metric.name, metric.help, None, kind)?;
            // Without labels there is one series at most.
            if metric.labels.is_empty() {
                if let Some((_, number)) = series.first() {
                    write(metric.kind, *number, descriptor)?;
                }
                continue;
            }
            for (values, number) in series {
                let values: Vec<_> = values.iter().map(|value| escaped(value)).collect();
                let labels: Vec<_> =
                    metric.labels.iter().copied().zip(values.iter().map(AsRef::as_ref)).collect();
                write(metric.kind, *number, descriptor.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// A label as OpenMetrics has it: the library writes it as it is, and names of cgroups may have any letters.
fn escaped(label: &str) -> Cow<'_, str> {
    match label.contains(['\\', '"', '\n']) {
        true => label.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n").into(),
        false => label.into(),
    }
}

fn write(kind: Kind, number: Number, to: MetricEncoder<'_>) -> fmt::Result {
    match (kind, number) {
        (Kind::Counter, Number::Whole(n)) => ConstCounter::new(n).encode(to),
        (Kind::Counter, Number::Real(x)) => ConstCounter::new(x).encode(to),
        (Kind::Gauge, Number::Whole(n)) => {
            ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX)).encode(to)
        }
        (Kind::Gauge, Number::Real(x)) => ConstGauge::new(x).encode(to),
    }
}

/// All metrics as text.
///
/// # Errors
/// None that is known: it writes to memory.
pub fn render(view: View<'_>) -> Result<String, fmt::Error> {
    let families = all().map(|metric| {
        let mut series = Series::new();
        (metric.read)(view, &mut series);
        (metric, series)
    });
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(Families(families.collect())));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

#[cfg(test)]
mod tests;
