//! The selectors of limits on a host: services, users, containers, programs, whose cgroups come and go.

use alloc::{borrow::ToOwned, string::String};
use core::{fmt, str::FromStr};

/// The property that a selector compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SelectorKind {
    /// The path of a cgroup below the cgroup mount.
    Cgroup,
    /// The name of a unit of systemd's system manager.
    Unit,
    /// The name of a slice.
    Slice,
    /// A user, by name or number: all that runs in the user's slice.
    User,
    /// The name of a container.
    Container,
    /// Labels of containers, `KEY=VALUE` or `KEY`, with commas between them: a container must have all.
    Labels,
    /// The path of a program, and after a space a pattern for its arguments.
    Exe,
    /// The namespace of pods, their name and their labels, with `/` between them: `prod`, `prod/api-*`,
    /// `prod/*/app=api`. The label `tidegate.dev/limit=NAME` is the annotation by which a pod joins a limit.
    Pod,
}

impl SelectorKind {
    /// All kinds.
    pub const ALL: [SelectorKind; 8] = [
        SelectorKind::Cgroup,
        SelectorKind::Unit,
        SelectorKind::Slice,
        SelectorKind::User,
        SelectorKind::Container,
        SelectorKind::Labels,
        SelectorKind::Exe,
        SelectorKind::Pod,
    ];

    /// As a selector's text begins, and as messages name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SelectorKind::Cgroup => "cgroup",
            SelectorKind::Unit => "unit",
            SelectorKind::Slice => "slice",
            SelectorKind::User => "user",
            SelectorKind::Container => "container",
            SelectorKind::Labels => "labels",
            SelectorKind::Exe => "exe",
            SelectorKind::Pod => "pod",
        }
    }
}

/// Selects cgroups of a host. All that it matches share one limit; they come and go while the limit stays.
///
/// The value of `cgroup`, `unit`, `slice`, `container` and `exe` is a pattern: `*` is any text but `/`, `?`
/// one letter but `/`, `[...]` one of some letters.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Selector {
    /// The property that it compares.
    pub kind: SelectorKind,
    /// The value or pattern that it matches.
    pub value: String,
}

/// Why a text is no selector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a selector: write KIND:VALUE, such as unit:web.service")]
pub struct SelectorError;

impl fmt::Display for Selector {
    /// As a text that [`FromStr`] reads back: `unit:web.service`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind.name(), self.value)
    }
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Selector, SelectorError> {
        let (kind, value) = text.split_once(':').ok_or(SelectorError)?;
        let kind = SelectorKind::ALL.into_iter().find(|k| k.name() == kind).ok_or(SelectorError)?;
        if value.is_empty() {
            return Err(SelectorError);
        }
        Ok(Selector { kind, value: value.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn a_selector_is_read_back_as_it_is_written() {
        for kind in SelectorKind::ALL {
            let selector = Selector { kind, value: "a:b/*,c=d e".to_owned() };
            assert_eq!(selector.to_string().parse(), Ok(selector));
        }
        assert_eq!("web.service".parse::<Selector>(), Err(SelectorError));
        assert_eq!("unit:".parse::<Selector>(), Err(SelectorError));
        assert_eq!("service:web".parse::<Selector>(), Err(SelectorError));
    }
}
