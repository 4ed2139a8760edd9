//! Which new cgroups the gate need not hold any more. Pure.
//!
//! A cgroup is decided when a goal for which it was known has been applied, whatever became of its limits;
//! before that if no limit is on it. Of a container an engine may still tell, so one that none has told of is
//! not decided before the deadline. Nothing is decided twice.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tidegate_host::world::{World, is_container};

/// New cgroups are held for so long at most, if nothing else is said; as on the command line.
pub const DEADLINE: &str = "2s";

#[derive(Debug)]
pub struct Decisions {
    deadline: Duration,
    decided: BTreeSet<u64>,
    /// Containers of which no engine has told, and since when.
    unknown: BTreeMap<u64, Duration>,
}

impl Decisions {
    #[must_use]
    pub fn new(deadline: Duration) -> Decisions {
        Decisions { deadline, decided: BTreeSet::new(), unknown: BTreeMap::new() }
    }

    /// All cgroups may be held again: the gate is a new one.
    pub fn clear(&mut self) {
        self.decided.clear();
    }

    /// Forgets cgroups that are gone.
    pub fn retain(&mut self, world: &World) {
        let exist: BTreeSet<_> = world.cgroups.values().copied().collect();
        self.decided.retain(|id| exist.contains(id));
        self.unknown.retain(|id, _| exist.contains(id));
    }

    /// The cgroups that can be decided now. `limited` have limits that are still to be put on. `containers`:
    /// an engine may tell of containers that the world does not have yet.
    pub fn take(
        &mut self,
        world: &World,
        limited: &BTreeSet<u64>,
        containers: bool,
        now: Duration,
    ) -> BTreeSet<u64> {
        let is_told = |path: &str| world.containers.keys().any(|id| path.contains(id.as_str()));
        let mut decided = BTreeSet::new();
        for (path, id) in &world.cgroups {
            if self.decided.contains(id) || limited.contains(id) {
                continue;
            }
            if containers && is_container(path) && !is_told(path) {
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

    /// When a container is decided though no engine has told of it.
    #[must_use]
    pub fn due(&self) -> Option<Duration> {
        self.unknown.values().min().map(|since| *since + self.deadline)
    }
}

#[cfg(test)]
mod tests {
    use tidegate_host::world::Container;

    use super::*;

    fn world(cgroups: &[(&str, u64)]) -> World {
        let cgroups = cgroups.iter().map(|(path, id)| ((*path).to_owned(), *id)).collect();
        World { cgroups, ..World::default() }
    }

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn each_is_decided_once_and_limited_ones_when_they_are_limited() {
        let mut decisions = Decisions::new(at(1000));
        let (world, none) = (world(&[("a", 1), ("b", 2), ("b/c", 3)]), BTreeSet::new());
        assert_eq!(decisions.take(&world, &[2].into(), false, at(0)), [1, 3].into());
        assert_eq!(decisions.take(&world, &none, false, at(0)), [2].into());
        assert_eq!(decisions.take(&world, &none, false, at(0)), none);
        // The gate is opened anew.
        decisions.clear();
        assert_eq!(decisions.take(&world, &none, false, at(0)), [1, 2, 3].into());
    }

    #[test]
    fn a_container_waits_until_its_engine_tells_of_it_or_the_deadline() {
        let [told, unknown] = ['a', 'b'].map(|letter| letter.to_string().repeat(64));
        let mut decisions = Decisions::new(at(1000));
        let paths = [format!("s/docker-{told}.scope"), format!("s/libpod-{unknown}")];
        let mut world = world(&[(&paths[0], 1), (&paths[1], 2), ("s", 3)]);
        let none = BTreeSet::new();
        assert_eq!(decisions.take(&world, &none, true, at(10)), [3].into());
        world.containers.insert(told, Container::default());
        assert_eq!(decisions.take(&world, &none, true, at(500)), [1].into());
        assert_eq!(decisions.due(), Some(at(1010)));
        assert_eq!(decisions.take(&world, &none, true, at(1009)), none);
        assert_eq!(decisions.take(&world, &none, true, at(1010)), [2].into());
        assert_eq!(decisions.due(), None);
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let unknown = "c".repeat(64);
        let mut decisions = Decisions::new(at(1000));
        let none = BTreeSet::new();
        decisions.take(&world(&[("a", 1), (&unknown, 2)]), &none, true, at(0));
        decisions.retain(&world(&[]));
        assert!(decisions.decided.is_empty() && decisions.due().is_none());
    }
}
