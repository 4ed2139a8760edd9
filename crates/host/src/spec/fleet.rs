//! `[fleet]` and `[[group]]`.

use std::{net::SocketAddr, path::PathBuf};

use tidegate_core::{Direction, Rate};

use super::*;
use crate::fleet::{
    self as config, API_SOCKET, Algorithm, FleetError, FleetSpec, GOSSIP, GROUPS_MAX, GroupSpec,
    PEERS_MAX, PORT, STATE_DIR, TlsFiles,
    url::{Url, shown},
};
use crate::key::Key;

/// The keys of `[fleet]`.
pub(super) static KEYS: [Key; 15] = [
    Key {
        name: "name",
        kind: Kind::FleetName,
        about: "Name of the fleet, the same on all its hosts",
        example: "name = \"prod\"",
        default: "",
    },
    Key {
        name: "node",
        kind: Kind::FleetName,
        about: "Name of this host in the fleet",
        example: "node = \"web-1\"",
        default: "the host's name",
    },
    Key {
        name: "listen",
        kind: Kind::Text,
        about: "Address and port on which the node listens (UDP and TCP)",
        example: "listen = \"0.0.0.0:7946\"",
        default: "0.0.0.0:7946",
    },
    Key {
        name: "advertise",
        kind: Kind::Text,
        about: "Address and port at which other nodes reach this one",
        example: "advertise = \"10.0.0.1:7946\"",
        default: "that of the route to the first peer",
    },
    Key {
        name: "peers",
        kind: Kind::Names,
        about: "Other nodes to join, with or without a port",
        example: "peers = [\"10.0.0.2:7946\"]",
        default: "none",
    },
    Key {
        name: "dns",
        kind: Kind::Text,
        about: "A name whose addresses are the nodes to join",
        example: "dns = \"tidegate.example.org:7946\"",
        default: "none",
    },
    Key {
        name: "redis",
        kind: Kind::Text,
        about: "A Redis server in which nodes find each other",
        example: "redis = \"redis://10.0.0.9:6379/0\"",
        default: "none",
    },
    Key {
        name: "etcd",
        kind: Kind::Text,
        about: "An etcd server in which nodes find each other",
        example: "etcd = \"http://10.0.0.9:2379\"",
        default: "none",
    },
    Key {
        name: "tls_ca",
        kind: Kind::Text,
        about: "File with the certificates that may sign a registry's",
        example: "tls_ca = \"/etc/tidegate/registry-ca.pem\"",
        default: "those that the host trusts",
    },
    Key {
        name: "tls_cert",
        kind: Kind::Text,
        about: "File with the certificate that this node shows to a registry",
        example: "tls_cert = \"/etc/tidegate/registry.pem\"",
        default: "none",
    },
    Key {
        name: "tls_key",
        kind: Kind::Text,
        about: "File with the private key of that certificate",
        example: "tls_key = \"/etc/tidegate/registry.key\"",
        default: "none",
    },
    Key {
        name: "keys",
        kind: Kind::Text,
        about: "File with the keys of the fleet",
        example: "keys = \"/etc/tidegate/fleet.keys\"",
        default: "",
    },
    Key {
        name: "acceptors",
        kind: Kind::Names,
        about: "Nodes that decide the epochs of `share`: an odd number, the same on all hosts",
        example: "acceptors = [\"web-1\", \"web-2\", \"web-3\"]",
        default: "none",
    },
    Key {
        name: "state",
        kind: Kind::Text,
        about: "Directory in which the node keeps its state",
        example: "state = \"/var/lib/tidegate\"",
        default: "/var/lib/tidegate",
    },
    Key {
        name: "api",
        kind: Kind::Text,
        about: "Socket at which the daemon is asked",
        example: "api = \"/run/tidegate/daemon.sock\"",
        default: "/run/tidegate/daemon.sock",
    },
];

/// The keys of a `[[group]]`.
pub(super) static GROUP_KEYS: [Key; 12] = [
    Key {
        name: "name",
        kind: Kind::FleetName,
        about: "Name of the group",
        example: "name = \"uplink\"",
        default: "",
    },
    Key {
        name: "rate",
        kind: Kind::Rate,
        about: "Rate of all its limits together",
        example: "rate = \"10gbit\"",
        default: "",
    },
    Key {
        name: "algorithm",
        kind: Kind::Word(&["share", "fps", "grd", "gtb", "ctb"]),
        about: "How the hosts share the rate",
        example: "algorithm = \"share\"",
        default: "",
    },
    Key {
        name: "members",
        kind: Kind::Names,
        about: "The limits of this host that are in the group",
        example: "members = [\"backup\"]",
        default: "",
    },
    Key {
        name: "direction",
        kind: Kind::Word(&["egress", "ingress"]),
        about: "Which direction of the limits",
        example: "direction = \"egress\"",
        default: "egress",
    },
    Key {
        name: "interval",
        kind: Kind::Time,
        about: "Time between two exchanges",
        example: "interval = \"250ms\"",
        default: "250ms",
    },
    Key {
        name: "branching",
        kind: Kind::Whole(1, 16),
        about: "How many nodes a node talks to at a time",
        example: "branching = 3",
        default: "3",
    },
    Key {
        name: "hosts",
        kind: Kind::Whole(0, u32::MAX as i64),
        about: "How many hosts share the rate while this one hears of nobody",
        example: "hosts = 16",
        default: "16",
    },
    Key {
        name: "reserve",
        kind: Kind::Percent,
        about: "With `share`: the part of the rate that is shared in advance",
        example: "reserve = \"10%\"",
        default: "10%",
    },
    Key {
        name: "lease",
        kind: Kind::Time,
        about: "With `share`: how long a host may use what it was lent",
        example: "lease = \"3s\"",
        default: "3s",
    },
    Key {
        name: "suspect",
        kind: Kind::Time,
        about: "With `share`: silence after which a host counts as gone",
        example: "suspect = \"3s\"",
        default: "3s",
    },
    Key {
        name: "center",
        kind: Kind::FleetName,
        about: "With `ctb`: the node that has the bucket",
        example: "center = \"web-1\"",
        default: "",
    },
];

/// A group as read: its fields' places in the text are still known.
pub(super) struct ReadGroup {
    spec: GroupSpec,
    spans: Vec<(String, Range<usize>)>,
    at: Range<usize>,
}

fn example_of(keys: &'static [Key], name: &str) -> &'static str {
    key::find(keys, name).map_or("", |key| key.example)
}

fn unknown(keys: &'static [Key], table: &str, name: &str) -> Problem {
    Problem::UnknownField { field: name.to_owned(), hint: key::hint(keys, table, name) }
}

impl Reader<'_> {
    fn fleet_error(
        &self,
        value: &Value<'_>,
        field: &'static str,
    ) -> impl Fn(FleetError) -> SpecError {
        let span = value.span();
        move |problem| self.at(&span, Some(field), problem.into())
    }

    fn fleet_name(&self, value: &Value<'_>, field: &'static str) -> Result<String, SpecError> {
        let text = self.text(value, field)?;
        config::check_name(text).map_err(self.fleet_error(value, field))?;
        Ok(text.to_owned())
    }

    fn address(&self, value: &Value<'_>, field: &'static str) -> Result<SocketAddr, SpecError> {
        let text = self.text(value, field)?;
        let refuse = |_| self.fleet_error(value, field)(FleetError::Address(shown(text)));
        text.parse().map_err(refuse)
    }

    fn url(
        &self,
        value: &Value<'_>,
        field: &'static str,
        scheme: &'static str,
    ) -> Result<Url, SpecError> {
        let text = self.text(value, field)?;
        Url::parse(text, scheme).map_err(|e| self.fleet_error(value, field)(e.into()))
    }

    pub(super) fn fleet(&self, value: &Value<'_>) -> Result<FleetSpec, SpecError> {
        let Some(fields) = value.get_ref().as_table() else {
            return Err(self.wrong_type(value, "fleet", "a table"));
        };
        let mut fleet = FleetSpec {
            name: String::new(),
            node: None,
            listen: SocketAddr::from(([0, 0, 0, 0], PORT)),
            advertise: None,
            peers: Vec::new(),
            dns: None,
            redis: None,
            etcd: None,
            tls: TlsFiles::default(),
            keys: PathBuf::new(),
            acceptors: Vec::new(),
            state: PathBuf::from(STATE_DIR),
            api: PathBuf::from(API_SOCKET),
            line: self.line(&value.span()),
        };
        for (key, value) in in_order(fields) {
            match key.get_ref().as_ref() {
                "name" => fleet.name = self.fleet_name(value, "name")?,
                "node" => fleet.node = Some(self.fleet_name(value, "node")?),
                "listen" => fleet.listen = self.address(value, "listen")?,
                "advertise" => {
                    let address = self.address(value, "advertise")?;
                    if address.ip().is_unspecified() {
                        let refuse = self.fleet_error(value, "advertise");
                        return Err(refuse(FleetError::Unspecified(address)));
                    }
                    fleet.advertise = Some(address);
                }
                "peers" => {
                    let refuse = self.fleet_error(value, "peers");
                    let list = self.list(value, "peers")?;
                    if list.len() > PEERS_MAX {
                        return Err(refuse(FleetError::TooMany(list.len(), "peers", PEERS_MAX)));
                    }
                    if let Some((bad, _)) = list.iter().find(|(peer, _)| !is_peer(peer)) {
                        return Err(refuse(FleetError::Peer(shown(bad))));
                    }
                    fleet.peers = list.into_iter().map(|(peer, _)| peer.to_owned()).collect();
                }
                "dns" => {
                    let text = self.text(value, "dns")?;
                    if !is_peer(text) {
                        let refuse = self.fleet_error(value, "dns");
                        return Err(refuse(FleetError::Peer(shown(text))));
                    }
                    fleet.dns = Some(text.to_owned());
                }
                "redis" => fleet.redis = Some(self.url(value, "redis", "redis")?),
                "etcd" => fleet.etcd = Some(self.url(value, "etcd", "http")?),
                "tls_ca" => fleet.tls.ca = Some(self.text(value, "tls_ca")?.into()),
                "tls_cert" => fleet.tls.cert = Some(self.text(value, "tls_cert")?.into()),
                "tls_key" => fleet.tls.key = Some(self.text(value, "tls_key")?.into()),
                "keys" => fleet.keys = self.text(value, "keys")?.into(),
                "acceptors" => {
                    let list = self.list(value, "acceptors")?;
                    fleet.acceptors = list.into_iter().map(|(name, _)| name.to_owned()).collect();
                    fleet.check_acceptors().map_err(self.fleet_error(value, "acceptors"))?;
                }
                "state" => fleet.state = self.text(value, "state")?.into(),
                "api" => fleet.api = self.text(value, "api")?.into(),
                other => {
                    let problem = unknown(&KEYS, "fleet", other);
                    return Err(self.at(&key.span(), None, problem));
                }
            }
        }
        let over_tls = [&fleet.redis, &fleet.etcd].into_iter().flatten().any(|url| url.tls);
        for field in ["tls_ca", "tls_cert", "tls_key"] {
            if let Some(value) = fields.get(field).filter(|_| !over_tls) {
                return Err(self.fleet_error(value, field)(FleetError::NoTls));
            }
        }
        let TlsFiles { cert, key, .. } = &fleet.tls;
        for (field, missing) in [
            ("name", fleet.name.is_empty()),
            ("keys", fleet.keys.as_os_str().is_empty()),
            ("tls_cert", cert.is_none() && key.is_some()),
            ("tls_key", key.is_none() && cert.is_some()),
        ] {
            if missing {
                let problem = Problem::Missing(example_of(&KEYS, field));
                return Err(self.at(&value.span(), Some(field), problem));
            }
        }
        Ok(fleet)
    }

    pub(super) fn groups(&self, value: &Value<'_>) -> Result<Vec<ReadGroup>, SpecError> {
        let Some(tables) = value.get_ref().as_array() else {
            return Err(self.wrong_type(value, "group", "double brackets"));
        };
        let mut groups: Vec<ReadGroup> = Vec::new();
        for table in tables.iter() {
            let Some(fields) = table.get_ref().as_table() else {
                return Err(self.wrong_type(table, "group", "a table"));
            };
            let group = self.group(fields, &table.span())?;
            if groups.len() == GROUPS_MAX {
                let refuse = self.fleet_error(table, "group");
                return Err(refuse(FleetError::TooMany(GROUPS_MAX + 1, "groups", GROUPS_MAX)));
            }
            if let Some(other) = groups.iter().find(|other| other.spec.name == group.spec.name) {
                let problem = FleetError::SameName(other.spec.line);
                return Err(self.of_group(&group, "name", problem));
            }
            groups.push(group);
        }
        Ok(groups)
    }

    fn of_group(&self, group: &ReadGroup, field: &'static str, problem: FleetError) -> SpecError {
        let span = group.spans.iter().find(|(name, _)| name == field).map(|(_, span)| span);
        self.at(span.unwrap_or(&group.at), Some(field), problem.into())
    }

    fn group(&self, fields: &Table<'_>, span: &Range<usize>) -> Result<ReadGroup, SpecError> {
        let missing =
            |field| self.at(span, Some(field), Problem::Missing(example_of(&GROUP_KEYS, field)));
        let required = |field| fields.get(field).ok_or_else(|| missing(field));
        let name = self.fleet_name(required("name")?, "name")?;
        let rate = self.parse::<Rate>(required("rate")?, "rate")?;
        let algorithm = self.parse::<Algorithm>(required("algorithm")?, "algorithm")?;
        required("members")?;
        let mut group = GroupSpec::new(name, rate, algorithm);
        group.line = self.line(span);
        // Which fields are another algorithm's, once that is known.
        let mut only: Vec<(&'static str, &'static [Algorithm], &Value<'_>)> = Vec::new();
        for (key, value) in in_order(fields) {
            match key.get_ref().as_ref() {
                "name" | "rate" | "algorithm" => {}
                "members" => {
                    let list = self.list(value, "members")?;
                    group.members = list.into_iter().map(|(m, _)| m.to_owned()).collect();
                }
                "direction" => {
                    group.direction = match self.text(value, "direction")? {
                        "egress" => Direction::Egress,
                        "ingress" => Direction::Ingress,
                        other => {
                            let refuse = self.fleet_error(value, "direction");
                            return Err(refuse(FleetError::Direction(other.to_owned())));
                        }
                    };
                }
                "interval" => group.interval = self.parse(value, "interval")?,
                "branching" => {
                    let number = self.whole(value, "branching")?;
                    group.branching = usize::try_from(number)
                        .ok()
                        .filter(|number| (1..=16).contains(number))
                        .ok_or_else(|| {
                            self.fleet_error(value, "branching")(FleetError::Branching(number))
                        })?;
                    only.push(("branching", GOSSIP, value));
                }
                "hosts" => {
                    let number = self.whole(value, "hosts")?;
                    group.hosts =
                        u32::try_from(number).unwrap_or(if number < 0 { 0 } else { u32::MAX });
                }
                "reserve" => {
                    let text = self.text(value, "reserve")?;
                    let percent = text.strip_suffix('%').and_then(|n| n.trim().parse().ok());
                    group.reserve_percent =
                        percent.filter(|n| (1..=100).contains(n)).ok_or_else(|| {
                            let refuse = self.fleet_error(value, "reserve");
                            refuse(FleetError::Reserve(text.to_owned()))
                        })?;
                    only.push(("reserve", &[Algorithm::Share], value));
                }
                "lease" => {
                    group.lease = self.parse(value, "lease")?;
                    only.push(("lease", &[Algorithm::Share], value));
                }
                "suspect" => {
                    group.suspect = self.parse(value, "suspect")?;
                    only.push(("suspect", &[Algorithm::Share], value));
                }
                "center" => {
                    group.center = Some(self.fleet_name(value, "center")?);
                    only.push(("center", &[Algorithm::Ctb], value));
                }
                other => {
                    let problem = unknown(&GROUP_KEYS, "group", other);
                    return Err(self.at(&key.span(), None, problem));
                }
            }
        }
        if let Some((field, of, value)) =
            only.iter().find(|(_, of, _)| !of.contains(&group.algorithm))
        {
            return Err(self.fleet_error(value, field)(FleetError::NotForThis(of)));
        }
        let spans = in_order(fields)
            .iter()
            .map(|(key, value)| (key.get_ref().to_string(), value.span()))
            .collect();
        Ok(ReadGroup { spec: group, spans, at: span.clone() })
    }

    /// Checks the groups against the rest of the file.
    pub(super) fn check_groups(
        &self,
        groups: Vec<ReadGroup>,
        fleet: Option<&FleetSpec>,
        limits: &[LimitSpec],
    ) -> Result<Vec<GroupSpec>, SpecError> {
        let mut checked: Vec<GroupSpec> = Vec::new();
        for group in groups {
            let Some(fleet) = fleet else {
                return Err(self.of_group(&group, "name", FleetError::NoFleet));
            };
            let spec = &group.spec;
            if let Err((field, problem)) = spec.check(fleet) {
                return Err(self.of_group(&group, field, problem));
            }
            let refuse = |problem| Err(self.of_group(&group, "members", problem));
            for (i, name) in spec.members.iter().enumerate() {
                let Some(limit) = limits.iter().find(|limit| limit.name == *name) else {
                    return refuse(FleetError::NoLimit(name.clone()));
                };
                if limit.options.queue(spec.direction).is_none() {
                    let direction = spec.direction.name();
                    return refuse(FleetError::NoDirection { limit: name.clone(), direction });
                }
                let has = |other: &&GroupSpec| {
                    other.direction == spec.direction && other.members.contains(name)
                };
                let twice = spec.members[..i].contains(name).then_some(spec);
                if let Some(other) = checked.iter().find(has).or(twice) {
                    let (limit, group) = (name.clone(), other.name.clone());
                    return refuse(FleetError::Taken { limit, group });
                }
            }
            checked.push(group.spec);
        }
        Ok(checked)
    }
}

/// A host name or address, with or without a port.
fn is_peer(text: &str) -> bool {
    if text.parse::<SocketAddr>().is_ok() || text.parse::<std::net::IpAddr>().is_ok() {
        return true;
    }
    let (host, port) = text.rsplit_once(':').unwrap_or((text, "1"));
    port.parse::<u16>().is_ok_and(|port| port > 0)
        && (1..=253).contains(&host.len())
        && host.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        })
}
