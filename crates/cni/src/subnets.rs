//! Subnets of a configuration as the prefixes of a limit, which can only name who is not limited.

use tidegate_core::prefixes::{MAX_PREFIXES, Prefix, Prefixes};

use crate::error::{CniError, Code};

/// All IPv4 addresses, and all IPv6 addresses.
const FAMILIES: [&str; 2] = ["0.0.0.0/0", "::/0"];

/// Reads a list of subnets of the field `name`.
pub(crate) fn read(name: &str, subnets: &[String]) -> Result<Prefixes, CniError> {
    let mut prefixes = Prefixes::default();
    for subnet in subnets {
        let refuse = |e| CniError::new(Code::Config, format!("{name}: {e}"));
        prefixes.add(subnet).map_err(refuse)?;
    }
    Ok(prefixes)
}

/// The fewest prefixes with all addresses but those of some subnets.
pub(crate) fn all_but(subnets: &Prefixes) -> Result<Prefixes, CniError> {
    let mut rest = Prefixes::default();
    for family in FAMILIES {
        let Ok(family) = family.parse::<Prefix>() else { continue };
        let own: Vec<_> =
            subnets.as_slice().iter().filter(|s| s.is_v4() == family.is_v4()).collect();
        if !add_rest(family, family.is_v4(), &own, &mut rest) {
            let problem = format!(
                "shapedSubnets: the addresses outside of them are more than {MAX_PREFIXES} prefixes; \
                 write fewer or shorter ones, or unshapedSubnets"
            );
            return Err(CniError::new(Code::Config, problem));
        }
    }
    Ok(rest)
}

/// Adds what a block has beside some subnets of its family. False if the list is full.
fn add_rest(block: Prefix, is_v4: bool, subnets: &[&Prefix], rest: &mut Prefixes) -> bool {
    if subnets.iter().any(|subnet| subnet.bits <= block.bits && has(subnet, &block)) {
        return true;
    }
    let inside: Vec<_> = subnets.iter().copied().filter(|subnet| has(&block, subnet)).collect();
    if inside.is_empty() {
        // IPv4 addresses are mapped into a block of IPv6, in which nobody has an address of that.
        return block.is_v4() != is_v4 || rest.insert(block);
    }
    halves(&block).into_iter().all(|half| add_rest(half, is_v4, &inside, rest))
}

/// Whether the addresses of `inner` begin with `outer`.
fn has(outer: &Prefix, inner: &Prefix) -> bool {
    let mask = u128::MAX.checked_shl(128 - u32::from(outer.bits)).unwrap_or(0);
    inner.bits >= outer.bits
        && u128::from_be_bytes(inner.address) & mask == u128::from_be_bytes(outer.address)
}

/// The two blocks that a block of more than one address consists of.
fn halves(block: &Prefix) -> [Prefix; 2] {
    let bits = block.bits + 1;
    let upper = u128::from_be_bytes(block.address) | 1 << (128 - u32::from(bits));
    [Prefix { bits, ..*block }, Prefix { address: upper.to_be_bytes(), bits }]
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;

    fn prefixes(texts: &[&str]) -> Prefixes {
        read("test", &texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    fn octets(address: IpAddr) -> [u8; 16] {
        match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        }
    }

    #[test]
    fn all_but_a_network_is_a_prefix_for_each_of_its_bits() {
        let rest = all_but(&prefixes(&["128.0.0.0/2"])).unwrap();
        assert_eq!(rest.to_string(), "::/0,0.0.0.0/1,192.0.0.0/2");
        assert_eq!(all_but(&prefixes(&["10.0.0.0/24"])).unwrap().as_slice().len(), 25);
        assert!(all_but(&prefixes(&["0.0.0.0/0", "::/0"])).unwrap().is_empty());
        let error = all_but(&prefixes(&["2001:db8:1::/48"])).unwrap_err();
        assert!(error.message.contains("shapedSubnets"), "{error}");
        let error = read("unshapedSubnets", &["10.0.0.1/24".to_owned()]).unwrap_err();
        assert!(error.message.starts_with("unshapedSubnets: `10.0.0.1/24`"), "{error}");
    }

    proptest! {
        #[test]
        fn an_address_is_in_the_rest_or_in_a_subnet(
            networks in proptest::collection::vec((any::<u32>(), 0u8..=8), 1..4),
            v4: u32, v6: u128, near in 0usize..4, low: u32,
        ) {
            let texts: Vec<_> = networks.iter().map(|(address, bits)| {
                let mask = u32::MAX.checked_shl(32 - u32::from(*bits)).unwrap_or(0);
                format!("{}/{bits}", Ipv4Addr::from(address & mask))
            }).collect();
            let subnets = prefixes(&texts.iter().map(String::as_str).collect::<Vec<_>>());
            let Ok(rest) = all_but(&subnets) else { return Ok(()) };
            let close = networks.get(near).map_or(v4, |(address, _)| address ^ low >> 20);
            let v4 = [v4, close].map(|address| IpAddr::from(Ipv4Addr::from(address)));
            for address in v4.into_iter().chain([Ipv6Addr::from(v6).into()]).map(octets) {
                let is_in = |list: &Prefixes| list.as_slice().iter().any(|p| p.contains(address));
                prop_assert_ne!(is_in(&subnets), is_in(&rest));
            }
        }
    }
}
