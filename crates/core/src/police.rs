//! The additions of a policer to its bucket: the meter that colours packets, and an action for each colour.
//!
//! The committed rate and burst are the limit's own; a [`MeterOptions`] adds the second bucket of srTCM (RFC
//! 2697), trTCM (RFC 2698) or RFC 4115 ([`crate::meter`]). Without a meter packets without tokens are red.

use alloc::{borrow::ToOwned, string::String};
use core::{fmt, str::FromStr};

use crate::{
    burst::policer_burst,
    meter::{Colour, ColourMode, Coupling, MeterConfig},
    queue_options::{ConfigError, VirtualQueueOptions},
    token_bucket::BucketConfig,
    units::{ParseError, Rate, Span},
};

/// A differentiated services code point (RFC 2474), 0 to 63.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dscp(u8);

/// Names of DSCPs that are not class selectors (`cs0` to `cs7`) nor assured forwarding (`af11` to `af43`):
/// RFC 2597, 3246, 5865, 8622.
const NAMES: [(&str, u8); 5] = [("be", 0), ("df", 0), ("ef", 46), ("va", 44), ("le", 1)];

impl Dscp {
    /// A DSCP by its number; `None` above 63.
    #[must_use]
    pub fn new(value: u8) -> Option<Dscp> {
        (value < 64).then_some(Dscp(value))
    }

    /// Its number.
    #[must_use]
    pub fn value(self) -> u8 {
        self.0
    }
}

impl FromStr for Dscp {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let digit = |c: u8, most: u8| (b'1'..=most).contains(&c).then(|| c - b'0');
        let lower = text.to_ascii_lowercase();
        let named = || NAMES.iter().find(|(name, _)| *name == lower).map(|(_, value)| *value);
        let value = match lower.as_bytes() {
            [b'a', b'f', class, drop] => digit(*class, b'4')
                .zip(digit(*drop, b'3'))
                .map(|(class, drop)| class * 8 + drop * 2),
            [b'c', b's', b'0'] => Some(0),
            [b'c', b's', class] => digit(*class, b'7').map(|class| class * 8),
            _ => named().or_else(|| lower.parse().ok()),
        };
        value.and_then(Dscp::new).ok_or_else(|| PolicyError::Dscp(text.to_owned()))
    }
}

impl fmt::Display for Dscp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Dscp(value) = *self;
        let named = NAMES.iter().find(|(_, of)| *of == value && value != 0);
        match (value / 8, value % 8) {
            _ if named.is_some() => f.write_str(named.map_or("", |(name, _)| name)),
            (class, 0) => write!(f, "cs{class}"),
            (class @ 1..=4, drop @ (2 | 4 | 6)) => write!(f, "af{class}{}", drop / 2),
            _ => write!(f, "{value}"),
        }
    }
}

/// The action for a colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// The packet passes unchanged.
    Pass,
    /// It is dropped.
    Drop,
    /// It passes with ECN congestion experienced; a packet that is not ECN-capable is dropped (RFC 3168).
    Ce,
    /// It passes with this DSCP.
    Dscp(Dscp),
}

impl FromStr for Action {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let mut words = text.split([' ', ':']).filter(|word| !word.is_empty());
        match (words.next(), words.next(), words.next()) {
            (Some("pass"), None, None) => Ok(Action::Pass),
            (Some("drop"), None, None) => Ok(Action::Drop),
            (Some("ce"), None, None) => Ok(Action::Ce),
            (Some("dscp"), Some(dscp), None) => dscp.parse().map(Action::Dscp),
            _ => Err(PolicyError::Action(text.to_owned())),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Pass => f.write_str("pass"),
            Action::Drop => f.write_str("drop"),
            Action::Ce => f.write_str("ce"),
            Action::Dscp(dscp) => write!(f, "dscp {dscp}"),
        }
    }
}

/// The kernel hook that polices ingress of a device.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hook {
    /// At tc: a tcx link, or a filter of clsact.
    #[default]
    Auto,
    /// XDP: before the kernel makes packets.
    Xdp,
}

impl Hook {
    /// As a user writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Hook::Auto => "auto",
            Hook::Xdp => "xdp",
        }
    }
}

impl FromStr for Hook {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let found = [Hook::Auto, Hook::Xdp].into_iter().find(|hook| hook.name() == text);
        found.ok_or_else(|| PolicyError::Hook(text.to_owned()))
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The kind of a meter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MeterType {
    /// srTCM, RFC 2697.
    SrTcm,
    /// trTCM, RFC 2698.
    TrTcm,
    /// RFC 4115.
    Rfc4115,
}

impl MeterType {
    /// As a user writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MeterType::SrTcm => "srtcm",
            MeterType::TrTcm => "trtcm",
            MeterType::Rfc4115 => "rfc4115",
        }
    }

    /// The names of its second rate and burst.
    #[must_use]
    pub fn second(self) -> (Option<&'static str>, &'static str) {
        match self {
            MeterType::SrTcm => (None, "ebs"),
            MeterType::TrTcm => (Some("pir"), "pbs"),
            MeterType::Rfc4115 => (Some("eir"), "ebs"),
        }
    }
}

impl FromStr for MeterType {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let all = [MeterType::SrTcm, MeterType::TrTcm, MeterType::Rfc4115];
        let found = all.into_iter().find(|kind| kind.name() == text.to_ascii_lowercase());
        found.ok_or_else(|| PolicyError::MeterType(text.to_owned()))
    }
}

/// The incoming colour of a packet, by its DSCP: bit d is DSCP d; green has no bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ColourMap {
    /// DSCPs that are yellow.
    pub yellow: u64,
    /// DSCPs that are red.
    pub red: u64,
}

impl Default for ColourMap {
    /// Drop precedence of assured forwarding (RFC 2597): AFx2 is yellow, AFx3 red, all else green.
    fn default() -> Self {
        let drop =
            |drop: u8| (1u8..=4).fold(0, |mask, class| mask | 1u64 << (class * 8 + drop * 2));
        ColourMap { yellow: drop(2), red: drop(3) }
    }
}

impl ColourMap {
    /// The colour of a DSCP.
    #[must_use]
    pub fn colour(&self, dscp: Dscp) -> Colour {
        let has = |mask: u64| mask >> dscp.value() & 1 != 0;
        match (has(self.red), has(self.yellow)) {
            (true, _) => Colour::Red,
            (_, true) => Colour::Yellow,
            _ => Colour::Green,
        }
    }
}

impl FromStr for ColourMap {
    type Err = PolicyError;

    /// As a meter shows it: the masks of yellow and red, `0x1000/0x4000`.
    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let mask = |mask: &str| u64::from_str_radix(mask.strip_prefix("0x")?, 16).ok();
        let map = text
            .split_once('/')
            .and_then(|(yellow, red)| Some(ColourMap { yellow: mask(yellow)?, red: mask(red)? }));
        map.ok_or_else(|| PolicyError::Colours(text.to_owned()))
    }
}

/// The second bucket of a meter; the committed one is the limit's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MeterOptions {
    /// The kind.
    pub kind: MeterType,
    /// Peak or excess rate; none with srTCM.
    pub rate: Option<Rate>,
    /// Its depth; by default that of the committed bucket, or [`policer_burst`] for its own rate.
    pub burst: Option<Span>,
    /// Colours that count; `None`: colour-blind.
    pub colours: Option<ColourMap>,
}

impl MeterOptions {
    /// A meter of which only the kind is known yet.
    #[must_use]
    pub fn new(kind: MeterType) -> MeterOptions {
        MeterOptions { kind, rate: None, burst: None, colours: None }
    }

    /// The default depth of the second bucket.
    fn unsaid_burst(&self, committed: &BucketConfig) -> Result<BucketConfig, ConfigError> {
        let bucket = match self.rate {
            None => Ok(*committed),
            Some(rate) => BucketConfig::new(rate, policer_burst(rate)),
        };
        bucket.map_err(ConfigError::Bucket)
    }
}

/// The policy of a policer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The meter; `None`: packets without tokens are red.
    pub meter: Option<MeterOptions>,
    /// By [`Colour`].
    pub actions: [Action; 3],
    /// Whether flows have equal parts of the bucket ([`crate::fair_police`]); not with a meter.
    pub fair: bool,
    /// The hook for ingress of its device.
    pub hook: Hook,
}

impl Default for Policy {
    /// A bucket whose red packets are dropped.
    fn default() -> Self {
        let actions = [Action::Pass, Action::Pass, Action::Drop];
        Policy { meter: None, actions, fair: false, hook: Hook::Auto }
    }
}

impl Policy {
    /// Whether some packets get another DSCP.
    #[must_use]
    pub fn rewrites(&self) -> bool {
        self.actions.iter().any(|action| matches!(action, Action::Dscp(_)))
    }

    /// The meter of a direction, if there is one.
    ///
    /// # Errors
    /// [`ConfigError`] for an invalid bucket or meter.
    pub fn meter(&self, queue: &VirtualQueueOptions) -> Result<Option<MeterConfig>, ConfigError> {
        let Some(meter) = self.meter else { return Ok(None) };
        let committed = queue.bucket()?;
        let rate = meter.rate.unwrap_or(queue.rate);
        let second = match meter.burst {
            None => meter.unsaid_burst(&committed),
            Some(Span::Size(bytes)) => BucketConfig::new(rate, bytes).map_err(ConfigError::Bucket),
            Some(Span::Time(time)) => {
                BucketConfig::lasting(rate, time).map_err(ConfigError::Bucket)
            }
        }?;
        let coupling = match meter.kind {
            MeterType::SrTcm => Coupling::Overflow,
            MeterType::TrTcm => Coupling::Covering,
            MeterType::Rfc4115 => Coupling::Apart,
        };
        let mode = if meter.colours.is_some() { ColourMode::Aware } else { ColourMode::Blind };
        let config = MeterConfig { coupling, mode, committed, second };
        config.check().map_err(ConfigError::Meter)?;
        Ok(Some(config))
    }
}

/// Why a text or a table is not a policy. The message says what to type instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// Invalid DSCP.
    #[error(
        "`{0}` is no DSCP; write ef, af11 to af43, cs0 to cs7, va, le, or a number from 0 to 63"
    )]
    Dscp(String),
    /// Invalid action.
    #[error("`{0}` is no action; write pass, drop, ce, or for example `dscp af12`")]
    Action(String),
    /// Invalid hook.
    #[error("`{0}` is no hook; write auto or xdp")]
    Hook(String),
    /// Invalid colour.
    #[error("`{0}` is no colour; write green, yellow or red")]
    Colour(String),
    /// Invalid meter.
    #[error("unknown meter `{0}`; write srtcm, trtcm or rfc4115")]
    MeterType(String),
    /// A key that this meter does not have.
    #[error("{kind} has no `{key}`; it has {has} and colour_aware")]
    MeterKey {
        /// The meter.
        kind: &'static str,
        /// As written.
        key: String,
        /// The keys that it has.
        has: String,
    },
    /// A rate is missing.
    #[error("{kind} needs `{key}`; write for example {key} = \"100mbit\"")]
    MeterRate {
        /// The meter.
        kind: &'static str,
        /// The key.
        key: &'static str,
    },
    /// An invalid value of a meter.
    #[error("{key}: {problem}")]
    MeterValue {
        /// Its key.
        key: String,
        /// The problem with it.
        problem: ParseError,
    },
    /// Invalid map of colours.
    #[error(
        "`{0}` is no map of colours; write the code points that are yellow and red as bits, for example \
         0x1000/0x4000"
    )]
    Colours(String),
    /// Neither true nor false.
    #[error("{0}: write true or false")]
    Flag(String),
}

/// The index of a colour in [`Policy::actions`], by its name.
///
/// # Errors
/// [`PolicyError::Colour`].
pub fn colour_index(name: &str) -> Result<usize, PolicyError> {
    let found = COLOUR_NAMES.iter().position(|colour| *colour == name.to_ascii_lowercase());
    found.ok_or_else(|| PolicyError::Colour(name.to_owned()))
}

/// The names of the colours, in the order of [`Colour`].
pub const COLOUR_NAMES: [&str; 3] = ["green", "yellow", "red"];

/// A meter as written, key by key, in any order.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct MeterText {
    kind: Option<MeterType>,
    /// Depth of the committed bucket.
    pub cbs: Option<Span>,
    second: [Option<(String, String)>; 2],
    colours: Option<ColourMap>,
}

impl MeterText {
    /// Takes one key: `type`, `cbs`, `ebs`, `pbs`, `pir`, `eir`, `colour_aware` or `colours`.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), PolicyError> {
        match key {
            "type" => self.kind = Some(value.parse()?),
            "cbs" => {
                let problem = |problem| PolicyError::MeterValue { key: key.to_owned(), problem };
                self.cbs = Some(value.parse().map_err(problem)?);
            }
            "colour_aware" | "color_aware" => {
                self.colours = match value {
                    "true" => Some(self.colours.unwrap_or_default()),
                    "false" => None,
                    _ => return Err(PolicyError::Flag(key.to_owned())),
                };
            }
            "colours" | "colors" => self.colours = Some(value.parse()?),
            "pir" | "eir" => self.second[0] = Some((key.to_owned(), value.to_owned())),
            // Unknown keys are refused when the type is known.
            _ => self.second[1] = Some((key.to_owned(), value.to_owned())),
        }
        Ok(())
    }

    /// DSCPs that come in as a colour; the map is then only what is written here.
    pub fn set_colours(&mut self, colours: ColourMap) {
        self.colours = Some(colours);
    }

    /// The meter.
    ///
    /// # Errors
    /// [`PolicyError`] for a key that it does not have, a missing one, or an invalid value.
    pub fn meter(&self) -> Result<MeterOptions, PolicyError> {
        let kind = self.kind.ok_or_else(|| PolicyError::MeterType(String::new()))?;
        let (rate_key, burst_key) = kind.second();
        let problem = |key: &str, problem| PolicyError::MeterValue { key: key.to_owned(), problem };
        let unknown = |key: &str| PolicyError::MeterKey {
            kind: kind.name(),
            key: key.to_owned(),
            has: rate_key.map_or_else(
                || alloc::format!("cbs, {burst_key}"),
                |rate_key| alloc::format!("cbs, {rate_key}, {burst_key}"),
            ),
        };
        let [rate, burst] = &self.second;
        let rate = match (rate, rate_key) {
            (Some((key, value)), Some(rate_key)) if key == rate_key => {
                Some(value.parse().map_err(|e| problem(key, e))?)
            }
            (Some((key, _)), _) => return Err(unknown(key)),
            (None, Some(key)) => return Err(PolicyError::MeterRate { kind: kind.name(), key }),
            (None, None) => None,
        };
        let burst = match burst {
            Some((key, value)) if key == burst_key => {
                Some(value.parse().map_err(|e| problem(key, e))?)
            }
            Some((key, _)) => return Err(unknown(key)),
            None => None,
        };
        Ok(MeterOptions { kind, rate, burst, colours: self.colours })
    }
}

impl FromStr for MeterText {
    type Err = PolicyError;

    /// As on a command line: `srtcm,ebs=200kb,colour_aware`.
    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let mut meter = MeterText::default();
        let mut parts = text.split(',').map(str::trim);
        meter.set("type", parts.next().unwrap_or_default())?;
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, "true"));
            meter.set(key.trim(), value.trim())?;
        }
        meter.meter()?;
        Ok(meter)
    }
}

impl fmt::Display for MeterOptions {
    /// As on a command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rate_key, burst_key) = self.kind.second();
        f.write_str(self.kind.name())?;
        if let (Some(key), Some(rate)) = (rate_key, self.rate) {
            write!(f, ",{key}={rate}")?;
        }
        if let Some(burst) = self.burst {
            write!(f, ",{burst_key}={burst}")?;
        }
        match self.colours {
            None => Ok(()),
            Some(colours) if colours == ColourMap::default() => f.write_str(",colour_aware"),
            Some(ColourMap { yellow, red }) => {
                write!(f, ",colours={yellow:#x}/{red:#x}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn code_points_read_as_they_are_written() {
        for value in 0..64 {
            let dscp = Dscp::new(value).unwrap();
            assert_eq!(dscp.to_string().parse(), Ok(dscp));
        }
        let value = |text: &str| text.parse().map(Dscp::value).ok();
        assert_eq!([value("af12"), value("EF"), value("cs6")], [Some(12), Some(46), Some(48)]);
        assert_eq!([value("af14"), value("64"), value("af51"), value("")], [None; 4]);
    }

    #[test]
    fn colours_are_drop_precedences() {
        let colours = ColourMap::default();
        let colour = |text: &str| colours.colour(text.parse().unwrap());
        assert_eq!(colour("af11"), Colour::Green);
        assert_eq!(colour("af42"), Colour::Yellow);
        assert_eq!(colour("af23"), Colour::Red);
        assert_eq!(colour("ef"), Colour::Green);
    }

    #[test]
    fn meters_read_as_they_are_written() {
        for text in [
            "srtcm",
            "srtcm,ebs=200kb",
            "srtcm,ebs=5ms,colour_aware",
            "trtcm,pir=100mbit",
            "trtcm,pir=100mbit,pbs=1mb",
            "rfc4115,eir=10mbit,ebs=15kb,colour_aware",
            "srtcm,colours=0x1000/0x8000000000000000",
        ] {
            let meter = text.parse::<MeterText>().unwrap().meter().unwrap();
            assert_eq!(meter.to_string(), text);
        }
        let refusal = |text: &str| text.parse::<MeterText>().unwrap_err().to_string();
        assert!(refusal("srtcm,pir=1mbit").contains("srtcm has no `pir`; it has cbs, ebs and"));
        assert!(refusal("trtcm").contains("trtcm needs `pir`"));
        assert!(refusal("trtcm,pir=1mbit,ebs=1kb").contains("it has cbs, pir, pbs"));
        assert!(refusal("rfc4115,eir=1").contains("eir: `1` has no unit"));
        assert!(refusal("tbf").contains("write srtcm, trtcm or rfc4115"));
    }

    #[test]
    fn actions_read_as_they_are_written() {
        for text in ["pass", "drop", "ce", "dscp af12", "dscp 3"] {
            assert_eq!(text.parse::<Action>().unwrap().to_string(), text);
        }
        assert!("mark".parse::<Action>().is_err());
        assert_eq!("dscp:ef".parse(), Ok(Action::Dscp(Dscp(46))));
    }
}
