//! A report as a page of Markdown, for people.

use crate::{
    report::{Claim, FigureFile, Report},
    stalls::Stalls,
    table,
};

impl Report {
    /// The report as a Markdown page.
    pub fn markdown(&self) -> String {
        let mut page = format!("# {}\n\n{}\n\n", self.experiment, self.summary);
        page += &format!(
            "Made by `{}` (version {}{}) on {} in {:.0} s.{}{}\n\n",
            self.command,
            self.version,
            self.commit_text(),
            self.started,
            self.elapsed_s,
            if self.quick { " This is the quick form: fewer and shorter runs." } else { "" },
            if self.interrupted { " **It stopped before its end: this is a part.**" } else { "" },
        );
        page += &self.machine();
        if !self.claims.is_empty() {
            page += "## Claims\n\n";
            for Claim { claim, holds, measured } in &self.claims {
                page += &format!("- {} {claim} — {measured}\n", if *holds { '✔' } else { '✘' });
            }
            page.push('\n');
        }
        let tables = table::full(self);
        if !tables.is_empty() {
            page += "## Results\n\nMedian [min–max] of the runs; in parentheses the published figure.\n\n";
        }
        for table in tables {
            page += &table.markdown();
            page.push('\n');
        }
        if !self.figures.is_empty() {
            page += "## Figures\n\n";
        }
        for FigureFile { file, title } in &self.figures {
            page += &format!("![{title}]({file})\n\n");
        }
        if !self.notes.is_empty() {
            page += "## Notes\n\n";
            for note in &self.notes {
                page += &format!("- {}\n", note.replace('\n', "\n  "));
            }
        }
        page.truncate(page.trim_end().len());
        page.push('\n');
        page
    }

    /// `, commit 0123456789ab, changed`; empty without a commit.
    fn commit_text(&self) -> String {
        let Some(commit) = &self.commit else { return String::new() };
        let short: String = commit.chars().take(12).collect();
        format!(", commit {short}{}", if self.dirty == Some(true) { ", changed" } else { "" })
    }

    fn machine(&self) -> String {
        let mut lines = format!("| machine | |\n|:--|:--|\n| kernel | {} |\n", self.kernel);
        lines += &format!("| processor | {}, {} cores |\n", self.cpu, self.host.cores);
        for (tool, version) in &self.host.tools {
            lines += &format!("| {tool} | {} |\n", table::escaped(version));
        }
        if let Some(text) = self.stalls_text() {
            lines += &format!("| stalls | {text} |\n");
        }
        lines.push('\n');
        lines
    }

    /// How the machine stood still meanwhile, for people; none if it did not, or was not watched.
    pub fn stalls_text(&self) -> Option<String> {
        let Stalls { count, total_ms, longest_ms, stolen_ms } = self.stalls?;
        let mut stood = Vec::new();
        if count > 0 {
            let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
            stood.push(format!(
                "the whole machine stood still {times}, {total_ms:.0} ms in all, {longest_ms:.0} ms at most"
            ));
        }
        if stolen_ms > 0.0 {
            stood.push(format!("a hypervisor held a CPU or more for {stolen_ms:.0} ms"));
        }
        let stood = (!stood.is_empty()).then(|| stood.join("; "))?;
        Some(format!("{stood}; probes that overlap this are left out, of every system alike"))
    }
}
