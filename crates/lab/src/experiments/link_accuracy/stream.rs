//! A stream of numbered datagrams, open loop, whose departure and arrival are known to the microsecond:
//! when the sender handed each to the kernel, and when the kernel had received it (`SO_TIMESTAMPNS`), on
//! one clock.
//!
//! Gaps are exponential, from a seed; the sender wakes every [`TICK`] and sends what is due, so that it
//! needs no CPU of its own: what goes into the link are small bursts, at times that are known.

use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng as _, SeedableRng as _},
};
use rustix::{
    net::sockopt::{set_socket_recv_buffer_size_force, set_socket_send_buffer_size_force},
    thread::clock_nanosleep_relative,
    time::{ClockId, Timespec, clock_gettime},
};
use tidegate_instruments::sock::{recv_stamped, stamp_received};
use tidegate_sys::sched::make_realtime;

use crate::testbed::{Family, Testbed, wait};

const NS_PER_S: u64 = 1_000_000_000;
/// How often the sender looks at its schedule.
const TICK: Duration = Duration::from_micros(200);
/// Ethernet, IPv4 and UDP.
const HEADER_BYTES: u32 = 14 + 20 + 8;
/// Room for half a second of the fastest stream while the receiving thread has no CPU.
const BUFFER_BYTES: usize = 128 << 20;
/// The kernel begins to stamp arrivals a moment after it was asked; until then it stamps when they are read.
const LEAD: Duration = Duration::from_millis(50);
const RECEIVE_POLL: Duration = Duration::from_millis(20);
/// The book has two times for each datagram.
const DATAGRAMS_MAX: u64 = 4_000_000;
const PORT: u16 = 7002;

/// What is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream {
    /// Mean rate on the wire.
    pub(super) bit_s: u64,
    /// Payload of a datagram.
    pub(super) payload_bytes: usize,
    pub(super) duration: Duration,
    /// Longest time that a datagram may take.
    pub(super) drain: Duration,
    pub(super) seed: u64,
}

/// One datagram, in nanoseconds of the clock of the day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Passage {
    pub(super) sent_ns: u64,
    /// None: it did not arrive.
    pub(super) received_ns: Option<u64>,
}

impl Stream {
    /// Bytes of a datagram on the wire.
    pub(super) fn frame_bytes(&self) -> u32 {
        self.payload_bytes as u32 + HEADER_BYTES
    }

    /// Sends it from the testbed's sender to its first receiver. Every datagram, in the order of departure.
    pub(super) fn run(&self, testbed: &Testbed) -> anyhow::Result<Vec<Passage>> {
        let count =
            self.bit_s as f64 * self.duration.as_secs_f64() / 8.0 / f64::from(self.frame_bytes());
        ensure!((1.0..=DATAGRAMS_MAX as f64).contains(&count), "{count} datagrams are no stream");
        let any: SocketAddr = ([0; 4], 0).into();
        let to = SocketAddr::new(testbed.addr(0, Family::V4), PORT);
        let receiver = testbed.receiver(0).run(|| UdpSocket::bind(to))??;
        let sender = testbed.sender().run(|| UdpSocket::bind(any))??;
        sender.connect(to)?;
        sender.set_nonblocking(true)?;
        receiver.set_read_timeout(Some(RECEIVE_POLL))?;
        stamp_received(&receiver)?;
        wait::pass_time(LEAD)?;
        set_socket_recv_buffer_size_force(&receiver, BUFFER_BYTES)
            .and_then(|()| set_socket_send_buffer_size_force(&sender, BUFFER_BYTES))
            .context("cannot size the buffers")?;
        let (count, sent_all) = (count as usize, AtomicBool::new(false));
        let (sent, received) = thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let outcome = self.send(&sender, count);
                sent_all.store(true, Ordering::Release);
                outcome
            });
            let receiving = scope.spawn(|| self.receive(&receiver, count, &sent_all));
            (sending.join(), receiving.join())
        });
        let panicked = |_| anyhow!("a thread of the stream panicked");
        let (sent, received) = (sent.map_err(panicked)??, received.map_err(panicked)??);
        let passage = |(sent_ns, received_ns): (u64, u64)| Passage {
            sent_ns,
            received_ns: (received_ns > 0).then_some(received_ns),
        };
        Ok(sent.into_iter().zip(received).map(passage).collect())
    }

    /// Returns when each left.
    fn send(&self, socket: &UdpSocket, count: usize) -> anyhow::Result<Vec<u64>> {
        let _ = make_realtime();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(self.seed);
        let mean_ns = f64::from(self.frame_bytes()) * 8.0 * NS_PER_S as f64 / self.bit_s as f64;
        let mut sent = Vec::with_capacity(count);
        let mut packet = vec![0; self.payload_bytes];
        let mut due_ns = now_ns() as f64;
        while sent.len() < count {
            let now = now_ns();
            if now as f64 >= due_ns {
                packet[..8].copy_from_slice(&(sent.len() as u64).to_be_bytes());
                sent.push(now);
                socket.send(&packet).context("the stream was held up")?;
                // 53 bits, none of them all zero: the logarithm is finite.
                let uniform = ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
                due_ns -= mean_ns * uniform.ln();
                continue;
            }
            if wait::interrupted() {
                break;
            }
            let tick = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as _ };
            let _ = clock_nanosleep_relative(ClockId::Monotonic, &tick);
        }
        Ok(sent)
    }

    /// Returns when each came; 0: not.
    fn receive(
        &self,
        socket: &UdpSocket,
        count: usize,
        sent_all: &AtomicBool,
    ) -> anyhow::Result<Vec<u64>> {
        let mut received = vec![0; count];
        let mut buffer = vec![0; self.payload_bytes];
        let (mut missing, mut deadline) = (count, None);
        while missing > 0 {
            if sent_all.load(Ordering::Acquire) {
                let at = *deadline.get_or_insert_with(|| Instant::now() + self.drain);
                if Instant::now() >= at {
                    break;
                }
            }
            match recv_stamped(socket, &mut buffer) {
                Ok((_, stamp_ns)) => {
                    let number = buffer.first_chunk().map_or(u64::MAX, |n| u64::from_be_bytes(*n));
                    let place = usize::try_from(number).ok().and_then(|n| received.get_mut(n));
                    if let (Some(place), Some(stamp_ns)) = (place, stamp_ns) {
                        *place = stamp_ns;
                        missing -= 1;
                    }
                }
                Err(e) => match e.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                    _ => return Err(e.into()),
                },
            }
        }
        Ok(received)
    }
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec as u64 * NS_PER_S + now.tv_nsec as u64
}
