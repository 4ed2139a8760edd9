//! What an experiment leaves behind: `report.json`, `report.md`, one SVG a figure.
//!
//! The JSON is tidy data: one [`Row`] a measured value, so that any tool can load it without this
//! crate. The Markdown is made from the same rows. Both are written beside their final name and
//! renamed, the JSON last: a reader sees a whole report or none.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::host::Host;
use crate::stalls::Stalls;
use crate::testbed::LinkSpec;

/// The circumstances of a measurement: keys that carry their unit (`limit_bit_s`, `flows`, `cc`), in
/// the order in which tables show them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Case(pub Map<String, Value>);

impl Case {
    /// A case without circumstances.
    pub fn new() -> Case {
        Case::default()
    }

    /// The case with one more circumstance.
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Case {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    /// The case with what is between the hosts; none: a plain cable, of which nothing is said.
    pub fn with_link(self, link: Option<LinkSpec>) -> Case {
        let Some(LinkSpec { there, back, .. }) = link else { return self };
        let mut case = self.with("rtt_us", (there.delay.0 + back.delay.0) / 1000);
        if let Some(rate) = there.rate {
            case = case.with("link_bit_s", rate.bit_s());
        }
        if let Some(queue) = there.queue {
            case = case.with("link_queue_bytes", queue.0);
        }
        for (key, share) in [("loss_percent", there.loss), ("reorder_percent", there.reorder)] {
            if share > 0.0 {
                case = case.with(key, percent(share));
            }
        }
        case
    }
}

/// A share in percent, as people write it: 0.07 is 7, not 7.000000000000001.
pub(crate) fn percent(share: f64) -> f64 {
    (share * 1e8).round() / 1e6
}

/// One measured value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was measured: `htb`, `nrm`, `unlimited`.
    pub system: String,
    /// Under which circumstances.
    pub case: Case,
    /// Which figure, unit included: `goodput_bit_s`.
    pub metric: String,
    /// Which repetition, from 1.
    pub run: u32,
    /// The figure; finite.
    pub value: f64,
    /// The figure that was published for this system and case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<f64>,
}

/// Something that ought to be true, and whether it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The sentence.
    pub claim: String,
    /// Whether the measurement bears it out.
    pub holds: bool,
    /// The measured figures, for people.
    pub measured: String,
}

/// A figure of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FigureFile {
    /// File name, beside the report.
    pub file: String,
    pub title: String,
}

/// A whole report. See the module's head for the files it becomes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The experiment's name.
    pub experiment: String,
    /// What it measures, in one line.
    pub summary: String,
    /// The version of Tidegate's lab.
    pub version: String,
    /// The commit of the work tree in which the `tidegate` binary lies; none if it lies in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Whether tracked files of that work tree differed from the commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty: Option<bool>,
    /// The kernel's release.
    pub kernel: String,
    /// The processor's model.
    pub cpu: String,
    /// What else there is to know of the machine.
    pub host: Host,
    /// Whether this was the short form.
    pub quick: bool,
    /// The command that makes this report again.
    pub command: String,
    /// When it began, RFC 3339.
    pub started: String,
    /// How long it took.
    pub elapsed_s: f64,
    /// It stopped before its end, so rows, claims and figures are missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interrupted: bool,
    /// How the machine stood still meanwhile; none if that could not be watched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalls: Option<Stalls>,
    /// The measured values.
    pub rows: Vec<Row>,
    pub claims: Vec<Claim>,
    pub figures: Vec<FigureFile>,
    /// What a reader must know besides: failed runs, odd circumstances.
    pub notes: Vec<String>,
}

impl Report {
    /// The systems, in the order of their first row.
    pub fn systems(&self) -> Vec<&str> {
        distinct(self.rows.iter().map(|row| row.system.as_str()))
    }

    /// The metrics, in the order of their first row.
    pub fn metrics(&self) -> Vec<&str> {
        distinct(self.rows.iter().map(|row| row.metric.as_str()))
    }

    /// The values of all runs of one system, metric and case; of every case without one.
    pub fn values(&self, system: &str, metric: &str, case: Option<&Case>) -> Vec<f64> {
        let wanted = |row: &&Row| {
            row.system == system
                && row.metric == metric
                && case.is_none_or(|case| row.case == *case)
        };
        self.rows.iter().filter(wanted).map(|row| row.value).collect()
    }

    /// The report in a directory, if there is one.
    pub fn read(dir: &Path) -> Option<Report> {
        serde_json::from_str(&fs::read_to_string(dir.join("report.json")).ok()?).ok()
    }

    /// Writes the report and its figures (file name, SVG) into `dir`, which is made if need be. The data come
    /// first, and an error keeps nothing else from being written. Figures of the report before go.
    ///
    /// # Errors
    /// The first file that could not be written, and why.
    pub fn write(&self, dir: &Path, drawn: &[(String, String)]) -> anyhow::Result<()> {
        fs::create_dir_all(dir)?;
        let before = Report::read(dir);
        let mut json = serde_json::to_string_pretty(self)?;
        json.push('\n');
        let page = self.markdown();
        let files = [("report.json", &json), ("report.md", &page)];
        let files = files.into_iter().chain(drawn.iter().map(|(file, svg)| (file.as_str(), svg)));
        let written: Vec<_> = files
            .map(|(file, text)| write_whole(&dir.join(file), text).with_context(|| file.to_owned()))
            .collect();
        for FigureFile { file, .. } in before.iter().flat_map(|before| &before.figures) {
            if !self.figures.iter().any(|figure| figure.file == *file) {
                let _ = fs::remove_file(dir.join(file));
            }
        }
        written.into_iter().collect()
    }
}

/// Writes beside `path`, then renames onto it. On an error, what was there before is still there.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&beside, path)
    });
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

pub(crate) use tidegate_chart::distinct;

#[cfg(test)]
pub(crate) mod tests;
