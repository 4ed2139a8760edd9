//! Structs of the maps of the gate and of `htb`, and of questions about queues: bindgen's view of headers of
//! `bpf/`, which say what each field is.

#[allow(dead_code, missing_docs, non_camel_case_types, clippy::all, clippy::pedantic)]
mod headers {
    include!(concat!(env!("OUT_DIR"), "/shared.rs"));
}
pub use headers::{
    Backlog, Count, GT_UNDECIDED_MAX, GateCounters, HTB_CGROUP_LEVELS, HTB_HAS_CGROUPS,
    HTB_HAS_PORTS, HTB_PORT_KEY, HtbMarked, HtbSlot, QdiscQuery, Undecided, WaitingFlow,
    WaitingQuery,
};
