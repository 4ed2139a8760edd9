//! The same flows through the kernel's limiters: UDP from one host of a testbed to another, a class for each
//! flow, each sender held back by its socket's buffer alone. What leaves is read from the classes, what
//! arrives from a meter at the receiving device.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use rustix::{
    event::{Timespec, epoll},
    io::Errno,
    net::sockopt::set_socket_send_buffer_size_force,
};
use tidegate_core::Rate;
use tidegate_instruments::{sock::set_priority, wire_meter::WireMeter};
use tidegate_sys::{net::qdisc::Handle, sched::make_realtime};

use super::BIN;
use crate::testbed::{Family, Testbed, TestbedOptions, Topology, peers::Peer, wait};

/// Every segment fits a packet.
const MTU_BYTES: u32 = 65_535;
/// Ethernet, IPv4 and UDP.
const HEADER_BYTES: usize = 14 + 20 + 8;
const PORT: u16 = 7003;
/// A sender has so many of its packets in the kernel, what the kernel keeps besides them counted.
const BUFFER_PACKETS: usize = 6;
const BUFFER_BYTES_LEAST: usize = 32 << 10;
/// From a flow's socket before the next one has its turn.
const TURN_PACKETS: usize = 16;
const WARM_UP: Duration = Duration::from_millis(500);
const READY_MAX: usize = 256;
/// How often a sender that waits looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);

/// A limiter of the kernel, with a class for each flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limiter {
    /// None.
    Unlimited,
    /// A class of HTB for each flow.
    Htb,
    /// A TBF for each flow.
    Tbf,
}

/// What was measured.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Of each bin: all that arrived.
    pub(super) totals_bit_s: Vec<f64>,
    /// Of each window between two readings: its length, and the bytes that each class sent in it.
    pub(super) windows: Vec<(Duration, Vec<u64>)>,
    /// Packets that the limiter dropped.
    pub(super) dropped: u64,
}

impl Outcome {
    /// The rate of all that arrived.
    pub(super) fn bit_s(&self) -> f64 {
        self.totals_bit_s.iter().sum::<f64>() / self.totals_bit_s.len().max(1) as f64
    }

    /// The bytes of each flow over all windows, and their time.
    pub(super) fn whole(&self) -> Option<(Duration, Vec<u64>)> {
        let (_, first) = self.windows.first()?;
        let mut sum = (Duration::ZERO, vec![0; first.len()]);
        for (time, bytes) in &self.windows {
            sum.0 += *time;
            sum.1.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += bytes);
        }
        Some(sum)
    }
}

/// Flows of these rates, in packets of these lengths, through a limiter. Windows of flows are `window` long.
pub(super) struct Traffic<'a> {
    pub(super) rates: &'a [Rate],
    pub(super) frames_bytes: &'a [usize],
    pub(super) time: Duration,
    pub(super) window: Duration,
}

impl Traffic<'_> {
    /// Sends it, on a testbed of its own.
    pub(super) fn through(&self, limiter: Limiter) -> anyhow::Result<Outcome> {
        let options =
            TestbedOptions { mtu_bytes: Some(MTU_BYTES), ..TestbedOptions::new(Topology::Pair) };
        let testbed = Testbed::new(options)?;
        let mut peer = match limiter {
            Limiter::Unlimited => None,
            Limiter::Htb => Some(Peer::htb_each(&testbed, self.rates)?),
            Limiter::Tbf => Some(Peer::tbf_each(&testbed, self.rates)?),
        };
        let bins = (self.time.as_nanos() / BIN.as_nanos()) as u32;
        let mut meter = WireMeter::attach(testbed.receiver(0), testbed.receiver_dev(0), bins, BIN)?;
        let to = SocketAddr::new(testbed.addr(0, Family::V4), PORT);
        // It takes what it can hold and drops the rest, which costs less than to read it.
        let _receiver = testbed.receiver(0).run(|| UdpSocket::bind(to))??;
        let sockets = testbed.sender().run(|| self.sockets(to))??;
        let ends = AtomicBool::new(false);
        thread::scope(|scope| {
            let sending = scope.spawn(|| self.send(&sockets, &ends));
            let measured = self.measure(&mut meter, peer.as_mut());
            ends.store(true, Ordering::Relaxed);
            sending.join().map_err(|_| anyhow!("the sender panicked"))??;
            measured
        })
    }

    /// A socket for each flow, its packets marked for the flow's class.
    fn sockets(&self, to: SocketAddr) -> anyhow::Result<Vec<UdpSocket>> {
        let any: SocketAddr = ([0; 4], 0).into();
        let socket = |(flow, frame): (usize, &usize)| -> anyhow::Result<UdpSocket> {
            let socket = UdpSocket::bind(any)?;
            socket.connect(to)?;
            socket.set_nonblocking(true)?;
            let buffer_bytes = (frame * BUFFER_PACKETS).max(BUFFER_BYTES_LEAST);
            set_socket_send_buffer_size_force(&socket, buffer_bytes)?;
            let Handle { major, minor } = Peer::class_of(flow);
            set_priority(&socket, u32::from(major) << 16 | u32::from(minor))?;
            Ok(socket)
        };
        self.frames_bytes.iter().enumerate().map(socket).collect()
    }

    /// Sends as much as the sockets take, until it is to end.
    fn send(&self, sockets: &[UdpSocket], ends: &AtomicBool) -> anyhow::Result<()> {
        let _ = make_realtime();
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (flow, socket) in sockets.iter().enumerate() {
            let data = epoll::EventData::new_u64(flow as u64);
            epoll::add(&ready, socket, data, epoll::EventFlags::OUT)?;
        }
        let payload = vec![0; usize::from(u16::MAX)];
        let mut events = Vec::with_capacity(READY_MAX);
        let look = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as _ };
        while !ends.load(Ordering::Relaxed) {
            events.clear();
            match epoll::wait(&ready, rustix::buffer::spare_capacity(&mut events), Some(&look)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for the sockets"),
            }
            for event in &events {
                let flow = event.data.u64() as usize;
                let bytes = self.frames_bytes[flow] - HEADER_BYTES;
                // The buffer is full, or the limiter's queue is: both are told by the next event.
                let sent = |_: &usize| sockets[flow].send(&payload[..bytes]).is_ok();
                let _ = (0..TURN_PACKETS).take_while(sent).count();
            }
        }
        Ok(())
    }

    fn measure(
        &self,
        meter: &mut WireMeter,
        mut peer: Option<&mut Peer>,
    ) -> anyhow::Result<Outcome> {
        wait::pass_time(WARM_UP)?;
        let mut outcome = Outcome::default();
        meter.start()?;
        let begun = Instant::now();
        let mut last = self.read(peer.as_deref_mut())?;
        let dropped = last.2;
        while begun.elapsed() < self.time {
            let wanted = self.window.min(self.time.saturating_sub(begun.elapsed()));
            wait::pass_time(wanted)?;
            let next = self.read(peer.as_deref_mut())?;
            let bytes = next.1.iter().zip(&last.1).map(|(now, then)| now - then).collect();
            if next.0 - last.0 >= self.window / 2 && !next.1.is_empty() {
                outcome.windows.push((next.0 - last.0, bytes));
                last = next;
            }
        }
        outcome.dropped = last.2 - dropped;
        let rate = |bytes: u64| bytes as f64 * 8.0 / BIN.as_secs_f64();
        outcome.totals_bit_s = meter.bins()?.iter().map(|bin| rate(bin.bytes)).collect();
        Ok(outcome)
    }

    /// What each class has sent, when, and what was dropped.
    fn read(&self, peer: Option<&mut Peer>) -> anyhow::Result<(Instant, Vec<u64>, u64)> {
        let Some(peer) = peer else { return Ok((Instant::now(), Vec::new(), 0)) };
        let mut bytes = vec![0; self.rates.len()];
        let mut dropped = 0;
        let before = Instant::now();
        let stats = peer.class_stats()?;
        // The classes were read some time between.
        let at = before + before.elapsed() / 2;
        let first = Peer::class_of(0);
        // TBF calls its inside a class, too.
        for class in stats.iter().filter(|class| class.handle.major == first.major) {
            let flow = class.handle.minor.checked_sub(first.minor).map(usize::from);
            if let Some(place) = flow.and_then(|flow| bytes.get_mut(flow)) {
                *place = class.sent_bytes;
                dropped += u64::from(class.drops);
            }
        }
        Ok((at, bytes, dropped))
    }
}
