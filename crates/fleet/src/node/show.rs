//! A node as status.

use tidegate_core::Nanos;

use super::{GroupBackend, Node, State, Storage};
use crate::{
    event::Event,
    group::Group,
    seal::{CAUSES, VERSION},
    status::{
        DropStatus, GroupStatus, LimitStatus, MemberStatus, NodeStatus, PeerStatus, SourceStatus,
        VersionStatus,
    },
};

/// As it serializes.
fn name_of(state: State) -> &'static str {
    match state {
        State::Starting => "starting",
        State::Sharing => "sharing",
        State::Alone => "alone",
        State::StoodBack => "stood_back",
        State::CannotDrop => "cannot_drop",
    }
}

impl<G: GroupBackend, S: Storage> Node<G, S> {
    pub fn status(&self, now: Nanos) -> NodeStatus {
        let ago = |at: Nanos| now.0.saturating_sub(at.0);
        let peers = self.contacts.values().map(|contact| {
            let heard = self.sessions.get(contact.id).filter(|peer| peer.is_proven());
            PeerStatus {
                node: contact.name.clone(),
                id: contact.id.0,
                addr: heard.map_or(contact.addr, |peer| peer.addr),
                up: self.up.contains(&contact.id),
                heard_ago_ns: heard.map(|peer| ago(peer.heard)),
            }
        });
        let mut peers: Vec<_> = peers.collect();
        peers.sort_by(|a, b| a.node.cmp(&b.node));
        let groups: Vec<_> =
            self.groups.iter().map(|held| self.group_status(now, &held.group)).collect();
        let dropped = CAUSES.iter().map(|(cause, name, _)| DropStatus {
            cause: (*name).to_owned(),
            datagrams: self.drops.of(*cause),
        });
        let sources = self.seeds.iter().map(|(source, seeds)| SourceStatus {
            source: source.clone(),
            addresses: seeds.len(),
            error: None,
        });
        let other_versions = self.foreign(now).map(|(addr, one)| VersionStatus {
            node: self.name_of(one.id),
            addr: *addr,
            protocol: one.version,
            datagrams: one.datagrams,
            heard_ago_ns: ago(one.heard),
        });
        NodeStatus {
            node: self.name.clone(),
            id: self.id.0,
            cluster: self.fleet.name.clone(),
            pid: std::process::id(),
            file: String::new(),
            addr: self.addr,
            up_ns: ago(self.started),
            stood_back: self.stood_back.is_some(),
            alerts: self.alerts(now),
            protocol: VERSION,
            peers,
            other_versions: other_versions.collect(),
            groups,
            traffic: self.traffic,
            dropped: dropped.collect(),
            sources: sources.collect(),
        }
    }

    fn group_status(&self, now: Nanos, group: &Group) -> GroupStatus {
        let spec = group.spec();
        let epoch = group.epoch(now);
        let limits = group.gauges(now).into_iter().map(|gauge| LimitStatus {
            limit: gauge.limit,
            rate_bit_s: gauge.rate_bit_s,
            ceiling_bit_s: gauge.ceiling_bit_s,
            demand_bit_s: gauge.demand_bit_s,
            flows: (gauge.flows * 100.0).round() / 100.0,
            error: gauge.error,
        });
        let members = self.reports.iter().filter(|((_, name), _)| *name == spec.name);
        let members = members.map(|((id, _), reported)| MemberStatus {
            node: self.name_of(*id),
            share_bit_s: reported.report.share_bit_s,
            demand_bit_s: reported.report.demand_bit_s,
            age_ns: now.0.saturating_sub(reported.at.0),
            differs: reported.differs,
        });
        let mut members: Vec<_> = members.collect();
        members.sort_by(|a, b| a.node.cmp(&b.node));
        GroupStatus {
            name: spec.name.clone(),
            algorithm: spec.algorithm.name().to_owned(),
            direction: spec.direction.name().to_owned(),
            rate_bit_s: spec.rate.bit_s(),
            state: name_of(group.state(now)).to_owned(),
            share_bit_s: group.part_bit_s(now),
            alone_bit_s: spec.alone_bit_s(),
            demand_bit_s: group.demand_bit_s() as u64,
            drop_probability: group.drop_probability(),
            epoch: epoch.map(|(number, ..)| number),
            leader: epoch.filter(|(n, ..)| *n > 0).map(|(_, leader, _)| self.name_of(leader)),
            lease_ns: epoch.map(|(.., left)| left),
            settings: spec.settings(&self.fleet),
            limits: limits.collect(),
            members,
        }
    }

    fn alerts(&self, now: Nanos) -> Vec<String> {
        let mut alerts = Vec::new();
        if let Some(by) = self.stood_back {
            alerts.push(Event::StoodBack(self.name.clone(), by).to_string());
        }
        alerts.extend(self.rivals(now).map(|event| event.to_string()));
        for (from, one) in self.foreign(now) {
            let (node, theirs, ours) = (self.name_of(one.id), one.version, VERSION);
            alerts.push(Event::Version { node, from: *from, theirs, ours }.to_string());
        }
        for held in &self.groups {
            let group = held.group.spec().name.clone();
            let state = held.group.state(now);
            let part_bit_s = held.group.part_bit_s(now);
            let event = Event::State { group: group.clone(), state, part_bit_s };
            if event.is_warning() && state != State::StoodBack {
                alerts.push(event.to_string());
            }
            let (bit_s, nodes) = held.group.kept_free(now);
            if !nodes.is_empty() {
                let nodes = nodes.into_iter().map(|id| self.name_of(id)).collect();
                alerts.push(Event::KeptFree { group: group.clone(), bit_s, nodes }.to_string());
            }
            if let Some(reports) = held.group.refused(now) {
                alerts.push(Event::Full { group: group.clone(), reports }.to_string());
            }
            if !held.errors.is_empty() {
                let errors = held.errors.iter().cloned().collect();
                alerts.push(Event::Limits { group, errors }.to_string());
            }
        }
        for ((id, group), reported) in self.reports.iter().filter(|(_, r)| r.differs) {
            let ours = self.groups.iter().find(|held| held.group.spec().name == *group);
            let Some(spec) = ours.map(|held| held.group.spec()) else { continue };
            let differs = Event::Differs {
                group: group.clone(),
                node: self.name_of(*id),
                theirs: (reported.report.rate_bit_s, reported.report.algorithm),
                ours: (spec.rate.bit_s(), spec.algorithm),
            };
            alerts.push(differs.to_string());
        }
        if self.storage_bad {
            let why = "the state cannot be written: this node promises nothing";
            alerts.push(why.to_owned());
        }
        alerts
    }
}
