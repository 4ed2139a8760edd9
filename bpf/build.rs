//! How the crates with eBPF programs build them: included by their `build.rs`.

use std::{
    env,
    error::Error,
    io,
    path::{Path, PathBuf},
    process::Command,
};

use libbpf_cargo::SkeletonBuilder;

/// Compiles every `*.bpf.c` below `sources` to an object with a Rust skeleton, a module of `skel.rs` in
/// `OUT_DIR`, and the pure headers there a second time, for this machine: each file in `native` gives the
/// inline functions of one symbols to link to. They are the library `library`, a name of its own for each
/// crate, which the tests call.
pub fn build(sources: &str, library: &str) -> Result<(), Box<dyn Error>> {
    let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let bpf = manifest.join(sources).canonicalize()?;
    // What a crate's own programs include from the folders of `bpf/`.
    let shared = manifest.join("../../bpf").canonicalize()?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let headers = [&bpf, &shared].map(|folder| format!("-I{}", folder.display()));
    let system_headers = system_headers()?;
    let mut modules = String::new();
    for path in files_below(&bpf)? {
        println!("cargo:rerun-if-changed={}", path.display());
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let Some(stem) = name.strip_suffix(".bpf.c") else { continue };
        SkeletonBuilder::new()
            .source(&path)
            // v3: 32-bit jumps and the atomics that return the old value (kernel 5.12).
            .clang_args(["-mcpu=v3", "-Wall", "-Werror", &headers[0], &headers[1], &system_headers])
            .build_and_generate(out.join(format!("{stem}.skel.rs")))?;
        modules += &format!("pub mod {stem} {{ include!(\"{stem}.skel.rs\"); }}\n");
    }
    std::fs::write(out.join("skel.rs"), modules)?;
    native(&bpf, library)
}

/// The argument by which clang finds `<asm/types.h>`: under the multiarch triplet on Debian and Ubuntu.
pub fn system_headers() -> io::Result<String> {
    let triplet = Command::new("gcc").arg("-dumpmachine").output()?;
    Ok(format!("-I/usr/include/{}", String::from_utf8_lossy(&triplet.stdout).trim()))
}

/// All files below a folder; the folders too, so that a new file is noticed.
fn files_below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = vec![folder.to_owned()];
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { found.extend(files_below(&path)?) } else { found.push(path) }
    }
    Ok(found)
}

fn native(bpf: &Path, library: &str) -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=native");
    let mut sources = Vec::new();
    for entry in std::fs::read_dir("native")? {
        sources.push(entry?.path());
    }
    cc::Build::new().files(&sources).include(bpf).warnings_into_errors(true).compile(library);
    Ok(())
}
