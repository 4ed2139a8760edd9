//! The figures of He et al. (APNet 2017), tables 1 and 2, figure 4 and section 4, by case.
//!
//! A cell is: throughput in Mbit/s (table 2: percent of 10 Gbit/s), median and 99.9th percentile of the round
//! trip in µs. The paper's text has a median of 62 µs for the idle path, its tables 116.

/// A cell of a table.
type Cell = (f64, f64, f64);

const FLOWS: [u32; 4] = [1, 2, 8, 16];

/// Rows: flows; columns: limits of 1, 2, 4, 8 Gbit/s.
const TABLE_1: [[Cell; 4]; 4] = [
    [
        (951.0, 957.0, 1115.0),
        (1910.0, 883.0, 1000.0),
        (3820.0, 643.0, 706.0),
        (7380.0, 1583.0, 1673.0),
    ],
    [
        (945.0, 1513.0, 1701.0),
        (1910.0, 1078.0, 1203.0),
        (3820.0, 1047.0, 1132.0),
        (7500.0, 853.0, 933.0),
    ],
    [
        (958.0, 2316.0, 2527.0),
        (1915.0, 1766.0, 1939.0),
        (3827.0, 1529.0, 1637.0),
        (7627.0, 1110.0, 1208.0),
    ],
    [
        (960.0, 3192.0, 3320.0),
        (1920.0, 2373.0, 2511.0),
        (3829.0, 1880.0, 2016.0),
        (7655.0, 1262.0, 1486.0),
    ],
];

/// Rows: flows for each receiver; columns: minimums of 2, 3, 4, 5 tenths of the total.
const TABLE_2: [[Cell; 4]; 4] = [
    [(94.2, 475.0, 551.0), (94.2, 797.0, 849.0), (94.1, 1515.0, 1626.0), (94.1, 1658.0, 1751.0)],
    [(94.1, 699.0, 983.0), (94.2, 916.0, 989.0), (94.2, 1006.0, 1102.0), (94.2, 1036.0, 1115.0)],
    [
        (92.2, 1512.0, 1697.0),
        (93.9, 1407.0, 1673.0),
        (93.2, 1410.0, 1532.0),
        (94.0, 1587.0, 1768.0),
    ],
    [
        (91.8, 2023.0, 2147.0),
        (91.6, 2040.0, 2182.0),
        (92.3, 2064.0, 2185.0),
        (93.0, 1986.0, 2100.0),
    ],
];

/// The round trip without limit and load.
pub(super) fn baseline_us(percentile: &str) -> Option<f64> {
    match percentile {
        "p50" => Some(116.0),
        "p99.9" => Some(237.0),
        _ => None,
    }
}

/// A figure of table 1, in the metric's unit; HTB's alone were published.
pub(super) fn one_receiver(
    system: &str,
    flows: u32,
    limit_bit_s: u64,
    metric: &str,
) -> Option<f64> {
    let column = [1, 2, 4, 8].iter().position(|gbit| gbit * 1_000_000_000 == limit_bit_s)?;
    let cell = TABLE_1[row(flows)?][column];
    match metric {
        _ if system != "htb" => None,
        "goodput_bit_s" => Some(cell.0 * 1e6),
        _ => round_trip(cell, metric),
    }
}

/// Section 4, one flow: limit in Gbit/s, goodput of DEM and SPRING in Mbit/s, median round trip in µs.
const SECTION_4: [(u64, &str, f64, f64); 4] = [
    (1, "dem", 950.0, 166.0),
    (2, "dem", 1880.0, 102.0),
    (1, "spring", 956.0, 161.0),
    (2, "spring", 1900.0, 115.0),
];

/// Section 3.2, one flow of DCTCP at 1 Gbit/s: the threshold in KB, and the median round trip in µs.
const SECTION_3_2: [(u64, f64); 3] = [(20, 93.0), (60, 224.0), (100, 375.0)];

/// A figure of sections 3 and 4 or table 1, whatever the congestion control, as the paper does not say it.
pub(super) fn low_latency(system: &str, flows: u32, limit_bit_s: u64, metric: &str) -> Option<f64> {
    if system == "idle" {
        return baseline_us(match metric {
            "rtt_p50_us" => "p50",
            "rtt_p99_9_us" => "p99.9",
            _ => return None,
        });
    }
    if system == "htb-ecn" && flows == 1 {
        return dctcp_rtt_us(limit_bit_s, 60_000).filter(|_| metric == "rtt_p50_us");
    }
    let here = |row: &&(u64, &str, f64, f64)| {
        row.0 * 1_000_000_000 == limit_bit_s && row.1 == system && flows == 1
    };
    match (SECTION_4.iter().find(here), metric) {
        (Some((.., mbit_s, _)), "goodput_bit_s") => Some(mbit_s * 1e6),
        (Some((.., us)), "rtt_p50_us") => Some(*us),
        _ => one_receiver(system, flows, limit_bit_s, metric),
    }
}

/// The median round trip of one flow of DCTCP where HTB marks from a threshold on.
pub(super) fn dctcp_rtt_us(limit_bit_s: u64, mark_bytes: u64) -> Option<f64> {
    let of = SECTION_3_2.iter().find(|(kb, _)| kb * 1000 == mark_bytes);
    of.filter(|_| limit_bit_s == 1_000_000_000).map(|(_, us)| *us)
}

/// A figure of table 2, for a minimum in tenths of the total.
pub(super) fn two_receivers(flows: u32, tenths: u64, metric: &str) -> Option<f64> {
    let column = [2, 3, 4, 5].iter().position(|known| *known == tenths)?;
    let cell = TABLE_2[row(flows)?][column];
    match metric {
        "saturation_percent" => Some(cell.0),
        _ => round_trip(cell, metric),
    }
}

fn row(flows: u32) -> Option<usize> {
    FLOWS.iter().position(|known| *known == flows)
}

fn round_trip((_, median_us, tail_us): Cell, metric: &str) -> Option<f64> {
    match metric {
        "rtt_p50_us" => Some(median_us),
        "rtt_p99_9_us" => Some(tail_us),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_found_by_case() {
        let one = |system, flows, metric| one_receiver(system, flows, 1_000_000_000, metric);
        assert_eq!(one("htb", 1, "rtt_p50_us"), Some(957.0));
        assert_eq!(one("htb", 16, "goodput_bit_s"), Some(960e6));
        assert_eq!((one("pace", 1, "rtt_p50_us"), one("htb", 3, "rtt_p50_us")), (None, None));
        assert_eq!(two_receivers(16, 5, "rtt_p99_9_us"), Some(2100.0));
        let of = |system, flows, gbit: u64, metric| {
            low_latency(system, flows, gbit * 1_000_000_000, metric)
        };
        assert_eq!(of("spring", 1, 2, "goodput_bit_s"), Some(1900e6));
        assert_eq!(of("dem", 1, 1, "rtt_p50_us"), Some(166.0));
        assert_eq!((of("dem", 8, 1, "rtt_p50_us"), of("dem", 1, 1, "rtt_p99_us")), (None, None));
        assert_eq!(of("htb", 8, 1, "rtt_p50_us"), Some(2316.0));
        assert_eq!(of("htb-ecn", 1, 1, "rtt_p50_us"), Some(224.0));
        assert_eq!(of("htb-ecn", 1, 2, "rtt_p50_us"), None);
        assert_eq!(two_receivers(8, 2, "saturation_percent"), Some(92.2));
    }
}
