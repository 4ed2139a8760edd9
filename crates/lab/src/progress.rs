//! Word of what the lab is doing, on standard error: a spinner on a terminal, a line a step elsewhere.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use tidegate_chart::text::Paint;

/// Shows the steps of one experiment.
#[derive(Debug)]
pub struct Progress {
    name: String,
    show: Show,
}

#[derive(Debug)]
enum Show {
    Spinner(ProgressBar),
    Lines,
    Nothing,
}

impl Progress {
    /// Shows the steps of `name` on standard error.
    pub fn on_stderr(name: &str) -> Progress {
        // The test harness captures only the print macros, which panic on a closed pipe.
        if cfg!(test) {
            return Progress::silent();
        }
        let terminal = std::io::stderr().is_terminal();
        if !terminal {
            return Progress { name: name.to_owned(), show: Show::Lines };
        }
        let template = match Paint::for_terminal(terminal).is_coloured() {
            true => "{spinner:.cyan} {prefix:.bold} {wide_msg} {elapsed:.dim}",
            false => "{spinner} {prefix} {wide_msg} {elapsed}",
        };
        let style = ProgressStyle::with_template(template)
            .unwrap_or_else(|_| ProgressStyle::default_spinner());
        let spinner = ProgressBar::new_spinner().with_style(style).with_prefix(name.to_owned());
        spinner.enable_steady_tick(Duration::from_millis(120));
        Progress { name: name.to_owned(), show: Show::Spinner(spinner) }
    }

    /// Shows nothing.
    pub fn silent() -> Progress {
        Progress { name: String::new(), show: Show::Nothing }
    }

    /// What is being done now.
    pub fn step(&self, what: &str) {
        match &self.show {
            Show::Spinner(spinner) => spinner.set_message(what.to_owned()),
            Show::Lines => eprintln_forgiving(&format!("{}: {what}", self.name)),
            Show::Nothing => {}
        }
    }

    /// A line that stays.
    pub fn say(&self, what: &str) {
        match &self.show {
            Show::Spinner(spinner) => spinner.println(format!("{}: {what}", self.name)),
            Show::Lines => eprintln_forgiving(&format!("{}: {what}", self.name)),
            Show::Nothing => {}
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Show::Spinner(spinner) = &self.show {
            spinner.finish_and_clear();
        }
    }
}

/// `eprintln!` panics when standard error is a closed pipe; progress is not worth a panic.
fn eprintln_forgiving(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{line}");
}
