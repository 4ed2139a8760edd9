//! Limits of no spec file that somebody else keeps, and removes: `apply --prune` leaves them alone.

use std::{collections::BTreeMap, fmt, path::Path};

use tidegate_agent::status::AgentStatus;
use tidegate_cni::plugin::is_limit;
use tidegate_host::{plan::Present, run::runner_of, spec::Spec};

/// The keeper of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Keeper {
    Agent,
    Cni,
    Run,
}

impl Keeper {
    /// When it removes its limit.
    pub fn until(self) -> &'static str {
        match self {
            Keeper::Agent => "when its files and containers no longer ask for it",
            Keeper::Cni => "with its container",
            Keeper::Run => "with its command",
        }
    }
}

impl fmt::Display for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Keeper::Agent => "`tidegate agent`",
            Keeper::Cni => "`tidegate-cni`",
            Keeper::Run => "`tidegate run`",
        })
    }
}

/// The keepers of limits that a spec does not have.
#[derive(Debug)]
pub struct Keepers<'a> {
    spec: &'a Spec,
    agent: Option<AgentStatus>,
    /// Limits in which others are that somebody keeps.
    around: BTreeMap<String, Keeper>,
}

impl<'a> Keepers<'a> {
    /// The keepers of a store's limits.
    pub fn find(run_dir: &Path, store: &Path, spec: &'a Spec, present: &[Present]) -> Keepers<'a> {
        Keepers::with(AgentStatus::running(run_dir, store), spec, present)
    }

    fn with(agent: Option<AgentStatus>, spec: &'a Spec, present: &[Present]) -> Keepers<'a> {
        let mut keepers = Keepers { spec, agent, around: BTreeMap::new() };
        let parents: BTreeMap<_, _> =
            present.iter().filter_map(|is| Some((&*is.name, is.parent.as_deref()?))).collect();
        for Present { name, .. } in present {
            let Some(keeper) = keepers.of(name) else { continue };
            let mut inside = &**name;
            while let Some(parent) = parents.get(inside) {
                keepers.around.entry((*parent).to_owned()).or_insert(keeper);
                inside = parent;
            }
        }
        keepers
    }

    /// The keeper of a limit that the spec does not have; none if it was made by hand.
    pub fn of(&self, name: &str) -> Option<Keeper> {
        let own = [
            (self.is_agents(name), Keeper::Agent),
            (is_limit(name), Keeper::Cni),
            (runner_of(name).is_some(), Keeper::Run),
        ];
        let own = own.into_iter().find_map(|(is, keeper)| is.then_some(keeper));
        own.or_else(|| self.around.get(name).copied())
    }

    /// Whether the agent has it from another file, a container or a pod. The last two are reported with the
    /// file that lets them have limits.
    fn is_agents(&self, name: &str) -> bool {
        let whole = |path: &str| Path::new(path).canonicalize().unwrap_or_else(|_| path.into());
        let Spec { file, labels, annotations, .. } = self.spec;
        self.agent.as_ref().is_some_and(|agent| match agent.limit(name) {
            Some(limit) => *labels || *annotations || whole(&limit.file) != whole(file),
            None => agent.report.managed.contains(name),
        })
    }

    /// How many of these limits each keeps: `3 limits of others stay: 2 of `tidegate agent`, ...`; none if
    /// nobody keeps one.
    pub fn words<'n>(&self, names: impl Iterator<Item = &'n str>) -> Option<String> {
        let mut counts: BTreeMap<Keeper, usize> = BTreeMap::new();
        names.filter_map(|name| self.of(name)).for_each(|who| *counts.entry(who).or_default() += 1);
        let all = match counts.values().sum() {
            0 => return None,
            1 => "1 limit of others stays".to_owned(),
            n => format!("{n} limits of others stay"),
        };
        let each: Vec<_> = counts.iter().map(|(who, n)| format!("{n} of {who}")).collect();
        Some(format!("{all}: {}", each.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tidegate_agent::report::{LimitReport, LimitState, Report};
    use tidegate_core::Scope;
    use tidegate_host::plan::State;
    use tidegate_sys::limit::LimitOptions;

    use super::*;

    fn report(name: &str, file: &str) -> LimitReport {
        LimitReport {
            name: name.to_owned(),
            file: file.to_owned(),
            scope: String::new(),
            state: LimitState::InForce,
            reason: None,
            stays: false,
            guest: false,
            required: false,
            schedule: None,
            next_change: None,
            next_rates: None,
            cgroups: Vec::new(),
            left_out: Vec::new(),
        }
    }

    fn present(name: &str, parent: Option<&str>) -> Present {
        Present {
            name: name.to_owned(),
            scope: Scope::Cgroup(name.to_owned()),
            members: Vec::new(),
            gone: Vec::new(),
            state: State::InForce,
            options: LimitOptions::default(),
            parent: parent.map(str::to_owned),
            other_build: None,
        }
    }

    #[test]
    fn what_another_keeps_is_left_to_them() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            fs::write(&path, "").unwrap();
            path.display().to_string()
        };
        let (a, b) = (file("a.toml"), file("b.toml"));
        let limits = vec![report("of-a", &a), report("of-b", &b), report("container-web", &a)];
        let managed = ["of-a", "of-b", "container-web", "no-more"].map(str::to_owned).into();
        let report = Report { limits, managed, ..Report::default() };
        let agent = AgentStatus { running: true, stopped: false, silent_s: None, report };
        let present = [
            present("of-a", None),
            present("outer", None),
            present("middle", Some("outer")),
            present("of-b", Some("middle")),
            present("by-hand", Some("outer")),
            present("container-web", None),
            present("no-more", None),
            // No process has this number.
            present("tidegate-run-4294967295-1", None),
        ];
        let kept = |text: &str, agent: Option<&AgentStatus>| {
            let spec = Spec::parse(&a, text).unwrap();
            let agent = agent.map(|agent| AgentStatus { report: agent.report.clone(), ..*agent });
            let keepers = Keepers::with(agent, &spec, &present);
            let kept = present.iter().filter(|is| keepers.of(&is.name).is_some());
            kept.map(|is| is.name.clone()).collect::<Vec<_>>()
        };
        let all = ["of-a", "outer", "middle", "of-b", "container-web", "no-more"];
        assert_eq!(kept("labels = true", Some(&agent)), all);
        // Those of the file itself go at once, not when the agent sees that.
        assert_eq!(kept("limit = []", Some(&agent)), ["outer", "middle", "of-b", "no-more"]);
        assert_eq!(kept("limit = []", None), [""; 0]);

        let spec = Spec::parse(&b, "limit = []").unwrap();
        let keepers = Keepers::with(Some(agent), &spec, &present);
        let words = |names: &[&str]| keepers.words(names.iter().copied());
        assert_eq!(words(&["by-hand"]), None);
        assert_eq!(words(&["of-a"]).unwrap(), "1 limit of others stays: 1 of `tidegate agent`");
        let cni = "cni-01234567-c1-0123456789abcdef";
        let said = words(&["of-a", "container-web", cni, "by-hand"]).unwrap();
        assert_eq!(said, "3 limits of others stay: 2 of `tidegate agent`, 1 of `tidegate-cni`");
    }
}
