//! Rates, byte counts and times: the types, and the only parser for a user's text.
//!
//! The units are `tc`'s. Rates: `bit kbit mbit gbit tbit` (powers of 1000). Sizes: `b kb mb gb` (powers of
//! 1024, as `tc` reads them). Times: `ns us ms s`. Fractions are allowed and a unit is required, in any case.
//! One unit of `tc` is refused: `mbps` there means mega*bytes*, and nearly everybody who types it means
//! megabits; the error shows both readings.
//!
//! Arithmetic is exact (128-bit integers, no floating point), rounded to the nearest unit.

use alloc::{boxed::Box, string::String, string::ToString, vec::Vec};
use core::{fmt, str::FromStr};

/// Nanoseconds in a second.
pub const NANOS_PER_SEC: u64 = 1_000_000_000;
/// The slowest limit: below it the cost of a large segment exceeds 64 bits.
pub const MIN_RATE_BIT_S: u64 = 8_000;
/// The fastest limit: above it the fixed-point cost of a byte is off by more than 1e-6.
pub const MAX_RATE_BIT_S: u64 = 100_000_000_000;

/// A time or a span of time in nanoseconds. As a time: since an origin that the caller chooses.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

/// A data rate in bit/s; never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate(u64);

/// A number of bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// An amount of traffic, as time at the limit's rate or as bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Span {
    /// A time at the limit's rate.
    Time(Nanos),
    /// A number of bytes.
    Size(Bytes),
}

impl Rate {
    /// `bit_s` bits a second, or `None` for zero.
    #[must_use]
    pub const fn from_bit_s(bit_s: u64) -> Option<Rate> {
        if bit_s == 0 { None } else { Some(Rate(bit_s)) }
    }

    /// Bits a second.
    #[must_use]
    pub const fn bit_s(self) -> u64 {
        self.0
    }

    /// How long `bytes` take at this rate, rounded down; saturates.
    #[must_use]
    pub fn time_for(self, bytes: Bytes) -> Nanos {
        let ns = u128::from(bytes.0) * 8 * u128::from(NANOS_PER_SEC) / u128::from(self.0);
        Nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// How many whole bytes this rate carries in `time`; saturates.
    #[must_use]
    pub fn bytes_in(self, time: Nanos) -> Bytes {
        let bytes = u128::from(time.0) * u128::from(self.0) / 8 / u128::from(NANOS_PER_SEC);
        Bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

impl Span {
    /// The span as time at `rate`.
    #[must_use]
    pub fn at(self, rate: Rate) -> Nanos {
        match self {
            Span::Time(time) => time,
            Span::Size(bytes) => rate.time_for(bytes),
        }
    }
}

/// Why a text is not a rate, size or time. The message says what was read and what to type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// An empty text.
    #[error("empty {what}; write for example {example}")]
    Empty {
        /// The kind of text that was expected.
        what: &'static str,
        /// A valid example.
        example: &'static str,
    },
    /// The number is not a plain decimal.
    #[error("`{text}` does not start with a plain decimal number; write for example {example}")]
    Number {
        /// The text as it was read.
        text: String,
        /// A valid example.
        example: &'static str,
    },
    /// A minus sign.
    #[error("`{text}` is negative; write for example {example}")]
    Negative {
        /// The text as it was read.
        text: String,
        /// A valid example.
        example: &'static str,
    },
    /// A number without a unit.
    #[error("`{text}` has no unit; write for example `{text}{example}` (one of {units})")]
    NoUnit {
        /// The text as it was read.
        text: String,
        /// A unit that may have been meant.
        example: &'static str,
        /// The valid units.
        units: &'static str,
    },
    /// An unknown unit.
    #[error("`{text}`: unknown unit `{unit}`; use one of {units}")]
    UnknownUnit {
        /// The text as it was read.
        text: String,
        /// The unit in it.
        unit: String,
        /// The valid units.
        units: &'static str,
    },
    /// tc's byte-per-second words.
    #[error(
        "`{text}`: `{unit}` means {bytes_word} per second to tc and {bits_word} per second to most \
         people; write `{as_bits}` for {bits_word}, or `{as_bytes}` for {bytes_word}"
    )]
    Ambiguous {
        /// The text as it was read.
        text: String,
        /// The unit in it.
        unit: Box<str>,
        /// The byte reading in words.
        bytes_word: &'static str,
        /// The bit reading in words.
        bits_word: &'static str,
        /// The text to type for the bit reading.
        as_bits: Box<str>,
        /// The text to type for the byte reading.
        as_bytes: Box<str>,
    },
    /// Zero, or so little that it rounds to zero.
    #[error("`{text}` is zero; write for example {example}")]
    Zero {
        /// The text as it was read.
        text: String,
        /// A valid example.
        example: &'static str,
    },
    /// More than 64 bits hold.
    #[error("`{text}` is too large")]
    TooLarge {
        /// The text as it was read.
        text: String,
    },
}

/// A kind of quantity: its units with their multipliers, and its words for messages.
struct Kind {
    what: &'static str,
    example: &'static str,
    unit_example: &'static str,
    units: &'static str,
    table: &'static [(&'static str, u64)],
}

const RATE: Kind = Kind {
    what: "rate",
    example: "`50mbit`",
    unit_example: "mbit",
    units: "bit, kbit, mbit, gbit, tbit",
    table: &[
        ("bit", 1),
        ("kbit", 1_000),
        ("mbit", 1_000_000),
        ("gbit", 1_000_000_000),
        ("tbit", 1_000_000_000_000),
    ],
};

const SIZE: Kind = Kind {
    what: "size",
    example: "`15kb`",
    unit_example: "kb",
    units: "b, kb, mb, gb",
    table: &[("b", 1), ("kb", 1 << 10), ("mb", 1 << 20), ("gb", 1 << 30)],
};

const TIME: Kind = Kind {
    what: "time",
    example: "`1ms`",
    unit_example: "ms",
    units: "ns, us, ms, s",
    table: &[("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", NANOS_PER_SEC)],
};

const SPAN: Kind = Kind {
    what: "time or size",
    example: "`1ms` or `15kb`",
    unit_example: "ms",
    units: "ns, us, ms, s, b, kb, mb, gb",
    table: &[],
};

/// tc's words for bytes a second: the word, the multiplier in bytes, the two readings.
const BYTE_RATES: &[(&str, u64, &str, &str, &str)] = &[
    ("bps", 1, "bit", "bytes", "bits"),
    ("kbps", 1_000, "kbit", "kilobytes", "kilobits"),
    ("mbps", 1_000_000, "mbit", "megabytes", "megabits"),
    ("gbps", 1_000_000_000, "gbit", "gigabytes", "gigabits"),
    ("tbps", 1_000_000_000_000, "tbit", "terabytes", "terabits"),
];

/// A decimal number as an integer and its number of fractional digits.
struct Decimal {
    digits: u128,
    scale: u32,
}

/// The most digits of a number: enough for any rate, and safe to multiply in 128 bits.
const MAX_DIGITS: usize = 24;

/// Splits `text` into number and unit, and reads the number.
fn split<'a>(text: &'a str, kind: &Kind) -> Result<(&'a str, Decimal, &'a str), ParseError> {
    let text = text.trim();
    let number_error = || ParseError::Number { text: text.to_string(), example: kind.example };
    if text.is_empty() {
        return Err(ParseError::Empty { what: kind.what, example: kind.example });
    }
    if text.starts_with('-') {
        return Err(ParseError::Negative { text: text.to_string(), example: kind.example });
    }
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(number_error());
    }
    if whole.len() + fraction.len() > MAX_DIGITS {
        return Err(ParseError::TooLarge { text: text.to_string() });
    }
    let digits = whole.bytes().chain(fraction.bytes());
    let digits = digits.fold(0u128, |sum, b| sum * 10 + u128::from(b - b'0'));
    let scale = fraction.len() as u32;
    let unit = unit.trim();
    if unit.is_empty() {
        return Err(ParseError::NoUnit {
            text: text.to_string(),
            example: kind.unit_example,
            units: kind.units,
        });
    }
    Ok((text, Decimal { digits, scale }, unit))
}

impl Decimal {
    /// The number times `multiplier`, rounded to the nearest integer.
    fn times(&self, multiplier: u64) -> Option<u64> {
        let product = self.digits.checked_mul(u128::from(multiplier))?;
        let divisor = 10u128.checked_pow(self.scale)?;
        u64::try_from(product.checked_add(divisor / 2)? / divisor).ok()
    }
}

fn parse(text: &str, kind: &Kind) -> Result<u64, ParseError> {
    let (text, number, unit) = split(text, kind)?;
    let found = kind.table.iter().find(|(name, _)| unit.eq_ignore_ascii_case(name));
    let Some((_, multiplier)) = found else {
        return Err(ParseError::UnknownUnit {
            text: text.to_string(),
            unit: unit.to_string(),
            units: kind.units,
        });
    };
    let value = number.times(*multiplier);
    value.ok_or_else(|| ParseError::TooLarge { text: text.to_string() })
}

impl FromStr for Rate {
    type Err = ParseError;

    /// Reads a rate such as `50mbit` or `1.5gbit`.
    fn from_str(text: &str) -> Result<Rate, ParseError> {
        let (whole, number, unit) = split(text, &RATE).map_err(|error| match error {
            ParseError::NoUnit { text, .. } if text.bytes().all(|byte| b"0.".contains(&byte)) => {
                ParseError::Zero { text, example: RATE.example }
            }
            error => error,
        })?;
        let trap = BYTE_RATES.iter().find(|(name, ..)| unit.eq_ignore_ascii_case(name));
        if let Some((_, multiplier, bit_unit, bytes_word, bits_word)) = trap {
            let figure = whole[..whole.len() - unit.len()].trim();
            let bytes_s = number.times(*multiplier);
            let bit_s = bytes_s.and_then(|b| b.checked_mul(8)).and_then(Rate::from_bit_s);
            return Err(ParseError::Ambiguous {
                text: whole.to_string(),
                unit: unit.into(),
                bytes_word,
                bits_word,
                as_bits: alloc::format!("{figure}{bit_unit}").into(),
                as_bytes: bit_s.map_or_else(|| "a smaller rate".into(), |r| r.to_string().into()),
            });
        }
        let bit_s = parse(text, &RATE)?;
        Rate::from_bit_s(bit_s)
            .ok_or_else(|| ParseError::Zero { text: whole.to_string(), example: RATE.example })
    }
}

impl FromStr for Bytes {
    type Err = ParseError;

    /// Reads a size such as `15kb`.
    fn from_str(text: &str) -> Result<Bytes, ParseError> {
        parse(text, &SIZE).map(Bytes)
    }
}

impl FromStr for Nanos {
    type Err = ParseError;

    /// Reads a time such as `1ms`.
    fn from_str(text: &str) -> Result<Nanos, ParseError> {
        parse(text, &TIME).map(Nanos)
    }
}

impl FromStr for Span {
    type Err = ParseError;

    /// Reads a time such as `1ms` or a size such as `15kb`.
    fn from_str(text: &str) -> Result<Span, ParseError> {
        let (whole, _, unit) = split(text, &SPAN)?;
        let is = |kind: &Kind| kind.table.iter().any(|(name, _)| unit.eq_ignore_ascii_case(name));
        if is(&TIME) {
            Ok(Span::Time(text.parse()?))
        } else if is(&SIZE) {
            Ok(Span::Size(text.parse()?))
        } else {
            Err(ParseError::UnknownUnit {
                text: whole.to_string(),
                unit: unit.to_string(),
                units: SPAN.units,
            })
        }
    }
}

/// Writes `value` in the largest unit of `table` that keeps it exact with at most three decimals.
fn display(f: &mut fmt::Formatter<'_>, value: u64, table: &[(&str, u64)]) -> fmt::Result {
    let fits = |multiplier: u64| {
        let thousandths = u128::from(value) * 1000;
        value >= multiplier && thousandths.is_multiple_of(u128::from(multiplier))
    };
    let candidates: Vec<_> = table.iter().filter(|(_, multiplier)| fits(*multiplier)).collect();
    let Some((unit, multiplier)) = candidates.last().or(table.first().as_ref()) else {
        return write!(f, "{value}");
    };
    let thousandths = u128::from(value) * 1000 / u128::from(*multiplier);
    let (whole, fraction) = (thousandths / 1000, thousandths % 1000);
    if fraction == 0 {
        write!(f, "{whole}{unit}")
    } else {
        let fraction = alloc::format!("{fraction:03}");
        write!(f, "{whole}.{}{unit}", fraction.trim_end_matches('0'))
    }
}

impl fmt::Display for Rate {
    /// As [`Rate::from_str`] reads it back, exactly.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(f, self.0, RATE.table)
    }
}

impl fmt::Display for Bytes {
    /// As [`Bytes::from_str`] reads it back, exactly.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(f, self.0, SIZE.table)
    }
}

impl fmt::Display for Nanos {
    /// As [`Nanos::from_str`] reads it back, exactly.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(f, self.0, TIME.table)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Span::Time(time) => time.fmt(f),
            Span::Size(bytes) => bytes.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rate(text: &str) -> u64 {
        text.parse::<Rate>().unwrap().bit_s()
    }

    fn refusal(text: &str) -> String {
        text.parse::<Rate>().unwrap_err().to_string()
    }

    #[test]
    fn rates_read_as_tc_reads_them() {
        assert_eq!(rate("8bit"), 8);
        assert_eq!(rate("50mbit"), 50_000_000);
        assert_eq!(rate(" 1.5 GBit "), 1_500_000_000);
        assert_eq!(rate(".5kbit"), 500);
        assert_eq!(rate("2.tbit"), 2_000_000_000_000);
        assert_eq!(rate("0.0000015mbit"), 2, "rounded to the nearest bit/s");
    }

    #[test]
    fn sizes_are_powers_of_1024_and_times_of_1000() {
        assert_eq!("15kb".parse(), Ok(Bytes(15 * 1024)));
        assert_eq!("1.5mb".parse(), Ok(Bytes(3 << 19)));
        assert_eq!("1500b".parse(), Ok(Bytes(1500)));
        assert_eq!("1.5ms".parse(), Ok(Nanos(1_500_000)));
        assert_eq!("2s".parse(), Ok(Nanos(2_000_000_000)));
        assert_eq!("1ms".parse(), Ok(Span::Time(Nanos(1_000_000))));
        assert_eq!("15KB".parse(), Ok(Span::Size(Bytes(15 * 1024))));
        assert!("15mbit".parse::<Span>().is_err());
    }

    #[test]
    fn the_mbps_trap_shows_both_readings() {
        assert_eq!(
            refusal("50mbps"),
            "`50mbps`: `mbps` means megabytes per second to tc and megabits per second to most people; \
             write `50mbit` for megabits, or `400mbit` for megabytes"
        );
        assert!(refusal("1Gbps").contains("`8gbit`"));
        assert!(refusal("99999999999999999tbps").contains("a smaller rate"));
    }

    #[test]
    fn every_refusal_says_what_to_type() {
        assert_eq!(
            refusal("50"),
            "`50` has no unit; write for example `50mbit` (one of bit, kbit, mbit, gbit, tbit)"
        );
        assert_eq!(
            refusal("5mb"),
            "`5mb`: unknown unit `mb`; use one of bit, kbit, mbit, gbit, tbit"
        );
        assert_eq!(refusal("-5mbit"), "`-5mbit` is negative; write for example `50mbit`");
        assert_eq!(refusal("0mbit"), "`0mbit` is zero; write for example `50mbit`");
        assert_eq!(refusal("0"), "`0` is zero; write for example `50mbit`");
        assert_eq!(refusal(""), "empty rate; write for example `50mbit`");
        for junk in ["mbit", ".mbit", "1.2.3mbit", "1e3mbit", "0x1mbit", "١mbit", "1,5mbit"] {
            assert!(junk.parse::<Rate>().is_err(), "{junk}");
        }
        assert_eq!(refusal("99999999999gbit"), "`99999999999gbit` is too large");
        assert_eq!(
            refusal("1000000000000000000000000000bit"),
            "`1000000000000000000000000000bit` is too large"
        );
    }

    #[test]
    fn display_is_short_and_exact() {
        let shown = |bit_s| Rate::from_bit_s(bit_s).unwrap().to_string();
        assert_eq!(shown(50_000_000), "50mbit");
        assert_eq!(shown(1_500_000_000), "1.5gbit");
        assert_eq!(shown(1_234_567), "1234.567kbit");
        assert_eq!(shown(1), "1bit");
        assert_eq!(Bytes(0).to_string(), "0b");
        assert_eq!(Nanos(4_500_000).to_string(), "4.5ms");
    }

    #[test]
    fn time_and_bytes_are_each_others_inverse() {
        let rate: Rate = "1gbit".parse().unwrap();
        assert_eq!(rate.time_for(Bytes(1500)), Nanos(12_000));
        assert_eq!(rate.bytes_in(Nanos(12_000)), Bytes(1500));
        assert_eq!(rate.bytes_in(Nanos(u64::MAX)), Bytes(u64::MAX / 8), "no overflow");
    }

    proptest! {
        #[test]
        fn what_is_displayed_reads_back(bit_s in 1u64.., bytes: u64, ns: u64) {
            let rate = Rate::from_bit_s(bit_s).unwrap();
            prop_assert_eq!(rate.to_string().parse(), Ok(rate));
            prop_assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)));
            prop_assert_eq!(Nanos(ns).to_string().parse(), Ok(Nanos(ns)));
        }

        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = text.parse::<Rate>();
            let _ = text.parse::<Span>();
        }
    }
}
