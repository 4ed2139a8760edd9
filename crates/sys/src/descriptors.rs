//! How many files this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Enough for some ten thousand limits, each of which is some maps and programs.
const OPEN_FILES: u64 = 1 << 17;

/// Lets this process have `OPEN_FILES` files open, or as many as the host allows it: the usual 1024 is for
/// programs that call select(2), and a limit is several files while it is looked at. Children inherit it, so
/// who starts programs of others does not call this.
pub fn allow_many() {
    let is = getrlimit(Resource::Nofile);
    let most = is.maximum.unwrap_or(u64::MAX);
    let allow = |most: u64, current: u64| {
        let limit = Rlimit { current: Some(current), maximum: is.maximum.map(|_| most) };
        setrlimit(Resource::Nofile, limit).is_ok()
    };
    // Only root may go beyond what it was given; what cannot be had shows where it is missing.
    if !allow(most.max(OPEN_FILES), is.current.map_or(OPEN_FILES, |now| now.max(OPEN_FILES))) {
        let _ = allow(most, most);
    }
}
