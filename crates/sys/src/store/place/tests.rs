use std::{os::unix::fs::PermissionsExt, sync::Barrier, thread};

use super::*;

#[test]
fn root_first_writers_mount_one_bpf_file_system() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP root_first_writers_mount_one_bpf_file_system: needs root");
        return;
    }
    const WRITERS: usize = 8;
    let dir = tempfile::tempdir().unwrap();
    let bpffs = dir.path().join("bpf");
    fs::create_dir(&bpffs).unwrap();
    for round in 0..10 {
        let barrier = Barrier::new(WRITERS);
        thread::scope(|scope| {
            for _ in 0..WRITERS {
                scope.spawn(|| {
                    barrier.wait();
                    mount_where_none(&bpffs).unwrap();
                });
            }
        });
        let mut mounts = 0;
        while is_bpffs(&bpffs) {
            unmount(&bpffs, UnmountFlags::DETACH).unwrap();
            mounts += 1;
        }
        assert_eq!(mounts, 1, "round {round}");
    }
}

#[test]
fn no_symbolic_link_is_followed_to_a_directory_of_somebody_else() {
    let dir = tempfile::tempdir().unwrap();
    let (theirs, store) = (dir.path().join("theirs"), dir.path().join("tidegate"));
    fs::create_dir(&theirs).unwrap();
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o755)).unwrap();
    rustix::fs::symlink(&theirs, &store).unwrap();
    make_private(&store).unwrap_err();
    assert_eq!(fs::metadata(&theirs).unwrap().mode() & 0o777, 0o755);
    make_private(&theirs).unwrap();
    assert_eq!(fs::metadata(&theirs).unwrap().mode() & 0o777, 0o700);
}
