//! How long it takes from the start of a program in a new cgroup until its limit is in force. Needs root.
//!
//! ```text
//! cargo run --release -p tidegate-agent --example starts -- [STARTS] [OWN]
//! ```
//!
//! An agent runs in this process. STARTS services (1000) come and go, one at a time, under one limit
//! for all of them; then OWN services (100) of which each gets a limit of its own (`each = true`). A
//! start counts from before the fork of a process that moves itself into the cgroup and executes
//! `sleep`, until the links are in place. Then what the agent does is measured alone.

use std::{
    collections::BTreeSet,
    env, fs, io,
    path::PathBuf,
    process::{Command, Stdio, exit},
    thread,
    time::{Duration, Instant},
};

use jiff::Zoned;
use rustix::process::{Signal, getpid, kill_process};
use tidegate_agent::{
    apply, directory,
    goal::goal,
    report::{GateState, RunFiles},
    run::{self, AgentOptions},
    scan,
};
use tidegate_host::host::Host;
use tidegate_sys::{
    bpffs::PrivateBpffs,
    cgroup::{Cgroup, Hierarchy},
    net::{SpawnInto, prepare},
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Services rest for so long before the next one starts, so that the agent is idle then.
const REST: Duration = Duration::from_millis(100);
/// What is waited for comes in this time, or not at all.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often each part is measured.
const PARTS: usize = 100;

/// Directories and cgroups of this run. The limits end with the file system of their pins.
struct Place {
    bpffs: PrivateBpffs,
    dir: tempfile::TempDir,
    hierarchy: Hierarchy,
    slice: Cgroup,
}

impl Place {
    fn new() -> Result<Place> {
        let dir = tempfile::tempdir()?;
        for name in ["bpffs", "etc"] {
            fs::create_dir(dir.path().join(name))?;
        }
        let bpffs = PrivateBpffs::mount(dir.path().join("bpffs"))?;
        let hierarchy = Hierarchy::find()?;
        let name = format!("starts{}.slice", std::process::id());
        let slice = hierarchy.create(&hierarchy.open("")?, &name)?;
        Ok(Place { bpffs, dir, hierarchy, slice })
    }

    fn options(&self) -> AgentOptions {
        AgentOptions {
            directory: self.dir.path().join("etc"),
            store: self.bpffs.path().join("tidegate"),
            run_dir: self.dir.path().join("run"),
            sockets: Vec::new(),
            cluster: None,
            below: PathBuf::from(self.slice.path()),
            deadline: Duration::from_secs(3600),
            group: String::new(),
        }
    }

    /// One start; how long it took. `pins`: where its links are seen, from the id of its cgroup.
    fn start(&self, name: &str, pins: impl Fn(u64) -> PathBuf) -> Result<Duration> {
        let cgroup = self.hierarchy.create(&self.slice, name)?;
        let mut command = Command::new("sleep");
        command.arg("1000").stdin(Stdio::null());
        let cgroup_procs = Some(cgroup.open_procs()?.into());
        prepare(&mut command, SpawnInto { cgroup_procs, ..SpawnInto::default() })?;
        let pins = pins(cgroup.id());
        let begun = Instant::now();
        let mut process = command.spawn()?;
        let came = wait("the limit", || pins.exists());
        let took = begun.elapsed();
        process.kill()?;
        process.wait()?;
        cgroup.remove(Instant::now() + PATIENCE)?;
        came?;
        thread::sleep(REST);
        Ok(took)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.slice.remove(Instant::now() + PATIENCE);
    }
}

fn wait(what: &str, mut is: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !is() {
        if Instant::now() > end {
            return Err(format!("waited in vain for {what}").into());
        }
        thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |percent: usize| times.get((times.len() * percent / 100).min(times.len() - 1));
    let [p50, p99, max] =
        [50, 99, 100].map(|percent| at(percent).map_or(0.0, Duration::as_secs_f64));
    let [p50, p99, max] = [p50, p99, max].map(|seconds| seconds * 1e3);
    println!("{what}: p50 {p50:.1} ms, p99 {p99:.1} ms, max {max:.1} ms ({} times)", times.len());
}

/// Calls `f` some times; how long each took.
fn times(f: impl Fn() -> Result<()>) -> Result<Vec<Duration>> {
    let one = |_| {
        let begun = Instant::now();
        f().map(|()| begun.elapsed())
    };
    (0..PARTS).map(one).collect()
}

fn limit(name: &str, unit: &str, rest: &str) -> String {
    format!(
        "[[limit]]\nname = \"{name}\"\nscope = {{ unit = \"{unit}\" }}\negress = \"20mbit\"\n{rest}\n"
    )
}

fn measure(place: &Place, run: &RunFiles, starts: usize, own: usize) -> Result<()> {
    let options = place.options();
    wait("the gate", || run.read().is_some_and(|report| report.gate.state == GateState::Open))?;
    let pins = |id: u64| options.store.join(format!("shared/members/{id}"));
    // The first one has the programs loaded.
    place.start("shared-first.service", pins)?;
    let shared = (0..starts).map(|number| place.start(&format!("shared-{number}.service"), pins));
    print("one limit for all services", shared.collect::<Result<_>>()?);
    let start = |number| {
        let pins = options.store.join(format!("own-own-{number}_service"));
        let took = place.start(&format!("own-{number}.service"), |_| pins.clone())?;
        wait("the end of the limit", || !pins.exists())?;
        Ok(took)
    };
    let own = (0..own).map(start).collect::<Result<Vec<_>>>()?;
    if !own.is_empty() {
        print("a limit for each service", own);
    }
    parts(place, &options)
}

/// What the agent does for each start, with one service there.
fn parts(place: &Place, options: &AgentOptions) -> Result<()> {
    let cgroup = place.hierarchy.create(&place.slice, "shared-last.service")?;
    let pins = options.store.join(format!("shared/members/{}", cgroup.id()));
    wait("the limit", || pins.exists())?;
    thread::sleep(REST);
    let files = directory::read(&options.directory);
    let host = Host::open(&options.store)?;
    let reach =
        || goal(&files, &scan::scan(&place.hierarchy, place.slice.path(), false), &Zoned::now());
    let reached = times(|| {
        reach();
        Ok(())
    });
    print("part: scan of the cgroups and goal", reached?);
    let (goal, managed) = (reach(), BTreeSet::from(["shared".to_owned()]));
    let same = || {
        let applied = apply::apply(&host, &files, &goal, &managed)?;
        if applied.problems.is_empty() { Ok(()) } else { Err(applied.problems.join("; ").into()) }
    };
    print("part: reading what is in force, and a plan without a change", times(same)?);
    Ok(cgroup.remove(Instant::now() + PATIENCE)?)
}

fn main() -> Result<()> {
    let number = |at: usize, otherwise: usize| {
        env::args().nth(at).map_or(Ok(otherwise), |text| text.parse::<usize>())
    };
    let (starts, own) = (number(1, 1000)?, number(2, 100)?);
    let place = Place::new()?;
    let options = place.options();
    let text =
        limit("shared", "shared-*.service", "") + &limit("own", "own-*.service", "each = true");
    fs::write(options.directory.join("limits.toml"), text)?;
    let run = RunFiles::at(&options.run_dir);
    let agent = thread::spawn(move || run::run(&options, |_| {}).map_err(|e| e.to_string()));
    let measured = measure(&place, &run, starts, own);
    kill_process(getpid(), Signal::TERM)?;
    let ended = agent.join().map_err(|_| io::Error::other("the agent has failed"))?;
    drop(place);
    if let Err(e) = measured.and(ended.map_err(Into::into)) {
        eprintln!("{e}");
        exit(1);
    }
    Ok(())
}
