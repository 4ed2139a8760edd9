//! A policy to the map and back.

use tidegate_core::{
    Bytes, Nanos, Rate, Span,
    meter::{Coupling, MeterConfig},
    police::{Action, ColourMap, Dscp, Hook, MeterOptions, MeterType, Policy},
    queue_options::{ConfigError, VirtualQueueOptions},
    token_bucket::{UNITS_PER_BYTE, earned},
};

use crate::intf::{self, headers};

/// `enum pl_kind`; 0 is one bucket alone.
const SINGLE_RATE: u8 = headers::PL_SINGLE_RATE as u8;
const TWO_RATE: u8 = headers::PL_TWO_RATE as u8;
const DIFFERENTIATED: u8 = headers::PL_DIFFERENTIATED as u8;

const PASS: u8 = headers::PL_PASS as u8;
const DROP: u8 = headers::PL_DROP as u8;
const CE: u8 = headers::PL_CE as u8;
const DSCP: u8 = headers::PL_DSCP as u8;

/// How a depth was given.
const NOT_GIVEN: u32 = 0;
const AS_TIME: u32 = 1;
const AS_BYTES: u32 = 2;

impl intf::Policy {
    /// As it lies in the map.
    ///
    /// # Errors
    /// [`ConfigError`] for a bucket or meter that cannot be.
    pub fn new(policy: &Policy, queue: &VirtualQueueOptions) -> Result<intf::Policy, ConfigError> {
        let mut encoded = intf::Policy {
            committed: queue.bucket()?.into(),
            fair: policy.fair.into(),
            ..intf::Policy::default()
        };
        for (i, action) in policy.actions.into_iter().enumerate() {
            (encoded.action[i], encoded.dscp[i]) = match action {
                Action::Pass => (PASS, 0),
                Action::Drop => (DROP, 0),
                Action::Ce => (CE, 0),
                Action::Dscp(dscp) => (DSCP, dscp.value()),
            };
        }
        let Some((meter, config)) = policy.meter.zip(policy.meter(queue)?) else {
            return Ok(encoded);
        };
        let colours = meter.colours.unwrap_or(ColourMap { yellow: 0, red: 0 });
        encoded.yellow_dscps = colours.yellow;
        encoded.red_dscps = colours.red;
        encoded.second_given = match meter.burst {
            None => NOT_GIVEN,
            Some(Span::Time(_)) => AS_TIME,
            Some(Span::Size(_)) => AS_BYTES,
        };
        Ok(intf::Policy { aware: meter.colours.is_some().into(), ..encoded.metered(&config) })
    }

    /// The same with the buckets of a meter.
    pub(crate) fn metered(self, config: &MeterConfig) -> intf::Policy {
        let kind = match config.coupling {
            Coupling::Overflow => SINGLE_RATE,
            Coupling::Covering => TWO_RATE,
            Coupling::Apart => DIFFERENTIATED,
        };
        let (committed, second) = (config.committed.into(), config.second.into());
        intf::Policy { kind, committed, second, ..self }
    }

    /// The policy from `at` on, CLOCK_BOOTTIME, where `earlier` was in force: what its buckets had been
    /// given until then counts on (`bpf/police/meter.h`). The same policy is not another.
    pub(crate) fn carried_on(&self, earlier: &intf::Policy, at: Nanos) -> intf::Policy {
        let since = at.0.max(earlier.since_ns);
        let elapsed = Nanos(since - earlier.since_ns);
        let carry = |bucket: intf::Bucket, earlier: &intf::Bucket, elapsed| {
            let earned_bytes = earlier.earned_bytes + earned(earlier.rate, elapsed).0;
            intf::Bucket { earned_bytes, ..bucket }
        };
        let carried = |since_ns, elapsed| intf::Policy {
            committed: carry(self.committed, &earlier.committed, elapsed),
            second: carry(self.second, &earlier.second, elapsed),
            since_ns,
            ..*self
        };
        let same = carried(earlier.since_ns, Nanos(0));
        // Its start distinguishes a policy from the one before.
        if same == *earlier { same } else { carried(since.max(earlier.since_ns + 1), elapsed) }
    }

    /// What a user would write; `None` for a direction that is not limited.
    pub fn policy(&self) -> Option<Policy> {
        if self.committed.cost == 0 {
            return None;
        }
        let action = |i: usize| match self.action[i] {
            PASS => Action::Pass,
            CE => Action::Ce,
            DSCP => Dscp::new(self.dscp[i]).map_or(Action::Pass, Action::Dscp),
            _ => Action::Drop,
        };
        let kind = match self.kind {
            SINGLE_RATE => Some(MeterType::SrTcm),
            TWO_RATE => Some(MeterType::TrTcm),
            DIFFERENTIATED => Some(MeterType::Rfc4115),
            _ => None,
        };
        let meter = kind.map(|kind| MeterOptions {
            kind,
            rate: Rate::from_bit_s(self.second.rate).filter(|_| kind != MeterType::SrTcm),
            burst: match self.second_given {
                AS_TIME => Some(Span::Time(Nanos(self.second.fill_ns))),
                AS_BYTES => Some(Span::Size(Bytes(self.second.burst / UNITS_PER_BYTE))),
                _ => None,
            },
            colours: (self.aware != 0)
                .then_some(ColourMap { yellow: self.yellow_dscps, red: self.red_dscps }),
        });
        let actions = [action(0), action(1), action(2)];
        // The hook is the limit's.
        Some(Policy { meter, actions, fair: self.fair != 0, hook: Hook::Auto })
    }
}
