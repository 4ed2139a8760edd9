//! What packages are made of fits together: the files that are laid out, the lists of the packages, units,
//! scripts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use tempfile::TempDir;

/// In the lists, what `scripts/package.sh` lays out.
const STAGE: &str = "target/package/stage/";
/// Only this link is made by a script of the .rpm, which cannot hold one.
const LINK: &str = "usr/lib/cni/tidegate-cni";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn script(args: &[&str]) {
    let output = Command::new(root().join("scripts/install.sh")).args(args).output();
    let output = output.expect("the script starts");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A directory with `usr` as it is installed.
fn staged() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let usr = dir.path().join("usr");
    script(&["stage", env!("CARGO_BIN_EXE_tidegate"), "/usr", usr.to_str().unwrap()]);
    dir
}

/// The files and links below a directory, by their paths in it.
fn files(dir: &Path) -> BTreeSet<String> {
    let (mut found, mut open) = (BTreeSet::new(), vec![dir.to_owned()]);
    while let Some(at) = open.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                open.push(entry.path());
            } else {
                let path = entry.path();
                found.insert(path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found
}

/// The sources of a package's list, relative to the root of the repository.
fn sources(package: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join("crates/cli/Cargo.toml")).unwrap();
    let manifest: toml::Table = text.parse().unwrap();
    let assets = manifest["package"]["metadata"][package]["assets"].as_array().unwrap().clone();
    let source = |asset: &toml::Value| {
        let source = asset.get(0).or_else(|| asset.get("source")).unwrap().as_str().unwrap();
        source.trim_start_matches("../").to_owned()
    };
    assets.iter().map(source).collect()
}

#[test]
fn each_package_lists_all_that_is_installed() {
    let dir = staged();
    let staged = files(dir.path());
    for package in ["deb", "generate-rpm"] {
        let sources = sources(package);
        let listed = |file: &str| {
            let dir = file.rsplit_once('/').unwrap().0;
            let patterns = [format!("{STAGE}{file}"), format!("{STAGE}{dir}/*")];
            sources.iter().any(|source| patterns.contains(source))
        };
        let missing: Vec<_> = staged.iter().filter(|file| !listed(file)).collect();
        let made: &[&str] = if package == "deb" { &[] } else { &[LINK] };
        assert_eq!(missing, made, "{package}: not in its list in crates/cli/Cargo.toml");
        for source in &sources {
            let Some(source) = source.strip_prefix(STAGE) else {
                let laid_out = source.starts_with("target/package/");
                assert!(laid_out || root().join(source).exists(), "{package}: no {source}");
                continue;
            };
            let dir = source.strip_suffix('*').unwrap_or(source);
            let is = source.starts_with("etc/") || staged.iter().any(|file| file.starts_with(dir));
            assert!(is, "{package}: nothing is laid out as {source}");
        }
    }
    for script in ["post", "postun"] {
        let text = fs::read_to_string(root().join("packaging/rpm").join(script)).unwrap();
        assert!(text.contains("/tidegate-cni"), "packaging/rpm/{script} forgets the link");
    }
}

#[test]
fn uninstall_removes_all_that_is_installed() {
    let dir = staged();
    script(&["uninstall", "/usr", dir.path().to_str().unwrap()]);
    assert_eq!(files(dir.path()), BTreeSet::new());
}

#[test]
fn units_call_commands_and_name_pages_that_there_are() {
    let dir = staged();
    let installed = files(dir.path());
    let page = |name: &str| installed.contains(&format!("usr/share/man/man1/{name}.1"));
    let units = fs::read_dir(root().join("packaging/systemd")).unwrap();
    let mut count = 0;
    for unit in units {
        let unit = unit.unwrap().file_name().into_string().unwrap();
        let text = dir.path().join("usr/lib/systemd/system").join(&unit);
        let text = fs::read_to_string(text).unwrap();
        let lines = text.lines().filter_map(|line| line.split_once('='));
        for (key, value) in lines {
            if key == "Documentation" {
                let name = value.strip_prefix("man:").and_then(|rest| rest.strip_suffix("(1)"));
                assert!(name.is_some_and(page), "{unit}: {value}");
            }
            let command = value.trim_start_matches(['-', '+', '!', '@']);
            if key.starts_with("Exec") && command.contains("tidegate ") {
                let verb = command.strip_prefix("/usr/bin/tidegate ").unwrap_or_default();
                let verb = verb.split(' ').next().unwrap_or_default();
                assert!(page(&format!("tidegate-{verb}")), "{unit}: {command}");
                count += 1;
            }
        }
    }
    assert!(count >= 2, "the units call no command");
}

/// Else the reload says that all is well, and the agent leaves limits as they are.
#[test]
fn a_reload_of_the_agent_checks_the_files_that_it_reads() {
    let unit = fs::read_to_string(root().join("packaging/systemd/tidegate-agent.service")).unwrap();
    let commands = |key: &str| {
        let lines = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let check = commands("ExecStart")[0].replace(" agent ", " check ");
    assert_eq!(commands("ExecReload"), [&check, "/bin/kill -HUP $MAINPID"]);
}

#[test]
fn the_examples_of_the_default_file_are_right() {
    let text = fs::read_to_string(root().join("packaging/limits.toml")).unwrap();
    assert!(text.lines().all(|line| line.is_empty() || line.starts_with('#')), "it limits nothing");
    let is_example = |line: &&str| line.starts_with("#[") || line.contains(" = ");
    let example: Vec<_> = text.lines().filter(is_example).map(|line| &line[1..]).collect();
    assert!(example.len() > 4, "it has examples");
    let mut check = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["check", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    check.stdin.take().unwrap().write_all(example.join("\n").as_bytes()).unwrap();
    let output = check.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_scripts_of_packages_are_read_by_any_shell() {
    for package in ["deb", "rpm"] {
        for script in fs::read_dir(root().join("packaging").join(package)).unwrap() {
            let path = script.unwrap().path();
            let status = Command::new("sh").arg("-n").arg(&path).status().unwrap();
            assert!(status.success(), "{}", path.display());
        }
    }
}
