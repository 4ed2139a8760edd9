use super::*;

fn figures_of(quick: bool) -> Vec<Cell> {
    plan(false, quick)
}

/// Flows that differ in kind or in round trip.
fn is_mixed(cell: &&Cell) -> bool {
    cell.groups.len() > 1
}

#[test]
fn the_full_plan_is_the_claim() {
    let full = figures_of(false);
    let published: Vec<&Cell> = full.iter().filter(|cell| cell.published().is_some()).collect();
    assert_eq!(published.len(), 2 * PUBLISHED.len());
    for cc in ["reno", "cubic", "bbr"] {
        for flows in [1, 4] {
            let is = |cell: &&Cell| matches!(cell.groups, [group] if group.cc == cc && group.flows == flows);
            assert!(full.iter().any(|cell| is(&cell)), "{flows} of {cc}");
        }
    }
    assert!(full.iter().filter(is_mixed).count() >= 4);
}

#[test]
fn a_path_is_built_once() {
    for quick in [true, false] {
        let plan = figures_of(quick);
        let paths: Vec<_> = plan.chunk_by(|cell, next| cell.rtts_us == next.rtts_us).collect();
        assert_eq!(paths.len(), 6);
        // Each run takes five seconds and what it needs to start.
        let runs: usize = plan.iter().map(|cell| cell.systems.len()).sum();
        assert!(!quick || runs <= 19, "{runs}");
    }
}

#[test]
fn every_receiver_has_a_link() {
    for cell in figures_of(false) {
        for group in cell.groups {
            assert!(group.receiver < cell.rtts_us.len(), "{cell:?}");
        }
        assert!(cell.is_cut() || !cell.systems.contains(&Policer::Nft), "nft counts packets");
        let tbf = cell.systems.contains(&Policer::Tbf);
        assert!(!tbf || cell.rtts_us.len() == 1, "tbf stands on one device");
    }
}

#[test]
fn the_law_is_that_of_the_case() {
    let full = figures_of(false);
    let is = |cell: &&Cell| cell.published() == Some(84e6);
    let cell = full.iter().find(is).unwrap();
    let law = cell.law(cell.rate().unwrap()).unwrap();
    // 94 Mbit/s in docs/burst.md.
    assert!((law.unpaced - 0.094).abs() < 0.005, "{law:?}");
    assert!(law.paced > 0.8, "{law:?}");
    let mixed = full.iter().find(is_mixed).unwrap();
    assert!(mixed.law(mixed.rate().unwrap()).is_none());
}

#[test]
fn cases_say_what_differs() {
    let full = figures_of(false);
    let cases: Vec<Case> = full.iter().map(|cell| cell.case().unwrap()).collect();
    let apart = distinct(cases.iter());
    assert_eq!(apart.len(), cases.len());
    let far = full.last().unwrap().case().unwrap();
    assert_eq!(far.0["far_rtt_us"], 100_000);
    assert_eq!(far.0["cc"], "cubic");
}
