//! What a limit and a packet cost by the way in which limits share programs. Needs root.
//!
//! ```text
//! cargo run --release -p tidegate-instruments --example program_sharing -- [RUNS] [LIMITS...]
//! ```
//!
//! Each line is a median of all runs, which take turns, and their range. Packets are datagrams on the
//! loopback device of a namespace, sent by one socket in each cgroup in turn. The figure is the run time of
//! the egress programs by the kernel's statistics, all levels together, with the clock in it. Memory is what
//! the kernel charges to the memory cgroup of this process (version 1), and what it says of maps and
//! programs.

use std::{
    collections::BTreeMap,
    fs,
    net::UdpSocket,
    path::PathBuf,
    time::{Duration, Instant},
};

use tidegate_core::{Direction, Rate, queue_options::VirtualQueueOptions};
use tidegate_instruments::sharing::{Limits, Sharing};
use tidegate_sys::{
    cgroup::{Cgroup, Hierarchy},
    limit::{AttachedLimit, LimitOptions},
    net::NetNs,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const PACKETS: usize = 50_000;
const STATISTICS: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Values by what was measured, in the order of their names.
#[derive(Default)]
struct Values(BTreeMap<String, Vec<f64>>);

impl Values {
    fn add(&mut self, name: String, value: f64) {
        println!("# {name}: {value:.1}");
        self.0.entry(name).or_default().push(value);
    }

    fn print(mut self) {
        for (name, values) in &mut self.0 {
            values.sort_by(f64::total_cmp);
            let (least, most) = (values[0], values[values.len() - 1]);
            println!("{name}: {:.1} [{least:.1} to {most:.1}]", values[values.len() / 2]);
        }
    }
}

/// Cgroups, each with a child, that go when dropped.
struct Groups {
    hierarchy: Hierarchy,
    home: Cgroup,
    groups: Vec<Cgroup>,
}

impl Groups {
    fn new(count: u32) -> Result<Groups> {
        let hierarchy = Hierarchy::find()?;
        let (root, home) = (hierarchy.open("")?, hierarchy.current()?);
        let mut groups = Vec::new();
        for i in 0..count {
            let name = format!("tidegate-{}-sharing-{i}", std::process::id());
            groups.push(hierarchy.create(&root, &name)?);
        }
        Ok(Groups { hierarchy, home, groups })
    }

    /// A socket in each of some groups, which sends to `to`.
    fn sockets(&self, groups: &[Cgroup], net: &NetNs, to: &UdpSocket) -> Result<Vec<UdpSocket>> {
        let mut sockets = Vec::new();
        for group in groups {
            group.add(std::process::id())?;
            let socket = net.run(|| UdpSocket::bind("127.0.0.1:0"))??;
            socket.connect(to.local_addr()?)?;
            sockets.push(socket);
        }
        self.home.add(std::process::id())?;
        Ok(sockets)
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        let _ = self.home.add(std::process::id());
        for group in &self.groups {
            let _ = group.remove(Instant::now() + Duration::from_secs(10));
        }
    }
}

/// A memory cgroup of version 1 for this process.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    fn enter() -> Option<MemoryGroup> {
        let dir = format!("/sys/fs/cgroup/memory/tidegate-{}-sharing", std::process::id());
        fs::create_dir(&dir).ok()?;
        let group = MemoryGroup(dir.into());
        fs::write(group.0.join("cgroup.procs"), "0").ok()?;
        Some(group)
    }

    fn used_kb(&self) -> f64 {
        let text = fs::read_to_string(self.0.join("memory.usage_in_bytes")).unwrap_or_default();
        text.trim().parse::<f64>().unwrap_or(f64::NAN) / 1024.0
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::write("/sys/fs/cgroup/memory/cgroup.procs", "0");
        let _ = fs::remove_dir(&self.0);
    }
}

fn resident_kb() -> f64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(f64::NAN)
}

/// Run time of egress programs for a packet, in nanoseconds.
fn packet_ns(limits: &Limits, sockets: &[UdpSocket]) -> Result<f64> {
    fs::write(STATISTICS, "1")?;
    let before = limits.egress_runs()?;
    for i in 0..PACKETS {
        // A full receive buffer drops packets, long after the programs have run.
        let _ = sockets[i % sockets.len()].send(&[0; 1000]);
    }
    let after = limits.egress_runs()?;
    fs::write(STATISTICS, "0")?;
    Ok((after.0 - before.0) as f64 / PACKETS as f64)
}

fn measure(
    sharing: Sharing,
    count: u32,
    groups: &Groups,
    sockets: &[UdpSocket],
    values: &mut Values,
) -> Result<()> {
    let name = |what| format!("{what} {:<8} {count:>4} limits", sharing.name());
    let rate = Rate::from_bit_s(100_000_000_000).ok_or("a rate")?;
    let used = &groups.groups[..count as usize];
    let memory = MemoryGroup::enter();
    let (before, resident) = (memory.as_ref().map(MemoryGroup::used_kb), resident_kb());
    let begun = Instant::now();
    let mut limits = Limits::new(sharing, count, 1)?;
    for (i, group) in used.iter().enumerate() {
        limits.attach(i as u32 + 1, group, rate)?;
    }
    values.add(name("attach, ms"), begun.elapsed().as_secs_f64() * 1e3);
    if let (Some(group), Some(before)) = (&memory, before) {
        values.add(name("charged, kB"), group.used_kb() - before);
    }
    let own = limits.memory()?;
    values.add(name("maps, kB"), own.maps as f64 / 1024.0);
    values.add(name("programs, kB"), own.programs as f64 / 1024.0);
    values.add(name("resident, kB"), resident_kb() - resident);

    let sockets = &sockets[..used.len()];
    values.add(name("packet, ns"), packet_ns(&limits, sockets)?);
    let passed = limits.passed(1, Direction::Egress)?.0;
    assert_eq!(passed, (PACKETS / sockets.len()) as u64, "{sharing:?}: the limit saw its packets");

    if sharing != Sharing::Own && sharing != Sharing::Ancestor {
        let begun = Instant::now();
        limits.replace_programs()?;
        values.add(name("replace, ms"), begun.elapsed().as_secs_f64() * 1e3);
    }
    let begun = Instant::now();
    drop(limits);
    values.add(name("detach, ms"), begun.elapsed().as_secs_f64() * 1e3);
    Ok(())
}

/// A limit inside another one.
fn nested(sharing: Sharing, groups: &Groups, net: &NetNs, values: &mut Values) -> Result<()> {
    let rate = Rate::from_bit_s(100_000_000_000).ok_or("a rate")?;
    let outer = &groups.groups[0];
    let inner = groups.hierarchy.create(outer, "inner")?;
    let mut limits = Limits::new(sharing, 2, 1)?;
    limits.attach(1, outer, rate)?;
    limits.attach(2, &inner, rate)?;
    let to = net.run(|| UdpSocket::bind("127.0.0.1:0"))??;
    let sockets = groups.sockets(std::slice::from_ref(&inner), net, &to)?;
    values.add(format!("packet, ns {:<8} in two", sharing.name()), packet_ns(&limits, &sockets)?);
    drop((sockets, limits));
    inner.remove(Instant::now() + Duration::from_secs(10))?;
    Ok(())
}

/// As the product attaches limits of scheme `pace`.
fn product(count: u32, groups: &Groups, values: &mut Values) -> Result<()> {
    let memory = MemoryGroup::enter();
    let before = memory.as_ref().map(MemoryGroup::used_kb);
    let rate = Rate::from_bit_s(1_000_000_000)
        .map(|rate| LimitOptions {
            egress: Some(VirtualQueueOptions::new(rate)),
            ingress: Some(VirtualQueueOptions::new(rate)),
            ..LimitOptions::default()
        })
        .ok_or("a rate")?;
    let begun = Instant::now();
    let mut limits = Vec::new();
    for group in &groups.groups[..count as usize] {
        limits.push(AttachedLimit::attach(&groups.hierarchy, group, &rate, None)?);
    }
    values
        .add(format!("attach, ms pace     {count:>4} limits"), begun.elapsed().as_secs_f64() * 1e3);
    if let (Some(group), Some(before)) = (&memory, before) {
        values.add(format!("charged, kB pace     {count:>4} limits"), group.used_kb() - before);
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let runs: u32 = arguments.next().map_or(Ok(5), |text| text.parse())?;
    let counts: Vec<u32> =
        arguments.map(|text| text.parse()).collect::<std::result::Result<_, _>>()?;
    let counts = if counts.is_empty() { vec![1, 100, 1000] } else { counts };
    let groups = Groups::new(counts.iter().copied().max().unwrap_or(1))?;
    let net = NetNs::create(&format!("tidegate-{}-sharing", std::process::id()))?;
    let to = net.run(|| UdpSocket::bind("127.0.0.1:0"))??;
    // Once for all runs: the kernel takes its time to move a process.
    let sockets = groups.sockets(&groups.groups, &net, &to)?;
    let mut values = Values::default();
    for _ in 0..runs {
        for count in &counts {
            for sharing in Sharing::ALL {
                measure(sharing, *count, &groups, &sockets, &mut values)?;
            }
        }
        for sharing in [Sharing::Own, Sharing::Slot, Sharing::Chunk, Sharing::Whole] {
            nested(sharing, &groups, &net, &mut values)?;
        }
        product(1, &groups, &mut values)?;
    }
    product(100.min(groups.groups.len() as u32), &groups, &mut values)?;
    values.print();
    Ok(())
}
