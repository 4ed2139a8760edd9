//! The flags of `tidegate burst`.

use std::{path::PathBuf, str::FromStr};

use clap::{Args, Subcommand, ValueEnum};
use tidegate_core::{Bytes, Nanos, Rate, burst::CongestionControl};

use super::LookArgs;

#[derive(Debug, Subcommand)]
pub enum BurstVerb {
    /// Compare the rules for a policer's burst size
    ///
    /// A policer is a token bucket that drops packets without tokens. PACED is the share of the rate that
    /// long TCP transfers reach if their packets are spread over the round trip, UNPACED if each window
    /// leaves in one piece. UDP is the rate that the source of --udp gets through.
    #[command(after_help = "\
Examples:
  tidegate burst size --rate 50mbit
  tidegate burst size --rate 1gbit --rtt 10ms --flows 8 --cc reno --burst 1mb
  tidegate burst size --rate 50mbit --udp 1270000b/100ms --burst 15000b --burst 600000b")]
    Size(SizeArgs),
    /// Find the policer behind the losses in a capture
    ///
    /// Estimates the policer's rate and the depth of its bucket. Reads pcap and pcapng as a stream, in
    /// bounded memory. A capture of the headers is enough. Start it before the traffic.
    #[command(after_help = "\
Examples:
  tcpdump -i eth0 -s 128 -w slow.pcap & iperf3 -c server; kill %1
  tidegate burst analyze slow.pcap --svg tokens.svg
  zcat slow.pcap.gz | tidegate burst analyze - --json | jq '.flows[].estimate'")]
    Analyze(AnalyzeArgs),
}

#[derive(Debug, Args)]
pub struct SizeArgs {
    /// The policer's rate, such as 50mbit
    #[arg(long)]
    pub rate: Rate,
    /// Round-trip time of the TCP flows
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = rtt)]
    pub rtt: Nanos,
    /// How many TCP flows share it
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub flows: u32,
    /// Their congestion control
    #[arg(long, default_value = "cubic")]
    pub cc: Cc,
    /// Line rate of the interface by which the packets arrive [default: 1gbit, or the rate if that is more]
    #[arg(long, value_name = "RATE")]
    pub interface: Option<Rate>,
    /// Bytes of a full-sized IP packet
    #[arg(long, value_name = "N", default_value_t = 1_500)]
    #[arg(value_parser = clap::value_parser!(u32).range(68..=65_535))]
    pub mtu: u32,
    /// Show this burst size too; may be given several times
    #[arg(long, value_name = "SIZE")]
    pub burst: Vec<Bytes>,
    /// Also show a UDP source that sends this many bytes at line rate once per interval, such as
    /// 1270000b/100ms
    #[arg(long, value_name = "SIZE/TIME")]
    pub udp: Option<UdpSource>,
    #[command(flatten)]
    pub look: LookArgs,
}

#[derive(Debug, Args)]
pub struct AnalyzeArgs {
    /// The capture, pcap or pcapng; `-` reads standard input
    pub file: PathBuf,
    /// Draw tokens and losses over time, of the first policed group or flow
    #[arg(long, value_name = "OUT")]
    pub svg: Option<PathBuf>,
    /// Show only flows with this text in their line, such as an address or `:5201`
    #[arg(long, value_name = "TEXT")]
    pub flow: Option<String>,
    /// Show at most N flows, those with most losses first
    #[arg(long, value_name = "N", default_value_t = 10)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub top: u32,
    #[command(flatten)]
    pub look: LookArgs,
}

/// TCP's congestion control.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Cc {
    Reno,
    Cubic,
    Bbr,
}

impl From<Cc> for CongestionControl {
    fn from(cc: Cc) -> Self {
        match cc {
            Cc::Reno => CongestionControl::Reno,
            Cc::Cubic => CongestionControl::Cubic,
            Cc::Bbr => CongestionControl::Bbr,
        }
    }
}

/// A source that sends `burst` at line rate once per `period`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpSource {
    pub burst: Bytes,
    pub period: Nanos,
}

impl FromStr for UdpSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let example = "write for example 1270000b/100ms";
        let Some((burst, period)) = text.split_once('/') else {
            return Err(format!("`{text}` has no `/`; {example}"));
        };
        let burst: Bytes = burst.parse().map_err(|e| format!("{e}"))?;
        let period: Nanos = period.parse().map_err(|e| format!("{e}"))?;
        if burst.0 == 0 || period.0 == 0 {
            return Err(format!("`{text}` sends nothing; {example}"));
        }
        // 10 s at 100 Gbit/s.
        if burst.0 > 125_000_000_000 || period.0 > 3_600_000_000_000 {
            return Err(format!("`{text}` is out of range; {example}"));
        }
        Ok(UdpSource { burst, period })
    }
}

fn rtt(text: &str) -> Result<Nanos, String> {
    let time = Nanos::from_str(text).map_err(|e| e.to_string())?;
    if (1_000..=100_000_000_000).contains(&time.0) {
        Ok(time)
    } else {
        Err("out of range; write 1us to 100s, for example 20ms".to_owned())
    }
}
