//! The flags of a limit that only scheme `police` has.

use clap::Args;
use tidegate_core::{
    Span,
    police::{Action, Hook, MeterText, PolicyError, colour_index},
    prefixes::Prefixes,
};
use tidegate_host::settings::{MeterSetting, PolicePatch};

#[derive(Debug, Args)]
#[command(next_help_heading = "Limit")]
pub struct PoliceArgs {
    /// With police: colour packets by a second bucket, such as `srtcm,ebs=200kb`, `trtcm,pir=100mbit,pbs=1mb`
    /// or `rfc4115,eir=10mbit`, with `,colour_aware` if the DSCP of a packet counts [default: none]
    #[arg(long, value_name = "METER", value_parser = meter)]
    pub meter: Option<MeterArg>,
    /// With police: what becomes of packets by colour, green, yellow or red: `pass`, `drop`, `ce` (mark, or
    /// drop what is not ECN-capable) or `dscp:NAME`, such as yellow=dscp:af12,red=drop [default: red=drop]
    #[arg(long, value_name = "COLOUR=ACTION", value_parser = action, value_delimiter = ',')]
    pub actions: Vec<(usize, Action)>,
    /// With police on a device or port: the hosts behind it whose packets are meant, such as
    /// 10.0.0.0/24,2001:db8:1::/48; of many limits the one with the longest prefix has a packet. `none` for
    /// all [default: none]
    #[arg(long = "match", value_name = "PREFIXES")]
    pub matched: Option<Prefixes>,
    /// With police: give the flows equal parts of the rate, whatever their round trips and congestion control
    /// [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    pub fair: Option<bool>,
    /// With police: where the ingress of a device is limited, `auto` (where packets are: tcx or clsact) or
    /// `xdp` (before there are packets, in the driver if it can: cheaper for what is dropped) [default: auto]
    #[arg(long, value_name = "HOOK")]
    pub hook: Option<Hook>,
}

impl PoliceArgs {
    pub fn patch(&self) -> PolicePatch {
        let action = |i| self.actions.iter().rev().find(|(colour, _)| *colour == i);
        PolicePatch {
            meter: self.meter.map(|MeterArg(meter, _)| meter),
            actions: std::array::from_fn(|i| action(i).map(|(_, action)| *action)),
            fair: self.fair,
            hook: self.hook,
        }
    }

    /// The committed burst, if it was said with the meter.
    pub fn burst(&self) -> Option<Span> {
        self.meter.and_then(|MeterArg(_, cbs)| cbs)
    }
}

/// A meter, and the committed burst if that was said with it.
#[derive(Debug, Clone, Copy)]
pub struct MeterArg(MeterSetting, Option<Span>);

fn meter(text: &str) -> Result<MeterArg, String> {
    if text.trim() == "none" {
        return Ok(MeterArg(MeterSetting::None, None));
    }
    let read: MeterText = text.parse().map_err(|e: PolicyError| e.to_string())?;
    let meter = read.meter().map_err(|e| e.to_string())?;
    Ok(MeterArg(MeterSetting::Meter(meter), read.cbs))
}

fn action(text: &str) -> Result<(usize, Action), String> {
    let (colour, action) = text.split_once('=').ok_or("write for example yellow=dscp:af12")?;
    let colour = colour_index(colour).map_err(|e| e.to_string())?;
    Ok((colour, action.parse().map_err(|e: PolicyError| e.to_string())?))
}
