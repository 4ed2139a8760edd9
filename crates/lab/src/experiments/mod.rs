//! The experiments, one a file.
//!
//! ```text
//! nrm_egress, nrm_ingress -> mix (calls of two sizes) -> bed (namespaces, meter) -> wire (rates)
//! limits ------------------------------------------------^
//! ```
//!
//! `published` has the figures that the papers print.

use crate::{experiment::Experiment, report::Case, table::circumstance};

mod bed;
mod demo;
mod htb_latency;
mod limits;
mod mix;
mod nrm_egress;
mod nrm_ingress;
mod program_cost;
mod published;
mod seed_000;
mod wire;

pub use demo::Demo;
pub use htb_latency::HtbLatency;
pub use limits::Limits;
pub use nrm_egress::NrmEgress;
pub use nrm_ingress::NrmIngress;
pub use program_cost::ProgramCost;

/// Bytes on the wire for a byte of payload: a full TCP segment with timestamps over IPv4 on Ethernet.
const FRAME_PER_PAYLOAD: f64 = 1514.0 / 1448.0;

/// All experiments, in the order in which `tidegate-lab list` shows them.
pub fn all() -> Vec<Box<dyn Experiment>> {
    vec![
        Box::new(Demo::default()),
        Box::new(HtbLatency::default()),
        Box::new(Limits::default()),
        Box::new(NrmEgress::default()),
        Box::new(NrmIngress::default()),
        Box::new(ProgramCost),
    ]
}

/// `9 flows of cubic at 1 Gbit/s`; without what the case does not say.
fn case_in_words(case: &Case) -> String {
    let word = |key: &str| case.0.get(key).map(|value| circumstance(key, value));
    let flows = word("flows").map(|flows| {
        let s = if flows == "1" { "" } else { "s" };
        format!("{flows} flow{s}")
    });
    let rest = [("of", word("cc")), ("at", word("limit_bit_s"))];
    let rest = rest.into_iter().filter_map(|(join, word)| Some(format!("{join} {}", word?)));
    flows.into_iter().chain(rest).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
pub(crate) mod example;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_in_words() {
        let case = Case::new().with("flows", 9).with("cc", "cubic");
        assert_eq!(case_in_words(&case), "9 flows of cubic");
        let case = case.with("limit_bit_s", 1e9).with("flows", 1);
        assert_eq!(case_in_words(&case), "1 flow of cubic at 1 Gbit/s");
        assert_eq!(case_in_words(&Case::new()), "");
    }
}
