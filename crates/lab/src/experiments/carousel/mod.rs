//! The shaper of the software NIC against Carousel's figures (Saeed et al., SIGCOMM 2017): flows at rates
//! of their own, backpressure, the slots of the wheel, and the rate beside the kernel's limiters.
//!
//! ```text
//! flows, backpressure, granularity, conformance ─► bed (application, NIC) ─► departures (port that counts)
//!       └─────────────────────────────┴──────────► kernel (UDP through a qdisc, on a testbed)
//! ```
//!
//! Deviations are from what was asked. A flow's is less one packet: in any window a packet more or less is
//! no error of the rate.

mod bed;
mod departures;
mod kernel;

pub mod backpressure;
pub mod conformance;
pub mod flows;
pub mod granularity;

use std::time::Duration;

use tidegate_core::{
    Rate,
    completion::{SEGMENT_TIME, segment_bytes},
};

const MBIT: u64 = 1_000_000;
const GBIT: u64 = 1_000 * MBIT;
/// A full frame of Ethernet.
const MTU_FRAME_BYTES: usize = 1_514;
/// The longest segment here: a TAP device takes no longer frame.
const SEGMENT_FRAME_BYTES: usize = 65_500;
/// A bin of the deviation, as in the paper's figures.
const BIN: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);
/// What a flow may catch up after the shaper's or the application's thread had no CPU: as long as
/// another program may keep it on a busy machine.
const CATCH_UP: Duration = Duration::from_millis(5);
/// A slot of the wheel that is short beside the 2 us within which packets are to leave, as stamps are
/// rounded up.
const FINE_SLOT_NS: u64 = 512;
/// The paper's, and what a packet's lateness is judged by.
const PAPER_SLOT_NS: u64 = 2_048;

/// `total_bit_s` over `flows`, each with another rate: from half to one and a half of the average.
fn rates(total_bit_s: u64, flows: usize) -> Vec<Rate> {
    let (n, average) = (flows as u64, total_bit_s / flows as u64);
    let rate = |flow: u64| (average / 2 + average * (2 * flow + 1) / (2 * n)).max(1);
    (0..n).filter_map(|flow| Rate::from_bit_s(rate(flow))).collect()
}

fn total_bit_s(rates: &[Rate]) -> u64 {
    rates.iter().map(|rate| rate.bit_s()).sum()
}

/// The segments that TCP would build of each rate: a millisecond of it, a full frame at least.
fn segments(rates: &[Rate]) -> Vec<usize> {
    let bytes = |rate: &Rate| segment_bytes(*rate, SEGMENT_TIME) as usize;
    rates.iter().map(|rate| bytes(rate).clamp(MTU_FRAME_BYTES, SEGMENT_FRAME_BYTES)).collect()
}

/// How far `bytes` in `window` are from the rate, less a packet of `frame_bytes`, as a part of the rate.
fn error(rate: Rate, window: Duration, bytes: u64, frame_bytes: usize) -> f64 {
    let wanted = rate.bit_s() as f64 / 8.0 * window.as_secs_f64();
    ((bytes as f64 - wanted).abs() - frame_bytes as f64).max(0.0) / wanted
}

/// The root of the mean square distance of rates from what was asked.
fn rms_from(rates_bit_s: &[f64], asked_bit_s: f64) -> f64 {
    let squares: f64 = rates_bit_s.iter().map(|rate| (rate - asked_bit_s).powi(2)).sum();
    (squares / rates_bit_s.len().max(1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_differ_and_add_up() {
        for flows in [1, 15, 50_000] {
            let rates = rates(5 * GBIT, flows);
            assert_eq!(rates.len(), flows);
            assert!(rates.is_sorted() && (flows < 15 || rates[0] < rates[flows - 1]));
            let off = total_bit_s(&rates).abs_diff(5 * GBIT);
            assert!(off <= 2 * flows as u64, "{flows} flows: {off} off");
        }
    }

    #[test]
    fn a_packet_is_no_error() {
        let rate = Rate::from_bit_s(8_000_000).unwrap();
        assert_eq!(error(rate, SECOND, 1_001_500, 1_500), 0.0);
        assert!((error(rate, SECOND, 988_500, 1_500) - 0.01).abs() < 1e-12);
        assert_eq!(rms_from(&[3.0, 5.0], 4.0), 1.0);
    }
}
