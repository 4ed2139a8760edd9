//! Names of hosts and users in a static binary.
//!
//! The C library looks them up by modules that `/etc/nsswitch.conf` names. A static binary would load those
//! of the host, which were made for another C library. What it has built in, files and DNS, needs no module.

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
