//! Numbers as Kubernetes writes them (`resource.Quantity` of apimachinery): `1M`, `10Mi`, `1e6`, `0.5G`.

/// Suffixes and what they stand for: a power of two, or of ten.
const SUFFIXES: [(&str, Power); 16] = [
    ("Ki", Power::Two(10)),
    ("Mi", Power::Two(20)),
    ("Gi", Power::Two(30)),
    ("Ti", Power::Two(40)),
    ("Pi", Power::Two(50)),
    ("Ei", Power::Two(60)),
    ("n", Power::Ten(-9)),
    ("u", Power::Ten(-6)),
    ("m", Power::Ten(-3)),
    ("", Power::Ten(0)),
    ("k", Power::Ten(3)),
    ("M", Power::Ten(6)),
    ("G", Power::Ten(9)),
    ("T", Power::Ten(12)),
    ("P", Power::Ten(15)),
    ("E", Power::Ten(18)),
];
/// Digits that are read at most: more than any quantity in use.
const DIGITS_MAX: usize = 30;

#[derive(Debug, Clone, Copy)]
enum Power {
    Two(u32),
    Ten(i32),
}

/// A text as a whole number, rounded up as Kubernetes does; what is negative is 0, and what is larger than
/// the type its largest. `None` if it is no quantity.
pub fn whole(text: &str) -> Option<u64> {
    let (negative, number) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let end = number.bytes().position(|b| !b.is_ascii_digit() && b != b'.').unwrap_or(number.len());
    let (number, suffix) = number.split_at(end);
    let (before, after) = number.split_once('.').unwrap_or((number, ""));
    if after.contains('.') || before.len() + after.len() == 0 {
        return None;
    }
    let power = power(suffix)?;
    let digits = [before, after].concat();
    let digits = digits.trim_start_matches('0');
    if negative || digits.is_empty() {
        return Some(0);
    }
    if digits.len() > DIGITS_MAX {
        return None;
    }
    let mantissa: u128 = digits.parse().ok()?;
    let after = i32::try_from(after.len()).ok()?;
    let (times, ten) = match power {
        Power::Two(bits) => (1 << bits, -after),
        Power::Ten(ten) => (1, ten.saturating_sub(after)),
    };
    let Some(value) = mantissa.checked_mul(times) else { return Some(u64::MAX) };
    let Some(scale) = 10u128.checked_pow(ten.unsigned_abs()) else {
        return Some(if ten < 0 { 1 } else { u64::MAX });
    };
    let value = if ten < 0 { value.div_ceil(scale) } else { value.saturating_mul(scale) };
    Some(u64::try_from(value).unwrap_or(u64::MAX))
}

fn power(suffix: &str) -> Option<Power> {
    if let Some((_, power)) = SUFFIXES.iter().find(|(name, _)| *name == suffix) {
        return Some(*power);
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    exponent.parse().ok().map(Power::Ten)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_those_of_kubernetes() {
        let table = [
            // The pages on resources and bandwidth.
            ("128974848", 128_974_848),
            ("129e6", 129_000_000),
            ("129M", 129_000_000),
            ("128974848000m", 128_974_848),
            ("123Mi", 128_974_848),
            ("1M", 1_000_000),
            ("10M", 10_000_000),
            ("100m", 1),
            ("0.1", 1),
            // The rest of the grammar.
            ("10Mi", 10_485_760),
            ("1e6", 1_000_000),
            ("1E6", 1_000_000),
            ("1e+6", 1_000_000),
            ("1e-6", 1),
            ("500k", 500_000),
            ("1.5G", 1_500_000_000),
            ("1.5Ki", 1536),
            (".5M", 500_000),
            ("5.M", 5_000_000),
            ("+1k", 1000),
            ("0001k", 1000),
            ("1000000u", 1),
            ("1000000001n", 2),
            ("1P", 1_000_000_000_000_000),
            ("1Pi", 1 << 50),
            ("1E", 1_000_000_000_000_000_000),
            ("1Ei", 1 << 60),
            ("0", 0),
            ("-1M", 0),
            ("99E", u64::MAX),
            ("1e400", u64::MAX),
            ("1e2147483647", u64::MAX),
            ("1e-2147483648", 1),
        ];
        for (text, value) in table {
            assert_eq!(whole(text), Some(value), "{text}");
        }
        for no in [
            "",
            "M",
            ".",
            "+",
            "-",
            "1K",
            "1mi",
            "1KiB",
            "1 M",
            " 1M",
            "1M ",
            "1mbit",
            "1e",
            "1ex",
            "1e+-6",
            "1.2.3",
            "0x10",
            "--1",
            "1,5M",
            "1g",
            "1eM",
            "fast",
            "1e99999999999",
            "１M",
        ] {
            assert_eq!(whole(no), None, "{no}");
        }
        assert_eq!(whole(&"9".repeat(31)), None);
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "[-+.0-9eEkKmMGTPinu]{0,40}|\\PC{0,12}") {
            let _ = whole(&text);
        }
    }
}
