//! What holds a sender back, in one sentence. Pure, over what a sample has seen.
//!
//! In this order: no limit applies; none of them is enforced; the traffic is exempt; nothing was sent. Then,
//! of one flow, TCP's own account says most: a socket that uses its pacing rate is held by that; one
//! whose peer's window is full waits for its peer; one with nothing to send is held by its program. Of
//! several flows the fullest limit says it.

use std::fmt;

use serde::Serialize;
use tidegate_core::Scheme;

use super::{Applied, AppliedDirection};
use crate::{figures, plan::State, sockets::SocketSample};

/// A limit is full when this part of it was used.
const FULL: f64 = 0.9;
/// ... or when of the packets this part was marked, slowed or dropped.
const SIGNALLED: f64 = 0.01;
/// ... or this part dropped: TCP over a path of microseconds waits 200 ms for many of these.
const DROPPED: f64 = 0.002;
/// A socket uses its pacing rate when it sent at this part of it: what it holds back between bursts is lost.
const USES_PACE: f64 = 0.85;
/// A socket is busy, or waits for its peer, when it was so for this part of the sample.
const BUSY: f64 = 0.8;
const RECEIVER: f64 = 0.5;
/// What a program has set itself is far below what it might have.
const OWN_PACE: f64 = 0.5;

/// What holds a sender back.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Verdict {
    /// No limit applies.
    Unlimited,
    /// Limits apply, but none is in force.
    NotEnforced { limit: String },
    /// A limit on a cgroup further in is full.
    FurtherIn { limit: String, cgroup: String },
    /// What moves stays on the loopback device, which no limit here charges.
    Loopback { limit: String },
    /// Nothing was sent or received.
    Idle,
    /// The flows send at their pacing rate.
    Paced {
        limit: String,
        rate_bit_s: u64,
        /// What each flow may send.
        share_bit_s: u64,
        flows: u32,
    },
    /// A limit is full.
    Full {
        limit: String,
        /// `egress` or `ingress`.
        direction: &'static str,
        scheme: &'static str,
        rate_bit_s: u64,
        used_bit_s: u64,
        /// Packets marked or slowed in the sample.
        signalled_packets: u64,
        /// Packets dropped in the sample.
        dropped_packets: u64,
    },
    /// The receiver does not take more.
    Receiver {
        /// For which part of the sample its window was full.
        part: f64,
    },
    /// The program asked for a lower rate itself (`SO_MAX_PACING_RATE`).
    OwnPace { rate_bit_s: u64 },
    /// The connection's window is full, below what the limits allow: its path is long or loses packets, or,
    /// on a short one, `pace` keeps the window small.
    Window {
        congestion_control: String,
        cwnd_segments: u32,
        /// Segments retransmitted in the sample.
        retransmitted_segments: u32,
        /// How much of its share or of the limit is used.
        part: f64,
        limit: String,
    },
    /// The sender has no more to send.
    Sender {
        /// How much of its share or of the limit is used.
        part: f64,
        /// `share` of a flow, or the whole `limit`.
        of: &'static str,
        limit: String,
    },
}

/// A direction of a limit in force.
struct Held<'a> {
    limit: &'a Applied,
    direction: &'static str,
    now: &'a AppliedDirection,
}

impl Held<'_> {
    /// The direction for which it limits the subject.
    fn of_subject(&self) -> &'static str {
        match (self.limit.far_end, self.direction) {
            (false, direction) => direction,
            (true, "egress") => "ingress",
            (true, _) => "egress",
        }
    }

    fn used(&self) -> f64 {
        self.now.used_bit_s as f64 / self.now.now.may_use_bit_s().max(1) as f64
    }

    /// Packets that were marked, slowed or dropped, of all. With `spring` nearly every ACK is given a window,
    /// full or not.
    fn signalled(&self) -> f64 {
        let windows = self.limit.settings.scheme() == Scheme::Spring.name();
        let tells = |name| !(windows && name == "slow");
        let (slowed, _) = self.now.sample.of(|outcome| outcome.slows() && tells(outcome.name));
        let (all, _) = self.now.sample.of(|outcome| outcome.name != "exempt");
        slowed as f64 / all.max(1) as f64
    }

    fn drops(&self) -> bool {
        let (all, _) = self.now.sample.of(|outcome| outcome.name != "exempt");
        self.now.sample.dropped().0 as f64 / all.max(1) as f64 >= DROPPED
    }

    fn is_full(&self) -> bool {
        self.used() >= FULL || self.signalled() >= SIGNALLED || self.drops()
    }

    fn paces(&self) -> bool {
        self.limit.settings.scheme() == Scheme::Pace.name() && self.now.now.fair.is_some()
    }

    fn verdict(&self) -> Verdict {
        let limit = self.limit.name.clone();
        let rate_bit_s = self.now.now.may_use_bit_s();
        let is_paced = self.paces() && (self.used() >= FULL || !self.drops());
        match self.now.now.fair.filter(|_| is_paced) {
            Some(fair) => Verdict::Paced {
                limit,
                rate_bit_s,
                share_bit_s: fair.share_bit_s,
                flows: fair.flows,
            },
            None => Verdict::Full {
                limit,
                direction: self.direction,
                scheme: self.limit.settings.scheme(),
                rate_bit_s,
                used_bit_s: self.now.used_bit_s,
                signalled_packets: self.now.sample.of(|o| o.slows() && o.passed).0,
                dropped_packets: self.now.sample.dropped().0,
            },
        }
    }
}

/// Judges a sample of `limits`, innermost first, and of those of the `sockets` that were asked about. With
/// `of_cgroup` other traffic than TCP counts too, by what the limits have seen, and so do limits `inside` the
/// cgroup, which hold some of it.
pub fn judge(
    limits: &[Applied],
    inside: &[Applied],
    sockets: &[SocketSample],
    of_cgroup: bool,
) -> Verdict {
    let verdict = of_limits(limits, sockets, of_cgroup);
    let itself = matches!(
        verdict,
        Verdict::Unlimited | Verdict::Idle | Verdict::Window { .. } | Verdict::Sender { .. }
    );
    let full = |limit: &&Applied| held(std::slice::from_ref(*limit)).any(|h| h.is_full());
    let further_in = |limit: &Applied| Verdict::FurtherIn {
        limit: limit.name.clone(),
        cgroup: limit.scope.name().to_owned(),
    };
    inside.iter().filter(|_| itself).find(full).map_or(verdict, further_in)
}

/// The same of a flow that passes the queue of a limit, which no socket here need tell: a guest's kernel has
/// the other end.
pub fn or_of_queue(verdict: Verdict, passed: &Applied) -> Verdict {
    let held: Vec<_> = held(std::slice::from_ref(passed)).collect();
    let is_free = matches!(verdict, Verdict::Unlimited | Verdict::NotEnforced { .. });
    if is_free && !held.is_empty() { fullest(&held, None, &[]) } else { verdict }
}

/// The directions of the limits that are in force.
fn held(limits: &[Applied]) -> impl Iterator<Item = Held<'_>> {
    let in_force = limits.iter().filter(|l| matches!(l.state, State::InForce | State::NoFq));
    in_force.flat_map(|limit| {
        limit.directions().map(move |(direction, now)| Held { limit, direction, now })
    })
}

fn of_limits(limits: &[Applied], sockets: &[SocketSample], of_cgroup: bool) -> Verdict {
    let Some(innermost) = limits.first() else { return Verdict::Unlimited };
    let name = || innermost.name.clone();
    let in_force = || limits.iter().filter(|l| matches!(l.state, State::InForce | State::NoFq));
    if in_force().next().is_none() {
        return Verdict::NotEnforced { limit: name() };
    }
    let mut moving: Vec<_> = sockets.iter().filter(|s| s.asked && s.moved_bit_s() > 0).collect();
    // If both ends of a flow are here, the one that sends stands for it.
    let receives = |end: &SocketSample| {
        let sender = |other: &SocketSample| {
            (other.local, other.remote) == (end.remote, end.local)
                && other.sent_bit_s > end.sent_bit_s
        };
        sockets.iter().any(|other| other.asked && sender(other))
    };
    let all = moving.len();
    moving.retain(|end| !receives(end));
    let within = moving.len() < all;
    let held: Vec<_> = held(limits).collect();
    let charged = held.iter().any(|h| h.now.sample.of(|o| o.name != "exempt").0 > 0);
    let exempt = held.iter().any(|h| h.now.sample.packets_of("exempt") > 0);
    let counted = |s: &SocketSample| in_force().any(|l| l.settings.loopback() || !s.is_loopback());
    if !moving.is_empty() && !moving.iter().any(|s| counted(s)) {
        return Verdict::Loopback { limit: name() };
    }
    if moving.is_empty() {
        return match (of_cgroup, charged, exempt) {
            (true, true, _) => fullest(&held, None, &[]),
            (true, false, true) => Verdict::Loopback { limit: name() },
            _ => Verdict::Idle,
        };
    }
    let sum =
        |of: fn(&SocketSample) -> u64| moving.iter().map(|s| of(s)).fold(0, u64::saturating_add);
    let sends = sum(|s| s.sent_bit_s) >= sum(|s| s.received_bit_s);
    // A flow within the cgroup also arrives in it.
    let only_ingress = within && held.iter().all(|h| h.of_subject() == "ingress");
    let direction = if sends && !only_ingress { "egress" } else { "ingress" };
    match moving[..] {
        [socket] if direction == "egress" => one_flow(&held, socket),
        _ => fullest(&held, Some(direction), &moving),
    }
}

/// The fullest limit, or the senders themselves.
fn fullest(held: &[Held<'_>], direction: Option<&str>, moving: &[&SocketSample]) -> Verdict {
    let there = held.iter().filter(|h| direction.is_none_or(|d| d == h.of_subject()));
    // Of equals the innermost.
    let by_use = |a: &&Held<'_>, b: &&Held<'_>| {
        let key = |h: &Held<'_>| (h.is_full(), h.used());
        key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal)
    };
    let Some(fullest) = there.min_by(by_use) else {
        // Only the other direction is limited.
        return Verdict::Unlimited;
    };
    if fullest.is_full() {
        return fullest.verdict();
    }
    let waiting = moving.iter().map(|s| s.receiver_limited).fold(f64::INFINITY, f64::min);
    if direction == Some("egress") && waiting.is_finite() && waiting >= RECEIVER {
        return Verdict::Receiver { part: waiting };
    }
    Verdict::Sender { part: fullest.used(), of: "limit", limit: fullest.limit.name.clone() }
}

/// One flow that sends.
fn one_flow(held: &[Held<'_>], socket: &SocketSample) -> Verdict {
    let shares = held.iter().filter(|h| h.paces() && h.of_subject() == "egress");
    let share = |h: &Held<'_>| h.now.now.fair.map_or(u64::MAX, |fair| fair.share_bit_s);
    let paced = socket.max_pacing_bit_s.zip(shares.min_by_key(|h| share(h)));
    let Some((pace, holder)) = paced else {
        return match fullest(held, Some("egress"), &[socket]) {
            Verdict::Sender { part, limit, .. } if socket.busy >= BUSY => {
                window(socket, part, limit)
            }
            verdict => verdict,
        };
    };
    let part = socket.sent_bit_s as f64 / pace.max(1) as f64;
    if (pace as f64) < OWN_PACE * share(holder) as f64 && part >= USES_PACE {
        return Verdict::OwnPace { rate_bit_s: pace };
    }
    if part >= USES_PACE {
        return holder.verdict();
    }
    if socket.receiver_limited >= RECEIVER {
        return Verdict::Receiver { part: socket.receiver_limited };
    }
    let full = held.iter().find(|h| h.of_subject() == "egress" && !h.paces() && h.is_full());
    if let Some(full) = full {
        return full.verdict();
    }
    if socket.busy >= BUSY {
        return window(socket, part, holder.limit.name.clone());
    }
    Verdict::Sender { part, of: "share", limit: holder.limit.name.clone() }
}

fn window(socket: &SocketSample, part: f64, limit: String) -> Verdict {
    Verdict::Window {
        congestion_control: socket.congestion_control.clone(),
        cwnd_segments: socket.cwnd_segments,
        retransmitted_segments: socket.retransmitted_segments,
        part,
        limit,
    }
}

/// A part in percent, with a digit where that is small.
fn percent(part: f64) -> String {
    let percent = 100.0 * part;
    if percent < 9.95 && percent > 0.0 {
        format!("{percent:.1} %")
    } else {
        format!("{percent:.0} %")
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |bit_s: &u64| figures::rate(*bit_s);
        match self {
            Verdict::Unlimited => f.write_str("not limited by Tidegate"),
            Verdict::NotEnforced { limit } => write!(
                f,
                "not limited by Tidegate: limit `{limit}` is NOT ENFORCED; reattach it with `tidegate apply`"
            ),
            Verdict::FurtherIn { limit, cgroup } => write!(
                f,
                "limit `{limit}` further in, which is full; `tidegate explain {cgroup}` tells more"
            ),
            Verdict::Loopback { limit } => write!(
                f,
                "not limited by Tidegate: this is loopback traffic, which limit `{limit}` does not count \
                 (see --loopback)"
            ),
            Verdict::Idle => f.write_str("nothing: it sent and received nothing while we looked"),
            Verdict::Paced { limit, rate_bit_s, share_bit_s, flows: 0 | 1 } => write!(
                f,
                "paced at its fair share, {} of limit `{limit}` ({}, no other flow)",
                rate(share_bit_s),
                rate(rate_bit_s)
            ),
            Verdict::Paced { limit, rate_bit_s, share_bit_s, flows } => write!(
                f,
                "paced at its fair share, {} for each flow of limit `{limit}` ({}, {flows} flows)",
                rate(share_bit_s),
                rate(rate_bit_s)
            ),
            Verdict::Full {
                limit,
                direction,
                scheme,
                rate_bit_s,
                used_bit_s,
                signalled_packets,
                dropped_packets,
            } => write!(
                f,
                "limit `{limit}` ({scheme}, {direction} {}) {}: {} used, {signalled_packets} packets marked \
                 or slowed and {dropped_packets} dropped in the sample",
                rate(rate_bit_s),
                if *used_bit_s as f64 >= FULL * *rate_bit_s as f64 {
                    "is full"
                } else {
                    "slows it"
                },
                rate(used_bit_s)
            ),
            Verdict::Receiver { part } => write!(
                f,
                "the receiver: its window was full for {} of the time, not a limit of Tidegate",
                percent(*part)
            ),
            Verdict::OwnPace { rate_bit_s } => write!(
                f,
                "its own program, which asked to be paced at {} (SO_MAX_PACING_RATE)",
                rate(rate_bit_s)
            ),
            Verdict::Window {
                congestion_control,
                cwnd_segments,
                retransmitted_segments,
                part,
                limit,
            } => write!(
                f,
                "its window: {cwnd_segments} segments of `{congestion_control}` on this path \
                 ({retransmitted_segments} retransmitted in the sample), {} of what limit `{limit}` allows",
                percent(*part)
            ),
            Verdict::Sender { part, of: "share", limit } => write!(
                f,
                "the sender itself: it uses {} of its share of limit `{limit}`",
                percent(*part)
            ),
            Verdict::Sender { part, limit, .. } => {
                write!(f, "the senders themselves: {} of limit `{limit}` is used", percent(*part))
            }
        }
    }
}

#[cfg(test)]
mod tests;
