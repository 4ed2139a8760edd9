//! The path of the simulated flows: what they meet, when it lets them out, what it drops.

use std::collections::VecDeque;

use tidegate_core::{
    Bytes, Nanos, Rate, TokenBucket,
    codel::{Codel, CodelOptions},
    token_bucket::BucketConfig,
};

/// Numbers that a seed replays.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..8 {
            random.next();
        }
        random
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// From 0 to 1.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.share()).ln()
    }
}

/// What the flows meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A token bucket without a queue.
    Policer,
    /// A queue that drops what does not fit.
    Fifo,
    /// The same behind a shaper whose bucket is as large as the queue.
    Shaper,
    /// RFC 8289, 5 and 100 ms.
    Codel,
    /// RED, gentle, with thresholds at a quarter and three quarters of the queue.
    Red,
    /// RFC 8033, 15 ms.
    Pie,
    /// A long queue, and each packet is lost with a chance of so many percent before it.
    Chance(u8),
}

#[derive(Debug)]
enum Discipline {
    Tail,
    Codel(Codel, CodelOptions),
    Red { mean: f64 },
    Pie { chance: f64, before_ns: f64, update_ns: u64, burst_ns: f64 },
    Chance(f64),
}

/// A queue that is emptied at a rate, of packets of type `T`.
#[derive(Debug)]
pub struct Queue<T> {
    discipline: Discipline,
    rate: Rate,
    limit: u64,
    backlog: u64,
    packets: VecDeque<(u64, u32, T)>,
    /// The shaper's bucket.
    bucket: Option<TokenBucket>,
}

/// A policer or a queue.
#[derive(Debug)]
pub enum Gate<T> {
    Policer(TokenBucket),
    Queue(Queue<T>),
}

fn bucket(rate: Rate, bytes: u64) -> TokenBucket {
    TokenBucket::new(BucketConfig::new(rate, Bytes(bytes)).expect("a bucket"), Nanos(0))
}

impl<T> Gate<T> {
    /// A gate of that size: a bucket's depth or a queue's length.
    pub fn new(kind: Kind, rate: Rate, bytes: u64) -> Gate<T> {
        let long = bytes.max(rate.bit_s() / 8);
        let (discipline, limit) = match kind {
            Kind::Policer => return Gate::Policer(bucket(rate, bytes)),
            Kind::Fifo | Kind::Shaper => (Discipline::Tail, bytes),
            Kind::Codel => {
                let target = Nanos(5_000_000);
                let options =
                    CodelOptions { target, interval: Nanos(100_000_000), frame_bytes: 1_514 };
                (Discipline::Codel(Codel::default(), options), long)
            }
            Kind::Red => (Discipline::Red { mean: 0.0 }, bytes),
            Kind::Pie => {
                let burst_ns = 150e6;
                (Discipline::Pie { chance: 0.0, before_ns: 0.0, update_ns: 0, burst_ns }, long)
            }
            Kind::Chance(percent) => (Discipline::Chance(f64::from(percent) / 100.0), long),
        };
        let bucket = (kind == Kind::Shaper).then(|| bucket(rate, bytes));
        let packets = VecDeque::new();
        Gate::Queue(Queue { discipline, rate, limit, backlog: 0, packets, bucket })
    }
}

impl<T> Queue<T> {
    fn delay_ns(&self) -> f64 {
        self.backlog as f64 * 8e9 / self.rate.bit_s() as f64
    }

    /// Takes a packet, or drops it.
    pub fn push(&mut self, now: u64, bytes: u32, packet: T, random: &mut Random) -> bool {
        let delay_ns = self.delay_ns();
        let (backlog, limit) = (self.backlog as f64, self.limit as f64);
        let drops = match &mut self.discipline {
            Discipline::Tail | Discipline::Codel(..) => false,
            Discipline::Chance(chance) => random.share() < *chance,
            Discipline::Red { mean } => {
                *mean += (backlog - *mean) * 0.02;
                let (low, high) = (limit / 4.0, limit * 0.75);
                let chance = match *mean {
                    mean if mean < low => 0.0,
                    mean if mean < high => 0.1 * (mean - low) / (high - low),
                    mean => 0.1 + 0.9 * (mean - high) / (limit - high),
                };
                random.share() < chance
            }
            Discipline::Pie { chance, before_ns, update_ns, burst_ns } => {
                while *update_ns + 15_000_000 <= now {
                    *update_ns += 15_000_000;
                    let scale = match *chance {
                        p if p < 1e-6 => 2048.0,
                        p if p < 1e-5 => 512.0,
                        p if p < 1e-4 => 128.0,
                        p if p < 1e-3 => 32.0,
                        p if p < 1e-2 => 8.0,
                        p if p < 0.1 => 2.0,
                        _ => 1.0,
                    };
                    let step =
                        0.125 * (delay_ns - 15e6) / 1e9 + 1.25 * (delay_ns - *before_ns) / 1e9;
                    *chance = (*chance + step / scale).clamp(0.0, 1.0);
                    if delay_ns == 0.0 && *before_ns == 0.0 {
                        *chance *= 0.98;
                    }
                    *before_ns = delay_ns;
                    *burst_ns = (*burst_ns - 15e6).max(0.0);
                }
                let spared = (*before_ns < 7.5e6 && *chance < 0.2) || self.backlog <= 3_000;
                *burst_ns <= 0.0 && !spared && random.share() < *chance
            }
        };
        if drops || self.backlog + u64::from(bytes) > self.limit {
            return false;
        }
        self.backlog += u64::from(bytes);
        self.packets.push_back((now, bytes, packet));
        true
    }

    /// When the packet at the head has left, if it begins to leave at `now`.
    pub fn next_ns(&mut self, now: u64) -> Option<u64> {
        let bytes = u64::from(self.packets.front()?.1);
        let time = |bytes| self.rate.time_for(Bytes(bytes)).0;
        Some(match &self.bucket {
            Some(bucket) => now + time(bytes.saturating_sub(bucket.tokens(Nanos(now)).0)) + 1_000,
            None => now + time(bytes),
        })
    }

    /// The packet at the head leaves; before it those that are dropped there.
    pub fn pop(&mut self, now: u64, dropped: &mut Vec<T>) -> Option<T> {
        while let Some((since, bytes, packet)) = self.packets.pop_front() {
            self.backlog -= u64::from(bytes);
            if let Discipline::Codel(codel, options) = &mut self.discipline
                && codel.drops(Nanos(now), Nanos(now - since), self.backlog, options)
            {
                dropped.push(packet);
                continue;
            }
            if let Some(bucket) = &mut self.bucket {
                bucket.on_packet(Nanos(now), bytes);
            }
            return Some(packet);
        }
        None
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }
}

/// A faster link further on that other traffic shares: bursts of 15 kB on average use 30 % of it.
#[derive(Debug)]
pub struct Noise {
    /// Bytes/ns.
    rate: f64,
    work: f64,
    at_ns: u64,
    burst_ns: f64,
    left_ns: u64,
}

impl Noise {
    pub fn new(rate: Rate) -> Noise {
        let rate = (rate.bit_s() as f64 * 4.0).max(20e6) / 8e9;
        Noise { rate, work: 0.0, at_ns: 0, burst_ns: 0.0, left_ns: 0 }
    }

    /// When a packet leaves it.
    pub fn pass(&mut self, now: u64, bytes: u32, random: &mut Random) -> u64 {
        let mean_ns = 15_000.0 / (0.3 * self.rate);
        while self.burst_ns <= now as f64 {
            let time = self.burst_ns - self.at_ns as f64;
            self.work = (self.work - time.max(0.0) * self.rate).max(0.0);
            self.at_ns = self.burst_ns as u64;
            self.work += random.exponential(15_000.0);
            self.burst_ns += random.exponential(mean_ns);
        }
        self.work = (self.work - now.saturating_sub(self.at_ns) as f64 * self.rate).max(0.0);
        self.at_ns = now;
        self.work += f64::from(bytes);
        self.left_ns = self.left_ns.max(now + (self.work / self.rate) as u64);
        self.left_ns
    }
}
