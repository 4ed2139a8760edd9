//! Policers on the path of others' packets, and the path: a sender whose device leads to a router, which
//! polices what comes in by it, and one receiver or more behind that, each with a link of its own.
//!
//! The sender's packets are cut before they leave, so that a policer sees what it would see on a wire, unless
//! the path could not carry so many ([`Road::cut`]).
//!
//! | name | what it is | where on the router |
//! |---|---|---|
//! | `police` | `tidegate limit add --scheme police --ingress`, as a user types it | the sender's side |
//! | `police-fair` | the same with `--fair` | the sender's side |
//! | `nft` | `nft … limit rate over N/second burst N packets`, of full size | the sender's side |
//! | `nft-bytes` | `nft … limit rate over N bytes/second burst N bytes` | the sender's side |
//! | `tbf` | the kernel's token bucket filter with a queue of 50 ms: no policer | the receiver's side |

use std::{fmt, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tidegate_core::{Bytes, Direction, Rate, burst::policer_burst};
use tidegate_instruments::plumbing::set_gso_max_segs;
use tidegate_instruments::wire_meter::WireMeter;
use tidegate_sys::net::NetNs;

use super::wire::Wire;
use crate::{
    context::Context,
    host,
    stop::Skip,
    testbed::{
        Child, LinkSpec, Store, Testbed, TestbedOptions, Topology, command,
        peers::{Peer, TbfOptions},
    },
};

/// A full frame, and the IP packet in it.
pub(super) const FRAME_BYTES: u64 = 1514;
const PACKET_BYTES: u64 = 1500;
const BIN: Duration = Duration::from_millis(10);
const BINS: u32 = 12_000;
/// The kernel's own bound.
const SEGMENTS_MOST: u32 = 65_535;
/// The queue of a TBF.
const QUEUE: Duration = Duration::from_millis(50);
/// How long a command may take.
const COMMAND: Duration = Duration::from_secs(60);
/// The names of the limit and of the table.
const LIMIT: &str = "policed";
const TABLE: &str = "tidegate-lab";

/// The path. See the [module](self).
pub(super) struct Road {
    // Before the testbed that they are in.
    meters: Vec<WireMeter>,
    pub(super) testbed: Testbed,
}

impl Road {
    /// A receiver behind each link; behind a plain cable, one, without. The tools of the lab are run from
    /// `lab_binary`, or from the running program.
    pub(super) fn new(lab_binary: Option<PathBuf>, links: Vec<LinkSpec>) -> anyhow::Result<Road> {
        let topology = Topology::Spread(links.len().max(1) as u8);
        Road::on(TestbedOptions { lab_binary, links, ..TestbedOptions::new(topology) })
    }

    /// The same with one receiver, the router a bridge between both.
    pub(super) fn bridged(
        lab_binary: Option<PathBuf>,
        link: Option<LinkSpec>,
    ) -> anyhow::Result<Road> {
        let topology = Topology::Bridged;
        Road::on(TestbedOptions { lab_binary, link, ..TestbedOptions::new(topology) })
    }

    fn on(options: TestbedOptions) -> anyhow::Result<Road> {
        let testbed = Testbed::new(options)?;
        let meter =
            |at| WireMeter::attach(testbed.receiver(at), testbed.receiver_dev(at), BINS, BIN);
        let meters = (0..testbed.receiver_count()).map(meter).collect::<Result<_, _>>()?;
        let road = Road { meters, testbed };
        road.cut(true)?;
        Ok(road)
    }

    /// Whether packets are cut to the MTU before they leave the sender, or leave as segments of up to 64 KB.
    pub(super) fn cut(&self, cut: bool) -> anyhow::Result<()> {
        let mut sender = self.testbed.sender().netlink()?;
        let dev = sender.index_of(self.testbed.sender_dev())?;
        Ok(set_gso_max_segs(&mut sender, dev, if cut { 1 } else { SEGMENTS_MOST })?)
    }

    /// Begins to count what arrives.
    pub(super) fn start_meters(&mut self) -> anyhow::Result<()> {
        Ok(self.meters.iter_mut().try_for_each(WireMeter::start)?)
    }

    /// What has arrived since at each receiver.
    pub(super) fn wires(&self) -> anyhow::Result<Vec<Wire>> {
        let wire = |meter: &WireMeter| -> anyhow::Result<Wire> {
            Ok(Wire::new(meter.bins()?.iter().map(|bin| bin.bytes).collect(), meter.bin()))
        };
        self.meters.iter().map(wire).collect()
    }
}

/// How deep a bucket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Depth {
    Bytes(u64),
    /// As long as this at the rate.
    Time(Duration),
    /// What `tidegate` takes when nobody says one.
    Unsaid,
}

impl Depth {
    /// In bytes, frames counted whole.
    pub(super) fn bytes(self, rate: Rate) -> Bytes {
        match self {
            Depth::Bytes(bytes) => Bytes(bytes),
            Depth::Time(time) => {
                Bytes((u128::from(rate.bit_s()) * time.as_nanos() / 8_000_000_000) as u64)
            }
            Depth::Unsaid => policer_burst(rate),
        }
    }
}

/// A policer, or a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Policer {
    Police,
    Fair,
    Nft,
    NftBytes,
    Tbf,
}

impl Policer {
    pub(super) fn name(self) -> &'static str {
        match self {
            Policer::Police => "police",
            Policer::Fair => "police-fair",
            Policer::Nft => "nft",
            Policer::NftBytes => "nft-bytes",
            Policer::Tbf => "tbf",
        }
    }

    /// Puts it on the router.
    ///
    /// # Errors
    ///
    /// [`Skip`] where there is no such policer; nothing is left of it.
    pub(super) fn apply<'a>(
        self,
        ctx: &Context,
        testbed: &'a Testbed,
        rate: Rate,
        depth: Depth,
    ) -> anyhow::Result<Policed<'a>> {
        let router = testbed.router().context("there is no router to police on")?;
        let dev = testbed.router_dev();
        let bytes = depth.bytes(rate);
        match self {
            Policer::Police | Policer::Fair => {
                let mut store = Store::new(&ctx.tidegate, router)?;
                let (status, said) = store.try_tidegate(self.words(dev, rate, depth))?;
                // A word that it does not know.
                if self == Policer::Fair && status.code() == Some(1) {
                    let why = said.stderr.lines().next().unwrap_or("it said nothing").to_owned();
                    return Err(Skip(format!("this tidegate has no fair policer ({why})")).into());
                }
                ensure!(status.success(), "tidegate ended with {status}: {}", said.stderr.trim());
                Ok(Policed::Limit(store))
            }
            Policer::Nft | Policer::NftBytes => {
                let limit = self.nft_limit(rate, bytes);
                Ok(Policed::Nft(NftTable::add(router, dev, &limit)?))
            }
            Policer::Tbf => {
                if testbed.receiver_count() != 1 {
                    return Err(Skip("tbf limits one device".to_owned()).into());
                }
                let burst_bytes = u32::try_from(bytes.0).unwrap_or(u32::MAX);
                let options = TbfOptions { burst_bytes, latency: QUEUE };
                let down = testbed.router_dev_to(0);
                Ok(Policed::Tbf(Peer::tbf_on(router, &down, rate.bit_s(), options)?))
            }
        }
    }

    /// The arguments of `tidegate`.
    fn words(self, dev: &str, rate: Rate, depth: Depth) -> Vec<String> {
        let words = ["limit", "add", LIMIT, "--dev", dev, "--scheme", "police", "--ingress"];
        let mut words: Vec<String> = words.map(str::to_owned).into();
        words.push(rate.to_string());
        if depth != Depth::Unsaid {
            words.extend(["--burst".to_owned(), format!("{}b", depth.bytes(rate).0)]);
        }
        words.extend((self == Policer::Fair).then(|| "--fair".to_owned()));
        words
    }

    /// nft's words for a bucket of so many bytes of frames. Its packets are of full size, its bytes those of
    /// IP.
    fn nft_limit(self, rate: Rate, bucket: Bytes) -> String {
        if self == Policer::NftBytes {
            let ip = |bytes: u64| (bytes * PACKET_BYTES / FRAME_BYTES).max(1);
            format!("{} bytes/second burst {} bytes", ip(rate.bit_s() / 8), ip(bucket.0))
        } else {
            let packets = |bytes: u64| (bytes / FRAME_BYTES).max(1);
            format!("{}/second burst {} packets", packets(rate.bit_s() / 8), packets(bucket.0))
        }
    }
}

impl fmt::Display for Policer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A policer in force. Dropping it takes it off.
pub(super) enum Policed<'a> {
    Limit(Store<'a>),
    Nft(NftTable<'a>),
    Tbf(Peer),
}

impl Policed<'_> {
    /// Takes it off and says how many packets it has dropped.
    pub(super) fn finish(self) -> anyhow::Result<u64> {
        match self {
            Policed::Limit(store) => store.drops(LIMIT, Direction::Ingress),
            Policed::Nft(table) => table.drops(),
            Policed::Tbf(mut peer) => {
                let drops = peer.qdisc_stats()?.iter().map(|stats| u64::from(stats.drops)).max();
                drops.context("the kernel counts no drops of tbf")
            }
        }
    }
}

/// A table of nftables in which one rule drops what is over a limit.
pub(super) struct NftTable<'a> {
    host: &'a NetNs,
}

impl<'a> NftTable<'a> {
    fn add(host: &'a NetNs, dev: &str, limit: &str) -> anyhow::Result<NftTable<'a>> {
        if host::which("nft".as_ref()).is_none() {
            return Err(
                Skip("needs `nft`, which is not in PATH: install nftables".to_owned()).into()
            );
        }
        let commands = format!(
            "add table ip {TABLE}; \
             add chain ip {TABLE} forward {{ type filter hook forward priority 0; }}; \
             add rule ip {TABLE} forward iifname {dev} limit rate over {limit} counter drop"
        );
        // One transaction: all of it or nothing.
        nft(host, &commands).map_err(|error| {
            match error.to_string().contains("not supported") {
                true => Skip(format!("this kernel cannot: {error:#}")).into(),
                false => error,
            }
        })?;
        Ok(NftTable { host })
    }

    fn drops(&self) -> anyhow::Result<u64> {
        drops_in(&nft(self.host, &format!("list table ip {TABLE}"))?)
    }
}

impl Drop for NftTable<'_> {
    fn drop(&mut self) {
        // It would go with its host, too.
        if let Err(error) = nft(self.host, &format!("delete table ip {TABLE}")) {
            eprintln!("warning: a table of nftables stays in {}: {error:#}", self.host.name());
        }
    }
}

/// Runs `nft` and returns the JSON that it writes.
fn nft(host: &NetNs, commands: &str) -> anyhow::Result<String> {
    let mut nft = command(host, "nft")?;
    nft.args(["--json", commands]);
    Ok(Child::spawn(nft)?.finish(COMMAND)?.stdout)
}

/// Reads the one counter of a listed table.
fn drops_in(json: &str) -> anyhow::Result<u64> {
    let listed: Value = serde_json::from_str(json).context("cannot read the JSON of nft")?;
    let rules = listed["nftables"].as_array().into_iter().flatten();
    let mut expressions = rules.filter_map(|entry| entry["rule"]["expr"].as_array()).flatten();
    let packets = expressions.find_map(|one| one["counter"]["packets"].as_u64());
    packets.context("nft lists no counter")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(mbit_s: u64) -> Rate {
        Rate::from_bit_s(mbit_s * 1_000_000).unwrap()
    }

    #[test]
    fn a_policer_becomes_words() {
        let words = |policer: Policer, depth| policer.words("up", rate(50), depth).join(" ");
        assert_eq!(
            words(Policer::Police, Depth::Bytes(15_000)),
            "limit add policed --dev up --scheme police --ingress 50mbit --burst 15000b"
        );
        assert_eq!(
            words(Policer::Fair, Depth::Unsaid),
            "limit add policed --dev up --scheme police --ingress 50mbit --fair"
        );
        // 121.12 Mbit/s are 10 000 full frames.
        let frames = Rate::from_bit_s(121_120_000).unwrap();
        assert_eq!(Policer::Nft.nft_limit(frames, Bytes(15_140)), "10000/second burst 10 packets");
        assert_eq!(
            Policer::NftBytes.nft_limit(frames, Bytes(15_140)),
            "15000000 bytes/second burst 15000 bytes"
        );
        assert_eq!(Policer::Nft.nft_limit(frames, Bytes(100)), "10000/second burst 1 packets");
    }

    #[test]
    fn a_depth_is_bytes() {
        assert_eq!(Depth::Time(Duration::from_millis(1)).bytes(rate(1000)), Bytes(125_000));
        assert_eq!(Depth::Unsaid.bytes(rate(100)), policer_burst(rate(100)));
    }

    #[test]
    fn the_counter_of_a_table_is_read() {
        let listed = r#"{"nftables": [{"metainfo": {"version": "1.0.6"}},
            {"table": {"family": "ip", "name": "tidegate-lab", "handle": 1}},
            {"rule": {"family": "ip", "expr": [
                {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "up"}},
                {"limit": {"rate": 82562, "burst": 82, "per": "second", "inv": true}},
                {"counter": {"packets": 17, "bytes": 25500}}, {"drop": null}]}}]}"#;
        assert_eq!(drops_in(listed).unwrap(), 17);
        assert!(drops_in(r#"{"nftables": []}"#).is_err());
    }
}
