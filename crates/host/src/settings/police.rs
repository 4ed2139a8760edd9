//! What a user may set of a policer beside its rate and burst.

use tidegate_core::{
    Scheme, Scope,
    meter::MeterError,
    police::{Action, Hook, MeterOptions, MeterText, Policy, PolicyError},
    queue_options::{ConfigError, VirtualQueueOptions},
    units::Span,
};

use tidegate_sys::limit::LimitOptions;

use super::{SettingsError, SettingsProblem};

/// What is wrong with the meter or the actions of a policer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoliceProblem {
    /// Programs of a cgroup may not write to packets.
    #[error(
        "the kernel lets no program on a cgroup change a packet's DSCP; write `pass`, `drop` or `ce`, or put \
         the limit on the device or port by which the packets leave"
    )]
    NotOnCgroups,
    /// Prefixes of a cgroup's limit.
    #[error(
        "a limit for prefixes is on the device or port behind which they are; write scope = {{ dev = \"...\" \
         }}, or leave this out"
    )]
    MatchNeedsADevice,
    /// The committed burst said twice.
    #[error("`cbs` is the limit's `burst`; write one of them")]
    BurstTwice,
    /// Yellow without a meter that makes it.
    #[error("without a meter no packet is yellow; write `meter`, or leave this out")]
    NoYellow,
    /// Two buckets have no one deficit that flows could share.
    #[error("`fair` and `meter` do not work together; leave one of them out")]
    FairMeter,
    /// Limits for prefixes share a program, which keeps no table of flows for each.
    #[error("`fair` and `match` do not work together; leave one of them out")]
    FairMatch,
    /// XDP asked for where there is none.
    #[error(
        "XDP polices incoming traffic of a device: write scheme = \"police\", scope = {{ dev = \"...\" }} \
         and `ingress` with it, and no `match`; or leave it out"
    )]
    NotInXdp,
    /// A value that is none.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Buckets that cannot be, or not together.
    #[error(transparent)]
    Meter(#[from] MeterError),
}

impl PoliceProblem {
    /// The same for a user who wrote flags of the command line.
    pub(super) fn as_flags(&self) -> String {
        match self {
            Self::MatchNeedsADevice => {
                "a limit for prefixes is on the device or port behind which they are; \
                                        write --dev or --port, or leave this out"
                    .to_owned()
            }
            Self::NotInXdp => {
                "XDP polices incoming traffic of a device: write --scheme police, --dev and \
                               --ingress, and no --match; or leave it out"
                    .to_owned()
            }
            problem => problem.to_string(),
        }
    }
}

/// A meter as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeterSetting {
    /// `none`: one bucket, no yellow.
    None,
    /// This one.
    Meter(MeterOptions),
}

/// The fields that were written; `None` leaves a field as it is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct PolicePatch {
    /// How it colours packets.
    pub meter: Option<MeterSetting>,
    /// The committed burst, if it was written with the meter.
    pub cbs: Option<Span>,
    /// By colour.
    pub actions: [Option<Action>; 3],
    /// Whether flows have equal parts.
    pub fair: Option<bool>,
    /// Where what comes in by a device is policed.
    pub hook: Option<Hook>,
}

impl PolicePatch {
    /// Sets the meter as it was written; `None`: no meter.
    pub(crate) fn set_meter(&mut self, meter: Option<&MeterText>) -> Result<(), SettingsProblem> {
        self.meter = Some(match meter {
            None => MeterSetting::None,
            Some(text) => MeterSetting::Meter(text.meter()?),
        });
        self.cbs = meter.and_then(|text| text.cbs);
        Ok(())
    }

    /// The policy that results when these fields are set on `base`.
    pub(super) fn on(&self, base: &Policy, scheme: Scheme) -> Result<Policy, SettingsError> {
        let refuse = |field, problem: PoliceProblem| {
            Err(SettingsError { field, problem: SettingsProblem::Police(problem) })
        };
        if scheme != Scheme::Police {
            return Ok(Policy::default());
        }
        let meter = match self.meter {
            None => base.meter,
            Some(MeterSetting::None) => None,
            Some(MeterSetting::Meter(meter)) => Some(meter),
        };
        if meter.is_none() && self.actions[1].is_some() {
            return refuse("actions", PoliceProblem::NoYellow);
        }
        let actions = std::array::from_fn(|i| self.actions[i].unwrap_or(base.actions[i]));
        let fair = self.fair.unwrap_or(base.fair);
        if fair && meter.is_some() {
            let field = if self.fair.is_some() { "fair" } else { "meter" };
            return refuse(field, PoliceProblem::FairMeter);
        }
        Ok(Policy { meter, actions, fair, hook: self.hook.unwrap_or(base.hook) })
    }
}

/// Checks that a policy's meter goes with a direction.
pub(super) fn check(
    policy: &Policy,
    queue: Option<&VirtualQueueOptions>,
) -> Result<(), SettingsError> {
    let Some(queue) = queue else { return Ok(()) };
    let refused = |e: ConfigError| {
        let problem = match e {
            ConfigError::Bucket(e) => SettingsProblem::Police(MeterError::from(e).into()),
            ConfigError::Meter(e) => SettingsProblem::Police(e.into()),
            e => e.into(),
        };
        SettingsError { field: "meter", problem }
    };
    policy.meter(queue).map(drop).map_err(refused)
}

/// Checks that a limit can be carried out where it is put.
pub(super) fn fits(limit: &LimitOptions, scope: &Scope) -> Result<(), SettingsError> {
    let refuse =
        |field, problem: PoliceProblem| Err(SettingsError { field, problem: problem.into() });
    if limit.police.rewrites() && !scope.is_device() {
        return refuse("actions", PoliceProblem::NotOnCgroups);
    }
    if !limit.matched.is_empty() && !scope.is_device() {
        return refuse("match", PoliceProblem::MatchNeedsADevice);
    }
    if !limit.matched.is_empty() && limit.police.fair {
        return refuse("match", PoliceProblem::FairMatch);
    }
    let in_xdp = limit.police.hook == Hook::Xdp;
    let has_ingress = limit.ingress.is_some() && matches!(scope, Scope::Dev(_));
    if in_xdp && !(has_ingress && limit.matched.is_empty()) {
        return refuse("hook", PoliceProblem::NotInXdp);
    }
    Ok(())
}
