//! One rate that changes again and again, as a group's does, and that may be lent for a time.

use libbpf_rs::{MapCore, MapFlags};
use rustix::time::{ClockId, clock_gettime};
use tidegate_core::{Direction, Nanos, Rate, Span, virtual_queue::MAX_SPAN};

use super::{LimitError, LimitMaps, LimitOptions, lookup, map_error};
use crate::intf;

/// Until when a rate is good. The programs themselves look at the time: nobody needs to be there when it
/// comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The end, by `CLOCK_BOOTTIME`.
    pub until: Nanos,
    /// The rate from then on.
    pub then: Rate,
}

/// `CLOCK_BOOTTIME`.
pub(super) fn now() -> Nanos {
    time(ClockId::Boottime)
}

/// `CLOCK_MONOTONIC`.
pub(super) fn monotonic() -> Nanos {
    time(ClockId::Monotonic)
}

fn time(clock: ClockId) -> Nanos {
    let now = clock_gettime(clock);
    Nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

impl intf::Limit {
    /// Until when the rate of a direction is good; zero: for ever.
    #[must_use]
    pub fn until(&self, direction: Direction) -> Nanos {
        Nanos(self.until_ns[intf::index(direction)])
    }

    /// The limit from `at` on, CLOCK_MONOTONIC, where `earlier` was in force: what its policers' buckets had
    /// been given until then counts on. A policy that stays stays as it is.
    pub(super) fn carried_on(&self, earlier: &intf::Limit, at: Nanos) -> intf::Limit {
        let mut limit = *self;
        for (policy, earlier) in limit.police.iter_mut().zip(&earlier.police) {
            *policy = policy.carried_on(earlier, at);
        }
        limit
    }

    /// Takes all that follows from the rate of a direction from another limit.
    fn take_rate(&mut self, direction: Direction, from: &intf::Limit) {
        let i = intf::index(direction);
        self.queue[i] = from.queue[i];
        self.rate_bit_s[i] = from.rate_bit_s[i];
        self.class[i] = from.class[i];
        self.police[i] = from.police[i];
    }

    /// The same with another rate; `None` if the direction is free.
    fn at_rate(&self, direction: Direction, rate: Rate) -> Result<Option<intf::Limit>, LimitError> {
        let mut options = LimitOptions::from(self);
        let queue = match direction {
            Direction::Egress => &mut options.egress,
            Direction::Ingress => &mut options.ingress,
        };
        let Some(queue) = queue else { return Ok(None) };
        let mut limit = *self;
        if queue.rate == rate {
            return Ok(Some(limit));
        }
        queue.rate = rate;
        for span in [&mut queue.burst, &mut queue.mark, &mut queue.drop] {
            *span =
                span.map(|span| if span.at(rate) > MAX_SPAN { Span::Time(MAX_SPAN) } else { span });
        }
        limit.take_rate(direction, &options.encode(limit.cgroup_id)?);
        Ok(Some(limit))
    }
}

impl LimitMaps {
    /// As it is in force at a time of `CLOCK_BOOTTIME`.
    pub(crate) fn limit_at(&self, now: Nanos) -> Result<intf::Limit, LimitError> {
        let mut limit: intf::Limit = lookup(&self.limit, "limit", self.limit_key(None))?;
        for direction in [Direction::Egress, Direction::Ingress] {
            let i = intf::index(direction);
            if limit.until_ns[i] != 0 && limit.until(direction) <= now {
                let then: intf::Limit = lookup(&self.limit, "limit", self.limit_key(Some(i)))?;
                limit.take_rate(direction, &then);
                limit.until_ns[i] = 0;
            }
        }
        Ok(limit)
    }

    /// The lease that a direction's rate was set with, if it lasts.
    pub(crate) fn lease(&self, direction: Direction) -> Result<Option<Lease>, LimitError> {
        let until = self.limit_at(now())?.until(direction);
        if until.0 == 0 {
            return Ok(None);
        }
        let i = intf::index(direction);
        let then: intf::Limit = lookup(&self.limit, "limit", self.limit_key(Some(i)))?;
        Ok(Rate::from_bit_s(then.rate_bit_s[i]).map(|then| Lease { until, then }))
    }

    /// Has a limit that is to take this one's place end its rates when this one's do, with the rate that
    /// comes then or its own, if that is lower. Nothing is in force before it is [written](Self::write).
    pub(crate) fn keep_leases(&self, limit: &mut intf::Limit) -> Result<(), LimitError> {
        for direction in [Direction::Egress, Direction::Ingress] {
            let (Some(lease), Some(rate)) = (self.lease(direction)?, limit.rate(direction)) else {
                continue;
            };
            self.lend(limit, direction, Lease { then: lease.then.min(rate), ..lease })?;
        }
        Ok(())
    }

    /// Has the rate of a direction end, in `limit` and in what comes then.
    fn lend(
        &self,
        limit: &mut intf::Limit,
        direction: Direction,
        Lease { until, then }: Lease,
    ) -> Result<bool, LimitError> {
        let i = intf::index(direction);
        let Some(then) = limit.at_rate(direction, then)? else { return Ok(false) };
        // By the clock of the programs.
        let ends = Nanos(monotonic().0 + until.0.saturating_sub(now().0));
        let then = then.carried_on(limit, ends);
        self.limit
            .update(
                &self.limit_key(Some(i)).to_ne_bytes(),
                bytemuck::bytes_of(&then),
                MapFlags::ANY,
            )
            .map_err(map_error("limit"))?;
        // Zero is for ever.
        limit.until_ns[i] = until.0.max(1);
        Ok(true)
    }

    /// Changes the rate of a direction that is limited, and the thresholds that follow from it; nothing
    /// else. A size that would last longer than [`MAX_SPAN`] at a rate so low is cut to that, and stays so
    /// until the limit is set anew. It is one write to a map: sockets that exist learn of it with their next
    /// ACK, where [`LimitMaps::set`] goes to each of them. With a lease the rate ends by itself; without,
    /// an earlier lease ends. False if the direction is free.
    ///
    /// # Errors
    /// [`LimitError`]; the earlier rate is in force.
    pub fn set_rate(
        &self,
        direction: Direction,
        rate: Rate,
        lease: Option<Lease>,
    ) -> Result<bool, LimitError> {
        // What the rate was before, whose sizes an end that has come may have cut.
        let was: intf::Limit = lookup(&self.limit, "limit", self.limit_key(None))?;
        let Some(limit) = was.at_rate(direction, rate)? else { return Ok(false) };
        let mut limit = limit.carried_on(&self.limit_at(now())?, monotonic());
        let i = intf::index(direction);
        limit.until_ns[i] = 0;
        if let Some(lease) = lease
            && !self.lend(&mut limit, direction, lease)?
        {
            return Ok(false);
        }
        if limit == was {
            return Ok(true);
        }
        self.write(&limit)?;
        Ok(true)
    }
}
