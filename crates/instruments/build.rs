//! Builds the eBPF programs of the instruments, and the pure header of the published NRM for its tests.

#[path = "../../bpf/build.rs"]
mod bpf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    bpf::build("bpf", "native_instruments").map(drop)
}
