//! The experiments, one a file.
//!
//! ```text
//! nrm_egress, nrm_ingress, pace_egress -> mix (calls of two sizes) -> bed (namespaces) -> wire (rates)
//! limits, pace_egress -----------------> bulk (greedy flows) ---------^
//! htb_latency, demo --------------------------------------------------^
//! htb_latency, low_latency, dctcp_threshold -> guest (transfers through a port) -> shapers (limits on it)
//! applications, demo -> requests (of real servers) -> row (what is measured), bed
//! bwlimit -> copies (programs and their words), page (what is made of the results), bed
//! agent -> cpu (CPU time of a process)
//! hierarchy -> tree (classes, steps, rule), force (HTB's classes, limits on cgroups), idle (one beside many)
//! carousel_cpu, bulk -> cpu (CPU time of a path)
//! policer_burst, policer_tcp -> policers (a router that polices, and its peers) -> wire
//! pace_dynamics -> scenario (flows that come and go), settling (what became of their rates)
//! carousel -> bed (application and shaper in this process), kernel (the same flows through a qdisc)
//! drl -> forwarded (what passed), simulation (in virtual time), daemons (in namespaces)
//! wheel -> queues (ours and its peers), load (what is done to them)
//! ```
//!
//! `carousel_cpu` has a bed of its own, as its paths differ. `link_accuracy` measures the lab's links
//! themselves.
//!
//! `published` has the figures of the NRM paper and of its table on the mailing list, `he_2017` those of He
//! et al.

use crate::{experiment::Experiment, report::Case, table::circumstance};

pub mod agent;
pub mod applications;
mod bed;
mod bulk;
pub mod bwlimit;
pub mod carousel;
pub mod carousel_cpu;
mod cpu;
pub mod dctcp_threshold;
pub mod demo;
pub mod drl;
mod guest;
mod he_2017;
pub mod hierarchy;
pub mod htb_latency;
pub mod limits;
pub mod link_accuracy;
pub mod low_latency;
mod mix;
pub mod mixed_tenants;
pub mod nrm_egress;
pub mod nrm_ingress;
pub mod pace_dynamics;
pub mod pace_egress;
pub mod pace_ingress;
pub mod policer_burst;
pub mod policer_tcp;
mod policers;
pub mod program_cost;
mod published;
mod requests;
mod shapers;
mod tally;
pub mod wheel;
mod wire;

/// All experiments, in the order in which `tidegate-lab list` shows them.
pub fn all() -> Vec<Box<dyn Experiment>> {
    vec![
        Box::new(agent::Agent::default()),
        Box::new(applications::Applications::default()),
        Box::new(bwlimit::Bwlimit::default()),
        Box::new(carousel::backpressure::Backpressure::default()),
        Box::new(carousel::conformance::Conformance::default()),
        Box::new(carousel::flows::Flows::default()),
        Box::new(carousel::granularity::Granularity::default()),
        Box::new(carousel_cpu::CarouselCpu::default()),
        Box::new(dctcp_threshold::DctcpThreshold::default()),
        Box::new(demo::Demo::default()),
        Box::new(drl::cost::DrlCost::default()),
        Box::new(drl::dynamic::DrlDynamic::default()),
        Box::new(drl::failures::DrlFailures::default()),
        Box::new(drl::fairness::DrlFairness::default()),
        Box::new(drl::fig3::DrlFig3::default()),
        Box::new(drl::rtt::DrlRtt::default()),
        Box::new(drl::scale::DrlScale::default()),
        Box::new(drl::web::DrlWeb::default()),
        Box::new(hierarchy::Hierarchy::default()),
        Box::new(htb_latency::HtbLatency::default()),
        Box::new(limits::Limits::default()),
        Box::new(link_accuracy::LinkAccuracy::default()),
        Box::new(low_latency::LowLatency::default()),
        Box::new(mixed_tenants::MixedTenants::default()),
        Box::new(nrm_egress::NrmEgress::default()),
        Box::new(nrm_ingress::NrmIngress::default()),
        Box::new(pace_ingress::PaceIngress::default()),
        Box::new(pace_dynamics::PaceDynamics::default()),
        Box::new(pace_egress::PaceEgress::default()),
        Box::new(policer_burst::PolicerBurst::default()),
        Box::new(policer_tcp::PolicerTcp::default()),
        Box::new(program_cost::ProgramCost),
        Box::new(wheel::Wheel::default()),
    ]
}

/// `9 flows of cubic at 1 Gbit/s`; without what the case does not say.
fn case_in_words(case: &Case) -> String {
    let word = |key: &str| case.0.get(key).map(|value| circumstance(key, value));
    let flows = word("flows").map(|flows| {
        let s = if flows == "1" { "" } else { "s" };
        format!("{flows} flow{s}")
    });
    let rest = [
        ("of", word("cc")),
        ("at", word("limit_bit_s")),
        ("over", word("rtt_us")),
        ("on a link of", word("link_bit_s")),
        ("with a queue of", word("link_queue_bytes")),
        ("that loses", word("loss_percent")),
        ("that reorders", word("reorder_percent")),
    ];
    let rest = rest.into_iter().filter_map(|(join, word)| Some(format!("{join} {}", word?)));
    flows.into_iter().chain(rest).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
pub(crate) mod example;

#[cfg(test)]
mod tests {
    use tidegate_core::{Rate, link::LinkOptions};

    use super::*;
    use crate::testbed::LinkSpec;

    #[test]
    fn a_case_in_words() {
        let case = Case::new().with("flows", 9).with("cc", "cubic");
        assert_eq!(case_in_words(&case), "9 flows of cubic");
        let case = case.with("limit_bit_s", 1e9).with("flows", 1);
        assert_eq!(case_in_words(&case), "1 flow of cubic at 1 Gbit/s");
        let link = LinkSpec::rtt(std::time::Duration::from_millis(10));
        let far = case.clone().with_link(Some(link));
        assert_eq!(case_in_words(&far), "1 flow of cubic at 1 Gbit/s over 10 ms");
        let way = LinkOptions {
            rate: Rate::from_bit_s(8_000_000),
            loss: 0.01,
            reorder: 0.002,
            ..link.there
        };
        let lossy = case.with_link(Some(LinkSpec::symmetric(way)));
        assert_eq!(
            case_in_words(&lossy),
            "1 flow of cubic at 1 Gbit/s over 10 ms on a link of 8 Mbit/s with a queue of 65.536 kB \
             that loses 1 % that reorders 0.2 %"
        );
        assert_eq!(case_in_words(&Case::new()), "");
    }
}
