//! Traffic: generators of our own, and the programs that people use.
//!
//! Our own generators run as processes of their own (`tidegate-lab tool NAME`), so that they can
//! sit in a limited cgroup while the lab does not; each prints one JSON object on standard output.
//! Each module has the tool itself and the functions that start it in a testbed.

pub mod flows;
pub mod hold;
pub mod http3;
pub mod iperf;
pub mod load;
pub mod postgres;
pub mod probe;
pub mod rclone;
pub mod redis;
pub mod relay;
pub mod requests;
pub mod rpc;
pub mod sshd;
pub mod stay;
pub mod udp;
pub mod web;

use std::time::Duration;

use anyhow::{Context, bail};
use clap::Subcommand;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::experiments::wheel;

/// What a client may take beyond the time it was asked to run: to start, to drain, to report.
const GRACE: Duration = Duration::from_secs(60);
const NS_PER_US: f64 = 1e3;

/// One of the lab's own traffic tools.
#[derive(Debug, Subcommand)]
pub enum Tool {
    /// Answer remote procedure calls until killed
    RpcServer(rpc::ServerArgs),
    /// Make remote procedure calls, back to back on each flow
    RpcClient(rpc::ClientArgs),
    /// Run flows that come and go on a schedule
    Flows(flows::FlowsArgs),
    /// Echo datagrams until killed
    ProbeServer(probe::ServerArgs),
    /// Measure latency, open loop
    ProbeClient(probe::ClientArgs),
    /// Send datagrams on a schedule, smoothly or in bursts
    UdpSource(udp::SourceArgs),
    /// Push things that come at random times, each on a connection of its own
    Requests(requests::RequestsArgs),
    /// Answer requests over HTTP/3 until killed
    Http3Server(http3::ServerArgs),
    /// Send requests to a server: HTTP, Redis, PostgreSQL, datagrams
    Load(load::LoadArgs),
    /// Take packets from a queue of netfilter, and pass or drop each, until killed
    Relay(relay::RelayArgs),
    /// Build a testbed and keep it until interrupted, to look around in it
    Hold(hold::HoldArgs),
    /// Fill a queue and keep it in its steady state, to count its instructions
    Queue(wheel::HoldArgs),
    /// Say its process id and stay until standard input closes
    Stay,
}

impl Tool {
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Self::RpcServer(args) => rpc::serve(&args),
            Self::RpcClient(args) => print(&rpc::call(&args)?),
            Self::Flows(args) => print(&flows::run(&args)?),
            Self::ProbeServer(args) => probe::serve(&args),
            Self::ProbeClient(args) => print(&probe::probe(&args)?),
            Self::UdpSource(args) => print(&udp::send(&args)?),
            Self::Requests(args) => print(&requests::run(&args)?),
            Self::Http3Server(args) => http3::serve(args),
            Self::Load(args) => print(&load::run(&args)?),
            Self::Relay(args) => relay::relay(&args),
            Self::Hold(args) => hold::hold(&args),
            Self::Queue(args) => wheel::hold(&args),
            Self::Stay => stay::stay(),
        }
    }
}

fn print(report: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(report)?);
    Ok(())
}

/// A distribution of times, in microseconds. All zero if nothing was recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// How many times were recorded.
    pub count: u64,
    /// Smallest.
    pub min_us: f64,
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p99_9_us: f64,
    /// Largest.
    pub max_us: f64,
}

impl Quantiles {
    /// Summarises a histogram of nanoseconds.
    fn of_ns(histogram: &Histogram<u64>) -> Self {
        if histogram.is_empty() {
            return Self::default();
        }
        let us = |ns: u64| ns as f64 / NS_PER_US;
        let quantile = |q| us(histogram.value_at_quantile(q));
        Self {
            count: histogram.len(),
            min_us: us(histogram.min()),
            mean_us: histogram.mean() / NS_PER_US,
            p50_us: quantile(0.5),
            p90_us: quantile(0.9),
            p99_us: quantile(0.99),
            p99_9_us: quantile(0.999),
            max_us: us(histogram.max()),
        }
    }
}

/// A histogram that holds any time to three digits.
fn histogram_ns() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new(3)?)
}

/// Reads a size such as `10kb` or `1mb`. As in `tc`, a kilobyte is 1024 bytes.
pub fn parse_size(text: &str) -> anyhow::Result<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit.to_ascii_lowercase().as_str() {
        "b" => 1u64,
        "kb" => 1 << 10,
        "mb" => 1 << 20,
        "gb" => 1 << 30,
        _ => bail!("the size {text:?} has no unit that is known: use b, kb, mb or gb"),
    };
    let number: f64 = number
        .parse()
        .with_context(|| format!("the size {text:?} has no number before its unit"))?;
    let bytes = (number * scale as f64).round() as u64;
    if bytes == 0 {
        bail!("the size {text:?} is nothing: use at least 1b");
    }
    Ok(bytes)
}

/// Reads a number of seconds as a duration.
fn parse_seconds(text: &str) -> anyhow::Result<Duration> {
    let seconds: f64 = text.parse().with_context(|| format!("{text:?} is no number of seconds"))?;
    Ok(Duration::try_from_secs_f64(seconds)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_need_a_unit() {
        assert_eq!(parse_size("10kb").unwrap(), 10_240);
        assert_eq!(parse_size("1mb").unwrap(), 1 << 20);
        assert_eq!(parse_size("0.5kb").unwrap(), 512);
        assert_eq!(parse_size("64b").unwrap(), 64);
        for text in ["10", "kb", "1.2.3kb", "0b", "1mib", ""] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn quantiles_of_nothing_are_nothing() {
        let mut histogram = histogram_ns().unwrap();
        assert_eq!(Quantiles::of_ns(&histogram), Quantiles::default());
        histogram.record_n(1_000_000, 99).unwrap();
        histogram.record(5_000_000).unwrap();
        let quantiles = Quantiles::of_ns(&histogram);
        assert_eq!((quantiles.count, quantiles.min_us.round()), (100, 1000.0));
        assert!((quantiles.max_us - 5000.0).abs() < 5.0, "{quantiles:?}");
        assert!((quantiles.p50_us - 1000.0).abs() < 1.0, "{quantiles:?}");
    }
}
