//! Limits of pods by their annotations: rates, and limits that they join.
//!
//! A rate is a limit of its own on the pod's cgroup. If limits of files have that cgroup, it is inside the
//! innermost of them: so no pod takes itself out of a limit of the node. Which pods may join a limit is said
//! there (`join = true`); here pods are refused that want to join and may not.

use std::cmp::Reverse;

use tidegate_core::{
    Rate, Scope,
    units::{MAX_RATE_BIT_S, MIN_RATE_BIT_S},
};
use tidegate_host::{
    pods::{EGRESS, INGRESS, JOIN, Pod},
    settings::RateSetting,
    spec::LimitSpec,
    tree::{are_kin, lineage},
    world::Match,
};

use super::{Builder, blank, hashed, names_of_each, set_options};
use crate::quantity;

/// The bounds of a rate in Kubernetes: 1k and 1P.
const RATES_BIT_S: std::ops::RangeInclusive<u64> = 1000..=1_000_000_000_000_000;

impl Builder<'_> {
    pub(super) fn by_annotations(&mut self, file: &str) {
        let world = self.world;
        for (pod, cgroup) in world.pods() {
            let holders = self.holders(cgroup);
            if let Some(joins) = pod.annotations.get(JOIN).filter(|name| !holders.contains(name)) {
                let reason = format!(
                    "annotation {JOIN}: no limit `{joins}` of this node lets this pod join; a limit does \
                     with `scope = {{ pod = {{ join = true }} }}`"
                );
                if let Some(limit) = self.of_pod("join", pod, cgroup) {
                    self.refuse(file, &limit, reason);
                }
            }
            if [EGRESS, INGRESS].iter().any(|name| pod.annotations.contains_key(*name))
                && let Some(limit) = self.of_pod("pod", pod, cgroup)
            {
                self.rates(file, limit, pod, holders.into_iter().next());
            }
        }
    }

    /// The limits that have a cgroup, innermost first: the first one of the files, what it is inside of, and
    /// what is inside it.
    fn holders(&self, cgroup: &str) -> Vec<String> {
        let here = self.goal.limits.iter().filter(|goal| {
            let mut paths = goal.cgroups.iter().map(|(path, _)| path.as_str());
            paths.any(|path| path == cgroup)
        });
        let mut names: Vec<_> = here.map(|goal| goal.limit.name.as_str()).collect();
        let Some(first) = names.first().copied() else { return Vec::new() };
        let parents = self.parents();
        names.retain(|name| are_kin(name, first, &parents));
        names.sort_by_key(|name| Reverse(lineage(name, &parents).count()));
        names.into_iter().map(str::to_owned).collect()
    }

    /// A limit on a pod's cgroup, with a name of its own.
    fn of_pod(&mut self, kind: &str, pod: &Pod, cgroup: &str) -> Option<LimitSpec> {
        let own = format!("{}/{}", pod.namespace, pod.name);
        let found = Match { name: own, cgroup: cgroup.to_owned() };
        let name = names_of_each(kind, std::slice::from_ref(&found)).remove(0);
        let name = if self.names.contains_key(&name) { hashed(&name, cgroup) } else { name };
        let scope = Scope::Cgroup(found.cgroup);
        blank(&name).ok().map(|limit| LimitSpec { scope, ..limit })
    }

    fn rates(&mut self, file: &str, mut limit: LimitSpec, pod: &Pod, holder: Option<String>) {
        limit.parent = holder;
        let set = set_bandwidth(&mut limit, pod);
        let taken = self.name(file, &limit.name);
        let found = taken.and(set).and_then(|()| self.matches(&limit));
        match found {
            Ok((found, _)) => self.add(file, limit, found.matches, &[]),
            Err(reason) => self.refuse(file, &limit, reason),
        }
    }
}

/// The rates of a pod's annotations.
fn set_bandwidth(limit: &mut LimitSpec, pod: &Pod) -> Result<(), String> {
    let rate = |name: &str| {
        let Some(text) = pod.annotations.get(name) else { return Ok(None) };
        let rate = bandwidth(text).map_err(|e| format!("annotation {name}: {e}"))?;
        Ok::<_, String>(Some(RateSetting::Limit(rate)))
    };
    limit.patch.egress = rate(EGRESS)?;
    limit.patch.ingress = rate(INGRESS)?;
    set_options(limit).map_err(|e| format!("annotations: {e}"))
}

/// A rate as Kubernetes writes it: a quantity, in bits a second.
fn bandwidth(text: &str) -> Result<Rate, String> {
    let shown: String = text.chars().take(40).collect();
    let bit_s = quantity::whole(text).ok_or_else(|| {
        format!("`{shown}` is no quantity of Kubernetes; write for example `10M` for 10 Mbit/s")
    })?;
    if !RATES_BIT_S.contains(&bit_s) {
        return Err(format!("`{shown}` is not between 1k and 1P, the rates of Kubernetes"));
    }
    Rate::from_bit_s(bit_s)
        .filter(|_| (MIN_RATE_BIT_S..=MAX_RATE_BIT_S).contains(&bit_s))
        .ok_or_else(|| format!("`{shown}` is not between 8k and 100G, the rates of a limit"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bandwidth_is_a_quantity_in_bounds() {
        let rate = |text: &str| bandwidth(text).map(|rate| rate.bit_s());
        for (text, bit_s) in [
            ("1M", 1_000_000),
            ("10Mi", 10_485_760),
            ("1e6", 1_000_000),
            ("500k", 500_000),
            ("8k", 8000),
            ("100G", 100_000_000_000),
            ("16000000m", 16_000),
        ] {
            assert_eq!(rate(text), Ok(bit_s), "{text}");
        }
        for small in ["100m", "999", "0", "-1M", "2P", "1E", "1000000000000001"] {
            assert!(rate(small).unwrap_err().contains("between 1k and 1P"), "{small}");
        }
        for ours in ["1k", "7999", "101G", "1P"] {
            assert!(rate(ours).unwrap_err().contains("between 8k and 100G"), "{ours}");
        }
        for no in ["", "fast", "10mbit", "1K"] {
            assert!(rate(no).unwrap_err().contains("is no quantity"), "{no}");
        }
    }
}
