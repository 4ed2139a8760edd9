//! A virtual machine behind a port: another kernel, whose sockets nobody here can see. `make test-vm` boots
//! one; what does so is in an environment variable, and its device is the TAP `tap0` of a bed's sender.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;

use crate::{
    acks::is_below,
    common::{Guard, Place, signal, skip, wait_for},
    edt::{Bed, PORT, Traffic, into, ok, traffic},
    htb::forward,
    need_root,
};

/// `PROGRAM WORD...`: boots a machine that gives itself [`ADDRESS`] and runs `helper` there, for orders.
const BOOT: &str = "TIDEGATE_TEST_GUEST";
const ADDRESS: &str = "10.96.0.2";
const ORDERS: u16 = PORT + 9;
/// An emulated machine is slow to come up.
const BOOTS_WITHIN: Duration = Duration::from_secs(300);
/// TCP flows and the probe, for so long as an emulated sender needs to come up to speed.
const TRAFFIC: &str = "5 2 0 10.97.0.2";
/// What the limit is, of what the machine sends without: less than it can at its worst.
const FRACTION: f64 = 0.25;

/// In the machine: does what each line of the first connection orders, until that ends.
pub fn take_orders() {
    let (stream, _) = TcpListener::bind(("0.0.0.0", ORDERS)).unwrap().accept().unwrap();
    let mut answers = stream.try_clone().unwrap();
    for order in BufReader::new(stream).lines() {
        let Ok(order) = order else { return };
        let times = traffic(&order).unwrap_or_default();
        if writeln!(answers, "{times}").is_err() {
            return;
        }
    }
}

/// A machine that runs, and the way to tell it what to do.
struct Machine {
    orders: BufReader<TcpStream>,
    _booted: Booted,
}

/// Ends it also when it does not heed orders: who boots it passes the signal on.
struct Booted(Guard);

impl Drop for Booted {
    fn drop(&mut self) {
        signal(self.0.0.id(), Signal::TERM);
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.0.0.try_wait().is_ok_and(|code| code.is_none()) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Machine {
    /// Boots it behind `tap0` of the sender, and waits until it takes orders.
    fn boot(bed: &Bed, boot: &str) -> Machine {
        for words in [
            "tuntap add dev tap0 mode tap vnet_hdr",
            "addr add 10.96.0.1/24 dev tap0",
            "link set tap0 up",
        ] {
            let output = into(&bed.sender, "ip").args(words.split(' ')).output().unwrap();
            assert!(
                output.status.success(),
                "{words}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        forward(bed);
        let mut words = boot.split(' ');
        let mut command: Command = into(&bed.sender, words.next().unwrap());
        command.args(words).arg(env::current_exe().unwrap());
        let mut booted = Booted(Guard(command.stdout(Stdio::null()).spawn().unwrap()));
        let address: SocketAddr = format!("{ADDRESS}:{ORDERS}").parse().unwrap();
        let deadline = Instant::now() + BOOTS_WITHIN;
        loop {
            let connect = || TcpStream::connect_timeout(&address, Duration::from_secs(1));
            if let Ok(stream) = bed.sender.run(connect).unwrap() {
                return Machine { orders: BufReader::new(stream), _booted: booted };
            }
            let ended = booted.0.0.try_wait().unwrap();
            assert!(ended.is_none(), "the machine ended while it booted: {ended:?}");
            assert!(Instant::now() < deadline, "the machine does not take orders");
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn send(&mut self, bed: &Bed) -> Traffic {
        bed.watch(|| {
            writeln!(self.orders.get_mut(), "{TRAFFIC}").unwrap();
            let mut answer = String::new();
            self.orders.read_line(&mut answer).unwrap();
            answer
        })
    }
}

/// The rate of a machine's port is held, whatever its TCP is; its packets wait less than in an HTB as people
/// set it up, in the same run.
#[test]
fn root_vm_behind_a_port_is_held() {
    need_root!();
    let Some(boot) = env::var(BOOT).ok() else {
        skip("needs a machine to boot: `scripts/vm.sh port`");
        return;
    };
    if !Path::new("/dev/net/tun").exists() {
        skip("needs /dev/net/tun, for the machine's port");
        return;
    }
    let (place, bed) = (Place::new(), Bed::new());
    let _server = bed.serve();
    let mut machine = Machine::boot(&bed, &boot);
    let free = machine.send(&bed);
    let mbit = ((free.bit_s() * FRACTION / 1e6) as u32).max(1);
    let limit = f64::from(mbit) * 1e6;
    let told = |name: &str, traffic: &Traffic| println!("{name}, {mbit} Mbit/s: {traffic:?}");
    told("without a limit", &free);

    let class = format!("class add dev eth0 parent 1: classid 1:1 htb rate {mbit}mbit");
    for words in ["qdisc add dev eth0 root handle 1: htb default 1", &class] {
        assert!(bed.tc(words).status.success(), "{words}");
    }
    let peer = machine.send(&bed);
    told("htb, by tc", &peer);
    assert!(bed.tc("qdisc del dev eth0 root").status.success());
    for scheme in ["htb", "spring"] {
        let words = format!("limit add guest --port tap0 --scheme {scheme} --egress {mbit}mbit");
        ok(&place, &bed, &words);
        let held = machine.send(&bed);
        told(scheme, &held);
        is_below(&held, limit);
        if scheme == "spring" {
            let waits = [&held, &peer].map(|traffic| traffic.rtt_us(50));
            assert!(waits[0] < waits[1] / 4, "{held:?}, htb {peer:?}");
            assert!(ok(&place, &bed, "status").contains("in force"));
        }
        ok(&place, &bed, "limit del guest");
    }
    // What was held is free again.
    let again = machine.send(&bed);
    assert!(again.best_bit_s() > 1.2 * limit, "{again:?}");
    drop(machine);
    wait_for("the machine's end", || {
        let down = into(&bed.sender, "cat").arg("/sys/class/net/tap0/carrier").output().ok()?;
        (String::from_utf8_lossy(&down.stdout).trim() != "1").then_some(())
    });
}
