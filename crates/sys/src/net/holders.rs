//! Which process holds a socket: by its inode, in `/proc/PID/fd`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

/// Descriptors that one search reads at most.
pub const MAX_DESCRIPTORS: usize = 1 << 16;

/// A process that holds a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    /// Its name, as the kernel cuts it.
    pub comm: String,
}

/// The inodes of the sockets that a process holds; none if it has gone.
pub fn sockets_of(pid: u32) -> BTreeSet<u64> {
    inodes(pid).take(MAX_DESCRIPTORS).flatten().collect()
}

/// The name of a process; `None` if it does not exist.
pub fn comm(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned())
}

/// Of some processes the first that holds each socket. Ends when all are found, or after
/// [`MAX_DESCRIPTORS`] descriptors.
pub fn holders(
    pids: impl IntoIterator<Item = u32>,
    wanted: &BTreeSet<u64>,
) -> BTreeMap<u64, Holder> {
    let mut found = BTreeMap::new();
    let mut left = MAX_DESCRIPTORS;
    for pid in pids {
        if found.len() == wanted.len() || left == 0 {
            break;
        }
        let mut name = None;
        for inode in inodes(pid).take(left) {
            left -= 1;
            let Some(inode) = inode.filter(|inode| wanted.contains(inode)) else { continue };
            let comm = name.get_or_insert_with(|| comm(pid).unwrap_or_default()).clone();
            found.entry(inode).or_insert(Holder { pid, comm });
        }
    }
    found
}

/// For each descriptor of a process the inode of its socket, if it is one.
fn inodes(pid: u32) -> impl Iterator<Item = Option<u64>> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries.map(|entry| {
        let target = fs::read_link(entry.path()).ok()?;
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, os::fd::AsRawFd};

    use super::*;

    #[test]
    fn we_hold_our_own_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = fs::read_link(format!("/proc/self/fd/{}", listener.as_raw_fd())).unwrap();
        let inode: u64 =
            link.to_str().unwrap().trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
        let me = std::process::id();
        assert!(sockets_of(me).contains(&inode));
        let found = holders([1, me], &BTreeSet::from([inode]));
        assert_eq!(found.get(&inode).map(|h| h.pid), Some(me));
        assert_eq!(comm(u32::MAX), None);
    }
}
