//! The kernel's types (BTF) that our programs read. libbpf fits programs to the running kernel by them. It
//! would read all of them for each object, and search all of them for each type by its name: some 15 ms of a
//! start. So they are taken out of the kernel's once, with what they contain; pointers point to nothing.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    ptr,
    sync::OnceLock,
};

use libbpf_rs::libbpf_sys as btf;
use rustix::{
    fs::{MemfdFlags, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

/// The records of `bpf/common/vmlinux.h`.
const WANTED: &[&str] = &include!(concat!(env!("OUT_DIR"), "/kernel_types.rs"));
const KERNEL: &str = "/sys/kernel/btf/vmlinux";

/// The records that addresses are cast to, in the order of `bpf/common/wire_bytes.h`.
const CAST_TO: [&str; 8] = [
    "sk_buff",
    "dst_entry",
    "rtable",
    "dst_metrics",
    "net_device",
    "inet6_dev",
    "inet_skb_parm",
    "inet6_skb_parm",
];
/// The kernel's function that does so.
const CAST: &str = "bpf_rdonly_cast";

/// In words, before the types and strings: `struct btf_header` of `linux/btf.h`.
const HEADER_WORDS: usize = 6;
const MAGIC: u32 = 0xeb9f;
/// In words, of each type: its name, what it is, its size or another type. What else it has follows.
const TYPE_WORDS: usize = 3;

/// The types that programs are fitted by.
pub(crate) struct KernelTypes {
    /// A file of them for libbpf. It is in memory, and goes with the process.
    pub(crate) path: PathBuf,
    _file: File,
    /// The kernel's numbers of the function that casts, and of the types that addresses are cast to. All are
    /// 0 where there is no such function.
    pub(crate) cast: u32,
    pub(crate) cast_to: [u32; CAST_TO.len()],
}

impl KernelTypes {
    /// Takes the types out of the running kernel's when it is called first. `None` if that fails, for example
    /// because a later kernel has more kinds of types: libbpf may know these.
    pub(crate) fn get() -> Option<&'static KernelTypes> {
        static READ: OnceLock<Option<KernelTypes>> = OnceLock::new();
        READ.get_or_init(|| KernelTypes::read(Path::new(KERNEL)).ok().flatten()).as_ref()
    }

    fn read(path: &Path) -> io::Result<Option<KernelTypes>> {
        let Some(taken) = with_words(path, |words| take(words, WANTED))? else { return Ok(None) };
        let mut file = File::from(memfd_create("kernel-types", MemfdFlags::CLOEXEC)?);
        file.write_all(&taken.file)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        let Taken { cast, cast_to, .. } = taken;
        Ok(Some(KernelTypes { path, _file: file, cast, cast_to }))
    }
}

/// Works on a file as words of this machine. It is mapped where the kernel can do that (of its types from
/// Linux 6.16 on), else copied.
fn with_words<T>(path: &Path, work: impl FnOnce(&[u32]) -> T) -> io::Result<T> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len() as usize;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let map =
        unsafe { mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::PRIVATE, &file, 0) };
    let Ok(map) = map else {
        let mut words = vec![0u32; length.div_ceil(4)];
        let bytes = bytemuck::cast_slice_mut(&mut words);
        let mut read = 0;
        while let more @ 1.. = file.read(&mut bytes[read..])? {
            read += more;
        }
        return Ok(work(&words));
    };
    // SAFETY: the mapping begins with a page, and whole pages are mapped. The kernel's types do not change.
    // The mapping goes after the work.
    unsafe {
        let done = work(std::slice::from_raw_parts(map.cast_const().cast(), length.div_ceil(4)));
        let _ = munmap(map, length);
        Ok(done)
    }
}

/// A type, where it is.
#[derive(Clone, Copy)]
struct Type<'a> {
    words: &'a [u32],
}

impl<'a> Type<'a> {
    /// The type that words begin with.
    fn first(words: &'a [u32]) -> Option<Type<'a>> {
        let info = *words.get(1)?;
        let count = (info & 0xffff) as usize;
        let more = match info >> 24 & 0x1f {
            btf::BTF_KIND_INT | btf::BTF_KIND_VAR | btf::BTF_KIND_DECL_TAG => 1,
            btf::BTF_KIND_ARRAY => 3,
            btf::BTF_KIND_STRUCT
            | btf::BTF_KIND_UNION
            | btf::BTF_KIND_DATASEC
            | btf::BTF_KIND_ENUM64 => 3 * count,
            btf::BTF_KIND_ENUM | btf::BTF_KIND_FUNC_PROTO => 2 * count,
            btf::BTF_KIND_PTR
            | btf::BTF_KIND_FWD
            | btf::BTF_KIND_TYPEDEF
            | btf::BTF_KIND_VOLATILE
            | btf::BTF_KIND_CONST
            | btf::BTF_KIND_RESTRICT
            | btf::BTF_KIND_FUNC
            | btf::BTF_KIND_FLOAT
            | btf::BTF_KIND_TYPE_TAG => 0,
            _ => return None,
        };
        Some(Type { words: words.get(..TYPE_WORDS + more)? })
    }

    fn kind(self) -> u32 {
        self.words[1] >> 24 & 0x1f
    }

    fn has_members(self) -> bool {
        matches!(self.kind(), btf::BTF_KIND_STRUCT | btf::BTF_KIND_UNION)
    }

    /// Which of its words are the numbers of types that are a part of it, and which are names.
    fn links(self) -> (Vec<usize>, Vec<usize>) {
        let members = || (TYPE_WORDS..self.words.len()).step_by(3);
        match self.kind() {
            btf::BTF_KIND_STRUCT | btf::BTF_KIND_UNION => {
                (members().map(|at| at + 1).collect(), [0].into_iter().chain(members()).collect())
            }
            btf::BTF_KIND_ARRAY => (vec![TYPE_WORDS, TYPE_WORDS + 1], vec![0]),
            btf::BTF_KIND_TYPEDEF
            | btf::BTF_KIND_VOLATILE
            | btf::BTF_KIND_CONST
            | btf::BTF_KIND_RESTRICT
            | btf::BTF_KIND_TYPE_TAG => (vec![2], vec![0]),
            _ => (Vec::new(), vec![0]),
        }
    }

    /// The type with no type behind a pointer, and no values of an enumeration.
    fn alone(self) -> Vec<u32> {
        let mut words = self.words.to_vec();
        match self.kind() {
            btf::BTF_KIND_PTR => words[2] = 0,
            btf::BTF_KIND_ENUM | btf::BTF_KIND_ENUM64 => {
                words[1] &= !0xffff;
                words.truncate(TYPE_WORDS);
            }
            _ => {}
        }
        words
    }
}

/// The kernel's types.
struct Kernel<'a> {
    /// The first word of the file.
    start: u32,
    types: &'a [u32],
    strings: &'a [u8],
    /// The first word of each type. Type 0 is none.
    starts: Vec<usize>,
}

/// The same as [`KernelTypes`], with the file's content.
struct Taken {
    file: Vec<u8>,
    cast: u32,
    cast_to: [u32; CAST_TO.len()],
}

/// Takes out the records with these names, and all that they contain.
fn take(kernel: &[u32], names: &[&str]) -> Option<Taken> {
    let header = kernel.first_chunk::<HEADER_WORDS>()?;
    let start = header[0];
    let [_, length, types, types_length, strings, strings_length] =
        header.map(|word| word as usize);
    if start & 0xffff != MAGIC || length % 4 != 0 || types % 4 != 0 {
        return None;
    }
    let from = (length + types) / 4;
    let bytes: &[u8] = bytemuck::cast_slice(kernel);
    let strings = bytes.get(length + strings..length + strings + strings_length)?;
    let is_named = |taken: Type<'_>, name: &str| {
        let rest = strings.get(taken.words[0] as usize..);
        rest.and_then(|rest| rest.strip_prefix(name.as_bytes())?.first()) == Some(&0)
    };

    // Most of a hundred thousand names differ in the first letter.
    let mut by_letter = [const { Vec::new() }; 256];
    for name in names {
        by_letter[name.bytes().next().unwrap_or_default() as usize].push(*name);
    }
    let letter = |taken: Type<'_>| strings.get(taken.words[0] as usize).copied();
    let (types, mut at) = (kernel.get(from..from + types_length / 4)?, 0);
    let mut starts = vec![0];
    let (mut found, mut cast, mut cast_to) = (Vec::new(), 0, [0; CAST_TO.len()]);
    while at < types.len() {
        let next = Type::first(&types[at..])?;
        let number = starts.len() as u32;
        starts.push(at);
        at += next.words.len();
        if next.kind() == btf::BTF_KIND_FUNC && is_named(next, CAST) {
            cast = number;
        }
        if !next.has_members() {
            continue;
        }
        let names = &by_letter[letter(next)? as usize];
        if let Some(name) = names.iter().find(|name| is_named(next, name)) {
            found.push(number);
            if let Some(at) = CAST_TO.iter().position(|to| to == name) {
                cast_to[at] = number;
            }
        }
    }
    if cast == 0 {
        cast_to = [0; CAST_TO.len()];
    }
    let file = Kernel { start, types, strings, starts }.copy(found)?;
    Some(Taken { file, cast, cast_to })
}

impl Kernel<'_> {
    /// A file of the types with these numbers and all that they contain, with numbers of their own.
    fn copy(&self, found: Vec<u32>) -> Option<Vec<u8>> {
        let mut numbers: HashMap<u32, u32> = HashMap::from([(0, 0)]);
        let mut to_do = Vec::new();
        let mut number_of = |old: u32, to_do: &mut Vec<u32>| {
            let next = numbers.len() as u32;
            *numbers.entry(old).or_insert_with(|| {
                to_do.push(old);
                next
            })
        };
        for old in found {
            number_of(old, &mut to_do);
        }
        let (mut types, mut texts) = (Vec::new(), vec![0u8]);
        let mut at = 0;
        while let Some(old) = to_do.get(at).copied() {
            at += 1;
            let taken = Type::first(&self.types[*self.starts.get(old as usize)?..])?;
            let mut words = taken.alone();
            let (parts, named) = taken.links();
            for word in parts {
                words[word] = number_of(words[word], &mut to_do);
            }
            for word in named {
                let name = self.strings.get(words[word] as usize..)?;
                let name = &name[..name.iter().position(|byte| *byte == 0)?];
                words[word] = if name.is_empty() { 0 } else { texts.len() as u32 };
                if !name.is_empty() {
                    texts.extend(name);
                    texts.push(0);
                }
            }
            types.extend(words);
        }
        let size = 4 * types.len() as u32;
        let header = [self.start, 4 * HEADER_WORDS as u32, 0, size, size, texts.len() as u32];
        let mut file: Vec<u8> =
            header.into_iter().chain(types).flat_map(u32::to_ne_bytes).collect();
        file.extend(texts);
        Some(file)
    }
}

#[cfg(test)]
mod tests;
