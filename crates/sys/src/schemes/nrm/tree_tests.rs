//! A limit inside a limit inside a limit, loaded: its programs differ from those of one that stands alone.

use std::{
    fs,
    process::{Command, Stdio},
};

use tidegate_core::{Class, Direction, Rate, Scheme, queue_options::VirtualQueueOptions};

use super::*;
use crate::{
    cgroup::{Cgroup, Hierarchy},
    limit::AttachedLimit,
};

/// Cgroups within each other, removed at the end.
pub(crate) struct Nest {
    pub(crate) hierarchy: Hierarchy,
    pub(crate) groups: Vec<Cgroup>,
}

impl Nest {
    pub(crate) fn new(name: &str, depth: usize) -> Nest {
        let hierarchy = Hierarchy::find().unwrap();
        let name = format!("tidegate-sys-{name}-{}", std::process::id());
        let mut groups = vec![hierarchy.create(&hierarchy.open("").unwrap(), &name).unwrap()];
        for _ in 1..depth {
            groups.push(hierarchy.create(groups.last().unwrap(), "inside").unwrap());
        }
        Nest { hierarchy, groups }
    }
}

/// The name of a test by its path, which begins with that of the crate.
pub(crate) fn test_name(path: &str) -> &str {
    path.split_once("::").map_or(path, |(_, name)| name)
}

/// This test binary in a cgroup, as a process that runs the test of that name alone.
pub(crate) fn process_in(group: &Cgroup, test: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]);
    command.arg(group.absolute()).arg(std::env::current_exe().unwrap());
    command
        .args([test_name(test), "--exact", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command
}

impl Drop for Nest {
    fn drop(&mut self) {
        self.groups.iter().rev().for_each(|group| drop(fs::remove_dir(group.absolute())));
    }
}

fn limit(mbit: u64, scheme: Scheme, class: Option<Class>) -> LimitOptions {
    let queue = Rate::from_bit_s(mbit * 1_000_000).map(VirtualQueueOptions::new);
    LimitOptions { egress: queue, ingress: queue, scheme, class, ..LimitOptions::default() }
}

/// A queue of a limit as it lies in the map.
pub(crate) fn queue_of(maps: &LimitMaps, index: usize) -> intf::NrmQueue {
    maps.own_as::<Sockets>().unwrap().queues.get(maps.at, index).unwrap()
}

#[test]
fn root_limits_load_inside_each_other() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_limits_load_inside_each_other: needs root");
        return;
    }
    let nest = Nest::new("tree", 3);
    let attach = |at: usize, options: &LimitOptions, parent: Option<&AttachedLimit>| {
        let parent = parent.map(AttachedLimit::maps);
        AttachedLimit::attach(&nest.hierarchy, &nest.groups[at], options, parent).unwrap()
    };
    for scheme in [Scheme::Pace, Scheme::Nrm] {
        let guarantee = Rate::from_bit_s(10_000_000);
        let class = Some(Class { guarantee, weight: 50 });
        let root = attach(0, &limit(100, scheme, None), None);
        let child = attach(1, &limit(80, scheme, class), Some(&root));
        let grandchild = attach(2, &limit(100_000, scheme, class), Some(&child));
        assert!(root.maps.own.parent().is_none() && child.maps.own.parent().is_some());
        // What they may use before their first packet, with half a share of what is above: the guarantee and
        // half of 99 % of 100 Mbit/s, and of 59.5 in turn.
        for direction in [Direction::Egress, Direction::Ingress] {
            let rate = |limit: &AttachedLimit| {
                let part = limit.maps.read(direction).unwrap().part;
                part.map_or(0, |part| part.rate_bit_s) as f64 / 1e6
            };
            assert!((rate(&child) - 59.5).abs() < 0.1, "{}", rate(&child));
            assert!((rate(&grandchild) - 39.45).abs() < 0.1, "{}", rate(&grandchild));
            assert_eq!(rate(&root), 0.0, "not yet");
        }
        grandchild.detach(&nest.hierarchy, &nest.groups[2]).unwrap();
        child.detach(&nest.hierarchy, &nest.groups[1]).unwrap();
        root.detach(&nest.hierarchy, &nest.groups[0]).unwrap();
    }
}
