//! Limits of containers that have rates in their labels.
//!
//! While a container does not run, or its cgroup is not known yet, its limit waits. It is on again, with its
//! counters, when the container starts.

use std::collections::BTreeMap;

use tidegate_core::{
    Scope,
    selector::{Selector, SelectorKind},
};
use tidegate_host::{spec::LimitSpec, world::Match};

use super::{Builder, blank, hashed, names_of_each, set_options};

/// The labels with this beginning are all Tidegate's.
const OURS: &str = "tidegate.";
/// Labels of a container that give it rates.
const RATE_LABELS: [&str; 2] = ["tidegate.egress", "tidegate.ingress"];

impl Builder<'_> {
    /// Limits of the containers whose owner passes.
    pub(super) fn by_labels(&mut self, file: &str, passes: impl Fn(&Option<u32>) -> bool) {
        let world = self.world;
        let of = world.containers.iter().filter(|((owner, _), _)| passes(owner));
        let rated = of
            .filter(|(_, container)| container.labels.keys().any(|label| label.starts_with(OURS)));
        for (key, container) in rated {
            let found = world.container(key, container);
            let (_, id) = key;
            let named = Match { name: container.name.clone(), cgroup: id.clone() };
            let name = names_of_each("container", &[named]).remove(0);
            let name = if self.names.contains_key(&name) { hashed(&name, id) } else { name };
            let Ok(mut limit) = blank(&name) else { continue };
            let (kind, value) = match &found {
                // Not the cgroup itself: a limit that selects its cgroups outlives them.
                Some(found) => (SelectorKind::Cgroup, &found.cgroup),
                None => (SelectorKind::Container, &container.name),
            };
            limit.scope = Scope::Select(Selector { kind, value: value.clone() });
            let set = set_rates(&mut limit, &container.labels);
            let taken = self.name(file, &name);
            match (taken.and(set), found) {
                (Err(reason), _) => self.refuse(file, &limit, reason),
                (Ok(()), Some(found)) => self.add(file, limit, vec![found], &[]),
                (Ok(()), None) => {
                    let reason = format!("{} does not run", limit.scope);
                    self.waits(file, limit, reason);
                }
            }
        }
    }
}

/// The rates of a container's labels.
fn set_rates(limit: &mut LimitSpec, labels: &BTreeMap<String, String>) -> Result<(), String> {
    let is_unknown =
        |label: &&String| label.starts_with(OURS) && !RATE_LABELS.contains(&label.as_str());
    if let Some(label) = labels.keys().find(is_unknown) {
        let [egress, ingress] = RATE_LABELS;
        return Err(format!("label {label} is unknown; {egress} and {ingress} give rates"));
    }
    for label in RATE_LABELS {
        let Some(text) = labels.get(label) else { continue };
        let rate = text.parse().map_err(|e| format!("label {label}: {e}"))?;
        match label {
            "tidegate.egress" => limit.patch.egress = Some(rate),
            _ => limit.patch.ingress = Some(rate),
        }
    }
    set_options(limit).map_err(|e| format!("labels: {e}"))
}
