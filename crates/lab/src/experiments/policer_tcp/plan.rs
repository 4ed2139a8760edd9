//! What `policer-tcp` runs.

use std::time::Duration;

use crate::experiments::policers::{Depth, Policer};

pub(super) const MBIT: u64 = 1_000_000;
pub(super) const GBIT: u64 = 1000 * MBIT;
pub(super) const MS_1: Depth = Depth::Time(Duration::from_millis(1));
pub(super) const S_1: Depth = Depth::Time(Duration::from_secs(1));
const MS_10: Depth = Depth::Time(Duration::from_millis(10));
const MS_100: Depth = Depth::Time(Duration::from_millis(100));

/// Flows of one kind to one receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) cc: &'static str,
    pub(super) flows: u32,
    pub(super) receiver: usize,
}

/// A case, and what runs in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cell {
    pub(super) limit_bit_s: u64,
    /// Of the link to each receiver.
    pub(super) rtts_us: &'static [u64],
    pub(super) groups: &'static [Group],
    pub(super) depth: Depth,
    pub(super) systems: &'static [Policer],
}

impl Cell {
    pub(super) fn flows(&self) -> u32 {
        self.groups.iter().map(|group| group.flows).sum()
    }
}

const fn group(cc: &'static str, flows: u32, receiver: usize) -> Group {
    Group { cc, flows, receiver }
}

const ONE_CUBIC: &[Group] = &[group("cubic", 1, 0)];
const FOUR_CUBIC: &[Group] = &[group("cubic", 4, 0)];
/// One flow and four of each kind.
const ALIKE: [&[Group]; 6] = [
    ONE_CUBIC,
    FOUR_CUBIC,
    &[group("reno", 1, 0)],
    &[group("reno", 4, 0)],
    &[group("bbr", 1, 0)],
    &[group("bbr", 4, 0)],
];
const BBR_AND_CUBIC: &[Group] = &[group("bbr", 2, 0), group("cubic", 2, 0)];
const CUBIC_AND_RENO: &[Group] = &[group("cubic", 2, 0), group("reno", 2, 0)];
const NEAR_AND_FAR: &[Group] = &[group("cubic", 2, 0), group("cubic", 2, 1)];

const RTTS_US: [&[u64]; 5] = [&[100], &[1_000], &[10_000], &[50_000], &[100_000]];
const RTT_10_MS: &[u64] = RTTS_US[2];
const RTTS_MIXED: &[u64] = &[10_000, 100_000];

const POLICE: &[Policer] = &[Policer::Police];
const PEERS: &[Policer] = &[Policer::Police, Policer::Nft, Policer::Tbf];
/// nft's packets are no measure of segments.
const PEERS_OF_SEGMENTS: &[Policer] = &[Policer::Police, Policer::Tbf];
const SHARING: &[Policer] = &[Policer::Police, Policer::Fair];
const SHARING_PEERS: &[Policer] = &[Policer::Police, Policer::Fair, Policer::Nft, Policer::Tbf];

/// The cases, those of one path one after the other.
pub(super) fn plan(tiny: bool, quick: bool) -> Vec<Cell> {
    let cell = |limit_bit_s, rtts_us, groups, depth, systems| Cell {
        limit_bit_s,
        rtts_us,
        groups,
        depth,
        systems,
    };
    let mut plan = Vec::new();
    if tiny {
        plan.push(cell(100 * MBIT, RTT_10_MS, ONE_CUBIC, Depth::Unsaid, PEERS));
        plan.push(cell(100 * MBIT, RTT_10_MS, BBR_AND_CUBIC, Depth::Unsaid, SHARING));
        return plan;
    }
    for rtts_us in RTTS_US {
        let at = |rtt: &[u64]| rtts_us == rtt;
        // Carousel's figure, and what is between its two buckets.
        let peers = if quick && !at(RTT_10_MS) { POLICE } else { PEERS_OF_SEGMENTS };
        plan.push(cell(GBIT, rtts_us, ONE_CUBIC, MS_1, peers));
        let deep = [&[1_000][..], RTT_10_MS, &[50_000]];
        if !quick || deep.contains(&rtts_us) {
            plan.push(cell(
                GBIT,
                rtts_us,
                ONE_CUBIC,
                S_1,
                if quick { POLICE } else { PEERS_OF_SEGMENTS },
            ));
        }
        if !quick {
            for depth in [MS_10, MS_100] {
                plan.push(cell(GBIT, rtts_us, ONE_CUBIC, depth, POLICE));
            }
            for groups in ALIKE.into_iter().filter(|_| !at(RTTS_US[0]) && !at(RTTS_US[4])) {
                for depth in [MS_10, Depth::Unsaid] {
                    plan.push(cell(100 * MBIT, rtts_us, groups, depth, POLICE));
                }
            }
        } else if at(RTT_10_MS) {
            plan.push(cell(100 * MBIT, rtts_us, ONE_CUBIC, Depth::Unsaid, PEERS));
        }
        if !quick || at(RTT_10_MS) {
            plan.push(cell(GBIT, rtts_us, ONE_CUBIC, Depth::Unsaid, POLICE));
        }
        if at(RTT_10_MS) {
            let systems = if quick { SHARING } else { SHARING_PEERS };
            plan.push(cell(100 * MBIT, rtts_us, BBR_AND_CUBIC, Depth::Unsaid, systems));
            if !quick {
                plan.push(cell(100 * MBIT, rtts_us, CUBIC_AND_RENO, Depth::Unsaid, systems));
                plan.push(cell(GBIT, rtts_us, BBR_AND_CUBIC, Depth::Unsaid, SHARING));
            }
        }
    }
    plan.push(cell(100 * MBIT, RTTS_MIXED, NEAR_AND_FAR, Depth::Unsaid, SHARING));
    plan
}
