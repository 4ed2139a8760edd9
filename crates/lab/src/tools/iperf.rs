//! iperf3: what people measure throughput with. One server process for each client process.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use tidegate_sys::net::NetNs;

use super::GRACE;
use crate::testbed::{self, Child, Site, wait_for_listener};

/// iperf3's own bound on `--parallel`.
const PARALLEL_MAX: u32 = 128;
/// The bins of the throughput over time.
const INTERVAL_S: f64 = 0.1;

/// What to send.
#[derive(Debug, Clone, PartialEq)]
pub enum Load {
    Tcp {
        /// Congestion control; none: the system's.
        cc: Option<String>,
    },
    /// TCP from a program that asks for no more than a rate.
    TcpAt {
        /// Payload per second, of each flow.
        rate_bit_s: u64,
    },
    /// Datagrams at a rate, whatever becomes of them.
    Udp {
        /// Payload per second, of each flow.
        rate_bit_s: u64,
        /// Payload of a datagram; none: what fits the path.
        payload_bytes: Option<u32>,
    },
}

/// What a client is told.
#[derive(Debug, Clone, PartialEq)]
pub struct IperfOptions {
    /// The server's address.
    pub server: IpAddr,
    /// The server's port: another one for each client that runs at the same time.
    pub port: u16,
    /// What to send.
    pub load: Load,
    /// How many flows.
    pub parallel: u32,
    /// How long to count.
    pub duration: Duration,
    /// How long to run before that.
    pub omit: Duration,
    /// The client's address; none: as the route says.
    pub bind: Option<IpAddr>,
    /// Let the server send instead, for limits on the client's ingress.
    pub reverse: bool,
}

impl IperfOptions {
    /// One TCP flow, with defaults.
    pub fn tcp(server: IpAddr, duration: Duration) -> Self {
        Self {
            server,
            port: 5201,
            load: Load::Tcp { cc: None },
            parallel: 1,
            duration,
            omit: Duration::ZERO,
            bind: None,
            reverse: false,
        }
    }

    fn to_words(&self) -> anyhow::Result<Vec<String>> {
        if !(1..=PARALLEL_MAX).contains(&self.parallel) {
            bail!("{} flows: iperf3 takes 1 to {PARALLEL_MAX}", self.parallel);
        }
        let mut words: Vec<String> = vec![
            "--json".into(),
            format!("--client={}", self.server),
            format!("--port={}", self.port),
            format!("--parallel={}", self.parallel),
            format!("--time={}", whole_seconds("duration", self.duration)?),
            format!("--interval={INTERVAL_S}"),
        ];
        if !self.omit.is_zero() {
            words.push(format!("--omit={}", whole_seconds("omit", self.omit)?));
        }
        match &self.load {
            Load::Tcp { cc } => words.extend(cc.iter().map(|cc| format!("--congestion={cc}"))),
            Load::TcpAt { rate_bit_s } => words.push(format!("--bitrate={rate_bit_s}")),
            Load::Udp { rate_bit_s, payload_bytes } => {
                words.push("--udp".into());
                words.push(format!("--bitrate={rate_bit_s}"));
                words.extend(payload_bytes.iter().map(|bytes| format!("--length={bytes}")));
            }
        }
        words.extend(self.bind.iter().map(|address| format!("--bind={address}")));
        if self.reverse {
            words.push("--reverse".into());
        }
        Ok(words)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IperfReport {
    /// Payload per second at the sending end.
    pub sent_bit_s: f64,
    /// Payload per second at the receiving end: the goodput.
    pub received_bit_s: f64,
    /// Payload that the sending end has written, whether it arrived or not.
    pub sent_bytes: u64,
    /// Payload that arrived.
    pub received_bytes: u64,
    /// TCP segments sent again; none for UDP, and where the server sent.
    pub retransmits: Option<u64>,
    /// Datagrams lost, of those sent; none for TCP.
    pub lost: Option<Lost>,
    /// Payload per second at the client, in intervals of 100 ms, all flows together.
    pub intervals_bit_s: Vec<f64>,
    /// Each flow.
    pub streams: Vec<StreamReport>,
    /// The congestion control of the sender; none for UDP.
    pub cc: Option<String>,
}

/// One flow of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StreamReport {
    /// Payload per second at the receiving end (for UDP: as counted by the server).
    pub received_bit_s: f64,
    /// TCP segments sent again.
    pub retransmits: Option<u64>,
    /// TCP's round-trip times: the least, and the mean.
    pub rtt_min_us: Option<f64>,
    pub rtt_mean_us: Option<f64>,
}

/// Datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Lost {
    /// That did not arrive.
    pub lost: u64,
    pub sent: u64,
}

/// A client on its way, with its server.
#[derive(Debug)]
pub struct IperfRun {
    client: Child,
    server: Child,
    within: Duration,
}

impl IperfRun {
    /// Starts a server in `server`, waits until it listens, and starts a client at `client`.
    pub fn start<'a>(
        client: impl Into<Site<'a>>,
        server: impl Into<Site<'a>>,
        options: &IperfOptions,
    ) -> anyhow::Result<Self> {
        let site = server.into();
        let mut command = testbed::command(site, "iperf3")?;
        // It ends with its one client.
        command.args(["--server", "--one-off", &format!("--port={}", options.port)]);
        let mut server = Child::spawn(command)?;
        wait_for_listener(site.netns, options.port, &mut server)?;

        let mut command = testbed::command(client, "iperf3")?;
        command.args(options.to_words()?);
        let client = Child::spawn(command)?;
        let within = options.omit + options.duration + GRACE;
        Ok(Self { client, server, within })
    }

    /// The process id of the client, or of its runner.
    pub fn client_pid(&self) -> u32 {
        self.client.pid()
    }

    /// The process id of the server.
    pub fn server_pid(&self) -> u32 {
        self.server.pid()
    }

    /// Waits for the client and reads its report.
    pub fn finish(self) -> anyhow::Result<IperfReport> {
        Ok(self.finish_with_stderr()?.0)
    }

    /// The same, with what the client and its runner wrote on standard error.
    pub fn finish_with_stderr(self) -> anyhow::Result<(IperfReport, String)> {
        // On an error iperf3 exits with 1, but says why in the JSON.
        let (status, output) = self.client.finish_any(self.within)?;
        let report = parse(&output.stdout);
        if report.is_err() && !status.success() && output.stdout.trim().is_empty() {
            bail!("iperf3 ended with {status}: {}", output.stderr.trim());
        }
        Ok((report?, output.stderr))
    }
}

pub fn run(client: &NetNs, server: &NetNs, options: &IperfOptions) -> anyhow::Result<IperfReport> {
    IperfRun::start(client, server, options)?.finish()
}

/// Reads what `iperf3 --json` writes.
pub fn parse(json: &str) -> anyhow::Result<IperfReport> {
    let raw: Raw = serde_json::from_str(json).context("cannot read the JSON of iperf3")?;
    if let Some(error) = raw.error {
        bail!("iperf3: {error}");
    }
    let (Some(sent), Some(received)) = (raw.end.sum_sent, raw.end.sum_received) else {
        bail!("iperf3 reports no sums: its version is too old (3.10 or newer is needed)");
    };
    let is_udp = raw.end.streams.iter().any(|stream| stream.udp.is_some());
    let streams = raw.end.streams.iter().map(RawEndStream::report).collect();
    let intervals = raw.intervals.iter().filter(|interval| !interval.sum.omitted);
    Ok(IperfReport {
        sent_bit_s: sent.bits_per_second,
        received_bit_s: received.bits_per_second,
        received_bytes: received.bytes as u64,
        sent_bytes: sent.bytes as u64,
        retransmits: sent.retransmits.map(|count| count as u64),
        lost: is_udp.then(|| Lost {
            lost: received.lost_packets.unwrap_or(0.0).max(0.0) as u64,
            sent: received.packets.unwrap_or(0.0) as u64,
        }),
        intervals_bit_s: intervals.map(|interval| interval.sum.bits_per_second).collect(),
        streams,
        cc: raw.end.sender_tcp_congestion,
    })
}

fn whole_seconds(field: &str, duration: Duration) -> anyhow::Result<u64> {
    if duration.subsec_nanos() != 0 {
        bail!("{field} is {duration:?}: iperf3 takes whole seconds");
    }
    Ok(duration.as_secs())
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    intervals: Vec<RawInterval>,
    #[serde(default)]
    end: RawEnd,
    error: Option<String>,
}

#[derive(Deserialize)]
struct RawInterval {
    sum: RawSum,
}

#[derive(Deserialize, Default)]
struct RawEnd {
    #[serde(default)]
    streams: Vec<RawEndStream>,
    sum_sent: Option<RawSum>,
    sum_received: Option<RawSum>,
    sender_tcp_congestion: Option<String>,
}

#[derive(Deserialize)]
struct RawEndStream {
    sender: Option<RawSum>,
    receiver: Option<RawSum>,
    udp: Option<RawSum>,
}

impl RawEndStream {
    fn report(&self) -> StreamReport {
        let received = self.receiver.as_ref().or(self.udp.as_ref());
        let lost_share = |sum: &RawSum| match (sum.lost_packets, sum.packets) {
            (Some(lost), Some(sent)) if sent > 0.0 => (lost / sent).clamp(0.0, 1.0),
            _ => 0.0,
        };
        let sender = self.sender.as_ref();
        StreamReport {
            received_bit_s: received.map_or(0.0, |r| r.bits_per_second * (1.0 - lost_share(r))),
            retransmits: sender.and_then(|s| s.retransmits).map(|count| count as u64),
            rtt_min_us: sender.and_then(|s| s.min_rtt),
            rtt_mean_us: sender.and_then(|s| s.mean_rtt),
        }
    }
}

/// Any of iperf3's sums; it writes whole numbers with and without a fraction.
#[derive(Deserialize)]
struct RawSum {
    bits_per_second: f64,
    #[serde(default)]
    bytes: f64,
    #[serde(default)]
    omitted: bool,
    retransmits: Option<f64>,
    min_rtt: Option<f64>,
    mean_rtt: Option<f64>,
    lost_packets: Option<f64>,
    packets: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cut from runs of iperf 3.12.
    const TCP: &str = r#"{"intervals": [
        {"streams": [], "sum": {"start": 0, "bytes": 1, "bits_per_second": 5, "omitted": true}},
        {"streams": [], "sum": {"start": 0, "bytes": 748421120, "bits_per_second": 11958497894.5,
            "retransmits": 8, "omitted": false, "sender": true}}],
        "end": {"streams": [{
            "sender": {"bytes": 1520435200, "bits_per_second": 12154122925.3, "retransmits": 8,
                "max_rtt": 26, "min_rtt": 15, "mean_rtt": 20, "sender": true},
            "receiver": {"bytes": 1520435200, "bits_per_second": 12153127135.7}}],
        "sum_sent": {"seconds": 1.00077, "bytes": 1520435200, "bits_per_second": 12154122925.3,
            "retransmits": 8},
        "sum_received": {"seconds": 1.000852, "bytes": 1520435200,
            "bits_per_second": 12153127135.7},
        "sender_tcp_congestion": "bbr"}}"#;
    const UDP: &str = r#"{"intervals": [],
        "end": {"streams": [{"udp": {"bytes": 1277952, "bits_per_second": 10000000,
            "lost_packets": 10, "packets": 40, "lost_percent": 25}}],
        "sum_sent": {"seconds": 1, "bytes": 1277952, "bits_per_second": 10000000,
            "lost_packets": 0, "packets": 40},
        "sum_received": {"seconds": 1, "bytes": 958464, "bits_per_second": 7500000,
            "lost_packets": 10, "packets": 40}}}"#;

    #[test]
    fn a_tcp_run_is_read() {
        let report = parse(TCP).unwrap();
        assert_eq!(report.received_bytes, 1_520_435_200);
        assert_eq!(report.intervals_bit_s, [11958497894.5]);
        assert_eq!((report.retransmits, report.lost), (Some(8), None));
        assert_eq!(report.cc.as_deref(), Some("bbr"));
        let stream = &report.streams[0];
        assert_eq!((stream.rtt_min_us, stream.rtt_mean_us), (Some(15.0), Some(20.0)));
    }

    #[test]
    fn a_udp_run_is_read() {
        let report = parse(UDP).unwrap();
        assert_eq!(report.lost, Some(Lost { lost: 10, sent: 40 }));
        assert_eq!((report.sent_bit_s, report.received_bit_s), (10e6, 7.5e6));
        assert_eq!(report.streams[0].received_bit_s, 7.5e6);
    }

    #[test]
    fn its_own_error_is_passed_on() {
        let json = r#"{"start": {}, "intervals": [], "end": {}, "error": "unable to connect"}"#;
        assert_eq!(parse(json).unwrap_err().to_string(), "iperf3: unable to connect");
        assert!(parse("").is_err());
    }

    #[test]
    fn options_become_words() {
        let server = "fd77::2".parse().unwrap();
        let mut options = IperfOptions::tcp(server, Duration::from_secs(3));
        options.load = Load::Tcp { cc: Some("reno".into()) };
        options.omit = Duration::from_secs(1);
        let words = options.to_words().unwrap().join(" ");
        assert_eq!(
            words,
            "--json --client=fd77::2 --port=5201 --parallel=1 --time=3 --interval=0.1 --omit=1 \
             --congestion=reno"
        );
        options.load = Load::TcpAt { rate_bit_s: 1_000_000 };
        let words = options.to_words().unwrap().join(" ");
        assert!(words.ends_with("--omit=1 --bitrate=1000000"), "{words}");
        options.load = Load::Udp { rate_bit_s: 1_000_000, payload_bytes: Some(1200) };
        assert!(
            options
                .to_words()
                .unwrap()
                .join(" ")
                .ends_with("--udp --bitrate=1000000 --length=1200")
        );
        options.duration = Duration::from_millis(1500);
        assert!(options.to_words().is_err());
    }
}
