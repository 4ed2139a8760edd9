//! SSH sessions with a machine behind a port whose queue is in its host's hands.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    acks::use_ecn,
    common::{Guard, Place, skip, wait_for},
    edt::{Bed, into, ok},
    htb::guest,
    need_root,
};

const BYTES: usize = 1_000_000;
const ADDRESS: &str = "10.96.0.2:22";

fn is_here(program: &str) -> bool {
    let mut shell = Command::new("sh");
    shell.args(["-c", "command -v \"$0\"", program]).stdout(Stdio::null());
    shell.status().is_ok_and(|status| status.success())
}

/// Host key, and a user's key that may log in; the server sees `home` as root's home.
fn make_keys(home: &Path) -> (String, String) {
    let ssh = home.join(".ssh");
    fs::create_dir(&ssh).unwrap();
    let keys = ["host", "user"].map(|name| {
        let path = home.join(name).to_str().unwrap().to_owned();
        let made =
            Command::new("dropbearkey").args(["-t", "ed25519", "-f", &path]).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        (path, String::from_utf8(made.stdout).unwrap())
    });
    let [(host, _), (user, shown)] = keys;
    let public = shown.lines().find(|line| line.starts_with("ssh-ed25519 ")).unwrap();
    fs::write(ssh.join("authorized_keys"), format!("{public}\n")).unwrap();
    for path in [home, &ssh] {
        fs::set_permissions(path, Permissions::from_mode(0o700)).unwrap();
    }
    (host, user)
}

#[test]
fn root_ssh_works_through_every_queue_of_a_port() {
    need_root!();
    if !["dropbear", "dbclient", "dropbearkey"].into_iter().all(is_here) {
        return skip("dropbear is not here (package dropbear-bin)");
    }
    let home = tempfile::tempdir().unwrap();
    let (host, user) = make_keys(home.path());
    let bed = Bed::new();
    let guest = guest(&bed);
    [&guest, &bed.receiver].into_iter().for_each(use_ecn);
    // Its keys are those of the user, but in a mount namespace of its own.
    let script =
        "mount --bind \"$0\" ~root && exec dropbear -F -E -s -r \"$1\" -p \"$2\" -P \"$0/pid\"";
    let mut server = into(&guest, "unshare");
    server.args(["--mount", "sh", "-c", script, home.path().to_str().unwrap()]);
    server.args([&host, ADDRESS]).stderr(Stdio::null());
    let _server = Guard(server.spawn().unwrap());
    wait_for("the SSH server", || home.path().join("pid").exists().then_some(()));
    for scheme in ["htb", "dem", "spring"] {
        let place = Place::new();
        let words = format!(
            "limit add guest --port tap0 --scheme {scheme} --egress 20mbit --ingress 20mbit"
        );
        ok(&place, &bed, &words);
        // One session each way, at the same time; none outlives its deadline.
        let session = |command: &str, sent: Stdio| {
            let mut client = into(&bed.receiver, "timeout");
            client.args(["300", "dbclient", "-y", "-y", "-i", &user, "root@10.96.0.2", command]);
            client.stdin(sent).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let sent = tempfile::tempfile().unwrap();
        sent.set_len(BYTES as u64).unwrap();
        let up = session("wc -c", sent.into());
        let down = session(&format!("head -c {BYTES} /dev/zero"), Stdio::null());
        let [up, down] = [("up", up), ("down", down)].map(|(direction, session)| {
            let got = session.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&got.stderr);
            assert!(got.status.success(), "{scheme}, {direction}: {}; {said}", got.status);
            got.stdout
        });
        assert_eq!(String::from_utf8_lossy(&up).trim(), BYTES.to_string(), "{scheme}");
        assert_eq!(down.len(), BYTES, "{scheme}");
        ok(&place, &bed, "detach");
    }
}
