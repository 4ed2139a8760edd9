//! Whether an agent is missed that has not run since the host started: only its files are left then.
//!
//! A host whose files are applied by hand needs no agent. So it is missed only if the files ask for more than
//! the host has: a limit that is neither on the host nor waits there, limits that containers or pods bring
//! along, or a file that cannot be read.

use std::{collections::BTreeSet, path::Path};

use jiff::Zoned;
use tidegate_host::spec::LimitSpec;

use crate::{directory, goal::Files};

/// The first request of a directory's files that a host does not meet, of whose limits `names` are on it or
/// wait there: `limit `web` of /etc/tidegate is not on this host`.
pub fn missed(directory: &Path, names: &BTreeSet<&str>, now: &Zoned) -> Option<String> {
    let (files, at) = (directory::read_if_there(directory), directory.display());
    let is_here = |limit: &LimitSpec| {
        let of_each = format!("{}-", limit.name);
        let one_of_each = || names.iter().any(|name| name.starts_with(&of_each));
        names.contains(&*limit.name) || limit.follow.each && one_of_each()
    };
    let missing: Vec<_> = asked(&files, now).into_iter().filter(|limit| !is_here(limit)).collect();
    if let Some(first) = missing.first() {
        let (more, are) = match missing.len() - 1 {
            0 => (String::new(), "is"),
            more => (format!(" and {more} more"), "are"),
        };
        return Some(format!("limit `{}`{more} of {at} {are} not on this host", first.name));
    }
    let brought = files.specs.iter().find_map(|spec| match (spec.labels, spec.annotations) {
        (true, _) => Some("labels of containers"),
        (_, true) => Some("annotations of pods"),
        _ => None,
    });
    let brought = brought.map(|by| format!("{at} asks for limits by {by}"));
    brought.or_else(|| files.errors.into_iter().next())
}

/// The limits that have a rate now: neither they nor those that they are inside of are off by schedule.
fn asked(files: &Files, now: &Zoned) -> Vec<LimitSpec> {
    let (mut asked, mut off) = (Vec::new(), BTreeSet::new());
    // A row was checked when the file was read.
    for moment in files.specs.iter().filter_map(|spec| spec.at(now).ok()) {
        asked.extend(moment.spec.limits);
        off.extend(moment.off.into_iter().map(|limit| limit.name));
    }
    loop {
        let is_off = |limit: &LimitSpec| limit.parent.as_ref().is_some_and(|p| off.contains(p));
        let Some(at) = asked.iter().position(is_off) else { return asked };
        off.insert(asked.remove(at).name);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn of(text: &str, names: &[&str]) -> Option<String> {
        of_files(&[("a.toml", text)], names)
    }

    fn of_files(files: &[(&str, &str)], names: &[&str]) -> Option<String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let now: Zoned = "2026-03-02T09:00[UTC]".parse().unwrap();
        let said = missed(dir.path(), &names.iter().copied().collect(), &now)?;
        Some(said.replace(dir.path().to_str().unwrap(), "DIR"))
    }

    fn limit(name: &str, rest: &str) -> String {
        format!("[[limit]]\nname = \"{name}\"\nscope = {{ unit = \"{name}.service\" }}\n{rest}\n")
    }

    const RATE: &str = "egress = \"1mbit\"";

    #[test]
    fn files_that_ask_for_nothing_miss_no_agent() {
        let shipped = include_str!("../../../packaging/limits.toml");
        for text in ["", "# egress = \"1mbit\"\n", "limit = []", "labels = false", shipped] {
            assert_eq!(of(text, &[]), None, "{text}");
        }
        let now = Zoned::now();
        assert_eq!(missed(Path::new("/nowhere/tidegate"), &BTreeSet::new(), &now), None);
    }

    #[test]
    fn a_limit_that_is_not_on_the_host_is_missed() {
        let text = limit("web", RATE) + &limit("db", RATE);
        assert_eq!(of(&text, &["db"]).unwrap(), "limit `web` of DIR is not on this host");
        assert_eq!(of(&text, &[]).unwrap(), "limit `web` and 1 more of DIR are not on this host");
        assert_eq!(of(&text, &["db", "web", "other"]), None, "applied by hand");
    }

    #[test]
    fn the_limits_of_each_match_stand_for_theirs() {
        let each = limit("web", "egress = \"1mbit\"\neach = true");
        assert_eq!(of(&each, &["web-a_service"]), None);
        assert_eq!(of(&each, &["web"]), None, "it waits");
        assert!(of(&each, &["webs"]).is_some());
        assert!(of(&limit("web", RATE), &["web-a_service"]).is_some(), "another one");
    }

    #[test]
    fn what_is_off_by_schedule_is_not_missed_with_what_is_inside_it() {
        let off = limit("night", "schedule = [{ days = \"sun\", egress = \"1mbit\" }]");
        assert_eq!(of(&off, &[]), None);
        // In one file it would be refused.
        let inside = limit("inside", "parent = \"night\"\nweight = 10");
        assert_eq!(of_files(&[("a.toml", &inside), ("b.toml", &off)], &[]), None);
        let day = limit("day", "schedule = [{ days = \"mon\", egress = \"1mbit\" }]");
        let said = of(&(off + &day), &[]).unwrap();
        assert_eq!(said, "limit `day` of DIR is not on this host");
    }

    #[test]
    fn only_an_agent_knows_what_containers_and_pods_ask_for() {
        assert_eq!(
            of("labels = true", &[]).unwrap(),
            "DIR asks for limits by labels of containers"
        );
        assert_eq!(
            of("annotations = true", &[]).unwrap(),
            "DIR asks for limits by annotations of pods"
        );
        let error = of("[[limit]\n", &[]).unwrap();
        assert!(error.starts_with("DIR/a.toml:1: "), "{error}");
    }
}
