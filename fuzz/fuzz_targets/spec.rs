//! Any text as a spec: a refusal names its file and line; what is read, is read again the same.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use tidegate_host::spec::{LimitSpec, Spec};

fuzz_target!(|bytes: &[u8]| -> Corpus {
    let Ok(text) = std::str::from_utf8(bytes) else { return Corpus::Reject };
    match Spec::parse("fuzz.toml", text) {
        Ok(spec) => {
            assert_eq!(Spec::parse("fuzz.toml", text).expect("it was read before"), spec);
            let lines = text.lines().count();
            assert!(spec.limits.iter().all(|limit| (1..=lines).contains(&limit.line)));
            let in_a_tree =
                |limit: &LimitSpec| limit.parent.is_some() == limit.options.class.is_some();
            assert!(spec.limits.iter().all(in_a_tree));
            assert!(spec.groups.iter().all(|group| (1..=lines).contains(&group.line)));
            assert!(spec.groups.is_empty() || spec.fleet.is_some());
            assert!(spec.nics.iter().all(|nic| (1..=lines).contains(&nic.line)));
        }
        Err(error) => {
            let lines = text.split('\n').count();
            assert!(error.line.is_some_and(|line| (1..=lines).contains(&line)), "{error}");
            assert!(error.to_string().starts_with("fuzz.toml"), "{error}");
        }
    }
    Corpus::Keep
});
