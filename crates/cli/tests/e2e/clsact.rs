//! Limits on devices where the kernel has no tcx, as before Linux 6.6: their programs are filters of clsact.
//! A seccomp filter refuses the links, as such a kernel does.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
};

use seccompiler::{BpfProgram, TargetArch, apply_filter, compile_from_json};
use tidegate_sys::{
    libbpf_rs::{TC_INGRESS, TcHookBuilder, libbpf_sys},
    net::NetNs,
};

use crate::{
    common::{Place, skip},
    edt::{Bed, into},
    htb::links,
    need_root,
};

/// Refuses `BPF_LINK_CREATE` with `EINVAL`.
const NO_LINKS: &str = r#"{"main": {"mismatch_action": "allow", "match_action": {"errno": 22}, "filter": [
    {"syscall": "bpf", "args": [{"index": 0, "type": "dword", "op": "eq", "val": 28}]}]}}"#;

fn no_links() -> Option<BpfProgram> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).ok()?;
    let mut all = compile_from_json(io::Cursor::new(NO_LINKS), arch).ok()?;
    all.remove("main")
}

/// `tidegate` in the sender's namespace: exit code, standard output and error.
fn tidegate(
    place: &Place,
    bed: &Bed,
    filter: Option<&BpfProgram>,
    words: &str,
) -> (i32, String, String) {
    let mut command = into(&bed.sender, env!("CARGO_BIN_EXE_tidegate"));
    place.keep_to(&mut command).args(words.split(' '));
    if let Some(filter) = filter.cloned() {
        // SAFETY: between fork and exec it makes system calls alone, and allocates nothing unless they fail.
        unsafe { command.pre_exec(move || apply_filter(&filter).map_err(io::Error::other)) };
    }
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// What a limit of `dev` and one of `port` hold on one device, whatever the scheme and whichever comes first.
#[test]
fn root_clsact_dev_and_port_hold_one_device_side_by_side() {
    need_root!();
    let Some(filter) = no_links() else { return skip("no seccomp for this architecture") };
    let (place, bed) = (Place::new(), Bed::new());
    let ok = |words: &str| {
        let (code, out, error) = tidegate(&place, &bed, Some(&filter), words);
        assert_eq!(code, 0, "{words}: {error}");
        out
    };
    let before = bed.qdiscs();
    let filters = |side: &str| {
        let shown =
            String::from_utf8(bed.tc(&format!("filter show dev eth0 {side}")).stdout).unwrap();
        shown.lines().filter(|line| line.contains("handle")).count()
    };
    let rates = "--egress 20mbit --ingress 10mbit";
    let add = |name: &str, scope: &str, rest: &str| {
        ok(&format!("limit add {name} --{scope} eth0 {rates} --scheme {rest}"));
    };
    let all_hold = |names: &[&str]| {
        let status: serde_json::Value = serde_json::from_str(&ok("status --json")).unwrap();
        let rows = status["limits"].as_array().unwrap();
        assert_eq!(rows.len(), names.len(), "{status}");
        assert!(rows.iter().all(|row| row["state"] == "in_force"), "{status}");
    };
    let matched = "police --match 10.97.0.2";
    for [first, second] in [["dev", "port"], ["port", "dev"]] {
        add("a", first, "police");
        add("b", second, "police");
        add("c", first, matched);
        add("d", second, matched);
        all_hold(&["a", "b", "c", "d"]);
        assert_eq!(["egress", "ingress"].map(filters), [4, 4], "no links: filters");
        // Each of them meets what passes.
        bed.free(&bed.sender, "1 0 8e6 10.97.0.2");
        let status: serde_json::Value = serde_json::from_str(&ok("status --json")).unwrap();
        for row in status["limits"].as_array().unwrap() {
            let out = if row["dev"] == "eth0" { "egress" } else { "ingress" };
            assert!(row[out]["pass_packets"].as_u64().unwrap() > 0, "{row}");
        }
        // One goes, and the others stay.
        ok("limit del a");
        all_hold(&["b", "c", "d"]);
        // An HTB and its ifb device beside a policer of the other kind.
        ok("limit del c");
        add("a", first, "htb");
        all_hold(&["a", "b", "d"]);
        ok("limit set a --egress 15mbit");
        ok("limit del b");
        all_hold(&["a", "d"]);
        add("b", second, "police");
        all_hold(&["a", "b", "d"]);
        ok("detach");
        assert_eq!(bed.qdiscs(), before);
        assert!(!links(&bed).contains("tgifb"), "{}", links(&bed));
    }
}

/// Somebody's program, which has every packet accepted and ends the chain.
fn accept_all() -> OwnedFd {
    let mut accept = [libbpf_sys::bpf_insn::default(), libbpf_sys::bpf_insn::default()];
    // r0 = TC_ACT_OK; exit
    (accept[0].code, accept[1].code) = (0xb7, 0x95);
    // SAFETY: names are terminated, `accept` holds two instructions, and no options are given.
    unsafe {
        let program = libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
            c"accept_all".as_ptr(),
            c"GPL".as_ptr(),
            accept.as_ptr(),
            2,
            std::ptr::null_mut(),
        );
        assert!(program >= 0);
        OwnedFd::from_raw_fd(program)
    }
}

/// Puts it before all that `eth0` has for what comes in, with tcx; false where the kernel has none.
fn put_first(netns: &NetNs, program: &OwnedFd) -> bool {
    let index = netns.netlink().unwrap().index_of("eth0").unwrap();
    let options = libbpf_sys::bpf_prog_attach_opts {
        sz: size_of::<libbpf_sys::bpf_prog_attach_opts>() as _,
        flags: libbpf_sys::BPF_F_BEFORE,
        ..Default::default()
    };
    // SAFETY: the descriptor is open, and the options outlive the call.
    let attach = || unsafe {
        let (fd, hook) = (program.as_raw_fd(), libbpf_sys::BPF_TCX_INGRESS);
        libbpf_sys::bpf_prog_attach_opts(fd, index as i32, hook, &raw const options)
    };
    netns.run(attach).unwrap() == 0
}

/// A filter of the first priority.
fn put_filter(netns: &NetNs, program: &OwnedFd) {
    let index = netns.netlink().unwrap().index_of("eth0").unwrap();
    let attach = || {
        let mut hook = TcHookBuilder::new(program.as_fd());
        hook.ifindex(index as i32).handle(1).priority(1).hook(TC_INGRESS).attach().unwrap();
    };
    netns.run(attach).unwrap();
}

/// A limit of links, and one of filters: before it come filters and what tcx has.
#[test]
fn root_status_names_a_program_that_runs_before_a_limit() {
    need_root!();
    let Some(no_links) = no_links() else { return skip("no seccomp for this architecture") };
    for (filter, is_filter) in [(None, false), (Some(&no_links), false), (Some(&no_links), true)] {
        let (place, bed) = (Place::new(), Bed::new());
        let tidegate = |words: &str| tidegate(&place, &bed, filter, words);
        let add = "limit add a --dev eth0 --ingress 10mbit --scheme police";
        let (code, _, error) = tidegate(add);
        assert_eq!(code, 0, "{error}");
        let check = "status --check";
        let (code, before, _) = tidegate(check);
        assert!(code == 0 && !before.contains("WARNING"), "{before}");
        let program = accept_all();
        match is_filter {
            true => put_filter(&bed.sender, &program),
            false if put_first(&bed.sender, &program) => {}
            false => {
                skip("this kernel has no tcx");
                continue;
            }
        }
        let (code, said, _) = tidegate(check);
        let names = "runs before the ingress limit `a` on device `eth0`";
        assert!(said.contains("WARNING: a program `accept_all` (id "), "{said}");
        assert!(code == 3 && said.contains(names), "{code} {said}");
        let (code, _, error) = tidegate("detach");
        assert_eq!(code, 0, "{error}");
    }
}
