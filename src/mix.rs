//! Layer 0: hashing of places and states.
//!
//! A state's hash is the XOR of [`mix`] over its live placements, so it is kept up to date in one
//! operation an event and does not depend on the order of events. Two states are taken for one when
//! their 128 bits agree; with 10⁶ states the chance that any two of them do by accident is below
//! 10⁻²⁶. Sizes come from the program itself, so nobody can aim at a collision through them.
//!
//! May import: nothing of this crate.

use std::hash::{BuildHasher, Hasher};

/// 128 well mixed bits of a placement: two rounds of the finaliser of `MurmurHash3` (Appleby, public
/// domain) with different keys.
pub(crate) fn mix(start: u32, len: u32) -> u128 {
    let key = u64::from(start) << 32 | u64::from(len);
    let low = finalise(key ^ 0x9E37_79B9_7F4A_7C15);
    let high = finalise(finalise(key.rotate_left(32) ^ 0xD1B5_4A32_D192_ED03).wrapping_add(key));
    u128::from(high) << 64 | u128::from(low)
}

fn finalise(mut key: u64) -> u64 {
    key ^= key >> 33;
    key = key.wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    key ^= key >> 33;
    key = key.wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    key ^ key >> 33
}

/// Goes on from a hash with one more number; for hashes that are compared, not looked up.
#[inline]
pub(crate) fn chain(hash: u32, number: u32) -> u32 {
    (hash ^ number).wrapping_mul(0x9E37_79B1).rotate_left(15)
}

/// Hasher for keys that are mixed already or are a few small numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MixBuild;

#[derive(Debug)]
pub(crate) struct MixHasher(u64);

impl BuildHasher for MixBuild {
    type Hasher = MixHasher;
    fn build_hasher(&self) -> MixHasher {
        MixHasher(0)
    }
}

impl Hasher for MixHasher {
    fn finish(&self) -> u64 {
        finalise(self.0)
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }
    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x517C_C1B7_2722_0A95);
    }
    fn write_u128(&mut self, number: u128) {
        self.0 ^= number as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::mix;

    #[test]
    fn neighbouring_placements_share_no_pattern() {
        // Any two of the XORs of pairs would collide often if the mix were linear.
        let mut sums = std::collections::HashSet::new();
        for a in 0..200u32 {
            for b in 0..a {
                sums.insert(mix(a * 4096, 4096) ^ mix(b * 4096, 4096));
            }
        }
        assert_eq!(sums.len(), 200 * 199 / 2);
    }
}
