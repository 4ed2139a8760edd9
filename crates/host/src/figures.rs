//! Measured figures in units, as people read them.

/// Four significant digits in the largest unit that keeps the figure above one.
fn figure(value: f64, units: &[(&str, f64)]) -> String {
    let unit = units.iter().rev().find(|(_, size)| value.abs() >= *size).or(units.first());
    let Some((name, size)) = unit else { return value.to_string() };
    let scaled = value / size;
    let decimals = match scaled.abs() {
        x if x >= 999.95 || *size <= 1.0 => 0,
        x if x >= 99.995 => 1,
        x if x >= 9.9995 => 2,
        _ => 3,
    };
    let text = format!("{scaled:.decimals$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{name}")
}

/// A measured rate.
pub fn rate(bit_s: u64) -> String {
    figure(bit_s as f64, &[("bit", 1.0), ("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)])
}

/// A counted size, in the units of the command line.
pub fn size(bytes: u64) -> String {
    const K: f64 = 1024.0;
    figure(bytes as f64, &[("b", 1.0), ("kb", K), ("mb", K * K), ("gb", K * K * K)])
}

/// A measured time.
pub fn time(ns: i64) -> String {
    figure(ns as f64, &[("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_keep_four_digits() {
        assert_eq!(rate(0), "0bit");
        assert_eq!(rate(48_712_345), "48.71mbit");
        assert_eq!(rate(50_000_000), "50mbit");
        assert_eq!(rate(999_960_000), "1000mbit");
        assert_eq!(rate(123_456), "123.5kbit");
        assert_eq!(size(1536), "1.5kb");
        assert_eq!(size(90), "90b");
        assert_eq!(time(-1_000_000), "-1ms");
        assert_eq!(time(312_499), "312.5us");
    }
}
