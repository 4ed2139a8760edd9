//! What the kernel can do for schemes, asked by requests that it refuses whether it can or not: the error
//! says which. A kind of qdisc or device that is a module is loaded, as it would be by its use.

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage as Message,
    link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage},
    tc::{TcAttribute, TcHandle, TcMessage},
};
use tidegate_core::choice::Kernel;

use crate::net::Netlink;

/// The loopback device's index, in every network namespace.
const LOOPBACK: i32 = 1;

/// What the running kernel has. What cannot be asked counts as there: its use will say why not.
#[must_use]
pub fn kernel() -> Kernel {
    let Ok(mut netlink) = Netlink::open() else { return Kernel::WHOLE };
    Kernel { htb: has_qdisc(&mut netlink, "htb"), ifb: has_link(&mut netlink, InfoKind::Ifb) }
}

/// Without its options a qdisc such as HTB is refused as invalid, an unknown one as unknown.
fn has_qdisc(netlink: &mut Netlink, kind: &str) -> bool {
    let mut qdisc = TcMessage::default();
    qdisc.header.index = LOOPBACK;
    qdisc.header.parent = TcHandle::ROOT;
    qdisc.attributes.push(TcAttribute::Kind(kind.into()));
    let message = Message::NewQueueDiscipline(qdisc);
    let made = netlink.request("ask for a qdisc", message, NLM_F_CREATE | NLM_F_EXCL);
    !made.is_err_and(|e| e.errno() == Some(libc::ENOENT))
}

/// No device has an MTU of 4 GiB; an unknown kind is refused before that is seen.
fn has_link(netlink: &mut Netlink, kind: InfoKind) -> bool {
    let mut link = LinkMessage::default();
    link.attributes =
        vec![LinkAttribute::Mtu(u32::MAX), LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])];
    let message = Message::NewLink(link);
    let made = netlink.request("ask for a kind of device", message, NLM_F_CREATE | NLM_F_EXCL);
    !made.is_err_and(|e| e.errno() == Some(libc::EOPNOTSUPP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::qdisc::{Handle, Htb, Place, Qdisc, Verb};

    #[test]
    fn root_kinds_that_no_kernel_has_are_not_there_and_nothing_is_made() {
        if !rustix::process::geteuid().is_root() {
            return println!("SKIP root_kinds_that_no_kernel_has_are_not_there: needs root");
        }
        let netns = crate::net::NetNs::create(&format!("tg-kinds-{}", std::process::id())).unwrap();
        let mut netlink = netns.netlink().unwrap();
        let before = netlink.devices().unwrap();
        assert!(!has_qdisc(&mut netlink, "nosuch"));
        assert!(!has_link(&mut netlink, InfoKind::Other("nosuch".into())));
        // What the probe says is what happens.
        let htb = has_qdisc(&mut netlink, "htb");
        let place = Place { ifindex: 1, parent: Handle::ROOT, handle: Handle::new(1, 0) };
        let made = netlink.set_qdisc(Verb::Add, place, &Qdisc::Htb(Htb::new(1)));
        assert_eq!(made.is_ok(), htb, "{made:?}");
        let ifb = has_link(&mut netlink, InfoKind::Ifb);
        assert_eq!(netlink.devices().unwrap(), before);
        assert_eq!(netlink.add_ifb("ifb9").is_ok(), ifb);
    }
}
