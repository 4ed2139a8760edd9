//! Settings to the map and back.

use proptest::prelude::*;

use super::*;

fn span() -> impl Strategy<Value = Option<Span>> {
    // Below the default drop threshold, so that every order of thresholds is allowed.
    prop_oneof![
        Just(None),
        (0u64..3_000_000).prop_map(|ns| Some(Span::Time(Nanos(ns)))),
        (0u64..40_000).prop_map(|bytes| Some(Span::Size(Bytes(bytes)))),
    ]
}

fn class() -> impl Strategy<Value = Option<Class>> {
    let guarantee = proptest::option::of(8_000u64..100_000_000_000);
    let class = (guarantee, 1u32..=10_000).prop_map(|(guarantee, weight)| Class {
        guarantee: guarantee.and_then(Rate::from_bit_s),
        weight,
    });
    proptest::option::of(class)
}

fn queue() -> impl Strategy<Value = Option<VirtualQueueOptions>> {
    let queue = (8_000u64..100_000_000_000, span(), span()).prop_map(|(bit_s, burst, mark)| {
        let rate = Rate::from_bit_s(bit_s).unwrap();
        VirtualQueueOptions { burst, mark, ..VirtualQueueOptions::new(rate) }
    });
    proptest::option::of(queue)
}

proptest! {
    #[test]
    fn what_is_read_back_is_the_same_limit(
        egress in queue(), ingress in queue(), loopback: bool, pace: bool, pace_ceiling: bool,
        rto_min in 0u64..1_000_000_000, delack_max in 0u64..1_000_000_000, class in class(),
    ) {
        let (rto_min, delack_max) = (Nanos(rto_min), Nanos(delack_max));
        let scheme = if pace { Scheme::Pace } else { Scheme::Nrm };
        let options = LimitOptions {
            egress, ingress, loopback, scheme, pace_ceiling, rto_min, delack_max, class,
            ..LimitOptions::default()
        };
        prop_assume!(options.encode(7).is_ok());
        let limit = options.encode(7).unwrap();
        let again = LimitOptions::from(&limit);
        prop_assert_eq!(again.encode(7).unwrap(), limit);
        if egress.is_some() || ingress.is_some() {
            prop_assert_eq!(again.class, class);
        }
    }
}

proptest! {
    #[test]
    fn a_policer_that_is_read_back_is_the_same(
        bit_s in 8_000u64..=100_000_000_000, ingress in queue(), burst in prop_oneof![
            Just(None),
            (1_000_000u64..100_000_000).prop_map(|ns| Some(Span::Time(Nanos(ns)))),
            (1u64..10_000_000).prop_map(|bytes| Some(Span::Size(Bytes(bytes)))),
        ],
    ) {
        let rate = Rate::from_bit_s(bit_s).unwrap();
        let egress = VirtualQueueOptions { burst, ..VirtualQueueOptions::new(rate) };
        let ingress = ingress.map(|queue| VirtualQueueOptions { burst: None, mark: None, ..queue });
        let options = LimitOptions {
            egress: Some(egress), ingress, scheme: Scheme::Police, ..LimitOptions::default()
        };
        prop_assume!(options.encode(7).is_ok());
        let limit = options.encode(7).unwrap();
        let again = LimitOptions::from(&limit);
        prop_assert_eq!(again.encode(7).unwrap(), limit);
        prop_assert_eq!(again.egress.unwrap().burst.is_none(), burst.is_none());
    }
}

#[test]
fn defaults_read_back_as_not_given() {
    let queue = VirtualQueueOptions::paced("50mbit".parse().unwrap());
    let options = LimitOptions { egress: Some(queue), ..LimitOptions::default() };
    assert_eq!(LimitOptions::from(&options.encode(1).unwrap()), options);
}
