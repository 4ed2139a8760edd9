//! What many limits cost: the time to apply them from one file and where it goes, memory, and the agent at
//! rest.
//!
//! ```text
//! cargo test --release -p tidegate --test e2e -- --ignored --nocapture root_many_limits
//! ```
//!
//! `TIDEGATE_LIMITS=10,100` says how many, `TIDEGATE_INSIDE=1` has them all inside one limit,
//! `TIDEGATE_UNITS=1` has each name a unit in place of a cgroup, `TIDEGATE_REST=SECONDS` says how long the
//! agent is watched. The parts of the time are those of a second run under strace, which makes each system
//! call slower: read them as parts.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fmt::Write as _,
    fs, mem,
    os::fd::{AsFd, AsRawFd},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use tidegate_sys::{
    cgroup::Cgroup,
    libbpf_rs::{
        MapHandle, Program,
        query::{ProgInfoIter, ProgInfoQueryOptions},
    },
    links::{self, On},
};

use crate::{
    agent::Slice,
    common::{Guard, Objects, Place, signal, wait_within},
    need_root,
};

/// Enough for limits that each load programs of their own.
const LONG: Duration = Duration::from_secs(3600);
/// What is listed of the system calls.
const SHOWN: usize = 12;

fn number<T: std::str::FromStr>(name: &str) -> Option<T> {
    env::var(name).ok()?.parse().ok()
}

/// The maps and programs of limits on cgroups: how many, and the bytes that the kernel says of them.
fn memory_of(groups: &[Cgroup]) -> (usize, u64) {
    let groups: BTreeSet<_> = groups.iter().map(Cgroup::id).collect();
    let links = links::all().filter_map(|link| match link.on {
        On::Cgroup { id, .. } if groups.contains(&id) => Some(link.program),
        _ => None,
    });
    let programs: BTreeSet<_> = links.collect();
    let query = ProgInfoQueryOptions::default().include_map_ids(true);
    let infos = ProgInfoIter::with_query_opts(query).filter(|info| programs.contains(&info.id));
    let maps: BTreeSet<_> = infos.flat_map(|info| info.map_ids).collect();
    let maps = maps.into_iter().map(|id| (false, id));
    let objects = maps.chain(programs.into_iter().map(|id| (true, id)));
    let of = |fd: &dyn AsRawFd| -> Option<u64> {
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
        text.lines().find_map(|line| line.strip_prefix("memlock:")?.trim().parse().ok())
    };
    let sizes = objects.filter_map(|object| match object {
        (true, id) => of(&Program::fd_from_id(id).ok()?),
        (false, id) => of(&MapHandle::from_map_id(id).ok()?.as_fd()),
    });
    let sizes: Vec<_> = sizes.collect();
    (sizes.len(), sizes.iter().sum())
}

/// User and system time of all children that have ended.
fn cpu_of_children() -> Duration {
    // SAFETY: the struct is integers, for which all zeros is a value; the call fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let time = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// User and system time of a process that lives.
fn cpu_of(pid: u32) -> Duration {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields = text.rsplit(')').next().unwrap().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
    // SAFETY: no memory is involved.
    let hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Duration::from_secs_f64(ticks as f64 / hz as f64)
}

/// A line of /proc/PID/status, in kB.
fn kilobytes(pid: u32, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or_default()
}

/// Sums a trace of strace: time and number by system call, those of bpf(2) by what they do.
fn parts(trace: &Path) -> BTreeMap<String, (f64, u32)> {
    let mut parts: BTreeMap<String, (f64, u32)> = BTreeMap::new();
    for line in fs::read_to_string(trace).unwrap_or_default().lines() {
        let call = line.split_once(' ').map_or(line, |(_, call)| call.trim_start());
        let Some((name, rest)) = call.split_once('(') else { continue };
        let Some(seconds) =
            line.rsplit_once('<').and_then(|(_, s)| s.trim_end_matches('>').parse::<f64>().ok())
        else {
            continue;
        };
        let name = match name {
            "bpf" => rest.split([',', ' ', ')']).next().unwrap_or("bpf"),
            name => name,
        };
        let part = parts.entry(name.to_owned()).or_default();
        part.0 += seconds;
        part.1 += 1;
    }
    parts
}

/// Limits on cgroups of their own, as one file; inside one on the cgroup above, if there is one.
fn file_of(groups: &[Cgroup], above: Option<&Cgroup>, are_units: bool) -> String {
    let mut text = String::new();
    let mut limit = |name: &str, group: &Cgroup, more: &str| {
        let unit = group.path().rsplit('/').next().filter(|_| are_units);
        let scope = match unit {
            Some(unit) => format!("unit = \"{unit}\""),
            None => format!("cgroup = \"{}\"", group.path()),
        };
        let _ = writeln!(
            text,
            "[[limit]]\nname = \"{name}\"\nscope = {{ {scope} }}\negress = \"50mbit\"\n\
             ingress = \"50mbit\"\n{more}"
        );
    };
    if let Some(above) = above {
        limit("above", above, "");
    }
    let inside = if above.is_some() { "parent = \"above\"\n" } else { "" };
    for (i, group) in groups.iter().enumerate() {
        limit(&format!("l{i}"), group, inside);
    }
    text
}

fn timed(command: &mut Command) -> (Duration, Duration) {
    let (start, cpu) = (Instant::now(), cpu_of_children());
    let output = command.stdout(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (start.elapsed(), cpu_of_children() - cpu)
}

fn measure(count: usize, rest: Duration) {
    let place = Place::new();
    let slice = number::<u8>("TIDEGATE_UNITS").map(|_| Slice::new(&place));
    let make = |i| match &slice {
        Some(slice) => slice.make(&format!("{}-{i}.service", slice.unique)),
        None => place.child(&format!("l{i}")),
    };
    let groups: Vec<_> = (0..count).map(make).collect();
    let above = number::<u8>("TIDEGATE_INSIDE").map(|_| &place.group);
    let file = place.file("limits.toml", &file_of(&groups, above, slice.is_some()));
    let file = file.to_str().unwrap();
    let (all, cpu) = timed(place.tidegate().args(["apply", file]));
    let (number, bytes) = memory_of(&groups);
    println!(
        "{count} limits: apply {all:.2?} (CPU {cpu:.2?}); {number} maps and programs, {bytes} bytes"
    );
    assert!([&groups[0], &groups[count - 1]].iter().all(|group| Objects::on(group).is_whole()));
    let (again, cpu) = timed(place.tidegate().args(["apply", file]));
    println!("  apply again {again:.2?} (CPU {cpu:.2?})");
    rest_of_agent(&place, file, rest);
    let (detach, cpu) = timed(place.tidegate().arg("detach"));
    println!("  detach {detach:.2?} (CPU {cpu:.2?})");

    let trace = place.file("trace", "");
    let mut command = Command::new("strace");
    command.args(["-f", "-T", "-o"]).arg(&trace).arg(env!("CARGO_BIN_EXE_tidegate"));
    command.env("TIDEGATE_BPFFS", place.store()).args(["apply", file]);
    if Command::new("strace").arg("-V").output().is_ok() {
        let (all, cpu) = timed(&mut command);
        let mut parts: Vec<_> = parts(&trace).into_iter().collect();
        parts.sort_by(|(_, (a, _)), (_, (b, _))| b.total_cmp(a));
        let calls: f64 = parts.iter().map(|(_, (seconds, _))| seconds).sum();
        println!(
            "  under strace {all:.2?} (CPU with strace {cpu:.2?}), of it in the kernel {calls:.2} s"
        );
        for (name, (seconds, times)) in parts.iter().take(SHOWN) {
            println!("    {seconds:8.3} s {times:7} x {name}");
        }
        place.ok(&["detach"]);
    }
}

/// The agent takes the limits over, and does nothing.
fn rest_of_agent(place: &Place, file: &str, rest: Duration) {
    if rest.is_zero() {
        return;
    }
    let marker = place.file("marker", "");
    let (dir, run) = (marker.with_file_name("etc"), marker.with_file_name("run"));
    fs::create_dir_all(&dir).unwrap();
    fs::copy(file, dir.join("limits.toml")).unwrap();
    let start = Instant::now();
    let mut command = place.tidegate();
    command.env("TIDEGATE_RUN_DIR", &run).arg("agent").arg(&dir);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let agent =
        Guard(command.arg("--engine").arg(marker.with_file_name("none.sock")).spawn().unwrap());
    let pid = agent.0.id();
    // It writes its report when all is done.
    wait_within(LONG, "the agent", || {
        let mut files = fs::read_dir(&run).ok()?.flatten();
        let says = |path| fs::read_to_string(path).is_ok_and(|text| text.contains("in_force"));
        files.any(|file| says(file.path())).then_some(())
    });
    println!("  agent ready after {:.2?} (CPU {:.2?})", start.elapsed(), cpu_of(pid));
    let (start, cpu) = (Instant::now(), cpu_of(pid));
    thread::sleep(rest);
    let (used, watched) = (cpu_of(pid) - cpu, start.elapsed());
    println!(
        "  agent at rest for {watched:.0?}: {used:.2?} of CPU, {:.3} % of a core; \
         resident {} kB, at most {} kB",
        100.0 * used.as_secs_f64() / watched.as_secs_f64(),
        kilobytes(pid, "VmRSS:"),
        kilobytes(pid, "VmHWM:"),
    );
    signal(pid, Signal::TERM);
}

#[test]
#[ignore = "measures; takes minutes"]
fn root_many_limits_are_applied_and_rest() {
    need_root!();
    let counts = env::var("TIDEGATE_LIMITS").unwrap_or_else(|_| "10,100,1000".to_owned());
    let rest = Duration::from_secs(number("TIDEGATE_REST").unwrap_or(60));
    for count in counts.split(',') {
        measure(count.parse().unwrap(), rest);
    }
}
