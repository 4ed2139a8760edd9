//! What an analysis came to, for people and for tools: every number's name has its unit.

use serde::Serialize;

use crate::{
    fit::{DepthBasis, Fit},
    flow::Vantage,
    trace::{LossSource, RunReport},
    verdict::{DelayReport, Verdict},
};

/// All of it.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// What was read.
    pub capture: CaptureReport,
    /// The flows, those with most losses first.
    pub flows: Vec<FlowReport>,
    /// Flows that share a policer.
    pub groups: Vec<GroupReport>,
    /// The names of some flows, those with most losses first, whatever was asked for.
    #[serde(skip)]
    pub names: Vec<String>,
}

/// What was read.
#[derive(Debug, Clone, Default, Serialize)]
pub struct CaptureReport {
    /// Packets.
    pub packets: u64,
    /// Packets that are not IP, or were cut off within their addresses.
    pub skipped_packets: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// From the first packet to the last.
    pub duration_s: f64,
    /// When the first packet was captured, seconds since 1970.
    pub start_unix_s: f64,
    /// Packets whose stamp is before that of their predecessor.
    pub stamps_back: u64,
    /// Flows.
    pub flows: u64,
    /// Flows that were forgotten, since there were too many.
    pub evicted_flows: u64,
    /// How often the packets of a flow were forgotten, since there were too many; its counts are kept.
    pub forgotten_windows: u64,
    /// Why it could not be read to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// One flow.
#[derive(Debug, Clone, Serialize)]
pub struct FlowReport {
    /// As in `udp 10.0.1.100:5201 > 10.0.2.100:33333`.
    pub flow: String,
    /// Packets that are in the capture.
    pub packets: u64,
    /// Their bytes, from the IP header on.
    pub bytes: u64,
    /// From its first packet to its last.
    pub duration_s: f64,
    /// Its rate over that time, from the IP header on.
    pub rate_bit_s: f64,
    /// Packets lost.
    pub lost_packets: u64,
    /// Packets that arrived, for they were acknowledged, but are not in the capture.
    pub uncaptured_packets: u64,
    /// How losses are seen.
    pub loss_source: LossSource,
    /// On which side of the loss the capture was taken.
    pub vantage: Vantage,
    /// Why that is assumed.
    pub vantage_why: String,
    /// Packets that were overtaken.
    pub reordered_packets: u64,
    /// Median round trip from here to the receiver and back, of TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rtt_median_ms: Option<f64>,
    /// Runs of packets without a loss.
    pub runs: RunReport,
    /// The policer, if one explains the losses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate: Option<Estimate>,
    /// What the losses look like.
    pub verdict: Verdict,
    /// Why.
    pub evidence: Vec<String>,
    /// The delay right before the losses, of TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay_before_loss: Option<DelayReport>,
    /// The group, by its number, if it shares a policer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<usize>,
    /// The tokens over time.
    #[serde(skip)]
    pub curve: Curve,
}

/// Flows behind one policer.
#[derive(Debug, Clone, Serialize)]
pub struct GroupReport {
    /// Its number.
    pub group: usize,
    /// Its flows.
    pub flows: Vec<String>,
    /// The policer.
    pub estimate: Estimate,
    /// What the losses look like.
    pub verdict: Verdict,
    /// Why.
    pub evidence: Vec<String>,
    /// The delay right before the losses, of TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay_before_loss: Option<DelayReport>,
    /// The tokens over time.
    #[serde(skip)]
    pub curve: Curve,
}

/// A policer as the losses show it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// Rate, counting from the IP header on.
    pub rate_bit_s: f64,
    /// The ends of its 95 % interval.
    pub rate_low_bit_s: f64,
    /// The ends of its 95 % interval.
    pub rate_high_bit_s: f64,
    /// Rate, counting whole frames as captured: what a policer that counts link headers was set to.
    pub rate_frames_bit_s: f64,
    /// Depth of the bucket, from the IP header on.
    pub depth_bytes: f64,
    /// The ends of its 95 % interval.
    pub depth_low_bytes: f64,
    /// The ends of its 95 % interval; none if it may be deeper.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depth_high_bytes: Option<f64>,
    /// How the depth is known.
    pub depth_known: String,
    /// The share of losses at which the bucket was empty.
    pub losses_explained: f64,
    /// The share of packets that passed though it had no room for them.
    pub passes_violated: f64,
    /// Windows of the capture that were looked at.
    pub windows: usize,
}

/// The tokens in the bucket over time, and the losses.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Curve {
    /// Seconds from the start of the capture, and tokens in bytes.
    pub tokens: Vec<(f64, f64)>,
    /// Losses, in the same units.
    pub losses: Vec<(f64, f64)>,
    /// Depth of the bucket in bytes.
    pub depth_bytes: f64,
}

impl Estimate {
    /// From the fit of the window that was judged, and those of all windows. `frames` is wire bytes over IP
    /// bytes.
    pub fn new(fit: &Fit, all: &[Fit], frames: f64) -> Estimate {
        let good: Vec<&Fit> = all.iter().filter(|f| f.explained >= 0.8).collect();
        let used = if good.is_empty() { vec![fit] } else { good };
        let mut rates: Vec<f64> = used.iter().map(|f| f.rate_bit_s).collect();
        rates.sort_by(f64::total_cmp);
        let rate = rates[rates.len() / 2];
        // What the windows differ by is part of what is not known.
        let spread = (rates[rates.len() - 1 - rates.len() / 10] - rates[rates.len() / 10]) / 2.0;
        let within =
            used.iter().map(|f| f.rate_within_bit_s).fold(f64::INFINITY, f64::min).max(spread);
        // Nothing is known: anything up to twice as much.
        let within = within.min(rate);
        // The depth is best known where the bucket was full most often.
        let strength = |f: &Fit| match f.basis {
            DepthBasis::Refilled(times) => 1 + u64::from(times),
            DepthBasis::Began => 1,
            DepthBasis::AtLeast => 0,
        };
        let best = used.iter().copied().max_by_key(|f| strength(f)).unwrap_or(fit);
        let known = match best.basis {
            DepthBasis::Refilled(1) => "the bucket was full and then empty once".to_owned(),
            DepthBasis::Refilled(times) => {
                format!("the bucket was full and then empty {times} times")
            }
            DepthBasis::Began => {
                "seen once, at the start: assumes that the bucket was full when the traffic began"
                    .to_owned()
            }
            DepthBasis::AtLeast => {
                "at least: the bucket was never seen full; capture from before the traffic begins"
                    .to_owned()
            }
        };
        let depth_within = best.depth_within_bytes.min(best.depth_bytes);
        let deeper = best.basis == DepthBasis::AtLeast;
        Estimate {
            rate_bit_s: rate,
            rate_low_bit_s: (rate - within).max(0.0),
            rate_high_bit_s: rate + within,
            rate_frames_bit_s: rate * frames,
            depth_bytes: best.depth_bytes,
            depth_low_bytes: (best.depth_bytes - depth_within).max(0.0),
            depth_high_bytes: (!deeper).then_some(best.depth_bytes + depth_within),
            depth_known: known,
            losses_explained: fit.explained,
            passes_violated: fit.violated,
            windows: all.len(),
        }
    }
}
