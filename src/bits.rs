//! Layer 0: a set of small numbers whose least member is found in a few instructions.
//!
//! ```text
//!   top   |1.......|          a bit says that the word below is not empty
//!   words |..1.1...|........| a bit is a member
//! ```
//!
//! May import: nothing of this crate.

/// A set of `u32`, growing as it is filled; insert, remove and "next member from here" skip 4,096
/// absent numbers at a time.
#[derive(Clone, Debug, Default)]
pub(crate) struct BitSet {
    words: Vec<u64>,
    top: Vec<u64>,
    len: usize,
}

impl BitSet {
    /// How many members.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn contains(&self, number: u32) -> bool {
        self.words
            .get(number as usize / 64)
            .is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    pub fn insert(&mut self, number: u32) {
        let word = number as usize / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
            self.top.resize(word / 64 + 1, 0);
        }
        let bit = 1 << (number % 64);
        self.len += usize::from(self.words[word] & bit == 0);
        self.words[word] |= bit;
        self.top[word / 64] |= 1 << (word % 64);
    }

    pub fn remove(&mut self, number: u32) {
        let word = number as usize / 64;
        let bit = 1 << (number % 64);
        if self.words.get(word).is_none_or(|bits| bits & bit == 0) {
            return;
        }
        self.words[word] &= !bit;
        self.len -= 1;
        if self.words[word] == 0 {
            self.top[word / 64] &= !(1 << (word % 64));
        }
    }

    /// The least member that is at least `from`.
    pub fn next(&self, from: u32) -> Option<u32> {
        let mut word = from as usize / 64;
        let here = self.words.get(word)? & (u64::MAX << (from % 64));
        if here != 0 {
            return Some(Self::number(word, here));
        }
        word += 1;
        let mut group = word / 64;
        let mut groups = self.top.get(group)? & (u64::MAX << (word % 64));
        while groups == 0 {
            group += 1;
            groups = *self.top.get(group)?;
        }
        word = group * 64 + groups.trailing_zeros() as usize;
        Some(Self::number(word, self.words[word]))
    }

    /// The members in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let member = self.next(from)?;
            from = member + 1;
            Some(member)
        })
    }

    fn number(word: usize, bits: u64) -> u32 {
        u32::try_from(word * 64).expect("members are u32") + bits.trailing_zeros()
    }
}

#[cfg(test)]
mod tests {
    use super::BitSet;
    use std::collections::BTreeSet;

    #[test]
    fn agrees_with_an_ordered_set() {
        let mut bits = BitSet::default();
        let mut set = BTreeSet::new();
        let mut random = 1u32;
        for _ in 0..20_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = (random >> 8) % 9_000;
            if random & 1 == 0 {
                bits.insert(number);
                set.insert(number);
            } else {
                bits.remove(number);
                set.remove(&number);
            }
            assert_eq!(bits.next(number), set.range(number..).next().copied());
            assert_eq!(bits.contains(number), set.contains(&number));
            assert_eq!(bits.len(), set.len());
        }
        assert!(bits.iter().eq(set));
    }
}
