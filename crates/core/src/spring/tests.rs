//! The bounds of a window, whatever is measured.

use super::*;
use proptest::prelude::*;

const GBIT: Config = Config { byte_s: 125_000_000, target: Nanos(60_000) };
const MSS: u16 = 1460;

fn ack(ack: u32, raw: u16, scale: u8) -> Ack {
    Ack { ack, raw, scale, bare: true }
}

#[test]
fn the_target_is_frames_or_a_time() {
    assert_eq!(Config::new(62_500_000, 1514).target, Nanos(96_896));
    assert_eq!(Config::new(1_250_000_000, 1514).target, TARGET);
}

#[test]
fn a_window_is_the_path_and_the_target() {
    // 1 ms and 60 us at 1 Gbit/s are 87.5 frames.
    assert_eq!(window(&GBIT, ONE, Nanos(1_000_000), MSS, 0), 87 * 1460);
    assert_eq!(window(&GBIT, ONE, Nanos(1_000_000), MSS, u16::MAX), 88 * 1460);
    assert_eq!(window(&GBIT, ONE / 1000, Nanos(1_000_000), MSS, 0), 2920);
    // What hosts stall: 1 ms.
    assert_eq!(window(&GBIT, MOST, Nanos(0), MSS, 0), 87 * 1460);
    let most = Config { byte_s: u64::MAX, ..GBIT };
    assert!(u64::from(window(&most, u64::MAX, Nanos(u64::MAX), MSS, 0)) <= MAX_BYTES);
}

#[test]
fn rounding_is_even() {
    let frames: u32 = (0..1000)
        .map(|epoch| window(&GBIT, ONE / 16, Nanos(1_000_000), MSS, phase(77, epoch)) / 1460)
        .sum();
    // 8281 bytes are 5.47 frames.
    assert!(frames.abs_diff(5450) < 40, "{frames}");
}

#[test]
fn an_edge_is_never_taken_back() {
    let mut edge = Edge::default();
    assert_eq!(edge.say(&ack(1000, 65_535, 7), 64_000), 500);
    // The law gives less: the edge stays until data has been acknowledged.
    assert_eq!(edge.say(&ack(2024, 65_535, 7), 6400), 492);
    assert_eq!(edge.edge, 65_000);
    assert_eq!(edge.say(&ack(65_000, 65_535, 7), 6400), 50);
    // The receiver offers less: that passes.
    assert_eq!(edge.say(&ack(65_000, 3, 7), 6400), 3);
    assert_eq!(edge.say(&ack(65_000, 0, 7), 6400), 0);
    // The window opens again.
    assert_eq!(edge.say(&ack(65_000, 65_535, 7), 6400), 50);
}

#[test]
fn a_duplicate_stays_one() {
    let mut edge = Edge::default();
    let first = edge.say(&ack(1000, 500, 7), 6400);
    assert_eq!(edge.say(&ack(1000, 500, 7), 64_000), first);
    // With another window it is an update.
    assert_eq!(edge.say(&ack(1000, 501, 7), 64_000), 500);
}

#[test]
fn who_goes_beyond_is_known() {
    let mut edge = Edge::default();
    assert!(!edge.is_beyond(1 << 29, MSS), "nothing was said");
    edge.say(&ack(u32::MAX - 99, 1000, 0), 10_000);
    assert_eq!(edge.edge, 900);
    assert!(!edge.is_beyond(900, MSS) && !edge.is_beyond(901, MSS) && !edge.is_beyond(3820, MSS));
    assert!(edge.is_beyond(3821, MSS));
    assert!(!edge.is_beyond(900 + (1 << 30), MSS), "of another connection");
    assert!(!edge.is_beyond(u32::MAX - 99, MSS));
}

#[test]
fn the_queue_is_not_part_of_the_path() {
    let mut rtt = RoundTrip::default();
    rtt.on_data(100, Nanos(1_000_000), Nanos(200_000), 1000);
    rtt.on_data(200, Nanos(1_000_001), Nanos(0), 1000);
    assert!(!rtt.on_ack(99, Nanos(1_100_000), 1000));
    assert!(rtt.on_ack(200, Nanos(1_300_000), 1000));
    assert_eq!(rtt.least, Nanos(100_000));
    // An ACK that was delayed does not count.
    rtt.on_data(300, Nanos(2_000_000), Nanos(0), 1000);
    assert!(rtt.on_ack(300, Nanos(42_000_000), 1000));
    assert_eq!(rtt.least, Nanos(100_000));
    // A path that has become longer does, in a second.
    for second in 1..4 {
        let at = second * NANOS_PER_SEC;
        rtt.on_data(400, Nanos(at), Nanos(0), 1000);
        assert!(rtt.on_ack(400, Nanos(at + 5_000_000), 1000));
    }
    assert_eq!(rtt.least, Nanos(5_000_000));
    // A sample at another rate is dropped; a slightly different rate is the same, and what did not wait
    // counts.
    for (wait, cost, counts) in [(1_000, 1200, false), (1_000, 1100, true), (0, 9, true)] {
        rtt.on_data(500, Nanos(10 * NANOS_PER_SEC), Nanos(wait), 1000);
        assert_eq!(rtt.on_ack(500, Nanos(10 * NANOS_PER_SEC + 100_000), cost), counts, "{cost}");
    }
}

#[test]
fn who_wants_less_leaves_it_to_others() {
    let epoch = Epoch {
        elapsed: Nanos(2_000_000),
        left_bytes: 125_000,
        backlog: Nanos(0),
        rtt: Nanos(100_000),
        flows: 10,
    };
    let mut share = ONE / 10;
    for _ in 0..20 {
        share = next_share(share, &GBIT, &epoch);
    }
    assert_eq!(share, MOST);
    // And a standing queue takes it back, to the floor.
    let epoch = Epoch { left_bytes: 250_000, backlog: Nanos(300_000), ..epoch };
    for _ in 0..20 {
        share = next_share(share, &GBIT, &epoch);
    }
    assert_eq!(share, ONE * 3 / 40);
}

proptest! {
    /// No ACK says more than it did, nor less than the law and the edge allow; the edge only moves on.
    #[test]
    fn the_edge_keeps_its_bounds(
        start: u32,
        steps in prop::collection::vec(
            (-3000i32..3000, any::<u16>(), any::<u32>(), any::<bool>()), 1..100),
        scale in 0u8..20,
    ) {
        let mut edge = Edge::default();
        let mut number = start;
        for (by, raw, window, bare) in steps {
            number = number.wrapping_add_signed(by);
            let before = edge;
            let window = window % MAX_BYTES as u32;
            let said = edge.say(&Ack { ack: number, raw, scale, bare }, window);
            prop_assert!(said <= raw);
            if before.known {
                prop_assert!(edge.edge.wrapping_sub(before.edge) as i32 >= 0);
                let scale = scale.min(MAX_SCALE);
                let least = (raw as u32) << scale;
                let now = number.wrapping_add((said as u32) << scale);
                // Nothing that had been allowed is taken back unless the receiver does.
                let kept = now.wrapping_sub(before.edge) as i32 >= 0;
                let repeated = before.ack == number && before.raw == raw && bare;
                prop_assert!(kept || repeated || ((said as u32) << scale) == least);
            }
        }
    }

    /// Shares stay in range.
    #[test]
    fn a_share_keeps_its_bounds(
        share: u64, byte_s: u64, target: u64, elapsed: u64, left_bytes: u64, backlog: u64, rtt: u64,
        flows: u32,
    ) {
        let config = Config { byte_s, target: Nanos(target) };
        let epoch = Epoch {
            elapsed: Nanos(elapsed), left_bytes, backlog: Nanos(backlog), rtt: Nanos(rtt), flows,
        };
        let next = next_share(share, &config, &epoch);
        prop_assert!(next <= MOST && next >= ONE * 3 / 4 / u64::from(flows.clamp(1, MAX_FLOWS)));
        prop_assert!(join(share, flows) <= ONE);
        prop_assert!(epoch_length(&config, Nanos(rtt), flows, MSS) <= MAX_EPOCH);
        prop_assert!(window(&config, share, Nanos(rtt), MSS, rtt as u16) >= 2920);
    }
}
