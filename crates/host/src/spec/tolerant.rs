//! What is good of a file: the limits that can be read, beside why the others cannot. For the agent, which
//! must not leave a host without limits because one of them is wrong.

use toml::{Spanned, de::DeTable};

use super::{Spec, SpecError};

/// Limits of a file that are left out at most; a file with more that is wrong is refused as a whole.
pub const MAX_LEFT_OUT: usize = 64;

impl Spec {
    /// Parses a text; a limit that cannot be read is left out. None if the file as a whole cannot be read, as
    /// when it is no TOML. Parses once more for each limit that is left out.
    pub fn parse_what_is_good(file: &str, text: &str) -> (Option<Spec>, Vec<SpecError>) {
        let (mut text, mut errors) = (text.to_owned(), Vec::new());
        loop {
            let error = match Spec::parse(file, &text) {
                Ok(spec) => return (Some(spec), errors),
                Err(error) => error,
            };
            let without = error.line.and_then(|line| without_limit(&text, line));
            errors.push(error);
            match without {
                Some(without) if errors.len() <= MAX_LEFT_OUT => text = without,
                _ => return (None, errors),
            }
        }
    }
}

/// The text without the limit that a line is in; other lines keep their numbers.
fn without_limit(text: &str, line: usize) -> Option<String> {
    let root = DeTable::parse(text).ok()?;
    let line_of = |at: usize| 1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count();
    let mut starts: Vec<(usize, bool)> = Vec::new();
    for (key, value) in root.get_ref().iter() {
        let is_limit = key.get_ref() == "limit";
        match value.get_ref().as_array() {
            Some(tables) => {
                starts.extend(tables.iter().map(|t| (line_of(t.span().start), is_limit)))
            }
            None => starts.push((line_of(Spanned::span(key).start), false)),
        }
    }
    starts.sort_unstable();
    let at = starts.iter().rposition(|(start, _)| *start <= line)?;
    let (from, true) = starts[at] else { return None };
    let to = starts.get(at + 1).map_or(usize::MAX, |(start, _)| *start);
    // Two tables on one line are values in a list.
    if to == from || !text.lines().nth(from - 1)?.trim_start().starts_with("[[") {
        return None;
    }
    let lines = text.lines().enumerate();
    let kept = lines.map(|(n, line)| if (from..to).contains(&(n + 1)) { "" } else { line });
    Some(kept.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(name: &str, rest: &str) -> String {
        format!("[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{name}\" }}\n{rest}\n\n")
    }

    fn good(text: &str) -> (Vec<String>, Vec<String>) {
        let (spec, errors) = Spec::parse_what_is_good("x.toml", text);
        let limits = spec.map(|spec| spec.limits).unwrap_or_default();
        let names = limits.into_iter().map(|limit| limit.name).collect();
        (names, errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn one_wrong_limit_of_five_is_left_out() {
        let rates = [
            "egress = \"1mbit\"",
            "egress = \"1mbit\"",
            "egress = \"5mbps\"",
            "egress = \"1mbit\"",
        ];
        let mut text: String =
            rates.iter().zip(["a", "b", "c", "d"]).map(|(r, n)| limit(n, r)).collect();
        text += &limit("e", "egress = \"1mbit\"\ncolour = 1");
        let (names, errors) = good(&text);
        assert_eq!(names, ["a", "b", "d"]);
        assert_eq!(errors.len(), 2);
        assert!(errors[0].starts_with("x.toml:14: limit `c`: egress: "), "{errors:?}");
        assert!(
            errors[1].starts_with("x.toml:25: limit `e`: unknown field `colour`"),
            "{errors:?}"
        );
    }

    #[test]
    fn a_file_that_is_wrong_as_a_whole_has_nothing_good() {
        assert_eq!(good("[[limit]\nname").0, [""; 0]);
        assert_eq!(good("labels = 1").0, [""; 0]);
        let only = limit("a", "egress = 5");
        assert_eq!(good(&only).1.len(), 1);
        assert!(Spec::parse_what_is_good("x", &only).0.is_some_and(|spec| spec.limits.is_empty()));
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(parts in proptest::collection::vec(0usize..8, 0..12)) {
            let words = ["[[limit]]\n", "name = \"a\"\n", "scope = { cgroup = \"x\" }\n",
                "egress = \"1mbit\"\n",
                "labels = true\n", "x = [[1],\n[2]]\n", "[fleet]\n", "limit = [{}, {}]\n"];
            let text: String = parts.iter().map(|part| words[*part]).collect();
            let _ = Spec::parse_what_is_good("x", &text);
        }
    }
}
