//! What became of flows that come and go, from their bytes on the wire in fine bins.

use std::time::Duration;

use crate::stats;

/// Times to settle are of means over this time, from then on: a few bursts of each flow.
pub(super) const WINDOW: Duration = Duration::from_millis(20);
/// What a leaver had is its mean over this time, and so is what the others had.
const BEFORE: Duration = Duration::from_millis(200);
/// Fairness is looked at in windows of this length, so far apart.
const SECOND: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(100);
/// The part of its share that a newcomer must have, and of a leaver's share that must be used again.
const SETTLED: f64 = 0.9;

/// A flow that wants as much as there is, or not.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Flow {
    /// Bytes on the wire in each bin.
    pub(super) bytes: Vec<u64>,
    /// The bins in which it begins and ends.
    pub(super) began: usize,
    pub(super) ended: usize,
    pub(super) greedy: bool,
    pub(super) rtt: Duration,
}

impl Flow {
    /// Its mean rate in bins `from..to`; nothing beyond the last.
    pub(super) fn bit_s(&self, from: usize, to: usize, bin: Duration) -> f64 {
        let bytes: u64 = self.bytes.iter().take(to).skip(from).sum();
        bytes as f64 * 8.0 / (bin.as_secs_f64() * to.saturating_sub(from).max(1) as f64)
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Flows {
    pub(super) flows: Vec<Flow>,
    pub(super) bin: Duration,
    pub(super) limit_bit_s: f64,
}

/// How long something took, and how long it may take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Settling {
    /// None: it did not happen before the next change.
    pub(super) took: Option<Duration>,
    pub(super) within: Duration,
}

impl Settling {
    pub(super) fn holds(&self) -> bool {
        self.took.is_some_and(|took| took <= self.within)
    }
}

impl Flows {
    fn bins(&self, time: Duration) -> usize {
        (time.as_nanos() / self.bin.as_nanos().max(1)) as usize
    }

    /// When the flows that run change, ascending.
    fn changes(&self) -> Vec<usize> {
        let mut changes: Vec<usize> =
            self.flows.iter().flat_map(|flow| [flow.began, flow.ended]).collect();
        changes.sort_unstable();
        changes
    }

    fn next_change(&self, after: usize) -> usize {
        self.changes().into_iter().find(|at| *at > after).unwrap_or(after)
    }

    /// Each greedy newcomer: from when on it has 90 % of an equal part of what those that want less leave.
    pub(super) fn joins(&self) -> Vec<Settling> {
        let join = |flow: &Flow| {
            let at = flow.began;
            let end = self.next_change(at).min(flow.ended);
            let here = |other: &&Flow| other.began <= at && other.ended > at;
            let small = self.flows.iter().filter(here).filter(|other| !other.greedy);
            let taken: f64 = small.map(|other| other.bit_s(at, end, self.bin)).sum();
            let greedy = self.flows.iter().filter(here).filter(|other| other.greedy).count();
            let share = (self.limit_bit_s - taken) / greedy.max(1) as f64;
            let reached = |from, to| flow.bit_s(from, to, self.bin) >= SETTLED * share;
            Settling { took: self.first(at, end, reached), within: within(flow.rtt) }
        };
        self.flows.iter().filter(|flow| flow.greedy).map(join).collect()
    }

    /// Each greedy leaver: from when on the greedy flows that stay have 90 % of what it had besides theirs.
    pub(super) fn leaves(&self) -> Vec<Settling> {
        let leave = |flow: &Flow| {
            let at = flow.ended;
            let end = self.next_change(at);
            let stays = |other: &&Flow| other.greedy && other.began < at && other.ended > at;
            let staying: Vec<&Flow> = self.flows.iter().filter(stays).collect();
            let rtt = staying.iter().map(|other| other.rtt).max()?;
            // Where the next change comes too soon, nobody can tell.
            if at + self.bins(within(rtt) + WINDOW) > end {
                return None;
            }
            let from = at.saturating_sub(self.bins(BEFORE));
            let of_all =
                |from, to| staying.iter().map(|other| other.bit_s(from, to, self.bin)).sum::<f64>();
            let wanted = of_all(from, at) + SETTLED * flow.bit_s(from, at, self.bin);
            let reached = |from, to| of_all(from, to) >= wanted;
            Some(Settling { took: self.first(at, end, reached), within: within(rtt) })
        };
        let leavers = self.flows.iter().filter(|flow| flow.greedy);
        leavers.filter_map(leave).collect()
    }

    /// The first window between two bins in which something is reached, as time since the first of them.
    fn first(
        &self,
        from: usize,
        to: usize,
        reached: impl Fn(usize, usize) -> bool,
    ) -> Option<Duration> {
        let window = self.bins(WINDOW);
        let found = (from..to.saturating_sub(window)).find(|&at| reached(at, at + window))?;
        Some(self.bin * (found - from) as u32)
    }

    /// Jain's index over the greedy flows of each second in which the same of them run that ran for a second
    /// before; of the worst second.
    pub(super) fn least_jain(&self) -> Option<f64> {
        let (second, step) = (self.bins(SECOND), self.bins(STEP).max(1));
        let last = self.flows.iter().map(|flow| flow.ended).max()?;
        let index = |from: usize| {
            let to = from + second;
            let runs =
                |flow: &&Flow| flow.greedy && flow.began + second <= from && flow.ended >= to;
            let rates: Vec<f64> =
                self.flows.iter().filter(runs).map(|flow| flow.bit_s(from, to, self.bin)).collect();
            (rates.len() > 1).then(|| stats::jain(&rates)).flatten()
        };
        (0..last).step_by(step).filter_map(index).reduce(f64::min)
    }

    /// The mean rate of all from the last that joined, and a moment for it to settle, to the first that left;
    /// none if that is no time at all.
    pub(super) fn all_bit_s(&self, settled: Duration) -> Option<f64> {
        let from = self.flows.iter().map(|flow| flow.began).max().unwrap_or(0);
        let to = self.flows.iter().map(|flow| flow.ended).min().unwrap_or(0);
        let from = from + self.bins(settled);
        let all = || self.flows.iter().map(|flow| flow.bit_s(from, to, self.bin)).sum();
        (from < to).then(all)
    }
}

/// Ten round trips or 20 ms.
fn within(rtt: Duration) -> Duration {
    (10 * rtt).max(Duration::from_millis(20))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BIN: Duration = Duration::from_millis(1);

    /// Constant rates in Mbit/s from and to a millisecond.
    fn flow(parts: &[(usize, usize, u64)]) -> Flow {
        let end = parts.iter().map(|part| part.1).max().unwrap();
        let mut bytes = vec![0; end];
        for &(from, to, mbit_s) in parts {
            bytes[from..to].fill(mbit_s * 125);
        }
        let began = parts[0].0;
        Flow { bytes, began, ended: end, greedy: true, rtt: Duration::from_millis(1) }
    }

    fn all(flows: Vec<Flow>) -> Flows {
        Flows { flows, bin: BIN, limit_bit_s: 100e6 }
    }

    #[test]
    fn a_newcomer_settles_when_it_has_its_share() {
        let first = flow(&[(0, 1000, 100), (1000, 2000, 50), (2000, 2100, 50), (2100, 3000, 100)]);
        let mut second = flow(&[(1000, 1030, 10), (1030, 2000, 50)]);
        second.ended = 2000;
        let flows = all(vec![first, second]);
        let [first, second] = flows.joins()[..] else { panic!() };
        assert_eq!((first.took, first.holds()), (Some(Duration::ZERO), true));
        // The window begins when less than two of its twenty bins are of before.
        let ms = second.took.unwrap().as_millis();
        assert!((27..=30).contains(&ms), "{ms}");
        assert!(!second.holds());
        let [left] = flows.leaves()[..] else { panic!("{:?}", flows.leaves()) };
        let ms = left.took.unwrap().as_millis();
        assert!((97..=100).contains(&ms), "{ms}");
    }

    #[test]
    fn what_never_happens_took_no_time() {
        let flows = all(vec![flow(&[(0, 500, 100)]), flow(&[(100, 500, 1)])]);
        assert_eq!(flows.joins()[1].took, None);
        assert!(!flows.joins()[1].holds());
    }

    #[test]
    fn fairness_is_of_those_that_have_settled() {
        let flows = all(vec![
            flow(&[(0, 4000, 50)]),
            flow(&[(0, 1000, 1), (1000, 4000, 50)]),
            flow(&[(2500, 4000, 5)]),
        ]);
        assert!((flows.least_jain().unwrap() - 1.0).abs() < 1e-9);
        assert_eq!(all(vec![flow(&[(0, 4000, 50)])]).least_jain(), None);
    }

    #[test]
    fn small_flows_take_from_what_is_shared() {
        let mut small = flow(&[(0, 1000, 10)]);
        small.greedy = false;
        let flows = all(vec![small, flow(&[(0, 1000, 45)]), flow(&[(0, 1000, 45)])]);
        assert!(flows.joins().iter().all(Settling::holds), "{:?}", flows.joins());
        let all = flows.all_bit_s(Duration::from_millis(500)).unwrap();
        assert!((all - 100e6).abs() < 1.0);
        assert_eq!(flows.all_bit_s(Duration::from_secs(1)), None);
    }
}
