//! One rate that changes again and again, as a group's does.

use tidegate_core::{Direction, Rate, Span, virtual_queue::MAX_SPAN};

use super::{LimitError, LimitMaps, LimitOptions};
use crate::intf;

impl LimitMaps {
    /// Changes the rate of a direction that is limited, and the thresholds that follow from it; nothing
    /// else. A size that would last longer than [`MAX_SPAN`] at a rate so low is cut to that, and stays so
    /// until the limit is set anew. It is one write to a map: sockets that exist learn of it with their next
    /// ACK, where [`LimitMaps::set`] goes to each of them. False if the direction is free.
    ///
    /// # Errors
    /// [`LimitError`]; the earlier rate is in force.
    pub fn set_rate(&self, direction: Direction, rate: Rate) -> Result<bool, LimitError> {
        let mut limit = self.limit()?;
        let mut options = LimitOptions::from(&limit);
        let queue = match direction {
            Direction::Egress => &mut options.egress,
            Direction::Ingress => &mut options.ingress,
        };
        let Some(queue) = queue else { return Ok(false) };
        if queue.rate == rate {
            return Ok(true);
        }
        queue.rate = rate;
        for span in [&mut queue.burst, &mut queue.mark, &mut queue.drop] {
            *span =
                span.map(|span| if span.at(rate) > MAX_SPAN { Span::Time(MAX_SPAN) } else { span });
        }
        let new = options.encode(limit.cgroup_id)?;
        let i = intf::index(direction);
        limit.queue[i] = new.queue[i];
        limit.rate_bit_s[i] = new.rate_bit_s[i];
        limit.class[i] = new.class[i];
        limit.police[i] = new.police[i];
        self.write(&limit)?;
        if limit.flags & intf::FLAG_POLICE != 0 {
            self.forgive(&limit)?;
        }
        Ok(true)
    }
}
