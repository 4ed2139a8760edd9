//! `wheel`: what an element costs in a timing wheel, in the steady state with a thousand to twenty million
//! standing in it, beside the queues that others sort packets with.
//!
//! A figure is processor time for a pair of one insert and one pop, the stamp's random number and the loop
//! included; `nothing` shows what these are. A run is the median of several slices, each long enough to see
//! the cost that comes once in a while.

use std::fmt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use tidegate_core::wheel::WheelError;

use crate::chart::{Curves, Series};
use crate::context::Context;
use crate::experiment::Experiment;
use crate::host;
use crate::report::Case;
use crate::stats;
use crate::stop::Skip;

use load::{Load, Stamping, Stamps, timed};

mod claims;
mod load;
mod queues;

const PAIR: &str = "pair_ns";
const FILL: &str = "fill_and_empty_ns";
const INSTRUCTIONS: &str = "instructions";

/// Elements in the queue.
const SIZES: [u32; 7] = [1_000, 2_000, 10_000, 100_000, 1_000_000, 2_000_000, 20_000_000];
const QUICK_SIZES: [u32; 3] = [2_000, 100_000, 2_000_000];
/// Filled and emptied again; every turn is with a new queue, so the largest are left out.
const FILL_SIZES: [u32; 3] = [2_000, 100_000, 2_000_000];
/// Elements that a turn of filling and emptying should see at least.
const FILL_LEAST: u32 = 100_000;
/// Where instructions are counted: valgrind is some fifty times as slow as the processor.
const COUNTED_SIZES: [u32; 2] = [2_000, 100_000];
const COUNTED_STEPS: u64 = 100_000;
/// Slices in a run, and their steps: at least so many, and this part of the elements.
const SLICES: usize = 15;
const SLICE_LEAST: u64 = 1 << 14;
const SLICE_PART: u64 = 64;

/// Carousel's figures for 1e3 to 2e7 elements: 21 to 22 ns with a list a slot, 11 to 12 with a pool.
const PUBLISHED_LIST_NS: f64 = 21.5;
const PUBLISHED_POOL_NS: f64 = 11.5;

/// A queue by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Queue {
    Nothing,
    Wheel,
    List,
    Crate,
    Heap,
    Tree,
    Fq,
}

const QUEUES: [Queue; 7] =
    [Queue::Nothing, Queue::Wheel, Queue::List, Queue::Crate, Queue::Heap, Queue::Tree, Queue::Fq];

impl Queue {
    fn name(self) -> &'static str {
        match self {
            Queue::Nothing => "nothing",
            Queue::Wheel => "wheel",
            Queue::List => "list",
            Queue::Crate => "crate",
            Queue::Heap => "heap",
            Queue::Tree => "tree",
            Queue::Fq => "fq",
        }
    }

    /// An empty one, with room for so many.
    fn load(self, elements: u32) -> Result<Box<dyn Load>, WheelError> {
        let elements = elements as usize;
        Ok(match self {
            Queue::Nothing => Box::new(queues::Nothing::default()),
            Queue::Wheel => Box::new(queues::OurWheel::new(elements)?),
            Queue::List => Box::new(queues::ListWheel::new()),
            Queue::Crate => Box::new(queues::CrateWheel::new()),
            Queue::Heap => Box::new(queues::Heap::default()),
            Queue::Tree => Box::new(queues::Tree::default()),
            Queue::Fq => Box::new(queues::Fq::new(elements)),
        })
    }

    fn published(self) -> Option<f64> {
        match self {
            Queue::Wheel => Some(PUBLISHED_POOL_NS),
            Queue::List => Some(PUBLISHED_LIST_NS),
            _ => None,
        }
    }
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A queue that holds so many elements all the time.
struct Standing {
    load: Box<dyn Load>,
    stamps: Stamps,
}

impl Standing {
    /// Fills it, and turns every element over once.
    fn new(queue: Queue, stamping: Stamping, elements: u32) -> Result<Self, WheelError> {
        let (mut load, mut stamps) = (queue.load(elements)?, Stamps::new(stamping));
        load.fill(&mut stamps, elements);
        load.hold(&mut stamps, elements.into());
        Ok(Self { load, stamps })
    }

    /// Nanoseconds a step, the median of slices.
    fn measure(&mut self, elements: u32) -> Option<f64> {
        let steps = (u64::from(elements) / SLICE_PART).max(SLICE_LEAST);
        let slices: Vec<f64> = (0..SLICES)
            .map(|_| {
                let (time, ()) = timed(|| self.load.hold(&mut self.stamps, steps));
                time.as_secs_f64() * 1e9 / steps as f64
            })
            .collect();
        stats::median(&slices)
    }
}

/// The experiment.
#[derive(Debug, Default)]
pub struct Wheel {
    tiny: bool,
}

impl Wheel {
    /// So small that a test can run it.
    pub fn tiny() -> Wheel {
        Wheel { tiny: true }
    }

    fn sizes<'a>(&self, sizes: &'a [u32]) -> &'a [u32] {
        if self.tiny { &sizes[..1] } else { sizes }
    }
}

impl Experiment for Wheel {
    fn name(&self) -> &'static str {
        "wheel"
    }

    fn summary(&self) -> &'static str {
        "Nanoseconds for an element in the timing wheel, beside heap, trees and other wheels"
    }

    fn takes_links(&self) -> bool {
        false
    }

    fn run(&self, ctx: &mut Context) -> anyhow::Result<()> {
        let sizes: &[u32] = if ctx.quick { &QUICK_SIZES } else { &SIZES };
        for stamping in [Stamping::Uniform, Stamping::Bursts] {
            for &elements in self.sizes(sizes) {
                hold_all(ctx, stamping, elements)?;
            }
        }
        for &elements in self.sizes(&FILL_SIZES) {
            fill_all(ctx, elements)?;
        }
        if !self.tiny {
            count_all(ctx)?;
        }
        for stamping in [Stamping::Uniform, Stamping::Bursts] {
            figure(ctx, stamping, self.sizes(sizes));
        }
        claims::claims(ctx);
        ctx.note(
            "Processor time of the thread, so what others use is not in it; but they share caches and \
             memory, and perhaps the core. Every queue but the wheel gets its memory while it is filled; \
             fill_and_empty has that in it, the steady state has not.",
        );
        Ok(())
    }
}

fn case(stamping: Stamping, elements: u32) -> Case {
    Case::new().with("stamps", stamping.name()).with("elements", elements)
}

/// The steady state of every queue, in turn.
fn hold_all(ctx: &mut Context, stamping: Stamping, elements: u32) -> anyhow::Result<()> {
    let case = case(stamping, elements);
    let mut standing = Vec::with_capacity(QUEUES.len());
    for queue in QUEUES {
        ctx.step(format!("{queue}: filling it with {elements}, {}", stamping.name()));
        standing.push(Standing::new(queue, stamping, elements)?);
        ensure!(!ctx.is_interrupted(), crate::stop::Interrupted);
    }
    let repeats = ctx.repeats;
    ctx.alternate(&QUEUES, repeats, |ctx, queue, run| {
        let at = QUEUES.iter().position(|other| other == queue).context("a queue")?;
        let ns = standing[at].measure(elements).context("no slices")?;
        ctx.record(queue, &case, run).beside(PAIR, ns, queue.published());
        Ok(())
    })
}

/// Filled and emptied: an element's cost when nothing is put in while others are taken out.
fn fill_all(ctx: &mut Context, elements: u32) -> anyhow::Result<()> {
    let case = case(Stamping::Uniform, elements);
    let repeats = ctx.repeats;
    ctx.alternate(&QUEUES[1..], repeats, |ctx, queue, run| {
        let mut total_ns = 0.0;
        let turns = FILL_LEAST.div_ceil(elements);
        for _ in 0..turns {
            let (mut load, mut stamps) = (queue.load(elements)?, Stamps::new(Stamping::Uniform));
            let (time, count) = timed(|| {
                load.fill(&mut stamps, elements);
                load.empty()
            });
            ensure!(count == elements, "{count} of {elements} came out");
            total_ns += time.as_secs_f64() * 1e9;
        }
        let ns = total_ns / (f64::from(turns) * f64::from(elements));
        ctx.record(queue, &case, run).value(FILL, ns);
        Ok(())
    })
}

/// Instructions a pair, by valgrind: the difference of two runs of this program, which is exact.
fn count_all(ctx: &mut Context) -> anyhow::Result<()> {
    if host::which("valgrind".as_ref()).is_none() {
        ctx.note("instructions are not counted: there is no `valgrind`; install it");
        return Ok(());
    }
    for elements in COUNTED_SIZES {
        let case = case(Stamping::Uniform, elements);
        ctx.alternate(&QUEUES, 1, |ctx, queue, run| {
            let once = count(ctx, *queue, elements, COUNTED_STEPS)?;
            let twice = count(ctx, *queue, elements, 2 * COUNTED_STEPS)?;
            let each = (twice as f64 - once as f64) / COUNTED_STEPS as f64;
            ctx.record(queue, &case, run).value(INSTRUCTIONS, each);
            Ok(())
        })?;
    }
    Ok(())
}

/// Instructions of a whole run.
fn count(ctx: &Context, queue: Queue, elements: u32, steps: u64) -> anyhow::Result<u64> {
    let file: PathBuf = ctx.out_dir.join("callgrind.out");
    let mut out = std::ffi::OsString::from("--callgrind-out-file=");
    out.push(&file);
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--cache-sim=no", "--branch-sim=no"])
        .arg(out)
        .arg(std::env::current_exe()?)
        .args(["tool", "queue", queue.name()])
        .args([elements.to_string(), steps.to_string()])
        .output()
        .context("valgrind")?;
    let _ = std::fs::remove_file(file);
    let said = String::from_utf8_lossy(&output.stderr);
    let total = said.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok());
    if !output.status.success() {
        return Err(Skip(format!("valgrind fails: {}", said.lines().last().unwrap_or(""))).into());
    }
    total.context("valgrind gave no count")
}

/// What is done under valgrind.
#[derive(Debug, Args)]
pub struct HoldArgs {
    /// Which queue
    #[arg(value_enum)]
    queue: Queue,
    /// How many elements stand in it
    elements: u32,
    /// How many are taken out and put in again
    steps: u64,
}

/// Fills a queue and keeps it in its steady state.
pub fn hold(args: &HoldArgs) -> anyhow::Result<()> {
    let mut standing = Standing::new(args.queue, Stamping::Uniform, args.elements)?;
    standing.load.hold(&mut standing.stamps, args.steps);
    Ok(())
}

fn figure(ctx: &mut Context, stamping: Stamping, sizes: &[u32]) {
    let series = QUEUES.map(|queue| {
        let points = sizes.iter().filter_map(|&elements| {
            let ns = ctx.median(queue.name(), PAIR, Some(&case(stamping, elements)))?;
            Some((f64::from(elements), ns))
        });
        Series::new(queue.name(), points.collect())
    });
    let curves = Curves {
        title: format!("Cost of an insert and a pop, stamps {}", stamping.name()),
        x: "elements".to_owned(),
        y: PAIR.to_owned(),
        series: series.into(),
    };
    ctx.figure(&format!("pair-{}", stamping.name()), curves);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every queue gives back what it was given, and its clock never steps back.
    #[test]
    fn queues_are_queues() {
        for queue in &QUEUES[1..] {
            for stamping in [Stamping::Uniform, Stamping::Bursts] {
                let mut standing = Standing::new(*queue, stamping, 3_000).unwrap();
                standing.load.hold(&mut standing.stamps, 10_000);
                assert_eq!(standing.load.empty(), 3_000, "{queue}");
            }
        }
    }
}
