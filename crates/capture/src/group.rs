//! Flows behind one policer: sets of flows that together fit one token bucket though each alone does not.
//!
//! The bucket of a shared policer is emptied by all its flows, so the losses of one lie anywhere in its own
//! traffic and only the sum shows the bucket. Candidates are the lossy flows to one destination, from one
//! source, or all; of a candidate that does not fit, the flow is left out without which the rest fits best,
//! again and again. Then flows without losses are added if the fit gets better: they pay tokens too.
//!
//! Bounded: at most [`FLOWS_MAX`] flows are looked at, so at most `3 x FLOWS_MAX^2 / 2` fits.

use std::net::IpAddr;

use crate::{
    fit::{Fit, Series},
    flow::Flow,
    series::merge,
    verdict::{EXPLAINED_MIN, LOSSES_MIN, VIOLATED_MAX, holds_loosely},
};

/// The most flows that are looked at: those with most losses.
pub const FLOWS_MAX: usize = 12;
/// A group must explain so much more of the losses than its flows alone.
const BETTER: f64 = 0.05;
/// A group that explains less than its best flow alone by no more than this explains as much.
const ALIKE: f64 = 0.02;
/// Losses that such a group may leave unexplained, as a part of those of its least lossy flow.
const LEFT_OVER: f64 = 0.2;
/// A flow without losses matters if it has more than this part of all bytes.
const QUIET_PART: u64 = 100;
/// Packets of a group that are looked at, at most.
const PASSES_MAX: usize = 1 << 17;

/// A group.
#[derive(Debug)]
pub struct Group {
    /// Its flows, by their place among those that were given.
    pub flows: Vec<usize>,
    /// What passed and was lost of them together.
    pub series: Series,
    /// Their bucket.
    pub fit: Fit,
}

fn holds(fit: &Fit) -> bool {
    fit.explained >= EXPLAINED_MIN && fit.violated <= VIOLATED_MAX && fit.marks >= LOSSES_MIN
}

/// Finds groups among flows that have losses, each with its fit alone. No flow is in two groups.
pub fn find(flows: &[&Flow], alone: &[Option<Fit>], capture_start_ns: u64) -> Vec<Group> {
    let mut free: Vec<usize> = (0..flows.len()).take(FLOWS_MAX).collect();
    let mut groups = Vec::new();
    // Each round takes at least two flows.
    while free.len() >= 2 {
        let search = Search { flows, alone, capture_start_ns };
        let Some(group) = search.best(&free) else { break };
        free.retain(|flow| !group.flows.contains(flow));
        groups.push(group);
    }
    groups
}

struct Search<'a> {
    flows: &'a [&'a Flow],
    alone: &'a [Option<Fit>],
    capture_start_ns: u64,
}

impl Search<'_> {
    fn best(&self, free: &[usize]) -> Option<Group> {
        let lossy = |at: &usize| self.alone[*at].is_some();
        let lossy: Vec<usize> = free.iter().copied().filter(lossy).collect();
        let mut candidates: Vec<Vec<usize>> = vec![lossy.clone()];
        for side in [|flow: &Flow| flow.key.destination, |flow: &Flow| flow.key.source] {
            let mut ends: Vec<IpAddr> = lossy.iter().map(|at| side(self.flows[*at])).collect();
            ends.sort();
            ends.dedup();
            let same = |end: &IpAddr| {
                lossy.iter().copied().filter(|at| side(self.flows[*at]) == *end).collect::<Vec<_>>()
            };
            candidates.extend(ends.iter().map(same));
        }
        // Of what was captured before the loss, and is no TCP, nobody sees what was lost of it.
        let quiet: Vec<usize> = free.iter().copied().filter(|at| self.is_quiet(*at)).collect();
        if !quiet.is_empty() {
            let alone = lossy.iter().map(|at| vec![*at]);
            let sets: Vec<Vec<usize>> = candidates.iter().cloned().chain(alone).collect();
            candidates.extend(sets.into_iter().map(|mut set| {
                set.extend(&quiet);
                set.sort_unstable();
                set
            }));
        }
        candidates.sort();
        candidates.dedup();
        let found = candidates.into_iter().filter_map(|set| self.reduce(set));
        let group = found.max_by(|a, b| {
            a.flows.len().cmp(&b.flows.len()).then(a.fit.score().total_cmp(&b.fit.score()))
        })?;
        Some(self.extend(group, free))
    }

    /// Whether a flow shows no losses, is no TCP, and is large enough to matter.
    fn is_quiet(&self, at: usize) -> bool {
        let all: u64 = self.flows.iter().map(|flow| flow.bytes).sum();
        let flow = self.flows[at];
        self.alone[at].is_none() && !flow.source().0.is_tcp() && flow.bytes * QUIET_PART > all
    }

    fn fit(&self, set: &[usize]) -> Option<Group> {
        let flows: Vec<&Flow> = set.iter().map(|at| self.flows[*at]).collect();
        let mut series = merge(&flows, self.capture_start_ns);
        if series.began {
            // What is known of the depth may lie at the beginning.
            series.passes.truncate(PASSES_MAX);
            let passes = series.passes.len();
            series.marks.retain(|mark| mark.after < passes);
        } else if series.passes.len() > PASSES_MAX {
            let gone = series.passes.len() - PASSES_MAX;
            series.passes.drain(..gone);
            series.marks.retain(|mark| mark.after >= gone);
            for mark in &mut series.marks {
                mark.after -= gone;
                mark.before -= gone;
            }
        }
        let fit = series.fit()?;
        Some(Group { flows: set.to_vec(), series, fit })
    }

    /// Leaves flows out until the rest fits; none if it never does.
    fn reduce(&self, mut set: Vec<usize>) -> Option<Group> {
        let all = set.len();
        while set.len() >= 2 {
            let mut group = self.fit(&set)?;
            // Shallow buckets of several flows need a finer scan of rates.
            if set.len() == all
                && (!holds(&group.fit) || group.series.is_overrated(&group.fit))
                && let Some(fit) = group.series.fit_thoroughly()
            {
                group.fit = fit;
            }
            let alone = set.iter().filter_map(|at| self.alone[*at].as_ref()).map(Fit::score);
            let best_alone = alone.fold(0.0, f64::max);
            if holds(&group.fit) && group.fit.score() >= best_alone + BETTER {
                return Some(group);
            }
            if holds(&group.fit)
                && set.iter().all(|at| self.alone[*at].as_ref().is_none_or(|f| !holds(f)))
            {
                return Some(group);
            }
            // The path blurs the level of all, and more than that of one.
            if set.len() == all
                && holds_loosely(&group.fit, &group.series)
                && set.iter().all(|at| self.alone[*at].as_ref().is_none_or(|f| !holds(f)))
            {
                return Some(group);
            }
            // Some fit well alone, because each of their bursts finds the bucket full, and others do not.
            let holds_alone = |at: &usize| self.alone[*at].as_ref().is_none_or(holds);
            let left_over = (1.0 - group.fit.explained) * group.fit.marks as f64;
            let fewest = set.iter().filter_map(|at| Some(self.alone[*at].as_ref()?.marks)).min();
            if holds(&group.fit)
                && group.fit.score() >= best_alone - ALIKE
                && !set.iter().all(holds_alone)
                && left_over <= LEFT_OVER * fewest.unwrap_or(0) as f64
            {
                return Some(group);
            }
            let without = |left: usize| -> Vec<usize> {
                set.iter().copied().filter(|at| *at != left).collect()
            };
            let rest = set.iter().filter_map(|left| self.fit(&without(*left)));
            set = rest.max_by(|a, b| a.fit.score().total_cmp(&b.fit.score()))?.flows;
        }
        None
    }

    /// Adds flows with which the rest fits better.
    fn extend(&self, mut group: Group, free: &[usize]) -> Group {
        for at in free {
            if group.flows.contains(at) {
                continue;
            }
            let mut set = group.flows.clone();
            set.push(*at);
            set.sort_unstable();
            if let Some(more) = self.fit(&set)
                && holds(&more.fit)
                && more.fit.score() > group.fit.score() + 1e-3
            {
                group = more;
            }
        }
        group
    }
}
