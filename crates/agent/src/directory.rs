//! The agent's files: all `*.toml` of a directory, in the order of their names.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, ErrorKind, Read},
    path::Path,
};

use tidegate_host::spec::{MAX_SPEC_BYTES, Spec};
use tidegate_sys::files::open_regular;

use crate::goal::Files;

/// Files of the directory at most.
pub const MAX_FILES: usize = 1024;

/// The directory of a file, which may be named without one.
pub fn of(file: &Path) -> &Path {
    let directory = file.parent().filter(|parent| *parent != Path::new(""));
    directory.unwrap_or(Path::new("."))
}

/// Reads a directory that need not exist: it is made with the first limit.
pub fn read_if_there(directory: &Path) -> Files {
    if directory.exists() { read(directory) } else { Files::default() }
}

/// Reads what is good of the files, and what is wrong with the rest. Of limits of one name the first is good.
pub fn read(directory: &Path) -> Files {
    let mut files = Files::default();
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) => {
            files.errors.push(format!("{}: cannot be read: {e}", directory.display()));
            return files;
        }
    };
    let is_spec = |name: &str| name.ends_with(".toml") && !name.starts_with('.');
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| is_spec(name)).collect();
    names.sort();
    if names.len() > MAX_FILES {
        files.errors.push(format!("{}: more than {MAX_FILES} files", directory.display()));
        names.truncate(MAX_FILES);
    }
    for name in names {
        let path = directory.join(name);
        let file = path.display().to_string();
        let text = match read_file(&path) {
            // It has been removed meanwhile. A link whose target is away is not: that comes back.
            Err(e) if e.kind() == ErrorKind::NotFound && fs::symlink_metadata(&path).is_err() => {
                continue;
            }
            Err(e) => {
                files.errors.push(format!("{file}: cannot be read: {e}"));
                continue;
            }
            Ok(text) if text.len() as u64 > MAX_SPEC_BYTES => {
                files.errors.push(format!("{file}: is larger than {} MiB", MAX_SPEC_BYTES >> 20));
                continue;
            }
            Ok(text) => text,
        };
        let (spec, errors) = Spec::parse_what_is_good(&file, &text);
        files.specs.extend(spec);
        files.errors.extend(errors.iter().map(ToString::to_string));
    }
    let mut names = BTreeMap::new();
    for Spec { file, limits, .. } in &mut files.specs {
        limits.retain(|limit| {
            let first = names.entry(limit.name.clone()).or_insert_with(|| file.clone());
            if first != file {
                files.errors.push(format!(
                    "{file}:{}: limit `{}`: {first} has a limit of this name; give each its own name",
                    limit.line, limit.name
                ));
            }
            first == file
        });
    }
    files
}

/// The text of a file, up to one byte more than is allowed.
fn read_file(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open_regular(path)?.take(MAX_SPEC_BYTES + 1).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    const LIMIT: &str = "[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\" }\negress = \"1mbit\"\n";

    #[test]
    fn a_name_that_an_earlier_file_has_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["a.toml", "b.toml"].map(|name| dir.path().join(name));
        fs::write(&first, LIMIT).unwrap();
        fs::write(&second, format!("{}\n{LIMIT}", LIMIT.replace("\"a\"", "\"b\""))).unwrap();
        let Files { specs, errors } = read(dir.path());
        let error = format!(
            "{}:6: limit `a`: {} has a limit of this name; give each its own name",
            second.display(),
            first.display()
        );
        assert_eq!(errors, [error]);
        let names = specs.iter().flat_map(|spec| &spec.limits).map(|limit| limit.name.as_str());
        assert_eq!(names.collect::<Vec<_>>(), ["a", "b"]);
        // Nobody takes all limits off by removing the directory.
        let gone = read(&dir.path().join("gone")).errors;
        assert!(gone.len() == 1 && gone[0].contains("gone: cannot be read: "), "{gone:?}");
    }

    #[test]
    fn what_cannot_be_read_is_an_error_and_nothing_waits_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("a.toml"), LIMIT).unwrap();
        mknodat(CWD, at("b.toml"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        symlink("/nowhere/c.toml", at("c.toml")).unwrap();
        fs::create_dir(at("d.toml")).unwrap();
        let files = read(dir.path());
        assert_eq!(files.specs.len(), 1);
        let errors = files.errors.iter().map(|e| e.split(".toml: ").last().unwrap());
        let words =
            ["it is not a regular file", "No such file or directory", "it is not a regular file"];
        for (error, words) in errors.zip(words) {
            assert!(error.starts_with("cannot be read: ") && error.contains(words), "{error}");
        }
        assert_eq!(files.errors.len(), words.len());
    }
}
