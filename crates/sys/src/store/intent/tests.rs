use proptest::prelude::*;
use tidegate_core::choice::Why;
use tidegate_core::{
    Bytes, Nanos, Scheme,
    exempt::Exempt,
    police::{Action, ColourMap, Dscp, Hook, MeterOptions, MeterType},
    prefixes::Prefixes,
};

use super::*;
use tidegate_core::scheme::SCHEMES;

/// The kernel takes no longer target of a link.
const BYTES_MAX: usize = 4095;

fn rate() -> impl Strategy<Value = Rate> {
    (1..=u64::MAX).prop_filter_map("a rate", Rate::from_bit_s)
}

fn span() -> impl Strategy<Value = Option<Span>> {
    proptest::option::of(prop_oneof![
        any::<u64>().prop_map(|ns| Span::Time(Nanos(ns))),
        any::<u64>().prop_map(|bytes| Span::Size(Bytes(bytes))),
    ])
}

fn queue() -> impl Strategy<Value = Option<VirtualQueueOptions>> {
    let queue = (rate(), span(), span(), span()).prop_map(|(rate, burst, mark, drop)| {
        VirtualQueueOptions { burst, mark, drop, ..VirtualQueueOptions::new(rate) }
    });
    proptest::option::of(queue)
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        Just(Action::Pass),
        Just(Action::Drop),
        Just(Action::Ce),
        (0u8..64).prop_filter_map("a code point", |value| Dscp::new(value).map(Action::Dscp)),
    ]
}

fn meter() -> impl Strategy<Value = Option<MeterOptions>> {
    let kind =
        prop_oneof![Just(MeterType::SrTcm), Just(MeterType::TrTcm), Just(MeterType::Rfc4115)];
    let colours = (any::<u64>(), any::<u64>());
    let colours = colours.prop_map(|(yellow, red)| ColourMap { yellow, red: red & !yellow });
    let meter = (kind, rate(), span(), proptest::option::of(colours));
    let meter = meter.prop_map(|(kind, rate, burst, colours)| {
        let rate = (kind != MeterType::SrTcm).then_some(rate);
        MeterOptions { kind, rate, burst, colours }
    });
    proptest::option::of(meter)
}

fn prefixes() -> impl Strategy<Value = Prefixes> {
    let prefix = (any::<u128>(), 0u32..=128).prop_map(|(address, bits)| {
        let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
        format!("{}/{bits}", std::net::Ipv6Addr::from(address & mask))
    });
    proptest::collection::vec(prefix, 0..8).prop_map(|all| {
        let mut prefixes = Prefixes::default();
        all.iter().for_each(|prefix| drop(prefixes.add(prefix)));
        prefixes
    })
}

fn options() -> impl Strategy<Value = LimitOptions> {
    let scheme = proptest::sample::select(SCHEMES.each_ref().map(|info| info.scheme).to_vec());
    let class = (proptest::option::of(rate()), any::<u32>());
    let class = class.prop_map(|(guarantee, weight)| Class { guarantee, weight });
    let hook = prop_oneof![Just(Hook::Auto), Just(Hook::Xdp)];
    let policy = (meter(), [action(), action(), action()], any::<bool>(), hook);
    let policy =
        policy.prop_map(|(meter, actions, fair, hook)| Policy { meter, actions, fair, hook });
    (
        (queue(), queue(), scheme, proptest::option::of(class), policy),
        (any::<[bool; 3]>(), any::<[u64; 2]>(), prefixes(), any::<u64>(), prefixes()),
    )
        .prop_map(
            |(
                (egress, ingress, scheme, class, police),
                (flags, timers, spared, dscps, matched),
            )| {
                LimitOptions {
                    egress,
                    ingress,
                    scheme,
                    chosen: flags[0].then_some(Why::NoHtb),
                    unfollowed: flags[2],
                    class,
                    police,
                    loopback: flags[0],
                    pace_ceiling: flags[1],
                    rto_min: Nanos(timers[0]),
                    delack_max: Nanos(timers[1]),
                    exempt: Exempt { prefixes: spared, dscps },
                    matched,
                }
            },
        )
}

proptest! {
    #[test]
    fn what_was_asked_is_read_back(options in options()) {
        let intent = Intent::parse(&Intent::text(&options, BUILD)).unwrap();
        prop_assert_eq!(intent.abi, ABI);
        prop_assert_eq!(intent.options, Some(options));
    }
}

#[test]
fn the_longest_intent_fits_a_link() {
    let all = |first: u16| {
        let mut prefixes = Prefixes::default();
        for i in 0..tidegate_core::prefixes::MAX_PREFIXES as u16 {
            let address = format!("ffff:ffff:ffff:ffff:ffff:ffff:{:x}:ffff/128", first + i);
            prefixes.add(&address).unwrap();
        }
        prefixes
    };
    let rate = Rate::from_bit_s(99_999_999_999).unwrap();
    let span = Some(Span::Time(Nanos(511_999_999_999)));
    let queue = VirtualQueueOptions {
        burst: span,
        mark: span,
        drop: span,
        ..VirtualQueueOptions::new(rate)
    };
    let drop = Action::Dscp(Dscp::new(63).unwrap());
    let longest = LimitOptions {
        egress: Some(queue),
        ingress: Some(queue),
        scheme: Scheme::Police,
        chosen: Some(Why::Field(Scheme::Carousel, "pace_ceiling")),
        unfollowed: true,
        class: Some(Class { guarantee: Some(rate), weight: 10_000 }),
        police: Policy {
            meter: Some(MeterOptions {
                kind: MeterType::Rfc4115,
                rate: Some(rate),
                burst: span,
                colours: Some(ColourMap { yellow: u64::MAX - 1, red: u64::MAX }),
            }),
            actions: [drop; 3],
            fair: false,
            hook: Hook::Auto,
        },
        rto_min: Nanos(199_999_999),
        delack_max: Nanos(199_999_999),
        exempt: Exempt { prefixes: all(0xf000), dscps: u64::MAX },
        matched: all(0xf800),
        ..LimitOptions::default()
    };
    let text = Intent::text(&longest, BUILD);
    assert!(text.len() <= BYTES_MAX, "{} bytes: {text}", text.len());
}

/// Earlier builds with the same ABI have no such member, and refuse it.
#[test]
fn only_a_limit_whose_schedule_nobody_follows_says_so() {
    let text =
        |unfollowed| Intent::text(&LimitOptions { unfollowed, ..LimitOptions::default() }, BUILD);
    assert!(!text(false).contains("unfollowed"));
    assert!(text(true).contains("\"unfollowed\":true"));
}

#[test]
fn who_made_it_is_read_where_the_rest_cannot_be() {
    let text = r#"{"abi":7,"build":"9.0.0","scheme":"pace","wormhole":true}"#;
    let intent = Intent::parse(text).unwrap();
    assert_eq!((intent.abi, intent.build.as_str(), intent.options), (7, "9.0.0", None));
    assert_eq!(Intent::parse("no JSON"), None);
}
