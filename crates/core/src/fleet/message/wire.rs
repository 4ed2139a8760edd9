//! The parts of messages on the wire.

use alloc::vec::Vec;

use super::{DecodeError, Epoch, Mass, MemberId};

pub(super) struct Writer<'a>(pub &'a mut Vec<u8>);

impl Writer<'_> {
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn f32(&mut self, value: f32) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub fn epoch(&mut self, epoch: Epoch) {
        self.varint(epoch.number);
        self.varint(epoch.leader.0.into());
    }

    pub fn mass(&mut self, mass: Mass) {
        self.0.extend(mass.value.to_le_bytes());
        self.0.extend(mass.weight.to_le_bytes());
    }
}

pub(super) struct Reader<'a>(pub &'a [u8]);

impl Reader<'_> {
    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(DecodeError::Short)?;
        self.0 = tail;
        Ok(*head)
    }

    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.fixed::<1>()?[0])
    }

    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        self.fixed().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        self.fixed().map(u64::from_le_bytes)
    }

    pub fn f32(&mut self) -> Result<f32, DecodeError> {
        let value = self.fixed().map(f32::from_le_bytes)?;
        if value.is_finite() { Ok(value) } else { Err(DecodeError::Range) }
    }

    fn f64(&mut self) -> Result<f64, DecodeError> {
        let value = self.fixed().map(f64::from_le_bytes)?;
        if value.is_finite() { Ok(value) } else { Err(DecodeError::Range) }
    }

    pub fn varint(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0u64;
        for at in 0..10u32 {
            let byte = self.u8()?;
            // The tenth byte has room for one bit; a last byte of zero is not the shortest form.
            if (at == 9 && byte > 1) || (at > 0 && byte == 0) {
                return Err(DecodeError::Number);
            }
            value |= u64::from(byte & 0x7f) << (7 * at);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(DecodeError::Number)
    }

    /// A byte of which only the lowest `bits` may be set.
    pub fn flags(&mut self, bits: u32) -> Result<u8, DecodeError> {
        let flags = self.u8()?;
        if flags >> bits == 0 { Ok(flags) } else { Err(DecodeError::Range) }
    }

    pub fn member(&mut self) -> Result<MemberId, DecodeError> {
        u32::try_from(self.varint()?).map(MemberId).map_err(|_| DecodeError::Number)
    }

    pub fn epoch(&mut self) -> Result<Epoch, DecodeError> {
        Ok(Epoch { number: self.varint()?, leader: self.member()? })
    }

    pub fn mass(&mut self) -> Result<Mass, DecodeError> {
        Ok(Mass { value: self.f64()?, weight: self.f64()? })
    }
}
