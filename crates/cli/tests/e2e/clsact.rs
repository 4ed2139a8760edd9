//! Limits on devices where the kernel has no tcx, as before Linux 6.6: their programs are filters of clsact.
//! A seccomp filter refuses the links, as such a kernel does.

use std::{io, os::unix::process::CommandExt};

use seccompiler::{BpfProgram, TargetArch, apply_filter, compile_from_json};

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
fn tidegate(place: &Place, bed: &Bed, filter: &BpfProgram, words: &str) -> (i32, String, String) {
    let mut command = into(&bed.sender, env!("CARGO_BIN_EXE_tidegate"));
    place.keep_to(&mut command).args(words.split(' '));
    let filter = filter.clone();
    // SAFETY: between fork and exec it makes system calls alone, and allocates nothing unless they fail.
    unsafe { command.pre_exec(move || apply_filter(&filter).map_err(io::Error::other)) };
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
        let (code, out, error) = tidegate(&place, &bed, &filter, words);
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
