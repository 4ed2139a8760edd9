//! The receive window's header against its model.

use proptest::prelude::*;
use tidegate_core::{
    Nanos,
    receive_window::{self, Path, ReceiveWindow},
};

/// `struct rw_flow`.
#[repr(C)]
#[derive(Default)]
struct NativeFlow {
    last_ns: u64,
    credit: i64,
    rcv_nxt: u32,
    debt_bytes: u32,
    byte_s: u64,
}

/// `struct rw_path`.
#[repr(C)]
struct NativePath {
    byte_s: u64,
    rtt_ns: u64,
    mss: u32,
    rcv_nxt: u32,
}

unsafe extern "C" {
    fn native_rw_window(flow: *mut NativeFlow, path: *const NativePath, now_ns: u64) -> u32;
    fn native_rw_asking_byte_s(flow: *const NativeFlow, payload: u32, now_ns: u64) -> u64;
    fn native_rw_first_segments(byte_s: u64, mss: u32) -> u32;
    fn native_rw_judged_ns(backlog_ns: i64, mark_ns: u64, rtt_ns: u64) -> i64;
    fn native_rw_burst_ns(rtt_ns: u64, flows: u32) -> u64;
}

proptest! {
    /// ACK by ACK, window and state of the header are the model's.
    #[test]
    fn the_window_header_is_the_model(
        byte_s in prop_oneof![0u64..1 << 32, any::<u64>()],
        rtt in prop_oneof![0u64..1 << 28, any::<u64>()],
        start in any::<u32>(),
        steps in prop::collection::vec(
            (prop_oneof![0u64..1 << 26, any::<u64>()], 0u32..1 << 20, 1u32..1 << 16), 1..100),
    ) {
        let (mut model, mut flow) = (ReceiveWindow::default(), NativeFlow::default());
        let (mut now, mut rcv_nxt) = (0u64, start);
        for (gap, got, mss) in steps {
            now = now.wrapping_add(gap);
            rcv_nxt = rcv_nxt.wrapping_add(got);
            let path = NativePath {
                byte_s, rtt_ns: rtt, mss, rcv_nxt
            };
            // SAFETY: both are live values of the layouts that the header declares.
            let native = unsafe { native_rw_window(&mut flow, &path, now) };
            let path = Path { byte_s, rtt: Nanos(rtt), mss, rcv_nxt };
            prop_assert_eq!(native, model.window(&path, Nanos(now)));
            let state = (flow.last_ns, flow.credit, flow.rcv_nxt, flow.debt_bytes, flow.byte_s);
            let expected =
                (model.last.0, model.credit, model.rcv_nxt, model.debt_bytes, model.byte_s);
            prop_assert_eq!(state, expected);
            let later = now.wrapping_add(u64::from(got) << 8);
            // SAFETY: a live value; the rest are numbers.
            let native = unsafe { native_rw_asking_byte_s(&flow, mss, later) };
            prop_assert_eq!(native, model.asking_byte_s(mss, Nanos(later)).unwrap_or(u64::MAX));
        }
    }

    #[test]
    fn the_judged_backlog_is_the_models(
        backlog in -(1i64 << 50)..1 << 50, mark in 0u64..1 << 40,
        rtt in prop_oneof![0u64..1 << 28, any::<u64>()],
    ) {
        // SAFETY: plain numbers.
        let native = unsafe { native_rw_judged_ns(backlog, mark, rtt) };
        prop_assert_eq!(native, receive_window::judged_ns(backlog, Nanos(mark), Nanos(rtt)));
    }

    #[test]
    fn first_windows_and_bursts_are_the_models(byte_s: u64, mss: u32, rtt: u64, flows: u32) {
        // SAFETY: plain numbers.
        let native = unsafe { (native_rw_first_segments(byte_s, mss), native_rw_burst_ns(rtt, flows)) };
        let first = receive_window::first_segments(byte_s, mss);
        prop_assert_eq!(native, (first, receive_window::burst(Nanos(rtt), flows).0));
    }
}
