//! Which new cgroups the gate need not hold any more. Pure.
//!
//! A cgroup is decided when a goal for which it was known has been applied, whatever became of its limits;
//! before that if no limit is on it. An engine may still list a container, and the API server a pod. So
//! what neither has listed is not decided before the deadline. Nothing is decided twice.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tidegate_host::{pods::pod_cgroup, world::World};

/// New cgroups are held for so long at most, if nothing else is said; as on the command line.
pub const DEADLINE: &str = "2s";

/// The sources that are asked for what the world does not have yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Asked {
    /// Engines, for containers.
    pub engines: bool,
    /// The API server, for pods.
    pub cluster: bool,
}

#[derive(Debug)]
pub struct Decisions {
    deadline: Duration,
    decided: BTreeSet<u64>,
    /// Cgroups of containers and pods that nobody has listed, and since when.
    unknown: BTreeMap<u64, Duration>,
}

impl Decisions {
    pub fn new(deadline: Duration) -> Decisions {
        Decisions { deadline, decided: BTreeSet::new(), unknown: BTreeMap::new() }
    }

    /// All cgroups may be held again, or none is: the gate is a new one, or closed.
    pub fn clear(&mut self) {
        self.decided.clear();
        self.unknown.clear();
    }

    /// Forgets cgroups that are gone.
    pub fn retain(&mut self, world: &World) {
        let exist: BTreeSet<_> = world.cgroups.values().copied().collect();
        self.decided.retain(|id| exist.contains(id));
        self.unknown.retain(|id, _| exist.contains(id));
    }

    /// The cgroups that can be decided now. `limited` have limits that are still to be put on.
    pub fn take(
        &mut self,
        world: &World,
        limited: &BTreeSet<u64>,
        asked: Asked,
        now: Duration,
    ) -> BTreeSet<u64> {
        let mut decided = BTreeSet::new();
        for (path, id) in &world.cgroups {
            if self.decided.contains(id) || limited.contains(id) {
                continue;
            }
            let is_unknown = match pod_cgroup(path) {
                Some((_, uid)) if asked.cluster => !world.pods.has(&uid),
                _ => asked.engines && world.is_unlisted(path),
            };
            if is_unknown {
                let since = *self.unknown.entry(*id).or_insert(now);
                if now < since + self.deadline {
                    continue;
                }
            }
            self.unknown.remove(id);
            decided.insert(*id);
        }
        self.decided.extend(&decided);
        decided
    }

    /// When the next unknown cgroup is decided all the same.
    pub fn due(&self) -> Option<Duration> {
        self.unknown.values().min().map(|since| *since + self.deadline)
    }
}

#[cfg(test)]
mod tests {
    use tidegate_host::{
        pods::{Pod, Pods},
        world::Container,
    };

    use super::*;

    fn world(cgroups: &[(&str, u64)]) -> World {
        let cgroups = cgroups.iter().map(|(path, id)| ((*path).to_owned(), *id)).collect();
        World { cgroups, ..World::default() }
    }

    const ENGINES: Asked = Asked { engines: true, cluster: false };

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn each_is_decided_once_and_limited_ones_when_they_are_limited() {
        let mut decisions = Decisions::new(at(1000));
        let (world, none) = (world(&[("a", 1), ("b", 2), ("b/c", 3)]), BTreeSet::new());
        assert_eq!(decisions.take(&world, &[2].into(), Asked::default(), at(0)), [1, 3].into());
        assert_eq!(decisions.take(&world, &none, Asked::default(), at(0)), [2].into());
        assert_eq!(decisions.take(&world, &none, Asked::default(), at(0)), none);
        // A gate that is closed, or opened anew.
        decisions.clear();
        assert_eq!(decisions.take(&world, &none, Asked::default(), at(0)), [1, 2, 3].into());
    }

    #[test]
    fn a_container_waits_until_its_engine_tells_of_it_or_the_deadline() {
        let [known, unknown] = ['a', 'b'].map(|letter| letter.to_string().repeat(64));
        let mut decisions = Decisions::new(at(1000));
        let paths = [format!("s/docker-{known}.scope"), format!("s/libpod-{unknown}")];
        let mut world = world(&[(&paths[0], 1), (&paths[1], 2), ("s", 3)]);
        let none = BTreeSet::new();
        assert_eq!(decisions.take(&world, &none, ENGINES, at(10)), [3].into());
        world.containers.insert((None, known), Container::default());
        assert_eq!(decisions.take(&world, &none, ENGINES, at(500)), [1].into());
        assert_eq!(decisions.due(), Some(at(1010)));
        assert_eq!(decisions.take(&world, &none, ENGINES, at(1009)), none);
        assert_eq!(decisions.take(&world, &none, ENGINES, at(1010)), [2].into());
        assert_eq!(decisions.due(), None);
    }

    #[test]
    fn what_a_gate_held_that_is_closed_is_due_no_more() {
        let mut decisions = Decisions::new(at(1000));
        let unknown = world(&[(&"b".repeat(64), 1)]);
        assert_eq!(decisions.take(&unknown, &BTreeSet::new(), ENGINES, at(0)), BTreeSet::new());
        decisions.clear();
        assert_eq!(decisions.due(), None);
    }

    #[test]
    fn a_pod_with_all_in_it_waits_until_the_api_server_tells_of_it_or_the_deadline() {
        let [known, unknown] = ["1", "2"].map(|digit| digit.repeat(32));
        let mut decisions = Decisions::new(at(1000));
        let id = "a".repeat(64);
        let paths = [format!("kubepods/pod{known}"), format!("kubepods/pod{unknown}")];
        let inside = paths.clone().map(|path| format!("{path}/{id}"));
        let all =
            [("kubepods", 1), (&paths[0], 2), (&inside[0], 3), (&paths[1], 4), (&inside[1], 5)];
        let mut world = world(&all);
        let none = BTreeSet::new();
        let asked = Asked { engines: true, cluster: true };
        assert_eq!(decisions.take(&world, &none, asked, at(0)), [1].into());
        world.pods = Pods::Known(BTreeMap::from([(known, Pod::default())]));
        // No engine tells of the containers of a pod.
        assert_eq!(decisions.take(&world, &none, asked, at(500)), [2, 3].into());
        assert_eq!(decisions.due(), Some(at(1000)));
        assert_eq!(decisions.take(&world, &none, asked, at(1000)), [4, 5].into());
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let unknown = "c".repeat(64);
        let mut decisions = Decisions::new(at(1000));
        let none = BTreeSet::new();
        decisions.take(&world(&[("a", 1), (&unknown, 2)]), &none, ENGINES, at(0));
        decisions.retain(&world(&[]));
        assert!(decisions.decided.is_empty() && decisions.due().is_none());
    }
}
