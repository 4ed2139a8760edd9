//! The environment of a command that runs as another user: what names the session or home of whoever called
//! is removed, or set as a login of that user would. The rest stays: locale, terminal, proxies, `PATH`, and
//! what sudo says of its caller (`SUDO_*`).

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::Path,
};

use tidegate_sys::names::User;

/// They name sockets, keys or files of a user, or of a session.
const OF_A_USER: [&str; 12] = [
    "DBUS_SESSION_BUS_ADDRESS",
    "DBUS_SESSION_BUS_PID",
    "DBUS_STARTER_ADDRESS",
    "GNUPGHOME",
    "GPG_AGENT_INFO",
    "ICEAUTHORITY",
    "KRB5CCNAME",
    "SESSION_MANAGER",
    "SSH_AGENT_PID",
    "SSH_AUTH_SOCK",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
];
/// The variables of freedesktop.org that are the host's.
const OF_THE_HOST: [&str; 2] = ["XDG_CONFIG_DIRS", "XDG_DATA_DIRS"];

/// The changes that a user needs in an environment: the value of a variable, or `None` to remove it. Runtime
/// directories are below `run`.
pub(super) fn changes(
    names: impl Iterator<Item = OsString>,
    user: &User,
    run: &Path,
) -> Vec<(OsString, Option<OsString>)> {
    let is_theirs = |name: &OsStr| {
        let is_listed = |list: &[&str]| list.iter().any(|listed| name == *listed);
        let of_session = name.as_bytes().starts_with(b"XDG_") && !is_listed(&OF_THE_HOST);
        of_session || is_listed(&OF_A_USER)
    };
    let mut all: Vec<_> = names.filter(|name| is_theirs(name)).map(|name| (name, None)).collect();
    let mut set = |name: &str, value: OsString| all.push((name.into(), Some(value)));
    for name in ["USER", "LOGNAME", "USERNAME"] {
        set(name, user.name.clone());
    }
    set("HOME", user.home.clone());
    set("SHELL", user.shell.clone());
    set("MAIL", Path::new("/var/mail").join(&user.name).into());
    let is_users = |path: &Path| fs::symlink_metadata(path).is_ok_and(|m| m.uid() == user.uid);
    let runtime = run.join("user").join(user.uid.to_string());
    if runtime.is_dir() && is_users(&runtime) {
        let bus = runtime.join("bus");
        if is_users(&bus) {
            let mut address = OsString::from("unix:path=");
            address.push(bus);
            set("DBUS_SESSION_BUS_ADDRESS", address);
        }
        set("XDG_RUNTIME_DIR", runtime.into());
    }
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn it_has_nothing_of_the_callers_session() {
        let (run, us) = (tempfile::tempdir().unwrap(), rustix::process::getuid().as_raw());
        let user = User {
            name: "anna".into(),
            uid: us,
            gid: us,
            groups: vec![us],
            home: "/home/anna".into(),
            shell: "/bin/sh".into(),
        };
        let callers = [
            "XDG_RUNTIME_DIR=/run/user/0",
            "DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/0/bus",
            "SSH_AUTH_SOCK=/tmp/agent",
            "XAUTHORITY=/home/caller/.Xauthority",
            "XDG_CONFIG_HOME=/home/caller/.config",
            "XDG_DATA_DIRS=/usr/share",
            "MAIL=/var/mail/root",
            "USERNAME=root",
            "PATH=/usr/sbin:/usr/bin",
            "LANG=C.UTF-8",
            "SUDO_UID=1000",
        ];
        let command = |user: &User| {
            let callers = callers.iter().filter_map(|line| line.split_once('='));
            let mut all: BTreeMap<OsString, OsString> =
                callers.map(|(name, value)| (name.into(), value.into())).collect();
            let names: Vec<_> = all.keys().cloned().collect();
            for (name, value) in changes(names.into_iter(), user, run.path()) {
                match value {
                    Some(value) => _ = all.insert(name, value),
                    None => _ = all.remove(&name),
                }
            }
            let lines = all.iter().map(|(name, value)| {
                format!("{}={}", name.to_string_lossy(), value.to_string_lossy())
            });
            lines.collect::<Vec<_>>()
        };
        let alone = [
            "HOME=/home/anna",
            "LANG=C.UTF-8",
            "LOGNAME=anna",
            "MAIL=/var/mail/anna",
            "PATH=/usr/sbin:/usr/bin",
            "SHELL=/bin/sh",
            "SUDO_UID=1000",
            "USER=anna",
            "USERNAME=anna",
            "XDG_DATA_DIRS=/usr/share",
        ];
        assert_eq!(command(&user), alone);

        // With a runtime directory, and then with a bus.
        let dir = run.path().join("user").join(us.to_string());
        fs::create_dir_all(&dir).unwrap();
        let runtime = format!("XDG_RUNTIME_DIR={}", dir.display());
        let bus = format!("DBUS_SESSION_BUS_ADDRESS=unix:path={}/bus", dir.display());
        let more = command(&user);
        assert!(more.contains(&runtime) && !more.contains(&bus), "{more:?}");
        let _bus = std::os::unix::net::UnixListener::bind(dir.join("bus")).unwrap();
        let more = command(&user);
        assert!(more.contains(&runtime) && more.contains(&bus), "{more:?}");
        // Of somebody else it is not used.
        let other = User { uid: us + 1, ..user };
        let theirs = run.path().join("user").join((us + 1).to_string());
        fs::create_dir(theirs).unwrap();
        assert_eq!(command(&other), alone);
    }
}
