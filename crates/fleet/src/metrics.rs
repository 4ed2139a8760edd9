//! Status in numbers, in the text form that Prometheus reads. Rendered when it is asked for, from what status
//! shows: a node that nobody asks counts nothing twice.

use std::fmt::{Display, Write};

use super::{
    seal::CAUSES,
    status::{GroupStatus, NodeStatus},
};

struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP tidegate_{name} {help}\n# TYPE tidegate_{name} {kind}");
    }

    /// A line; labels are names that were checked, but for those of limits' errors, which are none.
    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let labels: Vec<_> =
            labels.iter().map(|(k, v)| format!("{k}=\"{}\"", escaped(v))).collect();
        let labels =
            if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "tidegate_{name}{labels} {value}");
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A number of a group, if it has that.
type Figure = fn(&GroupStatus) -> Option<f64>;

const STATES: [&str; 5] = ["starting", "sharing", "alone", "stood_back", "cannot_drop"];

/// All metrics of a node.
#[must_use]
pub fn render(status: &NodeStatus) -> String {
    let mut text = Text(String::with_capacity(4096));
    text.family("node_info", "gauge", "The node, its cluster and its version.");
    let version = env!("CARGO_PKG_VERSION");
    let info = [("node", &*status.node), ("cluster", &*status.cluster), ("version", version)];
    text.line("node_info", &info, 1);
    text.family("up_seconds", "gauge", "How long the node runs.");
    text.line("up_seconds", &[], status.up_ns as f64 / 1e9);
    text.family("alerts", "gauge", "What is not as it should be; `tidegate status` says what.");
    text.line("alerts", &[], status.alerts.len());
    text.family("stood_back", "gauge", "1: another node has this one's name.");
    text.line("stood_back", &[], u8::from(status.stood_back));
    text.family("peers", "gauge", "Other nodes that are known, by whether they answer.");
    let up = status.peers.iter().filter(|peer| peer.up).count();
    text.line("peers", &[("state", "up")], up);
    text.line("peers", &[("state", "down")], status.peers.len() - up);
    for (name, help, value) in [
        ("sent_datagrams", "Datagrams that were sent.", status.traffic.sent_datagrams),
        ("sent_bytes", "Their bytes, headers included.", status.traffic.sent_bytes),
        ("heard_datagrams", "Datagrams that came.", status.traffic.heard_datagrams),
        ("heard_bytes", "Their bytes, headers included.", status.traffic.heard_bytes),
        (
            "nowhere_messages",
            "Messages for nodes without an address.",
            status.traffic.nowhere_messages,
        ),
    ] {
        let name = format!("{name}_total");
        text.family(&name, "counter", help);
        text.line(&name, &[], value);
    }
    text.family("dropped_datagrams_total", "counter", "Datagrams that were dropped, by cause.");
    for (dropped, (_, name, _)) in status.dropped.iter().zip(&CAUSES) {
        text.line("dropped_datagrams_total", &[("cause", name)], dropped.datagrams);
    }
    text.family("source_addresses", "gauge", "Addresses of peers that a source gave.");
    for source in &status.sources {
        text.line("source_addresses", &[("source", &source.source)], source.addresses);
    }
    text.family("source_failing", "gauge", "1: a source of peers cannot be asked.");
    for source in &status.sources {
        let failing = u8::from(source.error.is_some());
        text.line("source_failing", &[("source", &source.source)], failing);
    }
    let group_figures: [(&str, &str, Figure); 7] = [
        ("group_rate_bits", "The limit of a group, in bit/s.", |g| Some(g.rate_bit_s as f64)),
        ("group_share_bits", "What this host may use of it, in bit/s.", |g| {
            Some(g.share_bit_s as f64)
        }),
        ("group_alone_bits", "What it may use if it hears nobody, in bit/s.", |g| {
            Some(g.alone_bit_s as f64)
        }),
        ("group_demand_bits", "What arrives at its limits here, in bit/s.", |g| {
            Some(g.demand_bit_s as f64)
        }),
        ("group_drop_probability", "The part of packets that grd drops.", |g| g.drop_probability),
        ("group_lease_seconds", "How long what share gave is good.", |g| {
            g.lease_ns.map(|ns| ns as f64 / 1e9)
        }),
        ("group_epoch", "The number of the epoch of share.", |g| g.epoch.map(|n| n as f64)),
    ];
    for (name, help, value) in group_figures {
        text.family(name, "gauge", help);
        for group in &status.groups {
            if let Some(value) = value(group) {
                text.line(name, &[("group", &group.name)], value);
            }
        }
    }
    text.family("group_state", "gauge", "State of a group on this host: one of these is 1.");
    for group in &status.groups {
        for state in STATES {
            let labels = [("group", &*group.name), ("state", state)];
            text.line("group_state", &labels, u8::from(group.state == state));
        }
    }
    text.family("limit_rate_bits", "gauge", "What a limit of a group is set to, in bit/s.");
    for group in &status.groups {
        for limit in &group.limits {
            let labels = [("group", &*group.name), ("limit", &*limit.limit)];
            text.line("limit_rate_bits", &labels, limit.rate_bit_s.unwrap_or(0));
        }
    }
    text.0
}
