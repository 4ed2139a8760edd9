//! What the kernel can do for schemes, asked by requests that it refuses whether it can or not: the error
//! says which. A kind of qdisc or device that is a module is loaded, as it would be by its use.

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage as Message,
    link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage},
    tc::{TcAttribute, TcHandle, TcMessage},
};
use tidegate_core::choice::Kernel;

use crate::net::{NetError, Netlink};

/// The loopback device's index, in every network namespace.
const LOOPBACK: i32 = 1;
/// Of a qdisc: the block that its filters share.
const TCA_EGRESS_BLOCK: u16 = 14;

/// What the running kernel has. What cannot be asked counts as there: its use will say why not.
pub fn kernel() -> Kernel {
    let has_qdisc = |kind| has_qdisc(kind).unwrap_or(true);
    Kernel { htb: has_qdisc("htb"), ifb: has_ifb().unwrap_or(true), fq: has_qdisc("fq") }
}

/// Whether the kernel has a kind of qdisc; `None` if it cannot be asked, as without CAP_NET_ADMIN.
pub fn has_qdisc(kind: &str) -> Option<bool> {
    has_qdisc_in(&mut Netlink::open().ok()?, kind)
}

/// Whether the kernel has devices of kind ifb; `None` if it cannot be asked.
pub fn has_ifb() -> Option<bool> {
    has_link(&mut Netlink::open().ok()?, InfoKind::Ifb)
}

/// No qdisc has a block with the number 0; an unknown kind is refused before that is seen.
fn has_qdisc_in(netlink: &mut Netlink, kind: &str) -> Option<bool> {
    let mut qdisc = TcMessage::default();
    qdisc.header.index = LOOPBACK;
    qdisc.header.parent = TcHandle::ROOT;
    let block = DefaultNla::new(TCA_EGRESS_BLOCK, vec![0; 4]);
    qdisc.attributes = vec![TcAttribute::Kind(kind.into()), TcAttribute::Other(block)];
    let message = Message::NewQueueDiscipline(qdisc);
    let made = netlink.request("ask for a qdisc", message, NLM_F_CREATE | NLM_F_EXCL);
    is_there(made, libc::ENOENT)
}

/// No device has an MTU of 4 GiB; an unknown kind is refused before that is seen.
fn has_link(netlink: &mut Netlink, kind: InfoKind) -> Option<bool> {
    let mut link = LinkMessage::default();
    link.attributes =
        vec![LinkAttribute::Mtu(u32::MAX), LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])];
    let message = Message::NewLink(link);
    let made = netlink.request("ask for a kind of device", message, NLM_F_CREATE | NLM_F_EXCL);
    is_there(made, libc::EOPNOTSUPP)
}

fn is_there(made: Result<(), NetError>, unknown: i32) -> Option<bool> {
    match made.map_err(|e| e.errno()) {
        Err(Some(libc::EPERM | libc::EACCES) | None) => None,
        Err(Some(errno)) => Some(errno != unknown),
        Ok(()) => Some(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::qdisc::{Handle, Htb, Place, Verb};

    #[test]
    fn root_kinds_that_no_kernel_has_are_not_there_and_nothing_is_made() {
        if !rustix::process::geteuid().is_root() {
            return println!("SKIP root_kinds_that_no_kernel_has_are_not_there: needs root");
        }
        let netns = crate::net::NetNs::create(&format!("tg-kinds-{}", std::process::id())).unwrap();
        let mut netlink = netns.netlink().unwrap();
        let before = netlink.devices().unwrap();
        assert_eq!(has_qdisc_in(&mut netlink, "nosuch"), Some(false));
        assert_eq!(has_link(&mut netlink, InfoKind::Other("nosuch".into())), Some(false));
        // What the probe says is what happens.
        let htb = has_qdisc_in(&mut netlink, "htb").unwrap();
        let place = Place { ifindex: 1, parent: Handle::ROOT, handle: Handle::new(1, 0) };
        let made = netlink.set_qdisc(Verb::Add, place, &Htb::new(1));
        assert_eq!(made.is_ok(), htb, "{made:?}");
        netlink.delete_qdisc(1, Handle::ROOT).ok();
        // One that needs no options would be made if it were not for the block.
        let before_qdiscs = netlink.qdisc_stats(1).unwrap();
        assert_eq!(has_qdisc_in(&mut netlink, "pfifo"), Some(true));
        has_qdisc_in(&mut netlink, "fq");
        assert_eq!(netlink.qdisc_stats(1).unwrap(), before_qdiscs);
        let ifb = has_link(&mut netlink, InfoKind::Ifb).unwrap();
        assert_eq!(netlink.devices().unwrap(), before);
        assert_eq!(netlink.add_ifb("ifb9").is_ok(), ifb);
    }
}
