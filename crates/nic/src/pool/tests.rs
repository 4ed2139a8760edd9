use std::{collections::VecDeque, thread};

use proptest::prelude::*;

use super::*;
use crate::buffer::LARGE_BUFFER_BYTES;

fn pool(small: u32, large: u32) -> PacketPool {
    PacketPool::new(PoolSize { small, large }).unwrap()
}

#[test]
fn sizes_are_checked_first() {
    for (small, large) in [(0, 1), (POOL_BUFFERS_MAX + 1, 0), (1, POOL_BUFFERS_MAX + 1)] {
        let error = PacketPool::new(PoolSize { small, large }).err().unwrap();
        assert!(error.to_string().contains("use "), "{error}");
    }
}

#[test]
fn a_pool_ends_at_its_size() {
    let mut pool = pool(3, 1);
    let small: Vec<_> = (0..3).map(|_| pool.take(64).unwrap()).collect();
    assert!(pool.take(64).is_none());
    let large = pool.take(65_000).unwrap();
    assert!(pool.take(65_000).is_none());
    assert!(pool.take(LARGE_BUFFER_BYTES + 1).is_none());
    assert_eq!((pool.refused(), pool.free()), (3, PoolSize::default()));
    drop(small);
    pool.recycle(large);
    assert_eq!(pool.free(), pool.size());
    assert!(pool.take(LARGE_BUFFER_BYTES).is_some());
}

#[test]
fn packets_outlive_their_pool() {
    let mut pool = pool(2, 1);
    let mut packet = pool.packet(b"abroad").unwrap();
    let other = pool.packet(&[7; 5000]).unwrap();
    drop(pool);
    packet.frame_mut()[0] = b'A';
    assert_eq!(packet.frame(), b"Abroad");
    drop(packet);
    assert_eq!(other.frame(), [7; 5000]);
}

#[test]
fn a_packet_of_another_pool_goes_to_its_own() {
    let (mut ours, mut theirs) = (pool(1, 0), pool(1, 0));
    let packet = theirs.take(0).unwrap();
    ours.recycle(packet);
    assert_eq!((ours.free().small, theirs.free().small), (1, 1));
}

/// The owner takes, four threads drop; nothing is lost, and no buffer has two holders.
#[test]
fn buffers_come_home_from_other_threads() {
    const ROUNDS: u64 = 20_000;
    let mut pool = pool(64, 0);
    thread::scope(|scope| {
        let mut queues = Vec::new();
        for _ in 0..4 {
            let (to, mut from) = rtrb::RingBuffer::<(u64, Packet)>::new(8);
            queues.push(to);
            scope.spawn(move || {
                loop {
                    match from.pop() {
                        Ok((n, packet)) => assert_eq!(packet.frame(), n.to_ne_bytes()),
                        Err(_) if from.is_abandoned() && from.is_empty() => break,
                        Err(_) => thread::yield_now(),
                    }
                }
            });
        }
        for n in 0..ROUNDS {
            let mut packet = loop {
                match pool.packet(&n.to_ne_bytes()) {
                    Some(packet) => break packet,
                    None => thread::yield_now(),
                }
            };
            let queue = &mut queues[(n % 4) as usize];
            while let Err(rtrb::PushError::Full((_, back))) = queue.push((n, packet)) {
                packet = back;
                thread::yield_now();
            }
        }
    });
    assert_eq!(pool.free(), pool.size());
}

#[test]
fn the_last_packet_in_any_thread_ends_the_pool() {
    for _ in 0..200 {
        let mut pool = pool(8, 0);
        let packets: Vec<_> = (0..8).map(|_| pool.take(0).unwrap()).collect();
        thread::scope(|scope| {
            let mut packets = VecDeque::from(packets);
            for _ in 0..2 {
                let half: Vec<_> = packets.drain(..4).collect();
                scope.spawn(move || drop(half));
            }
            drop(pool);
        });
    }
}

proptest! {
    /// Whatever is taken and given back, each buffer has one holder and none is lost.
    #[test]
    fn each_buffer_has_one_holder(steps in prop::collection::vec((0u8..4, 0usize..70_000), 0..200)) {
        let mut pool = pool(5, 3);
        let mut held = VecDeque::new();
        for (step, bytes) in steps {
            match step {
                0 | 1 => held.extend(pool.take(bytes)),
                2 => drop(held.pop_front()),
                _ => held.pop_back().into_iter().for_each(|packet| pool.recycle(packet)),
            }
            let mut buffers: Vec<_> = held.iter().map(|p| p.head().data).collect();
            buffers.sort();
            buffers.dedup();
            prop_assert_eq!(buffers.len(), held.len());
            let free = pool.free();
            prop_assert_eq!((free.small + free.large) as usize + held.len(), 8);
        }
    }
}
