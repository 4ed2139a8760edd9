//! What a packet costs before and after the shaper: its buffer, its flow, its size on the wire; and what it
//! costs to do a device's work in software.

use std::{collections::VecDeque, hint::black_box};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tidegate_nic::{Packet, PacketPool, PoolSize, VnetHeader, checksum, segment};

const SIZE: PoolSize = PoolSize { small: 4096, large: 64 };
/// A batch larger than the first cache holds.
const BATCH: usize = 2048;

/// TCP over IPv4.
fn frame(payload: usize) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0x10, 1, 0x20, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    frame.resize(frame.len() + payload, 7);
    frame
}

fn segment_of_64_kb(pool: &mut PacketPool) -> Option<Packet> {
    let mut packet = pool.packet(&frame(44 * 1460))?;
    let header =
        VnetHeader { flags: VnetHeader::NEEDS_CSUM, gso_type: 1, gso_size: 1460, ..*packet.vnet() };
    *packet.vnet_mut() = VnetHeader { csum_start: 34, csum_offset: 16, ..header };
    Some(packet)
}

fn buffers(c: &mut Criterion) {
    let Ok(mut pool) = PacketPool::new(SIZE) else { return };
    let mut group = c.benchmark_group("buffer");
    group.throughput(Throughput::Elements(BATCH as u64));
    let mut packets = Vec::with_capacity(BATCH);
    group.bench_function("take, recycle", |b| {
        b.iter(|| {
            packets.extend((0..BATCH).map_while(|_| pool.take(1500)));
            packets.drain(..).for_each(|packet| pool.recycle(packet));
        });
    });
    group.bench_function("take, drop", |b| {
        b.iter(|| {
            packets.extend((0..BATCH).map_while(|_| pool.take(1500)));
            packets.clear();
        });
    });
    group.finish();
}

fn reading(c: &mut Criterion) {
    let Ok(mut pool) = PacketPool::new(SIZE) else { return };
    let Some(plain) = pool.packet(&frame(1460)) else { return };
    let Some(segment) = segment_of_64_kb(&mut pool) else { return };
    c.bench_function("flow_hash", |b| b.iter(|| black_box(&plain).flow_hash(1)));
    c.bench_function("wire_bytes/frame", |b| b.iter(|| black_box(&plain).wire_bytes()));
    c.bench_function("wire_bytes/segment", |b| b.iter(|| black_box(&segment).wire_bytes()));
}

fn offloads(c: &mut Criterion) {
    let Ok(mut pool) = PacketPool::new(SIZE) else { return };
    let mut bytes = frame(1460);
    c.bench_function("checksum/1500", |b| {
        b.iter(|| checksum::complete(black_box(&mut bytes), 34, 16))
    });
    let Some(segment) = segment_of_64_kb(&mut pool) else { return };
    let mut segments = VecDeque::with_capacity(64);
    let mut group = c.benchmark_group("cut");
    group.throughput(Throughput::Elements(44));
    group.bench_function("64 KB", |b| {
        b.iter(|| {
            let _ = segment::cut(&segment, &mut pool, &mut segments);
            segments.drain(..).for_each(|packet| pool.recycle(packet));
        });
    });
    group.finish();
}

criterion_group!(benches, buffers, reading, offloads);
criterion_main!(benches);
