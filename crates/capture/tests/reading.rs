//! Reading: every container and link type, and whatever may be wrong with a file.

mod captures;

use captures::{Body, Capture, Container, Link, Packet, START_NS, Udp};
use proptest::prelude::*;
use tidegate_capture::{Analyzer, CaptureError, Options, Reader, Report, Verdict, analyze};

const PCAP: Container = Container::Pcap { nanoseconds: true, big_endian: false };
const CONTAINERS: [Container; 4] = [
    PCAP,
    Container::Pcap { nanoseconds: false, big_endian: false },
    Container::Pcap { nanoseconds: false, big_endian: true },
    Container::PcapNg,
];

fn report(bytes: &[u8]) -> Result<Report, CaptureError> {
    analyze(bytes, &Options::default())
}

/// Every tenth packet is missing.
fn gaps(capture: &mut Capture, body: impl Fn(u16) -> Body) {
    for number in (0..300_u16).filter(|number| number % 10 != 9) {
        let time_ns = u64::from(number) * 1_000_000;
        capture.packet(&Packet {
            time_ns,
            flow: 1,
            ip_bytes: 1_200,
            id: number,
            body: body(number),
        });
    }
}

#[test]
fn every_container_and_link() {
    for container in CONTAINERS {
        for link in Link::ALL {
            let mut capture = Capture::new(container, link);
            gaps(&mut capture, |_| Body::Udp);
            let report = report(&capture.bytes).unwrap();
            let flow = &report.flows[0];
            assert_eq!(
                flow.flow, "udp 10.0.1.100:40001 > 10.0.2.100:5201",
                "{container:?} {link:?}"
            );
            assert_eq!((flow.packets, flow.lost_packets), (270, 29), "{container:?} {link:?}");
            assert_eq!(flow.bytes, 270 * 1_200);
            assert!((report.capture.start_unix_s - START_NS as f64 / 1e9).abs() < 1e-3);
            assert!((flow.duration_s - 0.298).abs() < 1e-6, "{}", flow.duration_s);
            assert_eq!(report.capture.file_bytes, capture.bytes.len() as u64);
        }
    }
}

#[test]
fn ipv6_has_rtp_or_nothing() {
    let mut capture = Capture::new(PCAP, Link::Ethernet).v6();
    gaps(&mut capture, |_| Body::Udp);
    let flow = report(&capture.bytes).unwrap().flows.remove(0);
    assert_eq!(flow.verdict, Verdict::Unseen);
    let mut capture = Capture::new(PCAP, Link::Ethernet).v6();
    gaps(&mut capture, Body::Rtp);
    assert_eq!(report(&capture.bytes).unwrap().flows[0].lost_packets, 29);
}

#[test]
fn stamps_that_go_back_are_counted() {
    let mut capture = Capture::plain();
    for number in 0..100_u16 {
        let time_ns = 1_000_000 * u64::from(if number % 10 == 5 { number - 4 } else { number });
        capture.packet(&Packet { time_ns, flow: 1, ip_bytes: 500, id: number, body: Body::Udp });
    }
    let report = report(&capture.bytes).unwrap();
    assert_eq!(report.capture.stamps_back, 10);
    assert_eq!(report.flows[0].lost_packets, 0);
}

#[test]
fn a_counter_that_several_flows_share_is_not_believed() {
    let mut capture = Capture::plain();
    for number in 0..600_u16 {
        let time_ns = u64::from(number) * 1_000_000;
        let flow = number % 3;
        capture.packet(&Packet { time_ns, flow, ip_bytes: 500, id: number, body: Body::Udp });
    }
    for flow in report(&capture.bytes).unwrap().flows {
        assert_eq!(flow.verdict, Verdict::Unseen, "{flow:?}");
        assert!(flow.vantage_why.contains("counts all its flows together"));
    }
}

#[test]
fn what_is_no_capture_is_distinguished() {
    let says = |bytes: &[u8]| report(bytes).unwrap_err().to_string();
    assert!(says(b"").contains("is empty"));
    assert!(says(b"# a text\nof two lines, and more").contains("the text"));
    assert!(says(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0]).contains("zcat FILE | tidegate burst analyze -"));
    assert!(says(&[0x28, 0xb5, 0x2f, 0xfd, 0]).contains("zstdcat"));
    assert!(says(&[0x7f, b'E', b'L', b'F', 2, 1]).contains("the bytes 7f 45 4c 46"));
    assert!(says(&Capture::plain().bytes).contains("no IP packet among 0"));
    let mut arp = Capture::plain();
    arp.frame(0, &[&[2; 12][..], &[8, 6, 0, 1]].concat(), 42);
    assert!(says(&arp.bytes).contains("no IP packet among 1"));
    let mut bytes = arp.bytes.clone();
    bytes[20] = 147;
    assert!(says(&bytes).contains("link type 147"));
}

#[test]
fn a_cut_file_is_read_as_far_as_it_goes() {
    let mut capture = Capture::new(Container::PcapNg, Link::Ethernet);
    gaps(&mut capture, |_| Body::Udp);
    let whole = capture.bytes;
    let report_of = |bytes: &[u8]| report(bytes).unwrap();
    let cut = report_of(&whole[..whole.len() - 5]);
    assert_eq!(cut.flows[0].packets, 269);
    assert!(cut.capture.warning.unwrap().contains("in the middle of packet 270"));
    // A length that is none, in the middle.
    let mut damaged = whole.clone();
    let at = whole.len() / 2 / 128 * 128;
    damaged[at..at + 256].fill(0xff);
    let report = report_of(&damaged);
    assert!(report.flows[0].packets < 140);
    assert!(report.capture.warning.is_some());
}

#[test]
fn a_length_cannot_ask_for_memory() {
    let mut capture = Capture::plain();
    capture.frame(0, &[0; 60], 60);
    // The next claims 4 GB.
    capture.bytes.extend([0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    let mut reader = Reader::new(&capture.bytes[..]).unwrap();
    assert!(reader.read().unwrap().is_some());
    let error = reader.read().unwrap_err();
    assert!(matches!(error, CaptureError::Damaged { packets: 1, .. }), "{error}");
}

/// A reader that gives a byte at a time, as a slow pipe does.
struct Trickle<'a>(&'a [u8]);

impl std::io::Read for Trickle<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let Some((first, rest)) = self.0.split_first() else { return Ok(0) };
        buffer[0] = *first;
        self.0 = rest;
        Ok(1)
    }
}

#[test]
fn a_pipe_that_trickles_is_the_same() {
    for container in CONTAINERS {
        let mut capture = Capture::new(container, Link::Ethernet);
        gaps(&mut capture, |_| Body::Udp);
        let slow = analyze(Trickle(&capture.bytes), &Options::default()).unwrap();
        assert_eq!(slow.flows[0].lost_packets, 29);
    }
}

/// A capture with most of what there is.
fn rich(container: Container, link: Link) -> Vec<u8> {
    let mut capture = Capture::new(container, link);
    gaps(&mut capture, |_| Body::Udp);
    gaps(&mut capture, Body::Rtp);
    gaps(&mut capture, |number| Body::Tcp { seq: u32::from(number) * 1_160, syn: number == 0 });
    gaps(&mut capture, |number| Body::Ack(u32::from(number) * 1_160));
    capture.bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..2_000), container in 0usize..4) {
        let _ = report(&bytes);
        // The same behind a good head.
        let mut capture = Capture::new(CONTAINERS[container], Link::Ethernet).bytes;
        capture.extend(&bytes);
        let _ = report(&capture);
    }

    #[test]
    fn no_mutation_panics(
        container in 0usize..4,
        link in 0usize..7,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..60),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = rich(CONTAINERS[container], Link::ALL[link]);
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = report(&bytes);
        bytes.truncate(cut.index(bytes.len()));
        let _ = report(&bytes);
    }
}

#[test]
fn losses_by_chance_are_not_policed() {
    for (seed, one_in) in [(1_u64, 50), (2, 10), (3, 100)] {
        let mut capture = Capture::plain();
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for number in 0..20_000_u32 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if random % one_in != 0 {
                let time_ns = u64::from(number) * 120_000;
                capture.packet(&Packet {
                    time_ns,
                    flow: 1,
                    ip_bytes: 1_500,
                    id: number as u16,
                    body: Body::Udp,
                });
            }
        }
        let flow = report(&capture.bytes).unwrap().flows.remove(0);
        assert_eq!(flow.verdict, Verdict::Random, "1 in {one_in}: {:?}", flow.evidence);
        assert!(flow.estimate.is_none());
    }
}

#[test]
fn a_queue_that_is_drained_evenly_is_shaped() {
    let mut capture = Capture::plain();
    // Bursts of 400 packets at line rate into a queue of 100 that leaves at 40 Mbit/s.
    let (mut free_at, mut id) = (0_u64, 0_u16);
    for burst in 0..40_u64 {
        for at in 0..400 {
            let now = burst * 100_000_000 + at * 12_000;
            id = id.wrapping_add(1);
            if free_at.saturating_sub(now) > 100 * 300_000 {
                continue;
            }
            free_at = free_at.max(now) + 300_000;
            capture.packet(&Packet {
                time_ns: free_at,
                flow: 1,
                ip_bytes: 1_500,
                id,
                body: Body::Udp,
            });
        }
    }
    let flow = report(&capture.bytes).unwrap().flows.remove(0);
    assert_eq!(flow.verdict, Verdict::Shaped, "{:?}", flow.evidence);
    let rate = flow.estimate.unwrap().rate_bit_s;
    assert!((rate / 40e6 - 1.0).abs() < 0.02, "{rate}");
}

#[test]
fn too_many_flows_are_forgotten_not_refused() {
    let mut capture = Capture::plain();
    for number in 0..40_000_u32 {
        let time_ns = u64::from(number) * 1_000;
        // Flows differ by their ports.
        let packet = Packet {
            time_ns,
            flow: (number % 20_000) as u16,
            ip_bytes: 100,
            id: 0,
            body: Body::Udp,
        };
        capture.packet(&packet);
    }
    let report = report(&capture.bytes).unwrap();
    assert_eq!(report.capture.flows, 16_384);
    assert!(report.capture.evicted_flows >= 3_616);
}

#[test]
fn runs_are_those_of_the_article() {
    let mut capture = Capture::plain().snaplen(42);
    Udp::iperf3(150_000).write(&mut capture, 1);
    let flow = report(&capture.bytes).unwrap().flows.remove(0);
    let first = &flow.runs.first[0];
    // 150 kB at once and what 50 Mbit/s adds while they come: 150 / (1 - 1/20) = 157.9 kB.
    assert_eq!(first.packets, 105);
    assert!((first.rate_bit_s.unwrap() / 1e9 - 1.0).abs() < 0.1, "{first:?}");
    assert!(flow.runs.longest_gap_packets < 30 || flow.runs.longest_gap_packets > 500);
}

#[test]
fn what_is_forgotten_stays_counted() {
    // More packets than are remembered.
    let mut analyzer = Analyzer::with_events_max(20_000);
    let mut capture = Capture::plain().snaplen(42);
    let mut lost = 0;
    let flows = 80_u32;
    for number in 0..60_000_u32 {
        let (flow, round) = (number % flows, number / flows);
        // The first flow ends early, so that others push out what is remembered of it.
        if flow == 0 && round > 100 {
            continue;
        }
        if round % 16 == 15 {
            lost += 1;
            continue;
        }
        let (time_ns, flow) = (u64::from(number) * 1_000, flow as u16);
        capture.packet(&Packet {
            time_ns,
            flow,
            ip_bytes: 1_000,
            id: round as u16,
            body: Body::Udp,
        });
        let mut reader = Reader::new(&capture.bytes[..]).unwrap();
        analyzer.frame(&reader.read().unwrap().unwrap());
        capture.bytes.truncate(24);
    }
    let report = analyzer.report(&Options { top: 1_000, flow: None });
    assert!(report.capture.forgotten_windows > 0);
    let seen: u64 = report.flows.iter().map(|flow| flow.lost_packets).sum();
    assert_eq!(report.flows.len(), 80);
    assert!(lost - seen <= 80, "{lost} {seen}");
    for flow in &report.flows {
        assert_ne!(flow.verdict, Verdict::NoLoss, "{} lost {}", flow.flow, flow.lost_packets);
    }
}
