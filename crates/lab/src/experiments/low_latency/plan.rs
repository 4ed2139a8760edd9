//! What `low-latency` runs.

use std::{fmt, time::Duration};

use crate::experiments::shapers::{MARK_BYTES, Shaper};

pub(super) const GBIT: u64 = 1_000_000_000;

/// A limit under one congestion control.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) shaper: Shaper,
    pub(super) cc: &'static str,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shaper {
            Shaper::Idle => f.pad(self.shaper.name()),
            shaper => write!(f, "{shaper} under {}", self.cc),
        }
    }
}

/// A case, and what runs in it by turns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) limit_bit_s: u64,
    pub(super) flows: u32,
    /// Of a link between host and peer; none: the path is what the user wants.
    pub(super) rtt: Option<Duration>,
    pub(super) turns: Vec<Turn>,
}

const HTB_ECN: Shaper = Shaper::HtbEcn(MARK_BYTES);
/// The least that shows each system.
const FEW: [(Shaper, &[&str]); 6] = [
    (Shaper::Idle, &["cubic"]),
    (Shaper::Htb, &["cubic"]),
    (HTB_ECN, &["dctcp"]),
    (Shaper::Dem, &["dctcp"]),
    (Shaper::Spring, &["cubic"]),
    (Shaper::Edt, &["cubic"]),
];
const ALL: [(Shaper, &[&str]); 6] = [
    FEW[0],
    FEW[1],
    FEW[2],
    (Shaper::Dem, &["dctcp", "cubic+ecn", "reno+ecn"]),
    (Shaper::Spring, &["reno", "cubic", "bbr", "dctcp"]),
    FEW[5],
];

fn turns(systems: &[(Shaper, &[&'static str])]) -> Vec<Turn> {
    let of = |&(shaper, ccs): &(Shaper, &[&'static str])| {
        ccs.iter().map(move |&cc| Turn { shaper, cc }).collect::<Vec<_>>()
    };
    systems.iter().flat_map(of).collect()
}

/// The cases, those of one path one after the other.
pub(super) fn plan(tiny: bool, quick: bool) -> Vec<Cell> {
    let cell = |limit_bit_s, flows, rtt_us: Option<u64>, systems| Cell {
        limit_bit_s,
        flows,
        rtt: rtt_us.map(Duration::from_micros),
        turns: turns(systems),
    };
    if tiny {
        return vec![cell(GBIT, 2, None, &FEW)];
    }
    if quick {
        return vec![
            cell(GBIT, 1, None, &FEW),
            cell(GBIT, 8, None, &FEW),
            cell(2 * GBIT, 1, None, &FEW),
            cell(2 * GBIT, 8, None, &FEW),
            cell(GBIT, 4, Some(1000), &FEW),
        ];
    }
    let mut plan = Vec::new();
    for limit_bit_s in [GBIT, 2 * GBIT] {
        plan.extend([1, 2, 8, 16].map(|flows| cell(limit_bit_s, flows, None, &ALL)));
    }
    for rtt_us in [100, 1000, 10_000] {
        for limit_bit_s in [GBIT, 2 * GBIT] {
            plan.extend([1, 8].map(|flows| cell(limit_bit_s, flows, Some(rtt_us), &ALL)));
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_without_load_comes_first_in_each_round() {
        for cell in [plan(true, true), plan(false, true), plan(false, false)].concat() {
            assert_eq!(cell.turns[0].shaper, Shaper::Idle);
            assert!(cell.turns[1..].iter().all(|turn| turn.shaper != Shaper::Idle));
        }
    }

    #[test]
    fn the_full_plan_has_every_circumstance() {
        let full = plan(false, false);
        let has = |of: &dyn Fn(&Cell) -> bool| full.iter().any(of);
        for flows in [1, 2, 8, 16] {
            assert!(has(&|cell| cell.flows == flows && cell.limit_bit_s == 2 * GBIT));
        }
        for cc in ["reno", "cubic", "bbr", "dctcp"] {
            let spring = Turn { shaper: Shaper::Spring, cc };
            assert!(full.iter().all(|cell| cell.turns.contains(&spring)));
        }
        for rtt in [None, Some(100), Some(1000), Some(10_000)] {
            assert!(has(&|cell| cell.rtt == rtt.map(Duration::from_micros)));
        }
    }
}
