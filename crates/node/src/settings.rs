//! What a user may set of a limit, wherever it was written: a spec file or a command line.
//!
//! A [`Patch`] holds the fields that were written; put [on](Patch::on) a limit it gives another one, or says
//! which field cannot be so. A new limit is a patch on the defaults.

use std::str::FromStr;

use tidegate_core::{
    Direction, Nanos, Rate, Scheme, Scope, Span,
    units::ParseError,
    virtual_queue::{ConfigError, VirtualQueueOptions},
};
use tidegate_sys::limit::LimitOptions;

/// The kernel takes no longer minimum retransmission time-out or delayed ACK from a program.
pub const MAX_TIMER: Nanos = Nanos(200_000_000);
/// Below this, no kernel's timer tick can keep it.
pub const MIN_TIMER: Nanos = Nanos(1_000_000);

/// The rate of a direction as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RateSetting {
    /// So much.
    Limit(Rate),
    /// `none`: this direction is not limited.
    Free,
}

impl FromStr for RateSetting {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        if text.trim() == "none" { Ok(RateSetting::Free) } else { text.parse().map(Self::Limit) }
    }
}

/// The fields that were written; `None` leaves a field as it is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Patch {
    /// Rate from the workload.
    pub egress: Option<RateSetting>,
    /// Rate to the workload.
    pub ingress: Option<RateSetting>,
    /// Credit of an idle limit, for every limited direction.
    pub burst: Option<Span>,
    /// Backlog above which senders are told, for every limited direction.
    pub mark: Option<Span>,
    /// Backlog above which packets are dropped, for every limited direction.
    pub drop: Option<Span>,
    /// Charge packets on the loopback interface too.
    pub loopback: Option<bool>,
    /// How the limit acts.
    pub scheme: Option<Scheme>,
    /// With `nrm`: no TCP socket paces faster than the egress limit.
    pub pace_ceiling: Option<bool>,
    /// Minimum retransmission time-out; zero leaves the kernel's.
    pub rto_min: Option<Nanos>,
    /// Longest delayed ACK; zero leaves the kernel's.
    pub delack_max: Option<Nanos>,
}

/// A field that cannot be as written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct SettingsError {
    /// The field, as a spec file names it.
    pub field: &'static str,
    /// What is wrong with it and what to type instead.
    pub problem: SettingsProblem,
}

/// What is wrong with a field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsProblem {
    /// Neither direction is limited.
    #[error("neither egress nor ingress has a rate; give one of them, for example 50mbit")]
    NoDirection,
    /// A timer that the kernel would not take.
    #[error("{0} is out of range; write 1ms to 200ms, or 0ms for the kernel's own")]
    Timer(Nanos),
    /// Pacing was switched off for the scheme that is pacing.
    #[error("scheme `pace` paces every TCP flow; write scheme = \"nrm\" to do without")]
    PacedAnyway,
    /// Departure times for what comes in.
    #[error(
        "scheme `edt` delays what leaves, and what comes in is here already; leave ingress out, or write \
         scheme = \"nrm\""
    )]
    NothingToHold,
    /// Something on sockets was asked of a scheme that leaves them alone.
    #[error("scheme `edt` leaves sockets alone; leave this out, or write scheme = \"pace\"")]
    LeavesSocketsAlone,
    /// A scheme that works on cgroups alone.
    #[error(
        "scheme `{0}` works on a cgroup; on a {1} write scheme = \"edt\", or \"carousel\" if it is one of a \
         `[[nic]]`"
    )]
    NotOnDevices(Scheme, &'static str),
    /// The loopback device has no queue to speak of.
    #[error("a limit on a device has no loopback traffic; leave this out")]
    NoLoopback,
    /// The scheme of the software NIC.
    #[error(
        "scheme `carousel` shapes what passes between the two ports of `tidegate nic`, and only while that \
         runs; write scope = {{ port = \"...\" }} and a `[[nic]]` in its spec file, or use scheme `pace`, \
         `nrm` or `edt` here"
    )]
    InTheNic,
    /// The virtual queue cannot be built.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl Patch {
    /// Nothing was written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Patch::default()
    }

    /// The limit that results when these fields are set on `base`. Thresholds that are not given follow the
    /// rate.
    ///
    /// # Errors
    /// [`SettingsError`] names the field.
    pub fn on(&self, base: &LimitOptions) -> Result<LimitOptions, SettingsError> {
        let scheme = self.scheme.unwrap_or(base.scheme);
        if scheme == Scheme::Carousel {
            let (field, problem) = ("scheme", SettingsProblem::InTheNic);
            return Err(SettingsError { field, problem });
        }
        if scheme == Scheme::Pace && self.pace_ceiling == Some(false) {
            let (field, problem) = ("pace_ceiling", SettingsProblem::PacedAnyway);
            return Err(SettingsError { field, problem });
        }
        if scheme == Scheme::Edt {
            let refuse = |field, problem| Err(SettingsError { field, problem });
            if self.pace_ceiling == Some(true) {
                return refuse("pace_ceiling", SettingsProblem::LeavesSocketsAlone);
            }
            for (field, timer) in [("rto_min", self.rto_min), ("delack_max", self.delack_max)] {
                if timer.is_some_and(|time| time.0 != 0) {
                    return refuse(field, SettingsProblem::LeavesSocketsAlone);
                }
            }
            if matches!(self.ingress, Some(RateSetting::Limit(_)))
                || (self.ingress.is_none() && base.ingress.is_some())
            {
                return refuse("ingress", SettingsProblem::NothingToHold);
            }
        }
        let direction = |written, base, direction| self.direction(written, base, scheme, direction);
        let limit = LimitOptions {
            egress: direction(self.egress, base.egress, Direction::Egress)?,
            ingress: direction(self.ingress, base.ingress, Direction::Ingress)?,
            scheme,
            loopback: self.loopback.unwrap_or(base.loopback),
            pace_ceiling: self.pace_ceiling.unwrap_or(base.pace_ceiling),
            rto_min: timer("rto_min", self.rto_min)?.unwrap_or(base.rto_min),
            delack_max: timer("delack_max", self.delack_max)?.unwrap_or(base.delack_max),
            class: base.class,
        };
        if limit.egress.is_none() && limit.ingress.is_none() {
            let (field, problem) = ("egress", SettingsProblem::NoDirection);
            return Err(SettingsError { field, problem });
        }
        Ok(limit)
    }

    fn direction(
        &self,
        written: Option<RateSetting>,
        base: Option<VirtualQueueOptions>,
        scheme: Scheme,
        direction: Direction,
    ) -> Result<Option<VirtualQueueOptions>, SettingsError> {
        let rate = match written {
            Some(RateSetting::Free) => None,
            Some(RateSetting::Limit(rate)) => Some(rate),
            None => base.map(|queue| queue.rate),
        };
        let Some(rate) = rate else { return Ok(None) };
        let base = base.unwrap_or(VirtualQueueOptions::new(rate));
        let queue = VirtualQueueOptions {
            rate,
            burst: self.burst.or(base.burst),
            mark: self.mark.or(base.mark),
            drop: self.drop.or(base.drop),
            kind: scheme.queue(direction),
        };
        let field = match direction {
            Direction::Egress => "egress",
            Direction::Ingress => "ingress",
        };
        queue.config().map_err(|e| {
            let field = match &e {
                ConfigError::Rate(_) => field,
                ConfigError::Span { name, .. } => name.split(' ').next().unwrap_or(name),
                ConfigError::Order { .. } if self.mark.is_none() && self.drop.is_some() => "drop",
                ConfigError::Order { .. } => "mark",
                ConfigError::Scheme(_) => "scheme",
            };
            SettingsError { field, problem: e.into() }
        })?;
        Ok(Some(queue))
    }
}

/// A limit that its scope can have.
///
/// # Errors
/// [`SettingsError`] names the field.
pub fn fits(scope: &Scope, limit: LimitOptions) -> Result<LimitOptions, SettingsError> {
    let refuse = |field, problem| Err(SettingsError { field, problem });
    match limit.scheme {
        Scheme::Edt if scope.is_device() && limit.loopback => {
            refuse("loopback", SettingsProblem::NoLoopback)
        }
        scheme if scheme != Scheme::Edt && scope.is_device() => {
            let kind = if matches!(scope, Scope::Dev(_)) { "device" } else { "port" };
            refuse("scheme", SettingsProblem::NotOnDevices(scheme, kind))
        }
        _ => Ok(limit),
    }
}

fn timer(field: &'static str, time: Option<Nanos>) -> Result<Option<Nanos>, SettingsError> {
    match time {
        Some(time) if time.0 != 0 && !(MIN_TIMER..=MAX_TIMER).contains(&time) => {
            Err(SettingsError { field, problem: SettingsProblem::Timer(time) })
        }
        _ => Ok(time),
    }
}

/// The limit as it reads back from the kernel: two that act alike are equal.
#[must_use]
pub fn canonical(options: &LimitOptions) -> LimitOptions {
    options.encode(0).map_or(*options, |limit| LimitOptions::from(&limit))
}

/// One field in which two limits differ, in words of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// `egress`, `egress burst`, `loopback` ...
    pub field: &'static str,
    /// As it is.
    pub from: String,
    /// As it shall be.
    pub to: String,
}

/// In what two limits differ; empty when they act alike.
#[must_use]
pub fn differences(from: &LimitOptions, to: &LimitOptions) -> Vec<Difference> {
    type Show = fn(&LimitOptions) -> String;
    fn rate(queue: Option<VirtualQueueOptions>) -> String {
        queue.map_or_else(|| "none".to_owned(), |q| q.rate.to_string())
    }
    fn span(span: Option<Option<Span>>) -> String {
        span.flatten().map_or_else(|| "default".to_owned(), |span| span.to_string())
    }
    const FIELDS: [(&str, Show); 13] = [
        ("egress", |o| rate(o.egress)),
        ("egress burst", |o| span(o.egress.map(|q| q.burst))),
        ("egress mark", |o| span(o.egress.map(|q| q.mark))),
        ("egress drop", |o| span(o.egress.map(|q| q.drop))),
        ("ingress", |o| rate(o.ingress)),
        ("ingress burst", |o| span(o.ingress.map(|q| q.burst))),
        ("ingress mark", |o| span(o.ingress.map(|q| q.mark))),
        ("ingress drop", |o| span(o.ingress.map(|q| q.drop))),
        ("scheme", |o| o.scheme.to_string()),
        ("loopback", |o| o.loopback.to_string()),
        ("pace_ceiling", |o| o.pace_ceiling.to_string()),
        ("rto_min", |o| o.rto_min.to_string()),
        ("delack_max", |o| o.delack_max.to_string()),
    ];
    let (from, to) = (canonical(from), canonical(to));
    let shown =
        FIELDS.iter().map(|(field, show)| Difference { field, from: show(&from), to: show(&to) });
    shown.filter(|d| d.from != d.to).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(text: &str) -> Option<RateSetting> {
        Some(text.parse().unwrap())
    }

    fn refusal(patch: Patch) -> String {
        patch.on(&LimitOptions::default()).unwrap_err().to_string()
    }

    #[test]
    fn a_patch_changes_only_what_it_names() {
        let base = Patch { egress: rate("50mbit"), burst: "2ms".parse().ok(), ..Patch::default() };
        let base = base.on(&LimitOptions::default()).unwrap();
        let changed = Patch { egress: rate("10mbit"), ..Patch::default() }.on(&base).unwrap();
        assert_eq!(changed.egress.unwrap().rate.to_string(), "10mbit");
        assert_eq!(changed.egress.unwrap().burst, base.egress.unwrap().burst);
        let both = Patch { ingress: rate("1gbit"), ..Patch::default() }.on(&base).unwrap();
        assert_eq!(both.egress, base.egress);
        let swapped = Patch { egress: rate("none"), ..Patch::default() }.on(&both).unwrap();
        assert!(swapped.egress.is_none() && swapped.ingress.is_some());
    }

    #[test]
    fn refusals_name_the_field() {
        let good = Patch { egress: rate("50mbit"), ..Patch::default() };
        insta::assert_snapshot!(refusal(Patch::default()), @"egress: neither egress nor ingress has a rate; give one of them, for example 50mbit");
        insta::assert_snapshot!(refusal(Patch { ingress: rate("900gbit"), ..good }), @"ingress: 900gbit is out of range; a limit is between 8kbit and 100gbit");
        insta::assert_snapshot!(refusal(Patch { egress: rate("1bit"), ..good }), @"egress: 1bit is out of range; a limit is between 8kbit and 100gbit");
        insta::assert_snapshot!(refusal(Patch { rto_min: Some(Nanos(3_000_000_000)), ..good }), @"rto_min: 3s is out of range; write 1ms to 200ms, or 0ms for the kernel's own");
        insta::assert_snapshot!(refusal(Patch { burst: "9999s".parse().ok(), ..good }), @"burst: burst of 9999s is longer than 512s at 50mbit; make it shorter");
        insta::assert_snapshot!(refusal(Patch { mark: "9ms".parse().ok(), ..good }), @"mark: mark threshold 9ms must be below drop threshold 7751.68us");
        insta::assert_snapshot!(refusal(Patch { drop: "0.1ms".parse().ok(), ..good }), @"drop: mark threshold 3875.84us must be below drop threshold 100us");
    }

    #[test]
    fn differences_are_in_the_users_words() {
        let a = Patch { egress: rate("50mbit"), ..Patch::default() };
        let b = Patch { egress: rate("9mbit"), burst: "3ms".parse().ok(), ..Patch::default() };
        let on = |p: Patch| p.on(&LimitOptions::default()).unwrap();
        let shown: Vec<_> = differences(&on(a), &on(b))
            .into_iter()
            .map(|d| format!("{} {} -> {}", d.field, d.from, d.to))
            .collect();
        assert_eq!(shown, ["egress 50mbit -> 9mbit", "egress burst default -> 3ms"]);
        assert!(differences(&on(a), &on(a)).is_empty());
    }
}
