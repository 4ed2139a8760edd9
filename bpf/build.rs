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
///
/// Returns a number that is another one when the objects are others, and the same when the same sources are
/// built again, wherever they are.
pub fn build(sources: &str, library: &str) -> Result<u64, Box<dyn Error>> {
    let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let bpf = manifest.join(sources).canonicalize()?;
    // What a crate's own programs include from the folders of `bpf/`.
    let shared = manifest.join("../../bpf").canonicalize()?;
    println!("cargo:rerun-if-changed={}", shared.display());
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let headers = [&bpf, &shared].map(|folder| format!("-I{}", folder.display()));
    let system_headers = system_headers()?;
    // Objects name their sources: not by where they happen to be.
    let root = manifest.join("../..").canonicalize()?;
    let source_names = format!("-ffile-prefix-map={}=.", root.display());
    let mut modules = String::new();
    let mut id = FNV_OFFSET;
    for path in files_below(&bpf)? {
        println!("cargo:rerun-if-changed={}", path.display());
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let Some(stem) = name.strip_suffix(".bpf.c") else { continue };
        let object = out.join(format!("{stem}.bpf.o"));
        // v3: 32-bit jumps and the atomics that return the old value (kernel 5.12).
        let target = ["-mcpu=v3", "-Wall", "-Werror", &source_names];
        SkeletonBuilder::new()
            .source(&path)
            .obj(&object)
            .clang_args(target.into_iter().chain([&*headers[0], &headers[1], &system_headers]))
            .build_and_generate(out.join(format!("{stem}.skel.rs")))?;
        for byte in std::fs::read(&object)? {
            id = (id ^ u64::from(byte)).wrapping_mul(FNV_PRIME);
        }
        modules += &format!("pub mod {stem} {{ include!(\"{stem}.skel.rs\"); }}\n");
    }
    std::fs::write(out.join("skel.rs"), modules)?;
    native(&bpf, library)?;
    Ok(id)
}

/// The argument by which clang finds `<asm/types.h>`: under the multiarch triplet on Debian and Ubuntu.
pub fn system_headers() -> io::Result<String> {
    let triplet = Command::new("gcc").arg("-dumpmachine").output()?;
    Ok(format!("-I/usr/include/{}", String::from_utf8_lossy(&triplet.stdout).trim()))
}

/// The constants of the hash FNV-1a, which is the same with every compiler.
pub const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
pub const FNV_PRIME: u64 = 0x100_0000_01b3;

/// All files below a folder, in order; the folders too, so that a new file is noticed.
fn files_below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = vec![folder.to_owned()];
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { found.extend(files_below(&path)?) } else { found.push(path) }
    }
    found.sort();
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
