//! The header compiled for this machine against its model, and the loaded programs on a table of packets.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use proptest::prelude::*;
use tidegate_core::{
    Nanos,
    gate::{self as model, BYTES, Verdict},
};
use tidegate_instruments::run_time::{empty_program, tcp_frame, test_run};

use super::{
    tests::{LONG, root},
    *,
};
use crate::{
    cgroup::Hierarchy,
    net::{NetNs, VethPair},
};

/// `struct native_gt_tree`.
#[repr(C)]
struct NativeTree {
    ids: *const u64,
    cgroups: *mut Undecided,
    count: u64,
}

unsafe extern "C" {
    fn native_gt_packet(tree: *mut NativeTree, id: u64, now_ns: u64, bytes: u32) -> u32;
    fn native_gt_take(held: *mut Undecided, bytes: u32) -> i32;
}

fn verdict(native: u32) -> Verdict {
    match native {
        0 => Verdict::Decided,
        1 => Verdict::Pass,
        2 => Verdict::Late,
        3 => Verdict::Drop,
        other => panic!("no verdict {other}"),
    }
}

impl From<model::Cgroup> for Undecided {
    fn from(cgroup: model::Cgroup) -> Undecided {
        let model::Cgroup { parent, until, bytes } = cgroup;
        Undecided { parent, until_ns: until.0, bytes }
    }
}

/// Ids are small, so that parents are often there, also in circles, which no kernel has.
fn any_cgroup() -> impl Strategy<Value = model::Cgroup> {
    let bytes = prop_oneof![Just(0), 60_000..=BYTES];
    let until = prop_oneof![Just(0), 0u64..1000];
    (0u64..20, until, bytes).prop_map(|(parent, until, bytes)| model::Cgroup {
        parent,
        until: Nanos(until),
        bytes,
    })
}

proptest! {
    /// Packet by packet, verdict and bytes of the header are the model's.
    #[test]
    fn the_header_is_the_model(
        mut undecided in prop::collection::btree_map(1u64..20, any_cgroup(), 0..20),
        packets in prop::collection::vec(
            (0u64..20, 0u64..1000, prop_oneof![40u32..2000, any::<u32>()]), 1..200,
        ),
        chain: bool,
    ) {
        if chain {
            // Deeper than a packet looks.
            for (id, cgroup) in &mut undecided {
                cgroup.parent = id - 1;
            }
        }
        let ids: Vec<u64> = undecided.keys().copied().collect();
        let mut held: Vec<Undecided> = undecided.values().map(|cgroup| (*cgroup).into()).collect();
        let mut tree = NativeTree {
            ids: ids.as_ptr(), cgroups: held.as_mut_ptr(), count: ids.len() as u64,
        };
        for (id, now, bytes) in packets {
            // SAFETY: `tree` points to as many ids and cgroups as it says, which live on.
            let got = unsafe { native_gt_packet(&raw mut tree, id, now, bytes) };
            prop_assert_eq!(verdict(got), model::judge(&mut undecided, id, Nanos(now), bytes));
        }
        let expected: Vec<Undecided> = undecided.values().map(|cgroup| (*cgroup).into()).collect();
        prop_assert_eq!(held, expected);
    }
}

/// However many CPUs take at once, what they get fits.
#[test]
fn racing_cpus_never_take_more_than_there_is() {
    const THREADS: u32 = 4;
    for bytes in [100, 1514, 9000] {
        let mut held = Undecided::default();
        let shared = &raw mut held as usize;
        let taken = AtomicU64::new(0);
        let race = |number: u32| {
            let bytes = bytes + number;
            for _ in 0..2000 {
                // SAFETY: `held` outlives the threads, and is only changed by atomic instructions.
                if unsafe { native_gt_take(shared as *mut Undecided, bytes) } != 0 {
                    taken.fetch_add(bytes.into(), Ordering::Relaxed);
                }
            }
        };
        thread::scope(|scope| {
            for number in 0..THREADS {
                let race = &race;
                scope.spawn(move || race(number));
            }
        });
        let taken = taken.into_inner();
        assert_eq!(held.bytes, taken, "packets of {bytes}: nothing is lost or left");
        assert!(taken <= BYTES && taken > BYTES - u64::from(bytes + THREADS), "{taken}");
    }
}

/// One line of the table. Bytes are on the wire, with 14 of Ethernet.
struct Row {
    what: &'static str,
    /// The cgroup of the packet, and one above it, if they are held.
    own: Option<Undecided>,
    above: Option<Undecided>,
    ingress: bool,
    loopback: bool,
    dead: bool,
    /// Otherwise TCP.
    udp: bool,
    /// Segments, and bytes of each; 0: the packet is one.
    segments: (u32, u32),
    returns: u32,
    /// What the counters grow by: passed bytes, dropped packets, late bytes.
    counted: [u64; 3],
    /// What the bytes of both cgroups grow by.
    taken: [u64; 2],
}

const ABOVE: u64 = u64::MAX - 1;
const WIRE: u64 = 1000 + 14;

const fn held(until_ns: u64, bytes: u64) -> Option<Undecided> {
    Some(Undecided { parent: ABOVE, until_ns, bytes })
}

fn row(what: &'static str, own: Option<Undecided>, returns: u32) -> Row {
    Row {
        what,
        own,
        above: None,
        ingress: false,
        loopback: false,
        dead: false,
        udp: false,
        segments: (0, 0),
        returns,
        counted: [0; 3],
        taken: [0; 2],
    }
}

fn table() -> Vec<Row> {
    let far = u64::MAX;
    let pass = |row: Row| Row { counted: [WIRE, 0, 0], taken: [WIRE, 0], ..row };
    let drop = |row: Row| Row { counted: [0, 1, 0], ..row };
    let late = |row: Row| Row { counted: [0, 0, WIRE], ..row };
    let inward = |row: Row| Row { ingress: true, ..row };
    let below = |row: Row, above: Option<Undecided>| Row {
        above: above.map(|held| Undecided { parent: 0, ..held }),
        ..row
    };
    let both = |row: Row| Row { taken: [WIRE, WIRE], ..row };
    let upper = |row: Row| Row { taken: [0, WIRE], ..row };
    // IP 20 and TCP 20 bytes, and 14 of Ethernet, with each of three segments.
    let wire = WIRE + 2 * 54;
    let segments = (3, 320);
    let alone = held(far, 0);
    vec![
        row("decided", None, 1),
        inward(row("decided, inward", None, 1)),
        pass(row("undecided: pass", alone, 1)),
        inward(pass(row("undecided, inward: pass", alone, 1))),
        pass(row("fits exactly", held(far, BYTES - WIRE), 1)),
        // TCP must not take it for congestion of this host: it would give up after a few seconds.
        drop(row("one byte too many", held(far, BYTES - WIRE + 1), 0)),
        Row { udp: true, ..drop(row("UDP: the sender gets no error", held(far, BYTES), 2)) },
        inward(drop(row("inward: drop is 0", held(far, BYTES - WIRE + 1), 0))),
        late(row("late", held(1, BYTES), 1)),
        inward(late(row("late, inward", held(1, 0), 1))),
        below(both(pass(row("below: takes from both", alone, 1))), held(far, 0)),
        below(drop(row("below: the upper one's are taken", alone, 0)), held(far, BYTES)),
        below(drop(row("below: its own are taken", held(far, BYTES), 0)), held(far, 0)),
        below(upper(pass(row("late, below", held(1, BYTES), 1))), held(far, 0)),
        below(upper(pass(row("decided, below: takes from above", held(0, 0), 1))), held(far, 0)),
        below(pass(row("below one that is late", alone, 1)), held(1, BYTES)),
        below(drop(row("decided, below", held(0, 0), 0)), held(far, BYTES)),
        below(late(row("decided, below one that is late", held(0, 0), 1)), held(1, BYTES)),
        Row {
            segments,
            counted: [wire, 0, 0],
            taken: [wire, 0],
            ..row("segments have headers", alone, 1)
        },
        Row { segments, ..drop(row("and must fit with them", held(far, BYTES - wire + 1), 0)) },
        Row { loopback: true, ..row("loopback", held(far, BYTES), 1) },
        Row { dead: true, ..row("dropped further inside", alone, 2) },
        inward(Row { dead: true, ..row("dropped further inside, inward", alone, 0) }),
    ]
}

/// The context that BPF_PROG_TEST_RUN takes for a packet of a device.
fn context(row: &Row, device: u32) -> Vec<u8> {
    let mut skb = vec![0u8; 192];
    let mut put = |offset: usize, value: u32| {
        skb[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    };
    // Offsets in struct __sk_buff, which is UAPI.
    put(8, if row.dead { 0x7d9a_7e1d } else { 0 });
    put(40, if row.loopback { 1 } else { device });
    put(164, row.segments.0);
    put(176, row.segments.1);
    skb
}

/// Runs `f` where there is a device that is not loopback, with its index.
fn with_device(name: &str, f: impl FnOnce(u32) + Send) {
    let netns = NetNs::create(&format!("tidegate-{name}-{}", std::process::id())).unwrap();
    let mut netlink = netns.netlink().unwrap();
    netlink.add_veth(&VethPair { name: "out", peer: "in", peer_netns: None }).unwrap();
    let device = netlink.index_of("out").unwrap();
    netns.run(|| f(device)).unwrap();
}

/// The id of the cgroup of this process, of which the kernel makes the sockets of packets that it runs a
/// program on.
fn own_id() -> [u8; 8] {
    Hierarchy::find().unwrap().current().unwrap().id().to_ne_bytes()
}

/// Runs a program on the packet of a row; what it returned, and the mean time of `repeat` runs.
fn run(program: BorrowedFd<'_>, row: &Row, device: u32, repeat: u32) -> (u32, Duration) {
    let mut frame = tcp_frame(1000);
    if row.udp {
        // The protocol in the header of IPv4, behind that of Ethernet.
        frame[14 + 9] = 17;
    }
    test_run(program, &frame, &context(row, device), repeat).unwrap()
}

#[test]
fn root_the_loaded_programs_follow_the_table() {
    if root("root_the_loaded_programs_follow_the_table") {
        with_device("gate-table", follow_the_table);
    }
}

fn follow_the_table(device: u32) {
    let mut storage = MaybeUninit::uninit();
    let object = load(&mut storage, 0, LONG).unwrap();
    let (own, above, zero) = (own_id(), ABOVE.to_ne_bytes(), 0u32.to_ne_bytes());
    let maps = &object.maps;
    let put = |id: &[u8; 8], held: Option<Undecided>| {
        let _ = maps.undecided.delete(id);
        if let Some(held) = held {
            maps.undecided.update(id, bytes_of(&held), MapFlags::ANY).unwrap();
        }
    };
    let bytes = |id: &[u8; 8]| {
        let value = maps.undecided.lookup(id, MapFlags::ANY).unwrap();
        value.map_or(0, |value| read::<Undecided>(&value, UNDECIDED).unwrap().bytes)
    };
    let counted = || {
        let mut sum = GateCounters::default();
        for cpu in maps.gate_counters.lookup_percpu(&zero, MapFlags::ANY).unwrap().unwrap() {
            sum.add(&read(&cpu, COUNTERS).unwrap());
        }
        [sum.passed_bytes, sum.dropped_packets, sum.late_bytes]
    };
    for row in table() {
        let what = row.what;
        put(&own, row.own);
        put(&above, row.above);
        let before = counted();
        let program = if row.ingress { &object.progs.gate_in } else { &object.progs.gate_out };
        assert_eq!(run(program.as_fd(), &row, device, 1).0, row.returns, "{what}: return value");
        let after = counted();
        let grown: Vec<u64> = after.iter().zip(before).map(|(now, was)| now - was).collect();
        assert_eq!(grown, row.counted, "{what}: counters");
        let was = [row.own, row.above].map(|held| held.map_or(0, |held| held.bytes));
        let taken = [bytes(&own) - was[0], bytes(&above) - was[1]];
        assert_eq!(taken, row.taken, "{what}: taken");
    }
}

/// What a packet pays with all of it in the caches. Printed; how busy the machine is no test can know.
#[test]
fn root_gate_cost_of_a_packet() {
    if root("root_gate_cost_of_a_packet") {
        with_device("gate-cost", measure);
    }
}

fn measure(device: u32) {
    let mut storage = MaybeUninit::uninit();
    let object = load(&mut storage, 0, LONG).unwrap();
    let least = |program: BorrowedFd<'_>, row: &Row| {
        (0..9).map(|_| run(program, row, device, 200_000).1).min().unwrap()
    };
    let gate = object.progs.gate_out.as_fd();
    let decided = row("decided", None, 1);
    let undecided = &object.maps.undecided;
    println!("an empty program: {:?}", least(empty_program().unwrap().as_fd(), &decided));
    println!("decided, no other undecided: {:?}", least(gate, &decided));
    println!("loopback: {:?}", least(gate, &Row { loopback: true, ..row("", None, 1) }));
    let other = Undecided { until_ns: u64::MAX, ..Undecided::default() };
    for number in 1..UNDECIDED_MAX as u64 {
        let id = u64::MAX - number;
        undecided.update(&id.to_ne_bytes(), bytes_of(&other), MapFlags::ANY).unwrap();
    }
    println!("decided, {} others undecided: {:?}", UNDECIDED_MAX - 1, least(gate, &decided));
    let late = Undecided { until_ns: 1, ..Undecided::default() };
    undecided.update(&own_id(), bytes_of(&late), MapFlags::ANY).unwrap();
    println!("late: {:?}", least(gate, &decided));
}
