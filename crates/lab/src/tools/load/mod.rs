//! Requests to a server: HTTP/1.1, HTTP/3, Redis, PostgreSQL, datagrams. Every request's latency is kept.
//!
//! ```text
//! client (sockets, one thread) -> schedule (when requests are due, what they took)
//!                              -> protocol (requests and replies as bytes)
//! http3 (its own client)       -> schedule
//! ```
//!
//! Why our own: `wrk` and `ab` drop or average what stalls, and their output ends at p99. Here a request
//! whose reply does not come in time is counted with its age, and the report has the whole distribution.
//!
//! The latency of a request is from when it was due until the kernel had the last byte of its reply, with
//! making the connection where each request has its own. Times in which all CPUs of the machine stood still
//! at once are taken off (see [`crate::stalls`]).

mod client;
mod http3;
mod protocol;
mod schedule;

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

pub use protocol::{DATABASE, Protocol, set_request};

use super::{GRACE, NS_PER_US, Quantiles, histogram_ns, parse_seconds};
use crate::{
    stalls::StallWatch,
    testbed::{Child, Site, Testbed, wait::wait_until},
};

/// Each is a socket, or two while a server closes one.
const CLIENTS_MAX: usize = 500;
/// What the load says on standard error when all connections that are kept are there.
const CONNECTED: &str = "connected";
/// The usual time from then to the first request.
pub const LEAD: Duration = Duration::from_millis(5);

/// What the load is told.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct LoadArgs {
    /// The server's address and port
    #[arg(long, value_name = "ADDR:PORT")]
    pub server: SocketAddr,
    /// How to talk to it
    #[arg(long)]
    pub protocol: Protocol,
    /// What to ask for, over HTTP
    #[arg(long, default_value = "/")]
    pub path: String,
    /// How many clients, each with one request at a time
    #[arg(long, value_name = "N")]
    pub clients: usize,
    /// Requests a second, of all clients, whatever the replies do [default: the next with each reply]
    #[arg(long = "rate", value_name = "N")]
    pub rate_hz: Option<u64>,
    /// How long to wait with the first request once all connections that are kept are there
    #[arg(long, value_name = "S", value_parser = parse_seconds, default_value = "0.005")]
    pub lead: Duration,
    /// How long to send requests
    #[arg(long = "seconds", value_name = "S", value_parser = parse_seconds)]
    pub duration: Duration,
    /// How long to wait for replies after that
    #[arg(long, value_name = "S", value_parser = parse_seconds, default_value = "3")]
    pub drain: Duration,
}

impl LoadArgs {
    fn to_words(&self) -> anyhow::Result<Vec<String>> {
        let protocol = serde_json::to_value(self.protocol)?;
        let mut words = vec![
            format!("--server={}", self.server),
            format!("--protocol={}", protocol.as_str().context("a protocol has a name")?),
            format!("--path={}", self.path),
            format!("--clients={}", self.clients),
            format!("--lead={}", self.lead.as_secs_f64()),
            format!("--seconds={}", self.duration.as_secs_f64()),
            format!("--drain={}", self.drain.as_secs_f64()),
        ];
        words.extend(self.rate_hz.map(|rate| format!("--rate={rate}")));
        Ok(words)
    }
}

/// What the load prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Requests with a reply.
    pub answered: u64,
    /// Requests without one when nobody waited any longer. They are in the distribution with their age.
    pub unanswered: u64,
    /// Connections that broke under a request, which was then sent again.
    pub errors: u64,
    /// Datagrams that were sent again.
    pub retries: u64,
    /// Replies a second, until the last request was sent.
    pub requests_per_s: f64,
    /// What a reply was made of on average, the head of HTTP/1.1 included; 0 without any.
    pub reply_bytes: f64,
    /// The latency of all requests.
    pub latency: Quantiles,
    /// The distribution: microseconds to three digits, and how many requests took them.
    pub histogram_us: Vec<(f64, u64)>,
}

impl LoadReport {
    /// How many requests took longer than `us` microseconds.
    pub fn slower_than(&self, us: f64) -> u64 {
        let slower = self.histogram_us.iter().filter(|(took_us, _)| *took_us > us);
        slower.map(|(_, count)| count).sum()
    }

    /// The distribution as (microseconds, share of the requests that took no longer).
    pub fn cdf_us(&self) -> Vec<(f64, f64)> {
        let mut seen = 0;
        let points = self.histogram_us.iter().map(|(us, count)| {
            seen += count;
            (*us, seen as f64 / self.requests() as f64)
        });
        points.collect()
    }

    pub fn requests(&self) -> u64 {
        self.answered + self.unanswered
    }
}

/// Starts the load in the testbed; [`finish`] waits for its report.
pub fn start<'a>(
    testbed: &Testbed,
    site: impl Into<Site<'a>>,
    args: &LoadArgs,
) -> anyhow::Result<Child> {
    let mut command = testbed.tool(site, "load")?;
    command.args(args.to_words()?);
    Child::spawn(command)
}

/// Starts the load in the testbed, and waits until it has all connections that are kept.
pub fn start_connected<'a>(
    testbed: &Testbed,
    site: impl Into<Site<'a>>,
    args: &LoadArgs,
) -> anyhow::Result<Child> {
    let mut load = start(testbed, site, args)?;
    wait_until("the connections of the load", GRACE, || {
        load.check_running()?;
        Ok(load.output().stderr.contains(CONNECTED).then_some(()))
    })?;
    Ok(load)
}

/// Waits for the load and reads its report.
pub fn finish(load: Child, args: &LoadArgs) -> anyhow::Result<LoadReport> {
    load.finish(args.lead + args.duration + args.drain + GRACE)?.json()
}

pub fn run(args: &LoadArgs) -> anyhow::Result<LoadReport> {
    ensure!(
        (1..=CLIENTS_MAX).contains(&args.clients),
        "--clients must be 1 to {CLIENTS_MAX}, not {}",
        args.clients
    );
    ensure!(args.rate_hz != Some(0), "--rate must be above 0");
    let watch = StallWatch::start();
    let seen = match args.protocol {
        Protocol::Http3 => http3::run(args),
        _ => client::run(args),
    }?;
    let stood = watch.ok().and_then(StallWatch::stop).unwrap_or_default();

    let mut histogram = histogram_ns()?;
    for took in seen.answered.iter().chain(&seen.unanswered) {
        histogram.record(took.latency_ns(&stood.stalls))?;
    }
    let end_ns = seen.start_ns + args.duration.as_nanos() as u64;
    let in_time = seen.answered.iter().filter(|took| took.ended_ns < end_ns).count();
    let answered = seen.answered.len() as u64;
    let buckets = histogram.iter_recorded();
    Ok(LoadReport {
        answered,
        unanswered: seen.unanswered.len() as u64,
        errors: seen.errors,
        retries: seen.retries,
        requests_per_s: in_time as f64 / args.duration.as_secs_f64(),
        reply_bytes: seen.reply_bytes as f64 / answered.max(1) as f64,
        latency: Quantiles::of_ns(&histogram),
        histogram_us: buckets
            .map(|one| (one.value_iterated_to() as f64 / NS_PER_US, one.count_at_value()))
            .collect(),
    })
}

#[cfg(test)]
mod tests;
