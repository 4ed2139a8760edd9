//! When requests are due, and how long each took. No I/O and no clock: times are arguments, in nanoseconds.
//!
//! - Closed loop: each client sends its next request when it has the reply to the last. A request is due when
//!   its client is free.
//! - Open loop: requests are due at equal distances whatever the replies do. One that finds no free client
//!   waits for one, and its latency counts from when it was due (no coordinated omission).

use std::collections::VecDeque;

use crate::stalls::{self, Stall};

const NS_PER_S: u64 = 1_000_000_000;

/// Hands requests to free clients.
#[derive(Debug)]
pub(super) struct Schedule {
    start_ns: u64,
    end_ns: u64,
    /// Requests a second, of all clients; none: closed loop.
    rate_hz: Option<u64>,
    /// The clients without a request, in the order in which they became free.
    free: VecDeque<usize>,
    /// How many requests were handed out.
    handed: u64,
}

/// A request for a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handed {
    pub(super) client: usize,
    pub(super) number: u64,
    pub(super) due_ns: u64,
}

impl Schedule {
    /// A schedule from `start_ns` until before `end_ns`; all clients are free.
    pub(super) fn new(
        clients: usize,
        rate_hz: Option<u64>,
        (start_ns, end_ns): (u64, u64),
    ) -> Self {
        Schedule { start_ns, end_ns, rate_hz, free: (0..clients).collect(), handed: 0 }
    }

    /// The next request that is due and has a client, if there is one.
    pub(super) fn next(&mut self, now_ns: u64) -> Option<Handed> {
        let due_ns = match self.rate_hz {
            // What was due before the end is sent, however late.
            Some(_) => self.due_ns().filter(|due_ns| *due_ns <= now_ns)?,
            None => (self.start_ns..self.end_ns).contains(&now_ns).then_some(now_ns)?,
        };
        let client = self.free.pop_front()?;
        let number = self.handed;
        self.handed += 1;
        Some(Handed { client, number, due_ns })
    }

    /// When there is something to hand out without a client becoming free; none: nothing.
    pub(super) fn wakes_ns(&self) -> Option<u64> {
        if self.free.is_empty() {
            return None;
        }
        match self.rate_hz {
            Some(_) => self.due_ns(),
            None => Some(self.start_ns),
        }
    }

    /// A client has its reply.
    pub(super) fn set_free(&mut self, client: usize) {
        self.free.push_back(client);
    }

    /// Open loop: when the next request is due; none after the last.
    fn due_ns(&self) -> Option<u64> {
        let since =
            u128::from(self.handed) * u128::from(NS_PER_S) / u128::from(self.rate_hz?.max(1));
        let due_ns = self.start_ns.saturating_add(u64::try_from(since).unwrap_or(u64::MAX));
        (due_ns < self.end_ns).then_some(due_ns)
    }

    /// Open loop: how many requests were due before the end and found no client.
    pub(super) fn never_sent(&self) -> Vec<u64> {
        let mut rest = Schedule { free: VecDeque::new(), ..*self };
        let mut due = Vec::new();
        while let Some(due_ns) = rest.due_ns() {
            due.push(due_ns);
            rest.handed += 1;
        }
        due
    }
}

/// A request from when it was due until its reply was complete, or until nobody waited any longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Took {
    pub(super) due_ns: u64,
    pub(super) ended_ns: u64,
}

impl Took {
    /// The latency. Times in which the whole machine stood still do not count.
    pub(super) fn latency_ns(&self, stalls: &[Stall]) -> u64 {
        let all_ns = self.ended_ns.saturating_sub(self.due_ns);
        all_ns.saturating_sub(stalls::within_ns(stalls, self.due_ns, self.ended_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn all(schedule: &mut Schedule, now_ns: u64) -> Vec<(usize, u64, u64)> {
        let handed = std::iter::from_fn(|| schedule.next(now_ns));
        handed.map(|handed| (handed.client, handed.number, handed.due_ns / MS)).collect()
    }

    #[test]
    fn a_closed_loop_sends_when_a_client_is_free() {
        let mut schedule = Schedule::new(2, None, (10 * MS, 30 * MS));
        assert_eq!(schedule.wakes_ns(), Some(10 * MS));
        assert_eq!(all(&mut schedule, 9 * MS), []);
        assert_eq!(all(&mut schedule, 10 * MS), [(0, 0, 10), (1, 1, 10)]);
        assert_eq!(schedule.wakes_ns(), None, "a reply wakes it, not the clock");
        schedule.set_free(1);
        assert_eq!(all(&mut schedule, 29 * MS), [(1, 2, 29)]);
        schedule.set_free(0);
        assert_eq!(all(&mut schedule, 30 * MS), [], "the end");
        assert!(schedule.never_sent().is_empty());
    }

    #[test]
    fn an_open_loop_sends_at_equal_distances() {
        let mut schedule = Schedule::new(3, Some(100), (10 * MS, 45 * MS));
        assert_eq!(all(&mut schedule, 10 * MS), [(0, 0, 10)]);
        assert_eq!(schedule.wakes_ns(), Some(20 * MS));
        assert_eq!(all(&mut schedule, 20 * MS - 1), []);
        assert_eq!(all(&mut schedule, 20 * MS), [(1, 1, 20)]);
        // It was late: two are due, one has a client.
        assert_eq!(all(&mut schedule, 41 * MS), [(2, 2, 30)]);
        assert_eq!(schedule.wakes_ns(), None);
        assert_eq!(schedule.never_sent(), [40 * MS]);
        // One that waited for a client counts from when it was due, also after the end.
        schedule.set_free(2);
        assert_eq!(all(&mut schedule, 90 * MS), [(2, 3, 40)]);
        assert_eq!(all(&mut schedule, 95 * MS), []);
        assert!(schedule.never_sent().is_empty());
    }

    #[test]
    fn a_rate_holds_over_any_time() {
        let mut schedule = Schedule::new(1, Some(3), (0, 2 * NS_PER_S));
        let mut due = Vec::new();
        while let Some(handed) = schedule.next(u64::MAX) {
            due.push(handed.due_ns);
            schedule.set_free(handed.client);
        }
        assert_eq!(due.len(), 6);
        assert_eq!(due[3], NS_PER_S, "no rounding adds up");
    }

    #[test]
    fn latency_leaves_out_what_the_machine_slept() {
        let took = Took { due_ns: 10 * MS, ended_ns: 40 * MS };
        assert_eq!(took.latency_ns(&[]), 30 * MS);
        let stall = |start_ms, end_ms| Stall { start_ns: start_ms * MS, end_ns: end_ms * MS };
        let stalls = [stall(5, 12), stall(20, 25), stall(39, 60), stall(70, 80)];
        assert_eq!(took.latency_ns(&stalls), (30 - 2 - 5 - 1) * MS);
    }
}
