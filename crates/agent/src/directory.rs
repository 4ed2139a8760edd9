//! The agent's files: all `*.toml` of a directory, in the order of their names.

use std::{
    fs,
    io::{ErrorKind, Read},
    path::Path,
};

use tidegate_host::spec::{MAX_SPEC_BYTES, Spec};

use crate::goal::Files;

/// Files of the directory at most.
pub const MAX_FILES: usize = 1024;

/// Reads what is good of the files, and what is wrong with the rest. A directory that is not there has no
/// files.
#[must_use]
pub fn read(directory: &Path) -> Files {
    let mut files = Files::default();
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return files,
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
        let mut text = String::new();
        let read = fs::File::open(&path);
        let read = read.and_then(|file| file.take(MAX_SPEC_BYTES + 1).read_to_string(&mut text));
        match read {
            // It has been removed meanwhile.
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => {
                files.errors.push(format!("{file}: cannot be read: {e}"));
                continue;
            }
            Ok(_) if text.len() as u64 > MAX_SPEC_BYTES => {
                files.errors.push(format!("{file}: is larger than {} MiB", MAX_SPEC_BYTES >> 20));
                continue;
            }
            Ok(_) => {}
        }
        let (spec, errors) = Spec::parse_what_is_good(&file, &text);
        files.specs.extend(spec);
        files.errors.extend(errors.iter().map(ToString::to_string));
    }
    files
}
