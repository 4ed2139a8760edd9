//! Testbeds: hosts made of network namespaces, joined by virtual cables.
//!
//! ```text
//! Pair:          sender eth0 ───────── eth0 receiver 0
//!
//! TwoReceivers:                       ┌─── eth0 receiver 0
//!                sender eth0 ── router┤
//!                                     └─── eth0 receiver 1
//!
//! Spread(n):     the same, with n receivers
//!
//! Bridged:       sender eth0 ── bridge ── eth0 receiver 0
//! ```
//!
//! [`Sites`] are several senders behind routers of their own.
//!
//! With a [`LinkSpec`], the cable of `Pair`, and those between the router and each receiver, have a delay, a
//! rate, loss; all the same, or each its own.
//!
//! Nothing of a testbed is visible outside: devices, addresses, routes, settings and listening
//! sockets are inside its namespaces, so many testbeds can live at once. All goes when the value is
//! dropped, and so it does after an error, a panic, SIGINT and SIGTERM, because every wait in the lab
//! ends on those signals ([`wait`]). Only SIGKILL leaves the namespaces behind; their names begin
//! with `tidegate-PID-`.

mod cgroup;
pub mod link;
pub mod peers;
mod process;
mod sites;
pub mod stack;
mod store;
pub mod wait;

use std::{
    ffi::OsStr,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::{self as std_process, Command},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, ensure};
use tidegate_instruments::plumbing::{Route, add_bridge, add_route, set_master, set_mtu};
use tidegate_sys::net::{NetNs, VethPair};

pub use cgroup::Cgroup;
pub use link::{Joint, LinkSpec, Means};
pub use process::{Child, Finished, Site, command};
pub use sites::{SITES_MAX, SiteLinks, Sites};
pub use store::{Place, Store};

use wait::wait_until;

/// The most receivers: each has a network of its own, and its number is in the addresses.
pub const RECEIVERS_MAX: u8 = 16;
/// The device of every host but the router.
const DEV: &str = "eth0";
/// The bridge of a router that is one.
const BRIDGE: &str = "bridge";
/// The router's device towards the sender, and the beginning of the names of those towards receivers.
const ROUTER_DEV: &str = "up";
const ROUTER_DOWN: &str = "down";
/// Lengths of the prefix of every link.
const V4_BITS: u8 = 24;
const V6_BITS: u8 = 64;
/// How long links and servers may take to come up.
const READY: Duration = Duration::from_secs(60);

/// Settings that keep one run from changing the next, and the links free of chatter.
const SYSCTLS: [(&str, &str); 4] = [
    ("net.ipv4.tcp_no_metrics_save", "1"),
    ("net.ipv6.conf.default.accept_dad", "0"),
    ("net.ipv6.conf.default.accept_ra", "0"),
    ("net.ipv6.conf.default.router_solicitations", "0"),
];

/// Buffers that fill 1 Gbit/s over half a second: with links, they and not TCP's buffers are to be measured.
const LONG_PATH_SYSCTLS: [(&str, &str); 2] =
    [("net.ipv4.tcp_rmem", "4096 131072 134217728"), ("net.ipv4.tcp_wmem", "4096 16384 134217728")];

/// Which hosts there are, and how they are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// One sender, one receiver, one cable.
    Pair,
    /// One sender whose only device leads to a router, and two receivers behind that.
    TwoReceivers,
    /// The same with so many receivers, up to [`RECEIVERS_MAX`].
    Spread(u8),
    /// One sender and one receiver on one network: the router between them is a bridge, whose ports have the
    /// names of its devices.
    Bridged,
}

/// IPv4 or IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// What to build.
#[derive(Debug, Clone)]
pub struct TestbedOptions {
    /// Which hosts there are.
    pub topology: Topology,
    /// The MTU of every device; none: 1500.
    pub mtu_bytes: Option<u32>,
    /// What is between the sender and each receiver; none: a cable, which costs nothing.
    pub link: Option<LinkSpec>,
    /// What is between the router and each receiver, where they differ; those beyond have `link`.
    pub links: Vec<LinkSpec>,
    /// The `tidegate-lab` binary, whose tools run as processes; none: the running program.
    pub lab_binary: Option<PathBuf>,
}

impl TestbedOptions {
    /// A testbed with defaults.
    pub fn new(topology: Topology) -> Self {
        Self { topology, mtu_bytes: None, link: None, links: Vec::new(), lab_binary: None }
    }
}

/// A set of hosts. See the [module](self).
#[derive(Debug)]
pub struct Testbed {
    // Dropped in this order: a link with its devices, any other device with the first of its two namespaces.
    joints: Vec<Joint>,
    sender: NetNs,
    receivers: Vec<NetNs>,
    router: Option<NetNs>,
    /// Each receiver is on a network of its own.
    routed: bool,
    lab_binary: PathBuf,
}

impl Testbed {
    /// Builds a testbed. Needs root. On error nothing is left behind.
    pub fn new(options: TestbedOptions) -> anyhow::Result<Self> {
        // From here on signals end waits instead of the process.
        wait::interrupted();
        let lab_binary = match options.lab_binary {
            Some(path) => path,
            None => std::env::current_exe()?,
        };
        let name = unique_name("");
        let host = |role: &str| -> anyhow::Result<NetNs> {
            let netns = NetNs::create(&format!("{name}{role}"))?;
            let is_long = options.link.is_some() || !options.links.is_empty();
            let long_path = LONG_PATH_SYSCTLS.iter().filter(|_| is_long);
            for (key, value) in SYSCTLS.iter().chain(long_path) {
                set_sysctl(&netns, key, value)?;
            }
            Ok(netns)
        };
        let sender = host("sender")?;
        let mut joints = Vec::new();
        let plain = Plan { mtu_bytes: options.mtu_bytes, link: None };
        // What is between router and receiver, or the two hosts of a pair.
        let plan_of = |link: u8| {
            let own = usize::from(link).checked_sub(1).and_then(|at| options.links.get(at));
            let spec = own.copied().or(options.link);
            let link = spec.map(|spec| (spec, format!("{name}between{link}")));
            Plan { link, ..plain.clone() }
        };
        let mut linked =
            |near: (&NetNs, &str, u8), far: (&NetNs, &str, u8), link: u8| -> anyhow::Result<()> {
                joints.extend(join(near, far, link, &plan_of(link))?);
                Ok(())
            };
        let (receivers, router) = match options.topology {
            Topology::Pair => {
                let receiver = host("receiver")?;
                linked((&sender, DEV, 1), (&receiver, DEV, 2), 0)?;
                (vec![receiver], None)
            }
            Topology::TwoReceivers | Topology::Spread(_) => {
                let count = if let Topology::Spread(count) = options.topology { count } else { 2 };
                ensure!(
                    (1..=RECEIVERS_MAX).contains(&count),
                    "{count} receivers: use 1 to {RECEIVERS_MAX}"
                );
                let router = host("router")?;
                set_sysctl(&router, "net.ipv4.ip_forward", "1")?;
                set_sysctl(&router, "net.ipv6.conf.all.forwarding", "1")?;
                join((&sender, DEV, 1), (&router, ROUTER_DEV, 254), 0, &plain)?;
                default_routes(&sender, 0)?;
                let mut receivers = Vec::new();
                for index in 0..count {
                    let (receiver, dev) =
                        (host(&format!("receiver{index}"))?, format!("{ROUTER_DOWN}{index}"));
                    let link = index + 1;
                    linked((&router, &dev, 254), (&receiver, DEV, 1), link)?;
                    default_routes(&receiver, link)?;
                    receivers.push(receiver);
                }
                (receivers, Some(router))
            }
            Topology::Bridged => {
                let (router, receiver) = (host("router")?, host("receiver0")?);
                let down = format!("{ROUTER_DOWN}0");
                cable((&sender, DEV), (&router, ROUTER_DEV), &plain)?;
                joints.extend(cable((&router, &down), (&receiver, DEV), &plan_of(1))?);
                bridge(&router, &[ROUTER_DEV, &down])?;
                settle((&sender, DEV, 1), 0)?;
                settle((&receiver, DEV, 2), 0)?;
                (vec![receiver], Some(router))
            }
        };
        let routed = matches!(options.topology, Topology::TwoReceivers | Topology::Spread(_));
        let testbed = Self { joints, sender, receivers, router, routed, lab_binary };
        testbed.wait_for_paths()?;
        Ok(testbed)
    }

    /// The host whose egress is limited.
    pub fn sender(&self) -> &NetNs {
        &self.sender
    }

    pub fn receiver_count(&self) -> usize {
        self.receivers.len()
    }

    /// A host behind the limit. Panics if there is no such receiver.
    pub fn receiver(&self, index: usize) -> &NetNs {
        &self.receivers[index]
    }

    /// The host between, if there is one.
    pub fn router(&self) -> Option<&NetNs> {
        self.router.as_ref()
    }

    /// The address of a receiver.
    pub fn addr(&self, index: usize, family: Family) -> IpAddr {
        match self.routed {
            false => address(0, 2, family),
            true => address(index as u8 + 1, 1, family),
        }
    }

    pub fn sender_addr(&self, family: Family) -> IpAddr {
        address(0, 1, family)
    }

    /// The links, one for each receiver; empty without.
    pub fn joints(&self) -> &[Joint] {
        &self.joints
    }

    /// The sender's only device.
    pub fn sender_dev(&self) -> &'static str {
        DEV
    }

    /// The router's device towards the sender: what arrives there has passed the sender's limit, and no link.
    pub fn router_dev(&self) -> &'static str {
        ROUTER_DEV
    }

    /// The router's device towards a receiver: one end of its link, if there is one.
    pub fn router_dev_to(&self, index: usize) -> String {
        format!("{ROUTER_DOWN}{index}")
    }

    /// A receiver's only device.
    pub fn receiver_dev(&self, _index: usize) -> &'static str {
        DEV
    }

    /// A command that starts at `site` and is killed when the thread that spawned it ends.
    pub fn command<'a>(
        &self,
        site: impl Into<Site<'a>>,
        program: impl AsRef<OsStr>,
    ) -> anyhow::Result<Command> {
        command(site, program)
    }

    /// A command that runs one of the lab's tools at `site`.
    pub fn tool<'a>(&self, site: impl Into<Site<'a>>, tool: &str) -> anyhow::Result<Command> {
        self::tool(&self.lab_binary, site, tool)
    }

    /// The `tidegate-lab` binary, whose tools run as processes.
    pub fn lab_binary(&self) -> &Path {
        &self.lab_binary
    }

    /// Waits until every receiver answers the sender in both families, so that no experiment
    /// measures a neighbour being looked up.
    fn wait_for_paths(&self) -> anyhow::Result<()> {
        for index in 0..self.receivers.len() {
            for family in [Family::V4, Family::V6] {
                let to = self.addr(index, family);
                wait_until(&format!("an answer from {to}"), READY, || {
                    Ok(self.sender.run(|| answers(to))?.then_some(()))
                })?;
            }
        }
        Ok(())
    }
}

/// A command that runs one of the lab's tools, of this binary, at `site`.
pub fn tool<'a>(
    lab_binary: &Path,
    site: impl Into<Site<'a>>,
    tool: &str,
) -> anyhow::Result<Command> {
    let mut command = command(site, lab_binary)?;
    command.args(["tool", tool]);
    Ok(command)
}

/// Whether a host is there: one that refuses a connection is.
fn answers(host: IpAddr) -> bool {
    match std::net::TcpStream::connect_timeout(&(host, 9).into(), Duration::from_millis(500)) {
        Ok(_) => true,
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionRefused,
    }
}

/// Sets a kernel parameter of one namespace, such as `net.ipv4.tcp_ecn`.
pub fn set_sysctl(netns: &NetNs, key: &str, value: &str) -> anyhow::Result<()> {
    let path = format!("/proc/sys/{}", key.replace('.', "/"));
    let write = || fs::write(&path, value);
    netns.run(write)?.with_context(|| format!("cannot set {key} = {value} in {}", netns.name()))
}

/// Waits until something in `netns` listens on a TCP port, without connecting to it.
pub fn wait_for_listener(netns: &NetNs, port: u16, server: &mut Child) -> anyhow::Result<()> {
    wait_until(&format!("a server on TCP port {port}"), READY, || {
        server.check_running()?;
        let read = || {
            ["tcp", "tcp6"]
                .map(|table| fs::read_to_string(format!("/proc/thread-self/net/{table}")))
        };
        let listens =
            netns.run(read)?.into_iter().flatten().any(|table| has_listener(&table, port));
        Ok(listens.then_some(()))
    })
}

/// True if this process may build testbeds. Otherwise says that `test` is skipped.
pub fn root_or_skip(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP {test}: needs root");
    }
    root
}

/// A name that no other testbed has, now or later: `tidegate-PID-RANDOM-ROLE`.
pub(crate) fn unique_name(role: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
    // A pid may come again; the clock makes its names differ.
    format!("tidegate-{}-{:05x}{count}-{role}", std_process::id(), clock & 0xf_ffff)
}

/// The address of host number `host` on link number `link`.
fn address(link: u8, host: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(10, 77, link, host).into(),
        Family::V6 => Ipv6Addr::new(0xfd77, 0, 0, link.into(), 0, 0, 0, host.into()).into(),
    }
}

/// How two hosts are to be joined.
#[derive(Debug, Clone)]
struct Plan {
    mtu_bytes: Option<u32>,
    /// By what, and the name for a namespace between them; none: by a cable.
    link: Option<(LinkSpec, String)>,
}

/// Joins two hosts. An end is its host, device and host number on the link.
fn join(
    near: (&NetNs, &str, u8),
    far: (&NetNs, &str, u8),
    link: u8,
    plan: &Plan,
) -> anyhow::Result<Option<Joint>> {
    let joint = cable((near.0, near.1), (far.0, far.1), plan)?;
    for end in [near, far] {
        settle(end, link)?;
    }
    Ok(joint)
}

/// Makes the devices of both ends and what is between them. They are down, and have no addresses.
fn cable(near: (&NetNs, &str), far: (&NetNs, &str), plan: &Plan) -> anyhow::Result<Option<Joint>> {
    let joint = match &plan.link {
        Some((spec, between)) => Some(Joint::new(near, far, spec, between)?),
        None => {
            let pair = VethPair { name: near.1, peer: far.1, peer_netns: Some(far.0) };
            near.0.netlink()?.add_veth(&pair)?;
            None
        }
    };
    for (netns, dev) in [near, far] {
        let Some(mtu_bytes) = plan.mtu_bytes else { continue };
        let mut netlink = netns.netlink()?;
        let index = netlink.index_of(dev)?;
        set_mtu(&mut netlink, index, mtu_bytes)?;
    }
    Ok(joint)
}

/// Gives an end of a link its addresses, and sets it up.
fn settle((netns, dev, host): (&NetNs, &str, u8), link: u8) -> anyhow::Result<()> {
    let mut netlink = netns.netlink()?;
    let index = netlink.index_of(dev)?;
    netlink.add_address(index, address(link, host, Family::V4), V4_BITS)?;
    netlink.add_address(index, address(link, host, Family::V6), V6_BITS)?;
    Ok(netlink.set_up(index, true)?)
}

/// Makes devices of a host the ports of a bridge.
fn bridge(netns: &NetNs, ports: &[&str]) -> anyhow::Result<()> {
    let mut netlink = netns.netlink()?;
    add_bridge(&mut netlink, BRIDGE)?;
    let bridge = netlink.index_of(BRIDGE)?;
    for port in ports {
        let index = netlink.index_of(port)?;
        set_master(&mut netlink, index, bridge)?;
        netlink.set_up(index, true)?;
    }
    Ok(netlink.set_up(bridge, true)?)
}

/// Sends everything else through the router of a link.
fn default_routes(netns: &NetNs, link: u8) -> anyhow::Result<()> {
    let mut netlink = netns.netlink()?;
    for (network, family) in
        [(Ipv4Addr::UNSPECIFIED.into(), Family::V4), (Ipv6Addr::UNSPECIFIED.into(), Family::V6)]
    {
        let gateway = address(link, 254, family);
        add_route(&mut netlink, &Route { network, prefix_len: 0, gateway })?;
    }
    Ok(())
}

/// Looks for a socket in state LISTEN (0A) in the text of `/proc/net/tcp`.
fn has_listener(table: &str, port: u16) -> bool {
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let local = fields.next().and_then(|local| local.rsplit(':').next());
        let state = fields.nth(1);
        local == Some(&format!("{port:04X}")) && state == Some("0A")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_distinguished_from_connections() {
        let table = "  sl  local_address rem_address   st tx_queue\n\
                     0: 00000000:1451 00000000:0000 0A 00000000:00000000\n\
                     1: 0100007F:1452 0100007F:1451 01 00000000:00000000\n";
        assert!(has_listener(table, 5201));
        assert!(!has_listener(table, 5202));
        assert!(!has_listener(table, 5203));
    }

    #[test]
    fn names_never_repeat() {
        assert_ne!(unique_name("x"), unique_name("x"));
    }
}
