use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    thread,
};

use clap::Parser;

use super::*;
use crate::tools::http3;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: LoadArgs,
}

fn args(server: SocketAddr, protocol: Protocol) -> LoadArgs {
    LoadArgs {
        server,
        protocol,
        path: "/5".into(),
        clients: 3,
        rate_hz: None,
        lead: LEAD,
        duration: Duration::from_millis(200),
        drain: Duration::from_secs(30),
    }
}

/// Answers each request of a connection as `reply` says; none: it stays silent.
fn serve(reply: &'static [u8], end: &'static [u8], per_connection: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answer = move |mut stream: TcpStream| {
        let (mut request, mut byte) = (Vec::new(), [0]);
        for _ in 0..per_connection {
            request.clear();
            while !request.ends_with(end) {
                match stream.read(&mut byte) {
                    Ok(1) => request.extend(byte),
                    _ => return,
                }
            }
            // In two pieces.
            let (head, body) = reply.split_at(reply.len() / 2);
            let _ = stream.write_all(head).and_then(|()| stream.write_all(body));
        }
    };
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(stream));
        }
    });
    address
}

const HTTP: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";

#[test]
fn words_come_back_as_they_went() {
    let mut args = args("[fd77::2]:80".parse().unwrap(), Protocol::HttpClose);
    for rate_hz in [None, Some(500)] {
        args.rate_hz = rate_hz;
        let words = args.to_words().unwrap();
        let line = Line::try_parse_from([&["load".to_owned()], &words[..]].concat()).unwrap();
        assert_eq!(line.args, args);
    }
}

#[test]
fn every_request_is_answered_once() {
    for (protocol, address) in [
        (Protocol::HttpClose, serve(HTTP, b"\r\n\r\n", 1)),
        (Protocol::HttpKeep, serve(HTTP, b"\r\n\r\n", usize::MAX)),
        (Protocol::Redis, serve(b"$3\r\nabc\r\n", b"key\r\n", usize::MAX)),
    ] {
        let report = run(&args(address, protocol)).unwrap();
        assert!(report.answered >= 3, "{report:?}");
        assert_eq!((report.unanswered, report.errors), (0, 0), "{protocol:?}");
        assert_eq!(report.latency.count, report.requests());
        let counted: u64 = report.histogram_us.iter().map(|(_, count)| count).sum();
        assert_eq!(counted, report.requests());
        let reply = if protocol == Protocol::Redis { 9.0 } else { HTTP.len() as f64 };
        assert_eq!(report.reply_bytes, reply);
        assert_eq!(report.slower_than(0.0), report.requests());
        assert_eq!(report.slower_than(report.latency.max_us), 0);
    }
}

#[test]
fn every_request_over_http3_is_answered_once() {
    let server = http3::serve_here(|endpoint| http3::answer(endpoint, vec![0; 10_000].into()));
    for rate_hz in [None, Some(100)] {
        let report = run(&LoadArgs { rate_hz, ..args(server, Protocol::Http3) }).unwrap();
        assert!(report.answered >= 3, "{report:?}");
        assert_eq!((report.unanswered, report.errors), (0, 0), "{report:?}");
        assert_eq!(report.reply_bytes, 10_000.0);
        assert!(rate_hz.is_none() || report.answered == 20, "{report:?}");
    }
}

#[test]
fn a_quic_connection_that_closes_is_made_again() {
    let server = http3::serve_here(async |endpoint| {
        while let Some(incoming) = endpoint.accept().await {
            let connection = incoming.await.unwrap();
            tokio::spawn(http3::answer_one(connection.clone(), b"hello".as_slice().into()));
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(60)).await;
                connection.close(0u8.into(), b"");
            });
        }
    });
    let args = LoadArgs { rate_hz: Some(100), ..args(server, Protocol::Http3) };
    let report = run(&args).unwrap();
    assert_eq!((report.answered, report.unanswered), (20, 0), "{report:?}");
    assert!(report.errors > 0, "{report:?}");
}

#[test]
fn a_quic_server_that_refuses_is_an_error() {
    let server = http3::serve_here(async |endpoint| {
        while let Some(incoming) = endpoint.accept().await {
            incoming.refuse();
        }
    });
    let error = run(&args(server, Protocol::Http3)).unwrap_err();
    assert_eq!(format!("{error:#}"), format!("cannot connect to {server}: a connection broke"));
}

#[test]
fn a_kept_connection_that_closes_is_made_again() {
    let address = serve(HTTP, b"\r\n\r\n", 2);
    let args = LoadArgs { rate_hz: Some(100), ..args(address, Protocol::HttpKeep) };
    let report = run(&args).unwrap();
    // Three clients would have six replies of their first connections.
    assert_eq!((report.answered, report.unanswered), (20, 0));
}

#[test]
fn an_open_loop_sends_what_is_due_and_no_more() {
    let address = serve(HTTP, b"\r\n\r\n", 1);
    let args = LoadArgs { rate_hz: Some(100), ..args(address, Protocol::HttpClose) };
    let report = run(&args).unwrap();
    assert_eq!((report.answered, report.unanswered), (20, 0));
}

#[test]
fn a_silent_server_is_counted() {
    // The listener's queue takes the connections, and nobody answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.local_addr().unwrap();
    let silent = LoadArgs { drain: Duration::ZERO, ..args(server, Protocol::HttpClose) };
    let report = run(&silent).unwrap();
    assert_eq!((report.answered, report.unanswered), (0, 3));
    assert_eq!(report.slower_than(0.0), 3, "they have waited since the start");
    // Of the 20 that are due, 3 find a client.
    let report = run(&LoadArgs { rate_hz: Some(100), ..silent }).unwrap();
    assert_eq!((report.answered, report.unanswered), (0, 20));
}

#[test]
fn a_lost_datagram_is_sent_again() {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let server = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2000];
        // The first is lost.
        let _ = socket.recv_from(&mut buffer);
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..len], from);
        }
    });
    let report = run(&args(server, Protocol::Datagram)).unwrap();
    assert_eq!((report.unanswered, report.retries), (0, 1), "{report:?}");
}
