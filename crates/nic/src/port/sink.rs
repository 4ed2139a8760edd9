//! A port that takes everything and counts it by flow: for measurements that no device may limit.

use std::{
    collections::VecDeque,
    fmt,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{Port, PortCounters, PortError};
use crate::{packet::Packet, pool::PacketPool};

/// What has arrived of each flow, as other threads see it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SinkReader(Arc<[AtomicU64]>);

impl SinkReader {
    /// Bytes on the wire that arrived of each flow.
    #[must_use]
    pub fn wire_bytes(&self) -> Vec<u64> {
        self.0.iter().map(|bytes| bytes.load(Ordering::Relaxed)).collect()
    }
}

/// A port that discards what it is given, at once. Never full, never gone; nothing arrives from it.
pub struct SinkPort {
    flow_of: Box<dyn FnMut(&Packet) -> usize + Send>,
    flows: Arc<[AtomicU64]>,
    counters: PortCounters,
}

impl SinkPort {
    /// A sink that tells `flows` flows apart, by what `flow_of` says of a packet; a packet of a flow beyond
    /// them counts for the port only.
    #[must_use]
    pub fn new(
        flows: usize,
        flow_of: impl FnMut(&Packet) -> usize + Send + 'static,
    ) -> (Self, SinkReader) {
        let flows: Arc<[AtomicU64]> = (0..flows).map(|_| AtomicU64::new(0)).collect();
        let reader = SinkReader(Arc::clone(&flows));
        (Self { flow_of: Box::new(flow_of), flows, counters: PortCounters::default() }, reader)
    }
}

impl Port for SinkPort {
    fn receive(
        &mut self,
        _pool: &mut PacketPool,
        _frames: &mut Vec<Packet>,
        _max: usize,
    ) -> Result<usize, PortError> {
        Ok(0)
    }

    fn transmit(
        &mut self,
        frames: &mut VecDeque<Packet>,
        pool: &mut PacketPool,
    ) -> Result<usize, PortError> {
        let sent = frames.len();
        for packet in frames.drain(..) {
            let bytes = packet.wire_bytes();
            self.counters.sent(bytes);
            if let Some(flow) = self.flows.get((self.flow_of)(&packet)) {
                // This port is the only writer.
                flow.store(flow.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
            }
            pool.recycle(packet);
        }
        Ok(sent)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn counters(&self) -> PortCounters {
        self.counters
    }
}

impl fmt::Debug for SinkPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SinkPort").field("counters", &self.counters).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::PoolSize;

    #[test]
    fn counts_each_flow() {
        let mut pool = PacketPool::new(PoolSize { small: 4, large: 0 }).unwrap();
        let (mut sink, reader) = SinkPort::new(2, |packet| packet.frame()[0].into());
        let mut frames: VecDeque<_> =
            [0, 1, 1, 9].into_iter().map(|flow| pool.packet(&[flow; 60]).unwrap()).collect();
        assert_eq!(sink.transmit(&mut frames, &mut pool).unwrap(), 4);
        assert_eq!(reader.wire_bytes(), [60, 120]);
        assert_eq!((sink.counters().tx_frames, pool.free().small), (4, 4));
    }
}
