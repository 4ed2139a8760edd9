//! Where the packets of a limiter wait, so that eBPF programs can read in real time how much that is.
//!
//! `bpf/waiting/backlog.h` is the contract: a map of [`Backlog`], whose address leads a program to the
//! qdisc's own count, the one that `tc -s` shows. [`locate`] finds the address, when the qdisc has been made.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd},
};

use bytemuck::Pod;
use libbpf_rs::{OpenObject, libbpf_sys};
use tidegate_core::Rate;

use crate::{
    bpf::{load_skel, open_skel},
    limit::LimitError,
    net::qdisc::Handle,
    shared::QdiscQuery,
    skel,
};

/// Where the packets of a limiter wait.
pub use crate::shared::Backlog;

/// How often the search is made when qdiscs come and go beside it.
const SEARCHES_MAX: usize = 3;

/// Finds a qdisc with a parent other than the root, by its handle, on a device of the network namespace of
/// the calling thread.
///
/// # Errors
/// [`LimitError::Load`] when the kernel refuses the program, [`LimitError::NoQueue`] when there is no such
/// qdisc.
pub fn locate(ifindex: u32, handle: Handle, rate: Rate) -> Result<Backlog, LimitError> {
    let mut storage: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let open = open_skel::<skel::backlog::BacklogSkelBuilder>(&mut storage, "backlog")?;
    let object = load_skel(open, "backlog")?;
    let handle = u32::from(handle.major) << 16 | u32::from(handle.minor);
    for _ in 0..SEARCHES_MAX {
        let mut query = QdiscQuery { ifindex, handle, qdisc: 0, dev_queue: 0 };
        ask(&object.progs.find_qdisc, "backlog", &mut query)?;
        if query.qdisc != 0 {
            let QdiscQuery { qdisc, dev_queue, .. } = query;
            let rate_bit_s = rate.bit_s();
            return Ok(Backlog { qdisc, handle, ifindex, rate_bit_s, dev_queue });
        }
    }
    Err(LimitError::NoQueue { ifindex })
}

/// Runs a program of type syscall once, which answers in the query itself.
///
/// # Errors
/// [`LimitError::Load`] with the program's name.
pub(crate) fn ask<Q: Pod>(
    program: impl AsFd,
    name: &'static str,
    query: &mut Q,
) -> Result<(), LimitError> {
    // SAFETY: a C struct of integers and pointers, for which zero is "not given".
    let mut opts: libbpf_sys::bpf_test_run_opts = unsafe { std::mem::zeroed() };
    opts.sz = size_of_val(&opts) as _;
    // The answer comes back in the same place.
    opts.ctx_in = (&raw mut *query).cast();
    opts.ctx_size_in = size_of::<Q>() as u32;
    let program = program.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and the query, which the kernel reads and writes, lives through the
    // call with the size given; it is plain old data, so any answer is one.
    let ret = unsafe { libbpf_sys::bpf_prog_test_run_opts(program, &raw mut opts) };
    if ret < 0 {
        let source = libbpf_rs::Error::from_raw_os_error(-ret);
        return Err(LimitError::Load { program: name, source });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{
        NetNs, Netlink, VethPair,
        qdisc::{Fifo, Htb, HtbClass, Place, Verb},
    };
    use crate::waiting::look;

    const LEAF: Handle = Handle::new(0x7500, 0);
    const RATE: Rate = match Rate::from_bit_s(8_000) {
        Some(rate) => rate,
        None => unreachable!(),
    };

    /// A veth with an HTB and a leaf in it.
    fn shaped(netlink: &mut Netlink, name: &str, peer: &str) -> u32 {
        netlink.add_veth(&VethPair { name, peer, peer_netns: None }).unwrap();
        let ifindex = netlink.index_of(name).unwrap();
        let at = |parent, handle| Place { ifindex, parent, handle };
        let (root, class) = (Handle::new(1, 0), Handle::new(1, 1));
        netlink.set_qdisc(Verb::Add, at(Handle::ROOT, root), &Htb::new(1)).unwrap();
        netlink.set_class(Verb::Add, at(root, class), &HtbClass::new(RATE.bit_s())).unwrap();
        let leaf = Fifo::Bytes(10_000);
        netlink.set_qdisc(Verb::Add, at(class, LEAF), &leaf).unwrap();
        ifindex
    }

    #[test]
    fn root_a_leaf_is_found_by_its_handle() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_a_leaf_is_found_by_its_handle: needs root");
            return;
        }
        let netns = NetNs::create(&format!("tidegate-{}-leaf", std::process::id())).unwrap();
        let found = netns.run(|| {
            let mut netlink = Netlink::open().unwrap();
            let ifindex = shaped(&mut netlink, "a", "b");
            let found = locate(ifindex, LEAF, RATE);
            let other = locate(ifindex, Handle::new(0x7501, 0), RATE);
            let elsewhere = locate(ifindex + 9999, LEAF, RATE);
            (found, other, elsewhere)
        });
        let (found, other, elsewhere) = found.unwrap();
        let found = found.unwrap();
        assert!(found.qdisc > 1 << 47 && found.dev_queue > 1 << 47, "{found:?}");
        assert_eq!(found.handle, 0x7500_0000);
        assert!(matches!(other, Err(LimitError::NoQueue { .. })), "{other:?}");
        assert!(matches!(elsewhere, Err(LimitError::NoQueue { .. })), "{elsewhere:?}");
    }

    /// The address of a qdisc may come to be another limit's, which has the same handle.
    #[test]
    fn root_a_leaf_of_another_device_is_none_of_ours() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP root_a_leaf_of_another_device_is_none_of_ours: needs root");
            return;
        }
        let netns = NetNs::create(&format!("tidegate-{}-leaves", std::process::id())).unwrap();
        let seen = netns.run(|| {
            let mut netlink = Netlink::open().unwrap();
            let [ours, other] = [("a", "b"), ("c", "d")].map(|(name, peer)| {
                let ifindex = shaped(&mut netlink, name, peer);
                locate(ifindex, LEAF, RATE).unwrap()
            });
            let is_there = |backlog: Backlog| look(&backlog).unwrap().is_some();
            let moved = Backlog { qdisc: other.qdisc, ..ours };
            let renumbered = Backlog { ifindex: other.ifindex, ..ours };
            let seen = [ours, other, moved, renumbered].map(is_there);
            // Free memory, or whatever took it.
            netlink.delete_qdisc(ours.ifindex, Handle::ROOT).unwrap();
            (seen, is_there(ours))
        });
        let (seen, deleted) = seen.unwrap();
        assert_eq!(seen, [true, true, false, false]);
        assert!(!deleted);
    }
}
