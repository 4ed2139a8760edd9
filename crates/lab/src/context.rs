//! What an experiment gets: how to measure, and where to put what it finds.

use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_core::link::LinkOptions;

use crate::chart::{Bars, BarsOf, Figure, Palette};
use crate::progress::Progress;
use crate::report::{Case, Claim, FigureFile, Report, Row};
use crate::stats;
use crate::stop::{Interrupted, Skip};
use crate::testbed::{LinkSpec, Means};

/// How the user wants the experiments run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Fewer and shorter runs.
    pub quick: bool,
    /// Runs of each system in each case; none: what the experiment thinks fit.
    pub repeats: Option<u32>,
    /// The directory that holds a directory for each experiment.
    pub out: PathBuf,
    /// The `tidegate` binary.
    pub tidegate: PathBuf,
    /// What is between the hosts.
    pub links: Links,
    /// The rows that are wanted, as the experiment names them; none: all.
    pub only: Vec<String>,
    /// The systems that are wanted; none: all.
    pub systems: Vec<String>,
    /// Set when the user wants it to end.
    pub interrupted: Arc<AtomicBool>,
}

/// What the user wants between the hosts of testbeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Each direction of paths that would otherwise be plain cables; none: they are.
    pub way: Option<LinkOptions>,
    pub means: Means,
    /// Decides what links lose and reorder.
    pub seed: u64,
}

impl Default for Links {
    fn default() -> Links {
        Links { way: None, means: Means::Cable, seed: 1 }
    }
}

impl Links {
    /// The link of paths that would otherwise be plain cables.
    pub fn usual(&self) -> Option<LinkSpec> {
        self.way.map(|way| self.made(LinkSpec::symmetric(way)))
    }

    fn made(&self, link: LinkSpec) -> LinkSpec {
        LinkSpec { means: self.means, seed: self.seed, ..link }
    }
}

/// One run of one experiment: the options in force, and the report as it grows.
#[derive(Debug)]
pub struct Context {
    /// Fewer and shorter runs are wanted.
    pub quick: bool,
    /// Runs of each system in each case; at least 1.
    pub repeats: u32,
    /// This experiment's own directory, for captures and logs. It exists.
    pub out_dir: PathBuf,
    /// The `tidegate` binary.
    pub tidegate: PathBuf,
    /// What is between the hosts.
    pub links: Links,
    /// The rows that are wanted, as the experiment names them; none: all.
    pub only: Vec<String>,
    /// The systems that are wanted; none: all.
    pub systems: Vec<String>,
    pub(crate) report: Report,
    pub(crate) figures: Vec<(String, Figure)>,
    progress: Progress,
    interrupted: Arc<AtomicBool>,
}

impl Context {
    /// A context for a report that has its head and nothing else. `repeats` is for users who named none.
    pub fn new(options: &Options, repeats: u32, report: Report, progress: Progress) -> Context {
        Context {
            quick: options.quick,
            repeats: options.repeats.unwrap_or(repeats).max(1),
            out_dir: options.out.join(&report.experiment),
            tidegate: options.tidegate.clone(),
            links: options.links,
            only: options.only.clone(),
            systems: options.systems.clone(),
            report,
            figures: Vec::new(),
            progress,
            interrupted: Arc::clone(&options.interrupted),
        }
    }

    /// A link with this round trip and nothing else, made as the user wants links made.
    pub fn link(&self, rtt: Duration) -> LinkSpec {
        self.links.made(LinkSpec::rtt(rtt))
    }

    /// The link that the user wants where an experiment has none of its own.
    pub fn usual_link(&self) -> Option<LinkSpec> {
        self.links.usual()
    }

    /// A case that describes that link, if there is one.
    pub fn case(&self) -> Case {
        Case::new().with_link(self.usual_link())
    }

    /// Says what is being done now.
    pub fn step(&self, what: impl AsRef<str>) {
        self.progress.step(what.as_ref());
    }

    /// Whether the user wants it to end. Long runs of one system should look now and then.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Records one measured value. A value that is not finite becomes a note.
    pub fn row(&mut self, row: Row) {
        if row.value.is_finite() {
            self.report.rows.push(row);
            return;
        }
        let Row { system, metric, run, value, .. } = row;
        self.note(format!("{system}, run {run}: {metric} came out as {value}, left out"));
    }

    /// Records the values of one run: `ctx.record("htb", &case, run).value("goodput_bit_s", rate)`.
    pub fn record(&mut self, system: impl Display, case: &Case, run: u32) -> Recorder<'_> {
        Recorder { system: system.to_string(), case: case.clone(), run, context: self }
    }

    /// Records a claim, whether it holds, and the figures that show it.
    pub fn claim(&mut self, claim: impl Into<String>, holds: bool, measured: impl Into<String>) {
        self.report.claims.push(Claim { claim: claim.into(), holds, measured: measured.into() });
    }

    /// Records what a reader must know besides.
    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        self.progress.say(&note);
        self.report.notes.push(note);
    }

    /// Becomes `name.svg` at the end, when all systems are known.
    pub fn figure(&mut self, name: &str, figure: impl Into<Figure>) {
        self.figures.push((name.to_owned(), figure.into()));
    }

    /// Draws the figures: file name and SVG. One that cannot be drawn is a note; the rows are worth more.
    pub(crate) fn draw(&mut self) -> Vec<(String, String)> {
        let figures = std::mem::take(&mut self.figures);
        let in_figures = figures.iter().flat_map(|(_, figure)| figure.systems());
        let systems: Vec<&str> = self.report.systems().into_iter().chain(in_figures).collect();
        let palette = Palette::of(&systems);
        let mut drawn = Vec::new();
        for (name, figure) in &figures {
            match figure.svg(&palette) {
                Ok(svg) => {
                    let (file, title) = (format!("{name}.svg"), figure.title().to_owned());
                    self.report.figures.push(FigureFile { file: file.clone(), title });
                    drawn.push((file, svg));
                }
                Err(error) => self.note(format!("figure {name} could not be drawn: {error:#}")),
            }
        }
        drawn
    }

    /// Draws `name.svg`: grouped bars of a metric from all rows recorded so far.
    pub fn bars(&mut self, name: &str, what: BarsOf<'_>) {
        let bars = Bars::from_rows(&self.report.rows, what);
        self.figure(name, bars);
    }

    /// Everything recorded so far.
    pub fn rows(&self) -> &[Row] {
        &self.report.rows
    }

    /// The values of all runs of one system and metric in a case; in all cases with `None`.
    pub fn values(&self, system: &str, metric: &str, case: Option<&Case>) -> Vec<f64> {
        self.report.values(system, metric, case)
    }

    pub fn median(&self, system: &str, metric: &str, case: Option<&Case>) -> Option<f64> {
        stats::median(&self.values(system, metric, case))
    }

    /// Measures the systems in turn, A B C A B C …, so that a machine that slowly changes its mood
    /// treats them alike. `measure` gets the system and the run, from 1.
    ///
    /// A system that fails costs a note: the rows of that run are dropped, as half a run misleads, and
    /// the others go on. It gets its turn again in the next round, unless it said [`Skip`].
    ///
    /// # Errors
    ///
    /// [`Interrupted`], and nothing else.
    pub fn alternate<S: Display>(
        &mut self,
        systems: &[S],
        repeats: u32,
        mut measure: impl FnMut(&mut Context, &S, u32) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut absent = vec![false; systems.len()];
        for run in 1..=repeats {
            for (system, absent) in systems.iter().zip(&mut absent) {
                if *absent {
                    continue;
                }
                self.step(format!("{system}, run {run} of {repeats}"));
                let before = self.report.rows.len();
                let outcome = measure(self, system, run);
                // A Ctrl-C reaches the traffic generators too: what they did last is not a run.
                if self.is_interrupted() {
                    self.report.rows.truncate(before);
                    return Err(Interrupted.into());
                }
                let Err(error) = outcome else { continue };
                self.report.rows.truncate(before);
                *absent = error.is::<Skip>();
                self.note(match *absent {
                    true => format!("{system} skipped: {error:#}"),
                    false => format!("{system}, run {run} failed: {error:#}"),
                });
            }
        }
        Ok(())
    }
}

/// Records the values of one run. See [`Context::record`].
#[derive(Debug)]
pub struct Recorder<'a> {
    context: &'a mut Context,
    system: String,
    case: Case,
    run: u32,
}

impl Recorder<'_> {
    /// A value of a metric whose name carries its unit.
    pub fn value(self, metric: &str, value: f64) -> Self {
        self.push(metric, value, None)
    }

    /// The same, with the figure that was published for it, if any was.
    pub fn beside(self, metric: &str, value: f64, published: Option<f64>) -> Self {
        self.push(metric, value, published)
    }

    fn push(self, metric: &str, value: f64, published: Option<f64>) -> Self {
        let (system, case, metric) = (self.system.clone(), self.case.clone(), metric.to_owned());
        self.context.row(Row { system, case, metric, run: self.run, value, published });
        self
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    fn context() -> Context {
        let options = Options {
            quick: true,
            repeats: Some(2),
            out: "out".into(),
            tidegate: "tidegate".into(),
            links: Links::default(),
            only: Vec::new(),
            systems: Vec::new(),
            interrupted: Arc::default(),
        };
        let report = Report { experiment: "trial".into(), ..Report::default() };
        Context::new(&options, 1, report, Progress::silent())
    }

    #[test]
    fn systems_take_turns() {
        let mut turns = Vec::new();
        context()
            .alternate(&["a", "b", "c"], 2, |_, system, run| {
                turns.push(format!("{system}{run}"));
                Ok(())
            })
            .unwrap();
        assert_eq!(turns, ["a1", "b1", "c1", "a2", "b2", "c2"]);
    }

    #[test]
    fn a_failed_run_leaves_a_note_and_no_rows() {
        let mut context = context();
        let case = Case::new();
        context
            .alternate(&["good", "bad"], 2, |context, system, run| {
                context.record(system, &case, run).value("goodput_bit_s", 1.0);
                if *system == "bad" && run == 1 {
                    bail!("no such qdisc");
                }
                Ok(())
            })
            .unwrap();
        let runs: Vec<_> = context.rows().iter().map(|r| (r.system.as_str(), r.run)).collect();
        assert_eq!(runs, [("good", 1), ("good", 2), ("bad", 2)]);
        assert_eq!(context.report.notes, ["bad, run 1 failed: no such qdisc"]);
    }

    #[test]
    fn an_absent_system_is_asked_once() {
        let mut context = context();
        let mut asked = 0;
        context
            .alternate(&["fq"], 5, |_, _, _| {
                asked += 1;
                Err(Skip("this kernel has no fq".into()).into())
            })
            .unwrap();
        assert_eq!(asked, 1);
        assert_eq!(context.report.notes, ["fq skipped: this kernel has no fq"]);
    }

    #[test]
    fn an_interrupt_ends_it_and_drops_the_broken_run() {
        let mut context = context();
        let error = context.alternate(&["a", "b"], 2, |context, system, run| {
            context.record(system, &Case::new(), run).value("x", 1.0);
            context.interrupted.store(*system == "b", Ordering::Relaxed);
            Ok(())
        });
        assert!(error.unwrap_err().is::<Interrupted>());
        assert_eq!(context.rows().len(), 1);
    }

    #[test]
    fn what_is_no_number_becomes_a_note() {
        let mut context = context();
        context.record("htb", &Case::new(), 1).value("x", f64::NAN).value("y", 2.0);
        assert_eq!(context.rows().len(), 1);
        assert_eq!(context.report.notes, ["htb, run 1: x came out as NaN, left out"]);
    }

    #[test]
    fn medians_by_case() {
        let mut context = context();
        let (one, nine) = (Case::new().with("flows", 1), Case::new().with("flows", 9));
        context.record("htb", &one, 1).value("x", 1.0);
        context.record("htb", &nine, 1).value("x", 3.0);
        assert_eq!(context.median("htb", "x", Some(&nine)), Some(3.0));
        assert_eq!(context.median("htb", "x", None), Some(2.0));
        assert_eq!(context.median("nrm", "x", None), None);
    }
}
