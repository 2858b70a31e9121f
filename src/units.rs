//! Layer 0: byte counts and addresses.
//!
//! Two newtypes over `u64`, so that a size is never passed where a place is meant. Arithmetic that
//! could wrap is checked and returns `None`; the caller says what a failure means.
//!
//! May import: nothing of this crate.

use std::fmt;

/// Every size is rounded up to this many bytes before it is placed: CUDA's allocation alignment.
pub const ALIGNMENT: Bytes = Bytes(512);

/// A number of bytes.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    bytemuck::Pod,
    bytemuck::Zeroable,
)]
#[repr(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// `count` KiB. Panics when the product exceeds 64 bits.
    #[must_use]
    pub const fn kib(count: u64) -> Self {
        Self(count.checked_mul(1 << 10).expect("fits 64 bits"))
    }

    /// `count` MiB. Panics when the product exceeds 64 bits.
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self(count.checked_mul(1 << 20).expect("fits 64 bits"))
    }

    /// `count` GiB. Panics when the product exceeds 64 bits.
    #[must_use]
    pub const fn gib(count: u64) -> Self {
        Self(count.checked_mul(1 << 30).expect("fits 64 bits"))
    }

    /// The count in MiB, for people.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "shown to people, never computed with"
    )]
    pub fn as_mib(self) -> f64 {
        self.0 as f64 / f64::from(1 << 20)
    }

    /// The least multiple of `unit` that is not smaller; `None` when it exceeds 64 bits.
    ///
    /// # Panics
    /// When `unit` is zero.
    #[must_use]
    pub const fn checked_round_up(self, unit: Self) -> Option<Self> {
        match self.0.checked_next_multiple_of(unit.0) {
            Some(bytes) => Some(Self(bytes)),
            None => None,
        }
    }

    /// The sum, or `None` when it exceeds 64 bits.
    #[must_use]
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(bytes) => Some(Self(bytes)),
            None => None,
        }
    }

    /// The difference, or zero when `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

/// Bytes and binary units, each 1024 times the one before.
const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

impl fmt::Display for Bytes {
    /// In the largest binary unit that leaves at least one whole unit when rounded: `512 B`, `1.50 KiB`,
    /// `24.00 MiB`. `{:#}` rounds nothing, for sizes that are compared: it takes the largest unit in
    /// which two decimals say it all, `4095 B` or `4.00 KiB`.
    #[expect(
        clippy::cast_precision_loss,
        reason = "shown to people, never computed with"
    )]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size_of = |nth: usize| 1_u64 << (10 * nth);
        let is_fit = |&nth: &usize| match f.alternate() {
            true => {
                let hundredths = u128::from(self.0) * 100;
                self.0 >= size_of(nth) && hundredths.is_multiple_of(u128::from(size_of(nth)))
            }
            // A little less reads 1024.00 of the unit before.
            false => self.0 as f64 / size_of(nth - 1) as f64 >= 1023.995,
        };
        let text = match (1..UNITS.len()).rev().find(is_fit) {
            Some(nth) => format!("{:.2} {}", self.0 as f64 / size_of(nth) as f64, UNITS[nth]),
            None => format!("{} {}", self.0, UNITS[0]),
        };
        f.pad(&text)
    }
}

/// A place in a device's address space.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable,
)]
#[repr(transparent)]
pub struct Address(pub u64);

impl Address {
    /// The place `bytes` further on, or `None` past the end of the address space.
    #[must_use]
    pub const fn checked_add(self, bytes: Bytes) -> Option<Self> {
        match self.0.checked_add(bytes.0) {
            Some(address) => Some(Self(address)),
            None => None,
        }
    }

    /// How far this place is behind `base`, or `None` when it lies before it.
    #[must_use]
    pub const fn checked_offset_from(self, base: Self) -> Option<Bytes> {
        match self.0.checked_sub(base.0) {
            Some(bytes) => Some(Bytes(bytes)),
            None => None,
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:#x}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_the_largest_whole_unit() {
        for (bytes, shown) in [
            (0, "0 B"),
            (512, "512 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            ((1 << 20) - 6, "1023.99 KiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            (24 << 20, "24.00 MiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (3 << 30, "3.00 GiB"),
            ((1 << 40) - 1, "1.00 TiB"),
            (u64::MAX, "16777216.00 TiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), shown, "{bytes}");
        }
        assert_eq!(format!("{:>8}|", Bytes(1024)), "1.00 KiB|");
        assert_eq!(format!("{:>9}|", Bytes(1024)), " 1.00 KiB|");
    }

    #[test]
    fn sizes_that_are_compared_are_exact() {
        for (bytes, shown) in [
            (4095, "4095 B"),
            (4096, "4.00 KiB"),
            (1536, "1.50 KiB"),
            (1537, "1537 B"),
            ((1 << 20) + 512, "1024.50 KiB"),
            (2047 << 30, "2047.00 GiB"),
            ((1 << 40) - 1, "1099511627775 B"),
            (1 << 40, "1.00 TiB"),
            (u64::MAX, "18446744073709551615 B"),
        ] {
            assert_eq!(format!("{:#}", Bytes(bytes)), shown);
        }
    }

    #[test]
    fn rounding_up_past_64_bits_is_none() {
        assert_eq!(Bytes(513).checked_round_up(ALIGNMENT), Some(Bytes(1024)));
        assert_eq!(Bytes(u64::MAX).checked_round_up(ALIGNMENT), None);
        assert_eq!(Address(u64::MAX).checked_add(Bytes(1)), None);
        assert_eq!(Address(5).checked_offset_from(Address(6)), None);
    }
}
