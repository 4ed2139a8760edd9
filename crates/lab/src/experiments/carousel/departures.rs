//! When packets left, by flow and by bin: a port that counts what another port takes.

use std::{
    collections::VecDeque,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tidegate_core::Nanos;
use tidegate_nic::{
    Packet, PacketPool, Port,
    port::{PortCounters, PortError, sink::SinkPort},
    waiter::now,
};

use super::BIN;

/// Where in a frame its flow's number is: behind the headers of Ethernet, IPv4 and UDP.
pub(super) const NUMBER_AT: usize = 42;
/// Counters of flows at most, of all bins: 64 MB.
const CELLS_MAX: usize = 1 << 23;

/// Bytes on the wire, by bins since a start. Filled by a [`CountingPort`].
#[derive(Debug)]
pub(super) struct Departures {
    /// In nanoseconds of the NIC's clock; the largest number: not yet.
    start_ns: AtomicU64,
    flows: usize,
    flow_bin: Duration,
    /// All flows of the first bin, of the second, ...
    of_flows: Box<[AtomicU64]>,
    totals: Box<[AtomicU64]>,
}

impl Departures {
    /// For `flows` flows over `time`: totals in bins of [`BIN`], flows in bins of `flow_bin`.
    pub(super) fn new(flows: usize, time: Duration, flow_bin: Duration) -> Arc<Departures> {
        let bins = |bin: Duration| (time.as_nanos() / bin.as_nanos()) as usize;
        let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Departures {
            start_ns: AtomicU64::new(u64::MAX),
            flows,
            flow_bin,
            of_flows: zeros((bins(flow_bin) * flows).min(CELLS_MAX)),
            totals: zeros(bins(BIN)),
        })
    }

    /// The first bins begin.
    pub(super) fn start(&self, at: Nanos) {
        self.start_ns.store(at.0, Ordering::Release);
    }

    /// The rate of all flows in each whole bin of [`BIN`].
    pub(super) fn totals_bit_s(&self) -> Vec<f64> {
        let rate = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed) as f64 * 8.0;
        self.totals.iter().map(|bytes| rate(bytes) / BIN.as_secs_f64()).collect()
    }

    /// The bytes of each flow in windows of `window`, which is some bins: of all flows in the first, ...
    pub(super) fn flows_bytes(&self, window: Duration) -> Vec<Vec<u64>> {
        let bins = (window.as_nanos() / self.flow_bin.as_nanos()).max(1) as usize;
        let bytes = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        self.of_flows
            .chunks_exact(bins * self.flows)
            .map(|window| {
                let of = |flow| window.iter().skip(flow).step_by(self.flows).map(bytes).sum();
                (0..self.flows).map(of).collect()
            })
            .collect()
    }

    /// By the one thread that sends.
    fn count(&self, at: Nanos, frames: impl Iterator<Item = (u32, u64)>) {
        let start_ns = self.start_ns.load(Ordering::Acquire);
        let Some(since_ns) = at.0.checked_sub(start_ns) else { return };
        let bin = |length: Duration| (since_ns / length.as_nanos() as u64) as usize;
        let (total_bin, flow_bin) = (bin(BIN), bin(self.flow_bin));
        let add = |cell: Option<&AtomicU64>, bytes| {
            if let Some(cell) = cell {
                cell.store(cell.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
            }
        };
        let mut total = 0;
        for (flow, bytes) in frames {
            total += bytes;
            if (flow as usize) < self.flows {
                add(self.of_flows.get(flow_bin * self.flows + flow as usize), bytes);
            }
        }
        add(self.totals.get(total_bin), total);
    }
}

/// Counts what leaves through another port.
pub(super) struct CountingPort {
    inner: Box<dyn Port>,
    departures: Arc<Departures>,
    /// Flow and bytes of the batch in hand.
    batch: Vec<(u32, u64)>,
}

impl CountingPort {
    pub(super) fn new(inner: Box<dyn Port>, departures: Arc<Departures>) -> CountingPort {
        CountingPort { inner, departures, batch: Vec::new() }
    }

    /// In front of a port that discards.
    pub(super) fn sink(departures: Arc<Departures>) -> CountingPort {
        let (sink, _) = SinkPort::new(0, |_| usize::MAX);
        CountingPort::new(Box::new(sink), departures)
    }
}

impl Port for CountingPort {
    fn receive(
        &mut self,
        pool: &mut PacketPool,
        frames: &mut Vec<Packet>,
        max: usize,
    ) -> Result<usize, PortError> {
        self.inner.receive(pool, frames, max)
    }

    fn transmit(
        &mut self,
        frames: &mut VecDeque<Packet>,
        pool: &mut PacketPool,
    ) -> Result<usize, PortError> {
        let at = now();
        self.batch.clear();
        self.batch.extend(frames.iter().map(|packet| {
            let number = packet.frame().get(NUMBER_AT..).and_then(|rest| rest.first_chunk());
            (number.map_or(u32::MAX, |bytes| u32::from_ne_bytes(*bytes)), packet.wire_bytes())
        }));
        let waiting = frames.len();
        let result = self.inner.transmit(frames, pool);
        self.departures.count(at, self.batch.drain(..).take(waiting - frames.len()));
        result
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.as_fd()
    }

    fn counters(&self) -> PortCounters {
        self.inner.counters()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_cut_at_the_start_and_at_the_end() {
        let departures = Departures::new(2, Duration::from_millis(400), Duration::from_millis(200));
        let ms = |ms: u64| Nanos(1_000_000_000 + ms * 1_000_000);
        departures.count(ms(0), [(0, 7)].into_iter());
        departures.start(ms(0));
        for (at, flow, bytes) in [(0, 0, 100), (99, 1, 50), (100, 1, 30), (399, 0, 20), (400, 0, 9)]
        {
            departures.count(ms(at), [(flow, bytes)].into_iter());
        }
        assert_eq!(departures.totals_bit_s(), [12_000.0, 2_400.0, 0.0, 1_600.0]);
        let windows = departures.flows_bytes(Duration::from_millis(200));
        assert_eq!(windows, [[100, 80], [20, 0]]);
        assert_eq!(departures.flows_bytes(Duration::from_millis(400)), [[120, 80]]);
    }
}
