//! Rate and depth of policers that are known, from captures that were made through them.

mod captures;
#[path = "../../core/tests/policed/mod.rs"]
mod policed;

use captures::{Body, Capture, Packet, Udp, rate};
use policed::{Scene, run};
use tidegate_capture::{Estimate, Options, Report, Verdict, analyze, flow::Vantage};
use tidegate_core::{Bytes, Nanos, burst::CongestionControl};

fn report(capture: &Capture) -> Report {
    analyze(&capture.bytes[..], &Options::default()).expect("a report")
}

/// The estimate is within 2 % of the rate and 10 % of the depth.
fn assert_near(estimate: Option<&Estimate>, rate: f64, depth: f64, what: &str) {
    let estimate = estimate.unwrap_or_else(|| panic!("{what}: no estimate"));
    let off = |value: f64, wanted: f64| value / wanted - 1.0;
    println!(
        "{what}: rate {:+.2} % (within {:.2} %), depth {:+.1} % (within {:.1} %), {}, explained {:.3}",
        100.0 * off(estimate.rate_bit_s, rate),
        100.0 * (estimate.rate_high_bit_s / estimate.rate_bit_s - 1.0),
        100.0 * off(estimate.depth_bytes, depth),
        100.0 * (1.0 - estimate.depth_low_bytes / estimate.depth_bytes),
        estimate.depth_known,
        estimate.losses_explained,
    );
    // A 95 % interval may miss, but not by much.
    let covers = estimate.depth_low_bytes <= depth * 1.01
        && estimate.depth_high_bytes.is_none_or(|high| high >= depth * 0.99);
    assert!(covers, "{what}: {estimate:?}");
    assert!(off(estimate.rate_bit_s, rate).abs() < 0.02, "{what}: {estimate:?}");
    assert!(off(estimate.depth_bytes, depth).abs() < 0.10, "{what}: {estimate:?}");
}

#[test]
fn bursty_udp_as_in_the_article() {
    for depth in [15_000, 150_000, 600_000, 1_000_000] {
        let mut capture = Capture::plain().snaplen(42);
        Udp::iperf3(depth).write(&mut capture, 1);
        let report = report(&capture);
        let flow = &report.flows[0];
        assert_eq!(flow.verdict, Verdict::Policed, "{depth}: {:?}", flow.evidence);
        assert_near(flow.estimate.as_ref(), 50e6, depth as f64, &format!("bursty udp {depth}"));
        assert_eq!(flow.vantage, Vantage::Receiver);
    }
}

#[test]
fn smooth_udp() {
    for (offered, depth) in
        [(100, 150_000), (60, 150_000), (51, 15_000), (73, 30_000), (400, 625_000)]
    {
        let mut capture = Capture::plain();
        Udp::smooth(offered * 1_000_000, 50_000_000, depth).write(&mut capture, 1);
        let report = report(&capture);
        let flow = &report.flows[0];
        let what = format!("smooth udp {offered} {depth}");
        assert_eq!(flow.verdict, Verdict::Policed, "{what}: {flow:?}");
        assert_near(flow.estimate.as_ref(), 50e6, depth as f64, &what);
    }
}

#[test]
fn late_stamps_do_not_matter() {
    for depth in [60_000, 600_000] {
        let mut capture = Capture::plain();
        Udp { jitter_ns: 100_000, ..Udp::iperf3(depth) }.write(&mut capture, 1);
        let report = report(&capture);
        assert_near(
            report.flows[0].estimate.as_ref(),
            50e6,
            depth as f64,
            &format!("jitter {depth}"),
        );
    }
}

/// TCP flows through one bucket, captured before or behind it.
fn tcp(scene: &Scene, at_sender: bool) -> Capture {
    let mut capture = Capture::plain();
    let mut acks: Vec<(u64, usize, u32)> = Vec::new();
    let mut packets = Vec::new();
    let mut began = vec![false; scene.flows];
    let mut expected: Vec<(u32, Vec<u32>)> = vec![(0, Vec::new()); scene.flows];
    run(scene, |sent| {
        let time_ns = sent.at.0 + 20_000_000;
        let body = |seq, syn| Body::Tcp { seq, syn };
        let flow = sent.flow as u16;
        let first = 1_000_000 * u32::from(flow);
        if !began[sent.flow] {
            began[sent.flow] = true;
            let syn = Packet { time_ns, flow, ip_bytes: 60, id: 0, body: body(first, true) };
            packets.push(syn);
        }
        if sent.passed || at_sender {
            let seq = first.wrapping_add(21 + sent.seq.wrapping_mul(1_460));
            packets.push(Packet {
                time_ns,
                flow,
                ip_bytes: scene.mtu,
                id: 0,
                body: body(seq, false),
            });
        }
        if sent.passed {
            let (next, early) = &mut expected[sent.flow];
            early.push(sent.seq);
            while let Some(at) = early.iter().position(|seq| seq == next) {
                early.swap_remove(at);
                *next += 1;
            }
            let back = if at_sender { scene.rtt.0 } else { 50_000 };
            acks.push((
                time_ns + back,
                sent.flow,
                first.wrapping_add(21 + next.wrapping_mul(1_460)),
            ));
        }
    });
    packets.extend(acks.iter().map(|(time_ns, flow, ack)| Packet {
        time_ns: *time_ns,
        flow: *flow as u16,
        ip_bytes: 40,
        id: 0,
        body: Body::Ack(*ack),
    }));
    packets.sort_by_key(|packet| packet.time_ns);
    for packet in packets {
        capture.packet(&packet);
    }
    capture
}

fn scene(mbit_s: u64, depth: u64, rtt_ms: u64, flows: usize, cc: CongestionControl) -> Scene {
    Scene {
        rate: rate(mbit_s * 1_000_000),
        bucket: Bytes(depth),
        rtt: Nanos(rtt_ms * 1_000_000),
        flows,
        cc,
        paced: true,
        line: rate(1_000_000_000),
        mtu: 1_500,
        duration: Nanos(10_000_000_000),
        seed: 11,
        slow_start: false,
    }
}

#[test]
fn one_tcp_flow() {
    use CongestionControl::{Bbr, Cubic, Reno};
    for (cc, mbit_s, depth, rtt_ms, paced) in [
        (Reno, 20, 30_000, 20, true),
        (Reno, 20, 100_000, 20, true),
        (Cubic, 30, 40_000, 20, true),
        (Cubic, 10, 31_250, 40, true),
        (Cubic, 50, 150_000, 20, false),
        (Reno, 30, 156_250, 10, false),
        (Bbr, 20, 40_000, 20, true),
    ] {
        let scene = Scene { paced, ..scene(mbit_s, depth, rtt_ms, 1, cc) };
        for at_sender in [false, true] {
            let what =
                format!("{cc:?} {mbit_s} {depth} {rtt_ms} ms paced {paced} sender {at_sender}");
            let report = report(&tcp(&scene, at_sender));
            let flow = &report.flows[0];
            let vantage = if at_sender { Vantage::Sender } else { Vantage::Receiver };
            assert_eq!(flow.vantage, vantage, "{what}: {}", flow.vantage_why);
            assert_eq!(flow.verdict, Verdict::Policed, "{what}: {:?}", flow.evidence);
            assert_near(flow.estimate.as_ref(), mbit_s as f64 * 1e6, depth as f64, &what);
        }
    }
}

#[test]
fn several_tcp_flows_share_a_policer() {
    use CongestionControl::{Cubic, Reno};
    for (cc, mbit_s, depth, rtt_ms, flows) in
        [(Reno, 30, 60_000, 20, 4), (Cubic, 30, 60_000, 20, 3), (Cubic, 40, 250_000, 20, 5)]
    {
        let scene = scene(mbit_s, depth, rtt_ms, flows, cc);
        for at_sender in [false, true] {
            let what = format!("{flows} x {cc:?} {mbit_s} {depth} sender {at_sender}");
            let report = report(&tcp(&scene, at_sender));
            let group = report.groups.first().unwrap_or_else(|| panic!("{what}: no group"));
            assert_eq!(report.groups.len(), 1, "{what}");
            assert_eq!(group.flows.len(), flows, "{what}: {group:?}");
            assert_eq!(group.verdict, Verdict::Policed, "{what}");
            assert_near(Some(&group.estimate), mbit_s as f64 * 1e6, depth as f64, &what);
        }
    }
}

/// Before the loss a queue and a bucket lose the same packets; only the queue delays.
#[test]
fn a_queue_is_distinguished_from_a_bucket_by_its_delay() {
    for queued in [false, true] {
        let mut capture = Capture::plain();
        let (mut bucket, mut next, mut resend) =
            (captures::bucket(20_000_000, 60_000), 0_u32, Vec::new());
        let seq = |number: u32| 21 + number * 1_460;
        let mut packets = vec![Packet {
            time_ns: 0,
            flow: 1,
            ip_bytes: 60,
            id: 0,
            body: Body::Tcp { seq: 0, syn: true },
        }];
        let mut acked = 0_u32;
        for burst in 0..60_u64 {
            for at in 0..100_u64 {
                let time_ns = 20_000_000 + burst * 100_000_000 + at * 120_000;
                let number = next;
                next += 1;
                let body = Body::Tcp { seq: seq(number), syn: false };
                packets.push(Packet { time_ns, flow: 1, ip_bytes: 1_500, id: 0, body });
                let tokens = bucket.tokens(Nanos(time_ns)).0;
                if bucket.on_packet(Nanos(time_ns), 1_500) {
                    let wait = if queued {
                        rate(20_000_000).time_for(Bytes(60_000 - tokens)).0
                    } else {
                        0
                    };
                    if resend.is_empty() {
                        acked = acked.max(number + 1);
                    }
                    let (time_ns, body) = (time_ns + 5_000_000 + wait, Body::Ack(seq(acked)));
                    packets.push(Packet { time_ns, flow: 1, ip_bytes: 40, id: 0, body });
                } else {
                    resend.push(number);
                }
            }
            // What was lost comes again in the pause.
            for (at, number) in (0_u64..).zip(resend.drain(..)) {
                let time_ns = 80_000_000 + burst * 100_000_000 + at * 900_000;
                let body = Body::Tcp { seq: seq(number), syn: false };
                packets.push(Packet { time_ns, flow: 1, ip_bytes: 1_500, id: 0, body });
                bucket.on_packet(Nanos(time_ns), 1_500);
            }
            acked = next;
            let (time_ns, body) = (119_500_000 + burst * 100_000_000, Body::Ack(seq(acked)));
            packets.push(Packet { time_ns, flow: 1, ip_bytes: 40, id: 0, body });
        }
        packets.sort_by_key(|packet| packet.time_ns);
        packets.iter().for_each(|packet| capture.packet(packet));
        let flow = report(&capture).flows.remove(0);
        let verdict = if queued { Verdict::TailDrop } else { Verdict::Policed };
        assert_eq!(flow.verdict, verdict, "{:?}", flow.evidence);
        assert_eq!(flow.vantage, Vantage::Sender);
    }
}
