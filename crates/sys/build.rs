//! Builds the eBPF programs in `bpf/`, and its pure headers for the tests.

#[path = "../../bpf/build.rs"]
mod bpf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let programs = bpf::build("../../bpf", "native")?;
    // Half of it is enough to tell the builds of one host apart.
    println!(
        "cargo:rustc-env=TIDEGATE_BUILD={}+{:08x}",
        env!("CARGO_PKG_VERSION"),
        programs as u32
    );
    Ok(())
}
