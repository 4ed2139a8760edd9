//! One condition over many cases.

use crate::context::Context;

/// In how many cases it was looked for, and where it did not hold.
#[derive(Default)]
pub(super) struct Tally {
    all: usize,
    failed: Vec<String>,
}

impl Tally {
    pub(super) fn add(&mut self, holds: bool, words: String) {
        self.all += 1;
        if !holds {
            self.failed.push(words);
        }
    }

    /// Nothing where no case was run.
    pub(super) fn claim(self, ctx: &mut Context, claim: String) {
        if self.all == 0 {
            return;
        }
        let held = self.all - self.failed.len();
        let mut measured = format!("in {held} of {} cases", self.all);
        if !self.failed.is_empty() {
            measured += &format!("; not: {}", self.failed.join("; "));
        }
        ctx.claim(claim, self.failed.is_empty(), measured);
    }
}
