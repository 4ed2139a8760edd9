//! The receive window as a limiter of ingress (the `pace` scheme).
//!
//! TCP sends up to the right edge of the window that the receiver offers. Here that edge moves at the flow's
//! share of the limit ([`crate::fair_share`]) whenever an ACK is built:
//!
//! ```text
//!   credit += rate x (now - last) - received      how far the edge lies beyond what has arrived
//!   credit  = clamp(credit, -most, most)          most = rate x (1.25 RTT + 2 ms) + 2 segments
//!   window  = max(credit, 2 segments)
//! ```
//!
//! So a flow that uses all it is granted sends at exactly that rate, on a path of any length, and its window
//! becomes rate x RTT. The round trip only bounds what an idle flow may send at once. An estimate that is too
//! long only makes that burst longer.
//!
//! The least window is two segments: with less, TCP delays its ACK, and the flow stops meanwhile. What that
//! grants beyond the rate makes the credit negative, by `most` at the longest. A path so short that two
//! segments a round trip are more than the share cannot be limited this way, and is left to the virtual
//! queue.
//!
//! If a program asks and gets replies over a short round trip, no window slows it down. Its requests are
//! paced instead: TCP keeps the next request back until a part of the debt is paid. So the program receives
//! its share, and none of its replies needs to be dropped. TCP paces nothing before its eleventh segment:
//! what was received until then is part of the debt, too. The debt is in bytes, since the share is small
//! while many connections begin.
//!
//! O(1) an ACK; 32 bytes a flow. The kernel's copy is `bpf/nrm/rwnd.h`.

use crate::units::{NANOS_PER_SEC, Nanos};

/// Upper bound of a time.
pub const MAX_TIME: Nanos = Nanos(NANOS_PER_SEC);
/// The longest round trip that the virtual queue makes room for.
pub const MAX_ROOM: Nanos = Nanos(200_000_000);
/// Upper bound of a rate, in bytes a second: 100 Gbit/s.
pub const MAX_BYTE_S: u64 = 12_500_000_000;
/// The largest window that TCP can express, in bytes.
pub const MAX_BYTES: u64 = 1 << 30;
/// Beyond a round trip a flow may be granted this much of its rate at once: hosts stall.
pub const SLACK: Nanos = Nanos(2_000_000);
/// The least window, in segments.
pub const LEAST_SEGMENTS: u64 = 2;
/// The first window of a connection is this much of its rate.
pub const FIRST: Nanos = Nanos(2_000_000);
/// But no fewer segments than this.
pub const FIRST_SEGMENTS: u64 = 4;
/// And no more: 64 KB, the kernel's default.
pub const FIRST_SEGMENTS_MAX: u64 = 45;
/// A flow pays its debt in this many parts, one before each request. Otherwise the debt from before it could
/// be kept back would be one long wait.
pub const PAYMENTS: u64 = 4;
/// No flow waits longer before it asks.
pub const WAIT_MAX: Nanos = Nanos(200_000_000);
/// Upper bound of a flow's debt, as a time.
pub const DEBT_MAX: Nanos = Nanos(4 * NANOS_PER_SEC);

/// The inputs when an ACK is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// The flow's share of the limit, payload alone, in bytes a second.
    pub byte_s: u64,
    /// Round-trip time, the longest of the known ones.
    pub rtt: Nanos,
    /// Payload of a full segment in bytes.
    pub mss: u32,
    /// Sequence number up to which everything has arrived.
    pub rcv_nxt: u32,
}

impl Path {
    /// The most that a flow may have been granted beyond what it sent, and its largest negative credit, in
    /// bytes.
    #[must_use]
    pub fn most(&self) -> u64 {
        let rtt = self.rtt.min(MAX_TIME);
        let time = Nanos(rtt.0 + rtt.0 / 4 + SLACK.0);
        (bytes(self.byte_s, time) + LEAST_SEGMENTS * u64::from(self.mss)).min(MAX_BYTES)
    }
}

/// The window of one flow.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveWindow {
    /// When the edge was last moved; zero: never.
    pub last: Nanos,
    /// How far the edge is beyond what was received, in bytes; negative: that was granted early.
    pub credit: i64,
    /// The sequence number up to which data had been received then.
    pub rcv_nxt: u32,
    /// Its debt in bytes when the edge was last moved ([`Self::owes`]).
    pub debt_bytes: u32,
    /// Its share then, in bytes a second.
    pub byte_s: u64,
}

impl ReceiveWindow {
    /// The window of the ACK that is built at `now`, in bytes.
    pub fn window(&mut self, path: &Path, now: Nanos) -> u32 {
        let most = path.most() as i64;
        let least = (LEAST_SEGMENTS * u64::from(path.mss)).min(path.most()) as i64;
        let elapsed = Nanos(now.0.saturating_sub(self.last.0));
        // Times up to that of the largest debt count; short ones without a rounded quotient.
        let parts = if elapsed > MAX_TIME { DEBT_MAX.0 / MAX_TIME.0 } else { 1 };
        let paid = parts * bytes(self.byte_s, Nanos(elapsed.0 / parts));
        let mut debt = u64::from(self.debt_bytes).saturating_sub(paid);
        if self.last.0 == 0 {
            self.credit = most;
        } else {
            let received = path.rcv_nxt.wrapping_sub(self.rcv_nxt);
            self.credit += bytes(path.byte_s, elapsed) as i64;
            self.credit -= i64::from(received);
            debt += u64::from(received);
        }
        self.byte_s = path.byte_s.min(MAX_BYTE_S);
        let debt_max = self.byte_s * (DEBT_MAX.0 / NANOS_PER_SEC);
        self.debt_bytes = debt.min(debt_max).min(MAX_BYTES) as u32;
        self.credit = self.credit.clamp(-most, most);
        self.last = now;
        self.rcv_nxt = path.rcv_nxt;
        self.credit.max(least) as u32
    }

    /// The pacing rate, in bytes a second, at which `payload` bytes sent at `now` delay the data behind them
    /// for as long as the flow waits; `None`: it does not wait.
    #[must_use]
    pub fn asking_byte_s(&self, payload: u32, now: Nanos) -> Option<u64> {
        let wait = self.waits(now).0;
        (wait > 0).then(|| u64::from(payload) * NANOS_PER_SEC / wait)
    }

    /// How long the flow waits before it asks again.
    #[must_use]
    pub fn waits(&self, now: Nanos) -> Nanos {
        Nanos(self.owes(now).0 / PAYMENTS).min(WAIT_MAX)
    }

    /// The debt as a time: how long the flow would have to be silent at `now` for what it has received to be
    /// its share. The debt is in bytes, so it is paid sooner if the share grows.
    #[must_use]
    pub fn owes(&self, now: Nanos) -> Nanos {
        let debt = u64::from(self.debt_bytes) * NANOS_PER_SEC / self.byte_s.max(1);
        Nanos(debt.min(DEBT_MAX.0).saturating_sub(now.0.saturating_sub(self.last.0)))
    }
}

/// The first window of a connection, in segments.
#[must_use]
pub fn first_segments(byte_s: u64, mss: u32) -> u32 {
    let segments = bytes(byte_s, FIRST) / u64::from(mss.max(1));
    segments.clamp(FIRST_SEGMENTS, FIRST_SEGMENTS_MAX) as u32
}

/// The backlog of the virtual queue behind windows as it is judged, in nanoseconds. All windows may be sent
/// at once, which is a round trip's worth above the mark threshold.
#[must_use]
pub fn judged_ns(backlog_ns: i64, mark: Nanos, rtt: Nanos) -> i64 {
    let mark = mark.0 as i64;
    if backlog_ns <= mark { backlog_ns } else { mark.max(backlog_ns - rtt.min(MAX_ROOM).0 as i64) }
}

/// The burst time of each flow for the length of an epoch ([`crate::fair_share::epoch_length`]), so that each
/// is seen in it: a flow may send its window at once.
#[must_use]
pub fn burst(rtt: Nanos, flows: u32) -> Nanos {
    Nanos(rtt.min(MAX_TIME).0 / (2 * u64::from(flows.max(1))))
}

fn bytes(byte_s: u64, time: Nanos) -> u64 {
    byte_s.min(MAX_BYTE_S) * time.min(MAX_TIME).0 / NANOS_PER_SEC
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const MSS: u32 = 1448;

    /// A greedy sender over a path of `rtt` that sends whole segments at once whenever the window lets it;
    /// returns the bytes a second that arrive after a second of settling.
    fn greedy(byte_s: u64, rtt: Nanos, estimate: Nanos) -> f64 {
        let mut window = ReceiveWindow::default();
        let (mut sent, mut received, mut settled) = (0u64, 0u64, 0u64);
        let mut edge = 10 * u64::from(MSS);
        // Bytes in flight, by when they arrive; an ACK reaches the sender a round trip after it sent.
        let mut under_way = VecDeque::new();
        let mut now = Nanos(1);
        while now.0 < 4 * NANOS_PER_SEC {
            let segments = (edge - sent) / u64::from(MSS);
            if segments > 0 {
                sent += segments * u64::from(MSS);
                under_way.push_back((Nanos(now.0 + rtt.0), sent));
            }
            let Some((at, upto)) = under_way.pop_front() else { panic!("the flow stands still") };
            now = at;
            received = received.max(upto);
            let path = Path { byte_s, rtt: estimate, mss: MSS, rcv_nxt: received as u32 };
            edge = edge.max(received + u64::from(window.window(&path, now)));
            if now.0 < NANOS_PER_SEC {
                settled = received;
            }
        }
        (received - settled) as f64 / 3.0
    }

    #[test]
    fn a_greedy_flow_gets_its_rate_on_any_path() {
        for byte_s in [500_000, 5_000_000, 100_000_000] {
            for rtt_us in [100, 1000, 10_000, 40_000, 200_000] {
                let rtt = Nanos(rtt_us * 1000);
                if bytes(byte_s, rtt) < LEAST_SEGMENTS * u64::from(MSS) {
                    continue;
                }
                for estimate in [rtt, Nanos(2 * rtt.0), Nanos(10 * rtt.0)] {
                    let path = Path { byte_s, rtt: estimate, mss: MSS, rcv_nxt: 0 };
                    // What is granted at once may fall on either side of the ends of the measurement.
                    let slack = 0.01 * byte_s as f64 + path.most() as f64 / 3.0;
                    let off = greedy(byte_s, rtt, estimate) - byte_s as f64;
                    assert!(off.abs() < slack, "{path:?} over {rtt}: {off} B/s off");
                }
            }
        }
    }

    /// A program that asks as soon as it has its reply, whose requests TCP paces: what it receives a second,
    /// and its longest wait.
    fn asking(byte_s: u64, reply: u32, rtt: Nanos) -> (f64, Nanos) {
        const REQUEST: u32 = 100;
        let mut window = ReceiveWindow::default();
        let (mut now, mut received, mut longest) = (Nanos(1), 0u32, Nanos(0));
        let mut last = now;
        let end = Nanos(10 * NANOS_PER_SEC);
        while now < end {
            let path = Path { byte_s, rtt, mss: MSS, rcv_nxt: received };
            window.window(&path, now);
            let wait = window
                .asking_byte_s(REQUEST, now)
                .map_or(0, |rate| u64::from(REQUEST) * NANOS_PER_SEC / rate.max(1));
            // TCP takes up to half of a wait off for the time since its last send.
            let next = Nanos(now.0 + wait - (wait / 2).min(now.0 - last.0));
            last = now;
            received = received.wrapping_add(reply);
            longest = longest.max(Nanos(next.0 - now.0));
            now = Nanos(next.0.max(now.0 + rtt.0));
        }
        (f64::from(received) / (now.0 as f64 / 1e9), longest)
    }

    #[test]
    fn who_asks_receives_its_share() {
        for byte_s in [100_000, 1_000_000, 100_000_000] {
            for reply in [100, 1000, 10_000] {
                for rtt_us in [10, 20, 1000] {
                    let rtt = Nanos(rtt_us * 1000);
                    let free = f64::from(reply) / (rtt_us as f64 / 1e6);
                    let (got, longest) = asking(byte_s, reply, rtt);
                    let want = free.min(byte_s as f64);
                    let fair = 0.9 * want..=1.05 * want + f64::from(reply);
                    assert!(fair.contains(&got), "{byte_s} B/s, {reply} bytes, {rtt}: {got}");
                    assert!(longest <= WAIT_MAX, "{byte_s} B/s, {reply} bytes, {rtt}: {longest}");
                }
            }
        }
    }

    #[test]
    fn silence_pays_the_debt() {
        for byte_s in [125_000, 1_000_000, MAX_BYTE_S / 50] {
            let mut window = ReceiveWindow::default();
            let mut path = Path { byte_s, rtt: Nanos(50_000), mss: MSS, rcv_nxt: 0 };
            window.window(&path, Nanos(1));
            path.rcv_nxt = 5 * byte_s as u32;
            window.window(&path, Nanos(2));
            assert_eq!(window.owes(Nanos(2)), DEBT_MAX);
            for silent in [DEBT_MAX.0 / 2, DEBT_MAX.0 / 4, DEBT_MAX.0 / 4] {
                let now = Nanos(window.last.0 + silent);
                let before = window.owes(now);
                window.window(&path, now);
                assert_eq!(window.owes(now), before, "{byte_s} B/s, {silent} ns of silence");
            }
            assert_eq!(window.waits(window.last), Nanos(0));
        }
    }

    #[test]
    fn a_path_that_is_too_short_gets_two_segments_a_round_trip() {
        let got = greedy(500_000, Nanos(1_000_000), Nanos(1_000_000));
        assert!((got - 2.0 * 1_448_000.0).abs() < 50_000.0, "{got}");
    }

    #[test]
    fn a_round_trip_above_the_mark_is_no_backlog() {
        let judged = |backlog| judged_ns(backlog, Nanos(16), Nanos(40));
        assert_eq!([-5, 16, 17, 56, 57, 80].map(judged), [-5, 16, 16, 16, 17, 40]);
    }

    #[test]
    fn the_first_window_follows_the_rate() {
        assert_eq!(first_segments(100_000, MSS), 4);
        assert_eq!(first_segments(14_480_000, MSS), 20);
        assert_eq!(first_segments(MAX_BYTE_S, MSS), 45);
        assert_eq!(first_segments(1_000_000, 0), 45);
    }

    proptest! {
        /// Whatever is measured, no ACK closes the window below two segments or opens it beyond the bound.
        #[test]
        fn the_window_keeps_its_bounds(
            byte_s: u64, rtt: u64, mss in 1u32..70_000,
            steps in prop::collection::vec((any::<u64>(), any::<u32>()), 1..50),
        ) {
            let mut window = ReceiveWindow::default();
            for (now, rcv_nxt) in steps {
                let path = Path { byte_s, rtt: Nanos(rtt), mss, rcv_nxt };
                let offered = u64::from(window.window(&path, Nanos(now)));
                prop_assert!((2 * u64::from(mss)..=path.most()).contains(&offered));
            }
        }

        /// Over any time a flow is granted no more than its rate, what it may have at once, and its debt.
        #[test]
        fn no_more_is_granted_than_the_rate(
            byte_s in 10_000u64..1_000_000_000, steps in prop::collection::vec(1u64..100_000_000, 1..200),
        ) {
            let mut window = ReceiveWindow::default();
            let (mut now, mut edge) = (Nanos(1), 0u64);
            let path = |received: u64| Path {
                byte_s, rtt: Nanos(10_000_000), mss: MSS, rcv_nxt: received as u32,
            };
            let (mut forced, mut received) = (0, 0);
            for gap in steps {
                now = Nanos(now.0 + gap);
                received = edge;
                edge = received + u64::from(window.window(&path(received), now));
                forced += u64::from(window.credit < i64::from(2 * MSS)) * u64::from(2 * MSS);
            }
            let allowed = bytes(byte_s, MAX_TIME) as f64 * now.0 as f64 / 1e9;
            let most = path(0).most() as f64;
            prop_assert!(received as f64 <= allowed + 2.0 * most + forced as f64, "{received} {allowed}");
        }
    }
}
