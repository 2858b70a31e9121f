//! Layer 0: hashing of places and states.
//!
//! A state's hash is the XOR of [`Key::mix`] over its live placements, so it is kept up to date in one
//! operation an event and does not depend on the order of events. Two states are taken for one when
//! their 128 bits agree; with 10⁶ states the chance that any two of them do by accident is below
//! 10⁻²⁶.
//!
//! Without a key that chance would say nothing: XOR is linear, so that of any 129 placements whose mixes
//! are known some have the mix of none at all, and a program could be made to keep just those. Each
//! compiler has a key of its own that no program can see.
//!
//! May import: nothing of this crate.

use std::hash::{BuildHasher, Hasher, RandomState};

/// What makes a compiler's hashes its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key([u64; 2]);

impl Key {
    /// Another one for each seed; without a seed a random one, from the source of the keys of
    /// [`HashMap`](std::collections::HashMap).
    pub fn new(seed: Option<u64>) -> Self {
        match seed {
            Some(seed) => Self([finalise(seed), finalise(!seed)]),
            None => {
                let random = RandomState::new();
                Self([0_u64, 1].map(|half| random.hash_one(half)))
            }
        }
    }

    /// 128 well mixed bits of a placement: two rounds of the finaliser of `MurmurHash3` (Appleby, public
    /// domain) for each half, with both halves of the key.
    pub fn mix(self, identity: u64, len: u32) -> u128 {
        let Self([first, second]) = self;
        let half = |identity: u64, first: u64, second: u64| {
            let identity = finalise(identity ^ first);
            finalise(identity ^ second.wrapping_add(u64::from(len)))
        };
        let low = half(identity, first, second);
        let high = half(identity.rotate_left(32), second, first.rotate_left(32));
        u128::from(high) << 64 | u128::from(low)
    }
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
    use std::collections::HashSet;

    use super::Key;

    #[test]
    fn neighbouring_placements_share_no_pattern() {
        // Any two of the XORs of pairs would collide often if the mix were linear.
        let key = Key::new(Some(1));
        let mut sums = HashSet::new();
        for a in 0..200_u64 {
            for b in 0..a {
                sums.insert(key.mix(a, 4096) ^ key.mix(b, 4096));
            }
        }
        assert_eq!(sums.len(), 200 * 199 / 2);
    }

    #[test]
    fn no_two_keys_identities_or_lengths_have_a_mix_in_common() {
        let keys = [
            Key::new(Some(1)),
            Key::new(Some(2)),
            Key::new(None),
            Key::new(None),
        ];
        let mut mixes = HashSet::new();
        for key in keys {
            for identity in (0..100).chain(u64::MAX - 100..=u64::MAX) {
                (0..50).for_each(|len| assert!(mixes.insert(key.mix(identity, len))));
            }
        }
        let halves: HashSet<u64> = mixes.iter().map(|&mix| mix as u64).collect();
        assert_eq!(halves.len(), mixes.len(), "by chance once in 10¹⁰ runs");
    }
}
