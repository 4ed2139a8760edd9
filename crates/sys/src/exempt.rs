//! The trie of those who are exempt from a limit.

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use tidegate_core::prefixes::Prefix;

use crate::{bpf::map_error, intf::ExemptConf, limit::LimitError};

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
fn key(address: [u8; 16], bits: u8, index: u32) -> Vec<u8> {
    let mut key = Vec::with_capacity(KEY_BYTES);
    let version: u32 = if (Prefix { address, bits }).is_v4() { 4 } else { 6 };
    key.extend((VERSION_BITS + u32::from(bits)).to_ne_bytes());
    key.extend((index << INDEX_SHIFT | version).to_be_bytes());
    key.extend(address);
    key
}

pub(crate) fn fill(trie: &MapHandle, exempt: &ExemptConf) -> Result<(), LimitError> {
    fill_of(trie, exempt, 0)
}

/// The same in a trie that limits share, of the one of this index.
pub(crate) fn fill_of(trie: &MapHandle, exempt: &ExemptConf, index: u32) -> Result<(), LimitError> {
    let refused = || map_error("exempt");
    let count = exempt.count as usize;
    let wanted: Vec<_> = exempt
        .address
        .iter()
        .zip(exempt.bits)
        .take(count)
        .map(|(a, bits)| key(*a, bits, index))
        .collect();
    let is_ours = |key: &Vec<u8>| {
        let word = key.get(4..8).and_then(|word| Some(u32::from_be_bytes(word.try_into().ok()?)));
        word.is_some_and(|word| word >> INDEX_SHIFT == index)
    };
    let present: Vec<_> = trie.keys().filter(is_ours).collect();
    for key in &wanted {
        trie.update(key, &[1], MapFlags::ANY).map_err(refused())?;
    }
    for key in present.iter().filter(|key| !wanted.contains(key)) {
        trie.delete(key).map_err(refused())?;
    }
    Ok(())
}
