//! The rates of a configuration as the options of a limit.

use serde::Deserialize;
use tidegate_core::{Bytes, Rate, Scope, Span, choice::Kernel, exempt::Exempt};
use tidegate_host::{
    auto::{Trees, Written},
    settings::{Patch, RateSetting, SchemeSetting, SettingsError},
};
use tidegate_sys::limit::LimitOptions;

use crate::{
    error::{CniError, Code},
    subnets,
};

/// Runtimes give a burst from here on, in bits, when nobody asked for one, because the plugin `bandwidth`
/// demands it. A limit with it would let 256 MB through at once.
pub const NO_BURST_BITS: u64 = i32::MAX as u64;

/// Rates in bit/s and bursts in bits; zero where there is none. The workload's side: `egress` is what it
/// sends. containerd writes the names of the first four with a capital.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Bandwidth {
    /// Rate to the container.
    #[serde(alias = "IngressRate")]
    pub ingress_rate: u64,
    /// Burst to the container.
    #[serde(alias = "IngressBurst")]
    pub ingress_burst: u64,
    /// Rate from the container.
    #[serde(alias = "EgressRate")]
    pub egress_rate: u64,
    /// Burst from the container.
    #[serde(alias = "EgressBurst")]
    pub egress_burst: u64,
    /// Only what is exchanged with these subnets is limited; empty: all.
    pub shaped_subnets: Vec<String>,
    /// What is exchanged with these subnets is not limited.
    pub unshaped_subnets: Vec<String>,
}

impl Bandwidth {
    /// Whether it limits nothing.
    pub fn is_none(&self) -> bool {
        self.ingress_rate == 0 && self.egress_rate == 0
    }

    /// Its fields, and those of `other` where it has none.
    pub fn or(self, other: Bandwidth) -> Bandwidth {
        let number = |own, other| if own == 0 { other } else { own };
        let list = |own: Vec<String>, other| if own.is_empty() { other } else { own };
        Bandwidth {
            ingress_rate: number(self.ingress_rate, other.ingress_rate),
            ingress_burst: number(self.ingress_burst, other.ingress_burst),
            egress_rate: number(self.egress_rate, other.egress_rate),
            egress_burst: number(self.egress_burst, other.egress_burst),
            shaped_subnets: list(self.shaped_subnets, other.shaped_subnets),
            unshaped_subnets: list(self.unshaped_subnets, other.unshaped_subnets),
        }
    }

    /// Checks what the plugin `bandwidth` checks.
    ///
    /// # Errors
    /// [`Code::Config`].
    pub fn check(&self) -> Result<(), CniError> {
        let directions = [
            ("ingress", self.ingress_rate, self.ingress_burst),
            ("egress", self.egress_rate, self.egress_burst),
        ];
        for (name, rate, burst) in directions {
            let problem = match (rate, burst) {
                (0, 0) => continue,
                (_, 0) => format!("{name}Rate is given, so {name}Burst must be, too"),
                (0, _) => format!("{name}Burst is given, so {name}Rate must be, too"),
                (_, burst) if burst / 8 >= u64::from(u32::MAX) => {
                    format!("{name}Burst of {burst} bits is more than 4 GB")
                }
                _ => continue,
            };
            return Err(CniError::new(Code::Config, problem));
        }
        if !self.shaped_subnets.is_empty() && !self.unshaped_subnets.is_empty() {
            let problem = "shapedSubnets and unshapedSubnets exclude each other; write one of them";
            return Err(CniError::new(Code::Config, problem));
        }
        self.exempt().map(drop)
    }

    /// What is not limited.
    fn exempt(&self) -> Result<Exempt, CniError> {
        let prefixes = match self.shaped_subnets.is_empty() {
            true => subnets::read("unshapedSubnets", &self.unshaped_subnets),
            false => subnets::read("shapedSubnets", &self.shaped_subnets)
                .and_then(|subnets| subnets::all_but(&subnets)),
        }?;
        Ok(Exempt { prefixes, ..Exempt::default() })
    }

    /// A limit with these rates on a port, with the scheme named, or else the one that fits best.
    ///
    /// # Errors
    /// [`Code::Config`] if a limit cannot be so.
    pub fn options(
        &self,
        scope: &Scope,
        scheme: Option<SchemeSetting>,
        kernel: Kernel,
        is: Option<&LimitOptions>,
    ) -> Result<LimitOptions, CniError> {
        let exempt = self.exempt()?;
        let rate = |bit_s: u64| match bit_s {
            0 => Ok(RateSetting::Free),
            bit_s => Rate::from_bit_s(bit_s)
                .map(RateSetting::Limit)
                .ok_or_else(|| CniError::new(Code::Config, format!("{bit_s} bit/s is no rate"))),
        };
        let (egress, ingress) = (rate(self.egress_rate)?, rate(self.ingress_rate)?);
        // The settings of a limit have one burst for both directions: each is read by itself.
        let with = |burst_bits: u64| {
            let is_given = burst_bits != 0 && burst_bits < NO_BURST_BITS;
            let patch = Patch {
                egress: Some(egress),
                ingress: Some(ingress),
                burst: is_given.then(|| Span::Size(Bytes(burst_bits.div_ceil(8)))),
                exempt: (!exempt.is_empty()).then_some(exempt),
                scheme,
                ..Patch::default()
            };
            let written = Written { name: "", scope, parent: None, patch: &patch };
            written.options(&Trees::default(), kernel, is).map_err(refused)
        };
        let options = with(self.egress_burst)?;
        Ok(LimitOptions { ingress: with(self.ingress_burst)?.ingress, ..options })
    }
}

fn refused(SettingsError { field, problem }: SettingsError) -> CniError {
    CniError::new(Code::Config, format!("{field}: {problem}"))
}
