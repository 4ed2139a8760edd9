//! A daemon that may do what its unit lets it do and no more: capabilities and system calls are read from the
//! unit itself, so that what is missing there is found without systemd.

use std::{ffi::CString, io, os::unix::process::CommandExt};

use rustix::{
    mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount},
    thread::UnshareFlags,
};
use seccompiler::{BpfProgram, TargetArch, apply_filter, compile_from_json};
use tidegate_core::Scheme;

use super::*;

const UNIT: &str = include_str!("../../../../../packaging/systemd/tidegate-daemon.service");
const SYSTEM_SERVICE: &str = include_str!("system-service.txt");

/// The words of a setting of the unit.
fn setting(name: &str) -> Vec<&'static str> {
    let value = |line: &'static str| line.strip_prefix(name)?.strip_prefix('=');
    let lines: Vec<_> = UNIT.lines().filter_map(value).collect();
    assert_eq!(lines.len(), 1, "{name}");
    lines[0].split_whitespace().collect()
}

/// As systemd has it: whoever makes another system call is killed.
fn filter() -> BpfProgram {
    let words = setting("SystemCallFilter").into_iter().flat_map(|word| match word {
        "@system-service" => SYSTEM_SERVICE.lines().filter(|line| !line.starts_with('#')).collect(),
        word => vec![word],
    });
    let arch: TargetArch = std::env::consts::ARCH.try_into().unwrap();
    let compile = |names: &[&str]| {
        let calls: Vec<_> = names.iter().map(|n| format!("{{\"syscall\":\"{n}\"}}")).collect();
        let json = format!(
            "{{\"main\":{{\"mismatch_action\":\"kill_process\",\"match_action\":\"allow\",\
             \"filter\":[{}]}}}}",
            calls.join(",")
        );
        compile_from_json(io::Cursor::new(json), arch).map(|mut all| all.remove("main").unwrap())
    };
    // Names of other architectures are none here.
    let known: Vec<_> = words.filter(|name| compile(&[name]).is_ok()).collect();
    assert!(known.len() > 250 && known.contains(&"bpf"), "{}", known.len());
    compile(&known).unwrap()
}

/// Starts the daemon of a host within its unit's bounds.
fn start(host: &Host) -> Daemon {
    let daemon = spawn(host, &[]);
    daemon.wait_to_say(&format!("node `{}` runs", host.name));
    daemon
}

/// As [`start`], where these mount points are unmounted, without waiting for anything.
fn spawn(host: &Host, unmounted: &[CString]) -> Daemon {
    let said = host.dir().join("said");
    let caps = setting("CapabilityBoundingSet");
    let caps = caps.iter().map(|cap| cap.strip_prefix("CAP_").unwrap().to_lowercase());
    let caps: String = caps.map(|cap| format!(",+{cap}")).collect();
    let mut command = Command::new("setpriv");
    command.arg(format!("--bounding-set=-all{caps}")).args(["--inh-caps=-all", "--no-new-privs"]);
    command.arg(env!("CARGO_BIN_EXE_tidegate")).args(["daemon", host.file()]);
    command.env("TIDEGATE_BPFFS", host.place.store()).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(fs::File::create(&said).unwrap());
    let filter = filter();
    let unmounted = unmounted.to_vec();
    let confine = move || {
        if !unmounted.is_empty() {
            // SAFETY: this process has one thread, and no descriptor of it stands for a mount.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        }
        for mount in &unmounted {
            unmount(mount.as_c_str(), UnmountFlags::DETACH)?;
        }
        apply_filter(&filter).map_err(io::Error::other)
    };
    // SAFETY: between fork and exec it makes system calls alone, and allocates nothing unless they fail.
    unsafe { command.pre_exec(confine) };
    let mut spawn = || command.spawn().unwrap();
    let process = match &host.netns {
        None => spawn(),
        Some(netns) => netns.run(spawn).unwrap(),
    };
    Daemon { process: Guard(process), said }
}

fn host(name: &str, netns: Option<NetNs>) -> Host {
    let udp = port();
    let fleet = format!("acceptors = [\"{name}\"]\nlisten = \"127.0.0.1:{udp}\"");
    Host::new(name, netns, &fleet)
}

/// One acceptor alone has all but what others have in any case.
fn wait_for_its_part(host: &Host, daemon: &Daemon) {
    wait_for(&format!("all but what others have; {}", daemon.said()), || {
        (host.rate() == LIMIT - 3 * ALONE).then_some(())
    });
}

fn ends(mut daemon: Daemon) {
    signal(daemon.process.0.id(), Signal::TERM);
    assert_eq!(daemon.process.exit_code(), 0, "{}", daemon.said());
    assert!(!daemon.said().contains("not permitted"), "{}", daemon.said());
}

/// What a process may do: the names of two capabilities and how many it has.
fn effective(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(hex.trim(), 16).unwrap()
}

const NET_ADMIN: u64 = 1 << 12;
const BPF: u64 = 1 << 39;

fn has_qdisc(scheme: &str) -> bool {
    scheme.parse::<Scheme>().unwrap().info().has_qdisc
}

#[test]
fn root_a_daemon_within_its_unit_sets_the_rates_of_every_scheme() {
    need_root!();
    for scheme in ["pace", "nrm", "police", "police on a device", "spring", "dem", "htb", "tbf"] {
        let (name, on_device) = match scheme.split_once(' ') {
            Some((name, _)) => (name, true),
            None => (scheme, has_qdisc(scheme)),
        };
        let netns = on_device.then(|| {
            let name = format!("tidegate-unit-{}-{}", std::process::id(), scheme.len());
            let netns = NetNs::create(&name).unwrap();
            let mut netlink = netns.netlink().unwrap();
            netlink.add_veth(&VethPair { name: "v0", peer: "v1", peer_netns: None }).unwrap();
            for device in ["lo", "v0", "v1"] {
                let index = netlink.index_of(device).unwrap();
                netlink.set_up(index, true).unwrap();
            }
            netns
        });
        let host = host("h0", netns);
        if on_device {
            let scope = format!("scope = {{ cgroup = \"{}\" }}", host.place.group.path());
            host.change(&scope, "scope = { dev = \"v0\" }");
        }
        host.change("egress = \"100mbit\"", &format!("egress = \"100mbit\"\nscheme = \"{name}\""));
        host.apply();
        let daemon = start(&host);
        wait_for_its_part(&host, &daemon);
        let expected = BPF | if has_qdisc(name) { NET_ADMIN } else { 0 };
        assert_eq!(effective(daemon.process.0.id()), expected, "{scheme}");
        // Some more intervals: nothing that it does again and again is refused.
        let epoch = || host.status()["fleet"]["up_ns"].as_u64().unwrap();
        let later = epoch() + 500_000_000;
        wait_for("some intervals", || (epoch() > later).then_some(()));
        let errors = host.status()["fleet"]["groups"][0]["limits"][0]["error"].clone();
        assert!(errors.is_null(), "{scheme}: {errors}");
        ends(daemon);
        assert_eq!(host.rate(), ALONE, "{scheme}");
    }
}

#[test]
fn root_a_daemon_within_its_unit_outlives_the_service_that_it_limits() {
    need_root!();
    let host = host("h0", None);
    let service = host.place.child("service");
    host.change(host.place.group.path(), service.path());
    host.apply();
    let mut daemon = start(&host);
    wait_for_its_part(&host, &daemon);

    // The service stops, and its cgroup goes with it.
    fs::remove_dir(service.absolute()).unwrap();
    let fleet_rate = || host.status()["fleet"]["groups"][0]["limits"][0]["rate_bit_s"].clone();
    wait_for(&format!("that it is missed: {}", daemon.said()), || {
        assert!(daemon.process.0.try_wait().unwrap().is_none(), "{}", daemon.said());
        host.status()["fleet"]["groups"].is_array().then(|| fleet_rate().is_null()).filter(|n| *n)
    });
    assert_eq!(host.status()["limits"][0]["state"], "waiting");

    // What the unit does at a start: nothing is refused.
    ends(daemon);
    let said = host.apply();
    assert!(said.contains("! work waits: there is no cgroup"), "{said}");
    let daemon = start(&host);
    daemon.wait_to_say("group `uplink` shares");
    assert!(fleet_rate().is_null());

    // The service is back: its limit is put on, and has its part again.
    let service = host.place.child("service");
    let said = host.apply();
    assert!(said.contains("+ work on") && !said.contains("waits"), "{said}");
    assert_eq!(host.status()["limits"][0]["state"], "in_force");
    wait_for_its_part(&host, &daemon);
    ends(daemon);
    drop(service);
}

/// A process that finds no hierarchy mounts one for itself, which the unit does not let it: the daemon says
/// so, and is not killed for the try.
#[test]
fn root_a_daemon_within_its_unit_says_that_there_is_no_cgroup2() {
    need_root!();
    let host = host("h0", None);
    host.apply();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let cgroup2 = mounts.lines().filter(|line| line.contains(" - cgroup2 "));
    let points = cgroup2.map(|line| CString::new(line.split(' ').nth(4).unwrap()).unwrap());
    // What is mounted last lies above the others.
    let mut points: Vec<_> = points.collect();
    points.reverse();
    if points.is_empty() {
        return skip("needs a cgroup2 that is mounted");
    }
    let mut daemon = spawn(&host, &points);
    let ended = wait_for("its end", || daemon.process.0.try_wait().unwrap());
    assert_eq!(ended.code(), Some(2), "{ended}: {}", daemon.said());
    assert!(daemon.said().contains("cgroup v2"), "{}", daemon.said());
}
