//! One limit in the host's file: written, changed or taken out while comments and layout stay.
//!
//! For `tidegate limit`. An edit is made and checked before the host is changed, and stored after that. It
//! works on lines and on the places of values, so what it does not mean to change stays byte for byte.

use std::{
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use jiff::Zoned;
use tidegate_core::Scope;
use tidegate_host::{
    key::Kind,
    schedule::Row,
    settings::fields::find,
    spec::{Spec, SpecError},
};
use tidegate_sys::files::{open_regular, write_whole};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::directory;

/// Settings by their names, in words of the command line.
pub type Given = [(&'static str, String)];

/// A limit that is to be written.
#[derive(Debug, Clone, Copy)]
pub struct NewLimit<'a> {
    pub name: &'a str,
    pub scope: &'a Scope,
    pub parent: Option<&'a str>,
    pub given: &'a Given,
}

/// Why the file cannot be changed. It is as before.
#[derive(Debug, thiserror::Error)]
pub enum PersistError {
    #[error("{0}; correct that first: nothing changed")]
    Broken(String),
    #[error("limit `{name}` is on line {line} of {file}; change it there: nothing changed")]
    Elsewhere { name: String, file: String, line: usize },
    #[error(
        "limit `{name}` is on line {line} of {file} already, with other settings; change it with `tidegate \
         limit set {name} ...`: nothing changed"
    )]
    Differs { name: String, file: String, line: usize },
    #[error("--{0} cannot be written by this command; write it in {1}: nothing changed")]
    Setting(&'static str, String),
    #[error(
        "limit `{name}` of {file} is not written as `[[limit]]`; change it there: nothing changed"
    )]
    Layout { name: String, file: String },
    #[error("the limits of {0} are in one list; write them as `[[limit]]` first: nothing changed")]
    List(String),
    #[error("{0}: the name of the host's file must end with .toml: nothing changed")]
    Name(String),
    #[error("as it would be written: {0}; nothing changed")]
    Refused(#[from] SpecError),
    #[error("{0}: {1}")]
    Io(String, io::Error),
}

/// A file as it is to be.
#[derive(Debug)]
pub struct Edit {
    path: PathBuf,
    text: String,
}

/// The host's file, and where in it a limit is.
struct Found {
    text: String,
    file: String,
    line: Option<usize>,
}

/// Looks for a limit in all files of the directory.
fn look(path: &Path, name: &str) -> Result<Found, PersistError> {
    let file = path.display().to_string();
    if path.extension().is_none_or(|extension| extension != "toml") {
        return Err(PersistError::Name(file));
    }
    let files = directory::read_if_there(directory::of(path));
    if let Some(error) = files.errors.into_iter().next() {
        return Err(PersistError::Broken(error));
    }
    let mut found = files.specs.iter().flat_map(|spec| {
        spec.limits.iter().filter(|limit| limit.name == name).map(|limit| (&spec.file, limit.line))
    });
    let own = |file: &str| Path::new(file).file_name() == path.file_name();
    let line = match found.next() {
        Some((other, line)) if !own(other) => {
            let (name, file) = (name.to_owned(), other.clone());
            return Err(PersistError::Elsewhere { name, file, line });
        }
        found => found.map(|(_, line)| line),
    };
    let text = match open_regular(path).and_then(io::read_to_string) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        read => read.map_err(|e| PersistError::Io(file.clone(), e))?,
    };
    // A byte order mark, which TOML allows; the places of values do not count it.
    let text = text.trim_start_matches('\u{feff}').to_owned();
    Ok(Found { text, file, line })
}

/// The file with one limit more; `None` if it has that already.
///
/// # Errors
/// [`PersistError`].
pub fn add(path: &Path, limit: NewLimit<'_>) -> Result<Option<Edit>, PersistError> {
    let Found { mut text, file, line } = look(path, limit.name)?;
    let scope = format!("{{ {} = {} }}", limit.scope.kind(), quoted(limit.scope.name()));
    let mut rows = vec![("name", quoted(limit.name)), ("scope", scope)];
    rows.extend(limit.parent.map(|parent| ("parent", quoted(parent))));
    rows.extend(values(limit.given, &file)?);
    let width = rows.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    let rows = rows.iter().map(|(key, value)| format!("{key:width$} = {value}\n"));
    let block = format!("[[limit]]\n{}", rows.collect::<String>());
    if let Some(line) = line {
        let (is, wanted) = (Spec::parse(&file, &text)?, Spec::parse(&file, &block)?);
        let is = is.limits.iter().find(|is| is.name == limit.name);
        let same = is.zip(wanted.limits.first()).is_some_and(|(is, wanted)| {
            (&is.scope, &is.parent, &is.options) == (&wanted.scope, &wanted.parent, &wanted.options)
        });
        return match same {
            true => Ok(None),
            false => Err(PersistError::Differs { name: limit.name.to_owned(), file, line }),
        };
    }
    make_room(&mut text, &file)?;
    let gap = match &text {
        text if text.is_empty() || text.ends_with("\n\n") => "",
        text if text.ends_with('\n') => "\n",
        _ => "\n\n",
    };
    checked(path, &file, format!("{text}{gap}{block}")).map(Some)
}

/// Takes a list without limits out, beside which TOML allows no `[[limit]]`.
fn make_room(text: &mut String, file: &str) -> Result<(), PersistError> {
    let Ok(root) = DeTable::parse(text) else { return Ok(()) };
    let Some((key, value)) = root.get_ref().get_key_value("limit") else { return Ok(()) };
    let place = key.span().start..value.span().end;
    if !text[key.span().end..].trim_start().starts_with('=') {
        return Ok(());
    }
    if value.get_ref().as_array().is_none_or(|list| !list.is_empty()) {
        return Err(PersistError::List(file.to_owned()));
    }
    text.replace_range(place, "");
    Ok(())
}

/// The file with other settings of a limit; `None` if the limit is not in it.
///
/// # Errors
/// [`PersistError`].
pub fn set(path: &Path, name: &str, given: &Given) -> Result<Option<Edit>, PersistError> {
    let Found { mut text, file, line } = look(path, name)?;
    if line.is_none() {
        return Ok(None);
    }
    let layout = || PersistError::Layout { name: name.to_owned(), file: file.clone() };
    for (key, value) in values(given, &file)? {
        let place = place(&text, name).ok_or_else(layout)?;
        match place.values.into_iter().find(|(is, _)| is == key) {
            Some((_, span)) => text.replace_range(span, &value),
            None => text.insert_str(place.room, &format!("\n{key} = {value}")),
        }
    }
    checked(path, &file, text).map(Some)
}

/// The file without a limit, and without the comment right above it; `None` if the limit is not in it.
///
/// # Errors
/// [`PersistError`].
pub fn del(path: &Path, name: &str) -> Result<Option<Edit>, PersistError> {
    let Found { text, file, line } = look(path, name)?;
    if line.is_none() {
        return Ok(None);
    }
    let layout = || PersistError::Layout { name: name.to_owned(), file: file.clone() };
    let Place { lines, .. } = place(&text, name).ok_or_else(layout)?;
    let all: Vec<_> = text.split_inclusive('\n').collect();
    let is_comment = |line: &str| line.trim_start().starts_with('#');
    let above = all[..lines.start].iter().rev().take_while(|line| is_comment(line)).count();
    let from = lines.start - above;
    // What follows its last value is said of others.
    let below = all[lines.clone()].iter().rev();
    let below = below.take_while(|line| line.trim().is_empty() || is_comment(line)).count();
    let mut to = lines.end - below;
    let is_blank = |at: usize| all.get(at).is_some_and(|line| line.trim().is_empty());
    if is_blank(to) && (from == 0 || is_blank(from - 1)) {
        to += 1;
    }
    checked(path, &file, [&all[..from], &all[to..]].concat().concat()).map(Some)
}

/// As TOML has them.
fn values(given: &Given, file: &str) -> Result<Vec<(&'static str, String)>, PersistError> {
    let value = |(key, text): &(&'static str, String)| match find(key).map(|field| field.key.kind) {
        Some(Kind::Flag | Kind::Whole(..)) => Ok((*key, text.clone())),
        Some(Kind::Meter | Kind::Actions) => Err(PersistError::Setting(key, file.to_owned())),
        _ => Ok((*key, quoted(text))),
    };
    given.iter().map(value).collect()
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// Where a limit is in a text.
struct Place {
    /// From its header to the next one.
    lines: Range<usize>,
    values: Vec<(String, Range<usize>)>,
    /// Where a line of it ends.
    room: usize,
}

/// `None` if it is not written as `[[limit]]`.
fn place(text: &str, name: &str) -> Option<Place> {
    let root = DeTable::parse(text).ok()?;
    let line_of = |at: usize| text.bytes().take(at).filter(|byte| *byte == b'\n').count();
    let mut starts = Vec::new();
    for (key, value) in root.get_ref().iter() {
        match value.get_ref() {
            DeValue::Array(items) => starts.extend(items.iter().map(|item| item.span().start)),
            _ => starts.push(key.span().start),
        }
    }
    let limits = root.get_ref().get("limit")?.get_ref().as_array()?;
    let is_it = |limit: &&Spanned<DeValue<'_>>| {
        let of = limit.get_ref().as_table().and_then(|table| table.get("name"));
        of.and_then(|of| of.get_ref().as_str()) == Some(name)
    };
    let limit = limits.iter().find(is_it)?;
    let start = line_of(limit.span().start);
    if !text.lines().nth(start)?.trim_start().starts_with("[[") {
        return None;
    }
    let end = starts.into_iter().map(line_of).filter(|line| *line > start).min();
    let table = limit.get_ref().as_table()?;
    let values = table.iter().map(|(key, value)| (key.get_ref().to_string(), value.span()));
    let after_name = table.get("name")?.span().end;
    let room = text[after_name..].find('\n').map_or(text.len(), |at| after_name + at);
    let end = end.unwrap_or_else(|| text.split_inclusive('\n').count());
    Some(Place { lines: start..end, values: values.collect(), room })
}

/// Refuses a text that the agent would not read.
fn checked(path: &Path, file: &str, text: String) -> Result<Edit, PersistError> {
    Spec::parse(file, &text)?;
    Ok(Edit { path: path.to_owned(), text })
}

impl Edit {
    /// The row of a limit's schedule that holds at a moment.
    pub fn row(&self, limit: &str, now: &Zoned) -> Option<Row> {
        let spec = Spec::parse(&self.path.display().to_string(), &self.text).ok()?;
        let limit = spec.limits.into_iter().find(|is| is.name == limit)?;
        limit.follow.schedule.at(now).0.cloned()
    }

    /// Writes the file as a whole, with the mode and owner that it had. A link stays one.
    ///
    /// # Errors
    /// [`PersistError::Io`]; the file is as before.
    pub fn store(&self) -> Result<(), PersistError> {
        let path = fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        let write = || {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let beside = path.with_file_name(format!(".{name}.{}", std::process::id()));
            write_whole(&path, &beside, self.text.as_bytes(), fs::metadata(&path).ok().as_ref())
        };
        write().map_err(|e| PersistError::Io(path.display().to_string(), e))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    const TEXT: &str = "# Limits of this host.\n\n# The backup.\n[[limit]]\nname = \"backup\" # nightly\n\
                        scope = { unit = \"backup.service\" }\negress  =  \"200mbit\" # uplink\n\n\
                        # The web server.\n[[limit]]\nname = \"web\"\negress = \"50mbit\"\n\
                        [limit.scope]\nunit = \"web.service\"\n\n# The end.\n";

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("limits.toml");
        fs::write(&path, text).unwrap();
        (dir, path)
    }

    fn given(rows: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
        rows.iter().map(|(key, text)| (*key, (*text).to_owned())).collect()
    }

    #[test]
    fn what_is_not_changed_stays_byte_for_byte() {
        let (_dir, path) = file(TEXT);
        let set = |name, rows: &[_]| set(&path, name, &given(rows)).unwrap().unwrap().text;
        let other = TEXT.replace("\"200mbit\"", "\"9mbit\"");
        assert_eq!(set("backup", &[("egress", "9mbit")]), other);
        let more = TEXT.replace("# nightly\n", "# nightly\nloopback = true\n");
        assert_eq!(set("backup", &[("loopback", "true")]), more);
        // Not into the table of its scope.
        let more = TEXT.replace("\"web\"\n", "\"web\"\ningress = \"9mbit\"\n");
        assert_eq!(set("web", &[("ingress", "9mbit")]), more);
        let from = TEXT.find("# The backup").unwrap()..TEXT.find("# The web").unwrap();
        assert_eq!(del(&path, "backup").unwrap().unwrap().text, TEXT.replace(&TEXT[from], ""));
        let from = TEXT.find("# The web").unwrap()..TEXT.find("# The end").unwrap();
        assert_eq!(del(&path, "web").unwrap().unwrap().text, TEXT.replace(&TEXT[from], ""));
        assert!(del(&path, "none").unwrap().is_none());
    }

    #[test]
    fn a_limit_is_added_once_and_the_file_keeps_its_mode() {
        let (_dir, path) = file("# nothing yet\n");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let scope = Scope::Cgroup("a/b".to_owned());
        let rows = given(&[("egress", "9mbit"), ("loopback", "true")]);
        let limit = NewLimit { name: "a", scope: &scope, parent: None, given: &rows };
        add(&path, limit).unwrap().unwrap().store().unwrap();
        let text = "# nothing yet\n\n[[limit]]\nname     = \"a\"\nscope    = { cgroup = \"a/b\" }\n\
                    egress   = \"9mbit\"\nloopback = true\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        assert!(add(&path, limit).unwrap().is_none());
        let rows = given(&[("egress", "8mbit")]);
        let error = add(&path, NewLimit { given: &rows, ..limit }).unwrap_err().to_string();
        assert!(error.contains("on line 3 of") && error.contains("limit set a"), "{error}");
        del(&path, "a").unwrap().unwrap().store().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "# nothing yet\n\n");
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_text() {
        let (_dir, path) = file(&format!(
            "\u{feff}{}",
            TEXT.replace("# Limits of this host.\n\n# The backup.\n", "")
        ));
        let text = set(&path, "backup", &given(&[("egress", "9mbit")])).unwrap().unwrap().text;
        assert!(
            text.starts_with("[[limit]]") && text.contains("egress  =  \"9mbit\" # uplink"),
            "{text}"
        );
        assert!(!del(&path, "backup").unwrap().unwrap().text.contains("backup"));
    }

    #[test]
    fn other_files_and_broken_ones_are_left_alone() {
        let (dir, path) = file(TEXT);
        let other = dir.path().join("other.toml");
        let limit = "[[limit]]\nname = \"b\"\nscope = { cgroup = \"b\" }\negress = \"1mbit\"\n";
        fs::write(&other, limit).unwrap();
        let error = del(&path, "b").unwrap_err().to_string();
        assert!(error.contains("line 1 of") && error.contains("other.toml"), "{error}");
        fs::write(&other, "[[limit]\n").unwrap();
        let error = del(&path, "backup").unwrap_err().to_string();
        assert!(error.contains("other.toml:1") && error.contains("nothing changed"), "{error}");
    }

    #[test]
    fn the_first_limit_of_a_file_that_says_there_is_none() {
        let (_dir, path) = file("limit = [\n] # none yet\n");
        let scope = Scope::Cgroup("a".to_owned());
        let rows = given(&[("egress", "9mbit")]);
        let limit = NewLimit { name: "a", scope: &scope, parent: None, given: &rows };
        let text = add(&path, limit).unwrap().unwrap().text;
        let block = "[[limit]]\nname   = \"a\"\nscope  = { cgroup = \"a\" }\negress = \"9mbit\"\n";
        assert_eq!(text, format!(" # none yet\n\n{block}"));
    }

    #[test]
    fn limits_in_a_list_are_not_touched() {
        let text = "limit = [{ name = \"a\", scope = { cgroup = \"a\" }, egress = \"1mbit\" }]\n";
        let (_dir, path) = file(text);
        assert!(matches!(del(&path, "a"), Err(PersistError::Layout { .. })));
        let (scope, given) = (Scope::Cgroup("b".to_owned()), given(&[("egress", "9mbit")]));
        let limit = NewLimit { name: "b", scope: &scope, parent: None, given: &given };
        let error = add(&path, limit).unwrap_err().to_string();
        assert!(error.ends_with("write them as `[[limit]]` first: nothing changed"), "{error}");
    }
}
