//! Sites: hosts behind routers of their own, whose ways to one receiver meet in a hub.
//!
//! ```text
//! sender 0 eth0 ── lan router 0 wan ──link── site0 ┐
//!                                                  hub down ──link── eth0 receiver
//! sender 1 eth0 ── lan router 1 wan ──link── site1 ┘
//! ```
//!
//! With links of half a round trip each, routers are a round trip apart, and so are senders and the receiver.
//! Where these are to differ each site has links of its own, also to its sender ([`SiteLinks`]).
//! Senders send frame by frame: what is between sees packets as a network has them, not segments of 64 KB.
//! All is IPv4, and goes with the value as a [`Testbed`](super::Testbed) does.

use std::{
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
};

use anyhow::ensure;
use tidegate_instruments::plumbing::{Route, add_route, set_gso_max_segs};
use tidegate_sys::net::NetNs;

use super::{
    DEV, Family, Joint, LONG_PATH_SYSCTLS, LinkSpec, Plan, READY, SYSCTLS, address, answers,
    default_routes, join, set_sysctl, unique_name, wait, wait::wait_until,
};

/// The most sites: each has two networks of its own.
pub const SITES_MAX: u8 = 16;
/// The router's device towards the sender, and the other one.
const LAN: &str = "lan";
const WAN: &str = "wan";
const DOWN: &str = "down";
/// Numbers of networks: from these on for the sites, and that of the receiver.
const LANS: u8 = 1;
const WANS: u8 = 101;
const RECEIVER: u8 = 200;
const GATEWAY: u8 = 254;

#[derive(Debug, Clone, Copy)]
pub struct SiteLinks {
    /// From its sender to its router; none: a plain cable.
    pub lan: Option<LinkSpec>,
    /// From its router to the hub.
    pub wan: LinkSpec,
}

/// Sites, a hub and a receiver.
#[derive(Debug)]
pub struct Sites {
    // Dropped in this order: links before the namespaces of their ends.
    _joints: Vec<Joint>,
    senders: Vec<NetNs>,
    routers: Vec<NetNs>,
    hub: NetNs,
    receiver: NetNs,
    lab_binary: PathBuf,
}

impl Sites {
    /// Builds so many sites with these links, of which there are two on each way. Needs root. On error
    /// nothing is left behind.
    pub fn new(count: u8, link: LinkSpec, lab_binary: Option<PathBuf>) -> anyhow::Result<Sites> {
        let site = SiteLinks { lan: None, wan: link };
        Sites::with(&vec![site; count.into()], link, lab_binary)
    }

    /// As [`new`](Self::new), with the links of each site, and that between hub and receiver.
    pub fn with(
        links: &[SiteLinks],
        down: LinkSpec,
        lab_binary: Option<PathBuf>,
    ) -> anyhow::Result<Sites> {
        let count = links.len();
        ensure!((1..=SITES_MAX.into()).contains(&count), "{count} sites: use 1 to {SITES_MAX}");
        // From here on signals end waits instead of the process.
        wait::interrupted();
        let lab_binary = match lab_binary {
            Some(path) => path,
            None => std::env::current_exe()?,
        };
        let name = unique_name("");
        let host = |role: &str, forwards: bool| -> anyhow::Result<NetNs> {
            let netns = NetNs::create(&format!("{name}{role}"))?;
            for (key, value) in SYSCTLS.iter().chain(&LONG_PATH_SYSCTLS) {
                set_sysctl(&netns, key, value)?;
            }
            if forwards {
                set_sysctl(&netns, "net.ipv4.ip_forward", "1")?;
            }
            Ok(netns)
        };
        let plain = Plan { mtu_bytes: None, link: None };
        let linked = |link: LinkSpec, way: &str| Plan {
            link: Some((link, format!("{name}{way}"))),
            ..plain.clone()
        };
        let (hub, receiver) = (host("hub", true)?, host("receiver", false)?);
        let mut joints = Vec::new();
        let ends = ((&hub, DOWN, GATEWAY), (&receiver, DEV, 1));
        joints.extend(join(ends.0, ends.1, RECEIVER, &linked(down, "between"))?);
        default_routes(&receiver, RECEIVER)?;
        let (mut senders, mut routers) = (Vec::new(), Vec::new());
        for (site, of_site) in (0..).zip(links) {
            let (sender, router) =
                (host(&format!("sender{site}"), false)?, host(&format!("router{site}"), true)?);
            let lan = of_site.lan.map(|link| linked(link, &format!("lan{site}")));
            let lan = lan.as_ref().unwrap_or(&plain);
            joints.extend(join((&sender, DEV, 1), (&router, LAN, GATEWAY), LANS + site, lan)?);
            let mut netlink = sender.netlink()?;
            let index = netlink.index_of(DEV)?;
            set_gso_max_segs(&mut netlink, index, 1)?;
            default_routes(&sender, LANS + site)?;
            let (far, way) = (hub_dev(site), linked(of_site.wan, &format!("between{site}")));
            joints.extend(join((&router, WAN, 1), (&hub, &far, GATEWAY), WANS + site, &way)?);
            default_routes(&router, WANS + site)?;
            senders.push(sender);
            routers.push(router);
        }
        let sites = Sites { _joints: joints, senders, routers, hub, receiver, lab_binary };
        for site in 0..count {
            sites.route(site)?;
            let (to, from) = (sites.addr(), sites.sender(site));
            wait_until(&format!("an answer from {to}"), READY, || {
                Ok(from.run(|| answers(to))?.then_some(()))
            })?;
        }
        Ok(sites)
    }

    pub fn count(&self) -> usize {
        self.routers.len()
    }

    /// The host at a site. Panics if there is no such site, as all do that take one.
    pub fn sender(&self, site: usize) -> &NetNs {
        &self.senders[site]
    }

    pub fn router(&self, site: usize) -> &NetNs {
        &self.routers[site]
    }

    /// Its device towards the sender.
    pub fn router_dev(&self) -> &'static str {
        LAN
    }

    /// Where others reach the router.
    pub fn router_addr(&self, site: usize) -> IpAddr {
        address(WANS + site as u8, 1, Family::V4)
    }

    /// Where all ways meet.
    pub fn hub(&self) -> &NetNs {
        &self.hub
    }

    /// Its device towards a site: what comes in there has passed the site's router and one link.
    pub fn hub_dev(&self, site: usize) -> String {
        hub_dev(site as u8)
    }

    /// Its device towards the receiver.
    pub fn hub_dev_down(&self) -> &'static str {
        DOWN
    }

    /// The host that all send to.
    pub fn receiver(&self) -> &NetNs {
        &self.receiver
    }

    pub fn addr(&self) -> IpAddr {
        address(RECEIVER, 1, Family::V4)
    }

    pub fn receiver_dev(&self) -> &'static str {
        DEV
    }

    /// The `tidegate-lab` binary, whose tools run as processes.
    pub fn lab_binary(&self) -> &Path {
        &self.lab_binary
    }

    /// Cuts a site off, or joins it again.
    pub fn plug(&self, site: usize, up: bool) -> anyhow::Result<()> {
        let mut netlink = self.hub.netlink()?;
        let index = netlink.index_of(&self.hub_dev(site))?;
        netlink.set_up(index, up)?;
        // A device that goes down takes its routes with it.
        if up { self.route(site) } else { Ok(()) }
    }

    /// The hub's way to the sender of a site.
    fn route(&self, site: usize) -> anyhow::Result<()> {
        let network = Ipv4Addr::new(10, 77, LANS + site as u8, 0).into();
        let gateway = self.router_addr(site);
        let mut netlink = self.hub.netlink()?;
        Ok(add_route(&mut netlink, &Route { network, prefix_len: super::V4_BITS, gateway })?)
    }
}

fn hub_dev(site: u8) -> String {
    format!("site{site}")
}
