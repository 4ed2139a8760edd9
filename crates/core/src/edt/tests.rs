use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::{queue_options::VirtualQueueOptions, scheme::QueueKind};

const MS: u64 = 1_000_000;
const START: Nanos = Nanos(1_000_000_000);
const PING: Packet = Packet { wire_bytes: 98, ecn_capable: false, held: false };

fn config(rate: &str) -> VirtualQueueConfig {
    let options = VirtualQueueOptions::new(rate.parse().unwrap());
    VirtualQueueOptions { kind: QueueKind::Departures, ..options }.config().unwrap()
}

fn datagram(wire_bytes: u32) -> Packet {
    Packet { wire_bytes, ecn_capable: false, held: false }
}

/// Flows that always have a packet to send and have at most `window` packets that have not left; returns the
/// bytes that left by flow, in [from, to).
struct Greedy {
    wire_bytes: u32,
    window: usize,
    held: bool,
    pending: Vec<Vec<Nanos>>,
    sent: Vec<(Nanos, usize, u32)>,
}

impl Greedy {
    fn new(flows: usize, wire_bytes: u32, window: usize, held: bool) -> Greedy {
        let pending = std::vec![Vec::new(); flows];
        Greedy { wire_bytes, window, held, pending, sent: Vec::new() }
    }

    /// Lets the flows send whatever they can at `now`.
    fn tick(&mut self, limiter: &mut Limiter, now: Nanos) {
        for (flow, pending) in self.pending.iter_mut().enumerate() {
            pending.retain(|at| *at > now);
            while pending.len() < self.window {
                let packet = Packet { held: self.held, ..datagram(self.wire_bytes) };
                let departure = limiter.on_packet(now, 100 + flow, &packet);
                if matches!(departure.verdict, Verdict::Drop(_)) {
                    break;
                }
                let at = departure.at.max(now);
                pending.push(at);
                self.sent.push((at, flow, self.wire_bytes));
            }
        }
    }

    fn bytes(&self, flow: Option<usize>, from: Nanos, to: Nanos) -> f64 {
        let within = self
            .sent
            .iter()
            .filter(|(at, f, _)| flow.is_none_or(|g| g == *f) && *at >= from && *at < to);
        within.map(|(_, _, bytes)| f64::from(*bytes)).sum()
    }
}

fn run(limiter: &mut Limiter, greedy: &mut Greedy, from: Nanos, to: Nanos) {
    for at in (from.0..to.0).step_by(100_000) {
        greedy.tick(limiter, Nanos(at));
    }
}

#[test]
fn greedy_flows_fill_the_limit_in_equal_parts() {
    for (flows, bytes, window) in [(1, 1514, 200), (4, 1514, 50), (4, 66_000, 2), (20, 66_000, 2)] {
        let mut limiter = Limiter::new(config("100mbit"), FLOWS);
        let mut greedy = Greedy::new(flows, bytes, window, bytes > 60_000);
        let end = Nanos(START.0 + 4000 * MS);
        run(&mut limiter, &mut greedy, START, end);
        let from = Nanos(START.0 + 2000 * MS);
        let whole = greedy.bytes(None, from, end) * 8.0 / 2.0 / 100e6;
        // Each flow may have one packet on either side of the border.
        let border = (flows as f64 * f64::from(bytes) * 8.0) / 2.0 / 100e6;
        assert!((0.95..1.0 + border).contains(&whole), "{flows} flows of {bytes}: {whole}");
        for flow in 0..flows {
            let part = greedy.bytes(Some(flow), from, end) * 8.0 / 2.0 / 100e6 * flows as f64;
            assert!((0.8..1.2).contains(&part), "{flows} flows of {bytes}, {flow}: {part}");
        }
    }
}

/// The effect of a schedule for each flow: 50 Mbit/s, four flows with two segments of 64 KB each.
#[test]
fn a_newcomer_is_not_delayed_by_what_others_have_queued() {
    let mut limiter = Limiter::new(config("50mbit"), FLOWS);
    let mut greedy = Greedy::new(4, 66_000, 2, true);
    let (mut worst, mut fifo_worst) = (0, 0);
    for (tick, at) in (START.0..START.0 + 2000 * MS).step_by(MS as usize).enumerate() {
        greedy.tick(&mut limiter, Nanos(at));
        if tick > 200 && tick % 10 == 0 {
            let ping = limiter.on_packet(Nanos(at), 7, &PING);
            worst = worst.max(ping.at.0.saturating_sub(at));
            let queued = greedy.pending.iter().flatten().max().map_or(0, |last| last.0 - at);
            fifo_worst = fifo_worst.max(queued);
        }
    }
    assert!(worst < MS, "{worst}");
    assert!(fifo_worst > 40 * MS, "a FIFO would have delayed it by this: {fifo_worst}");
}

#[test]
fn what_a_small_flow_leaves_the_others_take() {
    let mut limiter = Limiter::new(config("100mbit"), FLOWS);
    let mut greedy = Greedy::new(1, 1514, 80, false);
    let mut small = 0.0;
    let end = START.0 + 3000 * MS;
    for (tick, at) in (START.0..end).step_by(100_000).enumerate() {
        greedy.tick(&mut limiter, Nanos(at));
        // 1250 bytes a millisecond are a tenth of the limit.
        if tick % 10 == 0 {
            let departure = limiter.on_packet(Nanos(at), 7, &datagram(1250));
            assert!(departure.verdict.passes());
            small += 1250.0 * f64::from(u8::from(at > START.0 + 1000 * MS));
        }
    }
    let whole = (greedy.bytes(None, Nanos(START.0 + 1000 * MS), Nanos(end)) + small) * 8.0 / 2.0;
    assert!((0.96..1.005).contains(&(whole / 100e6)), "{whole}");
}

#[test]
fn a_flood_of_flows_is_one_queue_at_the_limit() {
    let mut limiter = Limiter::new(config("10mbit"), 1 << 20);
    let (mut out, mut flow) = (0.0, 0);
    let span_ms = 2000;
    for at in (START.0..START.0 + span_ms * MS).step_by(100_000) {
        // Each packet is a flow of its own; ten times the limit.
        flow += 1;
        let departure = limiter.on_packet(Nanos(at), flow, &datagram(1250));
        if departure.verdict.passes() && departure.at.0 < START.0 + span_ms * MS {
            out += 1250.0 * 8.0;
        }
    }
    let share = out / (10e6 * span_ms as f64 / 1000.0);
    assert!((0.95..1.05).contains(&share), "{share}");
}

#[test]
fn each_backlog_has_its_verdict() {
    let config = config("100mbit");
    let class = Class::new();
    let verdict = |wait_ms: u64, packet: Packet| {
        let mut flow = Flow { finish: Nanos(START.0 + wait_ms * MS), ..Flow::default() };
        class.clone().on_packet(&config, &mut flow, START, &packet).verdict
    };
    let ect = |packet| Packet { ecn_capable: true, ..packet };
    let held = |packet| Packet { held: true, ..packet };
    let full = datagram(1514);
    assert_eq!(verdict(0, full), Verdict::Pass);
    assert_eq!(verdict(2, ect(full)), Verdict::Pass);
    assert_eq!(verdict(3, ect(full)), Verdict::Mark);
    assert_eq!(verdict(3, full), Verdict::Pass);
    assert_eq!(verdict(11, full), Verdict::Drop(DropReason::Full));
    assert_eq!(verdict(11, ect(full)), Verdict::Drop(DropReason::Full));
    assert_eq!(verdict(11, held(full)), Verdict::Pass);
    assert_eq!(verdict(11, held(ect(full))), Verdict::Mark);
    // Two segments of 64 KB are 11.6 ms.
    assert_eq!(verdict(13, held(full)), Verdict::Drop(DropReason::Full));
}

#[test]
fn a_flow_of_small_packets_stays_within_what_fq_holds() {
    let config = config("1gbit");
    let mut class = Class::new();
    let mut flow = Flow::default();
    let mut waiting = 0;
    for _ in 0..100_000 {
        let departure = class.on_packet(&config, &mut flow, START, &datagram(100));
        waiting += usize::from(departure.verdict.passes() && departure.at > START);
    }
    assert!((80..100).contains(&waiting), "{waiting}");
}

#[test]
fn a_changed_rate_keeps_what_is_scheduled() {
    let mut limiter = Limiter::new(config("100mbit"), FLOWS);
    let first: Vec<_> = (0..20).map(|_| limiter.on_packet(START, 1, &datagram(1514)).at).collect();
    limiter.set_config(config("10mbit"));
    let next = limiter.on_packet(START, 1, &datagram(1514)).at;
    assert!(first.is_sorted() && next > first[19]);
}

proptest! {
    /// A flow's packets leave in order, none is later than the horizon and its own length ask for, and the
    /// whole never gets ahead of the limit by more than the rule allows.
    #[test]
    fn order_and_limit_hold(
        steps in prop::collection::vec((0u64..300_000, 0usize..40, 60u32..70_000, any::<bool>()), 1..400),
    ) {
        let config = config("100mbit");
        let mut limiter = Limiter::new(config, 64);
        let mut now = START;
        let mut last = [Nanos(0); 64];
        let mut left = Vec::new();
        for (gap, flow, wire_bytes, held) in steps {
            now = Nanos(now.0 + gap);
            let share = limiter.class().share;
            let packet = Packet { wire_bytes, ecn_capable: false, held };
            let departure = limiter.on_packet(now, flow, &packet);
            if matches!(departure.verdict, Verdict::Drop(_)) {
                continue;
            }
            let at = departure.at.max(now);
            prop_assert!(at >= last[flow], "out of order");
            last[flow] = at;
            let longest = config.drop.max(cost(&config, share, HELD_BYTES));
            prop_assert!(at.0 - now.0 <= 8 * (longest.0 + cost(&config, share, wire_bytes.into()).0));
            left.push((at, wire_bytes));
        }
        left.sort();
        let mut bits = 0.0;
        for (at, bytes) in left {
            bits += f64::from(bytes) * 8.0;
            let ahead = bits / 100e6 - (at.0 - START.0) as f64 / 1e9;
            let allowed = (config.burst.0 + config.drop.0 + MAX_LEAD.0) as f64 / 1e9 + 70_000.0 * 8.0 / 100e6;
            prop_assert!(ahead <= allowed, "{ahead} s ahead");
        }
    }
}
