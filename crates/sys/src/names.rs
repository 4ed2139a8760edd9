//! Names of hosts and users in a static binary.
//!
//! The C library looks them up by modules that `/etc/nsswitch.conf` names. A static binary would load those
//! of the host, which were made for another C library. What it has built in, files and DNS, needs no module.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, OsStr, OsString},
    io,
    mem::MaybeUninit,
    os::unix::ffi::OsStrExt,
    ptr,
};

/// From now on names are looked up in files and DNS alone, if this binary is static. Else the host's
/// configuration holds. To be called before any lookup.
pub fn use_built_in() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    {
        unsafe extern "C" {
            fn __nss_configure_lookup(
                database: *const std::ffi::c_char,
                services: *const std::ffi::c_char,
            ) -> std::ffi::c_int;
        }
        for (database, services) in
            [(c"hosts", c"files dns"), (c"passwd", c"files"), (c"group", c"files")]
        {
            // SAFETY: both end with a zero, and the C library keeps a copy.
            unsafe { __nss_configure_lookup(database.as_ptr(), services.as_ptr()) };
        }
    }
}

/// A user, as a login would make it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: OsString,
    pub uid: u32,
    pub gid: u32,
    /// All groups, the first one among them.
    pub groups: Vec<u32>,
    pub home: OsString,
    pub shell: OsString,
}

/// Bytes of a user's entry at most.
const ENTRY_MAX: usize = 1 << 20;
/// Groups of a user at most; the kernel's bound.
const GROUPS_MAX: usize = 1 << 16;

/// A user by name; `None` if there is none of this name.
///
/// # Errors
/// Those of the operating system.
pub fn user(name: &str) -> io::Result<Option<User>> {
    let Ok(name) = CString::new(name) else { return Ok(None) };
    // SAFETY: `name` ends with a zero, and the rest is as `entry` says.
    entry(|passwd, buffer, result| unsafe {
        libc::getpwnam_r(name.as_ptr(), passwd, buffer.as_mut_ptr(), buffer.len(), result)
    })
}

/// A user by number; `None` if there is none of this number.
///
/// # Errors
/// Those of the operating system.
pub fn user_of(uid: u32) -> io::Result<Option<User>> {
    // SAFETY: as `entry` says.
    entry(|passwd, buffer, result| unsafe {
        libc::getpwuid_r(uid, passwd, buffer.as_mut_ptr(), buffer.len(), result)
    })
}

/// Looks a user up by a call that fills an entry, which points into the buffer, and says by the last argument
/// whether it has.
fn entry(
    look: impl Fn(*mut libc::passwd, &mut [libc::c_char], *mut *mut libc::passwd) -> i32,
) -> io::Result<Option<User>> {
    let mut buffer = vec![0; 1 << 10];
    loop {
        let mut passwd = MaybeUninit::<libc::passwd>::zeroed();
        let mut result = ptr::null_mut();
        match look(passwd.as_mut_ptr(), &mut buffer, &raw mut result) {
            0 if result.is_null() => return Ok(None),
            0 => {}
            libc::ERANGE if buffer.len() < ENTRY_MAX => {
                buffer.resize(buffer.len() * 2, 0);
                continue;
            }
            // How some C libraries say that there is none.
            libc::ENOENT | libc::ESRCH => return Ok(None),
            code => return Err(io::Error::from_raw_os_error(code)),
        }
        // SAFETY: zeroed at first, and filled as the call says.
        let passwd = unsafe { passwd.assume_init() };
        let text = |text: *const libc::c_char| {
            if text.is_null() {
                return OsString::new();
            }
            // SAFETY: it points into `buffer`, which is alive, and ends with a zero.
            let text = unsafe { CStr::from_ptr(text) };
            OsStr::from_bytes(text.to_bytes()).to_owned()
        };
        let groups = groups(passwd.pw_name, passwd.pw_gid)?;
        return Ok(Some(User {
            name: text(passwd.pw_name),
            uid: passwd.pw_uid,
            gid: passwd.pw_gid,
            groups,
            home: text(passwd.pw_dir),
            shell: text(passwd.pw_shell),
        }));
    }
}

fn groups(name: *const libc::c_char, gid: u32) -> io::Result<Vec<u32>> {
    let mut groups = vec![0; 64];
    loop {
        let mut count = groups.len() as i32;
        // SAFETY: `name` ends with a zero; there is room for `count` groups.
        if unsafe { libc::getgrouplist(name, gid, groups.as_mut_ptr(), &raw mut count) } >= 0 {
            groups.truncate(count.unsigned_abs() as usize);
            return Ok(groups);
        }
        if groups.len() >= GROUPS_MAX {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        groups.resize(groups.len() * 2, 0);
    }
}

/// The number of a group in `/etc/group`; `None` if there is none of this name.
pub fn group(name: &str) -> Option<u32> {
    numbers(&read("/etc/group")).find_map(|(is, gid)| (is == name).then_some(gid))
}

/// The name of a group in `/etc/group`; `None` if none has this number.
pub fn group_name(gid: u32) -> Option<String> {
    let name = |(name, is): (&str, u32)| (is == gid).then(|| name.to_owned());
    numbers(&read("/etc/group")).find_map(name)
}

/// The numbers of the users in `/etc/passwd`, by name. Others are known by number alone.
pub fn users() -> BTreeMap<String, u32> {
    let users = read("/etc/passwd");
    numbers(&users).map(|(name, uid)| (name.to_owned(), uid)).collect()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Names and numbers of `/etc/passwd` or `/etc/group`.
fn numbers(text: &str) -> impl Iterator<Item = (&str, u32)> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        Some((fields.next()?, fields.nth(1)?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_number() {
        let root = user("root").unwrap().unwrap();
        assert_eq!((root.uid, root.gid, &root.groups), (0, 0, &vec![0]));
        assert_eq!(user_of(0).unwrap().unwrap(), root);
        assert_eq!(user("no such user").unwrap(), None);
        assert_eq!(user("\0").unwrap(), None);
    }

    #[test]
    fn lines_that_have_no_number_are_left_out() {
        let text = "root:x:0:0:root:/root:/bin/sh\nanna:x:1000:1000::/:/bin/sh\nbroken\n";
        assert_eq!(numbers(text).collect::<Vec<_>>(), [("root", 0), ("anna", 1000)]);
        assert_eq!(users()["root"], 0);
    }
}
