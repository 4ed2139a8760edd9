//! A key of a spec file: its name, the kind of its value, and what help, docs and the JSON schema say of it.

/// One key.
#[derive(Debug)]
pub struct Key {
    /// As in a spec file; as a flag with `-` for `_`.
    pub name: &'static str,
    /// What its value is.
    pub kind: Kind,
    /// What it sets, in one line.
    pub about: &'static str,
    /// A line that would be read.
    pub example: &'static str,
    /// The value where none is given, in words; empty if there is none.
    pub default: &'static str,
}

/// What a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A name: letters, digits, `-` and `_`.
    Name,
    /// A name in a fleet, which may have dots.
    FleetName,
    /// Some other text.
    Text,
    /// A rate, such as `50mbit`.
    Rate,
    /// A rate, or `none`.
    RateOrNone,
    /// A time or a number of bytes, such as `1ms` or `64kb`.
    Span,
    /// The same, or `none`.
    SpanOrNone,
    /// A time.
    Time,
    /// A percentage, such as `10%`.
    Percent,
    /// A whole number in these bounds.
    Whole(i64, i64),
    /// `true` or `false`.
    Flag,
    /// One of these words.
    Word(&'static [&'static str]),
    /// The name of a scheme.
    Scheme,
    /// A list of texts; or one text with commas.
    List,
    /// A list of texts.
    Names,
    /// A list of two texts.
    Pair,
    /// A policer's meter, see [`tidegate_core::police::MeterText`].
    Meter,
    /// A policer's action for each colour.
    Actions,
    /// What a limit is on.
    Scope,
    /// Rows of rates by the clock.
    Schedule,
}

impl Kind {
    /// What stands for the value in help.
    pub fn placeholder(self) -> &'static str {
        match self {
            Kind::Name | Kind::FleetName => "NAME",
            Kind::Text => "TEXT",
            Kind::Rate | Kind::RateOrNone => "RATE",
            Kind::Span | Kind::SpanOrNone => "TIME|SIZE",
            Kind::Time => "TIME",
            Kind::Percent => "PERCENT",
            Kind::Whole(..) => "N",
            Kind::Flag => "BOOL",
            Kind::Word(_) => "WORD",
            Kind::Scheme => "SCHEME",
            Kind::List | Kind::Names => "LIST",
            Kind::Pair => "TWO",
            Kind::Meter => "METER",
            Kind::Actions => "COLOUR=ACTION",
            Kind::Scope => "SCOPE",
            Kind::Schedule => "ROWS",
        }
    }
}

/// The key of a table that has this name.
pub fn find<'k>(keys: impl IntoIterator<Item = &'k Key>, name: &str) -> Option<&'k Key> {
    keys.into_iter().find(|key| key.name == name)
}

/// What to type instead of a key that a table does not have.
pub fn hint<'k>(keys: impl IntoIterator<Item = &'k Key>, table: &str, name: &str) -> String {
    let names: Vec<_> = keys.into_iter().map(|key| key.name).collect();
    match nearest(name, names.iter().copied()) {
        Some(known) => format!("did you mean `{known}`?"),
        None => format!("a {table} has {}", names.join(", ")),
    }
}

/// The candidate that was probably meant.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase().replace('-', "_");
    let distance = |c: &str| strsim::damerau_levenshtein(&word, &c.replace('-', "_"));
    let best = candidates.into_iter().min_by_key(|c| distance(c))?;
    (distance(best) <= 1 + word.len() / 4).then_some(best)
}
