//! The TCP sockets of a cgroup and of all below it, and what each moves between two looks.
//!
//! A socket belongs to the cgroup in which it was made. Rates are of payload, as TCP counts it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    os::unix::fs::MetadataExt,
};

use serde::Serialize;
use tidegate_sys::{
    cgroup::{Cgroup, Hierarchy},
    net::{
        NetError, TcpInfo,
        diag::{self, TcpSocket},
        holders,
    },
};

use tidegate_sys::clock::monotonic_ns;

/// What one connection does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SocketSample {
    /// It is one of those that were asked about.
    pub asked: bool,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// A process of the cgroup that holds it.
    pub pid: Option<u32>,
    /// That process's name.
    pub comm: Option<String>,
    /// Its cgroup; `None` if that has been removed.
    pub cgroup: Option<String>,
    pub congestion_control: String,
    /// Payload sent, retransmissions included.
    pub sent_bit_s: u64,
    /// Payload received.
    pub received_bit_s: u64,
    /// The rate at which it paces itself; `None` is no pacing.
    pub pacing_bit_s: Option<u64>,
    /// The most at which it may pace itself, as a limit or its program has set it.
    pub max_pacing_bit_s: Option<u64>,
    /// The rate at which data last arrived at the peer.
    pub delivery_bit_s: u64,
    /// Smoothed round-trip time.
    pub rtt_ns: u64,
    pub cwnd_segments: u32,
    pub retransmitted_segments: u32,
    /// Segments retransmitted since the connection began.
    pub retransmitted_segments_ever: u32,
    /// The part of the sample in which it had something to send or in flight.
    pub busy: f64,
    /// The part of the sample in which the receiver's window was full.
    pub receiver_limited: f64,
    /// Its inode; 0 if no process holds it any more.
    pub inode: u64,
    /// The inode of its network namespace.
    #[serde(skip)]
    pub namespace: u64,
}

impl SocketSample {
    /// What it moves, both ways.
    pub fn moved_bit_s(&self) -> u64 {
        self.sent_bit_s.saturating_add(self.received_bit_s)
    }

    /// Whether it stays within this host by the loopback device.
    pub fn is_loopback(&self) -> bool {
        self.remote.ip().is_loopback() || self.remote.ip() == self.local.ip()
    }

    fn of(
        socket: &TcpSocket,
        earlier: Option<&TcpInfo>,
        interval_ns: u64,
        cgroup: Option<String>,
    ) -> SocketSample {
        let (now, zero) = (&socket.info, TcpInfo::default());
        let then = earlier.unwrap_or(&zero);
        let interval = interval_ns.max(1);
        let rate = |now: u64, then: u64| {
            let bits = u128::from(now.saturating_sub(then)) * 8 * 1_000_000_000;
            u64::try_from(bits / u128::from(interval)).unwrap_or(u64::MAX)
        };
        let part = |now: std::time::Duration, then: std::time::Duration| {
            let moved = now.saturating_sub(then).as_nanos() as f64;
            (moved / interval as f64).min(1.0)
        };
        // The kernel's "unlimited" was once 32 bits long.
        let pacing = |byte_s: u64| {
            (byte_s != u64::MAX && byte_s != u64::from(u32::MAX)).then(|| byte_s.saturating_mul(8))
        };
        SocketSample {
            asked: false,
            local: socket.local,
            remote: socket.remote,
            pid: None,
            comm: None,
            cgroup,
            congestion_control: socket.congestion_control.clone(),
            sent_bit_s: rate(now.bytes_sent, then.bytes_sent),
            received_bit_s: rate(now.bytes_received, then.bytes_received),
            pacing_bit_s: pacing(now.pacing_bytes_s),
            max_pacing_bit_s: pacing(now.max_pacing_bytes_s),
            delivery_bit_s: now.delivery_bytes_s.saturating_mul(8),
            rtt_ns: u64::try_from(now.rtt.as_nanos()).unwrap_or(u64::MAX),
            cwnd_segments: now.cwnd_segments,
            retransmitted_segments: now
                .retransmitted_segments
                .saturating_sub(then.retransmitted_segments),
            retransmitted_segments_ever: now.retransmitted_segments,
            busy: part(now.busy, then.busy),
            receiver_limited: part(now.receiver_limited, then.receiver_limited),
            inode: socket.inode,
            namespace: socket.namespace,
        }
    }
}

/// What a look has found.
#[derive(Debug, Clone, Default)]
pub struct Sockets {
    /// The fastest first.
    pub list: Vec<SocketSample>,
    /// None was left out for a bound (see [`diag::MAX_SOCKETS`]).
    pub whole: bool,
    /// The inodes of the network namespaces of the cgroup's processes.
    pub namespaces: Vec<u64>,
}

/// Looks at the sockets of a cgroup and of those below it.
#[derive(Debug)]
pub struct Sampler {
    hierarchy: Hierarchy,
    cgroup: Cgroup,
    earlier: BTreeMap<u64, TcpInfo>,
    /// The look before has left none out.
    earlier_whole: bool,
    earlier_ns: u64,
}

impl Sampler {
    /// The first look.
    ///
    /// # Errors
    /// [`NetError`] when the kernel does not list sockets.
    pub fn start(hierarchy: &Hierarchy, cgroup: Cgroup) -> Result<Sampler, NetError> {
        let mut sampler = Sampler {
            hierarchy: hierarchy.clone(),
            cgroup,
            earlier: BTreeMap::new(),
            earlier_whole: true,
            earlier_ns: monotonic_ns(),
        };
        sampler.look()?;
        Ok(sampler)
    }

    pub fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    /// Looks again: what each socket did since the look before.
    ///
    /// # Errors
    /// [`NetError`] when the kernel does not list sockets.
    pub fn look(&mut self) -> Result<Sockets, NetError> {
        let paths = self.hierarchy.find_below(self.cgroup.path(), |_| true);
        let id = |path: &String| {
            let metadata = std::fs::metadata(self.hierarchy.mount().join(path)).ok()?;
            Some((metadata.ino(), path.clone()))
        };
        let below: BTreeMap<u64, String> = paths.iter().filter_map(id).collect();
        // Everything is below the root, also what was made in a cgroup that is gone.
        let all = self.cgroup.path().is_empty();
        let keep = |socket: &TcpSocket| all || below.contains_key(&socket.cgroup_id);
        let found = diag::tcp_sockets(&self.hierarchy, &self.cgroup, keep)?;
        let now_ns = monotonic_ns();
        let interval_ns = now_ns.saturating_sub(self.earlier_ns);
        let sample = |socket: &TcpSocket| {
            // One that was left out may be old: nothing is known of what it did since.
            let unknown = (!self.earlier_whole).then_some(&socket.info);
            let earlier = self.earlier.get(&socket.cookie).or(unknown);
            let cgroup = below.get(&socket.cgroup_id).cloned();
            SocketSample::of(socket, earlier, interval_ns, cgroup)
        };
        let mut list: Vec<_> = found.sockets.iter().map(sample).collect();
        list.sort_by_key(|socket| std::cmp::Reverse(socket.moved_bit_s()));
        self.earlier = found.sockets.iter().map(|s| (s.cookie, s.info)).collect();
        (self.earlier_whole, self.earlier_ns) = (found.whole, now_ns);
        Ok(Sockets { list, whole: found.whole, namespaces: found.namespaces })
    }

    /// Finds out which processes of the cgroup hold these sockets.
    pub fn name_holders(&self, sockets: &mut [SocketSample]) {
        let wanted: BTreeSet<u64> = sockets.iter().map(|s| s.inode).filter(|i| *i > 0).collect();
        let paths = self.hierarchy.find_below(self.cgroup.path(), |_| true);
        let pids = paths.iter().filter_map(|path| self.hierarchy.open(path).ok()?.processes().ok());
        let holders = holders::holders(pids.flatten(), &wanted);
        for socket in sockets {
            if let Some(holder) = holders.get(&socket.inode) {
                socket.pid = Some(holder.pid);
                socket.comm = Some(holder.comm.clone());
            }
        }
    }
}
