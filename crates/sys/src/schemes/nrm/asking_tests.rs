//! Programs that ask and wait for the reply, in an ingress limit: loaded, with connections over loopback.

use std::{
    env,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Instant,
};

use tidegate_core::{Direction, Rate, queue_options::VirtualQueueOptions};

use super::{
    tree_tests::{Nest, process_in, queue_of},
    *,
};
use crate::{intf, limit::AttachedLimit};

/// In the process that the test starts: the server that it asks.
const SERVER: &str = "TIDEGATE_TEST_ASKS";
/// There, if each request is to have a connection of its own.
const CLOSES: &str = "TIDEGATE_TEST_CLOSES";
/// How many requests each client makes.
const REQUESTS: &str = "TIDEGATE_TEST_REQUESTS";
const CLIENTS: usize = 4;
/// A segment of the loopback interface has 64 KB, and half of one takes a second at the least rate.
const REQUEST: [u8; 4000] = [7; 4000];
const REPLY: usize = 1000;

/// The process in the limit, not a test of its own: asks as fast as it gets replies.
#[test]
fn asks() {
    let Ok(server) = env::var(SERVER) else { return };
    let closes = env::var_os(CLOSES).is_some();
    let requests: usize = env::var(REQUESTS).unwrap().parse().unwrap();
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                let mut stream = TcpStream::connect(&server).unwrap();
                for i in 0..requests {
                    if closes && i > 0 {
                        stream = TcpStream::connect(&server).unwrap();
                    }
                    stream.write_all(&REQUEST).unwrap();
                    stream.read_exact(&mut [0; REPLY]).unwrap();
                }
            });
        }
    });
}

/// Four clients want hundreds of times their share, and no reply is dropped for that.
#[test]
fn root_who_asks_waits_and_no_reply_is_dropped() {
    const TEST: &str = "root_who_asks_waits_and_no_reply_is_dropped";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    ask(false, 5_000_000, 300);
    // So slow that each connection waits, however slow the machine is.
    let turns = ask(true, 500_000, 25);
    assert!(turns.held > 0, "no SYN was held: {turns:?}");
    let average = u64::from(turns.average >> 6);
    assert!((REPLY as u64 / 2..=2 * REPLY as u64).contains(&average), "{turns:?}");
}

/// Returns the turns of new connections after all requests.
fn ask(closes: bool, bit_s: u64, requests: usize) -> intf::Turns {
    let nest = Nest::new("asks", 1);
    let (hierarchy, group) = (&nest.hierarchy, &nest.groups[0]);
    let rate = Rate::from_bit_s(bit_s).unwrap();
    let queue = Some(VirtualQueueOptions::new(rate));
    let options = LimitOptions { ingress: queue, loopback: true, ..LimitOptions::default() };
    let limit = AttachedLimit::attach(hierarchy, group, &options, None).unwrap();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                while stream.read_exact(&mut [0; REQUEST.len()]).is_ok() {
                    if stream.write_all(&[7; REPLY]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    let started = Instant::now();
    let mut process = process_in(group, concat!(module_path!(), "::asks"));
    process.env(SERVER, server).env(REQUESTS, requests.to_string());
    if closes {
        process.env(CLOSES, "");
    }
    assert!(process.spawn().unwrap().wait().unwrap().success());
    let elapsed = started.elapsed().as_secs_f64();

    let reading = limit.maps.read(Direction::Ingress).unwrap();
    let counters = reading.counters;
    let (mut passed, mut dropped, mut bytes) = (0, 0, 0);
    for (i, outcome) in intf::OUTCOME_TABLE.iter().enumerate() {
        if outcome.passed {
            passed += counters.packets[i];
            bytes += counters.bytes[i];
        } else {
            dropped += counters.packets[i];
        }
    }
    assert!(passed >= (CLIENTS * requests) as u64, "{counters:?}");
    assert_eq!(dropped, 0, "{counters:?}");
    // However fast the machine: with the credit of those that begin.
    let most = rate.bit_s() as f64 / 8.0 * (elapsed + 0.2);
    assert!((bytes as f64) < most, "{bytes} bytes, at most {most}");
    let index = intf::index(Direction::Ingress);
    let turns = queue_of(&limit.maps, index).turns;
    limit.detach(hierarchy, group).unwrap();
    turns
}
