//! Two ports joined by a cable inside this process: for tests, benchmarks, and network stacks in user
//! space.
//!
//! Each direction is a bounded ring. Packets go through as they are, in their own pool's buffers; nothing
//! is copied. The ends may be in different threads.

use std::{collections::VecDeque, os::fd::BorrowedFd};

use rtrb::{Consumer, Producer, PushError, RingBuffer};

use super::{Port, PortCounters, PortError};
use crate::{packet::Packet, pool::PacketPool};

/// One end of a pair. When the other end is dropped, what it had sent can still be received, then the port
/// is [`PortError::Gone`].
#[derive(Debug)]
pub struct MemoryPort {
    name: String,
    incoming: Consumer<Packet>,
    outgoing: Producer<Packet>,
    counters: PortCounters,
}

impl MemoryPort {
    /// Two ends, each direction of which holds up to `frames` frames.
    pub fn pair(name: &str, frames: usize) -> (Self, Self) {
        let (to_right, from_left) = RingBuffer::new(frames);
        let (to_left, from_right) = RingBuffer::new(frames);
        let end = |side, incoming, outgoing| Self {
            name: format!("{name}-{side}"),
            incoming,
            outgoing,
            counters: PortCounters::default(),
        };
        (end("left", from_right, to_right), end("right", from_left, to_left))
    }

    fn gone(&self) -> PortError {
        PortError::Gone { port: self.name.clone() }
    }
}

impl Port for MemoryPort {
    fn receive(
        &mut self,
        _pool: &mut PacketPool,
        frames: &mut Vec<Packet>,
        max: usize,
    ) -> Result<usize, PortError> {
        // Asked first: what the other end sent before it went is then visible.
        let abandoned = self.incoming.is_abandoned();
        let ready = self.incoming.slots().min(max);
        if ready == 0 && max > 0 && abandoned {
            return Err(self.gone());
        }
        let Ok(chunk) = self.incoming.read_chunk(ready) else { return Ok(0) };
        for packet in chunk {
            self.counters.received(&packet);
            frames.push(packet);
        }
        Ok(ready)
    }

    fn transmit(
        &mut self,
        frames: &mut VecDeque<Packet>,
        _pool: &mut PacketPool,
    ) -> Result<usize, PortError> {
        let mut sent = 0;
        while let Some(packet) = frames.pop_front() {
            if self.outgoing.is_abandoned() {
                frames.push_front(packet);
                return Err(self.gone());
            }
            let bytes = packet.wire_bytes();
            if let Err(PushError::Full(packet)) = self.outgoing.push(packet) {
                self.counters.tx_full += 1;
                frames.push_front(packet);
                break;
            }
            self.counters.sent(bytes);
            sent += 1;
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

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::pool::PoolSize;

    fn pool() -> PacketPool {
        PacketPool::new(PoolSize { small: 64, large: 0 }).unwrap()
    }

    #[test]
    fn frames_arrive_in_order_and_a_full_cable_keeps_the_rest_back() {
        let (mut left, mut right) = MemoryPort::pair("cable", 4);
        let mut pool = pool();
        let mut queue: VecDeque<_> = (0..6u8).map(|n| pool.packet(&[n; 60]).unwrap()).collect();
        assert_eq!(left.transmit(&mut queue, &mut pool).unwrap(), 4);
        assert_eq!((queue.len(), left.counters().tx_full), (2, 1));
        let mut frames = Vec::new();
        assert_eq!(right.receive(&mut pool, &mut frames, 3).unwrap(), 3);
        assert_eq!(left.transmit(&mut queue, &mut pool).unwrap(), 2);
        assert_eq!(right.receive(&mut pool, &mut frames, 100).unwrap(), 3);
        assert_eq!(right.receive(&mut pool, &mut frames, 100).unwrap(), 0);
        assert!(frames.iter().map(|f| f.frame()[0]).eq(0..6));
        assert_eq!((left.counters().tx_frames, left.counters().tx_wire_bytes), (6, 360));
        assert_eq!((right.counters().rx_frames, right.counters().rx_wire_bytes), (6, 360));
    }

    #[test]
    fn an_end_that_went_is_gone_after_its_last_frame() {
        let (mut left, mut right) = MemoryPort::pair("cable", 4);
        let mut pool = pool();
        let mut queue = VecDeque::from([pool.packet(b"last").unwrap()]);
        left.transmit(&mut queue, &mut pool).unwrap();
        drop(left);
        let mut frames = Vec::new();
        assert_eq!(right.receive(&mut pool, &mut frames, 8).unwrap(), 1);
        assert!(right.receive(&mut pool, &mut frames, 8).unwrap_err().is_gone());
        queue.extend(frames);
        assert!(right.transmit(&mut queue, &mut pool).unwrap_err().is_gone());
        assert_eq!(queue.len(), 1);
    }

    #[test]
    fn the_ends_live_in_two_threads() {
        const FRAMES: usize = 10_000;
        let (mut left, mut right) = MemoryPort::pair("cable", 16);
        thread::scope(|scope| {
            scope.spawn(move || {
                let (mut pool, mut queue, mut sent) = (pool(), VecDeque::new(), 0);
                while sent < FRAMES || !queue.is_empty() {
                    if sent < FRAMES
                        && queue.len() < 8
                        && let Some(packet) = pool.packet(&sent.to_ne_bytes())
                    {
                        queue.push_back(packet);
                        sent += 1;
                    }
                    if left.transmit(&mut queue, &mut pool).unwrap() == 0 {
                        thread::yield_now();
                    }
                }
            });
            let (mut pool, mut frames, mut next) = (pool(), Vec::new(), 0usize);
            while next < FRAMES {
                right.receive(&mut pool, &mut frames, 32).unwrap();
                for frame in frames.drain(..) {
                    assert_eq!(frame.frame(), next.to_ne_bytes());
                    next += 1;
                }
            }
        });
    }
}
