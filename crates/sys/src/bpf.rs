//! Kernel objects through libbpf: what every scheme needs to load programs, attach them to cgroups, and speak
//! to their maps.

use std::{
    ffi::CStr,
    fs,
    hash::{BuildHasher, Hasher, RandomState},
    mem::MaybeUninit,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    panic::resume_unwind,
    path::Path,
    thread::Builder,
};

use libbpf_rs::{
    AsRawLibbpf, MapCore, MapFlags, MapHandle, MapType, OpenObject, libbpf_sys,
    skel::{OpenSkel, SkelBuilder},
};

use crate::{cgroup::Cgroup, kernel_types::KernelTypes, limit::LimitError, query};

/// Keeps libbpf's own messages off the terminal; errors carry what matters.
pub(crate) fn quiet_libbpf() {
    libbpf_rs::set_print(None);
}

/// A number that nobody outside knows, so that they cannot choose flows that meet in one place.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

pub(crate) fn load_error(program: &'static str) -> impl FnOnce(libbpf_rs::Error) -> LimitError {
    move |source| LimitError::Load { program, source }
}

pub(crate) fn map_error(map: &'static str) -> impl FnOnce(libbpf_rs::Error) -> LimitError {
    move |source| LimitError::Map { map, source }
}

/// Opens the object of a skeleton.
pub(crate) fn open_skel<'a, B: SkelBuilder<'a> + Default>(
    storage: &'a mut MaybeUninit<OpenObject>,
    name: &'static str,
) -> Result<B::Output, LimitError> {
    quiet_libbpf();
    B::default().open(storage).map_err(load_error(name))
}

/// Makes the maps of an object that is open, and loads its programs.
pub(crate) fn load_skel<'a, O: OpenSkel<'a>>(
    open: O,
    name: &'static str,
) -> Result<O::Output, LimitError> {
    open.load().map_err(load_error(name))
}

/// Opens an object that is fitted by [`KernelTypes`]; the skeletons have no common type. Not for one that
/// names a function of the kernel or is attached to one: libbpf finds those among all types.
macro_rules! open_fitted {
    ($builder:ty, $storage:expr, $name:literal) => {{
        $crate::bpf::quiet_libbpf();
        let mut builder = <$builder>::default();
        let types = $crate::kernel_types::KernelTypes::get();
        if let Some(types) = types {
            let refused = $crate::bpf::load_error($name);
            builder.obj_builder.btf_custom_path(&types.path).map_err(refused)?;
        }
        let mut open = libbpf_rs::skel::SkelBuilder::open(builder, $storage)
            .map_err($crate::bpf::load_error($name))?;
        if let (Some(rodata), Some(types)) = (open.maps.rodata_data.as_deref_mut(), types) {
            rodata.type_numbers = types.cast_to;
        }
        open
    }};
}
pub(crate) use open_fitted;

/// Reads what a value of a map begins with.
pub(crate) fn lookup<T: bytemuck::Pod>(
    map: &MapHandle,
    name: &'static str,
    key: u32,
) -> Result<T, LimitError> {
    let value = map.lookup(&key.to_ne_bytes(), MapFlags::ANY).map_err(map_error(name))?;
    read(&value.unwrap_or_default(), name)
}

/// The same of a map that has a value for each CPU.
pub(crate) fn lookup_cpus<T: bytemuck::Pod>(
    map: &MapHandle,
    name: &'static str,
    key: u32,
) -> Result<Vec<T>, LimitError> {
    let cpus = map.lookup_percpu(&key.to_ne_bytes(), MapFlags::ANY).map_err(map_error(name))?;
    cpus.unwrap_or_default().iter().map(|value| read(value, name)).collect()
}

/// The value with which bytes from a map begin: the kernel gives multiples of eight bytes.
pub(crate) fn read<T: bytemuck::Pod>(bytes: &[u8], name: &'static str) -> Result<T, LimitError> {
    let bytes = bytes.get(..size_of::<T>()).ok_or(LimitError::Layout(name))?;
    Ok(bytemuck::pod_read_unaligned(bytes))
}

/// The target of a symbolic link in a directory of pins.
pub(crate) fn name_in(dir: &Path, link: &str) -> Option<String> {
    fs::read_link(dir.join(link)).ok()?.to_str().map(str::to_owned)
}

/// Opens the map that is pinned in a directory.
pub(crate) fn open_map(dir: &Path, pin: &'static str) -> Result<MapHandle, LimitError> {
    MapHandle::from_pinned_path(dir.join(pin)).map_err(map_error(pin))
}

/// Opens a pinned array, if its values have the size of `T`.
pub(crate) fn open_array<T>(dir: &Path, pin: &'static str) -> Result<MapHandle, LimitError> {
    let map = open_map(dir, pin)?;
    let is_so = map.value_size() as usize == size_of::<T>();
    is_so.then_some(map).ok_or(LimitError::Layout(pin))
}

/// Zeroes values of an array, of each CPU if it has one for each. A map of another build may have another
/// layout.
pub(crate) fn clear<T>(
    map: &MapHandle,
    name: &'static str,
    mut keys: Range<u32>,
) -> Result<(), LimitError> {
    let zero = vec![0; size_of::<T>()];
    let cpus = match map.map_type() {
        MapType::PercpuArray => libbpf_rs::num_possible_cpus().map_err(map_error(name))?,
        _ => 0,
    };
    let zeros = vec![zero.clone(); cpus];
    let done = keys.try_for_each(|key| match cpus {
        0 => map.update(&key.to_ne_bytes(), &zero, MapFlags::ANY),
        _ => map.update_percpu(&key.to_ne_bytes(), &zeros, MapFlags::ANY),
    });
    done.map_err(map_error(name))
}

/// Makes a map whose keys are numbers.
pub(crate) fn create_map(
    kind: MapType,
    name: &str,
    value_bytes: usize,
    entries: u32,
) -> libbpf_rs::Result<MapHandle> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
        ..Default::default()
    };
    let key_bytes = size_of::<u32>() as u32;
    MapHandle::create(kind, Some(name), key_bytes, value_bytes as u32, entries, &options)
}

/// Has an object that is open use a map that is there. One of another build may have another layout.
pub(crate) fn reuse(
    map: &mut libbpf_rs::OpenMapMut<'_>,
    with: &MapHandle,
) -> Result<(), LimitError> {
    // The kernel keeps so much of a name.
    let kept = |name: &std::ffi::OsStr| {
        name.as_encoded_bytes().iter().copied().take(15).collect::<Vec<_>>()
    };
    if kept(map.name()) != kept(with.name()) || map.value_size() != with.value_size() {
        return Err(LimitError::Layout("shared"));
    }
    map.reuse_fd(with.as_fd()).map_err(load_error("companion"))
}

/// The links of a limit, by the name under which they are pinned.
pub(crate) type Links = Vec<(&'static str, OwnedFd)>;

/// Attaches a loaded program to a hook of a cgroup, beside those of others. The name is that of a limit's
/// link.
pub(crate) fn attach(
    program: BorrowedFd<'_>,
    name: &'static str,
    cgroup: &Cgroup,
) -> Result<OwnedFd, LimitError> {
    // SAFETY: both descriptors are open, and options may be left out.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(
            program.as_raw_fd(),
            cgroup.as_fd().as_raw_fd(),
            query::hook_of(name),
            std::ptr::null(),
        )
    };
    if fd >= 0 {
        // SAFETY: a new descriptor that nobody else owns.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let source = libbpf_rs::Error::from_raw_os_error(-fd);
    let denied = matches!(source.kind(), libbpf_rs::ErrorKind::PermissionDenied);
    Err(match query::exclusive_holder(cgroup).filter(|_| denied) {
        Some(holder) => LimitError::Occupied { cgroup: cgroup.path().to_owned(), holder },
        None => LimitError::Attach { program: name, cgroup: cgroup.path().to_owned(), source },
    })
}

/// Makes the maps of an object, and its programs ready to be loaded.
pub(crate) fn prepare(object: &mut OpenObject, name: &'static str) -> Result<(), LimitError> {
    // SAFETY: the object is open. libbpf goes on from here when it loads it.
    let ret = unsafe { libbpf_sys::bpf_object__prepare(object.as_libbpf_object().as_ptr()) };
    if ret < 0 {
        return Err(load_error(name)(libbpf_rs::Error::from_raw_os_error(-ret)));
    }
    let cast = KernelTypes::get().map_or(0, |types| types.cast);
    if cast == 0 {
        return Ok(());
    }
    for program in object.progs() {
        let mut insns = insns(&program).to_vec();
        let calls = |insn: &&mut libbpf_sys::bpf_insn| {
            insn.code == CALL && insn.src_reg() == 0 && insn.imm == CAST
        };
        for call in insns.iter_mut().filter(calls) {
            call.set_src_reg(libbpf_sys::BPF_PSEUDO_KFUNC_CALL as u8);
            call.imm = cast as i32;
        }
        let at = program.as_libbpf_object().as_ptr();
        // SAFETY: libbpf copies the instructions, and loads the program later.
        let ret =
            unsafe { libbpf_sys::bpf_program__set_insns(at, insns.as_mut_ptr(), insns.len() as _) };
        if ret < 0 {
            return Err(load_error(name)(libbpf_rs::Error::from_raw_os_error(-ret)));
        }
    }
    Ok(())
}

/// The place holder of `bpf_rdonly_cast`: TG_CAST of `bpf/common/wire_bytes.h`.
const CAST: i32 = 0x7467_c457;
/// A call of a function, in the code of an instruction.
const CALL: u8 = (libbpf_sys::BPF_JMP | libbpf_sys::BPF_CALL) as u8;

/// The instructions of a program of a prepared object.
pub(crate) fn insns<'a>(program: &libbpf_rs::OpenProgram<'a>) -> &'a [libbpf_sys::bpf_insn] {
    let at = program.as_libbpf_object().as_ptr();
    // SAFETY: the program lives as long as its object, and has as many instructions as libbpf says.
    unsafe {
        array(libbpf_sys::bpf_program__insns(at), libbpf_sys::bpf_program__insn_cnt(at) as u32)
    }
}

/// A map of an object whose maps are made.
pub(crate) fn made_map(
    map: &libbpf_rs::OpenMapMut<'_>,
    name: &'static str,
) -> Result<MapHandle, LimitError> {
    // SAFETY: the object of the map lives as long as the borrow, and is not changed meanwhile.
    let map = libbpf_rs::Map::new(unsafe { map.as_libbpf_object().as_ref() });
    MapHandle::try_from(&map).map_err(load_error(name))
}

/// The licence of all our programs.
const LICENSE: &CStr = c"Dual BSD/GPL";

/// A program of an object that is prepared, as the kernel takes it.
struct ReadyProgram<'a> {
    name: &'a CStr,
    kind: libbpf_sys::bpf_prog_type,
    hook: libbpf_sys::bpf_attach_type,
    insns: &'a [libbpf_sys::bpf_insn],
    functions: &'a [libbpf_sys::bpf_func_info],
    lines: &'a [libbpf_sys::bpf_line_info],
    btf: i32,
}

impl ReadyProgram<'_> {
    fn load(&self) -> libbpf_rs::Result<OwnedFd> {
        let mut opts = libbpf_sys::bpf_prog_load_opts {
            sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as _,
            expected_attach_type: self.hook,
            prog_btf_fd: self.btf as u32,
            func_info: self.functions.as_ptr().cast(),
            func_info_cnt: self.functions.len() as u32,
            func_info_rec_size: size_of::<libbpf_sys::bpf_func_info>() as u32,
            line_info: self.lines.as_ptr().cast(),
            line_info_cnt: self.lines.len() as u32,
            line_info_rec_size: size_of::<libbpf_sys::bpf_line_info>() as u32,
            ..Default::default()
        };
        // SAFETY: names end with a zero, lengths are those of the slices, and the descriptor of the types
        // is the object's, which lives as long as this.
        let fd = unsafe {
            libbpf_sys::bpf_prog_load(
                self.kind,
                self.name.as_ptr(),
                LICENSE.as_ptr(),
                self.insns.as_ptr(),
                self.insns.len() as _,
                &mut opts,
            )
        };
        if fd < 0 {
            return Err(libbpf_rs::Error::from_raw_os_error(-fd));
        }
        // SAFETY: a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// Loads the programs of a prepared object (see [`prepare`]) that are to be loaded, by their names. libbpf
/// loads one after the other, and the kernel checks each for tens of milliseconds: here each has a thread.
pub(crate) fn load_at_once(
    object: &OpenObject,
    name: &'static str,
) -> Result<Vec<(String, OwnedFd)>, LimitError> {
    // SAFETY: the object is open, and its programs live as long as it.
    let btf = unsafe { libbpf_sys::bpf_object__btf_fd(object.as_libbpf_object().as_ptr()) };
    let ready = object.progs().filter(|program| program.autoload()).map(|program| {
        let at = program.as_libbpf_object().as_ptr();
        // SAFETY: as above; the arrays have as many elements as libbpf says.
        unsafe {
            ReadyProgram {
                name: CStr::from_ptr(libbpf_sys::bpf_program__name(at)),
                kind: libbpf_sys::bpf_program__type(at),
                hook: libbpf_sys::bpf_program__expected_attach_type(at),
                insns: insns(&program),
                functions: array(
                    libbpf_sys::bpf_program__func_info(at),
                    libbpf_sys::bpf_program__func_info_cnt(at),
                ),
                lines: array(
                    libbpf_sys::bpf_program__line_info(at),
                    libbpf_sys::bpf_program__line_info_cnt(at),
                ),
                btf,
            }
        }
    });
    let ready: Vec<_> = ready.collect();
    let loaded: Vec<_> = std::thread::scope(|scope| {
        let start =
            |program| Builder::new().spawn_scoped(scope, move || ReadyProgram::load(program));
        let threads: Vec<_> = ready.iter().map(start).collect();
        let ended = threads.into_iter().zip(&ready).map(|(thread, program)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            // There may be as many threads as are allowed.
            Err(_) => program.load(),
        });
        ended.collect()
    });
    let named = ready.iter().zip(loaded).map(|(program, loaded)| {
        Ok((program.name.to_string_lossy().into_owned(), loaded.map_err(load_error(name))?))
    });
    named.collect()
}

/// The elements that libbpf has at an address, which is null if there are none.
unsafe fn array<'a, T>(first: *const T, len: u32) -> &'a [T] {
    // SAFETY: the caller says that they are there.
    if first.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(first, len as usize) } }
}

/// A program that stays loaded when its skeleton goes.
pub(crate) fn keep(
    program: &libbpf_rs::ProgramMut<'_>,
    name: &'static str,
) -> Result<OwnedFd, LimitError> {
    program.as_fd().try_clone_to_owned().map_err(|e| load_error(name)(e.into()))
}
