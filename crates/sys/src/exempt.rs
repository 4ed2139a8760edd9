//! The trie of those who are exempt from a limit.

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use tidegate_core::prefixes::{Prefix, Prefixes};

use crate::{bpf::map_error, limit::LimitError};

/// Key of the trie, `struct tg_prefix`: the length in bits, the version of IP, the address.
const KEY_BYTES: usize = 24;
const VERSION_BITS: u32 = 32;
/// Where in the version's word the index of a limit is.
const INDEX_SHIFT: u32 = 8;

/// Gives an object that is open its trie, or leaves it out; the skeletons have no common type. With no map to
/// share, one is made.
macro_rules! set_exempt {
    ($open:expr, $exempts:expr, $shared:expr, $program:literal) => {
        let shared: Option<&libbpf_rs::MapHandle> = $shared;
        if let Some(rodata) = $open.maps.rodata_data.as_deref_mut() {
            rodata.has_exempt = u8::from($exempts);
        }
        match shared {
            _ if !$exempts => $open
                .maps
                .exempt_prefixes
                .set_autocreate(false)
                .map_err($crate::bpf::load_error($program))?,
            Some(with) => $crate::bpf::reuse(&mut $open.maps.exempt_prefixes, with)?,
            None => {}
        }
    };
}
pub(crate) use set_exempt;

/// The word before the address: the version of IP, and in a trie that limits share, whose it is.
fn key(prefix: &Prefix, index: u32) -> Vec<u8> {
    let mut key = Vec::with_capacity(KEY_BYTES);
    let version: u32 = if prefix.is_v4() { 4 } else { 6 };
    key.extend((VERSION_BITS + u32::from(prefix.bits)).to_ne_bytes());
    key.extend((index << INDEX_SHIFT | version).to_be_bytes());
    key.extend(prefix.address);
    key
}

/// The keys in a trie of the limit of an index.
fn keys(trie: &MapHandle, index: u32) -> impl Iterator<Item = Vec<u8>> {
    trie.keys().filter(move |key| {
        let word = key.get(4..8).and_then(|word| Some(u32::from_be_bytes(word.try_into().ok()?)));
        word.is_some_and(|word| word >> INDEX_SHIFT == index)
    })
}

/// Makes prefixes those that the limit of an index exempts; it is 0 in a trie that limits do not share. New
/// ones come before others go, as far as they fit: traffic that stays exempt is not charged meanwhile.
///
/// # Errors
/// [`LimitError::Map`]; some may have come and gone.
pub(crate) fn fill(trie: &MapHandle, exempt: &Prefixes, index: u32) -> Result<(), LimitError> {
    let refused = || map_error("exempt");
    let wanted: Vec<_> = exempt.as_slice().iter().map(|prefix| key(prefix, index)).collect();
    let present: Vec<_> = keys(trie, index).collect();
    let mut stale = present.iter().filter(|key| !wanted.contains(key));
    // Those that are there are not written again: before Linux 6.13 a full trie refuses them, too.
    for key in wanted.iter().filter(|key| !present.contains(key)) {
        let mut done = trie.update(key, &[1], MapFlags::ANY);
        if done.is_err()
            && is_full(trie)
            && let Some(gone) = stale.next()
        {
            trie.delete(gone).map_err(refused())?;
            done = trie.update(key, &[1], MapFlags::ANY);
        }
        done.map_err(refused())?;
    }
    stale.try_for_each(|key| trie.delete(key)).map_err(refused())
}

fn is_full(trie: &MapHandle) -> bool {
    trie.keys().count() >= trie.max_entries() as usize
}

/// The prefixes that the limit of an index exempts.
pub(crate) fn read(trie: &MapHandle, index: u32) -> Prefixes {
    let mut exempt = Prefixes::default();
    for key in keys(trie, index) {
        let bits = key.first_chunk().map_or(0, |bits| u32::from_ne_bytes(*bits));
        let bits = u8::try_from(bits.saturating_sub(VERSION_BITS)).unwrap_or(u8::MAX);
        let address = key.last_chunk().copied().unwrap_or_default();
        // There are no more than fit.
        exempt.insert(Prefix { address, bits });
    }
    exempt
}

/// A trie for so many prefixes.
#[cfg(test)]
pub(crate) fn trie_of(entries: u32) -> MapHandle {
    let options = libbpf_rs::libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_rs::libbpf_sys::bpf_map_create_opts>() as _,
        map_flags: libbpf_rs::libbpf_sys::BPF_F_NO_PREALLOC,
        ..Default::default()
    };
    let (kind, key_bytes) = (libbpf_rs::MapType::LpmTrie, KEY_BYTES as u32);
    MapHandle::create(kind, Some("exempt"), key_bytes, 1, entries, &options).unwrap()
}
