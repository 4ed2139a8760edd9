//! The TCP sockets of a network namespace, as the kernel lists them (`sock_diag`): addresses, cgroup,
//! congestion control and `TCP_INFO`.
//!
//! A listing is one dump; the kernel walks all sockets of the namespace, so it takes O(sockets) whatever is
//! kept of them.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
};

use netlink_packet_core::NlasIterator;
use netlink_sys::{Socket, SocketAddr as NetlinkAddr, protocols::NETLINK_SOCK_DIAG};

use super::{NetError, TCP_INFO_BYTES, TcpInfo};
use crate::{
    cgroup::{Cgroup, Hierarchy},
    process::{in_network_namespace, network_namespaces},
};

/// Sockets that one look keeps at most.
pub const MAX_SOCKETS: usize = 1 << 16;
/// Sockets that one look goes over at most.
pub const MAX_VISITED: usize = 1 << 20;
/// Network namespaces that one look enters at most.
pub const MAX_NAMESPACES: usize = 1024;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const HEADER_BYTES: usize = 16;
/// `struct inet_diag_req_v2` and `struct inet_diag_msg`.
const REQUEST_BYTES: usize = 56;
const MESSAGE_BYTES: usize = 72;
/// `INET_DIAG_*`: attributes of an answer, and bits (of one less) in a request.
const INFO: u16 = 2;
const CONGESTION: u16 = 4;
const CGROUP_ID: u16 = 21;
/// All states in which data may pass or be waited for: not LISTEN (10), TIME_WAIT (6), NEW_SYN_RECV (12).
const STATES: u32 = 0b1011_1011_1110;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const ACTION: &str = "list the TCP sockets";

/// A TCP socket of some process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpSocket {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// The kernel's number for it, never used again.
    pub cookie: u64,
    /// Its inode, by which processes hold it; 0 if none does any more.
    pub inode: u64,
    /// The cgroup in which it was made; 0 if the kernel does not say.
    pub cgroup_id: u64,
    /// The inode of its network namespace.
    pub namespace: u64,
    pub congestion_control: String,
    /// What TCP knows of the connection.
    pub info: TcpInfo,
}

/// What a look at sockets has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The sockets, in no order.
    pub sockets: Vec<TcpSocket>,
    /// None was left out for a bound.
    pub whole: bool,
    /// The inodes of the network namespaces that were looked into.
    pub namespaces: Vec<u64>,
}

/// The TCP sockets that `keep` wants, of all network namespaces in which a process at or below the cgroup
/// lives.
///
/// At most [`MAX_SOCKETS`] are kept, [`MAX_VISITED`] gone over, [`MAX_NAMESPACES`] entered.
///
/// # Errors
/// [`NetError`] when the kernel does not list them. A namespace that goes meanwhile is none.
pub fn tcp_sockets(
    hierarchy: &Hierarchy,
    cgroup: &Cgroup,
    keep: impl Fn(&TcpSocket) -> bool + Sync,
) -> Result<Found, NetError> {
    let mut look = Look { found: Found { whole: true, ..Found::default() }, visited: 0 };
    let namespaces = network_namespaces(hierarchy, cgroup);
    look.found.whole = namespaces.len() <= MAX_NAMESPACES;
    for namespace in namespaces.iter().take(MAX_NAMESPACES) {
        let Some(inode) = inode(namespace) else { continue };
        look.found.namespaces.push(inode);
        let mut done = Ok(());
        in_network_namespace(namespace, || {
            done = [libc::AF_INET, libc::AF_INET6]
                .into_iter()
                .try_for_each(|family| dump(family as u8, inode, &keep, &mut look));
        });
        done?;
    }
    Ok(look.found)
}

fn inode(namespace: &OwnedFd) -> Option<u64> {
    rustix::fs::fstat(namespace).ok().map(|stat| stat.st_ino)
}

struct Look {
    found: Found,
    visited: usize,
}

fn dump(
    family: u8,
    namespace: u64,
    keep: &impl Fn(&TcpSocket) -> bool,
    look: &mut Look,
) -> Result<(), NetError> {
    let refused = |e| NetError::refused(ACTION, e);
    let malformed =
        |detail: &str| NetError::Malformed { action: ACTION.to_owned(), detail: detail.to_owned() };
    let mut socket = Socket::new(NETLINK_SOCK_DIAG).map_err(refused)?;
    socket.bind_auto().map_err(refused)?;
    socket.connect(&NetlinkAddr::new(0, 0)).map_err(refused)?;
    socket.send(&request(family), 0).map_err(refused)?;
    loop {
        let (datagram, _) = socket.recv_from_full().map_err(refused)?;
        let mut rest = datagram.as_slice();
        while rest.len() >= HEADER_BYTES {
            let len = u32_at(rest, 0) as usize;
            let kind = u16::from_ne_bytes([rest[4], rest[5]]);
            let body = rest.get(HEADER_BYTES..len).ok_or_else(|| malformed("a bad length"))?;
            match kind {
                NLMSG_DONE => return Ok(()),
                NLMSG_ERROR => {
                    let code = body.get(..4).map_or(0, |b| u32_at(b, 0) as i32);
                    return Err(refused(std::io::Error::from_raw_os_error(-code)));
                }
                _ => {}
            }
            // Dropping our end of the netlink socket ends the dump.
            if look.visited >= MAX_VISITED || look.found.sockets.len() >= MAX_SOCKETS {
                look.found.whole = false;
                return Ok(());
            }
            look.visited += 1;
            look.found.sockets.extend(parse(body, namespace).filter(|socket| keep(socket)));
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

fn request(family: u8) -> [u8; HEADER_BYTES + REQUEST_BYTES] {
    let mut request = [0u8; HEADER_BYTES + REQUEST_BYTES];
    let len = request.len() as u32;
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
    let extensions = 1u8 << (INFO - 1) | 1 << (CONGESTION - 1);
    request[..4].copy_from_slice(&len.to_ne_bytes());
    request[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request[6..8].copy_from_slice(&flags.to_ne_bytes());
    request[16..19].copy_from_slice(&[family, libc::IPPROTO_TCP as u8, extensions]);
    request[20..24].copy_from_slice(&STATES.to_ne_bytes());
    request
}

/// One `struct inet_diag_msg` and its attributes; `None` if there is no `TCP_INFO`.
fn parse(body: &[u8], namespace: u64) -> Option<TcpSocket> {
    let head = body.get(..MESSAGE_BYTES)?;
    let port = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let address = |at: usize| {
        let bytes: [u8; 16] = head[at..at + 16].try_into().ok()?;
        Some(if i32::from(head[0]) == libc::AF_INET6 {
            IpAddr::from(bytes).to_canonical()
        } else {
            IpAddr::from([bytes[0], bytes[1], bytes[2], bytes[3]])
        })
    };
    let mut socket = TcpSocket {
        local: SocketAddr::new(address(8)?, port(4)),
        remote: SocketAddr::new(address(24)?, port(6)),
        cookie: u64::from(u32_at(head, 44)) | u64::from(u32_at(head, 48)) << 32,
        inode: u32_at(head, 68).into(),
        cgroup_id: 0,
        namespace,
        congestion_control: String::new(),
        info: TcpInfo::default(),
    };
    let mut informed = false;
    for attribute in NlasIterator::new(&body[MESSAGE_BYTES..]).flatten() {
        let value = attribute.value();
        match attribute.kind() {
            INFO => {
                let raw: &[u8; TCP_INFO_BYTES] = value.get(..TCP_INFO_BYTES)?.try_into().ok()?;
                socket.info = TcpInfo::parse(raw);
                informed = true;
            }
            CONGESTION => {
                let name = String::from_utf8_lossy(value);
                socket.congestion_control = name.trim_end_matches('\0').to_owned();
            }
            CGROUP_ID => {
                socket.cgroup_id = value.try_into().map_or(0, u64::from_ne_bytes);
            }
            _ => {}
        }
    }
    informed.then_some(socket)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_live_connection_is_found_from_both_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, theirs) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let mut look = Look { found: Found::default(), visited: 0 };
        let keep = |s: &TcpSocket| s.local == ours || s.remote == ours;
        dump(libc::AF_INET as u8, 1, &keep, &mut look).unwrap();
        let pairs: Vec<_> = look.found.sockets.iter().map(|s| (s.local, s.remote)).collect();
        assert!(pairs.contains(&(ours, theirs)) && pairs.contains(&(theirs, ours)), "{pairs:?}");
        let socket = look.found.sockets.iter().find(|s| s.local == ours).unwrap();
        assert!(socket.cgroup_id > 0 && socket.inode > 0 && socket.info.cwnd_segments > 0);
        assert!(!socket.congestion_control.is_empty());
    }

    #[test]
    fn listening_sockets_are_not_asked_for() {
        assert_eq!(STATES & (1 << 10 | 1 << 6 | 1 << 12 | 1), 0);
        assert_ne!(STATES & (1 << 1), 0, "established ones are");
    }

    proptest! {
        #[test]
        fn no_answer_panics(body in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&body, 1);
        }
    }
}
