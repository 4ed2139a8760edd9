//! Reads what runs on the host: cgroups, programs, users.

use std::{collections::BTreeMap, env, fs, os::unix::fs::MetadataExt, path::Path};

use jiff::tz::TimeZone;
use tidegate_core::Scope;
use tidegate_host::{
    spec::Spec,
    world::{MAX_PROGRAMS, Program, World},
};
use tidegate_sys::{cgroup::Hierarchy, names, net::Netlink, store::contains};

/// Paths of cgroups, each with its id.
pub type Cgroups = BTreeMap<String, u64>;

/// The cgroups and programs that run now at and below a cgroup. Of more cgroups than are looked at those of
/// `before` are still known.
pub fn scan(hierarchy: &Hierarchy, top: &str, programs: bool, before: &Cgroups) -> World {
    let (paths, whole) = hierarchy.all_below(top);
    let mut cgroups = with_ids(hierarchy.mount(), paths.iter());
    if !whole {
        keep(&mut cgroups, before, hierarchy.mount());
    }
    World {
        cgroups,
        has_more: !whole,
        users: names::users(),
        programs: if programs { self::programs(top) } else { Vec::new() },
        ..World::default()
    }
}

/// Adds those of `before` that were left out and are still there.
fn keep(cgroups: &mut Cgroups, before: &Cgroups, mount: &Path) {
    let missing = before.keys().filter(|path| !cgroups.contains_key(*path));
    let found = with_ids(mount, missing);
    cgroups.extend(found);
}

/// The cgroups of these paths that there are now.
fn with_ids<'a>(mount: &Path, paths: impl Iterator<Item = &'a String>) -> Cgroups {
    let known = paths.filter_map(|path| {
        let id = fs::metadata(mount.join(path)).ok()?.ino();
        Some((path.clone(), id))
    });
    known.collect()
}

/// The numbers of devices by their names; `None`: there is none. One that the kernel does not tell of is
/// left out.
pub fn devices(names: impl Iterator<Item = String>) -> BTreeMap<String, Option<u32>> {
    let Ok(mut netlink) = Netlink::open() else { return BTreeMap::new() };
    let device = |name: String| match netlink.index_of(&name) {
        Ok(index) => Some((name, Some(index))),
        Err(e) if e.is_absent() => Some((name, None)),
        Err(_) => None,
    };
    names.filter_map(device).collect()
}

/// Has cgroups that are written with the mount point before them without it.
pub fn relative(hierarchy: &Hierarchy, spec: &mut Spec) {
    for limit in &mut spec.limits {
        if let Scope::Cgroup(path) = &mut limit.scope {
            *path = hierarchy.relative(Path::new(path));
        }
    }
}

/// Why schedules are in UTC here though the host says another zone; `None` if all is well. A host that says
/// no zone is in UTC.
pub fn zone_problem() -> Option<String> {
    let is_said = env::var_os("TZ").is_some() || Path::new("/etc/localtime").exists();
    let error = TimeZone::try_system().err().filter(|_| is_said)?;
    Some(format!("the time zone of this host cannot be read, so schedules are in UTC: {error}"))
}

/// The processes at and below a cgroup that execute a file; threads of the kernel do not.
fn programs(top: &str) -> Vec<Program> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_below = |program: &Program| contains(top, &program.cgroup);
    pids.filter_map(program).filter(is_below).take(MAX_PROGRAMS).collect()
}

fn program(pid: u32) -> Option<Program> {
    let exe = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    let exe = exe.to_string_lossy().trim_end_matches(" (deleted)").to_owned();
    let args = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let args: Vec<_> = args.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    let args = args.join(" ").trim_end().to_owned();
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let cgroup = cgroup.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Program { pid, exe, args, cgroup: cgroup.trim_end_matches(" (deleted)").to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_that_are_left_out_are_known_while_they_exist() {
        let mount = tempfile::tempdir().unwrap();
        for path in ["found", "left-out"] {
            fs::create_dir(mount.path().join(path)).unwrap();
        }
        let id = |path: &str| fs::metadata(mount.path().join(path)).unwrap().ino();
        let mut cgroups = Cgroups::from([("found".to_owned(), id("found"))]);
        let before = ["found", "left-out", "gone"].map(|path| (path.to_owned(), 1));
        keep(&mut cgroups, &before.into(), mount.path());
        let both = ["found", "left-out"].map(|path| (path.to_owned(), id(path)));
        assert_eq!(cgroups, both.into());
    }

    #[test]
    fn this_program_is_found() {
        let own = program(std::process::id()).unwrap();
        assert_eq!(own.exe, env::current_exe().unwrap().to_string_lossy());
    }
}
