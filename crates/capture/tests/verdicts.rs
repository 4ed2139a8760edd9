//! What the losses of labelled captures are called: a queue is no policer, and what cannot be told is said.
//!
//! A few cases of each kind; `cargo run --release -p tidegate-capture --example labelled` has thousands.

mod captures;
mod labelled;

use captures::{Body, Capture, Packet, bucket, rate};
use labelled::{
    Case, Cross, Side,
    net::{Kind, Queue, Random},
    run, write,
};
use tidegate_capture::{
    FlowReport, Options, Report, Verdict, analyze, delay::DelaySource, trace::LossSource,
};
use tidegate_core::{Bytes, Nanos, burst::CongestionControl};

fn case(kind: Kind) -> Case {
    Case {
        kind,
        rate_kbit_s: 5_000,
        bytes: 32_000,
        rtt_ms: 50,
        flows: 1,
        cc: CongestionControl::Cubic,
        paced: false,
        cross: Cross::None,
        stamps: true,
        line: 10,
        seed: 3,
    }
}

fn reports(case: Case) -> [(Side, Report); 2] {
    let (_, [sender, receiver]) = run(case);
    let report = |packets: &[Packet]| {
        analyze(&write(packets).bytes[..], &Options::default()).expect("a report")
    };
    [(Side::Sender, report(&sender)), (Side::Receiver, report(&receiver))]
}

fn tcp(report: &Report) -> Vec<&FlowReport> {
    report.flows.iter().filter(|flow| flow.flow.contains("> 10.0.2.100:5201")).collect()
}

#[test]
fn a_policer_is_found_on_both_sides() {
    let policer = case(Kind::Policer);
    let cases = [
        policer,
        Case { cc: CongestionControl::Reno, paced: true, ..policer },
        Case { stamps: false, ..policer },
        Case { cross: Cross::Elsewhere, ..policer },
        Case { bytes: 8_000, flows: 2, ..policer },
        Case { flows: 3, seed: 5, ..policer },
    ];
    for case in cases {
        for (side, report) in reports(case) {
            let flows = tcp(&report);
            assert_eq!(flows.len(), case.flows, "{case}");
            for flow in flows {
                assert_eq!(flow.verdict, Verdict::Policed, "{case} {side:?}: {flow:#?}");
            }
        }
    }
}

/// Active queues that hold a packet or two, and a shaper whose bucket fills within two ticks of the clock:
/// a bucket fits their losses, and packets waited before some of them, or nothing tells whether they did.
#[test]
fn a_short_queue_is_no_policer() {
    let short = Case { rate_kbit_s: 500, bytes: 16_000, line: 2, ..case(Kind::Codel) };
    let cases = [
        // A quarter of a bucket of four packets is about the time of one.
        Case { rtt_ms: 20, line: 100, seed: 3_029, ..short },
        Case {
            kind: Kind::Pie,
            rtt_ms: 10,
            flows: 2,
            paced: true,
            cross: Cross::Elsewhere,
            seed: 2_523,
            ..short
        },
        // The median is just below a quarter, and a quarter of the losses far above.
        Case {
            rate_kbit_s: 1_000,
            bytes: 64_000,
            rtt_ms: 200,
            paced: true,
            line: 10,
            seed: 1_301,
            ..short
        },
        // Of several flows, any gap is open at times.
        Case {
            rate_kbit_s: 1_000,
            rtt_ms: 100,
            flows: 3,
            cc: CongestionControl::Bbr,
            cross: Cross::Elsewhere,
            stamps: false,
            line: 100,
            seed: 3_045,
            ..short
        },
        Case {
            kind: Kind::Shaper,
            rate_kbit_s: 50_000,
            bytes: 8_000,
            rtt_ms: 10,
            flows: 2,
            cross: Cross::Shared,
            line: 10,
            seed: 2_659,
            ..short
        },
    ];
    let mut wrong = Vec::new();
    for case in cases {
        for (side, report) in reports(case) {
            for flow in tcp(&report).iter().filter(|flow| flow.verdict == Verdict::Policed) {
                wrong.push(format!("{case} {side:?} {}", flow.flow));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// More packets follow its losses than are remembered of a flow.
#[test]
fn a_flow_is_judged_by_its_losses_however_long_ago_they_were() {
    let case = Case {
        rate_kbit_s: 100_000,
        bytes: 2_000_000,
        line: 100,
        seed: 386,
        ..case(Kind::Policer)
    };
    for (side, report) in reports(case) {
        let flow = tcp(&report)[0];
        assert_eq!(flow.verdict, Verdict::Policed, "{side:?}: {:#?}", flow.evidence);
        let estimate = flow.estimate.as_ref().expect("an estimate");
        assert!((estimate.rate_bit_s / 100e6 - 1.0).abs() < 0.003, "{estimate:?}");
        assert!((estimate.depth_bytes / 2e6 - 1.0).abs() < 0.05, "{estimate:?}");
        let when = flow.evidence.iter().any(|line| line.contains("places with loss from 0.0 to"));
        assert!(when, "{:?}", flow.evidence);
    }
}

/// Packets at the end of a capture may be lost without a sign. If they counted as passed, two flows that
/// always find the bucket empty would fit no rate.
#[test]
fn what_nobody_acknowledged_may_be_lost() {
    let case = Case {
        rate_kbit_s: 2_000,
        bytes: 100_000,
        rtt_ms: 10,
        flows: 2,
        cc: CongestionControl::Bbr,
        paced: true,
        line: 2,
        seed: 336,
        ..case(Kind::Policer)
    };
    let [(_, sender), _] = reports(case);
    for flow in tcp(&sender) {
        assert_eq!(flow.verdict, Verdict::Policed, "{:#?}", flow.evidence);
    }
    let estimate = &sender.groups[0].estimate;
    assert!((estimate.rate_bit_s / 2e6 - 1.0).abs() < 0.003, "{estimate:?}");
    assert!((estimate.depth_bytes / 1e5 - 1.0).abs() < 0.05, "{estimate:?}");
}

/// Datagrams share the bucket, and nothing tells which of them are lost: a rate at which all passed, and a
/// bucket of a packet, explains as much as the true one.
#[test]
fn a_bucket_of_one_packet_must_explain_more_than_a_deep_one() {
    let case = Case {
        rate_kbit_s: 10_000,
        rtt_ms: 100,
        cc: CongestionControl::Bbr,
        paced: true,
        cross: Cross::Shared,
        stamps: false,
        seed: 188,
        ..case(Kind::Policer)
    };
    let [(_, sender), _] = reports(case);
    let flow = tcp(&sender)[0];
    assert_eq!(flow.verdict, Verdict::Policed, "{:#?}", flow.evidence);
    let estimate = &sender.groups[0].estimate;
    assert!((estimate.rate_bit_s / 1e7 - 1.0).abs() < 0.01, "{estimate:?}");
    assert!((estimate.depth_bytes / 32e3 - 1.0).abs() < 0.05, "{estimate:?}");
}

#[test]
fn a_queue_is_no_policer_on_either_side() {
    let cases = [
        case(Kind::Fifo),
        Case { cc: CongestionControl::Reno, paced: true, ..case(Kind::Fifo) },
        Case { flows: 3, ..case(Kind::Fifo) },
        Case { cross: Cross::Shared, ..case(Kind::Fifo) },
        case(Kind::Shaper),
        case(Kind::Codel),
        case(Kind::Red),
        case(Kind::Pie),
        case(Kind::Chance(1)),
        case(Kind::Chance(2)),
    ];
    for case in cases {
        for (side, report) in reports(case) {
            for flow in tcp(&report) {
                assert_ne!(flow.verdict, Verdict::Policed, "{case} {side:?}: {flow:#?}");
            }
        }
    }
}

/// The delay before the losses is that of the queue, beside what the bucket of the same losses would take.
#[test]
fn the_report_has_the_delay() {
    let full = 32_000.0 * 8e3 / 5e6;
    for (kind, delay_ms) in [(Kind::Policer, 0.0), (Kind::Fifo, full)] {
        let [(_, sender), (_, receiver)] = reports(Case { paced: true, ..case(kind) });
        for (report, by) in
            [(&sender, DelaySource::RoundTrips), (&receiver, DelaySource::TimeStamps)]
        {
            let flow = tcp(report)[0];
            let delay = flow.delay_before_loss.as_ref().expect("a delay");
            assert_eq!(delay.measured_by, by);
            // A packet or two at the rate, and the clock's tick.
            assert!((delay.median_ms - delay_ms).abs() < 7.0, "{kind:?}: {delay:?}");
            assert!(delay.losses >= 10, "{delay:?}");
            let says = flow.evidence.iter().any(|line| line.starts_with("delay before loss: "));
            assert!(says, "{:?}", flow.evidence);
        }
        let delay = tcp(&sender)[0].delay_before_loss.expect("a delay");
        assert!((delay.bucket_ms / full - 1.0).abs() < 0.1, "{delay:?}");
        let verdict = if kind == Kind::Fifo { Verdict::TailDrop } else { Verdict::Policed };
        assert_eq!(tcp(&sender)[0].verdict, verdict);
    }
}

#[test]
fn without_time_stamps_a_receiver_does_not_know_the_delay_and_says_so() {
    let [_, (_, receiver)] = reports(Case { stamps: false, ..case(Kind::Policer) });
    let flow = tcp(&receiver)[0];
    assert_eq!((flow.loss_source, flow.delay_before_loss), (LossSource::TcpHoles, None));
    let says =
        flow.evidence.iter().any(|line| line.contains("delay before the losses is not known"));
    assert!(says, "{:?}", flow.evidence);
}

/// A queue that always stands: flows that begin later never see it empty.
#[test]
fn flows_between_the_same_hosts_have_one_least_round_trip() {
    let case = Case {
        rate_kbit_s: 50_000,
        bytes: 64_000,
        rtt_ms: 10,
        flows: 5,
        cc: CongestionControl::Bbr,
        line: 2,
        seed: 675,
        cross: Cross::Elsewhere,
        ..case(Kind::Shaper)
    };
    let [(_, sender), _] = reports(case);
    for flow in tcp(&sender) {
        assert_eq!(flow.verdict, Verdict::TailDrop, "{:#?}", flow.evidence);
    }
}

/// A bucket that is empty passes packets at its rate, too, but not all.
#[test]
fn a_policer_under_overload_is_no_queue_where_only_the_pace_tells() {
    let case = Case {
        rate_kbit_s: 20_000,
        bytes: 2_000_000,
        stamps: false,
        seed: 1090,
        ..case(Kind::Policer)
    };
    let [_, (_, receiver)] = reports(case);
    let flow = tcp(&receiver)[0];
    assert_eq!(flow.verdict, Verdict::Policed, "{:#?}", flow.evidence);
}

/// A loaded link behind the policer delays packets, and no time stamp shows by how much. The gaps that lost
/// packets leave, and the few tokens at losses, do.
#[test]
fn a_policer_is_found_behind_a_loaded_link_without_time_stamps() {
    let case = Case {
        rate_kbit_s: 2_000,
        bytes: 100_000,
        cc: CongestionControl::Reno,
        stamps: false,
        line: 100,
        seed: 688,
        cross: Cross::Elsewhere,
        ..case(Kind::Policer)
    };
    let [_, (_, receiver)] = reports(case);
    let flow = tcp(&receiver)[0];
    assert_eq!(flow.verdict, Verdict::Policed, "{:#?}", flow.evidence);
    let estimate = flow.estimate.as_ref().expect("an estimate");
    assert!((estimate.rate_bit_s / 2e6 - 1.0).abs() < 0.03, "{estimate:?}");
}

/// The queue drains faster than the rate of the bucket that fits its losses, since it is empty at times.
#[test]
fn a_queue_that_is_empty_at_times_keeps_its_own_pace() {
    let case = Case {
        rate_kbit_s: 2_000,
        bytes: 64_000,
        rtt_ms: 100,
        cc: CongestionControl::Reno,
        paced: true,
        stamps: false,
        seed: 453,
        cross: Cross::Elsewhere,
        ..case(Kind::Codel)
    };
    let [_, (_, receiver)] = reports(case);
    let flow = tcp(&receiver)[0];
    assert_eq!(flow.verdict, Verdict::TailDrop, "{:#?}", flow.evidence);
}

#[test]
fn flows_behind_one_queue_are_a_group_of_a_queue() {
    let [(_, sender), _] = reports(Case { flows: 2, seed: 1, ..case(Kind::Fifo) });
    for group in &sender.groups {
        assert_eq!(group.verdict, Verdict::TailDrop, "{:?}", group.evidence);
        assert!(group.delay_before_loss.is_some_and(|delay| delay.share_of_bucket > 0.5));
    }
    assert!(tcp(&sender).iter().all(|flow| flow.verdict == Verdict::TailDrop), "{sender:#?}");
}

/// A capture that misses a tenth of what passed: the receiver acknowledges it, and nobody sends it again.
#[test]
fn what_the_capture_missed_is_counted_and_not_lost() {
    let mut capture = Capture::plain();
    let stamp = |time_ns: u64| Some((time_ns / 1_000_000) as u32 + 1);
    for number in 0..2_000_u32 {
        let time_ns = u64::from(number) * 1_000_000;
        let seq = 1 + number * 1_448;
        if number % 10 != 7 {
            let body = Body::Data { seq, syn: false, stamp: stamp(time_ns) };
            capture.packet(&Packet { time_ns, flow: 1, ip_bytes: 1_500, id: 0, body });
        }
        let body = Body::Sack { ack: seq + 1_448, blocks: [(0, 0); 3], count: 0, stamp: None };
        let time_ns = time_ns + 100_000;
        capture.packet(&Packet { time_ns, flow: 1, ip_bytes: 52, id: 0, body });
    }
    let report = analyze(&capture.bytes[..], &Options::default()).unwrap();
    let flow = tcp(&report)[0];
    assert_eq!((flow.lost_packets, flow.uncaptured_packets), (0, 200));
    assert_eq!(flow.verdict, Verdict::NoLoss, "{:?}", flow.evidence);
}

/// One burst through a bucket, and then nothing for long.
#[test]
fn losses_of_one_moment_have_words_of_their_own() {
    let mut capture = Capture::plain();
    let mut bucket = bucket(5_000_000, 30_000);
    let mut next = 0_u16;
    for (start, packets) in [(20_000_000_u64, 200_u64), (2_000_000_000, 5)] {
        for at in 0..packets {
            let time_ns = start + at * 240_000;
            if bucket.on_packet(Nanos(time_ns), 1_500) {
                let body = Body::Udp;
                capture.packet(&Packet { time_ns, flow: 1, ip_bytes: 1_500, id: next, body });
            }
            next += 1;
        }
    }
    let report = analyze(&capture.bytes[..], &Options::default()).unwrap();
    let flow = &report.flows[0];
    assert_eq!(flow.verdict, Verdict::TooFew, "{:?}", flow.evidence);
    let says = flow.evidence.iter().any(|line| line.starts_with("all losses lie in "));
    assert!(says, "{:?}", flow.evidence);
}

/// The simulation is what it says: a queue delays by its length, and holds its rate.
#[test]
fn the_simulated_queue_is_a_queue() {
    let rate = rate(8_000_000);
    let mut random = Random::new(1);
    let labelled::net::Gate::Queue::<u64>(mut queue) =
        labelled::net::Gate::new(Kind::Fifo, rate, 15_000)
    else {
        panic!("a queue");
    };
    let fill = |queue: &mut Queue<u64>, random: &mut Random| {
        (0..20).filter(|number| queue.push(0, 1_500, *number, random)).count()
    };
    assert_eq!(fill(&mut queue, &mut random), 10);
    let (mut now, mut left) = (0, Vec::new());
    while let Some(next) = queue.next_ns(now) {
        now = next;
        left.extend(queue.pop(now, &mut Vec::new()));
    }
    assert_eq!((left.len(), now), (10, rate.time_for(Bytes(15_000)).0));
}

/// Half of the cases are held out, of each kind.
#[test]
fn the_halves_are_halves() {
    let cases: Vec<Case> = (0..2_000).map(Case::number).collect();
    let policed = |case: &&Case| case.is_policed();
    let held_out: Vec<&Case> = cases.iter().filter(|case| case.is_held_out()).collect();
    assert!((900..1_100).contains(&held_out.len()), "{}", held_out.len());
    let both = held_out.iter().copied().filter(policed).count();
    assert!((430..570).contains(&both), "{both}");
}
