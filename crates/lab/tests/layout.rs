//! Rules of the code that no compiler checks: lengths, imports, dependencies of the core, tables in the docs.

mod imports;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use tidegate_core::scheme::{SCHEMES, SchemeInfo};

const LINES_MOST: usize = 800;
const COLUMNS_MOST: usize = 110;
/// The dependencies of `tidegate-core`. Each must work without an operating system.
const CORE_DEPENDS_ON: [&str; 6] =
    ["proc-macro2", "quote", "syn", "thiserror", "thiserror-impl", "unicode-ident"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("a root")
}

/// All Rust and C that we wrote.
fn sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open =
        vec![root().join("bpf"), root().join("crates"), root().join("fuzz/fuzz_targets")];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                open.push(path);
            } else if ["rs", "c", "h"].contains(&extension.as_str()) {
                found.push(path);
            }
        }
    }
    assert!(found.len() > 50, "the sources are not where they were: {found:?}");
    found
}

#[test]
fn files_and_lines_are_short() {
    let mut long = Vec::new();
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        let path = path.strip_prefix(root()).unwrap().display();
        let lines = text.lines().count();
        if lines > LINES_MOST {
            long.push(format!("{path}: {lines} lines, of {LINES_MOST} at most"));
        }
        // The stored results of tests are as wide as what they store.
        let wide = text.contains("assert_snapshot!(");
        for (at, line) in text.lines().enumerate().filter(|_| !wide) {
            let columns = line.chars().map(|c| if c == '\t' { 8 } else { 1 }).sum::<usize>();
            if columns > COLUMNS_MOST {
                let number = at + 1;
                long.push(format!("{path}:{number}: {columns} columns, of {COLUMNS_MOST} at most"));
            }
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}

/// The words with which no comment may begin: a sentence begins with the thing that it is about.
const NO_SUBJECTS: [&str; 7] = ["What", "Who", "Whose", "Whom", "Of", "Those", "That"];

/// The text of a line of a comment for readers of the code: in Rust those of items and modules, in C all that
/// have lines of their own.
fn comment<'a>(line: &'a str, extension: &str) -> Option<&'a str> {
    let line = line.trim_start();
    let text = match extension {
        "rs" => line.strip_prefix("///").or_else(|| line.strip_prefix("//!")),
        _ => ["/**", "/*", "*/", "*"].iter().find_map(|mark| line.strip_prefix(mark)),
    };
    text.map(|text| text.trim_end_matches("*/").trim())
}

#[test]
fn comments_of_the_algorithms_begin_with_their_subject() {
    let mut found = Vec::new();
    for path in sources() {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        if !["bpf/", "crates/core/"].iter().any(|folder| name.starts_with(folder)) {
            continue;
        }
        let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        let mut begins = true;
        for (at, line) in text.lines().enumerate() {
            let words = comment(line, &extension).filter(|text| !text.is_empty());
            let is_new = line.trim_start().starts_with("/*");
            let first = words.and_then(|text| text.split(|c: char| !c.is_alphabetic()).next());
            if (begins || is_new) && first.is_some_and(|first| NO_SUBJECTS.contains(&first)) {
                found.push(format!("{name}:{}: {}", at + 1, line.trim()));
            }
            begins = words.is_none();
        }
    }
    let list = found.join("\n");
    assert!(found.is_empty(), "these comments begin with a word that is no subject:\n{list}");
}

#[test]
fn the_core_depends_on_nothing_that_needs_a_system() {
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--package=tidegate-core", "--edges=normal", "--prefix=none"])
        .args(["--no-dedupe", "--format={lib}", "--locked", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8(tree.stdout).unwrap();
    let mut names: Vec<String> = tree.lines().map(|name| name.replace('_', "-")).collect();
    names.sort();
    names.dedup();
    names.retain(|name| name != "tidegate-core" && !CORE_DEPENDS_ON.contains(&name.as_str()));
    assert!(names.is_empty(), "tidegate-core depends on {names:?}: see the head of its lib.rs");
    let head = fs::read_to_string(root().join("crates/core/src/lib.rs")).unwrap();
    assert!(head.contains("#![no_std]") && head.contains("#![forbid(unsafe_code)]"));
}

#[test]
fn no_file_imports_what_imports_it() {
    let mut circles = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let source = entry.unwrap().path().join("src");
        circles.extend(imports::circles(&source));
    }
    assert!(circles.is_empty(), "files import each other in a circle:\n{}", circles.join("\n"));
}

#[test]
fn the_index_of_the_docs_has_the_table_of_schemes() {
    let index = fs::read_to_string(root().join("docs/README.md")).unwrap();
    for SchemeInfo { name, about, scopes, page, .. } in &SCHEMES {
        let row = format!("| [{name}]({page}) | {about} | {scopes} |\n");
        assert!(index.contains(&row), "docs/README.md must have the row\n{row}");
        assert!(root().join("docs").join(page).is_file(), "there is no docs/{page}");
    }
}
