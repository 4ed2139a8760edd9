use std::mem::MaybeUninit;

use libbpf_rs::{
    ObjectBuilder, OpenObject,
    btf::{Btf, HasSize, types::Struct},
    skel::{OpenSkel, SkelBuilder},
};
use proptest::prelude::*;

use super::*;
use crate::{
    bpf::{insns, prepare},
    skel,
};

#[test]
fn what_programs_read_is_as_in_the_kernel() {
    const TEST: &str = "what_programs_read_is_as_in_the_kernel";
    let Some(taken) = KernelTypes::get() else {
        eprintln!("SKIP {TEST}: the types of this kernel are left to libbpf");
        return;
    };
    let (here, all) = (Btf::from_path(&taken.path).unwrap(), Btf::from_vmlinux().unwrap());
    assert!(here.len() < all.len() / 4, "{} of {} types", here.len(), all.len());
    let size =
        |types: &Btf<'_>, name: &str| types.type_by_name::<Struct<'_>>(name).map(|t| t.size());
    // What others contain, too, and a name that has an ending in `vmlinux.h`.
    for name in WANTED.iter().chain(&["inet_connection_sock", "in6_addr"]) {
        assert_eq!(size(&here, name), size(&all, name), "{name}");
    }
    assert!(size(&here, "tcp_sock").is_some());
    let number = |name: &str| {
        let found = all.type_by_name::<Struct<'_>>(name);
        found.map_or(0, |found| u32::from(found.type_id()))
    };
    let numbers = if taken.cast == 0 { [0; CAST_TO.len()] } else { CAST_TO.map(number) };
    assert_eq!(taken.cast_to, numbers);
}

/// An instruction's code, its registers, an offset and a number.
type Instruction = (u8, u8, i16, i32);

/// The instructions of an object's programs for the running kernel, but for descriptors of maps.
fn fitted(open: &mut OpenObject) -> Vec<(String, Vec<Instruction>)> {
    prepare(open, "test").unwrap();
    let programs = open.progs().map(|program| {
        let words = insns(&program).iter().map(|insn| {
            // A wide load, of an address in a map.
            let imm = if insn.code == 0x18 && insn.src_reg() != 0 { 0 } else { insn.imm };
            (insn.code, insn.dst_reg() | insn.src_reg() << 4, insn.off, imm)
        });
        (program.name().to_string_lossy().into_owned(), words.collect())
    });
    programs.collect()
}

#[test]
fn root_programs_are_the_same_as_with_all_types() {
    const TEST: &str = "root_programs_are_the_same_as_with_all_types";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let Some(taken) = KernelTypes::get() else {
        eprintln!("SKIP {TEST}: the types of this kernel are left to libbpf");
        return;
    };
    let with = |types: bool, builder: &mut ObjectBuilder| {
        if types {
            builder.btf_custom_path(&taken.path).unwrap();
        }
    };
    macro_rules! fitted {
        ($builder:ty, $types:expr) => {{
            let mut builder = <$builder>::default();
            with($types, &mut builder.obj_builder);
            let mut storage = MaybeUninit::uninit();
            fitted(builder.open(&mut storage).unwrap().open_object_mut())
        }};
    }
    macro_rules! same {
        ($builder:ty) => {
            let (all, taken) = (fitted!($builder, false), fitted!($builder, true));
            assert!(!all.is_empty() && all.iter().all(|(_, insns)| !insns.is_empty()));
            assert!(all == taken, "programs of {} differ", stringify!($builder));
        };
    }
    same!(skel::nrm::NrmSkelBuilder);
    same!(skel::police::PoliceSkelBuilder);
    same!(skel::edt::EdtSkelBuilder);
}

/// A file with types, and the name `sock`.
fn file(types: &[u32]) -> Vec<u32> {
    let size = 4 * types.len() as u32;
    let header = [MAGIC | 1 << 16, 24, 0, size, size, 8];
    let name = b"\0sock\0\0\0".chunks(4).map(|four| u32::from_ne_bytes(four.try_into().unwrap()));
    header.into_iter().chain(types.iter().copied()).chain(name).collect()
}

#[test]
fn other_kinds_of_types_are_not_read() {
    // A record with one member, a pointer to it.
    let record = [1, btf::BTF_KIND_STRUCT << 24 | 1, 8, 0, 2, 0, 0, btf::BTF_KIND_PTR << 24, 1];
    let taken = take(&file(&record), &["sock"]).unwrap().file;
    let words: Vec<u32> =
        taken.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words[HEADER_WORDS..][..8], record[..8]);
    assert_eq!(words[HEADER_WORDS + 8], 0, "the pointer points to no type");
    assert!(take(&file(&[0, 31 << 24, 0]), &["sock"]).is_none());
    assert!(take(&file(&record[..8]), &["sock"]).is_none());
    assert!(take(&[], &["sock"]).is_none());
}

/// A small number, or what says the kind of a type and how many members it has.
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..8, (0u32..20, 0u32..4).prop_map(|(kind, members)| kind << 24 | members)]
}

proptest! {
    /// Whatever the file holds, it ends.
    #[test]
    fn any_file_is_read_or_refused(
        header in prop::collection::vec(0u32..64, 5),
        types in prop::collection::vec(word(), 0..64),
    ) {
        let words = [MAGIC].into_iter().chain(header).chain(types);
        let _ = take(&words.collect::<Vec<_>>(), &["", "a"]);
    }
}
