//! What a host can and cannot do for limits, and what to do about it: a sentence for each thing that was
//! looked at. Pure, over what [`tidegate_sys::survey`] has seen.

use serde::Serialize;
use tidegate_core::{
    Scheme, Scope,
    choice::{self, Kernel, Request},
    scheme::{SCHEMES, SchemeInfo},
};
use tidegate_sys::{
    preflight::OLDEST_KERNEL,
    survey::{CgroupMounts, ForeignProgram, Hook, OnCgroup, OnDevice, Survey},
};

/// Cgroups and devices that one sentence names at most.
const NAMED_MAX: usize = 5;

/// Whose programs begin so.
const OWNERS: [(&str, &str); 3] = [("cil_", "Cilium"), ("cali_", "Calico"), ("sd_", "systemd")];

/// How well a thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Ok,
    /// It was not tested.
    Unknown,
    /// Something does not work; limits work otherwise.
    Warning,
    /// A limit is not in force, or none can be.
    Problem,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is about, such as `kernel`.
    pub about: &'static str,
    pub verdict: Verdict,
    pub found: String,
    /// What to do; `None` if there is nothing to do.
    pub advice: Option<String>,
}

/// All of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Limits can work here. False also if that is not known, but not for want of privileges.
    pub works: bool,
    pub findings: Vec<Finding>,
}

/// What was seen.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    pub survey: Survey,
    /// `None` if they could not be read.
    pub limits: Option<Limits>,
    /// What runs beside limits.
    pub services: Vec<Service>,
}

/// The limits of the host.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// Those that are installed.
    pub installed: usize,
    /// Why some are not in force, or not alone on their device, each with what to do.
    pub alarms: Vec<String>,
    /// Which wait, and for what.
    pub waiting: Vec<String>,
}

/// A service of ours.
#[derive(Debug, Clone, Default)]
pub struct Service {
    pub verb: &'static str,
    /// The file by which it is wanted.
    pub file: &'static str,
    /// That file is there.
    pub wanted: bool,
    pub runs: bool,
    /// Its work, a sentence each.
    pub does: Vec<String>,
    /// Its faults, each with what to do.
    pub lacks: Vec<(String, String)>,
}

fn ok(about: &'static str, found: impl Into<String>) -> Finding {
    Finding { about, verdict: Verdict::Ok, found: found.into(), advice: None }
}

fn warning(about: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { verdict: Verdict::Warning, advice: Some(advice.into()), ..ok(about, found) }
}

fn problem(about: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { verdict: Verdict::Problem, ..warning(about, found, advice) }
}

/// Something that could not be tested.
fn unknown(root: bool, about: &'static str, found: impl Into<String>) -> Finding {
    let found = found.into();
    let finding = match root {
        true => ok(about, found),
        false => warning(about, found + "; it needs root to tell", "sudo tidegate doctor"),
    };
    Finding { verdict: Verdict::Unknown, ..finding }
}

/// Judges what was seen.
pub fn judge(seen: &Seen) -> Report {
    let survey = &seen.survey;
    let mut findings = foundations(survey);
    let works = findings.iter().all(|finding| finding.verdict != Verdict::Problem);
    if works {
        findings.push(hooks(survey));
        findings.extend(SCHEMES.iter().map(|info| scheme(info, survey)));
        findings.extend(chosen(survey));
    }
    findings.extend(others(survey));
    findings.extend(limits(seen.limits.as_ref(), survey.root));
    findings.extend(seen.services.iter().flat_map(service));
    Report { works, findings }
}

/// What every limit needs.
fn foundations(survey: &Survey) -> Vec<Finding> {
    let (kernel, (major, minor)) = (&survey.kernel, OLDEST_KERNEL);
    let release = format!("Linux {}", kernel.release);
    let version = match kernel.old {
        false => ok("kernel", release),
        true => problem(
            "kernel",
            format!("{release} is too old"),
            format!(
                "boot Linux {major}.{minor} or newer: Debian 12, Ubuntu 24.04 and Fedora 38 have one"
            ),
        ),
    };
    let btf = match (kernel.btf, kernel.sys) {
        (true, _) => ok("BTF", "the kernel has its types"),
        (false, false) => problem("BTF", "/sys is not mounted", "mount -t sysfs sysfs /sys"),
        (false, true) => problem(
            "BTF",
            "the kernel has no /sys/kernel/btf/vmlinux",
            "boot a kernel that is built with CONFIG_DEBUG_INFO_BTF=y, as the distributions' are",
        ),
    };
    let mut all = vec![version, btf];
    if kernel.jit == Some(false) {
        all.push(warning(
            "JIT",
            "the kernel interprets eBPF programs, which makes each packet several times dearer",
            "sysctl net.core.bpf_jit_enable=1",
        ));
    }
    all.push(privileges(survey));
    all.push(cgroups(&survey.cgroups, survey.root));
    all.push(match &survey.bpffs {
        Some(at) => ok("bpffs", format!("mounted at {}", at.display())),
        None => ok("bpffs", "not mounted; the first limit mounts it at /sys/fs/bpf"),
    });
    all
}

fn privileges(survey: &Survey) -> Finding {
    match &survey.lacking {
        None => problem("privileges", "/proc is not mounted", "mount -t proc proc /proc"),
        Some(lacking) if lacking.is_empty() => ok("privileges", "this process may install limits"),
        Some(lacking) if survey.root => problem(
            "privileges",
            format!("root without {}, as in a container", lacking.join(", ")),
            "run tidegate on the host, or start the container with --privileged",
        ),
        Some(_) => warning(
            "privileges",
            "limits need the privileges of root; some things could not be looked at",
            "sudo tidegate doctor",
        ),
    }
}

fn cgroups(mounts: &CgroupMounts, root: bool) -> Finding {
    let about = "cgroups";
    match (&mounts.v2, mounts.v1.is_empty(), &mounts.unmounted) {
        (Some(v2), true, _) => ok(about, format!("version 2 at {}", v2.display())),
        (Some(v2), false, _) => {
            ok(about, format!("version 2 at {}, beside version 1 (hybrid)", v2.display()))
        }
        (None, v1, Some(Ok(()))) => warning(
            about,
            format!(
                "version 2 is not mounted{}: `run`, devices and ports can be limited, services cannot",
                if v1 { "" } else { ", only version 1 is" }
            ),
            "boot with systemd.unified_cgroup_hierarchy=1",
        ),
        (None, _, Some(Err(_))) if !root => {
            warning(about, "version 2 is not mounted", "sudo tidegate doctor")
        }
        (None, _, Some(Err(why))) => problem(
            about,
            format!("version 2 cannot be reached: {why}"),
            "mkdir -p /run/cgroup2 && mount -t cgroup2 none /run/cgroup2",
        ),
        (None, _, None) => unknown(root, about, "not looked at"),
    }
}

fn hook(survey: &Survey, which: Hook) -> Option<bool> {
    survey.hooks.iter().find(|(hook, _)| *hook == which)?.1
}

/// Whether devices can have programs, by either hook.
fn on_devices(survey: &Survey) -> Option<bool> {
    match (hook(survey, Hook::Tcx), hook(survey, Hook::Clsact)) {
        (Some(true), _) | (_, Some(true)) => Some(true),
        (Some(false), Some(false)) => Some(false),
        _ => None,
    }
}

fn hooks(survey: &Survey) -> Finding {
    let with = |is: bool| {
        let names = survey.hooks.iter().filter(move |(_, there)| *there == Some(is));
        names.map(|(hook, _)| hook.name()).collect::<Vec<_>>().join(", ")
    };
    let (there, missing) = (with(true), with(false));
    match (there.is_empty(), missing.is_empty()) {
        (true, true) => unknown(survey.root, "hooks", "not tested"),
        (_, true) => ok("hooks", there),
        // tcx is newer than the oldest kernel, and clsact does the same.
        _ if missing == Hook::Tcx.name() => {
            ok("hooks", format!("{there}; for want of tcx (Linux 6.6) devices have filters"))
        }
        _ => warning(
            "hooks",
            format!("the kernel refuses programs of {missing}"),
            "boot a kernel with CONFIG_CGROUP_BPF, CONFIG_NET_CLS_ACT and CONFIG_BPF_SYSCALL",
        ),
    }
}

/// What keeps a scheme from working here, with what to do; `None` if nothing does.
fn obstacle(info: &SchemeInfo, survey: &Survey) -> Option<(String, String)> {
    let on_cgroups = !info.cgroups.is_empty();
    if on_cgroups && hook(survey, Hook::Cgroup) == Some(false) {
        let advice = "boot a kernel with CONFIG_CGROUP_BPF=y".to_owned();
        return Some(("the kernel refuses programs of cgroups".to_owned(), advice));
    }
    if !info.devices.is_empty() && !on_cgroups && on_devices(survey) == Some(false) {
        let advice = "boot a kernel with CONFIG_NET_CLS_ACT=y".to_owned();
        return Some(("the kernel refuses programs of devices".to_owned(), advice));
    }
    let qdisc = info.qdisc.filter(|kind| survey.qdiscs.get(kind) == Some(&Some(false)))?;
    Some((
        format!("the kernel has no qdisc `{qdisc}`"),
        format!("modprobe sch_{qdisc}, or boot a kernel that has it, or use another scheme"),
    ))
}

/// Whether it limits both directions of a device: what comes in goes through an ifb device then.
fn needs_ifb(info: &SchemeInfo) -> bool {
    info.has_qdisc && info.devices.len() == 2
}

/// Whether something that a scheme needs was not tested.
fn is_untested(info: &SchemeInfo, survey: &Survey) -> bool {
    let has_qdisc = |kind| survey.qdiscs.get(kind).copied().flatten();
    (!info.cgroups.is_empty() && hook(survey, Hook::Cgroup).is_none())
        || (!info.devices.is_empty() && on_devices(survey).is_none())
        || info.qdisc.is_some_and(|kind| has_qdisc(kind).is_none())
        || (needs_ifb(info) && survey.ifb.is_none())
}

fn scheme(info: &SchemeInfo, survey: &Survey) -> Finding {
    let (name, scopes) = (info.name, info.scopes);
    match obstacle(info, survey) {
        Some((why, advice)) => warning("schemes", format!("`{name}` does not work: {why}"), advice),
        None if needs_ifb(info) && survey.ifb == Some(false) => warning(
            "schemes",
            format!("`{name}` cannot limit what comes in by a device: the kernel has no ifb"),
            "modprobe ifb, or use scheme `police`",
        ),
        None if is_untested(info, survey) => {
            unknown(survey.root, "schemes", format!("`{name}` was not tested on {scopes}"))
        }
        None => ok("schemes", format!("`{name}` works on {scopes}")),
    }
}

/// What `auto` picks for each kind of scope.
fn chosen(survey: &Survey) -> Vec<Finding> {
    let qdisc = |kind| survey.qdiscs.get(kind).copied().flatten();
    // With, and without, what was not tested.
    let kernel = |untested: bool| Kernel {
        htb: qdisc("htb").unwrap_or(untested),
        ifb: survey.ifb.unwrap_or(untested),
        fq: qdisc("fq").unwrap_or(untested),
    };
    let scopes = [
        ("a cgroup", Scope::Cgroup(String::new())),
        ("a device", Scope::Dev(String::new())),
        ("a port", Scope::Port(String::new())),
    ];
    let all = scopes.iter().map(|(what, scope)| {
        let (has_parent, in_device, is_parent) = (false, false, false);
        let fields = &["egress", "ingress"];
        let request = Request { scope, has_parent, in_device, is_parent, fields };
        let choose = |untested| choice::choose(&request, kernel(untested));
        match (choose(true), choose(false)) {
            (Ok(choice), Ok(other)) if choice.scheme != other.scheme => {
                let [one, other] = [choice.scheme, other.scheme].map(Scheme::name);
                let found = format!("{what} gets `{one}` or `{other}`, by what the kernel has");
                unknown(survey.root, "auto", found)
            }
            (Ok(choice), _) => {
                ok("auto", format!("{what} gets `{}` ({})", choice.scheme.name(), choice.why))
            }
            (Err(why), _) => warning("auto", format!("{what}: {why}"), "see the lines of schemes"),
        }
    });
    all.collect()
}

/// Who else is attached.
fn others(survey: &Survey) -> Vec<Finding> {
    let mut all = Vec::new();
    match &survey.on_cgroups {
        None => all.push(unknown(survey.root, "others", "cgroups were not looked at")),
        Some(found) => all.extend(others_on_cgroups(found)),
    }
    match &survey.on_devices {
        None => all.push(unknown(survey.root, "others", "devices were not looked at")),
        Some(found) => all.extend(found.iter().flat_map(others_on_device)),
    }
    if all.is_empty() {
        all.push(ok("others", "nobody else is attached to cgroups and devices"));
    }
    all
}

/// `cil_from_netdev` of Cilium.
fn named(program: &ForeignProgram) -> String {
    let ForeignProgram { name, id } = program;
    match OWNERS.iter().find(|(prefix, _)| name.starts_with(prefix)) {
        Some((_, owner)) => format!("`{name}` of {owner}"),
        None if name.is_empty() => format!("program {id}"),
        None => format!("`{name}`"),
    }
}

fn list(items: impl Iterator<Item = String>) -> String {
    let mut items: Vec<_> = items.collect();
    items.sort();
    items.dedup();
    let more = items.len().saturating_sub(NAMED_MAX);
    items.truncate(NAMED_MAX);
    let text = items.join(", ");
    if more == 0 { text } else { format!("{text} and {more} more") }
}

fn others_on_cgroups(found: &[OnCgroup]) -> Vec<Finding> {
    let shown = |on: &OnCgroup| match on.cgroup.as_str() {
        "" => "the root cgroup".to_owned(),
        path => format!("cgroup `{path}`"),
    };
    let (exclusive, shared): (Vec<_>, Vec<_>) = found.iter().partition(|on| on.exclusive);
    let mut all: Vec<_> = exclusive
        .iter()
        .map(|on| {
            let programs = list(on.programs.iter().map(named));
            warning(
                "others",
                format!("{programs} holds the {} hook of {} exclusively", on.hook, shown(on)),
                "no limit can be there or below: have its owner attach it with BPF_F_ALLOW_MULTI",
            )
        })
        .collect();
    if !shared.is_empty() {
        let programs = list(shared.iter().flat_map(|on| &on.programs).map(named));
        let cgroups = list(shared.iter().map(|on| shown(on)));
        all.push(ok("others", format!("{programs} on {cgroups}; limits work beside them")));
    }
    all
}

fn others_on_device(on: &OnDevice) -> Vec<Finding> {
    let device = &on.device;
    let mut all = Vec::new();
    if let Some(qdisc) = &on.qdisc {
        let taken =
            SCHEMES.iter().filter(|info| info.has_qdisc).map(|info| format!("`{}`", info.name));
        all.push(warning(
            "others",
            format!("device `{device}` has the qdisc `{qdisc}` of somebody else at its root"),
            format!("{} replace it, and only with --force; `police` works beside it", list(taken)),
        ));
    }
    let programs =
        on.tcx.iter().map(named).chain(on.filters.iter().map(|name| format!("`{name}`")));
    let programs: Vec<_> = programs.collect();
    if !programs.is_empty() {
        all.push(warning(
            "others",
            format!("device `{device}` has filters: {}", list(programs.into_iter())),
            "a packet that one of them ends (`bpftool net show` has the order) does not meet a limit \
             behind it; limits of cgroups are not concerned",
        ));
    }
    if let Some(xdp) = &on.xdp {
        all.push(warning(
            "others",
            format!("device `{device}` has {} in XDP", named(xdp)),
            "what it drops or redirects meets no limit of the device, and `hook = \"xdp\"` cannot be there",
        ));
    }
    all
}

fn limits(limits: Option<&Limits>, root: bool) -> Vec<Finding> {
    let Some(Limits { installed, alarms, waiting }) = limits else {
        return vec![unknown(root, "limits", "not looked at")];
    };
    let mut all = Vec::new();
    // An alarm says what to do.
    let told = |verdict| move |found: &String| Finding { verdict, ..ok("limits", found.clone()) };
    all.extend(alarms.iter().map(told(Verdict::Problem)));
    all.extend(waiting.iter().map(told(Verdict::Warning)));
    if alarms.is_empty() {
        let are = if *installed == 1 { "limit is" } else { "limits are" };
        all.push(ok("limits", format!("{installed} {are} in force")));
    }
    all
}

fn service(service: &Service) -> Vec<Finding> {
    let (about, Service { verb, file, wanted, runs, does, lacks }) = ("services", service);
    match (runs, wanted) {
        (true, _) => {
            let does = does.iter().map(|what| ok(about, format!("`tidegate {verb}`: {what}")));
            let lacks = lacks.iter();
            let lacks = lacks.map(|(what, advice)| {
                warning(about, format!("`tidegate {verb}`: {what}"), advice.clone())
            });
            let runs = ok(about, format!("`tidegate {verb}` runs"));
            std::iter::once(runs).chain(does).chain(lacks).collect()
        }
        (false, true) => vec![warning(
            about,
            format!("`tidegate {verb}` does not run, though there is {file}"),
            format!("systemctl enable --now tidegate-{verb}"),
        )],
        (false, false) => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
