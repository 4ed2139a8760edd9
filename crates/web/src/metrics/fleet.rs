//! Metrics of the fleet, from what its daemon says of this host.

use tidegate_fleet::status::{GroupStatus, NodeStatus};

use super::{Metric, Number, Series, View, flag, real, text};

const GROUP: &[&str] = &["group"];
const GROUP_STATES: [&str; 5] = ["starting", "sharing", "alone", "stood_back", "cannot_drop"];

pub(super) const METRICS: [Metric; 19] = [
    Metric::gauge(
        "fleet_up",
        &[],
        "1: the daemon of the fleet runs; 0: it has died; absent: there is none",
        |view, to| {
            let is_known = node(view).is_some() || view.head.fleet_died;
            to.extend(is_known.then(|| (Vec::new(), flag(node(view).is_some()))));
        },
    ),
    Metric::gauge(
        "fleet_node_info",
        &["node", "cluster"],
        "Always 1: the node; absent: no daemon runs",
        |view, to| {
            to.extend(node(view).map(|n| (text([&n.node, &n.cluster]), Number::Whole(1))));
        },
    ),
    Metric::gauge(
        "fleet_uptime_seconds",
        &[],
        "How long the daemon has been running",
        |view, to| {
            one(view, to, |node| real(node.up_ns as f64 / 1e9));
        },
    ),
    Metric::gauge("fleet_alerts", &[], "Number of warnings of the daemon", |view, to| {
        one(view, to, |node| Number::Whole(node.alerts.len() as u64));
    }),
    Metric::gauge("fleet_stood_back", &[], "1: another node has this node's name", |view, to| {
        one(view, to, |node| flag(node.stood_back));
    }),
    Metric::gauge("fleet_peers", &["state"], "Known nodes, `up` or `down`", |view, to| {
        let Some(node) = node(view) else { return };
        let up = node.peers.iter().filter(|peer| peer.up).count();
        to.push((text(["up"]), Number::Whole(up as u64)));
        to.push((text(["down"]), Number::Whole((node.peers.len() - up) as u64)));
    }),
    Metric::counter(
        "fleet_datagrams",
        &["direction"],
        "Datagrams of the daemon, `sent` or `heard`",
        |view, to| {
            let Some(node) = node(view) else { return };
            to.push((text(["sent"]), Number::Whole(node.traffic.sent_datagrams)));
            to.push((text(["heard"]), Number::Whole(node.traffic.heard_datagrams)));
        },
    ),
    Metric::counter(
        "fleet_bytes",
        &["direction"],
        "Their bytes with the headers of UDP and IP",
        |view, to| {
            let Some(node) = node(view) else { return };
            to.push((text(["sent"]), Number::Whole(node.traffic.sent_bytes)));
            to.push((text(["heard"]), Number::Whole(node.traffic.heard_bytes)));
        },
    ),
    Metric::counter(
        "fleet_nowhere_messages",
        &[],
        "Messages for nodes without an address",
        |view, to| one(view, to, |node| Number::Whole(node.traffic.nowhere_messages)),
    ),
    Metric::counter(
        "fleet_dropped_datagrams",
        &["cause"],
        "Received datagrams that were dropped",
        |view, to| {
            for dropped in node(view).iter().flat_map(|node| &node.dropped) {
                to.push((text([&dropped.cause]), Number::Whole(dropped.datagrams)));
            }
        },
    ),
    Metric::gauge(
        "fleet_source_addresses",
        &["source"],
        "Addresses of peers from a registry or name",
        |view, to| {
            for source in node(view).iter().flat_map(|node| &node.sources) {
                to.push((text([&source.source]), Number::Whole(source.addresses as u64)));
            }
        },
    ),
    Metric::gauge("fleet_source_up", &["source"], "1: the source can be asked", |view, to| {
        for source in node(view).iter().flat_map(|node| &node.sources) {
            to.push((text([&source.source]), flag(source.error.is_none())));
        }
    }),
    Metric::gauge(
        "group_rate_bytes_per_second",
        GROUP,
        "The rate of a group on all hosts together",
        |view, to| of_groups(view, to, |g| Some(g.rate_bit_s as f64 / 8.0)),
    ),
    Metric::gauge(
        "group_share_bytes_per_second",
        GROUP,
        "What this host may use of it",
        |view, to| of_groups(view, to, |g| Some(g.share_bit_s as f64 / 8.0)),
    ),
    Metric::gauge(
        "group_reserved_bytes_per_second",
        GROUP,
        "What this host may use if it hears nobody",
        |view, to| of_groups(view, to, |g| Some(g.alone_bit_s as f64 / 8.0)),
    ),
    Metric::gauge(
        "group_demand_bytes_per_second",
        GROUP,
        "What arrives at its limits on this host",
        |view, to| of_groups(view, to, |g| Some(g.demand_bit_s as f64 / 8.0)),
    ),
    Metric::gauge(
        "group_drop_ratio",
        GROUP,
        "With `grd`: the part of packets that is dropped",
        |view, to| of_groups(view, to, |g| g.drop_probability),
    ),
    Metric::gauge(
        "group_lease_seconds",
        GROUP,
        "With `share`: how long what this host has is good",
        |view, to| of_groups(view, to, |g| g.lease_ns.map(|ns| ns as f64 / 1e9)),
    ),
    Metric::gauge(
        "group_state",
        &["group", "state"],
        "1 for the state that holds: `starting`, `sharing`, `alone`, `stood_back`, `cannot_drop`",
        |view, to| {
            for group in groups(view) {
                for state in GROUP_STATES {
                    to.push((text([&group.name, state]), flag(group.state == state)));
                }
            }
        },
    ),
];

fn node<'a>(view: View<'a>) -> Option<&'a NodeStatus> {
    view.snapshot.fleet.as_ref()
}

fn one(view: View<'_>, to: &mut Series, read: fn(&NodeStatus) -> Number) {
    to.extend(node(view).map(|node| (Vec::new(), read(node))));
}

fn groups<'a>(view: View<'a>) -> impl Iterator<Item = &'a GroupStatus> {
    node(view).into_iter().flat_map(|node| &node.groups)
}

fn of_groups(view: View<'_>, to: &mut Series, read: fn(&GroupStatus) -> Option<f64>) {
    to.extend(groups(view).filter_map(|g| Some((text([&g.name]), real(read(g)?)))));
}
