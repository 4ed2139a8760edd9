//! TCP connections of smoltcp: each sender with a flow of the NIC, the receivers behind a cable in memory.

use std::{
    collections::VecDeque,
    thread,
    time::{Duration, Instant},
};

use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{self, Device, DeviceCapabilities, Medium},
    socket::tcp,
    time::Instant as StackTime,
    wire::{HardwareAddress, IpAddress, IpCidr},
};
use tidegate_core::{Nanos, Rate};
use tidegate_nic::{
    Nic, NicOptions, Packet, PacketPool, PoolSize, Port,
    device::{FlowDevice, Station},
    nic::{Completions, Event, Flow, FlowOptions, NicCounters},
    port::memory::MemoryPort,
    waiter::{Mode, now},
};

/// Frames that fit into the cable, in each direction.
const CABLE_FRAMES: usize = 4_096;
const SOCKET_BYTES: usize = 32_768;
const PORT: u16 = 7;
const ETHERNET_BYTES: usize = 14;
/// All timers of the stacks are looked at so often.
const TIMERS_NS: u64 = 20_000_000;
const STATION: Station =
    Station { source: [2, 0, 0, 0, 0, 1], destination: [2, 0, 0, 0, 0, 2], mtu_bytes: 1_500 };

/// What is to be sent.
#[derive(Debug, Clone)]
pub struct Load {
    /// The rate of each flow.
    pub rates: Vec<Rate>,
    /// For how long each sends at its rate.
    pub time: Nanos,
    /// When completions are given.
    pub completions: Completions,
    /// How many packets the shaper holds.
    pub capacity: usize,
    /// When to give up.
    pub patience: Duration,
}

/// What one connection did.
#[derive(Debug, Clone, Copy)]
pub struct Transfer {
    /// Its rate.
    pub rate: Rate,
    /// From before its first packet to after its last had arrived.
    pub time: Nanos,
    /// Bytes that the application received, each as it was sent.
    pub bytes: u64,
    /// Bytes of frames that arrived for it.
    pub wire_bytes: u64,
    /// The most segments that it had in the shaper.
    pub in_shaper_max: u32,
}

/// What all did.
#[derive(Debug)]
pub struct Outcome {
    /// Of each connection.
    pub transfers: Vec<Transfer>,
    /// What the NIC counted.
    pub counters: NicCounters,
    /// The median of the packets that the shaper held while all were sending, sampled with the timers.
    pub held_median: u64,
}

/// Byte `at` of what flow `flow` sends.
fn pattern(flow: usize, at: u64) -> u8 {
    (flow as u64).wrapping_mul(31).wrapping_add(at.wrapping_mul(7)).wrapping_add(at >> 8) as u8
}

fn address(net: u8, flow: usize) -> IpAddress {
    IpAddress::v4(10, net, (flow >> 8) as u8, flow as u8)
}

/// The flow of a frame: the last two bytes of the address that it goes to.
fn flow_of(frame: &[u8]) -> Option<usize> {
    let bytes = frame.get(ETHERNET_BYTES + 18..ETHERNET_BYTES + 20)?;
    Some(usize::from(bytes[0]) << 8 | usize::from(bytes[1]))
}

fn stack_time() -> StackTime {
    StackTime::from_micros((now().0 / 1_000) as i64)
}

/// A stack with one socket.
struct Stack {
    interface: Interface,
    sockets: SocketSet<'static>,
    socket: SocketHandle,
    arrivals: VecDeque<Packet>,
}

impl Stack {
    fn new(device: &mut impl Device, net: u8, flow: usize) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = flow as u64;
        let mut interface = Interface::new(config, device, stack_time());
        interface.update_ip_addrs(|addresses| {
            // One address of the room that there is.
            let _ = addresses.push(IpCidr::new(address(net, flow), 8));
        });
        let buffer = || tcp::SocketBuffer::new(vec![0; SOCKET_BYTES]);
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let socket = sockets.add(tcp::Socket::new(buffer(), buffer()));
        Self { interface, sockets, socket, arrivals: VecDeque::new() }
    }

    fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.socket)
    }
}

/// Frames to and from the cable's far end, nothing in between.
struct FarDevice<'a> {
    pool: &'a mut PacketPool,
    arrivals: &'a mut VecDeque<Packet>,
    outgoing: &'a mut VecDeque<Packet>,
}

struct FarRx(Packet);
struct FarTx<'a>(Packet, &'a mut VecDeque<Packet>);

impl Device for FarDevice<'_> {
    type RxToken<'a>
        = FarRx
    where
        Self: 'a;
    type TxToken<'a>
        = FarTx<'a>
    where
        Self: 'a;

    fn receive(&mut self, now: StackTime) -> Option<(FarRx, FarTx<'_>)> {
        let packet = self.arrivals.pop_front()?;
        Some((FarRx(packet), self.transmit(now)?))
    }

    fn transmit(&mut self, _now: StackTime) -> Option<FarTx<'_>> {
        let packet = self.pool.take(ETHERNET_BYTES + STATION.mtu_bytes)?;
        Some(FarTx(packet, self.outgoing))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = STATION.mtu_bytes;
        capabilities
    }
}

impl phy::RxToken for FarRx {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0.frame().get(ETHERNET_BYTES..).unwrap_or_default())
    }
}

impl phy::TxToken for FarTx<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(mut self, len: usize, f: F) -> R {
        self.0.set_len(ETHERNET_BYTES + len);
        let (header, ip) = self.0.frame_mut().split_at_mut(ETHERNET_BYTES);
        header.fill(0);
        header[ETHERNET_BYTES - 2] = 8;
        let result = f(ip);
        self.1.push_back(self.0);
        result
    }
}

/// What a receiver saw of one flow.
#[derive(Debug, Clone, Copy, Default)]
struct Received {
    bytes: u64,
    wire_bytes: u64,
    last: Nanos,
}

/// The receivers, until each has what it is to get. None: a byte was not what it had to be, or the time is
/// up.
fn receive_all(mut far: MemoryPort, wanted: &[u64], until: Instant) -> Option<Vec<Received>> {
    let mut pool = PacketPool::new(PoolSize { small: 8_192, large: 0 }).ok()?;
    let (mut frames, mut outgoing) = (Vec::new(), VecDeque::new());
    let mut unused = VecDeque::new();
    let mut stacks = Vec::with_capacity(wanted.len());
    for flow in 0..wanted.len() {
        let mut device =
            FarDevice { pool: &mut pool, arrivals: &mut unused, outgoing: &mut outgoing };
        let mut stack = Stack::new(&mut device, 2, flow);
        stack.socket().listen(PORT).ok()?;
        stacks.push(stack);
    }
    let mut received = vec![Received::default(); wanted.len()];
    let mut missing = wanted.len();
    let mut timers = Nanos(0);
    let mut awake: VecDeque<usize> = VecDeque::new();
    while missing > 0 {
        if Instant::now() > until {
            return None;
        }
        // The other side goes when it has seen that all is acknowledged.
        far.receive(&mut pool, &mut frames, 256).ok()?;
        let idle = frames.is_empty();
        for frame in frames.drain(..) {
            let Some(flow) = flow_of(frame.frame()).filter(|flow| *flow < stacks.len()) else {
                continue;
            };
            let seen = &mut received[flow];
            // What comes after the last byte was sent again, and is no part of the time.
            if seen.bytes < wanted[flow] {
                seen.wire_bytes += frame.wire_bytes();
            }
            if stacks[flow].arrivals.is_empty() {
                awake.push_back(flow);
            }
            stacks[flow].arrivals.push_back(frame);
        }
        if now().0 - timers.0 > TIMERS_NS {
            timers = now();
            awake.extend(0..stacks.len());
        }
        for flow in awake.drain(..) {
            let stack = &mut stacks[flow];
            let arrivals = &mut stack.arrivals;
            let mut device = FarDevice { pool: &mut pool, arrivals, outgoing: &mut outgoing };
            stack.interface.poll(stack_time(), &mut device, &mut stack.sockets);
            let seen = &mut received[flow];
            let socket: &mut tcp::Socket<'_> = stack.sockets.get_mut(stack.socket);
            while socket.can_recv() {
                let right = socket.recv(|bytes| {
                    let expected = |at: usize| pattern(flow, seen.bytes + at as u64);
                    let right = bytes.iter().enumerate().all(|(at, b)| *b == expected(at));
                    seen.bytes += bytes.len() as u64;
                    (bytes.len(), right)
                });
                if !right.ok()? {
                    return None;
                }
                if seen.bytes == wanted[flow] {
                    seen.last = now();
                    missing -= 1;
                }
            }
        }
        far.transmit(&mut outgoing, &mut pool).ok()?;
        if idle {
            thread::yield_now();
        }
    }
    Some(received)
}

/// Sends the load and waits until all has arrived. None: something was not as sent, or took too long.
pub fn run(load: &Load) -> Option<Outcome> {
    let flows = load.rates.len();
    let until = Instant::now() + load.patience;
    let wanted: Vec<_> = load.rates.iter().map(|rate| rate.bytes_in(load.time).0.max(1)).collect();
    let (near, far) = MemoryPort::pair("stacks", CABLE_FRAMES);
    let mut options = NicOptions {
        producers: 1,
        flows,
        completions: load.completions,
        shaper_mode: Mode::Auto,
        ..NicOptions::default()
    };
    options.wheel.capacity = load.capacity;
    let nic = Nic::new(options, vec![Box::new(near)]).ok()?;
    let small = (flows as u32 * 4).max(load.capacity as u32 * 2);
    let mut sender = Sender::new(&nic, &load.rates, small)?;
    thread::scope(|scope| {
        let wanted = &wanted;
        let receivers = scope.spawn(move || receive_all(far, wanted, until));
        let mut held = Vec::new();
        let finished = || receivers.is_finished();
        sender.send(&nic, wanted, finished, &mut held, until);
        let received = receivers.join().ok()??;
        let transfers = received.iter().enumerate().map(|(flow, received)| Transfer {
            rate: load.rates[flow],
            time: Nanos(received.last.0 - sender.begun.0),
            bytes: received.bytes,
            wire_bytes: received.wire_bytes,
            in_shaper_max: sender.in_shaper_max[flow],
        });
        let transfers = transfers.collect();
        held.sort_unstable();
        let held_median = held.get(held.len() / 2).copied().unwrap_or(0);
        Some(Outcome { transfers, counters: nic.counters(), held_median })
    })
}

/// All sending stacks, in one thread.
struct Sender {
    producer: tidegate_nic::Producer,
    pool: PacketPool,
    stacks: Vec<Stack>,
    flows: Vec<Flow>,
    /// By the flow's index: its stack.
    stack_of: Vec<usize>,
    in_shaper_max: Vec<u32>,
    written: Vec<u64>,
    begun: Nanos,
}

impl Sender {
    fn new(nic: &Nic, rates: &[Rate], small: u32) -> Option<Self> {
        let mut producer = nic.producer().ok()?;
        nic.receive_at(0, &mut producer).ok()?;
        let mut pool = PacketPool::new(PoolSize { small, large: 0 }).ok()?;
        let (mut stacks, mut flows) = (Vec::new(), Vec::new());
        let mut stack_of = vec![0; rates.len()];
        let mut unused = VecDeque::new();
        for (number, rate) in rates.iter().enumerate() {
            let options = FlowOptions { rate: Some(*rate), ..FlowOptions::default() };
            let flow = loop {
                // The ring may be full for a moment.
                match producer.open_flow(options) {
                    Ok(flow) => break flow,
                    Err(_) => thread::yield_now(),
                }
            };
            let mut device = FlowDevice {
                producer: &mut producer,
                flow,
                pool: &mut pool,
                arrivals: &mut unused,
                station: STATION,
            };
            let mut stack = Stack::new(&mut device, 1, number);
            let Stack { interface, sockets, socket, .. } = &mut stack;
            let socket: &mut tcp::Socket<'_> = sockets.get_mut(*socket);
            let to = (address(2, number), PORT);
            socket.connect(interface.context(), to, 49_152).ok()?;
            stack_of[flow.index()] = number;
            flows.push(flow);
            stacks.push(stack);
        }
        let (in_shaper_max, written) = (vec![0; rates.len()], vec![0; rates.len()]);
        let begun = now();
        Some(Self { producer, pool, stacks, flows, stack_of, in_shaper_max, written, begun })
    }

    fn send(
        &mut self,
        nic: &Nic,
        wanted: &[u64],
        finished: impl Fn() -> bool,
        held: &mut Vec<u64>,
        until: Instant,
    ) {
        let mut awake: VecDeque<usize> = VecDeque::new();
        let mut timers = Nanos(0);
        while !finished() && Instant::now() < until {
            while let Some(event) = self.producer.poll_event() {
                if let Event::Writable { flow } = event {
                    awake.push_back(self.stack_of[flow.index()]);
                }
            }
            while let Some(frame) = self.producer.receive() {
                let flow = flow_of(frame.frame()).filter(|flow| *flow < self.stacks.len());
                let Some(flow) = flow else { continue };
                if self.stacks[flow].arrivals.is_empty() {
                    awake.push_back(flow);
                }
                self.stacks[flow].arrivals.push_back(frame);
            }
            let now = now();
            if now.0 - timers.0 > TIMERS_NS {
                timers = now;
                awake.extend(0..self.stacks.len());
                held.push(nic.counters().held_packets);
            }
            for number in awake.drain(..) {
                self.poll(number, wanted[number]);
            }
            if self.producer.wait(Some(Nanos(now.0 + TIMERS_NS))).is_err() {
                return;
            }
        }
    }

    /// Lets one stack write and send what it may.
    fn poll(&mut self, number: usize, wanted: u64) {
        let stack = &mut self.stacks[number];
        let written = &mut self.written[number];
        let socket: &mut tcp::Socket<'_> = stack.sockets.get_mut(stack.socket);
        while *written < wanted && socket.can_send() {
            let sent = socket.send(|room| {
                let bytes = room.len().min((wanted - *written) as usize);
                for (at, byte) in room[..bytes].iter_mut().enumerate() {
                    *byte = pattern(number, *written + at as u64);
                }
                (bytes, bytes)
            });
            *written += sent.unwrap_or(0) as u64;
        }
        let flow = self.flows[number];
        let mut device = FlowDevice {
            producer: &mut self.producer,
            flow,
            pool: &mut self.pool,
            arrivals: &mut stack.arrivals,
            station: STATION,
        };
        stack.interface.poll(stack_time(), &mut device, &mut stack.sockets);
        let in_shaper = self.producer.in_shaper(flow);
        self.in_shaper_max[number] = self.in_shaper_max[number].max(in_shaper);
    }
}
