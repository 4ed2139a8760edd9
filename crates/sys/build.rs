//! Builds the eBPF programs in `bpf/`, its pure headers for the tests, and Rust's side of what both share.

use std::{env, error::Error, path::Path};

use bindgen::{
    Builder, Formatter,
    callbacks::{DeriveInfo, ItemInfo, ItemKind, ParseCallbacks, TypeKind},
};

#[path = "../../bpf/build.rs"]
mod bpf;

const BPF: &str = "../../bpf";

/// The types that every limit has, and those of `nrm`, `edt` and `police`; their names in Rust.
const INTF: [(&str, &str); 30] = [
    ("ad_turns", "Turns"),
    ("cl_class", "ClassConf"),
    ("pl_action", "pl_action"),
    ("pl_bucket", "Bucket"),
    ("pl_kept", "Kept"),
    ("pl_kind", "pl_kind"),
    ("pl_meter", "Meter"),
    ("pl_policy", "Policy"),
    ("pl_side", "Side"),
    ("sm_cell", "FlowCell"),
    ("sm_counts", "FlowCells"),
    ("tg_adoption", "Adoption"),
    ("tg_counters", "Counters"),
    ("tg_edt_queue", "EdtQueue"),
    ("tg_group", "Group"),
    ("tg_length", "Length"),
    ("tg_lengths", "Lengths"),
    ("tg_limit", "Limit"),
    ("tg_nrm_queue", "NrmQueue"),
    ("tg_place", "PlaceKey"),
    ("tg_police_counters", "PoliceCounters"),
    ("tg_police_limit", "Entry"),
    ("tg_queue", "Queue"),
    ("tg_slot", "Slot"),
    ("vq_conf", "QueueConf"),
    ("pl_colour", "pl_colour"),
    ("tg_direction", "tg_direction"),
    ("tg_flags", "tg_flags"),
    ("tg_outcome", "tg_outcome"),
    ("tg_risk", "tg_risk"),
];

/// Those of `dem` and `spring`.
const ACKS: [(&str, &str); 15] = [
    ("ac_flow", "Flow"),
    ("ac_limit", "Limit"),
    ("ac_scheme", "ac_scheme"),
    ("ac_state", "State"),
    ("dem_conf", "DemConf"),
    ("dem_marker", "Marker"),
    ("fc_count", "FlowCount"),
    ("fc_mark", "Mark"),
    ("fc_sums", "Sums"),
    ("sp_conf", "SpringConf"),
    ("sp_edge", "Edge"),
    ("sp_rtt", "RoundTrip"),
    ("tcp_key", "Key"),
    ("wt_account", "Account"),
    ("wt_conf", "WaitConf"),
];

/// Types of the gate, of queues, and of `htb`.
const SHARED: [(&str, &str); 9] = [
    ("gt_cgroup", "Undecided"),
    ("gt_counters", "GateCounters"),
    ("htb_marked", "HtbMarked"),
    ("htb_slot", "HtbSlot"),
    ("tg_backlog", "Backlog"),
    ("tg_qdisc_query", "QdiscQuery"),
    ("wf_count", "Count"),
    ("wf_flow", "WaitingFlow"),
    ("wf_query", "WaitingQuery"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let programs = bpf::build(BPF, "native")?;
    // Half of it is enough to tell the builds of one host apart.
    let build = format!("{}+{:08x}", env!("CARGO_PKG_VERSION"), programs as u32);
    println!("cargo:rustc-env=TIDEGATE_BUILD={build}");
    let layout = bindings("intf.rs", &["nrm/intf.h", "edt/intf.h", "police/intf.h"], &INTF)?;
    println!("cargo:rustc-env=TIDEGATE_LAYOUT={layout}");
    bindings("acks.rs", &["acks/acks.h"], &ACKS)?;
    bindings("shared.rs", &["gate/gate.h", "htb/htb.h", "waiting/waiting.h"], &SHARED)?;
    let header = std::fs::read_to_string(format!("{BPF}/common/vmlinux.h"))?;
    let names = kernel_types(&header);
    std::fs::write(Path::new(&env::var("OUT_DIR")?).join("kernel_types.rs"), format!("{names:?}"))?;
    Ok(())
}

/// The records of the kernel that a header declares, by their names in the kernel: without what follows
/// `___`.
fn kernel_types(header: &str) -> Vec<&str> {
    let records =
        header.lines().filter_map(|line| line.strip_prefix("struct ")?.strip_suffix(" {"));
    records.map(|name| name.split("___").next().unwrap_or(name)).collect()
}

/// Writes what headers declare as Rust, with assertions of sizes and offsets. Returns a checksum of it.
fn bindings(
    file: &str,
    headers: &[&str],
    names: &'static [(&str, &str)],
) -> Result<u64, Box<dyn Error>> {
    let mut builder = Builder::default()
        .clang_args([format!("-I{BPF}"), bpf::system_headers()?])
        .allowlist_var(
            "TG_(BUFFERS|CHUNKS?|COPY|EXEMPT_MAX|FAMILIES|LENGTHS_MAX|LIMITS|SETS_PER_SLOT\
             |PREFIXES_MAX|QUEUES|SLOTS|SLOTS_INSIDE)",
        )
        .allowlist_var("AC_(FLOWS|NOW|THEN)")
        .allowlist_var("GT_UNDECIDED_MAX|HTB_(CGROUP_LEVELS|HAS_CGROUPS|HAS_PORTS|PORT_KEY)")
        .derive_default(true)
        // Its default would need unsafe code.
        .no_default("sm_counts")
        .derive_eq(true)
        .derive_ord(true)
        .prepend_enum_name(false)
        .disable_header_comment()
        .generate_comments(false)
        .formatter(Formatter::None)
        .parse_callbacks(Box::new(Names(names)));
    for header in headers {
        builder = builder.header(format!("{BPF}/{header}"));
    }
    for (name, _) in names {
        builder = builder.allowlist_type(name);
    }
    let text = builder.generate()?.to_string();
    std::fs::write(Path::new(&env::var("OUT_DIR")?).join(file), &text)?;
    let add = |sum: u64, byte| (sum ^ u64::from(byte)).wrapping_mul(bpf::FNV_PRIME);
    Ok(text.bytes().fold(bpf::FNV_OFFSET, add))
}

#[derive(Debug)]
struct Names(&'static [(&'static str, &'static str)]);

impl ParseCallbacks for Names {
    fn item_name(&self, item: ItemInfo<'_>) -> Option<String> {
        let is_type = matches!(item.kind, ItemKind::Type);
        let name = self.0.iter().filter(|_| is_type).find(|(c, _)| *c == item.name);
        name.map(|(_, rust)| (*rust).to_owned())
    }

    /// `Pod` does not compile for a struct with holes.
    fn add_derives(&self, info: &DeriveInfo<'_>) -> Vec<String> {
        let is_struct = info.kind == TypeKind::Struct;
        let derives = if is_struct { &["bytemuck::Pod", "bytemuck::Zeroable"][..] } else { &[] };
        derives.iter().map(|&derive| derive.to_owned()).collect()
    }
}
