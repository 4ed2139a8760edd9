//! One rate that changes again and again, as a group's does, and that may be lent for a time.

use tidegate_core::{Direction, Nanos, Rate, Span, virtual_queue::MAX_SPAN};

use super::{
    LimitError, LimitMaps, LimitOptions,
    settings::{Lease, Settings},
};
use crate::{clock::boottime, intf};

impl intf::Entry {
    /// Until when the rate of a direction is good; zero: for ever.
    pub fn until(&self, direction: Direction) -> Nanos {
        Nanos(self.until_ns[intf::index(direction)])
    }

    /// The limit from `at` on, CLOCK_BOOTTIME, where `earlier` was in force: what its policers' buckets had
    /// been given until then counts on. A policy that stays stays as it is.
    pub(super) fn carried_on(&self, earlier: &intf::Entry, at: Nanos) -> intf::Entry {
        let mut limit = *self;
        for (policy, earlier) in limit.police.iter_mut().zip(&earlier.police) {
            *policy = policy.carried_on(earlier, at);
        }
        limit
    }

    /// Takes all that follows from the rate of a direction from another limit.
    fn take_rate(&mut self, direction: Direction, from: &intf::Entry) {
        let i = intf::index(direction);
        self.queue[i] = from.queue[i];
        self.rate_bit_s[i] = from.rate_bit_s[i];
        self.class[i] = from.class[i];
        self.police[i] = from.police[i];
    }

    /// The same with another rate, and the thresholds that follow from it and from what was asked. `None`
    /// if the direction is free.
    fn at_rate(
        &self,
        asked: &LimitOptions,
        direction: Direction,
        rate: Rate,
    ) -> Result<Option<intf::Entry>, LimitError> {
        let (mut limit, mut options) = (*self, *asked);
        let (Some(queue), Some(is)) = (options.queue_mut(direction), self.rate(direction)) else {
            return Ok(None);
        };
        if is == rate {
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

impl Settings {
    /// As they are at a time of `CLOCK_BOOTTIME`: what has ended is over.
    pub(crate) fn at(&self, now: Nanos) -> intf::Entry {
        let mut limit = self.limit;
        for direction in Direction::BOTH {
            let i = intf::index(direction);
            if limit.until_ns[i] != 0 && limit.until(direction) <= now {
                limit.take_rate(direction, &self.then[i]);
                limit.until_ns[i] = 0;
            }
        }
        limit
    }

    /// The same from `now` on, CLOCK_BOOTTIME, after `since` was in force: a policer's books go on.
    pub(crate) fn carried_on(&self, since: &Settings, now: Nanos) -> Settings {
        let limit = self.limit.carried_on(&since.at(now), now);
        let mut settings = Settings { limit, ..*self };
        for direction in Direction::BOTH {
            let until = limit.until(direction);
            if until.0 != 0 {
                let then = &mut settings.then[intf::index(direction)];
                *then = then.carried_on(&limit, until.max(now));
            }
        }
        settings
    }

    /// Has the rate of a direction end, at once if its time is over at `now`. False if the direction is free.
    fn lend(
        &mut self,
        now: Nanos,
        asked: &LimitOptions,
        direction: Direction,
        Lease { until, then }: Lease,
    ) -> Result<bool, LimitError> {
        let i = intf::index(direction);
        let Some(then) = self.limit.at_rate(asked, direction, then)? else { return Ok(false) };
        self.then[i] = then.carried_on(&self.limit, until.max(now));
        // Zero is for ever.
        self.limit.until_ns[i] = until.0.max(1);
        Ok(true)
    }
}

impl LimitMaps {
    /// The settings in its map, whether or not their leases have ended.
    pub(crate) fn settings(&self) -> Result<Settings, LimitError> {
        Settings::read(&self.limit, self.at)
    }

    /// Puts earlier settings back in force.
    pub(crate) fn put_back(&self, earlier: &Settings) -> Result<(), LimitError> {
        self.write(earlier.carried_on(&self.settings()?, boottime()))
    }

    /// As it is in force at a time of `CLOCK_BOOTTIME`.
    pub(crate) fn limit_at(&self, now: Nanos) -> Result<intf::Entry, LimitError> {
        Ok(self.settings()?.at(now))
    }

    /// Whether a rate was lent, be its lease over or not.
    ///
    /// # Errors
    /// [`LimitError`] when its map cannot be read.
    pub fn is_lent(&self) -> Result<bool, LimitError> {
        Ok(self.settings()?.limit.until_ns != [0; 2])
    }

    /// The lease that a direction's rate was set with, if it lasts.
    pub(crate) fn lease(&self, direction: Direction) -> Result<Option<Lease>, LimitError> {
        let settings = self.settings()?;
        let until = settings.at(boottime()).until(direction);
        let then = settings.then[intf::index(direction)].rate(direction);
        Ok(then.filter(|_| until.0 != 0).map(|then| Lease { until, then }))
    }

    /// A limit that is to take this one's place, with rates that end when this one's do, with the rate that
    /// comes then or its own, if that is lower.
    pub(crate) fn keep_leases(
        &self,
        limit: intf::Entry,
        options: &LimitOptions,
    ) -> Result<Settings, LimitError> {
        let mut settings = Settings::from(limit);
        settings.limit.until_ns = [0; 2];
        for direction in Direction::BOTH {
            let (Some(lease), Some(rate)) = (self.lease(direction)?, limit.rate(direction)) else {
                continue;
            };
            let lease = Lease { then: lease.then.min(rate), ..lease };
            settings.lend(boottime(), options, direction, lease)?;
        }
        Ok(settings)
    }

    /// Changes the rate of a direction that is limited, and the thresholds that follow from it and from what
    /// was `asked`; nothing else. A size that would last longer than [`MAX_SPAN`] at a rate so low is cut to
    /// that. It is a few writes to a map: sockets that exist learn of it with their next ACK, where
    /// [`LimitMaps::set`] goes to each of them. With a lease the rate ends by itself; without, an earlier
    /// lease ends. Packets meet the earlier rate with its lease until they meet this one with its own. False
    /// if the direction is free.
    ///
    /// # Errors
    /// [`LimitError`]; the earlier rate is in force.
    pub fn set_rate(
        &self,
        asked: &LimitOptions,
        direction: Direction,
        rate: Rate,
        lease: Option<Lease>,
    ) -> Result<bool, LimitError> {
        let was = self.settings()?;
        let Some(limit) = was.limit.at_rate(asked, direction, rate)? else { return Ok(false) };
        let now = boottime();
        let mut settings = Settings { limit: limit.carried_on(&was.at(now), now), ..was };
        settings.limit.until_ns[intf::index(direction)] = 0;
        if let Some(lease) = lease
            && !settings.lend(now, asked, direction, lease)?
        {
            return Ok(false);
        }
        if settings != was {
            self.write(settings)?;
        }
        Ok(true)
    }
}
