//! What becomes of a message between two hosts.

use tidegate_core::Nanos;

use crate::random::Random;

/// How bad the network is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NetOptions {
    /// One way.
    pub delay: Nanos,
    /// A message takes up to so much longer, and overtakes others by that.
    pub jitter: Nanos,
    /// Probability that a message is lost.
    pub loss: f64,
    /// Probability that it comes twice.
    pub duplicate: f64,
    /// Probability that it is held up by [`NetOptions::late_by`] at most.
    pub late: f64,
    /// How much later such a message comes at most.
    pub late_by: Nanos,
}

impl Default for NetOptions {
    /// 20 ms one way, and nothing else.
    fn default() -> Self {
        Self {
            delay: Nanos(20_000_000),
            jitter: Nanos(0),
            loss: 0.0,
            duplicate: 0.0,
            late: 0.0,
            late_by: Nanos(0),
        }
    }
}

/// The network between hosts. Hosts are in one group each; messages do not pass from one to another.
#[derive(Debug, Clone)]
pub struct Net {
    options: NetOptions,
    groups: Vec<u8>,
    /// Pairs of which the second does not hear the first.
    deaf: Vec<(usize, usize)>,
}

impl Net {
    /// A network that is not cut.
    pub fn new(options: NetOptions, hosts: usize) -> Self {
        Self { options, groups: vec![0; hosts], deaf: Vec::new() }
    }

    /// Puts a host into a group.
    pub fn cut(&mut self, host: usize, group: u8) {
        self.groups[host] = group;
    }

    /// From now on `to` does not hear `from`, but may be heard by it.
    pub fn deafen(&mut self, from: usize, to: usize) {
        self.deaf.push((from, to));
    }

    /// One group again.
    pub fn heal(&mut self) {
        self.groups.fill(0);
        self.deaf.clear();
    }

    /// Changes how bad it is.
    pub fn set_options(&mut self, options: NetOptions) {
        self.options = options;
    }

    /// When a message that is sent now arrives: not at all, once or twice.
    pub fn send(
        &self,
        random: &mut Random,
        now: Nanos,
        from: usize,
        to: usize,
    ) -> impl Iterator<Item = Nanos> + use<> {
        let NetOptions { delay, jitter, loss, duplicate, late, late_by } = self.options;
        let cut = self.groups[from] != self.groups[to] || self.deaf.contains(&(from, to));
        let copies = if cut { 0 } else { 1 + usize::from(random.chance(duplicate)) };
        let mut arrivals = [None; 2];
        for arrival in arrivals.iter_mut().take(copies) {
            if random.chance(loss) {
                continue;
            }
            let mut time = now.0 + delay.0 + random.time(jitter).0;
            if random.chance(late) {
                time += random.time(late_by).0;
            }
            *arrival = Some(Nanos(time));
        }
        arrivals.into_iter().flatten()
    }
}
