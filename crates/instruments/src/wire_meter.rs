//! Counts the bytes on the wire, exactly, in bins of time.
//!
//! A device's own counters take a packet that is yet to be segmented for one with a single header,
//! and so show a full 1 Gbit/s as 0.95. This meter is a small eBPF program on the ingress of the
//! **receiver's** device: it sees what passed the limiter or qdisc of the sender, adds the headers
//! of each segment, and sorts the bytes into bins by the time of arrival. It passes every packet
//! on. Its cost is a map lookup and two atomic additions a packet. Flows that come from consecutive
//! ports can have bins of their own.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, TC_INGRESS, TcHook, TcHookBuilder,
    skel::{OpenSkel, SkelBuilder},
};
use rustix::time::{ClockId, clock_gettime};

use tidegate_sys::net::{
    NetError, NetNs, Netlink,
    qdisc::{Clsact, Handle, Place, Verb},
};

use crate::skel;

/// More bins than this are a mistake: at 100 ms they are almost two hours.
pub const BINS_MAX: u32 = 65_536;

/// The most bins of flows, all together: 16 MiB.
pub const FLOW_BINS_MAX: u64 = 1 << 21;

/// Before every other filter, so that what those drop is counted too.
const PRIORITY: u32 = 1;
const HANDLE: u32 = 1;

/// Why a meter cannot be set up or read.
#[derive(Debug, thiserror::Error)]
pub enum WireMeterError {
    /// The eBPF program or one of its maps was refused. Nothing is attached.
    #[error("cannot {action}: {source} (the meter needs root and Linux 6.1 or newer)")]
    Bpf {
        /// What was asked, as a phrase that follows "cannot".
        action: &'static str,
        /// libbpf's error.
        source: libbpf_rs::Error,
    },
    #[error(transparent)]
    Net(#[from] NetError),
    #[error("{field} is {read}: {expected}")]
    Invalid {
        /// Which argument.
        field: &'static str,
        read: String,
        /// What to give instead.
        expected: &'static str,
    },
}

/// What arrived in one bin of time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WireBin {
    /// Bytes of Ethernet frames, from the MAC header to the last byte before the FCS.
    pub bytes: u64,
    /// Frames, counted after segmentation.
    pub packets: u64,
}

/// Flows with bins of their own, by their source ports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlowPorts {
    pub first: u16,
    /// How many there are, on consecutive ports.
    pub count: u16,
}

/// A meter on the ingress of a device. Dropping it detaches it, and removes clsact too if the meter
/// brought it and nothing else uses it by then.
#[derive(Debug)]
pub struct WireMeter {
    netlink: Netlink,
    ifindex: u32,
    netns: NetNs,
    owns_clsact: bool,
    clock: MapHandle,
    bins: MapHandle,
    flow_bins: MapHandle,
    ports: FlowPorts,
    bin_count: u32,
    bin: Duration,
    started_ns: u64,
}

impl WireMeter {
    /// Attaches a meter to the device `ifname` in `netns`, with `bins` bins of length `bin`. It
    /// counts nothing until [`start`](Self::start).
    ///
    /// Errors: among others, if the device carries a meter already.
    pub fn attach(
        netns: &NetNs,
        ifname: &str,
        bins: u32,
        bin: Duration,
    ) -> Result<Self, WireMeterError> {
        Self::attach_flows(netns, ifname, bins, bin, FlowPorts::default())
    }

    /// As [`attach`](Self::attach), with bins for each flow of `ports` besides.
    ///
    /// Errors: as there, or if all flows together have more than [`FLOW_BINS_MAX`] bins.
    pub fn attach_flows(
        netns: &NetNs,
        ifname: &str,
        bins: u32,
        bin: Duration,
        ports: FlowPorts,
    ) -> Result<Self, WireMeterError> {
        let of_flows = u64::from(ports.count) * u64::from(bins);
        if of_flows > FLOW_BINS_MAX {
            return Err(WireMeterError::Invalid {
                field: "the number of bins of all flows",
                read: of_flows.to_string(),
                expected: "use at most 2097152",
            });
        }
        if !(1..=BINS_MAX).contains(&bins) {
            return Err(WireMeterError::Invalid {
                field: "the number of bins",
                read: bins.to_string(),
                expected: "use 1 to 65536",
            });
        }
        if bin < Duration::from_micros(1) {
            return Err(WireMeterError::Invalid {
                field: "the length of a bin",
                read: format!("{bin:?}"),
                expected: "use at least 1us",
            });
        }
        let refused = |action| move |source| WireMeterError::Bpf { action, source };
        let own_netns = netns.try_clone()?;
        let mut netlink = netns.netlink()?;
        let ifindex = netlink.index_of(ifname)?;

        let mut object = MaybeUninit::uninit();
        let mut open = skel::wire_meter::WireMeterSkelBuilder::default()
            .open(&mut object)
            .map_err(refused("open the wire meter"))?;
        open.maps
            .wire_bins
            .set_max_entries(bins + 1)
            .map_err(refused("size the wire meter's bins"))?;
        open.maps
            .wire_flows
            .set_max_entries((of_flows as u32).max(1))
            .map_err(refused("size the wire meter's bins of flows"))?;
        let loaded = open.load().map_err(refused("load the wire meter"))?;
        // The maps outlive the skeleton through their own descriptors, the program through its hook.
        let keep = |map| MapHandle::try_from(map).map_err(refused("keep the wire meter's map"));
        let (clock, bins_map) = (keep(&loaded.maps.wire_clock)?, keep(&loaded.maps.wire_bins)?);
        let flow_bins = keep(&loaded.maps.wire_flows)?;

        let owns_clsact = add_clsact(&mut netlink, ifindex)?;
        let program = loaded.progs.wire_meter.as_fd();
        let attached = netns.run(|| ingress_hook(program, ifindex).attach().map(drop))?;
        if let Err(source) = attached {
            if owns_clsact {
                let _ = netlink.delete_qdisc(ifindex, Handle::CLSACT);
            }
            return Err(WireMeterError::Bpf { action: "attach the wire meter", source });
        }
        Ok(Self {
            netlink,
            ifindex,
            netns: own_netns,
            owns_clsact,
            clock,
            bins: bins_map,
            flow_bins,
            ports,
            bin_count: bins,
            bin,
            started_ns: 0,
        })
    }

    /// Empties the bins and starts the first one now. Can be called again.
    pub fn start(&mut self) -> Result<(), WireMeterError> {
        self.set_clock(0)?;
        for index in 0..=self.bin_count {
            self.bins
                .update(&index.to_ne_bytes(), &[0; 16], MapFlags::ANY)
                .map_err(|source| WireMeterError::Bpf { action: "empty a bin", source })?;
        }
        for index in 0..u32::from(self.ports.count) * self.bin_count {
            self.flow_bins
                .update(&index.to_ne_bytes(), &[0; 8], MapFlags::ANY)
                .map_err(|source| WireMeterError::Bpf { action: "empty a flow's bin", source })?;
        }
        let now = clock_gettime(ClockId::Monotonic);
        self.started_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        self.set_clock(self.started_ns)
    }

    /// When the first bin began, in nanoseconds of `CLOCK_MONOTONIC`; 0 before [`start`](Self::start).
    pub fn started_ns(&self) -> u64 {
        self.started_ns
    }

    /// The bytes of each flow so far, in the order of their ports; of each, one entry for each bin.
    pub fn flow_bins(&self) -> Result<Vec<Vec<u64>>, WireMeterError> {
        let read = |index: u32| {
            let value = self
                .flow_bins
                .lookup(&index.to_ne_bytes(), MapFlags::ANY)
                .map_err(|source| WireMeterError::Bpf { action: "read a flow's bin", source })?;
            let bytes = value.and_then(|value| value.try_into().ok());
            // Every index below the map's size has a value.
            Ok(bytes.map_or(0, u64::from_ne_bytes))
        };
        let of = |flow: u32| (0..self.bin_count).map(move |bin| flow * self.bin_count + bin);
        (0..u32::from(self.ports.count)).map(|flow| of(flow).map(read).collect()).collect()
    }

    /// The length of a bin.
    pub fn bin(&self) -> Duration {
        self.bin
    }

    /// What arrived so far, one entry for each bin from the start, the bins yet to come included.
    pub fn bins(&self) -> Result<Vec<WireBin>, WireMeterError> {
        (0..self.bin_count).map(|index| self.read(index)).collect()
    }

    /// What arrived after the last bin.
    pub fn late(&self) -> Result<WireBin, WireMeterError> {
        self.read(self.bin_count)
    }

    fn read(&self, index: u32) -> Result<WireBin, WireMeterError> {
        let value = self
            .bins
            .lookup(&index.to_ne_bytes(), MapFlags::ANY)
            .map_err(|source| WireMeterError::Bpf { action: "read a bin", source })?;
        let mut words = value.iter().flat_map(|value| value.chunks_exact(8)).map(|word| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            u64::from_ne_bytes(bytes)
        });
        // Every index below the map's size has a value.
        let (bytes, packets) = (words.next().unwrap_or(0), words.next().unwrap_or(0));
        Ok(WireBin { bytes, packets })
    }

    /// `struct wire_clock`.
    fn set_clock(&mut self, start_ns: u64) -> Result<(), WireMeterError> {
        let bin_ns = u64::try_from(self.bin.as_nanos()).unwrap_or(u64::MAX);
        let FlowPorts { first, count } = self.ports;
        let clock: Vec<u8> = [start_ns, bin_ns, self.bin_count.into(), first.into(), count.into()]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        self.clock
            .update(&0u32.to_ne_bytes(), &clock, MapFlags::ANY)
            .map_err(|source| WireMeterError::Bpf { action: "start the wire meter", source })
    }
}

impl Drop for WireMeter {
    fn drop(&mut self) {
        // Detaching goes by priority and handle; the descriptor is not looked at.
        let any = self.clock.as_fd();
        let _ = self.netns.run(|| ingress_hook(any, self.ifindex).detach());
        if self.owns_clsact {
            let mut in_use = |parent| {
                self.netlink.filters(self.ifindex, parent).is_ok_and(|filters| !filters.is_empty())
            };
            if !in_use(Handle::CLSACT_INGRESS) && !in_use(Handle::CLSACT_EGRESS) {
                let _ = self.netlink.delete_qdisc(self.ifindex, Handle::CLSACT);
            }
        }
    }
}

fn ingress_hook(program: BorrowedFd<'_>, ifindex: u32) -> TcHook {
    TcHookBuilder::new(program)
        .ifindex(ifindex as i32)
        .priority(PRIORITY)
        .handle(HANDLE)
        .hook(TC_INGRESS)
}

/// True if it was not there before.
fn add_clsact(netlink: &mut Netlink, ifindex: u32) -> Result<bool, NetError> {
    let place = Place { ifindex, parent: Handle::CLSACT, handle: Handle::new(0xffff, 0) };
    match netlink.set_qdisc(Verb::Add, place, &Clsact) {
        Ok(()) => Ok(true),
        Err(e) if e.is_exists() => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        net::{IpAddr, Shutdown, TcpListener, TcpStream, UdpSocket},
        thread,
    };

    use super::*;
    use crate::sock::tcp_info;
    use tidegate_sys::net::VethPair;

    const LONG: Duration = Duration::from_secs(60);

    struct Cable {
        left: NetNs,
        right: NetNs,
    }

    impl Cable {
        fn new(test: &str) -> Option<Self> {
            if !rustix::process::geteuid().is_root() {
                eprintln!("SKIP {test}: needs root");
                return None;
            }
            let name = |side| format!("tidegate-{}-{test}-{side}", std::process::id());
            let left = NetNs::create(&name("l")).unwrap();
            let right = NetNs::create(&name("r")).unwrap();
            let mut netlink = left.netlink().unwrap();
            let pair = VethPair { name: "eth0", peer: "eth0", peer_netns: Some(&right) };
            netlink.add_veth(&pair).unwrap();
            for (netns, last) in [(&left, 1), (&right, 2)] {
                let mut netlink = netns.netlink().unwrap();
                let index = netlink.index_of("eth0").unwrap();
                let addresses: [(IpAddr, u8); 2] = [
                    ([10, 98, 0, last].into(), 24),
                    ([0xfd98, 0, 0, 0, 0, 0, 0, last.into()].into(), 64),
                ];
                for (address, bits) in addresses {
                    netlink.add_address(index, address, bits).unwrap();
                }
                netlink.set_up(index, true).unwrap();
            }
            Some(Self { left, right })
        }

        fn meter(&self) -> WireMeter {
            let mut meter = WireMeter::attach(&self.right, "eth0", 3, LONG).unwrap();
            meter.start().unwrap();
            meter
        }
    }

    #[test]
    fn root_a_datagram_counts_its_frame() {
        let Some(cable) = Cable::new("root_a_datagram_counts_its_frame") else { return };
        let receiver = cable.right.run(|| UdpSocket::bind("10.98.0.2:9000").unwrap()).unwrap();
        let sender = cable.left.run(|| UdpSocket::bind("10.98.0.1:0").unwrap()).unwrap();
        receiver.set_read_timeout(Some(LONG)).unwrap();
        // The first brings ARP along.
        sender.send_to(&[0; 8], "10.98.0.2:9000").unwrap();
        receiver.recv(&mut [0; 8]).unwrap();
        let meter = cable.meter();
        sender.send_to(&[0; 1000], "10.98.0.2:9000").unwrap();
        receiver.recv(&mut [0; 1000]).unwrap();
        let bins = meter.bins().unwrap();
        // Background IPv6 chatter may add to it; a single frame of ours is in there.
        assert!(bins[0].packets >= 1 && bins[0].bytes >= 14 + 20 + 8 + 1000, "{bins:?}");
        assert!(bins[0].bytes < 14 + 20 + 8 + 1000 + 500, "{bins:?}");
        assert_eq!(meter.late().unwrap(), WireBin::default());
    }

    /// Segments that the stack never made are counted as a wire would carry them.
    #[test]
    fn root_segments_carry_their_headers() {
        const BYTES: usize = 50_000_000;
        let Some(cable) = Cable::new("root_segments_carry_their_headers") else { return };
        for (address, headers) in
            [("10.98.0.2:9000", 14 + 20 + 32), ("[fd98::2]:9000", 14 + 40 + 32)]
        {
            let listener = cable.right.run(|| TcpListener::bind(address).unwrap()).unwrap();
            let meter = cable.meter();
            let received = thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                std::io::copy(&mut stream, &mut std::io::sink()).unwrap()
            });
            let mut stream = cable.left.run(|| TcpStream::connect(address).unwrap()).unwrap();
            for _ in 0..BYTES / 100_000 {
                stream.write_all(&[0; 100_000]).unwrap();
            }
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(received.join().unwrap(), BYTES as u64);

            let bin = meter.bins().unwrap()[0];
            // Each segment brings its headers, and nothing else comes: but for the handshake's
            // options, a few frames of neighbour discovery, and what a full backlog made TCP resend.
            assert!(bin.packets >= (BYTES / (1514 - headers)) as u64, "{address}: {bin:?}");
            let expected = BYTES as u64 + bin.packets * headers as u64;
            let resent = u64::from(tcp_info(&stream).unwrap().retransmitted_segments) * 1448;
            // An ARP frame is shorter than the headers it is taken for.
            let range = expected - 500..expected + resent + 2000;
            assert!(range.contains(&bin.bytes), "{address}: {range:?} {bin:?}");
        }
    }

    #[test]
    fn root_bins_follow_the_clock_and_the_meter_leaves_no_trace() {
        let Some(cable) = Cable::new("root_bins_follow_the_clock_and_the_meter_leaves_no_trace")
        else {
            return;
        };
        let mut netlink = cable.right.netlink().unwrap();
        let index = netlink.index_of("eth0").unwrap();
        let before = netlink.qdisc_stats(index).unwrap().len();
        let bin = Duration::from_millis(100);
        let mut meter = WireMeter::attach(&cable.right, "eth0", 2, bin).unwrap();
        assert_eq!(netlink.qdisc_stats(index).unwrap().len(), before + 1);
        assert!(WireMeter::attach(&cable.right, "eth0", 2, bin).is_err(), "one meter a device");
        let sender = cable.left.run(|| UdpSocket::bind("10.98.0.1:0").unwrap()).unwrap();
        meter.start().unwrap();
        let started = std::time::Instant::now();
        // Past the last bin, everything is late.
        while meter.late().unwrap().packets < 5 {
            sender.send_to(&[0; 100], "10.98.0.2:9").unwrap();
            thread::sleep(Duration::from_millis(1));
            assert!(started.elapsed() < LONG);
        }
        // A busy machine may let a whole bin pass, but not both and the late ones too.
        assert!(meter.bins().unwrap().iter().any(|bin| bin.packets > 0));
        drop(meter);
        assert_eq!(netlink.qdisc_stats(index).unwrap().len(), before);
    }

    #[test]
    fn sizes_are_checked_first() {
        let here = NetNs::current().unwrap();
        for (bins, bin) in [(0, LONG), (BINS_MAX + 1, LONG), (1, Duration::ZERO)] {
            let error = WireMeter::attach(&here, "lo", bins, bin).unwrap_err();
            assert!(matches!(error, WireMeterError::Invalid { .. }), "{error}");
        }
    }
}
