//! Which limits can be inside which, by what they are on.

use tidegate_core::{Scheme, Scope};

/// Whether a limit on `above` sees all packets of one on `below`. Only with scheme `htb` does a device
/// contain cgroups and ports: what they send by it.
#[must_use]
pub fn can_contain(above: &Scope, below: &Scope, scheme: Scheme) -> bool {
    match (above, below) {
        (Scope::Cgroup(above), Scope::Cgroup(below)) => is_above(above, below),
        (Scope::Dev(_), Scope::Cgroup(_) | Scope::Port(_)) => scheme == Scheme::Htb,
        _ => false,
    }
}

/// Whether a cgroup contains another one, by their paths below the mount.
#[must_use]
pub fn is_above(above: &str, below: &str) -> bool {
    let (above, below) = (above.trim_matches('/'), below.trim_matches('/'));
    let rest = below.strip_prefix(above);
    above != below && (above.is_empty() || rest.is_some_and(|rest| rest.starts_with('/')))
}
