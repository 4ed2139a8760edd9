//! Nanoseconds a packet of the virtual queue's model, idle and backlogged.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use tidegate_core::queue_options::VirtualQueueOptions;
use tidegate_core::virtual_queue::Transport;
use tidegate_core::{Direction, Nanos, Packet, VirtualQueue};

fn on_packet(c: &mut Criterion) {
    let rate = "1gbit".parse().expect("a rate");
    let config = VirtualQueueOptions::new(rate).config().expect("a legal limit");
    let packet = Packet {
        wire_bytes: 1514,
        ecn_capable: false,
        transport: Transport::Tcp { in_flight: true },
    };
    // A 1514-byte frame takes 12 112 ns at 1 Gbit/s.
    for (name, gap_ns) in [("idle", 20_000), ("at the rate", 12_112), ("twice the rate", 6_056)] {
        let mut queue = VirtualQueue::new(config, Direction::Egress);
        let (mut now, mut random) = (Nanos(0), 1u32);
        c.bench_function(&format!("virtual_queue/{name}"), |b| {
            b.iter(|| {
                now = Nanos(now.0 + gap_ns);
                random = random.wrapping_mul(0x9E37_79B1).wrapping_add(1);
                black_box(queue.on_packet(now, black_box(&packet), random))
            });
        });
    }
}

criterion_group!(benches, on_packet);
criterion_main!(benches);
