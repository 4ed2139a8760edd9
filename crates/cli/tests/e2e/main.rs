//! The binary driven as a user drives it.
//!
//! Tests whose names start with `root_` need root and say SKIP without it. Each has its own BPF file system
//! and its own cgroups and puts back what it took, so all run in parallel.

#![allow(clippy::unwrap_used, reason = "tests, helpers included")]

mod acks;
mod agent;
mod apply;
mod auto;
mod burst;
#[path = "../../../capture/tests/captures/mod.rs"]
mod captures;
mod clsact;
mod cni;
mod common;
mod daemon;
mod deploy;
mod doctor;
mod edt;
mod explain;
mod group;
mod htb;
mod ingress;
mod kill;
mod limit;
mod members;
mod nic;
mod older;
mod place;
mod police;
mod police_fair;
mod police_match;
mod police_xdp;
mod recipes;
mod refusals;
mod run;
mod ssh;
mod store;
mod tbf;
mod top;
mod tracer;
mod traffic;
mod tree;
mod upgrade;
mod users;
mod vm;
mod waiting;
mod web;

/// Not a test: what the tests run under a limit. It does what `TIDEGATE_TEST_HELPER` says.
#[test]
fn helper() {
    traffic::help();
    edt::help();
    tree::help();
    ingress::help();
}
