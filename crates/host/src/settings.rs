//! What a user may set of a limit, wherever it was written: a spec file or a command line.
//!
//! A [`Patch`] holds the fields that were written; put [on](Patch::on) a limit it gives another one, or says
//! which field cannot be so. A new limit is a patch on the defaults.

use std::str::{FromStr, ParseBoolError};

use serde::Serialize;
use tidegate_core::{
    Class, Direction, Nanos, Rate, Scheme, Scope, Span,
    choice::NoScheme,
    class::{MAX_WEIGHT, MIN_WEIGHT, NO_CEILING_BIT_S},
    exempt::{Exempt, ExemptError},
    police::PolicyError,
    prefixes::{PrefixError, Prefixes},
    queue_options::{ConfigError, VirtualQueueOptions},
    scheme::{SCHEMES, SchemeError, SchemeInfo, Trees, list},
    units::{MAX_RATE_BIT_S, MIN_RATE_BIT_S, ParseError},
};
use tidegate_sys::limit::LimitOptions;

use self::fields::{FIELDS, Field, Show, Shown};
use crate::key::Key;

pub mod fields;
mod police;

pub use police::{MeterSetting, PolicePatch, PoliceProblem};

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

/// The scheme as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemeSetting {
    /// `auto`: the one that fits best.
    Auto,
    /// This one.
    Named(Scheme),
}

impl FromStr for SchemeSetting {
    type Err = SchemeError;

    fn from_str(text: &str) -> Result<Self, SchemeError> {
        if text == "auto" { Ok(SchemeSetting::Auto) } else { text.parse().map(Self::Named) }
    }
}

/// From where on packets are marked, as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EcnSetting {
    /// With so much waiting.
    Above(Span),
    /// `none`: never.
    Off,
}

impl FromStr for EcnSetting {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        if text.trim() == "none" { Ok(EcnSetting::Off) } else { text.parse().map(Self::Above) }
    }
}

/// The fields that were written; `None` leaves a field as it is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Patch {
    /// Rate from the workload.
    pub egress: Option<RateSetting>,
    /// Rate to the workload.
    pub ingress: Option<RateSetting>,
    /// With a parent: both of them.
    pub ceiling: Option<RateSetting>,
    /// With a parent: what it has at least.
    pub guarantee: Option<RateSetting>,
    /// With a parent: its part of what is not guaranteed.
    pub weight: Option<i64>,
    /// Credit of an idle limit, for every limited direction.
    pub burst: Option<Span>,
    /// Backlog above which senders are told, for every limited direction.
    pub mark: Option<Span>,
    /// With `htb`: what waits when packets begin to be marked, for every limited direction.
    pub ecn: Option<EcnSetting>,
    /// Backlog above which packets are dropped, for every limited direction.
    pub drop: Option<Span>,
    /// Charge packets on the loopback interface too.
    pub loopback: Option<bool>,
    pub scheme: Option<SchemeSetting>,
    /// With `nrm`: no TCP socket paces faster than the egress limit.
    pub pace_ceiling: Option<bool>,
    /// Minimum retransmission time-out; zero leaves the kernel's.
    pub rto_min: Option<Nanos>,
    /// Longest delayed ACK; zero leaves the kernel's.
    pub delack_max: Option<Nanos>,
    /// With `police`: meter and actions.
    pub police: PolicePatch,
    /// Who is not limited; empty: nobody.
    pub exempt: Option<Exempt>,
    /// With `police` on a device: whose packets are policed; empty: everybody's.
    pub matched: Option<Prefixes>,
}

/// The directions for which a user wrote a rate of their own; a limit with a parent has the parent's.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// From the workload.
    pub egress: bool,
    /// To the workload.
    pub ingress: bool,
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
    /// A setting that the scheme does not have.
    #[error("{}", Form::File.not_of_scheme(*scheme, field))]
    NotOfScheme { scheme: Scheme, field: &'static str },
    /// A timer that the kernel would not take.
    #[error("{0} is out of range; write 1ms to 200ms, or 0ms for the kernel's own")]
    Timer(Nanos),
    /// A scheme that does not work on such a scope.
    #[error("{}", Form::File.not_on(*scheme, scope, instead))]
    NotOn {
        scheme: Scheme,
        /// `cgroup`, `device` or `port`.
        scope: &'static str,
        instead: Vec<Scheme>,
    },
    /// A scheme that does not limit this direction on such a scope.
    #[error(
        "on a {scope}, scheme `{scheme}` limits {limits} only; write {direction} = \"none\", or {}",
        Form::File.one_of(instead)
    )]
    OneWay {
        scheme: Scheme,
        /// `cgroup`, `device` or `port`.
        scope: &'static str,
        limits: &'static str,
        direction: &'static str,
        instead: Vec<Scheme>,
    },
    /// The loopback device has no queue to speak of.
    #[error("a limit on a device has no loopback traffic; leave this out")]
    NoLoopback,
    /// Something that only a limit inside another one has.
    #[error("only a limit inside another one has this; {0}")]
    NoParent(&'static str),
    /// Two fields say the ceiling of one direction.
    #[error("`ceiling` says it for both directions; write either that, or egress and ingress")]
    CeilingTwice,
    /// A limit of a tree on a device.
    #[error(
        "a limit inside another one is on the same cgroup or on one below, or with scheme `htb` on a port or \
         cgroup inside a device's; leave the parent out"
    )]
    NoParentOnDevices,
    /// A scheme that shares with nobody.
    #[error("{}", Form::File.not_in_a_tree(*.0))]
    NotInATree(Scheme),
    /// No weight.
    #[error(
        "{0} is out of range; write {MIN_WEIGHT} to {MAX_WEIGHT}, where 100 is the weight of most"
    )]
    Weight(i64),
    /// More than it could ever use.
    #[error(
        "the guarantee of {guarantee} is above the ceiling of {ceiling}; make the one less or the other more"
    )]
    AboveCeiling {
        guarantee: Rate,
        /// The most that it may use.
        ceiling: Rate,
    },
    /// Of a policer.
    #[error(transparent)]
    Police(#[from] PoliceProblem),
    /// The virtual queue cannot be built.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A rate, size or time.
    #[error(transparent)]
    Unit(#[from] ParseError),
    /// The scheme.
    #[error(transparent)]
    Scheme(#[from] SchemeError),
    /// `auto` finds none.
    #[error(transparent)]
    NoScheme(#[from] NoScheme),
    /// No prefix.
    #[error(transparent)]
    Match(#[from] PrefixError),
    /// Nobody is exempt by this.
    #[error(transparent)]
    Exempt(#[from] ExemptError),
    /// No flag.
    #[error("write `true` or `false`")]
    Flag(#[from] ParseBoolError),
    /// No whole number.
    #[error("`{0}` is no whole number; write for example 100")]
    Whole(String),
    /// No action for a colour.
    #[error("`{0}` is no action for a colour; write for example yellow=dscp:af12")]
    Action(String),
}

impl SettingsProblem {
    /// The same for a user who wrote flags of the command line: what to type are flags, too.
    pub fn as_flags(&self) -> String {
        let flags = Form::Flags;
        match self {
            Self::NotOfScheme { scheme, field } => flags.not_of_scheme(*scheme, field),
            Self::NotOn { scheme, scope, instead } => flags.not_on(*scheme, scope, instead),
            Self::OneWay { scheme, scope, limits, direction, instead } => format!(
                "on a {scope}, scheme `{scheme}` limits {limits} only; write --{direction} none, or {}",
                flags.one_of(instead)
            ),
            Self::NotInATree(scheme) => flags.not_in_a_tree(*scheme),
            Self::Police(problem) => problem.as_flags(),
            problem => problem.to_string(),
        }
    }
}

/// How a user writes a setting, and so how an error says what to write.
#[derive(Debug, Clone, Copy)]
enum Form {
    /// As a line of a spec file.
    File,
    /// As a flag of the command line.
    Flags,
}

impl Form {
    fn scheme(self, is_in: impl Fn(&SchemeInfo) -> bool) -> String {
        match self {
            Form::File => format!("scheme = {}", list("\"", is_in)),
            Form::Flags => format!("--scheme {}", list("", is_in)),
        }
    }

    fn one_of(self, schemes: &[Scheme]) -> String {
        self.scheme(|info| schemes.contains(&info.scheme))
    }

    fn not_of_scheme(self, scheme: Scheme, field: &str) -> String {
        let name = |field: &str| match self {
            Form::File => field.to_owned(),
            Form::Flags => field.replace('_', "-"),
        };
        let has: Vec<_> = scheme.info().fields.iter().map(|field| name(field)).collect();
        let (field, has, others) =
            (name(field), has.join(", "), self.scheme(|info| info.has(field)));
        format!(
            "scheme `{scheme}` has no `{field}`; it has {has}; leave this out, or write {others}"
        )
    }

    fn not_on(self, scheme: Scheme, scope: &str, instead: &[Scheme]) -> String {
        let scopes = scheme.info().scopes;
        let other = if scopes.contains(scope) { "another" } else { "a" };
        let instead = self.one_of(instead);
        format!("scheme `{scheme}` works on {scopes}; on {other} {scope} write {instead}")
    }

    fn not_in_a_tree(self, scheme: Scheme) -> String {
        let cgroups = self.scheme(|info| info.trees == Trees::OfCgroups);
        let quote = if matches!(self, Form::File) { "\"" } else { "" };
        let device = list(quote, |info| info.trees == Trees::OfADevice);
        format!(
            "scheme `{scheme}` neither has a parent nor is one; write {cgroups} ({device} inside a device's \
             limit), or leave the parent out"
        )
    }
}

impl From<PolicyError> for SettingsProblem {
    fn from(problem: PolicyError) -> SettingsProblem {
        PoliceProblem::from(problem).into()
    }
}

/// A limit inside another one before anything is said of it: what its parent has, in each direction, with no
/// guarantee.
pub fn inside_another() -> LimitOptions {
    let queue = Rate::from_bit_s(NO_CEILING_BIT_S).map(VirtualQueueOptions::new);
    let class = Some(Class::default());
    LimitOptions { egress: queue, ingress: queue, class, ..LimitOptions::default() }
}

/// Whether the rate is the ceiling of a limit that has none but its parent's.
pub fn is_parents(options: &LimitOptions, rate: Rate) -> bool {
    options.class.is_some() && rate.bit_s() == NO_CEILING_BIT_S
}

/// The fields that say whom a limit limits, if they are set.
pub(crate) fn who(limit: &LimitOptions) -> impl Iterator<Item = &'static str> {
    let set = [("exempt", !limit.exempt.is_empty()), ("match", !limit.matched.is_empty())];
    set.into_iter().filter(|(_, is_set)| *is_set).map(|(field, _)| field)
}

impl Patch {
    /// Nothing was written.
    pub fn is_empty(&self) -> bool {
        *self == Patch::default()
    }

    /// The limit on `scope` that results when these fields are set on `base`, which has the scheme if none is
    /// named. Thresholds that are not given follow the rate.
    ///
    /// # Errors
    /// [`SettingsError`] names the field.
    pub fn on(&self, base: &LimitOptions, scope: &Scope) -> Result<LimitOptions, SettingsError> {
        let (scheme, chosen) = match self.scheme {
            Some(SchemeSetting::Named(scheme)) => (scheme, None),
            _ => (base.scheme, base.chosen),
        };
        self.check_place(base, scheme, scope)?;
        let class = self.class(base)?;
        let refuse = |field, problem| Err(SettingsError { field, problem });
        self.check_fields(scheme)?;
        if self.burst.is_some() && self.police.cbs.is_some() {
            return refuse("meter", PoliceProblem::BurstTwice.into());
        }
        let none = Rate::from_bit_s(NO_CEILING_BIT_S).filter(|_| class.is_some());
        let written = |one: Option<RateSetting>, base: Option<VirtualQueueOptions>| {
            // A ceiling is one in the directions that there are.
            match (one.or(self.ceiling.filter(|_| base.is_some())), none) {
                (Some(RateSetting::Free), Some(none)) if base.is_some() => {
                    Some(RateSetting::Limit(none))
                }
                (written, _) => written,
            }
        };
        let direction =
            |one, base, direction| self.direction(written(one, base), base, scheme, direction);
        let limit = LimitOptions {
            egress: direction(self.egress, base.egress, Direction::Egress)?,
            ingress: direction(self.ingress, base.ingress, Direction::Ingress)?,
            scheme,
            chosen,
            unfollowed: base.unfollowed,
            loopback: self.loopback.unwrap_or(base.loopback),
            pace_ceiling: self.pace_ceiling.unwrap_or(base.pace_ceiling),
            rto_min: timer("rto_min", self.rto_min)?.unwrap_or(base.rto_min),
            delack_max: timer("delack_max", self.delack_max)?.unwrap_or(base.delack_max),
            class,
            police: self.police.on(&base.police, scheme)?,
            exempt: self.exempt.unwrap_or(base.exempt),
            matched: self.matched.unwrap_or(base.matched),
        };
        // Without it the limit would apply to other traffic than before.
        for field in who(&limit) {
            if !scheme.info().has(field) {
                return refuse(field, SettingsProblem::NotOfScheme { scheme, field });
            }
        }
        police::check(&limit.police, limit.egress.as_ref())?;
        police::check(&limit.police, limit.ingress.as_ref())?;
        if let Some(guarantee) = class.and_then(|class| class.guarantee) {
            let ceilings = [limit.egress, limit.ingress].into_iter().flatten().map(|q| q.rate);
            if let Some(ceiling) = ceilings.min().filter(|ceiling| *ceiling < guarantee) {
                let field = match self {
                    _ if self.guarantee.is_some() => "guarantee",
                    _ if self.ceiling.is_some() => "ceiling",
                    _ if limit.egress.is_some_and(|queue| queue.rate == ceiling) => "egress",
                    _ => "ingress",
                };
                return refuse(field, SettingsProblem::AboveCeiling { guarantee, ceiling });
            }
        }
        if limit.egress.is_none() && limit.ingress.is_none() {
            return refuse("egress", SettingsProblem::NoDirection);
        }
        police::fits(&limit, scope)?;
        if limit.loopback && (scope.is_device() || !scheme.info().has("loopback")) {
            return refuse("loopback", SettingsProblem::NoLoopback);
        }
        Ok(limit)
    }

    /// Refuses settings that a scheme does not have.
    pub(crate) fn check_fields(&self, scheme: Scheme) -> Result<(), SettingsError> {
        let missing = |field: &&Field| field.is_asked(self) && !scheme.info().has(field.key.name);
        match FIELDS.iter().find(missing).map(|field| field.key.name) {
            None => Ok(()),
            Some(field) => {
                let problem = SettingsProblem::NotOfScheme { scheme, field };
                Err(SettingsError { field, problem })
            }
        }
    }

    /// Refuses a scheme where it does not work, and the directions that it does not limit there.
    fn check_place(
        &self,
        base: &LimitOptions,
        scheme: Scheme,
        scope: &Scope,
    ) -> Result<(), SettingsError> {
        let refuse = |field, problem| Err(SettingsError { field, problem });
        let info = scheme.info();
        if base.class.is_some() {
            return match (info.trees, scope) {
                (Trees::None, _) => refuse("scheme", SettingsProblem::NotInATree(scheme)),
                (Trees::OfCgroups, Scope::Dev(_) | Scope::Port(_))
                | (Trees::OfADevice, Scope::Dev(_)) => {
                    refuse("parent", SettingsProblem::NoParentOnDevices)
                }
                _ => Ok(()),
            };
        }
        let is_limited = |written: Option<RateSetting>, base: Option<VirtualQueueOptions>| {
            written.map_or(base.is_some(), |rate| rate != RateSetting::Free)
        };
        let directions = [
            ("egress", Direction::Egress, is_limited(self.egress, base.egress)),
            ("ingress", Direction::Ingress, is_limited(self.ingress, base.ingress)),
        ];
        let missing = |here: &[Direction]| {
            directions.iter().find(|(_, way, asked)| *asked && !here.contains(way))
        };
        let works = |here: &[Direction]| !here.is_empty() && missing(here).is_none();
        let instead = || {
            let others = SCHEMES.iter().filter(|info| works(info.on(scope)));
            others.map(|info| info.scheme).collect()
        };
        let (here, kind) = (info.on(scope), scope.noun());
        match missing(here) {
            _ if here.is_empty() => {
                refuse("scheme", SettingsProblem::NotOn { scheme, scope: kind, instead: instead() })
            }
            Some((direction, ..)) => {
                let limits = directions.iter().find(|(_, way, _)| here.contains(way));
                let limits = limits.map_or("", |(name, ..)| name);
                let instead = instead();
                let problem =
                    SettingsProblem::OneWay { scheme, scope: kind, limits, direction, instead };
                refuse(direction, problem)
            }
            None => Ok(()),
        }
    }

    /// The place among siblings; `None` for a limit without a parent.
    fn class(&self, base: &LimitOptions) -> Result<Option<Class>, SettingsError> {
        let refuse = |field, problem| Err(SettingsError { field, problem });
        let Some(class) = base.class else {
            let no_parent = |field, instead| refuse(field, SettingsProblem::NoParent(instead));
            return match (self.ceiling, self.guarantee, self.weight) {
                (Some(_), ..) => {
                    no_parent("ceiling", "write egress or ingress, or name its parent")
                }
                (_, Some(_), _) => no_parent("guarantee", "name its parent, or leave it out"),
                (.., Some(_)) => no_parent("weight", "name its parent, or leave it out"),
                _ => Ok(None),
            };
        };
        for (field, one) in [("egress", self.egress), ("ingress", self.ingress)] {
            if self.ceiling.is_some() && one.is_some() {
                return refuse(field, SettingsProblem::CeilingTwice);
            }
        }
        let weight = match self.weight {
            None => class.weight,
            Some(weight) => match u32::try_from(weight) {
                Ok(weight) if (MIN_WEIGHT..=MAX_WEIGHT).contains(&weight) => weight,
                _ => return refuse("weight", SettingsProblem::Weight(weight)),
            },
        };
        let guarantee = match self.guarantee {
            None => class.guarantee,
            Some(RateSetting::Free) => None,
            Some(RateSetting::Limit(rate)) => {
                if !(MIN_RATE_BIT_S..=MAX_RATE_BIT_S).contains(&rate.bit_s()) {
                    return refuse("guarantee", ConfigError::Rate(rate).into());
                }
                Some(rate)
            }
        };
        Ok(Some(Class { guarantee, weight }))
    }

    /// The directions of which something was said.
    pub fn asked(&self) -> Asked {
        let limit = |one| matches!(one, Some(RateSetting::Limit(_)));
        Asked { egress: limit(self.egress), ingress: limit(self.ingress) }
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
        let kind = scheme.queue(direction);
        let has = |field| scheme.info().has(field);
        let mark = match self.ecn {
            // Of another scheme; here they would say nothing.
            _ if !has("mark") && !has("ecn") => None,
            Some(EcnSetting::Above(span)) => Some(span),
            Some(EcnSetting::Off) => None,
            None => self.mark.or(base.mark),
        };
        let drop = self.drop.or(base.drop).filter(|_| has("drop"));
        let burst = self.burst.or(self.police.cbs).or(base.burst);
        let queue = VirtualQueueOptions { rate, burst, mark, drop, kind };
        let field = match self.ceiling {
            Some(_) => "ceiling",
            None => direction.name(),
        };
        queue.config().map_err(|e| {
            let field = match &e {
                ConfigError::Rate(_) => field,
                ConfigError::Span { name, .. }
                    if name.starts_with("mark") && self.ecn.is_some() =>
                {
                    "ecn"
                }
                ConfigError::Span { name, .. } => name.split(' ').next().unwrap_or(name),
                ConfigError::Order { .. } if self.ecn.is_some() => "ecn",
                ConfigError::Order { .. } if self.mark.is_none() && self.drop.is_some() => "drop",
                ConfigError::Order { .. } => "mark",
                ConfigError::Scheme(_) => "scheme",
                ConfigError::Bucket(_) => "burst",
                ConfigError::Meter(_) => "meter",
                ConfigError::Thresholds => "drop",
            };
            SettingsError { field, problem: e.into() }
        })?;
        Ok(Some(queue))
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

/// One field in which two limits differ, in words of the command line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// `egress`, `egress burst`, `loopback` ...
    pub field: String,
    pub from: String,
    pub to: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} -> {}", self.field, self.from, self.to)
    }
}

/// In what two limits differ; empty when the same was asked.
pub fn differences(from: &LimitOptions, to: &LimitOptions) -> Vec<Difference> {
    let schemes = [from.scheme, to.scheme];
    let (from, to) = (shown(from, schemes), shown(to, schemes));
    let pairs = from.into_iter().zip(to).filter(|((_, from), (_, to))| from != to);
    pairs.map(|((field, from), (_, to))| Difference { field, from, to }).collect()
}

/// The settings that limits of one of the schemes have, in words of the command line.
fn shown(of: &LimitOptions, schemes: [Scheme; 2]) -> Vec<(String, String)> {
    let chosen = of.chosen.map_or_else(|| "by name".to_owned(), |why| format!("auto, {why}"));
    let mut shown = vec![("scheme chosen".to_owned(), chosen)];
    let is_of_one = |field: &&Field| schemes.iter().any(|s| s.info().has(field.key.name));
    for field in FIELDS.iter().filter(is_of_one) {
        let name = field.key.name;
        match field.show {
            Show::No => {}
            Show::Apart(show) | Show::Whole(show) => {
                shown.push((name.to_owned(), show(of).to_string()))
            }
            Show::Each(show) => {
                for (direction, queue) in [("egress", of.egress), ("ingress", of.ingress)] {
                    let span = queue.as_ref().and_then(show);
                    let span = span.map_or_else(|| "default".to_owned(), |span| span.to_string());
                    shown.push((format!("{direction} {name}"), span));
                }
            }
        }
    }
    let unfollowed = if of.unfollowed { "yes" } else { "no" };
    shown.push(("unfollowed schedule".to_owned(), unfollowed.to_owned()));
    shown
}

/// The settings of a limit for both directions, each with its key: those that its scheme has.
pub fn whole(of: &LimitOptions) -> impl Iterator<Item = (&'static Key, Shown)> {
    let fields = FIELDS.iter().filter(|field| of.scheme.info().has(field.key.name));
    fields.filter_map(|field| match field.show {
        Show::Whole(show) => Some((&field.key, show(of))),
        _ => None,
    })
}

/// The settings of one direction of a limit that were given, each with its name.
pub fn given(
    scheme: Scheme,
    queue: &VirtualQueueOptions,
) -> impl Iterator<Item = (&'static str, Span)> {
    let fields = FIELDS.iter().filter(move |field| scheme.info().has(field.key.name));
    fields.filter_map(|field| match field.show {
        Show::Each(show) => Some((field.key.name, show(queue)?)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use tidegate_core::choice::Kernel;

    use super::*;
    use crate::auto::{Trees, Written};

    fn cgroup() -> Scope {
        Scope::Cgroup(String::new())
    }

    fn rate(text: &str) -> Option<RateSetting> {
        Some(text.parse().unwrap())
    }

    fn refusal(patch: Patch) -> String {
        patch.on(&LimitOptions::default(), &cgroup()).unwrap_err().to_string()
    }

    #[test]
    fn a_patch_changes_only_what_it_names() {
        let base = Patch { egress: rate("50mbit"), burst: "2ms".parse().ok(), ..Patch::default() };
        let base = base.on(&LimitOptions::default(), &cgroup()).unwrap();
        let changed =
            Patch { egress: rate("10mbit"), ..Patch::default() }.on(&base, &cgroup()).unwrap();
        assert_eq!(changed.egress.unwrap().rate.to_string(), "10mbit");
        assert_eq!(changed.egress.unwrap().burst, base.egress.unwrap().burst);
        let both =
            Patch { ingress: rate("1gbit"), ..Patch::default() }.on(&base, &cgroup()).unwrap();
        assert_eq!(both.egress, base.egress);
        let swapped =
            Patch { egress: rate("none"), ..Patch::default() }.on(&both, &cgroup()).unwrap();
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
    fn on_the_command_line_errors_name_flags() {
        let good = Patch { egress: rate("50mbit"), ..Patch::default() };
        let of = |scheme| Patch { scheme: Some(SchemeSetting::Named(scheme)), ..good };
        let refusal = |patch: Patch, scope: &Scope| {
            patch.on(&LimitOptions::default(), scope).unwrap_err().problem.as_flags()
        };
        let on_cgroup = |patch| refusal(patch, &cgroup());
        insta::assert_snapshot!(on_cgroup(of(Scheme::Tbf)), @"scheme `tbf` works on devices, ports; on a cgroup write --scheme pace, nrm, edt or police");
        insta::assert_snapshot!(on_cgroup(Patch { pace_ceiling: Some(true), ..of(Scheme::Edt) }), @"scheme `edt` has no `pace-ceiling`; it has egress, burst, mark, drop, exempt, loopback; leave this out, or write --scheme nrm");
        insta::assert_snapshot!(on_cgroup(Patch { ingress: rate("9mbit"), ..of(Scheme::Edt) }), @"on a cgroup, scheme `edt` limits egress only; write --ingress none, or --scheme pace, nrm or police");
        insta::assert_snapshot!(on_cgroup(Patch { matched: "10.0.0.2".parse().ok(), ..of(Scheme::Police) }), @"a limit for prefixes is on the device or port behind which they are; write --dev or --port, or leave this out");
        let inside = of(Scheme::Police).on(&inside_another(), &cgroup()).unwrap_err();
        insta::assert_snapshot!(inside.problem.as_flags(), @"scheme `police` neither has a parent nor is one; write --scheme pace or nrm (htb inside a device's limit), or leave the parent out");
        let xdp = PolicePatch { hook: "xdp".parse().ok(), ..PolicePatch::default() };
        let xdp = Patch { police: xdp, ..of(Scheme::Police) };
        insta::assert_snapshot!(on_cgroup(xdp), @"XDP polices incoming traffic of a device: write --scheme police, --dev and --ingress, and no --match; or leave it out");
    }

    #[test]
    fn differences_are_in_the_users_words() {
        let a = Patch { egress: rate("50mbit"), ..Patch::default() };
        let b = Patch { egress: rate("9mbit"), burst: "3ms".parse().ok(), ..Patch::default() };
        let on = |p: Patch| p.on(&LimitOptions::default(), &cgroup()).unwrap();
        let shown: Vec<_> = differences(&on(a), &on(b)).iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["egress 50mbit -> 9mbit", "egress burst default -> 3ms"]);
        assert!(differences(&on(a), &on(a)).is_empty());
    }

    #[test]
    fn another_scheme_limits_the_same_and_says_what_goes() {
        let scope = Scope::Dev("eth0".to_owned());
        let police = Patch {
            egress: rate("50mbit"),
            scheme: Some(SchemeSetting::Named(Scheme::Police)),
            ..Patch::default()
        };
        let on = |patch: Patch| patch.on(&LimitOptions::default(), &scope).unwrap();
        let matched = on(Patch { matched: "10.0.0.2".parse().ok(), ..police });
        let tbf = Patch { scheme: Some(SchemeSetting::Named(Scheme::Tbf)), ..Patch::default() };
        assert_eq!(tbf.on(&matched, &scope).unwrap_err().field, "match");
        let auto = Patch { scheme: Some(SchemeSetting::Auto), ..Patch::default() };
        let written = Written { name: "a", scope: &scope, parent: None, patch: &auto };
        let chosen = written.options_on(matched, &Trees::default(), Kernel::WHOLE, None).unwrap();
        assert_eq!((chosen.scheme, chosen.matched), (Scheme::Police, matched.matched));
        let fair = PolicePatch { fair: Some(true), ..PolicePatch::default() };
        let fair = on(Patch { police: fair, ..police });
        let changes = differences(&fair, &tbf.on(&fair, &scope).unwrap());
        assert!(changes.iter().any(|d| d.field == "fair" && d.to == "false"), "{changes:?}");
    }
}
