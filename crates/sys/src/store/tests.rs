use super::*;

#[test]
fn a_cgroup_is_above_those_in_it() {
    for (above, below) in [("/", "/a"), ("a", "/a/b"), ("/a", "a/b/c")] {
        assert!(is_above(above, below) && !is_above(below, above), "{above} {below}");
    }
    for (one, other) in [("a", "a"), ("a", "ab"), ("a/b", "a/bc"), ("a", "b"), ("/", "")] {
        assert!(!is_above(one, other), "{one} {other}");
    }
}

#[test]
fn names_are_what_the_bpf_file_system_takes() {
    for good in ["backup", "a", "web-1", "A_b", "9lives", &"x".repeat(63)] {
        assert!(check_name(good).is_ok(), "{good}");
    }
    for bad in ["", "a.b", "a/b", "_x", "-x", "ü", &"x".repeat(64), ".."] {
        assert!(check_name(bad).is_err(), "{bad}");
    }
}
