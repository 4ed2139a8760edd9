use std::ffi::c_int;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use proptest::prelude::*;

use super::*;

unsafe extern "C" {
    safe fn native_dctcp_alpha(alpha: u32, delivered: u32, marked: u32) -> u32;
    safe fn native_dctcp_ssthresh(cwnd: u32, alpha: u32) -> u32;
    safe fn native_dctcp_ssthresh_loss(prior_cwnd: u32, ssthresh: u32) -> u32;
    fn native_dctcp_received(ce_state: *mut u8, ce: u8, ack_is_delayed: c_int) -> c_int;
}

/// DCTCP_ALPHA_ONE.
const ONE: u32 = 1 << 20;

/// enum dctcp_ack.
const AS_USUAL: c_int = 0;
const NOW: c_int = 1;
const PRIOR_THEN_NOW: c_int = 2;

proptest! {
    #[test]
    fn alpha_is_an_average_of_the_marked_fraction(
        windows in prop::collection::vec((0u32..100_000, 0u32..100_000), 1..200),
    ) {
        let (mut alpha, mut model) = (ONE, 1.0);
        for (delivered, marked) in windows {
            alpha = native_dctcp_alpha(alpha, delivered, marked);
            if delivered > 0 {
                let f = f64::from(marked.min(delivered)) / f64::from(delivered);
                model += (f - model) / 16.0;
            }
            prop_assert!(alpha <= ONE);
            // 16 steps of 2^-20 below and above: far below the 2^-10 that the window sees.
            let error = f64::from(alpha) / f64::from(ONE) - model;
            prop_assert!(error.abs() < 32.0 / f64::from(ONE), "off by {error}");
        }
    }

    #[test]
    fn a_mark_cuts_by_half_of_alpha(cwnd in 1u32..1_000_000, alpha in 0u32..=ONE) {
        let cut = native_dctcp_ssthresh(cwnd, alpha);
        let model = f64::from(cwnd) * (1.0 - f64::from(alpha >> 10) / 2048.0);
        prop_assert!((f64::from(cut) - model.max(2.0)).abs() <= 1.0);
        prop_assert!(cut >= 2);
    }

    #[test]
    fn a_loss_halves_and_a_mark_before_it_does_not_add(cwnd in 4u32..1_000_000, alpha in 0u32..=ONE) {
        let marked = native_dctcp_ssthresh(cwnd, alpha);
        prop_assert_eq!(native_dctcp_ssthresh_loss(cwnd, marked), cwnd / 2);
    }

    #[test]
    fn no_ack_covers_marked_and_unmarked_packets(packets: Vec<bool>) {
        // A receiver that ACKs every second packet, and at once where the program says so.
        let (mut ce_state, mut pending) = (0u8, Vec::new());
        for ce in packets {
            let prior = ce_state;
            // SAFETY: the pointer is to a live byte.
            let ack = unsafe {
                native_dctcp_received(&mut ce_state, u8::from(ce), c_int::from(!pending.is_empty()))
            };
            prop_assert_eq!(ce_state, u8::from(ce));
            if ack == PRIOR_THEN_NOW {
                prop_assert!(pending.iter().all(|p| u8::from(*p) == prior));
                pending.clear();
            }
            pending.push(ce);
            prop_assert!(pending.iter().all(|p| *p == ce), "mixed ACK");
            if ack != AS_USUAL || pending.len() == 2 {
                pending.clear();
            }
            prop_assert!(ack == AS_USUAL || ack == NOW || ack == PRIOR_THEN_NOW);
        }
    }
}

#[test]
fn alpha_dies_away() {
    let mut alpha = ONE;
    for _ in 0..200 {
        alpha = native_dctcp_alpha(alpha, 100, 0);
    }
    assert_eq!(alpha >> 10, 0, "ten bits alone would stop at 15/1024");
}

#[test]
fn an_unknown_name_is_refused_with_what_there_is() {
    let Err(refusal) = ensure("warp") else { panic!("`warp` exists") };
    let text = refusal.to_string();
    assert!(text.starts_with("no congestion control `warp` here; use one of: "), "{text}");
    assert!(text.contains("reno") && text.contains("dctcp"), "{text}");
    assert!(ensure("").is_err());
    assert!(ensure("a name that is too long").is_err());
}

#[test]
fn a_control_of_the_kernel_keeps_its_name() {
    let reno = ensure("reno").unwrap();
    assert_eq!(reno.name(), "reno");
    assert!(!reno.is_ours());
}

fn root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP {test}: needs root");
    }
    root
}

/// `tg_dctcp` exists once on a host: tests that look whether it does take turns.
fn take_turn() -> File {
    let path = std::env::temp_dir().join("tidegate-test-tg_dctcp.lock");
    let file = File::create(path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    file
}

/// Set for the process that [`root_a_registration_lasts_until_its_last_user_ends`] kills.
const HOLD: &str = "TIDEGATE_TEST_HOLD";

#[test]
fn root_a_registration_lasts_until_its_last_user_ends() {
    let name = "root_a_registration_lasts_until_its_last_user_ends";
    if !root(name) {
        return;
    }
    if !links_exist().unwrap() {
        eprintln!("SKIP {name}: kernels before 6.4 end a registration with its first user");
        return;
    }
    if std::env::var_os(HOLD).is_some() {
        let held = ensure(TG_DCTCP).unwrap();
        println!("\nholding {}", held.name());
        let _ = std::io::stdin().lines().next();
        return;
    }
    let _turn = take_turn();
    let mut first = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("congestion::tests::{name}"), "--nocapture"])
        .env(HOLD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(first.stdout.take().unwrap()).lines();
    assert!(lines.any(|l| l.unwrap() == "holding tg_dctcp"));

    let second = ensure(TG_DCTCP).unwrap();
    assert!(second.is_ours());
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(is_available(TG_DCTCP).unwrap(), "the second user keeps it");
    drop(second);
    assert!(!is_available(TG_DCTCP).unwrap(), "nothing is left behind");
}

#[test]
fn root_without_links_the_map_is_the_registration() {
    if !root("root_without_links_the_map_is_the_registration") {
        return;
    }
    let _turn = take_turn();
    let registration = register(false).unwrap().unwrap();
    assert!(register(false).unwrap().is_none(), "taken");
    assert!(matches!(join(false).unwrap(), Some(Registration::Others)));
    let first = CongestionControl { name: TG_DCTCP.to_owned(), registration };
    assert!(is_available(TG_DCTCP).unwrap());
    drop(first);
    assert!(!is_available(TG_DCTCP).unwrap());

    // As after a kill.
    let Some(Registration::Map(map)) = register(false).unwrap() else { panic!("not a map") };
    drop(map);
    assert!(is_available(TG_DCTCP).unwrap());
    assert!(remove_maps().unwrap());
    assert!(!is_available(TG_DCTCP).unwrap());
}
