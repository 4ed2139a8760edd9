//! The options of HTB and TBF as bytes, computed as iproute2's `tc_core.c`, `q_htb.c` and `q_tbf.c`
//! do.
//!
//! Two things are not what they seem. Buffers go to the kernel not in bytes but as the time that
//! they take at the rate, in ticks of 64 ns, rounded down to whole microseconds before. And rates are
//! bytes per second in 32 bits, followed by a 64-bit attribute only where those do not suffice.

use std::{fs, os::fd::RawFd, time::Duration};

use super::{super::netlink::Attributes, NetError, Qdisc};

/// `PSCHED_SHIFT` is 6 in every kernel since 2.6.31.
const TICK_NS: f64 = 64.0;
/// What `tc` takes for an MTU when it sizes HTB's default burst.
const HTB_MTU_BYTES: u32 = 1600;
/// What `tc` takes for an MTU when it makes a rate table and is given none.
const TABLE_MTU_BYTES: u32 = 2047;
const TABLE_CELLS: usize = 256;
const LINKLAYER_ETHERNET: u8 = 1;

const TCA_HTB_PARMS: u16 = 1;
const TCA_HTB_INIT: u16 = 2;
const TCA_HTB_CTAB: u16 = 3;
const TCA_HTB_RTAB: u16 = 4;
const TCA_HTB_RATE64: u16 = 6;
const TCA_HTB_CEIL64: u16 = 7;
/// The version of HTB's interface; the kernel refuses others.
const HTB_VERSION: u32 = 3;
/// A class without a quantum gets its rate in bytes per second divided by this.
const RATE_TO_QUANTUM: u32 = 10;

const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RTAB: u16 = 2;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;

const TCA_FQ_CODEL_TARGET: u16 = 1;
const TCA_FQ_CODEL_LIMIT: u16 = 2;
const TCA_FQ_CODEL_MEMORY_LIMIT: u16 = 9;

const TCA_BPF_ACT: u16 = 1;
const TCA_BPF_FD: u16 = 6;
const TCA_ACT_KIND: u16 = 1;
const TCA_ACT_OPTIONS: u16 = 2;
const TCA_MIRRED_PARMS: u16 = 2;
/// Actions are numbered from one.
const FIRST_ACTION: u16 = 1;
const TCA_EGRESS_REDIR: u32 = 1;
const TC_ACT_STOLEN: u32 = 4;
const NLA_F_NESTED: u16 = 1 << 15;

/// HTB at the root of a device.
#[derive(Debug, Clone, Copy)]
pub struct Htb {
    /// The minor number of the class for packets that no filter catches; 0 sends them unlimited.
    pub default_class: u16,
}

impl Htb {
    /// As `tc qdisc add ... htb default MINOR`.
    pub fn new(default_class: u16) -> Self {
        Self { default_class }
    }
}

impl Qdisc for Htb {
    fn kind(&self) -> &'static str {
        "htb"
    }

    fn options(&self) -> Result<Option<Vec<u8>>, NetError> {
        let mut glob = Vec::with_capacity(20);
        for field in [HTB_VERSION, RATE_TO_QUANTUM, self.default_class.into(), 0, 0] {
            glob.extend_from_slice(&field.to_ne_bytes());
        }
        let mut options = Attributes::default();
        options.push(TCA_HTB_INIT, &glob);
        Ok(Some(options.into_bytes()))
    }
}

#[derive(Debug, Clone, Copy)]
pub struct HtbClass {
    /// What the class may always send.
    pub rate_bit_s: u64,
    /// What it may send when others leave bandwidth; none: its rate.
    pub ceil_bit_s: Option<u64>,
    /// The bytes that it may send at once at its rate; none: as much as `tc` gives it.
    pub burst_bytes: Option<u32>,
    /// The bytes that it may send at once at its ceiling; none: as much as `tc` gives it.
    pub cburst_bytes: Option<u32>,
    /// Who is offered spare bandwidth first; 0 is first, 7 is last.
    pub priority: u32,
    /// What it sends in one round of sharing; 0: derived from the rate.
    pub quantum_bytes: u32,
    /// The largest packet that the rate tables must tell apart.
    pub mtu_bytes: u32,
}

impl HtbClass {
    /// As `tc class add ... htb rate RATE`.
    pub fn new(rate_bit_s: u64) -> Self {
        Self {
            rate_bit_s,
            ceil_bit_s: None,
            burst_bytes: None,
            cburst_bytes: None,
            priority: 0,
            quantum_bytes: 0,
            mtu_bytes: HTB_MTU_BYTES,
        }
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>, NetError> {
        let rate = byte_rate("rate", self.rate_bit_s)?;
        let ceil = byte_rate("ceil", self.ceil_bit_s.unwrap_or(self.rate_bit_s))?;
        if ceil < rate {
            return Err(NetError::Invalid {
                field: "ceil",
                read: format!("{}bit, below the rate", ceil * 8),
                expected: "use at least the rate, or leave it out",
            });
        }
        let burst = self.burst_bytes.unwrap_or_else(|| default_burst(rate, self.mtu_bytes));
        let cburst = self.cburst_bytes.unwrap_or_else(|| default_burst(ceil, self.mtu_bytes));

        let mut parms = Vec::with_capacity(44);
        parms.extend(rate_spec(rate, self.mtu_bytes));
        parms.extend(rate_spec(ceil, self.mtu_bytes));
        // buffer, cbuffer, quantum, level (the kernel's to fill in), prio
        for field in [ticks(rate, burst), ticks(ceil, cburst), self.quantum_bytes, 0, self.priority]
        {
            parms.extend_from_slice(&field.to_ne_bytes());
        }
        let mut options = Attributes::default();
        if rate > u32::MAX.into() {
            options.push(TCA_HTB_RATE64, &rate.to_ne_bytes());
        }
        if ceil > u32::MAX.into() {
            options.push(TCA_HTB_CEIL64, &ceil.to_ne_bytes());
        }
        options
            .push(TCA_HTB_PARMS, &parms)
            .push(TCA_HTB_RTAB, &rate_table(rate, self.mtu_bytes))
            .push(TCA_HTB_CTAB, &rate_table(ceil, self.mtu_bytes));
        Ok(options.into_bytes())
    }
}

/// FQ-CoDel, with the kernel's defaults for the rest.
#[derive(Debug, Clone, Copy)]
pub struct FqCodel {
    pub limit_packets: u32,
    /// The memory that its packets take, with the kernel's own data about them.
    pub memory_bytes: u32,
    /// What packets may wait for long.
    pub target: Duration,
}

impl FqCodel {
    /// As `tc qdisc add ... fq_codel`: the kernel's own defaults.
    pub fn usual() -> Self {
        Self { limit_packets: 10_240, memory_bytes: 32 << 20, target: Duration::from_millis(5) }
    }
}

impl Qdisc for FqCodel {
    fn kind(&self) -> &'static str {
        "fq_codel"
    }

    fn options(&self) -> Result<Option<Vec<u8>>, NetError> {
        let target_us = u32::try_from(self.target.as_micros()).unwrap_or(u32::MAX);
        let mut options = Attributes::default();
        options
            .push(TCA_FQ_CODEL_TARGET, &target_us.to_ne_bytes())
            .push(TCA_FQ_CODEL_LIMIT, &self.limit_packets.to_ne_bytes())
            .push(TCA_FQ_CODEL_MEMORY_LIMIT, &self.memory_bytes.to_ne_bytes());
        Ok(Some(options.into_bytes()))
    }
}

/// A token bucket filter.
#[derive(Debug, Clone, Copy)]
pub struct Tbf {
    pub rate_bit_s: u64,
    /// What may be sent at once; larger packets are segmented, or dropped where that cannot be.
    pub burst_bytes: u32,
    /// How much may wait.
    pub limit_bytes: u32,
}

impl Qdisc for Tbf {
    fn kind(&self) -> &'static str {
        "tbf"
    }

    fn options(&self) -> Result<Option<Vec<u8>>, NetError> {
        let rate = byte_rate("rate", self.rate_bit_s)?;
        let mut parms = Vec::with_capacity(36);
        parms.extend(rate_spec(rate, TABLE_MTU_BYTES));
        parms.extend([0; 12]); // no peak rate
        for field in [self.limit_bytes, ticks(rate, self.burst_bytes), 0] {
            parms.extend_from_slice(&field.to_ne_bytes());
        }
        let mut options = Attributes::default();
        options.push(TCA_TBF_PARMS, &parms).push(TCA_TBF_BURST, &self.burst_bytes.to_ne_bytes());
        if rate > u32::MAX.into() {
            options.push(TCA_TBF_RATE64, &rate.to_ne_bytes());
        }
        options.push(TCA_TBF_RTAB, &rate_table(rate, TABLE_MTU_BYTES));
        Ok(Some(options.into_bytes()))
    }
}

/// A program, and after it the action `mirred egress redirect`.
pub(super) fn bpf_redirect(program: RawFd, to: u32) -> Vec<u8> {
    // struct tc_mirred: index, capabilities, what becomes of the packet, two counts, what is done, where.
    let words = [0, 0, TC_ACT_STOLEN, 0, 0, TCA_EGRESS_REDIR, to];
    let mirred: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    let mut parameters = Attributes::default();
    parameters.push(TCA_MIRRED_PARMS, &mirred);
    let mut action = Attributes::default();
    action
        .push(TCA_ACT_KIND, b"mirred\0")
        .push(TCA_ACT_OPTIONS | NLA_F_NESTED, &parameters.into_bytes());
    let mut actions = Attributes::default();
    actions.push(FIRST_ACTION | NLA_F_NESTED, &action.into_bytes());
    let mut options = Attributes::default();
    options
        .push(TCA_BPF_FD, &(program as u32).to_ne_bytes())
        .push(TCA_BPF_ACT | NLA_F_NESTED, &actions.into_bytes());
    options.into_bytes()
}

fn byte_rate(field: &'static str, bit_s: u64) -> Result<u64, NetError> {
    match bit_s / 8 {
        0 => Err(NetError::Invalid {
            field,
            read: format!("{bit_s}bit"),
            expected: "use at least 8bit",
        }),
        bytes_s => Ok(bytes_s),
    }
}

fn default_burst(bytes_s: u64, mtu_bytes: u32) -> u32 {
    let per_tick = bytes_s / clock_hz();
    u32::try_from(per_tick + u64::from(mtu_bytes)).unwrap_or(u32::MAX)
}

/// The clock that `tc` sizes bursts by: the fourth number of `/proc/net/psched`, if the third says
/// that it is one.
fn clock_hz() -> u64 {
    fs::read_to_string("/proc/net/psched")
        .ok()
        .and_then(|s| parse_psched(&s))
        .unwrap_or(1_000_000_000)
}

fn parse_psched(text: &str) -> Option<u64> {
    let mut fields = text.split_ascii_whitespace().map(|f| u64::from_str_radix(f, 16).ok());
    match (fields.nth(2)?, fields.next()?) {
        (Some(1_000_000), Some(hz)) if hz > 0 => Some(hz),
        _ => None,
    }
}

/// The time that `bytes` take, in ticks of 64 ns.
fn ticks(bytes_s: u64, bytes: u32) -> u32 {
    // `tc` computes in whole microseconds, rounding down: its 1600 bytes at 1 Gbit/s are 12 us and
    // come back from the kernel as 1375.
    let time_us = (f64::from(bytes) / bytes_s as f64 * 1e6).trunc();
    (time_us * 1e3 / TICK_NS) as u32
}

/// How far a size is shifted right to find its cell in a table of 256.
fn cell_log(mtu_bytes: u32) -> u8 {
    let mut log = 0;
    while mtu_bytes >> log > 255 {
        log += 1;
    }
    log
}

/// `struct tc_ratespec`.
fn rate_spec(bytes_s: u64, mtu_bytes: u32) -> [u8; 12] {
    let mut spec = [0; 12];
    spec[0] = cell_log(mtu_bytes);
    spec[1] = LINKLAYER_ETHERNET;
    // cell_align is -1: a cell stands for its upper end.
    spec[4..6].copy_from_slice(&(-1i16).to_ne_bytes());
    spec[8..].copy_from_slice(&u32::try_from(bytes_s).unwrap_or(u32::MAX).to_ne_bytes());
    spec
}

/// The time of a packet of each size class, in ticks.
fn rate_table(bytes_s: u64, mtu_bytes: u32) -> Vec<u8> {
    let log = cell_log(mtu_bytes);
    (1..=TABLE_CELLS as u32).flat_map(|cell| ticks(bytes_s, cell << log).to_ne_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::NlasIterator;

    use super::*;

    fn attribute(options: &[u8], kind: u16) -> Option<Vec<u8>> {
        NlasIterator::new(options).flatten().find(|a| a.kind() == kind).map(|a| a.value().to_vec())
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn htb_names_its_version_and_default() {
        let options = Htb::new(0x30).options().unwrap().unwrap();
        let glob = attribute(&options, TCA_HTB_INIT).unwrap();
        assert_eq!([word(&glob, 0), word(&glob, 4), word(&glob, 8)], [3, 10, 0x30]);
        assert_eq!(glob.len(), 20);
    }

    #[test]
    fn htb_class_is_what_tc_sends() {
        // tc class add ... htb rate 1gbit burst 15k cburst 1600 prio 3 quantum 9000
        let class = HtbClass {
            burst_bytes: Some(15 * 1024),
            cburst_bytes: Some(1600),
            priority: 3,
            quantum_bytes: 9000,
            ..HtbClass::new(1_000_000_000)
        };
        let options = class.encode().unwrap();
        let parms = attribute(&options, TCA_HTB_PARMS).unwrap();
        assert_eq!(parms.len(), 44);
        // cell_log 3 for 1600 bytes, Ethernet, cell_align -1
        assert_eq!(parms[..8], [3, 1, 0, 0, 0xff, 0xff, 0, 0]);
        assert_eq!(word(&parms, 8), 125_000_000);
        assert_eq!(word(&parms, 20), 125_000_000);
        // 15360 B at 125 MB/s are 122 us = 1906 ticks of 64 ns; 1600 B are 12 us = 187 ticks
        assert_eq!([word(&parms, 24), word(&parms, 28)], [1906, 187]);
        assert_eq!([word(&parms, 32), word(&parms, 36), word(&parms, 40)], [9000, 0, 3]);
        assert_eq!(attribute(&options, TCA_HTB_RATE64), None);
        let table = attribute(&options, TCA_HTB_RTAB).unwrap();
        assert_eq!(table.len(), 1024);
        // cells of 8 bytes = 64 ns each; the last is 2048 bytes = 16 us = 250 ticks
        assert_eq!([word(&table, 0), word(&table, 16 * 4), word(&table, 1020)], [0, 15, 250]);
    }

    #[test]
    fn rates_beyond_32_bits_go_in_64() {
        let rate_bit_s = 100_000_000_000;
        let options = HtbClass::new(rate_bit_s).encode().unwrap();
        let parms = attribute(&options, TCA_HTB_PARMS).unwrap();
        assert_eq!(word(&parms, 8), u32::MAX);
        for kind in [TCA_HTB_RATE64, TCA_HTB_CEIL64] {
            assert_eq!(attribute(&options, kind).unwrap(), (rate_bit_s / 8).to_ne_bytes());
        }
    }

    #[test]
    fn jumbo_frames_widen_the_cells() {
        assert_eq!([cell_log(255), cell_log(256), cell_log(1600), cell_log(9000)], [0, 1, 3, 6]);
        assert_eq!(cell_log(2047), 3);
    }

    #[test]
    fn tbf_sends_its_burst_as_a_time() {
        let tbf = Tbf { rate_bit_s: 8_000_000, burst_bytes: 10_000, limit_bytes: 60_000 };
        let options = tbf.options().unwrap().unwrap();
        let parms = attribute(&options, TCA_TBF_PARMS).unwrap();
        assert_eq!(parms.len(), 36);
        assert_eq!(word(&parms, 8), 1_000_000);
        assert_eq!(word(&parms, 24), 60_000);
        assert_eq!(word(&parms, 28), 156_250); // 10 ms in ticks of 64 ns
        assert_eq!(word(&attribute(&options, TCA_TBF_BURST).unwrap(), 0), 10_000);
    }

    #[test]
    fn nonsense_is_refused_with_advice() {
        let error = HtbClass::new(7).encode().unwrap_err().to_string();
        assert_eq!(error, "rate is 7bit: use at least 8bit");
        let class = HtbClass { ceil_bit_s: Some(8_000), ..HtbClass::new(16_000) };
        assert!(class.encode().unwrap_err().to_string().starts_with("ceil is 8000bit, below"));
    }

    #[test]
    fn psched_gives_the_clock_only_in_its_usual_unit() {
        assert_eq!(parse_psched("000003e8 00000040 000f4240 3b9aca00\n"), Some(1_000_000_000));
        assert_eq!(parse_psched("000003e8 00000040 000f4240 000000fa"), Some(250));
        assert_eq!(parse_psched("000003e8 00000040 0000ffff 000000fa"), None);
        assert_eq!(parse_psched(""), None);
    }
}
