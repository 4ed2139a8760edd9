//! Formatting of figures whose names carry their unit (`goodput_bit_s`, `rtt_p99_us`).
//!
//! A [`Unit`] is read off the end of a metric's or a case's key; a [`Scale`] is the SI step in which
//! several figures of one unit are shown together. This module prints; it parses no user input.

/// What a figure measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dimension {
    BitRate,
    Time,
    Bytes,
    PerSecond,
    Percent,
    Number,
}

/// The unit in which a figure is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unit {
    dimension: Dimension,
    /// Base units (bit/s, s, B) in one stored unit.
    to_base: f64,
}

/// The step in which figures are shown: `factor` base units make one `symbol`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Base units in one shown unit.
    pub factor: f64,
    /// As printed after the figure; empty for plain numbers.
    pub symbol: &'static str,
}

const fn scale(factor: f64, symbol: &'static str) -> Scale {
    Scale { factor, symbol }
}

const BIT_RATE: &[Scale] =
    &[scale(1.0, "bit/s"), scale(1e3, "kbit/s"), scale(1e6, "Mbit/s"), scale(1e9, "Gbit/s")];
const TIME: &[Scale] = &[scale(1e-9, "ns"), scale(1e-6, "µs"), scale(1e-3, "ms"), scale(1.0, "s")];
const BYTES: &[Scale] = &[scale(1.0, "B"), scale(1e3, "kB"), scale(1e6, "MB"), scale(1e9, "GB")];
const PER_SECOND: &[Scale] = &[scale(1.0, "/s"), scale(1e3, "k/s"), scale(1e6, "M/s")];
const PERCENT: &[Scale] = &[scale(1.0, "%")];
const NUMBER: &[Scale] = &[scale(1.0, "")];

/// Key endings, the longer before the shorter that it ends in.
const ENDINGS: &[(&str, Dimension, f64)] = &[
    ("_bit_s", Dimension::BitRate, 1.0),
    ("_per_s", Dimension::PerSecond, 1.0),
    ("_bytes", Dimension::Bytes, 1.0),
    ("_percent", Dimension::Percent, 1.0),
    ("_ns", Dimension::Time, 1e-9),
    ("_us", Dimension::Time, 1e-6),
    ("_ms", Dimension::Time, 1e-3),
    ("_s", Dimension::Time, 1.0),
];

/// Words that people write in capitals.
const CAPITALS: &[&str] = &["cpu", "cv", "ecn", "nrm", "rpc", "rtt", "tcp", "udp"];

impl Unit {
    /// Splits a key into its name for people and its unit: `rtt_p99_us` gives `RTT p99`, µs.
    pub fn split(key: &str) -> (String, Unit) {
        let ending = ENDINGS.iter().find_map(|&(ending, dimension, to_base)| {
            Some((key.strip_suffix(ending)?, Unit { dimension, to_base }))
        });
        let (stem, unit) =
            ending.unwrap_or((key, Unit { dimension: Dimension::Number, to_base: 1.0 }));
        let words = stem.split('_').map(|word| match word {
            _ if CAPITALS.contains(&word) => word.to_uppercase(),
            // A message's size: `10kb` is `10 KB`.
            _ if word.starts_with(|c: char| c.is_ascii_digit()) => {
                let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
                match &word[digits.len()..] {
                    size @ ("kb" | "mb") => format!("{digits} {}", size.to_uppercase()),
                    rest if !rest.is_empty() => format!("{digits} {rest}"),
                    _ => word.to_owned(),
                }
            }
            _ => word.to_owned(),
        });
        // A key has no room for a point.
        (words.collect::<Vec<_>>().join(" ").replace("p99 9", "p99.9"), unit)
    }

    /// Whether the unit has a symbol.
    pub fn is_plain(self) -> bool {
        self.dimension == Dimension::Number
    }

    /// The scale in which all of `values` read well together: the smallest is at least two (1002
    /// Mbit/s says more than 1.00 Gbit/s), unless the largest would then pass six digits.
    pub fn scale_for(self, values: impl IntoIterator<Item = f64>) -> Scale {
        let sizes = values.into_iter().map(|v| v.abs() * self.to_base).filter(|&v| v > 0.0);
        let (min, max) =
            sizes.fold((f64::INFINITY, 0.0_f64), |(low, high), v| (low.min(v), high.max(v)));
        if max == 0.0 {
            return self.stored();
        }
        let scales = self.scales();
        let fits = scales.iter().rposition(|s| min / s.factor >= 2.0).unwrap_or(0);
        *scales[fits..].iter().find(|s| max / s.factor < 1e6).unwrap_or(&scales[scales.len() - 1])
    }

    /// The scale of an axis that ends at `max`: ticks run over at least two whole units.
    pub fn axis_scale(self, max: f64) -> Scale {
        let max = max.abs() * self.to_base;
        *self.scales().iter().rev().find(|s| max / s.factor >= 2.0).unwrap_or(&self.scales()[0])
    }

    /// The figure in units of `scale`.
    pub fn shown(self, value: f64, scale: Scale) -> f64 {
        value * self.to_base / scale.factor
    }

    /// The figure with the unit that suits it, without needless zeros: `1.5 Gbit/s`, `250 µs`.
    pub fn human(self, value: f64) -> String {
        let size = value.abs() * self.to_base * (1.0 + 1e-9);
        let scale = match size {
            0.0 => self.stored(),
            _ => {
                *self.scales().iter().rev().find(|s| s.factor <= size).unwrap_or(&self.scales()[0])
            }
        };
        let number = trimmed(self.shown(value, scale));
        if scale.symbol.is_empty() { number } else { format!("{number} {}", scale.symbol) }
    }

    /// The scale that equals the stored unit.
    fn stored(self) -> Scale {
        let nearest = |s: &&Scale| s.factor >= self.to_base * 0.999;
        *self.scales().iter().find(nearest).unwrap_or(&self.scales()[0])
    }

    fn scales(self) -> &'static [Scale] {
        match self.dimension {
            Dimension::BitRate => BIT_RATE,
            Dimension::Time => TIME,
            Dimension::Bytes => BYTES,
            Dimension::PerSecond => PER_SECOND,
            Dimension::Percent => PERCENT,
            Dimension::Number => NUMBER,
        }
    }
}

/// A measured figure in three significant digits, whole from a hundred up: `951`, `28.3`, `0.983`,
/// `150,000`. A share just below one keeps a digit more, which tells it from one: `0.9991`.
pub fn measured(value: f64) -> String {
    let size = value.abs();
    if value.fract() == 0.0 || size >= 99.95 {
        return grouped(value);
    }
    match size {
        s if s >= 9.995 => format!("{value:.1}"),
        s if s >= 1.0 => format!("{value:.2}"),
        s if s >= 0.99 => format!("{value:.4}"),
        s if s >= 0.1 => format!("{value:.3}"),
        s if s >= 0.001 => format!("{value:.4}"),
        _ => format!("{value:.1e}"),
    }
}

/// At most three decimals, no trailing zeros.
pub fn trimmed(value: f64) -> String {
    if value.abs() >= 1e4 {
        return grouped(value);
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// `goodput (Mbit/s)`.
pub fn with_symbol(name: &str, symbol: &str) -> String {
    if symbol.is_empty() { name.to_owned() } else { format!("{name} ({symbol})") }
}

/// Whole, with commas from five digits up.
fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let sign = if value < 0.0 && digits != "0" { "-" } else { "" };
    if digits.len() < 5 {
        return format!("{sign}{digits}");
    }
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    format!("{sign}{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_split_into_name_and_unit() {
        for (key, name, one) in [
            ("goodput_bit_s", "goodput", "1 bit/s"),
            ("rtt_p99_us", "RTT p99", "1 µs"),
            ("completion_s", "completion", "1 s"),
            ("held_bytes", "held", "1 B"),
            ("transactions_per_s", "transactions", "1 /s"),
            ("cpu_percent", "CPU", "1 %"),
            ("flows", "flows", "1"),
            ("rpc_10kb_p99_9_us", "RPC 10 KB p99.9", "1 µs"),
            ("max_100ms_percent", "max 100 ms", "1 %"),
        ] {
            let (got, unit) = Unit::split(key);
            assert_eq!((got.as_str(), unit.human(1.0).as_str()), (name, one), "{key}");
        }
    }

    #[test]
    fn human_picks_its_step() {
        let rate = Unit::split("limit_bit_s").1;
        assert_eq!(rate.human(1e9), "1 Gbit/s");
        assert_eq!(rate.human(200e6), "200 Mbit/s");
        assert_eq!(rate.human(1.5e9), "1.5 Gbit/s");
        let time = Unit::split("rtt_us").1;
        assert_eq!(time.human(0.0), "0 µs");
        assert_eq!(time.human(10_000.0), "10 ms");
        assert_eq!(time.human(0.25), "250 ns");
        assert_eq!(Unit::split("flows").1.human(5000.0), "5000");
    }

    #[test]
    fn a_table_keeps_the_small_readable_beside_the_large() {
        let time = Unit::split("rtt_us").1;
        assert_eq!(time.scale_for([31.0, 150_000.0]).symbol, "µs");
        assert_eq!(time.scale_for([0.0]).symbol, "µs");
        assert_eq!(time.scale_for([31.0, 90e6]).symbol, "ms");
        let rate = Unit::split("limit_bit_s").1;
        assert_eq!(rate.scale_for([35e6, 4936e6]).symbol, "Mbit/s");
        assert_eq!(rate.scale_for([1.002e9]).symbol, "Mbit/s");
        assert_eq!(rate.scale_for([4.8e9]).symbol, "Gbit/s");
    }

    #[test]
    fn an_axis_spans_whole_units() {
        let rate = Unit::split("limit_bit_s").1;
        assert_eq!(rate.axis_scale(1.2e9).symbol, "Mbit/s");
        assert_eq!(rate.axis_scale(5e9).symbol, "Gbit/s");
    }

    #[test]
    fn measured_figures() {
        for (value, text) in [
            (951.3, "951"),
            (28.34, "28.3"),
            (4.917, "4.92"),
            (0.98312, "0.983"),
            (0.99912, "0.9991"),
            (0.5, "0.500"),
            (0.0123, "0.0123"),
            (0.0000123, "1.2e-5"),
            (150_000.4, "150,000"),
            (9.0, "9"),
            (0.0, "0"),
            (-0.0, "0"),
            (99.97, "100"),
            (-12_345.0, "-12,345"),
        ] {
            assert_eq!(measured(value), text, "{value}");
        }
    }
}
