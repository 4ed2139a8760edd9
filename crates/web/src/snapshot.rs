//! A reading as the server understands it. Of the JSON it takes what metrics, history and the page need;
//! what it does not know it leaves alone.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use tidegate_agent::status::AgentStatus;
use tidegate_core::{Scope, selector::SelectorKind};
use tidegate_fleet::status::NodeStatus;
use tidegate_sys::intf::{OUTCOME_TABLE, Outcome};

/// What `tidegate status --json` says.
#[derive(Debug, Default, Deserialize)]
pub struct Snapshot {
    pub limits: Vec<Limit>,
    pub fleet: Option<NodeStatus>,
    pub agent: Option<AgentStatus>,
}

/// A limit, on the host or waiting.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Limit {
    pub name: String,
    pub state: String,
    #[serde(default)]
    pub required: bool,
    pub parent: Option<String>,
    pub scheme: Option<String>,
    pub egress: Option<Direction>,
    pub ingress: Option<Direction>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

/// One direction of a limit.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Direction {
    pub rate_bit_s: u64,
    pub now_bit_s: Option<u64>,
    pub backlog_ns: i64,
    pub fair: Option<Fair>,
    pub at_risk: Option<BTreeMap<String, Option<u64>>>,
    #[serde(flatten)]
    pub(crate) counters: BTreeMap<String, Value>,
}

/// The share of a limit's flows.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Fair {
    pub flows: u32,
    pub share_bit_s: u64,
}

impl Limit {
    /// What it is on; `None` if no kind is known.
    pub fn scope(&self) -> Option<Scope> {
        let kinds = SelectorKind::ALL.iter().map(|kind| kind.name());
        let mut kinds = ["cgroup", "dev", "port"].into_iter().chain(kinds);
        kinds.find_map(|kind| Scope::named(kind, self.rest.get(kind)?.as_str()?))
    }

    pub fn directions(&self) -> impl Iterator<Item = (&'static str, &Direction)> {
        let egress = self.egress.iter().map(|d| ("egress", d));
        egress.chain(self.ingress.iter().map(|d| ("ingress", d)))
    }
}

impl Direction {
    /// What it may use now: with a parent its present part, else the limit.
    pub fn may_use_bit_s(&self) -> u64 {
        self.now_bit_s.unwrap_or(self.rate_bit_s)
    }

    /// Packets and bytes of an outcome.
    pub fn count(&self, outcome: &Outcome) -> (u64, u64) {
        let of = |unit| {
            let value = self.counters.get(&format!("{}_{unit}", outcome.name));
            value.and_then(Value::as_u64).unwrap_or_default()
        };
        (of("packets"), of("bytes"))
    }

    /// What passed and was charged, in packets and bytes: as
    /// [`Counts::charged`](tidegate_host::status::Counts::charged).
    pub fn charged(&self) -> (u64, u64) {
        let passed = OUTCOME_TABLE.iter().filter(|o| o.passed && o.name != "exempt");
        sum(passed.map(|outcome| self.count(outcome)).filter(|(_, bytes)| *bytes > 0))
    }

    pub fn dropped(&self) -> (u64, u64) {
        let dropped = OUTCOME_TABLE.iter().filter(|outcome| !outcome.passed);
        sum(dropped.map(|outcome| self.count(outcome)))
    }
}

fn sum(counts: impl Iterator<Item = (u64, u64)>) -> (u64, u64) {
    counts.fold((0, 0), |(p, b), (packets, bytes)| (p + packets, b + bytes))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A host with a limit inside another, one that waits, an agent and a group.
    pub(crate) fn snapshot() -> Snapshot {
        serde_json::from_str(include_str!("snapshot/example.json")).unwrap()
    }

    #[test]
    fn a_reading_is_what_status_says() {
        let snapshot = snapshot();
        let names: Vec<_> = snapshot.limits.iter().map(|limit| &*limit.name).collect();
        assert_eq!(names, ["batch", "uplink", "web"]);
        let batch = &snapshot.limits[0];
        assert_eq!(batch.scope(), Some(Scope::Cgroup("system.slice/batch.service".to_owned())));
        let egress = batch.egress.as_ref().unwrap();
        assert_eq!(
            egress.charged(),
            (1002, 1_200_600),
            "what is exempt, and ACKs, are not charged"
        );
        assert_eq!(egress.dropped(), (3, 4500));
        assert_eq!(egress.may_use_bit_s(), 6_000_000);
        assert_eq!(snapshot.limits[2].scope().unwrap().to_string(), "container `web`");
    }
}
