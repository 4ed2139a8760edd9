//! Whose limit a packet meets in a pool: the loaded programs on a table of packets.

use std::{mem::MaybeUninit, net::Ipv6Addr};

use libbpf_rs::ProgramInput;
use tidegate_core::{
    Bytes, Direction, Nanos, Rate, Scheme, Span, prefixes::Prefixes,
    queue_options::VirtualQueueOptions,
};

use super::{
    kernel_tests::{boottime_ns, wait_to_earn},
    pool::{MapPool, load, maps_of, vacate},
};
use crate::{
    exempt::trie_of,
    intf::{self, CHUNK},
    limit::{Lease, LimitError, LimitMaps, LimitOptions},
};

/// Three seconds at the rate of the limits: the time that a test takes adds no packet.
const FRAME_BYTES: usize = 3000;
const PASSED: u32 = u32::MAX; // TC_ACT_UNSPEC
const DROPPED: u32 = 2; // TC_ACT_SHOT

fn v4(source: [u8; 4], destination: [u8; 4]) -> Vec<u8> {
    let mut frame = vec![0; FRAME_BYTES];
    frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    frame[16..18].copy_from_slice(&986u16.to_be_bytes());
    frame[23] = 17;
    frame[26..30].copy_from_slice(&source);
    frame[30..34].copy_from_slice(&destination);
    frame
}

fn v6(source: &str, destination: &str) -> Vec<u8> {
    let mut frame = vec![0; FRAME_BYTES];
    frame[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
    frame[20] = 17;
    let octets = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
    frame[22..38].copy_from_slice(&octets(source));
    frame[38..54].copy_from_slice(&octets(destination));
    frame
}

fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP {test}: needs root");
    }
    root
}

/// A limit of both directions for some prefixes.
fn limit(matched: &str, burst: u64) -> LimitOptions {
    let queue = VirtualQueueOptions {
        burst: Some(Span::Size(Bytes(burst))),
        ..VirtualQueueOptions::new("8kbit".parse().unwrap())
    };
    LimitOptions {
        egress: Some(queue),
        ingress: Some(queue),
        scheme: Scheme::Police,
        matched: matched.parse().unwrap(),
        ..LimitOptions::default()
    }
}

/// A limit that has a slot in a pool.
fn take(pool: &MapPool, index: u32) -> LimitMaps {
    pool.take(index, &Prefixes::default()).unwrap()
}

/// Makes a limit in a pool another one.
fn change(maps: &mut LimitMaps, options: &LimitOptions) -> Result<(), LimitError> {
    let settings = options.encode(0).unwrap().into();
    let own: &mut dyn std::any::Any = &mut *maps.own;
    let place = own.downcast_mut::<super::Policer>().unwrap().place.as_mut().unwrap();
    place.change(&maps.limit, &settings, options)?;
    place.matched = options.matched;
    Ok(())
}

const FAR: [u8; 4] = [198, 51, 100, 7];

#[test]
fn root_police_match_the_longest_prefix_has_the_packet() {
    if !is_root("root_police_match_the_longest_prefix_has_the_packet") {
        return;
    }
    for is_port in [false, true] {
        let mut storage = MaybeUninit::uninit();
        let programs = load(&mut storage, is_port, None).unwrap();
        let pool = maps_of(&programs).unwrap();
        let put = |index, matched| {
            let mut maps = take(&pool, index);
            change(&mut maps, &limit(matched, 1 << 18)).unwrap();
            maps
        };
        let prefixes = ["10.0.0.0/8", "10.1.0.0/16,2001:db8:1::/48", "10.1.2.3", "2001:db8::/32"];
        let mut limits: Vec<_> = (0..).zip(prefixes).map(|(i, p)| put(i, p)).collect();
        // In the last chunk; all of IPv4 is none of IPv6.
        limits.push(put(intf::PLACES - 1, "0.0.0.0/0"));
        let run = |is_out: bool, frame: &[u8]| {
            let program = if is_out { &programs.progs.match_out } else { &programs.progs.match_in };
            let run = program.test_run(ProgramInput { data_in: Some(frame), ..Default::default() });
            run.unwrap().return_value
        };
        let seen = |is_out: bool| {
            let direction = if is_out == is_port { Direction::Ingress } else { Direction::Egress };
            let packets = |maps: &LimitMaps| maps.read(direction).unwrap().counters.packets[0];
            limits.iter().map(packets).collect::<Vec<_>>()
        };
        let table = [
            ([10, 9, 9, 9], Some(0)),
            ([10, 1, 9, 9], Some(1)),
            ([10, 1, 2, 3], Some(2)),
            ([10, 1, 2, 4], Some(1)),
            ([11, 1, 2, 3], Some(4)),
        ];
        for (host, whose) in table {
            for is_out in [true, false] {
                let before = seen(is_out);
                let frame = if is_out { v4(FAR, host) } else { v4(host, FAR) };
                assert_eq!(run(is_out, &frame), PASSED);
                let expected: Vec<_> =
                    (0..limits.len()).map(|i| before[i] + u64::from(whose == Some(i))).collect();
                assert_eq!(seen(is_out), expected, "{host:?} out {is_out} port {is_port}");
            }
        }
        for (host, whose) in [("2001:db8:1::9", 1), ("2001:db8:2::9", 3), ("2001:db9::1", 9)] {
            for is_out in [true, false] {
                let before = seen(is_out);
                let frame = if is_out { v6("::1", host) } else { v6(host, "::1") };
                assert_eq!(run(is_out, &frame), PASSED);
                let expected: Vec<_> =
                    (0..limits.len()).map(|i| before[i] + u64::from(whose == i)).collect();
                assert_eq!(seen(is_out), expected, "{host} out {is_out} port {is_port}");
            }
        }
        let arp = {
            let mut f = v4(FAR, FAR);
            f[12..14].copy_from_slice(&[8, 6]);
            f
        };
        let before = seen(true);
        assert_eq!((run(true, &arp), seen(true)), (PASSED, before));
    }
}

/// Each limit has its own bucket; others in its place find a new one; prefixes move while packets pass.
#[test]
fn root_police_match_buckets_are_apart() {
    if !is_root("root_police_match_buckets_are_apart") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let programs = load(&mut storage, false, None).unwrap();
    let pool = maps_of(&programs).unwrap();
    let send = |host: u8| {
        let frame = v4(FAR, [10, 0, 0, host]);
        let input = ProgramInput { data_in: Some(&frame), ..Default::default() };
        programs.progs.match_out.test_run(input).unwrap().return_value
    };
    let sent = |host, frames| (0..frames).filter(|_| send(host) == PASSED).count();
    let (mut one, mut other) = (take(&pool, 0), take(&pool, 1));
    let write = |maps: &mut LimitMaps, matched: &str, frames| {
        change(maps, &limit(matched, frames * FRAME_BYTES as u64)).unwrap();
    };
    write(&mut one, "10.0.0.1", 3);
    write(&mut other, "10.0.0.2", 5);
    assert_eq!((sent(1, 9), sent(2, 9), sent(3, 9)), (3, 5, 9));
    assert_eq!(one.read(Direction::Egress).unwrap().counters.packets[3], 6);
    assert_eq!(one.read(Direction::Egress).unwrap().colours.unwrap().packets, [3, 0, 6]);
    assert_eq!(send(1), DROPPED);
    let prefixes = "10.0.0.2".parse().unwrap();
    assert!(pool.taken(&prefixes, Some(0)).unwrap().is_some_and(|(i, _)| i == 1));
    assert!(pool.taken(&prefixes, Some(1)).unwrap().is_none());
    // The host that it leaves is free, the one that it gets is held by what is left of its bucket.
    write(&mut one, "10.0.0.3,2001:db8::/32", 3);
    assert_eq!((sent(1, 9), sent(3, 9)), (9, 0));
    assert!(one.own.place().unwrap().is_entered(&one.limit().unwrap()));
    vacate(one.own.place().unwrap(), &one).unwrap();
    assert_eq!(sent(3, 9), 9);
    let mut new = take(&pool, 0);
    write(&mut new, "10.0.0.0/24", 2);
    assert_eq!((sent(3, 9), sent(2, 9)), (2, 0), "a new bucket; the longer prefix stays apart");
    // Exempt of this limit alone.
    let exempt = |maps: &mut LimitMaps, text: &str| {
        let (exempt, matched) = (text.parse().unwrap(), maps.own.place().unwrap().matched);
        let options = LimitOptions { exempt, matched, ..limit("none", 2 * FRAME_BYTES as u64) };
        change(maps, &options).unwrap();
        let place = maps.own.place().unwrap();
        assert_eq!(crate::exempt::read(&place.exempts, place.index), exempt.prefixes);
    };
    exempt(&mut new, "10.0.0.7,10.0.0.2");
    assert_eq!((sent(7, 4), sent(3, 4), sent(2, 4)), (4, 0, 0));
    assert_eq!(new.read(Direction::Egress).unwrap().counters.packets[6], 4);
    exempt(&mut other, "10.0.0.0/8");
    exempt(&mut new, "none");
    assert_eq!((sent(7, 4), sent(2, 4)), (0, 4));
}

/// What a group lends a limit of a pool ends in the program, for that limit and direction alone.
#[test]
fn root_police_match_a_rate_that_is_lent_ends() {
    if !is_root("root_police_match_a_rate_that_is_lent_ends") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let programs = load(&mut storage, false, None).unwrap();
    let pool = maps_of(&programs).unwrap();
    let (fast, slow): (Rate, Rate) = ("10gbit".parse().unwrap(), "8kbit".parse().unwrap());
    // Two frames, which are there again at once at a high rate, and in seconds at a low one.
    let asked = |matched: &str| limit(matched, 2 * FRAME_BYTES as u64);
    let put = |index, matched: &str| {
        let mut maps = take(&pool, index);
        change(&mut maps, &asked(matched)).unwrap();
        for direction in [Direction::Egress, Direction::Ingress] {
            assert!(maps.set_rate(&asked(matched), direction, fast, None).unwrap());
        }
        maps
    };
    let (one, other) = (put(0, "10.0.0.1"), put(CHUNK + 1, "10.0.0.2"));
    // Of five frames, what became of the last that did not pass.
    let last = |is_out: bool, host: u8| {
        let host = [10, 0, 0, host];
        let frame = if is_out { v4(FAR, host) } else { v4(host, FAR) };
        let program = if is_out { &programs.progs.match_out } else { &programs.progs.match_in };
        let input = || ProgramInput { data_in: Some(&frame), ..Default::default() };
        let verdicts = (0..5).map(|_| {
            wait_to_earn(FRAME_BYTES as u64, fast);
            program.test_run(input()).unwrap().return_value
        });
        verdicts.fold(PASSED, |seen, verdict| if verdict == PASSED { seen } else { verdict })
    };
    let now = boottime_ns();
    for (maps, ended) in [(&one, [DROPPED, PASSED]), (&other, [PASSED, DROPPED])] {
        let lend = |until| {
            let lease = Lease { until: Nanos(until), then: slow };
            assert!(maps.set_rate(&asked("none"), Direction::Egress, fast, Some(lease)).unwrap());
        };
        assert_eq!([last(true, 1), last(true, 2)], [PASSED; 2]);
        lend(now + 3_600_000_000_000);
        assert_eq!([last(true, 1), last(true, 2)], [PASSED; 2]);
        lend(now - 1);
        assert_eq!([last(true, 1), last(true, 2)], ended);
        assert_eq!([last(false, 1), last(false, 2)], [PASSED; 2], "the other direction goes on");
        assert_eq!(maps.limit().unwrap().rate(Direction::Egress), Some(slow));
        assert!(maps.set_rate(&asked("none"), Direction::Egress, fast, None).unwrap());
    }
    // Who comes after it in its place finds nothing of it.
    let lease = Lease { until: Nanos(now - 1), then: slow };
    assert!(one.set_rate(&asked("none"), Direction::Egress, fast, Some(lease)).unwrap());
    vacate(one.own.place().unwrap(), &one).unwrap();
    put(0, "10.0.0.1");
    assert_eq!([last(true, 1), last(true, 2)], [PASSED; 2]);
}

/// The lists of lengths are bounded, kept in order, and forget what nobody has.
#[test]
fn root_police_match_lengths_are_bounded() {
    if !is_root("root_police_match_lengths_are_bounded") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let programs = load(&mut storage, false, None).unwrap();
    let pool = maps_of(&programs).unwrap();
    let mut maps = take(&pool, 0);
    let all: Vec<_> = (1..=17).map(|bits| format!("128.0.0.0/{bits}")).collect();
    let of = |list: &[String]| limit(&list.join(","), 10_000);
    change(&mut maps, &of(&all[..16])).unwrap();
    let before = maps.limit().unwrap();
    let error = change(&mut maps, &of(&all)).unwrap_err().to_string();
    assert!(error.contains("16 different lengths already"), "{error}");
    assert_eq!(maps.limit().unwrap(), before, "nothing has changed");
    assert!(maps.own.place().unwrap().is_entered(&before));
    // IPv6 has its own.
    change(&mut maps, &limit("2001:db8::/32", 10_000)).unwrap();
    change(&mut maps, &of(&all[1..])).unwrap();
    assert!(maps.own.place().unwrap().is_entered(&maps.limit().unwrap()));
}

/// A change that fails leaves prefixes, settings and exemptions as they were.
#[test]
fn root_police_match_a_change_that_fails_is_undone() {
    if !is_root("root_police_match_a_change_that_fails_is_undone") {
        return;
    }
    let mut storage = MaybeUninit::uninit();
    let programs = load(&mut storage, false, None).unwrap();
    let pool = maps_of(&programs).unwrap();
    let mut maps = take(&pool, 0);
    let counted = |maps: &LimitMaps| maps.read(Direction::Egress).unwrap().counters.packets[0];
    let send = |maps: &LimitMaps, host: u8| {
        let (frame, before) = (v4(FAR, [10, 0, 0, host]), counted(maps));
        let input = ProgramInput { data_in: Some(&frame), ..Default::default() };
        let verdict = programs.progs.match_out.test_run(input).unwrap().return_value;
        (verdict, counted(maps) - before)
    };
    change(&mut maps, &limit("10.0.0.1", 1 << 18)).unwrap();
    let earlier = maps.limit().unwrap();
    assert_eq!((send(&maps, 1), send(&maps, 2)), ((PASSED, 1), (PASSED, 0)));

    // Other limits have all of the trie.
    let full = trie_of(1);
    crate::exempt::fill(&full, &"192.0.2.1".parse().unwrap(), 7).unwrap();
    let own: &mut dyn std::any::Any = &mut *maps.own;
    own.downcast_mut::<super::Policer>().unwrap().place.as_mut().unwrap().exempts = full;
    let exempt = "198.51.100.0/24".parse().unwrap();
    change(&mut maps, &LimitOptions { exempt, ..limit("10.0.0.2", 1 << 17) }).unwrap_err();
    assert_eq!((send(&maps, 1), send(&maps, 2)), ((PASSED, 1), (PASSED, 0)));
    assert!(maps.own.place().unwrap().is_entered(&earlier));
    let now = maps.limit().unwrap();
    // But for the time: a packet that has met the refused policy must not find an older one.
    assert!(now.police[0].since_ns > earlier.police[0].since_ns);
    assert_eq!(intf::Entry { police: earlier.police, ..now }, earlier);
}
