use std::{
    os::fd::AsFd,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use tidegate_core::{Scheme, queue_options::VirtualQueueOptions};

use super::*;
use crate::{
    bpf,
    limit::LimitOptions,
    schemes::{self, LINKS, Programs, nrm::tree_tests::Nest},
};

#[test]
fn root_a_link_is_found_while_another_one_is_made() {
    const TEST: &str = "root_a_link_is_found_while_another_one_is_made";
    /// A walk that ends at a link in the making fails within some hundred rounds.
    const ROUNDS: usize = 2000;
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let nest = Nest::new("links", 2);
    let options = LimitOptions {
        egress: Some(VirtualQueueOptions::new("1gbit".parse().unwrap())),
        scheme: Scheme::Police,
        ..LimitOptions::default()
    };
    let scheme = schemes::of(Scheme::Police);
    let loaded = scheme.load(0, &options, None, Programs::Needed).unwrap();
    let (_, program) = &loaded.programs[0];
    let attach = |at: usize| bpf::attach(program.as_fd(), LINKS[0], &nest.groups[at]).unwrap();

    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                drop(attach(1));
            }
        });
        let missed = (0..ROUNDS).find(|_| {
            let link = of(attach(0)).unwrap();
            assert!(matches!(link.on, On::Cgroup { id, .. } if id == nest.groups[0].id()));
            !all().any(|found| found.id == link.id)
        });
        ends.store(true, Ordering::Relaxed);
        assert_eq!(missed, None);
    });
}
