//! Builds the eBPF programs in `bpf/`, and its pure headers for the tests.

#[path = "../../bpf/build.rs"]
mod bpf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    bpf::build("../../bpf", "native")
}
