//! How much a new cgroup may send and receive until it is decided which limits hold it: the model of
//! `bpf/gate/gate.h`.
//!
//! Until its deadline [`BYTES`] of an undecided cgroup and of all cgroups below it pass, of both directions
//! together. A packet takes its bytes from each undecided cgroup that it is in, and passes if it fits into
//! all of them. After the deadline everything passes.

use alloc::{collections::BTreeMap, vec::Vec};

use crate::Nanos;

/// Bytes of an undecided cgroup that pass, as limits count them: on the wire.
pub const BYTES: u64 = 65536;
/// Undecided cgroups above one another that a packet looks at, from its own on.
pub const LEVELS: usize = 8;

/// A cgroup that is undecided.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Cgroup {
    /// The id of the cgroup above it.
    pub parent: u64,
    /// Its deadline. 0: it is decided, and waits for one above it.
    pub until: Nanos,
    /// The bytes that have passed, of it and of those below it.
    pub bytes: u64,
}

/// The fate of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It passes: its cgroup is decided.
    Decided,
    /// It passes, and its bytes are taken.
    Pass,
    /// It passes, and is counted: the deadline is over.
    Late,
    /// It does not fit.
    Drop,
}

/// Judges a packet of the cgroup `id` with so many bytes, and takes them if they fit. `undecided` has the
/// cgroups by id.
pub fn judge(undecided: &mut BTreeMap<u64, Cgroup>, id: u64, now: Nanos, bytes: u32) -> Verdict {
    if !undecided.contains_key(&id) {
        return Verdict::Decided;
    }
    let mut taken = Vec::with_capacity(LEVELS);
    let mut at = id;
    for _ in 0..LEVELS {
        let Some(cgroup) = undecided.get_mut(&at) else { break };
        let parent = cgroup.parent;
        if now < cgroup.until {
            let sum = cgroup.bytes.saturating_add(bytes.into());
            if sum > BYTES {
                for id in taken {
                    undecided.entry(id).and_modify(|cgroup| cgroup.bytes -= u64::from(bytes));
                }
                return Verdict::Drop;
            }
            cgroup.bytes = sum;
            taken.push(at);
        }
        at = parent;
    }
    if taken.is_empty() { Verdict::Late } else { Verdict::Pass }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: Nanos = Nanos(100);

    fn tree(cgroups: &[(u64, u64, u64)]) -> BTreeMap<u64, Cgroup> {
        let cgroup = |parent, until| Cgroup { parent, until: Nanos(until), bytes: 0 };
        cgroups.iter().map(|(id, parent, until)| (*id, cgroup(*parent, *until))).collect()
    }

    /// The bytes that pass of packets of 1000 bytes, one from each of `ids` in turn.
    fn passed(undecided: &mut BTreeMap<u64, Cgroup>, ids: &[u64], now: Nanos) -> u64 {
        let judged = ids.iter().cycle().take(1000).map(|id| judge(undecided, *id, now, 1000));
        judged.filter(|verdict| *verdict == Verdict::Pass).count() as u64 * 1000
    }

    #[test]
    fn what_passes_fits_and_the_rest_is_filled() {
        let mut undecided = tree(&[(2, 1, END.0)]);
        assert_eq!(passed(&mut undecided, &[2], Nanos(0)), 65_000);
        assert_eq!(judge(&mut undecided, 2, Nanos(0), 537), Verdict::Drop);
        assert_eq!(judge(&mut undecided, 2, Nanos(0), 536), Verdict::Pass);
        assert_eq!(judge(&mut undecided, 2, Nanos(0), 1), Verdict::Drop);
        assert_eq!(judge(&mut undecided, 2, END, 1), Verdict::Late);
        assert_eq!(judge(&mut undecided, 3, Nanos(0), 1), Verdict::Decided);
    }

    #[test]
    fn a_decision_above_gives_no_bytes() {
        let mut undecided = tree(&[(2, 1, END.0), (3, 2, END.0), (4, 3, END.0)]);
        assert_eq!(passed(&mut undecided, &[4], Nanos(0)), 65_000);
        for decided in [2, 3] {
            undecided.remove(&decided);
            assert_eq!(passed(&mut undecided, &[4], Nanos(0)), 0);
        }
    }

    #[test]
    fn cgroups_below_an_undecided_one_share_its_bytes() {
        let mut undecided = tree(&[(2, 1, END.0), (3, 2, END.0), (4, 2, END.0)]);
        assert_eq!(passed(&mut undecided, &[2, 3, 4, 3], Nanos(0)), 65_000);
        // A packet that found no place above has taken nothing below.
        let bytes = |id: u64| undecided[&id].bytes;
        assert_eq!((bytes(2), bytes(3) + bytes(4)), (65_000, 65_000 - 17_000));
    }

    #[test]
    fn what_is_decided_waits_for_what_is_above_it_but_not_beyond_the_deadline() {
        let mut undecided = tree(&[(2, 1, END.0), (3, 2, 0)]);
        assert_eq!(passed(&mut undecided, &[3], Nanos(0)), 65_000);
        assert_eq!(judge(&mut undecided, 3, END, 1000), Verdict::Late);
        // One that is younger than the cgroup that is late has its own time.
        undecided.extend(tree(&[(4, 2, 2 * END.0)]));
        assert_eq!(passed(&mut undecided, &[4], END), 65_000);
    }
}
