//! What goes wrong in a storm, each by its name, and how a storm ends.

use tidegate_core::Nanos;
use tidegate_node::fleet::config::Algorithm;
use tidegate_sim::{net::NetOptions, random::Random};

use super::{
    host::{DiskFault, GateFault, Load},
    world::{Breach, LEASE, MS, Plan, World},
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
    /// A process stands still.
    Pause,
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
    /// All disks are as they should be.
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
            7 | 8 => Fault::Pause,
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
            Fault::Pause => {
                let until = Nanos(world.now.0 + draw.below(4_000 * MS));
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

/// A storm, and the calm after it.
#[derive(Debug, Clone, Copy)]
pub struct Storm {
    /// The seed of everything.
    pub seed: u64,
    pub algorithm: Algorithm,
    /// How long it lasts.
    pub lasts: Nanos,
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
        let bad = NetOptions {
            delay: Nanos(MS + draw.below(40 * MS)),
            jitter: Nanos(draw.below(60 * MS)),
            loss: draw.below(5) as f64 * 0.1,
            duplicate: 0.1,
            late: 0.05,
            late_by: Nanos(3_000 * MS),
        };
        let mut world = World::new(self.seed, self.algorithm, bad);
        loads(&mut world, &mut draw, 0.3);
        if draw.chance(0.3) {
            let fault = match draw.below(3) {
                0 => DiskFault::Full,
                1 => DiskFault::Torn,
                _ => DiskFault::Slow(Nanos(draw.below(5_000 * MS))),
            };
            world.note(format!("Disk({fault:?}) everywhere"));
            let hosts = world.hosts.iter();
            hosts.for_each(|host| host.kernel.borrow_mut().disk.fault = fault);
        }
        while world.now < self.lasts {
            let pause = 20 * MS + draw.below(600 * MS);
            world.run_until(Nanos((world.now.0 + pause).min(self.lasts.0)));
            Fault::draw(&mut draw).strike(&mut world, &mut draw);
        }
        world.note("calm".to_owned());
        world.net.heal();
        world.net.set_options(NetOptions { loss: 0.02, ..NetOptions::default() });
        mend_disks(&mut world);
        (0..world.hosts.len()).for_each(|host| mend_gates(&mut world, host));
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
        loads(&mut world, &mut draw, 0.0);
        // Those that were leaving.
        world.run_until(Nanos(world.now.0 + 2_100 * MS));
        (0..world.hosts.len()).for_each(|host| world.start(host));
        let mut used = Vec::new();
        let mut wait = Nanos(Storm::LEASES * LEASE.0);
        for _ in 0..Storm::TURNS {
            world.run_until(Nanos(world.now.0 + wait.0));
            used.push(mean_used(&mut world));
            world.note(world.describe());
            loads(&mut world, &mut draw, 0.0);
            wait = Storm::TURN;
        }
        Aftermath { breach: world.breach, used, log: world.log }
    }
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
