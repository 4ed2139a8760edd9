//! What goes wrong in a storm, each by its name, and how a storm ends.

use std::ops::Range;

use tidegate_core::Nanos;
use tidegate_host::fleet::Algorithm;
use tidegate_sim::{net::NetOptions, random::Random};

use super::{
    host::{DiskFault, GateFault, Load},
    world::{Breach, LEASE, MS, Plan, Size, World},
};

/// Something that goes wrong, or is mended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL, also while a call or a write is under way.
    Kill,
    /// SIGKILL at all hosts but one, which start again at once.
    Blackout,
    /// All that do not run start, with what they stored.
    StartAll,
    /// SIGTERM.
    Leave,
    /// A process stands still for so long.
    Pause(Nanos),
    /// The network is cut in two.
    CutInTwo,
    /// A host hears nobody.
    CutOff,
    /// A host does not hear another, which hears it.
    OneWay,
    /// The network is whole.
    Heal,
    /// Gates refuse, cannot be read, are slow, lie, or are gone.
    Gate(GateFault),
    /// All gates of a host are as they should be.
    GatesMended,
    /// A disk is full, slow or torn.
    Disk(DiskFault),
    DisksMended,
    /// Limits are idle, greedy or neither.
    Loads,
    /// A host's group has other limits of the host.
    Members,
    /// A host's group has another rate.
    Rate,
    /// Somebody else changes limits for so long while a host's group gets other limits, or another rate.
    BusyReload(Nanos),
}

impl Fault {
    fn draw(draw: &mut Random) -> Fault {
        let long = Nanos(draw.below(2_500 * MS));
        match draw.below(36) {
            0..=2 => Fault::Kill,
            3..=5 => Fault::StartAll,
            6 => Fault::Leave,
            7 | 8 => Fault::Pause(Nanos(draw.below(4_000 * MS))),
            9 => Fault::CutInTwo,
            10 => Fault::CutOff,
            11 => Fault::OneWay,
            12 | 13 => Fault::Heal,
            14 | 15 => Fault::Gate(GateFault::Refuses),
            16 => Fault::Gate(GateFault::Unreadable),
            17 => Fault::Gate(GateFault::Slow(Nanos(long.0 / 10))),
            18 => Fault::Gate(GateFault::FailsLate),
            19 => Fault::Gate(GateFault::Gone),
            20 | 21 => Fault::GatesMended,
            22 => Fault::Disk(DiskFault::Full),
            23 => Fault::Disk(DiskFault::Slow(long)),
            24 => Fault::Disk(DiskFault::Torn),
            25 => Fault::DisksMended,
            26..=29 => Fault::Loads,
            30 => Fault::Members,
            31 => Fault::Blackout,
            32 => Fault::Gate(GateFault::Refuses),
            33 => Fault::Rate,
            _ => Fault::BusyReload(long),
        }
    }

    /// Has it happen somewhere.
    fn strike(self, world: &mut World, draw: &mut Random) {
        let hosts = world.hosts.len();
        let host = draw.below(hosts as u64) as usize;
        self.strike_at(world, draw, host);
    }

    fn strike_at(self, world: &mut World, draw: &mut Random, host: usize) {
        let hosts = world.hosts.len();
        // One limit, or all of the host.
        let limits = match draw.below(6) as usize {
            limit @ 0..3 => limit..limit + 1,
            _ => 0..3,
        };
        world.note(format!("{self:?} at n{host}, l{limits:?}"));
        match self {
            Fault::Kill => world.kill(host),
            Fault::Blackout => {
                let others = || (0..hosts).filter(|other| *other != host);
                others().for_each(|other| world.kill(other));
                others().for_each(|other| world.start(other));
            }
            Fault::StartAll => (0..hosts).for_each(|host| world.start(host)),
            Fault::Leave => world.leave(host),
            Fault::Pause(lasts) => {
                let until = Nanos(world.now.0 + lasts.0);
                let busy = &mut world.hosts[host].busy;
                *busy = until.max(*busy);
            }
            Fault::CutInTwo => (0..hosts).for_each(|host| world.net.cut(host, draw.below(2) as u8)),
            Fault::CutOff => world.net.cut(host, 9),
            Fault::OneWay => world.net.deafen(host, draw.below(hosts as u64) as usize),
            Fault::Heal => world.net.heal(),
            Fault::Gate(fault) => limits.for_each(|limit| world.break_gate(host, limit, fault)),
            Fault::GatesMended => mend_gates(world, host),
            Fault::Disk(fault) => world.hosts[host].kernel.borrow_mut().disk.fault = fault,
            Fault::DisksMended => mend_disks(world),
            Fault::Loads => loads(world, draw, 0.3),
            Fault::Members => {
                let plan = world.hosts[host].plan;
                let limits = 1 + draw.below(3) as usize;
                if plan.limits > 0 {
                    world.reload(host, Plan { limits, ..plan });
                }
            }
            Fault::BusyReload(lasts) => {
                world.lock(host, lasts);
                let fault = if draw.chance(0.5) { Fault::Members } else { Fault::Rate };
                fault.strike_at(world, draw, host);
            }
            Fault::Rate => {
                let plan = world.hosts[host].plan;
                world.reload(host, Plan { rate: 1 - plan.rate, ..plan });
            }
        }
    }
}

fn mend_gates(world: &mut World, host: usize) {
    (0..3).for_each(|limit| world.break_gate(host, limit, GateFault::None));
}

fn mend_disks(world: &mut World) {
    world.hosts.iter().for_each(|host| host.kernel.borrow_mut().disk.fault = DiskFault::None);
}

/// Gives each limit something to do; a part of them has a bound.
fn loads(world: &mut World, draw: &mut Random, bounded: f64) {
    for host in 0..world.hosts.len() {
        for limit in 0..3 {
            let load = match draw.below(2) {
                0 => Load::Idle,
                _ if draw.chance(bounded) => Load::Bounded(draw.below(60_000_000)),
                _ => Load::Greedy(1 + draw.below(12) as u32),
            };
            world.load(host, limit, load);
        }
    }
    // Somebody always wants all there is; with `ctb` limits are on the first host only.
    world.load(0, 0, Load::Greedy(3));
}

/// The faults of a storm. Each theme but the first concentrates what shows one kind of broken rule, so
/// that few storms see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Theme {
    /// Anything, many times a second.
    Anything,
    /// Hosts that use their part are killed and start again at once. A lease goes on in the gates of a dead
    /// host, and a promise must outlive its acceptor.
    Restarts,
    /// Hosts are dead or stand still for longer than a lease, and others take what they had.
    Silence,
    /// The network is cut for longer than a lease, half of the acceptors on each side, or hosts are not
    /// heard.
    Cuts,
    /// The demand moves to another host while gates of the first refuse, are slow or lie.
    Gates,
    /// A limit with much of the rate leaves its group, or the group changes, while its gate cannot be set.
    Reloads,
    /// Disks are full, slow or torn while acceptors are killed.
    Disks,
}

impl Theme {
    /// How bad the network is: messages come late, twice or not at all in each.
    fn net(self, draw: &mut Random) -> NetOptions {
        let is_bad = self == Theme::Anything;
        NetOptions {
            delay: Nanos(MS + draw.below(if is_bad { 40 } else { 20 } * MS)),
            jitter: Nanos(draw.below(if is_bad { 60 } else { 20 } * MS)),
            loss: draw.below(5) as f64 * if is_bad { 0.1 } else { 0.02 },
            duplicate: 0.1,
            late: 0.05,
            late_by: Nanos(3_000 * MS),
        }
    }

    fn size(self, draw: &mut Random) -> Size {
        let acceptors = match self {
            Theme::Cuts => 2 + 2 * draw.below(2) as usize,
            _ => 1 + draw.below(4) as usize,
        };
        // A limit must be able to leave and another to stay.
        let limits_least = if self == Theme::Reloads { 2 } else { 1 };
        Size {
            acceptors,
            hosts: acceptors.max(2) + draw.below(3) as usize,
            limits: limits_least + draw.below(4 - limits_least as u64) as usize,
        }
    }

    fn begins(self, world: &mut World, draw: &mut Random) {
        loads(world, draw, 0.3);
        let breaks = match self {
            Theme::Anything => draw.chance(0.3),
            Theme::Disks => true,
            _ => false,
        };
        if breaks {
            let fault = disk_fault(draw, 5_000);
            world.note(format!("Disk({fault:?}) everywhere"));
            let hosts = world.hosts.iter();
            hosts.for_each(|host| host.kernel.borrow_mut().disk.fault = fault);
        }
    }

    /// Has something go wrong, and lets time pass.
    fn round(self, world: &mut World, draw: &mut Random) {
        let hosts = world.hosts.len() as u64;
        let host = draw.below(hosts) as usize;
        match self {
            Theme::Anything => {
                pass(world, draw, 20..620);
                Fault::draw(draw).strike(world, draw);
            }
            Theme::Restarts => {
                focus(world, draw, host);
                pass(world, draw, 700..2_000);
                if draw.chance(0.3) {
                    return Fault::Blackout.strike_at(world, draw, host);
                }
                all_but_one_restart(world, draw, host);
            }
            Theme::Silence => {
                focus(world, draw, host);
                pass(world, draw, 1_000..2_000);
                let lasts = Nanos((3_500 + draw.below(1_500)) * MS);
                let fault = if draw.chance(0.6) { Fault::Kill } else { Fault::Pause(lasts) };
                fault.strike_at(world, draw, host);
                loads(world, draw, 0.0);
                world.run_until(Nanos(world.now.0 + lasts.0));
                Fault::StartAll.strike(world, draw);
            }
            Theme::Cuts => {
                focus(world, draw, host);
                pass(world, draw, 1_000..2_000);
                match draw.below(4) {
                    0 => Fault::CutOff.strike_at(world, draw, host),
                    1 => {
                        world.note(format!("one other hears n{host}"));
                        let hears = draw.below(hosts) as usize;
                        let others = (0..hosts as usize).filter(|other| *other != hears);
                        others.for_each(|other| world.net.deafen(host, other));
                    }
                    _ => {
                        world.note("CutInTwo, the acceptors too".to_owned());
                        (0..hosts as usize).for_each(|host| world.net.cut(host, host as u8 % 2));
                    }
                }
                loads(world, draw, 0.0);
                if draw.chance(0.3) {
                    Fault::Blackout.strike_at(world, draw, host);
                }
                pass(world, draw, 3_500..5_000);
                Fault::Heal.strike(world, draw);
            }
            Theme::Gates => {
                focus(world, draw, host);
                pass(world, draw, 1_000..1_800);
                let fault = match draw.below(8) {
                    0 => GateFault::Unreadable,
                    1 => GateFault::Slow(Nanos(draw.below(300 * MS))),
                    2 => GateFault::FailsLate,
                    _ => GateFault::Refuses,
                };
                Fault::Gate(fault).strike_at(world, draw, host);
                let other = (host + 1 + draw.below(hosts - 1) as usize) % hosts as usize;
                focus(world, draw, other);
                pass(world, draw, 300..1_500);
                Fault::GatesMended.strike_at(world, draw, host);
            }
            Theme::Reloads => {
                let plan = world.hosts[host].plan;
                world.reload(host, Plan { limits: 3, ..plan });
                focus(world, draw, host);
                pass(world, draw, 1_200..2_200);
                // The last limit leaves.
                let last = world.hosts[host].plan.limits - 1;
                match draw.below(4) {
                    0 => world.lock(host, Nanos(draw.below(1_500 * MS))),
                    _ => world.break_gate(host, last, GateFault::Refuses),
                }
                let fault = if draw.chance(0.8) { Fault::Members } else { Fault::Rate };
                world.note(format!("{fault:?} at n{host}, and gate {last} cannot be set"));
                let plan = world.hosts[host].plan;
                match fault {
                    Fault::Members => world.reload(host, Plan { limits: last, ..plan }),
                    _ => world.reload(host, Plan { rate: 1 - plan.rate, ..plan }),
                }
                pass(world, draw, 300..1_500);
                mend_gates(world, host);
            }
            Theme::Disks => {
                focus(world, draw, host);
                pass(world, draw, 700..2_000);
                match draw.below(6) {
                    0 => Fault::DisksMended.strike(world, draw),
                    1 => {
                        let fault = disk_fault(draw, 3_000);
                        Fault::Disk(fault).strike_at(world, draw, host);
                    }
                    _ => {}
                }
                all_but_one_restart(world, draw, host);
            }
        }
    }
}

/// All hosts are killed, and all but one start again at once; that one's gates have what it was lent.
fn all_but_one_restart(world: &mut World, draw: &mut Random, dead: usize) {
    world.note(format!("all but n{dead} start again"));
    (0..world.hosts.len()).for_each(|host| world.kill(host));
    (0..world.hosts.len()).filter(|host| *host != dead).for_each(|host| world.start(host));
    loads(world, draw, 0.0);
    pass(world, draw, 1_000..3_000);
    world.start(dead);
}

fn disk_fault(draw: &mut Random, slow_ms: u64) -> DiskFault {
    match draw.below(3) {
        0 => DiskFault::Full,
        1 => DiskFault::Torn,
        _ => DiskFault::Slow(Nanos(draw.below(slow_ms * MS))),
    }
}

/// Lets so many milliseconds pass.
fn pass(world: &mut World, draw: &mut Random, ms: Range<u64>) {
    let ns = ms.start * MS + draw.below((ms.end - ms.start) * MS);
    world.run_until(Nanos(world.now.0 + ns));
}

/// One host has most of the demand.
fn focus(world: &mut World, draw: &mut Random, host: usize) {
    world.note(format!("n{host} wants all"));
    for other in 0..world.hosts.len() {
        for limit in 0..3 {
            let load =
                if other == host { Load::Greedy(3 + draw.below(9) as u32) } else { Load::Idle };
            world.load(other, limit, load);
        }
    }
}

/// A storm, and the calm after it.
#[derive(Debug, Clone, Copy)]
pub struct Storm {
    /// The seed of everything.
    pub seed: u64,
    pub theme: Theme,
    pub algorithm: Algorithm,
    /// How long it lasts.
    pub lasts: Nanos,
    /// Whether there is a calm after it; that takes longer than the storm.
    pub calms: bool,
}

/// What a storm left.
#[derive(Debug)]
pub struct Aftermath {
    pub breach: Option<(Nanos, Breach)>,
    /// The parts of the limit that greedy limits had each time that they were looked at in the calm.
    pub used: Vec<f64>,
    /// What went wrong when.
    pub log: Vec<(Nanos, String)>,
}

impl Storm {
    /// Leases from the last fault until all must be in use again.
    pub const LEASES: u64 = 8;
    /// How often loads change in the calm, and how long after that all must be in use again.
    const TURNS: u64 = 3;
    const TURN: Nanos = Nanos(2 * LEASE.0);

    pub fn run(&self) -> Aftermath {
        let mut draw = Random::new(self.seed ^ 0x5707);
        let bad = self.theme.net(&mut draw);
        let size = self.theme.size(&mut draw);
        let mut world = World::new(self.seed, self.algorithm, bad, size);
        self.theme.begins(&mut world, &mut draw);
        while world.now < self.lasts && world.breach.is_none() {
            self.theme.round(&mut world, &mut draw);
        }
        let used = if self.calms { calm(&mut world, &mut draw) } else { Vec::new() };
        Aftermath { breach: world.breach, used, log: world.log }
    }
}

/// Mends all, and looks what is in use.
fn calm(world: &mut World, draw: &mut Random) -> Vec<f64> {
    world.note("calm".to_owned());
    world.net.heal();
    world.net.set_options(NetOptions { loss: 0.02, ..NetOptions::default() });
    mend_disks(world);
    (0..world.hosts.len()).for_each(|host| mend_gates(world, host));
    // Those that stand still, or are about something, do so to the end.
    while let Some(busy) = world.hosts.iter().map(|host| host.busy).max()
        && busy > world.now
    {
        world.run_until(busy);
    }
    for host in 0..world.hosts.len() {
        let limits = if world.hosts[host].plan.limits > 0 { 3 } else { 0 };
        world.reload(host, Plan { rate: 0, limits });
        world.start(host);
    }
    loads(world, draw, 0.0);
    // Those that were leaving.
    world.run_until(Nanos(world.now.0 + 2_100 * MS));
    (0..world.hosts.len()).for_each(|host| world.start(host));
    let mut used = Vec::new();
    let mut wait = Nanos(Storm::LEASES * LEASE.0);
    for _ in 0..Storm::TURNS {
        world.run_until(Nanos(world.now.0 + wait.0));
        used.push(mean_used(world));
        world.note(world.describe());
        loads(world, draw, 0.0);
        wait = Storm::TURN;
    }
    used
}

/// What greedy limits have of the limit, over half a second.
fn mean_used(world: &mut World) -> f64 {
    const LOOKS: u64 = 10;
    let mut sum = 0.0;
    for _ in 0..LOOKS {
        world.run_until(Nanos(world.now.0 + 500 * MS / LOOKS));
        sum += world.greedy_bit_s() as f64 / 100e6;
    }
    sum / LOOKS as f64
}
