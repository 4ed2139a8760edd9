//! The figures of the NRM paper and of the mailing list's table of 2019 (Mbit/s, ms), by case.

use std::time::Duration;

use crate::testbed::LinkSpec;

const GBIT: u64 = 1_000_000_000;

/// Goodput in Mbit/s and 99.9th percentile of 1 MB calls in ms by number of flows, at 1 Gbit/s: tables 1 and
/// 2, without and with the small probe timer.
struct Timer {
    flows: usize,
    without: (f64, f64),
    with: (f64, f64),
}

const fn timer(flows: usize, without: (f64, f64), with: (f64, f64)) -> Timer {
    Timer { flows, without, with }
}

const CUBIC: [Timer; 4] = [
    timer(1, (496.0, 250.0), (794.0, 84.0)),
    timer(2, (856.0, 260.0), (922.0, 44.0)),
    timer(5, (935.0, 465.0), (989.0, 92.0)),
    timer(9, (999.0, 600.0), (1006.0, 345.0)),
];
const DCTCP: [Timer; 4] = [
    timer(1, (953.0, 9.0), (953.0, 9.0)),
    timer(2, (962.0, 22.0), (962.0, 21.0)),
    timer(5, (1003.0, 52.0), (1004.0, 48.0)),
    timer(9, (1029.0, 308.0), (1020.0, 78.0)),
];

/// System, congestion control, and for one flow and for nine: goodput in Mbit/s and percentile in ms.
type Far = (&'static str, &'static str, [(f64, f64); 2]);

/// Table 3, 1 Gbit/s over a round trip of 10 ms: goodput in Mbit/s and 99.9th percentile of 1 MB calls in ms,
/// for one flow and for nine. The paper has two rows of CUBIC with NRM and does not say which is the one with
/// ECN; they are taken in the order of its list of cases. Of HTB the row without fq.
const TABLE_3: [Far; 4] = [
    ("htb", "cubic", [(437.0, 20.0), (945.0, 120.0)]),
    ("nrm", "cubic", [(410.0, 46.0), (915.0, 141.0)]),
    ("nrm", "cubic+ecn", [(754.0, 12.0), (944.0, 218.0)]),
    ("nrm", "dctcp", [(666.0, 13.0), (947.0, 143.0)]),
];
const TABLE_3_RTT: Duration = Duration::from_millis(10);

/// What a published figure is looked up by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Figure<'a> {
    pub(super) system: &'a str,
    pub(super) limit_bit_s: u64,
    pub(super) flows: usize,
    pub(super) cc: &'a str,
    /// What the path has besides the limit; none: nothing.
    pub(super) link: Option<LinkSpec>,
}

impl Figure<'_> {
    /// The figure of an egress limit, in the metric's unit.
    pub(super) fn egress(&self, metric: &str) -> Option<f64> {
        let &Figure { system, limit_bit_s, flows, cc, link } = self;
        let table_3 = LinkSpec::rtt(TABLE_3_RTT);
        match link.map(|link| (link.there, link.back)) {
            None => egress(system, limit_bit_s, flows, cc, metric),
            Some(ways) if limit_bit_s == GBIT && ways == (table_3.there, table_3.back) => {
                far_egress(system, flows, cc, metric)
            }
            Some(_) => None,
        }
    }

    /// The figure of an ingress limit, in the metric's unit.
    pub(super) fn ingress(&self, metric: &str) -> Option<f64> {
        let &Figure { system, limit_bit_s, flows, cc, link } = self;
        match link {
            None => ingress(system, limit_bit_s, flows, cc, metric),
            Some(_) => None,
        }
    }
}

fn far_egress(system: &str, flows: usize, cc: &str, metric: &str) -> Option<f64> {
    let system = if is_nrm(system) { "nrm" } else { system };
    let of = |(known, control, _): &&(&str, &str, _)| (*known, *control) == (system, cc);
    let (.., [one, nine]) = TABLE_3.iter().find(of)?;
    let (mbit_s, p99_9_ms) = match flows {
        1 => one,
        9 => nine,
        _ => return None,
    };
    match metric {
        "goodput_bit_s" => Some(mbit_s * 1e6),
        "rpc_1mb_p99_9_us" => Some(p99_9_ms * 1e3),
        _ => None,
    }
}

/// The egress figure of a system in a case, in the metric's unit. `nrm` and `nrm-paper` get what the paper's
/// whole system did, its change to the kernel included; `nrm-kernel-timers` what it did without.
fn egress(system: &str, limit_bit_s: u64, flows: usize, cc: &str, metric: &str) -> Option<f64> {
    if system == "htb" {
        return htb(limit_bit_s, flows, metric);
    }
    if (limit_bit_s, flows, cc, metric) == (5 * GBIT, 9, "dctcp", "rpc_10kb_p99_9_us") {
        return is_nrm(system).then_some(0.8e3);
    }
    if (limit_bit_s, flows, cc, metric) == (5 * GBIT, 9, "dctcp", "rpc_10kb_bit_s") {
        return is_nrm(system).then_some(295e6);
    }
    if limit_bit_s != GBIT {
        return None;
    }
    if flows == 2 && is_nrm(system) {
        // Mailing list, 2019: round trip, p99 of 10 KB and of 1 MB calls.
        let (rtt_us, small_us, large_us) = match cc {
            "cubic" => (108.0, 539.0, 24.5e3),
            "dctcp" => (105.0, 744.0, 15.9e3),
            _ => return None,
        };
        match metric {
            "rtt_p50_us" => return Some(rtt_us),
            "rpc_10kb_p99_us" => return Some(small_us),
            "rpc_1mb_p99_us" => return Some(large_us),
            _ => {}
        }
    }
    let table = match cc {
        "cubic" => &CUBIC,
        "dctcp" => &DCTCP,
        _ => return None,
    };
    let row = table.iter().find(|row| row.flows == flows)?;
    let (mbit_s, p99_9_ms) = match system {
        "nrm" | "nrm-paper" => row.with,
        "nrm-kernel-timers" => row.without,
        _ => return None,
    };
    match metric {
        "goodput_bit_s" => Some(mbit_s * 1e6),
        "rpc_1mb_p99_9_us" => Some(p99_9_ms * 1e3),
        _ => None,
    }
}

fn is_nrm(system: &str) -> bool {
    matches!(system, "nrm" | "nrm-paper")
}

fn htb(limit_bit_s: u64, flows: usize, metric: &str) -> Option<f64> {
    match (limit_bit_s, flows, metric) {
        (GBIT, 2, "goodput_bit_s") => Some(919e6),
        (GBIT, 2, "rtt_p50_us") => Some(1825.0),
        (GBIT, 2, "rpc_10kb_p99_us") => Some(4140.0),
        (GBIT, 2, "rpc_1mb_p99_us") => Some(9.9e3),
        (limit, 9, "rpc_10kb_bit_s") if limit == 5 * GBIT => Some(35e6),
        (limit, 9, "rpc_10kb_p99_9_us") if limit == 5 * GBIT => Some(3.7e3),
        _ => None,
    }
}

/// A row of the table of ingress rates.
struct Ingress {
    limit_mbit_s: u64,
    flows: usize,
    goodput_mbit_s: f64,
    retransmits: f64,
    /// 99.9th percentile and median of 1 MB calls, ms.
    large_ms: (f64, f64),
    /// The same of 10 KB calls.
    small_ms: Option<(f64, f64)>,
}

const fn ingress_row(
    limit_mbit_s: u64,
    flows: usize,
    (goodput_mbit_s, retransmits): (f64, f64),
    large_ms: (f64, f64),
    small_ms: Option<(f64, f64)>,
) -> Ingress {
    Ingress { limit_mbit_s, flows, goodput_mbit_s, retransmits, large_ms, small_ms }
}

const INGRESS: [Ingress; 8] = [
    ingress_row(1000, 1, (925.0, 0.0), (9.5, 9.0), None),
    ingress_row(1000, 2, (922.0, 0.0), (19.0, 13.0), Some((0.7, 0.2))),
    ingress_row(1000, 5, (931.0, 0.0), (47.9, 43.0), Some((0.9, 0.5))),
    ingress_row(1000, 9, (945.0, 1493.0), (336.0, 54.0), Some((207.0, 0.8))),
    ingress_row(5000, 1, (4600.0, 0.0), (4.1, 1.7), None),
    ingress_row(5000, 2, (4600.0, 0.0), (4.7, 1.9), Some((0.6, 0.2))),
    ingress_row(5000, 5, (4670.0, 0.0), (12.4, 7.7), Some((1.0, 0.2))),
    ingress_row(5000, 9, (4630.0, 0.0), (18.5, 15.5), Some((0.8, 0.2))),
];

/// The ingress figure of a case; published for DCTCP alone.
fn ingress(system: &str, limit_bit_s: u64, flows: usize, cc: &str, metric: &str) -> Option<f64> {
    if !is_nrm(system) || cc != "dctcp" {
        return None;
    }
    let row = INGRESS
        .iter()
        .find(|row| row.limit_mbit_s * 1_000_000 == limit_bit_s && row.flows == flows)?;
    match metric {
        "goodput_bit_s" => Some(row.goodput_mbit_s * 1e6),
        "retransmits" => Some(row.retransmits),
        "rpc_1mb_p99_9_us" => Some(row.large_ms.0 * 1e3),
        "rpc_1mb_p50_us" => Some(row.large_ms.1 * 1e3),
        "rpc_10kb_p99_9_us" => row.small_ms.map(|(tail, _)| tail * 1e3),
        "rpc_10kb_p50_us" => row.small_ms.map(|(_, median)| median * 1e3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::link::LinkOptions;

    use super::*;

    #[test]
    fn the_tables_are_found_by_case() {
        let cubic = |system, metric| egress(system, GBIT, 9, "cubic", metric);
        assert_eq!(cubic("nrm-paper", "goodput_bit_s"), Some(1006e6));
        assert_eq!(cubic("nrm-kernel-timers", "rpc_1mb_p99_9_us"), Some(600e3));
        assert_eq!(cubic("pace", "goodput_bit_s"), None);
        assert_eq!(egress("nrm", 5 * GBIT, 9, "dctcp", "rpc_10kb_bit_s"), Some(295e6));
        let far = Figure {
            system: "nrm-paper",
            limit_bit_s: GBIT,
            flows: 9,
            cc: "dctcp",
            link: Some(LinkSpec { seed: 7, ..LinkSpec::rtt(TABLE_3_RTT) }),
        };
        assert_eq!(far.egress("goodput_bit_s"), Some(947e6));
        assert_eq!(Figure { link: None, ..far }.egress("goodput_bit_s"), Some(1020e6));
        let near = Some(LinkSpec::rtt(Duration::ZERO));
        assert_eq!(Figure { link: near, ..far }.egress("goodput_bit_s"), None);
        let lossy = LinkOptions { loss: 0.01, ..LinkSpec::rtt(TABLE_3_RTT).there };
        let lossy = Some(LinkSpec::symmetric(lossy));
        assert_eq!(Figure { link: lossy, ..far }.egress("goodput_bit_s"), None);
        assert_eq!(ingress("nrm", GBIT, 9, "dctcp", "retransmits"), Some(1493.0));
        assert_eq!(ingress("nrm", GBIT, 1, "dctcp", "rpc_10kb_p50_us"), None);
    }
}
