use super::*;
use crate::{
    queue_options::VirtualQueueOptions,
    units::{Bytes, MAX_RATE_BIT_S, MIN_RATE_BIT_S},
};
use proptest::prelude::*;
use std::vec::Vec;

const TCP: Transport = Transport::Tcp { in_flight: true };

fn config(rate: &str) -> VirtualQueueConfig {
    VirtualQueueOptions::new(rate.parse().unwrap()).config().unwrap()
}

fn queue_at(backlog: Nanos, direction: Direction) -> VirtualQueue {
    let finish = Nanos(NOW.0 + backlog.0);
    VirtualQueue::with_finish(config("1gbit"), direction, finish, 0)
}

fn packet(wire_bytes: u32, ecn_capable: bool, transport: Transport) -> Packet {
    Packet { wire_bytes, ecn_capable, transport }
}

const NOW: Nanos = Nanos(1_000_000_000);

#[test]
fn thresholds_are_times_with_a_floor_of_frames() {
    let fast = config("10gbit");
    assert_eq!(
        (fast.burst, fast.mark, fast.drop),
        (Nanos(1_000_000), Nanos(500_000), Nanos(4_000_000))
    );
    let slow = config("1mbit");
    let frame = 1514 * 8 * 1000;
    assert_eq!(
        (slow.burst, slow.mark, slow.drop),
        (Nanos(frame), Nanos(2 * frame), Nanos(4 * frame))
    );
    assert_eq!(slow.large_drop, Nanos(slow.drop.0 - slow.drop.0 / 8));
    let paced = VirtualQueueOptions::paced("1mbit".parse().unwrap()).config().unwrap();
    assert_eq!((paced.mark, paced.drop), (Nanos(16 * frame), Nanos(32 * frame)));
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let options = |rate: &str| VirtualQueueOptions::new(rate.parse().unwrap());
    let refusal = |o: VirtualQueueOptions| std::format!("{}", o.config().unwrap_err());
    assert_eq!(
        refusal(options("7kbit")),
        "7kbit is out of range; a limit is between 8kbit and 100gbit"
    );
    assert_eq!(
        refusal(options("1tbit")),
        "1tbit is out of range; a limit is between 8kbit and 100gbit"
    );
    let long = VirtualQueueOptions { burst: Some("1gb".parse().unwrap()), ..options("1mbit") };
    assert_eq!(refusal(long), "burst of 1gb is longer than 512s at 1mbit; make it shorter");
    let crossed = VirtualQueueOptions { mark: Some("5ms".parse().unwrap()), ..options("1gbit") };
    assert_eq!(refusal(crossed), "mark threshold 5ms must be below drop threshold 4ms");
}

#[test]
fn each_zone_has_its_verdict() {
    use Direction::{Egress, Ingress};
    use DropReason::{Early, Full, Reserve};
    let idle_tcp = Transport::Tcp { in_flight: false };
    let (below, high, reserve, full) =
        (Nanos(400_000), Nanos(3_400_000), Nanos(3_600_000), Nanos(4_000_001));
    let table = [
        ("below the mark all pass", below, Egress, packet(1514, true, TCP), 0, Verdict::Pass),
        ("ECT is marked", high, Egress, packet(1514, true, TCP), 0, Verdict::Mark),
        ("ECT is marked inward too", high, Ingress, packet(1514, true, TCP), 0, Verdict::Mark),
        ("a small ECT packet is marked", high, Egress, packet(66, true, TCP), 0, Verdict::Mark),
        ("a TCP sender is told", high, Egress, packet(1514, false, TCP), 0, Verdict::Slow),
        ("but not always", high, Egress, packet(1514, false, TCP), u32::MAX, Verdict::Pass),
        ("a remote one is not", high, Ingress, packet(1514, false, TCP), 0, Verdict::Pass),
        (
            "remote UDP loses",
            high,
            Ingress,
            packet(1514, false, Transport::Other),
            0,
            Verdict::Drop(Early),
        ),
        ("UDP loses", high, Egress, packet(1514, false, Transport::Other), 0, Verdict::Drop(Early)),
        ("small UDP does not", high, Egress, packet(90, false, Transport::Other), 0, Verdict::Pass),
        ("no room for large", reserve, Egress, packet(1514, true, TCP), 0, Verdict::Drop(Reserve)),
        ("room for small", reserve, Egress, packet(66, false, TCP), u32::MAX, Verdict::Slow),
        ("room for the idle", reserve, Egress, packet(1514, false, idle_tcp), 0, Verdict::Slow),
        ("no room at all", full, Egress, packet(66, true, idle_tcp), 0, Verdict::Drop(Full)),
    ];
    for (what, backlog, direction, packet, random, verdict) in table {
        let mut queue = queue_at(backlog, direction);
        let before = queue.finish();
        assert_eq!(queue.on_packet(NOW, &packet, random), verdict, "{what}");
        assert_eq!(
            queue.finish() > before,
            verdict.passes(),
            "{what}: charged if and only if passed"
        );
    }
}

#[test]
fn the_chance_of_a_signal_grows_linearly() {
    let config = config("1gbit");
    for percent in [0, 1, 25, 50, 75, 99, 100] {
        let range = config.large_drop.0 - config.mark.0;
        let backlog = (config.mark.0 + range * percent / 100) as i64;
        let hits = (0..1000u32).filter(|i| linear_law(&config, backlog, i * (u32::MAX / 1000)));
        let hits = hits.count() as i64;
        assert!((hits - 10 * percent as i64).abs() <= 10, "{hits} of 1000 at {percent} %");
    }
}

#[test]
fn a_segment_of_any_size_passes_an_idle_queue() {
    let mut queue = VirtualQueue::new(config("8kbit"), Direction::Egress);
    assert_eq!(queue.on_packet(NOW, &packet(65_536, false, TCP), 0), Verdict::Pass);
    assert!(queue.on_packet(NOW, &packet(65_536, false, TCP), 0) != Verdict::Pass);
}

#[test]
fn time_that_stands_still_or_steps_back_is_harmless() {
    let mut queue = VirtualQueue::new(config("100mbit"), Direction::Egress);
    let mut passed = 0;
    for step in 0..1000u64 {
        let now = Nanos(NOW.0 - step * 1000);
        let verdict = queue.on_packet(now, &packet(1514, true, TCP), 0);
        passed += u64::from(verdict.passes());
    }
    // burst and drop are 1 ms and 4 ms: 62 500 bytes, and one packet.
    assert!(passed <= 62_500 / 1514 + 1, "{passed} packets passed while no time did");
    assert_eq!(
        queue.on_packet(Nanos(NOW.0 + 1_000_000_000), &packet(1514, true, TCP), 0),
        Verdict::Pass
    );
}

#[test]
fn a_century_of_uptime_does_not_overflow() {
    let century = Nanos(100 * 365 * 86_400 * NANOS_PER_SEC);
    for rate in ["8kbit", "100gbit"] {
        let mut queue = VirtualQueue::new(config(rate), Direction::Egress);
        assert_eq!(queue.on_packet(century, &packet(u32::MAX, true, TCP), 0), Verdict::Pass);
        assert!(queue.backlog_ns(century) > -(queue.config.burst.0 as i64));
    }
}

#[test]
fn a_new_rate_keeps_the_backlog_in_bytes() {
    let mut queue = VirtualQueue::new(config("50kbit"), Direction::Egress);
    for _ in 0..3 {
        assert_eq!(queue.on_packet(NOW, &packet(1514, false, TCP), u32::MAX), Verdict::Pass);
    }
    // Three packets, less the one that was free: half a second, above any threshold at 10 Mbit/s.
    let slow_ns = queue.backlog_ns(NOW);
    assert!(slow_ns > 480_000_000, "{slow_ns}");
    queue.set_config(NOW, config("10mbit"));
    let ns = queue.backlog_ns(NOW);
    assert!((ns - slow_ns / 200).abs() < slow_ns / 10_000, "{ns}");
    assert_eq!(queue.on_packet(NOW, &packet(1514, false, TCP), u32::MAX), Verdict::Pass);
    queue.set_config(NOW, config("50kbit"));
    assert!(queue.backlog_ns(NOW) > slow_ns);

    // Credit is not part of its bytes.
    let idle = VirtualQueue::new(config("50kbit"), Direction::Egress);
    let mut fast = idle.clone();
    fast.set_config(NOW, config("10mbit"));
    assert_eq!(fast.finish(), idle.finish());
}

#[test]
fn a_slower_rate_drops_nothing_that_would_have_passed() {
    let (fast, slow) = (config("1gbit"), config("1mbit"));
    let scaled = |ns| rescaled(Nanos(ns), fast.cost, slow.cost, slow.drop).0;
    assert_eq!(scaled(3_000_000), slow.drop.0, "as much as may stand");
    assert_eq!(scaled(slow.drop.0 + 7), slow.drop.0 + 7, "never less than it was");
}

proptest! {
    /// For any input: back and forth a backlog is about what it was, unless a threshold cut it.
    #[test]
    fn a_backlog_changes_with_the_rate(
        backlog: u64, a in MIN_RATE_BIT_S..=MAX_RATE_BIT_S, factor in 1u64..1000, cost: u64, drop: u64,
    ) {
        let _ = rescaled(Nanos(backlog), cost, backlog, Nanos(drop));
        let backlog = Nanos(backlog % MAX_SPAN.0);
        let b = (a * factor).min(MAX_RATE_BIT_S);
        let cost = |bit_s| cost_of_byte(Rate::from_bit_s(bit_s).unwrap());
        let fast = rescaled(backlog, cost(a), cost(b), MAX_SPAN);
        prop_assert!(fast <= backlog);
        let back = rescaled(fast, cost(b), cost(a), MAX_SPAN);
        let error = (backlog.0 as f64 / 65_536.0 + 2.0) * (b as f64 / a as f64 + 1.0);
        let off = (back.0 as f64 - backlog.0 as f64).abs();
        prop_assert!(off <= 4.0 * error, "{backlog:?} {fast:?} {back:?}");
    }

    /// Over any number of packets the time charged is exact to 1e-6 and one nanosecond.
    #[test]
    fn the_rate_error_is_below_1e_6(
        bit_s in MIN_RATE_BIT_S..=MAX_RATE_BIT_S,
        sizes in prop::collection::vec(40u32..65_536, 1..2000),
    ) {
        let rate = Rate::from_bit_s(bit_s).unwrap();
        let config = VirtualQueueOptions::new(rate).config().unwrap();
        let mut queue = VirtualQueue::new(config, Direction::Egress);
        let mut bytes = 0u128;
        for size in &sizes {
            queue.charge(Nanos(0), *size);
            bytes += u128::from(*size);
        }
        let exact = (bytes * 8 * u128::from(NANOS_PER_SEC)) as f64 / bit_s as f64;
        let error = (queue.finish().0 as f64 - exact).abs();
        prop_assert!(error <= exact * 1e-6 + 1.0, "{} ns for {} ns", queue.finish().0, exact);
    }

    /// No arrival pattern gets more than rate x (t + burst + drop) and one packet through in any window.
    #[test]
    fn no_window_passes_more_than_its_bound(
        bit_s in 1_000_000u64..10_000_000_000,
        arrivals in prop::collection::vec(
            (0u64..3_000_000, 40u32..20_000, any::<u32>(), any::<bool>()),
            2..300,
        ),
    ) {
        let rate = Rate::from_bit_s(bit_s).unwrap();
        let config = VirtualQueueOptions::new(rate).config().unwrap();
        let mut queue = VirtualQueue::new(config, Direction::Egress);
        let mut now = NOW;
        let mut passed: Vec<(Nanos, u64)> = Vec::new();
        for (gap, size, random, ecn_capable) in arrivals {
            now = Nanos(now.0 + gap);
            let p = packet(size, ecn_capable, Transport::Other);
            if queue.on_packet(now, &p, random).passes() {
                passed.push((now, u64::from(size)));
            }
        }
        for (first, &(start, _)) in passed.iter().enumerate() {
            let mut bytes = 0;
            for &(end, size) in &passed[first..] {
                bytes += size;
                let span = Nanos(end.0 - start.0 + config.burst.0 + config.drop.0);
                let bound = rate.bytes_in(span).0 + size + 2;
                prop_assert!(bytes <= bound, "{bytes} bytes in a window that allows {bound}");
            }
        }
    }

    /// A backlogged queue with enough offered load passes the whole rate.
    #[test]
    fn the_whole_rate_is_used(bit_s in 1_000_000u64..10_000_000_000, size in 100u32..1514) {
        let rate = Rate::from_bit_s(bit_s).unwrap();
        let config = VirtualQueueOptions::new(rate).config().unwrap();
        let mut queue = VirtualQueue::new(config, Direction::Egress);
        let gap = rate.time_for(Bytes(u64::from(size))).0 / 2;
        let count = 4000u64;
        let bytes: u64 = (0..count)
            .filter(|i| {
                let p = packet(size, true, TCP);
                queue.on_packet(Nanos(NOW.0 + i * gap), &p, 0).passes()
            })
            .count() as u64 * u64::from(size);
        let offered_time = Nanos(count * gap);
        prop_assert!(bytes >= rate.bytes_in(offered_time).0 * 99 / 100);
    }
}
