//! `tidegate top` on a terminal of its own: it draws, obeys, and gives the terminal back.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use rustix::{
    fs::{Mode, OFlags},
    process::Signal,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};

use crate::{
    common::{Guard, Place, signal, wait_for},
    need_root,
};

const LEAVES_SCREEN: &str = "\x1b[?1049l";

/// A program on a terminal of 80 columns and 24 lines.
struct OnTerminal {
    child: Guard,
    keys: File,
    terminal: OwnedFd,
    written: Arc<Mutex<Vec<u8>>>,
}

impl OnTerminal {
    fn start(place: &Place, args: &[&str]) -> OnTerminal {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let name = ptsname(&keys, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let terminal = rustix::fs::open(name, flags, Mode::empty()).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&terminal, size).unwrap();
        let end = || Stdio::from(terminal.try_clone().unwrap());
        // Else the terminal of whoever runs the tests would be asked for its size.
        let mut command = Command::new("setsid");
        command.args(["--ctty", env!("CARGO_BIN_EXE_tidegate")]).args(args);
        command.env("TIDEGATE_BPFFS", place.store());
        command.stdin(end()).stdout(end()).stderr(end()).env("TERM", "xterm");
        let child = Guard(command.spawn().unwrap());
        let keys = File::from(keys);
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut screen, buffer) = (keys.try_clone().unwrap(), Arc::clone(&written));
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut bytes) {
                buffer.lock().unwrap().extend_from_slice(&bytes[..n]);
            }
        });
        OnTerminal { child, keys, terminal, written }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().unwrap()).into_owned()
    }

    fn wait_for(&self, what: &str) {
        wait_for(what, || self.text().contains(what).then_some(()));
    }

    /// Lines are edited and echoed again.
    fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.terminal).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }
}

#[test]
fn root_top_draws_and_ends_on_q() {
    need_root!();
    let place = Place::new();
    place.ok(&["limit", "add", "backup", "--cgroup", place.group.path(), "--egress", "50mbit"]);
    let mut top = OnTerminal::start(&place, &["top", "--interval", "100ms"]);
    top.wait_for("backup");
    top.wait_for("50m");
    assert!(!top.is_cooked());
    top.keys.write_all(b"\r").unwrap();
    top.wait_for("pinned");
    top.keys.write_all(b"q").unwrap();
    assert_eq!(top.child.exit_code(), 0);
    top.wait_for(LEAVES_SCREEN);
    assert!(top.is_cooked());
}

#[test]
fn root_top_gives_the_terminal_back_on_a_signal() {
    need_root!();
    let place = Place::new();
    let mut top = OnTerminal::start(&place, &["top"]);
    top.wait_for("select");
    signal(top.child.0.id(), Signal::TERM);
    assert_eq!(top.child.exit_code(), 128 + 15);
    top.wait_for(LEAVES_SCREEN);
    assert!(top.is_cooked());
}
