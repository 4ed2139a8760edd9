//! The recorded results: what the pages show is what the data says, failed claims and all.

use std::{collections::BTreeSet, fs, path::Path};

use tidegate_lab::{
    experiments::{self, bwlimit},
    report::Report,
};

/// Each report with its directory.
fn reports() -> Vec<(String, Report)> {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    let dirs = fs::read_dir(results).expect("docs/results");
    let dirs = dirs.map(|entry| entry.expect("an entry").path());
    dirs.filter(|path| path.is_dir())
        .map(|dir| {
            let json = fs::read_to_string(dir.join("report.json")).expect("a report");
            let report = serde_json::from_str(&json).unwrap_or_else(|e| panic!("{dir:?}: {e}"));
            (dir.display().to_string(), report)
        })
        .collect()
}

#[test]
fn each_experiment_is_recorded_under_its_name() {
    let known: BTreeSet<String> =
        experiments::all().iter().map(|experiment| experiment.name().to_owned()).collect();
    let recorded: BTreeSet<String> = reports()
        .into_iter()
        .map(|(dir, report)| {
            assert!(
                dir.ends_with(&format!("/{}", report.experiment)),
                "{dir}: {}",
                report.experiment
            );
            report.experiment
        })
        .collect();
    assert_eq!(recorded, known);
}

/// No claim is dropped: each that was judged is on the page, with its sign, and the page has no other.
#[test]
fn pages_show_each_claim_as_it_was_judged() {
    for (dir, report) in reports() {
        let page = fs::read_to_string(Path::new(&dir).join("report.md")).unwrap();
        let signs = ["- ✔ ", "- ✘ "];
        let shown: Vec<&str> =
            page.lines().filter(|line| signs.iter().any(|sign| line.starts_with(sign))).collect();
        let judged = report.claims.iter().map(|claim| {
            let sign = if claim.holds { '✔' } else { '✘' };
            format!("- {sign} {} — {}", claim.claim, claim.measured)
        });
        assert!(!report.claims.is_empty(), "{dir}");
        assert_eq!(shown, judged.collect::<Vec<_>>(), "{dir}");
    }
}

/// A claim that could not be judged leaves a note; a report with one is not recorded.
#[test]
fn no_recorded_report_misses_a_claim() {
    for (dir, report) in reports() {
        for word in [" failed: ", "stopped before its end", "claimed, and this one does not"] {
            let found = report.notes.iter().find(|note| note.contains(word));
            assert_eq!(found, None, "{dir}");
        }
    }
}

/// The tables of `docs/bwlimit.md` are those of the report; `INSTA_UPDATE=always` writes them.
#[test]
fn the_page_of_bwlimit_has_the_tables_of_its_report() {
    const MARKS: [&str; 2] = ["<!-- results -->\n", "<!-- /results -->"];
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/bwlimit.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(MARKS[0]).unwrap();
    let (_, after) = rest.split_once(MARKS[1]).unwrap();
    let (_, report) =
        reports().into_iter().find(|(_, report)| report.experiment == "bwlimit").unwrap();
    let shall = [before, MARKS[0], &bwlimit::tables(&report), MARKS[1], after].concat();
    if std::env::var_os("INSTA_UPDATE").is_some_and(|update| update == "always") {
        fs::write(&path, shall).unwrap();
    } else {
        assert!(page == shall, "docs/bwlimit.md is out of date: run this with INSTA_UPDATE=always");
    }
}
