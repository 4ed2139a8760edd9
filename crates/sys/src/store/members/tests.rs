use std::{
    io::Read,
    net::TcpListener,
    process::Command,
    time::{Duration, Instant},
};

use tidegate_core::{Scheme, queue_options::VirtualQueueOptions};

use super::*;
use crate::{bpffs::PrivateBpffs, schemes::nrm::tree_tests::Nest};

const PATIENCE: Duration = Duration::from_secs(60);

/// A socket belongs to the cgroup in which it was made, also when its process has left that.
#[test]
fn root_a_removed_cgroup_is_a_member_while_it_has_sockets() {
    const TEST: &str = "root_a_removed_cgroup_is_a_member_while_it_has_sockets";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP {TEST}: needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let bpffs = PrivateBpffs::mount(dir.path()).unwrap();
    let (store, mut nest) = (Store::at(bpffs.path().join("t")), Nest::new("removed", 2));
    let hierarchy = Hierarchy::find().unwrap();
    let options = LimitOptions {
        egress: Some(VirtualQueueOptions::new("1gbit".parse().unwrap())),
        scheme: Scheme::Pace,
        ..LimitOptions::default()
    };
    let scope = Scope::of_cgroup(&format!("{}/*", nest.groups[0].path()));
    let path = nest.groups[1].path().to_owned();
    let lock = store.lock().unwrap();
    store.install(&lock, &hierarchy, "a", &scope, &options, None).unwrap();
    let set = |cgroups: &[String]| store.set_members(&lock, &hierarchy, "a", cgroups).unwrap();
    set(std::slice::from_ref(&path));

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let script = "echo $$ > \"$0/cgroup.procs\"; exec 3<>/dev/tcp/127.0.0.1/$1; \
                  echo $$ > \"$2/cgroup.procs\"; echo >&3; read -r <&3";
    let mut holder = Command::new("bash")
        .args(["-c", script])
        .arg(nest.groups[1].absolute())
        .arg(port.to_string())
        .arg(nest.groups[0].absolute())
        .spawn()
        .unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    stream.read_exact(&mut [0]).unwrap();
    nest.groups.pop().unwrap().remove(Instant::now() + PATIENCE).unwrap();

    let members = || store.open(&hierarchy, "a").unwrap().members;
    set(&[]);
    let [held] = members().try_into().unwrap();
    assert_eq!((held.path, held.joined_as, held.has_sockets), (None, path, true));
    drop(stream);
    holder.wait().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while members().iter().any(|member| member.has_sockets) {
        assert!(Instant::now() < deadline, "the kernel keeps the links");
        std::thread::sleep(Duration::from_millis(5));
    }
    set(&[]);
    assert_eq!(members(), []);
    store.remove(&lock, "a").unwrap();
    store.close(lock);
}
